"""Multiple-choice benchmarks: files in their published schemas to questions, questions to prompts.

The prompt is MMLU's for every task, as in the papers: one header that names the subject, solved
questions ('shots'), then the question. Options are scored as letters (` A` after `Answer:`) or as
their full text.
"""

import re
import string
from dataclasses import dataclass
from pathlib import Path

from data import DataError, fetch, read_rows, require_text

HEADER = 'The following are multiple choice questions (with answers) about {}.\n\n'
LETTERS = string.ascii_uppercase


@dataclass
class Task:
    """Where a benchmark lives: hub dataset, files to score, files the shots come from."""
    hub: str
    test: tuple
    shots: tuple
    subject: str = ''           # for the header, where rows carry no subject of their own
    joins: bool = False         # an option continues the question's sentence (HellaSwag)


def _arc(name):
    return Task('allenai/ai2_arc',
                (f'{name}/test-*.parquet', f'{name}-test.jsonl*', f'**/{name}-Test.jsonl'),
                (f'{name}/train-*.parquet', f'{name}-train.jsonl*', f'**/{name}-Train.jsonl'),
                subject='science')


TASKS = {
    'mmlu': Task('cais/mmlu',
                 ('all/test-*.parquet', 'test.jsonl*', 'test/*_test.csv', '*_test.csv'),
                 ('all/dev-*.parquet', 'dev.jsonl*', 'dev/*_dev.csv', '*_dev.csv')),
    'arc_easy': _arc('ARC-Easy'),
    'arc_challenge': _arc('ARC-Challenge'),
    # the test split has no published labels
    'hellaswag': Task('Rowan/hellaswag', ('data/validation-*.parquet', 'hellaswag_val*.jsonl*'),
                      ('data/train-*.parquet', 'hellaswag_train*.jsonl*'),
                      subject='everyday situations', joins=True),
}
# any file or folder of {question, choices, answer[, subject, id]}
GENERIC = Task('', ('test.jsonl*', '*.jsonl', '*.jsonl.gz', '*.parquet', '*.csv'),
               ('dev.jsonl*', 'dev*.parquet', '*_dev.csv'), subject='various things')


@dataclass
class Question:
    """One question as text. The full prompt is prefix + context + one of options."""
    id: str
    context: str                # ends where an option begins, without a trailing space
    options: list[str]          # each begins with a space
    answer: int                 # index of the right option
    subject: str

    @property
    def solved(self):
        """The question as a shot."""
        return f'{self.context}{self.options[self.answer]}\n\n'


def load_task(name, scoring='letters', *, shots=0, limit=None, revision=None, on_bad_row='stop'):
    """(questions, shots by subject, bad rows) of `name`.

    name:    a task ('mmlu': from the hub), a task with a place ('mmlu:folder-or-file'), or just a
             file or folder of generic rows
    scoring: 'letters' or 'text'
    shots:   how many solved questions to keep for each subject, the first ones of the shots split
    limit:   score only the first `limit` questions
    Raises DataError for a row without a valid answer, or returns it among the bad rows ('skip').
    """
    kind, _, place = name.partition(':')
    task = TASKS.get(kind, GENERIC)
    if task is GENERIC:
        place = name
        if not Path(place).exists():
            raise DataError(f'no task, file or folder {name!r}; the tasks are {", ".join(TASKS)}, '
                            f'each also as task:folder')
    source = place or task.hub
    files = fetch(source, task.test, revision)
    if task is GENERIC and Path(source).is_dir():
        solved_files = {f for pattern in task.shots for f in Path(source).glob(pattern)}
        files = [file for file in files if file not in solved_files]
    questions, bad = _read(task, files, scoring, on_bad_row, limit)
    if not questions:
        raise DataError(f'{source} has no questions ({len(bad)} bad rows)')
    solved = {}
    if shots:
        if Path(source).is_file():
            raise DataError(f'{shots} shots wanted, but {source} is one file: give a folder that '
                            f'also holds {" or ".join(task.shots)}, or use 0 shots')
        shot_files = fetch(source, task.shots, revision)
        for question in _read(task, shot_files, scoring, 'stop', None)[0]:
            kept = solved.setdefault(question.subject, [])
            if len(kept) < shots:
                kept.append(question)
        for subject in {q.subject for q in questions}:
            if len(solved.get(subject, [])) < shots:
                raise DataError(f'{source}: {len(solved.get(subject, []))} solved questions about '
                                f'{subject!r}, {shots} wanted; take fewer shots')
    return questions, solved, bad


