"""metrics.py: golden values of other libraries, literal formulas, properties, errors"""

import itertools
import json
import math
import re

import numpy as np
import pytest
import torch
from common import cases_of, exactly
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import metrics
from compare import scaling
import stats
from research.papers import outlier_exposure

MEASURES = {measure.key: measure for measure in metrics.MEASURES}
# tolerance -> case -> values of other libraries; 1e-6 for those in float32
GOLDEN = cases_of('golden_metrics.json')
small = settings(max_examples=30, deadline=None, derandomize=True)


def calibration_case(seed, n, k, temperature, signal):
    """Seeded probs [n, k] and labels [n]; the labels follow softmax(signal * z), not the probs."""
    stream = np.random.RandomState(seed)
    z, u = stream.standard_normal((n, k)), stream.random_sample(n)
    labels = (metrics.softmax(z * signal).cumsum(1) < u[:, None]).sum(1)
    return metrics.softmax(z * temperature), np.minimum(labels, k - 1)


def golden_case(name):
    labels = np.arange(20) % 4
    return {'mmlu_overconfident_4': lambda: calibration_case(0, 2000, 4, 2.5, 1.0),
            'small_4': lambda: calibration_case(4, 150, 4, 2.0, 1.0),
            'all_wrong_conf_1': lambda: (np.eye(4)[(labels + 1) % 4], labels),
            'uniform_quarter': lambda: (np.full((40, 4), 0.25), np.arange(40) % 4),
            'edges_conf0_1_ties_on_bin_edges': lambda: (np.array([
                [1, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0.25] * 4, [0.25] * 4, [0.5, 0.5, 0, 0],
                [0.7, 0.1, 0.1, 0.1], [0.7, 0.1, 0.1, 0.1], [0.8, 0.2, 0, 0], [0.6, 0.4, 0, 0]]),
                np.array([0, 1, 1, 0, 3, 1, 0, 2, 0, 1]))}[name]()


# those of relplot are below
@pytest.mark.parametrize('tolerance', [x for x in GOLDEN if x != '1e-4'])
def test_metrics_equal_golden_values(tolerance):
    for name, cases in GOLDEN[tolerance].items():
        for case in cases:
            home = outlier_exposure if 'hendrycks' in case['metric'] else metrics
            value = getattr(home, case['metric'])(*golden_case(name), **case['settings'])
            value = value[case['part']] if 'part' in case else value
            assert value == pytest.approx(case['value'], rel=0, abs=float(tolerance)), (name, case)


@st.composite
def predictions(draw, ragged):
    """probs [N, K], labels [N], options per row [N]; ragged: 1 to K of them, zero-padded."""
    n, k = draw(st.integers(1, 25)), draw(st.integers(1, 6))
    n_options = draw(arrays(np.int64, n, elements=st.integers(1, k))) if ragged else np.full(n, k)
    weights = draw(arrays(np.int64, (n, k), elements=st.integers(0, 8)))
    weights *= np.arange(k) < n_options[:, None]
    weights[:, 0] += weights.sum(1) == 0
    labels = draw(arrays(np.int64, n, elements=st.integers(0, k - 1))) % n_options
    return weights / weights.sum(1, keepdims=True), labels, n_options


def assert_equal_numbers(numbers, expected):
    assert numbers.keys() == expected.keys()
    for key, value in expected.items():
        assert np.shape(numbers[key]) == np.shape(value), key
        assert numbers[key] == pytest.approx(value, rel=0, abs=1e-12, nan_ok=True), key


@pytest.mark.slow
@small
@given(predictions(ragged=False), st.integers(0, 99))
def test_neither_the_order_of_rows_nor_noise_of_rounding_changes_a_number(case, seed):
    probs, labels, _ = case
    random = np.random.default_rng(seed)
    confidence, correct = probs.max(1), probs.argmax(1) == labels
    for values, outcomes in ((probs, labels), (confidence, correct)):
        noise = 1e-16 * random.choice([-2, -1, 0, 1, 2], values.shape)
        expected, noisy = metrics.report(values, outcomes), np.minimum(values * (1 + noise), 1)
        assert_equal_numbers(metrics.report(noisy, outcomes), expected)
        assert_equal_numbers(metrics.bins(noisy, outcomes), metrics.bins(values, outcomes))
        order = random.permutation(len(labels))
        assert_equal_numbers(metrics.report(values[order], outcomes[order]), expected)


