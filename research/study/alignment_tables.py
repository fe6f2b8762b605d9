"""Tables, tests and figures of claims 13 and 14; PLAN.md defines them, claims.py a cell.

    python research/study/alignment_tables.py --runs=out/study  # first results/alignment/seed-*.csv
    python research/study/alignment_tables.py                   # from these: tables and figures
"""

import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from runtime import cli
from stats import mean_interval
from research.study import alignment, claims
from research.study.claims import (at_equal, cell, difference_table, draw_groups, draw_mean, finish,
                                   metrics_table, panels, plain)

RESULTS = Path(__file__).parent / 'results' / 'alignment'
LAST = '3'          # epoch
USUAL = {'task': 'chat', 'epoch': LAST, 'scaling': 'none'}
METHODS = {'dpo': 'DPO', 'ppo': 'PPO', 'grpo': 'GRPO'}
ARMS = {'ppo': 'PPO', 'ppo-response': 'PPO, whitened per response',
        'ppo-lost': 'PPO, lost accumulation', 'ppo-both': 'PPO, both'}
SFT = {'sft': 'SFT'}
WRITERS = {'base': 'base', 'sft': 'SFT', 'smoothed': 'SFT, smoothing 0.1'} | METHODS
CONFIDENCES = {'qa': 'probability of the answer', 'qa.agreement': 'share of ten samples',
               'qa.p_true': 'P(True)'}
SCALINGS = {'none': 'unscaled', 'temperature': 'with one temperature'}
MARGIN = 0.03       # rule `mended` in PLAN.md: the interval of ECE minus the base's ends below this


def path(numbers, run, metric):
    """Return float [4, seeds]: a metric of SFT and after each epoch of a run."""
    first = np.zeros(len(numbers.seeds)) if metric == 'kl' else numbers.of('sft', metric)
    return np.array([first, *(numbers.of(run, metric, epoch=epoch) for epoch in ('1', '2', LAST))])


# Tables: a function of Numbers returns rows, header first

def optimization_table(numbers):
    """Claim 13, question 1: what each PPO learned and what it did to calibration."""
    head = ['model', 'training reward: first 8 steps', 'last 8 steps', 'held-out reward',
            'KL (nats)', 'accuracy', 'confidence', 'ECE']
    rows = [([title], run, {'task': 'plain'} if run == 'base' else {})
            for run, title in ({'base': 'base'} | SFT | ARMS).items()]
    metrics = 'first_reward', 'trained_reward', 'reward', 'kl', 'accuracy', 'confidence', 'ece'
    return metrics_table(numbers, head, rows, metrics, ('first_reward', 'trained_reward', 'kl'))


def optimization_tests(numbers):
    others = SFT | {run: title for run, title in ARMS.items() if run != 'ppo'}
    return difference_table({
        f'{name} of PPO - {title}': numbers.of('ppo', metric) - numbers.of(run, metric)
        for run, title in others.items()
        for name, metric in (('held-out reward', 'reward'), ('ECE', 'ece'))})


def changes_table(numbers):
    """Claim 13: what each model changed, also in accuracy and AUROC; no tests were planned."""
    metrics = {'reward': 'held-out reward', 'accuracy': 'accuracy', 'auroc': 'AUROC', 'ece': 'ECE'}
    return [['change from SFT (not tested)', *metrics.values()], *(
        [title, *(cell(numbers.of(run, key) - numbers.of('sft', key)) for key in metrics)]
        for run, title in (ARMS | METHODS).items())]


def methods_table(numbers):
    """Claim 13, questions 2 and 4: the methods after each epoch, and after a temperature."""
    head = ['model', 'epoch', 'held-out reward', 'KL (nats)', 'accuracy', 'confidence', 'ECE',
            'NLL', 'temperature', 'ECE after scaling', 'NLL after scaling']
    rows = [(['SFT', ''], 'sft', {})] + [
        ([title, epoch], run, {'epoch': epoch})
        for run, title in METHODS.items() for epoch in ('1', '2', LAST)]
    return metrics_table(numbers, head, rows, (
        'reward', 'kl', 'accuracy', 'confidence', 'ece', 'nll', 'scaled temperature', 'scaled ece',
        'scaled nll'), ('kl',))


def methods_tests(numbers):
    def at_equal_x(run, x, metric):
        return at_equal(*(np.array([path(numbers, each, key) for key in (x, metric)])
                          for each in (run, 'dpo')))
    return difference_table({
        f'{title} of {METHODS[run]} - DPO, at equal {name}': at_equal_x(run, x, metric)
        for run in ('ppo', 'grpo') for title, metric, name, x in (
            ('ECE', 'ece', 'held-out reward', 'reward'), ('KL', 'kl', 'held-out reward', 'reward'),
            ('ECE', 'ece', 'KL', 'kl'))})


