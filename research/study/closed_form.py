"""Claim 15: the closed form of alignment, wrong labels, LoRA, and stated confidence; see PLAN.md.

    python research/study/closed_form.py    # from results/closed-form/*.csv: a table and a figure

The runs behind these numbers are those of commit 3eab9864.
"""

import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from runtime import cli
from research.common import panels
from research.study import alignment_tables
from research.study.claims import Claims, draw_mean, finish, label
from research.study.metrics_agree import kendall

TITLES = {'dpo': 'DPO', 'ppo': 'PPO', 'grpo': 'Dr. GRPO'}
WEIGHTS = {'ppo': (0.0125, 0.05, 0.2), 'grpo': (0.0125, 0.05, 0.2), 'dpo': (0.1, 0.3, 1.0)}
LORA = ('dpo', 'ppo')       # the methods that are also run with LoRA
NOISY = ('dpo-noisy', 'cdpo-noisy')
PAIR_MODELS = *NOISY, *(f'dpo-{beta}{kind}' for kind in ('', '-lora') for beta in WEIGHTS['dpo'])


def tau(numbers, names):
    """Return float [seeds]: Kendall's tau of preference ECE and ECE of answers over models."""
    both = np.array([[numbers.of(name, key) for name in names]
                     for key in ('preference_ece', 'ece')])       # [2, models, seeds]
    return np.array([kendall(*x, n_resamples=1)[0] if np.isfinite(x).all() else np.nan
                     for x in np.moveaxis(both, -1, 0)])


def figure(numbers, path):
    """Draw the ECE of each method by the weight of the KL, and that of the closed form."""
    drawn, axes = panels(3, 3)
    for ax, (method, weights) in zip(axes, WEIGHTS.items(), strict=True):
        # the points of a weight are drawn side by side, so that no interval hides another
        for title, kind, color, aside in (('full weights', '', 'C0', 1),
                                          ('closed form', '-expected', 'black', 0.9),
                                          ('LoRA', '-lora', 'C1', 1.1)):
            for weight in weights if kind != '-lora' or method in LORA else ():
                draw_mean(ax, weight * aside, numbers.of(f'{method}-{weight}{kind}', 'ece'),
                          color=color, label=title)
        ax.axhline(numbers.of('sft', 'ece').mean(), color='gray', linestyle=':', label='SFT')
        ax.set_xscale('log')
        ax.set_xticks(weights, map(str, weights))
        ax.set_xticks((), minor=True)
        ax.set_ylim(bottom=0)
        label(ax, TITLES[method], ylabel='ECE',
              xlabel='beta' if method == 'dpo' else 'weight of the KL')
    finish(drawn, path)


CLAIMS = Claims(
    Path(__file__).parent / 'results' / 'closed-form', alignment_tables.CLAIMS.usual,
    {'closed-form': figure},
    # SFT, and a method at its three weights
    curves={method + kind: [('sft', {}), *(
        (f'{method}-{weight}{kind}', {}) for weight in WEIGHTS[method])]
        for method in LORA for kind in ('', '-lora')},
    functions={'tau': functools.partial(tau, names=PAIR_MODELS), 'clean_tau': functools.partial(
        tau, names=[name for name in PAIR_MODELS if name not in NOISY])})


if __name__ == '__main__':
    with cli.one_line_errors():
        CLAIMS.main(__doc__)
