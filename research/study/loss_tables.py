"""Tables, tests and figures of claims 7 to 11; PLAN.md defines them.

    python research/study/loss_tables.py --runs=out/study   # first results/losses/seed-*.csv
    python research/study/loss_tables.py                    # from these files: tables and figures

seed-<n>.csv has the finished runs of a seed: a line for questions, facts and next tokens, over all
languages and for each. Three more tasks are: 'held out', the NLL and ECE of the held-out
conversations at the end of tuning; 'trained', the mean NLL of the trained ones in the last 50
steps; and `base` or `medium`, whose accuracy is the share of the 4,000 facts of the instruction
data that the model knows. An excess is the mean of ECE, or another metric, minus that of
cross-entropy at equal accuracy; only the first strength of a loss is tested. claims.py says what a
cell is.
"""

import functools
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from results.over_seeds import mean_and_ends, run_lines
from results.plots import save_figure
from results.runs import read_run
from results.tables import TITLES
from runtime import cli
from stats import mean_interval
from research.study.claims import (Claims, Source, at_equal, cell, draw_groups, finish, label,
                                   panels, plain, rows_of, tested_table)
from research.study.common import seed_folder
from research.study.runs import (EXPERIMENTS, FORMS, KNOWN_BASES, KNOWN_DATA, KNOWN_LOSSES,
                                 LATER_SEEDS, LOSSES, RATES, TRANSFER, short)

COLUMNS = ('run', 'seed', 'task', 'language', 'scaling', 'accuracy', 'confidence', 'ece',
           'smooth_ece', 'brier', 'nll')
BASES = ('base', 'medium', 'large')
LAST = 50           # steps
CROSS_ENTROPY, SMOOTHING = LOSSES['cross-entropy'][0], LOSSES['smoothing'][0]
FIRST = {name: strengths[0] for name, strengths in LOSSES.items() if name != 'cross-entropy'}
TASKS = {'text4': 'questions', 'facts': 'first tokens of facts', 'clm': 'next tokens'}
UNTUNED = ('l1', 'l2', 'l3')
SETTINGS = {'base': '6 million', 'medium': '34 million', 'large': '210 million', 'lora': 'LoRA',
            'untuned': 'untuned languages', 'english': 'English'}


# Numbers

def sources(root):
    """Yield the Source of each run: base models, what they know, tuned models."""
    for seed in LATER_SEEDS:
        for experiment, names in (('base', BASES), ('knows', KNOWN_BASES)):
            yield from (Source(Path(seed_folder(experiment, seed, root), name)) for name in names)
        for experiment in ('losses', 'transfer', 'known'):
            yield from (Source(Path(cfg.out_dir)) for cfg in EXPERIMENTS[experiment](seed, root))


def is_used(line):
    """Return whether a table uses a line: languages and temperatures only of questions."""
    pooled, unscaled = line['language'] == 'all', line['scaling'] == 'none'
    return line['category'] == 'all' and (
        pooled or unscaled if line['task'] == 'text4' else
        pooled and unscaled and line['task'] not in FORMS)


def lines_of(source):
    """Return the lines of a run, {column of COLUMNS: value}."""
    run = read_run(source.folder)
    lines = [*filter(is_used, run_lines(run))]
    if run.settings.get('val_size', '0') != '0':
        steps = [json.loads(line) for line in (run.folder / 'log.jsonl').read_text().splitlines()]
        more = {'language': 'all', 'scaling': 'none'}
        lines += [more | {'task': 'held out', 'ece': f'{steps[-1]["val_ece"]:.5g}',
                          'nll': f'{steps[-1]["val_nll"]:.5g}'},
                  more | {'task': 'trained',
                          'nll': f'{np.mean([step["nll"] for step in steps[-LAST:]]):.5g}'}]
    about = {'run': run.folder.name, 'seed': str(run.seed)}
    return [{key: (about | line).get(key, '') for key in COLUMNS} for line in lines]


def points(kind, loss):
    """Return the runs of a curve: the base model, and a loss at the learning rates of a kind."""
    rates, _, settings = TRANSFER.get(kind, (RATES, (), {}))
    tuned = 'tuned' if kind == 'base' else kind
    return [(run, {}) for run in (settings.get('base', 'base'), *(
        f'{tuned}-{short(loss)}-lr{lr}' for lr in rates))]


def excess(numbers, metric, loss, kind='base', **where):
    """Return [seeds]: the metric of a loss minus that of cross-entropy at equal accuracy."""
    return at_equal(*(numbers.curve((kind, x), metric, **where) for x in (loss, CROSS_ENTROPY)))


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

