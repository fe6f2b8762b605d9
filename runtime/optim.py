"""AdamW that loses nothing to bfloat16.

A bfloat16 weight has 8 significant bits. At a learning rate of 5e-6, a weight above 0.0026 never
changes: its update is less than half the distance to the next bfloat16 number. There are two
remedies:

    exact        An int16 beside each weight holds the missing bits of float32; the two together are
                 the float32 master weight. The moments are float32: 12 bytes per weight, plus the
                 gradient.
    stochastic   Weights and moments are bfloat16 and are rounded up or down at random, correctly on
                 average: 6 bytes per weight, plus the gradient.

Float32 weights are updated as they are. This file imports nothing of ours.
"""

import functools
import itertools
import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


# Weights of a tensor that is updated together with others: copying so few takes less time than a
# launch of their own. Gemma 3 270M has 181 such tensors of 236.
SMALL = 2 ** 20


class AdamW(torch.optim.Optimizer):
    """The update of torch.optim.AdamW, computed in float32 whatever the weights are.

    `stochastic` (see above) applies to bfloat16 weights only. Parameters may be DTensors: each
    process updates its part, with random numbers that depend on its `rank`. A step is `begin`, one
    or more backward passes, `step`.

    Source: Loshchilov and Hutter 2019, algorithm 2, with the learning rate on the decay as well.
    """

    def __init__(self, params, lr: float, betas=(0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 0.0, stochastic: bool = False, seed: int = 0,
                 rank: int = 0):
        super().__init__(params, {'lr': lr, 'weight_decay': weight_decay})
        self.betas, self.eps, self.stochastic = betas, eps, stochastic
        self.seed, self.rank = seed, rank
        self.steps = 0
        self.sums: dict[Tensor, Tensor] = {}    # parameter -> its gradient, summed in float32
        self.summing = False
        for p in self.parameters():
            half = p.dtype == torch.bfloat16
            moments = torch.bfloat16 if half and stochastic else torch.float32
            self.state[p] = {name: torch.zeros_like(p, dtype=moments, requires_grad=False)
                             for name in ('exp_avg', 'exp_avg_sq')}
            if half and not stochastic:
                self.state[p]['low_bits'] = torch.zeros_like(p, dtype=torch.int16,
                                                             requires_grad=False)
                # the garbage collector does not see the hooks of a tensor: with a bound method
                # here, optimizer and weights would never be freed
                add = weakref.WeakMethod(self._add)
                p.register_post_accumulate_grad_hook(lambda p, add=add: add()(p))

    def parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group['params']]

    def begin(self, micro_batches: int):
        """Begin a step of `micro_batches` backward passes.

        Each pass computes bfloat16 gradients. Several are summed in float32, so that each is
        rounded only once; 'stochastic' saves that memory and sums in bfloat16.
        """
        self.summing = micro_batches > 1

    def _add(self, p: Tensor):
        if not self.summing:
            return
        if p in self.sums:
            self.sums[p] += _local(p.grad)
        else:
            self.sums[p] = _local(p.grad).float()
        p.grad = None

    def gradients(self) -> list[Tensor]:
        """Return the step's gradient of this process's part of each parameter."""
        sums = self.sums if self.summing else {}
        return [sums[p] if p in sums else _local(p.grad) for p in self.parameters()]

    @torch.no_grad()
    def step(self, scale: Tensor):      # type: ignore[override]    # there is no closure
        """Update with the gradients times `scale`, a 0-dim tensor, and clear them."""
        self.steps += 1
        beta1, beta2 = self.betas
        gradients, index = iter(self.gradients()), itertools.count()
        update: Callable = _compiled_update() if scale.is_cuda else _update
        for group in self.param_groups:
            lr = group['lr']
            numbers = torch.tensor([
                1 - beta1, beta2, 1 - beta2, lr / (1 - beta1 ** self.steps),
                1 / math.sqrt(1 - beta2 ** self.steps), self.eps, 1 - lr * group['weight_decay']])
            if scale.is_cuda:
                numbers = numbers.pin_memory().to(scale.device, non_blocking=True)
            parts: dict = {}    # lists of [w, low, g, m, v], flat, that are updated together
            for p in group['params']:
                state, w, low = self.state[p], _local(p).view(-1), None
                if 'low_bits' in state:
                    w, low = w.view(torch.int16), _local(state['low_bits']).view(-1)
                parts.setdefault(w.dtype if w.numel() < SMALL else p, []).append(
                    [w, low, next(gradients).reshape(-1),
                     *(_local(state[name]).view(-1) for name in ('exp_avg', 'exp_avg_sq'))])
            for part in parts.values():
                columns = [*zip(*part)]
                whole: Any = columns if len(part) == 1 else [      # each with one tensor, or None
                    [None] if x[0] is None else [torch.cat(x)] for x in columns]
                # a constant width lets the kernel read 16 bytes at a time, whatever the length
                shape = (-1, 1024 if whole[0][0].numel() % 1024 == 0 else 1)
                seed = None
                if whole[0][0].dtype == torch.bfloat16:
                    key = self.seed, self.steps, next(index), self.rank
                    seed = torch.tensor(hash(key) % 2 ** 31, dtype=torch.int32)
                update(*(x if x is None else x.view(shape) for (x,) in whole), numbers, scale, seed)
                if len(part) > 1:
                    sizes = [w.numel() for w in columns[0]]
                    for i in (0, 1, 3, 4):      # all but the gradient
                        if columns[i][0] is not None:
                            torch._foreach_copy_(columns[i], whole[i][0].split(sizes))
        self.zero_grad()

    def zero_grad(self, set_to_none: bool = True):
        super().zero_grad(set_to_none)
        for total in self.sums.values():
            total.zero_()

    def master(self, p: Tensor) -> Tensor:
        """Return the float32 master of `p`, in full on every process."""
        low = self.state.get(p, {}).get('low_bits')
        p = p.detach()
        if hasattr(p, 'full_tensor'):
            p, low = p.full_tensor(), None if low is None else low.int().full_tensor()
        return p.float() if low is None else _join(p.view(torch.int16), low)


