"""Calibration metrics for multiple-choice predictions, in plain numpy, one function per metric.

Every metric takes

    probs      float [N, K]   one row per question, each row sums to 1; a question with fewer than
                              K options is padded with zeros on the right
    labels     int [N]        index of the correct option
    n_options  int [N]        where accepted, the number of options of each question; default K

and returns a Python float unless its docstring says otherwise. A metric of the prediction alone
also takes confidences, float [N], as probs, and labels that say whether each prediction is correct,
bool or 0/1 [N]. In the docstrings

    p_ik  probability of option k in row i
    c_i   = max_k p_ik, the confidence
    a_i   = 1 if argmax_k p_ik is the label, else 0; of equal options the first is predicted

and |B|, conf(B) = mean c_i and acc(B) = mean a_i are the size and means of a bin B of rows. Empty
bins add nothing. Sums are taken in float64 whatever the precision of probs. Binned metrics are
biased upward for small N: report bins and N beside the number (docs/metrics.md).

Ties: float64 probabilities are equal if they agree to 12 decimals, float32 and float16 ones if they
are identical. Metrics that depend on the prediction, on bins or on ties round first, so that noise
of about 1e-16 does not change them. Entropy, nll, brier and bas are continuous and use probs as
given. Tensors of torch are read as arrays, wherever they are and with or without gradients.

Invalid input and settings out of range raise ValueError that names the row and the value. A row may
be 1e-4 away from summing to 1 (1e-3 in float16, 8e-3 in bfloat16).

Equations (2) to (6) are numbered as in Huang et al., 'Investigating the Multilingual Calibration
Effects of Language Model Instruction-Tuning', appendix A.
"""

import bisect
import functools
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

# Metrics of weighted rows
#
# A function below `weighted` takes Rows and returns the function from Weights to the metric of R
# samples, float64 [R], in which row i counts weights.counts[r, i] times. What is called is the
# metric of the rows as they are, metric(probs, labels), with counts of 1. stats.bootstrap gives the
# counts of its draws.

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
        self.total = _or_nan(counts.sum(1))


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


def _or_nan(n):
    return np.where(n, n, np.nan)


class SortedRows:
    """Groups of rows, each in ascending order of a probability, in one line of M rows.

    groups: [(rows int [m], their probability [m], their outcome bool [m])]. A gap is probability -
    outcome. The functions return functions from Weights to (size, sum of gaps) of bins, both
    [R, groups, bins].
    """

    def __init__(self, groups):
        self.first = np.cumsum([0, *(len(rows) for rows, *_ in groups)])    # then M
        order, gaps, last_tie, self.values = [], [], [[0]], []
        for (rows, probability, outcome), start in zip(groups, self.first, strict=False):
            ascending = np.argsort(probability, kind='stable')
            probability = probability[ascending]
            self.values.append(probability)
            order.append(rows[ascending])
            gaps.append(probability.astype(np.float64) - outcome[ascending])
            last_tie.append(start + np.searchsorted(probability, probability, side='right'))
        # tie_ends[i]: the end of the rows that tie with the last of the first i rows
        self.order, self.gaps, self.tie_ends = map(np.concatenate, (order, gaps, last_tie))
        self._weights, self._lock, self._taken = None, threading.Lock(), np.empty((0, 0))

    def drawn(self, weights):
        """Return the counts of all rows before row i of the line of sample r, at r M + i, int
        [R M + 1], and its gap times its count, [R M + 1], 0 at the end."""
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


def _mean_gap(size, gap):
    """Return sum_B |sum of gaps in B| / sum_B |B|, [R, groups]; nan for a group without rows."""
    return np.abs(gap).sum(-1) / _or_nan(size.sum(-1))


def _mean_of_options(errors):
    """Return the mean [R] of errors [R, K] over the options that some row of a sample has."""
    return np.nansum(errors, 1) / _or_nan(np.isfinite(errors).sum(1))


@weighted
def accuracy(rows):
    """Return the share of rows whose predicted option is the label, 1/N sum_i a_i."""
    return mean_of(rows.correct)


def wilson_interval(probs, labels, z=1.96) -> tuple[float, float]:
    """Return the Wilson score interval (low, high) of the accuracy; z = 1.96 covers 95 %.

    Wilson 1927: (acc + z^2/2N ± z sqrt(acc (1 - acc)/N + z^2/4N^2)) / (1 + z^2/N), with z in
    (0, 1000]. It stays inside [0, 1] and has a width even if all rows are right or all are wrong.
    """
    check_range('z', z, '(0, 1000]')
    low, high = _wilson(accuracy(probs, labels), len(probs), z)
    return float(low), float(high)


def _wilson(mean, n, z):
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

    unit: 'bits' (log2, as in the tables of Huang et al.), 'nats', or 'share', the entropy divided
    by log n_options, in [0, 1] and 0 for a row with one option. labels are checked, not used.
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

    The floor is the epsilon of float64, as in scikit-learn's log_loss. With scores there is none:
    1/N sum_i (logsumexp(scores_i) - scores_i,label). scores: float [N, K], logits or
    log-probabilities whose softmax is probs to 1e-4; -inf for a missing option, never for a label.
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


