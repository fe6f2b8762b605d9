"""Raw files to tokens or to questions. This file finds data files and reads rows from them."""

import codecs
import collections
import contextlib
import csv
import gzip
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import zlib
from pathlib import Path


class DataError(ValueError):
    """A data file, row or tokenizer that cannot be used; the message names file and line."""


@contextlib.contextmanager
def forked_pool(processes, initializer=None, *arguments):
    """A multiprocessing.Pool of forked processes that have each called initializer(*arguments).

    The arguments are inherited, not pickled. A worker does not run the signal handlers of its
    parent: Pool ends its workers by SIGTERM, and a worker that is about to wait for a task would
    never get to run a handler written in Python. Ctrl-C is left to the parent, which ends them.
    """
    # a signal right after the fork waits until the worker has replaced those handlers
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    try:
        pool = multiprocessing.get_context('fork').Pool(
            processes, _begin_worker, (initializer, arguments))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    with pool:
        yield pool
        pool.close()
        pool.join()


def _begin_worker(initializer, arguments):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})
    if initializer:
        initializer(*arguments)


def fetch(source, patterns, revision=None):
    """Return the files of a dataset, a sorted list of paths; raises DataError.

    source:   a file, a folder, or a hub dataset name like 'allenai/tulu-3-sft-mixture'
    patterns: globs; the first one with a match in the folder decides. If '*.zip' is among them, an
              archive on the hub is downloaded and unpacked first
    revision: the hub commit, tag or branch to read; pin it, because datasets change
    """
    path = local_path(source)
    if path.is_file():
        return [path]
    if not path.is_dir():
        if source.startswith(('/', '.', '~')) or source.count('/') != 1:
            raise DataError(f'no file or folder at {source}, and it is not a hub dataset name')
        path = _download(source, patterns, revision)
    for pattern in patterns:
        files = sorted(p for p in path.glob(pattern) if p.is_file())
        if files:
            return files
    raise DataError(f'{source} holds nothing that matches {" or ".join(patterns)}')


def local_path(source):
    """Return `source` as a Path with `~` expanded; raises DataError for an unknown user."""
    try:
        return Path(source).expanduser()
    except RuntimeError as error:
        raise DataError(f'{source}: {error}') from error


@contextlib.contextmanager
def writing(path):
    """Name `path` in the error when writing fails: the error of a full disk does not."""
    try:
        yield
    except OSError as error:
        raise DataError(f'cannot write {path}: {error.strerror or error}') from error


def _download(name, patterns, revision):
    from checkpoint import CheckpointError, download
    try:
        folder = download(name, patterns, revision, repo_type='dataset')
    except CheckpointError as error:
        raise DataError(str(error)) from error
    for archive in folder.glob('*.zip'):
        unpacked = archive.with_suffix('')
        if not unpacked.exists():
            with writing(unpacked):
                shutil.unpack_archive(archive, f'{unpacked}.tmp')
                os.replace(f'{unpacked}.tmp', unpacked)
    return folder


def require_text(value, what):
    """Return `value` if it is a string of valid Unicode; raises DataError that names `what`."""
    if not isinstance(value, str):
        raise DataError(f'{what} is not text but {type(value).__name__}')
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(f'{what} is not valid Unicode: {error.reason}') from None
    return value


def decode(raw, path, line=1):
    """Return the text of UTF-8 bytes that begin at `line` of a file; the DataError names the line.
    """
    try:
        return raw.decode('utf-8')
    except UnicodeDecodeError as error:
        line += raw.count(b'\n', 0, error.start)
        raise DataError(f'{path}:{line}: not UTF-8: {error.reason} at byte '
                        f'0x{raw[error.start]:02x}') from error


def read_text(path):
    """Return the text of a UTF-8 file with '\\n' as line ends; raises DataError."""
    try:
        raw = Path(path).read_bytes().removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        raise DataError(f'cannot read {path}: {error.strerror}') from error
    return decode(raw, path).replace('\r\n', '\n').replace('\r', '\n')


def read_rows(path):
    """Yield (place, row) from a .json list, .jsonl, .csv or .parquet file, plain or gzipped.

    `place` is 'file:line', or 'file: row n' for parquet and JSON lists; both count from 1. A row is
    a dict, or a list of strings for csv. A line that cannot be parsed is yielded as a DataError, so
    that the caller can stop or skip it. A file that cannot be read raises DataError.
    """
    path = Path(path)
    readers = {'.jsonl': _jsonl_rows, '.json': _json_rows, '.csv': _csv_rows}
    kind = _kind(path)
    if kind == '.parquet':
        yield from _parquet_rows(path)
        return
    if kind not in readers:
        raise DataError(f'{path}: unknown kind of file; .json, .jsonl, .csv and .parquet are read, '
                        f'each also with .gz')
    with _reading(path), _open(path) as file:
        yield from readers[kind](path, file)


def _kind(path):
    return (path.with_suffix('') if path.suffix == '.gz' else path).suffix


def _open(path):
    return (gzip.open if path.suffix == '.gz' else open)(path, 'rb')


@contextlib.contextmanager
def _reading(path):
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f'cannot read {path}: {error}') from error


def count_rows(paths):
    """Return roughly how many rows `read_rows` will yield, for a progress bar."""
    return sum(_count(Path(path)) for path in paths)


