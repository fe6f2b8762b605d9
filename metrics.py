"""Calibration metrics for multiple-choice predictions. Plain numpy, one function per metric.

Every metric takes

    probs      float [N, K]   one row per question, each row sums to 1; a question with fewer
                              than K options is padded with zero probability on the right
    labels     int [N]        index of the right option
    n_options  int [N]        sce, ace and report only: how many options each question has.
                              Without it every question has all K.

and returns a Python float, unless its docstring says otherwise. Those that look at nothing but the
prediction also take its confidence, float [N], in place of probs and whether it is right, bool or
0/1 [N], in place of labels: for next-token prediction, where nobody keeps the other 256,000
probabilities. One-dimensional probs are always confidences.

The docstrings write

    p_ik  probability of option k in row i
    c_i   = max_k p_ik, the confidence
    a_i   = 1 if argmax_k p_ik is the label, else 0. A tie goes to the first maximum (np.argmax),
            so a row of four 0.25 predicts option 0.

and, within a bin B of rows, conf(B) = mean c_i, acc(B) = mean a_i, |B| = number of rows. Empty
bins add nothing. Sums are taken in float64 whatever the precision of probs.

All of them raise ValueError, naming the row and the value, when probs is not [N, K] with N >= 1,
holds a NaN or a negative number, or has a row further than 1e-4 from summing to 1; when labels is
not an integer array [N] or points outside the K options; and when n_options contradicts either. A
bin count below 1 raises too.

Ties: two probabilities are equal if they are the same to 12 decimals, two of less than float64
precision if they are the same. Every measure of the prediction or of single options rounds them
first, and bin edges likewise. So the same prediction computed in two ways (a sum in another order,
softmax before or after a shift), which differs by about 1e-16, predicts the same option, falls in
the same bin and ties with the same rows; without it both would be a matter of chance wherever a
confidence is on an edge, such as 0.6, or occurs twice. Entropy, nll and brier, which have no jumps,
use probs as given.

Binned numbers depend on the number of bins, on how they are cut and on which side they are closed,
and are biased upwards for small N: a perfectly calibrated 4-option model has a mean ECE of about
0.09 on 100 questions, 0.03 on 1000. Print the settings and N beside the number.

Equations (2) to (6) are numbered as in Huang et al., 'Investigating the Multilingual Calibration
Effects of Language Model Instruction-Tuning', appendix A.
"""

import argparse
import json
import re
import signal
import sys

import numpy as np

TIE_DECIMALS = 12  # far above the noise of float64, 1e-16, far below what a model can mean
SUM_TOLERANCE = 1e-4  # float32 softmax over ten options is off by about 1e-7
NLL_FLOOR = np.finfo(np.float64).eps  # 2.2e-16: no row costs more than 36.04 nats


# Basics


def accuracy(probs, labels) -> float:
    """Share of rows whose first most probable option is the label, 1/N sum_i a_i."""
    _, correct = top_label(probs, labels)
    return float(correct.mean())


def wilson_interval(probs, labels, z=1.96) -> tuple[float, float]:
    """Wilson score interval (low, high) of the accuracy; z = 1.96 covers 95 %.

        (acc + z^2/2N ± z sqrt(acc (1 - acc)/N + z^2/4N^2)) / (1 + z^2/N)

    Wilson 1927. Unlike acc ± z sqrt(acc (1 - acc)/N) it stays inside [0, 1] and has a width when
    all rows are right or all are wrong. Raises ValueError unless z is in (0, 1000].
    """
    _check_range('z', z, 0, 1000, low_is_in=False)
    low, high = _wilson(accuracy(probs, labels), len(probs), z)
    return float(low), float(high)


def _wilson(mean, n, z):
    centre = mean + z**2 / (2 * n)
    half_width = z * np.sqrt(mean * (1 - mean) / n + z**2 / (4 * n**2))
    scale = 1 + z**2 / n
    # the bounds are inside [0, 1] in exact arithmetic; this takes off the rounding
    low, high = (centre - half_width) / scale, (centre + half_width) / scale
    return np.maximum(0, low), np.minimum(1, high)


def mean_confidence(probs, labels) -> float:
    """Mean probability of the predicted option, 1/N sum_i c_i. In [1/K, 1]."""
    confidence, _ = top_label(probs, labels)
    return float(confidence.mean(dtype=np.float64))


def gap(probs, labels) -> float:
    """Mean confidence - accuracy, signed: above 0 is overconfident, below 0 underconfident.

    |gap| is the ECE with a single bin and a lower bound of ece, ece_equal_mass, mad and rmsce.
    """
    return mean_confidence(probs, labels) - accuracy(probs, labels)


def entropy(probs, labels, unit='bits', n_options=None) -> float:
    """Mean entropy of the rows, -1/N sum_i sum_k p_ik log p_ik, with 0 log 0 = 0.

    unit 'bits' (log2, the default: the published tables of Huang et al. exceed ln K, so they are in
    bits), 'nats', or 'share': of log K_i, which n_options gives and without it is K, in [0, 1]; a
    row with one option counts 0. In [0, log K]; padded options add nothing. Labels do not enter,
    and are taken so that every metric is called alike. Raises ValueError for another unit.
    """
    if unit not in ('bits', 'nats', 'share'):
        raise ValueError(f"unit must be 'bits', 'nats' or 'share', not {unit!r}")
    probs, labels = _check(probs, labels)
    n_options = _check_options(n_options, probs, labels)
    nats = _row_entropy(probs)
    if unit == 'share':
        largest = np.log(n_options)
        nats = nats / np.where(largest > 0, largest, 1)
    return float(nats.mean() / (np.log(2) if unit == 'bits' else 1))


def _row_entropy(probs):
    """Nats [N], a block of rows at a time: the whole would take three more arrays like probs."""
    nats = np.empty(len(probs))
    for rows in _blocks(probs):
        p = probs[rows].astype(np.float64)
        # subtracted from 0.0 and not negated, so that a model sure of everything gets 0 and not -0
        nats[rows] = 0.0 - (p * np.log(np.where(p > 0, p, 1))).sum(1)
    return nats


def _blocks(probs):
    return [slice(i, i + 65536) for i in range(0, len(probs), 65536)]


def nll(probs, labels, *, scores=None) -> float:
    """Negative log-likelihood of the labels in nats, -1/N sum_i log max(p_i,label, 2.2e-16).

    The floor is float64's machine epsilon, as in scikit-learn's log_loss: a label of probability 0
    costs 36.04 nats where the exact value is infinite. scores float [N, K], logits or
    log-probabilities whose softmax is probs, -inf where a row lacks an option, give the exact value
    without a floor: 1/N sum_i (logsumexp(scores_i) - scores_i,label). Raises ValueError where
    probs is not their softmax, to 1e-4, and where the label's own score is not finite.
    """
    probs, labels = _check(probs, labels)
    return float(_label_nll(probs, labels, scores).mean())


def _label_nll(probs, labels, scores):
    """Nats [N] of each row's label."""
    rows = np.arange(len(labels))
    if scores is None:
        return -np.log(np.maximum(probs[rows, labels].astype(np.float64), NLL_FLOOR))
    if np.shape(scores) != probs.shape:
        raise ValueError(f'scores must be of the shape of probs, {probs.shape}, not '
                         f'{np.shape(scores)}')
    scores, labels = _check_scores(scores, labels)
    z = scores - scores.max(1, keepdims=True)
    exp = np.exp(z)
    total = exp.sum(1)
    differs = np.abs(exp / total[:, None] - probs) > SUM_TOLERANCE
    for row, option in np.argwhere(differs):
        raise ValueError(f'row {row}: the softmax of scores gives option {option} '
                         f'{exp[row, option] / total[row]:.6g}, probs {probs[row, option]:.6g}')
    return np.log(total) - z[rows, labels]


def brier(probs, labels) -> float:
    """Brier score, 1/N sum_i sum_k (p_ik - [k = label_i])^2, summed over options. In [0, 2].

    Brier 1950, and `brier_score` of lm-evaluation-harness. The binary form found elsewhere
    (scikit-learn's) is half of it at K = 2. Padded options add nothing, so questions may differ in
    their number of options.
    """
    probs, labels = _check(probs, labels)
    total = 0.0
    for rows in _blocks(probs):
        error = probs[rows].astype(np.float64)
        error[np.arange(len(error)), labels[rows]] -= 1
        total += (error**2).sum()
    return float(total / len(labels))


def murphy(probs, labels, n_bins=10) -> dict[str, float]:
    """Murphy's decomposition of the prediction's Brier score, 1/N sum_i (c_i - a_i)^2.

        brier = reliability - resolution + uncertainty + within_bin
        reliability  sum_B |B|/N (conf(B) - acc(B))^2          how far confidence is off
        resolution   sum_B |B|/N (acc(B) - acc)^2              how far confidence tells rows apart
        uncertainty  acc (1 - acc)
        within_bin   1/N sum_B sum_i (c_i - conf(B))^2 - 2 (c_i - conf(B)) (a_i - acc(B))

    Murphy 1973; the last term is Stephenson et al. 2008's WBV - WBC, without which the identity
    holds only for confidences that are equal within a bin. Bins are those of `bins`. Returns the
    five by these names.
    """
    _check_count('n_bins', n_bins)
    confidence, correct = top_label(probs, labels)
    index = _equal_width(confidence, n_bins)
    confidence = confidence.astype(np.float64)
    count, conf, acc = _bin_means(index, n_bins, confidence, correct)
    share, mean = count / count.sum(), correct.mean()
    c, a = confidence - conf[index], correct - acc[index]
    return {
        'brier': float(((confidence - correct) ** 2).mean()),
        'reliability': float(np.nansum(share * (conf - acc) ** 2)),
        'resolution': float(np.nansum(share * (acc - mean) ** 2)),
        'uncertainty': float(mean * (1 - mean)),
        'within_bin': float((c**2 - 2 * c * a).mean()),
    }


