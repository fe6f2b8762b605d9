"""The metrics that no report prints: the rest of the catalogue, by the rules of metrics.py.

`metrics.kde_ece` and so on find them; `evaluate.py --all_metrics` and `python metrics.py FILE`
compute all of `MEASURES`.
"""

import bisect
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING or not __package__:    # in the clone, at the top level
    import metrics
else:                                   # installed, as nanocal.catalog
    from . import metrics


@metrics.weighted
def brier_top_label(rows):
    """Return the Brier score of the prediction, 1/N sum_i (c_i - a_i)^2, in [0, 1]."""
    return metrics.mean_of((rows.confidence - rows.correct) ** 2)


def murphy(probs, labels, n_bins=10) -> dict[str, float]:
    """Return `brier_top_label` and its terms by name.

        brier = reliability - resolution + uncertainty + within_bin
        reliability  sum_B |B|/N (conf(B) - acc(B))^2          how far confidence is off
        resolution   sum_B |B|/N (acc(B) - acc)^2              how well confidence separates rows
        uncertainty  acc (1 - acc)
        within_bin   1/N sum_B sum_i (c_i - conf(B))^2 - 2 (c_i - conf(B)) (a_i - acc(B))

    Murphy 1973, over the bins of `bins`; the last term is WBV - WBC of Stephenson et al. 2008.
    """
    confidence, correct = metrics.top_label(probs, labels)
    index = metrics.equal_width_bins(confidence, n_bins)
    confidence = confidence.astype(np.float64)
    count, conf, acc = metrics.bin_means(index, n_bins, confidence, correct)
    share, mean = count / count.sum(), correct.mean()
    c, a = confidence - conf[index], correct - acc[index]
    return {
        'brier': brier_top_label(probs, labels),
        'reliability': float(np.nansum(share * (conf - acc) ** 2)),
        'resolution': float(np.nansum(share * (acc - mean) ** 2)),
        'uncertainty': float(mean * (1 - mean)),
        'within_bin': float((c**2 - 2 * c * a).mean()),
    }


@metrics.weighted
def brier_skill(rows):
    """Return the Brier skill score of the prediction, 1 - brier_top_label / (acc (1 - acc)).

    Murphy 1973: 1 is perfect, 0 as good as the confidence acc in every row; nan if acc is 0 or 1.
    """
    right = metrics.mean_of(rows.correct)
    error = metrics.mean_of((rows.confidence - rows.correct) ** 2)

    def skill(weights):
        acc = right(weights)
        return 1 - error(weights) / metrics.or_nan(acc * (1 - acc))
    return skill


def refinement(probs, labels, *, scores=None) -> dict[str, float]:
    """Return the parts of nll and brier by name: what recalibration cannot remove, and the rest.

        nll = nll_refinement + nll_calibration,    brier = brier_refinement + brier_calibration

    Berta et al. 2025 (arXiv 2501.19195). The refinement is the loss after scaling by the
    temperature of least NLL of all rows, about 1/2N nats too small. An option of probability 0
    stays at 0, unless it is the label, which then has 2.2e-16, as in `nll`. scores: as in `nll`.
    """
    whole = {'nll': metrics.nll(probs, labels, scores=scores),
             'brier': metrics.brier(probs, labels)}
    probs, labels, _ = metrics.check_probs(probs, labels)
    is_label = np.arange(probs.shape[1]) == labels[:, None]
    if scores is None:
        p = np.where(is_label, np.maximum(probs.astype(np.float64), metrics.NLL_FLOOR), probs)
        scores = np.log(p, out=np.full(p.shape, -np.inf), where=p > 0)
    scores = metrics.real_array('scores', scores).astype(np.float64)
    scaled = scores / best_temperature(scores, is_label)
    p = metrics.softmax(scaled)
    parts = {'nll': metrics.nll(p, labels, scores=scaled), 'brier': metrics.brier(p, labels)}
    return {f'{key}_refinement': part for key, part in parts.items()} | {
        f'{key}_calibration': whole[key] - part for key, part in parts.items()}


