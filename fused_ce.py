"""Label-smoothed cross-entropy of an output layer, without ever holding all the logits.

For one token with hidden state h [D] and label y, and for the output matrix W [V, D], smoothing b
and softcap c:

    a    = W h                                      the logits [V]: 2DV operations
    z    = c tanh(a / c)                            capped logits; z = a without a softcap
    q_j  = (1 - b) [j = y] + b / V                  the smoothed label
    loss = -sum_j q_j log softmax(z)_j = lse(z) - (1 - b) z_y - b mean(z)
    g_j  = dloss/da_j = (softmax(z)_j - q_j) (1 - (z_j / c)^2)
    dh   = W' g   and   dW = sum over tokens of g h'          two more products of 2DV each

Smoothing takes one more sum in a pass that reads every logit anyway: exact, and next to free.

Bytes. For 8,192 tokens of Gemma 2 (V = 256,000) the logits are 4 GB in bfloat16, and a plain
implementation makes several copies of twice that in float32. Here tokens go through in chunks. A
matrix product writes a chunk's logits; one kernel reads them twice, for the normaliser and for the
gradient, and leaves g in their place; two products read g. Then the next chunk takes the space.

Why chunks over tokens and not over the vocabulary: g needs the normaliser, and that needs all V
logits of the token. A chunk that holds whole rows has it at once, so three products do; with slices
of the vocabulary every logit is computed twice, a fourth product. The price is that dW is a sum
over chunks, kept in float32 (in bfloat16 the small terms, smoothing's b/V above all, would be lost)
and read and written with every chunk, 8DV bytes: so chunks are large, 2,048 tokens or more.

On a CUDA device the row kernel is Triton; elsewhere the same chunks go through plain torch. This
file imports nothing of ours and can be copied into another project as it is.
"""

import math

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:     # on macOS, say: plain torch
    triton = None

CHUNK_BYTES = 2 ** 30       # logits alive at once on a GPU
CPU_CHUNK_BYTES = 2 ** 23   # on a CPU a chunk is fast while it stays in the cache
BLOCK = 8192                # logits that one Triton program holds in registers


def smoothed_cross_entropy(hidden, weight, target, *, smoothing=0.0, softcap=None,
                           ignore_index=-100, reduction='mean', num_items=None, chunk_rows=None):
    """F.cross_entropy(cap(hidden @ weight.T), target, label_smoothing=smoothing), and the NLL.

    hidden      [N, D], or any leading shape such as [B, T, D]; float32, bfloat16 or float16
    weight      [V, D], the output matrix, of the same dtype; autocast casts both
    target      integers of hidden's leading shape, each in [0, V) or ignore_index
    smoothing   mass moved from the label to the uniform distribution over all V, in [0, 1]
    softcap     logits become softcap * tanh(logits / softcap); None leaves them alone
    reduction   'mean' over tokens not ignored, 'sum', or 'none' (target's shape, 0 where ignored)
    num_items   int or 0-d tensor that divides the sum in 'mean' instead of the number of tokens:
                give a whole step's number, and the losses of its micro-batches add up to its mean
    chunk_rows  tokens per chunk; by default what about 1 GiB of logits holds (8 MiB on a CPU), or
                all, where that takes no more memory than chunks and their float32 dW

    Returns (loss, nll) in float32. nll is the plain negative log-likelihood in the same reduction,
    without gradient: losses under different smoothing cannot be compared, it can.

    Ignored tokens are dropped before the first product. If none is left, loss and gradients are 0
    (torch says nan). Counting them makes the host wait for the device, once per call.

    Gradients of 'mean' and 'sum' are computed in the forward pass, while the logits are at hand;
    the backward pass scales them. With 'none' each token's upstream gradient must come first, so
    the backward pass computes the logits again: a fourth product. There is no second derivative:
    create_graph=True raises RuntimeError. An argument that does not fit raises ValueError.
    """
    dtype = _check_layer(hidden, weight, softcap)
    _check_loss(hidden, target, smoothing, reduction, num_items, chunk_rows)
    V, D = weight.shape
    shape = target.shape
    hidden, target = hidden.reshape(-1, D), target.reshape(-1)
    rows = (target != ignore_index).nonzero().squeeze(1)
    target = target[rows].long()
    outside = target[(target < 0) | (target >= V)]
    if len(outside):
        raise ValueError(f'target {outside[0].item()} is neither in [0, {V}), the rows of weight, '
                         f'nor ignore_index={ignore_index}')

    if reduction == 'none':
        scale = None
    else:
        divisor = len(rows) if num_items is None else num_items
        if reduction == 'sum' or len(rows) == 0:
            divisor = 1
        if not isinstance(divisor, Tensor) and divisor <= 0:
            raise ValueError(f'num_items must be positive, got {divisor}')
        divisor = torch.as_tensor(divisor, device=hidden.device, dtype=torch.float32)
        # The gradients are kept times a power of two, near the divisor, that is exact to divide by
        # at the end: in float16 smoothing / V / N would be 0. The 2**8 is for V.
        power = torch.exp2(divisor.log2().floor() + 8)
        scale = (power / divisor).repeat(len(rows))
    loss, nll = _SmoothedCrossEntropy.apply(hidden, weight, target, rows, scale,
                                            torch.is_grad_enabled(), float(smoothing),
                                            softcap and float(softcap), chunk_rows, dtype)
    if reduction == 'none':
        zeros = loss.new_zeros(shape.numel())
        return (zeros.index_copy(0, rows, loss).view(shape),
                zeros.index_copy(0, rows, nll).view(shape))
    return loss / power, (nll * scale).sum() / power


