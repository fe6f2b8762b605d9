"""stats.py: the bootstrap is the report of resampled rows; intervals and tests hold their level"""

import itertools
import math
import numpy as np
import pytest
from common import exactly

import metrics
import stats
from compare import significance


@pytest.mark.parametrize('n, K, ragged', [(1, 3, False), (150, 4, False), (250, 5, True)])
def test_bootstrap_is_the_report_of_resampled_rows(n, K, ragged):
    rng = np.random.default_rng(n)
    n_options = rng.integers(2, K + 1, n) if ragged else np.full(n, K)
    n_options[0] = K
    weight = rng.choice([0.5, 1, 2], (n, K)) if ragged else rng.random((n, K))    # with ties
    probs = np.where(np.arange(K) < n_options[:, None], weight, 0)
    probs /= probs.sum(1, keepdims=True)
    labels, x = rng.integers(0, n_options), rng.random(n)
    # rows of one question are drawn together
    questions = rng.permutation(np.minimum(np.arange(n), 119)) if ragged else np.arange(n)
    found = stats.bootstrap(probs, labels, n_options, n_resamples=7, seed=3, columns={'x': x},
                            questions=questions if ragged else None)
    n_questions = questions.max() + 1
    drawn = [np.repeat(np.arange(n), np.bincount(numbers, minlength=n_questions)[questions])
             for numbers in np.random.default_rng(3).integers(n_questions, size=(7, n_questions))]
    assert found.pop('x') == exactly([x[rows].mean() for rows in drawn])
    for i, rows in enumerate(drawn):
        report = metrics.report(probs[rows], labels[rows], n_options[rows])
        for metric, values in found.items():
            assert values[i] == pytest.approx(report[metric], rel=1e-9, abs=1e-9,
                                              nan_ok=True), metric
    assert found.keys() == {x.key for x in metrics.MEASURES if x.tables} | {
        'gap', 'ece_15', 'ece_equal_mass', 'bas', 'brier_top_label', 'brier_skill', 'entropy_nats',
        'entropy_share'}
    correct = probs.argmax(1) == labels
    alone = stats.bootstrap(probs.max(1), correct, n_resamples=7, seed=3, questions=questions)
    assert all(np.allclose(values, found[metric], equal_nan=True)
               for metric, values in alone.items())


def test_an_edited_measure_has_the_intervals_of_its_new_code(monkeypatch):
    """A metric that takes no weights is called with the rows of each resample."""
    rng = np.random.default_rng(0)
    probs = rng.dirichlet(np.ones(3), 60)
    labels = rng.integers(0, 3, 60)
    before = stats.bootstrap(probs, labels, n_resamples=9)
    edited = {'ece': lambda p, y: metrics.ece(p, y, 5), 'brier': lambda p, y: 1.0,
              'sce': lambda p, y, n_options: metrics.sce(p, y, 4, n_options)}
    new = metrics.Measure('first', 'first', lambda p, y: p[:, 0].mean(), None, 'options')
    monkeypatch.setattr(metrics, 'MEASURES', (*(
        x._replace(function=edited.get(x.key, x.function)) for x in metrics.MEASURES), new,
        new._replace(key='hidden', tables=())))     # a new measure, and one without a column
    after = stats.bootstrap(probs, labels, n_resamples=9)
    assert {key for key in after if not np.array_equal(before.get(key), after[key])} == {
        *edited, 'first'}
    drawn = np.random.default_rng(0).integers(60, size=(9, 60))
    for i, rows in enumerate(np.sort(drawn, 1)):
        assert after['ece'][i] == exactly(metrics.ece(probs[rows], labels[rows], 5))
        assert after['sce'][i] == exactly(metrics.sce(probs[rows], labels[rows], 4))
        assert after['first'][i] == exactly(probs[rows, 0].mean())
    assert stats.bootstrap(probs, labels, n_resamples=3, keys=['auroc', 'ece']).keys() == {
        'auroc', 'ece'}


