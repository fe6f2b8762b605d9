"""Draw tokens from logits: on a GPU by two Triton kernels, elsewhere by torch."""

import hashlib
import math

import numpy as np
import torch

from runtime.fast import FastVersion
from speed.kernels import available, tl, triton


def lowest_logits(logits, sampling):
    """Return the lowest logit [B] that may be drawn. The rules apply one after the other, as in
    transformers: temperature, top_k, top_p (Holtzman et al. 2020), min_p (arXiv 2407.01082).
    """
    lowest = logits.new_full(logits.shape[:1], -torch.inf)
    if sampling.top_k:
        lowest = logits.topk(min(sampling.top_k, logits.shape[1])).values[:, -1]
    if sampling.top_p < 1:
        # on a CPU numpy sorts in a thirtieth of torch's time
        ordered = (logits.sort(descending=True).values if logits.is_cuda else
                   torch.from_numpy(np.sort(logits.numpy())).flip(-1))
        allowed = ordered.masked_fill(ordered < lowest[:, None], -torch.inf)
        probs = ((allowed - allowed[:, :1]) / sampling.temperature).softmax(-1, dtype=torch.float64)
        # a token may be drawn if those before it have less than top_p; NaN would leave none
        n = (probs.cumsum(-1) - probs < sampling.top_p).sum(-1).clamp(min=1)
        lowest = ordered.gather(1, n[:, None] - 1)[:, 0].maximum(lowest)
    if sampling.min_p:
        lowest = lowest.maximum(logits.amax(-1) + sampling.temperature * math.log(sampling.min_p))
    return lowest


