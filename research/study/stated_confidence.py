"""Claim 15.4 again: which reward makes a stated confidence right, and does ConfTuner help to start?

    python research/study/stated_confidence.py --seeds=10,11,12,13,14

In the worlds of alignment.py, with a model that states random confidences (`stated`) or the same
after ConfTuner (`conf`): GRPO with each of REWARDS. Finished runs are skipped. At the end, a table
with the means over the seeds and Student's intervals is printed and written to
ROOT/stated-confidence.csv.
"""

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from alignment.objectives import confidence_levels, tokenized_brier
from data.tokenizer import load_model_tokenizer
from data.world import conversation
from results.over_seeds import plus_minus
from results.samples import read_results
from results.tables import csv_text, markdown
from runtime import checkpoint, cli
from runtime.ownership import write_text
from research.study import alignment, common
from research.study.common import ROOT, read_lines, write_lines
from train import SFT, train

STARTS = 'stated', 'conf'
REWARDS = 'rlcr', 'log_score', 'abstain_stated'
NAMES = *STARTS, *(f'{start}-{reward}' for start in STARTS for reward in REWARDS)
MEASURES = 'accuracy', 'confidence', 'ece', 'brier_top_label', 'auroc'
LEVELS = tuple(f'0.{digit}' for digit in range(1, 10))      # that `stated` knows


def prepare(seed, root=ROOT):
    """Write pairs/prompts.jsonl, for GRPO, and graded.jsonl: drawn answers with 0.9 or 0.1.

    An answer is drawn from the probabilities that `stated` gives to the options of a question; the
    confidence says whether it is right, which is what `tokenized_brier` reads.
    """
    folder = Path(alignment.seed_folder(seed, root))
    questions = read_lines(folder / 'world' / 'prompts' / 'test.jsonl')
    asked = [row | {'classes': [option.replace('Answer:', '<answer>', 1)
                                for option in row['classes']]} for row in questions]
    for name in ('in-stated', 'pairs'):
        (folder / name).mkdir(exist_ok=True)
    write_lines(folder / 'in-stated' / 'test.jsonl', asked)
    answers = common.ask(alignment.evaluation(
        folder, f'{folder}/in-stated', model=f'{folder}/stated', seed=seed,
        out_dir=f'{folder}/stated-knows'))
    rng, graded, prompts = np.random.default_rng([seed, 6]), [], []
    for row in asked:
        options, p, answer = answers[row['id']]
        k = rng.choice(len(p), p=p / p.sum())
        text = options[k].strip().removeprefix('<answer>').strip()
        graded.append(conversation(row['prompt'], alignment.STATED.format(
            text, LEVELS[-1 if k == answer else 0])))
        prompts.append({'prompt': row['prompt'], 'question': row['prompt'],
                        'answer': options[answer].strip().removeprefix('<answer>').strip()})
    write_lines(folder / 'pairs' / 'prompts.jsonl', prompts)
    write_lines(folder / 'pairs' / 'graded.jsonl', graded)      # the last one


def runs(seed, root=ROOT):
    """Yield the configs of ConfTuner, then of GRPO from each start with each reward."""
    stated = {'eval': alignment.stated_evaluation(alignment.seed_folder(seed, root))}
    yield alignment.tuning('conf', seed, root, model='stated', data='pairs/graded', lr=2e-4,
                           **stated)
    for name in NAMES[len(STARTS):]:
        start, _, reward = name.partition('-')
        yield alignment.aligning(name, seed, root, data='prompts', **alignment.WHOLE | stated | {
            'method': 'grpo', 'reward': f'{reward}:qa', 'model': start,
            'kl': 'loss', 'kl_coef': 0.01, 'group_size': 16, 'max_tokens': 48,
            'lr': 2e-4, 'decode_batch': 1024})


def do(seed, root=ROOT):
    """Do all runs of a seed that are not finished."""
    folder = Path(alignment.seed_folder(seed, root))
    alignment.world(seed, root)
    for cfg in (*alignment.base_runs(seed, root), *runs(seed, root)):
        name = Path(cfg.out_dir).name
        if name not in ('base', *NAMES) or Path(cfg.out_dir, 'results.json').exists():
            continue
        if name != 'conf':
            alignment.fit(cfg)
            continue
        if not (folder / 'pairs' / 'graded.jsonl').exists():
            prepare(seed, root)
        tokenizer = load_model_tokenizer(cfg.model, checkpoint.read_config(cfg.model))
        objective = tokenized_brier(confidence_levels(tokenizer, LEVELS))
        train(replace(cfg, resume=True), replace(SFT, objective=objective))


def table(seeds, root=ROOT):
    """Return the cells of the table: means over the seeds of the stated confidence, and intervals.
    """
    lines = [['model', *MEASURES, 'different confidences', 'unparsed']]
    for name in NAMES:
        rows = [measured(Path(alignment.seed_folder(seed, root), name)) for seed in seeds]
        lines.append([name, *(plus_minus(values, '.3f') if np.isfinite(values).all() else 'nan'
                              for values in zip(*rows, strict=True))])
    return lines


def measured(folder):
    """Return the numbers of a model for the columns of the table, nan if it states nothing."""
    tasks = read_results(folder / 'results.json', 'run this script again')['tasks']
    result = tasks.get('qa.stated', {'pooled': {}, 'unparsed': np.nan})
    stated = {row['confidence'] for row in read_lines(folder / 'samples.jsonl')
              if row['task'] == 'qa.stated'}
    return [*(result['pooled'].get(key, np.nan) for key in MEASURES), len(stated),
            result['unparsed']]


def main():
    options = common.options(__doc__, seeds=common.seeds_option(alignment.SEEDS),
                             root=common.OUT_DIR)
    for seed in options.seeds:
        do(seed, options.root)
    lines = table(options.seeds, options.root)
    print(markdown(lines))
    write_text(Path(options.root, 'stated-confidence.csv'), csv_text(
        [dict(zip(lines[0], line, strict=True)) for line in lines[1:]]))


if __name__ == '__main__':
    with cli.one_line_errors(resume='finished runs are skipped'):
        main()
