"""Read the rows of a file: JSON lines and lists, or another kind by other_readers.py."""

import codecs
import gzip
import itertools
import json
import re
import zlib

from runtime import rooms
from runtime.errors import DataError

JSON = '.jsonl', '.ndjson', '.json'
KINDS = *JSON, '.txt', '.csv', '.tsv', '.parquet', '.arrow'


def read_rows(path, to_rows=None):
    """Yield (place, row) of a file of one of KINDS, such as a.jsonl or a.csv, also with .gz.

    `place` is 'file:line', or 'file: row n' for parquet and JSON lists; both count from 1. A row
    that cannot be read or repeats a key is yielded as a DataError; a file that cannot be read
    raises one. A .txt file is one row, {'text': its content}.

    to_rows: function of the (place, list of cells) of each line of a table and of its delimiter,
             which yields (place, row); None: `named_rows` of other_readers.py
    """
    if not path.is_file():
        raise DataError(f'{path} is a folder; name a file in it' if path.is_dir() else
                        f'there is no file {path}')
    kind = (path.with_suffix('') if path.suffix == '.gz' else path).suffix
    if kind not in KINDS:
        raise DataError(f'{path}: unknown kind of file; wanted {", ".join(KINDS)}, or one of these '
                        f'with .gz')
    try:
        with (gzip.open if path.suffix == '.gz' else open)(path, 'rb') as file:
            start = file.read(24)
            file.seek(3 if start.startswith(codecs.BOM_UTF8) else 0)
            if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                raise DataError(f'{path} is UTF-16; save it as UTF-8')
            if start.startswith(b'ARROW1'):
                raise DataError(f'{path} is a Feather file; save it as .parquet')
            if start.startswith(b'version https://git-lfs'):
                raise DataError(f'{path} is a pointer of Git LFS; get the file by git lfs pull')
            if kind in JSON:
                yield from json_rows(path, file, kind)
            else:
                yield from rooms.load('other readers').rows(path, file, kind, to_rows)
    except DataError:
        raise
    # the last two are pyarrow's
    except (OSError, EOFError, zlib.error, ValueError, NotImplementedError) as error:
        reason = getattr(error, 'strerror', None) or error      # without the name again
        raise DataError(f'cannot read {path}: {reason}') from error


def parse_json(raw, path, line=1):
    """Return the JSON value in UTF-8 bytes that begin at `line` of a file; errors name the line."""
    text = decode(raw, path, line)
    try:
        value = DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise DataError(f'{path}:{line + error.lineno - 1}: broken JSON: {error.msg} (column '
                        f'{error.colno})') from error
    except (ValueError, RecursionError) as error:   # thousands of digits, or nested brackets
        raise DataError(f'{path}:{line}: unusable JSON: {error}') from error
    if isinstance(value, DataError):
        raise DataError(f'{path}:{line}: {value}')
    return value


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


DECODER = json.JSONDecoder(object_pairs_hook=_object)


def decode(raw, path, line=1):
    """Return the text of UTF-8 bytes that begin at `line` of a file; errors name the line."""
    try:
        return raw.decode('utf-8')
    except UnicodeDecodeError as error:
        line += raw.count(b'\n', 0, error.start)
        raise DataError(f'{path}:{line}: not UTF-8: {error.reason} at byte '
                        f'0x{raw[error.start]:02x}; save it as UTF-8') from error


def row_or_error(read, *arguments):
    try:
        return read(*arguments)
    except DataError as error:
        return error


def json_rows(path, file, kind):
    """Yield the rows of JSON lines or of one list, which either kind of file may hold."""
    begin = file.tell()
    lines = [*itertools.islice(filter(bytes.strip, file), 2)]
    file.seek(begin)
    by_line = not (lines and re.match(rb'\s*\[\s*({|$)', lines[0]))   # as lm_eval 0.4.0 writes
    if kind == '.json':
        if not lines:
            raise DataError(f'{path} is empty')
        try:
            first = json.loads(lines[0])
        except (ValueError, RecursionError):
            first = None
        # an object is a row, unless it has a list of rows, as BIG-bench's, and nothing follows
        by_line = isinstance(first, dict) and (
            len(lines) > 1 or not isinstance(first.get('examples'), list))
    if by_line:
        for number, raw in enumerate(file, 1):
            if raw := raw.strip():      # JSON's error at a line break would name the next line
                yield f'{path}:{number}', row_or_error(parse_json, raw, path, number)
        return
    rows = parse_json(file.read(), path)
    rows = rows.get('examples') if isinstance(rows, dict) else rows
    if not isinstance(rows, list):
        raise DataError(f'{path}: a .json file must hold a list of rows, one row per line, or an '
                        f'object with a list of rows as "examples"')
    for number, row in enumerate(rows, 1):
        place = f'{path}: row {number}'
        yield place, DataError(f'{place}: {row}') if isinstance(row, DataError) else row
