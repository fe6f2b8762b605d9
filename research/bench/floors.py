"""Where our training step spends its time, compared with the limit of the hardware for each item.

    python research/bench/floors.py --shape=llama32_1b,gemma2_2b

The floor of an item of train.py's step is the larger of its FLOPs over the rate of a product of
8192 x 8192 matrices and its bytes over the rate of a large copy, both measured here. For T tokens,
a block with L layers, D = hidden_size, I = intermediate_size, q = heads * head_dim, kv = key-value
heads * head_dim, and V words, in bfloat16:

    products      6 T (weights of the blocks + D V) FLOPs: forward, and two products backward.
    attention     forward 2 n^2 q per document of n tokens and layer: q k and p v take 2 n^2 q each,
                  and the mask leaves half. backward 5 n^2 q: five products, since q k is repeated.
    elementwise   forward, numbers per token and layer: a norm with the sum before it reads the
                  stream and the branch and writes both, 4 D, twice; rotary reads and writes q and
                  k, 2 (q + kv); the activation reads two and writes one, 3 I. backward: a norm
                  reads its input, its gradient and the stream's, and writes one, 4 D, twice; of
                  Gemma 2's norms after a branch each reads and writes 1 D more; rotary again; the
                  activation reads three and writes two, and writes its product again, 6 I.
    loss          the logits, too large for the cache, are read for the sums, and read and written
                  for the gradient: 3 V numbers per token.
    AdamW         exact: reads weight, low bits, gradient (2 bytes each) and moments (4 each) and
                  writes all but the gradient: 26 bytes per weight; stochastic: all 2, 14 bytes;
                  compact: low bits and moments 1 each, scales of 32 moments 6, 12.4 bytes.
    gradient norm reads each gradient once, 2 bytes.
    other         copies, the embedding and its gradient, the last norm; no floor is given.
    idle          the step's time minus the time in which any kernel ran.
"""

import statistics
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

import fused_ce
from research.bench import train
from research.bench.common import (DEVICE, MODELS, Options, Script, Shape, busy_time, device_rates,
                                   free_memory, gpu_kernels, now, section)
from data.packing import pack
from train import forward_backward, train_step


@dataclass
class BenchConfig(Options):
    shape: tuple[Shape, ...] = ('gemma2_2b', 'llama32_1b')      # these fit 80 GB with exact weights
    master_weights: Literal['exact', 'stochastic', 'compact'] = 'exact'
    fp8: bool = False               # products in eight bits, beside the floors of bfloat16


STEPS = 3       # that are profiled


def bench(config):
    rates = dict(zip(('matrix', 'memory'), device_rates()))
    for name in config.shape:
        row = measure(MODELS[name], config.master_weights, config.fp8)
        free_memory()
        yield {'shape': name, 'master_weights': config.master_weights, 'rates': rates, **row,
               'floors': floors(MODELS[name], config.master_weights, train.ROWS, train.LENGTH,
                                rates)}


def measure(raw, master_weights, fp8=False):
    """Return {'ms' of the step, 'items': {item: ms}, 'kernels': {name: ms} of the 30 longest}."""
    torch.manual_seed(0)
    model, optimizer, cfg = train.our_training(
        raw, {'master_weights': master_weights, 'fp8': fp8})
    rows = [pack(batch, cfg.pack_len) for batch in train.full_rows(raw['vocab_size'], train.LENGTH)]

    def steps(n=STEPS):
        for i in range(n):
            train_step(model, optimizer, rows[i % len(rows)], cfg, DEVICE)

    steps(4)
    walls = []
    for _ in range(3):
        started = now()
        steps()
        walls.append((now() - started) / STEPS * 1e3)
    optimizer.begin(1)
    forward_backward(model, rows[0], cfg, DEVICE)
    update = {name for name, *_ in gpu_kernels(
        lambda: optimizer.step(torch.ones((), device=DEVICE))) if name.startswith('triton_')}
    kernels = gpu_kernels(steps)
    items, longest = Counter(), Counter()
    for name, start, end in kernels:
        items[item_of(name, update)] += (end - start) / 1e3 / STEPS
        longest[name[:100]] += (end - start) / 1e3 / STEPS
    wall = statistics.median(walls)
    items['idle'] = wall - busy_time(kernels) / 1e3 / STEPS
    return {'ms': wall, 'items': dict(items), 'kernels': dict(longest.most_common(30))}


LOSS = {name for name in vars(fused_ce) if name.endswith('_kernel')}


def item_of(kernel, update):
    """Return the item that a kernel belongs to, by its name.

    update: the names of AdamW's kernels, which the compiler chooses
    """
    def has(*parts):
        return any(part in kernel for part in parts)

    if kernel in update:
        return 'AdamW'
    if kernel in LOSS:
        return 'loss'
    if kernel.startswith('triton_') and not kernel.startswith('triton_tem'):
        return 'elementwise'
    if has('flex', 'sdpa', 'fmha', 'flash', 'attend'):
        return f'attention {"backward" if has("backward", "bprop", "bwd") else "forward"}'
    if has('nvjet', 'gemm', 'cutlass', 'xmma', 'triton_tem'):
        return 'products'
    return 'gradient norm' if has('LpNorm') else 'other'


def floors(raw, master_weights, rows, length, rates):
    """Return {item: (ms that the hardware allows, its FLOPs or bytes)}, as at the top."""
    T, L, V = rows * length, raw['num_hidden_layers'], raw['vocab_size']
    D, F, hd = raw['hidden_size'], raw['intermediate_size'], raw['head_dim']
    q, kv = raw['num_attention_heads'] * hd, raw['num_key_value_heads'] * hd
    multiplied, _ = train.multiplied_weights(raw)
    norms_after = raw['model_type'] == 'gemma2'
    forward = 8 * D + 2 * (q + kv) + 3 * F
    backward = 8 * D + 4 * D * norms_after + 2 * (q + kv) + 6 * F
    weights = (multiplied + D * V * (not raw['tie_word_embeddings'])
               + D * (1 + L * (4 if norms_after else 2)))
    flops = {'products': 6 * T * multiplied,
             'attention forward': 2 * L * rows * length ** 2 * q,
             'attention backward': 5 * L * rows * length ** 2 * q}
    sizes = {'elementwise': 2 * T * L * (forward + backward), 'loss': 2 * 3 * T * V,
             'AdamW': {'exact': 26, 'stochastic': 14, 'compact': 12.4}[master_weights] * weights,
             'gradient norm': 2 * weights}
    return ({item: (n / rates['matrix'] * 1e3, n) for item, n in flops.items()}
            | {item: (n / rates['memory'] * 1e3, n) for item, n in sizes.items()})


def view(table):
    rows = {}
    for item, ms in sorted(table['items'].items(), key=lambda entry: -entry[1]):
        floor, count = table['floors'].get(item, (None, None))
        rows[item] = {'ms': ms, 'share': ms / table['ms']}
        if floor:
            rows[item] |= {'floor': floor, 'ratio': ms / floor, 'count': (
                f'{count / 1e12:.1f} TFLOP' if item.startswith(('products', 'attention')) else
                f'{count / 1e9:.1f} GB')}
    total = sum(ms for ms, _ in table['floors'].values())
    return section('floors', table | {'total': total}, rows)


script = Script(__file__, BenchConfig, bench, view)

if __name__ == '__main__':
    script.main(sys.argv[1:])
