"""Losses of an output layer that never hold all its logits: smoothed cross-entropy and others.

For one token with hidden state h [D] and label y, output matrix W [V, D] and softcap c, the logits
are z = c tanh(W h / c), or W h without a softcap, and p = softmax(z). Every loss here depends on
them through a few sums, z_y, lse = log sum exp z, Z = sum z, S = sum p^2 and the entropy H, and has
a gradient of one form,

    dloss/dz_j = p_j (a + b log p_j + c p_j) + e - f [j = y]

where a, b, c, e and f are numbers of the token, made of the same sums. So one path serves all, a
chunk of tokens at a time: a product writes the logits, one kernel reads them for the sums, torch
turns those into coefficients [n], one kernel leaves the gradient in the logits' place, and two
products read it for dh and dW. Three products, 6NDV operations: nothing exact can do with less. All
logits of 8,192 tokens of Gemma 2 (V = 256,000) are 4 GB in bfloat16; here only a chunk exists. The
cost of small chunks is the sum of dW over them: see `memory` in `fused_loss`.

On a CUDA device the kernels are Triton; elsewhere the same chunks go through plain torch. This file
imports nothing of ours and can be copied into another project.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:     # on macOS, say: plain torch
    triton = None

MEMORY = {'cuda': 1_100_000_000, 'cpu': 2 ** 23}   # bytes of a chunk's logits; a CPU's cache
LEAST_MEMORY = 2 ** 26      # what memory=0 stands for
ROWS = 128                  # tokens: chunks are multiples of it, for whole tiles in the products
BLOCK = 2048                # logits of a row that one program of four warps holds at a time


# ---- Losses --------------------------------------------------------------------------------------

class RowSums(NamedTuple):
    """What a loss may depend on: float32 [n], None where no loss asks for it (`Loss.sums`)."""
    V: int
    z_y: Tensor                         # the label's logit
    lse: Tensor                         # log sum exp z
    sum_z: Tensor | None = None
    sum_p2: Tensor | None = None        # sum of p^2
    entropy: Tensor | None = None       # nats
    top_logit: Tensor | None = None
    top_token: Tensor | None = None     # int64; the first, where several logits are equal

    @property
    def nll(self):
        return (self.lse - self.z_y).clamp_min(0)   # rounding could make it -1e-7

    @property
    def p_y(self):
        return torch.exp(-self.nll)


@dataclass(frozen=True)
class Loss:
    """A loss per token, or a term to add to one. To make your own, return one of these."""
    value: Callable             # of RowSums: [n]
    coefficients: Callable      # of RowSums: {'a': number or [n], ...} of its gradient, 0 if absent
    sums: tuple = ()            # the RowSums that both read, beside z_y and lse
    whole: bool = True          # False: a term

    def __add__(self, other):
        _require(not (self.whole and other.whole), 'a sum holds one whole loss, and all others are '
                 'terms (smoothing, z_loss, confidence_penalty), but these two are whole')

        def coefficients(s):
            x, y = self.coefficients(s), other.coefficients(s)
            return x | y | {name: x[name] + y[name] for name in x.keys() & y.keys()}
        return Loss(lambda s: self.value(s) + other.value(s), coefficients, self.sums + other.sums,
                    self.whole or other.whole)


def _weighted(value, weight, *sums):
    """A loss whose gradient is the cross-entropy's times a weight per token."""
    def coefficients(s):
        w = weight(s)
        return {'a': w, 'f': w}
    return Loss(value, coefficients, sums)


def cross_entropy():
    """-log p_y"""
    return Loss(lambda s: s.nll, lambda s: {'a': 1, 'f': 1})


def brier():
    """sum_j (p_j - [j = y])^2 = S - 2 p_y + 1, in [0, 2]. Brier 1950."""
    return Loss(lambda s: s.sum_p2 - 2 * s.p_y + 1,
                lambda s: {'a': 2 * (s.p_y - s.sum_p2), 'c': 2, 'f': 2 * s.p_y}, ('sum_p2',))


