"""The runs of claims 1 to 11, by the tables of runs.toml; PLAN.md has those of claims 7 to 11.

    python research/study/runs.py base --seeds=0 --only=base,tiny
    python research/study/runs.py smoothing

The experiment `base` makes the world and the base models that all others but `vocabulary` tune.
Finished runs are skipped, and several processes can share the seeds or the runs of an experiment.
At the end, a table of all finished seeds is printed and written beside them as compare.*.
"""

import functools
import itertools
import re
import sys
import tomllib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from data.files import read_rows
from world import ENGLISH
from evaluate import EvalConfig
from runtime import cli
from runtime.errors import ConfigError
from speed import fp8
from research import common
from research.common import ROOT, seed_folder, write_lines
from research.study import entropy_range
from research.study.world import StudySpec, make_world
from train import TrainConfig

fp8.NARROWEST = 0       # the runs with fp8 are of models for which it does not pay
# the worlds, models and runs
FILE = tomllib.loads(Path(__file__).with_name('runs.toml').read_text(encoding='utf-8'))
LATER_SEEDS = (5, 6, 7, 8, 9)       # of claims 7 to 11: claims 1 to 6 have seen 0 to 4
WORLD, VOCABULARY_WORLD = (StudySpec(**FILE['worlds'][name]) for name in ('base', 'vocabulary'))
LOSSES = FILE['losses']             # {name: strengths}
STRENGTHS = [loss for strengths in LOSSES.values() for loss in strengths]
TUNED = {}                          # {experiment: tables of runs.toml}
for table in FILE['tuned']:
    if names := table['each'].get('loss'):
        table['each']['loss'] = (STRENGTHS if names == 'all' else
                                 [LOSSES[name][0] for name in names])
    TUNED.setdefault(table['experiment'], []).append(table)
LATER = ('losses', 'transfer', 'known')
LATER_SETTINGS = {'val_size': 256, 'workers': 1, 'forms': ('text4',)}
KNOWN_BASES, KNOWN_DATA = ('base', 'medium'), ('known', 'half', 'unknown')


def combinations(table):
    """Yield ({key: value}, other settings) of each run of a table in runs.toml."""
    lists = table.get('each', {})
    settings = {key: value for key, value in table.items()
                if key not in ('experiment', 'name', 'each', 'seeds')}
    for values in itertools.product(*lists.values()):
        yield dict(zip(lists, values, strict=True)), settings


def short(loss):
    """Return the part of a run's name for a loss, such as 'smoothing0.1' or 'focal2'."""
    return re.sub('[_()]', '', loss.removeprefix('cross_entropy() + ').replace(' + ', '-'))


def evaluation(world, forms=WORLD.forms, **settings):
    """Return the report on the questions, next tokens and facts of the world in folder `world`."""
    return EvalConfig(
        tasks=(*(f'{world}/{form}' for form in forms), f'clm:{world}/clm.jsonl',
               f'facts:{world}/facts.jsonl'),
        scoring='text', chat='none', shots=0, fit_temperature=True, n_bootstrap=0, pictures=False,
        **settings)


SHARED = {'template': 'tulu', 'pack_len': 1024, 'max_length': 512, 'add_bos': True,
          'checkpoint_epochs': False, 'save_every': None, 'pictures': False, 'eval_before': False}
PRETRAINING = {'from_scratch': True, 'data_kind': 'text', 'schedule': 'cosine', 'final_lr': 0.05,
               'weight_decay': 0.1, 'betas': (0.9, 0.95)}


def tuning(experiment, name, seed, root=ROOT, base='base', forms=WORLD.forms,
           data='base/seed-{seed}/world/instruct.jsonl', **settings):
    """Return the config that tunes the base model `base`; data: a path in `root` for a seed."""
    source = seed_folder('base', seed, root)
    return TrainConfig(**SHARED | {
        'model': f'{source}/{base}', 'data': f'{root}/{data.format(seed=seed)}',
        'cache_dir': f'{source}/cache', 'batch_size': 64, 'epochs': 3.0,
        'lr': 8e-4, 'log_every': 50, 'eval': evaluation(f'{source}/world', forms),
        'out_dir': f'{seed_folder(experiment, seed, root)}/{name}', 'seed': seed} | settings)


