"""Calibration and Correctness of Language Models for Code (Spiess et al., ICSE 2025).

    python research/papers/code_calibration.py --plan

It runs the programs that the models write: read docs/running_code.md first.

code_calibration.md says what the paper states, what it does not, and what was chosen here.
"""

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from research.papers.common import (EvalConfig, Run, counted, draw_curves, main, measured, pooled,
                                    read_models)
from results.columns import Heading

MODELS = read_models('code_calibration')['']
# entry of the results: name in the paper, or a description
CONFIDENCES = {'humaneval.mean_token': 'p_avg', 'humaneval': 'p_tot',
               'humaneval.p_true': 'True or False', 'humaneval.verbalized_2s': 'verbalized',
               'humaneval.agreement': 'share of the largest class (not in the paper)'}
METRICS = 'accuracy', 'confidence', 'ece', 'brier_top_label', 'brier_skill', 'auroc'
SAMPLES = 5
EVAL_TOKENS = 2 * 164 * (SAMPLES + 1) * 250     # decoding takes about twice the time of scoring
REPORT = EvalConfig(tasks=('humaneval',), chat='none', shots=0, n=SAMPLES, p_true=True,
                    verbalized=True, run_code=True, on_bad_row='skip')


def runs(options):
    for model, (hub, params) in MODELS.items():
        yield Run(replace(REPORT, model=hub, out_dir=f'{options.out_dir}/{model}'), params,
                  eval_tokens=EVAL_TOKENS)


def tables(options):
    lines = [['model', 'measure', 'scaling', 'problems', *map(Heading, METRICS)]]
    for model in MODELS:
        for entry, title in CONFIDENCES.items():
            for scaling, key in (('none', ''), ('Platt', 'platt')):
                if report := pooled(f'{options.out_dir}/{model}', entry, key):
                    lines.append([model, title, scaling, *counted(report, METRICS)])
    yield 'calibration', 'Confidence in written programs', lines
    draw_curves(f'{options.out_dir}/reliability.png', {model: {
        title: measured(f'{options.out_dir}/{model}', entry)
        for entry, title in CONFIDENCES.items()} for model in MODELS}, columns=2)


if __name__ == '__main__':
    main(runs, tables)