def equal_accuracy_table(numbers):
    """Return the table of claim 7: losses at equal accuracy."""
    proper = ('smooth_ece', 'brier', 'nll')
    held_out = functools.partial(numbers.of, metric='nll', task='held out')
    default = held_out(f'tuned-{short(CROSS_ENTROPY)}-lr0.0008')
    losses = [loss for strengths in LOSSES.values() for loss in strengths if loss != CROSS_ENTROPY]
    rows = [([loss], [*(excess(numbers, 'ece', loss, task=task) for task in TASKS),
                      *(excess(numbers, metric, loss) for metric in proper),
                      held_out(f'tuned-{short(loss)}-lr0.0008') - default]) for loss in losses]
    head = ['loss', *(f'ECE, {title}' for title in TASKS.values()),
            *(f'{TITLES[m]}, questions' for m in proper), 'NLL of held-out conversations at 8e-4']
    return tested_table(head, rows, [(i, j) for i, loss in enumerate(losses)
                                     if loss in FIRST.values() for j in range(3)])


def temperature_table(numbers):
    """Return the table of claim 8: losses after temperature scaling."""
    rows = [([name], [excess(numbers, 'ece', loss), *(
        excess(numbers, metric, loss, scaling='temperature') for metric in ('ece', 'nll'))])
            for name, loss in FIRST.items()]
    return tested_table(['loss', 'ECE', 'ECE after temperature', 'NLL after temperature'], rows,
                        [(i, j) for i in range(len(rows)) for j in (1, 2)])


def transfer_values(numbers, name, setting, metric='ece'):
    """Return [seeds], or None if the plan has no such runs."""
    loss = LOSSES[name][0]
    if setting in ('untuned', 'english'):
        languages = UNTUNED if setting == 'untuned' else ['en']
        return np.mean([excess(numbers, metric, loss, language=x) for x in languages], axis=0)
    if setting == 'base' or name in TRANSFER[setting][1]:
        return excess(numbers, metric, loss, setting)


def transfer_table(numbers, metric='ece'):
    """Claim 9; tested is ECE, but not at 6 million, which is claim 7's, nor in English."""
    rows = [([name], [transfer_values(numbers, name, x, metric) for x in SETTINGS])
            for name in FIRST]
    tested = [(i, j) for i, (_, values) in enumerate(rows) for j, v in enumerate(values)
              if v is not None and metric == 'ece' and [*SETTINGS][j] not in ('base', 'english')]
    return tested_table([f'{TITLES[metric]}: loss', *SETTINGS.values()], rows, tested)


def known_values(numbers, base, data, name, metric='ece'):
    return numbers.of(f'{base}-{data}-{short(LOSSES[name][0])}', metric)


def known_table(numbers, metric='ece'):
    """Claim 10: a metric of questions after tuning on known and on unknown facts."""
    return [['base model', 'tuned on', *(f'{TITLES[metric]}, {name}' for name in KNOWN_LOSSES)], *(
        [SETTINGS[base], data, *(plain(known_values(numbers, base, data, name, metric))
                                 for name in KNOWN_LOSSES)]
        for base in KNOWN_BASES for data in KNOWN_DATA)]


def memorization(numbers):
    """Return by how much more smoothing reduces memorization (NLL) at 6 than at 34 million."""
    def memorized(run):
        return numbers.of(run, 'nll', task='held out') - numbers.of(run, 'nll', task='trained')
    plain, smoothed = short(CROSS_ENTROPY), short(SMOOTHING)
    small, medium = (memorized(f'{kind}-{plain}-lr{lr}') - memorized(f'{kind}-{smoothed}-lr{lr}')
                     for kind, lr in (('tuned', 8e-4), ('medium', 4e-4)))
    return small - medium


DEFAULT = f'tuned-{short(CROSS_ENTROPY)}-lr0.0008'
CHOICES = rows_of('choices')        # of claim 11, {choice: run, and its scaling}


def ranked_choices(numbers):
    """Return [(text, choice, [4, seeds])], the best choice first.

    The four are the reduction of ECE, points of accuracy lost, the reduction of NLL, and the
    increase of NLL on held-out conversations, which a temperature does not change.
    """
    def values(choice):
        ece, accuracy, nll = (numbers.value(f'{choice} {m}') for m in ('ece', 'accuracy', 'nll'))
        held_out = numbers.of(choice.split()[0], 'nll', task='held out')
        return np.array([-ece, -100 * accuracy, -nll, held_out])
    choices = [(name, values(choice) - values(DEFAULT)) for name, choice in CHOICES.items()]
    ranked = sorted((*per_point(*changes[:2]), name, i)
                    for i, (name, changes) in enumerate(choices))
    return [(text, name, choices[i][1]) for _, text, name, i in ranked]


