"""The metrics of most tables on many resamples at once, by sums: what makes `stats.bootstrap` fast.

A resample is a count of how often each row was drawn. Means are sums of a matrix of counts [R, N]
times per-row terms [N]. A metric in bins needs sums over ranges of the sorted rows, which are
sorted once, not once per resample. Like stats.py the file needs numpy and metrics.py alone.
"""

import functools
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING or __package__ != 'nanocal':
    import metrics              # in the clone, at the top level
else:
    from . import metrics       # installed


def agreeing(fast, report):
    """Return the keys of a report whose values the `fast` sums {key: [R]} of the same rows give."""
    return {key for key in fast.keys() & report.keys() if np.isclose(
        fast[key][0], report[key], rtol=1e-9, atol=1e-9, equal_nan=True)}


@functools.cache
def edited(measures):
    """Return the keys of `measures` whose functions differ from the sums on several hundred rows.

    These have 2 to 5 options, over- and underconfident, with ties: other formulas may agree by
    chance on few rows.
    """
    random = np.random.default_rng(0)
    n_options = np.append(5, random.integers(2, 6, 349))
    scores = np.where(np.arange(5) < n_options[:, None], random.integers(-4, 4, (350, 5)), -np.inf)
    labels = np.where(random.random(350) < 0.5, scores.argmax(1), random.integers(0, n_options))
    probs = metrics.softmax(scores)
    report = metrics.report(probs, labels, n_options, scores=scores, measures=measures)
    fast = Sums(probs, labels, n_options, scores)(np.ones((1, 350), np.int32))
    return (fast.keys() & report.keys()) - agreeing(fast, report)


class Sums:
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
            probs, labels = metrics.check_probs(probs, labels)
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
    in_bin, gap = rows.fixed_bins(drawn, gaps)
    values = {'ece': gap.sum(1) / n, 'mce': (gap / np.maximum(in_bin, 1)).max(1),
              'ece_equal_mass': rows.tied_bins(drawn, gaps, metrics.equal_chunk_ends(n, 10)) / n}
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
        sce[k] = rows.fixed_bins(drawn, gaps)[1].sum(1)
        ace[k] = rows.tied_bins(drawn, gaps, metrics.rounded_chunk_ends(n_rows[k][:, None], 15))
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

    def fixed_bins(self, drawn, gaps):
        """(draws, |sum of gaps|) of each bin of equal width, [R, n_bins]."""
        return (np.diff(drawn[:, self.bin_ends], prepend=0),
                np.abs(_sums_between(gaps, self.bin_ends)))

    def tied_bins(self, drawn, gaps, ends):
        """sum_B |sum of gaps in B| per resample, [R], over bins that keep ties together.

        A bin ends after the first `ends` draws, [M] or [R, M], or after the last that ties with it.
        """
        ends = self.tie_end[_positions(drawn, np.maximum(ends, 1))]
        return np.abs(_sums_between(gaps, ends)).sum(1)


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
    ends = np.broadcast_to(ends, (len(drawn), ends.shape[-1])).astype(drawn.dtype)
    return np.stack([np.searchsorted(*pair) for pair in zip(drawn, ends, strict=True)])