@pytest.mark.parametrize('dtype', [np.float64, np.float32])
def test_a_confidence_on_a_bin_edge_counts_in_the_bin_below(dtype):
    for n_bins in (1, 3, 7, 10, 15, 29):
        def counts(confidence, n=n_bins):
            return metrics.bins(confidence, np.ones(len(confidence), bool), n)['count'].tolist()
        edges = (np.arange(1, n_bins + 1) / n_bins).astype(dtype)
        assert counts(edges) == counts(np.nextafter(edges, dtype(0))) == [1] * n_bins
        steps = np.arange(1, n_bins + 1) * (1 / n_bins)     # which need not be m / M
        assert counts(np.minimum(steps, 1)) == [1] * n_bins
        # the float64 above an edge ties with it
        above = edges[:-1] + 2e-12 if dtype == np.float64 else np.nextafter(edges[:-1], dtype(1))
        assert n_bins == 1 or counts(above) == [0] + [1] * (n_bins - 1)
    # a sum above 1 by rounding leaves confidence 1 + 5e-5 in the last bin
    assert metrics.bins([[1.00005, 0.0]], [0])['count'][-1] == 1


def test_probabilities_that_differ_by_a_rounding_are_tied():
    # the first of tied options is predicted, though the second is larger by a rounding
    assert metrics.accuracy(np.full((4, 4), 0.25), [0, 0, 1, 3]) == 0.5
    assert metrics.accuracy([[0.4, 0.4 + 1e-16, 0.2]], [0]) == 1
    assert metrics.accuracy([[0.4, 0.4 + 1e-11, 0.2]], [1]) == 1
    assert metrics.auroc([0.6, 0.6 + 2e-12], [1, 0]) == 0      # two rows 2e-12 apart are two
    assert metrics.tace([[0.99, 0.01], [0.99, 0.01 + 1e-17]], [1, 1]) == exactly(0.99 / 2)
    # 0, not -0, in the printed report
    assert math.copysign(1, metrics.report([[1.0, 0.0]], [1])['entropy_bits']) == 1


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
                         (np.where(scores == -60, -np.inf, scores), 'label 1 has the score -inf')):
        with pytest.raises(ValueError, match=re.escape(message)):
            metrics.report(probs, labels, scores=bad)


@pytest.mark.parametrize('metric, setting, message, values', [
    *((name, setting, 'must be a whole number, 1 or more', (0, 10.0, True)) for name, setting in (
        ('ece', 'n_bins'), ('ace', 'n_ranges'), ('rmsce', 'bin_size'))),
    ('accuracy_at_coverage', 'coverage', 'must be a number in (0, 1]',
     (0, 2, -0.1, math.nan, '0.5')),
    ('conformal_sets', 'alpha', 'must be a number in', (0, 1, math.nan)),
    ('entropy', 'unit', "must be 'bits', 'nats' or 'share', not 'bans'", ('bans',))])
def test_settings_out_of_range_are_refused(metric, setting, message, values):
    for value in values:
        with pytest.raises(ValueError, match=re.escape(f'{setting} {message}')):
            getattr(metrics, metric)([[0.5, 0.5]], [0], **{setting: value})


THREE = [[0.5, 0.25, 0.25], [0.5, 0.5, 0.0]], [0, 1]


@pytest.mark.parametrize('arguments, message', [
    ((np.zeros((0, 4)), []), 'probs must be [N, K] with N, K >= 1, not of shape (0, 4)'),
    (([[0.5, 0.5], [1.0]], [0, 0]), 'probs has rows of different length'),
    (([[0.5, 0.5], [1.0, 0.0]], [0]), 'labels must be [2], one per row, not of shape (1,)'),
    (([[1.0, 0.0], [0.5, math.nan]], [0, 0]), 'row 1: probability of option 1 is nan, not 0 or'),
    (([[1.0, 0.0], [0.5, 0.4]], [0, 0]), 'row 1: probabilities sum to 0.9, not to 1'),
    (([[0.5, 0.5], [0.5, 0.5]], [1, 2]), 'row 1: label 2 is not one of the options 0 to 1'),
    ((*THREE, [3, 1]), 'row 1: label 1 points at padding, n_options is 1'),
    ((*THREE, [2, 2]), 'row 0: padded option 2 has probability 0.25, not 0'),
    (([0.5, 1.2], [True, True]), 'row 1: confidence is 1.2'),
    (([], []), 'must be [N] with N >= 1'),
    (([0.5, 0.5], [1, 2]), 'row 1: correct is 2, not 0 or 1; one-dimensional probs are conf'),
    (([0.5], ['false']), 'correct must be bool, or 0 and 1, not <U5')])
