"""The samples of one run: metrics with intervals, tables and reliability diagrams.

Nothing here needs a model: results.json can be computed again from samples.jsonl.
"""

import contextlib
import csv
import functools
import io
import itertools
import json
import math
import operator
import re
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import numpy as np

import metrics
import scaling
import stats
from data.files import read_rows
from runtime.errors import DataError
from runtime.ownership import claim, temporary, write_text
from runtime.processes import parallel_map

SCHEMA = 1      # of results.json, as docs/evaluation.md states it; keys that are added keep it
# the columns of a table: key in a report, title, format
SHORT = (('n', 'questions', 'd'), ('accuracy', 'accuracy', '.3f'),
         ('interval', '95 % interval', ''), ('confidence', 'confidence', '.3f'),
         ('entropy_bits', 'entropy (bits)', '.3f'), ('ece', 'ECE', '.3f'),
         ('rmsce', 'RMSCE', '.3f'))
FULL = (*SHORT, ('mad', 'MAD', '.3f'), ('sce', 'SCE', '.3f'), ('ace', 'ACE', '.3f'),
        ('brier', 'Brier', '.3f'), ('nll', 'NLL (nats)', '.3f'))
# titles of the columns in which a row can be the best: the highest is, or else the lowest
BETTER = re.compile(r'(?!p |.* - )(?:.* )?(?:(accuracy|AUROC)|ECE|RMSCE|MAD|SCE|ACE|Brier'
                    r'|NLL \(nats\)|RMS as \w+)')
# a sample's key that names a group of questions, and the groups' name in results.json
GROUPS = {'language': 'languages', 'category': 'categories', 'subject': 'subjects'}

# Samples


class Predictions(NamedTuple):
    """What the metrics take: distributions over options, or the confidence in single tokens."""
    probs: np.ndarray                   # [N, K]; of tokens the confidence [N]
    labels: np.ndarray                  # int [N]; of tokens bool [N], right or wrong
    n_options: np.ndarray | None = None
    scores: np.ndarray | None = None    # [N, K] normalized log-probabilities, -inf for no option
    nll: np.ndarray | None = None       # of tokens [N], in nats
    entropy_bits: np.ndarray | None = None      # of tokens [N], over the whole vocabulary

    def at(self, rows):
        return Predictions(*(None if x is None else x[rows] for x in self))

    def report(self):
        """Return all metrics, as metrics.report names them."""
        report = metrics.report(self.probs, self.labels, self.n_options, scores=self.scores)
        return report | {name: float(x.mean()) for name, x in self._of_tokens().items()}

    def bootstrap(self, n_resamples, seed):
        """Return {metric: [n_resamples]}, its values on questions drawn with replacement."""
        values = stats.bootstrap(self.probs, self.labels, self.n_options, scores=self.scores,
                                 n_resamples=n_resamples, seed=seed)
        for name, x in self._of_tokens().items():
            random = np.random.default_rng(seed)
            values[name] = np.array([random.choice(x, len(x)).mean() for _ in range(n_resamples)])
        return values

    def _of_tokens(self):
        return {} if self.nll is None else {'entropy_bits': self.entropy_bits, 'nll': self.nll}


def read_samples(path):
    """Return the samples in `path` in the order of the file, as a list of dicts.

    A last line cut off by a crash is left out; a line that repeats an earlier one counts once.
    Raises DataError with file and line for any other damaged line, and for a sample that differs
    from the last one of the same question and prompt.
    """
    rows = list(read_rows(path))
    if rows and isinstance(rows[-1][1], DataError) and not Path(path).read_bytes().endswith(b'\n'):
        rows.pop()
    samples, last = [], {}
    for place, row in rows:
        if not _is_sample(row):
            fault = row if isinstance(row, DataError) else (
                f'{place}: not a sample that evaluate.py wrote')
            raise DataError(f'{fault}; delete this line, and its question is scored again')
        last_place, other = last.get(sample_order(row), (None, {}))
        if row == other:
            continue
        if other and row.get('prompt') == other.get('prompt'):
            raise DataError(f'{place}: differs from {last_place}, which is of the same question '
                            f'({row["task"]} {row["id"]}); two processes wrote this file, or it '
                            f'was edited: remove one of the two lines')
        last[sample_order(row)] = place, row
        samples.append(row)
    return samples


