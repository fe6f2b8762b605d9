"""What samples say: metrics with intervals, tables, reliability diagrams.

Everything here is computed from the saved samples, without a model: results.json follows from
samples.jsonl.
"""

import contextlib
import csv
import io
import json
import math
import os
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import numpy as np

import metrics
from data import DataError, forked_pool, read_rows

# key in a report, title, format
SHORT = (('n', 'questions', 'd'), ('accuracy', 'accuracy', '.3f'),
         ('interval', '95 % interval', ''), ('confidence', 'confidence', '.3f'),
         ('entropy_bits', 'entropy (bits)', '.3f'), ('ece', 'ECE', '.3f'),
         ('rmsce', 'RMSCE', '.3f'))
FULL = (*SHORT, ('mad', 'MAD', '.3f'), ('sce', 'SCE', '.3f'), ('ace', 'ACE', '.3f'),
        ('brier', 'Brier', '.3f'), ('nll', 'NLL', '.3f'))


# ------------------------------------------------------------------------------------------------
# Samples
# ------------------------------------------------------------------------------------------------

class Predictions(NamedTuple):
    """What the metrics take: of questions, or of single tokens with their confidence alone."""
    probs: np.ndarray                   # [N, K]; confidence [N] of tokens
    labels: np.ndarray                  # int [N]; bool [N], right or wrong
    n_options: np.ndarray | None = None
    scores: np.ndarray | None = None    # [N, K] log-probabilities as normed, -inf for no option
    nll: np.ndarray | None = None       # of tokens [N], nats; and the entropy over the vocabulary
    entropy_bits: np.ndarray | None = None

    def at(self, rows):
        return Predictions(*(None if x is None else x[rows] for x in self))

    def report(self):
        means = {} if self.nll is None else {'entropy_bits': float(self.entropy_bits.mean()),
                                             'nll': float(self.nll.mean())}
        return metrics.report(self.probs, self.labels, self.n_options, scores=self.scores) | means

    def bootstrap(self, n_resamples, seed):
        found = metrics.bootstrap(self.probs, self.labels, self.n_options, scores=self.scores,
                                  n_resamples=n_resamples, seed=seed)
        if self.nll is not None:
            random, n = np.random.default_rng(seed), len(self.nll)
            drawn = [random.integers(n, size=n) for _ in range(n_resamples)]
            found['entropy_bits'] = np.array([self.entropy_bits[rows].mean() for rows in drawn])
            found['nll'] = np.array([self.nll[rows].mean() for rows in drawn])
        return found

    def top(self):
        """(confidence [N], right or wrong bool [N])"""
        return metrics.top_label(self.probs, self.labels)


# what a sample of a question holds for every option, and what a sample of a token holds
OPTION_KEYS = ('log_probs', 'options', 'n_tokens')
TOKEN_KEYS = ('confidence', 'correct', 'log_prob', 'entropy')


def read_samples(path):
    """Return the samples in `path` in the order of the file, as a list of dicts.

    A last line cut off by a crash is left out; a line that repeats an earlier one counts once.
    Raises DataError with file and line for any other damaged line, and for two samples of the same
    prompt that differ.
    """
    rows = list(read_rows(path))
    if rows and isinstance(rows[-1][1], DataError) and not _ends_with_newline(path):
        rows.pop()
    seen = {}
    for place, row in rows:
        if isinstance(row, DataError):
            raise row
        if wrong := _sample_error(row):
            raise DataError(f'{place}: not a sample of evaluate.py: {wrong}')
        key = (*sample_order(row), row.get('prompt'))
        first_place, first = seen.setdefault(key, (place, row))
        if row != first:
            raise DataError(f'{place}: differs from {first_place}, which is of the same question '
                            f'({row["task"]} {row["id"]}); two processes wrote this file, or it '
                            f'was edited: remove one of the two lines')
    return [row for _, row in seen.values()]


def _ends_with_newline(path):
    with open(path, 'rb') as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b'\n'


