"""Tables, tests and figures of claims 7 to 11; PLAN.md defines them.

    python research/study/loss_tables.py --runs=out/study   # first results/losses/seed-*.csv
    python research/study/loss_tables.py                    # from these files: tables and figures

seed-<n>.csv has the finished runs of a seed: a line for questions, facts and next tokens, over all
languages and for each. Three more tasks are: 'held out', the NLL and ECE of the held-out
conversations at the end of tuning; 'trained', the mean NLL of the trained ones in the last 50
steps; and `base` or `medium`, whose accuracy is the share of the facts of the instruction data that
the model knows. An excess is the mean of a metric minus that of cross-entropy at equal accuracy;
only the first strength of a loss is tested.
"""

import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from compare.over_seeds import run_lines
from results.plots import save_figure
from compare.runs import read_run
from results.columns import title_of
from runtime import cli
from compare.significance import mean_interval
from research.common import panels, read_lines, seed_folder
from research.study.claims import (TABLES, Claims, cell, draw_groups, finish, label,
                                   mean_and_ends, pairs, specification, values_of)
from research.study.runs import (EXPERIMENTS, KNOWN_BASES, KNOWN_DATA, LATER, LATER_SEEDS, LOSSES,
                                 STRENGTHS, TUNED, WORLD, short)

COLUMNS = ('run', 'seed', 'task', 'language', 'scaling', 'accuracy', 'confidence', 'ece',
           'smooth_ece', 'brier', 'nll')
BASES = ('base', 'medium', 'large')
LAST = 50           # steps
TASKS = {'text4': 'questions', 'facts': 'first tokens of facts', 'clm': 'next tokens'}
FIRST = {name: strengths[0] for name, strengths in LOSSES.items()}


# Numbers

def folders(root):
    """Yield the folder of each run: base models, what they know, tuned models."""
    for seed in LATER_SEEDS:
        for experiment, names in (('base', BASES), ('knows', KNOWN_BASES)):
            yield from (Path(seed_folder(experiment, seed, root), name) for name in names)
        for experiment in LATER:
            yield from (Path(cfg.out_dir) for cfg in EXPERIMENTS[experiment](seed, root))


def lines_of(folder):
    """Return the lines of a run that a table uses, {column of COLUMNS: value}."""
    run, lines, pooled = read_run(folder), [], {'language': 'all', 'scaling': 'none'}
    for line in run_lines(run):
        same = [line[key] == value for key, value in pooled.items()]
        # languages and temperatures only of questions
        used = any(same) if line['task'] == 'text4' else (
            all(same) and line['task'] not in WORLD.forms)
        if line['category'] == 'all' and used:
            lines.append(line)
    if run.settings.get('val_size', '0') != '0':
        steps = read_lines(run.folder / 'log.jsonl')
        trained = np.mean([step['nll'] for step in steps[-LAST:]])
        lines += [pooled | {'task': 'held out', 'ece': f'{steps[-1]["val_ece"]:.5g}',
                            'nll': f'{steps[-1]["val_nll"]:.5g}'},
                  pooled | {'task': 'trained', 'nll': f'{trained:.5g}'}]
    about = {'run': run.folder.name, 'seed': str(run.seed)}
    return [{key: (about | line).get(key, '') for key in COLUMNS} for line in lines]


def curves():
    """Yield (name of a curve, its points): a base model, and a loss tuned at several rates."""
    for table in TUNED['losses'] + TUNED['transfer']:
        for loss in map(short, table['each']['loss']):
            runs = [table['name'].format(loss=loss, lr=lr) for lr in table['each']['lr']]
            name, _, _ = runs[0].rpartition('-lr')
            yield name, [(run, {}) for run in (table.get('base', 'base'), *runs)]


