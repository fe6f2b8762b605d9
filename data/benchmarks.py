"""The table of multiple-choice benchmarks: files, schema of the rows, prompt in the harness.

A row function takes a raw row and returns a Row. It may raise KeyError for a row with other fields:
the caller turns that into a message with file and line.
"""

import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from data import prompts
from data.files import has_fields, json_list, one_of, require_fields, require_text, text_digest
from data.items import with_passage
from data.prompts import LETTERS, WORDING
from runtime.errors import DataError


class Row(NamedTuple):
    """A question as its file holds it."""
    question: str
    choices: list
    answer: object      # one of `labels`; an index from 0 too, unless the row has its own labels
    labels: list | str = LETTERS


# ---- Row functions -------------------------------------------------------------------------------

# the names of the columns of choices, in files with one column per choice
COLUMNS = ([f'option_{c}' for c in LETTERS.lower()],    # Global-MMLU
           [f'option {c}' for c in LETTERS.lower()],    # tables
           [f'option_{i}' for i in range(26)],          # MMLU-ProX
           [f'choice{i}' for i in range(26)],           # copies of MMLU
           list(LETTERS), list(LETTERS.lower()))        # CMMLU, with a header


def generic_row(row, pads=False):
    """MMLU and its relatives: question, answer, and choices in a list, {label: text} or COLUMNS.

    A row without names is that of MMLU's csv files. A choice that is null is absent, and those
    after it keep their letters. So is 'N/A' where it is padding: in a benchmark that `pads` with
    it, in rows with the field cot_content, and if it stands there twice.
    """
    if isinstance(row, list):
        if len(row) < 4:
            raise DataError(f'{len(row)} columns; wanted question, options and answer')
        return Row(row[0], row[1:-1], row[-1])
    row = require_fields(row)
    row = row | {name: json_list(row[name], f'"{name}"')       # in a cell of a table
                 for name in ('choices', 'options', 'classes')
                 if isinstance(row.get(name), str) and row[name].startswith('[')}
    if has_fields(row, 'input', 'target_scores'):       # BIG-bench
        return scored_row(row['input'], *zip(*row['target_scores'].items()))
    if has_fields(row, 'prompt', 'classes'):            # inverse scaling
        index = row['answer_index']
        return Row(row['prompt'], row['classes'],
                   LETTERS[index:index + 1] if type(index) is int else index)
    question, answer = (one_of(row, name, name.title()) for name in ('question', 'answer'))
    index = row.get('answer_index')
    if type(index) is int:      # by its name it counts from 0
        letter = LETTERS[index:index + 1]
        if answer is not None and str(answer).strip() not in (str(index), letter):
            raise DataError(f'"answer" and "answer_index" of the row differ: {answer!r:.60} and '
                            f'{index}; keep one of them')
        answer = letter or index
    name, options = _choices(row)
    if isinstance(options, dict) and not any(isinstance(x, (list, dict)) for x in options.values()):
        return labeled_row(row, question, {k: x for k, x in options.items() if x is not None})
    if name == 'choices' or not isinstance(options, list):
        return Row(with_passage(row, question), options, answer)
    pads = pads or 'cot_content' in row or options.count('N/A') > 1
    present = {letter: option for letter, option in zip(LETTERS, options)
               if option is not None and not (pads and option == 'N/A')}
    labels = LETTERS if ''.join(present) == LETTERS[:len(present)] else list(present)
    return Row(with_passage(row, question), list(present.values()), answer, labels)


def labeled_row(row, question, options):
    """MedQA: options {label: text}; the answer is a label, or a text beside its label."""
    answers = {name: row[name] for name in ('answer', 'answer_idx') if row.get(name) is not None}
    texts = {name: options.get(str(answer), answer) for name, answer in answers.items()}
    text = one_of(texts, *texts)
    labels = [str(answer) for answer in answers.values() if str(answer) in options] + [
        label for label, option in options.items() if option == text]
    return Row(with_passage(row, question), [*options.values()], (labels or [text])[0], [*options])


def _choices(row):
    """Return (name of the field, choices) of a row or (None, None); raise DataError for two lists
    that differ by more than absent ones.
    """
    lists = {'choices': row.get('choices')}
    for names in COLUMNS:
        if row.get(names[0]) is not None:
            cells = [row.get(name) for name in names]       # an absent one is '' in a table, or NaN
            lists[names[0]] = [cell if cell == cell and cell != '' else None for cell in cells]
    lists['options'] = row.get('options')
    present = {name: [choice for choice in choices if choice not in (None, 'N/A')]
               if isinstance(choices, list) else choices for name, choices in lists.items()}
    one_of(present, *present)
    return next(((name, x) for name, x in lists.items() if x is not None), (None, None))


padded_row = functools.partial(generic_row, pads=True)      # MMLU-Pro and MMLU-ProX


