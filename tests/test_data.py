"""data: rows, instruction formats, cache, packing"""

import fnmatch
import functools
import gzip
import json
import socket
import time
from pathlib import Path
from types import SimpleNamespace
import numpy as np
import pytest
from common import add_to_hub, asking, cases_of, recorded, write_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from alignment.prompts import to_prompt
import generate
from data import cache, instruct, packing, preferences, probes, questions
from data.files import read_rows
from data.items import draw
from data.messages import to_messages
from data.question_answers import load_answers
from data.texts import load_text
from data.trees import tokenize_questions
from written.benchmarks import load_written
from compare.compare import FileConfig
from bridges.prediction_files import read_predictions
from bridges import hub
from runtime.errors import CheckpointError, ConfigError, DataError
from runtime.sources import fetch
from runtime.ownership import temporary

SAME = [{'role': 'user', 'content': 'sky?'}, {'role': 'assistant', 'content': 'blue'}]


def test_of_a_hub_dataset_one_format_is_downloaded_after_its_size_is_printed(
        tmp_path, monkeypatch, capsys):
    names, asked = ('a.json', 'data/train-00000-of-00001.parquet', 'README.md'), []
    info = SimpleNamespace(sha='0' * 40, siblings=[
        SimpleNamespace(rfilename=name, size=3_000_000) for name in names])

    def download(name, allow_patterns, **_):
        asked.append((name, *allow_patterns))
        for found in filter(functools.partial(fnmatch.fnmatch, pat=allow_patterns[0]), names):
            write_rows(tmp_path / 'snapshot' / found, [{'messages': SAME}])
        return str(tmp_path / 'snapshot')
    patterns = ['*.jsonl', 'data/*.parquet', '*.json']
    monkeypatch.setattr('huggingface_hub.snapshot_download', download)
    monkeypatch.setattr('huggingface_hub.HfApi.repo_info', lambda *_, **__: info)
    (file,) = fetch('me/rows', patterns)
    assert file == tmp_path / 'snapshot/data/train-00000-of-00001.parquet'
    assert asked == [('me/rows', 'data/*.parquet')]     # the hub warns of patterns without a file
    assert 'downloading the dataset me/rows from the hub: 1 files, 3 MB' in capsys.readouterr().out
    with pytest.raises(DataError, match='me/rows holds nothing that matches .*.csv or .*.zip'):
        fetch('me/rows', ['*.csv', '*.zip'])
    # offline, the cache is asked
    monkeypatch.setattr('huggingface_hub.HfApi.repo_info', lambda: None)
    assert fetch('me/rows', patterns) == [file] and asked[1:] == [
        ('me/rows', '*.jsonl'), ('me/rows', 'data/*.parquet')]


def test_a_hub_that_does_not_answer_is_not_waited_for(tmp_path, monkeypatch):
    write_rows(tmp_path / 'content' / 'rows.jsonl', [{'messages': SAME}])
    add_to_hub(tmp_path / 'hub', 'me/cached', tmp_path / 'content', 'datasets')
    monkeypatch.setattr(hub, 'SECONDS', 0.5)
    monkeypatch.setattr(hub, '_silent', set())
    with socket.create_server(('localhost', 0)) as silent:
        for name, value in (('HF_HUB_CACHE', str(tmp_path / 'hub')), ('HF_HUB_OFFLINE', False),
                            ('ENDPOINT', f'http://localhost:{silent.getsockname()[1]}')):
            monkeypatch.setattr(f'huggingface_hub.constants.{name}', value)
        assert [path.name for path in fetch('me/cached', ['*.jsonl'])] == ['rows.jsonl']
        with pytest.raises(DataError, match='me/other .*it does not answer within 0.5 s'):
            fetch('me/other', ['*.jsonl'])
        with pytest.raises(CheckpointError, match='it does not answer within 0.5 s'):
            hub.upload(tmp_path, 'me/model', ['config.json'])
    # nobody listens there now: one request, and no more of them after some seconds
    assert [path.name for path in fetch('me/cached', ['*.jsonl'])] == ['rows.jsonl']
    started = time.monotonic()
    with pytest.raises(DataError, match='me/third .*refused.*; check the network, or name a file'):
        fetch('me/third', ['*.jsonl'])
    assert time.monotonic() - started < 3