def best_temperature(scores, targets) -> float:
    """Return the T from 0.001 to 1000 with the least cross-entropy of softmax(scores / T).

    scores are float [N, K], -inf for a missing option; targets float or bool [N, K] are
    distributions over the options, such as one-hot labels. By Newton's method on 1 / T, in which
    it is convex, with a bisection where a step does not halve the one before the last.
    """
    z = np.array(np.transpose(scores), np.float64, order='C')       # [K, N]: sums over K are fast
    z -= z.max(0)
    expected = (np.where(targets.T, z, 0) * targets.T).sum(0)
    margins = np.where(np.isfinite(z), z - expected, 0)
    n = z.shape[1]
    pieces = [(z[:, i:i + 10_000], margins[:, i:i + 10_000]) for i in range(0, n, 10_000)]
    low, high = 1e-3, 1e3
    inverse = 1.0
    before = last = np.inf
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


def kappa(probs, labels) -> float:
    """Return Cohen's kappa of the predicted options and the labels; see `cohen_kappa`."""
    probs, labels, _ = metrics.check_probs(probs, labels)
    return cohen_kappa(metrics.predicted(probs), labels)


def cohen_kappa(first, second) -> float:
    """Return the agreement of two ratings int [N] beyond chance, (s - e) / (1 - e), at most 1.

    Cohen 1960: s is the share of rows in which they are equal, e that of independent draws from
    their shares, sum_k P(first = k) P(second = k). It is nan if e is 1.
    """
    first, second = metrics.as_array('first', first), metrics.as_array('second', second)
    if first.shape != second.shape or not first.size:
        raise ValueError(f'first and second must be [N] with N >= 1, not of shape {first.shape} '
                         f'and {second.shape}')
    chance = sum((first == k).mean() * (second == k).mean() for k in np.unique(first))
    return float(((first == second).mean() - chance) / (1 - chance)) if chance < 1 else float('nan')


# Calibration of the prediction, in bins


def mce(probs, labels, n_bins=10) -> float:
    """Return the maximum calibration error, max_B |acc(B) - conf(B)|, over the bins of `bins`.

    Guo et al. 2017. A bin of one row counts as much as any other: see the count of `mce_bin`.
    """
    return mce_bin(probs, labels, n_bins)[0]


def mce_bin(probs, labels, n_bins=10) -> tuple[float, int]:
    """Return (mce, number of rows in its bin), of the lowest such bin if several are equal."""
    table = metrics.bins(probs, labels, n_bins)
    gaps = np.abs(table['accuracy'] - table['confidence'])
    at = np.nanargmax(gaps)
    return float(gaps[at]), int(table['count'][at])


def ece_sweep(probs, labels) -> float:
    """Return the ECE with as many equal-mass bins as keep accuracy monotonic in confidence.

    Roelofs et al. 2022: `ece_equal_mass` with the largest n_bins, up to 10,000, that is reached
    before the accuracy decreases from one bin to the next.
    """
    confidence, correct, tie_ends = metrics.sort_by_confidence(probs, labels)
    n = len(correct)
    last_tie = np.repeat(tie_ends, np.diff(tie_ends, prepend=0))
    best = 0.0
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
    count, conf, acc = _chunk_means(*metrics.top_label(probs, labels), n_bins, equal_chunk_ends)
    squares = count * ((acc - conf) ** 2 - acc * (1 - acc) / np.maximum(count - 1, 1))
    return float(np.sqrt(max(0.0, squares[count > 1].sum() / count.sum())))


@metrics.weighted
def ece_equal_mass(rows, n_bins=10):
    """Return the expected calibration error, eq. (2), over bins of equal count.

    Nguyen & O'Connor 2015, Kumar et al. 2019; get_ece_em of uncertainty-calibration, `ece_10_bin`
    of HELM. Rows sorted by confidence are cut into min(n_bins, N) bins, the first N mod n_bins of
    them one row longer. Tied rows stay together, in the lowest bin that has one.
    """
    metrics.check_count('n_bins', n_bins)
    sizes = rows.top.equal_mass(n_bins, equal_chunk_ends)
    return lambda weights: metrics.mean_gap(*sizes(weights))[:, 0]


