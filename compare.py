"""Several runs side by side: the papers' table, and the same over seeds.

    python evaluate.py --compare out/base out/sft out/ls01
    python evaluate.py --compare out/study/smoothing --where=language=en --x=smoothing --by=lr
    python evaluate.py --compare configs/figures/smoothing.py

Runs of one seed are compared over the questions that they answered: differences with a paired
bootstrap. Runs of several seeds are compared over the seeds: means with Student's interval, and
paired differences between runs of the same seed. A folder that is not a run stands for all runs
below it; an earlier compare.csv can replace the run folders that it was made from.
"""

import csv
import itertools
import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np

import metrics
from configs import ConfigError, load_config, read_assignments, require_range
from data import DataError, forked_pool
from results import (aligned, csv_text, draw_bins, draw_reliability, forked_processes, last_asked,
                     markdown, measure, predictions, read_samples, sample_order, save_figure,
                     setting, split_languages, warn_on_failure, write_text)

# metric, title, and which is better: more (1), less (-1) or neither (0)
COMPARED = (('accuracy', 'accuracy', 1), ('entropy_bits', 'entropy (bits)', 0), ('ece', 'ECE', -1),
            ('rmsce', 'RMSCE', -1))
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
# columns whose values say by themselves what they are
SELF_EVIDENT = ('task', 'category', 'kind', 'run')
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
    x: str | None = None                      # column along the axis; None: the first that differs
    by: tuple[str, ...] | None = None         # columns: a line for each of their values; None:
                                              # the other columns in which runs of a seed differ
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
    sources = [Path(s).expanduser() for s in (*(a for a in named if a not in files), *cfg.sources)]
    require_range(cfg, 0, math.inf, 'n_bootstrap', 'seed')
    tables = [source.resolve() for source in sources if source.suffix == '.csv']
    folders = find_runs([source for source in sources if source.suffix != '.csv'])
    if twice := [path for path in (*folders, *tables) if (*folders, *tables).count(path) > 1]:
        raise ConfigError(f'compare: {twice[0]} is named twice')
    if len(folders) + 2 * len(tables) < 2:
        raise ConfigError('compare needs two runs or more: name their folders, a folder that holds '
                          'them, or a compare.csv' + ''.join(f'; found {f}' for f in folders))
    runs = [read_run(folder, cfg.norm) for folder in folders]
    over_seeds = tables or len({run.seed for run in runs}) > 1 or any(
        getattr(cfg, key) != getattr(CompareConfig(), key) for key in OVER_SEEDS)
    out_dir = Path(cfg.out_dir).expanduser()
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f'out_dir = {cfg.out_dir}: {error.strerror}') from error
    if over_seeds:
        compare_seeds(runs, tables, cfg, out_dir)
    else:
        compare_questions(runs, cfg, out_dir)


# ------------------------------------------------------------------------------------------------
# Runs
# ------------------------------------------------------------------------------------------------

@dataclass
class Run:
    """What the folder of a run says; its samples are read by `read_run_samples`."""
    folder: Path
    model: str              # the name of the model that was tuned, or that was evaluated
    smoothing: str          # '' where no training is known of
    seed: int
    reach: dict
    settings: dict          # of training, and the shape of the model
    results: dict           # {task: its entry of results.json}, 'norm' and 'distribution' as asked
    samples: dict = field(default_factory=dict)     # {task: [sample]}
    held: dict = field(default_factory=dict)        # the same of validation questions


def find_runs(sources):
    """Folders of runs: those named, or the runs below a folder that is not one."""
    found = []
    for source in sources:
        if not source.is_dir():
            raise DataError(f'compare: {source} is not a folder' if source.exists() else
                            f'compare: there is no folder {source}')
        if (source / 'results.json').exists():
            found.append(source.resolve())
            continue
        below = sorted(p.parent.resolve() for p in source.rglob('results.json')
                       if p.parent.name != 'before' and (p.parent / 'samples.jsonl').exists())
        if not below:
            raise DataError(f'compare: {source} holds no run: neither it nor a folder below it has '
                            f'a results.json beside samples.jsonl; evaluate first')
        found += below
    return found


