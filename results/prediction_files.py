"""Print every calibration metric of files of predictions, from any source.

    python metrics.py samples.jsonl             # installed: python -m nanocal.metrics

Like metrics.py it needs numpy alone and nothing of the clone. The lines that lm-evaluation-harness
wrote are converted here for every other reader too.
"""

import argparse
import contextlib
import gzip
import json
import os
import re
import signal
import sys
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING or __package__ != 'nanocal':
    import metrics              # in the clone, at the top level
else:
    from . import metrics       # installed

NORMS = ('token', 'sum', 'char', 'byte')    # see `option_lengths`


def main(arguments=None):
    """Print the reports of files of predictions, one JSON object per line; see --help."""
    parser = argparse.ArgumentParser(
        prog='metrics.py', description='Print every calibration metric of files of predictions.',
        formatter_class=argparse.RawDescriptionHelpFormatter, epilog="""\
each line of a file is a JSON object of one of these forms:
  {"probs": [0.7, 0.2, 0.1], "answer": 0}     answer, or label: index of the correct option
  {"log_probs": [-3.1, -4.0], "answer": 1}    divided by "n_tokens": [2, 3] if given; then softmax
  {"confidence": 0.8, "correct": true}        the prediction alone
  or of samples_<task>_<date>.jsonl, which lm_eval --log_samples writes
Lines with "split": "validation" are left out. Each "task" of a file has a report of its own, and
so has each group of one call of lm_eval, such as mmlu.

example: python metrics.py out/base/samples.jsonl
         python metrics.py --norm=char out/model/samples_hellaswag_*.jsonl""")
    parser.add_argument('files', nargs='+', metavar='file', help='such as the samples.jsonl of '
                        'evaluate.py; may be .gz')
    parser.add_argument('--norm', choices=NORMS, default='token',
                        help='divisor of the log-probability of an option. token (the default): '
                        'number of its tokens, or 1 for files of lm_eval, which lack it (acc); '
                        'sum: 1; char: its characters (acc_norm); byte: its bytes (acc_bytes)')
    options, tasks = parser.parse_args(arguments), {}
    for path in options.files:
        try:
            task, _, date = harness_task(path)
            source = f'{Path(path).parent}, {date}' if date else path
            for name, row in _read_rows(path, task, options.norm):
                tasks.setdefault((source, name), []).append(row)
        except (OSError, EOFError, zlib.error) as error:    # the last two of a damaged .gz file
            hint = '; name a file in it, such as samples.jsonl' * Path(path).is_dir()
            sys.exit(f'error: {path}: {getattr(error, "strerror", None) or error}{hint}')
        except ValueError as error:
            sys.exit(f'error: {path}:{error}')
    several = len({source for source, _ in tasks}) > 1
    for (source, task), rows in tasks.items():
        title, result = ': '.join(filter(None, (several and source, task))), _report_of_rows(rows)
        print(*filter(None, (title, result, few_rows_note(result['n'], 'rows'))), sep='\n')
        if title:
            print()
    sys.stdout.flush()


def _read_rows(path, group, norm):
    """Yield (task, what _parse returns) of each line; ValueError begins with the line number."""
    first_kinds, rows = {}, []
    with (gzip.open if str(path).endswith('.gz') else open)(path, 'rb') as lines:
        for number, line in enumerate(lines, 1):
            with _line_errors(number):
                if line.strip():
                    rows.append((number, json.loads(line.decode('utf-8-sig'))))
    # of the samples of evaluate.py, those that results.samples.latest_samples returns
    keys = {number: key for number, row in rows if (key := _sample_key(row))}
    prompts = {keys[number]: row['prompt'] for number, row in rows if number in keys}
    latest = {(keys[number], row['id']): number for number, row in rows
              if number in keys and row['prompt'] == prompts[keys[number]]}
    for number, row in rows:
        with _line_errors(number):
            if not isinstance(row, dict):
                raise ValueError(f'not a JSON object: {str(row)[:40]}')
            if row.get('split') == 'validation' or number in keys and (
                    latest.get((keys[number], row['id'])) != number
                    or row.get('confidence', 0) is None):
                continue
            if 'filtered_resps' in row:
                task, parsed = group, _parse(harness_sample(row, norm), 'token')
            else:
                task, parsed = str(row.get('task', '')), _parse(row, norm)
            first = first_kinds.setdefault(task, parsed[0])
            if (first == 'confidence') != (parsed[0] == 'confidence'):
                raise ValueError(f'{parsed[0]}, but the task begins with {first}')
        yield task, parsed
    if not first_kinds:
        raise ValueError(' no row to score')


