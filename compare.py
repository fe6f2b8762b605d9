"""Several runs side by side: the papers' table, and the same over seeds.

    python evaluate.py --compare out/base out/sft out/ls01
    python evaluate.py --compare out/study/smoothing --where=language=en --x=smoothing --by=lr
    python evaluate.py --compare configs/figures/smoothing.py

Runs of one seed are compared question by question. Where seeds differ they are what is drawn from:
means with Student's interval over seeds and paired differences between runs of the same seed. A
folder that is no run stands for all runs below it, a compare.csv for the runs that it was made of.
"""

import csv
import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

import metrics
import scaling
import stats
from configs import ConfigError, load_config, read_assignments, require_range
from data import DataError, forked_pool
from results import (aligned, csv_text, draw_bins, draw_reliability, forked_processes, markdown,
                     measure, predictions, read_samples, sample_order, save_figure,
                     split_languages, write_text)

# metric, title, and which is better: more (1), less (-1) or neither (0)
COMPARED = (('accuracy', 'accuracy', 1), ('entropy_bits', 'entropy (bits)', 0), ('ece', 'ECE', -1),
            ('rmsce', 'RMS', -1))
TITLES = {'accuracy': 'accuracy', 'confidence': 'confidence', 'gap': 'confidence - accuracy',
          'entropy_bits': 'entropy (bits)', 'ece': 'ECE', 'rmsce': 'RMSCE',
          'rms_mmlu_repo': "RMS of MMLU's code", 'reach_lowest_bits': 'least entropy (bits)',
          'reach_highest_bits': 'most entropy (bits)',
          'brier': 'Brier', 'nll': 'NLL (nats)', 'auroc': 'AUROC', 'smooth_ece': 'smooth ECE'}
# columns that every line over seeds has
FIXED = ('run', 'kind', 'seed', 'task', 'language', 'category', 'scaling')
# what a compare.csv over seeds says of each run, beside its settings
KEPT = ('n', *(name for name in TITLES if not name.startswith('reach')))
SHORT = {'final_logit_softcapping': 'cap', 'hidden_size': 'D', 'unused_rows': 'unused'}
# settings of a run that say where it is, not what it is
PLACES = {'model', 'out_dir', 'overwrite', 'resume', 'seed', 'seeds', 'runs', 'vary', 'demo_world',
          'world', 'cache_dir', 'eval_tasks', 'shape', 'workers', 'device', 'dry_run', 'only',
          'pictures'}


@dataclass
class CompareConfig:
    sources: tuple[str, ...] = ()             # folders and files, beside those named first
    norm: Literal['token', 'sum', 'char', 'byte'] | None = None     # None: as in the runs
    n_bootstrap: int = 1000                   # resamples of questions, where seeds do not differ
    seed: int = 0                             # of the bootstrap
    out_dir: str = 'out/compare'
    # over seeds: what to keep, as 'column=value|value'; columns are task, language ('all': pooled),
    # category, scaling ('none' or 'temperature'), run, kind (of 'tuned-lr0.1': 'tuned'), and every
    # setting of training or of the model that differs
    where: tuple[str, ...] = ()
    x: str = 'kind'                           # column along the axis
    by: tuple[str, ...] = ()                  # columns: a line for each of their values
    panel: tuple[str, ...] = ('task',)        # columns: a panel for each of their values
    metrics: tuple[str, ...] = ('ece', 'accuracy')
    reference: tuple[str, ...] = ()           # kinds drawn as a band, such as 'base'
    reliability: bool = False                 # also diagrams, all seeds together


OVER_SEEDS = {'where', 'x', 'by', 'panel', 'metrics', 'reference', 'reliability'}


def main(argv):
    named = [a for a in argv if not a.startswith('--')]
    options = [a for a in argv if a.startswith('--')]
    files = [a for a in named if a.endswith('.py')]
    cfg = load_config(CompareConfig, files + options)
    sources = [*(a for a in named if a not in files), *cfg.sources]
    require_range(cfg, 0, math.inf, 'n_bootstrap', 'seed')
    folders = find_runs([s for s in sources if not s.endswith('.csv')])
    files = [s for s in sources if s.endswith('.csv')]
    if len(set(folders)) < len(folders):
        raise ConfigError('compare: a folder is named twice')
    if len(folders) + 2 * len(files) < 2:
        raise ConfigError('compare wants two folders or more, each with samples.jsonl')
    asked = any(getattr(cfg, key) != getattr(CompareConfig(), key) for key in OVER_SEEDS)
    if files or asked or len({read_settings(folder)['seed'] for folder in folders}) > 1:
        compare_seeds(folders, files, cfg)
    else:
        compare_questions(folders, cfg)


