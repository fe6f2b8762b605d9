"""tokenizers and chat templates"""

import base64
import gzip
import json
import random
from types import SimpleNamespace

import pytest
import tokenizers
import transformers
from common import CORPUS, SHARED, edit_config, needs_files, sentencepiece_folder, tiktoken_folder
from bridges import export
from data import byte_pairs, chat, sentence_pieces
from data.tokenizer import load_model_tokenizer, load_tokenizer
from runtime.errors import CheckpointError, DataError
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

QWEN_PATTERN = byte_pairs.LLAMA3_PATTERN.replace(r'\p{N}{1,3}', r'\p{N}')
HOSTILE = ('<|eot_id|><|begin_of_text|> <s></s> [INST] x [/INST] <start_of_turn>user\n<end_of_turn>'
           '<bos><eos><pad><unk> <|end_of_text|>')


@pytest.mark.parametrize('kind', ['gemma', 'mistral', 'llama2', 'llama3'])
def test_text_never_makes_a_control_token(tokenizers, kind):
    tokenizer = tokenizers[kind]
    encode, decode = tokenizer.encode, tokenizer.decode
    controls = set(tokenizer.control_ids.values())
    assert {tokenizer.bos_id, tokenizer.eos_id} <= controls
    for start in (True, False):
        ids = encode(HOSTILE, start=start)
        assert not controls & set(ids) and decode(ids).strip() == HOSTILE
    assert not controls & set(encode(''.join(tokenizer.control_ids)))
    # continued text has no extra space
    for first, second in (('user: ', 'blue'), ('The fox\n', 'jumps\n\nover'), ('fox', ' dog'),
                          ('', 'sky')):
        assert decode(encode(first) + encode(second, start=not first)) == first + second
    if kind == 'gemma':     # harmless symbols of its own
        assert len(encode('\n\n')) == len(encode('<b>')) == 1 < len(encode('<start_of_turn>'))


# what tokenizers cut differently if a step is wrong: contractions, runs, digits, other scripts,
# composed and decomposed letters, added tokens, names of special tokens
PARTS = ["'s", "'LL", ' ', '  ', '\t', '\n', '\r\n', '\xa0', '\u3000', 'é', 'e\u0301', 'Å', '中文',
         '한', 'अि', '١', 'Ⅷ', '½', '0', '123', '4567', '😀', '\u200d', '\0', '_', '...', '!!', 'A',
         'Hello', ' world', 'ſ', 'İ', '\ufeff', 'ก็', '<|end|>', '<think>', '</think>',
         'quick brown fox', ' ' * 7, ' ' * 24, ' ' * 25, '<|endoftext|>', '<|im_start|>',
         '<|begin_of_text|>']


def strings(n, seed=0):
    rng = random.Random(seed)
    return [''.join(rng.choices(PARTS, k=rng.randrange(25))) for _ in range(n)] + [
        ''.join(chr(rng.randrange(1, 0x2fff)) for _ in range(rng.randrange(20)))
        for _ in range(n // 10)]


def words_by(pattern):
    return [pre_tokenizers.Split(tokenizers.Regex(pattern), 'isolated'),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]


def train_bpe(folder, steps=(), nfc=False, ignore_merges=False, bos='', special=(), **settings):
    """Write tokenizer.json, by the `tokenizers` library, and tokenizer_config.json beside it."""
    tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = (pre_tokenizers.Sequence(steps) if steps
                               else pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer.decoder = decoders.ByteLevel()
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False,
                                  special_tokens=['<|begin|>', '<|end|>', *special])
    tokenizer.train_from_iterator(CORPUS + ['\n\n'] * 50 + strings(300, seed=1), trainer)
    tokenizer.add_tokens([tokenizers.AddedToken('<think>', normalized=False, lstrip=True)]
                         + [tokenizers.AddedToken(' ' * n, normalized=True) for n in range(2, 25)])
    if bos:
        tokenizer.post_processor = byte_pairs.begin_with(bos, tokenizer.token_to_id(bos))
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / 'tokenizer.json'))
    (folder / 'tokenizer_config.json').write_text(json.dumps(
        {'bos_token': '<|begin|>', 'eos_token': '<|end|>'} | settings))
    return tokenizer