def draw(logits, uniforms, sampling, n_vocab):
    """Draw a token per row; return float32 [B, 4]: token, its log p and log q, the entropy of p.

    logits [B, V] float32 give p; q is p at the temperature, restricted by the rules and to the
    tokens below n_vocab, since the others have no text. uniforms [B] float64 in [0, 1): the token
    is the first one whose cumulated probability exceeds it.
    """
    def by(version, logits, uniforms):
        lowest = lowest_logits(logits[:, :n_vocab], sampling)
        return version(logits, uniforms, sampling.temperature, lowest, n_vocab)

    if available(logits) and DRAW.stands_for(draw_plainly):
        return by(draw_kernel, logits, uniforms)
    # a few rows at a time, which stay in the cache of a CPU: a quarter of the time
    B, V = logits.shape
    n = -(-B // max(torch.get_num_threads(), 2 ** 19 // V))
    return torch.cat([by(draw_plainly, *rows) for rows in zip(
        logits.tensor_split(n), uniforms.tensor_split(n))])


def draw_plainly(logits, uniforms, temperature, lowest, n_vocab):
    """`draw` in plain torch."""
    log_p = logits.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    z = logits[:, :n_vocab]
    if temperature == 0:
        token, log_q = z.argmax(-1), torch.zeros_like(entropy)      # the first of equal ones
    else:
        scaled = (z - z.amax(-1, keepdim=True)) / temperature
        log_qs = scaled.masked_fill(z < lowest[:, None], -torch.inf).log_softmax(-1)
        cumulated = log_qs.double().exp().cumsum(-1)
        total = cumulated[:, -1]
        target = (uniforms * total).minimum(total.nextafter(torch.zeros_like(total)))
        token = (cumulated > target[:, None]).byte().argmax(-1)     # the first one
        log_q = log_qs.gather(1, token[:, None])[:, 0]
    return torch.stack((token.float(), log_p.gather(1, token[:, None])[:, 0], log_q, entropy), 1)


def draw_kernel(logits, uniforms, temperature, lowest, n_vocab):
    """`draw` in one pass over the logits, which `_summarize` cuts into blocks."""
    (B, V), BLOCK = logits.shape, 4096
    n_blocks = triton.cdiv(V, BLOCK)
    logits, lowest = logits.contiguous(), lowest.contiguous()
    sums = torch.empty(B, 5, n_blocks, dtype=torch.float32, device=logits.device)
    out = torch.empty(B, 4, dtype=torch.float32, device=logits.device)
    options = {'GREEDY': temperature == 0, 'BLOCK': BLOCK}
    inverse = 1 / temperature if temperature else 0.0
    _summarize[n_blocks, B](logits, lowest, sums, V, n_vocab, inverse, **options, num_warps=8)
    _pick[B,](logits, lowest, sums, uniforms, out, V, n_vocab, n_blocks, inverse, **options,
              BLOCKS=triton.next_power_of_2(n_blocks), num_warps=8)
    return out


DRAW = FastVersion(draw_kernel, {'draw.draw_plainly': '47836c14'})

if triton is not None:
    @triton.jit
    def _summarize(logit_ptr, lowest_ptr, sum_ptr, V, n_vocab, inverse, GREEDY: tl.constexpr,
                   BLOCK: tl.constexpr):
        """Per block: maximum m, sums of e = exp(z - m), of e (z - m) and of the weights of q. These
        have a maximum of their own: beside higher logits that may not be drawn they could be 0.
        """
        block, n_blocks = tl.program_id(0), tl.num_programs(0)
        row, v = tl.program_id(1).to(tl.int64), block * BLOCK + tl.arange(0, BLOCK)
        z = tl.load(logit_ptr + row * V + v, mask=v < V, other=-float('inf'))
        m = tl.max(z, 0)
        e = tl.exp(z - m)
        drawn = (v < n_vocab) & (z >= tl.load(lowest_ptr + row))
        may = tl.where(drawn, z, -float('inf'))
        best = tl.max(may, 0)
        if GREEDY:      # where the first of the best tokens is
            weight = tl.argmax(may, 0).to(tl.float32)
        else:
            weight = tl.sum(tl.where(drawn, tl.exp((z - best) * inverse), 0.0), 0)
        sum_ptr += row * 5 * n_blocks + block
        tl.store(sum_ptr, m)
        tl.store(sum_ptr + n_blocks, tl.sum(e, 0))
        tl.store(sum_ptr + 2 * n_blocks, tl.sum(tl.where(v < V, e * (z - m), 0.0), 0))
        tl.store(sum_ptr + 3 * n_blocks, weight)
        tl.store(sum_ptr + 4 * n_blocks, best)

    @triton.jit
    def _pick(logit_ptr, lowest_ptr, sum_ptr, uniform_ptr, out_ptr, V, n_vocab, n_blocks, inverse,
              GREEDY: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
        """Merge the sums of a row, choose a block and then a token in it."""
        row, b = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCKS)
        sum_ptr += row * 5 * n_blocks + b
        valid = b < n_blocks
        m = tl.load(sum_ptr, mask=valid, other=-float('inf'))
        highest = tl.max(m, 0)
        scale = tl.exp(m - highest)
        e = tl.load(sum_ptr + n_blocks, mask=valid, other=0.0)
        products = tl.load(sum_ptr + 2 * n_blocks, mask=valid, other=0.0)
        total = tl.sum(e * scale, 0)
        mean = tl.sum(tl.where(valid, (products + e * (m - highest)) * scale, 0.0), 0) / total
        lse = highest + tl.log(total)
        v, lowest = tl.arange(0, BLOCK), tl.load(lowest_ptr + row)
        weight = tl.load(sum_ptr + 3 * n_blocks, mask=valid, other=0.0)
        best = tl.load(sum_ptr + 4 * n_blocks, mask=valid, other=-float('inf'))
        if GREEDY:
            block = tl.argmax(best, 0)
            token = block * BLOCK + tl.sum(tl.where(b == block, weight, 0.0), 0).to(tl.int32)
            log_q = 0.0
        else:       # in float64: one of 250,000 tokens may have a probability of 1e-7
            top = tl.max(best, 0)
            weight = weight.to(tl.float64) * tl.exp((best - top) * inverse).to(tl.float64)
            cumulated = tl.cumsum(weight, 0)
            all_weight = tl.sum(weight, 0)
            target = tl.load(uniform_ptr + row) * all_weight
            block = tl.min(tl.where(cumulated > target, b, BLOCKS), 0)
            # rounding may leave nothing above: then the last block or token that may be drawn
            block = tl.minimum(block, tl.max(tl.where(weight > 0, b, 0), 0))
            before = tl.sum(tl.where(b < block, weight, 0.0), 0)
            at = block * BLOCK + v
            z = tl.load(logit_ptr + row * V + at, mask=at < n_vocab, other=-float('inf'))
            w = tl.where((at < n_vocab) & (z >= lowest), tl.exp((z - top) * inverse), 0.0)
            inside = before + tl.cumsum(w.to(tl.float64), 0)
            first = tl.min(tl.where(inside > target, v, BLOCK), 0)
            token = block * BLOCK + tl.minimum(first, tl.max(tl.where(w > 0, v, 0), 0))
            log_q = (tl.load(logit_ptr + row * V + token) - top) * inverse - tl.log(
                all_weight).to(tl.float32)
        token = tl.minimum(token, n_vocab - 1)      # logits that are NaN
        out_ptr += row * 4
        tl.store(out_ptr, token.to(tl.float32))
        tl.store(out_ptr + 1, tl.load(logit_ptr + row * V + token) - lse)
        tl.store(out_ptr + 2, log_q)
        tl.store(out_ptr + 3, tl.log(total) - mean)


def random_numbers(seed, ids, number, count):
    """Return `count` uniform numbers for the tokens of one answer (Philox, Salmon et al. 2011)."""
    digest = hashlib.blake2b(np.array(ids, np.int64).tobytes(), digest_size=8).digest()
    key = np.array([seed, int.from_bytes(digest)], np.uint64)
    bits = np.random.Philox(key=key, counter=[0, 0, 0, number])
    return np.random.Generator(bits).random(count)
