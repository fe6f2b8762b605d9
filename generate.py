"""Generate answers to many prompts at once, with a KV cache.

    python generate.py --model=out/run --prompts=prompts.jsonl --out=answers.jsonl --n=8
    torchrun --nproc_per_node=8 -- generate.py --model=out/run --prompts=prompts.jsonl --n=8

A row of prompts.jsonl has `prompt`, or `messages` of a conversation, and perhaps an `id`; its other
fields are copied. The row of answers.jsonl adds `answers`. An interrupted command resumes from that
file. Each of several processes answers its share of the prompts.

The forward pass is the model's own. Prompts are packed into rows, which hold a common beginning
once; their keys and values go to the slots of a cache (decoding/slots.py). Then each step computes
one token of every running answer. An answer that has ended makes room for the next prompt at once.
Each token is drawn with a random number that depends only on the seed, the tokens of the prompt,
the number of the answer and the index of the token, so an answer does not depend on the others.
"""

from runtime import cli

if __name__ == '__main__':
    cli.begin()

import contextlib
import functools
import itertools
import math
import os
import sys
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from data.chat import TEMPLATES, question_frame
from runtime.config import load_config, require_given
from runtime.errors import CheckpointError, ConfigError, DataError
from decoding.sampling import Sampling, check_sampling


@dataclass
class GenerateConfig(Sampling):
    model: str = ''                     # a folder in Hugging Face layout, or a hub name
    revision: str | None = None         # the hub revision of the model
    prompts: str = ''                   # a file of rows with `prompt` or `messages`
    out: str = 'answers.jsonl'          # file of the answers, *.jsonl
    # the chat template; trained: that of the model's train.py run
    chat: Literal['trained', *TEMPLATES] = 'trained'
    raw: bool = False                   # continue each prompt as plain text, without chat
    confidence: bool = False            # score each answer once more, as evaluate.py scores options
    per_token: bool = False             # write each token with its log-probabilities and entropy
    overwrite: bool = False             # replace the answers in `out`
    device: str = 'auto'                # 'cpu', 'cuda', 'cuda:1'; auto: a GPU if there is one
    dtype: Literal['auto', 'float32', 'bfloat16'] = 'auto'  # auto: bfloat16 on a GPU, else float32


# answers depend on these keys, so they must not change within a file
SETTINGS = ('n', 'max_tokens', 'temperature', 'top_k', 'top_p', 'min_p', 'stop', 'seed',
            'deterministic', 'confidence', 'per_token')


def read_arguments(argv):
    """Return the GenerateConfig of a command line; raise ConfigError for unusable values."""
    cfg = load_config(GenerateConfig, argv, __doc__)
    check_sampling(cfg)
    require_given(cfg, model='out/run', prompts='prompts.jsonl')
    if not cfg.out.endswith('.jsonl'):      # the names of the files beside it follow from it
        raise ConfigError(f'out = {cfg.out!r}; it must end in .jsonl, as answers.jsonl does')
    return cfg


if __name__ == '__main__':
    with cli.one_line_errors():     # --help and misspelled keys need no torch
        read_arguments(sys.argv[1:])

import scoring
from data.instruct import read_prompts
from data.packing import Tree
from data.tokenizer import begins_with_bos, load_model_tokenizer
from results.samples import append, digest, merge_parts, open_answers, part, to_row
from runtime import checkpoint, log, ownership, parallel
from runtime.code import code_digest
from runtime.device import pick_device, pick_dtype
from decoding.slots import PREFILL, Batch, room, take
from runtime.trained import trained_template, trained_with_bos

@dataclass
class Answer:
    """One answer, finished or in progress: lists with one entry per token, in nats."""
    prompt: int                                     # index of the prompt
    number: int                                     # of the answer to this prompt, from 0
    tokens: list = field(default_factory=list)      # with the token that ended it
    log_probs: list = field(default_factory=list)   # the model's: temperature 1, nothing cut off
    sample_log_probs: list = field(default_factory=list)    # of what the token was drawn from
    entropies: list = field(default_factory=list)   # of the model's distribution
    # why it ended: 'end' by a token of stop_ids, 'stop' by a stop string, 'max_tokens' or 'context'
    # where it was cut off
    reason: str = ''
    text: str = ''              # when it has ended: without that token, up to the stop string
    # for the loop: the tokens of the prompt, the most tokens of the answer, its slot in the cache,
    # and the number of its tokens launched on the device, which is ahead of `tokens`
    n_prompt: int = 0
    limit: int = 0
    slot: int = -1
    n_launched: int = 1

    @property
    def truncated(self):
        return self.reason in ('max_tokens', 'context')


# ---- Answers -------------------------------------------------------------------------------------

def generate(model, prompts, s, tokenizer=None, stop_ids=()):
    """Yield (index of the prompt, its n Answers) as they are done; arguments as in `stream`."""
    unfinished = {i: [None] * s.n for i in range(len(prompts))}
    for answer in stream(model, prompts, s, tokenizer, stop_ids):
        if answer.reason:
            unfinished[answer.prompt][answer.number] = answer
            if all(unfinished[answer.prompt]):
                yield answer.prompt, unfinished.pop(answer.prompt)


