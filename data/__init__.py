"""Raw files to tokens or to questions. This file: finding files and reading rows out of them."""

import codecs
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
    """A data file, row or tokenizer that cannot be used; the message names the place."""


@contextlib.contextmanager
def forked_pool(processes, initializer=None, *arguments):
    """A multiprocessing.Pool of forked processes, in each of which initializer(*arguments) has run.

    The arguments are inherited, not pickled. SIGTERM ends a worker at once, whatever handler the
    process that forks has: Pool ends its workers by it, and one that was just about to wait for a
    task would wait for ever, for a handler in Python that never gets to run.
    """
    # SIGTERM waits until the worker has set its own action: it may come right after the fork
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)    # Ctrl-C: the parent ends its workers
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    if initializer:
        initializer(*arguments)


def fetch(source, patterns, revision=None):
    """Files of a dataset: `source` if it is a file, else those in a folder or a hub dataset.

    source:   a file, a folder, or a hub dataset name like 'allenai/tulu-3-sft-mixture'
    patterns: globs; the first that matches anything in the folder decides. With '*.zip' among them
              an archive that the hub has instead is unpacked first
    revision: the hub commit, tag or branch to read; pin it, datasets change
    Returns a sorted list of paths; raises DataError.
    """
    path = local_path(source)
    if path.is_file():
        return [path]
    if not path.is_dir():
        if source.startswith(('/', '.', '~')) or source.count('/') != 1:
            raise DataError(f'no file or folder at {source}, and it is not a hub dataset name')
        path = _download(source, patterns, revision)
    for pattern in patterns:
        found = sorted(p for p in path.glob(pattern) if p.is_file())
        if found:
            return found
    raise DataError(f'{source} holds nothing that matches {" or ".join(patterns)}')


def local_path(source):
    """`source` as a Path, `~` expanded; raises DataError for the home of an unknown user."""
    try:
        return Path(source).expanduser()
    except RuntimeError as error:
        raise DataError(f'{source}: {error}') from error


@contextlib.contextmanager
def writing(path):
    """Raise DataError that names `path` where writing fails: a full disk's own error does not."""
    try:
        yield
    except OSError as error:
        raise DataError(f'cannot write {path}: {error.strerror or error}') from error


def _download(name, patterns, revision):
    from huggingface_hub import snapshot_download
    try:
        folder = Path(snapshot_download(name, repo_type='dataset', revision=revision,
                                        allow_patterns=list(patterns)))
        for archive in folder.glob('*.zip'):
            unpacked = archive.with_suffix('')
            if not unpacked.exists():
                shutil.unpack_archive(archive, f'{unpacked}.tmp')
                os.replace(f'{unpacked}.tmp', unpacked)
        return folder
    except Exception as error:  # the hub raises many kinds, of its own and of its HTTP client
        reason = str(error).strip().split('\n')[0]
        raise DataError(f'there is no file or folder {name}, and getting the dataset {name} from '
                        f'the hub failed ({type(error).__name__}: {reason}); check the name and '
                        f'the network') from error


def require_text(value, what):
    """`value` if it is a string that can be written as UTF-8; raises DataError naming `what`."""
    if not isinstance(value, str):
        raise DataError(f'{what} is not text but {type(value).__name__}')
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(f'{what} is not valid Unicode: {error.reason}') from None
    return value


def decode(raw, path, line=1):
    """The text of UTF-8 bytes that begin at `line` of a file; raises DataError with the line."""
    try:
        return raw.decode('utf-8')
    except UnicodeDecodeError as error:
        line += raw.count(b'\n', 0, error.start)
        raise DataError(f'{path}:{line}: not UTF-8: {error.reason} at byte '
                        f'0x{raw[error.start]:02x}') from error


def read_text(path):
    """The text of a UTF-8 file, line ends as '\\n'; raises DataError."""
    try:
        raw = Path(path).read_bytes().removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        raise DataError(f'cannot read {path}: {error.strerror}') from error
    return decode(raw, path).replace('\r\n', '\n').replace('\r', '\n')


