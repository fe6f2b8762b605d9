"""The losses of fused_ce.py compared with other libraries: time, memory, error; on a CUDA device.

    python research/bench/loss.py --shapes=llama32_1b,mistral_7b --rounds=1 --out=out/quick

Forward and backward of the output layer of six models in bfloat16, with random inputs whose logits
fall with a token's rank as in a language model, and smoothing 0.1. Each method runs at every memory
setting that it has; another table has every loss at the default memory. Also writes a .csv file.
"""

import functools
import importlib
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.nn.functional as F

from research.bench.common import MODELS, Options, Script, attempt, cell, free_memory
from research.common import panels
from fused_ce import fused_loss, smoothed_cross_entropy, token_statistics
from results.plots import save_figure
from results.tables import csv_text
from runtime.errors import ConfigError
from runtime.loss import parse_loss
from runtime.ownership import write_text

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
          'cross_entropy() + adaptive_smoothing(0.1)', 'cross_entropy() + max_sup(0.1)',
          'cross_entropy() + confidence_penalty(0.1)', 'focal(2) + smoothing(0.1) + z_loss(1e-4)')


@dataclass
class BenchConfig(Options):
    out: str = 'out/loss'           # of a .json, a .csv and a .png file
    shapes: tuple[str, ...] = tuple(SHAPES)
    n: int = 8192                   # tokens, all of which carry loss
    rounds: int = 3                 # the median of these is reported


def bench(config):
    if unknown := {*config.shapes} - {*SHAPES}:
        raise ConfigError(f'shapes: there is no {sorted(unknown)[0]!r}; there are '
                          f'{", ".join(SHAPES)}')
    torch.backends.cuda.matmul.allow_tf32 = False
    for name in config.shapes:
        yield {'shape': name, 'n': config.n} | measure(config.n, *SHAPES[name], config.rounds,
                                                       not config.ours)
        free_memory()


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
        step = step_of(functools.partial(loss, hidden, weight, target), hidden, weight)
        arguments = step, hidden, weight, at, exact[smoothing]
        rows[name] = first_step(*arguments) if name in OURS else attempt(first_step, *arguments)
        if 'failed' not in rows[name]:
            steps[name], rows[name]['smoothing'] = step, smoothing
        clear(hidden, weight)
    chunk = min(n, 2048)
    products = three_products(hidden.detach(), weight.detach(), chunk)
    host, half = target.cpu(), target.cpu()
    half[::2] = -100

    def fused(loss):
        return step_of(lambda: fused_loss(hidden, weight, host, loss, softcap=softcap)[0],
                       hidden, weight)

    def smoothed(head=weight, target=host, backward=True, **options):
        return step_of(lambda: smoothed_cross_entropy(hidden, head, target, smoothing=SMOOTHING,
                                                      softcap=softcap, **options)[0],
                       hidden, weight, backward)

    losses = {text: fused(parse_loss(text)) for text in LOSSES}
    uses = {
        'half of the tokens ignored': smoothed(target=half),
        'frozen head': smoothed(head=weight.detach()),
        "reduction='none'": smoothed(reduction='none'),
        'loss without gradient': smoothed(backward=False),
        'token_statistics': step_of(lambda: token_statistics(
            hidden, weight, host, softcap=softcap).nll, hidden, weight, backward=False)}
    ms = interleaved(products | steps | losses | uses, rounds, hidden, weight)
    for name in steps:
        rows[name]['ms'] = ms[name]
    return {'products': [ms[name] * n / chunk for name in products], 'methods': rows,
            'losses': {text: ms[text] for text in losses},
            'uses': {name: ms[name] for name in uses}}


