"""Claim 16: what tuning does to a real model, Gemma 3 270M; see PLAN.md.

    python research/study/real.py --model=DATA/model --data=DATA --seeds=0,1

`--data` has alpaca.json (conversations), arc/, hellaswag/ and wiki/ (docs/papers.md names their
files). Finished runs are skipped, and several processes can share the seeds.
"""

import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from evaluate import EvalConfig, run
from runtime import cli
from research import common
from research.study.runs import FILE, combinations
from train import TrainConfig


def settings():
    """Yield (name, settings of a run, number of seeds) of the tables [[real]] in runs.toml."""
    for table in FILE['real']:
        for chosen, more in combinations(table):
            yield table['name'].format(**chosen), more | chosen, table['seeds']


def evaluation(data, **more):
    """Return the report on questions, by the text of the options, and on next tokens."""
    tasks = (f'arc_easy:{data}/arc', f'arc_challenge:{data}/arc', f'hellaswag:{data}/hellaswag',
             f'clm:{data}/wiki')
    return EvalConfig(tasks=tasks, prompt_format='harness', chat='none', shots=0,
                      fit_temperature=True, n_bootstrap=0, pictures=False, **more)


def runs(seed, root, model, data):
    for name, more, n_seeds in settings():
        if seed < n_seeds:
            yield TrainConfig(**{
                'model': model, 'data': f'{data}/alpaca.json', 'template': 'tulu', 'epochs': 3.0,
                'batch_size': 32, 'max_length': 1024, 'pack_len': 2048, 'val_size': 200,
                'val_every': 10_000, 'cache_dir': f'{root}/cache', 'checkpoint_epochs': False,
                'save_every': None, 'log_every': 10, 'pictures': False, 'eval': evaluation(data),
                'eval_before': False, 'seed': seed,
                'out_dir': f'{common.seed_folder("real", seed, root)}/{name}'} | more)


def main():
    options = common.command_line(
        __doc__, model={'required': True, 'help': 'folder of the base model'},
        data={'required': True, 'help': 'folder of the data'},
        seeds=common.seeds_option(common.SEEDS), only=common.ONLY, out_dir=common.OUT_DIR)
    make = functools.partial(runs, model=options.model, data=options.data)
    with cli.one_line_errors(resume='the same command continues'):
        common.train_all(make, options.seeds, tuple(options.only.split(',')), options.out_dir)
        base = Path(options.out_dir, 'real', 'base')
        if 0 in options.seeds and not (base / 'results.json').exists():
            run(evaluation(options.data, model=options.model, out_dir=str(base)))
        common.print_table(make, options.out_dir)


if __name__ == '__main__':
    main()
