"""Calibration after training: fit a scaling on held-out predictions, apply it to others.

    temperature  fit_temperature(scores, labels), then metrics.softmax(scores, temperature)
                 fit_temperature_to_base(scores, base_scores) without labels
    vector       fit_vector(scores, labels), apply_vector(scores, w, b)
    prior        fit_prior(scores) without labels, apply_prior(scores, log_prior)
                 normalized_max(scores, p), a confidence for abstention alone
    Platt        fit_platt(confidence, correct), apply_platt(confidence, a, b)
    histogram    fit_histogram(confidence, correct), apply_histogram(confidence, values)
    isotonic     fit_isotonic(confidence, correct), apply_isotonic(confidence, x, y)
    groups       fit_multicalibration(confidence, correct, groups),
                 apply_multicalibration(confidence, groups, shifts)

The first three take scores float [N, K], logits or log-probabilities with -inf where a question
lacks an option, and labels int [N]; they return a distribution over the options. The others take
the confidence of the predicted option, float [N] in [0, 1], and whether it is right, bool or 0/1
[N]; they return a new confidence. Invalid input raises ValueError that names the row. `save` writes
what the fits return to a JSON file, `load` reads it.
"""

import hashlib
import json
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING or __package__ != 'nanocal':
    import metrics              # in the clone, at the top level
else:
    from . import metrics       # installed, as nanocal.scaling


def fit_temperature(scores, labels) -> float:
    """Return the temperature T > 0 at which softmax(scores / T) has the least NLL.

    Guo et al. 2017. T is from 0.001 to 1000. If the NLL is still falling at one of these ends, the
    end is returned: 0.001 if every label has the highest score of its row.
    """
    return metrics.best_temperature(*_check_labeled(scores, labels))


def fit_temperature_to_base(scores, base_scores) -> float:
    """Return the temperature of a tuned model that needs no labels but the base model's scores.

    DACA, Luo et al. 2025 (arXiv 2505.16690): the T of least KL divergence from softmax(base_scores)
    to softmax(scores / T), over the rows where both models predict the same option; the others make
    T too large. Both scores are float [N, K], -inf for a missing option. Raises ValueError if every
    prediction differs.
    """
    scores, base_scores = _check_scores(scores), _check_scores(base_scores, 'base_scores')
    if scores.shape != base_scores.shape:
        raise ValueError(f'scores and base_scores must be of one shape [N, K], not {scores.shape} '
                         f'and {base_scores.shape}')
    metrics.refuse(np.isneginf(scores) != np.isneginf(base_scores), lambda i, k:
                   f'option {k} has the score {scores[i, k]}, and {base_scores[i, k]} of the base')
    probs, base = metrics.softmax(scores), metrics.softmax(base_scores)
    same = metrics.predicted(probs) == metrics.predicted(base)
    if not same.any():
        raise ValueError('the two models have no prediction in common')
    return metrics.best_temperature(scores[same], base[same])


def fit_vector(scores, labels, ridge=1e-6) -> tuple[np.ndarray, np.ndarray]:
    """Return (w [K], b [K]) of vector scaling, softmax(w * scores + b), with the least NLL.

    Guo et al. 2017. Newton's method on the NLL plus ridge * (|w - 1|^2 + |b|^2); the ridge, above
    0, chooses among the b that differ by a constant. For letters or classes, not for answers in
    random order.
    """
    scores, is_label = _check_labeled(scores, labels)
    metrics.check_range('ridge', ridge, '(0, inf)')
    n, K = scores.shape
    has = np.isfinite(scores)
    x = np.where(has, scores, 0)

    def nll(wb):
        z = np.where(has, wb[:K] * x + wb[K:], -np.inf)
        z = z - z.max(1, keepdims=True)
        log_p = z - np.log(np.exp(z).sum(1, keepdims=True))
        p = np.exp(log_p)
        error = p - is_label
        # mean of diag(p) - p p^T, in w and b: [x p x, x p; p x, p] on the diagonals of the blocks
        ww, wb_block, bb = (np.diag(row.mean(0)) for row in (p * x * x, p * x, p))
        design = np.concatenate([p * x, p], 1)
        hessian = np.block([[ww, wb_block], [wb_block, bb]]) - design.T @ design / n
        return -log_p[is_label].mean(), np.append((error * x).mean(0), error.mean(0)), hessian

    wb = _minimize_convex(nll, np.repeat((1.0, 0.0), K), ridge)
    return wb[:K], wb[K:]


