"""Losses of an output layer, computed without storing all its logits.

For one token with hidden state h [D], label y and output matrix W [V, D], the logits are
z = cap tanh(W h / cap), or W h without a softcap, and p = softmax(z). Every loss here depends on
them through z_y, the largest logit z_top and a few sums: lse = log sum exp z, Z = sum z,
S = sum p^2 and the entropy H. Its gradient has the form

    dloss/dz_j = p_j (a + b log p_j + c p_j) + e - f [j = y] + t [j = top]

where the coefficients a, b, c, e, f and t of the token are computed from the same values. So all
losses share this code, which processes a chunk of tokens at a time: a product writes the logits,
one kernel reads them for the sums, torch turns those into coefficients [n], one kernel replaces the
logits by the gradient, and two products read it for dh and dW. Three products take 6NDV operations,
the least for an exact gradient. On a CUDA device the kernels are Triton; elsewhere the same chunks
go through plain torch. The file imports nothing of ours and can be copied into another project.
"""

import bisect
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:     # for example on macOS: use plain torch
    triton = None

MEMORY = {'cuda': 1_100_000_000, 'cpu': 2 ** 23}    # default bytes of a chunk's logits
LEAST_MEMORY = 2 ** 26      # memory=0 means this many bytes
ROWS = 128                  # chunks are multiples of this many tokens, for whole tiles in products
BLOCK = 2048                # logits of a row that one program of four warps processes at a time

# Whether the kernels compute what a function, `_plain`, does. In a copy of this file they are
# always used; speed/install.py has a check that `_plain` was not edited.
stands_for: Callable[[Callable], bool] = callable


# ---- Losses --------------------------------------------------------------------------------------

class RowSums(NamedTuple):
    """What a loss may depend on: float32 [n], or None if it is not in `Loss.sums`."""
    V: int
    z_y: Tensor                         # the label's logit
    lse: Tensor                         # log sum exp z
    sum_z: Tensor | None = None
    sum_p2: Tensor | None = None        # sum of p^2
    entropy: Tensor | None = None       # nats
    top_logit: Tensor | None = None
    top_token: Tensor | None = None     # int64; the first if several logits are equal
    tokens: Tensor | None = None        # int64: indices of these n tokens in the flat target

    @property
    def nll(self):
        return (self.lse - self.z_y).clamp_min(0)   # rounding could make it -1e-7

    @property
    def p_y(self):
        return torch.exp(-self.nll)


@dataclass(frozen=True)
class Loss:
    """A loss per token, or a term that can be added to one. A loss of your own returns a Loss."""
    value: Callable             # RowSums -> loss [n]
    coefficients: Callable      # RowSums -> {'a': number or [n], ...} of the gradient; absent: 0
    sums: tuple = ()            # names of the RowSums that both read, besides z_y and lse
    whole: bool = True          # False: a term, to be added to a whole loss

    def __add__(self, other):
        _require(not (self.whole and other.whole), 'cannot add two losses: a sum is one whole loss '
                 'and any terms, such as smoothing and z_loss')

        def coefficients(s):
            x, y = self.coefficients(s), other.coefficients(s)
            return x | y | {name: x[name] + y[name] for name in x.keys() & y.keys()}
        return Loss(lambda s: self.value(s) + other.value(s), coefficients, self.sums + other.sums,
                    self.whole or other.whole)


def _weighted(value, weight, *sums):
    """Return a loss whose gradient is that of cross-entropy times a weight per token."""
    return Loss(value, lambda s: dict.fromkeys('af', weight(s)), sums)


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
    """-p_y log p_y, no gradient through the weight p_y. Dynamic Fine-Tuning, Wu 2025."""
    return _weighted(lambda s: s.p_y * s.nll, lambda s: s.p_y)


def entropy_weighted(k):
    """-H^k log p_y, no gradient through the weight H^k, k >= 0. EAFT 2026, over the top 20."""
    _require(0 <= k < math.inf, f'entropy_weighted: k must be at least 0, got {k}')
    return _weighted(lambda s: s.entropy ** k * s.nll, lambda s: s.entropy ** k, 'entropy')