@contextlib.contextmanager
def _line_errors(number):
    """Begin a ValueError in the block with the number of the line; say what a line should be."""
    try:
        yield
    except (ValueError, OverflowError, RecursionError) as error:
        raise ValueError(
            f'{number}: {str(error).removeprefix("row 0: ")}. Wanted: a JSON object with probs (or '
            f'log_probs) and answer, or confidence and correct, or a line of multiple choice by '
            f'lm_eval --log_samples') from None


def _sample_key(row):
    """Return a key of the question that a sample of evaluate.py belongs to; () for other rows."""
    keys = 'task', 'split', 'language', 'id', 'prompt'
    if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in keys):
        return ()
    return *(row[key] for key in keys[:3]), str(row.get('text', row['id']))


def harness_task(path) -> tuple[str, str, str]:
    """Return (task, subtask, date) of lm-evaluation-harness's samples_<subtask>_<date>.jsonl.

    The task of mmlu_anatomy is mmlu if results_<date>.json beside the file has that group. A file
    with another name is ('samples', '', '').
    """
    path = Path(path)
    if not (match := re.fullmatch(r'samples_(.+)_(\d{4}-\d\d-\d\dT[\d.-]+)\.jsonl', path.name)):
        return 'samples', '', ''
    subtask, date = match.groups()
    groups = [group for results in path.parent.glob(f'*_{date}.json')
              for group in json.loads(results.read_text(encoding='utf-8')).get('group_subtasks', ())
              if subtask.startswith(f'{group}_')]
    return max(groups, key=len, default=subtask), subtask, date


def harness_sample(row, norm='token') -> dict:
    """Convert a line that lm_eval 0.4.13 --log_samples wrote to the form of our samples.

    Returns {'id', 'answer': index of the correct option, 'options': [K], 'log_probs': [K] in nats,
    'n_tokens': [K], the divisors: the length in characters or UTF-8 bytes for norm 'char' or
    'byte', else 1, since the file does not give the number of tokens}. Raises ValueError if the
    task is not multiple choice, or if `acc` of the line contradicts the answer, as with several
    correct options.
    """
    try:
        pairs, target = row['filtered_resps'], row['target']
        options = [call.get('arg_1') for call in row['arguments'].values()]
        if 'acc_mutual_info' in row:    # the second half is without the question
            pairs, options = pairs[:len(pairs) // 2], options[:len(options) // 2]
        if len(pairs) < 2 or type(pairs[0]) is not list:
            raise ValueError('not multiple choice, so there are no probabilities of options: the '
                             'model wrote an answer, or a single text was scored')
        texts = [option[option[:1].isspace():] for option in options]
        sample = {'id': f'{row["doc_id"]}:{row["doc_hash"][:16]}', 'options': options,
                  'log_probs': [float(log_prob) for log_prob, _ in pairs],
                  'n_tokens': option_lengths(texts, [1] * len(texts), norm)}
        top = int(np.argmax(sample['log_probs']))
        if len(texts) == 2 and texts[0] == texts[1]:    # after two contexts, as in WinoGrande
            answer = top if row['acc'] else 1 - top
        else:
            answer = int(target) if target.isdigit() else (texts + [target]).index(target)
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f'not a line of lm_eval 0.4.13 ({error!r})') from None
    if answer >= len(texts) or row.get('acc', top == answer) != (top == answer):
        raise ValueError(f'its target, {target!r}, is not the only right option')
    return sample | {'answer': answer}


