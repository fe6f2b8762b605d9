"""AdamW that loses nothing to bfloat16.

A bfloat16 weight has 8 significant bits. At a learning rate of 5e-6, a weight above 0.0026 never
changes: its update is less than half the distance to the next bfloat16 number. There are three
remedies:

    exact        An int16 beside each weight holds the missing bits of float32; the two together are
                 the float32 master weight. The moments are float32: 12 bytes per weight, plus the
                 gradient.
    stochastic   Weights and moments are bfloat16 and are rounded up or down at random, correctly on
                 average: 6 bytes per weight, plus the gradient.
    compact      An int8 beside each weight holds 8 of its missing bits, and the moments have 8 bits
                 each, with common scales for 32 of them in a row: 5.19 bytes per weight, plus the
                 gradient. All three are rounded at random. Where rows cannot be divided by 32, and
                 for vectors, as 'exact'.

The 8 bits of a moment are its place k on a scale that is quadratic for m and logarithmic for v. M
and V are the largest |m| and v of the 32. The bits of a positive float, read as an integer, are a
logarithm of it that is linear between powers of two. `step` is just large enough that the smallest
v is on the scale, and M, V and step are the `ranges` of the 32:

    m = M sign(k) (k / 127)^2                           k = -127 .. 127
    v = float of the bits (bits(V) - (255 - k) step)    k = 0 .. 255

So a moment far below others is off by a small part of itself, and v, in the denominator, never
becomes 0. A step changes v by a thousandth, less than half of the distance to the next k, so that
v would stay where it is if it were rounded to the nearest.

Float32 weights are updated as they are. This file imports nothing of ours.

Source of 'compact': Gonzalez Ortiz et al. 2026, FlashOptim (arXiv 2602.23349), which has other
scales and rounds to the nearest.
"""

import functools
import itertools
import math
import weakref
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor


# Weights of a tensor that is updated together with others: a GPU copies so few in less time than a
# CPU needs to launch their own update. Gemma 3 270M has 235 such tensors of 236.
SMALL = 2 ** 21
GROUP = 32              # neighbors in a row whose 8-bit moments have common ranges
WIDEST = 24 << 23       # of bits(V) - bits(v): 24 powers of two; a smaller v counts as more
TINY = 1e-37            # beside eps it makes no difference

# of the moments and of the bits that complete a weight
STATE = 'exp_avg', 'exp_avg_sq', 'low_bits'
DTYPES = {'float32': (torch.float32, torch.float32),
          'exact': (torch.float32, torch.float32, torch.int16),
          'stochastic': (torch.bfloat16, torch.bfloat16),
          'compact': (torch.int8, torch.uint8, torch.int8)}


