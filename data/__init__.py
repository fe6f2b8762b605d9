"""Raw files to tokens or to questions. This file: finding files and reading rows out of them."""

import contextlib
import csv
import gzip
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
    with multiprocessing.get_context('fork').Pool(
            processes, _begin_worker, (initializer, arguments)) as pool:
        yield pool
        pool.close()
        pool.join()


def _begin_worker(initializer, arguments):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)    # Ctrl-C: the parent ends its workers
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
    path = Path(source)
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


def read_rows(path):
    """Yields (place, row) from a .json list, .jsonl, .csv or .parquet file, plain or gzipped.

    `place` is 'file:line' (row number for parquet and JSON lists, counted from 1). A row is a dict,
    or a list of strings for a csv; a line that does not parse comes as the DataError itself, so
    that the caller can stop or skip. An unreadable file raises DataError.
    """
    path = Path(path)
    suffixes = [s for s in path.suffixes if s != '.gz']
    kind = suffixes[-1] if suffixes else ''
    try:
        if kind == '.parquet':
            yield from _parquet_rows(path)
            return
        opener = gzip.open if path.suffix == '.gz' else open
        newline = '' if kind == '.csv' else None
        with opener(path, 'rt', encoding='utf-8-sig', newline=newline) as file:
            if kind == '.jsonl':
                yield from _jsonl_rows(path, file)
            elif kind == '.json':
                yield from _json_list(path, file)
            elif kind == '.csv':
                reader = csv.reader(file)
                for row in filter(None, reader):  # no blank lines
                    yield f'{path}:{reader.line_num}', row
            else:
                raise DataError(f'{path}: unknown kind of file; .json, .jsonl, .csv and .parquet '
                                f'are read, each also with .gz')
    except (OSError, UnicodeDecodeError, EOFError, zlib.error, csv.Error) as error:
        raise DataError(f'cannot read {path}: {error}') from error


def count_rows(paths):
    """About how many rows `read_rows` will give, for a progress bar; a .json list is parsed."""
    return sum(_count(Path(path)) for path in paths)


def _count(path):
    if '.parquet' in path.suffixes:
        return _open_parquet(path).metadata.num_rows
    if '.json' in path.suffixes:
        return sum(1 for _ in read_rows(path))
    opener = gzip.open if path.suffix == '.gz' else open
    try:
        with opener(path, 'rb') as file:
            return sum(block.count(b'\n') for block in iter(lambda: file.read(1 << 20), b''))
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f'cannot read {path}: {error}') from error


def _jsonl_rows(path, file):
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        place = f'{path}:{number}'
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            row = DataError(f'{place}: broken JSON: {error}')
        yield place, row


def _json_list(path, file):
    try:
        rows = json.load(file)
    except json.JSONDecodeError as error:
        raise DataError(f'{path}:{error.lineno}: broken JSON: {error}') from error
    if not isinstance(rows, list):
        raise DataError(f'{path}: a .json file must hold a list of rows; one row a line is .jsonl')
    for number, row in enumerate(rows, 1):
        yield f'{path}: row {number}', row


def _open_parquet(path):
    import pyarrow
    import pyarrow.parquet
    try:
        return pyarrow.parquet.ParquetFile(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f'{path}: not a readable parquet file: {error}') from error


def _parquet_rows(path):
    number = 0
    for batch in _open_parquet(path).iter_batches():
        for row in batch.to_pylist():
            number += 1
            yield f'{path}: row {number}', row
