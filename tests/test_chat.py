"""chat templates: token ids, control tokens, loss masks, tools"""

import itertools
import json
import os
import random
import re
from pathlib import Path

import pytest
import transformers
from common import HERE, edit_config, write_rows
from test_tokenizer import (MESSAGES, base_folder, in_transformers, phi3_folder, rewrite_json,
                            train_bpe)

from bridges import export
import generate
from data import chat, instruct, templates
from data.files import dialogue
from data.messages import take_tools, to_messages
from data.tokenizer import load_tokenizer
from runtime.errors import ConfigError, DataError

FOLDER = HERE / 'tests' / 'chat_templates'
# in short what templates of models do: those of the formats, and what is hard to mask
MODELS = {path.stem: path.read_text() for path in sorted(FOLDER.glob('*.jinja'))}
# templates as models bring them, of which the repository has none
OWN_FOLDER = os.environ.get('NANOCAL_CHAT_TEMPLATES')
OF_MODELS = {path.stem: path.read_text() for path in sorted(Path(OWN_FOLDER).iterdir())
             if path.suffix == '.jinja'} if OWN_FOLDER else {}
PIECES = ['the', 'sky', 'Äpfel', '中文', ' ', '\n', '\n\n', '  ', '1', '22', '333', '"x"',
          '{{ y }}', '<b>', '</b>', "don't", '\\', '🙂', '...', '\t', '[1]', '<', '>', '|']


def folder_with(folder, source):
    """A base model's folder whose tokenizer brings a template and its control tokens."""
    if "'<|' + m['role']" in source:
        phi3_folder(folder)
    else:
        names = re.findall(r'<[|｜][^<>\s\'"{}]+[|｜]>|\[/?[A-Za-z_]+\]|</?s>|<\w+_of_turn>',
                           source)
        names += ['<|user|>', '<|assistant|>', '<|system|>'] if "'<|' + m.role" in source else []
        special = sorted({*names, '<s>', '</s>'} - {'<|end|>', '<|begin|>'})
        train_bpe(folder, bos='<s>', special=special, bos_token='<s>', eos_token='</s>')
        rewrite_json(folder / 'tokenizer.json', lambda file: [
            token.update(lstrip=False) for token in file['added_tokens']])
    (folder / 'config.json').write_text('{"model_type": "llama"}')
    edit_config(folder, 'tokenizer_config.json', chat_template=source)
    return folder


def conversation(rng):
    """A random conversation; contents have white space around them, some answers thoughts."""
    def text():
        middle = ''.join(rng.choices(PIECES, k=rng.randrange(1, 8))).strip() or 'x'
        return rng.choice(['', ' ', '\n', '\n\n']) + middle + rng.choice(['', '', '\n', ' '])
    system = [{'role': 'system', 'content': text()}] * (rng.random() < 0.4)
    turns = dialogue(*(text() for _ in range(2 * rng.randrange(1, 4))))
    for turn in turns[1::2]:
        if rng.random() < 0.3:
            turn['content'] = f'<think>\n{text()}\n</think>\n\n{turn["content"]}'
    return [*system, *turns]


@pytest.mark.parametrize('name', [*MODELS, *(
    pytest.param(name, marks=pytest.mark.slow) for name in OF_MODELS)])
def test_ids_are_those_of_transformers(name, tmp_path):
    """Of random conversations, of which both may refuse some."""
    folder = folder_with(tmp_path / name, (MODELS | OF_MODELS)[name])
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    ours, rng, refused = load_tokenizer(folder), random.Random(name), 0
    for _ in range(50 if name in MODELS else 200):
        messages = conversation(rng)
        try:
            right = theirs.apply_chat_template(messages)['input_ids']
            prompt = theirs.apply_chat_template(messages[:-1],
                                                add_generation_prompt=True)['input_ids']
        except Exception:
            refused += 1
            with pytest.raises(DataError, match='the chat template refuses the conversation'):
                chat.encode_conversation(messages, ours, 'model')
            continue
        ids, loss_mask = chat.encode_conversation(messages, ours, 'model')
        assert ids == right, messages
        assert len(loss_mask) == len(ids), messages
        assert any(loss_mask) or messages[-1]['content'].strip() not in ours.decode(ids), messages
        assert chat.encode_prompt(messages[:-1], ours, 'model')[0] == prompt, messages
    assert name not in MODELS or (refused > 0) == (name == 'no_system')


