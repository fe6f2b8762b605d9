"""The decoder's forward pass without gradients, by four Triton kernels that are ready in seconds.

They do what torch.compile does with the blocks of model.py, whose compiler takes 6 to 16 seconds to
start: attention to packed rows; residual sum and norms in one pass; the rotation of queries and
keys, and the product of the MLP, both in place. Sums and products are float32 and are rounded once,
where model.py rounds to bfloat16 in between. Matrix products are those of torch.

Token i of a row sees token j if j <= i < ends[j] and, with a sliding window w, if positions[i] -
positions[j] < w: packed documents, or trees of prompts.
"""

import functools
import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from model import FAMILIES, CausalLM, GemmaRMSNorm, rotary_angles

LOG2E = math.log2(math.e)   # exp(x) = exp2(x * LOG2E), which is faster
# Queries and keys of a block, warps and stages of `_attend` by head_dim: the fastest of 6 to 20 on
# an H200 in bfloat16 with rows of MMLU
BLOCKS = {64: (64, 32, 4, 2), 128: (64, 64, 4, 2), 256: (128, 64, 8, 2)}


def use_kernels(model: CausalLM):
    """Change `model`, on a GPU, so that the kernels of this file compute its forward pass.

    Its outputs then have no gradients. In GPT-NeoX only attention is computed by a kernel.
    """
    decoder = model.model
    if model.config.model_type in FAMILIES:
        decoder.forward = functools.partial(forward, decoder)
    else:
        decoder.masks = lambda positions, ends, windows, x: {
            w: TreeMask(positions, ends, w, model.config.head_dim) for w in windows}


@torch.no_grad()
def forward(decoder, tokens: Tensor, positions: Tensor, ends: Tensor) -> Tensor:
    """Return the hidden states [B, T, D] that `Decoder.forward` returns, up to rounding."""
    x = decoder.embed_tokens(tokens)
    if decoder.embed_scale != 1:
        x *= torch.tensor(decoder.embed_scale, dtype=x.dtype)
    windows = [w if w and w < tokens.shape[1] else None for w in decoder.config.windows]
    masks = {w: TreeMask(positions, ends, w, decoder.config.head_dim) for w in set(windows)}
    cos, sin = rotary_angles(positions, decoder.config, x.dtype)
    following = [layer.input_layernorm for layer in decoder.layers[1:]] + [decoder.norm]
    h = add_and_norm(x, None, None, decoder.layers[0].input_layernorm)
    for layer, window, next_norm in zip(decoder.layers, windows, following, strict=True):
        after, before, last = (
            (layer.post_attention_layernorm, layer.pre_feedforward_layernorm,
             layer.post_feedforward_layernorm) if layer.norms_after else
            (None, layer.post_attention_layernorm, None))
        h = add_and_norm(x, attention(layer.self_attn, h, cos, sin, masks[window]), after, before)
        gate, up = layer.mlp.gate_proj(h), layer.mlp.up_proj(h)
        h = add_and_norm(x, layer.mlp.down_proj(multiply(gate, up, layer.mlp.activation)),
                         last, next_norm)
    return h