def spherical():
    """The spherical score -p_y / sqrt(S), in [-1, 0]. Good 1971; Gneiting and Raftery 2007."""
    return Loss(lambda s: -s.p_y * s.sum_p2.rsqrt(),
                lambda s: {'c': s.p_y * s.sum_p2 ** -1.5, 'f': s.p_y * s.sum_p2.rsqrt()},
                ('sum_p2',))


def focal(gamma):
    """-(1 - p_y)^gamma log p_y, gamma >= 0. Lin 2017; for calibration, Mukhoti 2020."""
    _require(0 <= gamma < math.inf, f'focal: gamma must be at least 0, got {gamma}')

    def q(s):       # 1 - p_y with all its digits where p_y is near 1
        return -torch.expm1(-s.nll)
    return _weighted(lambda s: q(s) ** gamma * s.nll, lambda s: q(s) ** gamma
                     * (1 + gamma * s.p_y * s.nll / q(s).clamp_min(1e-30)))


def gce(q):
    """Generalized cross-entropy (1 - p_y^q) / q, q in (0, 1]; 1 - p_y if q = 1. Zhang 2018."""
    _require(0 < q <= 1, f'gce: q must be in (0, 1], got {q}')
    return _weighted(lambda s: -torch.expm1(-q * s.nll) / q, lambda s: torch.exp(-q * s.nll))


def dft():
    """-p_y log p_y whose weight p_y takes no gradient. Dynamic Fine-Tuning, Wu 2025."""
    return _weighted(lambda s: s.p_y * s.nll, lambda s: s.p_y)


def entropy_weighted(k):
    """-H^k log p_y whose weight H^k takes no gradient, k >= 0. EAFT 2026, over its top 20."""
    _require(0 <= k < math.inf, f'entropy_weighted: k must be at least 0, got {k}')
    return _weighted(lambda s: s.entropy ** k * s.nll, lambda s: s.entropy ** k, 'entropy')


def smoothing(s):
    """Term s (z_y - Z / V), s in [0, 1]: makes cross_entropy() label smoothing. Szegedy 2016."""
    _require(0 <= s <= 1, f'smoothing must be in [0, 1], got {s}')
    if s == 0:      # not 0 * Z, which is nan where a logit is -inf
        return Loss(lambda r: 0.0, lambda r: {}, whole=False)
    return Loss(lambda r: s * (r.z_y - r.sum_z / r.V), lambda r: {'e': -s / r.V, 'f': -s},
                ('sum_z',), whole=False)


_smoothing = smoothing      # where an argument has its name


def z_loss(w):
    """Term w lse^2, w >= 0, which keeps the normalizer near 1. PaLM 2022, with w = 1e-4."""
    _require(0 <= w < math.inf, f'z_loss: w must be at least 0, got {w}')
    return Loss(lambda s: w * s.lse.square(), lambda s: {'a': 2 * w * s.lse}, whole=False)


def confidence_penalty(w):
    """Term -w H: w > 0 rewards entropy (Pereyra 2017), w < 0 minimizes it."""
    _require(math.isfinite(w), f'confidence_penalty: w must be a finite number, got {w}')
    return Loss(lambda s: -w * s.entropy, lambda s: {'a': w * s.entropy, 'b': w},
                ('entropy',), whole=False)


# ---- What to call --------------------------------------------------------------------------------

