"""sample.py"""

import io
import itertools
import re
import shutil
import sys
from unittest.mock import Mock

import numpy as np
import pytest
import sample
from common import recorded, rewrite
from data.tokenizer import load_tokenizer
from decoding.answers import Answer, generate, stream
from runtime import checkpoint
from runtime.errors import CheckpointError, ConfigError, DataError, escape_controls
from decoding.sampling import Sampling


def growing(ids, reason, probability=0.5):
    """An Answer after each token, as `stream` yields it."""
    answer = Answer(0, 0)
    for n, token in enumerate(ids, 1):
        answer.tokens.append(token)
        answer.log_probs.append(np.log(probability))
        answer.reason = reason if n == len(ids) else ''
        yield answer


@pytest.mark.parametrize('kind', ['gemma', 'llama3'])
def test_characters_are_printed_whole(tokenizers, kind):
    tokenizer, text = tokenizers[kind], 'The naïve fox: 狐 🦊🇯🇵, ok?\n  two'
    ids = tokenizer.encode(text, start=False)
    assert len(ids) > len(text.split())
    shown = [(piece, p) for piece, p, _ in sample.pieces(growing(ids, 'max_tokens'), tokenizer)]
    assert ''.join(piece for piece, _ in shown) == text
    assert np.prod([p for _, p in shown]) == pytest.approx(0.5 ** len(ids))
    assert min(p for piece, p in shown if '🦊' in piece) < 0.5
    # the end has no text, and half a character at the end is shown as such
    ended = [piece for piece, *_ in sample.pieces(growing([*ids, tokenizer.eos_id], 'end'),
                                                  tokenizer)]
    assert ended[-1] == '' and ''.join(ended) == text
    half = tokenizer.encode('🦊', start=False)[:-1]
    assert [*sample.pieces(growing(half, 'max_tokens'), tokenizer)][-1][0].endswith('\ufffd')
    for ids, reason in (([*half, tokenizer.eos_id], 'end'),
                        ([*half, *tokenizer.encode('Q', start=False)], 'stop')):
        ended = sample.pieces(growing(ids, reason), tokenizer, ['Q'])
        assert '\ufffd' not in ''.join(piece for piece, *_ in ended)
    # no part of a stop string is printed
    ids = tokenizer.encode('one. Question: two. Question four', start=False)
    for stop in ('Question four', 'x', ' two. Q'):
        n = next((n for n in range(1, len(ids) + 1) if stop in tokenizer.decode(ids[:n], False)),
                 len(ids))
        whole = tokenizer.decode(ids[:n], start=False)
        reason = 'stop' if stop in whole else 'max_tokens'
        shown = [piece for piece, *_ in sample.pieces(growing(ids[:n], reason), tokenizer, [stop])]
        assert ''.join(shown) == whole.partition(stop)[0]


def test_answers_are_printed_with_their_probabilities(chat_folder, capsys, monkeypatch):
    def printed(*arguments):
        sample.main([f'--model={chat_folder}', '--device=cpu', '--max_tokens=12', *arguments])
        return capsys.readouterr()

    def listed(answer):
        return ''.join(f'{np.exp(p):.6f}  {tokenizer.decode([i], start=False)!r}\n'
                       for i, p in zip(answer.tokens, answer.log_probs, strict=True))
    model, tokenizer = checkpoint.load(chat_folder).eval(), load_tokenizer(chat_folder)
    ids, stop = sample.encode_prompt([{'role': 'user', 'content': 'What?'}], tokenizer, 'tulu')
    raw, greedy = [1, *tokenizer.encode('What')], {'temperature': 0.0}
    (answer,), (raw,), several = (
        next(generate(model, [prompt], Sampling(max_tokens=12, **more), tokenizer, end))[1]
        for prompt, end, more in ((ids, stop, greedy), (raw, {2}, greedy), (ids, stop, {'n': 3})))
    assert printed('--prompt=What?').out == escape_controls(answer.text) + '\n'
    assert printed('--raw', '--prompt=What').out == escape_controls(raw.text) + '\n'
    monkeypatch.setattr(sys, 'stdin', io.TextIOWrapper(io.BytesIO(b'What?\n')))
    assert printed('--probs').out == escape_controls(answer.text) + '\n' + listed(answer)
    shown = printed('--prompt=What?', '--n=3', '--temperature=1', '--stats', '--probs')
    for k, answer in enumerate(several, 1):
        p = np.exp(sum(answer.log_probs))
        assert f'--- {k} of 3: probability {p:.3g}, {len(answer.tokens)} tokens' in shown.out
        assert listed(answer) in shown.out
    for unit in ('tokens/s', 'GB/s', 'TFLOP/s'):
        assert unit in shown.err


