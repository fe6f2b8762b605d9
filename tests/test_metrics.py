"""metrics.py: golden values of other libraries, properties, errors"""

import importlib.util
import gzip
import io
import itertools
import json
import math
import re
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pytest
import torch
from common import HERE, run_scripts, write_rows
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from predictions import (
    assert_equal_numbers,
    calibration_case,
    exactly,
    predictions,
    small,
    with_noise,
)

import metrics
import scaling
import stats
from results import prediction_files
from results.prediction_files import harness_sample, harness_task


def golden_case(name):
    if name == 'mmlu_overconfident_4':
        return calibration_case(0, 2000, 4, 2.5, 1.0)
    if name == 'small_4':
        return calibration_case(4, 150, 4, 2.0, 1.0)
    if name == 'all_wrong_conf_1':
        labels = np.arange(20) % 4
        return np.eye(4)[(labels + 1) % 4], labels
    if name == 'uniform_quarter':
        return np.full((40, 4), 0.25), np.arange(40) % 4
    assert name == 'edges_conf0_1_ties_on_bin_edges'
    probs = [
        [1.0, 0.0, 0.0, 0.0],
        [1.0, 0.0, 0.0, 0.0],
        [0.0, 1.0, 0.0, 0.0],
        [0.25, 0.25, 0.25, 0.25],
        [0.25, 0.25, 0.25, 0.25],
        [0.5, 0.5, 0.0, 0.0],
        [0.7, 0.1, 0.1, 0.1],
        [0.7, 0.1, 0.1, 0.1],
        [0.8, 0.2, 0.0, 0.0],
        [0.6, 0.4, 0.0, 0.0],
    ]
    return np.array(probs), np.array([0, 1, 1, 0, 3, 1, 0, 2, 0, 1])


def test_metrics_golden_inputs_are_the_ones_the_peers_saw():
    probs, labels = golden_case('mmlu_overconfident_4')
    assert (probs[0, 0], labels.sum()) == (exactly(0.223841614128059), 2963)
    probs, labels = golden_case('small_4')
    assert (probs[0, 0], labels.sum()) == (exactly(0.13891827363112413), 239)


GOLDEN = json.loads((Path(__file__).parent / 'golden_metrics.json').read_text())


@pytest.mark.parametrize('name', GOLDEN['float64'])
def test_metrics_equal_golden_values(name):
    """The values of peers that compute in float64, and of those that do in float32, to 1e-6."""
    probs, labels = golden_case(name)
    for precision, tolerance in (('float64', 1e-12), ('float32', 1e-6)):
        for case in GOLDEN[precision].get(name, []):
            value = getattr(metrics, case['metric'])(probs, labels, **case['settings'])
            assert value == pytest.approx(case['value'], rel=0, abs=tolerance), case


def test_metrics_differ_from_peers_that_are_wrong():
    def differs(value, peer):
        return abs(value - peer) > 1e-3

    probs, labels = golden_case('edges_conf0_1_ties_on_bin_edges')
    # torchmetrics puts confidence 1.0 into a bin of its own, behind the last one, so that even a
    # single bin is two. With one bin every norm must give |gap| = 0.18.
    assert metrics.mce(probs, labels, n_bins=1) == exactly(0.18)
    assert differs(metrics.mce(probs, labels, n_bins=1), 0.3333333134651184)
    assert metrics.rmsce(probs, labels) == exactly(0.18)
    assert differs(metrics.rmsce(probs, labels), 0.2060975283384323)
    # netcal closes bins on the left. That moves 0.5 and 0.8 up, but not 0.6 and 0.7, because its
    # edges come from np.linspace.
    assert differs(metrics.mce(probs, labels), 0.55)
    # gce drops probabilities of exactly 0 from the class-wise metrics and divides by what is left,
    # although eq. (3) and (4) are over all N probabilities of an option.
    assert metrics.sce(probs, labels) == exactly(0.205)
    assert differs(metrics.sce(probs, labels), 0.2763888888888889)
    assert differs(metrics.ace(probs, labels), 0.2763888888888889)
    # torch-uncertainty splits ties by row order in its equal-mass bins, gives nan for fewer rows
    # than bins, and an infinite NLL for one label of probability 0.
    assert differs(metrics.ece_equal_mass(probs, labels), 0.43000003695487976)
    assert math.isfinite(metrics.ece_equal_mass(probs, labels, n_bins=15))
    assert math.isfinite(metrics.nll(probs, labels))

    probs, labels = golden_case('all_wrong_conf_1')
    assert metrics.sce(probs, labels) == exactly(0.5)  # gce: 1.0, zeros dropped
    assert metrics.ace(probs, labels) == exactly(0.5)
    probs, labels = golden_case('uniform_quarter')
    assert metrics.ece_equal_mass(probs, labels) == 0  # torch-uncertainty: 0.1, ties split

    # outlier-exposure leaves its last, most confident bin out of the sum; with one bin nothing is
    # left.
    probs, labels = golden_case('small_4')
    assert differs(metrics.rmsce(probs, labels), 0.0)
    assert differs(metrics.mad(probs, labels, bin_size=10), 0.15610681760853043)
    probs, labels = golden_case('mmlu_overconfident_4')
    assert differs(metrics.rmsce(probs, labels), 0.23906758765187394)
    assert differs(metrics.mad(probs, labels), 0.22279627205287675)
    # hendrycks/test squares the weight |B|/N too and takes the square root twice. With B bins of
    # equal count that is sqrt(rmsce) * B^(-1/4), which shrinks as N grows.
    assert differs(metrics.rmsce(probs, labels), 0.23255810305865737)
    assert metrics.rmsce(probs, labels) ** 0.5 * 20**-0.25 == exactly(0.23255810305865737)
    # gce's SCE preset pools the options into one set of bins, which is not eq. (3).
    assert differs(metrics.sce(probs, labels, n_bins=10), 0.11786897488385001)
    # netcal's ACE is a top-label metric of the same name.
    assert differs(metrics.ace(probs, labels, n_ranges=10), 0.19145074380807076)


def test_metrics_edges_are_exact_where_linspace_is_not():
    # Closed on the left with np.linspace edges, as gce and relplot bin, 0.5 moves up while 0.6
    # stays below 0.6000000000000001: two neighboring edges share a bin, and a model that is wrong
    # at 0.6 makes up for being right at 0.5.
    probs = np.array([[0.5, 0.5], [0.6, 0.4]])
    labels = np.array([0, 1])
    peer_bin = np.digitize(probs.max(1), np.linspace(0, 1, 11)[1:-1])
    assert peer_bin.tolist() == [5, 5]
    assert np.flatnonzero(metrics.bins(probs, labels)['count']).tolist() == [4, 5]
    assert metrics.ece(probs, labels) == exactly(0.55)  # the peers' one bin gives 0.05


def test_metrics_equal_the_whole_golden_file():
    path = Path(metrics.__file__).resolve().parent.parent / 'shared/reference/golden_metrics.json'
    if not path.exists():
        pytest.skip('the file of golden vectors (golden_metrics.json) is not beside the repository')

    calls = [  # pattern of the file's key, our call, tolerance
        (r'accuracy', lambda p, y, m: metrics.accuracy(p, y), 1e-12),
        (r'mean_confidence', lambda p, y, m: metrics.mean_confidence(p, y), 1e-12),
        (r'overconfidence gap .*', lambda p, y, m: metrics.gap(p, y), 1e-12),
        (r'entropy_bits_mean', lambda p, y, m: metrics.entropy(p, y), 1e-12),
        (r'entropy_nats_mean', lambda p, y, m: metrics.entropy(p, y, unit='nats'), 1e-12),
        (r'nll_sklearn_log_loss', lambda p, y, m: metrics.nll(p, y), 1e-12),
        (r'CategoricalNLL', lambda p, y, m: metrics.nll(p, y), 1e-6),
        (r'brier_sum_over_classes .*', lambda p, y, m: metrics.brier(p, y), 1e-12),
        (r'BrierScore', lambda p, y, m: metrics.brier(p, y), 1e-6),
        (r'ECE right-closed .* M=(\d+)', metrics.ece, 1e-12),
        (r'MCE right-closed M=(\d+)', metrics.mce, 1e-12),
        (r'uncertainty-calibration get_ece .* num_bins=(\d+)', metrics.ece, 1e-12),
        (r'uncertainty-calibration get_ece_em .* num_bins=(\d+)', metrics.ece_equal_mass, 1e-12),
        (r'netcal.ECE\((\d+)\)', metrics.ece, 1e-12),
        (r'netcal.MCE\((\d+)\)', metrics.mce, 1e-12),
        (r'relplot.binnedECE\((\d+)\) .*', metrics.ece, 1e-12),
        (r'gce ECE .* num_bins=(\d+)', metrics.ece, 1e-12),
        (r'ece\(labels,probs\) num_bins=(\d+)', metrics.ece, 1e-12),
        (r'gce SCE eq.3 .* num_bins=(\d+)', metrics.sce, 1e-12),
        (r'sce\(labels,probs\) num_bins=(\d+)', metrics.sce, 1e-12),
        (r'gce ACE num_bins=(\d+)', metrics.ace, 1e-12),
        (r'ace\(labels,probs\) num_bins=(\d+)', metrics.ace, 1e-12),
        (r'eq5 RMSCE beta=(\d+) .*', metrics.rmsce, 1e-12),
        (r'eq6 MAD beta=(\d+) .*', metrics.mad, 1e-12),
        (r'torchmetrics.* n_bins=(\d+) norm=l1', metrics.ece, 1e-6),
        (r'torchmetrics.* n_bins=(\d+) norm=max', metrics.mce, 1e-6),
        (r'CalibrationError num_bins=(\d+) l1', metrics.ece, 1e-6),
        (r'uncertainty-calibration l2 top-label debiased 15 .*',
         lambda p, y, m: metrics.ece_debiased(p, y), 1e-12),
        (r'ECE-sweep equal-mass l1 .*', lambda p, y, m: metrics.ece_sweep(p, y), 1e-12),
        (r'relplot.smECE', lambda p, y, m: metrics.smooth_ece(p, y), 1e-4),
        (r'netcal.MMCE', lambda p, y, m: metrics.mmce(p, y), 1e-12),
        (r'KS top-label .*', lambda p, y, m: metrics.ks_error(p, y), 1e-12),
        (r'gce TACE threshold=0.01 num_bins=(\d+)', metrics.tace, 1e-12),
        (r'tace\(labels,probs\) num_bins=(\d+)', metrics.tace, 1e-12),
        (r'hendrycks calib_err p=2 beta=(\d+) .*', metrics.rmsce_hendrycks, 1e-12),
        (r'hendrycks calib_err p=1 beta=(\d+) .*', metrics.mad_hendrycks, 1e-12),
        (r'rmsce\(labels,probs\)', lambda p, y, m: metrics.rms_mmlu_repo(p, y), 1e-12),
        (r'AUROC .*', lambda p, y, m: metrics.auroc(p, y), 1e-12),
        (r'AURC mean .*', lambda p, y, m: metrics.aurc(p, y), 1e-12),
        (r'E-AURC .*', lambda p, y, m: metrics.excess_aurc(p, y), 1e-12),
        (r'uncertainty-calibration selective_cov_acc_area',
         lambda p, y, m: 1 - metrics.aurc(p, y), 1e-12),
        *((rf'selective_accuracy@coverage={c} .*',
           lambda p, y, m, c=c: metrics.accuracy_at_coverage(p, y, c), 1e-12)
          for c in (0.5, 0.8, 0.9, 1.0)),
        *((rf'Murphy (M=10 )?{name}.*', lambda p, y, m, key=key: metrics.murphy(p, y)[key], 1e-12)
          for name, key in (('reliability', 'reliability'), ('resolution', 'resolution'),
                            ('uncertainty', 'uncertainty'), ('within', 'within_bin'))),
        (r'brier_top_label .*', lambda p, y, m: metrics.murphy(p, y)['brier'], 1e-12),
    ]
    wrong_peers = {  # test_metrics_differ_from_peers_that_are_wrong says why
        'edges_conf0_1_ties_on_bin_edges': (
            r'gce (SCE|ACE) .*|[as]ce\(labels.*|CategoricalNLL|netcal.MCE\(10\)'
            r'|torchmetrics.* n_bins=1 norm=max'
            # these depend on the order of tied rows
            r'|E?-?AURC .*|uncertainty-calibration sel.*|selective_accuracy@coverage=0.[59] .*'
        ),
        'uniform_quarter': r'E?-?AURC .*|uncertainty-calibration sel.*|KS top-label .*',
        'all_wrong_conf_1': r'gce (SCE|ACE) .*|[as]ce\(labels.*|CategoricalNLL',
    }
    compared = 0
    for case in json.loads(path.read_text())['cases']:
        probs, labels = golden_case(case['name'])
        peers = case['expected'] | case['reference_formula'] | case['torch_uncertainty']
        peers |= case['hendrycks_test_calib_tools']
        wrong = wrong_peers.get(case['name'], '')
        for pattern, call, tolerance in calls:
            for key, expected in peers.items():
                match = re.fullmatch(pattern, key)
                if isinstance(expected, str) or expected is None:    # 'raises IndexError: ...'
                    continue
                if match and not re.fullmatch(wrong, key):
                    number = match[1] if match.groups() else None
                    value = call(probs, labels, int(number) if number and number.isdigit()
                                 else None)
                    approximately = pytest.approx(expected, rel=0, abs=tolerance)
                    assert value == approximately, (case['name'], key)
                    compared += 1
    assert compared > 300


