"""Benchmarks beside peers, on one CUDA device; metrics on the CPU.

    python bench.py ce --shape=gemma2_2b
    python bench.py train --shape=llama32_1b --data=alpaca.jsonl --tokenizer=Llama-3.2-1B
    python bench.py eval --data=mmlu --tokenizer=Llama-3.2-1B
    python bench.py metrics
    python bench.py plot out/bench_ce.json

    ce      the smoothed cross-entropy of the output layer, forward and backward, in bfloat16
    eval    5-shot MMLU, from its files to results.json, beside a Hugging Face loop
    metrics calibration metrics of random predictions, beside torchmetrics and netcal
    train   whole training steps beside Hugging Face models, random weights: 2048-token documents,
            and with `data` and `tokenizer` real conversations
    plot    draws one of these files again

Each benchmark prints tables and writes them to out/bench_<name>.json.
"""

import gc
import importlib.metadata
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F

import checkpoint
import metrics
import model as models
import stats
import train
from configs import ConfigError, load_config
from data.instruct import load_conversations
from data.packing import pack
from checkpoint import load_model_tokenizer
from data.trees import tokenize_questions
from evaluate import EvalConfig, evaluate, load_tasks, option_log_probs
from fused_ce import smoothed_cross_entropy, token_statistics
from report import write_text


@dataclass
class BenchConfig:
    shape: Literal['all', 'gemma2_2b', 'llama32_1b', 'llama31_8b', 'mistral_7b'] = 'all'
    cap: Literal['both', 'model', 'none'] = 'both'      # with the model's softcap, without, or both
    softmax: Literal['both', 'zipf', 'flat'] = 'both'   # how the logits are distributed
    n: int = 8192               # tokens, all of which carry loss
    smoothing: float = 0.1      # in [0, 1]
    rounds: int = 3             # every method is timed in each, in turn; the median counts
    # train: conversations, as in train.py; eval: a folder or hub dataset with MMLU's files
    data: str | None = None
    tokenizer: str | None = None    # a folder with the tokenizer for `data`
    sample: int = 1024          # eval: questions that the Hugging Face loop is timed on
    only: str | None = None     # train: methods, by '|', instead of all of them


