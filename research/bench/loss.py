"""The losses of fused_ce.py compared with other libraries: time, memory, error; on a CUDA device.

    python research/bench/loss.py
    python research/bench/loss.py --shapes=llama32_1b,mistral_7b --rounds=1 --out=out/quick
    python research/bench/loss.py --plot=out/loss.json

Forward and backward of the output layer of six models in bfloat16, with random inputs whose logits
fall with a token's rank as in a language model, and smoothing 0.1. Each method runs at every memory
setting that it has. A second table has every loss of fused_ce.py at the default memory. Writes
<out>.json, <out>.csv and <out>.png; a peer that is not installed is listed as such.
"""

import argparse
import csv
import functools
import statistics
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[2]))

from research.bench.common import (MODELS, cell, failure, free_memory, load, save, table_text,
                                   versions)
from fused_ce import fused_loss, smoothed_cross_entropy, token_statistics
from runtime.loss import parse_loss

SHAPES = {name: (raw['hidden_size'], raw['vocab_size'], 30.0 if name == 'gemma2_2b' else None)
          for name, raw in MODELS.items()}      # D, V, softcap
SHAPES |= {'gemma3_4b': (2560, 262144, None), 'aya_expanse_8b': (4096, 256000, None)}
MIB = 2 ** 20
SMOOTHING = 0.1
BUDGETS = 64, 128, 256, 512, 1050       # MiB: who is fastest within each
OURS = {'ours, 64 MiB': 0, 'ours, 128 MiB': 128 * MIB, 'ours, 256 MiB': 256 * MIB,
        'ours, 512 MiB': 512 * MIB, 'ours, default': None, 'ours, one chunk': 2 ** 40}
LIGER = 1, 2, 4, 8, 16, 64, 128         # its chunk_mem_const
LOSSES = ('cross_entropy()', 'cross_entropy() + smoothing(0.1)', 'brier()', 'spherical()',
          'focal(2)', 'gce(0.7)', 'dft()', 'entropy_weighted(1)', 'cross_entropy() + z_loss(1e-4)',
          'cross_entropy() + confidence_penalty(0.1)', 'focal(2) + smoothing(0.1) + z_loss(1e-4)')


def measure(n, D, V, softcap, rounds, peers=True):
    """Return {products, methods: {name: row}, losses: {name: ms}, uses: {name: ms}} of a shape."""
    hidden, weight, target = inputs(n, D, V)
    at = picked(target, V)
    exact = {smoothing: exact_gradients(hidden, weight, target, smoothing, softcap, at)
             for smoothing in (SMOOTHING, 0.0)}
    rows, steps = {}, {}
    for name, (loss, smoothing) in methods(softcap, target.cpu()).items():
        if not (peers or name in OURS or name == 'torch eager'):    # the unit of the errors
            continue
        try:
            steps[name], rows[name] = first_step(loss, hidden, weight, target, at, exact[smoothing])
            rows[name]['smoothing'] = smoothing
        except Exception as error:      # a peer's; ours must not fail
            if name in OURS:
                raise
            rows[name] = failure(error)
        clear(hidden, weight)
    chunk = min(n, 2048)
    products = three_products(hidden.detach(), weight.detach(), chunk)
    host, frozen, half = target.cpu(), weight.detach(), target.cpu().clone()
    half[::2] = -100
    options = {'smoothing': SMOOTHING, 'softcap': softcap}
    losses = {f'loss {text}': step_of(
        functools.partial(lambda loss: fused_loss(hidden, weight, host, loss, softcap=softcap)[0],
                          parse_loss(text)), hidden, weight) for text in LOSSES}
    uses = {
        'half of the tokens ignored': step_of(
            lambda: smoothed_cross_entropy(hidden, weight, half, **options)[0], hidden, weight),
        'frozen head': step_of(
            lambda: smoothed_cross_entropy(hidden, frozen, host, **options)[0], hidden, weight),
        "reduction='none'": step_of(
            lambda: smoothed_cross_entropy(hidden, weight, host, reduction='none',
                                           **options)[0].mean(), hidden, weight),
        'loss without gradient': step_of(
            lambda: smoothed_cross_entropy(hidden, weight, host, **options)[0], hidden, weight,
            backward=False),
        'token_statistics': step_of(
            lambda: token_statistics(hidden, weight, host, softcap=softcap).nll, hidden, weight,
            backward=False),
    }
    ms = interleaved(products | steps | losses | uses, rounds, hidden, weight)
    for name in steps:
        rows[name]['ms'] = ms[name]
    return {'products': [ms[name] * n / chunk for name in products], 'methods': rows,
            'losses': {text: ms[f'loss {text}'] for text in LOSSES},
            'uses': {name: ms[name] for name in uses}}


