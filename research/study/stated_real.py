"""Claim 16: stated confidences of a real model, Gemma 3 270M; see PLAN.md.

    python research/study/stated_real.py --model=DATA/model --data=DATA --seeds=0,1,2,3,4

The questions are those of ARC-Easy (DATA/arc) with their options, which the model answers in
writing, with a confidence. `stated` is tuned on the right answers to every other question; the
confidence beside one is the probability that the base model gives it among the options. `conf` is
`stated` after ConfTuner, and GRPO follows from both, on the rest of the questions, since a model is
sure of those whose answers it has learned. Finished runs are skipped.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from world import conversation
from runtime import cli
from research import common
from research.common import read_lines, write_lines
from research.study import alignment
from research.study.alignment import STATED
from research.study.stated_confidence import STARTS, do, write_table

LONGEST = 60    # characters of an option; questions with a longer one are left out
WRITTEN = 500   # questions of the test
# run -> settings of GRPO; the model to start from is its first part
GRPO = {f'{start}-{reward}': {'reward': f'{reward}:qa'}
        for start in STARTS for reward in ('rlcr', 'log_score', 'abstain_stated')} | {
    f'stated-{method}': {'reward': 'rlcr:qa', 'method': method} for method in ('cispo', 'sapo')} | {
    f'stated-{name}': {'reward': 'rlcr:qa', 'correction': name}
    for name in ('answer_mask', 'token_truncate')}
NAMES = *STARTS, *GRPO


def questions(path):
    """Return [(question, options, index of the answer)] of a file of ARC."""
    found = []
    for row in read_lines(Path(path)):
        options = row['choices']['text']
        if max(map(len, options)) <= LONGEST:
            found.append((row['question'], options,
                          row['choices']['label'].index(row['answerKey'])))
    return found


def asked(question, options):
    return '\n- '.join((f'{question}\nOptions:', *options))


def make_files(seed, root, data, model):
    """Write the files that stated_confidence.py reads, and a link to the base model."""
    folder = Path(alignment.seed_folder(seed, root))
    if (folder / 'base').exists():
        return
    train, test = (questions(f'{data}/arc/ARC-Easy-{split}.jsonl') for split in ('train', 'test'))
    told, others = train[::2], train[1::2]

    def file(name, rows):
        write_lines(folder / 'world' / f'{name}.jsonl', rows)

    def classes(lead, ask, questions):
        return [{'prompt': f'Question: {ask(question, options)}\nAnswer:', 'id': f'{i}',
                 'classes': [lead + option for option in options], 'answer_index': answer}
                for i, (question, options, answer) in enumerate(questions)]

    file('plain/test', classes(' ', lambda question, _: question, told))
    file('prompts/test', classes('Answer: ', asked, others))
    base = common.ask(alignment.evaluation(folder, f'{folder}/world/plain', model=model, seed=seed,
                                           chat='none', out_dir=f'{folder}/base-knows'))
    file('stated', [conversation(
        f'Question: {asked(question, options)}\nAnswer:',
        STATED.format(options[answer], f'0.{np.clip(round(10 * base[f"{i}"][1][answer]), 1, 9)}'))
        for i, (question, options, answer) in enumerate(told)])
    file('qa', [{'question': asked(question, options), 'answer': options[answer], 'id': f'{i}'}
                for i, (question, options, answer) in enumerate(test[:WRITTEN])])
    (folder / 'base').symlink_to(Path(model).resolve())


def runs(seed, root):
    """Yield the configs of the starts, and of GRPO."""
    same = {'eval': alignment.stated_evaluation(alignment.seed_folder(seed, root)),
            'attention': 'auto', 'compile': True, 'micro_rows': None, 'pack_len': 2048}
    yield alignment.tuning('stated', seed, root, data='world/stated', lr=5e-5, **same)
    yield alignment.tuning('conf', seed, root, model='stated', data='pairs/graded', lr=2e-5, **same)
    for name, settings in GRPO.items():
        yield alignment.aligning(name, seed, root, data='prompts', **same | {
            'model': name.partition('-')[0], 'method': 'dr_grpo', 'checkpoint_epochs': False,
            'batch_size': 32, 'group_size': 16, 'max_tokens': 48, 'decode_batch': 512,
            'max_length': 512, 'epochs': 1.0, 'lr': 1e-5} | settings)


def main():
    options = common.command_line(
        __doc__, model={'required': True, 'help': 'folder of the base model'},
        data={'required': True, 'help': 'folder of the data'},
        seeds=common.seeds_option((0, 1, 2, 3, 4)), out_dir=common.OUT_DIR)
    root = f'{options.out_dir}/stated-real'
    for seed in options.seeds:
        do(seed, root, lambda seed, root: make_files(seed, root, options.data, options.model), runs)
    write_table(options.seeds, root, NAMES)


if __name__ == '__main__':
    with cli.one_line_errors(resume='finished runs are skipped'):
        main()
