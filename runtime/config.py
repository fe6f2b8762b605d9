"""Read settings: a file of `key = value` lines, then `--key=value` arguments, into a dataclass.

The dataclass of a program lists every key with its type, default and meaning. A config file holds
only literals: nothing in it is executed. A field whose type is a dataclass takes a dict of its
keys: `eval = {'shots': 0}` in a file, `--eval.shots=0` on the command line.
"""

import ast
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

from runtime.errors import ConfigError
from runtime.ownership import refuse_inputs


def load_config(cls, argv, usage='', config=None, hidden=()):
    """Return `cls(...)` from `argv` = ['configs/file.py', '--key=value', '--flag', ...].

    `config` replaces the defaults of the dataclass `cls`. The file is optional and comes first.
    `-h` or `--help` prints `usage` and the keys but `hidden`, and exits. Raises ConfigError.
    """
    if '-h' in argv or '--help' in argv:
        print(usage.strip(), '', 'keys, as --key=value or, before them, in a config file:',
              *describe_keys(cls, hidden=hidden), sep='\n')
        raise SystemExit(0)
    config = config or cls()
    require_unicode(argv)
    for i, argument in enumerate(argv):
        if argument.startswith('--'):
            name, has_value, text = argument[2:].partition('=')
            config = _replace(config, name, text if has_value else None, f'command line: --{name}')
        elif i == 0:
            config = dataclasses.replace(config, **{
                key: _coerce(value, annotation_of(cls, key, where), f'{where}: {key}')
                for key, (value, where) in read_assignments(argument).items()})
        else:
            raise ConfigError(f'unexpected argument {argument!r}: a config file comes first, '
                              f'everything after it is --key=value')
    if getattr(config, 'overwrite', False) and getattr(config, 'out_dir', None):
        refuse_inputs(
            Path(config.out_dir).expanduser(),
            *(argument for argument in argv[:1] if not argument.startswith('--')))
    return config


# a field with the comment above it, the comment beside it and the lines that continue the latter
FIELD = re.compile(r'((?:^    # {1,4}\S.*\n)*)^    (\w+): .*?(?:  # (.*))?\n'
                   r'((?:    (?:#  | +#).*\n)*)', re.MULTILINE)


def describe_keys(cls, prefix='', hidden=()):
    """Yield the lines of --help: each key with its default, type and comments."""
    comments = {key: (above, re.sub(r'\n +# +', ' ', f'{beside}\n{more}'))
                for above, key, beside, more in FIELD.findall(
                    ''.join(inspect.getsource(base) for base in cls.__mro__[-2::-1]))}
    for key, default in vars(cls()).items():
        if key in hidden:
            continue
        above, beside = comments.get(key, ('', ''))
        annotation = annotation_of(cls, key, '')
        shown = ','.join(map(str, default)) if isinstance(default, tuple) else default
        yield from ('  ' + line.strip() for line in above.splitlines())
        yield textwrap.fill(f'({inspect.formatannotation(annotation)}) {beside}', 100,
                            initial_indent=f'  --{prefix}{key}={shown}'.ljust(35) + ' ',
                            subsequent_indent=' ' * 36)
        for record in filter(dataclasses.is_dataclass, options_of(annotation)):
            yield from describe_keys(record, f'{prefix}{key}.')


def require_unicode(argv):
    """Raise ConfigError for an argument, such as a file name in Latin-1, that is not UTF-8."""
    for argument in argv:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise ConfigError(f'{argument!a} is not valid Unicode; rename the file') from None


def require_range(config, low, high, *keys):
    """Raise ConfigError unless low <= value <= high for each of `keys` that is not None."""
    for key in keys:
        value = getattr(config, key)
        if value is not None and not low <= value <= high:
            wanted = f'at least {low}' if high == math.inf else f'between {low} and {high}'
            raise ConfigError(f'{key} = {value}; it must be {wanted}')


def require_given(config, **examples):
    """Raise ConfigError if a key has no value; `examples` has a value for each key."""
    for key, example in examples.items():
        if not getattr(config, key):
            raise ConfigError(f'no {key} given; for example --{key}={example}')


def note_default(config, key, example):
    """Say before a download that `key` has its default, a name on the hub."""
    value = getattr(config, key)
    if value == getattr(type(config)(), key):
        names = value if isinstance(value, str) else ', '.join(value)
        print(f'{key}: {names}, which is the default; --{key}={example} takes your own', flush=True)


def dump_config(config):
    """Return the text of a config file from which `load_config` reads the same config."""
    return ''.join(f'{key} = {pprint.pformat(value, width=95, sort_dicts=False)}\n'
                   for key, value in dataclasses.asdict(config).items())