def few_rows_note(n, unit='questions') -> str:
    """Return why rmsce and mad of n rows can be far below ece; '' for 1,000 rows or more."""
    n_bins = max(1, n // 100)
    return '' if n >= 1000 else (
        f'RMSCE and MAD have bins of 100 {unit}, so {n_bins} bin{"s" * (n_bins > 1)} here; with '
        f'few bins they can be far below ECE, which has 10')


def option_lengths(texts, n_tokens, norm):
    """Return the divisor of the log-probability of each option, int [K], at least 1.

    norm: 'token' for n_tokens, 'sum' for 1, 'char' and 'byte' for the characters or UTF-8 bytes of
    the texts, which have no leading space.
    """
    if norm in ('token', 'sum'):
        return [*n_tokens] if norm == 'token' else [1] * len(n_tokens)
    return [max(1, len(text if norm == 'char' else text.encode())) for text in texts]


def _parse(row, norm):
    """(kind, values, label) of one line; kind is 'probs', 'log_probs' or 'confidence'."""
    kind = next((x for x in ('probs', 'log_probs', 'confidence') if x in row), 'probs')
    if kind == 'confidence':
        if row.get('correct') not in (0, 1):    # so are true and false
            raise ValueError(f'correct must be true or false, not {row.get("correct")!r}')
        return kind, metrics.check_confidence(_numbers(kind, [row[kind]]))[0], bool(row['correct'])
    values, label = _numbers(kind, row.get(kind)), row.get('answer', row.get('label'))
    if type(label) is not int:
        raise ValueError(f'answer must be the index of the correct option, not {label!r}')
    if kind == 'probs':
        metrics.check_probs([values], [label])
        return kind, values, label
    n_tokens = _numbers('n_tokens', row.get('n_tokens', [1] * len(values)))
    if n_tokens.shape != values.shape or not ((n_tokens >= 1) & (n_tokens < np.inf)).all():
        raise ValueError(f'n_tokens must be 1 or more for each log-probability, not {n_tokens}')
    if (np.abs(values[np.isfinite(values)]) >= 1e300).any():    # sums of them would be infinite
        raise ValueError(f'log_probs must be below 1e300 in magnitude, not {row[kind]!r:.60}')
    texts = row.get('options')
    if norm in ('char', 'byte') and (not isinstance(texts, list) or len(texts) != len(values)
                                     or not all(isinstance(text, str) for text in texts)):
        raise ValueError(f'--norm={norm} needs options, the text of each, not {texts!r:.60}')
    texts = [text.removeprefix(' ') for text in texts or ()]
    scores = values / option_lengths(texts, n_tokens.tolist(), norm)
    metrics.nll(metrics.softmax([scores]), [label], scores=[scores])    # for its checks
    return kind, scores, label


def _numbers(key, values):
    if not isinstance(values, list) or not all(type(x) in (int, float) for x in values):
        raise ValueError(f'{key} must be numbers, not {values!r:.60}')
    return np.array(values, dtype=np.float64)


def _report_of_rows(rows):
    kinds, values, labels = zip(*rows, strict=True)
    if kinds[0] == 'confidence':
        return metrics.report(values, labels)
    n_options = np.array([len(x) for x in values])
    probs = np.zeros((len(rows), n_options.max()))
    scores = np.full(probs.shape, -np.inf)
    for i, (kind, x) in enumerate(zip(kinds, values, strict=True)):
        probs[i, :len(x)] = x if kind == 'probs' else metrics.softmax(x)
        scores[i, :len(x)] = np.log(np.maximum(x, metrics.NLL_FLOOR)) if kind == 'probs' else x
    return metrics.report(probs, labels, n_options, scores=scores if 'log_probs' in kinds else None)


if __name__ == '__main__':
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)   # `| head` ends it silently
    try:
        main()
    except OSError as error:        # of standard output, such as a full disk
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)    # the rest would fail again at exit
        sys.exit(f'error: standard output cannot be written: {error.strerror}')
