"""A temperature per language: fitted on one language, shrunk to the mean, applied to the others."""

import numpy as np

import metrics
import scaling

KINDS = ('unscaled', 'single', 'own', 'shrunk')


def by_language(test, languages, source, source_languages, fits, single):
    """Return ({language: its entry in results.json}, the shrunk temperature of each row [N, 1]).

    test, source: Predictions to scale and to fit on, with the language of each row
    fits: [(rows of `source` to fit on, rows of `test` to scale), ...]
    single: [N], the temperature by all languages; also that of a language without a fit
    """
    def ece(name, temperatures):
        rows = languages == name
        probs = metrics.softmax(test.scores[rows] / temperatures[rows, None])
        return metrics.ece(probs, test.labels[rows])

    fitted = [fit_temperatures(source.scores[at], source.labels[at], source_languages[at])
              for at, _ in fits]
    names, entries, shrunk = sorted({*languages.tolist()}), {}, single.copy()
    for name in names:
        own = single.copy()     # the temperature of this language, for every row
        for (by_name, pulled), (_, rows) in zip(fitted, fits, strict=True):
            if name in by_name:
                own[rows] = by_name[name]
                shrunk[rows[languages[rows] == name]] = pulled[name]
        eces = [ece(name, x) for x in (np.ones(len(single)), single, own, shrunk)]
        entries[name] = {
            'temperature': [by_name[name] for by_name, _ in fitted if name in by_name],
            'shrunk': [pulled[name] for _, pulled in fitted if name in pulled],
            'ece': dict(zip(KINDS, eces, strict=True)),
            'ece_on': {other: ece(other, own) for other in names if other != name}}
    return entries, shrunk[:, None]


def fit_temperatures(scores, labels, groups):
    """Return ({group: its temperature}, {group: its temperature shrunk to the mean}).

    groups: [N] names, such as the language of each row. The first are scaling.fit_temperature of
    the group's rows alone. The second suit small groups: empirical Bayes on t = log T, where the
    fit of group g has the sampling variance v_g and the groups vary by tau^2 around their mean m
    (the random-effects model of DerSimonian & Laird 1986): t_g' = (tau^2 t_g + v_g m) / (tau^2 +
    v_g). A group whose fit is at an end of the range has no v_g and gets m; if all are, the second
    are the temperature of all rows together.
    """
    scores, labels, groups = map(np.asarray, (scores, labels, groups))
    if groups.shape != labels.shape:
        raise ValueError(f'groups must be [N], N = {len(labels)}, not of shape {groups.shape}')
    names = np.unique(groups)
    t, v = np.empty((2, len(names)))
    for i, name in enumerate(names):
        group = scores[groups == name], labels[groups == name]
        t[i] = np.log(scaling.fit_temperature(*group))
        v[i] = _log_temperature_variance(*group, t[i]) if abs(t[i]) < np.log(999) else np.inf

    w = 1 / v
    if w.any():
        spread = (w * (t - np.average(t, weights=w)) ** 2).sum() - (np.isfinite(v).sum() - 1)
        scale = w.sum() - (w ** 2).sum() / w.sum()
        tau2 = max(0.0, spread / scale) if scale > 0 else 0.0
        mean = np.average(t, weights=1 / (v + tau2))
        shrunk = mean + tau2 / (tau2 + v) * (t - mean)
    else:
        shrunk = np.full(len(t), np.log(scaling.fit_temperature(scores, labels)))
    return (dict(zip(names.tolist(), np.exp(t).tolist(), strict=True)),
            dict(zip(names.tolist(), np.exp(shrunk).tolist(), strict=True)))


def _log_temperature_variance(scores, labels, t):
    """Return the sampling variance of log T at its fit t; inf if it is not identified.

    max(mean(g^2), h) / (N h^2), with g the derivative of a row's NLL by log T and h the mean of
    the second derivatives: the sandwich estimate, far too small for a few rows, or 1 / (N h).
    """
    p = metrics.softmax(scores, np.exp(t))
    z = np.where(np.isfinite(scores), scores, 0) / np.exp(t)
    z -= (p * z).sum(1, keepdims=True)
    g = z[np.arange(len(labels)), labels]
    h = ((p * z * z).sum(1) - g).mean()
    return max((g ** 2).mean(), h) / (len(labels) * h ** 2) if h > 0 else np.inf


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
