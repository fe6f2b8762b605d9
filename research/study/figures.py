"""Draw the figures of the study again, from their committed numbers or from runs.

    python research/study/figures.py        # every table and figure in research/study/results
    python research/study/figures.py --only=smoothing,tokens --runs --out_dir=out/figures

Every figure is a folder: compare.csv has the numbers, from which compare.md, compare.tex (which is
not committed) and compare.png follow; means are over seeds. --runs writes compare.csv again from
the runs in out/study. The headline has reliability diagrams as well, of the questions of all seeds
together, and the numbers behind them in bins.csv.
"""

import itertools
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

import metrics as calibration
from compare import over_seeds
from compare.over_seeds import (CLEAR, NAMES, by_seed, drop_constant_settings, first_of_rows,
                                group_lines, ordered, predictions_by_group, seed_table, values_of,
                                write_table)
from results.figures import figure_title, new_figure, printable, save_figure
from results.plots import draw_bins
from compare.runs import find_runs, read_run
from results.columns import Heading
from results.tables import csv_text
from runtime import cli
from runtime.errors import ConfigError
from runtime.ownership import read_json, write_text
from runtime.processes import parallel_map
from research.common import ROOT, command_line, names_of, read_csv
from research.study import entropy_range
from research.study.claims import mean_and_ends

RESULTS = Path(__file__).parent / 'results'
KEYS = {x.key for x in calibration.MEASURES}
TABLE = tomllib.loads((Path(__file__).parent / 'figures.toml').read_text(encoding='utf-8'))
WORDS = TABLE['words']      # {column or 'column=value': what to write}


def read_view(keys):
    """Return the lists of words of a figure in figures.toml; `where` is {column: its values}."""
    view = SimpleNamespace(**{key: text.split()
                              for key, text in (TABLE['defaults'] | keys).items()})
    rules = ' '.join(TABLE['rules'].get(rule, rule) for rule in view.where).split()
    view.where = {column: values.split('|')
                  for column, values in (rule.split('=') for rule in rules)}
    view.columns = [*view.panel, *view.by, *view.x]
    return view


FIGURES = {name: read_view(keys) for name, keys in TABLE['figures'].items()}


def draw(name, out_dir, root=None):
    """Write compare.csv, .md, .tex and .png of a figure into `out_dir`, and print the table.

    The numbers are read from the runs below `root`, or from the committed compare.csv.
    """
    view, out_dir = FIGURES[name], Path(out_dir)
    if root:
        runs = [read_run(path) for path in find_runs([Path(root) / s for s in view.sources])]
        lines = [*itertools.chain(*parallel_map(run_lines, runs, worth_it=len(runs) > 4))]
    else:
        lines = [line | {key: float(value) for key, value in line.items() if value
                         and (key in ('n', *KEYS) or key.startswith('reach_'))}
                 for line in read_csv(RESULTS / name / 'compare.csv')]
    lines, groups, reference = select(name, view, lines)
    out_dir.mkdir(parents=True, exist_ok=True)
    headings = {key: Heading(key) if key in KEYS else WORDS[key] for key in view.metrics}
    n_panel = len(view.panel)
    shown = [group for group in groups if group != base_of(group, n_panel, reference)]
    others = {}
    if reference:
        others[reference] = {group: base_of(group, n_panel, reference) for group in shown}
    table = seed_table(groups, view.columns, headings,
                       others | first_of_rows(shown, view.columns[-1]))
    write_table(out_dir, lines, table, n_panel=n_panel)
    draw_means(out_dir / 'compare.png', groups, view.columns, headings, n_panel, reference)
    if name == 'headline':
        bins = bins_of(runs) if root else read_bins(RESULTS / name / 'bins.csv')
        draw_reliability(out_dir, groups, bins, view)


def run_lines(run):
    """Return over_seeds.run_lines with the entropies that entropy_range.py measured."""
    lines, path = over_seeds.run_lines(run), run.folder / entropy_range.FILE
    if path.exists():
        with read_json(path, 'remove it') as content:
            more = {'unused_rows': str(content.get('unused_rows', 0))} | {
                f'reach_{key}': float(f'{value:.5g}') for key, value in content.items()
                if key != 'unused_rows'}
        lines = [line | more for line in lines]
    return lines