def rewrite_json(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def same_ids(folder, texts):
    """Assert that ours has the ids of AutoTokenizer, in which names of special tokens are text."""
    ours = load_tokenizer(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    first = [] if ours.bos_id is None else [ours.bos_id]
    right = theirs(texts, split_special_tokens=True)['input_ids']
    for text, ids in zip(texts, right, strict=True):
        assert first + ours.encode(text) == ids, text
        own = ids[len(first):]      # our decode puts no space between BOS and the text
        assert ours.decode(own) == theirs.decode(own, clean_up_tokenization_spaces=False), text
    assert not {*ours.control_ids.values()} & {i for ids in right for i in ids[len(first):]}
    return ours, theirs


KINDS = {'gpt2': {}, 'nfc': {'nfc': True}, 'ignore_merges': {'ignore_merges': True},
         'words': {'steps': words_by(byte_pairs.LLAMA3_PATTERN), 'bos': '<|begin|>'}}


@pytest.mark.parametrize('kind', KINDS)
def test_a_tokenizer_json_has_the_ids_of_transformers(kind, tmp_path):
    reference = train_bpe(tmp_path, **KINDS[kind])
    rewrite_json(tmp_path / 'tokenizer.json', lambda file: file.update(     # both without effect
        truncation={'max_length': 3, 'strategy': 'LongestFirst', 'stride': 0, 'direction': 'Right'},
        padding={'strategy': {'Fixed': 9}, 'direction': 'Left', 'pad_to_multiple_of': None,
                 'pad_id': 0, 'pad_type_id': 0, 'pad_token': 'x'}))
    tokenizer, _ = same_ids(tmp_path, [*strings(300), 'a' * 6_000 + ' ' * 6_000])
    assert tokenizer.bos_id == (0 if kind == 'words' else None)
    assert tokenizer.eos_id == reference.token_to_id('<|end|>')
    assert tokenizer.control_ids == {'<|begin|>': 0, '<|end|>': 1}
    assert tokenizer.n_vocab == reference.get_vocab_size()


def sentencepiece_json(folder, kind, spaces):
    """Write a tokenizer.json of sentencepiece pieces as in Llama 2's files, beside a .model."""
    ours = load_tokenizer(sentencepiece_folder(folder, kind))
    content = sentence_pieces.sentencepiece_json(ours)
    (folder / 'tokenizer_config.json').write_text('{"eos_token": "</s>"}')
    library = tokenizers.Tokenizer.from_str(json.dumps(content))
    if spaces == 'Prepend':
        library.normalizer = normalizers.Sequence([
            normalizers.Prepend('\u2581'), normalizers.Replace(' ', '\u2581')])
    elif spaces == 'Metaspace':
        library.normalizer = None
        library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme='first', split=False)
    library.save(str(folder / 'tokenizer.json'))
    if spaces != 'ours':
        rewrite_json(folder / 'tokenizer.json', lambda file: [
            token.update(normalized=False) for token in file['added_tokens']])
    return ours


@pytest.mark.parametrize('spaces', ['Prepend', 'Metaspace', 'ours'])
def test_a_tokenizer_json_of_sentencepiece_pieces(spaces, tmp_path):
    model = sentencepiece_json(tmp_path, 'mistral', spaces)
    (tmp_path / 'tokenizer.model').unlink()
    texts = [text for text in [*CORPUS[:6], *strings(500)] if text.strip() == text and text]
    ours, theirs = same_ids(tmp_path, texts)
    assert ours.control_ids == model.control_ids
    inst = ours.control_ids['[INST]']
    assert ours.encode('fox') == model.encode('fox') != ours.encode('fox', start=False)
    assert ours.encode('fox', start=False) == model.encode('fox', start=False)
    assert (inst in ours.fresh_after) == (spaces == 'Prepend')
    assert [inst, *ours.encode('fox', start=inst in ours.fresh_after)] == theirs(
        '[INST]fox', add_special_tokens=False)['input_ids']


def test_vocab_and_merges_are_read_as_by_transformers(tmp_path):
    reference = train_bpe(tmp_path, special=['<s>', '<pad>'], add_bos_token=True,
                          **dict.fromkeys(('bos_token', 'eos_token'), '<|end|>'))
    (tmp_path / 'tokenizer.json').unlink()
    reference.model.save(str(tmp_path))         # vocab.json and merges.txt, as OPT has them
    (tmp_path / 'config.json').write_text('{"model_type": "opt"}')
    tokenizer, _ = same_ids(tmp_path, strings(300))
    assert tokenizer.bos_id == tokenizer.eos_id == reference.token_to_id('<|end|>')
    assert tokenizer.control_ids.keys() == {'<s>', '<pad>', '<|begin|>', '<|end|>'}
    assert export.tokenizer_files(tmp_path, tokenizer) == {}    # transformers reads these files
    (tmp_path / 'added_tokens.json').write_text(json.dumps({'<|more|>': tokenizer.n_vocab}))
    assert load_tokenizer(tmp_path).control_ids['<|more|>'] == tokenizer.n_vocab
    (tmp_path / 'merges.txt').unlink()
    with pytest.raises(DataError, match='vocab.json needs merges.txt beside it'):
        load_tokenizer(tmp_path)


def test_the_unigram_model_of_t5(tmp_path):
    tokenizer = load_tokenizer(sentencepiece_folder(tmp_path, 't5', strings(300, seed=1)))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (None, 1)
    assert tokenizer.control_ids == {'<pad>': 0, '</s>': 1}
    assert not {0, 1} & {*tokenizer.encode('</s><pad>')}
    assert tokenizer.decode(tokenizer.encode('The quick\n fox')) == 'The quick fox'


def phi3_folder(folder):
    """Llama 2's tokenizer with added tokens outside tokenizer.model, as Phi-3's files have them."""
    n = sentencepiece_json(folder, 'llama2', 'Prepend').n_vocab
    added = json.loads((folder / 'tokenizer.json').read_text())['added_tokens']
    added += [added[0] | {'id': n + i, 'content': name, 'rstrip': i > 0} for i, name in enumerate((
        '<|endoftext|>', '<|assistant|>', '<|end|>', '<|system|>', '<|user|>'))]
    edit_config(folder, 'tokenizer.json', added_tokens=added)
    (folder / 'tokenizer_config.json').write_text(json.dumps({
        'add_bos_token': False, 'eos_token': '<|endoftext|>', 'added_tokens_decoder': {
            token.pop('id'): token for token in added}}))
    (folder / 'config.json').write_text('{"model_type": "phi3"}')
    return folder


def test_tokens_outside_of_a_sentencepiece_model(tmp_path):
    n = 400
    ours = load_tokenizer(phi3_folder(tmp_path))
    assert (ours.bos_id, ours.eos_id, ours.n_vocab) == (None, n, n + 5)
    assert ours.decode([n + 4, *ours.encode('a b'), n + 2, n + 9]) == '<|user|>a b<|end|>'
    assert ours.control_ids['<|user|>'] == n + 4
    assert not {*ours.control_ids.values()} & {*ours.encode('<|user|><|end|><s>')}
    plain = load_tokenizer(sentencepiece_folder(tmp_path / 'plain', 'llama2'))
    assert ours.fingerprint != plain.fingerprint    # other BOS, other EOS
    rewrite_json(tmp_path / 'tokenizer_config.json', lambda file: file.pop('added_tokens_decoder'))
    saved = load_tokenizer(tmp_path)    # by transformers 5
    assert (saved.control_ids, saved.strips) == (ours.control_ids, ours.strips)
    small = load_model_tokenizer(tmp_path, SimpleNamespace(vocab_size=n + 1, eos_token_id=[n, 7]))
    assert '<|endoftext|>' in small.control_ids and '<|user|>' not in small.control_ids
    assert small.n_vocab == n + 1 and small.end_ids == {n, 7}
    with pytest.raises(CheckpointError, match='the tokenizer has 405 tokens, but vocab_size'):
        load_model_tokenizer(tmp_path, SimpleNamespace(vocab_size=n))       # without EOS
    (tmp_path / 'tokenizer.json').unlink()
    (tmp_path / 'tokenizer_config.json').unlink()
    (tmp_path / 'added_tokens.json').write_text(f'{{"<|user|>": {n}}}')
    ours = load_tokenizer(tmp_path)
    assert (ours.control_ids['<|user|>'], ours.bos_id, ours.strips) == (n, 1, {})
    (tmp_path / 'added_tokens.json').write_text(f'{{"sky": {n}}}')
    with pytest.raises(DataError, match="add words, such as 'sky', which only tokenizer.json"):
        load_tokenizer(tmp_path)


def test_a_piece_for_any_text_can_be_named_as_a_control_token(tmp_path):    # as in Yi's chat models
    b, = load_tokenizer(sentencepiece_folder(tmp_path, 'gemma')).encode('<b>')
    (tmp_path / 'special_tokens_map.json').write_text('{"eos_token": "<b>"}')
    with pytest.raises(DataError, match='no EOS token <b>; see tokenizer_config'):
        load_tokenizer(tmp_path)
    (tmp_path / 'added_tokens.json').write_text(f'{{"<b>": {b}}}')
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eos_id == b and b not in tokenizer.encode('<b>')


def test_tekken_has_the_ids_of_its_pieces_here_and_in_transformers(tmp_path):
    reference = train_bpe(tmp_path, words_by(QWEN_PATTERN), ignore_merges=True)
    to_byte = {char: byte for byte, char in byte_pairs.BYTE_CHARS.items()}
    pieces = {bytes(map(to_byte.get, name)): i for name, i in sorted(
        json.loads(reference.to_str())['model']['vocab'].items(), key=lambda item: item[1])
        if name not in ('<|begin|>', '<|end|>')} | {b'zqxj': 'a piece that no merge makes'}
    vocab = [{'rank': rank, 'token_bytes': base64.b64encode(piece).decode(), 'token_str': None}
             for rank, piece in enumerate([*pieces, b'never one'])]
    names = ['<unk>', '<s>', '</s>', '[INST]', '[/INST]', '[SYSTEM_PROMPT]', '[/SYSTEM_PROMPT]']
    content = {'config': {'pattern': QWEN_PATTERN, 'default_num_special_tokens': 1000,
                          'default_vocab_size': 1000 + len(pieces), 'version': 'v7'},
               'vocab': vocab, 'special_tokens': [
                   {'rank': i, 'token_str': name, 'is_control': True}
                   for i, name in enumerate(names)]}
    (tmp_path / 'tokenizer.json').unlink()
    (tmp_path / 'tekken.json').write_text(json.dumps(content))
    theirs, tokenizer = in_transformers(tmp_path, 'tekken')
    ranks = {i: 1000 + rank for rank, i in enumerate(pieces.values())}
    for text in strings(300):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert theirs(text, split_special_tokens=True)['input_ids'] == [1, *ids]
        if not any(token in text for token in ('<|end|>', '<think>', '  ')):
            assert ids == [ranks[i] for i in reference.encode(text).ids], text
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    assert tokenizer.encode('zqxj') == [tokenizer.n_vocab - 1] == [999 + len(pieces)]
    (tmp_path / 'tokenizer.json').unlink()
    for wrong, message in (({'special_tokens': names}, 'not a tekken.json: TypeError'),
                           ({'vocab': vocab[5:]}, 'are not [0-9]+ in a row from 0')):
        (tmp_path / 'tekken.json').write_text(json.dumps(content | wrong))
        with pytest.raises(DataError, match=f'tekken.json.*{message}'):
            load_tokenizer(tmp_path)


def test_a_tokenizer_that_is_missing_damaged_or_not_supported_is_refused_by_name(tmp_path):
    for name, content, message in (
            ('', '', 'has no tokenizer: none of tokenizer.model'),
            ('tokenizer.json', '{}', 'tokenizer.json: the tokenizers library cannot read'),
            ('tokenizer.model', '\0\1garbage', 'neither a tiktoken nor a sentencepiece'),
            ('tokenizer.model', 'IQ== 0\nIg== 1\n', '2 ranks; only the Llama 3 file')):
        if name:
            (tmp_path / name).write_text(content)
        with pytest.raises(DataError, match=message):
            load_tokenizer(tmp_path)
    train_bpe(tmp_path / 'json', bos='<|begin|>')
    path = tmp_path / 'json' / 'tokenizer.json'
    written = path.read_text()
    endless = {'type': 'Split', 'pattern': {'Regex': '(a+)+b'}, 'behavior': 'Isolated',
               'invert': False}
    for change, message in (
            (lambda f: f['model'].update(dropout=0.1), 'model.dropout is not supported'),
            (lambda f: f['pre_tokenizer'].update(add_prefix_space=True), 'add_prefix_space'),
            (lambda f: f.update(pre_tokenizer=endless), 'or encode a text with it')):
        rewrite_json(path, change)
        with pytest.raises(DataError, match=f'(?s)tokenizer.json: .*{message}'):
            load_tokenizer(tmp_path / 'json').encode('a' * 60)
        path.write_text(written)


def test_bos_and_eos_of_a_tokenizer_json(tmp_path):
    train_bpe(tmp_path, bos='<|begin|>', eos_token=None)
    rewrite_json(tmp_path / 'tokenizer.json', lambda file: [
        token.update(special=False) for token in file['added_tokens']])
    with pytest.raises(DataError, match='tokenizer_config.json must have eos_token'):
        load_tokenizer(tmp_path)
    (tmp_path / 'special_tokens_map.json').write_text('{"eos_token": {"content": "<think>"}}')
    (tmp_path / 'tokenizer_config.json').unlink()
    assert load_tokenizer(tmp_path).control_ids == {'<|begin|>': 0, '<think>': 400}
    (tmp_path / 'special_tokens_map.json').unlink()
    (tmp_path / 'config.json').write_text('{"eos_token_id": [1, 2]}')
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)
    assert tokenizer.control_ids == {'<|begin|>': 0, '<|end|>': 1}      # though not special there
    assert not {0, 1} & {*tokenizer.encode('<|begin|> and <|end|>')}