@torch.no_grad()
def token_log_probs(hidden, weight, rows, tokens, *, softcap=None):
    """log p(tokens[i] | hidden[rows[i]]) as float32 [M], without gradient, for evaluation.

    hidden [N, D] and weight [V, D] as above. rows [M] index hidden and may repeat (the K letters of
    one question); each row in use meets the output matrix once, in chunks. tokens [M] are in
    [0, V). The logits are float32 whatever the inputs are: between 16 and 32 bfloat16 moves in
    steps of 0.125, coarser than what a calibration metric measures. Raises ValueError.
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
    log_probs = torch.empty(len(rows), device=hidden.device, dtype=torch.float32)
    chunk_rows = max(1, CHUNK_BYTES // (4 * len(weight)))
    with torch.autocast(hidden.device.type, enabled=False):
        weight = weight.to(dtype)
        for start in range(0, len(used), chunk_rows):
            chunk = used[start:start + chunk_rows]
            logits = _mm_float32(hidden[chunk].to(dtype), weight.T)
            if softcap is not None:
                logits.div_(softcap).tanh_().mul_(softcap)
            asked = ((place >= start) & (place < start + len(chunk))).nonzero().squeeze(1)
            row = place[asked] - start
            log_probs[asked] = logits[row, tokens[asked].long()] - logits.logsumexp(1)[row]
            del logits      # before the next chunk's are made
    return log_probs


class _SmoothedCrossEntropy(torch.autograd.Function):
    """The sum over tokens of scale * loss, or, if scale is None, each token's loss; and its NLL."""

    @staticmethod
    def forward(ctx, hidden, weight, target, rows, scale, with_gradient, *options):
        now = with_gradient and scale is not None
        need = [now and needed for needed in ctx.needs_input_grad[:2]]
        loss, nll, dh, dw = _chunked(hidden, weight, target, rows, scale, need, *options)
        ctx.mark_non_differentiable(nll)
        ctx.per_token, ctx.options, ctx.weight_dtype = scale is None, options, weight.dtype
        if ctx.per_token:
            ctx.save_for_backward(hidden, weight, target, rows)
            return loss, nll
        ctx.save_for_backward(dh, dw)
        return (loss * scale).sum(), nll

    @staticmethod
    def backward(ctx, upstream, _):
        if torch.is_grad_enabled():
            raise RuntimeError('smoothed_cross_entropy has no second derivative: call backward '
                               'without create_graph=True')
        if ctx.per_token:
            scale = upstream.float()
            _, _, dh, dw = _chunked(*ctx.saved_tensors, scale, ctx.needs_input_grad[:2],
                                    *ctx.options)
            dw = None if dw is None else dw.to(ctx.weight_dtype)
        else:
            dh, dw = ctx.saved_tensors
            dh = None if dh is None else _scaled(dh, upstream, dh.dtype)
            dw = None if dw is None else _scaled(dw, upstream, ctx.weight_dtype)
        return dh, dw, *[None] * 8


def _scaled(x, factor, dtype):
    """x * factor, rounded once, in a new tensor: under retain_graph x will be asked for again."""
    # One-dimensional, or torch would first round the float32 factor to a bfloat16 x's dtype.
    return torch.mul(x, factor.float().view(1), out=torch.empty_like(x, dtype=dtype))


