"""scaling.py: each scaling finds what was done to the scores, and refuses what is no score"""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from predictions import assert_equal_numbers, exactly, predictions, small, with_noise

import metrics
import scaling


def test_temperature_scaling_recovers_the_temperature_that_was_applied():
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(20000, 4)) * 3
    scores[::3, 3] = -np.inf
    labels = (scores / 2.5 + rng.gumbel(size=scores.shape)).argmax(1)     # softmax(scores / 2.5)
    temperature = scaling.fit_temperature(scores, labels)
    assert temperature == pytest.approx(2.5, rel=0.05)
    rows = np.arange(len(labels))
    losses = [-np.log(metrics.softmax(scores, t)[rows, labels]).mean()
              for t in (temperature, temperature * 1.01, temperature / 1.01)]
    assert min(losses) == losses[0]
    confidence = metrics.softmax(scores).max(1)
    right = rng.random(len(labels)) < scaling.apply_platt(confidence, 0.7, -0.3)
    assert scaling.fit_platt(confidence, right) == pytest.approx((0.7, -0.3), abs=0.05)
    assert all(map(math.isfinite, scaling.fit_platt([0.9, 1.0], [True, True])))
    for bad, message in (([[0.0, math.nan]], 'row 0: the score of option 1 is nan'),
                         ([[0.0, -math.inf]], 'row 0: label 1 is not')):
        with pytest.raises(ValueError, match=message):
            scaling.fit_temperature(bad, [1])


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


def test_shrunk_temperatures_are_nearer_to_the_true_ones_than_their_own_or_a_single_one():
    true = np.log(2) + 0.2 * np.random.default_rng(1).normal(size=40)
    scores, labels, groups = scores_of_groups(true, 60)
    own, shrunk = scaling.fit_temperatures(scores, labels, groups)
    assert own[3] == scaling.fit_temperature(scores[groups == 3], labels[groups == 3])
    single = np.log(scaling.fit_temperature(scores, labels))
    errors = [np.sqrt(((x - true) ** 2).mean()) for x in (log_values(own), log_values(shrunk),
                                                          single)]
    assert errors[1] < 0.85 * min(errors[0], errors[2])
    # many rows per group: its own
    own, shrunk = scaling.fit_temperatures(*scores_of_groups(true[:8], 4000))
    assert np.abs(log_values(own) - log_values(shrunk)).max() < 0.01
    # equal groups: nearer to each other
    own, shrunk = map(log_values, scaling.fit_temperatures(*scores_of_groups(0 * true, 60)))
    assert shrunk.std() < 0.6 * own.std()


def test_shrinkage_follows_the_random_effects_model():
    """DerSimonian & Laird 1986, with loops and with derivatives by differences."""
    scores, labels, groups = scores_of_groups(np.log([1.0, 1.5, 2.5]), 150)
    own, shrunk = map(log_values, scaling.fit_temperatures(scores, labels, groups))
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
    own, shrunk = scaling.fit_temperatures(scores, labels, np.array(['a', 'b', 'c'])[groups])
    assert own['b'] == pytest.approx(0.001)
    both = sorted(own[x] for x in 'ac')
    assert both[0] <= shrunk['b'] <= both[1]
    # none has one: all rows together
    own, shrunk = scaling.fit_temperatures(scores[certain], labels[certain], groups[certain])
    assert list(own) == [1] and shrunk[1] == pytest.approx(own[1]) == pytest.approx(0.001)
    one = scaling.fit_temperatures(scores[:1], labels[:1], ['x'])     # a single row
    assert all(1e-3 <= t['x'] <= 1e3 for t in one)
    with pytest.raises(ValueError, match='groups must be .N., N = 1, not of shape'):
        scaling.fit_temperatures([[0.0, 1.0]], [0], ['a', 'b'])


@pytest.mark.parametrize('shift', [0.0, 5.0, -40.0])
def test_the_temperature_of_a_separable_set_is_the_end_of_the_range(shift):
    scores = np.array([[3.0, 0.0, -1.0], [0.0, 0.5, -np.inf]]) + shift
    assert scaling.fit_temperature(scores, [0, 1]) == pytest.approx(0.001)
    assert scaling.fit_temperature(scores, [1, 0]) == pytest.approx(1000)


