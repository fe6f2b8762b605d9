"""RMSCE and MAD as calib_err of outlier-exposure computes them, which HLE and others copied.

Hendrycks et al. 2019. The last, most confident bin is left out of the sum but not out of N, so a
single bin gives 0; `rmsce` and `mad` of metrics.py are the formulas of the paper.
"""

import numpy as np

import metrics


def rmsce_hendrycks(probs, labels, bin_size=100):
    """Return calib_err(p='2'): sqrt(sum_B |B|/N (acc - conf)^2) without the last bin."""
    return mean_gap(probs, labels, bin_size, 2) ** 0.5


def mad_hendrycks(probs, labels, bin_size=100):
    """Return calib_err(p='1'): sum_B |B|/N |acc - conf| without the last bin."""
    return mean_gap(probs, labels, bin_size, 1)


def mean_gap(probs, labels, bin_size, power):
    """Return sum_B |B|/N |acc - conf|^power over the bins of `rmsce` but the last one."""
    confidence, correct, _ = metrics.sort_by_confidence(probs, labels)
    n_bins = max(1, len(labels) // bin_size)
    index = np.minimum(np.arange(len(labels)) // bin_size, n_bins - 1)
    count, conf, acc = metrics.bin_means(index, n_bins, confidence, correct)
    return float((count * np.abs(acc - conf) ** power)[:-1].sum() / len(labels))
