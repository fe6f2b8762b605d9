"""Claim 4: base models of 1, 34 and 210 million parameters; that of the other claims has 6 million.

The learning rate is 0.2 / hidden_size.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from research.study import common


def runs(seed, root=common.ROOT):
    for size, lr in (('tiny', 1.6e-3), ('medium', 4e-4), ('large', 2e-4)):
        for smoothing in (0.0, 0.1):
            yield common.tuning('size', f'tuned-{size}-smoothing{smoothing}', seed, root,
                                base=size, smoothing=smoothing, lr=lr)


if __name__ == '__main__':
    common.main(runs)
