"""Talk to a model, and see the probability that it gives to each token of its answer.

    python sample.py --model=out/run
    python sample.py --model=out/run --prompt='Who was Ada Lovelace?' --temperature=1 --n=5 --probs
    python sample.py --model=google/gemma-2-2b --raw --temperature=1 --top_p=0.9 < text.txt

In a terminal with 256 colors the background of a token shows its probability, from black (0) to
white (1); NO_COLOR turns that off. Probabilities are the model's, before `temperature` and `top_p`.
Ctrl-C ends an answer early; what is already there stays in the conversation.
"""

from runtime import cli

if __name__ == '__main__':
    cli.begin()

import contextlib
import math
import os
import sys
import time
from dataclasses import dataclass

from data.chat import encode_prompt
from decoding.sampling import DecodingConfig, check_decoding
from runtime.config import load_config
from runtime.errors import CheckpointError, DataError, escape_controls


@dataclass
class SampleConfig(DecodingConfig):
    prompt: str | None = None           # answer this and exit, as for a prompt from a pipe
    temperature: float = 0.0            # divides the logits; 0: the most probable token
    probs: bool = False                 # print each token with its probability
    stats: bool = False                 # print tokens, bytes and operations per second


def read_arguments(argv):
    """Return the SampleConfig of a command line; raise ConfigError for unusable values."""
    cfg = load_config(SampleConfig, argv, __doc__)
    check_decoding(cfg)
    return cfg


if __name__ == '__main__':
    with cli.one_line_errors():     # --help and misspelled keys need no torch
        read_arguments(sys.argv[1:])

from data.trees import question_frame
from decoding.answers import first_stop, generate, stream
from decoding.slots import step_cost
from generate import open_model
from runtime import weights

with contextlib.suppress(ImportError):
    import readline     # noqa: F401    input() then edits lines and has a history


def typed_lines():
    """Yield each line that is typed, without empty ones, until Ctrl-D."""
    with contextlib.suppress(EOFError):
        while True:
            try:
                line = input('\n> ').strip()
                line.encode()       # in some locales an invalid byte becomes a lone surrogate
            except UnicodeError:
                print(f'(that line is not valid {sys.stdin.encoding}; type it again)',
                      file=sys.stderr)
                continue
            if line:
                yield line
    print()


def shows_grays():
    """Return whether standard output is a terminal with 256 colors, and NO_COLOR is not set."""
    return sys.stdout.isatty() and not os.environ.get('NO_COLOR') and (
        '256' in os.environ.get('TERM', '') or bool(os.environ.get('COLORTERM')))


def shaded(text, p):
    """Return `text` on a gray from black (p = 0) to white (1), control characters escaped."""
    text = escape_controls(text)
    gray = f'\x1b[48;5;{232 + round(23 * p)};38;5;{16 if p > 0.5 else 231}m'
    return '\n'.join(f'{gray}{line}\x1b[0m' if line else '' for line in text.split('\n'))


def pieces(answers, tokenizer, stop=()):
    """Group the tokens of an answer, as `stream` yields it, by whole characters that begin no stop
    string: yield (text, the model's probability of its tokens, the Answer).
    """
    shown = 0
    for answer in answers:
        tokens = answer.tokens[shown:-1 if answer.reason == 'end' else None]
        text = tokenizer.decode(tokens, start=False)
        # U+FFFD stands for an incomplete character
        held = text.endswith(('\ufffd', *(s[:k] for s in stop for k in range(1, len(s)))))
        if answer.reason == 'stop':
            text = text[:first_stop(text, stop)]
        if answer.reason in ('end', 'stop'):    # so it is incomplete for ever
            text = text.rstrip('\ufffd')
        if answer.reason or not held:
            yield text, math.exp(sum(answer.log_probs[shown:])), answer
            shown = len(answer.tokens)


