"""Several runs side by side: over the same questions, or over seeds.

    python evaluate.py --compare out/base out/sft out/ls01
    python evaluate.py --compare out/grid --where=language=en --x=smoothing --by=lr
    python evaluate.py --compare my_figure.py

Runs of one seed are compared over the questions that they answered: differences with a paired
bootstrap. Runs of several seeds are compared over the seeds: means with Student's interval, and
paired differences between runs of the same seed. A folder that is not a run stands for all runs
below it; an earlier compare.csv can replace the run folders. What lm-evaluation-harness wrote with
--log_samples is a run as well: the folder of a model, or its files samples_<task>_<date>.jsonl.
"""

import itertools
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

import harness
import metrics
import scaling
import stats
from configs import ConfigError, load_config, read_assignments, require_range
from data import DataError, read_rows, writing
from outdir import claim, read_json, write_text
from report import (aligned, csv_text, draw_reliability, interval_text, last_asked, latex,
                    mark_best, markdown, measure, panel_title, parallel_map, predictions,
                    read_samples, sample_order, save_figure, task_title, warn_on_failure)

TITLES = {'accuracy': 'accuracy', 'confidence': 'confidence', 'gap': 'confidence - accuracy',
          'entropy_bits': 'entropy (bits)', 'ece': 'ECE', 'rmsce': 'RMSCE',
          'rms_mmlu_repo': "RMS of MMLU's code", 'reach_lowest_bits': 'least entropy (bits)',
          'reach_highest_bits': 'most entropy (bits)',
          'brier': 'Brier', 'nll': 'NLL (nats)', 'auroc': 'AUROC', 'smooth_ece': 'smooth ECE'}
# over questions: which is better, more (1), less (-1) or neither (0)
COMPARED = {'accuracy': 1, 'entropy_bits': 0, 'ece': -1, 'rmsce': -1}
# the columns of a compare.csv over seeds: what names a line, the settings that differ, the metrics
NAMES = ('run', 'kind', 'seed', 'task', 'language', 'category', 'scaling')
METRICS = ('n', *TITLES)
# columns whose values are clear without the column's name; short names of others for figures
SELF_EVIDENT = ('task', 'category', 'kind', 'run')
SHORT_NAMES = {'final_logit_softcapping': 'cap', 'hidden_size': 'D', 'unused_rows': 'unused'}
# keys of train_config.py that do not distinguish runs: places, files and devices
PLACES = {'model', 'out_dir', 'overwrite', 'resume', 'seed', 'cache_dir', 'eval', 'eval_before',
          'shape', 'workers', 'device', 'dry_run', 'pictures'}


@dataclass
class CompareConfig:
    sources: tuple[str, ...] = ()             # more folders and files
    n_bootstrap: int = 1000                   # resamples of the questions; 0: no differences
    seed: int = 0                             # of the bootstrap
    out_dir: str = 'out/compare'
    ensemble: bool = False                    # one more row: the mean of the runs' probabilities
    # of files of lm-evaluation-harness, what divides a log-probability; sum: nothing, as for acc;
    # char: the characters of the option, as for acc_norm; byte: its bytes
    norm: Literal['sum', 'char', 'byte'] = 'sum'
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


def main(argv):
    settings = [a for a in argv if a.startswith('--') or a.endswith('.py')]
    cfg = load_config(CompareConfig, sorted(settings, key=lambda a: a.startswith('--')))
    require_range(cfg, 0, math.inf, 'n_bootstrap', 'seed')
    sources = [Path(os.path.expanduser(source))
               for source in (*(a for a in argv if a not in settings), *cfg.sources)]
    tables = [source.resolve() for source in sources if source.suffix == '.csv']
    of_harness = harness.find_files([s for s in sources if not (s / 'results.json').exists()])
    folders = find_runs([source for source in sources if source.suffix != '.csv'],
                        [file for files in of_harness.values() for file in files.values()])
    if twice := [path for path in (*folders, *tables) if (*folders, *tables).count(path) > 1]:
        raise ConfigError(f'compare: {twice[0]} is named twice')
    if len(folders) + len(of_harness) + 2 * len(tables) < 2:
        raise ConfigError('compare needs two runs or more: name their folders, a folder that holds '
                          'them, or a compare.csv' + ''.join(
                              f'; there is {run}' for run in (*folders, *of_harness)))
    runs = [read_run(folder) for folder in folders]
    runs += [harness_run(folder, files, cfg.norm) for folder, files in of_harness.items()]
    out_dir = Path(os.path.expanduser(cfg.out_dir))
    with writing(f'into out_dir = {out_dir}'):
        out_dir.mkdir(parents=True, exist_ok=True)
        claim(out_dir, 'compare.tex')
    # the settings of a comparison over questions; those below out_dir are for several seeds
    over_questions = CompareConfig(cfg.sources, cfg.n_bootstrap, cfg.seed, cfg.out_dir,
                                   cfg.ensemble, cfg.norm)
    over_seeds = tables or cfg != over_questions
    if cfg.ensemble and over_seeds:
        raise ConfigError('ensemble averages runs over their questions: name their folders, and '
                          'leave out compare.csv and the settings for several seeds, from where on')
    if over_seeds or len({run.seed for run in runs}) > 1 and not cfg.ensemble:
        compare_seeds(runs, tables, cfg, out_dir)
    else:
        compare_questions(runs, cfg, out_dir)


