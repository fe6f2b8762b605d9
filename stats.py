"""Uncertainty of a number: bootstrap, intervals, tests.

probs, labels and n_options are those of metrics.py, and a metric is a function metric(probs,
labels). All functions raise ValueError for input that metrics.py refuses, for counts below 1 and
for levels outside (0, 1). The same seed gives the same numbers.

Rows of one question, as in several languages or orders of its options, are not independent: what is
hard in one is hard in the others. So the unit that is drawn and tested is the question. `questions`
[N] names the question of each row; without it each row is a question of its own.
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

    {key: float64 [n_resamples]} for the metrics `keys` of the table `measures`, metrics.MEASURES by
    default; without keys for every metric with a column in a table of reports and all that are
    fast. Metrics that are not defined for probs are left out.
    `percentile_interval` makes intervals of the values. scores: those of `nll`; columns: {key:
    float [N]}, more metrics that are means of a number per row. n_questions: if given, `questions`
    are numbers below it, and so many are drawn; groups of rows with the same n_questions and seed
    have the same draws.

    A metric below `metrics.weighted` takes how often each row was drawn as its weights; others are
    called once per resample.
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


# From resampled values to intervals and p
#
# Noise in the gaps of bins moves a calibration error up, because the error is convex in the gaps. N
# rows have an error above the population's, and a resample has one above that of the N rows. Of the
# second bias, b = mean(values) - observed, is known. The first is between 0, if the gaps are far
# above the noise, and b / (sqrt(2) - 1) = 2.4 b, if they are all noise. So an interval reaches from
# the percentile interval around observed - BIAS_RANGE * b to that around observed; docs/metrics.md
# says why it is 3.5, and how often such intervals hold the true value.

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
    noise of a bin only if it has both right and wrong rows: a model that is sure and nearly always
    right has none to draw, however large n. By research/study/coverage.py, intervals hold in 0.9 of
    the sets or more from measure.interval_outcomes right and as many wrong questions; those of the
    classes, whose bins are per option, from 10 per option.
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
    number per row, gives the percentile interval; True adds the range of the bias, which for each
    model is from b to BIAS_RANGE * b, since one may be calibrated and the other not. The two-sided
    p is twice the share of resamples on the rarer side of 0, counted as (1 + count) / (1 + R), at
    most 1; with a bias, each side is counted where the interval has its end.
    """
    values = _check_defined(second - first)
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
    shares = _check_level(level)
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


def _check_level(level):
    """Return the shares of values below the two ends of an interval of this level."""
    metrics.check_range('level', level, '(0, 1)')
    return (1 - level) / 2, (1 + level) / 2


def _resampled(value, n, questions, n_resamples, seed):
    """value(rows) of `n_resamples` samples of the questions of n rows, as an array."""
    return _check_defined([value(np.repeat(np.arange(n), count)) for counts in _resample(
        n, n_resamples, seed, questions) for count in counts])


def _check_defined(values):
    missing = np.isnan(values).reshape(len(values), -1).any(1).sum()
    if missing:
        raise ValueError(f'the metric is nan in {missing} of {len(values)} samples of the rows, as '
                         f'auroc is where all are right; take one that is defined, or more rows')
    return np.array(values)


def paired_bootstrap(metric, probs_a, probs_b, labels, *, questions=None, n_resamples=1000,
                     level=0.95, seed=0):
    """Return (b - a, low, high, p) of a metric of two models' predictions for the same questions.

    probs_a and probs_b are [N, K], or confidences [N] if both models are right in the same rows, as
    before and after scaling. Questions are drawn for both at once. low, high and p:
    `difference_test`.
    """
    a, b, labels = map(metrics.as_array, ('a', 'b', 'labels'), (probs_a, probs_b, labels))
    if a.shape != b.shape or len(a) != len(labels):
        raise ValueError(f'both must predict the same rows, not be of shape {a.shape} and '
                         f'{b.shape} for {len(labels)} labels')

    def both(rows):
        return metric(a[rows], labels[rows]), metric(b[rows], labels[rows])

    observed = _check_defined([both(slice(None))])[0]
    values = _resampled(both, len(labels), questions, n_resamples, seed)
    return float(observed[1] - observed[0]), *difference_test(*values.T, observed, level=level)