@torch.compiler.disable
def fused_loss(hidden, weight, target, loss, *, softcap=None, ignore_index=-100, reduction='mean',
               num_items=None, token_weight=None, memory=None):
    """(loss, nll) of the logits cap(hidden @ weight.T), in float32.

    hidden        [N, D], or any leading shape such as [B, T, D]; float32 or bfloat16
    weight        [V, D], the output matrix, of the same dtype; autocast to bfloat16 casts both
    target        integers of hidden's leading shape, each in [0, V) or ignore_index
    loss          a loss of this file, or a sum: focal(2) + z_loss(1e-4)
    softcap       logits become softcap * tanh(logits / softcap); None leaves them alone
    ignore_index  marks tokens without loss; None says that there are none
    reduction     'mean' over tokens not ignored, 'sum', or 'none' (target's shape, 0 where ignored)
    num_items     int or 0-d tensor that divides the sum in 'mean' instead of the number of tokens:
                  give a whole step's number, and the losses of its micro-batches add up to its mean
    token_weight  float tensor of target's shape that multiplies each token's loss in the sum
    memory        bytes for a chunk's logits, beyond inputs and gradients, but at least 128 tokens;
                  0 stands for 64 MiB; by default 1.1 GB on a GPU and 8 MiB elsewhere

    nll is the negative log-likelihood in the same reduction, without gradient: losses that differ
    cannot be compared, it can. Ignored tokens are dropped before the first product; if none is
    left, loss and gradients are 0. With target on the CPU nothing waits for the device; for one on
    a GPU the host fetches a count, once per call, unless ignore_index is None.

    Every chunk reads and writes dW once more. In bfloat16, k chunks also round it k times, which is
    sqrt((k + 1) / 2) times the error of one rounding; float32 weights make the sum exact. Measured
    with 8,192 tokens of Gemma 2 the error is 1.0 times that of plain torch in bfloat16 at 1.1 GB,
    1.1 at 512 MiB, 1.2 at 256 MiB, 1.5 at 128 MiB and 1.9 at 64 MiB.

    The gradients of 'mean' and 'sum' are computed in the forward pass, for one backward pass.
    Another one, and each of 'none', computes them from the start. Raises ValueError for arguments
    that do not fit and RuntimeError for create_graph=True. On a GPU with ignore_index=None, a
    target out of range is a device assertion.
    """
    dtype = _check(hidden, weight, target, loss, softcap, ignore_index)
    _require(memory is None or memory >= 0, f'memory must be a number of bytes, got {memory}')
    _require(reduction in ('mean', 'sum', 'none'),
             f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
    _require(num_items is None or reduction == 'mean',
             f"num_items divides in reduction 'mean' only, and this is {reduction!r}")
    _require(token_weight is None or token_weight.shape == target.shape,
             f'token_weight must have the shape of target, {list(target.shape)}')
    shape, device = target.shape, hidden.device
    hidden = hidden.reshape(-1, weight.shape[1])
    rows, target = _supervised(target, len(weight), ignore_index, device)
    scale = torch.ones(shape, device=device)
    if token_weight is not None:
        scale = _on_device(token_weight.detach().float(), device)
    scale = scale.reshape(-1)
    if rows is not None:
        hidden, scale = hidden.index_select(0, rows), scale[rows]
    if reduction == 'mean' and len(target):
        divisor = len(target) if num_items is None else num_items
        _require(isinstance(divisor, Tensor) or divisor > 0,
                 f'num_items must be positive, got {divisor}')
        scale = scale / (divisor.reshape(()) if isinstance(divisor, Tensor) else divisor)
    value, nll = _FusedLoss.apply(hidden, weight, scale, reduction != 'none',
                                  torch.is_grad_enabled(), (target, loss, softcap, dtype, memory))
    if reduction != 'none':
        return value, nll
    if rows is not None:
        value, nll = (x.new_zeros(shape.numel()).index_copy(0, rows, x) for x in (value, nll))
    return value.view(shape), nll.view(shape)


def smoothed_cross_entropy(hidden, weight, target, *, smoothing=0.0, softcap=None,
                           ignore_index=-100, reduction='mean', num_items=None,
                           token_weight=None, memory=None):
    """F.cross_entropy(cap(hidden @ weight.T), target, label_smoothing=smoothing), and the NLL.

    This is `fused_loss` with cross_entropy() + smoothing(smoothing); see there.
    """
    return fused_loss(hidden, weight, target, cross_entropy() + _smoothing(smoothing),
                      softcap=softcap, ignore_index=ignore_index, reduction=reduction,
                      num_items=num_items, token_weight=token_weight, memory=memory)


class TokenStatistics(NamedTuple):
    """What `token_statistics` returns: float32 tensors of target's shape; top_token is int64."""
    loss: Tensor        # 0 where ignored
    nll: Tensor         # -log p(target); 0 where ignored
    lse: Tensor         # log of the sum of exp(logits)
    top_logit: Tensor
    top_token: Tensor   # the first, where several logits are equal
    entropy: Tensor     # nats, over all V tokens


@torch.no_grad()
@torch.compiler.disable
def token_statistics(hidden, weight, target, *, smoothing=0.0, softcap=None, ignore_index=-100,
                     loss=None):
    """TokenStatistics of each token's distribution, from one product and without gradient.

    Arguments as of `fused_loss`. The loss is `loss`, by default cross_entropy(), with the term
    smoothing(smoothing). The logits are float32 whatever the inputs are: between 16 and 32 bfloat16
    moves in steps of 0.125, coarser than what a calibration metric measures.
    """
    loss = (loss or cross_entropy()) + _smoothing(smoothing)
    dtype = _check(hidden, weight, target, loss, softcap, ignore_index)
    ignored = torch.zeros_like(target, dtype=torch.bool)
    if ignore_index is not None:
        ignored = target.long() == ignore_index
    _, labels = _supervised(target.long().masked_fill(ignored, 0), len(weight), None, hidden.device)
    s, _, _ = _chunks(hidden.reshape(-1, weight.shape[1]), weight, None, (False, False), labels,
                      loss, softcap, dtype, sums=('entropy', 'top_logit', 'top_token'))
    ignored = _on_device(ignored.reshape(-1), hidden.device)
    value, nll = (x.masked_fill(ignored, 0) for x in (loss.value(s), s.nll))
    return TokenStatistics(*(x.view(target.shape) for x in (
        value, nll, s.lse, s.top_logit, s.top_token, s.entropy)))


# ---- The path ------------------------------------------------------------------------------------

class _FusedLoss(torch.autograd.Function):
    """scale * loss and scale * NLL of each token, or their sums over tokens."""

    @staticmethod
    def forward(ctx, hidden, weight, scale, summed, with_gradient, call):
        need = [with_gradient and summed and needed for needed in ctx.needs_input_grad[:2]]
        s, *gradients = _chunks(hidden, weight, scale, need, *call)
        ctx.scale, ctx.call, ctx.gradients = scale, call, gradients if summed else None
        ctx.save_for_backward(hidden, weight)
        value, nll = call[1].value(s) * scale, s.nll * scale
        value, nll = (value.sum(), nll.sum()) if summed else (value, nll)
        ctx.mark_non_differentiable(nll)
        return value, nll

    @staticmethod
    def backward(ctx, upstream, _):
        if torch.is_grad_enabled():
            raise RuntimeError('fused_loss has no second derivative: call backward without '
                               'create_graph=True')
        factor, gradients, ctx.gradients = upstream.float(), ctx.gradients, None
        if gradients is None:
            _, *gradients = _chunks(*ctx.saved_tensors, factor * ctx.scale,
                                    ctx.needs_input_grad[:2], *ctx.call)
            factor = None
        gradients = (None if g is None else _scaled(g, factor, x.dtype)
                     for g, x in zip(gradients, ctx.saved_tensors, strict=True))
        return *gradients, None, None, None, None


def _chunks(hidden, weight, scale, need, target, loss, softcap, dtype, memory=None, sums=()):
    """RowSums of n tokens, and dh and dW of sum(scale * loss): the heart of this file.

    hidden [n, D]; weight [V, D]; scale and target [n]; need: whether dh and dW are wanted, else
    they are None; dtype: of the products. sums: RowSums to compute beside those of the loss; with
    them the logits are float32.
    """
    n, V, (need_dh, need_dw) = len(hidden), len(weight), need
    softcap = softcap and float(softcap)
    h, w = (x.to(dtype).contiguous() for x in (hidden, weight))
    if sums and not h.is_cuda:      # a CPU has no product of bfloat16 with a float32 result
        h, w = h.float(), w.float()
    device, logits_dtype = h.device, torch.float32 if sums else dtype
    # Tokens per chunk: all n, or a multiple of ROWS that makes chunks of about one size
    memory = MEMORY.get(device.type, MEMORY['cpu']) if memory is None else memory or LEAST_MEMORY
    rows = max(ROWS, memory // (V * logits_dtype.itemsize) // ROWS * ROWS)
    rows = min(n, math.ceil(n / max(1, math.ceil(n / rows)) / ROWS) * ROWS)
    buffer = torch.empty(rows, V, device=device, dtype=logits_dtype)
    # Each by itself: kernels are compiled for the alignment of what they get.
    s = RowSums(V, **{name: torch.zeros(n, device=device, dtype=torch.int64 if name == 'top_token'
                                        else torch.float32)
                      for name in {'z_y', 'lse', *loss.sums, *sums}})
    dh = torch.empty_like(h) if need_dh else None
    dw = (torch.empty_like if n else torch.zeros_like)(w, dtype=weight.dtype) if need_dw else None
    step = _kernels if _use_triton(h) else _plain
    with torch.autocast(device.type, enabled=False):
        for start in range(0, n, max(1, rows)):
            c = slice(start, start + rows)
            logits = buffer[:n - start]
            _product(h[c], w.T, logits)
            step(logits, h[c], w, target[c], RowSums(V, *(x if x is None else x[c] for x in s[1:])),
                 softcap, loss, scale[c] if need_dh or need_dw else None)
            if need_dh:
                _product(logits, w, dh[c])
            if need_dw:
                _product(logits.T, h[c], dw, add=start > 0)
    return s, dh, dw


def _product(a, b, out, add=False):
    """out = a @ b, or out += a @ b, summed in float32 and rounded once to out's dtype."""
    options = {}
    if out.dtype != a.dtype and a.is_cuda:
        options = {'out_dtype': out.dtype}
    elif out.dtype != a.dtype:
        a, b = a.float(), b.float()
    torch.addmm(out, a, b, out=out, **options) if add else torch.mm(a, b, out=out, **options)


def _scaled(x, factor, dtype):
    """x * factor in dtype, rounded once; in x's memory on a GPU. None stands for 1."""
    if factor is None or (not x.is_cuda and factor == 1):
        return x.to(dtype)
    if x.dtype != dtype or not _use_triton(x):
        return (x * factor.view(1)).to(dtype)   # by a scalar, bfloat16 would stay bfloat16
    _scale_kernel[(triton.cdiv(x.numel(), 16384),)](x, factor, x.numel(), BLOCK=16384)
    return x


# Both fill s, the sums of a chunk's logits [n, V] = h @ w.T, and, if scale is given, leave scale *
# dloss/dlogits in the place of logits. The label's logit is computed apart and takes its place in
# every sum: loss and gradient hang on it most, and rounding it is plain torch's largest error.

def _kernels(logits, h, w, target, s, softcap, loss, scale):
    n, V = logits.shape
    # The hardware's tanh errs by 2**-11, rounding to bfloat16 by 2**-8.
    fast = logits.is_cuda and logits.dtype == torch.bfloat16
    wide = 4 if n < 512 else 1      # few rows: more threads for each
    _row_sums_kernel[(n,)](logits, h, w, target, *s[1:], *w.shape, softcap, FAST=fast,
                           BLOCK=wide * BLOCK, num_warps=4 * wide)
    if scale is not None:
        numbers = (x.float().expand(n).contiguous() if isinstance(x, Tensor) else
                   x if x is None else float(x) for x in _coefficients(loss, s))
        _gradient_kernel[(n, triton.cdiv(V, BLOCK))](
            logits, target, s.z_y, s.lse, scale, *numbers, V, softcap, FAST=fast, BLOCK=BLOCK,
            num_warps=4)


def _plain(logits, h, w, target, s, softcap, loss, scale):
    label = target[:, None]
    z_y = (h.float() * w[target].float()).sum(1)
    s.z_y.copy_(z_y if softcap is None else softcap * torch.tanh(z_y / softcap))
    z = logits.float() if softcap is None else torch.tanh(logits.float() / softcap).mul_(softcap)
    z.scatter_(1, label, s.z_y[:, None])
    lse = torch.logsumexp(z, 1, out=s.lse)[:, None]
    sums = {'sum_z': lambda: z.sum(1), 'sum_p2': lambda: (z - lse).exp_().square_().sum(1),
            'entropy': lambda: torch.special.entr((z - lse).exp_()).sum(1),
            'top_logit': lambda: z.amax(1), 'top_token': lambda: z.argmax(1)}
    for name, compute in sums.items():
        if getattr(s, name) is not None:
            getattr(s, name).copy_(compute())
    if scale is not None:
        a, b, c, e, f = (x.expand(len(z))[:, None] if isinstance(x, Tensor) else x
                         for x in _coefficients(loss, s))
        log_p = z - lse
        g = log_p.exp()     # p
        a = a if b is None else a + b * log_p.clamp_min(-1e4)   # not 0 * -inf
        a = a if c is None else a + c * g
        g = g.mul_(a).add_(e)
        g.scatter_(1, label, g.gather(1, label) - f)
        if softcap is not None:
            g *= z.div_(softcap).square_().neg_().add_(1)
        logits.copy_(g.mul_(scale[:, None]))


def _coefficients(loss, s):
    """a, b, c, e, f; b and c are None where absent, since the kernel then saves their work."""
    found = loss.coefficients(s)
    unknown = ', '.join(map(repr, found.keys() - set('abcef')))
    _require(not unknown, f'the coefficients are a, b, c, e and f, got {unknown}')
    return [found.get(name, 0 if name in 'aef' else None) for name in 'abcef']


def _use_triton(x):
    return triton is not None and x.is_cuda


# ---- Triton kernels. Arithmetic is float32 throughout --------------------------------------------

if triton is not None:
    LOG2E = tl.constexpr(1.4426950408889634)

    @triton.jit
    def _capped_of(z, softcap, FAST: tl.constexpr):
        if FAST:
            t = tl.inline_asm_elementwise('tanh.approx.f32 $0, $1;', '=f,f', [z * (1 / softcap)],
                                          dtype=tl.float32, is_pure=True, pack=1)
        else:   # holds at both ends, where exp2 gives inf and 0
            t = 1 - 2 / (tl.exp2(z * (2 * LOG2E / softcap)) + 1)
        return t * softcap

    @triton.jit
    def _row_sums_kernel(logits, hidden, weight, target, z_y, lse, sum_z, sum_p2, entropy,
                         top_logit, top_token, V, D, softcap, FAST: tl.constexpr,
                         BLOCK: tl.constexpr):
        """One program per row of logits; a sum whose pointer is None is not computed.

        It reads blocks of lanes of eight logits. A lane keeps its running maximum and, with
        x = z - maximum, its sums of exp x, exp 2x and x exp x, which a new maximum rescales. Lanes
        meet only at the end, so that no block waits for all the threads.
        """
        row = tl.program_id(0).to(tl.int64)     # row * V passes 2**31
        logits += row * V
        y = tl.load(target + row)
        dot = tl.zeros([1024], tl.float32)
        for i in range(0, D, 1024):
            d = i + tl.arange(0, 1024)
            dot += (tl.load(hidden + row * D + d, mask=d < D, other=0.0).to(tl.float32)
                    * tl.load(weight + y * D + d, mask=d < D, other=0.0).to(tl.float32))
        label_z = tl.sum(dot)
        if softcap is not None:
            label_z = _capped_of(label_z, softcap, False)
        tl.store(z_y + row, label_z)

        first = tl.arange(0, BLOCK // 8) * 8
        maximum = tl.full([BLOCK // 8], -3.0e38, tl.float32)    # finite: -inf gives no inf - inf
        exps = tl.zeros([BLOCK // 8], tl.float32)
        squares = tl.zeros([BLOCK // 8], tl.float32)
        products = tl.zeros([BLOCK // 8], tl.float32)
        zs = tl.zeros([BLOCK // 8], tl.float32)
        top = tl.zeros([BLOCK // 8], tl.int32)
        for i in tl.range(0, V, BLOCK, num_stages=3):
            j = i + first[:, None] + tl.arange(0, 8)[None, :]
            z = tl.load(logits + j, mask=j < V, other=0.0).to(tl.float32)
            if softcap is not None:
                z = _capped_of(z, softcap, FAST)
            z = tl.where(j == y, label_z, z)    # no branches, or loads would not be pipelined
            if sum_z is not None:
                zs += tl.sum(z, 1)      # past the end it is 0
            z = tl.where(j < V, z, float('-inf'))
            if top_token is None:
                highest = tl.max(z, 1)
            else:
                highest, at = tl.max(z, 1, return_indices=True)
                top = tl.where(highest > maximum, i + first + at, top)
            down = tl.minimum(maximum - highest, 0.0)
            shrink = tl.exp2(down * LOG2E)
            maximum = tl.maximum(maximum, highest)
            x = z - maximum[:, None]
            exp = tl.exp2(x * LOG2E)
            if entropy is not None:     # x falls as the maximum rises; not 0 * -inf
                products = (products + down * exps) * shrink
                products += tl.sum(tl.where(exp > 0, exp * x, 0.0), 1)
            if sum_p2 is not None:
                squares = squares * shrink * shrink + tl.sum(exp * exp, 1)
            exps = exps * shrink + tl.sum(exp, 1)
        highest = tl.max(maximum)
        down = maximum - highest
        shrink = tl.exp2(down * LOG2E)
        total = tl.sum(exps * shrink)
        tl.store(lse + row, highest + tl.log(total))
        if sum_z is not None:
            tl.store(sum_z + row, tl.sum(zs))
        if sum_p2 is not None:
            tl.store(sum_p2 + row, tl.sum(squares * shrink * shrink) / total / total)
        if entropy is not None:
            mean_x = tl.sum((products + down * exps) * shrink) / total
            tl.store(entropy + row, tl.log(total) - mean_x)
        if top_token is not None:
            tl.store(top_logit + row, highest)
            tl.store(top_token + row, tl.min(tl.where(maximum == highest, top, 2147483647)))

    @triton.jit
    def _of_row(x, row):
        """A coefficient: a pointer to a number per row, or one number for all."""
        value = x
        if not isinstance(x, float):    # a float only in the interpreter
            if x.dtype.is_ptr():
                value = tl.load(x + row)
        return value

    @triton.jit
    def _gradient_kernel(logits, target, z_y, lse, scale, a, b, c, e, f, V, softcap,
                         FAST: tl.constexpr, BLOCK: tl.constexpr):
        """scale (p (a + b log p + c p) + e - f [j = y]) dz/dlogit, over a block of one row."""
        row = tl.program_id(0).to(tl.int64)
        logits += row * V
        j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        z = tl.load(logits + j, mask=j < V, other=0.0).to(tl.float32)
        y = tl.load(target + row)
        if softcap is not None:
            z = _capped_of(z, softcap, FAST)
        z = tl.where(j == y, tl.load(z_y + row), z)
        log_p = z - tl.load(lse + row)
        p = tl.exp2(log_p * LOG2E)
        factor = _of_row(a, row)
        if b is not None:
            factor += _of_row(b, row) * tl.where(p > 0, log_p, 0.0)     # not 0 * -inf
        if c is not None:
            factor += _of_row(c, row) * p
        # In float32: as the model learns, p_y comes near f, and rounding would drown what is left.
        g = p * factor + _of_row(e, row)
        g = tl.where(j == y, g - _of_row(f, row), g)
        if softcap is not None:
            tanh = z * (1 / softcap)
            g *= 1 - tanh * tanh
        g *= tl.load(scale + row)
        tl.store(logits + j, g.to(logits.dtype.element_ty), mask=j < V)

    @triton.jit
    def _scale_kernel(x, factor, size, BLOCK: tl.constexpr):
        """x *= factor, in place; nothing is read where the factor is 1, as it mostly is."""
        factor = tl.load(factor)
        if factor != 1.0:
            i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            value = tl.load(x + i, mask=i < size).to(tl.float32)
            tl.store(x + i, (value * factor).to(x.dtype.element_ty), mask=i < size)


def _require(holds, message):
    if not holds:
        raise ValueError(message)


def _check(hidden, weight, target, loss, softcap, ignore_index):
    """Checks what both functions are given and returns the dtype of the matrix products."""
    _require(weight.dim() == 2 and hidden.dim() >= 2 and hidden.shape[-1] == weight.shape[1],
             f'hidden must be [..., D] and weight [V, D], got {list(hidden.shape)} and '
             f'{list(weight.shape)}')
    _require(target.shape == hidden.shape[:-1], f'target must have the leading shape of hidden, '
             f'{list(hidden.shape[:-1])}, got {list(target.shape)}')
    _require(torch.can_cast(target.dtype, torch.int64)
             and target.dtype not in (torch.bool, torch.uint64),
             f'target must hold integer token ids that fit int64, got {target.dtype}')
    _require(ignore_index is None or isinstance(ignore_index, int),
             f'ignore_index must be an int or None, got {ignore_index!r}')
    _require(softcap is None or 0 < softcap < math.inf,
             f'softcap must be a positive number or None, got {softcap}')
    _require(isinstance(loss, Loss) and loss.whole, 'loss must be one whole Loss, with or without '
             f'terms, such as brier() or cross_entropy() + z_loss(1e-4), got {loss!r}')
    dtype, kind = hidden.dtype, hidden.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    else:
        _require(dtype == weight.dtype, f'hidden is {dtype} but weight is {weight.dtype}: convert '
                 f'one of them, or call under torch.autocast')
    dtypes = {dtype, hidden.dtype, weight.dtype}
    _require(torch.float16 not in dtypes, 'float16 is too narrow: the gradient of a smoothed label '
             'over V = 256,000 tokens is below its least number. Use bfloat16 or float32')
    _require(dtypes <= {torch.float32, torch.bfloat16},
             f'hidden and weight must be float32 or bfloat16, got {hidden.dtype}')
    return dtype


def _supervised(target, V, ignore_index, device):
    """(places of the tokens that carry loss, or None if that is all; their targets), on device.

    target is checked where it is. Only one that is not on the CPU makes the host wait.
    """
    target = target.reshape(-1).long()      # before it is compared: in uint8, -100 is 156
    supervised = torch.ones_like(target, dtype=torch.bool)
    if ignore_index is not None:
        supervised = target != ignore_index
    outside = supervised & ((target < 0) | (target >= V))
    if ignore_index is None and target.is_cuda:
        torch._assert_async(~outside.any(), f'a target is not in [0, {V})')
        return None, target
    n, n_outside = torch.stack((supervised.sum(), outside.sum())).tolist()
    if n_outside:
        raise ValueError(f'target {target[outside][0].item()} is neither in [0, {V}), the rows of '
                         f'weight, nor ignore_index={ignore_index}')
    if n == len(target):
        return None, _on_device(target, device)
    rows = torch.nonzero_static(supervised, size=n).squeeze(1)
    return _on_device(rows, device), _on_device(target[rows], device)


def _on_device(x, device):
    """x there; from the CPU without waiting."""
    if x.device.type == 'cpu' and device.type == 'cuda':
        x = x.pin_memory()
    return x.to(device, non_blocking=True)