MESSAGES = [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': 'The sky?'},
            {'role': 'assistant', 'content': 'It is blue.'}, {'role': 'user', 'content': 'fox <|'},
            {'role': 'assistant', 'content': '\njumps'}]


def base_folder(folder, kind):
    """A base model's folder with the tokenizer of a family, and the config.json it needs."""
    if kind in ('llama3.json', 'qwen'):
        pattern, bos = (QWEN_PATTERN, '') if kind == 'qwen' else (
            byte_pairs.LLAMA3_PATTERN, '<|begin|>')
        train_bpe(folder, words_by(pattern), nfc=not bos, bos=bos,
                  chat_template='of the base model',
                  tokenizer_class='PreTrainedTokenizerFast' if bos else 'Qwen2Tokenizer',
                  special=['<|im_start|>', '<|im_end|>', '<|start_header_id|>', '<|end_header_id|>',
                           '<|eot_id|>', '<|endoftext|>'])
    elif kind == 'llama3':
        tiktoken_folder(folder)
    else:
        sentencepiece_folder(folder, kind)
    family = {'qwen': 'qwen2', 'gemma': 'gemma2', 'mistral': 'mistral'}.get(kind, 'llama')
    (folder / 'config.json').write_text(json.dumps({'model_type': family}))
    return folder


