"""Talk to a model, and see the probability that it gives to each token of its answer.

    python sample.py --model=out/run
    python sample.py --model=out/run --prompt='Who was Ada Lovelace?' --probs
    python sample.py --model=google/gemma-2-2b --raw --temperature=1 --top_p=0.9 < text.txt

In a terminal with 256 colors the background of a token shows its probability, from black (0) to
white (1); NO_COLOR turns that off. Probabilities are the model's, before `temperature` and `top_p`.
There is no KV cache: each token computes the whole conversation again.
"""

from runtime import cli

if __name__ == '__main__':
    cli.begin()

import contextlib
import math
import os
import re
import sys
from dataclasses import dataclass
from typing import Literal

from runtime.config import load_config, require_range
from runtime.errors import CheckpointError, ConfigError, DataError


@dataclass
class SampleConfig:
    model: str = ''                           # a folder in Hugging Face layout, or a hub name
    revision: str | None = None               # the hub revision of the model
    prompt: str | None = None                 # answer this and exit, as for a prompt from a pipe
    # the chat template; trained: that of the model's train.py run
    chat: Literal['trained', 'tulu', 'olmo2', 'llama3', 'gemma', 'mistral', 'tekken', 'chatml',
                  'cohere', 'granite', 'phi3', 'phi4', 'phi4_mini', 'alpaca'] = 'trained'
    raw: bool = False                         # continue each prompt as plain text, without chat
    temperature: float = 0.0                  # divides the logits; 0: the most probable token
    top_p: float = 1.0                        # draw from the fewest tokens that together have it
    max_tokens: int = 256                     # of one answer
    seed: int = 0
    probs: bool = False                       # print each token with its probability
    device: str = 'auto'


def read_arguments(argv):
    """Return the SampleConfig of a command line; raise ConfigError for unusable values."""
    cfg = load_config(SampleConfig, argv, __doc__)
    require_range(cfg, 0, math.inf, 'temperature')
    require_range(cfg, 1e-3, 1, 'top_p')
    require_range(cfg, 1, math.inf, 'max_tokens')
    require_range(cfg, 0, 2 ** 63 - 1, 'seed')
    if not cfg.model:
        raise ConfigError('no model given; for example --model=out/run')
    if cfg.top_p < 1 and cfg.temperature == 0:
        raise ConfigError(f'top_p = {cfg.top_p} needs a temperature above 0, such as 1')
    return cfg


if __name__ == '__main__':
    with cli.one_line_errors():     # --help and misspelled keys need no torch
        read_arguments(sys.argv[1:])

import torch

from data.chat import encode_prompt, question_frame
from data.tokenizer import begins_with_bos, load_model_tokenizer
from runtime import checkpoint
from runtime.device import pick_device, pick_dtype
from runtime.trained import trained_template, trained_with_bos

with contextlib.suppress(ImportError):
    import readline     # noqa: F401    input() then edits lines and has a history


def keep_top_p(probs, top_p):
    """Return probs [V] with 0 for all but the fewest that sum to `top_p` (Holtzman et al. 2020)."""
    ordered, order = probs.sort(descending=True, stable=True)
    before = torch.cat((ordered.new_zeros(1), ordered.cumsum(0)[:-1]))
    return torch.zeros_like(probs).scatter(0, order, ordered.where(before < top_p, 0))


@torch.no_grad()
def generate(model, ids, stop, cfg, random, n_vocab=None):
    """Yield (token, the model's probability of it) after `ids`, up to a token of the set `stop`.

    Yield at most max_tokens, and no more than fit into the context. random: a torch.Generator on
    the CPU. Tokens from n_vocab on have no text and are never drawn. Raises CheckpointError.
    """
    ids, device = list(ids), model.head.device
    for _ in range(min(cfg.max_tokens, model.config.max_position_embeddings - len(ids))):
        positions = torch.arange(len(ids), device=device)[None]
        hidden = model(torch.tensor([ids], device=device), positions, None)
        logits = model.logits(hidden[0, -1]).cpu().double()
        if not logits.isfinite().all():
            raise CheckpointError(checkpoint.bad_logits(
                'the answer', cfg.model, str(model.head.dtype).removeprefix('torch.')))
        token = int(logits[:n_vocab].argmax())
        if cfg.temperature:
            scaled = ((logits[:n_vocab] - logits[token]) / cfg.temperature).softmax(0)
            token = int(torch.multinomial(keep_top_p(scaled, cfg.top_p), 1, generator=random))
        yield token, float(logits.softmax(0)[token])
        if token in stop:
            return
        ids.append(token)