def literal_gap(values, outcomes, bin_of):
    """sum_B |B|/N |acc(B) - conf(B)| by the book: one list per bin."""
    members = {}
    for value, outcome in zip(values, outcomes):
        members.setdefault(bin_of(value), []).append((value, outcome))
    total = 0
    for rows in members.values():
        total += len(rows) * abs(np.mean([v for v, _ in rows]) - np.mean([o for _, o in rows]))
    return total / len(values)


def equal_width_bin(n_bins):
    return lambda c: next(m for m in range(1, n_bins + 1) if c <= m / n_bins or m == n_bins)


def equal_mass_bin(values, sizes):
    """Return the function value -> the lowest chunk of the sorted values that holds it."""
    chunks = np.split(np.sort(values), np.cumsum(sizes)[:-1])
    return lambda c: next(i for i, chunk in enumerate(chunks) if c in chunk)


@small
@given(predictions(), st.integers(1, 30))
def test_metrics_equal_their_literal_formulas(case, n_bins):
    probs, labels = case
    n, k = probs.shape
    confidence = probs.max(1)
    correct = probs.argmax(1) == labels

    by_width = equal_width_bin(n_bins)
    assert metrics.ece(probs, labels, n_bins) == exactly(literal_gap(confidence, correct, by_width))

    chunks = min(n_bins, n)
    by_mass = equal_mass_bin(confidence, [len(x) for x in np.array_split(np.arange(n), chunks)])
    expected = literal_gap(confidence, correct, by_mass)
    assert metrics.ece_equal_mass(probs, labels, n_bins) == exactly(expected)

    static = [literal_gap(probs[:, j], labels == j, by_width) for j in range(k)]
    assert metrics.sce(probs, labels, n_bins) == exactly(np.mean(static))

    sizes = np.diff([round(r * n / chunks) for r in range(chunks + 1)])
    adaptive = [
        literal_gap(probs[:, j], labels == j, equal_mass_bin(probs[:, j], sizes)) for j in range(k)
    ]
    assert metrics.ace(probs, labels, n_bins) == exactly(np.mean(adaptive))

    onehot = np.eye(k)[labels]
    assert metrics.brier(probs, labels) == exactly(((probs - onehot) ** 2).sum() / n)


def test_ace_is_equation_4_when_the_ranges_divide_the_rows():
    probs, labels = calibration_case(3, 60, 5, 1.5, 1.0)
    gaps = []
    for k in range(5):
        order = np.argsort(probs[:, k])
        for rows in np.split(order, 15):
            gaps.append(abs((labels[rows] == k).mean() - probs[rows, k].mean()))
    assert metrics.ace(probs, labels) == exactly(sum(gaps) / (5 * 15))


@small
@given(predictions(max_rows=40), st.integers(1, 45), st.integers(1, 30))
def test_rmsce_is_at_least_mad_is_at_least_the_gap(case, bin_size, n_bins):
    probs, labels = case
    rounding = 1e-12
    gap = abs(metrics.gap(probs, labels))
    mad = metrics.mad(probs, labels, bin_size)
    assert metrics.rmsce(probs, labels, bin_size) >= mad - rounding
    assert mad >= gap - rounding
    assert metrics.ece(probs, labels, n_bins) >= gap - rounding
    assert metrics.ece_equal_mass(probs, labels, n_bins) >= gap - rounding
    assert metrics.mce(probs, labels, n_bins) >= metrics.ece(probs, labels, n_bins) - rounding


def test_rmsce_bins_hold_100_rows_and_the_last_takes_the_remainder():
    # Options [c, 1-c] with c rising; 250 rows are two bins, of 100 and 150 rows.
    confidence = np.linspace(0.6, 0.9, 250)
    labels = np.random.RandomState(0).randint(0, 2, 250)
    probs = np.stack([confidence, 1 - confidence], 1)
    below = abs(confidence[:100].mean() - (labels[:100] == 0).mean())
    above = abs(confidence[100:].mean() - (labels[100:] == 0).mean())
    assert metrics.mad(probs, labels) == exactly(0.4 * below + 0.6 * above)
    assert metrics.rmsce(probs, labels) == exactly((0.4 * below**2 + 0.6 * above**2) ** 0.5)
    # 199 rows are one bin, 200 two.
    assert metrics.rmsce(probs[:199], labels[:199]) == exactly(
        abs(metrics.gap(probs[:199], labels[:199]))
    )
    assert metrics.rmsce(probs[:200], labels[:200]) > abs(metrics.gap(probs[:200], labels[:200]))


def test_rmsce_keeps_ties_in_the_order_given():
    stream = np.random.RandomState(0)
    confidence = stream.choice([0.6, 0.7, 0.8], 950)
    labels = stream.randint(0, 2, 950)
    probs = np.stack([confidence, 1 - confidence], 1)
    order = sorted(range(950), key=lambda i: confidence[i])  # Python's sort is stable
    expected = 0
    for rows in np.split(np.array(order), range(100, 900, 100)):
        expected += len(rows) / 950 * (confidence[rows].mean() - (labels[rows] == 0).mean()) ** 2
    assert metrics.rmsce(probs, labels) == exactly(expected**0.5)


@pytest.mark.slow
@small
@given(predictions(), st.randoms(use_true_random=False))
def test_metrics_ignore_the_order_of_rows(case, shuffler):
    probs, labels = case
    order = list(range(len(labels)))
    shuffler.shuffle(order)
    before = metrics.report(probs, labels)
    after = metrics.report(probs[order], labels[order])
    for key, value in before.items():
        if 'hendrycks' not in key:      # whose ties stay in the order given
            assert after[key] == pytest.approx(value, rel=0, abs=1e-12, nan_ok=True), key


def test_rmsce_ignores_the_order_of_rows_without_ties():
    probs, labels = calibration_case(1, 350, 4, 1.5, 1.0)
    order = np.random.RandomState(0).permutation(350)
    assert metrics.rmsce(probs[order], labels[order]) == exactly(metrics.rmsce(probs, labels))
    assert metrics.mad(probs[order], labels[order]) == exactly(metrics.mad(probs, labels))


@small
@given(predictions())
def test_one_bin_gives_the_size_of_the_gap(case):
    probs, labels = case
    gap = exactly(abs(metrics.gap(probs, labels)))
    assert metrics.ece(probs, labels, n_bins=1) == gap
    assert metrics.mce(probs, labels, n_bins=1) == gap
    assert metrics.ece_equal_mass(probs, labels, n_bins=1) == gap
    assert metrics.rmsce(probs, labels, bin_size=len(labels)) == gap
    assert metrics.mad(probs, labels, bin_size=len(labels)) == gap