def read_run(folder, norm=None):
    """The Run in `folder`: what its results and the configuration of its model say."""
    if not (folder / 'samples.jsonl').exists():
        raise DataError(f'{folder} has no samples.jsonl: evaluate there first')
    path = folder / 'results.json'
    results = read_json(path)
    try:
        model, seed = str(results['config']['model']), results['seed']
        tasks = {task: with_norm(result, norm) for task, result in results['tasks'].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f'{path}: not the results of evaluate.py: {error!r}') from error
    for task, result in tasks.items():
        if 'distribution' not in result:
            raise DataError(f'{path} does not say how {task} was scored: it is of an earlier '
                            f'version; evaluate again')
    # the run's own configuration, or that of the model that was evaluated
    places = [p for p in (folder, Path(model)) if (p / 'train_config.py').exists()]
    values, shape = {}, {}
    if places:
        values = {k: v for k, (v, _) in read_assignments(places[0] / 'train_config.py').items()}
        if (places[0] / 'config.json').exists():
            shape = read_json(places[0] / 'config.json')
    smoothing = values.get('smoothing')
    return Run(folder, Path(str(values.get('model') or model)).name,
               '' if smoothing is None else str(smoothing), values.get('seed', seed),
               results.get('reach') or {},
               {k: Path(v).stem if k == 'data' and isinstance(v, str) else v
                for k, v in values.items() if k not in PLACES} | {
               k: v for k, v in shape.items() if isinstance(v, (int, float, str))
               or k == 'final_logit_softcapping'}, tasks)


def read_json(path):
    """The dict in a JSON file; raises DataError."""
    try:
        content = json.loads(path.read_text(encoding='utf-8'))
    except (OSError, ValueError) as error:
        raise DataError(f'cannot read {path}: {error}') from error
    if not isinstance(content, dict):
        raise DataError(f'{path} holds a {type(content).__name__}, not an object')
    return content


def with_norm(result, norm):
    """A task's result as if it were scored with `norm`, for its heading; None: as it is."""
    if norm is None or 'distribution' not in result or 'mass' not in result:
        return result
    how = result['distribution'].removesuffix(f', {result["norm"]}')
    return result | {'norm': norm, 'distribution': f'{how}, {norm}'}


def read_run_samples(run):
    """Read the samples of the tasks that results.json has into run.samples and run.held."""
    path = run.folder / 'samples.jsonl'
    for sample in last_asked(read_samples(path)):
        if sample['task'] in run.results:
            kind = run.held if sample.get('split') == 'validation' else run.samples
            kind.setdefault(sample['task'], []).append(sample)
    for task, result in run.results.items():
        n, rows = result.get('pooled', {}).get('n'), run.samples.get(task, [])
        if n != len(rows) or not rows:
            raise DataError(f'{path} has {len(rows)} samples of {task}, but results.json was made '
                            f'of {n}; evaluate there again, without --limit')
        rows.sort(key=sample_order)


def label_runs(folders):
    """Short names of folders: the last part, or as many as tell them apart."""
    paths = [folder.parts for folder in folders]
    for n in range(1, max(map(len, paths)) + 1):
        names = ['/'.join(parts[-n:]) for parts in paths]
        if len(set(names)) == len(names):
            break
    return names


# ------------------------------------------------------------------------------------------------
# Over questions
# ------------------------------------------------------------------------------------------------

def compare_questions(runs, cfg, out_dir):
    """The papers' table of several runs, from their samples; prints it and writes it to out_dir.

    For every task and language: accuracy, entropy, ECE and RMSCE of each run, the best one marked;
    then each run's difference to those before it, with a paired bootstrap over the questions that
    both answered, and Student's t over languages where there are several. Writes compare.md,
    compare.csv, and a reliability diagram of all runs for each task.
    """
    for run in runs:
        read_run_samples(run)
    names = label_runs([run.folder for run in runs])
    tasks = [task for task in runs[0].samples if all(task in run.samples for run in runs)]
    if not tasks:
        raise DataError('these runs have no task in common: ' + '; '.join(
            f'{name}: {", ".join(run.samples)}' for name, run in zip(names, runs)))
    lines, texts, shown, pictures = [], [], [], []
    for task in tasks:
        found = [by_language(run, task, runs) for run in runs]
        reports = [{g: p.report() for g, (_, p) in of_run.items()} for of_run in found]
        head, rows = run_table(task, runs, names, reports, lines)
        pair_head = ['difference', 'over', 'questions', 'metric', 'mean', '95 % interval', 'p']
        pairs = [row for i, j in itertools.combinations(range(len(runs)), 2)
                 for row in difference(f'{names[j]} - {names[i]}', found[i], found[j], reports[i],
                                       reports[j], cfg)]
        title = settings_of(task, runs, names)
        shown.append(f'\n{title}\n{aligned([head, *rows])}\n(* the best)\n\n'
                     f'{aligned([pair_head, *pairs])}')
        texts.append(f'### {title}\n\n{markdown([head, *rows])}\n\\* the best\n\n'
                     f'{markdown([pair_head, *pairs])}')
        pictures.append((out_dir / f'reliability-{task}.png',
                         [(name, of_run[None][1]) for name, of_run in zip(names, found)]))
    write_text(out_dir / 'compare.md', '\n'.join(texts))
    write_text(out_dir / 'compare.csv', csv_text(lines))
    for path, panels in pictures:
        draw_reliability(path, panels)
    for task in dict.fromkeys(task for run in runs for task in run.samples if task not in tasks):
        shown.append(f'\n{task} is left out: not every run has it')
    print(*shown, f'\nwrote compare.md, compare.csv and reliability-*.png to {out_dir}', sep='\n')


