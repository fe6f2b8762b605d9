"""tokenizers and chat templates"""

import shutil

import pytest
from common import SHARED, needs_shared

from data import DataError, chat
from data.tokenizer import load_tokenizer

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
    ids, loss_mask = chat.encode_conversation(MESSAGES, tokenizer, template)
    shown = ''
    for flag, group in groupby_flag(ids, loss_mask):
        piece = tokenizer.decode(group, start=not shown)
        shown += '{' + piece + '}' if flag else piece
    assert shown == expected
    assert ids.count(tokenizer.bos_id) == 1
    assert chat.encode_conversation(MESSAGES, tokenizer, template, add_bos=False)[0] == ids[1:]


def groupby_flag(ids, loss_mask):
    start = 0
    for i in range(1, len(ids) + 1):
        if i == len(ids) or loss_mask[i] != loss_mask[start]:
            yield loss_mask[start], ids[start:i]
            start = i


def test_prompt_tokens_do_not_depend_on_the_answer(tokenizers):
    # an answer that begins with a newline must not melt into the prompt's last newline
    for answer in ('\n\nblue', ' blue', 'blue'):
        ids, loss_mask = chat.encode_conversation(
            [{'role': 'user', 'content': 'sky'}, {'role': 'assistant', 'content': answer}],
            tokenizers['gemma'])
        prompt = [i for i, flag in zip(ids, loss_mask, strict=True) if not flag]
        assert prompt == [tokenizers['gemma'].bos_id] + tokenizers['gemma'].encode(
            '<|user|>\nsky\n<|assistant|>\n')


def test_template_needs_its_control_tokens(tokenizers):
    with pytest.raises(DataError, match="needs <start_of_turn>, .*template = 'tulu'"):
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
