"""Tables, tests and figures of claims 7 to 11, from the committed numbers; PLAN.md defines them.

    python research/study/frontier.py   # results/losses/*.md and *.png, from seed-*.csv beside

An excess is the mean of ECE, or another metric, minus that of cross-entropy at equal accuracy.
Cells are means over seeds, ± half of the 95 % interval (Student's t). p is of a two-sided t test
over seeds, after Holm's correction for all tests of the claim; only the first strength of a loss is
tested. One seed has neither interval nor p.
"""

import argparse
import csv
import functools
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from results.over_seeds import mean_and_ends
from results.plots import new_figure, save_figure
from results.tables import TITLES, markdown
from runtime.ownership import write_text
from stats import holm, mean_interval, student_t
from research.study.known import BASES, DATA, NAMES
from research.study.losses import LOSSES, RATES, short
from research.study.transfer import KINDS

RESULTS = Path(__file__).parent / 'results' / 'losses'
CROSS_ENTROPY, SMOOTHING = LOSSES['cross-entropy'][0], LOSSES['smoothing'][0]
TASKS = {'text4': 'questions', 'facts': 'first tokens of facts', 'clm': 'next tokens'}
UNTUNED = ('l1', 'l2', 'l3')
LEAST_RANGE = 0.005     # of accuracies that two curves share; below, nothing is compared
SETTINGS = {'base': {}, 'lora': {'lora': 'True', 'rates': KINDS['lora'][0]},
            'medium': {'model': 'medium', 'rates': KINDS['medium'][0]},
            'large': {'model': 'large', 'rates': KINDS['large'][0]}}
COLUMNS = {'base': '6 million', 'medium': '34 million', 'large': '210 million', 'lora': 'LoRA',
           'untuned': 'untuned languages', 'english': 'English'}


# Numbers


def read_numbers(folder, *columns):
    """Return ({(seed, *columns): row}, seeds) of the files seed-*.csv in a folder."""
    rows, seeds = {}, []
    for path in sorted(Path(folder).glob('seed-*.csv')):
        with open(path, encoding='utf-8') as file:
            of_seed = list(csv.DictReader(file))
        seeds.append(of_seed[0]['seed'])
        rows |= {(row['seed'], *(row[column] for column in columns)): row for row in of_seed}
    return rows, seeds


class Numbers:
    """All lines of the study; `value` finds one number, nan if its run is missing."""

    def __init__(self, folder):
        self.lines, self.seeds = read_numbers(folder, 'run', 'task', 'language', 'scaling')
        if not self.seeds:
            sys.exit(f'error: {folder} has no seed-*.csv; research/study/gather.py writes them')

    def value(self, seed, run, metric, task='text4', language='all', scaling='none'):
        line = self.lines.get((seed, run, task, language, scaling), {})
        return float(line.get(metric) or 'nan')

    def curve(self, seed, metric, loss, kind='base', **where):
        """Return (accuracies, values) [rates + 1], ascending: the base model and the tuned ones."""
        settings = SETTINGS[kind]
        prefix = 'tuned' if kind == 'base' else kind
        runs = [settings.get('model', 'base')]
        runs += [f'{prefix}-{short(loss)}-lr{lr}' for lr in settings.get('rates', RATES)]
        points = np.array([[self.value(seed, run, m, **where) for run in runs]
                           for m in ('accuracy', metric)])
        return points[:, np.argsort(points[0], kind='stable')]

    def excess(self, metric, loss, kind='base', **where):
        """Return [seeds]: the metric of a loss minus that of cross-entropy at equal accuracy."""
        return np.array([at_equal_accuracy(self.curve(seed, metric, loss, kind, **where),
                                           self.curve(seed, metric, CROSS_ENTROPY, kind, **where))
                         for seed in self.seeds])

    def over_seeds(self, run, metric, **where):
        return np.array([self.value(seed, run, metric, **where) for seed in self.seeds])


def at_equal_accuracy(curve, reference):
    """Return the mean difference of two curves over the accuracies that both reach, or nan.

    Both are (accuracies ascending, values), linear between their points.
    """
    low, high = max(curve[0][0], reference[0][0]), min(curve[0][-1], reference[0][-1])
    if not high - low >= LEAST_RANGE:       # or nan
        return float('nan')
    grid = low + (high - low) * (np.arange(1000) + 0.5) / 1000
    return float((np.interp(grid, *curve) - np.interp(grid, *reference)).mean())


