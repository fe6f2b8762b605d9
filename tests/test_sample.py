"""sample.py"""

import copy
import io
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
import sample
from common import HERE, reference_model, rewrite, sentencepiece_folder, whole_rows
from data.chat import encode_conversation
from data.tokenizer import load_tokenizer
from runtime import checkpoint
from runtime.errors import CheckpointError, ConfigError, DataError


def drawn(model, ids, stop=(), seed=0, **settings):
    cfg = replace(sample.SampleConfig(max_tokens=24), **settings)
    return [*sample.generate(model, ids, stop, cfg, torch.Generator().manual_seed(seed))]


@pytest.mark.parametrize('name', ['llama3', 'mistral_window', 'gemma2', 'qwen3', 'neox'])
def test_greedy_tokens_are_those_of_transformers(name, tmp_path):
    reference = reference_model(name, tmp_path, use_cache=True)
    model = checkpoint.load(tmp_path).eval()
    for seed, stop in ((0, None), (1, None), (1, 5)):
        ids = np.random.default_rng(seed).integers(3, 211, 9).tolist()
        if stop:    # the fifth token of what was generated before ends it
            stop = drawn(model, ids)[stop][0]
        out = reference.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=24,
                                 eos_token_id=stop, pad_token_id=0)[0, 9:].tolist()
        pairs = drawn(model, ids, {stop})
        assert [token for token, _ in pairs] == out and (stop or len(out) == 24)
        # the probabilities are those of transformers, soft-caps included
        whole = torch.tensor([ids + out])
        probs = reference(whole).logits.double().softmax(-1)[0, 8:-1].detach()
        assert [p for _, p in pairs] == pytest.approx(
            probs[range(len(out)), out].tolist(), abs=1e-5)


def test_cap_and_temperature_of_the_model(tmp_path):
    """`nanocal` in config.json: logits = cap * tanh(hidden @ head.T / (temperature * cap))."""
    reference = reference_model('llama', tmp_path)
    content = json.loads((tmp_path / 'config.json').read_text())
    content['nanocal'] = {'softcap': 2.0, 'temperature': 3.0}
    (tmp_path / 'config.json').write_text(json.dumps(content))
    pairs = drawn(checkpoint.load(tmp_path).eval(), [5, 6, 7], max_tokens=6)
    whole = torch.tensor([[5, 6, 7, *(token for token, _ in pairs)]])
    logits = 2 * torch.tanh(reference(whole).logits.double() / 6)
    probs = logits.softmax(-1)[0, 2:-1].detach()
    assert [p for _, p in pairs] == pytest.approx(probs.max(-1).values.tolist(), abs=1e-5)


def test_top_p_keeps_the_fewest_tokens():
    for seed, top_p in enumerate((0.001, 0.3, 0.5, 0.9, 0.999, 1.0)):
        probs = np.random.default_rng(seed).dirichlet(np.full(50, 0.3))
        right, mass = np.zeros(50), 0.0
        for i in np.argsort(-probs, kind='stable'):
            if mass < top_p:
                right[i] = probs[i]
            mass += probs[i]
        assert np.array_equal(sample.keep_top_p(torch.tensor(probs), top_p).numpy(), right)
    even = torch.tensor([0.25] * 4, dtype=torch.float64)
    assert sample.keep_top_p(even, 0.5).tolist() == [0.25, 0.25, 0, 0]


def test_tokens_follow_the_distribution_and_the_seed(tmp_path):
    reference_model('llama', tmp_path)
    model = checkpoint.load(tmp_path).eval()
    ids = torch.tensor([[5, 6, 7]])
    logits = model.logits(model(ids, *whole_rows(ids))[0, -1]).double().detach()
    first = [drawn(model, [5, 6, 7], seed=seed, max_tokens=1, temperature=2.0, top_p=0.8)[0]
             for seed in range(400)]
    expected = sample.keep_top_p((logits / 2).softmax(0), 0.8)
    expected /= expected.sum()
    counts = np.bincount([token for token, _ in first], minlength=211)
    assert not counts[expected.numpy() == 0].any()
    off = counts / 400 - expected.numpy()
    assert np.abs(off).max() < 4 * 0.5 / 400 ** 0.5 and counts.max() < 400
    # the probability is that of the model, not of what it was drawn from
    assert all(p == pytest.approx(float(logits.softmax(0)[token])) for token, p in first)
    several = [drawn(model, [5, 6, 7], seed=seed, temperature=1.0) for seed in (3, 3, 4)]
    assert several[0] == several[1] != several[2]
    # no token without text, and no more tokens than the context holds
    model.config.max_position_embeddings = 8
    cfg = sample.SampleConfig(temperature=50.0)
    tokens = [*sample.generate(model, [5, 6, 7], (), cfg, torch.Generator(), n_vocab=20)]
    assert len(tokens) == 5 and all(token < 20 for token, _ in tokens)