def inputs(n, D, V):
    """hidden [n, D], weight [V, D], target [n].

    Logits fall with the logarithm of a token's rank, labels are drawn from that distribution, and
    their logits are lifted by 6 +- 4.
    """
    make = torch.Generator('cuda').manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=make, device='cuda')

    weight, hidden = normal(V, D) / D ** 0.5, normal(n, D)
    rank = 1.0 + torch.randperm(V, generator=make, device='cuda')
    target = torch.multinomial(1 / rank, n, replacement=True, generator=make)
    common = F.normalize(normal(D), dim=0)
    own = weight[target]
    own -= (own @ common)[:, None] * common
    hidden += 2 * common + (6 + 4 * normal(n, 1)) * own / own.square().sum(1, keepdim=True)
    weight += (9 - rank.log())[:, None] * common / 2
    return hidden.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_(), target


def methods(softcap, host_target):
    """Return {name: (loss(hidden, weight, target), its smoothing)}; a peer raises if it cannot.

    Ours takes the target from the CPU, where a data loader leaves it, so nothing waits. Without a
    softcap the smoothing of any plain loss is a correction of rank one, which CCE, QuACK and
    Liger's kernels for Hopper get from outside.
    """
    def smooth(loss, hidden, weight, target):
        mean = weight.mean(0, dtype=torch.float32).to(weight.dtype)
        return loss + SMOOTHING * (hidden * (weight[target] - mean)).sum(1).float().mean()

    def eager(hidden, weight, target):
        logits = (hidden @ weight.T).float()
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        return F.cross_entropy(logits, target, label_smoothing=SMOOTHING)

    def liger(constant, accum_dtype=None):
        def loss(hidden, weight, target):
            from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy
            return liger_fused_linear_cross_entropy(
                hidden, weight, target, label_smoothing=SMOOTHING, softcap=softcap,
                accum_dtype=accum_dtype, chunk_mem_const=constant)
        return loss

    def cce(**options):
        def loss(hidden, weight, target):
            from cut_cross_entropy import linear_cross_entropy
            loss = linear_cross_entropy(hidden, weight, target, softcap=softcap, **options)
            return smooth(loss, hidden, weight, target) if softcap is None else loss
        return loss

    def quack(hidden, weight, target):
        from quack.linear_cross_entropy import chunked_linear_cross_entropy
        if softcap is not None:
            raise NotImplementedError('has no softcap')
        return chunked_linear_cross_entropy(hidden, weight, target)

    def liger_hopper(hidden, weight, target):
        from liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90 import (
            liger_fused_linear_cross_entropy_sm90)
        if softcap is not None:
            raise NotImplementedError('has no softcap')
        return liger_fused_linear_cross_entropy_sm90(hidden, weight, target)

    def smoothed(plain):
        return lambda *inputs: smooth(plain(*inputs), *inputs)

    def torch_linear(with_options):
        def loss(hidden, weight, target):
            if not hasattr(F, 'linear_cross_entropy'):
                raise ImportError(f'torch {torch.__version__} has no F.linear_cross_entropy')
            if softcap is not None:
                raise NotImplementedError('has no softcap')
            options = {}
            if with_options:    # its chunked path has no label smoothing
                options['options'] = torch.nn.LinearCrossEntropyOptions()
            return F.linear_cross_entropy(hidden, weight, target, **options,
                                          label_smoothing=0 if with_options else SMOOTHING)
        return loss

    def ours(memory):
        return lambda hidden, weight, _: smoothed_cross_entropy(
            hidden, weight, host_target, smoothing=SMOOTHING, softcap=softcap, memory=memory)[0]

    can_smooth = SMOOTHING if softcap is None else 0.0
    peers = {'torch eager': eager, 'torch.compile': torch.compile(eager, dynamic=False),
             'F.linear_cross_entropy': torch_linear(False)}
    peers |= {f'Liger, C = {constant}': liger(constant) for constant in LIGER}
    peers['Liger, C = 16, float32 dW'] = liger(16, torch.float32)
    return ({name: (loss, SMOOTHING) for name, loss in peers.items()}
            | {'F.linear_cross_entropy, options': (torch_linear(True), 0.0),
               'CCE': (cce(), can_smooth), 'CCE, no filter': (cce(filter_eps=None), can_smooth),
               'QuACK': (smoothed(quack), SMOOTHING), 'QuACK, plain': (quack, 0.0),
               'Liger, Hopper': (smoothed(liger_hopper), SMOOTHING),
               'Liger, Hopper, plain': (liger_hopper, 0.0), 'TRL': (trl_loss(softcap), 0.0)}
            | {name: (ours(memory), SMOOTHING) for name, memory in OURS.items()})


