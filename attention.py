"""Attention over packed rows: masks, each with one method `attend`.

Token i of a row sees token j if  j <= i < ends[j]  and, with a sliding window, if also
positions[i] - positions[j] < window: the function `sees`. So a row holds separate documents, or
trees of prompts; the top of model.py explains `positions` and `ends`, int [B, T].

| mask         | computed by                        | used by `make_masks` on `auto`             |
|--------------|------------------------------------|--------------------------------------------|
| ExplicitMask | torch, with a bool [B, 1, T, T]    | on a CPU; everywhere for whole causal rows |
| FlexMask     | FlexAttention, compiled in seconds | on CUDA with gradients, or in float32      |
| TreeMask     | a Triton kernel, ready at once     | on CUDA without gradients, in bfloat16     |

    attend(q [B, H, T, hd], k [B, H_kv, T, hd], v [B, H_kv, T, hd], scale, softcap) -> [B, H, T, hd]

computes softmax(scale q k^T) v over the visible keys; with a softcap, a score s becomes
softcap * tanh(s / softcap). A mask of your own needs that method only. decoding/cache.py has those
of decoding.

To change attention, edit `sees` or ExplicitMask. Faster versions name the functions that they stand
for (see runtime/fast.py); after an edit a note says so, and ExplicitMask is used everywhere. The
kernels are in triton_ops.py; the three files can be copied into another project.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

if TYPE_CHECKING or not __package__:    # in the clone, at the top level
    import triton_ops
    from runtime.fast import FastVersion
else:                                   # installed, as nanocal.attention
    from . import triton_ops
    from .runtime.fast import FastVersion

# What computes attention in training, evaluation and decoding: 'auto' is the fastest that stands
# for ExplicitMask. 'explicit' is plain torch everywhere; 'flex' is FlexAttention, and plain torch
# for decoding over a cache.
IMPLEMENTATION = 'auto'


def make_masks(kind: str, positions: Tensor, ends: Tensor | None, windows: list[int | None],
               head_dim: int, softcap: float | None, x: Tensor, compiled: bool = False) -> list:
    """Return the masks for the `windows` of all layers, equal windows sharing one.

    kind: 'explicit', 'flex', 'tree' (without gradients), or 'auto' for the fastest
    ends: None if each row is one document, perhaps followed by padding
    x: hidden states, whose device and type decide which mask is the fastest
    compiled: the blocks are compiled, and have one graph with and without gradients
    """
    T = positions.shape[1]
    if RULE.stands_for(visible_keys):
        # in a row no longer than the window, every token sees all before it
        windows = [w if w and w < T else None for w in windows]
        # cuDNN without a mask takes 1.2 ms, FlexAttention 1.8 ms (the heads of Llama 3.1 8B)
        if ends is None and not any(windows) and not softcap:
            return [ExplicitMask()] * len(windows)
    if ends is None:
        ends = torch.full_like(positions, T)
    kind = fastest(x, head_dim, compiled) if kind == 'auto' else kind
    version = {'tree': TREE, 'flex': FLEX}.get(kind)
    if version and not version.stands_for(visible_keys, ExplicitMask.attend):
        kind = 'explicit'

    def make(window):
        if kind == 'tree':
            return TreeMask(positions, ends, window, head_dim)
        if kind == 'flex':
            return FlexMask(positions, ends, window, flex_options(head_dim, x))
        return ExplicitMask(visible_keys(positions, ends, window))
    masks = {window: make(window) for window in set(windows)}
    return [masks[window] for window in windows]


def fastest(x: Tensor, head_dim: int, compiled: bool = False) -> str:
    if triton_ops.kernels_apply(x) and not compiled:
        return 'tree'
    # FlexAttention's kernels need heads of at least 16 numbers
    return 'flex' if triton_ops.available(x) and head_dim >= 16 else 'explicit'


# ---- The plain version: an explicit mask ---------------------------------------------------------

def sees(i: Tensor, j: Tensor, i_position: Tensor, j_position: Tensor, j_end: Tensor,
         window: int | None) -> Tensor:
    """Return whether the token at row index i sees the one at j: the rule of all masks.

    i_position, j_position: the positions of the two in their texts; j_end: ends[j]
    """
    visible = (j <= i) & (i < j_end)
    return visible if window is None else visible & (i_position - j_position < window)


def visible_keys(positions: Tensor, ends: Tensor, window: int | None) -> Tensor:
    """Return bool [B, 1, T, T]: does the token at row index i, axis 2, see that at j, axis 3?"""
    index = torch.arange(ends.shape[1], device=ends.device)
    return sees(index[:, None], index, positions[:, :, None], positions[:, None], ends[:, None],
                window)[:, None]


def visible_blocks(positions: Tensor, ends: Tensor, window: int | None, M: int, N: int):
    """Return `seen` and `full`, bool [B, blocks of M queries, blocks of N keys].

    No query of the block sees a key where `seen` is false; each sees all keys where `full` is true.
    """
    B, T = ends.shape

    def in_blocks(x, size):     # [B, blocks, size]
        return F.pad(x, (0, -T % size)).view(B, -1, size)
    first = torch.arange(0, T, M, device=ends.device)[:, None]  # query of each block of queries
    key = torch.arange(0, T, N, device=ends.device)
    end = in_blocks(ends, N)[:, None]
    seen = (end.amax(-1) > first) & (key < first + M)
    full = (end.amin(-1) >= first + M) & (key + N <= first + 1)
    if window:
        i, j = in_blocks(positions, M)[:, :, None], in_blocks(positions, N)[:, None]
        seen &= i.amin(-1) - j.amax(-1) < window
        full &= i.amax(-1) - j.amin(-1) < window
    return seen, full


def in_order(rank: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many entries of each row of rank [..., n] are above 0, int [...], and the indices
    of all, the largest entry first, int [..., n]."""
    order = rank.byte().argsort(dim=-1, descending=True, stable=True)
    return (rank > 0).sum(-1).int(), order.int()


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
            return sees(i, j, positions[b, i], positions[b, j], ends[b, j], window)
        seen, full = (blocks[:, None] for blocks in
                      visible_blocks(positions, ends, window, 128, 128))
        # create_block_mask takes 7 to 20 s to compile (T = 4,096); uncompiled it stores T x T
        # numbers
        self.block_mask = BlockMask.from_kv_blocks(
            *in_order(seen & ~full), *in_order(full), mask_mod=visible,
            seq_lengths=(ends.shape[1],) * 2)
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
    """Return softcap * tanh(score / softcap) as a score_mod: a sigmoid takes half the time."""
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
    """Return FlexAttention's kernel_options for the device and type of x."""
    hopper = x.is_cuda and torch.cuda.get_device_capability(x.device) == (9, 0)
    sizes = HOPPER_OPTIONS.get(head_dim, {}) if hopper and x.dtype == torch.bfloat16 else {}
    # its kernel for fewer than 128 queries cannot be compiled for every shape
    return {'BACKEND': 'TRITON', **sizes} if x.is_cuda else sizes