class AdamW(torch.optim.Optimizer):
    """The update of torch.optim.AdamW, computed in float32 whatever the weights are.

    `kind` (see above) applies to bfloat16 weights only. Parameters may be DTensors: each
    process updates its part, with random numbers that depend on its `rank`. A step is `begin`, one
    or more backward passes, `step`.

    Source: Loshchilov and Hutter 2019, algorithm 2, with the learning rate on the decay as well.
    """

    def __init__(self, params, lr: float, betas=(0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 0.0, seed: int = 0, rank: int = 0,
                 kind: Literal['exact', 'stochastic', 'compact'] = 'exact'):
        super().__init__(params, {'lr': lr, 'weight_decay': weight_decay})
        self.betas, self.eps, self.seed, self.rank = betas, eps, seed, rank
        self.steps = 0
        self.sums: dict[Tensor, Tensor] = {}    # parameter -> its gradient, summed in float32
        self.summing = False
        for p in self.parameters():
            own = kind if p.dtype == torch.bfloat16 else 'float32'
            if own == 'compact' and (p.ndim != 2 or p.shape[1] % GROUP):
                own = 'exact'
            self.state[p] = {name: torch.zeros_like(p, dtype=dtype, requires_grad=False)
                             for name, dtype in zip(STATE, DTYPES[own])}
            if own == 'compact':
                self.state[p]['ranges'] = _ranges(p.detach())
            if own == 'exact':
                # the garbage collector does not see the hooks of a tensor: with a bound method
                # here, optimizer and weights would never be freed
                add = weakref.WeakMethod(self._add)
                p.register_post_accumulate_grad_hook(lambda p, add=add: add()(p))

    def parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group['params']]

    def begin(self, micro_batches: int):
        """Begin a step of `micro_batches` backward passes.

        Each pass computes bfloat16 gradients. Several are summed in float32, so that each is
        rounded only once; 'stochastic' and 'compact' save that memory and sum in bfloat16.
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

    @functools.cached_property
    def parts(self) -> list:
        """For each group, lists [parameters, w, low, m, v, ranges]: what is updated together.

        All but the parameters are flat, this process's part of them; None where there is none.
        """
        groups = []
        for group in self.param_groups:
            parts: dict = {}
            for p in group['params']:
                w, (low, *rest) = _local(p.detach()).view(-1), (
                    _local(self.state[p][name]).view(-1) if name in self.state[p] else None
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
        update: Callable = _compiled(_update) if scale.is_cuda else _update
        for group, parts in zip(self.param_groups, self.parts):
            lr = group['lr']
            numbers = torch.tensor([
                1 - beta1, beta2, 1 - beta2, lr / (1 - beta1 ** self.steps),
                1 / math.sqrt(1 - beta2 ** self.steps), self.eps, 1 - lr * group['weight_decay']])
            if scale.is_cuda:
                numbers = numbers.pin_memory().to(scale.device, non_blocking=True)
            for parameters, *columns in parts:
                columns.append([gradients[p].reshape(-1) for p in parameters])
                w, low, m, v, ranges, g = (x[0] if len(x) == 1 or x[0] is None else torch.cat(x)
                                           for x in columns)
                # a constant width lets the kernel read 16 bytes at a time, whatever the length
                width = 1024 if w.numel() % 1024 == 0 else 1
                seed = None
                if w.dtype == torch.bfloat16 or ranges is not None:
                    key = self.seed, self.steps, next(index), self.rank
                    seed = torch.tensor(hash(key) % 2 ** 31, dtype=torch.int32)
                if ranges is not None:
                    width, ranges = GROUP, ranges.view(-1, 3)
                matrices = [x if x is None else x.view(-1, width) for x in (w, low, g, m, v)]
                for x in matrices:      # one graph for all numbers of rows; slower with ranges
                    if x is not None and x.is_cuda and ranges is None:
                        torch._dynamo.maybe_mark_dynamic(x, 0)
                update(*matrices, ranges, numbers, scale, seed)
                if len(parameters) > 1:
                    for targets, x in zip(columns, (w, low, m, v, ranges)):
                        if x is not None:
                            torch._foreach_copy_(
                                targets, x.view(-1).split([t.numel() for t in targets]))
        self.zero_grad()

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
        return p.float() if low is None else _join(p.view(torch.int16), low)


def _local(x: Tensor | None) -> Tensor:
    """Return this process's part of a DTensor, or a plain tensor. Importing DTensor takes 1 s."""
    if x is None:
        raise RuntimeError('a parameter has no gradient: call backward before step')
    return x.to_local() if hasattr(x, 'to_local') else x


def _ranges(p: Any) -> Tensor:
    """Return zeros [rows, 3 * columns / GROUP], bfloat16, sharded over the rows as the matrix p."""
    rows, columns = p.shape[0], 3 * p.shape[1] // GROUP
    local = _local(p).new_zeros(len(_local(p)), columns)
    if not hasattr(p, 'to_local'):
        return local
    return type(p).from_local(local, p.device_mesh, p.placements, run_check=False,
                              shape=torch.Size((rows, columns)), stride=(columns, 1))


def _join(high: Tensor, low: Tensor) -> Tensor:
    """Return the float32 whose upper bits are the int16 `high`; low: int16, or int8 if 24 bits."""
    return ((high.int() << 16) + (low.int() << 16 - 8 * low.itemsize)).view(torch.float32)


