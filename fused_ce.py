"""Label-smoothed cross-entropy of an output layer, without ever holding all the logits.

For one token with hidden state h [D] and label y, and for the output matrix W [V, D], smoothing b
and softcap c:

    a    = W h                                      the logits [V]: 2DV operations
    z    = c tanh(a / c)                            capped logits; z = a without a softcap
    q_j  = (1 - b) [j = y] + b / V                  the smoothed label
    loss = -sum_j q_j log softmax(z)_j = lse(z) - (1 - b) z_y - b mean(z)
    g_j  = dloss/da_j = (softmax(z)_j - q_j) (1 - (z_j / c)^2)
    dh   = W' g   and   dW = sum over tokens of g h'          two more products of 2DV each

Without a softcap mean(z) is h . mean(W): smoothing is a rank-one correction, and any cross-entropy
can be smoothed from outside. The softcap ends that, so here smoothing is one more sum in a pass
that reads every logit anyway: exact, and next to free.

Operations: three products, 6NDV in all; nothing exact can do with less. Bytes: for 8,192 tokens of
Gemma 2 (V = 256,000) the logits are 4 GB in bfloat16, and plain torch makes several copies of
twice that in float32. There are two ways not to hold them:

Chunks of tokens, the default. A product writes a chunk's logits, one kernel reads them for the
normaliser, a second one leaves g in their place, two products read g, and the next chunk takes the
space. g needs the normaliser, and that needs all V logits of a token, which a chunk of whole rows
has at once: three products do. The price is that dW is a sum over chunks, read and written with
every one: few and large chunks are faster, and more exact. See `_chunk_rows`.

Slices of the vocabulary, where memory is short or the gradient of every token's loss is not known
yet (reduction='none'). One kernel multiplies and reduces, its logits never leave the chip; in the
backward pass every slice's logits are made again, a fourth product, and its rows of dW are finished
at once.

On a CUDA device the passes are Triton kernels and the products cuBLAS; elsewhere the same chunks go
through plain torch. This file imports nothing of ours and can be copied into another project.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:     # on macOS, say: plain torch
    triton = None

MEMORY = 1_100_000_000      # bytes of work space on a GPU
CPU_CHUNK_BYTES = 2 ** 23   # on a CPU a chunk is fast while it stays in the cache
LOW_PRECISION_SUMS = 8      # chunks whose dW may be summed in bfloat16: see _chunk_rows
LOW_MEMORY = 156_000_000    # what memory=0 stands for: 8,192 tokens of Gemma 2 2B in one block
INTEGERS = {torch.int8, torch.int16, torch.int32, torch.int64,  # what int64 can hold
            torch.uint8, torch.uint16, torch.uint32}
BLOCK = 2048                # logits of a row that one program of four warps holds at a time
TILE = 128, 256, 64         # tokens, logits and part of D in the product of _statistics_kernel
MIN_SLICE = 4096            # tokens of the vocabulary: narrower ones waste the float32 sum of dh


class TokenStatistics(NamedTuple):
    """What `token_statistics` returns: float32 tensors of target's shape; top_token is int64."""
    loss: Tensor        # smoothed; 0 where ignored
    nll: Tensor         # -log p(target); 0 where ignored
    lse: Tensor         # log of the sum of exp(logits)
    top_logit: Tensor
    top_token: Tensor   # the first, where several logits are equal
    entropy: Tensor     # nats, over all V tokens