def trl_loss(softcap):
    """Return the loss of TRL's trainers, which has no smoothing, at the width that they use."""
    def loss(hidden, weight, target):
        from trl.kernels import ChunkedLogProbFunction
        from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE as width
        log_probs, *_ = ChunkedLogProbFunction.apply(hidden, weight, None, target, 1.0, width,
                                                     softcap, 1.0, ())
        return -log_probs.mean()
    return loss


def picked(target, V):
    """Return the rows of dh, and of dW (64 labels, then 192 at random), to compare."""
    make = torch.Generator('cuda').manual_seed(1)
    tokens = torch.randperm(len(target), generator=make, device='cuda')[:128]
    return tokens, torch.cat([target[:64],
                              torch.randint(0, V, (192,), generator=make, device='cuda')])


@torch.no_grad()
def exact_gradients(hidden, weight, target, smoothing, softcap, at):
    """Return the loss and the picked rows of dh and dW, in float32 from the bfloat16 inputs."""
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
    """Return {name: product} of logits, dh and dW for `rows` tokens, by cuBLAS into bfloat16."""
    hidden = hidden[:rows]
    logits, dh, dw = hidden @ weight.T, torch.empty_like(hidden), torch.empty_like(weight)
    g = torch.randn_like(logits)    # products of zeros are faster
    return {'logits': lambda: torch.mm(hidden, weight.T, out=logits),
            'dh': lambda: torch.mm(g, weight, out=dh), 'dW': lambda: torch.mm(g.T, hidden, out=dw)}


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
    return step, {'extra_mib': extra / MIB, 'loss_error': abs(value.item() - total),
                  'dh_error': relative_error(hidden.grad[tokens], dh),
                  'dw_error': relative_error(weight.grad[vocabulary], dw)}


def relative_error(x, exact):
    return ((x.float() - exact).norm() / exact.norm()).item()


def clear(hidden, weight):
    hidden.grad = weight.grad = None
    free_memory()


def interleaved(steps, rounds, hidden, weight):
    """Return the median ms of each; they take turns, since clocks fall as the device warms up.

    Each starts with an empty memory cache: blocks that another one left cost about 3 %.
    """
    from triton.testing import do_bench
    ms = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            clear(hidden, weight)
            ms[name].append(do_bench(step, warmup=25, rep=100, return_mode='median'))
    return {name: statistics.median(values) for name, values in ms.items()}


def print_table(name, n, table):
    """Print the tables of a shape as Markdown."""
    D, V, softcap = SHAPES[name]
    products, rows = sum(table['products']), table['methods']
    print(f'\n### {name}: D {D}, V {V}, softcap {softcap}, {n} tokens\n\n'
          f'Three products, {" + ".join(f"{ms:.2f}" for ms in table["products"])} = '
          f'{products:.2f} ms ({6 * n * D * V / products / 1e9:.0f} TFLOP/s). Errors in units of '
          'those of torch eager.\n')
    eager = rows['torch eager']
    print(table_text(('method', 'ms', 'ratio to products', 'extra MiB', 'dh error', 'dW error',
                      None), [
        [method, *[None] * 5, cell(row['failed'])] if 'failed' in row else
        [method, f'{row["ms"]:.2f}', f'{row["ms"] / products:.3f}', f'{row["extra_mib"]:.0f}',
         *(f'{row[key] / eager[key]:.2f}' for key in ('dh_error', 'dw_error')),
         '' if row['smoothing'] else 'without smoothing'] for method, row in rows.items()]))
    budgets = []
    for budget in BUDGETS:
        inside = {method: row['ms'] for method, row in rows.items()
                  if round(row.get('extra_mib', 1e9)) <= budget and row.get('smoothing')}
        best = [min(((ms, method) for method, ms in inside.items() if (method in OURS) == ours),
                    default=(float('nan'), '')) for ours in (True, False)]
        budgets.append((f'{budget} MiB', f'{best[0][0]:.2f}', f'{best[1][0]:.2f}', best[1][1]))
    print('', table_text(('at most', 'ours, ms', 'best peer, ms', 'peer'), budgets), '', sep='\n')
    base = table['losses']['cross_entropy() + smoothing(0.1)']
    print(table_text(('loss', 'ms', 'ratio to smoothing'), [
        (text, f'{ms:.2f}', f'{ms / base:.3f}') for text, ms in table['losses'].items()]))
    one, two = table['products'][0], sum(table['products'][:2])
    print('\n' + '; '.join(f'{use} {ms:.2f} ms' for use, ms in table['uses'].items())
          + f'. token_statistics takes {table["uses"]["token_statistics"] / one:.2f} of one '
          f'product, a frozen head {table["uses"]["frozen head"] / two:.2f} of two.', flush=True)


