"""Benchmarks beside peers, on one CUDA device.

    python bench.py ce --shape=gemma2_2b
    python bench.py plot out/bench_ce.json

    ce    the smoothed cross-entropy of the output layer, forward and backward, in bfloat16
    plot  draws that file again

Each benchmark prints tables and writes them to out/bench_<name>.json.
"""

import gc
import importlib.metadata
import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F

from configs import ConfigError, load_config
from evaluate import write_text
from fused_ce import smoothed_cross_entropy, token_statistics


@dataclass
class BenchConfig:
    shape: Literal['all', 'gemma2_2b', 'llama31_8b', 'mistral_7b'] = 'all'  # output layer
    cap: Literal['both', 'model', 'none'] = 'both'      # with the model's softcap, without, or both
    softmax: Literal['both', 'zipf', 'flat'] = 'both'   # how the logits are distributed
    n: int = 8192               # tokens, all of which carry loss
    smoothing: float = 0.1      # in [0, 1]
    rounds: int = 3             # every method is timed in each, in turn; the median counts


SHAPES = {      # D, V, softcap
    'gemma2_2b': (2304, 256000, 30.0),
    'llama31_8b': (4096, 128256, None),
    'mistral_7b': (4096, 32768, None),
}
MIB = 2 ** 20
OURS = {        # name: options of smoothed_cross_entropy
    'ours': {},
    'ours, 512 MiB': dict(memory=512 * MIB),
    'ours, 128 MiB': dict(memory=128 * MIB),
    'ours, low memory': dict(memory=0),
    'ours, one chunk': dict(chunk_rows=2 ** 30),
    "ours, 'none'": dict(reduction='none', memory=0),
}


# ------------------------------------------------------------------------------------------------
# ce
# ------------------------------------------------------------------------------------------------

def bench_ce(config):
    """One table for each output layer, with and without its softcap, and each softmax."""
    tables = []
    bandwidth = copy_bandwidth()
    for name in list(SHAPES) if config.shape == 'all' else [config.shape]:
        D, V, softcap = SHAPES[name]
        caps = {'both': {softcap, None}, 'model': {softcap}, 'none': {None}}[config.cap]
        for cap in sorted(caps, key=lambda cap: cap is None):
            for softmax in ('zipf', 'flat') if config.softmax == 'both' else (config.softmax,):
                table = {'shape': name, 'n': config.n, 'D': D, 'V': V, 'softcap': cap,
                         'softmax': softmax, 'smoothing': config.smoothing}
                table |= ce_table(config, D, V, cap, softmax, bandwidth)
                tables.append(table)
                print_table(table)
                gc.collect()
                torch.cuda.empty_cache()
    print('\nextra MiB: peak memory above the inputs and their gradients. Errors against float32: '
          "the loss's,\nand the relative Frobenius norm over 128 rows of dh and 256 rows of dW (64 "
          'labels, 192 at random).')
    return tables


def ce_table(config, D, V, softcap, softmax, bandwidth):
    hidden, weight, target = ce_inputs(config.n, D, V, softmax)
    methods = ce_methods(config.smoothing, softcap, target.cpu())
    at = picked(target, V)
    exact = {smoothing: exact_gradients(hidden, weight, target, smoothing, softcap, at)
             for smoothing in {config.smoothing, 0.0}}
    steps, results = {}, {}
    for name, (loss, smoothing) in methods.items():
        try:
            steps[name], results[name] = first_step(loss, hidden, weight, target, at,
                                                    exact[smoothing])
            results[name]['smoothing'] = smoothing
        except Exception as error:      # a peer's; ours must not fail
            if name in OURS:
                raise
            results[name] = {'failed': f'{type(error).__name__}: {str(error).splitlines()[0]}'}
        clear(hidden, weight)

    target = target.cpu()
    half = target.clone()
    half[::2] = -100
    frozen = weight.detach()
    options = dict(smoothing=config.smoothing, softcap=softcap)
    uses = {
        'half ignored': lambda: smoothed_cross_entropy(hidden, weight, half, **options)[0],
        'frozen head': lambda: smoothed_cross_entropy(hidden, frozen, target, **options)[0],
        'loss, no gradient': lambda: smoothed_cross_entropy(hidden, weight, target, **options)[0],
        'token_statistics': lambda: token_statistics(hidden, weight, target, **options).loss.sum(),
    }
    products = three_products(hidden.detach(), frozen, min(2048, config.n))
    timed = products | steps | {name: step_of(loss, hidden, weight, name in list(uses)[:2])
                                for name, loss in uses.items()}
    ms = interleaved(timed, config.rounds, hidden, weight)
    share = config.n / min(2048, config.n)
    products = [ms[name] * share for name in products]
    for name in steps:
        results[name]['ms'] = ms[name]
    one, two, three = products[0], sum(products[:2]), sum(products)
    return {
        'products_ms': products, 'results': results,
        'bytes_ms': 3 * 2 * config.n * V / bandwidth * 1e3,
        'uses': {'half ignored': (ms['half ignored'] / ms['ours'], 'of the time of all'),
                 'frozen head': (ms['frozen head'] / two, 'of two products'),
                 'loss, no gradient': (ms['loss, no gradient'] / one, 'of one product'),
                 'token_statistics': (ms['token_statistics'] / one, 'of one product')},
        'same bits twice': same_bits(methods['ours'][0], hidden, weight, target),
        'waits': waits(hidden, weight, half, options),
        'ms': three,
    }


