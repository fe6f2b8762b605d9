"""Compare runs of several seeds: means with Student's interval, and paired differences.

compare.py calls `compare_seeds`. To choose other runs or columns, write a few lines of Python with
`run_lines`, which returns the numbers of a run, as in docs/evaluation.md.
"""

import itertools
import math

import numpy as np

from compare import scaling
import stats
from results.plots import figure_title, new_figure, printable, save_figure, warn_on_failure
from results.report import predictions
from compare.runs import read_run_samples, sample_of
from results.tables import Heading, aligned, csv_text, latex, mark_best, markdown
from runtime.errors import ConfigError
from runtime.ownership import claim, write_text
from runtime.processes import parallel_map

FILES = tuple(f'compare.{ending}' for ending in ('csv', 'md', 'tex', 'png'))
# the columns of compare.csv that identify a line; the others are settings or, as floats, measures
NAMES = ('run', 'kind', 'seed', 'task', 'language', 'category', 'scaling')
# columns whose values are clear without the column's name
SELF_EVIDENT = ('task', 'category', 'kind', 'run')


def compare_seeds(runs, keys, out_dir):
    """Print a table of the measures `keys`, by the settings that differ; write compare.*."""
    claim(out_dir, *FILES)
    lines = [*itertools.chain(*parallel_map(run_lines, runs, worth_it=len(runs) > 4))]
    lines = drop_constant_settings(lines)
    shown = [line for line in lines if line['scaling'] == 'none'
             and line['language'] == line['category'] == 'all']
    x, *by = varying_columns(shown, ['task']) or ['kind']
    columns = ['task', *by, x]
    groups = {group: by_seed(members) for group, members in group_lines(shown, columns).items()}
    sampled = list(dict.fromkeys(line['task'] for line in shown if line.get('sample_of')))
    write_comparison(out_dir, lines, groups, columns, {key: Heading(key) for key in keys}, sampled)


def write_comparison(out_dir, lines, groups, columns, headings, sampled=(), n_panel=1,
                     reference='', words=None):
    """Print a table of groups, {values of the columns: {seed: line}}; write it, a CSV and a figure.

    The first n_panel columns name a panel of the figure, the last one is its axis. A group with the
    value `reference` in the other columns is compared with the panel's groups. headings: {measure:
    title}; sampled: tasks with a sample of their questions; words: those of `titled`
    """
    table = seed_table(groups, columns, headings, n_panel, reference)
    note = f'\nonly a sample of the questions (--limit): {", ".join(sampled)}\n' if sampled else ''
    write_text(out_dir / 'compare.csv', csv_text(lines))
    write_text(out_dir / 'compare.md', markdown(table) + note)
    write_text(out_dir / 'compare.tex', latex(
        mark_best(table, [tuple(row[:n_panel]) for row in table[1:]]), note.strip()))
    with warn_on_failure(out_dir / 'compare.png') as drawn:
        draw_means(out_dir / 'compare.png', groups, columns, headings, sampled, n_panel, reference,
                   words or {})
    print(f'{len(lines)} lines of {len({line["run"] for line in lines})} runs and '
          f'{len({line["seed"] for line in lines})} seeds, by {", ".join(columns[n_panel:])}\n\n'
          f'{aligned(table)}\n{note}\nwrote {", ".join(FILES if drawn else FILES[:-1])} to '
          f'{out_dir}')


# The lines of a run, and groups of lines

def name_of(line):
    return tuple(str(line[key]) for key in NAMES)


def run_lines(run):
    """Return the lines of a run: names, settings, and measures to five digits."""
    lines = []
    for names, fitted, p in predictions_by_group(run):
        report, result = p.report(), run.results[names['task']]
        lines.append(names | run.settings | {'distribution': result['distribution']}
                     | sample_of(result) | fitted
                     | {key: float(f'{report[key]:.5g}') for key in report})
    return sorted(lines, key=name_of)


