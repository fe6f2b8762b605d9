"""From samples to a report: metrics with intervals, and their tables."""

import functools
import math
import operator
import string
from pathlib import Path
from typing import NamedTuple

import numpy as np

import metrics
import stats
from results import samples as sample_files
from results.plots import draw_reliability, warn_on_failure
from results.samples import (by_order, of_split, option_scores, picture, question_numbers,
                             read_splits, sample_order, samples_digest)
from results.columns import (PRINTED, Heading, count_cell, few_rows_note, interval_ends,
                             measure_cell, measure_of, shared_note)
from results.tables import Section, aligned, csv_text, mark_best
from runtime import rooms
from runtime.digests import module_file, syntax_digest
from runtime.ownership import claim, lock
from runtime.processes import parallel_map

SCHEMA = 1      # of results.json, as docs/evaluation.md states it; adding a key does not change it
# {key of a sample that names its group of questions: name of these groups in results.json}
GROUPS = {'language': 'languages', 'category': 'categories', 'subject': 'subjects',
          'group': 'groups'}      # the last are those of --group_by
ACCURACY = [x for x in metrics.PRINTED if x.key.startswith('accuracy')]


class Predictions(NamedTuple):
    """Input of the metrics: distributions over options, or the confidence in single tokens."""
    probs: np.ndarray                   # [N, K]; for tokens the confidence [N]
    labels: np.ndarray                  # int [N]; for tokens bool [N], right or wrong
    n_options: np.ndarray | None = None
    scores: np.ndarray | None = None    # [N, K] normalized log-probabilities, -inf for no option
    # {key of a metric: [N], whose mean it is}: the NLL and entropy of tokens, and conformal sets,
    # whose thresholds come from all rows, so that no group can compute its own
    columns: dict = {}
    # (the number of each row's question, int [N]; how many there are); None: each has its own
    questions: tuple[np.ndarray, int] | None = None
    is_graded: bool = False             # right or wrong alone: probs mean nothing

    def at(self, rows):
        """Return the Predictions of some rows, whose questions keep their numbers."""
        *arrays, columns, questions, is_graded = self
        return Predictions(*(None if x is None else x[rows] for x in arrays),
                           {key: x[rows] for key, x in columns.items()},
                           questions and (questions[0][rows], questions[1]), is_graded)

    def alone(self):
        """Return the Predictions, whose questions are drawn without those of other rows."""
        return self._replace(questions=self.questions and stats.question_index(
            self.questions[0], len(self.labels)))

    def scaled(self, temperature, log_prior=0):
        """Return the Predictions of (scores - log_prior) / temperature; T a number or [N, 1]."""
        scores = (self.scores - log_prior) / temperature
        return option_predictions(metrics.softmax(scores), self.labels, self.n_options, scores,
                                  self.questions)

    def report(self, measures=None):
        """Return metrics.report; with 'questions', if there are fewer than rows."""
        report = metrics.report(self.probs, self.labels, self.n_options, scores=self.scores,
                                measures=ACCURACY if self.is_graded else measures)
        report |= {key: float(x.mean()) for key, x in self.columns.items()}
        _, n = self.alone().questions or (None, report['n'])
        if n < report['n']:
            low, high = stats.share_interval(metrics.top_label(*self[:2])[1], self.questions[0])
            report |= {'accuracy_low': low, 'accuracy_high': high, 'questions': n}
        return report

    def bins(self):
        """Return metrics.bins, whose intervals take rows of one question as one."""
        table = metrics.bins(*self[:2])
        if self.questions:
            confidence, correct = metrics.top_label(*self[:2])
            index = metrics.equal_width_bins(confidence, len(table['count']))
            for m in np.unique(index):
                table['low'][m], table['high'][m] = stats.share_interval(
                    correct[index == m], self.questions[0][index == m])
        return table

    def bootstrap(self, n_resamples, seed, keys=None, measures=None):
        index, n = self.questions or (None, None)
        return stats.bootstrap(
            *self[:3], scores=self.scores, n_resamples=n_resamples, seed=seed, keys=keys,
            measures=ACCURACY if self.is_graded else measures, columns=self.columns,
            questions=index, n_questions=n)


