"""Read files of predictions from any source: their rows become samples like those of evaluate.py.

It needs numpy alone, and pyarrow for parquet.
"""

import ast
import contextlib
import json
import math
import re
from array import array
from collections import Counter
from pathlib import Path

import numpy as np

import metrics
from results.confidence import outcome, parse_probability
from results.samples import latest_samples, option_lengths, option_scores
from runtime.digests import json_digest
from runtime.errors import DataError
from runtime.readers import column_names, parse_json, read_rows, to_dict


class UnusableTaskError(DataError):
    """A task of lm_eval is not multiple choice, or a question has several right options."""


NUMBERED = re.compile(r'(prob|log_prob)s?_(\d+)')      # a column of a table


def read_predictions(path, cfg):
    """Yield (sample, name of its distribution) of each row of a prediction file.

    cfg: a FileConfig. Samples of two files are paired by `id`, or their position, and by the text
    of the question. Rows that state no probability are counted. Raises DataError with the place.
    """
    if '.txt' in path.suffixes[-2:]:
        raise DataError(f'{path}: a text is no file of predictions; if its lines are JSON objects, '
                        f'name it .jsonl')
    (group, subtask, _), first_kinds, logged, unstated = harness_task(path), {}, {}, []
    for position, place, row in _counting_rows(path):
        samples = []
        try:
            if isinstance(row, DataError):
                raise row
            if not isinstance(row, dict):
                raise ValueError(f'not a JSON object: {str(row)[:40]}')
            if (row.get('split') or 'test') != 'test':
                continue
            if 'filtered_resps' in row:     # of lm_eval, whose files do not count tokens
                converted = harness_sample(row, cfg.norm)
                if repeats(converted, row.get('filter'), logged):
                    continue
                parts, norm = [row | converted | {'task': group}], 'token'
                scored = f'lm-evaluation-harness, {cfg.norm.replace("token", "sum")}'
            else:
                parts, norm = _named(_joined(row), cfg.confidence, cfg.correct), cfg.norm
                scored = f'log-probabilities, {norm} of a file'
            distributions = {'confidence': 'confidences of a file', 'log_probs': scored,
                             'probs': 'probabilities of a file'}
            for part in parts:
                kind, values = _values(part, norm)
                if not values:
                    unstated.append(f'{place}: {part.get("confidence")!r}')
                    continue
                first = first_kinds.setdefault(str(part.get('task') or ''), kind)
                if (first == 'confidence') != (kind == 'confidence'):
                    raise ValueError(f'{kind}, but the task begins with {first}')
                samples.append((_sample(part, position, subtask) | values, distributions[kind]))
        except (ValueError, OverflowError, RecursionError) as error:
            reason = str(error).removeprefix('row 0: ').removeprefix(f'{place}: ')
            kind = UnusableTaskError if isinstance(error, UnusableTaskError) else DataError
            raise kind(
                f'{place}: {reason}. Wanted: an object with probs (or log_probs) and answer, '
                f'or confidence and correct, or answers and answer, or a line of multiple choice '
                f'by lm_eval --log_samples') from error
        yield from samples
    left_out = unstated and f'{len(unstated)} rows state no probability, the first: {unstated[0]}'
    if not first_kinds:
        raise DataError(f'{path}: {left_out or "no row to score of the split test"}')
    if unstated:
        print(f'{left_out}; they are left out')


def _counting_rows(path):
    """Yield (position from 1, place, row) of a file without samples that a later one replaces.

    Only rows from the first sample of evaluate.py on are held in memory.
    """
    rows = ((i, place, row) for i, (place, row) in enumerate(read_rows(path, _read_cells), 1))
    for item in rows:
        if not _is_ours(item[-1]):
            yield item
            continue
        held = [item, *rows]
        ours = [row for *_, row in held if _is_ours(row)]
        replaced = {*map(id, ours)} - {*map(id, latest_samples(ours))}
        yield from (item for item in held if id(item[-1]) not in replaced)


def _is_ours(row):
    """Return whether a row is a sample of evaluate.py."""
    return isinstance(row, dict) and isinstance(row.get('text', ''), str) and all(
        isinstance(row.get(key), str) for key in ('task', 'split', 'language', 'id', 'prompt'))


def _sample(row, position, subtask):
    """Return what a sample has besides the values that are measured."""
    name = f'{subtask}:' * bool(subtask) + str(row.get('id', position))
    sample = {'task': row.get('task'), 'split': 'test', 'id': name, 'language': row.get('language'),
              'subject': row.get('subject', subtask), 'category': row.get('category')}
    sample = {key: str(x or '') for key, x in sample.items()}
    if texts := [str(row[key]) for key in ('context', 'question', 'prompt') if row.get(key)]:
        sample |= {'context': texts[0], 'question': json_digest(texts[-1], size=6)}
    return sample


