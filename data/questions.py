"""Multiple-choice benchmarks: read questions from files in their published schemas.

To add a benchmark, add a line to TASKS and, if its rows have a new schema, a case to `parse_row`.
"""

import difflib
import functools
import hashlib
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from data.files import draw, fetch, parse_rows, read_rows, require_fields, require_text
from data.prompts import LETTERS, P_TRUE, WORDING, Prompt
from runtime.errors import DataError


@dataclass
class Benchmark:
    """Where the files of a benchmark are, and its prompt format in lm-evaluation-harness.

    {lang} in a pattern stands for one of `languages`.
    """
    hub: str                    # the hub dataset
    test: tuple                 # patterns of the files to score
    shots: tuple                # of the files with solved questions
    # The format of its task in lm-evaluation-harness, for `Prompt` with --preset=harness:
    #   'letters'                letters as options, after MMLU's header
    #   'no header'              letters as options, no header
    #   'text'                   the text of the choices as options, no header
    #   'arc'                    the same after 'Question: '
    #   'stem'                   the same, as what follows the bare question
    #   'winogrande'             the end of the sentence after each option in the blank
    #   'boolq', 'xcopa', 'cmmlu'    the format of that task alone
    #   ''                       no multiple-choice version: the model writes its answer
    harness: str
    validation: tuple = ()      # to fit a temperature on; neither scored nor used as shots
    languages: tuple = ()
    subject: str = 'various things'     # for the header, if rows and files name no subject


def _files(split, *others):
    """Return the patterns of a split of a multilingual benchmark, on the hub and as plain files."""
    return tuple(pattern.format(s, lang='{lang}') for s in (split, *others) for pattern in (
        '{lang}/{}-*.parquet', '{lang}/{}.jsonl*', '{lang}_{}*.jsonl*', '{}.{lang}.jsonl*'))


def _arc(name):
    def split(hub, published):
        return f'{name}/{hub}-*.parquet', f'{name}-{hub}.jsonl*', f'**/{name}-{published}.jsonl'
    return Benchmark('allenai/ai2_arc', split('test', 'Test'), split('train', 'Train'), 'arc',
                     validation=split('validation', 'Dev'), subject='science')


def _winogrande(size):
    # the labels of the test split are not published; all sizes have one validation split
    return Benchmark('allenai/winogrande',
                     (f'winogrande_{size}/validation-*.parquet', 'validation.jsonl*', 'dev.jsonl*'),
                     (f'winogrande_{size}/train-*.parquet', f'train_{size}.jsonl*',
                      'train.jsonl*'), 'winogrande', subject='common sense')


GLOBAL_MMLU = tuple('am ar bn cs de el en es fa fil fr ha he hi id ig it ja ko ky lt mg ms ne nl '
                    'ny pl pt ro ru si sn so sr sv sw te tr uk vi yo zh'.split())
