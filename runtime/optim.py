"""AdamW that loses nothing to bfloat16.

A bfloat16 weight has 8 significant bits. At a learning rate of 5e-6, a weight above 0.0026 never
changes: its update is less than half the distance to the next bfloat16 number. Remedies:

    exact        An int16 beside each weight holds the missing bits of float32; the two together are
                 the float32 master weight. The moments are float32: 12 bytes per weight, plus the
                 gradient.
    stochastic   Weights and moments are bfloat16 and are rounded up or down at random, correctly on
                 average: 6 bytes per weight, plus the gradient.
    compact      See speed/compact.py.

Float32 weights are updated as they are. On a CPU the library's update computes `_adamw` in one pass
through memory. This file imports nothing of ours.
"""

import functools
import itertools
import math
import weakref
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.adamw import adamw

# Weights of a tensor that is updated together with others: a GPU copies so few in less time than a
# CPU needs to launch their own update. Gemma 3 270M has 235 such tensors of 236.
SMALL = 2 ** 21
PIECE = 2 ** 20         # weights that a CPU updates at once: their temporary numbers are few
TINY = 1e-37            # beside eps it makes no difference

# Whether the library's update computes what a function, `_adamw`, does. In a copy of this file it
# is always used on a CPU; speed/adamw.py has a check that `_adamw` was not edited.
stands_for: Callable[[Callable], bool] = callable

# of the moments and of the bits that complete a weight
STATE = 'exp_avg', 'exp_avg_sq', 'low_bits'
DTYPES = {'float32': (torch.float32, torch.float32),
          'exact': (torch.float32, torch.float32, torch.int16),
          'stochastic': (torch.bfloat16, torch.bfloat16)}


