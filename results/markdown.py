"""Markdown: tables of cells, header first, and settings as code."""

import re

from runtime.errors import escape_controls


def markdown(lines):
    """Return lines of cells as a Markdown table."""
    texts = ['| ' + ' | '.join(' '.join(cell.replace('|', '\\|').splitlines()) for cell in line)
             + ' |' for line in lines]
    return '\n'.join([texts[0], '|' + '---|' * len(lines[0]), *texts[1:]]) + '\n'


def one_line(text):
    return ' '.join(escape_controls(text).split())


def code(value, whole=False):
    """Return a setting as code; unless `whole`, the last name of a path, whose rest is private."""
    text = one_line(str(value) if whole else str(value).rstrip('/').rpartition('/')[2])
    ticks = '`' * (1 + max((len(run) for run in re.findall('`+', text)), default=0))
    space = ' ' * (len(ticks) > 1)
    return f'{ticks}{space}{text}{space}{ticks}'.replace('|', r'\|')