def _is_sample(row):
    """Return whether a row of samples.jsonl has the fields that `predictions` needs."""
    try:
        row['task'], row['id']
        if 'log_probs' not in row:
            return all(math.isfinite(row[key]) for key in (
                'confidence', 'correct', 'log_prob', 'entropy'))
        n = len(row['options'])
        return (n == len(row['log_probs']) == len(row['n_tokens']) > row['answer'] >= 0
                and type(row['answer']) is int and all(map(math.isfinite, row['log_probs'])))
    except (KeyError, TypeError):
        return False


def sample_order(sample):
    """Return a key that sorts samples; it is equal only for two samples of one question."""
    return sample['task'], sample.get('split', ''), sample.get('language', ''), sample['id']


def sample_key(sample):
    """Return a key of the question or text that a sample belongs to."""
    return (*sample_order(sample)[:3], sample.get('text', sample['id']))


def last_asked(samples):
    """Return the samples of the last prompt of each question or text, without repetitions."""
    prompts = {sample_key(s): s.get('prompt') for s in samples}
    return list({(sample_key(s), s['id']): s for s in samples
                 if s.get('prompt') == prompts[sample_key(s)]}.values())


def split_groups(samples, key, of_all):
    """Return {value of `key`: its rows of the Predictions `of_all`}; {} if all have one value."""
    values = np.array([sample.get(key) or '' for sample in samples])
    several = sorted({*values.tolist()})
    return {value: of_all.at(values == value) for value in several if len(several) > 1}


def predictions(samples, norm):
    """Return the Predictions of samples, either all of questions or all of tokens."""
    if 'log_probs' not in samples[0]:
        confidence, correct, log_prob, entropy = (np.array([s[key] for s in samples]) for key in (
            'confidence', 'correct', 'log_prob', 'entropy'))
        return Predictions(confidence, correct, nll=-log_prob, entropy_bits=entropy / np.log(2))
    n_options = np.array([len(s['log_probs']) for s in samples])
    scores = np.full((len(samples), n_options.max()), -np.inf)
    of_options = ([*itertools.chain.from_iterable(s[key] for s in samples)]
                  for key in ('log_probs', 'options', 'n_tokens'))
    scores[np.arange(scores.shape[1]) < n_options[:, None]] = option_scores(*of_options, norm)
    return Predictions(metrics.softmax(scores), np.array([s['answer'] for s in samples]), n_options,
                       scores)


def option_scores(log_probs, options, n_tokens, norm):
    """Return log-probabilities / length [K]; their softmax is the distribution over the options.

    norm: 'token' gives the mean over tokens, the logarithm of the inverse perplexity; 'sum' divides
    by nothing; 'char' and 'byte' divide by the characters or UTF-8 bytes of the option without its
    leading space.
    """
    length = {'token': n_tokens, 'sum': np.ones(len(options)),
              'char': [len(o) - 1 for o in options],
              'byte': [len(o.encode()) - 1 for o in options]}[norm]
    return np.asarray(log_probs) / np.maximum(length, 1)


# Metrics and their intervals


