"""Calibrated Language Models and How to Find Them with Label Smoothing (Huang et al., ICML 2025).

    python research/papers/label_smoothing.py --plan
    python research/papers/label_smoothing.py --model=FOLDER --data=FILE --rates=all

label_smoothing.md says what the paper states, what it does not, and what was chosen here.
"""

import itertools
import re
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from research.common import read_csv
from research.papers.common import (COLUMNS, OWN, EvalConfig, Run, TrainConfig, changed_report,
                                    draw_lines, held_out, main, numbers, own_table, paper_column,
                                    pooled, read_models, read_report, sweep, titles_of)
from results.columns import Heading
from runtime.checkpoint import fetch
from runtime.config_json import read_config
from runtime.errors import DataError

MODELS = read_models('label_smoothing')['']
# name: hub name, tokens per epoch (estimated from the size of the text)
DATA = {'Alpaca': ('tatsu-lab/alpaca', 6e6),
        'OpenHermes': ('teknium/OpenHermes-2.5', 430e6),
        'Tulu3': ('allenai/tulu-3-sft-mixture', 690e6)}
RATES = (5e-6, 2e-5, 5e-5, 2e-4)
SMOOTHINGS = (0.1, 0.2, 0.3, 0.4, 0.5)
TASKS = {'mmlu': 'MMLU', 'hellaswag': 'HellaSwag', 'arc_easy': 'ARC-Easy'}
TITLES = TASKS | {'arc_challenge': 'ARC-Challenge'}     # also of --eval.tasks
EPOCHS, CAP = 2, 30.0
EVAL_TOKENS = 1.6e6 + 1.1e6 + 0.2e6     # of the three tasks, counted with Llama 3's tokenizer
REPORT = EvalConfig(tasks=tuple(TASKS), chat='none', shots=5, scoring='letters', all_metrics=True,
                    fit_temperature=True, on_bad_row='skip')
PRINTED_FILE = Path(__file__).with_name('label_smoothing_printed.csv')
# our metrics: their columns in that file
PRINTED = {'accuracy': 'accuracy', 'ece': 'ece', 'rms_mmlu_repo': 'rms', 'rmsce': ''}
TUNING = TrainConfig(template='tulu', loss_reduction='sequence', epochs=EPOCHS,
                     warmup=0.03, val_size=1000, max_length=4096, checkpoint_epochs=False,
                     on_bad_row='skip', eval=REPORT, eval_before=False)

# of --tuning; lora is that of open-instruct at its defaults
TUNINGS = {'lora': {'lora': True, 'lora_rank': 64, 'lora_alpha': 16.0, 'lora_dropout': 0.1,
                    'lora_targets': ('q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj',
                                     'up_proj', 'down_proj')},
           'full': {}}
TUNING_OPTION = {'choices': [*TUNINGS], 'default': 'lora',
                 'help': 'train adapters, or all weights; default: %(default)s'}
RATES_OPTION = {'choices': ['best', 'all'], 'default': 'best', 'help':
                'smooth at the best learning rate, or at each of them; default: %(default)s'}


def datasets(options):
    """Return {folder of the runs and row of the table: (source, tokens, learning rates)}."""
    data = own_table(options, 'data', DATA)
    if options.rates == 'best':
        return {name: (*entry, RATES) for name, entry in data.items()}
    return {f'{name}-lr{lr:g}': (*entry, (lr,)) for name, entry in data.items() for lr in RATES}


def has_cap(hub):
    """Return whether the logits of a model have a cap already."""
    return 'gemma-2-' in hub or (
        Path(hub).is_dir() and read_config(fetch(hub)).final_logit_softcapping is not None)


def runs(options):
    for model, (hub, params) in own_table(options, 'model', MODELS).items():
        yield Run(replace(REPORT, model=hub, out_dir=f'{options.out_dir}/{model}/base'), params,
                  eval_tokens=EVAL_TOKENS)
        for data, (source, tokens, rates) in datasets(options).items():
            folder = f'{options.out_dir}/{model}/{data}'
            cfg = replace(TUNING, model=hub, data=source, **TUNINGS[options.tuning])
            sizes = {'params': params, 'train_tokens': EPOCHS * tokens, 'eval_tokens': EVAL_TOKENS}
            for run in sweep(folder, rates, SMOOTHINGS, cfg, **sizes):
                yield run
            if not has_cap(hub):        # run.cfg.lr is the chosen rate
                yield replace(run, cfg=replace(run.cfg, smoothing=0.0, logit_softcap=CAP,
                                               out_dir=f'{folder}/cap{CAP:g}'))


