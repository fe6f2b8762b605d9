"""Uncertainty of a number: bootstrap, intervals, tests.

probs, labels and n_options are those of metrics.py, and a metric is a function metric(probs,
labels). All functions raise ValueError for input that metrics.py refuses, for counts below 1 and
for levels outside (0, 1). The same seed gives the same numbers.
"""

import functools
import math
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING or not __package__:
    import metrics              # in the clone, at the top level
else:
    from . import metrics       # installed, as nanocal.stats

# The bootstrap of metrics
#
# A resample is a count of how often each row was drawn. Means are sums of a matrix of counts [R, N]
# times per-row terms [N]. A metric in bins needs sums over ranges of the sorted rows, which are
# sorted once, not once per resample.


def bootstrap(probs, labels, n_options=None, *, scores=None, n_resamples=1000,
              seed=0, keys=None, columns=None) -> dict[str, np.ndarray]:
    """Return metrics of `report` on `n_resamples` samples of N rows, drawn with replacement.

    {key: float64 [n_resamples]} for the metrics `keys`, by default for every metric with a column
    in a table and all that are fast. Metrics that are not defined for probs are left out. The
    percentiles 2.5 and 97.5 are the percentile interval of Efron 1979. scores: those of `nll`;
    columns: {key: float [N]}, more metrics that are means of a number per row.

    Sums compute accuracy, confidence, gap, bas, brier_top_label, brier_skill, ece, mce,
    ece_equal_mass, rmsce and mad, and from probs [N, K] also entropy_bits, nll, brier, sce and ace,
    in the time of about 20 * n_resamples * N additions. They are used only if they equal the
    functions in metrics.MEASURES: a new or edited metric is called once per resample instead.
    """
    metrics.check_count('n_resamples', n_resamples)
    columns = {key: x for key, x in (columns or {}).items() if keys is None or key in keys}
    if np.ndim(probs) == 2:
        *_, n_options = metrics.check_probs(probs, labels, n_options)
    chunk = max(1, min(n_resamples, 120_000 // max(1, np.size(labels))))    # in the cache
    sums = _Sums(probs, labels, n_options, scores, chunk, columns)
    fast = sums(np.ones((1, len(labels)), np.int32))
    measures = [x for x in metrics.MEASURES if x.key not in columns
                and (x.key in keys if keys is not None else x.tables or x.key in fast)]
    observed = metrics.report(probs, labels, n_options, scores=scores, measures=measures)
    measures = [x for x in measures if x.key in observed]
    called = [x for x in measures if x.key in _edited(metrics.MEASURES)
              or not _equal(x.key, fast, observed)]
    arrays = [None if x is None else np.asarray(x) for x in (probs, labels, n_options, scores)]
    parts = [sums(counts) | _call_measures(called, counts, *arrays)
             for counts in _resample(len(labels), n_resamples, chunk, seed)]
    return {key: np.concatenate([part[key] for part in parts])
            for key in (*(x.key for x in measures), *columns)}


def _equal(key, fast, report):
    """Whether the sums know a metric and give the value that its function has in a report."""
    return key in fast and np.isclose(fast[key][0], report[key], 1e-9, 1e-9, equal_nan=True)


@functools.cache
def _edited(measures):
    """The keys of `measures` that differ from the sums on 350 rows of 2 to 5 options, with ties,
    over- and underconfident: on few rows another formula may agree by chance."""
    random = np.random.default_rng(0)
    n_options = np.append(5, random.integers(2, 6, 349))
    scores = np.where(np.arange(5) < n_options[:, None], random.integers(-4, 4, (350, 5)), -np.inf)
    labels = np.where(random.random(350) < 0.5, scores.argmax(1), random.integers(0, n_options))
    probs = metrics.softmax(scores)
    report = metrics.report(probs, labels, n_options, scores=scores, measures=measures)
    fast = _Sums(probs, labels, n_options, scores)(np.ones((1, 350), np.int32))
    return {x.key for x in measures if not _equal(x.key, fast, report)}


def _call_measures(measures, counts, *arrays):
    """{key: [R]} of `measures`, called with the rows of each resample."""
    reports = []
    for count in counts if measures else ():
        *drawn, scores = (None if x is None else np.repeat(x, count, 0) for x in arrays)
        reports.append(metrics.report(*drawn, scores=scores, measures=measures))
    return {x.key: np.array([report[x.key] for report in reports]) for x in measures}


def _resample(n, n_resamples, chunk, seed):
    """Yield counts int32 [R, N] of how often each row was drawn, at most `chunk` at a time."""
    random = np.random.default_rng(seed)
    for start in range(0, n_resamples, chunk):
        size = min(chunk, n_resamples - start)
        drawn = random.integers(n, size=(size, n)) + n * np.arange(size)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=size * n).reshape(size, n)
        yield counts.astype(np.int32)


class _Sums:
    """Metrics of resamples by sums: a call with counts int32 [R, N] returns {key: float64 [R]}.

    max_resamples: the largest R. more: {key: float64 [N]}, whose means are returned as well.
    """

    def __init__(self, probs, labels, n_options, scores, max_resamples=1, more=()):
        confidence, correct = metrics.top_label(probs, labels)
        c = confidence.astype(np.float64)
        columns = {'accuracy': correct.astype(np.float64), 'confidence': c,
                   'bas': metrics.row_bas(confidence, correct),
                   'brier_top_label': (c - correct) ** 2}
        self.by_confidence = _SortedGaps(confidence, c - correct, 10)
        self.by_option: list[_SortedGaps] = []
        if np.ndim(probs) == 2:
            probs, labels, _ = metrics.check_probs(probs, labels)
            p = probs.astype(np.float64)
            columns |= {'entropy_bits': metrics.row_entropy(probs) / np.log(2),
                        'nll': metrics.label_nll(probs, labels, scores),
                        'brier': (p**2).sum(1) - 2 * p[np.arange(len(p)), labels] + 1}
            for k in range(n_options.max()):
                has_k, p_k = n_options > k, metrics.round_for_ties(probs[:, k])
                gap = np.where(has_k, p_k.astype(np.float64) - (labels == k), 0)
                # rows without the option sort last; they add 0 to any sum of gaps
                self.by_option.append(_SortedGaps(np.where(has_k, p_k, np.inf), gap, 15))
        columns |= more
        self.columns, self.terms = [*columns], np.stack([*columns.values()])    # [columns, N]
        # allocated once: new memory would cost as much as the sums
        size = max_resamples, len(c) + 1
        self.workspace = np.zeros(size, np.int32), np.zeros(size)

    def __call__(self, counts):
        # no product of matrices: a BLAS library would start threads in each of several processes
        means = np.einsum('rn,cn->cr', counts, self.terms) / counts.shape[1]
        values = dict(zip(self.columns, means, strict=True))
        values['gap'] = values['confidence'] - values['accuracy']
        spread = values['accuracy'] * (1 - values['accuracy'])
        values['brier_skill'] = 1 - values['brier_top_label'] / np.where(spread, spread, np.nan)
        values |= _prediction_metrics(self.by_confidence, counts, self.workspace)
        if self.by_option:
            values |= _option_metrics(self.by_option, counts, self.workspace)
        return values


def _prediction_metrics(rows, counts, workspace):
    """ece, mce, ece_equal_mass, rmsce and mad of each resample."""
    n, (drawn, gaps) = counts.shape[1], rows.draw(counts, workspace)
    in_bin = np.diff(drawn[:, rows.bin_ends], prepend=0)
    gap = np.abs(_sums_between(gaps, rows.bin_ends))
    ends = rows.tied_ends(drawn, metrics.equal_chunk_ends(n, 10))
    values = {'ece': gap.sum(1) / n, 'mce': (gap / np.maximum(in_bin, 1)).max(1),
              'ece_equal_mass': np.abs(_sums_between(gaps, ends)).sum(1) / n}
    # bins of 100 drawn rows, which may split ties
    ends = np.append(np.arange(1, max(1, n // 100)) * 100, n)
    at = _positions(drawn, ends)
    # a row that was drawn several times may be cut: its draws beyond the end count in the next bin
    beyond = (np.take_along_axis(drawn, at, 1) - ends) * rows.gaps[at - 1]
    gap = _sums_between(gaps, at) - np.diff(beyond, axis=1, prepend=0)
    return values | {'rmsce': np.sqrt((gap**2 / np.diff(ends, prepend=0)).sum(1) / n),
                     'mad': np.abs(gap).sum(1) / n}


def _option_metrics(by_option, counts, workspace):
    """sce and ace of each resample: means over the options that some drawn row has."""
    n_rows, sce, ace = np.empty((3, len(by_option), len(counts)))
    for k, rows in enumerate(by_option):
        drawn, gaps = rows.draw(counts, workspace)
        n_rows[k] = drawn[:, rows.n_rows]       # drawn rows that have option k
        ends = rows.tied_ends(drawn, metrics.rounded_chunk_ends(n_rows[k][:, None], 15))
        sce[k], ace[k] = (np.abs(_sums_between(gaps, x)).sum(1) for x in (rows.bin_ends, ends))
    return {name: (total / np.maximum(n_rows, 1)).sum(0) / (n_rows > 0).sum(0)
            for name, total in (('sce', sce), ('ace', ace))}


class _SortedGaps:
    """Rows sorted by a probability [N], with their gaps [N], probability - outcome."""

    def __init__(self, probability, gaps, n_bins):
        self.order = np.argsort(probability, kind='stable')     # int [N], ascending
        self.gaps = gaps[self.order]                            # float64 [N], in that order
        ordered = probability[self.order]
        self.n_rows = np.isfinite(ordered).sum()
        # int [N + 1], the end of the tie that the first i rows end in
        self.tie_end = np.append(0, np.searchsorted(ordered, ordered, side='right'))
        # int [n_bins], the end of each bin of equal width, as a number of rows
        self.bin_ends = np.searchsorted(metrics.equal_width_bins(ordered, n_bins),
                                        np.arange(n_bins), side='right')

    def draw(self, counts, workspace):
        """(draws of the first i rows for i = 0 .. N; draws of each row times its gap, and a column
        of 0), both [R, N + 1]."""
        drawn, gaps = (x[:len(counts)] for x in workspace)
        np.take(counts, self.order, axis=1, out=drawn[:, 1:], mode='clip')
        np.multiply(drawn[:, 1:], self.gaps, out=gaps[:, :-1])
        return np.cumsum(drawn, 1, out=drawn), gaps

    def tied_ends(self, drawn, ends):
        """The number of rows after which each bin ends, [R, M].

        A bin ends after the first `ends` draws, [M] or [R, M], or after the last that ties with it.
        """
        return self.tie_end[_positions(drawn, np.maximum(ends, 1))]


def _sums_between(values, ends):
    """Sums [R, M] of values [R, N + 1], whose last column is 0, over the M ranges that end before
    the ascending `ends`, [M] or [R, M]; the first begins at 0."""
    edges = np.zeros((len(values), ends.shape[-1] + 1), int)
    edges[:, 1:] = ends
    flat = edges + values.shape[1] * np.arange(len(values))[:, None]
    sums = np.add.reduceat(values.ravel(), flat.ravel()).reshape(flat.shape)[:, :-1]
    return np.where(np.diff(edges) > 0, sums, 0)    # reduceat gives an empty range its first value


def _positions(drawn, ends):
    """The number of rows after which `drawn` [R, N + 1] reaches each of ends [M] or [R, M]."""
    # all rows in a line, each raised above the one before it, so that one search does for all
    first = drawn.shape[1] * np.arange(len(drawn))[:, None]
    return np.searchsorted((drawn + first).ravel(), ends + first) - first


# Any metric


def interval(metric, probs, labels, *more, n_resamples=1000, level=0.95, method='percentile',
             seed=0) -> tuple[float, float]:
    """Return (low, high) of metric(probs, labels, *more) by resampling rows.

    method is 'percentile' (Efron 1979) or 'bca', bias-corrected and accelerated (Efron 1987), with
    the acceleration from a jackknife that leaves out one of up to 200 groups of rows. metric is any
    function of rows; more are arrays of N rows, or None. `bootstrap` is far faster for its metrics.
    """
    if method not in ('percentile', 'bca'):
        raise ValueError(f"method must be 'percentile' or 'bca', not {method!r}")
    arrays = [None if x is None else np.asarray(x) for x in (probs, labels, *more)]
    shapes = [x.shape for x in arrays if x is not None]
    if not all(shapes) or len({shape[0] for shape in shapes}) > 1 or not shapes[0][0]:
        raise ValueError(f'every array must have the same N >= 1 rows, not the shapes {shapes}')
    n, random = shapes[0][0], np.random.default_rng(seed)

    def value(rows):
        return metric(*(None if x is None else x[rows] for x in arrays))

    shares = _check_level(level)
    values = _resampled(value, n, n_resamples, random)
    if method == 'bca':
        groups = np.array_split(random.permutation(n), min(n, 200)) if n > 1 else []
        jackknife = [value(np.delete(np.arange(n), group)) for group in groups]
        shares = _bca_shares(shares, values, value(slice(None)), _check_defined(jackknife or [0.0]))
    low, high = np.quantile(values, shares)
    return float(low), float(high)


def _check_level(level):
    """Return the shares of values below the two ends of an interval of this level."""
    metrics.check_range('level', level, '(0, 1)')
    return (1 - level) / 2, (1 + level) / 2


def _resampled(value, n, n_resamples, random):
    """value(rows) of `n_resamples` samples of n rows, drawn with replacement, as an array."""
    metrics.check_count('n_resamples', n_resamples)
    return _check_defined([value(random.integers(n, size=n)) for _ in range(n_resamples)])


def _check_defined(values):
    missing = np.isnan(values).sum()
    if missing:
        raise ValueError(f'the metric is nan in {missing} of {len(values)} samples of the rows, as '
                         f'auroc is where all are right; take one that is defined, or more rows')
    return np.array(values)


def _bca_shares(shares, values, value, jackknife):
    """The shares of the resampled values at which BCa reads its ends; Efron 1987, (2.3)."""
    normal, n_resamples = NormalDist(), len(values)
    below = ((values < value).mean() + (values <= value).mean()) / 2
    bias = normal.inv_cdf(np.clip(below, 0.5 / n_resamples, 1 - 0.5 / n_resamples))
    off = jackknife.mean() - jackknife
    spread = (off**2).sum() ** 1.5
    acceleration = (off**3).sum() / (6 * spread) if spread else 0.0
    z = bias + np.array([normal.inv_cdf(share) for share in shares])
    # beyond the pole of 1 - acceleration * z the formula would swap the ends
    return [normal.cdf(bias + x / max(1 - acceleration * x, 1e-3)) for x in z]


def paired_bootstrap(metric, probs_a, probs_b, labels, *, n_resamples=1000, level=0.95, seed=0):
    """Return (b - a, low, high, p) of a metric of two models' predictions for the same questions.

    probs_a and probs_b are [N, K], or confidences [N] if both models are right in the same rows, as
    before and after scaling. Rows are drawn for both at once. low, high and p: `difference_test`.
    """
    a, b, labels = _check_pair(probs_a, probs_b, labels)

    def difference(rows):
        return metric(b[rows], labels[rows]) - metric(a[rows], labels[rows])

    observed = float(_check_defined([difference(slice(None))])[0])
    values = _resampled(difference, len(labels), n_resamples, np.random.default_rng(seed))
    return observed, *difference_test(values, level)


def difference_test(values, level=0.95) -> tuple[float, float, float]:
    """Return (low, high, p) of a difference from its values on resamples, float [n_resamples].

    (low, high) is the percentile interval. The two-sided p is twice the share of resamples on the
    rarer side of 0, counted as (1 + count) / (1 + n_resamples), at most 1.
    """
    low, high = np.quantile(_check_defined(values), _check_level(level))
    rarer = min((values <= 0).sum(), (values >= 0).sum())
    return float(low), float(high), float(min(1, 2 * (1 + rarer) / (1 + len(values))))


def permutation_test(metric, probs_a, probs_b, labels, *, n_permutations=1000, seed=0):
    """Return (b - a, two-sided p): how often random swaps give a difference at least as large.

    Each row's two predictions are swapped with probability 1/2, Fisher 1935; p is
    (1 + count) / (1 + n_permutations). The input is that of `paired_bootstrap`.
    """
    a, b, labels = _check_pair(probs_a, probs_b, labels)
    metrics.check_count('n_permutations', n_permutations)
    random, swapped = np.random.default_rng(seed), []
    difference = metric(b, labels) - metric(a, labels)
    for _ in range(n_permutations):
        swap = random.random((len(labels), *[1] * (a.ndim - 1))) < 0.5
        swapped.append(metric(np.where(swap, a, b), labels)
                       - metric(np.where(swap, b, a), labels))
    _check_defined([difference, *swapped])
    as_large = (np.abs(swapped) >= abs(difference) - 1e-12).sum()
    return float(difference), float((1 + as_large) / (1 + n_permutations))


def _check_pair(a, b, labels):
    a, b, labels = np.asarray(a), np.asarray(b), np.asarray(labels)
    if a.shape != b.shape or len(a) != len(labels):
        raise ValueError(f'both must predict the same rows, not be of shape {a.shape} and '
                         f'{b.shape} for {len(labels)} labels')
    return a, b, labels


def mcnemar(correct_a, correct_b) -> tuple[int, int, float]:
    """Return (rows that only a has right, rows that only b has right, two-sided p).

    McNemar 1947, exact: if the models are equally good, a row in which they differ is as likely to
    be right in either, so p = min(1, 2 P(X <= the fewer)) with X binomial. Both are bool [N].
    """
    a, b = _check_correct([correct_a, correct_b])
    only_a, only_b = int((a & ~b).sum()), int((b & ~a).sum())
    n, term, total = only_a + only_b, 1, 0
    for k in range(min(only_a, only_b) + 1):
        total, term = total + term, term * (n - k) // (k + 1)       # whole numbers, so exact
    return only_a, only_b, min(1.0, 2 * total / 2**n)


def cochran_q(correct) -> tuple[float, float]:
    """Return (Q, p): do M models differ in accuracy? correct is bool [M, N], M >= 2.

    Cochran 1950: Q = (M - 1) (M sum_m C_m^2 - S^2) / (M S - sum_i R_i^2), with C_m the number of
    rows that model m has right, R_i the number of models that have row i right, S their sum. p is
    that of chi-square with M - 1 degrees of freedom, an approximation for many rows in which the
    models differ. If there is no such row, Q is 0 and p is 1.
    """
    correct = _check_correct(correct)
    M, by_model, by_row = len(correct), correct.sum(1), correct.sum(0)
    total, spread = by_model.sum(), M * by_model.sum() - (by_row**2).sum()
    q = float((M - 1) * (M * (by_model**2).sum() - total**2) / spread) if spread else 0.0
    # P(chi-square > q), from that of 1 or 2 degrees of freedom, two more at a time
    half = q / 2
    p, term, a = (math.exp(-half), math.exp(-half), 1.0) if M % 2 else (
        math.erfc(math.sqrt(half)), math.exp(-half) / math.sqrt(math.pi * half or 1), 0.5)
    while a < (M - 1) / 2:
        term *= half / a
        p, a = p + term, a + 1
    return q, p


def _check_correct(correct):
    correct = np.asarray(correct)
    if correct.ndim != 2 or len(correct) < 2 or not correct.size or correct.dtype != bool:
        raise ValueError(f'correct must be bool, [N] for each of two models or more, with N >= 1, '
                         f'not {correct.dtype} of shape {correct.shape}')
    return correct


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
    probs = np.asarray(probs)
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
    if error == 0:
        return float(mean), float(np.sign(mean) * np.inf if mean else np.nan), 0.0 if mean else 1.0
    return float(mean), float(mean / error), _t_tails(mean / error, freedom)


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
    angle = np.arctan(abs(t) / np.sqrt(freedom))
    # beyond 40 of its standard deviations the integrand is 0 and needs no nodes
    end = min(np.pi / 2, 40 / np.sqrt(freedom))

    def area(low, high):
        u = low + (high - low) * (_NODES + 1) / 2
        return (np.cos(u) ** (freedom - 1) * _WEIGHTS).sum() * (high - low) / 2
    return float(area(min(angle, end), end) / area(0, end))
