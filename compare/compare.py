"""Compare runs: over the questions that they share, or over seeds.

    python evaluate.py --compare out/base out/sft out/ls01

Runs of one seed are compared over the questions that they answered, with a paired bootstrap, runs
of several seeds over the seeds; see over_seeds.py.
"""

import itertools
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

import metrics
import stats
from compare import significance
from results import page
from compare.over_seeds import compare_seeds
from results.plots import draw_curves, draw_reliability
from results.report import (Predictions, measure, panel_title, predictions, split_groups,
                            task_title)
from compare.runs import (Run, find_prediction_files, find_runs, predicted_run, read_run,
                          read_run_samples, sample_of)
from results.samples import NORMS, picture
from results.columns import (PRINTED, Heading, count_cell, few_rows_note, measure_cell, measure_of,
                             shared_note, title_of)
from results.tables import Section, csv_text, mark_best
from runtime.config import load_config, require_range, require_unicode
from runtime.errors import ConfigError, DataError
from runtime.ownership import claim, lock, write_text
from runtime.version import __version__

USAGE = """\
usage: python evaluate.py --compare FOLDER FOLDER [...] [--key=value ...]

A FOLDER is that of an evaluated run, one that holds such folders, what lm_eval --log_samples wrote
(the folder of a model or a file samples_<task>_<date>.jsonl), or a file of predictions in a form
that `python metrics.py --help` lists. Runs of one seed are compared over questions, runs of several
seeds over the seeds.

example: python evaluate.py --compare out/base out/sft out/ls01 --out_dir=out/compare"""


@dataclass
class FileConfig:
    sources: tuple[str, ...] = ()             # more folders and files
    # of prediction files: the divisor of a log-probability. In those of lm-evaluation-harness token
    # and sum are 1, as for acc, since they do not count tokens; char: characters, as for acc_norm;
    # byte: bytes
    norm: Literal[*NORMS] = 'token'
    # names of columns: answer=gold,probs=p reads the columns gold and p_0, p_1, ...; several of
    # confidence=NAME are a task each
    columns: tuple[str, ...] = ()


@dataclass
class CompareConfig(FileConfig):
    metrics: tuple[str, ...] = ()             # keys of metrics.MEASURES; none: its table 'compare'
    n_bootstrap: int = 1000                   # resamples of the questions; 0: no differences
    seed: int = 0                             # of the bootstrap
    out_dir: str = 'out/compare'              # folder of the comparison
    ensemble: bool = False                    # one more row: the mean of the runs' probabilities


def main(argv, usage=USAGE):
    cfg, sources = read_sources(CompareConfig, argv, usage)
    require_range(cfg, 0, math.inf, 'n_bootstrap', 'seed')
    keys = cfg.metrics or [key for key, x in PRINTED.items() if 'compare' in x.tables]
    known = [x.key for x in metrics.MEASURES] if cfg.metrics else keys
    if unknown := [key for key in keys if key not in known]:
        raise ConfigError(f'metrics: there is no {unknown[0]!r}; there are {", ".join(known)}')
    if repeated := [key for key in keys if keys.count(key) > 1]:
        raise ConfigError(f'metrics: {repeated[0]!r} is named twice; name it once')
    by_files = find_prediction_files([s for s in sources if not (s / 'samples.jsonl').exists()])
    folders = find_runs(sources, [file for files in by_files.values() for file in files.values()])
    if twice := [path for path in folders if folders.count(path) > 1]:
        raise ConfigError(f'compare: {twice[0]} is named twice')
    if len(folders) + len(by_files) < 2:
        raise ConfigError('compare needs two runs or more: name their folders, or a folder that '
                          'holds them' + ''.join(f'; there is {x}' for x in (*folders, *by_files)))
    runs = [read_run(folder) for folder in folders]
    runs += [predicted_run(folder, files, cfg) for folder, files in by_files.items()]
    out_dir = Path(os.path.expanduser(cfg.out_dir))
    with lock(out_dir):
        if len({run.seed for run in runs}) > 1 and not cfg.ensemble:
            compare_seeds(runs, keys, out_dir)
        else:
            compare_questions(runs, keys, cfg, out_dir)


