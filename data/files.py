"""Read the rows of data files, and what the parsers of rows share."""

import contextlib
import hashlib
import json
from pathlib import Path

from runtime import readers
from runtime.errors import CheckpointError, ConfigError, DataError, escape_controls, shorten
from runtime.sources import is_held_out
from runtime.ownership import note_inputs

# ---- Rows of files -------------------------------------------------------------------------------

def read_rows(*paths):
    """Yield (place, row) of files as `runtime.readers.read_rows` does."""
    for path in map(Path, paths):
        note_inputs(path)
        yield from readers.read_rows(path)


def training_rows(files, left_out):
    """Yield (place, row) but of rows with a `split` that is held out; count these in `left_out`."""
    for file in map(Path, files):
        whole = is_held_out(file.name)      # such a file is only read if it is asked for
        for place, row in read_rows(file):
            if not whole and has_fields(row, 'split') and is_held_out(str(row['split'])):
                left_out[f'their "split" is {row["split"]!r:.60}'] += 1
            else:
                yield place, row


# ---- Rows to items -------------------------------------------------------------------------------

def require_fields(row):
    """Return `row` if it is a dict; raise a DataError for another."""
    if not isinstance(row, dict):
        raise DataError(f'a row must be an object with named fields (in a table, by its first '
                        f'line), not {type(row).__name__}')
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


def is_empty(value):
    """Return whether a field says nothing: null, NaN, false, blank, or a list or dict of these."""
    if isinstance(value, (list, dict)):
        return all(map(is_empty, value.values() if isinstance(value, dict) else value))
    return value is None or value is False or value != value or (
        isinstance(value, str) and value.strip() in ('', '[]', '{}', 'null', 'None'))


def as_rows(value):
    """Return a list of dicts for a dict of lists, as parquet stores it; other values unchanged."""
    columns = {name: cells for name, cells in value.items() if cells is not None} if isinstance(
        value, dict) else {}
    if not columns or not all(isinstance(cells, list) for cells in columns.values()):
        return value
    if len({len(cells) for cells in columns.values()}) > 1:
        raise DataError('a dict of lists has lists of different lengths: ' + ', '.join(
            f'{name} {len(cells)}' for name, cells in columns.items()))
    return [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]


def dialogue(*texts):
    """Return texts as messages of the user and the assistant in turn, the user's first."""
    return [{'role': ('user', 'assistant')[i % 2], 'content': text} for i, text in enumerate(texts)]


def json_list(text, what):
    """Return the list, not an empty one, in a cell of a table; raise a DataError naming `what`."""
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        if isinstance(value := json.loads(text), list) and value:
            return value
    raise DataError(f'{what} must be a JSON list: {text!r:.60}')


def require_text(value, what):
    """Return `value` if it is a string of valid Unicode; raise a DataError that names `what`."""
    if not isinstance(value, str):
        raise DataError(f'{what} is missing' if value is None else
                        f'{what} is not text but {type(value).__name__}')
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
        message = str(error)
        if not isinstance(error, DataError):    # a parser does not check the fields that it uses
            reason = f'there is no {error}' if isinstance(error, KeyError) else repr(error)
            fields = f' among {", ".join(map(str, row)):.200}' if isinstance(row, dict) else ''
            message = f'not the fields of its format: {reason}{fields}'
        message = escape_controls(message.encode('utf-8', 'backslashreplace').decode())
        message = shorten(message.removeprefix(f'{place}: '), 800)      # it may quote the row
        return DataError(f'{place}: {message}')


def without_bad(results, on_bad_row, bad):
    """Yield results; 'stop' raises a DataError among them, 'skip' adds its message to `bad`."""
    for result in results:
        if not isinstance(result, DataError):
            yield result
        elif on_bad_row == 'stop':
            raise DataError(f'{result}; --on_bad_row=skip leaves such rows out')
        else:
            bad.append(str(result))


def text_digest(*content):
    """Return a hash of texts, numbers and lists of these."""
    return hashlib.blake2b(repr(content).encode(), digest_size=8).hexdigest()