def test_a_full_disk_at_the_token_cache_is_named(tmp_path):
    with pytest.raises(OSError, match='No space left'), temporary(
            tmp_path / 'cache', folder=True) as part:
        (part / 'offsets.bin').symlink_to('/dev/full')
        cache._write(part, [[(0, [], [])]], {})
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize('name, row', [
    ('alpaca.json', {'instruction': 'sky?', 'input': '', 'output': 'blue'}),
    ('openhermes2_5.json', {'conversations': [{'from': 'human', 'value': 'sky?'},
                                              {'from': 'gpt', 'value': 'blue'}], 'idx': 1}),
    ('data/train-00000-of-00001.parquet', {'id': 'x', 'messages': SAME, 'source': 'y'}),
    ('train/data-00000-of-00001.arrow', {'messages': SAME}),
    ('data/train_sft-00000-of-00001.arrow.parquet', {'prompt': 'sky?', 'messages': SAME})])
def test_each_instruction_format_gives_the_same_tokens(tmp_path, tokenizers, name, row):
    write_rows(tmp_path / 'hub' / name, [row] * 3)
    sequences = conversations(tmp_path / 'hub', tokenizers['gemma'])
    assert len(sequences) == 3 and shown(sequences, tokenizers['gemma'])[2] == (
        '<s><|user|>\nsky?\n<|assistant|>\nblue</s>', 'blue</s>')


def shown(sequences, tokenizer):
    """Return (the text, its supervised part) of each sequence."""
    return [(tokenizer.decode(tokens.tolist()), tokenizer.decode(tokens[loss_mask == 1].tolist()))
            for tokens, loss_mask in sequences]


def conversations(path, tokenizer, load=instruct.load_conversations, **options):
    settings = {'max_length': 64, 'add_bos': True, 'cache_dir': path.parent / 'cache',
                **({'template': 'tulu'} if load is instruct.load_conversations else {})}
    return load(str(path), tokenizer, **settings | options)


def test_bad_rows_are_named_or_counted(tmp_path, tokenizers, capsys):
    path, good = tmp_path / 'chat.jsonl', json.dumps({'messages': SAME})
    path.write_text(f'{good}\n{{"messages": [}}\n{good}\n{{"text": "x"}}\n')
    with pytest.raises(DataError, match=r'chat.jsonl:2: broken JSON.*on_bad_row=skip'):
        conversations(path, tokenizers['gemma'])
    assert not list((tmp_path / 'cache').glob('*'))  # nothing half-written
    for workers in (1, 2):
        sequences = conversations(path, tokenizers['gemma'], on_bad_row='skip', workers=workers,
                                  max_length=60 + workers)
        assert len(sequences) == 2 and '2 bad rows skipped, the first' in capsys.readouterr().out


@pytest.mark.parametrize('add_bos', [True, False])
def test_train_on_inputs_supervises_every_token_but_bos(tmp_path, tokenizers, capsys, add_bos):
    path = write_rows(tmp_path / 'alpaca.json', [{'instruction': 'sky?', 'output': 'blue'}] * 2)
    load = functools.partial(conversations, path, tokenizers['gemma'], template='alpaca',
                             add_bos=add_bos)
    plain, every = (load(max_length=400, train_on_inputs=x) for x in (False, True))
    assert plain[0][0].tolist() == every[0][0].tolist()
    assert every[1][1].tolist() == [int(not add_bos), *[1] * (len(every[1][0]) - 1)]
    assert 0 < plain[1][1].sum() < every[1][1].sum()
    first = int(plain[0][1].argmax())       # of the answer
    assert load(max_length=first + 1)[0][1].sum() == 1
    assert f'2 of 2 conversations have max_length = {first + 1} tok' in capsys.readouterr().out
    with pytest.raises(DataError, match=f'alpaca.json: row 1: .* beyond max_length = {first} tok'):
        load(max_length=first)


# as in the hub's files, in no order of the tree; the ids of answers are in capitals
TREES = cases_of('message_trees.json')


@pytest.mark.parametrize('name', ['data/train-00000-of-00001-b42a775f407cee45.parquet',
                                  'messages.jsonl.gz'])
