"""Numbers, tables, tests and figures of claims 13 and 14; PLAN.md defines them.

    python research/study/aligned.py --runs=out/study   # first results/alignment/seed-*.csv
    python research/study/aligned.py                    # from these files: tables and figures

Cells are means over seeds, ± half of the 95 % interval (Student's t). p is of a two-sided t test
over paired seeds, after Holm's correction for all tests of a table. One seed has neither.
"""

import argparse
import itertools
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from results.tables import csv_text
from runtime import cli
from runtime.errors import ConfigError
from runtime.ownership import write_text
from runtime.processes import parallel_map
from stats import mean_interval
from research.study import alignment
from research.study.frontier import (at_equal_accuracy, bars, cell, finish, page, panels,
                                     read_numbers, tested_table)

RESULTS = Path(__file__).parent / 'results' / 'alignment'
LAST = '3'          # epoch
METHODS = {'dpo': 'DPO', 'ppo': 'PPO', 'grpo': 'GRPO'}
ARMS = {'ppo': 'PPO', 'ppo-response': 'PPO, whitened per response',
        'ppo-lost': 'PPO, lost accumulation', 'ppo-both': 'PPO, both'}
WRITERS = {'base': 'base', 'sft': 'SFT', 'smoothed': 'SFT, smoothing 0.1'} | METHODS
CONFIDENCES = {'qa': 'probability of the answer', 'qa.agreement': 'share of ten samples',
               'qa.p_true': 'P(True)'}
SCALINGS = {'none': 'unscaled', 'temperature': 'with one temperature'}
MARGIN = 0.03       # rule `mended` in PLAN.md: the interval of ECE minus the base's ends below this


class Numbers:
    """The lines of all seeds; nan stands for a number whose run is missing."""

    def __init__(self, folder):
        self.lines, self.seeds = read_numbers(folder, 'run', 'task', 'epoch', 'scaling')
        if not self.seeds:
            raise ConfigError(f'{folder} has no seed-*.csv; --runs=out/study writes them')

    def of(self, run, metric, task='chat', epoch=LAST, scaling='none'):
        """Return float [seeds]."""
        lines = (self.lines.get((seed, run, task, epoch, scaling), {}) for seed in self.seeds)
        return np.array([float(line.get(metric) or 'nan') for line in lines])

    def path(self, run, metric, start='sft'):
        """Return float [seeds, 4]: a metric of the model at the start and after each epoch."""
        first = np.zeros(len(self.seeds)) if metric == 'kl' else self.of(start, metric)
        epochs = [self.of(run, metric, epoch=epoch) for epoch in ('1', '2', LAST)]
        return np.stack([first, *epochs], axis=1)

    def at_equal(self, x, metric, run, other):
        """Return float [seeds]: the mean of `metric` of `run` minus that of `other` at equal x."""
        def curve(run, i):
            points = np.stack([self.path(run, x)[i], self.path(run, metric)[i]])
            return points[:, np.argsort(points[0], kind='stable')]
        return np.array([at_equal_accuracy(curve(run, i), curve(other, i))
                         for i in range(len(self.seeds))])


# Tables: a function of Numbers returns rows, header first


def plain(values):
    return cell(values).lstrip('+')


def difference_table(named):
    """Return a table of {statement: values [seeds]}, all of which are tested."""
    rows = [([name], [values]) for name, values in named.items()]
    return tested_table(['difference', 'mean'], rows, [(i, 0) for i in range(len(rows))])


def optimization_table(numbers):
    """Claim 13, question 1: what each PPO learned and what it did to calibration."""
    rows = [['model', 'training reward: first 8 steps', 'last 8 steps', 'held-out reward',
             'KL (nats)', 'accuracy', 'confidence', 'ECE']]
    untrained, rewarded = ('base', 'sft'), ('first_reward', 'trained_reward', 'kl')
    for run, title in ({'base': 'base', 'sft': 'SFT'} | ARMS).items():
        task = 'plain' if run == 'base' else 'chat'
        rows.append([title, *(
            '' if run in untrained and key in rewarded else plain(numbers.of(run, key, task))
            for key in ('first_reward', 'trained_reward', 'reward', 'kl', 'accuracy', 'confidence',
                        'ece'))])
    return rows


def optimization_tests(numbers):
    named = {f'{key} of PPO - SFT': numbers.of('ppo', metric) - numbers.of('sft', metric)
             for key, metric in (('held-out reward', 'reward'), ('ECE', 'ece'))}
    for run, title in list(ARMS.items())[1:]:
        for key, metric in (('held-out reward', 'reward'), ('ECE', 'ece')):
            named[f'{key} of PPO - {title}'] = numbers.of('ppo', metric) - numbers.of(run, metric)
    return difference_table(named)