def _named(row, confidence, correct):
    """Return a row once for each column of `confidence`, under the keys that `_values` reads."""
    if missing := [key for key in (*confidence, *[correct] * (correct != 'correct'))
                   if key not in row]:
        raise ValueError(f'there is no column {missing[0]!r}, but {", ".join(map(str, row))}')
    row = row | ({'correct': row[correct]} if correct in row else {})
    row = {key: x for key, x in row.items()
           if x is not None or key in (*confidence, 'confidence', 'correct')}
    return [{key: x for key, x in row.items() if key not in OPTION_KEYS}
            | {'confidence': row[column], 'task': column} for column in confidence] or [row]


def _read_cells(lines, delimiter):
    """Yield (place, row) of the lines of a table, with numbers, truth values and lists."""
    names = None
    for place, cells in lines:
        if names is None:
            names = column_names(place, cells)
        else:
            yield place, to_dict(place, names, [_cell(text, delimiter) for text in cells])


def _cell(text, delimiter):
    """Return what a cell states in JSON or as Python prints it; its text; None for an empty one."""
    text = text.strip(' ')
    if not text:
        return None
    if text.casefold() in ('true', 'false'):
        return text.casefold() == 'true'
    if delimiter == ';':        # where 0,9 is a number
        text = re.sub(r'^(-?\d+),(\d+)( ?%)?$', r'\1.\2\3', text)
    for read in (json.loads, *[ast.literal_eval] * text.startswith('[')):
        with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            return read(text)
    return float(text) if re.fullmatch(r'-?\.\d+', text) else text     # as SAS and Stata print 0.5


def _joined(row):
    """Return a row with a list `probs` for its columns probs_0, probs_1, ..., or `log_probs`."""
    lists = {}
    for key, value in row.items():
        if (match := NUMBERED.fullmatch(key)) and value is not None:
            lists.setdefault(f'{match[1]}s', []).append((int(match[2]), value))
    for name, x in lists.items():
        ks = sorted(k for k, _ in x)
        if ks != [*range(len(x))]:      # `answer` would be the index of another option
            raise ValueError(f'the columns {name}_k hold numbers for k = '
                             f'{", ".join(map(str, ks))}; wanted 0, 1, ... without a gap')
    return row | {name: [value for _, value in sorted(x)] for name, x in lists.items()}


# Files of lm-evaluation-harness


def harness_task(path) -> tuple[str, str, str]:
    """Return (task, subtask, date) of a file of lm-evaluation-harness, else ('samples', '', '').

    It is samples_<subtask>_<date>.jsonl. The task of mmlu_anatomy is mmlu if results_<date>.json
    beside it has that group.
    """
    path = Path(path)
    match = re.fullmatch(r'samples_(.+)_(\d{4}-\d\d-\d\dT[\d.-]+)\.jsonl', path.name)
    if not match:
        return 'samples', '', ''
    subtask, date = match.groups()
    groups = []
    for file in path.parent.glob(f'*_{date}.json'):
        content = parse_json(file.read_bytes(), file)
        if not isinstance(content, dict):
            raise DataError(f'{file} is not what lm_eval wrote; remove it, or evaluate again')
        groups += [group for group in content.get('group_subtasks', ())
                   if subtask.startswith(f'{group}_')]
    return max(groups, key=len, default=subtask), subtask, date