def inputs(n, D, V):
    """Return hidden [n, D], weight [V, D], target [n].

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


def capped(logits, softcap):
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def peer(module, function, **options):
    """Return loss(hidden, weight, target) of a library, which is imported when it is called."""
    def loss(*inputs):
        return getattr(importlib.import_module(module), function)(*inputs, **options)
    return loss


def smooth(plain):
    """Return a plain loss with smoothing from outside, a correction of rank one without a softcap.
    """
    def loss(hidden, weight, target):
        value = plain(hidden, weight, target)
        mean = weight.mean(0, dtype=torch.float32).to(weight.dtype)
        return value + SMOOTHING * (hidden * (weight[target] - mean)).sum(1).float().mean()
    return loss


def methods(softcap, host_target):
    """Return {name: (loss(hidden, weight, target), its smoothing)}; a peer raises if it cannot.

    Ours takes the target from the CPU, where a data loader leaves it, so nothing waits. CCE, QuACK
    and Liger's kernels for Hopper get their smoothing from outside.
    """
    def eager(hidden, weight, target):
        logits = capped((hidden @ weight.T).float(), softcap)
        return F.cross_entropy(logits, target, label_smoothing=SMOOTHING)

    def uncapped(plain):
        def loss(*inputs):
            if softcap is not None:
                raise NotImplementedError('has no softcap')
            return plain(*inputs)
        return loss

    def ours(memory):
        return lambda hidden, weight, _: smoothed_cross_entropy(
            hidden, weight, host_target, smoothing=SMOOTHING, softcap=softcap, memory=memory)[0]

    liger = functools.partial(
        peer, 'liger_kernel.transformers.functional', 'liger_fused_linear_cross_entropy',
        label_smoothing=SMOOTHING, softcap=softcap, accum_dtype=None)
    cce = functools.partial(peer, 'cut_cross_entropy', 'linear_cross_entropy', softcap=softcap)
    quack = uncapped(peer('quack.linear_cross_entropy', 'chunked_linear_cross_entropy'))
    hopper = uncapped(peer('liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90',
                           'liger_fused_linear_cross_entropy_sm90'))
    losses = {
        'torch eager': eager, 'torch.compile': torch.compile(eager, dynamic=False),
        'F.linear_cross_entropy': uncapped(lambda *inputs: F.linear_cross_entropy(
            *inputs, label_smoothing=SMOOTHING)),
        **{f'Liger, C = {constant}': liger(chunk_mem_const=constant) for constant in LIGER},
        'Liger, C = 16, float32 dW': liger(chunk_mem_const=16, accum_dtype=torch.float32),
        'F.linear_cross_entropy, options': uncapped(lambda *inputs: F.linear_cross_entropy(
            *inputs, options=torch.nn.LinearCrossEntropyOptions())),
        'CCE': cce(), 'CCE, no filter': cce(filter_eps=None), 'QuACK': smooth(quack),
        'QuACK, plain': quack, 'Liger, Hopper': smooth(hopper), 'Liger, Hopper, plain': hopper,
        'TRL': trl_loss(softcap), **{name: ours(memory) for name, memory in OURS.items()}}
    # the chunked path of torch, which the options choose, has no label smoothing
    plain = {'F.linear_cross_entropy, options', 'QuACK, plain', 'Liger, Hopper, plain', 'TRL'}
    for name in ('CCE', 'CCE, no filter'):
        if softcap is None:
            losses[name] = smooth(losses[name])
        else:
            plain.add(name)
    return {name: (loss, 0.0 if name in plain else SMOOTHING) for name, loss in losses.items()}


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


def exact_gradients(hidden, weight, target, smoothing, softcap, at):
    """Return the loss and the picked rows of dh and dW, in float32 from the bfloat16 inputs."""
    hidden, weight = (x.detach().float().requires_grad_() for x in (hidden, weight))
    total, (tokens, vocabulary) = 0.0, at
    for h, y in zip(hidden.split(512), target.split(512)):
        loss = F.cross_entropy(capped(h @ weight.T, softcap), y, label_smoothing=smoothing,
                               reduction='sum') / len(target)
        loss.backward()
        total += loss.item()
    return total, hidden.grad[tokens], weight.grad[vocabulary]


def three_products(hidden, weight, rows):
    """Return {name: product} of logits, dh and dW for `rows` tokens, by cuBLAS into bfloat16."""
    hidden = hidden[:rows]
    logits, dh, dw = hidden @ weight.T, torch.empty_like(hidden), torch.empty_like(weight)
    g = torch.randn_like(logits)    # products of zeros are faster
    return {'logits': lambda: torch.mm(hidden, weight.T, out=logits),
            'dh': lambda: torch.mm(g, weight, out=dh), 'dW': lambda: torch.mm(g.T, hidden, out=dw)}


def step_of(loss, hidden, weight, backward=True):
    """Return a function that computes a loss, or the mean of one per token, and its gradients."""
    def step():
        hidden.grad = weight.grad = None
        with torch.set_grad_enabled(backward):
            value = loss()
        if backward:
            value = value.mean() if value.ndim else value
            value.backward()
        return value.detach()
    return step


def first_step(step, hidden, weight, at, exact):
    """Return the extra peak memory and the errors of a step, after one that compiles and tunes."""
    step()
    clear(hidden, weight)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    value = step()
    extra = torch.cuda.max_memory_allocated() - before - hidden.nbytes - weight.nbytes
    (tokens, vocabulary), (total, dh, dw) = at, exact
    return {'extra_mib': extra / MIB, 'loss_error': abs(value.item() - total),
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


def view(table):
    D, V, softcap = SHAPES[table['shape']]
    n, products, rows = table['n'], sum(table['products']), table['methods']
    text = (f'Three products, {" + ".join(f"{ms:.2f}" for ms in table["products"])} = '
            f'{products:.2f} ms ({6 * n * D * V / products / 1e9:.0f} TFLOP/s). Errors in units of '
            f'those of torch eager.')
    eager = rows['torch eager']
    lines = [['method', 'ms', 'ratio to products', 'extra MiB', 'dh error', 'dW error', '']]
    lines += [[method, *[''] * 5, cell(row['failed'])] if 'failed' in row else
              [method, f'{row["ms"]:.2f}', f'{row["ms"] / products:.3f}', f'{row["extra_mib"]:.0f}',
               *(f'{row[key] / eager[key]:.2f}' for key in ('dh_error', 'dw_error')),
               '' if row['smoothing'] else 'without smoothing'] for method, row in rows.items()]
    budgets = [['at most', 'ours, ms', 'best peer, ms', 'peer']]
    for budget in BUDGETS:
        inside = [(row['ms'], method) for method, row in rows.items()
                  if row.get('smoothing') and round(row['extra_mib']) <= budget]
        ours, peer = (min((pair for pair in inside if (pair[1] in OURS) == own),
                          default=(float('nan'), '')) for own in (True, False))
        budgets.append([f'{budget} MiB', f'{ours[0]:.2f}', f'{peer[0]:.2f}', peer[1]])
    base = table['losses']['cross_entropy() + smoothing(0.1)']
    losses = [['loss', 'ms', 'ratio to smoothing'], *(
        [text, f'{ms:.2f}', f'{ms / base:.3f}'] for text, ms in table['losses'].items())]
    one, two, uses = table['products'][0], sum(table['products'][:2]), table['uses']
    return (f'{table["shape"]}: D {D}, V {V}, softcap {softcap}, {n} tokens', text,
            lines, budgets, losses, '; '.join(f'{use} {ms:.2f} ms' for use, ms in uses.items())
            + f'. token_statistics takes {uses["token_statistics"] / one:.2f} of one product, a '
            f'frozen head {uses["frozen head"] / two:.2f} of two.')


def plot(content, picture):
    """Write the numbers as a .csv file beside the picture: time against extra memory."""
    columns, rows = ('ms', 'extra_mib', 'loss_error', 'dh_error', 'dw_error', 'smoothing',
                     'failed'), []
    for table in content['tables']:
        times = {name: {'ms': ms} for name, ms in (table['losses'] | table['uses']).items()}
        rows += [{'shape': table['shape'], 'method': name} | {key: row.get(key) for key in columns}
                 for name, row in (table['methods'] | times).items()]
    write_text(picture.with_suffix('.csv'), csv_text(rows))
    figure, axes = panels(len(content['tables']), 3, 4.6, 4.4)
    for ax, table in zip(axes, content['tables']):
        points = {name: (max(3, row['extra_mib']), row['ms'])
                  for name, row in table['methods'].items() if 'failed' not in row}
        lines = {'ours': [name for name in points if name in OURS],
                 'Liger': [name for name in points if name.startswith('Liger, C')
                           and 'float' not in name]}
        for (label, names), color in zip(lines.items(), ('C0', 'C3')):
            ax.plot(*zip(*sorted(points[name] for name in names)), 'o-', color=color, ms=4, lw=1,
                    label=label)
        for name in points.keys() - {*lines['ours'], *lines['Liger']}:
            ax.plot(*points[name], 's', color='C7', ms=4)
            below = name in ('torch.compile', 'CCE', 'TRL')     # close to another
            ax.annotate(name, points[name], xytext=(0, -10 if below else 5), fontsize=6,
                        ha='center', textcoords='offset points')
        products = sum(table['products'])
        ax.axhline(products, color='grey', ls='--', lw=1, label='three products')
        D, V, softcap = SHAPES[table['shape']]
        top = max(ms for _, ms in points.values()) * 1.3
        ticks = [t for t in (5, 10, 15, 20, 30, 40, 50, 75, 100, 150, 200)
                 if products * 0.8 < t < top]
        ax.set(xscale='log', yscale='log', xlabel='extra memory, MiB', xlim=(2, 6e4),
               ylim=(products * 0.9, top), title=f'{table["shape"]}: D {D}, V {V}, cap {softcap}')
        ax.set_yticks(ticks, [str(t) for t in ticks])
        ax.minorticks_off()
    axes[0].set_ylabel('ms, forward and backward')
    axes[0].legend(fontsize=8)
    used = content['versions']
    figure.suptitle(f'Smoothed cross-entropy of {content["tables"][0]["n"]} tokens in bfloat16 on '
                    f'one {used["device"]}, torch {used["torch"]}', fontsize=10)
    save_figure(figure, picture, 130)


script = Script(__file__, BenchConfig, bench, view, plot)

if __name__ == '__main__':
    script.main(sys.argv[1:])
