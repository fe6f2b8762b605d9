"""data: rows, instruction formats, cache, packing"""

import gzip
import json
import numpy as np
import pytest
from data import DataError, instruct, packing, text
from hypothesis import given, settings, strategies as st
from pathlib import Path

from common import documents, write_rows


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