SHAPES = {      # D, V, softcap
    'gemma2_2b': (2304, 256000, 30.0),
    'llama32_1b': (2048, 128256, None),
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
# train
# ------------------------------------------------------------------------------------------------

LLAMA3 = {'model_type': 'llama', 'vocab_size': 128256, 'num_attention_heads': 32,
          'num_key_value_heads': 8, 'rms_norm_eps': 1e-5, 'max_position_embeddings': 131072,
          'rope_theta': 5e5}
CONFIGS = {     # as in config.json
    'gemma2_2b': {'model_type': 'gemma2', 'vocab_size': 256000, 'hidden_size': 2304,
                  'intermediate_size': 9216, 'num_hidden_layers': 26, 'num_attention_heads': 8,
                  'num_key_value_heads': 4, 'head_dim': 256, 'hidden_activation':
                  'gelu_pytorch_tanh', 'tie_word_embeddings': True},
    'llama32_1b': LLAMA3 | {'hidden_size': 2048, 'intermediate_size': 8192, 'head_dim': 64,
                            'num_hidden_layers': 16, 'tie_word_embeddings': True},
    'llama31_8b': LLAMA3 | {'hidden_size': 4096, 'intermediate_size': 14336, 'head_dim': 128,
                            'num_hidden_layers': 32, 'tie_word_embeddings': False},
    'mistral_7b': {'model_type': 'mistral', 'vocab_size': 32768, 'hidden_size': 4096,
                   'intermediate_size': 14336, 'num_hidden_layers': 32, 'num_attention_heads': 32,
                   'num_key_value_heads': 8, 'head_dim': 128, 'sliding_window': None,
                   'rms_norm_eps': 1e-5, 'rope_theta': 1e6, 'max_position_embeddings': 32768,
                   'tie_word_embeddings': False},
}
ROWS, LENGTH, BATCH = 4, 2048, 128      # documents of full rows; sequences of a step of real data
PEAK = 989e12                           # FLOP/s of an H100 or H200 in bfloat16
PEERS = {           # options of hf_step
    'HF sdpa, Liger': dict(attention='sdpa', liger=True),
    'HF eager, Liger': dict(attention='eager', liger=True),
    'HF flex, compile': dict(attention='flex_attention', compiled=True),
}
TRAIN_OURS = {      # keys of TrainConfig
    'ours': {},
    'ours, 2 micro-batches': dict(micro_rows=ROWS // 2),
    'ours, stochastic': dict(master_weights='stochastic'),
    'ours, stochastic, checkpointed, 2 micro-batches':
        dict(master_weights='stochastic', checkpoint_activations=True, micro_rows=ROWS // 2),
    'ours, LoRA, checkpointed': dict(lora=True, checkpoint_activations=True),
}
SKIPPED = {         # what a model cannot do, has no memory for, or is slower at than at the others
    'gemma2_2b': {'HF sdpa, Liger'},
    'llama32_1b': {'HF eager, Liger'},
    'llama31_8b': {'HF eager, Liger', 'HF flex, compile', 'ours, 2 micro-batches'},
    'mistral_7b': {'HF eager, Liger', 'HF flex, compile', 'ours, 2 micro-batches'},
}
PADDED = {'HF padded, 8 a batch': dict(attention='sdpa', padded=8)} | {
    f'HF padded, {n} a batch, Liger': dict(attention='sdpa', liger=True, padded=n)
    for n in (8, 16, 32)}
PACKED = {'ours, packed': dict(pack_len=4096, max_length=4096, micro_rows=1)}


def bench_train(config):
    """One table a model: tokens/s, model FLOP utilisation, peak memory of whole steps."""
    if (config.data is None) != (config.tokenizer is None):
        raise ConfigError('data and tokenizer: both or none')
    tables = []
    for name in list(CONFIGS) if config.shape == 'all' else [config.shape]:
        kinds = [('2048-token documents', None, PEERS, TRAIN_OURS)]
        if config.data and name.startswith('llama'):
            kinds.append((Path(config.data).name, (config.data, config.tokenizer), PADDED, PACKED))
        for data, real, peers, ours in kinds:
            table = {'shape': name, 'data': data, 'results': {}}
            for method, options in (peers | ours).items():
                if method in SKIPPED[name] or config.only and method not in config.only.split('|'):
                    continue
                table['results'][method] = in_own_process(
                    dict(shape=name, ours=method in ours, real=real, options=options))
                print(f'{name}, {data}: {method}: {table["results"][method]}', flush=True)
            tables.append(table)
            print_train_table(table)
    return tables


def in_own_process(spec):
    """What measure_train says of `spec`, in a fresh process: Liger patches modules for good."""
    done = subprocess.run([sys.executable, __file__, 'one', json.dumps(spec)],
                          capture_output=True, text=True)
    if done.returncode and spec['ours']:
        raise RuntimeError(done.stderr)
    if done.returncode:     # a peer's
        return {'failed': done.stderr.strip().split('\n')[-1][:300]}
    return json.loads(done.stdout.strip().split('\n')[-1])


def measure_train(spec):
    """Time of a step after those that compile, and what it held at most."""
    raw = CONFIGS[spec['shape']]
    torch.manual_seed(0)
    batches = real_batches(*spec['real']) if spec['real'] else full_rows(raw['vocab_size'])
    model, step = (our_step if spec['ours'] else hf_step)(raw, **spec['options'])
    n, warm = len(batches), 3
    for i in range(warm):
        step(batches[i % n])
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    graphs, rates, steps = compiled_graphs(), [], 3
    for start in range(warm, warm + 3 * steps, steps):
        some = [batches[i % n] for i in range(start, start + steps)]
        started = time.perf_counter()
        for batch in some:
            step(batch)
        torch.cuda.synchronize()
        rates.append(sum(len(ids) for batch in some for ids, _ in batch)
                     / (time.perf_counter() - started))
    rate = statistics.median(rates)
    return {'tokens_per_s': round(rate), 'spread': round(max(rates) / min(rates) - 1, 3),
            'mfu': round(rate * flops_per_token(raw, batches) / PEAK, 4),
            'peak_gib': round(torch.cuda.max_memory_allocated() / 2 ** 30, 1),
            'new_graphs': compiled_graphs() - graphs}


def compiled_graphs():
    return torch._dynamo.utils.counters['stats']['unique_graphs']


def flops_per_token(raw, batches):
    """Of forward and backward: 6 a weight that is multiplied; causal attention counted at half."""
    D, L, hd = raw['hidden_size'], raw['num_hidden_layers'], raw['head_dim']
    H, K = raw['num_attention_heads'], raw['num_key_value_heads']
    weights = L * (D * hd * (2 * H + 2 * K) + 3 * D * raw['intermediate_size'])
    lengths = [len(ids) for batch in batches for ids, _ in batch]
    seen = sum(n * n for n in lengths) / sum(lengths)
    return 6 * (weights + D * raw['vocab_size']) + 6 * L * H * hd * seen


def full_rows(V):
    ids = torch.randint(0, V, (2, ROWS, LENGTH)).numpy()
    return [[(row, row >= 0) for row in batch] for batch in ids]


def real_batches(data, tokenizer):
    """Steps of BATCH conversations in random order, as (tokens, learnt)."""
    sequences = load_conversations(data, load_model_tokenizer(Path(tokenizer)), template='tulu',
                                   max_length=4096, add_bos=True, revision=None, workers=8,
                                   cache_dir='out/cache', on_bad_row='stop')
    order = torch.randperm(len(sequences)).tolist()
    return [[sequences[i] for i in order[start:start + BATCH]]
            for start in range(0, len(order) - BATCH + 1, BATCH)]


def our_model(raw):
    torch.set_default_dtype(torch.bfloat16)
    with torch.device('cuda'):
        model = models.CausalLM(checkpoint.config_from_hf(raw))
        model.init_weights()
    torch.set_default_dtype(torch.float32)
    return model


def our_step(raw, **options):
    cfg = train.TrainConfig(**({'pack_len': LENGTH, 'max_length': LENGTH, 'micro_rows': ROWS,
                                'smoothing': 0.1, 'dtype': 'bfloat16'} | options))
    model = train.prepare(our_model(raw), cfg, 'cuda').train()
    optimizer = train.make_optimizer(model, cfg)
    multiple = train.rows_multiple(cfg, 'cuda')

    def step(batch):
        return train.train_step(model, optimizer, pack(batch, cfg.pack_len, multiple), cfg, 'cuda')
    return model, step


def hf_step(raw, attention, liger=False, compiled=False, padded=None):
    """A Hugging Face model in bfloat16 with fused AdamW in bfloat16, clipping at 1.

    padded: sequences in a forward pass, padded to the longest; None: all rows at once.
    """
    import transformers
    if liger:
        import liger_kernel.transformers as kernels
        getattr(kernels, f'apply_liger_kernel_to_{raw["model_type"]}')()
    config = transformers.AutoConfig.for_model(**raw, use_cache=False)
    with torch.device('cuda'):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=attention)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    call = torch.compile(model) if compiled else model

    def losses(batch):
        if not padded:
            ids = torch.stack([torch.from_numpy(ids) for ids, _ in batch]).cuda()
            yield call(input_ids=ids, labels=ids).loss
            return
        n_learnt = sum(int(learnt[1:].sum()) for _, learnt in batch)
        for start in range(0, len(batch), padded):
            some = batch[start:start + padded]
            shape = len(some), max(len(ids) for ids, _ in some)
            ids, labels, mask = (torch.full(shape, value) for value in (0, -100, 0))
            for i, (tokens, learnt) in enumerate(some):
                row = torch.from_numpy(tokens.astype('int64'))
                ids[i, :len(row)], mask[i, :len(row)] = row, 1
                labels[i, :len(row)] = row.where(torch.from_numpy(learnt > 0), -100)
            yield call(input_ids=ids.cuda(), attention_mask=mask.cuda(), labels=labels.cuda(),
                       num_items_in_batch=n_learnt).loss

    def step(batch):
        for loss in losses(batch):
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return model, step


def print_train_table(table):
    good = {k: r for k, r in table['results'].items() if 'failed' not in r}
    best = max((r['tokens_per_s'] for k, r in good.items() if k.startswith('HF')), default=None)
    print(f'\n{table["shape"]}, {table["data"]}, bfloat16\n'
          f'{"":50}{"tokens/s":>9}{"x best HF":>10}{"MFU":>7}{"GiB":>7}{"new graphs":>11}')
    for name, row in table['results'].items():
        if 'failed' in row:
            print(f'{name:50}  {row["failed"][:90]}')
            continue
        ratio = f'{row["tokens_per_s"] / best:10.3f}' if best else f'{"":10}'
        print(f'{name:50}{row["tokens_per_s"]:9}{ratio}{row["mfu"]:7.3f}'
              f'{row["peak_gib"]:7.1f}{row["new_graphs"]:11}')


def draw_train(path):
    """Tokens/s of each method beside each other, one panel a table."""
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    content = json.loads(path.read_text(encoding='utf-8'))
    tables = content['tables']
    figure, axes = plt.subplots(-(-len(tables) // 2), min(2, len(tables)), squeeze=False,
                                figsize=(12, 3.2 * -(-len(tables) // 2)), layout='constrained')
    for axis in axes.flat[len(tables):]:
        axis.axis('off')
    for axis, table in zip(axes.flat, tables):
        rows = [(k, r) for k, r in reversed(table['results'].items()) if 'failed' not in r]
        colours = ['#4878a8' if name.startswith('ours') else '#bbbbbb' for name, _ in rows]
        bars = axis.barh([name for name, _ in rows], [r['tokens_per_s'] for _, r in rows],
                         color=colours)
        axis.bar_label(bars, [f' {r["tokens_per_s"]:,}, {r["peak_gib"]:.0f} GiB' for _, r in rows],
                       fontsize=7)
        axis.tick_params(labelsize=7)
        axis.set_title(f'{table["shape"]}, {table["data"]}: tokens/s', fontsize=9)
        axis.margins(x=0.35)
    found = content['versions']
    figure.suptitle(f'Training steps in bfloat16 on one {found["device"]}, torch {found["torch"]}',
                    fontsize=10)
    figure.savefig(path.with_suffix('.png'), dpi=130)
    print(f'wrote {path.with_suffix(".png")}')


# ------------------------------------------------------------------------------------------------
# eval
# ------------------------------------------------------------------------------------------------

EVAL_PEERS = {      # attention of Hugging Face's model, prompts in a batch
    'gemma2_2b': ('flex_attention', 16), 'llama32_1b': ('sdpa', 32), 'llama31_8b': ('sdpa', 32),
    'mistral_7b': ('sdpa', 32)}


def bench_eval(config):
    """5-shot MMLU in questions a second: ours with everything, the peer's forward passes alone."""
    if config.data is None or config.tokenizer is None:
        raise ConfigError('eval wants --data, a folder with MMLU, and --tokenizer, a folder')
    rate = matrix_rate()
    print(f'matrix rate {rate / 1e12:.0f} TFLOP/s')
    tables = []
    for name in list(EVAL_PEERS) if config.shape == 'all' else [config.shape]:
        raw = CONFIGS[name]
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, 'config.json').write_text(json.dumps(raw))
            for file in Path(config.tokenizer).glob('tokenizer.model*'):
                shutil.copyfile(file, Path(folder, file.name))
            table = {'shape': name, 'matrix_rate': rate,
                     'results': {'ours': our_eval(raw, folder, config.data, rate)}}
        gc.collect()
        torch.cuda.empty_cache()
        lengths = table['results']['ours'].pop('lengths')
        try:
            table['results']['Hugging Face'] = hf_eval(raw, *EVAL_PEERS[name], lengths,
                                                       config.sample)
        except Exception as error:      # a peer's
            table['results']['Hugging Face'] = {
                'failed': f'{type(error).__name__}: {str(error).splitlines()[0]}'}
        gc.collect()
        torch.cuda.empty_cache()
        tables.append(table)
        print_eval_table(table)
    return tables


def matrix_rate():
    """FLOP/s of a product of two 8192 x 8192 matrices in bfloat16."""
    from triton.testing import do_bench
    a, b = (torch.randn(8192, 8192, device='cuda', dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192 ** 3 / do_bench(lambda: a @ b, return_mode='median') * 1e3


def our_eval(raw, folder, data, rate):
    """From MMLU's files to results.json, after a few questions that compile; then a profile."""
    cfg = EvalConfig(model=folder, tasks=(f'mmlu:{data}',), dtype='bfloat16', device='cuda',
                     out_dir=f'{folder}/out', overwrite=True)
    tokenizer, model = load_model_tokenizer(Path(folder)), our_model(raw).eval()
    models.compile_blocks(model)
    work = load_tasks(cfg)['mmlu']
    trees = [tree for _, tree in tokenize_questions(work.items, work.shots, tokenizer,
                                                     add_bos=True, max_length=8192)]
    started = time.perf_counter()
    option_log_probs(model, trees[:16], pack_len=16384, trim=False)
    torch.cuda.synchronize()
    first = time.perf_counter() - started
    torch.cuda.reset_peak_memory_stats()
    graphs, started = compiled_graphs(), time.perf_counter()
    tasks = load_tasks(cfg)
    reading = time.perf_counter() - started
    results = evaluate(folder, tokenizer, tasks, cfg, cfg.out_dir, model)
    seconds = time.perf_counter() - started
    scoring = results['tasks']['mmlu']['scoring_seconds']
    peak = torch.cuda.max_memory_allocated()
    graphs = compiled_graphs() - graphs
    prefixes = {tree.prefix for tree in trees}
    tokens = sum(map(len, prefixes)) + sum(
        len(tree.stem) + sum(map(len, tree.leaves)) for tree in trees)
    rows = -(-tokens // 16384)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        some = replace(work, items=work.items[:4000])
        evaluate(folder, tokenizer, {'mmlu': some}, cfg, cfg.out_dir, model)
    kernels = sorted((e.time_range.start, e.time_range.end) for e in profile.events()
                     if e.device_type == torch.autograd.DeviceType.CUDA)
    busy, end = 0, 0
    for begin, stop in kernels:
        busy, end = busy + max(0, stop - max(begin, end)), max(end, stop)
    flops = 2 * (sum(p.numel() for p in model.parameters())
                 - raw['vocab_size'] * raw['hidden_size'] * (2 - raw['tie_word_embeddings']))
    return {'questions_per_s': len(trees) / seconds, 'seconds': seconds, 'reading_s': reading,
            'scoring_s': scoring, 'results_s': seconds - reading - scoring, 'compile_s': first,
            'tokens': tokens, 'rows': rows, 'of_matrix_rate': flops * tokens / scoring / rate,
            'gpu_busy': busy / (kernels[-1][1] - kernels[0][0]), 'new_graphs': graphs,
            'peak_gib': peak / 2 ** 30,
            'lengths': [len(tree.prefix) + len(tree.stem) for tree in trees]}


def hf_eval(raw, attention, batch, lengths, sample):
    """What lm-evaluation-harness does: sorted by length, padded, a forward pass a question."""
    import transformers
    config = transformers.AutoConfig.for_model(**raw, use_cache=False)
    with torch.device('cuda'):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=attention).eval()
    make = torch.Generator().manual_seed(0)
    picked = torch.randperm(len(lengths), generator=make)[:sample].tolist()
    some = sorted((lengths[i] for i in picked), reverse=True)

    @torch.no_grad()
    def run(lengths):
        for i in range(0, len(lengths), batch):
            rows = torch.tensor(lengths[i:i + batch], device='cuda')
            ids = torch.randint(0, raw['vocab_size'], (len(rows), lengths[i]), device='cuda')
            log_probs = torch.log_softmax(model(input_ids=ids).logits, -1)
            log_probs[torch.arange(len(rows)), rows - 1, 32:36].float().cpu()
            del log_probs
    run(some[:2 * batch])
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    run(some)
    torch.cuda.synchronize()
    rate = len(some) / (time.perf_counter() - started)
    return {'questions_per_s': rate, 'seconds': len(lengths) / rate, 'attention': attention,
            'peak_gib': torch.cuda.max_memory_allocated() / 2 ** 30}


def print_eval_table(table):
    ours, peer = table['results']['ours'], table['results']['Hugging Face']
    print(f'\n{table["shape"]}, 5-shot MMLU, bfloat16\n'
          f'ours          {ours["questions_per_s"]:8.1f} questions/s, all in '
          f'{ours["seconds"]:.1f} s (reading {ours["reading_s"]:.1f}, scoring '
          f'{ours["scoring_s"]:.1f}, metrics and files {ours["results_s"]:.1f}; compiling before '
          f'{ours["compile_s"]:.1f})\n'
          f'              {ours["tokens"]} tokens, {ours["of_matrix_rate"]:.1%} of the matrix rate '
          f'while scoring, GPU busy {ours["gpu_busy"]:.1%}, peak {ours["peak_gib"]:.1f} GiB, new '
          f'graphs {ours["new_graphs"]}')
    if 'failed' in peer:
        print(f'Hugging Face  {peer["failed"][:90]}')
        return
    print(f'Hugging Face  {peer["questions_per_s"]:8.1f} questions/s, all in '
          f'{peer["seconds"]:.1f} s, {peer["attention"]}, peak {peer["peak_gib"]:.1f} GiB\n'
          f'ours / theirs {ours["questions_per_s"] / peer["questions_per_s"]:.2f}', flush=True)


def draw_eval(path):
    """Seconds for the test set, ours beside the peer's."""
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    content = json.loads(path.read_text(encoding='utf-8'))
    figure, axis = plt.subplots(figsize=(8, 3.2), layout='constrained')
    bars, labels = [], []
    for table in reversed(content['tables']):
        for name, row in reversed(table['results'].items()):
            if 'failed' not in row:
                bars.append((row['seconds'], name == 'ours'))
                labels.append(f'{table["shape"]}: {name}')
    drawn = axis.barh(range(len(bars)), [seconds for seconds, _ in bars],
                      color=['#4878a8' if ours else '#bbbbbb' for _, ours in bars])
    axis.bar_label(drawn, [f' {seconds:.1f}' for seconds, _ in bars], fontsize=8)
    axis.set_yticks(range(len(bars)), labels, fontsize=8)
    axis.set(xlabel='seconds, 14,042 questions with 5 shots')
    axis.margins(x=0.12)
    found = content['versions']
    figure.suptitle(f'MMLU in bfloat16 on one {found["device"]}, torch {found["torch"]}',
                    fontsize=10)
    figure.savefig(path.with_suffix('.png'), dpi=130)
    print(f'wrote {path.with_suffix(".png")}')


# ------------------------------------------------------------------------------------------------
# metrics
# ------------------------------------------------------------------------------------------------

def bench_metrics(config):
    """Seconds for ours and for each peer that is installed, by size."""
    return [metrics_table(n, k) for n, k in ((14_042, 4), (1_000_000, 10))]


def metrics_table(n, k):
    rng = np.random.default_rng(0)
    probs = rng.dirichlet(np.full(k, 0.5), n)
    labels = rng.integers(0, k, n)
    calls = {
        'report': {'ours': lambda: metrics.report(probs, labels)},
        'bootstrap, 1000 resamples': {
            'ours': lambda: stats.bootstrap(probs, labels) if n < 10 ** 5 else None},
        'ECE, 10 bins': {'ours': lambda: metrics.ece(probs, labels)},
        'MCE, 10 bins': {'ours': lambda: metrics.mce(probs, labels)},
    }
    try:
        from torchmetrics.functional.classification import multiclass_calibration_error
        p, y = torch.from_numpy(probs), torch.from_numpy(labels)
        for name, norm in ('ECE, 10 bins', 'l1'), ('MCE, 10 bins', 'max'):
            calls[name]['torchmetrics'] = lambda norm=norm: multiclass_calibration_error(
                p, y, num_classes=k, n_bins=10, norm=norm)
    except ImportError:
        print('torchmetrics is not installed')
    try:
        import netcal.metrics
        calls['ECE, 10 bins']['netcal'] = lambda: netcal.metrics.ECE(10).measure(probs, labels)
        calls['MCE, 10 bins']['netcal'] = lambda: netcal.metrics.MCE(10).measure(probs, labels)
        if n < 10 ** 5:     # an n x n matrix
            calls['MMCE'] = {'ours': lambda: metrics.mmce(probs, labels),
                             'netcal': lambda: netcal.metrics.MMCE().measure(probs, labels)}
    except ImportError:
        print('netcal is not installed')
    table = {'n': n, 'k': k, 'seconds': {}}
    print(f'\n{n} x {k}, seconds')
    for name, methods in calls.items():
        table['seconds'][name] = {method: seconds(call) for method, call in methods.items()}
        print(f'{name:28}' + '  '.join(f'{method} {time:.4f}' for method, time in
                                       table['seconds'][name].items()), flush=True)
    return table


def seconds(call):
    """The median of three calls after one."""
    call()
    found = []
    for _ in range(3):
        started = time.perf_counter()
        call()
        found.append(time.perf_counter() - started)
    return statistics.median(found)


# ------------------------------------------------------------------------------------------------

def versions():
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else 'CPU'
    found = {'device': device, 'torch': torch.__version__}
    for package in ('triton', 'transformers', 'liger-kernel', 'cut-cross-entropy', 'torchmetrics',
                    'netcal'):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


BENCHMARKS = {'ce': (bench_ce, draw_ce), 'eval': (bench_eval, draw_eval),
              'metrics': (bench_metrics, None), 'train': (bench_train, draw_train)}


def main(argv):
    if len(argv) == 2 and argv[0] == 'plot':
        path = Path(argv[1])
        return BENCHMARKS[path.stem.removeprefix('bench_')][1](path)
    if len(argv) == 2 and argv[0] == 'one':
        print(json.dumps(measure_train(json.loads(argv[1]))))
        return None
    if not argv or argv[0] not in BENCHMARKS:
        sys.exit(f'usage: python bench.py {"|".join(BENCHMARKS)} [--key=value ...], or '
                 'python bench.py plot out/bench_ce.json')
    name = argv[0]
    config = load_config(BenchConfig, argv[1:])
    if not torch.cuda.is_available() and name != 'metrics':
        sys.exit('error: bench.py needs a CUDA device, and there is none')
    print(', '.join(f'{key} {value}' for key, value in versions().items()))
    bench, draw = BENCHMARKS[name]
    tables = bench(config)
    path = Path(f'out/bench_{name}.json')
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps({'versions': versions(), 'tables': tables}, indent=1) + '\n')
    print(f'wrote {path}')
    if draw:
        draw(path)


if __name__ == '__main__':
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        sys.exit(f'error: {error}')
