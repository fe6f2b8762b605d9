"""Which metrics agree on which run is better, and what the number of bins does to the ECE?

    python research/study/metrics_agree.py                        # the runs of the committed tables
    python research/study/metrics_agree.py out/study/smoothing    # any folders of runs, all metrics

Agreement is Kendall's tau-b over the runs of a task, each metric signed so that better is larger;
the share of pairs that they order alike is (1 + tau) / 2. Intervals are percentiles over resamples
of the runs, as if runs were independent; those of one seed share their base model and questions.
The committed tables hold eight such metrics of tuned models, and the counts of ten bins for thirty
runs, which merge exactly into five, two and one. From run folders all metrics and 2 to 100 bins
follow.
"""

import contextlib
import itertools
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

import metrics
from compare.over_seeds import predictions_by_group
from results.plots import new_figure, save_figure
from compare.runs import find_runs, read_run
from results.columns import title_of
from results.tables import csv_text, markdown
from runtime import cli
from runtime.errors import ConfigError
from runtime.ownership import claim, lock, write_text
from runtime.processes import parallel_map
from research.common import command_line, read_csv
from research.study.figures import FIGURES, read_bins

RESULTS = Path(__file__).parent / 'results'
SIGNS = {x.key: 1 if x.higher_is_better else -1 for x in metrics.MEASURES
         if x.higher_is_better is not None}
TASKS = {'text4': 'questions', 'facts': 'first tokens of facts', 'clm': 'next tokens'}
UNTUNED = re.compile(r'(base|medium|large|tiny|gemma2|mistral)(-D\d.*|-unused.*)?')
BINS = range(2, 101)
FILES = 'agree.csv', 'agree.md', 'agree.png'


# What was measured: {task: {(name, seed or folder): {metric: value}}}, and so {bins: ECE}

def committed():
    """Return the values of tuned models in the tables of figures and losses, the ECE by bins."""
    values, binned = {}, {}
    pooled = {'language': 'all', 'category': 'all', 'scaling': 'none'}
    tables = [RESULTS / figure / 'compare.csv' for figure in sorted(FIGURES)]
    for path in [*tables, *sorted(RESULTS.glob('losses/seed-*.csv'))]:
        for line in read_csv(path):
            other_tokens = 'vocabulary' in path.parent.name and line['task'] != 'text4'
            if (line['task'] in TASKS and pooled.items() <= (pooled | line).items()
                    and not UNTUNED.fullmatch(line['run']) and not other_tokens):
                values.setdefault(line['task'], {})[line['run'], line['seed']] = {
                    key: float(line[key]) for key in SIGNS if line.get(key)}
    for (run, _, seed, task, *_), bins in read_bins(RESULTS / 'headline' / 'bins.csv').items():
        gaps = bins['count'] * (bins['accuracy'] - bins['confidence'])
        binned.setdefault(task, {})[run, seed] = {
            n: merged_ece(bins['count'], gaps, n) for n in (1, 2, 5, 10)}
    return values, binned


def merged_ece(count, gaps, n_bins):
    """Return the ECE of n_bins bins, each of several bins of equal width with the sums `gaps`."""
    return np.abs(gaps.reshape(n_bins, -1).sum(1)).sum() / count.sum()


def measured(folders):
    """Return the values and the ECE by bins of the runs in `folders`, from their samples."""
    values, binned = {}, {}
    runs = find_runs([Path(folder) for folder in folders])
    for run, lines in zip(runs, parallel_map(measure, runs, worth_it=len(runs) > 4), strict=True):
        for task, report, ece in lines:
            values.setdefault(task, {})[run.name, str(run)] = report
            binned.setdefault(task, {})[run.name, str(run)] = ece
    return values, binned


def measure(folder):
    """Return [(task, {metric: value}, {bins: ECE})] of a run."""
    lines = []
    for line, _, p in predictions_by_group(read_run(folder)):
        if (line['language'], line['category'], line['scaling']) == ('all', 'all', 'none'):
            report, prediction = p.report(), metrics.top_label(p.probs, p.labels)
            lines.append((line['task'], {key: report[key] for key in SIGNS if key in report},
                          {n: metrics.ece(*prediction, n) for n in BINS}))
    return lines


# Agreement

def keys_of(runs):
    """Return the metrics that a run of {run: {metric: value}} has."""
    return [key for key in SIGNS if any(key in run for run in runs.values())]


