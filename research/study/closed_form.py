"""Claim 15: the closed form of alignment, wrong labels, LoRA, and stated confidence; see PLAN.md.

    python research/study/side_by_side.py --study=closed-form --processes=24
    python research/study/closed_form.py --runs=out/study   # first results/closed-form/*.csv
    python research/study/closed_form.py                    # from these files: a table and a figure

The worlds, models and metrics are those of alignment.py, the tables those of aligned.py.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

import metrics
from data.world import conversation
from evaluate import run
from results.over_seeds import predictions_by_group
from results.report import option_predictions, predictions
from results.runs import read_run, read_run_samples
from runtime import cli
from research.study import aligned, alignment, common
from research.study.aligned import difference_table, plain
from research.study.alignment import DPO, GRPO, PPO, RUNS, WHOLE
from research.study.frontier import at_equal_accuracy, bars, cell, finish, panels
from research.study.metrics_agree import kendall
from train import TrainConfig

RESULTS = Path(__file__).parent / 'results' / 'closed-form'
METHODS = {'ppo': PPO, 'grpo': GRPO | {'method': 'dr_grpo'}, 'dpo': DPO}     # the longest first
TITLES = {'dpo': 'DPO', 'ppo': 'PPO', 'grpo': 'Dr. GRPO'}
WEIGHTS = dict.fromkeys(('ppo', 'grpo'), (0.0125, 0.05, 0.2)) | {'dpo': (0.1, 0.3, 1.0)}
LORA = ('dpo', 'ppo')       # the methods that are also run with LoRA
NOISE, NOISY_PAIRS, NOISY_BETA = 0.2, 512, 0.3


def name_of(method, weight, kind=''):
    return f'{method}-{weight}{kind}'


WEIGHTED = [(method, weight) for method, weights in WEIGHTS.items() for weight in weights]
NOISY = ('dpo-noisy', 'cdpo-noisy')
# {model that learns from pairs: its beta}
PAIR_MODELS = dict.fromkeys(NOISY, NOISY_BETA) | {
    name_of('dpo', beta, kind): beta for kind in ('', '-lora') for beta in WEIGHTS['dpo']}
PAIR_COLUMNS = ('margin', 'fitted', 'preference', 'preference_ece')


def runs(seed, root=common.ROOT):
    """Yield the config of every model, the longest runs first; `prepare` makes their data."""
    folder = alignment.seed_folder(seed, root)
    stated = {'eval': alignment.stated_evaluation(folder)}
    for name, data, more in (('own', 'own', {'lr': 8e-4}),
                             ('brier-base', 'told', {'lr': 3.2e-4, 'loss': 'brier()'})):
        yield TrainConfig(**alignment.training(
            name, seed, root, model=f'{folder}/base', data=f'{folder}/pairs/{data}.jsonl',
            batch_size=64, epochs=3.0, checkpoint_epochs=False, **stated, **more))
    named = {'rlcr-own': RUNS[5]['rlcr'] | stated | {
        'model': 'own', 'kl': 'loss', 'kl_coef': 0.01, 'group_size': 16, 'decode_batch': 1024}}
    for method, weight in WEIGHTED:
        settings = METHODS[method] | {'beta' if method == 'dpo' else 'kl_coef': weight}
        named[name_of(method, weight)] = settings
        if method in LORA:
            named[name_of(method, weight, '-lora')] = settings | {
                'lora': True, 'lr': 10 * settings['lr']}
    for name in NOISY:
        named[name] = DPO | {
            'beta': NOISY_BETA, 'data': 'noisy', 'epochs': 1e3, 'max_steps': 2 * alignment.STEPS,
            'lr': 4e-4}
    named['cdpo-noisy'] |= {'method': 'cdpo', 'label_noise': NOISE}
    for name, settings in named.items():
        yield alignment.aligning(name, seed, root, **WHOLE | settings)


def prepare(seed, root=common.ROOT):
    """Write pairs/noisy.jsonl and own.jsonl, after the files of alignment.select.

    noisy: pairs of which about a share NOISE is swapped; own: conversations whose answers are drawn
    from the base model, and state the probability that it gives to them.
    """
    folder, rng = Path(alignment.seed_folder(seed, root)), np.random.default_rng([seed, 5])
    pairs = folder / 'pairs'
    if not (pairs / 'all.jsonl').exists():
        alignment.select(seed, root)
    rows = read_lines(pairs / 'all.jsonl')[:NOISY_PAIRS]
    alignment.write_lines(pairs / 'noisy.jsonl', [
        row | {'chosen': row['rejected'], 'rejected': row['chosen']} if swapped else row
        for row, swapped in zip(rows, rng.random(len(rows)) < NOISE, strict=True)])
    asked = read_lines(folder / 'world' / 'prompts' / 'test.jsonl')
    (folder / 'in-plain').mkdir(exist_ok=True)
    alignment.write_lines(folder / 'in-plain' / 'test.jsonl', [row | {'classes': [
        option.removeprefix('Answer:') for option in row['classes']]} for row in asked])
    run(alignment.evaluation(folder, f'{folder}/in-plain', chat='none', model=f'{folder}/base',
                             seed=seed, out_dir=f'{folder}/base-knows'))
    (samples,) = read_run_samples(read_run(folder / 'base-knows'))[0].values()
    probs = predictions(samples, 'sum').probs
    told = {}
    for sample, p in zip(samples, probs, strict=True):
        k = rng.choice(len(p), p=p / p.sum())
        told[sample['id']] = alignment.STATED.format(sample['options'][k].strip(), f'{p[k]:.2f}')
    alignment.write_lines(pairs / 'own.jsonl', [conversation(row['prompt'], told[row['id']])
                                                for row in asked])


def read_lines(path):
    return [*map(json.loads, path.read_text(encoding='utf-8').splitlines())]


# Numbers


def closed_form(method, weight, p, q):
    """Return the distributions [N, K] in which alignment from p [N, K] should end.

    q: the probabilities that the options are right. PPO and GRPO have its rewards, q; DPO those of
    Bradley and Terry for pairs of an answer drawn by q and another one drawn by p.
    """
    p, q, others = (np.maximum(x, np.finfo(float).tiny) for x in (p, q, 1 - p))
    reward = np.log(q) - np.log(p) - np.log(others) if method == 'dpo' else q
    return metrics.softmax(np.log(p) + reward / weight)


def expected_lines(sft):
    """Return the lines of the closed form; sft: the Source of the model before alignment."""
    (_, _, plain), (_, _, scaled) = predictions_by_group(read_run(sft.folder))
    lines = []
    for method, weight in WEIGHTED:
        probs = closed_form(method, weight, plain.probs, scaled.probs)
        scores = np.log(np.maximum(probs, np.finfo(float).tiny))
        ended = option_predictions(probs, plain.labels, plain.n_options, scores)
        lines.append({'task': 'chat', 'scaling': 'none'} | sft.names
                     | {'run': name_of(method, weight, '-expected')}
                     | alignment.measures(ended, plain.probs))
    return lines


def pair_measures(source):
    """Return {column of PAIR_COLUMNS: value} of a model that learned from pairs.

    margin and fitted are of the trained pairs in the last eight steps, the others of the questions.
    """
    last = read_lines(source.folder / 'log.jsonl')[-8:]
    policy, sft = alignment.options_of(source.folder), alignment.options_of(source.reference)
    rng, rows = np.random.default_rng([source.names['seed'], 6]), np.arange(len(sft.labels))
    wrong = sft.probs.copy()
    wrong[rows, sft.labels] = 0
    worse = [rng.choice(len(p), p=p / p.sum()) for p in wrong]
    tiny = np.finfo(float).tiny
    ratio = np.log(np.maximum(policy.probs, tiny)) - np.log(np.maximum(sft.probs, tiny))
    margin = PAIR_MODELS[source.names['run']] * (ratio[rows, sft.labels] - ratio[rows, worse])
    return dict(zip(PAIR_COLUMNS, (
        np.mean([step['margin'] for step in last]), np.mean([step['accuracy'] for step in last]),
        np.mean(1 / (1 + np.exp(-margin))),
        metrics.ece(1 / (1 + np.exp(-np.abs(margin))), margin > 0)), strict=True))


def sources(seed, root):
    """Yield the Source of each finished run of a seed."""
    yield from alignment.sources_of([*alignment.base_runs(seed, root), *runs(seed, root)])


def lines_of(source):
    """Return the lines of alignment.lines_of with more columns; after SFT's the closed form's."""
    name, more = source.names['run'], dict.fromkeys(PAIR_COLUMNS, '')
    if name in PAIR_MODELS:
        more = pair_measures(source)
    lines = [line | more for line in alignment.lines_of(source)]
    if name == 'sft':
        lines += [{key: str(line.get(key, '')) for key in (*alignment.COLUMNS, *PAIR_COLUMNS)}
                  for line in expected_lines(source)]
    return lines


# Tables: a function of Numbers returns rows, header first


def models_table(numbers):
    """Questions 1 to 3: all models that learn from pairs or rewards, and the closed form."""
    keys = {'reward': 'held-out reward', 'kl': 'KL (nats)', 'accuracy': 'accuracy',
            'confidence': 'confidence', 'ece': 'ECE', 'margin': 'margin of trained pairs',
            'fitted': 'accuracy on trained pairs', 'preference': 'held-out preference',
            'preference_ece': 'preference ECE'}
    names = ['sft']
    for method, weight in WEIGHTED:
        names += [name_of(method, weight, kind) for kind in ('', '-expected', '-lora')
                  if kind != '-lora' or method in LORA]
    values = {(name, key): numbers.of(name, key) for name in (*names, *NOISY) for key in keys}
    return [['model', *keys.values()], *(
        [name, *('' if np.isnan(values[name, key]).all() else plain(values[name, key])
                 for key in keys)] for name in (*names, *NOISY))]


def expected_tests(numbers):
    ece = {key: numbers.of(name_of(*key), 'ece') for key in WEIGHTED}
    named = {f'ECE of {TITLES[method]}, {weight} - expected':
             x - numbers.of(name_of(method, weight, '-expected'), 'ece')
             for (method, weight), x in ece.items()}
    return difference_table(named | {
        f'ECE of {TITLES[method]}, {weights[0]} - {weights[-1]}':
        ece[method, weights[0]] - ece[method, weights[-1]] for method, weights in WEIGHTS.items()})


def noise_tests(numbers):
    dpo, cdpo = ({key: numbers.of(name, key) for key in ('margin', 'preference_ece', 'ece')}
                 for name in NOISY)
    limit = np.log((1 - NOISE) / NOISE)
    return difference_table({
        'margin of cDPO - log 4': cdpo['margin'] - limit,
        'margin of DPO - log 4': dpo['margin'] - limit,
        'preference ECE: cDPO - DPO': cdpo['preference_ece'] - dpo['preference_ece'],
        'ECE of answers: cDPO - DPO': cdpo['ece'] - dpo['ece'],
        'tau of preference ECE and ECE of answers': tau(numbers, PAIR_MODELS)})


def tau(numbers, names):
    """Return float [seeds]: Kendall's tau of preference ECE and ECE of answers over models."""
    both = np.array([[numbers.of(name, key) for name in names]
                     for key in ('preference_ece', 'ece')])       # [2, models, seeds]
    return np.array([kendall(*x, n_resamples=1)[0] if np.isfinite(x).all() else np.nan
                     for x in np.moveaxis(both, -1, 0)])