def test_a_conversation_continues_until_the_context_is_full(chat_folder, capsys, monkeypatch):
    typed = Mock(side_effect=['What?', '', '  And then? ', 'a' * 900, 'Who?', EOFError])   # Ctrl-D
    monkeypatch.setattr('builtins.input', typed)
    monkeypatch.setattr(sys.stdin, 'isatty', lambda: True, raising=False)
    asked = recorded(monkeypatch, sample, 'encode_prompt', lambda messages, *_: [*messages])
    sample.main([f'--model={chat_folder}', '--max_tokens=4'])
    printed = capsys.readouterr()
    assert [[m['role'] for m in messages] for messages in asked] == [
        ['user'], ['user', 'assistant', 'user'], ['user', 'assistant'] * 2 + ['user'], ['user']]
    assert escape_controls(asked[1][1]['content']).startswith(printed.out.splitlines()[0])
    assert asked[1][2]['content'] == 'And then?'
    assert 'it may have 1 to 199; the conversation starts over)' in printed.err


def test_control_characters_of_an_answer_do_not_reach_the_terminal(tokenizers, capsys, monkeypatch):
    ids = tokenizers['llama3'].encode('a\x1b[2J\x07b\r\x9b0m\n\tc', start=False)
    for gray in (False, True):
        monkeypatch.setattr(sample, 'shows_grays', lambda gray=gray: gray)
        answers = growing([*ids, tokenizers['llama3'].eos_id], 'end')
        _, said, _ = sample.print_answer(answers, tokenizers['llama3'], sample.SampleConfig())
        printed = re.sub(r'\x1b\[(48;5;\d+;38;5;\d+|0)m', '', capsys.readouterr().out)
        assert printed == 'a\\x1b[2J\\x07b\\r\\x9b0m\n\tc\n' and '\x1b[2J' in said


def test_prompts_that_cannot_be_answered_are_refused(chat_folder, tmp_path):
    base = tmp_path / 'base'
    shutil.copytree(chat_folder, base)
    (base / 'train_config.py').unlink()
    for arguments, message in (
            (['--prompt=a'], 'no model given'),
            ([f'--model={chat_folder}', '--top_p=0.5'], 'top_p = 0.5 needs a temperature above 0'),
            ([f'--model={base}', '--prompt=a'], 'or use plain text: .*, --raw in sample.py'),
            ([f'--model={chat_folder}', f'--prompt={"fox " * 300}'],
             r'prompt 1 has \d+ tokens; it may have 1 to 199'),
            ([f'--model={chat_folder}', '--prompt=\udcff'], 'not valid Unicode')):
        with pytest.raises((ConfigError, DataError), match=message):
            sample.main(arguments)
    rewrite(chat_folder, lambda tensors: tensors['model.norm.weight'].fill_(float('nan')))
    with pytest.raises(CheckpointError, match='model.norm.weight in .*model holds NaN'):
        sample.main([f'--model={chat_folder}', '--prompt=a'])


def test_ctrl_c_ends_an_answer(chat_folder, capsys, monkeypatch):
    def interrupted(*arguments):
        yield from itertools.islice(stream(*arguments), 3)
        raise KeyboardInterrupt
    monkeypatch.setattr(sample, 'stream', interrupted)
    with pytest.raises(KeyboardInterrupt):      # the script then ends with 130
        sample.main([f'--model={chat_folder}', '--prompt=What?'])
    assert capsys.readouterr().err.endswith('(stopped)\n')