def changes_table(numbers):
    """Claim 13: what each model changed, also in accuracy and AUROC; no tests were planned."""
    metrics = {'reward': 'held-out reward', 'accuracy': 'accuracy', 'auroc': 'AUROC', 'ece': 'ECE'}
    return [['change from SFT (not tested)', *metrics.values()], *(
        [title, *(cell(numbers.of(run, key) - numbers.of('sft', key)) for key in metrics)]
        for run, title in (ARMS | METHODS).items())]


def methods_table(numbers):
    """Claim 13, questions 2 and 4: the methods after each epoch, and after a temperature."""
    rows = [['model', 'epoch', 'held-out reward', 'KL (nats)', 'accuracy', 'confidence', 'ECE',
             'NLL', 'temperature', 'ECE after scaling', 'NLL after scaling']]
    for run, title in ({'sft': 'SFT'} | METHODS).items():
        for epoch in (LAST,) if run == 'sft' else ('1', '2', LAST):
            rows.append([title, '' if run == 'sft' else epoch, *(
                '' if (run, key) == ('sft', 'kl') else plain(numbers.of(run, key, epoch=epoch))
                for key in ('reward', 'kl', 'accuracy', 'confidence', 'ece', 'nll')), *(
                plain(numbers.of(run, key, epoch=epoch, scaling='temperature'))
                for key in ('temperature', 'ece', 'nll'))])
    return rows


def methods_tests(numbers):
    return difference_table({
        f'{title} - DPO, at equal {name}': numbers.at_equal(x, metric, run, 'dpo')
        for run, title in (('ppo', 'PPO'), ('grpo', 'GRPO'))
        for title, x, metric, name in ((f'ECE of {title}', 'reward', 'ece', 'held-out reward'),
                                       (f'KL of {title}', 'reward', 'kl', 'held-out reward'),
                                       (f'ECE of {title}', 'kl', 'ece', 'KL'))})


def temperature_tests(numbers):
    def after(run, metric='ece'):
        return numbers.of(run, metric, scaling='temperature')
    return difference_table(
        {f'ECE after a temperature, {title} - SFT': after(run) - after('sft')
         for run, title in METHODS.items()}
        | {f'NLL after a temperature, {title} - SFT': after(run, 'nll') - after('sft', 'nll')
           for run, title in METHODS.items()})


def known_table(numbers):
    """Claim 13, question 3: alignment on known facts and on unknown ones."""
    rows = [['method', 'aligned on', 'held-out reward', 'KL (nats)', 'accuracy', 'confidence',
             'ECE', 'ECE after a temperature']]
    for method in ('dpo', 'grpo'):
        for data in ('known', 'unknown'):
            run = f'{method}-{data}'
            rows.append([METHODS[method], f'{data} facts', *(
                plain(numbers.of(run, key)) for key in (
                    'reward', 'kl', 'accuracy', 'confidence', 'ece')),
                plain(numbers.of(run, 'ece', scaling='temperature'))])
    return rows


def known_tests(numbers):
    return difference_table({
        f'{name}, {METHODS[method]}: unknown - known facts':
        numbers.of(f'{method}-unknown', key) - numbers.of(f'{method}-known', key)
        for method in ('dpo', 'grpo') for name, key in (('ECE', 'ece'), ('accuracy', 'accuracy'))})


STATED = (('stated', 'SFT with random stated confidences', 'qa.stated'),
          ('rlcr', 'RLCR', 'qa.stated'), ('rlcr', 'RLCR', 'qa.answer_span'),
          ('brier', 'Brier loss', 'qa'))


def stated_table(numbers, runs=STATED):
    """Claim 13, question 5: a stated confidence that is rewarded, and a Brier loss."""
    rows = [['model', 'confidence', 'accuracy', 'mean confidence', 'ECE', 'Brier', 'AUROC']]
    for run, title, task in runs:
        rows.append([title, 'stated' if task.endswith('stated') else 'probability of the answer', *(
            plain(numbers.of(run, key, task=task)) for key in (
                'accuracy', 'confidence', 'ece', 'brier_top_label', 'auroc'))])
    return rows


