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
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

import stats
from data.files import writing
from results import lm_eval
from results.over_seeds import compare_seeds
from results.report import (aligned, csv_text, draw_reliability, interval_text, latex, markdown,
                            measure, panel_title, predictions, sample_order, task_title)
from results.runs import TITLES, Run, find_runs, harness_run, read_run, read_run_samples, sample_of
from runtime.config import load_config, require_range
from runtime.errors import ConfigError, DataError
from runtime.ownership import claim, write_text

# over questions: which is better, more (1), less (-1) or neither (0)
COMPARED = {'accuracy': 1, 'entropy_bits': 0, 'ece': -1, 'rmsce': -1}


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
    of_harness = lm_eval.find_files([s for s in sources if not (s / 'results.json').exists()])
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
