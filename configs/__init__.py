"""Read settings: a file of `key = value` lines, then `--key=value` arguments, into a dataclass.

The dataclass at the top of `train.py` (or `evaluate.py`, `compare.py`) lists every key with its
type, default and meaning. A config file holds plain literals only: nothing in it is executed, any
tool can read it, and a misspelled key is an error. A field whose type is a dataclass takes a dict
of that dataclass's keys: `eval = {'shots': 0}` in a file, `--eval.shots=0` on the command line.
"""

import ast
import codecs
import dataclasses
import difflib
import inspect
import math
import pprint
import re
import sys
import textwrap
import types
import typing
from pathlib import Path


class ConfigError(ValueError):
    """A key, a value or a config file that cannot be used; the message says what would be right."""


def load_config(cls, argv, usage=''):
    """Return `cls(...)` from `argv` = ['configs/file.py', '--key=value', '--flag', ...].

    The file is optional and comes first; on the command line later values win. `-h` or `--help`
    prints `usage` (by default the docstring of the dataclass's module), then every key with its
    type, default and comment, and exits. Raises ConfigError.
    """
    if '-h' in argv or '--help' in argv:
        usage = (usage or sys.modules[cls.__module__].__doc__ or '').strip()
        if not usage.startswith('usage:'):
            program = Path(sys.argv[0])
            program = program.name if program.is_absolute() else program
            print(f'usage: python {program} [configs/file.py] [--key=value ...]\n')
        print(usage, '', 'keys:', *_describe_keys(cls), sep='\n')
        raise SystemExit(0)
    values = {}
    for i, argument in enumerate(argv):
        if argument.startswith('--'):
            name, has_value, text = argument[2:].partition('=')
            _assign(cls, values, name, text if has_value else None, f'command line: --{name}')
        elif i == 0:
            for key, (value, where) in read_assignments(argument).items():
                values |= _check_keys(cls, {key: value}, where)
        else:
            raise ConfigError(f'unexpected argument {argument!r}: a config file comes first, '
                              f'everything after it is --key=value')
    return _make(cls, values, 'config')


def require_range(config, low, high, *keys):
    """Raise ConfigError unless low <= value <= high for each of `keys` that is not None."""
    for key in keys:
        value = getattr(config, key)
        if value is not None and not low <= value <= high:
            wanted = f'at least {low}' if high == math.inf else f'between {low} and {high}'
            raise ConfigError(f'{key} = {value}; it must be {wanted}')


def dump_config(config):
    """Return the resolved config as the text of a config file that reads back as the same."""
    return ''.join(f'{key} = {pprint.pformat(value, width=95, sort_dicts=False)}\n'
                   for key, value in dataclasses.asdict(config).items())


def read_assignments(path):
    """Return {key: (value, 'file:line')} of a config file with any keys; raises ConfigError."""
    try:
        raw = Path(path).read_bytes().removeprefix(codecs.BOM_UTF8)
        tree = ast.parse(raw.decode('utf-8'))
    except OSError as error:
        raise ConfigError(f'cannot read the config file {path}: {error.strerror}') from error
    except UnicodeDecodeError as error:
        line = 1 + raw.count(b'\n', 0, error.start)
        raise ConfigError(f'{path}:{line}: not UTF-8: {error.reason}') from error
    except (SyntaxError, RecursionError, MemoryError) as error:
        line, message = getattr(error, 'lineno', None) or 1, getattr(error, 'msg', error)
        raise ConfigError(f'{path}:{line}: not valid Python: {message}') from error
    values = {}
    for node in tree.body:
        where = f'{path}:{node.lineno}'
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring
        if not (isinstance(node, ast.Assign) and len(node.targets) == 1
                and isinstance(node.targets[0], ast.Name)):
            raise ConfigError(f'{where}: a config file holds only `key = value` lines')
        key = node.targets[0].id
        if key in values:
            raise ConfigError(f'{where}: {key} is already set at {values[key][1]}; remove one')
        values[key] = _literal(node.value, key, path), where
    return values


def _literal(node, key, path):
    for table in (n for n in ast.walk(node) if isinstance(n, ast.Dict)):
        lines = {}
        for k in (k for k in table.keys if isinstance(k, ast.Constant)):
            if k.value in lines:
                raise ConfigError(f'{path}:{k.lineno}: {key} already has the key {k.value!r} at '
                                  f'{path}:{lines[k.value]}; remove one')
            lines[k.value] = k.lineno
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError) as error:
        raise ConfigError(f'{path}:{node.lineno}: the value of {key} must be a plain literal, '
                          f'not an expression') from error


def _assign(cls, values, name, text, where):
    """Put the command-line value `text` (None for a bare flag) of `name` = 'key.inner' in place."""
    key, _, inner = name.partition('.')
    annotation = _annotation(cls, key, where)
    record = next(filter(dataclasses.is_dataclass, _options(annotation)), None)
    before = values.get(key, _default(_fields(cls)[key]))
    if before is None and dict in _options(annotation):
        before = {}
    if inner and record:
        changed = {k: getattr(before, k) for k in _fields(record)} if before else {}
        _assign(record, changed, inner, text, where)
        values[key] = _make(record, changed, where)
    elif text is None and (inner or annotation is not bool):
        raise ConfigError(f'{where}: needs a value, {where.split()[-1]}=...')
    elif inner:
        values[key] = _with_key(before, key, inner, text, where)
    else:
        value = True if text is None else _parse(text, annotation)
        values[key] = _coerce(value, annotation, where)


