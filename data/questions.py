"""Load the questions of a multiple-choice task: find its files, read rows, make prompts of them."""

import difflib
import functools
import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from data.benchmarks import BENCHMARKS, CATEGORY, GENERIC, generic_row
from data.eval_config import EvalConfig
from data.files import parsed, read_rows, require_text, text_digest, training_rows
from data.items import draw, parse_rows
from data.prompts import (LETTERS, PROMPT_FORMATS, Item, check_prompt_format, content_free,
                          names_options, proposing)
from runtime.errors import DataError
from runtime.sources import fetch, matches
from runtime.processes import cores, parallel_map


@dataclass
class Question:
    """One question as text. The prompt is header + shots + context + one option + ending."""
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
    ending: str = ''            # follows each option; if given, only this is scored (WinoGrande)
    digest: str = ''            # hash of question and choices, independent of the prompt format
    unordered: str = ''         # the same with the choices in any order
    names_options: str = ''     # with permute, see `prompts.names_options`
    by: str = ''                # 'level 3': the field of --group_by, and its value
    orders: dict = field(default_factory=dict)  # {cyclic order of the options: Prompt}
    content_free: list = field(default_factory=list)    # its Prompts for contextual calibration
    split: str = 'test'         # 'validation': to fit a temperature on; others: written/judges.py
    prompts: list = field(default_factory=list)     # Prompts that are asked instead of this one
    published: dict | None = None       # the sample of this question without `prompts`
    first: int | None = None            # of a judge: index of the answer that the file lists first

    @property
    def solved(self):
        """Return the question with its answer, as a shot."""
        return f'{self.context}{self.options[self.answer]}{self.ending}\n\n'

    @property
    def parts(self):
        """Return the questions to score: of each other prompt, or one per option with an ending."""
        pairs = [(prompt.context, prompt.options) for prompt in self.prompts]
        if not pairs and not self.ending:
            return [self]
        for text in [] if pairs else [self.context + option for option in self.options]:
            # as in lm-evaluation-harness, white space before the ending is scored with it
            pairs.append((text.rstrip(), [text[len(text.rstrip()):] + self.ending]))
        return [replace(self, context=context, options=options, prompts=[], ending='')
                for context, options in pairs]

    @property
    def group(self):
        """Questions of one group share their shots."""
        return self.language, self.subject

    def proposing(self, k):
        """Return the P(True) question for option k."""
        context, options = proposing(self.context, self.options[k] + self.ending)
        return replace(self, context=context, options=options, answer=int(k != self.answer),
                       ending='')


class Loaded(NamedTuple):
    """What a task reads from its files, the same for every kind of task."""
    items: list             # of Question, WrittenQuestion or Text, those of the split 'test' first
    shots: dict             # group of an item -> solved questions
    bad_rows: list          # messages of those left out
    total: int              # number of items of the split 'test' before `limit`


def load_task(name, cfg):
    """Return the Loaded questions of a name in --tasks, with the first shots of each subject, for
    an EvalConfig; raises DataError.
    """
    task, benchmark, source = _find(name)
    check_prompt_format(task, benchmark, cfg)
    is_file = os.path.isfile(source)
    if cfg.shots and not benchmark.shots:
        raise DataError(f'{cfg.shots} shots wanted, but {task} has no solved questions; ask it '
                        f'with --shots=0, into another --out_dir than tasks with shots')
    if cfg.shots and is_file:
        raise DataError(f'{cfg.shots} shots wanted, but {source} is one file: give a folder that '
                        f'also holds {" or ".join(benchmark.shots)}, or --shots=0')
    (questions, solved, validation), bad = _read_splits(task, benchmark, source, cfg)
    shots = {}
    for question in validation:
        question.split = 'validation'
    for question in solved:
        shots.setdefault(question.group, []).append(question)
    if not questions:
        raise DataError(f'{source} has no questions ({len(bad)} bad rows'
                        f'{f", the first: {bad[0]}" if bad else ""})')
    if any(prompt.options != q.options for q in questions for prompt in q.orders.values()):
        raise DataError(f'permute = {cfg.permute} changes which options the letters stand for, but '
                        f'{name} with these settings scores the text of its options; use '
                        f'--prompt_format=mmlu and --scoring=letters')
    if 'all' not in cfg.languages and (benchmark is GENERIC or benchmark.languages and is_file):
        questions = of_languages(questions, cfg.languages, source)
        validation = [q for q in validation if q.language in cfg.languages]
    total, questions = len(questions), draw(questions, cfg.limit, cfg.seed)
    for group in {q.group for q in questions}:
        if (n := len(shots.get(group, []))) < cfg.shots:
            raise DataError(f'{source}: {n} solved questions about {group[1]!r}, {cfg.shots} '
                            f'wanted; --shots={n} would fit')
    shots = {group: solved[:cfg.shots] for group, solved in shots.items()}
    if shown := sum(q.unordered in [shot.unordered for shot in shots.get(q.group, ())]
                    for q in questions):
        print(f'{name}: {shown} questions are also among their shots, which give the answer away; '
              f'keep the files of the two apart')
    if naming := [q for q in questions if q.names_options]:
        print(f'{name}: permute = {cfg.permute}, but the options of {len(naming)} questions seem '
              f'to name options, such as {naming[0].names_options!r:.60} ({naming[0].place}); in '
              f'another order they say something else')
    return Loaded([*questions, *validation], shots, bad, total)


