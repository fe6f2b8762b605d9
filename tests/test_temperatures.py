"""temperatures.py: a temperature per group, and shrunk to the mean of the groups"""

import math

import numpy as np
import pytest

import metrics
import scaling
from results import temperatures


def scores_of_groups(log_temperatures, n, seed=0):
    """Return (scores, labels, groups): n rows per group, the labels drawn at its temperature."""
    rng = np.random.default_rng(seed)
    groups = np.repeat(np.arange(len(log_temperatures)), n)
    scores = rng.normal(size=(len(groups), 4)) * 3 - 50
    scores[::5, 3] = -np.inf
    at = scores / np.exp(log_temperatures)[groups][:, None]
    return scores, (at + rng.gumbel(size=at.shape)).argmax(1), groups


def log_values(temperatures):
    return np.log([temperatures[i] for i in range(len(temperatures))])


def test_shrinkage_follows_the_random_effects_model():
    """DerSimonian & Laird 1986, with loops and with derivatives by differences."""
    scores, labels, groups = scores_of_groups(np.log([1.0, 1.5, 2.5]), 150)
    own, shrunk = map(log_values, temperatures.fit_temperatures(scores, labels, groups))
    assert own[1] == np.log(scaling.fit_temperature(scores[groups == 1], labels[groups == 1]))
    variances = []
    for g, t in enumerate(own):
        rows = groups == g
        low, middle, high = (-np.log(metrics.softmax(scores[rows], math.exp(x))[
            np.arange(150), labels[rows]]) for x in (t - 1e-3, t, t + 1e-3))
        slope, curvature = (high - low) / 2e-3, ((high - 2 * middle + low) / 1e-6).mean()
        variances.append(max((slope ** 2).mean(), curvature) / 150 / curvature ** 2)
    w = [1 / v for v in variances]
    fixed = sum(a * b for a, b in zip(w, own, strict=True)) / sum(w)
    q = sum(a * (b - fixed) ** 2 for a, b in zip(w, own, strict=True))
    tau2 = max(0, (q - 2) / (sum(w) - sum(a * a for a in w) / sum(w)))
    pull = [1 / (v + tau2) for v in variances]
    mean = sum(a * b for a, b in zip(pull, own, strict=True)) / sum(pull)
    assert tau2 > 0
    assert shrunk == pytest.approx([(tau2 * t + v * mean) / (tau2 + v)
                                    for t, v in zip(own, variances, strict=True)], abs=1e-4)


def test_a_group_without_a_temperature_of_its_own_takes_the_mean():
    scores, labels, groups = scores_of_groups(np.log([2.0, 2.0, 2.0]), 100)
    certain = groups == 1
    labels[certain] = scores[certain].argmax(1)
    own, shrunk = temperatures.fit_temperatures(scores, labels, np.array(['a', 'b', 'c'])[groups])
    assert own['b'] == pytest.approx(0.001)
    both = sorted(own[x] for x in 'ac')
    assert both[0] <= shrunk['b'] <= both[1]
    # none has one: all rows together
    own, shrunk = temperatures.fit_temperatures(scores[certain], labels[certain], groups[certain])
    assert list(own) == [1] and shrunk[1] == pytest.approx(own[1]) == pytest.approx(0.001)
    one = temperatures.fit_temperatures(scores[:1], labels[:1], ['x'])     # a single row
    assert all(1e-3 <= t['x'] <= 1e3 for t in one)
    with pytest.raises(ValueError, match='groups must be .N., N = 1, not of shape'):
        temperatures.fit_temperatures([[0.0, 1.0]], [0], ['a', 'b'])