def summarize(samples, norm, *, n_bootstrap=1000, fit=False, seed=0):
    """Return the metrics of one task; the order of its samples does not matter.

    {'pooled', 'macro': reports; 'languages', 'categories', 'subjects': {name: report} if there are
    several; 'mass': mean probability of all options together; 'post_hoc' if `fit`}. A report is
    that of metrics.report and 'intervals', {metric: [low, high]}: 95 % by bootstrap over questions.
    macro is the mean over languages, or over subjects if there is one language.
    """
    samples = sorted(samples, key=sample_order)
    held_out = [s for s in samples if s.get('split') == 'validation']
    samples = [s for s in samples if s.get('split') != 'validation']
    pooled = predictions(samples, norm)
    groups = {('pooled', ''): pooled}
    for key, plural in GROUPS.items():
        groups |= {(plural, name): group
                   for name, group in split_groups(samples, key, pooled).items()}
    reports, resampled = measure(groups, n_bootstrap, seed)
    summary = {'pooled': reports.pop(('pooled', ''))}
    for (plural, name), report in reports.items():
        summary.setdefault(plural, {})[name] = report
    if plural := next((x for x in ('languages', 'subjects') if x in summary), None):
        summary['macro'] = mean_report([*summary[plural].values()], [
            resampled[plural, name] for name in summary[plural]])
    if 'log_probs' in samples[0]:
        summary['mass'] = float(np.mean([np.exp(s['log_probs']).sum() for s in samples]))
    if fit:
        summary['post_hoc'] = post_hoc(pooled, predictions(held_out, norm) if held_out else None,
                                       n_bootstrap, seed)
    return summary


