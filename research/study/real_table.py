"""Tables, tests and diagrams of the runs of research/study/real.py; see PLAN.md.

    python research/study/real_table.py          # reads out/study/real, writes results/real
    python research/study/real_table.py --csv    # from results/real/runs.csv alone

runs.csv has a line per run; tables.md the means over seeds with half of their 95 % intervals, and
the tests of the plan with Holm's correction; reliability.png the questions of all seeds together.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from compare.over_seeds import plus_minus
from results.plots import draw_bins
from results.tables import csv_text, markdown
from runtime.ownership import write_text
from compare.significance import holm, student_t
from research.common import ROOT, command_line, read_csv
from research.study import real
from research.study.claims import TABLES, Numbers
from research.study.figures import diagram

OUT = Path(__file__).parent / 'results' / 'real'
TASKS = {'arc_easy': 'ARC-Easy', 'arc_challenge': 'ARC-Challenge', 'hellaswag': 'HellaSwag',
         'clm': 'wikitext'}
KEYS = ('accuracy', 'confidence', 'ece', 'nll', 'auroc')
SETTINGS = list(dict.fromkeys(['base', *(name for name, _, _ in real.settings())]))
# in the diagrams, of those that were run
SHOWN = {'base': 'base', 'lr5e-05-smoothing0.0': 'tuned', 'lr5e-05-smoothing0.1': 'smoothing 0.1',
         'base-smoothing0.5-lr5e-05': 'base smoothing 0.5'}


def read_runs(root):
    """Return {(name, seed): ({column: number or None}, {task: bins})} of all runs."""
    runs = {}
    for path in sorted(root.rglob('results.json')):
        tasks, log = json.loads(path.read_text())['tasks'], path.with_name('log.jsonl')
        line = {f'{task}_{key}': tasks[task]['pooled'].get(key) for task in TASKS for key in KEYS}
        for task in TASKS:
            scaled = tasks[task].get('post_hoc', {}).get('reports', {}).get('temperature', {})
            line[f'{task}_scaled_ece'] = scaled.get('ece')
        if log.exists():
            last = json.loads(log.read_text().splitlines()[-1])
            line |= {f'held_out_{key}': last[f'val_{key}'] for key in ('nll', 'ece')}
        *_, seed, name = ('', *path.parent.relative_to(root).parts)
        runs[name, int(seed.removeprefix('seed-') or 0)] = line, {
            task: {key: np.array(tasks[task]['bins'][key], int if key == 'count' else float)
                   for key in ('count', 'confidence', 'accuracy')} for task in TASKS}
    return runs


def means(numbers):
    """Return the lines of the table of all settings."""
    keys = ('arc_easy_accuracy', 'arc_easy_confidence', 'arc_easy_ece', 'arc_easy_scaled_ece',
            'hellaswag_accuracy', 'hellaswag_ece', 'clm_ece', 'held_out_ece', 'held_out_nll',
            'arc_easy_auroc')
    rows = [(name, [[x for x in numbers.of(name, key) if np.isfinite(x)] for key in keys])
            for name in SETTINGS]
    return [('setting', 'seeds', *(key.replace('_', ' ') for key in keys)), *(
        [name, str(len(values[0])), *(plus_minus(x, '.3f') for x in values)]
        for name, values in rows if values[0])]


def tests(numbers, planned):
    """Return the lines of the tests of a plan in tables.toml that the finished runs allow.

    They are over the seeds that have both runs; one with fewer than two seeds is left out.
    """
    rows = []
    for line in planned:
        settings, keys = line.split(': ')
        name, other = settings.split(' - ')
        for key in keys.split():
            theirs = numbers.of(other.removesuffix(', not scaled'),
                                'arc_easy_ece' if 'not scaled' in other else key)
            if other == 'base':
                theirs = theirs[0]      # it has one seed
            values = [x for x in numbers.of(name, key) - theirs if np.isfinite(x)]
            if len(values) > 1:
                rows.append(((name, other, key.replace('_', ' ')), values))
    p_values = [student_t(values)[2] for _, values in rows]
    return [('setting', 'minus', 'metric', 'seeds', 'difference', 'p', 'p (Holm)'), *(
        [*cells, str(len(values)), plus_minus(values, '.3f'), f'{p:.2g}', f'{corrected:.2g}']
        for (cells, values), p, corrected in zip(rows, p_values, holm(p_values), strict=True))]


def draw(path, runs):
    shown = {name: title for name, title in SHOWN.items() if (name, 0) in runs}
    panels = []
    for task in ('arc_easy', 'clm'):
        for name, title in shown.items():
            lines, bins = zip(*(run for (other, _), run in runs.items() if other == name))
            panels.append(diagram(f'{TASKS[task]}: {title}', lines, [x[task] for x in bins],
                                  f'{task}_'))
    draw_bins(path, panels, columns=len(shown))


def main():
    options = command_line(
        __doc__, csv={'action': 'store_true', 'help': 'read runs.csv instead of run folders'},
        root={'type': Path, 'default': Path(ROOT, 'real')}, out_dir={'type': Path, 'default': OUT})
    options.out_dir.mkdir(parents=True, exist_ok=True)
    file = options.out_dir / 'runs.csv'
    if not options.csv:
        runs = read_runs(options.root)
        write_text(file, csv_text([{'name': name, 'seed': seed} | {
            key: '' if value is None else f'{value:.6g}' for key, value in line.items()}
            for (name, seed), (line, _) in runs.items()]))
        draw(options.out_dir / 'reliability.png', runs)
    numbers = Numbers([line | {'run': line['name']} for line in read_csv(file)], {})
    parts = [('Means over seeds ± half of their 95 % interval.', means(numbers))]
    for plan, planned in TABLES['plans'].items():
        if len(lines := tests(numbers, planned)) > 1:
            parts.append((f'Paired t tests over seeds (PLAN.md, {plan}).', lines))
    text = f'# {real.__doc__.splitlines()[0]}\n' + ''.join(
        f'\n{above}\n\n{markdown(lines)}' for above, lines in parts)
    write_text(options.out_dir / 'tables.md', text)
    print(text)


if __name__ == '__main__':
    main()
