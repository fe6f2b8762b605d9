"""Figures of matplotlib, which is imported when the first one is drawn: that takes half a second.
"""

import contextlib
import sys
import textwrap

from runtime.errors import escape_controls
from runtime.ownership import temporary

# fonts with Chinese, Japanese and Korean characters, on Linux, macOS and Windows
FALLBACK_FONTS = ('Noto Sans CJK SC', 'Noto Sans CJK JP', 'Source Han Sans SC', 'Noto Sans SC',
                  'WenQuanYi Zen Hei', 'Droid Sans Fallback', 'Unifont', 'PingFang SC',
                  'Arial Unicode MS', 'Microsoft YaHei', 'SimHei')


def new_figure(width, height):
    """Return an empty figure of this size in inches, with fonts for as many scripts as possible."""
    import matplotlib
    from matplotlib import figure, font_manager
    installed = {font.name for font in font_manager.fontManager.ttflist}
    matplotlib.rcParams['font.family'] = ['DejaVu Sans', *(
        name for name in FALLBACK_FONTS if name in installed)]
    matplotlib.rcParams['hatch.linewidth'] = 2
    return figure.Figure(figsize=(width, height), layout='constrained')


def printable(text):
    """Return `text` for a picture, where $ would begin a formula."""
    return text.replace('$', r'\$')


def figure_title(text, width):
    """Return `printable(text)` in at most three lines of `width` characters."""
    return '\n'.join(textwrap.wrap(printable(text), width, max_lines=3))


def save_figure(figure, path, dpi):
    """Write a PNG under a temporary name and rename it."""
    with temporary(path) as part:
        figure.savefig(part, format='png', dpi=dpi)


@contextlib.contextmanager
def warn_on_failure(path):
    """Warn if the block that writes `path` fails; yields a list that is [path] if it did not."""
    written = []
    try:
        yield written
        written.append(path)
    except Exception as error:      # matplotlib raises many kinds
        hint = ("; pip install matplotlib, or 'nanocal[files]' for the command nanocal"
                if isinstance(error, ModuleNotFoundError) else '')
        print(f'warning: {path} was not written: {type(error).__name__}: '
              f'{escape_controls(str(error))}{hint}', file=sys.stderr)
