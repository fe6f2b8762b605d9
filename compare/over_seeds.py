"""Compare runs of several seeds: means with Student's interval, and paired differences.

For other runs or columns, write a few lines of Python with `run_lines`: see docs/evaluation.md.
"""

import itertools
import math

import numpy as np

from compare import scaling, significance
from results.report import predictions
from compare.runs import read_run_samples, sample_of
from results.columns import Heading
from results.tables import aligned, csv_text, latex, mark_best, markdown
from runtime.errors import ConfigError
from runtime.ownership import claim, write_text
from runtime.processes import parallel_map

FILES = tuple(f'compare.{ending}' for ending in ('csv', 'md', 'tex'))
# the columns of compare.csv that identify a line; the others are settings or, as floats, measures
NAMES = ('run', 'kind', 'seed', 'task', 'language', 'category', 'scaling')
CLEAR = ('task', 'category', 'kind', 'run')     # columns whose values are clear without a name


def compare_seeds(runs, keys, out_dir):
    """Print a table of the measures `keys`, by the settings that differ; write compare.*."""
    claim(out_dir, *FILES)
    lines = [*itertools.chain(*parallel_map(run_lines, runs, worth_it=len(runs) > 4))]
    lines = drop_constant_settings(lines)
    shown = [line for line in lines if line['scaling'] == 'none'
             and line['language'] == line['category'] == 'all']
    x, *by = varying_columns(shown) or ['kind']
    columns = ['task', *by, x]
    groups = {group: by_seed(members) for group, members in group_lines(shown, columns).items()}
    sampled = list(dict.fromkeys(line['task'] for line in shown if line.get('sample_of')))
    headings = {key: Heading(key) for key in keys}
    table = seed_table(groups, columns, headings, first_of_rows(groups, x))
    note = f'only a sample of the questions (--limit): {", ".join(sampled)}' * bool(sampled)
    print(f'{len(lines)} lines of {len(runs)} runs and {len({line["seed"] for line in lines})} '
          f'seeds, by {", ".join([*by, x])}\n')
    write_table(out_dir, lines, table, note)


def write_table(out_dir, lines, table, note='', n_panel=1):
    """Print a table of `seed_table` with a note below it; write compare.*, all lines as CSV.

    The best value is marked among rows with the same cells in the first n_panel columns.
    """
    below = f'\n{note}\n' * bool(note)
    write_text(out_dir / 'compare.csv', csv_text(lines))
    write_text(out_dir / 'compare.md', markdown(table) + below)
    marked = mark_best(table, [tuple(row[:n_panel]) for row in table[1:]])
    write_text(out_dir / 'compare.tex', latex(marked, note))
    print(f'{aligned(table)}\n{below}\nwrote {", ".join(FILES)} to {out_dir}')


def run_lines(run):
    """Return the lines of a run: names, settings, and measures to five digits."""
    lines = []
    for names, fitted, p in predictions_by_group(run):
        result = run.results[names['task']]
        measures = {key: float(f'{value:.5g}') for key, value in p.report().items()}
        lines.append(names | run.settings | {'distribution': result['distribution']}
                     | sample_of(result) | fitted | measures)
    return sorted(lines, key=lambda line: [line[key] for key in NAMES])


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
    dropped = {c for c in setting_columns(lines) if c not in named and not varies(c)}
    columns = [c for c in dict.fromkeys(itertools.chain(*lines)) if c not in dropped]
    return [{column: line.get(column, '') for column in columns} for line in lines]


def varying_columns(lines):
    """Return the columns, settings first, in which runs of one seed differ."""
    def n_groups(columns):
        return len({tuple(line[column] for column in ('seed', 'task', *columns)) for line in lines})
    chosen = [*setting_columns(lines), 'kind', 'run']
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
            raise ConfigError(f'{other["run"]} and {line["run"]} of seed {line["seed"]} belong to '
                              f'one group, since they differ only in '
                              f'{", ".join(differ) or "their folder"}; compare one of them')
    return seeds


def values_of(lines, key):
    """Return {seed: value} of a measure, for seeds where it is defined."""
    return {seed: line[key] for seed, line in lines.items()
            if isinstance(line.get(key), float) and math.isfinite(line[key])}


def first_of_rows(groups, x):
    """Return {title: {group: the first group with its values of all columns but the last, x}}."""
    first = {}
    for group in groups:
        first.setdefault(group[:-1], group)
    values = {group[-1] for group in first.values()}
    title = f'the first {x}' if len(values) > 1 else ' '.join([*[x] * (x not in CLEAR), *values])
    return {title: {group: first[group[:-1]] for group in groups if group != first[group[:-1]]}}


def seed_table(groups, columns, headings, others):
    """Return cells: mean ± half-width of the 95 % interval, and paired differences, with p.

    others: {title: {group: the group that it is compared with}}
    """
    table = [[*columns, 'seeds']]
    for heading in headings.values():
        term = f'({heading})' if ' - ' in heading else heading
        table[0] += [heading, *(f'{term} minus that of {title}' for title in others)]
    for group, lines in groups.items():
        row = [*group, str(len(lines))]
        for key in headings:
            values = values_of(lines, key)
            row.append(plus_minus([*values.values()], '.3f'))
            for other in others.values():
                row.append(paired(values, values_of(groups.get(other.get(group), {}), key)))
        table.append(row)
    return table


def plus_minus(values, spec):
    """Return '0.101 ± 0.020': the mean and the half-width of its 95 % interval."""
    if len(values) < 2:
        return format(values[0], spec) if values else ''
    mean, low, high = significance.mean_interval(values)
    return f'{mean:{spec}} ± {(high - low) / 2:.3f}'


def paired(values, others):
    """Return '+0.031 ± 0.004, p 0.1, 3 seeds' of values - others over the seeds that both have."""
    d = [values[seed] - others[seed] for seed in values if seed in others]
    text = plus_minus(d, '+.3f')
    text += f', p {significance.student_t(d)[2]:.1g}' if len(d) > 1 else ''
    return text + f', {len(d)} seed{"s" * (len(d) > 1)}' if 0 < len(d) < len(values) else text
