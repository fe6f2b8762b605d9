"""What the printed tables of the multilingual paper say, computed from them without a model.

    python research/papers/multilingual.py --printed

A cell is one language, model and dataset: 42 * 9 = 378 of Global-MMLU and 29 * 9 = 261 of
MMLU-ProX. multilingual_printed.csv has the numbers of tables 2 to 73; they have three decimals, so
differences are counted in exact thousandths. multilingual_claims.csv says which changes are shown,
and between which thousandths a change must be for a claim to hold. The resource classes are those
of Joshi et al. 2020: 4 and 5 high, 3 mid, 0 to 2 low. An interval is Student's for the mean over
the languages of a class, which have the same questions, models and datasets.
"""

import itertools

import numpy as np

from data.benchmarks import BENCHMARKS as TASKS
from runtime import cli
from runtime.ownership import lock
from compare.significance import mean_interval
from research.common import command_line, read_csv
from research.papers.common import FOLDER, write_tables

BENCHMARKS = {task: (title, TASKS[task].languages) for task, title in (
    ('global_mmlu', 'Global-MMLU'), ('mmlu_prox', 'MMLU-ProX'))}
CLASSES = {'high': 'ar cs de en es fa fr hi hu it ja ko nl pl pt ru sr sv tr vi zh'.split(),
           'mid': 'af bn el fil he id lt ms ro th uk ur'.split(),
           'low': 'am ha ig ky mg mr ne ny si sn so sw te wo yo zu'.split()}
MODELS, DATA = ('Gemma2-2B', 'Mistral-7B', 'Llama-3.1-8B'), ('Alpaca', 'OpenHermes', 'Tulu3')
PRINTED = {'accuracy': 'accuracy', 'entropy_bits': 'entropy_bits', 'ece': 'ece',
           'rms_mmlu_repo': 'rms'}       # our name: its column in multilingual_printed.csv
N_OPTIONS = {'global_mmlu': 4, 'mmlu_prox': 10}
N_QUESTIONS = {'global_mmlu': 14_042, 'mmlu_prox': 11_759}


def printed_numbers():
    """Return {(benchmark, language or 'all', model, data, smoothing): {our name: number}}."""
    return {tuple(row[key] for key in ('benchmark', 'language', 'model', 'data', 'smoothing')):
            {ours: float(row[theirs]) for ours, theirs in PRINTED.items()}
            for row in read_csv(FOLDER / 'multilingual_printed.csv')}


def cells(printed, groups, metric, row):
    """Return float [groups, models, datasets], in thousandths; nan where nothing is printed.

    groups: [(benchmark, language or 'all')]; row: 'base', or a smoothing
    """
    return np.round([[[1000 * printed.get(
        (*group, model, *(('base', '') if row == 'base' else (data, row))), {}).get(metric, np.nan)
        for data in DATA] for model in MODELS] for group in groups])


def change(printed, groups, rule):
    """Return float [groups, models, datasets], the change of a number that a rule is about."""
    first, last = (cells(printed, groups, rule['metric'], rule[end]) for end in ('from', 'to'))
    return last - first


def count(x, rule):
    """Return '361 of 378', where the rule holds; '' if a number is not printed."""
    holds = (float(rule['least']) <= x) & (x <= float(rule['most']))
    return '' if np.isnan(x).any() else f'{holds.sum()} of {x.size}'


def tables(printed):
    """Yield (name, title, lines of cells) of every table."""
    groups = {f'{title}{", " * bool(name)}{name}': [
        (task, x) for x in languages if not name or x in CLASSES[name]]
        for task, (title, languages) in BENCHMARKS.items() for name in ('', 'high', 'mid', 'low')}
    rules = {}      # {table: lines of multilingual_claims.csv}
    for rule in read_csv(FOLDER / 'multilingual_claims.csv'):
        rules.setdefault(rule['table'], []).append(rule)
    yield 'printed_classes', ('Printed: mean change by tuning and by smoothing 0.1 and 0.2 '
                              '[95 % interval over the languages]'), [
        ('languages', 'n', *(rule['title'] for rule in rules['classes'])),
        *((name, str(len(members)), *('{:+.3f} [{:+.3f}, {:+.3f}]'.format(*mean_interval(
            change(printed, members, rule).mean((1, 2)) / 1000)) for rule in rules['classes']))
          for name, members in groups.items())]
    shown = {'table 2': [(task, 'all') for task in BENCHMARKS]} | {
        name: members for name, members in groups.items() if not name.endswith(('high', 'mid'))}
    yield 'printed_claims', 'Printed: cells in which a claim holds', [
        ('claim', *shown), *((rule['title'], *(count(change(printed, members, rule), rule)
                                               for members in shown.values()))
                             for rule in rules['claims'])]
    lines = [('model', 'data', 'benchmark', *(rule['title'] for rule in rules['settings']))]
    for (title, _), m, d in itertools.product(BENCHMARKS.values(), range(3), range(3)):
        changes = [(rule, change(printed, groups[title], rule)[:, m, d])
                   for rule in rules['settings']]
        lines.append((MODELS[m], DATA[d], title, *(
            count(x, rule) if rule['least'] else f'{max(0, -x.min()) / 1000:.3f}'
            for rule, x in changes)))
    yield 'printed_settings', ('Printed: languages in which tuning, or smoothing 0.1 or 0.2, '
                               'does what the paper does not claim'), lines
    yield 'printed_shared', ('Printed: mean changes over the languages, their standard errors, and '
                             'in how many of 9 models and datasets they exceed 1.96 of them'), [
        ('benchmark', 'change', 'mean', 'error of t over languages',
         'largest error of shared questions', 'by t', 'by both'),
        *shared_rows(printed, groups, rules['classes'])]
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


