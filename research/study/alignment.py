"""Claims 13 and 14: alignment by DPO, PPO and GRPO, and confidence in written answers; see PLAN.md.

    python research/study/side_by_side.py --study=alignment --seeds=10,11,12,13,14 --processes=24

An alignment world has one language. Its text holds lists of solved questions, and lists of proposed
answers with a verdict, from which P(True) is learned. All questions ask for the value of an
attribute, so the 24 values are the options: the probabilities of all answers are known exactly.

Version 0.2.0 ran three more arms of question 1, PPO with faults of early releases of TRL: ppo-lost,
ppo-response and ppo-both. Their settings are gone, their results stay.
"""

import itertools
import json
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch

from align import AlignConfig, align
from data.prompts import P_TRUE
from world import ATTRIBUTES, ENGLISH, choice, conversation, log_uniform_facts, write_world
from evaluate import EvalConfig, run
from compare.over_seeds import predictions_by_group
from compare.runs import read_run
from runtime.errors import ConfigError
from runtime.ownership import write_text
from research import common
from research.common import read_lines, write_lines
from research.study.claims import Source
from research.study.runs import FILE, PRETRAINING, base_model
from research.study.world import StudySpec, StudyWorld
from train import TrainConfig, train_and_report

SEEDS = (10, 11, 12, 13, 14)
STATED = '<answer> {}</answer><confidence>{}</confidence>'
STEPS = 96      # three epochs of 2,048 prompts, 64 per step


@dataclass(frozen=True)
class AlignmentSpec(StudySpec):
    """A StudySpec in which exam_share is the share of documents with proposed answers."""
    judged: int = 1_000         # conversations about proposed answers, besides `instructions`
    prompts: int = 2_048        # facts to align on
    written: int = 500          # of the questions are also answered in writing


WORLD = AlignmentSpec(**FILE['worlds']['alignment'])


class AlignmentWorld(StudyWorld):
    """A StudyWorld whose questions are asked as the task `qa` of evaluate.py asks them."""

    def document(self, rng, entities):
        kind, spec = rng.random(), self.spec
        if kind >= spec.list_share + spec.exam_share:
            return ' '.join(self.sentence(entity, rng, ENGLISH) for entity in entities)
        attribute = choice(ATTRIBUTES, rng)
        if kind < spec.list_share:
            solved = [(self.asked(entity, attribute), self.value(entity, attribute))
                      for entity in entities]
        else:
            solved = [self.judged(entity, attribute, rng) for entity in entities[:3]]
        return '\n\n'.join(f'{question} {answer}' for question, answer in solved)

    def asked(self, entity, attribute):
        return f'Question: {self.ask(entity, attribute)}\nAnswer:'

    def judged(self, entity, attribute, rng, lead=''):
        """Return (question whether a proposed answer is right, '(A)' or '(B)').

        Half of the answers are right. A wrong one is that of another entity, so frequent values are
        proposed more often.
        """
        value, right = self.value(entity, attribute), rng.random() < 0.5
        while not right and value == self.value(entity, attribute):
            value = self.value(int(rng.integers(len(self.names))), attribute)
        asked = self.asked(entity, attribute).replace('Answer:', 'Proposed Answer:')
        return f'{asked} {lead}{value}{P_TRUE}', '(A)' if right else '(B)'


def make_rows(spec, seed):
    """Return {path: rows} of all JSONL files of a world.

    `plain` and `chat` are tasks with all values as options, `prompts` is that of the facts to align
    on, `qa` has questions to answer in writing.
    """
    world, rng = AlignmentWorld(spec, seed), np.random.default_rng([seed, 1])
    files = {'text.jsonl': [{'text': text} for text in world.documents(spec.documents, rng)]}
    sizes = [spec.instructions, spec.judged, spec.prompts, spec.questions, spec.validation]
    facts = log_uniform_facts(spec, sum(sizes), rng)
    told, judged, prompts, test, held_out = (
        facts[end - n:end] for n, end in zip(sizes, np.cumsum(sizes), strict=True))

    def options(facts, lead):
        return [{'prompt': world.asked(entity, attribute), 'id': f'{entity}-{attribute}',
                 'classes': [lead + value for value in ENGLISH.values[attribute]],
                 'answer_index': int(world.values[attribute][entity])}
                for entity, attribute in facts]

    files['instruct.jsonl'] = [
        *(conversation(world.asked(*fact), f'Answer: {world.value(*fact)}') for fact in told),
        *(conversation(*world.judged(*fact, rng, 'Answer: ')) for fact in judged)]
    files['stated.jsonl'] = [conversation(world.asked(*fact), STATED.format(
        world.value(*fact), f'0.{rng.integers(1, 10)}')) for fact in told]
    for name, asked, lead in (
            ('plain/test', test, ' '), ('plain/validation', held_out, ' '),
            ('chat/test', test, 'Answer: '), ('chat/validation', held_out, 'Answer: '),
            ('prompts/test', prompts, 'Answer: ')):
        files[f'{name}.jsonl'] = options(asked, lead)
    files['qa.jsonl'] = [{'question': world.ask(*fact), 'answer': world.value(*fact),
                          'id': f'{fact[0]}-{fact[1]}'} for fact in test[:spec.written]]
    return files