def tuned_runs(experiment, seed, root=ROOT):
    """Yield the config of each combination of the tables of an experiment in runs.toml."""
    for table in TUNED[experiment]:
        for chosen, settings in combinations(table):
            texts = chosen | {'seed': seed, 'loss': short(chosen.get('loss', ''))}
            settings = (LATER_SETTINGS if experiment in LATER else {}) | settings | chosen
            settings.pop('facts', None)     # only a part of names
            if 'data' in settings:
                settings['data'] = settings['data'].format(**texts)
            yield tuning(experiment, table['name'].format(**texts), seed, root, **settings)


# Base models: Llama of four sizes, Gemma 2 and Mistral

def llama(hidden, mlp, layers, heads, **more):
    return {'hidden_size': hidden, 'intermediate_size': mlp, 'num_hidden_layers': layers,
            'num_attention_heads': heads, 'num_key_value_heads': heads} | more


def base_model(lr, size, **more):
    """Return the learning rate and the shape of a base model in runs.toml."""
    return {'lr': lr, 'shape': llama(*size, **more)}


def base_runs(seed, root=ROOT):
    folder = seed_folder('base', seed, root)
    for name, model in FILE['models'].items():
        yield TrainConfig(**SHARED, **PRETRAINING, **base_model(**model),
                          model=f'{folder}/world/model', data=f'{folder}/world/text.jsonl',
                          cache_dir=f'{folder}/cache', epochs=1.0, batch_size=384,
                          log_every=100, eval=evaluation(f'{folder}/world'),
                          out_dir=f'{folder}/{name}', seed=seed)


# Claim 3: vocabularies of 2^9 to 2^18 by hidden sizes of 64 to 1024; Gemma 2 of two layers

# {hidden size: (intermediate size, heads, learning rate of the base model, of tuning)}. The rates
# are 0.5 / hidden_size and 0.2 / hidden_size
SIZES = {64: (192, 1, 8e-3, 3.2e-3), 256: (704, 4, 2e-3, 8e-4), 1024: (2816, 16, 5e-4, 2e-4)}


def vocabulary_runs(seed, root=ROOT):
    """Yield all models with and without the softcap; 'unused' have 2^18 rows but 4,096 pieces."""
    folder = seed_folder('vocabulary', seed, root)
    # an option is one token or, with 512 pieces, several: the sum compares them
    report = evaluation(f'{folder}/world', VOCABULARY_WORLD.forms, norm='sum')
    shared = SHARED | {'cache_dir': f'{folder}/cache', 'log_every': 100, 'eval': report,
                       'seed': seed}
    models = {f'D{D}-V{V}-cap{cap}': (D, V, cap, {}) for D, V, cap in itertools.product(
        SIZES, VOCABULARY_WORLD.vocab_sizes, (30.0, None))}
    models |= {f'unused-D{D}': (D, 4_096, 30.0, {'vocab_size': 262_144}) for D in SIZES}
    for name, (D, V, cap, rows) in models.items():
        mlp, heads, lr, _ = SIZES[D]
        shape = llama(D, mlp, 2, heads, model_type='gemma2', head_dim=64, query_pre_attn_scalar=64,
                      sliding_window=1024, attn_logit_softcapping=50.0,
                      final_logit_softcapping=cap, **rows)
        yield TrainConfig(**shared, **PRETRAINING, shape=shape, lr=lr, epochs=2.0, batch_size=96,
                          model=f'{folder}/world/model-{V}',
                          data=f'{folder}/world/text.jsonl', out_dir=f'{folder}/base-{name}')
    for (name, (D, *_)), smoothing in itertools.product(models.items(), (0.0, 0.1)):
        yield TrainConfig(**shared, model=f'{folder}/base-{name}', smoothing=smoothing,
                          data=f'{folder}/world/instruct.jsonl', epochs=3.0, batch_size=64,
                          lr=SIZES[D][3],
                          out_dir=f'{folder}/tuned-{name}-smoothing{smoothing}')