def ratio_interval(x, y):
    """Return (low, high) of mean(x) / mean(y) by Fieller's theorem (1954), or None if unbounded.

    It holds the ratios r for which x - r y [seeds] has a mean that a t test does not tell from 0.
    """
    n, (mean, _, high) = len(x), mean_interval(y)
    t2 = (high - mean) ** 2 / (y.var(ddof=1) / n)       # the quantile of t, squared
    cov = np.cov(x, y) / n
    a, b, c = (y.mean() ** 2 - t2 * cov[1, 1], x.mean() * y.mean() - t2 * cov[0, 1],
               x.mean() ** 2 - t2 * cov[0, 0])
    if a <= 0 or b * b < a * c:
        return None
    return (b - np.sqrt(b * b - a * c)) / a, (b + np.sqrt(b * b - a * c)) / a


# Tables

def loss_rows(losses):
    """Return the rows of a table in tables.toml for {title: loss} besides cross-entropy."""
    return lambda numbers: [f'{title} = {short(loss)}' for title, loss in losses.items()
                            if loss != FIRST['cross-entropy']]


DEFAULT = 'tuned-crossentropy-lr0.0008'
CHOICES = dict(pairs(TABLES['choices']['rows']))       # of claim 11, {choice: run, and its scaling}


def ranked_choices(numbers):
    """Return [(text, choice, [4, seeds])], the best choice first: the reduction of ECE per point of
    accuracy lost, and the four numbers of a row of `recipe_table`.

    A choice that loses no accuracy beyond its interval is free and comes first.
    """
    def values(choice):
        ece, accuracy, nll = (numbers.value(f'{choice} {m}') for m in ('ece', 'accuracy', 'nll'))
        held_out = numbers.of(choice.split()[0], 'nll', task='held out')    # has no temperature
        return np.array([-ece, -100 * accuracy, -nll, held_out])

    ranked = []
    for name, choice in CHOICES.items():
        ece, lost, *_ = changes = values(choice) - values(DEFAULT)
        if not np.isfinite([ece, lost]).all():
            rank, text = (2, 0), 'not run'
        elif (lost[0] if len(lost) < 2 else mean_interval(lost)[1]) <= 0:
            rank, text = (0, -ece.mean()), 'free'
        else:
            ratio = ece.mean() / lost.mean()
            rank, text = (1, -ratio), f'{ratio:.3f}'
            if len(lost) > 1:
                ends = ratio_interval(ece, lost)
                text += ' ({:.3f} to {:.3f})'.format(*ends) if ends else ' (unbounded)'
        ranked.append((rank, text, name, changes))
    return [choice[1:] for choice in sorted(ranked, key=lambda choice: choice[:3])]


def recipe_table(numbers):
    """Return the table of claim 11: choices that keep a model calibrated."""
    return [['choice', 'reduction of ECE', 'points of accuracy lost', 'reduction of NLL',
             'increase of NLL on held-out conversations', 'reduction of ECE per point'],
            *([name, cell(ece), cell(lost, digits=1), cell(nll), cell(held_out), text]
              for text, name, (ece, lost, nll, held_out) in ranked_choices(numbers))]


# Figures

def loss_colors():
    """Return {loss: color}: black for cross-entropy."""
    from matplotlib import colormaps
    return dict(zip(LOSSES, ['black', *colormaps['tab10'].colors], strict=True))


def draw_curves(numbers, ax, metric, title, **where):
    """Draw one curve per loss over the learning rates; other strengths than the first are pale."""
    for (name, strengths), color in zip(LOSSES.items(), loss_colors().values(), strict=True):
        for i, loss in enumerate(strengths):
            points = numbers.curve(f'tuned-{short(loss)}', metric, **where)
            order = np.argsort(points[0], axis=0, kind='stable')
            x, y = np.take_along_axis(points, order[None], axis=1).mean(-1)
            style = {'linewidth': 0.8, 'alpha': 0.35} if i else {'linewidth': 1.6, 'label': name}
            style['linestyle'] = '--' if name == 'DFT' else '-'     # it covers GCE 1
            ax.plot(x, y, color=color, marker='o', markersize=3, **style)
    x, y = (numbers.of('base', m, **where).mean() for m in ('accuracy', metric))
    ax.plot(x, y, 'k*', markersize=10, label='base model')
    label(ax, title, xlabel='accuracy', ylabel=title_of(metric))