@pytest.mark.slow
@small
@given(predictions())
def test_metrics_stay_in_their_ranges(case):
    probs, labels = case
    k = probs.shape[1]
    rounding = 1e-12
    bits = metrics.entropy(probs, labels)
    assert -rounding <= bits <= math.log2(k) + rounding
    assert metrics.entropy(probs, labels, unit='nats') == exactly(bits * math.log(2))
    assert 1 / k - rounding <= metrics.mean_confidence(probs, labels) <= 1
    assert -rounding <= metrics.nll(probs, labels) <= 36.05
    assert 0 <= metrics.brier(probs, labels) <= 2
    for name in ['ece', 'mce', 'ece_equal_mass', 'ece_sweep', 'ece_debiased', 'sce', 'ace', 'tace',
                 'rmsce', 'mad', 'rmsce_hendrycks', 'mad_hendrycks', 'rms_mmlu_repo', 'ks_error',
                 'smooth_ece', 'kde_ece', 'mmce', 'aurc', 'excess_aurc']:
        assert -rounding <= getattr(metrics, name)(probs, labels) <= 1 + rounding, name
    gap = abs(metrics.gap(probs, labels))
    for name in ['ks_error', 'ece_sweep']:
        assert getattr(metrics, name)(probs, labels) >= gap - 1e-9, name
    parts = metrics.murphy(probs, labels)
    assert parts['brier'] == exactly(parts['reliability'] - parts['resolution']
                                     + parts['uncertainty'] + parts['within_bin'])
    assert metrics.ace(probs, labels, equal_weights=True) <= 1 + rounding
    share = metrics.entropy(probs, labels, unit='share')
    assert share == exactly(bits / math.log2(k) if k > 1 else 0)
    curve = [metrics.accuracy_at_coverage(probs, labels, c) for c in (0.3, 1)]
    assert curve[1] == exactly(metrics.accuracy(probs, labels))
    covered = metrics.coverage_at_accuracy(probs, labels, 0.5)
    assert covered == 0 or metrics.accuracy_at_coverage(probs, labels, covered) >= 0.5 - rounding


@pytest.mark.parametrize('k', [2, 3, 10])
@pytest.mark.parametrize('n', [1, 99, 100, 101, 250])
def test_all_wrong_at_confidence_1_is_as_bad_as_it_gets(n, k):
    labels = np.arange(n) % k
    probs = np.eye(k)[(labels + 1) % k]
    result = metrics.report(probs, labels)
    for name in ['confidence', 'gap', 'ece', 'mce', 'ece_equal_mass', 'rmsce', 'mad']:
        assert result[name] == 1, name
    assert (result['accuracy'], result['brier'], result['entropy_bits']) == (0, 2, 0)
    assert math.copysign(1, result['entropy_bits']) == 1  # 0, not -0, in the printed report


@pytest.mark.parametrize('label, gap', [(0, -0.3), (1, 0.7)])
def test_metrics_of_a_single_row_are_its_gap(label, gap):
    probs, labels = [[0.7, 0.3]], [label]
    result = metrics.report(probs, labels)
    assert result['n'] == 1
    assert result['gap'] == exactly(gap)
    for name in ['ece', 'mce', 'ece_equal_mass', 'sce', 'ace', 'rmsce', 'mad']:
        assert result[name] == exactly(abs(gap)), name
    assert result['nll'] == exactly(-math.log(probs[0][label]))


def test_a_tie_predicts_the_first_option():
    probs = np.full((4, 4), 0.25)
    assert metrics.accuracy(probs, [0, 0, 1, 3]) == 0.5
    assert metrics.accuracy([[0.2, 0.4, 0.4]], [1]) == 1
    assert metrics.accuracy([[0.2, 0.4, 0.4]], [2]) == 0


def row_with_confidence(c, k=31):
    """A row of k probabilities, in c's precision, whose largest is exactly c."""
    row = np.zeros(k, dtype=c.dtype)
    full = min(int(1 / c), k)
    row[:full] = c
    if full < k:
        row[full] = max(0, 1 - full * c)
    assert row.max() == c
    return row


def bin_counts(confidences, n_bins):
    probs = np.stack([row_with_confidence(c) for c in confidences])
    return metrics.bins(probs, np.zeros(len(probs), dtype=int), n_bins)['count'].tolist()


@pytest.mark.parametrize('dtype', [np.float64, np.float32, np.float16])
@pytest.mark.parametrize('n_bins', range(1, 31))
def test_a_confidence_on_a_bin_edge_counts_in_the_bin_below(n_bins, dtype):
    edges = (np.arange(1, n_bins + 1) / n_bins).astype(dtype)
    right = np.ones(n_bins, dtype=bool)
    assert metrics.bins(edges, right, n_bins)['count'].tolist() == [1] * n_bins
    below = np.nextafter(edges, dtype(0))
    assert metrics.bins(below, right, n_bins)['count'].tolist() == [1] * n_bins
    if n_bins > 1:      # the float64 above an edge ties with it
        above = edges[:-1] + 2e-12 if dtype == np.float64 else np.nextafter(edges[:-1], dtype(1))
        counts = metrics.bins(above, right[1:], n_bins)['count'].tolist()
        assert counts == [0] + [1] * (n_bins - 1)


def test_a_confidence_one_rounding_above_an_edge_is_on_it():
    moved = 0
    for n_bins in range(1, 31):
        for m in range(1, n_bins):
            c = np.float64(m * (1 / n_bins))  # m steps of 1/M, which need not be m/M
            moved += c != m / n_bins
            assert bin_counts([c], n_bins).index(1) == m - 1
    assert moved > 0
    assert bin_counts([np.float64(0.6), np.float64(6 * 0.1)], 10)[5] == 2


def every_number(probs, labels):
    """Every number of this file for one set of predictions, {name: value or array}."""
    numbers = dict(metrics.report(probs, labels))
    numbers |= {f'bins {key}': value for key, value in metrics.bins(probs, labels).items()}
    return numbers | {'correct': metrics.top_label(probs, labels)[1],
                      'accuracy of half': metrics.accuracy_at_coverage(probs, labels),
                      'coverage': metrics.coverage_at_accuracy(probs, labels, 0.5)}


@pytest.mark.slow
@small
@given(predictions(), st.integers(0, 99))
def test_noise_of_rounding_changes_no_number(case, seed):
    """Probabilities that differ by 1e-16 of themselves are the same: ties, edges, order."""
    probs, labels = case
    assert_equal_numbers(every_number(with_noise(probs, seed), labels), every_number(probs, labels))
    confidence, correct = probs.max(1), probs.argmax(1) == labels
    assert_equal_numbers(every_number(with_noise(confidence, seed), correct),
                         every_number(confidence, correct))


def test_probabilities_that_differ_by_a_rounding_are_tied():
    below, above = 0.6 - 5e-17, 0.6 + 1.2e-16
    assert below < above
    correct = np.array([True, False])
    for c in ([below, above], [above, below], [0.6, 0.6]):
        assert metrics.bins(c, correct)['count'][5] == 2
        assert metrics.ece_equal_mass(c, correct) == metrics.ks_error(c, correct) == exactly(0.1)
        assert metrics.auroc(c, correct) == 0.5 and metrics.aurc(c, correct) == 0.5
    # the first of tied options is predicted, though the second is larger by a rounding
    assert metrics.accuracy([[0.4, 0.4 + 1e-16, 0.2]], [0]) == 1
    assert metrics.accuracy([[0.4, 0.4 + 1e-11, 0.2]], [1]) == 1
    # two rows 2e-12 apart are two
    assert metrics.auroc([0.6, 0.6 + 2e-12], correct) == 0
    assert metrics.tace([[0.99, 0.01], [0.99, 0.01 + 1e-17]], [1, 1]) == exactly(0.99 / 2)


def test_ece_needs_confidences_alone():
    rng = np.random.default_rng(0)
    probs = rng.dirichlet(np.ones(4), 500)
    labels = rng.integers(0, 4, 500)
    assert metrics.ece(probs.max(1), probs.argmax(1) == labels, 15) == metrics.ece(
        probs, labels, 15)
    assert metrics.ece([0.1, 0.1], [False, True]) == pytest.approx(0.4)
    for confidence, correct, message in (
            ([0.5, 1.2], [True, True], 'row 1: confidence is 1.2'),
            ([0.5, math.nan], [True, True], 'row 1: confidence is nan'),
            ([0.5], [True, True], 'must be .N. with N >= 1'), ([], [], 'N >= 1'),
            ([0.5, 0.5], [1, 2], 'row 1: correct is 2, not 0 or 1; one-dimensional probs are conf'),
            ([0.5, 0.5], [1, -1], 'row 1: correct is -1'), ([0.5], [math.nan], 'correct is nan'),
            ([0.5], ['false'], 'correct must be bool, or 0 and 1, not <U5'),
            (['0.5'], [True], 'confidence must be real numbers, not <U3')):
        for call in (metrics.ece, metrics.report):
            with pytest.raises(ValueError, match=message):
                call(confidence, correct)


TOP_LABEL = [
    *[metrics.accuracy, metrics.wilson_interval, metrics.mean_confidence, metrics.gap],
    *[metrics.murphy, metrics.bins, metrics.ece, metrics.mce, metrics.mce_bin, metrics.ece_sweep],
    *[metrics.ece_debiased, metrics.ece_equal_mass, metrics.rmsce, metrics.mad, metrics.mmce],
    *[metrics.rmsce_hendrycks, metrics.mad_hendrycks, metrics.rms_mmlu_repo, metrics.ks_error],
    *[metrics.smooth_ece, metrics.kde_ece, metrics.auroc, metrics.aurc, metrics.excess_aurc],
    *[metrics.prr, metrics.bas, metrics.brier_skill],
    *[metrics.accuracy_at_coverage, metrics.coverage_at_accuracy, metrics.report],
]


@pytest.mark.parametrize('metric', TOP_LABEL)
@pytest.mark.parametrize('kind', [int, np.uint8, float, list])
def test_correct_may_be_0_and_1(metric, kind):
    rng = np.random.default_rng(0)
    confidence, correct = rng.random(230), rng.random(230) < 0.6
    same = correct.astype(int).tolist() if kind is list else correct.astype(kind)
    np.testing.assert_equal(metric(confidence, same), metric(confidence, correct))


@pytest.mark.parametrize('metric', [metrics.entropy, metrics.nll, metrics.brier, metrics.sce,
                                    metrics.ace, metrics.tace])
def test_metrics_of_the_whole_distribution_refuse_confidences_alone(metric):
    with pytest.raises(ValueError, match='probs must be .N, K. with N, K >= 1, not of shape .2,.'):
        metric([0.5, 0.5], [True, False])


