"""The whole program on a small scale: how fine-tuning changes calibration, in minutes on a CPU.

    python demo.py
    python demo.py --seed=3 --base_smoothing=0.9 --out_dir=out/seed3

Makes a small world whose facts are known, trains a tiny base model on text about it, fine-tunes the
model without smoothing and with smoothing towards the base model, and evaluates all three. Prints a
table of the three and draws their reliability diagrams. When the demo is started again, it skips
finished runs.
"""

from runtime import cli

if __name__ == '__main__':
    cli.begin()

import os
import sys
import textwrap
import time
from dataclasses import dataclass, replace

import torch

from world import make_world
from evaluate import EvalConfig
from results.report import print_report
from runtime.config import load_config, run_settings
from runtime.errors import ConfigError
from train import TrainConfig, check_config, train_and_report


@dataclass
class DemoConfig:
    out_dir: str = 'out/demo'   # folder of the world and of the three models
    # of the second tuned model: the share of the target that is what the base model predicts
    base_smoothing: float = 0.5
    seed: int = 0               # of the world, the initial weights and the order of the data


def runs(demo):
    """Return {name: TrainConfig} of the three runs, in the order in which they need each other."""
    world = f'{demo.out_dir}/world'
    # what the three runs share; a key that is not named here keeps its default in train.py
    shared = TrainConfig(
        seed=demo.seed,
        dtype='float32', save_dtype='float32',
        max_length=224, pack_len=224,       # tokens per document and per packed row
        micro_rows=64,                      # rows per forward pass
        betas=(0.9, 0.95),
        cache_dir=f'{demo.out_dir}/cache',
        checkpoint_epochs=False,
        log_every=50,
        eval=EvalConfig(tasks=(f'{world}/questions.jsonl',), shots=0, scoring='text',
                        pack_len=224, batch_rows=32),
        eval_before=False,
    )
    # world/model holds a tokenizer and a config.json, no weights: they start at random
    base = replace(shared, model=f'{world}/model', from_scratch=True,
                   data=f'{world}/text.jsonl', data_kind='text', epochs=1.0, batch_size=24,
                   lr=4e-3, schedule='cosine', final_lr=0.05, weight_decay=0.1,
                   out_dir=f'{demo.out_dir}/base')
    # the conversations ask about facts that the model knows and about facts that it cannot know
    tuned = replace(shared, model=base.out_dir, data=f'{world}/instruct.jsonl',
                    epochs=5.0, batch_size=64, lr=1e-3, out_dir=f'{demo.out_dir}/tuned')
    smoothed = f'tuned_bs{demo.base_smoothing:g}'.replace('.', '')
    return {'base': base, 'tuned': tuned,
            smoothed: replace(tuned, base_smoothing=demo.base_smoothing,
                              out_dir=f'{demo.out_dir}/{smoothed}')}


def main(argv):
    demo = load_config(DemoConfig, argv, usage=__doc__)
    demo = replace(demo, out_dir=os.path.expanduser(demo.out_dir))
    for cfg in runs(demo).values():     # fail on a bad setting now, not after minutes
        check_config(cfg)
        if (seed := run_settings(cfg.out_dir).get('seed', demo.seed)) != demo.seed:
            raise ConfigError(f'{cfg.out_dir} is of a demo with --seed={seed}; choose another '
                              f'folder: --out_dir={demo.out_dir}-seed{demo.seed}')
    # text, conversations and questions about 8,000 entities, all of it decided by the seed
    make_world(f'{demo.out_dir}/world', demo.seed)
    reports = {}
    for name, cfg in runs(demo).items():
        # while other programs run, one thread can be faster than one per core
        print(f'\n=== {name}, with {pick_threads()} thread(s), the fastest in a test of a second')
        results = train_and_report(replace(cfg, resume=True))      # resume skips what is finished
        reports[name] = results['after'], cfg.out_dir
    # the table, and reliability-questions.png with a panel per model
    print_report(reports, demo.out_dir)
    print(story(reports, demo))


def pick_threads(seconds=1.0):
    """Set torch's threads to the fastest of 1, 2, 4, ...: while other processes run, often 1."""
    default = torch.get_num_threads()
    counts = sorted({default, *(2 ** i for i in range(default.bit_length()))})
    x, weight = torch.rand(2048, 128), torch.rand(128, 512)
    finished, ends = dict.fromkeys(counts, 0.0), time.perf_counter() + seconds
    while time.perf_counter() < ends:
        for n in counts:
            torch.set_num_threads(n)
            begins = time.perf_counter()
            for _ in range(4):
                (torch.nn.functional.silu(x @ weight) @ weight.T).softmax(-1)
            finished[n] += time.perf_counter() - begins
    fastest = min(finished, key=finished.get)
    torch.set_num_threads(fastest)
    return fastest


def story(reports, demo):
    """Return what the table shows, and where to look next."""
    (base, _), (tuned, place), (smoothed, smoothed_place) = reports.values()
    accuracy, ece = ([x['tasks']['questions']['pooled'][key] for x in (base, tuned, smoothed)]
                     for key in ('accuracy', 'ece'))
    seen = (f'Tuning took the accuracy from {accuracy[0]:.3f} to {accuracy[1]:.3f} and the ECE, '
            f'the distance between confidence and accuracy, from {ece[0]:.3f} to {ece[1]:.3f}; '
            f'with --base_smoothing={demo.base_smoothing:g} they are {accuracy[2]:.3f} and '
            f'{ece[2]:.3f}. Open {place}/report.html for the most confident mistakes, and test the '
            f'difference:')
    digits = ('The seed decides the world; another processor or version of torch changes the '
              'accuracy of the models by about 0.03 and the ECE by about 0.02.')
    return '\n'.join(['', textwrap.fill(seen, 100),
                      f'    python evaluate.py --compare {place} {smoothed_place}',
                      textwrap.fill(digits, 100)])


if __name__ == '__main__':
    with cli.one_line_errors(resume='the same command continues'):
        main(sys.argv[1:])
