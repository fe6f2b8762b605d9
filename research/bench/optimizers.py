"""AdamW in bfloat16: distance from the float64 run, time and bytes, compared with FlashOptim.

    python research/bench/optimizers.py

The distance is |d - d64| / |d64| over the changes d of 4,096 weights after 1,000 steps at 5e-6 on
given gradients, and its part across d64, which is noise; `spread` is the standard deviation of log
|gradient| between neighbors. Time and bytes are per weight of 8 matrices, with the bfloat16 weight
itself and without its gradient. FlashOptim (pip install flashoptim) needs a GPU.
"""

import functools
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from research.bench.common import DEVICE, Options, Script, attempt, free_memory, now, section
from runtime.optim import AdamW
from speed.compact import CompactAdamW


@dataclass
class BenchConfig(Options):
    spreads: tuple[float, ...] = (0.0, 0.5, 1.0)
    rows: int = 4096                # of the matrices that are timed, with 14,336 columns
    steps: int = 1000


LR, DECAY = 5e-6, 0.01


def torch_adamw(params):
    optimizer = torch.optim.AdamW(params, lr=LR, weight_decay=DECAY)
    return optimizer, lambda: optimizer.step(), lambda p: p


def ours(params, kind):
    make = CompactAdamW if kind == 'compact' else functools.partial(AdamW, kind=kind)
    optimizer, one = make(params, LR, weight_decay=DECAY), torch.ones((), device=DEVICE)
    return optimizer, lambda: optimizer.step(one), optimizer.master


def flashoptim(params):
    from flashoptim import FlashAdamW
    optimizer = FlashAdamW(params, lr=LR, weight_decay=DECAY)
    return optimizer, lambda: optimizer.step(), lambda p: optimizer.get_fp32_model_state_dict(
        torch.nn.ParameterList([p]))['0']


METHODS = {f'ours, {kind}': lambda params, kind=kind: ours(params, kind)
           for kind in ('exact', 'compact', 'stochastic')} | {
    'flashoptim, 24 bits': flashoptim, 'torch, plain bfloat16': torch_adamw}


def bench(config):
    methods = {name: make for name, make in METHODS.items()
               if name.startswith('ours') or not config.ours}
    for spread in config.spreads:
        right = changes(torch_adamw, spread, config.steps, torch.float64)
        yield {'spread': spread, 'results': {
            name: attempt(distance, make, spread, config.steps, right)
            for name, make in methods.items()}}
    yield {'spread': None, 'results': {
        name: attempt(cost, make, config.rows) for name, make in methods.items()}}


def changes(make, spread, steps, dtype=torch.bfloat16):
    """Return by how much 4,096 weights change, float64."""
    random = torch.Generator().manual_seed(3)

    def draw():
        return torch.randn(128, 32, generator=random)
    start = (draw() * 0.02).bfloat16().to(DEVICE)
    slope, size = draw() * 0.3, torch.exp(spread * draw())
    p = torch.nn.Parameter(start.to(dtype, copy=True))
    _, step, master = make([p])
    for _ in range(steps):
        p.grad = ((slope + draw()) * size).bfloat16().to(DEVICE, dtype)
        step()
    return master(p).detach().double() - start.double()


def distance(make, spread, steps, right):
    d = changes(make, spread, steps)
    progress = (d * right).sum() / right.square().sum()
    return {'distance': ((d - right).norm() / right.norm()).item(),
            'noise': ((d - progress * right).norm() / right.norm()).item(),
            'progress': progress.item()}


def cost(make, rows):
    """Return {'ms' per step and 10^9 weights, 'bytes' per weight}."""
    free_memory()
    torch._dynamo.reset()   # a compiled step keeps the blocks that suit the first length it met
    params = [torch.nn.Parameter(torch.randn(rows, 14336, device=DEVICE).bfloat16())
              for _ in range(8)]
    n = sum(p.numel() for p in params)
    _, step, _ = make(params)

    seconds = []
    for _ in range(13):     # the first three compile
        for p in params:
            p.grad = torch.ones_like(p)
        started = now()
        step()
        seconds.append(now() - started)
    ms = statistics.mean(seconds[3:]) * 1e3 / n * 1e9
    for p in params:
        p.grad = None
    free_memory()
    used = torch.cuda.memory_allocated() / n if DEVICE == 'cuda' else None
    return {'ms': ms, 'bytes': used}


def view(table):
    return section('optimizers_cost' if table['spread'] is None else 'optimizers', table)


script = Script(__file__, BenchConfig, bench, view)

if __name__ == '__main__':
    script.main(sys.argv[1:])