def curves(numbers, x, method, kind=''):
    """Return [(x ascending, ECE) [2, 4]] per seed: SFT and a method at its three weights."""
    names = ['sft', *(name_of(method, weight, kind) for weight in WEIGHTS[method])]
    points = np.array([[numbers.of(name, key) for name in names] for key in (x, 'ece')])
    if x == 'kl':
        points[0, 0] = 0        # of SFT to itself
    return [each[:, np.argsort(each[0], kind='stable')] for each in np.moveaxis(points, -1, 0)]


def lora_tests(numbers):
    return difference_table({
        f'ECE of {TITLES[method]}, LoRA - full weights, at equal {title}': np.array([
            *map(at_equal_accuracy, curves(numbers, x, method, '-lora'),
                 curves(numbers, x, method))])
        for method in LORA for x, title in (('kl', 'KL'), ('reward', 'held-out reward'))})


def stated_table(numbers):
    return aligned.stated_table(numbers, (
        ('own', 'SFT on its own answers', 'qa.stated'), ('rlcr-own', 'RLCR', 'qa.stated'),
        ('rlcr-own', 'RLCR', 'qa.answer_span'), ('brier-base', 'Brier loss', 'qa')))


def stated_tests(numbers):
    keys = {'ece': 'ECE', 'brier_top_label': 'Brier', 'auroc': 'AUROC', 'accuracy': 'accuracy'}
    own, rlcr, brier = ({key: numbers.of(name, key, task=task) for key in keys} for name, task in (
        ('own', 'qa.stated'), ('rlcr-own', 'qa.stated'), ('brier-base', 'qa')))
    return difference_table({
        'AUROC of RLCR, stated - 0.5': rlcr['auroc'] - 0.5,
        'Brier of RLCR, stated - SFT on its own answers':
        rlcr['brier_top_label'] - own['brier_top_label']} | {
        f'{title} of RLCR, stated - Brier loss': rlcr[key] - brier[key]
        for key, title in keys.items()})


