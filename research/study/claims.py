"""What the tables, tests and figures of the claims share; a claim is a section of PLAN.md.

A cell is a mean over seeds, ± half of the 95 % interval (Student's t). p is of a two-sided t test
over paired seeds, after Holm's correction for all tests of a table. One seed has neither.
tables.toml has the pages and the tables of formulas.
"""

import itertools
import json
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from results.plots import save_figure
from results.columns import title_of
from results.tables import csv_text, markdown
from runtime.errors import ConfigError
from runtime.ownership import write_text
from runtime.processes import parallel_map
from compare.significance import holm, mean_interval, student_t
from research.common import command_line, names_of, read_csv

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
        """Return float [seeds] of a formula as tables.toml explains it; None without such a curve.
        """
        if formula.startswith('='):
            return self.functions[formula[1:]](self)
        if several := re.search(r'(?<==)\S+\|\S+', formula):
            values = [self.value(formula.replace(several[0], each))
                      for each in several[0].split('|')]
            return None if values[0] is None else np.mean(values, axis=0)
        formula, _, x = formula.partition(' at equal ')
        first, *others = re.split(r' ([+-]) ', formula)
        if x:
            curves = [self._term(term, self.curve, x=x) for term in (first, others[1])]
            return None if curves[0] is None else at_equal(*curves)
        value = self._term(first, self.of)
        for sign, term in zip(others[::2], others[1::2], strict=True):
            value = value + (1 if sign == '+' else -1) * self._term(term, self.of)
        return value

    def _term(self, text, read, **more):
        """Return a number, or read(name, metric) of 'name metric', which may have column=value."""
        if re.fullmatch(r'[\d.]+', text):
            return float(text)
        words = text.split()
        name, metric = (word for word in words if '=' not in word)
        where = dict(word.replace('+', ' ').split('=') for word in words if '=' in word)
        return read(name, metric, **more, **where)

    def curve(self, name, metric, x='accuracy', **where):
        """Return (x, metric) of the points of a curve, float [2, points, seeds]; None without one.

        The first point is the model that was trained further, whose KL to itself is 0.
        """
        if name not in self.curves:
            return None
        points = np.array([[self.of(run, key, **where | more) for run, more in self.curves[name]]
                           for key in (x, metric)])
        points[[key == 'kl' for key in (x, metric)], 0] = 0
        return points


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


def specification(numbers, name):
    """Return {key: texts} of a table in tables.toml, for 'known: nll = NLL' of another metric.

    Its rows and columns are [(title, formula)]; a statement is a row, with one column.
    """
    name, _, metric = name.partition(': ')
    metric, _, title = metric.partition(' = ')
    spec = {key: numbers.functions[value[1:]](numbers) if value[0] == '=' else value
            for key, value in TABLES[name].items()}
    text = json.dumps(spec).replace('{metric}', metric or 'ece')
    spec = json.loads(text.replace('{title}', title or title_of(metric or 'ece')))
    if metric:
        spec.pop('tested', None)
    rows = spec.get('tests') or spec.get('differences') or spec['rows']
    return spec | {'rows': pairs(rows), 'columns': pairs(spec.get('columns', ['mean = {}']))}


def pairs(lines):
    """Return [(title, formula)] of lines 'title = formula', or of formulas without a title."""
    return [tuple(line.split(' = ', 1)) if ' = ' in line else (line, line) for line in lines]


def values_of(numbers, spec):
    """Return {(title of the row, of the column): float [seeds], or None} of a `specification`."""
    return {(row, column): numbers.value(formula.rstrip('?').replace('{}', run) if '{}' in formula
                                         else f'{run} {formula.rstrip("?")}')
            for row, run in spec['rows'] for column, formula in spec['columns']}