def ce_inputs(n, D, V, softmax):
    """hidden [n, D], weight [V, D], target [n].

    flat: logits are normal with deviation 1. zipf: logits fall with the logarithm of a token's
    rank, as in a language model, labels are drawn from that, and theirs are lifted by 6 +- 4.
    """
    make = torch.Generator('cuda').manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=make, device='cuda')

    weight, hidden = normal(V, D) / D ** 0.5, normal(n, D)
    if softmax == 'flat':
        target = torch.randint(0, V, (n,), generator=make, device='cuda')
    else:
        rank = 1.0 + torch.randperm(V, generator=make, device='cuda')
        target = torch.multinomial(1 / rank, n, replacement=True, generator=make)
        common = F.normalize(normal(D), dim=0)
        own = weight[target]
        own -= (own @ common)[:, None] * common
        lift = 6 + 4 * normal(n, 1)
        hidden += 2 * common + lift * own / own.square().sum(1, keepdim=True)
        weight += (9 - rank.log())[:, None] * common / 2
    return hidden.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_(), target


def ce_methods(smoothing, softcap, host_target):
    """Name to (loss(hidden, weight, target), the smoothing it does); peers raise if they cannot.

    Ours takes the target from the CPU, where a data loader has it: nothing waits then.
    """
    def eager(hidden, weight, target):
        logits = (hidden @ weight.T).float()
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        return F.cross_entropy(logits, target, label_smoothing=smoothing)

    def liger(accum_dtype):
        def loss(hidden, weight, target):
            from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
            return LigerFusedLinearCrossEntropyLoss(
                label_smoothing=smoothing, softcap=softcap, accum_dtype=accum_dtype)(
                    weight, hidden, target)
        return loss

    def cce(**options):
        def loss(hidden, weight, target):
            from cut_cross_entropy import linear_cross_entropy
            loss = linear_cross_entropy(hidden, weight, target, softcap=softcap, **options)
            if softcap is None:     # smoothing is a rank-one correction then
                mean = weight.mean(0, dtype=torch.float32).to(weight.dtype)
                loss = loss + smoothing * (hidden * (weight[target] - mean)).sum(1).float().mean()
            return loss
        return loss

    def torch_linear(hidden, weight, target):
        if softcap is not None:
            raise NotImplementedError('has no softcap')
        return F.linear_cross_entropy(hidden, weight, target, label_smoothing=smoothing)

    def ours(options):
        return lambda hidden, weight, _: smoothed_cross_entropy(
            hidden, weight, host_target, smoothing=smoothing, softcap=softcap, **options)[0].mean()

    peers = {'torch eager': eager, 'torch.compile': torch.compile(eager, dynamic=False)}
    if hasattr(F, 'linear_cross_entropy'):
        peers['F.linear_cross_entropy'] = torch_linear
    peers |= {'Liger': liger(None), 'Liger, float32 dW': liger(torch.float32)}
    can_smooth = smoothing if softcap is None else 0.0
    return ({name: (loss, smoothing) for name, loss in peers.items()}
            | {'CCE': (cce(), can_smooth), 'CCE, no filter': (cce(filter_eps=None), can_smooth)}
            | {name: (ours(options), smoothing) for name, options in OURS.items()})


def picked(target, V):
    """Rows of dh, and rows of dW (64 labels, then 192 at random), to compare."""
    make = torch.Generator('cuda').manual_seed(1)
    tokens = torch.randperm(len(target), generator=make, device='cuda')[:128]
    return tokens, torch.cat([target[:64],
                              torch.randint(0, V, (192,), generator=make, device='cuda')])


