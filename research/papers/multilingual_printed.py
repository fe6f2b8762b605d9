"""What the printed tables of the multilingual paper say, computed from them without a model.

    python research/papers/multilingual.py --printed

A cell is one language, model and dataset: 42 * 9 = 378 of Global-MMLU and 29 * 9 = 261 of
MMLU-ProX. multilingual_printed.csv has the numbers of tables 2 to 73; they have three decimals, so
differences are counted in exact thousandths. The resource classes are those of Joshi et al. 2020:
4 and 5 high, 3 mid, 0 to 2 low. An interval is Student's for the mean over the languages of a
class. It describes how much languages differ; all have the same questions, models and datasets.
"""

import argparse
import csv
import itertools
from pathlib import Path

import numpy as np

from data.benchmarks import GLOBAL_MMLU, MMLU_PROX
from results import plots
from runtime import cli
from runtime.ownership import claim, lock
from stats import mean_interval

BENCHMARKS = {'global_mmlu': ('Global-MMLU', GLOBAL_MMLU), 'mmlu_prox': ('MMLU-ProX', MMLU_PROX)}
CLASSES = {'high': 'ar cs de en es fa fr hi hu it ja ko nl pl pt ru sr sv tr vi zh'.split(),
           'mid': 'af bn el fil he id lt ms ro th uk ur'.split(),
           'low': 'am ha ig ky mg mr ne ny si sn so sw te wo yo zu'.split()}
MODELS, DATA = ('Gemma2-2B', 'Mistral-7B', 'Llama-3.1-8B'), ('Alpaca', 'OpenHermes', 'Tulu3')
PRINTED = {'accuracy': 'accuracy', 'entropy_bits': 'entropy_bits', 'ece': 'ece',
           'rms_mmlu_repo': 'rms'}       # our name: its column in multilingual_printed.csv
N_OPTIONS = {'global_mmlu': 4, 'mmlu_prox': 10}
N_BINS = {'global_mmlu': 140, 'mmlu_prox': 117}     # of 100 of the 14,042 and 11,759 questions

BASE, PLAIN, SMOOTH, SMOOTHER = range(4)        # the rows of a cell: base, smoothing 0, 0.1, 0.2
# claim, the change it is about: from, to, number; whether it holds, of the change in thousandths
CLAIMS = [
    ('tuning raises ECE (4.1: all languages)', BASE, PLAIN, 'ece', lambda x: x > 0),
    ('tuning lowers entropy (abstract: more confidence)', BASE, PLAIN, 'entropy_bits',
     lambda x: x < 0),
    ('tuning adds at most 0.01 accuracy (abstract: marginal)', BASE, PLAIN, 'accuracy',
     lambda x: x <= 10),
    ('smoothing 0.1 lowers ECE (abstract: all languages)', PLAIN, SMOOTH, 'ece', lambda x: x < 0),
    ('smoothing 0.1 lowers RMS (table 1)', PLAIN, SMOOTH, 'rms_mmlu_repo', lambda x: x < 0),
    ('smoothing 0.1 costs at most 0.005 accuracy (4.2)', PLAIN, SMOOTH, 'accuracy',
     lambda x: x >= -5),
    ('0.2 has less accuracy than 0.1 (4.2: can have)', SMOOTH, SMOOTHER, 'accuracy',
     lambda x: x < 0),
    ('0.2 has less ECE than 0.1', SMOOTH, SMOOTHER, 'ece', lambda x: x < 0),
]


def printed_numbers():
    """Return {(benchmark, language or 'all', model, data, smoothing): {our name: number}}."""
    path = Path(__file__).with_name('multilingual_printed.csv')
    with open(path, newline='', encoding='utf-8') as file:
        return {tuple(row[key] for key in ('benchmark', 'language', 'model', 'data', 'smoothing')):
                {ours: float(row[theirs]) for ours, theirs in PRINTED.items()}
                for row in csv.DictReader(file)}


def cell(printed, task, language, model, data):
    """Return the rows (base, smoothing 0, 0.1, 0.2) in thousandths; table 2 has no 0.2."""
    keys = [('base', ''), *((data, s) for s in ('0.0', '0.1', '0.2'))]
    rows = [printed[task, language, model, *key] for key in keys
            if (task, language, model, *key) in printed]
    return [{key: round(1000 * value) for key, value in row.items()} for row in rows]