def settings_of(task, runs, names):
    """How a task was scored: once if it is the same for all runs, else of each run."""
    every = [setting(task, run.results[task]) for run in runs]
    if len(set(every)) == 1:
        return every[0]
    return f'{task}: ' + ', '.join(setting(name, run.results[task])
                                   for name, run in zip(names, runs, strict=True))


def by_language(run, task, runs):
    """{language, or None for all: (keys of the questions, Predictions)} of a run's task.

    Languages are those that all `runs` have, if there are several.
    """
    languages = [x for x in split_languages(run.samples[task])
                 if all(x in split_languages(other.samples[task]) for other in runs)]
    found = {}
    for language in [*languages, None] if len(languages) > 1 else [None]:
        rows = [s for s in run.samples[task] if language in (None, s.get('language'))]
        # where answers or options differ, the same id is of another question
        keys = [(*sample_order(s)[2:], s.get('answer', s.get('token')), len(s.get('options', ())))
                for s in rows]
        found[language] = keys, predictions(rows, run.results[task]['norm'])
    return found


def run_table(task, runs, names, reports, lines):
    """(head, rows) of the table of one task; its numbers are appended to `lines`, for the CSV."""
    rows = []
    for language in reports[0]:
        best = {key: best_of([r[language].get(key) for r in reports], sign)
                for key, _, sign in COMPARED}
        for i, (name, run) in enumerate(zip(names, runs, strict=True)):
            report = reports[i][language]
            label = 'pooled' if language is None else language
            values = [f'{report[key]:.3f}{" *" if i in best[key] else "  "}'
                      if key in report else '' for key, _, _ in COMPARED]
            rows.append([name, run.model, task, run.smoothing, label, str(report['n']), *values])
            lines.append({'run': name, 'model': run.model, 'dataset': task,
                          'smoothing': run.smoothing, 'language': label} | report)
    return ['run', 'model', 'dataset', 'smoothing', 'language', 'questions',
            *(title for _, title, _ in COMPARED)], rows


def best_of(values, sign):
    """Indices of the best of values."""
    if not sign or any(v is None for v in values):
        return set()
    best = max(v * sign for v in values)
    return {i for i, v in enumerate(values) if v * sign == best}


def difference(name, first, other, first_reports, other_reports, cfg):
    """Rows of a table: other - first in each metric, over questions and over languages."""
    keys, a = first[None]
    other_keys, b = other[None]
    shared = set(keys) & set(other_keys)
    if len(shared) < 2:
        return [[name, 'questions', str(len(shared)), '', '', '', '']]
    a = a.at(np.array([key in shared for key in keys]))
    b = b.at(np.array([key in shared for key in other_keys]))
    # the same draws for both: seed and number of questions are the same
    reports, drawn = measure({0: a, 1: b}, cfg.n_bootstrap, cfg.seed)
    rows = []
    for key, title, _ in COMPARED:
        if key not in reports[0] or not cfg.n_bootstrap:
            continue
        d = drawn[1][key] - drawn[0][key]
        low, high = np.percentile(d, (2.5, 97.5))
        share = min(1.0, 2 * (1 + min((d <= 0).sum(), (d >= 0).sum())) / (1 + len(d)))
        rows.append([name, 'questions', str(len(shared)), title,
                     f'{reports[1][key] - reports[0][key]:+.4f}', f'{low:+.4f} {high:+.4f}',
                     f'{share:.3f}'])
    languages = [g for g in first_reports if g is not None]
    for key, title, _ in COMPARED if len(languages) > 1 else ():
        if key in first_reports[None]:
            mean, t, p = metrics.student_t([other_reports[g][key] - first_reports[g][key]
                                            for g in languages])
            rows.append([name, f'{len(languages)} languages', '', title, f'{mean:+.4f}',
                         f't = {t:.2f}', f'{p:.2g}'])
    return rows