def harness_sample(row, norm='token') -> dict:
    """Convert a line that lm_eval --log_samples wrote (0.4.3 to 0.4.13) to the form of our samples.

    n_tokens are the `option_lengths` of one token each. Raises UnusableTaskError, and ValueError if
    `acc` of the line contradicts the answer.
    """
    try:
        pairs = row['filtered_resps']
        options = [call.get('arg_1') for call in row['arguments'].values() if call]  # parquet: None
        if 'acc_mutual_info' in row:    # the second half is without the question
            pairs, options = pairs[:len(pairs) // 2], options[:len(options) // 2]
        if len(pairs) < 2 or type(pairs[0]) is not list:
            raise UnusableTaskError('not multiple choice, so there are no probabilities of '
                                    'options: the model wrote an answer, or a single text was '
                                    'scored')
        if len(options) != len(pairs):
            raise ValueError(f'{len(pairs)} results of {len(options)} calls')
        texts = [option[option[:1].isspace():] for option in options]
        sample = {'id': f'{row["doc_id"]}:{row["doc_hash"][:16]}', 'options': options,
                  'log_probs': [float(log_prob) for log_prob, _ in pairs],
                  'n_tokens': option_lengths(texts, [1] * len(texts), norm)}
        target, top = _single(row['target']), int(np.argmax(sample['log_probs']))
        if len(texts) == 2 and texts[0] == texts[1]:    # after two contexts, as in WinoGrande
            answer = top if row['acc'] else 1 - top
        else:
            answer = int(target) if target.isdecimal() else (texts + [target]).index(target)
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f'not a line that lm_eval --log_samples wrote since version 0.4.3 '
                         f'({error!r})') from None
    if answer >= len(texts) or row.get('acc', top == answer) != (top == answer):
        kind = UnusableTaskError if target.startswith('[') else ValueError
        raise kind(f'its target, {row["target"]!r}, is not the only right option')
    return sample | {'answer': answer}


def _single(target):
    """Return a target as text; of a list of one, also if it is printed, its element."""
    if isinstance(target, str) and target.startswith('['):
        with contextlib.suppress(ValueError, SyntaxError):
            target = ast.literal_eval(target)
    return str(target[0] if isinstance(target, list) and len(target) == 1 else target)


def repeats(sample, filter, logged) -> bool:
    """Return whether a sample of lm_eval is in `logged`, {id: (sample, filter)}; else add it."""
    first, first_filter = logged.setdefault(sample['id'], (sample, filter))
    if first != sample:
        why = (f'of the filters {first_filter} and {filter}; keep the lines of one filter'
               if filter != first_filter else
               'of several models or calls; give each of them a file of its own')
        raise ValueError(f'question {sample["id"]} is there twice with other log-probabilities, '
                         f'{why}')
    return first is not sample


OPTION_KEYS = 'probs', 'log_probs'
SAMPLED_KEYS = 'answers', 'sampled_responses'       # the second in tables of uqlm


def _values(row, norm):
    """Return ('probs', 'log_probs' or 'confidence', {key of a sample: value}, {} if not stated)."""
    kinds = *OPTION_KEYS, 'confidence', *SAMPLED_KEYS
    kind = next((x for x in kinds if row.get(x) is not None), 'confidence')
    if kind not in row:
        raise ValueError(f'neither {", ".join(kinds[:-1])} nor columns probs_0, probs_1, ..., but '
                         f'the keys {", ".join(map(str, row))}; --confidence names another '
                         f'column, and logits may stand in log_probs')
    if kind in SAMPLED_KEYS:
        row, kind = row | _sampled(row, row[kind]), 'confidence'
    if kind == 'confidence':
        stated, correct = row[kind], row.get('correct')
        value = parse_probability(stated) if isinstance(stated, str) else stated
        if value is None:
            if re.fullmatch(r'\s*-?[\d.,]+\s*', str(stated)):
                raise ValueError(f'confidence is {stated!r}; wanted a number such as 0.8 or 80 %')
            return kind, {}
        if isinstance(correct, list) or correct not in (0, 1):      # so are true and false
            hint = ('write true, false, 1 or 0' if 'correct' in row else
                    '--correct names another column')
            raise ValueError(f'correct must be true or false, not {correct!r:.60}; {hint}')
        if type(value) in (int, float) and 1 < value <= 100:
            raise ValueError(f'confidence is {value}, not from 0 to 1; if these are percent, write '
                             f'{value} % or divide by 100')
        value = metrics.check_confidence(_numbers(kind, [value]))[0]
        more = {'predicted': str(row['response'])} if 'response' in row else {}
        return kind, outcome(value, correct) | more
    values, label = _numbers(kind, row.get(kind)), row.get('answer', row.get('label'))
    other = row.get('label')        # as text it is the name of a class
    differs = isinstance(other, (int, float)) and other != label
    if type(label) not in (int, float) or label % 1 or differs:
        beside = f' beside the label {other!r:.60}' if differs else ''
        raise ValueError(f'answer must be the index of the correct option, not {label!r}{beside}')
    label = int(label)      # pandas writes 1.0 beside a null
    texts = row.get('options', [])
    options = row.get('choices') or texts
    if not isinstance(options, list) or len(options) != len(values):
        options = range(1, len(values) + 1)
    sample = {'n_tokens': [1] * len(values), 'options': [*map(str, options)], 'answer': label}
    if kind == 'probs':
        metrics.check_probs([values], [label])
        _check_confidence(row, values, label)
        scores = np.log(np.maximum(values, metrics.NLL_FLOOR))
        return kind, sample | {'probs': values.tolist(), 'log_probs': scores.tolist()}
    n_tokens = _numbers('n_tokens', row.get('n_tokens', [1] * len(values)))
    if n_tokens.shape != values.shape or not ((n_tokens >= 1) & (n_tokens < np.inf)).all():
        raise ValueError(f'n_tokens must be 1 or more for each log-probability, not {n_tokens}')
    if (np.abs(values[np.isfinite(values)]) >= 1e300).any():    # sums of them would be infinite
        raise ValueError(f'log_probs must be below 1e300 in magnitude, not {row[kind]!r:.60}')
    if norm in ('char', 'byte') and not (isinstance(texts, list) and len(texts) == len(values)
                                         and all(isinstance(text, str) for text in texts)):
        raise ValueError(f'--norm={norm} needs options, the text of each, not {texts!r:.60}')
    scores = option_scores(values, texts, n_tokens.tolist(), norm)
    metrics.check_labels([label], 1, len(scores))
    metrics.softmax(scores)         # which refuses NaN, and -inf alone
    if np.isinf(scores[label]):
        raise ValueError(f'label {label} has the score -inf')
    return kind, sample | {'log_probs': scores.tolist()}