@torch.compiler.disable
def smoothed_cross_entropy(hidden, weight, target, *, smoothing=0.0, softcap=None,
                           ignore_index=-100, reduction='mean', num_items=None,
                           token_weight=None, memory=None, chunk_rows=None):
    """F.cross_entropy(cap(hidden @ weight.T), target, label_smoothing=smoothing), and the NLL.

    hidden        [N, D], or any leading shape such as [B, T, D]; float32, bfloat16 or float16
    weight        [V, D], the output matrix, of the same dtype; autocast casts both
    target        integers of hidden's leading shape, each in [0, V) or ignore_index
    smoothing     mass moved from the label to the uniform distribution over all V, in [0, 1]
    softcap       logits become softcap * tanh(logits / softcap); None leaves them alone
    ignore_index  marks tokens without loss; None says that there are none
    reduction     'mean' over tokens not ignored, 'sum', or 'none' (target's shape, 0 where ignored)
    num_items     int or 0-d tensor that divides the sum in 'mean' instead of the number of tokens:
                  give a whole step's number, and the losses of its micro-batches add up to its mean
    token_weight  float tensor of target's shape that multiplies each token's loss in the sum
    memory        bytes of work space to aim at, beyond inputs and gradients; 1.1 GB by default. In
                  what is too little for eight chunks of tokens or fewer the gradients take four
                  products instead of three; 0 takes the least (`_slice_shape`)
    chunk_rows    tokens per chunk, instead of what memory allows

    Returns (loss, nll) in float32. nll is the plain negative log-likelihood in the same reduction,
    without gradient: losses under different smoothing cannot be compared, it can.

    Ignored tokens are dropped before the first product. If none is left, loss and gradients are 0
    (torch says nan). A target on the CPU is best: then nothing ever waits for the device. For one
    on a GPU the host has to fetch a count, once per call, unless ignore_index is None.

    Gradients of 'mean' and 'sum' are computed in the forward pass, while the logits are at hand,
    and handed over by the first backward pass. A second one computes them again, and so does every
    one of 'none', where each token's upstream gradient must come first. There is no second
    derivative: create_graph=True raises RuntimeError. An argument that does not fit raises
    ValueError; a target out of range does too, but on a GPU with ignore_index=None it is a device
    assertion.
    """
    dtype = _check_layer(hidden, weight, softcap)
    _check_loss(hidden, target, smoothing, ignore_index, reduction, num_items, token_weight, memory,
                chunk_rows)
    shape, device = target.shape, hidden.device
    hidden = hidden.reshape(-1, weight.shape[1])
    rows, target = _learnt_rows(target.reshape(-1), len(weight), ignore_index, device)
    if token_weight is not None:
        token_weight = _on_device(token_weight.detach().float().reshape(-1), device)
    if rows is not None:
        hidden = hidden.index_select(0, rows)
        token_weight = token_weight if token_weight is None else token_weight[rows]

    scale = token_weight
    if reduction != 'none':
        n = len(target)
        divisor = 1 if reduction == 'sum' or n == 0 else n if num_items is None else num_items
        if not isinstance(divisor, Tensor) and divisor <= 0:
            raise ValueError(f'num_items must be positive, got {divisor}')
        scale = torch.ones(n, device=device) if scale is None else scale
        scale = scale / (divisor.to(device, torch.float32).reshape(())
                         if isinstance(divisor, Tensor) else divisor)
    call = _Call(target, None if reduction == 'none' else scale, float(smoothing),
                 softcap and float(softcap), dtype, memory, chunk_rows, torch.is_grad_enabled())
    with torch.autocast(device.type, enabled=False):
        loss, nll = _SmoothedCrossEntropy.apply(hidden, weight, call)
    if reduction != 'none':
        return loss, (nll * scale).sum()
    if scale is not None:
        loss, nll = loss * scale, nll * scale
    if rows is not None:
        zeros = loss.new_zeros(shape.numel())
        loss, nll = zeros.index_copy(0, rows, loss), zeros.index_copy(0, rows, nll)
    return loss.view(shape), nll.view(shape)


@torch.no_grad()
def token_statistics(hidden, weight, target, *, smoothing=0.0, softcap=None, ignore_index=-100):
    """Everything one product can say about each token's distribution, without gradient.

    Arguments as above; returns TokenStatistics. The logits are float32 whatever the inputs are:
    between 16 and 32 bfloat16 moves in steps of 0.125, coarser than what a calibration metric
    measures. They never leave the chip where the dtype is bfloat16 or float16 and D a multiple
    of 8; otherwise a chunk of tokens at a time is held.
    """
    dtype = _check_layer(hidden, weight, softcap)
    _check_loss(hidden, target, smoothing, ignore_index)
    shape, device = target.shape, hidden.device
    target = target.reshape(-1).long()
    ignored = torch.zeros_like(target, dtype=torch.bool)
    if ignore_index is not None:
        ignored = target == ignore_index
    _, target = _learnt_rows(target.masked_fill(ignored, 0), len(weight), None, device)
    hidden, ignored = hidden.reshape(-1, weight.shape[1]), _on_device(ignored, device)
    s = _statistics(hidden, weight, target, dtype, softcap, exact=True, full=True)
    loss, nll = (x.masked_fill(ignored, 0)
                 for x in _losses(s.lse, s.z_y, s.sum_z, smoothing, len(weight)))
    return TokenStatistics(*(x.view(shape) for x in (loss, nll, s.lse, s.top, s.top_token,
                                                     s.lse - s.mean_z)))


@torch.no_grad()
def token_log_probs(hidden, weight, rows, tokens, *, softcap=None):
    """log p(tokens[i] | hidden[rows[i]]) as float32 [M], without gradient, for evaluation.

    hidden [N, D] and weight [V, D] as above. rows [M] index hidden and may repeat (the K letters of
    one question); each row in use meets the output matrix once. tokens [M] are in [0, V). Where
    both are on the CPU, the host does not wait for the device. The logits are float32, as in
    token_statistics. Raises ValueError.
    """
    dtype = _check_layer(hidden, weight, softcap)
    if hidden.dim() != 2 or rows.dim() != 1 or rows.shape != tokens.shape:
        raise ValueError(f'hidden must be [N, D], rows and tokens [M], got {list(hidden.shape)}, '
                         f'{list(rows.shape)} and {list(tokens.shape)}')
    for name, index, limit in ('rows', rows, len(hidden)), ('tokens', tokens, len(weight)):
        outside = index[(index < 0) | (index >= limit)]
        if len(outside):
            raise ValueError(f'{name} holds {outside[0].item()}, which is not in [0, {limit})')
    used, place = rows.unique(return_inverse=True)      # used[place] = rows
    used, place, rows, tokens = (_on_device(x, hidden.device) for x in (used, place, rows, tokens))
    lse = _statistics(hidden[used], weight, torch.zeros_like(used), dtype, softcap, exact=True).lse
    return _label_logits(hidden, weight, rows, tokens, dtype, softcap) - lse[place]


# ------------------------------------------------------------------------------------------------
# Autograd
# ------------------------------------------------------------------------------------------------