def _update(w, low, g, m, v, ranges, numbers, scale, seed):
    """Update w, low, m, v and ranges in place; all but ranges are matrices of the shape of g.

    Exact: w and low are int16, the two halves of the master. The upper half is the master rounded
    to the nearest bfloat16, because truncation would shrink all weights; so the lower half has a
    sign. Compact: of that lower half, low has the upper 8 bits; ranges [rows, 3]. Stochastic and
    compact: `seed` is a 0-dim int32 tensor.
    """
    gain1, beta2, gain2, step_size, root2, eps, decay = numbers.unbind()
    if ranges is not None:      # so that the compiler knows the width, whatever came before
        w, low, g, m, v = (x.view(-1, GROUP) for x in (w, low, g, m, v))
    g = g.float() * scale
    old_m, old_v = (m.float(), v.float()) if ranges is None else _decode(m, v, ranges)
    new_m = old_m + gain1 * (g - old_m)
    new_v = beta2 * old_v + gain2 * g * g
    x = w.float() if low is None else _join(w, low)
    x = x * decay - step_size * new_m * _inverse(_root(new_v) * root2 + eps)
    noise = None
    if seed is not None:
        index = torch.arange(w.numel(), dtype=torch.int32, device=w.device).view(w.shape)
        noise = _noise(index, seed)
    if low is not None:
        bits = x.view(torch.int32)
        if ranges is not None:
            bits = (bits + (noise & 0xff)) & -0x100
            for code, new in zip((m, v, ranges), _encode(new_m, new_v, noise)):
                code.copy_(new)
        high = (bits + 0x8000) >> 16
        low.copy_((bits - (high << 16)) >> 16 - 8 * low.itemsize)
        w.copy_(high)
        if ranges is not None:
            return
    elif noise is not None:
        # 16 bits each, overlapping: bits that two values share are low bits of one of them
        x, new_m, new_v = (_round(y, noise >> shift)
                           for y, shift in ((x, 0), (new_m, 8), (new_v, 16)))
    m.copy_(new_m)
    v.copy_(new_v)
    if low is None:
        w.copy_(x)


def _decode(m, v, ranges):
    """Return the float32 moments [rows, GROUP] of their codes, as at the top."""
    largest_m, largest_v, step = ranges.float()[:, :, None].unbind(1)
    k = m.float()
    return (k * k.abs() * (largest_m / 127 ** 2),
            _float((_bits(largest_v) - (255 - v.int()) * step.int()).clamp(min=0)))


def _encode(m, v, noise):
    """Return the codes of moments [rows, GROUP], rounded at random to a neighbor, and the ranges.

    The neighbor above is the more probable the nearer, so that the mean is the moment itself. The
    arithmetic takes longer than reading and writing: integers have no NaN to care for, and rsqrt
    is an instruction where a root is twenty.
    """
    top_m, top_v = (_ceil(_bits(x).amax(1, keepdim=True)) for x in (m.abs(), v))
    v = _float(torch.maximum(_bits(v), top_v - WIDEST))
    below = (top_v - _bits(v)).float()
    step = _float(_ceil(_bits(below.amax(1, keepdim=True) / 255 + 1)))
    # 12 bits each, other ones than those for the weight, as a float from 1 to 2; half of the last
    # bit is added, so that none is 0
    chance_m, chance_v = (_float(bits & 0x7ff800 | 0x3f800400) - 1
                          for bits in (noise << 3, noise >> 9))
    x = m.abs() * (_inverse(_float(top_m) + TINY) * 127 ** 2)
    k = _root(x).floor()
    k = (k + (x - k * k > chance_m * (2 * k + 1)).float()).clamp(max=127)
    # by v itself, not by its bits: they are no line where a power of two is between j and j + 1
    j = (255 - below * _inverse(step)).int()
    low = (top_v - (255 - j) * step.int()).clamp(min=0)
    v_low = _float(low)
    j = j + (v - v_low > chance_v * (_float(low + step.int()) - v_low)).int()
    return (k.copysign(m).int(), j,
            torch.cat((_float(top_m), _float(top_v), step), 1))


def _bits(x):
    """Return float32 x read as int32, which grows with x if x is not negative."""
    return x.view(torch.int32)


def _float(bits):
    return bits.view(torch.float32)


def _ceil(bits):
    """Round the bits of a positive float32 up to those of a bfloat16."""
    return (bits + 0xffff) & -0x10000


def _inverse(x):
    """Return 1 / x for x > 0, within 4 units in the last place."""
    return x.rsqrt().square()


def _root(x):
    """Return the square root of x >= 0, within 3 units in the last place."""
    return x * (x + TINY).rsqrt()


@functools.cache
def _compiled(update: Callable) -> Callable:
    # of the two sizes of blocks none is faster; comparing them takes a second
    return torch.compile(update, options={'triton.autotune_pointwise': False})


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