MMLU_PROX = tuple(sorted(WORDING['headers']))
TASKS = {
    'mmlu': Benchmark('cais/mmlu',
                      ('all/test-*.parquet', 'test.jsonl*', 'test/*_test.csv', '*_test.csv'),
                      ('all/dev-*.parquet', 'dev.jsonl*', 'dev/*_dev.csv', '*_dev.csv'), 'letters',
                      ('all/validation-*.parquet', 'validation.jsonl*', 'val/*_val.csv')),
    'arc_easy': _arc('ARC-Easy'),
    'arc_challenge': _arc('ARC-Challenge'),
    # the labels of the test split are not published
    'hellaswag': Benchmark('Rowan/hellaswag',
                           ('data/validation-*.parquet', 'hellaswag_val*.jsonl*'),
                           ('data/train-*.parquet', 'hellaswag_train*.jsonl*'), 'text',
                           subject='everyday situations'),
    'openbookqa': Benchmark('allenai/openbookqa', ('main/test-*.parquet', 'test.jsonl*'),
                            ('main/train-*.parquet', 'train.jsonl*'), 'stem',
                            ('main/validation-*.parquet', 'validation.jsonl*', 'dev.jsonl*'),
                            subject='elementary science'),
    'winogrande_s': _winogrande('s'),
    'winogrande_m': _winogrande('m'),
    'winogrande_xl': _winogrande('xl'),
    # of BoolQ and PIQA, too, the labels of the test split are not published
    'boolq': Benchmark('aps/super_glue', ('boolq/validation-*.parquet', 'data/validation-*.parquet',
                                          'validation.jsonl*', 'val.jsonl*', 'dev.jsonl*'),
                       ('boolq/train-*.parquet', 'data/train-*.parquet', 'train.jsonl*'), 'boolq',
                       subject='passages of text'),
    'piqa': Benchmark('baber/piqa', ('piqa_validation.parquet', 'plain_text/validation-*.parquet',
                                     'validation.jsonl*'),
                      ('piqa_train.parquet', 'plain_text/train-*.parquet', 'train.jsonl*'), 'arc',
                      subject='everyday tasks'),
    'global_mmlu': Benchmark('CohereLabs/Global-MMLU', _files('test'), _files('dev'), 'no header',
                             languages=GLOBAL_MMLU),
    'global_mmlu_lite': Benchmark('CohereLabs/Global-MMLU-Lite', _files('test'), _files('dev'),
                                  'no header', languages=tuple(
                                      'ar bn de en es fr hi id it ja ko my pt sw yo zh'.split())),
    'mmlu_prox': Benchmark('li-lab/MMLU-ProX', _files('test'), _files('validation'), '',
                           languages=MMLU_PROX),
    'mmlu_prox_lite': Benchmark('li-lab/MMLU-ProX-Lite', _files('test', 'lite'),
                                _files('validation'), '', languages=MMLU_PROX),
    'mmlu_pro': Benchmark('TIGER-Lab/MMLU-Pro', ('data/test-*.parquet', 'test.jsonl*'),
                          ('data/validation-*.parquet', 'validation.jsonl*'), ''),
    'cmmlu': Benchmark('haonan-li/cmmlu',
                       ('*/test-*.parquet', 'test/*.csv', '**/test/*.csv', '*.zip'),
                       ('*/dev-*.parquet', 'dev/*.csv', '**/dev/*.csv', '*.zip'), 'cmmlu'),
    'xcopa': Benchmark('cambridgeltl/xcopa', _files('test'), _files('validation', 'val'), 'xcopa',
                       languages=tuple(sorted(WORDING['xcopa'])), subject='causes and effects'),
}
# any file or folder of {question, choices, answer[, subject, language, id]}
GENERIC = Benchmark('', ('test.jsonl*', '*.jsonl', '*.jsonl.gz', '*.parquet', '*.csv'),
                    ('dev.jsonl*', 'dev*.parquet', '*_dev.csv'), 'letters', ('validation.jsonl*',))

CATEGORIES = {      # MMLU's four groups of subjects
    'STEM': 'abstract_algebra anatomy astronomy college_biology college_chemistry '
            'college_computer_science college_mathematics college_physics computer_security '
            'conceptual_physics electrical_engineering elementary_mathematics high_school_biology '
            'high_school_chemistry high_school_computer_science high_school_mathematics '
            'high_school_physics high_school_statistics machine_learning',
    'humanities': 'formal_logic high_school_european_history high_school_us_history '
                  'high_school_world_history international_law jurisprudence logical_fallacies '
                  'moral_disputes moral_scenarios philosophy prehistory professional_law '
                  'world_religions',
    'social sciences': 'econometrics high_school_geography high_school_government_and_politics '
                       'high_school_macroeconomics high_school_microeconomics '
                       'high_school_psychology human_sexuality professional_psychology '
                       'public_relations security_studies sociology us_foreign_policy',
    'other': 'business_ethics clinical_knowledge college_medicine global_facts human_aging '
             'management marketing medical_genetics miscellaneous nutrition '
             'professional_accounting professional_medicine virology',
}
CATEGORY = {subject: name for name, subjects in CATEGORIES.items() for subject in subjects.split()}


@dataclass
class Question:
    """One question as text. The prompt is header + shots + context + one of the options + ending.
    """
    id: str
    context: str                # ends where an option begins
    options: list[str]          # each begins with a space, unless `ending` is given
    answer: int                 # index of the correct option
    subject: str
    header: str = ''            # empty, or ends in a blank line
    category: str = ''
    language: str = ''
    duplicate_options: bool = False     # two of the choices are the same text
    place: str = ''             # file and line or row, for messages
    ending: str = ''            # follows each option, and then only this is scored (WinoGrande)
    digest: str = ''            # hash of the question's own text and choices, without the prompt

    @property
    def solved(self):
        """Return the question with its answer, as a shot."""
        return f'{self.context}{self.options[self.answer]}{self.ending}\n\n'

    @property
    def parts(self):
        """Return [self]; with an ending, for each option the question whose one option is that."""
        if not self.ending:
            return [self]
        texts = [self.context + option for option in self.options]
        # as in lm-evaluation-harness, white space before the ending is scored with it
        return [replace(self, context=text.rstrip(), ending='',
                        options=[text[len(text.rstrip()):] + self.ending]) for text in texts]

    @property
    def group(self):
        """Return the group of questions that share their shots."""
        return self.language, self.subject

    def proposing(self, k):
        """Return the question whether option k is right: (A), True, or (B), False."""
        context = re.sub(r'\bAnswer:$', 'Proposed Answer:', self.context)
        return replace(self, context=f'{context}{self.options[k]}{self.ending}{P_TRUE}',
                       options=[' (A)', ' (B)'], answer=int(k != self.answer), ending='')