# ------------------------------------------------------------------------------------------------
# Over seeds: the lines of a compare.csv
# ------------------------------------------------------------------------------------------------

def compare_seeds(runs, tables, cfg, out_dir):
    """Table and figure of means over seeds; prints the table and writes all to out_dir.

    Writes compare.csv (the lines that `where` keeps, from which the rest can be made again),
    compare.md, compare.png, and with `reliability` bins.csv and reliability.png.
    """
    lines = [line for table in tables for line in read_lines(table)] + collect(runs)
    n_read = len(lines)
    lines = kept(lines, cfg.where)
    if out_dir.resolve() / 'compare.csv' in tables and len(lines) < n_read:
        raise ConfigError(f'{out_dir / "compare.csv"} would lose the lines that `where` does not '
                          f'keep; give another --out_dir')
    bins = {key_of(line): line.pop('bins') for line in lines if 'bins' in line}
    columns = list(dict.fromkeys(key for line in lines for key in line))
    asked = {*cfg.panel, *(cfg.by or ()), *((cfg.x,) if cfg.x else ()),
             *(rule.partition('=')[0] for rule in cfg.where)}
    require_columns(cfg, lines, columns)
    # settings that are the same in all runs of a kind say nothing
    kinds = {(line['kind'], line['task']) for line in lines}
    columns = [c for c in columns if c in (*FIXED, *KEPT, *asked, 'temperature')
               or c.startswith('reach')
               or len({(line['kind'], line['task'], line.get(c, '')) for line in lines})
               > len(kinds)]
    lines = [{c: line.get(c, '') for c in columns} for line in lines]
    drawn = pooled(lines, asked)
    x, by = choose_axes(drawn, cfg)
    cfg = replace(cfg, x=x, by=by)
    series, reference = group(drawn, cfg)
    table = seed_table(series, reference, cfg)
    write_text(out_dir / 'compare.csv', csv_text(lines))
    write_text(out_dir / 'compare.md', markdown(table))
    with warn_on_failure(out_dir / 'compare.png'):
        draw_series(out_dir / 'compare.png', series, reference, cfg)
    if cfg.reliability:
        for path in tables:
            bins |= read_bins(path.with_name('bins.csv'))
        draw_pooled(out_dir, series, reference, bins, cfg)
    print(f'{len(lines)} lines of {len({line["run"] for line in lines})} runs and '
          f'{len({line["seed"] for line in lines})} seeds; --x={cfg.x} --by={",".join(cfg.by)}\n\n'
          f'{aligned(table)}\n\nwrote compare.csv, compare.md and compare.png to {out_dir}')


def key_of(line):
    return tuple(str(line[key]) for key in FIXED)


def require_columns(cfg, lines, columns):
    """Raises ConfigError for an axis or a metric that no line has."""
    for name in (*cfg.panel, *(cfg.by or ()), *((cfg.x,) if cfg.x else ())):
        if name not in columns:
            raise ConfigError(f'there is no column {name!r}; the columns are {", ".join(columns)}')
    numeric = [c for c in columns if any(isinstance(line.get(c), float) for line in lines)]
    for name in cfg.metrics:
        if name not in numeric:
            raise ConfigError(f'there is no metric {name!r}; the metrics are {", ".join(numeric)}')


def kept(lines, where):
    """The lines that every rule 'column=value|value' of `where` keeps."""
    for rule in where:
        name, equals, values = rule.partition('=')
        if not equals or not any(name in line for line in lines):
            raise ConfigError(f'where: {rule!r}; wanted column=value|value, the columns are '
                              f'{", ".join(dict.fromkeys(c for x in lines for c in x))}')
        there = sorted({str(line.get(name, '')) for line in lines})
        lines = [line for line in lines if str(line.get(name, '')) in values.split('|')]
        if not lines:
            raise ConfigError(f'where: {rule!r} leaves no line; {name} is {", ".join(there)}')
    return lines


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


