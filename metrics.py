"""Calibration metrics for multiple-choice predictions, in plain numpy, one function per metric.

Those that reports print are here, the others in catalog.py, which belongs beside this file:
`metrics.kde_ece` and `metrics.MEASURES`, the table of all, are read from there. Every metric takes

    probs      float [N, K]   one row per question, each row sums to 1; a question with fewer than
                              K options is padded with zeros on the right
    labels     int [N]        index of the correct option
    n_options  int [N]        where accepted, the number of options of each question; default K

and returns a Python float unless its docstring says otherwise. A metric of the prediction alone
also takes confidences, float [N], as probs, and labels that say whether each prediction is correct,
bool or 0/1 [N]. In the docstrings p_ik is the probability of option k in row i, c_i = max_k p_ik
the confidence, and a_i = 1 if argmax_k p_ik is the label, else 0; of equal options the first is
predicted. |B|, conf(B) = mean c_i and acc(B) = mean a_i are the size and means of a bin B of rows.
Empty bins add nothing. Sums are taken in float64. Binned metrics are biased upward for small N:
report bins and N beside the number (docs/metrics.md).

Ties: float64 probabilities are equal if they agree to 12 decimals, float32 and float16 ones if they
are identical. Metrics that depend on the prediction, on bins or on ties round first, so that noise
of about 1e-16 does not change them. Entropy, nll, brier and bas are continuous and use probs as
given. Tensors of torch are read as arrays.

Invalid input and settings out of range raise ValueError that names the row and the value. A row may
be 1e-4 away from summing to 1 (1e-3 in float16, 8e-3 in bfloat16). Equations (2) to (6) are those
of Huang et al., 'Investigating the Multilingual Calibration Effects of Language Model
Instruction-Tuning', appendix A.
"""

import functools
import importlib
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np

SUM_TOLERANCE = 1e-4    # float32 softmax over ten options is off by about 1e-7
# rounding each probability to 11 or 8 bits moves the sum by up to half of this
SHORT_TOLERANCE = {'float16': 2.0**-10, 'bfloat16': 2.0**-7}
TIE_DECIMALS = 12       # well above the noise of float64 and well below what a model can mean
NLL_FLOOR = np.finfo(np.float64).eps    # 2.2e-16: no row costs more than 36.04 nats

# Metrics of weighted rows: a function below `weighted` takes Rows and returns the function from
# Weights to the metric of R samples, float64 [R], in which row i counts weights.counts[r, i] times.
# What is called, metric(probs, labels), has counts of 1; stats.bootstrap gives those of its draws.

WEIGHTED: dict[Callable, Callable] = {}     # {what is called: the function that takes Rows}


def weighted(prepare):
    """Return the metric(probs, labels, ...) of a function (Rows, ...) -> (weights -> values).

    n_options and scores, if it has them, are those of the Rows.
    """
    signature = inspect.signature(prepare)

    def metric(probs, labels, *settings, **more):
        given = signature.bind(None, *settings, **more).arguments
        rows = Rows(probs, labels, given.get('n_options'), given.get('scores'))
        return float(prepare(rows, *settings, **more)(rows.once())[0])
    functools.update_wrapper(metric, prepare)
    _, *settings = signature.parameters.values()
    both = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            for name in ('probs', 'labels')]
    metric.__signature__ = signature.replace(parameters=[*both, *settings])  # type: ignore
    WEIGHTED[metric] = prepare
    return metric


class Weights:
    """How often each of N rows counts in R samples: counts int [R, N]."""

    def __init__(self, counts):
        self.counts, self.as_float = counts, counts.astype(np.float64)
        self.total = or_nan(counts.sum(1))


class Rows:
    """Predictions as weighted metrics read them, checked: N rows, perhaps with their options."""

    def __init__(self, probs, labels, n_options=None, scores=None):
        self.scores, self.probs = scores, None
        if as_array('probs', probs).ndim == 1:
            self.as_given, self.correct = check_predictions(probs, labels)
        else:
            self.probs, self.labels, self.n_options = check_probs(probs, labels, n_options)
            self.as_given, self.correct = self.probs.max(1), predicted(self.probs) == self.labels
        self.rounded = round_for_ties(self.as_given)
        self.confidence = self.rounded.astype(np.float64)

    def once(self):
        """Return the Weights of one sample with each row once."""
        return Weights(np.ones((1, len(self.correct)), int))

    def options(self):
        """Return probs [N, K], labels [N] and n_options [N]; ValueError if there are none."""
        if self.probs is None:
            check_probs(self.as_given, self.correct)    # which raises it
        return self.probs, self.labels, self.n_options

    @functools.cached_property
    def top(self):
        """The confidence as the only group of SortedRows."""
        return SortedRows([(np.arange(len(self.correct)), self.rounded, self.correct)])

    @functools.cached_property
    def by_option(self):
        """The probabilities of each option, of the rows that have it, as SortedRows."""
        probs, labels, n_options = self.options()
        having = [(k, np.flatnonzero(n_options > k)) for k in range(n_options.max())]
        return SortedRows([(at, round_for_ties(probs[at, k]), labels[at] == k)
                           for k, at in having])