def _sample_error(row):
    """What is wrong with a row of samples.jsonl; '' if nothing is."""
    wanted = ['task', 'id', *((*OPTION_KEYS, 'answer') if 'log_probs' in row else TOKEN_KEYS)]
    if missing := [key for key in wanted if key not in row]:
        return f'it lacks {", ".join(missing)}'
    if 'log_probs' not in row:
        numbers = [row[key] for key in TOKEN_KEYS]
        return '' if all(map(_is_number, numbers)) else f'{", ".join(TOKEN_KEYS)} must be numbers'
    if not all(isinstance(row[key], list) for key in OPTION_KEYS) or not (
            0 < len(row['log_probs']) == len(row['options']) == len(row['n_tokens'])):
        return f'{", ".join(OPTION_KEYS)} must be lists with one value per option'
    if not all(map(_is_number, row['log_probs'])):
        return 'log_probs must be finite numbers'
    if type(row['answer']) is not int or not 0 <= row['answer'] < len(row['options']):
        return f'answer is {row["answer"]!r}; it must be a number below {len(row["options"])}'
    return ''


def _is_number(value):
    return isinstance(value, (int, float)) and math.isfinite(value)


def last_asked(samples):
    """The samples without those of questions that a later sample asks with another prompt."""
    prompts = {_question(s): s.get('prompt') for s in samples}
    return [s for s in samples if s.get('prompt') == prompts[_question(s)]]


def _question(sample):
    return (*sample_order(sample)[:3], sample.get('text', sample['id']))


def predictions(samples, norm):
    """Predictions of samples, all of questions or all of tokens."""
    if 'log_probs' not in samples[0]:
        return Predictions(np.array([s['confidence'] for s in samples]),
                           np.array([s['correct'] for s in samples]),
                           nll=-np.array([s['log_prob'] for s in samples]),
                           entropy_bits=np.array([s['entropy'] for s in samples]) / np.log(2))
    n_options = np.array([len(s['log_probs']) for s in samples])
    scores = np.full((len(samples), n_options.max()), -np.inf)
    for i, s in enumerate(samples):
        scores[i, :n_options[i]] = option_scores(s['log_probs'], s['options'], s['n_tokens'], norm)
    return Predictions(metrics.softmax(scores), np.array([s['answer'] for s in samples]), n_options,
                       scores)


def option_scores(log_probs, options, n_tokens, norm):
    """Log-probabilities divided by length [K]; their softmax is the distribution over the options.

    token: mean over tokens, the inverse perplexity normalised; sum: as it is; char and byte: over
    the option's characters or UTF-8 bytes without the leading space.
    """
    length = {'token': n_tokens, 'sum': np.ones(len(options)),
              'char': [len(o) - 1 for o in options],
              'byte': [len(o.encode()) - 1 for o in options]}[norm]
    return np.asarray(log_probs) / np.maximum(length, 1)


# ------------------------------------------------------------------------------------------------
# Numbers
# ------------------------------------------------------------------------------------------------

def summarize(samples, norm, *, n_bootstrap=1000, fit=False, seed=0):
    """What the samples of one task say, in any order.

    {'pooled', 'macro': reports; 'languages', 'categories', 'subjects': {name: report} where there
    are several; 'mass' of the options together; with `fit`, 'post_hoc'}. A report is what
    metrics.report gives and `intervals`, {metric: [low, high]}, 95 % by bootstrap over questions.
    macro is the mean over languages, or over subjects where there is one language.
    """
    samples = sorted(samples, key=sample_order)
    held = [s for s in samples if s.get('split') == 'validation']
    samples = [s for s in samples if s.get('split') != 'validation']
    everything = predictions(samples, norm)
    groups = {(): everything}
    for kind in ('language', 'category', 'subject'):
        rows = {}
        for i, sample in enumerate(samples):
            rows.setdefault(sample.get(kind) or '', []).append(i)
        if len(rows) > 1:
            groups |= {(kind, name): everything.at(rows[name]) for name in sorted(rows)}
    reports, resampled = measure(groups, n_bootstrap, seed)
    found = {'pooled': reports[()]}
    for plural, kind in (('languages', 'language'), ('categories', 'category'),
                         ('subjects', 'subject')):
        of_kind = {key[1]: report for key, report in reports.items() if key and key[0] == kind}
        if of_kind:
            found[plural] = of_kind
            if 'macro' not in found and kind != 'category':
                found['macro'] = mean_report(of_kind.values(),
                                             [resampled.get((kind, name)) for name in of_kind])
    if 'log_probs' in samples[0]:
        found['mass'] = float(np.mean([np.exp(s['log_probs']).sum() for s in samples]))
    if fit:
        found['post_hoc'] = post_hoc(everything, predictions(held, norm) if held else None,
                                     n_bootstrap, seed)
    return found