@torch.no_grad()
def exact_gradients(hidden, weight, target, smoothing, softcap, at):
    """Loss and the picked rows of dh and dW, in float32 from the bfloat16 inputs."""
    tokens, vocabulary = at
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
        return loss.item() / n, g / n

    for start in range(0, n, 512):
        h, y = hidden[start:start + 512].float(), target[start:start + 512]
        loss, g = chunk(h, y)
        total += loss
        dw += g[:, vocabulary].T @ h
    _, g = chunk(hidden[tokens].float(), target[tokens])
    return total, g @ weight, dw


def three_products(hidden, weight, rows):
    """Names to the products of logits, dh and dW for `rows` tokens, by cuBLAS into bfloat16."""
    hidden = hidden[:rows]
    logits, dh, dw = hidden @ weight.T, torch.empty_like(hidden), torch.empty_like(weight)
    g = torch.randn_like(logits)    # products of zeros are faster
    return {'logits': lambda: torch.mm(hidden, weight.T, out=logits),
            'dh': lambda: torch.mm(g, weight, out=dh), 'dW': lambda: torch.mm(g.T, hidden, out=dw)}


def copy_bandwidth():
    """Bytes a second of a copy of 2 GiB, read and written."""
    from triton.testing import do_bench
    x = torch.empty(2 ** 30, dtype=torch.bfloat16, device='cuda').normal_()
    y = torch.empty_like(x)
    return 2 * x.nbytes / do_bench(lambda: y.copy_(x), return_mode='median') * 1e3


def step_of(loss, hidden, weight, backward=True):
    def step():
        hidden.grad = weight.grad = None
        with torch.set_grad_enabled(backward):
            value = loss()
        if backward:
            value.backward()
        return value.detach()
    return step


def first_step(loss, hidden, weight, target, at, exact):
    """A step to time, and its extra peak memory and errors, after one that compiles and tunes."""
    step = step_of(lambda: loss(hidden, weight, target), hidden, weight)
    step()
    clear(hidden, weight)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    value = step()
    extra = torch.cuda.max_memory_allocated() - before - hidden.nbytes - weight.nbytes
    (tokens, vocabulary), (total, dh, dw) = at, exact
    theirs = weight.grad[vocabulary]
    return step, {'extra_mib': extra / MIB, 'loss_error': abs(value.item() - total),
                  'dh_error': off(hidden.grad[tokens], dh), 'dw_error': off(theirs, dw),
                  'dw_random_error': off(theirs[64:], dw[64:])}


def off(x, exact):
    return ((x.float() - exact).norm() / exact.norm()).item()


def clear(hidden, weight):
    hidden.grad = weight.grad = None
    gc.collect()
    torch.cuda.empty_cache()


def interleaved(steps, rounds, hidden, weight):
    """Median ms of each; in turn, since clocks fall as the device warms up.

    Each begins with an empty cache of memory: the pieces that another one left cost some 3 %.
    """
    from triton.testing import do_bench
    ms = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            clear(hidden, weight)
            ms[name].append(do_bench(step, warmup=40, rep=150, return_mode='median'))
    return {name: statistics.median(values) for name, values in ms.items()}


def same_bits(loss, hidden, weight, target):
    gradients = []
    for _ in range(2):
        step_of(lambda: loss(hidden, weight, target), hidden, weight)()
        gradients.append((hidden.grad, weight.grad))
    return all(map(torch.equal, *gradients))


