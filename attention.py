"""Attention over packed rows, and over a cache: masks, each with one method `attend`.

Token i of a row sees token j if  j <= i < ends[j]  and, with a sliding window, if also
positions[i] - positions[j] < window. So a row holds separate documents, or trees of prompts; the
top of model.py explains `positions` and `ends`, int [B, T].

| mask         | computed by                        | used by `make_masks` on `auto`             |
|--------------|------------------------------------|--------------------------------------------|
| ExplicitMask | torch, with a bool [B, 1, T, T]    | on a CPU; everywhere for whole causal rows |
| FlexMask     | FlexAttention, compiled in seconds | on CUDA with gradients, or in float32      |
| TreeMask     | a Triton kernel, ready at once     | on CUDA without gradients, in bfloat16     |
| PrefillMask  | one of these; it stores keys and values in the slots of a Cache                 |
| DecodeMask   | one new token per row, over the Cache: a Triton kernel on CUDA, else torch      |

    attend(q [B, H, T, hd], k [B, H_kv, T, hd], v [B, H_kv, T, hd], scale, softcap) -> [B, H, T, hd]

computes softmax(scale q k^T) v over the visible keys; with a softcap, a score s becomes
softcap * tanh(s / softcap). A mask of your own needs that method only. This file imports nothing
of ours and can be copied into another project.
"""

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

try:
    import triton
    import triton.language as tl
except ImportError:     # for example on macOS: attention is explicit
    triton = None


def make_masks(kind: str, positions: Tensor, ends: Tensor | None, windows: set[int | None],
               head_dim: int, softcap: float | None, x: Tensor) -> dict:
    """Return {window: mask} for one forward pass.

    kind: 'explicit', 'flex', 'tree', or 'auto' for the fastest
    ends: None if each row is one document, perhaps followed by padding
    x: hidden states, whose device and type decide which mask is the fastest
    """
    if ends is None:
        if windows == {None} and not softcap:   # cuDNN: 1.2 ms, FlexAttention 1.8 (Llama 3.1 8B)
            return {None: ExplicitMask()}
        ends = torch.full_like(positions, positions.shape[1])
    kind = fastest(x, head_dim) if kind == 'auto' else kind
    if kind == 'tree':
        return {w: TreeMask(positions, ends, w, head_dim) for w in windows}
    if kind == 'flex':
        return {w: FlexMask(positions, ends, w, flex_options(head_dim, x)) for w in windows}
    return {w: ExplicitMask(visible_keys(positions, ends, w)) for w in windows}


def fastest(x: Tensor, head_dim: int) -> str:
    if kernels_apply(x):
        return 'tree'
    # FlexAttention's kernels need heads of at least 16 numbers
    return 'flex' if x.is_cuda and triton is not None and head_dim >= 16 else 'explicit'


def kernels_apply(x: Tensor) -> bool:
    """Return whether Triton kernels without gradients may compute what is computed from x."""
    return (not torch.compiler.is_compiling() and not torch.is_grad_enabled()
            and triton is not None and x.is_cuda and x.dtype == torch.bfloat16)


# ---- The plain version: an explicit mask ---------------------------------------------------------

def visible_keys(positions: Tensor, ends: Tensor, window: int | None) -> Tensor:
    """Return bool [B, 1, T, T]: may the token at row index i (axis 2) see the one at j (axis 3)?"""
    index = torch.arange(ends.shape[1], device=ends.device)
    visible = (index <= index[:, None]) & (index[:, None] < ends[:, None, :])
    if window is not None:
        visible = visible & (positions[:, :, None] - positions[:, None, :] < window)
    return visible[:, None]


class ExplicitMask:
    """A matrix of the visible keys [B, 1, T, T]; with None each token sees all before it."""

    def __init__(self, visible: Tensor | None = None):
        self.visible = visible

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None):
        visible, group = self.visible, q.shape[1] // k.shape[1]
        if softcap is None:
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=visible, is_causal=visible is None, scale=scale,
                enable_gqa=group > 1)
        if visible is None:
            visible = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        # cap before masking: minus infinity would be capped to -softcap
        scores = softcap * torch.tanh((q @ k.mT).float() * scale / softcap)
        return scores.masked_fill(~visible, -torch.inf).softmax(-1).to(v.dtype) @ v


# ---- With gradients on CUDA: FlexAttention -------------------------------------------------------

compiled: Callable = functools.cache(torch.compile)     # called once per function and options


