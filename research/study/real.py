"""Claim 16: what tuning does to a real model, Gemma 3 270M; see PLAN.md.

    python research/study/real.py --model=DATA/model --data=DATA --seeds=0,1

`--model` is the folder of the base model, `--data` one with alpaca.json (conversations), arc/,
hellaswag/ and wiki/ (docs/papers.md names their files). Finished runs are skipped, and several
processes can share the seeds.
"""

import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from evaluate import EvalConfig, run
from runtime import cli
from research.study import common
from train import TrainConfig

RATES = (5e-6, 2e-5, 5e-5, 2e-4)
SMOOTHINGS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
LOSSES = {'dft': 'dft()', 'gce0.7': 'gce(0.7)', 'focal2': 'focal(2)', 'brier': 'brier()',
          'maxsup0.1': 'cross_entropy() + max_sup(0.1)',
          'adaptive0.1': 'cross_entropy() + adaptive_smoothing(0.1)',
          'adaptive1': 'cross_entropy() + adaptive_smoothing(1)'}


def settings():
    """Yield (name, settings of a run, number of seeds), those that a claim rests on first."""
    for lr in RATES[:3]:
        for smoothing in SMOOTHINGS[:2]:
            yield f'lr{lr}-smoothing{smoothing}', {'lr': lr, 'smoothing': smoothing}, 5
    for smoothing in SMOOTHINGS[:2]:
        yield f'fp8-lr5e-05-smoothing{smoothing}', {
            'lr': 5e-5, 'smoothing': smoothing, 'fp8': True}, 5
    yield 'lora-lr0.0002', {'lora': True, 'lr': 2e-4}, 5
    yield 'lora-lr0.001', {'lora': True, 'lr': 1e-3}, 5
    yield 'epoch1-lr5e-05', {'lr': 5e-5, 'epochs': 1.0}, 5
    for name, loss in LOSSES.items():
        yield f'{name}-lr5e-05', {'lr': 5e-5, 'loss': loss}, 3
    for smoothing in SMOOTHINGS[:2]:
        yield f'lr0.0002-smoothing{smoothing}', {'lr': 2e-4, 'smoothing': smoothing}, 3
    for smoothing in SMOOTHINGS[2:]:
        for lr in RATES[2:0:-1]:
            yield f'lr{lr}-smoothing{smoothing}', {'lr': lr, 'smoothing': smoothing}, 3
    for smoothing in SMOOTHINGS[2:]:
        for lr in (RATES[0], RATES[3]):
            yield f'lr{lr}-smoothing{smoothing}', {'lr': lr, 'smoothing': smoothing}, 1


def evaluation(data, **more):
    """Return the report on questions, by the text of the options, and on next tokens."""
    tasks = (f'arc_easy:{data}/arc', f'arc_challenge:{data}/arc', f'hellaswag:{data}/hellaswag',
             f'clm:{data}/wiki')
    return EvalConfig(tasks=tasks, prompt_format='harness', shots=0, fit_temperature=True,
                      n_bootstrap=0, pictures=False, **more)


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
    options = common.options(
        __doc__, model={'required': True, 'help': 'folder of the base model'},
        data={'required': True, 'help': 'folder of the data'},
        seeds=common.seeds_option(common.SEEDS), only=common.ONLY, out_dir=common.OUT_DIR)
    make = functools.partial(runs, model=options.model, data=options.data)
    with cli.one_line_errors(resume='the same command continues'):
        base = Path(options.out_dir, 'real', 'base')
        if 0 in options.seeds and not (base / 'results.json').exists():
            run(evaluation(options.data, model=options.model, out_dir=str(base)))
        common.train_all(make, options.seeds, tuple(options.only.split(',')), options.out_dir)
        common.print_table(make, options.out_dir)


if __name__ == '__main__':
    main()