def read_sources(cls, argv, usage):
    """Return (config of the dataclass `cls`, paths) of a command line of files and --key=value."""
    require_unicode(argv)
    settings = [a for a in argv if a.startswith('-') or a.endswith('.py')]
    cfg = load_config(cls, sorted(settings, key=lambda a: a.startswith('-')), usage)
    return cfg, [Path(os.path.expanduser(source))
                 for source in (*(a for a in argv if a not in settings), *cfg.sources)]


# Over questions

T_NOTE = ("Student's t over languages takes them for independent samples; with the same questions "
          'in all of them its p is far too small')


def compare_questions(runs, keys, cfg, out_dir):
    """Print and write tables, pictures and compare.html of the tasks that all runs have."""
    # the last parts of each path, as many as make them unique
    names = (['/'.join(run.folder.parts[-n:]) for run in runs] for n in itertools.count(1))
    labels = next(labels for labels in names if len(set(labels)) == len(labels))
    runs = dict(zip(labels, runs, strict=True))
    by_run = {name: read_run_samples(run)[0] for name, run in runs.items()}
    all_tasks = dict.fromkeys(task for by_task in by_run.values() for task in by_task)
    tasks = [task for task in all_tasks if all(task in by_task for by_task in by_run.values())]
    if not tasks:
        raise DataError('these runs have no task in common: ' + '; '.join(
            f'{name}: {", ".join(by_task)}' for name, by_task in by_run.items()))
    names = ['compare.md', 'compare.tex', 'compare.csv', 'compare.html']
    for file in [run.folder for run in runs.values() if run.folder.name in names]:
        if file.parent.samefile(out_dir):
            raise ConfigError(f'{file} is compared, and would be replaced by the comparison; '
                              f'choose another --out_dir')
    claim(out_dir, *names, *(picture(task, kind) for task in tasks
                             for kind in ('reliability', 'curves')))
    sections, lines, answers = zip(*(
        compare_task(task, runs, {name: x[task] for name, x in by_run.items()}, keys, cfg)
        for task in tasks), strict=True)
    write_text(out_dir / 'compare.tex', '\n'.join(x.as_latex() for x in sections))
    # in LaTeX the best is bold
    sections = [x._replace(notes=['(* the best)', *x.notes]) if any(
        cell.endswith(' *') for row in x.table for cell in row) else x for x in sections]
    write_text(out_dir / 'compare.md', '\n'.join(x.as_markdown() for x in sections))
    write_text(out_dir / 'compare.csv', csv_text([*itertools.chain(*lines)]))

    panels = {task: {panel_title(name, x.result): x.predicted for name, x in by_name.items()
                     if not x.predicted.is_graded}
              for task, by_name in zip(tasks, answers, strict=True)}
    pictures = [name for task, by_title in panels.items() if by_title and draw_reliability(
        out_dir / (name := picture(task)), [*by_title.items()])]
    pictures += [name for task, by_title in panels.items() if by_title and draw_curves(
        out_dir / (name := picture(task, 'curves')),
        {task: {title: p.bins() for title, p in by_title.items()}})]
    page.write(out_dir / 'compare.html', f'{", ".join(runs)}: {", ".join(tasks)}', __version__, '',
               '\n'.join(map(page.section_html, sections)), {page.DIAGRAMS: pictures},
               page.select(dict(zip(tasks, map(rows_to_read, answers), strict=True))))
    print(*(section.as_text() for section in sections),
          *(f'\n{task} is left out: not every run has it' for task in all_tasks
            if task not in tasks),
          f'\nwrote {", ".join([*names, *pictures])} to {out_dir}', sep='\n')


class Answers(NamedTuple):
    """The answers of one run to the questions of a task."""
    run: Run
    result: dict        # the task's entry in results.json
    samples: list
    keys: list          # of the samples, as in `question_keys`
    predicted: Predictions


def shared_predictions(*answers):
    """Return the Predictions of each Answers for the rows whose keys all have, as the first orders
    them and numbers their questions.
    """
    rows = [{key: i for i, key in enumerate(x.keys)} for x in answers]
    keys = [key for key in answers[0].keys if all(key in at for at in rows)]
    predicted = [x.predicted.at([at[key] for key in keys])
                 for x, at in zip(answers, rows, strict=True)]
    numbers = predicted[0].questions
    questions = stats.question_index(numbers and numbers[0], len(keys))
    return [p._replace(questions=questions) for p in predicted]