def test_the_first_turns_of_message_trees_are_read(tmp_path, tokenizers, name):
    path = write_rows(tmp_path / name, TREES)
    write_rows(path.parent / 'validation-0.parquet', [TREES[1] | {'text': 'held out?'}])
    if path.suffix == '.gz':
        path.write_bytes(gzip.compress(path.read_bytes()))
    best, every = (shown(conversations(
        tmp_path if 'train' in name else path, tokenizers['gemma'], answers=answers,
        cache_dir=tmp_path / 'cache'), tokenizers['gemma']) for answers in ('best', 'all'))
    assert [text for text, _ in best] == [
        f'<s><|user|>\n{prompt}\n<|assistant|>\n{answer}</s>'
        for prompt, answer in (('sky?', 'a first'), ('alone?', 'not ranked'))]
    assert [answer for _, answer in every] == [
        f'{answer}</s>' for answer in ('a first', 'a second', 'not ranked', 'not ranked either')]


HUMAN, GPT = {'from': 'human', 'value': 'sky?'}, {'from': 'gpt', 'value': 'blue'}
BRIEF = [{'role': 'system', 'content': 'Be brief.'}, *SAME]
EARLIER = [{'role': 'user', 'content': 'sea?'}, {'role': 'assistant', 'content': 'green'}]


@pytest.mark.parametrize('row, messages', [
    ({'conversations': [HUMAN, GPT], 'system': 'Be brief.', 'tools': '[]'}, BRIEF),
    ({'messages': BRIEF, 'system_message': 'Be brief.'}, BRIEF),
    ({'prompt': 'sky?', 'completion': 'blue', 'developer': 'Be brief.', 'weight': 1}, BRIEF),
    ({'prompt': BRIEF[:2], 'completion': [SAME[1]]}, BRIEF),
    # the columns that parquet adds
    ({'messages': None, 'conversations': [turn | dict.fromkeys(('role', 'content', 'weight'))
                                          for turn in (HUMAN, GPT)]}, SAME),
    ({'instruction': 'sky?', 'output': 'blue', 'input': None, 'system': 'Be brief.',
      'history': [['sea?', 'green']]}, [BRIEF[0], *EARLIER, *SAME]),
    ({'messages': [*EARLIER, *SAME], 'history': EARLIER}, [*EARLIER, *SAME]),
    ({'messages': [turn | {'tool_calls': [], 'reasoning_content': ''} for turn in SAME]}, SAME),
    ({'instruction': 'Add.', 'input': '1 2', 'output': '3'},
     [{'role': 'user', 'content': 'Add.\n\n1 2', 'input': '1 2'},
      {'role': 'assistant', 'content': '3'}])])
def test_a_row_says_all_of_its_conversation(row, messages):
    assert to_messages(row) == messages


@pytest.mark.parametrize('template, key', [('tulu', 'weight'), ('mistral_v1', 'train')])
def test_an_answer_that_is_not_trained_has_the_same_tokens_without_loss(tmp_path, tokenizers, key,
                                                                        template):
    first, last = EARLIER[1] | {key: 0}, SAME[1] | {key: True}
    path = write_rows(tmp_path / 'chat.jsonl', [
        {'messages': [*EARLIER, *SAME]}, {'messages': [EARLIER[0], first, SAME[0], last]},
        {'messages': [EARLIER[0], first | {'content': ''}, SAME[0], last]}])
    sequences = conversations(path, tokenizers['llama2'], template=template, max_length=200)
    assert sequences[0][0].tolist() == sequences[1][0].tolist()
    (_, both), (_, trained), (_, after_empty) = shown(sequences, tokenizers['llama2'])
    assert 'green' in both and 'blue' in both and 'green' not in trained and 'blue' in trained
    assert after_empty == trained


USER_FILES = cases_of('user_files.toml')


