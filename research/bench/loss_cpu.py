"""Smoothed losses without a GPU, compared with torch's: time, memory, error; docs/losses.md.

    python research/bench/loss_cpu.py --shapes=576x49152,640x262144

Forward and backward of the output layer in float32, D x V, with random inputs and smoothing 0.1.
Each method has a process, whose peak memory is above that of the inputs and their gradients.
"""

import functools
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.nn.functional as F

from fused_ce import smoothed_cross_entropy
from research.bench.common import Options, Script, measure_methods, now, section
from runtime.log import peak_memory

SMOOTHING = 0.1


@dataclass
class BenchConfig(Options):
    shapes: tuple[str, ...] = ('576x49152', '640x262144')
    n: int = 2048                   # tokens
    repeats: int = 3                # the least time of these counts


def eager(hidden, weight, target, smoothing=SMOOTHING):
    return F.cross_entropy(hidden @ weight.T, target, label_smoothing=smoothing)


def of_torch(hidden, weight, target, smoothing=SMOOTHING, **options):
    chunks = torch.nn.LinearCrossEntropyOptions(**options) if options else None
    return F.linear_cross_entropy(hidden, weight, target, label_smoothing=smoothing, options=chunks)


AUTO = {'chunking_method': 'auto'}
METHODS = {
    'ours': lambda *inputs: smoothed_cross_entropy(*inputs, smoothing=SMOOTHING)[0],
    'torch eager': eager, 'F.linear_cross_entropy': of_torch,
    'F.linear_cross_entropy, options': functools.partial(of_torch, **AUTO),
    'F.linear_cross_entropy, options, without smoothing': functools.partial(
        of_torch, smoothing=0.0, **AUTO)}


def bench(config):
    for shape in config.shapes:
        D, V = map(int, shape.split('x'))
        methods = {name: {'method': name} for name in METHODS
                   if name == 'ours' or not config.ours}
        yield {'shape': shape, 'n': config.n, 'threads': torch.get_num_threads(),
               'results': measure_methods(__file__, shape, methods, True, n=config.n, D=D, V=V,
                                          repeats=config.repeats)}


def measure(ours, options, n, D, V, repeats):
    """Return the seconds, extra peak memory and error of a method, and torch's warning."""
    name, loss = options['method'], METHODS[options['method']]
    torch.manual_seed(0)
    hidden, weight = torch.randn(n, D), torch.randn(V, D) / D ** 0.5
    target = torch.randint(0, V, (n,))
    for x in (hidden, weight):
        x.grad = torch.zeros_like(x)
        x.requires_grad_()
    before, seconds = peak_memory('cpu'), []
    with warnings.catch_warnings(record=True) as caught:
        for _ in range(repeats):
            hidden.grad.zero_()
            weight.grad.zero_()
            started = now()
            loss(hidden, weight, target).backward()
            seconds.append(now() - started)
    row = {'seconds': min(seconds), 'extra_gib': peak_memory('cpu') - before,
           'warning': 'options ignored' if any('options' in str(w.message) for w in caught) else ''}
    at = torch.arange(0, n, n // 64)
    exact = hidden.detach()[at].double().requires_grad_()
    eager(exact, weight.detach().double(), target[at],
          0.0 if 'without' in name else SMOOTHING).backward()
    error = hidden.grad[at].double() * n / len(at) - exact.grad
    return row | {'dh_error': (error.norm() / exact.grad.norm()).item()}


def view(table):
    return section('loss_cpu', table, table['results'])


script = Script(__file__, BenchConfig, bench, view, measure=measure, needs_gpu=False)

if __name__ == '__main__':
    script.main(sys.argv[1:])