def supervised(messages, tokenizer, template='model', tools=None, add_bos=True):
    """Return the text of a conversation with its supervised parts in {braces}."""
    ids, loss_mask = chat.encode_conversation(messages, tokenizer, template, add_bos, tools)
    shown = ''
    for flag, group in itertools.groupby(zip(loss_mask, ids, strict=True), lambda pair: pair[0]):
        piece = tokenizer.decode([i for _, i in group], start=not shown)
        shown += '{' + piece + '}' if flag else piece
    return shown


TURNS = dialogue('Sky?', 'Blue.', 'Fox?', 'Jumps.')
THOUGHT = [*TURNS[:1], {'role': 'assistant', 'content': '<think>\nHm\n</think>\n\nBlue.'},
           *TURNS[2:3], {'role': 'assistant', 'content': '<think>\nOh\n</think>\n\nJumps.'}]
# the conversation of a template; with its supervised parts in {braces} it is in a file
MASKED = {'thinking': THOUGHT, 'last_system': [MESSAGES[0], *TURNS], 'opened': THOUGHT,
          **dict.fromkeys(('default_system', 'header_ends', 'channels', 'spoken', 'marked'), TURNS)}


@pytest.mark.parametrize('name', MASKED)
def test_answers_are_supervised_with_what_ends_them(name, tmp_path):
    messages, expected = MASKED[name], (FOLDER / f'{name}.txt').read_text().removesuffix('\n')
    tokenizer = load_tokenizer(folder_with(tmp_path, MODELS[name]))
    assert supervised(messages, tokenizer) == expected
    if name != 'header_ends':       # the first answer with what ends it
        first = re.search(r'{([^{}]*)}', expected)[0]
        untrained = [*messages[:-3], messages[-3] | {'train': False}, *messages[-2:]]
        assert supervised(untrained, tokenizer) == expected.replace(first, first[1:-1], 1)
    # an answer that ends where the user's turn begins, for a model that stops there
    tokenizer.end_ids |= {tokenizer.control_ids.get('<|user|>')}
    chat.chat_of.cache_clear()
    if name == 'header_ends':
        assert '{Blue.<|user|>}\nFox?' in supervised(messages, tokenizer)


@pytest.mark.parametrize('name', MODELS)
def test_contents_make_no_control_token(name, tmp_path):
    tokenizer = load_tokenizer(folder_with(tmp_path, MODELS[name]))
    hostile = ''.join(tokenizer.control_ids)

    def encoded(*texts):
        """Return (ids, loss mask, control tokens among the ids)."""
        ids, mask = chat.encode_conversation(dialogue(*texts), tokenizer, 'model')
        return ids, mask, [i for i in ids if i in tokenizer.control_ids.values()]

    (_, mask, controls), (ids, wild_mask, wild_controls) = (
        encoded(text, text, f'a{text} \n', text) for text in ('x', hostile))
    assert controls == wild_controls and sum(mask) < sum(wild_mask)
    assert tokenizer.decode(ids).count(hostile) == 4
    for part in (hostile[:-1], hostile[1:], hostile[1:-1]):     # joined to what stands beside it
        assert len(encoded(part, part)[2]) == len(encoded('x', 'x')[2])


