"""Scalings of a report: fitted on held-out questions, on the other half, or read from a file."""

import functools

import numpy as np

import metrics
from compare import scaling
import stats
from results.report import (GROUPS, Predictions, measure, names_of, option_predictions,
                            predictions)
from runtime.errors import DataError


def post_hoc(test, samples, held_out, norm, n_bootstrap, seed, measures=None):
    """Return (scalings of `test`, fitted on `held_out`: keys as in the docs; {name: Predictions}).

    test: of `samples`; measures: of its report. Without `held_out`, more samples, each half is
    scaled with the other's fit.
    """
    n, source = len(samples), predictions(held_out, norm) if held_out else test
    if held_out:    # [(rows of `source` to fit on, rows of `test` to scale), ...]
        fitted_on, fits = f'{len(held_out)} validation questions', [
            (np.arange(len(held_out)), np.arange(n))]
    else:
        index, n_questions = test.questions or stats.question_index(None, n)
        order = np.random.default_rng(seed).permutation(n_questions)
        is_first = np.isin(index, order[:-(-n_questions // 2)])     # no question is in both halves
        halves = np.flatnonzero(is_first), np.flatnonzero(~is_first)
        fitted_on, fits = 'the other half of the questions', [halves, halves[::-1]]
    confidence, correct = metrics.top_label(test.probs, test.labels)
    source_top = metrics.top_label(source.probs, source.labels)

    confident = functools.partial(Predictions, labels=correct, questions=test.questions)

    def fit_all(fit, *columns):
        return [fit(*(x[at] for x in columns)) for at, _ in fits]

    def by_row(apply, parameters, *columns):
        """Return apply(*columns, *parameters of the row's fit), float [N]."""
        values = np.empty(n)
        for (_, rows), fit in zip(fits, parameters, strict=True):
            values[rows] = apply(*(x[rows] for x in columns), *fit)
        return values

    fitted = {'fitted_on': fitted_on, 'platt': fit_all(scaling.fit_platt, *source_top)}
    final, groups = {'platt': scaling.fit_platt(*source_top)}, {}       # final: for other data
    everything = samples + held_out     # its last rows are those of `source`
    m = len(source.labels)
    if test.scores is not None:
        by_option = source.scores, source.labels
        fitted['temperature'] = fit_all(scaling.fit_temperature, *by_option)
        final['temperature'] = [scaling.fit_temperature(*by_option)]
        temperatures = by_row(float, [[x] for x in fitted['temperature']])
        groups['temperature'] = test.scaled(temperatures[:, None])
        options = {(k, option) for s in samples for k, option in enumerate(s['options'])}
        # the same letters or words for all, and not the two answers to a judge, in any order
        if len(options) == test.scores.shape[1] and 'first' not in samples[0]:
            groups['batch'] = test.scaled(1, scaling.fit_prior(test.scores))
    groups['platt'] = confident(by_row(scaling.apply_platt, fitted['platt'], confidence))
    by_key = [np.unique(names_of(everything, key), return_inverse=True) for key in GROUPS]
    if indices := [index for names, index in by_key if len(names) > 1]:
        index = np.stack(indices, 1)
        shifts = fit_all(scaling.fit_multicalibration, *source_top, index[-m:])
        groups['multicalibration'] = confident(by_row(
            scaling.apply_multicalibration, [[x] for x in shifts], confidence, index[:n]))
    if test.scores is None:
        groups['isotonic'] = confident(by_row(
            scaling.apply_isotonic, fit_all(scaling.fit_isotonic, *source_top), confidence))
        final['isotonic'] = [x.tolist() for x in scaling.fit_isotonic(*source_top)]
    reports, _ = measure(groups, n_bootstrap, seed, measures=measures)
    return fitted | {'fits': final, 'reports': reports}, groups


def rescaled(predicted, name, parameters):
    """Return Predictions scaled by the row `name` of scaling.SCALINGS; DataError if it fits not."""
    try:
        if not scaling.SCALINGS[name][2]:
            confidence, correct = metrics.top_label(predicted.probs, predicted.labels)
            return Predictions(scaling.apply(name, confidence, parameters), correct,
                               questions=predicted.questions)
        if predicted.scores is None:
            raise ValueError('it needs options, and this task has none')
        probs = scaling.apply(name, predicted.scores, parameters)
    except ValueError as error:
        raise DataError(f'scaling {name}: {error}') from None
    scores = np.where(np.isneginf(predicted.scores), -np.inf, np.log(np.maximum(probs, 1e-300)))
    return option_predictions(probs, predicted.labels, predicted.n_options, scores,
                              predicted.questions)


def agreement_note(before, after):
    """Return a line: the temperature fitted to the answers before training, and the ECE with it."""
    try:
        temperature = scaling.fit_temperature_to_base(after.scores, before.scores)
    except ValueError:      # no answer stayed the same
        return 'no temperature without labels: every answer has changed'
    ece = metrics.ece(metrics.softmax(after.scores, temperature), after.labels)
    return (f'temperature without labels, from the answers that stayed the same: '
            f'{temperature:.3f}; with it the ECE is {ece:.3f}')