def waits(hidden, weight, target, options):
    """Whether the host waits for the device in a step whose target is on the CPU."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode('error')
    try:
        smoothed_cross_entropy(hidden, weight, target, **options)[0].backward()
    except RuntimeError:
        return True
    finally:
        torch.cuda.set_sync_debug_mode('default')
    return False


def print_table(table):
    products = table['ms']
    rate = 6 * table['n'] * table['D'] * table['V'] / products / 1e9
    print(f'\n{table["shape"]}, {table["softmax"]}: {table["n"]} tokens, D={table["D"]}, '
          f'V={table["V"]}, softcap={table["softcap"]}, smoothing={table["smoothing"]}, bfloat16\n'
          f'three products {" + ".join(f"{ms:.2f}" for ms in table["products_ms"])} = '
          f'{products:.2f} ms ({rate:.0f} TFLOP/s); logits read twice and written once more '
          f'{table["bytes_ms"]:.2f} ms')
    print(f'{"":24}{"ms":>8}{"x products":>11}{"extra MiB":>11}{"loss err":>10}{"dh err":>9}'
          f'{"dW err":>9}{"random":>9}{"  of eager (dh, dW)"}')
    eager = table['results']['torch eager']
    for name, row in table['results'].items():
        if 'failed' in row:
            print(f'{name:24}  {row["failed"][:90]}')
            continue
        against = ''
        if 'failed' not in eager and row['smoothing'] == table['smoothing']:
            against = ' '.join(f'{row[key] / eager[key]:6.2f}' for key in ('dh_error', 'dw_error'))
        else:
            against = 'without smoothing'
        print(f'{name:24}{row["ms"]:8.2f}{row["ms"] / products:11.3f}{row["extra_mib"]:11.0f}'
              f'{row["loss_error"]:10.1e}{row["dh_error"]:9.1e}{row["dw_error"]:9.1e}'
              f'{row["dw_random_error"]:9.1e}  {against}')
    print(', '.join(f'{name}: {value:.3f} {unit}' for name, (value, unit) in table['uses'].items()))
    print(f'the same bits twice: {table["same bits twice"]}; the host waits: {table["waits"]}',
          flush=True)


def draw_ce(path):
    """Time against extra memory, one panel an output layer with its own softcap, to a .png."""
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    content = json.loads(path.read_text())
    tables = [t for t in content['tables'] if t['softcap'] == SHAPES[t['shape']][2]]
    tables = [t for t in tables if t['softmax'] == 'zipf'] or tables
    figure, axes = plt.subplots(1, len(tables), figsize=(5.2 * len(tables), 4.4), squeeze=False)
    for ax, table in zip(axes[0], tables, strict=True):
        points = {name: (max(1, row['extra_mib']), row['ms'])
                  for name, row in table['results'].items() if 'failed' not in row}
        line = sorted(points[name] for name in OURS if name in points and 'none' not in name)
        ax.plot(*zip(*line, strict=True), color='C0', lw=1)
        for i, name in enumerate(OURS, 1):
            if name in points:      # close together: numbers, and the names in a legend
                ax.plot(*points[name], 'o', color='C0', label=f'{i}  {name}')
                ax.annotate(i, points[name], xytext=(-3 + 6 * (i % 2), 4 + 7 * (i % 3)),
                            textcoords='offset points', fontsize=8, color='C0')
        for name in points.keys() - OURS.keys():
            ax.plot(*points[name], 'o', color='C3')
            ax.annotate(name, points[name], xytext=(0, 5), textcoords='offset points', fontsize=7,
                        ha='center', color='C3')
        ax.axhline(table['ms'], color='grey', ls='--', lw=1)
        ax.annotate('three products', (1.2, table['ms']), fontsize=7, va='bottom', color='grey')
        ax.set(xscale='log', yscale='log', xlabel='extra memory, MiB', xlim=(0.8, 1e5),
               title=f'{table["shape"]}: D {table["D"]}, V {table["V"]}, cap {table["softcap"]}')
        low, high = table['ms'] * 0.8, max(y for _, y in points.values()) * 1.6
        ticks = [t for t in (5, 10, 15, 20, 30, 40, 50, 75, 100, 150, 200, 300) if low < t < high]
        ax.set_ylim(low, high)
        ax.set_yticks(ticks, [str(t) for t in ticks])
        ax.minorticks_off()
    axes[0, 0].set_ylabel('ms, forward and backward')
    found = content['versions']
    figure.suptitle(f'Smoothed cross-entropy of {tables[0]["n"]} tokens in bfloat16 on one '
                    f'{found["device"]}, torch {found["torch"]}', fontsize=10)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc='lower center', ncol=6, fontsize=8)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path.with_suffix('.png'), dpi=130)
    print(f'wrote {path.with_suffix(".png")}')


# ------------------------------------------------------------------------------------------------

def versions():
    found = {'device': torch.cuda.get_device_name(), 'torch': torch.__version__}
    for package in ('triton', 'liger-kernel', 'cut-cross-entropy'):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


BENCHMARKS = {'ce': (bench_ce, draw_ce)}


def main(argv):
    if len(argv) == 2 and argv[0] == 'plot':
        return draw_ce(Path(argv[1]))
    if not argv or argv[0] not in BENCHMARKS:
        sys.exit(f'usage: python bench.py {"|".join(BENCHMARKS)} [--key=value ...], or '
                 'python bench.py plot out/bench_ce.json')
    name = argv[0]
    config = load_config(BenchConfig, argv[1:])
    if not torch.cuda.is_available():
        sys.exit('error: bench.py needs a CUDA device, and there is none')
    print(', '.join(f'{key} {value}' for key, value in versions().items()))
    bench, draw = BENCHMARKS[name]
    tables = bench(config)
    path = Path(f'out/bench_{name}.json')
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps({'versions': versions(), 'tables': tables}, indent=1) + '\n')
    print(f'wrote {path}')
    draw(path)


if __name__ == '__main__':
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        sys.exit(f'error: {error}')