def compare_task(task, runs, samples, keys, cfg):
    """Return the Section of a task, the lines of its CSV, and {name: Answers}."""
    titles = {name: task_title(task, run.results[task]) for name, run in runs.items()}
    title, *others = {*titles.values()}
    if others:
        title = f'{task}: ' + ', '.join(task_title(name, run.results[task])
                                        for name, run in runs.items())
    keys_by_run = question_keys(samples)
    answers = {name: Answers(run, run.results[task], samples[name], keys_by_run[name],
                             predictions(samples[name], run.results[task]['norm']))
               for name, run in runs.items()}
    remarks = []
    if cfg.ensemble:
        averaged = average_runs([*answers.values()])
        if isinstance(averaged, str):
            remarks.append(f'{task} has no ensemble: {averaged}')
        else:
            answers[f'ensemble of {len(runs)}'] = averaged

    groups = [split_groups(x.samples, 'language', x.predicted) for x in answers.values()]
    languages = sorted(set.intersection(*map(set, groups)))
    reports = {name: {x: by_language[x].report() for x in languages if len(languages) > 1}
               | {'pooled': answers[name].predicted.report()}
               for name, by_language in zip(answers, groups, strict=True)}
    keys = [key for key in keys if all(key in x['pooled'] for x in reports.values())]
    differences, changes = [], []
    left_out, reasons = [], {}
    pairs = [*itertools.combinations(answers, 2)]
    for a, b in pairs:
        first, second = shared_predictions(answers[a], answers[b])
        n = first.questions[1]
        if n > 1:
            differences += over_questions(a, b, first, second, keys, cfg, reasons)
            changes.append([f'{a} to {b}', *changed_answers(first, second)])
        else:
            remarks.append(f'{task}: {a} and {b} have {n or "no"} question in common, and a '
                           f'difference needs two; evaluate both on the same questions, with the '
                           f'same --limit and --seed, or give rows of files the same id, question '
                           f'and answer')
        in_both = {x for x, *_ in answers[a].keys} & {x for x, *_ in answers[b].keys}
        if n_other := len(in_both) - len(first.labels):
            left_out.append(f'{task}: {n_other} questions are left out of {b} - {a}: they have '
                            f'another right answer, or more options, in {b}')
    differences = [['difference', 'over', 'questions', 'metric', 'mean', '95 % interval', 'p',
                    'p (Holm)'], *with_holm(differences, '.3f'),
                   *over_languages(pairs, reports, keys)]
    changes = [['change', 'questions', 'wrong to right', 'right to wrong', 'negative flips',
                '95 % interval', "McNemar's p", 'p (Holm)'], *with_holm(changes, '.2g')]
    whole = [by_language['pooled'] for by_language in reports.values()]
    unit = next(iter(answers.values())).result['unit']
    remarks += [*left_out, shared_note(whole[0], unit)]
    if {'rmsce', 'mad'} & {*keys}:
        remarks.append(few_rows_note(min(whole, key=lambda report: report['n']), unit))
    if any(row[1].endswith('languages') for row in differences):
        remarks.append(T_NOTE)
    remarks += [*reasons, equal_accuracy([answers[name] for name in runs])]
    table, lines = question_table(task, answers, reports, keys, unit)
    more = [('', cells) for cells in (differences, changes) if len(cells) > 1]
    return Section(title, table, [*filter(None, remarks)], more), lines, answers


def rows_to_read(answers):
    """Return the samples of all runs as rows of compare.html, with 'run' and 'outcome'."""
    rows, groups = [], {}
    for name, x in answers.items():
        for key, row in zip(x.keys, page.task_rows(x.samples, x.result['norm']), strict=True):
            rows.append(row | {'run': name})
            groups.setdefault(key, []).append(rows[-1])
    for group in groups.values():
        right = sum(row['correct'] for row in group)
        for row in group:
            row['outcome'] = f'{right} of {len(group)} runs right'
    return sorted(rows, key=page.mistakes_first)


