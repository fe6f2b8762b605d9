"""Runs of several seeds side by side: means with Student's interval, and paired differences.

compare.py calls `compare_seeds`. The lines of its compare.csv, one for each run, task, language,
category and scaling, are all that the table and the figure are made of.
"""

import itertools
import math
from dataclasses import replace

import numpy as np

import metrics
import scaling
import stats
from data.files import read_rows
from results.report import (aligned, csv_text, latex, mark_best, markdown, predictions, save_figure,
                            warn_on_failure)
from results.runs import TITLES, read_run_samples, sample_of
from runtime.errors import ConfigError, DataError
from runtime.ownership import write_text
from runtime.processes import parallel_map

# the columns of a compare.csv over seeds: what names a line, the settings that differ, the metrics
NAMES = ('run', 'kind', 'seed', 'task', 'language', 'category', 'scaling')
METRICS = ('n', *TITLES)
# columns whose values are clear without the column's name; short names of others for figures
SELF_EVIDENT = ('task', 'category', 'kind', 'run')
SHORT_NAMES = {'final_logit_softcapping': 'cap', 'hidden_size': 'D', 'unused_rows': 'unused'}


def compare_seeds(runs, tables, cfg, out_dir):
    """Print a table of means over seeds; write compare.csv, .md, .tex and .png to out_dir.

    compare.csv has the lines that `where` keeps, from which the rest can be made again. Returns
    what is shown, (groups, reference) as `group_lines` does, and `cfg` with the axes.
    """
    all_lines = [line for table in tables for line in read_lines(table)]
    all_lines += itertools.chain(*parallel_map(run_lines, runs, worth_it=len(runs) > 4))
    lines = apply_where(all_lines, cfg.where)
    if out_dir.resolve() / 'compare.csv' in tables and len(lines) < len(all_lines):
        raise ConfigError(f'{out_dir / "compare.csv"} would lose the lines that `where` does not '
                          f'keep; give another --out_dir')
    if tables and len(set(map(name_of, lines))) < len(lines):
        raise ConfigError('compare: a run is there twice, with the same name, seed and task; with '
                          'a compare.csv each has to have a name of its own')
    axes = [*cfg.panel, *(cfg.by or ()), *filter(None, [cfg.x])]
    columns = dict.fromkeys(itertools.chain(*lines))
    check_known('panel, by and x', axes, [c for c in columns if not is_metric(c)])
    check_known('metrics', cfg.metrics or [''], filter(is_metric, columns))
    check_known('reference', cfg.reference, {line['kind'] for line in lines})
    if len(set(axes)) < len(axes):
        raise ConfigError(f'a column is named twice in panel, by and x: {", ".join(axes)}')
    named = {*axes, *(rule.partition('=')[0] for rule in cfg.where), 'sample_of'}
    lines = drop_constant_settings(lines, columns, named)
    shown = pool_lines(lines, named)
    cfg = choose_axes(shown, axes, cfg)
    groups, reference = group_lines(shown, cfg)
    base = 'reference' if len(cfg.reference) > 1 else ''.join(cfg.reference)
    table = seed_table(groups, reference, base, cfg)
    write_text(out_dir / 'compare.csv', csv_text(lines))
    sampled = list(dict.fromkeys(line['task'] for line in shown if line.get('sample_of')))
    note = f'\nonly a sample of the questions (--limit): {", ".join(sampled)}\n' if sampled else ''
    write_text(out_dir / 'compare.md', markdown(table) + note)
    write_text(out_dir / 'compare.tex', latex(
        mark_best(table, [tuple(line[:len(cfg.panel)]) for line in table[1:]]), note.strip()))
    with warn_on_failure(out_dir / 'compare.png'):
        draw_series(out_dir / 'compare.png', groups, reference, base, cfg)
    print(f'{len(lines)} lines of {len({line["run"] for line in lines})} runs and '
          f'{len({line["seed"] for line in lines})} seeds; --x={cfg.x} --by={",".join(cfg.by)}\n\n'
          f'{aligned(table)}\n{note}\nwrote compare.csv, .md, .tex and .png to {out_dir}')
    return groups, reference, cfg


def name_of(line):
    return tuple(str(line[key]) for key in NAMES)