class Loaded(NamedTuple):
    """The questions of a task, its shots, and what could not be read."""
    questions: list     # of Question
    shots: dict         # Question.group -> solved questions
    bad: list           # messages of bad rows
    total: int          # number of questions before `limit`


def load_task(name, *, preset='mmlu', scoring='auto', header='english', languages=('all',), shots=0,
              limit=None, seed=0, revision=None, on_bad_row='stop', split='test'):
    """Return Loaded(questions, shots, bad, total) of the task `name`.

    name:      a task ('mmlu', from the hub), a task with a place ('mmlu:folder-or-file'), or a file
               or folder of generic rows
    preset:    'mmlu' or 'harness', see data/prompts.py
    scoring:   'letters' or 'text'; 'auto': letters with preset 'mmlu', the harness's choice with
               preset 'harness'
    header:    'english', or 'native' if the benchmark publishes one in the question's language
    languages: of a multilingual benchmark; 'all': all that it has, or those in the local folder
    shots:     number of solved questions per subject, the first ones of the shots split
    limit:     at most this many questions per language, drawn by `seed` evenly over the subjects
    split:     'test' or 'validation'; a missing validation split has no questions
    on_bad_row: 'stop' raises DataError for a row without a valid answer; 'skip' returns its message
    """
    task, benchmark, source = _find(name)
    is_file = os.path.isfile(source)
    if shots and is_file:
        raise DataError(f'{shots} shots wanted, but {source} is one file: give a folder that also '
                        f'holds {" or ".join(benchmark.shots)}, or --shots=0')
    prompt = Prompt(task, benchmark.harness, preset, scoring, header)
    questions, examples, bad = [], [], []

    def read(split, language):
        rows = (row for file in _files_of(benchmark, source, split, language, revision)
                for row in read_rows(file))
        parse = functools.partial(_to_question, benchmark, prompt, language)
        items, messages = parse_rows(rows, parse, on_bad_row)
        bad.extend(messages)
        return items

    for language in _languages(benchmark, source, task, languages):
        questions += read(split, language)
        examples += read('shots', language) if shots else []
    if not questions and split == 'test':
        raise DataError(f'{source} has no questions ({len(bad)} bad rows)')
    rows_name_languages = benchmark is GENERIC or benchmark.languages and is_file
    if rows_name_languages and 'all' not in languages:
        if split == 'test':
            _require_languages(languages, {q.language for q in questions} - {''}, source)
        questions = [q for q in questions if q.language in languages]
    total, questions = len(questions), draw(questions, limit, seed)
    solved = {}
    for question in examples:
        solved.setdefault(question.group, []).append(question)
    for group in {q.group for q in questions} if shots else ():
        if len(solved.get(group, [])) < shots:
            raise DataError(f'{source}: {len(solved.get(group, []))} solved questions about '
                            f'{group[1]!r}, {shots} wanted; '
                            f'--shots={len(solved.get(group, []))} would fit')
    return Loaded(questions, {group: qs[:shots] for group, qs in solved.items()}, bad, total)


# after the message that a folder holds no file of a split
HINTS = {'test': '--tasks=help lists the names that each task looks for',
         'shots': 'solved questions are needed for shots (--shots=0 asks without) and for training'}


def _find(name):
    """Return (task, its Benchmark, the place of its files) of a name as `load_task` takes it."""
    task, _, place = name.partition(':')
    benchmark = TASKS.get(task, GENERIC)
    if benchmark is GENERIC:
        task, place = '', name
        if not os.path.exists(os.path.expanduser(place)):
            raise DataError(f'no task, file or folder {name!r}; the tasks are {", ".join(TASKS)}, '
                            f'each also as task:folder')
    return task, benchmark, os.path.expanduser(place) or benchmark.hub


def solved_files(name, revision=None):
    """Return (files of a task's solved questions, to_question) to train on, in every language.

    They are the training split where shots come from it, as in ARC, HellaSwag, OpenBookQA,
    WinoGrande, BoolQ and PIQA. to_question(row, place) returns the Question by letters.
    """
    task, benchmark, source = _find(name)
    files = [file for language in _languages(benchmark, source, task, ['all'])
             for file in _files_of(benchmark, source, 'shots', language, revision)]
    prompt = Prompt(task, benchmark.harness)
    return files, lambda row, place: _to_question(benchmark, prompt, '', row, place, 0)


