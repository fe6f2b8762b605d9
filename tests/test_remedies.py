"""research/study/remedies.py: remedies with known answers, and those of published packages."""

import numpy as np
import pytest

import metrics
from compare import scaling
from research import common
from research.study import remedies


def questions(n, weights=None, seed=0, K=4):
    """Return log-probabilities [n, K] and labels drawn from the softmax of `weights` of them."""
    random = np.random.default_rng(seed)
    scores = np.log(metrics.softmax(2 * random.normal(size=(n, K))))
    probs = metrics.softmax(scores if weights is None else remedies.affine(scores, weights))
    labels = (np.cumsum(probs, 1) < random.random((n, 1))).sum(1)
    return scores, labels, probs


def test_labeled_remedies_find_the_scaling_that_the_labels_were_drawn_by():
    scores, labels, truth = questions(4000, 0.4 * np.eye(4, 5))
    fit = np.arange(4000) < 3000
    found = remedies.predictions(scores, scores, labels, fit)
    for name in ('temperature', 'vector', 'matrix', 'dirichlet', 'venn_abers'):
        assert np.abs(found[name][0] - truth[~fit]).mean() < 0.03, name
    assert np.abs(found['none'][0] - truth[~fit]).mean() > 0.1
    matrix = np.hstack([np.eye(4) + 0.3 * np.eye(4)[[1, 2, 3, 0]], [[0.5], [0], [0], [-0.5]]])
    scores, labels, truth = questions(4000, matrix)
    error = {name: np.abs(fitted(scores[fit], labels[fit], scores[~fit]) - truth[~fit]).mean()
             for name, fitted in (('matrix', lambda *x: remedies.structured(*x, True)), (
                 'vector', lambda *x: remedies.structured(*x, False)), (
                 'dirichlet', remedies.dirichlet))}
    assert max(error['matrix'], error['dirichlet']) < 0.02 < 0.04 < error['vector']


def test_remedies_without_labels_follow_the_base_model():
    """The tuned model is three times as sure as its base model, which is calibrated."""
    base, labels, truth = questions(1000)
    fit = np.arange(1000) < 500
    found = remedies.predictions(3 * base, base, labels, fit)
    for name in ('daca', 'dual_align', 'basecal'):
        assert np.abs(found[name][0] - truth[~fit]).max() < 0.01, name
    tuned = np.where(np.arange(1000)[:, None] % 3, base, np.roll(base, 1, axis=1))
    probs, chosen = remedies.predictions(tuned, base, labels, fit)['basecal']
    assert (chosen == tuned[~fit].argmax(1)).all()
    accuracy, ece, nll, brier = remedies.columns(probs, chosen, labels[~fit])
    confidence, right = probs[np.arange(500), chosen], chosen == labels[~fit]
    assert accuracy.mean() == right.mean()
    assert np.abs(ece.mean(0)).sum() == pytest.approx(metrics.ece(confidence, right))
    assert nll.mean() == pytest.approx(metrics.nll(probs, labels[~fit]))
    assert brier.mean() == pytest.approx(metrics.brier(probs, labels[~fit]))


def test_venn_abers_is_the_isotonic_regression_with_the_test_row_added():
    random = np.random.default_rng(1)
    scores, test = random.integers(0, 20, 60) / 20, random.integers(-2, 45, 30) / 40
    correct = random.random(60) < scores
    p0, p1 = np.array([[scaling.apply_isotonic(np.array([s]), *scaling.fit_isotonic(
        np.append(scores, s), np.append(correct, label)))[0] for s in np.clip(test, 0, 1)]
        for label in (0, 1)])
    found = remedies.venn_abers_pair(scores, correct, np.clip(test, 0, 1))
    assert found == pytest.approx(p1 / (1 - p0 + p1), abs=1e-9)
    assert remedies.venn_abers_pair(scores[:0], correct[:0], test) == pytest.approx(0.5)


def test_venn_abers_equals_the_package():
    package = pytest.importorskip('venn_abers.venn_abers')
    scores, labels, _ = questions(600)
    fit, p = np.arange(600) < 300, metrics.softmax(scores)
    theirs, _ = package.predict_proba_prefitted_va(p[fit], labels[fit], p[~fit])
    assert remedies.venn_abers(scores[fit], labels[fit], scores[~fit]) == pytest.approx(
        theirs, abs=1e-9)


def test_structured_scaling_equals_probmetrics():
    logistic = pytest.importorskip('probmetrics.calibrators.logistic')
    scores, labels, _ = questions(600)
    fit, p = np.arange(600) < 300, metrics.softmax(scores)
    for with_matrix, name in enumerate(('SVSCalibrator', 'SMSCalibrator')):
        calibrator = getattr(logistic, name)()
        calibrator.fit(p[fit], labels[fit])
        ours = remedies.structured(scores[fit], labels[fit], scores[~fit], with_matrix)
        assert ours == pytest.approx(calibrator.predict_proba(p[~fit]), abs=1e-3), name


def test_remedies_are_measured_on_saved_questions_of_several_seeds(tmp_path, capsys):
    """Some questions have fewer options; XCOPA has the same questions in 11 languages."""
    base, labels, _ = questions(300)
    base[:20, 3] = -np.inf
    labels[:20] %= 3
    pairs, answers, _ = questions(11 * 30, K=2)
    for seed, method in ((11, 'before'), (11, 'tuned'), (12, 'tuned')):
        factor = 1 if method == 'before' else seed / 5
        folder = tmp_path / f'seed-{seed}/small/alpaca/{method}'
        folder.mkdir(parents=True)
        np.savez_compressed(folder / 'questions.npz', **{
            'mmlu': np.log(metrics.softmax(factor * base) + 1e-30).astype(np.float16),
            'mmlu.answer': labels.astype(np.int8), 'xcopa': (factor * pairs).astype(np.float16),
            'xcopa.answer': answers.astype(np.int8)})
    arguments = [f'--root={tmp_path}', f'--out_dir={tmp_path}/out']
    remedies.main(arguments)
    rows = common.read_csv(tmp_path / 'out' / 'remedies.csv')
    assert len(rows) == 2 * 10 * 4 and {row['seeds'] for row in rows} == {'2'}
    ece = {row['remedy']: row for row in rows if (row['task'], row['metric']) == ('mmlu', 'ece')}
    assert float(ece['none']['mean']) > 0.1 > float(ece['daca']['mean'])
    difference = float(ece['none']['mean']) - float(ece['temperature']['mean'])
    assert float(ece['none']['minus_temperature']) == pytest.approx(difference, abs=2e-5)
    assert difference > float(ece['none']['half_width']) > 0
    assert float(ece['temperature']['half_width']) == 0
    printed = capsys.readouterr().out
    assert '| small | alpaca | none |' in printed and printed.count('\n| small') == 10
    np.savez(folder / 'questions.npz', **{'mmlu': base, 'mmlu.answer': labels[::-1],
                                          'xcopa': pairs, 'xcopa.answer': answers})
    with pytest.raises(Exception, match='the questions of mmlu are not those of'):
        remedies.main(arguments)
    with pytest.raises(SystemExit, match='whose METHOD is before'):
        remedies.main([f'--root={tmp_path}/none'])