class _Call(NamedTuple):
    """One call's n tokens, without those that are ignored, and its options."""
    target: Tensor          # [n] int64, in [0, V)
    scale: Tensor | None    # [n] float32, each token's factor in the sum; None: reduction='none'
    smoothing: float
    softcap: float | None
    dtype: torch.dtype      # of the products
    memory: int | None
    chunk_rows: int | None
    with_gradient: bool


class _SmoothedCrossEntropy(torch.autograd.Function):
    """The sum over tokens of scale * loss, or, if scale is None, each token's loss; and its NLL."""

    @staticmethod
    def forward(ctx, hidden, weight, call):
        need = [call.with_gradient and needed for needed in ctx.needs_input_grad[:2]]
        chunk_rows, sum_dtype = _chunk_rows(len(hidden), weight, call, need[1])
        ctx.call, ctx.dtypes, ctx.gradients = call, (hidden.dtype, weight.dtype), None
        if call.scale is None or chunk_rows is None or not any(need):
            s = _statistics(hidden, weight, call.target, call.dtype, call.softcap)
            lse, z_y, sum_z = s.lse, s.z_y, s.sum_z
        else:
            lse, z_y, sum_z, *ctx.gradients = _by_tokens(hidden, weight, call, need, chunk_rows,
                                                         sum_dtype)
        loss, nll = _losses(lse, z_y, sum_z, call.smoothing, len(weight))
        ctx.save_for_backward(hidden, weight, lse, z_y)
        ctx.mark_non_differentiable(nll)
        return loss if call.scale is None else (loss * call.scale).sum(), nll

    @staticmethod
    def backward(ctx, upstream, _):
        if torch.is_grad_enabled():
            raise RuntimeError('smoothed_cross_entropy has no second derivative: call backward '
                               'without create_graph=True')
        upstream = upstream.float()
        if ctx.gradients is None:
            scale = upstream if ctx.call.scale is None else upstream * ctx.call.scale
            dh, dw, power = _by_slices(*ctx.saved_tensors, ctx.call, scale,
                                       ctx.needs_input_grad[:2])
            upstream = scale.new_ones(())
        else:
            # Handed over, not copied: a copy would take another output matrix of memory.
            (dh, dw, power), ctx.gradients = ctx.gradients, None
        factor = upstream if power is None else upstream / power
        return (*(x if x is None else _scaled(x, factor, dtype)
                  for x, dtype in zip((dh, dw), ctx.dtypes)), None)


def _losses(lse, z_y, sum_z, smoothing, V):
    """(loss, nll) of each token."""
    nll = lse - z_y
    return (nll + smoothing * (z_y - sum_z / V) if smoothing else nll.clone()), nll


def _lifted(scale, dtype):
    """scale, and None; in float16, where smoothing / V / N would be 0, scale * power, power."""
    if dtype != torch.float16 or len(scale) == 0:
        return scale.contiguous(), None
    largest = scale.abs().max().clamp_min(1e-30)
    power = torch.exp2(8 - largest.log2().ceil())       # exact to multiply and divide by
    return scale * power, power


def _scaled(x, factor, dtype):
    """x * factor in dtype, rounded once; in x's memory if it has that dtype."""
    if x.dtype == dtype and _use_triton(x):
        _scale_kernel[(1024,)](x, factor, x.numel(), PROGRAMS=1024, BLOCK=4096)
        return x
    if x.device.type == 'cpu' and x.dtype == dtype and factor == 1:
        return x
    # One-dimensional, or torch would first round the float32 factor to a bfloat16 x's dtype.
    out = x if x.dtype == dtype else torch.empty_like(x, dtype=dtype)
    return torch.mul(x, factor.view(1), out=out)


# ------------------------------------------------------------------------------------------------
# Three products: chunks of tokens
# ------------------------------------------------------------------------------------------------