def is_metric(column):
    return column in METRICS or column.startswith('reach_')


def is_setting(column):
    return not is_metric(column) and column not in (*NAMES, 'temperature')


def run_lines(run):
    """Return the lines of a run: names, settings, and metrics to five digits."""
    lines = []
    for names, fitted, p in answers_of(run):
        report = p.report()
        result = run.results[names['task']]
        lines.append(names | run.settings | {'distribution': result['distribution']}
                     | sample_of(result) | run.reach | fitted
                     | {key: float(f'{report[key]:.5g}') for key in METRICS if key in report})
    return sorted(lines, key=name_of)


def answers_of(run):
    """Yield (names of a line, {} or {'temperature': of the validation split}, Predictions)."""
    test, held_out = read_run_samples(run)
    for task, samples in test.items():
        norm = run.results[task]['norm']
        plain = predictions(samples, norm)
        scaled = {'none': ({}, plain)}
        if task in held_out and plain.scores is not None:
            fit = predictions(held_out[task], norm)
            temperature = scaling.fit_temperature(fit.scores, fit.labels)
            scores = plain.scores / temperature
            scaled['temperature'] = {'temperature': f'{temperature:.5g}'}, plain._replace(
                probs=metrics.softmax(scores), scores=scores)
        languages, categories = (np.array([str(s.get(key) or 'all') for s in samples])
                                 for key in ('language', 'category'))
        for language, category in itertools.product({*languages, 'all'}, {*categories, 'all'}):
            rows = ((languages == language) | (language == 'all')) & (
                (categories == category) | (category == 'all'))
            for name, (fitted, p) in scaled.items() if rows.any() else ():
                yield {'run': run.folder.name, 'kind': run.folder.name.split('-')[0],
                       'seed': str(run.seed), 'task': task, 'language': str(language),
                       'category': str(category), 'scaling': name}, fitted, p.at(rows)


def read_lines(path):
    """Return the lines of a compare.csv over seeds, metrics as numbers."""
    rows, lines = list(read_rows(path)), []
    for place, cells in rows[1:]:
        try:
            line = dict(zip(rows[0][1], cells, strict=True))
            name_of(line)
            lines.append(line | {key: float(line[key]) for key in filter(is_metric, line)
                                 if line[key]})
        except (KeyError, ValueError) as error:
            raise DataError(f'{place}: not a line of a comparison over seeds ({error!r})') from None
    if not lines:
        raise DataError(f'{path} has no lines below its header')
    return lines


# Which lines, and along which axes


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


def drop_constant_settings(lines, columns, named):
    """Return the lines without settings that are equal in all runs of a kind, except `named`."""
    def differs(column):
        values = {(line['kind'], line['task'], line.get(column, '')) for line in lines}
        return len(values) > len({value[:2] for value in values})
    columns = [c for c in columns if not is_setting(c) or c in named or differs(c)]
    return [{column: line.get(column, '') for column in columns} for line in lines]


def pool_lines(lines, named):
    """Return the unscaled lines of all languages and categories, except in columns `named`.

    A task without such a line is shown with those that it has.
    """
    for column, usual in (('language', 'all'), ('category', 'all'), ('scaling', 'none')):
        pooled = {line['task'] for line in lines if line[column] == usual}
        lines = [line for line in lines if column in named or line[column] == usual
                 or line['task'] not in pooled]
    return lines


def choose_axes(lines, axes, cfg):
    """Return `cfg` with x and by: as given, else all columns in which runs of one seed differ.

    The first such column is x, the others are `by`: settings first, then what was scored, then
    kind and run. None is chosen whose values follow from those of the others, and of `axes`.
    """
    def n_groups(columns):
        return len({tuple(line[column] for column in ('seed', *axes, *columns)) for line in lines
                    if line['kind'] not in cfg.reference})
    chosen = [*filter(is_setting, lines[0]), 'task', 'language', 'category', 'scaling', 'kind',
              'run']
    for column in chosen[::-1]:
        others = [other for other in chosen if other != column]
        if n_groups(others) == n_groups(chosen):
            chosen = others
    x = cfg.x or (chosen.pop(0) if chosen else 'kind')
    return replace(cfg, x=x, by=tuple(chosen) if cfg.by is None else cfg.by)