@pytest.mark.parametrize('kind', ['gemma', 'mistral', 'llama2', 'llama3'])
def test_characters_are_printed_whole(tokenizers, kind):
    tokenizer, text = tokenizers[kind], 'The naïve fox: 狐 🦊🇯🇵, ok?\n  two'
    ids = tokenizer.encode(text, start=False)
    assert len(ids) > len(text.split())
    pieces = [*sample.whole_characters([(i, 0.5) for i in ids], tokenizer, {tokenizer.eos_id})]
    assert ''.join(piece for piece, _ in pieces) == text
    assert [i for _, pairs in pieces for i, _ in pairs] == ids
    assert max(len(pairs) for piece, pairs in pieces if '🦊' in piece) > 1
    assert '\ufffd' not in ''.join(piece for piece, _ in pieces)
    # the end has no text, and half a character at the end is shown as such
    cut = [(i, 0.5) for i in ids[:1 + max(n for n, i in enumerate(ids) if i == ids[-1])]]
    ended = [*sample.whole_characters([*cut, (tokenizer.eos_id, 0.9)], tokenizer,
                                      {tokenizer.eos_id})]
    assert ended[-1] == ('', [(tokenizer.eos_id, 0.9)])
    half = tokenizer.encode('🦊', start=False)[:-1]
    assert [*sample.whole_characters([(i, 0.5) for i in half], tokenizer, ())][-1][0].endswith(
        '\ufffd')


@pytest.mark.parametrize('kind, template', [
    ('mistral', 'tulu'), ('mistral', 'mistral'), ('llama2', 'mistral'), ('llama3', 'llama3'),
    ('gemma', 'gemma'), ('qwen', 'chatml'), ('llama2', 'alpaca')])
def test_the_prompt_is_that_of_training(tokenizers, kind, template):
    tokenizer = tokenizers['llama3' if kind == 'qwen' else kind]
    if kind == 'qwen':
        tokenizer = copy.copy(tokenizer)
        tokenizer.control_ids = {'<|im_start|>': 128100, '<|im_end|>': 128101}
    messages = [{'role': 'user', 'content': 'What is the fox?'}]
    if template != 'alpaca':
        messages += [{'role': 'assistant', 'content': 'quick'}, messages[0]]
    said = {'role': 'assistant', 'content': 'brown dog'}
    whole, mask = encode_conversation([*messages, said], tokenizer, template, True)
    ids, stop = sample.encode_prompt(messages, tokenizer, template, True)
    assert whole[:len(ids)] == ids and mask[len(ids) - 1:len(ids) + 1] == [0, 1]
    ends = [i for i in range(len(ids), len(whole)) if whole[i] in stop]
    assert len(ends) == 1 and mask[ends[0]] and not any(mask[ends[0] + 1:])
    answer = tokenizer.decode(whole[len(ids):ends[0]], start=False)
    assert answer.removeprefix(' ' if template == 'mistral' else '') == 'brown dog'


@pytest.fixture
def chat_folder(tmp_path):
    """A tiny random model that was trained in the template of tulu."""
    folder = sentencepiece_folder(tmp_path / 'model', 'llama2')
    reference_model('llama', folder, vocab_size=load_tokenizer(folder).n_vocab,
                    max_position_embeddings=200)
    (folder / 'train_config.py').write_text("data_kind = 'instruct'\ntemplate = 'tulu'\n")
    return folder


def test_one_answer(chat_folder, capsys, monkeypatch):
    def said(*arguments):
        sample.main([f'--model={chat_folder}', '--device=cpu', *arguments])
        return capsys.readouterr().out
    model, tokenizer = checkpoint.load(chat_folder).eval(), load_tokenizer(chat_folder)
    messages = [{'role': 'user', 'content': 'What?'}]
    ids, stop = sample.encode_prompt(messages, tokenizer, 'tulu', True)
    pairs = drawn(model, ids, stop | {2}, max_tokens=12)
    text = tokenizer.decode([i for i, _ in pairs if i not in stop], start=False)
    assert said('--prompt=What?', '--max_tokens=12') == text + '\n'
    monkeypatch.setattr(sys, 'stdin', io.TextIOWrapper(io.BytesIO(b'What?\n')))
    printed = said('--max_tokens=12', '--probs')
    assert printed == text + '\n' + ''.join(
        f'{p:.6f}  {tokenizer.decode([i], start=False)!r}\n' for i, p in pairs)
    raw = drawn(model, [1, *tokenizer.encode('What')], {2}, max_tokens=12)
    assert said('--raw', '--prompt=What', '--max_tokens=12') == tokenizer.decode(
        [i for i, _ in raw if i != 2], start=False) + '\n'