def tables(printed):
    """Yield (name, title, lines of cells) of every table."""
    groups = {f'{title}{", " * bool(name)}{name}': [
        (task, x) for x in languages if not name or x in CLASSES[name]]
        for task, (title, languages) in BENCHMARKS.items() for name in ('', 'high', 'mid', 'low')}
    yield 'printed_classes', ('Printed: mean change by tuning and by smoothing 0.1 and 0.2 '
                              '[95 % interval over the languages]'), [
        ('languages', 'n', 'tuning: ECE', 'tuning: accuracy', 'tuning: entropy (bits)',
         '0.1: ECE', '0.1: accuracy', '0.2: ECE', '0.2: accuracy'),
        *((name, str(len(members)), *_changes(printed, members))
          for name, members in groups.items())]
    groups = {'table 2': [(task, 'all') for task in BENCHMARKS]} | {
        name: members for name, members in groups.items() if not name.endswith(('high', 'mid'))}
    yield 'printed_claims', 'Printed: cells in which a claim holds', [
        ('claim', *groups), *((name, *(_count(
            [cell(printed, *group, model, data) for group in members for model in MODELS
             for data in DATA], *rule) for members in groups.values())) for name, *rule in CLAIMS)]
    yield 'printed_settings', ('Printed: languages in which tuning, or smoothing 0.1 or 0.2, '
                               'does what the paper does not claim'), [
        ('model', 'data', 'benchmark', 'tuning: ECE falls', 'tuning: accuracy falls',
         '0.1: ECE rises', '0.1: accuracy falls by > 0.005', '0.1: worst fall',
         '0.2: more ECE than 0.1'),
        *((model, data, title, *_exceptions([cell(printed, task, x, model, data)
                                             for x in languages]))
          for task, (title, languages) in BENCHMARKS.items() for model in MODELS for data in DATA)]
    checks = [_checks(printed, task) for task in BENCHMARKS]
    yield 'printed_checks', 'Printed: do the tables fit together?', [
        ('check', *(title for title, _ in BENCHMARKS.values())),
        *((name, *(f'{sum(column[name])} of {len(column[name])}' for column in checks))
          for name in checks[0])]
    yield 'printed_confidence', 'Printed: English, and what the mean confidence can be', [
        ('benchmark', 'model', 'data', 'accuracy', 'entropy (bits)', 'ECE', 'at least', 'at most'),
        *((title, model, data, *(f'{row[key]:.3f}' for key in ('accuracy', 'entropy_bits', 'ece')),
           *(f'{end:.3f}' for end in confidence_range(row, N_OPTIONS[task])))
          for task, (title, _) in BENCHMARKS.items() for model in MODELS
          for data, s in (('base', ''), *((data, '0.0') for data in DATA))
          for row in [printed[task, 'en', model, data, s]])]


def _changes(printed, members):
    """Return the cells of printed_classes for members = [(benchmark, language), ...]."""
    cells = [cell(printed, *group, model, data) for group in members for model in MODELS
             for data in DATA]
    texts = []
    for before, after, key in ((BASE, PLAIN, 'ece'), (BASE, PLAIN, 'accuracy'),
                               (BASE, PLAIN, 'entropy_bits'), (PLAIN, SMOOTH, 'ece'),
                               (PLAIN, SMOOTH, 'accuracy'), (PLAIN, SMOOTHER, 'ece'),
                               (PLAIN, SMOOTHER, 'accuracy')):
        by_language = change(cells, before, after, key).reshape(len(members), -1).mean(1) / 1000
        texts.append('{:+.3f} [{:+.3f}, {:+.3f}]'.format(*mean_interval(by_language)))
    return texts


def change(cells, before, after, key):
    """Return int [cells], the change of one number in thousandths."""
    return np.array([rows[after][key] - rows[before][key] for rows in cells])


def _count(cells, before, after, key, holds):
    """Return '361 of 378'; '' if the table has no row of that smoothing."""
    if any(len(rows) <= after for rows in cells):
        return ''
    return f'{holds(change(cells, before, after, key)).sum()} of {len(cells)}'


def _exceptions(cells):
    """Return the cells of printed_settings for the languages of one model and dataset."""
    loss = -change(cells, PLAIN, SMOOTH, 'accuracy')
    counts = (change(cells, BASE, PLAIN, 'ece') < 0, change(cells, BASE, PLAIN, 'accuracy') < 0,
              change(cells, PLAIN, SMOOTH, 'ece') > 0, loss > 5,
              change(cells, SMOOTH, SMOOTHER, 'ece') > 0)
    texts = [f'{count.sum()} of {len(cells)}' for count in counts]
    return [*texts[:4], f'{max(0, loss.max()) / 1000:.3f}', texts[4]]


