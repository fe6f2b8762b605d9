"""Calibration metrics for multiple-choice predictions. Plain numpy, one function per metric.

Every metric takes

    probs      float [N, K]   one row per question, each row sums to 1; a question with fewer
                              than K options is padded with zero probability on the right
    labels     int [N]        index of the right option
    n_options  int [N]        sce, ace and report only: how many options each question has.
                              Without it every question has all K.

and returns a Python float, unless its docstring says otherwise. Those that look at nothing but the
prediction also take its confidence, float [N], in place of probs and whether it is right, bool [N],
in place of labels: for next-token prediction, where nobody keeps the other 256,000 probabilities.

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

Binned numbers depend on the number of bins, on how they are cut and on which side they are closed,
and are biased upwards for small N: a perfectly calibrated 4-option model has a mean ECE of about
0.09 on 100 questions, 0.03 on 1000. Print the settings and N beside the number.

Equations (2) to (6) are numbered as in Huang et al., 'Investigating the Multilingual Calibration
Effects of Language Model Instruction-Tuning', appendix A.
"""

import numpy as np

SUM_TOLERANCE = 1e-4  # float32 softmax over ten options is off by about 1e-7
NLL_FLOOR = np.finfo(np.float64).eps  # 2.2e-16: no row costs more than 36.04 nats


# Basics


def accuracy(probs, labels) -> float:
    """Share of rows whose first most probable option is the label, 1/N sum_i a_i."""
    _, correct = _top_label(probs, labels)
    return float(correct.mean())


def wilson_interval(probs, labels, z=1.96) -> tuple[float, float]:
    """Wilson score interval (low, high) of the accuracy; z = 1.96 covers 95 %.

        (acc + z^2/2N ± z sqrt(acc (1 - acc)/N + z^2/4N^2)) / (1 + z^2/N)

    Wilson 1927. Unlike acc ± z sqrt(acc (1 - acc)/N) it stays inside [0, 1] and has a width when
    all rows are right or all are wrong. Raises ValueError unless z is positive and finite.
    """
    if not 0 < z < np.inf:
        raise ValueError(f'z must be a positive number of standard errors, not {z!r}')

    mean = accuracy(probs, labels)
    n = len(probs)
    centre = mean + z**2 / (2 * n)
    half_width = z * np.sqrt(mean * (1 - mean) / n + z**2 / (4 * n**2))
    scale = 1 + z**2 / n
    # The bounds are inside [0, 1] in exact arithmetic; min and max take off the rounding.
    low = max(0.0, float((centre - half_width) / scale))
    high = min(1.0, float((centre + half_width) / scale))
    return low, high


def mean_confidence(probs, labels) -> float:
    """Mean probability of the predicted option, 1/N sum_i c_i. In [1/K, 1]."""
    confidence, _ = _top_label(probs, labels)
    return float(confidence.mean(dtype=np.float64))


def gap(probs, labels) -> float:
    """Mean confidence - accuracy, signed: above 0 is overconfident, below 0 underconfident.

    |gap| is the ECE with a single bin and a lower bound of ece, ece_equal_mass, mad and rmsce.
    """
    return mean_confidence(probs, labels) - accuracy(probs, labels)


def entropy(probs, labels, unit='bits') -> float:
    """Mean entropy of the rows, -1/N sum_i sum_k p_ik log p_ik, with 0 log 0 = 0.

    unit 'bits' (log2, the default: the published tables of Huang et al. exceed ln K, so they are in
    bits) or 'nats'. In [0, log K]; padded options add nothing. Labels do not enter, and are taken
    so that every metric is called alike. Raises ValueError for another unit.
    """
    logs = {'bits': np.log2, 'nats': np.log}
    if unit not in logs:
        raise ValueError(f"unit must be 'bits' or 'nats', not {unit!r}")

    probs, labels = _check(probs, labels)
    p = probs.astype(np.float64)
    log_p = logs[unit](np.where(p > 0, p, 1))
    # Subtracted from 0.0 and not negated, so that a model sure of everything gets 0 and not -0.
    return float(0.0 - (p * log_p).sum(1).mean())


