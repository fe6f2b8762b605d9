"""Tables of the runs of research/study/two_models.py; see PLAN.md, claim 18.

    python research/study/two_models_table.py     # reads out/study/two-models

It writes results/two-models/: runs.csv has the metrics of each run, differences.csv the mean over
seeds of one method minus another with its interval over seeds and questions, tables.md the same;
reliability.png shows ARC-Easy, the questions of all seeds in out/ together. Runs that are in
runs.csv already, and no longer in out/, stay: seeds 11 to 13. Then the part of the questions in an
interval comes from the other seeds.
"""

import functools
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from compare.significance import mean_interval
from metrics import equal_width_bins
from research.common import ROOT, command_line, read_csv, write_csv
from research.study.figures import diagram
from research.study.runs import FILE
from results.plots import draw_bins
from results.tables import markdown
from runtime.ownership import write_text

OUT = Path(__file__).parent / 'results' / 'two-models'
TASKS = {'arc_easy': 'ARC-Easy', 'arc_challenge': 'ARC-Challenge', 'hellaswag': 'HellaSwag',
         'mmlu_text': 'MMLU, text', 'mmlu': 'MMLU, letters', 'cmmlu': 'CMMLU', 'xcopa': 'XCOPA',
         'clm': 'wikitext', 'held_out': 'held out'}
KEYS = 'accuracy', 'confidence', 'ece', 'nll', 'auroc', 'scaled_ece'
N_RESAMPLES = 1000
# in reliability.png
SHOWN = {'before': 'before', 'tuned': 'tuned', 'smoothing': 'smoothing 0.1',
         'tenth': 'a tenth of the rate'}


def read_runs(root):
    """Return {(model, data, method): {seed: {(task, key): number}}}, and likewise the questions."""
    questions, runs = {}, {}
    for row in read_csv(OUT / 'runs.csv') if (OUT / 'runs.csv').exists() else ():
        line = runs.setdefault((row['model'], row['data'], row['method']), {}).setdefault(
            int(row['seed']), {})
        line |= {(row['task'], key): float(row[key]) for key in KEYS if row[key]}
    for log in sorted(root.glob('seed-*/*/*/*/log.jsonl')):
        seed, *run = log.parent.relative_to(root).parts
        run, seed = tuple(run), int(seed.removeprefix('seed-'))
        last = json.loads(log.read_text().splitlines()[-1])
        line = {('held_out', key): last.get(f'val_{key}') for key in ('nll', 'ece')}
        for part, suffix in (('', ''), ('text', '_text'), ('wiki', '')):
            file = log.parent / part / 'results.json'
            tasks = json.loads(file.read_text())['tasks'] if file.exists() else {}
            for task, result in tasks.items():
                scaled = result.get('post_hoc', {}).get('reports', {}).get('temperature', {})
                line |= {(task + suffix, key): value for key, value in (
                    result['pooled'] | {'scaled_ece': scaled.get('ece')}).items() if key in KEYS}
        runs.setdefault(run, {})[seed] = {
            key: value for key, value in line.items() if value is not None}
        if (file := log.with_name('questions.npz')).exists():
            questions.setdefault(run, {})[seed] = np.load(file)
    return runs, questions


@functools.cache
def weights(n):
    """Return how often each resample has each of n questions, [N_RESAMPLES, n]."""
    return np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), N_RESAMPLES)


def resampled(arrays, task, key):
    """Return the metric in each resample of the questions: float [N_RESAMPLES]."""
    scores, answers = arrays[task].astype(float), arrays[f'{task}.answer']
    n, right = len(answers), scores.argmax(1) == answers
    values = right.astype(float)[:, None]
    if key == 'ece':
        confidence = np.exp(scores.max(1))
        values = np.eye(10)[equal_width_bins(confidence, 10)] * (confidence - right)[:, None]
    return np.abs(weights(n) @ values).sum(1) / n