def write_csv(path, tables):
    columns = ['shape', 'method', 'ms', 'extra_mib', 'loss_error', 'dh_error', 'dw_error',
               'smoothing', 'failed']
    with open(path, 'w', newline='') as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        for shape, table in tables.items():
            times = {name: {'ms': ms} for name, ms in (table['losses'] | table['uses']).items()}
            for name, row in (table['methods'] | times).items():
                writer.writerow({'shape': shape, 'method': name} | row)


def draw(path):
    """Time against extra memory, one panel per shape, from <out>.json to <out>.png."""
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    content = load(path)
    n_panels = len(content['tables'])
    n_columns = min(3, n_panels)
    figure, axes = plt.subplots(-(-n_panels // n_columns), n_columns, squeeze=False,
                                figsize=(4.6 * n_columns, 4.4 * -(-n_panels // n_columns)))
    for ax in axes.flat[n_panels:]:
        ax.axis('off')
    for ax, (shape, table) in zip(axes.flat, content['tables'].items()):
        rows = {name: row for name, row in table['methods'].items() if 'failed' not in row}

        def points(names, rows=rows):
            return sorted((max(3, rows[name]['extra_mib']), rows[name]['ms']) for name in names)

        lines = {'ours': [name for name in rows if name in OURS],
                 'Liger': [name for name in rows if name.startswith('Liger, C')
                           and 'float' not in name]}
        for (label, names), color in zip(lines.items(), ('C0', 'C3'), strict=True):
            ax.plot(*zip(*points(names), strict=True), 'o-', color=color, ms=4, lw=1, label=label)
        for name in rows.keys() - {name for names in lines.values() for name in names}:
            x, y = points([name])[0]
            ax.plot(x, y, 's', color='C7', ms=4)
            below = name in ('torch.compile', 'CCE', 'TRL')     # close to another
            ax.annotate(name, (x, y), xytext=(0, -10 if below else 5), fontsize=6, ha='center',
                        textcoords='offset points')
        products = sum(table['products'])
        ax.axhline(products, color='grey', ls='--', lw=1, label='three products')
        D, V, softcap = SHAPES[shape]
        top = max(row['ms'] for row in rows.values()) * 1.3
        ticks = [t for t in (5, 10, 15, 20, 30, 40, 50, 75, 100, 150, 200)
                 if products * 0.8 < t < top]
        ax.set(xscale='log', yscale='log', xlabel='extra memory, MiB', xlim=(2, 6e4),
               ylim=(products * 0.9, top), title=f'{shape}: D {D}, V {V}, cap {softcap}')
        ax.set_yticks(ticks, [str(t) for t in ticks])
        ax.minorticks_off()
    axes[0, 0].set_ylabel('ms, forward and backward')
    axes[0, 0].legend(fontsize=8)
    installed = content['versions']
    figure.suptitle(f'Smoothed cross-entropy of {content["n"]} tokens in bfloat16 on one '
                    f'{installed["device"]}, torch {installed["torch"]}', fontsize=10)
    figure.tight_layout()
    figure.savefig(Path(path).with_suffix('.png'), dpi=130)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--shapes', default=','.join(SHAPES), help='some of: %(default)s')
    parser.add_argument('--n', type=int, default=8192, help='tokens, all of which carry loss')
    parser.add_argument('--rounds', type=int, default=3, help='the median of these is reported')
    parser.add_argument('--ours', action='store_true', help='only ours and torch eager')
    parser.add_argument('--out', default='out/loss', help='path of the results, without suffix')
    parser.add_argument('--plot', help='only draw this file of results again')
    options = parser.parse_args()
    if options.plot:
        return draw(options.plot)
    if not torch.cuda.is_available():
        sys.exit('error: research/bench/loss.py needs a CUDA device')
    torch.backends.cuda.matmul.allow_tf32 = False
    print(', '.join(f'{key} {value}' for key, value in versions().items()))
    out, tables = Path(options.out), {}
    for name in options.shapes.split(','):
        tables[name] = measure(options.n, *SHAPES[name], options.rounds, not options.ours)
        print_table(name, options.n, tables[name])
        save(out.with_suffix('.json'), tables, n=options.n)
        free_memory()
    write_csv(out.with_suffix('.csv'), tables)
    return draw(out.with_suffix('.json'))


if __name__ == '__main__':
    main()
