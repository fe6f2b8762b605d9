"""research/papers/shared_questions.py beside the metrics of the drawn rows themselves."""

import numpy as np
import pytest
from research.papers.shared_questions import p_values, resample

import metrics
from results.report import Predictions


def predictions(random, n, sharpness=2.0, right=0.5):
    weights = random.random((n, 4)) ** sharpness
    probs = weights / weights.sum(1, keepdims=True)
    labels = np.where(random.random(n) < right, probs.argmax(1), random.integers(4, size=n))
    return Predictions(probs, labels)


def test_resampled_metrics_are_those_of_the_drawn_questions_in_every_language():
    random = np.random.default_rng(0)
    names = [f'q{i:02}' for i in range(30)]
    groups = {'en': (names, predictions(random, 30)),
              'sw': (names[::-1][:20], predictions(random, 20))}    # another order, and fewer
    ids, values = resample(groups, 5, seed=3)
    assert ids == names
    again = np.random.default_rng(3)
    for r in range(6):      # the first are the questions as they are
        drawn = [names[i] for i in again.integers(30, size=30)] if r else names
        found = {'all': ([], [])}
        for language, (own, p) in groups.items():
            rows = [own.index(name) for name in drawn if name in own]
            found[language] = p.probs[rows], p.labels[rows]
            found['all'][0].append(p.probs[rows])
            found['all'][1].append(p.labels[rows])
        found['all'] = [np.concatenate(x) for x in found['all']]
        for language, (probs, labels) in found.items():
            report = metrics.report(probs, labels)
            for key, value in values[language].items():
                assert value[r] == pytest.approx(report[key], abs=1e-12)


def test_runs_of_other_questions_have_no_p():
    random = np.random.default_rng(3)
    a, b = ({'en': (names, predictions(random, 3))} for names in ('abc', 'abd'))
    assert p_values(resample(a, 4), resample(b, 4)) == {}