def split_languages(samples):
    found = {}
    for sample in samples:
        found.setdefault(sample.get('language', ''), []).append(sample)
    return found


def sample_order(sample):
    return (sample.get('split', ''), sample['task'], sample.get('language', ''), sample['id'])


def measure(groups, n_bootstrap, seed):
    """({key: report with intervals}, {key: metrics.bootstrap}) of {key: Predictions}.

    In processes, as DataLoader's workers are made, for more than a moment's work. A group's
    resamples are drawn in parts that depend on its size alone, so that the same rows give the same
    numbers on any machine. Without n_bootstrap there are no intervals, and the second is empty.
    """
    jobs = [(key, group, None, None) for key, group in groups.items()]      # its report
    for key, group in groups.items():
        n = len(group.labels)
        parts = int(np.clip(2_000_000 // n, 1, 8)) if n > 2000 else 1
        sizes = [len(x) for x in np.array_split(np.arange(n_bootstrap), parts) if len(x)]
        jobs += [(key, group, size, [seed, part]) for part, size in enumerate(sizes)]
    jobs.sort(key=lambda job: -len(job[1].labels) * (job[2] or 100))        # the largest first
    cores = forked_processes()
    if cores == 1 or sum(len(g.labels) for g in groups.values()) * n_bootstrap < 3_000_000:
        done = [_measure(job) for job in jobs]
    else:
        with forked_pool(min(cores, 16)) as pool:
            done = pool.map(_measure, jobs, chunksize=1)
    reports, found = {}, {}
    for (key, _, size, draw), values in zip(jobs, done, strict=True):
        if size is None:
            reports[key] = values
        else:
            found.setdefault(key, {})[draw[1]] = values
    resampled = {key: {name: np.concatenate([parts[i][name] for i in range(len(parts))])
                       for name in parts[0]} for key, parts in found.items()}
    return {key: with_intervals(reports[key], resampled.get(key)) for key in groups}, resampled


def forked_processes():
    """How many processes may share work: the cores; 1 but on Linux, where alone forking is safe."""
    return len(os.sched_getaffinity(0)) if sys.platform == 'linux' else 1


def _measure(job):
    _, group, size, seed = job
    return group.report() if size is None else group.bootstrap(size, seed)


def with_intervals(report, resampled):
    if resampled is None:
        return report
    intervals = {name: np.percentile(values, (2.5, 97.5)).tolist()
                 for name, values in resampled.items()}
    return report | {'intervals': intervals}


def mean_report(reports, resampled):
    """The plain mean of reports; its intervals are those of the mean of resampled groups."""
    reports = list(reports)
    keys = [key for key in reports[0] if key not in ('n', 'intervals', 'accuracy_low',
                                                     'accuracy_high')]
    mean = {'groups': len(reports)} | {k: _mean([r[k] for r in reports]) for k in keys}
    if any(values is None for values in resampled):
        return mean
    return with_intervals(mean, {key: np.mean([values[key] for values in resampled], axis=0)
                                 for key in resampled[0]})


def _mean(values):
    """Of those that are defined: AUROC is not where a subject is all right."""
    values = np.array(values, dtype=float)
    return float(values[~np.isnan(values)].mean()) if (~np.isnan(values)).any() else math.nan


def _json(value):
    """`value` with null for nan, which JSON has not."""
    if isinstance(value, dict):
        return {key: _json(x) for key, x in value.items()}
    if isinstance(value, list):
        return [_json(x) for x in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def post_hoc(test, held, n_bootstrap, seed):
    """Temperature and Platt scaling of `test`, fitted on `held` or crosswise on its two halves.

    {'fitted_on', 'temperature': [T], 'platt': [[a, b]], 'reports': {'temperature': of the scaled
    distribution, 'platt': of the scaled confidence of the same predictions}}. Crosswise there are
    two values: the first fitted on one half and applied to the other.
    """
    n = len(test.labels)
    if held is not None:
        parts, place = [(held, np.arange(n))], f'{len(held.labels)} validation questions'
    else:
        if n < 2:
            raise DataError('--temperature=fit needs two questions or more')
        shuffled = np.random.default_rng(seed).permutation(n)
        halves = np.array_split(shuffled, 2)
        parts = [(test.at(fit), use) for fit, use in (halves, halves[::-1])]
        place = 'the other half of the questions'
    found = {'fitted_on': place, 'platt': []}
    confidence, correct = test.top()
    platt, scaled = np.empty(n), None
    if test.scores is not None:
        found['temperature'], scaled = [], np.empty_like(test.scores)
    for fit, use in parts:
        a, b = metrics.fit_platt(*fit.top())
        found['platt'].append([a, b])
        platt[use] = metrics.apply_platt(confidence[use], a, b)
        if test.scores is not None:
            temperature = metrics.fit_temperature(fit.scores, fit.labels)
            found['temperature'].append(temperature)
            scaled[use] = test.scores[use] / temperature
    groups = {'platt': Predictions(platt, correct)}
    if test.scores is not None:
        groups['temperature'] = Predictions(metrics.softmax(scaled), test.labels, test.n_options,
                                            scaled)
    found['reports'] = measure(dict(sorted(groups.items(), reverse=True)), n_bootstrap, seed)[0]
    return found


# ------------------------------------------------------------------------------------------------
# Files and tables
# ------------------------------------------------------------------------------------------------

def write_text(path, text):
    """Writes a file whole: under a temporary name, then renamed."""
    part = Path(f'{path}.tmp')
    part.write_text(text, encoding='utf-8')
    os.replace(part, path)


@contextlib.contextmanager
def warn_on_failure(name):
    """Print a warning if writing `name` fails inside; the run goes on without it."""
    try:
        yield
    except Exception as error:      # matplotlib raises many kinds
        print(f'warning: {name} was not written: {type(error).__name__}: {error}',
              file=sys.stderr)


def save(results, panels, out_dir):
    """Write results.csv, .md and .json, reliability.png, and a grid for several languages.

    panels: {task: (Predictions, {language: Predictions})}; {} for no pictures
    Only results.json has to succeed: a table or a picture that fails is a warning.
    """
    out_dir = Path(out_dir)
    with warn_on_failure(out_dir / 'results.csv'):
        write_text(out_dir / 'results.csv', to_csv(results))
    with warn_on_failure(out_dir / 'results.md'):
        write_text(out_dir / 'results.md', to_markdown(results))
    # after the tables: a folder that has results.json has them
    write_text(out_dir / 'results.json', json.dumps(_json(results), indent=1, ensure_ascii=False)
               + '\n')
    if panels:
        draw_reliability(out_dir / 'reliability.png',
                         [(task, p) for task, (p, _) in panels.items()])
    for task, (_, languages) in panels.items():
        if languages:
            draw_reliability(out_dir / f'reliability-{task}-languages.png', languages.items(),
                             columns=7)


def report_rows(result):
    """[(kind, name, report)] of one task's result."""
    rows = [(plural, name, report) for plural in ('subjects', 'categories', 'languages')
            for name, report in result.get(plural, {}).items()]
    rows.append(('pooled', 'pooled', result['pooled']))
    if 'macro' in result:
        rows.append(('macro', 'macro', result['macro']))
    for name, report in result.get('post_hoc', {}).get('reports', {}).items():
        rows.append(('post_hoc', f'{name} scaling', report))
    return rows


def setting(task, result):
    """What the numbers of a task mean: 'mmlu (preset mmlu, 5 shots, letters, token)'.

    Says also if only a sample of the task was scored. Raises DataError where `result` is of an
    earlier version, without its distribution.
    """
    if 'distribution' not in result:
        raise DataError(f'the results of {task} do not say how it was scored: they are of an '
                        f'earlier version; evaluate again')
    how = f'preset {result["distribution"]}' if 'mass' in result else 'top token'
    if sample := result.get('sample'):
        how += f'; sample of {sample["questions"]:,} of {sample["of"]:,} questions'
    return f'{task} ({how})'


def heading(task, result):
    """One line on how the numbers of a task came about."""
    text = setting(task, result)[:-1]
    if 'mass' in result:
        text += f'; the options together have probability {result["mass"]:.3f} of the model'
    if 'post_hoc' in result:
        fitted = result['post_hoc']
        values = [f'a {a:.3f}, b {b:.3f}' for a, b in fitted['platt']]
        text += f'; Platt scaling by {" and ".join(values)}'
        if 'temperature' in fitted:
            text += ', temperature ' + ' and '.join(f'{t:.3f}' for t in fitted['temperature'])
        text += f', fitted on {fitted["fitted_on"]}'
    return text + ')'


def notes(result):
    """What a reader of a task's table should know besides, a line each."""
    lines = []
    if result.get('bad_rows'):
        lines.append(f'{result["bad_rows"]} bad rows left out, the first: '
                     f'{result["first_bad"]}')
    if result.get('fewer_shots'):
        lines.append(f'{result["fewer_shots"]} questions had fewer shots: their prompts were too '
                     f'long')
    if result.get('duplicate_options'):
        lines.append(f'{result["duplicate_options"]} questions list the same option twice')
    return lines


def task_text(task, result):
    """Heading, table and notes of a task, as text."""
    rows = [(name, report) for _, name, report in report_rows(result)]
    return '\n'.join([heading(task, result), table(rows), *notes(result)])


def cells(rows, columns, first='group'):
    """[[text]] of [(name, report)] under a header; what a report lacks stays empty."""
    found = [[first, *(title for _, title, _ in columns)]]
    for name, report in rows:
        values = dict(report)
        if 'accuracy_low' in report:
            values['interval'] = f'{report["accuracy_low"]:.3f}-{report["accuracy_high"]:.3f}'
        elif 'intervals' in report:
            values['interval'] = '{:.3f}-{:.3f}'.format(*report['intervals']['accuracy'])
        found.append([name, *(format(values[key], spec) if key in values else ''
                              for key, _, spec in columns)])
    used = [any(column[1:]) for column in zip(*found, strict=True)]
    used[0] = True
    return [[text for text, use in zip(row, used, strict=True) if use] for row in found]


def table(rows, columns=FULL, first='group'):
    """A text table of [(row name, report)]; `first` is the title of the names."""
    return aligned(cells(rows, columns, first))


def aligned(found):
    widths = [max(map(len, column)) for column in zip(*found, strict=True)]
    lines = ['  '.join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(r, widths)))
             for r in found]
    return '\n'.join([lines[0], '-' * len(lines[0]), *lines[1:]])


def markdown(found):
    lines = ['| ' + ' | '.join(cell.replace('|', '\\|') for cell in row) + ' |' for row in found]
    return '\n'.join([lines[0], '|' + '---|' * len(found[0]), *lines[1:]]) + '\n'


def to_markdown(results):
    parts = []
    for task, result in results['tasks'].items():
        rows = [(name, report) for _, name, report in report_rows(result)]
        parts.append(f'### {heading(task, result)}\n\n{markdown(cells(rows, FULL))}'
                     + ''.join(f'\n{line}\n' for line in notes(result)))
    return '\n'.join(parts)


def to_csv(results):
    """One line per report: every metric and the ends of its interval."""
    lines = []
    for task, result in results['tasks'].items():
        how = {'distribution': result['distribution']}
        if 'sample' in result:
            how['sample_of'] = result['sample']['of']
        for kind, name, report in report_rows(result):
            line = {'task': task, 'kind': kind, 'name': name} | how
            line |= {key: value for key, value in report.items() if key != 'intervals'}
            for key, (low, high) in report.get('intervals', {}).items():
                line[f'{key}_boot_low'], line[f'{key}_boot_high'] = low, high
            lines.append(line)
    return csv_text(lines)


def csv_text(lines):
    """CSV of dicts; its columns are the keys of all of them, in the order in which they come."""
    file = io.StringIO()
    writer = csv.DictWriter(file, list(dict.fromkeys(key for line in lines for key in line)),
                            lineterminator='\n')
    writer.writeheader()
    writer.writerows(lines)
    return file.getvalue()


# ------------------------------------------------------------------------------------------------
# Pictures
# ------------------------------------------------------------------------------------------------

def draw_reliability(path, panels, n_bins=10, columns=5):
    """Reliability diagrams of panels = [(title, Predictions), ...], as `draw_bins` draws them."""
    with warn_on_failure(path):
        draw_bins(path, [(title, {'accuracy': metrics.accuracy(found.probs, found.labels),
                                  'confidence': metrics.mean_confidence(found.probs, found.labels),
                                  'ECE': metrics.ece(found.probs, found.labels, n_bins)},
                          metrics.bins(found.probs, found.labels, n_bins))
                         for title, found in panels], columns)


def draw_bins(path, panels, columns=5):
    """Reliability diagrams side by side, PNG: panels = [(title, {name: number}, bins), ...].

    bins: as metrics.bins gives them.
    Bars: accuracy of the questions whose confidence falls into the bin, with its 95 % Wilson
    interval; the gap to their mean confidence is shaded. Below: the share of questions in each bin.
    More than `columns` panels take several rows.
    """
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(2 * rows, columns, squeeze=False, sharex=True,
                                figsize=(max(3.6 * columns, 4.5), 4.6 * rows + 0.5),
                                height_ratios=(3, 1) * rows, layout='constrained')
    highest = max(float(bins['count'].max() / bins['count'].sum()) for _, _, bins in panels)
    for i in range(rows * columns):
        top, bottom = axes[i // columns * 2:, i % columns][:2]
        if i >= len(panels):
            top.axis('off')
            bottom.axis('off')
            continue
        _draw_panel(top, bottom, *panels[i])
        bottom.set_ylim(0, 1.05 * highest)
        if i % columns == 0:
            top.set_ylabel('accuracy')
            bottom.set_ylabel('share')
        else:
            top.tick_params(labelleft=False)
            bottom.tick_params(labelleft=False)
        if i + columns >= len(panels):
            bottom.set_xlabel('confidence')
            bottom.tick_params(labelbottom=True)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc='outside lower center', fontsize=8,
                  frameon=False, ncols=1 if columns == 1 else 2 if columns < 4 else 5)
    save_figure(figure, path, 150 if rows == 1 else 80)


# the gap between accuracy and confidence, by its sign: label and color
GAPS = (('overconfident: confidence above accuracy', '#e8a29e'),
        ('underconfident: confidence below accuracy', '#f5c566'))


def _draw_panel(top, bottom, title, numbers, bins):
    """One reliability diagram on the axes `top`, the shares of its bins on `bottom`."""
    n_bins, count = len(bins['count']), bins['count'].sum()
    used = bins['count'] > 0
    left, width = np.arange(n_bins)[used] / n_bins, 1 / n_bins
    accuracy, confidence, low, high = (bins[key][used] for key in (
        'accuracy', 'confidence', 'low', 'high'))
    top.bar(left, accuracy, width, align='edge', color='#4878a8', edgecolor='white',
            label='accuracy of the bin')
    for (label, color), gap in zip(GAPS, (confidence - accuracy, accuracy - confidence)):
        # with a height of 0 in the other bins, so that every picture has both in its legend
        top.bar(left, np.maximum(gap, 0), width, align='edge', color=color, label=label,
                bottom=np.minimum(accuracy, confidence))
    top.errorbar(left + width / 2, accuracy, (accuracy - low, high - accuracy), fmt='none',
                 color='black', linewidth=1, capsize=2,
                 label='95 % Wilson interval of the accuracy')
    top.plot((0, 1), (0, 1), color='black', linewidth=1, linestyle='--',
             label='perfect calibration')
    top.set_title('{}\naccuracy {accuracy:.3f}, confidence {confidence:.3f}\n'
                  'ECE {ECE:.3f}, n = {n:,}'.format(figure_title(title, 36), n=int(count),
                                                    **numbers), fontsize=9)
    top.set(xlim=(0, 1), ylim=(0, 1))
    bottom.bar(left, bins['count'][used] / count, width, align='edge', color='#888888',
               edgecolor='white')


def figure_title(text, width):
    """`text` in at most three lines of `width` characters, with no mathematics between $ signs."""
    return '\n'.join(textwrap.wrap(text.replace('$', r'\$'), width, max_lines=3))


def save_figure(figure, path, dpi):
    """Writes a PNG whole: under a temporary name, then renamed; the figure is closed."""
    import matplotlib.pyplot as plt
    part = f'{path}.tmp'
    figure.savefig(part, format='png', dpi=dpi)
    plt.close(figure)
    os.replace(part, path)
