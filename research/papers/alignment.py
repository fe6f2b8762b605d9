"""On the Calibration of Large Language Models and Alignment (Zhu et al., Findings of EMNLP 2023).

    python research/papers/alignment.py --plan --trex=FOLDER
    python research/papers/alignment.py --trex=FOLDER --comparisons=comparison_data_v2.json
    python research/papers/alignment.py --model=FOLDER --data=FILE --pairs=FILE --pile=FOLDER

alignment.md says what the paper states, what it does not, and what was chosen here.
"""

import functools
import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from research.papers.common import (OWN, AlignConfig, EvalConfig, Run, TrainConfig, claim,
                                    draw_curves, draw_lines, load_config, main, measured, numbers,
                                    own_table, plots, pooled, read_models, selected, size_of,
                                    titles_of)
import metrics
from data.files import read_rows
from data.instruct import PATTERNS, first_turns
from data.preferences import PREFERENCE_PATTERNS
from results.report import predictions
from results.samples import latest_samples
from results.columns import Heading, title_of
from runtime.sources import fetch

# {family: {name: (hub name, weights)}}, and the figure with the curves of each family
FAMILIES = read_models('alignment')
FIGURES = {'figure3_curves': 'Pythia', 'figure8': 'LLaMA', 'figure9': 'LLaMA 2',
           'figure10': 'FLAN-T5', 'figure11': 'OPT'}
STEPS = (256, 512, 2000, 4000, 8000, 16000, 32000, 64000, 128000, 143000)
ALIGNED, (BASE, PARAMS) = 'LLaMA 7B', FAMILIES['LLaMA']['llama-7b']
EPOCHS, PAIRS, SAMPLES = 3, 11_000, 100_000
DATA = {'alpaca': ('tatsu-lab/alpaca', PAIRS * 250),        # and tokens per epoch, estimated
        'oasst1': ('OpenAssistant/oasst1', PAIRS * 250)}
TASKS = {'clm': 'causal language modeling', 'facts': 'facts generation', 'mmlu': 'MMLU'}
EVAL_TOKENS = 1.6e6 + SAMPLES * 550
FULL = TrainConfig(model=BASE, template='alpaca', answers='all', epochs=EPOCHS, batch_size=128,
                   max_length=2048, pack_len=2048, lr=2e-5, warmup=0.03, schedule='cosine',
                   on_bad_row='skip')
LORA = replace(FULL, lora=True, lr=3e-4, warmup=TrainConfig.warmup, warmup_steps=100,
               schedule='linear', train_on_inputs=True, lora_rank=8, lora_alpha=32.0,
               lora_dropout=0.1, lora_targets=('q_proj', 'v_proj'))
REWARD, PPO = (replace(load_config(AlignConfig, [str(
    Path(__file__).parents[2] / 'configs' / f'{name}.py')]), on_bad_row='skip')
    for name in ('reward_llama_7b', 'alignment_ppo'))
DPO = AlignConfig(method='dpo', template='alpaca', epochs=EPOCHS, batch_size=32, lr=5e-6,
                  schedule='cosine', on_bad_row='skip')
# a prompt with all its answers has about 400 tokens, with one of PPO 230, which costs 7 updates
REWARD_TOKENS, PPO_TOKENS = 2 * 52_000 * 400, EPOCHS * 52_002 * 230 * 7


def evaluation(options, **settings):
    """Return the EvalConfig of the tasks; MMLU has fewer questions than `limit`."""
    sources = {'clm': options.pile or 'EleutherAI/pile_val_test', 'facts': options.trex}
    tasks = ('mmlu', *(f'{task}:{source}' for task, source in sources.items() if source))
    return EvalConfig(tasks=tasks, chat='none', shots=5, limit=SAMPLES, max_length=2048,
                      on_bad_row='skip', all_metrics=True, **settings)


def aligned(options):
    """Return (name, (path, weights)) of the model to align."""
    own = own_table(options, 'model', {ALIGNED: (BASE, PARAMS)})
    return next(iter(own.items()))


def tasks_of(options):
    """Return {task: title} of the evaluations."""
    own = titles_of(evaluation(options), TASKS, options)
    return TASKS if own.keys() < TASKS.keys() and not options.model else own