def scored_row(question, choices, scores):
    """Return the Row of choices with a score each; the highest is that of the answer. The order
    depends on the texts alone, since such files often begin with the right choice.
    """
    if len(scores) != len(choices) or not all(
            type(score) in (int, float) and math.isfinite(score) for score in scores):
        raise DataError(f'wanted one number for each of {len(choices)} choices, not {scores!r:.60}')
    if scores.count(max(scores)) != 1:
        raise DataError(f'{scores.count(max(scores))} choices have the highest score; wanted one')
    order = sorted(range(len(choices)), key=lambda i: text_digest(question, choices[i]))
    return Row(question, [choices[i] for i in order],
               LETTERS[order.index(scores.index(max(scores)))])


def truthfulqa_row(row):
    """TruthfulQA mc1, on the hub {choices, labels} and as first published {choice: label}."""
    targets = row['mc1_targets']
    if 'labels' not in targets:
        targets = {'choices': [*targets], 'labels': [*targets.values()]}
    return scored_row(row['question'], targets['choices'], targets['labels'])


def arc_row(row):
    """ARC and OpenBookQA, on the hub and as first published: 3 to 5 labeled choices."""
    question, choices = one_of(row, 'question', 'question_stem'), row.get('choices')
    if isinstance(question, dict):
        choices = {key: [choice[key] for choice in question['choices']]
                   for key in ('text', 'label')}
        question = question['stem']
    return Row(question, choices['text'], row.get('answerKey'), choices['label'])


def hellaswag_row(row):
    """HellaSwag, without WikiHow's markup, as the harness cleans it."""
    def clean(text):
        return re.sub(r'\[.*?\]', '', text.strip().replace(' [title]', '. ')).replace('  ', ' ')

    activity, start, end = (require_text(row.get(name, ''), f'the field "{name}"')
                            for name in ('activity_label', 'ctx_a', 'ctx_b'))
    return Row(clean(f'{activity}: {start} {end.capitalize()}'),
               [clean(ending) for ending in row['endings']], row.get('label'))


def winogrande_row(row):
    """WinoGrande: which of two options belongs at the '_' of the sentence."""
    return Row(row['sentence'], [row['option1'], row['option2']], row['answer'], '12')


def piqa_row(row):
    return Row(row['goal'], [row['sol1'], row['sol2']], row['label'])


def boolq_row(row):
    """BoolQ of SuperGLUE (label: 0 is no, 1 is yes) and as first published (answer: Boolean)."""
    answer = one_of(row, 'label', 'answer')     # 1 and True are equal
    answer = int(answer) if isinstance(answer, bool) else answer
    return Row(f'{row["passage"]}\nQuestion: {row["question"]}?', ['no', 'yes'], answer)


def xcopa_row(row):
    """XCOPA: which of two choices was the cause or the effect of the premise."""
    asks = {'cause': 'What was the cause of this?', 'effect': 'What happened as a result?'}
    return Row(f'{row["premise"].strip()}\n{asks[row["question"]]}',
               [row['choice1'], row['choice2']], row.get('label'))


# ---- The table -----------------------------------------------------------------------------------

@dataclass
class Benchmark:
    """A benchmark. {lang} in a pattern stands for one of `languages`."""
    hub: str                    # the hub dataset
    test: tuple                 # patterns of the files to score
    shots: tuple                # patterns of the files with solved questions
    row: Callable = generic_row         # raw row -> Row
    harness: Callable | None = None     # Item -> Prompt of lm-eval; None: it scores no options
    validation: tuple = ()      # to fit a temperature on; neither scored nor used as shots
    languages: tuple = ()
    subject: str = 'various things'     # for the header, if rows and files name no subject
    native: Callable | None = None      # Item -> (header, word before the answer) in its language
    continues: bool = False     # whether the choices continue the sentence of the question
    subject_files: bool = False         # whether the subject is the name of the file or its folder
    prompt: Callable | None = None      # Item -> Prompt of --prompt_format=own; None: it has none


def _files(split, *others):
    """Return the patterns of a split of a multilingual benchmark, on the hub and as plain files."""
    return tuple(pattern.format(s) for s in (split, *others) for pattern in (
        '{{lang}}/{}-*.parquet', '{{lang}}/{}.jsonl*', '{{lang}}_{}*.jsonl*', '{}.{{lang}}.jsonl*'))


def _arc(name):
    def split(hub, published):
        return f'{name}/{hub}-*.parquet', f'{name}-{hub}.jsonl*', f'**/{name}-{published}.jsonl'
    return Benchmark('allenai/ai2_arc', split('test', 'Test'), split('train', 'Train'), arc_row,
                     prompts.harness_question, split('validation', 'Dev'), subject='science')


def _winogrande(size):
    # the labels of the test split are not published; the sizes share their validation split
    folder = f'winogrande_{size}'
    return Benchmark(
        'allenai/winogrande', (f'{folder}/validation-*.parquet', 'validation.jsonl*', 'dev.jsonl*'),
        (f'{folder}/train-*.parquet', f'train_{size}.jsonl*', 'train.jsonl*'), winogrande_row,
        prompts.harness_winogrande, subject='common sense')