def curves_figure(numbers, path, shown):
    """Draw rows of three panels; shown: [(metric, title, {column: value})]."""
    figure, axes = panels(len(shown), 3)
    for ax, (metric, title, where) in zip(axes, shown, strict=True):
        draw_curves(numbers, ax, metric, title, **where)
    finish(figure, path)


SCALED = 'after temperature scaling', {'scaling': 'temperature'}
equal_accuracy_figure = functools.partial(curves_figure, shown=[
    (metric, title, {'task': task}) for metric in ('ece', 'smooth_ece')
    for task, title in TASKS.items()])
temperature_figure = functools.partial(curves_figure, shown=[
    ('ece', 'questions', {}), ('ece', *SCALED), ('nll', *SCALED)])


def transfer_figure(numbers, path):
    """Draw the table of ECE: a group per column, a color per loss."""
    values, color = values_of(numbers, specification(numbers, 'transfer')), loss_colors()
    settings = list(dict.fromkeys(setting for _, setting in values))
    figure, (ax,) = panels(1, 1, width=8)
    draw_groups(ax, settings, {name: (color[name], [values[name, x] for x in settings])
                                       for name, _ in values}, 0.07)
    ax.axhline(0, color='black', linewidth=1)
    label(ax, '', 'y', ylabel='ECE minus that of cross-entropy')
    finish(figure, path)


def known_figure(numbers, path):
    """Draw the table of ECE: a panel per base model, a group per kind of fact."""
    values, color = values_of(numbers, specification(numbers, 'known')), loss_colors()
    figure, axes = panels(len(KNOWN_BASES), len(KNOWN_BASES))
    for ax, base, size in zip(axes, KNOWN_BASES, ('6 million', '34 million'), strict=True):
        draw_groups(ax, KNOWN_DATA, {name: (color[name], [
            values[f'{size} / {data}', f'ECE, {name}'] for data in KNOWN_DATA])
            for name in ('cross-entropy', 'smoothing', 'DFT')}, 0.08)
        ax.axhline(numbers.of(base, 'ece').mean(), color='black', linestyle='--', linewidth=1,
                   label='base model')
        label(ax, size, 'y', xlabel='facts of the tuning data', ylabel='ECE')
    finish(figure, path)


def recipe_figure(numbers, path):
    """Draw a row per choice, in the order of the table; a choice without runs is left out."""
    rows = [(name, changes[[0, 1, 3]]) for _, name, changes in ranked_choices(numbers)
            if np.isfinite(changes[[0, 1, 3]]).all()]
    figure, axes = panels(3, 3, 10 / 3, 1 + 0.24 * len(rows))
    for i, (ax, title) in enumerate(zip(axes, (
            'reduction of ECE', 'points of accuracy lost', 'increase of NLL on conversations'),
            strict=True)):
        for y, (_, changes) in enumerate(rows):
            mean, low, high = mean_and_ends(changes[i])
            ax.errorbar([mean], [y], xerr=[[mean - low], [high - mean]], color='C0', marker='o',
                        markersize=4, capsize=2, linewidth=1.2)
        ax.axvline(0, color='black', linewidth=1)
        ax.set_yticks(range(len(rows)), [name for name, _ in rows] if i == 0 else [])
        ax.set_ylim(len(rows) - 0.5, -0.5)
        label(ax, title)
    save_figure(figure, path, 110)


CLAIMS = Claims(
    Path(__file__).parent / 'results' / 'losses',
    {'task': 'text4', 'language': 'all', 'scaling': 'none'},
    {'equal-accuracy': equal_accuracy_figure, 'after-temperature': temperature_figure,
     'transfer': transfer_figure, 'known': known_figure, 'recipe': recipe_figure},
    folders, lines_of, dict(curves()),
    {'losses': loss_rows(FIRST), 'strengths': loss_rows(dict(zip(STRENGTHS, STRENGTHS))),
     'other_strengths': lambda numbers: [x for x in STRENGTHS if x not in FIRST.values()],
     'recipe': recipe_table})


if __name__ == '__main__':
    with cli.one_line_errors():
        CLAIMS.main(__doc__)
