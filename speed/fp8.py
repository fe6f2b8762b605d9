"""The products of the decoder blocks in eight bits: the key `fp8` of train.py.

A linear layer has three products, here of T tokens:

    y  = x w'       [T, N]      forward: x [T, K] and w [N, K] in e4m3, with 3 bits of mantissa
    dx = dy w       [T, K]      dy in e5m2, with 2 bits, but 30 powers of two instead of 15
    dw = dy' x      [N, K]

A tensor has one scale, so that its largest number becomes the largest of the type:

    s = max|x| / max(type)      x8 = round(x / s)       y = s_x s_w (x8 w8')

The sum is float32 and is rounded to bfloat16 once. e4m3 moves a number by at most 1/16 of its
value, e5m2 by twice that; those below 2^-15 of the largest (e5m2: 2^-30) lose more. Of random
factors y has a relative error of 3.7 %, dx and dw of 5.8 %. The tensor cores alone sum with about
14 bits, which is 10 % faster, but a dw whose terms have one sign loses 4 % at 8,192 tokens and 17 %
at 32,768 so; with `exact`, summed in float32 beside them, 0.4 and 0.3 %.

The tensor cores want both factors contiguous along the axis of the sum, so the backward pass needs
w8, dy8 and x8 transposed. Layers with the same input have one product, of their weights side by
side: x is cast once, and dx needs no sum of several products.

Norms, attention, the residual stream, the embedding, the output layer, LoRA's adapters and whatever
needs no gradients stay as they are. The casts are plain torch, so that torch.compile fuses them
with what is before them; uncompiled they take longer than the products save, as in narrow models.

Source of formats and scales: Micikevicius et al. 2022, FP8 formats for deep learning.
"""

import torch
from torch import Tensor

from model import LoRALinear
from runtime.fast import FastVersion
from speed.install import install
from speed.kernels import FORWARD

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# Width from which products in eight bits pay. On an H100 steps of Gemma 3 270M (width 640) become
# 6 % slower, and it learns its data less closely; Qwen3 0.6B's shape (1,024) becomes 9 % faster.
NARROWEST = 1024
# Keeps the scale of zeros above 0 and is lost in any other. A maximum would not do: Triton
# miscompiles that of torch 2.13 beside a transposed store of bytes (its issue 11111).
TINY = 1e-30


def use_fp8(model, device: str):
    """Let the blocks' linear layers multiply in eight bits, in place; print what will not."""
    dtype = str(model.head.dtype).removeprefix('torch.')
    if not supported(device) or dtype != 'bfloat16':
        print(f'note: fp8 = True has no effect, products are in {dtype}: it needs a GPU of compute '
              f'capability 8.9 or higher and weights in bfloat16')
        return
    if model.config.hidden_size < NARROWEST:
        print(f'note: fp8 = True has no effect: a model of width {model.config.hidden_size} is no '
              f'faster in eight bits; NARROWEST = {NARROWEST} in speed/fp8.py decides it')
        return
    layers = [getattr(parent, name) for parent in model.decoder.layers.modules()
              for name in model.config.family.lora_targets if hasattr(parent, name)]
    fitting = [layer for layer in layers if all(n % 16 == 0 for n in layer.weight.shape) and (
        LORA.stands_for(type(layer).forward) if isinstance(layer, LoRALinear) else
        type(layer).forward is FORWARD)]
    install()       # its `products` computes layers by their `eight_bit`
    for layer in fitting:
        layer.eight_bit = products
    if len(fitting) < len(layers):
        print(f'note: {len(layers) - len(fitting)} of {len(layers)} linear layers stay in {dtype}: '
              f'fp8 needs sizes that are multiples of 16 and an unedited `forward`')


def supported(device: str) -> bool:
    """Return whether `device` multiplies in eight bits: NVIDIA's Ada, Hopper and later."""
    return device.startswith('cuda') and torch.cuda.get_device_capability(device) >= (8, 9)


def products(x: Tensor, *layers) -> list[Tensor]:
    """Return [layer(x), ...] for x [..., K] whose number of tokens is a multiple of 16."""
    parts = Product.apply(x.flatten(0, -2), *(layer.weight for layer in layers))
    parts = [part.unflatten(0, x.shape[:-1]) for part in parts]
    parts = [part if layer.bias is None else part + layer.bias
             for layer, part in zip(layers, parts)]
    return [part + layer.adapter(x) if isinstance(layer, LoRALinear) else part
            for layer, part in zip(layers, parts)]


LORA = FastVersion(products, {'model.LoRALinear.forward': '9061fbed'})


class Product(torch.autograd.Function):
    """x [T, K] times each of the transposed weights [N, K], as at the top."""

    @staticmethod
    def forward(ctx, x, *weights):
        s_x, s_w = scale(E4M3, x), scale(E4M3, *weights)
        x8, w8 = cast(x, s_x, E4M3), torch.cat([cast(w, s_w, E4M3) for w in weights])
        ctx.save_for_backward(x8, s_x, s_w, *weights)
        return multiply(x8, w8, s_x, s_w).split([len(w) for w in weights], 1)

    @staticmethod
    def backward(ctx, *dys):
        x8, s_x, s_w, *weights = ctx.saved_tensors
        # side by side only when they are cast: gate and up have a common backward pass
        s_dy = scale(E5M2, *dys)
        dx = None
        dw = [None] * len(weights)
        if ctx.needs_input_grad[0]:
            dy8 = torch.cat([cast(dy, s_dy, E5M2) for dy in dys], 1)
            w8 = torch.cat([cast(w.t(), s_w, E4M3) for w in weights], 1)
            dx = multiply(dy8, w8, s_dy, s_w)
        if any(ctx.needs_input_grad[1:]):
            dy8 = torch.cat([cast(dy.t(), s_dy, E5M2) for dy in dys])
            dw = multiply(dy8, x8.t().contiguous(), s_dy, s_x, exact=True)
            dw = dw.split([len(w) for w in weights])
        return dx, *dw


def scale(dtype: torch.dtype, *parts: Tensor) -> Tensor:
    """Return the common scale, 0-dim float32, of matrices; NaN if one holds NaN."""
    # row by row, so that it is computed together with a norm
    largest = torch.cat([x.abs().amax(-1) for x in parts]).amax()
    return (largest.float() + TINY) / torch.finfo(dtype).max


def cast(x: Tensor, s: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x / s as `dtype`, contiguous."""
    return (x.float() * s.reciprocal()).to(dtype).contiguous()


def multiply(a: Tensor, b: Tensor, s_a: Tensor, s_b: Tensor, exact: bool = False) -> Tensor:
    """Return s_a s_b a b' in bfloat16, of a [M, K] and b [N, K] in eight bits.

    exact: summed in float32
    """
    return torch._scaled_mm(a, b.t(), scale_a=s_a, scale_b=s_b, out_dtype=torch.bfloat16,
                            use_fast_accum=not exact)