def difference(runs, questions, first, second, task, key):
    """Return (mean, half-width of its interval or nan, number of seeds), None without a seed.

    Before tuning, questions were asked once for seeds 11 to 13 and once for the others.
    """
    a, b = ({seed: line[task, key] for seed, line in runs.get(run, {}).items()
             if (task, key) in line} for run in (first, second))
    if second[-1] == 'before':
        b = {seed: b[max((other for other in b if other <= seed), default=min(b))]
             for seed in a} if b else {}
    seeds = sorted({*a} & {*b})
    if not seeds:
        return None
    d, half = [a[seed] - b[seed] for seed in seeds], np.nan
    if len(seeds) > 1:
        mean, low, _ = mean_interval(d)
        half = mean - low
        if key in ('accuracy', 'ece') and task not in ('clm', 'held_out'):
            draws = [np.mean([resampled(arrays, task, key)
                              for seed, arrays in questions[run].items()
                              if (seed in seeds or run[-1] == 'before') and task in arrays], 0)
                     for run in (first, second)]
            half = np.hypot(half, 1.96 * np.std(draws[0] - draws[1]))
    return np.mean(d), half, len(seeds)


def draw(path, root):
    panels = []
    for model, title in {'gemma': 'Gemma 3 270M', 'smollm': 'SmolLM2 135M'}.items():
        for method, name in SHOWN.items():
            tasks = [json.loads(file.read_text())['tasks']['arc_easy'] for file in sorted(
                root.glob(f'seed-*/{model}/alpaca/{method}/results.json'))]
            bins = [{key: np.array(task['bins'][key], int if key == 'count' else float)
                     for key in ('count', 'confidence', 'accuracy')} for task in tasks]
            panels.append(diagram(f'{title}: {name}', [task['pooled'] for task in tasks], bins))
    draw_bins(path, panels, columns=len(SHOWN))


def pairs(names):
    """Yield (method, the one that it is compared with) of the plan."""
    for name in names:
        if name != 'before':
            yield name, 'before'
        if name not in ('before', 'tuned', 'tuned-2e-5'):
            yield name, 'tuned-2e-5' if name == 'smoothing-2e-5' else 'tuned'
        if name.startswith('smoothing-') and name != 'smoothing-2e-5':
            yield name, name.removeprefix('smoothing-')


def main():
    options = command_line(__doc__, root={'type': Path, 'default': Path(ROOT, 'two-models')},
                           out_dir={'type': Path, 'default': OUT})
    options.out_dir.mkdir(parents=True, exist_ok=True)
    runs, questions = read_runs(options.root)
    if missing := sorted({*runs} - {*questions}):
        sys.exit(f'error: {options.root} has no seed-*/{"/".join(missing[0])}/questions.npz; run '
                 f'two_models.py')
    draw(options.out_dir / 'reliability.png', options.root)
    write_csv(options.out_dir / 'runs.csv', [('model', 'data', 'method', 'seed', 'task', *KEYS), *(
        (*run, seed, task, *(f'{line[task, key]:.6g}' if (task, key) in line else ''
                             for key in KEYS))
        for run, seeds in runs.items() for seed, line in seeds.items() for task in TASKS
        if any(name == task for name, _ in line))])
    rows, text = [], [f'# {__doc__.splitlines()[0]}\n\nCells: mean over seeds of the ECE of a '
                      'method minus another, with its interval / the same of the accuracy (of '
                      'tokens: the NLL).\n']
    for model in sorted({run[0] for run in runs}):
        for data, methods in FILE['two_models'].items():
            lines = [('method', 'minus', *TASKS.values())]
            for name, other in pairs(methods):
                cells = []
                for task in TASKS:
                    shown = 'nll' if task in ('clm', 'held_out') else 'accuracy'
                    for key in dict.fromkeys(('ece', shown, 'nll', 'scaled_ece')):
                        found = difference(runs, questions, (model, data, name),
                                           (model, data, other), task, key)
                        if found:
                            rows.append((model, data, name, other, task, key, *(
                                f'{x:.5f}' for x in found[:2]), found[2]))
                        if key in ('ece', shown):
                            cells.append(f'{found[0]:+.3f} ± {found[1]:.3f}' if found else '')
                lines.append((name, other, *map(' / '.join, zip(cells[::2], cells[1::2],
                                                                strict=True))))
            text.append(f'\n{model}, {data}\n\n{markdown(lines)}')
    write_csv(options.out_dir / 'differences.csv', [(
        'model', 'data', 'method', 'minus', 'task', 'metric', 'difference', 'half_width', 'seeds'),
        *rows])
    write_text(options.out_dir / 'tables.md', ''.join(text))


if __name__ == '__main__':
    main()