def test_vector_histogram_and_isotonic_scaling_fit_what_was_applied():
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(6000, 3)) * 2
    scores[::4, 2] = -np.inf
    bias = np.array([0.8, -0.3, 0.0])
    labels = (scores * [0.5, 1.0, 2.0] + bias + rng.gumbel(size=scores.shape)).argmax(1)
    w, b = scaling.fit_vector(scores, labels)
    assert w == pytest.approx([0.5, 1.0, 2.0], rel=0.15)
    assert b - b[2] == pytest.approx(bias, abs=0.2)
    probs = scaling.apply_vector(scores, w, b)
    assert probs.sum(1) == pytest.approx(1) and (probs[::4, 2] == 0).all()
    assert metrics.nll(probs, labels) < metrics.nll(metrics.softmax(scores), labels)
    c = metrics.softmax(scores).max(1)
    right = rng.random(len(c)) < c ** 2
    values = scaling.fit_histogram(c, right, 10)
    assert metrics.ece(scaling.apply_histogram(c, values), right, 1000) < 0.01
    assert values[0] == exactly(0.05)       # an empty bin
    x, y = scaling.fit_isotonic(c, right)
    fitted = scaling.apply_isotonic(c, x, y)
    assert (np.diff(y) >= 0).all() and (np.diff(x) > 0).all()
    assert np.abs(fitted - c ** 2).mean() < 0.03 and fitted.mean() == pytest.approx(right.mean())
    x, y = scaling.fit_isotonic([0.1, 0.2, 0.3, 0.4, 0.4], [True, False, False, True, False])
    assert scaling.apply_isotonic([0.05, 0.1, 0.3, 0.35, 0.4, 0.9], x, y) == pytest.approx(
        [1 / 3, 1 / 3, 1 / 3, 5 / 12, 1 / 2, 1 / 2])


@pytest.mark.parametrize('apply', [
    lambda c: scaling.apply_platt(c, 1.0, 0.0), lambda c: scaling.apply_histogram(c, [0.2, 0.8]),
    lambda c: scaling.apply_isotonic(c, [0.2, 0.8], [0.1, 0.9])])
def test_scalings_refuse_what_is_no_confidence(apply):
    assert apply([0.1, 0.9]).shape == (2,)
    for confidence, message in (([0.5, 2.0], 'row 1: confidence is 2.0, not from 0 to 1'),
                                ([-0.5], 'row 0: confidence is -0.5'), ([math.nan], 'is nan'),
                                ([[0.5, 0.5]], 'must be .N., not of shape'),
                                (['0.5'], 'real numbers')):
        with pytest.raises(ValueError, match=message):
            apply(confidence)


def test_histogram_uses_one_set_of_edges_in_every_precision():
    c = np.float32([0.1, 0.1, 0.15])        # float32's 0.1 is above the float64 one
    values = scaling.fit_histogram(c, [True, True, False], 10)
    assert scaling.apply_histogram(c, values).tolist() == [1, 1, 0]


@small
@given(predictions(), st.integers(0, 99))
def test_noise_of_rounding_changes_no_fit(case, seed):
    probs, labels = case
    confidence, correct = metrics.top_label(probs, labels)

    def fits(confidence):
        x, y = scaling.fit_isotonic(confidence, correct)
        values = scaling.fit_histogram(confidence, correct)
        return {'x': x, 'y': y, 'values': values,
                'isotonic': scaling.apply_isotonic(confidence, x, y),
                'histogram': scaling.apply_histogram(confidence, values)}
    assert_equal_numbers(fits(with_noise(confidence, seed)), fits(confidence))


def test_isotonic_pools_tied_confidences():
    for c in ([0.6 - 5e-17, 0.6 + 1.2e-16], [0.6 + 1.2e-16, 0.6 - 5e-17], [0.6, 0.6]):
        assert scaling.fit_isotonic(c, [True, False]) == ([0.6], [0.5])
    assert len(scaling.fit_isotonic([0.6, 0.6 + 2e-12], [False, True])[0]) == 2