def runs(options):
    root, sizes = options.out_dir, {'eval_tokens': EVAL_TOKENS}
    models = dict(itertools.chain(*(family.items() for family in FAMILIES.values())))
    for name, (hub, params) in own_table(options, 'model', models).items():
        # beside the weights of the largest an H200 has no room for long rows
        cfg = evaluation(options, model=hub, pack_len=4096 if params > 60e9 else None,
                         header='none', out_dir=f'{root}/{name}')
        if name in FAMILIES['FLAN-T5'] and not options.model:
            yield Run(replace(cfg, tasks=('mmlu',)), params, eval_tokens=1.6e6)
        else:
            yield Run(cfg, params, **sizes)
    hub, params = FAMILIES['Pythia']['pythia-1.4b']
    for step in STEPS if not options.model else ():
        yield Run(evaluation(options, model=hub, revision=f'step{step}', header='none',
                             out_dir=f'{root}/pythia-1.4b-step{step}'), params, **sizes)
    yield from alignment_runs(options)


def alignment_runs(options):
    """Yield the Runs of section 6, all of one model."""
    root, (_, (base, params)) = f'{options.out_dir}/aligned', aligned(options)
    report = evaluation(options, instruct=True)
    data = own_table(options, 'data', DATA)

    def evaluated(name, model, waits_for=''):
        return Run(replace(report, model=model, out_dir=f'{root}/{name}'), params,
                   eval_tokens=EVAL_TOKENS, waits_for=waits_for)

    def trained(name, cfg, tokens, *needs):
        """Yield a run and the evaluations of the weights that it keeps of its first epochs."""
        missing = [Path(x).name for x in needs if not Path(x, 'config.json').exists()]
        yield Run(replace(cfg, eval=report, eval_before=False, out_dir=f'{root}/{name}'), params,
                  train_tokens=tokens, eval_tokens=EVAL_TOKENS, waits_for=' and '.join(missing))
        for epoch in range(1, EPOCHS):
            model = f'{root}/{name}/epoch-{epoch}'
            there = Path(model, 'config.json').exists()
            yield evaluated(f'{name}/report-{epoch}', model,
                            '' if there else f'the end of epoch {epoch}')

    yield evaluated('base', base)
    for method, cfg in (('full', FULL), ('lora', LORA)):
        for name, (source, tokens) in data.items():
            limit = PAIRS if name == 'alpaca' and not options.data else None
            if limit and not options.plan and selected(f'{root}/{name}-{method}', options):
                rows = (row for file in fetch(DATA['oasst1'][0], PATTERNS)
                        for row in read_rows(file))
                limit = sum(1 for _ in first_turns(rows, 'all'))    # as many as OASST1 has
            yield from trained(f'{name}-{method}', replace(
                cfg, model=base, data=source, data_limit=limit), EPOCHS * tokens)
    source, _ = next(iter(data.values()))
    tuned, reward = f'{root}/{next(iter(data))}-full', f'{root}/reward'
    if options.comparisons:
        yield Run(replace(REWARD, model=base, data=options.comparisons, out_dir=reward), params,
                  train_tokens=REWARD_TOKENS)
        yield from trained('ppo', replace(PPO, model=tuned, reward=reward, data=source),
                           PPO_TOKENS, tuned, reward)
    if options.pairs:
        tokens = size_of(options.pairs, f'--pairs={options.pairs}', PREFERENCE_PATTERNS)
        yield from trained('dpo', replace(DPO, model=tuned, data=options.pairs), EPOCHS * tokens,
                           tuned)
    for epoch, model in enumerate(filter(None, options.rlhf.split(',')), 1):
        yield evaluated(f'rlhf/report-{epoch}', model)


@functools.cache
def mmlu_samples(folder):
    """Return (Predictions over the letters, log p of each letter among all tokens [N, 4]) of a run;
    (None, None) without samples."""
    path, result = Path(folder, 'samples.jsonl'), measured(folder, 'mmlu')
    if not result or not path.exists():
        return None, None
    with open(path, encoding='utf-8') as file:      # most lines are of the other tasks
        rows = latest_samples([json.loads(line) for line in file if '"task": "mmlu"' in line])
    return predictions(rows, result['norm']), np.array([row['log_probs'] for row in rows])


def unnormalized_ece(folder):
    """Return the ECE of MMLU if the confidence is the top letter's probability among all tokens."""
    predicted, log_probs = mmlu_samples(folder)
    if predicted is None:
        return ''
    correct = log_probs.argmax(1) == predicted.labels
    return f'{metrics.ece(np.exp(log_probs.max(1)).clip(0, 1), correct):.3f}'


def draw_confidences(path, families):
    """Draw figure 7, the distribution of the confidence on MMLU by size."""
    with plots.warn_on_failure(path):
        figure = plots.new_figure(9, 3.4 * len(families))
        for ax, (title, folders) in zip(figure.subplots(len(families), 1, squeeze=False).flat,
                                        families.items(), strict=True):
            shown = [mmlu_samples(folder)[0].probs.max(1) for folder in folders.values()]
            ax.violinplot(shown, widths=0.9, showmedians=True, points=200)
            ax.set(ylim=(0, 1), ylabel='confidence', title=f'{title}, MMLU')
            ax.set_xticks(range(1, len(shown) + 1), list(folders))
        plots.save_figure(figure, path, 150)


