"""Read files of predictions from any source: their rows become samples like those of evaluate.py.

A row has probs or log_probs and answer, or confidence and correct, or answers and answer, or
correct alone; or it is a line of lm-evaluation-harness, a score in a log of Inspect, or a sample of
evaluate.py. Needs numpy, and pyarrow for parquet.
"""

import functools
import math
import re
from collections import Counter

import metrics
from written.confidence import outcome
from bridges.cells import read_table, to_label, to_list, to_numbers, to_probability, to_truth
from bridges.harness_files import UnusableTaskError, harness_sample, harness_task, repeats
from bridges.inspect_files import is_log, log_rows
from results.samples import latest_samples, option_lengths
from runtime.digests import json_digest
from runtime.errors import ConfigError, DataError
from runtime.readers import read_rows

# {name of a column, in any case: what it holds}; lists also as probs_0, ... or prob_A, ...
NAMES = {what: what for what in (
    'probs', 'log_probs', 'n_tokens', 'options', 'choices', 'answer', 'confidence', 'correct',
    'answers', 'response', 'id', 'task', 'split', 'language', 'subject', 'category', 'context',
    'question', 'prompt')} | {'label': 'answer', 'sampled_responses': 'answers'}
TEXTS = 'context', 'question', 'prompt'      # the last that a row has is compared
KINDS = 'probs', 'log_probs', 'confidence', 'answers'       # the first that a row has counts


def read_predictions(path, cfg):
    """Yield (sample, name of its distribution) of each row of a prediction file.

    cfg: a FileConfig. A row without an id has its number in the file as 'id', and as 'row'.
    Rows that state no probability are counted. Raises DataError with the place.
    """
    if '.txt' in path.suffixes[-2:]:
        raise DataError(f'{path}: a text is no file of predictions; if its lines are JSON objects, '
                        f'name it .jsonl')
    chosen = chosen_columns(cfg.columns)
    layouts = functools.cache(functools.partial(find_columns, chosen=chosen))
    group, subtask, _ = harness_task(path)
    first_kinds, logged = {}, {}
    titles = {'probs': 'probabilities of a file', 'confidence': 'confidences of a file',
              'log_probs': f'log-probabilities, {cfg.norm} of a file',
              'graded': 'right or wrong, without confidences',
              'harness': f'lm-evaluation-harness, {cfg.norm.replace("token", "sum")}'}
    position, n_unstated = 0, 0
    unstated = ''
    for position, (place, row) in enumerate(_latest_rows(path, [name for _, name in chosen]), 1):
        try:
            if isinstance(row, DataError):
                raise row
            if not isinstance(row, dict):
                raise ValueError(f'not a JSON object: {str(row)[:40]}')
            if is_harness := 'filtered_resps' in row:
                parts = [harness_sample(row, cfg.norm) | {'task': group}]
                if repeats(parts[0], row.get('filter'), logged):
                    continue
            else:
                parts = [_select(row, *layout) for layout in layouts(tuple(row))]
            for part in parts:
                if (part.get('split') or 'test') != 'test':
                    continue
                # lm_eval does not count tokens: n_tokens of its sample are the lengths of the norm
                kind, values = _values(part, 'token' if is_harness else cfg.norm)
                if not values:
                    n_unstated += 1
                    unstated = unstated or f'{place}: {part.get("confidence")!r:.60}'
                    continue
                first = first_kinds.setdefault(part['task'], kind)
                if first != kind and {first, kind} & {'confidence', 'graded'}:
                    raise ValueError(f'{kind}, but the task begins with {first}')
                title = titles['harness' if is_harness else kind]
                yield _identity(part, position, subtask) | values, title
        except (ValueError, OverflowError, RecursionError) as error:
            reason = str(error).removeprefix('row 0: ').removeprefix(f'{place}: ')
            kind = UnusableTaskError if isinstance(error, UnusableTaskError) else DataError
            hint = '' if row is error else '\n`nanocal metrics --help` lists the forms of a row'
            raise kind(f'{place}: {reason}{hint}') from error
    left_out = n_unstated and f'{n_unstated} rows state no probability, the first: {unstated}'
    if not position:
        raise DataError(f'{path}: the file {"has no rows" if path.stat().st_size else "is empty"}')
    if not first_kinds:
        raise DataError(f'{path}: {left_out or "no row to score of the split test"}')
    if left_out:
        print(f'{left_out}; they are left out')
    if graded := [task for task, kind in first_kinds.items() if kind == 'graded']:
        tasks = f' of {", ".join(graded)}' if any(graded) else ''
        print(f'{path}: without confidences there is only the accuracy{tasks}; `nanocal metrics '
              f'--help` says where they are read')


def _latest_rows(path, names):
    """Yield (place, row) of a file without samples that a later one replaces."""
    rows = log_rows(path, names) if is_log(path) else read_rows(path, read_table)
    for item in rows:
        if _is_ours(item[1]):       # hold this file in memory
            rows = [item, *rows]
            ours = [row for _, row in rows if _is_ours(row)]
            replaced = {*map(id, ours)} - {*map(id, latest_samples(ours))}
            yield from (item for item in rows if id(item[1]) not in replaced)
        else:
            yield item