def apply_vector(scores, w, b) -> np.ndarray:
    """Return softmax(w * scores + b), float64 [N, K]; an option of score -inf has probability 0."""
    scores = _check_scores(scores)
    w = metrics.real_array('w', w)
    b = metrics.real_array('b', b)
    if not w.shape == b.shape == scores.shape[1:]:
        raise ValueError(f'w and b must be [K], K = {scores.shape[1]}, not of shape {w.shape} and '
                         f'{b.shape}')
    has = np.isfinite(scores)
    return metrics.softmax(np.where(has, w * np.where(has, scores, 0) + b, -np.inf))


def fit_prior(scores) -> np.ndarray:
    """Return the log of each option's mean probability over the rows that have it, float64 [K].

    Batch calibration, Zhou et al. 2024 (arXiv 2309.17249): `apply_prior` removes what the model
    prefers whatever the question. For letters or classes, not for answers in random order.
    """
    probs = metrics.softmax(_check_scores(scores))
    n = np.isfinite(scores).sum(0)
    mean = np.where(n, probs.sum(0) / np.maximum(n, 1), 1 / len(n))
    return np.log(np.maximum(mean, np.finfo(float).tiny))


def apply_prior(scores, log_prior) -> np.ndarray:
    """Return softmax(scores - log_prior), float64 [N, K]: probabilities / prior, normalized.

    log_prior: [K], such as that of `fit_prior`; or [N, K], for contextual calibration (Zhao et al.
    2021) the log-probabilities of each row's options after a prompt without content.
    """
    scores, log_prior = _check_scores(scores), metrics.real_array('log_prior', log_prior)
    if log_prior.shape not in (scores.shape, scores.shape[1:]):
        raise ValueError(f'log_prior must be [K] or [N, K] like scores, {scores.shape}, not of '
                         f'shape {log_prior.shape}')
    has = np.isfinite(scores)
    return metrics.softmax(np.where(has, scores - np.where(has, log_prior, 0), -np.inf))


def normalized_max(scores, p=2.0) -> np.ndarray:
    """Return the confidence max_k z_k / ||z||_p, z = scores - their mean, float64 [N] in [0, 1].

    To rank predictions, not as a probability: it undoes that smoothing lowers the largest logit
    most where the prediction is right (Xia et al. 2025, arXiv 2403.14715; Cattelan & Silva 2024,
    arXiv 2305.15508, choose p by the AURC of held-out rows). It is 0 if all scores are equal.
    """
    scores = _check_scores(scores)
    metrics.check_range('p', p, '(0, inf)')
    has = np.isfinite(scores)
    metrics.refuse(~has.any(1), lambda i: 'no score is finite')
    mean = np.where(has, scores, 0).sum(1, keepdims=True) / has.sum(1, keepdims=True)
    z = np.where(has, scores - mean, 0)
    largest = np.abs(z).max(1)      # divided first: z^p may overflow
    z = z / np.where(largest > 0, largest, 1)[:, None]
    norm = (np.abs(z) ** p).sum(1) ** (1 / p)
    return z.max(1) / np.where(norm > 0, norm, 1)


def fit_platt(confidence, correct) -> tuple[float, float]:
    """Return (a, b) of Platt scaling, P(right) = sigmoid(a logit(confidence) + b).

    Platt 1999. Its targets, (n1 + 1) / (n1 + 2) for the n1 right rows and 1 / (n0 + 2) for the n0
    wrong ones, keep a and b finite. Confidences are clipped to [1e-12, 1 - 1e-12].
    """
    confidence, correct = metrics.check_predictions(confidence, correct)
    n1 = correct.sum()
    target = np.where(correct, (n1 + 1) / (n1 + 2), 1 / (len(correct) - n1 + 2))
    design = np.stack([_logit(confidence), np.ones(len(correct))], 1)
    return tuple(fit_logistic(design, target, 1e-9).tolist())


def apply_platt(confidence, a, b) -> np.ndarray:
    """Return sigmoid(a logit(confidence) + b), float64 [N]."""
    metrics.check_range('a', a, '(-inf, inf)')
    metrics.check_range('b', b, '(-inf, inf)')
    return _sigmoid(a * _logit(metrics.check_confidence(confidence)) + b)


def fit_logistic(design, target, ridge) -> np.ndarray:
    """Return w, float64 [D], of the logistic regression P(right) = sigmoid(design @ w).

    w minimizes the summed cross-entropy to the probabilities `target` [N] plus sum(ridge * w^2).
    design: [N, D]; ridge: positive, one number or [D]. By Newton's method.
    """
    def cross_entropy(w):
        z = design @ w
        p = _sigmoid(z)
        hessian = (design * (p * (1 - p))[:, None]).T @ design
        return (np.logaddexp(0, z) - target * z).sum(), design.T @ (p - target), hessian

    return _minimize_convex(cross_entropy, np.zeros(design.shape[1]), ridge)