def methods(folder, tasks=TASKS):
    """Yield (row of the table, {task: report}) of the runs of one model on one dataset; 'held_out'
    is of the next tokens of the held-out conversations."""
    def reports(name, scaling=''):
        return {task: pooled(f'{folder}/{name}', task, scaling) for task in tasks}

    chosen = Path(read_report(f'{folder}/smoothing0')[0]).name      # of the learning rates
    yield 'smoothing 0', reports('smoothing0') | {
        'held_out': chosen and held_out(f'{folder}/{chosen}') or {}}
    for key in ('temperature', 'platt'):
        yield f'{key} scaling', reports('smoothing0', key)
    for title in (f'cap {CAP:g}', *(f'smoothing {s:g}' for s in SMOOTHINGS)):
        name = title.replace(' ', '')
        yield title, reports(name) | {'held_out': held_out(f'{folder}/{name}') or {}}


def printed_numbers(path=PRINTED_FILE):
    """Return {(benchmark, model, data, method): {our metric: number}}; raises DataError."""
    settings = {('', 'base'), *itertools.product(DATA, (method for method, _ in methods('')))}
    numbers = {}
    for line, row in enumerate(read_csv(path), 2):
        benchmark, model, data, method = key = tuple(
            row[name] for name in ('benchmark', 'model', 'data', 'method'))
        if benchmark not in TASKS or model not in MODELS or (data, method) not in settings:
            raise DataError(f'{path}:{line}: the tables have no row {", ".join(key)}')
        numbers[key] = {}
        for ours, theirs in PRINTED.items():
            if theirs and row[theirs]:
                if not re.fullmatch(r'0?\.\d+|[01](\.0*)?', row[theirs]):
                    raise DataError(f'{path}:{line}: {theirs} must be a number from 0 to 1, not '
                                    f'{row[theirs]!r}')
                numbers[key][ours] = float(row[theirs])
    return numbers


def tables(options):
    tasks, printed = titles_of(REPORT, TITLES, options), printed_numbers()
    models, data_names = own_table(options, 'model', MODELS), datasets(options)
    if options.model or options.data:
        printed = {}        # they are of other models
    shown = {(task, key) for (task, *_), row in printed.items() for key in row}
    columns = [*((task, key) for task in tasks for key in PRINTED),
               ('held_out', 'nll'), ('held_out', 'ece')]

    def line(model, data, method, reports):
        cells = [', '.join(filter(None, (model, data))), method]
        for task, key in columns:
            cells += numbers(reports.get(task, {}), [key])
            if (task, key) in shown:
                cells += numbers(printed.get((task, model, data, method), {}), [key])
        return cells

    head = ['model, data', 'method']
    for task, key in columns:
        title = f'{(tasks | {"held_out": "held-out"})[task]} {COLUMNS[key]}'
        head += [Heading(key, title), *[paper_column(title, options)] * ((task, key) in shown)]
    lines = [head]
    for model in models:
        base = f'{options.out_dir}/{model}/base'
        lines.append(line(model, '', 'base', {task: pooled(base, task) for task in tasks}))
        for data in data_names:
            lines += [line(model, data, method, reports)
                      for method, reports in methods(f'{options.out_dir}/{model}/{data}', tasks)
                      if any(reports.values())
                      or any((task, model, data, method) in printed for task in tasks)]
    shots = changed_report(REPORT, options).shots
    yield 'smoothing', f'Accuracy and calibration by smoothing, at {shots} shots', lines
    for task, title in tasks.items():
        draw_lines(f'{options.out_dir}/{task}.png', {
            f'{model}, {title}': {data: [
                (s, pooled(f'{options.out_dir}/{model}/{data}/smoothing{s:g}', task))
                for s in (0, *SMOOTHINGS)] for data in data_names}
            for model in models}, 'smoothing')


if __name__ == '__main__':
    main(runs, tables, **OWN, rates=RATES_OPTION, tuning=TUNING_OPTION)
