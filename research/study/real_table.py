"""Tables, tests and diagrams of the runs of research/study/real.py; see PLAN.md.

    python research/study/real_table.py          # reads out/study/real, writes results/real
    python research/study/real_table.py --csv    # from results/real/runs.csv alone

runs.csv has a line per run; tables.md the means over seeds with half of their 95 % intervals, and
the tests of the plan with Holm's correction; reliability.png the questions of all seeds together.
"""

import argparse
import csv
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from results.plots import draw_bins
from results.tables import csv_text, markdown
from runtime.ownership import write_text
from stats import holm, mean_interval, student_t
from research.study import common, real
from research.study.figures import pool_bins

OUT = Path(__file__).parent / 'results' / 'real'
TASKS = {'arc_easy': 'ARC-Easy', 'arc_challenge': 'ARC-Challenge', 'hellaswag': 'HellaSwag',
         'clm': 'wikitext'}
KEYS = ('accuracy', 'confidence', 'ece', 'nll', 'auroc')
PLAIN = 'lr5e-05-smoothing0.0'
SMOOTHED = 'lr5e-05-smoothing0.1'
SHOWN = {'base': 'base', PLAIN: 'tuned', SMOOTHED: 'tuned, smoothing 0.1'}   # in the diagrams


def read_run(folder):
    """Return {column: number} of the folder of a finished run."""
    tasks = json.loads((folder / 'results.json').read_text())['tasks']
    line = {f'{task}_{key}': tasks[task]['pooled'].get(key) for task in TASKS for key in KEYS}
    for task in TASKS:
        scaled = tasks[task].get('post_hoc', {}).get('reports', {}).get('temperature', {})
        line[f'{task}_scaled_ece'] = scaled.get('ece')
    if (folder / 'log.jsonl').exists():
        last = [json.loads(text) for text in (folder / 'log.jsonl').read_text().splitlines()][-1]
        line |= {f'held_out_{key}': last[f'val_{key}'] for key in ('nll', 'ece')}
    return line


def read_runs(root):
    """Return ({(name, seed): {column: number}}, {(name, seed): {task: bins}}) of all runs."""
    runs, bins = {}, {}
    for path in sorted(root.rglob('results.json')):
        *_, seed, name = ('', *path.parent.relative_to(root).parts)
        key = name, int(seed.removeprefix('seed-') or 0)
        runs[key] = read_run(path.parent)
        tasks = json.loads(path.read_text())['tasks']
        bins[key] = {task: {k: np.array(v, float) if k != 'count' else np.array(v)
                            for k, v in tasks[task]['bins'].items() if k != 'edges'}
                     for task in TASKS}
    return runs, bins


def read_csv(path):
    with open(path, encoding='utf-8') as file:
        return {(row.pop('name'), int(row.pop('seed'))): {
            key: float(value) if value else None for key, value in row.items()}
            for row in csv.DictReader(file)}


def column(runs, name, key):
    """Return {seed: number} of a setting."""
    return {seed: line[key] for (run, seed), line in runs.items()
            if run == name and line.get(key) is not None}


def mean_cell(values):
    values = [*values]
    if len(values) < 2:
        return f'{values[0]:.3f}' if values else ''
    mean, low, high = mean_interval(values)
    return f'{mean:.3f} ± {(high - low) / 2:.3f}'


def means(runs):
    """Return the lines of the table of all settings."""
    keys = ('arc_easy_accuracy', 'arc_easy_confidence', 'arc_easy_ece', 'arc_easy_scaled_ece',
            'hellaswag_accuracy', 'hellaswag_ece', 'clm_ece', 'held_out_ece', 'held_out_nll',
            'arc_easy_auroc')
    lines = [('setting', 'seeds', *(key.replace('_', ' ') for key in keys))]
    for name in dict.fromkeys(['base', *(name for name, _, _ in real.settings())]):
        seeds = [seed for run, seed in runs if run == name]
        if seeds:
            lines.append((name, str(len(seeds)), *(mean_cell(column(runs, name, key).values())
                                                   for key in keys)))
    return lines


def tests(runs):
    """Return the lines of the tests of the plan that the finished runs allow."""
    base = runs['base', 0]
    planned = [(PLAIN, 'base', 'arc_easy_ece'), (PLAIN, 'base', 'arc_easy_accuracy')]
    planned += [(SMOOTHED, PLAIN, f'{task}_ece')
                for task in ('arc_easy', 'hellaswag', 'clm', 'held_out')]
    planned += [(SMOOTHED, PLAIN, 'arc_easy_accuracy')]
    planned += [(name, PLAIN, 'arc_easy_ece') for name in (
        'lr5e-06-smoothing0.0', 'lora-lr0.0002', 'epoch1-lr5e-05')]
    planned += [(PLAIN, f'{PLAIN}, not scaled', 'arc_easy_scaled_ece')]
    planned += [(f'{loss}-lr5e-05', PLAIN, 'arc_easy_ece') for loss in ('dft', 'gce0.7')]
    rows, p_values = [], []
    for name, other, key in planned:
        ours = column(runs, name, key)
        theirs = (dict.fromkeys(ours, base[key]) if other == 'base' else
                  column(runs, PLAIN, 'arc_easy_ece') if 'not scaled' in other else
                  column(runs, other, key))
        both = sorted(ours.keys() & theirs.keys())
        if len(both) > 1:
            differences = [ours[seed] - theirs[seed] for seed in both]
            _, _, p = student_t(differences)
            p_values.append(p)
            rows.append((name, other, key.replace('_', ' '), str(len(both)),
                         mean_cell(differences), f'{p:.2g}'))
    return [('setting', 'minus', 'metric', 'seeds', 'difference', 'p', 'p (Holm)'), *(
        (*row, f'{p:.2g}') for row, p in zip(rows, holm(p_values), strict=True))]


def draw(path, runs, bins):
    panels = []
    for task in ('arc_easy', 'clm'):
        for name, title in SHOWN.items():
            seeds = [key for key in bins if key[0] == name]
            numbers = {label: np.mean([runs[key][f'{task}_{label.lower()}'] for key in seeds])
                       for label in ('accuracy', 'confidence', 'ECE')}
            panels.append((f'{TASKS[task]}: {title}', numbers,
                           pool_bins([bins[key][task] for key in seeds])))
    draw_bins(path, panels, columns=len(SHOWN))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--csv', action='store_true', help='read runs.csv instead of run folders')
    parser.add_argument('--root', type=Path, default=Path(common.ROOT, 'real'))
    parser.add_argument('--out_dir', type=Path, default=OUT)
    options = parser.parse_args()
    options.out_dir.mkdir(parents=True, exist_ok=True)
    if options.csv:
        runs = read_csv(options.out_dir / 'runs.csv')
    else:
        runs, bins = read_runs(options.root)
        write_text(options.out_dir / 'runs.csv', csv_text(
            [{'name': name, 'seed': seed} | {
                key: '' if value is None else f'{value:.6g}' for key, value in line.items()}
             for (name, seed), line in runs.items()]))
        draw(options.out_dir / 'reliability.png', runs, bins)
    text = (f'# {real.__doc__.splitlines()[0]}\n\nMeans over seeds ± half of their 95 % interval.\n'
            f'\n{markdown(means(runs))}\nPaired t tests over seeds (PLAN.md).\n\n'
            f'{markdown(tests(runs))}')
    write_text(options.out_dir / 'tables.md', text)
    print(text)


if __name__ == '__main__':
    main()
