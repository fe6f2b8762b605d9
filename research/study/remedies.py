"""Remedies of 2019 to 2026 for the confidence of tuned models, beside a temperature; see PLAN.md.

    python research/study/remedies.py --root=out/study/two-models --out_dir=out/study/remedies

ROOT has seed-*/MODEL/DATA/METHOD/questions.npz of two_models.py; the base model is the METHOD
`before`. In each of five splits a remedy is fitted on one half of the questions, those that read
the base model without labels, and measured on the other. remedies.csv has means over splits and
seeds, and their difference to a temperature's; remedies.md has means over runs and tasks.

    vector, matrix  SVS and SMS of probmetrics 1.3 (Berta et al. 2026): after a temperature and a
                    mixture with 1/(n + 1) of equal probabilities, W z + b of least mean NLL + K/n
                    (|b|^2 + |diag W - 1|^2) + K (K - 1)/n |off-diagonal W|^2; vector: none of these
    dirichlet       Kull et al. 2019: W log p + b of least mean NLL + l/K |b|^2 + l/(K (K - 1))
                    |off-diagonal W|^2, with the l of least NLL in three folds
    venn_abers      one against one, inductive, as in venn-abers 1.5: p1 / (1 - p0 + p1) of each
                    pair of options, then 1 / (sum of 1/p - (K - 2)), normalized
    daca            arXiv 2505.16690: scaling.fit_temperature_to_base
    basecal         BaseCal-ReEval, arXiv 2601.03042: the tuned model's answer with the base model's
                    probability of it. The paper takes the mean probability of the tokens of a
                    written answer; here the answer is an option. NLL and Brier are the base model's
    dual_align      Dual-Align, arXiv 2601.04277, of which abstract and summaries were found: one
                    temperature, by KL to the base model where both agree, elsewhere by "stability"
                    after the layer at which their Jensen-Shannon divergence jumps. questions.npz
                    has no layers: our reading takes the last one alone, (difference of entropies)^2
"""

import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

import metrics
from compare import scaling
from research.common import ROOT, command_line, write_csv
from results.tables import markdown
from runtime.errors import DataError
from runtime.ownership import write_text
from runtime.processes import parallel_map

KEYS = 'accuracy', 'ece', 'nll', 'brier'
N_RESAMPLES = 200


def affine(scores, weights):
    """Return z @ W.T + b [N, K] of scores z, weights [K, K + 1] = (W, b); -inf stays -inf."""
    has = np.isfinite(scores)
    return np.where(has, np.where(has, scores, 0) @ weights[:, :-1].T + weights[:, -1], -np.inf)


def fit_affine(scores, labels, diagonal, other, intercept):
    """Return weights [K, K + 1] of least mean NLL + the sum of ridges * (weights - (I, 0))^2."""
    n, K = scores.shape
    ridge = np.hstack([np.where(np.eye(K) > 0, diagonal, other), np.full((K, 1), intercept)])
    x = np.hstack([np.where(np.isfinite(scores), scores, 0), np.ones((n, 1))])

    def nll(weights):
        p = metrics.softmax(affine(scores, weights.reshape(K, K + 1)))
        curvature = p[:, :, None] * (np.eye(K) - p[:, None])
        hessian = np.einsum('nkl,ni,nj->kilj', curvature, x, x, optimize=True) / n
        return (metrics.label_nll(p, labels).mean(), ((p - np.eye(K)[labels]).T @ x / n).ravel(),
                hessian.reshape(ridge.size, ridge.size))

    start = np.eye(K, K + 1).ravel()
    return scaling._minimize_convex(nll, start, ridge.ravel()).reshape(K, K + 1)


def structured(fit, labels, test, with_matrix):
    """Return the probabilities of `test` by structured vector or matrix scaling."""
    n, K = fit.shape
    temperature = scaling.fit_temperature(fit, labels)

    def mixed(scores):
        has = np.isfinite(scores)
        p = metrics.softmax(scores, temperature) * n + has / has.sum(1, keepdims=True)
        return np.log(p / (n + 1), out=np.full(p.shape, -np.inf), where=has)

    other = K * (K - 1) / n if with_matrix else 1e9
    return metrics.softmax(affine(mixed(test), fit_affine(mixed(fit), labels, K / n, other, K / n)))