def in_transformers(folder, template=None, add_bos=True):
    """Write what a run writes into a base model's folder; return their tokenizer and ours."""
    ours = load_tokenizer(folder)
    for name, content in export.tokenizer_files(folder, ours, template, add_bos).items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return transformers.AutoTokenizer.from_pretrained(folder), ours


@pytest.mark.slow
@pytest.mark.parametrize('kind, templates', [
    ('llama3', ['tulu']), ('llama3.json', ['tulu', 'mistral_v1', 'llama3']), ('qwen', ['chatml']),
    ('gemma', ['tulu', 'gemma']), ('mistral', ['tulu', 'mistral']),
    ('llama2', ['mistral_v1', 'alpaca'])])
def test_transformers_reads_what_a_run_saves(kind, templates, tmp_path):
    theirs, ours = in_transformers(base_folder(tmp_path / 'run', kind))
    assert (theirs.chat_template == 'of the base model') == (kind in ('llama3.json', 'qwen'))
    bos = [] if kind == 'qwen' else [ours.bos_id]
    assert (theirs.eos_token_id, ours.bos_id) == (ours.eos_id, *(bos or [None]))
    for text in [' lead', 'a\n\n b', '<0x0A>', '<unk>', '<b>', '\u2581', *strings(100),
                 *CORPUS[:6]]:
        if not any(name in text for name in ours.control_ids):
            assert theirs(text)['input_ids'] == bos + ours.encode(text), text
            assert theirs.decode(ours.encode(text)) == ours.decode(ours.encode(text))
    assert load_tokenizer(tmp_path / 'run').fingerprint == ours.fingerprint
    if kind in ('gemma', 'mistral', 'llama2'):      # llama.cpp reads this key, too
        assert theirs.add_prefix_space is (kind != 'gemma')
    for template in templates:
        for add_bos in (True, False) if template in ('gemma', 'mistral') else (kind != 'qwen',):
            folder = base_folder(tmp_path / f'{template}-{add_bos}', kind)
            theirs, ours = in_transformers(folder, template, add_bos)
            for messages in CHATS[3:] if template == 'alpaca' else CHATS:
                assert_rendered(messages, theirs, ours, template, add_bos)


