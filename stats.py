"""Uncertainty of a number: bootstrap, intervals, tests.

probs, labels and n_options are those of metrics.py, and a metric is a function metric(probs,
labels). All functions raise ValueError for input that metrics.py refuses, for counts below 1 and
for levels outside (0, 1). The same seed gives the same numbers.

Answers to one question, in several languages or orders of its options, are not independent. So the
unit that is drawn and tested is the question. `questions` [N] names that of each row; without it
each row is a question of its own.
"""

import math
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING or not __package__:
    import metrics              # in the clone, at the top level
else:
    from . import metrics       # installed, as nanocal.stats

# The bootstrap of metrics


def bootstrap(probs, labels, n_options=None, *, scores=None, n_resamples=1000, seed=0, keys=None,
              measures=None, columns=None, questions=None,
              n_questions=None) -> dict[str, np.ndarray]:
    """Return metrics of `report` on `n_resamples` samples of questions, drawn with replacement.

    {key: float64 [n_resamples]}, for `percentile_interval`, of the metrics `keys` of the table
    `measures`, metrics.MEASURES by default; without keys of every metric with a column in a table
    of reports and all that are fast. Metrics that are not defined for probs are left out. scores:
    those of `nll`; columns: {key: float [N]}, more metrics that are means of a number per row.
    n_questions: if given, `questions` are numbers below it, and so many are drawn; groups of rows
    with the same n_questions and seed have the same draws. A metric below `metrics.weighted` takes
    how often each row was drawn as its weights; others are called once per resample.
    """
    columns = {key: x for key, x in (columns or {}).items() if keys is None or key in keys}
    rows = metrics.Rows(probs, labels, n_options, scores)
    measures = [x for x in (metrics.MEASURES if measures is None else measures)
                if x.key not in columns and (rows.probs is not None or x.needs == 'prediction')]
    values = {x.key: metrics.of_rows(x.function, rows) for x in measures
              if keys is None or x.key in keys}
    measures = [x for x in measures if (x.key in keys if keys is not None else
                                        x.tables or values[x.key])]
    values = {x.key: values[x.key] for x in measures if values[x.key]} | {
        key: metrics.mean_of(x) for key, x in columns.items()}
    called = [x for x in measures if x.key not in values]
    arrays = (rows.as_given, rows.correct, None) if rows.probs is None else (
        rows.probs, rows.labels, rows.n_options)
    scores = None if scores is None else metrics.as_array('scores', scores)

    parts = []
    for counts in _resample(len(labels), n_resamples, seed, questions, n_questions):
        weights = metrics.Weights(counts)
        parts.append({key: value(weights) for key, value in values.items()})
        reports = []
        for count in counts if called else ():
            *drawn, z = (None if x is None else np.repeat(x, count, 0) for x in (*arrays, scores))
            reports.append(metrics.report(*drawn, scores=z, measures=called) if count.any()
                           else {x.key: np.nan for x in called})
        parts[-1] |= {x.key: np.array([report[x.key] for report in reports]) for x in called}
    return {key: np.concatenate([part[key] for part in parts])
            for key in (*(x.key for x in measures), *columns)}


def question_index(questions, n):
    """Return (the number of each row's question, int [n], from 0; number of questions)."""
    if questions is None:
        return np.arange(n), n
    questions = metrics.as_array('questions', questions)
    if questions.shape != (n,):
        raise ValueError(f'questions must be [{n}], one per row, not of shape {questions.shape}')
    names, index = np.unique(questions, return_inverse=True)
    return index, len(names)


