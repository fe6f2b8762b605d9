"""Several runs side by side: over the same questions, or over seeds.

    python evaluate.py --compare out/base out/sft out/ls01
    python evaluate.py --compare out/grid --where=language=en --x=smoothing --by=lr
    python evaluate.py --compare my_figure.py

Runs of one seed are compared over the questions that they answered: differences with a paired
bootstrap. Runs of several seeds are compared over the seeds: means with Student's interval, and
paired differences between runs of the same seed. A folder that is not a run stands for all runs
below it; an earlier compare.csv can replace the run folders.
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
import scaling
import stats
from configs import ConfigError, load_config, read_assignments, require_range
from data import DataError, forked_pool
from outdir import write_text
from report import (aligned, csv_text, draw_bins, draw_reliability, forked_processes, last_asked,
                    markdown, measure, predictions, read_samples, sample_order, save_figure,
                    split_languages, task_title, warn_on_failure)

# over questions: metric, title, and which is better: more (1), less (-1) or neither (0)
COMPARED = (('accuracy', 'accuracy', 1), ('entropy_bits', 'entropy (bits)', 0), ('ece', 'ECE', -1),
            ('rmsce', 'RMSCE', -1))
# over seeds: metric and title
TITLES = {'accuracy': 'accuracy', 'confidence': 'confidence', 'gap': 'confidence - accuracy',
          'entropy_bits': 'entropy (bits)', 'ece': 'ECE', 'rmsce': 'RMSCE',
          'rms_mmlu_repo': "RMS of MMLU's code", 'reach_lowest_bits': 'least entropy (bits)',
          'reach_highest_bits': 'most entropy (bits)',
          'brier': 'Brier', 'nll': 'NLL (nats)', 'auroc': 'AUROC', 'smooth_ece': 'smooth ECE'}
# the columns of a compare.csv over seeds: what names a line, the settings that differ, the metrics
NAMES = ('run', 'kind', 'seed', 'task', 'language', 'category', 'scaling')
METRICS = ('n', *(name for name in TITLES if not name.startswith('reach')))
# columns whose values say by themselves what they are, and short names of others for a figure
SELF_EVIDENT = ('task', 'category', 'kind', 'run')
SHORT = {'final_logit_softcapping': 'cap', 'hidden_size': 'D', 'unused_rows': 'unused'}
# keys of train_config.py that say where a run was and what it used, not what it is
PLACES = {'model', 'out_dir', 'overwrite', 'resume', 'seed', 'cache_dir', 'eval', 'eval_before',
          'shape', 'workers', 'device', 'dry_run', 'pictures'}


@dataclass
class CompareConfig:
    sources: tuple[str, ...] = ()             # folders and files, beside those named first
    norm: Literal['token', 'sum', 'char', 'byte'] | None = None     # None: as in the runs
    n_bootstrap: int = 1000                   # resamples of the questions; 0: no differences
    seed: int = 0                             # of the bootstrap
    out_dir: str = 'out/compare'
    # the following are for runs of several seeds
    # lines to keep, as 'column=value|value'. Columns: task, language ('all': pooled), category,
    # scaling ('none' or 'temperature'), run, kind ('tuned' for the run 'tuned-lr0.1'), seed, and
    # every setting of training or of the model that differs
    where: tuple[str, ...] = ()
    x: str | None = None                      # column along the axis; None: the first that differs
    by: tuple[str, ...] | None = None         # columns with a line for each value; None: the others
                                              # in which runs of one seed differ
    panel: tuple[str, ...] = ('task',)        # columns with a panel for each value
    metrics: tuple[str, ...] = ('ece', 'accuracy')
    reference: tuple[str, ...] = ()           # kinds drawn as a band, such as 'base'
    reliability: bool = False                 # also diagrams, of all seeds together


OVER_SEEDS = ('where', 'x', 'by', 'panel', 'metrics', 'reference', 'reliability')


def main(argv):
    named = [a for a in argv if not a.startswith('--')]
    config_files = [a for a in named if a.endswith('.py')]
    cfg = load_config(CompareConfig, config_files + [a for a in argv if a.startswith('--')])
    require_range(cfg, 0, math.inf, 'n_bootstrap', 'seed')
    sources = [Path(source).expanduser()
               for source in (*(a for a in named if a not in config_files), *cfg.sources)]
    tables = [source.resolve() for source in sources if source.suffix == '.csv']
    folders = find_runs([source for source in sources if source.suffix != '.csv'])
    if twice := [path for path in (*folders, *tables) if (*folders, *tables).count(path) > 1]:
        raise ConfigError(f'compare: {twice[0]} is named twice')
    if len(folders) + 2 * len(tables) < 2:
        raise ConfigError('compare needs two runs or more: name their folders, a folder that holds '
                          'them, or a compare.csv' + ''.join(f'; there is {f}' for f in folders))
    runs = [read_run(folder, cfg.norm) for folder in folders]
    out_dir = Path(cfg.out_dir).expanduser()
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f'out_dir = {cfg.out_dir}: {error.strerror}') from error
    if tables or len({run.seed for run in runs}) > 1 or any(
            getattr(cfg, key) != getattr(CompareConfig(), key) for key in OVER_SEEDS):
        compare_seeds(runs, tables, cfg, out_dir)
    else:
        compare_questions(runs, cfg, out_dir)


# ------------------------------------------------------------------------------------------------
# Runs
# ------------------------------------------------------------------------------------------------

@dataclass
class Run:
    """What the folder of a run says; `read_run_samples` adds its samples."""
    folder: Path
    model: str              # the name of the model that was tuned, or that was evaluated
    smoothing: str          # '' if it was not trained here
    seed: int
    reach: dict             # reach.json: the entropies that the output matrix can reach
    settings: dict          # of training, and the shape of the model
    results: dict           # {task: its entry in results.json}
    samples: dict = field(default_factory=dict)     # {task: [sample]}
    held_out: dict = field(default_factory=dict)    # {task: [sample of the validation split]}


def find_runs(sources):
    """Folders of runs: those named, or the runs below a folder that is not one."""
    folders = []
    for source in sources:
        if not source.is_dir():
            raise DataError(f'compare: {source} is not a folder' if source.exists() else
                            f'compare: there is no folder {source}')
        below = [source] if (source / 'results.json').exists() else sorted(
            path.parent for path in source.rglob('results.json')
            if path.parent.name != 'before' and (path.parent / 'samples.jsonl').exists())
        if not below:
            raise DataError(f'compare: {source} holds no run: neither it nor a folder below it has '
                            f'a results.json beside samples.jsonl; evaluate first')
        folders += [folder.resolve() for folder in below]
    return folders


def read_run(folder, norm=None):
    """The Run in `folder`: its results, and the configuration of its training and model."""
    if not (folder / 'samples.jsonl').exists():
        raise DataError(f'{folder} has no samples.jsonl: evaluate there first')
    path = folder / 'results.json'
    content = read_json(path)
    try:
        model, seed, results = str(content['config']['model']), content['seed'], content['tasks']
        if old := [task for task, result in results.items() if 'distribution' not in result]:
            raise DataError(f'{path} does not say how {old[0]} was scored: it is of an earlier '
                            f'version; evaluate again')
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f'{path}: not the results of evaluate.py: {error!r}') from error
    # the configuration of this run's training, or of the training of the model it evaluates
    trained = [p for p in (folder, Path(model)) if (p / 'train_config.py').exists()][:1]
    training, shape = {}, {}
    for place in trained:
        training = {key: value for key, (value, _) in
                    read_assignments(place / 'train_config.py').items()}
        shape = read_json(place / 'config.json') if (place / 'config.json').exists() else {}
    settings = {key: value for key, value in training.items() if key not in PLACES}
    if isinstance(settings.get('data'), str):
        settings['data'] = Path(settings['data']).stem
    settings |= {key: value for key, value in shape.items()
                 if isinstance(value, (int, float, str)) or key == 'final_logit_softcapping'}
    return Run(folder, Path(str(training.get('model') or model)).name,
               str(training.get('smoothing', '')), training.get('seed', seed),
               read_json(folder / 'reach.json') if (folder / 'reach.json').exists() else {},
               settings,
               {task: with_norm(result, norm) for task, result in results.items()})


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
    """A result as if its options were scored with `norm`; None, or no options: as it is."""
    if norm is None or 'mass' not in result:
        return result
    scored = result['distribution'].removesuffix(f', {result["norm"]}')
    return result | {'norm': norm, 'distribution': f'{scored}, {norm}'}


def read_run_samples(run):
    """Read the samples of the tasks in run.results into run.samples and run.held_out."""
    path = run.folder / 'samples.jsonl'
    for sample in last_asked(read_samples(path)):
        split = run.held_out if sample.get('split') == 'validation' else run.samples
        if sample['task'] in run.results:
            split.setdefault(sample['task'], []).append(sample)
    for task, result in run.results.items():
        n, samples = result.get('pooled', {}).get('n'), run.samples.get(task, [])
        if n != len(samples) or not samples:
            raise DataError(f'{path} has {len(samples)} samples of {task}, but results.json was '
                            f'made of {n}; evaluate there again, without --limit')
        samples.sort(key=sample_order)


# ------------------------------------------------------------------------------------------------
# Over questions
# ------------------------------------------------------------------------------------------------

def compare_questions(runs, cfg, out_dir):
    """Print the papers' table of several runs and write it to out_dir.

    For every task and language: accuracy, entropy, ECE and RMSCE of each run, the best one marked;
    then each run's difference to those before it, with a paired bootstrap over the questions that
    both answered, and Student's t over languages if there are several. Writes compare.md,
    compare.csv, and a reliability diagram of all runs for each task.
    """
    for run in runs:
        read_run_samples(run)
    names = label_runs([run.folder for run in runs])
    tasks = [task for task in runs[0].samples if all(task in run.samples for run in runs)]
    if not tasks:
        raise DataError('these runs have no task in common: ' + '; '.join(
            f'{name}: {", ".join(run.samples)}' for name, run in zip(names, runs, strict=True)))
    csv_lines, texts, parts = [], [], []
    answers = {task: answers_by_language(task, runs) for task in tasks}
    for task in tasks:
        reports = [{language: p.report() for language, (_, p) in of_run.items()}
                   for of_run in answers[task]]
        rows, lines = run_table(task, runs, names, reports)
        pairs = [['difference', 'over', 'questions', 'metric', 'mean', '95 % interval', 'p']]
        for i, j in itertools.combinations(range(len(runs)), 2):
            pairs += difference(f'{names[j]} - {names[i]}', *(answers[task][k] for k in (i, j)),
                                reports[i], reports[j], cfg)
        title = shared_title(task, runs, names)
        texts.append(f'\n{title}\n{aligned(rows)}\n(* the best)\n\n{aligned(pairs)}')
        parts.append(f'### {title}\n\n{markdown(rows)}\n\\* the best\n\n{markdown(pairs)}')
        csv_lines += lines
    write_text(out_dir / 'compare.md', '\n'.join(parts))
    write_text(out_dir / 'compare.csv', csv_text(csv_lines))
    for task in tasks:
        draw_reliability(out_dir / f'reliability-{task}.png',
                         [(name, of_run[None][1])
                          for name, of_run in zip(names, answers[task], strict=True)])
    for task in dict.fromkeys(task for run in runs for task in run.samples if task not in tasks):
        texts.append(f'\n{task} is left out: not every run has it')
    print(*texts, f'\nwrote compare.md, compare.csv and reliability-*.png to {out_dir}', sep='\n')


def label_runs(folders):
    """Short names of folders: the last part, or as many as tell them apart."""
    paths = [folder.parts for folder in folders]
    for n in range(1, max(map(len, paths)) + 1):
        names = ['/'.join(parts[-n:]) for parts in paths]
        if len(set(names)) == len(names):
            break
    return names


def shared_title(task, runs, names):
    """How a task was scored: once if all runs agree, else for each run."""
    titles = {task_title(task, run.results[task]) for run in runs}
    if len(titles) == 1:
        return titles.pop()
    return f'{task}: ' + ', '.join(task_title(name, run.results[task])
                                   for name, run in zip(names, runs, strict=True))


def answers_by_language(task, runs):
    """[{language, or None for all: (keys of the questions, Predictions)}] of the runs on a task.

    Languages are those that all runs have, if there are several.
    """
    by_language = [split_languages(run.samples[task]) for run in runs]
    languages = [x for x in by_language[0] if all(x in other for other in by_language)]
    answers = []
    for run, samples_of in zip(runs, by_language, strict=True):
        groups = {x: samples_of[x] for x in languages} if len(languages) > 1 else {}
        groups[None] = run.samples[task]
        answers.append({language: (list(map(question_key, samples)),
                                   predictions(samples, run.results[task]['norm']))
                        for language, samples in groups.items()})
    return answers


def question_key(sample):
    """Equal for the same question in two runs: with other options the same id is of another one."""
    return (*sample_order(sample)[2:], sample.get('answer', sample.get('token')),
            len(sample.get('options', ())))


def run_table(task, runs, names, reports):
    """(cells of the table of one task, header first; the same as lines of the CSV)"""
    cells = [['run', 'model', 'dataset', 'smoothing', 'language', 'questions',
              *(title for _, title, _ in COMPARED)]]
    lines = []
    for language in reports[0]:
        for name, run, of_run in zip(names, runs, reports, strict=True):
            line = {'run': name, 'model': run.model, 'dataset': task, 'smoothing': run.smoothing,
                    'language': 'pooled' if language is None else language}
            report, values = of_run[language], []
            for key, _, sign in COMPARED:
                best = sign and report.get(key, 0) * sign == max(
                    other[language].get(key, 0) * sign for other in reports)
                values.append(f'{report[key]:.3f}{" *" if best else "  "}'
                              if key in report else '')
            cells.append([*line.values(), str(report['n']), *values])
            lines.append(line | report)
    return cells, lines


def difference(name, first, other, first_reports, other_reports, cfg):
    """Rows of a table: other - first in each metric, over questions and over languages."""
    keys, a = first[None]
    other_keys, b = other[None]
    shared = set(keys) & set(other_keys)
    if len(shared) < 2:
        return [[name, 'questions', str(len(shared)), '', '', '', '']]
    a = a.at(np.array([key in shared for key in keys]))
    b = b.at(np.array([key in shared for key in other_keys]))
    # the same draws for both, since seed and number of questions are the same
    reports, resampled = measure({0: a, 1: b}, cfg.n_bootstrap, cfg.seed)
    rows = []
    for key, title, _ in COMPARED:
        if key in reports[0] and cfg.n_bootstrap:
            d = resampled[1][key] - resampled[0][key]
            low, high = np.percentile(d, (2.5, 97.5))
            p = min(1.0, 2 * (1 + min((d <= 0).sum(), (d >= 0).sum())) / (1 + len(d)))
            rows.append([name, 'questions', str(len(shared)), title,
                         f'{reports[1][key] - reports[0][key]:+.4f}', f'{low:+.4f} {high:+.4f}',
                         f'{p:.3f}'])
    languages = [language for language in first_reports if language is not None]
    for key, title, _ in COMPARED if languages else ():
        if key in first_reports[None]:
            mean, t, p = stats.student_t([other_reports[x][key] - first_reports[x][key]
                                          for x in languages])
            rows.append([name, f'{len(languages)} languages', '', title, f'{mean:+.4f}',
                         f't = {t:.2f}', f'{p:.2g}'])
    return rows


# ------------------------------------------------------------------------------------------------
# Over seeds: lines of a compare.csv, one for each run, task, language, category and scaling
# ------------------------------------------------------------------------------------------------

def compare_seeds(runs, tables, cfg, out_dir):
    """Print a table of means over seeds and write it to out_dir, with figures.

    Writes compare.csv (the lines that `where` keeps, from which the rest can be made again),
    compare.md, compare.png, and with `reliability` bins.csv and reliability.png.
    """
    all_lines = [line for table in tables for line in read_lines(table)] + measure_runs(runs)
    lines = apply_where(all_lines, cfg.where)
    if out_dir.resolve() / 'compare.csv' in tables and len(lines) < len(all_lines):
        raise ConfigError(f'{out_dir / "compare.csv"} would lose the lines that `where` does not '
                          f'keep; give another --out_dir')
    bins = {name_of(line): line.pop('bins') for line in lines if 'bins' in line}
    names = set(map(name_of, lines))
    if (tables or cfg.reliability) and len(names) < len(lines):
        raise ConfigError('compare: a run is there twice, with the same name, seed and task; with '
                          'a compare.csv or --reliability each has to have a name of its own')
    axes = [*cfg.panel, *(cfg.by or ()), *((cfg.x,) if cfg.x else ())]
    check_columns(axes, cfg.metrics, lines)
    named = {*axes, *(rule.partition('=')[0] for rule in cfg.where)}
    lines = drop_constant_settings(lines, named)
    pooled = pool_lines(lines, named)
    cfg = replace(cfg, **choose_axes(pooled, cfg))
    groups, reference = group_lines(pooled, cfg)
    table = seed_table(groups, reference, cfg)
    write_text(out_dir / 'compare.csv', csv_text(lines))
    write_text(out_dir / 'compare.md', markdown(table))
    with warn_on_failure(out_dir / 'compare.png'):
        draw_series(out_dir / 'compare.png', groups, reference, cfg)
    if cfg.reliability:
        for path in tables:
            bins |= read_bins(path.with_name('bins.csv'))
        draw_pooled(out_dir, groups, reference, bins, cfg)
    print(f'{len(lines)} lines of {len({line["run"] for line in lines})} runs and '
          f'{len({line["seed"] for line in lines})} seeds; --x={cfg.x} --by={",".join(cfg.by)}\n\n'
          f'{aligned(table)}\n\nwrote compare.csv, compare.md and compare.png to {out_dir}')


def name_of(line):
    return tuple(str(line[key]) for key in NAMES)


def columns_of(lines):
    return list(dict.fromkeys(column for line in lines for column in line))


def measure_runs(runs):
    """The lines of all runs; many runs are shared by processes."""
    cores = forked_processes()
    if cores > 1 and len(runs) > 4:
        with forked_pool(min(cores, 32)) as pool:
            return list(itertools.chain(*pool.map(run_lines, runs, chunksize=1)))
    return list(itertools.chain(*map(run_lines, runs)))


def run_lines(run):
    """The lines of a run: its names, settings and metrics, and its 'bins' as metrics.bins."""
    read_run_samples(run)
    common = {'run': run.folder.name, 'kind': run.folder.name.split('-')[0],
              'seed': str(run.seed)}
    settings = {key: str(value) for key, value in run.settings.items()}
    settings |= {key: str(value) for key, value in run.reach.items() if key == 'unused_rows'}
    reach = {f'reach_{key}': float(f'{value:.5g}') for key, value in run.reach.items()
             if key != 'unused_rows'}
    lines = []
    for task, samples in run.samples.items():
        how = settings | {'distribution': run.results[task]['distribution']} | reach
        languages, categories = (np.array([str(s.get(key) or 'all') for s in samples])
                                 for key in ('language', 'category'))
        scaled = scale(run, task)
        for language, category in itertools.product({*languages, 'all'}, {*categories, 'all'}):
            rows = ((languages == language) | (language == 'all')) & (
                (categories == category) | (category == 'all'))
            if not rows.any():
                continue
            for name, (of_all, temperature) in scaled.items():
                report = of_all.at(rows).report()
                lines.append(common | {'task': task, 'language': language, 'category': category,
                                       'scaling': name} | how | temperature
                             | {key: float(f'{report[key]:.5g}') for key in METRICS
                                if key in report}
                             | {'bins': metrics.bins(*of_all.at(rows)[:2])})
    return sorted(lines, key=name_of)


def scale(run, task):
    """{scaling: (Predictions, columns)}: as they are, and by a temperature fitted on held_out."""
    norm = run.results[task]['norm']
    plain = predictions(run.samples[task], norm)
    scaled = {'none': (plain, {})}
    if task in run.held_out and plain.scores is not None:
        held_out = predictions(run.held_out[task], norm)
        temperature = scaling.fit_temperature(held_out.scores, held_out.labels)
        scores = plain.scores / temperature
        scaled['temperature'] = (plain._replace(probs=metrics.softmax(scores), scores=scores),
                                 {'temperature': f'{temperature:.5g}'})
    return scaled


def read_lines(path):
    """The lines of a compare.csv over seeds, metrics as numbers."""
    lines = []
    for number, line in read_csv(path, NAMES):
        for key in line:
            if (key in METRICS or key.startswith('reach_')) and line[key] != '':
                line[key] = to_number(line[key], path, number, key)
        lines.append(line)
    return lines


def read_csv(path, required):
    """[(line number, {column: text})] of a CSV file that has the `required` columns."""
    try:
        with open(path, encoding='utf-8', newline='') as text:
            reader = csv.DictReader(text, strict=True)
            columns = reader.fieldnames or ()
            lines = [(reader.line_num, line) for line in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f'cannot read {path}: {error}') from error
    if missing := sorted(set(required) - set(columns)):
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


# ------------------------------------------------------------------------------------------------
# Over seeds: which lines, and along which axes
# ------------------------------------------------------------------------------------------------

def apply_where(lines, where):
    """The lines that every rule 'column=value|value' keeps."""
    for rule in where:
        name, equals, values = rule.partition('=')
        if not equals or name not in columns_of(lines):
            raise ConfigError(f'where: {rule!r}; wanted column=value|value, the columns are '
                              f'{", ".join(columns_of(lines))}')
        present = sorted({str(line.get(name, '')) for line in lines})
        lines = [line for line in lines if str(line.get(name, '')) in values.split('|')]
        if not lines:
            raise ConfigError(f'where: {rule!r} leaves no line; {name} is {", ".join(present)}')
    return lines


def check_columns(axes, metric_names, lines):
    """Raise ConfigError for an axis or a metric that the lines do not have."""
    columns = columns_of(lines)
    numeric = [c for c in columns if any(isinstance(line.get(c), float) for line in lines)]
    for name in axes:
        if name not in columns or name in numeric:
            raise ConfigError(f'there is no column {name!r} to compare by; the columns are '
                              f'{", ".join(c for c in columns if c not in numeric)}')
        if axes.count(name) > 1:
            raise ConfigError(f'the column {name} is named twice in panel, by and x')
    for name in metric_names or ('',):
        if name not in numeric:
            raise ConfigError(f'there is no metric {name!r}; the metrics are {", ".join(numeric)}')


def drop_constant_settings(lines, named):
    """The lines without settings that no two runs of a kind differ in, except those `named`."""
    def differs(column):
        values = {(line['kind'], line['task'], line.get(column, '')) for line in lines}
        return len(values) > len({value[:2] for value in values})
    columns = [column for column in columns_of(lines)
               if column in (*NAMES, *METRICS, *named, 'temperature')
               or column.startswith('reach') or differs(column)]
    return [{column: line.get(column, '') for column in columns} for line in lines]


def pool_lines(lines, named):
    """The unscaled lines over all languages and categories, except in the columns that are `named`.

    A task that has one language alone, for example, is shown in that.
    """
    for column, usual in (('language', 'all'), ('category', 'all'), ('scaling', 'none')):
        if column in named:
            continue
        values_of_task = {}
        for line in lines:
            values_of_task.setdefault(line['task'], set()).add(line[column])
        for task, values in values_of_task.items():
            if len(values) > 1 and usual not in values:
                raise ConfigError(f'where: no line of {task} has {column}={usual}; choose '
                                  f'{column}={"|".join(sorted(values))}')
        lines = [line for line in lines
                 if line[column] == usual or len(values_of_task[line['task']]) == 1]
    return lines


def choose_axes(lines, cfg):
    """{'x', 'by'}: as given, else the columns in which runs of one seed differ: all runs are shown.

    The first such column is x, the others are `by`: settings first, then what was scored, then
    kind and run.
    """
    lines = [line for line in lines if line['kind'] not in cfg.reference]
    given = [*cfg.panel, *(cfg.by or ()), *((cfg.x,) if cfg.x else ())]

    def n_groups(columns):
        return len({tuple(line[column] for column in ('seed', *given, *columns))
                    for line in lines})
    settings = [column for column in columns_of(lines)
                if column not in (*NAMES, *METRICS, 'temperature')
                and not column.startswith('reach')]
    chosen = []
    for column in (*settings, 'task', 'language', 'category', 'scaling', 'kind', 'run'):
        if n_groups([*chosen, column]) > n_groups(chosen):
            chosen.append(column)
    for column in chosen[::-1]:       # a later column may tell apart what an earlier one does
        others = [other for other in chosen if other != column]
        if n_groups(others) == n_groups(chosen):
            chosen = others
    x = cfg.x or (chosen.pop(0) if chosen else 'kind')
    return {'x': x, 'by': tuple(chosen) if cfg.by is None else cfg.by}


def group_lines(lines, cfg):
    """({(panel, by, x): {seed: line}} in the order to show, {panel: {seed: line} of reference})"""
    aside = [line for line in lines if line['kind'] in cfg.reference]
    if cfg.reference and not aside:
        raise ConfigError(f'reference = {cfg.reference}, but the kinds are '
                          f'{", ".join(sorted({line["kind"] for line in lines}))}')
    lines = [line for line in lines if line['kind'] not in cfg.reference]
    if not lines:
        raise ConfigError(f'reference = {cfg.reference} leaves no other run to compare with')

    def values(line, columns):
        return tuple(line[column] for column in columns)
    groups, axes = {}, (*cfg.panel, *cfg.by, cfg.x)
    for place in itertools.product(*(ordered(column, lines, cfg.where) for column in axes)):
        if here := by_seed(line for line in lines if values(line, axes) == place):
            width = len(cfg.panel)
            groups[place[:width], place[width:-1], place[-1]] = here
    # a panel of another column of training, such as lr, has no base model of its own
    reference = {panel: by_seed([line for line in aside if values(line, cfg.panel) == panel]
                                or aside) for panel, _, _ in groups}
    return groups, reference


def ordered(column, lines, where):
    """The values of a column: as `where` lists them, else by size, else as they come."""
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
    """{seed: line}; raises ConfigError if two lines have the same seed."""
    of_seed = {}
    for line in lines:
        other = of_seed.setdefault(line['seed'], line)
        if other is line:
            continue
        differ = [k for k in line if k not in METRICS and line[k] != other[k]]
        if not differ:
            raise ConfigError(f'two runs named {line["run"]} of seed {line["seed"]} have the same '
                              f'settings; compare one of them')
        raise ConfigError(f'{other["run"]} and {line["run"]} of seed {line["seed"]} fall together; '
                          f'choose by --where, --by or --panel one of {", ".join(differ)}')
    return of_seed


# ------------------------------------------------------------------------------------------------
# Over seeds: table and figures
# ------------------------------------------------------------------------------------------------

def reference_name(cfg):
    return cfg.reference[0] if len(cfg.reference) == 1 else 'reference' if cfg.reference else ''


def values_of(lines, metric):
    """{seed: value} of a metric, where it is defined."""
    return {seed: line[metric] for seed, line in lines.items()
            if isinstance(line.get(metric), float) and math.isfinite(line[metric])}


def seed_table(groups, reference, cfg):
    """Cells: mean ± half of its 95 % interval, and the same of paired differences, with p.

    The differences are to the reference of the panel, and to the first x of the same line.
    """
    base, first_x = reference_name(cfg), {}
    for panel, by, x in groups:
        first_x.setdefault((panel, by), x)
    first = f'the first {cfg.x}'
    if len(set(first_x.values())) == 1:
        first = ('' if cfg.x in SELF_EVIDENT else f'{cfg.x} ') + next(iter(first_x.values()))
    head = [*cfg.panel, *cfg.by, cfg.x, 'seeds']
    for metric in cfg.metrics:
        title = TITLES.get(metric, metric)
        term = f'({title})' if ' - ' in title else title
        head += [title, *(f'{term} minus that of {other}' for other in (base, first) if other)]
    table = [head]
    for panel in dict.fromkeys(panel for panel, _, _ in groups):
        rows = [((base,) * len(cfg.by), base, reference[panel], None)] if reference[panel] else []
        rows += [(by, x, lines, groups[panel, by, first_x[panel, by]])
                 for (of_panel, by, x), lines in groups.items() if of_panel == panel]
        for by, x, lines, first_lines in rows:
            cells = [*panel, *by, x, str(len(lines))]
            for metric in cfg.metrics:
                values = values_of(lines, metric)
                cells.append(plus_minus(values.values(), '.3f'))
                cells += ['' if other is None or other is lines else
                          paired(values, values_of(other, metric))
                          for other in (*((reference[panel],) if base else ()), first_lines)]
            table.append(cells)
    return table


def plus_minus(values, spec):
    """'0.101 ± 0.020': the mean and half of its 95 % interval."""
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
    """(mean, low, high) to draw; with one or two seeds the mean is all three.

    The interval of two seeds is 13 standard errors to each side: it would hide the rest.
    """
    values = list(values)
    return stats.mean_interval(values) if len(values) > 2 else [sum(values) / len(values)] * 3


def titled(columns, values):
    """'lr 0.001, smoothing 0.1'; a task or a category says what it is by itself."""
    return ', '.join(value if column in SELF_EVIDENT else f'{SHORT.get(column, column)} {value}'
                     for column, value in zip(columns, values, strict=True))


def draw_series(path, groups, reference, cfg):
    """Draw means over seeds with their 95 % intervals: a row a metric, a column a panel."""
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    panels, lines_by = (list(dict.fromkeys(key[i] for key in groups)) for i in (0, 1))
    xs = ordered(cfg.x, [line for lines in groups.values() for line in lines.values()], cfg.where)
    figure, axes = plt.subplots(
        len(cfg.metrics), len(panels), squeeze=False, sharex=True, sharey='row',
        figsize=(max(3.0 * len(panels), 4.5), 2.6 * len(cfg.metrics) + 0.5), layout='constrained')
    colors = plt.get_cmap('viridis')(np.linspace(0, 0.85, len(lines_by)))
    step = min(0.06, 0.6 / len(lines_by))     # between the points of one x
    for (row, metric), (column, panel) in itertools.product(enumerate(cfg.metrics),
                                                            enumerate(panels)):
        ax = axes[row, column]
        if band := values_of(reference[panel], metric):
            mean, low, high = mean_and_ends(band.values())
            ax.axhline(mean, color='black', linestyle='--', linewidth=1, label=reference_name(cfg))
            ax.axhspan(low, high, color='black', alpha=0.1, linewidth=0)
        for k, (by, color) in enumerate(zip(lines_by, colors, strict=True)):
            points = [(i, values_of(groups.get((panel, by, x), {}), metric).values())
                      for i, x in enumerate(xs)]
            points = [(i, *mean_and_ends(values)) for i, values in points if values]
            if points:
                i, mean, low, high = np.array(points).T
                ax.errorbar(i + step * (k - (len(lines_by) - 1) / 2), mean,
                            (mean - low, high - mean), marker='o', markersize=4, linewidth=1.2,
                            capsize=2, color=color, label=titled(cfg.by, by) or None)
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
        n_columns = max(1, min(len(entries), int(figure.get_figwidth() / width)))
        figure.set_figheight(figure.get_figheight() + 0.2 * (len(entries) // n_columns))
        figure.legend(entries.values(), entries, loc='outside lower center', frameon=False,
                      fontsize=9, ncols=n_columns)
    save_figure(figure, path, 110)


def draw_pooled(out_dir, groups, reference, bins, cfg):
    """Draw reliability.png, the questions of all seeds together, and write bins.csv behind it."""
    diagrams, rows = [], []
    panels = list(dict.fromkeys(panel for panel, _, _ in groups))
    for panel in panels:
        shown = [('', reference[panel])] if reference[panel] else []
        shown += [(f', {titled((*cfg.by, cfg.x), (*by, x))}', lines)
                  for (of_panel, by, x), lines in groups.items() if of_panel == panel]
        for title, lines in shown:
            lines = list(lines.values())
            for name in map(name_of, lines):
                if name not in bins:
                    raise DataError(f'no bins of {" ".join(name)}: they are in the bins.csv beside '
                                    f'a compare.csv that was made with --reliability')
                rows += bin_rows(name, bins[name])
            diagrams.append((f'{titled(cfg.panel, panel)}: {lines[0]["kind"]}{title}',
                             {name: np.mean([line[name.lower()] for line in lines])
                              for name in ('accuracy', 'confidence', 'ECE')},
                             pool_bins([bins[name_of(line)] for line in lines])))
    write_text(out_dir / 'bins.csv', csv_text(rows))
    with warn_on_failure(out_dir / 'reliability.png'):
        draw_bins(out_dir / 'reliability.png', diagrams,
                  columns=min(6, len(diagrams) // len(panels)))


BIN_KEYS = ('count', 'confidence', 'accuracy')


def bin_rows(name, bins):
    """Lines of bins.csv: the bins that hold a question."""
    return [dict(zip(NAMES, name, strict=True)) | {
        'bin': i, 'count': int(bins['count'][i]), 'confidence': f'{bins["confidence"][i]:.5g}',
        'accuracy': f'{bins["accuracy"][i]:.5g}'} for i in np.flatnonzero(bins['count'])]


def pool_bins(several):
    """The bins of all questions behind `several` bins, as metrics.bins returns them."""
    count = sum(bins['count'] for bins in several)
    pooled = {'count': count} | {key: sum(
        np.where(bins['count'] > 0, bins['count'] * bins[key], 0) for bins in several)
        / np.maximum(count, 1) for key in ('confidence', 'accuracy')}
    ends = [metrics.wilson_interval(np.ones(n), np.arange(n) < round(n * accuracy)) if n else
            (math.nan, math.nan) for n, accuracy in zip(count, pooled['accuracy'], strict=True)]
    return pooled | dict(zip(('low', 'high'), np.array(ends).T, strict=True))


def read_bins(path):
    """{name_of(line): bins} of a bins.csv"""
    if not path.exists():
        raise DataError(f'--reliability needs {path}, which was not made')
    bins = {}
    for number, row in read_csv(path, (*NAMES, 'bin', *BIN_KEYS)):
        if row['bin'] not in map(str, range(10)):
            raise DataError(f'{path}:{number}: bin = {row["bin"]!r}; it must be 0 to 9')
        of_line = bins.setdefault(name_of(row), {
            'count': np.zeros(10, int), 'confidence': np.zeros(10), 'accuracy': np.zeros(10)})
        for key in BIN_KEYS:
            of_line[key][int(row['bin'])] = to_number(row[key], path, number, key)
    return bins