def nll(probs, labels) -> float:
    """Negative log-likelihood of the labels in nats, -1/N sum_i log max(p_i,label, 2.2e-16).

    The floor is float64's machine epsilon, as in scikit-learn's log_loss: a label of probability 0
    costs 36.04 nats where the exact value is infinite.
    """
    probs, labels = _check(probs, labels)
    p_label = probs[np.arange(len(labels)), labels].astype(np.float64)
    return float(-np.log(np.maximum(p_label, NLL_FLOOR)).mean())


def brier(probs, labels) -> float:
    """Brier score, 1/N sum_i sum_k (p_ik - [k = label_i])^2, summed over options. In [0, 2].

    Brier 1950, and `brier_score` of lm-evaluation-harness. The binary form found elsewhere
    (scikit-learn's) is half of it at K = 2. Padded options add nothing, so questions may differ in
    their number of options.
    """
    probs, labels = _check(probs, labels)
    error = probs.astype(np.float64)
    error[np.arange(len(labels)), labels] -= 1
    return float((error**2).sum(1).mean())


# Top-label calibration


def bins(probs, labels, n_bins=10) -> dict[str, np.ndarray]:
    """What a reliability diagram shows: the rows in `n_bins` bins of equal width by confidence.

    Bin m = 1..M holds ((m-1)/M, m/M]: closed on the right, and bin 1 also holds 0. A confidence
    on an edge therefore counts in the bin below it. The edges are m/M rounded once, in probs' own
    precision; np.linspace yields 0.6000000000000001 for 6/10, and a float32 0.1 exceeds the float64
    one, and either would move such a row. A confidence above 1 by rounding is in the last bin.

    Returns {'edges': float [M+1], 'count': int [M], 'confidence': float [M], 'accuracy': float [M]}
    in ascending order, with conf(B) and acc(B) nan where a bin is empty.
    """
    _check_count('n_bins', n_bins)
    confidence, correct = _top_label(probs, labels)
    index = _equal_width(confidence, n_bins)
    count, mean, accuracy = _bin_means(index, n_bins, confidence, correct)
    edges = np.arange(n_bins + 1) / n_bins
    return {'edges': edges, 'count': count, 'confidence': mean, 'accuracy': accuracy}


def ece(probs, labels, n_bins=10) -> float:
    """Expected calibration error over equal-width bins, eq. (2): sum_B |B|/N |acc(B) - conf(B)|.

    Naeini et al. 2015. The bins are those of `bins`. The default of 10 follows Zhu et al. 2023, 'On
    the Calibration of Large Language Models and Alignment'; Guo et al. 2017 use 15. In [0, 1].
    """
    _check_count('n_bins', n_bins)
    confidence, correct = _top_label(probs, labels)
    index = _equal_width(confidence, n_bins)
    return _expected_gap(*_bin_means(index, n_bins, confidence, correct))


def mce(probs, labels, n_bins=10) -> float:
    """Maximum calibration error, max_B |acc(B) - conf(B)| over the non-empty bins of `bins`.

    Guo et al. 2017. A bin of one row counts as much as any other, so read it beside the counts.
    """
    table = bins(probs, labels, n_bins)
    return float(np.nanmax(np.abs(table['accuracy'] - table['confidence'])))


def ece_equal_mass(probs, labels, n_bins=10) -> float:
    """Expected calibration error, eq. (2), over bins of equal count.

    Nguyen & O'Connor 2015, Kumar et al. 2019. Equal to get_ece_em of uncertainty-calibration and so
    to HELM's `ece_10_bin`: rows sorted by confidence are cut into min(n_bins, N) chunks, the first
    N mod n_bins of them one row longer. Rows of one confidence are never split: all go to the
    lowest chunk that holds one of them, so row order does not matter and ties leave fewer bins.
    """
    _check_count('n_bins', n_bins)
    confidence, correct = _top_label(probs, labels)
    n_bins = min(n_bins, len(confidence))
    index = _equal_mass(confidence, _chunk_ends(len(confidence), n_bins))
    return _expected_gap(*_bin_means(index, n_bins, confidence, correct))