def _chunk_rows(n, weight, call, need_dw):
    """(tokens per chunk, dtype of the sum of dW); (None, _) where memory is too little for chunks.

    In one chunk the product itself sums over the tokens, in float32, and rounds once. With more, dW
    is a sum of products. In float32 it takes 4DV bytes, as much as 2D rows of bfloat16 logits, and
    8DV of traffic with every chunk; float32 weights have no other. In bfloat16 it takes no memory,
    being the gradient itself, and half the traffic, but k chunks round k times: sqrt((k + 1) / 2)
    times the error of one rounding where the chunks' terms are independent. For eight chunks that
    is 1.1 to 1.5 times the error of torch in bfloat16, which rounds logits, their gradient and dW;
    more are not summed so. float16 is too narrow for any sum over tokens.
    """
    V, D = weight.shape
    memory = _memory(call)
    on_cpu = weight.device.type == 'cpu' and call.memory is None

    def fitting(memory, least):
        if call.chunk_rows is not None:
            limit = call.chunk_rows
        elif on_cpu:
            limit = max(256, CPU_CHUNK_BYTES // (4 * V))
        else:
            limit = memory // (call.dtype.itemsize * V)
            if n > limit:
                limit = limit // 128 * 128      # whole tiles for the matrix products
            if n > limit and limit < least:
                return None
        alike = math.ceil(n / max(1, math.ceil(n / max(1, limit))))
        return max(1, min(limit, math.ceil(alike / 128) * 128))

    if not need_dw:
        return fitting(memory, 128), None
    if weight.dtype == torch.float32:       # the sum is the gradient
        return fitting(memory, 768), torch.float32
    rows = fitting(memory, 128)
    if rows is not None and weight.dtype == call.dtype == torch.bfloat16:
        if n <= rows * (1 if on_cpu else LOW_PRECISION_SUMS):
            return rows, torch.bfloat16
    if call.chunk_rows is None and not on_cpu and memory < 4 * D * V:
        return None, None
    return fitting(memory - 2 * D * V, 768), torch.float32


def _memory(call):
    """Bytes to aim at."""
    if call.memory is None:
        return MEMORY if call.target.is_cuda else LOW_MEMORY
    return call.memory or LOW_MEMORY


def _by_tokens(hidden, weight, call, need, chunk_rows, sum_dtype):
    """Sums and gradients, chunk by chunk of tokens: the heart of this file.

    hidden [n, D], weight [V, D]; need, which gradients are wanted, (hidden's, weight's). Returns
    lse, z_y and sum_z [n], dh [n, D] and dw [V, D] in sum_dtype, None where not wanted, and what
    both have to be divided by, or None.
    """
    n, V = len(hidden), len(weight)
    need_dh, need_dw = need
    h, w = hidden.to(call.dtype).contiguous(), weight.to(call.dtype).contiguous()
    scale, power = _lifted(call.scale, call.dtype)
    # Each by itself: kernels are compiled for the alignment of what they get.
    lse, z_y, sum_z = (torch.zeros(n, device=h.device) for _ in range(3))
    dh = torch.empty_like(h) if need_dh else None
    dw = torch.zeros if n == 0 else torch.empty
    dw = dw(weight.shape, device=h.device, dtype=sum_dtype) if need_dw else None
    buffer = torch.empty(min(n, chunk_rows), V, device=h.device, dtype=call.dtype)
    for start in range(0, n, chunk_rows):
        c = slice(start, start + chunk_rows)
        target = call.target[c]
        logits = torch.mm(h[c], w.T, out=buffer[:len(target)])
        _label_logits(h[c], w, None, target, call.dtype, call.softcap, out=z_y[c])
        _row_sums(logits, call, target, z_y[c], lse[c], sum_z[c])
        g = _logit_gradient(logits, 0, V, call, target, z_y[c], lse[c], scale[c])
        if need_dh:
            torch.mm(g, w, out=dh[c])
        if need_dw:
            _add_product(dw, g.T, h[c], start == 0)
    return lse, z_y, sum_z, dh, dw, power


# ------------------------------------------------------------------------------------------------
# Four products: slices of the vocabulary
# ------------------------------------------------------------------------------------------------

def _slice_shape(n, weight, call, need_dh):
    """(tokens, tokens of the vocabulary) whose logits are alive at once.

    dh is a sum over the slices, kept in float32: twice the bytes of the gradient that it becomes
    in the end. Where memory does not hold that and MIN_SLICE logits for all n tokens, they go in
    up to eight equal blocks, as _chunk_rows has up to eight chunks; with more tokens it is the
    memory that grows.
    """
    V, D = weight.shape
    memory = _memory(call)
    item = call.dtype.itemsize
    sum_bytes = (4 - item) * D if need_dh else 0
    blocks = math.ceil(n * (sum_bytes + item * min(V, MIN_SLICE)) / memory)
    if weight.dtype != torch.float32 and call.dtype != torch.bfloat16:
        blocks = 1      # float16 is too narrow for a sum
    rows = math.ceil(n / min(max(1, blocks), LOW_PRECISION_SUMS))
    rows = min(n, math.ceil(rows / 128) * 128)
    width = max(MIN_SLICE, (memory // max(1, rows) - sum_bytes) // item)
    return rows, min(V, width // (MIN_SLICE // 4) * (MIN_SLICE // 4))


def _by_slices(hidden, weight, lse, z_y, call, scale, need):
    """dh and dw from a forward pass's sums and each token's factor: scale [n].

    Returns dh [n, D], dw [V, D] and what both have to be divided by, or None.
    """
    n, (V, D) = len(hidden), weight.shape
    need_dh, need_dw = need
    scale, power = _lifted(scale, call.dtype)
    rows, width = _slice_shape(n, weight, call, need_dh)
    narrow = call.dtype == weight.dtype == torch.bfloat16
    dw = torch.zeros if n == 0 else torch.empty
    dw = dw(weight.shape, device=hidden.device,
            dtype=weight.dtype if narrow else torch.float32) if need_dw else None
    sum_dh = torch.empty(rows, D, device=hidden.device) if need_dh else None
    buffer = torch.empty(rows * width, device=hidden.device, dtype=call.dtype)
    dh = []
    with torch.autocast(hidden.device.type, enabled=False):
        for start in range(0, n, max(1, rows)):
            c = slice(start, start + rows)
            h, target = hidden[c].to(call.dtype).contiguous(), call.target[c]
            for first in range(0, V, width):
                v = slice(first, first + width)
                w = weight[v].to(call.dtype)
                logits = torch.mm(h, w.T, out=buffer[:len(h) * len(w)].view(len(h), len(w)))
                g = _logit_gradient(logits, first, V, call, target, z_y[c], lse[c], scale[c])
                if need_dw:
                    _add_product(dw[v], g.T, h, start == 0)
                if need_dh:
                    _add_product(sum_dh[:len(h)], g, w, first == 0)
            if need_dh:
                if start + rows >= n:
                    del buffer, logits, g       # dh takes its place
                dh.append(sum_dh[:len(h)].to(call.dtype, copy=True))
    if need_dh:
        dh = torch.cat(dh) if len(dh) > 1 else dh[0] if dh else torch.zeros_like(hidden)
    return dh if need_dh else None, dw, power


def _add_product(out, a, b, first):
    """out = a @ b, or out += a @ b, summed in float32 and rounded to out's dtype."""
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, beta=0 if first else 1, out=out)
    elif a.is_cuda:
        torch.addmm(out, a, b, beta=0 if first else 1, out_dtype=out.dtype, out=out)
    else:
        torch.addmm(out, a.float(), b.float(), beta=0 if first else 1, out=out)


# ------------------------------------------------------------------------------------------------
# What a token's logits amount to
# ------------------------------------------------------------------------------------------------

class _Statistics(NamedTuple):
    """Each [n]; float32 but top_token, int64. The last three only if full."""
    z_y: Tensor             # the label's logit
    lse: Tensor
    sum_z: Tensor
    top: Tensor | None = None
    top_token: Tensor | None = None
    mean_z: Tensor | None = None    # expectation of z under softmax(z)


def _statistics(hidden, weight, target, dtype, softcap, exact=False, full=False):
    """_Statistics of hidden [n, D] in one product, whose logits are not kept.

    exact: the logits stay float32. Otherwise they are rounded to what a product in dtype writes,
    to fit the gradient that is computed from that.
    """
    h = hidden.to(dtype).contiguous()
    z_y = _label_logits(h, weight, None, target, dtype, softcap)
    if _use_triton(h) and dtype != torch.float32 and h.shape[1] % 8 == 0 and len(h):
        return _statistics_triton(h, weight, target, z_y, softcap, exact, full)
    with torch.autocast(h.device.type, enabled=False):
        w = weight.to(dtype).float() if exact else weight.to(dtype)
        chunk_rows = max(1, (MEMORY // 4 if h.is_cuda else CPU_CHUNK_BYTES) // (4 * len(w)))
        parts = []
        for chunk, label, label_z in zip(*(x.split(chunk_rows) for x in (h, target, z_y))):
            z = torch.mm(chunk.to(w.dtype), w.T).float()
            z = z if softcap is None else _capped(z, softcap)
            z.scatter_(1, label[:, None], label_z[:, None])
            lse = z.logsumexp(1)
            parts.append((lse, z.sum(1)))
            if full:
                parts[-1] += *z.max(1), ((z - lse[:, None]).exp_() * z).sum(1)
    return _Statistics(z_y, *(torch.cat(column) for column in zip(*parts)))


def _label_logits(hidden, weight, rows, tokens, dtype, softcap, out=None):
    """out[i] = cap(hidden[rows[i]] . weight[tokens[i]]), float32 from the product on.

    The loss and the gradient hang on this logit more than on any other: rounding it to bfloat16
    is the largest error that the plain computation makes, and next to nothing to avoid.
    """
    if out is None:
        out = torch.empty(len(tokens), device=hidden.device)
    if _use_triton(hidden) and len(tokens):
        _label_kernel[(len(tokens),)](hidden, weight, rows, tokens, out, hidden.shape[1],
                                      *hidden.stride(), *weight.stride(), softcap,
                                      ROUND=_TL_DTYPES[dtype], TANH=_tanh(hidden, exact=True),
                                      BLOCK=1024)
        return out
    for i in range(0, len(tokens), 1024):
        c = slice(i, i + 1024)
        h = hidden[c] if rows is None else hidden[rows[c]]
        z = (h.to(dtype).float() * weight[tokens[c]].to(dtype).float()).sum(1)
        out[c] = z if softcap is None else _capped(z, softcap)
    return out


def _row_sums(logits, call, target, z_y, lse, sum_z):
    """Fills lse and, if it counts, sum_z [n] from stored logits [n, V]."""
    n, V = logits.shape
    smoothed = call.smoothing > 0
    if _use_triton(logits):
        _row_sums_kernel[(n,)](logits, target, z_y, lse, sum_z, V, call.softcap,
                               SMOOTHED=smoothed, BOUNDED=_bounded(call.softcap),
                               TANH=_tanh(logits),
                               BLOCK=min(BLOCK, triton.next_power_of_2(V)), num_warps=4)
        return
    z = logits.float() if call.softcap is None else _capped(logits.float(), call.softcap)
    z.scatter_(1, target[:, None], z_y[:, None])
    torch.logsumexp(z, 1, out=lse)
    if smoothed:
        torch.sum(z, 1, out=sum_z)


def _logit_gradient(logits, first, V, call, target, z_y, lse, scale):
    """scale * g over logits [n, width] of the tokens from `first` on, in their place."""
    n, width = logits.shape
    smoothing, softcap = call.smoothing, call.softcap
    if _use_triton(logits):
        block = min(BLOCK, triton.next_power_of_2(width))
        _gradient_kernel[(n, triton.cdiv(width, block))](
            logits, target, z_y, lse, scale, first, width, V, smoothing, softcap,
            SMOOTHED=smoothing > 0, TANH=_tanh(logits), BLOCK=block, num_warps=4)
        return logits
    row = ((target >= first) & (target < first + width)).nonzero().squeeze(1)
    label = target[row] - first
    z = logits.float() if softcap is None else _capped(logits.float(), softcap)
    z[row, label] = z_y[row]
    g = z.sub_(lse[:, None]).exp_() if softcap is None else (z - lse[:, None]).exp_()
    if smoothing:
        g.sub_(smoothing / V)
    g[row, label] -= 1 - smoothing
    if softcap is not None:
        g.mul_(z.div_(softcap).square_().neg_().add_(1))
    g.mul_(scale[:, None])
    return g if g.data_ptr() == logits.data_ptr() else logits.copy_(g)


def _capped(logits, softcap):
    return torch.tanh(logits / softcap).mul_(softcap)


# ------------------------------------------------------------------------------------------------
# Triton kernels. Arithmetic is float32 throughout.
# ------------------------------------------------------------------------------------------------

def _use_triton(x):
    return triton is not None and x.is_cuda


def _tanh(logits, exact=False):
    """The hardware's tanh errs by 2**-11, where rounding to bfloat16 errs by 2**-8 already."""
    if not logits.is_cuda:
        return 'plain'
    return 'fast' if logits.dtype == torch.bfloat16 and not exact else 'exact'


def _bounded(softcap):
    """Whether exp(z - softcap) stays in float32's range, so that no maximum has to be found."""
    return softcap is not None and softcap <= 40


def _statistics_triton(hidden, weight, target, z_y, softcap, exact, full):
    """_Statistics by a product whose programs each keep a block of tokens and walk over logits."""
    n, (V, D) = len(hidden), weight.shape
    rows, columns, depth = TILE
    blocks = triton.cdiv(n, rows)
    processors = (torch.cuda.get_device_properties(hidden.device).multi_processor_count
                  if hidden.is_cuda else 2)
    # Weights of another dtype are converted a part at a time
    step = V if weight.dtype == hidden.dtype and weight.is_contiguous() else 65536
    parts = []
    for first in range(0, V, step):
        w = weight[first:first + step].to(hidden.dtype).contiguous()
        tiles = triton.cdiv(len(w), columns)
        per_split = triton.cdiv(tiles, min(tiles, max(1, processors // blocks)))
        splits = triton.cdiv(tiles, per_split)
        sums = torch.empty(4, splits, n, device=hidden.device)
        top = torch.empty(splits, n, device=hidden.device, dtype=torch.int64)
        _statistics_kernel[(blocks, splits)](
            TensorDescriptor.from_tensor(hidden, [rows, depth]),
            TensorDescriptor.from_tensor(w, [columns, depth]),
            target, z_y, sums, top, n, D, len(w), first, per_split, splits * n, softcap,
            FULL=full, ROUND=None if exact else _TL_DTYPES[hidden.dtype],
            BOUNDED=_bounded(softcap) and not full,
            # the interpreter would multiply the bits of bfloat16
            FACTOR=_TL_DTYPES[hidden.dtype if hidden.is_cuda else torch.float32],
            TANH=_tanh(hidden, exact), ROWS=rows, COLUMNS=columns, DEPTH=depth, num_warps=8,
            num_stages=3)
        parts.append((sums, top))
    maximum, sum_exp, sum_z, sum_exp_z = torch.cat([sums for sums, _ in parts], 1)
    top_token = torch.cat([top for _, top in parts])
    top, at = maximum.max(0)
    share = (maximum - top).exp()
    total = (sum_exp * share).sum(0)
    return _Statistics(z_y, top + total.log(), sum_z.sum(0), top, top_token.gather(0, at[None])[0],
                       (sum_exp_z * share).sum(0) / total)


if triton is not None:
    _TL_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16,
                  torch.float16: tl.float16}
    LOG2E = tl.constexpr(1.4426950408889634)

    @triton.jit
    def _tanh_of(u, TANH: tl.constexpr):
        """TANH is 'fast' or 'exact', or 'plain' in the interpreter."""
        if TANH == 'fast':
            t = tl.inline_asm_elementwise('tanh.approx.f32 $0, $1;', '=f,f', [u], dtype=tl.float32,
                                          is_pure=True, pack=1)
        else:   # holds at both ends, where exp2 gives inf and 0
            e = tl.exp2(u * (2 * LOG2E)) + 1
            if TANH == 'exact':
                e = tl.inline_asm_elementwise('rcp.approx.ftz.f32 $0, $1;', '=f,f', [e],
                                              dtype=tl.float32, is_pure=True, pack=1)
            else:
                e = 1 / e
            t = 1 - 2 * e
        return t

    @triton.jit
    def _label_kernel(hidden, weight, rows, tokens, out, D, h_row, h_column, w_row, w_column,
                      softcap, ROUND: tl.constexpr, TANH: tl.constexpr, BLOCK: tl.constexpr):
        i = tl.program_id(0).to(tl.int64)
        row = i if rows is None else tl.load(rows + i).to(tl.int64)
        hidden += row * h_row
        weight += tl.load(tokens + i).to(tl.int64) * w_row
        z = 0.0
        for start in range(0, D, BLOCK):
            d = start + tl.arange(0, BLOCK)
            h = tl.load(hidden + d * h_column, mask=d < D, other=0.0).to(ROUND).to(tl.float32)
            w = tl.load(weight + d * w_column, mask=d < D, other=0.0).to(ROUND).to(tl.float32)
            z += tl.sum(h * w)
        if softcap is not None:
            z = _tanh_of(z / softcap, TANH) * softcap
        tl.store(out + i, z)

    @triton.jit
    def _row_sums_kernel(logits, target, z_y, lse, sum_z, V, softcap, SMOOTHED: tl.constexpr,
                         BOUNDED: tl.constexpr, TANH: tl.constexpr, BLOCK: tl.constexpr):
        """One program per row of logits."""
        row = tl.program_id(0).to(tl.int64)     # row * V passes 2**31
        logits += row * V
        y = tl.load(target + row)
        label_z = tl.load(z_y + row)
        # The maximum starts finite, so that a block of -inf gives no inf - inf. The sums stay
        # spread over the block until the end.
        maximum = softcap if BOUNDED else -3.0e38
        exps = tl.zeros([BLOCK], tl.float32)
        zs = tl.zeros([BLOCK], tl.float32)
        for i in tl.range(0, V, BLOCK, num_stages=3):
            j = i + tl.arange(0, BLOCK)
            z = tl.load(logits + j, mask=j < V, other=0.0).to(tl.float32)
            if softcap is not None:
                z = _tanh_of(z * (1 / softcap), TANH) * softcap
            z = tl.where(j == y, label_z, z)    # no branches, or loads would not be pipelined
            if SMOOTHED:
                zs += z         # past the end it is 0
            z = tl.where(j < V, z, float('-inf'))
            if not BOUNDED:
                new_maximum = tl.maximum(maximum, tl.max(z))
                exps *= tl.exp2((maximum - new_maximum) * LOG2E)
                maximum = new_maximum
            exps += tl.exp2((z - maximum) * LOG2E)
        tl.store(lse + row, maximum + tl.log(tl.sum(exps)))
        if SMOOTHED:
            tl.store(sum_z + row, tl.sum(zs))

    @triton.jit
    def _gradient_kernel(logits, target, z_y, lse, scale, first, width, V, smoothing, softcap,
                         SMOOTHED: tl.constexpr, TANH: tl.constexpr, BLOCK: tl.constexpr):
        """scale * g over a block of one row of logits, which begins at token `first`."""
        row = tl.program_id(0).to(tl.int64)
        logits += row * width
        j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        z = tl.load(logits + j, mask=j < width, other=0.0).to(tl.float32)
        y = tl.load(target + row) - first
        if softcap is not None:
            tanh = _tanh_of(z * (1 / softcap), TANH)
            z = tanh * softcap
        z = tl.where(j == y, tl.load(z_y + row), z)
        g = tl.exp2((z - tl.load(lse + row)) * LOG2E)
        # q_y is taken off in float32: as the model learns p_y comes near it, and the rounding of
        # either would drown what is left.
        if SMOOTHED:
            g -= smoothing / V
        g = tl.where(j == y, g - (1 - smoothing), g)
        if softcap is not None:
            g *= 1 - tanh * tanh
        g *= tl.load(scale + row)
        tl.store(logits + j, g.to(logits.dtype.element_ty), mask=j < width)

    @triton.jit(do_not_specialize=['n', 'tiles_per_split', 'sums_stride'])
    def _statistics_kernel(hidden, weight, target, z_y, sums, top, n, D, V, first, tiles_per_split,
                           sums_stride, softcap, FULL: tl.constexpr, ROUND: tl.constexpr,
                           BOUNDED: tl.constexpr, FACTOR: tl.constexpr,
                           TANH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                           DEPTH: tl.constexpr):
        """One program per block of tokens and share of the vocabulary, like a flash attention.

        weight [V, D] begins at token `first`. sums [4, splits, n] get the maximum of z, and the
        sums of exp(z - maximum), z, and exp(z - maximum) z; top [splits, n] the maximum's token.
        """
        block, split = tl.program_id(0) * ROWS, tl.program_id(1)
        row = block + tl.arange(0, ROWS)
        y = tl.load(target + row, mask=row < n, other=-1) - first
        label_z = tl.load(z_y + row, mask=row < n, other=0.0)
        maximum = tl.full([ROWS], softcap if BOUNDED else -3.0e38, tl.float32)
        sum_exp = tl.zeros([ROWS], tl.float32)
        sum_z = tl.zeros([ROWS], tl.float32)
        sum_exp_z = tl.zeros([ROWS], tl.float32)
        top_token = tl.zeros([ROWS], tl.int32)
        begin = split * tiles_per_split * COLUMNS
        end = tl.minimum(begin + tiles_per_split * COLUMNS, V)
        for start in range(begin, end, COLUMNS):
            z = tl.zeros([ROWS, COLUMNS], tl.float32)
            for d in range(0, D, DEPTH):
                z = tl.dot(hidden.load([block, d]).to(FACTOR),
                           weight.load([start, d]).to(FACTOR).T, z)
            if ROUND is not None:
                z = z.to(ROUND).to(tl.float32)
            if softcap is not None:
                z = _tanh_of(z * (1 / softcap), TANH) * softcap
            j = start + tl.arange(0, COLUMNS)
            if ROUND is not None:
                if tl.max(tl.where((y >= start) & (y < start + COLUMNS), 1, 0)) > 0:
                    z = tl.where(j[None, :] == y[:, None], label_z[:, None], z)
            sum_z += tl.sum(z, 1)           # columns past the end are 0
            if start + COLUMNS > V:         # finite, or 0 * -inf would get into sum_exp_z
                z = tl.where(j[None, :] < V, z, -3.0e38)
            if not BOUNDED:
                tile_maximum = tl.max(z, 1)
                new_maximum = tl.maximum(maximum, tile_maximum)
                shrunk = tl.exp2((maximum - new_maximum) * LOG2E)
                sum_exp *= shrunk
                if FULL:
                    sum_exp_z *= shrunk
                    if tl.max(tile_maximum - maximum) > 0:
                        token = tl.where(z == tile_maximum[:, None], j[None, :], 2147483647)
                        top_token = tl.where(tile_maximum > maximum, tl.min(token, 1), top_token)
                maximum = new_maximum
            exps = tl.exp2((z - maximum[:, None]) * LOG2E)
            sum_exp += tl.sum(exps, 1)
            if FULL:
                sum_exp_z += tl.sum(exps * z, 1)
        sums += split * n + row
        tl.store(sums, maximum, mask=row < n)
        tl.store(sums + sums_stride, sum_exp, mask=row < n)
        tl.store(sums + 2 * sums_stride, sum_z, mask=row < n)
        tl.store(sums + 3 * sums_stride, sum_exp_z, mask=row < n)
        tl.store(top + split * n + row, (top_token + first).to(tl.int64), mask=row < n)

    @triton.jit
    def _scale_kernel(x, factor, size, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
        """x *= factor, in place; nothing is read where the factor is 1, as it mostly is."""
        factor = tl.load(factor)
        if factor != 1.0:
            start = tl.program_id(0).to(tl.int64) * BLOCK
            for i in range(0, tl.cdiv(size, PROGRAMS * BLOCK)):
                i = start + tl.arange(0, BLOCK)
                start += PROGRAMS * BLOCK
                value = tl.load(x + i, mask=i < size).to(tl.float32)
                tl.store(x + i, (value * factor).to(x.dtype.element_ty), mask=i < size)


# ------------------------------------------------------------------------------------------------
# Arguments
# ------------------------------------------------------------------------------------------------

def _check_layer(hidden, weight, softcap):
    """Checks what both functions are given and returns the dtype of the matrix products."""
    if weight.dim() != 2 or hidden.dim() < 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(f'hidden must be [..., D] and weight [V, D], got {list(hidden.shape)} and '
                         f'{list(weight.shape)}')
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f'softcap must be a positive number or None, got {softcap}')
    if torch.is_autocast_enabled(hidden.device.type):
        return torch.get_autocast_dtype(hidden.device.type)
    if hidden.dtype != weight.dtype:
        raise ValueError(f'hidden is {hidden.dtype} but weight is {weight.dtype}: convert one of '
                         f'them, or call under torch.autocast')
    if hidden.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f'hidden and weight must be float32, bfloat16 or float16, '
                         f'got {hidden.dtype}')
    return hidden.dtype


def _check_loss(hidden, target, smoothing, ignore_index, reduction='mean', num_items=None,
                token_weight=None, memory=None, chunk_rows=None):
    if target.shape != hidden.shape[:-1]:
        raise ValueError(f'target must have the leading shape of hidden, '
                         f'{list(hidden.shape[:-1])}, got {list(target.shape)}')
    if target.dtype not in INTEGERS:
        raise ValueError(f'target must hold integer token ids that fit int64, got {target.dtype}')
    if ignore_index is not None and not isinstance(ignore_index, int):
        raise ValueError(f'ignore_index must be an int or None, got {ignore_index!r}')
    if not 0 <= smoothing <= 1:
        raise ValueError(f'smoothing must be in [0, 1], got {smoothing}')
    if reduction not in ('mean', 'sum', 'none'):
        raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
    if num_items is not None and reduction != 'mean':
        raise ValueError(f"num_items divides in reduction 'mean' only, and this is {reduction!r}")
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f'chunk_rows must be at least 1, got {chunk_rows}')
    if token_weight is not None and token_weight.shape != target.shape:
        raise ValueError(f'token_weight must have the shape of target, {list(target.shape)}, '
                         f'got {list(token_weight.shape)}')
    if memory is not None and memory < 0:
        raise ValueError(f'memory must be a number of bytes, got {memory}')


def _learnt_rows(target, V, ignore_index, device):
    """(places of the tokens to learn, or None if that is all of them; their targets), on device.

    target [N] is checked where it is. Only a target that is not on the CPU makes the host wait.
    """
    target = target.long()      # before it is compared: in uint8, -100 is 156
    if ignore_index is None:
        learnt = None
        outside = (target < 0) | (target >= V)
        if target.is_cuda:
            torch._assert_async(~outside.any(), f'a target is not in [0, {V})')
            return None, target.long()
        n, n_outside = len(target), int(outside.sum())
    else:
        learnt = target != ignore_index
        outside = learnt & ((target < 0) | (target >= V))
        n, n_outside = torch.stack((learnt.sum(), outside.sum())).tolist()
    if n_outside:
        raise ValueError(f'target {target[outside][0].item()} is neither in [0, {V}), the rows of '
                         f'weight, nor ignore_index={ignore_index}')
    rows = None
    if n < len(target):
        rows = torch.nonzero_static(learnt, size=n).squeeze(1)
        target = target[rows]
    return None if rows is None else _on_device(rows, device), _on_device(target.long(), device)


def _on_device(x, device):
    """x there; from the CPU without waiting."""
    if x.device.type == 'cpu' and device.type == 'cuda':
        x = x.pin_memory()
    return x.to(device, non_blocking=True)