def predictions_by_group(run):
    """Yield (names of a line, {} or {'temperature': of the validation split}, Predictions)."""
    test, held_out = read_run_samples(run)
    for task, samples in test.items():
        norm = run.results[task]['norm']
        plain = predictions(samples, norm)
        scaled = {'none': ({}, plain)}
        if task in held_out and plain.scores is not None:
            fit = predictions(held_out[task], norm)
            temperature = scaling.fit_temperature(fit.scores, fit.labels)
            scaled['temperature'] = {'temperature': f'{temperature:.5g}'}, plain.scaled(temperature)
        languages, categories = (np.array([str(s.get(key) or 'all') for s in samples])
                                 for key in ('language', 'category'))
        for language, category in itertools.product({*languages, 'all'}, {*categories, 'all'}):
            rows = ((languages == language) | (language == 'all')) & (
                (categories == category) | (category == 'all'))
            for name, (fitted, p) in scaled.items() if rows.any() else ():
                yield {'run': run.folder.name, 'kind': run.folder.name.split('-')[0],
                       'seed': str(run.seed), 'task': task, 'language': str(language),
                       'category': str(category), 'scaling': name}, fitted, p.at(rows)


def setting_columns(lines):
    """Return the columns that are settings: neither names nor measures."""
    columns = dict.fromkeys(itertools.chain(*lines))
    measured = {column for line in lines for column in line if isinstance(line[column], float)}
    return [c for c in columns if c not in measured and c not in (*NAMES, 'temperature')]


def drop_constant_settings(lines, named=('sample_of',)):
    """Return the lines without settings that are equal in all runs of a kind, except `named`."""
    def varies(column):
        values = {(line['kind'], line['task'], line.get(column, '')) for line in lines}
        return len(values) > len({value[:2] for value in values})
    settings = setting_columns(lines)
    columns = [c for c in dict.fromkeys(itertools.chain(*lines))
               if c not in settings or c in named or varies(c)]
    return [{column: line.get(column, '') for column in columns} for line in lines]


def varying_columns(lines, given):
    """Return the columns, settings first, in which runs of one seed differ, besides those given."""
    def n_groups(columns):
        return len({tuple(line[column] for column in ('seed', *given, *columns))
                    for line in lines})
    chosen = [*setting_columns(lines), 'task', 'language', 'category', 'scaling', 'kind', 'run']
    for column in chosen[::-1]:
        others = [other for other in chosen if other != column]
        if n_groups(others) == n_groups(chosen):
            chosen = others
    return chosen


def group_lines(lines, columns, order=None):
    """Return {values of the columns: lines}, in the order of {column: its values}, or `ordered`."""
    ranks = {column: (order or {}).get(column) or ordered(dict.fromkeys(
        line[column] for line in lines)) for column in columns}
    groups = {}
    for line in sorted(lines, key=lambda line: [ranks[c].index(line[c]) for c in columns]):
        groups.setdefault(tuple(line[column] for column in columns), []).append(line)
    return groups


def ordered(values):
    """Return values in ascending order if they are numbers, else in the order given."""
    try:
        return sorted(values, key=lambda v: -math.inf if v in ('None', '') else float(v))
    except ValueError:
        return [*values]


def by_seed(lines):
    """Return {seed: line}; raise ConfigError if two lines have the same seed."""
    seeds = {}
    for line in lines:
        other = seeds.setdefault(line['seed'], line)
        if other is not line:
            differ = [k for k in line if not isinstance(line[k], float) and line[k] != other[k]]
            why = (f'they differ in {", ".join(differ)}' if differ else
                   'their settings are the same, so compare one of them')
            raise ConfigError(f'{other["run"]} and {line["run"]} of seed {line["seed"]} belong to '
                              f'one group; {why}')
    return seeds


# Table and figure

def values_of(lines, key):
    """Return {seed: value} of a measure, for seeds where it is defined."""
    return {seed: line[key] for seed, line in lines.items()
            if isinstance(line.get(key), float) and math.isfinite(line[key])}