# Top-label calibration


def bins(probs, labels, n_bins=10) -> dict[str, np.ndarray]:
    """What a reliability diagram shows: the rows in `n_bins` bins of equal width by confidence.

    Bin m = 1..M holds ((m-1)/M, m/M]: closed on the right, and bin 1 also holds 0. A confidence
    on an edge therefore counts in the bin below it. The edges are m/M in probs' own precision, since
    a float32 0.1 exceeds the float64 one and would move such a row; a confidence that ties with an
    edge (0.6000000000000001, see the top of this file) is on it. A confidence above 1 by rounding
    is in the last bin.

    Returns {'edges': float [M+1], 'count': int [M], 'confidence': float [M], 'accuracy': float [M],
    'low', 'high': float [M], the accuracy's 95 % Wilson interval} in ascending order, all but the
    count nan where a bin is empty.
    """
    _check_count('n_bins', n_bins)
    confidence, correct = top_label(probs, labels)
    index = _equal_width(confidence, n_bins)
    count, mean, accuracy = _bin_means(index, n_bins, confidence, correct)
    edges = np.arange(n_bins + 1) / n_bins
    with np.errstate(invalid='ignore', divide='ignore'):
        low, high = _wilson(accuracy, count, 1.96)
    return {'edges': edges, 'count': count, 'confidence': mean, 'accuracy': accuracy,
            'low': low, 'high': high}


def ece(probs, labels, n_bins=10) -> float:
    """Expected calibration error over equal-width bins, eq. (2): sum_B |B|/N |acc(B) - conf(B)|.

    Naeini et al. 2015. The bins are those of `bins`. The default of 10 follows Zhu et al. 2023, 'On
    the Calibration of Large Language Models and Alignment'; Guo et al. 2017 use 15. In [0, 1].
    """
    _check_count('n_bins', n_bins)
    confidence, correct = top_label(probs, labels)
    index = _equal_width(confidence, n_bins)
    return _expected_gap(*_bin_means(index, n_bins, confidence, correct))


def mce(probs, labels, n_bins=10) -> float:
    """Maximum calibration error, max_B |acc(B) - conf(B)| over the non-empty bins of `bins`.

    Guo et al. 2017. A bin of one row counts as much as any other, so read it beside the counts.
    """
    table = bins(probs, labels, n_bins)
    return float(np.nanmax(np.abs(table['accuracy'] - table['confidence'])))


def mce_bin(probs, labels, n_bins=10) -> tuple[float, int]:
    """(`mce`, the number of rows in its bin): of the lowest such bin, where several are equal."""
    table = bins(probs, labels, n_bins)
    at = int(np.nanargmax(np.abs(table['accuracy'] - table['confidence'])))
    return mce(probs, labels, n_bins), int(table['count'][at])


def ece_sweep(probs, labels) -> float:
    """Expected calibration error with as many bins of equal count as keep accuracy monotonic.

    Roelofs et al. 2022. b = 2, 3, ... chunks of the rows sorted by confidence (the first N mod b
    one row longer); the last b before acc(B) falls anywhere counts, 1 if there is none, 10,000 at
    most. Rows of one confidence stay in one chunk, the lowest.
    """
    ordered, correct, tie_ends = _sorted(probs, labels)
    n, best = len(ordered), None
    tie_ends = np.append(0, tie_ends)
    last_tie = np.repeat(tie_ends[1:], np.diff(tie_ends))
    right = np.append(0, np.cumsum(correct))
    gaps = np.append(0, np.cumsum(ordered - correct))
    of_tie = np.diff(right[tie_ends]) / np.diff(tie_ends)
    if (np.diff(of_tie) >= 0).all():    # then so are the accuracies of any chunks
        return float(np.abs(np.diff(gaps[tie_ends])).sum() / n)
    for n_bins in range(1, min(n, 10_000) + 1):
        ends = np.unique(np.append(0, last_tie[_chunk_ends(n, n_bins) - 1]))
        accuracies = np.diff(right[ends]) / np.diff(ends)
        if (np.diff(accuracies) < 0).any():
            break
        best = np.abs(np.diff(gaps[ends])).sum() / n
    return float(best)


def ece_debiased(probs, labels, n_bins=15) -> float:
    """Debiased root mean square calibration error over `n_bins` bins of equal count.

        sqrt(max(0, sum_B |B|/N ((acc(B) - conf(B))^2 - acc(B) (1 - acc(B)) / (|B| - 1))))

    Broecker 2012, Kumar et al. 2019; the debiased top-label error of uncertainty-calibration. A bin
    of one row counts 0. Bins are those of `ece_equal_mass`.
    """
    _check_count('n_bins', n_bins)
    confidence, correct = top_label(probs, labels)
    ends = _chunk_ends(len(confidence), min(n_bins, len(confidence)))
    count, conf, acc = _bin_means(_equal_mass(confidence, ends), len(ends), confidence, correct)
    several = count > 1
    count, conf, acc = count[several], conf[several], acc[several]
    squares = count * ((acc - conf) ** 2 - acc * (1 - acc) / (count - 1))
    return float(np.sqrt(max(0.0, squares.sum() / len(confidence))))


def ece_equal_mass(probs, labels, n_bins=10) -> float:
    """Expected calibration error, eq. (2), over bins of equal count.

    Nguyen & O'Connor 2015, Kumar et al. 2019. Equal to get_ece_em of uncertainty-calibration and so
    to HELM's `ece_10_bin`: rows sorted by confidence are cut into min(n_bins, N) chunks, the first
    N mod n_bins of them one row longer. Rows of one confidence are never split: all go to the
    lowest chunk that holds one of them, so row order does not matter and ties leave fewer bins.
    """
    _check_count('n_bins', n_bins)
    confidence, correct = top_label(probs, labels)
    n_bins = min(n_bins, len(confidence))
    index = _equal_mass(confidence, _chunk_ends(len(confidence), n_bins))
    return _expected_gap(*_bin_means(index, n_bins, confidence, correct))


def rmsce(probs, labels, bin_size=100) -> float:
    """Root mean square calibration error, eq. (5): sqrt(sum_B |B|/N (acc(B) - conf(B))^2).

    Hendrycks et al. 2019. Rows sorted by confidence fill max(1, floor(N / bin_size)) bins of
    bin_size rows, and the last, most confident bin also takes the remainder: fewer than 2 bin_size
    rows are one bin, and the result is then |gap|. The published code leaves the last bin out of
    the sum while dividing by N (`rmsce_hendrycks`); here it counts. The sort is stable, so rows of
    equal confidence stay in the order given, and a tie across two bins makes the result depend on
    that order, as it does in that code.
    """
    count, confidence, accuracy = _adaptive_bins(probs, labels, bin_size)
    return float(np.sqrt((count * (accuracy - confidence) ** 2).sum() / count.sum()))


def mad(probs, labels, bin_size=100) -> float:
    """Mean absolute deviation calibration error, eq. (6): sum_B |B|/N |acc(B) - conf(B)|.

    Hendrycks et al. 2019, over exactly the bins of `rmsce`. Always |gap| <= mad <= rmsce.
    """
    return _expected_gap(*_adaptive_bins(probs, labels, bin_size))


def rmsce_hendrycks(probs, labels, bin_size=100) -> float:
    """RMSCE as the code of Hendrycks et al. 2019 computes it, without the most confident bin.

    outlier-exposure's calib_err(p='2'), copied by HLE and others: bins of bin_size rows by a stable
    sort, the last one with the remainder, left out of the sum but not of N. So confident rows
    count nothing, and with fewer than two bins the result is 0 (that code raises IndexError below
    bin_size rows). Ties are split in the order given. For comparison only; use `rmsce`.
    """
    count, of_gap = _all_but_last(probs, labels, bin_size)
    return float(np.sqrt((count * of_gap**2).sum() / len(probs)))


def mad_hendrycks(probs, labels, bin_size=100) -> float:
    """MAD as the same code computes it (p='1'): see `rmsce_hendrycks`. Use `mad`."""
    count, of_gap = _all_but_last(probs, labels, bin_size)
    return float((count * np.abs(of_gap)).sum() / len(probs))