@weighted
def brier_top_label(rows):
    """Return the Brier score of the prediction, 1/N sum_i (c_i - a_i)^2, in [0, 1]."""
    return mean_of((rows.confidence - rows.correct) ** 2)


def murphy(probs, labels, n_bins=10) -> dict[str, float]:
    """Return `brier_top_label` and its terms by name.

        brier = reliability - resolution + uncertainty + within_bin
        reliability  sum_B |B|/N (conf(B) - acc(B))^2          how far confidence is off
        resolution   sum_B |B|/N (acc(B) - acc)^2              how well confidence separates rows
        uncertainty  acc (1 - acc)
        within_bin   1/N sum_B sum_i (c_i - conf(B))^2 - 2 (c_i - conf(B)) (a_i - acc(B))

    Murphy 1973, over the bins of `bins`. The last term is WBV - WBC of Stephenson et al. 2008.
    """
    confidence, correct = top_label(probs, labels)
    index = equal_width_bins(confidence, n_bins)
    confidence = confidence.astype(np.float64)
    count, conf, acc = bin_means(index, n_bins, confidence, correct)
    share, mean = count / count.sum(), correct.mean()
    c, a = confidence - conf[index], correct - acc[index]
    return {
        'brier': brier_top_label(probs, labels),
        'reliability': float(np.nansum(share * (conf - acc) ** 2)),
        'resolution': float(np.nansum(share * (acc - mean) ** 2)),
        'uncertainty': float(mean * (1 - mean)),
        'within_bin': float((c**2 - 2 * c * a).mean()),
    }


@weighted
def brier_skill(rows):
    """Return the Brier skill score of the prediction, 1 - brier_top_label / (acc (1 - acc)).

    Murphy 1973: 1 is perfect, 0 as good as the confidence acc in every row; nan if acc is 0 or 1.
    """
    right, error = mean_of(rows.correct), mean_of((rows.confidence - rows.correct) ** 2)

    def skill(weights):
        acc = right(weights)
        return 1 - error(weights) / _or_nan(acc * (1 - acc))
    return skill


def refinement(probs, labels, *, scores=None) -> dict[str, float]:
    """Return the parts of nll and brier by name: what recalibration cannot remove, and the rest.

        nll = nll_refinement + nll_calibration,    brier = brier_refinement + brier_calibration

    Berta et al. 2025 (arXiv 2501.19195). The refinement is the loss after scaling by the
    temperature of least NLL, as in their probmetrics ('temp-scaling', fitted on all rows). So
    nll_refinement is about 1/2N nats too small, and nll_calibration is never negative. An option of
    probability 0 stays at 0, unless it is the label, which then has 2.2e-16, as in `nll`. scores:
    those of `nll`.
    """
    whole = {'nll': nll(probs, labels, scores=scores), 'brier': brier(probs, labels)}
    probs, labels, _ = check_probs(probs, labels)
    is_label = np.arange(probs.shape[1]) == labels[:, None]
    if scores is None:
        p = np.where(is_label, np.maximum(probs.astype(np.float64), NLL_FLOOR), probs)
        scores = np.log(p, out=np.full(p.shape, -np.inf), where=p > 0)
    scores = real_array('scores', scores).astype(np.float64)
    scaled = scores / best_temperature(scores, is_label)
    p = softmax(scaled)
    parts = {'nll': nll(p, labels, scores=scaled), 'brier': brier(p, labels)}
    return {f'{key}_refinement': part for key, part in parts.items()} | {
        f'{key}_calibration': whole[key] - part for key, part in parts.items()}


def kappa(probs, labels) -> float:
    """Return Cohen's kappa of the predicted options and the labels; see `cohen_kappa`."""
    probs, labels, _ = check_probs(probs, labels)
    return cohen_kappa(predicted(probs), labels)


def cohen_kappa(first, second) -> float:
    """Return the agreement of two ratings int [N] beyond chance, (s - e) / (1 - e), at most 1.

    Cohen 1960: s is the share of rows in which they are equal, e that of two raters who draw from
    the same shares at random, sum_k P(first = k) P(second = k). It is nan if e is 1.
    """
    first, second = as_array('first', first), as_array('second', second)
    chance = sum((first == k).mean() * (second == k).mean() for k in np.unique(first))
    return float(((first == second).mean() - chance) / (1 - chance)) if chance < 1 else float('nan')


# Calibration of the prediction, in bins


def bins(probs, labels, n_bins=10) -> dict[str, np.ndarray]:
    """Return the content of a reliability diagram: `n_bins` bins of equal width by confidence.

    Bin m = 1..M holds ((m-1)/M, m/M]; 0 is in bin 1, and a confidence above 1 by rounding in bin M.
    Edges are m/M in the precision of probs, since a float32 0.1 exceeds the float64 one.

    Returns {'edges': float [M+1], 'count': int [M], and, each float [M] and nan where a bin is
    empty, 'confidence', 'accuracy', and 'low' and 'high', the 95 % Wilson interval of accuracy}.
    """
    confidence, correct = top_label(probs, labels)
    count, conf, acc = bin_means(equal_width_bins(confidence, n_bins), n_bins, confidence, correct)
    low, high = _wilson(acc, np.maximum(count, 1), 1.96)
    return {'edges': np.arange(n_bins + 1) / n_bins, 'count': count, 'confidence': conf,
            'accuracy': acc, 'low': low, 'high': high}