def _with_key(table, key, inner, text, where):
    """Return a copy of the dict `table`, the value of `key`, with its key `inner` set."""
    if not isinstance(table, dict):
        raise ConfigError(f'{where}: {key} has no keys of its own')
    first, _, rest = inner.partition('.')
    value = _with_key(table.get(first, {}), first, rest, text, where) if rest else (
        _parse(text, object))
    return {**table, first: value}


def _fields(cls):
    return {field.name: field for field in dataclasses.fields(cls) if field.init}


def _default(field):
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _make(cls, values, where):
    for key, field in _fields(cls).items():
        if key not in values and field.default is field.default_factory is dataclasses.MISSING:
            raise ConfigError(f'{where}: {key} has no default and needs a value')
    return cls(**values)


def _check_keys(cls, values, where):
    return {key: _coerce(value, _annotation(cls, key, where), f'{where}: {key}')
            for key, value in values.items()}


def _annotation(cls, key, where):
    keys = _fields(cls)
    if key not in keys:
        near = difflib.get_close_matches(str(key), keys, n=1, cutoff=0.4)
        hint = f'did you mean {near[0]!r}?' if near else f'the keys are {", ".join(keys)}'
        raise ConfigError(f'{where}: there is no key {key!r}; {hint}')
    return typing.get_type_hints(cls)[key]


def _parse(text, annotation):
    """Return a command-line value: as it stands for a string, else as a Python literal."""
    options = _options(annotation)
    if text == 'None' and types.NoneType in options:
        return None
    if any(option is str or isinstance(option, str) for option in options):
        return text
    for option in options:
        if typing.get_origin(option) is tuple and not text.startswith(('(', '[')):
            item = typing.get_args(option)[0]
            return tuple(_parse(part, item) for part in text.split(',') if part)
    try:
        return ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return text


def _coerce(value, annotation, where):
    """Return `value` as its annotation wants it: an int as a float, a list as a tuple, a dict as
    the record; raises ConfigError.
    """
    for option in _options(annotation):
        if typing.get_origin(option) is tuple and isinstance(value, (tuple, list)):
            items = typing.get_args(option)
            if items[-1] is Ellipsis:
                items = items[:1] * len(value)
            if len(items) == len(value):
                return tuple(_coerce(v, item, where) for v, item in zip(value, items, strict=True))
        elif option is float:
            if type(value) in (int, float) and abs(value) <= sys.float_info.max:
                return float(value)
        elif dataclasses.is_dataclass(option) and isinstance(value, dict):
            return _make(option, _check_keys(option, value, where), where)
        elif isinstance(option, str) and value == option:
            return value
        elif isinstance(option, type) and type(value) is (typing.get_origin(option) or option):
            return value
    raise ConfigError(f'{where} is {value!r}, a {type(value).__name__}; '
                      f'wanted {_describe(annotation)}')


def _options(annotation):
    """The alternatives of an annotation: the members of a union, the strings of a Literal."""
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        return tuple(o for arg in typing.get_args(annotation) for o in _options(arg))
    if typing.get_origin(annotation) is typing.Literal:
        return typing.get_args(annotation)
    return (annotation,)


def _describe(annotation):
    names = {types.NoneType: 'None', str: 'a string', int: 'an int', float: 'a float',
             bool: 'True or False', dict: 'a dict'}

    def name(option):
        if isinstance(option, str):
            return repr(option)
        if dataclasses.is_dataclass(option):
            return f'a dict of the keys of {option.__name__}'
        if typing.get_origin(option) is tuple:
            items = typing.get_args(option)
            n = '' if items[-1] is Ellipsis else f'{len(items)} '
            return f'a tuple of {n}{items[0].__name__}'
        return names.get(option) or str(option)

    return ' or '.join(name(option) for option in _options(annotation))


def _describe_keys(cls, prefix=''):
    """Yield the lines of --help: each key with its default, type and comments."""
    above, beside = _comments(cls)
    for key, field in _fields(cls).items():
        yield from (f'  # {comment}' for comment in above.get(key, ()))
        default, annotation = _default(field), typing.get_type_hints(cls)[key]
        shown = ','.join(map(str, default)) if isinstance(default, tuple) else default
        yield textwrap.fill(f'({_describe(annotation)}) {beside.get(key, "")}', 100,
                            initial_indent=f'  --{prefix}{key}={shown}'.ljust(35) + ' ',
                            subsequent_indent=' ' * 36)
        for record in filter(dataclasses.is_dataclass, _options(annotation)):
            yield from _describe_keys(record, f'{prefix}{key}.')


def _comments(cls):
    """({key: comment lines above it}, {key: the comment beside it}) in the source of `cls`."""
    above, beside, waiting, last = {}, {}, [], None
    for line in inspect.getsource(cls).split('\n'):
        if match := re.match(r'    (\w+):', line):
            last = match[1]
            above[last], waiting = waiting, []
            beside[last] = line.partition('  # ')[2]
        elif match := re.match(r'    #(\s+)(.*)', line):
            if len(match[1]) > 4 and last:      # indented: the comment beside the key goes on
                beside[last] += f' {match[2]}'
            else:
                waiting.append(match[2])
    return above, beside