def test_a_conversation_continues_after_an_answer(chat_folder, capsys, monkeypatch):
    asked, lines = [], iter(['What?', '', '  And then? '])

    def line(prompt):
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None
    real = sample.encode_prompt
    monkeypatch.setattr('builtins.input', line)
    monkeypatch.setattr(sys.stdin, 'isatty', lambda: True, raising=False)
    monkeypatch.setattr(sample, 'encode_prompt', lambda messages, *rest: (
        asked.append(copy.deepcopy(messages)), real(messages, *rest))[1])
    sample.main([f'--model={chat_folder}', '--max_tokens=6'])
    first = capsys.readouterr().out.splitlines()[0]
    assert [[m['role'] for m in messages] for messages in asked] == [
        ['user'], ['user', 'assistant', 'user']]
    assert asked[1][1]['content'].startswith(first) and asked[1][2]['content'] == 'And then?'


def test_a_token_is_shaded_by_its_probability(monkeypatch):
    assert sample.shaded('a', 1.0) == '\x1b[48;5;255;38;5;16ma\x1b[0m'
    assert sample.shaded('a\n\nb', 0.0) == (
        '\x1b[48;5;232;38;5;231ma\x1b[0m\n\n\x1b[48;5;232;38;5;231mb\x1b[0m')
    assert '\x1b[2J' not in sample.shaded('\x1b[2J', 0.5)


@pytest.mark.parametrize('changes, shades', [
    ({}, True), ({'NO_COLOR': '1'}, False), ({'TERM': 'vt100'}, False),
    ({'TERM': 'xterm', 'COLORTERM': 'truecolor'}, True)])
def test_only_a_terminal_with_colors_is_shaded(chat_folder, capsys, monkeypatch, changes, shades):
    for key in ('NO_COLOR', 'COLORTERM'):
        monkeypatch.delenv(key, raising=False)
    for key, value in ({'TERM': 'xterm-256color'} | changes).items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(sys.stdout, 'isatty', lambda: True)
    sample.main([f'--model={chat_folder}', '--prompt=What?', '--max_tokens=6'])
    assert ('\x1b[48;5;' in capsys.readouterr().out) == shades
    monkeypatch.setattr(sys.stdout, 'isatty', lambda: False)
    sample.main([f'--model={chat_folder}', '--prompt=What?', '--max_tokens=6'])
    assert '\x1b' not in capsys.readouterr().out


def test_prompts_that_cannot_be_answered_are_refused(chat_folder, tmp_path):
    base = tmp_path / 'base'
    shutil.copytree(chat_folder, base)
    (base / 'train_config.py').unlink()
    for arguments, message in (
            (['--prompt=a'], 'no model given'),
            ([f'--model={chat_folder}', '--top_p=0.5'], 'top_p = 0.5 needs a temperature above 0'),
            ([f'--model={chat_folder}', '--temperature=-1'], 'temperature = -1.0; it must be'),
            ([f'--model={chat_folder}', '--top_p=0'], 'top_p = 0.0; it must be between'),
            ([f'--model={chat_folder}', '--chat=llama3'], 'the tokenizer lacks'),
            ([f'--model={base}', '--prompt=a'], 'or ask in plain text: .* sample.py --raw'),
            ([f'--model={chat_folder}', f'--prompt={"fox " * 300}'],
             r'the conversation has \d+ tokens; it may have 1 to 199'),
            ([f'--model={chat_folder}', '--prompt=\udcff'], 'not valid Unicode')):
        with pytest.raises((ConfigError, DataError), match=message):
            sample.main(arguments)
    rewrite(chat_folder, lambda tensors: tensors['model.norm.weight'].fill_(torch.nan))
    with pytest.raises(CheckpointError, match='model.norm.weight in .*model holds NaN'):
        sample.main([f'--model={chat_folder}', '--prompt=a'])


@pytest.mark.slow
def test_the_command_line_prints_an_answer_or_one_line_of_error(chat_folder):
    def run(*arguments, **more):
        return subprocess.run([sys.executable, 'sample.py', *arguments], cwd=HERE, text=True,
                              capture_output=True, env=os.environ | {'TERM': 'xterm-256color'},
                              **more)
    done = run(f'--model={chat_folder}', '--max_tokens=1', '--temperature=1', input='What?\n')
    again = run(f'--model={chat_folder}', '--max_tokens=1', '--temperature=1', '--prompt=What?')
    assert done.returncode == 0 and done.stdout == again.stdout != '\n'
    assert done.stderr == '(cut after 1 tokens)\n'
    wrong = run('--modle=x')
    assert wrong.returncode == 1
    assert wrong.stderr == ("error: command line: --modle: there is no key 'modle'; did you mean "
                            "'model'?\n")
