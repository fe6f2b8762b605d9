"""Everything that must hold: `python test_all.py` (or pytest with any of its options).

Kernels run through Triton's interpreter where there is no GPU. Tests that want a GPU skip without
one; those that read files which are not ours to ship (real tokenizers, real benchmarks) skip where
../shared is missing.
"""

import os

os.environ.setdefault('TRANSFORMERS_VERBOSITY', 'error')
os.environ.setdefault('HF_HUB_OFFLINE', '1')

import torch

if not torch.cuda.is_available():
    os.environ.setdefault('TRITON_INTERPRET', '1')  # before anything imports triton

import base64
import collections
import csv
import dataclasses
import gzip
import hashlib
import importlib.util
import itertools
import json
import math
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from safetensors.torch import load_file, save_file

import compare
import configs
import evaluate
import fused_ce
import metrics
import model as models
import optim
import results
import resume
import train
from data import DataError, chat, forked_pool, instruct, packing, questions, text
from data.demo import World, WorldSpec, make_world
from data.questions import load_task
from data.tokenizer import load_tokenizer
from fused_ce import smoothed_cross_entropy, token_log_probs, token_statistics
from optim import AdamW

HERE = Path(__file__).parent
DEVICES = ['cpu', pytest.param('cuda', marks=pytest.mark.skipif(
    not torch.cuda.is_available(), reason='needs a CUDA device'))]
SHARED = HERE.parent / 'shared'
needs_shared = pytest.mark.skipif(not SHARED.is_dir(),
                                  reason='needs ../shared: real tokenizers and benchmarks')


# ------------------------------------------------------------------------------------------------
# configs
# ------------------------------------------------------------------------------------------------

def config(tmp_path, content, *arguments):
    path = tmp_path / 'experiment.py'
    path.write_text(content)
    return configs.load_config(train.TrainConfig, [str(path), *arguments])


def test_config_file_then_command_line(tmp_path):
    cfg = config(tmp_path, '"""why"""\nlr = 1\nmax_steps = 5\neval_tasks = ["mmlu"]\n',
                 '--smoothing=0.1', '--max_steps=None', '--betas=0.9,0.95', '--dry_run',
                 '--model=a=b', '--eval_tasks=mmlu,arc_easy:some/place')
    assert cfg.lr == 1.0 and type(cfg.lr) is float
    assert cfg.max_steps is None and cfg.betas == (0.9, 0.95) and cfg.dry_run is True
    assert cfg.model == 'a=b' and cfg.eval_tasks == ('mmlu', 'arc_easy:some/place')
    assert configs.load_config(train.TrainConfig, ['--lr=1']).lr == 1.0


@pytest.mark.parametrize('content, argument, message', [
    ('smothing = 0.1', '', "experiment.py:1: there is no key 'smothing'; did you mean 'smoothing'"),
    ('', '--learningrate=1', "--learningrate: there is no key 'learningrate'"),
    ('lr = 1\nepochs = "two"', '', "experiment.py:2: epochs is 'two', a str; wanted a float"),
    ('', '--batch_size=1.5', '--batch_size is 1.5, a float; wanted an int'),
    ('', '--lr=high', "--lr is 'high', a str; wanted a float"),
    ('', '--schedule=step', "'step', a str; wanted 'linear' or 'cosine'"),
    ('', '--add_bos=1', 'wanted True or False'),
    ('', '--lr', '--lr: needs a value'),
    ('lr = 2 * 1e-5', '', 'experiment.py:1: the value of lr must be a plain literal'),
    ('import os', '', 'experiment.py:1: a config file holds only'),
    ('lr = (', '', 'experiment.py:1: not valid Python'),
    ('', 'configs/demo.py', 'a config file comes first'),
])
def test_config_errors(tmp_path, content, argument, message):
    with pytest.raises(configs.ConfigError, match='.') as error:
        config(tmp_path, content, *filter(None, [argument]))
    assert message in str(error.value)


def test_config_is_data_not_code(tmp_path):
    with pytest.raises(configs.ConfigError):
        config(tmp_path, f'model = open({str(tmp_path / "made")!r}, "w").name')
    assert not (tmp_path / 'made').exists()


def action_of_sigterm(_):
    return signal.getsignal(signal.SIGTERM)


def test_workers_end_by_sigterm():
    """Pool ends them so; with train.py's handler in them one pool in forty never ended."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with forked_pool(2) as pool:
            assert pool.map(action_of_sigterm, range(8)) == [signal.SIG_DFL] * 8
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        with pytest.raises(DataError, match='bad'):
            with forked_pool(2):
                raise DataError('bad')
    finally:
        signal.signal(signal.SIGTERM, before)


def test_include(tmp_path):
    (tmp_path / 'shared.py').write_text('lr = 1e-3\nepochs = 3\n')
    cfg = config(tmp_path, "include = 'shared.py'\nepochs = 1", '--batch_size=8')
    assert (cfg.lr, cfg.epochs, cfg.batch_size) == (1e-3, 1.0, 8)
    for shared, line, message in (
            ('lr = 1e-3', "include = 3", 'py:1: include is 3; wanted the name of a file beside'),
            ('lr = 1e-3', "include = 'none.py'", 'cannot read the config file .*none.py'),
            ('\nlrr = 1e-3', "include = 'shared.py'", "shared.py:2: there is no key 'lrr'"),
            ("include = 'x.py'", "include = 'shared.py'", 'shared.py:1: .* can include none')):
        (tmp_path / 'shared.py').write_text(shared)
        with pytest.raises(configs.ConfigError, match=message):
            config(tmp_path, line)


def test_resolved_config_reads_back(tmp_path):
    cfg = config(tmp_path, 'smoothing = 0.1\nruns = {"a": {"lr": 1e-3}}', '--max_steps=3')
    assert config(tmp_path, configs.dump_config(cfg)) == cfg


def test_shipped_configs_load():
    shipped = sorted((HERE / 'configs').glob('[!_]*.py'))
    assert {'demo', 'gemma2_ls01', 'llama3_8b_ls01', 'llama32_1b_ls01', 'mistral_7b_ls01',
            'paper_openinstruct'} <= {path.stem for path in shipped}
    for path in shipped:
        for one in train.expand_seeds(configs.load_config(train.TrainConfig, [str(path)])):
            train.expand_runs(one)
    for path in (HERE / 'configs' / 'study').glob('*.py'):
        cfg = configs.load_config(train.TrainConfig, [str(path)])
        for one in train.expand_seeds(cfg):
            configs.override(WorldSpec(), one.world, 'world')
            for _, run in train.expand_runs(one):
                train.check(run)
                assert '{' not in repr((run.model, run.data, run.eval_tasks))


def test_vary_and_seeds(tmp_path):
    cfg = config(tmp_path, '''
seeds = (3, 5)
model = '{out_dir}/base-D{D}'
vary = {'D': (64, 256), 'cap': (None, 30.0), 's': (0.0, 0.1)}
runs = {
    'base': {'from_scratch': True, 'shape': {'hidden_size': '{D}', 'x': ('{cap}', 'c{cap}')}},
    'tuned': {'model': '{out_dir}/base-D{D}-cap{cap}', 'smoothing': '{s}', 'cache_dir': '{seed}/c'},
}''', '--out_dir=place', '--vary.D=64,', '--vary.cap=None,30.0')
    three, five = train.expand_seeds(cfg)
    assert (three.seed, five.seed, five.out_dir) == (3, 5, 'place/seed-5')
    runs = dict(train.expand_runs(five))
    assert list(runs) == ['base-D64-capNone', 'base-D64-cap30.0'] + [
        f'tuned-D64-cap{c}-s{s}' for c in (None, 30.0) for s in (0.0, 0.1)]
    assert runs['base-D64-capNone'].shape == {'hidden_size': 64, 'x': (None, 'cNone')}
    last = runs['tuned-D64-cap30.0-s0.1']
    assert (last.model, last.smoothing, last.cache_dir, last.out_dir, last.vary) == (
        'place/seed-5/base-D64-cap30.0', 0.1, '5/c', 'place/seed-5/tuned-D64-cap30.0-s0.1', {})
    only = dataclasses.replace(five, only=('tuned-D64-capN',))
    assert [n for n, _ in train.expand_runs(only)] == [f'tuned-D64-capNone-s{s}'
                                                       for s in (0.0, 0.1)]
    for change, message in (({'only': ('x',)}, 'no run is called so; there are base, tuned'),
                            ({'vary': {'E': (1,)}}, 'no run mentions {E}'),
                            ({'vary': {'s': ('much',), 'D': (1,), 'cap': (1,)}},
                             "smoothing is 'much'"),
                            ({'vary': {'D': 64}}, 'D is 64; wanted values in a tuple, or a dict'),
                            ({'vary': {'D': {64: 1}}}, 'wanted values in a tuple, or a dict'),
                            ({'vary': {'D': (64,), 's': (0.1,)}},
                             'runs: base-D64: vary gives nothing to put in for {cap}')):
        with pytest.raises(configs.ConfigError, match=message):
            train.expand_runs(dataclasses.replace(five, **change))
    paired = dataclasses.replace(
        five, vary={'D': {64: {'r': 1e-3}, 256: {'r': 2e-3}}, 's': (0.0, 0.1)},
        runs={'a': {'lr': '{r}', 'model': 'm{D}', 'smoothing': '{s}'}})
    assert [(n, r.lr, r.model, r.smoothing) for n, r in train.expand_runs(paired)] == [
        (f'a-D{d}-s{s}', r, f'm{d}', s) for d, r in ((64, 1e-3), (256, 2e-3)) for s in (0.0, 0.1)]
    assert train.fill({'a': ['{D}', 'x{D}']}, {'D': 3}) == {'a': [3, 'x3']}
    with pytest.raises(configs.ConfigError, match='one of them twice'):
        train.expand_seeds(dataclasses.replace(cfg, seeds=(1, 1)))
    for arguments, message in ((['--demo_world=w', '--world.entities=30000'],
                                'make 22500 names, not 30000'),
                               (['--demo_world=w', '--world.documents=20', '--world.entities=50',
                                 '--world.instructions=9', '--world.questions=9',
                                 '--world.vocab_sizes=90000,'], 'Vocabulary size too high'),
                               (['--demo_world=w', '--world.forms=("letter4",)'],
                                "form 'letter4'; wanted 'text' or 'letters' and 2 to 24 options"),
                               (['--demo_world=w', '--world.forms=("text25",)'], "form 'text25'"),
                               (['--demo_world=w', '--world.unseen_questions=5'],
                                'unseen_questions = 5 with unseen = 0'),
                               (['--world.entities=3'], 'needs demo_world')):
        with pytest.raises(configs.ConfigError, match=message):
            train.main([*(a.replace('=w', f'={tmp_path / "w"}') for a in arguments),
                        f'--out_dir={tmp_path / "run"}'])
    with pytest.raises(configs.ConfigError, match='needs from_scratch = True'):
        train.check(dataclasses.replace(config(tmp_path, ''), shape={'hidden_size': 8}))
    with pytest.raises(configs.ConfigError, match="no key 'entties'; did you mean 'entities'"):
        configs.override(WorldSpec(), {'entties': 3}, 'world')


RUNS = 'runs = {"a": {"lr": 1.0, "seed": 1}, "b": {"model": "{out_dir}/a"}}'


def test_runs_and_the_command_line(tmp_path):
    cfg = config(tmp_path, RUNS, '--epochs=3', '--runs.a.lr=2', '--out_dir=place')
    (_, first), (_, second) = train.expand_runs(*train.expand_seeds(cfg))
    assert first.lr == 2.0 and second.lr == 2e-5 and first.seed == 1
    assert first.epochs == second.epochs == 3.0
    assert second.model == 'place/a' and first.out_dir == 'place/a'


@pytest.mark.parametrize('content, argument, message', [
    (RUNS, '--lr=2', 'the runs a set lr themselves; say which one, as in --runs.a.lr='),
    (RUNS, '--runs.c.lr=2', '--runs.c.lr: there is no runs.c in the config'),
    (RUNS, '--runs.a.lr=x', "--runs.a.lr is 'x', a str; wanted a float"),
    ('runs = {"a": {"smothing": 0.1}}', None, "did you mean 'smoothing'"),
    ('runs = {"../a": {}}', None, "'../a' is not a name for a folder"),
    ('runs = {1: {}}', None, '1 is not a name for a folder'),
    ('runs = {"a": {"out_dir": "x"}}', None, 'out_dir is the same for all runs'),
    ('runs = {"a": {"eval_tasks": ("mmlu",)}}', None, 'eval_tasks is the same for all runs'),
])
def test_bad_runs(tmp_path, content, argument, message):
    with pytest.raises(configs.ConfigError) as error:
        train.expand_runs(config(tmp_path, content, *filter(None, [argument])))
    assert message in str(error.value)


# ------------------------------------------------------------------------------------------------
# tokenizers and chat templates
# ------------------------------------------------------------------------------------------------

CORPUS = ['The quick brown fox jumps over the lazy dog.', 'Question: one or two?', 'Answer: A',
          'What is the colour of the sky? It is blue.', 'Antwort: zwölf Äpfel',
          'user model assistant system'] * 20


def sentencepiece_folder(folder, kind, pieces=400):
    """A tokenizer with the settings of Gemma's file or of Llama 2's and Mistral's."""
    special = {
        'gemma': {'pad_id': 0, 'eos_id': 1, 'bos_id': 2, 'unk_id': 3, 'add_dummy_prefix': False,
                  'user_defined_symbols': ['<start_of_turn>', '<end_of_turn>', '\n', '\n\n',
                                           '<b>']},
        'mistral': {'control_symbols': ['[INST]', '[/INST]']},
        'llama2': {},
    }[kind]
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / 'tokenizer.model', 'wb') as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(CORPUS), model_writer=file, vocab_size=pieces, model_type='bpe',
            byte_fallback=True, normalization_rule_name='identity', minloglevel=2,
            remove_extra_whitespaces=False, **special)
    return folder


def tiktoken_folder(folder):
    """128,000 ranks in the format of Llama 3's file: the bytes, two real merges, and filling."""
    tokens = [bytes([i]) for i in range(256)] + [b'us', b'er', b'user', b'<|']
    filling = (b'\xff' + i.to_bytes(3, 'big') for i in range(128_000 - len(tokens)))
    folder.mkdir(parents=True)
    (folder / 'tokenizer.model').write_bytes(b''.join(
        base64.b64encode(token) + b' %d\n' % rank
        for rank, token in enumerate([*tokens, *filling])))
    return folder


@pytest.fixture(scope='session')
def tokenizers(tmp_path_factory):
    base = tmp_path_factory.mktemp('tokenizers')
    folders = {kind: sentencepiece_folder(base / kind, kind)
               for kind in ('gemma', 'mistral', 'llama2')}
    folders['llama3'] = tiktoken_folder(base / 'llama3')
    return {kind: load_tokenizer(folder) for kind, folder in folders.items()}


HOSTILE = ('<|eot_id|><|begin_of_text|> <s></s> [INST] x [/INST] <start_of_turn>user\n<end_of_turn>'
           '<bos><eos><pad><unk> <|end_of_text|>')


@pytest.mark.parametrize('kind', ['gemma', 'mistral', 'llama2', 'llama3'])
def test_text_never_makes_a_control_token(tokenizers, kind):
    tokenizer = tokenizers[kind]
    controls = set(tokenizer.control_ids.values())
    assert {tokenizer.bos_id, tokenizer.eos_id} <= controls
    for start in (True, False):
        ids = tokenizer.encode(HOSTILE, start=start)
        assert not controls & set(ids)
        assert tokenizer.decode(ids).strip() == HOSTILE
    assert not controls & set(tokenizer.encode(''.join(tokenizer.control_ids)))


@pytest.mark.parametrize('kind', ['gemma', 'mistral', 'llama2', 'llama3'])
def test_continued_text_has_no_extra_space(tokenizers, kind):
    tokenizer = tokenizers[kind]
    for first, second in (('user: ', 'blue'), ('The fox\n', 'jumps\n\nover'), ('fox', ' dog'),
                          ('', 'sky')):
        ids = tokenizer.encode(first) + tokenizer.encode(second, start=not first)
        assert tokenizer.decode(ids) == first + second


def test_gemma_keeps_harmless_symbols(tokenizers):
    tokenizer = tokenizers['gemma']
    assert len(tokenizer.encode('\n\n')) == 1 and len(tokenizer.encode('<b>')) == 1
    assert len(tokenizer.encode('<start_of_turn>')) > 1


def test_long_runs_are_cut(tokenizers):
    long, around = 'a' * 60_000 + ' ' * 60_000, 'The fox  jumps over.\n\n'
    tokenizer = tokenizers['llama3']
    ids = tokenizer.encode(around + long)
    assert tokenizer.decode(ids) == around + long
    before = tokenizer.encode(around)
    assert ids[:len(before) - 1] == before[:-1]  # the text around the run is cut as ever


def test_tokenizer_errors(tmp_path):
    with pytest.raises(DataError, match='has no tokenizer.model'):
        load_tokenizer(tmp_path)
    (tmp_path / 'tokenizer.json').write_text('{}')
    with pytest.raises(DataError, match='tokenizer.json is not read: take tokenizer.model'):
        load_tokenizer(tmp_path)
    (tmp_path / 'tokenizer.model').write_bytes(b'\x00\x01garbage')
    with pytest.raises(DataError, match='neither a tiktoken nor a sentencepiece'):
        load_tokenizer(tmp_path)
    (tmp_path / 'tokenizer.model').write_bytes(b'IQ== 0\nIg== 1\n')
    with pytest.raises(DataError, match='2 ranks; only the Llama 3 file'):
        load_tokenizer(tmp_path)


MESSAGES = [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': 'The sky?'},
            {'role': 'assistant', 'content': 'It is blue.'}, {'role': 'user', 'content': 'fox <|'},
            {'role': 'assistant', 'content': '\njumps'}]
RENDERED = {
    'tulu': ('llama3', '<|begin_of_text|><|system|>\nBe brief.\n<|user|>\nThe sky?\n<|assistant|>\n'
             '{It is blue.<|end_of_text|>\n}<|user|>\nfox <|\n<|assistant|>\n'
             '{\njumps<|end_of_text|>}'),
    'llama3': ('llama3', '<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.'
               '<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nThe sky?<|eot_id|>'
               '<|start_header_id|>assistant<|end_header_id|>\n\n{It is blue.<|eot_id|>}'
               '<|start_header_id|>user<|end_header_id|>\n\nfox <|<|eot_id|>'
               '<|start_header_id|>assistant<|end_header_id|>\n\n{jumps<|eot_id|>}'),
    'gemma': ('gemma', '<s><start_of_turn>user\nBe brief.\n\nThe sky?<end_of_turn>\n'
              '<start_of_turn>model\n{It is blue.<end_of_turn>}\n<start_of_turn>user\nfox <|'
              '<end_of_turn>\n<start_of_turn>model\n{jumps<end_of_turn>}\n'),
    'mistral': ('mistral', '<s>[INST] Be brief.\n\nThe sky?[/INST]{ It is blue.</s>}[INST] fox <|'
                '[/INST]{ \njumps</s>}'),
    'mistral as text': ('llama2', '<s>[INST] Be brief.\n\nThe sky? [/INST]{ It is blue.</s>} '
                        '[INST] fox <| [/INST]{ \njumps</s>}'),
}


@pytest.mark.parametrize('template', RENDERED)
def test_templates_and_masks(tokenizers, template):
    kind, expected = RENDERED[template]
    template = template.removesuffix(' as text')
    tokenizer = tokenizers[kind]
    ids, learnt = chat.encode_conversation(MESSAGES, tokenizer, template)
    shown = ''
    for flag, group in groupby_flag(ids, learnt):
        piece = tokenizer.decode(group, start=not shown)
        shown += '{' + piece + '}' if flag else piece
    assert shown == expected
    assert ids.count(tokenizer.bos_id) == 1
    assert chat.encode_conversation(MESSAGES, tokenizer, template, add_bos=False)[0] == ids[1:]


def groupby_flag(ids, learnt):
    start = 0
    for i in range(1, len(ids) + 1):
        if i == len(ids) or learnt[i] != learnt[start]:
            yield learnt[start], ids[start:i]
            start = i


def test_prompt_tokens_do_not_depend_on_the_answer(tokenizers):
    # an answer that begins with a newline must not melt into the prompt's last newline
    for answer in ('\n\nblue', ' blue', 'blue'):
        ids, learnt = chat.encode_conversation(
            [{'role': 'user', 'content': 'sky'}, {'role': 'assistant', 'content': answer}],
            tokenizers['gemma'])
        prompt = [i for i, flag in zip(ids, learnt, strict=True) if not flag]
        assert prompt == [tokenizers['gemma'].bos_id] + tokenizers['gemma'].encode(
            '<|user|>\nsky\n<|assistant|>\n')


def test_template_needs_its_control_tokens(tokenizers):
    with pytest.raises(DataError, match="has no <start_of_turn>.*template = 'tulu'"):
        chat.encode_conversation(MESSAGES, tokenizers['llama3'], 'gemma')


@needs_shared
def test_real_tokenizers_known_ids(tmp_path):
    def real(name, file):
        (tmp_path / name).mkdir()
        shutil.copyfile(SHARED / 'tokenizers' / file, tmp_path / name / 'tokenizer.model')
        return load_tokenizer(tmp_path / name)
    llama3 = real('llama3', 'llama3_tokenizer.model')
    assert (llama3.n_vocab, llama3.bos_id, llama3.eos_id) == (128256, 128000, 128001)
    assert llama3.encode('<|user|>\n') == [27, 91, 882, 91, 397]
    assert llama3.encode('<|assistant|>\n') == [27, 91, 78191, 91, 397]
    assert llama3.control_ids['<|eot_id|>'] == 128009
    mistral = real('mistral', 'mistral_mistral_instruct_tokenizer_240323.model.v3')
    assert mistral.encode('\nhello') != mistral.encode('\nhello', start=False)
    assert mistral.control_ids['[INST]'] == 3
    for name, file, letter in (('llama2', 'llama2_tokenizer.model', 319),
                               ('mistral1', 'mistral_tokenizer.model.v1', 330)):
        tokenizer = real(name, file)
        assert tokenizer.encode('Answer: A') == [*tokenizer.encode('Answer:'), letter]
        assert tokenizer.encode('Answer: A', start=False)[-1] == letter
    for tokenizer in (llama3, mistral):
        assert not set(tokenizer.encode(HOSTILE)) & set(tokenizer.control_ids.values())


# ------------------------------------------------------------------------------------------------
# data: rows, instruction formats, cache, packing
# ------------------------------------------------------------------------------------------------

def write_rows(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == '.parquet':
        import pyarrow
        import pyarrow.parquet
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == '.json':
        path.write_text(json.dumps(rows))
    else:
        path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    return path


SAME = [{'role': 'user', 'content': 'sky?'}, {'role': 'assistant', 'content': 'blue'}]


@pytest.mark.parametrize('name, row', [
    ('alpaca.json', {'instruction': 'sky?', 'input': '', 'output': 'blue'}),
    ('openhermes2_5.json', {'conversations': [{'from': 'human', 'value': 'sky?'},
                                              {'from': 'gpt', 'value': 'blue'}], 'idx': 1}),
    ('data/train-00000-of-00001.parquet', {'id': 'x', 'messages': SAME, 'source': 'y'}),
    ('chat.jsonl', {'messages': SAME}),
])
def test_instruction_formats(tmp_path, tokenizers, name, row):
    write_rows(tmp_path / name, [row] * 3)
    tokenizer = tokenizers['gemma']
    sequences = instruct.load_conversations(
        str(tmp_path), tokenizer, template='tulu', max_length=64, add_bos=True,
        cache_dir=tmp_path / 'cache')
    assert len(sequences) == 3
    tokens, learnt = sequences[2]
    assert tokenizer.decode(tokens.tolist()) == '<s><|user|>\nsky?\n<|assistant|>\nblue</s>'
    assert tokenizer.decode(tokens[learnt == 1].tolist()) == 'blue</s>'


def test_alpaca_input_follows_the_instruction():
    row = {'instruction': 'Add.', 'input': '1 2', 'output': '3'}
    assert instruct.to_messages(row)[0]['content'] == 'Add.\n\n1 2'


def conversations(path, tokenizer, **options):
    settings = {'template': 'tulu', 'max_length': 64, 'add_bos': True,
                'cache_dir': path.parent / 'cache'} | options
    return instruct.load_conversations(str(path), tokenizer, **settings)


def test_bad_rows_are_named_or_counted(tmp_path, tokenizers, capsys):
    path = tmp_path / 'chat.jsonl'
    good = json.dumps({'messages': SAME})
    path.write_text(f'{good}\n{{"messages": [}}\n{good}\n{{"text": "x"}}\n')
    with pytest.raises(DataError, match=r'chat.jsonl:2: broken JSON.*on_bad_row=skip'):
        conversations(path, tokenizers['gemma'])
    assert not list((tmp_path / 'cache').glob('*'))  # nothing half-written
    for workers in (1, 2):
        sequences = conversations(path, tokenizers['gemma'], on_bad_row='skip', workers=workers,
                                  max_length=60 + workers)
        assert len(sequences) == 2 and '2 bad rows skipped, the first' in capsys.readouterr().out


@pytest.mark.parametrize('row, message', [
    ({'messages': SAME[:1]}, 'no answer'), ({'messages': []}, 'without messages'),
    ({'messages': [{'role': 'bot', 'content': 'x'}]}, "role 'bot'"),
    ({'messages': [{'role': 'user', 'content': 3}]}, 'not text'),
    ({'messages': 'x'}, 'must be a list'), ({}, 'wanted messages, conversations'),
    ([1], 'named fields'),
    ({'messages': [{'role': 'user', 'content': '\ud83d'}]}, 'not valid Unicode'),
    ({'conversations': [{'from': ['human'], 'value': 'x'}]}, 'not the fields of its format'),
    ({'instruction': 'x ' * 99, 'output': 'y'}, 'begins beyond max_length = 64')])
def test_bad_conversations(tmp_path, tokenizers, row, message):
    path = write_rows(tmp_path / 'chat.jsonl', [row])
    with pytest.raises(DataError, match=message) as error:
        conversations(path, tokenizers['gemma'])
    assert 'chat.jsonl:1: ' in str(error.value)


def test_empty_and_missing_data(tmp_path, tokenizers):
    path = write_rows(tmp_path / 'chat.jsonl', [])
    with pytest.raises(DataError, match='an empty dataset'):
        conversations(path, tokenizers['gemma'])
    with pytest.raises(DataError, match='no file or folder at /nowhere'):
        conversations(Path('/nowhere'), tokenizers['gemma'])
    with pytest.raises(DataError, match='getting the dataset some/where from the hub failed'):
        instruct.load_conversations('some/where', tokenizers['gemma'], template='tulu',
                                    max_length=8, add_bos=True, cache_dir=tmp_path)


def test_truncated_data_files(tmp_path, tokenizers):
    row = {'messages': SAME}
    whole = gzip.compress(''.join(json.dumps(row) + '\n' for _ in range(50)).encode())
    (tmp_path / 'chat.jsonl.gz').write_bytes(whole[:len(whole) // 2])
    parquet = write_rows(tmp_path / 'chat.parquet', [row])
    parquet.write_bytes(parquet.read_bytes()[:-10])
    for path in (tmp_path / 'chat.jsonl.gz', parquet):
        with pytest.raises(DataError, match=path.name):
            conversations(path, tokenizers['gemma'])


def test_cache_is_keyed_by_what_went_in(tmp_path, tokenizers):
    path = write_rows(tmp_path / 'chat.jsonl', [{'messages': SAME}])
    cache = tmp_path / 'cache'
    conversations(path, tokenizers['gemma'])
    made = {p: p.stat().st_mtime_ns for p in cache.rglob('*')}
    tokens, learnt = conversations(path, tokenizers['gemma'])[0]
    assert type(tokens) is type(learnt) is np.ndarray   # a memmap's slices are slow to make
    assert made == {p: p.stat().st_mtime_ns for p in cache.rglob('*')}
    for n, change in enumerate(({'max_length': 32}, {'add_bos': False}, {'template': 'gemma'})):
        conversations(path, tokenizers['gemma'], **change)
        assert len(list(cache.iterdir())) == 2 + n
    conversations(path, tokenizers['llama2'])
    write_rows(path, [{'messages': SAME}] * 2)
    assert len(conversations(path, tokenizers['gemma'])) == 2
    assert len(list(cache.iterdir())) == 6


def test_text_documents(tmp_path, tokenizers):
    tokenizer = tokenizers['gemma']
    write_rows(tmp_path / 'text.jsonl', [{'text': 'The sky is blue. ' * 10}])
    (tmp_path / 'plain.txt').write_text('fox')
    sequences = text.load_text(str(tmp_path / 'text.jsonl'), tokenizer, max_length=16,
                               add_bos=True, cache_dir=tmp_path / 'cache')
    joined = [i for tokens, _ in (sequences[j] for j in range(len(sequences)))
              for i in tokens.tolist()[1:]]
    assert tokenizer.decode(joined) == 'The sky is blue. ' * 10 + '</s>'
    assert all(len(tokens) <= 16 and tokens[0] == tokenizer.bos_id and learnt.tolist()
               == [0] + [1] * (len(tokens) - 1) for tokens, learnt in sequences)
    plain = text.load_text(str(tmp_path / 'plain.txt'), tokenizer, max_length=16, add_bos=False,
                           cache_dir=tmp_path / 'cache')
    assert tokenizer.decode(plain[0][0].tolist()) == 'fox</s>'


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 16), min_size=1, max_size=30), st.integers(0, 1000))
def test_packing_holds_every_sequence_once(lengths, seed):
    rng = np.random.default_rng(seed)
    sequences = [(rng.integers(1, 99, n), rng.integers(0, 2, n)) for n in lengths]
    packed = packing.pack(sequences, 16)
    assert len(packed['tokens']) >= sum(lengths) / 16
    assert len(packed['tokens']) <= 1 + 2 * sum(lengths) // 16  # first fit wastes less than half
    for i, (tokens, learnt) in enumerate(sequences):
        row, at = np.nonzero(packed['owner'] == i)
        assert (packed['tokens'][row, at] == tokens).all()
        assert (packed['positions'][row, at] == np.arange(len(tokens))).all()
        assert (packed['ends'][row, at] == at[-1] + 1).all()
        wanted = np.append(np.where(learnt[1:], tokens[1:], -100), -100)
        assert (packed['targets'][row, at] == wanted).all()
    padding = packed['owner'] < 0
    assert (packed['targets'][padding] == -100).all()
    assert (packed['ends'] > np.arange(16)).all()


def test_rows_come_in_multiples():
    sequences = documents(0, [40, 7, 25, 30, 44])
    few, many = (packing.pack(sequences, 48, multiple) for multiple in (1, 5))
    n = len(few['tokens'])
    assert n == 4 and len(many['tokens']) == 5
    assert all((many[key][:n] == few[key]).all() for key in few)
    assert (many['owner'][n:] == -1).all() and (many['targets'][n:] < 0).all()
    assert (many['ends'][n:] == np.arange(48) + 1).all()


def test_epoch_orders_differ_and_repeat():
    orders = [packing.epoch_order(50, e, 3).tolist() for e in (0, 1, 0)]
    assert orders[0] == orders[2] != orders[1] and sorted(orders[1]) == list(range(50))


# ------------------------------------------------------------------------------------------------
# data: questions
# ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('row, expected', [
    ({'question': ' Q? ', 'choices': ['a', 'b', 'c', 'd'], 'answer': 2, 'subject': 's'}, 2),
    ({'question': 'Q?', 'choices': ['a', 'b', 'c', 'd'], 'answer': 'C'}, 2),
    (['Q?', 'a', 'b', 'c', 'd', 'C'], 2),
    (['Q?', 'a', 'b', 'c', 'd', '2'], 2),
    ({'question': 'Q?', 'choices': {'text': ['a', 'b', 'c'], 'label': ['1', '2', '3']},
      'answerKey': '3'}, 2),
    ({'question': 'Q?', 'choices': {'text': list('abcde'), 'label': list('ABCDE')},
      'answerKey': 'C'}, 2),
    ({'question': {'stem': 'Q?', 'choices': [{'text': t, 'label': k} for t, k in
                                             zip('abcd', 'ABCD')]}, 'answerKey': 'C'}, 2),
    ({'question': 'Q?', 'option_a': 'a', 'option_b': 'b', 'option_c': 'c', 'option_d': 'd',
      'answer': 'C', 'sample_id': 'x/test/1'}, 2),
    ({'question': 'Q?', 'option_0': 'a', 'option_1': None, 'option_2': 'b', 'option_3': 'c',
      'option_4': None, 'answer': 'D', 'answer_index': 3}, 2),
    ({'': '0', 'question': 'Q?', 'a': 'a', 'b': 'b', 'c': 'c', 'd': 'd', 'answer': 'C'}, 2),
    ({'Question': 'Q?', 'A': 'a', 'B': 'b', 'C': 'c', 'D': 'd', 'Answer': 'C'}, 2),
    ({'question': 'Q?', 'options': ['a', 'b', 'c', 'N/A', 'N/A'], 'answer': 'C',
      'answer_index': 2}, 2),
    ({'question': 'Q?', 'choice0': 'a', 'choice1': 'b', 'choice2': 'c', 'answer': '2'}, 2),
])
def test_question_schemas(row, expected):
    text, choices, answer = questions.parse_row(row)
    assert text.strip() == 'Q?' and choices[:3] == ['a', 'b', 'c'] and answer == expected