# Runs

def seed_folder(seed, root=common.ROOT):
    return common.seed_folder('alignment', seed, root)


def evaluation(folder, *tasks, chat='trained', **settings):
    """Return the settings with which all models are asked; tasks: files of a seed's world."""
    tasks = tuple(task.format(f'{folder}/world') for task in tasks)
    return EvalConfig(tasks=tasks, prompt_format='harness', header='none', shots=0, norm='sum',
                      chat=chat, fit_temperature=True, n_bootstrap=0, pictures=False, **settings)


def stated_evaluation(folder):
    """Return the settings for written answers, with confidences that they may state."""
    return evaluation(folder, 'qa:{}/qa.jsonl', n=2, max_tokens=48)


def tuning(name, seed, root, model='base', data='world/instruct', kind=TrainConfig, **settings):
    """Return the config of a run; model, data: names in the folder of the seed."""
    folder = seed_folder(seed, root)
    return kind(**{
        'model': f'{folder}/{model}', 'data': f'{folder}/{data}.jsonl', 'lr': 8e-4,
        'template': 'tulu',
        'checkpoint_epochs': False, 'cache_dir': f'{folder}/cache', 'pack_len': 512,
        'max_length': 512, 'micro_rows': 16, 'batch_size': 64, 'epochs': 3.0, 'save_every': None,
        'log_every': 50, 'pictures': False, 'add_bos': True, 'attention': 'explicit',
        'compile': False, 'eval_before': False, 'workers': 1,
        'eval': evaluation(folder, '{}/chat'), 'seed': seed, 'out_dir': f'{folder}/{name}'}
        | settings)


def base_runs(seed, root=common.ROOT):
    """Yield the base model, and the models tuned from it; `stated` also writes a confidence."""
    folder = seed_folder(seed, root)
    yield tuning('base', seed, root, model='world/model', data='world/text', epochs=1.0,
                 batch_size=384, micro_rows=36, workers=4, **PRETRAINING,
                 **base_model(**FILE['models']['base']),
                 eval=evaluation(folder, '{}/plain', chat='none'))
    yield tuning('sft', seed, root)
    yield tuning('smoothed', seed, root, smoothing=0.1)
    yield tuning('stated', seed, root, data='world/stated', eval=stated_evaluation(folder))


DPO = {'method': 'dpo', 'lr': 1e-4}
PPO = {'method': 'ppo', 'reward': 'exact:qa', 'kl': 'reward', 'lr': 2e-4, 'updates': 2}
GRPO = {'method': 'grpo', 'reward': 'exact:qa', 'kl': 'loss', 'lr': 2e-4}
WHOLE = {'checkpoint_epochs': False}
# question of PLAN.md -> {name of a run: settings}, in the order in which they are done; `model` and
# `data` are names in the folder of the seed
RUNS = {
    1: {'ppo': PPO},
    2: {'dpo': DPO, 'grpo': GRPO},
    3: {f'{name}-{data}': settings | WHOLE | {'data': data, 'epochs': 1e3, 'max_steps': STEPS}
        for name, settings in (('dpo', DPO), ('grpo', GRPO)) for data in ('known', 'unknown')},
    6: {f'{name}-smoothed': settings | WHOLE | {'model': 'smoothed'}
        for name, settings in (('ppo', PPO), ('dpo', DPO), ('grpo', GRPO))},
    5: {'rlcr': WHOLE | {'method': 'dr_grpo', 'reward': 'rlcr:qa', 'max_tokens': 48, 'lr': 2e-4,
                         'model': 'stated'}},
}
FIRST = 11      # of these runs come before the written answers, the others after them
# models that answer in writing, and how their logits are scaled
WRITTEN, SCALINGS = ('base', 'sft', 'smoothed', 'ppo', 'dpo', 'grpo'), ('none', 'temperature')