def table_of(runs, keys):
    """Return values as float [len(keys), N], nan if missing; metrics signed: larger is better."""
    return np.array([[SIGNS.get(key, 1) * run.get(key, np.nan) for run in runs.values()]
                     for key in keys])


def kendall(x, y, n_resamples=1000, seed=0):
    """Return (tau-b, low, high, number of runs) of x and y, float [N], where both are defined.

    Kendall 1945: the sum over pairs of runs of sign(x_i - x_j) sign(y_i - y_j), divided by the root
    of the numbers of pairs that x and y do not tie. A resample counts run i c_i times, so a pair
    c_i c_j times; low and high are the percentiles 2.5 and 97.5 of those in which tau is defined.
    All three are nan if x or y is constant.
    """
    both = np.isfinite(x) & np.isfinite(y)
    n = int(both.sum())
    a, b = (np.sign(v[both, None] - v[both]).astype(np.float32) for v in (x, y))
    draws = np.random.default_rng(seed).integers(n, size=(n_resamples, n)) if n else ()
    counts = np.stack([np.ones(n), *(np.bincount(d, minlength=n) for d in draws)]).astype('f4')

    def total(pairs):
        return np.einsum('rn,rn->r', counts @ pairs, counts, dtype=np.float64)
    untied = np.sqrt(total(a * a) * total(b * b))
    taus = total(a * b) / np.where(untied, untied, np.nan)
    low, high = np.nanquantile(taus[1:], (0.025, 0.975)) if np.isfinite(taus[0]) else (np.nan,) * 2
    return float(taus[0]), float(low), float(high), n


def agreements(runs, n_resamples):
    """Return (K metrics, float [4, K, K]: tau of each pair, low, high, number of runs)."""
    keys = keys_of(runs)
    values, pairs = table_of(runs, keys), np.ones((4, len(keys), len(keys)))
    for i, j in itertools.combinations(range(len(keys)), 2):
        pairs[:, i, j] = pairs[:, j, i] = kendall(values[i], values[j], n_resamples)
    return keys, pairs


def agreement_cells(keys, pairs):
    """Return the cells of a table of tau with its interval, metrics by metrics, header first; '-'
    if it is undefined, since a metric is the same for all runs."""
    texts = [['{:.2f} [{:.2f}, {:.2f}]'.format(*pairs[:3, i, j]) if np.isfinite(pairs[0, i, j])
              else '-' for j in range(len(keys))] for i in range(len(keys))]
    first, *names = [title_of(key) for key in keys]
    return [['', *names], *([name, *[''] * i, *texts[i][i + 1:]]
                            for i, name in enumerate([first, *names[:-1]]))]


def ranking_cells(runs):
    """Return the cells of the ranks of each metric's best setting under every other metric.

    A setting is the mean over the seeds of the runs of one name, of those that have all metrics.
    """
    keys, settings = keys_of(runs), {}
    for (name, _), values in zip(runs, table_of(runs, keys).T, strict=True):
        if np.isfinite(values).all():
            settings.setdefault(name, []).append(values)
    if not settings:
        return []
    means = np.array([np.mean(members, 0) for members in settings.values()])
    ranks = 1 + (means[:, None] < means).sum(1)         # [settings, metrics], 1 is the best
    header = [f'best of {len(means)} by', 'setting', *(f'rank by {title_of(key)}' for key in keys)]
    rows = [(list(settings)[best], ranks[best]) for best in ranks.argmin(0)]
    return [header, *([title_of(key), name, *map(str, rank)]
                      for key, (name, rank) in zip(keys, rows, strict=True))]


def bin_cells(runs, n_resamples, shown):
    """Return the cells of the ECE by its number of bins, and its agreement with that of 10."""
    rows = []
    for n in shown:
        ece, ten = table_of(runs, (n, 10))
        tau, low, high, _ = kendall(ece, ten, n_resamples)
        rows.append([str(n), f'{ece.mean():.4f}', f'{(ece / ten).mean():.2f}',
                     f'{tau:.3f} [{low:.3f}, {high:.3f}]'])
    return [['bins', 'mean ECE', 'mean ratio to 10 bins', 'tau with 10 bins'], *rows]


# Page and figure

