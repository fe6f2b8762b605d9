"""Tests and intervals of numbers that reports do not print: of models, seeds and judges.

probs and labels are those of metrics.py, `questions` that of stats.py, and errors are as there.
"""

import math
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING or __package__ != 'nanocal':
    import metrics              # in the clone, at the top level
    import stats
else:
    from . import metrics, stats        # installed, as nanocal.significance


def mcnemar(correct_a, correct_b, questions=None) -> tuple[int, int, float]:
    """Return (rows that only a has right, rows that only b has right, two-sided p).

    McNemar 1947, exact: if the models are equally good, d = rows of a question that only a has
    right - rows that only b has right is as likely as -d. So p = min(1, 2 P(X <= the smaller of the
    sums of the positive and of the negative |d|)), with X the sum of the |d| of questions that are
    drawn with probability 1/2. Without `questions` X is binomial.
    """
    a, b = _check_correct([correct_a, correct_b])
    index, _ = stats.question_index(questions, len(a))
    d = np.bincount(index, a.astype(int) - b).astype(int)
    least, sizes = min(d[d > 0].sum(), -d[d < 0].sum()), np.sort(np.abs(d[d != 0]))
    if len(sizes) and sizes[0] == sizes[-1]:
        n = len(sizes)
        term, total = 1, 0
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
    S that of all. p is that of chi-square with M - 1 degrees of freedom, an approximation for many
    questions in which the models differ. If there is none, Q is 0 and p is 1.
    """
    correct = _check_correct(correct)
    index, _ = stats.question_index(questions, correct.shape[1])
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
    with z^2 / 2, 1 and 1 more rows of both kinds in p, q0 and q1, and v(x) = x (1 - x) / n,

        rate + d -+ z sqrt(v(p) + (1 - rate)^2 v(q0) + rate^2 v(q1)) / (q0 + q1 - 1)
        d = 2 z^2 (rate v(q1) - (1 - rate) v(q0))

    All are nan if q0 + q1 <= 1, or without labeled rows of both kinds: such a judge says nothing.
    """
    z = NormalDist().inv_cdf(stats.check_level(level)[1])
    judged, verdicts, labels = (metrics.as_array(name, x) for name, x in (
        ('judged', judged), ('labeled_judged', labeled_judged), ('labels', labels)))
    for x in judged, verdicts, labels:
        if x.dtype.kind not in 'biuf' or not np.isin(x, (0, 1)).all():
            raise ValueError(f'verdicts and labels must be bool, or 0 and 1, not {x!r:.60}')
    judged, verdicts, labels = (x.astype(bool) for x in (judged, verdicts, labels))
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
    Of those below 0.05, the probability of any false rejection is at most 5 %.
    """
    p = np.asarray(p_values, np.float64)
    if p.ndim != 1:
        raise ValueError(f'p_values must be [M], not of shape {p.shape}')
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
    'p95': the 95th percentile, 'p': (1 + number of values >= observed) / (1 + n_resamples)}.
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
    stats.check_defined([observed, *values])
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
    stats.check_level(level)
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
    + t^2). With sin^2 as the variable its integrand is cos^(freedom - 1), which is smooth.
    """
    # beyond 40 of its standard deviations the integrand is 0 and needs no nodes
    end = min(np.pi / 2, 40 / np.sqrt(freedom))

    def area(low):
        width = (end - low) / 2
        return width * (np.cos(low + width * (_NODES + 1)) ** (freedom - 1) * _WEIGHTS).sum()
    return float(area(min(np.arctan(abs(t) / np.sqrt(freedom)), end)) / area(0))