def read_lines(path):
    """The lines of a compare.csv over seeds, metrics as numbers."""
    lines = read_csv(path, FIXED)
    for number, line in lines:
        for key in line:
            if key in KEPT or key.startswith('reach_'):
                line[key] = to_number(line[key], path, number, key) if line[key] != '' else ''
    return [line for _, line in lines]


def read_csv(path, wanted):
    """[(line number, {column: text})] of a CSV file that has the columns `wanted`."""
    try:
        with open(path, encoding='utf-8', newline='') as text:
            reader = csv.DictReader(text, strict=True)
            columns = reader.fieldnames or ()
            lines = [(reader.line_num, line) for line in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f'cannot read {path}: {error}') from error
    if missing := sorted(set(wanted) - set(columns)):
        raise DataError(f'{path}: not written by a comparison over seeds; it lacks '
                        f'{", ".join(missing)}')
    if not lines:
        raise DataError(f'{path} has no lines below its header')
    for number, line in lines:
        if None in line or None in line.values():
            raise DataError(f'{path}:{number}: not as many cells as the header has')
    return lines


def to_number(text, path, number, column):
    try:
        return float(text)
    except ValueError:
        raise DataError(f'{path}:{number}: {column} = {text!r} is not a number') from None


def collect(runs):
    """Lines of every run: what it is, and its metrics by task, language, category and scaling."""
    cores = forked_processes()
    if cores > 1 and len(runs) > 4:
        with forked_pool(min(cores, 32)) as pool:
            found = pool.map(run_lines, runs, chunksize=1)
    else:
        found = [run_lines(run) for run in runs]
    return [line for lines in found for line in lines]


def run_lines(run):
    read_run_samples(run)
    name = run.folder.name
    first = {'run': name, 'kind': name.split('-')[0], 'seed': str(run.seed)}
    settings = {key: str(value) for key, value in run.settings.items()}
    reach = {}
    for key, value in run.reach.items():
        if key == 'unused_rows':
            settings[key] = str(value)
        else:
            reach[f'reach_{key}'] = float(f'{value:.5g}')
    lines = []
    for task, samples in run.samples.items():
        scored = settings | {'distribution': run.results[task]['distribution']}
        of_language, of_category = (
            [str(s.get(key) or 'all') for s in samples] for key in ('language', 'category'))
        for language, category in itertools.product({*of_language, 'all'}, {*of_category, 'all'}):
            rows = np.array([language in ('all', a) and category in ('all', b)
                             for a, b in zip(of_language, of_category, strict=True)])
            if not rows.any():
                continue
            for scaling, (all_rows, more) in scalings(run, task).items():
                report = all_rows.at(rows).report()
                lines.append(first | {'task': task, 'language': language, 'category': category,
                                      'scaling': scaling} | scored | reach | more
                             | {key: float(f'{report[key]:.5g}') for key in KEPT if key in report}
                             | {'bins': metrics.bins(*all_rows.at(rows)[:2])})
    return sorted(lines, key=key_of)


def scalings(run, task):
    """{scaling: (Predictions, columns)}: as they are, and by a temperature fitted on `held`."""
    norm = run.results[task]['norm']
    plain = predictions(run.samples[task], norm)
    found = {'none': (plain, {})}
    if run.held.get(task) and plain.scores is not None:
        held = predictions(run.held[task], norm)
        temperature = metrics.fit_temperature(held.scores, held.labels)
        found['temperature'] = (
            plain._replace(probs=metrics.softmax(plain.scores, temperature),
                           scores=plain.scores / temperature),
            {'temperature': f'{temperature:.5g}'})
    return found


# ------------------------------------------------------------------------------------------------
# Over seeds: groups, table and figure
# ------------------------------------------------------------------------------------------------

