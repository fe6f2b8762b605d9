"""How often do the 95 % intervals of calibration errors, and of their differences, hold the truth?

    python research/study/coverage.py            # prints the numbers of docs/metrics.md

The intervals are those of stats.py, from 100 resamples of each of 300 sets of N questions. The
answer to a question with four options is drawn from softmax(z), z ~ 1.5 N(0, 1). Errors are 'too
confident', softmax(x z), or 'changing': that where the true confidence is above 0.6, and softmax(z
/ x) elsewhere. A second model has 0.8 z + 0.6 z' and the same uniform number for the answer. The
true error is that of 500,000 questions, and 0 for a calibrated model.

The next table is of questions in several languages: `share` of the variance of z, z' and the normal
number behind the answer is the question's, the rest the language's. All intervals and tests draw or
compare whole questions, except for the last two, which take rows or languages for independent. The
last table is of few questions with 2, 4 and 10 options and z ~ S N(0, 1); R is the mean number of
right or of wrong ones, whichever is less. In brackets: no interval, by stats.no_interval.
"""

import sys
from pathlib import Path
from statistics import NormalDist

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

import metrics
import stats
from compare import significance
from results.columns import measure_of, title_of
from results.tables import markdown
from runtime.processes import parallel_map
from research.common import command_line

KEYS, PAIR_KEYS = 'ece ece_equal_mass sce ace rmsce mad mce'.split(), ['ece', 'ece_equal_mass']
SIZES, N_SETS, N_RESAMPLES, MANY = (100, 1000, 10_000), 300, 100, 500_000
MODELS = [('calibrated', 0.0, 1.0),          # kind of error, true ECE, x that gives it
          ('too confident', 0.03, 1.127), ('too confident', 0.06, 1.274),
          ('too confident', 0.1, 1.51), ('too confident', 0.2, 2.483),
          ('changing', 0.06, 1.292), ('changing', 0.2, 4.273)]
FEW = [(k, spread, *model) for k in (2, 4, 10) for spread in (0.5, 1.5, 4, 10) for model in (
    ('calibrated', 0.0, 1.0), ('too confident', 0.1, 1.3), ('too unsure', 0.1, 1 / 1.3))]
FEW_KEYS = 'ece ece_equal_mass sce ace brier_skill'.split()
PAIRS = [(MODELS[i], MODELS[j]) for i, j in ((0, 0), (2, 2), (2, 5), (2, 0), (2, 3))]
SHARED = [(50, 2, 1.0), (50, 42, 0.3), (100, 8, 0.0), (100, 8, 0.3), (100, 8, 1.0), (200, 42, 0.1),
          (400, 15, 0.05), (400, 15, 0.16), (400, 15, 0.29)]        # questions, languages, share


def draw(n, seed, *models, k=4, spread=1.5):
    """Return [(probs [n, k], labels [n])] of models (kind of error, x >= 1) of MODELS."""
    random = np.random.default_rng(seed)
    z, other, uniform = random.normal(size=(n, k)), random.normal(size=(n, k)), random.random(n)
    return answers(models, [spread * z, spread * (0.8 * z + 0.6 * other)], uniform)


def draw_shared(n_questions, n_languages, share, seed, *models):
    """Return rows like those of `draw`, question by question, each in every language.

    Each model has scores of its own, 0.8 z + 0.6 z', so that all are equally alike.
    """
    random = np.random.default_rng(seed)

    def mixed(k):
        own = random.normal(size=(n_questions, n_languages, k))
        common = random.normal(size=(n_questions, 1, k))
        return (share**0.5 * common + (1 - share)**0.5 * own).reshape(-1, k)

    z, uniform = mixed(4), np.vectorize(NormalDist().cdf)(mixed(1)[:, 0])
    return answers(models, [1.5 * (0.8 * z + 0.6 * mixed(4)) for _ in models], uniform)


def answers(models, z, uniform):
    """Return the rows of models, whose true probabilities are softmax(z) of each model's z."""
    rows = []
    for (kind, x), scores in zip(models, z, strict=False):
        truth = metrics.softmax(scores)
        labels = np.minimum((truth.cumsum(1) < uniform[:, None]).sum(1), scores.shape[1] - 1)
        factor = np.where((kind == 'changing') & (truth.max(1) < 0.6), 1 / x, x)
        rows.append((metrics.softmax(scores * factor[:, None]), labels))
    return rows


def true_values(kind, error, x, keys, **of_draw):
    rows, = draw(MANY, 2, (kind, x), **of_draw)
    report = metrics.report(*rows, measures=[*map(measure_of, keys)])
    return {x: report[x] if error or x in ('rmsce', 'mad', 'brier_skill') else 0 for x in keys}


def resample(rows, seed, keys, questions=None, n_resamples=N_RESAMPLES):
    return (metrics.report(*rows, measures=[*map(measure_of, keys)]),
            stats.bootstrap(*rows, n_resamples=n_resamples, seed=seed, keys=keys,
                            questions=questions))


def coverage(kind, error, x):
    """Yield a line for each N: how often the intervals of a model hold the true values."""
    truth = true_values(kind, error, x, KEYS)
    for n in SIZES:
        held, ends = [], []
        for seed in range(N_SETS):
            report, values = resample(draw(n, [n, seed], (kind, x))[0], seed, KEYS)
            ends.append([report['ece'], *stats.percentile_interval(values['ece'], report['ece'])])
            held.append([low <= truth[key] <= high for biased, keys in (
                (False, ['ece']), (True, KEYS)) for key in keys for low, high in [
                stats.percentile_interval(values[key], report[key], biased)]])
        ece, low, high = np.mean(ends, 0)
        least = 0, *(measure_of(key).interval_from for key in KEYS)
        yield [kind, f'{error:.2f}', f'{n:,}', f'{ece:.3f}', f'{low:.3f} to {high:.3f}', *(
            f'{share:.2f}' if n >= at else f'({share:.2f})'
            for share, at in zip(np.mean(held, 0), least))]