def stream(model, prompts, s, tokenizer=None, stop_ids=()):
    """Yield the Answer to which a token was added, after each token; its `reason` ends it.

    prompts:  a list of lists of token ids; answers to equal prompts are equal
    s:        Sampling
    tokenizer: for the text of answers and for stop strings; None: only tokens
    stop_ids: tokens that end an answer
    The device is one step ahead, so an answer that ends early wastes one step. Raises
    DataError for a prompt that does not fit, ConfigError for stop strings without a tokenizer,
    FloatingPointError(index of the prompt) for logits that are not finite.
    """
    if s.stop and tokenizer is None:
        raise ConfigError(f'stop = {s.stop}: stop strings need a tokenizer')
    if not prompts:
        return
    n_slots, length = room(model, prompts, s)
    n_vocab = tokenizer.n_vocab if tokenizer else model.head.shape[0]
    batch = Batch(model, s, n_slots, length, n_vocab)
    prefill, context = PREFILL[batch.device.type], model.config.max_position_embeddings
    waiting = deque(Answer(i, k, n_prompt=len(ids), limit=min(s.max_tokens, context - len(ids)))
                    for i, ids in enumerate(prompts) for k in range(s.n))
    free, running, launched = [*reversed(range(n_slots))], [], deque()

    @functools.cache    # decoding several tokens at each step would take longer than the step
    def may_stop(token):
        """Return whether a stop string may end inside this token."""
        text = tokenizer.decode([token], start=False)
        return '\ufffd' in text or any(string[-1] in text for string in s.stop)

    with parallel.evaluating(model):
        while waiting or running or launched:
            while begun := take(waiting, free, running, prompts, s, n_slots, prefill):
                launched.append((begun, batch.prefill(begun, prompts)))
                running = sorted(running + begun, key=lambda answer: answer.slot)
            active = [answer for answer in running if answer.n_launched < answer.limit]
            if active:
                launched.append((active, batch.step(active)))
            while len(launched) > bool(active):
                answers, copy = launched.popleft()
                for answer, values in zip(answers, copy.values().tolist()):
                    if answer.reason:       # it ended when this step had been launched
                        continue
                    add(answer, *values)
                    answer.reason = why_ended(answer, s, tokenizer, stop_ids, may_stop)
                    if answer.reason:
                        free.append(answer.slot)
                        answer.text = text(answer, s.stop, tokenizer) if tokenizer else ''
                    yield answer
            running = [answer for answer in running if not answer.reason]
            free.sort(reverse=True)     # so that slots are used from the first one on


def add(answer, token, log_p, log_q, entropy):
    """Append what `draw` returned for one token."""
    if not math.isfinite(log_p + log_q + entropy):
        raise FloatingPointError(answer.prompt)
    answer.tokens.append(int(token))
    answer.log_probs.append(log_p)
    answer.sample_log_probs.append(log_q)
    answer.entropies.append(entropy)


def why_ended(answer, s, tokenizer, stop_ids, may_stop):
    """Return the reason for which the last token ends an answer; '' if it does not."""
    if answer.tokens[-1] in stop_ids:
        return 'end'
    if s.stop and may_stop(answer.tokens[-1]):
        # as many of the last tokens as a stop string can have, with at least one byte each
        n = max(len(string.encode()) for string in s.stop) + 4
        if first_stop(tokenizer.decode(answer.tokens[-n:], start=False), s.stop) >= 0:
            return 'stop'
    if len(answer.tokens) == answer.limit:
        return 'max_tokens' if answer.limit == s.max_tokens else 'context'
    return ''


def first_stop(text, stop):
    """Return where the first of the strings `stop` begins in `text`; -1 if there is none."""
    return min((at for string in stop if (at := text.find(string)) >= 0), default=-1)


def text(answer, stop, tokenizer):
    """Return the text of an answer that has ended, without an incomplete character at its end."""
    n_end = answer.reason == 'end'
    whole = tokenizer.decode(answer.tokens[:len(answer.tokens) - n_end], start=False)
    return whole[:first_stop(whole, stop) if answer.reason == 'stop' else None].rstrip('\ufffd')


def confidences(model, prompts, answers, deterministic=False):
    """Return the log-probability of each Answer, a float64 array [n] per prompt, in nats.

    prompts: lists of token ids; answers: a list of Answers per prompt. The numbers are those of
    `scoring.option_log_probs`: they do not depend on how the answers were generated.
    """
    trees = [Tree((), [*ids], [answer.tokens for answer in group], [len(ids)] * len(group))
             for ids, group in zip(prompts, answers, strict=True)]
    return scoring.option_log_probs(model, trees, pack_len=4096, deterministic=deterministic,
                                    trim=128 if model.head.is_cuda else 1)


