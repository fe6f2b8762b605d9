"""By how much smoothing 0.1 lowers the ECE, by vocabulary and size: tables without a figure.

    python research/study/effects.py    # results/effects.md, from the compare.csv files beside it

An effect is the ECE of the tuned model minus that of the model tuned with smoothing 0.1, same
seed. Cells are the mean over five seeds, ± half of its 95 % interval (Student's t); p is of a
paired, two-sided t test, not corrected for the number of tests. A trend is the slope of a
least-squares fit of the effect over the logarithm of the rows or of the hidden size, per seed,
times the whole range. The interaction is how much more the effect changes from 2^9 to 2^18 rows at
hidden size 64 than at 1,024.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from compare.over_seeds import plus_minus
from results.tables import markdown
from runtime.ownership import write_text
from compare.significance import student_t
from research.common import command_line, read_csv
from research.study.claims import Numbers

RESULTS = Path(__file__).parent / 'results'
SIZES, ROWS = (64, 256, 1024), (512, 4_096, 32_768, 262_144)
TASKS = {'next tokens': ('vocabulary', 'clm'), 'questions': ('vocabulary_questions', 'text4'),
         'first tokens of facts': ('vocabulary_questions', 'facts')}
TUNED = {'1 million': 'tuned-tiny-smoothing{}', '6 million': 'tuned-smoothing{}-lr0.0008',
         '34 million': 'tuned-medium-smoothing{}', '210 million': 'tuned-large-smoothing{}'}


def read(figure, task):
    return Numbers(read_csv(RESULTS / figure / 'compare.csv'), {'task': task})


def tested(values):
    return f'{plus_minus(values, "+.3f")}, p {student_t(values)[2]:.1g}'


def vocabulary_ece(task, name):
    """Return the ECE [sizes, rows, seeds] of runs of claim 3, such as 'base-D{}-V{}-cap30.0'."""
    numbers = read(*TASKS[task])
    return np.array([[numbers.of(name.format(D, V), 'ece') for V in ROWS] for D in SIZES])


def vocabulary_table():
    """Return the table of next tokens with the softcap: the effect, and the cost of tuning."""
    tuned, smoothed, base = (np.concatenate((
        vocabulary_ece('next tokens', f'{kind}-D{{}}-V{{}}-cap30.0{smoothing}'),
        vocabulary_ece('next tokens', f'{kind}-unused-D{{}}{smoothing}')[:, :1]), axis=1)
        for kind, smoothing in (('tuned', '-smoothing0.0'), ('tuned', '-smoothing0.1'),
                                ('base', '')))
    yield ['hidden size', *(f'{v:,} rows' for v in ROWS), f'{ROWS[3]:,}, of which 4,096 are pieces',
           f'ECE with smoothing, {ROWS[3]:,} rows']
    for i, size in enumerate(SIZES):
        yield [f'{size}', *(f'{plus_minus(tuned[i, j] - smoothed[i, j], ".3f")} of '
                            f'{(tuned - base)[i, j].mean():.3f}' for j in range(5)),
               f'{smoothed[i, 3].mean():.3f}']


def slope(effect, axis, values):
    """Return the trend [seeds] of `effect` [sizes, rows, seeds] over the logarithms of `values`."""
    means = effect.mean(1 - axis)       # over the other axis
    return np.log2(values[-1] / values[0]) * np.polyfit(np.log2(values), means, 1)[0]


def trend_table():
    yield ['task', 'softcap', 'smallest and largest effect', 'trend with rows',
           'trend with hidden size', 'interaction', 'effect at hidden size 1,024, 512 rows',
           'ECE with smoothing, 262,144 rows: hidden size 64 - 1,024']
    for task, softcap in (*((task, '30.0') for task in TASKS), ('next tokens', 'None')):
        tuned, smoothed = (vocabulary_ece(task, f'tuned-D{{}}-V{{}}-cap{softcap}-smoothing{s}')
                           for s in ('0.0', '0.1'))
        effect = tuned - smoothed
        means = effect.mean(2)
        yield [task, softcap, f'{means.min():.3f}, {means.max():.3f}',
               tested(slope(effect, 1, ROWS)), tested(slope(effect, 0, SIZES)),
               tested(effect[0, 3] - effect[0, 0] - effect[2, 3] + effect[2, 0]),
               tested(effect[2, 0]), tested(smoothed[0, 3] - smoothed[2, 3])]


def size_table():
    """Return the table of the ECE of the tuned model, and of its change by smoothing 0.1."""
    yield ['base model', 'English questions, 4 options in text',
           'questions of all languages and entities', 'first tokens of facts', 'next tokens']
    columns = [read(figure, task) for figure, task in (
        ('size', 'text4'), ('size_all', 'text4'), ('size_all', 'facts'), ('size_all', 'clm'))]
    for weights, name in TUNED.items():
        pairs = [[numbers.of(name.format(s), 'ece') for s in ('0.0', '0.1')] for numbers in columns]
        yield [weights, *(f'{tuned.mean():.3f}, {tested(smoothed - tuned)}'
                          for tuned, smoothed in pairs)]


def page():
    return '\n'.join(f'### {title}\n\n{markdown(list(table))}' for title, table in (
        ('Claim 3, next tokens: reduction of ECE by smoothing 0.1, of the increase by tuning',
         vocabulary_table()),
        ('Claim 3: trends of the effect', trend_table()),
        ('Claim 4: ECE of the tuned model, and its change by smoothing 0.1', size_table())))


if __name__ == '__main__':
    command_line(__doc__)
    write_text(RESULTS / 'effects.md', page())
    print(page())