def _files_of(benchmark, source, split, language, revision):
    """Return the files of a split in a language; none if there is no validation split."""
    patterns, folder = _patterns(benchmark, split, language), Path(source)
    if split == 'validation' and (not patterns or folder.is_file()
                                  or folder.is_dir() and not _holds(folder, patterns)):
        return []
    try:
        files = fetch(source, patterns, revision)
    except DataError as error:
        if not folder.is_dir():
            raise
        raise DataError(f'{error}; {HINTS[split]}') from error
    if benchmark is GENERIC and split == 'test':    # its patterns match the other splits too
        others = {file for pattern in benchmark.shots + benchmark.validation
                  for file in folder.glob(pattern)}
        files = [file for file in files if file not in others]
    return files


def _patterns(benchmark, split, language):
    return tuple(p.replace('{lang}', language) for p in getattr(benchmark, split))


def _holds(folder, patterns):
    return any(any(folder.glob(pattern)) for pattern in patterns)


def _languages(benchmark, source, task, wanted):
    """Return the languages to read, [''] if the benchmark has none or its rows name them."""
    if not benchmark.languages:
        return ['']
    _require_languages(wanted, benchmark.languages, task)
    wanted = list(dict.fromkeys(wanted))
    if os.path.isfile(source):
        return wanted if len(wanted) == 1 and wanted != ['all'] else ['']
    if 'all' not in wanted:
        return wanted
    if not os.path.isdir(source):
        return benchmark.languages
    return [language for language in benchmark.languages
            if _holds(Path(source), _patterns(benchmark, 'test', language))
            ] or ['{lang}']     # whose patterns `fetch` will not find and name


def _require_languages(wanted, known, source):
    for language in wanted:
        if language in known or language == 'all':
            continue
        if not known:
            raise DataError(f'{source} has no language {language!r}: its rows have no field '
                            f'"language"; leave out --languages')
        near = difflib.get_close_matches(language, sorted(known), 1)
        hint = f'did you mean {near[0]!r}? It' if near else 'it'
        raise DataError(f'{source} has no language {language!r}; {hint} has '
                        f'{", ".join(sorted(known))}')


def _to_question(benchmark, prompt, language, row, place, number):
    text, choices, answer = parse_row(row)
    fields = row if isinstance(row, dict) else {}
    id = next((fields[key] for key in ('id', 'ind', 'sample_id', 'question_id', 'idx', 'qID')
               if fields.get(key) is not None), number)
    subject = str(fields.get('subject') or fields.get('category')
                  or _subject_of_file(Path(place.rpartition(':')[0]), prompt.task)
                  or benchmark.subject)
    category = str(fields.get('subject_category') or CATEGORY.get(subject, ''))
    language = language or str(fields.get('language') or '')
    for name, value in (('id', str(id)), ('subject', subject), ('category', category),
                        ('language', language)):
        require_text(value, f'the {name}')
    context, options = prompt.format(row, text, choices, language)
    duplicates = len({choice.strip() for choice in choices}) < len(choices)
    digest = hashlib.blake2b(repr((text, choices)).encode(), digest_size=8).hexdigest()
    return Question(str(id), context, options, answer, subject, prompt.header(subject, language),
                    category, language, duplicates, place, prompt.ending(text), digest)


def _subject_of_file(file, task):
    """Return the subject from the name of the file, or '' if it has none."""
    if match := re.match(r'(.+?)_(?:test|dev|val)\.csv', file.name):
        return match[1]
    if task == 'cmmlu':
        return file.name.removesuffix('.csv') if '.csv' in file.name else file.parent.name
    return ''