def _resample(n, n_resamples, seed, questions=None, n_questions=None):
    """Yield counts int [R, n] of how often each row was drawn, a few resamples at a time."""
    metrics.check_count('n_resamples', n_resamples)
    if n_questions is None:
        questions, n_questions = question_index(questions, n)
    is_shared = n_questions != n or (questions != np.arange(n)).any()
    random = np.random.default_rng(seed)
    most = max(1, 60_000 // max(n, n_questions))    # arrays of 480 kB stay in the cache
    for start in range(0, n_resamples, most):
        shape = min(most, n_resamples - start), n_questions
        drawn = random.integers(n_questions, size=shape)
        drawn += n_questions * np.arange(shape[0])[:, None]
        counts = np.bincount(drawn.ravel(), minlength=math.prod(shape)).reshape(shape)
        yield counts[:, questions] if is_shared else counts


# From resampled values to intervals and p: noise in the gaps of bins moves a calibration error up.
# Of the bias of a resample, b = mean(values) - observed is known; that of the rows is between 0 and
# b / (sqrt(2) - 1) = 2.4 b. So an interval reaches from the percentile interval around observed -
# BIAS_RANGE * b to that around observed (docs/metrics.md).

BIAS_RANGE = 3.5


def percentile_interval(values, observed, biased=True, level=0.95):
    """Return (low, high) of metrics, from their values [..., n_resamples] on resamples.

    observed: float [...], their values for the rows themselves. biased: bool [...]; False, for the
    mean of a number per row, gives the percentile interval of Efron 1979. True adds the range of
    the bias, as above. A metric that is never negative has no negative end.
    """
    bias = BIAS_RANGE * (np.mean(values, -1) - observed)
    low, high = _ends(values, observed, bias, bias, biased, level)[:2]
    return np.where(np.min(values, -1) >= 0, np.maximum(low, 0), low), high


def no_interval(measure, n, accuracy, n_options=1) -> str:
    """Return why a row of metrics.MEASURES has no interval for n questions; '' if it has one.

    accuracy: that of the questions; n_options: their largest number of options. Resamples show the
    noise of a bin only if it has both right and wrong rows. Intervals hold in 0.9 of the sets of
    research/study/coverage.py from measure.interval_outcomes right and as many wrong questions;
    those of the classes, whose bins are per option, from 10 per option.
    """
    if n < measure.interval_from:
        endless = measure.interval_from == np.inf
        return 'no N is enough' if endless else f'N below {measure.interval_from:,}'
    needed = 0 if measure.is_mean else max(
        measure.interval_outcomes, 10 * n_options if measure.needs == 'n_options' else 0)
    rarer = n * min(accuracy, 1 - accuracy)
    return f'fewer than {needed} right or {needed} wrong' if rarer < needed - 1e-6 else ''


def difference_test(first, second, observed, biased=True, level=0.95) -> tuple[float, float, float]:
    """Return (low, high, p) of second - first, a metric of two models on the same resamples, [R].

    observed: (first, second), the metric of the rows themselves. biased=False, for the mean of a
    number per row, gives the percentile interval; True adds the range of the bias, from b to
    BIAS_RANGE * b for each model, since one may be calibrated and the other not. The two-sided p is
    twice the share of resamples on the rarer side of 0, or of the interval's end with a bias,
    counted as (1 + count) / (1 + R), at most 1.
    """
    values = check_defined(second - first)
    (least, largest), (least_other, largest_other) = (
        sorted((x.mean() - value, BIAS_RANGE * (x.mean() - value)))
        for x, value in zip((second, first), observed[::-1], strict=True))
    low, high, lowest, highest = _ends(values, observed[1] - observed[0], largest - least_other,
                                       least - largest_other,
                                       biased and values.any(), level)  # all 0: equal predictions
    rarer = min((lowest <= 0).sum(), (highest >= 0).sum())
    return float(low), float(high), float(min(1, 2 * (1 + rarer) / (1 + len(values))))


def _ends(values, observed, largest, least, biased, level):
    """Return low, high, and values [..., R] around observed without its largest and least bias."""
    shares = check_level(level)
    shift = np.mean(values, -1) - observed
    lowest, highest = (values - np.where(biased, shift + bias, 0)[..., None]
                       for bias in (np.maximum(largest, 0), np.minimum(least, 0)))
    return (*(np.quantile(x, share, axis=-1) for x, share in zip(
        (lowest, highest), shares, strict=True)), lowest, highest)


# Any metric


def interval(metric, probs, labels, *more, questions=None, n_resamples=1000, level=0.95,
             seed=0) -> tuple[float, float]:
    """Return (low, high), the `percentile_interval` of metric(probs, labels, *more).

    metric is any function of rows; more are arrays of N rows, or None. `bootstrap` is far faster
    for its metrics.
    """
    arrays = [None if x is None else metrics.as_array('an array', x)
              for x in (probs, labels, *more)]
    shapes = [x.shape for x in arrays if x is not None]
    if not all(shapes) or len({shape[0] for shape in shapes}) > 1 or not shapes[0][0]:
        raise ValueError(f'every array must have the same N >= 1 rows, not the shapes {shapes}')

    def value(rows):
        return metric(*(None if x is None else x[rows] for x in arrays))

    values = _resampled(value, shapes[0][0], questions, n_resamples, seed)
    low, high = percentile_interval(values, value(slice(None)), level=level)
    return float(low), float(high)


def check_level(level):
    """Return the shares of values below the two ends of an interval of this level."""
    metrics.check_range('level', level, '(0, 1)')
    return (1 - level) / 2, (1 + level) / 2


def _resampled(value, n, questions, n_resamples, seed):
    """value(rows) of `n_resamples` samples of the questions of n rows, as an array."""
    return check_defined([value(np.repeat(np.arange(n), count)) for counts in _resample(
        n, n_resamples, seed, questions) for count in counts])


def check_defined(values):
    missing = np.isnan(values).reshape(len(values), -1).any(1).sum()
    if missing:
        raise ValueError(f'the metric is nan in {missing} of {len(values)} samples of the rows, as '
                         f'auroc is where all are right; take one that is defined, or more rows')
    return np.array(values)


def paired_bootstrap(metric, probs_a, probs_b, labels, *, questions=None, n_resamples=1000,
                     level=0.95, seed=0):
    """Return (b - a, low, high, p) of a metric of two models' predictions for the same questions.

    probs_a and probs_b are [N, K], or confidences [N] if both models are right in the same rows, as
    before and after scaling. Questions are drawn for both at once; see `difference_test`.
    """
    a, b, labels = map(metrics.as_array, ('a', 'b', 'labels'), (probs_a, probs_b, labels))
    if a.shape != b.shape or len(a) != len(labels):
        raise ValueError(f'both must predict the same rows, not be of shape {a.shape} and '
                         f'{b.shape} for {len(labels)} labels')

    def both(rows):
        return metric(a[rows], labels[rows]), metric(b[rows], labels[rows])

    observed = check_defined([both(slice(None))])[0]
    values = _resampled(both, len(labels), questions, n_resamples, seed)
    return float(observed[1] - observed[0]), *difference_test(*values.T, observed, level=level)


def share_interval(correct, questions=None, level=0.95) -> tuple[float, float]:
    """Return (low, high): the Wilson interval of the share of true rows, for correct bool [N].

    With `questions` it is that of N' independent rows whose share p has the same variance, N' = p
    (1 - p) N^2 / sum_q (C_q - p N_q)^2, at most N, for questions with N_q rows, C_q of them true
    (Dean & Pagano 2015). If all rows are equal, N' is the number of questions.
    """
    _, correct = metrics.check_predictions(np.zeros(np.shape(correct)), correct)
    z = NormalDist().inv_cdf(check_level(level)[1])
    index, size = question_index(questions, len(correct))
    p = correct.mean()
    if 0 < p < 1:
        spread = (np.bincount(index, correct - p) ** 2).sum()
        size = len(correct) / max(1, spread / (p * (1 - p) * len(correct)))
    low, high = metrics.wilson_ends(p, size, z)
    return float(low), float(high)
