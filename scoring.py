"""Score token trees: log-probabilities of options and tokens, by the forward pass of training.

Trees (data/tree_rows.py) are packed into rows ahead of the device, so that prompts share the tokens
of a common prefix, and only the positions that predict a scored token are multiplied by the output
matrix. Logits and log-probabilities are float32.
"""

import functools
import hashlib
import itertools
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import fused_ce
from data.eval_config import EvalConfig
from data.tree_rows import Tree, pack_alone, pack_trees, prompt_trees, stack_answers, stack_rows
from runtime import checkpoint, device, parallel, weights
from runtime.config_keys import SEQ2SEQ
from runtime.errors import CheckpointError
from runtime.memory import as_memory_allows

# A batch for a process that shares the weights and has scored all of its trees: it must still take
# part in the forward passes of the others. One row of padding, of which one token is scored.
IDLE = np.stack([np.zeros(128, int), np.zeros(128, int), np.arange(128) + 1])[:, None], [(0,) * 4]


# ---- What is computed for each scored token ------------------------------------------------------

def token_log_probs(hidden, head, at, tokens, softcap):
    """Return log p(tokens[i] | hidden[at[i]]), float32 [M, 1].

    hidden [N, D] and head [V, D] on one device; at [M], whose values may repeat, and tokens [M] on
    the CPU, so that the host does not wait for the device.
    """
    at, tokens = device.to_device(torch.stack((at, tokens)), head.device)
    label = torch.zeros(len(hidden), dtype=int)     # any label: lse does not depend on it
    lse = fused_ce.token_statistics(hidden, head, label, softcap=softcap).lse
    logits = torch.cat([(hidden[i].float() * head[k].float()).sum(1)
                        for i, k in zip(at.split(4096), tokens.split(4096), strict=True)])
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return (logits - lse[at])[:, None]


def token_statistics(hidden, head, at, tokens, softcap):
    """Return float32 [M, 4]: the log-probability of each token, the top token of the distribution
    that predicts it, the log-probability of that, and the entropy in nats.
    """
    s = fused_ce.token_statistics(hidden[device.to_device(at, head.device)], head, tokens,
                                  softcap=softcap)
    return torch.stack([-s.nll, s.top_token.float(), s.top_logit - s.lse, s.entropy], 1)


def token_states(hidden, head, at, tokens, softcap):
    """Return the hidden state that predicts each token, float32 [M, D]."""
    return hidden[device.to_device(at, head.device)].float()


# ---- Trees to values -----------------------------------------------------------------------------

def score(load, trees, pack_len=4096, batch_rows=1, deterministic=False, compute=token_log_probs,
          trim=1, dropout_seed=None, seq2seq=None, sharded=False, progress=None):
    """Yield (index, numbers, values) for each of `trees`, (index, Tree) pairs, as they are done.

    load:          returns the model; called once there is something to score
    deterministic: each tree in a row and a batch of its own
    compute:       what to compute per token: one of the three functions `token_...`
    trim:          drop trailing tokens that no score needs and round the length up to a multiple
                   of `trim`; 0: keep all
    dropout_seed:  score with the dropout of adapters, drawn by this seed; None: without
    seq2seq:       the configuration of a T5, whose encoder reads the prompts; None: a CausalLM
    sharded:       processes share the weights, so all must call this and take the same steps
    progress:      called with the number of trees of each batch once they are yielded
    numbers:       int [M], for each scored token its option, or its index in Tree.scored
    values:        float32 [M, C], as `compute` returns them
    """
    if seq2seq:
        batches = stack_answers(trees, seq2seq.decoder_start_token_id, seq2seq.eos_token_id,
                                pack_len, deterministic)
    else:
        rows = pack_alone(trees) if deterministic else pack_trees(trees, pack_len)
        batches = stack_rows(rows, 1 if deterministic else batch_rows, 0 if deterministic else trim)
    # products of the few rows that are read can be rounded in another way where processes share the
    # weights, so deterministic scores need those of all rows
    forward = functools.partial(forward_values, compute=compute, every_token=deterministic)
    for copy, scored in launch(load, batches, forward, dropout_seed, sharded):
        pairs = zip(scored, copy.values(), strict=True)
        for index, group in itertools.groupby(pairs, lambda pair: pair[0][0]):  # all of a tree
            entries, values = zip(*group)
            yield index, np.array([number for _, number, _, _ in entries]), np.array(values)
        if progress:
            progress(len({index for index, *_ in scored}))