def stated_tests(numbers):
    return difference_table({
        f'{name} of RLCR, stated - Brier loss': numbers.of('rlcr', key, task='qa.stated')
        - numbers.of('brier', key, task='qa')
        for name, key in (('ECE', 'ece'), ('Brier', 'brier_top_label'), ('accuracy', 'accuracy'))})


def smoothed_table(numbers):
    """Claim 13, question 6: smoothing 0.1 in SFT, before alignment."""
    rows = [['model', 'accuracy', 'confidence', 'ECE', 'NLL', 'ECE after a temperature']]
    for before, name in (('', ''), ('-smoothed', ' after SFT with smoothing 0.1')):
        for run, title in ({'sft': 'SFT'} | METHODS).items():
            run = 'smoothed' if (run, before) == ('sft', '-smoothed') else (
                run if run == 'sft' else run + before)
            title = 'SFT, smoothing 0.1' if run == 'smoothed' else title + name
            rows.append([title, *(plain(numbers.of(run, key)) for key in (
                'accuracy', 'confidence', 'ece', 'nll')),
                plain(numbers.of(run, 'ece', scaling='temperature'))])
    return rows


def smoothed_tests(numbers):
    return difference_table({
        f'ECE of {title}: smoothing 0.1 in SFT - none': numbers.of(smoothed, 'ece')
        - numbers.of(run, 'ece') for run, title, smoothed in (
            ('sft', 'SFT', 'smoothed'), *((run, title, f'{run}-smoothed')
                                          for run, title in METHODS.items()))})


def written(numbers, run, key, task, scaling='none'):
    return numbers.of(run, key, task=task, epoch='written', scaling=scaling)


def written_table(numbers, key='ece', title='ECE'):
    """Claim 14: a metric of each confidence, before and after one temperature."""
    rows = [['model', *(f'{title}: {name}, {how}' for name in CONFIDENCES.values()
                        for how in SCALINGS.values())]]
    for run, name in WRITERS.items():
        rows.append([name, *(plain(written(numbers, run, key, task, scaling))
                             for task in CONFIDENCES for scaling in SCALINGS)])
    return rows


def written_accuracy(numbers):
    rows = [['model', 'temperature', 'accuracy: greedy answer', 'most frequent of ten samples',
             'the same with one temperature', 'AUROC: probability', 'share of ten samples',
             'P(True)']]
    for run, name in WRITERS.items():
        task = 'plain' if run == 'base' else 'chat'
        rows.append([name, plain(numbers.of(run, 'temperature', task=task, scaling='temperature')),
                     *(plain(written(numbers, run, 'accuracy', *how)) for how in (
                         ('qa',), ('qa.agreement',), ('qa.agreement', 'temperature'))),
                     *(plain(written(numbers, run, 'auroc', task)) for task in CONFIDENCES)])
    return rows


def written_tests(numbers):
    """Claim 14: what SFT, smoothing and alignment do to the ECE of each confidence."""
    named = {}
    for task, name in CONFIDENCES.items():
        ece = {run: written(numbers, run, 'ece', task) for run in WRITERS}
        for run, other in (('sft', 'base'), *((run, 'sft') for run in ('smoothed', *METHODS))):
            named[f'ECE of the {name}: {WRITERS[run]} - {WRITERS[other]}'] = ece[run] - ece[other]
    return difference_table(named)


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


def alignment_figure(numbers, path):
    """Draw PPO's four arms by epoch, ECE against KL and reward, and three groups of bars."""
    figure, axes = panels(2, 3)
    by_epoch, by_kl, by_reward, one_temperature, known, smoothed = axes.flat
    color = {run: f'C{i}' for i, run in enumerate(ARMS | METHODS)}
    for i, (run, title) in enumerate(ARMS.items()):
        x, ece = np.arange(4) + 0.05 * (i - 1.5), numbers.path(run, 'ece')
        by_epoch.plot(x, ece.mean(0), color=color[run], linewidth=1)
        for at, values in zip(x, ece.T, strict=True):
            bars(by_epoch, at, values, color=color[run], label=title)
    for ax, key in ((by_kl, 'kl'), (by_reward, 'reward')):
        for run, title in METHODS.items():
            x, ece = numbers.path(run, key).mean(0), numbers.path(run, 'ece').mean(0)
            ax.plot(x, ece, marker='o', markersize=4, color=color[run], label=title)
            for epoch in (1, 2, 3):
                ax.annotate(str(epoch), (x[epoch], ece[epoch]), (3, 3), fontsize=7,
                            textcoords='offset points')
        ax.plot(x[:1], ece[:1], marker='*', markersize=10, color='black', linestyle='', label='SFT')
    models = ['sft', *METHODS]
    groups = {
        one_temperature: [(models, 'none', 'unscaled', 'black'),
                          (models, 'temperature', 'after a temperature', 'C8')],
        known: [(['dpo-known', 'grpo-known'], 'none', 'known facts', 'C6'),
                (['dpo-unknown', 'grpo-unknown'], 'none', 'unknown facts', 'C7')],
        smoothed: [(models, 'none', 'no smoothing in SFT', 'black'),
                   (['smoothed', *(f'{run}-smoothed' for run in METHODS)], 'none',
                    'smoothing 0.1 in SFT', 'C9')]}
    for ax, pair in groups.items():
        for i, (runs, scaling, label, group_color) in enumerate(pair):
            for x, run in enumerate(runs):
                bars(ax, x + 0.16 * (i - 0.5), numbers.of(run, 'ece', scaling=scaling),
                     color=group_color, label=label)
        names = ['DPO', 'GRPO'] if ax is known else ['SFT', *METHODS.values()]
        ax.set_xticks(range(len(names)), names)
        ax.set_xlim(-0.5, len(names) - 0.5)
    by_epoch.set_xticks(range(4), ['SFT', '1', '2', '3'])
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
    finish(figure, path)