def mean_of(column):
    """Return the function from Weights to the weighted means of a column [N]."""
    column = column.astype(np.float64)
    # no product of matrices: a BLAS library would start threads in each of several processes
    return lambda weights: np.einsum('rn,n->r', weights.as_float, column) / weights.total


def or_nan(n):
    return np.where(n, n, np.nan)


class SortedRows:
    """Groups of rows, each in ascending order of a probability, in one line of M rows.

    groups: [(rows int [m], their probability [m], their outcome bool [m])]; a gap is probability -
    outcome. Bins are functions from Weights to their (size, sum of gaps), [R, groups, bins] each.
    """

    def __init__(self, groups):
        self.first = np.cumsum([0, *(len(rows) for rows, *_ in groups)])    # then M
        order, gaps = [], []
        last_tie = [[0]]
        self.values = []
        for (rows, probability, outcome), start in zip(groups, self.first, strict=False):
            ascending = np.argsort(probability, kind='stable')
            probability = probability[ascending]
            self.values.append(probability)
            order.append(rows[ascending])
            gaps.append(probability.astype(np.float64) - outcome[ascending])
            last_tie.append(start + np.searchsorted(probability, probability, side='right'))
        # tie_ends[i]: the end of the rows that tie with the last of the first i rows
        self.order, self.gaps, self.tie_ends = map(np.concatenate, (order, gaps, last_tie))
        self._weights = None
        self._lock = threading.Lock()
        self._taken = np.empty((0, 0))

    def drawn(self, weights):
        """Return the counts of all rows before row i of the line of sample r, at r M + i, int
        [R M + 1], and its gap times its count, [R M + 1], 0 at the end.
        """
        with self._lock:
            if self._weights is not weights:    # several metrics need them
                shape = len(weights.counts), len(self.order)
                if self._taken.shape != shape:      # new memory would cost as much as the sums
                    self._taken = np.empty(shape, int)
                    self._before, self._gaps = (np.zeros(self._taken.size + 1, x)
                                                for x in (int, float))
                np.take(weights.counts, self.order, axis=1, out=self._taken, mode='clip')
                np.cumsum(self._taken, out=self._before[1:])
                np.multiply(self._taken, self.gaps, out=self._gaps[:-1].reshape(shape))
                self._weights = weights
        return self._before, self._gaps

    def lines(self, weights):
        """Return r M for each sample r, int [R, 1, 1]."""
        return len(self.order) * np.arange(len(weights.counts))[:, None, None]

    def between(self, weights, ends):
        """Return (size, sum of gaps) of the bins that end at `ends` [R, groups, bins]."""
        before, gaps = self.drawn(weights)
        starts = np.empty((*ends.shape[:2], ends.shape[2] + 1), int)
        starts[..., 0], starts[..., 1:] = self.first[:-1], ends
        starts += self.lines(weights)
        flat = starts[..., :-1].ravel()
        sums = np.add.reduceat(gaps, flat)
        sums[:-1][flat[1:] == flat[:-1]] = 0    # reduceat returns the next number for an empty bin
        return np.diff(before[starts]), sums.reshape(ends.shape)

    def first_reaching(self, weights, n):
        """Return how many rows of the line hold the first n [R, groups, bins] draws."""
        lines, (before, _) = self.lines(weights), self.drawn(weights)
        return np.maximum(np.searchsorted(before, (n + before[lines]).ravel()).reshape(n.shape)
                          - lines, 0)

    def equal_width(self, n_bins):
        """Bins by probability, as `equal_width_bins`."""
        ends = np.array([start + np.cumsum(np.bincount(
            equal_width_bins(values, n_bins), minlength=n_bins))
                         for values, start in zip(self.values, self.first, strict=False)])
        return lambda weights: self.between(weights, np.broadcast_to(
            ends, (len(weights.counts), *ends.shape)))

    def equal_mass(self, n_bins, chunk_ends):
        """Bins that end at chunk_ends(number of draws, n_bins) and keep ties together."""
        def sizes(weights):
            lines, (before, _) = self.lines(weights), self.drawn(weights)
            start = before[lines[..., 0] + self.first] - before[lines[..., 0]]
            n = start[:, :-1, None] + chunk_ends(np.diff(start)[..., None], n_bins)
            ends = self.tie_ends[self.first_reaching(weights, n)]
            return self.between(weights, np.maximum(ends, self.first[:-1, None]))
        return sizes

    def fixed_size(self, size):
        """Bins of this size, the last one with the remainder; tied rows may be in two bins."""
        def sizes(weights):
            lines, (before, _) = self.lines(weights), self.drawn(weights)
            total = np.diff(before[lines + [0, len(self.order)]])
            n_bins = np.maximum(total // size, 1)
            m = np.arange(n_bins.max() + 1)
            n = np.where(m < n_bins, m * size, total)       # further bins are empty
            rows = self.first_reaching(weights, n)
            _, gap = self.between(weights, rows[..., 1:])
            # the last row of a bin may be in the next one, too
            beyond = (before[lines + rows] - before[lines] - n) * self.gaps[rows - 1]
            return np.diff(n), gap - np.diff(beyond)
        return sizes


def mean_gap(size, gap):
    """Return sum_B |sum of gaps in B| / sum_B |B|, [R, groups]; nan for a group without rows."""
    return np.abs(gap).sum(-1) / or_nan(size.sum(-1))


def _mean_of_options(errors):
    """Return the mean [R] of errors [R, K] over the options that some row of a sample has."""
    return np.nansum(errors, 1) / or_nan(np.isfinite(errors).sum(1))


@weighted
def accuracy(rows):
    """Return the share of rows whose predicted option is the label, 1/N sum_i a_i."""
    return mean_of(rows.correct)


def wilson_interval(probs, labels, z=1.96) -> tuple[float, float]:
    """Return the Wilson score interval (low, high) of the accuracy, inside [0, 1].

    Wilson 1927: (acc + z^2/2N ± z sqrt(acc (1 - acc)/N + z^2/4N^2)) / (1 + z^2/N), with z in
    (0, 1000]; 1.96 covers 95 %. It has a width even if all rows are right or all are wrong.
    """
    check_range('z', z, '(0, 1000]')
    low, high = wilson_ends(accuracy(probs, labels), len(probs), z)
    return float(low), float(high)


def wilson_ends(mean, n, z):
    """Return the ends, [2, ...], of `wilson_interval` for shares `mean` [...] of n rows."""
    center = mean + z**2 / (2 * n)
    half_width = z * np.sqrt(mean * (1 - mean) / n + z**2 / (4 * n**2))
    ends = np.array([center - half_width, center + half_width]) / (1 + z**2 / n)
    return ends.clip(0, 1)      # they exceed [0, 1] only by rounding


@weighted
def mean_confidence(rows):
    """Return the mean probability of the predicted option, 1/N sum_i c_i, in [1/K, 1]."""
    return mean_of(rows.confidence)


@weighted
def gap(rows):
    """Return mean confidence - accuracy: positive is overconfident, negative underconfident.

    |gap| is the ECE with a single bin and a lower bound of ece, ece_equal_mass, mad and rmsce.
    """
    return mean_of(rows.confidence - rows.correct)


@weighted
def entropy(rows, unit='bits', n_options=None):
    """Return the mean entropy of the rows, -1/N sum_i sum_k p_ik log p_ik, with 0 log 0 = 0.

    unit: 'bits' (as Huang et al.), 'nats', or 'share', the entropy divided by log n_options, in
    [0, 1] and 0 for a row with one option. labels are checked, not used.
    """
    if unit not in ('bits', 'nats', 'share'):
        raise ValueError(f"unit must be 'bits', 'nats' or 'share', not {unit!r}")
    probs, _, n_options = rows.options()
    nats = row_entropy(probs)
    if unit == 'share':
        nats = nats / np.where(n_options > 1, np.log(n_options), 1)
    return mean_of(nats / (np.log(2) if unit == 'bits' else 1))


def row_entropy(probs):
    """Return the entropy of each row in nats, float64 [N]."""
    p = probs.astype(np.float64)
    # subtracted from 0.0, not negated, so that a certain model gets 0 and not -0
    return 0.0 - (p * np.log(np.where(p > 0, p, 1))).sum(1)


@weighted
def nll(rows, *, scores=None):
    """Return the negative log-likelihood in nats, -1/N sum_i log max(p_i,label, 2.2e-16).

    The floor is scikit-learn's. With scores there is none: 1/N sum_i (logsumexp(scores_i) -
    scores_i,label). scores: float [N, K], logits or log-probabilities whose softmax is probs to
    1e-4; -inf for a missing option, never for a label.
    """
    probs, labels, _ = rows.options()
    return mean_of(label_nll(probs, labels, rows.scores))


def label_nll(probs, labels, scores=None):
    """Return the negative log-likelihood of each row's label in nats, float64 [N]; see `nll`."""
    rows = np.arange(len(labels))
    if scores is None:
        return -np.log(np.maximum(probs[rows, labels].astype(np.float64), NLL_FLOOR))
    p = softmax(scores)
    if p.shape != probs.shape:
        raise ValueError(f'scores must be [N, K] like probs, {probs.shape}, not {p.shape}')
    refuse(np.abs(p - probs) > _tolerance(probs), lambda i, k: f'the softmax of scores gives '
           f'option {k} {p[i, k]:.6g}, probs {probs[i, k]:.6g}')
    z = real_array('scores', scores).astype(np.float64)
    refuse(np.isinf(z[rows, labels]), lambda i: f'label {labels[i]} has the score -inf')
    z = z - z.max(1, keepdims=True)
    return np.log(np.exp(z).sum(1)) - z[rows, labels]


@weighted
def brier(rows):
    """Return the Brier score, 1/N sum_i sum_k (p_ik - [k = label_i])^2, in [0, 2].

    Brier 1950, as in lm-evaluation-harness: summed over options, so at K = 2 twice scikit-learn's.
    """
    probs, labels, _ = rows.options()
    is_label = np.arange(probs.shape[1]) == labels[:, None]
    return mean_of(((probs.astype(np.float64) - is_label) ** 2).sum(1))


# Calibration of the prediction, in bins


def bins(probs, labels, n_bins=10) -> dict[str, np.ndarray]:
    """Return the content of a reliability diagram: `n_bins` bins of equal width by confidence.

    Bin m = 1..M holds ((m-1)/M, m/M], bin 1 also 0. Edges have the precision of probs, since a
    float32 0.1 exceeds the float64 one. Returns {'edges': float [M+1], 'count': int [M], and, each
    float [M] and nan where a bin is empty, 'confidence', 'accuracy', and 'low' and 'high', the 95 %
    Wilson interval of accuracy}.
    """
    confidence, correct = top_label(probs, labels)
    count, conf, acc = bin_means(equal_width_bins(confidence, n_bins), n_bins, confidence, correct)
    low, high = wilson_ends(acc, np.maximum(count, 1), 1.96)
    return {'edges': np.arange(n_bins + 1) / n_bins, 'count': count, 'confidence': conf,
            'accuracy': acc, 'low': low, 'high': high}


@weighted
def ece(rows, n_bins=10):
    """Return the expected calibration error, eq. (2): sum_B |B|/N |acc(B) - conf(B)|, in [0, 1].

    Naeini et al. 2015, over the bins of `bins`: 10 as in Zhu et al. 2023, Guo et al. 2017 use 15.
    """
    sizes = rows.top.equal_width(n_bins)
    return lambda weights: mean_gap(*sizes(weights))[:, 0]


def worst_group_ece(probs, labels, groups, n_bins=10, least=100) -> tuple[float, Any]:
    """Return (the largest `ece` of a group, its name), over groups of `least` rows or more.

    groups: [N], such as the subject of each row. Without such a group it is (nan, None). Fewer rows
    have a larger ECE by chance: compare confidences of the same rows, not groups.
    """
    confidence, correct = top_label(probs, labels)
    groups = np.asarray(groups)
    if groups.shape != confidence.shape:
        raise ValueError(f'groups must be [N], N = {len(confidence)}, not of shape {groups.shape}')
    names, index, count = np.unique(groups, return_inverse=True, return_counts=True)
    return max(((ece(confidence[index == i], correct[index == i], n_bins), names[i].item())
                for i in np.flatnonzero(count >= least)), default=(float('nan'), None))


@weighted
def rmsce(rows, bin_size=100):
    """Return the root mean square calibration error, eq. (5): sqrt(sum_B |B|/N (acc - conf)^2).

    Hendrycks et al. 2019. Rows sorted by confidence fill max(1, floor(N / bin_size)) bins; the last
    one also takes the remainder. Tied rows keep the order given, as in the published code.
    """
    check_count('bin_size', bin_size)
    sizes = rows.top.fixed_size(bin_size)

    def error(weights):
        size, gap = (x[:, 0] for x in sizes(weights))
        return np.sqrt((gap**2 / np.maximum(size, 1)).sum(1) / or_nan(size.sum(1)))
    return error


@weighted
def mad(rows, bin_size=100):
    """Return the mean absolute calibration error, eq. (6): sum_B |B|/N |acc(B) - conf(B)|.

    Hendrycks et al. 2019, over the bins of `rmsce`. Always |gap| <= mad <= rmsce.
    """
    check_count('bin_size', bin_size)
    sizes = rows.top.fixed_size(bin_size)
    return lambda weights: mean_gap(*sizes(weights))[:, 0]


# Ranking: the expectation over the orders of tied rows


def auroc(probs, labels) -> float:
    """Return the area under the ROC curve of confidence for correctness, P(c_right > c_wrong).

    Hendrycks & Gimpel 2017. It is nan, undefined, if all rows are right or all are wrong.
    """
    right, count = tied_rows(probs, labels)
    right_above, wrong = np.cumsum(right) - right / 2, count - right
    return float((wrong * right_above).sum() / (right.sum() * wrong.sum() or np.nan))


def tied_rows(probs, labels):
    """Return the numbers of right rows and of rows of each confidence, from the largest down."""
    _, correct, tie_ends = sort_by_confidence(probs, labels)
    return np.diff([np.cumsum(correct)[tie_ends - 1], tie_ends], prepend=0)[:, ::-1]


# Class-wise calibration: acc(B) is the share of rows whose label is k, conf(B) the mean of p_ik


@weighted
def sce(rows, n_bins=15, n_options=None):
    """Return the static calibration error, eq. (3): 1/K sum_k sum_m |B_mk|/N |acc - conf|.

    Nixon et al. 2019; the class-wise ECE of Kull et al. 2019: the mean over options k of the `ece`
    of all N probabilities p_ik, zeros of padding too, which are always right. With n_options,
    option k counts only the rows that have it, and the mean is over the options that some row has.
    """
    sizes = rows.by_option.equal_width(n_bins)
    return lambda weights: _mean_of_options(mean_gap(*sizes(weights)))


@weighted
def ace(rows, n_ranges=15, n_options=None, equal_weights=False):
    """Return the adaptive calibration error, 1/K sum_k sum_r |B_rk|/N |acc(B_rk) - conf(B_rk)|.

    Nixon et al. 2019. The N probabilities p_ik of option k, including zeros, are sorted and cut
    into R = min(n_ranges, N) ranges of equal count, at round(r N / R). Tied ones stay together, in
    the lowest range that holds one. The weight |B_rk|/N is that of the authors' code; equal_weights
    gives each range 1/R, as equation (4) does. n_options is used as in `sce`.
    """
    check_count('n_ranges', n_ranges)
    sizes = rows.by_option.equal_mass(n_ranges, rounded_chunk_ends)

    def error(weights):
        size, gap = sizes(weights)
        if equal_weights:       # of ranges, at most one per row
            n = np.minimum(size.sum(-1), n_ranges)
            return _mean_of_options((np.abs(gap) / np.maximum(size, 1)).sum(-1) / or_nan(n))
        return _mean_of_options(mean_gap(size, gap))
    return error


# Prediction sets


def conformal_sets(probs, labels, n_options=None, *, method='lac', alpha=0.1) -> np.ndarray:
    """Return which options are in each row's conformal prediction set, bool [N, K].

    A set holds the options of nonconformity s <= q_i, with q_i the k-th smallest s of the labels of
    all other rows, k = ceil(N (1 - alpha)), or infinite if k = N. So it holds the label of a new
    row with probability 1 - alpha or more, whatever the model, if rows are exchangeable, and needs
    no calibration set. Over all rows the coverage is k / N except for ties. A set may be empty.

        'lac'   s_ik = 1 - p_ik, Sadinle et al. 2019: the smallest sets on average
        'aps'   s_ik = sum of p_ij over the options j from the most probable one to k; of equal
                options the first comes first. Romano et al. 2020, without their random term
    """
    if method not in ('lac', 'aps'):
        raise ValueError(f"method must be 'lac' or 'aps', not {method!r}")
    check_range('alpha', alpha, '(0, 1)')
    probs, labels, n_options = check_probs(probs, labels, n_options)
    p = probs.astype(np.float64)
    if method == 'lac':
        s = 1 - p
    else:
        order = np.argsort(-round_for_ties(p), axis=1, kind='stable')
        s = np.empty(p.shape)
        np.put_along_axis(s, order, np.take_along_axis(p, order, 1).cumsum(1), 1)
    s = np.where(np.arange(p.shape[1]) < n_options[:, None], round_for_ties(s), np.inf)
    label_score = s[np.arange(len(s)), labels]
    k = int(np.ceil(len(s) * (1 - alpha) - 1e-9))
    low, high = np.append(np.sort(label_score), np.inf)[[k - 1, k]]
    # without a row that is among the k smallest, the k-th smallest is the next
    return (s <= np.where(label_score <= low, high, low)[:, None]) & np.isfinite(s)


def conformal(probs, labels, n_options=None, *, method='lac', alpha=0.1) -> tuple[float, float]:
    """Return (share of sets that hold the label, mean size) of the `conformal_sets`."""
    sets = conformal_sets(probs, labels, n_options, method=method, alpha=alpha)
    return float(sets[np.arange(len(sets)), labels].mean()), float(sets.sum(1).mean())


# The table of metrics


class Measure(NamedTuple):
    """A metric as a row of `PRINTED`; a new metric is a function and a row.

    needs: 'prediction' for function(probs, labels), probs [N, K] or confidences [N]; 'options' for
    the same, but with probs [N, K] alone; 'n_options' and 'scores' also pass these, by name.
    tables: the tables that show it, with bootstrap intervals: 'runs', which a training run prints;
    'results', of one evaluation; 'compare', of several. A report holds every row of `PRINTED`.
    """
    key: str                            # in results.json
    title: str                          # of a column
    function: Callable[..., Any]
    higher_is_better: bool | None       # None: neither is
    needs: str = 'prediction'
    format: str = '.3f'                 # of a cell, for floats too: a mean over groups has no int
    tables: tuple[str, ...] = ('results', 'compare')
    part: str | int | None = None       # of several numbers that the function returns; None: `key`
    is_mean: bool = False               # of a number per row; noise moves other metrics (stats.py)
    interval_from: float = 1            # rows from which an interval holds its level; inf: none
    interval_outcomes: int = 30         # right and wrong rows that it needs, unless is_mean (stats)


ALL_TABLES = ('runs', 'results', 'compare')
_LAC, _APS = partial(conformal, method='lac'), partial(conformal, method='aps')
_NATS, _SHARE = partial(entropy, unit='nats'), partial(entropy, unit='share')
Unlisted = partial(Measure, tables=())      # a row that no table shows
PRINTED = (
    Measure('accuracy', 'accuracy', accuracy, True, tables=ALL_TABLES, is_mean=True),
    Unlisted('accuracy_low', 'accuracy, from', wilson_interval, None, part=0),
    Unlisted('accuracy_high', 'accuracy, to', wilson_interval, None, part=1),
    Measure('confidence', 'confidence', mean_confidence, None, tables=('runs', 'results'),
            is_mean=True),
    Unlisted('gap', 'confidence - accuracy', gap, None, is_mean=True),
    Measure('entropy_bits', 'entropy (bits)', entropy, None, 'options', tables=ALL_TABLES,
            is_mean=True),
    Unlisted('entropy_nats', 'entropy (nats)', _NATS, None, 'options', is_mean=True),
    Unlisted('entropy_share', 'entropy / log K', _SHARE, None, 'n_options', is_mean=True),
    Measure('ece', 'ECE', ece, False, tables=ALL_TABLES),
    # below 10,000 rows, errors of both signs in one bin cancel (docs/metrics.md)
    Measure('rmsce', 'RMSCE', rmsce, False, tables=ALL_TABLES, interval_from=10_000),
    Measure('mad', 'MAD', mad, False, tables=('results',), interval_from=10_000),
    Measure('sce', 'SCE', sce, False, 'n_options', tables=('results',)),
    Measure('ace', 'ACE', ace, False, 'n_options', tables=('results',), interval_outcomes=100),
    Measure('brier', 'Brier', brier, False, 'options', tables=('results',), is_mean=True),
    Measure('nll', 'NLL (nats)', nll, False, 'scores', tables=('results',), is_mean=True),
    Unlisted('ece_15', 'ECE, 15 bins', partial(ece, n_bins=15), False),
    Unlisted('auroc', 'AUROC', auroc, True),
    Unlisted('lac_coverage', 'LAC coverage', _LAC, None, 'n_options', part=0, is_mean=True),
    Unlisted('lac_size', 'LAC size', _LAC, False, 'n_options', part=1, is_mean=True),
    Unlisted('aps_coverage', 'APS coverage', _APS, None, 'n_options', part=0, is_mean=True),
    Unlisted('aps_size', 'APS size', _APS, False, 'n_options', part=1, is_mean=True),
)


class Report(dict):
    """{'n': number of rows, key of a metric: its value}, printed as a table."""

    def __str__(self):
        return '\n'.join(f'{name:24}{value:>12}' if isinstance(value, int) else
                         f'{name:24}{value:12.4f}' for name, value in self.items())


def report(probs, labels, n_options=None, *, scores=None, measures=None) -> Report:
    """Return n and the `measures` that are defined for probs, as numbers that json.dumps accepts.

    measures: by default `MEASURES`, all of the catalogue; scores: those of `nll`.
    """
    measures = __getattr__('MEASURES') if measures is None else measures
    rows = Rows(probs, labels, n_options, scores)
    confidence, correct = rows.as_given, rows.correct
    once = rows.once()
    order = rows.top.order      # sorted once, since sorting sorted rows is fast
    calls = {'prediction': lambda function: function(confidence[order], correct[order])}
    if as_array('probs', probs).ndim == 2:
        calls |= {'options': lambda function: function(probs, labels),
                  'n_options': lambda function: function(probs, labels, n_options=n_options),
                  'scores': lambda function: function(probs, labels, scores=scores)}
    elif scores is not None:
        raise ValueError('scores belong to probs [N, K], not to a confidence [N]')
    chosen = [x for x in measures if x.needs in calls]
    needs = {x.function: x.needs for x in chosen}   # several metrics may be parts of one result

    def value_of(function):
        by_weight = of_rows(function, rows)
        return by_weight(once)[0] if by_weight else calls[needs[function]](function)

    # numpy computes outside of Python's lock; with fewer rows a thread would take longer to start
    with ThreadPoolExecutor(None if len(correct) > 100_000 else 1) as pool:
        results = dict(zip(needs, pool.map(value_of, needs), strict=True))
    values = Report(n=len(correct))
    for x in chosen:
        value, part = results[x.function], x.key if x.part is None else x.part
        if isinstance(value, (dict, tuple)):
            value = value[part]     # type: ignore[index]
        values[x.key] = value if type(value) is int else float(value)
    return values


def of_rows(function, rows):
    """Return a metric of Rows, from weights to values; None if it takes no weights."""
    if isinstance(function, partial):
        prepare = WEIGHTED.get(function.func)
        return prepare and prepare(rows, *function.args, **function.keywords)
    return WEIGHTED[function](rows) if function in WEIGHTED else None


def __getattr__(name):
    """Return what catalog.py has by this name: `metrics.kde_ece`, `metrics.MEASURES`."""
    if name.startswith('__'):       # Python asks for such names
        raise AttributeError(name)
    try:
        catalog = importlib.import_module('.catalog' if __package__ else 'catalog', __package__)
    except ImportError:
        raise AttributeError(f'{name} is not in metrics.py; copy catalog.py as well') from None
    return getattr(catalog, name)


# Predictions and bins, which compare/scaling.py and stats.py use too


def top_label(probs, labels) -> tuple[np.ndarray, np.ndarray]:
    """Return (confidence [N], rounded for ties, and correct, bool [N]) of the predictions."""
    rows = Rows(probs, labels)
    return rows.rounded, rows.correct


def predicted(probs) -> np.ndarray:
    """Return the index of the largest probability of each row, the first of equal ones, int [N]."""
    largest = probs.max(1)
    ties = probs >= np.minimum(round_for_ties(largest) - 10**-TIE_DECIMALS / 2, largest)[:, None]
    return ties.argmax(1)


def round_for_ties(values):
    """Return float64 values rounded to 12 decimals, others as they are; see 'Ties' at the top."""
    return np.round(values, TIE_DECIMALS) if values.dtype == np.float64 else values


def sort_by_confidence(probs, labels):
    """Return (confidence float64 [N], correct bool [N], tie_ends int [M]) by ascending confidence,
    tied rows in the order given. tie_ends: the index after each distinct confidence's last row.
    """
    confidence, correct = top_label(probs, labels)
    order = np.argsort(confidence, kind='stable')
    ordered = confidence[order].astype(np.float64)
    return ordered, correct[order], np.flatnonzero(np.append(ordered[1:] != ordered[:-1], True)) + 1


def equal_width_bins(values, n_bins):
    """Return the bin 0..n_bins-1 of each value: ((m-1)/M, m/M], and 0 in the first."""
    check_count('n_bins', n_bins)
    edges = round_for_ties((np.arange(1, n_bins) / n_bins).astype(values.dtype))
    return np.searchsorted(edges, values, side='left')


def rounded_chunk_ends(n, n_bins):
    """Return the ends of n_bins chunks of n rows, round(r n / n_bins)."""
    return np.round(np.arange(1, n_bins + 1) * (n / n_bins)).astype(int)


def bin_means(index, n_bins, confidence, correct):
    """Return |B|, conf(B) and acc(B), each [n_bins]; the last two are nan where a bin is empty."""
    count = np.bincount(index, minlength=n_bins)
    sums = np.bincount(index, confidence, n_bins), np.bincount(index, correct, n_bins)
    return count, sums[0] / or_nan(count), sums[1] / or_nan(count)


def softmax(scores, temperature=1.0) -> np.ndarray:
    """Return softmax(scores / temperature), float64 [N, K]; a score of -inf gets 0."""
    check_range('temperature', temperature, '(0, inf)')
    scores = real_array('scores', scores)
    if not scores.size or not scores.ndim:
        raise ValueError(f'scores must be [N, K] with N, K >= 1, not of shape {scores.shape}')
    z = scores.astype(np.float64) / temperature
    largest = z.max(-1, keepdims=True)
    refuse(~np.isfinite(largest), lambda *at: f'the largest score is {largest[at]}, not finite')
    z = np.exp(z - largest)
    return z / z.sum(-1, keepdims=True)


# Checks of input, which raise ValueError


def refuse(wrong, message):
    """Raise ValueError with message(*index) for the first row where `wrong` [N] or [N, K] is."""
    if wrong.any():
        index = np.argwhere(wrong)[0]
        raise ValueError(f'row {index[0]}: {message(*index)}')


def as_array(name, values):
    """Return values as an array, also if they are tensors of torch; `name` is for the error."""
    if np.ma.is_masked(values):
        raise ValueError(f'{name} has masked entries, which would count as values: leave them out')
    try:
        return np.asarray(_from_torch(values))
    except (TypeError, RuntimeError) as error:      # such as a sparse tensor
        raise ValueError(f'{name} cannot be read as an array: {error}') from None
    except ValueError:
        raise ValueError(f'{name} has rows of different length; pad the rows of probs with zeros '
                         f'on the right and give n_options') from None


def _from_torch(values):
    """Return a tensor of torch, or a list that holds some, as what numpy reads; others as given."""
    if isinstance(values, (list, tuple)):
        return [*map(_from_torch, values)] if any(
            isinstance(x, (list, tuple)) or hasattr(x, 'detach') for x in values) else values
    if not hasattr(values, 'detach'):
        return values
    values = values.detach().cpu()
    return values.double() if str(values.dtype) == 'torch.bfloat16' else values


def real_array(name, values):
    """Return values as an array of real numbers, in the precision they have up to float64."""
    values = as_array(name, values)
    if values.dtype.kind not in 'biuf' and values.dtype.name != 'bfloat16':
        raise ValueError(f'{name} must be real numbers, not {values.dtype}')
    is_short = values.dtype in (np.float16, np.float32)
    return values if is_short else values.astype(np.float64, copy=False)


def _tolerance(probs):
    """How far a row may be from summing to 1 in the precision that probs were given in."""
    name = str(getattr(probs, 'dtype', 'float64'))      # such as torch.bfloat16
    return SHORT_TOLERANCE.get(name.removeprefix('torch.'), SUM_TOLERANCE)


def _row_integers(name, values, n):
    values = as_array(name, values)
    if values.shape != (n,):
        raise ValueError(f'{name} must be [{n}], one per row, not of shape {values.shape}')
    if not np.issubdtype(values.dtype, np.integer):
        raise ValueError(f'{name} must be integers, not {values.dtype}')
    return values


def check_labels(labels, n, K):
    """Return labels int [n], from 0 to K - 1, as an array."""
    labels = _row_integers('labels', labels, n)
    refuse((labels < 0) | (labels >= K),
           lambda i: f'label {labels[i]} is not one of the options 0 to {K - 1}')
    return labels


def check_probs(probs, labels, n_options=None):
    """Return probs float [N, K], labels int [N] and n_options int [N], by default K, as arrays."""
    tolerance = _tolerance(probs)       # before bfloat16 becomes float64
    probs = real_array('probs', probs)
    if probs.ndim != 2 or probs.size == 0:
        raise ValueError(f'probs must be [N, K] with N, K >= 1, not of shape {probs.shape}')
    n, K = probs.shape
    labels = check_labels(labels, n, K)
    refuse(~(probs >= 0), lambda i, k: f'probability of option {k} is {probs[i, k]}, not 0 or more')
    total = probs.sum(1, dtype=np.float64)
    refuse(np.abs(total - 1) > tolerance,
           lambda i: f'probabilities sum to {total[i]:.6g}, not to 1; divide rounded ones by '
                     f'their sum')
    if n_options is None:
        return probs, labels, np.full(n, K)
    n_options = _row_integers('n_options', n_options, n)
    refuse((n_options < 1) | (n_options > K),
           lambda i: f'n_options is {n_options[i]}, not from 1 to {K}')
    refuse(labels >= n_options,
           lambda i: f'label {labels[i]} points at padding, n_options is {n_options[i]}')
    refuse((np.arange(K) >= n_options[:, None]) & (probs != 0),
           lambda i, k: f'padded option {k} has probability {probs[i, k]}, not 0')
    return probs, labels, n_options


def check_confidence(confidence):
    """Return confidence float [N] in [0, 1] as an array."""
    confidence = real_array('confidence', confidence)
    if confidence.ndim != 1:
        raise ValueError(f'confidence must be [N], not of shape {confidence.shape}')
    refuse(~((confidence >= 0) & (confidence <= 1 + _tolerance(confidence))),
           lambda i: f'confidence is {confidence[i]}, not from 0 to 1')
    return confidence


def check_predictions(confidence, correct):
    """Return confidence float [N] and correct bool [N] as arrays; correct may be 0 and 1."""
    confidence, correct = check_confidence(confidence), as_array('correct', correct)
    if confidence.shape != correct.shape or not len(correct):
        raise ValueError(f'confidence and correct must be [N] with N >= 1, not of shape '
                         f'{confidence.shape} and {correct.shape}')
    if correct.dtype.kind not in 'biuf':
        raise ValueError(f'correct must be bool, or 0 and 1, not {correct.dtype}')
    refuse((correct != 0) & (correct != 1), lambda i: f'correct is {correct[i]}, not 0 or 1; '
           f'one-dimensional probs are confidences, and labels say which are right')
    return confidence, correct.astype(bool)


def check_count(name, value):
    """Raise ValueError unless value is a whole number, 1 or more."""
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 1:
        raise ValueError(f'{name} must be a whole number, 1 or more, not {value!r}')


def check_range(name, value, interval):
    """Raise ValueError unless value is a real number in the interval, such as '(0, 1]'."""
    low, high = map(float, interval[1:-1].split(','))
    real = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not real or not (low < value < high or value == low and interval[0] == '['
                        or value == high and interval[-1] == ']'):
        raise ValueError(f'{name} must be a number in {interval}, not {value!r}')


if __name__ == '__main__':      # so that whoever copies this file needs no command line
    import pathlib
    import runpy
    import sys
    if not pathlib.Path(__file__).with_name('bridges').joinpath('command.py').exists():
        sys.exit('error: the command needs all of nanoCal; in your own code, import metrics')
    sys.argv.insert(1, 'metrics')
    runpy.run_module('bridges.command', run_name='__main__')
