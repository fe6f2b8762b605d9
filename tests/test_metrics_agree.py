"""metrics_agree.py: Kendall's tau, bins that merge, the committed tables, run folders"""

import itertools

import numpy as np
import pytest

import metrics
from research.study import metrics_agree
from research.study.claims import read_csv
from research.study.figures import read_bins


def literal_tau(x, y):
    """tau-b, pair by pair."""
    pairs = [(np.sign(x[i] - x[j]), np.sign(y[i] - y[j]))
             for i, j in itertools.combinations(range(len(x)), 2)]
    untied = [sum(pair[k] != 0 for pair in pairs) for k in (0, 1)]
    return sum(a * b for a, b in pairs) / np.sqrt(untied[0] * untied[1])


def test_kendall_is_tau_b_of_the_runs_that_have_both():
    rng = np.random.default_rng(0)
    for ties in (False, True):
        x, y = rng.normal(size=(2, 25))
        y = x + y
        if ties:
            x, y = np.round(x), np.round(y)
        tau, low, high, n = metrics_agree.kendall(x, y, 200)
        assert tau == pytest.approx(literal_tau(x, y), abs=1e-12) and low < tau < high and n == 25
        draw = np.random.default_rng(0).integers(25, size=(200, 25))
        resampled = [literal_tau(x[rows], y[rows]) for rows in draw]
        assert (low, high) == pytest.approx(np.quantile(resampled, (0.025, 0.975)), abs=1e-9)
        x[:5], y[20:] = np.nan, np.nan
        assert metrics_agree.kendall(x, y, 10)[0] == pytest.approx(
            literal_tau(x[5:20], y[5:20]), abs=1e-12)
    assert np.isnan(metrics_agree.kendall(np.ones(4), np.arange(4.0), 10)[:3]).all()


def test_bins_of_equal_width_merge_exactly():
    rng = np.random.default_rng(0)
    confidence = rng.random(500)
    correct = rng.random(500) < confidence**2
    table = metrics.bins(confidence, correct)
    gaps = np.nan_to_num(table['count'] * (table['accuracy'] - table['confidence']))
    for n in (1, 2, 5, 10):
        assert metrics_agree.merged_ece(table['count'], gaps, n) == pytest.approx(
            metrics.ece(confidence, correct, n), abs=1e-12)


def test_the_committed_table_follows_from_the_committed_numbers():
    """tau to all digits; the intervals are of resamples and are left out, for time."""
    expected = {(x['task'], x['a'], x['b']): (x['runs'], x['tau'])
                for x in read_csv(metrics_agree.RESULTS / 'metrics_agree' / 'agree.csv')}
    values, binned = metrics_agree.committed()
    found = {(task, x['a'], x['b']): (str(x['runs']), f'{x["tau"]:.5f}')
             for task, runs in values.items() for x in metrics_agree.agreements(runs, 1)}
    assert found == expected
    # bins.csv numbers its bins from 0
    for name, bins in read_bins(metrics_agree.RESULTS / 'headline' / 'bins.csv').items():
        gaps = bins['count'] * (bins['accuracy'] - bins['confidence'])
        pairs = np.abs(gaps[::2] + gaps[1::2]).sum() / bins['count'].sum()
        assert binned[name[3]][name[0], name[2]][5] == pytest.approx(pairs, abs=1e-12)
    # ten bins, from counts and means to five digits, give the ECE that the tables state
    for task, runs in binned.items():
        for run, ece in runs.items():
            if run in values[task]:
                assert ece[10] == pytest.approx(values[task][run]['ece'], abs=2e-5)
