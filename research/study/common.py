"""What the scripts of the study share: folders, seeds and the loop over runs."""

import argparse
import json
from dataclasses import replace
from pathlib import Path

from evaluate import run
from results.over_seeds import compare_seeds
from results.report import predictions
from results.runs import find_runs, read_run, read_run_samples
from runtime.errors import ConfigError
from runtime.ownership import lock, write_text
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


def read_lines(path):
    return [*map(json.loads, path.read_text(encoding='utf-8').splitlines())]


def write_lines(path, rows):
    write_text(path, ''.join(json.dumps(row) + '\n' for row in rows))


def ask(cfg):
    """Evaluate a model on one task; return {id: (options, probabilities, answer)} of its questions.
    """
    run(cfg)
    (samples,) = read_run_samples(read_run(Path(cfg.out_dir)))[0].values()
    return {s['id']: (s['options'], p, s['answer'])
            for s, p in zip(samples, predictions(samples, cfg.norm).probs, strict=True)}


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