def difference(first, second):
    """Yield a line for each N: how often the interval of b - a holds the truth, and p is < 0.05."""
    true_a, true_b = (true_values(*model, PAIR_KEYS) for model in (first, second))
    for n in SIZES:
        held = []
        for seed in range(N_SETS):
            (before, drawn), (after, redrawn) = (
                resample(metrics.top_label(*rows), seed, PAIR_KEYS)     # faster without options
                for rows in draw(n, [n, seed], *((kind, x) for kind, _, x in (first, second))))
            held.append([x for key in PAIR_KEYS for low, high, p in [stats.difference_test(
                drawn[key], redrawn[key], (before[key], after[key]))]
                for x in (low <= true_b[key] - true_a[key] <= high, p < 0.05)])
        yield [*(f'{kind}, {error:.2f}' for kind, error, _ in (first, second)), f'{n:,}',
               *(f'{share:.2f}' for share in np.mean(held, 0))]


def shared(n_questions, n_languages, share):
    """Yield a line of a calibrated and a too confident model, and of tests of two equal ones."""
    keys = ['accuracy', 'brier_top_label', 'ece']
    models = ('calibrated', 1.0), ('calibrated', 1.0), ('too confident', 1.51)
    truth, _, ece = (metrics.report(*metrics.top_label(*draw(MANY, 2, model)[0]), measures=[
        *map(measure_of, keys)]) for model in models)
    questions, held, rejected = np.repeat(np.arange(n_questions), n_languages), [], []
    for seed in range(2 * N_SETS):
        rows = [metrics.top_label(*x) for x in draw_shared(
            n_questions, n_languages, share, [n_questions, seed], *models)]
        reports, values = zip(*(resample(x, seed, keys, questions, 200) for x in rows), strict=True)
        correct = [x[1] for x in rows]
        held.append([low <= true <= high for true, (low, high) in (
            (truth['accuracy'], stats.share_interval(correct[0], questions)),
            *((true, stats.percentile_interval(values[i][key], reports[i][key], key == 'ece'))
              for i, key, true in (*((0, key, truth[key]) for key in keys[:2]), (0, 'ece', 0),
                                   (2, 'ece', ece['ece']))))])
        gains = np.subtract(*correct[:2], dtype=int).reshape(n_questions, n_languages).mean(0)
        rejected.append([p < 0.05 for p in (
            *(stats.difference_test(*(values[i][key] for i in (0, 1)), [
                reports[i][key] for i in (0, 1)], key == 'ece')[2] for key in keys),
            significance.mcnemar(*correct[:2], questions)[2],
            significance.cochran_q(correct, questions)[1],
            significance.mcnemar(*correct[:2])[2], significance.student_t(gains)[2])])
    yield [f'{n_questions}', f'{n_languages}', f'{share:.2f}',
           *(f'{x:.3f}' for x in (*np.mean(held, 0), *np.mean(rejected, 0)))]


def few(k, spread, kind, error, x):
    """Yield a line for each small N: how often the intervals of a model hold the true values."""
    truth = true_values(kind, error, x, FEW_KEYS, k=k, spread=spread)
    for n in (20, 50, 100, 200, 400):
        held, rarer = [], []
        for seed in range(N_SETS):
            rows, = draw(n, [n, seed], (kind, x), k=k, spread=spread)
            report, values = resample(rows, seed, FEW_KEYS)
            rarer.append(min(metrics.accuracy(*rows), 1 - metrics.accuracy(*rows)))
            held.append([low <= truth[key] <= high for key in FEW_KEYS for low, high in [
                stats.percentile_interval(values[key], report[key])]])
        reasons = [stats.no_interval(measure_of(key), n, np.mean(rarer), k) for key in FEW_KEYS]
        yield [str(k), str(spread), kind, str(n), f'{n * np.mean(rarer):.0f}', *(
            f'({share:.2f})' if reason else f'{share:.2f}'
            for share, reason in zip(np.mean(held, 0), reasons, strict=True))]


def main():
    command_line(__doc__)
    for function, cases, header in (
            (coverage, MODELS, ['error', 'true ECE', 'N', 'mean ECE', 'mean interval',
                                'without correction', *(title_of(key) for key in KEYS)]),
            (difference, PAIRS, ['first model', 'second model', 'N', *(
                f'{title_of(key)}: {x}' for key in PAIR_KEYS for x in ('held', 'p < 0.05'))]),
            (shared, SHARED, ['questions', 'languages', 'share', *(f'{x}: held' for x in (
                'accuracy, Wilson', 'accuracy', 'Brier', 'ECE of 0', 'ECE of 0.1')), *(
                f'{x}: p < 0.05' for x in (
                    'accuracy', 'Brier', 'ECE', 'McNemar', 'Cochran', 'McNemar over rows',
                    't over languages'))]),
            (few, FEW, ['K', 'S', 'error', 'N', 'R', *(title_of(key) for key in FEW_KEYS)])):
        lines = parallel_map(lambda case, f=function: [*f(*case)], cases, worth_it=True)
        print(markdown([header, *sum(lines, [])]))


if __name__ == '__main__':
    main()
