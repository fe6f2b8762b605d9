"""Multiple-choice benchmarks: files in their published schemas to questions, questions to prompts.

Two presets. `mmlu` is MMLU's prompt for every task, as in the papers: a header that names the
subject, solved questions ('shots'), then the question; options are scored as letters (` A` after
`Answer:`) or as their full text. `harness` is what lm-evaluation-harness 0.4 asks for each task.
"""

import difflib
import json
import re
import string
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from data import DataError, draw, fetch, local_path, parse_rows, read_rows, require_text

HEADER = 'The following are multiple choice questions (with answers) about {}.'
LETTERS = string.ascii_uppercase
# words that benchmarks publish in other languages: MMLU-ProX's headers, CMMLU's names of subjects,
# XCOPA's connectives
WORDING = json.loads((Path(__file__).parent / 'wording.json').read_text(encoding='utf-8'))


@dataclass
class Task:
    """Where a benchmark lives: hub dataset, files to score, files the shots come from.

    In the patterns {lang} stands for one of `languages`.
    """
    hub: str
    test: tuple
    shots: tuple
    validation: tuple = ()      # questions to fit a temperature on, if neither scored nor shots
    languages: tuple = ()
    subject: str = 'various things'     # for the header, where rows carry no subject of their own
    # in lm-evaluation-harness: 'letters' with or without MMLU's header, or a format of its own
    harness: str = 'letters'


def _files(split, *others):
    """Patterns of a split of a multilingual benchmark, on the hub and as plain files."""
    return tuple(pattern.format(s, lang='{lang}') for s in (split, *others) for pattern in (
        '{lang}/{}-*.parquet', '{lang}/{}.jsonl*', '{lang}_{}*.jsonl*', '{}.{lang}.jsonl*'))


def _arc(name):
    def split(hub, published):
        return f'{name}/{hub}-*.parquet', f'{name}-{hub}.jsonl*', f'**/{name}-{published}.jsonl'
    return Task('allenai/ai2_arc', split('test', 'Test'), split('train', 'Train'),
                split('validation', 'Dev'), subject='science', harness='arc')


GLOBAL_MMLU = tuple('am ar bn cs de el en es fa fil fr ha he hi id ig it ja ko ky lt mg ms ne nl '
                    'ny pl pt ro ru si sn so sr sv sw te tr uk vi yo zh'.split())
TASKS = {
    'mmlu': Task('cais/mmlu',
                 ('all/test-*.parquet', 'test.jsonl*', 'test/*_test.csv', '*_test.csv'),
                 ('all/dev-*.parquet', 'dev.jsonl*', 'dev/*_dev.csv', '*_dev.csv'),
                 ('all/validation-*.parquet', 'validation.jsonl*', 'val/*_val.csv')),
    'arc_easy': _arc('ARC-Easy'),
    'arc_challenge': _arc('ARC-Challenge'),
    # the test split has no published labels
    'hellaswag': Task('Rowan/hellaswag', ('data/validation-*.parquet', 'hellaswag_val*.jsonl*'),
                      ('data/train-*.parquet', 'hellaswag_train*.jsonl*'),
                      subject='everyday situations', harness='text'),
    'global_mmlu': Task('CohereLabs/Global-MMLU', _files('test'), _files('dev'),
                        languages=GLOBAL_MMLU, harness='no header'),
    'global_mmlu_lite': Task('CohereLabs/Global-MMLU-Lite', _files('test'), _files('dev'),
                             languages=tuple('ar bn de en es fr hi id it ja ko my pt sw yo zh'
                                             .split()), harness='no header'),
    'mmlu_prox': Task('li-lab/MMLU-ProX', _files('test'), _files('validation'),
                      languages=tuple(sorted(WORDING['headers'])), harness=''),
    'mmlu_prox_lite': Task('li-lab/MMLU-ProX-Lite', _files('test', 'lite'), _files('validation'),
                           languages=tuple(sorted(WORDING['headers'])), harness=''),
    'mmlu_pro': Task('TIGER-Lab/MMLU-Pro', ('data/test-*.parquet', 'test.jsonl*'),
                     ('data/validation-*.parquet', 'validation.jsonl*'), harness=''),
    'cmmlu': Task('haonan-li/cmmlu',
                  ('*/test-*.parquet', 'test/*.csv', '**/test/*.csv', '*.zip'),
                  ('*/dev-*.parquet', 'dev/*.csv', '**/dev/*.csv', '*.zip'),
                  harness='cmmlu'),
    'xcopa': Task('cambridgeltl/xcopa', _files('test'), _files('validation', 'val'),
                  languages=tuple(sorted(WORDING['xcopa'])), subject='causes and effects',
                  harness='xcopa'),
}
# any file or folder of {question, choices, answer[, subject, language, id]}
GENERIC = Task('', ('test.jsonl*', '*.jsonl', '*.jsonl.gz', '*.parquet', '*.csv'),
               ('dev.jsonl*', 'dev*.parquet', '*_dev.csv'), ('validation.jsonl*',))