def _chunked(hidden, weight, target, rows, scale, need, smoothing, softcap, chunk_rows, dtype):
    """Losses and gradients of the n tokens hidden[rows], chunk by chunk: the heart of this file.

    hidden [N, D], weight [V, D], target [n], rows [n]; scale [n] float32, each token's factor in
    the gradients; need, which gradients are wanted, (hidden's, weight's); dtype, of the products.
    Returns loss [n], nll [n], dh [N, D] and dw [V, D], None where not wanted. dw is in weight's
    dtype, or in float32 where it is a sum over chunks.
    """
    n, V = len(rows), len(weight)
    need_dh, need_dw = need
    loss = torch.empty(n, device=hidden.device, dtype=torch.float32)
    nll = torch.empty_like(loss)
    dh = torch.zeros_like(hidden) if need_dh else None
    dw = torch.zeros_like(weight) if need_dw and n == 0 else None
    chunk_rows = chunk_rows or _default_chunk_rows(n, weight, dtype, need_dw)
    # In a single chunk the product itself sums over the tokens, in float32. float16 is too narrow
    # for that sum.
    wide = n > chunk_rows or weight.dtype != dtype or dtype == torch.float16
    row_pass = _row_pass_triton if _use_triton(hidden) else _row_pass_torch

    with torch.autocast(hidden.device.type, enabled=False):
        weight = weight.to(dtype)
        buffer = torch.empty(min(n, chunk_rows), V, device=hidden.device, dtype=dtype)
        for start in range(0, n, chunk_rows):
            chunk = slice(start, start + chunk_rows)
            h = hidden[rows[chunk]].to(dtype)
            logits = torch.mm(h, weight.T, out=buffer[:len(h)])
            g = row_pass(logits, target[chunk], scale[chunk] if need_dh or need_dw else None,
                         loss[chunk], nll[chunk], smoothing, softcap)
            if need_dh:
                dh.index_copy_(0, rows[chunk], torch.mm(g, weight).to(dh.dtype))
            if need_dw:
                dw = _mm_float32(g.T, h, add_to=dw) if wide else torch.mm(g.T, h)
    return loss, nll, dh, dw


