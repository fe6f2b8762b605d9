"""Tables, tests and figures of claims 13 and 14; PLAN.md defines them, claims.py a cell.

    python research/study/alignment_tables.py   # from results/alignment/*.csv: tables and figures

The runs behind these numbers are those of commit 3eab9864, but for three arms of PPO with faults of
early releases of TRL (ppo-lost, ppo-response, ppo-both), which version 0.2.0 ran.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from runtime import cli
from compare.significance import mean_interval
from research.common import panels
from research.study.claims import Claims, cell, draw_groups, draw_mean, finish, label

METHODS = {'dpo': 'DPO', 'ppo': 'PPO', 'grpo': 'GRPO'}
ARMS = {'ppo': 'PPO', 'ppo-response': 'PPO, whitened per response',
        'ppo-lost': 'PPO, lost accumulation', 'ppo-both': 'PPO, both'}
WRITERS = {'base': 'base', 'sft': 'SFT', 'smoothed': 'SFT, smoothing 0.1'} | METHODS
CONFIDENCES = {'qa': 'probability of the answer', 'qa.agreement': 'share of ten samples',
               'qa.p_true': 'P(True)'}
SCALINGS = {'none': 'unscaled', 'temperature': 'with one temperature'}
MARGIN = 0.03       # rule `mended` in PLAN.md: the interval of ECE minus the base's ends below this
# SFT, and a method after each epoch
CURVES = {run: [('sft', {}), *((run, {'epoch': epoch}) for epoch in '123')]
          for run in METHODS | ARMS}


def written(numbers, run, key, task, scaling='none'):
    return numbers.of(run, key, task=task, epoch='written', scaling=scaling)


def restored_table(numbers):
    """Claim 14: the ECE after one temperature, minus that of the base model without one."""
    rows = [['ECE minus that of the base', *CONFIDENCES.values(), 'restored (interval below 0.03)']]
    for run, name in list(WRITERS.items())[1:]:
        excess = [written(numbers, run, 'ece', task, 'temperature')
                  - written(numbers, 'base', 'ece', task) for task in CONFIDENCES]
        finite = len(numbers.seeds) > 1 and np.isfinite(excess).all()
        restored = [mean_interval(x)[2] < MARGIN for x in excess] if finite else []
        rows.append([name, *map(cell, excess), f'{sum(restored)} of 3' if finite else ''])
    return rows


# Figures

def alignment_figure(numbers, file):
    """Draw PPO's four arms by epoch, ECE against KL and reward, and three groups of bars."""
    figure, axes = panels(6, 3)
    by_epoch, by_kl, by_reward, one_temperature, known, smoothed = axes
    color = {run: f'C{i}' for i, run in enumerate(ARMS | METHODS)}
    for i, (run, title) in enumerate(ARMS.items()):
        x, ece = np.arange(4) + 0.05 * (i - 1.5), numbers.curve(run, 'ece')[1]
        by_epoch.plot(x, ece.mean(1), color=color[run], linewidth=1)
        for at, values in zip(x, ece, strict=True):
            draw_mean(by_epoch, at, values, color=color[run], label=title)
    by_epoch.set_xticks(range(4), ['SFT', '1', '2', '3'])
    for ax, key in ((by_kl, 'kl'), (by_reward, 'reward')):
        for run, title in METHODS.items():
            x, ece = numbers.curve(run, 'ece', key).mean(-1)
            ax.plot(x, ece, marker='o', markersize=4, color=color[run], label=title)
            for epoch in (1, 2, 3):
                ax.annotate(str(epoch), (x[epoch], ece[epoch]), (3, 3), fontsize=7,
                            textcoords='offset points')
        ax.plot(x[:1], ece[:1], marker='*', markersize=10, color='black', linestyle='', label='SFT')

    def draw(ax, names, series):
        draw_groups(ax, names, {label: (color, [numbers.of(run, 'ece', **where) for run in runs])
                                for label, (color, runs, where) in series.items()}, 0.16)
        ax.set_xlim(-0.5, len(names) - 0.5)
    models, names = ['sft', *METHODS], ['SFT', *METHODS.values()]
    draw(one_temperature, names, {
        'unscaled': ('black', models, {}),
        'after a temperature': ('C8', models, {'scaling': 'temperature'})})
    draw(known, ['DPO', 'GRPO'], {
        f'{data} facts': (f'C{i}', [f'dpo-{data}', f'grpo-{data}'], {})
        for i, data in ((6, 'known'), (7, 'unknown'))})
    draw(smoothed, names, {
        'no smoothing in SFT': ('black', models, {}),
        'smoothing 0.1 in SFT': ('C9', ['smoothed', *(f'{run}-smoothed' for run in METHODS)], {})})
    for ax, x, title in ((by_epoch, 'epoch', "PPO and TRL's variants"),
                         (by_kl, 'KL to SFT (nats)', 'ECE against KL, by epoch'),
                         (by_reward, 'held-out reward', 'ECE against reward, by epoch'),
                         (one_temperature, '', 'before and after one temperature'),
                         (known, '', 'aligned on known or unknown facts'),
                         (smoothed, '', 'with and without smoothing in SFT')):
        label(ax, title, xlabel=x, ylabel='ECE')
        ax.set_ylim(bottom=0)
    finish(figure, file)


def written_figure(numbers, file):
    """Draw the ECE of the three confidences of all models, before and after one temperature."""
    figure, axes = panels(2, 2, width=4.5)
    for ax, (scaling, title) in zip(axes, SCALINGS.items(), strict=True):
        draw_groups(ax, WRITERS, {name: (f'C{i}', [
            written(numbers, run, 'ece', task, scaling) for run in WRITERS])
            for i, (task, name) in enumerate(CONFIDENCES.items())}, 0.14)
        ax.set_xticks(range(len(WRITERS)), [name.replace(', ', ',\n') for name in WRITERS.values()],
                      fontsize=8)
        label(ax, title, 'y', ylabel='ECE')
    low, high = zip(*(ax.get_ylim() for ax in axes), strict=True)
    for ax in axes:
        ax.set_ylim(min(0, *low), max(high))
    finish(figure, file)


CLAIMS = Claims(
    Path(__file__).parent / 'results' / 'alignment',
    {'task': 'chat', 'epoch': '3', 'scaling': 'none'},
    {'alignment': alignment_figure, 'written': written_figure},
    curves=CURVES, functions={'restored': restored_table})


if __name__ == '__main__':
    with cli.one_line_errors():
        CLAIMS.main(__doc__)