def choose_axes(lines, cfg):
    """(x, by): as given, else the columns in which runs of one seed differ, so that all are shown.

    The first such column is x, the others are `by`: settings first, then what was scored, then
    kind and run.
    """
    lines = [line for line in lines if line['kind'] not in cfg.reference]
    given = [*(cfg.by or ()), *((cfg.x,) if cfg.x else ())]
    settings = [c for c in lines[0] if c not in (*FIXED, *KEPT, 'temperature')
                and not c.startswith('reach')] if lines else []

    def cells(names):
        return len({tuple(line[name] for name in ('seed', *cfg.panel, *names)) for line in lines})
    chosen = []
    for name in (*settings, 'task', 'language', 'category', 'scaling', 'kind', 'run'):
        if cells([*given, *chosen, name]) > cells([*given, *chosen]):
            chosen.append(name)
    for name in chosen[::-1]:       # what later columns tell apart as well
        others = [c for c in chosen if c != name]
        if cells([*given, *others]) == cells([*given, *chosen]):
            chosen = others
    x = cfg.x or (chosen.pop(0) if chosen else 'kind')
    return x, tuple(chosen) if cfg.by is None else cfg.by


def group(lines, cfg):
    """({panel: {by: {x: {seed: line}}}}, {panel: {seed: line} of the reference})"""
    aside = [line for line in lines if line['kind'] in cfg.reference]
    if cfg.reference and not aside:
        raise ConfigError(f'reference = {cfg.reference}, but the kinds are '
                          f'{", ".join(sorted({line["kind"] for line in lines}))}')
    lines = [line for line in lines if line['kind'] not in cfg.reference]
    if not lines:
        raise ConfigError(f'reference = {cfg.reference} leaves no other run to compare with')
    named = (*cfg.panel, *cfg.by, cfg.x)

    def place(line, names):
        return tuple(line[name] for name in names)
    series, reference, width = {}, {}, len(cfg.panel)
    for found in itertools.product(*(ordered(name, lines, cfg.where) for name in named)):
        here = by_seed(line for line in lines if place(line, named) == found)
        if here:
            panel, by = found[:width], found[width:-1]
            series.setdefault(panel, {}).setdefault(by, {})[found[-1]] = here
    for panel in series:
        # a column of training, such as lr, says nothing of where a base model belongs
        reference[panel] = by_seed([x for x in aside if place(x, cfg.panel) == panel] or aside)
    return series, reference


def ordered(name, lines, where):
    """The values of a column: as `where` lists them, else by size, else as they come."""
    found = list(dict.fromkeys(line[name] for line in lines))
    rules = {rule.partition('=')[0]: rule.partition('=')[2].split('|') for rule in where}
    if name in rules:
        return sorted(found, key=rules[name].index)
    try:
        return sorted(found, key=lambda v: -math.inf if v in ('None', '') else float(v))
    except ValueError:
        return found


def by_seed(lines):
    """{seed: line}; raises ConfigError where two lines have the same seed."""
    found = {}
    for line in lines:
        other = found.setdefault(line['seed'], line)
        if other is not line:
            differ = [k for k in line if k not in KEPT and line[k] != other[k]]
            if not differ:
                raise ConfigError(f'two runs named {line["run"]} of seed {line["seed"]} have the '
                                  f'same settings; compare one of them')
            raise ConfigError(f'{other["run"]} and {line["run"]} of seed {line["seed"]} fall '
                              f'together; choose by --where, --by or --panel one of '
                              f'{", ".join(differ)}')
    return found


def reference_name(cfg):
    return cfg.reference[0] if len(cfg.reference) == 1 else 'reference' if cfg.reference else ''


def values_of(lines, metric):
    return {seed: line[metric] for seed, line in lines.items()
            if isinstance(line.get(metric), float) and math.isfinite(line[metric])}


def seed_table(series, reference, cfg):
    """Cells: mean and half of its 95 % interval, and the same of paired differences, with p.

    The differences are to the reference of the panel, and to the first x of the same line.
    """
    base = reference_name(cfg)
    firsts = {next(iter(of_x)) for of_by in series.values() for of_x in of_by.values()}
    first = f'the first {cfg.x}'
    if len(firsts) == 1:
        first = ('' if cfg.x in SELF_EVIDENT else f'{cfg.x} ') + firsts.pop()
    head = [*cfg.panel, *cfg.by, cfg.x, 'seeds']
    for metric in cfg.metrics:
        title = TITLES.get(metric, metric)
        term = f'({title})' if ' - ' in title else title
        head += [title, *(f'{term} minus that of {other}' for other in (base, first) if other)]
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
    mean, low, high = metrics.mean_interval(values)
    return f'{mean:{spec}} ± {(high - low) / 2:.3f}'


def paired(values, others):
    """'+0.031 ± 0.004, p 1e-05' of values - others over the seeds that both have."""
    d = [values[seed] - others[seed] for seed in values if seed in others]
    if len(d) < 2:
        return format(d[0], '+.3f') if d else ''
    return f'{plus_minus(d, "+.3f")}, p {metrics.student_t(d)[2]:.1g}'


