"""metrics_agree.py: Kendall's tau, bins that merge, the committed tables, run folders"""

import itertools

import numpy as np
import pytest
from common import write_run

import metrics
from runtime.errors import ConfigError
from research.study import metrics_agree
from research.study.claims import read_csv


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
    # scipy.stats.kendalltau([12, 2, 1, 12, 2], [1, 4, 7, 1, 0])
    tau = metrics_agree.kendall(np.array([12.0, 2, 1, 12, 2]), np.array([1.0, 4, 7, 1, 0]), 10)[0]
    assert tau == pytest.approx(-0.47140452079103173, abs=1e-12)
    assert np.isnan(metrics_agree.kendall(np.ones(4), np.arange(4.0), 10)[:3]).all()
    runs = {('run', i): {'accuracy': 0.1 * i, 'ece': 0.5, 'nll': 2 - 0.1 * i} for i in range(4)}
    assert metrics_agree.agreement_cells(metrics_agree.agreements(runs, 10))[1:] == [
        ['accuracy', '-', '1.00 [1.00, 1.00]'], ['ECE', '', '-']]      # ECE is constant
    assert metrics_agree.kendall(np.full(3, np.nan), np.ones(3), 10)[3] == 0


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
    # ten bins, from counts and means to five digits, give the ECE that the tables state
    for task, runs in binned.items():
        for run, ece in runs.items():
            if run in values[task]:
                assert ece[10] == pytest.approx(values[task][run]['ece'], abs=2e-5)


@pytest.mark.slow
def test_folders_of_runs_have_all_metrics_and_a_hundred_bins(tmp_path, capsys):
    for seed in (0, 1):
        for sharpness in (1.0, 2.0, 4.0):
            write_run(tmp_path / f'seed-{seed}' / f'tuned-{sharpness}', seed=seed,
                      sharpness=sharpness, n=60)
    out = tmp_path / 'out'
    metrics_agree.main([str(tmp_path / 'seed-0'), str(tmp_path / 'seed-1'), f'--out_dir={out}',
                        '--n_bootstrap=20'])
    printed = capsys.readouterr().out
    lines = read_csv(out / 'agree.csv')
    assert {line['a'] for line in lines} | {line['b'] for line in lines} == {
        x.key for x in metrics.MEASURES if x.higher_is_better is not None}
    assert all(line['runs'] == '6' for line in lines)
    assert '| 100 | ' in printed and '| best of 3 by | setting |' in printed
    with pytest.raises(ConfigError, match='three runs or more'):
        metrics_agree.main([str(tmp_path / 'seed-0' / 'tuned-1.0'), f'--out_dir={out}'])