def question_keys(samples):
    """Return {run: keys of its samples}; samples with equal keys answer the same question.

    Ids that all runs have, texts that all have, or both make a key, with the right answer. Rows of
    files without either are paired by their order, if all have the same answers throughout. Raises
    DataError for rows that cannot be paired.
    """
    def refuse(why):
        raise DataError(f'rows cannot be paired: {why}; give each row of all files the column id, '
                        f'or question, with the same value for the same question')

    # a hash, or the text before a token
    texts = {run: [s.get('question') or s.get('context', '') for s in x]
             for run, x in samples.items()}
    has_ids = {run: not any('row' in s for s in x) for run, x in samples.items()}
    by_id = all(has_ids.values())
    has_texts = {run: (any if by_id else all)(x) for run, x in texts.items()}
    by_text = all(has_texts.values())
    by_order = not by_id and not by_text
    labels = [key for key in ('answer', 'options', 'token', *['expected'] * by_order)
              if all(key in s for x in samples.values() for s in x)]
    if by_order and any((*has_ids.values(), *has_texts.values())):
        have = {run: ' and '.join(['ids'] * has_ids[run] + ['questions'] * has_texts[run])
                for run in samples}
        refuse('; '.join(f'{run} has {x or "neither ids nor questions"} in all rows'
                         for run, x in have.items()))
    if by_order and len({*map(len, texts.values())}) > 1:
        refuse('without ids, ' + ', '.join(f'{run} has {len(x)} rows' for run, x in texts.items()))
    if by_order and not labels:
        refuse('they have neither ids nor questions, and no answers to check their order by')
    if by_order:
        print(f'the rows of {", ".join(samples)} are paired by their order, without ids')
    keys = {}
    right = {}
    answers = {}
    for run, x in samples.items():
        order = {row: i for i, row in enumerate(sorted(s['row'] for s in x), 1)} if by_order else {}
        keys[run] = [(s.get('language', ''), s['id'] if by_id else order.get(s.get('row'), ''),
                      text if by_text else '') for s, text in zip(x, texts[run], strict=True)]
        if len({*keys[run]}) < len(x):
            refuse(f'{run} has no ids, and a question twice')
        right[run] = [tuple(s[label] if label != 'options' else len(s[label]) for label in labels)
                      for s in x]
        for key, answer in zip(keys[run], right[run], strict=True):
            other, expected = answers.setdefault(key, (run, answer))
            if answer != expected and not by_text:
                label, x, y = next(part for part in zip(labels, expected, answer, strict=True)
                                   if part[1] != part[2])
                refuse(f'{"id" if by_id else "row"} {key[1]} has ' + (
                    f'{x} options in {other}, {y} in {run}' if label == 'options' else
                    f'the {label} {x!r:.40} in {other}, {y!r:.40} in {run}'))
    return {run: [*zip(keys[run], right[run], strict=True)] for run in samples}


def average_runs(answers):
    """Return Answers, whose norm is 'sum', with the mean probabilities; or why there are none."""
    if any(x.predicted.scores is None for x in answers):
        return ('its samples hold the probability of one token or answer of each run, not a '
                'distribution to average')
    by_run = []
    for x in answers:
        scores = x.predicted.scores
        log_probs = scores - np.logaddexp.reduce(scores, axis=1, keepdims=True)
        by_run.append({(key, *s['options']): (s, row[:len(s['options'])])
                       for key, s, row in zip(x.keys, x.samples, log_probs, strict=True)})
    samples, keys = [], []
    for key, (sample, _) in by_run[0].items():
        if all(key in rows for rows in by_run):
            mean = np.logaddexp.reduce([rows[key][1] for rows in by_run]) - np.log(len(by_run))
            samples.append(sample | {'log_probs': mean.tolist(), 'n_tokens': [1] * len(mean)})
            keys.append(key[0])
    if not samples:
        return 'no question with the same answer and options is in all runs'
    runs = [x.run for x in answers]
    shared = dict(set.intersection(*(set(run.settings.items()) for run in runs)))
    model = runs[0].model if len({run.model for run in runs}) == 1 else ''
    result = {key: value for x in answers for key, value in x.result.items() if key == 'sample'}
    return Answers(Run(None, model, runs[0].seed, shared, {}), result | {'norm': 'sum'}, samples,
                   keys, predictions(samples, 'sum'))