def test_nll_of_scores_has_no_floor():
    scores = np.array([[0.0, -60.0, -np.inf], [-1.0, -2.0, -3.0]])
    labels, n_options = np.array([1, 2]), np.array([2, 3])
    probs = metrics.softmax(scores)
    exact = (60 + 2 + math.log(1 + math.exp(-1) + math.exp(-2))) / 2
    assert metrics.nll(probs, labels) < exact - 10
    assert metrics.nll(probs, labels, scores=scores) == exactly(exact)
    assert metrics.nll(probs, labels, scores=scores + 1000) == pytest.approx(exact)
    assert metrics.report(probs, labels, n_options, scores=scores)['nll'] == exactly(exact)
    for bad, message in ((2 * scores, 'row 1: the softmax of scores gives option 0 0.8'),
                         (scores[:, :2], 'scores must be [N, K] like probs, (2, 3), not (2, 2)'),
                         (scores[:1], 'scores must be [N, K] like probs, (2, 3), not (1, 3)'),
                         (scores * np.nan, 'row 0: the largest score is nan'),
                         (np.where(scores == -60, -np.inf, scores),
                          'row 0: label 1 has the score -inf')):
        for call in (metrics.nll, metrics.report):
            with pytest.raises(ValueError, match=re.escape(message)):
                call(probs, labels, scores=bad)
    with pytest.raises(ValueError, match='not to a confidence'):
        metrics.report([0.5], [True], scores=scores)


@pytest.mark.parametrize('call, message', [
    (lambda x: metrics.accuracy_at_coverage([0.5], [1], x), 'coverage must be a number in (0, 1]'),
    (lambda x: metrics.coverage_at_accuracy([0.5], [1], x), 'wanted must be a number in [0, 1]'),
    (lambda x: metrics.tace([[0.5, 0.5]], [1], threshold=x), 'threshold must be'),
    (lambda x: metrics.softmax([[1.0, 2.0]], -1 if x == 2 else x), 'temperature must be'),
])
@pytest.mark.parametrize('value', [2, -0.1, math.nan, '0.5', None, True])
def test_metrics_refuse_settings_out_of_range(call, message, value):
    with pytest.raises(ValueError, match=re.escape(message)):
        call(value)


@pytest.mark.parametrize('probs, labels, message', [
    ([[0.5, 0.5], [1.0]], [0, 0], 'probs has rows of different length'),
    (np.array([[0.5, 0.5]], dtype=object), [0], 'probs must be real numbers, not object'),
    (np.zeros((1, 2), dtype='f8, f8'), [0], 'probs must be real numbers, not .*f8'),
    ([['0.5', '0.5']], [0], 'probs must be real numbers, not <U3'),
    (np.array([[0.5, 0.5]], dtype=complex), [0], 'probs must be real numbers, not complex128'),
    (np.ma.masked_greater([[0.5, 0.5], [0.9, 0.1]], 0.8), [0, 0], 'probs has masked entries'),
    ([[0.5, 0.5]], [True], 'labels must be integers, not bool'),
    ([[0.5, 0.5]], np.ma.array([0], mask=[True]), 'labels has masked entries'),
    ([[0.5, 0.5], [0.5, 0.5]], [[0], [0, 1]], 'labels has rows of different length'),
])
def test_ragged_masked_and_impossible_arrays_are_refused(probs, labels, message):
    for metric in (metrics.ece, metrics.nll, metrics.sce, metrics.report):
        with pytest.raises(ValueError, match=message):
            metric(probs, labels)
    for n_options, message in (([[2], [2, 1]], 'n_options has rows of different length'),
                               (np.ma.array([2], mask=[True]), 'n_options has masked entries'),
                               ([3], 'n_options is 3, not from 1 to 2')):
        for metric in (metrics.entropy, metrics.sce, metrics.report):
            with pytest.raises(ValueError, match=message):
                metric([[0.5, 0.5]], [0], n_options=n_options)


def test_arrays_of_any_layout_and_precision():
    probs, labels = golden_case('small_4')
    expected = pytest.approx(dict(metrics.report(probs, labels)), rel=0, abs=1e-12)
    wide = np.zeros((300, 8))
    wide[::2, ::2] = probs
    assert metrics.report(wide[::2, ::2], labels) == expected
    assert metrics.report(np.asfortranarray(probs), labels.astype(np.uint64)) == expected
    assert metrics.report(np.ma.array(probs), labels) == expected
    sharp = np.eye(4)[labels]
    assert metrics.report(sharp.astype(int), labels)['ece'] == metrics.ece(sharp, labels) == 0
    halves = np.array([[0.75, 0.25], [0.5, 0.5]])       # exact in float16
    for dtype in (np.float16, np.float32, np.longdouble):
        assert metrics.report(halves.astype(dtype), [0, 1]) == pytest.approx(
            dict(metrics.report(halves, [0, 1])), abs=1e-12)


def test_mmce_and_auroc_by_all_pairs():
    probs, labels = calibration_case(2, 300, 3, 1.5, 1.0)
    probs = np.round(probs * 20) + 1e-9
    probs /= probs.sum(1, keepdims=True)
    c, right = probs.max(1), probs.argmax(1) == labels
    r = right - c
    pairs = np.exp(-np.abs(c[:, None] - c) / 0.4)
    assert metrics.mmce(probs, labels) == exactly(np.sqrt(r @ pairs @ r) / 300)
    above = c[right][:, None] - c[~right]
    assert metrics.auroc(probs, labels) == exactly((above > 0).mean() + (above == 0).mean() / 2)
    assert math.isnan(metrics.auroc([[1.0, 0.0]], [0]))


def test_aurc_is_the_mean_over_orders_of_tied_rows():
    confidence = np.array([0.9, 0.7, 0.7, 0.7, 0.6, 0.6])
    correct = np.array([True, False, True, True, False, True])
    risks = []
    for order in itertools.permutations(range(6)):
        if (np.diff(confidence[list(order)]) <= 0).all():
            wrong = np.cumsum(~correct[list(order)])
            risks.append((wrong / np.arange(1, 7)).mean())
    assert len(risks) == 12 and metrics.aurc(confidence, correct) == exactly(np.mean(risks))


@pytest.mark.parametrize('name, expected', [    # of probmetrics 1.3.0, fitted on all rows
    ('mmlu_overconfident_4', {'nll_refinement': 1.1219052343566662,
                              'brier_refinement': 0.6125921801632707,
                              'nll_calibration': 0.2919320903054865,
                              'brier_calibration': 0.08312306795604962}),
    ('small_4', {'nll_refinement': 1.0570489415237312, 'brier_refinement': 0.5661800206392814,
                 'nll_calibration': 0.11765896096117046,
                 'brier_calibration': 0.027789584930690725})])
def test_refinement_is_that_of_probmetrics(name, expected):
    probs, labels = golden_case(name)
    assert metrics.refinement(probs, labels) == {key: exactly(x) for key, x in expected.items()}
    report = metrics.report(probs, labels)
    assert {key: report[key] for key in expected} == {
        key: exactly(x) for key, x in expected.items()}


@pytest.mark.slow
@small
@given(predictions())
def test_recalibration_by_a_temperature_leaves_the_refinement_as_it_is(case):
    probs, labels = case
    scores = 3 * np.log(np.maximum(probs, 1e-4))
    parts = metrics.refinement(metrics.softmax(scores), labels, scores=scores)
    for loss in ('nll', 'brier'):
        whole = parts[f'{loss}_refinement'] + parts[f'{loss}_calibration']
        more = {'scores': scores} if loss == 'nll' else {}
        assert whole == exactly(getattr(metrics, loss)(metrics.softmax(scores), labels, **more))
    assert parts['nll_calibration'] >= -1e-12
    grid = [metrics.nll(metrics.softmax(scores / t), labels, scores=scores / t)
            for t in np.geomspace(1e-3, 1e3, 40)]
    assert parts['nll_refinement'] <= min(grid) + 1e-9
    cooler = metrics.refinement(metrics.softmax(scores / 2), labels, scores=scores / 2)
    assert cooler['nll_refinement'] == pytest.approx(parts['nll_refinement'], abs=2e-3)


def test_refinement_of_a_label_of_probability_0_is_finite():
    probs, labels = [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.2, 0.8, 0.0]], [1, 0, 1]
    parts = metrics.refinement(probs, labels)
    assert parts['nll_refinement'] + parts['nll_calibration'] == exactly(
        metrics.nll(probs, labels))
    assert 0 < parts['nll_refinement'] < 1.5


def test_the_best_temperature_has_no_slope_in_float64():
    rng = np.random.default_rng(0)
    for i in range(60):
        n, k = rng.integers(2, 40), rng.integers(2, 6)
        scores = rng.normal(size=(n, k)) * 10 ** rng.uniform(-2, 2)
        targets = rng.dirichlet(np.ones(k), n) if i % 2 else np.eye(k)[rng.integers(0, k, n)]
        scores[:, -1] = np.where((targets[:, -1] == 0) & (i % 3 == 0), -np.inf, scores[:, -1])
        finite = np.where(np.isfinite(scores), scores, 0)

        t = metrics.best_temperature(scores, targets)
        lower, at, higher = (((metrics.softmax(scores, t * x) - targets) * finite).sum()
                             for x in (0.99, 1, 1.01))
        if 0.001001 < t < 999:
            assert abs(at) <= 1e-9 and higher < 0 < lower
        else:
            assert at <= 0 if t < 1 else at >= 0


def test_brier_skill_compares_with_the_accuracy_as_confidence():
    confidence, correct = np.array([0.9, 0.8, 0.6, 0.3]), np.array([True, True, False, False])
    literal = 1 - ((confidence - correct) ** 2).mean() / ((0.5 - correct) ** 2).mean()
    assert metrics.brier_skill(confidence, correct) == exactly(literal)
    assert metrics.brier_skill(np.full(4, 0.5), correct) == 0
    assert metrics.brier_skill(correct.astype(float), correct) == 1
    assert math.isnan(metrics.brier_skill(confidence, [True] * 4))


def test_prr_is_the_share_of_the_area_between_a_random_and_the_best_order():
    rng = np.random.default_rng(0)
    correct = rng.random(30) < 0.6

    def area(order):
        return np.mean([correct[order[:k]].mean() for k in range(1, 31)])

    for confidence in (rng.random(30), np.where(correct, 0.9, 0.2), np.where(correct, 0.2, 0.9)):
        confidence = confidence + 1e-6 * np.arange(30)
        expected = (area(np.argsort(-confidence)) - correct.mean()) / (
            area(np.argsort(~correct, kind='stable')) - correct.mean())
        assert metrics.prr(confidence, correct) == exactly(expected)
    assert metrics.prr(np.where(correct, 0.9, 0.2), correct) == 1
    assert metrics.prr(np.full(30, 0.5), correct) == exactly(0)     # ties are in random order
    assert math.isnan(metrics.prr([0.5, 0.6], [True, True]))