def test_bad_predictions_are_refused(arguments, message):
    n_options = {'n_options': arguments[2]} if len(arguments) > 2 else {}
    measures = [x.function for x in metrics.MEASURES if x.needs == 'n_options' or not n_options]
    if np.ndim(arguments[1]) and re.search('confidence|correct|must be .N. with|^N', message):
        measures = [metrics.ece]
    for metric in (*measures, metrics.report):
        with pytest.raises(ValueError, match=re.escape(message)):
            metric(*arguments[:2], **n_options)


def test_ranking_metrics_are_means_over_the_orders_of_tied_rows():
    confidence, k = np.array([0.9, 0.7, 0.7, 0.7, 0.6, 0.6]), np.arange(1, 7)
    correct = np.array([True, False, True, True, False, True])
    orders = [order for order in map(list, itertools.permutations(range(6)))
              if (np.diff(confidence[order]) <= 0).all()]
    assert len(orders) == 12
    curve = np.mean([np.cumsum(correct[order]) / k for order in orders], 0)
    acc, best = curve[-1], (np.minimum(k, 4) / k).mean()
    assert metrics.aurc(confidence, correct) == exactly(1 - curve.mean())
    assert metrics.prr(confidence, correct) == exactly((curve.mean() - acc) / (best - acc))
    for share, accuracy in zip(k / 6, curve, strict=True):
        assert metrics.accuracy_at_coverage(confidence, correct, share) == exactly(accuracy)
        assert metrics.coverage_at_accuracy(confidence, correct, accuracy) == max(
            k[curve >= accuracy - 1e-9]) / 6
    assert metrics.coverage_at_accuracy(confidence, correct[::-1]) == 1 / 6     # at 0.9
    assert metrics.coverage_at_accuracy(confidence, ~correct) == 0
    assert metrics.accuracy_at_coverage(confidence, correct) == exactly(curve[2])   # of the half
    for n in range(2, 30):      # all in random order
        right = np.arange(n) < (n + 1) // 3
        assert metrics.prr(np.full(n, 0.5), right) == 0
        assert metrics.auroc(np.full(n, 0.5), right) == 0.5
    assert math.isnan(metrics.prr([0.5, 0.6], [True, True]))


def test_kappa_is_the_agreement_beyond_chance():
    a, b = [0, 0, 1, 2, 2, 2], [0, 1, 1, 2, 2, 0]       # 4 of 6; chance (2*2 + 1*2 + 3*2) / 36
    assert metrics.cohen_kappa(a, b) == exactly((4 / 6 - 1 / 3) / (1 - 1 / 3))
    assert metrics.kappa(np.eye(3)[a], b) == exactly(metrics.cohen_kappa(b, a))
    assert math.isnan(metrics.cohen_kappa([1, 1], [1, 1])) and metrics.cohen_kappa(a, a) == 1


def test_the_best_temperature_has_no_slope_in_float64():
    rng = np.random.default_rng(0)
    for i in range(20):
        n, k = rng.integers(2, 40), rng.integers(2, 6)
        scores = rng.normal(size=(n, k)) * 10 ** rng.uniform(-2, 2)
        targets = rng.dirichlet(np.ones(k), n) if i % 2 else np.eye(k)[rng.integers(0, k, n)]
        scores[:, -1] = np.where((targets[:, -1] == 0) & (i % 3 == 0), -np.inf, scores[:, -1])
        finite = np.where(np.isfinite(scores), scores, 0)
        t = metrics.best_temperature(scores, targets)
        assert i % 2 or t == scaling.fit_temperature(scores, targets.argmax(1))
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
    assert math.isnan(metrics.brier_skill(confidence, [True] * 4))


def test_bas_is_the_mean_utility_over_thresholds():
    confidence, correct = np.array([0.9, 0.35, 0.6, 0.0]), np.array([True, False, False, True])
    t = (np.arange(200_000) + 0.5) / 200_000
    utility = [np.where(t <= c, 1 if a else -t / (1 - t), 0).mean()
               for c, a in zip(confidence, correct)]
    assert metrics.bas(confidence, correct) == pytest.approx(np.mean(utility), abs=1e-5)
    assert metrics.bas([1.0], [True]) == 1 and metrics.bas([1.0], [False]) == exactly(
        1 + math.log(np.finfo(float).eps))
    for gap in 2.0 ** -np.array([30, 41, 52]):       # 1 - gap is exact
        c, correct = np.array([1 - gap, 0.5]), np.array([False, True])
        probs = np.stack([c, 1 - c], 1)
        expected = exactly(((1 - gap) + math.log(gap) + 0.5) / 2)
        assert metrics.report(c, correct)['bas'] == metrics.report(probs, [1, 0])['bas'] == expected
        assert stats.bootstrap(c, correct, n_resamples=1, keys=['bas'])['bas'].item() in (
            exactly((1 - gap) + math.log(gap)), exactly(0.5), expected)