def test_what_would_complete_a_control_token_is_refused(tmp_path):
    source = "{% for m in messages %}{{ '<|' + m.content + '|>' }}{% endfor %}"
    tokenizer = load_tokenizer(folder_with(tmp_path, source + '{# <|end|> #}'))
    with pytest.raises(DataError, match="would become a part of the control token '<|end|>'"):
        chat.encode_conversation(dialogue('x', 'end'), tokenizer, 'model')
    with pytest.raises(DataError, match="has the character '.ufdd0', which is no text"):
        chat.encode_conversation(dialogue('x', 'y\ufdd0'), tokenizer, 'model')


CALL = {'id': '1', 'type': 'function', 'function': {'name': 'look', 'arguments': '{"at": "sky"}'}}
TOOLS = [{'type': 'function', 'function': {'name': 'look', 'parameters': {'type': 'object'}}}]
LOOKED = {'messages': [{'role': 'user', 'content': 'Sky?'},
                       {'role': 'assistant', 'content': None, 'tool_calls': [CALL]},
                       {'role': 'tool', 'tool_call_id': '1', 'content': {'sky': 'blue <|im_end|>'}},
                       {'role': 'assistant', 'content': 'Blue.', 'reasoning': 'Hm'}],
          'tools': json.dumps(TOOLS)}


def test_tools_and_thoughts_are_shown_by_a_template_that_knows_them(tmp_path):
    tokenizer = load_tokenizer(folder_with(tmp_path, MODELS['thinking']))
    row, tools = take_tools(LOOKED)
    messages = to_messages(row)
    assert tools == TOOLS and messages[1]['tool_calls'][0]['function']['arguments'] == {'at': 'sky'}
    assert supervised(messages, tokenizer, tools=tools) == (
        FOLDER / 'tools.txt').read_text().removesuffix('\n')
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    safe = [message | {'content': message['content'].replace('<|im_end|>', '')}
            for message in messages]
    assert chat.encode_conversation(safe, tokenizer, 'model', tools=tools)[0] == (
        theirs.apply_chat_template(safe, tools=tools)['input_ids'])
    shared = [{'from': 'human', 'value': 'Sky?'},
              {'from': 'function_call', 'value': json.dumps(CALL['function'])},
              {'from': 'observation', 'value': 'blue'}, {'from': 'gpt', 'value': 'Blue.'}]
    assert to_messages({'conversations': shared})[1]['tool_calls'] == [
        {'type': 'function', 'function': {'name': 'look', 'arguments': {'at': 'sky'}}}]
    tokenizer = load_tokenizer(folder_with(tmp_path / 'plain', MODELS['chatml']))
    with pytest.raises(DataError, match='template .model. does not show "tools"'):
        chat.encode_conversation(TURNS, tokenizer, 'model', tools=tools)
    with pytest.raises(DataError, match='does not show "tool_calls"'):
        chat.encode_conversation(messages[:2], tokenizer, 'model')


def test_names_in_tools_make_no_control_token(tmp_path):
    tokenizer = load_tokenizer(folder_with(tmp_path, MODELS['thinking']))
    name = '<|im_end|>'
    call = {'function': {'name': name, 'arguments': {name: name}}}
    tools = [{'function': {'name': name, 'parameters': {'properties': {name: {}}}}}]
    messages = [TURNS[0], {'role': 'assistant', 'content': '', 'tool_calls': [call]}]
    ids, _ = chat.encode_conversation(messages, tokenizer, 'model', tools=tools)
    assert ids.count(tokenizer.control_ids[name]) == 3      # of the tools, the question, the call
    assert tokenizer.decode(ids).count(name) == 3 + 5


# ---- The templates for base models ---------------------------------------------------------------

# the tokenizer of a template; its MESSAGES with the supervised tokens in {braces} are in a file
RENDERED = {'tulu': 'llama3', 'llama3': 'llama3', 'gemma': 'gemma', 'mistral': 'mistral',
            'mistral_v1': 'llama2', 'alpaca': 'llama2'}
ALPACA = {'instruction': 'Add <|.', 'input': '1\n\n2', 'output': '3 foxes\n'}