def rmsce(probs, labels, bin_size=100) -> float:
    """Root mean square calibration error, eq. (5): sqrt(sum_B |B|/N (acc(B) - conf(B))^2).

    Hendrycks et al. 2019. Rows sorted by confidence fill max(1, floor(N / bin_size)) bins of
    bin_size rows, and the last, most confident bin also takes the remainder: fewer than 2 bin_size
    rows are one bin, and the result is then |gap|. The published code leaves the last bin out of
    the sum while dividing by N; here it counts. The sort is stable, so rows of equal confidence
    stay in the order given, and a tie across two bins makes the result depend on that order.
    """
    count, confidence, accuracy = _adaptive_bins(probs, labels, bin_size)
    return float(np.sqrt((count * (accuracy - confidence) ** 2).sum() / count.sum()))


def mad(probs, labels, bin_size=100) -> float:
    """Mean absolute deviation calibration error, eq. (6): sum_B |B|/N |acc(B) - conf(B)|.

    Hendrycks et al. 2019, over exactly the bins of `rmsce`. Always |gap| <= mad <= rmsce.
    """
    return _expected_gap(*_adaptive_bins(probs, labels, bin_size))


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


def ace(probs, labels, n_ranges=15, n_options=None) -> float:
    """Adaptive calibration error, 1/K sum_k sum_r |B_rk|/N |acc(B_rk) - conf(B_rk)|.

    Nixon et al. 2019. For each option k the N probabilities p_ik are sorted and cut into R ranges
    of equal count, at round(r N / R), R being at most N. Equation (4) weighs every range by 1/R,
    which is |B_rk|/N when R divides N and no tie crosses a cut. Here the weight is always |B_rk|/N,
    as in the authors' code, so that a range that a remainder or a tie made small counts as little
    as it holds. Ties are never split (all go to the lowest range that holds one), so row order does
    not matter.

    Probabilities of 0 count; the authors' code drops them and divides by what is left, which is
    TACE. n_options restricts option k to the rows that have it, as in `sce`. Not the top-label
    metric that Neumann et al. 2018 and netcal call ACE.
    """
    _check_count('n_ranges', n_ranges)
    errors = []
    for p, is_label in _by_option(probs, labels, n_options):
        n_bins = min(n_ranges, len(p))
        index = _equal_mass(p, _rounded_ends(len(p), n_bins))
        errors.append(_expected_gap(*_bin_means(index, n_bins, p, is_label)))
    return float(np.mean(errors))


# Everything at once


def report(probs, labels, n_options=None) -> dict[str, int | float]:
    """Every metric above at its defaults, as plain Python numbers that json.dumps accepts.

    accuracy_low and accuracy_high are the 95 % Wilson interval; nll is in nats. From a confidence
    [N], those metrics that need no more.
    """
    accuracy_low, accuracy_high = wilson_interval(probs, labels)
    found = {
        'n': len(labels),
        'accuracy': accuracy(probs, labels),
        'accuracy_low': accuracy_low,
        'accuracy_high': accuracy_high,
        'confidence': mean_confidence(probs, labels),
        'gap': gap(probs, labels),
    }
    if np.ndim(probs) == 2:
        found |= {
            'entropy_bits': entropy(probs, labels),
            'nll': nll(probs, labels),
            'brier': brier(probs, labels),
        }
    found |= {
        'ece': ece(probs, labels),
        'mce': mce(probs, labels),
        'ece_equal_mass': ece_equal_mass(probs, labels),
    }
    if np.ndim(probs) == 2:
        found |= {
            'sce': sce(probs, labels, n_options=n_options),
            'ace': ace(probs, labels, n_options=n_options),
        }
    return found | {'rmsce': rmsce(probs, labels), 'mad': mad(probs, labels)}


# Resampling