def changes_table(numbers):
    """Questions 1 to 3: what each model changed; no tests were planned."""
    rows = [['model (not tested)', 'training reward: first 8 steps', 'last 8 steps',
             'change of held-out reward from SFT', 'change of ECE from SFT',
             'ECE after a temperature']]
    names = [name_of(*each) for each in WEIGHTED]
    names += [name_of(method, weight, '-lora') for method, weight in WEIGHTED if method in LORA]
    for name in (*names, *NOISY):
        rows.append([name, *('' if name in PAIR_MODELS else plain(numbers.of(name, key))
                             for key in ('first_reward', 'trained_reward')),
                     *(cell(numbers.of(name, key) - numbers.of('sft', key))
                       for key in ('reward', 'ece')),
                     plain(numbers.of(name, 'ece', scaling='temperature'))])
    return rows


def costs_table(numbers):
    """Questions 1 and 2: differences that were looked at without a plan."""
    rows = [['difference (not tested)', 'mean']]
    for method in ('ppo', 'grpo'):
        low, *_, high = WEIGHTS[method]
        rows.append([f'held-out reward of {TITLES[method]}, {low} - {high}', cell(
            numbers.of(name_of(method, low), 'reward')
            - numbers.of(name_of(method, high), 'reward'))])
    clean = [name for name in PAIR_MODELS if name not in NOISY]
    return rows + [['tau without the two models with wrong labels', cell(tau(numbers, clean))]]


