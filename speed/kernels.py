"""Triton kernels without gradients, ready without torch.compile: for evaluation and decoding.

| kernel                                  | on CUDA, computes                                      |
|-----------------------------------------|--------------------------------------------------------|
| norm_kernel, rotate_kernel, gate_kernel | norm, rotate and gate of model.py                      |
| gemv_kernel                             | matrix-vector product, in `products` for one token     |
| tree_kernel                             | `attend` of attention.py's TreeMask                    |
| decode_kernel                           | `attend` of decoding/cache.py's DecodeMask             |

Arithmetic is float32 and is rounded once, at the end; plain torch also rounds products of bfloat16
in between. Triton compiles a kernel again where an integer becomes 1 or a multiple of 16; numbers
that differ between texts are in do_not_specialize.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

try:
    import triton
    import triton.language as tl
except ImportError:     # for example on macOS: everything is plain torch
    triton = tl = None

from runtime.fast import FastVersion

KERNELS = True      # False: norm, rotate and gate are plain torch everywhere; for attention, see
#                     IMPLEMENTATION in attention.py
LOG2E = math.log2(math.e)   # exp(x) = exp2(x * LOG2E), which is faster


def available(x: Tensor) -> bool:
    """Return whether Triton compiles kernels for the device of x."""
    return triton is not None and x.is_cuda


def kernels_apply(x: Tensor) -> bool:
    """Return whether Triton kernels without gradients may compute what is computed from x."""
    return (not torch.compiler.is_compiling() and not torch.is_grad_enabled() and available(x)
            and x.dtype == torch.bfloat16)


def float32_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T in float32, without a float32 copy of the weight where none is needed."""
    if x.is_cuda and x.dtype == torch.bfloat16 and not torch.is_grad_enabled():
        y = torch.mm(x.reshape(-1, x.shape[-1]), weight.T, out_dtype=torch.float32)
        return y.view(*x.shape[:-1], -1)
    return F.linear(x.float(), weight.float())


# ---- Linear layers -------------------------------------------------------------------------------

FORWARD = nn.Linear.forward     # the only one that `products` may replace


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return F.linear(x, weight, bias); without gradients and for one token by `gemv_kernel`, which
    reads the weight at the speed of memory.
    """
    by_kernel = (x.numel() == x.shape[-1] == weight.shape[1] and kernels_apply(x)
                 and is_plain(weight) and (bias is None or is_plain(bias)))
    return (gemv_kernel if by_kernel else F.linear)(x, weight, bias)


def is_plain(x: Tensor | None) -> bool:
    """Return whether x is a contiguous tensor, not of a subclass such as a quantized one."""
    return x is not None and type(x) in (Tensor, nn.Parameter) and x.is_contiguous()


def products(x: Tensor, *layers: nn.Module) -> list[Tensor]:
    """Return [layer(x), ...]; without gradients, by one product if `adjoin` has joined the weights.

    In training, layers with an attribute `eight_bit` are computed by it: see speed/fp8.py. Layers
    with hooks, or with a `forward` other than that of nn.Linear, are called one by one.
    """
    eight_bit: list[Any] = [getattr(layer, 'eight_bit', None) for layer in layers]
    hooks = any(layer._forward_hooks or layer._forward_pre_hooks for layer in layers)
    if torch.is_grad_enabled() and all(eight_bit) and not hooks:
        return eight_bit[0](x, *layers)
    if kernels_apply(x) and not hooks and not _has_any_global_hook() and all(
            getattr(layer.forward, '__func__', None) is FORWARD for layer in layers):
        weights, biases = ([getattr(layer, kind) for layer in layers]
                           for kind in ('weight', 'bias'))
        weight, bias = side_by_side(weights), side_by_side(biases)
        if weight is not None and (bias is not None or all(part is None for part in biases)):
            return [*linear(x, weight, bias).split([len(part) for part in weights], -1)]
    return [layer(x) for layer in layers]


def side_by_side(parts: list) -> Tensor | None:
    """Return plain tensors as one, without a copy; None if they are not adjacent in one storage."""
    if not all(is_plain(part) and part.shape[1:] == parts[0].shape[1:] for part in parts):
        return None
    first, last = parts[0], parts[-1]
    memory = first.untyped_storage()
    adjacent = all(a.data_ptr() + a.nbytes == b.data_ptr() for a, b in itertools.pairwise(parts))
    # tensors that are adjacent by chance have separate storages
    if not adjacent or last.data_ptr() + last.nbytes > memory.data_ptr() + memory.nbytes():
        return None
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())


def adjoin(model: nn.Module, **on):
    """Make the weights of layers with the same input adjacent in memory, in place, for `products`.

    on: device and dtype of their memory, for a model on the meta device
    They become new Parameters, so call this before you build an optimizer.
    """
    for module in model.modules():
        for names in (('q_proj', 'k_proj', 'v_proj'), ('gate_proj', 'up_proj')):
            layers = [getattr(module, name, None) for name in names]
            if not all(type(layer) is nn.Linear for layer in layers):
                continue
            for kind in ('weight', 'bias'):
                parts = [getattr(layer, kind) for layer in layers]
                if not all(is_plain(part) for part in parts):
                    continue
                if parts[0].is_meta:    # torch.cat would import the compiler, which takes seconds
                    whole = parts[0].new_empty((sum(map(len, parts)), *parts[0].shape[1:]), **on)
                else:
                    whole = torch.cat([part.detach() for part in parts])
                moved = whole.split([len(part) for part in parts])
                for layer, part, new in zip(layers, parts, moved):
                    setattr(layer, kind, nn.Parameter(new, part.requires_grad))
            module.register_state_dict_post_hook(with_own_storage)


def with_own_storage(module: nn.Module, state: dict, prefix: str, _: dict):
    """Give each tensor of a state_dict a storage of its own, without a copy, for safetensors."""
    for key, x in state.items():
        if key.startswith(prefix) and type(x) is Tensor and is_plain(x) and not x.is_meta and (
                x.nbytes < x.untyped_storage().nbytes()):
            begin = x.storage_offset() * x.itemsize
            state[key] = x.new_empty(0).set_(x.untyped_storage()[begin:begin + x.nbytes]).view_as(x)


def gemv_kernel(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return F.linear(x, weight, bias) of one token: on an H200 in 0.6 to 0.95 of its time."""
    (N, K), ROWS = weight.shape, 2
    y = x.new_empty(*x.shape[:-1], N)
    _gemv[triton.cdiv(N, ROWS),](
        x.contiguous(), weight, weight if bias is None else bias, y, N, K, BIAS=bias is not None,
        ROWS=ROWS, BLOCK=min(1024, triton.next_power_of_2(K)), num_warps=4)
    return y