def mean_and_ends(values):
    """(mean, low, high) to draw; of one or two seeds three times the mean.

    The interval of two is 13 standard errors to each side: it would hide the rest of a picture.
    """
    values = list(values)
    return metrics.mean_interval(values) if len(values) > 2 else [sum(values) / len(values)] * 3


def titled(names, values):
    """'lr 0.001, smoothing 0.1'; a task or a category says what it is by itself."""
    return ', '.join(v if n in SELF_EVIDENT else f'{SHORT.get(n, n)} {v}'
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
    colors = plt.get_cmap('viridis')(np.linspace(0, 0.85, len(bys)))
    for column, (panel, of_by) in enumerate(series.items()):
        for row, metric in enumerate(cfg.metrics):
            ax = axes[row, column]
            band = values_of(reference[panel], metric)
            if band:
                mean, low, high = mean_and_ends(band.values())
                ax.axhline(mean, color='black', linestyle='--', linewidth=1,
                           label=reference_name(cfg))
                ax.axhspan(low, high, color='black', alpha=0.1, linewidth=0)
            for k, (by, color) in enumerate(zip(bys, colors, strict=True)):
                points = [(xs.index(x), values_of(lines, metric).values())
                          for x, lines in of_by.get(by, {}).items()]
                points = [(at, mean_and_ends(values)) for at, values in points if values]
                if not points:
                    continue
                at = np.array([p for p, _ in points]) + 0.06 * (k - (len(bys) - 1) / 2)
                mean, low, high = np.array([v for _, v in points]).T
                ax.errorbar(at, mean, (mean - low, high - mean), marker='o', markersize=4,
                            linewidth=1.2, capsize=2, color=color,
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
            here = {key_of(line): bins.get(key_of(line)) for line in lines.values()}
            missing = [key for key, b in here.items() if b is None]
            if missing:
                raise DataError(f'no bins of {" ".join(missing[0])}: they are in the bins.csv '
                                f'beside a compare.csv that was made with --reliability')
            rows += [dict(zip(FIXED, key, strict=True)) | {
                'bin': i, 'count': int(b['count'][i]), 'confidence': f'{b["confidence"][i]:.5g}',
                'accuracy': f'{b["accuracy"][i]:.5g}'}
                for key, b in here.items() for i in range(len(b['count'])) if b['count'][i]]
            numbers = {name: np.mean([line[key] for line in lines.values()]) for name, key in (
                ('accuracy', 'accuracy'), ('confidence', 'confidence'), ('ECE', 'ece'))}
            panels.append((f'{titled(cfg.panel, panel)}: {title}', numbers,
                           pooled_bins(here.values())))
    write_text(out_dir / 'bins.csv', csv_text(rows))
    with warn_on_failure(out_dir / 'reliability.png'):
        draw_bins(out_dir / 'reliability.png', panels, columns=len(panels) // len(series))


def pooled_bins(several):
    """The bins of all questions behind `several` bins."""
    count = sum(b['count'] for b in several)
    found = {'count': count} | {key: sum(
        np.where(b['count'] > 0, b['count'] * b[key], 0) for b in several) / np.maximum(count, 1)
        for key in ('confidence', 'accuracy')}
    ends = [metrics.wilson_interval(np.ones(n), np.arange(n) < round(n * accuracy)) if n else
            (math.nan, math.nan) for n, accuracy in zip(count, found['accuracy'], strict=True)]
    return found | dict(zip(('low', 'high'), np.array(ends).T, strict=True))


def read_bins(path):
    """{key_of(line): bins} of a bins.csv"""
    if not path.exists():
        raise DataError(f'--reliability needs {path}, which was not made')
    found, keys = {}, ('count', 'confidence', 'accuracy')
    for number, row in read_csv(path, (*FIXED, 'bin', *keys)):
        b = found.setdefault(key_of(row), {
            'count': np.zeros(10, int), 'confidence': np.zeros(10), 'accuracy': np.zeros(10)})
        if row['bin'] not in map(str, range(10)):
            raise DataError(f'{path}:{number}: bin = {row["bin"]!r}; it must be 0 to 9')
        for key in keys:
            b[key][int(row['bin'])] = to_number(row[key], path, number, key)
    return found
