"""What the scripts of the study share: folders, seeds and the loop over runs."""

import argparse
from dataclasses import replace
from pathlib import Path

from results.over_seeds import compare_seeds
from results.runs import find_runs, read_run
from runtime.errors import ConfigError
from runtime.ownership import lock
from train import train

ROOT = 'out/study'
SEEDS = (0, 1, 2, 3, 4)


def seed_folder(experiment, seed, root=ROOT):
    return f'{root}/{experiment}/seed-{seed}'


def seed_list(text):
    """Return the seeds of an option such as --seeds=0,1; an error of argparse for other text."""
    try:
        return [int(seed) for seed in text.split(',')]
    except ValueError:
        raise argparse.ArgumentTypeError(f'{text!r} is no list of seeds such as 0,1') from None


def train_all(runs, seeds=SEEDS, only=('',), root=ROOT, prepare=None, finish=None):
    """Do the runs of `seeds` whose names begin with one of `only`, unless they are finished.

    runs(seed, root) yields the TrainConfigs; prepare(seed, root) makes what they need; finish(cfg)
    follows each. Raises ConfigError if no run has such a name.
    """
    names = [Path(cfg.out_dir).name for cfg in runs(seeds[0], root)]
    if not any(name.startswith(only) for name in names):
        raise ConfigError(f'--only={",".join(only)}: no run has such a name; there are '
                          f'{", ".join(names)}')
    for seed in seeds:
        if prepare:
            prepare(seed, root)
        for cfg in runs(seed, root):
            if Path(cfg.out_dir).name.startswith(only):
                print(f'\n=== {cfg.out_dir}', flush=True)
                train(replace(cfg, resume=True))
                if finish:
                    finish(cfg)


def print_table(runs, root=ROOT):
    """Print and write the means over the seeds of all finished runs in the folder of `runs`."""
    folder = Path(next(iter(runs(SEEDS[0], root))).out_dir).parent.parent
    with lock(folder):
        compare_seeds([read_run(run) for run in find_runs([folder])], ('ece', 'accuracy'), folder)
