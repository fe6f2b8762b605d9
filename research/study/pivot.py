"""Tables and figures of chosen lines of many runs, along chosen axes: means over seeds.

A View says which lines and axes. The lines come from run folders, or from a compare.csv that an
earlier view wrote.
"""

import csv
import itertools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from results import over_seeds
from results.over_seeds import (FILES, by_seed, mean_and_ends, ordered, paired, plus_minus, titled,
                                values_of)
from results.plots import figure_title, new_figure, printable, save_figure, warn_on_failure
from results.tables import MEASURES, Heading, aligned, csv_text, latex, mark_best, markdown
from runtime.errors import ConfigError
from runtime.ownership import read_json, write_text
from runtime.processes import parallel_map

# in figures: {column: its name}, and {(column, value): words for both}
COLUMNS = {'hidden_size': 'hidden size', 'final_logit_softcapping': 'softcap',
           'unused_rows': 'unused rows', 'vocab_size': 'rows of the vocabulary',
           'lr': 'learning rate', 'model_type': 'model'}
WORDS = {('task', 'text4'): 'questions', ('task', 'text10'): 'questions, 10 options',
         ('task', 'letters4'): 'questions by letter',
         ('task', 'letters10'): 'questions by letter, 10 options', ('task', 'clm'): 'next tokens',
         ('scaling', 'none'): 'unscaled', ('scaling', 'temperature'): 'temperature scaling',
         ('lora', 'False'): 'full weights', ('lora', 'True'): 'LoRA',
         ('from_scratch', 'False'): 'tuned', ('from_scratch', 'True'): 'base',
         ('unused_rows', '0'): 'all rows used', ('unused_rows', '258048'): '4,096 rows used'}
# {column of reach.py: its title}
REACH = {'reach_lowest_bits': 'least entropy (bits)', 'reach_highest_bits': 'most entropy (bits)'}


@dataclass
class View:
    """Lines to show, as 'column=value|value', in this order, and where their values stand.

    Columns: task, language ('all': pooled), category, scaling ('none' or 'temperature'), run, kind
    ('tuned' for the run 'tuned-lr0.1'), seed, and every setting of training or of the model.
    """
    where: tuple = ()
    x: str | None = None            # column along the axis; None: the first that differs
    by: tuple | None = None         # columns with a curve for each value; None: the others in which
                                    # runs of one seed differ
    panel: tuple = ('task',)        # columns with a panel for each value
    metrics: tuple = ('ece', 'accuracy')
    reference: tuple = ()           # kinds drawn as a band, such as 'base'
    sources: tuple = ()             # folders of runs


class Axes(NamedTuple):
    """How lines are shown: a line of the table for each group of equal panel, by and x."""
    panel: tuple    # columns; a panel of the figure for each of their values
    by: tuple       # columns; a curve for each of their values
    x: str          # the column along the axis


def show(runs, tables, view, out_dir):
    """Print the table of a view; write compare.csv, .md, .tex and .png to out_dir.

    tables: paths of compare.csv files. Returns (groups, {panel: {seed: reference line}}, Axes).
    """
    all_lines = [line for table in tables for line in read_lines(table)]
    all_lines += itertools.chain(*parallel_map(run_lines, runs, worth_it=len(runs) > 4))
    lines = apply_where(all_lines, view.where)
    if out_dir.resolve() / 'compare.csv' in tables and len(lines) < len(all_lines):
        raise ConfigError(f'{out_dir / "compare.csv"} would lose the lines that `where` does not '
                          f'keep; give another --out_dir')
    given = [*view.panel, *(view.by or ()), *filter(None, [view.x])]
    named = {*given, *listed_values(view.where), 'sample_of'}
    lines = over_seeds.drop_constant_settings(lines, named)
    pooled = pool_lines(lines, named)
    aside = [line for line in pooled if line['kind'] in view.reference]
    shown = [line for line in pooled if line['kind'] not in view.reference]
    varying = over_seeds.varying_columns(shown, given)
    x = view.x or (varying.pop(0) if varying else 'kind')
    axes = Axes(view.panel, tuple(varying) if view.by is None else view.by, x)
    groups = group_lines(shown, axes, listed_values(view.where))
    # a panel of another column of training, such as lr, has no base model of its own
    reference = {panel: by_seed([line for line in aside if tuple(
        line[column] for column in axes.panel) == panel] or aside) for panel, _, _ in groups}
    name = 'reference' if len(view.reference) > 1 else ''.join(view.reference)
    headings = {key: Heading(key) if key in MEASURES else REACH.get(key, key)
                for key in view.metrics}
    print(show_groups(lines, groups, reference, name, axes, headings, out_dir))
    return groups, reference, axes


