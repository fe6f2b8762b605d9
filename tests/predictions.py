"""Predictions for the tests of metrics.py, scaling.py and stats.py."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

small = settings(max_examples=30, deadline=None, derandomize=True)


def calibration_case(seed, n, k, temperature, signal):
    """Seeded probs [n, k] and labels [n]; the labels follow softmax(signal * z), not the probs."""
    stream = np.random.RandomState(seed)
    z = stream.standard_normal((n, k))

    def softmax(x):
        e = np.exp(x - x.max(1, keepdims=True))
        return e / e.sum(1, keepdims=True)

    u = stream.random_sample(n)
    labels = (softmax(z * signal).cumsum(1) < u[:, None]).sum(1)
    return softmax(z * temperature), np.minimum(labels, k - 1)


def exactly(value):
    return pytest.approx(value, rel=0, abs=1e-12)


@st.composite
def predictions(draw, max_rows=25, max_options=6):
    n = draw(st.integers(1, max_rows))
    k = draw(st.integers(1, max_options))
    weights = draw(arrays(np.int64, (n, k), elements=st.integers(0, 8)))
    weights[weights.sum(1) == 0] = 1
    labels = draw(arrays(np.int64, n, elements=st.integers(0, k - 1)))
    return weights / weights.sum(1, keepdims=True), labels


def with_noise(values, seed):
    """values [N] or [N, K] in [0, 1], each changed by up to 2e-16 of itself."""
    noise = np.random.default_rng(seed).choice([-2, -1, 0, 1, 2], values.shape)
    return np.minimum(values * (1 + 1e-16 * noise), 1)


def assert_equal_numbers(numbers, expected):
    assert numbers.keys() == expected.keys()
    for key, value in expected.items():
        assert np.shape(numbers[key]) == np.shape(value), key
        assert numbers[key] == pytest.approx(value, rel=0, abs=1e-12, nan_ok=True), key