def _all_but_last(probs, labels, bin_size):
    _check_count('bin_size', bin_size)
    confidence, correct, _ = _sorted(probs, labels)
    n_bins = max(0, len(confidence) // bin_size - 1)
    gaps = (confidence - correct)[:n_bins * bin_size]
    return np.full(n_bins, bin_size), gaps.reshape(n_bins, bin_size).mean(1)


def rms_mmlu_repo(probs, labels, bin_size=100) -> float:
    """What `rmsce` of the MMLU repository's calib_tools.py returns: (sum_B (|B|/N gap(B))^2)^(1/4).

    Not a root mean square: the weight is squared with the gap, and the root is taken twice, in
    get_calibration_error and again in update_state. With B = N / bin_size equal bins it is
    sqrt(RMSCE) B^(-1/4), so it shrinks as N grows and cannot be compared across numbers of
    questions. max(1, floor(N / bin_size)) bins of equal count, cut as in `ace`.

    Very probably it is the column 'RMS' of Huang et al.: there RMS is below ECE in 396 of 1260 rows
    (a root mean square never is), simulated models of the same ECE and N give the same values, and
    between tables by language and pooled over 42 the mean falls by 2.49, where 42^(1/4) = 2.55.
    That is inference; pooled rows of low ECE do not fit.
    """
    _check_count('bin_size', bin_size)
    confidence, correct = top_label(probs, labels)
    n = len(confidence)
    ends = _rounded_ends(n, max(1, n // bin_size))
    count, conf, acc = _bin_means(_equal_mass(confidence, ends), len(ends), confidence, correct)
    return float(np.nansum((count / n * (acc - conf)) ** 2) ** 0.25)


# Without bins


def ks_error(probs, labels) -> float:
    """Kolmogorov-Smirnov calibration error, max_j |sum_{i <= j} (a_i - c_i)| / N by ascending c.

    Gupta et al. 2021. Rows of one confidence enter together, so row order does not matter.
    """
    confidence, correct, ends = _sorted(probs, labels)
    sums = np.cumsum(correct - confidence)
    return float(np.abs(sums[ends - 1]).max() / len(confidence))


def smooth_ece(probs, labels) -> float:
    """Smooth ECE: the mean absolute residual after smoothing with a Gaussian as wide as the result.

    Blasiok & Nakkiran 2023. a_i - c_i and the rows themselves are put on [0, 1] at c_i and
    smoothed, reflected at both ends; the result is the sum of |smoothed residual| over that of the
    smoothed rows. Of the widths k / 1024 the least counts that the result does not exceed. Equal to
    relplot's smECE to 1e-4: its Gaussian, too, ends half a unit from its centre, and is read at
    max(200, 10 / width) points from 0 to 1. No bins to choose.
    """
    confidence, correct = top_label(probs, labels)
    residual = correct - confidence.astype(np.float64)

    def smoothed(width):
        cells = 2 * max(500, round(5 / width))
        kernel = np.exp(-((np.linspace(-0.5, 0.5, cells + 1) / width) ** 2) / 2)
        mesh = np.linspace(0, 1, max(200, round(10 / width)))
        size = 1 << (4 * cells).bit_length()        # a power of two: fast, and nothing wraps around
        kernel, found = np.fft.rfft(kernel, size), []
        for weight in (residual, None):
            x = _on_grid(confidence, weight, cells + 1)
            reflected = np.concatenate([x[::-1][:-1], x, x[::-1][1:]])
            spread = np.fft.irfft(np.fft.rfft(reflected, size) * kernel, size)
            start = cells + cells // 2
            found.append(np.interp(mesh, np.linspace(0, 1, cells + 1),
                                   spread[start:start + cells + 1]))
        return np.abs(found[0]).sum() / found[1].sum()
    low, high = 0.0, 1.0
    for _ in range(10):
        middle = (low + high) / 2
        # the 1e-12 decides alike where the two are equal but for rounding
        low, high = (middle, high) if middle + 1e-12 < smoothed(middle) else (low, middle)
    return float(smoothed(high))


def kde_ece(probs, labels) -> float:
    """Kernel-density ECE: the integral of |z p(z) - acc(z) p(z)| over confidence z.

    Zhang et al. 2020 (d = 1). p(z) and acc(z) p(z) are density estimates of all rows and of the
    right ones, with the triweight kernel, reflected at 0 and 1, on a grid of 8192 cells. The
    kernel's standard deviation is 1.06 s N^(-1/5), s that of the confidences, at least 0.001.
    """
    confidence, correct = top_label(probs, labels)
    confidence = confidence.astype(np.float64)
    n, cells = len(confidence), 8192
    width = max(1e-3, 1.06 * confidence.std() * n**-0.2)
    distance = np.arange(2 * cells)
    distance = np.minimum(distance, 2 * cells - distance) / cells / (3 * width)    # variance 1/9
    kernel = np.clip(1 - distance**2, 0, None) ** 3
    kernel = np.fft.rfft(kernel / kernel.sum())
    density = []
    for weight in (None, correct.astype(float)):
        mass = _on_grid(confidence, weight, cells + 1)
        mass[[0, -1]] *= 2          # reflected onto themselves
        both = np.fft.rfft(np.concatenate([mass, mass[-2:0:-1]]))
        density.append(np.fft.irfft(both * kernel, 2 * cells)[:cells + 1])
    gap = np.abs(np.linspace(0, 1, cells + 1) * density[0] - density[1])
    return float((gap.sum() - (gap[0] + gap[-1]) / 2) / n)


def mmce(probs, labels) -> float:
    """Maximum mean calibration error, sqrt(sum_ij r_i r_j exp(-|c_i - c_j| / 0.4)) / N, r = a - c.

    Kumar et al. 2018, with their kernel. For confidences in order the kernel is a product of
    exponentials, so the double sum is one of N squares, sum_i (1 - k_i^2) s_i^2 with k_i the kernel
    of row i and the one below it (0 for the first) and s_i = sum_{j >= i} r_j exp(-(c_j - c_i) /
    0.4): O(N log N), where others hold N x N, and no cancellation below the root.
    """
    c, correct, _ = _sorted(probs, labels)
    s = np.cumsum(((correct - c) * np.exp(-c / 0.4))[::-1])[::-1] * np.exp(c / 0.4)
    weight = np.append(1.0, -np.expm1(-2 * np.diff(c) / 0.4))
    return float(np.sqrt((weight * s**2).sum()) / len(c))


def _on_grid(x, weight, points):
    """Sums of weight [N] (None: of ones) at `points` points from 0 to 1, [points]; each weight is
    shared by the two points next to its x."""
    place = np.clip(np.asarray(x, dtype=np.float64), 0, 1) * (points - 1)
    left = np.minimum(place.astype(int), points - 2)
    share = place - left
    if weight is None:
        weight = 1.0
    return (np.bincount(left, weight * (1 - share), points)
            + np.bincount(left + 1, weight * share, points))


# Ranking and abstention


def auroc(probs, labels) -> float:
    """Area under the ROC of confidence for being right: P(c_right > c_wrong) + P(equal) / 2.

    Hendrycks & Gimpel 2017. nan where all rows are right or all are wrong.
    """
    _, correct, ends = _sorted(probs, labels)
    right = np.diff(np.cumsum(correct)[ends - 1], prepend=0)    # of each group of tied rows
    wrong = np.diff(ends, prepend=0) - right
    if not right.any() or not wrong.any():
        return float('nan')
    below = np.cumsum(wrong) - wrong / 2
    return float((right * below).sum() / (float(right.sum()) * wrong.sum()))


def aurc(probs, labels) -> float:
    """Area under the risk-coverage curve: the mean over k of the error among the k most confident.

    Geifman & El-Yaniv 2017. Over all orders of rows that tie on average, so that row order does not
    matter: four rows of one confidence, one of them right, give 0.75.
    """
    return float((1 - _accuracy_of_top(probs, labels)).mean())


def excess_aurc(probs, labels) -> float:
    """`aurc` minus that of the same rows in the best order, all right ones first.

    Geifman et al. 2019, with the sum for the best order and not its integral. In [0, 1].
    """
    curve = _accuracy_of_top(probs, labels)
    k = np.arange(1, len(curve) + 1)
    n_right = round(curve[-1] * len(curve))
    return float((np.minimum(k, n_right) / k - curve).mean())


def accuracy_at_coverage(probs, labels, coverage=0.5) -> float:
    """Accuracy of the ceil(coverage N) most confident rows; ties as in `aurc`. coverage in (0, 1].
    """
    _check_range('coverage', coverage, 0, 1, low_is_in=False)
    curve = _accuracy_of_top(probs, labels)
    return float(curve[int(np.ceil(coverage * len(curve) - 1e-9)) - 1])


def coverage_at_accuracy(probs, labels, wanted=0.9) -> float:
    """The largest share k / N of most confident rows that are right with `wanted` accuracy or more.

    0 where no number of rows is; ties as in `aurc`. wanted in [0, 1].
    """
    _check_range('wanted', wanted, 0, 1)
    curve = _accuracy_of_top(probs, labels)
    enough = np.flatnonzero(curve >= wanted - 1e-12)
    return float((enough[-1] + 1) / len(curve)) if len(enough) else 0.0


def _accuracy_of_top(probs, labels):
    """[N]: the expected accuracy of the k most confident rows, tied ones in random order."""
    _, correct, ends = _sorted(probs, labels)
    count = np.diff(ends, prepend=0)
    of_group = np.diff(np.cumsum(correct)[ends - 1], prepend=0) / count
    rows = np.repeat(of_group[::-1], count[::-1])
    return np.cumsum(rows) / np.arange(1, len(rows) + 1)


# Class-wise calibration: every probability counts, not only the largest of its row. acc(B) is then
# the share of B's rows whose label is k, and conf(B) the mean of p_ik over them.


def sce(probs, labels, n_bins=15, n_options=None) -> float:
    """Static calibration error, eq. (3): 1/K sum_k sum_m |B_mk|/N |acc(B_mk) - conf(B_mk)|.

    Nixon et al. 2019; the class-wise ECE of Kull et al. 2019. For each option k all N probabilities
    p_ik, those of 0 too, are binned by equal width (closed on the right, see `bins`). Pooling
    the options into one set of bins, which some code calls SCE, is another and smaller number.

    With n_options, option k counts only the N_k rows that have it (N_k replaces N), and the mean is
    over the options that some row has. Without it, padding enters as a probability of 0 that is
    always right, which dilutes the result.
    """
    _check_count('n_bins', n_bins)
    errors = []
    for p, is_label in _by_option(probs, labels, n_options):
        index = _equal_width(p, n_bins)
        errors.append(_expected_gap(*_bin_means(index, n_bins, p, is_label)))
    return float(np.mean(errors))


def ace(probs, labels, n_ranges=15, n_options=None, equal_weights=False) -> float:
    """Adaptive calibration error, 1/K sum_k sum_r |B_rk|/N |acc(B_rk) - conf(B_rk)|.

    Nixon et al. 2019. For each option k the N probabilities p_ik are sorted and cut into R ranges
    of equal count, at round(r N / R), R being at most N. Equation (4) weighs every range by 1/R,
    which is |B_rk|/N when R divides N and no tie crosses a cut. Here the weight is |B_rk|/N, as in
    the authors' code, so that a range that a remainder or a tie made small counts as little as it
    holds; with equal_weights it is 1/R as written. Ties are never split (all go to the lowest range
    that holds one), so row order does not matter.

    Probabilities of 0 count; the authors' code drops them and divides by what is left, which is
    TACE. n_options restricts option k to the rows that have it, as in `sce`. Not the top-label
    metric that Neumann et al. 2018 and netcal call ACE.
    """
    _check_count('n_ranges', n_ranges)
    errors = []
    for p, is_label in _by_option(probs, labels, n_options):
        n_bins = min(n_ranges, len(p))
        index = _equal_mass(p, _rounded_ends(len(p), n_bins))
        count, conf, acc = _bin_means(index, n_bins, p, is_label)
        if equal_weights:
            errors.append(np.nansum(np.abs(acc - conf)) / n_bins)
        else:
            errors.append(_expected_gap(count, conf, acc))
    return float(np.mean(errors))


def tace(probs, labels, n_ranges=15, threshold=0.01, n_options=None) -> float:
    """Thresholded adaptive calibration error: `ace` over the probabilities above `threshold` alone.

    Nixon et al. 2019, who advise it for a hundred options and more. As in the authors' code each
    option's mean is over the probabilities that are left, and so is larger than `ace`; an option
    of which none is left counts 0.
    """
    _check_count('n_ranges', n_ranges)
    _check_range('threshold', threshold, 0, 1)
    errors = []
    for p, is_label in _by_option(probs, labels, n_options):
        kept = p > _round_to_tie(np.asarray(threshold, dtype=p.dtype))
        p, is_label = p[kept], is_label[kept]
        if not len(p):
            errors.append(0.0)
            continue
        n_bins = min(n_ranges, len(p))
        index = _equal_mass(p, _rounded_ends(len(p), n_bins))
        errors.append(_expected_gap(*_bin_means(index, n_bins, p, is_label)))
    return float(np.mean(errors))


# Everything at once


class Report(dict):
    """{metric: number}, which prints as a table."""

    def __str__(self):
        return '\n'.join(f'{name:24}{value:>12}' if isinstance(value, int) else
                         f'{name:24}{value:12.4f}' for name, value in self.items())


def report(probs, labels, n_options=None, *, scores=None) -> Report:
    """Every metric above at its defaults, as plain Python numbers that json.dumps accepts.

    accuracy_low and accuracy_high are the 95 % Wilson interval; nll is in nats; mce_count is the
    size of mce's bin; reliability, resolution, uncertainty and within_bin are `murphy`'s. auroc is
    nan where it is not defined. From a confidence [N], those metrics that need no more. scores, as
    `nll` takes them, give the exact nll.
    """
    confidence, correct = top_label(probs, labels)
    # sorted once, since sorting what is sorted costs little; ties stay in the order given
    order = np.argsort(confidence, kind='stable')
    top = confidence[order], correct[order]
    found = Report(n=len(correct), accuracy=accuracy(*top))
    found['accuracy_low'], found['accuracy_high'] = wilson_interval(*top)
    found |= {'confidence': mean_confidence(*top), 'gap': gap(*top)}
    whole = np.ndim(probs) == 2
    if scores is not None and not whole:
        raise ValueError('scores belong to probs [N, K], not to a confidence [N]')
    if whole:
        bits = entropy(probs, labels)
        found |= {
            'entropy_bits': bits,
            'entropy_nats': bits * float(np.log(2)),
            'entropy_share': entropy(probs, labels, 'share', n_options),
            'nll': nll(probs, labels, scores=scores),
            'brier': brier(probs, labels),
        }
    found |= {
        'ece': ece(*top),
        'ece_15': ece(*top, 15),
        'mce': mce(*top),
        'mce_count': mce_bin(*top)[1],
        'ece_equal_mass': ece_equal_mass(*top),
        'ece_sweep': ece_sweep(*top),
        'ece_debiased': ece_debiased(*top),
    }
    if whole:
        found |= {
            'sce': sce(probs, labels, n_options=n_options),
            'ace': ace(probs, labels, n_options=n_options),
            'tace': tace(probs, labels, n_options=n_options),
        }
    found |= {
        'rmsce': rmsce(*top),
        'mad': mad(*top),
        'rmsce_hendrycks': rmsce_hendrycks(*top),
        'mad_hendrycks': mad_hendrycks(*top),
        'rms_mmlu_repo': rms_mmlu_repo(*top),
        'ks_error': ks_error(*top),
        'smooth_ece': smooth_ece(*top),
        'kde_ece': kde_ece(*top),
        'mmce': mmce(*top),
        'auroc': auroc(*top),
        'aurc': aurc(*top),
        'excess_aurc': excess_aurc(*top),
    }
    parts = murphy(*top)
    return Report(found | {'brier_top_label': parts.pop('brier')} | parts)


# Resampling


def bootstrap(probs, labels, n_options=None, *, scores=None, n_resamples=1000,
              seed=0) -> dict[str, np.ndarray]:
    """The metrics of `report` on `n_resamples` samples of N rows, drawn with replacement.

    Returns {metric: float64 [n_resamples]}; percentiles 2.5 and 97.5 of these are the percentile
    interval of Efron 1979. A resample is a count for each row, so means are products of a matrix of
    counts, and a metric of sorted rows needs cumulative sums and no sorting. About
    n_resamples x N x 20 steps; memory for a few million numbers.
    """
    _check_count('n_resamples', n_resamples)
    confidence, correct = top_label(probs, labels)
    n = len(confidence)
    gaps = confidence.astype(np.float64) - correct
    columns = {'accuracy': correct, 'confidence': confidence, 'gap': gaps}
    fixed = [('ece', _equal_width(confidence, 10), 10, gaps)]       # bins that do not move
    sorted_by = [('confidence', confidence, gaps)]
    has_option = []
    if scores is not None and np.ndim(probs) != 2:
        raise ValueError('scores belong to probs [N, K], not to a confidence [N]')
    if np.ndim(probs) == 2:
        probs, labels = _check(probs, labels)
        n_options = _check_options(n_options, probs, labels)
        p = probs.astype(np.float64)
        p_label = p[np.arange(n), labels]
        rounded = _round_to_tie(probs)
        columns['entropy_bits'] = -(p * np.log2(np.where(p > 0, p, 1))).sum(1)
        columns['nll'] = _label_nll(probs, labels, scores)
        columns['brier'] = (p**2).sum(1) - 2 * p_label + 1
        for k in range(n_options.max()):
            # rows that lack the option are in no bin and sort last, weightless
            has = n_options > k
            has_option.append(has)
            p_k = rounded[:, k]
            gaps_k = np.where(has, p_k.astype(np.float64) - (labels == k), 0)
            fixed.append((f'sce {k}', np.where(has, _equal_width(p_k, 15), 15), 16, gaps_k))
            sorted_by.append((f'ace {k}', np.where(has, p_k, np.inf), gaps_k))
    design = [np.stack(list(columns.values()), 1).astype(np.float64)]
    design += [gap_of[:, None] * (index[:, None] == np.arange(width))
               for _, index, width, gap_of in fixed]
    design = np.hstack([*design, fixed[0][1][:, None] == np.arange(10),
                        *(has[:, None] for has in has_option)])
    orders = [(name, *_sorted_ties(values, gap_of)) for name, values, gap_of in sorted_by]
    random, found = np.random.default_rng(seed), []
    chunk = max(1, min(n_resamples, 300_000 // n))
    room = np.empty((2, chunk, n))      # memory asked for anew would cost as much as the sums
    # products in blocks so small that no library takes several cores for one: several such
    # processes would then wait for each other
    blocks = -(-n // 128)
    design = np.pad(design, ((0, 128 * blocks - n), (0, 0))).reshape(blocks, 128, -1)
    padded = np.zeros((-(-chunk // 16) * 16, 128 * blocks))
    for start in range(0, n_resamples, chunk):
        size = min(chunk, n_resamples - start)
        drawn = random.integers(n, size=(size, n)) + n * np.arange(size)[:, None]
        counts = padded[:size, :n]
        counts[:] = np.bincount(drawn.ravel(), minlength=size * n).reshape(size, n)
        products = padded.reshape(-1, 16, blocks, 128).swapaxes(1, 2) @ design
        sums = products.sum(1).reshape(len(padded), -1)[:size]
        values = {name: sums[:, i] / n for i, name in enumerate(columns)}
        at = len(columns)
        for name, _, width, _ in fixed:
            values[name] = np.abs(sums[:, at:at + width]).sum(1)
            if name == 'ece':
                start_of_bins = sums.shape[1] - len(has_option) - 10
                in_bin = sums[:, start_of_bins:start_of_bins + 10]
                values['mce'] = (np.abs(sums[:, at:at + 10]) / np.maximum(in_bin, 1)).max(1)
            at += width
        having = sums[:, at + 10:].astype(int)      # drawn rows that have option k
        for name, order, gap_of, last_tie in orders:
            # of the sorted rows: how many were drawn so far, and the sum of their gaps
            cumulative, gap_sums = room[:, :size]
            np.take(counts, order, axis=1, out=gap_sums, mode='clip')
            np.cumsum(gap_sums, 1, out=cumulative)
            gap_sums *= gap_of
            np.cumsum(gap_sums, 1, out=gap_sums)
            if name == 'confidence':
                ends = _chunk_ends(np.full((size, 1), n), 10)
                values['ece_equal_mass'] = _tied_bins(cumulative, gap_sums, last_tie, ends) / n
                values['rmsce'], values['mad'] = _split_bins(cumulative, gap_sums, gap_of, 100)
            else:
                ends = _rounded_ends(having[:, int(name[4:]), None], 15)
                values[name] = _tied_bins(cumulative, gap_sums, last_tie, ends)
        values['ece'] = values['ece'] / n
        for kind in ('sce', 'ace') if has_option else ():
            of_option = np.stack([values.pop(f'{kind} {k}') for k in range(len(has_option))], 1)
            values[kind] = (of_option / np.maximum(having, 1)).sum(1) / (having > 0).sum(1)
        found.append(values)
    return {name: np.concatenate([values[name] for values in found]) for name in found[0]}


def _sorted_ties(values, gaps):
    """(order that sorts values, gaps in that order, index there of the last equal value)."""
    order = np.argsort(values, kind='stable')
    ordered = values[order]
    return order, gaps[order], np.searchsorted(ordered, ordered, side='right') - 1


def _tied_bins(cumulative, sums, last_tie, ends):
    """sum_B |sum of gaps in B| per resample, from numbers of drawn rows and sums of gaps, both
    [R, N] and cumulative; bins end after the first ends [R, M] drawn rows, or after the last that
    ties with the one there."""
    at = last_tie[_places(cumulative, np.maximum(ends, 1))]
    edges = np.take_along_axis(sums, at, 1)
    return np.abs(np.diff(edges, axis=1, prepend=0)).sum(1)


def _split_bins(cumulative, sums, gaps, bin_size):
    """(rmsce, mad) per resample, from the same and the gaps [N] of the sorted rows."""
    n = len(gaps)
    n_bins = max(1, n // bin_size)
    ends = np.append(np.arange(1, n_bins) * bin_size, n)
    size = np.diff(ends, prepend=0)
    at = _places(cumulative, np.broadcast_to(ends, (len(sums), n_bins)))
    # a row drawn several times may be cut: take back what of it is beyond the end
    beyond = np.take_along_axis(cumulative, at, 1) - ends
    edges = np.take_along_axis(sums, at, 1) - beyond * gaps[at]
    in_bin = np.diff(edges, axis=1, prepend=0)
    return np.sqrt((in_bin**2 / size).sum(1) / n), np.abs(in_bin).sum(1) / n


def _places(cumulative, ends):
    """For each row of both, the first index where `cumulative` reaches each end; [R, len(ends)]."""
    resamples, n = cumulative.shape
    if n > 1000:
        return np.stack([np.searchsorted(*row) for row in zip(cumulative, ends)])
    apart = (np.arange(resamples) * (n + 1))[:, None]      # one ascending row of all
    place = np.searchsorted((cumulative + apart).ravel(), (ends + apart).ravel())
    return place.reshape(ends.shape) - np.arange(resamples)[:, None] * n


def interval(metric, probs, labels, *more, n_resamples=1000, level=0.95, method='percentile',
             seed=0) -> tuple[float, float]:
    """(low, high) of metric(probs, labels, *more) by resampling rows; any function of rows will do.

    method 'percentile' (Efron 1979) or 'bca', bias-corrected and accelerated (Efron 1987), whose
    acceleration is from a jackknife that leaves out one of up to 200 groups of rows. For `report`'s
    metrics `bootstrap` is faster by far. more: arrays with a row for each of probs' rows, or None.
    """
    if method not in ('percentile', 'bca'):
        raise ValueError(f"method must be 'percentile' or 'bca', not {method!r}")
    _check_range('level', level, 0, 1, low_is_in=False, high_is_in=False)
    _check_count('n_resamples', n_resamples)
    arrays = [None if x is None else np.asarray(x) for x in (probs, labels, *more)]
    shapes = [x.shape for x in arrays if x is not None]
    if not all(shapes) or len({shape[0] for shape in shapes}) > 1 or not shapes[0][0]:
        raise ValueError(f'every array must have the same N >= 1 rows, not the shapes {shapes}')
    n, random = len(arrays[0]), np.random.default_rng(seed)

    def of(rows):
        return metric(*(None if x is None else x[rows] for x in arrays))
    values = [of(random.integers(n, size=n)) for _ in range(n_resamples)]
    _check_defined(values)
    ends = np.array([(1 - level) / 2, (1 + level) / 2])
    if method == 'bca':
        values, value = np.array(values), of(slice(None))
        below = ((values < value).mean() + (values <= value).mean()) / 2
        bias = _normal_quantile(np.clip(below, 0.5 / n_resamples, 1 - 0.5 / n_resamples))
        groups = np.array_split(random.permutation(n), min(n, 200))
        left_out = np.array([of(np.delete(np.arange(n), g)) for g in groups if len(g) < n] or [0.0])
        _check_defined(left_out)
        off = left_out.mean() - left_out
        spread = (off**2).sum() ** 1.5
        acceleration = (off**3).sum() / (6 * spread) if spread else 0.0
        z = bias + np.array([_normal_quantile(e) for e in ends])
        # beyond the pole of 1 - acceleration x the formula would swap the ends
        ends = np.array([_normal_share(bias + x / max(1 - acceleration * x, 1e-3)) for x in z])
    low, high = np.quantile(values, ends)
    return float(low), float(high)


def paired_bootstrap(metric, probs_a, probs_b, labels, *, n_resamples=1000, level=0.95, seed=0):
    """(b - a, low, high, p) of a metric of two models' predictions for the same questions.

    probs_a and probs_b are [N, K]; or confidences [N], where both models are right in the same
    rows, as before and after scaling.
    Rows are drawn for both at once. (low, high) is the percentile interval of the difference; the
    two-sided p is twice the share of resamples on the rarer side of 0, (1 + count) / (1 + R).
    """
    a, b, labels = _check_pair(probs_a, probs_b, labels)
    _check_range('level', level, 0, 1, low_is_in=False, high_is_in=False)
    _check_count('n_resamples', n_resamples)
    random, values = np.random.default_rng(seed), np.empty(n_resamples)
    for i in range(n_resamples):
        rows = random.integers(len(labels), size=len(labels))
        values[i] = metric(b[rows], labels[rows]) - metric(a[rows], labels[rows])
    _check_defined(values)
    low, high = np.quantile(values, ((1 - level) / 2, (1 + level) / 2))
    rarer = min((values <= 0).sum(), (values >= 0).sum())
    difference = metric(b, labels) - metric(a, labels)
    return float(difference), float(low), float(high), float(min(1, 2 * (1 + rarer)
                                                                / (1 + n_resamples)))


def permutation_test(metric, probs_a, probs_b, labels, *, n_permutations=1000, seed=0):
    """(b - a, two-sided p): how often a difference as large comes from swapping a and b at random.

    Each row's two predictions are swapped with probability 1/2, Fisher 1935; p is (1 + count) /
    (1 + n_permutations).
    """
    a, b, labels = _check_pair(probs_a, probs_b, labels)
    _check_count('n_permutations', n_permutations)
    random, others = np.random.default_rng(seed), []
    difference = metric(b, labels) - metric(a, labels)
    for _ in range(n_permutations):
        swap = random.random(len(labels)) < 0.5
        if a.ndim == 2:
            swap = swap[:, None]
        others.append(metric(np.where(swap, a, b), labels) - metric(np.where(swap, b, a), labels))
    _check_defined([difference, *others])
    larger = (np.abs(others) >= abs(difference) - 1e-12).sum()
    return float(difference), float((1 + larger) / (1 + n_permutations))


def consistency_test(probs, labels, metric=ece, *, n_resamples=1000, seed=0) -> dict[str, float]:
    """How large `metric` is for a model of these confidences that is perfectly calibrated.

    Consistency resampling, Broecker & Smith 2007, and the test of Vaicenavicius et al. 2019: labels
    are drawn from probs themselves. Returns {'observed', 'expected': mean under calibration,
    'p95': its 95th percentile, 'p': (1 + how often it is at least the observed) / (1 + R)}. A
    calibrated model with 4 options and 100 questions shows an ECE of 0.088 on average.
    """
    _check_count('n_resamples', n_resamples)
    top_label(probs, labels)    # for what it refuses
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


def _check_defined(values):
    missing = np.isnan(values).sum()
    if missing:
        raise ValueError(f'the metric is nan in {missing} of {len(values)} samples of the rows, as '
                         f'auroc is where all are right; take one that is defined, or more rows')


def _check_pair(a, b, labels):
    a, b, labels = np.asarray(a), np.asarray(b), np.asarray(labels)
    if a.shape != b.shape or len(a) != len(labels):
        raise ValueError(f'both must predict the same rows, not be of shape {a.shape} and '
                         f'{b.shape} for {len(labels)} labels')
    return a, b, labels


def _normal_share(z):
    """The standard normal distribution function; error below 1e-12."""
    # the integral of the density from 0 to z
    nodes, weights = np.polynomial.legendre.leggauss(80)
    z = float(np.clip(z, -9, 9))
    u = z * (nodes + 1) / 2
    return 0.5 + (np.exp(-(u**2) / 2) * weights).sum() * z / 2 / np.sqrt(2 * np.pi)


def _normal_quantile(share):
    low, high = -9.0, 9.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _normal_share(middle) < share else (low, middle)
    return (low + high) / 2


_NODES = np.polynomial.legendre.leggauss(200)     # of Gauss's quadrature


def student_t(differences) -> tuple[float, float, float]:
    """(mean, t, two-sided p) of paired differences float [N], N >= 2, against a mean of zero.

    Student 1908: t = mean / (s / sqrt(N)) with N - 1 degrees of freedom. For groups such as
    languages, one difference each. Without any spread t is infinite and p 0, or nan for zeros.
    """
    x = _floats('differences', differences).astype(np.float64)
    if x.ndim != 1 or len(x) < 2 or not np.isfinite(x).all():
        raise ValueError(f'differences must be [N], finite, N >= 2, got {x.shape}')
    mean, spread = x.mean(), x.std(ddof=1) / np.sqrt(len(x))
    if spread == 0:
        return float(mean), float(np.sign(mean) * np.inf if mean else np.nan), 0.0 if mean else 1.0
    t = mean / spread
    return float(mean), float(t), _t_tails(t, len(x) - 1)


def mean_interval(values, level=0.95) -> tuple[float, float, float]:
    """(mean, low, high) of values float [N], N >= 2: Student's interval for the mean.

    mean -+ q s / sqrt(N) with q the quantile of t with N - 1 degrees of freedom. For seeds: one
    value each.
    """
    _check_range('level', level, 0, 1, low_is_in=False, high_is_in=False)
    x = _floats('values', values).astype(np.float64)
    if x.ndim != 1 or len(x) < 2 or not np.isfinite(x).all():
        raise ValueError(f'values must be [N], finite, N >= 2, got {x.shape}')
    low, high = 0.0, 1.0
    while _t_tails(high, len(x) - 1) > 1 - level and high < 1e15:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_tails(middle, len(x) - 1) > 1 - level else (low, middle)
    half = high * x.std(ddof=1) / np.sqrt(len(x))
    return float(x.mean()), float(x.mean() - half), float(x.mean() + half)


def _t_tails(t, freedom):
    """The probability of |T| >= |t|."""
    # I_w(freedom / 2, 1 / 2) with w = freedom / (freedom + t^2). With sin^2 for the variable the
    # integral of the beta function is that of cos^(freedom - 1), smooth, from angle to pi / 2
    angle = np.arctan(abs(t) / np.sqrt(freedom))
    nodes, weights = _NODES
    # beyond 40 of its standard deviations it is 0, and few nodes would be left for the rest
    end = min(np.pi / 2, 40 / np.sqrt(freedom))

    def area(low, high):
        u = low + (high - low) * (nodes + 1) / 2
        return (np.cos(u) ** (freedom - 1) * weights).sum() * (high - low) / 2
    return float(area(min(angle, end), end) / area(0, end))


# Calibration after training


def fit_temperature(scores, labels) -> float:
    """The temperature T > 0 whose softmax(scores / T) gives the labels the least NLL.

    scores float [N, K], logits or log-probabilities; -inf where a question lacks an option. Guo et
    al. 2017. The NLL is convex in 1/T; T is searched between 0.001 and 1000, its ends included.
    """
    scores, labels = _check_scores(scores, labels)
    right = scores[np.arange(len(labels)), labels]
    finite = np.where(np.isfinite(scores), scores, 0)

    def slope(t):           # of the NLL in 1/T
        return ((softmax(scores, t) * finite).sum(1) - right).mean()
    low, high = np.log(1e-3), np.log(1e3)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if slope(np.exp(middle)) < 0 else (middle, high)
    return float(np.exp((low + high) / 2))


def softmax(scores, temperature=1.0) -> np.ndarray:
    """softmax(scores / temperature), float64 [N, K]; a score of -inf gets 0.

    Raises ValueError unless temperature is positive and finite and each row's largest score finite.
    """
    _check_range('temperature', temperature, 0, np.inf, low_is_in=False, high_is_in=False)
    z = _floats('scores', scores).astype(np.float64) / temperature
    largest = z.max(-1, keepdims=True)
    for row in np.argwhere(~np.isfinite(largest)):
        raise ValueError(f'row {row[0]}: the largest score is {largest[tuple(row)]}, not finite')
    z = np.exp(z - largest)
    return z / z.sum(-1, keepdims=True)


def fit_platt(confidence, correct) -> tuple[float, float]:
    """(a, b) of Platt scaling: sigmoid(a logit(c) + b) is the chance that the prediction is right.

    confidence float [N] in [0, 1], correct bool [N]. Platt 1999, with its targets (n1 + 1) /
    (n1 + 2) and 1 / (n0 + 2) for 1 and 0, which keep a and b finite; Newton's method.
    """
    confidence, correct = _check_predictions(confidence, correct)
    x, n1 = _logit(confidence), correct.sum()
    target = np.where(correct, (n1 + 1) / (n1 + 2), 1 / (len(x) - n1 + 2))
    design, ab = np.stack([x, np.ones_like(x)], 1), np.array([1.0, 0.0])

    def loss(ab):
        z = design @ ab
        return (np.logaddexp(0, z) - target * z).sum() + 1e-9 * ab @ ab
    for _ in range(100):
        p = 1 / (1 + np.exp(-design @ ab))
        gradient = design.T @ (p - target) + 2e-9 * ab
        hessian = (design * (p * (1 - p))[:, None]).T @ design + 2e-9 * np.eye(2)
        step = np.linalg.solve(hessian, gradient)
        while loss(ab - step) > loss(ab) and np.abs(step).max() > 1e-12:
            step = step / 2
        ab = ab - step
        if np.abs(step).max() < 1e-10:
            break
    return float(ab[0]), float(ab[1])


def apply_platt(confidence, a, b) -> np.ndarray:
    """sigmoid(a logit(c) + b), float64 [N]."""
    for name, value in (('a', a), ('b', b)):
        _check_range(name, value, -np.inf, np.inf, low_is_in=False, high_is_in=False)
    z = a * _logit(_check_confidence(confidence)) + b
    return np.exp(-np.logaddexp(0, -z))


def fit_vector(scores, labels, ridge=1e-6) -> tuple[np.ndarray, np.ndarray]:
    """(w [K], b [K]) of vector scaling, softmax(w * scores + b), with the least NLL.

    Guo et al. 2017. scores float [N, K] as in `fit_temperature`. Damped Newton on the convex NLL
    plus ridge (|w - 1|^2 + |b|^2), which decides between b that differ by a constant. Options have
    places: meant for letters or classes, not for texts in random order.
    """
    scores, labels = _check_scores(scores, labels)
    _check_range('ridge', ridge, 0, np.inf, low_is_in=False, high_is_in=False)
    n, K = scores.shape
    has = np.isfinite(scores)
    x = np.where(has, scores, 0)
    wb, start = np.concatenate([np.ones(K), np.zeros(K)]), np.repeat((1.0, 0.0), K)
    target = np.arange(K) == labels[:, None]

    def log_probs(wb):
        z = np.where(has, wb[:K] * x + wb[K:], -np.inf)
        z = z - z.max(1, keepdims=True)
        return z - np.log(np.exp(z).sum(1, keepdims=True))

    def loss(wb):
        return -log_probs(wb)[np.arange(n), labels].mean() + ridge * ((wb - start) ** 2).sum()
    for _ in range(100):
        p = np.exp(log_probs(wb))
        error = p - target
        gradient = np.concatenate([(error * x).mean(0), error.mean(0)]) + 2 * ridge * (wb - start)
        design = np.concatenate([p * x, p], 1)
        hessian = -design.T @ design / n + 2 * ridge * np.eye(2 * K)
        for i, row in enumerate((p * x * x, p * x, p)):
            diagonal = row.mean(0)
            for block in ((0, 0),) if i == 0 else ((0, K), (K, 0)) if i == 1 else ((K, K),):
                hessian[block[0] + np.arange(K), block[1] + np.arange(K)] += diagonal
        step = np.linalg.solve(hessian, gradient)
        while loss(wb - step) > loss(wb) and np.abs(step).max() > 1e-12:
            step = step / 2
        wb = wb - step
        if np.abs(step).max() < 1e-9:
            break
    return wb[:K], wb[K:]


def apply_vector(scores, w, b) -> np.ndarray:
    """softmax(w * scores + b), float64 [N, K]; a score of -inf keeps probability 0."""
    scores, w, b = (_floats(name, x).astype(np.float64)
                    for name, x in (('scores', scores), ('w', w), ('b', b)))
    if scores.ndim != 2 or not w.shape == b.shape == scores.shape[1:]:
        raise ValueError(f'scores must be [N, K], w and b [K], not of shape {scores.shape}, '
                         f'{w.shape} and {b.shape}')
    for row, option in np.argwhere(np.isnan(scores) | (scores == np.inf)):
        raise ValueError(f'row {row}: the score of option {option} is {scores[row, option]}')
    has = np.isfinite(scores)
    return softmax(np.where(has, w * np.where(has, scores, 0) + b, -np.inf))


def fit_histogram(confidence, correct, n_bins=15) -> np.ndarray:
    """Histogram binning: acc(B) of each bin of `bins`, its middle where it is empty; [n_bins].

    Zadrozny & Elkan 2001, for the confidence of the prediction.
    """
    _check_count('n_bins', n_bins)
    confidence, correct = _check_predictions(confidence, correct)
    confidence = _round_to_tie(confidence)
    _, _, acc = _bin_means(_equal_width(confidence, n_bins), n_bins, confidence, correct)
    return np.where(np.isnan(acc), (np.arange(n_bins) + 0.5) / n_bins, acc)


def apply_histogram(confidence, values) -> np.ndarray:
    """The value of each confidence's bin, float64 [N]."""
    values = _floats('values', values)
    if values.ndim != 1 or not len(values):
        raise ValueError(f'values must be [n_bins], not of shape {values.shape}')
    return values[_equal_width(_round_to_tie(_check_confidence(confidence)), len(values))]


def fit_isotonic(confidence, correct) -> tuple[np.ndarray, np.ndarray]:
    """(x, y), both ascending, of the non-decreasing step function nearest to `correct`.

    Isotonic regression, Zadrozny & Elkan 2002, by pooling adjacent violators. x are the ends of the
    pools, so that `apply_isotonic` gives what scikit-learn's IsotonicRegression predicts.
    """
    confidence, correct = _check_predictions(confidence, correct)
    confidence = _round_to_tie(confidence)
    x, index, weight = np.unique(confidence.astype(np.float64), return_inverse=True,
                                 return_counts=True)
    pools = []      # [mean, weight, first, last]
    for i, (total, count) in enumerate(zip(np.bincount(index, correct), weight)):
        pools.append([total / count, count, i, i])
        while len(pools) > 1 and pools[-2][0] >= pools[-1][0]:
            mean, count, _, last = pools.pop()
            before = pools[-1]
            before[0] = (before[0] * before[1] + mean * count) / (before[1] + count)
            before[1], before[3] = before[1] + count, last
    ends = [(x[at], mean) for mean, _, first, last in pools for at in sorted({first, last})]
    return np.array([a for a, _ in ends]), np.array([b for _, b in ends])


def apply_isotonic(confidence, x, y) -> np.ndarray:
    """The fitted value, float64 [N]; between two x a straight line, beyond them the nearest y."""
    x, y = _floats('x', x), _floats('y', y)
    if x.ndim != 1 or x.shape != y.shape or not len(x) or not (np.diff(x) > 0).all():
        raise ValueError('x and y must be what fit_isotonic returned: [M] each, x ascending')
    confidence = _round_to_tie(_check_confidence(confidence))
    return np.interp(confidence.astype(np.float64), x, y)


def _logit(confidence):
    c = np.clip(confidence.astype(np.float64), 1e-12, 1 - 1e-12)
    return np.log(c) - np.log1p(-c)


# Binning


def top_label(probs, labels) -> tuple[np.ndarray, np.ndarray]:
    """(confidence [N] in probs' precision, rounded for ties; whether the prediction is right, bool
    [N]): what every measure of the prediction is computed from. The first of tied options counts.
    """
    probs = _array('probs', probs)
    if probs.ndim == 1:
        confidence, correct = _check_predictions(probs, labels)
        return _round_to_tie(confidence), correct
    probs, labels = _check(probs, labels)
    largest = probs.max(1)
    confidence = _round_to_tie(largest)
    ties_with_largest = probs >= np.minimum(confidence - 10**-TIE_DECIMALS / 2, largest)[:, None]
    return confidence, ties_with_largest.argmax(1) == labels


def _round_to_tie(values):
    """values to 12 decimals if they are float64, else as they are; see the top of the file."""
    return np.round(values, TIE_DECIMALS) if values.dtype == np.float64 else values


def _sorted(probs, labels):
    """(confidence float64 [N], correct bool [N], ends): rows by ascending confidence, tied rows in
    the order given; each group of tied rows stops before its index in ends."""
    confidence, correct = top_label(probs, labels)
    order = np.argsort(confidence, kind='stable')
    ordered = confidence[order].astype(np.float64)
    return ordered, correct[order], np.flatnonzero(np.append(ordered[1:] != ordered[:-1], True)) + 1


def _by_option(probs, labels, n_options):
    """For each option k that a row has: p_ik, rounded for ties, and [label_i = k], over the rows
    that have it."""
    probs, labels = _check(probs, labels)
    n_options = _check_options(n_options, probs, labels)
    for k in range(n_options.max()):
        has_option = n_options > k
        yield _round_to_tie(probs[has_option, k]), labels[has_option] == k


def _equal_width(values, n_bins):
    """Bin 0..n_bins-1 of each value, rounded for ties: ((m-1)/M, m/M], and 0 in the first."""
    edges = _round_to_tie((np.arange(1, n_bins) / n_bins).astype(values.dtype))
    return np.searchsorted(edges, values, side='left')


def _chunk_ends(n, n_bins):
    """Where n rows are cut into n_bins chunks, the first n mod n_bins of them one row longer."""
    m = np.arange(1, n_bins + 1)
    return m * (n // n_bins) + np.minimum(m, n % n_bins)


def _rounded_ends(n, n_bins):
    """Where n rows are cut into n_bins ranges, at round(r n / n_bins)."""
    return np.round(np.arange(1, n_bins + 1) * (n / n_bins)).astype(int)


def _equal_mass(values, ends):
    """Bin of each value when the sorted values are cut after the first ends[0], ends[1], ... N."""
    ends = np.asarray(ends)
    few = len(ends) < 50        # then a partition is faster than a sort
    ordered = np.partition(values, np.unique(ends - 1)) if few else np.sort(values)
    largest_in_bin = ordered[ends - 1]
    return np.searchsorted(largest_in_bin, values, side='left')


def _adaptive_bins(probs, labels, bin_size):
    """|B|, conf(B) and acc(B) of the bins that `rmsce` describes."""
    _check_count('bin_size', bin_size)
    confidence, correct = top_label(probs, labels)
    n = len(confidence)
    n_bins = max(1, n // bin_size)
    index = np.empty(n, dtype=int)
    index[np.argsort(confidence, kind='stable')] = np.minimum(np.arange(n) // bin_size, n_bins - 1)
    return _bin_means(index, n_bins, confidence, correct)


def _bin_means(index, n_bins, confidence, correct):
    """|B|, conf(B) and acc(B), each [n_bins]; the last two are nan where a bin is empty."""
    count = np.bincount(index, minlength=n_bins)
    with np.errstate(invalid='ignore'):  # 0/0 in an empty bin
        conf = np.bincount(index, confidence, n_bins) / count
        acc = np.bincount(index, correct, n_bins) / count
    return count, conf, acc


def _expected_gap(count, confidence, accuracy) -> float:
    """sum_B |B|/N |acc(B) - conf(B)|, over the non-empty bins."""
    return float(np.nansum(count * np.abs(accuracy - confidence)) / count.sum())


# Input


def _array(name, values):
    """values as an array; ValueError for masked entries and for rows of unequal length."""
    if np.ma.is_masked(values):
        raise ValueError(f'{name} has masked entries, which would count as values: leave them out')
    try:
        return np.asarray(values)
    except ValueError:
        raise ValueError(f'{name} has rows of different length; pad the rows of probs with zeros '
                         f'on the right and give n_options') from None


def _floats(name, values):
    """values as an array of real numbers, in the precision that they have up to float64."""
    values = _array(name, values)
    if values.dtype.kind in 'OSUcmM':
        raise ValueError(f'{name} must be real numbers, not {values.dtype}')
    if values.dtype in (np.float16, np.float32, np.float64):
        return values
    try:
        return values.astype(np.float64)
    except (TypeError, ValueError):
        raise ValueError(f'{name} must be real numbers, not {values.dtype}') from None


def _check(probs, labels):
    """probs float [N, K] and labels int [N] as arrays; ValueError for what no metric can use."""
    probs = _floats('probs', probs)
    if probs.ndim != 2 or probs.size == 0:
        raise ValueError(f'probs must be [N, K] with N, K >= 1, not of shape {probs.shape}')
    labels = _check_labels(labels, *probs.shape)

    # Each loop below ends at the first row it finds.
    for row, option in np.argwhere(~(probs >= 0)):
        raise ValueError(
            f'row {row}: probability of option {option} is {probs[row, option]}, not 0 or more'
        )
    total = probs.sum(1, dtype=np.float64)
    for row in np.flatnonzero(np.abs(total - 1) > SUM_TOLERANCE):
        raise ValueError(f'row {row}: probabilities sum to {total[row]:.6g}, not to 1')
    return probs, labels


def _check_labels(labels, n, k):
    """labels int [n] as an array; ValueError for one that is not among k options."""
    labels = _array('labels', labels)
    if labels.shape != (n,):
        raise ValueError(f'labels must be [{n}], one per row of probs, not of shape {labels.shape}')
    if not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(f'labels must be integers, not {labels.dtype}')
    for row in np.flatnonzero((labels < 0) | (labels >= k)):
        raise ValueError(f'row {row}: label {labels[row]} is not one of the options 0 to {k - 1}')
    return labels


def _check_scores(scores, labels):
    """scores float64 [N, K], -inf for a missing option, and labels int [N] as arrays."""
    scores = _floats('scores', scores).astype(np.float64)
    if scores.ndim != 2 or scores.size == 0 or np.shape(labels) != (len(scores),):
        raise ValueError(f'scores must be [N, K] and labels [N], not of shape {scores.shape} and '
                         f'{np.shape(labels)}')
    labels = _check_labels(labels, *scores.shape)
    for row in np.flatnonzero(~np.isfinite(scores.max(1))):     # nan, too, comes through max
        raise ValueError(f'row {row}: the scores are {scores[row]}')
    for row in np.flatnonzero(~np.isfinite(scores[np.arange(len(labels)), labels])):
        raise ValueError(f'row {row}: label {labels[row]} is not one of its options, its score is '
                         f'{scores[row, labels[row]]}')
    return scores, labels


def _check_confidence(confidence):
    """confidence float [N] as an array; ValueError for one outside [0, 1]."""
    confidence = _floats('confidence', confidence)
    if confidence.ndim != 1:
        raise ValueError(f'confidence must be [N], not of shape {confidence.shape}')
    for row in np.flatnonzero(~((confidence >= 0) & (confidence <= 1 + SUM_TOLERANCE))):
        raise ValueError(f'row {row}: confidence is {confidence[row]}, not from 0 to 1')
    return confidence


def _check_predictions(confidence, correct):
    """confidence float [N] and correct bool [N] as arrays; correct may be 0 and 1."""
    if np.shape(confidence) != np.shape(correct) or np.size(confidence) == 0:
        raise ValueError(f'confidence and correct must be [N] with N >= 1, not of shape '
                         f'{np.shape(confidence)} and {np.shape(correct)}')
    confidence, correct = _check_confidence(confidence), _array('correct', correct)
    if correct.dtype.kind not in 'biuf':
        raise ValueError(f'correct must be bool, or 0 and 1, not {correct.dtype}')
    for row in np.flatnonzero((correct != 0) & (correct != 1)):
        raise ValueError(f'row {row}: correct is {correct[row]}, not 0 or 1; one-dimensional probs '
                         f'are confidences, and go with right or wrong in place of labels')
    return confidence, correct.astype(bool)


def _check_options(n_options, probs, labels):
    """n_options int [N] as an array, all K when None; ValueError where probs or labels differ."""
    n, k = probs.shape
    if n_options is None:
        return np.full(n, k)

    n_options = _array('n_options', n_options)
    if n_options.shape != (n,):
        raise ValueError(f'n_options must be [{n}], one per row, not of shape {n_options.shape}')
    if not np.issubdtype(n_options.dtype, np.integer):
        raise ValueError(f'n_options must be integers, not {n_options.dtype}')

    for row in np.flatnonzero((n_options < 1) | (n_options > k)):
        raise ValueError(f'row {row}: n_options is {n_options[row]}, not from 1 to {k}')
    for row in np.flatnonzero(labels >= n_options):
        raise ValueError(
            f'row {row}: label {labels[row]} points at padding, n_options is {n_options[row]}'
        )
    is_padding = np.arange(k) >= n_options[:, None]
    for row, option in np.argwhere(is_padding & (probs != 0)):
        raise ValueError(
            f'row {row}: padded option {option} has probability {probs[row, option]}, not 0'
        )
    return n_options


def _check_count(name, value):
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 1:
        raise ValueError(f'{name} must be a whole number, 1 or more, not {value!r}')


def _check_range(name, value, low, high, low_is_in=True, high_is_in=True):
    real = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not (real and low <= value <= high and (low_is_in or value > low)
            and (high_is_in or value < high)):
        raise ValueError(f'{name} must be a number in {"[" if low_is_in else "("}{low}, {high}'
                         f'{"]" if high_is_in else ")"}, not {value!r}')


# The program


def _parse(row):
    """(kind, values, label) of one line's object; kind is 'probs', 'log_probs' or 'confidence'."""
    if not isinstance(row, dict):
        raise ValueError(f'{row!r:.40} is not an object')
    kind = next((key for key in ('probs', 'log_probs', 'confidence') if row.get(key) is not None),
                None)
    if kind is None:
        raise ValueError('it has none of probs, log_probs and confidence')
    if kind == 'confidence':
        if row.get('correct') not in (0, 1):    # true and false are
            raise ValueError(f'correct must be true or false, not {row.get("correct")!r}')
        return kind, _json_numbers(kind, [row[kind]])[0], bool(row['correct'])
    values = _json_numbers(kind, row[kind])
    label = row['answer'] if 'answer' in row else row.get('label')
    if type(label) is not int:
        raise ValueError(f'answer must be the index of the right option, not {label!r}')
    if kind == 'log_probs' and 'n_tokens' in row:
        lengths = _json_numbers('n_tokens', row['n_tokens'])
        if len(lengths) != len(values) or min(lengths, default=0) <= 0:
            raise ValueError(f'n_tokens must be a number above 0 for each of the {len(values)} '
                             f'log_probs, not {row["n_tokens"]}')
        values = [value / length for value, length in zip(values, lengths)]
    return kind, values, label


def _json_numbers(key, values):
    if not isinstance(values, list) or not all(type(x) in (int, float) for x in values):
        raise ValueError(f'{key} must be numbers, not {values!r:.60}')
    return [float(x) for x in values]


def _read_tasks(path):
    """{task: [(line number, kind, values, label)]}, without the rows of split 'validation'."""
    tasks = {}
    with open(path, 'rb') as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode('utf-8-sig'))
                parsed = _parse(row)
                task = row.get('task', '')
                if not isinstance(task, str):
                    raise ValueError(f'task must be a string, not {task!r:.40}')
                if row.get('split') == 'validation':
                    continue
                rows = tasks.setdefault(task, [])
                if rows and (rows[0][1] == 'confidence') != (parsed[0] == 'confidence'):
                    raise ValueError(f'{parsed[0]}, but line {rows[0][0]} of the same task has '
                                     f'{rows[0][1]}: one task cannot have both')
            except (ValueError, OverflowError, RecursionError) as error:
                raise ValueError(f'{path}:{number}: {error}. Wanted: a JSON object with probs (or '
                                 f'log_probs) and answer, or confidence and correct') from None
            rows.append((number, *parsed))
    if not tasks:
        raise ValueError(f'{path}: no row to score')
    return tasks


def _report_of_rows(rows):
    """The report of the rows of one task; log_probs give the exact nll."""
    _, kinds, values, labels = zip(*rows)
    if kinds[0] == 'confidence':
        return report(np.array(values), np.array(labels))
    n_options = np.array([len(x) for x in values])
    probs = np.zeros((len(rows), max(n_options.max(), 1)))
    scores = np.full(probs.shape, -np.inf)
    for i, (kind, x) in enumerate(zip(kinds, values)):
        if kind == 'probs':
            probs[i, :len(x)] = x
            scores[i, :len(x)] = np.log(np.maximum(x, NLL_FLOOR))
        elif x:
            scores[i, :len(x)] = x
            if not np.isfinite(max(x)) or np.isnan(x).any():
                raise ValueError(f'row {i}: the log_probs are {x}')
            probs[i, :len(x)] = softmax(x)
    return report(probs, np.array(labels), n_options, scores=scores if 'log_probs' in kinds else None)


def main(arguments=None):
    """Prints the report of a file of predictions, one JSON object a line; see --help."""
    parser = argparse.ArgumentParser(
        description='Print every calibration measure of a file of predictions.',
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="""each line of the file is a JSON object of one of
  {"probs": [0.7, 0.2, 0.1], "answer": 0}               answer: index of the right option
  {"log_probs": [-3.1, -4.0], "answer": 1}              their softmax counts, each divided by its
                                                        n_tokens where a list of these is given
  {"confidence": 0.8, "correct": true}                  of the prediction alone
label does for answer; lines with "split": "validation" are left out; each "task" is reported by
itself.

example: python metrics.py out/base/samples.jsonl""")
    parser.add_argument('file', help='a .jsonl file, such as the samples.jsonl of evaluate.py')
    path = parser.parse_args(arguments).file
    try:
        for task, rows in _read_tasks(path).items():
            try:
                found = _report_of_rows(rows)
            except ValueError as error:
                at = re.match(r'row (\d+): (.*)', str(error), re.DOTALL)
                if not at:
                    raise ValueError(f'{path}: {task}: {error}') from None
                raise ValueError(f'{path}:{rows[int(at[1])][0]}: {at[2]}') from None
            print(f'{task}\n{found}\n' if task else found)
    except ValueError as error:
        sys.exit(f'error: {error}')
    except OSError as error:
        sys.exit(f'error: {path}: {error.strerror}')


if __name__ == '__main__':
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)   # `| head` ends it without a word
    main()