def fit_histogram(confidence, correct, n_bins=15) -> np.ndarray:
    """Return the accuracy in each of `n_bins` bins of equal width, float [n_bins].

    Histogram binning, Zadrozny & Elkan 2001, over metrics.bins; an empty bin's value is its center.
    """
    metrics.check_confidence(confidence)    # metrics.bins would also take probs [N, K]
    accuracy = metrics.bins(confidence, correct, n_bins)['accuracy']
    return np.where(np.isnan(accuracy), (np.arange(n_bins) + 0.5) / n_bins, accuracy)


def apply_histogram(confidence, values) -> np.ndarray:
    """Return the value of each confidence's bin, float [N], for values [n_bins]."""
    values = metrics.real_array('values', values)
    if values.ndim != 1 or not len(values):
        raise ValueError(f'values must be [n_bins], not of shape {values.shape}')
    confidence = metrics.round_for_ties(metrics.check_confidence(confidence))
    return values[metrics.equal_width_bins(confidence, len(values))]


def fit_isotonic(confidence, correct) -> tuple[np.ndarray, np.ndarray]:
    """Return (x [M], y [M]), both ascending: the non-decreasing fit of `correct` to `confidence`.

    Isotonic regression, Zadrozny & Elkan 2002, by pooling adjacent violators. x holds both ends of
    every pool, so that `apply_isotonic` equals scikit-learn's IsotonicRegression.
    """
    confidence, correct = metrics.check_predictions(confidence, correct)
    x, index, counts = np.unique(metrics.round_for_ties(confidence).astype(np.float64),
                                 return_inverse=True, return_counts=True)
    pools: list[tuple] = []     # (mean, count, first x, last x)
    for last, mean, count in zip(x, np.bincount(index, correct) / counts, counts, strict=True):
        first = last
        while pools and pools[-1][0] >= mean:
            previous, n, first, _ = pools.pop()
            mean, count = (previous * n + mean * count) / (n + count), n + count
        pools.append((mean, count, first, last))
    ends = [(end, mean) for mean, _, first, last in pools for end in sorted({first, last})]
    return tuple(np.array(ends).T)


def apply_isotonic(confidence, x, y) -> np.ndarray:
    """Return the fitted values, float64 [N]: linear between two x, the nearest y beyond them."""
    x, y = metrics.real_array('x', x), metrics.real_array('y', y)
    if x.ndim != 1 or x.shape != y.shape or not len(x) or not (np.diff(x) > 0).all():
        raise ValueError('x and y must be what fit_isotonic returned: [M] each, x ascending')
    confidence = metrics.round_for_ties(metrics.check_confidence(confidence))
    return np.interp(confidence.astype(np.float64), x, y)


def fit_multicalibration(confidence, correct, groups, n_bins=10, z=3.0) -> list[tuple]:
    """Return shifts [(grouping, group, bin, shift)], for `apply_multicalibration` in this order.

    Multicalibration, Hebert-Johnson et al. 2018, for language models Detommaso et al. 2024 (arXiv
    2404.04689). groups: int [N, J], for each of J groupings, such as language and subject, the
    index of the row's group from 0; all rows together are a further one. A cell is the rows of a
    group in one bin of confidence. As long as the mean confidence of a cell is more than z standard
    errors away from its accuracy, the cell that is furthest away is shifted to it, 1000 at most.
    """
    confidence, correct = metrics.check_predictions(confidence, correct)
    metrics.check_range('z', z, '(0, inf)')
    c, groups = confidence.astype(np.float64), _check_groups(groups, len(confidence))
    shifts: list[tuple] = []
    while len(shifts) < 1000:
        cells = groups * n_bins + metrics.equal_width_bins(c, n_bins)[:, None]
        best = (z, ())
        for j, cell in enumerate(cells.T):
            n, right, total = (np.bincount(cell, w) for w in (None, correct, c))
            error = right - total
            p = (right + 1) / (n + 2)       # also for a cell of few rows neither 0 nor 1
            distance = np.abs(error) / np.sqrt(np.maximum(n, 1) * p * (1 - p))
            k = distance.argmax()
            best = max(best, (distance[k], (j, *divmod(k.item(), n_bins), error[k] / max(n[k], 1))))
        if not best[1]:
            break
        shifts.append(best[1])
        c = _shift(c, groups, best[1], n_bins)
    return shifts


def apply_multicalibration(confidence, groups, shifts, n_bins=10) -> np.ndarray:
    """Return the shifted confidence, float64 [N]; groups and n_bins as in the fit."""
    c = metrics.check_confidence(confidence).astype(np.float64)
    groups = _check_groups(groups, len(c))
    for shift in shifts:
        c = _shift(c, groups, shift, n_bins)
    return c


def _shift(c, groups, shift, n_bins):
    j, group, k, by = shift
    rows = (groups[:, j] == group) & (metrics.equal_width_bins(c, n_bins) == k)
    return np.where(rows, np.clip(c + by, 0, 1), c)


