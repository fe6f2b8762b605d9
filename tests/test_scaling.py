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
def test_fits_take_any_form_of_correct_and_refuse_bad_rows(fit):
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


def test_settings_out_of_range_are_refused():
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
                               ([[1.0, 2.0]], [1], 'w and b must be .K.')):
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
            ([[1.0, 0.0]], [[1.0, 0.0, 0.0]], 'must be of one shape .N, K.'),
            ([[1.0, -np.inf]], [[1.0, 0.0]], 'row 0: option 1 has the score -inf, and 0.0 of the'),
            ([[1.0, np.nan]], [[1.0, 0.0]], 'row 0: the score of option 1 is nan')):
        with pytest.raises(ValueError, match=message):
            scaling.fit_temperature_to_base(scores, base)
