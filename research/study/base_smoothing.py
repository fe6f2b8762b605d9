"""Smoothing towards the base model beside uniform smoothing, in the world of demo.py; see PLAN.md.

    python research/study/base_smoothing.py --seeds=0,1,2,3,4      # half an hour on two cores

base-smoothing.csv has a line per run, base-smoothing.md the means and the tests of the plan.
"""

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from world import make_world
from demo import DemoConfig, runs
from results.tables import csv_text
from runtime import cli
from runtime.ownership import write_text
from research import common
from research.study.claims import MEANS, TESTS, Numbers, paired_tests, setting_lines, write_page
from train import train_and_report

SHARES = (0.1, 0.5, 0.9)
KEYS = 'accuracy', 'confidence', 'ece', 'nll', 'auroc'
OUT = Path(__file__).parent / 'results' / 'base-smoothing'


def configs(seed, root):
    """Return {name: TrainConfig} of a seed, in the order in which they need each other."""
    base, tuned, smoothed = runs(DemoConfig(out_dir=f'{root}/base-smoothing/seed-{seed}',
                                            seed=seed)).values()
    return {'base': base, 'tuned': tuned, 'smoothing 0.1': smoothed} | {
        f'base smoothing {share}': replace(tuned, base_smoothing=share,
                                           out_dir=f'{tuned.out_dir}_base{share}')
        for share in SHARES}


def tests(numbers):
    """Return the lines of the tests of the plan."""
    others = ('tuned', 'ece'), ('tuned', 'accuracy'), ('smoothing 0.1', 'ece')
    planned = [(f'base smoothing {share}', *other) for share in SHARES for other in others]
    return paired_tests(('setting', 'minus', 'metric', 'seeds', 'difference'), [
        (row, numbers.of(row[0], row[2]) - numbers.of(row[1], row[2])) for row in planned], '+.3f')


def main():
    options = common.command_line(
        __doc__, seeds=common.seeds_option(common.SEEDS), out_dir=common.OUT_DIR)
    lines, names = [], [*configs(0, options.out_dir)]
    for seed in options.seeds:
        make_world(f'{options.out_dir}/base-smoothing/seed-{seed}/world', seed)
        for name, cfg in configs(seed, options.out_dir).items():
            (result,) = train_and_report(replace(cfg, resume=True))['after']['tasks'].values()
            lines.append({'run': name, 'seed': str(seed)} | {
                key: f'{result["pooled"][key]:.6g}' for key in KEYS})
    OUT.mkdir(parents=True, exist_ok=True)
    write_text(OUT / 'base-smoothing.csv', csv_text(lines))
    numbers = Numbers(lines, {})
    columns = [(key, {}) for key in KEYS]
    means = [('setting', *KEYS), *setting_lines(numbers, names, columns)]
    write_page(OUT / 'base-smoothing.md', __doc__.splitlines()[0], (f'{MEANS}.', means),
               (f'{TESTS} (PLAN.md).', tests(numbers)))


if __name__ == '__main__':
    with cli.one_line_errors(resume='finished runs are skipped'):
        main()