def shared_rows(printed, groups, rules):
    """Yield cells: do mean changes stand out from the noise of questions that languages share?

    Student's t over the L languages has the standard error s / sqrt(L). If the same questions were
    drawn anew, all languages would move together, at most by sqrt((v + v') / N) with v and v' the
    variances of a question's number in both models. That of accuracy is a (1 - a). A confidence is
    from 1 / K to 1, an entropy h from 0 to log K, so theirs are at most ((1 - 1 / K) / 2)^2 and
    h (log K - h); that of confidence - accuracy is at most the sum, unless the surer answers are
    wrong more often. The last column takes both errors together.
    """
    for (task, (title, _)), rule in itertools.product(BENCHMARKS.items(), rules):
        L, K, variances = len(groups[title]), N_OPTIONS[task], []
        for row in (rule['from'], rule['to']):
            a, h = (cells(printed, groups[title], key, row) / 1000
                    for key in ('accuracy', 'entropy_bits'))
            variances.append({'accuracy': a * (1 - a), 'entropy_bits': h * (np.log2(K) - h),
                         'ece': a * (1 - a) + ((1 - 1 / K) / 2)**2}[rule['metric']].mean(0))
        x = change(printed, groups[title], rule) / 1000
        by_t = x.std(0, ddof=1) / L**0.5
        by_question = np.sqrt(sum(variances) / N_QUESTIONS[task])
        mean = np.abs(x.mean(0))
        yield (title, rule['title'], f'{x.mean():+.3f}', f'{by_t.mean():.4f}',
               f'{by_question.mean():.4f}', *(f'{(mean > 1.96 * error).sum()} of {mean.size}'
                                              for error in (by_t, np.hypot(by_t, by_question))))


def confidence_range(row, n_options):
    """Return the least and the largest mean confidence that a printed row allows.

    The mean of the top probability p is at least 2^-mean(H), by Jensen, as p >= 2^-H for an entropy
    of H bits, and bounded above by H <= h(p) + (1 - p) log2(K - 1), Fano 1961. By eq. (2) |mean p -
    accuracy| <= ECE. The first end is above the second if accuracy, entropy and ECE cannot be of
    the same predictions. Half a thousandth is allowed for the rounding of each number.
    """
    p, rounding = np.linspace(1 / n_options, 1, 100_001)[:-1], 0.0005
    fano = -p * np.log2(p) - (1 - p) * np.log2((1 - p) / (n_options - 1))   # falls with p
    entropy, gap = row['entropy_bits'], row['ece'] + 2 * rounding
    most = p[np.searchsorted(-fano, -(entropy - rounding), side='right') - 1]
    return (max(2 ** -(entropy + rounding), row['accuracy'] - gap),
            min(float(most), row['accuracy'] + gap))


def _checks(printed, task):
    """Return {check: whether it is so in each row} of one benchmark."""
    single, pooled = ({key[1:]: row for key, row in printed.items()
                       if key[0] == task and (key[1] == 'all') == is_pooled}
                      for is_pooled in (False, True))

    def impossible(rows):
        ranges = (confidence_range(row, N_OPTIONS[task]) for row in rows.values())
        return [low > high for low, high in ranges]

    def differ(metric):
        return [abs(row[metric] - np.mean([of[metric] for (_, *other), of in single.items()
                                           if other == setting])) > 0.001 + 1e-9
                for (_, *setting), row in pooled.items()]

    return {
        'by language: no confidence fits accuracy, entropy, ECE': impossible(single),
        'table 2: no confidence fits accuracy, entropy, ECE': impossible(pooled),
        'table 2: accuracy is not the mean over languages': differ('accuracy'),
        'table 2: entropy is not the mean over languages': differ('entropy_bits'),
        'by language: RMS is below ECE': [row['rms_mmlu_repo'] < row['ece']
                                          for row in single.values()],
        'by language: RMS^2 sqrt(bins of 100) is below ECE': [
            row['rms_mmlu_repo'] ** 2 * (N_QUESTIONS[task] // 100) ** 0.5 < row['ece']
            for row in single.values()]}


def print_tables():
    """Print and write the tables."""
    options = command_line(
        __doc__, printed={'action': 'store_true', 'help': 'of these tables, not of runs'},
        out_dir={'default': 'out/papers/multilingual_printed', 'help': 'default: %(default)s'})
    with cli.one_line_errors(), lock(options.out_dir):
        write_tables(tables(printed_numbers()), options.out_dir, __doc__)
