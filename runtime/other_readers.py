"""Read the rows of texts and of tables: CSV and TSV, Parquet and Arrow files."""

import csv
import io
import itertools
import re

from runtime.errors import DataError
from runtime.readers import decode, row_or_error


def rows(path, file, kind, to_rows):
    if kind in ('.csv', '.tsv'):
        yield from table_rows(path, file, kind, to_rows)
    elif kind == '.txt':
        text = row_or_error(decode, file.read(), path)
        yield str(path), text if isinstance(text, DataError) else {
            'text': text.replace('\r\n', '\n').replace('\r', '\n')}
    else:
        yield from parquet_rows(path, file)


def table_rows(path, file, kind, to_rows):
    csv.field_size_limit(2 ** 31 - 1)
    # a line of the file is several if it has the line breaks of an old Mac
    lines = itertools.chain.from_iterable(io.StringIO(decode(raw, path, number), newline='')
                                          for number, raw in enumerate(file, 1))
    header = next(lines, '')
    # semicolons where numbers have decimal commas; a quoted cell may go on in the next line
    outside_quotes = re.sub('"[^"]*("|$)', '', header)
    delimiter = max('\t,;' if kind == '.tsv' else ',;\t', key=outside_quotes.count)
    # spaces before all names but the first, as SAS writes them, are no part of a cell
    others = next(csv.reader([header], delimiter=delimiter))[1:]
    padded = bool(others) and all(name.startswith(' ') for name in others)
    reader = csv.reader(itertools.chain([header], lines), strict=True, delimiter=delimiter,
                        skipinitialspace=padded)
    yield from (to_rows or named_rows)(_places(path, reader), delimiter)


def named_rows(lines, delimiter):
    """Yield (place, row) of the lines of a table; the first one names the columns.

    MMLU's own .csv files, whose first line ends in a letter or number, have no names but lists.
    """
    names = None
    for place, cells in lines:
        if names is None:
            first = [name.strip().lower() for name in cells]
            if (delimiter != ',' or {'question', 'answer'} <= {*first}
                    or not re.fullmatch('[A-Z]|[0-9]+', cells[-1].strip())):
                names = column_names(place, first)
                continue
            names = []
        yield place, to_dict(place, names, cells) if names else cells


def column_names(place, cells):
    """Return the names in the first line of a table; raise a DataError if one is there twice."""
    names = [name.strip() for name in cells]
    # Excel writes empty names above empty columns
    if twice := [name for name in names if name and names.count(name) > 1]:
        raise DataError(f'{place}: the header names {twice[0]!r} twice')
    return names


def to_dict(place, names, cells):
    """Return {name: cell} of a line of a table, or a DataError if it has more or fewer cells."""
    if len(cells) != len(names):
        return DataError(f'{place}: {len(cells)} columns; the header names {len(names)}')
    return dict(zip(names, cells, strict=True))


def _places(path, reader):
    """Yield ('file:line' where it begins, cells) of each row of a table that is not empty."""
    line = 1
    try:
        for cells in reader:
            if any(cells):      # Excel writes rows of empty cells
                yield f'{path}:{line}', cells
            line = reader.line_num + 1
    except csv.Error as error:
        raise DataError(f'{path}:{line}: broken csv: {error}; a cell that begins with " ends with '
                        f'", and a " in it is written twice') from error


def parquet_rows(path, file):
    try:
        import pyarrow.parquet
    except ImportError:
        raise DataError(f'{path}: {path.suffix} needs pyarrow: pip install pyarrow, or '
                        f'"nanocal[files]" for the command nanocal') from None
    batches = (pyarrow.ipc.open_stream(file) if re.search(r'\.arrow(\.gz)?$', path.name) else
               pyarrow.parquet.ParquetFile(file).iter_batches())    # the former of save_to_disk
    number = 0
    for batch in batches:
        names = column_names(path, batch.schema.names)
        for cells in zip(*batch.columns, strict=True):
            number += 1
            place = f'{path}: row {number}'
            yield place, row_or_error(_values, zip(names, cells, strict=True), place)


def _values(cells, place):
    """Return {name: Python value} of cells; a cell, an error if it is used, if there is none."""
    values = {}
    for name, cell in cells:
        try:
            values[name] = cell.as_py()
        except UnicodeDecodeError as error:
            raise DataError(f'{place}: not UTF-8: {error.reason}') from error
        except (ValueError, OverflowError):     # the year 10000
            values[name] = cell
    return values