def read_assignments(path):
    """Return {key: (value, 'file:line')} of a config file, whatever its keys."""
    try:
        tree = ast.parse(Path(path).read_bytes())
    except OSError as error:
        raise ConfigError(f'cannot read the config file {path}: {error.strerror}; '
                          f'settings are given as --key=value') from error
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line, message = getattr(error, 'lineno', None) or 1, getattr(error, 'msg', error)
        raise ConfigError(f'{path}:{line}: not valid Python: {message}') from error
    values = {}
    for node in tree.body:
        where = f'{path}:{node.lineno}'
        match node:
            case ast.Expr(value=ast.Constant()):    # a docstring
                continue
            case ast.Assign(targets=[ast.Name(id=key)]):
                if key in values:
                    raise ConfigError(f'{where}: {key} is already set at {values[key][1]}')
                try:
                    values[key] = ast.literal_eval(node.value), where
                except (ValueError, TypeError, RecursionError, MemoryError) as error:
                    raise ConfigError(f'{where}: the value of {key} must be a plain literal, '
                                      f'not an expression') from error
            case _:
                raise ConfigError(f'{where}: a config file holds only `key = value` lines')
    return values


def run_folder(folder):
    """Return the folder of the run that saved the model in `folder`, which may be epoch-<n>/."""
    folder = Path(folder)
    return folder.parent if re.fullmatch(r'epoch-\d+', folder.name) else folder


def run_settings(folder):
    """Return the settings in the train_config.py of a run's folder; {} without a run."""
    path = Path(folder, 'train_config.py')
    assigned = read_assignments(path) if path.exists() else {}
    return {key: value for key, (value, _) in assigned.items()}


def _replace(config, name, text, where):
    """Return `config`, a dataclass or dict, with `name`, 'key' or 'key.inner', set to `text`."""
    key, _, inner = name.partition('.')
    free = isinstance(config, dict)
    annotation = object if free else annotation_of(type(config), key, where)
    if inner:
        value = config.get(key, {}) if free else getattr(config, key)
        if value is None:       # begin with the defaults of the dataclass
            value = next(filter(dataclasses.is_dataclass, options_of(annotation)), type(None))()
        if not (isinstance(value, dict) or dataclasses.is_dataclass(value)):
            raise ConfigError(f'{where}: {key} has no keys of its own')
        value = _replace(value, inner, text, where)
    elif text is None and annotation is not bool:
        raise ConfigError(f'{where}: needs a value, {where.split()[-1]}=...')
    else:
        value = _coerce(True if text is None else _parse(text, annotation), annotation, where)
    return config | {key: value} if free else dataclasses.replace(config, **{key: value})


def annotation_of(cls, key, where):
    annotations = typing.get_type_hints(cls)
    if key not in annotations:
        near = [f'{name}.{key}' for name, annotation in annotations.items()
                for record in filter(dataclasses.is_dataclass, options_of(annotation))
                if key in typing.get_type_hints(record)]
        near = near or difflib.get_close_matches(str(key), annotations, n=1, cutoff=0.52)
        hint = f'did you mean {near[0]!r}?' if near else f'the keys are {", ".join(annotations)}'
        raise ConfigError(f'{where}: there is no key {key!r}; {hint}')
    return annotations[key]


def options_of(annotation):
    """Return the alternatives of an annotation: members of a union, values of a Literal."""
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        return tuple(o for arg in typing.get_args(annotation) for o in options_of(arg))
    if typing.get_origin(annotation) is typing.Literal:
        return typing.get_args(annotation)
    return (annotation,)


def _parse(text, annotation):
    """Return the value of an argument: a string if the annotation allows one, else a literal."""
    options = options_of(annotation)
    if text == 'None' and types.NoneType in options:
        return None
    if any(option is str or isinstance(option, str) for option in options):
        return text
    items = [typing.get_args(option)[0] for option in options if typing.get_origin(option) is tuple]
    if items and not text.startswith(('(', '[')):
        return tuple(_parse(part, items[0]) for part in text.split(',') if part)
    try:
        return ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return text


def _coerce(value, annotation, where):
    """Return `value` as `annotation` says: int as float, list as tuple, dict as dataclass."""
    for option in options_of(annotation):
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
            return option(**{k: _coerce(v, annotation_of(option, k, where), f'{where}: {k}')
                             for k, v in value.items()})
        elif option in (object, type(value), value):
            return value
    wanted = inspect.formatannotation(annotation).replace('Literal', 'one of ')
    if isinstance(value, float) and not math.isfinite(value):
        wanted = 'a finite number'
    elif isinstance(value, str) and tuple in map(typing.get_origin, options_of(annotation)):
        wanted += f', such as {tuple(value.split(","))}'
    elif any(map(dataclasses.is_dataclass, options_of(annotation))):
        key = where.split()[-1].removeprefix('--')
        wanted += f', as a dict of its keys; --{key}.KEY=VALUE sets one key'
    raise ConfigError(f'{where} is {value!r}, of type {type(value).__name__}; wanted {wanted}')