def test_tensors_and_arrays_of_any_layout_give_the_same_values():
    probs, labels = golden_case('small_4')
    p, z = (torch.tensor(x, dtype=torch.float32, requires_grad=True)
            for x in (probs, np.log(probs)))
    array, tensors = p.detach().numpy(), (p, torch.tensor(labels), torch.full((150,), 4))
    expected = metrics.report(array, labels, np.full(150, 4), scores=z.detach().numpy())
    assert_equal_numbers(metrics.report(*tensors, scores=z), expected)
    assert scaling.fit_temperature(z, torch.tensor(labels)) == pytest.approx(
        scaling.fit_temperature(np.log(probs), labels), rel=1e-5)
    short = torch.tensor([0.5, 0.75], dtype=torch.bfloat16, requires_grad=True)
    assert metrics.ece(short, [1, 1]) == metrics.ece([*short], [1, 1]) == 0.375
    for same in (np.asfortranarray(probs), probs.tolist(), np.ma.array(probs)):
        assert_equal_numbers(metrics.report(same, labels.astype(np.uint64)),
                             metrics.report(probs, labels))


def test_the_sweep_ends_at_the_first_decrease_however_small():
    """Accuracy 0.600 and 0.595 in two bins: one bin remains, although more bins are monotonic."""
    correct = np.concatenate([np.arange(1000) % 5 < 3, np.arange(1000) % 200 < 119])
    confidence = np.linspace(0.4, 0.8, 2000)
    assert metrics.ece_sweep(confidence, correct) == pytest.approx(
        metrics.ece_equal_mass(confidence, correct, n_bins=1), abs=1e-12)
    assert metrics.ece_equal_mass(confidence, correct, n_bins=2) > 0.1


def literal_smooth_error(confidence, residual, width):
    """The integral of |smoothed residuals| over the midpoints of 20,000 cells."""
    t = (np.arange(20_000) + 0.5) / 20_000
    images = [sign * c + 2 * m for c in confidence for sign in (1, -1) for m in range(-6, 7)]
    # in the order of the images: each residual has 26 of them
    kernels = (np.exp(-((t - x) / width) ** 2 / 2) for x in images)
    smooth = sum(r * k for r, k in zip(np.repeat(residual, 26), kernels, strict=True))
    return np.abs(smooth).mean() / (width * np.sqrt(2 * np.pi)) / len(confidence)


def test_smooth_ece_is_the_width_that_equals_its_error_under_the_reflected_gaussian():
    random = np.random.default_rng(0)
    for confidence in ([1.0], [1.0, 0.0], [0.3] * 4, [0.0, 0.0, 0.7], random.random(12),
                       1 - random.random(9) ** 4, random.integers(0, 3, 12) / 2):
        for correct in (np.arange(len(confidence)) % 2 == 1, np.zeros(len(confidence), bool)):
            width = metrics.smooth_ece(np.array(confidence), correct)
            error = literal_smooth_error(confidence, correct - confidence, width)
            assert error == pytest.approx(width, abs=3e-6), confidence
    # residuals of one sign cannot cancel: the mean residual, also with half of the rows at 1
    confidence, correct = np.repeat([1.0, 0.6], 100), np.arange(200) < 140
    assert metrics.smooth_ece(confidence, correct) == pytest.approx(0.1, abs=1e-6)
    # relplot stops after ten bisections, and halves the rows at 0 and 1
    for name, [case] in GOLDEN['1e-4'].items():
        off = abs(metrics.smooth_ece(*golden_case(name)) - case['value'])
        assert off > 0.01 if name == 'edges_conf0_1_ties_on_bin_edges' else off < 1e-3, name


def test_kde_ece_is_the_integral_of_its_definition():
    rng = np.random.default_rng(0)
    for c in rng.beta(4, 2, 60), np.array([0.0, 0.9]):     # the second with a kernel wider than 1
        n, correct = len(c), rng.random(len(c)) < c ** 2
        z, width = np.linspace(0, 1, 20_001), 3 * 1.06 * c.std() * n ** -0.2
        # triweight kernels around each confidence and its reflections at 0 and 1
        u = np.stack([x + 2 * m - c[:, None] for x in (z, -z) for m in (-1, 0, 1)]) / width
        kernels = (35 / 32 * np.clip(1 - u ** 2, 0, None) ** 3 / width / n).sum(0)
        gaps = np.abs(z * kernels.sum(0) - kernels[correct].sum(0))
        assert metrics.kde_ece(c, correct) == pytest.approx(np.trapezoid(gaps, z), abs=1e-6)


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