def run_lines(run):
    """Return results.over_seeds.run_lines with the entropies that reach.py found for the model."""
    lines, path = over_seeds.run_lines(run), run.folder / 'reach.json'
    if path.exists():
        with read_json(path, 'remove it') as content:
            reach = {f'reach_{key}': float(f'{value:.5g}') for key, value in content.items()
                     if key != 'unused_rows'}
            more = {'unused_rows': str(content.get('unused_rows', 0))} | reach
        lines = [line | more for line in lines]
    return lines


def is_number(column):
    return column in ('n', *MEASURES) or column.startswith('reach_')


def read_lines(path):
    """Return the lines of a compare.csv, measures as numbers."""
    with open(path, encoding='utf-8', newline='') as file:
        return [line | {key: float(line[key]) for key in filter(is_number, line) if line[key]}
                for line in csv.DictReader(file)]


def apply_where(lines, where):
    """Return the lines that match every rule 'column=value|value'."""
    for name, values in listed_values(where).items():
        lines = [line for line in lines if str(line.get(name, '')) in values]
        if not lines:
            raise ConfigError(f'where: {name} is never {" or ".join(values)}')
    return lines


def listed_values(where):
    """Return {column: its values in the order of its rule}."""
    return {name: values.split('|') for name, _, values in (rule.partition('=') for rule in where)}


def pool_lines(lines, named):
    """Return the unscaled lines of all languages and categories, except in columns `named`.

    A task without such a line is shown with those that it has.
    """
    for column, usual in (('language', 'all'), ('category', 'all'), ('scaling', 'none')):
        pooled = {line['task'] for line in lines if line[column] == usual}
        lines = [line for line in lines if column in named or line[column] == usual
                 or line['task'] not in pooled]
    return lines


# Table and figure

def group_lines(lines, axes, order):
    """Return {(panel, by, x): {seed: line}} in display order; order: {column: its values}."""
    n = len(axes.panel)
    groups = over_seeds.group_lines(lines, (*axes.panel, *axes.by, axes.x), order)
    return {(values[:n], values[n:-1], values[-1]): by_seed(members)
            for values, members in groups.items()}


def show_groups(lines, groups, reference, reference_name, axes, headings, out_dir):
    """Write the table and the figure of `groups`, and all `lines` as CSV; return what to print.

    groups: {(panel, by, x): {seed: line}}; headings: {key of a measure: its title}; reference:
    {panel: {seed: line}} of a run named `reference_name` to compare each group with, or {}.
    """
    table = seed_table(groups, reference, reference_name, axes, headings)
    shown = [line for by_seed in groups.values() for line in by_seed.values()]
    sampled = list(dict.fromkeys(line['task'] for line in shown if line.get('sample_of')))
    note = f'\nonly a sample of the questions (--limit): {", ".join(sampled)}\n' if sampled else ''
    write_text(out_dir / 'compare.csv', csv_text(lines))
    write_text(out_dir / 'compare.md', markdown(table) + note)
    write_text(out_dir / 'compare.tex', latex(
        mark_best(table, [tuple(row[:len(axes.panel)]) for row in table[1:]]), note.strip()))
    with warn_on_failure(out_dir / 'compare.png') as drawn:
        draw_series(out_dir / 'compare.png', groups, reference, reference_name, axes, headings)
    return (f'{len(lines)} lines of {len({line["run"] for line in lines})} runs and '
            f'{len({line["seed"] for line in lines})} seeds, by {", ".join((*axes.by, axes.x))}\n\n'
            f'{aligned(table)}\n{note}\nwrote {", ".join(FILES if drawn else FILES[:-1])} to '
            f'{out_dir}')


