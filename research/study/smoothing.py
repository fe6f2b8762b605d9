"""Claims 1, 2, 5 and 6: smoothing by learning rate.

The rates are those of the paper, 5e-6, 2e-5, 5e-5 and 2e-4, times 4096 / hidden_size.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from research.study import common


def runs(seed, root=common.ROOT):
    for smoothing in (0.0, 0.1, 0.2, 0.3, 0.4, 0.5):
        for lr in (8e-5, 3.2e-4, 8e-4, 3.2e-3):
            yield common.tuning('smoothing', f'tuned-smoothing{smoothing}-lr{lr}', seed, root,
                                smoothing=smoothing, lr=lr)


if __name__ == '__main__':
    common.main(runs)
