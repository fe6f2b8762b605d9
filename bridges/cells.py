"""Cells of prediction files, of JSON or of a table: numbers, lists, truth values and answers."""

import ast
import contextlib
import functools
import json
import re
from decimal import Decimal

import metrics
from runtime.other_readers import column_names, to_dict
from written.numbers import first_number, parse_probability

DECIMAL = re.compile(r'[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[-+]?[0-9]+)?|-?inf(?:inity)?', re.I)
READERS = (functools.partial(json.loads, parse_float=str, parse_int=str, parse_constant=str),
           ast.literal_eval)        # of a printed list


class DecimalComma(str):
    """A cell of a table with semicolons, where 0,9 is a number."""


def read_table(lines, delimiter):
    """Yield (place, row) of the lines of a table; a cell is a text, or None if it is empty."""
    cell, names = DecimalComma if delimiter == ';' else str, None
    for place, cells in lines:
        if names is None:
            names = column_names(place, cells)
        else:
            yield place, to_dict(place, names, [cell(text.strip(' ')) or None for text in cells])


def _number(x):
    """Return a number, or a text that is one as a whole, as a float; None for anything else."""
    if type(x) in (int, float, Decimal):    # the last is parquet's
        return float(x)
    if not isinstance(x, str):
        return None
    text = (x.replace(',', '.') if isinstance(x, DecimalComma) else x).strip()
    if DECIMAL.fullmatch(text):     # most are; faster
        return float(text)
    number = first_number(text)
    whole = number and number.value is not None and (number.start, number.end) == (0, len(text))
    return float(number.value / number.per) if whole else None


def to_numbers(what, x):
    """Return a list of numbers, also one that Python or numpy printed, as floats."""
    if isinstance(x, DecimalComma) and re.search(r'\d,\d+,?\s+[-+\d]', x):      # [0,7 0,3]
        x = re.sub(r'(\d),(\d)', r'\1.\2', x)
    if isinstance(x, str):      # np.float64(0.7) and [0.7 0.3]
        x = re.sub(r'(?<=[\d.])\s+(?=[-+.\d])', ', ', re.sub(r'np\.\w+\(([^()]*)\)', r'\1', x))
    items = [*x] if isinstance(x := to_list(x), list) else []
    while items and items[-1] is None:      # fewer options than other rows
        items.pop()
    values = [*map(_number, items)]
    if not values:
        raise ValueError(f'{what} is {x!r:.60}, not a list of numbers such as [0.7, 0.3]')
    if None in values:
        raise ValueError(f'{what} holds {items[values.index(None)]!r:.60}, which is no number')
    return values


def to_list(x):
    """Return x, or the list whose text it is: of JSON with numbers as they stand, or of Python."""
    # ['a' 'b'] of numpy would be one text in Python
    is_list = isinstance(x, str) and x.startswith('[') and not re.search(r'[\'"]\s+[\'"]', x)
    for read in READERS if is_list else ():
        with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            return read(x)
    return x


def to_probability(x):
    """Return the probability that a number or a sentence states; None for 'NA' or 'high'."""
    value = _number(x)
    if value is None and isinstance(x, str) and not re.fullmatch(r'\S*\d\S*', x.strip()):
        return parse_probability(x)
    if value is None or not 0 <= value <= 1 + metrics.SUM_TOLERANCE:
        raise ValueError(f'confidence is {x!r:.60}; wanted a number from 0 to 1, such as 0.8, or '
                         f'80 %')
    return value


def to_truth(x):
    """Return 1 or 0 for true or false, as text, number or bool; None for anything else."""
    value = {'true': 1, 'false': 0}.get(str(x).casefold(), _number(x))
    return value if value in (0, 1) else None


def to_label(x, n, options):
    """Return the index of the option that `answer` names by index, letter or text in `options`."""
    if type(x) is int and 0 <= x < n:
        return x
    if x is None:
        raise ValueError('answer, the correct option, is missing; --columns=answer=NAME reads '
                         'another column')
    text = str(x).strip() if isinstance(x, (str, int, float)) else ''
    named = [k for k in range(n) if text in (str(k), f'{k}.0')      # 1.0: pandas
             or isinstance(x, str) and text in (chr(ord('A') + k), chr(ord('a') + k),
                                                *(texts[k].strip() for texts in options))]
    if len(named) != 1:
        hint = f', which is {" or ".join(map(str, named))}' if named else ''
        raise ValueError(f'answer must be the index of the correct option, 0 to {n - 1}, its '
                         f'letter, from A, or its text in options, not {x!r:.60}{hint}')
    return named[0]