def _is_ours(row):
    """Return whether a row is a sample of evaluate.py."""
    return isinstance(row, dict) and isinstance(row.get('text', ''), str) and all(
        isinstance(row.get(key), str) for key in ('task', 'split', 'language', 'id', 'prompt'))


def _identity(part, position, subtask):
    """Return what a sample has besides the values that are measured."""
    sample = {'task': part['task'], 'split': 'test',
              'id': f'{subtask}:' * bool(subtask) + str(part.get('id', position))}
    for key, default in (('language', ''), ('subject', subtask), ('category', '')):
        sample[key] = str(part.get(key, default))
    if 'id' not in part:
        sample['row'] = position
    if texts := [str(part[key]) for key in TEXTS if part.get(key)]:
        # of a sample of evaluate.py it is a hash already
        sample |= {'context': texts[0], 'question': part.get('question', '') if _is_ours(part)
                   else json_digest(texts[-1], size=6)}
    return sample


# Columns

def chosen_columns(settings):
    """Return [(what a column holds, its name)] of --columns=answer=NAME,...; ConfigError."""
    chosen = [(what, name) for what, _, name in (setting.partition('=') for setting in settings)]
    counts = Counter(what for what, _ in chosen if what != 'confidence')
    for what, name in chosen:
        if what not in NAMES.values() or not name or counts[what] > 1 or (
                chosen.count((what, name)) > 1):
            raise ConfigError(f'columns: {what}={name}; wanted NAME once for some of '
                              f'{", ".join(dict.fromkeys(NAMES.values()))}')
    return chosen


def find_columns(keys, chosen):
    """Return [('', {what: its column, or a list of them})]; of chosen confidences (name, ...)."""
    in_capitals = {key.casefold(): key for key in keys}
    chosen = [(what, name if name in keys else in_capitals.get(name.casefold(), name))
              for what, name in chosen]
    names = {name: what for name, what in NAMES.items() if what not in dict(chosen)}
    names |= {name.casefold(): what for what, name in chosen if what != 'confidence'}
    confidences = [name for what, name in chosen if what == 'confidence']
    found = {}      # {what: [(number of a column of a list, or None, its name)]}
    for key in keys:
        k = None
        what = names.get(key.casefold())
        if not what and (numbered := re.fullmatch('(.+?)s?_([0-9]+|[a-z])', key.casefold())):
            stem, number = numbered.groups()
            what = names.get(stem) or names.get(f'{stem}s')
            k = int(number) if number.isdigit() else ord(number) - ord('a')
        if what and (k is None or what in KINDS[:2]):
            found.setdefault(what, []).append((k, key))
    if not confidences and not found.keys() & {*KINDS} and 'correct' in found and (
            all(key.casefold() in names for key in keys)):      # another might be a confidence
        found['graded'] = found['correct']
    if confidences or not found.keys() & {'probs', 'log_probs', 'answers'}:
        found.pop('answer', None)       # `correct` says all; an answer and its label may be there
    for name in [*confidences, *(name for what, name in chosen if what not in found)]:
        if name not in keys:
            raise ValueError(f'there is no column {name!r}, but {_listed(keys)}')
    if not confidences and not found.keys() & {*KINDS, 'graded'}:
        raise ValueError(f'no column is named {", ".join(KINDS)} or probs_0, but {_listed(keys)}; '
                         f'other names are read by --columns=probs=NAME,answer=NAME or '
                         f'--columns=confidence=NAME,correct=NAME')
    layout = {}
    for what, columns in found.items():
        ks = [k for k, _ in columns]
        if len(ks) > 1 and None in ks:
            raise ValueError(f'the columns {_listed(key for _, key in columns)} are all {what}; '
                             f'choose one by --columns={what}={columns[0][1]}')
        if None not in ks and sorted(ks) != [*range(len(ks))]:  # `answer` would be of another one
            raise ValueError(f'the columns {what}_k hold numbers for k = {_listed(sorted(ks))}; '
                             f'wanted 0, 1, ... without a gap, or A, B, ...')
        layout[what] = columns[0][1] if None in ks else [key for _, key in sorted(columns)]
    rest = {what: column for what, column in layout.items() if what not in KINDS}
    return [(name, rest | {'confidence': name}) for name in confidences] or [('', layout)]


def _listed(names):
    text = ', '.join(map(str, names))
    return text if len(text) <= 200 else f'{text[:200]}...'


def _select(row, name, columns):
    """Return {what: value} of a row without its empty cells; name: of the chosen confidence."""
    part = {what: [row[key] for key in column] if isinstance(column, list) else row[column]
            for what, column in columns.items()}
    part = {what: x for what, x in part.items() if x is not None or what == 'graded'}
    return part | {'task': '.'.join(map(str, filter(None, (part.get('task'), name))))}