def test_bas_is_the_mean_utility_over_thresholds():
    confidence, correct = np.array([0.9, 0.35, 0.6, 0.0]), np.array([True, False, False, True])
    t = (np.arange(200_000) + 0.5) / 200_000
    utility = [np.where(t <= c, 1 if a else -t / (1 - t), 0).mean()
               for c, a in zip(confidence, correct)]
    assert metrics.bas(confidence, correct) == pytest.approx(np.mean(utility), abs=1e-5)
    assert metrics.bas([1.0], [True]) == 1 and metrics.bas([1.0], [False]) == exactly(
        1 + math.log(np.finfo(float).eps))
    # if 7 of 10 answers are right, a confidence of 0.7 is the best
    scores = [metrics.bas(np.full(10, c), np.arange(10) < 7) for c in np.linspace(0, 0.99, 100)]
    assert np.argmax(scores) == 70


def test_bas_does_not_round_a_confidence_near_1():
    for gap in 2.0 ** -np.arange(30, 53):       # 1 - gap is exact
        c, correct, costs = np.array([1 - gap, 0.5]), np.array([False, True]), math.log(gap)
        probs = np.stack([c, 1 - c], 1)
        expected = exactly(((1 - gap) + costs + 0.5) / 2)
        assert metrics.bas(c, correct) == metrics.bas(probs, [1, 0]) == expected
        assert metrics.report(c, correct)['bas'] == metrics.report(probs, [1, 0])['bas'] == expected
        assert stats.bootstrap(c, correct, n_resamples=1, keys=['bas'])['bas'].item() in (
            exactly((1 - gap) + costs), exactly(0.5), expected)


def test_tensors_of_torch_give_the_same_values_as_arrays():
    probs, labels = golden_case('small_4')
    n_options, scores = np.full(len(labels), 4), np.log(probs)
    _, correct = metrics.top_label(probs, labels)
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        p, z = (torch.tensor(x, dtype=dtype, requires_grad=True) for x in (probs, scores))
        as_arrays = [x.detach().double().numpy() if dtype == torch.bfloat16 else
                     x.detach().numpy() for x in (p, z)]
        z, scores_array = (z, as_arrays[1]) if dtype in (torch.float64, torch.float32) else (
            None, None)     # short scores are not those of short probs
        if dtype == torch.bfloat16:     # whose rows need not sum to 1 as closely
            as_arrays[0] = as_arrays[0] / as_arrays[0].sum(1, keepdims=True)
            metrics.report(p, torch.tensor(labels))
            p = torch.tensor(as_arrays[0], dtype=torch.float64)
        found = metrics.report(p, torch.tensor(labels), torch.tensor(n_options), scores=z)
        assert_equal_numbers(found, metrics.report(as_arrays[0], labels, n_options,
                                                   scores=scores_array))
        confidence = p.max(1).values
        assert_equal_numbers(metrics.report(confidence, torch.tensor(correct)), metrics.report(
            confidence.detach().numpy(), correct))
        drawn = stats.bootstrap(p, torch.tensor(labels), torch.tensor(n_options), n_resamples=3)
        assert_equal_numbers(drawn, stats.bootstrap(as_arrays[0], labels, n_options,
                                                    n_resamples=3))
    short = torch.tensor([0.5, 0.75], dtype=torch.bfloat16, requires_grad=True)
    assert metrics.ece(short, [1, 1]) == metrics.ece([*short], [1, 1]) == 0.375
    z = torch.tensor(scores, requires_grad=True)
    assert metrics.softmax(z) == pytest.approx(metrics.softmax(scores))
    assert scaling.fit_temperature(z, torch.tensor(labels)) == scaling.fit_temperature(
        scores, labels)
    for unreadable in (torch.tensor(probs).to_sparse(), torch.empty(150, 4, device='meta'),
                       torch.tensor(probs).to(torch.complex64)):
        with pytest.raises(ValueError, match='probs'):
            metrics.report(unreadable, labels)


def test_kde_ece_of_many_rows_is_the_true_error():
    rng = np.random.default_rng(0)
    c = rng.uniform(0.3, 0.9, 200_000)
    assert metrics.kde_ece(c, rng.random(len(c)) < c) < 0.01
    assert metrics.kde_ece(c, rng.random(len(c)) < c - 0.2) == pytest.approx(0.2, abs=0.01)
    assert metrics.smooth_ece(c, rng.random(len(c)) < c - 0.2) == pytest.approx(0.2, abs=0.01)


def run_metrics(*arguments):
    """Call metrics.py in this process; return its exit status and what it prints."""
    code = 0
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as errors:
        try:
            prediction_files.main([*map(str, arguments)])
        except SystemExit as end:
            code = end.code
            if isinstance(code, str):
                print(code, file=errors)
                code = 1
    return subprocess.CompletedProcess('metrics.py', code, out.getvalue(), errors.getvalue())


def test_metrics_as_a_program_prints_a_report_per_task(tmp_path):
    rows = [{'probs': [0.7, 0.3], 'label': 0}, {'log_probs': [-1.0, -2.0, -4.0], 'answer': 1,
                                                'n_tokens': [1, 1, 2]},
            {'probs': [0.5, 0.5], 'answer': 1, 'split': 'validation'}]
    path = write_rows(tmp_path / 'samples.jsonl', rows)
    done = run_scripts(1, 'metrics.py', path)
    assert done.returncode == 0, done.stderr
    assert run_metrics(path).stdout == done.stdout
    p = np.exp([-1, -2, -2])
    nll = metrics.report([[0.7, 0.3, 0], p / p.sum()], [0, 1], [2, 3])['nll']
    lines = [line.split() for line in done.stdout.split('\n')]
    assert ['nll', f'{nll:.4f}'] in lines and ['n', '2'] in lines
    write_rows(path, [{'confidence': 0.6, 'correct': True, 'task': 'Sprachmodell ü'},
                      {'probs': [1.0], 'answer': 0, 'task': 'mmlu'},
                      {'confidence': 0.6, 'correct': 0, 'task': 'Sprachmodell ü'}])
    done = run_metrics(path)
    assert done.stdout.startswith('Sprachmodell ü\nn  ') and '\nmmlu\nn  ' in done.stdout
    packed = tmp_path / 'samples.jsonl.gz'
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert run_metrics(packed).stdout == done.stdout
    packed.write_bytes(packed.read_bytes()[:-9])
    assert run_metrics(packed).stderr.startswith(f'error: {packed}: Compressed file ended')
    packed.write_bytes(path.read_bytes())
    assert run_metrics(packed).stderr.startswith(f'error: {packed}: Not a gzipped file')
    # evaluate.py appends the sample of an edited prompt; only the latest of a question counts
    sample = {'task': 'mmlu', 'split': 'test', 'language': '', 'id': '1', 'answer': 0}
    write_rows(path, [sample | {'prompt': 'old', 'log_probs': [-1.0, -2.0]},
                      sample | {'prompt': 'new', 'log_probs': [-2.0, -1.0]},
                      sample | {'id': '2', 'prompt': 'old', 'log_probs': [-2.0, -1.0]},
                      sample | {'id': '2', 'prompt': 'old', 'log_probs': [-2.0, -1.0]}])
    lines = [line.split() for line in run_metrics(path).stdout.split('\n')]
    assert ['n', '2'] in lines and ['accuracy', '0.0000'] in lines
    # an answer that states no probability has none
    sample = {key: sample[key] for key in sample if key != 'answer'} | {'prompt': ''}
    write_rows(path, [sample | {'confidence': None, 'correct': True},
                      sample | {'id': '2', 'confidence': 0.5, 'correct': True}])
    assert ['n', '1'] in [line.split() for line in run_metrics(path).stdout.split('\n')]
    write_rows(path, [{'log_probs': [-80.0, -2.0], 'answer': 0}])
    assert ['nll', '78.0000'] in [line.split() for line in run_metrics(path).stdout.split('\n')]


def test_norm_divides_log_probabilities_as_in_evaluation(tmp_path):
    row = {'log_probs': [-2.0, -6.0], 'n_tokens': [1, 3], 'answer': 0, 'options': [' é', ' long']}
    path = write_rows(tmp_path / 'samples.jsonl', [row])
    for norm, lengths in (('token', (1, 3)), ('sum', (1, 1)), ('char', (1, 4)), ('byte', (2, 4))):
        p = metrics.softmax([row['log_probs'] / np.array(lengths)])
        lines = [line.split() for line in run_metrics(path, f'--norm={norm}').stdout.split('\n')]
        assert ['confidence', f'{p.max():.4f}'] in lines, norm
    assert run_metrics(path).stdout == run_metrics(path, '--norm=token').stdout
    write_rows(path, [row | {'options': ['a']}])
    assert '1: --norm=char needs options' in run_metrics(path, '--norm=char').stderr