def tables(options):
    root, keys, tasks = options.out_dir, ('accuracy', 'ece'), tasks_of(options)
    head = ('model', *(Heading(key, f'{title} {title_of(key)}')
                       for title in tasks.values() for key in keys),
            *[Heading('ece', 'MMLU ECE, unnormalized')] * ('mmlu' in tasks))

    def line(name, folder):
        return (name, *(cell for task in tasks for cell in numbers(pooled(folder, task), keys)),
            *[unnormalized_ece(folder)] * ('mmlu' in tasks))

    def draw(name, points, x_label, metric='ece', **options):
        """Draw the figure `name`; points: {line: [(x, folder of a run)]}."""
        draw_lines(f'{root}/{name}.png', {title: {label: [
            (x, pooled(folder, task)) for x, folder in folders]
            for label, folders in points.items()} for task, title in tasks.items()},
            x_label, metric, **options)

    def draw_all_curves(name, folders):
        """Draw the reliability curves of runs {label: folder}, a panel per task."""
        draw_curves(f'{root}/{name}.png', {title: {
            label: measured(folder, task) for label, folder in folders.items()}
            for task, title in tasks.items()})

    own = own_table(options, 'model', {})
    figures = {'figure3_curves': ', '.join(own)} if own else FIGURES
    families = {title: own or FAMILIES[title] for title in figures.values()}
    yield 'scales', f'Parameter scales{" (figures 3 and 8 to 11)" * (not own)}', [head, *(
        line(name, f'{root}/{name}') for family in families.values() for name in family)]
    draw('figure3', {title: [(params, f'{root}/{name}') for name, (_, params) in family.items()]
                     for title, family in families.items()}, 'weights', log=True)
    for name, title in figures.items():
        draw_all_curves(name, {model: f'{root}/{model}' for model in families[title]})
    scored = {title: {name: f'{root}/{name}' for name in family
                      if mmlu_samples(f'{root}/{name}')[0]} for title, family in families.items()}
    if scored := {title: folders for title, folders in scored.items() if folders}:
        claim(root, 'figure7.png')
        draw_confidences(f'{root}/figure7.png', scored)

    if not own:
        steps = {f'step {step}': f'{root}/pythia-1.4b-step{step}' for step in STEPS}
        yield 'steps', 'Training dynamics of Pythia 1.4B (figure 4)', [head, *(
            line(label, folder) for label, folder in steps.items())]
        draw('figure4', {'Pythia 1.4B': [*zip(STEPS, steps.values(), strict=True)]}, 'step',
             log=True)
        draw_all_curves('figure4_curves', steps)

    data = own_table(options, 'data', DATA)
    settings = {name: {epoch: f'{root}/aligned/{name}' + (
                    f'/report-{epoch}' if epoch < EPOCHS or name == 'rlhf' else '')
                       for epoch in range(1, EPOCHS + 1)}
                for name in (*(f'{x}-{method}' for method in ('full', 'lora') for x in data),
                             *['ppo'] * bool(options.comparisons or not own),
                             *['dpo'] * bool(options.pairs), *['rlhf'] * bool(options.rlhf))}
    title = f'Alignment of {aligned(options)[0]}, with instructions'
    yield 'alignment', f'{title}{" (figures 5 and 12)" * (not own)}', [
        head, line('base', f'{root}/aligned/base'), *(
            line(f'{name}, epoch {epoch}', folder)
            for name, folders in settings.items() for epoch, folder in folders.items())]
    # these begin with the last weights of the model that they are compared with
    before = dict.fromkeys(('ppo', 'dpo', 'rlhf'), f'{root}/aligned/{next(iter(data))}-full')
    points = {name: [(0, before.get(name, f'{root}/aligned/base')), *folders.items()]
              for name, folders in settings.items()}
    for name, metric in (('figure5', 'ece'), ('figure12', 'accuracy')):
        draw(name, points, 'epoch', metric)


if __name__ == '__main__':
    main(runs, tables, **OWN, trex={'help': "folder with T-REx's JSON files, for facts generation"},
         pile={'help': 'hub dataset, folder or file of texts instead of the copy of the Pile'},
         comparisons={'help': 'comparison_data_v2.json of GPT-4-LLM, for the reward model and PPO'},
         pairs={'help': 'file of preferences for DPO of the model tuned with all weights'},
         rlhf={'help': 'folders of checkpoints of another PPO, one per epoch, separated by commas'})