def _default_chunk_rows(n, weight, dtype, need_dw):
    """Tokens per chunk: what the byte budget holds, at least 2,048 on a GPU; in equal shares."""
    V, D = weight.shape
    if weight.device.type == 'cpu':
        return max(256, CPU_CHUNK_BYTES // (4 * V))
    limit = max(2048, CHUNK_BYTES // (dtype.itemsize * V) // 128 * 128)
    # A single chunk needs no float32 sum of dW. The bytes that a sum takes beyond dW itself buy
    # these tokens more in one chunk: the same peak, less traffic, one rounding.
    spare = (4 - weight.element_size()) * D // dtype.itemsize if need_dw else 0
    if n <= limit + spare:
        return max(1, n)
    alike = math.ceil(n / math.ceil(n / limit))
    return math.ceil(alike / 128) * 128     # whole tiles for the matrix products


def _mm_float32(a, b, add_to=None):
    """a @ b, or add_to += a @ b in place: float32 sums and result, whatever the inputs' dtype."""
    if a.is_cuda and a.dtype != torch.float32:
        if add_to is None:
            return torch.mm(a, b, out_dtype=torch.float32)
        return torch.addmm(add_to, a, b, out_dtype=torch.float32, out=add_to)
    if add_to is None:
        return torch.mm(a.float(), b.float())
    return add_to.addmm_(a.float(), b.float())


# ------------------------------------------------------------------------------------------------
# The pass over a chunk's logits [n, V]: fills loss and nll [n] and returns scale * g, in logits'
# dtype and, where it can, in their memory. Without a scale there is no gradient.
# ------------------------------------------------------------------------------------------------

def _row_pass_torch(logits, target, scale, loss, nll, smoothing, softcap):
    label = target[:, None]
    z = logits.float()      # the logits themselves if they are float32
    if softcap is not None:
        tanh = z.div_(softcap).tanh_()
        z = tanh * softcap
    log_probs = z.log_softmax(1)
    torch.neg(log_probs.gather(1, label).squeeze(1), out=nll)
    loss.copy_(nll)
    if smoothing:
        loss.mul_(1 - smoothing).sub_(log_probs.mean(1), alpha=smoothing)
    if scale is None:
        return None
    g = log_probs.exp_()
    if smoothing:
        g.sub_(smoothing / logits.shape[1])
    g.scatter_add_(1, label, g.new_full((1, 1), smoothing - 1).expand_as(label))
    if softcap is not None:
        g.addcmul_(g, tanh.square_(), value=-1)
    return g.mul_(scale[:, None]).to(logits.dtype)


def _use_triton(x):
    return triton is not None and x.is_cuda


def _row_pass_triton(logits, target, scale, loss, nll, smoothing, softcap):
    n, V = logits.shape
    block = min(BLOCK, triton.next_power_of_2(V))
    _row_kernel[(n,)](logits, target, scale, loss, nll, V, logits.stride(0), smoothing, softcap,
                      SMOOTHED=smoothing > 0, BLOCKS=triton.cdiv(V, block), BLOCK=block,
                      num_warps=min(16, max(4, block // 512)))
    return None if scale is None else logits


if triton is not None:

    @triton.jit
    def _capped(a, softcap):
        # tanh(u) = 1 - 2 / (exp(2u) + 1) holds at both ends, where exp gives inf and 0
        return softcap * (1 - 2 / (tl.exp(a * (2 / softcap)) + 1))

    @triton.jit
    def _row_kernel(logits, target, scale, loss, nll, V, row_stride, smoothing, softcap,
                    SMOOTHED: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
        """One program per row of logits; all arithmetic is float32. scale, softcap may be None."""
        row = tl.program_id(0).to(tl.int64)     # row * row_stride passes 2**31
        logits += row * row_stride
        y = tl.load(target + row).to(tl.int32)
        z_y = tl.load(logits + y).to(tl.float32)
        if softcap is not None:
            z_y = _capped(z_y, softcap)

        # First pass: sum(z), and lse(z) from a running maximum and the sum of exp(z - maximum). The
        # maximum starts finite, so that a block of -inf gives no inf - inf.
        maximum = -3.0e38
        sum_exp = 0.0
        sum_z = 0.0
        for i in range(BLOCKS):
            j = i * BLOCK + tl.arange(0, BLOCK)
            z = tl.load(logits + j, mask=j < V, other=0.0).to(tl.float32)
            if softcap is not None:
                z = _capped(z, softcap)
            if SMOOTHED:
                sum_z += tl.sum(tl.where(j < V, z, 0.0))
            z = tl.where(j < V, z, float('-inf'))       # after the cap, which makes -inf finite
            new_maximum = tl.maximum(maximum, tl.max(z))
            sum_exp = sum_exp * tl.exp(maximum - new_maximum) + tl.sum(tl.exp(z - new_maximum))
            maximum = new_maximum
        lse = maximum + tl.log(sum_exp)
        tl.store(nll + row, lse - z_y)
        if SMOOTHED:
            tl.store(loss + row, lse - (1 - smoothing) * z_y - smoothing * (sum_z / V))
        else:
            tl.store(loss + row, lse - z_y)

        # Second pass: g over the logits, from the row's end, which is the likeliest to be cached.
        # q_y is taken off in float32 too: as the model learns p_y comes near it, and the rounding
        # of either would drown what is left.
        if scale is not None:
            s = tl.load(scale + row)
            uniform = smoothing / V
            for i in range(BLOCKS):
                j = (BLOCKS - 1 - i) * BLOCK + tl.arange(0, BLOCK)
                z = tl.load(logits + j, mask=j < V, other=0.0).to(tl.float32)
                if softcap is not None:
                    z = _capped(z, softcap)
                g = tl.exp(z - lse) - tl.where(j == y, 1 - smoothing, 0.0)
                if SMOOTHED:
                    g -= uniform
                if softcap is not None:
                    t = z * (1 / softcap)
                    g *= 1 - t * t
                tl.store(logits + j, g * s, mask=j < V)


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


def _check_loss(hidden, target, smoothing, reduction, num_items, chunk_rows):
    if target.shape != hidden.shape[:-1]:
        raise ValueError(f'target must have the leading shape of hidden, '
                         f'{list(hidden.shape[:-1])}, got {list(target.shape)}')
    if target.is_floating_point() or target.dtype == torch.bool:
        raise ValueError(f'target must hold integer token ids, got {target.dtype}')
    if not 0 <= smoothing <= 1:
        raise ValueError(f'smoothing must be in [0, 1], got {smoothing}')
    if reduction not in ('mean', 'sum', 'none'):
        raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
    if num_items is not None and reduction != 'mean':
        raise ValueError(f"num_items divides in reduction 'mean' only, and this is {reduction!r}")
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f'chunk_rows must be at least 1, got {chunk_rows}')