# Rows

def _values(row, norm):
    """Return ('probs', 'log_probs', 'confidence' or 'graded', {key of a sample: value}).

    The dict is {} if no confidence is stated.
    """
    kind = next((x for x in KINDS if x in row), None)
    if kind in KINDS[:2]:
        return kind, _distribution(row, kind, norm)
    row = row | _sampled(row) if kind == 'answers' else row
    value = to_probability(row['confidence']) if kind else None
    if value is None and 'graded' not in row:
        return 'confidence', {}
    if (is_right := to_truth(row.get('correct'))) is None:
        given = (f'must be true or false, 1 or 0, not {row["correct"]!r:.60}'
                 if row.get('correct') is not None else 'is missing')
        raise ValueError(f'correct {given}; --columns=correct=NAME reads another column')
    texts = {'predicted': 'response', 'expected': 'expected'}
    texts = {key: str(row[name]) for key, name in texts.items() if name in row}
    if value is None:
        return 'graded', texts | {'correct': bool(is_right)}
    return 'confidence', texts | outcome(value, is_right)


def _distribution(row, kind, norm):
    """Return the values of a sample that has a number for each option."""
    values = to_numbers(kind, row[kind])
    n = len(values)
    lists = {key: [*map(str, x)] for key in ('options', 'choices') if key in row
             if isinstance(x := to_list(row[key]), list) and len(x) == n}
    label = to_label(row.get('answer'), n, lists.values())
    texts = lists.get('choices') or lists.get('options') or [*map(str, range(1, n + 1))]
    sample = {'n_tokens': [1] * n, 'options': texts, 'answer': label}
    if kind == 'probs':
        if not (abs(sum(values) - 1) <= metrics.SUM_TOLERANCE and min(values) >= 0):
            metrics.check_probs([values], [label])      # which says what is wrong
        _check_confidence(row, values, label)
        log_probs = [math.log(max(x, metrics.NLL_FLOOR)) for x in values]
        return sample | {'probs': values, 'log_probs': log_probs}
    n_tokens = to_numbers('n_tokens', row['n_tokens']) if 'n_tokens' in row else sample['n_tokens']
    if len(n_tokens) != n or not all(1 <= x < math.inf for x in n_tokens):
        raise ValueError(f'n_tokens must be 1 or more for each log-probability, not {n_tokens}')
    if norm in ('char', 'byte') and 'options' not in lists:
        raise ValueError(f'--norm={norm} needs options, the text of each, not '
                         f'{row.get("options")!r:.60}')
    scored = [text.removeprefix(' ') for text in lists.get('options', ())]
    lengths = option_lengths(scored, n_tokens, norm)
    scores = [x / length for x, length in zip(values, lengths, strict=True)]
    if not all(map(math.isfinite, scores)):
        metrics.softmax(scores)         # which refuses NaN, and -inf alone
        if scores[label] == -math.inf:
            raise ValueError(f'label {label} has the score -inf')
    return sample | {'log_probs': scores}


def _check_confidence(row, probs, label):
    """Raise ValueError for a confidence, or a correctness, that is not that of `probs` [K]."""
    stated = to_probability(row['confidence']) if 'confidence' in row else None
    if stated is not None and abs(stated - max(probs)) > 0.0051:    # it may be rounded
        raise ValueError(f'confidence is {row["confidence"]!r:.60}, and the largest of probs '
                         f'{max(probs):.4g}; leave one of them out')
    is_top, correct = probs[label] == max(probs), to_truth(row.get('correct'))
    if correct not in (None, is_top) and probs.count(max(probs)) == 1:
        raise ValueError(f'correct is {row["correct"]}, and by probs the top option is '
                         f'{"right" if is_top else "wrong"}; leave one of them out')


def _sampled(row):
    """Return the confidence and correctness of written answers: a share of equal texts."""
    answers, references = to_list(row['answers']), row.get('answer', [])
    if not isinstance(references, list):        # in a table it may be a printed list
        printed = to_list(references)
        references = [references, *(printed if isinstance(printed, list) else ())]
    if not isinstance(answers, list) or not answers:
        raise ValueError(f"answers must be a list such as ['B', 'C'], not {answers!r:.60}")
    texts = [*answers, *references, row.get('response', '')]
    if wrong := [x for x in texts if not isinstance(x, (str, int))]:
        raise ValueError(f'answers must be texts or whole numbers, not {wrong[0]!r:.60}')
    texts = [str(x).strip(' \t\n').removesuffix('.').casefold() for x in texts]
    answers, references = texts[:len(answers)], texts[len(answers):-1]
    chosen = texts[-1] if 'response' in row else Counter(answers).most_common(1)[0][0]
    judged = {'confidence': answers.count(chosen) / len(answers)}
    if {'correct', 'response'} <= row.keys():
        return judged
    if not references:
        raise ValueError('the right answer is missing: answer, a text or a list of texts, or '
                         'response and correct')
    return judged | {'correct': chosen in references, 'expected': row['answer']}
