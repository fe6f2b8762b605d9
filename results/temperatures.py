"""A temperature per language: fitted on one language, shrunk to the mean, applied to the others."""

import numpy as np

import metrics
import scaling

KINDS = ('unscaled', 'single', 'own', 'shrunk')


def by_language(test, languages, fits, single):
    """Return ({language: entry}, the shrunk temperature of each row [N, 1]).

    test:      the Predictions to scale, of several languages
    languages: [N], the language of each
    fits:      [(Predictions to fit on, their languages, the rows of `test` to scale), ...]
    single:    [N], the temperature of each row that is fitted on all languages together

    An entry holds `temperature` and `shrunk`, [T per fit], the results of
    scaling.fit_temperatures; `ece`, of the language's rows unscaled and with the single, its own
    and the shrunk temperature; and `ece_on`, {other language: ECE of its rows with this language's
    temperature}. A language that a fit has no rows of is scaled with the single temperature there.
    """
    names = sorted({*languages.tolist()})
    entries = {name: {'temperature': [], 'shrunk': [], 'ece': {}, 'ece_on': {}} for name in names}
    own = {name: single.copy() for name in names}       # of each language, for every row
    shrunk = single.copy()
    for fit, fit_languages, rows in fits:
        fitted, pulled = scaling.fit_temperatures(fit.scores, fit.labels, fit_languages)
        for name in fitted.keys() & own.keys():
            own[name][rows] = fitted[name]
            of_language = rows[languages[rows] == name]
            shrunk[of_language] = pulled[name]
            entries[name]['temperature'].append(fitted[name])
            entries[name]['shrunk'].append(pulled[name])

    for name in names:
        rows = np.flatnonzero(languages == name)
        temperatures = (np.ones(len(single)), single, own[name], shrunk)
        entries[name]['ece'] = {kind: scaled_ece(test, rows, t)
                                for kind, t in zip(KINDS, temperatures, strict=True)}
        for other in names:
            if other != name:
                entries[other]['ece_on'][name] = scaled_ece(test, rows, own[other])
    return entries, shrunk[:, None]


def scaled_ece(test, rows, temperatures):
    """Return the ECE of some rows of the Predictions `test`, scaled by temperatures [N]."""
    probs = metrics.softmax(test.scores[rows] / temperatures[rows, None])
    return metrics.ece(probs, test.labels[rows])


def cells(result):
    """Return the cells of the languages of a task's result, header first; [] if it has none."""
    entries = result.get('post_hoc', {}).get('languages', {})
    if not entries:
        return []
    lines = [('language', 'T', 'T shrunk', *(f'ECE {kind}' for kind in KINDS),
              'ECE of the others with its T')]
    for name, entry in entries.items():
        fitted = [' '.join(f'{t:.3f}' for t in entry[key]) for key in ('temperature', 'shrunk')]
        on_others = np.mean([*entry['ece_on'].values()])
        lines.append((name, *fitted, *(f'{entry["ece"][kind]:.3f}' for kind in KINDS),
                      f'{on_others:.3f}'))
    means = [np.mean([entry['ece'][kind] for entry in entries.values()]) for kind in KINDS]
    return [*lines, ('mean', '', '', *(f'{mean:.3f}' for mean in means), '')]