CATEGORIES = {      # MMLU's four groups of its subjects
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
    """One question as text. The full prompt is header + shots + context + one of options."""
    id: str
    context: str                # ends where an option begins, without a trailing space
    options: list[str]          # each begins with a space
    answer: int                 # index of the right option
    subject: str
    header: str = ''            # ends in a blank line
    category: str = ''
    language: str = ''
    duplicate_options: bool = False     # two of the choices are the same text
    place: str = ''             # file and line or row, for messages

    @property
    def solved(self):
        """The question as a shot."""
        return f'{self.context}{self.options[self.answer]}\n\n'

    @property
    def group(self):
        """Whose solved questions are its shots."""
        return self.language, self.subject


class Loaded(NamedTuple):
    """The questions of a task, their shots, messages of bad rows, and how many `limit` chose from.
    """
    questions: list     # of Question
    shots: dict         # Question.group -> solved questions
    bad: list           # of str
    total: int


def load_task(name, *, preset='mmlu', scoring='auto', header='english', languages=('all',), shots=0,
              limit=None, seed=0, revision=None, on_bad_row='stop', split='test'):
    """Loaded(questions, shots, bad, total) of `name`.

    name:      a task ('mmlu': from the hub), a task with a place ('mmlu:folder-or-file'), or just a
               file or folder of generic rows
    preset:    'mmlu' or 'harness', see above
    scoring:   'letters' or 'text'; 'auto' is letters, or what the harness does
    header:    'english', or 'native' where the benchmark publishes one in the question's language
    languages: of a multilingual benchmark; 'all' is all that it, or the local folder, has
    shots:     how many solved questions to keep for each subject, the first ones of the shots split
    limit:     only so many questions of each language, drawn by `seed` evenly over the subjects
    split:     'test', or 'validation': no questions if there is no such split
    Raises DataError for a row without a valid answer, or returns it among the bad rows ('skip').
    """
    kind, _, place = name.partition(':')
    task = TASKS.get(kind, GENERIC)
    if task is GENERIC:
        kind, place = '', name
        if not local_path(place).exists():
            raise DataError(f'no task, file or folder {name!r}; the tasks are {", ".join(TASKS)}, '
                            f'each also as task:folder')
    source = str(local_path(place)) if place else task.hub
    if shots and Path(source).is_file():
        raise DataError(f'{shots} shots wanted, but {source} is one file: give a folder that also '
                        f'holds {" or ".join(task.shots)}, or use 0 shots')
    prompt = Prompt(kind, task, preset, scoring, header)
    questions, solved, bad = [], {}, []
    for language in _languages(task, source, kind, languages):
        files = _files_of(task, source, split, language, revision)
        asked, wrong = _read(prompt, files, language, on_bad_row)
        questions += asked
        bad += wrong
        if shots and files:
            shot_files = fetch(source, _patterns(task.shots, language), revision)
            asked, wrong = _read(prompt, shot_files, language, on_bad_row)
            bad += wrong
            for question in asked:
                kept = solved.setdefault(question.group, [])
                if len(kept) < shots:
                    kept.append(question)
    if not questions and split == 'test':
        raise DataError(f'{source} has no questions ({len(bad)} bad rows)')
    if task is GENERIC or task.languages and Path(source).is_file():
        questions = _in_languages(questions, languages, source, split)
    total, questions = len(questions), draw(questions, limit, seed)
    for group in {q.group for q in questions} if shots else ():
        if len(solved.get(group, [])) < shots:
            raise DataError(f'{source}: {len(solved.get(group, []))} solved questions about '
                            f'{group[1]!r}, {shots} wanted; take fewer shots')
    return Loaded(questions, solved, bad, total)


def _patterns(patterns, language):
    return tuple(pattern.replace('{lang}', language) for pattern in patterns)


def _files_of(task, source, split, language, revision):
    """The files of a split in a language; none if a folder or the task has no validation split."""
    patterns = _patterns(task.test if split == 'test' else task.validation, language)
    if split != 'test':
        if not patterns or Path(source).is_file():
            return []
        if Path(source).is_dir() and not any(any(Path(source).glob(p)) for p in patterns):
            return []
    files = fetch(source, patterns, revision)
    if task is GENERIC and Path(source).is_dir() and split == 'test':
        others = {file for pattern in task.shots + task.validation
                  for file in Path(source).glob(pattern)}
        files = [file for file in files if file not in others]
    return files


def _languages(task, source, kind, wanted):
    """The languages to read of a benchmark, [''] where it has none or its rows name them."""
    if not task.languages:
        return ['']
    for language in wanted:
        if language != 'all':
            _require_language(language, task.languages, kind)
    wanted = list(dict.fromkeys(wanted))
    if Path(source).is_file():
        return wanted if len(wanted) == 1 and wanted != ['all'] else ['']
    if 'all' not in wanted:
        return wanted
    if not Path(source).is_dir():
        return list(task.languages)
    here = [language for language in task.languages
            if any(any(Path(source).glob(p)) for p in _patterns(task.test, language))]
    if not here:
        raise DataError(f'{source} holds no language of {kind}, nothing that matches '
                        f'{" or ".join(task.test)}')
    return here


def _in_languages(questions, wanted, source, split):
    """Of questions whose rows name their languages those in the wanted ones."""
    if 'all' in wanted:
        return questions
    there = sorted({q.language for q in questions} - {''})
    for language in wanted if split == 'test' else ():
        _require_language(language, there, source)
    return [q for q in questions if q.language in wanted]


def _require_language(language, there, source):
    if language in there:
        return
    if not there:
        raise DataError(f'{source} has no language {language!r}: its rows have no field '
                        f'"language"; leave --languages alone')
    near = difflib.get_close_matches(language, there, 1)
    raise DataError(f'{source} has no language {language!r}'
                    f'{f"; did you mean {near[0]!r}?" if near else ""}; it has {", ".join(there)}')


def _read(prompt, files, language, on_bad_row):
    """(questions, messages of bad rows) of files."""
    return parse_rows(_rows(files), lambda row, number: prompt.question(*row, language, number),
                      on_bad_row)


def _rows(files):
    """Yields (place, (row, file) or DataError); a row of a csv with a header is a dict."""
    for file in files:
        columns = None
        for n, (place, row) in enumerate(read_rows(file)):
            if isinstance(row, list) and n == 0 and _is_csv_header(row):
                columns = [name.strip().lower() for name in row]
                continue
            if isinstance(row, list) and columns:
                row = dict(zip(columns, row)) if len(row) == len(columns) else DataError(
                    f'{place}: {len(row)} columns; the header names {len(columns)}')
            yield place, row if isinstance(row, DataError) else (row, file)


class Prompt:
    """How a row becomes a question: the preset and the scoring, settled for one task."""

    def __init__(self, kind, task, preset, scoring, header):
        harness = task.harness if preset == 'harness' else None
        if harness == '':
            raise DataError(f'lm-evaluation-harness lets the model write its answer to {kind} and '
                            f'has no probabilities of options; use --preset=mmlu')
        usual = 'text' if harness in ('text', 'arc', 'xcopa') else 'letters'
        if harness and scoring not in ('auto', usual):
            raise DataError(f'--preset=harness scores {kind or "such questions"} by {usual}; leave '
                            f'--scoring alone')
        if header == 'native' and (harness or kind not in ('mmlu_prox', 'mmlu_prox_lite', 'cmmlu')):
            raise DataError(f'--header=native: {kind or "this task"} publishes no header of its '
                            f'own{" for the harness" if harness else ""}; mmlu_prox, '
                            f'mmlu_prox_lite and cmmlu do')
        self.kind, self.task, self.harness, self.native = kind, task, harness, header == 'native'
        self.scoring = usual if scoring == 'auto' else scoring

    def question(self, row, file, language, number):
        text, choices, answer = parse_row(row)
        subject, category = self.task.subject, ''
        if isinstance(row, dict):
            subject = str(row.get('subject') or row.get('category') or self._of_file(file, subject))
            category = str(row.get('subject_category') or '')
            number = next((row[key] for key in ('id', 'ind', 'sample_id', 'question_id', 'idx')
                           if row.get(key) is not None), number)
            language = language or str(row.get('language') or '')
        else:
            subject = self._of_file(file, subject)
        for what, value in (('id', str(number)), ('subject', subject), ('category', category),
                            ('language', language)):
            require_text(value, f'the {what}')
        strip = str if self.harness else str.strip     # the harness leaves options as they are
        duplicates = len({choice.strip() for choice in choices}) < len(choices)
        choices = [strip(choice) for choice in choices]
        context, options = self._ask(row, text, choices, language)
        return Question(str(number), context, options, answer, subject,
                        self._header(subject, language), category or CATEGORY.get(subject, ''),
                        language, duplicates)

    def _of_file(self, file, subject):
        """The subject, where files are named after it."""
        if match := re.match(r'(.+?)_(?:test|dev|val)\.csv', file.name):
            return match[1]
        if self.kind == 'cmmlu':
            return file.name.removesuffix('.csv') if '.csv' in file.name else file.parent.name
        return subject

    def _header(self, subject, language):
        if self.harness in ('no header', 'text', 'arc', 'xcopa'):
            return ''
        if self.harness == 'cmmlu' or self.native and self.kind == 'cmmlu':
            name = WORDING['cmmlu_subjects'].get(subject, subject)
            return f'以下是关于{name}的单项选择题，请直接给出正确答案的选项。\n\n'
        text = _wording('headers', language)[0] if self.native else HEADER
        return text.format(subject.replace('_', ' ')) + '\n\n'

    def _ask(self, row, text, choices, language):
        """(context, options)"""
        answer = 'Answer:'
        if self.harness == 'cmmlu' or self.native and self.kind == 'cmmlu':
            answer = '答案：'
        elif self.native:
            answer = _wording('headers', language)[1]
        if self.harness == 'xcopa':
            link = _wording('xcopa', language)[row['question']]
            return (f'{row["premise"].strip()[:-1]} {link}',
                    [f' {choice[0].lower()}{choice[1:]}' for choice in choices])
        if self.scoring == 'text':
            # HellaSwag's options go on with the sentence
            context = text.strip() if self.kind == 'hellaswag' else f'{text.strip()}\n{answer}'
            if self.harness == 'arc':
                context = f'Question: {text}\n{answer}'
            return context, [f' {choice}' for choice in choices]
        listed = ''.join(f'\n{letter}. {choice}' for letter, choice in zip(LETTERS, choices))
        return (f'{text.strip()}{listed}\n{answer}',
                [f' {letter}' for letter in LETTERS[:len(choices)]])


def _wording(kind, language):
    if language not in WORDING[kind]:
        raise DataError(f'language {language!r} has no wording of its own; --languages= names the '
                        f'language of a file, one of {", ".join(WORDING[kind])}')
    return WORDING[kind][language]


def parse_row(row):
    """(question, choices, index of the answer) of a row in any known schema; raises DataError.

    list of strings                     MMLU's headerless csv: question, options, letter
    endings, ctx_a, ctx_b, label        HellaSwag, cleaned as usual
    premise, question, choice1, choice2 XCOPA: which was the cause, which the effect
    choices: {text, label}, answerKey   ARC on the hub: 3 to 5 options, letters or digits
    question: {stem, choices}           ARC as first published
    option_a, ..., or option_0, ...     Global-MMLU, MMLU-ProX; those that are null are left out
    a, b, c, d, answer                  CMMLU, in either case; choice0, ... in some copies of MMLU
    options, answer                     MMLU-Pro, without its 'N/A'
    question, choices, answer           MMLU on the hub and generic: index or letter
    """
    if isinstance(row, list):
        if len(row) < 4:
            raise DataError(f'{len(row)} columns; wanted question, options and answer')
        question, choices, answer, labels = row[0], row[1:-1], row[-1], LETTERS
    elif not isinstance(row, dict):
        raise DataError(f'a row must be an object with named fields, not {type(row).__name__}')
    elif 'endings' in row:
        label, a, b = (require_text(row.get(key, ''), f'the field "{key}"')
                       for key in ('activity_label', 'ctx_a', 'ctx_b'))
        question = _hellaswag_clean(f'{label}: {a} {b.capitalize()}')
        choices = [_hellaswag_clean(ending) for ending in row['endings']]
        answer, labels = row.get('label'), LETTERS
    elif 'premise' in row:
        asked = {'cause': 'What was the cause of this?', 'effect': 'What happened as a result?'}
        question = f'{row["premise"].strip()}\n{asked[row["question"]]}'
        choices, answer, labels = [row['choice1'], row['choice2']], row.get('label'), LETTERS
    elif isinstance(row.get('question'), dict):
        question = row['question'].get('stem')
        parts = row['question'].get('choices') or []
        choices, labels = [p['text'] for p in parts], [p['label'] for p in parts]
        answer = row.get('answerKey')
    elif isinstance(row.get('choices'), dict):
        question = row.get('question')
        choices, labels = row['choices'].get('text'), row['choices'].get('label')
        answer = row.get('answerKey')
    else:
        question = row.get('question', row.get('Question'))
        answer = row.get('answer', row.get('Answer'))
        choices, labels = _options(row)
    if not question or not require_text(question, 'the question').strip():
        raise DataError('no question')
    if not isinstance(choices, (list, tuple)) or not 2 <= len(choices) <= len(LETTERS):
        raise DataError(f'a question needs 2 to {len(LETTERS)} choices')
    choices = [_choice(choice, LETTERS[number]) for number, choice in enumerate(choices)]
    return question, choices, _index(answer, labels, len(choices))


def _choice(value, letter):
    if value is None or value != value:     # NaN is how pandas writes null
        raise DataError(f'choice {letter} is null')
    if not isinstance(value, (str, int, float)):
        raise DataError(f'choice {letter} is not text but {type(value).__name__}')
    if not require_text(str(value), f'choice {letter}').strip():
        raise DataError(f'choice {letter} is empty')
    return str(value)


def _options(row):
    """(choices, their letters) of a row that names them somehow."""
    if row.get('choices') is not None:
        return row['choices'], LETTERS
    names = next((keys for keys in ([f'option_{c.lower()}' for c in LETTERS],
                                    [f'option_{i}' for i in range(len(LETTERS))],
                                    [f'choice{i}' for i in range(len(LETTERS))],
                                    list(LETTERS), list(LETTERS.lower()))
                  if row.get(keys[0]) is not None), None)
    options = row.get('options') if names is None else [row.get(key) for key in names]
    if not isinstance(options, (list, tuple)):
        return None, LETTERS
    kept = [(option, letter) for option, letter in zip(options, LETTERS)
            if option is not None and option != 'N/A']
    # an answer by its letter, whatever was left out before it
    return [option for option, _ in kept], [letter for _, letter in kept]


def _index(answer, labels, n):
    """The index of an answer given as an index, a label, or the digits of an index."""
    index = None
    digits = isinstance(labels, str) or list(labels) == list(LETTERS[:n])
    if isinstance(answer, int) and not isinstance(answer, bool) and digits:
        index = answer
    elif isinstance(answer, str) and answer.strip() in list(labels[:n]):
        index = list(labels).index(answer.strip())
    elif isinstance(answer, str) and digits and re.fullmatch('[0-9]{1,2}', answer.strip()):
        index = int(answer)
    if index is None or not 0 <= index < n:
        raise DataError(f'no valid answer: {answer!r}; wanted one of {", ".join(labels[:n])} '
                        f'or an index from 0 to {n - 1}')
    return index


def _is_csv_header(row):
    names = [name.strip().lower() for name in row if isinstance(name, str)]
    return 'question' in names and 'answer' in names


def _hellaswag_clean(text):
    text = re.sub(r'\[.*?\]', '', text.strip().replace(' [title]', '. '))
    return text.replace('  ', ' ')