def seed_table(groups, columns, headings, n_panel=1, reference=''):
    """Return cells: mean ± half-width of the 95 % interval, and paired differences, with p."""
    first_x = {}
    for group in groups:
        if not reference or {*group[n_panel:]} != {reference}:
            first_x.setdefault(group[:-1], group[-1])
    xs, x = {*first_x.values()}, columns[-1]
    others = [reference] * bool(reference)
    others.append(f'the first {x}' if len(xs) > 1 else titled([x], xs))
    table = [[*columns, 'seeds']]
    for heading in headings.values():
        term = f'({heading})' if ' - ' in heading else heading
        table[0] += [heading, *(f'{term} minus that of {other}' for other in others)]
    for group, lines in groups.items():
        base = (*group[:n_panel], *[reference] * (len(group) - n_panel))
        first = base if group == base else (*group[:-1], first_x[group[:-1]])
        row = [*group, str(len(lines))]
        for key in headings:
            values = values_of(lines, key)
            row += [plus_minus([*values.values()], '.3f'), *(
                '' if other == group else paired(values, values_of(groups.get(other, {}), key))
                for other in (base, first)[-len(others):])]
        table.append(row)
    return table


def plus_minus(values, spec):
    """Return '0.101 ± 0.020': the mean and the half-width of its 95 % interval."""
    if len(values) < 2:
        return format(values[0], spec) if values else ''
    mean, low, high = stats.mean_interval(values)
    return f'{mean:{spec}} ± {(high - low) / 2:.3f}'


def paired(values, others):
    """Return '+0.031 ± 0.004, p 0.1, 3 seeds' of values - others over the seeds that both have."""
    d = [values[seed] - others[seed] for seed in values if seed in others]
    text = plus_minus(d, '+.3f')
    text += f', p {stats.student_t(d)[2]:.1g}' if len(d) > 1 else ''
    return text + f', {len(d)} seed{"s" * (len(d) > 1)}' if 0 < len(d) < len(values) else text


def mean_and_ends(values):
    """Return (mean, low, high) to draw; with one or two seeds all three are the mean."""
    # the interval of two seeds is 13 standard errors to each side and would dwarf the others
    return stats.mean_interval(values) if len(values) > 2 else [sum(values) / len(values)] * 3


def titled(columns, values, words=None):
    """Return 'lr 0.001, smoothing 0.1'; words: {column or 'column=value': what to write}."""
    words = words or {}
    return ', '.join(words.get(f'{column}={value}') or (
        value if column in SELF_EVIDENT else f'{words.get(column, column)} {value}')
        for column, value in zip(columns, values, strict=True))


def draw_means(path, groups, columns, headings, sampled, n_panel, reference, words):
    """Draw means with 95 % intervals: a row per measure, a column per panel."""
    from matplotlib import colormaps
    shown = [group for group in groups if not reference or {*group[n_panel:]} != {reference}]
    panels, curves = (list(dict.fromkeys(group[part] for group in shown))
                      for part in (slice(n_panel), slice(n_panel, -1)))
    labels = [printable(titled(columns[n_panel:-1], curve, words)) for curve in curves]
    xs = ordered(dict.fromkeys(group[-1] for group in shown))
    width = max(3.0 * len(panels), 4.5)
    n_columns = max(1, int(width / (0.075 * max(map(len, labels)) + 0.6)))      # of the legend
    figure = new_figure(width, 2.6 * len(headings) + 0.5 + 0.2 * (len(curves) // n_columns))
    grid = figure.subplots(len(headings), len(panels), squeeze=False, sharex=True, sharey='row')
    colors = colormaps['viridis'](np.linspace(0, 0.85, len(curves)))
    offsets = min(0.06, 0.6 / len(curves)) * (np.arange(len(curves)) - (len(curves) - 1) / 2)
    slanted = {'rotation': 15, 'horizontalalignment': 'right'} if max(map(len, xs)) > 8 else {}
    for (key, panel), ax in zip(itertools.product(headings, panels), grid.flat, strict=True):
        base = groups.get((*panel, *[reference] * (len(columns) - n_panel)), {})
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
        ax.set(xlabel=words.get(columns[-1], columns[-1]), ylabel=headings[key])
        ax.label_outer()
    for ax, panel in zip(grid[0], panels, strict=True):
        title = titled(columns[:n_panel], panel, words) + ' (sample)' * (panel[0] in sampled)
        ax.set_title(figure_title(title, 40), fontsize=10)
    if entries := {label: handle for ax in grid.flat for handle, label in zip(
            *ax.get_legend_handles_labels(), strict=True)}:
        figure.legend(entries.values(), entries, loc='outside lower center', frameon=False,
                      fontsize=9, ncols=n_columns)
    save_figure(figure, path, 110)
