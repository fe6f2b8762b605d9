"""Newton's method for convex losses of a few parameters, and the logistic regression by it.

Float64 numpy; this file imports nothing of ours.
"""

import numpy as np


def minimize_convex(loss, derivatives, start):
    """Minimize `loss` by Newton's method, halving any step that would raise it.

    derivatives(x) returns (gradient [D], Hessian [D, D]); at most 100 steps, until one is < 1e-10.
    """
    x = start
    for _ in range(100):
        gradient, hessian = derivatives(x)
        step = np.linalg.solve(hessian, gradient)
        while loss(x - step) > loss(x) and np.abs(step).max() > 1e-12:
            step = step / 2
        x = x - step
        if np.abs(step).max() < 1e-10:
            break
    return x


def fit_logistic(design, target, ridge) -> np.ndarray:
    """Return w, float64 [D], of the logistic regression P(right) = sigmoid(design @ w).

    Its loss, the summed cross-entropy to the probabilities `target` [N] plus sum(ridge * w^2), is
    the least. design: [N, D]; ridge: positive, one number or [D]. By Newton's method.
    """
    def loss(w):
        z = design @ w
        return (np.logaddexp(0, z) - target * z).sum() + (ridge * w * w).sum()

    def derivatives(w):
        p = sigmoid(design @ w)
        gradient = design.T @ (p - target) + 2 * ridge * w
        hessian = (design * (p * (1 - p))[:, None]).T @ design
        return gradient, hessian + np.diag(np.broadcast_to(2.0 * ridge, len(w)))

    return minimize_convex(loss, derivatives, np.zeros(design.shape[1]))


def sigmoid(z):
    """Return 1 / (1 + exp(-z)) without overflow."""
    return np.exp(-np.logaddexp(0, -z))