def print_answer(answers, tokenizer, cfg):
    """Print an answer while it is generated; return [it], its text, whether Ctrl-C ended it."""
    gray = shows_grays()
    answer = None
    said = ''
    end = ''
    try:
        for text, p, answer in pieces(answers, tokenizer, cfg.stop):     # noqa: B007
            print(shaded(text, p) if gray else escape_controls(text), end='', flush=True)
            said += text
    except KeyboardInterrupt:
        end = '(stopped)'
    print()
    if answer and cfg.probs:
        print_probs(answer, tokenizer)
    if end or answer.truncated:
        print(end or f'(cut after {len(answer.tokens)} tokens)', file=sys.stderr)
    return [answer] if answer else [], said, bool(end)


def print_probs(answer, tokenizer):
    """Print each token of an answer with the model's probability of it."""
    for token, log_p in zip(answer.tokens, answer.log_probs):
        print(f'{math.exp(log_p):.6f}  {tokenizer.decode([token], start=False)!r}')


def print_answers(model, tokenizer, ids, stop, cfg):
    """Print n answers with the probability of each whole answer; return as `print_answer`."""
    ((_, answers),) = generate(model, [ids], cfg, tokenizer, stop)
    for answer in answers:
        p = math.exp(sum(answer.log_probs))
        print(f'--- {answer.number + 1} of {cfg.n}: probability {p:.3g}, '
              f'{len(answer.tokens)} tokens{", cut" * answer.truncated}\n'
              f'{escape_controls(answer.text)}')
        if cfg.probs:
            print_probs(answer, tokenizer)
    return answers, answers[0].text, False


def print_stats(model, ids, answers, seconds):
    """Print the speed of prefill and decoding in tokens, bytes and operations per second."""
    lengths = [len(answer.tokens) for answer in answers]
    n, steps = sum(lengths), max(lengths)
    n_bytes, flops = step_cost(model, n / steps, n / steps * (len(ids) + steps / 2))
    print(f'{n} tokens in {seconds:.2f} s: {n / seconds:.1f} tokens/s, '
          f'{n_bytes * steps / seconds / 1e9:.3g} GB/s, '
          f'{flops * steps / seconds / 1e12:.3g} TFLOP/s', file=sys.stderr)


def main(argv):
    cfg = read_arguments(argv)
    folder, model, tokenizer, template, add_bos = open_model(cfg)
    lead = question_frame(tokenizer, template, add_bos).lead if template else ''
    if cfg.prompt is None and not sys.stdin.isatty():
        cfg.prompt = sys.stdin.buffer.read().decode(errors='surrogateescape').removesuffix('\n')
    messages, once = [], cfg.prompt is not None
    for prompt in [cfg.prompt] if once else typed_lines():
        if template == 'alpaca':            # which has one question
            messages = []
        messages.append({'role': 'user', 'content': prompt})
        started = time.perf_counter()
        try:
            ids, stop = encode_prompt(messages, tokenizer, template, add_bos)
            if cfg.n > 1:
                answers, said, stopped = print_answers(model, tokenizer, ids, stop, cfg)
            else:
                answers, said, stopped = print_answer(
                    stream(model, [ids], cfg, tokenizer, stop), tokenizer, cfg)
        except DataError as error:      # the conversation does not fit into the context
            if once:
                raise
            print(f'({error}; the conversation starts over)', file=sys.stderr)
            messages = []
            continue
        except FloatingPointError as error:
            raise CheckpointError(weights.bad_logits(
                'the answer', folder, str(model.head.dtype).removeprefix('torch.'))) from error
        if cfg.stats and answers:
            print_stats(model, ids, answers, time.perf_counter() - started)
        if stopped and once:
            raise KeyboardInterrupt
        messages.append({'role': 'assistant', 'content': said.removeprefix(lead)})


if __name__ == '__main__':
    with cli.one_line_errors(memory='a smaller --max_tokens or a shorter prompt needs less'):
        main(sys.argv[1:])