@weighted
def ece(rows, n_bins=10):
    """Return the expected calibration error, eq. (2): sum_B |B|/N |acc(B) - conf(B)|, in [0, 1].

    Naeini et al. 2015, over the bins of `bins`. The default of 10 follows Zhu et al. 2023, 'On the
    Calibration of Large Language Models and Alignment'; Guo et al. 2017 use 15.
    """
    sizes = rows.top.equal_width(n_bins)
    return lambda weights: _mean_gap(*sizes(weights))[:, 0]


def mce(probs, labels, n_bins=10) -> float:
    """Return the maximum calibration error, max_B |acc(B) - conf(B)|, over the bins of `bins`.

    Guo et al. 2017. A bin of one row counts as much as any other: see the count of `mce_bin`.
    """
    return mce_bin(probs, labels, n_bins)[0]


def mce_bin(probs, labels, n_bins=10) -> tuple[float, int]:
    """Return (mce, number of rows in its bin), of the lowest such bin if several are equal."""
    table = bins(probs, labels, n_bins)
    gaps = np.abs(table['accuracy'] - table['confidence'])
    at = np.nanargmax(gaps)
    return float(gaps[at]), int(table['count'][at])


def ece_sweep(probs, labels) -> float:
    """Return the ECE with as many equal-mass bins as keep accuracy monotonic in confidence.

    Roelofs et al. 2022: `ece_equal_mass` with the largest n_bins, up to 10,000, that is reached
    before the accuracy decreases from one bin to the next.
    """
    confidence, correct, tie_ends = sort_by_confidence(probs, labels)
    n, last_tie, best = len(correct), np.repeat(tie_ends, np.diff(tie_ends, prepend=0)), 0.0
    sums = np.cumsum([correct, confidence - correct], 1)
    for n_bins in (n, *range(1, min(n, 10_000) + 1)):
        ends = tie_ends if n_bins == n else np.unique(last_tie[equal_chunk_ends(n, n_bins) - 1])
        right, gaps = np.diff(sums[:, ends - 1], prepend=0)
        monotonic = (np.diff(right / np.diff(ends, prepend=0)) >= 0).all()
        if monotonic:
            best = float(np.abs(gaps).sum() / n)
        if monotonic == (n_bins == n):      # monotonic in n bins is monotonic in fewer
            break
    return best


def ece_debiased(probs, labels, n_bins=15) -> float:
    """Return the debiased root mean square calibration error over the bins of `ece_equal_mass`,
    sqrt(max(0, sum_B |B|/N ((acc(B) - conf(B))^2 - acc(B) (1 - acc(B)) / (|B| - 1)))).

    Broecker 2012, Kumar et al. 2019, as in uncertainty-calibration. A bin of one row counts 0.
    """
    count, conf, acc = _chunk_means(*top_label(probs, labels), n_bins, equal_chunk_ends)
    squares = count * ((acc - conf) ** 2 - acc * (1 - acc) / np.maximum(count - 1, 1))
    return float(np.sqrt(max(0.0, squares[count > 1].sum() / count.sum())))


def worst_group_ece(probs, labels, groups, n_bins=10, least=100) -> tuple[float, Any]:
    """Return (the largest `ece` of a group, its name), over groups of `least` rows or more.

    groups: [N], such as the subject of each row. Without such a group it is (nan, None). The fewer
    rows, the larger the ECE by chance: compare confidences of the same rows, not groups.
    """
    confidence, correct = top_label(probs, labels)
    groups = np.asarray(groups)
    if groups.shape != confidence.shape:
        raise ValueError(f'groups must be [N], N = {len(confidence)}, not of shape {groups.shape}')
    names, index, count = np.unique(groups, return_inverse=True, return_counts=True)
    return max(((ece(confidence[index == i], correct[index == i], n_bins), names[i].item())
                for i in np.flatnonzero(count >= least)), default=(float('nan'), None))


@weighted
def ece_equal_mass(rows, n_bins=10):
    """Return the expected calibration error, eq. (2), over bins of equal count.

    Nguyen & O'Connor 2015, Kumar et al. 2019; equal to get_ece_em of uncertainty-calibration and so
    to `ece_10_bin` of HELM. Rows sorted by confidence are cut into min(n_bins, N) bins, the first
    N mod n_bins of them one row longer. Tied rows stay together, in the lowest bin that has one.
    """
    check_count('n_bins', n_bins)
    sizes = rows.top.equal_mass(n_bins, equal_chunk_ends)
    return lambda weights: _mean_gap(*sizes(weights))[:, 0]