def launch(load, batches, forward, dropout_seed, sharded):
    """Yield (HostCopy of the values, scored) of each batch of `stack_rows`.

    A thread makes batches, so the generators behind `batches`, which tokenize, run in that thread.
    A batch is yielded once the next one has been launched: the device always has work.
    """
    with ThreadPoolExecutor(1) as pool:
        ahead = deque(pool.submit(next, batches, None) for _ in range(4))

        def upcoming():
            batch = ahead.popleft().result()
            ahead.append(pool.submit(next, batches, None))
            if sharded and any(parallel.gather(batch is not None)):
                return batch or IDLE    # others still have a batch
            return batch

        try:
            if not (batch := upcoming()):
                return
            launched = deque()
            with parallel.evaluating(as_memory_allows(load),
                                     dropout=dropout_seed is not None) as model:
                while batch:
                    arrays, scored = batch
                    if dropout_seed is not None:    # the tokens decide what is dropped
                        digest = hashlib.blake2b(b''.join(array.tobytes() for array in arrays),
                                                 digest_size=8, key=str(dropout_seed).encode())
                        torch.manual_seed(int.from_bytes(digest.digest()))
                    with torch.no_grad():
                        values = as_memory_allows(
                            functools.partial(forward, model, arrays, scored))
                    if batch is not IDLE:
                        launched.append((device.HostCopy(values), scored))
                    if len(launched) == 2:
                        yield launched.popleft()
                    batch = upcoming()
                yield from launched
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def forward_values(model, arrays, scored, compute=token_log_probs, every_token=False):
    """Return `compute` of each of `scored`, [M, C], on the model's device.

    every_token: compute the last MLP for every token, not only where a prediction is read
    """
    inputs = [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
    at, tokens = (torch.tensor([entry[i] for entry in scored]) for i in (2, 3))
    rows, at = at.unique(return_inverse=True)   # a row may predict several tokens
    *inputs, rows = (device.to_device(x, model.head.device) for x in (*inputs, rows))
    hidden = model(*inputs).flatten(0, 1)[rows] if every_token else model(*inputs, at=rows)[0]
    return compute(hidden, model.head, at, tokens, model.softcap)


def option_log_probs(model, trees, **options):
    """Return the summed log-probability of every option, float64 [K] per tree; options: `score`."""
    sums = {index: trees[index].sums(numbers, values)
            for index, numbers, values in score(lambda: model, enumerate(trees), **options)}
    return [sums[index] for index in range(len(trees))]


def confidences(model, prompts, answers, deterministic=False):
    """Return the log-probability of each Answer, a float64 array [n] per prompt, in nats.

    prompts: lists of token ids; answers: a list of Answers per prompt, however generated
    """
    trees, prompt_of = [], []
    for i, (ids, group) in enumerate(zip(prompts, answers, strict=True)):
        # answers of 4096 tokens to a tree: attention can take memory by the square of its length
        parts = np.cumsum([len(answer.tokens) for answer in group]) // 4096
        for part in np.unique(parts):
            tokens = [answer.tokens for answer, k in zip(group, parts, strict=True) if k == part]
            trees.append(Tree((), [*ids], tokens, [len(ids)] * len(tokens)))
            prompt_of.append(i)
    sums = option_log_probs(model, trees, pack_len=4096, deterministic=deterministic,
                            trim=128 if model.head.is_cuda else 1)
    log_probs: list[list] = [[] for _ in prompts]
    for i, part in zip(prompt_of, sums, strict=True):
        log_probs[i].append(part)
    return [np.concatenate(parts) for parts in log_probs]


def row_lengths(cfg):
    """Return (tokens in a packed row, `trim` of `score`) that are fastest for `cfg`."""
    if not cfg.device.startswith('cuda'):
        return 4096, 1
    # longer rows repeat the shots less often; Triton compiles the kernels again for a length that
    # is not a multiple of 16, and FlexAttention for each new length
    return (32768, 128) if cfg.dtype == 'bfloat16' else (16384, 0)


def t5_config(folder):
    """Return the configuration of the T5 in `folder`; None for another model."""
    config = checkpoint.read_config(folder, seq2seq=True)
    return config if config.model_type in SEQ2SEQ else None


@dataclass
class Scorer:
    """The model of an evaluation, with its tokenizer and settings, for the kinds of tasks."""
    folder: Path | str
    tokenizer: object
    cfg: EvalConfig
    load: Callable      # returns the model; called once there is something to compute

    def score(self, task, trees, total):
        """Yield (index, numbers, values) as `score` does, with the progress of `task`."""
        compute = token_statistics if task.statistics else token_log_probs
        with parallel.progress_bar(task.label, total, task.unit) as progress:
            yield from self._score(trees, compute, progress.update)

    def states(self, prompts):
        """Return the hidden state at the end of each of `prompts`, lists of tokens: [N, D]."""
        states = {index: values[0] for index, _, values in self._score(
            enumerate(prompt_trees(prompts)), token_states)}
        return np.stack([states[i] for i in range(len(prompts))])

    def _score(self, trees, compute, progress=None):
        cfg = self.cfg
        return score(self.load, trees, cfg.pack_len, cfg.batch_rows, cfg.deterministic, compute,
                     row_lengths(cfg)[1], cfg.dropout_seed, t5_config(self.folder), cfg.shard,
                     progress)

    def require_finite(self, values, where):
        """Raise CheckpointError, with the tensor at fault, if `values` are not finite."""
        if not np.isfinite(values).all():
            raise self.bad_logits(where)

    def bad_logits(self, where):
        """Return the CheckpointError for NaN or infinite logits at `where`, a text."""
        return CheckpointError(weights.bad_logits(where, self.folder, self.cfg.dtype))