@pytest.mark.parametrize('name', USER_FILES)
def test_files_of_users_are_read_or_refused_by_name(tmp_path, tokenizers, capsys, name):
    """A refusal, a DataError or ValueError, names file and line; nothing is dropped in silence."""
    case, gemma = USER_FILES[name], tokenizers['gemma']
    source = tmp_path / 'mine'
    for file, text in case['files'].items():
        (source / file).parent.mkdir(parents=True, exist_ok=True)
        (source / file).write_bytes(text.encode())
    source = source / file if len(case['files']) == 1 else source
    load = {
        'train': lambda: [text for text, _ in shown(conversations(source, gemma), gemma)],
        'evaluate': lambda: [f'{q.context} {q.answer}' for q in questions.load_task(
            case.get('task', '') + str(source), asking()).items],
        'qa': lambda: [[q.text, *q.references]
                       for q in load_written(f'qa:{source}', asking()).items],
        'generate --raw': lambda: [gemma.decode(ids) for _, ids in generate.read_prompts(
            source, gemma, '', False)[0]],
        'prompts': lambda: to_prompt(json.loads(source.read_text())),
        'metrics': lambda: [list(sample.values())[-3:] for sample, _ in read_predictions(
            source, FileConfig())]}[case.get('by', 'train')]
    if 'refused' in case:
        with pytest.raises(ValueError, match=case['refused']):
            load()
    else:
        assert load() == case['gives']
        assert fnmatch.fnmatch(capsys.readouterr().out, f'*{case.get("note", "")}*')


def test_empty_and_missing_data_are_named(tmp_path, tokenizers, monkeypatch):
    path, gemma = write_rows(tmp_path / 'chat.jsonl', []), tokenizers['gemma']
    marked = write_rows(tmp_path / 'marked.jsonl', [
        {'messages': [SAME[0], SAME[1] | {'weight': 0}]}])
    monkeypatch.setenv('HOME', str(tmp_path))
    (tmp_path / 'links').mkdir()
    (tmp_path / 'links/a.jsonl').symlink_to('/nowhere')
    cache = {'cache_dir': tmp_path / 'cache'}
    for place, options, error, message in (
            (path, cache, DataError, 'an empty dataset'),
            (Path('/nowhere'), cache, DataError, 'no file or folder at /nowhere'),
            (Path('some/where'), cache, DataError, 'downloading the dataset some/where from the h'),
            (marked, {'train_on_inputs': True}, DataError, 'train_on_inputs = True trains all'),
            (marked, {'template': 'llama3', 'on_bad_row': 'skip'}, ConfigError,     # no bad row
             '^the template needs .*eot_id.* the tokenizer of'),
            (marked, {'cache_dir': marked}, OSError, 'Not a directory: .*marked'),
            (tmp_path / 'links', cache, OSError, 'No such file .*links/a.jsonl')):
        with pytest.raises(error, match=message):
            conversations(place, gemma, **options)
    write_rows(path, [{'messages': SAME}])
    assert len(conversations(Path('~/chat.jsonl'), gemma, cache_dir='~/cache')) == 1


def test_cache_is_keyed_by_what_went_in(tmp_path, tokenizers, monkeypatch):
    path, gemma = write_rows(tmp_path / 'chat.jsonl', [{'messages': SAME}]), tokenizers['gemma']
    written = recorded(monkeypatch, cache, '_write')
    first = conversations(path, gemma)
    # a memmap's slices are slow to make
    assert {*map(type, conversations(path, gemma)[0])} == {np.ndarray} and len(written) == 1
    for n, change in enumerate(({'max_length': 32}, {'template': 'gemma'})):
        conversations(path, gemma, **change)
        assert len(written) == 2 + n
    conversations(path, tokenizers['llama2'])
    # the digest depends on tokens, mask and order
    rows = [{'messages': SAME}, {'messages': [SAME[0], SAME[1] | {'content': 'fox'}]}]
    digests = [conversations(write_rows(path, some), gemma).digest
               for some in (rows[:1], rows, rows[::-1], rows[1:])]
    assert digests[0] == first.digest and len({*digests}) == 4 and len(written) == 7