def p_of(values):
    """Return p of a t test against 0; 1 if a seed has no value: a missing run confirms nothing."""
    return student_t(values)[2] if np.isfinite(values).all() else 1.0


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


def cell(values, p=None, digits=3):
    """Return '+0.012 ± 0.003, p 0.01'; p is given only for what is tested.

    A seed has no value if a run is missing, or if the two curves share too little accuracy.
    """
    if not np.isfinite(values).all():
        return f'none for {np.isnan(values).sum()} of {len(values)} seeds'
    if len(values) < 2:
        return f'{values[0]:+.{digits}f}'
    mean, _, high = mean_interval(values)
    return (f'{mean:+.{digits}f} ± {high - mean:.{digits}f}'
            + (f', p {p:.1g}' if p is not None else ''))


def tested_table(head, rows, tested):
    """Return a table; rows: [(cells, [values])], tested: the indices (row, column) of tests."""
    n_seeds = len(rows[0][1][0])
    p = holm([p_of(rows[i][1][j]) for i, j in tested]) if n_seeds > 1 else [None] * len(tested)
    p = dict(zip(tested, p, strict=True))
    return [head, *([*cells, *(cell(v, p.get((i, j))) for j, v in enumerate(values))]
                    for i, (cells, values) in enumerate(rows))]


def all_losses(primary=False):
    for name, strengths in LOSSES.items():
        for loss in strengths[:1] if primary else strengths:
            if loss != CROSS_ENTROPY:
                yield name, loss


def equal_accuracy_table(numbers):
    """Return the table of claim 7: losses at equal accuracy."""
    rows = []
    for _, loss in all_losses():
        columns = [numbers.excess('ece', loss, task=task) for task in TASKS]
        columns += [numbers.excess(metric, loss) for metric in ('smooth_ece', 'brier', 'nll')]
        learned = (numbers.over_seeds(f'tuned-{short(loss)}-lr0.0008', 'nll', task='held out')
                   - numbers.over_seeds(f'tuned-{short(CROSS_ENTROPY)}-lr0.0008', 'nll',
                                        task='held out'))
        rows.append(([loss], [*columns, learned]))
    first = [i for i, (_, loss) in enumerate(all_losses())
             if loss in [strengths[0] for strengths in LOSSES.values()]]
    head = ['loss', *(f'ECE, {title}' for title in TASKS.values()),
            *(f'{TITLES[m]}, questions' for m in ('smooth_ece', 'brier', 'nll')),
            'NLL of held-out conversations at 8e-4']
    return tested_table(head, rows, [(i, j) for i in first for j in range(3)])


def temperature_table(numbers):
    """Return the table of claim 8: losses after temperature scaling."""
    rows = [([name], [numbers.excess('ece', loss)]
             + [numbers.excess(metric, loss, scaling='temperature') for metric in ('ece', 'nll')])
            for name, loss in all_losses(primary=True)]
    return tested_table(['loss', 'ECE', 'ECE after temperature', 'NLL after temperature'], rows,
                        [(i, j) for i in range(len(rows)) for j in (1, 2)])


def transfer_values(numbers, name, loss, column, metric='ece'):
    """Return [seeds], or None if the plan has no such runs."""
    if column in ('untuned', 'english'):
        languages = UNTUNED if column == 'untuned' else ['en']
        return np.mean([numbers.excess(metric, loss, language=x) for x in languages], axis=0)
    return (numbers.excess(metric, loss, column)
            if column == 'base' or name in KINDS[column][1] else None)


def transfer_table(numbers, metric='ece'):
    """Claim 9; tested is ECE, but not at 6 million, which is claim 7's, nor in English."""
    values = {(name, column): v for name, loss in all_losses(primary=True) for column in COLUMNS
              if (v := transfer_values(numbers, name, loss, column, metric)) is not None}
    tested = [key for key in values if metric == 'ece' and key[1] not in ('base', 'english')]
    p = (holm([p_of(values[key]) for key in tested]) if len(numbers.seeds) > 1
         else [None] * len(tested))
    p = dict(zip(tested, p, strict=True))
    return [[f'{TITLES[metric]}: loss', *COLUMNS.values()], *(
        [name, *(cell(values[name, column], p.get((name, column))) if (name, column) in values
                 else '-' for column in COLUMNS)] for name, _ in all_losses(primary=True))]


def known_values(numbers, base, data, name, metric='ece'):
    return numbers.over_seeds(f'{base}-{data}-{short(LOSSES[name][0])}', metric)


