"""Claims 7, 8 and 11: every loss with its strengths, at three learning rates; see PLAN.md.

    python research/study/losses.py --seeds=5

The rates are the lower three of smoothing.py. The seeds are 5 to 9: claims 1 to 6 have seen 0 to 4.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from research.study import common

SEEDS = (5, 6, 7, 8, 9)
RATES = (8e-5, 3.2e-4, 8e-4)
# the strengths of each loss; the first is the one that is tested, and that other scripts use
LOSSES = {
    'cross-entropy': ('cross_entropy()',),
    'smoothing': ('cross_entropy() + smoothing(0.1)', 'cross_entropy() + smoothing(0.05)',
                  'cross_entropy() + smoothing(0.2)', 'cross_entropy() + smoothing(0.3)'),
    'confidence penalty': ('cross_entropy() + confidence_penalty(0.3)',
                           'cross_entropy() + confidence_penalty(0.1)',
                           'cross_entropy() + confidence_penalty(1.0)'),
    'focal': ('focal(2)', 'focal(1)', 'focal(3)'),
    'Brier': ('brier()',),
    'z-loss': ('cross_entropy() + z_loss(1e-4)', 'cross_entropy() + z_loss(1e-2)'),
    'GCE 0.7': ('gce(0.7)',),
    'GCE 1': ('gce(1)',),
    'DFT': ('dft()',),
    'entropy weighting': ('entropy_weighted(1)', 'entropy_weighted(0.5)'),
    'smoothing + z-loss': ('cross_entropy() + smoothing(0.1) + z_loss(1e-4)',),
}


def short(loss):
    """Return the part of a run's name for a loss, such as 'smoothing0.1' or 'focal2'."""
    return (loss.removeprefix('cross_entropy() + ').replace('_', '').replace(' + ', '-')
            .replace('(', '').replace(')', ''))


def tuning(experiment, name, seed, root, **settings):
    """Return the config of common.tuning with fewer tasks; 256 conversations are held out."""
    world = f'{common.seed_folder("base", seed, root)}/world'
    return common.tuning(experiment, name, seed, root, **{
        'val_size': 256, 'workers': 1, 'eval': common.evaluation(world, ('text4',))} | settings)


def runs(seed, root=common.ROOT):
    for strengths in LOSSES.values():
        for loss in strengths:
            for lr in RATES:
                yield tuning('losses', f'tuned-{short(loss)}-lr{lr}', seed, root, loss=loss, lr=lr)


if __name__ == '__main__':
    common.main(runs, seeds=SEEDS)
