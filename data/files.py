"""Find data files, in a folder or on the hub, and read rows from them."""

import codecs
import collections
import contextlib
import csv
import functools
import gzip
import hashlib
import itertools
import json
import os
import re
import shutil
import zlib
from pathlib import Path

from runtime.errors import CheckpointError, ConfigError, DataError, escape_controls
from runtime.hub import download, is_hub_name
from runtime.ownership import note_inputs, temporary


# names of hidden files, and of what the library datasets writes beside rows
NO_DATA = re.compile(r'\.|(dataset_(infos?|dict)|state)\.json$')


def fetch(source, patterns, revision=None):
    """Return the files of a dataset, a sorted list of paths; raises DataError.

    source:   a file, a folder, or the name of a hub dataset
    patterns: globs; the first one with a match in the folder is used, and files of another format
              that later ones match are named in a note. With '*.zip' among them, archives on the
              hub are downloaded and unpacked first
    revision: the hub commit, tag or branch to read; pin it, because datasets change
    """
    path = Path(os.path.expanduser(source))
    if revision and path.exists():
        raise DataError(f'data_revision = {revision!r} is for datasets of the hub, but {source} '
                        f'is on disk; leave it out')
    if path.is_file():
        note_inputs(path)
        return [path]
    if not path.is_dir():
        if not is_hub_name(source):
            raise DataError(f'no file or folder at {source}, and it is not a hub dataset name')
        path = download(source, patterns, revision, repo_type='dataset')
        for archive in path.glob('*.zip'):
            unpacked = archive.with_suffix('')
            if not unpacked.exists():
                with writing(unpacked), temporary(unpacked, folder=True) as part:
                    shutil.unpack_archive(archive, part)
    if path.exists() and not os.access(path, os.R_OK | os.X_OK):    # `glob` would find nothing
        raise DataError(f'cannot read the folder {source}: Permission denied')
    for i, pattern in enumerate(patterns):
        if files := matches(path, pattern):
            note_inputs(*files)
            if (n := re.search(r'-\d+-of-(\d+)\b', files[-1].name)) and len(files) < int(n[1]):
                print(f'{source}: only {len(files)} of {int(n[1])} files {pattern} are there')
            beside = matches(path, *(later for later in patterns[i + 1:] if '/' not in later))
            if unread := [p.name for p in beside if p.suffix != files[0].suffix
                          and p.with_suffix('') not in files]:
                print(f'{source}: {pattern} is read, and not {", ".join(unread[:3])}'
                      + ', ...' * (len(unread) > 3) + '; to read all, write them in one format')
            return files
    folders = sorted(str(p) for p in path.glob('[!.]*') if p.is_dir())
    raise DataError(f'{source} holds nothing that matches {" or ".join(patterns)}'
                    + (f'; name one of its folders {", ".join(folders[:9])}' if folders else ''))


def matches(folder, *patterns):
    """Return the data files of a folder that match a glob, sorted, without compressed copies."""
    files = {p for pattern in patterns for p in folder.glob(pattern)
             if p.is_file() and not NO_DATA.match(p.name)}
    return sorted(p for p in files if p.suffix != '.gz' or p.with_suffix('') not in files)


def fetch_training(source, patterns, revision=None):
    """Return the files of `fetch` but those that are named as a test or validation split."""
    files = fetch(source, patterns, revision)
    held_out = re.compile(r'(.*[-_.])?(test|dev|eval|val|valid|validation)([-_]\d[^.]*)?\.')
    chosen = [file for file in files if not held_out.match(file.name)] or files
    if others := [file.name for file in files if file not in chosen]:
        print(f'{source}: {", ".join(others)} not read, as held out; name a file to train on it')
    return chosen


@contextlib.contextmanager
def writing(path):
    """Raise a DataError that names `path` if writing fails; a full disk's own error names none."""
    try:
        yield
    except OSError as error:
        raise DataError(f'cannot write {path}: {error.strerror or error}') from error


# ---- Rows of files -------------------------------------------------------------------------------

