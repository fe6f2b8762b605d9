"""Claim 15.4 again: do models learn to state different confidences, and does ConfTuner help?

    python research/study/stated_confidence.py --seeds=10,11,12,13,14

In a world whose text states a confidence after answers, higher for well-known entities: `stated`
is tuned on such conversations, `conf` is `stated` after ConfTuner, and GRPO follows from both with
each of REWARDS. Finished runs are skipped. At the end, the numbers of each seed are written to
ROOT/stated-confidence.csv, and the means over the seeds with Student's intervals are printed.
"""

import functools
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from alignment.objectives import confidence_levels, tokenized_brier
from data.tokenizer import load_model_tokenizer
from world import conversation, write_world
from results.samples import read_results
from results.tables import csv_text, markdown
from runtime import checkpoint, cli
from runtime.ownership import write_text
from research.common import OUT_DIR, ROOT, command_line, read_lines, seeds_option, write_lines
from research.study import alignment
from research.study.alignment import STATED, AlignmentSpec, AlignmentWorld
from research.study.claims import Numbers, setting_lines
from research.study.runs import PRETRAINING
from train import SFT, train_and_report

STARTS = 'stated', 'conf'
REWARDS = 'rlcr', 'log_score', 'abstain_stated'
NAMES = *STARTS, *(f'{start}-{reward}' for start in STARTS for reward in REWARDS)
MEASURES = 'accuracy', 'confidence', 'ece', 'brier_top_label', 'auroc'
LEVELS = tuple(f'0.{digit}' for digit in range(1, 10))      # that `stated` knows

# few entities, with first names of their own, so that a small model knows some facts well and
# others not at all: if all are equally hard, one confidence is right
WORLD = AlignmentSpec(
    entities=2_000, zipf=1.0, first_names=1_000, family_names=2, documents=20_000, list_share=0.3,
    exam_share=0.2, vocab_sizes=(2_560,), tokenizer_documents=3_000, instructions=700, judged=10,
    prompts=2_048, questions=500, validation=100)


class StatedWorld(AlignmentWorld):
    """An AlignmentWorld whose text has answers with confidences, where that has verdicts.

    A format that no text has costs the model what it knows: in that of the first runs of this
    script it answered with the most frequent value.
    """

    def confidence(self, entity, rng):
        """It falls with the logarithm of the rank, from 0.9 to 0.1, with noise of up to 0.1."""
        known = 1 - np.log(entity + 1) / np.log(len(self.names))
        return f'0.{np.clip(round(1 + 8 * known) + rng.integers(-1, 2), 1, 9)}'

    def judged(self, entity, attribute, rng, lead=''):
        return self.asked(entity, attribute), STATED.format(
            self.value(entity, attribute), self.confidence(entity, rng))


def prepare(seed, root=ROOT):
    """Write pairs/prompts.jsonl, for GRPO, and graded.jsonl: the answers of `stated`, graded.

    An answer is the option that `stated` finds most probable; the confidence, 0.9 or 0.1, says
    whether it is right, which is what `tokenized_brier` reads.
    """
    folder = Path(alignment.seed_folder(seed, root))
    questions, answers = alignment.answers_of('stated', seed, root, lead='<answer>')
    graded, prompts = [], []
    for row in questions:
        options, p, answer = answers[row['id']]
        values = [option.strip().removeprefix('<answer>').strip() for option in options]
        best = p.argmax()
        graded.append(conversation(row['prompt'], STATED.format(
            values[best], LEVELS[-1 if best == answer else 0])))
        prompts.append({'prompt': row['prompt'], 'question': row['prompt'],
                        'answer': values[answer]})
    write_lines(folder / 'pairs' / 'prompts.jsonl', prompts)
    write_lines(folder / 'pairs' / 'graded.jsonl', graded)      # the last one


def write_files(seed, root=ROOT):
    write_world(f'{alignment.seed_folder(seed, root)}/world', seed, WORLD,
                functools.partial(alignment.make_rows, kind=StatedWorld))


def runs(seed, root=ROOT):
    """Yield the configs of the base model, of the starts, and of GRPO with each reward."""
    folder = alignment.seed_folder(seed, root)
    stated = {'eval': alignment.stated_evaluation(folder)}
    yield alignment.tuning('base', seed, root, model='world/model', data='world/text', epochs=1.0,
                           batch_size=16, lr=4e-3, pack_len=224, max_length=224, **PRETRAINING,
                           eval=alignment.evaluation(folder, '{}/plain', chat='none'))
    yield alignment.tuning('stated', seed, root, data='world/stated', lr=1e-3, **stated)
    yield alignment.tuning('conf', seed, root, model='stated', data='pairs/graded', lr=3e-4,
                           **stated)
    for name in NAMES[len(STARTS):]:
        start, _, reward = name.partition('-')
        yield alignment.aligning(name, seed, root, data='prompts', **alignment.WHOLE | stated | {
            'method': 'dr_grpo', 'reward': f'{reward}:qa', 'model': start,
            'kl': 'loss', 'kl_coef': 0.01, 'group_size': 16, 'max_tokens': 24,
            'lr': 2e-4, 'decode_batch': 1024})


def do(seed, root=ROOT, write=write_files, runs=runs):
    """Do all runs of a seed that are not finished."""
    folder = Path(alignment.seed_folder(seed, root))
    write(seed, root)
    for cfg in runs(seed, root):
        name = Path(cfg.out_dir).name
        if Path(cfg.out_dir, 'results.json').exists():
            continue
        if name != 'conf':
            alignment.fit(cfg)
            continue
        if not (folder / 'pairs' / 'graded.jsonl').exists():
            prepare(seed, root)
        tokenizer = load_model_tokenizer(cfg.model, checkpoint.read_config(cfg.model))
        objective = tokenized_brier(confidence_levels(tokenizer, LEVELS), text=1.0)
        train_and_report(replace(cfg, resume=True), replace(SFT, objective=objective))


def measured(folder):
    """Return {column: number} of a model, without those of MEASURES if it states nothing."""
    tasks = read_results(folder / 'results.json', 'run this script again')['tasks']
    result = tasks.get('qa.stated', {'pooled': {}, 'unparsed': np.nan})
    stated = {row['confidence'] for row in read_lines(folder / 'samples.jsonl')
              if row['task'] == 'qa.stated'}
    return {key: f'{result["pooled"][key]:.3f}' for key in MEASURES if key in result['pooled']} | {
        'different_confidences': len(stated), 'unparsed': f'{result["unparsed"]:.3f}'}


def write_table(seeds, root, names):
    """Write the numbers of each seed's models to <root>.csv; print the means over the seeds."""
    rows = [{'seed': seed, 'model': name} | measured(Path(alignment.seed_folder(seed, root), name))
            for seed in seeds for name in names]
    write_text(Path(f'{root}.csv'), csv_text(rows))
    columns = *MEASURES, 'different_confidences', 'unparsed'
    print(markdown([('model', *columns), *setting_lines(
        Numbers([row | {'run': row['model']} for row in rows], {}), names,
        [(key, {}) for key in columns])]))


def main():
    options = command_line(__doc__, seeds=seeds_option(alignment.SEEDS), root=OUT_DIR)
    root = f'{options.root}/stated-confidence'      # not among the worlds of alignment.py
    for seed in options.seeds:
        do(seed, root)
    write_table(options.seeds, root, NAMES)


if __name__ == '__main__':
    with cli.one_line_errors(resume='finished runs are skipped'):
        main()