def test_sequences_of_a_prompt_or_document_have_one_group(tmp_path, tokenizers):
    gemma, answer = tokenizers['gemma'], SAME[1] | {'content': 'Another answer.'}
    talks = [SAME, [SAME[0], answer], [SAME[0] | {'content': 'Why?'}, SAME[1]]]
    # another answer, another length of the conversation, white space, another system message
    longer = [SAME, [SAME[0] | {'content': ' sky?\n'}, answer, SAME[0], SAME[1]], BRIEF]
    pairs = [{'prompt': f'{who}?', 'chosen': x, 'rejected': y}
             for who, x, y in ('Aab', 'Acd', 'Bab')]
    talks, longer = ([{'messages': talk} for talk in some] for some in (talks, longer))
    path = tmp_path / 'rows.jsonl'
    for rows, options in (
            (talks, {}), (talks, {'train_on_inputs': True}), (longer, {}),
            (pairs, {'load': preferences.load_preferences, 'template': 'tulu', 'pack_len': 64})):
        a, b, c = conversations(write_rows(path, rows), gemma, **options).groups
        assert a == b != c
    texts = ['the quick fox ' * 40, 'a dog', 'the quick fox ' * 40]
    groups = conversations(write_rows(path, [{'text': text} for text in texts]), gemma,
                           load_text).groups
    assert len(groups) == 5 and len({*groups[[0, 1, 3, 4]]}) == 1 and len({*groups}) == 2


def test_the_name_of_a_file_decides_which_of_its_rows_are_trained(tmp_path, tokenizers, capsys):
    rows = [{'messages': SAME, 'split': split} for split in ('train', 'test', 'train')]
    for name, n in (('test.jsonl', 3), ('all.jsonl', 2), ('train.jsonl', 2), ('test.jsonl', 3)):
        path = write_rows(tmp_path / name, rows)
        assert len(conversations(path, tokenizers['gemma'])) == n, name


def test_solved_questions_are_trained_by_letter(tmp_path, tokenizers):
    """The tokens are those of an evaluation; the loss is on the letter of the answer alone."""
    tokenizer, row = tokenizers['gemma'], {'sentence': 'Kim met Ann; _ won.', 'option1': 'Kim'}
    path = write_rows(tmp_path / 'hub/winogrande_xl/train-00000-of-00001.parquet',
                      [row | {'option2': 'Ann', 'answer': answer} for answer in '1221'])
    load = functools.partial(load_answers, tokenizer=tokenizer, add_bos=True, max_length=500,
                             cache_dir=tmp_path / 'cache')
    sequences = load(f'winogrande_xl:{tmp_path / "hub"}')
    asked = questions.load_task(f'winogrande_xl:{path}', asking()).items
    trees = [*tokenize_questions(asked, {}, tokenizer, add_bos=True, max_length=500)]
    assert len(sequences) == len(trees) == 4
    for i, (question, tree) in enumerate(trees):
        ids, loss_mask = (x.tolist() for x in sequences[i])
        assert ids == [*tree.prefix, *tree.prompt, *tree.continuations[question.answer]]
        n = tree.n_tokens[question.answer]      # small vocabularies may have no token ' A'
        assert loss_mask == [0] * (len(ids) - n) + [1] * n
        assert tokenizer.decode(ids[-n:]).strip() == 'ABBA'[i]
    row = {'question': 'Q?', 'choices': ['a', 'b'], 'answer': 'B'}
    path = write_rows(tmp_path / 'mine.jsonl', [row, row | {'answer': 'E'},
                                                row | {'question': 'sky ' * 499}])
    with pytest.raises(DataError, match='mine.jsonl:2: no valid answer: .E'):
        load(str(path))
    sequences = load(str(path), on_bad_row='skip')
    assert len(sequences) == 1 and sequences.info['bad_rows'] == 2


