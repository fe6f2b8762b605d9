"""Claim 15: the closed form of alignment, wrong labels, LoRA, and stated confidence; see PLAN.md.

    python research/study/side_by_side.py --study=closed-form --processes=24
    python research/study/closed_form.py --runs=out/study   # first results/closed-form/*.csv
    python research/study/closed_form.py                    # from these files: a table and a figure

The worlds, models and metrics are those of alignment.py.
"""

import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

import metrics
from world import conversation
from compare.over_seeds import predictions_by_group
from results.report import option_predictions
from compare.runs import read_run
from runtime import cli
from research.common import ROOT, panels, read_lines, write_lines
from research.study import alignment, alignment_tables
from research.study.alignment import DPO, GRPO, PPO, RUNS, WHOLE, draw_wrong, log
from research.study.claims import Claims, draw_mean, finish, label
from research.study.metrics_agree import kendall

METHODS = {'ppo': PPO, 'grpo': GRPO | {'method': 'dr_grpo'}, 'dpo': DPO}     # the longest first
TITLES = {'dpo': 'DPO', 'ppo': 'PPO', 'grpo': 'Dr. GRPO'}
WEIGHTS = {'ppo': (0.0125, 0.05, 0.2), 'grpo': (0.0125, 0.05, 0.2), 'dpo': (0.1, 0.3, 1.0)}
WEIGHTED = [(method, weight) for method, weights in WEIGHTS.items() for weight in weights]
LORA = ('dpo', 'ppo')       # the methods that are also run with LoRA
NOISE, NOISY_PAIRS, NOISY_BETA = 0.2, 512, 0.3
NOISY = ('dpo-noisy', 'cdpo-noisy')
# {model that learns from pairs: its beta}
PAIR_MODELS = dict.fromkeys(NOISY, NOISY_BETA) | {
    f'dpo-{beta}{kind}': beta for kind in ('', '-lora') for beta in WEIGHTS['dpo']}
PAIR_COLUMNS = ('margin', 'fitted', 'preference', 'preference_ece')


def runs(seed, root=ROOT):
    """Yield the config of every model, the longest runs first; `prepare` makes their data."""
    stated = {'eval': alignment.stated_evaluation(alignment.seed_folder(seed, root))}
    yield alignment.tuning('own', seed, root, data='pairs/own', **stated)
    yield alignment.tuning('brier-base', seed, root, data='pairs/told', lr=3.2e-4, loss='brier()',
                           **stated)
    named = {'rlcr-own': RUNS[5]['rlcr'] | stated | {
        'model': 'own', 'kl': 'loss', 'kl_coef': 0.01, 'group_size': 16, 'decode_batch': 1024}}
    for method, weight in WEIGHTED:
        settings = METHODS[method] | {'beta' if method == 'dpo' else 'kl_coef': weight}
        named[f'{method}-{weight}'] = settings
        if method in LORA:
            named[f'{method}-{weight}-lora'] = settings | {'lora': True, 'lr': 10 * settings['lr']}
    noisy = DPO | {'beta': NOISY_BETA, 'data': 'noisy', 'epochs': 1e3, 'lr': 4e-4,
                   'max_steps': 2 * alignment.STEPS}
    named |= {'dpo-noisy': noisy, 'cdpo-noisy': noisy | {'method': 'cdpo', 'label_noise': NOISE}}
    for name, settings in named.items():
        yield alignment.aligning(name, seed, root, **WHOLE | settings)


def prepare(seed, root=ROOT):
    """Write pairs/noisy.jsonl and own.jsonl, after the files of alignment.select.

    noisy: pairs of which about a share NOISE is swapped; own: conversations whose answers are drawn
    from the base model, and state the probability that it gives to them.
    """
    rng, pairs = np.random.default_rng([seed, 5]), Path(alignment.seed_folder(seed, root), 'pairs')
    if not (pairs / 'all.jsonl').exists():
        alignment.select(seed, root)
    rows = read_lines(pairs / 'all.jsonl')[:NOISY_PAIRS]
    write_lines(pairs / 'noisy.jsonl', [
        row | {'chosen': row['rejected'], 'rejected': row['chosen']} if swapped else row
        for row, swapped in zip(rows, rng.random(len(rows)) < NOISE, strict=True)])
    questions, answers = alignment.answers_of('base', seed, root, lead='', chat='none')
    stated = {}
    for id, (options, p, _) in answers.items():
        k = rng.choice(len(p), p=p / p.sum())
        stated[id] = alignment.STATED.format(options[k].strip(), f'{p[k]:.2f}')
    write_lines(pairs / 'own.jsonl', [conversation(row['prompt'], stated[row['id']])
                                      for row in questions])


# Numbers