def smoothing(s):
    """Term s (z_y - Z / V), s in [0, 1]: makes cross_entropy() label smoothing. Szegedy 2016."""
    _require(0 <= s <= 1, f'smoothing must be in [0, 1], got {s}')
    if s == 0:      # not 0 * Z, which is nan where a logit is -inf
        return Loss(lambda r: 0.0, lambda r: {}, whole=False)
    return Loss(lambda r: s * (r.z_y - r.sum_z / r.V), lambda r: {'e': -s / r.V, 'f': -s},
                ('sum_z',), whole=False)


def adaptive_smoothing(s):
    """Term r (z_y - Z / V), no gradient through the rate r = s (1 - H / log V), s in [0, 1].

    The rate is that of Lee et al. 2022 (arXiv 2210.13459), with s = 1; their smoothing is towards
    the model's own knowledge, not all tokens alike.
    """
    _require(0 <= s <= 1, f'adaptive_smoothing must be in [0, 1], got {s}')

    def rate(r):
        return s * (1 - r.entropy / math.log(r.V)).clamp_min(0)
    return Loss(lambda r: rate(r) * (r.z_y - r.sum_z / r.V),
                lambda r: {'e': -rate(r) / r.V, 'f': -rate(r)}, ('sum_z', 'entropy'), whole=False)


def max_sup(alpha):
    """Term alpha (z_top - Z / V), alpha >= 0: smoothing's for the top token. MaxSup, Zhou 2025."""
    _require(0 <= alpha < math.inf, f'max_sup: alpha must be at least 0, got {alpha}')
    return Loss(lambda s: alpha * (s.top_logit - s.sum_z / s.V),
                lambda s: {'e': -alpha / s.V, 't': alpha}, ('sum_z', 'top_logit', 'top_token'),
                whole=False)


def z_loss(w):
    """Term w lse^2, w >= 0, which keeps the normalizer near 1. PaLM 2022, with w = 1e-4."""
    _require(0 <= w < math.inf, f'z_loss: w must be at least 0, got {w}')
    return Loss(lambda s: w * s.lse.square(), lambda s: {'a': 2 * w * s.lse}, whole=False)


def confidence_penalty(w):
    """Term -w H: w > 0 rewards entropy (Pereyra 2017), w < 0 minimizes it."""
    _require(math.isfinite(w), f'confidence_penalty: w must be a finite number, got {w}')
    return Loss(lambda s: -w * s.entropy, lambda s: {'a': w * s.entropy, 'b': w},
                ('entropy',), whole=False)


def joint(function, entropy=False):
    """A loss of several tokens together, such as those of a pair of answers; needs `group`.

    function(log_p, entropy, tokens) returns the sum of the losses of some whole groups, a scalar
    that is differentiable in log_p float32 [n] and, if entropy=True, in entropy [n] (else None).
    tokens int64 [n] are the tokens' indices in the flat target of `fused_loss`. Each token's
    reported loss is an equal share of the sum.
    """
    def share(s):
        return (function(-s.nll, s.entropy, s.tokens) / max(1, len(s.lse))).expand_as(s.lse)

    def coefficients(s):    # with g = dL/dlog p_y and h = dL/dH; dH/dz = -p (log p + H)
        with torch.enable_grad():
            log_p, H = (x if x is None else x.clone().requires_grad_() for x in (-s.nll, s.entropy))
            g, *h = torch.autograd.grad(function(log_p, H, s.tokens), [log_p] + [H] * entropy)
        return {'a': -g - h[0] * s.entropy, 'b': -h[0], 'f': -g} if h else {'a': -g, 'f': -g}
    return Loss(share, coefficients, ('tokens', 'entropy') if entropy else ('tokens',))


# What a config may name: a loss of your own is a function above and a name here.
LOSSES = {make.__name__: make for make in (
    cross_entropy, brier, spherical, focal, gce, dft, entropy_weighted, smoothing,
    adaptive_smoothing, max_sup, z_loss, confidence_penalty)}


# ---- Public functions ----------------------------------------------------------------------------

def _uncompiled(function):
    """torch.compiler.disable without its import of the compiler, 1.4 s that few callers need."""
    @functools.wraps(function)
    def call(*arguments, **options):
        compiling = torch.compiler.is_compiling()
        return (torch.compiler.disable(function) if compiling else function)(*arguments, **options)
    return call


