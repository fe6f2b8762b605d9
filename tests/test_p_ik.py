"""P(IK): data/p_ik.py reads samples, results/p_ik_probe.py has the probe."""

import math

import numpy as np
import pytest
from common import asking, write_rows

import metrics
from data.p_ik import load_p_ik
from results import p_ik_probe
from runtime.errors import DataError


def fitted(x, shares, penalty, new):
    """P(IK) of `new` by the least mean cross-entropy + penalty * |w|^2, by Newton's method."""
    x, new = (np.c_[rows, np.ones(len(rows))] for rows in (x, new))
    ridge, w = 2 * penalty * np.diag([*np.ones(x.shape[1] - 1), 0]), np.zeros(x.shape[1])
    for _ in range(30):
        p = 1 / (1 + np.exp(-x @ w))
        hessian = (x.T * p * (1 - p)) @ x / len(x) + ridge
        w -= np.linalg.solve(hessian, x.T @ (p - shares) / len(x) + ridge @ w)
    return 1 / (1 + np.exp(-new @ w))


@pytest.mark.slow
@pytest.mark.parametrize('n, dimensions', [(60, 7), (40, 90)])
def test_p_ik_is_a_cross_validated_ridge_logistic_regression(n, dimensions):
    rng = np.random.default_rng(0)
    states = rng.normal(size=(n, dimensions)) * rng.uniform(0.1, 30, dimensions) + 5
    shares = rng.binomial(8, 1 / (1 + np.exp(-2 * (states[:, 0] - 5)))) / 8
    groups = [f'{i:03}' for i in rng.permutation(n)]
    x = (states - states.mean(0)) / states.std(0) / math.sqrt(dimensions)
    expected, folds = np.empty(n), np.empty(n, int)
    folds[sorted(range(n), key=lambda i: (shares[i], groups[i]))] = np.arange(n) % 5
    for fold in range(5):
        test, chosen = folds == fold, folds == (fold + 1) % 5
        rest, y, losses = ~test & ~chosen, shares[chosen], {}
        for penalty in p_ik_probe.PENALTIES:
            p = fitted(x[rest], shares[rest], penalty, x[chosen])
            losses[penalty] = -np.mean(y * np.log(p) + (1 - y) * np.log(1 - p))
        best = min(losses, key=losses.get)
        expected[test] = fitted(x[~test], shares[~test], best, x[test])
    np.testing.assert_allclose(p_ik_probe.cross_validated(states, shares, groups), expected,
                               atol=2e-5)


def test_p_ik_knows_what_the_states_tell_and_no_more():
    """The same question in five languages: a fit to the others would know its answers."""
    rng = np.random.default_rng(1)
    states = np.repeat(rng.normal(size=(60, 100)), 5, 0) + 0.01 * rng.normal(size=(300, 100))
    shares = np.repeat(rng.integers(0, 2, 60), 5).astype(float)
    for names, low, high in (([*map(str, range(300))], 0.95, 1), (
            [str(i // 5) for i in range(300)], 0.3, 0.7)):
        values = p_ik_probe.cross_validated(states, shares, names)
        assert low <= metrics.auroc(values, shares > 0) <= high


@pytest.mark.parametrize('change, message', [
    ({'answers': [{'correct': 1}]},
     '"answers" must be a list of answers, whose "correct" is true or false'),
    ({'task': ['qa']}, '"task" is not text but list')])
def test_a_malformed_sample_of_p_ik_is_a_bad_row(tmp_path, change, message):
    good = {'task': 'qa', 'language': '', 'id': '0', 'greedy': {}, 'subject': '',
            'context': 'Who?\nAnswer:', 'answers': [{'correct': False}]}
    path = write_rows(tmp_path / 'samples.jsonl', [good | {'id': '1'} | change, good])
    with pytest.raises(DataError, match=f'samples.jsonl:1: .*{message}'):
        load_p_ik(f'p_ik:{path}', asking())
    question, = load_p_ik(f'p_ik:{path}', asking(on_bad_row='skip')).items
    assert question.answer == 1


def test_p_ik_of_what_is_always_or_never_right_or_not_written(tmp_path):
    for shares in (0.0, 1.0):
        states = np.ones((6, 3))        # and states that do not differ
        values = p_ik_probe.cross_validated(states, np.full(6, shares), 'abcdef')
        np.testing.assert_allclose(values, shares, atol=1e-3)
    write_rows(tmp_path / 'samples.jsonl', [{'task': 'mmlu', 'id': '1', 'answer': 1}])
    for name, message in (('p_ik', 'no samples given'), (f'p_ik:{tmp_path}/none', 'no file or fol'),
                          (f'p_ik:{tmp_path}', 'has no samples of written answers')):
        with pytest.raises(DataError, match=message):
            load_p_ik(name, asking())
