"""Trained on Tokens, Calibrated on Concepts (arXiv 2511.04869): are written answers calibrated?

    python research/papers/semantic_calibration.py --plan

semantic_calibration.md says what the paper states, what it does not, and what was chosen here.
"""

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from research.papers.common import (EvalConfig, Run, counted, draw_curves, main, measured,
                                    read_models)
from results.columns import Heading

# {model: {stage: (hub name, weights)}}; Mistral-7B has one model after supervised tuning, then DPO
MODELS = read_models('semantic_calibration')
TASKS = {'triviaqa': 'TriviaQA, short', 'gsm8k_short': 'GSM8K, short',
         'gsm8k': 'GSM8K, chain of thought'}
QUESTIONS, SAMPLES = 1319, 40
# drawn tokens, of 8, 4 and 150 per answer; decoding takes about twice the time of scoring
EVAL_TOKENS = 2 * QUESTIONS * (SAMPLES + 1) * (8 + 4 + 150)
REPORT = EvalConfig(tasks=tuple(TASKS), chat='none', shots=5, n=SAMPLES, limit=QUESTIONS,
                    on_bad_row='skip')
METRICS = 'accuracy', 'confidence', 'gap', 'smooth_ece', 'ece'


def runs(options):
    for model, stages in MODELS.items():
        for stage, (hub, params) in stages.items():
            yield Run(replace(REPORT, model=hub, out_dir=f'{options.out_dir}/{model}/{stage}'),
                      params, eval_tokens=EVAL_TOKENS)


def tables(options):
    results = {(task, model, stage): measured(f'{options.out_dir}/{model}/{stage}',
                                              f'{task}.agreement')
               for task in TASKS for model, stages in MODELS.items() for stage in stages}
    yield 'calibration', f'The share of the largest class among {SAMPLES} samples', [
        ['task', 'model', 'stage', 'questions', *map(Heading, METRICS), 'floor of ECE'],
        *([TASKS[task], model, stage, *counted(result['pooled'], METRICS),
           f'{result["ece_floor"]:.3f}']
          for (task, model, stage), result in results.items() if result)]
    # the base models of each task above the tuned ones
    draw_curves(f'{options.out_dir}/reliability.png', {f'{title}: {kind} models': {
        f'{model}, {stage}': result for (of, model, stage), result in results.items()
        if of == task and (stage == 'base') == (kind == 'base')}
        for kind in ('base', 'tuned') for task, title in TASKS.items()})


if __name__ == '__main__':
    main(runs, tables)
