"""What the scripts of the study share: folders, tasks, the settings of tuning, and the loop.

Each script has `runs(seed, root)`, which yields the TrainConfig of every run of one seed, and is
called as

    python research/study/smoothing.py
    python research/study/smoothing.py --seeds=0,1 --only=tuned-smoothing0.1

from the root of the repository. Finished runs are skipped, so an interrupted script is simply
started again, and several processes can share the seeds or the runs of one script. At the end it
prints a table over all finished seeds, and writes it beside them as compare.*.
"""

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from evaluate import EvalConfig
from results.over_seeds import compare_seeds
from results.runs import find_runs, read_run
from runtime import cli
from runtime.errors import ConfigError
from runtime.ownership import lock
from train import TrainConfig, train

ROOT = 'out/study'
SEEDS = (0, 1, 2, 3, 4)
FORMS = ('text4', 'text10', 'letters4', 'letters10')    # of the questions; see world.py


def seed_folder(experiment, seed, root=ROOT):
    return f'{root}/{experiment}/seed-{seed}'


def evaluation(world, forms, **settings):
    """Return the report on the questions, next tokens and facts of the world in folder `world`."""
    tasks = (*(f'{world}/{form}' for form in forms), f'clm:{world}/clm.jsonl',
             f'facts:{world}/facts.jsonl')
    return EvalConfig(tasks=tasks, scoring='text', shots=0, fit_temperature=True, n_bootstrap=0,
                      pictures=False, **settings)


def tuning(experiment, name, seed, root, base='base', **settings):
    """Return the config that tunes the model `base` of base.py; `settings` differ between runs."""
    source = seed_folder('base', seed, root)
    return TrainConfig(**{
        'model': f'{source}/{base}',
        'data': f'{source}/world/instruct.jsonl', 'cache_dir': f'{source}/cache',
        'batch_size': 64, 'epochs': 3.0, 'pack_len': 1024, 'max_length': 512, 'micro_rows': 4,
        'checkpoint_epochs': False, 'save_every': None, 'log_every': 50, 'pictures': False,
        'add_bos': True, 'eval': evaluation(f'{source}/world', FORMS), 'eval_before': False,
        'out_dir': f'{seed_folder(experiment, seed, root)}/{name}', 'seed': seed} | settings)


def train_all(runs, seeds=SEEDS, only=('',), root=ROOT, prepare=None, finish=None):
    """Do the runs of `seeds` whose names begin with one of `only`, unless they are finished.

    prepare(seed, root) makes what the runs of a seed need; finish(cfg) follows each run. Raises
    ConfigError if no run has such a name.
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
    """Print and write the means over the seeds of all finished runs in the folder of a script."""
    folder = Path(next(iter(runs(SEEDS[0], root))).out_dir).parent.parent
    with lock(folder):
        compare_seeds([read_run(run) for run in find_runs([folder])], ('ece', 'accuracy'), folder)


def seed_list(text):
    """Return the seeds of an option such as --seeds=0,1; an error of argparse for other text."""
    try:
        return [int(seed) for seed in text.split(',')]
    except ValueError:
        raise argparse.ArgumentTypeError(f'{text!r} is no list of seeds such as 0,1') from None


def main(runs, prepare=None, finish=None, seeds=SEEDS):
    """`train_all` with the options of the command line, and the table of its runs."""
    parser = argparse.ArgumentParser(description=sys.modules['__main__'].__doc__.split('\n')[0])
    parser.add_argument('--seeds', type=seed_list, default=','.join(map(str, seeds)),
                        help='default: %(default)s')
    parser.add_argument('--only', default='', help='beginnings of names of runs, such as base,tiny')
    parser.add_argument('--out_dir', type=os.path.expanduser, default=ROOT,
                        help='folder of the study, %(default)s')
    options = parser.parse_args()
    with cli.one_line_errors(resume='the same command continues'):
        train_all(runs, options.seeds, tuple(options.only.split(',')), options.out_dir, prepare,
                  finish)
        print_table(runs, options.out_dir)