def temperature_tests(numbers):
    after = functools.partial(numbers.of, scaling='temperature')
    return difference_table({
        f'{name} after a temperature, {title} - SFT': after(run, metric) - after('sft', metric)
        for name, metric in (('ECE', 'ece'), ('NLL', 'nll')) for run, title in METHODS.items()})


def known_table(numbers):
    """Claim 13, question 3: alignment on known facts and on unknown ones."""
    head = ['method', 'aligned on', 'held-out reward', 'KL (nats)', 'accuracy', 'confidence', 'ECE',
            'ECE after a temperature']
    rows = [([METHODS[method], f'{data} facts'], f'{method}-{data}', {})
            for method in ('dpo', 'grpo') for data in ('known', 'unknown')]
    return metrics_table(numbers, head, rows,
                         ('reward', 'kl', 'accuracy', 'confidence', 'ece', 'scaled ece'))


def known_tests(numbers):
    return difference_table({
        f'{name}, {METHODS[method]}: unknown - known facts':
        numbers.of(f'{method}-unknown', key) - numbers.of(f'{method}-known', key)
        for method in ('dpo', 'grpo') for name, key in (('ECE', 'ece'), ('accuracy', 'accuracy'))})


STATED = (('SFT with random stated confidences', 'stated', 'qa.stated'),
          ('RLCR', 'rlcr', 'qa.stated'), ('RLCR', 'rlcr', 'qa.answer_span'),
          ('Brier loss', 'brier', 'qa'))


def stated_table(numbers, runs=STATED):
    """Claim 13, question 5: a stated confidence that is rewarded, and a Brier loss."""
    head = ['model', 'confidence', 'accuracy', 'mean confidence', 'ECE', 'Brier', 'AUROC']
    rows = [([title, 'stated' if task == 'qa.stated' else 'probability of the answer'], run,
             {'task': task}) for title, run, task in runs]
    return metrics_table(numbers, head, rows,
                         ('accuracy', 'confidence', 'ece', 'brier_top_label', 'auroc'))


def stated_tests(numbers):
    return difference_table({
        f'{name} of RLCR, stated - Brier loss': numbers.of('rlcr', key, task='qa.stated')
        - numbers.of('brier', key, task='qa')
        for name, key in (('ECE', 'ece'), ('Brier', 'brier_top_label'), ('accuracy', 'accuracy'))})


# {run: (the same after SFT with smoothing, title)}
SMOOTHED = {'sft': ('smoothed', 'SFT')} | {
    run: (f'{run}-smoothed', title) for run, title in METHODS.items()}


def smoothed_table(numbers):
    """Claim 13, question 6: smoothing 0.1 in SFT, before alignment."""
    rows = [([title], run, {}) for run, (_, title) in SMOOTHED.items()] + [
        ([f'{title} after SFT with smoothing 0.1' if run != 'smoothed' else WRITERS[run]], run, {})
        for run, title in SMOOTHED.values()]
    return metrics_table(
        numbers, ['model', 'accuracy', 'confidence', 'ECE', 'NLL', 'ECE after a temperature'], rows,
        ('accuracy', 'confidence', 'ece', 'nll', 'scaled ece'))


def smoothed_tests(numbers):
    return difference_table({
        f'ECE of {title}: smoothing 0.1 in SFT - none':
        numbers.of(smoothed, 'ece') - numbers.of(run, 'ece')
        for run, (smoothed, title) in SMOOTHED.items()})


def written(numbers, run, key, task, scaling='none'):
    return numbers.of(run, key, task=task, epoch='written', scaling=scaling)


def written_table(numbers, key='ece', title='ECE'):
    """Claim 14: a metric of each confidence, before and after one temperature."""
    return [['model', *(f'{title}: {name}, {how}' for name in CONFIDENCES.values()
                        for how in SCALINGS.values())], *(
        [name, *(plain(written(numbers, run, key, task, scaling))
                 for task in CONFIDENCES for scaling in SCALINGS)]
        for run, name in WRITERS.items())]


def written_accuracy(numbers):
    rows = [['model', 'temperature', 'accuracy: greedy answer', 'most frequent of ten samples',
             'the same with one temperature', 'AUROC: probability', 'share of ten samples',
             'P(True)']]
    for run, name in WRITERS.items():
        task = 'plain' if run == 'base' else 'chat'
        values = [numbers.of(run, 'temperature', task=task, scaling='temperature')]
        values += [written(numbers, run, 'accuracy', *how) for how in (
            ('qa',), ('qa.agreement',), ('qa.agreement', 'temperature'))]
        values += [written(numbers, run, 'auroc', task) for task in CONFIDENCES]
        rows.append([name, *map(plain, values)])
    return rows