def table(numbers, name):
    """Return a table of tables.toml, or of a function of the script: '=recipe'."""
    if name.startswith('='):
        return numbers.functions[name[1:]](numbers)
    spec = specification(numbers, name)
    values, columns = values_of(numbers, spec), spec['columns']
    statements = 'tests' in spec or 'differences' in spec
    numbered = spec.get('tested', '0' if 'tests' in spec else '')
    tested = [columns[int(i)][0] for i in numbered.split()]
    tests = [at for at in values if at[1] in tested and values[at] is not None
             and at[0] not in spec.get('untested', ())]
    p = {}
    if len(numbers.seeds) > 1:
        p = dict(zip(tests, holm([p_of(values[at]) for at in tests]), strict=True))
    head = spec.get('head', 'difference / mean').split(' / ')
    if not statements:
        head += [TABLES['titles'].get(title.rstrip('?'), title.rstrip('?')) for title, _ in columns]
    lines = [head]
    for row, _ in spec['rows']:
        lines.append(row.split(' / '))
        for column, formula in columns:
            value, text = values[row, column], '-'
            if value is not None and formula.endswith('?') and np.isnan(value).all():
                text = ''
            elif value is not None:
                text = cell(value, p.get((row, column)))
            signed = statements or ' - ' in formula
            lines[-1].append(text if signed else text.lstrip('+'))
    return lines


# Figures

def label(ax, title, axis='both', **names):
    """Write the title and the names of the axes, and draw a grid."""
    ax.set(**names)
    ax.set_title(title, fontsize=10)
    ax.grid(axis=axis, alpha=0.3)


def finish(figure, path):
    """Write the figure with one legend of all its lines below it."""
    figure.set_figheight(figure.get_figheight() + 0.8)
    entries = {label: handle for ax in figure.axes
               for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend(entries.values(), entries, loc='outside lower center', frameon=False, fontsize=8,
                  ncols=max(1, int(figure.get_figwidth() / 1.9)))
    save_figure(figure, path, 110)


def mean_and_ends(values):
    """Return (mean, low, high) to draw; with one or two seeds all three are the mean."""
    # the interval of two seeds is 13 standard errors to each side and would dwarf the others
    return mean_interval(values) if len(values) > 2 else [sum(values) / len(values)] * 3


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
class Claims:
    """The claims of a script, and where their numbers come from."""
    folder: Path            # of seed-*.csv and of the pages
    usual: dict             # as in Numbers; so are curves and functions
    pages: dict             # {page in tables.toml: function (numbers, path) that draws its figure}
    folders: Callable | None = None     # function (root): the folders of the runs, seed after seed
    lines_of: Callable | None = None    # function (folder) that returns the lines of a run
    curves: dict = field(default_factory=dict)
    functions: dict = field(default_factory=dict)

    def numbers(self, folder=None):
        folder = folder or self.folder
        lines = [line for path in sorted(folder.glob('seed-*.csv')) for line in read_csv(path)]
        if not lines:
            raise ConfigError(f'{folder} has no seed-*.csv'
                              + '; --runs=out/study writes them' * bool(self.folders))
        return Numbers(lines, self.usual, self.curves, self.functions)

    def page(self, name, numbers):
        page = TABLES['pages'][name]
        return f'### {page["title"]}; {len(numbers.seeds)} seeds\n\n' + '\n'.join(
            markdown(table(numbers, each)) for each in page['tables'])

    def write_numbers(self, root, folder):
        """Write the lines of the runs that are finished to seed-<seed>.csv files."""
        finished = [run for run in self.folders(root) if (run / 'results.json').exists()]
        if not finished:
            raise ConfigError(f'{root}: no run of these claims is finished')
        lines = itertools.chain(*parallel_map(self.lines_of, finished, worth_it=len(finished) > 4))
        for seed, group in itertools.groupby(lines, key=lambda line: line['seed']):
            write_text(folder / f'seed-{seed}.csv', csv_text([*group]))

    def main(self, doc, arguments=None):
        """Write the numbers, tables and figures that the command line asks for."""
        options = command_line(
            doc, arguments, only=names_of(self.pages), folder={
                'type': Path, 'default': self.folder, 'help': 'of seed-*.csv, tables and figures'},
            **{'runs': {'help': 'folder of the study; writes the numbers of its seeds first'}
               } if self.folders else {})
        options.folder.mkdir(parents=True, exist_ok=True)
        if self.folders and options.runs:
            self.write_numbers(options.runs, options.folder)
        numbers = self.numbers(options.folder)
        for name in options.only:
            text = self.page(name, numbers)
            write_text(options.folder / f'{name}.md', text)
            self.pages[name](numbers, options.folder / f'{name}.png')
            print(text)
