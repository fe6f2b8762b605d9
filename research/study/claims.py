"""What the tables, tests and figures of the claims share; a claim is a section of PLAN.md.

A cell is a mean over seeds, ± half of the 95 % interval (Student's t). p is of a two-sided t test
over paired seeds, after Holm's correction for all tests of a table. One seed has neither.
"""

import argparse
import csv
import itertools
import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from results.over_seeds import mean_and_ends
from results.plots import new_figure, save_figure
from results.tables import csv_text, markdown
from runtime.errors import ConfigError
from runtime.ownership import write_text
from runtime.processes import parallel_map
from stats import holm, mean_interval, student_t

LEAST_RANGE = 0.005     # of accuracies that two curves share; below, nothing is compared


# Numbers

class Numbers:
    """The lines of seed-*.csv in a folder; `of` returns one number per seed.

    usual: {column: value} that choose a line beside run and seed, unless `of` is given another.
    """

    def __init__(self, folder, usual):
        self.lines, self.seeds, self.usual = {}, [], usual
        for path in sorted(Path(folder).glob('seed-*.csv')):
            for line in read_csv(path):
                self.lines[line['seed'], line['run'], *(line[key] for key in usual)] = line
            self.seeds.append(line['seed'])
        if not self.seeds:
            raise ConfigError(f'{folder} has no seed-*.csv; --runs=out/study writes them')

    def of(self, run, metric, **where):
        """Return float [seeds], nan if the run is missing."""
        names = run, *(self.usual | where).values()
        lines = (self.lines.get((seed, *names), {}) for seed in self.seeds)
        return np.array([float(line.get(metric) or 'nan') for line in lines])


def read_csv(path):
    with open(path, encoding='utf-8', newline='') as file:
        return [*csv.DictReader(file)]


def at_equal(curve, reference):
    """Return float [seeds]: the mean difference of two curves over the x that both reach, or nan.

    Both are (x, y), float [2, points, seeds], linear between their points.
    """
    differences = []
    for both in zip(*(np.moveaxis(each, -1, 0) for each in (curve, reference)), strict=True):
        ours, theirs = (each[:, np.argsort(each[0], kind='stable')] for each in both)
        low = np.maximum(ours[0, 0], theirs[0, 0])
        width = np.minimum(ours[0, -1], theirs[0, -1]) - low
        grid = low + width * (np.arange(1000) + 0.5) / 1000
        differences.append((np.interp(grid, *ours) - np.interp(grid, *theirs)).mean()
                           if width >= LEAST_RANGE else np.nan)
    return np.array(differences)


def p_of(values):
    """Return p of a t test against 0; 1 if a seed has no value: a missing run confirms nothing."""
    return student_t(values)[2] if np.isfinite(values).all() else 1.0


# Tables: rows of cells, header first

def cell(values, p=None, digits=3):
    """Return '+0.012 ± 0.003, p 0.01'; p is given only for what is tested.

    A seed has no value if a run is missing, or if two curves share too little accuracy.
    """
    if not np.isfinite(values).all():
        return f'none for {np.isnan(values).sum()} of {len(values)} seeds'
    if len(values) < 2:
        return f'{values[0]:+.{digits}f}'
    mean, _, high = mean_interval(values)
    return (f'{mean:+.{digits}f} ± {high - mean:.{digits}f}'
            + (f', p {p:.1g}' if p is not None else ''))


def plain(values):
    return cell(values).lstrip('+')


def tested_table(head, rows, tested):
    """Return a table; rows: [(cells, [values or None: a dash])].

    tested: the indices (row, column) of tests.
    """
    p = dict.fromkeys(tested)
    if len(rows[0][1][0]) > 1:
        p = dict(zip(tested, holm([p_of(rows[i][1][j]) for i, j in tested]), strict=True))
    return [head, *([*cells, *('-' if v is None else cell(v, p.get((i, j)))
                               for j, v in enumerate(values))]
                    for i, (cells, values) in enumerate(rows))]