class FlexMask:
    """FlexAttention's BlockMask; `options` are its kernel_options.

    Outside CUDA it runs uncompiled, slowly and without gradients: for tests.
    """

    def __init__(self, positions: Tensor, ends: Tensor, window: int | None, options: dict):
        def visible(b, h, i, j):
            seen = (j <= i) & (i < ends[b, j])
            if window is not None:
                seen = seen & (positions[b, i] - positions[b, j] < window)
            return seen
        B, T = ends.shape
        # With a static length making the mask takes 0.1 ms instead of 0.4, but Triton unrolls the
        # row: at 16,384 tokens compiling takes two minutes.
        dynamic = True if T > 4096 else None
        make = compiled(create_block_mask, dynamic=dynamic) if ends.is_cuda else create_block_mask
        self.block_mask = make(visible, B, None, T, T, device=str(ends.device))
        self.options = options

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None):
        attend: Callable = flex_attention
        cap = cap_scores
        if q.is_cuda and not torch.compiler.is_compiling():     # the block is not compiled
            attend, cap = compiled(flex_attention, dynamic=False), cached_cap_scores
        return attend(q, k, v, score_mod=cap(softcap) if softcap else None,
                      block_mask=self.block_mask, scale=scale,
                      enable_gqa=q.shape[1] != k.shape[1], kernel_options=self.options)


def cap_scores(softcap: float) -> Callable:
    """Return softcap * tanh(score / softcap) as a score_mod, by a sigmoid at half the cost."""
    def cap(score, b, h, i, j):
        return 2 * softcap * torch.sigmoid(score * (2 / softcap)) - softcap
    return cap


# torch.compile compiles attention again for another function object
cached_cap_scores = functools.cache(cap_scores)


# Block sizes of FlexAttention by head_dim: the fastest of some twenty on an H200 in bfloat16 with
# 8,192 tokens. Forward and backward take 1.5, 1.8 and 1.0 ms for the heads of Gemma 2 2B, Llama 3.1
# 8B and Llama 3.2 1B, instead of 2.4, 1.8 and 1.2 ms with the defaults.
HOPPER_OPTIONS = {
    256: {'fwd_BLOCK_M': 128, 'fwd_BLOCK_N': 64, 'fwd_num_warps': 8, 'fwd_num_stages': 2,
          'bwd_BLOCK_M1': 64, 'bwd_BLOCK_N1': 64, 'bwd_BLOCK_M2': 128, 'bwd_BLOCK_N2': 32,
          'bwd_num_warps': 8, 'bwd_num_stages': 2},
    128: {'fwd_BLOCK_M': 64, 'fwd_BLOCK_N': 64, 'fwd_num_warps': 4, 'fwd_num_stages': 3},
    64: {'fwd_BLOCK_M': 128, 'fwd_BLOCK_N': 64, 'fwd_num_warps': 4, 'fwd_num_stages': 3,
         'bwd_BLOCK_M1': 64, 'bwd_BLOCK_N1': 64, 'bwd_BLOCK_M2': 64, 'bwd_BLOCK_N2': 64,
         'bwd_num_warps': 4, 'bwd_num_stages': 3},
}


def flex_options(head_dim: int, x: Tensor) -> dict:
    """Return FlexAttention's kernel_options for the device and type of x; {} for the defaults."""
    hopper = x.is_cuda and torch.cuda.get_device_capability(x.device) == (9, 0)
    return HOPPER_OPTIONS.get(head_dim, {}) if hopper and x.dtype == torch.bfloat16 else {}


# ---- Without gradients on CUDA: a Triton kernel that is ready without torch.compile --------------

LOG2E = math.log2(math.e)   # exp(x) = exp2(x * LOG2E), which is faster
# Queries and keys of a block, warps and stages of `_attend` by head_dim: the fastest of 6 to 20 on
# an H200 in bfloat16 with rows of MMLU
BLOCKS = {64: (64, 32, 4, 2), 128: (64, 64, 4, 2), 256: (128, 64, 8, 2)}


