"""A terminal: the lines typed on it, and text on a background of one of its grays."""

import contextlib
import os
import sys

from runtime.errors import escape_controls

with contextlib.suppress(ImportError):
    import readline     # noqa: F401    input() then edits lines and has a history


def typed_lines():
    """Yield each line that is typed, without empty ones, until Ctrl-D."""
    with contextlib.suppress(EOFError):
        while True:
            try:
                line = input('\n> ').strip()
                line.encode()       # in some locales an invalid byte becomes a lone surrogate
            except UnicodeError:
                print(f'(that line is not valid {sys.stdin.encoding}; type it again)',
                      file=sys.stderr)
                continue
            if line:
                yield line
    print()


def shows_grays():
    """Return whether standard output is a terminal with 256 colors, and NO_COLOR is not set."""
    return sys.stdout.isatty() and not os.environ.get('NO_COLOR') and (
        '256' in os.environ.get('TERM', '') or bool(os.environ.get('COLORTERM')))


def shaded(text, p):
    """Return `text` on a gray from black (p = 0) to white (1), control characters escaped."""
    text = escape_controls(text)
    gray = f'\x1b[48;5;{232 + round(23 * p)};38;5;{16 if p > 0.5 else 231}m'
    return '\n'.join(f'{gray}{line}\x1b[0m' if line else '' for line in text.split('\n'))