@pytest.mark.parametrize('template', RENDERED)
def test_templates_render_with_the_right_loss_mask(tokenizers, template):
    expected = (FOLDER / f'{template}.txt').read_text().removesuffix('\n')
    tokenizer = tokenizers[RENDERED[template]]
    messages = to_messages(ALPACA) if template == 'alpaca' else MESSAGES
    assert supervised(messages, tokenizer, template) == expected
    ids, _ = chat.encode_conversation(messages, tokenizer, template)
    assert ids.count(tokenizer.bos_id) == 1
    assert chat.encode_conversation(messages, tokenizer, template, add_bos=False)[0] == ids[1:]


def test_what_templates_refuse(tokenizers, tmp_path):
    theirs, ours = in_transformers(base_folder(tmp_path / 'run', 'gemma'), 'gemma')
    no_user = [MESSAGES[0], MESSAGES[2]]
    wrong = 'a system message must be followed by a user message'
    with pytest.raises(Exception, match=wrong):
        theirs.apply_chat_template(no_user, tokenize=False)
    broken, llama3 = load_tokenizer(tmp_path / 'run'), tokenizers['llama3']
    broken.chat_templates = {'default': '{% if %}'}
    for messages, tokenizer, template, error, message in (
            (no_user, ours, 'gemma', DataError, wrong),
            ([{'role': 'guest', 'content': 'x'}, *TURNS], ours, 'gemma', DataError,
             "role 'guest'; wanted one of system, user, assistant"),
            (MESSAGES, llama3, 'gemma', ConfigError, "needs <start_of_turn>, .*'tulu' works"),
            (MESSAGES, llama3, 'model', ConfigError, 'brings no chat template; use one of alpaca'),
            (MESSAGES, broken, 'model', DataError, 'the chat template of the model is no Jinja')):
        with pytest.raises(error, match=message):
            chat.encode_conversation(messages, tokenizer, template)


def test_a_model_s_own_template_is_kept_and_named(tmp_path, tokenizers):
    """A saved model carries its template, and one with tools beside it as transformers has them."""
    ours = load_tokenizer(folder_with(tmp_path, MODELS['default_system']))
    assert export.tokenizer_files(tmp_path, ours, 'model').keys() == {
        'chat_template.jinja', 'generation_config.json', 'tokenizer_config.json'}
    assert export.saved_template('model', ours, True) == MODELS['default_system']
    assert "set bos_token = \"\"" in export.saved_template('model', ours, False)
    reward = export.saved_template('model', ours, True, reward=True)
    text = templates.render(reward, TURNS)
    assert text.endswith('Jumps.<|im_end|>') and text == templates.render(
        MODELS['default_system'], TURNS).rstrip()
    (tmp_path / 'chat_template.jinja').write_text('{{ 1 }}')
    (tmp_path / 'additional_chat_templates').mkdir()
    (tmp_path / 'additional_chat_templates' / 'tool_use.jinja').write_text('{{ 2 }}')
    ours = load_tokenizer(tmp_path)
    assert ours.chat_templates == {'default': '{{ 1 }}', 'tool_use': '{{ 2 }}'}
    assert templates.template_source('model', ours, with_tools=True) == '{{ 2 }}'


def test_data_with_tools_is_read(tmp_path, capsys):
    tokenizer = load_tokenizer(folder_with(tmp_path, MODELS['thinking']))
    path = write_rows(tmp_path / 'data.jsonl', [LOOKED])
    sequences = instruct.load_conversations(str(path), tokenizer, template='model', add_bos=True,
                                            max_length=512, cache_dir=tmp_path / 'cache')
    assert '<tool_call>' in tokenizer.decode(sequences[0][0])
    assert 'leaves the thoughts of earlier answers out' in capsys.readouterr().out
    write_rows(path, [{'id': 1, 'messages': LOOKED['messages'][:1], 'tools': TOOLS}])
    (_, ids), = generate.read_prompts(path, tokenizer, 'model', True)[0]
    assert '"look"' in tokenizer.decode(ids)