# ---- Without gradients on CUDA: a Triton kernel --------------------------------------------------

class TreeMask:
    """Which blocks of keys each block of queries sees; blocks that it does not see cost nothing.

    Attention has no gradients. Sums and products are float32 and are rounded once, at the end.
    """

    def __init__(self, positions: Tensor, ends: Tensor, window: int | None, head_dim: int):
        self.positions, self.ends, self.window = positions.int(), ends.int(), window
        self.width = triton_ops.triton.next_power_of_2(max(16, head_dim))
        self.options = triton_ops.BLOCKS[min(256, max(64, self.width))]
        seen, full = visible_blocks(self.positions, self.ends, window, *self.options[:2])
        self.n_full = full.sum(-1).int()
        # first the blocks that every query sees completely, then those that need the mask
        self.n_seen, self.blocks = in_order(full.byte() + seen.byte())

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None):
        return triton_ops.tree_kernel(self, q, k, v, scale, softcap)


# ---- What the faster versions stand for ----------------------------------------------------------

SEEN = {'attention.visible_keys': 'ce7adce5', 'attention.sees': '3a266bd9'}
# without a window a token sees all before it in its text, with one the last ones
RULE = FastVersion('attention without a mask, and a cache of the window', SEEN)
FLEX, TREE = (FastVersion(mask, SEEN | {'attention.ExplicitMask.attend': 'e9ec7179'})
              for mask in (FlexMask, TreeMask))