class TreeMask:
    """Which blocks of keys each block of queries sees; blocks that it does not see cost nothing.

    Attention has no gradients. Sums and products are float32 and are rounded once, at the end.
    """

    def __init__(self, positions: Tensor, ends: Tensor, window: int | None, head_dim: int):
        B, T = ends.shape
        self.positions, self.ends, self.window = positions.int(), ends.int(), window or 0
        self.width = triton.next_power_of_2(max(16, head_dim))
        self.options = BLOCKS[min(256, max(64, self.width))]
        M, N = self.options[:2]

        def in_blocks(x, size):     # [B, blocks, size]
            return F.pad(x, (0, -T % size)).view(B, -1, size)
        first = torch.arange(0, T, M, device=ends.device)[:, None]  # query of each block of queries
        key = torch.arange(0, T, N, device=ends.device)
        end = in_blocks(self.ends, N)[:, None]
        seen = (end.amax(-1) > first) & (key < first + M)       # [B, blocks of queries, of keys]
        full = (end.amin(-1) >= first + M) & (key + N <= first + 1)
        if window:
            i, j = in_blocks(self.positions, M)[:, :, None], in_blocks(self.positions, N)[:, None]
            seen &= i.amin(-1) - j.amax(-1) < window
            full &= i.amax(-1) - j.amin(-1) < window
        self.n_full, self.n_seen = full.sum(-1).int(), seen.sum(-1).int()
        # first the blocks that every query sees completely, then those that need the mask
        order = (full.byte() + seen.byte()).argsort(dim=-1, descending=True, stable=True)
        self.blocks = order.int()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None):
        B, H, T, hd = q.shape
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        out = torch.empty(B, T, H, hd, dtype=q.dtype, device=q.device).transpose(1, 2)
        M, N, warps, stages = self.options
        _attend[triton.cdiv(T, M), B * H](
            q, k, v, out, self.positions, self.ends, self.blocks, self.n_full, self.n_seen,
            *(stride for x in (q, k, v, out) for stride in x.stride()[:3]), T,
            self.blocks.shape[-1], H, H // k.shape[1], hd, scale * LOG2E,
            softcap * LOG2E if softcap else 0.0, self.window, WIDTH=self.width, BLOCK_M=M,
            BLOCK_N=N, num_warps=warps, num_stages=stages)
        return out


if triton is not None:
    @triton.jit
    def _attend(q_ptr, k_ptr, v_ptr, out_ptr, position_ptr, end_ptr, block_ptr, full_ptr, seen_ptr,
                q_row, q_head, q_token, k_row, k_head, k_token, v_row, v_head, v_token, out_row,
                out_head, out_token, T, n_blocks, H, group, hd, scale, softcap, window,
                WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
        """FlashAttention's forward pass (Dao 2023) over the listed blocks of keys.

        A program holds BLOCK_M queries of a head, and a running maximum and sum of each softmax.
        """
        first, row = tl.program_id(0) * BLOCK_M, (tl.program_id(1) // H).to(tl.int64)
        head, block = tl.program_id(1) % H, row * tl.num_programs(0) + tl.program_id(0)
        i, d = first + tl.arange(0, BLOCK_M), tl.arange(0, WIDTH)
        q_mask = (i[:, None] < T) & (d[None, :] < hd)
        q = tl.load(q_ptr + row * q_row + head * q_head + i[:, None] * q_token + d[None, :],
                    mask=q_mask, other=0.0)
        k_ptr += row * k_row + head // group * k_head
        v_ptr += row * v_row + head // group * v_head
        position_ptr, end_ptr, block_ptr = (position_ptr + row * T, end_ptr + row * T,
                                            block_ptr + block * n_blocks)
        highest = tl.full([BLOCK_M], -1e30, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        y = tl.zeros([BLOCK_M, WIDTH], tl.float32)
        n_full, n_seen = tl.load(full_ptr + block), tl.load(seen_ptr + block)
        y, total, highest = _walk(y, total, highest, q, k_ptr, v_ptr, k_token, v_token,
                                  position_ptr, end_ptr, block_ptr, 0, n_full, i, d, T, hd, scale,
                                  softcap, window, BLOCK_N, False)
        y, total, highest = _walk(y, total, highest, q, k_ptr, v_ptr, k_token, v_token,
                                  position_ptr, end_ptr, block_ptr, n_full, n_seen, i, d, T, hd,
                                  scale, softcap, window, BLOCK_N, True)
        # a token sees itself; rows beyond T have a sum of 0
        y = y / tl.maximum(total, 1e-30)[:, None]
        tl.store(out_ptr + row * out_row + head * out_head + i[:, None] * out_token + d[None, :],
                 y.to(out_ptr.dtype.element_ty), mask=q_mask)

    @triton.jit
    def _walk(y, total, highest, q, k_ptr, v_ptr, k_token, v_token, position_ptr, end_ptr,
              block_ptr, begin, until, i, d, T, hd, scale, softcap, window, BLOCK_N: tl.constexpr,
              MASKED: tl.constexpr):
        """Add the blocks of keys `begin` to `until` of the list to the softmax and its product."""
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
            if MASKED:      # rows with no visible key so far keep the initial maximum
                weight = tl.where(seen, weight, 0.0)
            total = total * shrink + tl.sum(weight, 1)
            v = tl.load(v_ptr + j[:, None] * v_token + d[None, :], mask=mask, other=0.0)
            y = y * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision='ieee')
            highest = new_highest
        return y, total, highest


# ------------------------------------------------------------------------------------------------
# Decoding: one new token per row, and a cache of the keys and values before it
# ------------------------------------------------------------------------------------------------

SPLIT = 256     # keys per program of `_decode`; fixed, so that no row depends on the other rows


class Cache:
    """Keys and values of one layer, [slots, H_kv, size, hd]; a slot belongs to one sequence.

    The token at position p lies at place p % size. With a sliding window, size is at most the
    window: the places then hold exactly the keys that the newest token sees. Their order does not
    matter, since keys are rotated before they are stored.
    """

    def __init__(self, slots: int, heads: int, size: int, head_dim: int, like: Tensor):
        # zeros: the plain version multiplies places that are not yet in use by a weight of 0
        self.k, self.v = (like.new_zeros(slots, heads, size, head_dim) for _ in range(2))
        self.size = size


class PrefillMask:
    """`mask`, which also stores keys and values: token source[i] of a row in slot[i], place[i]."""

    def __init__(self, mask, cache: Cache, source: Tensor, slot: Tensor, place: Tensor):
        self.mask, self.cache = mask, cache
        self.source, self.slot, self.place = source, slot, place

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None):
        for kept, new in ((self.cache.k, k), (self.cache.v, v)):    # B = 1
            kept.transpose(1, 2)[self.slot, self.place] = new[0].transpose(0, 1)[self.source]
        return self.mask.attend(q, k, v, scale, softcap)


class DecodeMask:
    """Each row is one token, in slots[b] at positions[b]: store its key and value, then attend.

    longest: more than the largest position, rounded up as the caller likes; reading ends there
    """

    def __init__(self, cache: Cache, slots: Tensor, positions: Tensor, longest: int):
        self.cache, self.slots, self.positions = cache, slots, positions
        self.longest = min(longest, cache.size)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None):
        if triton is not None and q.is_cuda:
            return decode_kernel(self, q, k, v, scale, softcap)
        (B, H, _, hd), cache, slots = q.shape, self.cache, self.slots
        in_order = torch.equal(slots, torch.arange(B, device=q.device))     # nothing is copied then
        for kept, new in ((cache.k, k), (cache.v, v)):
            kept[slots, :, self.positions % cache.size] = new[:, :, 0]
        keys, values = ((x[:B] if in_order else x.index_select(0, slots))[:, :, :self.longest]
                        for x in (cache.k, cache.v))
        visible = torch.arange(self.longest, device=q.device) <= self.positions[:, None]
        # the queries of a key head take the place of tokens, since all see the same keys
        return ExplicitMask(visible[:, None, None]).attend(
            q.reshape(B, k.shape[1], -1, hd), keys, values, scale, softcap).reshape(B, H, 1, hd)


