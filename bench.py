"""Benchmarks beside peers, on one CUDA device.

    python bench.py ce --shape=gemma2_2b

    ce    the smoothed cross-entropy of the output layer, forward and backward, in bfloat16

Each prints a table and writes it to out/bench_<name>.json.
"""

import importlib.metadata
import json
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F

from configs import ConfigError, load_config
from evaluate import write_text
from fused_ce import smoothed_cross_entropy


@dataclass
class BenchConfig:
    shape: Literal['all', 'gemma2_2b', 'llama31_8b', 'mistral_7b'] = 'all'  # output layer
    n: int = 8192               # tokens, all of which carry loss
    smoothing: float = 0.1      # in [0, 1]


SHAPES = {      # D, V, softcap
    'gemma2_2b': (2304, 256000, 30.0),
    'llama31_8b': (4096, 128256, None),
    'mistral_7b': (4096, 32768, None),
}


# ------------------------------------------------------------------------------------------------
# ce
# ------------------------------------------------------------------------------------------------

def bench_ce(config):
    """Time, memory and error of four ways to the same loss and gradients."""
    names = list(SHAPES) if config.shape == 'all' else [config.shape]
    tables = []
    for name in names:
        D, V, softcap = SHAPES[name]
        hidden, weight, target = ce_inputs(config.n, D, V)
        rows = min(2048, config.n)
        floor = sum(three_products(hidden, weight, rows)) * config.n / rows
        rate = 6 * config.n * D * V / floor / 1e9
        print(f'\n{name}: {config.n} tokens, D={D}, V={V}, softcap={softcap}, '
              f'smoothing={config.smoothing}, bfloat16')
        print(f'floor: the three matrix products alone, {rows} tokens at a time, '
              f'{floor:.2f} ms ({rate:.0f} TFLOP/s)')
        print(f'{"":14}{"ms":>9}{"x floor":>9}{"extra MB":>10}{"loss err":>10}{"dh err":>9}'
              f'{"dW err":>9}')
        picked = picked_rows(target, V)
        exact = exact_gradients(hidden, weight, target, config.smoothing, softcap, picked)
        results = {}
        for method, loss in ce_methods(config.smoothing, softcap).items():
            results[method] = measure(loss, hidden, weight, target, picked, exact)
            print(f'{method:14}' + describe(results[method], floor), flush=True)
            hidden.grad = weight.grad = None
            torch.cuda.empty_cache()
        tables.append({'shape': name, 'n': config.n, 'D': D, 'V': V, 'softcap': softcap,
                       'smoothing': config.smoothing, 'floor_ms': floor, 'results': results})
        del hidden, weight, target, exact
    print('\nextra MB: peak memory above the inputs and their gradients. Errors are relative, '
          'against\nfloat32; for dh and dW the mean over 64 rows (of dW 16 labels and 48 others).')
    return tables


def ce_inputs(n, D, V):
    """hidden [n, D], weight [V, D], target [n]; each label's logit is 0 to 25 above the others'."""
    generator = torch.Generator('cuda').manual_seed(0)
    random = partial(torch.randn, generator=generator, device='cuda')
    weight = random(V, D) / D ** 0.5
    target = torch.randint(0, V, (n,), generator=generator, device='cuda')
    lift = 25 * torch.rand(n, 1, generator=generator, device='cuda')   # from unlearnt to certain
    label = weight[target]
    hidden = random(n, D) + lift * label / label.square().sum(1, keepdim=True)
    return hidden.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_(), target


def ce_methods(smoothing, softcap):
    """Name to loss(hidden, weight, target); None where the peer is not installed."""
    def eager(hidden, weight, target):
        logits = (hidden @ weight.T).float()
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        return F.cross_entropy(logits, target, label_smoothing=smoothing)

    def ours(hidden, weight, target):
        return smoothed_cross_entropy(hidden, weight, target, smoothing=smoothing,
                                      softcap=softcap)[0]

    def liger(accum_dtype):
        try:
            from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
        except ImportError:
            return None
        module = LigerFusedLinearCrossEntropyLoss(label_smoothing=smoothing, softcap=softcap,
                                                  accum_dtype=accum_dtype)
        return lambda hidden, weight, target: module(weight, hidden, target)

    return {'torch eager': eager, 'torch.compile': torch.compile(eager, dynamic=False),
            'liger': liger(None), 'liger fp32 dW': liger(torch.float32), 'ours': ours}