@pytest.mark.skipif(not Path('/dev/full').exists(), reason='needs Linux')
def test_a_full_disk_behind_standard_output_is_one_line(tmp_path):
    path = write_rows(tmp_path / 'samples.jsonl', [{'probs': [1.0], 'answer': 0}])
    with open('/dev/full', 'w') as full:
        done = subprocess.run([sys.executable, 'metrics.py', path], cwd=HERE, stdout=full,
                              stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (
        1, 'error: standard output cannot be written: No space left on device\n')


def test_the_program_says_how_it_is_called():
    done = run_metrics('--help')
    assert done.returncode == 0 and done.stdout.startswith('usage: metrics.py')
    assert '{"probs": [0.7, 0.2, 0.1], "answer": 0}' in done.stdout
    assert 'example: python metrics.py ' in done.stdout
    assert run_metrics().returncode == 2


@pytest.mark.parametrize('lines, message', [
    ('{"probs": [0.7, 0.3], "answer": 0}\n{"probs": [1]}', '2: answer must be the index'),
    ('\n{"confidence": 0.6, "correct": "false"}', "2: correct must be true or false, not 'false'"),
    ('{"confidence": 0.6}', '1: correct must be true or false, not None'),
    ('{"confidence": 0.6, "correct": 2}', '1: correct must be true or false, not 2'),
    ('{"confidence": 0.6, "correct": [1]}', '1: correct must be true or false, not [1]'),
    ('{"confidence": true, "correct": true}', '1: confidence must be numbers'),
    ('{"confidence": 1.6, "correct": true}', '1: confidence is 1.6, not from 0 to 1'),
    ('{"confidence": 0.6, "correct": true}\n{"probs": [0.5, 0.5], "answer": 0}',
     '2: probs, but the task begins with confidence'),
    ('{"probs": [0.5, 0.5], "answer": 0}\n{"confidence": 0.6, "correct": true}',
     '2: confidence, but the task begins with probs'),
    ('', ' no row to score'), ('\n\n', ' no row to score'),
    ('{"probs": [1.0], "answer": 0, "split": "validation"}', ' no row to score'),
    ('{"probs": [0.5, NaN], "answer": 0}', '1: probability of option 1 is nan'),
    ('{"probs": [Infinity], "answer": 0}', '1: probabilities sum to inf'),
    ('{"probs": [0.5, 0.5], "answer": 0}\n\n{"probs": [0.9, 0.5], "answer": 0}',
     '3: probabilities sum to 1.4'),
    ('{"probs": [0.5, 0.5], "answer": 2}', '1: label 2 is not one of'),
    ('{"probs": [0.5, 0.5], "answer": 1}\n{"probs": [1.0], "answer": 1}',
     '2: label 1 is not one of the options 0 to 0'),
    ('{"probs": [0.5, 0.5], "answer": true}', '1: answer must be the index'),
    ('{"probs": [0.5, 0.5], "answer": 1.0}', '1: answer must be the index'),
    ('{"probs": ["0.5", "0.5"], "answer": 1}', '1: probs must be numbers'),
    ('{"probs": {"a": 1}, "answer": 0}', '1: probs must be numbers'),
    ('{"probs": [[0.5, 0.5]], "answer": 0}', '1: probs must be numbers'),
    ('{"probs": [], "answer": 0}', '1: probs must be [N, K] with N, K >= 1'),
    ('{"log_probs": [], "answer": 0}', '1: scores must be [N, K]'),
    ('{"log_probs": [-1, NaN], "answer": 0}', '1: the largest score is nan'),
    ('{"log_probs": [-1, -Infinity], "answer": 1}', '1: label 1 has the score -inf'),
    ('{"log_probs": [-1, -2], "answer": 1, "n_tokens": [1, 0]}', '1: n_tokens must be'),
    ('{"log_probs": [-1, -2], "answer": 1, "n_tokens": [1, 1e999]}', '1: n_tokens must be'),
    ('{"log_probs": [-1, -2], "answer": 1, "n_tokens": [1]}', '1: n_tokens must be'),
    ('{"log_probs": [-1, -1e308], "answer": 0}', '1: log_probs must be below 1e300 in magnitude'),
    ('{"log_probs": [1e308, -1e308], "answer": 0}', '1: log_probs must be below 1e300'),
    ('{"probs": [1%s], "answer": 0}' % ('0' * 400), '1: int too large'),
    ('[1]', '1: not a JSON object: [1]'), ('null', '1: not a JSON object: None'),
    ('{}', '1: probs must be numbers, not None'),
    ('{"answer": 1}', '1: probs must be numbers, not None'),
    ('{"probs": [1.0', '1: Expecting'), ('\xff\xfe', "1: 'utf"),
])
def test_the_program_names_the_line(tmp_path, lines, message):
    path = tmp_path / 'some.jsonl'
    path.write_bytes(lines.encode('latin-1'))
    done = run_metrics(path)
    assert done.returncode == 1 and done.stdout == ''
    assert done.stderr.startswith(f'error: {path}:{message}'), done.stderr
    assert done.stderr.count('\n') == 1


def test_the_program_names_what_is_missing(tmp_path):
    done = run_scripts(1, 'metrics.py', tmp_path / 'none.jsonl')
    assert done.returncode == 1
    assert done.stderr == f'error: {tmp_path / "none.jsonl"}: No such file or directory\n'
    assert run_metrics(tmp_path).returncode == 1


def test_confidence_of_a_quarter_and_of_one():
    certain = np.eye(4)[[0, 1]]
    unsure = np.full((2, 4), 0.25)
    probs = np.concatenate([certain, unsure])
    for n_bins in range(1, 31):
        table = metrics.bins(probs, [0, 0, 0, 1], n_bins)
        assert table['count'].sum() == 4
        assert table['count'][-1] == (4 if n_bins == 1 else 2)
        if n_bins > 1:
            quarter = math.ceil(n_bins / 4) - 1
            assert (table['count'][quarter], table['confidence'][quarter]) == (2, 0.25)
            assert (table['accuracy'][quarter], table['accuracy'][-1]) == (0.5, 0.5)
    # A sum above 1 by rounding leaves confidence 1 + 5e-5 in the last bin.
    assert metrics.bins([[1.00005, 0.0]], [0])['count'][-1] == 1


def test_a_probability_of_0_is_in_the_first_bin():
    # p of option 1 is 0 and 0.1, both in bin 1: mean 0.05, label in half of them. Those of option 0
    # are 1 and 0.9, in two bins.
    probs = [[1.0, 0.0], [0.9, 0.1]]
    assert metrics.sce(probs, [1, 0], n_bins=10) == exactly((0.45 + (1.0 + 0.1) / 2) / 2)


def test_bins_are_what_a_reliability_diagram_needs():
    probs = np.array([[0.9, 0.1], [0.85, 0.15], [0.35, 0.65], [0.5, 0.5]])
    table = metrics.bins(probs, [0, 1, 1, 1], n_bins=5)
    assert list(table) == ['edges', 'count', 'confidence', 'accuracy', 'low', 'high']
    assert table['edges'].tolist() == [0, 0.2, 0.4, 0.6, 0.8, 1]
    assert table['count'].tolist() == [0, 0, 1, 1, 2]
    assert table['confidence'] == pytest.approx([math.nan, math.nan, 0.5, 0.65, 0.875], nan_ok=True)
    assert table['accuracy'] == pytest.approx([math.nan, math.nan, 0, 1, 0.5], nan_ok=True)
    assert (table['low'][4], table['high'][4]) == pytest.approx(metrics.wilson_interval(
        np.array([0.9, 0.9]), np.array([True, False])))
    assert np.isnan(table['low'][0])
    assert metrics.ece(probs, [0, 1, 1, 1], 5) == exactly((0.5 + 0.35 + 2 * 0.375) / 4)
    assert metrics.mce(probs, [0, 1, 1, 1], 5) == exactly(0.5)


@st.composite
def ragged_predictions(draw):
    """Predictions whose rows have 1 to K options, zero-padded, and the options per row."""
    k = draw(st.integers(1, 5))
    n = draw(st.integers(1, 25))
    n_options = draw(arrays(np.int64, n, elements=st.integers(1, k)))
    weights = draw(arrays(np.int64, (n, k), elements=st.integers(0, 8)))
    weights[:, 0] += weights.sum(1) == 0
    weights *= np.arange(k) < n_options[:, None]
    weights[:, 0] += weights.sum(1) == 0
    labels = draw(arrays(np.int64, n, elements=st.integers(0, k - 1))) % n_options
    return weights / weights.sum(1, keepdims=True), labels, n_options


@small
@given(ragged_predictions(), st.integers(1, 20))
def test_class_wise_metrics_count_only_rows_that_have_the_option(case, n_bins):
    probs, labels, n_options = case
    static = []
    adaptive = []
    for k in range(n_options.max()):
        rows = n_options > k
        p, is_label = probs[rows, k], labels[rows] == k
        static.append(literal_gap(p, is_label, equal_width_bin(n_bins)))
        chunks = min(n_bins, len(p))
        sizes = np.diff([round(r * len(p) / chunks) for r in range(chunks + 1)])
        adaptive.append(literal_gap(p, is_label, equal_mass_bin(p, sizes)))
    assert metrics.sce(probs, labels, n_bins, n_options) == exactly(np.mean(static))
    assert metrics.ace(probs, labels, n_bins, n_options) == exactly(np.mean(adaptive))


def literal_sets(probs, labels, n_options, method, alpha):
    """Conformal sets by their definition: each row's quantile from a sort of the other rows."""
    def score(i, k):
        if method == 'lac':
            return round(1 - probs[i, k], 12)
        p = [round(x, 12) for x in probs[i].tolist()]
        return round(sum(probs[i, j] for j in range(len(p)) if (-p[j], j) <= (-p[k], k)), 12)
    n, sets = len(labels), np.zeros(probs.shape, bool)
    k = math.ceil(n * (1 - alpha) - 1e-9)
    for i in range(n):
        others = sorted(score(j, labels[j]) for j in range(n) if j != i)
        q = others[k - 1] if k <= n - 1 else math.inf
        for option in range(n_options[i]):
            sets[i, option] = score(i, option) <= q
    return sets


@pytest.mark.parametrize('method', ['lac', 'aps'])
@small
@given(ragged_predictions(), st.sampled_from([0.1, 0.25, 0.5]))
def test_conformal_sets_leave_out_their_own_row(method, case, alpha):
    probs, labels, n_options = case
    sets = metrics.conformal_sets(probs, labels, n_options, method=method, alpha=alpha)
    assert (sets == literal_sets(probs, labels, n_options, method, alpha)).all()
    coverage, size = metrics.conformal(probs, labels, n_options, method=method, alpha=alpha)
    assert size == exactly(sets.sum() / len(labels)) and coverage >= 1 - alpha - 1e-12


@pytest.mark.parametrize('method', ['lac', 'aps'])
def test_conformal_sets_of_new_rows_hold_the_label_as_often_as_promised(method):
    """The thresholds come from other rows, so coverage holds for a model that is far off."""
    probs, labels = calibration_case(0, 3000, 5, 2.0, 0.6)
    assert metrics.conformal(probs, labels, method=method)[0] == pytest.approx(0.9, abs=1e-3)
    _, sharp = metrics.conformal(*calibration_case(0, 3000, 5, 3.0, 3.0), method=method)
    assert sharp < metrics.conformal(probs, labels, method=method)[1] - 1
    for bad in (0, 1, -0.1, math.nan):
        with pytest.raises(ValueError, match='alpha must be a number in'):
            metrics.conformal_sets(probs, labels, method=method, alpha=bad)
    with pytest.raises(ValueError, match="method must be 'lac' or 'aps', not 'raps'"):
        metrics.conformal_sets(probs, labels, method='raps')


@pytest.mark.slow
@small
@given(predictions(), st.integers(1, 4))
def test_padding_changes_nothing_when_n_options_is_given(case, extra):
    probs, labels = case
    n, k = probs.shape
    padded = np.concatenate([probs, np.zeros((n, extra))], 1)
    expected = metrics.report(probs, labels)
    result = metrics.report(padded, labels, np.full(n, k))
    for key, value in expected.items():
        assert result[key] == pytest.approx(value, rel=0, abs=1e-12, nan_ok=True), key
    # Without it the padding is a class of its own, always right: sce and ace shrink.
    assert metrics.sce(padded, labels) == exactly(expected['sce'] * k / (k + extra))


def test_wilson_interval_equals_the_textbook():
    # 9 right of 10, the textbook example: 0.5958 to 0.9821.
    probs = np.tile([0.8, 0.2], (10, 1))
    labels = [0] * 9 + [1]
    assert metrics.wilson_interval(probs, labels) == pytest.approx((0.5958, 0.9821), abs=1e-4)
    # The bounds are the two accuracies p from which 0.9 is exactly z standard errors away.
    for z in [1.0, 1.96, 2.576]:
        for p in metrics.wilson_interval(probs, labels, z=z):
            assert abs(0.9 - p) == exactly(z * math.sqrt(p * (1 - p) / 10))
    # All right or all wrong still leaves a width: z^2 / (N + z^2).
    width = 1.96**2 / (10 + 1.96**2)
    assert metrics.wilson_interval(probs, [0] * 10) == (exactly(1 - width), 1)
    assert metrics.wilson_interval(probs, [1] * 10) == (0, exactly(width))


def test_report_holds_plain_numbers_and_agrees_with_the_functions():
    probs, labels = golden_case('small_4')
    result = metrics.report(probs, labels)
    whole = {'n', 'mce_count'}
    assert all(type(value) is (int if key in whole else float) for key, value in result.items())
    assert json.loads(json.dumps(result)) == result
    assert all(format(0.5, measure.format) for measure in metrics.MEASURES)     # of a mean, too
    assert all(line.split()[0] in result for line in str(result).split('\n'))
    low, high = metrics.wilson_interval(probs, labels)
    assert (result['accuracy_low'], result['accuracy_high']) == (low, high)
    assert result['n'] == 150
    assert result['confidence'] == exactly(metrics.mean_confidence(probs, labels))
    assert result['entropy_bits'] == metrics.entropy(probs, labels)
    same_name = ['accuracy', 'gap', 'nll', 'brier', 'ece', 'mce', 'ece_equal_mass', 'sce', 'ace']
    same_name += ['rmsce', 'mad', 'tace', 'ece_sweep', 'ece_debiased', 'rmsce_hendrycks', 'mmce',
                  'rms_mmlu_repo', 'ks_error', 'smooth_ece', 'kde_ece', 'auroc', 'aurc']
    for name in same_name:
        assert result[name] == exactly(getattr(metrics, name)(probs, labels)), name
    # Lists, float32 and small integer types are accepted too.
    as_float32 = metrics.report(probs.astype(np.float32), labels.astype(np.int8))
    assert as_float32 == {key: pytest.approx(value, abs=1e-6) for key, value in result.items()}
    assert metrics.report(probs.tolist(), labels.tolist()) == result


def test_the_table_of_measures_is_what_a_report_holds():
    probs, labels = golden_case('small_4')
    keys = [measure.key for measure in metrics.MEASURES]
    assert list(metrics.report(probs, labels)) == ['n', *keys] and len({*keys}) == len(keys)
    assert len({measure.title for measure in metrics.MEASURES}) == len(keys)
    for measure in metrics.MEASURES:
        value = metrics.report(probs, labels, measures=[measure])[measure.key]
        assert format(value, measure.format) and type(value) in (int, float), measure.key
        assert measure.higher_is_better in (True, False, None)
        assert {*measure.tables} <= {'runs', 'results', 'compare'}
    alone = metrics.report(*metrics.top_label(probs, labels))
    assert list(alone) == ['n', *(x.key for x in metrics.MEASURES if x.needs == 'prediction')]


@pytest.mark.parametrize('dtype, off, refused', [
    (np.float16, 9e-4, 2e-3), (np.float32, 9e-5, 2e-4), (np.float64, 9e-5, 2e-4)])
def test_rows_may_be_off_by_the_rounding_of_their_precision(dtype, off, refused):
    rng = np.random.default_rng(0)
    probs = metrics.softmax(3 * rng.normal(size=(5000, 5)))
    labels = rng.integers(0, 5, 5000)
    rounded = metrics.report(probs.astype(dtype), labels)
    assert rounded['brier'] == pytest.approx(metrics.brier(probs, labels), abs=1e-3)
    metrics.check_probs(np.array([[0.5, 0.5 + off]], dtype), [0])
    assert metrics.report(np.array([[1 + off, 0]], dtype), [0])['accuracy'] == 1
    with pytest.raises(ValueError, match='row 0: probabilities sum to'):
        metrics.check_probs(np.array([[0.5, 0.5 + refused]], dtype), [0])


def test_metrics_leave_their_input_alone():
    probs, labels = golden_case('small_4')
    before = probs.copy(), labels.copy()
    metrics.report(probs, labels, np.full(150, 4))
    assert np.array_equal(probs, before[0]) and np.array_equal(labels, before[1])


METRICS = [
    *[metrics.accuracy, metrics.wilson_interval, metrics.mean_confidence, metrics.gap],
    *[metrics.entropy, metrics.nll, metrics.brier, metrics.bins, metrics.ece, metrics.mce],
    *[metrics.ece_equal_mass, metrics.rmsce, metrics.mad, metrics.sce, metrics.ace, metrics.report],
]


@pytest.mark.parametrize('metric', METRICS)
@pytest.mark.parametrize(
    'probs, labels, message',
    [
        (0.5, 0, 'probs must be [N, K] with N, K >= 1, not of shape ()'),
        ([[[0.5, 0.5]]], [0], 'probs must be [N, K] with N, K >= 1, not of shape (1, 1, 2)'),
        (np.zeros((0, 4)), [], 'probs must be [N, K] with N, K >= 1, not of shape (0, 4)'),
        (np.zeros((2, 0)), [0, 0], 'probs must be [N, K] with N, K >= 1, not of shape (2, 0)'),
        (
            [[0.5, 0.5], [1.0, 0.0]],
            [0],
            'labels must be [2], one per row, not of shape (1,)',
        ),
        ([[0.5, 0.5]], [[0]], 'labels must be [1], one per row, not of shape (1, 1)'),
        ([[0.5, 0.5]], [0.0], 'labels must be integers, not float64'),
        ([[0.5, 0.5]], ['A'], 'labels must be integers, not <U1'),
        (
            [[1.0, 0.0], [0.5, math.nan]],
            [0, 0],
            'row 1: probability of option 1 is nan, not 0 or more',
        ),
        (
            [[1.0, 0.0], [1.0, 0.0], [-0.25, 1.25]],
            [0, 0, 0],
            'row 2: probability of option 0 is -0.25, not 0 or more',
        ),
        ([[1.0, 0.0], [0.5, 0.4]], [0, 0], 'row 1: probabilities sum to 0.9, not to 1'),
        ([[0.5, 0.5], [0.5002, 0.5]], [0, 0], 'row 1: probabilities sum to 1.0002, not to 1'),
        ([[math.inf, 0.0]], [0], 'row 0: probabilities sum to inf, not to 1'),
        ([[0.5, 0.5], [0.5, 0.5]], [1, 2], 'row 1: label 2 is not one of the options 0 to 1'),
        ([[0.5, 0.5]], [-1], 'row 0: label -1 is not one of the options 0 to 1'),
    ],
)
def test_metrics_refuse_bad_predictions(metric, probs, labels, message):
    with pytest.raises(ValueError) as error:
        metric(probs, labels)
    assert str(error.value) == message


def test_metrics_accept_rows_that_sum_to_1_within_the_tolerance():
    assert metrics.accuracy([[0.50009, 0.5]], [0]) == 1
    assert metrics.accuracy([[0.49991, 0.5]], [0]) == 0


@pytest.mark.parametrize('metric', [metrics.sce, metrics.ace, metrics.report])
@pytest.mark.parametrize(
    'n_options, message',
    [
        ([3], 'n_options must be [2], one per row, not of shape (1,)'),
        ([3.0, 2.0], 'n_options must be integers, not float64'),
        ([3, 0], 'row 1: n_options is 0, not from 1 to 3'),
        ([4, 2], 'row 0: n_options is 4, not from 1 to 3'),
        ([3, 1], 'row 1: label 1 points at padding, n_options is 1'),
        ([2, 2], 'row 0: padded option 2 has probability 0.25, not 0'),
    ],
)
def test_metrics_refuse_bad_n_options(metric, n_options, message):
    with pytest.raises(ValueError) as error:
        metric([[0.5, 0.25, 0.25], [0.5, 0.5, 0.0]], [0, 1], n_options=n_options)
    assert str(error.value) == message


@pytest.mark.parametrize(
    'metric, setting, value, message',
    [
        (metrics.bins, 'n_bins', 0, 'n_bins must be a whole number, 1 or more, not 0'),
        (metrics.ece, 'n_bins', 10.0, 'n_bins must be a whole number, 1 or more, not 10.0'),
        (metrics.mce, 'n_bins', -1, 'n_bins must be a whole number, 1 or more, not -1'),
        (metrics.ece_equal_mass, 'n_bins', 0, 'n_bins must be a whole number, 1 or more, not 0'),
        (metrics.sce, 'n_bins', 0, 'n_bins must be a whole number, 1 or more, not 0'),
        (metrics.ace, 'n_ranges', 0, 'n_ranges must be a whole number, 1 or more, not 0'),
        (metrics.rmsce, 'bin_size', 0, 'bin_size must be a whole number, 1 or more, not 0'),
        (metrics.mad, 'bin_size', '9', "bin_size must be a whole number, 1 or more, not '9'"),
        (metrics.entropy, 'unit', 'bans', "unit must be 'bits', 'nats' or 'share', not 'bans'"),
        (
            metrics.wilson_interval,
            'z',
            0,
            'z must be a number in (0, 1000], not 0',
        ),
        (
            metrics.wilson_interval,
            'z',
            math.nan,
            'z must be a number in (0, 1000], not nan',
        ),
    ],
)
def test_metrics_refuse_bad_settings(metric, setting, value, message):
    with pytest.raises(ValueError) as error:
        metric([[0.5, 0.5]], [0], **{setting: value})
    assert str(error.value) == message


# ------------------------------------------------------------------------------------------------
# Files that lm-evaluation-harness wrote
# ------------------------------------------------------------------------------------------------

HARNESS_FILES = HERE / 'tests' / 'harness_files'


def harness_rows(task, model='first'):
    path, = (HARNESS_FILES / model).glob(f'samples_{task}_2*.jsonl')
    return path, [json.loads(line) for line in path.read_text().splitlines()]


def accuracies(folder, norm):
    """{task: accuracy} by what `python metrics.py` prints of all its multiple-choice files."""
    files = [path for path in folder.glob('samples_*.jsonl') if not re.search(
        'several|written|last_word|whole_text', path.name)]
    lines = run_metrics(f'--norm={norm}', *files).stdout.split('\n')
    titles = [i for i, line in enumerate(lines) if line and not lines[i - 1]]
    return {lines[i]: float(lines[i + 2].split()[1]) for i in titles}


def check_accuracies(folder, n_tasks):
    """Each accuracy is the one that lm-evaluation-harness computed itself."""
    results = json.loads(next(folder.glob('results_*.json')).read_text())['results']
    for norm, metric in (('sum', 'acc'), ('char', 'acc_norm'), ('byte', 'acc_bytes')):
        ours = accuracies(folder, norm)
        assert len(ours) == n_tasks
        theirs = {task: results[task][f'{metric},none'] for task in ours
                  if f'{metric},none' in results[task]}
        assert {task: ours[task] for task in theirs} == pytest.approx(theirs, abs=1e-4)
        assert 'endings' in theirs


@pytest.mark.parametrize('model, n_tasks', [('first', 5), ('second', 3)])
def test_accuracy_of_lm_eval_files_is_their_own(model, n_tasks):
    check_accuracies(HARNESS_FILES / model, n_tasks)


@pytest.mark.skipif(importlib.util.find_spec('lm_eval') is None, reason='needs lm-eval')
def test_files_of_the_installed_lm_eval_are_read(tmp_path):
    subprocess.run([sys.executable, HARNESS_FILES / 'write.py', tmp_path / 'out'], check=True)
    check_accuracies(tmp_path / 'out' / 'first', 5)
    check_accuracies(tmp_path / 'out' / 'second', 3)


def test_a_sample_of_lm_eval_has_its_log_probs_lengths_and_answer():
    _, rows = harness_rows('endings')
    row = rows[2]       # Im Café trank er: einen süßen Tee., Öl., über.
    theirs = [float(x) for x, _ in row['filtered_resps']]
    for norm, lengths in (('sum', [1, 1, 1]), ('char', [16, 3, 5]), ('byte', [18, 4, 6])):
        sample = harness_sample(row, norm)
        assert (sample['log_probs'], sample['n_tokens']) == (theirs, lengths)
        assert sample['options'] == [' einen süßen Tee.', ' Öl.', ' über.']
        assert sample['answer'] == 0 and sample['id'] == f'2:{row["doc_hash"][:16]}'
    # the answer of two contexts, of an option's text, and of log-probabilities beside others
    assert [harness_sample(row)['answer'] for row in harness_rows('gaps')[1]] == [0, 1]
    assert harness_sample(harness_rows('named')[1][0])['answer'] == 1
    unconditional = [harness_sample(row) for row in harness_rows('against_nothing')[1]]
    assert unconditional == [harness_sample(row) for row in rows]
    path, _ = harness_rows('trivia_animals')
    assert harness_task(path) == ('trivia', 'trivia_animals', '2026-' + path.stem[-21:])
    assert harness_task(path.with_name('mine.jsonl')) == ('samples', '', '')


@pytest.mark.slow
def test_lm_eval_files_that_cannot_be_measured(tmp_path):
    for task, message in (('several', r"its target, '\[1, 2\]', is not the only right option"),
                          ('written', 'not multiple choice, so there are no probabilities'),
                          ('last_word', 'not multiple choice'), ('whole_text', 'not multiple')):
        done = run_metrics(harness_rows(task)[0])
        assert done.returncode == 1 and not done.stdout and done.stderr.count('\n') == 1
        assert re.search(rf'samples_{task}_.*jsonl:1: {message}', done.stderr), done.stderr
    _, rows = harness_rows('endings')
    for change, message in (        # the first as in truthfulqa_mc2
                            ({'acc': 0.37}, "target, '0', is not the only right"),
                            ({'target': '3'}, "target, '3', is not the only right"),
                            ({'target': '-100'}, "target, '-100', is not the only"),
                            ({'arguments': [['a', ' b']]}, '3 results of 1 calls'),
                            ({'arguments': [7] * 3}, 'not a line that lm_eval'),
                            ({'filtered_resps': None}, 'not a line that lm_eval'),
                            ({'filtered_resps': [['nan', 'False']] * 3, 'acc': 1.0},
                             'largest score is nan')):
        path = write_rows(tmp_path / 'mine.jsonl', [rows[0], rows[0] | change])
        done = run_metrics(path)
        assert done.returncode == 1 and f'{path}:2: ' in done.stderr and message in done.stderr
    row = harness_rows('gaps')[1][0]
    del row['acc']
    assert "not a line that lm_eval --log_samples wrote (KeyError('acc'))" in run_metrics(
        write_rows(tmp_path / 'mine.jsonl', [row])).stderr


def of_version(row, version):
    """A line as lm_eval 0.4.2 (`old`), 0.4.3 or 0.4.5 (without filters) wrote it."""
    row = {key: value for key, value in row.items() if key not in ('filter', 'metrics')}
    if version < 4:
        row['target'] = int(row['target']) if row['target'].isdigit() else row['target']
    if version < 3:
        row = {key: value for key, value in row.items() if not key.endswith('_hash')}
        row['arguments'] = [[*call.values()] for call in row['arguments'].values()]
        row['filtered_resps'] = [[float(x), y == 'True'] for x, y in row['filtered_resps']]
        row['resps'] = [[[float(x), y == 'True']] for ((x, y),) in row['resps']]
    return row


@pytest.mark.parametrize('task', ['endings', 'gaps', 'named', 'trivia_animals', 'against_nothing'])
def test_lines_of_older_versions_of_lm_eval_are_read_as_those_of_this_one(task):
    for row in harness_rows(task)[1]:
        for version in (2, 3, 5):
            old = of_version(row, version)
            for norm in prediction_files.NORMS:
                assert harness_sample(old, norm) == harness_sample(row, norm)


def write_old(folder, task, rows):
    """The files of lm_eval 0.4.2: results.json, and an array of many lines."""
    folder.mkdir(exist_ok=True)
    results = folder / 'results.json'
    tasks = json.loads(results.read_text())['configs'] if results.exists() else {}
    results.write_text(json.dumps({'results': {}, 'configs': tasks | {task: {}},
                                   'group_subtasks': {'trivia': ['trivia_animals']}}))
    path = folder / f'pretrained__first_{task}.jsonl'
    path.write_text(json.dumps([of_version(row, 2) for row in rows], indent=2))
    return path


def test_the_array_of_an_old_lm_eval_gives_the_same_report(tmp_path):
    for task in ('endings', 'trivia_animals'):
        path, rows = harness_rows(task)
        old = write_old(tmp_path, task, rows)
        new = run_metrics(path).stdout.splitlines()
        assert new and run_metrics(old).stdout.splitlines() == new
    assert harness_task(old) == ('trivia', 'trivia_animals', 'results.json')
    alone = tmp_path / 'mine.json'
    alone.write_bytes(b'\xef\xbb\xbf' + old.read_bytes() + b'\n' + old.read_bytes())    # twice
    assert run_metrics(alone).stdout.splitlines()[1:] == new[1:]
    alone.write_text(old.read_text()[:-9])
    assert f'{alone}: broken JSON: ' in run_metrics(alone).stderr
    rows = json.loads(old.read_text())
    alone.write_text(json.dumps([rows[0], rows[1] | {'acc': 0.5}]))
    assert f'{alone}: row 2: its target, 1, is not the only' in run_metrics(alone).stderr


def test_a_repeated_question_of_lm_eval_counts_once(tmp_path):
    path, rows = harness_rows('endings')
    once = run_metrics(path).stdout.splitlines()[1:]

    def report_of(rows):
        return run_metrics(write_rows(tmp_path / 'mine.jsonl', rows))

    by_filter = [row | {'filter': name} for row in rows for name in ('none', 'custom')]
    for repeated in (by_filter, rows + rows, rows + [of_version(row, 2) for row in rows]):
        assert report_of(repeated).stdout.splitlines()[1:] == once
    assert run_metrics(path, path).stdout.splitlines()[1:] == once
    other = rows[1] | {'filtered_resps': rows[1]['filtered_resps'][::-1],
                       'acc': 1 - rows[1]['acc']}
    for change, why in (({'filter': 'custom'}, 'of the filters none and custom; keep the lines'),
                        ({}, 'of several models or calls; give each of them')):
        message = report_of([*rows, other | change]).stderr
        assert 'mine.jsonl:5: question 1:' in message and why in message
    # other questions with the same numbers, as in the files of several subtasks
    several = rows + harness_rows('trivia_animals')[1]
    assert report_of(several).stdout.splitlines()[1].split() == ['n', '8']


@pytest.mark.parametrize('target, answer', [([1], 1), ('[1]', 1), ([1.0], None), (1, 1), ('1', 1),
                                            ("['six']", 1), (['six'], 1), ([1, 2], None),
                                            ('[1, 2]', None), ([], None), ('[]', None),
                                            ('[x', None), (None, None), (4, None), (-100, None)])
def test_a_list_with_one_target_of_lm_eval_is_that_target(target, answer):
    row = next(row for row in harness_rows('trivia_animals')[1] if row['doc_id'] == 0)
    words = row['doc']['choices']
    row['arguments'] = {key: call | {'arg_1': f' {word}'} for (key, call), word in zip(
        row['arguments'].items(), words, strict=True)}
    top = int(np.argmax([float(x) for x, _ in row['filtered_resps']]))
    row |= {'target': target, 'acc': float(top == 1)}
    if answer is None:
        with pytest.raises(ValueError, match='is not the only right option'):
            harness_sample(row)
    else:
        assert harness_sample(row)['answer'] == answer


def test_lm_eval_files_of_two_models_are_not_mixed():
    files = [harness_rows(f'trivia_{x}', model)[0] for model in ('first', 'second')
             for x in ('animals', 'rivers')]
    lines = run_metrics(*files).stdout.split('\n')
    titles = [i for i, line in enumerate(lines) if line and not lines[i - 1]]
    assert sorted(re.sub(', .*: ', ' ', lines[i].split('/')[-1]) for i in titles) == [
        'first trivia', 'second trivia']
    assert all(lines[i + 1].split() == ['n', '6'] for i in titles)