# Claim 10: which facts of the instruction data a base model knows

def select_known(seed, root=ROOT, base='base'):
    """Write the three instruction files of a base model, with equally many conversations each.

    A fact of instruct-homogeneous.jsonl is known if the model ranks it first among the 24 values of
    its attribute. Raises ConfigError if it knows all of them, or none.
    """
    folder, source = (Path(seed_folder(name, seed, root)) for name in ('knows', 'base'))
    files = [folder / f'{base}-{data}.jsonl' for data in KNOWN_DATA]
    if all(file.exists() for file in files):
        return
    rows = [row for _, row in read_rows(source / 'world' / 'instruct-homogeneous.jsonl')]
    questions = folder / f'{base}.jsonl'
    write_lines(questions, [fact_question(i, row) for i, row in enumerate(rows)])
    answers = common.ask(EvalConfig(
        model=f'{source}/{base}', tasks=(f'{questions}',), shots=0, scoring='text', chat='none',
        n_bootstrap=0, pictures=False, seed=seed, out_dir=f'{folder / base}'))
    knows = np.zeros(len(rows), bool)
    knows[[*map(int, answers)]] = [p.argmax() == answer for _, p, answer in answers.values()]
    order = np.random.default_rng([seed, 4]).permutation(len(rows))
    known, unknown = order[knows[order]], order[~knows[order]]
    n = min(len(known), len(unknown)) // 2
    if not n:
        raise ConfigError(f'{questions}: the base model knows {len(known)} of {len(rows)} facts; '
                          f'both kinds are needed')
    chosen = known[:2 * n], [*known[:n], *unknown[:n]], unknown[:2 * n]
    for file, indices in zip(files, chosen, strict=True):
        write_lines(file, [rows[i] for i in sorted(indices)])


def fact_question(number, row):
    """Return a conversation's fact as a question whose options are all values of its attribute."""
    ask, answer = (message['content'] for message in row['messages'])
    value = answer.removeprefix('Answer: ')
    values = next(words for words in ENGLISH.values.values() if value in words)
    return {'question': ask, 'choices': values, 'answer': values.index(value), 'id': f'{number}'}


# {experiment: function (seed, root) that yields its configs}
EXPERIMENTS = {'base': base_runs, 'vocabulary': vocabulary_runs} | {
    name: functools.partial(tuned_runs, name) for name in TUNED}


def seeds_of(experiment):
    return LATER_SEEDS if experiment in LATER else common.SEEDS


def main():
    options = common.command_line(
        __doc__, first=('experiment', {'choices': EXPERIMENTS}), only=common.ONLY,
        seeds=common.seeds_option(None, '0,1,2,3,4; 5 to 9 for losses, transfer and known'),
        out_dir=common.OUT_DIR)
    name = options.experiment

    def prepare(seed, root):
        if world := {'base': WORLD, 'vocabulary': VOCABULARY_WORLD}.get(name):
            make_world(f'{seed_folder(name, seed, root)}/world', seed, world)
        for base in KNOWN_BASES if name == 'known' else ():
            select_known(seed, root, base)

    def finish(cfg):
        if name == 'vocabulary':
            entropy_range.measure(cfg.out_dir, cfg.seed)

    with cli.one_line_errors(resume='the same command continues'):
        common.train_all(EXPERIMENTS[name], options.seeds or seeds_of(name),
                         tuple(options.only.split(',')), options.out_dir, prepare, finish)
        common.print_table(EXPERIMENTS[name], options.out_dir)


if __name__ == '__main__':
    main()