class AdamW(torch.optim.Optimizer):
    """The update of torch.optim.AdamW, computed in float32 whatever the weights are.

    `kind` (see above) applies to bfloat16 weights only. Parameters may be DTensors: each process
    updates its part, with random numbers of its `rank`. A step is `begin`, backward passes, `step`.

    Source: Loshchilov and Hutter 2019, algorithm 2, with the learning rate on the decay as well.
    """

    def __init__(self, params, lr: float, betas=(0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 0.0, seed: int = 0, rank: int = 0,
                 kind: Literal['exact', 'stochastic'] = 'exact'):
        super().__init__(params, {'lr': lr, 'weight_decay': weight_decay})
        self.betas, self.eps = betas, eps
        self.seed, self.rank = seed, rank
        self.steps = 0
        self.sums: dict[Tensor, Tensor] = {}    # parameter -> its gradient, summed in float32
        self.summing = False
        for p in self.parameters():
            self.state[p] = self.new_state(p, kind if p.dtype == torch.bfloat16 else 'float32')
            if self.state[p].get('low_bits', p).dtype == torch.int16:   # exact
                # the garbage collector does not see the hooks of a tensor: with a bound method
                # here, optimizer and weights would never be freed
                add = weakref.WeakMethod(self._add)
                p.register_post_accumulate_grad_hook(lambda p, add=add: add()(p))

    def new_state(self, p: Tensor, kind: str) -> dict[str, Tensor]:
        """Return the moments of a parameter, and what completes it to float32, all of zeros."""
        return {name: torch.zeros_like(p, dtype=dtype, requires_grad=False)
                for name, dtype in zip(STATE, DTYPES[kind])}

    def parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group['params']]

    def begin(self, micro_batches: int):
        """Begin a step of `micro_batches` backward passes, whose bfloat16 gradients are summed in
        float32, so that each is rounded once; 'stochastic' sums in bfloat16.
        """
        self.summing = micro_batches > 1

    def _add(self, p: Tensor):
        if not self.summing:
            return
        if p in self.sums:
            self.sums[p] += local(p.grad)
        else:
            self.sums[p] = local(p.grad).float()
        p.grad = None

    def gradients(self) -> list[Tensor]:
        """Return the step's gradient of this process's part of each parameter."""
        sums = self.sums if self.summing else {}
        return [sums[p] if p in sums else local(p.grad) for p in self.parameters()]

    @functools.cached_property
    def parts(self) -> list:
        """For each group, lists [parameters, w, low, m, v, ranges]: what is updated together.

        All but the parameters are flat, this process's part of them; None where there is none.
        """
        groups = []
        for group in self.param_groups:
            parts: dict = {}
            for p in group['params']:
                w, (low, *rest) = local(p.detach()).view(-1), (
                    local(self.state[p][name]).view(-1) if name in self.state[p] else None
                    for name in ('low_bits', *STATE[:2], 'ranges'))
                if low is not None:
                    w = w.view(torch.int16)
                parts.setdefault((w.dtype, low is None or low.dtype) if w.numel() < SMALL else p,
                                 []).append([p, w, low, *rest])
            groups.append([[*zip(*part)] for part in parts.values()])
        return groups

    @torch.no_grad()
    def step(self, scale: Tensor):      # type: ignore[override]    # there is no closure
        """Update with the gradients times `scale`, a 0-dim tensor, and clear them."""
        self.steps += 1
        beta1, beta2 = self.betas
        gradients, index = dict(zip(self.parameters(), self.gradients())), itertools.count()
        for group, parts in zip(self.param_groups, self.parts):
            lr, decay = group['lr'], group['weight_decay']
            numbers: Any = torch.tensor([
                1 - beta1, beta2, 1 - beta2, lr / (1 - beta1 ** self.steps),
                1 / math.sqrt(1 - beta2 ** self.steps), self.eps, 1 - lr * decay])
            if scale.is_cuda:
                numbers = numbers.pin_memory().to(scale.device, non_blocking=True)
            elif stands_for(_adamw):
                numbers = {'lr': lr, 'beta1': beta1, 'beta2': beta2, 'eps': self.eps,
                           'weight_decay': decay, 'step': self.steps}
            for parameters, w, low, m, v, ranges in parts:
                seed = None
                if w[0].dtype == torch.bfloat16 or ranges[0] is not None:
                    key = self.seed, self.steps, next(index), self.rank
                    seed = torch.tensor(hash(key) % 2 ** 31, dtype=torch.int32)
                columns = w, low, [gradients[p].reshape(-1) for p in parameters], m, v, ranges
                (_at_once if scale.is_cuda else _in_pieces)(self.update(), columns, numbers, scale,
                                                            seed)
        self.zero_grad()

    def update(self) -> Callable:
        """Return the function that updates a part in place, see `_update`."""
        return _update

    def zero_grad(self, set_to_none: bool = True):
        super().zero_grad(set_to_none)
        if self.summing and self.sums:
            torch._foreach_zero_([*self.sums.values()])

    def master(self, p: Tensor) -> Tensor:
        """Return the float32 master of `p`, in full on every process."""
        low = self.state.get(p, {}).get('low_bits')
        p = p.detach()
        if hasattr(p, 'full_tensor'):
            p = p.full_tensor()
            low = None if low is None else low.int().full_tensor().to(low.dtype)
        return p.float() if low is None else join(p.view(torch.int16), low)


def local(x: Tensor | None) -> Tensor:
    """Return this process's part of a DTensor, or a plain tensor. Importing DTensor takes 1 s."""
    if x is None:
        raise RuntimeError('a parameter has no gradient: call backward before step')
    return x.to_local() if hasattr(x, 'to_local') else x


def join(high: Tensor, low: Tensor) -> Tensor:
    """Return the float32 whose upper bits are the int16 `high`; low: int16, or int8 if 24 bits."""
    return ((high.int() << 16) + (low.int() << 16 - 8 * low.itemsize)).view(torch.float32)


def _at_once(update, columns, numbers, scale, seed):
    """Update a part on a GPU, by compiled code, as one flat tensor.

    columns: lists of w, low, g, m, v and ranges, see `_update`, with an item per parameter
    """
    w, low, g, m, v, ranges = (x[0] if len(x) == 1 or x[0] is None else torch.cat(x)
                               for x in columns)
    # a constant width lets the kernel read 16 bytes at a time, whatever the length
    width = 1024 if w.numel() % 1024 == 0 else 1
    if ranges is not None:
        ranges = ranges.view(-1, 3)
        width = w.numel() // len(ranges)
    matrices = [x if x is None else x.view(-1, width) for x in (w, low, g, m, v)]
    for x in matrices:      # one graph for all numbers of rows; slower with ranges
        if x is not None and ranges is None:
            torch._dynamo.maybe_mark_dynamic(x, 0)
    _compiled(update)(*matrices, ranges, numbers, scale, seed)
    if len(columns[0]) > 1:
        for targets, x in zip(columns, (w, low, None, m, v, ranges)):
            if x is not None:
                torch._foreach_copy_(targets, x.view(-1).split([t.numel() for t in targets]))