def share_interval(correct, questions=None, level=0.95) -> tuple[float, float]:
    """Return (low, high): the Wilson interval of the share of true rows, for correct bool [N].

    With `questions` it is that of N' independent rows whose share p has the same variance, N' = p
    (1 - p) N^2 / sum_q (C_q - p N_q)^2, at most N, for questions with N_q rows, C_q of them true
    (Dean & Pagano 2015). If all rows are equal, N' is the number of questions.
    """
    correct = metrics.as_array('correct', correct)
    z = NormalDist().inv_cdf(_check_level(level)[1])
    index, size = question_index(questions, len(correct))
    p = correct.mean()
    if 0 < p < 1:
        spread = (np.bincount(index, correct - p) ** 2).sum()
        size = len(correct) / max(1, spread / (p * (1 - p) * len(correct)))
    center, half_width = p + z**2 / (2 * size), z * math.sqrt(
        p * (1 - p) / size + z**2 / (4 * size**2))
    low, high = np.clip((center + np.array([-half_width, half_width])) / (1 + z**2 / size), 0, 1)
    return float(low), float(high)


def mcnemar(correct_a, correct_b, questions=None) -> tuple[int, int, float]:
    """Return (rows that only a has right, rows that only b has right, two-sided p).

    McNemar 1947, exact: if the models are equally good, what they differ by in a question, d = rows
    that only a has right - rows that only b has right, is as likely as -d. So p = min(1, 2 P(X <=
    the smaller of the sums of the positive and of the negative |d|)), with X the sum of the |d| of
    questions that are drawn with probability 1/2. Without `questions` X is binomial.
    """
    a, b = _check_correct([correct_a, correct_b])
    index, _ = question_index(questions, len(a))
    d = np.bincount(index, a.astype(int) - b).astype(int)
    least, sizes = min(d[d > 0].sum(), -d[d < 0].sum()), np.sort(np.abs(d[d != 0]))
    if len(sizes) and sizes[0] == sizes[-1]:
        n, term, total = len(sizes), 1, 0
        for k in range(least // sizes[0] + 1):
            total, term = total + term, term * (n - k) // (k + 1)   # whole numbers, so exact
        share = total / 2**n
    else:
        p = np.zeros(least + 1)         # P(X = 0 .. least)
        p[0] = 1
        for size in sizes:
            p /= 2
            p[size:] += p[:max(0, len(p) - size)].copy()
        share = p.sum()
    return int((a & ~b).sum()), int((b & ~a).sum()), float(min(1, 2 * share))


def cochran_q(correct, questions=None) -> tuple[float, float]:
    """Return (Q, p): do M models differ in accuracy? correct is bool [M, N], M >= 2.

    Cochran 1950: Q = (M - 1) (M sum_m C_m^2 - S^2) / (M sum_mi r_mi^2 - sum_i R_i^2), with r_mi the
    rows of question i that model m has right, C_m and R_i its sums over questions and over models,
    S that of all. If the models are equally good, each order of the r_mi of a question is as likely
    as any. p is that of chi-square with M - 1 degrees of freedom, an approximation for many
    questions in which the models differ. If there is none, Q is 0 and p is 1.
    """
    correct = _check_correct(correct)
    index, _ = question_index(questions, correct.shape[1])
    right = np.array([np.bincount(index, row) for row in correct])      # [M, questions]
    M, by_model = len(right), right.sum(1)
    spread = M * (right**2).sum() - (right.sum(0)**2).sum()
    q = float((M - 1) * (M * (by_model**2).sum() - right.sum()**2) / spread) if spread else 0.0
    # P(chi-square > q) = [erfc sqrt(q/2) if M is even] + sum_a (q/2)^a e^(-q/2) / Gamma(a + 1)
    # over a < (M - 1) / 2, from 0 if M is odd and from 1/2 if M is even
    half, odd = max(q / 2, 1e-300), (M - 1) % 2
    terms = [math.exp(a * math.log(half) - half - math.lgamma(a + 1))
             for a in np.arange(odd / 2, (M - 1) / 2)]
    return q, min(1.0, odd * math.erfc(math.sqrt(half)) + sum(terms))


def _check_correct(correct):
    correct = metrics.as_array('correct', correct)
    if correct.ndim != 2 or len(correct) < 2 or not correct.size or correct.dtype != bool:
        raise ValueError(f'correct must be bool, [N] for each of two models or more, with N >= 1, '
                         f'not {correct.dtype} of shape {correct.shape}')
    return correct


def corrected_rate(judged, labeled_judged, labels, level=0.95) -> tuple[float, float, float]:
    """Return (rate, low, high): the share of positive rows, of which only a judge's verdicts exist.

    judged: bool [n], its verdicts; labeled_judged, labels: bool [m], its verdicts on rows whose
    labels are known. Rogan and Gladen 1978: with p the share of positive verdicts and q1, q0 the
    judge's sensitivity and specificity, the rate is (p + q0 - 1) / (q0 + q1 - 1), cut to [0, 1].
    The interval is Lang and Reiczigel's (2014), which Lee et al. recommend for judges (2511.21140):
    with z^2 / 2, 1 and 1 more rows of both kinds in p, q0 and q1,

        rate + d -+ z sqrt(v(p) + (1 - rate)^2 v(q0) + rate^2 v(q1)) / (q0 + q1 - 1)

    where v(x) = x (1 - x) / n is the variance of a share of n rows, and d = 2 z^2 (rate v(q1) -
    (1 - rate) v(q0)). All are nan if q0 + q1 <= 1, or without labeled rows of both kinds: such a
    judge says nothing.
    """
    z = NormalDist().inv_cdf(_check_level(level)[1])
    judged, verdicts, labels = (metrics.as_array(name, x).astype(bool) for name, x in (
        ('judged', judged), ('labeled_judged', labeled_judged), ('labels', labels)))
    if verdicts.shape != labels.shape:
        raise ValueError(f'labeled_judged and labels must be of the same rows, not of shape '
                         f'{verdicts.shape} and {labels.shape}')
    hits = [(judged, z**2 / 2), (~verdicts[~labels], 1), (verdicts[labels], 1)]
    if not all(len(x) for x, _ in hits):
        return math.nan, math.nan, math.nan
    p, q0, q1 = (x.mean() for x, _ in hits)
    sizes = [len(x) + 2 * more for x, more in hits]
    near_p, near_q0, near_q1 = near = [(x.sum() + more) / n for (x, more), n in zip(hits, sizes)]
    better, near_better = q0 + q1 - 1, near_q0 + near_q1 - 1    # than chance
    if min(better, near_better) <= 0:
        return math.nan, math.nan, math.nan
    v_p, v_q0, v_q1 = (x * (1 - x) / n for x, n in zip(near, sizes))
    rate = (near_p + near_q0 - 1) / near_better
    center = rate + 2 * z**2 * (rate * v_q1 - (1 - rate) * v_q0)
    half_width = z * math.sqrt(v_p + (1 - rate)**2 * v_q0 + rate**2 * v_q1) / near_better
    ends = np.clip([(p + q0 - 1) / better, center - half_width, center + half_width], 0, 1)
    return float(ends[0]), float(ends[1]), float(ends[2])


def holm(p_values) -> np.ndarray:
    """Return p-values corrected for their number, float [M], in the order given.

    Holm 1979: the k-th smallest of M is multiplied by M - k + 1, and none is below a smaller one's.
    If those below 0.05 are rejected, the probability of any false rejection is at most 5 %, however
    the tests depend on each other.
    """
    p = np.asarray(p_values, np.float64)
    metrics.refuse(~((p >= 0) & (p <= 1)), lambda i: f'p is {p[i]}, not from 0 to 1')
    order = np.argsort(p, kind='stable')
    corrected = np.empty(len(p))
    corrected[order] = np.minimum(1, np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)))
    return corrected