def option_predictions(probs, labels, n_options, scores, questions=None):
    """Return the Predictions of distributions over options, with their conformal sets."""
    columns = {}
    for method in ('lac', 'aps'):
        sets = metrics.conformal_sets(probs, labels, n_options, method=method)
        columns[f'{method}_coverage'] = sets[np.arange(len(sets)), labels].astype(float)
        columns[f'{method}_size'] = sets.sum(1).astype(float)
    return Predictions(probs, labels, n_options, scores, columns, questions)


def names_of(samples, key):
    """Return the name in `key` of each sample, str [N]; '' where there is none."""
    return np.array([s.get(key) or '' for s in samples])


def split_groups(samples, key, predicted):
    """Return {value of `key`: its rows of the Predictions `predicted`}; {} for a single value."""
    names = names_of(samples, key)
    groups = {name: predicted.at(names == name) for name in np.unique(names).tolist()}
    return groups if len(groups) > 1 else {}


def predictions(samples, norm):
    """Return the Predictions of samples, which are all questions or all tokens."""
    if not samples[0].keys() & {'log_probs', 'confidence'}:
        correct = np.array([s['correct'] for s in samples])
        return Predictions(np.ones(len(samples)), correct, questions=question_numbers(samples),
                           is_graded=True)
    if 'log_probs' not in samples[0]:
        confidence, correct, log_prob, entropy = (np.array([s[key] for s in samples]) for key in (
            'confidence', 'correct', 'log_prob', 'entropy'))
        return Predictions(confidence, correct, questions=question_numbers(samples), columns={
            'entropy_bits': entropy / np.log(2), 'nll': -log_prob})
    n_options = np.array([len(s['log_probs']) for s in samples])
    scores = np.full((len(samples), n_options.max()), -np.inf)
    for row, s in zip(scores, samples, strict=True):
        row[:len(s['options'])] = option_scores(s['log_probs'], s['options'], s['n_tokens'], norm)
    return option_predictions(metrics.softmax(scores), np.array([s['answer'] for s in samples]),
                              n_options, scores, question_numbers(samples))


# Metrics and their intervals


def summarize(samples, norm, *, n_bootstrap=1000, fit=False, seed=0, fits=None,
              all_metrics=False):
    """Return the metrics of one task, with the keys of docs/evaluation.md from 'unit' on.

    The order of the samples does not matter. 'intervals', {metric: [low, high]}, are 95 % by
    bootstrap over questions. fits: {name: its parameters} of scalings to apply. all_metrics:
    also those that no table has, of catalog.py
    """
    measures = metrics.MEASURES if all_metrics else metrics.PRINTED
    samples = sorted(samples, key=sample_order)
    everything, held_out = samples, of_split(samples, 'validation')
    samples = of_split(samples)
    pooled = predictions(samples, norm)
    groups = {('pooled', ''): pooled} | {
        (plural, name): group for key, plural in GROUPS.items()
        # languages with the same questions have the same draws, for their mean
        for name, group in split_groups(samples, key, pooled).items()
        for group in [group if plural == 'languages' else group.alone()]}
    orders = by_order(samples) if 'orders' in samples[0] else {}
    groups |= {('orders', name): predictions(rows, norm) for name, rows in orders.items()}
    reports, resampled = measure(groups, n_bootstrap, seed, measures=measures)

    summary = {'unit': 'tokens' if 'token' in samples[0] else 'questions',
               'pooled': reports.pop(('pooled', '')),
               'bins': {key: x.tolist() for key, x in pooled.bins().items()}}
    for (plural, name), report in reports.items():
        summary.setdefault(plural, {})[name] = report
    if plural := next((x for x in ('languages', 'subjects') if x in summary), None):
        summary['macro'] = mean_report([*summary[plural].values()], [
            resampled[plural, name] for name in summary[plural]])
    if orders:
        summary |= letters([*orders.values()], [groups['orders', name] for name in orders])
    if 'first' in samples[0]:
        summary['judge'] = rooms.load('judging').facts(everything)
    if 'log_probs' in samples[0]:
        if 'content_free' not in samples[0]:
            mass = np.exp(np.concatenate([s['log_probs'] for s in samples])).sum()
            summary['option_mass'] = float(mass / len(samples))
        summary['chance'] = float(np.mean([1 / len(s['log_probs']) for s in samples]))
    scaled = {'unscaled': pooled}
    # of written answers, only one may have a confidence that can be read
    if fit and (held_out or (pooled.questions or (0, len(samples)))[1] > 1):
        summary['post_hoc'], more = rooms.load('post hoc').post_hoc(
            pooled, samples, held_out, norm, n_bootstrap, seed, measures)
        scaled |= more
    for key, plural in [item for item in GROUPS.items() if item[1] in summary]:
        names = names_of(samples, key)
        worst = {name: [*metrics.worst_group_ece(*p[:2], names)] for name, p in scaled.items()}
        if worst['unscaled'][1] is not None:
            summary.setdefault('worst_group_ece', {})[plural] = worst
    if fits:
        rescaled = rooms.load('post hoc').rescaled
        groups = {name: rescaled(pooled, name, x) for name, x in fits.items()}
        summary['scaled'] = {'fits': fits, 'reports': measure(
            groups, n_bootstrap, seed, measures=measures)[0]}
    if all_metrics:
        summary['all_metrics'] = True
    return summary | {'measured_by': measured_by(), 'samples_digest': samples_digest(samples)}