def test_a_long_document_becomes_sequences_with_bos_and_one_eos(tmp_path, tokenizers):
    tokenizer, text = tokenizers['gemma'], 'The sky is blue. ' * 9
    path = write_rows(tmp_path / 'text.jsonl', [{'text': text}, {'text': 'fox'}])
    n = len(tokenizer.encode(text))
    for length in (16, n, n // 2):      # in pieces that the text fills: EOS would begin another
        sequences = [*conversations(path, tokenizer, load_text, max_length=length + 1)]
        assert all(len(tokens) <= length + 1 and tokens[0] == tokenizer.bos_id and
                   loss_mask.tolist() == [0] + [1] * (len(tokens) - 1)
                   for tokens, loss_mask in sequences)
        pieces = [tokens.tolist()[1:] for tokens, _ in sequences]
        assert min(map(len, pieces)) > 1 and pieces[-1] == [*tokenizer.encode('fox'),
                                                            tokenizer.eos_id]
        joined = sum(pieces[:-1], [])
        assert tokenizer.decode(joined[:n]) == text
        assert joined[n:] == [tokenizer.eos_id] * (length == 16)


def test_compressed_text_is_read_like_plain_text(tmp_path, tokenizers):
    """A .txt.gz file is what the .txt file is; wikitext's are read by line, as on the hub."""
    text = '\n = Robert Boulter = \n \n He is an actor .\n He also\x85 sang .\n'.encode()
    sequences = []
    for name in ('a.txt', 'a.txt.gz', 'wiki.test.txt.gz'):
        folder = tmp_path / name.replace('.', '-')
        folder.mkdir()
        (folder / name).write_bytes(gzip.compress(text) if name.endswith('.gz') else text)
        sequences.append(conversations(folder, tokenizers['gemma'], load_text, max_length=200))
        texts, _, _, total = probes.load_texts(f'clm:{folder}', asking())
        assert total == (3 if name.startswith('wiki') else 1)
    assert len({len(s) for s in sequences}) == len({s.digest for s in sequences}) == 1
    assert texts[1].place.endswith('wiki.test.txt.gz:4')
    (tmp_path / 'b.txt').write_text('too few words')
    with pytest.raises(DataError, match='b.txt has no texts of four words or more'):
        probes.load_texts(f'clm:{tmp_path}/b.txt', asking())


def test_a_damaged_cache_is_refused(tmp_path, tokenizers):
    path = write_rows(tmp_path / 'chat.jsonl', [{'messages': SAME}] * 2)
    conversations(path, tokenizers['gemma'])
    (folder,) = (tmp_path / 'cache').iterdir()
    for name, change in (
            ('tokens.bin', None), ('info.json', lambda _: b'[]'),
            ('loss_mask.bin', lambda raw: bytes([*raw[:3], raw[3] ^ 1, *raw[4:]])),
            ('offsets.bin', lambda raw: raw[:-8]),
            ('margins.bin', lambda raw: bytes([*raw[:3], 1, *raw[4:]])),
            ('groups.bin', lambda raw: bytes([*raw[:3], raw[3] ^ 1, *raw[4:]])),
            ('margins.bin', lambda raw: raw[:-4])):     # of zeros, which the hash leaves out
        content = (folder / name).read_bytes()
        (folder / name).unlink()
        if change:
            (folder / name).write_bytes(change(content))
        with pytest.raises(DataError, match=f'cache {folder} is damaged .*; delete it'):
            conversations(path, tokenizers['gemma'])
        (folder / name).write_bytes(content)
    assert len(conversations(path, tokenizers['gemma'])) == 2


@pytest.mark.parametrize('name, raw, message', [
    ('a.jsonl', b'{"text": "fox"}\n\n{"text": "caf\xe9"}\n{"text": "fox"}\n',
     'a.jsonl:3: not UTF-8: .* 0xe9'),
    ('a.json', b'[\n{"text": }]', 'a.json:2: broken JSON'),
    ('a.jsonl', b'{"text": "x"}\n{"text": ' + b'9' * 5000 + b'}', 'a.jsonl:2: unusable JSON'),
    ('a.jsonl', b'[{"text": "x"}, 3', 'a.jsonl:1: broken JSON'),
    ('a.jsonl', b'{"text": 3}', 'a.jsonl:1: the field "text" is not text but int'),
    ('a.jsonl', b'{"content": "x"}', "a.jsonl:1: .* there is no 'text' among content"),
    ('a.jsonl', '{"text": "fox"}'.encode('utf-16'), 'a.jsonl is UTF-16; save it as UTF-8'),
    ('a.csv', b'fox,1\n', 'a.csv:1: a row must be an object with named fields'),
    ('a.jsonl.gz', gzip.compress(b'{"text": "fox"}\n' * 50, mtime=0)[:-9],
     'cannot read .*a.jsonl.gz'),
    ('a.parquet', b'PAR1 cut', 'cannot read .*a.parquet')])
def test_unreadable_files_name_their_line(tmp_path, tokenizers, name, raw, message):
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(DataError, match=message):
        conversations(tmp_path / name, tokenizers['gemma'], load_text, max_length=8)


@pytest.mark.parametrize('raw, rows', [
    *((raw, [(': row 1', {'a': 1})]) for raw in ('[{"a": 1}]', '\n[\n{"a": 1}\n]\n')),
    ('\ufeff{"a": 1}\r\n\r\n{"a": 2}', [(':1', {'a': 1}), (':3', {'a': 2})]),
    ('{"examples": [{"a": 1}]}', [(': row 1', {'a': 1})]),
    ('{"examples": [1]}\n{"examples": [2]}',
     [(':1', {'examples': [1]}), (':2', {'examples': [2]})]),
    ('\ufeff[{"a": 1},\r\n {"a": 2}]', [(': row 1', {'a': 1}), (': row 2', {'a': 2})]),
    ('{"a": 1}\n{"a":\n{"a": 3}', [(':1', {'a': 1}), (':2', None), (':3', {'a': 3})])])
def test_a_json_file_holds_a_list_or_a_row_per_line(tmp_path, raw, rows):
    (tmp_path / 'x.json').write_text(raw, newline='')
    for name in ('x.json.gz', *['x.jsonl.gz'] * ('examples' not in raw)):
        (tmp_path / name).write_bytes(gzip.compress(raw.encode()))
    for path in tmp_path.iterdir():
        for (place, row), (ending, expected) in zip(read_rows(path), rows, strict=True):
            assert place == f'{path}{ending}'
            assert row == expected if expected else f'{place}: broken JSON' in str(row)
    (tmp_path / 'x.json').write_text(' \n')
    with pytest.raises(DataError, match='x.json is empty'):
        next(read_rows(tmp_path / 'x.json'))


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.sampled_from('de en'.split()), st.sampled_from('abc')), max_size=60),
       st.integers(1, 20), st.integers(0, 9))