def _check_groups(groups, n):
    """Return groups as int [N, 1 + J], with a first column of 0, the group of all rows."""
    groups = np.asarray(groups)
    if groups.ndim != 2 or len(groups) != n or groups.dtype.kind not in 'iu' or (groups < 0).any():
        raise ValueError(f'groups must be int [N, J], N = {n}, of 0 or more, not {groups.dtype} of '
                         f'shape {groups.shape}')
    return np.insert(groups, 0, 0, axis=1)


# {name in a file: (the function that applies it, number of its parameters, whether to scores)}
SCALINGS: dict[str, tuple[Callable[..., np.ndarray], int, bool]] = {
    'temperature': (metrics.softmax, 1, True), 'vector': (apply_vector, 2, True),
    'prior': (apply_prior, 1, True), 'platt': (apply_platt, 2, False),
    'histogram': (apply_histogram, 1, False), 'isotonic': (apply_isotonic, 2, False)}


def save(path, fits):
    """Write fits, {task: {name in SCALINGS: [what its fit returned]}}, to a JSON file."""
    plain = {task: {name: [np.asarray(x).tolist() for x in parameters]
                    for name, parameters in by_name.items()} for task, by_name in fits.items()}
    content = {'nanocal_scaling': 1, 'fits': plain, 'checksum': _checksum(plain)}
    part = f'{path}.part'
    with open(part, 'w', encoding='utf-8') as file:
        json.dump(content, file, indent=1)
    os.replace(part, path)


def load(path) -> dict:
    """Return the fits that `save` wrote, for `apply`; ValueError names what is wrong."""
    try:
        with open(path, encoding='utf-8') as file:
            content = json.load(file)
        if content['nanocal_scaling'] != 1 or content['checksum'] != _checksum(content['fits']):
            raise ValueError('it does not match its checksum')
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise ValueError(f'{path} is damaged, edited, or not of the present scaling.save '
                         f'({error!r}); fit it again') from None
    for by_name in content['fits'].values():
        for name, parameters in by_name.items():
            if name not in SCALINGS or len(parameters) != SCALINGS[name][1]:
                raise ValueError(f'{path}: {name} with {len(parameters)} parameters; there are '
                                 f'{", ".join(SCALINGS)}')
    return content['fits']


def _checksum(fits):
    text = json.dumps(fits, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def apply(name, values, parameters) -> np.ndarray:
    """Return the scaled scores [N, K] or confidences [N]: the row `name` of SCALINGS."""
    return SCALINGS[name][0](values, *parameters)


def _check_scores(scores, name='scores'):
    """Return scores [N, K] as float64, with -inf for a missing option."""
    scores = metrics.real_array(name, scores).astype(np.float64)
    if scores.ndim != 2 or scores.size == 0:
        raise ValueError(f'{name} must be [N, K] with N, K >= 1, not of shape {scores.shape}')
    metrics.refuse(np.isnan(scores) | (scores == np.inf),
                   lambda i, k: f'the score of option {k} is {scores[i, k]}')
    return scores


def _check_labeled(scores, labels):
    """Return scores as `_check_scores` does, and [k = label_i], bool [N, K]."""
    scores = _check_scores(scores)
    labels = metrics.check_labels(labels, *scores.shape)
    is_label = np.arange(scores.shape[1]) == labels[:, None]
    metrics.refuse(np.isinf(scores[is_label]), lambda i:
                   f'label {labels[i]} is not one of its options, the scores are {scores[i]}')
    return scores, is_label


def _minimize_convex(function, start, ridge):
    """Return the x [D] of least function(x) + sum(ridge * (x - start)^2), by Newton's method.

    function(x) returns (value, gradient [D], Hessian [D, D]). Steps that would raise the value are
    halved; there are at most 100, until one is 1e-10 or less.
    """
    def derivatives(x):
        value, gradient, hessian = function(x)
        return (value + (ridge * (x - start) ** 2).sum(), gradient + 2 * ridge * (x - start),
                hessian + 2 * ridge * np.eye(len(x)))   # a ridge [D] scales the columns of I

    x, (value, gradient, hessian) = start, derivatives(start)
    for _ in range(100):
        step = np.linalg.solve(hessian, gradient)
        while np.abs(step).max() > 1e-10 and (after := derivatives(x - step))[0] > value:
            step = step / 2
        x = x - step
        if np.abs(step).max() <= 1e-10:
            break
        value, gradient, hessian = after
    return x


def _logit(confidence):
    c = np.clip(confidence.astype(np.float64), 1e-12, 1 - 1e-12)
    return np.log(c) - np.log1p(-c)


def _sigmoid(z):
    return np.exp(-np.logaddexp(0, -z))