def dirichlet(fit, labels, test, strengths=(1e-4, 1e-3, 1e-2, 1e-1, 1)):
    """Return the probabilities of `test` by Dirichlet calibration."""
    K, fold = fit.shape[1], np.arange(len(fit)) % 3

    def fitted(rows, strength):
        return fit_affine(fit[rows], labels[rows], 1e-9, strength / (K * (K - 1)), strength / K)

    def held_out(strength):
        return sum(metrics.label_nll(metrics.softmax(affine(fit[at], fitted(~at, strength))),
                                     labels[at]).sum() for at in (fold == k for k in range(3)))

    return metrics.softmax(affine(test, fitted(fold >= 0, min(strengths, key=held_out))))


def venn_abers_pair(scores, correct, test):
    """Return p1 / (1 - p0 + p1) of each score in `test`: inductive Venn-Abers.

    p0 and p1: isotonic regression at a test score added as wrong, as right. It is the largest p
    so that from some row before to any row after it the sum of (right - p) is 0 or more.
    """
    x, index = np.unique(scores, return_inverse=True)
    right, count = (np.append(0, np.cumsum(np.bincount(index, w, len(x))))
                    for w in (correct, None))
    (first, last), back = np.unique([np.searchsorted(x, test, 'left'), np.searchsorted(
        x, test, 'right')], axis=1, return_inverse=True)
    before, after = (np.where(mask, 0, np.inf) for mask in (
        np.arange(len(x) + 1) <= first[:, None], np.arange(len(x) + 1) >= last[:, None]))

    def isotonic(label):
        low, high = np.zeros(len(first)), np.ones(len(first))
        for _ in range(40):
            p = (low + high) / 2
            sums = right - p[:, None] * count
            reached = (sums + before).min(1) <= (sums + after).min(1) + label - p
            low, high = np.where(reached, p, low), np.where(reached, high, p)
        return high

    p0, p1 = isotonic(0), isotonic(1)
    return (p1 / (1 - p0 + p1))[back.ravel()]


def venn_abers(fit, labels, test):
    """Return the probabilities of `test` by one-against-one Venn-Abers predictors."""
    K, has = test.shape[1], np.isfinite(test)
    inverse = np.repeat(2.0 - has.sum(1, keepdims=True), K, 1)      # the sum of 1 / p - (K - 2)
    for j, k in itertools.combinations(range(K), 2):
        both = has[:, j] & has[:, k]
        at = np.isin(labels, (j, k)) & np.isfinite(fit[:, j] + fit[:, k])
        p = venn_abers_pair((fit[:, k] - fit[:, j])[at], labels[at] == k,
                            test[both, k] - test[both, j])
        inverse[both, k] += 1 / p
        inverse[both, j] += 1 / (1 - p)
    return metrics.softmax(-np.log(np.where(has, inverse, np.inf)))     # 1 / inverse, normalized


def dual_align(scores, base):
    """Return the best of 400 temperatures, by our reading of Dual-Align."""
    p, same = metrics.softmax(base), scores.argmax(1) == base.argmax(1)

    def loss(temperature):
        q = metrics.softmax(scores, temperature)
        kl = (p * np.log(np.maximum(p, 1e-300) / np.maximum(q, 1e-300))).sum(1)
        return np.where(same, kl, (metrics.row_entropy(q) - metrics.row_entropy(p)) ** 2).mean()

    return min(np.geomspace(0.05, 20, 400), key=loss)


def predictions(scores, base, labels, fit):
    """Return {remedy: (probabilities [N, K], chosen option [N])} of the rows not in `fit`, bool."""
    half, right, test, of_base = scores[fit], labels[fit], scores[~fit], metrics.softmax(base[~fit])
    temperatures = {'none': 1, 'temperature': scaling.fit_temperature(half, right),
                    'daca': scaling.fit_temperature_to_base(half, base[fit]),
                    'dual_align': dual_align(half, base[fit])}
    probs = {name: metrics.softmax(test, t) for name, t in temperatures.items()} | {
        'vector': structured(half, right, test, with_matrix=False),
        'matrix': structured(half, right, test, with_matrix=True),
        'dirichlet': dirichlet(half, right, test), 'venn_abers': venn_abers(half, right, test)}
    return {name: (p, p.argmax(1)) for name, p in probs.items()} | {
        'basecal': (of_base, test.argmax(1)), 'base': (of_base, of_base.argmax(1))}


def columns(probs, chosen, labels):
    """Return [float [N, C] of each of KEYS]: the metric is the sum over C of |the mean over N|."""
    confidence, right = probs[np.arange(len(labels)), chosen], chosen == labels
    bins = np.eye(10)[metrics.equal_width_bins(metrics.round_for_ties(confidence), 10)]
    brier = ((probs - np.eye(probs.shape[1])[labels]) ** 2).sum(1)
    rows = right, bins.T * (confidence - right), metrics.label_nll(probs, labels), brier
    return [np.atleast_2d(x).T for x in rows]