def aligning(name, seed, root, model='sft', data='all', **settings):
    """Return the AlignConfig of a run; model, data: names in the folder of the seed."""
    return tuning(name, seed, root, model, f'pairs/{data}', AlignConfig, **{
        'checkpoint_epochs': True, 'max_length': 256, 'group_size': 8, 'max_tokens': 12,
        'decode_batch': 512} | settings)


def runs(seed, root=common.ROOT):
    """Yield the AlignConfig or TrainConfig of every aligned model; `select` makes their data."""
    stated = {'eval': stated_evaluation(seed_folder(seed, root))}
    for question, named in RUNS.items():
        for name, settings in named.items():
            yield aligning(name, seed, root, **(stated if question == 5 else {}) | settings)
    yield tuning('brier', seed, root, model='sft', data='pairs/told', lr=2e-4, loss='brier()',
                 **stated)


def world(seed, root=common.ROOT):
    write_world(f'{seed_folder(seed, root)}/world', seed, WORLD, make_rows)


def fit(cfg):
    """Do a run of train.py or align.py, and evaluate the epochs before the last one."""
    (align if isinstance(cfg, AlignConfig) else train_and_report)(replace(cfg, resume=True))
    for epoch in epochs_before(cfg):
        run(replace(cfg.eval, model=f'{cfg.out_dir}/epoch-{epoch}', chat=cfg.template, add_bos=True,
                    out_dir=f'{cfg.out_dir}/report-{epoch}', seed=cfg.seed))
    if torch.cuda.is_available():
        torch.cuda.empty_cache()        # for the other processes of this GPU


def epochs_before(cfg):
    """Return the numbers of the epochs whose models are evaluated besides the last one."""
    return range(1, int(cfg.epochs)) if cfg.checkpoint_epochs else ()


def select(seed, root=common.ROOT):
    """Write pairs/all.jsonl, known.jsonl and unknown.jsonl, with equally many of the last two.

    The better answer is the true one, the worse one is drawn from the other 23 with the
    probabilities that the tuned model gives them. A fact is known if the true one is the most
    probable. Raises ConfigError if all facts are known, or none.
    """
    questions, answers = answers_of('sft', seed, root)
    rng, rows, known = np.random.default_rng([seed, 4]), [], {True: [], False: []}
    for question in questions:
        _, p, answer = answers[question['id']]
        chosen, rejected = (question['classes'][i] for i in (answer, draw_wrong(p, answer, rng)))
        rows.append({'prompt': question['prompt'], 'chosen': chosen, 'rejected': rejected,
                     'question': question['prompt'], 'answer': chosen.removeprefix('Answer: ')})
        known[bool(p.argmax() == answer)].append(rows[-1])
    n = min(map(len, known.values()))
    if not n:
        raise ConfigError(f'{seed_folder(seed, root)}: the tuned model knows {len(known[True])} of '
                          f'{len(rows)} facts; both kinds are needed')
    pairs = Path(seed_folder(seed, root), 'pairs')
    write_lines(pairs / 'known.jsonl', known[True][:n])
    write_lines(pairs / 'unknown.jsonl', known[False][:n])
    write_lines(pairs / 'told.jsonl', [conversation(row['prompt'], row['chosen']) for row in rows])
    write_lines(pairs / 'all.jsonl', rows)      # the last one: then all are there


def answers_of(name, seed, root, lead='Answer:', **settings):
    """Return (the questions to align on, {id: what common.ask returns}) of a model.

    lead: of their options, in the place of 'Answer:'
    """
    folder = Path(seed_folder(seed, root))
    rows = [row | {'classes': [text.replace('Answer:', lead, 1) for text in row['classes']]}
            for row in read_lines(folder / 'world' / 'prompts' / 'test.jsonl')]
    write_lines(folder / f'{name}-asked' / 'test.jsonl', rows)
    return rows, common.ask(evaluation(
        folder, f'{folder}/{name}-asked', model=f'{folder}/{name}', seed=seed,
        out_dir=f'{folder}/{name}-knows', **settings))


def draw_wrong(p, answer, rng):
    """Return an option other than the answer, drawn with the probabilities p [K]."""
    p = p.copy()
    p[answer] = 0
    return rng.choice(len(p), p=p / p.sum())


# Written answers

def written_folder(seed, root, name, scaling):
    return Path(seed_folder(seed, root), 'written', f'{name}-{scaling}')


