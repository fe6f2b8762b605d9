"""Gather the numbers of the loss study: one CSV for each seed, which is committed.

    python research/study/gather.py --seeds=5 --out_dir=research/study/results/losses

It reads the finished runs, also those of an unfinished seed; frontier.py reads the files. There is
a line for questions, facts and next tokens, over all languages and for each. Three more tasks are:
'held out', the NLL and ECE of the held-out conversations at the end of tuning; 'trained', the mean
NLL of the conversations of its last 50 steps; 'base' or 'medium', of a base model: its accuracy is
the share of the 4,000 facts of the instruction data that the model knows.
"""

import argparse
import itertools
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from results.over_seeds import run_lines
from results.tables import csv_text
from results.runs import read_run
from runtime import cli
from runtime.errors import ConfigError
from runtime.ownership import write_text
from runtime.processes import parallel_map
from research.study import common, known, losses, transfer

COLUMNS = ('run', 'seed', 'task', 'language', 'scaling',
           'accuracy', 'confidence', 'ece', 'smooth_ece', 'brier', 'nll')
BASES = ('base', 'medium', 'large')
LAST = 50           # steps


def folders(seed, root):
    """Return the folders of the finished runs of a seed: base models, tuned ones, what is known."""
    source = common.seed_folder('base', seed, root)
    names = [f'{source}/{name}' for name in BASES]
    names += [f'{common.seed_folder("knows", seed, root)}/{name}' for name in known.BASES]
    names += [cfg.out_dir for script in (losses, transfer, known)
              for cfg in script.runs(seed, root)]
    return [Path(name) for name in names if Path(name, 'results.json').exists()]


def is_read(line):
    """Return whether frontier.py reads a line: languages and temperatures only of questions."""
    if line['category'] != 'all' or line['task'] in ('text10', 'letters4', 'letters10'):
        return False
    if line['task'] == 'text4':
        return line['language'] == 'all' or line['scaling'] == 'none'
    return (line['language'], line['scaling']) == ('all', 'none')


def lines_of(folder):
    """Return the lines of a run, {column of COLUMNS: value}."""
    run = read_run(folder)
    lines = [line for line in run_lines(run) if is_read(line)]
    if run.settings.get('val_size', '0') != '0':
        steps = [json.loads(line) for line in (folder / 'log.jsonl').read_text().splitlines()]
        more = {'language': 'all', 'scaling': 'none'}
        lines += [more | {'task': 'held out', 'ece': f'{steps[-1]["val_ece"]:.5g}',
                          'nll': f'{steps[-1]["val_nll"]:.5g}'},
                  more | {'task': 'trained',
                          'nll': f'{np.mean([step["nll"] for step in steps[-LAST:]]):.5g}'}]
    about = {'run': folder.name, 'seed': str(run.seed)}
    return [{key: (about | line).get(key, '') for key in COLUMNS} for line in lines]


def write_numbers(seed, root, out_dir):
    """Write seed-<seed>.csv into `out_dir`; return the number of runs in it."""
    finished = folders(seed, root)
    if not finished:
        raise ConfigError(f'{root}: no run of seed {seed} is finished')
    rows = parallel_map(lines_of, finished, worth_it=len(finished) > 4)
    Path(out_dir).mkdir(parents=True, exist_ok=True)
    write_text(Path(out_dir) / f'seed-{seed}.csv', csv_text([*itertools.chain(*rows)]))
    return len(finished)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--seeds', type=common.seed_list, default=','.join(map(str, losses.SEEDS)))
    parser.add_argument('--runs', type=os.path.expanduser, default=common.ROOT,
                        help='folder of the study, %(default)s')
    parser.add_argument('--out_dir', type=os.path.expanduser,
                        default='research/study/results/losses', help='default: %(default)s')
    options = parser.parse_args()
    for seed in options.seeds:
        print(f'seed {seed}: {write_numbers(seed, options.runs, options.out_dir)} runs', flush=True)


if __name__ == '__main__':
    with cli.one_line_errors():
        main()