def measure(scores, base, labels, n_languages=1):
    """Return {(remedy, key): float [1 + N_RESAMPLES]}: means over splits, of resamples too."""
    n = len(labels) // n_languages
    draws = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), N_RESAMPLES)
    weights = np.tile(np.vstack([np.ones((1, n)), draws]), n_languages)
    total = {}
    for split in range(5):
        fit = np.tile(np.random.default_rng(split).permutation(n) < n // 2, n_languages)
        w = weights[:, ~fit] / weights[:, ~fit].sum(1, keepdims=True)
        for name, pair in predictions(scores, base, labels, fit).items():
            for key, x in zip(KEYS, columns(*pair, labels[~fit]), strict=True):
                total[name, key] = total.get((name, key), 0) + np.abs(w @ x).sum(1) / 5
    return total


def measure_run(job):
    """Return the last columns of the rows of remedies.csv of a run, from `task` on.

    job: (its file of each seed; the base model's). The half-width of the difference to the
    temperature is 1.96 standard deviations over resamples of the questions, the same for all seeds.
    """
    before, rows = np.load(job[1]), []
    for task in [task for task in before if f'{task}.answer' in before]:
        by_seed, labels = [], before[f'{task}.answer'].astype(int)
        for path in job[0]:
            file = np.load(path)
            if not np.array_equal(file[f'{task}.answer'], labels):
                raise DataError(f'{path}: the questions of {task} are not those of {job[1]}')
            by_seed.append(measure(file[task].astype(float), before[task].astype(float), labels,
                                   11 if task == 'xcopa' else 1))    # languages
        for name, key in by_seed[0]:
            values = np.array([x[name, key] for x in by_seed])      # [seeds, 1 + N_RESAMPLES]
            d = values - np.array([x['temperature', key] for x in by_seed])
            rows.append((task, name, key, len(d), values[:, 0].mean(), d[:, 0].mean(),
                         1.96 * d[:, 1:].mean(0).std(), d[:, 0].min(), d[:, 0].max()))
    return rows


def table(rows):
    """Return the cells of remedies.md for rows of remedies.csv."""
    lines = [('model', 'data', 'remedy', *KEYS, *(f'{key}: lower, higher' for key in KEYS))]
    for name in dict.fromkeys((*row[:2], row[4]) for row in rows):
        values = [np.array([row[7:] for row in rows if (*row[:2], *row[4:6]) == (*name, key)]).T
                  for key in KEYS]
        counts = (f'{((d + half < 0) & (highest < 0)).sum()}, '
                  f'{((d - half > 0) & (lowest > 0)).sum()} of {len(d)}'
                  for _, d, half, lowest, highest in values)
        lines.append((*name, *(f'{mean.mean():.4f}' for mean, *_ in values), *counts))
    return lines


def main(arguments=None):
    options = command_line(__doc__, arguments, root={'type': Path, 'default': f'{ROOT}/two-models'},
                           out_dir={'type': Path, 'default': f'{ROOT}/remedies'})
    runs = {}
    for path in sorted(options.root.glob('seed-*/*/*/*/questions.npz')):
        runs.setdefault(path.parent.parts[-3:], []).append(path)
    tuned = [run for run in runs if run[2] != 'before' and (*run[:2], 'before') in runs]
    if not tuned:
        raise SystemExit(f'{options.root} needs seed-*/MODEL/DATA/METHOD/questions.npz of a tuned '
                         f'model and of its base model, whose METHOD is before')
    found = parallel_map(measure_run, [(runs[run], runs[*run[:2], 'before'][0]) for run in tuned],
                         worth_it=True)
    rows = [(*run, *row) for run, rows in zip(tuned, found, strict=True) for row in rows]
    options.out_dir.mkdir(parents=True, exist_ok=True)
    write_csv(options.out_dir / 'remedies.csv', [(
        'model', 'data', 'run', 'task', 'remedy', 'metric', 'seeds', 'mean', 'minus_temperature',
        'half_width', 'lowest_seed', 'highest_seed'), *(
            (*row[:7], *(f'{x:.5f}' for x in row[7:])) for row in rows)])
    text = ('Means over runs and tasks; then in how many the difference to a temperature is below '
            f'0, or above, with its interval and for each seed.\n\n{markdown(table(rows))}')
    write_text(options.out_dir / 'remedies.md', f'# {__doc__.splitlines()[0]}\n\n{text}')
    print(text)


if __name__ == '__main__':
    main()