def test_mcnemar_is_the_exact_test_of_the_rows_in_which_two_models_differ():
    a, b = np.repeat([[1, 0], [0, 1], [1, 1], [0, 0]], [3, 10, 20, 7], axis=0).T == 1
    assert significance.mcnemar(a, b) == (3, 10, 0.09228515625)    # scipy's binomtest(3, 13)
    a, b = np.arange(8) < 4, np.arange(8) >= 4      # as likely as any: p is cut at 1
    assert significance.mcnemar(a, b) == (4, 4, 1)
    assert significance.mcnemar([True], [True]) == (0, 0, 1)


def test_cochran_q_of_two_models_is_the_chi_square_of_mcnemar():
    rng = np.random.default_rng(0)
    correct = rng.random((2, 200)) < [[0.5], [0.65]]
    only_a, only_b, _ = significance.mcnemar(*correct)
    q, p = significance.cochran_q(correct)
    assert q == exactly((only_a - only_b) ** 2 / (only_a + only_b))
    assert p == exactly(math.erfc(math.sqrt(q / 2)))
    assert significance.cochran_q(np.ones((3, 9), bool)) == (0, 1)


def test_answers_to_one_question_are_tested_together():
    """Every sign of McNemar's differences by question, and every order of Cochran's counts."""
    rng = np.random.default_rng(3)
    questions, correct = np.array([*'abcdeabcdeabc']), rng.random((3, 13)) < 0.6
    right = np.array([correct[:, questions == name].sum(1) for name in 'abcde'])   # [5, 3]
    d = right[:, 0] - right[:, 1]
    signs = np.array([*itertools.product((-1, 1), repeat=5)])
    share = np.mean(np.abs(signs @ d) >= abs(d.sum()))
    assert 0 < share < 1
    assert significance.mcnemar(*correct[:2], questions)[2] == exactly(share)
    spread = [np.var([*map(sum, zip(*orders))]) for orders in itertools.product(
        *([*itertools.permutations(row)] for row in right))]
    q, p = significance.cochran_q(correct, questions)
    assert q == exactly(2 * np.var(right.sum(0)) / np.mean(spread)) and p == exactly(
        math.exp(-q / 2))
    # the same answers eight times tell no more than once
    for test in (lambda x, *more: significance.mcnemar(*x[:2], *more)[2:], significance.cochran_q,
                 lambda x, *more: stats.share_interval(x[0], *more),
                 lambda x, *more: stats.interval(metrics.accuracy, np.ones(x.shape[1]), x[0],
                                                 n_resamples=50, questions=[*more, None][0])):
        once = rng.random((3, 40)) < 0.7
        assert test(np.repeat(once, 8, 1), np.repeat(np.arange(40), 8)) == exactly(test(once))


def test_tests_of_shared_questions_hold_their_level():
    """Two equal models, 100 questions in 8 languages: rows as the unit reject in 4 of 10 cases."""
    rng, rejected, held = np.random.default_rng(0), [], []
    questions = np.repeat(np.arange(100), 8)
    for _ in range(400):
        known = 0.8 * rng.normal(size=(100, 1)) + 0.6 * rng.normal(size=(2, 100, 8)) + (
            1.5 * rng.normal(size=(2, 100, 1)))
        a, b = known.reshape(2, -1) > 0
        rejected.append([significance.mcnemar(a, b, *more)[2] < 0.05
                         for more in ((questions,), ())])
        low, high = stats.share_interval(a, questions)
        held.append(low <= 0.5 <= high)
    by_question, by_row = np.mean(rejected, 0)
    assert 0.02 < by_question < 0.08 and by_row > 0.2 and 0.92 < np.mean(held) < 0.98


def test_a_corrected_rate_has_the_interval_of_its_formula():
    judged, verdicts = np.arange(10) < 6, np.array([1, 1, 1, 0, 0, 0, 1, 0, 0], bool)
    labels = np.arange(9) < 4       # sensitivity 3/4, specificity 4/5
    rate, low, high = significance.corrected_rate(judged, verdicts, labels)
    assert rate == pytest.approx((0.6 + 0.8 - 1) / (0.8 + 0.75 - 1)) and low == 0 and high == 1
    z = 1.959963984540054
    p, q0, q1 = (60 + z**2 / 2) / (100 + z**2), 41 / 52, 61 / 82
    theta, v = (p + q0 - 1) / (q0 + q1 - 1), (q0 * (1 - q0) / 52, q1 * (1 - q1) / 82)
    half = z * np.sqrt(p * (1 - p) / (100 + z**2) + (1 - theta)**2 * v[0] + theta**2 * v[1]) / (
        q0 + q1 - 1)
    center = theta + 2 * z**2 * (theta * v[1] - (1 - theta) * v[0])
    labels = np.arange(130) < 80
    verdicts = np.where(labels, np.arange(130) < 60, np.arange(130) >= 120)
    assert significance.corrected_rate(np.arange(100) < 60, verdicts, labels)[1:] == pytest.approx(
        (center - half, center + half))
    for useless in (verdicts[::-1], verdicts | True):
        assert np.isnan(significance.corrected_rate(judged, useless, labels)).all()
    assert np.isnan(significance.corrected_rate(judged, [True], [True])).all()