def test_hellaswag_cleaning():
    row = {'activity_label': 'Roof [title] repair', 'ctx_a': 'A man [step] works.', 'ctx_b': 'he',
           'endings': ['runs  [x]away', 'b', 'c', 'd'], 'label': '3'}
    text, choices, answer = questions.parse_row(row)
    assert text == 'Roof.  repair: A man works. He'.replace('.  r', '. r') and answer == 3
    assert choices[0] == 'runs away'


@pytest.mark.parametrize('row, message', [
    ({'question': 'Q?', 'choices': ['a', 'b']}, 'no valid answer: None; wanted one of A, B'),
    ({'question': 'Q?', 'choices': ['a', 'b'], 'answer': 2}, 'no valid answer: 2'),
    ({'question': 'Q?', 'choices': ['a', 'b'], 'answer': True}, 'no valid answer: True'),
    ({'question': 'Q?', 'choices': ['a', 'b'], 'answer': 'x'}, "no valid answer: 'x'"),
    ({'question': 'Q?', 'choices': ['a'], 'answer': 0}, '2 to 26 choices'),
    ({'question': 'Q?', 'choices': ['a', ' '], 'answer': 0}, 'choice B is empty'),
    ({'question': 'Q?', 'option_0': 'a', 'option_1': None, 'option_2': 'b', 'answer': 'B'},
     "no valid answer: 'B'; wanted one of A, C"),
    ({'question': '', 'choices': ['a', 'b'], 'answer': 0}, 'no question'),
    ({'endings': ['a', 'b'], 'activity_label': 'x', 'label': ''}, 'no valid answer'),
    ({'endings': None, 'label': 0}, 'not the fields of its format'),
    ({'question': '\ud83d?', 'choices': ['a', 'b'], 'answer': 0}, 'not valid Unicode'),
    ({'question': 'Q?', 'choices': {'text': ['a', 'b']}, 'answerKey': 'A'}, 'not the fields'),
    ('text', 'named fields')])
def test_bad_questions_name_their_line(tmp_path, row, message):
    good = {'question': 'Q?', 'choices': ['a', 'b'], 'answer': 1}
    path = write_rows(tmp_path / 'some.jsonl', [good, row])
    with pytest.raises(DataError, match=message) as error:
        questions.load_task(str(path))
    assert 'some.jsonl:2: ' in str(error.value)
    kept, _, bad = questions.load_task(str(path), on_bad_row='skip')
    assert len(kept) == 1 and len(bad) == 1


def test_prompt_is_mmlus(tmp_path):
    rows = [{'question': f'Q{i}?', 'choices': ['w', 'x', 'y', 'z'], 'answer': i,
             'subject': 'abstract_algebra'} for i in range(3)]
    write_rows(tmp_path / 'dev.jsonl', rows[:2])
    write_rows(tmp_path / 'test.jsonl', rows[2:])
    (question,), solved, _ = questions.load_task(f'mmlu:{tmp_path}', shots=2)
    prompt = question.header + ''.join(
        s.solved for s in solved[question.group]) + question.context
    assert prompt == ('The following are multiple choice questions (with answers) about abstract '
                      'algebra.\n\nQ0?\nA. w\nB. x\nC. y\nD. z\nAnswer: A\n\n'
                      'Q1?\nA. w\nB. x\nC. y\nD. z\nAnswer: B\n\nQ2?\nA. w\nB. x\nC. y\nD. z\n'
                      'Answer:')
    assert question.options == [' A', ' B', ' C', ' D']
    assert question.category == 'STEM'
    (question,), _, _ = questions.load_task(f'mmlu:{tmp_path}', scoring='text')
    assert question.context == 'Q2?\nAnswer:' and question.options == [' w', ' x', ' y', ' z']
    with pytest.raises(DataError, match="2 solved questions about 'abstract_algebra', 5 wanted"):
        questions.load_task(f'mmlu:{tmp_path}', shots=5)
    with pytest.raises(DataError, match='is one file: give a folder'):
        questions.load_task(f'mmlu:{tmp_path / "test.jsonl"}', shots=5)


def test_dev_questions_are_not_scored(tmp_path):
    rows = [{'question': f'Q{i}?', 'choices': ['w', 'x'], 'answer': 0} for i in range(5)]
    write_rows(tmp_path / 'dev.jsonl', rows[:2])
    write_rows(tmp_path / 'mine.jsonl', rows[2:])
    asked, solved, _ = questions.load_task(str(tmp_path), shots=2)
    assert [q.context[:2] for q in asked] == ['Q2', 'Q3', 'Q4']
    assert [q.context[:2] for q in solved['', 'various things']] == ['Q0', 'Q1']


def test_an_archive_on_the_hub_is_unpacked(tmp_path, monkeypatch):
    """CMMLU's csv files with a header, in a zip file, subjects by file name."""
    def download(name, repo_type, revision, allow_patterns):
        assert (name, repo_type) == ('haonan-li/cmmlu', 'dataset') and '*.zip' in allow_patterns
        return str(tmp_path / 'snapshot')
    for split, n in (('dev', 2), ('test', 3)):
        path = tmp_path / 'content' / split / 'agronomy.csv'
        path.parent.mkdir(parents=True)
        path.write_text(',Question,A,B,C,D,Answer\n' + ''.join(
            f'{i},问题{split}{i},甲,乙,丙,丁,{"ABCD"[i]}\n' for i in range(n)))
    (tmp_path / 'snapshot').mkdir()
    shutil.make_archive(tmp_path / 'snapshot' / 'cmmlu_v1_0_1', 'zip', tmp_path / 'content')
    monkeypatch.setattr('huggingface_hub.snapshot_download', download)
    for _ in range(2):
        asked, solved, _ = questions.load_task('cmmlu', shots=2, header='native')
        assert [q.answer for q in asked] == [0, 1, 2] and len(solved['', 'agronomy']) == 2
        assert asked[0].header.startswith('以下是关于农学的') and asked[0].subject == 'agronomy'
        assert asked[1].context == '问题test1\nA. 甲\nB. 乙\nC. 丙\nD. 丁\n答案：'


@pytest.mark.parametrize('arguments, message', [
    (dict(preset='harness'), 'lets the model write its answer to mmlu_prox'),
    (dict(languages=('xx',)), "mmlu_prox has no language 'xx'; it has af, ar"),
    (dict(languages=('sw',)), 'holds nothing that matches sw/test-')])
def test_multilingual_refusals(tmp_path, arguments, message):
    row = {'question_id': 1, 'question': 'Q?', 'option_0': 'a', 'option_1': 'b', 'answer': 'B'}
    write_rows(tmp_path / 'de' / 'test-00000-of-00001.parquet', [row])
    with pytest.raises(DataError, match=message):
        questions.load_task(f'mmlu_prox:{tmp_path}', **arguments)
    (question,), _, _ = questions.load_task(f'mmlu_prox:{tmp_path}', header='native')
    assert question.language == 'de' and question.context.endswith('\nAntwort:')
    assert question.header == ('Im Folgenden sind Multiple-Choice-Fragen (mit Antworten) zu '
                               'various things.\n\n')
    with pytest.raises(DataError, match='mmlu publishes no header of its own'):
        questions.load_task(f'mmlu:{tmp_path}', header='native')


def test_original_csv_and_hub_parquet(tmp_path):
    (tmp_path / 'test').mkdir()
    (tmp_path / 'test' / 'high_school_physics_test.csv').write_text('\ufeff"Q, one?",a,b,c,d,D\n\n')
    (question,), _, _ = questions.load_task(f'mmlu:{tmp_path}')
    assert question.subject == 'high_school_physics' and question.answer == 3
    assert question.context.startswith('Q, one?\nA. a')
    rows = [{'question': 'Q?', 'subject': 's', 'choices': ['a', 'b', 'c', 'd'], 'answer': 1}]
    write_rows(tmp_path / 'hub' / 'all' / 'test-00000-of-00001.parquet', rows)
    assert questions.load_task(f'mmlu:{tmp_path / "hub"}')[0][0].answer == 1


@needs_shared
def test_real_benchmark_files():
    datasets = SHARED / 'datasets'
    mmlu, shots, bad = questions.load_task(f'mmlu:{datasets / "mmlu"}', shots=5)
    assert len(mmlu) == 14042 and len({q.subject for q in mmlu}) == 57 and not bad
    assert all(len(rows) == 5 for rows in shots.values()) and len(shots) == 57
    arc, _, _ = questions.load_task(f'arc_easy:{datasets / "arc_easy"}', shots=5)
    counts = np.bincount([len(q.options) for q in arc])
    assert counts[3:].tolist() == [7, 2365, 4]
    assert len(questions.load_task(f'arc_challenge:{datasets / "arc_easy"}')[0]) == 1172
    assert len(questions.load_task(f'hellaswag:{datasets / "hellaswag"}')[0]) == 1000


# ------------------------------------------------------------------------------------------------
# model.py against transformers
# ------------------------------------------------------------------------------------------------

LLAMA3_ROPE = {'rope_type': 'llama3', 'rope_theta': 10000.0, 'factor': 8.0, 'low_freq_factor': 1.0,
               'high_freq_factor': 4.0, 'original_max_position_embeddings': 32}
ARCHITECTURES = {
    'llama3': ('Llama', {'rope_parameters': LLAMA3_ROPE, 'head_dim': 18,
                         'tie_word_embeddings': True, 'max_position_embeddings': 4096}),
    'llama': ('Llama', {'num_key_value_heads': 4}),
    'mistral_window': ('Mistral', {'sliding_window': 7}),
    'mistral': ('Mistral', {'sliding_window': None, 'num_key_value_heads': 1}),
    'gemma2': ('Gemma2', {'sliding_window': 7, 'head_dim': 20, 'query_pre_attn_scalar': 13,
                          'attn_logit_softcapping': 2.0, 'final_logit_softcapping': 3.0,
                          'num_hidden_layers': 4}),
    'gemma2_untied': ('Gemma2', {'sliding_window': 33, 'tie_word_embeddings': False,
                                 'attn_logit_softcapping': None, 'final_logit_softcapping': None}),
}


def reference_model(name, folder, **more):
    """A small random model by transformers, saved into `folder`; `more`: other config keys."""
    import transformers
    kind, options = ARCHITECTURES[name]
    shape = {'vocab_size': 211, 'hidden_size': 48, 'intermediate_size': 80, 'num_hidden_layers': 3,
             'num_attention_heads': 4, 'num_key_value_heads': 2, 'attn_implementation': 'eager'}
    config = getattr(transformers, f'{kind}Config')(**(shape | options | more))
    torch.manual_seed(list(ARCHITECTURES).index(name))
    reference = getattr(transformers, f'{kind}ForCausalLM')(config).eval()
    with torch.no_grad():
        for p in reference.parameters():  # norms off their start, attention far from uniform
            p.copy_(torch.randn_like(p) * 0.25 + (p.ndim == 1 and kind != 'Gemma2'))
    reference.save_pretrained(folder)
    return reference


def whole_rows(tokens):
    """positions and ends of rows that hold one text each."""
    B, T = tokens.shape
    return torch.arange(T).expand(B, T), torch.full((B, T), T)


@pytest.mark.parametrize('name', ARCHITECTURES)
def test_parity_with_transformers(name, tmp_path):
    reference = reference_model(name, tmp_path)
    model = models.load(tmp_path)
    tokens = torch.randint(0, 211, (2, 45))
    logits = model.logits(model(tokens, *whole_rows(tokens)))
    expected = reference(tokens).logits
    error = (logits - expected).abs().max().item()
    assert error < 2e-4 and error < 1e-5 * expected.abs().max().item()
    targets = torch.randint(0, 211, (90,))
    for z in (logits, expected):
        F.cross_entropy(z.flatten(0, 1), targets).backward()
    theirs = dict(reference.named_parameters())
    assert theirs.keys() == dict(model.named_parameters()).keys()
    for key, parameter in model.named_parameters():
        gradient = theirs[key].grad
        assert (parameter.grad - gradient).norm() < 1e-4 * gradient.norm(), key


@pytest.mark.parametrize('name', ARCHITECTURES)
@pytest.mark.parametrize('shard_bytes', [10**9, 40_000])
def test_saved_folder_loads_in_transformers(name, shard_bytes, tmp_path, monkeypatch):
    import transformers
    monkeypatch.setattr(models, 'SHARD_BYTES', shard_bytes)
    reference = reference_model(name, tmp_path / 'theirs')
    model = models.load(tmp_path / 'theirs')
    models.save(model, tmp_path / 'ours', torch.float32, tmp_path / 'theirs')
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / 'ours',
                                                              attn_implementation='eager')
    tokens = torch.randint(0, 211, (1, 45))
    assert torch.equal(again(tokens).logits, reference(tokens).logits)
    weights = models.load(tmp_path / 'ours').state_dict()
    assert all(torch.equal(weights[k], v) for k, v in model.state_dict().items())
    files = {path.name for path in (tmp_path / 'ours').iterdir()}
    assert 'generation_config.json' in files and not any(f.endswith('.tmp') for f in files)
    assert ('model.safetensors' in files) == (shard_bytes == 10**9)
    models.save(model, tmp_path / 'ours', torch.bfloat16)  # over the other layout
    assert models.load(tmp_path / 'ours').head.dtype == torch.bfloat16


def test_sharded_index_of_transformers(tmp_path):
    reference = reference_model('llama', tmp_path / 'one')
    reference.save_pretrained(tmp_path / 'many', max_shard_size='30KB')
    assert len(list((tmp_path / 'many').glob('*.safetensors'))) > 2
    one, many = models.load(tmp_path / 'one'), models.load(tmp_path / 'many')
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), many.parameters(), strict=True))


def test_config_of_transformers_4_and_5():
    old = {'model_type': 'llama', 'vocab_size': 9, 'hidden_size': 8, 'intermediate_size': 8,
           'num_hidden_layers': 1, 'num_attention_heads': 2, 'rope_theta': 500000.0,
           'rope_scaling': LLAMA3_ROPE, 'torch_dtype': 'bfloat16', 'pad_token_id': 5}
    new = {k: v for k, v in old.items() if k not in ('rope_theta', 'rope_scaling', 'torch_dtype')}
    new |= {'rope_parameters': LLAMA3_ROPE | {'rope_theta': 500000.0}, 'dtype': 'bfloat16'}
    a = models.ModelConfig.from_hf(old | {'rope_scaling': {k: v for k, v in LLAMA3_ROPE.items()
                                                           if k != 'rope_theta'}})
    b = models.ModelConfig.from_hf(new)
    assert a.rope_theta == b.rope_theta == 500000.0 and a.dtype == b.dtype == 'bfloat16'
    assert a.num_key_value_heads == 2 and a.head_dim == 4 and a.extra == {'pad_token_id': 5}
    assert models.ModelConfig.from_hf(a.to_hf()) == a


def test_keys_of_other_architectures_mean_nothing():
    raw = {'model_type': 'llama', 'vocab_size': 9, 'hidden_size': 8, 'intermediate_size': 8,
           'num_hidden_layers': 2, 'num_attention_heads': 2, 'sliding_window': 4,
           'attn_logit_softcapping': 5.0}
    config = models.ModelConfig.from_hf(raw)
    assert config.windows == [None, None] and config.attn_logit_softcapping is None


def test_mistral_window_missing_or_null():
    raw = {'model_type': 'mistral', 'vocab_size': 9, 'hidden_size': 8, 'intermediate_size': 8,
           'num_hidden_layers': 2, 'num_attention_heads': 2}
    assert models.ModelConfig.from_hf(raw).windows == [4096, 4096]
    assert models.ModelConfig.from_hf(raw | {'sliding_window': None}).windows == [None, None]
    gemma = models.ModelConfig.from_hf(raw | {'model_type': 'gemma2'})
    assert gemma.windows == [4096, None] and gemma.tie_word_embeddings and gemma.head_dim == 256


def test_llama3_rope_golden():
    config = models.ModelConfig('llama', 9, 2048, 8, 1, 32, rope_theta=500000.0, rope_scaling={
        'factor': 32.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0,
        'original_max_position_embeddings': 8192})
    cos, sin = models.rotary_angles(torch.ones(1, 1, dtype=torch.long), config, torch.float32)
    angle = torch.atan2(sin, cos)[0, 0, 0]
    ratio = angle / 500000.0 ** (-torch.arange(0, 64, 2) / 64)
    expected = [1.0] * 15 + [0.605573, 0.303742, 0.103448] + [1 / 32] * 14
    assert torch.allclose(ratio, torch.tensor(expected), rtol=2e-5)


def test_embedding_scale_is_rounded_like_the_weights():
    config = models.ModelConfig('gemma2', 9, 3584, 8, 1, 2, head_dim=4)
    with torch.device('meta'):
        model = models.CausalLM(config)
    decoder = model.model.to_empty(device='cpu')
    seen = {}
    decoder.layers[0].register_forward_pre_hook(lambda m, args: seen.update(x=args[0]))
    for dtype, scale in ((torch.float32, 3584 ** 0.5), (torch.bfloat16, 59.75)):
        decoder.to(dtype)
        torch.nn.init.ones_(decoder.embed_tokens.weight)
        decoder(torch.zeros(1, 1, dtype=torch.long), *whole_rows(torch.zeros(1, 1)))
        assert seen['x'].flatten()[0].item() == pytest.approx(scale, rel=1e-6)


@pytest.mark.parametrize('name', ARCHITECTURES)
def test_packed_documents_do_not_see_each_other(name, tmp_path):
    reference_model(name, tmp_path)
    model = models.load(tmp_path)
    rng = np.random.default_rng(0)
    documents = [(rng.integers(0, 211, n), np.ones(n, int)) for n in (11, 40, 3, 29, 1, 17)]
    packed = packing.pack(documents, 48)
    hidden = model(*(torch.from_numpy(packed[k]) for k in ('tokens', 'positions', 'ends')))
    for i, (tokens, _) in enumerate(documents):
        alone = torch.from_numpy(tokens)[None]
        row, at = np.nonzero(packed['owner'] == i)
        assert torch.allclose(hidden[row, at], model(alone, *whole_rows(alone))[0], atol=2e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
@pytest.mark.parametrize('name', ['llama3', 'mistral_window', 'gemma2'])
def test_flex_attention_equals_the_explicit_mask(name, tmp_path):
    reference_model(name, tmp_path, head_dim=32)  # FlexAttention wants a power of two
    model = models.load(tmp_path, 'cuda')
    rng = np.random.default_rng(0)
    documents = [(rng.integers(0, 211, n), np.ones(n, int)) for n in (90, 40, 3, 100)]
    packed = packing.pack(documents, 128)
    inputs = [torch.from_numpy(packed[k]).cuda() for k in ('tokens', 'positions', 'ends')]
    gradients, outputs = [], []
    for kind in ('explicit', 'flex'):
        model.model.attention = kind
        hidden = model(*inputs)
        slope = torch.linspace(-1, 1, hidden.numel(), device='cuda')
        (hidden.flatten() * slope).sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        outputs.append(hidden.detach())
        model.zero_grad()
    assert torch.allclose(*outputs, atol=1e-4)
    for a, b in zip(*gradients, strict=True):
        assert (a - b).norm() < 1e-3 * a.norm()


@pytest.fixture
def checkpoint(tmp_path):
    reference_model('llama', tmp_path / 'model')
    return tmp_path / 'model'


def rewrite(folder, change):
    tensors = load_file(folder / 'model.safetensors')
    change(tensors)
    save_file(tensors, folder / 'model.safetensors', metadata={'format': 'pt'})


def edit_config(folder, **values):
    path = folder / 'config.json'
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def write_index(folder, name):
    (folder / 'model.safetensors.index.json').write_text(json.dumps(
        {'weight_map': {'model.norm.weight': name}}))


KEY = 'model.layers.1.mlp.up_proj.weight'


@pytest.mark.parametrize('damage, message', [
    (lambda f: rewrite(f, lambda t: t.pop(KEY)), f'tensor {KEY} is missing'),
    (lambda f: rewrite(f, lambda t: t.update(odd=torch.ones(1))), 'tensor odd is unknown'),
    (lambda f: rewrite(f, lambda t: t.update({KEY: torch.ones(2, 3)})),
     f'tensor {KEY} has shape [2, 3], config.json wants [80, 48]'),
    (lambda f: rewrite(f, lambda t: t.update({KEY: torch.ones(80, 48, dtype=torch.int8)})),
     'quantised weights are not supported'),
    (lambda f: os.truncate(f / 'model.safetensors', 5000), 'truncated or not a safetensors file'),
    (lambda f: (f / 'model.safetensors').unlink(), 'has no model.safetensors'),
    (lambda f: (f / 'config.json').unlink(), 'is not a model folder: it has no config.json'),
    (lambda f: (f / 'config.json').write_text('{'), 'not valid JSON'),
    (lambda f: (f / 'config.json').write_text('{"model_type": "llama"}'), 'vocab_size'),
    (lambda f: edit_config(f, model_type='gpt2'), "model_type is 'gpt2'"),
    (lambda f: (f / 'config.json').write_text('[]'), 'model_type is None'),
    (lambda f: edit_config(f, hidden_size=None), 'hidden_size is None; wanted an int'),
    (lambda f: edit_config(f, hidden_act='gelu_pytorch_tanh'), "llama has 'silu'"),
    (lambda f: edit_config(f, rope_parameters={'rope_type': 'llama3'}), 'rope scaling without'),
    (lambda f: edit_config(f, attention_bias=True), 'attention_bias = True is not supported'),
    (lambda f: edit_config(f, rope_parameters={'rope_type': 'yarn'}), "rope type 'yarn'"),
    (lambda f: write_index(f, '../model.safetensors'), "refuses '../model.safetensors'"),
    (lambda f: write_index(f, '/etc/passwd'), "refuses '/etc/passwd'"),
    (lambda f: write_index(f, 'gone.safetensors'), 'names gone.safetensors, which is not there'),
])
def test_damaged_checkpoints(checkpoint, damage, message):
    damage(checkpoint)
    with pytest.raises(models.CheckpointError) as error:
        models.load(checkpoint)
    assert message in str(error.value) and str(checkpoint) in str(error.value)


def test_pickled_weights_are_not_read(checkpoint):
    torch.save({}, checkpoint / 'pytorch_model.bin')
    (checkpoint / 'model.safetensors').unlink()
    with pytest.raises(models.CheckpointError, match='convert them to safetensors'):
        models.load(checkpoint)


def test_old_rotary_buffers_are_ignored(checkpoint):
    rewrite(checkpoint, lambda t: t.update(
        {'model.layers.0.self_attn.rotary_emb.inv_freq': torch.ones(6)}))
    models.load(checkpoint)


def test_unreachable_models():
    for name, message in (('/nowhere', 'no model folder at /nowhere'),
                          ('google/gemma-2-2b', 'getting google/gemma-2-2b from the hub failed')):
        with pytest.raises(models.CheckpointError, match=message):
            models.fetch(name)


def test_a_model_in_the_hub_cache_is_found(checkpoint, tmp_path, monkeypatch):
    snapshot = tmp_path / 'hub' / 'models--some--model' / 'snapshots' / ('a' * 40)
    snapshot.parent.mkdir(parents=True)
    shutil.copytree(checkpoint, snapshot)
    refs = tmp_path / 'hub' / 'models--some--model' / 'refs'
    refs.mkdir()
    (refs / 'main').write_text('a' * 40)
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_CACHE', str(tmp_path / 'hub'))
    assert models.fetch('some/model') == snapshot


# Prints by how many kB loading a model raises the process's own memory. The mapped file does not
# count: its pages can be dropped at any time.
WATCHED_LOAD = """
import re, sys, threading, time, torch, model

def held():
    return int(re.search(r'RssAnon:\\s+(\\d+)', open('/proc/self/status').read())[1])

def watch():
    while True:
        peaks.append(held())
        time.sleep(0.001)

with torch.device('meta'):  # imports what it needs on its first use
    model.CausalLM(model.read_config(sys.argv[1]))
before, peaks = held(), []
threading.Thread(target=watch, daemon=True).start()
loaded = model.load(sys.argv[1])
print(max([*peaks, held()]) - before)
"""


@pytest.mark.skipif(not Path('/proc/self/status').exists(), reason='needs /proc')
def test_loading_holds_one_copy(tmp_path):
    # many tensors of 4 MB: none of them is a large part of the whole
    config = models.ModelConfig('llama', 4000, 1024, 2048, 16, 16, dtype='bfloat16')
    model = models.CausalLM(config).to(torch.bfloat16)
    models.save(model, tmp_path, torch.bfloat16)
    grown = int(subprocess.run([sys.executable, '-c', WATCHED_LOAD, tmp_path], text=True,
                               stdout=subprocess.PIPE, cwd=HERE, check=True).stdout) * 1024
    size = sum(p.numel() for p in model.parameters()) * 2
    assert 0.9 * size < grown < 1.3 * size


# ------------------------------------------------------------------------------------------------
# optim.py
# ------------------------------------------------------------------------------------------------

ONE = torch.tensor(1.0)


def moves(kind, steps=1000, n=4096, gradient=None, lr=5e-6):
    """How far each of n weights moved in `steps` of AdamW; kind says in what precision."""
    start = (torch.randn(n, generator=torch.Generator().manual_seed(3)) * 0.02).bfloat16()
    half = kind in ('exact', 'stochastic', 'plain bfloat16')
    p = torch.nn.Parameter(start.clone() if half else start.to(
        torch.float64 if kind == 'float64' else torch.float32))
    options = {'lr': lr, 'weight_decay': 0.01}
    ours = kind in ('exact', 'stochastic', 'float32')
    optimizer = (AdamW([p], stochastic=kind == 'stochastic', **options) if ours else
                 torch.optim.AdamW([p], **options))
    noise = torch.Generator().manual_seed(1)
    slope = torch.randn(n, generator=noise) * 0.3
    for _ in range(steps):
        g = slope + torch.randn(n, generator=noise)
        if gradient:
            g = g + gradient(p.detach().double(), start.double()).float()
        p.grad = g.bfloat16().to(p.dtype)
        optimizer.step(*([ONE] if ours else []))
    return (optimizer.master(p) if ours else p).detach().double() - start.double()


@pytest.mark.parametrize('gradient', [None, lambda w, start: 3e2 * (w - start)])
def test_bfloat16_weights_follow_the_float32_run(gradient):
    """1000 steps at lr 5e-6, on given gradients and on such as depend on the weights."""
    right = moves('float64', gradient=gradient)
    def error(kind):
        return ((moves(kind, gradient=gradient) - right).norm() / right.norm()).item()
    assert error('float32') < 2e-3
    assert error('exact') < (2e-3 if gradient is None else 0.1)
    assert error('stochastic') < 0.5
    assert error('plain bfloat16') > 0.6
    # what stochastic rounding loses is noise, not progress
    moved = moves('stochastic', gradient=gradient)
    assert moved @ right / (right @ right) == pytest.approx(1, abs=0.05)
    plain = moves('plain bfloat16', gradient=gradient)
    assert plain @ right / (right @ right) < 0.4


def test_exact_master_is_the_float32_run_bit_for_bit():
    assert torch.equal(moves('exact', 200), moves('float32', 200))
    ours, theirs = moves('float32', 200), moves('torch float32', 200)
    assert (ours - theirs).norm() < 1e-5 * theirs.norm()


def test_master_bits():
    """Both halves of every kind of float32 come back; the upper one is the nearest bfloat16."""
    bits = torch.randint(-2 ** 31, 2 ** 31, (100_000,), dtype=torch.int64).int()
    bits = torch.cat((bits, bits & ~0xffff, (bits & ~0xffff) | 0x8000, bits & 0x7fffff))
    x = bits.view(torch.float32)
    x = x[x.isfinite() & (x.abs() < 1e38)].clone()
    bits = x.view(torch.int32)
    high = (bits + 0x8000) >> 16            # ties away from zero, or the rest would not fit int16
    p = torch.nn.Parameter(high.short().view(torch.bfloat16))
    assert torch.equal(p.data[bits & 0xffff != 0x8000], x.bfloat16()[bits & 0xffff != 0x8000])
    optimizer = AdamW([p], lr=0.0)
    optimizer.state[p]['low_bits'].copy_(bits - (high << 16))
    assert torch.equal(optimizer.master(p), x)
    p.grad = torch.zeros_like(p)
    optimizer.step(ONE)
    assert torch.equal(optimizer.master(p), x)
    assert torch.equal(p.data.view(torch.int16), high.short())


def test_stochastic_rounding_is_right_on_average():
    x = torch.tensor([1.0, 1.0 + 2 ** -9, -(1.0 + 3 * 2 ** -10), 3e-39, 0.0]).repeat(100_000, 1)
    index = torch.arange(x.numel(), dtype=torch.int32).view_as(x)
    rounded = optim._round(x, optim._noise(index, torch.tensor(12345).int())).double()
    assert ((rounded == 1).all(0) == torch.tensor([True, False, False, False, False])).all()
    assert torch.allclose(rounded.mean(0), x[0].double(), rtol=1e-4)
    assert len(rounded[:, 1].unique()) == 2 and (rounded[:, 4] == 0).all()


def test_rounding_noise_is_random():
    """Along the weights, and for one weight along the steps, whose seeds are hashes."""
    seeds = [hash((0, step, 3, 0)) % 2 ** 31 for step in range(2 ** 12)]
    along_steps = optim._noise(torch.tensor(77).int(), torch.tensor(seeds).int())
    for noise in (optim._noise(torch.arange(2 ** 20).int(), torch.tensor(seed).int())
                  for seed in (0, 1, seeds[5])):
        check_random(noise)
    for index in (0, 1, 12345):
        check_random(optim._noise(torch.tensor(index).int(), torch.tensor(seeds).int()))
    assert len(along_steps.unique()) > 4000


def check_random(noise):
    n = len(noise)
    parts = [((noise >> shift) & 0xffff).double() / 0xffff - 0.5 for shift in (0, 8, 16)]
    for x in parts:
        assert abs(x.mean()) < 5 * (1 / 12 / n) ** 0.5
        assert x.var().item() == pytest.approx(1 / 12, rel=5 * (0.8 / n) ** 0.5)
        for lag in (1, 2, 3, 64, 1024):     # neighbours, and rows of a matrix
            assert abs((x[lag:] * x[:-lag]).mean()) * 12 < 5 / (n - lag) ** 0.5, lag
    for a, b in itertools.combinations(parts, 2):
        assert abs((a * b).mean()) * 12 < 0.01 + 5 / n ** 0.5


def test_gradients_of_micro_batches_are_summed_in_float32():
    p = torch.nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))
    parts = torch.randn(32, 1000).bfloat16()
    exact = parts.double().sum(0)
    def error(stochastic):
        optimizer = AdamW([p], lr=0.0, stochastic=stochastic)
        for _ in range(2):      # the second step must begin from nothing
            optimizer.begin(len(parts))
            for part in parts:
                (p * part).sum().backward()
            [total] = [g.double() for g in optimizer.gradients()]
            optimizer.step(ONE)
        assert p.grad is None and not any(s.any() for s in optimizer.sums.values())
        return ((total - exact).norm() / exact.norm()).item()
    assert error(stochastic=True) > 1e-3        # before the hook of the other one is there
    assert error(stochastic=False) < 1e-6


@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
@pytest.mark.parametrize('dtype, stochastic', [(torch.float32, False), (torch.bfloat16, False),
                                               (torch.bfloat16, True)])
def test_optimizer_on_the_gpu(dtype, stochastic):
    ends = []
    for device in ('cpu', 'cuda'):
        make = torch.Generator().manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(*shape, generator=make).to(device, dtype))
                  for shape in ((64, 100), (7,), (1000, 33))]
        optimizer = AdamW(params, lr=1e-3, weight_decay=0.1, stochastic=stochastic)
        for _ in range(5):
            for p in params:
                p.grad = torch.randn(p.shape, generator=make).to(device, dtype)
            optimizer.step(ONE.to(device) / 3)
        ends.append(torch.cat([optimizer.master(p).cpu().flatten() for p in params]))
    # rounding at random may fall on the other side where the last bit of an update differs
    differ = (ends[0] - ends[1]).abs() > 1e-6
    assert differ.double().mean() < (0.01 if stochastic else 1e-9)