if triton is not None:
    @triton.jit
    def _gemv(x_ptr, weight_ptr, bias_ptr, y_ptr, N, K, BIAS: tl.constexpr, ROWS: tl.constexpr,
             BLOCK: tl.constexpr):
        # products of x with ROWS rows of the weight
        n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        weight_ptr += n[:, None].to(tl.int64) * K
        y = tl.zeros([ROWS, BLOCK], tl.float32)
        for first in range(0, K, BLOCK):
            k = first + tl.arange(0, BLOCK)
            weight = tl.load(weight_ptr + k[None, :], mask=(n < N)[:, None] & (k < K)[None, :],
                             other=0.0)
            x = tl.load(x_ptr + k, mask=k < K, other=0.0)
            y += weight.to(tl.float32) * x.to(tl.float32)[None, :]
        y = tl.sum(y, 1)
        if BIAS:
            y += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
        tl.store(y_ptr + n, y.to(y_ptr.dtype.element_ty), mask=n < N)


# ---- Norm, rotary positions, gated product -------------------------------------------------------

def in_rows(x: Tensor, width: int) -> Tensor:
    """Return x as rows of `width` adjacent numbers; rows may be apart. A copy only if needed."""
    rows = x.reshape(-1, width)
    return rows if rows.stride(1) == 1 else rows.contiguous()