def attention(layer, h: Tensor, cos: Tensor, sin: Tensor, mask) -> Tensor:
    """Return what model.Attention returns for `h` [B, T, D]."""
    q, k, v = (project(h).unflatten(-1, (-1, layer.head_dim))       # [B, T, heads, hd]
               for project in (layer.q_proj, layer.k_proj, layer.v_proj))
    if layer.qk_norm:
        q, k = add_and_norm(q, None, None, layer.q_norm), add_and_norm(k, None, None, layer.k_norm)
    for heads in (q, k):
        n, hd = heads.shape[2:]
        _rotate[heads.numel() // (n * hd),](
            heads, cos, sin, n, hd // 2, HEADS=triton.next_power_of_2(n),
            HALF=triton.next_power_of_2(hd // 2))
    y = mask.attend(*(x.transpose(1, 2) for x in (q, k, v)), layer.scale, layer.softcap)
    return layer.o_proj(y.transpose(1, 2).flatten(2))


def add_and_norm(x: Tensor, y: Tensor | None, after, norm) -> Tensor:
    """Add `y`, normed by `after`, to x [..., D] in place, and return x normed by `norm`.

    y: None to add nothing; after: None to add y as it is; both norms are of model.py
    """
    out, D = torch.empty_like(x), x.shape[-1]
    width = triton.next_power_of_2(D)
    _add_and_norm[x.numel() // D,](
        x, y, after.weight if after else None, norm.weight, out, D, norm.eps, ADD=y is not None,
        AFTER=after is not None, GEMMA=isinstance(norm, GemmaRMSNorm), WIDTH=width,
        num_warps=min(16, max(1, width // 256)))
    return out


def multiply(gate: Tensor, up: Tensor, activation) -> Tensor:
    """Return activation(gate) * up, in the memory of `gate`; SiLU, or the GELU of Gemma."""
    n, block = gate.numel(), 4096
    _multiply[triton.cdiv(n, block),](gate, up, n, SILU=activation is F.silu, BLOCK=block,
                                      num_warps=8)
    return gate


class TreeMask:
    """Which blocks of keys each block of queries sees, in packed rows.

    positions, ends: int [B, T], see above; window: the sliding window or None
    """

    def __init__(self, positions: Tensor, ends: Tensor, window: int | None, head_dim: int):
        B, T = ends.shape
        self.positions, self.ends, self.window = positions.int(), ends.int(), window or 0
        self.width = triton.next_power_of_2(max(16, head_dim))
        self.options = BLOCKS[min(256, max(64, self.width))]
        M, N = self.options[:2]

        def in_blocks(x, size):     # [B, blocks, size]
            return F.pad(x, (0, -T % size)).view(B, -1, size)
        first = torch.arange(0, T, M, device=ends.device)[:, None]      # of the queries of a block
        key = torch.arange(0, T, N, device=ends.device)
        end = in_blocks(self.ends, N)[:, None]
        seen = (end.amax(-1) > first) & (key < first + M)       # [B, blocks of queries, of keys]
        full = (end.amin(-1) >= first + M) & (key + N <= first + 1)
        if window:
            i, j = in_blocks(self.positions, M)[:, :, None], in_blocks(self.positions, N)[:, None]
            seen &= i.amin(-1) - j.amax(-1) < window
            full &= i.amax(-1) - j.amin(-1) < window
        self.n_full, self.n_seen = full.sum(-1).int(), seen.sum(-1).int()
        # first the blocks that every query sees whole, then those that need the mask
        order = (full.byte() + seen.byte()).argsort(dim=-1, descending=True, stable=True)
        self.blocks = order.int()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None):
        """Return the attention [B, H, T, hd] of q [B, H, T, hd] to k and v [B, H_kv, T, hd].

        softcap: cap of the scores, softcap * tanh(score / softcap), or None
        """
        B, H, T, hd = q.shape
        out = torch.empty(B, T, H, hd, dtype=q.dtype, device=q.device).transpose(1, 2)
        M, N, warps, stages = self.options
        _attend[triton.cdiv(T, M), B * H](
            q, k, v, out, self.positions, self.ends, self.blocks, self.n_full, self.n_seen,
            *(stride for x in (q, k, v, out) for stride in x.stride()[:3]), T,
            self.blocks.shape[-1], H, H // k.shape[1], hd, scale * LOG2E,
            softcap * LOG2E if softcap else 0.0, self.window, WIDTH=self.width, BLOCK_M=M,
            BLOCK_N=N, num_warps=warps, num_stages=stages)
        return out


@triton.jit
def _attend(q_ptr, k_ptr, v_ptr, out_ptr, position_ptr, end_ptr, block_ptr, full_ptr, seen_ptr,
            q_row, q_head, q_token, k_row, k_head, k_token, v_row, v_head, v_token, out_row,
            out_head, out_token, T, n_blocks, H, group, hd, scale, softcap, window,
            WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    # FlashAttention's forward pass (Dao 2023): a program holds BLOCK_M queries and walks over the
    # keys in blocks, with a running maximum and sum of each row's softmax.
    first, row = tl.program_id(0) * BLOCK_M, (tl.program_id(1) // H).to(tl.int64)
    head, place = tl.program_id(1) % H, row * tl.num_programs(0) + tl.program_id(0)
    i, d = first + tl.arange(0, BLOCK_M), tl.arange(0, WIDTH)
    q_mask = (i[:, None] < T) & (d[None, :] < hd)
    q = tl.load(q_ptr + row * q_row + head * q_head + i[:, None] * q_token + d[None, :],
                mask=q_mask, other=0.0)
    k_ptr += row * k_row + head // group * k_head
    v_ptr += row * v_row + head // group * v_head
    position_ptr, end_ptr, block_ptr = (position_ptr + row * T, end_ptr + row * T,
                                        block_ptr + place * n_blocks)
    highest = tl.full([BLOCK_M], -1e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    y = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    n_full, n_seen = tl.load(full_ptr + place), tl.load(seen_ptr + place)
    y, total, highest = _walk(y, total, highest, q, k_ptr, v_ptr, k_token, v_token, position_ptr,
                              end_ptr, block_ptr, 0, n_full, i, d, T, hd, scale, softcap, window,
                              BLOCK_N, False)
    y, total, highest = _walk(y, total, highest, q, k_ptr, v_ptr, k_token, v_token, position_ptr,
                              end_ptr, block_ptr, n_full, n_seen, i, d, T, hd, scale, softcap,
                              window, BLOCK_N, True)
    y = y / tl.maximum(total, 1e-30)[:, None]   # a token sees itself; rows beyond T have a sum of 0
    tl.store(out_ptr + row * out_row + head * out_head + i[:, None] * out_token + d[None, :],
             y.to(out_ptr.dtype.element_ty), mask=q_mask)


@triton.jit
def _walk(y, total, highest, q, k_ptr, v_ptr, k_token, v_token, position_ptr, end_ptr, block_ptr,
          begin, until, i, d, T, hd, scale, softcap, window, BLOCK_N: tl.constexpr,
          MASKED: tl.constexpr):
    # over the blocks of keys `begin` to `until` of the list
    for n in range(begin, until):
        j = tl.load(block_ptr + n) * BLOCK_N + tl.arange(0, BLOCK_N)
        mask = (j[:, None] < T) & (d[None, :] < hd) if MASKED else d[None, :] < hd
        k = tl.load(k_ptr + j[:, None] * k_token + d[None, :], mask=mask, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision='ieee')
        if softcap > 0:     # tanh(x) = 1 - 2 / (1 + exp(2 x)), with 2 LOG2E = 2.885...
            score = 1 - 2 / (1 + tl.exp2(score * (2.885390081777927 * scale / softcap)))
            factor = softcap
        else:
            factor = scale
        if MASKED:
            end = tl.load(end_ptr + j, mask=j < T, other=0)
            seen = (j[None, :] <= i[:, None]) & (i[:, None] < end[None, :])
            if window > 0:
                i_position = tl.load(position_ptr + i, mask=i < T, other=0)
                j_position = tl.load(position_ptr + j, mask=j < T, other=0)
                seen = seen & (i_position[:, None] - j_position[None, :] < window)
            score = tl.where(seen, score, -1e30)
        # the maximum of the scores, times LOG2E: `factor` is positive
        new_highest = tl.maximum(highest, tl.max(score, 1) * factor)
        shrink = tl.exp2(highest - new_highest)
        weight = tl.exp2(score * factor - new_highest[:, None])
        if MASKED:      # where nothing is seen yet, the maximum is that of nothing
            weight = tl.where(seen, weight, 0.0)
        total = total * shrink + tl.sum(weight, 1)
        v = tl.load(v_ptr + j[:, None] * v_token + d[None, :], mask=mask, other=0.0)
        y = y * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision='ieee')
        highest = new_highest
    return y, total, highest


@triton.jit
def _normed(x, weight_ptr, d, D, eps, GEMMA: tl.constexpr):
    # of one token, in the type of x; rounded where model.py rounds
    weight = tl.load(weight_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    y = x.to(tl.float32)
    y = y * tl.rsqrt(tl.sum(y * y) / D + eps)
    y = y * (1 + weight) if GEMMA else y.to(x.dtype).to(tl.float32) * weight
    return y.to(x.dtype)


@triton.jit
def _add_and_norm(x_ptr, y_ptr, after_ptr, weight_ptr, out_ptr, D, eps, ADD: tl.constexpr,
                  AFTER: tl.constexpr, GEMMA: tl.constexpr, WIDTH: tl.constexpr):
    d = tl.arange(0, WIDTH)
    at = tl.program_id(0).to(tl.int64) * D + d
    x = tl.load(x_ptr + at, mask=d < D, other=0.0)
    if ADD:
        y = tl.load(y_ptr + at, mask=d < D, other=0.0)
        if AFTER:
            y = _normed(y, after_ptr, d, D, eps, GEMMA)
        x = (x.to(tl.float32) + y.to(tl.float32)).to(x.dtype)
        tl.store(x_ptr + at, x, mask=d < D)
    tl.store(out_ptr + at, _normed(x, weight_ptr, d, D, eps, GEMMA), mask=d < D)


@triton.jit
def _rotate(x_ptr, cos_ptr, sin_ptr, n_heads, half, HEADS: tl.constexpr, HALF: tl.constexpr):
    # one token: the pairs (x[d], x[d + half]) of its heads
    token, head, d = tl.program_id(0).to(tl.int64), tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)
    mask = (head < n_heads) & (d < half)[None, :]
    cos = tl.load(cos_ptr + token * half + d, mask=d < half, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + token * half + d, mask=d < half, other=0.0).to(tl.float32)[None, :]
    at = x_ptr + (token * n_heads + head) * 2 * half + d[None, :]
    a = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(at + half, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, (a * cos - b * sin).to(x_ptr.dtype.element_ty), mask=mask)
    tl.store(at + half, (b * cos + a * sin).to(x_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _multiply(gate_ptr, up_ptr, n, SILU: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(gate_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    if SILU:
        y = x * tl.sigmoid(x)
    else:       # x / 2 (1 + tanh(z)) = x sigmoid(2 z), with sqrt(2 / pi) = 0.79788...
        y = x * tl.sigmoid(2 * 0.7978845608028654 * (x + 0.044715 * x * x * x))
    tl.store(gate_ptr + at, (y * up).to(gate_ptr.dtype.element_ty), mask=at < n)
