"""Claim 4: LoRA adapters of rank 8 on queries and values, at two learning rates."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from research.study import common


def runs(seed, root=common.ROOT):
    for smoothing in (0.0, 0.1):
        for lr in (8e-4, 3.2e-3):
            yield common.tuning('lora', f'lora-smoothing{smoothing}-lr{lr}', seed, root,
                                lora=True, smoothing=smoothing, lr=lr)


if __name__ == '__main__':
    common.main(runs)
