"""The cache of keys and values, and the masks that use it; attention.py explains masks."""

import torch
from torch import Tensor

import attention
from attention import ExplicitMask
from runtime.fast import FastVersion
from speed import kernels
from speed.masks import CAUSAL


class Cache:
    """Keys and values of one layer, [slots, H_kv, size, hd]; a slot belongs to one sequence.

    The token at position p is stored at index p % size of its slot, which holds the last `size`
    tokens, in any order, since keys are rotated before they are stored.
    """

    def __init__(self, slots: int, heads: int, size: int, head_dim: int, like: Tensor,
                 window: int | None = None):
        # zeros: the plain version multiplies entries that are not yet in use by a weight of 0
        self.k, self.v = (like.new_zeros(slots, heads, size, head_dim) for _ in range(2))
        self.size, self.window = size, window


def keys_to_keep(window: int | None, length: int) -> int:
    """Return how many of the last tokens of a text of `length` tokens later ones may see."""
    by_window = window and CAUSAL.stands_for(attention.visible_keys)
    return min(window, length) if by_window else length


class PrefillMask:
    """`mask`, which also stores keys and values: token source[i] of a row at slot[i], index[i]."""

    def __init__(self, mask, cache: Cache, source: Tensor, slot: Tensor, index: Tensor):
        self.mask, self.cache = mask, cache
        self.source = source
        self.slot = slot
        self.index = index

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None):
        for cached, new in ((self.cache.k, k), (self.cache.v, v)):      # B = 1
            cached.transpose(1, 2)[self.slot, self.index] = new[0].transpose(0, 1)[self.source]
        return self.mask.attend(q, k, v, scale, softcap)


class DecodeMask:
    """One new token per sequence, in slots[b] at positions[b]: store its key and value, attend.
    longest: above all positions; kernel: use it on CUDA, if it stands for the explicit mask.
    """

    def __init__(self, cache: Cache, slots: Tensor, positions: Tensor, longest: int,
                 kernel: bool = True):
        self.cache = cache
        self.slots = slots
        self.positions = positions
        self.kernel = kernel
        self.longest = min(longest, cache.size)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None):
        if self.kernel and kernels.available(q) and DECODE.stands_for(
                DecodeMask.plainly, DecodeMask.visible, attention.sees, ExplicitMask.attend):
            return kernels.decode_kernel(self, q, k, v, scale, softcap)
        return self.plainly(q, k, v, scale, softcap)

    def plainly(self, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None):
        B, H, _, hd = q.shape
        cache = self.cache
        slots = self.slots
        # nothing is copied then; on CUDA the question cannot be part of a graph
        in_order = not q.is_cuda and torch.equal(slots, torch.arange(B))
        for cached, new in ((cache.k, k), (cache.v, v)):
            cached[slots, :, self.positions % cache.size] = new[:, :, 0]
        keys, values = ((x[:B] if in_order else x.index_select(0, slots))[:, :, :self.longest]
                        for x in (cache.k, cache.v))
        # the queries that share a key head are passed as T, since all see the same keys
        return ExplicitMask(self.visible()[:, None, None]).attend(
            q.reshape(B, k.shape[1], -1, hd), keys, values, scale, softcap).reshape(B, H, 1, hd)

    def visible(self) -> Tensor:
        """Return which keys of its slot each token sees, bool [B, longest]."""
        newest, size = self.positions[:, None], self.cache.size
        index = torch.arange(self.longest, device=newest.device)
        position = newest - (newest - index) % size     # of the key at this index; negative: none
        return (position >= 0) & attention.sees(newest, position, newest, position, newest + 1,
                                                self.cache.window)


DECODE = FastVersion(kernels.decode_kernel, {
    'cache.DecodeMask.plainly': 'ed6ae538', 'cache.DecodeMask.visible': 'a575d085',
    'attention.sees': '3a266bd9', 'attention.ExplicitMask.attend': 'e9ec7179'})