def read_rows(*paths):
    """Yield (place, row) of files of READERS, such as a.jsonl or a.csv, also with .gz.

    `place` is 'file:line', or 'file: row n' for parquet and JSON lists; both count from 1. A row is
    a dict; a .txt file is one row, {'text': its content}. The first row of a .csv or .tsv file
    names its columns. Only a .csv file whose first row ends in a letter or a number, the answer of
    MMLU's own files, has no names: its rows are lists of strings. A row that cannot be read or
    repeats a key is yielded as a DataError, to stop or skip; a file that cannot be read raises one.
    """
    for path in map(Path, paths):
        note_inputs(path)
        if not path.is_file():
            raise DataError(f'{path} is a folder; name a file in it' if path.is_dir() else
                            f'there is no file {path}')
        kind = (path.with_suffix('') if path.suffix == '.gz' else path).suffix
        if kind not in READERS:
            raise DataError(f'{path}: unknown kind of file; wanted {", ".join(READERS)}, or one of '
                            f'these with .gz')
        try:
            with (gzip.open if path.suffix == '.gz' else open)(path, 'rb') as file:
                start = file.read(24)
                file.seek(3 if start.startswith(codecs.BOM_UTF8) else 0)
                if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                    raise DataError(f'{path} is UTF-16; save it as UTF-8')
                if start.startswith(b'version https://git-lfs'):
                    raise DataError(f'{path} is a pointer of Git LFS; get the file by git lfs pull')
                yield from READERS[kind](path, file)
        except DataError:
            raise
        # the last two are pyarrow's
        except (OSError, EOFError, zlib.error, ValueError, NotImplementedError) as error:
            reason = getattr(error, 'strerror', None) or error      # without the name again
            raise DataError(f'cannot read {path}: {reason}') from error


def _jsonl_rows(path, file):
    # stripped, since JSON's error at a line break would name the next line
    lines = ((number, raw.strip()) for number, raw in enumerate(file, 1) if raw.strip())
    for i, (number, raw) in enumerate(lines):
        place = f'{path}:{number}'
        if i == 0 and re.match(rb'\[\s*({|$)', raw):
            raise DataError(f'{place}: the file holds one JSON array, not one object per line; '
                            f'name it {re.sub("[.](nd)?jsonl?", ".json", path.name)}')
        yield place, parsed(place, raw, _parse_json, path, number)


def _json_rows(path, file):
    begin = file.tell()
    lines = [*itertools.islice(filter(bytes.strip, file), 2)]
    if not lines:
        raise DataError(f'{path} is empty')
    try:
        first = json.loads(lines[0])
    except (ValueError, RecursionError):
        first = None
    file.seek(begin)
    # a first line that is an object is a row, unless it has a list of rows and nothing follows
    if isinstance(first, dict) and (len(lines) > 1 or not isinstance(first.get('examples'), list)):
        yield from _jsonl_rows(path, file)
        return
    rows = _parse_json(file.read(), path)
    if isinstance(rows, dict):      # BIG-bench's task.json
        rows = rows.get('examples')
    if not isinstance(rows, list):
        raise DataError(f'{path}: a .json file must hold a list of rows, one row per line, or an '
                        f'object with a list of rows as "examples"')
    for number, row in enumerate(rows, 1):
        yield f'{path}: row {number}', row


def _csv_rows(path, file, delimiter=','):
    csv.field_size_limit(2 ** 31 - 1)
    lines = (_decode(raw, path, number) for number, raw in enumerate(file, 1))
    first = next(lines, '')
    # where numbers have decimal commas
    delimiter = ';' if ';' in first and not {',', '\t'} & {*first} else delimiter
    reader, header = csv.reader(itertools.chain([first], lines), delimiter=delimiter), None
    try:
        for row in filter(None, reader):  # no blank lines
            place = f'{path}:{reader.line_num}'
            if header is None:
                header = [name.strip().lower() for name in row]
                if (delimiter != ',' or {'question', 'answer'} <= set(header)
                        or not re.fullmatch('[A-Z]|[0-9]+', row[-1].strip())):
                    if twice := [name for name in header if header.count(name) > 1]:
                        raise DataError(f'{place}: the header names {twice[0]!r} twice')
                    continue
                header = []
            if header and len(row) != len(header):
                row = DataError(f'{place}: {len(row)} columns; the header names {len(header)}')
            yield place, dict(zip(header, row)) if header and isinstance(row, list) else row
    except csv.Error as error:
        raise DataError(f'{path}:{reader.line_num}: broken csv: {error}') from error