def test_an_interval_needs_right_and_wrong_answers():
    rows = {measure.key: measure for measure in metrics.MEASURES}
    for key, n, accuracy, n_options, reason in (
            ('ece', 100, 0.3, 4, ''), ('ece', 10_000, 0.999, 4, 'fewer than 30 right or 30 wrong'),
            ('ece', 50, 0.5, 4, 'fewer than 30 right or 30 wrong'), ('sce', 100, 0.5, 4, ''),
            ('sce', 100, 0.5, 10, 'fewer than 100 right or 100 wrong'),
            ('accuracy', 20, 1.0, 4, ''),
            ('ece_equal_mass', 150, 0.5, 4, 'fewer than 100 right or 100 wrong'),
            ('ace', 250, 0.5, 4, ''), ('rmsce', 9999, 0.5, 4, 'N below 10,000'),
            ('mce', 10**7, 0.5, 4, 'no N is enough')):
        assert stats.no_interval(rows[key], n, accuracy, n_options) == reason, (key, n)


def test_holm_corrects_for_the_number_of_tests():
    assert significance.holm([0.01, 0.04, 0.03, 0.005]) == exactly([0.03, 0.06, 0.06, 0.02])
    assert significance.holm([0.9, 0.8]).tolist() == [1, 1] and len(significance.holm([])) == 0


def test_student_t_equals_reference_values():       # by scipy.stats.ttest_1samp
    for x, t, p in (([1, 2, 3, 4], 3.8729833, 0.0304663),
                    ([0.1, -0.2, 0.3], 0.4588315, 0.6913933), ([1.0, 3.0], 2.0, 0.2951672)):
        assert significance.student_t(x) == pytest.approx((np.mean(x), t, p), abs=1e-6)
    assert significance.student_t([2, 2, 2])[1:] == (math.inf, 0.0)
    assert significance.student_t([0, 0])[2] == 1
    x = np.random.default_rng(0).normal(size=5)
    for level, quantile in ((0.95, 2.7764451052), (0.99, 4.6040948714)):    # of t, 4 degrees
        half = quantile * x.std(ddof=1) / math.sqrt(5)
        assert significance.mean_interval(x, level) == pytest.approx(
            (x.mean(), x.mean() - half, x.mean() + half))


def draw_confidences(n, factor, random, mean=0.5):
    """Confidences whose log-odds are `factor` times the true ones, and which are right."""
    log_odds, uniform = mean + 1.5 * random.normal(size=n), random.random(n)
    return metrics.softmax(np.outer(factor * log_odds, [0, 1]))[:, 1], (
        uniform < 1 / (1 + np.exp(-log_odds)))


@pytest.mark.slow
@pytest.mark.parametrize('factor', [1.0, 1.6])
def test_intervals_of_errors_in_bins_hold_the_error_of_the_population(factor):
    """Resamples repeat the bias of the rows: their percentiles never reached the 0 of factor 1."""
    truth = factor > 1 and metrics.ece(*draw_confidences(10**6, factor, np.random.default_rng(1)))
    held, zero = [], []
    for seed in range(60):
        rows = draw_confidences(600, factor, np.random.default_rng(seed))
        low, high = stats.interval(metrics.ece, *rows, n_resamples=100, seed=seed)
        held.append(low <= truth <= high)
        zero.append(low == 0)
        assert 0 <= low <= metrics.ece(*rows) <= high
    assert np.mean(held) >= 0.9
    assert np.mean(zero) >= 0.9 if factor == 1 else np.mean(zero) < 0.5