def assert_rendered(messages, theirs, ours, template, add_bos):
    ids, loss_mask = chat.encode_conversation(messages, ours, template, add_bos)
    assert theirs.apply_chat_template(messages, tokenize=False) == ours.decode(
        ids, start=True), messages
    turns = [i for i, message in enumerate(messages) if message['role'] == 'assistant']
    answers = [i for i in range(1, len(ids)) if loss_mask[i] > loss_mask[i - 1]]
    for turn, answer in zip(turns, answers, strict=True):
        asked = {'conversation': messages[:turn], 'add_generation_prompt': True}
        assert theirs.apply_chat_template(**asked, tokenize=False) == ours.decode(ids[:answer])
        if turn == turns[0]:
            assert theirs.apply_chat_template(**asked)['input_ids'] == ids[:answer]


@pytest.mark.slow
@pytest.mark.parametrize('file, eos', [
    ('llama2_tokenizer.model', ''), ('llama3_tokenizer.model', ''),
    ('mistral_mistral_instruct_tokenizer_240323.model.v3', ''),
    ('llama3_tokenizer.json.gz', '<|end_of_text|>'),
    *((f'{name}_tokenizer.json.gz', '<|endoftext|>') for name in ('qwen3', 'neox', 'olmo2'))])
def test_real_tokenizers_have_the_ids_of_transformers(file, eos, tmp_path):
    needs_files(f'tokenizers/{file}', 'datasets/wikitext2/wiki.test.txt.gz')
    content = (SHARED / 'tokenizers' / file).read_bytes()
    with gzip.open(SHARED / 'datasets' / 'wikitext2' / 'wiki.test.txt.gz', 'rt') as lines:
        texts = strings(500) + lines.readlines()[::16]
    if eos:
        (tmp_path / 'tokenizer.json').write_bytes(gzip.decompress(content))
        (tmp_path / 'tokenizer_config.json').write_text(json.dumps(
            {'eos_token': eos, 'tokenizer_class': 'PreTrainedTokenizerFast'}))
        same_ids(tmp_path, texts)
        return
    (tmp_path / 'tokenizer.model').write_bytes(content)
    (tmp_path / 'config.json').write_text('{"model_type": "llama"}')
    template = 'llama3' if 'llama3' in file else 'mistral' if 'v3' in file else 'mistral_v1'
    theirs, ours = in_transformers(tmp_path, template)
    for messages in CHATS:
        assert theirs.apply_chat_template(messages)['input_ids'] == chat.encode_conversation(
            messages, ours, template)[0], messages
    texts = [text for text in texts if not any(name in text for name in ours.control_ids)]
    for text, ids in zip(texts, theirs(texts)['input_ids'], strict=True):
        assert ids == [ours.bos_id, *ours.encode(text)], text
    (tmp_path / 'tokenizer.model').unlink()     # the saved tokenizer.json alone
    saved = load_tokenizer(tmp_path)
    assert saved.control_ids == ours.control_ids and saved.bos_id == ours.bos_id
    assert [*map(saved.encode, texts)] == [*map(ours.encode, texts)]
    assert not set(saved.encode(HOSTILE)) & set(saved.control_ids.values())


CHATS = [MESSAGES, MESSAGES[1:], MESSAGES[:3], MESSAGES[1:3],
         [{'role': 'user', 'content': ' \n Äpfel {{ x }} \n'}, MESSAGES[2]],
         [{'role': 'user', 'content': 'Add.\n\n1 2', 'input': '1 2'}, MESSAGES[2]]]


def test_generation_stops_at_the_end_of_a_turn(tmp_path):
    from transformers import GenerationConfig
    qwen, gemma = (base_folder(tmp_path / kind, kind) for kind in ('qwen', 'gemma'))
    GenerationConfig(eos_token_id=[1, 9], max_new_tokens=7).save_pretrained(qwen)
    _, ours = in_transformers(qwen, 'chatml', False)
    found = GenerationConfig.from_pretrained(qwen)
    assert found.eos_token_id == [1, 9, ours.control_ids['<|im_end|>']]
    assert found.max_new_tokens == 7
    in_transformers(gemma, 'tulu')
    assert not (gemma / 'generation_config.json').exists()
