"""Reads an experiment: a file of plain assignments, then `--key=value` overrides, into a dataclass.

The dataclass at the top of `train.py` (or `evaluate.py`, `bench.py`) lists every key with its
type, default and meaning. A config file holds only `name = literal` lines: nothing in it is
executed, any tool can read it, and a key that the dataclass does not have is an error, not a new
global. `include = 'other.py'` takes what several files share from a file beside them.
"""

import ast
import codecs
import dataclasses
import difflib
import inspect
import math
import re
import sys
import textwrap
import types
import typing
from pathlib import Path


class ConfigError(ValueError):
    """A key, a value or a config file that cannot be used; the message says what would be right."""


def load_config(cls, argv, usage=''):
    """Returns `cls(...)` from `argv` = ['configs/file.py', '--key=value', '--flag', ...].

    The file is optional and comes first; later values win. `-h` or `--help` prints `usage` (or a
    line of it and the docstring of the dataclass's module) and every key with its type, default
    and comment, and exits. Raises ConfigError.
    """
    if '-h' in argv or '--help' in argv:
        print(help_text(cls, usage))
        raise SystemExit(0)
    given = {}
    for i, argument in enumerate(argv):
        if not argument.startswith('--'):
            if i > 0:
                raise ConfigError(f'unexpected argument {argument!r}: a config file comes first, '
                                  f'everything after it is --key=value')
            given.update(_read_file(cls, argument))
            continue
        name, has_value, text = argument[2:].partition('=')
        where = f'command line: --{name}'
        *path, key = name.split('.')  # --runs.tuned.lr=... reaches into the dict `runs`
        if path and path[0] != 'runs' and _annotation(cls, path[0], where) is dict:
            # --shape.hidden_size=64 or --vary.lr=1e-5,2e-5: keys that the dict itself knows
            given.setdefault(path[0], {})
            annotation, value = object, _parse(text, tuple if path == ['vary'] else object)
        else:
            annotation = _annotation(cls, key, where)
            value = _parse(text, annotation) if has_value else True
        if not has_value and annotation is not bool:
            raise ConfigError(f'{where}: needs a value, --{name}=...')
        place = given
        for part in path:
            place = place.get(part) if isinstance(place, dict) else None
        if not isinstance(place, dict):
            raise ConfigError(f'{where}: there is no {".".join(path)} in the config')
        inner = [n for runs in place.values() if isinstance(runs, dict)
                 for n, keys in runs.items() if isinstance(keys, dict) and key in keys]
        if inner:
            raise ConfigError(f'{where}: the runs {", ".join(inner)} set {key} themselves; '
                              f'say which one, as in --runs.{inner[0]}.{key}=...')
        place[key] = value if annotation is object else _coerce(value, annotation, where)
    return cls(**given)


def help_text(cls, usage=''):
    """What --help prints: the usage, then each key with its type, default and comment."""
    module = sys.modules[cls.__module__]
    lines = [usage.strip() or f'usage: python {Path(sys.argv[0]).name} [configs/file.py] '
             f'[--key=value ...]\n\n{(module.__doc__ or "").strip()}', '\nkeys:']
    above, beside = _comments(cls)
    annotations = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        lines += [f'  # {comment}' for comment in above.get(field.name, ())]
        default = field.default if field.default_factory is dataclasses.MISSING else (
            field.default_factory())
        if isinstance(default, tuple):
            default = ','.join(map(str, default))
        kind = f'({_describe(annotations[field.name])}) {beside.get(field.name, "")}'
        lines.append(textwrap.fill(kind, 100, initial_indent=f'  --{field.name}={default}'.ljust(
            35) + ' ', subsequent_indent=' ' * 36))
    return '\n'.join(lines)


def _comments(cls):
    """({key: comment lines above it}, {key: comment beside it and on further lines under that})"""
    above, beside, waiting, last = {}, {}, [], None
    for line in inspect.getsource(cls).split('\n'):
        if match := re.match(r'    (\w+):', line):
            last = match[1]
            above[last], waiting = waiting, []
            beside[last] = line.partition('  # ')[2]
        elif match := re.match(r'    #(\s+)(.*)', line):
            if len(match[1]) > 4 and last:      # it goes on with the comment of the line above
                beside[last] += f' {match[2]}'
            else:
                waiting.append(match[2])
    return above, beside