def _check_confidence(row, probs, label):
    """Raise ValueError for a confidence, or a correctness, that is not that of `probs` [K]."""
    stated, correct = row.get('confidence'), row.get('correct')
    value = parse_probability(stated) if isinstance(stated, str) else stated
    if type(value) in (int, float) and abs(value - max(probs)) > 0.0051:    # it may be rounded
        raise ValueError(f'confidence is {stated!r:.60}, and the largest of probs '
                         f'{max(probs):.4g}; leave one of them out, or read it by '
                         '--confidence=confidence')
    is_top = probs[label] == max(probs)
    if type(correct) in (bool, int) and bool(correct) != is_top and (
            (probs == max(probs)).sum() == 1):
        raise ValueError(f'correct is {correct}, and by probs the top option is '
                         f'{"right" if is_top else "wrong"}; leave one of them out')


def _sampled(row, answers):
    """Return the confidence and correctness of written answers: a share of equal texts."""
    def plain(text):
        return str(text).strip(' \t\n.').casefold()

    if not isinstance(answers, list) or not answers:
        raise ValueError(f'answers must be a list of texts, not {answers!r:.60}')
    texts, references = [*map(plain, answers)], row.get('answer')
    text = plain(row['response']) if 'response' in row else Counter(texts).most_common(1)[0][0]
    if (correct := row.get('correct')) is None and references is not None:
        correct = text in map(plain, references if isinstance(references, list) else [references])
    elif 'response' not in row:
        raise ValueError('the right answer is missing: answer, a text or a list of texts')
    return {'confidence': texts.count(text) / len(texts), 'correct': correct}


def _numbers(key, values):
    if not isinstance(values, list) or not all(type(x) in (int, float) for x in values):
        raise ValueError(f'{key} must be numbers, not {values!r:.60}')
    return np.array(values, dtype=np.float64)


class ReportInput:
    """The numbers of a task's samples that metrics.report reads, in 8 bytes each."""

    def __init__(self):
        self.probs, self.scores = array('d'), array('d')
        self.labels, self.n_options = array('q'), array('q')

    def append(self, sample):
        """Add a sample of `read_predictions`."""
        if 'log_probs' not in sample:
            self.probs.append(sample['confidence'])
            self.labels.append(sample['correct'])
            return
        scores = sample['log_probs']
        self.scores.extend(scores)
        self.probs.extend(sample.get('probs', [math.nan] * len(scores)))
        self.labels.append(sample['answer'])
        self.n_options.append(len(scores))

    def arrays(self):
        """Return probs, labels, n_options and scores, the arguments of metrics.report."""
        labels, n_options = np.array(self.labels), np.array(self.n_options)
        if not len(n_options):
            return np.array(self.probs), labels, None, None
        is_option = np.arange(n_options.max()) < n_options[:, None]
        probs, scores = np.zeros(is_option.shape), np.full(is_option.shape, -np.inf)
        probs[is_option], scores[is_option] = self.probs, self.scores
        unstated = np.isnan(probs[:, 0])
        if not unstated.any():
            return probs, labels, n_options, None
        probs[unstated] = metrics.softmax(scores[unstated])
        return probs, labels, n_options, scores