# ------------------------------------------------------------------------------------------------
# train.py
# ------------------------------------------------------------------------------------------------

def tiny_config(**values):
    return train.TrainConfig(**({'dtype': 'float32', 'pack_len': 48, 'device': 'cpu'} | values))


@pytest.fixture(scope='module')
def tiny_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp('tiny')
    reference_model('gemma2', folder)
    return models.load(folder)


def documents(seed, lengths):
    rng = np.random.default_rng(seed)
    return [(rng.integers(0, 211, n), (np.arange(n) > n // 3).astype(int)) for n in lengths]


def gradients(model, packed, cfg):
    model.zero_grad()
    loss, nll = train.forward_backward(model, packed, cfg, 'cpu').tolist()
    return loss, nll, torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize('reduction', ['token', 'sequence'])
def test_micro_batches_change_nothing(tiny_model, reduction):
    packed = packing.pack(documents(0, [40, 7, 25, 30, 44, 12, 9]), 48)
    results = [gradients(tiny_model, packed, tiny_config(
        micro_rows=n, smoothing=0.1, loss_reduction=reduction)) for n in (1, 2, 100)]
    for loss, _, gradient in results[1:]:
        assert loss == pytest.approx(results[0][0], rel=1e-6)
        assert (gradient - results[0][2]).norm() < 1e-5 * gradient.norm()


@pytest.mark.parametrize('reduction', ['token', 'sequence'])
def test_packed_step_equals_unpacked_sequences(tiny_model, reduction):
    sequences = documents(1, [40, 7, 25, 30])
    loss, nll, gradient = gradients(tiny_model, packing.pack(sequences, 48), tiny_config(
        smoothing=0.1, loss_reduction=reduction))
    tiny_model.zero_grad()
    cap = tiny_model.config.final_logit_softcapping
    losses, nlls = [], []
    for tokens, learnt in sequences:
        row = torch.from_numpy(tokens)[None]
        z = tiny_model.logits(tiny_model(row, *whole_rows(row)))[0, :-1]
        assert cap == 3.0 and z.abs().max() < cap
        kept = torch.from_numpy(learnt[1:]) > 0
        losses.append(F.cross_entropy(z[kept], row[0, 1:][kept], label_smoothing=0.1,
                                      reduction='none'))
        nlls.append(F.cross_entropy(z[kept], row[0, 1:][kept], reduction='none'))
    def mean(rows):
        return torch.cat(rows).mean() if reduction == 'token' else torch.stack(
            [r.mean() for r in rows]).mean()
    mean(losses).backward()
    expected = torch.cat([p.grad.flatten() for p in tiny_model.parameters()])
    assert loss == pytest.approx(mean(losses).item(), rel=1e-5)
    assert nll == pytest.approx(mean(nlls).item(), rel=1e-5)
    assert (gradient - expected).norm() < 1e-5 * expected.norm()


def test_dropout(tmp_path, monkeypatch):
    reference_model('mistral_window', tmp_path)
    tokens = torch.randint(0, 211, (1, 30))
    plain = models.load(tmp_path)(tokens, *whole_rows(tokens))
    for rates in ((0.5, 0.0), (0.0, 0.5)):
        model = models.load(tmp_path, 'cpu', None, *rates)
        assert torch.equal(model.eval()(tokens, *whole_rows(tokens)), plain)
        a, b = (model.train()(tokens, *whole_rows(tokens)) for _ in range(2))
        assert not torch.allclose(a, b) and not torch.allclose(a, plain)
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    with pytest.raises(configs.ConfigError, match='does not work with FlexAttention'):
        train.check(tiny_config(attn_dropout=0.1, max_length=48, device='cuda'))


def test_learning_rate_schedule():
    cfg = tiny_config(lr=1.0, warmup=0.1, final_lr=0.1)
    rates = [train.learning_rate(s, 100, cfg) for s in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == pytest.approx(1.0)
    assert rates[10] == pytest.approx(1.0) and rates[55] == pytest.approx(0.1 + 0.9 * 0.5)
    assert all(a >= b for a, b in zip(rates[9:], rates[10:])) and 0.1 < rates[99] < 0.12
    cosine = dataclasses.replace(cfg, schedule='cosine')
    assert train.learning_rate(55, 100, cosine) == pytest.approx(0.55)
    assert train.learning_rate(0, 1, cfg) == 1.0


def test_a_world_of_languages(tmp_path):
    spec = WorldSpec(entities=400, unseen=30, first_names=30, family_names=40, documents=300,
                     exam_share=0.3, list_share=0.3, paraphrases=True, vocab_sizes=(600, 700),
                     language_shares=(0.5, 0.3, 0.2), instructions=100, questions=20,
                     unseen_questions=10, validation=15, forms=('text4', 'letters10'), probes=30)
    make_world(tmp_path, 0, spec)
    # a change of these bytes asks for new runs of the study
    digest = hashlib.sha256(b''.join(p.read_bytes() for p in sorted(tmp_path.rglob('*.jsonl'))))
    assert digest.hexdigest().startswith('bf749dedab46cc5ef9468a4c80de6b79b93ac74279ea2594')
    rows = {str(p.relative_to(tmp_path)): [json.loads(x) for x in p.open()]
            for p in tmp_path.rglob('*.jsonl')}
    text = '\n'.join(row['text'] for row in rows['text.jsonl'])
    world = World(spec, 0)
    assert len(set(world.names)) == 430 and world.names[0] in text
    assert not any(name in text for name in world.names[400:])
    words = [{w for values in language.values.values() for w in values}
             for language in world.languages]
    assert not (words[0] & words[1] or words[0] & words[2] or words[1] & words[2])
    for some in words:      # the text is in all languages, the instructions in one
        assert sum(w in text for w in some) > 0.9 * len(some)
    told = json.dumps(rows['instruct.jsonl'])
    assert not any(re.search(rf'\b{w}\b', told) for w in words[1] | words[2])
    assert len({len(r['messages']) for r in rows['instruct.jsonl']}) == 2
    assert sum('\nJ. ' in r['messages'][0]['content'] for r in rows['instruct.jsonl']) > 3
    plain = rows['instruct-homogeneous.jsonl']
    assert len(plain) == 100 and all(r['messages'][1]['content'].startswith('Answer: ')
                                     for r in plain)
    # the same facts in all languages, with the same options; the answers are true
    for form, n in (('text4', 4), ('letters10', 10)):
        questions, _, bad = load_task(str(tmp_path / form), scoring='text')
        assert len(questions) == 3 * 30 and not bad
        assert collections.Counter((q.language, q.category) for q in questions) == {
            (lang, c): k for lang in ('en', 'l1', 'l2') for c, k in (('seen', 20), ('unseen', 10))}
        held = load_task(str(tmp_path / form), scoring='text', split='validation')[0]
        assert len(held) == 15 and {q.language for q in held} == {'en'}
        by_fact = collections.defaultdict(set)
        for row in rows[f'{form}/test.jsonl']:
            code, entity, attribute = row['id'].split('-')
            by_fact[entity, attribute].add((row['answer'], len(row['choices'])))
            language = next(x for x in world.languages if x.code == code)
            value = world.value(language, int(entity), attribute)
            right = row['choices'][row['answer']]
            assert right == value if form == 'text4' else (
                f'\n{right}. {value}\n' in row['question'] + '\n')
        assert all(len(x) == 1 and next(iter(x))[1] == n for x in by_fact.values())
    asked = {tuple(r['id'].split('-')[1:]) for r in rows['text4/test.jsonl']}
    held = {tuple(r['id'].split('-')[1:]) for r in rows['text4/validation.jsonl']}
    assert not asked & held
    for row in rows['facts.jsonl']:
        found = {row['text'][a:b] for a, b in row['spans']}
        assert len(found) == 4 and any(found <= some for some in words)
    for size in (600, 700):
        folder = tmp_path / f'model-{size}'
        assert load_tokenizer(folder).n_vocab == models.read_config(folder).vocab_size == size
    # what is there stays; another spec replaces it
    before = (tmp_path / 'text.jsonl').stat().st_mtime_ns
    make_world(tmp_path, 0, spec)
    assert (tmp_path / 'text.jsonl').stat().st_mtime_ns == before
    make_world(tmp_path, 1, spec)
    assert (tmp_path / 'text.jsonl').stat().st_mtime_ns != before
    with pytest.raises(ValueError, match='make 16 names, not 20'):
        World(WorldSpec(entities=20, first_names=4, family_names=4), 0)


def test_the_demo_world_stays_what_it_is(tmp_path):
    # the figures in the README are of these bytes
    make_world(tmp_path, 0)
    digest = hashlib.sha256(b''.join((tmp_path / name).read_bytes() for name in (
        'text.jsonl', 'instruct.jsonl', 'questions.jsonl'))).hexdigest()
    assert digest.startswith('24904f557868b7b2763899dae6c2adb9e918caab')


@pytest.fixture(scope='session')
def small_world(tmp_path_factory):
    """The demo's road with a smaller world and few steps; the folder that it left."""
    folder = tmp_path_factory.mktemp('demo')
    small = {'entities': 300, 'documents': 400, 'instructions': 60, 'questions': 40}
    done = subprocess.run([sys.executable, 'train.py', 'configs/demo.py', f'--out_dir={folder}',
                           *(f'--world.{name}={value}' for name, value in small.items()),
                           '--checkpoint_epochs', '--seed=7', '--val_size=4', '--workers=1',
                           *(f'--runs.{run}.{value}' for run in ('base', 'tuned', 'tuned_ls01')
                             for value in ('batch_size=16', 'epochs=1.5'))],
                          cwd=HERE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def test_demo_leaves_a_report(small_world):
    folder, printed = small_world
    for word in ('95 % interval', 'confidence', 'entropy (bits)', 'ECE', 'RMSCE', '>>>Answer: ',
                 'learnt between', 'estimated memory'):
        assert word in printed, word
    assert (folder / 'reliability-questions.png').read_bytes().startswith(b'\x89PNG')
    for run in ('base', 'tuned', 'tuned_ls01'):
        files = {str(p.relative_to(folder / run)) for p in (folder / run).rglob('*') if p.is_file()}
        assert {'config.json', 'model.safetensors', 'tokenizer.model', 'log.jsonl', 'results.json',
                'results.md', 'results.csv', 'train_config.py', 'samples.jsonl', 'reliability.png',
                'epoch-1/model.safetensors', 'epoch-1/tokenizer.model'} <= files
        log = [json.loads(line) for line in (folder / run / 'log.jsonl').open()]
        assert [r['step'] for r in log] == list(range(1, len(log) + 1))
        assert all(r['nll'] <= r['loss'] + 1e-6 or run == 'tuned_ls01' for r in log)
        assert 'val_nll' in log[-1]
        assert not list((folder / run).rglob('*.tmp'))
    losses = [json.loads(line)['nll'] for line in (folder / 'base' / 'log.jsonl').open()]
    assert losses[-1] < 0.8 * losses[0]


def test_results_follow_from_the_samples(small_world):
    folder, _ = small_world
    written = json.loads((folder / 'tuned' / 'results.json').read_text())
    samples = results.read_samples(folder / 'tuned' / 'samples.jsonl')
    assert len(samples) == 40
    found = results.predictions(samples, 'token')
    pooled = written['tasks']['questions']['pooled']
    report = metrics.report(found.probs, found.labels, found.n_options)
    assert report == pytest.approx({key: pooled[key] for key in report})
    assert written['distribution'] == 'mmlu, 0 shots, text, token'
    again = results.summarize(samples[::-1], 'token', seed=7)
    assert {k: written['tasks']['questions'][k] for k in again} == again
    for key, (low, high) in pooled['intervals'].items():
        assert low <= high and (key in ('mce', 'ece', 'sce', 'ace', 'ece_equal_mass')  # biased
                                or low <= pooled[key] <= high), key


def test_demo_folder_loads_in_transformers(small_world):
    import transformers
    folder = small_world[0] / 'tuned'
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model = models.load(folder)
    tokens = torch.randint(0, 1280, (1, 50))
    ours = model.logits(model(tokens, *whole_rows(tokens)))
    assert torch.allclose(ours, reference(tokens).logits, atol=1e-4)


def test_the_same_seed_gives_the_same_weights(small_world, tmp_path):
    folder, _ = small_world
    for place in ('a', 'b'):
        train.main([str(folder / 'tuned_ls01' / 'train_config.py'), f'--out_dir={tmp_path / place}',
                    '--max_steps=2', '--eval_tasks='])
    a, b = (load_file(tmp_path / place / 'model.safetensors') for place in 'ab')
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_add_bos_is_remembered(small_world, tmp_path):
    folder, _ = small_world
    assert evaluate.trained_with_bos(folder / 'tuned') and evaluate.trained_with_bos(tmp_path)
    train.main([str(folder / 'tuned' / 'train_config.py'), f'--out_dir={tmp_path}',
                '--max_steps=1', '--eval_tasks=', '--add_bos=False'])
    assert not evaluate.trained_with_bos(tmp_path)


def test_a_new_run_clears_the_folder(small_world, tmp_path):
    folder, _ = small_world
    again = tmp_path / 'again'
    shutil.copytree(folder / 'tuned', again)
    train.main([str(folder / 'tuned' / 'train_config.py'), f'--out_dir={again}', '--overwrite',
                '--max_steps=1', '--eval_tasks='])
    assert not (again / 'epoch-1').exists() and not (again / 'results.json').exists()
    assert len((again / 'log.jsonl').read_text().splitlines()) == 1


def test_dry_run_writes_nothing(small_world, tmp_path, capsys):
    folder, _ = small_world
    train.main([str(folder / 'tuned' / 'train_config.py'), '--dry_run',
                f'--out_dir={tmp_path / "run"}'])
    assert not (tmp_path / 'run').exists()
    assert 'estimated memory' in capsys.readouterr().out


def test_a_steps_time_is_without_validation(small_world, tmp_path, monkeypatch):
    clock, hours = time.perf_counter, []
    monkeypatch.setattr(time, 'perf_counter', lambda: clock() + 3600 * len(hours))
    monkeypatch.setattr(train, 'validation_loss',
                        lambda *_: hours.append(1) or {'val_nll': 0.0, 'val_ece': 0.0})
    train.main([str(small_world[0] / 'tuned' / 'train_config.py'), f'--out_dir={tmp_path}',
                '--max_steps=4', '--val_every=1', '--eval_tasks=', '--device=cpu'])
    records = [json.loads(line) for line in (tmp_path / 'log.jsonl').open()]
    assert len(hours) == 4 and all(0 < r['tokens'] / r['tokens_per_s'] < 3600 for r in records)


def test_a_nan_loss_stops_the_run(small_world, tmp_path):
    folder, _ = small_world
    with pytest.raises(train.TrainingError, match=r'step 1: loss nan.* the sequences were \[\d+, .*'
                       'there is no checkpoint yet'):
        broken = tmp_path / 'broken'
        shutil.copytree(folder / 'base', broken)
        rewrite(broken, lambda t: t['model.norm.weight'].fill_(torch.nan))
        train.main([str(folder / 'tuned' / 'train_config.py'), f'--model={broken}',
                    f'--out_dir={tmp_path / "run"}'])
    assert not (tmp_path / 'run' / 'model.safetensors').exists()


def run_train(*arguments, limit=None, wait=True):
    """train.py in a process of its own; `limit`: the largest file it can write, in bytes."""
    def restrict():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    process = subprocess.Popen([sys.executable, 'train.py', *map(str, arguments)], cwd=HERE,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               preexec_fn=restrict if limit else None)
    if not wait:
        return process
    printed, errors = process.communicate()
    return process.returncode, printed, errors.strip().split('\n')[-1]


def steps_done(folder):
    log = folder / 'log.jsonl'
    return len(log.read_text().splitlines()) if log.exists() else 0


def await_steps(process, folder, n):
    """Waits until `n` steps are logged, or the process has ended."""
    while process.poll() is None and steps_done(folder) < n:
        time.sleep(0.01)


def same_weights(a, b):
    a, b = (load_file(folder / 'model.safetensors') for folder in (a, b))
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.fixture(scope='module')
def long_run(small_world, tmp_path_factory):
    """(arguments of a run whose every random state matters, the folder of it undisturbed)"""
    folder = tmp_path_factory.mktemp('long') / 'whole'
    arguments = [small_world[0] / 'tuned' / 'train_config.py', '--eval_tasks=', '--epochs=80',
                 '--save_every=7', '--resid_dropout=0.1', '--attn_dropout=0.1', '--val_every=1000',
                 '--checkpoint_epochs=False', '--device=cpu']
    code, _, error = run_train(*arguments, f'--out_dir={folder}')
    assert code == 0, error
    return arguments, folder


def test_ten_kills_change_nothing(long_run, tmp_path):
    arguments, whole = long_run
    chance = random.Random()
    kills, out = 0, tmp_path / 'run'
    while kills < 10:
        process = run_train(*arguments, f'--out_dir={out}', '--resume', wait=False)
        before = steps_done(out)
        # at any moment: sometimes before the first step, mostly during or after a few of them
        await_steps(process, out, 1 if before == 0 else 0)
        if chance.random() < 0.8:
            found = list(resume.checkpoints(out))
            await_steps(process, out, max([before, *found]) + 1 if before else 1)
        time.sleep(chance.uniform(0, 0.4))
        process.kill()
        process.communicate()
        kills += 1
        assert len(resume.checkpoints(out)) <= 2 or (out / 'config.json').exists()
    code, _, error = run_train(*arguments, f'--out_dir={out}', '--resume')
    assert code == 0, error
    assert same_weights(out, whole)
    records = [[{k: v for k, v in json.loads(line).items() if k != 'tokens_per_s'}
                for line in (folder / 'log.jsonl').open()] for folder in (out, whole)]
    assert records[0] == records[1]
    assert not resume.checkpoints(out) and (out / 'loss.png').read_bytes().startswith(b'\x89PNG')
    assert not list(out.rglob('*.tmp'))


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_signals_save_and_leave(long_run, tmp_path, number):
    arguments, whole = long_run
    process = run_train(*arguments, f'--out_dir={tmp_path}', '--save_every=None', wait=False)
    await_steps(process, tmp_path, 3)
    process.send_signal(number)
    printed, errors = process.communicate()
    assert process.returncode == 128 + number and 'Traceback' not in errors
    [step] = resume.checkpoints(tmp_path)
    assert f'after step {step}; --resume goes on' in printed and step == steps_done(tmp_path)
    code, _, error = run_train(*arguments, f'--out_dir={tmp_path}')
    assert code == 1 and f'interrupted after step {step}; --resume goes on with it' in error
    code, _, error = run_train(*arguments, f'--out_dir={tmp_path}', '--resume', '--lr=0.1')
    assert code == 1 and 'was begun with lr = 0.001, not 0.1' in error
    code, printed, error = run_train(*arguments, f'--out_dir={tmp_path}', '--resume',
                                     '--save_every=None')
    assert code == 0 and f'going on after step {step}' in printed, error
    assert same_weights(tmp_path, whole)
    # nothing is left to do
    code, printed, _ = run_train(*arguments, f'--out_dir={tmp_path}', '--resume')
    assert code == 0 and 'step ' not in printed


def test_a_full_disk_leaves_the_last_checkpoint(long_run, tmp_path):
    arguments, whole = long_run
    process = run_train(*arguments, f'--out_dir={tmp_path}', wait=False)
    await_steps(process, tmp_path, 8)
    process.kill()
    process.communicate()
    [*_, before] = resume.checkpoints(tmp_path).values()
    files = {p: p.read_bytes() for p in before.iterdir()}
    code, _, error = run_train(*arguments, f'--out_dir={tmp_path}', '--resume', limit=500_000)
    assert code == 1 and re.match(r'error: step \d+: saving .*resume-\d+ failed: ', error)
    assert f'the last good checkpoint is {before}' in error
    assert files == {p: p.read_bytes() for p in before.iterdir()}
    assert not list(tmp_path.glob('*.tmp'))
    assert run_train(*arguments, f'--out_dir={tmp_path}', '--resume')[0] == 0
    assert same_weights(tmp_path, whole)


def test_a_disk_that_fills_up_at_the_end(small_world, tmp_path):
    code, _, error = run_train(small_world[0] / 'tuned' / 'train_config.py', '--eval_tasks=',
                               '--checkpoint_epochs=False', f'--out_dir={tmp_path}', limit=500_000)
    assert code == 1 and 'saving the weights' in error
    assert not (tmp_path / 'config.json').exists() and not list(tmp_path.glob('*.tmp'))


def test_two_runs_in_one_folder(long_run, tmp_path):
    arguments, _ = long_run
    process = run_train(*arguments, f'--out_dir={tmp_path}', wait=False)
    await_steps(process, tmp_path, 1)
    for option in ('--resume', '--overwrite'):
        code, _, error = run_train(*arguments, f'--out_dir={tmp_path}', option)
        assert code == 1 and 'another run is writing there; choose another --out_dir' in error
    assert process.poll() is None, 'the first one must have been running all the time'
    process.kill()
    process.communicate()


def test_damaged_resume_checkpoints(long_run, tmp_path):
    arguments, _ = long_run
    process = run_train(*arguments, f'--out_dir={tmp_path}', wait=False)
    await_steps(process, tmp_path, 8)
    process.kill()
    process.communicate()
    [*_, folder] = resume.checkpoints(tmp_path).values()
    (folder.with_name('resume-100000.tmp')).mkdir()       # half written: not looked at
    whole = (folder / 'state.json').read_text()
    for content, message in ((whole[:50], 'not a whole checkpoint'),
                             (whole.replace('state-00001', 'state-00009'), 'not a whole'),
                             (whole.replace('"sequences": ', '"sequences": 1'),
                              'sequences was 1')):
        (folder / 'state.json').write_text(content)
        with pytest.raises(train.TrainingError, match=message):
            train.main([*map(str, arguments), f'--out_dir={tmp_path}', '--resume'])


def test_a_finished_run_only_reports_what_is_missing(small_world, tmp_path, monkeypatch):
    again = tmp_path / 'again'
    shutil.copytree(small_world[0] / 'tuned', again)
    config = [str(small_world[0] / 'tuned' / 'train_config.py'), f'--out_dir={again}', '--resume']
    before = json.loads((again / 'results.json').read_text())['tasks']
    (again / 'results.json').unlink()
    monkeypatch.setattr(train, 'optimize', None)
    train.main(config)
    assert json.loads((again / 'results.json').read_text())['tasks'] == before
    monkeypatch.setattr(train, 'evaluate', None)
    train.main(config)


def test_several_runs_go_on_where_they_stopped(small_world, tmp_path, monkeypatch):
    (tmp_path / 'two.py').write_text((small_world[0] / 'tuned' / 'train_config.py').read_text()
                                     .replace('runs = {}', "runs = {'a': {}, 'b': {'lr': 1e-4}}"))
    lines = (tmp_path / 'two.py').read_text().splitlines()
    (tmp_path / 'two.py').write_text('\n'.join(
        line for line in lines if not line.startswith(('lr =', 'eval_before =', 'out_dir ='))))
    command = [str(tmp_path / 'two.py'), f'--out_dir={tmp_path / "out"}', '--eval_before']
    train.main(command)
    results = (tmp_path / 'out' / 'a' / 'before' / 'results.json').read_text()
    assert not (tmp_path / 'out' / 'b' / 'before').exists()     # the same model
    weights = (tmp_path / 'out' / 'b' / 'model.safetensors').read_bytes()
    for name in ('config.json', 'model.safetensors', 'results.json'):
        (tmp_path / 'out' / 'b' / name).unlink()
    optimize, trained = train.optimize, []
    monkeypatch.setattr(train, 'optimize', lambda cfg, *rest: (trained.append(cfg.lr),
                                                               optimize(cfg, *rest)))
    train.main([*command, '--resume'])
    assert trained == [1e-4]
    assert (tmp_path / 'out' / 'b' / 'model.safetensors').read_bytes() == weights
    assert (tmp_path / 'out' / 'a' / 'before' / 'results.json').read_text() == results


@pytest.mark.parametrize('name', ['llama', 'mistral_window', 'gemma2'])
def test_rows_of_one_document_need_no_mask(name, tmp_path):
    reference_model(name, tmp_path)
    model = models.load(tmp_path)
    packed = packing.pack(documents(2, [40, 31, 48]), 48)
    tokens, positions, ends = (torch.from_numpy(packed[k]) for k in ('tokens', 'positions', 'ends'))
    real = torch.from_numpy(packed['owner']) >= 0
    masked, plain = (model(tokens, positions, e)[real] for e in (ends, None))
    assert torch.allclose(masked, plain, atol=1e-5)
    cfg = tiny_config()
    given = [inputs[2] for _, inputs, _ in train.micro_batches(packed, cfg, 'cpu')]
    assert given == [None] * 3
    shared = packing.pack(documents(2, [40, 31, 17]), 48)
    given = [inputs[2] is None for _, inputs, _ in train.micro_batches(shared, cfg, 'cpu')]
    assert sorted(given) == [False, True]


@pytest.mark.parametrize('name', ['llama', 'gemma2'])
def test_checkpointed_activations_change_nothing(name, tmp_path):
    reference_model(name, tmp_path)
    packed = packing.pack(documents(3, [40, 31, 48, 9]), 48)
    results = []
    for again in (False, True):
        model = models.load(tmp_path, 'cpu', None, 0.0, 0.2).train()
        model.model.checkpoint = again
        torch.manual_seed(5)
        results.append(gradients(model, packed, tiny_config(smoothing=0.1)))
    assert results[0][0] == results[1][0] and torch.equal(results[0][2], results[1][2])


def test_validation_reports_the_next_tokens_ece(tiny_model):
    packed = packing.pack(documents(4, [40, 31, 48, 9]), 48)
    found = train.validation_loss(tiny_model, packed, tiny_config(smoothing=0.1), 'cpu')
    confidence, right, nll = [], [], []
    for tokens, learnt in documents(4, [40, 31, 48, 9]):
        row = torch.from_numpy(tokens)[None]
        p = tiny_model.logits(tiny_model(row, *whole_rows(row)))[0, :-1].softmax(-1)
        kept = torch.from_numpy(learnt[1:]) > 0
        p, labels = p[kept].detach(), row[0, 1:][kept]
        confidence += p.max(-1).values.tolist()
        right += (p.argmax(-1) == labels).tolist()
        nll += (-p.log().gather(1, labels[:, None]))[:, 0].tolist()
    assert found['val_nll'] == pytest.approx(np.mean(nll), rel=1e-5)
    assert found['val_ece'] == pytest.approx(metrics.ece(confidence, right), abs=1e-5)
    assert found['val_loss'] > found['val_nll'] * 0.5


def test_trackers_must_be_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    with pytest.raises(configs.ConfigError, match='pip install wandb'):
        train.check(tiny_config(tracker='wandb', max_length=48))


def test_two_processes_train_the_same(small_world, tmp_path):
    """torchrun with two gloo processes: the weights of one process to rounding, resumable by it."""
    config = [str(small_world[0] / 'tuned' / 'train_config.py'), '--eval_tasks=', '--max_steps=4',
              '--smoothing=0.1', '--micro_rows=2', '--device=cpu']
    def two(folder, *more):
        return subprocess.run(
            [sys.executable, '-m', 'torch.distributed.run', '--nproc_per_node=2',
             '--rdzv_backend=c10d', '--rdzv_endpoint=localhost:0', 'train.py',
             *config, f'--out_dir={folder}', *more], cwd=HERE, capture_output=True, text=True)
    code, _, error = run_train(*config, f'--out_dir={tmp_path / "one"}')
    assert code == 0, error
    done = two(tmp_path / 'two')
    assert done.returncode == 0, done.stderr
    base = load_file(small_world[0] / 'base' / 'model.safetensors')
    one, two_ = (load_file(tmp_path / n / 'model.safetensors') for n in ('one', 'two'))
    def apart(a, b):
        return max(((a[k] - b[k]).norm() / (one[k] - base[k]).norm()).item() for k in one)
    assert one.keys() == two_.keys() and apart(one, two_) < 1e-3
    log = [[json.loads(line) for line in (tmp_path / n / 'log.jsonl').open()]
           for n in ('one', 'two')]
    for a, b in zip(*log, strict=True):
        for key in ('loss', 'nll', 'grad_norm', 'tokens', 'learnt_tokens'):
            assert a[key] == pytest.approx(b[key], rel=1e-4), key
    # bfloat16 weights with the bits that float32 has more
    half = ['--dtype=bfloat16', '--save_dtype=float32']
    code, _, error = run_train(*config, f'--out_dir={tmp_path / "one_half"}', *half)
    assert code == 0, error
    done = two(tmp_path / 'two_half', *half)
    assert done.returncode == 0, done.stderr
    assert apart(*(load_file(tmp_path / n / 'model.safetensors')
                   for n in ('one_half', 'two_half'))) < 0.1
    # LoRA, and a checkpoint of two that one goes on from
    done = two(tmp_path / 'lora', '--lora')
    assert done.returncode == 0, done.stderr
    assert (tmp_path / 'lora' / 'adapter' / 'adapter_model.safetensors').exists()
    code = ('import sys, train, resume\nsave = resume.save\n'
            'def stop(*a): save(*a); sys.exit(9)\nresume.save = stop\n'
            'train.join_processes(); train.main(sys.argv[1:])')
    script = tmp_path / 'stop.py'
    script.write_text(code)
    subprocess.run([sys.executable, '-m', 'torch.distributed.run', '--nproc_per_node=2',
                    '--rdzv_backend=c10d', '--rdzv_endpoint=localhost:0', str(script), *config,
                    f'--out_dir={tmp_path / "half"}', '--save_every=2'], cwd=HERE,
                   capture_output=True, env=os.environ | {'PYTHONPATH': str(HERE)})
    assert list(resume.checkpoints(tmp_path / 'half')) == [2]
    code, _, error = run_train(*config, f'--out_dir={tmp_path / "half"}', '--resume')
    assert code == 0, error
    assert apart(one, load_file(tmp_path / 'half' / 'model.safetensors')) < 1e-3


# LoRA

def lora_model(folder, targets=models.LORA_TARGETS, dropout=0.0, seed=0):
    """A model with adapters that do something."""
    model = models.load(folder)
    torch.manual_seed(seed)
    models.add_lora(model, 4, 16.0, dropout, targets)
    for name, p in model.named_parameters():
        if 'lora_B' in name:
            torch.nn.init.normal_(p, std=0.05)
    return model


@pytest.mark.parametrize('name', ['llama', 'mistral_window', 'gemma2'])
def test_lora(name, tmp_path):
    reference_model(name, tmp_path / 'base')
    tokens = torch.randint(0, 211, (2, 30))
    plain = models.load(tmp_path / 'base')
    hidden = plain(tokens, *whole_rows(tokens))
    model = models.load(tmp_path / 'base')
    models.add_lora(model, 8, 32.0, 0.1, ('q_proj', 'v_proj'))
    assert torch.equal(model.eval()(tokens, *whole_rows(tokens)), hidden)   # B begins at zero
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 4 * plain.config.num_hidden_layers
    assert all(re.search(r'(q|v)_proj.lora_[AB].weight$', n) for n in trained)
    a, b = (model.train()(tokens, *whole_rows(tokens)) for _ in range(2))
    assert torch.equal(a, b)                        # dropout on what B, still zero, multiplies
    model = lora_model(tmp_path / 'base')
    adapted = model(tokens, *whole_rows(tokens))
    assert not torch.allclose(adapted, hidden, atol=1e-2)
    adapted.square().sum().backward()
    assert all((p.grad is not None) == ('lora' in n) for n, p in model.named_parameters())
    # dropout acts on what enters the adapter alone
    some = lora_model(tmp_path / 'base', dropout=0.5).train()
    a, b = (some(tokens, *whole_rows(tokens)) for _ in range(2))
    assert not torch.allclose(a, b)
    # merged, as anybody loads it
    models.save(model, tmp_path / 'merged', torch.float32)
    merged = models.load(tmp_path / 'merged')
    assert torch.allclose(merged(tokens, *whole_rows(tokens)), adapted, atol=1e-4)
    assert merged.state_dict().keys() == plain.state_dict().keys()
    import transformers
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / 'merged', attn_implementation='eager')
    assert torch.allclose(reference(tokens).logits, model.logits(adapted), atol=2e-4)
    # one rounding: of the float32 sum
    models.save(model, tmp_path / 'half', torch.bfloat16)
    key = 'model.layers.1.self_attn.v_proj'
    layer = model.get_submodule(key)
    exact = layer.weight + 4 * (layer.lora_B.weight @ layer.lora_A.weight)
    assert torch.equal(load_file(tmp_path / 'half' / 'model.safetensors')[f'{key}.weight'],
                       exact.bfloat16())
    with pytest.raises(ValueError, match="lora_targets = .'query',.; wanted some of q_proj"):
        models.add_lora(plain, 8, 32.0, 0.1, ('query',))


@pytest.mark.parametrize('name', ['llama', 'mistral_window', 'gemma2'])
def test_adapter_loads_in_peft(name, tmp_path):
    import peft
    import transformers
    reference_model(name, tmp_path / 'base')
    model = lora_model(tmp_path / 'base')
    models.save_adapter(model, tmp_path / 'adapter', str(tmp_path / 'base'))
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / 'base')
    reference = peft.PeftModel.from_pretrained(base, tmp_path / 'adapter').eval()
    tokens = torch.randint(0, 211, (2, 30))
    ours = model.logits(model(tokens, *whole_rows(tokens)))
    assert torch.allclose(ours, reference(tokens).logits, atol=2e-4)
    assert not torch.allclose(ours, reference.unload()(tokens).logits, atol=1e-2)


def test_lora_run(small_world, tmp_path):
    """What `train.py --lora` leaves: merged weights, and an adapter that makes them of the base."""
    import peft
    import transformers
    train.main([str(small_world[0] / 'tuned' / 'train_config.py'), f'--out_dir={tmp_path}',
                '--lora', '--lr=5e-3', '--checkpoint_epochs', '--checkpoint_activations',
                '--device=cpu'])
    assert (tmp_path / 'results.json').exists() and (tmp_path / 'epoch-1' / 'adapter').is_dir()
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    base = transformers.AutoModelForCausalLM.from_pretrained(small_world[0] / 'base')
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / 'adapter').eval()
    tokens = torch.randint(0, 1280, (1, 40))
    assert torch.allclose(merged(tokens).logits, adapted(tokens).logits, atol=1e-3)
    assert not torch.allclose(merged(tokens).logits, adapted.unload()(tokens).logits, atol=1e-2)
    ours = models.load(tmp_path)
    assert torch.allclose(ours.logits(ours(tokens, *whole_rows(tokens))), merged(tokens).logits,
                          atol=1e-3)


# on the GPU

@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
def test_a_step_is_read_without_waiting_for_the_next():
    first, later = evaluate.HostCopy(torch.arange(3.0, device='cuda')), torch.cuda.Event()
    torch.cuda._sleep(2 * 10 ** 9)      # about a second of the next step
    later.record()
    assert first.values().tolist() == [0.0, 1.0, 2.0] and not later.query()
    second = evaluate.HostCopy(torch.ones((), device='cuda'))
    assert 0.5 < second.seconds_after(first) < 2 and later.query()


@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
@pytest.mark.parametrize('name', ['llama', 'mistral_window', 'gemma2'])
@pytest.mark.parametrize('master', ['exact', 'stochastic'])
def test_compiled_steps(name, master, tmp_path):
    """Compiled bfloat16 steps go where float32 ones go; no batch of another make compiles anew."""
    torch._dynamo.reset()
    reference_model(name, tmp_path, head_dim=32)  # FlexAttention wants a power of two
    rng = np.random.default_rng(0)
    batches = [documents(i, rng.integers(5, 128, rng.integers(6, 20))) for i in range(8)]
    runs = []
    for dtype, device in (('float32', 'cpu'), ('bfloat16', 'cuda')):
        cfg = tiny_config(dtype=dtype, pack_len=128, micro_rows=2, lr=1e-3, smoothing=0.1,
                          master_weights=master, device=device)
        model = train.make_model(cfg, tmp_path, device)
        optimizer = train.make_optimizer(model, cfg)
        losses = []
        for i, batch in enumerate(batches):
            packed = packing.pack(batch, 128, train.rows_multiple(cfg, device))
            with torch.compiler.set_stance('fail_on_recompile' if i > 3 else 'default'):
                losses.append(train.train_step(model, optimizer, packed, cfg, device).tolist())
        runs.append(np.array(losses))
    # a norm of gradients at weights that were rounded at random, summed in bfloat16
    assert np.allclose(runs[0], runs[1], rtol=0.03 if master == 'exact' else 0.1)
    assert np.allclose(runs[0][:, :2], runs[1][:, :2], rtol=0.003)


@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
@pytest.mark.parametrize('head_dim, softcap', [(64, None), (128, None), (256, 50.0)])
def test_tuned_attention(head_dim, softcap):
    """The block sizes of HOPPER_OPTIONS in bfloat16, beside the explicit mask in float32."""
    T, heads, kv = 600, 8, 4
    packed = packing.pack(documents(0, [300, 200, 250, 90, 40, 600]), T)
    positions, ends = (torch.from_numpy(packed[k]).cuda() for k in ('positions', 'ends'))
    make = torch.Generator('cuda').manual_seed(0)
    q, k, v, g = (torch.randn(len(ends), n, T, head_dim, generator=make, device='cuda')
                  for n in (heads, kv, kv, heads))
    q = 3 * q
    results = []
    torch._dynamo.reset()       # other tests may have used up the number of variants
    for dtype in (torch.float32, torch.bfloat16):
        for window in (None, 100):
            x = [t.bfloat16().to(dtype).requires_grad_() for t in (q, k, v)]
            if dtype == torch.float32:
                mask = models.explicit_mask(positions, ends, window)
                y = models.attend_explicit(*x, mask, head_dim ** -0.5, softcap, 0.0)
            else:
                mask = models.flex_mask(positions, ends, window,
                                        models.flex_options(head_dim, x[0]))
                cap = models._cap_scores(softcap) if softcap else None
                y = models.attend_flex(*x, mask, head_dim ** -0.5, cap, 0.0)
            y.backward(g.bfloat16().to(dtype))
            results.append([y, *(t.grad for t in x)])
    for right, ours in zip(results[:2], results[2:]):
        assert all((a - b).norm() < 0.01 * a.norm() for a, b in zip(right, ours))


def test_a_gpu_named_by_number_is_the_current_one(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 2)
    monkeypatch.setattr(torch.cuda, 'set_device', chosen.append)
    assert evaluate.pick_device('cuda:1') == 'cuda:1' and chosen == [1]
    assert evaluate.pick_device('auto') == evaluate.pick_device('cuda') == 'cuda'
    assert evaluate.pick_device('cpu') == 'cpu' and chosen == [1]
    with pytest.raises(configs.ConfigError, match="'cuda:2', but .* CUDA devices 0 to 1"):
        evaluate.pick_device('cuda:2')


def bad_command_lines(folder, tmp_path):
    (tmp_path / 'empty').mkdir()
    (tmp_path / 'broken.jsonl').write_text('{"messages": [\n')
    (tmp_path / 'none.jsonl').write_text('')
    write_rows(tmp_path / 'no_answer.jsonl', [{'question': 'Q?', 'choices': ['a', 'b']}])
    shutil.copytree(folder / 'base', tmp_path / 'truncated')
    os.truncate(tmp_path / 'truncated' / 'model.safetensors', 1000)
    shutil.copytree(folder / 'base', tmp_path / 'mute')
    (tmp_path / 'mute' / 'tokenizer.model').unlink()
    run = ['train.py', str(folder / 'tuned' / 'train_config.py'), f'--out_dir={tmp_path / "out"}']
    score = ['evaluate.py', f'--model={folder / "base"}', '--shots=0',
             f'--out_dir={tmp_path / "out"}']
    return [
        ([*run, '--smothing=0.1'], "did you mean 'smoothing'"),
        ([*run, f'--model={tmp_path / "truncated"}'], 'truncated or not a safetensors file'),
        ([*run, f'--data={tmp_path / "broken.jsonl"}'], 'broken.jsonl:1: broken JSON'),
        ([*run, f'--data={tmp_path / "none.jsonl"}'], 'an empty dataset'),
        ([*run, f'--model={tmp_path / "mute"}'], 'has no tokenizer.model'),
        ([*run, f'--model={tmp_path / "empty"}'], 'is not a model folder: it has no config.json'),
        ([*run, '--model=some/model'], 'getting some/model from the hub failed'),
        ([*run, '--pack_len=8'], 'a sequence must fit into a row'),
        ([*run, '--batch_size=100000'], 'do not fill one step'),
        ([*run, '--smoothing=1.5'], 'smoothing = 1.5; it must be between 0 and 1'),
        ([*score, '--tasks=mmlu', '--shots=-1'], 'shots = -1; it must be at least 0'),
        ([*score, f'--tasks={tmp_path / "no_answer.jsonl"}'], 'no_answer.jsonl:1: no valid answer'),
        ([*score, '--tasks=nothing'], "no task, file or folder 'nothing'; the tasks are mmlu"),
        ([*score, '--model='], 'which model?'),
        ([*score, '--tasks='], 'which tasks?'),
        ([*score, '--tasks=mmlu:a,mmlu:b'], "2 of them would be called 'mmlu'"),
        ([*score, '--device=gpu'], "device = 'gpu'; wanted"),
        ([*score, '--batch_rows=0'], 'batch_rows = 0; it must be at least 1'),
        ([*run, '--betas=0.9,1.0'], 'each must be at least 0 and less than 1'),
        ([*run, '--max_length=600', '--pack_len=600'], 'the context of'),
        ([*run, '--eval_tasks=nothing'], "no task, file or folder 'nothing'"),
        ([*run, f'--out_dir={folder / "base"}'], 'itself'),
        ([*run, f'--out_dir={folder}', '--overwrite'], 'itself'),
        ([*run, f'--out_dir={folder / "tuned_ls01"}'], 'holds a finished run'),
    ]


def test_bad_input_gives_one_line(small_world, tmp_path):
    cases = bad_command_lines(small_world[0], tmp_path)
    # each in a folder of its own: two runs in one are refused, as another test says
    running = [(subprocess.Popen([sys.executable, *command, f'--out_dir={tmp_path}/out/{i}'],
                                 cwd=HERE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                 text=True), message)
               for i, (command, message) in enumerate(cases[:3])]
    for process, message in running:
        _, errors = process.communicate()
        last = errors.strip().split('\n')[-1]
        assert process.returncode == 1 and last.startswith('error: ') and message in last
        assert 'Traceback' not in errors
    for (program, *arguments), message in cases[3:]:
        main = train.main if program == 'train.py' else evaluate.main
        with pytest.raises((configs.ConfigError, DataError, models.CheckpointError)) as error:
            main(arguments)
        assert message in str(error.value) and '\n' not in str(error.value)
    assert not list((tmp_path / 'out').rglob('*.safetensors'))
    assert not list((tmp_path / 'out').rglob('*.tmp'))


# ------------------------------------------------------------------------------------------------
# evaluate.py
# ------------------------------------------------------------------------------------------------

def random_trees(rng):
    def ids(low, high):
        return rng.integers(0, 211, rng.integers(low, high)).tolist()
    prefixes = [tuple(ids(1, 20)) for _ in range(3)]
    trees = []
    for i in range(12):
        prefix, stem = prefixes[i * len(prefixes) // 12], ids(1, 9)
        leaves = [ids(1, 6) for _ in range(rng.integers(2, 6))]
        start = len(prefix) + len(stem) + rng.integers(-1, 1)  # a shared first token is in the stem
        trees.append(evaluate.Tree(prefix, stem, leaves, start))
    return trees


def plain_log_probs(model, tree, device):
    """Of each option, by one sequence for each."""
    sums = []
    for leaf in tree.leaves:
        ids = torch.tensor([[*tree.prefix, *tree.stem, *leaf]])
        log_probs = model.logits(model(*(x.to(device) for x in (ids, *whole_rows(ids)))))
        log_probs = log_probs.log_softmax(-1)[0].cpu()
        at = torch.arange(tree.start, ids.shape[1])
        sums.append(log_probs[at - 1, ids[0, at]].sum().item())
    return sums


@pytest.mark.parametrize('device', DEVICES)
@pytest.mark.parametrize('name', ['llama3', 'mistral_window', 'gemma2'])
def test_tree_equals_one_sequence_per_option(name, device, tmp_path):
    reference_model(name, tmp_path)
    model = models.load(tmp_path, device)
    model.model.attention = 'explicit'  # FlexAttention does not take these odd head sizes
    trees = random_trees(np.random.default_rng(len(name)))
    right = [plain_log_probs(model, tree, device) for tree in trees]
    # rows of 40 part questions, those of 16 are shorter than some prompts
    for options in ({'pack_len': 16}, {'pack_len': 40}, {'pack_len': 64}, {'deterministic': True},
                    {'pack_len': 128, 'batch_rows': 3}, {'pack_len': 1024, 'trim': False}):
        found = evaluate.option_log_probs(model, trees, **options)
        for ours, theirs in zip(found, right, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-4)


def test_deterministic_means_the_same_bits(tmp_path):
    reference_model('gemma2', tmp_path)
    model = models.load(tmp_path)
    trees = random_trees(np.random.default_rng(0))
    alone = [evaluate.option_log_probs(model, [tree], deterministic=True)[0] for tree in trees]
    order = np.random.default_rng(1).permutation(len(trees))
    found = evaluate.option_log_probs(model, [trees[i] for i in order], pack_len=64, batch_rows=4,
                                      deterministic=True)
    assert all(np.array_equal(alone[i], sums) for i, sums in zip(order, found, strict=True))


def test_wanted_tokens_of_a_text(tmp_path):
    """Log-probability, top token, its log-probability and entropy, packed beside other texts."""
    reference_model('llama', tmp_path)
    model = models.load(tmp_path)
    rng = np.random.default_rng(0)
    trees = [evaluate.Tree((), rng.integers(0, 211, n).tolist(), wanted=[1, n // 2, n - 1])
             for n in (9, 30, 17)]
    for index, numbers, values in evaluate.score(lambda: model, enumerate(trees), 64,
                                                 statistics=True):
        tree = trees[index]
        ids = torch.tensor([tree.stem])
        log_probs = model.logits(model(ids, *whole_rows(ids))).log_softmax(-1)[0].detach()
        for n, (log_prob, top, top_log_prob, entropy) in zip(numbers, values, strict=True):
            row = log_probs[tree.wanted[n] - 1]
            assert top == row.argmax()
            assert [log_prob, top_log_prob, entropy] == pytest.approx(
                [float(x) for x in (row[tree.stem[tree.wanted[n]]], row.max(),
                                    -(row.exp() * row).sum())], abs=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
@pytest.mark.parametrize('name', ['llama', 'mistral_window', 'gemma2'])
def test_trees_in_bfloat16(name, tmp_path):
    """Compiled FlexAttention over packed trees: no further off than one sequence per option."""
    torch._dynamo.reset()
    reference_model(name, tmp_path, head_dim=32)
    exact, half = models.load(tmp_path), models.load(tmp_path, 'cuda', torch.bfloat16)
    trees = random_trees(np.random.default_rng(3))
    with torch.no_grad():
        right = [np.array(plain_log_probs(exact, tree, 'cpu')) for tree in trees]
        plain = [np.array(plain_log_probs(half, tree, 'cuda')) for tree in trees]
    models.compile_blocks(half)
    packed = evaluate.option_log_probs(half, trees, pack_len=512, trim=False)
    off = [np.concatenate([metrics.softmax(found[i]) - metrics.softmax(right[i])
                           for i in range(len(trees))]) for found in (plain, packed)]
    assert np.sqrt((off[1] ** 2).mean()) < 1.3 * np.sqrt((off[0] ** 2).mean())
    assert np.abs(off[1]).max() < 0.02


def write_task(folder, n=4, choices=('blue', 'a lazy dog', 'brown')):
    rows = [{'question': f'What is the fox {i}?', 'choices': list(choices), 'answer': i % 3,
             'subject': 'foxes'} for i in range(n)]
    write_rows(folder / 'dev.jsonl', rows)
    write_rows(folder / 'test.jsonl', rows)
    return f'{folder}'


def first_tree(asked, solved, tokenizer, max_length=2000, **keys):
    found = next(iter(evaluate.tokenize_questions(asked, solved, tokenizer,
                                                  evaluate.EvalConfig(**keys), max_length)))[1]
    if isinstance(found, DataError):
        raise found
    return found


@pytest.mark.parametrize('kind', ['gemma', 'mistral', 'llama2', 'llama3'])
@pytest.mark.parametrize('options', [dict(scoring='letters'), dict(scoring='text'),
                                     dict(preset='harness')])
def test_question_tokens_are_the_joint_encoding(tokenizers, tmp_path, kind, options):
    tokenizer = tokenizers[kind]
    asked, solved, _ = questions.load_task(write_task(tmp_path), shots=2, **options)
    tree = first_tree(asked, solved, tokenizer)
    assert tree.shots == 2
    prefix = asked[0].header + ''.join(s.solved for s in solved['', 'foxes'])
    for option, leaf in zip(asked[0].options, tree.leaves, strict=True):
        whole = [tokenizer.bos_id] + tokenizer.encode(prefix + asked[0].context + option)
        assert [*tree.prefix, *tree.stem, *leaf] == whole
        assert tokenizer.decode(whole[tree.start:]).strip() == option.strip()


@pytest.mark.parametrize('kind', ['gemma', 'mistral', 'llama2', 'llama3'])
def test_a_question_may_begin_the_text(tokenizers, kind):
    """Without header and shots, as in the harness; and where every shot had to be dropped."""
    tokenizer = tokenizers[kind]
    question = questions.Question('1', 'A fox runs and', [' sleeps.', ' eats a hen.'], 1, 's')
    for solved, max_length in (({}, 2000), ({('', 's'): [question]}, 30)):
        tree = first_tree([question], solved, tokenizer, max_length)
        for option, leaf in zip(question.options, tree.leaves, strict=True):
            assert [*tree.prefix, *tree.stem, *leaf] == [
                tokenizer.bos_id, *tokenizer.encode(question.context + option)]


def test_whole_shots_are_dropped(tokenizers, tmp_path):
    tokenizer = tokenizers['gemma']
    asked, solved, _ = questions.load_task(write_task(tmp_path), shots=3)
    shots = solved['', 'foxes']
    sizes = [first_tree(asked, {('', 'foxes'): shots[:n]}, tokenizer) for n in range(4)]
    for kept, tree in enumerate(sizes):
        longest = len(tree.prefix) + len(tree.stem) + max(map(len, tree.leaves))
        assert first_tree(asked, solved, tokenizer, longest) == tree and tree.shots == kept
    with pytest.raises(DataError, match='even without shots has a prompt of'):
        first_tree(asked, {}, tokenizer, 10)


def test_options_that_cannot_be_scored(tokenizers):
    bad = questions.Question('7', 'Answer: ', ['', 'x'], 1, 's', 'H\n\n')
    with pytest.raises(DataError, match="question 7: option '' does not begin at a token boundary"):
        first_tree([bad], {}, tokenizers['llama3'])


def test_option_scores_norms():
    log_probs, options = np.array([-2.0, -6.0]), [' é', ' long']
    for norm, length in (('sum', (1, 1)), ('token', (1, 3)), ('char', (1, 4)), ('byte', (2, 4))):
        p = metrics.softmax(results.option_scores(log_probs, options, [1, 3], norm))
        score = np.exp(log_probs / np.array(length))
        assert np.allclose(p, score / score.sum())


def test_bos_is_there_once(tokenizers, tmp_path):
    asked, _, _ = questions.load_task(write_task(tmp_path))
    for add_bos in (True, False):
        for tokenizer in tokenizers.values():
            tree = first_tree(asked, {}, tokenizer, add_bos=add_bos)
            assert [*tree.prefix, *tree.stem].count(tokenizer.bos_id) == int(add_bos)


@needs_shared
@pytest.mark.parametrize('file', ['llama3_tokenizer.model', 'llama2_tokenizer.model',
                                  'mistral_tokenizer.model.v1',
                                  'mistral_mistral_instruct_tokenizer_240323.model.v3'])
def test_seams_on_real_questions(file, tmp_path):
    """Prefix, question and options in pieces are the whole prompt's tokens, in every format."""
    datasets = SHARED / 'datasets'
    shutil.copyfile(SHARED / 'tokenizers' / file, tmp_path / 'tokenizer.model')
    tokenizer = load_tokenizer(tmp_path)
    for name, options in ((f'mmlu:{datasets / "mmlu"}', dict(shots=5)),
                          (f'arc_easy:{datasets / "arc_easy"}', dict(shots=2, preset='harness')),
                          (f'hellaswag:{datasets / "hellaswag"}', dict(preset='harness')),
                          (f'xcopa:{datasets / "xcopa"}', dict(preset='harness', shots=1)),
                          (f'xcopa:{datasets / "xcopa"}', dict(scoring='text')),
                          (str(datasets / 'mmlu_pro' / 'mmlu_pro_sample.jsonl'), {})):
        asked, solved, _ = questions.load_task(name, **options)
        picked = random.Random(0).sample(asked, 100)
        for q, tree in evaluate.tokenize_questions(picked, solved, tokenizer, evaluate.EvalConfig(),
                                                   10**6):
            before = q.header + ''.join(s.solved for s in solved.get(q.group, []))
            for option, leaf in zip(q.options, tree.leaves, strict=True):
                assert [*tree.prefix, *tree.stem, *leaf] == [
                    tokenizer.bos_id, *tokenizer.encode(before + q.context + option)]


@pytest.fixture(scope='module')
def scored_folder(tmp_path_factory):
    """A tiny Llama with a sentencepiece tokenizer, and a task of 3 languages with shots."""
    folder = tmp_path_factory.mktemp('scored')
    sentencepiece_folder(folder / 'model', 'mistral')
    reference_model('llama', folder / 'model', vocab_size=load_tokenizer(folder / 'model').n_vocab)
    rng = random.Random(0)
    words = 'quick brown fox jumps over the lazy dog blue river old stone'.split()
    for language in ('de', 'en', 'sw'):
        for split, n in (('dev', 6), ('test', 40)):
            rows = [{'sample_id': f'{split}/{i}', 'subject': ('anatomy', 'sociology')[i % 2],
                     'question': ' '.join(rng.sample(words, 4)) + '?', 'answer': 'ABCD'[i % 4],
                     **{f'option_{c}': rng.choice(words) for c in 'abcd'}} for i in range(n)]
            write_rows(folder / 'data' / f'{language}_{split}.jsonl', rows)
    return folder


def scored(folder, out, *arguments, tasks='global_mmlu'):
    evaluate.main([f'--model={folder / "model"}', f'--tasks={tasks}:{folder / "data"}',
                   f'--out_dir={out}', '--shots=2', '--n_bootstrap=50', *arguments])
    return json.loads((out / 'results.json').read_text())


def test_languages_and_groups(scored_folder, tmp_path, capsys):
    found = scored(scored_folder, tmp_path / 'all')
    result = found['tasks']['global_mmlu']
    assert set(result['languages']) == {'de', 'en', 'sw'}
    assert set(result['subjects']) == {'anatomy', 'sociology'}
    assert set(result['categories']) == {'STEM', 'social sciences'}
    assert result['pooled']['n'] == 120 and result['macro']['groups'] == 3
    assert result['macro']['ece'] == pytest.approx(
        np.mean([r['ece'] for r in result['languages'].values()]))
    assert found['versions']['torch'] == torch.__version__ and found['seed'] == 0
    for name in ('reliability.png', 'reliability-global_mmlu-languages.png'):
        assert (tmp_path / 'all' / name).read_bytes().startswith(b'\x89PNG')
    with open(tmp_path / 'all' / 'results.csv') as file:
        lines = file.read().split('\n')
    assert len(lines) == 1 + 2 + 2 + 3 + 1 + 1 + 1 and 'ece_boot_low' in lines[0]
    assert '| macro |' in (tmp_path / 'all' / 'results.md').read_text()
    one = scored(scored_folder, tmp_path / 'one', '--languages=sw')['tasks']['global_mmlu']
    same = result['languages']['sw']
    assert {k: one['pooled'][k] for k in ('n', 'accuracy')} == {k: same[k] for k in (
        'n', 'accuracy')} and one['pooled']['nll'] == pytest.approx(same['nll'])
    with pytest.raises(DataError, match="no language 'swa'; did you mean 'sw'"):
        scored(scored_folder, tmp_path / 'none', '--languages=swa')


def test_company_changes_nothing_but_rounding(scored_folder, tmp_path):
    """Another order of rows, row length or batch: the same samples, bit by bit if asked for."""
    turned = tmp_path / 'turned'
    shutil.copytree(scored_folder / 'model', turned / 'model')
    for path in (scored_folder / 'data').glob('*.jsonl'):
        rows = path.read_text().splitlines()
        (turned / 'data').mkdir(exist_ok=True)
        (turned / 'data' / path.name).write_text('\n'.join(
            rows if 'dev' in path.name else rows[::-1]))

    def samples(folder, name, *arguments):
        scored(folder, tmp_path / name, *arguments)
        rows = results.read_samples(tmp_path / name / 'samples.jsonl')
        return {(r['language'], r['id']): r for r in rows}
    plain = samples(scored_folder, 'a')
    other = samples(turned, 'b', '--pack_len=200', '--batch_rows=3')
    assert plain.keys() == other.keys() and list(plain) != list(other)
    for key, row in plain.items():
        assert row['log_probs'] == pytest.approx(other[key]['log_probs'], abs=1e-4)
        assert {**row, 'log_probs': 0} == {**other[key], 'log_probs': 0}
    exact = samples(scored_folder, 'c', '--deterministic')
    assert exact == samples(turned, 'd', '--deterministic', '--pack_len=200', '--batch_rows=3')


def test_scoring_goes_on_where_it_stopped(scored_folder, tmp_path, monkeypatch, capsys):
    whole = scored(scored_folder, tmp_path / 'whole')
    samples = (tmp_path / 'whole' / 'samples.jsonl').read_text()
    # a process killed while it writes a line
    shutil.copytree(tmp_path / 'whole', tmp_path / 'cut')
    (tmp_path / 'cut' / 'results.json').unlink()
    (tmp_path / 'cut' / 'samples.jsonl').write_text(samples[:len(samples) // 2])
    launched, launch = [], evaluate._launch
    monkeypatch.setattr(evaluate, '_launch', lambda model, arrays, rows, statistics: (
        launched.append(len({tree for tree, *_ in rows})), launch(model, arrays, rows, statistics)
    )[1])
    again = scored(scored_folder, tmp_path / 'cut')
    assert sum(launched) == 120 - samples[:len(samples) // 2].count('\n')
    pooled = (found['tasks']['global_mmlu']['pooled'] for found in (whole, again))
    assert np.allclose(*([report[k] for k in ('accuracy', 'confidence', 'ece', 'nll')]
                         for report in pooled), atol=1e-4)
    rows = results.read_samples(tmp_path / 'cut' / 'samples.jsonl')
    assert len(rows) == len({(r['language'], r['id']) for r in rows}) == 120
    # all is there: another normalisation needs no model, and gives the same results twice
    monkeypatch.setattr(models, 'load', None)
    assert scored(scored_folder, tmp_path / 'whole')['tasks']['global_mmlu']['pooled'] == (
        whole['tasks']['global_mmlu']['pooled'])
    flat = scored(scored_folder, tmp_path / 'whole', '--norm=sum')
    assert flat['distribution'] == 'mmlu, 2 shots, letters, sum'
    for option in ('--shots=1', '--scoring=text', '--preset=harness', '--deterministic'):
        with pytest.raises(configs.ConfigError, match='holds samples with another '
                                                      + option[2:].split('=')[0]):
            scored(scored_folder, tmp_path / 'whole', option)
    monkeypatch.undo()
    # another question under a known id is another question
    shutil.copytree(scored_folder, tmp_path / 'changed')
    path = tmp_path / 'changed' / 'data' / 'sw_test.jsonl'
    path.write_text(path.read_text().replace('?', ' then?', 1))
    scored(tmp_path / 'changed', tmp_path / 'whole')
    rows = results.read_samples(tmp_path / 'whole' / 'samples.jsonl')
    assert len(rows) == 121
    assert json.loads((tmp_path / 'whole' / 'results.json').read_text())['tasks']['global_mmlu'][
        'pooled']['n'] == 120
    # another model's samples are not mixed in
    weights = load_file(tmp_path / 'changed' / 'model' / 'model.safetensors')
    save_file({k: 1.1 * x for k, x in weights.items()},
              tmp_path / 'changed' / 'model' / 'model.safetensors')
    with pytest.raises(configs.ConfigError, match='holds samples with another model'):
        scored(tmp_path / 'changed', tmp_path / 'whole')
    assert scored(tmp_path / 'changed', tmp_path / 'whole', '--overwrite')['tasks']['global_mmlu'][
        'pooled']['n'] == 120


def test_a_killed_evaluation_is_whole_in_the_end(scored_folder, tmp_path):
    rows = [{'question': f'the quick fox {i}?', 'choices': ['blue', 'lazy', 'old'], 'answer': i % 3}
            for i in range(1500)]
    path = write_rows(tmp_path / 'many.jsonl', rows)
    command = [sys.executable, 'evaluate.py', f'--model={scored_folder / "model"}', '--shots=0',
               f'--tasks={path}', '--pack_len=128', '--n_bootstrap=0', f'--out_dir={tmp_path}']
    samples, kills = tmp_path / 'samples.jsonl', 0
    for wait in (0.0, 1.1):
        process = subprocess.Popen(command, cwd=HERE, stdout=subprocess.DEVNULL,
                                   stderr=subprocess.DEVNULL)
        size = samples.stat().st_size if samples.exists() else 0
        while process.poll() is None and not (samples.exists() and samples.stat().st_size > size):
            time.sleep(0.01)
        time.sleep(wait)
        kills += process.poll() is None
        process.kill()
        process.wait()
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = results.read_samples(samples)
    assert len(found) == len({r['id'] for r in found}) == 1500 and kills


def test_temperature_and_platt_scaling(scored_folder, tmp_path):
    found = scored(scored_folder, tmp_path / 'halves', '--temperature=fit')['tasks']['global_mmlu']
    fitted = found['post_hoc']
    assert fitted['fitted_on'] == 'the other half of the questions'
    assert len(fitted['temperature']) == len(fitted['platt']) == 2
    assert fitted['reports']['temperature']['accuracy'] == found['pooled']['accuracy']
    # labels unrelated to the questions: both learn how little is known
    assert fitted['reports']['temperature']['ece'] < found['pooled']['ece'] + 0.05
    # MMLU's validation split is neither scored nor shown
    rows = [{'question': f'q{i} fox?', 'choices': ['blue', 'lazy', 'old', 'dog'], 'answer': i % 4,
             'subject': 'anatomy'} for i in range(60)]
    shutil.copytree(scored_folder / 'model', tmp_path / 'mmlu' / 'model')
    for split, some in (('dev', rows[:2]), ('test', rows[2:30]), ('validation', rows[30:])):
        write_rows(tmp_path / 'mmlu' / 'data' / f'{split}.jsonl', some)
    found = scored(tmp_path / 'mmlu', tmp_path / 'out', '--temperature=fit', tasks='mmlu')
    assert found['tasks']['mmlu']['post_hoc']['fitted_on'] == '30 validation questions'
    assert found['tasks']['mmlu']['pooled']['n'] == 28
    assert len(found['tasks']['mmlu']['post_hoc']['temperature']) == 1


def test_compare(scored_folder, tmp_path, capsys):
    scored(scored_folder, tmp_path / 'a')
    shutil.copytree(tmp_path / 'a', tmp_path / 'sharp')
    sharp = results.read_samples(tmp_path / 'a' / 'samples.jsonl')
    for sample in sharp:
        sample['log_probs'] = [5 * x for x in sample['log_probs']]
    (tmp_path / 'sharp' / 'samples.jsonl').write_text(''.join(json.dumps(s) + '\n' for s in sharp))
    (tmp_path / 'sharp' / 'train_config.py').write_text("model = 'some/base'\nsmoothing = 0.1\n")
    capsys.readouterr()
    evaluate.main(['--compare', str(tmp_path / 'a'), str(tmp_path / 'sharp'), '--n_bootstrap=200',
                   f'--out_dir={tmp_path / "out"}'])
    printed = capsys.readouterr().out
    assert (tmp_path / 'out' / 'reliability-global_mmlu.png').exists()
    with open(tmp_path / 'out' / 'compare.csv') as file:
        rows = list(csv.DictReader(file))
    assert [r['language'] for r in rows[:8]] == ['de', 'de', 'en', 'en', 'sw', 'sw', 'pooled',
                                                 'pooled']
    assert rows[1]['smoothing'] == '0.1' and rows[1]['model'] == 'base'
    first, second = rows[6:]
    assert first['accuracy'] == second['accuracy'] and float(first['ece']) < float(second['ece'])
    lines = [line.split() for line in printed.split('\n') if line.startswith('sharp - a')]
    assert len(lines) == 8      # four metrics, over questions and over languages
    accuracy, _, ece, _ = (line for line in lines if line[3] == 'questions')
    assert accuracy[6:] == ['+0.0000', '+0.0000', '+0.0000', '1.000']
    assert float(ece[6]) == pytest.approx(float(second['ece']) - float(first['ece']), abs=1e-4)
    assert float(ece[-1]) < 0.05
    found = metrics.student_t([float(rows[i + 1]['ece']) - float(rows[i]['ece'])
                               for i in (0, 2, 4)])
    assert [f'{found[0]:+.4f}', 't', '=', f'{found[1]:.2f}'] in [
        line[6:10] for line in lines if line[4] == 'languages']
    for folders, message in (([tmp_path / 'a'], 'two folders or more'),
                             ([tmp_path / 'a', tmp_path / 'none'], 'has no samples.jsonl'),
                             ([tmp_path / 'a', tmp_path / 'a'], 'named twice')):
        with pytest.raises((configs.ConfigError, DataError), match=message):
            evaluate.main(['--compare', *map(str, folders)])
    with pytest.raises(configs.ConfigError, match="no key 'shots'; did you mean 'sources'"):
        evaluate.main(['--compare', str(tmp_path / 'a'), str(tmp_path / 'sharp'), '--shots=0'])


# of a study: five seeds, two rates, a base model; ECE falls by 0.02 with smoothing, but for seed 4
def study_lines():
    for seed in range(5):
        for kind, smoothing in (('base', ''), ('tuned', '0.0'), ('tuned', '0.1')):
            for task in ('text4', 'facts'):
                ece = {'': 0.02, '0.0': 0.1, '0.1': 0.08}[smoothing] + 0.001 * seed
                ece += 0.01 * (seed == 4 and smoothing == '0.1')
                yield {'run': f'{kind}-smoothing{smoothing}', 'kind': kind, 'seed': seed,
                       'task': task, 'language': 'all', 'category': 'all', 'scaling': 'none',
                       'smoothing': smoothing, 'n': 100, 'ece': ece, 'accuracy': 0.5}


def write_lines(path, lines):
    lines = list(lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(results.csv_text(list(lines[0]), lines))
    return path


def test_tables_into_a_closed_pipe(small_world, tmp_path):
    """As `| head` leaves it: no error, and nothing of what is written is lost."""
    folder, _ = small_world
    read, write = os.pipe()
    os.close(read)
    ends = []
    for command in (['evaluate.py', '--compare', folder / 'tuned', folder / 'tuned_ls01',
                     f'--out_dir={tmp_path}', '--n_bootstrap=10'],
                    ['metrics.py', folder / 'tuned' / 'samples.jsonl']):
        done = subprocess.run([sys.executable, *command], cwd=HERE, stdout=write,
                              stderr=subprocess.PIPE)
        ends.append((done.returncode, done.stderr))
    os.close(write)
    assert ends == [(128 + signal.SIGPIPE, b''), (-signal.SIGPIPE, b'')]
    assert {'compare.md', 'compare.csv'} <= {p.name for p in tmp_path.iterdir()}


def test_compare_over_seeds(tmp_path, capsys):
    path = write_lines(tmp_path / 'study' / 'compare.csv', study_lines())
    arguments = ['--compare', str(path), '--x=smoothing', '--reference=base', '--where=task=text4',
                 f'--out_dir={tmp_path / "out"}']
    evaluate.main(arguments)
    rows = [[c.strip() for c in line.split('|')[1:-1]]
            for line in (tmp_path / 'out' / 'compare.md').read_text().splitlines()]
    assert rows[0][:7] == ['task', 'smoothing', 'seeds', 'ECE', 'ECE - base', 'ECE - first',
                           'accuracy']
    assert [row[1] for row in rows[2:]] == ['base', '0.0', '0.1'] and {r[2] for r in rows[2:]} == {
        '5'}
    d = [-0.02] * 4 + [-0.01]
    mean, low, high = metrics.mean_interval(d)
    assert rows[4][5] == f'{mean:+.3f} ± {(high - low) / 2:.3f}, p {metrics.student_t(d)[2]:.1g}'
    assert rows[2][4] == rows[2][5] == rows[3][5] == ''
    assert rows[3][4].startswith('+0.080 ± 0.000, p 0')
    assert (tmp_path / 'out' / 'compare.png').read_bytes().startswith(b'\x89PNG')
    with open(tmp_path / 'out' / 'compare.csv') as file:
        again = list(csv.DictReader(file))
    assert len(again) == 15 and {r['task'] for r in again} == {'text4'}
    capsys.readouterr()
    for change, message in (
            (['--x=kind', '--by=', '--reference='], 'fall together; choose by .* run, smoothing'),
            (['--x=lr'], "no column 'lr'; the columns are run, kind"),
            (['--reference=bass'], "reference = .'bass',., but the kinds are base, tuned"),
            (['--where=task'], "where: 'task'; wanted column=value"),
            (['--where=tusk=a'], "where: 'tusk=a'; wanted column=value"),
            (['--where=task=none'], 'where leaves no line'),
            (['--reliability'], 'needs .*bins.csv')):
        with pytest.raises((configs.ConfigError, DataError), match=message):
            evaluate.main([*arguments, *change])
    lines = list(study_lines())
    one, two = ([line | {'language': choice[i % len(choice)] if line['task'] == 'text4' else 'all'}
                 for i, line in enumerate(lines)] for choice in (['en'], ['de', 'en', 'en']))
    write_lines(path, one)      # the only language of this task need not be named
    evaluate.main(arguments)
    assert '| text4 | 0.1 | 5 |' in (tmp_path / 'out' / 'compare.md').read_text()
    write_lines(path, two)
    with pytest.raises(configs.ConfigError, match='no line of text4 has language=all; choose '
                                                  r'language=de\|en'):
        evaluate.main(arguments)
    write_lines(path, lines)
    path.write_text(path.read_text().replace('0.08', 'x.08'))
    with pytest.raises(DataError, match=r"compare.csv:\d+: ece = 'x.08.*' is no number"):
        evaluate.main(arguments)
    path.write_text('a,b\n1,2\n')
    with pytest.raises(DataError, match='it lacks category, kind'):
        evaluate.main(arguments)


@pytest.mark.parametrize('figure', sorted(p.stem for p in (HERE / 'configs/figures').glob('*.py')))
def test_figures_of_the_study(figure, tmp_path, monkeypatch):
    committed = HERE / 'assets' / 'study' / figure
    drawn = []
    monkeypatch.setattr(compare, 'draw_series', lambda path, *rest: drawn.append(path))
    monkeypatch.setattr(compare, 'draw_bins', lambda path, *rest, **more: drawn.append(path))
    evaluate.main(['--compare', str(HERE / 'configs' / 'figures' / f'{figure}.py'),
                   f'--sources={committed / "compare.csv"}', f'--out_dir={tmp_path}'])
    assert (tmp_path / 'compare.md').read_text() == (committed / 'compare.md').read_text()
    assert (tmp_path / 'compare.csv').read_text() == (committed / 'compare.csv').read_text()
    for path in drawn:
        assert (committed / path.name).exists()
    assert ('reliability.png' in {p.name for p in drawn}) == (committed / 'bins.csv').exists()


def test_the_study_is_what_was_run():
    files = [HERE / 'data' / 'demo.py', *sorted((HERE / 'configs' / 'study').glob('*.py'))]
    digest = hashlib.sha256(b''.join(path.read_bytes() for path in files)).hexdigest()
    assert digest in (HERE / 'README.md').read_text(), (
        'the README says which files the study was run with; changed ones need new runs')
    used = sum(p.stat().st_size for p in (HERE / 'assets' / 'study').rglob('*.csv'))
    assert 0 < used < 1e6
    # however the files are written: every setting of every run, of the commits the README names
    default, found = train.TrainConfig(), {}
    for path in files[1:]:
        cfg = configs.load_config(train.TrainConfig, [str(path)])
        runs = [(one.seed, one.world, one.demo_world, name,
                 {f.name: getattr(run, f.name) for f in dataclasses.fields(run)
                  if getattr(run, f.name) != getattr(default, f.name)})
                for one in train.expand_seeds(cfg) for name, run in train.expand_runs(one)]
        if runs:
            found[path.stem] = len(runs), hashlib.sha256(repr(runs).encode()).hexdigest()[:16]
    assert found == {
        'architectures': (30, '0e030a0b7ac97a0d'), 'base': (30, 'b64794aec134b36a'),
        'epochs': (40, '964c9d040ba9c990'), 'homogeneous': (10, 'ea5c565964e7bcc9'),
        'lora': (20, '5d837f7a81498592'), 'size': (30, 'c8cc4aa1ec1c5eaf'),
        'smoothing': (120, '388324abbd506713'), 'vocabulary': (405, 'ddfc050a846d36f2')}


def test_what_the_readme_says_of_claim_3():
    """What no single table has: costs beside effects, trends, the claim's interaction."""
    says = ' '.join((HERE / 'README.md').read_text().split())
    sizes, rows, seeds = (64, 256, 1024), (512, 4_096, 32_768, 262_144), '01234'

    def cell(effect):
        mean, low, high = metrics.mean_interval(effect)
        return f'{mean:.3f} ± {(high - low) / 2:.3f}'

    def tested(effect, digits=3):
        mean, low, high = metrics.mean_interval(effect)
        return (f'{mean:+.{digits}f} ± {(high - low) / 2:.{digits}f}',
                f'p {metrics.student_t(effect)[2]:.1g}')

    def ece_of(figure, task, softcap='30.0'):
        """A function: the ECE of a kind of run, [sizes, rows, seeds]."""
        with open(HERE / 'assets' / 'study' / figure / 'compare.csv') as file:
            ece = {(int(r['hidden_size']), int(r['vocab_size']), r['unused_rows'] != '0', r['kind'],
                    r['smoothing'], r['seed']): float(r['ece']) for r in csv.DictReader(file)
                   if r['task'] == task and r['final_logit_softcapping'] == softcap}
        def of(kind, smoothing, unused=False, rows=rows):
            return np.array([[[ece[d, v, unused, kind, smoothing, seed] for seed in seeds]
                              for v in rows] for d in sizes])
        return of

    def trends(effect):
        """By least squares: of the effect [sizes, rows, seeds] over rows, and over sizes."""
        by_rows, by_sizes = (np.log2(x) - np.log2(x).mean() for x in (rows, sizes))
        return (*tested(9 * np.einsum('dvs,v->s', effect, by_rows) / (3 * (by_rows ** 2).sum())),
                *tested(4 * np.einsum('dvs,d->s', effect, by_sizes) / (4 * (by_sizes ** 2).sum())))

    def interaction(effect, digits=3):
        return tested(effect[0, 3] - effect[0, 0] - effect[2, 3] + effect[2, 0], digits)

    of = ece_of('vocabulary', 'clm')
    tuned, left, base = (np.concatenate((of(*run), of(*run, True, rows[3:])), axis=1)
                         for run in (('tuned', '0.0'), ('tuned', '0.1'), ('base', '0.0')))
    for i, d in enumerate(sizes):
        cells = [f'{cell(tuned[i, j] - left[i, j])} of {(tuned - base)[i, j].mean():.3f}'
                 for j in range(5)]
        assert f'| {d} | {" | ".join(cells)} |' in says
    by_rows, p_rows, by_sizes, p_sizes = trends((tuned - left)[:, :4])
    assert f'({by_rows} from 2^9 to 2^18, {p_rows})' in says
    assert f'({by_sizes} from 64 to 1,024, {p_sizes};' in says
    of = ece_of('vocabulary', 'clm', 'None')
    effect = of('tuned', '0.0') - of('tuned', '0.1')
    by_rows, p_rows, by_sizes, p_sizes = trends(effect)
    changed, p = interaction(effect)
    assert (f'takes {effect.mean(2).min():.3f} to {effect.mean(2).max():.3f}, more with more rows '
            f'({by_rows}, {p_rows}), no less with a small hidden size ({by_sizes}, {p_sizes}), and '
            f'the interaction is gone ({changed}, {p})') in says
    _, p = tested(left[0, 3] - left[2, 3])
    assert (f'{left[0, 3].mean():.3f} is left, against {left[2, 3].mean():.3f} at 1,024 ({p})'
            in says)
    for figure, task, name, digits in (
            ('vocabulary', 'clm', 'next tokens', 3),
            ('vocabulary_questions', 'text4', 'questions', 2),
            ('vocabulary_questions', 'facts', 'first tokens of facts', 3)):
        of = ece_of(figure, task)
        effect = of('tuned', '0.0') - of('tuned', '0.1')
        change, p = interaction(effect, digits)
        assert f'{change} for {name} ({p})' in says
        if task != 'clm':
            harm, p = tested(-effect[2, 0])
            assert f'{harm} for {"questions" if task == "text4" else "facts"}, {p}' in says


def test_what_the_readme_says_of_size():
    says = ' '.join((HERE / 'README.md').read_text().split())
    for width, weights in ((128, 1), (256, 6), (512, 34), (1024, 210)):
        cells = []
        for figure, task in (('size', 'text4'), ('size_all', 'text4'), ('size_all', 'facts'),
                             ('size_all', 'clm')):
            with open(HERE / 'assets' / 'study' / figure / 'compare.csv') as file:
                ece = {(r['smoothing'], r['seed']): float(r['ece']) for r in csv.DictReader(file)
                       if (r['kind'], r['task'], r['hidden_size']) == ('tuned', task, str(width))}
            tuned, smoothed = ({seed: ece[s, seed] for seed in '01234'} for s in ('0.0', '0.1'))
            mean = sum(tuned.values()) / 5
            cells.append(f'{mean:.3f}, {compare.paired(smoothed, tuned)}')
        assert f'| {weights} million | {" | ".join(cells)} |' in says


def test_no_whiskers_of_two_seeds():
    assert compare.mean_and_ends([1.0, 3.0]) == [2.0, 2.0, 2.0]
    assert compare.mean_and_ends([1.0, 2.0, 3.0]) == pytest.approx((2.0, -0.484138, 4.484138))


def test_a_small_study(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    study = HERE / 'configs' / 'study'
    world = dict(entities=500, unseen=20, first_names=40, family_names=40, documents=300,
                 tokenizer_documents=300, vocab_sizes='700,', instructions=80, questions=12,
                 unseen_questions=6, validation=12, probes=10)
    shape = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
                 num_key_value_heads=2)
    train.main([str(study / 'base.py'), '--seeds=0,1', '--only=base', f'--runs.base.shape={shape}',
                *(f'--world.{k}={v}' for k, v in world.items()), '--batch_size=64',
                '--micro_rows=4', '--workers=1', '--eval_reach', '--eval_pack_len=512'])
    train.main([str(study / 'smoothing.py'), '--seeds=0,1', '--vary.lr=8e-4',
                '--vary.smoothing=0.0,0.1', '--workers=1', '--epochs=1', '--eval_pack_len=512'])
    evaluate.main(['--compare', str(HERE / 'configs' / 'figures' / 'temperature.py'),
                   '--out_dir=temperature'])
    evaluate.main(['--compare', str(HERE / 'configs' / 'figures' / 'headline.py'),
                   '--out_dir=headline'])
    assert {'compare.png', 'compare.csv', 'bins.csv', 'reliability.png'} <= {
        p.name for p in Path('headline').iterdir()}
    # again from the numbers alone
    evaluate.main(['--compare', str(HERE / 'configs' / 'figures' / 'headline.py'),
                   '--sources=headline/compare.csv', '--out_dir=again'])
    for name in ('compare.md', 'compare.csv', 'bins.csv'):
        assert (Path('again') / name).read_text() == (Path('headline') / name).read_text()
    with open('temperature/compare.csv') as file:
        lines = list(csv.DictReader(file))
    assert {line['scaling'] for line in lines} == {'none', 'temperature'}
    assert {line['language'] for line in lines} == {'en', 'l1', 'l2', 'l3'}
    line = next(r for r in lines if (r['kind'], r['seed'], r['language'], r['category'],
                                     r['scaling']) == ('base', '1', 'l2', 'seen', 'temperature'))
    samples = results.read_samples(Path('out/study/base/seed-1/base/samples.jsonl'))
    mine = [s for s in samples if s['task'] == 'text4']
    held = results.predictions([s for s in mine if s['split'] == 'validation'], 'token')
    assert len(held.labels) == 12
    some = results.predictions([s for s in mine if (s['language'], s['category']) == ('l2', 'seen')
                                and s['split'] == 'test'], 'token')
    temperature = metrics.fit_temperature(held.scores, held.labels)
    assert float(line['temperature']) == pytest.approx(temperature, rel=1e-4)
    assert float(line['ece']) == pytest.approx(
        metrics.ece(metrics.softmax(some.scores, temperature), some.labels), rel=1e-4)
    reach = json.loads(Path('out/study/base/seed-0/base/results.json').read_text())['reach']
    assert 0 < reach['lowest_bits'] <= reach['highest_bits'] <= reach['log2_vocab']
    # done already: nothing is trained again, and a second command says so
    capsys.readouterr()
    with pytest.raises(configs.ConfigError, match='holds a finished run'):
        train.main([str(study / 'smoothing.py'), '--seeds=0', '--vary.lr=8e-4',
                    '--vary.smoothing=0.0,0.1'])


def test_reachable_entropy():
    config = models.ModelConfig(model_type='llama', vocab_size=8, hidden_size=8,
                                intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
                                num_key_value_heads=2, head_dim=4, tie_word_embeddings=False)
    model = models.CausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.copy_(2 * torch.eye(8))
    found = evaluate.reachable_entropy(model, 8, n_tokens=8)
    # the surest state puts all of its length sqrt(8) into one direction, or a little against the
    # others: logits a for one and b for the others, a^2 + 7 b^2 = 4 * 8
    a = np.linspace(0, 32 ** 0.5, 100_001)
    gap = (a + np.sqrt(np.maximum(32 - a ** 2, 0) / 7)).max()
    p = 1 / (1 + 7 * math.exp(-gap))
    entropy = -p * math.log2(p) - (1 - p) * math.log2((1 - p) / 7)
    assert found['lowest_bits'] == pytest.approx(entropy, abs=1e-3)
    assert found['lowest_nll_bits'] == pytest.approx(-math.log2(p), abs=1e-3)
    assert found['highest_bits'] == pytest.approx(3, abs=1e-3) and found['log2_vocab'] == 3
    model.config.final_logit_softcapping = 1.0
    capped = evaluate.reachable_entropy(model, 8, n_tokens=8)['lowest_bits']
    p = 1 / (1 + 7 * math.exp(-2))      # not less than logits of 1 and -1
    floor = -p * math.log2(p) - (1 - p) * math.log2((1 - p) / 7)
    assert floor < capped and capped > found['lowest_bits']


def test_bad_questions_are_counted_or_stop(scored_folder, tmp_path, capsys):
    good = {'question': 'the quick brown fox?', 'choices': ['dog', 'old'], 'answer': 0}
    rows = [good, good | {'choices': ['', 'dog']}, good | {'question': 'lazy dog ' * 300},
            good | {'answer': 'Q'}]
    path = write_rows(tmp_path / 'mixed.jsonl', rows)
    common = [f'--model={scored_folder / "model"}', f'--tasks={path}', '--shots=0',
              '--max_length=200']
    with pytest.raises(DataError, match='mixed.jsonl:2: choice A is empty; --on_bad_row=skip'):
        evaluate.main([*common, f'--out_dir={tmp_path / "stop"}'])
    evaluate.main([*common, f'--out_dir={tmp_path / "skip"}', '--on_bad_row=skip'])
    result = json.loads((tmp_path / 'skip' / 'results.json').read_text())['tasks']['mixed']
    assert result['bad_rows'] == 3 and result['pooled']['n'] == 1
    assert '3 bad rows left out, the first: ' in capsys.readouterr().out
    write_rows(tmp_path / 'mixed.jsonl', rows[2:3])
    with pytest.raises(DataError, match='even without shots has a prompt of .* max_length allows'):
        evaluate.main([*common, f'--out_dir={tmp_path / "long"}'])


def test_next_tokens_and_facts(scored_folder, tmp_path, capsys):
    words = 'the quick brown fox jumps over a lazy dog by the old stone river'.split()
    rows = [{'id': f't{i}', 'text': ' '.join(words[i:] + words[:i])} for i in range(12)]
    write_rows(tmp_path / 'texts.jsonl', rows)
    entity = [row | {'spans': [[row['text'].index(w), row['text'].index(w) + len(w)]
                               for w in ('dog', 'fox', 'dog')]} for row in rows]
    write_rows(tmp_path / 'facts.jsonl', entity)
    trex = [{'docid': 'x', 'text': 'a lazy dog', 'entities': [{'boundaries': [7, 10]},
                                                              {'boundaries': [0, 1]}]}]
    (tmp_path / 'trex.json').write_text(json.dumps(trex))

    def run(*arguments):
        out = tmp_path / str(len(list(tmp_path.iterdir())))
        evaluate.main([f'--model={scored_folder / "model"}', f'--out_dir={out}', *arguments])
        return json.loads((out / 'results.json').read_text())['tasks'], results.read_samples(
            out / 'samples.jsonl')
    tasks, samples = run(f'--tasks=clm:{tmp_path / "texts.jsonl"},facts:{tmp_path / "facts.jsonl"}')
    assert tasks['clm']['pooled']['n'] == 12 and tasks['facts']['pooled']['n'] >= 22
    assert tasks['clm']['pooled'].keys() >= {'accuracy', 'ece', 'rmsce', 'entropy_bits', 'nll'}
    tokenizer, model = load_tokenizer(scored_folder / 'model'), models.load(scored_folder / 'model')
    for sample in samples:
        text = next(r['text'] for r in rows if r['id'] == sample['text'])
        ids = [tokenizer.bos_id, *tokenizer.encode(text)]
        assert sample['token'] == ids[sample['position']]
        tokens = torch.tensor([ids[:sample['position']]])
        probs = model.logits(model(tokens, *whole_rows(tokens)))[0, -1].softmax(-1)
        assert sample['top_token'] == probs.argmax()
        assert sample['confidence'] == pytest.approx(probs.max().item(), abs=1e-5)
        if sample['task'] == 'facts':   # the entity, from its beginning on
            rest = tokenizer.decode(ids[sample['position']:], start=False).strip()
            assert rest.startswith(('dog', 'fox'))
    again = run(f'--tasks=clm:{tmp_path / "texts.jsonl"}', '--limit=5')[1]
    assert {s['id']: s['position'] for s in again}.items() <= {
        s['id']: s['position'] for s in samples if s['task'] == 'clm'}.items()
    _, told = run(f'--tasks=facts:{tmp_path / "trex.json"}', '--instruct')
    assert len(told) == 2 and all(s['id'] == f'x:{s["position"]}' for s in told)
    # another seed asks for other tokens, and is not taken for what was asked before
    out = [f'--model={scored_folder / "model"}', f'--out_dir={tmp_path / "seeds"}',
           f'--tasks=clm:{tmp_path / "texts.jsonl"}']
    evaluate.main([*out, '--seed=1'])
    evaluate.main([*out, '--seed=2'])
    count = json.loads((tmp_path / 'seeds' / 'results.json').read_text())['tasks']['clm']['pooled']
    positions = {}
    for sample in results.read_samples(tmp_path / 'seeds' / 'samples.jsonl'):
        positions.setdefault(sample['id'], []).append(sample['position'])
    assert count['n'] == 12 == len(positions) and any(len(p) == 2 for p in positions.values())
    with pytest.raises(DataError, match='facts: where are the texts'):
        run('--tasks=facts')
    write_rows(tmp_path / 'bad.jsonl', [{'text': 'a dog', 'spans': [[2, 9]]}])
    with pytest.raises(DataError, match=r'bad.jsonl:1: span \[2, 9\] is not'):
        run(f'--tasks=facts:{tmp_path / "bad.jsonl"}')


HARNESS = """
import datasets, json, sys, torch, transformers, lm_eval
from lm_eval.models.huggingface import HFLM

model, data, calls = sys.argv[1], json.load(open(sys.argv[2])), json.loads(sys.argv[3])

def load_dataset(path, name=None, **options):
    rows = data[path]
    rows = rows.get(name) or rows['']
    return datasets.DatasetDict({split: datasets.Dataset.from_list(r) for split, r in rows.items()})
datasets.load_dataset = load_dataset
tokenizer = transformers.AutoTokenizer.from_pretrained(model)
lm = HFLM(transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
          tokenizer=tokenizer, batch_size=8, device='cpu')
found = {}
for tasks, shots in calls:
    results = lm_eval.simple_evaluate(lm, tasks=tasks, num_fewshot=shots, log_samples=True,
                                      bootstrap_iters=0)
    for task, samples in results['samples'].items():
        samples.sort(key=lambda s: s['doc_id'])
        found[task] = [[r[0] if isinstance(r[0], float) else r[0][0] for r in s['filtered_resps']]
                       if not isinstance(s['filtered_resps'][0][0], list) else
                       [r[0][0] for r in s['filtered_resps']] for s in samples]
json.dump({'versions': [lm_eval.__version__, transformers.__version__], 'found': found},
          open(sys.argv[4], 'w'))
"""


@needs_shared
@pytest.mark.skipif(importlib.util.find_spec('lm_eval') is None, reason='needs lm-eval')
@pytest.mark.parametrize('name, file', [
    ('llama', 'llama2_tokenizer.model'), ('mistral', 'mistral_tokenizer.model.v1'),
    ('gemma2', 'llama2_tokenizer.model')])
def test_log_probs_equal_lm_evaluation_harness(name, file, tmp_path):
    """Every option of real rows, in float32, with lm-evaluation-harness's own tasks and model."""
    folder = tmp_path / 'model'
    folder.mkdir()
    shutil.copyfile(SHARED / 'tokenizers' / file, folder / 'tokenizer.model')
    reference_model(name, folder, vocab_size=32000, max_position_embeddings=4096, head_dim=16)
    import transformers
    transformers.LlamaTokenizer.from_pretrained(folder, add_bos_token=True).save_pretrained(folder)
    datasets, rng = SHARED / 'datasets', random.Random(0)

    def rows(path):
        with gzip.open(datasets / path, 'rt') as lines:
            return [json.loads(line) for line in lines]
    # transformers parts two spaces otherwise than the sentencepiece model does
    xcopa = [json.loads(line) for line in open(datasets / 'xcopa' / 'test.sw.jsonl')
             if '  ' not in line]
    mmlu, dev = rows('mmlu/test.jsonl.gz'), rows('mmlu/dev.jsonl.gz')
    picked = {'mmlu/dev.jsonl': dev, 'xcopa/test.sw.jsonl': rng.sample(xcopa, 20),
              'mmlu/test.jsonl': rng.sample([r for r in mmlu if r['subject'] == 'anatomy'], 12),
              'arc/ARC-Easy-test.jsonl': rng.sample(rows('arc_easy/ARC-Easy-test.jsonl.gz'), 25),
              'hellaswag/hellaswag_val.jsonl': rng.sample(rows(
                  'hellaswag/hellaswag_val_1000.jsonl.gz'), 25)}
    for place, some in picked.items():
        write_rows(tmp_path / place, some)
    arc, hellaswag = picked['arc/ARC-Easy-test.jsonl'], picked['hellaswag/hellaswag_val.jsonl']
    anatomy = [row for row in dev if row['subject'] == 'anatomy']
    content = {'cais/mmlu': {'anatomy': {'test': picked['mmlu/test.jsonl'], 'dev': anatomy}},
               'allenai/ai2_arc': {'ARC-Easy': {k: arc for k in ('train', 'validation', 'test')}},
               'Rowan/hellaswag': {'': {'train': hellaswag, 'validation': hellaswag}},
               'cambridgeltl/xcopa': {'sw': {k: picked['xcopa/test.sw.jsonl']
                                             for k in ('validation', 'test')}}}
    (tmp_path / 'data.json').write_text(json.dumps(content))
    (tmp_path / 'harness.py').write_text(HARNESS)
    calls = [(['mmlu_anatomy'], 5), (['arc_easy', 'hellaswag', 'xcopa_sw'], 0)]
    # elsewhere: its package `evaluate` has the name of our file
    done = subprocess.run([sys.executable, 'harness.py', folder, 'data.json', json.dumps(calls),
                           'found.json'], cwd=tmp_path, capture_output=True, text=True,
                          env={**os.environ, 'HF_DATASETS_OFFLINE': '1', 'HF_HUB_OFFLINE': '1'})
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = json.loads((tmp_path / 'found.json').read_text())
    print('lm-eval {}, transformers {}'.format(*theirs['versions']))
    for task, place, shots in (('mmlu_anatomy', f'mmlu:{tmp_path / "mmlu"}', 5),
                               ('arc_easy', f'arc_easy:{tmp_path / "arc"}', 0),
                               ('hellaswag', f'hellaswag:{tmp_path / "hellaswag"}', 0),
                               ('xcopa_sw', f'xcopa:{tmp_path / "xcopa"}', 0)):
        out = tmp_path / f'out-{task}'
        evaluate.main([f'--model={folder}', f'--tasks={place}', f'--shots={shots}',
                       '--preset=harness', f'--out_dir={out}', '--n_bootstrap=0'])
        ours = [s['log_probs'] for s in results.read_samples(out / 'samples.jsonl')]
        assert len(ours) == len(theirs['found'][task]) > 10
        for a, b in zip(ours, theirs['found'][task], strict=True):
            assert a == pytest.approx(b, abs=1e-4)


# ------------------------------------------------------------------------------------------------
# fused_ce.py: the smoothed cross-entropy against float64 autograd through F.cross_entropy
#
# The same tests run three times: in plain torch, through the Triton kernel in Triton's interpreter
# (which needs TRITON_INTERPRET=1 before triton is imported) and on the GPU, where there is one.
# ------------------------------------------------------------------------------------------------

numpy_warns = pytest.mark.filterwarnings('ignore::RuntimeWarning')    # the interpreter's exp(1000)


@pytest.fixture(params=['torch', 'interpreter', 'cuda'])
def ce_device(request, monkeypatch):
    """The device to put tensors on, once for each implementation."""
    if request.param == 'cuda':
        if not torch.cuda.is_available():
            pytest.skip('needs a CUDA device')
        torch.backends.cuda.matmul.allow_tf32 = False
    if request.param == 'interpreter':
        if fused_ce.triton is None:
            pytest.skip('triton is not installed')
        if os.environ.get('TRITON_INTERPRET') != '1':
            pytest.skip('the kernel is compiled for the GPU and tested there')
        monkeypatch.setattr(fused_ce, '_use_triton', lambda x: True)
    monkeypatch.setattr(fused_ce, 'BLOCK', 256)     # so that small rows take several blocks
    if request.param == 'interpreter':
        monkeypatch.setattr(fused_ce, 'TILE', (16, 64, 32))
    return 'cuda' if request.param == 'cuda' else 'cpu'


def ce_inputs(N, D, V, device='cpu', dtype=torch.float32, ignored=0.2, std=1.0, seed=0):
    """hidden, weight (logits of standard deviation `std`) and targets, some of them ignored."""
    make = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, D, generator=make) * std
    weight = torch.randn(V, D, generator=make) / D ** 0.5
    target = torch.randint(0, V, (N,), generator=make)
    target[torch.rand(N, generator=make) < ignored] = -100
    target[:1] = V - 1      # one counts, always
    hidden, weight = hidden.to(device, dtype), weight.to(device, dtype)
    return hidden.requires_grad_(), weight.requires_grad_(), target.to(device)


def ce_reference(hidden, weight, target, smoothing=0.0, softcap=None, dtype=torch.float64, **kw):
    """Loss, dh and dW by autograd through all logits at once, the products in `dtype`."""
    hidden = hidden.detach().to(dtype).requires_grad_()
    weight = weight.detach().to(dtype).requires_grad_()
    z = hidden @ weight.T
    z = z if dtype == torch.float64 else z.float()
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    loss = F.cross_entropy(z, target, label_smoothing=smoothing, **kw)
    loss.backward()
    return loss.detach(), hidden.grad, weight.grad


def ce_ours(hidden, weight, target, **kw):
    hidden.grad = weight.grad = None
    loss, nll = smoothed_cross_entropy(hidden, weight, target, **kw)
    loss.backward()
    return loss.detach(), hidden.grad, weight.grad


def off(a, b):
    """Relative error of a in the Euclidean norm."""
    a, b = a.detach().double(), b.detach().double()
    return ((a - b).norm() / b.norm().clamp_min(1e-30)).item()


def assert_close(ours, reference, limit=1e-5):
    for name, a, b in zip(('loss', 'dh', 'dW'), ours, reference, strict=True):
        assert off(a, b) < limit, f'{name} is off by {off(a, b):.1e}'


@pytest.mark.parametrize('softcap', [None, 5.0, 30.0])
@pytest.mark.parametrize('smoothing', [0.0, 0.1, 1.0])
@pytest.mark.parametrize('N, D, V', [(1, 64, 17), (7, 31, 123), (252, 123, 507)])
def test_ce_equals_torch(ce_device, N, D, V, smoothing, softcap):
    if fused_ce._use_triton(torch.empty(0)):    # the interpreter takes 20 ms a row
        N = min(N, 7)
    hidden, weight, target = ce_inputs(N, D, V, ce_device, std=3.0)
    kw = dict(smoothing=smoothing, softcap=softcap)
    assert_close(ce_ours(hidden, weight, target, **kw), ce_reference(hidden, weight, target, **kw))
    loss, nll = smoothed_cross_entropy(hidden, weight, target, **kw)
    assert off(nll, ce_reference(hidden, weight, target, softcap=softcap)[0]) < 1e-5
    assert loss.dtype == nll.dtype == torch.float32 and not nll.requires_grad
    total = ce_ours(hidden, weight, target, reduction='sum', **kw)
    assert_close(total, ce_reference(hidden, weight, target, reduction='sum', **kw))


def test_ce_chunks_do_not_matter(ce_device):
    hidden, weight, target = ce_inputs(11, 24, 70, ce_device)
    whole = ce_ours(hidden, weight, target, smoothing=0.1, softcap=5.0, chunk_rows=100)
    for rows in (1, 4, 8):
        parts = ce_ours(hidden, weight, target, smoothing=0.1, softcap=5.0, chunk_rows=rows)
        assert_close(parts, whole, 2e-6)


CE_MODES = {    # name: options; the space that slices take is cut in ce_slices
    'chunks': dict(chunk_rows=4),
    'slices': dict(memory=1),
    'none': dict(reduction='none', memory=1),
}


@pytest.fixture
def ce_slices(monkeypatch):
    """Several slices of the vocabulary in several blocks of tokens, for inputs of test size."""
    monkeypatch.setattr(fused_ce, 'MIN_SLICE', 64)
    monkeypatch.setattr(fused_ce, '_slice_shape', lambda n, *_: (max(1, (n + 1) // 2), 64))


def ce_mean(hidden, weight, target, mode, **kw):
    """Mean loss, dh and dW in one of CE_MODES."""
    hidden.grad = weight.grad = None
    loss, _ = smoothed_cross_entropy(hidden, weight, target, **CE_MODES[mode], **kw)
    loss = loss.sum() / (target != -100).sum() if mode == 'none' else loss
    loss.backward()
    return loss.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize('mode', CE_MODES)
@pytest.mark.parametrize('softcap', [None, 5.0])
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16])
def test_ce_modes_agree(ce_device, ce_slices, mode, softcap, dtype):
    hidden, weight, target = ce_inputs(11, 24, 200, ce_device, dtype, std=3.0)
    if dtype == torch.bfloat16 and fused_ce._use_triton(torch.empty(0)) and ce_device == 'cpu':
        pytest.skip('the interpreter cuts bfloat16 off where the GPU rounds')
    kw = dict(smoothing=0.1, softcap=softcap)
    exact = ce_reference(hidden, weight, target, **kw)
    ours = ce_mean(hidden, weight, target, mode, **kw)
    if dtype == torch.float32:
        assert_close(ours, exact)
        return
    torch_s = ce_reference(hidden, weight, target, dtype=dtype, **kw)
    limit = 1.6 if mode == 'chunks' else 1.2        # three chunks round dW three times
    for a, b, c in zip(ours, torch_s, exact, strict=True):
        assert a.dtype in (dtype, torch.float32) and off(a, c) < limit * off(b, c) + 1e-4


def test_ce_chunks_from_memory():
    def plan(n, V, D, dtype=torch.bfloat16, need_dw=True, param=None, **kw):
        weight = torch.empty(V, D, device='meta', dtype=param or dtype)
        options = dict(memory=fused_ce.MEMORY, chunk_rows=None) | kw
        call = fused_ce._Call(None, None, 0.1, None, dtype, with_gradient=True, **options)
        return fused_ce._chunk_rows(n, weight, call, need_dw)

    bf16, f32 = torch.bfloat16, torch.float32
    gemma, llama, mistral = (256000, 2304), (128256, 4096), (32768, 4096)
    assert plan(8192, *gemma) == (2048, bf16)       # 1.05 GB of logits, four chunks
    assert plan(8192, *llama) == (4096, bf16)
    assert plan(8192, *mistral) == (8192, bf16)     # 0.54 GB: all at once
    assert plan(8192, *gemma, memory=2 ** 29) == (1024, bf16)
    assert plan(8192, *gemma, memory=2 ** 28)[0] is None        # sixteen chunks: slices
    assert plan(65536, *gemma, memory=3 * 10 ** 9)[1] == f32    # twelve, and room for a wide sum
    assert plan(8193, *gemma) == (1664, bf16)       # five alike, not four and one token
    assert plan(8192, *gemma, param=f32) == (2048, f32)
    assert plan(8192, *gemma, need_dw=False, memory=2 ** 28) == (512, None)
    assert plan(8192, *gemma, dtype=torch.float16)[0] is None   # a float32 dW does not fit
    assert plan(8192, *mistral, dtype=torch.float16) == (8192, f32)
    assert plan(0, 32, 8) == (1, bf16)
    for memory in (0, 2 ** 27, 2 ** 29, 2 ** 31):
        for n, (V, D) in itertools.product((1, 4096, 8192), (gemma, llama, mistral)):
            weight = torch.empty(V, D, device='meta', dtype=bf16)
            call = fused_ce._Call(torch.empty(0), None, 0.1, None, bf16, memory, None, True)
            rows, width = fused_ce._slice_shape(n, weight, call, need_dh=True)
            assert rows * (2 * D + 2 * width) <= (memory or fused_ce.LOW_MEMORY)
            assert n <= 8 * rows and (width >= 4096 or width == V)


def test_ce_ignored_tokens_are_dropped(ce_device):
    hidden, weight, target = ce_inputs(9, 16, 40, ce_device, ignored=0.0)
    drop = torch.tensor([1, 2, 6], device=ce_device)
    keep = torch.tensor([0, 3, 4, 5, 7, 8], device=ce_device)
    target = target.clamp_max(38)
    for ignore_index in (-100, 0, 39):
        target = target.masked_fill(target == ignore_index, 5)
        loss, dh, dw = ce_reference(hidden[keep], weight, target[keep], smoothing=0.1)
        masked = target.index_fill(0, drop, ignore_index)
        with torch.no_grad():
            hidden[drop] = float('nan')     # what is ignored cannot spread
        ours = ce_ours(hidden, weight, masked, smoothing=0.1, ignore_index=ignore_index)
        assert_close((ours[0], ours[1][keep], ours[2]), (loss, dh, dw))
        assert ours[1][drop].eq(0).all()


@pytest.mark.parametrize('reduction', ['mean', 'sum', 'none'])
@pytest.mark.parametrize('N', [0, 3])
def test_ce_no_token_counts(ce_device, N, reduction):
    hidden, weight, _ = ce_inputs(N, 8, 20, ce_device)
    target = torch.full((N,), -100, device=ce_device)
    loss, nll = smoothed_cross_entropy(hidden, weight, target, smoothing=0.1, reduction=reduction)
    assert loss.shape == nll.shape == (torch.Size([N]) if reduction == 'none' else torch.Size([]))
    assert loss.eq(0).all() and nll.eq(0).all()
    loss.sum().backward()
    assert hidden.grad.eq(0).all() and weight.grad.eq(0).all()
    for num_items in (0, 5, torch.tensor(0)):
        loss, _ = smoothed_cross_entropy(hidden, weight, target, num_items=num_items)
        assert loss.item() == 0


def test_ce_first_and_last_label(ce_device):
    hidden, weight, target = ce_inputs(4, 16, 300, ce_device)
    for label in (0, 255, 256, 299):    # the edges of the vocabulary and of a block
        target = torch.full_like(target, label)
        assert_close(ce_ours(hidden, weight, target, smoothing=0.1),
                     ce_reference(hidden, weight, target, smoothing=0.1))


@pytest.mark.parametrize('label', [-1, 20, 2 ** 40])
def test_ce_label_outside_the_vocabulary(ce_device, label):
    hidden, weight, target = ce_inputs(3, 8, 20, ce_device)
    target[1] = label
    with pytest.raises(ValueError, match=rf'target {label} is neither in \[0, 20\)'):
        smoothed_cross_entropy(hidden, weight, target)


def test_ce_says_what_is_wrong():
    hidden, weight, target = ce_inputs(3, 8, 20, ignored=0)

    def message(h=hidden, w=weight, y=target, **kw):
        with pytest.raises(ValueError) as error:
            smoothed_cross_entropy(h, w, y, **kw)
        return str(error.value)

    for smoothing in (-0.1, 1.1, float('nan')):
        assert 'smoothing must be in [0, 1]' in message(smoothing=smoothing)
    for softcap in (0, -30.0, float('inf')):
        assert 'softcap must be a positive number' in message(softcap=softcap)
    assert '[3, 8] and [8, 20]' in message(w=weight.T)
    assert 'leading shape of hidden, [3], got [2]' in message(y=target[:2])
    assert 'integer token ids' in message(y=target.float())
    assert 'hidden is torch.bfloat16 but weight is torch.float32' in message(h=hidden.bfloat16())
    assert 'float32, bfloat16 or float16' in message(h=hidden.double(), w=weight.double())
    assert "'mean', 'sum' or 'none'" in message(reduction='avg')
    assert 'num_items' in message(reduction='sum', num_items=3)
    assert 'num_items must be positive' in message(num_items=0)
    assert 'chunk_rows' in message(chunk_rows=0)
    with pytest.raises(ValueError, match=r'tokens holds 20, which is not in \[0, 20\)'):
        token_log_probs(hidden, weight, torch.tensor([0]), torch.tensor([20]))
    with pytest.raises(ValueError, match=r'rows holds 3'):
        token_log_probs(hidden, weight, torch.tensor([3]), torch.tensor([0]))


@numpy_warns
@pytest.mark.parametrize('softcap', [None, 1.0, 30.0])
def test_ce_huge_logits(ce_device, softcap):
    hidden, weight, target = ce_inputs(5, 16, 300, ce_device, std=1e4, ignored=0)
    kw = dict(smoothing=0.1, softcap=softcap)
    loss, dh, dw = ce_ours(hidden, weight, target, **kw)
    expected = ce_reference(hidden, weight, target, **kw)
    assert off(loss, expected[0]) < 1e-5
    for ours, wanted in ((dh, expected[1]), (dw, expected[2])):
        # under a cap nearly every logit is saturated: the gradient goes to 0, and never to nan
        assert (ours - wanted).abs().max() < 1e-5 * hidden.abs().max()


def test_ce_shift_and_equal_logits(ce_device):
    hidden, weight, target = ce_inputs(4, 16, 300, ce_device, ignored=0)
    with torch.no_grad():
        hidden[:, 0] = 1
    shift = torch.zeros_like(weight)
    shift[:, 0] = 100
    before = ce_ours(hidden, weight, target, smoothing=0.1)
    after = ce_ours(hidden, (weight + shift).detach().requires_grad_(), target, smoothing=0.1)
    assert abs(before[0] - after[0]) < 1e-4 and off(after[2], before[2]) < 1e-4
    flat, nll = smoothed_cross_entropy(hidden, torch.zeros_like(weight), target, smoothing=0.1)
    assert abs(flat - math.log(300)) < 1e-5 and abs(nll - math.log(300)) < 1e-5


@numpy_warns
def test_ce_infinite_and_nan_logits(ce_device):
    hidden, weight, target = ce_inputs(3, 8, 300, ce_device, ignored=0)
    hidden, weight = hidden.detach().abs(), weight.detach()
    weight[:270] = float('-inf')        # a whole block, and some of the next
    target.fill_(280)
    hard, _ = smoothed_cross_entropy(hidden, weight, target)
    assert off(hard, ce_reference(hidden, weight, target)[0]) < 1e-5
    assert smoothed_cross_entropy(hidden, weight, target, smoothing=0.1)[0] == float('inf')
    hidden[1, 2] = float('nan')
    loss, _ = smoothed_cross_entropy(hidden, weight[270:], target - 270, reduction='none')
    assert loss.isnan().tolist() == [False, True, False]


@numpy_warns
def test_ce_small_cap_beside_the_row_end(ce_device):
    # a masked logit is -inf, but -softcap if the mask comes before the cap: it would then count
    for V in (257, 300):
        hidden, weight, target = ce_inputs(4, 16, V, ce_device, ignored=0)
        for smoothing in (0.0, 0.1):
            kw = dict(smoothing=smoothing, softcap=1.0)
            assert_close(ce_ours(hidden, weight, target, **kw),
                         ce_reference(hidden, weight, target, **kw))


@pytest.mark.parametrize('reduction', ['sum', 'none'])
def test_ce_logit_gradient_sums_to_zero(ce_device, reduction):
    logits, _, target = ce_inputs(4, 300, 300, ce_device, std=4.0, ignored=0)
    identity = torch.eye(300, device=ce_device)     # hidden is the logits, dh their gradient
    loss, _ = smoothed_cross_entropy(logits, identity, target, smoothing=0.1, reduction=reduction)
    loss.sum().backward()
    assert logits.grad.sum(1).abs().max() < 1e-6


def test_ce_label_entry_keeps_its_digits(ce_device):
    # as p_y nears 1 - smoothing + smoothing / V, the label's gradient is a small difference
    V, smoothing = 300, 0.1
    identity = torch.eye(V, device=ce_device)
    for p in (0.5, 0.85, 0.9, 0.9003, 0.95, 0.9999):
        logits = torch.zeros(1, V, device=ce_device)
        logits[0, 7] = math.log(p / (1 - p) * (V - 1))
        logits = logits.bfloat16().requires_grad_()
        target = torch.tensor([7], device=ce_device)
        loss, _ = smoothed_cross_entropy(logits, identity.bfloat16(), target, smoothing=smoothing)
        loss.backward()
        expected = logits.detach().double().softmax(1) - smoothing / V
        expected[0, 7] -= 1 - smoothing
        assert abs(logits.grad[0, 7] - expected[0, 7]) < 2 ** -7 * abs(expected[0, 7]) + 1e-6


def test_ce_unlikely_tokens_are_pulled_up(ce_device):
    # dW of a token with no probability is the uniform term alone, to the last digit it has
    hidden, weight, target = ce_inputs(6, 16, 300, ce_device, ignored=0)
    target = target.clamp_max(199)
    with torch.no_grad():
        hidden[:, 0] = 10
        weight[200:] = 0
        weight[200:, 0] = -20
    _, _, dw = ce_ours(hidden, weight, target, smoothing=0.1)
    uniform = -0.1 / 300 * hidden.detach().double().mean(0)
    assert off(dw[200:], uniform.expand(100, -1)) < 1e-6


def test_ce_smoothing_is_rank_one_without_cap(ce_device):
    hidden, weight, target = ce_inputs(6, 16, 300, ce_device, ignored=0)
    smooth = ce_ours(hidden, weight, target, smoothing=0.1)
    hard, _ = smoothed_cross_entropy(hidden, weight, target)
    hidden.grad = weight.grad = None
    composed = hard + 0.1 * (hidden * (weight[target] - weight.mean(0))).sum(1).mean()
    composed.backward()
    assert_close(smooth, (composed, hidden.grad, weight.grad))


def test_ce_full_smoothing_forgets_the_label(ce_device):
    hidden, weight, target = ce_inputs(4, 16, 40, ce_device, ignored=0)
    assert_close(ce_ours(hidden, weight, target, smoothing=1.0),
                 ce_ours(hidden, weight, (target + 1) % 40, smoothing=1.0), 1e-6)


def test_ce_any_layout(ce_device):
    B, T, D, V = 2, 4, 16, 40
    hidden, weight, target = ce_inputs(B * T, D, V, ce_device)
    expected = ce_ours(hidden, weight, target, smoothing=0.1)
    # [B, T, D] with columns that are rows of something else, int32 labels with a stride
    rows = hidden.detach().view(B, T, D).transpose(0, 1).contiguous().requires_grad_()
    columns = weight.detach().T.contiguous().requires_grad_()
    labels = torch.stack([target.view(B, T)] * 2, dim=-1).int()[..., 0]
    loss, _ = smoothed_cross_entropy(rows.transpose(0, 1), columns.T, labels, smoothing=0.1)
    loss.backward()
    dh = rows.grad.transpose(0, 1).reshape(B * T, D)
    assert_close((loss, dh, columns.grad.T), expected, 1e-6)
    # the usual shift by one
    wide = torch.cat([hidden.detach().view(B, T, D)] * 2, dim=1)[:, :T].requires_grad_()
    per_token, _ = smoothed_cross_entropy(wide[:, :-1], weight, target.view(B, T)[:, 1:],
                                          reduction='none')
    assert per_token.shape == (B, T - 1)


def test_ce_upstream_gradient(ce_device):
    hidden, weight, target = ce_inputs(5, 16, 40, ce_device, dtype=torch.bfloat16)
    for chunk_rows in (100, 2):
        _, dh, dw = ce_ours(hidden, weight, target, smoothing=0.1, chunk_rows=chunk_rows)
        for factor in (1 / 3, -7.3, 0.0):
            hidden.grad = weight.grad = None
            loss, _ = smoothed_cross_entropy(hidden, weight, target, smoothing=0.1,
                                             chunk_rows=chunk_rows)
            (factor * loss).backward()
            # twice the rounding of bfloat16, and no common factor of rounding
            assert off(hidden.grad, factor * dh.double()) < 4e-3
            assert off(weight.grad, factor * dw.double()) < 4e-3
            drift = (weight.grad.double() * dw.double()).sum() / dw.double().square().sum()
            # the interpreter cuts bfloat16 off where the GPU rounds
            limit = 4e-3 if fused_ce._use_triton(torch.empty(0)) else 1e-3
            assert abs(drift - factor) <= limit * abs(factor)


def test_ce_one_gradient_per_token(ce_device):
    hidden, weight, target = ce_inputs(8, 16, 40, ce_device)
    kw = dict(smoothing=0.1, softcap=5.0)
    upstream = torch.linspace(-2, 3, 8, device=ce_device)
    loss, nll = smoothed_cross_entropy(hidden, weight, target, reduction='none', chunk_rows=3, **kw)
    loss.backward(upstream)
    h, w = (x.detach().double().requires_grad_() for x in (hidden, weight))
    expected = F.cross_entropy(5 * torch.tanh(h @ w.T / 5), target, reduction='none',
                               label_smoothing=0.1)
    expected.backward(upstream.double())
    assert_close((loss, hidden.grad, weight.grad), (expected, h.grad, w.grad))
    assert loss[target == -100].eq(0).all() and nll[target == -100].eq(0).all()
    loss, _ = smoothed_cross_entropy(hidden, weight, target, reduction='none', **kw)
    hidden.grad = weight.grad = None
    loss.sum().backward()       # an expanded upstream gradient
    total = (loss.sum(), hidden.grad, weight.grad)
    assert_close(total, ce_ours(hidden, weight, target, reduction='sum', **kw), 1e-6)


@pytest.mark.parametrize('reduction', ['mean', 'none'])
def test_ce_backward_twice(ce_device, reduction):
    hidden, weight, target = ce_inputs(4, 16, 40, ce_device)
    loss, _ = smoothed_cross_entropy(hidden, weight, target, smoothing=0.1, reduction=reduction)
    (loss.sum() * 0.5).backward(retain_graph=True)
    dh, dw = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None
    (loss.sum() * 0.5).backward()
    assert off(hidden.grad, dh) < 1e-6 and off(weight.grad, dw) < 1e-6
    loss, _ = smoothed_cross_entropy(hidden, weight, target, smoothing=0.1, reduction=reduction)
    with pytest.raises(RuntimeError, match='no second derivative'):
        torch.autograd.grad(loss.sum(), hidden, create_graph=True)


@pytest.mark.parametrize('reduction', ['mean', 'none'])
def test_ce_frozen_inputs_cost_no_product(ce_device, reduction, monkeypatch):
    hidden, weight, target = ce_inputs(5, 16, 40, ce_device)
    loss, dh, dw = ce_reference(hidden, weight, target, smoothing=0.1)
    products = []
    mm, addmm = torch.mm, torch.addmm
    monkeypatch.setattr(torch, 'mm', lambda *a, **kw: products.append(1) or mm(*a, **kw))
    monkeypatch.setattr(torch, 'addmm', lambda *a, **kw: products.append(1) or addmm(*a, **kw))

    def run(train_hidden, train_weight):
        products.clear()
        h = hidden.detach().requires_grad_(train_hidden)
        w = weight.detach().requires_grad_(train_weight)
        ours, _ = smoothed_cross_entropy(h, w, target, smoothing=0.1, reduction=reduction)
        ours = ours if reduction == 'mean' else ours.sum() / (target != -100).sum()
        assert off(ours, loss) < 1e-5
        if ours.requires_grad:
            ours.backward()
        return h.grad, w.grad, len(products)

    again = 1 if reduction == 'none' else 0     # the logits a second time
    h_grad, w_grad, count = run(True, True)
    assert off(h_grad, dh) < 1e-5 and off(w_grad, dw) < 1e-5 and count == 3 + again
    h_grad, w_grad, count = run(True, False)
    assert off(h_grad, dh) < 1e-5 and w_grad is None and count == 2 + again
    h_grad, w_grad, count = run(False, True)
    assert h_grad is None and off(w_grad, dw) < 1e-5 and count == 2 + again
    assert run(False, False) == (None, None, 1)
    with torch.no_grad():
        assert run(True, True) == (None, None, 1)
    with torch.inference_mode():
        assert run(False, False) == (None, None, 1)


def test_ce_tied_weight(ce_device):
    _, weight, target = ce_inputs(5, 16, 40, ce_device, ignored=0)
    tokens = torch.tensor([3, 1, 4, 1, 5], device=ce_device)
    loss, _ = smoothed_cross_entropy(weight[tokens].sin(), weight, target, smoothing=0.1)
    loss.backward()
    w = weight.detach().double().requires_grad_()
    F.cross_entropy(w[tokens].sin() @ w.T, target, label_smoothing=0.1).backward()
    assert off(weight.grad, w.grad) < 1e-5


def test_ce_micro_batches_add_up(ce_device):
    hidden, weight, target = ce_inputs(12, 16, 40, ce_device, ignored=0.4)
    whole = ce_ours(hidden, weight, target, smoothing=0.1)
    for num_items in ((target != -100).sum().item(), (target != -100).sum()):
        hidden.grad = weight.grad = None
        total = 0
        for part in torch.arange(12, device=ce_device).view(4, 3):
            loss, _ = smoothed_cross_entropy(hidden[part], weight, target[part], smoothing=0.1,
                                             num_items=num_items)
            loss.backward()
            total += loss.detach()
        assert_close((total, hidden.grad, weight.grad), whole, 1e-6)


@pytest.mark.parametrize('chunk_rows', [100, 4])
def test_ce_autocast(ce_device, chunk_rows):
    hidden, weight, target = ce_inputs(10, 64, 300, ce_device)
    with torch.autocast(ce_device, dtype=torch.bfloat16):
        mixed = smoothed_cross_entropy(hidden.bfloat16(), weight, target, smoothing=0.1)[0]
        ours = ce_ours(hidden, weight, target, smoothing=0.1, chunk_rows=chunk_rows)
        log_probs = token_log_probs(hidden, weight, torch.arange(10, device=ce_device),
                                    target.clamp_min(0))
    assert ours[1].dtype == ours[2].dtype == log_probs.dtype == torch.float32
    assert_close(ours, ce_reference(hidden, weight, target, smoothing=0.1), 2e-2)
    assert off(mixed, ours[0]) < 1e-5
    assert not torch.equal(ours[2], ours[2].bfloat16().float())     # dW kept its digits


@pytest.mark.parametrize('chunk_rows', [100, 4])
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('softcap', [None, 5.0])
def test_ce_half_precision_is_as_good_as_torch(ce_device, dtype, softcap, chunk_rows):
    hidden, weight, target = ce_inputs(12, 64, 300, ce_device, dtype, std=3.0)
    kw = dict(smoothing=0.1, softcap=softcap)
    exact = ce_reference(hidden, weight, target, **kw)
    torch_s = ce_reference(hidden, weight, target, dtype=dtype, **kw)
    ours = ce_ours(hidden, weight, target, chunk_rows=chunk_rows, **kw)
    assert ours[1].dtype == ours[2].dtype == dtype
    # the interpreter cuts bfloat16 off where the GPU rounds: at most twice the error
    limit = 2.0 if fused_ce._use_triton(torch.empty(0)) else 1.2
    for a, b, c in zip(ours, torch_s, exact, strict=True):
        assert off(a, c) < limit * off(b, c) + 1e-4


def test_ce_float16_does_not_underflow(ce_device):
    # smoothing / V / N is 3e-10 here, below float16, whose gradients a loss scale brings back
    hidden, weight, target = ce_inputs(6, 16, 300, ce_device, torch.float16, ignored=0)
    target = target.clamp_max(199)
    with torch.no_grad():
        hidden[:, 0] = 10
        weight[200:] = 0
        weight[200:, 0] = -20
    loss, _ = smoothed_cross_entropy(hidden, weight, target, smoothing=0.1, num_items=2 ** 20)
    (loss * 2 ** 16).backward()
    uniform = -0.1 / 300 * hidden.detach().double().sum(0) / 2 ** 4
    assert off(weight.grad[200:], uniform.expand(100, -1)) < 1e-2


def test_ce_float16_does_not_overflow(ce_device):
    # one label for all tokens: the gradients of its row add up to far more than their mean
    hidden = torch.full((40, 16), 30.0, device=ce_device).half().requires_grad_()
    weight = torch.zeros(20, 16, device=ce_device).half().requires_grad_()
    target = torch.full((40,), 5, device=ce_device)
    assert_close(ce_ours(hidden, weight, target), ce_reference(hidden, weight, target), 1e-3)


def test_ce_same_bits_twice(ce_device):
    hidden, weight, target = ce_inputs(9, 32, 300, ce_device, torch.bfloat16)
    first = ce_ours(hidden, weight, target, smoothing=0.1, softcap=30.0, chunk_rows=4)
    second = ce_ours(hidden, weight, target, smoothing=0.1, softcap=30.0, chunk_rows=4)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize('softcap', [None, 5.0])
def test_token_log_probs(ce_device, dtype, softcap, monkeypatch):
    hidden, weight, _ = ce_inputs(20, 32, 300, ce_device, dtype, std=8.0)
    rows = torch.tensor([7, 3, 3, 3, 19, 7, 0, 11, 3], device=ce_device)
    tokens = torch.tensor([0, 299, 5, 5, 17, 100, 3, 256, 1], device=ce_device)
    z = hidden.detach().double() @ weight.detach().double().T
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    expected = z.log_softmax(1)[rows, tokens]
    used = []
    statistics = fused_ce._statistics
    monkeypatch.setattr(fused_ce, '_statistics',
                        lambda h, *a, **kw: used.append(len(h)) or statistics(h, *a, **kw))
    for chunk_bytes in (2 ** 30, 2 * 4 * 300, 1):       # of the plain path
        monkeypatch.setattr(fused_ce, 'CPU_CHUNK_BYTES', chunk_bytes)
        log_probs = token_log_probs(hidden, weight, rows, tokens, softcap=softcap)
        assert log_probs.dtype == torch.float32 and not log_probs.requires_grad
        assert (log_probs - expected).abs().max() < 2e-5
        assert used.pop() == 5      # hidden rows in use, each goes through once
    nothing = token_log_probs(hidden, weight, rows[:0], tokens[:0])
    assert nothing.shape == (0,)


@pytest.mark.parametrize('N, D, V', [(1, 8, 5), (7, 31, 300), (40, 64, 300)])
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize('softcap', [None, 5.0])
def test_token_statistics(ce_device, N, D, V, dtype, softcap):
    hidden, weight, target = ce_inputs(N, D, V, ce_device, dtype, std=8.0)
    hidden, target = hidden.view(N, 1, D), target.view(N, 1)
    z = hidden.detach().double() @ weight.detach().double().T
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    log_probs = z.log_softmax(-1)
    ours = token_statistics(hidden, weight, target, smoothing=0.1, softcap=softcap)
    nll = F.cross_entropy(z.flatten(0, 1), target.flatten(), reduction='none').view(N, 1)
    loss = F.cross_entropy(z.flatten(0, 1), target.flatten(), reduction='none',
                           label_smoothing=0.1).view(N, 1)
    top_logit, top_token = z.max(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    for name, expected in (('loss', loss), ('nll', nll), ('lse', z.logsumexp(-1)),
                           ('top_logit', top_logit), ('entropy', entropy)):
        got = getattr(ours, name)
        assert got.shape == (N, 1) and got.dtype == torch.float32 and not got.requires_grad
        assert (got - expected).abs().max() < 1e-4, name
    assert torch.equal(ours.top_token, top_token)
    equal = torch.zeros_like(weight)
    ours = token_statistics(hidden, equal, target)      # all logits equal
    assert ours.top_token.eq(0).all()
    assert (ours.entropy - math.log(V)).abs().max() < 1e-5


def test_token_statistics_by_parts(ce_device, monkeypatch):
    # float32 weights under autocast are converted a part at a time
    hidden, weight, target = ce_inputs(9, 32, 300, ce_device)
    with torch.autocast(ce_device, torch.bfloat16):
        ours = token_statistics(hidden, weight, target, softcap=5.0)
    exact = token_statistics(hidden.bfloat16(), weight.bfloat16(), target, softcap=5.0)
    # the interpreter cuts bfloat16 off where torch rounds
    limit = 2e-2 if ce_device == 'cpu' and fused_ce._use_triton(torch.empty(0)) else 1e-6
    assert all(off(a, b) < limit for a, b in zip(ours, exact, strict=True))
    with pytest.raises(ValueError, match='target 300 is neither'):
        token_statistics(hidden, weight, torch.full((9,), 300))


@pytest.mark.parametrize('reduction', ['mean', 'sum', 'none'])
def test_ce_token_weight(ce_device, reduction):
    hidden, weight, target = ce_inputs(9, 16, 40, ce_device)
    token_weight = torch.rand(9, device=ce_device)
    token_weight[3] = 0
    loss, nll = smoothed_cross_entropy(hidden, weight, target, smoothing=0.1, reduction=reduction,
                                       token_weight=token_weight)
    loss.sum().backward()
    h, w = (x.detach().double().requires_grad_() for x in (hidden, weight))
    each = F.cross_entropy(h @ w.T, target, label_smoothing=0.1, reduction='none') * token_weight
    expected = each if reduction == 'none' else each.sum()
    expected = expected / (target != -100).sum() if reduction == 'mean' else expected
    expected.sum().backward()
    assert_close((loss, hidden.grad, weight.grad), (expected, h.grad, w.grad))
    plain = F.cross_entropy(h @ w.T, target, reduction='none') * token_weight
    assert off(nll.sum() * (1 if reduction != 'mean' else (target != -100).sum()),
               plain.sum()) < 1e-5
    with pytest.raises(ValueError, match='token_weight must have the shape of target'):
        smoothed_cross_entropy(hidden, weight, target, token_weight=token_weight[:3])


def test_ce_target_anywhere(ce_device):
    hidden, weight, target = ce_inputs(9, 16, 40, ce_device)
    kw = dict(smoothing=0.1)
    on_device = ce_ours(hidden, weight, target, **kw)
    for other in (target.cpu(), target.int(), target.cpu().short()):
        assert all(map(torch.equal, ce_ours(hidden, weight, other, **kw), on_device))
    full = target.clamp_min(0)
    assert all(map(torch.equal, ce_ours(hidden, weight, full, ignore_index=None, **kw),
                   ce_ours(hidden, weight, full, **kw)))
    with pytest.raises(ValueError, match='target -100 is neither'):
        smoothed_cross_entropy(hidden, weight, target.cpu(), ignore_index=None)


@pytest.mark.parametrize('device', ['cpu', 'cuda'])
def test_ce_compiled_step(device):
    if device == 'cuda' and not torch.cuda.is_available():
        pytest.skip('needs a CUDA device')
    torch._dynamo.reset()
    torch.manual_seed(0)
    body, head = torch.nn.Linear(8, 8, device=device), torch.nn.Linear(8, 50, device=device)

    def step(x, target):
        loss, nll = smoothed_cross_entropy(body(x).relu(), head.weight, target, smoothing=0.1)
        return loss * 2, nll

    x = torch.randn(12, 8, device=device)
    targets = [torch.arange(12).masked_fill(torch.arange(12) < k, -100) for k in (0, 5, 9, 12)]
    explained = torch._dynamo.explain(step)(x, targets[0])
    assert explained.graph_break_count == 1
    torch._dynamo.reset()
    compiled = torch.compile(step, backend='eager')
    compiled(x, targets[0])
    with torch.compiler.set_stance('fail_on_recompile'):    # however many tokens are learnt
        for target in targets:
            loss, _ = compiled(x, target)
            assert torch.equal(loss, step(x, target)[0])
            loss.backward()


def test_ce_without_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, 'triton', None)
    spec = importlib.util.spec_from_file_location('fused_ce_alone', fused_ce.__file__)
    alone = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(alone)
    hidden, weight, target = ce_inputs(5, 16, 40)
    loss, _ = alone.smoothed_cross_entropy(hidden, weight, target, smoothing=0.1)
    assert alone.triton is None
    assert off(loss, ce_reference(hidden, weight, target, smoothing=0.1)[0]) < 1e-5


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')


@needs_cuda
@pytest.mark.parametrize('V', [50264, 128256, 151936, 256000, 262144])
@pytest.mark.parametrize('softcap', [None, 30.0])
def test_ce_real_vocabularies(V, softcap):
    kw = dict(smoothing=0.1, softcap=softcap)
    hidden, weight, target = ce_inputs(40, 128, V, 'cuda', torch.bfloat16, std=3.0)
    exact = ce_reference(hidden, weight, target, **kw)
    torch_s = ce_reference(hidden, weight, target, dtype=torch.bfloat16, **kw)
    ours = ce_ours(hidden, weight, target, **kw)
    for a, b, c in zip(ours, torch_s, exact, strict=True):
        assert off(a, c) < 1.2 * off(b, c) + 1e-4


@needs_cuda
def test_ce_more_logits_than_int32():
    N, D, V = 8704, 64, 256000      # 2.2e9 logits in one chunk
    if torch.cuda.mem_get_info()[0] < 20 * 2 ** 30:
        pytest.skip('needs 20 GB of GPU memory')
    hidden, weight, target = ce_inputs(N, D, V, 'cuda', torch.bfloat16)
    whole = ce_ours(hidden, weight, target, smoothing=0.1, softcap=30.0, chunk_rows=N)
    parts = ce_ours(hidden, weight, target, smoothing=0.1, softcap=30.0, chunk_rows=2048)
    assert_close(whole, parts, 5e-3)
    assert off(whole[1][-64:], parts[1][-64:]) < 5e-3       # the rows behind 2**31


@needs_cuda
@pytest.mark.parametrize('reduction', ['mean', 'none'])
def test_ce_never_waits(reduction):
    hidden, weight, target = ce_inputs(300, 64, 1000, 'cuda', torch.bfloat16)
    all_learnt, host = target.clamp_min(0), target.cpu()
    smoothed_cross_entropy(hidden, weight, host, smoothing=0.1)[0].backward()
    cache = {name: len(kernel.device_caches[0][0]) for name, kernel in vars(fused_ce).items()
             if hasattr(kernel, 'device_caches')}
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode('error')
    try:
        for i, (y, kw) in enumerate(((host, {}), (all_learnt, dict(ignore_index=None)))):
            loss, nll = smoothed_cross_entropy(hidden, weight, y, smoothing=0.1 + i / 10, **kw,
                                               softcap=None, reduction=reduction)
            loss.sum().backward()
            token_statistics(hidden, weight, host)
    finally:
        torch.cuda.set_sync_debug_mode('default')
    if reduction == 'mean':     # nor is a kernel compiled again for another rate or count
        for name, count in cache.items():
            assert count == 0 or len(getattr(fused_ce, name).device_caches[0][0]) == count, name


@needs_cuda
@pytest.mark.parametrize('memory', [fused_ce.MEMORY, 2 ** 29, 0, 'one chunk', 'none'])
def test_ce_at_full_size(memory):
    """Gemma 2 2B: memory, and errors against float32 beside torch's own in bfloat16."""
    N, D, V, softcap = 8192, 2304, 256000, 30.0
    if torch.cuda.mem_get_info()[0] < 60 * 2 ** 30:
        pytest.skip('needs 60 GB of GPU memory')
    hidden, weight, target = ce_inputs(N, D, V, 'cuda', torch.bfloat16, ignored=0, std=3.0)
    rows, columns = torch.arange(0, N, 61, device='cuda'), torch.arange(0, V, 997, device='cuda')
    columns = torch.cat([columns, target[:64]])
    options = {'one chunk': dict(chunk_rows=N), 'none': dict(reduction='none', memory=0)}.get(
        memory, dict(memory=memory))

    def pick(loss, dh, dw):
        return loss.detach().double().item(), dh[rows].float(), dw[columns].float()

    def run(loss_of):
        hidden.grad = weight.grad = None
        loss = loss_of()
        loss.backward()
        return pick(loss, hidden.grad, weight.grad)

    def ours():
        loss, _ = smoothed_cross_entropy(hidden, weight, target, smoothing=0.1, softcap=softcap,
                                         **options)
        return loss.mean()

    def eager():
        z = softcap * torch.tanh((hidden @ weight.T).float() / softcap)
        return F.cross_entropy(z, target, label_smoothing=0.1)

    first, again = run(ours), None
    hidden.grad = weight.grad = None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    again = run(ours)
    extra = torch.cuda.max_memory_allocated() - before - hidden.nbytes - weight.nbytes
    assert first[0] == again[0] and all(map(torch.equal, first[1:], again[1:]))
    limit = {'one chunk': 2 * N * V, 'none': 0, 0: 0}.get(memory, memory)
    assert extra < max(limit, 160e6) + 2e6
    with torch.no_grad():
        h, w, loss = hidden.float(), weight.float(), 0
        dh = torch.zeros(len(rows), D, device='cuda')
        dw = torch.zeros(len(columns), D, device='cuda')
        for start in range(0, N, 512):
            y = target[start:start + 512, None]
            z = softcap * torch.tanh(h[start:start + 512] @ w.T / softcap)
            log_probs = z.log_softmax(1)
            label = log_probs.gather(1, y)
            loss -= (0.9 * label.sum() + 0.1 * log_probs.mean(1).sum()).double() / N
            g = log_probs.exp_().sub_(0.1 / V)
            g.scatter_add_(1, y, torch.full_like(y, -0.9, dtype=torch.float32))
            g *= (1 - (z / softcap) ** 2) / N
            dw += g[:, columns].T @ h[start:start + 512]
            here = (rows >= start) & (rows < start + 512)
            dh[here] = g[rows[here] - start] @ w
        exact = loss.item(), dh, dw
    theirs = run(eager)
    assert abs(first[0] - exact[0]) <= 1.1 * abs(theirs[0] - exact[0]) + 1e-6
    assert off(first[1], exact[1]) <= 1.1 * off(theirs[1], exact[1])
    # dW of four and eight chunks is rounded as often; see _chunk_rows
    dw_limit = {fused_ce.MEMORY: 1.5, 2 ** 29: 1.7}.get(memory, 1.1)
    assert off(first[2], exact[2]) <= dw_limit * off(theirs[2], exact[2])


# ------------------------------------------------------------------------------------------------
# metrics.py: golden values of other libraries, properties, errors
#
# The golden inputs are regenerated here; the expected values are what these libraries returned for
# them: torchmetrics 1.9.0 (float32), netcal 1.4.0, uncertainty-calibration 0.1.4 (HELM's choice),
# relplot 1.0.3, scikit-learn 1.9.1, google/uncertainty-metrics c046458 ('gce', by the authors of
# SCE and ACE), torch-uncertainty 0.13.0 (float32), hendrycks/outlier-exposure e6ede98.


def calibration_case(seed, n, k, temperature, signal):
    """Seeded probs [n, k] and labels [n]; the labels follow softmax(signal * z), not the probs."""
    stream = np.random.RandomState(seed)
    z = stream.standard_normal((n, k))

    def softmax(x):
        e = np.exp(x - x.max(1, keepdims=True))
        return e / e.sum(1, keepdims=True)

    u = stream.random_sample(n)
    labels = (softmax(z * signal).cumsum(1) < u[:, None]).sum(1)
    return softmax(z * temperature), np.minimum(labels, k - 1)


def golden_case(name):
    if name == 'mmlu_overconfident_4':
        return calibration_case(0, 2000, 4, 2.5, 1.0)
    if name == 'small_4':
        return calibration_case(4, 150, 4, 2.0, 1.0)
    if name == 'all_wrong_conf_1':
        labels = np.arange(20) % 4
        return np.eye(4)[(labels + 1) % 4], labels
    if name == 'uniform_quarter':
        return np.full((40, 4), 0.25), np.arange(40) % 4
    assert name == 'edges_conf0_1_ties_on_bin_edges'
    probs = [
        [1.0, 0.0, 0.0, 0.0],
        [1.0, 0.0, 0.0, 0.0],
        [0.0, 1.0, 0.0, 0.0],
        [0.25, 0.25, 0.25, 0.25],
        [0.25, 0.25, 0.25, 0.25],
        [0.5, 0.5, 0.0, 0.0],
        [0.7, 0.1, 0.1, 0.1],
        [0.7, 0.1, 0.1, 0.1],
        [0.8, 0.2, 0.0, 0.0],
        [0.6, 0.4, 0.0, 0.0],
    ]
    return np.array(probs), np.array([0, 1, 1, 0, 3, 1, 0, 2, 0, 1])


def exactly(value):
    return pytest.approx(value, rel=0, abs=1e-12)


def test_metrics_golden_inputs_are_the_ones_the_peers_saw():
    probs, labels = golden_case('mmlu_overconfident_4')
    assert (probs[0, 0], labels.sum()) == (exactly(0.223841614128059), 2963)
    probs, labels = golden_case('small_4')
    assert (probs[0, 0], labels.sum()) == (exactly(0.13891827363112413), 239)


# Per case: call, then the value of the numpy peers.
GOLDEN = {
    'mmlu_overconfident_4': [
        ('accuracy', {}, 0.507),
        ('mean_confidence', {}, 0.7380020420371516),
        ('gap', {}, 0.23100204203715158),
        ('entropy', {}, 0.9350273818131427),
        ('entropy', {'unit': 'nats'}, 0.6481115934501274),
        ('nll', {}, 1.4138373246621527),  # scikit-learn log_loss
        ('brier', {}, 0.6957152481193204),  # lm-eval brier_score
        ('ece', {}, 0.23111049185449925),  # uncertainty-calibration get_ece
        ('ece', {'n_bins': 15}, 0.23100204203715158),
        ('ece', {'n_bins': 20}, 0.23111049185449925),
        ('ece', {'n_bins': 30}, 0.23111049185449922),  # gce
        ('mce', {}, 0.32930785865493895),  # netcal
        ('mce', {'n_bins': 15}, 0.3584316326661593),
        ('ece_equal_mass', {}, 0.2310020420371516),  # uncertainty-calibration get_ece_em
        ('ece_equal_mass', {'n_bins': 15}, 0.23100204203715163),
        ('sce', {'n_bins': 10}, 0.11964143307709416),  # gce, class_conditional=True
        ('sce', {}, 0.12072566075743489),
        ('sce', {'n_bins': 20}, 0.12231980585532036),
        ('sce', {'n_bins': 30}, 0.1225488734182622),
        ('ace', {'n_ranges': 10}, 0.11795023661038384),  # gce
        ('ace', {}, 0.12095046279333976),  # 15 does not divide 2000: the remainder is spread
        ('ace', {'n_ranges': 20}, 0.11932121088003772),
        ('ace', {'n_ranges': 30}, 0.1212078720969127),
        ('rmsce', {}, 0.24186774213686074),  # outlier-exposure with its last bin put back
        ('mad', {}, 0.23100204203715158),
    ],
    'small_4': [
        ('accuracy', {}, 0.5533333333333333),
        ('mean_confidence', {}, 0.7050732040845785),
        ('gap', {}, 0.15173987075124518),
        ('entropy', {}, 1.0575124215201523),
        ('entropy', {'unit': 'nats'}, 0.7330117533838141),
        ('nll', {}, 1.1747079024849019),
        ('brier', {}, 0.5939696055699721),
        ('ece', {}, 0.16296739773419663),
        ('ece', {'n_bins': 15}, 0.15531764883874577),
        ('ece', {'n_bins': 20}, 0.1824356352861031),
        ('mce', {}, 0.2737900977840766),
        ('mce', {'n_bins': 15}, 0.33688739436907805),
        ('mce', {'n_bins': 20}, 0.6569124117541829),
        ('ece_equal_mass', {}, 0.1517398707512453),
        ('ece_equal_mass', {'n_bins': 15}, 0.16149276298269602),
        ('sce', {'n_bins': 10}, 0.09844199371095676),
        ('sce', {}, 0.11546122984794403),
        ('sce', {'n_bins': 20}, 0.12201844928451648),
        ('sce', {'n_bins': 30}, 0.14137692625773754),
        ('ace', {'n_ranges': 10}, 0.09309259644596712),
        ('ace', {}, 0.0970095350694924),
        ('ace', {'n_ranges': 20}, 0.11170988240242463),  # ranges of 7 and 8 rows
        ('ace', {'n_ranges': 30}, 0.13777347852967547),
        ('rmsce', {}, 0.15173987075124518),  # 150 rows: one bin of 150
        ('rmsce', {'bin_size': 10}, 0.18941902403108507),
        ('mad', {}, 0.15173987075124518),
        ('mad', {'bin_size': 10}, 0.16149276298269596),
    ],
    'edges_conf0_1_ties_on_bin_edges': [
        ('accuracy', {}, 0.5),
        ('mean_confidence', {}, 0.68),
        ('gap', {}, 0.18),
        ('entropy', {}, 0.9406437988236109),
        ('entropy', {'unit': 'nats'}, 0.6520045970657823),
        ('nll', {}, 4.330808361203802),  # one label of probability 0, clipped as scikit-learn does
        ('brier', {}, 0.624),
        ('ece', {}, 0.32),
        ('ece', {'n_bins': 15}, 0.32),
        ('mce', {}, 0.6),
        ('mce', {'n_bins': 15}, 0.6),
        ('ece_equal_mass', {}, 0.32),
        ('ece_equal_mass', {'n_bins': 15}, 0.32),
        ('ace', {}, 0.205),  # uncertainty-calibration, l1 marginal, which keeps zeros
        ('rmsce', {}, 0.18),
        ('mad', {}, 0.18),
    ],
    'all_wrong_conf_1': [
        ('accuracy', {}, 0.0),
        ('mean_confidence', {}, 1.0),
        ('gap', {}, 1.0),
        ('entropy', {}, 0.0),
        ('nll', {}, 36.04365338911715),
        ('brier', {}, 2.0),
        ('ece', {}, 1.0),
        ('mce', {}, 1.0),
        ('ece_equal_mass', {}, 1.0),
        ('ace', {}, 0.5),
        ('rmsce', {}, 1.0),
        ('rmsce', {'bin_size': 10}, 1.0),
        ('mad', {}, 1.0),
    ],
    'uniform_quarter': [
        ('accuracy', {}, 0.25),
        ('mean_confidence', {}, 0.25),
        ('gap', {}, 0.0),
        ('entropy', {}, 2.0),
        ('entropy', {'unit': 'nats'}, 1.3862943611198906),
        ('nll', {}, 1.3862943611198906),
        ('brier', {}, 0.75),
        ('ece', {}, 0.0),
        ('mce', {}, 0.0),
        ('ece_equal_mass', {}, 0.0),
        ('sce', {}, 0.0),
        ('ace', {}, 0.0),
        ('rmsce', {}, 0.0),
        ('rmsce', {'bin_size': 10}, 0.05),  # the tie is cut every 10 rows, in the order given
        ('mad', {'bin_size': 10}, 0.05),
        ('aurc', {}, 0.75),     # tied rows in no order; peers take the one given: 0.70, 0.78
        ('auroc', {}, 0.5),
        ('ks_error', {}, 0.0),
    ],
}


@pytest.mark.parametrize('name', GOLDEN)
def test_metrics_golden_values(name):
    probs, labels = golden_case(name)
    for metric, settings_, expected in GOLDEN[name]:
        value = getattr(metrics, metric)(probs, labels, **settings_)
        assert value == exactly(expected), (metric, settings_)


def test_metrics_golden_values_of_float32_peers():
    probs, labels = golden_case('mmlu_overconfident_4')
    for n_bins, l1, largest in [  # torchmetrics multiclass_calibration_error, norm 'l1' and 'max'
        (1, 0.23100155591964722, 0.23100155591964722),
        (10, 0.23111043870449066, 0.3293079733848572),
        (15, 0.23100200295448303, 0.35843172669410706),
        (20, 0.23111043870449066, 0.3332020342350006),
    ]:
        assert metrics.ece(probs, labels, n_bins) == pytest.approx(l1, abs=1e-6)
        assert metrics.mce(probs, labels, n_bins) == pytest.approx(largest, abs=1e-6)

    probs, labels = golden_case('small_4')  # torch-uncertainty
    assert metrics.brier(probs, labels) == pytest.approx(0.5939696431159973, abs=1e-6)
    assert metrics.nll(probs, labels) == pytest.approx(1.1747078895568848, abs=1e-6)
    assert metrics.ece(probs, labels) == pytest.approx(0.16296741366386414, abs=1e-6)
    assert metrics.ece_equal_mass(probs, labels) == pytest.approx(0.15173986554145813, abs=1e-6)


def test_metrics_differ_from_peers_that_are_wrong():
    def differs(value, peer):
        return abs(value - peer) > 1e-3

    probs, labels = golden_case('edges_conf0_1_ties_on_bin_edges')
    # torchmetrics puts confidence 1.0 into a bin of its own, behind the last one, so that even a
    # single bin is two. With one bin every norm must give |gap| = 0.18.
    assert metrics.mce(probs, labels, n_bins=1) == exactly(0.18)
    assert differs(metrics.mce(probs, labels, n_bins=1), 0.3333333134651184)
    assert metrics.rmsce(probs, labels) == exactly(0.18)
    assert differs(metrics.rmsce(probs, labels), 0.2060975283384323)
    # netcal closes bins on the left, which moves 0.5 and 0.8 up but, its edges being np.linspace,
    # not 0.6 and 0.7.
    assert differs(metrics.mce(probs, labels), 0.55)
    # gce drops probabilities of exactly 0 from the class-wise metrics and divides by what is left,
    # although eq. (3) and (4) are over all N probabilities of an option.
    assert metrics.sce(probs, labels) == exactly(0.205)
    assert differs(metrics.sce(probs, labels), 0.2763888888888889)
    assert differs(metrics.ace(probs, labels), 0.2763888888888889)
    # torch-uncertainty splits ties by row order in its equal-mass bins, gives nan for fewer rows
    # than bins, and an infinite NLL for one label of probability 0.
    assert differs(metrics.ece_equal_mass(probs, labels), 0.43000003695487976)
    assert math.isfinite(metrics.ece_equal_mass(probs, labels, n_bins=15))
    assert math.isfinite(metrics.nll(probs, labels))

    probs, labels = golden_case('all_wrong_conf_1')
    assert metrics.sce(probs, labels) == exactly(0.5)  # gce: 1.0, zeros dropped
    assert metrics.ace(probs, labels) == exactly(0.5)
    probs, labels = golden_case('uniform_quarter')
    assert metrics.ece_equal_mass(probs, labels) == 0  # torch-uncertainty: 0.1, ties split

    # outlier-exposure leaves its last, most confident bin out of the sum; with one bin nothing is
    # left.
    probs, labels = golden_case('small_4')
    assert differs(metrics.rmsce(probs, labels), 0.0)
    assert differs(metrics.mad(probs, labels, bin_size=10), 0.15610681760853043)
    probs, labels = golden_case('mmlu_overconfident_4')
    assert differs(metrics.rmsce(probs, labels), 0.23906758765187394)
    assert differs(metrics.mad(probs, labels), 0.22279627205287675)
    # hendrycks/test squares the weight |B|/N too and takes the square root twice. With B bins of
    # equal count that is sqrt(rmsce) * B^(-1/4), which shrinks as N grows.
    assert differs(metrics.rmsce(probs, labels), 0.23255810305865737)
    assert metrics.rmsce(probs, labels) ** 0.5 * 20**-0.25 == exactly(0.23255810305865737)
    # gce's SCE preset pools the options into one set of bins, which is not eq. (3).
    assert differs(metrics.sce(probs, labels, n_bins=10), 0.11786897488385001)
    # netcal's ACE is a top-label metric of the same name.
    assert differs(metrics.ace(probs, labels, n_ranges=10), 0.19145074380807076)


def test_metrics_edges_are_exact_where_linspace_is_not():
    # Closed on the left with np.linspace edges, as gce and relplot bin, 0.5 moves up while 0.6
    # stays below 0.6000000000000001: two neighbouring edges share a bin, and a model that is wrong
    # at 0.6 makes up for being right at 0.5.
    probs = np.array([[0.5, 0.5], [0.6, 0.4]])
    labels = np.array([0, 1])
    peer_bin = np.digitize(probs.max(1), np.linspace(0, 1, 11)[1:-1])
    assert peer_bin.tolist() == [5, 5]
    assert np.flatnonzero(metrics.bins(probs, labels)['count']).tolist() == [4, 5]
    assert metrics.ece(probs, labels) == exactly(0.55)  # the peers' one bin gives 0.05


def test_metrics_whole_golden_file():
    path = Path(metrics.__file__).resolve().parent.parent / 'shared/reference/golden_metrics.json'
    if not path.exists():
        pytest.skip('the file of golden vectors (golden_metrics.json) is not beside the repository')

    calls = [  # pattern of the file's key, our call, tolerance
        (r'accuracy', lambda p, y, m: metrics.accuracy(p, y), 1e-12),
        (r'mean_confidence', lambda p, y, m: metrics.mean_confidence(p, y), 1e-12),
        (r'overconfidence gap .*', lambda p, y, m: metrics.gap(p, y), 1e-12),
        (r'entropy_bits_mean', lambda p, y, m: metrics.entropy(p, y), 1e-12),
        (r'entropy_nats_mean', lambda p, y, m: metrics.entropy(p, y, unit='nats'), 1e-12),
        (r'nll_sklearn_log_loss', lambda p, y, m: metrics.nll(p, y), 1e-12),
        (r'CategoricalNLL', lambda p, y, m: metrics.nll(p, y), 1e-6),
        (r'brier_sum_over_classes .*', lambda p, y, m: metrics.brier(p, y), 1e-12),
        (r'BrierScore', lambda p, y, m: metrics.brier(p, y), 1e-6),
        (r'ECE right-closed .* M=(\d+)', metrics.ece, 1e-12),
        (r'MCE right-closed M=(\d+)', metrics.mce, 1e-12),
        (r'uncertainty-calibration get_ece .* num_bins=(\d+)', metrics.ece, 1e-12),
        (r'uncertainty-calibration get_ece_em .* num_bins=(\d+)', metrics.ece_equal_mass, 1e-12),
        (r'netcal.ECE\((\d+)\)', metrics.ece, 1e-12),
        (r'netcal.MCE\((\d+)\)', metrics.mce, 1e-12),
        (r'relplot.binnedECE\((\d+)\) .*', metrics.ece, 1e-12),
        (r'gce ECE .* num_bins=(\d+)', metrics.ece, 1e-12),
        (r'ece\(labels,probs\) num_bins=(\d+)', metrics.ece, 1e-12),
        (r'gce SCE eq.3 .* num_bins=(\d+)', metrics.sce, 1e-12),
        (r'sce\(labels,probs\) num_bins=(\d+)', metrics.sce, 1e-12),
        (r'gce ACE num_bins=(\d+)', metrics.ace, 1e-12),
        (r'ace\(labels,probs\) num_bins=(\d+)', metrics.ace, 1e-12),
        (r'eq5 RMSCE beta=(\d+) .*', metrics.rmsce, 1e-12),
        (r'eq6 MAD beta=(\d+) .*', metrics.mad, 1e-12),
        (r'torchmetrics.* n_bins=(\d+) norm=l1', metrics.ece, 1e-6),
        (r'torchmetrics.* n_bins=(\d+) norm=max', metrics.mce, 1e-6),
        (r'CalibrationError num_bins=(\d+) l1', metrics.ece, 1e-6),
        (r'uncertainty-calibration l2 top-label debiased 15 .*',
         lambda p, y, m: metrics.ece_debiased(p, y), 1e-12),
        (r'ECE-sweep equal-mass l1 .*', lambda p, y, m: metrics.ece_sweep(p, y), 1e-12),
        (r'relplot.smECE', lambda p, y, m: metrics.smooth_ece(p, y), 1e-4),
        (r'netcal.MMCE', lambda p, y, m: metrics.mmce(p, y), 1e-12),
        (r'KS top-label .*', lambda p, y, m: metrics.ks_error(p, y), 1e-12),
        (r'gce TACE threshold=0.01 num_bins=(\d+)', metrics.tace, 1e-12),
        (r'tace\(labels,probs\) num_bins=(\d+)', metrics.tace, 1e-12),
        (r'hendrycks calib_err p=2 beta=(\d+) .*', metrics.rmsce_hendrycks, 1e-12),
        (r'hendrycks calib_err p=1 beta=(\d+) .*', metrics.mad_hendrycks, 1e-12),
        (r'rmsce\(labels,probs\)', lambda p, y, m: metrics.rms_mmlu_repo(p, y), 1e-12),
        (r'AUROC .*', lambda p, y, m: metrics.auroc(p, y), 1e-12),
        (r'AURC mean .*', lambda p, y, m: metrics.aurc(p, y), 1e-12),
        (r'E-AURC .*', lambda p, y, m: metrics.excess_aurc(p, y), 1e-12),
        (r'uncertainty-calibration selective_cov_acc_area',
         lambda p, y, m: 1 - metrics.aurc(p, y), 1e-12),
        *((rf'selective_accuracy@coverage={c} .*',
           lambda p, y, m, c=c: metrics.accuracy_at_coverage(p, y, c), 1e-12)
          for c in (0.5, 0.8, 0.9, 1.0)),
        *((rf'Murphy (M=10 )?{name}.*', lambda p, y, m, key=key: metrics.murphy(p, y)[key], 1e-12)
          for name, key in (('reliability', 'reliability'), ('resolution', 'resolution'),
                            ('uncertainty', 'uncertainty'), ('within', 'within_bin'))),
        (r'brier_top_label .*', lambda p, y, m: metrics.murphy(p, y)['brier'], 1e-12),
    ]
    wrong_peers = {  # test_metrics_differ_from_peers_that_are_wrong says why
        'edges_conf0_1_ties_on_bin_edges': (
            r'gce (SCE|ACE) .*|[as]ce\(labels.*|CategoricalNLL|netcal.MCE\(10\)'
            r'|torchmetrics.* n_bins=1 norm=max'
            # the order of tied rows decides there
            r'|E?-?AURC .*|uncertainty-calibration sel.*|selective_accuracy@coverage=0.[59] .*'
        ),
        'uniform_quarter': r'E?-?AURC .*|uncertainty-calibration sel.*|KS top-label .*',
        'all_wrong_conf_1': r'gce (SCE|ACE) .*|[as]ce\(labels.*|CategoricalNLL',
    }
    compared = 0
    for case in json.loads(path.read_text())['cases']:
        probs, labels = golden_case(case['name'])
        peers = case['expected'] | case['reference_formula'] | case['torch_uncertainty']
        peers |= case['hendrycks_test_calib_tools']
        wrong = wrong_peers.get(case['name'], '')
        for pattern, call, tolerance in calls:
            for key, expected in peers.items():
                match = re.fullmatch(pattern, key)
                if isinstance(expected, str) or expected is None:    # 'raises IndexError: ...'
                    continue
                if match and not re.fullmatch(wrong, key):
                    number = match[1] if match.groups() else None
                    value = call(probs, labels, int(number) if number and number.isdigit()
                                 else None)
                    approximately = pytest.approx(expected, rel=0, abs=tolerance)
                    assert value == approximately, (case['name'], key)
                    compared += 1
    assert compared > 300


# Properties. Small whole weights give many ties, zeros, ones and confidences on bin edges.

small = settings(max_examples=60, deadline=None, derandomize=True)


@st.composite
def predictions(draw, max_rows=25, max_options=6):
    n = draw(st.integers(1, max_rows))
    k = draw(st.integers(1, max_options))
    weights = draw(arrays(np.int64, (n, k), elements=st.integers(0, 8)))
    weights[weights.sum(1) == 0] = 1
    labels = draw(arrays(np.int64, n, elements=st.integers(0, k - 1)))
    return weights / weights.sum(1, keepdims=True), labels


def literal_gap(values, outcomes, bin_of):
    """sum_B |B|/N |acc(B) - conf(B)| by the book: one list per bin."""
    members = {}
    for value, outcome in zip(values, outcomes):
        members.setdefault(bin_of(value), []).append((value, outcome))
    total = 0
    for rows in members.values():
        total += len(rows) * abs(np.mean([v for v, _ in rows]) - np.mean([o for _, o in rows]))
    return total / len(values)


def equal_width_bin(n_bins):
    return lambda c: next(m for m in range(1, n_bins + 1) if c <= m / n_bins or m == n_bins)


def equal_mass_bin(values, sizes):
    """The lowest of consecutive chunks of the sorted values that holds a value."""
    chunks = np.split(np.sort(values), np.cumsum(sizes)[:-1])
    return lambda c: next(i for i, chunk in enumerate(chunks) if c in chunk)


@small
@given(predictions(), st.integers(1, 30))
def test_metrics_equal_their_literal_formulas(case, n_bins):
    probs, labels = case
    n, k = probs.shape
    confidence = probs.max(1)
    correct = probs.argmax(1) == labels

    by_width = equal_width_bin(n_bins)
    assert metrics.ece(probs, labels, n_bins) == exactly(literal_gap(confidence, correct, by_width))

    chunks = min(n_bins, n)
    by_mass = equal_mass_bin(confidence, [len(x) for x in np.array_split(np.arange(n), chunks)])
    expected = literal_gap(confidence, correct, by_mass)
    assert metrics.ece_equal_mass(probs, labels, n_bins) == exactly(expected)

    static = [literal_gap(probs[:, j], labels == j, by_width) for j in range(k)]
    assert metrics.sce(probs, labels, n_bins) == exactly(np.mean(static))

    sizes = np.diff([round(r * n / chunks) for r in range(chunks + 1)])
    adaptive = [
        literal_gap(probs[:, j], labels == j, equal_mass_bin(probs[:, j], sizes)) for j in range(k)
    ]
    assert metrics.ace(probs, labels, n_bins) == exactly(np.mean(adaptive))

    onehot = np.eye(k)[labels]
    assert metrics.brier(probs, labels) == exactly(((probs - onehot) ** 2).sum() / n)


def test_ace_is_equation_4_when_the_ranges_divide_the_rows():
    probs, labels = calibration_case(3, 60, 5, 1.5, 1.0)
    gaps = []
    for k in range(5):
        order = np.argsort(probs[:, k])
        for rows in np.split(order, 15):
            gaps.append(abs((labels[rows] == k).mean() - probs[rows, k].mean()))
    assert metrics.ace(probs, labels) == exactly(sum(gaps) / (5 * 15))


@small
@given(predictions(max_rows=40), st.integers(1, 45), st.integers(1, 30))
def test_rmsce_is_at_least_mad_is_at_least_the_gap(case, bin_size, n_bins):
    probs, labels = case
    rounding = 1e-12
    gap = abs(metrics.gap(probs, labels))
    mad = metrics.mad(probs, labels, bin_size)
    assert metrics.rmsce(probs, labels, bin_size) >= mad - rounding
    assert mad >= gap - rounding
    assert metrics.ece(probs, labels, n_bins) >= gap - rounding
    assert metrics.ece_equal_mass(probs, labels, n_bins) >= gap - rounding
    assert metrics.mce(probs, labels, n_bins) >= metrics.ece(probs, labels, n_bins) - rounding


def test_rmsce_bins_hold_100_rows_and_the_last_takes_the_remainder():
    # Options [c, 1-c] with c rising; 250 rows are two bins, of 100 and 150 rows.
    confidence = np.linspace(0.6, 0.9, 250)
    labels = np.random.RandomState(0).randint(0, 2, 250)
    probs = np.stack([confidence, 1 - confidence], 1)
    below = abs(confidence[:100].mean() - (labels[:100] == 0).mean())
    above = abs(confidence[100:].mean() - (labels[100:] == 0).mean())
    assert metrics.mad(probs, labels) == exactly(0.4 * below + 0.6 * above)
    assert metrics.rmsce(probs, labels) == exactly((0.4 * below**2 + 0.6 * above**2) ** 0.5)
    # 199 rows are one bin, 200 two.
    assert metrics.rmsce(probs[:199], labels[:199]) == exactly(
        abs(metrics.gap(probs[:199], labels[:199]))
    )
    assert metrics.rmsce(probs[:200], labels[:200]) > abs(metrics.gap(probs[:200], labels[:200]))


def test_rmsce_keeps_ties_in_the_order_given():
    stream = np.random.RandomState(0)
    confidence = stream.choice([0.6, 0.7, 0.8], 950)
    labels = stream.randint(0, 2, 950)
    probs = np.stack([confidence, 1 - confidence], 1)
    order = sorted(range(950), key=lambda i: confidence[i])  # Python's sort is stable
    expected = 0
    for rows in np.split(np.array(order), range(100, 900, 100)):
        expected += len(rows) / 950 * (confidence[rows].mean() - (labels[rows] == 0).mean()) ** 2
    assert metrics.rmsce(probs, labels) == exactly(expected**0.5)


@small
@given(predictions(), st.randoms(use_true_random=False))
def test_metrics_ignore_the_order_of_rows(case, shuffler):
    probs, labels = case
    order = list(range(len(labels)))
    shuffler.shuffle(order)
    before = metrics.report(probs, labels)
    after = metrics.report(probs[order], labels[order])
    for key, value in before.items():
        if 'hendrycks' not in key:      # whose ties stay in the order given
            assert after[key] == pytest.approx(value, rel=0, abs=1e-12, nan_ok=True), key


def test_rmsce_ignores_the_order_of_rows_without_ties():
    probs, labels = calibration_case(1, 350, 4, 1.5, 1.0)
    order = np.random.RandomState(0).permutation(350)
    assert metrics.rmsce(probs[order], labels[order]) == exactly(metrics.rmsce(probs, labels))
    assert metrics.mad(probs[order], labels[order]) == exactly(metrics.mad(probs, labels))


@small
@given(predictions())
def test_one_bin_gives_the_size_of_the_gap(case):
    probs, labels = case
    gap = exactly(abs(metrics.gap(probs, labels)))
    assert metrics.ece(probs, labels, n_bins=1) == gap
    assert metrics.mce(probs, labels, n_bins=1) == gap
    assert metrics.ece_equal_mass(probs, labels, n_bins=1) == gap
    assert metrics.rmsce(probs, labels, bin_size=len(labels)) == gap
    assert metrics.mad(probs, labels, bin_size=len(labels)) == gap


@small
@given(predictions())
def test_metrics_stay_in_their_ranges(case):
    probs, labels = case
    k = probs.shape[1]
    rounding = 1e-12
    bits = metrics.entropy(probs, labels)
    assert -rounding <= bits <= math.log2(k) + rounding
    assert metrics.entropy(probs, labels, unit='nats') == exactly(bits * math.log(2))
    assert 1 / k - rounding <= metrics.mean_confidence(probs, labels) <= 1
    assert -rounding <= metrics.nll(probs, labels) <= 36.05
    assert 0 <= metrics.brier(probs, labels) <= 2
    for name in ['ece', 'mce', 'ece_equal_mass', 'ece_sweep', 'ece_debiased', 'sce', 'ace', 'tace',
                 'rmsce', 'mad', 'rmsce_hendrycks', 'mad_hendrycks', 'rms_mmlu_repo', 'ks_error',
                 'smooth_ece', 'kde_ece', 'mmce', 'aurc', 'excess_aurc']:
        assert -rounding <= getattr(metrics, name)(probs, labels) <= 1 + rounding, name
    gap = abs(metrics.gap(probs, labels))
    for name in ['ks_error', 'ece_sweep']:
        assert getattr(metrics, name)(probs, labels) >= gap - 1e-9, name
    parts = metrics.murphy(probs, labels)
    assert parts['brier'] == exactly(parts['reliability'] - parts['resolution']
                                     + parts['uncertainty'] + parts['within_bin'])
    assert metrics.ace(probs, labels, equal_weights=True) <= 1 + rounding
    share = metrics.entropy(probs, labels, unit='share')
    assert share == exactly(bits / math.log2(k) if k > 1 else 0)
    curve = [metrics.accuracy_at_coverage(probs, labels, c) for c in (0.3, 1)]
    assert curve[1] == exactly(metrics.accuracy(probs, labels))
    covered = metrics.coverage_at_accuracy(probs, labels, 0.5)
    assert covered == 0 or metrics.accuracy_at_coverage(probs, labels, covered) >= 0.5 - rounding


@pytest.mark.parametrize('k', [2, 3, 10])
@pytest.mark.parametrize('n', [1, 99, 100, 101, 250])
def test_all_wrong_at_confidence_1_is_as_bad_as_it_gets(n, k):
    labels = np.arange(n) % k
    probs = np.eye(k)[(labels + 1) % k]
    result = metrics.report(probs, labels)
    for name in ['confidence', 'gap', 'ece', 'mce', 'ece_equal_mass', 'rmsce', 'mad']:
        assert result[name] == 1, name
    assert (result['accuracy'], result['brier'], result['entropy_bits']) == (0, 2, 0)
    assert math.copysign(1, result['entropy_bits']) == 1  # 0, not -0, in the printed report


@pytest.mark.parametrize('label, gap', [(0, -0.3), (1, 0.7)])
def test_metrics_of_a_single_row(label, gap):
    probs, labels = [[0.7, 0.3]], [label]
    result = metrics.report(probs, labels)
    assert result['n'] == 1
    assert result['gap'] == exactly(gap)
    for name in ['ece', 'mce', 'ece_equal_mass', 'sce', 'ace', 'rmsce', 'mad']:
        assert result[name] == exactly(abs(gap)), name
    assert result['nll'] == exactly(-math.log(probs[0][label]))


def test_a_tie_predicts_the_first_option():
    probs = np.full((4, 4), 0.25)
    assert metrics.accuracy(probs, [0, 0, 1, 3]) == 0.5
    assert metrics.accuracy([[0.2, 0.4, 0.4]], [1]) == 1
    assert metrics.accuracy([[0.2, 0.4, 0.4]], [2]) == 0


def row_with_confidence(c, k=31):
    """A row of k probabilities, in c's precision, whose largest is exactly c."""
    row = np.zeros(k, dtype=c.dtype)
    full = min(int(1 / c), k)
    row[:full] = c
    if full < k:
        row[full] = max(0, 1 - full * c)
    assert row.max() == c
    return row


def bin_counts(confidences, n_bins):
    probs = np.stack([row_with_confidence(c) for c in confidences])
    return metrics.bins(probs, np.zeros(len(probs), dtype=int), n_bins)['count'].tolist()


@pytest.mark.parametrize('dtype', [np.float64, np.float32])
@pytest.mark.parametrize('n_bins', range(1, 31))
def test_a_confidence_on_a_bin_edge_counts_in_the_bin_below(n_bins, dtype):
    edges = (np.arange(1, n_bins + 1) / n_bins).astype(dtype)
    assert bin_counts(edges, n_bins) == [1] * n_bins
    assert bin_counts(np.nextafter(edges, dtype(0)), n_bins) == [1] * n_bins
    if n_bins > 1:
        above = np.nextafter(edges[:-1], dtype(1))
        assert bin_counts(above, n_bins) == [0] + [1] * (n_bins - 1)


def test_a_confidence_one_rounding_above_an_edge_is_above_it():
    moved = 0
    for n_bins in range(1, 31):
        for m in range(1, n_bins):
            c = np.float64(m * (1 / n_bins))  # m steps of 1/M, which need not be m/M
            m_of_c = m if c <= m / n_bins else m + 1
            moved += m_of_c != m
            assert bin_counts([c], n_bins).index(1) == m_of_c - 1
    assert moved > 0
    assert bin_counts([np.float64(0.6), np.float64(6 * 0.1)], 10)[5:7] == [1, 1]


def test_ece_from_confidences_alone():
    rng = np.random.default_rng(0)
    probs = rng.dirichlet(np.ones(4), 500)
    labels = rng.integers(0, 4, 500)
    assert metrics.ece(probs.max(1), probs.argmax(1) == labels, 15) == metrics.ece(
        probs, labels, 15)
    assert metrics.ece([0.1, 0.1], [False, True]) == pytest.approx(0.4)
    for confidence, correct, message in (
            ([0.5, 1.2], [True, True], 'row 1: confidence is 1.2'),
            ([0.5, math.nan], [True, True], 'row 1: confidence is nan'),
            ([0.5], [True, True], 'must be .N. with N >= 1'), ([], [], 'N, K >= 1'),
            ([0.5], [1], 'probs must be .N, K.')):
        with pytest.raises(ValueError, match=message):
            metrics.ece(confidence, correct)


@pytest.mark.parametrize('n, K', [(1, 3), (7, 4), (150, 4), (250, 2), (1205, 5)])
@pytest.mark.parametrize('ragged, ties', [(False, False), (True, True), (True, False)])
def test_bootstrap_is_the_report_of_resampled_rows(n, K, ragged, ties):
    rng = np.random.default_rng(n)
    n_options = np.maximum(2, rng.integers(2, K + 1, n)) if ragged else np.full(n, K)
    n_options[0] = K
    weight = rng.choice([0.5, 1, 2], (n, K)) if ties else rng.random((n, K))
    probs = np.where(np.arange(K) < n_options[:, None], weight, 0)
    probs /= probs.sum(1, keepdims=True)
    labels = rng.integers(0, n_options)
    found = metrics.bootstrap(probs, labels, n_options, n_resamples=8, seed=3)
    drawn = np.random.default_rng(3).integers(n, size=(8, n))
    for i, rows in enumerate(np.sort(drawn, 1)):
        report = metrics.report(probs[rows], labels[rows], n_options[rows])
        for metric, values in found.items():
            assert values[i] == pytest.approx(report[metric], abs=1e-9), metric
    assert found.keys() == {
        'accuracy', 'confidence', 'gap', 'entropy_bits', 'nll', 'brier', 'ece', 'mce', 'sce', 'ace',
        'ece_equal_mass', 'rmsce', 'mad'}
    correct = probs.argmax(1) == labels
    alone = metrics.bootstrap(probs.max(1), correct, n_resamples=8, seed=3)
    assert all(np.allclose(values, found[metric]) for metric, values in alone.items())


@pytest.mark.parametrize('x, t, p', [
    ([1, 2, 3, 4], 3.8729833, 0.0304663), ([0.1, -0.2, 0.3], 0.4588315, 0.6913933),
    ([1.0, 3.0], 2.0, 0.2951672)])
def test_student_t(x, t, p):        # by scipy.stats.ttest_1samp
    mean, found_t, found_p = metrics.student_t(x)
    assert (mean, found_t, found_p) == pytest.approx((np.mean(x), t, p), abs=1e-6)


def test_student_t_without_spread():
    assert metrics.student_t([2, 2, 2])[1:] == (math.inf, 0.0)
    assert metrics.student_t([0, 0])[2] == 1.0
    with pytest.raises(ValueError, match='N >= 2'):
        metrics.student_t([1])


def test_mean_interval():
    x = np.random.default_rng(0).normal(size=5)
    for level, quantile in ((0.95, 2.7764451052), (0.99, 4.6040948714)):    # of t, 4 degrees
        mean, low, high = metrics.mean_interval(x, level)
        half = quantile * x.std(ddof=1) / math.sqrt(5)
        assert (mean, low, high) == pytest.approx((x.mean(), x.mean() - half, x.mean() + half))
    assert metrics.mean_interval([3, 3, 3]) == (3, 3, 3)
    with pytest.raises(ValueError, match='N >= 2'):
        metrics.mean_interval([1])


def test_scaling_finds_what_was_done():
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(20000, 4)) * 3
    scores[::3, 3] = -np.inf
    labels = (scores / 2.5 + rng.gumbel(size=scores.shape)).argmax(1)     # softmax(scores / 2.5)
    temperature = metrics.fit_temperature(scores, labels)
    assert temperature == pytest.approx(2.5, rel=0.05)
    rows = np.arange(len(labels))
    losses = [-np.log(metrics.softmax(scores, t)[rows, labels]).mean()
              for t in (temperature, temperature * 1.01, temperature / 1.01)]
    assert min(losses) == losses[0]
    confidence = metrics.softmax(scores).max(1)
    right = rng.random(len(labels)) < metrics.apply_platt(confidence, 0.7, -0.3)
    assert metrics.fit_platt(confidence, right) == pytest.approx((0.7, -0.3), abs=0.05)
    assert all(map(math.isfinite, metrics.fit_platt([0.9, 1.0], [True, True])))
    for bad, message in (([[0.0, math.nan]], 'row 0: the scores'),
                         ([[0.0, -math.inf]], 'row 0: label 1 is not')):
        with pytest.raises(ValueError, match=message):
            metrics.fit_temperature(bad, [1])


def test_mmce_and_auroc_by_all_pairs():
    probs, labels = calibration_case(2, 300, 3, 1.5, 1.0)
    probs = np.round(probs * 20) + 1e-9
    probs /= probs.sum(1, keepdims=True)
    c, right = probs.max(1), probs.argmax(1) == labels
    r = right - c
    pairs = np.exp(-np.abs(c[:, None] - c) / 0.4)
    assert metrics.mmce(probs, labels) == exactly(np.sqrt(r @ pairs @ r) / 300)
    above = c[right][:, None] - c[~right]
    assert metrics.auroc(probs, labels) == exactly((above > 0).mean() + (above == 0).mean() / 2)
    assert math.isnan(metrics.auroc([[1.0, 0.0]], [0]))


def test_aurc_is_the_mean_over_orders_of_tied_rows():
    confidence = np.array([0.9, 0.7, 0.7, 0.7, 0.6, 0.6])
    correct = np.array([True, False, True, True, False, True])
    risks = []
    for order in itertools.permutations(range(6)):
        if (np.diff(confidence[list(order)]) <= 0).all():
            wrong = np.cumsum(~correct[list(order)])
            risks.append((wrong / np.arange(1, 7)).mean())
    assert len(risks) == 12 and metrics.aurc(confidence, correct) == exactly(np.mean(risks))


def test_kde_ece_of_many_rows_is_the_true_error():
    rng = np.random.default_rng(0)
    c = rng.uniform(0.3, 0.9, 200_000)
    assert metrics.kde_ece(c, rng.random(len(c)) < c) < 0.01
    assert metrics.kde_ece(c, rng.random(len(c)) < c - 0.2) == pytest.approx(0.2, abs=0.01)
    assert metrics.smooth_ece(c, rng.random(len(c)) < c - 0.2) == pytest.approx(0.2, abs=0.01)


def test_a_calibrated_model_shows_an_error_by_chance():
    rng = np.random.default_rng(0)
    probs = metrics.softmax(rng.normal(size=(100, 4)) * 1.5)
    labels = (probs.cumsum(1) < rng.random((100, 1))).sum(1)
    found = metrics.consistency_test(probs, labels, n_resamples=500)
    assert 0.06 < found['expected'] < 0.12 and found['p95'] > found['expected']
    assert found['p'] > 0.01
    wrong = (probs.argmax(1) + 1) % 4
    assert metrics.consistency_test(probs, wrong, n_resamples=500)['p'] == exactly(1 / 501)
    alone = metrics.consistency_test(probs.max(1), probs.argmax(1) == labels, n_resamples=500)
    assert alone['expected'] == pytest.approx(found['expected'], abs=0.01)


def test_intervals_cover_what_they_should():
    """Percentile and BCa intervals of the mean confidence's gap, over samples of a known one."""
    rng = np.random.default_rng(1)
    for method in ('percentile', 'bca'):
        covered = 0
        for _ in range(60):
            c = rng.uniform(0.5, 1, 80)
            right = rng.random(80) < c - 0.1
            low, high = metrics.interval(metrics.gap, c, right, n_resamples=200, method=method)
            covered += low <= 0.1 <= high
        assert covered >= 51, method
    # skewed: BCa moves the interval of a variance up
    x = rng.exponential(size=60)
    percentile, bca = (metrics.interval(lambda x, _: x.var(), x, x, method=m, n_resamples=2000)
                       for m in ('percentile', 'bca'))
    assert bca[0] > percentile[0] and bca[1] > percentile[1]
    with pytest.raises(ValueError, match="'percentile' or 'bca'"):
        metrics.interval(metrics.ece, [[1.0, 0.0]], [0], method='normal')


def test_paired_tests_tell_models_apart():
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(800, 4)) * 1.5
    labels = (scores + rng.gumbel(size=scores.shape)).argmax(1)
    right, sharp = metrics.softmax(scores), metrics.softmax(3 * scores)
    difference, low, high, p = metrics.paired_bootstrap(metrics.ece, right, sharp, labels,
                                                        n_resamples=200)
    assert low < difference < high and low > 0 and p == exactly(2 / 201)
    assert metrics.permutation_test(metrics.ece, right, sharp, labels, n_permutations=200)[1] < 0.02
    other = right + 1e-3 * rng.random(right.shape)
    other /= other.sum(1, keepdims=True)
    assert metrics.permutation_test(metrics.nll, right, other, labels, n_permutations=200)[1] > 0
    same = metrics.paired_bootstrap(metrics.ece, right, right, labels, n_resamples=50)
    assert same == (0, 0, 0, 1)
    with pytest.raises(ValueError, match='the same rows'):
        metrics.permutation_test(metrics.ece, right, right[:5], labels)


def test_other_scalings():
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(6000, 3)) * 2
    scores[::4, 2] = -np.inf
    bias = np.array([0.8, -0.3, 0.0])
    labels = (scores * [0.5, 1.0, 2.0] + bias + rng.gumbel(size=scores.shape)).argmax(1)
    w, b = metrics.fit_vector(scores, labels)
    assert w == pytest.approx([0.5, 1.0, 2.0], rel=0.15)
    assert b - b[2] == pytest.approx(bias, abs=0.2)
    probs = metrics.apply_vector(scores, w, b)
    assert probs.sum(1) == pytest.approx(1) and (probs[::4, 2] == 0).all()
    assert metrics.nll(probs, labels) < metrics.nll(metrics.softmax(scores), labels)
    c = metrics.softmax(scores).max(1)
    right = rng.random(len(c)) < c ** 2
    values = metrics.fit_histogram(c, right, 10)
    assert metrics.ece(metrics.apply_histogram(c, values), right, 1000) < 0.01
    assert values[0] == exactly(0.05)       # an empty bin
    x, y = metrics.fit_isotonic(c, right)
    fitted = metrics.apply_isotonic(c, x, y)
    assert (np.diff(y) >= 0).all() and (np.diff(x) > 0).all()
    assert np.abs(fitted - c ** 2).mean() < 0.03 and fitted.mean() == pytest.approx(right.mean())
    x, y = metrics.fit_isotonic([0.1, 0.2, 0.3, 0.4, 0.4], [True, False, False, True, False])
    assert metrics.apply_isotonic([0.05, 0.1, 0.3, 0.35, 0.4, 0.9], x, y) == pytest.approx(
        [1 / 3, 1 / 3, 1 / 3, 5 / 12, 1 / 2, 1 / 2])


def test_metrics_as_a_program(tmp_path):
    rows = [{'probs': [0.7, 0.3], 'label': 0}, {'log_probs': [-1.0, -2.0, -4.0], 'answer': 1,
                                                'n_tokens': [1, 1, 2]},
            {'probs': [0.5, 0.5], 'answer': 1, 'split': 'validation'}]
    path = write_rows(tmp_path / 'samples.jsonl', rows)

    def run():
        return subprocess.run([sys.executable, 'metrics.py', path], cwd=HERE, capture_output=True,
                              text=True)
    done = run()
    assert done.returncode == 0, done.stderr
    p = np.exp([-1, -2, -2])
    nll = metrics.report([[0.7, 0.3, 0], p / p.sum()], [0, 1], [2, 3])['nll']
    lines = [line.split() for line in done.stdout.split('\n')]
    assert ['nll', f'{nll:.4f}'] in lines and ['n', '2'] in lines
    write_rows(tmp_path / 'samples.jsonl', [{'confidence': 0.6, 'correct': True, 'task': 'clm'}])
    assert run().stdout.startswith('clm\nn ')
    write_rows(tmp_path / 'samples.jsonl', [{'probs': [0.7, 0.3], 'answer': 0}, {'probs': [1]}])
    assert 'samples.jsonl:2: ' in run().stderr and run().returncode == 1


def test_confidence_of_a_quarter_and_of_one():
    certain = np.eye(4)[[0, 1]]
    unsure = np.full((2, 4), 0.25)
    probs = np.concatenate([certain, unsure])
    for n_bins in range(1, 31):
        table = metrics.bins(probs, [0, 0, 0, 1], n_bins)
        assert table['count'].sum() == 4
        assert table['count'][-1] == (4 if n_bins == 1 else 2)
        if n_bins > 1:
            quarter = math.ceil(n_bins / 4) - 1
            assert (table['count'][quarter], table['confidence'][quarter]) == (2, 0.25)
            assert (table['accuracy'][quarter], table['accuracy'][-1]) == (0.5, 0.5)
    # A sum above 1 by rounding leaves confidence 1 + 5e-5 in the last bin.
    assert metrics.bins([[1.00005, 0.0]], [0])['count'][-1] == 1


def test_a_probability_of_0_is_in_the_first_bin():
    # p of option 1 is 0 and 0.1, both in bin 1: mean 0.05, label in half of them. Those of option 0
    # are 1 and 0.9, in two bins.
    probs = [[1.0, 0.0], [0.9, 0.1]]
    assert metrics.sce(probs, [1, 0], n_bins=10) == exactly((0.45 + (1.0 + 0.1) / 2) / 2)


def test_bins_are_what_a_reliability_diagram_needs():
    probs = np.array([[0.9, 0.1], [0.85, 0.15], [0.35, 0.65], [0.5, 0.5]])
    table = metrics.bins(probs, [0, 1, 1, 1], n_bins=5)
    assert list(table) == ['edges', 'count', 'confidence', 'accuracy', 'low', 'high']
    assert table['edges'].tolist() == [0, 0.2, 0.4, 0.6, 0.8, 1]
    assert table['count'].tolist() == [0, 0, 1, 1, 2]
    assert table['confidence'] == pytest.approx([math.nan, math.nan, 0.5, 0.65, 0.875], nan_ok=True)
    assert table['accuracy'] == pytest.approx([math.nan, math.nan, 0, 1, 0.5], nan_ok=True)
    assert (table['low'][4], table['high'][4]) == pytest.approx(metrics.wilson_interval(
        np.array([0.9, 0.9]), np.array([True, False])))
    assert np.isnan(table['low'][0])
    assert metrics.ece(probs, [0, 1, 1, 1], 5) == exactly((0.5 + 0.35 + 2 * 0.375) / 4)
    assert metrics.mce(probs, [0, 1, 1, 1], 5) == exactly(0.5)


@st.composite
def ragged_predictions(draw):
    """Predictions whose rows have 1 to K options, zero-padded, and the options per row."""
    k = draw(st.integers(1, 5))
    n = draw(st.integers(1, 25))
    n_options = draw(arrays(np.int64, n, elements=st.integers(1, k)))
    weights = draw(arrays(np.int64, (n, k), elements=st.integers(0, 8)))
    weights[:, 0] += weights.sum(1) == 0
    weights *= np.arange(k) < n_options[:, None]
    weights[:, 0] += weights.sum(1) == 0
    labels = draw(arrays(np.int64, n, elements=st.integers(0, k - 1))) % n_options
    return weights / weights.sum(1, keepdims=True), labels, n_options


@small
@given(ragged_predictions(), st.integers(1, 20))
def test_class_wise_metrics_count_only_rows_that_have_the_option(case, n_bins):
    probs, labels, n_options = case
    static = []
    adaptive = []
    for k in range(n_options.max()):
        rows = n_options > k
        p, is_label = probs[rows, k], labels[rows] == k
        static.append(literal_gap(p, is_label, equal_width_bin(n_bins)))
        chunks = min(n_bins, len(p))
        sizes = np.diff([round(r * len(p) / chunks) for r in range(chunks + 1)])
        adaptive.append(literal_gap(p, is_label, equal_mass_bin(p, sizes)))
    assert metrics.sce(probs, labels, n_bins, n_options) == exactly(np.mean(static))
    assert metrics.ace(probs, labels, n_bins, n_options) == exactly(np.mean(adaptive))


@small
@given(predictions(), st.integers(1, 4))
def test_padding_changes_nothing_when_n_options_is_given(case, extra):
    probs, labels = case
    n, k = probs.shape
    padded = np.concatenate([probs, np.zeros((n, extra))], 1)
    expected = metrics.report(probs, labels)
    result = metrics.report(padded, labels, np.full(n, k))
    for key, value in expected.items():
        assert result[key] == pytest.approx(value, rel=0, abs=1e-12, nan_ok=True), key
    # Without it the padding is a class of its own, always right: sce and ace shrink.
    assert metrics.sce(padded, labels) == exactly(expected['sce'] * k / (k + extra))


def test_wilson_interval():
    # 9 right of 10, the textbook example: 0.5958 to 0.9821.
    probs = np.tile([0.8, 0.2], (10, 1))
    labels = [0] * 9 + [1]
    assert metrics.wilson_interval(probs, labels) == pytest.approx((0.5958, 0.9821), abs=1e-4)
    # The bounds are the two accuracies p from which 0.9 is exactly z standard errors away.
    for z in [1.0, 1.96, 2.576]:
        for p in metrics.wilson_interval(probs, labels, z=z):
            assert abs(0.9 - p) == exactly(z * math.sqrt(p * (1 - p) / 10))
    # All right or all wrong still leaves a width: z^2 / (N + z^2).
    width = 1.96**2 / (10 + 1.96**2)
    assert metrics.wilson_interval(probs, [0] * 10) == (exactly(1 - width), 1)
    assert metrics.wilson_interval(probs, [1] * 10) == (0, exactly(width))


def test_report_holds_plain_numbers_and_agrees_with_the_functions():
    probs, labels = golden_case('small_4')
    result = metrics.report(probs, labels)
    whole = {'n', 'mce_count'}
    assert all(type(value) is (int if key in whole else float) for key, value in result.items())
    assert json.loads(json.dumps(result)) == result
    assert all(line.split()[0] in result for line in str(result).split('\n'))
    low, high = metrics.wilson_interval(probs, labels)
    assert (result['accuracy_low'], result['accuracy_high']) == (low, high)
    assert result['n'] == 150
    assert result['confidence'] == exactly(metrics.mean_confidence(probs, labels))
    assert result['entropy_bits'] == metrics.entropy(probs, labels)
    same_name = ['accuracy', 'gap', 'nll', 'brier', 'ece', 'mce', 'ece_equal_mass', 'sce', 'ace']
    same_name += ['rmsce', 'mad', 'tace', 'ece_sweep', 'ece_debiased', 'rmsce_hendrycks', 'mmce',
                  'rms_mmlu_repo', 'ks_error', 'smooth_ece', 'kde_ece', 'auroc', 'aurc']
    for name in same_name:
        assert result[name] == exactly(getattr(metrics, name)(probs, labels)), name
    # Lists, float32 and small integer types will do as well.
    as_float32 = metrics.report(probs.astype(np.float32), labels.astype(np.int8))
    assert as_float32 == {key: pytest.approx(value, abs=1e-6) for key, value in result.items()}
    assert metrics.report(probs.tolist(), labels.tolist()) == result


def test_metrics_leave_their_input_alone():
    probs, labels = golden_case('small_4')
    before = probs.copy(), labels.copy()
    metrics.report(probs, labels, np.full(150, 4))
    assert np.array_equal(probs, before[0]) and np.array_equal(labels, before[1])


# Errors

METRICS = [
    *[metrics.accuracy, metrics.wilson_interval, metrics.mean_confidence, metrics.gap],
    *[metrics.entropy, metrics.nll, metrics.brier, metrics.bins, metrics.ece, metrics.mce],
    *[metrics.ece_equal_mass, metrics.rmsce, metrics.mad, metrics.sce, metrics.ace, metrics.report],
]


@pytest.mark.parametrize('metric', METRICS)
@pytest.mark.parametrize(
    'probs, labels, message',
    [
        ([0.5, 0.5], [0], 'probs must be [N, K] with N, K >= 1, not of shape (2,)'),
        (np.zeros((0, 4)), [], 'probs must be [N, K] with N, K >= 1, not of shape (0, 4)'),
        (np.zeros((2, 0)), [0, 0], 'probs must be [N, K] with N, K >= 1, not of shape (2, 0)'),
        ([], [], 'probs must be [N, K] with N, K >= 1, not of shape (0,)'),
        (
            [[0.5, 0.5], [1.0, 0.0]],
            [0],
            'labels must be [2], one per row of probs, not of shape (1,)',
        ),
        ([[0.5, 0.5]], [[0]], 'labels must be [1], one per row of probs, not of shape (1, 1)'),
        ([[0.5, 0.5]], [0.0], 'labels must be integers, not float64'),
        ([[0.5, 0.5]], ['A'], 'labels must be integers, not <U1'),
        (
            [[1.0, 0.0], [0.5, math.nan]],
            [0, 0],
            'row 1: probability of option 1 is nan, not 0 or more',
        ),
        (
            [[1.0, 0.0], [1.0, 0.0], [-0.25, 1.25]],
            [0, 0, 0],
            'row 2: probability of option 0 is -0.25, not 0 or more',
        ),
        ([[1.0, 0.0], [0.5, 0.4]], [0, 0], 'row 1: probabilities sum to 0.9, not to 1'),
        ([[0.5, 0.5], [0.5002, 0.5]], [0, 0], 'row 1: probabilities sum to 1.0002, not to 1'),
        ([[math.inf, 0.0]], [0], 'row 0: probabilities sum to inf, not to 1'),
        ([[0.5, 0.5], [0.5, 0.5]], [1, 2], 'row 1: label 2 is not one of the options 0 to 1'),
        ([[0.5, 0.5]], [-1], 'row 0: label -1 is not one of the options 0 to 1'),
    ],
)
def test_metrics_refuse_bad_predictions(metric, probs, labels, message):
    with pytest.raises(ValueError) as error:
        metric(probs, labels)
    assert str(error.value) == message


def test_metrics_accept_rows_that_sum_to_1_within_the_tolerance():
    assert metrics.accuracy([[0.50009, 0.5]], [0]) == 1
    assert metrics.accuracy([[0.49991, 0.5]], [0]) == 0


@pytest.mark.parametrize('metric', [metrics.sce, metrics.ace, metrics.report])
@pytest.mark.parametrize(
    'n_options, message',
    [
        ([3], 'n_options must be [2], one per row, not of shape (1,)'),
        ([3.0, 2.0], 'n_options must be integers, not float64'),
        ([3, 0], 'row 1: n_options is 0, not from 1 to 3'),
        ([4, 2], 'row 0: n_options is 4, not from 1 to 3'),
        ([3, 1], 'row 1: label 1 points at padding, n_options is 1'),
        ([2, 2], 'row 0: padded option 2 has probability 0.25, not 0'),
    ],
)
def test_metrics_refuse_bad_n_options(metric, n_options, message):
    with pytest.raises(ValueError) as error:
        metric([[0.5, 0.25, 0.25], [0.5, 0.5, 0.0]], [0, 1], n_options=n_options)
    assert str(error.value) == message


@pytest.mark.parametrize(
    'metric, setting, value, message',
    [
        (metrics.bins, 'n_bins', 0, 'n_bins must be a whole number, 1 or more, not 0'),
        (metrics.ece, 'n_bins', 10.0, 'n_bins must be a whole number, 1 or more, not 10.0'),
        (metrics.mce, 'n_bins', -1, 'n_bins must be a whole number, 1 or more, not -1'),
        (metrics.ece_equal_mass, 'n_bins', 0, 'n_bins must be a whole number, 1 or more, not 0'),
        (metrics.sce, 'n_bins', 0, 'n_bins must be a whole number, 1 or more, not 0'),
        (metrics.ace, 'n_ranges', 0, 'n_ranges must be a whole number, 1 or more, not 0'),
        (metrics.rmsce, 'bin_size', 0, 'bin_size must be a whole number, 1 or more, not 0'),
        (metrics.mad, 'bin_size', '9', "bin_size must be a whole number, 1 or more, not '9'"),
        (metrics.entropy, 'unit', 'bans', "unit must be 'bits', 'nats' or 'share', not 'bans'"),
        (
            metrics.wilson_interval,
            'z',
            0,
            'z must be a positive number of standard errors, not 0',
        ),
        (
            metrics.wilson_interval,
            'z',
            math.nan,
            'z must be a positive number of standard errors, not nan',
        ),
    ],
)
def test_metrics_refuse_bad_settings(metric, setting, value, message):
    with pytest.raises(ValueError) as error:
        metric([[0.5, 0.5]], [0], **{setting: value})
    assert str(error.value) == message


if __name__ == '__main__':
    quiet = ['-q', '--durations=10', '-W', 'ignore::pytest.PytestAssertRewriteWarning']
    sys.exit(pytest.main([__file__, *quiet, *sys.argv[1:]]))