def write_answers(seed, root, name, scaling):
    """Let a model answer in writing; scaling: 'none', or 'temperature', the one of its options."""
    folder = Path(seed_folder(seed, root))
    model = folder / name
    if scaling == 'temperature':
        model = with_temperature(model, folder / 'scaled' / name)
    run(evaluation(folder, 'qa:{}/qa.jsonl', p_true=True, model=f'{model}', seed=seed,
                   chat='none' if name == 'base' else 'trained',
                   out_dir=f'{written_folder(seed, root, name, scaling)}'))


def with_temperature(source, target):
    """Copy a model to `target` with its logits divided by the temperature fitted on its options."""
    target.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.suffix in ('.safetensors', '.model', '.py') or 'config' in path.name:
            shutil.copy(path, target)
    config = json.loads((target / 'config.json').read_text(encoding='utf-8'))
    config['nanocal'] = {'temperature': temperature_of(source)}
    write_text(target / 'config.json', json.dumps(config, indent=1))
    return target


def temperature_of(folder):
    """Return the temperature that was fitted on the validation questions of a run."""
    return next(float(fitted['temperature']) for _, fitted, _ in predictions_by_group(
        read_run(folder)) if fitted)


# Numbers

COLUMNS = ('run', 'epoch', 'seed', 'task', 'scaling', 'n', 'temperature', 'accuracy', 'confidence',
           'ece', 'smooth_ece', 'brier_top_label', 'nll', 'auroc', 'kl', 'reward', 'trained_reward',
           'first_reward')


def sources_of(cfgs):
    """Yield the Source of each evaluation of some runs."""
    for cfg in cfgs:
        folder, names = Path(cfg.out_dir), {'run': Path(cfg.out_dir).name, 'seed': cfg.seed}
        options = isinstance(cfg, AlignConfig) and not cfg.eval.tasks[0].startswith('qa:')
        reference = Path(cfg.model) if options else None
        for epoch in epochs_before(cfg):
            yield Source(folder / f'report-{epoch}', reference, {'epoch': epoch} | names)
        yield Source(folder, reference, {'epoch': 3} | names)


def sources(root):
    """Yield the Source of each evaluation of claims 13 and 14."""
    for seed in SEEDS:
        yield from sources_of([*base_runs(seed, root), *runs(seed, root)])
        for name, scaling in itertools.product(WRITTEN, SCALINGS):
            yield Source(written_folder(seed, root, name, scaling), None, {
                'run': name, 'seed': seed, 'epoch': 'written', 'scaling': scaling})


def lines_of(source):
    """Return the lines of a Source, {column of COLUMNS: value}.

    first_reward and trained_reward are of the answers in the first and the last eight steps.
    """
    lines, more, log = [], {}, source.folder / 'log.jsonl'
    steps = read_lines(log) if log.exists() else ()
    if rewards := [step['reward'] for step in steps if 'reward' in step]:
        more = {'first_reward': float(np.mean(rewards[:8])),
                'trained_reward': float(np.mean(rewards[-8:]))}
    for names, fitted, p in predictions_by_group(read_run(source.folder)):
        # of written answers, which are scaled before they are written, nothing is scaled again
        if {names['language'], names['category']} != {'all'} or fitted and p.probs.ndim == 1:
            continue
        reference = options_of(source.reference).probs if source.reference and not fitted else None
        line = names | fitted | measures(p, reference) | more | source.names
        lines.append({key: f'{line[key]:.5g}' if isinstance(line.get(key), float) else
                      str(line.get(key, '')) for key in COLUMNS})
    return lines


def measures(p, reference=None):
    """Return the metrics of Predictions; reference: probabilities [N, 24] of another model.

    For options, `reward` is the mean probability of the true value, that is the expected share of
    right answers at temperature 1, and `kl` the mean of KL(model, reference) over the 24 values.
    """
    line = {'n': len(p.labels)} | p.report()
    if p.probs.ndim == 2:
        line['reward'] = p.probs[np.arange(len(p.labels)), p.labels].mean()
        if reference is not None:
            line['kl'] = float((p.probs * (log(p.probs) - log(reference))).sum(1).mean())
    return line


def options_of(folder):
    """Return the Predictions of a model's 24 options, in the order of the questions."""
    return next(p for _, fitted, p in predictions_by_group(read_run(folder))
                if p.probs.ndim == 2 and not fitted)


def log(p):
    return np.log(np.maximum(p, np.finfo(float).tiny))