def written_tests(numbers):
    """Claim 14: what SFT, smoothing and alignment do to the ECE of each confidence."""
    pairs = [('sft', 'base'), *((run, 'sft') for run in ('smoothed', *METHODS))]
    return difference_table({
        f'ECE of the {name}: {WRITERS[run]} - {WRITERS[other]}':
        written(numbers, run, 'ece', task) - written(numbers, other, 'ece', task)
        for task, name in CONFIDENCES.items() for run, other in pairs})


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
    figure, axes = panels(2, 3)
    by_epoch, by_kl, by_reward, one_temperature, known, smoothed = axes.flat
    color = {run: f'C{i}' for i, run in enumerate(ARMS | METHODS)}
    for i, (run, title) in enumerate(ARMS.items()):
        x, ece = np.arange(4) + 0.05 * (i - 1.5), path(numbers, run, 'ece')
        by_epoch.plot(x, ece.mean(1), color=color[run], linewidth=1)
        for at, values in zip(x, ece, strict=True):
            draw_mean(by_epoch, at, values, color=color[run], label=title)
    by_epoch.set_xticks(range(4), ['SFT', '1', '2', '3'])
    for ax, key in ((by_kl, 'kl'), (by_reward, 'reward')):
        for run, title in METHODS.items():
            x, ece = (path(numbers, run, metric).mean(1) for metric in (key, 'ece'))
            ax.plot(x, ece, marker='o', markersize=4, color=color[run], label=title)
            for epoch in (1, 2, 3):
                ax.annotate(str(epoch), (x[epoch], ece[epoch]), (3, 3), fontsize=7,
                            textcoords='offset points')
        ax.plot(x[:1], ece[:1], marker='*', markersize=10, color='black', linestyle='', label='SFT')

    def draw(ax, names, series):
        draw_groups(ax, names, {label: (color, [numbers.of(run, 'ece', **where) for run in runs])
                                for label, (color, runs, where) in series.items()}, 0.16)
        ax.set_xlim(-0.5, len(names) - 0.5)
    models, names = [*SMOOTHED], [title for _, title in SMOOTHED.values()]
    draw(one_temperature, names, {
        'unscaled': ('black', models, {}),
        'after a temperature': ('C8', models, {'scaling': 'temperature'})})
    draw(known, ['DPO', 'GRPO'], {
        f'{data} facts': (f'C{i}', [f'dpo-{data}', f'grpo-{data}'], {})
        for i, data in ((6, 'known'), (7, 'unknown'))})
    draw(smoothed, names, {
        'no smoothing in SFT': ('black', models, {}),
        'smoothing 0.1 in SFT': ('C9', [run for run, _ in SMOOTHED.values()], {})})
    for ax, x, title in ((by_epoch, 'epoch', "PPO and TRL's variants"),
                         (by_kl, 'KL to SFT (nats)', 'ECE against KL, by epoch'),
                         (by_reward, 'held-out reward', 'ECE against reward, by epoch'),
                         (one_temperature, '', 'before and after one temperature'),
                         (known, '', 'aligned on known or unknown facts'),
                         (smoothed, '', 'with and without smoothing in SFT')):
        ax.set(xlabel=x, ylabel='ECE')
        ax.set_ylim(bottom=0)
        ax.set_title(title, fontsize=10)
        ax.grid(alpha=0.3)
    finish(figure, file)


def written_figure(numbers, file):
    """Draw the ECE of the three confidences of all models, before and after one temperature."""
    figure, axes = panels(1, 2)
    figure.set_figwidth(9)
    for ax, (scaling, title) in zip(axes[0], SCALINGS.items(), strict=True):
        draw_groups(ax, WRITERS, {name: (f'C{i}', [
            written(numbers, run, 'ece', task, scaling) for run in WRITERS])
            for i, (task, name) in enumerate(CONFIDENCES.items())}, 0.14)
        ax.set_xticks(range(len(WRITERS)), [name.replace(', ', ',\n') for name in WRITERS.values()],
                      fontsize=8)
        ax.set_title(title, fontsize=10)
        ax.set(ylabel='ECE')
        ax.grid(axis='y', alpha=0.3)
    low, high = zip(*(ax.get_ylim() for ax in axes[0]), strict=True)
    for ax in axes[0]:
        ax.set_ylim(min(0, *low), max(high))
    finish(figure, file)


# {file: (title, tables, figure)}
CLAIMS = {
    'alignment': ('Claim 13: calibration after alignment', (
        optimization_table, optimization_tests, changes_table, methods_table, methods_tests,
        known_table, known_tests, temperature_tests, smoothed_table, smoothed_tests, stated_table,
        stated_tests), alignment_figure),
    'written': ('Claim 14: confidence in written answers', (
        written_table, functools.partial(written_table, key='brier_top_label', title='Brier'),
        functools.partial(written_table, key='confidence', title='mean confidence'),
        written_accuracy, written_tests, restored_table), written_figure)}


def main(arguments=None):
    claims.main(arguments, __doc__, CLAIMS, RESULTS, USUAL, alignment.sources, alignment.lines_of)


if __name__ == '__main__':
    with cli.one_line_errors():
        main()