def literal_ece(gaps, bins):
    """sum_B |B|/N |conf(B) - acc(B)| by the book; gaps: confidence - outcome of each row."""
    return sum(abs(gaps[np.equal(bins, b)].sum()) for b in {*bins}) / len(gaps)


@small
@given(predictions(ragged=True), st.integers(1, 20))
def test_class_wise_metrics_count_only_rows_that_have_the_option(case, n_bins):
    probs, labels, n_options = case
    static, adaptive, equal = [], [], []
    for k in range(n_options.max()):
        rows = n_options > k
        p, gaps = probs[rows, k], probs[rows, k] - (labels[rows] == k)
        bins = [next(m for m in range(1, n_bins + 1) if c <= m / n_bins or m == n_bins) for c in p]
        static.append(literal_ece(gaps, bins))
        # of equal mass: a value is in the lowest range that holds it
        n = min(n_bins, len(p))
        ranges = np.split(np.sort(p), [round(r * len(p) / n) for r in range(1, n)])
        bins = [next(r for r, values in enumerate(ranges) if c in values) for c in p]
        adaptive.append(literal_ece(gaps, bins))
        equal.append(sum(abs(gaps[np.equal(bins, b)].mean()) for b in {*bins}) / n)
    assert metrics.sce(probs, labels, n_bins, n_options) == exactly(np.mean(static))
    assert metrics.ace(probs, labels, n_bins, n_options) == exactly(np.mean(adaptive))
    assert metrics.ace(probs, labels, n_bins, n_options, True) == exactly(np.mean(equal))


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
@given(predictions(ragged=True), st.sampled_from([0.1, 0.25, 0.5]))
def test_conformal_sets_leave_out_their_own_row(method, case, alpha):
    probs, labels, n_options = case
    sets = metrics.conformal_sets(probs, labels, n_options, method=method, alpha=alpha)
    assert (sets == literal_sets(probs, labels, n_options, method, alpha)).all()
    coverage, size = metrics.conformal(probs, labels, n_options, method=method, alpha=alpha)
    assert size == exactly(sets.sum() / len(labels)) and coverage >= 1 - alpha - 1e-12
    assert coverage == exactly(sets[np.arange(len(labels)), labels].mean())


def test_wilson_interval_equals_the_textbook():
    probs, labels = np.tile([0.8, 0.2], (10, 1)), [0] * 9 + [1]
    assert metrics.wilson_interval(probs, labels) == pytest.approx((0.5958, 0.9821), abs=1e-4)
    # all right still leaves a width: z^2 / (N + z^2)
    assert metrics.wilson_interval(probs, [0] * 10) == (exactly(1 - 1.96**2 / (10 + 1.96**2)), 1)


def test_the_table_of_measures_is_what_a_report_holds():
    probs, labels = golden_case('small_4')
    before = probs.copy(), labels.copy()
    result = metrics.report(probs, labels, np.full(150, 4))
    assert np.array_equal(probs, before[0]) and np.array_equal(labels, before[1])
    assert [*result] == ['n', *MEASURES] and len(MEASURES) == len(metrics.MEASURES)
    assert len({measure.title for measure in metrics.MEASURES}) == len(MEASURES)
    assert result['n'] == 150 and json.loads(json.dumps(result)) == result
    alone = probs.max(1), (probs.argmax(1) == labels).astype(float).tolist()
    for key, measure in MEASURES.items():
        value = measure.function(probs, labels)
        if measure.needs == 'prediction':
            np.testing.assert_equal(measure.function(*alone), value)
        else:
            with pytest.raises(ValueError, match='probs must be .N, K. with N, K >= 1, not of sh'):
                measure.function(*alone)
        if isinstance(value, (dict, tuple)):
            value = value[key if measure.part is None else measure.part]
        assert result[key] == exactly(value), key
        assert type(result[key]) is (int if key == 'mce_count' else float)
        assert {*measure.tables} <= {*metrics.ALL_TABLES}
    assert [*metrics.report(*alone)] == [
        'n', *(x.key for x in metrics.MEASURES if x.needs == 'prediction')]


@pytest.mark.parametrize('dtype, off, refused', [
    (np.float16, 9e-4, 2e-3), (np.float32, 9e-5, 2e-4)])
def test_rows_may_be_off_by_the_rounding_of_their_precision(dtype, off, refused):
    assert metrics.report(np.array([[1 + off, 0]], dtype), [0])['accuracy'] == 1
    with pytest.raises(ValueError, match='row 0: probabilities sum to'):
        metrics.check_probs(np.array([[0.5, 0.5 + refused]], dtype), [0])