def find_runs(sources):
    """Folders of runs: those named, or the runs below a folder that is none."""
    found = []
    for source in map(Path, sources):
        below = [] if (source / 'results.json').exists() else sorted(
            p.parent.resolve() for p in source.rglob('results.json')
            if p.parent.name != 'before' and (p.parent / 'samples.jsonl').exists())
        found += below or [source.resolve()]
    return found


# ------------------------------------------------------------------------------------------------
# Over questions
# ------------------------------------------------------------------------------------------------

def compare_questions(folders, cfg):
    """The papers' table of several runs, from their samples; prints it and writes it to out_dir.

    For every task and language: accuracy, entropy, ECE and RMS of each run, the best one marked;
    then each run's difference to those before it, with a paired bootstrap over the questions that
    both answered, and Student's t over languages where there are several. Writes compare.md,
    compare.csv, and a reliability diagram of all runs for each task.
    """
    runs = [read_run(folder, cfg.norm) for folder in folders]
    named = label_runs(folders)
    out_dir = Path(cfg.out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    tasks = [task for task in runs[0]['samples'] if all(task in r['samples'] for r in runs)]
    if not tasks:
        raise DataError('these runs have no task in common: ' + '; '.join(
            f'{name}: {", ".join(run["samples"])}' for name, run in zip(named, runs)))
    lines, texts, shown = [], [], []
    for task in tasks:
        print_task, pairs = [], []
        by_language = [split_languages(run['samples'][task]) for run in runs]
        languages = [x for x in by_language[0] if all(x in other for other in by_language)]
        groups = [*languages, None] if len(languages) > 1 else [None]
        found = [{} for _ in runs]          # of each run {language or None: (keys, Predictions)}
        for run, of_run in zip(runs, found, strict=True):
            for language in groups:
                rows = [s for s in run['samples'][task] if language in (None, s.get('language'))]
                keys = [sample_order(s)[2:] for s in rows]
                of_run[language] = keys, predictions(rows, run['norm'])
        reports = [{g: p.report() for g, (_, p) in of_run.items()} for of_run in found]
        for group in groups:
            best = {key: _best([r[group].get(key) for r in reports], sign)
                    for key, _, sign in COMPARED}
            for i, (name, run) in enumerate(zip(named, runs, strict=True)):
                report = reports[i][group]
                values = [f'{report[key]:.3f}{" *" if i in best[key] else "  "}'
                          if key in report else '' for key, _, _ in COMPARED]
                language = 'pooled' if group is None else group
                print_task.append([name, run['model'], task, run['smoothing'], language,
                                   str(report['n']), *values])
                lines.append({'run': name, 'model': run['model'], 'dataset': task,
                              'smoothing': run['smoothing'], 'language': language} | report)
        for i, j in itertools.combinations(range(len(runs)), 2):
            pairs += difference(f'{named[j]} - {named[i]}', found[i], found[j], reports[i],
                                reports[j], groups, cfg.n_bootstrap, cfg.seed)
        head = ['run', 'model', 'dataset', 'smoothing', 'language', 'questions',
                *(title for _, title, _ in COMPARED)]
        pair_head = ['difference', 'over', 'questions', 'metric', 'mean', '95 % interval', 'p']
        distribution = ', '.join(dict.fromkeys(run['distribution'] for run in runs))
        shown.append(f'\n{task} ({distribution})\n{aligned([head, *print_task])}\n\n'
                     f'{aligned([pair_head, *pairs])}')
        texts.append(f'### {task} ({distribution})\n\n{markdown([head, *print_task])}\n'
                     f'{markdown([pair_head, *pairs])}')
        draw_reliability(out_dir / f'reliability-{task}.png',
                         [(name, of_run[None][1]) for name, of_run in zip(named, found)])
    write_text(out_dir / 'compare.md', '\n'.join(texts))
    write_text(out_dir / 'compare.csv', csv_text(list(lines[0]), lines))
    print(*shown, f'\nwrote compare.md, compare.csv and reliability-*.png to {out_dir}', sep='\n')


def read_run(folder, norm=None):
    """`read_settings`, and the samples of a run by task: `samples`, and those to fit on, `held`."""
    folder = Path(folder)
    run = read_settings(folder)
    run |= {'samples': {}, 'held': {}, 'norm': norm or run['norm']}
    run['distribution'] = f'{run["distribution"].rpartition(", ")[0]}, {run["norm"]}'
    for sample in read_samples(folder / 'samples.jsonl'):
        kind = 'held' if sample.get('split') == 'validation' else 'samples'
        run[kind].setdefault(sample['task'], []).append(sample)
    for rows in run['samples'].values():
        rows.sort(key=sample_order)
    return run


def read_settings(folder):
    """What the results of a run and the configuration of its model say."""
    folder = Path(folder)
    for name in ('samples.jsonl', 'results.json'):
        if not (folder / name).exists():
            raise DataError(f'{folder} has no {name}: evaluate there first')
    try:
        results = json.loads((folder / 'results.json').read_text(encoding='utf-8'))
        config, seed = results['config'], results['seed']
    except (ValueError, KeyError) as error:
        raise DataError(f'{folder / "results.json"}: not the results of evaluate.py: {error!r}'
                        ) from error
    # the run's own configuration, or that of the model that was evaluated
    places = [p for p in (folder, Path(config['model'])) if (p / 'train_config.py').exists()]
    values = {k: v for k, (v, _) in read_assignments(places[0] / 'train_config.py').items()
              } if places else {}
    shape = {}
    if places and (places[0] / 'config.json').exists():
        shape = json.loads((places[0] / 'config.json').read_text(encoding='utf-8'))
    smoothing = values.get('smoothing')
    return {'model': Path(str(values.get('model') or config['model'])).name,
            'smoothing': '' if smoothing is None else str(smoothing),
            'seed': values.get('seed', seed), 'norm': config['norm'],
            'distribution': results['distribution'], 'reach': results.get('reach') or {},
            'settings': {k: Path(v).stem if k == 'data' else v
                         for k, v in values.items() if k not in PLACES} | {
                k: v for k, v in shape.items() if isinstance(v, (int, float, str))
                or k == 'final_logit_softcapping'}}


def label_runs(folders):
    """Short names of folders: the last part, or as many as tell them apart."""
    paths = [Path(f).resolve().parts for f in folders]
    for n in range(1, max(map(len, paths)) + 1):
        names = ['/'.join(parts[-n:]) for parts in paths]
        if len(set(names)) == len(names):
            break
    return names


def _best(values, sign):
    """Indices of the best of values."""
    if not sign or any(v is None for v in values):
        return set()
    best = max(v * sign for v in values)
    return {i for i, v in enumerate(values) if v * sign == best}


def difference(name, first, other, first_reports, other_reports, groups, n_bootstrap, seed):
    """Rows of a table: other - first in each metric, over questions and over languages."""
    keys, a = first[None]
    other_keys, b = other[None]
    shared = set(keys) & set(other_keys)
    if len(shared) < 2:
        return [[name, 'questions', str(len(shared)), '', '', '', '']]
    a = a.at(np.array([key in shared for key in keys]))
    b = b.at(np.array([key in shared for key in other_keys]))
    # the same draws for both: seed and number of questions are the same
    reports, drawn = measure({0: a, 1: b}, n_bootstrap, seed)
    rows = []
    for key, title, _ in COMPARED:
        if key not in reports[0] or not n_bootstrap:
            continue
        d = drawn[1][key] - drawn[0][key]
        low, high = np.percentile(d, (2.5, 97.5))
        share = min(1.0, 2 * (1 + min((d <= 0).sum(), (d >= 0).sum())) / (1 + len(d)))
        rows.append([name, 'questions', str(len(shared)), title,
                     f'{reports[1][key] - reports[0][key]:+.4f}', f'{low:+.4f} {high:+.4f}',
                     f'{share:.3f}'])
    languages = [g for g in groups if g is not None]
    for key, title, _ in COMPARED if len(languages) > 1 else ():
        if key in first_reports[None]:
            mean, t, p = stats.student_t([other_reports[g][key] - first_reports[g][key]
                                          for g in languages])
            rows.append([name, f'{len(languages)} languages', '', title, f'{mean:+.4f}',
                         f't = {t:.2f}', f'{p:.2g}'])
    return rows


# ------------------------------------------------------------------------------------------------
# Over seeds
# ------------------------------------------------------------------------------------------------

def compare_seeds(folders, files, cfg):
    """Table and figure of means over seeds; prints the table and writes all to cfg.out_dir.

    Writes compare.csv (the lines that `where` keeps, from which the rest can be made again),
    compare.md, compare.png, and with `reliability` bins.csv and reliability.png.
    """
    lines = [line for file in files for line in read_lines(file)] + collect(folders, cfg.norm)
    lines = [line for line in lines if kept(line, cfg.where, lines)]
    if not lines:
        raise ConfigError('where leaves no line')
    bins = {key_of(line): line.pop('bins') for line in lines if 'bins' in line}
    columns = list(dict.fromkeys(key for line in lines for key in line))
    named = (*cfg.panel, *cfg.by, cfg.x)
    for name in named:
        if name not in columns:
            raise ConfigError(f'there is no column {name!r}; the columns are {", ".join(columns)}')
    # settings that are the same in all runs of a kind say nothing
    kinds = {line['kind'] for line in lines}
    asked = {*named, *(rule.partition('=')[0] for rule in cfg.where)}
    columns = [c for c in columns if c in (*FIXED, *KEPT, *asked, 'temperature')
               or c.startswith('reach')
               or len({(line['kind'], line.get(c, '')) for line in lines}) > len(kinds)]
    lines = [{c: line.get(c, '') for c in columns} for line in lines]
    series, reference = group(pooled(lines, asked), cfg)
    out_dir = Path(cfg.out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    write_text(out_dir / 'compare.csv', csv_text(columns, lines))
    table = seed_table(series, reference, cfg)
    write_text(out_dir / 'compare.md', markdown(table))
    draw_series(out_dir / 'compare.png', series, reference, cfg)
    if cfg.reliability:
        for file in files:
            bins |= read_bins(Path(file).with_name('bins.csv'))
        draw_pooled(out_dir, series, reference, bins, cfg)
    print(f'{len(lines)} lines of {len({line["run"] for line in lines})} runs and '
          f'{len({line["seed"] for line in lines})} seeds\n\n{aligned(table)}\n\n'
          f'wrote compare.csv, compare.md and compare.png to {out_dir}')


def key_of(line):
    return tuple(str(line[key]) for key in FIXED)


def kept(line, where, lines):
    for rule in where:
        name, equals, values = rule.partition('=')
        if not equals or not any(name in other for other in lines):
            raise ConfigError(f'where: {rule!r}; wanted column=value|value, the columns are '
                              f'{", ".join(dict.fromkeys(c for x in lines for c in x))}')
        if str(line.get(name, '')) not in values.split('|'):
            return False
    return True


def pooled(lines, asked):
    """The lines over all languages and categories, not scaled, but in columns that are `asked` for.

    A task that has one language alone, say, is shown in that.
    """
    for name, usual in (('language', 'all'), ('category', 'all'), ('scaling', 'none')):
        if name in asked:
            continue
        found = {}
        for line in lines:
            found.setdefault(line['task'], set()).add(line[name])
        for task, values in found.items():
            if len(values) > 1 and usual not in values:
                raise ConfigError(f'where: no line of {task} has {name}={usual}; choose '
                                  f'{name}={"|".join(sorted(values))}')
        lines = [line for line in lines if line[name] == usual or len(found[line['task']]) == 1]
    return lines


def read_lines(file):
    """The lines of a compare.csv, numbers as such."""
    try:
        with open(file, encoding='utf-8', newline='') as text:
            lines = list(csv.DictReader(text))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f'cannot read {file}: {error}') from error
    if not lines or set(FIXED) - lines[0].keys():
        missing = sorted(set(FIXED) - (lines[0].keys() if lines else set()))
        raise DataError(f'{file}: no lines of runs over seeds; it lacks {", ".join(missing)}')
    for number, line in enumerate(lines, 2):
        for key in line:
            if key not in KEPT and not key.startswith('reach_'):
                continue
            try:
                line[key] = float(line[key]) if line[key] != '' else ''
            except ValueError as error:
                raise DataError(f'{file}:{number}: {key} = {line[key]!r} is no number') from error
    return lines


def collect(folders, norm):
    """Lines of every run: what it is, and its metrics by task, language, category and scaling."""
    cores = forked_processes()
    if cores > 1 and len(folders) > 4:
        with forked_pool(min(cores, 32)) as pool:
            found = pool.starmap(run_lines, [(folder, norm) for folder in folders], chunksize=1)
    else:
        found = [run_lines(folder, norm) for folder in folders]
    return [line for lines in found for line in lines]


def run_lines(folder, norm):
    run, name = read_run(folder, norm), Path(folder).name
    first = {'run': name, 'kind': name.split('-')[0], 'seed': str(run['seed'])}
    settings = {key: str(value) for key, value in run['settings'].items()}
    reach = {}
    for key, value in run['reach'].items():
        if key == 'unused_rows':
            settings[key] = str(value)
        else:
            reach[f'reach_{key}'] = float(f'{value:.5g}')
    lines = []
    for task, samples in run['samples'].items():
        everything = predictions(samples, run['norm'])
        scaled = {'none': (everything, {})}
        if run['held'].get(task) and everything.scores is not None:
            held = predictions(run['held'][task], run['norm'])
            temperature = scaling.fit_temperature(held.scores, held.labels)
            scaled['temperature'] = (everything._replace(
                probs=metrics.softmax(everything.scores, temperature)),
                {'temperature': f'{temperature:.5g}'})
        of_language, of_category = (
            [str(s.get(key) or 'all') for s in samples] for key in ('language', 'category'))
        for language, category in itertools.product({*of_language, 'all'}, {*of_category, 'all'}):
            rows = np.array([language in ('all', a) and category in ('all', b)
                             for a, b in zip(of_language, of_category, strict=True)])
            if not rows.any():
                continue
            for kind, (some, more) in scaled.items():
                report = some.at(rows).report()
                lines.append(first | {'task': task, 'language': language, 'category': category,
                                      'scaling': kind} | settings | reach | more
                             | {key: float(f'{report[key]:.5g}') for key in KEPT if key in report}
                             | {'bins': metrics.bins(*some.at(rows)[:2])})
    return sorted(lines, key=key_of)


def group(lines, cfg):
    """({panel: {by: {x: {seed: line}}}}, {panel: {seed: line} of the reference})"""
    aside = [line for line in lines if line['kind'] in cfg.reference]
    lines = [line for line in lines if line['kind'] not in cfg.reference]
    if cfg.reference and not aside:
        raise ConfigError(f'reference = {cfg.reference}, but the kinds are '
                          f'{", ".join(sorted({line["kind"] for line in lines}))}')
    wanted = {rule.partition('=')[0]: rule.partition('=')[2].split('|') for rule in cfg.where}

    def ordered(name, values):
        found = list(dict.fromkeys(values))
        if name in wanted:
            return sorted(found, key=wanted[name].index)
        try:
            return sorted(found, key=lambda v: -math.inf if v in ('None', '') else float(v))
        except ValueError:
            return found

    def by_seed(some):
        found = {}
        for line in some:
            other = found.setdefault(line['seed'], line)
            if other is not line:
                differ = [k for k in line if k not in KEPT and line[k] != other[k]]
                raise ConfigError(f'{other["run"]} and {line["run"]} of seed {line["seed"]} fall '
                                  f'together; choose by --where, --by or --panel one of '
                                  f'{", ".join(differ) or "them: they are the same"}')
        return found

    def place(line, names):
        return tuple(line[name] for name in names)

    named = (*cfg.panel, *cfg.by, cfg.x)
    values = [ordered(name, (line[name] for line in lines)) for name in named]
    series, reference, width = {}, {}, len(cfg.panel)
    for found in itertools.product(*values):
        some = by_seed(line for line in lines if place(line, named) == found)
        if some:
            panel, by = found[:width], found[width:-1]
            series.setdefault(panel, {}).setdefault(by, {})[found[-1]] = some
    for panel in series:
        # a column of training, such as lr, says nothing of where a base model belongs
        reference[panel] = by_seed([x for x in aside if place(x, cfg.panel) == panel] or aside)
    return series, reference


def reference_name(cfg):
    return cfg.reference[0] if len(cfg.reference) == 1 else 'reference' if cfg.reference else ''


def values_of(lines, metric):
    return {seed: line[metric] for seed, line in lines.items()
            if isinstance(line.get(metric), float) and math.isfinite(line[metric])}


def seed_table(series, reference, cfg):
    """Cells: mean and half of its 95 % interval, and the same of paired differences, with p.

    The differences are to the reference of the panel, and to the first x of the same line.
    """
    head, base = [*cfg.panel, *cfg.by, cfg.x, 'seeds'], reference_name(cfg)
    for metric in cfg.metrics:
        title = TITLES.get(metric, metric)
        head += [title] + ([f'{title} - {base}'] if base else []) + [f'{title} - first']
    found = [head]
    for panel, lines_of_by in series.items():
        rows = [((base,) * len(cfg.by), base, reference[panel])] if reference[panel] else []
        rows += [(by, x, lines) for by, of_x in lines_of_by.items() for x, lines in of_x.items()]
        for by, x, lines in rows:
            cells = [*panel, *by, x, str(len(lines))]
            for metric in cfg.metrics:
                values = values_of(lines, metric)
                cells.append(plus_minus(values.values(), '.3f'))
                others = [reference[panel]] if base else []
                others += [lines if x == base else next(iter(lines_of_by[by].values()))]
                cells += [paired(values, values_of(other, metric)) if other is not lines else ''
                          for other in others]
            found.append(cells)
    return found


def plus_minus(values, spec):
    values = list(values)
    if len(values) < 2:
        return format(values[0], spec) if values else ''
    mean, low, high = stats.mean_interval(values)
    return f'{mean:{spec}} ± {(high - low) / 2:.3f}'


def paired(values, others):
    """'+0.031 ± 0.004, p 1e-05' of values - others over the seeds that both have."""
    d = [values[seed] - others[seed] for seed in values if seed in others]
    if len(d) < 2:
        return format(d[0], '+.3f') if d else ''
    return f'{plus_minus(d, "+.3f")}, p {stats.student_t(d)[2]:.1g}'


def mean_and_ends(values):
    """(mean, low, high) to draw; of one or two seeds three times the mean.

    The interval of two is 13 standard errors to each side: it would hide the rest of a picture.
    """
    values = list(values)
    return stats.mean_interval(values) if len(values) > 2 else [sum(values) / len(values)] * 3


def titled(names, values):
    """'lr 0.001, smoothing 0.1'; a task or a category says what it is by itself."""
    return ', '.join(v if n in ('task', 'category', 'kind', 'run') else f'{SHORT.get(n, n)} {v}'
                     for n, v in zip(names, values, strict=True))


def draw_series(path, series, reference, cfg):
    """Means over seeds with their 95 % intervals: a row a metric, a column a panel."""
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    n, bys = len(series), list(dict.fromkeys(by for of_by in series.values() for by in of_by))
    xs = list(dict.fromkeys(x for of_by in series.values()
                            for of_x in of_by.values() for x in of_x))
    figure, axes = plt.subplots(len(cfg.metrics), n, squeeze=False, sharex=True, sharey='row',
                                figsize=(max(3.0 * n, 4.5), 2.6 * len(cfg.metrics) + 0.5),
                                layout='constrained')
    colours = plt.get_cmap('viridis')(np.linspace(0, 0.85, len(bys)))
    for column, (panel, of_by) in enumerate(series.items()):
        for row, metric in enumerate(cfg.metrics):
            ax = axes[row, column]
            band = values_of(reference[panel], metric)
            if band:
                mean, low, high = mean_and_ends(band.values())
                ax.axhline(mean, color='black', linestyle='--', linewidth=1,
                           label=reference_name(cfg))
                ax.axhspan(low, high, color='black', alpha=0.1, linewidth=0)
            for k, (by, colour) in enumerate(zip(bys, colours, strict=True)):
                points = [(xs.index(x), values_of(lines, metric).values())
                          for x, lines in of_by.get(by, {}).items()]
                points = [(at, mean_and_ends(values)) for at, values in points if values]
                if not points:
                    continue
                at = np.array([p for p, _ in points]) + 0.06 * (k - (len(bys) - 1) / 2)
                mean, low, high = np.array([v for _, v in points]).T
                ax.errorbar(at, mean, (mean - low, high - mean), marker='o', markersize=4,
                            linewidth=1.2, capsize=2, color=colour,
                            label=titled(cfg.by, by) or None)
            long = {'rotation': 15, 'horizontalalignment': 'right'}
            ax.set_xticks(range(len(xs)), xs, **(long if max(map(len, xs)) > 8 else {}))
            ax.grid(axis='y', alpha=0.3)
            if row == 0:
                ax.set_title(titled(cfg.panel, panel), fontsize=10)
            if row == len(cfg.metrics) - 1:
                ax.set_xlabel(cfg.x)
            if column == 0:
                ax.set_ylabel(TITLES.get(metric, metric))
    entries = {label: handle for ax in axes.flat
               for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    if entries:
        width = 0.075 * max(map(len, entries)) + 0.6      # inches of an entry, about
        figure.legend(entries.values(), entries, loc='outside lower center', frameon=False,
                      fontsize=9,
                      ncols=max(1, min(len(entries), int(figure.get_figwidth() / width))))
    save_figure(figure, path, 110)


def draw_pooled(out_dir, series, reference, bins, cfg):
    """reliability.png, the questions of all seeds together, and bins.csv, from which it follows."""
    panels, rows = [], []
    for panel, of_by in series.items():
        shown = [(next(iter(reference[panel].values()))['kind'], reference[panel])
                 ] if reference[panel] else []
        shown += [(titled(('kind', *cfg.by, cfg.x), (next(iter(lines.values()))['kind'], *by, x)),
                   lines) for by, of_x in of_by.items() for x, lines in of_x.items()]
        for title, lines in shown:
            some = {key_of(line): bins.get(key_of(line)) for line in lines.values()}
            missing = [key for key, b in some.items() if b is None]
            if missing:
                raise DataError(f'no bins of {" ".join(missing[0])}: they are in the bins.csv '
                                f'beside a compare.csv that was made with --reliability')
            rows += [dict(zip(FIXED, key, strict=True)) | {
                'bin': i, 'count': int(b['count'][i]), 'confidence': f'{b["confidence"][i]:.5g}',
                'accuracy': f'{b["accuracy"][i]:.5g}'}
                for key, b in some.items() for i in range(len(b['count'])) if b['count'][i]]
            count = sum(b['count'] for b in some.values())
            pooled = {'count': count} | {key: sum(
                np.where(b['count'] > 0, b['count'] * b[key], 0) for b in some.values())
                / np.maximum(count, 1) for key in ('confidence', 'accuracy')}
            numbers = {name: np.mean([line[key] for line in lines.values()]) for name, key in (
                ('accuracy', 'accuracy'), ('confidence', 'confidence'), ('ECE', 'ece'))}
            panels.append((f'{titled(cfg.panel, panel)}: {title}', numbers, pooled))
    write_text(out_dir / 'bins.csv', csv_text(list(rows[0]), rows))
    draw_bins(out_dir / 'reliability.png', panels, columns=len(panels) // len(series))


def read_bins(path):
    """{key_of(line): bins} of a bins.csv"""
    if not path.exists():
        raise DataError(f'--reliability needs {path}, which was not made')
    found = {}
    with open(path, encoding='utf-8', newline='') as text:
        for row in csv.DictReader(text):
            b = found.setdefault(key_of(row), {
                'count': np.zeros(10, int), 'confidence': np.zeros(10), 'accuracy': np.zeros(10)})
            for key in b:
                b[key][int(row['bin'])] = float(row[key])
    return found