def closed_form(method, weight, p, q):
    """Return the distributions [N, K] in which alignment from p [N, K] should end.

    q: the probabilities that the options are right. PPO and GRPO have its rewards, q; DPO those of
    Bradley and Terry for pairs of an answer drawn by q and another one drawn by p.
    """
    reward = log(q) - log(p) - log(1 - p) if method == 'dpo' else q
    return metrics.softmax(log(p) + reward / weight)


def pair_measures(source):
    """Return {column of PAIR_COLUMNS: value} of a model that learned from pairs.

    margin and fitted are of the trained pairs in the last eight steps, the others of the questions.
    """
    last = read_lines(source.folder / 'log.jsonl')[-8:]
    policy, sft = alignment.options_of(source.folder), alignment.options_of(source.reference)
    rng, rows = np.random.default_rng([source.names['seed'], 6]), np.arange(len(sft.labels))
    wrong = [draw_wrong(p, answer, rng) for p, answer in zip(sft.probs, sft.labels, strict=True)]
    ratio = log(policy.probs) - log(sft.probs)
    margin = PAIR_MODELS[source.names['run']] * (ratio[rows, sft.labels] - ratio[rows, wrong])
    return {'margin': np.mean([step['margin'] for step in last]),
            'fitted': np.mean([step['accuracy'] for step in last]),
            'preference': np.mean(1 / (1 + np.exp(-margin))),
            'preference_ece': metrics.ece(1 / (1 + np.exp(-np.abs(margin))), margin > 0)}


def sources(root):
    for seed in alignment.SEEDS:
        yield from alignment.sources_of([*alignment.base_runs(seed, root), *runs(seed, root)])


def lines_of(source):
    """Return the lines of alignment.lines_of with more columns; after SFT's the closed form's."""
    name, lines = source.names['run'], alignment.lines_of(source)
    more = pair_measures(source) if name in PAIR_MODELS else {}
    if name == 'sft':
        (_, _, plain), (_, _, scaled) = predictions_by_group(read_run(source.folder))
        for method, weight in WEIGHTED:
            probs = closed_form(method, weight, plain.probs, scaled.probs)
            ended = option_predictions(probs, plain.labels, plain.n_options, log(probs))
            lines.append({'task': 'chat', 'scaling': 'none'} | source.names
                         | {'run': f'{method}-{weight}-expected'}
                         | alignment.measures(ended, plain.probs))
    columns = *alignment.COLUMNS, *PAIR_COLUMNS
    return [{key: str((line | more).get(key, '')) for key in columns} for line in lines]


# Tables and figure

def tau(numbers, names):
    """Return float [seeds]: Kendall's tau of preference ECE and ECE of answers over models."""
    both = np.array([[numbers.of(name, key) for name in names]
                     for key in ('preference_ece', 'ece')])       # [2, models, seeds]
    return np.array([kendall(*x, n_resamples=1)[0] if np.isfinite(x).all() else np.nan
                     for x in np.moveaxis(both, -1, 0)])


def figure(numbers, path):
    """Draw the ECE of each method by the weight of the KL, and that of the closed form."""
    drawn, axes = panels(3, 3)
    for ax, (method, weights) in zip(axes, WEIGHTS.items(), strict=True):
        # the points of a weight are drawn side by side, so that no interval hides another
        for title, kind, color, aside in (('full weights', '', 'C0', 1),
                                          ('closed form', '-expected', 'black', 0.9),
                                          ('LoRA', '-lora', 'C1', 1.1)):
            for weight in weights if kind != '-lora' or method in LORA else ():
                draw_mean(ax, weight * aside, numbers.of(f'{method}-{weight}{kind}', 'ece'),
                          color=color, label=title)
        ax.axhline(numbers.of('sft', 'ece').mean(), color='gray', linestyle=':', label='SFT')
        ax.set_xscale('log')
        ax.set_xticks(weights, map(str, weights))
        ax.set_xticks((), minor=True)
        ax.set_ylim(bottom=0)
        label(ax, TITLES[method], ylabel='ECE',
              xlabel='beta' if method == 'dpo' else 'weight of the KL')
    finish(drawn, path)


CLAIMS = Claims(
    Path(__file__).parent / 'results' / 'closed-form', alignment_tables.CLAIMS.usual,
    {'closed-form': figure},
    sources, lines_of,
    # SFT, and a method at its three weights
    {method + kind: [('sft', {}), *((f'{method}-{weight}{kind}', {}) for weight in WEIGHTS[method])]
     for method in LORA for kind in ('', '-lora')},
    {'tau': functools.partial(tau, names=PAIR_MODELS), 'clean_tau': functools.partial(
        tau, names=[name for name in PAIR_MODELS if name not in NOISY])})


if __name__ == '__main__':
    with cli.one_line_errors():
        CLAIMS.main(__doc__)
