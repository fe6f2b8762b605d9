"""What the folders of research/ share: command lines, files, figures, and the loop over runs."""

import argparse
import csv
import json
import os
from dataclasses import replace
from pathlib import Path

from evaluate import run
from compare.over_seeds import compare_seeds
from results.plots import new_figure
from results.report import predictions
from compare.runs import find_runs, read_run, read_run_samples
from results.tables import csv_text
from runtime.errors import ConfigError
from runtime.ownership import lock, write_text
from train import train_and_report

ROOT = 'out/study'
SEEDS = (0, 1, 2, 3, 4)


# Command lines

def command_parser(doc, first=None, **more):
    """Return the ArgumentParser of a script with the docstring `doc`; ~ is expanded in texts.

    more: {option: keyword arguments of argparse}; first: (name, the same) of the positional one.
    """
    parser = argparse.ArgumentParser(description=doc, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, settings in [*[first] * bool(first), *((f'--{x}', y) for x, y in more.items())]:
        text = {} if 'action' in settings else {'type': os.path.expanduser}
        parser.add_argument(name, **text | settings)
    return parser


def command_line(doc, arguments=None, first=None, **more):
    """Return the options of a script, by its `command_parser`."""
    return command_parser(doc, first, **more).parse_args(arguments)


def seeds_option(seeds, text=None):
    def list_of_seeds(text):    # argparse names this function in its error
        return [int(seed) for seed in text.split(',')]
    return {'type': list_of_seeds, 'default': seeds,
            'help': f'default: {text or ",".join(map(str, seeds))}'}


def names_of(choices, default=None):
    """Return an option that takes several of `choices`, separated by commas; default: all."""
    def several(text):
        names = text.split(',')
        if unknown := {*names} - {*choices}:
            raise argparse.ArgumentTypeError(
                f'there is no {min(unknown)}; choose from {", ".join(choices)}')
        return names
    return {'type': several, 'default': default or ','.join(choices),
            'help': 'separated by commas; default: %(default)s'}


ONLY = {'default': '', 'help': 'beginnings of names of runs, such as base,tiny'}
OUT_DIR = {'default': ROOT, 'help': 'folder of the study; default: %(default)s'}


# Files and figures

def read_csv(path):
    """Return the rows of a file as dicts of texts."""
    with open(path, encoding='utf-8', newline='') as file:
        return [*csv.DictReader(file)]


def write_csv(path, lines):
    """Write the lines of a table, header first."""
    write_text(path, csv_text([dict(zip(lines[0], line, strict=True)) for line in lines[1:]]))


def read_lines(path):
    return [*map(json.loads, path.read_text(encoding='utf-8').splitlines())]


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, ''.join(json.dumps(row) + '\n' for row in rows))


def panels(n, n_columns, width=3.4, height=2.9):
    """Return a figure and its `n` axes, each so many inches wide and high."""
    n_columns = max(1, min(n_columns, n))
    n_rows = max(1, -(-n // n_columns))
    figure = new_figure(width * n_columns, height * n_rows)
    axes = figure.subplots(n_rows, n_columns, squeeze=False).flat
    for axis in axes[n:]:
        axis.axis('off')
    return figure, axes[:n]


# Runs of the study

def seed_folder(experiment, seed, root=ROOT):
    return f'{root}/{experiment}/seed-{seed}'


def ask(cfg):
    """Return {id: (options, probabilities, answer)} of the questions of the one task of `cfg`."""
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
                train_and_report(replace(cfg, resume=True))
                if finish:
                    finish(cfg)


def print_table(runs, root=ROOT):
    """Print and write the means over the seeds of all finished runs in the folder of `runs`."""
    folder = Path(next(iter(runs(SEEDS[0], root))).out_dir).parent.parent
    with lock(folder, wait=True):       # of a process that does other seeds
        compare_seeds([read_run(run) for run in find_runs([folder])], ('ece', 'accuracy'), folder)
