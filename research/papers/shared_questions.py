"""Tests of differences between runs on questions that several languages share.

A t-test over languages takes them as independent samples, but all have the same questions: what is
hard in one is hard in the others, and p becomes far too small. Here questions are drawn with
replacement, each with its predictions in all languages and by both runs.
"""

import numpy as np

import metrics
import stats
from results.columns import measure_of

KEYS, N_BINS = ('accuracy', 'ece', 'entropy_bits'), 10


def resample(groups, n_resamples=1000, seed=0):
    """Return (question ids, {language or 'all': {key of KEYS: float64 [1 + n_resamples]}}).

    The first value is that of the questions as they are, the others are of resamples. groups:
    {language: (ids, Predictions)}; 'all' pools the languages. The same ids and seed draw the same
    questions, so that the values of two runs are paired. Each metric is a function of sums over
    questions: the sums of the drawn questions are counts [R, Q] times terms [Q, M].
    """
    ids = sorted({name for names, _ in groups.values() for name in names})
    row, random = {name: i for i, name in enumerate(ids)}, np.random.default_rng(seed)
    drawn = [random.integers(len(ids), size=len(ids)) for _ in range(n_resamples)]
    counts = np.stack([np.bincount(rows, minlength=len(ids)).astype(np.float64)
                       for rows in (np.arange(len(ids)), *drawn)])
    pooled, values = 0.0, {}
    for language, (names, predicted) in groups.items():
        terms = question_terms([row[name] for name in names], predicted, len(ids))
        values[language] = _metrics(counts @ terms)
        pooled = pooled + terms
    return ids, values | {'all': _metrics(counts @ pooled)}


def question_terms(rows, predicted, n_questions):
    """Return float64 [Q, N_BINS + 3]: the gap, confidence - correct, in the column of its bin; then
    correct, entropy and 1 for each of the `rows` that the Predictions belong to."""
    confidence, correct = metrics.top_label(predicted.probs, predicted.labels)
    terms = np.zeros((n_questions, N_BINS + 3))
    terms[rows, metrics.equal_width_bins(confidence, N_BINS)] = confidence - correct
    terms[rows, N_BINS:] = np.stack([correct, metrics.row_entropy(predicted.probs) / np.log(2),
                                     np.ones(len(correct))], 1)
    return terms


def _metrics(sums):
    """{key: [R]} of sums [R, N_BINS + 3]; nan where no question was drawn."""
    n = np.where(sums[:, -1] > 0, sums[:, -1], np.nan)
    return {'accuracy': sums[:, N_BINS] / n, 'ece': np.abs(sums[:, :N_BINS]).sum(1) / n,
            'entropy_bits': sums[:, N_BINS + 1] / n}


def p_values(plain, other):
    """Return {language: {key: two-sided p of other - plain}} of two results of `resample`.

    {} if the runs have other questions. p as in stats.difference_test.
    """
    (ids, before), (other_ids, after) = plain, other
    if ids != other_ids:
        return {}
    return {language: {key: stats.difference_test(
        before[language][key][1:], after[language][key][1:],
        (before[language][key][0], after[language][key][0]), not measure_of(key).is_mean)[2]
        for key in KEYS} for language in before.keys() & after.keys()}