def _txt_rows(path, file):
    yield str(path), parsed(str(path), file.read(), lambda raw: {
        'text': _decode(raw, path).replace('\r\n', '\n').replace('\r', '\n')})


def _parquet_rows(path, file):
    import pyarrow.parquet
    batches = (pyarrow.ipc.open_stream(file) if path.suffix == '.arrow' else    # of save_to_disk
               pyarrow.parquet.ParquetFile(file).iter_batches())
    rows = (zip(batch.schema.names, cells) for batch in batches
            for cells in zip(*batch.columns, strict=True))
    for number, cells in enumerate(rows, 1):
        place = f'{path}: row {number}'
        yield place, parsed(place, cells, lambda cells: {
            name: _value(cell) for name, cell in cells})


def _value(cell):
    """Return the Python value of a cell; the cell, an error if it is used, if there is none."""
    try:
        return cell.as_py()
    except UnicodeDecodeError as error:
        raise DataError(f'not UTF-8: {error.reason}') from error
    except (ValueError, OverflowError):     # the year 10000
        return cell


READERS = {'.jsonl': _jsonl_rows, '.json': _json_rows, '.csv': _csv_rows,
           '.tsv': functools.partial(_csv_rows, delimiter='\t'), '.txt': _txt_rows,
           '.parquet': _parquet_rows, '.arrow': _parquet_rows, '.ndjson': _jsonl_rows}


def _decode(raw, path, line=1):
    """Return the text of UTF-8 bytes that begin at `line` of a file; errors name the line."""
    try:
        return raw.decode('utf-8')
    except UnicodeDecodeError as error:
        line += raw.count(b'\n', 0, error.start)
        raise DataError(f'{path}:{line}: not UTF-8: {error.reason} at byte '
                        f'0x{raw[error.start]:02x}; save it as UTF-8') from error


def _parse_json(raw, path, line=1):
    text = _decode(raw, path, line)
    try:
        return json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise DataError(f'{path}:{line + error.lineno - 1}: broken JSON: {error.msg} (column '
                        f'{error.colno})') from error
    except (ValueError, RecursionError) as error:   # thousands of digits, or nested brackets
        raise DataError(f'{path}:{line}: unusable JSON: {error}') from error


def _object(pairs):
    """Return the dict of a JSON object, or a DataError if it, or an object in it, repeats a key."""
    row, keys = dict(pairs), [key for key, _ in pairs]
    if len(row) < len(pairs):
        repeated = next(key for key in keys if keys.count(key) > 1)
        return DataError(f'the key {repeated!r} is given twice')
    for value in row.values():
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, DataError):
                return part
    return row


# ---- Rows to items -------------------------------------------------------------------------------

def require_fields(row):
    """Return `row` if it is a dict; raise a DataError for another."""
    if not isinstance(row, dict):
        raise DataError(f'a row must be an object with named fields, which the first line of a '
                        f'table names, not {type(row).__name__}')
    return row


def has_fields(row, *names):
    """Return whether a raw row is a dict with all these fields."""
    return isinstance(row, dict) and row.keys() >= {*names}


def one_of(row, *names):
    """Return the value of the fields `names` of a row, which mean one thing; None if it has none.

    Raises DataError if two of them differ.
    """
    given = [name for name in names if row.get(name) is not None]
    for name in given[1:]:
        if row[name] != row[given[0]]:
            raise DataError(f'"{given[0]}" and "{name}" of the row differ: {row[given[0]]!r:.60} '
                            f'and {row[name]!r:.60}; keep one of them')
    return row[given[0]] if given else None


