"""Claim 15.4 again: do models learn to state different confidences, and does ConfTuner help?

    python research/study/stated_confidence.py --seeds=10,11,12,13,14
    python research/study/stated_confidence.py --model=DATA/model --data=DATA --seeds=0,1,2,3,4

`stated` is tuned on answers with confidences, `conf` is `stated` after ConfTuner, and GRPO follows
from both. The first command does this in a world whose text states a confidence after answers,
higher for well-known entities. The second one, of claim 16, does it with a real model, Gemma 3
270M, and the questions of ARC-Easy (DATA/arc) with their options: the confidence beside a right
answer is the probability that the base model gives it among them. GRPO has the other half of the
questions, since a model is sure of those whose answers it has learned. Finished runs are skipped.
The numbers of each seed are written to a .csv file in --out_dir, the means over the seeds printed.
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
from runtime.errors import ConfigError
from runtime.ownership import write_text
from research.common import (OUT_DIR, ROOT, SEEDS, ask, command_line, read_lines, seeds_option,
                             write_lines)
from research.study import alignment
from research.study.alignment import STATED, AlignmentSpec, AlignmentWorld
from research.study.claims import Numbers, setting_lines
from research.study.runs import PRETRAINING
from train import SFT, train_and_report

STARTS = 'stated', 'conf'
# run -> settings of GRPO; the model to start from is its first part
GRPO = {f'{start}-{reward}': {'reward': f'{reward}:qa'}
        for start in STARTS for reward in ('rlcr', 'log_score', 'abstain_stated')}
MORE_GRPO = {f'stated-{method}': {'reward': 'rlcr:qa', 'method': method}
             for method in ('cispo', 'sapo')} | {
    f'stated-{name}': {'reward': 'rlcr:qa', 'correction': name}
    for name in ('answer_mask', 'token_truncate')}      # of the real model alone
MEASURES = 'accuracy', 'confidence', 'ece', 'brier_top_label', 'auroc'
LEVELS = tuple(f'0.{digit}' for digit in range(1, 10))      # that `stated` knows
LONGEST = 60    # characters of an option; questions with a longer one are left out
WRITTEN = 500   # questions of the test

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


# In a world

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
    for name, settings in GRPO.items():
        yield alignment.aligning(name, seed, root, data='prompts', **alignment.WHOLE | stated | {
            'method': 'dr_grpo', 'model': name.partition('-')[0],
            'kl': 'loss', 'kl_coef': 0.01, 'group_size': 16, 'max_tokens': 24,
            'lr': 2e-4, 'decode_batch': 1024} | settings)


# Of a real model

def questions(path):
    """Return [(question, options, index of the answer)] of a file of ARC."""
    rows = [(row['question'], row['choices']['text'],
             row['choices']['label'].index(row['answerKey'])) for row in read_lines(Path(path))]
    return [row for row in rows if max(map(len, row[1])) <= LONGEST]


def asked(question, options):
    return '\n- '.join((f'{question}\nOptions:', *options))


def write_real_files(seed, root, data, model):
    """Write the same files as for a world, and a link to the base model."""
    folder = Path(alignment.seed_folder(seed, root))
    if (folder / 'base').exists():
        return
    train, test = (questions(f'{data}/arc/ARC-Easy-{split}.jsonl') for split in ('train', 'test'))
    told, others = train[::2], train[1::2]

    def file(name, rows):
        write_lines(folder / 'world' / f'{name}.jsonl', rows)

    def classes(lead, wording, questions):
        return [{'prompt': f'Question: {wording(question, options)}\nAnswer:', 'id': f'{i}',
                 'classes': [lead + option for option in options], 'answer_index': answer}
                for i, (question, options, answer) in enumerate(questions)]

    file('plain/test', classes(' ', lambda question, _: question, told))
    file('prompts/test', classes('Answer: ', asked, others))
    base = ask(alignment.evaluation(folder, f'{folder}/world/plain', model=model, seed=seed,
                                    chat='none', out_dir=f'{folder}/base-knows'))
    file('stated', [conversation(
        f'Question: {asked(question, options)}\nAnswer:',
        STATED.format(options[answer], f'0.{np.clip(round(10 * base[f"{i}"][1][answer]), 1, 9)}'))
        for i, (question, options, answer) in enumerate(told)])
    file('qa', [{'question': asked(question, options), 'answer': options[answer], 'id': f'{i}'}
                for i, (question, options, answer) in enumerate(test[:WRITTEN])])
    (folder / 'base').symlink_to(Path(model).resolve())


def real_runs(seed, root):
    """Yield the configs of the starts, and of GRPO."""
    same = {'eval': alignment.stated_evaluation(alignment.seed_folder(seed, root)),
            'attention': 'auto', 'compile': True, 'micro_rows': None, 'pack_len': 2048}
    yield alignment.tuning('stated', seed, root, data='world/stated', lr=5e-5, **same)
    yield alignment.tuning('conf', seed, root, model='stated', data='pairs/graded', lr=2e-5, **same)
    for name, settings in (GRPO | MORE_GRPO).items():
        yield alignment.aligning(name, seed, root, data='prompts', **same | {
            'model': name.partition('-')[0], 'method': 'dr_grpo', 'checkpoint_epochs': False,
            'batch_size': 32, 'group_size': 16, 'max_tokens': 48, 'decode_batch': 512,
            'max_length': 512, 'epochs': 1.0, 'lr': 1e-5} | settings)


# Both

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
    options = command_line(
        __doc__, model={'help': 'folder of a real base model'},
        data={'help': 'folder of its data'},
        seeds=seeds_option(None, '10 to 14, of a real model 0 to 4'), out_dir=OUT_DIR)
    if bool(options.model) != bool(options.data):
        raise ConfigError('--model and --data go together; set both or none')
    real, write = bool(options.model), write_files
    if real:
        write = functools.partial(write_real_files, data=options.data, model=options.model)
    # beside the worlds of alignment.py
    root = f'{options.out_dir}/{"stated-real" if real else "stated-confidence"}'
    seeds = options.seeds or (SEEDS if real else alignment.SEEDS)
    for seed in seeds:
        do(seed, root, write, real_runs if real else runs)
    write_table(seeds, root, [*STARTS, *GRPO, *(MORE_GRPO if real else ())])


if __name__ == '__main__':
    with cli.one_line_errors(resume='finished runs are skipped'):
        main()