def figure(numbers, path):
    """Draw the ECE of each method by the weight of the KL, and that of the closed form."""
    drawn, axes = panels(1, 3)
    aside = {'-expected': 0.9, '': 1, '-lora': 1.1}
    for ax, (method, weights) in zip(axes[0], WEIGHTS.items(), strict=True):
        series = {'full weights': ('', 'C0'), 'closed form': ('-expected', 'black')}
        if method in LORA:
            series['LoRA'] = ('-lora', 'C1')
        for label, (kind, color) in series.items():
            for weight in weights:      # side by side, so that no interval hides another
                bars(ax, weight * aside[kind], numbers.of(name_of(method, weight, kind), 'ece'),
                     color=color, label=label)
        ax.axhline(numbers.of('sft', 'ece').mean(), color='gray', linestyle=':', label='SFT')
        ax.set_xscale('log')
        ax.set_xticks(weights, map(str, weights))
        ax.set_xticks((), minor=True)
        ax.set_ylim(bottom=0)
        ax.set(xlabel='beta' if method == 'dpo' else 'weight of the KL', ylabel='ECE')
        ax.set_title(TITLES[method], fontsize=10)
        ax.grid(alpha=0.3)
    finish(drawn, path)


CLAIMS = {'closed-form': ('Claim 15: the closed form, wrong labels, LoRA, stated confidence', (
    models_table, expected_tests, noise_tests, lora_tests, changes_table, costs_table, stated_table,
    stated_tests), figure)}


def main(arguments=None):
    aligned.main(arguments, CLAIMS, RESULTS, sources, lines_of, __doc__)


if __name__ == '__main__':
    with cli.one_line_errors():
        main()