def read_rows(path):
    """Yields (place, row) from a .json list, .jsonl, .csv or .parquet file, plain or gzipped.

    `place` is 'file:line' (row number for parquet and JSON lists, counted from 1). A row is a dict,
    or a list of strings for a csv; a line that does not parse comes as the DataError itself, so
    that the caller can stop or skip. An unreadable file raises DataError.
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
    """About how many rows `read_rows` will give, for a progress bar; a .json list is parsed."""
    return sum(_count(Path(path)) for path in paths)


def _count(path):
    if _kind(path) == '.parquet':
        return _open_parquet(path).metadata.num_rows
    if _kind(path) == '.json':
        return sum(1 for _ in read_rows(path))
    with _reading(path), _open(path) as file:
        return sum(block.count(b'\n') for block in iter(lambda: file.read(1 << 20), b''))


def _lines(path, file):
    """(number, raw line) of an open file, without the byte order mark."""
    for number, raw in enumerate(file, 1):
        yield number, raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw


def _jsonl_rows(path, file):
    for number, raw in _lines(path, file):
        if not raw.strip():
            continue
        try:
            row = _parse_json(decode(raw, path, number), path, number)
        except DataError as error:
            row = error
        yield f'{path}:{number}', row


def _json_rows(path, file):
    rows = _parse_json(decode(file.read().removeprefix(codecs.BOM_UTF8), path), path)
    if not isinstance(rows, list):
        raise DataError(f'{path}: a .json file must hold a list of rows; one row a line is .jsonl')
    for number, row in enumerate(rows, 1):
        yield f'{path}: row {number}', row


def _parse_json(text, path, line=1):
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f'{path}:{line + error.lineno - 1}: broken JSON: {error.msg} at column '
                        f'{error.colno}') from error
    except (ValueError, RecursionError) as error:   # an endless number; brackets without end
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
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f'{path}: not a readable parquet file: {error}') from error


def _parquet_rows(path):
    import pyarrow
    file, number = _open_parquet(path), 0
    try:
        for batch in file.iter_batches():
            for row in _batch_rows(batch, path, number):
                number += 1
                yield f'{path}: row {number}', row
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f'{path}: damaged after row {number}: {error}') from error


def _batch_rows(batch, path, number):
    try:
        return batch.to_pylist()
    except UnicodeDecodeError:      # one string of the batch: find its row
        pass
    rows = []
    for i in range(batch.num_rows):
        try:
            rows += batch.slice(i, 1).to_pylist()
        except UnicodeDecodeError as error:
            rows.append(DataError(f'{path}: row {number + i + 1}: not UTF-8: {error.reason}'))
    return rows


BAD_ROW = (DataError, KeyError, TypeError, AttributeError)    # what parsing a bad row raises


def row_error(place, error):
    """The DataError that says what is wrong with the row at `place`."""
    message = str(error) if isinstance(error, DataError) else (
        f'not the fields of its format: {error!r}')
    return DataError(message if message.startswith(place) else f'{place}: {message}')


def parse_rows(rows, parse, on_bad_row):
    """(items, messages of bad rows) of (place, row) pairs; 'stop' raises the first as DataError.

    parse(row, number) makes an item or None of a row; `number` counts the rows before it, from 0.
    An item is given its `place`, and an `id` that no other has: the second x becomes x#2.
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
    """At most `limit` items of each language, evenly over its subjects, in their own order.

    Which ones they are depends on the seed, their subjects and their ids alone. A larger limit
    takes the same ones and more; languages that share ids get the same questions.
    """
    if limit is None:
        return items

    def rank(*key):
        return hashlib.blake2b(repr((seed, *key)).encode(), digest_size=8).digest()

    turns, drawn = {}, {}   # how many of a subject were in line before; the line of each language
    for i in sorted(range(len(items)), key=lambda i: rank(items[i].subject, items[i].id)):
        language, subject = items[i].language, items[i].subject
        turn = turns[language, subject] = turns.get((language, subject), 0) + 1
        drawn.setdefault(language, []).append((turn, rank(subject), i))
    return [items[i] for i in sorted(i for line in drawn.values()
                                     for _, _, i in sorted(line)[:limit])]