def three_products(hidden, weight, rows):
    """Milliseconds of logits, dh and dW for `rows` tokens, each product by itself into bfloat16."""
    from triton.testing import do_bench
    hidden, weight = hidden.detach()[:rows], weight.detach()
    logits, dh, dw = hidden @ weight.T, torch.empty_like(hidden), torch.empty_like(weight)
    products = (lambda: torch.mm(hidden, weight.T, out=logits),
                lambda: torch.mm(logits, weight, out=dh),
                lambda: torch.mm(logits.T, hidden, out=dw))
    return [do_bench(product, return_mode='median') for product in products]


def picked_rows(target, V):
    """Rows of dh, and rows of dW (16 that are labels, 48 at random), to compare."""
    generator = torch.Generator('cuda').manual_seed(1)
    tokens = torch.randperm(len(target), generator=generator, device='cuda')[:64]
    at_random = torch.randint(0, V, (48,), generator=generator, device='cuda')
    return tokens, torch.cat([target[:16], at_random])


@torch.no_grad()
def exact_gradients(hidden, weight, target, smoothing, softcap, picked):
    """Loss and the picked rows of dh and dW, in float32 from the bfloat16 inputs."""
    tokens, vocabulary = picked
    weight = weight.float()
    n, V, total = len(target), len(weight), 0.0
    dw = torch.zeros(len(vocabulary), weight.shape[1], device='cuda')

    def chunk(h, y):
        z = h @ weight.T
        z = z if softcap is None else softcap * torch.tanh(z / softcap)
        log_probs = z.log_softmax(1)
        label = log_probs.gather(1, y[:, None])
        loss = -(1 - smoothing) * label.sum() - smoothing * log_probs.mean(1).sum()
        g = log_probs.exp_().sub_(smoothing / V)
        g.scatter_add_(1, y[:, None], torch.full_like(label, smoothing - 1))
        if softcap is not None:
            g *= 1 - (z / softcap) ** 2
        return loss / n, g / n

    for start in range(0, n, 512):
        h, y = hidden[start:start + 512].float(), target[start:start + 512]
        loss, g = chunk(h, y)
        total += loss.item()
        dw += g[:, vocabulary].T @ h
    _, g = chunk(hidden[tokens].float(), target[tokens])
    return total, g @ weight, dw


def measure(loss, hidden, weight, target, picked, exact):
    """Median ms of forward and backward, extra peak MB, relative errors; or why there are none."""
    from triton.testing import do_bench
    if loss is None:
        return {'failed': 'not installed'}

    def step():
        hidden.grad = weight.grad = None
        value = loss(hidden, weight, target)
        value.backward()
        return value.detach()

    try:
        step()      # compiles, tunes and takes its workspaces
        hidden.grad = weight.grad = None
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        value = step()
        peak = torch.cuda.max_memory_allocated() - before - hidden.nbytes - weight.nbytes
        ms = do_bench(step, warmup=100, rep=1000, return_mode='median')
    except torch.cuda.OutOfMemoryError:
        return {'failed': 'out of memory'}
    tokens, vocabulary = picked
    total, dh, dw = exact
    return {'ms': ms, 'extra_mb': peak / 1e6, 'loss_error': abs(value.item() - total) / total,
            'dh_error': row_error(hidden.grad[tokens], dh),
            'dw_error': row_error(weight.grad[vocabulary], dw)}


def row_error(x, exact):
    return ((x.float() - exact).norm(dim=1) / exact.norm(dim=1)).mean().item()


def describe(result, floor):
    if 'failed' in result:
        return f'{result["failed"]:>18}'
    return (f'{result["ms"]:9.2f}{result["ms"] / floor:9.2f}{result["extra_mb"]:10.0f}'
            f'{result["loss_error"]:10.1e}{result["dh_error"]:9.1e}{result["dw_error"]:9.1e}')


# ------------------------------------------------------------------------------------------------

def versions():
    found = {'device': torch.cuda.get_device_name(), 'torch': torch.__version__}
    for package in ('triton', 'liger-kernel'):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


BENCHMARKS = {'ce': bench_ce}


def main(argv):
    if not argv or argv[0] not in BENCHMARKS:
        sys.exit(f'usage: python bench.py {"|".join(BENCHMARKS)} [--key=value ...]')
    name = argv[0]
    config = load_config(BenchConfig, argv[1:])
    if not torch.cuda.is_available():
        sys.exit('error: bench.py needs a CUDA device, and there is none')
    print(', '.join(f'{key} {value}' for key, value in versions().items()))
    tables = BENCHMARKS[name](config)
    path = Path(f'out/bench_{name}.json')
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps({'versions': versions(), 'tables': tables}, indent=1) + '\n')
    print(f'wrote {path}')


if __name__ == '__main__':
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        sys.exit(f'error: {error}')