def difference_table(named, first='difference', second='mean'):
    """Return a table of {statement: values [seeds]}, all of which are tested."""
    rows = [([name], [values]) for name, values in named.items()]
    return tested_table([first, second], rows, [(i, 0) for i in range(len(rows))])


def metrics_table(numbers, head, rows, metrics, optional=()):
    """Return a table of numbers; rows: [(cells, run, {column: value})].

    A metric such as 'scaled ece' is that after a temperature. The cell of an `optional` metric that
    a run does not have is empty.
    """
    table = [head]
    for cells, run, where in rows:
        values = [numbers.of(run, key.split()[-1], **where | (
            {'scaling': 'temperature'} if 'scaled' in key else {})) for key in metrics]
        table.append([*cells, *('' if key in optional and np.isnan(v).all() else plain(v)
                                for key, v in zip(metrics, values, strict=True))])
    return table


# Figures

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


def draw_mean(ax, x, values, **style):
    """Draw a mean over seeds with its interval at x, if no seed lacks a value."""
    if np.isfinite(values).all():
        mean, low, high = mean_and_ends(values)
        ax.errorbar([x], [mean], [[mean - low], [high - mean]], marker='o', markersize=4,
                    capsize=2, linewidth=1.2, **style)


def draw_groups(ax, names, series, width):
    """Draw means beside each other over every name; series: {label: (color, [values or None])}."""
    for i, (label, (color, several)) in enumerate(series.items()):
        for x, values in enumerate(several):
            if values is not None:
                draw_mean(ax, x + width * (i - (len(series) - 1) / 2), values, color=color,
                          label=label)
    ax.set_xticks(range(len(names)), names)


# From runs to pages

def page(numbers, title, tables):
    return f'### {title}; {len(numbers.seeds)} seeds\n\n' + '\n'.join(
        markdown(table(numbers)) for table in tables)


@dataclass
class Source:
    """An evaluated folder, the model to which its KL is measured, and names of its lines."""
    folder: Path
    reference: Path | None = None
    names: dict = field(default_factory=dict)       # columns that replace those of the results


def write_numbers(root, sources, lines_of, folder):
    """Write the lines of the runs that are finished to seed-<seed>.csv files."""
    finished = [source for source in sources(root) if (source.folder / 'results.json').exists()]
    if not finished:
        raise ConfigError(f'{root}: no run of these claims is finished')
    lines = itertools.chain(*parallel_map(lines_of, finished, worth_it=len(finished) > 4))
    for seed, group in itertools.groupby(lines, key=lambda line: line['seed']):
        write_text(folder / f'seed-{seed}.csv', csv_text([*group]))


def main(arguments, usage, claims, results, usual, sources, lines_of):
    """Write the numbers, tables and figures of `claims`.

    claims: {file: (title, functions of Numbers that return a table, function (numbers, path) that
    draws)}; results: their folder; usual: see Numbers; sources(root) yields the Source of each run,
    seed after seed, and lines_of(source) returns its lines.
    """
    parser = argparse.ArgumentParser(description=usage.split('\n')[0])
    parser.add_argument('--only', default=','.join(claims), help='default: %(default)s')
    parser.add_argument('--runs', type=os.path.expanduser,
                        help='folder of the study; writes the numbers of its seeds first')
    parser.add_argument('--folder', type=os.path.expanduser, default=results,
                        help='of seed-*.csv and of what is written')
    options = parser.parse_args(arguments)
    folder = Path(options.folder)
    folder.mkdir(parents=True, exist_ok=True)
    if options.runs:
        write_numbers(options.runs, sources, lines_of, folder)
    numbers = Numbers(folder, usual)
    for name in options.only.split(','):
        if name not in claims:
            parser.error(f'--only: there is no {name}; choose from {", ".join(claims)}')
        title, tables, draw = claims[name]
        text = page(numbers, title, tables)
        write_text(folder / f'{name}.md', text)
        draw(numbers, folder / f'{name}.png')
        print(text)