def test_a_sample_is_drawn_evenly(pairs, limit, seed):
    items = [SimpleNamespace(language=language, subject=subject, id=str(i))
             for i, (language, subject) in enumerate(pairs)]
    drawn = draw(items, limit, seed)
    assert [i.id for i in drawn] == sorted((i.id for i in drawn), key=int)      # their own order
    for language in 'de', 'en':
        there, taken = ({s: sum(i.language == language and i.subject == s for i in some)
                         for s in 'abc'} for some in (items, drawn))
        assert sum(taken.values()) == min(limit, sum(there.values()))
        most = max(taken.values())
        assert all(taken[s] >= min(most - 1, there[s]) for s in 'abc')
    again = draw(items[::-1], limit, seed)
    assert {i.id for i in again} == {i.id for i in drawn}       # whatever the order of files
    assert {i.id for i in draw(items, limit + 3, seed)} >= {i.id for i in drawn}
    assert draw(items, None, seed) == items


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 16), min_size=1, max_size=30), st.integers(0, 1000),
       st.integers(1, 5))
def test_packing_holds_every_sequence_once_in_a_multiple_of_rows(lengths, seed, multiple):
    rng = np.random.default_rng(seed)
    sequences = [(rng.integers(1, 99, n), rng.integers(0, 2, n)) for n in lengths]
    packed = packing.pack(sequences, 16)
    assert len(packed.tokens) >= sum(lengths) / 16
    assert len(packed.tokens) <= 1 + 2 * sum(lengths) // 16  # first fit wastes less than half
    for i, (tokens, loss_mask) in enumerate(sequences):
        row, at = np.nonzero(packed.owner == i)
        targets = np.append(np.where(loss_mask[1:], tokens[1:], -100), -100)
        for name, expected in (('tokens', tokens), ('positions', np.arange(len(tokens))),
                               ('ends', at[-1] + 1), ('targets', targets)):
            assert (getattr(packed, name)[row, at] == expected).all(), name
    padding = packed.owner < 0
    assert (packed.targets[padding] == -100).all()
    assert (packed.ends > np.arange(16)).all()
    many, n = packing.pack(sequences, 16, multiple), len(packed.tokens)
    assert len(many.tokens) == -(-n // multiple) * multiple
    assert all((many[:n] == few).all() for few, many in zip(
        vars(packed).values(), vars(many).values(), strict=True))
    assert (many.owner[n:] == -1).all() and (many.targets[n:] < 0).all()
    assert (many.ends[n:] == np.arange(16) + 1).all()


def test_each_epoch_has_an_order_of_its_own():
    orders = [packing.epoch_order(50, e, 3).tolist() for e in (0, 1, 0)]
    assert orders[0] == orders[2] != orders[1] and sorted(orders[1]) == list(range(50))