def parse_row(row):
    """Return (question, choices, index of the answer) of a row in a known schema; raises DataError.

    list of strings                     MMLU's headerless csv: question, options, letter
    endings, ctx_a, ctx_b, label        HellaSwag, cleaned as usual
    premise, question, choice1, choice2 XCOPA: which was the cause or the effect
    sentence, option1, option2, answer  WinoGrande: which of the two belongs at the '_'
    goal, sol1, sol2, label             PIQA
    passage, question, label or answer  BoolQ: 0 or False is no, 1 or True is yes
    choices: {text, label}, answerKey   ARC and OpenBookQA (question_stem) on the hub: 3 to 5
                                        options, letters or digits
    question: {stem, choices}           ARC and OpenBookQA as first published
    option_a, ..., or option_0, ...     Global-MMLU, MMLU-ProX; an option that is null is absent
    a, b, c, d, answer                  CMMLU, upper or lower case; choice0, ... in copies of MMLU
    options, answer                     MMLU-Pro, without its 'N/A'
    question, choices, answer           MMLU on the hub, and generic: an index or a letter
    """
    labels = LETTERS
    if isinstance(row, list):
        if len(row) < 4:
            raise DataError(f'{len(row)} columns; wanted question, options and answer')
        question, choices, answer = row[0], row[1:-1], row[-1]
    elif 'endings' in require_fields(row):
        label, a, b = (require_text(row.get(key, ''), f'the field "{key}"')
                       for key in ('activity_label', 'ctx_a', 'ctx_b'))
        question = _hellaswag_clean(f'{label}: {a} {b.capitalize()}')
        choices, answer = [_hellaswag_clean(x) for x in row['endings']], row.get('label')
    elif 'premise' in row:
        asks = {'cause': 'What was the cause of this?', 'effect': 'What happened as a result?'}
        question = f'{row["premise"].strip()}\n{asks[row["question"]]}'
        choices, answer = [row['choice1'], row['choice2']], row.get('label')
    elif 'option1' in row:
        question, choices = row['sentence'], [row['option1'], row['option2']]
        answer, labels = row['answer'], '12'
    elif 'sol1' in row:
        question, choices, answer = row['goal'], [row['sol1'], row['sol2']], row['label']
    elif 'passage' in row and _options(row)[0] is None:
        question, choices = f'{row["passage"]}\nQuestion: {row["question"]}?', ['no', 'yes']
        answer = row.get('label', row.get('answer'))
        answer = int(answer) if isinstance(answer, bool) else answer
    elif isinstance(row.get('question'), dict):
        question, parts = row['question'].get('stem'), row['question'].get('choices') or []
        choices, labels = [p['text'] for p in parts], [p['label'] for p in parts]
        answer = row.get('answerKey')
    elif isinstance(row.get('choices'), dict):
        question, answer = row.get('question', row.get('question_stem')), row.get('answerKey')
        choices, labels = row['choices'].get('text'), row['choices'].get('label')
    else:
        question = row.get('question', row.get('Question'))
        answer = row.get('answer', row.get('Answer'))
        choices, labels = _options(row)
    if not question or not require_text(question, 'the question').strip():
        raise DataError('no question' + (f' among the fields {", ".join(map(str, row))}'
                                         if isinstance(row, dict) else ''))
    if not isinstance(choices, (list, tuple)) or not 2 <= len(choices) <= len(LETTERS):
        raise DataError(f'a question needs 2 to {len(LETTERS)} choices')
    choices = [_choice(choice, letter) for choice, letter in zip(choices, LETTERS)]
    return question, choices, _index(answer, list(labels[:len(choices)]))


def _choice(value, letter):
    if value is None or value != value:     # NaN is how pandas writes null
        raise DataError(f'choice {letter} is null')
    if isinstance(value, (int, float)):
        value = str(value)
    if not require_text(value, f'choice {letter}').strip():
        raise DataError(f'choice {letter} is empty')
    return value


def _options(row):
    """Return (choices, their letters) of a row with one of the naming schemes."""
    if row.get('choices') is not None:
        return row['choices'], LETTERS
    for names in ([f'option_{c}' for c in LETTERS.lower()], [f'option_{i}' for i in range(26)],
                  [f'choice{i}' for i in range(26)], LETTERS, LETTERS.lower()):
        if row.get(names[0]) is not None:
            options = [row.get(name) for name in names]
            break
    else:
        options = row.get('options')
        if not isinstance(options, list):
            return None, LETTERS
    # an option keeps its letter if one before it is absent
    present = [(option, letter) for option, letter in zip(options, LETTERS)
               if option is not None and option != 'N/A']
    return [option for option, _ in present], [letter for _, letter in present]


def _index(answer, labels):
    """Return the index of an answer given as an index, a label, or the digits of an index."""
    index = answer.strip() if isinstance(answer, str) else answer
    if isinstance(index, str) and index in labels:
        return labels.index(index)
    if labels == list(LETTERS[:len(labels)]):
        if isinstance(index, str) and re.fullmatch('[0-9]{1,2}', index):
            index = int(index)
        if type(index) is int and 0 <= index < len(labels):
            return index
    raise DataError(f'no valid answer: {answer!r}; wanted one of {", ".join(labels)} '
                    f'or an index from 0 to {len(labels) - 1}')


def _hellaswag_clean(text):
    text = re.sub(r'\[.*?\]', '', text.strip().replace(' [title]', '. '))
    return text.replace('  ', ' ')