def _global_mmlu(name, languages):
    return Benchmark(f'CohereLabs/Global-MMLU{name}', _files('test'), _files('dev'), generic_row,
                     prompts.harness_letters, languages=tuple(languages.split()))


def _mmlu_prox(name, *test):
    return Benchmark(f'li-lab/MMLU-ProX{name}', _files(*test), _files('validation'), padded_row,
                     languages=tuple(sorted(WORDING['headers'])), native=prompts.mmlu_prox_words)


BENCHMARKS = {
    'mmlu': Benchmark(
        'cais/mmlu', ('all/test-*.parquet', 'test.jsonl*', 'test/*_test.csv', '*_test.csv'),
        ('all/dev-*.parquet', 'dev.jsonl*', 'dev/*_dev.csv', '*_dev.csv'), generic_row,
        prompts.harness_mmlu, ('all/validation-*.parquet', 'validation.jsonl*', 'val/*_val.csv')),
    'arc_easy': _arc('ARC-Easy'),
    'arc_challenge': _arc('ARC-Challenge'),
    # the labels of the test split are not published; nor are those of BoolQ and PIQA
    'hellaswag': Benchmark(
        'Rowan/hellaswag', ('data/validation-*.parquet', 'hellaswag_val*.jsonl*'),
        ('data/train-*.parquet', 'hellaswag_train*.jsonl*'), hellaswag_row, prompts.harness_text,
        subject='everyday situations', continues=True),
    'openbookqa': Benchmark(
        'allenai/openbookqa', ('main/test-*.parquet', 'test.jsonl*'),
        ('main/train-*.parquet', 'train.jsonl*'), arc_row, prompts.harness_openbookqa,
        ('main/validation-*.parquet', 'validation.jsonl*', 'dev.jsonl*'),
        subject='elementary science'),
    'winogrande_s': _winogrande('s'),
    'winogrande_m': _winogrande('m'),
    'winogrande_xl': _winogrande('xl'),
    'boolq': Benchmark(
        'aps/super_glue', ('boolq/validation-*.parquet', 'data/validation-*.parquet',
                           'validation.jsonl*', 'val.jsonl*', 'dev.jsonl*'),
        ('boolq/train-*.parquet', 'data/train-*.parquet', 'train.jsonl*'), boolq_row,
        prompts.harness_boolq, subject='passages of text'),
    'piqa': Benchmark(
        'baber/piqa', ('piqa_validation.parquet', 'plain_text/validation-*.parquet',
                       'validation.jsonl*'),
        ('piqa_train.parquet', 'plain_text/train-*.parquet', 'train.jsonl*'), piqa_row,
        prompts.harness_question, subject='everyday tasks'),
    # without shots, by convention: there is no other split
    'truthfulqa_mc1': Benchmark(
        'truthfulqa/truthful_qa', ('multiple_choice/validation-*.parquet', 'validation.jsonl*',
                                   'mc_task.json'),
        (), truthfulqa_row, prompts.harness_truthfulqa),
    'global_mmlu': _global_mmlu('', 'am ar bn cs de el en es fa fil fr ha he hi id ig it ja ko ky '
                                'lt mg ms ne nl ny pl pt ro ru si sn so sr sv sw te tr uk vi yo '
                                'zh'),
    'global_mmlu_lite': _global_mmlu('-Lite', 'ar bn de en es fr hi id it ja ko my pt sw yo zh'),
    'mmlu_prox': _mmlu_prox('', 'test'),
    'mmlu_prox_lite': _mmlu_prox('-Lite', 'test', 'lite'),
    'mmlu_pro': Benchmark('TIGER-Lab/MMLU-Pro', ('data/test-*.parquet', 'test.jsonl*'),
                          ('data/validation-*.parquet', 'validation.jsonl*'), padded_row),
    'cmmlu': Benchmark(
        'haonan-li/cmmlu', ('*/test-*.parquet', 'test/*.csv', '**/test/*.csv', '*.zip'),
        ('*/dev-*.parquet', 'dev/*.csv', '**/dev/*.csv', '*.zip'), generic_row,
        prompts.harness_cmmlu, native=prompts.cmmlu_words, subject_files=True),
    'xcopa': Benchmark('cambridgeltl/xcopa', _files('test'), _files('validation', 'val'),
                       xcopa_row, prompts.harness_xcopa,
                       languages=tuple(sorted(WORDING['xcopa'])), subject='causes and effects'),
}
# any file or folder of {question, choices, answer[, subject, language, id]}
GENERIC = Benchmark('', ('test.jsonl*', 'test-*.parquet', 'test.csv', 'data/test-*.parquet',
                         '*.jsonl', '*.jsonl.gz', '*.parquet', '*.csv', 'task.json', '*.json'),
                    ('dev.jsonl*', 'dev*.parquet', '*_dev.csv', 'dev.csv'), generic_row,
                    prompts.harness_generic, ('validation.jsonl*', '*validation-*.parquet'))

# MMLU's four groups of subjects
CATEGORY = {subject: category for category, subjects in WORDING['mmlu_categories'].items()
            for subject in subjects.split()}