def confidence_range(row, n_options):
    """Return the least and the largest mean confidence that a printed row allows.

    The top probability p of a distribution with entropy H bits is at least 2^-H, so the mean p is
    at least 2^-mean(H) by Jensen; H <= h(p) + (1 - p) log2(K - 1), Fano 1961, bounds it from above.
    By eq. (2) |mean p - accuracy| <= ECE. The first end is above the second for a row whose
    accuracy, entropy and ECE cannot be of the same predictions. Half a thousandth is allowed for
    the rounding of each number.
    """
    p, rounding = np.linspace(1 / n_options, 1, 100_001)[:-1], 0.0005
    fano = -p * np.log2(p) - (1 - p) * np.log2((1 - p) / (n_options - 1))   # falls with p
    entropy, gap = row['entropy_bits'], row['ece'] + 2 * rounding
    most = p[np.searchsorted(-fano, -(entropy - rounding), side='right') - 1]
    return (max(2 ** -(entropy + rounding), row['accuracy'] - gap),
            min(float(most), row['accuracy'] + gap))


def _checks(printed, task):
    """Return {check: whether it is so in each row} of one benchmark."""
    rows = {key: row for key, row in printed.items() if key[0] == task}
    single = [row for key, row in rows.items() if key[1] != 'all']
    pooled = {key[2:]: row for key, row in rows.items() if key[1] == 'all'}
    means = {setting: {key: np.mean([row[key] for k, row in rows.items()
                                     if k[1] != 'all' and k[2:] == setting]) for key in PRINTED}
             for setting in pooled}

    def impossible(row):
        low, high = confidence_range(row, N_OPTIONS[task])
        return low > high

    def differ(key):
        return [abs(pooled[x][key] - means[x][key]) > 0.001 + 1e-9 for x in pooled]

    return {
        'by language: no confidence fits accuracy, entropy, ECE': [*map(impossible, single)],
        'table 2: no confidence fits accuracy, entropy, ECE': [*map(impossible, pooled.values())],
        'table 2: accuracy is not the mean over languages': differ('accuracy'),
        'table 2: entropy is not the mean over languages': differ('entropy_bits'),
        'by language: RMS is below ECE': [row['rms_mmlu_repo'] < row['ece'] for row in single],
        'by language: RMS^2 sqrt(bins of 100) is below ECE':
            [row['rms_mmlu_repo'] ** 2 * N_BINS[task] ** 0.5 < row['ece'] for row in single]}


def draw(printed, path):
    """Draw the ECE of each language: base, tuned and smoothed, means over models and datasets."""
    figure = plots.new_figure(11, 6.4)
    for ax, (task, (title, languages)) in zip(figure.subplots(2, 1), BENCHMARKS.items(),
                                              strict=True):
        def mean(language, i, key, task=task):
            return np.mean([cell(printed, task, language, model, data)[i][key]
                            for model in MODELS for data in DATA]) / 1000

        order = [x for members in CLASSES.values() for x in sorted(
            (x for x in members if x in languages), key=lambda x: -mean(x, 0, 'accuracy'))]
        for i, (label, color) in enumerate((('base', '#777777'), ('tuned', '#c44e52'),
                                            ('tuned, smoothing 0.1', '#4878a8'))):
            ax.plot(order, [mean(x, i, 'ece') for x in order], 'o', color=color, label=label)
        ends = itertools.accumulate(sum(x in languages for x in c) for c in CLASSES.values())
        for name, end in zip(CLASSES, ends, strict=True):
            ax.axvline(end - 0.5, color='black', linewidth=0.6)
            ax.text(end - 0.6, 0.98, name, ha='right', va='top', fontsize=9,
                    transform=ax.get_xaxis_transform())
        ax.set(title=f'{title}, printed numbers', ylabel='mean ECE',
               xlim=(-0.5, len(order) - 0.5), ylim=(0, None))
    ax.set_xlabel('language, by resources and the accuracy of the base models; means over 3 models '
                  'and 3 datasets')
    figure.axes[0].legend(fontsize=9, ncols=3, loc='lower left', frameon=False)
    with plots.warn_on_failure(path):
        claim(path.parent, path.name)
        plots.save_figure(figure, path, 130)


def print_tables():
    """Print and write the tables and the figure."""
    from research.papers.common import write_tables     # which needs torch; nothing above does
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--printed', action='store_true', help=argparse.SUPPRESS)
    parser.add_argument('--out_dir', default='out/papers/multilingual_printed',
                        help='default: %(default)s')
    folder, printed = parser.parse_args().out_dir, printed_numbers()
    with cli.one_line_errors(), lock(folder):
        write_tables(tables(printed), folder, __doc__)
        draw(printed, Path(folder, 'printed.png'))