def per_point(ece, lost):
    """Return (rank, text) of the reduction of ECE per point of accuracy lost.

    A choice that loses no accuracy beyond its interval is free and comes first.
    """
    if not np.isfinite([ece, lost]).all():
        return (2, 0), 'not run'
    if (lost[0] if len(lost) < 2 else mean_interval(lost)[1]) <= 0:
        return (0, -ece.mean()), 'free'
    ratio, ends = ece.mean() / lost.mean(), len(lost) > 1 and ratio_interval(ece, lost)
    text = '' if len(lost) < 2 else (
        f' ({ends[0]:.3f} to {ends[1]:.3f})' if ends else ' (unbounded)')
    return (1, -ratio), f'{ratio:.3f}{text}'


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
            points = numbers.curve(('base', loss), metric, **where)
            order = np.argsort(points[0], axis=0, kind='stable')
            x, y = np.take_along_axis(points, order[None], axis=1).mean(-1)
            style = {'linewidth': 0.8, 'alpha': 0.35} if i else {'linewidth': 1.6, 'label': name}
            style['linestyle'] = '--' if name == 'DFT' else '-'     # it covers GCE 1
            ax.plot(x, y, color=color, marker='o', markersize=3, **style)
    x, y = (numbers.of('base', m, **where).mean() for m in ('accuracy', metric))
    ax.plot(x, y, 'k*', markersize=10, label='base model')
    label(ax, title, xlabel='accuracy', ylabel=TITLES[metric])


def equal_accuracy_figure(numbers, path):
    curves_figure(numbers, path, [(metric, title, {'task': task})
                                  for metric in ('ece', 'smooth_ece')
                                  for task, title in TASKS.items()])


def temperature_figure(numbers, path):
    scaled = 'after temperature scaling', {'scaling': 'temperature'}
    curves_figure(numbers, path, [('ece', 'questions', {}), ('ece', *scaled), ('nll', *scaled)])


def curves_figure(numbers, path, shown):
    """Draw rows of three panels; shown: [(metric, title, {column: value})]."""
    figure, axes = panels(len(shown) // 3, 3)
    for ax, (metric, title, where) in zip(axes.flat, shown, strict=True):
        draw_curves(numbers, ax, metric, title, **where)
    finish(figure, path)


def transfer_figure(numbers, path):
    figure, axes = panels(1, 1)
    figure.set_figwidth(8)
    ax, color = axes[0, 0], loss_colors()
    draw_groups(ax, SETTINGS.values(), {name: (color[name], [
        transfer_values(numbers, name, x) for x in SETTINGS]) for name in FIRST}, 0.07)
    ax.axhline(0, color='black', linewidth=1)
    ax.set(ylabel='ECE minus that of cross-entropy')
    ax.grid(axis='y', alpha=0.3)
    finish(figure, path)


def known_figure(numbers, path):
    figure, axes = panels(1, len(KNOWN_BASES))
    color = loss_colors()
    for ax, base in zip(axes[0], KNOWN_BASES, strict=True):
        draw_groups(ax, KNOWN_DATA, {name: (color[name], [
            known_values(numbers, base, data, name) for data in KNOWN_DATA])
            for name in KNOWN_LOSSES}, 0.08)
        ax.axhline(numbers.of(base, 'ece').mean(), color='black', linestyle='--', linewidth=1,
                   label='base model')
        ax.set(xlabel='facts of the tuning data', ylabel='ECE', title=SETTINGS[base])
        ax.grid(axis='y', alpha=0.3)
    finish(figure, path)


def recipe_figure(numbers, path):
    """Draw a row per choice, in the order of the table; a choice without runs is left out."""
    rows = [(name, changes[[0, 1, 3]]) for _, name, changes in ranked_choices(numbers)
            if np.isfinite(changes[[0, 1, 3]]).all()]
    figure, axes = panels(1, 3)
    figure.set_size_inches(10, 1 + 0.24 * len(rows))
    for i, (ax, title) in enumerate(zip(axes[0], (
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
    {'task': 'text4', 'language': 'all', 'scaling': 'none'}, {
        'equal-accuracy': ('Claim 7: metrics at equal accuracy, minus those of cross-entropy',
                           (equal_accuracy_table,), equal_accuracy_figure),
        'after-temperature': ('Claim 8: the same for questions, also after temperature scaling',
                              (temperature_table,), temperature_figure),
        'transfer': ('Claim 9: ECE of questions at equal accuracy, minus that of cross-entropy',
                     (transfer_table, *(functools.partial(transfer_table, metric=m)
                                        for m in ('smooth_ece', 'brier', 'nll'))),
                     transfer_figure),
        'known': ('Claim 10: known and unknown facts', (
            known_table, 'predictions', *(functools.partial(known_table, metric=m) for m in (
                'accuracy', 'confidence', 'smooth_ece', 'brier', 'nll'))), known_figure),
        'recipe': ('Claim 11: each choice compared with the default', (recipe_table,),
                   recipe_figure)},
    sources, lines_of,
    {(kind, loss): points(kind, loss) for kind in ('base', *TRANSFER)
     for strengths in LOSSES.values() for loss in strengths},
    {'memorization': memorization})


if __name__ == '__main__':
    with cli.one_line_errors():
        CLAIMS.main(__doc__)