def bootstrap(probs, labels, n_options=None, *, n_resamples=1000, seed=0) -> dict[str, np.ndarray]:
    """The metrics of `report` on `n_resamples` samples of N rows, drawn with replacement.

    Returns {metric: float64 [n_resamples]}; percentiles 2.5 and 97.5 of these are the percentile
    interval of Efron 1979. A resample is a count for each row, so means are products of a matrix of
    counts, and a metric of sorted rows needs cumulative sums and no sorting. About
    n_resamples x N x 20 steps; memory for a few million numbers.
    """
    _check_count('n_resamples', n_resamples)
    confidence, correct = _top_label(probs, labels)
    n = len(confidence)
    gaps = confidence.astype(np.float64) - correct
    columns = {'accuracy': correct, 'confidence': confidence, 'gap': gaps}
    fixed = [('ece', _equal_width(confidence, 10), 10, gaps)]       # bins that do not move
    sorted_by = [('confidence', confidence, gaps)]
    has_option = []
    if np.ndim(probs) == 2:
        probs, labels = _check(probs, labels)
        n_options = _check_options(n_options, probs, labels)
        p = probs.astype(np.float64)
        p_label = p[np.arange(n), labels]
        columns['entropy_bits'] = -(p * np.log2(np.where(p > 0, p, 1))).sum(1)
        columns['nll'] = -np.log(np.maximum(p_label, NLL_FLOOR))
        columns['brier'] = (p**2).sum(1) - 2 * p_label + 1
        for k in range(n_options.max()):
            # rows that lack the option are in no bin and sort last, weightless
            has = n_options > k
            has_option.append(has)
            gaps_k = np.where(has, p[:, k] - (labels == k), 0)
            fixed.append((f'sce {k}', np.where(has, _equal_width(probs[:, k], 15), 15), 16, gaps_k))
            sorted_by.append((f'ace {k}', np.where(has, probs[:, k], np.inf), gaps_k))
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


def student_t(differences) -> tuple[float, float, float]:
    """(mean, t, two-sided p) of paired differences float [N], N >= 2, against a mean of zero.

    Student 1908: t = mean / (s / sqrt(N)) with N - 1 degrees of freedom. For groups such as
    languages, one difference each. Without any spread t is infinite and p 0, or nan for zeros.
    """
    x = np.asarray(differences, dtype=np.float64)
    if x.ndim != 1 or len(x) < 2 or not np.isfinite(x).all():
        raise ValueError(f'differences must be [N], finite, N >= 2, got {x.shape}')
    mean, spread = x.mean(), x.std(ddof=1) / np.sqrt(len(x))
    if spread == 0:
        return float(mean), float(np.sign(mean) * np.inf if mean else np.nan), 0.0 if mean else 1.0
    t, freedom = mean / spread, len(x) - 1
    # p = I_w(freedom / 2, 1 / 2) with w = freedom / (freedom + t^2). With sin^2 for the variable
    # the integral of the beta function is that of cos^(freedom - 1), smooth, from angle to pi / 2
    angle = np.arctan(abs(t) / np.sqrt(freedom))
    nodes, weights = np.polynomial.legendre.leggauss(200)

    def area(low, high):
        u = low + (high - low) * (nodes + 1) / 2
        return (np.cos(u) ** (freedom - 1) * weights).sum() * (high - low) / 2
    return float(mean), float(t), float(area(angle, np.pi / 2) / area(0, np.pi / 2))


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
    """softmax(scores / temperature), float64 [N, K]; a score of -inf gets 0."""
    z = np.asarray(scores, dtype=np.float64) / temperature
    z = np.exp(z - z.max(-1, keepdims=True))
    return z / z.sum(-1, keepdims=True)


def fit_platt(confidence, correct) -> tuple[float, float]:
    """(a, b) of Platt scaling: sigmoid(a logit(c) + b) is the chance that the prediction is right.

    confidence float [N] in [0, 1], correct bool [N]. Platt 1999, with its targets (n1 + 1) /
    (n1 + 2) and 1 / (n0 + 2) for 1 and 0, which keep a and b finite; Newton's method.
    """
    x, correct = _logit(confidence), np.asarray(correct, dtype=bool)
    if x.ndim != 1 or x.shape != correct.shape or not len(x):
        raise ValueError(f'confidence and correct must be [N] with N >= 1, not of shape '
                         f'{x.shape} and {correct.shape}')
    n1 = correct.sum()
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
    return 1 / (1 + np.exp(-(a * _logit(confidence) + b)))


def _logit(confidence):
    c = np.clip(np.asarray(confidence, dtype=np.float64), 1e-12, 1 - 1e-12)
    return np.log(c) - np.log1p(-c)


