"""AdamW of bfloat16 weights with 5.19 bytes per weight instead of 12.

An int8 beside each weight holds 8 of its missing bits, and the moments have 8 bits each, with
common scales for 32 of them in a row. All three are rounded at random. Where rows cannot be divided
by 32, and for vectors, the state is that of 'exact' in runtime/optim.py.

The 8 bits of a moment are its place k on a scale that is quadratic for m and logarithmic for v. M
and V are the largest |m| and v of the 32. The bits of a positive float, read as an integer, are a
logarithm of it that is linear between powers of two. `step` is just large enough that the smallest
v is on the scale, and M, V and step are the `ranges` of the 32:

    m = M sign(k) (k / 127)^2                           k = -127 .. 127
    v = float of the bits (bits(V) - (255 - k) step)    k = 0 .. 255

So a moment far below others is off by a small part of itself, and v, in the denominator, never
becomes 0. Rounded to the nearest, v would stay where it is: a step changes it by a thousandth.

Source: Gonzalez Ortiz et al. 2026, FlashOptim (arXiv 2602.23349), with other scales and rounding.
"""

from typing import Any

import torch
from torch import Tensor

from runtime import optim
from runtime.optim import TINY, inverse, join, local, noise_like, root

GROUP = 32              # neighbors in a row whose 8-bit moments have common ranges
WIDEST = 24 << 23       # of bits(V) - bits(v): 24 powers of two; a smaller v counts as more


class CompactAdamW(optim.AdamW):
    """AdamW with this state where possible; there gradients of passes are summed in bfloat16."""

    def new_state(self, p: Any, kind: str) -> dict[str, Tensor]:
        if p.dtype != torch.bfloat16 or p.ndim != 2 or p.shape[1] % GROUP:
            return super().new_state(p, kind)
        dtypes = {'exp_avg': torch.int8, 'exp_avg_sq': torch.uint8, 'low_bits': torch.int8}
        return {name: torch.zeros_like(p, dtype=dtype, requires_grad=False)
                for name, dtype in dtypes.items()} | {'ranges': new_ranges(p.detach())}

    def update(self):
        return _update


def new_ranges(p: Any) -> Tensor:
    """Return zeros [rows, 3 * columns / GROUP], bfloat16, sharded over the rows as the matrix p."""
    rows, columns = p.shape[0], 3 * p.shape[1] // GROUP
    own = local(p).new_zeros(len(local(p)), columns)
    if not hasattr(p, 'to_local'):
        return own
    return type(p).from_local(own, p.device_mesh, p.placements, run_check=False,
                              shape=torch.Size((rows, columns)), stride=(columns, 1))


def _update(w, low, g, m, v, ranges, numbers, scale, seed, first=0):
    """Update all but g in place, see optim._update; of the lower half, low has the upper 8 bits.

    ranges [rows, 3] of `GROUP` weights each, perhaps flat; None: the state is that of 'exact'
    """
    if ranges is None:
        return optim._update(w, low, g, m, v, ranges, numbers, scale, seed, first)
    # so that the compiler knows the width, whatever came before
    w, low, g, m, v = (x.view(-1, GROUP) for x in (w, low, g, m, v))
    ranges, x = ranges.view(-1, 3), join(w, low)
    new_m, new_v = _decode(m, v, ranges)
    optim.float32_step(x, g, new_m, new_v, numbers, scale)
    noise = noise_like(w, seed, first)
    optim.split((x.view(torch.int32) + (noise & 0xff)) & -0x100, w, low)
    for code, new in zip((m, v, ranges), _encode(new_m, new_v, noise)):
        code.copy_(new)


def _decode(m, v, ranges):
    """Return the float32 moments [rows, GROUP] of their codes, as at the top."""
    largest_m, largest_v, step = ranges.float()[:, :, None].unbind(1)
    k = m.float()
    return (k * k.abs() * (largest_m / 127 ** 2),
            _float((_bits(largest_v) - (255 - v.int()) * step.int()).clamp(min=0)))


def _encode(m, v, noise):
    """Return the codes of moments [rows, GROUP], rounded at random to a neighbor, and the ranges.

    The neighbor above is the more probable the nearer, so that the mean is the moment itself. The
    arithmetic takes longer than reading and writing, so it is of integers and rsqrt.
    """
    top_m, top_v = (_ceil(_bits(x).amax(1, keepdim=True)) for x in (m.abs(), v))
    v = _float(torch.maximum(_bits(v), top_v - WIDEST))
    below = (top_v - _bits(v)).float()
    step = _float(_ceil(_bits(below.amax(1, keepdim=True) / 255 + 1)))
    # 12 bits each, other ones than those for the weight, as a float from 1 to 2; half of the last
    # bit is added, so that none is 0
    chance_m, chance_v = (_float(bits & 0x7ff800 | 0x3f800400) - 1
                          for bits in (noise << 3, noise >> 9))
    x = m.abs() * (inverse(_float(top_m) + TINY) * 127 ** 2)
    k = root(x).floor()
    k = (k + (x - k * k > chance_m * (2 * k + 1)).float()).clamp(max=127)
    # by v itself, not by its bits: they are no line where a power of two is between j and j + 1
    j = (255 - below * inverse(step)).int()
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
