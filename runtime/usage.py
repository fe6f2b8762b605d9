"""The keys of --help: each with its type, default and the comments beside it."""

import dataclasses
import inspect
import re
import textwrap

from runtime import config

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
        annotation = config.annotation_of(cls, key, '')
        shown = ','.join(map(str, default)) if isinstance(default, tuple) else default
        yield from ('  ' + line.strip() for line in above.splitlines())
        yield textwrap.fill(f'({inspect.formatannotation(annotation)}) {beside}', 100,
                            initial_indent=f'  --{prefix}{key}={shown}'.ljust(35) + ' ',
                            subsequent_indent=' ' * 36)
        for record in filter(dataclasses.is_dataclass, config.options_of(annotation)):
            yield from describe_keys(record, f'{prefix}{key}.')