def _read_splits(task, benchmark, source, cfg):
    """Return the Questions [of 'test', 'shots', 'validation'] and bad rows of the first two."""
    plain = replace(cfg, permute=None, contextual=False, group_by='')

    def read(job):
        split, files, language = job
        keys = {}
        parse = functools.partial(_to_question, benchmark=benchmark, language=language, keys=keys,
                                  cfg=plain if split == 'shots' else cfg)
        return *parse_rows(read_rows(*files), parse, cfg.on_bad_row), keys

    wanted = {'test': True, 'shots': cfg.shots > 0, 'validation': cfg.fit_temperature}
    jobs = [(split, _files_of(benchmark, source, split, language, cfg.data_revision), language)
            for language in _languages(benchmark, source, task, cfg.languages)
            for split in wanted if wanted[split]]
    n_bytes = sum(os.path.getsize(file) for _, files, _ in jobs for file in files)
    most = min(32, cores() // int(os.environ.get('LOCAL_WORLD_SIZE', 1)))   # every process reads
    by_split = {split: [] for split in wanted}
    bad = []
    keys = {}
    results = parallel_map(read, jobs, n_bytes > 2e7, most)
    for (split, *_), (items, messages, keys_of_job) in zip(jobs, results):
        by_split[split] += items
        bad += messages if split != 'validation' else []
        keys |= keys_of_job
    check_keys(keys, benchmark)
    return by_split.values(), bad


def _find(name):
    """Return (task, Benchmark, file, folder or hub dataset) of 'task', 'task:path' or 'path'."""
    task, _, path = name.partition(':')
    if task in BENCHMARKS:
        return task, BENCHMARKS[task], os.path.expanduser(path) or BENCHMARKS[task].hub
    require_task(name, BENCHMARKS)
    return '', GENERIC, os.path.expanduser(name)


def require_task(name, known):
    """Raise DataError unless `name` is one of the tasks `known`, a file or a folder."""
    if name not in known and not os.path.exists(os.path.expanduser(name)):
        raise DataError(f'no task, file or folder {name!r}{_near(name, known)}The tasks are '
                        f'{", ".join(known)}, each also as task:folder')


def _near(name, known):
    near = difflib.get_close_matches(name, known, 1)
    return f'; did you mean {near[0]!r}? ' if near else '. '


def solved_files(name, revision=None):
    """Return (files of the shots of a task, (row, place) -> [Question in the format `mmlu`], `read`
    of `tokenize_once`, which raises DataError as `check_keys`) for training.
    """
    task, benchmark, source = _find(name)
    if not benchmark.shots:
        raise DataError(f'{task} has no solved questions for training')
    files = [file for language in _languages(benchmark, source, task, ['all'])
             for file in _files_of(benchmark, source, 'shots', language, revision)]

    def read(files, left_out):
        keys = {}
        for place, row in training_rows(files, left_out):
            item = parsed(place, row, benchmark.row)
            if not isinstance(item, DataError):     # which `to_questions` raises again
                note_key(keys, place, item)
            yield place, row
        check_keys(keys, benchmark)
    return files, lambda row, place: [_to_question(row, place, 0, benchmark, EvalConfig())], read


# what to do about a folder without the file of a split
HINTS = {'test': '--tasks=help lists the file names of each task; a file under another name is '
                 'read as task:file',
         'shots': 'solved questions are needed for shots (--shots=0 asks without) and for training'}


def fetch_split(source, patterns, split, revision):
    """Return the files of a split; the DataError for a folder without them says what to do."""
    try:
        return fetch(source, patterns, revision)
    except DataError as error:
        raise DataError(f'{error}' + f'; {HINTS[split]}' * os.path.isdir(source)) from error


def _files_of(benchmark, source, split, language, revision):
    """Return the files of a split in a language; [] for a validation split that does not exist."""
    patterns, folder = _patterns(benchmark, split, language), Path(source)
    if split == 'validation' and not (
            patterns and (not folder.exists() or matches(folder, *patterns))):
        return []
    files = fetch_split(source, patterns, split, revision)
    if benchmark is GENERIC and split == 'test':    # its patterns match the other splits too
        others = matches(folder, *benchmark.shots, *benchmark.validation, 'train[-_.]*',
                         '*[-_]train[-_.]*')
        files = [file for file in files if file not in others]
        if not files:
            raise DataError(f'{source} has only files for training, shots or validation, such as '
                            f'{", ".join(file.name for file in others[:3])}; {HINTS["test"]}')
    return files


def _patterns(benchmark, split, language):
    return tuple(p.replace('{lang}', language) for p in getattr(benchmark, split))


def _languages(benchmark, source, task, wanted):
    """Return the languages to read, [''] if the benchmark has none or its rows name them."""
    if not benchmark.languages:
        return ['']
    _require_languages(wanted, benchmark.languages, task)
    wanted = list(dict.fromkeys(wanted))
    if os.path.isfile(source):
        return wanted if len(wanted) == 1 and wanted != ['all'] else ['']
    if 'all' not in wanted or not os.path.isdir(source):
        return benchmark.languages if 'all' in wanted else wanted
    there = [language for language in benchmark.languages
             if matches(Path(source), *_patterns(benchmark, 'test', language))]
    if not there:
        example = ' or '.join(_patterns(benchmark, 'test', benchmark.languages[0])[:2])
        raise DataError(f'{source} holds no file of {task} in any language, such as {example}; '
                        f'{HINTS["test"]}: {task}:{os.path.join(source, "FILE")}')
    return there


def of_languages(questions, wanted, source):
    """Return the Questions in the languages `wanted`; raise DataError for one that none is in."""
    _require_languages(wanted, {question.language for question in questions} - {''}, source)
    return [q for q in questions if 'all' in wanted or q.language in wanted]


def _require_languages(wanted, known, source):
    for language in {*wanted} - {*known, 'all'}:
        there = (f'{_near(language, sorted(known))}It has {", ".join(sorted(known))}' if known else
                 '; its rows have no field "language"; leave out --languages')
        raise DataError(f'{source} has no language {language!r}{there}')


def _to_question(row, place, number, benchmark, cfg, language='', keys=None):
    """Return the Question of a raw row for an EvalConfig; keys: see `note_key`."""
    item = benchmark.row(row)
    if keys is not None:
        note_key(keys, place, item)
    text, choices, answer = parse_row(row, lambda row: item)
    fields = row if isinstance(row, dict) else {}
    ids = map(fields.get, ('id', 'ind', 'sample_id', 'question_id', 'idx', 'qID'))
    id = str(next((id for id in ids if id is not None), number))
    subject = str(fields.get('subject') or fields.get('category')
                  or _file_subject(place, benchmark) or benchmark.subject)
    category = str(fields.get('subject_category') or CATEGORY.get(subject, ''))
    language = language or str(fields.get('language') or '')
    for name, value in zip(('id', 'subject', 'category', 'language'),
                           (id, subject, category, language)):
        require_text(value, f'the {name}')
    by = cfg.group_by
    if by and not isinstance(fields.get(by), (str, int, float)):
        raise DataError(f'group_by = {by!r}: the row has no text or number of that name; its '
                        f'fields are {", ".join(map(str, fields)) or "columns without names"}')

    def make_prompt(item):
        make = PROMPT_FORMATS[cfg.prompt_format]
        prompt = make(item, benchmark, cfg.scoring, cfg.header == 'native')
        return prompt._replace(header='') if cfg.header == 'none' else prompt

    item, orders = Item(text, choices, subject, language, row), {}
    prompt, n_options = make_prompt(item), len(choices)
    for shift in range(1, min(cfg.permute or 0, n_options)):
        order = tuple((i + shift) % n_options for i in range(n_options))
        orders[order] = make_prompt(replace(item, choices=[choices[i] for i in order]))
    stripped = sorted(choice.strip() for choice in choices)
    return Question(
        id, prompt.context, prompt.options, answer, subject, prompt.header, category, language,
        duplicate_options=len({*stripped}) < n_options, place=place, ending=prompt.ending,
        digest=text_digest(text, choices), by=f'{by} {fields[by]}' if by else '', orders=orders,
        unordered=text_digest(text.strip(), stripped) if cfg.shots else '',
        names_options=(names_options(choices) or '') if cfg.permute else '',
        content_free=content_free(item, prompt, make_prompt) if cfg.contextual else [])


def _file_subject(place, benchmark):
    """Return the subject that the name of a row's file gives, or ''."""
    file = Path(place.rpartition(':')[0])
    if match := re.match(r'(.+?)_(?:test|dev|val)\.csv', file.name):
        return match[1]
    if benchmark.subject_files:
        return file.name.removesuffix('.csv') if '.csv' in file.name else file.parent.name
    return ''


def parse_row(row, to_row=generic_row):
    """Return (question, choices, index of the answer) of a raw row; raises DataError."""
    question, choices, answer, labels = to_row(row)
    hint = '; a file in the schema of a benchmark is read as --tasks=arc_easy:FILE'
    missing = ('question' if not question or not require_text(question, 'the question').strip()
               else 'choices' if choices is None else 'answer' if answer is None else '')
    if missing:
        fields = f' among the fields {", ".join(map(str, row))}' if isinstance(row, dict) else ''
        raise DataError(f'no {missing}{fields}; wanted question, answer and a list "choices" or '
                        f'"options", or columns A, B, ..., or option_a, option_b, ...{hint}')
    if not isinstance(choices, (list, tuple)) or not 2 <= len(choices) <= len(LETTERS):
        raise DataError(f'a question needs 2 to {len(LETTERS)} choices in a list, not '
                        f'{choices!r:.60}{hint}')
    # NaN is how pandas writes null
    choices = [str(x) if isinstance(x, (int, float)) and x == x else x for x in choices]
    for choice, letter in zip(choices, LETTERS):
        if choice is None or choice != choice or (
                not require_text(choice, f'choice {letter}').strip()):
            raise DataError(f'choice {letter} is null or empty')
    return question, choices, _index(answer, labels, len(choices))


def _index(answer, labels, n):
    """Return the index of an answer to n choices: a label, or an index if these are LETTERS."""
    key = str(answer).strip().upper()
    if (names := [str(label).upper() for label in labels[:n]]).count(key) == 1:
        return names.index(key)
    if labels == LETTERS and (index := _number(answer)) in range(n):
        return index
    or_index = f' or an index from 0 to {n - 1}' * (labels == LETTERS)
    raise DataError(f'no valid answer: {answer!r:.60}; wanted one of {", ".join(names)}{or_index}')


def _number(answer):
    """Return the whole number that an answer is, None if it is no number."""
    if isinstance(answer, str) and re.fullmatch(r'\s*[0-9]{1,2}(\.0)?\s*', answer):
        answer = float(answer)
    # pandas writes 1.0 in a column with nulls
    return int(answer) if type(answer) in (int, float) and answer % 1 == 0 else None


# ---- One way to name answers in a file -----------------------------------------------------------

def note_key(keys, place, row):
    """Note in `keys`, {file: {kind: place of the first}}, how a Row without own labels names its
    answer: 'letter', 'zero', 'number', or 'beyond', which is no index from 0 but one from 1.
    """
    if row.labels == LETTERS and isinstance(row.choices, (list, tuple)):
        number = _number(row.answer)
        kind = 'letter' if re.fullmatch(r'\s*[A-Za-z]\s*', str(row.answer)) else ''
        if number is not None and number >= 0:
            kind = {0: 'zero', len(row.choices): 'beyond'}.get(number, 'number')
        if kind:
            keys.setdefault(place.rpartition(':')[0], {}).setdefault(kind, place)


def check_keys(keys, benchmark):
    """Raise DataError for files of `note_key` whose answers could be read in two ways. Benchmarks
    count from 0; own files do if any answer is 0.
    """
    either = ('a number may count from 0 or from 1; write letters, or the index from 0 as '
              '"answer_index"')
    for kinds in keys.values():
        if 'letter' in kinds and len(kinds) > 1:
            number = next(kinds[kind] for kind in ('zero', 'number', 'beyond') if kind in kinds)
            raise DataError(f'{number}: the answer is a number, that of {kinds["letter"]} is a '
                            f'letter; {either}')
        if 'beyond' in kinds and 'zero' not in kinds:
            raise DataError(f'{kinds["beyond"]}: the answer is the number of options, and none in '
                            f'this file is 0; {either}')
    first = [kinds['number'] for kinds in keys.values() if 'number' in kinds]
    if benchmark is GENERIC and first and not any('zero' in kinds for kinds in keys.values()):
        raise DataError(f'{first[0]}: the answers are numbers, and none is 0; {either}')