def _count(path):
    if _kind(path) == '.parquet':
        return _open_parquet(path).metadata.num_rows
    if _kind(path) == '.json':
        return sum(1 for _ in read_rows(path))
    with _reading(path), _open(path) as file:
        return sum(block.count(b'\n') for block in iter(lambda: file.read(1 << 20), b''))


def _lines(path, file):
    """Yield (number, raw line) of an open file, without the byte order mark."""
    for number, raw in enumerate(file, 1):
        yield number, raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw


def _jsonl_rows(path, file):
    for number, raw in _lines(path, file):
        raw = raw.strip()       # an error at the line break would count as the next line
        if not raw:
            continue
        try:
            row = _parse_json(decode(raw, path, number), path, number)
        except DataError as error:
            row = error
        yield f'{path}:{number}', row


def _json_rows(path, file):
    rows = _parse_json(decode(file.read().removeprefix(codecs.BOM_UTF8), path), path)
    if not isinstance(rows, list):
        raise DataError(f'{path}: a .json file must hold a list of rows; with one row per '
                        f'line it is .jsonl')
    for number, row in enumerate(rows, 1):
        yield f'{path}: row {number}', row


def _parse_json(text, path, line=1):
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f'{path}:{line + error.lineno - 1}: broken JSON: {error.msg} (column '
                        f'{error.colno})') from error
    except (ValueError, RecursionError) as error:   # thousands of digits, or nested brackets
        raise DataError(f'{path}:{line}: unusable JSON: {error}') from error


def _csv_rows(path, file):
    reader = csv.reader(decode(raw, path, number) for number, raw in _lines(path, file))
    try:
        for row in filter(None, reader):  # no blank lines
            yield f'{path}:{reader.line_num}', row
    except csv.Error as error:
        raise DataError(f'{path}:{reader.line_num}: broken csv: {error}') from error


def _open_parquet(path):
    import pyarrow
    import pyarrow.parquet
    try:
        return pyarrow.parquet.ParquetFile(path)
    except (OSError, pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise DataError(f'{path}: not a readable parquet file: {error}') from error


def _parquet_rows(path):
    import pyarrow
    file, number = _open_parquet(path), 0
    try:
        for batch in file.iter_batches():
            for row in _batch_rows(batch, path, number):
                number += 1
                yield f'{path}: row {number}', row
    except (OSError, pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise DataError(f'{path}: damaged after row {number}: {error}') from error


def _batch_rows(batch, path, number):
    try:
        return batch.to_pylist()
    except UnicodeDecodeError:      # in one of the rows: find it
        pass
    rows = []
    for i in range(batch.num_rows):
        try:
            rows += batch.slice(i, 1).to_pylist()
        except UnicodeDecodeError as error:
            rows.append(DataError(f'{path}: row {number + i + 1}: not UTF-8: {error.reason}'))
    return rows


# what parsing a bad row raises: wrong fields are found by using them
BAD_ROW = (DataError, KeyError, TypeError, AttributeError)


def row_error(place, error):
    """Return a DataError that says what is wrong with the row at `place`."""
    message = str(error) if isinstance(error, DataError) else (
        f'not the fields of its format: {error!r}')
    message = message.encode('utf-8', 'backslashreplace').decode()  # lone surrogates do not print
    return DataError(message if message.startswith(place) else f'{place}: {message}')


def parse_rows(rows, parse, on_bad_row):
    """Return (items, messages of bad rows) of (place, row) pairs; 'stop' raises the first message.

    parse(row, number) returns an item, or None to ignore the row; `number` counts from 0. Items are
    given their `place`, and their `id` is made unique: the second 'x' becomes 'x#2'.
    """
    items, bad, seen = [], [], {}
    for place, row in rows:
        try:
            if isinstance(row, DataError):
                raise row
            item = parse(row, len(items) + len(bad))
        except BAD_ROW as error:
            error = row_error(place, error)
            if on_bad_row == 'stop':
                raise DataError(f'{error}; --on_bad_row=skip leaves such rows out') from None
            bad.append(str(error))
            continue
        if item is not None:
            item.id, item.place = _unique(item.id, seen), place
            items.append(item)
    return items, bad


def _unique(id, seen):
    seen[id] = times = seen.get(id, 0) + 1
    return id if times == 1 else _unique(f'{id}#{times}', seen)


def draw(items, limit, seed):
    """Return at most `limit` items of each language, drawn evenly from its subjects, in order.

    The choice depends only on the seed and on the items' subjects and ids. A larger limit contains
    the sample of a smaller one; languages that share ids get the same questions.
    """
    if limit is None:
        return items

    def rank(*key):
        return hashlib.blake2b(repr((seed, *key)).encode(), digest_size=8).digest()

    counts, queues = collections.Counter(), collections.defaultdict(list)
    for i in sorted(range(len(items)), key=lambda i: rank(items[i].subject, items[i].id)):
        language, subject = items[i].language, items[i].subject
        # the first of every subject goes before the second of any
        counts[language, subject] += 1
        queues[language].append((counts[language, subject], rank(subject), i))
    return [items[i] for i in sorted(i for queue in queues.values()
                                     for _, _, i in sorted(queue)[:limit])]