def known_table(numbers, metric='ece'):
    """Claim 10: a metric of questions after tuning on known and on unknown facts."""
    return [['base model', 'tuned on', *(f'{TITLES[metric]}, {name}' for name in NAMES)], *(
        [COLUMNS[base], data, *(cell(known_values(numbers, base, data, name, metric)).lstrip('+')
                                for name in NAMES)] for base in BASES for data in DATA)]


def predictions_table(numbers):
    """Claim 10: the plan's predictions, each as a difference that should exceed 0."""
    def gain(base, data, name):
        return (known_values(numbers, base, data, 'cross-entropy')
                - known_values(numbers, base, data, name))
    def memorized(run):
        return (numbers.over_seeds(run, 'nll', task='held out')
                - numbers.over_seeds(run, 'nll', task='trained'))
    not_memorized = {base: memorized(f'{prefix}-{short(CROSS_ENTROPY)}-lr{lr}')
            - memorized(f'{prefix}-{short(SMOOTHING)}-lr{lr}')
            for base, (prefix, lr) in {'base': ('tuned', 8e-4), 'medium': ('medium', 4e-4)}.items()}
    share = {base: numbers.over_seeds(base, 'accuracy', task=base) for base in BASES}
    rows = [(['cross-entropy: ECE unknown - known, 6 million'],
             [known_values(numbers, 'base', 'unknown', 'cross-entropy')
              - known_values(numbers, 'base', 'known', 'cross-entropy')]),
            (['cross-entropy: ECE unknown - known, 34 million'],
             [known_values(numbers, 'medium', 'unknown', 'cross-entropy')
              - known_values(numbers, 'medium', 'known', 'cross-entropy')]),
            (["smoothing's reduction of ECE: unknown - known, 6 million"],
             [gain('base', 'unknown', 'smoothing') - gain('base', 'known', 'smoothing')]),
            (["DFT's reduction of ECE: unknown - known, 6 million"],
             [gain('base', 'unknown', 'DFT') - gain('base', 'known', 'DFT')]),
            (['share of known facts, 34 - 6 million'], [share['medium'] - share['base']]),
            (["smoothing's reduction of ECE on unknown facts, 34 million"],
             [gain('medium', 'unknown', 'smoothing')]),
            (['reduction of memorization (NLL) by smoothing: 6 - 34 million'],
             [not_memorized['base'] - not_memorized['medium']])]
    return tested_table(['prediction: above 0', 'difference'], rows,
                        [(i, 0) for i in range(len(rows))])


def choices():
    """Yield (what is chosen, its run, its scaling) of the recipe; the first is the default."""
    yield 'cross-entropy, 3 epochs, 8e-4', f'tuned-{short(CROSS_ENTROPY)}-lr0.0008', 'none'
    for lr in RATES[:2]:
        yield f'learning rate {lr:g}', f'tuned-{short(CROSS_ENTROPY)}-lr{lr}', 'none'
    yield 'one epoch', f'epoch-{short(CROSS_ENTROPY)}-lr0.0008', 'none'
    yield 'one epoch, 0.00032', f'epoch-{short(CROSS_ENTROPY)}-lr0.00032', 'none'
    yield 'one epoch, smoothing', f'epoch-{short(SMOOTHING)}-lr0.0008', 'none'
    yield 'one epoch, 0.00032, smoothing', f'epoch-{short(SMOOTHING)}-lr0.00032', 'none'
    for lr in KINDS['lora'][0]:
        yield f'LoRA, {lr:g}', f'lora-{short(CROSS_ENTROPY)}-lr{lr}', 'none'
    for name, loss in all_losses(primary=True):
        yield name, f'tuned-{short(loss)}-lr0.0008', 'none'
    for what, run in (('temperature', f'tuned-{short(CROSS_ENTROPY)}-lr0.0008'),
                      ('learning rate 0.00032 + temperature',
                       f'tuned-{short(CROSS_ENTROPY)}-lr0.00032'),
                      ('LoRA, 0.0008 + temperature', f'lora-{short(CROSS_ENTROPY)}-lr0.0008'),
                      ('smoothing + temperature', f'tuned-{short(SMOOTHING)}-lr0.0008')):
        yield what, run, 'temperature'


def recipe_values(numbers):
    """Return [(choice, reduction of ECE [seeds], points of accuracy lost, reduction of NLL,
    increase of NLL on held-out conversations)]; a temperature does not change the last one.
    """
    values = [(name, *(numbers.over_seeds(run, m, scaling=scaling)
                       for m in ('ece', 'accuracy', 'nll')),
               numbers.over_seeds(run, 'nll', task='held out'))
              for name, run, scaling in choices()]
    _, ece, accuracy, nll, held_out = values[0]
    return [(name, ece - e, 100 * (accuracy - a), nll - n, h - held_out)
            for name, e, a, n, h in values[1:]]


