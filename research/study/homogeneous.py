"""Claim 4: the same facts, with one wording for all questions and one for all answers."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from research.study import common


def runs(seed, root=common.ROOT):
    data = f'{common.seed_folder("base", seed, root)}/world/instruct-homogeneous.jsonl'
    for smoothing in (0.0, 0.1):
        yield common.tuning('homogeneous', f'homogeneous-smoothing{smoothing}', seed, root,
                            data=data, smoothing=smoothing, lr=8e-4)


if __name__ == '__main__':
    common.main(runs)
