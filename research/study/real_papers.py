"""The papers' scripts on a real model: the numbers of their runs, and the tests of PLAN.md.

    python research/study/real_papers.py --runs=out/mine    # adds runs to results/real/papers.csv
    python research/study/real_papers.py                    # tables of that file

out/mine has a folder SCRIPT-SEED for each, such as label_smoothing-0: see docs/papers.md. A run
that the file has already is replaced.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from research.papers.common import held_out, read_report
from research.common import command_line, read_csv
from research.study.claims import (MEANS, TABLES, TESTS, Numbers, paired_tests,
                                   setting_lines, write_page)
from research.study.real_table import OUT
from results.tables import csv_text
from runtime.ownership import write_text

KEYS = 'accuracy', 'confidence', 'ece', 'nll'
FAST, SLOW = 'Alpaca-lr5e-05/smoothing', 'Alpaca-lr2e-05/smoothing'
ALIGNED = 'aligned/Alpaca-full', 'aligned/Alpaca-lora', 'aligned/dpo'
# the runs and tasks of the table of means
SHOWN = (('label_smoothing', ('mmlu', 'arc_easy', 'hellaswag', 'held_out'),
          ('base', *(f'{rate}{s}' for rate in (SLOW, FAST) for s in ('0', '0.1')))),
         ('multilingual', ('xcopa languages', 'cmmlu'),
          ('base', *(f'Alpaca/smoothing{s}' for s in ('0', '0.1', '0.2')))),
         ('alignment', ('mmlu', 'clm'), ('aligned/base', *ALIGNED)))


def lines_of(script, seed, folder):
    """Yield a line of the file for each run and task in the folder of a script."""
    for path in sorted(folder.rglob('results.json')):
        run = str(path.parent.relative_to(folder)).removeprefix('Gemma-3-270M/')
        rows = []
        model, tasks = read_report(path.parent)     # smoothing0 evaluates another run
        for task, result in tasks.items():
            rows.append((task, result['pooled']))
            if len(languages := result.get('languages', {})) > 1:
                rows.append((f'{task} languages', {
                    key: np.mean([language[key] for language in languages.values()])
                    for key in KEYS}))
        for folder_of_log in (path.parent, path.parent.with_name(Path(model).name)):
            if (folder_of_log / 'log.jsonl').exists() and (values := held_out(folder_of_log)):
                rows.append(('held_out', values))
                break
        for task, values in rows:
            if values:
                yield {'script': script, 'seed': seed, 'run': run, 'task': task} | {
                    key: f'{values[key]:.6g}' if key in values else '' for key in ('n', *KEYS)}


def numbers_of(lines, script):
    return Numbers([line for line in lines if line['script'] == script], {'task': 'mmlu'})


def tests(lines):
    """Return the lines of all tests of the plan that the runs allow, one family for Holm."""
    rows = []
    for line in TABLES['papers']['tests']:
        script, runs, columns = line.split(': ')
        run, other = runs.split(' - ')
        numbers = numbers_of(lines, script)
        for column in columns.split(', '):
            task, key = column.rsplit(' ', 1)
            theirs = numbers.of(other, key, task=task)
            if other == 'base' and script == 'label_smoothing':
                theirs = theirs[np.isfinite(theirs)][0]     # it has one seed
            rows.append(((run, other, task, key), numbers.of(run, key, task=task) - theirs))
    return paired_tests(('run', 'minus', 'task', 'metric', 'seeds', 'difference'), rows, '.3f')


def means(lines, script, tasks, runs):
    keys = [(key, {'task': task}) for task in tasks for key in ('accuracy', 'ece')
            if (task, key) != ('held_out', 'accuracy')]
    return [('run', 'seeds', *(f'{where["task"]} {key}' for key, where in keys)),
            *setting_lines(numbers_of(lines, script), runs, keys, counted=True)]


def main():
    options = command_line(
        __doc__, runs={'type': Path, 'help': 'folder of the runs that are added'},
        out_dir={'type': Path, 'default': OUT})
    file = options.out_dir / 'papers.csv'
    lines = {(line['script'], line['seed'], line['run'], line['task']): line
             for line in read_csv(file)}
    for folder in sorted(options.runs.iterdir()) if options.runs else ():
        script, _, seed = folder.name.rpartition('-')
        for line in lines_of(script, seed, folder):
            lines[script, seed, line['run'], line['task']] = line
    lines = [lines[key] for key in sorted(lines)]
    write_text(file, csv_text(lines))
    write_page(options.out_dir / 'papers.md',
               "Claim 16: the papers' scripts on a real model, Gemma 3 270M; see PLAN.md.\n\n"
               f'{MEANS}. All runs are in papers.csv.',
               *((f'{shown[0]}.py', means(lines, *shown)) for shown in SHOWN),
               (f'{TESTS}.', tests(lines)))


if __name__ == '__main__':
    main()