# what decides an answer besides the forward pass, the settings and the prompt
CODE = stream, take, add, why_ended, first_stop, text


# ---- The command line ----------------------------------------------------------------------------

def open_model(cfg):
    """Return (folder, model, tokenizer, template, add_bos); template '' is plain text."""
    if cfg.raw and cfg.chat != 'trained':
        raise ConfigError(f'--raw is plain text, and --chat={cfg.chat} a chat template; leave one '
                          f'of them out')
    device = pick_device(cfg.device)
    with parallel.first_process_first():
        folder = checkpoint.fetch(cfg.model, cfg.revision)
    config = checkpoint.read_config(folder)
    template = ('' if cfg.raw else
                trained_template(folder) if cfg.chat == 'trained' else cfg.chat)
    dtype = pick_dtype(getattr(cfg, 'dtype', 'auto'), device)
    with ThreadPoolExecutor(1) as pool:     # reads the weights while the tokenizer is made
        model = pool.submit(checkpoint.load, folder, device, dtype)
        tokenizer = load_model_tokenizer(folder, config)
        add_bos = begins_with_bos(tokenizer, trained_with_bos(folder))
        if template:
            question_frame(tokenizer, template, add_bos)    # raise for a template that does not fit
        return folder, model.result().eval(), tokenizer, template, add_bos


def answer_rows(model, prompts, cfg, tokenizer, stop):
    """Yield (index of the prompt, the rows of its n answers in the file) as they are done."""
    answered = generate(model, prompts, cfg, tokenizer, stop)
    while group := [*itertools.islice(answered, 32 if cfg.confidence else 1)]:
        scored = [[None] * cfg.n]
        if cfg.confidence:
            scored = confidences(model, [prompts[i] for i, _ in group],
                                 [answers for _, answers in group], cfg.deterministic)
        for (i, answers), log_probs in zip(group, scored):
            yield i, [to_row(*pair, cfg.per_token) for pair in zip(answers, log_probs)]


def main(argv):
    cfg = read_arguments(argv)
    cfg = replace(cfg, prompts=os.path.expanduser(cfg.prompts), out=os.path.expanduser(cfg.out))
    ownership.forget_inputs()
    folder, model, tokenizer, template, add_bos = open_model(cfg)
    prompts, stop = read_prompts(cfg.prompts, tokenizer, template, add_bos)
    try:
        room(model, [ids for _, ids in prompts], cfg)       # before any file is written
    except DataError as error:
        raise DataError(f'{cfg.prompts}: {error}') from None
    prompts = [(row | {'prompt_hash': digest(ids)}, ids) for row, ids in prompts]
    settings = {key: getattr(cfg, key) for key in SETTINGS} | {
        'stop': [*cfg.stop], 'model': checkpoint.fingerprint(folder),
        'code': code_digest(model.config, *CODE),
        'tokenizer': tokenizer.fingerprint, 'end_ids': sorted(stop), 'template': template,
        'add_bos': add_bos, 'dtype': str(model.head.dtype).removeprefix('torch.')}
    out, rank, n_processes = Path(cfg.out), parallel.rank(), parallel.world_size()
    with parallel.first_process_locks(out.parent):
        done = parallel.broadcast(open_answers(cfg, settings, n_processes) if rank == 0 else None)
        left = [(row, ids) for row, ids in prompts if (row['id'], row['prompt_hash']) not in done]
        print(f'to answer: {len(left):,} of {len(prompts):,} prompts, {cfg.n} times each',
              flush=True)
        if others := len(done) - (len(prompts) - len(left)):
            print(f'{out} also has {others:,} rows for prompts that are not in {cfg.prompts}')
        left = left[rank::n_processes]
        progress, n_tokens = log.progress_bar('answers', len(left), 'prompts'), 0
        started, ids = time.perf_counter(), [ids for _, ids in left]
        try:
            with (contextlib.closing(progress),
                  open(part(out, rank, n_processes), 'ab', buffering=0) as file):
                for i, rows in answer_rows(model, ids, cfg, tokenizer, stop):
                    append(file, left[i][0] | {'answers': rows})
                    n_tokens += sum(row['n_tokens'] for row in rows)
                    progress.update()
        except FloatingPointError as error:
            row, _ = left[error.args[0]]
            raise CheckpointError(checkpoint.bad_logits(
                f'the prompt with id {row["id"]!r}', folder, settings['dtype'])) from error
        n_tokens = sum(parallel.gather(n_tokens))
        if rank == 0:
            merge_parts(out)
            ownership.remove_aside(out.parent, out.name)
    seconds = time.perf_counter() - started
    print(f'wrote {cfg.out}: {n_tokens:,} tokens in {seconds:.1f} s, {n_tokens / seconds:,.0f} '
          f'tokens/s')


if __name__ == '__main__':
    with cli.one_line_errors(resume='the finished prompts are kept, and the same command resumes '
                                    'from there',
                             memory='lower --batch_size or --max_tokens'), parallel.joined():
        main(sys.argv[1:])