def page(values, agreed, binned, n_resamples):
    """Return the tables of all tasks in Markdown."""
    parts = ['<!-- written by research/study/metrics_agree.py -->\n']
    for task, runs in values.items():
        parts += [f'### {TASKS.get(task, task)}, {len(runs)} runs\n',
                  'Kendall\'s tau-b [95 % interval over runs]\n',
                  markdown(agreement_cells(*agreed[task]))]
        if cells := ranking_cells(runs):
            parts.append(markdown(cells))
        if task in binned:
            n_bins = next(iter(binned[task].values()))
            shown = [n for n in n_bins if n in (1, 2, 5, 10, 15, 20, 30, 50, 75, 100)]
            parts += [f'ECE by bins, {len(binned[task])} runs\n',
                      markdown(bin_cells(binned[task], n_resamples, shown))]
    return '\n'.join(parts)


def draw(path, agreed, binned):
    """Draw tau of all pairs of metrics for each task, and below the ECE of runs by bins."""
    size = max(len(keys) for keys, _ in agreed.values())
    columns = min(3, len(agreed))
    rows = -(-len(agreed) // columns)
    figure = new_figure(columns * (1.6 + 0.36 * size), rows * (4.2 + 0.36 * size))
    grid = figure.subplots(2 * rows, columns, squeeze=False,
                           height_ratios=[size, max(7, size / 3)] * rows)
    tops, bottoms = grid[::2].flat, grid[1::2].flat
    for ax in (*tops[len(agreed):], *bottoms[len(agreed):]):
        ax.remove()
    for (task, (keys, (tau, *_))), top, bottom in zip(
            agreed.items(), tops, bottoms, strict=False):
        for (y, x), value in np.ndenumerate(tau):
            if x != y and np.isfinite(value):
                top.text(x, y, f'{value:.2f}', fontsize=6.5, ha='center', va='center',
                         color='white' if abs(value) > 0.7 else 'black')
        top.imshow(tau, vmin=-1, vmax=1, cmap='RdBu')
        names = [title_of(key) for key in keys]
        top.set_xticks(range(len(keys)), names, rotation=90, fontsize=7)
        top.set_yticks(range(len(keys)), names, fontsize=7)
        top.set_title(TASKS.get(task, task), fontsize=10)
        for run in binned.get(task, {}).values():
            bottom.plot([*run], [*run.values()], color='C0', linewidth=0.8, alpha=0.5,
                        marker='.' if len(run) < 10 else '')
        bottom.set(xlabel='bins', ylabel='ECE, a line per run')
        bottom.set_visible(task in binned)
    save_figure(figure, path, 110)


def main(arguments=None):
    options = command_line(
        __doc__, arguments, first=('folders', {
            'nargs': '*', 'help': 'of runs; none: the committed tables'}),
        out_dir={'help': 'default: out/metrics_agree with folders, else '
                         'research/study/results/metrics_agree'},
        n_bootstrap={'type': int, 'default': 1000, 'help': 'default: %(default)s'})
    values, binned = measured(options.folders) if options.folders else committed()
    values = {task: values[task] for task in sorted(values, key=[*TASKS, *values].index)
              if len(values[task]) > 2}
    if not values:
        raise ConfigError('agreement needs three runs or more of one task')
    out_dir = Path(options.out_dir or (
        'out/metrics_agree' if options.folders else RESULTS / 'metrics_agree'))
    agreed = {task: agreements(runs, options.n_bootstrap) for task, runs in values.items()}
    text = page(values, agreed, binned, options.n_bootstrap)
    out_dir.mkdir(parents=True, exist_ok=True)
    with lock(out_dir) if options.folders else contextlib.nullcontext():
        if options.folders:
            claim(out_dir, *FILES)
        write_text(out_dir / 'agree.csv', csv_text([
            {'task': task, 'a': keys[i], 'b': keys[j], 'runs': int(pairs[3, i, j])}
            | {name: f'{pairs[k, i, j]:.5f}' for k, name in enumerate(('tau', 'low', 'high'))}
            for task, (keys, pairs) in agreed.items()
            for i, j in itertools.combinations(range(len(keys)), 2)]))
        write_text(out_dir / 'agree.md', text)
        draw(out_dir / 'agree.png', agreed, binned)
    print(f'{text}\nwrote {", ".join(FILES)} to {out_dir}')


if __name__ == '__main__':
    with cli.one_line_errors():
        main()
