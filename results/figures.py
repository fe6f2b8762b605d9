"""Figures of matplotlib, which is imported when the first one is drawn: that takes half a second.

The picture of a training run is here, since it needs no metrics; plots.py has the others.
"""

import contextlib
import json
import math
import sys
import textwrap
from pathlib import Path

import numpy as np

from runtime.errors import escape_controls
from runtime.ownership import claim, temporary

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


def draw_loss(out_dir):
    """Draw loss and NLL, or the reward, and gradient norm by step, from log.jsonl to loss.png."""
    out_dir = Path(out_dir)
    with warn_on_failure(out_dir / 'loss.png'):
        claim(out_dir, 'loss.png')
        from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter
        with open(out_dir / 'log.jsonl', encoding='utf-8') as lines:
            log = [json.loads(line) for line in lines]
        figure = new_figure(7, 5)
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        style = {'linewidth': 1, 'markersize': 4}
        marker = '.' if len(log) < 50 else None     # a line of one step would not be seen
        with_rewards = any('reward' in r for r in log)      # whose loss says little
        lines = ([('reward', 'reward', marker), ('val_reward', 'reward, held out', 'o')]
                 if with_rewards else
                 [('loss', 'loss', marker), ('nll', 'NLL', marker),
                  ('val_nll', 'NLL, held out', 'o')])
        for key, label, mark in lines:
            points = [(r['step'], r[key]) for r in log if key in r]
            if points and not (key == 'loss' and all(r['loss'] == r.get('nll') for r in log)):
                top.plot(*zip(*points, strict=True), marker=mark, label=label, **style)
        top.set_ylabel('reward' if with_rewards else 'nats per token')
        top.set_title(figure_title(out_dir.name, 70), fontsize=10)
        top.legend(frameon=False)
        norms = [(r['step'], r['grad_norm']) for r in log if 0 < r['grad_norm'] < math.inf]
        bottom.plot(*np.reshape(norms, (-1, 2)).T, marker=marker, color='grey', **style)
        low, high = (f((norm for _, norm in norms), default=1) for f in (min, max))
        bottom.set(xlabel='step', ylabel='gradient\nnorm', yscale='log', ylim=(low / 2, high * 2))
        # whole steps; few enough labels on a logarithmic axis that no two overlap
        bottom.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1,
                                                   steps=(1, 2, 5, 10)))
        bottom.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 7.5 * low else (1,)))
        bottom.yaxis.set_major_formatter('{x:g}')
        bottom.yaxis.set_minor_formatter(NullFormatter())
        save_figure(figure, out_dir / 'loss.png', 150)
