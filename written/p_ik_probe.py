"""P(IK) by a probe: will the model answer this question right? Estimated before it writes.

Ridge logistic regression on the hidden state of the frozen model at the last token of the prompt,
fitted to the drawn answers to other questions. written/p_ik.py tunes the whole model instead.
"""

import numpy as np

from compare.scaling import fit_logistic

N_FOLDS = 5
N_COMPONENTS = 256                          # principal components of the states
PENALTIES = 1.0, 0.1, 1e-2, 1e-3, 1e-4


def cross_validated(states, shares, groups):
    """Return P(IK), float64 [N], each by a fit to the questions of the other folds.

    states: [N, D], of the prompts
    shares: [N], of right answers among those that were drawn; their mean cross-entropy is minimized
    groups: N texts, three different ones or more; questions of one group share a fold

    Every fit is shifted to the mean share of all questions, and one penalty serves all folds: with
    its own mean, a fold with few right answers would be predicted high by the others, and a useless
    probe would rank in reverse. No answer takes part in the principal components.
    """
    number = {group: i for i, group in enumerate(sorted({*groups}))}
    folds = np.array([number[group] % min(N_FOLDS, len(number)) for group in groups])
    x, shares = components(states), np.asarray(shares, np.float64)
    best, least = None, np.inf
    for penalty in PENALTIES:
        p_ik = np.empty(len(x))
        for test in (folds == fold for fold in range(folds.max() + 1)):
            shifted = shares[~test] + (shares.mean() - shares[~test].mean())
            p_ik[test] = fitted(x[~test], shifted, penalty, x[test])
        p = np.clip(p_ik, 1e-12, 1 - 1e-12)
        loss = -np.mean(shares * np.log(p) + (1 - shares) * np.log1p(-p))
        if loss < least:
            best, least = p_ik, loss
    return np.round(best, 6)    # a fit is exact to about 1e-7, and equal predictions are ties


def components(states):
    """Return the largest principal components, float64 [N, <= N_COMPONENTS], mean squared norm 1.

    Each dimension of `states` [N, D] is centered and scaled to variance 1 first.
    """
    x = np.asarray(states, np.float64)
    x = x - x.mean(0)
    x /= np.maximum(x.std(0), 1e-6)
    vectors, values, _ = np.linalg.svd(x, full_matrices=False)
    x = (vectors * values)[:, :N_COMPONENTS]
    return x / max(np.sqrt((x ** 2).sum(1).mean()), 1e-6)


def fitted(x, shares, penalty, new):
    """Return sigmoid(new @ w + b), [M], of the logistic regression of `shares` [N] on x [N, D].

    w and b have the least mean cross-entropy + penalty * |w|^2; b is nearly free.
    """
    x, new = (np.append(rows, np.ones((len(rows), 1)), 1) for rows in (x, new))
    ridge = np.full(x.shape[1], penalty * len(x))
    ridge[-1] = 1e-6
    return np.exp(-np.logaddexp(0, -new @ fit_logistic(x, shares, ridge)))