def override(config, values, where):
    """A copy of the dataclass `config` with `values` (dict of key to value) checked and put in."""
    checked = {}
    for key, value in values.items():
        place = f'{where}: {key}'
        checked[key] = _coerce(value, _annotation(type(config), key, place), place)
    return dataclasses.replace(config, **checked)


def require_range(config, low, high, *keys):
    """Raises ConfigError unless low <= value <= high for each of `keys` that is not None."""
    for key in keys:
        value = getattr(config, key)
        if value is not None and not low <= value <= high:
            wanted = f'at least {low}' if high == math.inf else f'between {low} and {high}'
            raise ConfigError(f'{key} = {value}; it must be {wanted}')


def dump_config(config):
    """The resolved config as the text of a config file, one assignment a line."""
    values = ((f.name, getattr(config, f.name)) for f in dataclasses.fields(config))
    return ''.join(f'{name} = {value!r}\n' for name, value in values)


def _read_file(cls, path):
    return {key: _coerce(value, _annotation(cls, key, where), f'{where}: {key}')
            for key, (value, where) in read_assignments(path).items()}


def read_assignments(path):
    """{key: (value, 'file:line')} of a config file, whatever its keys are; raises ConfigError.

    `include = 'other.py'` puts the lines of a file of the same folder before its own, which win.
    """
    given = _read_lines(path)
    if 'include' not in given:
        return given
    name, where = given.pop('include')
    if not isinstance(name, str):
        raise ConfigError(f'{where}: include is {name!r}; wanted the name of a file beside {path}')
    included = _read_lines(Path(path).parent / name)
    if 'include' in included:
        raise ConfigError(f'{included["include"][1]}: a file that is included can include none')
    return included | given


def _read_lines(path):
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
    given = {}
    for node in tree.body:
        where = f'{path}:{node.lineno}'
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring
        if not (isinstance(node, ast.Assign) and len(node.targets) == 1
                and isinstance(node.targets[0], ast.Name)):
            raise ConfigError(f'{where}: a config file holds only `key = value` lines')
        key = node.targets[0].id
        if key in given:
            raise ConfigError(f'{where}: {key} is set already at {given[key][1]}; keep one of them')
        given[key] = _literal(node.value, key, path), where
    return given


def _literal(node, key, path):
    for inner in ast.walk(node):
        keys = [k for k in getattr(inner, 'keys', ()) if isinstance(k, ast.Constant)]
        lines = {}
        for k in keys:
            if k.value in lines:
                raise ConfigError(f'{path}:{k.lineno}: {key} has the key {k.value!r} already at '
                                  f'{path}:{lines[k.value]}; keep one of them')
            lines[k.value] = k.lineno
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError) as error:
        raise ConfigError(f'{path}:{node.lineno}: the value of {key} must be a plain literal, '
                          f'not an expression') from error


def _annotation(cls, key, where):
    annotations = typing.get_type_hints(cls)
    if key not in annotations:
        near = difflib.get_close_matches(key, annotations, n=1, cutoff=0.4)
        hint = f'did you mean {near[0]!r}?' if near else f'the keys are {", ".join(annotations)}'
        raise ConfigError(f'{where}: there is no key {key!r}; {hint}')
    return annotations[key]


def _parse(text, annotation):
    """A command-line value: taken as it stands for a string, as a Python literal otherwise."""
    options = _options(annotation)
    if text == 'None' and types.NoneType in options:
        return None
    if str in options or any(isinstance(option, str) for option in options):
        return text
    for option in options:
        if tuple in (option, typing.get_origin(option)) and not text.startswith(('(', '[')):
            item = (*typing.get_args(option), object)[0]
            return tuple(_parse(part, item) for part in text.split(',') if part)
    try:
        return ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return text


def _coerce(value, annotation, where):
    """`value` as `annotation` wants it, an int as a float, a list as a tuple; or ConfigError."""
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
        if typing.get_origin(option) is tuple:
            items = typing.get_args(option)
            n = '' if items[-1] is Ellipsis else f'{len(items)} '
            return f'a tuple of {n}{items[0].__name__}'
        return names.get(option) or str(option)
    return ' or '.join(name(option) for option in _options(annotation))