# Runs


@dataclass
class Run:
    """The content of the folder of a run, except the samples that evaluate.py wrote."""
    folder: Path
    model: str              # the name of the model that was tuned, or that was evaluated
    seed: int
    settings: dict          # {name: text}, of training and the shape of the model
    reach: dict             # the entropies that the output matrix can reach
    results: dict           # {task: its entry in results.json}
    of_harness: dict | None = None      # {task: samples} of lm-evaluation-harness


def find_runs(sources, harness_files=()):
    """Return the folders of runs: those named, or the runs below a folder that is not one.

    Raises DataError for a source that holds none, nor one of `harness_files`.
    """
    folders = []
    for source in sources:
        below = [source] if (source / 'results.json').exists() else [
            path.parent for path in sorted(source.rglob('samples.jsonl'))
            if path.with_name('results.json').exists() and path.parent.name != 'before']
        if not below and not any(source.absolute() in (file, *file.parents)
                                 for file in harness_files):
            raise DataError(f'compare: {source} holds no run: ' + (
                'neither it nor a folder below it has a results.json beside samples.jsonl, or '
                'samples_*.jsonl of lm_eval; evaluate first' if source.is_dir() else
                'there is no such folder'))
        folders += [folder.resolve() for folder in below]
    return folders


def read_run(folder):
    """Return the Run in `folder`: its results, and the configuration of training and model."""
    if not (folder / 'samples.jsonl').exists():
        raise DataError(f'{folder} has no samples.jsonl: evaluate there first')
    with read_json(folder / 'results.json', 'evaluate there again') as content:
        model, seed, results = content['config']['model'], content['seed'], content['tasks']
        for result in results.values():
            result['distribution'], result['norm'], result['pooled']['n']
    # the configuration of this run's training, or of the training of the model it evaluates
    home = next((p for p in (folder, Path(model)) if (p / 'train_config.py').exists()), None)
    training = {key: value for key, (value, _) in
                (read_assignments(home / 'train_config.py') if home else {}).items()}
    settings = {key: value for key, value in training.items() if key not in PLACES}
    if isinstance(settings.get('data'), str):
        settings['data'] = Path(settings['data']).stem
    if home and (home / 'config.json').exists():
        with read_json(home / 'config.json', 'restore it, or train again') as shape:
            settings |= {key: value for key, value in shape.items()
                         if isinstance(value, (int, float, str))
                         or key == 'final_logit_softcapping'}
    reach = {}
    if (folder / 'reach.json').exists():        # of study/reach.py
        with read_json(folder / 'reach.json', 'remove it') as content:
            settings['unused_rows'] = content.pop('unused_rows', 0)
            reach = {f'reach_{key}': float(f'{value:.5g}') for key, value in content.items()}
    return Run(folder, Path(str(training.get('model') or model)).name, training.get('seed', seed),
               {key: str(value) for key, value in settings.items()}, reach, results)


def harness_run(folder, files, norm):
    """Return the Run of {subtask: file} of lm-evaluation-harness; `norm` as in CompareConfig."""
    tasks = harness.read_run(files, norm)
    # the lengths that `norm` names are in n_tokens
    results = {task: {'distribution': f'lm-evaluation-harness, {norm}', 'norm': 'token'}
               for task in tasks}
    return Run(folder, folder.name, 0, {}, {}, results, tasks)


def read_run_samples(run):
    """Return ({task: samples}, {task: samples of the validation split}) of a run's results."""
    if run.of_harness:
        return run.of_harness, {}
    path, test, held_out = run.folder / 'samples.jsonl', {}, {}
    for sample in sorted(last_asked(read_samples(path)), key=sample_order):
        split = held_out if sample.get('split') == 'validation' else test
        split.setdefault(sample['task'], []).append(sample)
    for task, result in run.results.items():
        n, n_samples = result['pooled']['n'], len(test.get(task, ()))
        if n != n_samples:
            raise DataError(f'{path} has {n_samples} samples of {task}, but results.json was made '
                            f'of {n}; evaluate there again, without --limit')
    return {task: test[task] for task in run.results}, held_out