def rms_mmlu_repo(probs, labels, bin_size=100) -> float:
    """Return `rmsce` of calib_tools.py in the MMLU repository: (sum_B (|B|/N gap(B))^2)^(1/4).

    With B = N / bin_size equal bins, cut as in `ace`, it is sqrt(RMSCE) B^(-1/4), so it shrinks as
    N grows. Very probably it is the column 'RMS' of Huang et al. (docs/metrics.md says why).
    """
    metrics.check_count('bin_size', bin_size)
    confidence, correct = metrics.top_label(probs, labels)
    n = len(confidence)
    count, conf, acc = _chunk_means(confidence, correct, max(1, n // bin_size),
                                    metrics.rounded_chunk_ends)
    return float(np.nansum((count / n * (acc - conf)) ** 2) ** 0.25)


# Calibration of the prediction, without bins


def ks_error(probs, labels) -> float:
    """Return the Kolmogorov-Smirnov calibration error, max_j |sum_{i <= j} (a_i - c_i)| / N.

    Gupta et al. 2021. Rows are in ascending order of confidence; tied rows enter together.
    """
    confidence, correct, tie_ends = metrics.sort_by_confidence(probs, labels)
    sums = np.cumsum(correct - confidence)
    return float(np.abs(sums[tie_ends - 1]).max() / len(confidence))


def smooth_ece(probs, labels) -> float:
    """Return the smooth ECE: the mean |residual| after smoothing by a Gaussian of the same width.

    Blasiok & Nakkiran 2023. Each row places its residual a_i - c_i at c_i on [0, 1], where it is
    smoothed by a Gaussian with reflection at both ends. The integral of |smoothed residuals| / N
    never increases with the width; the result is the one width that equals it, to 1e-6. relplot's
    smECE gives rows at 0 and 1 half their weight, and stops after ten bisections.
    """
    confidence, correct = metrics.top_label(probs, labels)
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
    confidence, correct = metrics.top_label(probs, labels)
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

    Each weight is split between the two grid points beside its confidence, on the way there and on
    the way back, so that of a point at 0 or 1 counts twice.
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
    c, correct, _ = metrics.sort_by_confidence(probs, labels)
    s = np.cumsum(((correct - c) * np.exp(-c / 0.4))[::-1])[::-1] * np.exp(c / 0.4)
    weight = np.append(1.0, -np.expm1(-2 * np.diff(c) / 0.4))
    return float(np.sqrt((weight * s**2).sum()) / len(c))


# Ranking and abstention: the expectation over the orders of tied rows


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
    gain = round(curve.mean() - curve[-1], metrics.TIE_DECIMALS)
    missing = excess_aurc(probs, labels)
    return float(gain / (gain + missing)) if 0 < curve[-1] < 1 else float('nan')


@metrics.weighted
def bas(rows):
    """Return the behavioral alignment score, 1/N sum_i c_i + (1 - a_i) log(1 - c_i), at most 1.

    Wu et al. 2026 (arXiv 2604.03216): the mean utility over thresholds t uniform in [0, 1] of a
    user who accepts answers of confidence t or more: 1 for a right answer, -t / (1 - t) for a wrong
    one, 0 for abstaining. Confidence equal to the accuracy maximizes it. 1 - c_i is at least
    2.2e-16 here, as in `nll`.
    """
    c = rows.as_given.astype(np.float64)
    cost = np.log(np.maximum(1 - c, metrics.NLL_FLOOR))
    return metrics.mean_of(c + np.where(rows.correct, 0, cost))


def accuracy_at_coverage(probs, labels, coverage=0.5) -> float:
    """Return the accuracy of the ceil(coverage * N) most confident rows, coverage in (0, 1]."""
    metrics.check_range('coverage', coverage, '(0, 1]')
    curve = _accuracy_of_top(probs, labels)
    return float(curve[int(np.ceil(coverage * len(curve) - 1e-9)) - 1])


def coverage_at_accuracy(probs, labels, wanted=0.9) -> float:
    """Return the largest share k / N of most confident rows with accuracy >= wanted, 0 if none."""
    metrics.check_range('wanted', wanted, '[0, 1]')
    enough = np.flatnonzero(_accuracy_of_top(probs, labels) >= wanted - 1e-12)
    return float((enough[-1] + 1) / len(labels)) if len(enough) else 0.0


def _accuracy_of_top(probs, labels):
    """[N]: the expected accuracy of the k most confident rows, with tied rows in random order."""
    right, count = metrics.tied_rows(probs, labels)
    return np.cumsum(np.repeat(right / count, count)) / np.arange(1, len(labels) + 1)


# Class-wise calibration of probabilities above a threshold


def tace(probs, labels, n_ranges=15, threshold=0.01, n_options=None) -> float:
    """Return the thresholded adaptive calibration error: `ace` of probabilities above `threshold`.

    Nixon et al. 2019, who advise it for a hundred options and more. As in their code, the mean of
    each option is over the probabilities that are left, 0 if none is. threshold is in [0, 1].
    """
    metrics.check_count('n_ranges', n_ranges)
    metrics.check_range('threshold', threshold, '[0, 1]')
    probs, labels, n_options = metrics.check_probs(probs, labels, n_options)
    threshold = metrics.round_for_ties(np.asarray(threshold, probs.dtype))
    gaps = np.zeros(n_options.max())
    for k in range(len(gaps)):
        p = metrics.round_for_ties(probs[:, k])
        rows = (n_options > k) & (p > threshold)
        if rows.any():
            count, conf, acc = _chunk_means(p[rows], labels[rows] == k, n_ranges,
                                            metrics.rounded_chunk_ends)
            gaps[k] = np.nansum(count * np.abs(acc - conf)) / rows.sum()
    return float(gaps.mean())


# Bins


def equal_chunk_ends(n, n_bins):
    """Return the ends of n_bins chunks of n rows, the first n mod n_bins of them one row longer."""
    m = np.arange(1, n_bins + 1)
    return m * (n // n_bins) + np.minimum(m, n % n_bins)


def _chunk_means(values, outcomes, n_bins, chunk_ends):
    """The bin_means of the N sorted values in min(n_bins, N) chunks that keep ties together."""
    metrics.check_count('n_bins', n_bins)
    n = len(values)
    ends = chunk_ends(n, min(n_bins, n))
    index = np.searchsorted(np.sort(values)[ends - 1], values, side='left')
    return metrics.bin_means(index, len(ends), values, outcomes)


# The table of all metrics


Unlisted = metrics.Unlisted
MEASURES = (
    *metrics.PRINTED,
    Unlisted('mce', 'MCE', mce, False, interval_from=np.inf),
    Unlisted('mce_count', 'rows in the bin of MCE', mce_bin, None, format='.0f', part=1,
             interval_from=np.inf),
    Unlisted('ece_equal_mass', 'ECE, equal mass', ece_equal_mass, False, interval_outcomes=100),
    Unlisted('ece_sweep', 'ECE, sweep', ece_sweep, False),
    Unlisted('ece_debiased', 'ECE, debiased', ece_debiased, False),
    Unlisted('tace', 'TACE', tace, False, 'n_options', interval_outcomes=100),
    Unlisted('rms_mmlu_repo', "RMS of MMLU's code", rms_mmlu_repo, False, interval_from=np.inf),
    Unlisted('ks_error', 'KS error', ks_error, False),
    Unlisted('smooth_ece', 'smooth ECE', smooth_ece, False),
    Unlisted('kde_ece', 'KDE ECE', kde_ece, False),
    Unlisted('mmce', 'MMCE', mmce, False),
    Unlisted('aurc', 'AURC', aurc, False),
    Unlisted('excess_aurc', 'excess AURC', excess_aurc, False),
    Unlisted('prr', 'prediction-rejection ratio', prr, True),
    Unlisted('accuracy_at_coverage', 'accuracy of the surer half', accuracy_at_coverage, True),
    Unlisted('coverage_at_accuracy', 'coverage at accuracy 0.9', coverage_at_accuracy, True),
    Unlisted('bas', 'BAS', bas, True, is_mean=True),
    Unlisted('brier_top_label', 'Brier of the prediction', brier_top_label, False, is_mean=True),
    Unlisted('brier_skill', 'Brier skill', brier_skill, True),
    Unlisted('kappa', "Cohen's kappa", kappa, True, 'options'),
    Unlisted('reliability', 'reliability', murphy, False),
    Unlisted('resolution', 'resolution', murphy, True),
    Unlisted('uncertainty', 'uncertainty', murphy, None),
    Unlisted('within_bin', 'within-bin term', murphy, None),
    Unlisted('nll_refinement', 'NLL, refinement', refinement, False, 'scores'),
    Unlisted('nll_calibration', 'NLL, calibration', refinement, False, 'scores'),
    Unlisted('brier_refinement', 'Brier, refinement', refinement, False, 'scores'),
    Unlisted('brier_calibration', 'Brier, calibration', refinement, False, 'scores'),
)