def group_lines(lines, cfg):
    """Return ({(panel, by, x): {seed: line}} in display order, {panel: {seed: reference line}})."""
    aside = [line for line in lines if line['kind'] in cfg.reference]
    lines = [line for line in lines if line['kind'] not in cfg.reference]
    if not lines:
        raise ConfigError(f'reference = {cfg.reference} leaves no other run to compare with')
    axes, width, groups = (*cfg.panel, *cfg.by, cfg.x), len(cfg.panel), {}
    ranks = {column: ordered(column, lines, cfg.where) for column in axes}
    for line in sorted(lines, key=lambda line: [ranks[c].index(line[c]) for c in axes]):
        values = tuple(line[column] for column in axes)
        groups.setdefault((values[:width], values[width:-1], values[-1]), []).append(line)
    # a panel of another column of training, such as lr, has no base model of its own
    reference = {panel: by_seed([line for line in aside if tuple(
        line[column] for column in cfg.panel) == panel] or aside) for panel, _, _ in groups}
    return {place: by_seed(of_place) for place, of_place in groups.items()}, reference


def ordered(column, lines, where):
    """Return the values of a column in the order of `where`, else by size, else as they come."""
    values = list(dict.fromkeys(line[column] for line in lines))
    for rule in where:
        name, _, listed = rule.partition('=')
        if name == column:
            return sorted(values, key=listed.split('|').index)
    try:
        return sorted(values, key=lambda v: -math.inf if v in ('None', '') else float(v))
    except ValueError:
        return values


def by_seed(lines):
    """Return {seed: line}; raises ConfigError if two lines have the same seed."""
    of_seed = {}
    for line in lines:
        other = of_seed.setdefault(line['seed'], line)
        if other is not line:
            differ = [k for k in line if not is_metric(k) and line[k] != other[k]]
            raise ConfigError(
                f'{other["run"]} and {line["run"]} of seed {line["seed"]} fall together; ' + (
                    f'choose by --where, --by or --panel one of {", ".join(differ)}' if differ else
                    'their settings are the same, so compare one of them'))
    return of_seed


# Table and figure


def values_of(lines, metric):
    """Return {seed: value} of a metric, for seeds where it is defined."""
    return {seed: line[metric] for seed, line in lines.items()
            if isinstance(line.get(metric), float) and math.isfinite(line[metric])}


def seed_table(groups, reference, base, cfg):
    """Return cells: mean ± half-width of the 95 % interval, also of paired differences, with p.

    The differences are to the reference of the panel, whose name is `base`, and to the first x of
    the same line.
    """
    first_x = {(panel, by): x for panel, by, x in reversed(groups)}
    first, *others = set(first_x.values())
    first = f'the first {cfg.x}' if others else (
        first if cfg.x in SELF_EVIDENT else f'{cfg.x} {first}')
    head = [*cfg.panel, *cfg.by, cfg.x, 'seeds']
    for metric in cfg.metrics:
        title = TITLES.get(metric, metric)
        term = f'({title})' if ' - ' in title else title
        head += [title, *(f'{term} minus that of {other}' for other in (base, first) if other)]
    table = [head]
    for panel in dict.fromkeys(panel for panel, _, _ in groups):
        of_base = reference[panel]
        rows = [((base,) * len(cfg.by), base, of_base, of_base)] if of_base else []
        rows += [(by, x, lines, groups[panel, by, first_x[panel, by]])
                 for (of_panel, by, x), lines in groups.items() if of_panel == panel]
        for by, x, lines, first_lines in rows:
            cells = [*panel, *by, x, str(len(lines))]
            for metric in cfg.metrics:
                values = values_of(lines, metric)
                cells.append(plus_minus([*values.values()], '.3f'))
                cells += ['' if other is lines else paired(values, values_of(other, metric))
                          for other in (*([of_base] if base else []), first_lines)]
            table.append(cells)
    return table


def plus_minus(values, spec):
    """Return '0.101 ± 0.020': the mean and the half-width of its 95 % interval."""
    if len(values) < 2:
        return format(values[0], spec) if values else ''
    mean, low, high = stats.mean_interval(values)
    return f'{mean:{spec}} ± {(high - low) / 2:.3f}'


