"""Claim 10: tuning on facts that the base model knows, on those that it does not, and on both.

    python research/study/known.py --seeds=5

A fact of the instruction data is known if the base model ranks it first among the 24 values of its
attribute. The conversations are those of instruct-homogeneous.jsonl, which states one fact each.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from data.files import read_rows
from data.world import ENGLISH
from evaluate import EvalConfig, run
from results.report import predictions
from results.samples import read_samples
from runtime.errors import ConfigError
from runtime.ownership import write_text
from research.study import common
from research.study.losses import LOSSES, SEEDS, short, tuning

BASES = {'base': 8e-4, 'medium': 4e-4}      # learning rates of tuning
DATA = ('known', 'half', 'unknown')
NAMES = ('cross-entropy', 'smoothing', 'DFT')


def runs(seed, root=common.ROOT):
    folder = common.seed_folder('knows', seed, root)
    for base, lr in BASES.items():
        for data in DATA:
            for loss in (LOSSES[name][0] for name in NAMES):
                # the steps of 4,000 conversations in three epochs, however many are known
                yield tuning('known', f'{base}-{data}-{short(loss)}', seed, root, base=base,
                             data=f'{folder}/{base}-{data}.jsonl', loss=loss, lr=lr, val_size=0,
                             epochs=20.0, max_steps=187)


def select(seed, root=common.ROOT, base='base'):
    """Write the three instruction files of a base model, with equally many conversations each.

    Its answers to the questions behind all conversations go to the folder `base`. Raises
    ConfigError if it knows all of them, or none.
    """
    folder = Path(common.seed_folder('knows', seed, root))
    files = [folder / f'{base}-{data}.jsonl' for data in DATA]
    if all(file.exists() for file in files):
        return
    source = common.seed_folder('base', seed, root)
    rows = [row for _, row in read_rows(f'{source}/world/instruct-homogeneous.jsonl')]
    folder.mkdir(parents=True, exist_ok=True)
    questions = folder / f'{base}.jsonl'
    write_text(questions, lines(question(*each) for each in enumerate(rows)))
    run(EvalConfig(model=f'{source}/{base}', tasks=(f'{questions}',), shots=0, scoring='text',
                   n_bootstrap=0, pictures=False, seed=seed, out_dir=f'{folder / base}'))
    samples = read_samples(folder / base / 'samples.jsonl')
    p = predictions(samples, 'token')
    knows = np.zeros(len(rows), bool)
    knows[[int(s['id']) for s in samples]] = p.probs.argmax(1) == p.labels
    order = np.random.default_rng([seed, 4]).permutation(len(rows))
    known, unknown = order[knows[order]], order[~knows[order]]
    n = min(len(known), len(unknown)) // 2
    if not n:
        raise ConfigError(f'{questions}: the base model knows {len(known)} of {len(rows)} facts; '
                          f'both kinds are needed')
    chosen = known[:2 * n], [*known[:n], *unknown[:n]], unknown[:2 * n]
    for file, indices in zip(files, chosen, strict=True):
        write_text(file, lines(rows[i] for i in sorted(indices)))


def question(number, row):
    """Return a conversation's fact as a question whose options are all values of its attribute."""
    asked, answered = (message['content'] for message in row['messages'])
    value = answered.removeprefix('Answer: ')
    values = next(words for words in ENGLISH.values.values() if value in words)
    return {'question': asked, 'choices': values, 'answer': values.index(value), 'id': f'{number}'}


def lines(rows):
    return ''.join(json.dumps(row) + '\n' for row in rows)


def select_all(seed, root=common.ROOT):
    for base in BASES:
        select(seed, root, base)


if __name__ == '__main__':
    common.main(runs, prepare=select_all, seeds=SEEDS)