def measure(groups, n_bootstrap, seed):
    """Return ({key: report with intervals}, {key: {metric: resampled values}}) of `groups`.

    groups: {key: Predictions}

    Without n_bootstrap there are neither intervals nor resampled values. The resamples of a group
    are drawn in parts that depend on its size alone, so that the same rows give the same numbers on
    every machine.
    """
    jobs, reports, resampled = {}, {}, {}
    for key, group in groups.items():
        n = len(group.labels)
        n_parts = int(np.clip(2_000_000 // n, 1, 8)) if n > 2000 else 1
        sizes = filter(None, map(len, np.array_split(range(n_bootstrap), n_parts)))
        jobs[key] = [group.report, *(functools.partial(group.bootstrap, size, [seed, part])
                                     for part, size in enumerate(sizes))]
    n_drawn = sum(len(group.labels) for group in groups.values()) * n_bootstrap
    # without start_workers, w processes take 7e-8 n_drawn / w seconds of work and 0.025 w of
    # forking, one after the other
    outcomes = iter(parallel_map(operator.call, [*itertools.chain(*jobs.values())],
                                 worth_it=n_drawn >= 3_000_000,
                                 most=round(math.sqrt(7e-8 * n_drawn / 0.025))))
    for key, of_key in jobs.items():
        report, *parts = itertools.islice(outcomes, len(of_key))
        resampled[key] = {name: np.concatenate([part[name] for part in parts])
                          for name in (parts[0] if parts else ())}
        reports[key] = report | intervals(resampled[key])
    return reports, resampled


def intervals(resampled):
    """Return {'intervals': the 2.5 and 97.5 % percentiles of {metric: values}}; {} of nothing."""
    ends = {name: np.percentile(values, (2.5, 97.5)).tolist() for name, values in resampled.items()}
    return {'intervals': ends} if ends else {}


def mean_report(reports, resampled):
    """Return the mean of reports; its intervals are those of the mean of the resampled groups."""
    mean = {'groups': len(reports)}
    for key in reports[0]:
        if key not in ('n', 'intervals', 'accuracy_low', 'accuracy_high'):
            # a metric can be undefined for a group, as AUROC is if every answer is correct
            values = [r[key] for r in reports if not math.isnan(r[key])]
            mean[key] = float(np.mean(values)) if values else math.nan
    return mean | intervals({key: np.mean([values[key] for values in resampled], axis=0)
                             for key in resampled[0]})


def post_hoc(test, held_out, n_bootstrap, seed):
    """Return temperature and Platt scaling of `test`, fitted on `held_out`.

    Without `held_out` each half of `test` is scaled by what was fitted on the other half, and there
    are two values of each parameter. Returns {'fitted_on', 'temperature': [T], 'platt': [[a, b]],
    'reports': {'temperature': of the scaled distribution, 'platt': of the scaled confidence}}.
    """
    n, fitted_on = len(test.labels), 'the other half of the questions'
    if held_out is not None:
        parts = [(held_out, np.arange(n))]
        fitted_on = f'{len(held_out.labels)} validation questions'
    elif n < 2:
        raise DataError('--temperature=fit needs two questions or more')
    else:
        halves = np.array_split(np.random.default_rng(seed).permutation(n), 2)
        parts = [(test.at(fit), use) for fit, use in (halves, halves[::-1])]
    fitted, groups, platt = {'fitted_on': fitted_on, 'platt': []}, {}, np.empty(n)
    confidence, correct = metrics.top_label(test.probs, test.labels)
    if test.scores is not None:
        fitted['temperature'] = [scaling.fit_temperature(fit.scores, fit.labels)
                                 for fit, _ in parts]
        scores = test.scores.copy()
        for (_, use), temperature in zip(parts, fitted['temperature'], strict=True):
            scores[use] /= temperature
        groups['temperature'] = test._replace(probs=metrics.softmax(scores), scores=scores)
    for fit, use in parts:
        a, b = scaling.fit_platt(*metrics.top_label(fit.probs, fit.labels))
        fitted['platt'].append([a, b])
        platt[use] = scaling.apply_platt(confidence[use], a, b)
    groups['platt'] = Predictions(platt, correct)
    return fitted | {'reports': measure(groups, n_bootstrap, seed)[0]}


# Tables


def task_title(task, result):
    """Return a task and its settings, as in 'mmlu (preset mmlu, 5 shots, letters, token)'.

    Raises DataError for a result of an earlier version, which does not say how it was scored.
    """
    if 'distribution' not in result:
        raise DataError(f'the results of {task} do not say how it was scored: they are of an '
                        f'earlier version; evaluate again')
    scored = f'preset {result["distribution"]}' if 'mass' in result else result['distribution']
    if sample := result.get('sample'):
        scored += f'; sample of {sample["questions"]:,} of {sample["of"]:,} questions'
    return f'{task} ({scored})'


def panel_title(name, result):
    """Return the title of a diagram: `name`, and '(sample)' where --limit drew the questions."""
    return f'{name} (sample)' if 'sample' in result else name


def notes(result):
    """Return the notes below a task's table, as lines."""
    lines = []
    if 'mass' in result:
        lines.append(f'the options together have a mean probability of {result["mass"]:.3f}'
                     + '; with so little, another scoring or prompt may suit the model better'
                     * (result['mass'] < 0.01))
    if fitted := result.get('post_hoc'):
        values = [f'temperature {t:.3f}' for t in fitted.get('temperature', ())]
        values += [f'Platt scaling a {a:.3f}, b {b:.3f}' for a, b in fitted['platt']]
        lines.append(f'fitted on {fitted["fitted_on"]}: {"; ".join(values)}')
    if result.get('bad_rows'):
        lines.append(f'{result["bad_rows"]} bad rows left out, the first: {result["first_bad"]}')
    if result.get('fewer_shots'):
        lines.append(f'{result["fewer_shots"]} questions had fewer than {result["shots"]} shots: '
                     f'their prompts were too long')
    if result.get('duplicate_options'):
        lines.append(f'{result["duplicate_options"]} questions list the same option twice')
    return lines


def report_rows(result):
    """Return [(kind, name, report)] of one task's result."""
    rows = [(plural, name, report) for plural in reversed(GROUPS.values())
            for name, report in result.get(plural, {}).items()]
    rows += [(kind, kind, result[kind]) for kind in ('pooled', 'macro') if kind in result]
    rows += [('post_hoc', f'{name} scaling', report)
             for name, report in result.get('post_hoc', {}).get('reports', {}).items()]
    return rows


def cells(rows, columns=FULL, first='group', intervals=False):
    """Return the cells of rows = [(..., name, report)], header first, without empty columns.

    intervals: with the bootstrap interval in each cell, as in '0.102 [0.091, 0.113]'
    """
    names, texts = [first, *(name for *_, name, _ in rows)], []
    for *_, report in rows:
        text = {key: format(report[key], spec) + (interval_text(report, key) if intervals else '')
                for key, _, spec in columns if key in report}
        if 'accuracy_low' in report:
            text['interval'] = f'{report["accuracy_low"]:.3f}-{report["accuracy_high"]:.3f}'
        elif 'intervals' in report:
            text['interval'] = '{:.3f}-{:.3f}'.format(*report['intervals']['accuracy'])
        texts.append(text)
    filled = [[title, *(text.get(key, '') for text in texts)] for key, title, _ in columns
              if any(key in text for text in texts)]
    return [*zip(names, *filled, strict=True)]


def interval_text(report, metric):
    """Return ' [0.091, 0.113]', the bootstrap interval of a metric; '' if there is none."""
    ends = report.get('intervals', {}).get(metric)
    return ' [{:.3f}, {:.3f}]'.format(*ends) if ends else ''


def mark_best(lines, groups):
    """Return lines of cells with ' *' behind the best cells of each metric in each group.

    groups: a key for each line below the header. Where all cells are equal, none is the best.
    """
    marked = [list(line) for line in lines]
    for column, title in enumerate(lines[0]):
        better, values = BETTER.fullmatch(title), {}
        for line, group in zip(marked[1:], groups, strict=True) if better else ():
            if line[column] not in ('', 'nan'):
                value = float(line[column].split()[0])
                values.setdefault(group, []).append((value if better[1] else -value, line))
        for of_group in values.values():
            best = max(value for value, _ in of_group)
            if any(value < best for value, _ in of_group):
                for _, line in (pair for pair in of_group if pair[0] == best):
                    line[column] += ' *'
    return marked


def aligned(lines):
    """Return lines of cells as text, the first column aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = ['  '.join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])
             for line in lines]
    return '\n'.join([texts[0], '-' * len(texts[0]), *texts[1:]])


def markdown(lines):
    """Return lines of cells as a Markdown table."""
    texts = ['| ' + ' | '.join(cell.replace('|', '\\|') for cell in line) + ' |' for line in lines]
    return '\n'.join([texts[0], '|' + '---|' * len(lines[0]), *texts[1:]]) + '\n'


def latex(lines, title=''):
    r"""Return lines of cells as a LaTeX table below its title; it needs \usepackage{booktabs}.

    A cell that ends in ' *' is bold. The interval of '0.102 [0.091, 0.113]' becomes
    \confint{0.091}{0.113}, which prints nothing unless the document defines that command.
    """
    head, *body = [' & '.join(map(_latex_cell, line)) + r' \\' for line in lines]
    top = [rf'\noindent {latex_text(title)}\par\smallskip'] if title else []
    top += [r'\providecommand{\confint}[2]{}'] if any(r'\confint' in line for line in body) else []
    return '\n'.join([*top, f'\\begin{{tabular}}{{l{"r" * (len(lines[0]) - 1)}}}', r'\toprule',
                      head, r'\midrule', *body, r'\bottomrule', r'\end{tabular}', ''])


def _latex_cell(cell):
    text, low, high, star = re.fullmatch(r'(.*?)(?: \[(\S+), (\S+)\])?( \*)?\s*', cell,
                                         re.DOTALL).groups()
    text = rf'\textbf{{{latex_text(text)}}}' if star else latex_text(text)
    return text + (rf'\confint{{{latex_text(low)}}}{{{latex_text(high)}}}' if low else '')


def latex_text(text):
    """Return text as LaTeX prints it; `[` and `*` in braces: a row may begin with them."""
    escape = {'\\': r'\textbackslash{}', '~': r'\textasciitilde{}', '^': r'\textasciicircum{}',
              '<': r'\textless{}', '>': r'\textgreater{}', '|': r'\textbar{}', '±': r'$\pm$'}
    escape |= {c: f'\\{c}' for c in '&%$#_{}'} | {c: f'{{{c}}}' for c in '[*'}
    text = text.translate(str.maketrans(escape)).replace('--', '-{}-')      # -- would be a dash
    return re.sub(r'(?<!\S)-(?=\d)', '$-$', text)


def csv_text(lines):
    """Return a CSV of dicts; its columns are all their keys, in order of first occurrence."""
    file = io.StringIO()
    writer = csv.DictWriter(file, list(dict.fromkeys(key for line in lines for key in line)),
                            lineterminator='\n')
    writer.writeheader()
    writer.writerows(lines)
    return file.getvalue()


# Files


def task_text(task, result):
    """Return title, table and notes of a task, for printing."""
    table = aligned(cells(report_rows(result)))
    return '\n'.join([task_title(task, result), table, *notes(result)])


def print_report(runs, out_dir, pictures=True):
    """Print one table per task and draw reliability-<task>.png of all runs side by side.

    runs: {name: (results of evaluate.evaluate or None, folder that holds its samples)}
    """
    runs = [(name, results['tasks'], folder) for name, (results, folder) in runs.items() if results]
    for task in dict.fromkeys(task for _, tasks, _ in runs for task in tasks):
        rows = [(name, tasks[task], folder) for name, tasks, folder in runs if task in tasks]
        print(f'\n{task_title(task, rows[0][1])}')
        print(aligned(cells([(name, result['pooled']) for name, result, _ in rows], SHORT, 'run')))
        if pictures:
            panels = [(panel_title(name, result), predictions([
                s for s in last_asked(read_samples(Path(folder) / 'samples.jsonl'))
                if s['task'] == task and s.get('split') != 'validation'], result['norm']))
                for name, result, folder in rows]
            path = Path(out_dir) / f'reliability-{task}.png'
            with warn_on_failure(path):
                claim(out_dir, path.name)
                draw_reliability(path, panels)


def to_markdown(results):
    """Return title, table and notes of every task, in Markdown."""
    return '\n'.join(f'### {task_title(task, result)}\n\n{markdown(cells(report_rows(result)))}'
                     + ''.join(f'\n{line}\n' for line in notes(result))
                     for task, result in results['tasks'].items())


def to_latex(results):
    """Return title, table and notes of every task, for LaTeX.

    Bold is the best of the rows of the same questions: pooled, and scaled by what was fitted.
    """
    columns, texts = [column for column in FULL if column[0] != 'interval'], []
    for task, result in results['tasks'].items():
        rows = report_rows(result)
        groups = ['' if kind in ('pooled', 'post_hoc') else (kind, name) for kind, name, _ in rows]
        table = mark_best(cells(rows, columns, intervals=True), groups)
        texts += [latex(table, task_title(task, result)),
                  *(f'{latex_text(line)}\n' for line in notes(result))]
    return '\n'.join(texts)


def to_csv(results):
    """Return one line per report: every metric and the bounds of its interval."""
    lines = []
    for task, result in results['tasks'].items():
        scored = {'distribution': result['distribution']}
        if 'sample' in result:
            scored['sample_of'] = result['sample']['of']
        for kind, name, report in report_rows(result):
            line = {'task': task, 'kind': kind, 'name': name} | scored | report
            for key, (low, high) in line.pop('intervals', {}).items():
                line |= {f'{key}_boot_low': low, f'{key}_boot_high': high}
            lines.append(line)
    return csv_text(lines)


def write_results(results, out_dir):
    """Write results.csv, .md, .tex and .json; a table that fails is a warning."""
    out_dir = Path(out_dir)
    for name, to_text in (('results.csv', to_csv), ('results.md', to_markdown),
                          ('results.tex', to_latex)):
        with warn_on_failure(out_dir / name):
            write_text(out_dir / name, to_text(results))
    # written last: a folder with results.json has the tables; NaN is null in JSON
    finite = json.loads(json.dumps(results), parse_constant=lambda name: None)
    write_text(out_dir / 'results.json', json.dumps(finite, indent=1, ensure_ascii=False) + '\n')


@contextlib.contextmanager
def warn_on_failure(name):
    """Print a warning if writing `name` fails inside; the run goes on without that file."""
    try:
        yield
    except Exception as error:      # matplotlib raises many kinds
        print(f'warning: {name} was not written: {type(error).__name__}: {error}',
              file=sys.stderr)


# Pictures


def draw_reliability(path, panels, columns=5):
    """Draw panels = [(title, Predictions), ...] as `draw_bins` does; a failure is a warning."""
    measured = {'accuracy': metrics.accuracy, 'confidence': metrics.mean_confidence,
                'ECE': metrics.ece}
    with warn_on_failure(path):
        draw_bins(path, [(title, {name: metric(*p[:2]) for name, metric in measured.items()},
                          metrics.bins(*p[:2])) for title, p in panels], columns)


def draw_bins(path, panels, columns=5):
    """Draw reliability diagrams side by side, PNG: panels = [(title, {name: number}, bins), ...].

    bins: as metrics.bins returns them.
    Bars: accuracy of the questions whose confidence falls into the bin, with its 95 % Wilson
    interval; the gap to their mean confidence is shaded. Below: the share of questions in each bin.
    More than `columns` panels take several rows.
    """
    from matplotlib.figure import Figure
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(max(3.6 * columns, 4.5), 4.6 * rows + 0.5), layout='constrained')
    axes = figure.subplots(2 * rows, columns, squeeze=False, sharex=True, sharey='row',
                           height_ratios=(3, 1) * rows)
    highest = max(float(bins['count'].max() / bins['count'].sum()) for _, _, bins in panels)
    for i, panel in enumerate(panels):
        top, bottom = axes[i // columns * 2:, i % columns][:2]
        _draw_panel(top, bottom, *panel)
        bottom.set_ylim(0, 1.05 * highest)
        if i % columns == 0:
            top.set_ylabel('accuracy')
            bottom.set_ylabel('share')
        if i + columns >= len(panels):
            bottom.set_xlabel('confidence')
            bottom.tick_params(labelbottom=True)
    for ax in axes[-2:, len(panels) - columns * (rows - 1):].flat:
        ax.axis('off')
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc='outside lower center', fontsize=8,
                  frameon=False, ncols=1 if columns == 1 else 2 if columns < 4 else 5)
    save_figure(figure, path, 150 if rows == 1 else 80)


def _draw_panel(top, bottom, title, numbers, bins):
    """Draw a reliability diagram on the axes `top`, the fractions in its bins on `bottom`."""
    used, n, width = bins['count'] > 0, bins['count'].sum(), 1 / len(bins['count'])
    left = np.flatnonzero(used) * width
    accuracy, confidence, low, high = (bins[key][used] for key in (
        'accuracy', 'confidence', 'low', 'high'))
    bar = {'width': width, 'align': 'edge'}
    top.bar(left, accuracy, color='#4878a8', edgecolor='white', label='accuracy of the bin', **bar)
    # bars of height 0 too, so that every picture has both colors in its legend
    top.bar(left, np.maximum(confidence - accuracy, 0), bottom=accuracy, color='#e8a29e',
            label='overconfident: confidence above accuracy', **bar)
    top.bar(left, np.maximum(accuracy - confidence, 0), bottom=confidence, color='#f5c566',
            label='underconfident: confidence below accuracy', **bar)
    ends = np.maximum((accuracy - low, high - accuracy), 0)     # -1e-16 by rounding
    top.errorbar(left + width / 2, accuracy, ends, fmt='none', color='black', linewidth=1,
                 capsize=2, label='95 % Wilson interval of the accuracy')
    top.plot((0, 1), (0, 1), '--', color='black', linewidth=1, label='perfect calibration')
    top.set_title(f'{figure_title(title, 36)}\naccuracy {numbers["accuracy"]:.3f}, '
                  f'confidence {numbers["confidence"]:.3f}\nECE {numbers["ECE"]:.3f}, n = {n:,}',
                  fontsize=9)
    top.set(xlim=(0, 1), ylim=(0, 1))
    bottom.bar(left, bins['count'][used] / n, color='#888888', edgecolor='white', **bar)


def figure_title(text, width):
    """Return `text` in at most three lines of `width` characters, with $ signs escaped."""
    return '\n'.join(textwrap.wrap(text.replace('$', r'\$'), width, max_lines=3))


def save_figure(figure, path, dpi):
    """Write a PNG under a temporary name and rename it."""
    with temporary(path) as part:
        figure.savefig(part, format='png', dpi=dpi)