def written_figure(numbers, path):
    """Draw the ECE of the three confidences of all models, before and after one temperature."""
    figure, axes = panels(1, 2)
    figure.set_figwidth(9)
    for ax, (scaling, title) in zip(axes[0], SCALINGS.items(), strict=True):
        for i, (task, name) in enumerate(CONFIDENCES.items()):
            for x, run in enumerate(WRITERS):
                bars(ax, x + 0.14 * (i - 1), written(numbers, run, 'ece', task, scaling),
                     color=f'C{i}', label=name)
        ax.set_xticks(range(len(WRITERS)), [name.replace(', ', ',\n') for name in WRITERS.values()],
                      fontsize=8)
        ax.set_title(title, fontsize=10)
        ax.set(ylabel='ECE')
        ax.grid(axis='y', alpha=0.3)
    low, high = zip(*(ax.get_ylim() for ax in axes[0]), strict=True)
    for ax in axes[0]:
        ax.set_ylim(min(0, *low), max(high))
    finish(figure, path)


# file: (title, tables, figure)
CLAIMS = {
    'alignment': ('Claim 13: calibration after alignment', (
        optimization_table, optimization_tests, changes_table, methods_table, methods_tests,
        known_table, known_tests, temperature_tests, smoothed_table, smoothed_tests, stated_table,
        stated_tests), alignment_figure),
    'written': ('Claim 14: confidence in written answers', (
        written_table, lambda numbers: written_table(numbers, 'brier_top_label', 'Brier'),
        lambda numbers: written_table(numbers, 'confidence', 'mean confidence'),
        written_accuracy, written_tests, restored_table), written_figure)}


def write_numbers(root, folder, sources_of_seed, lines_of):
    """Write seed-<seed>.csv into `folder` for each seed that has finished runs below `root`."""
    sources = [source for seed in alignment.SEEDS for source in sources_of_seed(seed, root)]
    lines = parallel_map(lines_of, sources, worth_it=len(sources) > 4)
    for seed, group in itertools.groupby(itertools.chain(*lines), key=lambda line: line['seed']):
        write_text(folder / f'seed-{seed}.csv', csv_text([*group]))


def main(arguments=None, claims=CLAIMS, results=RESULTS, sources=alignment.sources,
         lines_of=alignment.lines_of, usage=__doc__):
    """Write the numbers, tables and figures of `claims`; closed_form.py calls it with its own."""
    parser = argparse.ArgumentParser(description=usage.split('\n')[0])
    parser.add_argument('--runs', type=os.path.expanduser,
                        help='folder of the study; writes the numbers of its seeds')
    parser.add_argument('--folder', type=os.path.expanduser, default=results,
                        help='of seed-*.csv and of what is written')
    options = parser.parse_args(arguments)
    folder = Path(options.folder)
    folder.mkdir(parents=True, exist_ok=True)
    if options.runs:
        write_numbers(options.runs, folder, sources, lines_of)
    numbers = Numbers(folder)
    for name, (title, tables, draw) in claims.items():
        text = page(numbers, title, tables)
        write_text(folder / f'{name}.md', text)
        draw(numbers, folder / f'{name}.png')
        print(text)


if __name__ == '__main__':
    with cli.one_line_errors():
        main()
