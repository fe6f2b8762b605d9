"""Claim 1 for Gemma 2 and Mistral; the learning rate is 5e-5 times 4096 / hidden_size."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from research.study import common


def runs(seed, root=common.ROOT):
    for architecture in ('gemma2', 'mistral'):
        for smoothing in (0.0, 0.1, 0.3):
            name = f'tuned-architecture{architecture}-smoothing{smoothing}'
            yield common.tuning('architectures', name, seed, root, base=architecture,
                                smoothing=smoothing, lr=8e-4)


if __name__ == '__main__':
    common.main(runs)
