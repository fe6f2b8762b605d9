"""What the tables, tests and figures of the claims share; a claim is a section of PLAN.md.

A cell is a mean over seeds, ± half of the 95 % interval (Student's t). p is of a two-sided t test
over paired seeds, after Holm's correction for all tests of a table. One seed has neither.
tables.toml has tables of formulas.
"""

import argparse
import csv
import itertools
import os
import re
import tomllib
from collections.abc import Callable
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

TABLES = tomllib.loads((Path(__file__).parent / 'tables.toml').read_text(encoding='utf-8'))
LEAST_RANGE = 0.005     # of accuracies that two curves share; below, nothing is compared


# Numbers

class Numbers:
    """The lines of CSV files; `of` and `value` return one number per seed.

    usual: {column: value} that choose a line beside run and seed, unless others are asked for.
    curves: {name: [(run, {column: value}) of each point]}; functions: {name: function of Numbers}.
    """

    def __init__(self, lines, usual, curves=None, functions=None):
        self.usual, self.curves, self.functions = usual, curves or {}, functions or {}
        self.lines = {(line['seed'], line['run'], *(line[key] for key in usual)): line
                      for line in lines}
        self.seeds = list(dict.fromkeys(line['seed'] for line in lines))

    def of(self, run, metric, **where):
        """Return float [seeds], nan if the run is missing."""
        names = run, *(self.usual | where).values()
        lines = (self.lines.get((seed, *names), {}) for seed in self.seeds)
        return np.array([float(line.get(metric) or 'nan') for line in lines])

    def value(self, formula):
        """Return float [seeds] of a formula as tables.toml explains it."""
        if formula.startswith('='):
            return self.functions[formula[1:]](self)
        formula, _, x = formula.partition(' at equal ')
        first, *others = re.split(r' ([+-]) ', formula)
        if x:
            return at_equal(*(self.curve(*term.split(), x) for term in (first, others[1])))
        value = self._term(first)
        for sign, term in zip(others[::2], others[1::2], strict=True):
            value = value + self._term(term) if sign == '+' else value - self._term(term)
        return value

    def _term(self, text):
        """Return a number, or float [seeds] of 'run metric', which may also have column=value."""
        if re.fullmatch(r'[\d.]+', text):
            return float(text)
        words = text.split()
        run, metric = (word for word in words if '=' not in word)
        return self.of(run, metric, **dict(word.split('=') for word in words if '=' in word))

    def curve(self, name, metric, x='accuracy', **where):
        """Return (x, metric) of the points of a curve, float [2, points, seeds].

        The first point is the model that was trained further, whose KL to itself is 0.
        """
        points = np.array([[self.of(run, key, **where | more) for run, more in self.curves[name]]
                           for key in (x, metric)])
        points[[key == 'kl' for key in (x, metric)], 0] = 0
        return points


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


def difference_table(named, tested=True, head=('difference', 'mean')):
    """Return a table of {statement: values [seeds]}."""
    rows = [([name], [values]) for name, values in named.items()]
    return tested_table(head, rows, [(i, 0) for i in range(len(rows) * tested)])


def table(numbers, name):
    """Return a table of tables.toml."""
    spec = TABLES[name]
    head = spec.get('head', 'difference / mean').split(' / ')
    if statements := spec.get('tests') or spec.get('differences'):
        named = dict(line.split(' = ', 1) for line in statements)
        return difference_table({title: numbers.value(formula) for title, formula in named.items()},
                                'tests' in spec, head)
    columns = [column.split(' = ') for column in spec['columns']]
    lines = [[*head, *(TABLES['titles'].get(title := first.rstrip('?'), title)
                       for first, *_ in columns)]]
    return lines + [[*title.split(' / '), *(formula_cell(numbers, column[-1], run)
                                            for column in columns)]
                    for title, run in rows_of(name).items()]


def rows_of(name):
    """Return {title: run} of the rows of a table in tables.toml."""
    rows = (row.split(' = ') for row in TABLES[name]['rows'])
    return {title: run[0] if run else title for title, *run in rows}