def with_passage(row, question):
    """Return a question after the passage that a row has beside it, as in RACE and SQuAD."""
    for name in ('passage', 'article', 'context'):
        text = row.get(name)
        if isinstance(question, str) and text and text == text and str(text) not in question:
            question = f'{require_text(text, f"the {name}")}\n{question}'
    return question


def json_list(text, what):
    """Return the list, not an empty one, in a cell of a table; raise a DataError naming `what`."""
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        if isinstance(value := json.loads(text), list) and value:
            return value
    raise DataError(f'{what} must be a JSON list: {text!r:.60}')


def require_text(value, what):
    """Return `value` if it is a string of valid Unicode; raise a DataError that names `what`."""
    if not isinstance(value, str):
        wrong = 'missing' if value is None else f'not text but {type(value).__name__}'
        raise DataError(f'{what} is {wrong}')
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(f'{what} is not valid Unicode: {error.reason}') from None
    return value


def parsed(place, row, parse, *arguments):
    """Return parse(row, *arguments), or a DataError that says what is wrong with the row."""
    try:
        if isinstance(row, DataError):
            raise row
        return parse(row, *arguments)
    except (ConfigError, CheckpointError):      # ValueErrors too, but not of the row
        raise
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError,
            RecursionError) as error:
        # a parser does not check the fields that it uses
        fields = f' among {", ".join(map(str, row)):.200}' if isinstance(row, dict) else ''
        message = str(error) if isinstance(error, DataError) else (
            'not the fields of its format: '
            + (f'there is no {error}' if isinstance(error, KeyError) else repr(error)) + fields)
        message = escape_controls(message.encode('utf-8', 'backslashreplace').decode())
        return DataError(message if message.startswith(place) else f'{place}: {message}')


def without_bad(results, on_bad_row, bad):
    """Yield results; 'stop' raises a DataError among them, 'skip' adds its message to `bad`."""
    for result in results:
        if not isinstance(result, DataError):
            yield result
        elif on_bad_row == 'stop':
            raise DataError(f'{result}; --on_bad_row=skip leaves such rows out')
        else:
            bad.append(str(result))


def parse_rows(rows, parse, on_bad_row):
    """Return (items, messages of bad rows) of (place, row) pairs; see `without_bad`.

    parse(row, place, number) returns an item, or None to ignore the row; `number` counts from 0.
    The ids of the items are made unique: the second 'x' becomes 'x#2'.
    """
    items, bad, seen = [], [], collections.Counter()
    results = (parsed(place, row, parse, place, len(items) + len(bad)) for place, row in rows)
    for item in without_bad(results, on_bad_row, bad):
        if item is None:
            continue
        seen[item.id] += 1
        while seen[item.id] > 1:
            item.id = f'{item.id}#{seen[item.id]}'
            seen[item.id] += 1
        items.append(item)
    return items, bad


def text_digest(*content):
    """Return a hash of texts, numbers and lists of these."""
    return hashlib.blake2b(repr(content).encode(), digest_size=8).hexdigest()


def draw(items, limit, seed):
    """Return at most `limit` items per language, drawn evenly from its subjects, in their order.

    The choice depends only on the seed and on the items' subjects and ids. The sample of a larger
    limit contains that of a smaller one; languages that share ids get the same questions.
    """
    if limit is None:
        return items
    rank = functools.partial(text_digest, seed)
    counts, queues = collections.Counter(), collections.defaultdict(list)
    for i in sorted(range(len(items)), key=lambda i: rank(items[i].subject, items[i].id)):
        language, subject = items[i].language, items[i].subject
        # the first item of every subject comes before the second of any
        counts[language, subject] += 1
        queues[language].append((counts[language, subject], rank(subject), i))
    chosen = [sorted(queue)[:limit] for queue in queues.values()]
    return [items[i] for i in sorted(i for queue in chosen for _, _, i in queue)]