@pytest.mark.parametrize('fit', [scaling.fit_platt, scaling.fit_histogram, scaling.fit_isotonic])
def test_fits_of_confidences(fit):
    rng = np.random.default_rng(0)
    confidence, correct = rng.random(230), rng.random(230) < 0.6
    for same in (correct.astype(int), correct.astype(float), correct.astype(int).tolist()):
        np.testing.assert_equal(fit(confidence, same), fit(confidence, correct))
    for confidence, correct, message in (
            ([0.5, 2.0], [True, True], 'row 1: confidence is 2.0, not from 0 to 1'),
            ([0.5, math.nan], [True, True], 'row 1: confidence is nan'),
            ([0.5], [True, True], 'must be .N. with N >= 1'), ([], [], 'N >= 1'),
            ([0.5, 0.5], [1, 2], 'row 1: correct is 2, not 0 or 1'),
            ([0.5], ['false'], 'correct must be bool, or 0 and 1, not <U5'),
            ([[0.5, 0.5]], [1], 'confidence must be .N., not of shape')):
        with pytest.raises(ValueError, match=message):
            fit(confidence, correct)


def test_settings_out_of_range():
    for value in (-1, math.nan, math.inf, '0.5', None, True):
        with pytest.raises(ValueError, match=r'ridge must be a number in \(0, inf\)'):
            scaling.fit_vector([[1.0, 2.0]], [0], value)
    for value in (math.nan, math.inf, '0.5', None, True):
        for a, b in ((value, 0.0), (1.0, value)):
            with pytest.raises(ValueError, match='must be a number in'):
                scaling.apply_platt([0.5], a, b)
    with pytest.raises(ValueError, match='x ascending'):
        scaling.apply_isotonic([0.5], [0.6, 0.4], [0.1, 0.2])
    for scores, w, message in (([[1.0, math.nan]], [1, 1], 'row 0: the score of option 1 is nan'),
                               ([[1.0, 2.0]], [1], 'w and b .K.')):
        with pytest.raises(ValueError, match=message):
            scaling.apply_vector(scores, w, [0, 0])


def test_temperature_to_base_is_that_of_least_divergence_where_the_models_agree():
    """DACA by its definition, on a grid: without labels, and without the changed predictions."""
    rng = np.random.default_rng(0)
    base = rng.normal(size=(200, 4))
    tuned = 2.5 * base + 1.5 * rng.normal(size=(200, 4))
    base[:50, 3] = tuned[:50, 3] = -np.inf
    same = base.argmax(1) == tuned.argmax(1)
    assert 60 < same.sum() < 195

    def divergence(t, rows):
        total = 0.0
        for i in np.flatnonzero(rows):
            p, q = metrics.softmax(base[i:i + 1])[0], metrics.softmax(tuned[i:i + 1] / t)[0]
            total += sum(a * np.log(a / b) for a, b in zip(p, q, strict=True) if a)
        return total
    t = scaling.fit_temperature_to_base(tuned, base)
    grid = t * np.geomspace(1 / 1.1, 1.1, 21)
    assert np.argmin([divergence(x, same) for x in grid]) == 10
    wider = [divergence(x, same | True) for x in t * np.geomspace(1, 2, 9)]
    assert np.argmin(wider) > 0     # with the changed predictions T is larger
    # a tuned model that is only sharper is brought back exactly
    assert scaling.fit_temperature_to_base(3 * base, base) == pytest.approx(3, rel=1e-9)


def test_temperature_to_base_refuses_models_that_do_not_fit_together():
    for scores, base, message in (
            ([[1.0, 0.0]], [[0.0, 1.0]], 'no prediction in common'),
            ([[1.0, 0.0]], [[1.0, 0.0, 0.0]], 'must be .N, K. both'),
            ([[1.0, -np.inf]], [[1.0, 0.0]], 'row 0: option 1 has the score -inf, and 0.0 of the'),
            ([[1.0, np.nan]], [[1.0, 0.0]], 'largest score is nan')):
        with pytest.raises(ValueError, match=message):
            scaling.fit_temperature_to_base(scores, base)