def test_intervals_of_means_are_percentiles():
    values = np.random.default_rng(0).normal(size=(3, 500))
    low, high = stats.percentile_interval(values, [5.0, 0.0, -5.0], biased=False, level=0.9)
    assert np.stack([low, high]) == exactly(np.quantile(values, (0.05, 0.95), axis=1))
    # with a bias: around the observed value, and up to 3.5 times the bias on the other side of it
    low, high = stats.percentile_interval(values - values.mean(1)[:, None], [-1.0, 0.0, 1.0])
    centered = np.quantile(values - values.mean(1)[:, None], (0.025, 0.975), axis=1)
    assert low - centered[0] == exactly([-4.5, 0, 1])
    assert high - centered[1] == exactly([-1, 0, 4.5])
    mixed = stats.percentile_interval(values, [0.0, 9.0, 0.0], biased=[True, False, True])
    assert mixed[1][1] == exactly(np.quantile(values[1], 0.975))
    test = stats.difference_test(values[1], values[0] + values[1], (5.0, 0.1), biased=False)
    assert test[:2] == exactly(np.quantile(values[0], (0.025, 0.975)))


def test_paired_tests_tell_models_apart():
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(800, 4)) * 1.5
    labels = (scores + rng.gumbel(size=scores.shape)).argmax(1)
    right, sharp = metrics.softmax(scores), metrics.softmax(3 * scores)
    difference, low, high, p = stats.paired_bootstrap(metrics.ece, right, sharp, labels,
                                                        n_resamples=200)
    assert 0 < low < difference < high and p == exactly(2 / 201)
    same = stats.paired_bootstrap(metrics.ece, right, right, labels, n_resamples=50)
    assert same == (0, 0, 0, 1)
    # a calibrated model shows an error by chance
    found = significance.consistency_test(right[:100], labels[:100], n_resamples=500)
    assert 0.06 < found['expected'] < 0.12 and found['p95'] > found['expected']
    assert found['p'] > 0.01
    wrong = (right.argmax(1) + 1) % 4
    assert significance.consistency_test(right, wrong, n_resamples=500)['p'] == exactly(1 / 501)


def test_a_metric_that_is_undefined_in_a_resample():
    """auroc is nan where all rows are right; an interval or p from the rest would be wrong."""
    rows = np.array([[0.9, 0.1], [0.6, 0.4], [0.7, 0.3]]), np.array([0, 0, 1])
    for call in (lambda: stats.interval(metrics.auroc, *rows, n_resamples=50),
                 lambda: stats.paired_bootstrap(metrics.auroc, rows[0], *rows, n_resamples=50),
                 lambda: stats.difference_test(np.zeros(3), np.array([0.1, np.nan, 0.2]), (0, 1))):
        with pytest.raises(ValueError, match='the metric is nan in .* samples of the rows'):
            call()


@pytest.mark.parametrize('call, message', [
    *((lambda x=x: significance.mean_interval([1, 2], x), r'level must be a number in \(0, 1')
      for x in (1, 0, math.nan)),
    (lambda: significance.student_t([1]), 'N >= 2'),
    (lambda: stats.paired_bootstrap(metrics.ece, [0.5, 0.6], [0.5], [1, 1]), 'the same rows'),
    (lambda: significance.corrected_rate([1], [1, 0], [1]), 'must be of the same rows'),
    (lambda: significance.corrected_rate([0.1], [1, 0], [1, 0]), 'labels must be bool, or 0'),
    (lambda: significance.corrected_rate([1], ['C', 'I'], [1, 0]), 'labels must be bool, or'),
    (lambda: significance.holm(0.5), r'p_values must be \[M\], not of shape'),
    (lambda: stats.share_interval([0.5, 2]), 'correct is 0.5, not 0 or 1'),
    (lambda: stats.share_interval([]), r'must be \[N\] with N >= 1'),
    (lambda: metrics.cohen_kappa([0, 1], [0]), r'must be \[N\] with N >= 1, not of shape'),
    (lambda: stats.bootstrap([0.5], [1], n_resamples=0), 'n_resamples must be a whole number')])
def test_bad_rows_and_settings_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