def per_point(ece, lost):
    """Return (rank, text) of the reduction of ECE per point of accuracy lost.

    A choice that loses no accuracy beyond its interval is free and comes first.
    """
    if not np.isfinite([ece, lost]).all():
        return (2, 0), 'not run'
    if len(ece) < 2:
        return (0 if lost[0] <= 0 else 1, -ece[0]), 'free' if lost[0] <= 0 else (
            f'{ece[0] / lost[0]:.3f}')
    if mean_interval(lost)[1] <= 0:
        return (0, -ece.mean()), 'free'
    ends = ratio_interval(ece, lost)
    return (1, -ece.mean() / lost.mean()), f'{ece.mean() / lost.mean():.3f}' + (
        f' ({ends[0]:.3f} to {ends[1]:.3f})' if ends else ' (unbounded)')


def recipe_table(numbers):
    """Return the table of claim 11: choices that keep a model calibrated."""
    ranked = sorted((*per_point(ece, lost), name, ece, lost, nll, held_out)
                    for name, ece, lost, nll, held_out in recipe_values(numbers))
    return [['choice', 'reduction of ECE', 'points of accuracy lost', 'reduction of NLL',
             'increase of NLL on held-out conversations', 'reduction of ECE per point'],
            *([name, cell(ece), cell(lost, digits=1), cell(nll), cell(held_out), text]
              for _, text, name, ece, lost, nll, held_out in ranked)]


# Figures


def loss_colors():
    """Return {loss: color}: black for cross-entropy."""
    from matplotlib import colormaps
    return dict(zip(LOSSES, ['black', *colormaps['tab10'].colors], strict=True))


def panels(rows, columns):
    figure = new_figure(3.4 * columns, 2.9 * rows + 0.8)
    return figure, figure.subplots(rows, columns, squeeze=False)