def _in_pieces(update, columns, numbers, scale, seed):
    """Update a part on a CPU as `_at_once` does, with few temporary numbers."""
    first = 0
    for tensors in zip(*columns):
        n = tensors[0].numel()
        for i in range(0, n, PIECE):
            piece = (x if x is None else x[len(x) * i // n:len(x) * min(i + PIECE, n) // n]
                     for x in tensors)      # ranges are shorter than the others
            update(*piece, numbers, scale, seed, first + i)
        first += n


def _update(w, low, g, m, v, ranges, numbers, scale, seed, first=0):
    """Update w, low, m and v in place, of the shape of g; there are no ranges.

    Exact: w and low are int16, the two halves of the master. The upper half is the master rounded
    to the nearest bfloat16, because truncation would shrink all weights; so the lower half has a
    sign. Stochastic: `seed` is a 0-dim int32 tensor, `first` the index of the first weight.
    """
    x = w.float() if low is None else join(w, low)
    new_m, new_v = m.float(), v.float()
    float32_step(x, g, new_m, new_v, numbers, scale)
    if low is not None:
        split(x.view(torch.int32), w, low)
    elif seed is not None:
        noise = noise_like(w, seed, first)
        # 16 bits each, overlapping: bits that two values share are low bits of one of them
        for target, y, shift in (w, x, 0), (m, new_m, 8), (v, new_v, 16):
            target.copy_(_round(y, noise >> shift))


def float32_step(x, g, m, v, numbers, scale):
    """Do what `_adamw` does, by the update of torch where `numbers` are its arguments."""
    if not isinstance(numbers, dict):
        return _adamw(x, g, m, v, numbers, scale)
    steps = [torch.tensor(numbers['step'] - 1.0)]       # torch adds one
    options = {key: value for key, value in numbers.items() if key != 'step'}
    adamw([x], [g.float()], [m], [v], [], steps, **options, fused=True, grad_scale=1 / scale,
          amsgrad=False, maximize=False)


def _adamw(x, g, m, v, numbers, scale):
    """Update the float32 weights x and moments m and v in place, by the gradient g * scale."""
    gain1, beta2, gain2, step_size, root2, eps, decay = numbers.unbind()
    g = g.float() * scale
    m.copy_(m + gain1 * (g - m))
    v.copy_(beta2 * v + gain2 * g * g)
    x.copy_(x * decay - step_size * m * inverse(root(v) * root2 + eps))


def inverse(x):
    """Return 1 / x for x > 0, within 4 units in the last place."""
    return x.rsqrt().square()


def root(x):
    """Return the square root of x >= 0, within 3 units in the last place."""
    return x * (x + TINY).rsqrt()


def split(bits: Tensor, high: Tensor, low: Tensor):
    """Store the int32 bits of a float32 in the int16 `high` and in `low`, as `join` reads them."""
    upper = (bits + 0x8000) >> 16
    low.copy_((bits - (upper << 16)) >> 16 - 8 * low.itemsize)
    high.copy_(upper)


@functools.cache
def _compiled(update: Callable) -> Callable:
    # of the two sizes of blocks none is faster; comparing them takes a second
    return torch.compile(update, options={'triton.autotune_pointwise': False})


def noise_like(w: Tensor, seed: Tensor, first: int) -> Tensor:
    """Return 32 random bits for each of w, int32, the first of which has the index `first`."""
    index = torch.arange(first, first + w.numel(), dtype=torch.int32, device=w.device)
    return _noise(index.view(w.shape), seed)


def _noise(index: Tensor, seed: Tensor) -> Tensor:
    """Return 32 random bits for each int32 index: a fast hash of few operations."""
    # the masks make the shifts logical: an int32 shift copies the sign, and top bits would cancel
    x = (index ^ seed) * -0x61c88647
    x = (x ^ ((x >> 15) & 0x1ffff)) * 0x7feb352d
    return x ^ ((x >> 16) & 0xffff)


def _round(x: Tensor, noise: Tensor) -> Tensor:
    """Round float32 x up or down to bfloat16, the nearer more often, by 16 bits of noise."""
    bits = (x.view(torch.int32) + (noise & 0xffff)) & -0x10000
    return bits.view(torch.float32).to(torch.bfloat16)
