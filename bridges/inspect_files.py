"""Convert logs of Inspect (inspect_ai), .eval and .json, to rows of prediction files."""

import math
import re
import zipfile

from bridges.cells import to_truth
from runtime.errors import DataError
from runtime.readers import parse_json

GRADES = {'C': 1, 'I': 0, 'N': 0, 'P': 0, 'yes': 1, 'no': 0}    # P: partly right
METADATA = {'confidence', 'probs', 'log_probs'}     # what is read in the metadata of a score


def is_log(path):
    """Return whether a file is a log of Inspect, by its name or by the start of a .json file."""
    if path.suffix != '.json' or not path.is_file():
        return path.suffix == '.eval'
    with open(path, 'rb') as file:
        return bool(re.match(rb'\s*{\s*"version":\s*\d+,\s*"status":', file.read(100)))


def log_rows(path, chosen=()):
    """Yield (place, row) of each score in a log, epoch after epoch; each scorer is a task.

    chosen: names of confidences in the metadata of scores. Prints what is left out; raises
    DataError if no score is right or wrong.
    """
    parts = _parts(path)
    tasks, unusable = {}, {}
    unscored, n_partly = [], 0
    place = path
    try:
        name = next(parts)['eval']['task']
        for number, sample in enumerate(parts, 1):
            place = f'{path}: sample {number}'      # until its id is read
            place = f'{path}: sample {sample["id"]}, epoch {sample["epoch"]}'
            if not sample.get('scores'):
                error = sample.get('error') or {}
                unscored.append(f'{place}: {error.get("message", "no score")}')
            for scorer, score in (sample.get('scores') or {}).items():
                value = score['value']
                for key, x in (value if isinstance(value, dict) else {'': value}).items():
                    task = '.'.join(filter(None, (name, scorer, key)))
                    grade = GRADES[x] if isinstance(x, str) and x in GRADES else to_truth(x)
                    if x is None or x != x:     # NaN: a judge without a verdict
                        unscored.append(f'{place}: {task}: {score.get("explanation")}')
                        continue
                    if grade is None:
                        unusable.setdefault(task, f'{place}: {task} is {x!r:.40}; wanted C, I, N, '
                                                  f'P, 1, 0, true or false')
                    n_partly += x == 'P'
                    row = _row(sample, score, METADATA | {*chosen})
                    row |= {'task': task, 'correct': grade}
                    tasks.setdefault(task, []).append((sample['epoch'], place, row))
    except (LookupError, TypeError, AttributeError) as error:
        raise DataError(f'{place}: not as Inspect writes it: {error!r:.80}') from error
    tasks = {task: rows for task, rows in tasks.items() if task not in unusable}
    if not tasks:
        raise DataError([*unusable.values(), f'{path}: no sample has a score; `inspect score` adds '
                                             f'scores'][0])
    for reason in unusable.values():
        print(f'{reason}; the scorer is left out')
    if unscored:
        print(f'{len(unscored)} without a score are left out, the first: {unscored[0]:.200}')
    if n_partly:
        print(f'{path}: {n_partly} are partly right, P, and count as wrong')
    having = [rows for rows in tasks.values() if any({*chosen} & {*row} for *_, row in rows)]
    for rows in having or tasks.values():
        keys = dict.fromkeys(key for *_, row in rows for key in row)
        for _, place, row in sorted(rows, key=lambda item: item[0]):
            yield place, keys | row


def _row(sample, score, names):
    """Return the row of a score, with `names` of its metadata, or the probability of its letter."""
    text = sample['input'] if isinstance(sample['input'], str) else str(
        [message.get('content') for message in sample['input']])    # without ids, which are random
    row = {'id': sample['id'], 'question': text, 'answer': sample['target'],
           'response': score.get('answer')}
    wanted = (sample.get('metadata'), ('subject', 'category')), (score.get('metadata'), names)
    row |= {key: given[key] for given, keys in wanted for key in keys if key in (given or ())}
    return row if names & {*row} or not sample.get('choices') else (
        row | _letter_probability(sample['output'], score))


def _letter_probability(output, score):
    """Return {'confidence': probability of the token that is the chosen letter}, {} without one.

    It is the first such token from the last 'ANSWER' on, for which Inspect's prompts ask.
    """
    # of shuffled options, `answer` is the letter in the dataset
    shuffled = re.search('\nShuffled answer:\nANSWER: (.*)$', score.get('explanation') or '')
    letter = shuffled[1] if shuffled else score.get('answer')
    for choice in output.get('choices', ())[:1]:
        tokens = (choice.get('logprobs') or {}).get('content') or []
        left = ''.join(token['token'] for token in tokens).upper().rfind('ANSWER')
        for token in tokens:
            left -= len(token['token'])
            if left < 0 and token['token'].strip(' \n\t*()[].:,"`').upper() == letter:
                return {'confidence': math.exp(min(0, token['logprob']))}
    return {}


def _parts(path):
    """Yield the header of a log, then its samples."""
    if path.suffix == '.json':
        log = parse_json(path.read_bytes(), path)
        yield from (log, *(log.get('samples') or ()))
        return
    try:
        with zipfile.ZipFile(path) as archive:
            names = dict.fromkeys(archive.namelist())
            # that of an evaluation that was killed is in the journal
            header = 'header.json' if 'header.json' in names else '_journal/start.json'
            for name in (header, *(name for name in names if name.startswith('samples/'))):
                yield parse_json(_content(archive, name), f'{path}: {name}')
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        reason = getattr(error, 'strerror', None) or error
        raise DataError(f'cannot read {path} as a log of Inspect: {reason}') from None


def _content(archive, name):
    """Return the bytes of a file in a zip; those of newer logs are compressed by zstandard."""
    try:
        return archive.read(name)
    except NotImplementedError:     # before Python 3.14
        try:
            import pyarrow
        except ImportError:
            raise DataError(f'{archive.filename}: the zstandard in it needs Python 3.14, or '
                            f'pyarrow: pip install pyarrow, or "nanocal[files]"') from None
    info = archive.getinfo(name)
    archive.fp.seek(info.header_offset + 26)    # the lengths of two fields before the data
    lengths = [int.from_bytes(archive.fp.read(2), 'little') for _ in range(2)]
    archive.fp.seek(sum(lengths), 1)
    return pyarrow.decompress(archive.fp.read(info.compress_size), info.file_size, codec='zstd',
                              asbytes=True)