def whole_characters(drawn, tokenizer, stop):
    """Group (token, probability) pairs by whole characters; yield (text, its pairs)."""
    pairs = []
    for pair in drawn:
        pairs.append(pair)
        text = tokenizer.decode([token for token, _ in pairs if token not in stop], start=False)
        if pair[0] in stop or not text.endswith('\ufffd'):  # stands for an incomplete character
            yield text, pairs
            pairs = []
    if pairs:
        yield text, pairs


def shaded(text, p):
    """Return `text` on one of a terminal's 24 grays, its control characters replaced."""
    text = re.sub('[\x00-\x08\x0b-\x1f\x7f-\x9f]', '\ufffd', text)
    gray = f'\x1b[48;5;{232 + round(23 * p)};38;5;{16 if p > 0.5 else 231}m'
    return '\n'.join(f'{gray}{line}\x1b[0m' if line else '' for line in text.split('\n'))


def answer(model, tokenizer, ids, stop, cfg, random):
    """Print the answer to `ids` while it is generated; return its text."""
    context = model.config.max_position_embeddings
    if not 0 < len(ids) < context:
        raise DataError(f'the conversation has {len(ids)} tokens; it may have 1 to {context - 1}')
    gray = sys.stdout.isatty() and not os.environ.get('NO_COLOR') and (
        '256' in os.environ.get('TERM', '') or os.environ.get('COLORTERM'))
    drawn, said = [], ''
    tokens = generate(model, ids, stop, cfg, random, tokenizer.n_vocab)
    for text, pairs in whole_characters(tokens, tokenizer, stop):
        p = math.prod(p for _, p in pairs)
        print(shaded(text, p) if gray else text, end='', flush=True)
        drawn, said = drawn + pairs, said + text
    print()
    for token, p in drawn if cfg.probs else ():
        print(f'{p:.6f}  {tokenizer.decode([token], start=False)!r}')
    if drawn[-1][0] not in stop:
        print(f'(cut after {len(drawn)} tokens)', file=sys.stderr)
    return said


def prompts(cfg):
    """Yield --prompt or the text of a pipe; on a terminal, each line until Ctrl-D."""
    if cfg.prompt is not None:
        yield cfg.prompt
    elif not sys.stdin.isatty():
        yield sys.stdin.buffer.read().decode(errors='surrogateescape').removesuffix('\n')
    else:
        with contextlib.suppress(EOFError):
            while True:
                if line := input('\n> ').strip():
                    yield line
        print()


def main(argv):
    cfg = read_arguments(argv)
    device, folder = pick_device(cfg.device), checkpoint.fetch(cfg.model, cfg.revision)
    tokenizer = load_model_tokenizer(folder, checkpoint.read_config(folder))
    add_bos = begins_with_bos(tokenizer, trained_with_bos(folder))
    template = '' if cfg.raw else trained_template(folder) if cfg.chat == 'trained' else cfg.chat
    lead = question_frame(tokenizer, template, add_bos)[-1] if template else ''
    model = checkpoint.load(folder, device, pick_dtype('auto', device)).eval()
    cfg.model, eos = str(folder), model.config.eos_token_id
    random, messages = torch.Generator().manual_seed(cfg.seed), []
    for prompt in prompts(cfg):
        if template == 'alpaca':            # which has one question
            messages = []
        messages.append({'role': 'user', 'content': prompt})
        ids, stop = encode_prompt(messages, tokenizer, template, add_bos)
        stop |= set(eos if isinstance(eos, list) else [eos])
        said = answer(model, tokenizer, ids, stop, cfg, random)
        messages.append({'role': 'assistant', 'content': said.removeprefix(lead)})


if __name__ == '__main__':
    with cli.one_line_errors(memory='a smaller --max_tokens or a shorter prompt needs less'):
        main(sys.argv[1:])
