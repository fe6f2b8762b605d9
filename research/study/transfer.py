"""Claims 9 and 11: the losses with base models of 34 and 210 million parameters, LoRA, one epoch.

    python research/study/transfer.py --seeds=5

The learning rates are 0.2 and 0.08 / hidden_size; LoRA has those of lora.py and one that
is four times as high, since LoRA changes little at the first.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from research.study import common
from research.study.losses import LOSSES, SEEDS, short, tuning

FEW = ('cross-entropy', 'smoothing', 'confidence penalty', 'Brier', 'DFT')
# kind: (learning rates, losses, settings)
KINDS = {
    'lora': ((8e-4, 3.2e-3, 1.28e-2), ('cross-entropy', 'smoothing', 'confidence penalty', 'DFT'),
             {'lora': True}),
    'epoch': ((3.2e-4, 8e-4), ('cross-entropy', 'smoothing'), {'epochs': 1.0}),
    'medium': ((1.6e-4, 4e-4), (*FEW, 'focal', 'GCE 0.7', 'entropy weighting'),
               {'base': 'medium'}),
    'large': ((8e-5, 2e-4), FEW, {'base': 'large'}),
}


def runs(seed, root=common.ROOT):
    for kind, (rates, names, settings) in KINDS.items():
        for name in names:
            loss = LOSSES[name][0]
            for lr in rates:
                yield tuning('transfer', f'{kind}-{short(loss)}-lr{lr}', seed, root, loss=loss,
                             lr=lr, **settings)


if __name__ == '__main__':
    common.main(runs, seeds=SEEDS)