# Over questions


def compare_questions(runs, cfg, out_dir):
    """Print the papers' table of several runs and write it to out_dir.

    For every task and language: accuracy, entropy, ECE and RMSCE of each run, the best one marked;
    then each run's difference to those before it, with a paired bootstrap over the questions that
    both answered, and Student's t over languages if there are several. Writes compare.md, .csv and
    .tex, and a reliability diagram of all runs for each task.
    """
    runs = dict(zip(label_runs([run.folder for run in runs]), runs, strict=True))
    all_samples = {name: read_run_samples(run)[0] for name, run in runs.items()}
    all_tasks = dict.fromkeys(task for of_run in all_samples.values() for task in of_run)
    tasks = [task for task in all_tasks if all(task in x for x in all_samples.values())]
    if not tasks:
        raise DataError('these runs have no task in common: ' + '; '.join(
            f'{name}: {", ".join(of_run)}' for name, of_run in all_samples.items()))
    all_lines, texts, parts, tex, diagrams = [], [], [], [], {}
    for task in tasks:
        samples = {name: of_run[task] for name, of_run in all_samples.items()}
        shown = dict(runs)
        if cfg.ensemble:
            name, averaged = f'ensemble of {len(runs)}', average_runs(task, runs, samples)
            if isinstance(averaged, str):
                texts.append(f'\n{task} has no ensemble: {averaged}')
            else:
                shown[name], samples[name] = averaged
        answers = {name: predictions(samples[name], run.results[task]['norm'])
                   for name, run in shown.items()}
        diagrams[task] = [(panel_title(name, shown[name].results[task]), p)
                          for name, p in answers.items()]
        reports = reports_by_language(samples, answers)
        table, lines = question_table(task, shown, reports)
        differences = [['difference', 'over', 'questions', 'metric', 'mean', '95 % interval', 'p']]
        for pair in itertools.combinations(shown, 2):
            differences += difference(*pair, samples, answers, reports, cfg)
        titles = {task_title(task, run.results[task]) for run in runs.values()}
        title = titles.pop() if len(titles) == 1 else f'{task}: ' + ', '.join(
            task_title(name, run.results[task]) for name, run in runs.items())
        texts.append(f'\n{title}\n{aligned(table)}\n(* the best)\n\n{aligned(differences)}')
        parts.append(f'### {title}\n\n{markdown(table)}\n\\* the best\n\n{markdown(differences)}')
        with_intervals, _ = question_table(task, shown, reports, intervals=True)
        tex += [latex(with_intervals, title), latex(differences)]
        all_lines += lines
    write_text(out_dir / 'compare.md', '\n'.join(parts))
    write_text(out_dir / 'compare.tex', '\n'.join(tex))
    write_text(out_dir / 'compare.csv', csv_text(all_lines))
    for task, panels in diagrams.items():
        draw_reliability(out_dir / f'reliability-{task}.png', panels)
    texts += [f'\n{task} is left out: not every run has it'
              for task in all_tasks if task not in tasks]
    print(*texts, f'\nwrote compare.md, .csv, .tex and reliability-*.png to {out_dir}', sep='\n')


def label_runs(folders):
    """Return the last part of each path, or as many parts as make them unique."""
    labels = (['/'.join(folder.parts[-n:]) for folder in folders] for n in itertools.count(1))
    return next(names for names in labels if len(set(names)) == len(names))


def average_runs(task, runs, samples):
    """Return (Run, its samples) of the mean of the runs' probabilities, or why there is none.

    Of the questions that all runs answered, with the same options. The log-probabilities of the
    samples are the logarithms of the mean, so their norm is 'sum'.
    """
    of_runs = []
    for name, run in runs.items():
        if 'log_probs' not in samples[name][0]:
            return ('its samples hold the probability of one token or answer of each run, not a '
                    'distribution that could be averaged')
        scores = predictions(samples[name], run.results[task]['norm']).scores
        log_probs = scores - np.logaddexp.reduce(scores, axis=1, keepdims=True)
        of_runs.append({(*sample_order(s)[1:], s['answer'], *s['options']):
                        row[:len(s['options'])] for s, row in zip(samples[name], log_probs)})
    first, *others = runs.values()
    averaged = []
    for key, sample in zip(of_runs[0], samples[next(iter(runs))], strict=True):
        if all(key in of_run for of_run in of_runs):
            mean = np.logaddexp.reduce([of_run[key] for of_run in of_runs]) - np.log(len(runs))
            averaged.append(sample | {'log_probs': mean.tolist(), 'n_tokens': [1] * len(mean)})
    if not averaged:
        return 'no question with the same answer and options is in all runs'
    shared = dict(set(first.settings.items()).intersection(*(x.settings.items() for x in others)))
    model = first.model if all(run.model == first.model for run in others) else ''
    sample = {key: value for run in runs.values() for key, value in run.results[task].items()
              if key == 'sample'}
    return Run(None, model, first.seed, shared, {}, {task: {'norm': 'sum'} | sample}), averaged