@weighted
def rmsce(rows, bin_size=100):
    """Return the root mean square calibration error, eq. (5): sqrt(sum_B |B|/N (acc - conf)^2).

    Hendrycks et al. 2019. Rows sorted by confidence fill max(1, floor(N / bin_size)) bins of
    bin_size rows; the last, most confident bin also takes the remainder. Tied rows keep the order
    given, as in the published code, so the result may depend on it.
    """
    check_count('bin_size', bin_size)
    sizes = rows.top.fixed_size(bin_size)

    def error(weights):
        size, gap = (x[:, 0] for x in sizes(weights))
        return np.sqrt((gap**2 / np.maximum(size, 1)).sum(1) / _or_nan(size.sum(1)))
    return error


@weighted
def mad(rows, bin_size=100):
    """Return the mean absolute calibration error, eq. (6): sum_B |B|/N |acc(B) - conf(B)|.

    Hendrycks et al. 2019, over the bins of `rmsce`. Always |gap| <= mad <= rmsce.
    """
    check_count('bin_size', bin_size)
    sizes = rows.top.fixed_size(bin_size)
    return lambda weights: _mean_gap(*sizes(weights))[:, 0]


def rms_mmlu_repo(probs, labels, bin_size=100) -> float:
    """Return `rmsce` of calib_tools.py in the MMLU repository: (sum_B (|B|/N gap(B))^2)^(1/4).

    With B = N / bin_size equal bins, cut as in `ace`, it is sqrt(RMSCE) B^(-1/4), so it shrinks as
    N grows. Very probably it is the column 'RMS' of Huang et al. (docs/metrics.md says why).
    """
    check_count('bin_size', bin_size)
    confidence, correct = top_label(probs, labels)
    n = len(confidence)
    count, conf, acc = _chunk_means(confidence, correct, max(1, n // bin_size), rounded_chunk_ends)
    return float(np.nansum((count / n * (acc - conf)) ** 2) ** 0.25)


# Calibration of the prediction, without bins


def ks_error(probs, labels) -> float:
    """Return the Kolmogorov-Smirnov calibration error, max_j |sum_{i <= j} (a_i - c_i)| / N.

    Gupta et al. 2021. Rows are in ascending order of confidence; tied rows enter together.
    """
    confidence, correct, tie_ends = sort_by_confidence(probs, labels)
    sums = np.cumsum(correct - confidence)
    return float(np.abs(sums[tie_ends - 1]).max() / len(confidence))


def smooth_ece(probs, labels) -> float:
    """Return the smooth ECE: the mean |residual| after smoothing by a Gaussian of the same width.

    Blasiok & Nakkiran 2023. Each row places its residual a_i - c_i at c_i on [0, 1], where it is
    smoothed by a Gaussian with reflection at both ends. The error at a width is the integral of
    |smoothed residuals| / N. It never increases with the width, and the result is the one width
    that equals its error, to 1e-6. relplot's smECE gives rows at 0 and 1 half their weight, and
    stops after ten bisections (docs/metrics.md).
    """
    confidence, correct = top_label(probs, labels)
    residual = correct - confidence.astype(np.float64)
    # the period of a function with reflections is 2, so its frequencies are pi k
    spectrum = np.fft.rfft(_reflected(confidence, residual[None], 8192)[0]) / len(correct)
    frequency = np.pi * np.arange(len(spectrum))

    def at_least_its_error(step):
        smooth = np.fft.irfft(spectrum * np.exp(-((frequency * step / 2**20) ** 2) / 2))
        return np.abs(smooth).sum() / 2 <= step / 2**20 + 1e-12     # both halves; rounding

    # no error exceeds 1, so the last width needs no test
    return bisect.bisect_left(range(2**20), True, key=at_least_its_error) / 2**20


def kde_ece(probs, labels) -> float:
    """Return the kernel-density ECE: the integral of |z p(z) - acc(z) p(z)| over confidence z.

    Zhang et al. 2020 (d = 1). p(z) and acc(z) p(z) are density estimates of all rows and of the
    correct ones, with the triweight kernel, reflected at 0 and 1, on a grid of 8192 cells. Its
    standard deviation is 1.06 s N^(-1/5), with s that of the confidences, and at least 0.001.
    """
    confidence, correct = top_label(probs, labels)
    n, cells = len(confidence), 8192
    width = 3 * max(1e-3, 1.06 * confidence.std(dtype=np.float64) * n**-0.2)    # half the kernel's
    distance = 2 * np.abs(np.fft.fftfreq(2 * cells))
    # a kernel wider than 1 also reaches the next period
    kernel = sum(np.clip(1 - (x / width) ** 2, 0, None) ** 3 for x in (distance, 2 - distance))
    spectrum = np.fft.rfft(_reflected(confidence, np.stack([np.ones(n), correct]), cells))
    density, right = np.fft.irfft(spectrum * np.fft.rfft(kernel / kernel.sum()))
    return float(np.abs(distance * density - right).sum() / 2 / n)     # distance is that from 0


def _reflected(confidence, weights, cells):
    """Return weights [M, N] on a grid from 0 to 1 and back, [M, 2 * cells].

    Each weight is split between the two grid points beside its confidence, and stands on the way
    there and on the way back, so that of a point at 0 or 1 counts twice.
    """
    position = np.clip(confidence.astype(np.float64), 0, 1) * cells
    left = np.minimum(position.astype(int), cells - 1)
    share = position - left
    x = np.stack([np.bincount(left, w * (1 - share), cells + 1)
                  + np.bincount(left + 1, w * share, cells + 1) for w in weights])
    x[:, [0, -1]] *= 2
    return np.concatenate([x, x[:, -2:0:-1]], 1)


def mmce(probs, labels) -> float:
    """Return the maximum mean calibration error, sqrt(sum_ij r_i r_j k(c_i, c_j)) / N, r = a - c.

    Kumar et al. 2018, with their kernel k = exp(-|c_i - c_j| / 0.4). For sorted confidences the
    double sum is sum_i (1 - k(c_i, c_i-1)^2) s_i^2 with s_i = sum_{j >= i} r_j k(c_i, c_j).
    """
    c, correct, _ = sort_by_confidence(probs, labels)
    s = np.cumsum(((correct - c) * np.exp(-c / 0.4))[::-1])[::-1] * np.exp(c / 0.4)
    weight = np.append(1.0, -np.expm1(-2 * np.diff(c) / 0.4))
    return float(np.sqrt((weight * s**2).sum()) / len(c))


# Ranking and abstention: the expectation over the orders of tied rows


def auroc(probs, labels) -> float:
    """Return the area under the ROC curve of confidence for correctness, P(c_right > c_wrong).

    Hendrycks & Gimpel 2017. It is nan, undefined, if all rows are right or all are wrong.
    """
    right, count = _tied_rows(probs, labels)
    right_above, wrong = np.cumsum(right) - right / 2, count - right
    return float((wrong * right_above).sum() / (right.sum() * wrong.sum() or np.nan))


def aurc(probs, labels) -> float:
    """Return the area under the risk-coverage curve: mean over k of the error of the top k rows.

    Geifman & El-Yaniv 2017. Four rows of one confidence, one of them right, give 0.75.
    """
    return float((1 - _accuracy_of_top(probs, labels)).mean())


def excess_aurc(probs, labels) -> float:
    """Return `aurc` minus the aurc of the same rows in the best order, right ones first, in [0, 1].

    Geifman et al. 2019, with the sum for the best order and not its integral.
    """
    curve = _accuracy_of_top(probs, labels)
    k = np.arange(1, len(curve) + 1)
    n_right = round(curve[-1] * len(curve))
    return float((np.minimum(k, n_right) / k - curve).mean())


def prr(probs, labels) -> float:
    """Return the prediction-rejection ratio: the share of the best possible gain by abstention.

    Malinin & Gales 2021: (A - acc) / (A_best - acc), with A = 1 - aurc and A_best that of the best
    order. 1 is a perfect ranking, 0 a random one. It is nan if acc is 0 or 1.
    """
    curve = _accuracy_of_top(probs, labels)
    # 0, not 1e-16, where all rows tie
    gain = round(curve.mean() - curve[-1], TIE_DECIMALS)
    missing = excess_aurc(probs, labels)
    return float(gain / (gain + missing)) if 0 < curve[-1] < 1 else float('nan')


@weighted
def bas(rows):
    """Return the behavioral alignment score, 1/N sum_i c_i + (1 - a_i) log(1 - c_i), at most 1.

    Wu et al. 2026 (arXiv 2604.03216), as an integral: the mean utility over thresholds t uniform in
    [0, 1] of a user who accepts answers of confidence t or more: 1 for a right answer, -t / (1 - t)
    for a wrong one, 0 for abstaining. Confidence equal to the accuracy maximizes it. 1 - c_i is at
    least 2.2e-16 here, as in `nll`, so no row costs more than 35.04.
    """
    c = rows.as_given.astype(np.float64)
    return mean_of(c + np.where(rows.correct, 0, np.log(np.maximum(1 - c, NLL_FLOOR))))


def accuracy_at_coverage(probs, labels, coverage=0.5) -> float:
    """Return the accuracy of the ceil(coverage * N) most confident rows, coverage in (0, 1]."""
    check_range('coverage', coverage, '(0, 1]')
    curve = _accuracy_of_top(probs, labels)
    return float(curve[int(np.ceil(coverage * len(curve) - 1e-9)) - 1])


def coverage_at_accuracy(probs, labels, wanted=0.9) -> float:
    """Return the largest share k / N of most confident rows with accuracy >= wanted, 0 if none."""
    check_range('wanted', wanted, '[0, 1]')
    enough = np.flatnonzero(_accuracy_of_top(probs, labels) >= wanted - 1e-12)
    return float((enough[-1] + 1) / len(labels)) if len(enough) else 0.0


def _tied_rows(probs, labels):
    """Return the numbers of right rows and of rows of each confidence, from the largest down."""
    _, correct, tie_ends = sort_by_confidence(probs, labels)
    return np.diff([np.cumsum(correct)[tie_ends - 1], tie_ends], prepend=0)[:, ::-1]


def _accuracy_of_top(probs, labels):
    """[N]: the expected accuracy of the k most confident rows, with tied rows in random order."""
    right, count = _tied_rows(probs, labels)
    return np.cumsum(np.repeat(right / count, count)) / np.arange(1, len(labels) + 1)


# Class-wise calibration: acc(B) is the share of rows whose label is k, conf(B) the mean of p_ik


@weighted
def sce(rows, n_bins=15, n_options=None):
    """Return the static calibration error, eq. (3): 1/K sum_k sum_m |B_mk|/N |acc - conf|.

    Nixon et al. 2019; the class-wise ECE of Kull et al. 2019: the mean over options k of the `ece`
    of all N probabilities p_ik, including zeros. With n_options, option k counts only the N_k rows
    that have it, and the mean is over the options that some row has. Without it, padding counts as
    a probability of 0 that is always right.
    """
    sizes = rows.by_option.equal_width(n_bins)
    return lambda weights: _mean_of_options(_mean_gap(*sizes(weights)))


@weighted
def ace(rows, n_ranges=15, n_options=None, equal_weights=False):
    """Return the adaptive calibration error, 1/K sum_k sum_r |B_rk|/N |acc(B_rk) - conf(B_rk)|.

    Nixon et al. 2019. For each option k the N probabilities p_ik, including zeros, are sorted and
    cut into R = min(n_ranges, N) ranges of equal count, at round(r N / R). Tied probabilities stay
    together, in the lowest range that holds one. The weight |B_rk|/N is that of the authors' code;
    equal_weights gives each range 1/R, as equation (4) does. n_options is used as in `sce`.
    """
    check_count('n_ranges', n_ranges)
    sizes = rows.by_option.equal_mass(n_ranges, rounded_chunk_ends)

    def error(weights):
        size, gap = sizes(weights)
        if equal_weights:       # of ranges, at most one per row
            n = np.minimum(size.sum(-1), n_ranges)
            return _mean_of_options((np.abs(gap) / np.maximum(size, 1)).sum(-1) / _or_nan(n))
        return _mean_of_options(_mean_gap(size, gap))
    return error


def tace(probs, labels, n_ranges=15, threshold=0.01, n_options=None) -> float:
    """Return the thresholded adaptive calibration error: `ace` of probabilities above `threshold`.

    Nixon et al. 2019, who advise it for a hundred options and more. As in their code, the mean of
    each option is over the probabilities that are left, so the result is larger than `ace`. An
    option of which none is left counts 0. threshold is in [0, 1].
    """
    check_count('n_ranges', n_ranges)
    check_range('threshold', threshold, '[0, 1]')
    return float(np.mean([
        _expected_gap(*_chunk_means(p, is_label, n_ranges, rounded_chunk_ends)) if len(p) else 0.0
        for p, is_label in _by_option(probs, labels, n_options, threshold)]))


def _by_option(probs, labels, n_options, above=-1):
    """Yield (p_ik, [label_i = k]) for each option k, of the rows that have it with p_ik > above."""
    probs, labels, n_options = check_probs(probs, labels, n_options)
    above = round_for_ties(np.asarray(above, probs.dtype))
    for k in range(n_options.max()):
        p = round_for_ties(probs[:, k])
        rows = (n_options > k) & (p > above)
        yield p[rows], labels[rows] == k


# Prediction sets


def conformal_sets(probs, labels, n_options=None, *, method='lac', alpha=0.1) -> np.ndarray:
    """Return which options are in each row's conformal prediction set, bool [N, K].

    A set holds the options of nonconformity s <= q_i, with q_i the k-th smallest s of the labels of
    all other rows, k = ceil(N (1 - alpha)), or infinite if k = N. So it holds the label of a new
    row with probability 1 - alpha or more, whatever the model, if rows are exchangeable.

        'lac'   s_ik = 1 - p_ik, Sadinle et al. 2019: the smallest sets on average
        'aps'   s_ik = sum of p_ij over the options j from the most probable one to k; of equal
                options the first comes first. Romano et al. 2020, without their random term: sets
                grow with difficulty

    No row is in its own quantile, so no separate calibration set is needed; over all N rows the
    coverage is k / N except for ties. A set may be empty.
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
    """A metric as a row of `MEASURES`; a new metric is a function and a row.

    needs: how the function is called
        'prediction'             function(probs, labels), probs [N, K] or confidences [N]
        'options'                function(probs, labels), with probs [N, K], like the next two
        'n_options'              function(probs, labels, n_options=n_options)
        'scores'                 function(probs, labels, scores=scores)
    tables: the tables that show it, with bootstrap intervals: 'runs', which a training run prints;
    'results', of one evaluation; 'compare', of several. A report holds every metric.
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
_NATS, _SHARE = partial(entropy, unit='nats'), partial(entropy, unit='share')
_LAC, _APS = partial(conformal, method='lac'), partial(conformal, method='aps')
MEASURES = (
    Measure('accuracy', 'accuracy', accuracy, True, tables=ALL_TABLES, is_mean=True),
    Measure('accuracy_low', 'accuracy, from', wilson_interval, None, tables=(), part=0),
    Measure('accuracy_high', 'accuracy, to', wilson_interval, None, tables=(), part=1),
    Measure('confidence', 'confidence', mean_confidence, None, tables=('runs', 'results'),
            is_mean=True),
    Measure('gap', 'confidence - accuracy', gap, None, tables=(), is_mean=True),
    Measure('entropy_bits', 'entropy (bits)', entropy, None, 'options', tables=ALL_TABLES,
            is_mean=True),
    Measure('entropy_nats', 'entropy (nats)', _NATS, None, 'options', tables=(), is_mean=True),
    Measure('entropy_share', 'entropy / log K', _SHARE, None, 'n_options', tables=(), is_mean=True),
    Measure('ece', 'ECE', ece, False, tables=ALL_TABLES),
    # below 10,000 rows, errors of both signs in one bin cancel (docs/metrics.md)
    Measure('rmsce', 'RMSCE', rmsce, False, tables=ALL_TABLES, interval_from=10_000),
    Measure('mad', 'MAD', mad, False, tables=('results',), interval_from=10_000),
    Measure('sce', 'SCE', sce, False, 'n_options', tables=('results',)),
    Measure('ace', 'ACE', ace, False, 'n_options', tables=('results',), interval_outcomes=100),
    Measure('brier', 'Brier', brier, False, 'options', tables=('results',), is_mean=True),
    Measure('nll', 'NLL (nats)', nll, False, 'scores', tables=('results',), is_mean=True),
    Measure('ece_15', 'ECE, 15 bins', partial(ece, n_bins=15), False, tables=()),
    Measure('mce', 'MCE', mce, False, tables=(), interval_from=np.inf),
    Measure('mce_count', 'rows in the bin of MCE', mce_bin, None, format='.0f', tables=(),
            part=1, interval_from=np.inf),
    Measure('ece_equal_mass', 'ECE, equal mass', ece_equal_mass, False, tables=(),
            interval_outcomes=100),
    Measure('ece_sweep', 'ECE, sweep', ece_sweep, False, tables=()),
    Measure('ece_debiased', 'ECE, debiased', ece_debiased, False, tables=()),
    Measure('tace', 'TACE', tace, False, 'n_options', tables=(), interval_outcomes=100),
    Measure('rms_mmlu_repo', "RMS of MMLU's code", rms_mmlu_repo, False, tables=(),
            interval_from=np.inf),
    Measure('ks_error', 'KS error', ks_error, False, tables=()),
    Measure('smooth_ece', 'smooth ECE', smooth_ece, False, tables=()),
    Measure('kde_ece', 'KDE ECE', kde_ece, False, tables=()),
    Measure('mmce', 'MMCE', mmce, False, tables=()),
    Measure('auroc', 'AUROC', auroc, True, tables=()),
    Measure('aurc', 'AURC', aurc, False, tables=()),
    Measure('excess_aurc', 'excess AURC', excess_aurc, False, tables=()),
    Measure('prr', 'prediction-rejection ratio', prr, True, tables=()),
    Measure('accuracy_at_coverage', 'accuracy of the surer half', accuracy_at_coverage, True,
            tables=()),
    Measure('coverage_at_accuracy', 'coverage at accuracy 0.9', coverage_at_accuracy, True,
            tables=()),
    Measure('bas', 'BAS', bas, True, tables=(), is_mean=True),
    Measure('brier_top_label', 'Brier of the prediction', brier_top_label, False, tables=(),
            is_mean=True),
    Measure('brier_skill', 'Brier skill', brier_skill, True, tables=()),
    Measure('kappa', "Cohen's kappa", kappa, True, 'options', tables=()),
    Measure('reliability', 'reliability', murphy, False, tables=()),
    Measure('resolution', 'resolution', murphy, True, tables=()),
    Measure('uncertainty', 'uncertainty', murphy, None, tables=()),
    Measure('within_bin', 'within-bin term', murphy, None, tables=()),
    Measure('nll_refinement', 'NLL, refinement', refinement, False, 'scores', tables=()),
    Measure('nll_calibration', 'NLL, calibration', refinement, False, 'scores', tables=()),
    Measure('brier_refinement', 'Brier, refinement', refinement, False, 'scores', tables=()),
    Measure('brier_calibration', 'Brier, calibration', refinement, False, 'scores', tables=()),
    Measure('lac_coverage', 'LAC coverage', _LAC, None, 'n_options', tables=(), part=0,
            is_mean=True),
    Measure('lac_size', 'LAC size', _LAC, False, 'n_options', tables=(), part=1, is_mean=True),
    Measure('aps_coverage', 'APS coverage', _APS, None, 'n_options', tables=(), part=0,
            is_mean=True),
    Measure('aps_size', 'APS size', _APS, False, 'n_options', tables=(), part=1, is_mean=True),
)


class Report(dict):
    """{'n': number of rows, key of a metric: its value}, printed as a table."""

    def __str__(self):
        return '\n'.join(f'{name:24}{value:>12}' if isinstance(value, int) else
                         f'{name:24}{value:12.4f}' for name, value in self.items())


def report(probs, labels, n_options=None, *, scores=None, measures=None) -> Report:
    """Return n and the `measures` that are defined for probs, as numbers that json.dumps accepts.

    measures: rows of `MEASURES`, by default all; scores: those of `nll`.
    """
    rows = Rows(probs, labels, n_options, scores)
    confidence, correct, once = rows.as_given, rows.correct, rows.once()
    order = rows.top.order      # sorted once, since sorting sorted rows is fast
    calls = {'prediction': lambda function: function(confidence[order], correct[order])}
    if as_array('probs', probs).ndim == 2:
        calls |= {'options': lambda function: function(probs, labels),
                  'n_options': lambda function: function(probs, labels, n_options=n_options),
                  'scores': lambda function: function(probs, labels, scores=scores)}
    elif scores is not None:
        raise ValueError('scores belong to probs [N, K], not to a confidence [N]')
    chosen = [x for x in (MEASURES if measures is None else measures) if x.needs in calls]
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


# Predictions and bins, which compare/scaling.py and stats.py use too


def top_label(probs, labels) -> tuple[np.ndarray, np.ndarray]:
    """Return (confidence [N], rounded for ties, and correct, bool [N]) of the predictions."""
    confidence, correct = predictions(probs, labels)
    return round_for_ties(confidence), correct


def predictions(probs, labels) -> tuple[np.ndarray, np.ndarray]:
    """Return (confidence [N] as given, and correct, bool [N]) of the predictions."""
    if as_array('probs', probs).ndim == 1:
        return check_predictions(probs, labels)
    probs, labels, _ = check_probs(probs, labels)
    return probs.max(1), predicted(probs) == labels


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
    tied rows in the order given. tie_ends: the index after each distinct confidence's last row."""
    confidence, correct = top_label(probs, labels)
    order = np.argsort(confidence, kind='stable')
    ordered = confidence[order].astype(np.float64)
    return ordered, correct[order], np.flatnonzero(np.append(ordered[1:] != ordered[:-1], True)) + 1


def equal_width_bins(values, n_bins):
    """Return the bin 0..n_bins-1 of each value: ((m-1)/M, m/M], and 0 in the first."""
    check_count('n_bins', n_bins)
    edges = round_for_ties((np.arange(1, n_bins) / n_bins).astype(values.dtype))
    return np.searchsorted(edges, values, side='left')


def equal_chunk_ends(n, n_bins):
    """Return the ends of n_bins chunks of n rows, the first n mod n_bins of them one row longer."""
    m = np.arange(1, n_bins + 1)
    return m * (n // n_bins) + np.minimum(m, n % n_bins)


def rounded_chunk_ends(n, n_bins):
    """Return the ends of n_bins chunks of n rows, round(r n / n_bins)."""
    return np.round(np.arange(1, n_bins + 1) * (n / n_bins)).astype(int)


def bin_means(index, n_bins, confidence, correct):
    """Return |B|, conf(B) and acc(B), each [n_bins]; the last two are nan where a bin is empty."""
    count = np.bincount(index, minlength=n_bins)
    size = np.where(count, count, np.nan)
    sums = np.bincount(index, confidence, n_bins), np.bincount(index, correct, n_bins)
    return count, sums[0] / size, sums[1] / size


def _chunk_means(values, outcomes, n_bins, chunk_ends):
    """The bin_means of the N sorted values in min(n_bins, N) chunks that keep ties together."""
    check_count('n_bins', n_bins)
    n = len(values)
    ends = chunk_ends(n, min(n_bins, n))
    index = np.searchsorted(np.sort(values)[ends - 1], values, side='left')
    return bin_means(index, len(ends), values, outcomes)


def _expected_gap(count, confidence, accuracy) -> float:
    """sum_B |B|/N |acc(B) - conf(B)|, over the non-empty bins."""
    return float(np.nansum(count * np.abs(accuracy - confidence)) / count.sum())


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


def best_temperature(scores, targets) -> float:
    """Return the T from 0.001 to 1000 with the least cross-entropy of softmax(scores / T).

    scores are float [N, K], -inf for a missing option; targets float or bool [N, K] are
    distributions over the options, such as one-hot labels. The cross-entropy is convex in 1 / T;
    Newton's method, with a bisection where a step does not halve the one before the last.
    """
    z = np.array(np.transpose(scores), np.float64, order='C')       # [K, N]: sums over K are fast
    z -= z.max(0)
    expected = (np.where(targets.T, z, 0) * targets.T).sum(0)
    margins = np.where(np.isfinite(z), z - expected, 0)
    n = z.shape[1]
    pieces = [(z[:, i:i + 10_000], margins[:, i:i + 10_000]) for i in range(0, n, 10_000)]
    low, high, inverse, before, last = 1e-3, 1e3, 1.0, np.inf, np.inf
    while abs(last) > 1e-14 * inverse:
        slope = curvature = 0.0
        for z, margins in pieces:       # they fit into a cache
            p = np.exp(inverse * z)
            p *= margins / p.sum(0)
            mean = p.sum(0)
            slope += mean.sum() / n
            curvature += ((p * margins).sum() - (mean**2).sum()) / n
        # the slope of a separable set is negative, or 0 where its exponentials underflow
        low, high = (low, inverse) if slope > 0 else (inverse, high)
        # a step beyond an end goes to that end, and the next one stays there if it is the best T
        newton = np.clip(inverse - slope / curvature, 1e-3, 1e3) if curvature > 0 else np.nan
        fast = low <= newton <= high and abs(newton - inverse) < abs(before) / 2
        before, last = last, (newton if fast else np.sqrt(low * high)) - inverse
        inverse += last
    return float(1 / inverse)


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