@_uncompiled
def fused_loss(hidden, weight, target, loss, *, softcap=None, ignore_index=-100, reduction='mean',
               num_items=None, token_weight=None, memory=None, group=None):
    """Return (loss, nll) of the logits cap(hidden @ weight.T), in float32.

    hidden        [N, D], or any leading shape such as [B, T, D]; float32 or bfloat16
    weight        [V, D], the output matrix, of the same dtype; autocast to bfloat16 casts both
    target        integers of hidden's leading shape, each in [0, V) or ignore_index
    loss          a Loss, or a sum of one and terms: focal(2) + z_loss(1e-4)
    softcap       logits become softcap * tanh(logits / softcap); None: no softcap
    ignore_index  target of tokens without loss; None: every token has a loss
    reduction     'mean' over tokens not ignored, 'sum', or 'none' (target's shape, 0 where ignored)
    num_items     int or 0-d tensor that divides the sum in 'mean' instead of the number of tokens:
                  with that of a whole step, the losses of its micro-batches add up to its mean
    token_weight  float tensor of target's shape that multiplies each token's loss in the sum
    memory        bytes for a chunk's logits, in addition to inputs and gradients; a chunk has at
                  least 128 tokens. 0: 64 MiB; None: 1.1 GB on a GPU, 8 MiB elsewhere. Each chunk
                  updates dW; in bfloat16 it rounds dW, so that k chunks have sqrt((k + 1) / 2)
                  times the error of one (docs/losses.md has measurements)
    group         for a `joint` loss in reduction 'sum': int tensor of target's shape, on the CPU.
                  Neighboring tokens of equal group are computed in one chunk; if one group alone
                  needs more than `memory`, all logits are computed twice

    nll is the negative log-likelihood in the same reduction, without gradient. Ignored tokens are
    dropped before the first product; if no token is left, loss and gradients are 0. The gradients
    of 'mean' and 'sum' are computed in the forward pass; a second backward pass, and every one of
    'none', computes them again.

    If target is on the CPU, the host never waits for the device. If it is on a GPU, the host waits
    for one count per call; with ignore_index=None it does not, and a target out of range is a
    device assertion. Raises ValueError for invalid arguments, RuntimeError for create_graph=True.
    """
    shape, device = target.shape, hidden.device
    dtype, target, supervised, n = _check(hidden, weight, target, loss, softcap, ignore_index)
    _require(memory is None or memory >= 0, f'memory must be a number of bytes, got {memory}')
    _require(reduction in ('mean', 'sum', 'none'),
             f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
    _require(num_items is None or reduction == 'mean',
             f"num_items divides in reduction 'mean' only, and this is {reduction!r}")
    for name, x in ('token_weight', token_weight), ('group', group):
        _require(x is None or x.shape == shape,
                 f'{name} must have the shape of target, {list(shape)}')
    _require(('tokens' in loss.sums) == (group is not None)
             and (group is None or (reduction, token_weight) == ('sum', None)),
             "a joint loss needs `group` and reduction 'sum' without token_weight; others no group")
    hidden, tokens = hidden.reshape(-1, weight.shape[1]), None
    scale = torch.ones(shape, device=device) if token_weight is None else token_weight.detach()
    target, scale = (_on_device(x.reshape(-1), device) for x in (target, scale.float()))
    if n < len(target):
        rows = _on_device(torch.nonzero_static(supervised, size=n).squeeze(1), device)
        hidden, target, scale = (x.index_select(0, rows) for x in (hidden, target, scale))
    if group is not None:
        tokens = rows if n < shape.numel() else torch.arange(n, device=device)
        group = group.reshape(-1)[supervised.cpu()]
    if reduction == 'mean' and n:
        scale = scale / _divisor(n if num_items is None else num_items)
    settings = {'target': target, 'loss': loss, 'softcap': softcap, 'dtype': dtype,
                'memory': memory, 'tokens': tokens, 'group': group}
    value, nll = _FusedLoss.apply(hidden, weight, scale, reduction != 'none',
                                  torch.is_grad_enabled(), settings)
    if reduction != 'none':
        return value, nll
    if n < shape.numel():
        value, nll = (x.new_zeros(shape.numel()).index_copy(0, rows, x) for x in (value, nll))
    return value.view(shape), nll.view(shape)


def smoothed_cross_entropy(hidden, weight, target, *, smoothing=0.0, **options):
    """Return F.cross_entropy with label_smoothing, and NLL; `options` are those of `fused_loss`."""
    loss = cross_entropy() + LOSSES['smoothing'](smoothing)
    return fused_loss(hidden, weight, target, loss, **options)


class TokenStatistics(NamedTuple):
    """What `token_statistics` returns: float32 tensors of target's shape; top_token is int64."""
    loss: Tensor        # 0 where ignored
    nll: Tensor         # -log p(target); 0 where ignored
    lse: Tensor         # log of the sum of exp(logits)
    top_logit: Tensor
    top_token: Tensor   # the first if several logits are equal
    entropy: Tensor     # nats, over all V tokens


@torch.no_grad()
@_uncompiled
def token_statistics(hidden, weight, target, loss=None, *, softcap=None, ignore_index=-100):
    """Return TokenStatistics of each token's distribution, from one product, without gradient.

    Arguments are those of `fused_loss`; the loss is cross_entropy() by default. The logits are
    float32 for any inputs: bfloat16 has steps of 0.125 between 16 and 32.
    """
    loss = loss or cross_entropy()
    dtype, labels, supervised, _ = _check(hidden, weight, target, loss, softcap, ignore_index)
    labels, ignored = (_on_device(x, hidden.device) for x in (labels, ~supervised))
    s, _, _ = _sums_and_gradients(hidden.reshape(-1, weight.shape[1]), weight,
                                  labels.masked_fill(ignored, 0), loss, softcap, dtype,
                                  sums=('entropy', 'top_logit', 'top_token'))
    value, nll = (x.masked_fill(ignored, 0) for x in (loss.value(s), s.nll))
    return TokenStatistics(*(x.view(target.shape) for x in (
        value, nll, s.lse, s.top_logit, s.top_token, s.entropy)))


# ---- Forward and backward ------------------------------------------------------------------------

class _FusedLoss(torch.autograd.Function):
    """scale * loss and scale * NLL of each token, or their sums over tokens."""

    @staticmethod
    def forward(ctx, hidden, weight, scale, summed, with_gradient, settings):
        need = [with_gradient and summed and x for x in ctx.needs_input_grad[:2]]
        s, *gradients = _sums_and_gradients(hidden, weight, **settings, scale=scale, need=need)
        ctx.scale, ctx.settings = scale, settings
        ctx.gradients = gradients if summed else None
        ctx.save_for_backward(hidden, weight)
        value, nll = (x.sum() if summed else x
                      for x in (settings['loss'].value(s) * scale, s.nll * scale))
        ctx.mark_non_differentiable(nll)
        return value, nll

    @staticmethod
    def backward(ctx, upstream, _):
        if torch.is_grad_enabled():
            raise RuntimeError('fused_loss has no second derivative: call backward without '
                               'create_graph=True')
        factor = upstream.float()
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            _, *gradients = _sums_and_gradients(*ctx.saved_tensors, **ctx.settings,
                                                scale=factor * ctx.scale,
                                                need=ctx.needs_input_grad[:2])
            factor = None
        gradients = (None if g is None else _scale(g.to(x.dtype), factor)
                     for g, x in zip(gradients, ctx.saved_tensors))
        return *gradients, None, None, None, None


def _sums_and_gradients(hidden, weight, target, loss, softcap, dtype, memory=None, tokens=None,
                        group=None, scale=None, need=(False, False), sums=()):
    """Return the RowSums of n tokens, and dh and dW of sum(scale * loss), chunk after chunk.

    hidden [n, D]; weight [V, D]; target, tokens, group and scale [n]; dtype: of the products; need:
    (dh?, dW?), None is returned for one that is not needed. sums: names of RowSums to compute
    besides those of the loss; with them the logits are float32.
    """
    n, V = len(hidden), len(weight)
    softcap = softcap and float(softcap)
    device, logits_dtype = hidden.device, torch.float32 if sums else dtype
    h, w = (x.to(dtype).contiguous() for x in (hidden, weight))
    if not h.is_cuda:       # where a product has the dtype of its factors
        h, w = h.to(logits_dtype), w.to(logits_dtype)
    memory = MEMORY.get(device.type, MEMORY['cpu']) if memory is None else memory or LEAST_MEMORY
    rows = max(ROWS, memory // (V * logits_dtype.itemsize) // ROWS * ROWS)
    chunks, groups_fit = _chunks(n, rows, group)
    buffer = torch.empty(max((c.stop - c.start for c in chunks), default=0), V, device=device,
                         dtype=logits_dtype)
    s = RowSums(V, **{name: torch.zeros(n, device=device, dtype=torch.int64 if name == 'top_token'
                                        else torch.float32)
                      for name in {'z_y', 'lse', *loss.sums, *sums} - {'tokens'}}, tokens=tokens)
    dh = torch.empty_like(h) if need[0] else None
    dw = (torch.empty_like if n else torch.zeros_like)(w, dtype=weight.dtype) if need[1] else None
    process = _kernels if _use_triton(h) and stands_for(_plain) else _plain
    # the coefficients of a group in several chunks need all its RowSums: a first pass
    passes = [need] if groups_fit or not any(need) else [(False, False), need]
    with torch.autocast(device.type, enabled=False):
        for need_dh, need_dw in passes:
            for chunk in chunks:
                logits = buffer[:chunk.stop - chunk.start]
                part = RowSums(*(x[chunk] if isinstance(x, Tensor) else x for x in s))
                known = (part, slice(None)) if groups_fit else (s, chunk)
                _product(h[chunk], w.T, logits)
                process(logits, h[chunk], w, target[chunk], part, softcap,
                        functools.partial(_coefficients, loss, *known),
                        scale[chunk] if need_dh or need_dw else None)
                if need_dh:     # logits now holds the gradient
                    _product(logits, w, dh[chunk])
                if need_dw:
                    _product(logits.T, h[chunk], dw, add=chunk.start > 0)
    return s, dh, dw


def _chunks(n, rows, group):
    """Return ([slice of at most `rows` tokens, ...], whether each group is in one of them)."""
    # all n, or a multiple of ROWS such that chunks have about the same size
    size = max(1, min(n, math.ceil(n / max(1, math.ceil(n / rows)) / ROWS) * ROWS))
    equal = [slice(start, min(n, start + size)) for start in range(0, n, size)]
    if group is None or len(equal) < 2:
        return equal, True
    borders = [0, *(torch.nonzero(group.diff()).squeeze(1) + 1).tolist(), n]
    chunks, end = [], 0
    while end < n:      # as many whole groups as fit
        start, end = end, borders[bisect.bisect(borders, end + rows) - 1]
        if start == end:
            return equal, False
        chunks.append(slice(start, end))
    return chunks, True


def _product(a, b, out, add=False):
    """Compute out = a @ b, or out += a @ b, in float32, rounded once to the dtype of out."""
    options = {'out_dtype': out.dtype} if a.is_cuda and a.dtype != out.dtype else {}
    if not a.is_cuda:
        a, b = a.to(out.dtype), b.to(out.dtype)
    torch.addmm(out, a, b, out=out, **options) if add else torch.mm(a, b, out=out, **options)


def _scale(x, factor):
    """Return x, multiplied in place by a 0-d factor and rounded once; None stands for 1."""
    if factor is not None and _use_triton(x):
        _scale_kernel[(triton.cdiv(x.numel(), 16384),)](x, factor, x.numel(), BLOCK=16384)
    elif factor is not None and (x.is_cuda or factor != 1):
        x *= factor.view(1)     # a 0-d factor would be rounded to bfloat16
    return x


# Both functions fill `s`, the RowSums of a chunk's logits [n, V] = h @ w.T, and, if scale is given,
# overwrite the logits with scale * dloss/dlogits; coefficients() returns [a, b, c, e, f, t]. The
# label's logit is computed again, in float32: loss and gradient depend on it most, and rounding it
# is plain torch's largest error.

def _kernels(logits, h, w, target, s, softcap, coefficients, scale):
    (n, V), D = logits.shape, h.shape[1]
    # The error of the hardware's tanh is 2**-11, that of rounding to bfloat16 2**-8.
    fast = logits.is_cuda and logits.dtype == torch.bfloat16
    wide = 4 if n < 512 else 1      # few rows: more threads for each
    _row_sums_kernel[(n,)](logits, h, w, target, s.z_y, s.lse, s.sum_z, s.sum_p2, s.entropy,
                           s.top_logit, s.top_token, V, D, softcap, FAST=fast, BLOCK=wide * BLOCK,
                           num_warps=4 * wide)
    if scale is not None:
        _gradient_kernel[(n, triton.cdiv(V, BLOCK))](
            logits, target, s.top_token, s.z_y, s.lse, scale, *coefficients(), V, softcap, fast,
            BLOCK)


def _plain(logits, h, w, target, s, softcap, coefficients, scale):
    label = target[:, None]
    z, z_y = logits.float(), (h.float() * w[target].float()).sum(1)
    raw_y = z_y[:, None]
    if softcap is not None:
        z, z_y = (torch.tanh(x / softcap).mul_(softcap) for x in (z, z_y))
    s.z_y.copy_(z_y)
    z.scatter_(1, label, z_y[:, None])
    log_p = z - torch.logsumexp(z, 1, out=s.lse)[:, None]
    p = log_p.exp()
    sums = {'sum_z': lambda: z.sum(1), 'sum_p2': lambda: p.square().sum(1),
            'entropy': lambda: torch.special.entr(p).sum(1),
            'top_logit': lambda: z.amax(1), 'top_token': lambda: z.argmax(1)}
    for name, compute in sums.items():
        if getattr(s, name) is not None:
            getattr(s, name).copy_(compute())
    if scale is not None:
        a, b, c, e, f, t = (x[:, None] if isinstance(x, Tensor) else x for x in coefficients())
        factor = a if b is None else a + b * log_p.clamp_min(-1e4)      # 0 * -inf is NaN
        factor = factor if c is None else factor + c * p
        g = p.mul_(factor).add_(e)
        g.scatter_(1, label, g.gather(1, label) - f)
        if t is not None:
            top = s.top_token[:, None]
            g.scatter_(1, top, g.gather(1, top) + t)
        if softcap is not None:     # dz/dlogit = 1 / cosh^2, since 1 - tanh^2 cancels near 1
            g /= z.copy_(logits).scatter_(1, label, raw_y).div_(softcap).cosh_().square_()
        logits.copy_(g.mul_(scale[:, None]))


def _coefficients(loss, s, rows):
    """Return [a, b, c, e, f, t] for rows of s, each a float or float32 [n]; b, c, t may be None."""
    known = {'a': 0, 'b': None, 'c': None, 'e': 0, 'f': 0, 't': None}
    coefficients = known | loss.coefficients(s)
    unknown = ', '.join(map(repr, [*coefficients][len(known):]))
    _require(not unknown, f'the coefficients are a, b, c, e, f and t, got {unknown}')
    return [x.float().expand_as(s.lse)[rows].contiguous() if isinstance(x, Tensor) else
            x if x is None else float(x) for x in coefficients.values()]


def _use_triton(x):
    return triton is not None and x.is_cuda


# ---- Triton kernels. Arithmetic is float32 throughout --------------------------------------------

if triton is not None:
    LOG2E = tl.constexpr(1.4426950408889634)
    # Arguments with one number per row. A chunk may begin at any row, and Triton would compile a
    # kernel again for another alignment.
    OF_ROW = ('target', 'z_y', 'lse', 'sum_z', 'sum_p2', 'entropy', 'top_logit', 'top_token',
              'scale', *'abceft')

    @triton.jit
    def _cap(z, softcap, FAST: tl.constexpr):
        if softcap is not None:
            if FAST:
                t = tl.inline_asm_elementwise(
                    'tanh.approx.f32 $0, $1;', '=f,f', [z * (1 / softcap)], dtype=tl.float32,
                    is_pure=True, pack=1)
            else:   # also correct where exp2 gives inf or 0
                t = 1 - 2 / (tl.exp2(z * (2 * LOG2E / softcap)) + 1)
            z = t * softcap
        return z

    @triton.jit(do_not_specialize_on_alignment=OF_ROW)
    def _row_sums_kernel(logits, hidden, weight, target, z_y, lse, sum_z, sum_p2, entropy,
                         top_logit, top_token, V, D, softcap, FAST: tl.constexpr,
                         BLOCK: tl.constexpr):
        """Compute the RowSums of one row of logits, except those whose pointer is None.

        A program reads blocks of BLOCK logits, each divided into lanes of eight. A lane keeps its
        maximum and, with x = z - maximum, its sums of exp x, exp 2x and x exp x, which are rescaled
        when the maximum rises (online softmax). Only the end merges lanes, where threads wait.
        """
        row = tl.program_id(0).to(tl.int64)     # row * V passes 2**31
        logits += row * V
        y = tl.load(target + row)
        dot = tl.zeros([1024], tl.float32)
        for i in range(0, D, 1024):
            d = i + tl.arange(0, 1024)
            dot += (tl.load(hidden + row * D + d, mask=d < D, other=0.0).to(tl.float32)
                    * tl.load(weight + y * D + d, mask=d < D, other=0.0).to(tl.float32))
        label_z = _cap(tl.sum(dot), softcap, False)
        tl.store(z_y + row, label_z)

        lane_start = tl.arange(0, BLOCK // 8) * 8
        maximum = tl.full([BLOCK // 8], -3.0e38, tl.float32)    # -inf - -inf would be NaN
        zeros = tl.zeros([BLOCK // 8], tl.float32)
        exp_sum, square_sum = zeros, zeros
        x_exp_sum, z_sum = zeros, zeros
        top = tl.zeros([BLOCK // 8], tl.int32)
        for i in tl.range(0, V, BLOCK, num_stages=3):
            j = i + lane_start[:, None] + tl.arange(0, 8)[None, :]
            z = _cap(tl.load(logits + j, mask=j < V, other=0.0).to(tl.float32), softcap, FAST)
            z = tl.where(j == y, label_z, z)    # a branch would prevent pipelined loads
            if sum_z is not None:
                z_sum += tl.sum(z, 1)   # z is 0 past the end
            z = tl.where(j < V, z, float('-inf'))
            if top_token is None:
                block_max = tl.max(z, 1)
            else:
                block_max, offset = tl.max(z, 1, return_indices=True)
                top = tl.where(block_max > maximum, i + lane_start + offset, top)
            down = tl.minimum(maximum - block_max, 0.0)     # old maximum - new maximum
            shrink = tl.exp2(down * LOG2E)
            maximum = tl.maximum(maximum, block_max)
            x = z - maximum[:, None]
            exp = tl.exp2(x * LOG2E)
            if entropy is not None:     # every x changes by down
                x_exp_sum = (x_exp_sum + down * exp_sum) * shrink
                x_exp_sum += tl.sum(tl.where(exp > 0, exp * x, 0.0), 1)   # not 0 * -inf
            if sum_p2 is not None:
                square_sum = square_sum * shrink * shrink + tl.sum(exp * exp, 1)
            exp_sum = exp_sum * shrink + tl.sum(exp, 1)
        row_max = tl.max(maximum)
        down = maximum - row_max
        shrink = tl.exp2(down * LOG2E)
        total = tl.sum(exp_sum * shrink)
        tl.store(lse + row, row_max + tl.log(total))
        if sum_z is not None:
            tl.store(sum_z + row, tl.sum(z_sum))
        if sum_p2 is not None:
            tl.store(sum_p2 + row, tl.sum(square_sum * shrink * shrink) / total / total)
        if entropy is not None:
            mean_x = tl.sum((x_exp_sum + down * exp_sum) * shrink) / total
            tl.store(entropy + row, tl.log(total) - mean_x)
        if top_token is not None:
            tl.store(top_logit + row, row_max)
            tl.store(top_token + row, tl.min(tl.where(maximum == row_max, top, 2147483647)))

    @triton.jit
    def _load_of_row(x, row):
        """Return x[row] if x is a pointer, else x, a number (a float in Triton's interpreter)."""
        return x if isinstance(x, float) or not x.dtype.is_ptr() else tl.load(x + row)

    @triton.jit(do_not_specialize_on_alignment=OF_ROW)
    def _gradient_kernel(logits, target, top_token, z_y, lse, scale, a, b, c, e, f, t, V, softcap,
                         FAST: tl.constexpr, BLOCK: tl.constexpr):
        """Write scale (p (a + b log p + c p) + e - f [j = y] + t [j = top]) dz/dlogit over a block
        of one row.
        """
        row = tl.program_id(0).to(tl.int64)
        logits += row * V
        j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        logit = tl.load(logits + j, mask=j < V, other=0.0).to(tl.float32)
        y = tl.load(target + row)
        z = _cap(logit, softcap, FAST)
        z = tl.where(j == y, tl.load(z_y + row), z)
        log_p = z - tl.load(lse + row)
        p = tl.exp2(log_p * LOG2E)
        factor = _load_of_row(a, row)
        if b is not None:
            factor += _load_of_row(b, row) * tl.where(p > 0, log_p, 0.0)     # 0 * -inf is NaN
        if c is not None:
            factor += _load_of_row(c, row) * p
        # In float32: in a trained model p_y is near f, and rounding would exceed the difference.
        g = p * factor + _load_of_row(e, row)
        g = tl.where(j == y, g - _load_of_row(f, row), g)
        if t is not None:
            g = tl.where(j == tl.load(top_token + row), g + _load_of_row(t, row), g)
        if softcap is not None:
            # dz/dlogit = 1 / cosh^2, since 1 - tanh^2 cancels near 1
            decay = tl.exp2(tl.abs(logit) * (-2 * LOG2E / softcap))
            g *= 4 * decay / ((1 + decay) * (1 + decay))
        g *= tl.load(scale + row)
        tl.store(logits + j, g.to(logits.dtype.element_ty), mask=j < V)

    @triton.jit
    def _scale_kernel(x, factor, size, BLOCK: tl.constexpr):
        """Compute x *= factor in place; x is not read if the factor is 1, as in most calls."""
        factor = tl.load(factor)
        if factor != 1.0:
            i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            value = tl.load(x + i, mask=i < size).to(tl.float32)
            tl.store(x + i, (value * factor).to(x.dtype.element_ty), mask=i < size)


def _require(holds, message):
    if not holds:
        raise ValueError(message)


def _check(hidden, weight, target, loss, softcap, ignore_index):
    """Check the arguments of both functions. Return (dtype of the products, target as int64 [n],
    mask of its tokens with a loss [n], their number); target and mask stay on target's device.
    """
    _require(weight.dim() == 2 and hidden.dim() >= 2 and hidden.shape[-1] == weight.shape[1],
             f'need hidden [..., D] and weight [V, D], got {[*hidden.shape]} and {[*weight.shape]}')
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
    autocast = torch.is_autocast_enabled(hidden.device.type)
    dtype = torch.get_autocast_dtype(hidden.device.type) if autocast else hidden.dtype
    _require(autocast or dtype == weight.dtype, f'hidden is {dtype} but weight is {weight.dtype}: '
             'convert one of them, or call under torch.autocast')
    dtypes = {dtype, hidden.dtype, weight.dtype}
    _require(dtypes <= {torch.float32, torch.bfloat16}, 'hidden, weight and autocast must be '
             f'float32 or bfloat16, got {dtypes}; float16 is too narrow for a gradient of 0.1 / V')

    V, target = len(weight), target.reshape(-1).long()      # in uint8, -100 would be 156
    supervised = target == target if ignore_index is None else target != ignore_index
    outside = supervised & ((target < 0) | (target >= V))
    if ignore_index is None and target.is_cuda:     # a count would make the host wait
        torch._assert_async(~outside.any(), f'a target is not in [0, {V})')
        return dtype, target, supervised, len(target)
    n, n_outside = torch.stack((supervised.sum(), outside.sum())).tolist()
    if n_outside:
        raise ValueError(f'target {target[outside][0].item()} is neither in [0, {V}), the rows of '
                         f'weight, nor ignore_index={ignore_index}')
    return dtype, target, supervised, n


def _divisor(num_items):
    """Return num_items as a number or a 0-d tensor; one on a GPU is checked without waiting."""
    if not isinstance(num_items, Tensor) or not num_items.is_cuda:
        _require(num_items > 0, f'num_items must be positive, got {num_items}')
        return float(num_items)
    torch._assert_async(num_items.reshape(()) > 0, 'num_items must be positive')
    return num_items.reshape(())


def _on_device(x, device):
    """Return x on the device; a copy from the CPU does not wait."""
    if x.device.type == 'cpu' and device.type == 'cuda':
        x = x.pin_memory()
    return x.to(device, non_blocking=True)