def formula_cell(numbers, formula, run):
    """Return the cell of a column's formula for a run; a difference has a sign."""
    metric = formula.rstrip('?')
    values = numbers.value(metric.format(run) if '{}' in metric else f'{run} {metric}')
    if metric != formula and np.isnan(values).all():
        return ''
    return cell(values) if ' - ' in formula else plain(values)


# Figures

def panels(rows, columns):
    figure = new_figure(3.4 * columns, 2.9 * rows + 0.8)
    return figure, figure.subplots(rows, columns, squeeze=False)


def label(ax, title, axis='both', **names):
    """Write the title and the names of the axes, and draw a grid."""
    ax.set(**names)
    ax.set_title(title, fontsize=10)
    ax.grid(axis=axis, alpha=0.3)


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

@dataclass
class Source:
    """An evaluated folder, the model to which its KL is measured, and names of its lines."""
    folder: Path
    reference: Path | None = None
    names: dict = field(default_factory=dict)       # columns that replace those of the results


@dataclass
class Claims:
    """The claims of a script, and where their numbers come from."""
    folder: Path            # of seed-*.csv and of the pages
    usual: dict             # as in Numbers; so are curves and functions
    pages: dict             # {file: (title, tables, function (numbers, path) that draws)}; a table
    #                         is a name in tables.toml or a function of Numbers
    sources: Callable       # function (root) that yields the Source of each run, seed after seed
    lines_of: Callable      # function (source) that returns its lines
    curves: dict = field(default_factory=dict)
    functions: dict = field(default_factory=dict)

    def numbers(self, folder=None):
        folder = folder or self.folder
        lines = [line for path in sorted(folder.glob('seed-*.csv')) for line in read_csv(path)]
        if not lines:
            raise ConfigError(f'{folder} has no seed-*.csv; --runs=out/study writes them')
        return Numbers(lines, self.usual, self.curves, self.functions)

    def page(self, name, numbers):
        title, tables, _ = self.pages[name]
        return f'### {title}; {len(numbers.seeds)} seeds\n\n' + '\n'.join(
            markdown(table(numbers, each) if isinstance(each, str) else each(numbers))
            for each in tables)

    def write_numbers(self, root, folder):
        """Write the lines of the runs that are finished to seed-<seed>.csv files."""
        finished = [source for source in self.sources(root)
                    if (source.folder / 'results.json').exists()]
        if not finished:
            raise ConfigError(f'{root}: no run of these claims is finished')
        lines = itertools.chain(*parallel_map(self.lines_of, finished, worth_it=len(finished) > 4))
        for seed, group in itertools.groupby(lines, key=lambda line: line['seed']):
            write_text(folder / f'seed-{seed}.csv', csv_text([*group]))

    def main(self, usage, arguments=None):
        """Write the numbers, tables and figures that the command line asks for."""
        parser = argparse.ArgumentParser(description=usage.split('\n')[0])
        parser.add_argument('--only', default=','.join(self.pages), help='default: %(default)s')
        parser.add_argument('--runs', type=os.path.expanduser,
                            help='folder of the study; writes the numbers of its seeds first')
        parser.add_argument('--folder', type=os.path.expanduser, default=self.folder,
                            help='of seed-*.csv and of what is written')
        options = parser.parse_args(arguments)
        names, folder = options.only.split(','), Path(options.folder)
        if unknown := [name for name in names if name not in self.pages]:
            parser.error(f'--only: there is no {unknown[0]}; choose from {", ".join(self.pages)}')
        folder.mkdir(parents=True, exist_ok=True)
        if options.runs:
            self.write_numbers(options.runs, folder)
        numbers = self.numbers(folder)
        for name in names:
            text = self.page(name, numbers)
            write_text(folder / f'{name}.md', text)
            self.pages[name][2](numbers, folder / f'{name}.png')
            print(text)
