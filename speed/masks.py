"""Faster masks for attention.py: FlexAttention in training, a Triton kernel without gradients.

| mask         | computed by                        | used by `make_masks` on `auto`             |
|--------------|------------------------------------|--------------------------------------------|
| FlexMask     | FlexAttention, compiled in seconds | on CUDA with gradients, or in float32      |
| TreeMask     | a Triton kernel, ready at once     | on CUDA without gradients, in bfloat16     |
| ExplicitMask | plain torch                        | otherwise, and for whole causal rows       |
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

import attention
from attention import ExplicitMask, sees
from runtime.fast import FastVersion
from speed import kernels


def make_masks(decoder, positions: Tensor, ends: Tensor | None) -> list:
    """Return attention.make_masks by the mask of decoder.attention, on 'auto' by the fastest."""
    make = maker(decoder.attention, decoder.embed_tokens.weight, decoder.config.head_dim,
                 decoder.compiled)
    return masks_by(make, decoder.config, positions, ends)


def masks_by(make: Callable, config, positions: Tensor, ends: Tensor | None) -> list:
    """Return the mask of each layer, made by `make`, or none at all for whole causal rows."""
    T, windows = positions.shape[1], config.windows
    if CAUSAL.stands_for(attention.visible_keys):
        # in a row no longer than the window, every token sees all before it
        windows = [w if w and w < T else None for w in windows]
        # cuDNN without a mask takes 1.2 ms, FlexAttention 1.8 ms (the heads of Llama 3.1 8B)
        if ends is None and not any(windows) and not config.attn_logit_softcapping:
            return [ExplicitMask()] * len(windows)
    if ends is None:
        ends = torch.full_like(positions, T)
    masks = {window: make(positions, ends, window) for window in {*windows}}
    return [masks[window] for window in windows]


def maker(kind: str, x: Tensor, head_dim: int, compiled: bool = False) -> Callable:
    """Return the function (positions, ends, window) -> mask.

    kind: 'explicit', 'flex', 'tree' (without gradients), or 'auto' for the fastest
    x: hidden states or weights, whose device and type decide which mask is the fastest
    compiled: the blocks are compiled, and have one graph with and without gradients
    """
    kind = fastest(x, head_dim, compiled) if kind == 'auto' else kind
    version = {'tree': TREE, 'flex': FLEX}.get(kind)
    if not version or not version.stands_for(attention.visible_keys, ExplicitMask.attend):
        return lambda *arguments: ExplicitMask(attention.visible_keys(*arguments))
    options = flex_options(head_dim, x) if kind == 'flex' else head_dim
    return lambda *arguments: version.kernel(*arguments, options)


def fastest(x: Tensor, head_dim: int, compiled: bool = False) -> str:
    if kernels.kernels_apply(x) and not compiled:
        return 'tree'
    # FlexAttention's kernels need heads of at least 16 numbers
    return 'flex' if kernels.available(x) and head_dim >= 16 else 'explicit'


def visible_blocks(positions: Tensor, ends: Tensor, window: int | None, M: int, N: int):
    """Return `seen` and `full`, bool [B, blocks of M queries, blocks of N keys]: does some query of
    the block see a key, and do all queries see all keys?
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
    of all, the largest entry first, int [..., n].
    """
    order = rank.byte().argsort(dim=-1, descending=True, stable=True)
    return (rank > 0).sum(-1).int(), order.int()


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
        # create_block_mask compiles 7 to 20 s (T = 4,096); uncompiled it stores T x T numbers
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
        self.positions = positions.int()
        self.ends = ends.int()
        self.window = window
        self.width = kernels.triton.next_power_of_2(max(16, head_dim))
        self.options = kernels.BLOCKS[min(256, max(64, self.width))]
        seen, full = visible_blocks(self.positions, self.ends, window, *self.options[:2])
        self.n_full = full.sum(-1).int()
        # first the blocks that every query sees completely, then those that need the mask
        self.n_seen, self.blocks = in_order(full.byte() + seen.byte())

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None):
        return kernels.tree_kernel(self, q, k, v, scale, softcap)


SEEN = {'attention.visible_keys': 'ce7adce5', 'attention.sees': '3a266bd9'}
# without a window a token sees all before it in its text, with one the last ones
CAUSAL = FastVersion('attention without a mask, and a cache of the window', SEEN)
FLEX, TREE = (FastVersion(mask, SEEN | {'attention.ExplicitMask.attend': 'e9ec7179'})
              for mask in (FlexMask, TreeMask))