def header(subject):
    return HEADER.format(subject.replace('_', ' '))


def _read(task, files, scoring, on_bad_row, limit):
    questions, bad = [], []
    for file in files:
        for place, row in read_rows(file):
            if limit is not None and len(questions) >= limit:
                return questions, bad
            try:
                if isinstance(row, DataError):
                    raise row
                if _is_csv_header(row):
                    continue
                questions.append(_to_question(row, task, file, scoring, len(questions)))
            except (DataError, KeyError, TypeError, AttributeError) as error:
                message = str(error) if isinstance(error, DataError) else (
                    f'not the fields of its format: {error!r}')
                message = message if place in message else f'{place}: {message}'
                if on_bad_row == 'stop':
                    raise DataError(f'{message}; --on_bad_row=skip leaves such rows out') from None
                bad.append(message)
    return questions, bad


def _to_question(row, task, file, scoring, number):
    text, choices, answer = parse_row(row)
    subject = task.subject
    if isinstance(row, dict):
        subject = str(row.get('subject') or row.get('category') or subject)
        number = row.get('id', row.get('ind', number))
    elif match := re.match(r'(.+?)_(?:test|dev|val)\.csv', file.name):
        subject = match[1]
    if scoring == 'text':
        context = text if task.joins else f'{text}\nAnswer:'
        options = [f' {choice}' for choice in choices]
    else:
        listed = ''.join(f'\n{letter}. {choice}' for letter, choice in zip(LETTERS, choices))
        context = f'{text}{listed}\nAnswer:'
        options = [f' {letter}' for letter in LETTERS[:len(choices)]]
    return Question(str(number), context, options, answer, subject)


def parse_row(row):
    """(question, choices, index of the answer) of a row in any known schema; raises DataError.

    list of strings                     MMLU's headerless csv: question, options, letter
    endings, ctx_a, ctx_b, label        HellaSwag, cleaned as usual, then stripped of outer spaces
    choices: {text, label}, answerKey   ARC on the hub: 3 to 5 options, letters or digits
    question: {stem, choices}           ARC as first published
    question, choices, answer           MMLU on the hub and generic: index or letter
    """
    if isinstance(row, list):
        if len(row) < 4:
            raise DataError(f'{len(row)} columns; wanted question, options and answer')
        question, choices, answer = row[0], row[1:-1], row[-1]
        labels = LETTERS
    elif not isinstance(row, dict):
        raise DataError(f'a row must be an object with named fields, not {type(row).__name__}')
    elif 'endings' in row:
        question = _hellaswag_clean(f'{row.get("activity_label", "")}: {row.get("ctx_a", "")} '
                                    f'{str(row.get("ctx_b", "")).capitalize()}')
        choices = [_hellaswag_clean(ending) for ending in row['endings']]
        answer, labels = row.get('label'), LETTERS
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
        question, choices, answer = row.get('question'), row.get('choices'), row.get('answer')
        labels = LETTERS
    if not question or not require_text(question, 'the question').strip():
        raise DataError('no question')
    if not isinstance(choices, (list, tuple)) or not 2 <= len(choices) <= len(LETTERS):
        raise DataError(f'a question needs 2 to {len(LETTERS)} choices')
    choices = [require_text(str(choice), 'a choice').strip() for choice in choices]
    return question.strip(), choices, _index(answer, labels, len(choices))


def _index(answer, labels, n):
    """The index of an answer given as an index, a label, or the digits of an index."""
    index = None
    if isinstance(answer, int) and not isinstance(answer, bool):
        index = answer
    elif isinstance(answer, str) and answer.strip() in list(labels[:n]):
        index = list(labels).index(answer.strip())
    elif isinstance(answer, str) and labels is LETTERS and answer.strip().isdigit():
        index = int(answer)
    if index is None or not 0 <= index < n:
        raise DataError(f'no valid answer: {answer!r}; wanted one of {", ".join(labels[:n])} '
                        f'or an index from 0 to {n - 1}')
    return index


def _is_csv_header(row):
    return isinstance(row, list) and row[:1] == ['question'] and row[-1:] == ['answer']


def _hellaswag_clean(text):
    text = re.sub(r'\[.*?\]', '', text.strip().replace(' [title]', '. '))
    return text.replace('  ', ' ')