def consistency_test(probs, labels, metric=metrics.ece, *, n_resamples=1000,
                     seed=0) -> dict[str, float]:
    """Compare a metric with its values for a perfectly calibrated model of the same probs.

    Consistency resampling, Broecker & Smith 2007, and the test of Vaicenavicius et al. 2019: labels
    are drawn from probs themselves. Returns {'observed', 'expected': the mean under calibration,
    'p95': the 95th percentile, 'p': (1 + number of values >= observed) / (1 + n_resamples)}. A
    calibrated model with 4 options and 100 questions has an expected ECE of 0.088.
    """
    metrics.check_count('n_resamples', n_resamples)
    metrics.top_label(probs, labels)    # for its checks
    observed, random = metric(probs, labels), np.random.default_rng(seed)
    probs = metrics.as_array('probs', probs)
    if probs.ndim == 1:
        drawn = (random.random(probs.shape) < probs for _ in range(n_resamples))
    else:
        cumulative = np.cumsum(probs, 1, dtype=np.float64)
        cumulative /= cumulative[:, -1:]
        # an option of probability 0 is never drawn: its cumulative value is that of the one before
        drawn = ((cumulative <= random.random((len(probs), 1))).sum(1) for _ in range(n_resamples))
    values = np.array([metric(probs, labels) for labels in drawn])
    _check_defined([observed, *values])
    return {'observed': float(observed), 'expected': float(values.mean()),
            'p95': float(np.quantile(values, 0.95)),
            'p': float((1 + (values >= observed - 1e-12).sum()) / (1 + n_resamples))}