def decode_kernel(mask: DecodeMask, q: Tensor, k: Tensor, v: Tensor, scale: float,
                  softcap: float | None) -> Tensor:
    (B, H, _, hd), K, cache = q.shape, k.shape[1], mask.cache
    q, k, v = (x.reshape(B, -1, hd).contiguous() for x in (q, k, v))
    slots, positions = mask.slots.contiguous(), mask.positions.contiguous()
    n_splits = triton.cdiv(mask.longest, SPLIT)
    parts = torch.empty(B, H, n_splits, hd, dtype=torch.float32, device=q.device)
    lse = torch.empty(B, H, n_splits, dtype=torch.float32, device=q.device)
    out, width = torch.empty_like(q), triton.next_power_of_2(max(16, hd))
    _decode[n_splits, K, B](
        q, k, v, cache.k, cache.v, parts, lse, slots, positions, *cache.k.stride()[:2], cache.size,
        H, H // K, hd, scale * LOG2E, softcap * LOG2E if softcap else 0.0,
        GROUP=max(16, triton.next_power_of_2(H // K)), WIDTH=width, SPLIT=SPLIT,
        BLOCK=64 if width * q.element_size() <= 512 else 32, num_warps=4, num_stages=3)
    _merge[B * H,](parts, lse, out, positions, cache.size, H, n_splits, hd, WIDTH=width,
                   SPLIT=SPLIT, num_warps=1)
    return out[:, :, None]


if triton is not None:
    @triton.jit
    def _decode(q_ptr, k_ptr, v_ptr, cache_k_ptr, cache_v_ptr, part_ptr, lse_ptr, slot_ptr,
                position_ptr, slot_stride, head_stride, size, H, group, hd, scale, softcap,
                GROUP: tl.constexpr, WIDTH: tl.constexpr, SPLIT: tl.constexpr,
                BLOCK: tl.constexpr):
        """Attention of the queries that share a key head over SPLIT keys (Dao et al. 2023).

        The program whose keys include the new one stores it, and its value, in the cache.
        """
        split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
        position = tl.load(position_ptr + row).to(tl.int32)
        length, place, begin = tl.minimum(position + 1, size), position % size, split * SPLIT
        g, d = tl.arange(0, GROUP), tl.arange(0, WIDTH)
        query = row * H + head * group + g      # among the queries of all rows
        q_mask = (g[:, None] < group) & (d[None, :] < hd)
        q = tl.load(q_ptr + query[:, None] * hd + d[None, :], mask=q_mask, other=0.0)
        new = (row * (H // group) + head) * hd + d
        new_k = tl.load(k_ptr + new, mask=d < hd, other=0.0)
        new_v = tl.load(v_ptr + new, mask=d < hd, other=0.0)
        start = tl.load(slot_ptr + row) * slot_stride + head * head_stride
        # the new key comes first; where it belongs to another split, its weight is 0
        is_new = (begin <= place) & (place < begin + SPLIT)
        highest = _scaled(tl.sum(q.to(tl.float32) * new_k.to(tl.float32)[None, :], 1), scale,
                          softcap)
        highest = tl.where(is_new, highest, -1e30)
        total = tl.where(is_new, 1.0, 0.0) + tl.zeros([GROUP], tl.float32)
        y = total[:, None] * new_v.to(tl.float32)[None, :]
        for first in range(begin, tl.minimum(begin + SPLIT, length), BLOCK):
            j = first + tl.arange(0, BLOCK)
            at = start + j[:, None] * hd + d[None, :]
            mask = (j[:, None] < length) & (d[None, :] < hd)
            k = tl.load(cache_k_ptr + at, mask=mask, other=0.0)
            v = tl.load(cache_v_ptr + at, mask=mask, other=0.0)
            seen = (j < length) & (j != place)
            score = _scaled(tl.dot(q, tl.trans(k), input_precision='ieee'), scale, softcap)
            score = tl.where(seen[None, :], score, -1e30)
            new_highest = tl.maximum(highest, tl.max(score, 1))
            shrink = tl.exp2(highest - new_highest)
            weight = tl.where(seen[None, :], tl.exp2(score - new_highest[:, None]), 0.0)
            total = total * shrink + tl.sum(weight, 1)
            y = y * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision='ieee')
            highest = new_highest
        if begin < length:
            part = query * tl.num_programs(0) + split
            tl.store(lse_ptr + part, highest + tl.log2(total), mask=g < group)
            tl.store(part_ptr + part[:, None] * hd + d[None, :], y / total[:, None], mask=q_mask)
            if is_new:
                tl.store(cache_k_ptr + start + place * hd + d, new_k, mask=d < hd)
                tl.store(cache_v_ptr + start + place * hd + d, new_v, mask=d < hd)

    @triton.jit
    def _scaled(score, scale, softcap):
        """Return scores times LOG2E; `scale` and `softcap` have that factor already."""
        if softcap > 0:     # as in `_walk`
            score = softcap * (1 - 2 / (1 + tl.exp2(score * (2.885390081777927 * scale / softcap))))
        else:
            score = score * scale
        return score

    @triton.jit
    def _merge(part_ptr, lse_ptr, out_ptr, position_ptr, size, H, n_splits, hd,
               WIDTH: tl.constexpr, SPLIT: tl.constexpr):
        """Average the splits of one query, weighted by their sums of exponentials."""
        query, d = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
        length = tl.minimum(tl.load(position_ptr + query // H) + 1, size)
        part_ptr += query * n_splits * hd
        lse_ptr += query * n_splits
        highest, total = tl.load(lse_ptr), 1.0
        y = tl.load(part_ptr + d, mask=d < hd, other=0.0)
        for split in range(1, tl.cdiv(length, SPLIT)):
            lse = tl.load(lse_ptr + split)
            new_highest = tl.maximum(highest, lse)
            shrink, weight = tl.exp2(highest - new_highest), tl.exp2(lse - new_highest)
            part = tl.load(part_ptr + split * hd + d, mask=d < hd, other=0.0)
            y, total, highest = y * shrink + part * weight, total * shrink + weight, new_highest
        tl.store(out_ptr + query * hd + d, (y / total).to(out_ptr.dtype.element_ty), mask=d < hd)