def select(name, view, lines):
    """Return (lines of the figure, {values of view.columns: {seed: line}}, name of the reference).

    The groups of a panel come after its reference, whose values are the name.
    """
    lines = [line for line in lines if all(
        str(line.get(column, '')) in values for column, values in view.where.items())]
    if not lines:
        rules = ', '.join(f'{column}={"|".join(values)}' for column, values in view.where.items())
        raise ConfigError(f'{name}: no run has {rules}')
    lines = drop_constant_settings(lines, {*view.columns, *view.where})
    shown, aside = ([line for line in lines if (line['kind'] in view.reference) == is_aside]
                    for is_aside in (False, True))
    bands = group_lines(aside, view.panel)
    groups, name = {}, 'reference' if len(view.reference) > 1 else ''.join(view.reference) or None
    for values, members in group_lines(shown, view.columns, view.where).items():
        panel = values[:len(view.panel)]
        if panel in bands:
            groups.setdefault((*panel, *[name] * (len(values) - len(panel))), by_seed(bands[panel]))
        groups[values] = by_seed(members)
    return lines, groups, name


# Means

def titled(columns, values):
    """Return 'learning rate 0.001, smoothing 0.1', in WORDS."""
    return ', '.join(WORDS.get(f'{column}={value}') or (
        value if column in CLEAR else f'{WORDS.get(column, column)} {value}')
        for column, value in zip(columns, values, strict=True))


def base_of(group, n_panel, reference):
    """Return the group of the reference in the same panel."""
    return (*group[:n_panel], *[reference] * (len(group) - n_panel))