def seed_table(groups, reference, reference_name, axes, headings):
    """Return cells: mean ± half-width of the 95 % interval, also of paired differences, with p.

    The differences are to the reference of the panel, and to the first x of the same curve.
    """
    first_x = {}
    for panel, by, x in groups:
        first_x.setdefault((panel, by), x)
    xs = {*first_x.values()}
    first = f'the first {axes.x}' if len(xs) > 1 else titled([axes.x], xs)
    others = [*filter(None, [reference_name]), first]
    table = [[*axes.panel, *axes.by, axes.x, 'seeds']]
    for title in headings.values():
        term = f'({title})' if ' - ' in title else title
        table[0] += [title, *(f'{term} minus that of {other}' for other in others)]

    def add_row(panel, by, x, lines, *compared):
        cells = [*panel, *by, x, str(len(lines))]
        for key in headings:
            values = values_of(lines, key)
            cells.append(plus_minus([*values.values()], '.3f'))
            cells += ['' if other is lines else paired(values, values_of(other or {}, key))
                      for other in compared[-len(others):]]
        table.append(cells)

    for panel, members in itertools.groupby(groups, key=lambda group: group[0]):
        if base := reference.get(panel):
            add_row(panel, (reference_name,) * len(axes.by), reference_name, base, base, base)
        for _, by, x in members:
            add_row(panel, by, x, groups[panel, by, x], base,
                    groups[panel, by, first_x[panel, by]])
    return table


def caption(columns, values):
    """Return `over_seeds.titled` in the words of figures: 'questions, softcap 30.0, unscaled'."""
    return ', '.join(WORDS.get((column, value)) or titled([COLUMNS.get(column, column)], [value])
                     for column, value in zip(columns, values, strict=True))


def draw_series(path, groups, reference, reference_name, axes, headings):
    """Draw means over seeds with 95 % intervals: one row per measure, one column per panel."""
    from matplotlib import colormaps
    panels, curves = (list(dict.fromkeys(group[i] for group in groups)) for i in (0, 1))
    labels = [printable(caption(axes.by, by)) for by in curves]
    xs = ordered(dict.fromkeys(x for _, _, x in groups))
    width = max(3.0 * len(panels), 4.5)
    n_columns = max(1, int(width / (0.075 * max(map(len, labels)) + 0.6)))      # of the legend
    figure = new_figure(width, 2.6 * len(headings) + 0.5 + 0.2 * (len(curves) // n_columns))
    grid = figure.subplots(len(headings), len(panels), squeeze=False, sharex=True, sharey='row')
    colors = colormaps['viridis'](np.linspace(0, 0.85, len(curves)))
    offsets = min(0.06, 0.6 / len(curves)) * (np.arange(len(curves)) - (len(curves) - 1) / 2)
    slanted = {'rotation': 15, 'horizontalalignment': 'right'} if max(map(len, xs)) > 8 else {}
    for (key, panel), ax in zip(itertools.product(headings, panels), grid.flat, strict=True):
        if band := values_of(reference.get(panel, {}), key):
            mean, low, high = mean_and_ends([*band.values()])
            ax.axhline(mean, color='black', linestyle='--', linewidth=1, label=reference_name)
            ax.axhspan(low, high, color='black', alpha=0.1, linewidth=0)
        for by, label, color, offset in zip(curves, labels, colors, offsets, strict=True):
            points = [(i, *mean_and_ends([*values.values()])) for i, x in enumerate(xs)
                      if (values := values_of(groups.get((panel, by, x), {}), key))]
            if points:
                i, mean, low, high = np.array(points).T
                ax.errorbar(i + offset, mean, (mean - low, high - mean), marker='o', markersize=4,
                            linewidth=1.2, capsize=2, color=color, label=label or None)
        ax.set_xticks(range(len(xs)), [*map(printable, xs)], **slanted)
        ax.grid(axis='y', alpha=0.3)
        ax.set(xlabel=COLUMNS.get(axes.x, axes.x), ylabel=headings[key])
        ax.label_outer()
    for ax, panel in zip(grid[0], panels, strict=True):
        sampled = any(line.get('sample_of') for group, lines in groups.items()
                      for line in lines.values() if group[0] == panel)
        ax.set_title(figure_title(caption(axes.panel, panel) + ' (sample)' * sampled, 40),
                     fontsize=10)
    if entries := {label: handle for ax in grid.flat for handle, label in zip(
            *ax.get_legend_handles_labels(), strict=True)}:
        figure.legend(entries.values(), entries, loc='outside lower center', frameon=False,
                      fontsize=9, ncols=n_columns)
    save_figure(figure, path, 110)
