"""Claim 4: one to eight epochs of instruction data."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from research.study import common


def runs(seed, root=common.ROOT):
    for smoothing in (0.0, 0.1):
        for epochs in (1.0, 2.0, 4.0, 8.0):
            yield common.tuning('epochs', f'tuned-smoothing{smoothing}-epochs{epochs}', seed, root,
                                smoothing=smoothing, epochs=epochs, lr=8e-4)


if __name__ == '__main__':
    common.main(runs)
