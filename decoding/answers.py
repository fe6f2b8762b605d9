"""Generate answers to many prompts at once: the loop over steps, and what ends an answer.

Prompts are packed into rows, whose keys and values go to the slots of a cache (slots.py). Then each
step computes one token of every running answer, and one that ends makes room for the next. Random
numbers depend only on the seed, the prompt, the number of the answer and the index of the token.
"""

import functools
import math
from collections import deque
from dataclasses import dataclass, field

from decoding.slots import Batch, room, take
from runtime.errors import ConfigError
from runtime.parallel import evaluating
from speed.install import install


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
    reason: str = ''
    text: str = ''              # when it has ended: without that token, up to the stop string
    # for the loop
    n_drawn: int = 0            # answers to this prompt that were drawn before
    n_prompt: int = 0           # tokens of the prompt
    limit: int = 0              # most tokens of the answer
    slot: int = -1              # in the cache
    n_launched: int = 1         # tokens launched on the device, which is ahead of `tokens`

    @property
    def truncated(self):
        return self.reason in ('max_tokens', 'context')


def generate(model, prompts, sampling, tokenizer=None, stop_ids=(), repeats=None):
    """Yield (index of the prompt, its n Answers) as they are done; arguments as in `stream`."""
    unfinished = {i: [None] * sampling.n for i in range(len(prompts))}
    for answer in stream(model, prompts, sampling, tokenizer, stop_ids, repeats):
        if answer.reason:
            unfinished[answer.prompt][answer.number] = answer
            if all(unfinished[answer.prompt]):
                yield answer.prompt, unfinished.pop(answer.prompt)


def stream(model, prompts, sampling, tokenizer=None, stop_ids=(), repeats=None):
    """Yield the Answer to which a token was added, after each token; its `reason` ends it.

    prompts:   lists of token ids; sampling: a Sampling
    tokenizer: for the text of answers and for stop strings; None: only tokens
    stop_ids:  tokens that end an answer
    repeats:   of each prompt the number of equal ones before it, so that they get other answers;
               None: answers to equal prompts are equal
    Raises DataError for a prompt that does not fit, ConfigError for stop strings without a
    tokenizer, FloatingPointError(index of the prompt) for logits that are not finite.
    """
    if sampling.stop and tokenizer is None:
        raise ConfigError(f'stop = {sampling.stop}: stop strings need a tokenizer')
    if not prompts:
        return
    if model.head.is_cuda:
        install()
    n_slots, length = room(model, prompts, sampling)
    n_vocab = tokenizer.n_vocab if tokenizer else model.head.shape[0]
    batch = Batch(model, sampling, n_slots, length, n_vocab)
    context = model.config.max_position_embeddings
    waiting = deque(Answer(i, k, n_prompt=len(ids),
                           limit=min(sampling.max_tokens, context - len(ids)),
                           n_drawn=k + sampling.n * (repeats[i] if repeats else 0))
                    for i, ids in enumerate(prompts) for k in range(sampling.n))
    slots, launched = [None] * n_slots, deque()     # the running answer of each slot

    @functools.cache    # decoding several tokens at each step would take longer than the step
    def may_stop(token):
        """Return whether a stop string may end inside this token."""
        text = tokenizer.decode([token], start=False)
        return '\ufffd' in text or any(string[-1] in text for string in sampling.stop)

    with evaluating(model):
        while waiting or launched:
            while begun := take(waiting, slots, prompts, sampling, batch.device):
                launched.append((begun, batch.prefill(begun, prompts)))
            active = [answer for answer in slots if answer and answer.n_launched < answer.limit]
            if active:      # the device is one step ahead: an answer that ends wastes one
                launched.append((active, batch.step(active)))
            while len(launched) > bool(active):
                answers, copy = launched.popleft()
                for answer, (token, log_p, log_q, entropy) in zip(answers, copy.values().tolist()):
                    if answer.reason:       # it ended when this step had been launched
                        continue
                    if not math.isfinite(log_p + log_q + entropy):
                        raise FloatingPointError(answer.prompt)
                    answer.tokens.append(int(token))
                    answer.log_probs.append(log_p)
                    answer.sample_log_probs.append(log_q)
                    answer.entropies.append(entropy)
                    answer.reason = why_ended(answer, sampling, tokenizer, stop_ids, may_stop)
                    if answer.reason:
                        slots[answer.slot] = None
                        answer.text = text(answer, sampling.stop, tokenizer) if tokenizer else ''
                    yield answer


def why_ended(answer, sampling, tokenizer, stop_ids, may_stop):
    """Return the reason for which the last token ends an answer; '' if it does not."""
    if answer.tokens[-1] in stop_ids:
        return 'end'
    if sampling.stop and may_stop(answer.tokens[-1]):
        # as many of the last tokens as a stop string can have, with at least one byte each
        n = max(len(string.encode()) for string in sampling.stop) + 4
        if first_stop(tokenizer.decode(answer.tokens[-n:], start=False), sampling.stop) >= 0:
            return 'stop'
    if len(answer.tokens) == answer.limit:
        return 'max_tokens' if answer.limit == sampling.max_tokens else 'context'
    return ''


def first_stop(text, stop):
    """Return where the first of the strings `stop` begins in `text`; -1 if there is none."""
    return min((at for string in stop if (at := text.find(string)) >= 0), default=-1)


def text(answer, stop, tokenizer):
    """Return the text of an answer that has ended, without an incomplete character at its end."""
    n_end = answer.reason == 'end'
    whole = tokenizer.decode(answer.tokens[:len(answer.tokens) - n_end], start=False)
    return whole[:first_stop(whole, stop) if answer.reason == 'stop' else None].rstrip('\ufffd')


def to_row(answer, log_prob, per_token):
    """Return the entry of an Answer in answers.jsonl; log_prob: by `confidences`, or None."""
    row = {'text': answer.text, 'reason': answer.reason, 'n_tokens': len(answer.tokens),
           'log_prob': sum(answer.log_probs), 'sample_log_prob': sum(answer.sample_log_probs),
           'entropy': sum(answer.entropies) / len(answer.tokens)}
    if log_prob is not None:
        row |= {'scored_log_prob': log_prob, 'confidence': math.exp(min(0, log_prob))}
    keys = ('tokens', 'log_probs', 'sample_log_probs', 'entropies') if per_token else ()
    return row | {key: getattr(answer, key) for key in keys}