def question_table(task, answers, reports, keys, unit):
    """Return a task's cells and the lines of its CSV."""
    # {setting with a column: what a run without it has}; those but smoothing only if runs differ
    columns = {'loss': None, 'smoothing': None, 'base_smoothing': '0.0'}
    settings = [key for key, otherwise in columns.items() if key == 'smoothing' or len({
        x.run.settings.get(key, otherwise) for x in answers.values()}) > 1]
    table = []
    lines = []
    groups = []
    for language in next(iter(reports.values())):
        for name, x in answers.items():
            report = reports[name][language]
            labels = {'run': name, 'model': x.run.model, 'dataset': task,
                      **{key: x.run.settings.get(key, '') for key in settings},
                      'language': language}
            table.append([*labels.values(), count_cell(report, unit),
                          *(measure_cell(report, key) for key in keys)])
            lines.append(labels | report | sample_of(x.result))
            groups.append(language)
    header = [*labels, unit, *map(Heading, keys)]
    return mark_best([header, *table], groups), lines


def over_questions(a, b, first, second, keys, cfg, reasons):
    """Return the rows of run b minus run a, over the questions of both; add to the dict `reasons`
    the lines that say which metrics have no interval, and why.
    """
    if not cfg.n_bootstrap:
        return []
    # both have the same draws, because seed, questions and their number are the same
    values, resampled = measure({a: first, b: second}, cfg.n_bootstrap, cfg.seed, keys)
    rows = []
    for key in [key for key in keys if key in resampled[a]]:
        drawn, (x, y) = ([z[name][key] for name in (a, b)] for z in (resampled, values))
        ends, p = '', None
        missing = (z.get('no_interval', {}).get(key) for z in values.values())
        if missing := next(filter(None, missing), ''):
            reasons.setdefault(f'no interval of {title_of(key)} ({missing})')
        else:
            low, high, p = stats.difference_test(*drawn, (x, y), not measure_of(key).is_mean)
            ends = f'{low:+.4f} {high:+.4f}'
        rows.append([f'{b} - {a}', 'questions', str(first.questions[1]), title_of(key),
                     f'{y - x:+.4f}', ends, p])
    return rows


def over_languages(pairs, reports, keys):
    """Return the rows of each pair's second run minus the first, by Student's t over languages."""
    languages, rows = [x for x in next(iter(reports.values())) if x != 'pooled'], []
    for (first, second), key in itertools.product(pairs if languages else (), keys):
        values = [reports[second][x][key] - reports[first][x][key] for x in languages]
        if np.isfinite(values).all():
            mean, t, p = significance.student_t(values)
            rows.append([f'{second} - {first}', f'{len(languages)} languages', '', title_of(key),
                         f'{mean:+.4f}', f't = {t:.2f}', p])
    return with_holm(rows, '.2g')


def changed_answers(*predicted):
    """Return the cells of the answers that change from the first to the second Predictions."""
    before, after = (metrics.top_label(*p[:2])[1] for p in predicted)
    index, n = predicted[0].questions
    lost, won, p = significance.mcnemar(before, after, index)
    low, high = stats.share_interval(before & ~after, index)
    return [str(n), str(won), str(lost), f'{lost / len(before):.4f}', f'{low:.4f} {high:.4f}', p]


def equal_accuracy(answers):
    """Return a line with the test of equal accuracy of three runs or more; '' for others."""
    predicted = shared_predictions(*answers) if len(answers) > 2 else ()
    if not predicted or not len(predicted[0].labels):
        return ''
    index, n = predicted[0].questions
    q, p = significance.cochran_q([metrics.top_label(*x[:2])[1] for x in predicted], index)
    return (f"Cochran's Q of equal accuracy, over the {n} questions that all runs have: "
            f'{q:.2f}, p {p:.2g}')


def with_holm(rows, spec):
    """Return rows that end in p, or in None, with one more cell: p after Holm's correction."""
    corrected = iter(significance.holm([p for *_, p in rows if p is not None]))
    return [[*row, '', ''] if p is None else [*row, format(p, spec), format(next(corrected), spec)]
            for *row, p in rows]
