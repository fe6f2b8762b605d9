"""Tables and figures of chosen lines of many runs, along chosen axes: means over seeds.

A View says which lines and axes. The lines come from run folders, or from a compare.csv that an
earlier view wrote.
"""

import csv
import io
import itertools
from dataclasses import dataclass
from pathlib import Path

from results import over_seeds
from results.over_seeds import Axes, name_of
from results.report import MEASURES, Heading
from runtime.errors import ConfigError, DataError
from runtime.ownership import read_json
from runtime.processes import parallel_map

# of reach.py
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
    if tables and len(set(map(name_of, lines))) < len(lines):
        raise ConfigError('a run is there twice, with the same name, seed and task; with a '
                          'compare.csv each has to have a name of its own')
    given = [*view.panel, *(view.by or ()), *filter(None, [view.x])]
    columns = dict.fromkeys(itertools.chain(*lines))
    check_known('panel, by and x', given, [c for c in columns if not is_number(c)])
    check_known('metrics', view.metrics or [''], filter(is_number, columns))
    check_known('reference', view.reference, {line['kind'] for line in lines})
    if len(set(given)) < len(given):
        raise ConfigError(f'a column is named twice in panel, by and x: {", ".join(given)}')
    named = {*given, *(rule.partition('=')[0] for rule in view.where), 'sample_of'}
    lines = over_seeds.drop_constant_settings(lines, named)
    pooled = pool_lines(lines, named)
    aside = [line for line in pooled if line['kind'] in view.reference]
    shown = [line for line in pooled if line['kind'] not in view.reference]
    if not shown:
        raise ConfigError(f'reference = {view.reference} leaves no other run to compare with')
    varying = over_seeds.varying_columns(shown, given)
    x = view.x or (varying.pop(0) if varying else 'kind')
    axes = Axes(view.panel, tuple(varying) if view.by is None else view.by, x)
    groups = over_seeds.group_lines(shown, axes, listed_values(view.where))
    # a panel of another column of training, such as lr, has no base model of its own
    reference = {panel: over_seeds.by_seed([line for line in aside if tuple(
        line[column] for column in axes.panel) == panel] or aside) for panel, _, _ in groups}
    name = 'reference' if len(view.reference) > 1 else ''.join(view.reference)
    headings = {key: Heading(key) if key in MEASURES else REACH.get(key, key)
                for key in view.metrics}
    print(over_seeds.show_groups(lines, groups, reference, name, axes, headings, out_dir))
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
    lines, content = [], Path(path).read_bytes()
    try:
        reader = csv.DictReader(io.StringIO(content.decode(), newline=''), strict=True)
    except UnicodeDecodeError as error:
        line = 1 + content.count(b'\n', 0, error.start)
        raise DataError(f'{path}:{line}: not UTF-8: {error.reason}') from None
    try:
        for line in reader:
            if None in line or None in line.values():
                raise ValueError('another number of columns than the header has')
            name_of(line)
            lines.append(line | {key: float(line[key]) for key in filter(is_number, line)
                                 if line[key]})
    except (KeyError, ValueError, csv.Error) as error:
        raise DataError(f'{path}:{reader.line_num}: not a line of a comparison over seeds '
                        f'({error!r})') from None
    if not lines:
        raise DataError(f'{path} has no lines below its header')
    return lines


def check_known(setting, values, known):
    """Raise ConfigError for the first of `values` that is not among the `known` ones."""
    known = sorted(known)
    for value in values:
        if value not in known:
            raise ConfigError(f'{setting}: there is no {value!r}; there are {", ".join(known)}')


def apply_where(lines, where):
    """Return the lines that match every rule 'column=value|value'."""
    for rule in where:
        name, equals, values = rule.partition('=')
        if not equals:
            raise ConfigError(f'where: {rule!r} is not column=value|value')
        check_known(f'where, {rule!r}', [name], {*itertools.chain(*lines)})
        before = lines
        lines = [line for line in lines if str(line.get(name, '')) in values.split('|')]
        if not lines:
            check_known(f'where, {rule!r}', [values], {str(x.get(name, '')) for x in before})
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