def finish(figure, path):
    """Write the figure with one legend of all its lines."""
    entries = {label: handle for ax in figure.axes
               for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend(entries.values(), entries, loc='outside lower center', frameon=False, fontsize=8,
                  ncols=max(1, int(figure.get_figwidth() / 1.9)))
    save_figure(figure, path, 110)


def draw_frontier(numbers, ax, metric, title, **where):
    """Draw one curve per loss over the learning rates; other strengths than the first are pale."""
    color = loss_colors()
    for name, strengths in LOSSES.items():
        for i, loss in enumerate(strengths):
            x, y = np.mean([numbers.curve(seed, metric, loss, **where) for seed in numbers.seeds],
                           axis=0)
            style = {'linewidth': 0.8, 'alpha': 0.35} if i else {'linewidth': 1.6, 'label': name}
            style['linestyle'] = '--' if name == 'DFT' else '-'     # it covers GCE 1
            ax.plot(x, y, color=color[name], marker='o', markersize=3, **style)
    x, y = (np.mean(numbers.over_seeds('base', m, **where)) for m in ('accuracy', metric))
    ax.plot(x, y, 'k*', markersize=10, label='base model')
    ax.set(xlabel='accuracy', ylabel=TITLES[metric])
    ax.set_title(title, fontsize=10)
    ax.grid(alpha=0.3)


def equal_accuracy_figure(numbers, path):
    figure, axes = panels(2, len(TASKS))
    for row, metric in zip(axes, ('ece', 'smooth_ece'), strict=True):
        for ax, (task, title) in zip(row, TASKS.items(), strict=True):
            draw_frontier(numbers, ax, metric, title, task=task)
    finish(figure, path)


def temperature_figure(numbers, path):
    figure, axes = panels(1, 3)
    for ax, (metric, scaling, title) in zip(axes[0], (
            ('ece', 'none', 'questions'), ('ece', 'temperature', 'after temperature scaling'),
            ('nll', 'temperature', 'after temperature scaling')), strict=True):
        draw_frontier(numbers, ax, metric, title, scaling=scaling)
    finish(figure, path)


def bars(ax, x, values, **style):
    """Draw a mean over seeds with its interval at x."""
    if np.isfinite(values).all():
        mean, low, high = mean_and_ends(values)
        ax.errorbar([x], [mean], [[mean - low], [high - mean]], marker='o', markersize=4,
                    capsize=2, linewidth=1.2, **style)


def transfer_figure(numbers, path):
    figure, axes = panels(1, 1)
    figure.set_figwidth(8)
    ax, color = axes[0, 0], loss_colors()
    for i, (name, loss) in enumerate(all_losses(primary=True)):
        for j, column in enumerate(COLUMNS):
            values = transfer_values(numbers, name, loss, column)
            if values is not None:
                bars(ax, j + 0.07 * (i - 4.5), values, color=color[name], label=name)
    ax.axhline(0, color='black', linewidth=1)
    ax.set_xticks(range(len(COLUMNS)), COLUMNS.values())
    ax.set(ylabel='ECE minus that of cross-entropy')
    ax.grid(axis='y', alpha=0.3)
    finish(figure, path)


def known_figure(numbers, path):
    figure, axes = panels(1, len(BASES))
    color = loss_colors()
    for ax, base in zip(axes[0], BASES, strict=True):
        for i, name in enumerate(NAMES):
            for j, data in enumerate(DATA):
                bars(ax, j + 0.08 * (i - 1), known_values(numbers, base, data, name),
                     color=color[name], label=name)
        ax.axhline(numbers.over_seeds(base, 'ece').mean(), color='black', linestyle='--',
                   linewidth=1, label='base model')
        ax.set_xticks(range(len(DATA)), DATA)
        ax.set(xlabel='facts of the tuning data', ylabel='ECE', title=COLUMNS[base])
        ax.grid(axis='y', alpha=0.3)
    finish(figure, path)


def recipe_figure(numbers, path):
    """Draw a row per choice, in the order of the table; a choice without runs is left out."""
    ranked = sorted((*per_point(ece, lost), name, ece, lost, held_out)
                    for name, ece, lost, _, held_out in recipe_values(numbers))
    rows = [row[2:] for row in ranked if np.isfinite(row[3:]).all()]
    figure, axes = panels(1, 3)
    figure.set_size_inches(10, 1 + 0.24 * len(rows))
    for i, (ax, title) in enumerate(zip(axes[0], (
            'reduction of ECE', 'points of accuracy lost', 'increase of NLL on conversations'),
            strict=True)):
        for y, (_, *values) in enumerate(rows):
            mean, low, high = mean_and_ends(values[i])
            ax.errorbar([mean], [y], xerr=[[mean - low], [high - mean]], color='C0', marker='o',
                        markersize=4, capsize=2, linewidth=1.2)
        ax.axvline(0, color='black', linewidth=1)
        ax.set_yticks(range(len(rows)), [row[0] for row in rows] if i == 0 else [])
        ax.set_ylim(len(rows) - 0.5, -0.5)
        ax.set_title(title, fontsize=10)
        ax.grid(alpha=0.3)
    save_figure(figure, path, 110)


# file: (claim, tables, figure)
CLAIMS = {
    'equal-accuracy': ('Claim 7: metrics at equal accuracy, minus those of cross-entropy',
                       (equal_accuracy_table,), equal_accuracy_figure),
    'after-temperature': ('Claim 8: the same for questions, also after temperature scaling',
                          (temperature_table,), temperature_figure),
    'transfer': ('Claim 9: ECE of questions at equal accuracy, minus that of cross-entropy',
                 (transfer_table, *(functools.partial(transfer_table, metric=m)
                                    for m in ('smooth_ece', 'brier', 'nll'))), transfer_figure),
    'known': ('Claim 10: known and unknown facts', (
        known_table, predictions_table, *(functools.partial(known_table, metric=m) for m in (
            'accuracy', 'confidence', 'smooth_ece', 'brier', 'nll'))), known_figure),
    'recipe': ('Claim 11: each choice compared with the default', (recipe_table,),
               recipe_figure),
}


def page(numbers, title, tables):
    return f'### {title}; {len(numbers.seeds)} seeds\n\n' + '\n'.join(
        markdown(table(numbers)) for table in tables)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--only', default=','.join(CLAIMS), help='default: %(default)s')
    parser.add_argument('--folder', type=os.path.expanduser, default=RESULTS,
                        help='of seed-*.csv and of what is written')
    options = parser.parse_args()
    numbers = Numbers(options.folder)
    for name in options.only.split(','):
        if name not in CLAIMS:
            parser.error(f'--only: there is no {name}; choose from {", ".join(CLAIMS)}')
        title, tables, draw = CLAIMS[name]
        text = page(numbers, title, tables)
        write_text(Path(options.folder) / f'{name}.md', text)
        draw(numbers, Path(options.folder) / f'{name}.png')
        print(text)


if __name__ == '__main__':
    main()