def draw_means(path, groups, columns, headings, n_panel, reference):
    """Draw means with 95 % intervals: a row per measure, a column per panel.

    The first n_panel columns name a panel, the last one is its axis; the reference is a band.
    """
    from matplotlib import colormaps
    shown = [group for group in groups if group != base_of(group, n_panel, reference)]
    panels, curves = (list(dict.fromkeys(group[part] for group in shown))
                      for part in (slice(n_panel), slice(n_panel, -1)))
    labels = [printable(titled(columns[n_panel:-1], curve)) for curve in curves]
    xs = ordered(dict.fromkeys(group[-1] for group in shown))
    width = max(3.0 * len(panels), 4.5)
    n_columns = max(1, int(width / (0.075 * max(map(len, labels)) + 0.6)))      # of the legend
    figure = new_figure(width, 2.6 * len(headings) + 0.5 + 0.2 * (len(curves) // n_columns))
    grid = figure.subplots(len(headings), len(panels), squeeze=False, sharex=True, sharey='row')
    colors = colormaps['viridis'](np.linspace(0, 0.85, len(curves)))
    offsets = min(0.06, 0.6 / len(curves)) * (np.arange(len(curves)) - (len(curves) - 1) / 2)
    slanted = {'rotation': 15, 'horizontalalignment': 'right'} if max(map(len, xs)) > 8 else {}
    for (key, panel), ax in zip(itertools.product(headings, panels), grid.flat, strict=True):
        base = groups.get(base_of((*panel, *columns[n_panel:]), n_panel, reference), {})
        if band := values_of(base, key):
            mean, low, high = mean_and_ends([*band.values()])
            ax.axhline(mean, color='black', linestyle='--', linewidth=1, label=reference)
            ax.axhspan(low, high, color='black', alpha=0.1, linewidth=0)
        for curve, label, color, offset in zip(curves, labels, colors, offsets, strict=True):
            points = [(i, *mean_and_ends([*values.values()])) for i, x in enumerate(xs)
                      if (values := values_of(groups.get((*panel, *curve, x), {}), key))]
            if points:
                i, mean, low, high = np.array(points).T
                ax.errorbar(i + offset, mean, (mean - low, high - mean), marker='o', markersize=4,
                            linewidth=1.2, capsize=2, color=color, label=label or None)
        ax.set_xticks(range(len(xs)), [*map(printable, xs)], **slanted)
        ax.grid(axis='y', alpha=0.3)
        ax.set(xlabel=WORDS.get(columns[-1], columns[-1]), ylabel=headings[key])
        ax.label_outer()
    for ax, panel in zip(grid[0], panels, strict=True):
        ax.set_title(figure_title(titled(columns[:n_panel], panel), 40), fontsize=10)
    if entries := {label: handle for ax in grid.flat for handle, label in zip(
            *ax.get_legend_handles_labels(), strict=True)}:
        figure.legend(entries.values(), entries, loc='outside lower center', frameon=False,
                      fontsize=9, ncols=n_columns)
    save_figure(figure, path, 110)

# Reliability diagrams

def name_of(line):
    return tuple(str(line[key]) for key in NAMES)


def bins_of(runs):
    return {name_of(names): calibration.bins(p.probs, p.labels)
            for run in runs for names, _, p in predictions_by_group(run)}


def draw_reliability(out_dir, groups, bins, view):
    """Draw reliability.png, the questions of all seeds together, and write bins.csv behind it.

    bins: {name of a line: its bins as metrics.bins returns them}
    """
    diagrams, rows, n = [], [], len(view.panel)
    for group, lines in groups.items():
        lines, is_base = list(lines.values()), group[-1] in view.reference
        for name in map(name_of, lines):
            rows += [dict(zip(NAMES, name, strict=True)) | {'bin': i, 'count': int(count)} | {
                key: f'{bins[name][key][i]:.5g}' for key in ('confidence', 'accuracy')}
                for i, count in enumerate(bins[name]['count']) if count]
        title = titled(view.panel, group[:n]) + f': {lines[0]["kind"]}'
        if not is_base:
            title += f', {titled(view.columns[n:], group[n:])}'
        diagrams.append(diagram(title, lines, [bins[name_of(line)] for line in lines]))
    write_text(out_dir / 'bins.csv', csv_text(rows))
    n_panels = len({group[:n] for group in groups})
    draw_bins(out_dir / 'reliability.png', diagrams, columns=len(groups) // n_panels)


def diagram(title, lines, bins, prefix=''):
    """Return a panel of plots.draw_bins: the lines of several seeds, and the bins of each."""
    return title, {name: np.mean([line[prefix + name.lower()] for line in lines])
                   for name in ('accuracy', 'confidence', 'ECE')}, pool_bins(bins)


def pool_bins(several):
    """Return the bins of all questions behind `several` bins, as metrics.bins returns them."""
    count = sum(bins['count'] for bins in several)
    pooled = {'count': count} | {key: sum(
        np.where(bins['count'] > 0, bins['count'] * bins[key], 0) for bins in several)
        / np.maximum(count, 1) for key in ('confidence', 'accuracy')}
    ends = [calibration.wilson_interval(np.ones(n), np.arange(n) < round(n * accuracy)) if n else
            (np.nan, np.nan) for n, accuracy in zip(count, pooled['accuracy'], strict=True)]
    return pooled | dict(zip(('low', 'high'), np.array(ends).T, strict=True))


def read_bins(path):
    """{name of a line: bins} of a bins.csv"""
    bins = {}
    for row in read_csv(path):
        of_line = bins.setdefault(name_of(row), {
            'count': np.zeros(10, int), 'confidence': np.zeros(10), 'accuracy': np.zeros(10)})
        for key, values in of_line.items():
            values[int(row['bin'])] = float(row[key])
    return bins


def main():
    options = command_line(
        __doc__, only=names_of(FIGURES),
        runs={'nargs': '?', 'const': ROOT, 'help': 'a folder; default: %(const)s'},
        out_dir={'default': RESULTS, 'help': 'default: research/study/results'})
    for name in options.only:
        print(f'\n=== {name}')
        draw(name, Path(options.out_dir) / name, options.runs)


if __name__ == '__main__':
    with cli.one_line_errors():
        main()