# Student's t


def student_t(differences) -> tuple[float, float, float]:
    """Return (mean, t, two-sided p) of paired differences float [N], N >= 2, against a mean of 0.

    Student 1908: t = mean / (s / sqrt(N)), with N - 1 degrees of freedom. One difference per group,
    such as a seed. If all are equal, t is infinite and p is 0; if all are 0, t is nan and p is 1.
    """
    mean, error, freedom = _mean_and_error('differences', differences)
    t = mean / error if error else math.copysign(np.inf, mean) if mean else np.nan
    return float(mean), float(t), 1.0 if np.isnan(t) else _t_tails(t, freedom)


def mean_interval(values, level=0.95) -> tuple[float, float, float]:
    """Return (mean, low, high): Student's interval for the mean of values float [N], N >= 2.

    mean -+ q s / sqrt(N), q the quantile of t with N - 1 degrees of freedom. One value per seed.
    """
    _check_level(level)
    mean, error, freedom = _mean_and_error('values', values)
    low, high = 1e-15, 1e15
    for _ in range(80):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if _t_tails(middle, freedom) > 1 - level else (low, middle)
    return float(mean), float(mean - high * error), float(mean + high * error)


def _mean_and_error(name, values):
    """Return the mean of values [N], its standard error, and the degrees of freedom, N - 1."""
    x = metrics.real_array(name, values).astype(np.float64)
    if x.ndim != 1 or len(x) < 2 or not np.isfinite(x).all():
        raise ValueError(f'{name} must be [N], finite, N >= 2, not of shape {x.shape}: {values!r}')
    return x.mean(), x.std(ddof=1) / np.sqrt(len(x)), len(x) - 1


_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(200)     # Gauss quadrature on [-1, 1]


def _t_tails(t, freedom):
    """P(|T| >= |t|): the regularized beta function I_w(freedom / 2, 1 / 2), w = freedom / (freedom
    + t^2). With sin^2 as the variable its integrand is cos^(freedom - 1), which is smooth."""
    # beyond 40 of its standard deviations the integrand is 0 and needs no nodes
    end = min(np.pi / 2, 40 / np.sqrt(freedom))

    def area(low):
        width = (end - low) / 2
        return width * (np.cos(low + width * (_NODES + 1)) ** (freedom - 1) * _WEIGHTS).sum()
    return float(area(min(np.arctan(abs(t) / np.sqrt(freedom)), end)) / area(0))