def paired(values, others):
    """Return '+0.031 ± 0.004, p 1e-05' of values - others over the seeds that both have.

    If that is not all seeds of `values`, the text says how many: '+0.031 ± 0.004, p 0.1, 3 seeds'.
    """
    d = [values[seed] - others[seed] for seed in values if seed in others]
    text = plus_minus(d, '+.3f')
    text += f', p {stats.student_t(d)[2]:.1g}' if len(d) > 1 else ''
    return text + f', {len(d)} seed{"s" * (len(d) > 1)}' if 0 < len(d) < len(values) else text


def mean_and_ends(values):
    """Return (mean, low, high) to draw; with one or two seeds all three are the mean.

    The interval of two seeds is 13 standard errors to each side: it would hide the rest.
    """
    return stats.mean_interval(values) if len(values) > 2 else [sum(values) / len(values)] * 3


def titled(columns, values):
    """Return 'lr 0.001, smoothing 0.1'; columns of SELF_EVIDENT go without their name."""
    return ', '.join(
        value if column in SELF_EVIDENT else f'{SHORT_NAMES.get(column, column)} {value}'
        for column, value in zip(columns, values, strict=True))


def draw_series(path, groups, reference, base, cfg):
    """Draw means over seeds with 95 % intervals: one row per metric, one column per panel."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    panels, lines_by = (list(dict.fromkeys(key[i] for key in groups)) for i in (0, 1))
    xs = ordered(cfg.x, [line for lines in groups.values() for line in lines.values()], cfg.where)
    figure = Figure(figsize=(max(3.0 * len(panels), 4.5), 2.6 * len(cfg.metrics) + 0.5),
                    layout='constrained')
    axes = figure.subplots(len(cfg.metrics), len(panels), squeeze=False, sharex=True, sharey='row')
    colors = colormaps['viridis'](np.linspace(0, 0.85, len(lines_by)))
    step = min(0.06, 0.6 / len(lines_by))     # between the points of one x
    slanted = {'rotation': 15, 'horizontalalignment': 'right'} if max(map(len, xs)) > 8 else {}
    for (metric, panel), ax in zip(itertools.product(cfg.metrics, panels), axes.flat, strict=True):
        if band := values_of(reference[panel], metric):
            mean, low, high = mean_and_ends([*band.values()])
            ax.axhline(mean, color='black', linestyle='--', linewidth=1, label=base)
            ax.axhspan(low, high, color='black', alpha=0.1, linewidth=0)
        for k, (by, color) in enumerate(zip(lines_by, colors, strict=True)):
            points = [(i, *mean_and_ends([*values.values()])) for i, x in enumerate(xs)
                      if (values := values_of(groups.get((panel, by, x), {}), metric))]
            if points:
                i, mean, low, high = np.array(points).T
                ax.errorbar(i + step * (k - (len(lines_by) - 1) / 2), mean,
                            (mean - low, high - mean), marker='o', markersize=4, linewidth=1.2,
                            capsize=2, color=color, label=titled(cfg.by, by) or None)
        ax.set_xticks(range(len(xs)), xs, **slanted)
        ax.grid(axis='y', alpha=0.3)
        ax.set(xlabel=cfg.x, ylabel=TITLES.get(metric, metric))
        ax.label_outer()
    for ax, panel in zip(axes[0], panels, strict=True):
        sampled = any(line.get('sample_of') for place, of_seed in groups.items()
                      for line in of_seed.values() if place[0] == panel)
        ax.set_title(titled(cfg.panel, panel) + ' (sample)' * sampled, fontsize=10)
    entries = {label: handle for ax in axes.flat
               for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    if entries:
        width = 0.075 * max(map(len, entries)) + 0.6      # inches of an entry, about
        n_columns = max(1, min(len(entries), int(figure.get_figwidth() / width)))
        figure.set_figheight(figure.get_figheight() + 0.2 * (len(entries) // n_columns))
        figure.legend(entries.values(), entries, loc='outside lower center', frameon=False,
                      fontsize=9, ncols=n_columns)
    save_figure(figure, path, 110)