def reports_by_language(samples, answers):
    """Return {run: {language: report}}: 'pooled', and each language if all runs share several."""
    languages = {name: np.array([s.get('language', '') for s in of_run])
                 for name, of_run in samples.items()}
    shared = sorted(set.intersection(*(set(x.tolist()) for x in languages.values())))
    return {name: {x: p.at(languages[name] == x).report() for x in shared if len(shared) > 1}
            | {'pooled': p.report()} for name, p in answers.items()}


def question_table(task, runs, reports, intervals=False):
    """Return (cells of one task's table, the best marked with a star; the lines of its CSV).

    intervals: with those that results.json has, behind the metrics
    """
    losses = {run.settings.get('loss') for run in runs.values()}
    shown = ('loss', 'smoothing') if len(losses) > 1 else ('smoothing',)
    table, lines = [], []
    for language in next(iter(reports.values())):
        best = {metric: max(sign * of_run[language][metric] for of_run in reports.values())
                for metric, sign in COMPARED.items()}
        for name, run in runs.items():
            report, result = reports[name][language], run.results[task]
            of_group = {'pooled': result.get('pooled', {}), **result.get('languages', {})}.get(
                language, {}) if intervals else {}
            labels = {'run': name, 'model': run.model, 'dataset': task,
                      **{key: run.settings.get(key, '') for key in shown}, 'language': language}
            is_best = [sign and sign * report[metric] == best[metric]
                       for metric, sign in COMPARED.items()]
            table.append([*labels.values(), str(report['n']), *(
                f'{report[metric]:.3f}{interval_text(of_group, metric)}{" *" if star else "  "}'
                for metric, star in zip(COMPARED, is_best, strict=True))])
            lines.append(labels | report | sample_of(result))
    return [[*labels, 'questions', *(TITLES[metric] for metric in COMPARED)], *table], lines


def sample_of(result):
    """Return {'sample_of': number of questions} of a result with --limit, for a CSV; else {}."""
    return {'sample_of': str(result['sample']['of'])} if 'sample' in result else {}


def difference(first, second, samples, answers, reports, cfg):
    """Yield rows of the run `second` - the run `first`, over questions and over languages."""
    # if the options differ, the same id stands for different questions
    keys = {run: [(*sample_order(s)[2:], s.get('answer', s.get('token')), len(s.get('options', ())))
                  for s in samples[run]] for run in (first, second)}
    name, shared = f'{second} - {first}', set(keys[first]) & set(keys[second])
    if len(shared) < 2:
        yield [name, 'questions', str(len(shared)), '', '', '', '']
        return
    # both have the same draws, because seed and number of questions are the same
    shown, resampled = measure(
        {run: answers[run].at([key in shared for key in keys[run]]) for run in keys},
        cfg.n_bootstrap, cfg.seed)
    for metric in COMPARED if cfg.n_bootstrap else ():
        d = resampled[second][metric] - resampled[first][metric]
        low, high = np.percentile(d, (2.5, 97.5))
        p = min(1.0, 2 * (1 + min((d <= 0).sum(), (d >= 0).sum())) / (1 + len(d)))
        yield [name, 'questions', str(len(shared)), TITLES[metric],
               f'{shown[second][metric] - shown[first][metric]:+.4f}', f'{low:+.4f} {high:+.4f}',
               f'{p:.3f}']
    languages = [x for x in reports[first] if x != 'pooled']
    for metric in COMPARED if languages else ():
        mean, t, p = stats.student_t([reports[second][x][metric] - reports[first][x][metric]
                                      for x in languages])
        yield [name, f'{len(languages)} languages', '', TITLES[metric], f'{mean:+.4f}',
               f't = {t:.2f}', f'{p:.2g}']


# Over seeds: lines of a compare.csv, one for each run, task, language, category and scaling


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


# Over seeds: which lines, and along which axes


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


# Over seeds: table and figure


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