def letters(samples, predicted):
    """Return how choices depend on the order: of each, its samples and their Predictions."""
    chosen = np.array([p.probs.argmax(1) for p in predicted])
    correct = np.array([p.labels for p in predicted])
    options = np.array([[s['order'][k] for s, k in zip(rows, tops, strict=True)]
                        for rows, tops in zip(samples, chosen, strict=True)])
    shares = [{'chosen': float((chosen == k).mean()), 'correct': float((correct == k).mean())}
              for k in range(max(chosen.max(), correct.max()) + 1)]
    return {'letters': dict(zip(string.ascii_uppercase, shares, strict=False)),
            'same_option': float((options == options[0]).all(0).mean())}


@functools.cache
def measured_by():
    """Return a hash of the code that computes a summary; it changes when a metric is edited."""
    files = (module.__file__ for module in (metrics, stats, sample_files))
    return syntax_digest(__file__, module_file('catalog'), *files)


def measure(groups, n_bootstrap, seed, keys=None, measures=None):
    """Return {group: report with intervals} and {group: {metric: resampled values}} of Predictions.

    The resamples of a group are drawn in parts that depend on its size alone: the same rows give
    the same numbers on every machine. keys, measures: those of stats.bootstrap
    """
    parts = []      # (group, number of resamples, seed)
    for key, group in groups.items():
        n = max(len(group.labels), (group.questions or (0, 0))[1])
        # each part sorts its rows first; 8 parts of 2,000,000 rows with 4 options need 5 GB
        n_parts = int(np.clip(min(n // 5000, 16_000_000 // n), 1, 8))
        sizes = map(len, np.array_split(range(n_bootstrap), n_parts))
        parts += [(key, size, [seed, part]) for part, size in enumerate(sizes) if size]
    # for one process; w processes take seconds / w, and 0.025 w to be forked one after the other
    n_rows = sum(len(group.labels) for group in groups.values())
    seconds = 0.007 * len(groups) + 4e-8 * n_rows * n_bootstrap
    # workers take turns, so long jobs must not alternate with short ones
    jobs = [functools.partial(group.report, measures) for group in groups.values()]
    jobs += [functools.partial(groups[key].bootstrap, *part, keys, measures)
             for key, *part in parts]
    results = parallel_map(operator.call, jobs, worth_it=seconds > 0.2,
                           most=round(math.sqrt(seconds / 0.025)))
    resampled = {key: {} for key in groups}
    for (key, *_), values in zip(parts, results[len(groups):], strict=True):
        for name, x in values.items():
            resampled[key][name] = np.append(resampled[key].get(name, ()), x)
    reports = dict(zip(groups, results, strict=False))
    for key, report in reports.items():
        probs = groups[key].probs
        n_options = 1 if probs.ndim == 1 else probs.shape[1]
        reasons = {name: stats.no_interval(measure_of(name), report.get('questions', report['n']),
                                           report['accuracy'], n_options)
                   for name in resampled[key]}
        report |= intervals(resampled[key], report, reasons)
    return reports, resampled


def intervals(resampled, report, reasons):
    """Return {'intervals': {metric: [low, high]}, 'no_interval': {metric: why}}; {} without any.

    resampled: {metric: values}; reasons: {metric: why it has no interval, or ''}
    """
    reasons = {key: 'undefined in a resample' if np.isnan(values).any() else reasons.get(key, '')
               for key, values in resampled.items()}
    ends = {key: [*map(float, stats.percentile_interval(values, report[key],
                                                        not measure_of(key).is_mean))]
            for key, values in resampled.items() if not reasons[key]}
    more = {'intervals': ends, 'no_interval': {key: x for key, x in reasons.items() if x}}
    return {key: x for key, x in more.items() if x}


def mean_report(reports, resampled):
    """Return the mean of reports, with intervals from the mean of the resampled values.

    A metric has none if it has none in a group, or if a group has fewer than 10 samples, within
    which resampling varies too little: by a factor sqrt(1 - 1 / n) in its standard deviation.
    """
    mean = {'groups': len(reports)}
    for key in reports[0]:
        if key not in ('n', 'questions', 'intervals', 'no_interval', 'accuracy_low',
                       'accuracy_high'):
            # a metric can be undefined for a group, as AUROC is if every answer is correct
            values = [r[key] for r in reports if not math.isnan(r[key])]
            mean[key] = float(np.mean(values or math.nan))
    fewest = min(report.get('questions', report['n']) for report in reports)
    reasons = dict.fromkeys(resampled[0], 'fewer than 10 questions in a group' * (fewest < 10))
    for report in reports:
        reasons |= {key: f'{why} in a group' for key, why in report.get('no_interval', {}).items()}
    return mean | intervals({key: np.mean([values[key] for values in resampled], axis=0)
                             for key in resampled[0]}, mean, reasons)


# Tables


def task_title(task, result):
    """Return a task and its settings: 'mmlu (prompt format mmlu, 5 shots, letters, token)'."""
    has_format = 'option_mass' in result and 'judge' not in result
    scored = 'prompt format ' * has_format + result['distribution']
    if sample := result.get('sample'):
        items = 'texts' if result['unit'] == 'tokens' else 'questions'
        scored += f'; sample of {sample["questions"]:,} of {sample["of"]:,} {items}'
    return f'{task} ({scored})'


def panel_title(name, result):
    """Return the title of a diagram: `name`, and '(sample)' if --limit drew the questions."""
    return f'{name} (sample)' if 'sample' in result else name


def notes(result):
    """Return the notes below a task's table, as lines."""
    by_letters, pooled = 'by letters' in result['distribution'], result['pooled']
    lines = []
    if (mass := result.get('option_mass')) is not None:
        lines.append(f'the options together have a mean probability of {mass:.3f}'
                     + '; with so little, another scoring or prompt may suit the model better'
                     * (mass < 0.01 and by_letters))    # that of whole texts is always small
    chance = result.get('chance', -1)       # P(True) has none
    if by_letters and result['pooled']['accuracy_low'] <= chance:
        low, high = pooled['accuracy_low'], pooled['accuracy_high']
        verdict = ('this is no better than guessing' if high <= chance else
                   f'the 95 % interval, {low:.3f}-{high:.3f}, includes the accuracy of guessing')
        shots = '--shots=5, ' * (result.get('shots') == 0)
        lines.append(f'{verdict} ({chance:.3f}); many base and small models cannot answer by a '
                     f'letter: try {shots}--scoring=text, or --prompt_format=harness, where the '
                     f'task has it')
    lines += shared_note(pooled, result['unit']), few_rows_note(pooled, result['unit'])
    if fitted := result.get('post_hoc'):
        values = [f'temperature {t:.3f}' + ' (equal probabilities are as good)' * (t > 999)
                  for t in fitted.get('temperature', ())]
        values += [f'Platt scaling a {a:.3f}, b {b:.3f}' for a, b in fitted['platt']]
        lines.append(f'fitted on {fitted["fitted_on"]}: {"; ".join(values)}')
    for plural, worst in result.get('worst_group_ece', {}).items():
        lines.append(f'largest ECE of the {plural} with 100 {result["unit"]} or more: ' + ', '.join(
            f'{name} {ece:.3f} ({group})' for name, (ece, group) in worst.items()))
    if 'orders' in result:
        lines.append('letters chosen (correct): ' + ', '.join(
            f'{letter} {share["chosen"]:.3f} ({share["correct"]:.3f})'
            for letter, share in result['letters'].items()))
        lines.append(f'the same option in all orders: {result["same_option"]:.3f} of the questions')
        for key in ('accuracy', 'ece'):
            values = [report[key] for report in result['orders'].values()]
            lines[-1] += f'; {PRINTED[key].title} by order: {min(values):.3f} to {max(values):.3f}'
    lines += interval_notes(report_rows(result))
    for key, room in rooms.RESULTS.items():
        lines += rooms.load(room).notes(result) if key in result else ()
    if result.get('bad_rows'):
        lines.append(f'{result["bad_rows"]} bad rows left out, the first: {result["first_bad"]}')
    if n_fewer := result.get('fewer_shots'):
        lines.append(f'{n_fewer} questions had fewer than {result["shots"]} shots: their prompts '
                     f'were too long')
    if result.get('duplicate_options'):
        lines.append(f'{result["duplicate_options"]} questions list the same option twice')
    return [line for line in lines if line]


def interval_notes(rows):
    """Return a line per reason why metrics of rows = [(kind, name, report)] have no interval."""
    titles = {}     # {(reason, names of rows): titles of metrics}
    for key, measure in PRINTED.items():
        names = {}
        for _, name, report in rows if 'results' in measure.tables else ():
            if reason := report.get('no_interval', {}).get(key):
                names.setdefault(reason, []).append(name)
        for reason, found in names.items():
            titles.setdefault((reason, tuple(found)), []).append(measure.title)
    return [f'no 95 % interval of {", ".join(columns)} ({reason}): ' + (
        ', '.join(names) if len(names) < 5 else f'{len(names)} of {len(rows)} rows')
        for (reason, names), columns in titles.items()]


def report_rows(result):
    """Return [(kind, name, report)] of one task's result."""
    groups = {kind: result.get(kind, {}) for kind in reversed(GROUPS.values())}
    groups['orders'] = {f'order {name}': x for name, x in result.get('orders', {}).items()}
    groups |= {kind: {kind: result[kind]} for kind in ('pooled', 'macro') if kind in result}
    for kind, name in (('post_hoc', '{} scaling'), ('scaled', '{} of the file')):
        groups[kind] = {name.format(key): report for key, report in result.get(
            kind, {}).get('reports', {}).items()}
    return [(kind, *item) for kind, reports in groups.items() for item in reports.items()]


def cells(rows, table='results', first='group', count='questions', intervals=False):
    """Return the cells of rows = [(..., name, report)], header first, without empty columns.

    The columns are the metrics with that `table` in metrics.PRINTED; `count` is the title of n.
    intervals: '0.102 [0.091, 0.113]' in each cell, instead of a column for the accuracy's.
    """
    *_, names, reports = zip(*rows, strict=True)
    columns = [[first, *names], [count, *(count_cell(report, count) for report in reports)]]
    for key in [key for key, measure in PRINTED.items() if table in measure.tables]:
        columns.append([Heading(key), *(measure_cell(x, key, intervals) for x in reports)])
        if key == 'accuracy' and not intervals:
            columns.append(['95 % interval', *(
                '-'.join(f'{end:.3f}' for end in interval_ends(x, key)) for x in reports)])
    return [*zip(*(column for column in columns if any(column[1:])), strict=True)]


# Files


def print_report(runs, out_dir, pictures=True):
    """Print one table per task and draw reliability-<task>.png of all runs side by side.

    runs: {name: (results of evaluate.evaluate or None, folder that holds its samples)}. With the
    names 'before' and 'after' a line below a table has the temperature that needs no labels.
    """
    runs = {name: (results['tasks'], read_splits(Path(folder) / 'samples.jsonl')[0])
            for name, (results, folder) in runs.items() if results}
    for task in dict.fromkeys(task for tasks, _ in runs.values() for task in tasks):
        rows = {name: tasks[task] for name, (tasks, _) in runs.items() if task in tasks}
        first = next(iter(rows.values()))
        print(f'\n{task_title(task, first)}')
        print(aligned(cells([(name, x['pooled']) for name, x in rows.items()], 'runs', 'run',
                            first['unit'])))
        for note in (shared_note(first['pooled'], first['unit']),
                     few_rows_note(first['pooled'], first['unit'])):
            print(end=f'{note}\n' * bool(note))
        predicted = {name: predictions(runs[name][1][task], x['norm']) for name, x in rows.items()}
        orders = {name: [*map(sample_order, runs[name][1][task])] for name in rows}
        if orders.keys() == {'before', 'after'} and orders['before'] == orders['after'] and (
                predicted['before'].scores is not None):
            print(rooms.load('post hoc').agreement_note(predicted['before'], predicted['after']))
        path = Path(out_dir) / picture(task)
        if pictures:
            with warn_on_failure(path), lock(out_dir):
                claim(out_dir, path.name)
                draw_reliability(path, [(panel_title(name, x), predicted[name])
                                        for name, x in rows.items()])


def section(task, tasks, target='text'):
    """Return the Section of `task` in {task: result}.

    target: 'text'; 'latex', with intervals in the cells, and the best of the rows of the same
    questions marked; or 'page', with a table per kind of groups
    """
    result = tasks[task]
    rows, more = report_rows(result), {}
    for kind in GROUPS.values() if target == 'page' else ():
        if group := [row for row in rows if row[0] == kind]:
            more[f'{len(group)} {kind}'] = cells(group, count=result['unit'], intervals=True)
            rows = [row for row in rows if row[0] != kind]
    table = cells(rows, count=result['unit'], intervals=target != 'text')
    if target == 'latex':
        table = mark_best(table, ['' if kind in ('pooled', 'post_hoc', 'scaled') else (kind, name)
                                  for kind, name, _ in rows])
    if 'written' in result:
        more = rooms.load('confidence').tables(task, tasks) | more
    return Section(task_title(task, result), table, notes(result),
                   [pair for pair in more.items() if pair[1]])


def to_text(tasks, labels):
    """Return the Sections of the tasks `labels` as text; a confidence is a line of its task's."""
    return '\n'.join(section(label, tasks).as_text() for label in labels
                     if '.' not in label or 'written' not in tasks.get(label.partition('.')[0], ()))


def to_csv(tasks):
    """Return one line per report of {task: result}: every metric, and the ends of its interval."""
    lines = []
    for task, result in tasks.items():
        for kind, name, report in report_rows(result):
            line = {'task': task, 'kind': kind, 'name': name,
                    'distribution': result['distribution']} | report
            if 'sample' in result:
                line['sample_of'] = result['sample']['of']
            for key, (low, high) in line.pop('intervals', {}).items():
                line |= {f'{key}_boot_low': low, f'{key}_boot_high': high}
            if reasons := line.pop('no_interval', {}):
                line['no_interval'] = '; '.join(f'{key}: {why}' for key, why in reasons.items())
            lines.append(line)
    return csv_text(lines)