def _local(x: Tensor | None) -> Tensor:
    """Return this process's part of a DTensor, or a plain tensor. Importing DTensor takes 1 s."""
    if x is None:
        raise RuntimeError('a parameter has no gradient: call backward before step')
    return x.to_local() if hasattr(x, 'to_local') else x


def _join(high: Tensor, low: Tensor) -> Tensor:
    return ((high.int() << 16) + low.int()).view(torch.float32)


def _update(w, low, g, m, v, numbers, scale, seed):
    """Update w, low, m and v in place; all are matrices of the shape of g.

    Exact: w and low are int16, the two halves of the master. The upper half is the master rounded
    to the nearest bfloat16, because truncation would shrink all weights; so the lower half has a
    sign. Stochastic: `seed` is a 0-dim int32 tensor.
    """
    gain1, beta2, gain2, step_size, root2, eps, decay = numbers.unbind()
    g = g.float() * scale
    new_m = m.float() + gain1 * (g - m.float())
    new_v = beta2 * v.float() + gain2 * g * g
    x = w.float() if low is None else _join(w, low)
    x = x * decay - step_size * new_m / (new_v.sqrt() * root2 + eps)
    if low is not None:
        bits = x.view(torch.int32)
        high = (bits + 0x8000) >> 16
        low.copy_(bits - (high << 16))
        w.copy_(high)
    elif seed is not None:
        index = torch.arange(w.numel(), dtype=torch.int32, device=w.device).view(w.shape)
        noise = _noise(index, seed)
        # 16 bits each, overlapping: bits that two values share are low bits of one of them
        x, new_m, new_v = (_round(y, noise >> shift)
                           for y, shift in ((x, 0), (new_m, 8), (new_v, 16)))
    m.copy_(new_m)
    v.copy_(new_v)
    if low is None:
        w.copy_(x)


@functools.cache
def _compiled_update() -> Callable:
    # compiled twice: for the first length, and once for all other lengths
    return torch.compile(_update)


def _noise(index: Tensor, seed: Tensor) -> Tensor:
    """Return 32 random bits for each int32 index: a hash of few operations, so that it is fast."""
    # the masks make the shifts logical: an int32 shift copies the sign, and top bits would cancel
    x = (index ^ seed) * -0x61c88647
    x = (x ^ ((x >> 15) & 0x1ffff)) * 0x7feb352d
    return x ^ ((x >> 16) & 0xffff)


def _round(x: Tensor, noise: Tensor) -> Tensor:
    """Round float32 x up or down to bfloat16, the nearer more often, by 16 bits of noise."""
    bits = (x.view(torch.int32) + (noise & 0xffff)) & -0x10000
    return bits.view(torch.float32).to(torch.bfloat16)