def _check_scores(scores, labels):
    scores, labels = np.asarray(scores, dtype=np.float64), np.asarray(labels)
    if scores.ndim != 2 or scores.size == 0 or labels.shape != (len(scores),):
        raise ValueError(f'scores must be [N, K] and labels [N], not of shape {scores.shape} and '
                         f'{labels.shape}')
    for row in np.flatnonzero(np.isnan(scores).any(1) | ~np.isfinite(scores.max(1))):
        raise ValueError(f'row {row}: the scores are {scores[row]}')
    outside = (labels < 0) | (labels >= scores.shape[1])
    missing = ~np.isfinite(scores[np.arange(len(labels)), np.where(outside, 0, labels)])
    for row in np.flatnonzero(outside | missing):
        raise ValueError(f'row {row}: label {labels[row]} is not one of its options')
    return scores, labels


# Binning


def _top_label(probs, labels):
    """Confidence [N] in probs' precision, and whether the prediction is right, bool [N]."""
    if np.ndim(probs) == 1 and np.asarray(labels).dtype == bool:
        return _check_predictions(np.asarray(probs), np.asarray(labels))
    probs, labels = _check(probs, labels)
    return probs.max(1), probs.argmax(1) == labels


def _by_option(probs, labels, n_options):
    """For each option k that a row has: p_ik, and [label_i = k], over the rows that have it."""
    probs, labels = _check(probs, labels)
    n_options = _check_options(n_options, probs, labels)
    for k in range(n_options.max()):
        has_option = n_options > k
        yield probs[has_option, k], labels[has_option] == k


def _equal_width(values, n_bins):
    """Bin 0..n_bins-1 of each value: ((m-1)/M, m/M], and 0 in the first."""
    edges = (np.arange(1, n_bins) / n_bins).astype(values.dtype)
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
    largest_in_bin = np.sort(values)[ends - 1]
    return np.searchsorted(largest_in_bin, values, side='left')


def _adaptive_bins(probs, labels, bin_size):
    """|B|, conf(B) and acc(B) of the bins that `rmsce` describes."""
    _check_count('bin_size', bin_size)
    confidence, correct = _top_label(probs, labels)
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


def _check(probs, labels):
    """probs float [N, K] and labels int [N] as arrays; ValueError for what no metric can use."""
    probs = np.asarray(probs)
    labels = np.asarray(labels)
    if not np.issubdtype(probs.dtype, np.floating):
        probs = probs.astype(np.float64)
    if probs.ndim != 2 or probs.size == 0:
        raise ValueError(f'probs must be [N, K] with N, K >= 1, not of shape {probs.shape}')

    n, k = probs.shape
    if labels.shape != (n,):
        raise ValueError(f'labels must be [{n}], one per row of probs, not of shape {labels.shape}')
    if not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(f'labels must be integers, not {labels.dtype}')

    # Each loop below ends at the first row it finds.
    for row, option in np.argwhere(~(probs >= 0)):
        raise ValueError(
            f'row {row}: probability of option {option} is {probs[row, option]}, not 0 or more'
        )
    total = probs.sum(1, dtype=np.float64)
    for row in np.flatnonzero(np.abs(total - 1) > SUM_TOLERANCE):
        raise ValueError(f'row {row}: probabilities sum to {total[row]:.6g}, not to 1')
    for row in np.flatnonzero((labels < 0) | (labels >= k)):
        raise ValueError(f'row {row}: label {labels[row]} is not one of the options 0 to {k - 1}')
    return probs, labels


def _check_predictions(confidence, correct):
    if confidence.shape != correct.shape or confidence.size == 0:
        raise ValueError(f'confidence and correct must be [N] with N >= 1, not of shape '
                         f'{confidence.shape} and {correct.shape}')
    for row in np.flatnonzero(~((confidence >= 0) & (confidence <= 1 + SUM_TOLERANCE))):
        raise ValueError(f'row {row}: confidence is {confidence[row]}, not from 0 to 1')
    if not np.issubdtype(confidence.dtype, np.floating):
        confidence = confidence.astype(np.float64)
    return confidence, correct


def _check_options(n_options, probs, labels):
    """n_options int [N] as an array, all K when None; ValueError where probs or labels differ."""
    n, k = probs.shape
    if n_options is None:
        return np.full(n, k)

    n_options = np.asarray(n_options)
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
    if not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(f'{name} must be a whole number, 1 or more, not {value!r}')