def norm_kernel(x: Tensor, weight: Tensor, bias: Tensor | None, kind: str, eps: float) -> Tensor:
    D, n_heads = x.shape[-1], math.prod(x.shape[2:-1])      # x [B, T, D] or [B, T, heads, hd]
    rows, width = in_rows(x, n_heads * D), triton.next_power_of_2(D)
    out = torch.empty(x.shape, dtype=weight.dtype, device=x.device)
    _norm[x.numel() // D,](
        rows, weight, weight if bias is None else bias, out, rows.stride(0), n_heads, D,
        weight.numel() // D, eps, WIDTH=width, ROUND=kind == 'llama', PLUS_ONE=kind == 'gemma',
        CENTER=kind in ('mean', 'layer'), BIAS=bias is not None,
        num_warps=min(16, max(1, width // 256)))
    return out


def rotate_kernel(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    B, T, H, hd = x.shape
    cos, sin = (angles.expand(B, T, 1, hd // 2).contiguous() for angles in (cos, sin))
    out = x.new_empty(x.shape)
    _rotate[B * T,](x, cos, sin, out, *x.stride(), T, H, hd // 2, HEADS=triton.next_power_of_2(H),
                    HALF=triton.next_power_of_2(hd // 2))
    return out


def gate_kernel(x: Tensor, up: Tensor, activation: Callable) -> Tensor:
    silu = activation is F.silu
    if not silu and not (getattr(activation, '__name__', '') == 'gelu_tanh'
                         and GELU.stands_for(activation)):
        return activation(x) * up
    H, block = x.shape[-1], 4096
    out = x.new_empty(x.shape)
    x, up = in_rows(x, H), in_rows(up, H)
    _gate[len(x) * triton.cdiv(H, block),](
        x, up, out, x.stride(0), up.stride(0), H, SILU=silu, BLOCK=block, num_warps=8)
    return out


NORM = FastVersion(norm_kernel, {'model.norm': '12c035a6'})
ROTATE = FastVersion(rotate_kernel, {'model.rotate': '8f5bd6c5'})
GATE = FastVersion(gate_kernel, {'model.gate': 'b5a4f78b'})
GELU = FastVersion(gate_kernel, {'model.gelu_tanh': 'ce7d0447'})

if triton is not None:
    @triton.jit
    def _norm(x_ptr, weight_ptr, bias_ptr, out_ptr, x_row, n_heads, D, n_weights, eps,
              WIDTH: tl.constexpr, ROUND: tl.constexpr, PLUS_ONE: tl.constexpr,
              CENTER: tl.constexpr, BIAS: tl.constexpr):
        # the vector of one token, or of one of its heads
        d = tl.arange(0, WIDTH)
        row = tl.program_id(0).to(tl.int64)
        x_ptr += row // n_heads * x_row + row % n_heads * D
        x = tl.load(x_ptr + d, mask=d < D, other=0.0)
        weight_at = row % n_weights * D + d
        weight = tl.load(weight_ptr + weight_at, mask=d < D, other=0.0).to(tl.float32)
        y = x.to(tl.float32)
        if CENTER:
            y = tl.where(d < D, y - tl.sum(y) / D, 0.0)
        y = y * tl.rsqrt(tl.sum(y * y) / D + eps)
        if ROUND:
            y = y.to(out_ptr.dtype.element_ty).to(tl.float32)
        y = y * (1 + weight) if PLUS_ONE else y * weight
        if BIAS:
            y += tl.load(bias_ptr + weight_at, mask=d < D, other=0.0).to(tl.float32)
        tl.store(out_ptr + row * D + d, y.to(out_ptr.dtype.element_ty), mask=d < D)

    @triton.jit(do_not_specialize=['x_row', 'T', 'n_heads'])
    def _rotate(x_ptr, cos_ptr, sin_ptr, out_ptr, x_row, x_token, x_head, x_d, T, n_heads, half,
                HEADS: tl.constexpr, HALF: tl.constexpr):
        # the pairs (x[d], x[d + half]) of all heads of one token
        token = tl.program_id(0).to(tl.int64)
        head = tl.arange(0, HEADS)[:, None]
        d = tl.arange(0, HALF)
        mask = (head < n_heads) & (d < half)[None, :]
        cos = tl.load(cos_ptr + token * half + d, mask=d < half, other=0.0).to(tl.float32)[None, :]
        sin = tl.load(sin_ptr + token * half + d, mask=d < half, other=0.0).to(tl.float32)[None, :]
        x_ptr += token // T * x_row + token % T * x_token
        at = x_ptr + head * x_head + d[None, :] * x_d
        a = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(at + half * x_d, mask=mask, other=0.0).to(tl.float32)
        to = out_ptr + (token * n_heads + head) * 2 * half + d[None, :]
        tl.store(to, (a * cos - b * sin).to(out_ptr.dtype.element_ty), mask=mask)
        tl.store(to + half, (b * cos + a * sin).to(out_ptr.dtype.element_ty), mask=mask)

    @triton.jit
    def _gate(gate_ptr, up_ptr, out_ptr, gate_row, up_row, H, SILU: tl.constexpr,
              BLOCK: tl.constexpr):
        blocks = tl.cdiv(H, BLOCK)
        row = (tl.program_id(0) // blocks).to(tl.int64)
        h = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(gate_ptr + row * gate_row + h, mask=h < H, other=0.0).to(tl.float32)
        up = tl.load(up_ptr + row * up_row + h, mask=h < H, other=0.0).to(tl.float32)
        if SILU:
            y = x * tl.sigmoid(x)
        else:   # x / 2 (1 + tanh(z)) = x sigmoid(2 z), with sqrt(2 / pi) = 0.79788...
            y = x * tl.sigmoid(2 * 0.7978845608028654 * (x + 0.044715 * x * x * x))
        tl.store(out_ptr + row * H + h, (y * up).to(out_ptr.dtype.element_ty), mask=h < H)


# ---- Attention over the blocks of a TreeMask -----------------------------------------------------

# Queries and keys of a block, warps and stages of `_attend` by head_dim: the fastest of 6 to 20 on
# an H200 in bfloat16 with rows of MMLU
BLOCKS = {64: (64, 32, 4, 2), 128: (64, 64, 4, 2), 256: (128, 64, 8, 2)}


def tree_kernel(mask, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None):
    """Return mask.attend(q, k, v, scale, softcap) of a TreeMask."""
    B, H, T, hd = q.shape
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    out = torch.empty(B, T, H, hd, dtype=q.dtype, device=q.device).transpose(1, 2)
    M, N, warps, stages = mask.options
    _attend[triton.cdiv(T, M), B * H](
        q, k, v, out, mask.positions, mask.ends, mask.blocks, mask.n_full, mask.n_seen,
        *(stride for x in (q, k, v, out) for stride in x.stride()[:3]), T, mask.blocks.shape[-1], H,
        H // k.shape[1], hd, scale * LOG2E, softcap * LOG2E if softcap else 0.0, mask.window or 0,
        WIDTH=mask.width, BLOCK_M=M, BLOCK_N=N, num_warps=warps, num_stages=stages)
    return out


if triton is not None:
    @triton.jit(do_not_specialize=['T', 'n_blocks', 'H', 'group', 'window'])
    def _attend(q_ptr, k_ptr, v_ptr, out_ptr, position_ptr, end_ptr, block_ptr, full_ptr, seen_ptr,
                q_row, q_head, q_token, k_row, k_head, k_token, v_row, v_head, v_token, out_row,
                out_head, out_token, T, n_blocks, H, group, hd, scale, softcap, window,
                WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
        """FlashAttention's forward pass (Dao 2023) over the listed blocks of keys.

        A program holds BLOCK_M queries of a head, and a running maximum and sum of each softmax.
        """
        first, row = tl.program_id(0) * BLOCK_M, (tl.program_id(1) // H).to(tl.int64)
        head, block = tl.program_id(1) % H, row * tl.num_programs(0) + tl.program_id(0)
        i, d = first + tl.arange(0, BLOCK_M), tl.arange(0, WIDTH)
        q_mask = (i[:, None] < T) & (d[None, :] < hd)
        q = tl.load(q_ptr + row * q_row + head * q_head + i[:, None] * q_token + d[None, :],
                    mask=q_mask, other=0.0)
        k_ptr += row * k_row + head // group * k_head
        v_ptr += row * v_row + head // group * v_head
        position_ptr += row * T
        end_ptr += row * T
        block_ptr += block * n_blocks
        highest = tl.full([BLOCK_M], -1e30, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        y = tl.zeros([BLOCK_M, WIDTH], tl.float32)
        n_full, n_seen = tl.load(full_ptr + block), tl.load(seen_ptr + block)
        y, total, highest = _walk(y, total, highest, q, k_ptr, v_ptr, k_token, v_token,
                                  position_ptr, end_ptr, block_ptr, 0, n_full, i, d, T, hd, scale,
                                  softcap, window, BLOCK_N, False)
        y, total, highest = _walk(y, total, highest, q, k_ptr, v_ptr, k_token, v_token,
                                  position_ptr, end_ptr, block_ptr, n_full, n_seen, i, d, T, hd,
                                  scale, softcap, window, BLOCK_N, True)
        # a token sees itself; rows beyond T have a sum of 0
        y = y / tl.maximum(total, 1e-30)[:, None]
        tl.store(out_ptr + row * out_row + head * out_head + i[:, None] * out_token + d[None, :],
                 y.to(out_ptr.dtype.element_ty), mask=q_mask)

    @triton.jit
    def _walk(y, total, highest, q, k_ptr, v_ptr, k_token, v_token, position_ptr, end_ptr,
              block_ptr, begin, until, i, d, T, hd, scale, softcap, window, BLOCK_N: tl.constexpr,
              MASKED: tl.constexpr):
        """Add the blocks of keys `begin` to `until` of the list to the softmax and its product."""
        for n in range(begin, until):
            j = tl.load(block_ptr + n) * BLOCK_N + tl.arange(0, BLOCK_N)
            mask = (j[:, None] < T) & (d[None, :] < hd) if MASKED else d[None, :] < hd
            k = tl.load(k_ptr + j[:, None] * k_token + d[None, :], mask=mask, other=0.0)
            score = _dot(q, tl.trans(k))
            if softcap > 0:     # tanh(x) = 1 - 2 / (1 + exp(2 x)), with 2 LOG2E = 2.885...
                score = 1 - 2 / (1 + tl.exp2(score * (2.885390081777927 * scale / softcap)))
                factor = softcap
            else:
                factor = scale
            if MASKED:
                end = tl.load(end_ptr + j, mask=j < T, other=0)
                seen = (j[None, :] <= i[:, None]) & (i[:, None] < end[None, :])
                if window > 0:
                    i_position = tl.load(position_ptr + i, mask=i < T, other=0)
                    j_position = tl.load(position_ptr + j, mask=j < T, other=0)
                    seen = seen & (i_position[:, None] - j_position[None, :] < window)
                score = tl.where(seen, score, -1e30)
            # the maximum of the scores, times LOG2E: `factor` is positive
            new_highest = tl.maximum(highest, tl.max(score, 1) * factor)
            shrink = tl.exp2(highest - new_highest)
            weight = tl.exp2(score * factor - new_highest[:, None])
            if MASKED:      # rows with no visible key so far keep the initial maximum
                weight = tl.where(seen, weight, 0.0)
            total = total * shrink + tl.sum(weight, 1)
            v = tl.load(v_ptr + j[:, None] * v_token + d[None, :], mask=mask, other=0.0)
            y = y * shrink[:, None] + _dot(weight.to(v.dtype), v)
            highest = new_highest
        return y, total, highest

    INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

    @triton.jit
    def _dot(a, b):
        if INTERPRETED:     # the interpreter multiplies the bits of bfloat16 as integers
            a, b = a.to(tl.float32), b.to(tl.float32)
        return tl.dot(a, b, input_precision='ieee')


# ---- Attention of one new token per row over a cache ---------------------------------------------

SPLIT = 1024    # keys per program of `_decode`, or a quarter for few rows, to use the whole GPU


def decode_kernel(mask, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None):
    """Return mask.attend(q, k, v, scale, softcap) of a DecodeMask."""
    B, H, _, hd = q.shape
    K, cache = k.shape[1], mask.cache
    q, k, v = (in_rows(x, x.shape[1] * hd) for x in (q, k, v))
    slots, positions = mask.slots.contiguous(), mask.positions.contiguous()
    span = SPLIT if B * K >= 256 else SPLIT // 4
    n_splits = triton.cdiv(mask.longest, span)
    out, width = q.new_empty(B, H, hd), triton.next_power_of_2(max(16, hd))
    lse = torch.empty(B, H, n_splits, dtype=torch.float32, device=q.device)
    parts = out if n_splits == 1 else q.new_empty(B, H, n_splits, hd, dtype=torch.float32)
    _decode[n_splits, K, B](
        q, k, v, cache.k, cache.v, parts, lse, slots, positions, q.stride(0), k.stride(0),
        v.stride(0), *cache.k.stride()[:2], cache.size, H, H // K, hd, span, scale * LOG2E,
        softcap * LOG2E if softcap else 0.0, GROUP=max(16, triton.next_power_of_2(H // K)),
        WIDTH=width, BLOCK=32, num_warps=2 if width <= 64 else 4, num_stages=3)
    if n_splits > 1:
        _merge[B * H,](parts, lse, out, positions, cache.size, H, n_splits, hd, span, WIDTH=width,
                       num_warps=1)
    return out[:, :, None]


if triton is not None:
    @triton.jit(do_not_specialize=['size', 'H', 'group'])
    def _decode(q_ptr, k_ptr, v_ptr, cache_k_ptr, cache_v_ptr, part_ptr, lse_ptr, slot_ptr,
                position_ptr, q_row, k_row, v_row, slot_stride, head_stride, size, H, group, hd,
                span, scale, softcap, GROUP: tl.constexpr, WIDTH: tl.constexpr,
                BLOCK: tl.constexpr):
        """Attention of the queries that share a key head over `span` keys (Dao et al. 2023).

        The program whose keys include the new one stores it, and its value, in the cache.
        """
        split, head = tl.program_id(0), tl.program_id(1)
        row = tl.program_id(2).to(tl.int64)
        position = tl.load(position_ptr + row).to(tl.int32)
        length = tl.minimum(position + 1, size)
        index, begin = position % size, split * span
        g, d = tl.arange(0, GROUP), tl.arange(0, WIDTH)
        query = row * H + head * group + g      # among the queries of all rows
        q_mask = (g[:, None] < group) & (d[None, :] < hd)
        q_ptr += row * q_row + head * group * hd
        q = tl.load(q_ptr + g[:, None] * hd + d[None, :], mask=q_mask, other=0.0)
        new_k = tl.load(k_ptr + row * k_row + head * hd + d, mask=d < hd, other=0.0)
        new_v = tl.load(v_ptr + row * v_row + head * hd + d, mask=d < hd, other=0.0)
        start = tl.load(slot_ptr + row) * slot_stride + head * head_stride
        # the new key comes first; where it belongs to another split, its weight is 0
        is_new = (begin <= index) & (index < begin + span)
        highest = _scaled(tl.sum(q.to(tl.float32) * new_k.to(tl.float32)[None, :], 1), scale,
                          softcap)
        highest = tl.where(is_new, highest, -1e30)
        total = tl.where(is_new, 1.0, 0.0) + tl.zeros([GROUP], tl.float32)
        y = total[:, None] * new_v.to(tl.float32)[None, :]
        for first in range(begin, tl.minimum(begin + span, length), BLOCK):
            j = first + tl.arange(0, BLOCK)
            at = start + j[:, None] * hd + d[None, :]
            mask = (j[:, None] < length) & (d[None, :] < hd)
            k = tl.load(cache_k_ptr + at, mask=mask, other=0.0)
            v = tl.load(cache_v_ptr + at, mask=mask, other=0.0)
            seen = (j < length) & (j != index)
            score = _scaled(_dot(q, tl.trans(k)), scale, softcap)
            score = tl.where(seen[None, :], score, -1e30)
            new_highest = tl.maximum(highest, tl.max(score, 1))
            shrink = tl.exp2(highest - new_highest)
            weight = tl.where(seen[None, :], tl.exp2(score - new_highest[:, None]), 0.0)
            total = total * shrink + tl.sum(weight, 1)
            y = y * shrink[:, None] + _dot(weight.to(v.dtype), v)
            highest = new_highest
        if begin < length:
            part = query * tl.num_programs(0) + split
            tl.store(lse_ptr + part, highest + tl.log2(total), mask=g < group)
            tl.store(part_ptr + part[:, None] * hd + d[None, :],
                     (y / total[:, None]).to(part_ptr.dtype.element_ty), mask=q_mask)
            if is_new:
                tl.store(cache_k_ptr + start + index * hd + d, new_k, mask=d < hd)
                tl.store(cache_v_ptr + start + index * hd + d, new_v, mask=d < hd)

    @triton.jit
    def _scaled(score, scale, softcap):
        """Return scores times LOG2E; `scale` and `softcap` have that factor already."""
        if softcap > 0:     # as in `_walk`
            score = softcap * (1 - 2 / (1 + tl.exp2(score * (2.885390081777927 * scale / softcap))))
        else:
            score = score * scale
        return score

    @triton.jit
    def _merge(part_ptr, lse_ptr, out_ptr, position_ptr, size, H, n_splits, hd, span,
               WIDTH: tl.constexpr):
        """Average the splits of one query, weighted by their sums of exponentials."""
        query, d = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
        length = tl.minimum(tl.load(position_ptr + query // H) + 1, size)
        part_ptr += query * n_splits * hd
        lse_ptr += query * n_splits
        highest, total = tl.load(lse_ptr), 1.0
        y = tl.load(part_ptr + d, mask=d < hd, other=0.0)
        for split in range(1, tl.cdiv(length, span)):
            lse = tl.load(lse_ptr + split)
            new_highest = tl.maximum(highest, lse)
            shrink, weight = tl.exp2(highest - new_highest), tl.exp2(lse - new_highest)
            part = tl.load(part_ptr + split * hd + d, mask=d < hd, other=0.0)
            y = y * shrink + part * weight
            total = total * shrink + weight
            highest = new_highest
        tl.store(out_ptr + query * hd + d, (y / total).to(out_ptr.dtype.element_ty), mask=d < hd)
