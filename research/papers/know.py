"""Language Models (Mostly) Know What They Know (Kadavath et al. 2022, arXiv 2207.05221).

    python research/papers/know.py --plan

know.md says what the paper states, what it does not, and what was chosen here.
"""

import itertools
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from research.papers.common import (EvalConfig, Run, TrainConfig, counted, draw_curves, main,
                                    measured, paper_column, pooled, read_models)
from results.columns import Heading

MODELS = read_models('know')['']
TASKS = {'triviaqa': 'TriviaQA', 'gsm8k': 'GSM8K'}
CONFIDENCES = {'': 'probability of the answer', '.agreement': 'share of the largest class',
               '.p_true': 'P(True)', '.p_true_samples': 'P(True), samples shown'}
# AUROC and Brier score of the paper's largest model, tuned on TriviaQA
PRINTED = {('triviaqa', 'tuned on TriviaQA'): ('0.864', '0.151'),
           ('gsm8k', 'tuned on TriviaQA'): ('0.624', '0.200')}
ASKED = {'asked, not tuned': 'tuned/before', 'tuned on TriviaQA': 'tuned'}     # P(IK): its folder
QUESTIONS, TRAINING_QUESTIONS, SAMPLES, SHOTS = 2000, 10_000, 30, 10
# decoding takes about twice the time of scoring; answers have 8 tokens, or 150 in GSM8K
EVAL_TOKENS = 2 * (SAMPLES + 1) * (QUESTIONS * 8 + 1319 * 150) + 3 * (QUESTIONS + 1319) * 300
WRITE_TOKENS = 2 * (SAMPLES + 1) * TRAINING_QUESTIONS * 8
TEST = EvalConfig(tasks=tuple(TASKS), chat='none', shots=SHOTS, n=SAMPLES, limit=QUESTIONS,
                  p_true=True, p_ik=True, on_bad_row='skip')
ANSWERS = EvalConfig(tasks=('triviaqa_train',), chat='none', shots=SHOTS, n=SAMPLES,
                     limit=TRAINING_QUESTIONS, on_bad_row='skip')
TUNE = TrainConfig(data_kind='questions', epochs=1, batch_size=256, lr=1e-5, max_length=512,
                   on_bad_row='skip')


def runs(options):
    for name, (hub, params) in MODELS.items():
        folder = f'{options.out_dir}/{name}'
        yield Run(replace(TEST, model=hub, out_dir=f'{folder}/test'), params,
                  eval_tokens=EVAL_TOKENS)
        yield Run(replace(ANSWERS, model=hub, out_dir=f'{folder}/answers'), params,
                  eval_tokens=WRITE_TOKENS)
        report = EvalConfig(tasks=(f'p_ik:{folder}/test',), chat='none', shots=0, on_bad_row='skip')
        written = all(Path(folder, part, 'results.json').exists() for part in ('test', 'answers'))
        yield Run(replace(TUNE, model=hub, data=f'p_ik:{folder}/answers', eval=report,
                          out_dir=f'{folder}/tuned'), params,
                  train_tokens=TRAINING_QUESTIONS * SAMPLES * 40,
                  eval_tokens=2 * (QUESTIONS + 1319) * 60,
                  waits_for='' if written else 'the answers to tune on and to ask about')


def p_ik(folder, task):
    """Return {method: report} of P(IK) of the answers to a task; {} for one that is not there."""
    asked = {method: measured(f'{folder}/{report}', 'p_ik').get('categories', {}).get(task, {})
             for method, report in ASKED.items()}
    return {'probe': pooled(f'{folder}/test', f'{task}.p_ik')} | asked


def tables(options):
    keys = 'accuracy', 'confidence', 'ece', 'auroc', 'brier_top_label'
    head = ('questions', *map(Heading, keys))
    p_true, panels = [['model', 'task', 'confidence', *head]], {}
    lines = [['model', 'task', 'P(IK)', *head, *(
        paper_column(f'{heading}, 52B', options) for heading in ('AUROC', 'Brier'))]]
    for name, (task, title) in itertools.product(MODELS, TASKS.items()):
        folder = f'{options.out_dir}/{name}'
        entries = {label: measured(f'{folder}/test', f'{task}{entry}')
                   for entry, label in CONFIDENCES.items()}
        panels[f'{name}, {title}'] = entries | {
            'P(IK), probe': measured(f'{folder}/test', f'{task}.p_ik')}
        p_true += [[name, title, label, *counted(entry['pooled'], keys)]
                   for label, entry in entries.items() if entry]
        lines += [[name, title, method, *counted(report, keys),
                   *PRINTED.get((task, method), ('', ''))]
                  for method, report in p_ik(folder, task).items() if report]
    yield 'p_true', 'P(True) and other confidences in the answer', p_true
    draw_curves(f'{options.out_dir}/reliability.png', panels, columns=4)
    yield 'p_ik', 'P(IK): will a drawn answer be right?', lines
    draw_curves(f'{options.out_dir}/p_ik.png', {name: {
        method: measured(f'{options.out_dir}/{name}/{report}', 'p_ik')
        for method, report in ASKED.items()} for name in MODELS}, columns=2)


if __name__ == '__main__':
    main(runs, tables)
