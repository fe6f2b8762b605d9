"""Whole training steps compared with other libraries at their best, on one CUDA device.

    python research/bench/train.py --shape=llama32_1b,llama31_8b
    python research/bench/train.py --shape=llama32_1b --data=alpaca.jsonl --tokenizer=Llama-3.2-1B
    python research/bench/train.py --only='ours|HF sdpa, Liger'
    python research/bench/train.py --plot=out/bench_train.json

A step is forward, backward, clipping and AdamW on four documents of 2,048 tokens, with random
weights; with `data` and `tokenizer` also on real conversations, 128 per step. Each method runs in
its own process, with empty caches on disk. Its compile seconds are the time of the first three
steps minus that of three later ones. Writes out/bench_train.json and its picture.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from research.bench import common
from research.bench.common import (DEVICE, MODELS, cell, chosen, compiled_graphs, draw_bars,
                                   empty_caches, last_error, load, now, our_model, peak_gib,
                                   reset_peak_memory)
from research.bench.peers import hugging_face_step, trl_steps
from data.instruct import load_conversations
from data.packing import pack
from data.tokenizer import load_tokenizer
from runtime.build import build_optimizer, prepare
from runtime.config_json import config_from_hf
from runtime.errors import ConfigError
from runtime.memory import pick_micro_rows
from train import TrainConfig, train_step


ROWS, LENGTH = 4, 2048      # documents per step, their tokens
PACK_LEN = 4096             # stands for `pack_len` in the tables below


@dataclass
class BenchConfig:
    shape: tuple[Literal['gemma2_2b', 'gemma3_270m', 'llama32_1b', 'llama31_8b', 'mistral_7b'],
                 ...] = tuple(MODELS)
    data: str | None = None         # conversations, as in train.py
    tokenizer: str | None = None    # a folder with the tokenizer for `data`
    batch: int = 128                # conversations per step
    pack_len: int = PACK_LEN        # tokens in a row of conversations
    only: str | None = None         # methods to measure, separated by '|'; None: those of USUAL
    ours: bool = False              # ours alone, exact and stochastic
    warm: bool = False              # use compiled kernels that are in the caches on disk
    plot: str | None = None         # only draw this file of results again
    out: str = 'out/bench_train.json'


STEPS = 3                               # per timed part
PEAK = 989e12                           # FLOP/s of an H100 or H200 in bfloat16
OURS = {            # keys of TrainConfig
    'ours': {},
    'ours, stochastic': {'master_weights': 'stochastic'},
    'ours, 4 rows at once': {'micro_rows': ROWS},
    'ours, 2 micro-batches': {'micro_rows': ROWS // 2},
    'ours, stochastic, 2 micro-batches':
        {'master_weights': 'stochastic', 'micro_rows': ROWS // 2},
    'ours, stochastic, checkpointed, 2 micro-batches':
        {'master_weights': 'stochastic', 'checkpoint_activations': True, 'micro_rows': ROWS // 2},
    'ours, LoRA': {'lora': True},
    'ours, LoRA, checkpointed': {'lora': True, 'checkpoint_activations': True},
    # the settings of the figure that NVIDIA publishes for NeMo AutoModel: docs/benchmarks.md
    'ours, LoRA 16 on all matrices, 2 x 4,096': {
        'lora': True, 'lora_rank': 16, 'pack_len': 4096, 'max_length': 4096, 'micro_rows': 2,
        'lora_targets': ('q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj',
                         'down_proj')},
}
PEERS = {           # options of hugging_face_step, or of trl_steps
    'HF sdpa': {'attention': 'sdpa'},
    'HF sdpa, Liger': {'attention': 'sdpa', 'liger': True},
    'HF sdpa, compile': {'attention': 'sdpa', 'compiled': True},
    'HF sdpa, Liger, compile': {'attention': 'sdpa', 'liger': True, 'compiled': True},
    'HF eager, Liger': {'attention': 'eager', 'liger': True},
    'HF flex, compile': {'attention': 'flex_attention', 'compiled': True},
    'HF flex, Liger, compile': {'attention': 'flex_attention', 'liger': True, 'compiled': True},
    'TRL': {'trl': True, 'attention': 'flex_attention', 'length': LENGTH, 'rows': ROWS},
    'TRL, compile': {'trl': True, 'attention': 'flex_attention', 'length': LENGTH, 'rows': ROWS,
                     'compiled': True},
}
OURS_PACKED = {
    name.replace('ours', 'ours, packed'): {'pack_len': PACK_LEN, 'max_length': PACK_LEN} | options
    for name, options in OURS.items() if name in ('ours', 'ours, stochastic')} | {
    f'ours, packed, {n} at once': {'pack_len': PACK_LEN, 'max_length': PACK_LEN, 'micro_rows': n}
    for n in (1, 2, 4, 8, 16)}
PEERS_PACKED = {'HF padded, batch size 8': {'attention': 'sdpa', 'padded': 8}} | {
    f'HF padded, batch size {n}, Liger': {'attention': 'sdpa', 'liger': True, 'padded': n}
    for n in (8, 16, 32)} | {
    f'HF packed, flex{liger}{compiled}':
        {'attention': 'flex_attention', 'packed': PACK_LEN, 'liger': bool(liger),
         'compiled': bool(compiled)} for liger in ('', ', Liger') for compiled in ('', ', compile')
} | {f'HF packed, flex, Liger, compile, {n} at once':
     {'attention': 'flex_attention', 'packed': PACK_LEN, 'liger': True, 'compiled': True, 'rows': n}
     for n in (2, 4, 8)
} | {'TRL packed': {'trl': True, 'attention': 'flex_attention', 'length': PACK_LEN},
     'TRL packed, flash-attn': {'trl': True, 'attention': 'flash_attention_2', 'length': PACK_LEN},
     'TRL packed, compile': {'trl': True, 'attention': 'flex_attention', 'length': PACK_LEN,
                             'compiled': True},
     'TRL packed, compile, 8 at once': {'trl': True, 'attention': 'flex_attention',
                                        'length': PACK_LEN, 'rows': 8, 'compiled': True}}
# the methods of each table without `only`: those that may be the fastest of their library
USUAL = {
    'gemma2_2b': ('HF flex, compile', 'ours', 'ours, stochastic'),
    'gemma3_270m': ('HF sdpa, Liger, compile', 'ours'),
    'llama32_1b': ('HF sdpa, Liger', 'HF sdpa, compile', 'HF sdpa, Liger, compile', 'ours',
                   'ours, stochastic'),
    'llama31_8b': ('HF sdpa, Liger', 'HF sdpa, Liger, compile', 'ours', 'ours, stochastic'),
    'mistral_7b': ('HF sdpa, Liger', 'ours', 'ours, stochastic'),
    'packed': ('HF padded, batch size 32, Liger', 'HF packed, flex, compile',
               'HF packed, flex, Liger, compile', 'TRL packed, compile', 'ours, packed',
               'ours, packed, stochastic'),
}


# ------------------------------------------------------------------------------------------------
# Measuring
# ------------------------------------------------------------------------------------------------

def bench(config):
    """Yield a table per model and kind of data: tokens/s, compile seconds, MFU, peak memory."""
    if (config.data is None) != (config.tokenizer is None):
        raise ConfigError('data and tokenizer go together; set both or none')
    only = chosen(config.only, PEERS | OURS | PEERS_PACKED | OURS_PACKED)
    for name in config.shape:
        kinds = [(f'{LENGTH}-token documents', None, OURS, PEERS | OURS, USUAL[name])]
        if config.data:
            real = config.data, config.tokenizer, config.batch, config.pack_len
            kinds.append((Path(config.data).name, real, OURS_PACKED, PEERS_PACKED | OURS_PACKED,
                          USUAL['packed']))
        for data, real, ours, methods, usual in kinds:
            wanted = only if config.only else usual
            table = {'shape': name, 'data': data, 'results': {}}
            for method, options in methods.items():
                if method not in wanted or config.ours and method not in ours:
                    continue
                table['results'][method] = measure_in_process(
                    {'raw': MODELS[name], 'ours': method in ours, 'real': real,
                     'options': {key: config.pack_len if real and value == PACK_LEN else value
                                 for key, value in options.items()}}, config.warm)
                print(f'{name}, {data}: {method}: {table["results"][method]}', flush=True)
            if table['results']:
                print_table(table)
                yield table


def measure_in_process(spec, warm):
    """Return measure(**spec) from a new process, because Liger patches modules permanently.

    Unless `warm`, it finds no compiled kernels on disk. If the method fails, return {'failed': the
    reason}; RuntimeError if it is ours and does not lack memory.
    """
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([sys.executable, __file__, 'one', json.dumps(spec)],
                              env=os.environ | ({} if warm else empty_caches(folder)),
                              capture_output=True, text=True)
    if done.returncode:
        reason = last_error(done.stderr)
        if spec['ours'] and 'OutOfMemoryError' not in reason:
            raise RuntimeError(done.stderr)
        return {'failed': reason}
    return json.loads(done.stdout.strip().split('\n')[-1])


def measure(raw, ours, real, options):
    """Return the speed and peak memory of steps after the first ones, which compile."""
    torch.manual_seed(0)
    batches = (real_batches(*real) if real else
               full_rows(raw['vocab_size'], options.get('pack_len', LENGTH)))
    if ours:
        options = options | {'micro_rows': our_rows(raw, batches, options)}
    marks = []

    def mark():
        marks.append((now(), compiled_graphs()))
        if len(marks) == 2:
            reset_peak_memory()

    if options.get('trl'):
        options = {key: value for key, value in options.items() if key != 'trl'}
        with tempfile.TemporaryDirectory() as folder:
            tokens = [trl_steps(raw, batches, mark, STEPS, folder, **options) * STEPS] * 4
    else:
        step, tokens = (our_step if ours else hugging_face_step)(raw, **options), []
        mark()
        for start in range(0, 4 * STEPS, STEPS):
            chosen = [batches[i % len(batches)] for i in range(start, start + STEPS)]
            for batch in chosen:
                step(batch)
            tokens.append(sum(len(ids) for batch in chosen for ids, _ in batch))
            mark()
    seconds = [after - before for (before, _), (after, _) in itertools.pairwise(marks)]
    rates = [n / time for n, time in zip(tokens[1:], seconds[1:], strict=True)]
    rate = statistics.median(rates)
    return {'tokens_per_s': round(rate), 'spread': round(max(rates) / min(rates) - 1, 3),
            'compile_s': round(max(0, seconds[0] - statistics.median(seconds[1:])), 1),
            'mfu': round(rate * flops_per_token(raw, batches) / PEAK, 4),
            'peak_gib': round(peak_gib(), 1), 'new_graphs': marks[-1][1] - marks[1][1]}


def flops_per_token(raw, batches):
    """Return forward and backward FLOPs: 6 per multiplied weight, half of causal attention's."""
    weights, heads = multiplied_weights(raw)
    lengths = [len(tokens) for batch in batches for tokens, _ in batch]
    seen = sum(n * n for n in lengths) / sum(lengths)
    return 6 * weights + 6 * raw['num_hidden_layers'] * heads * seen


def multiplied_weights(raw):
    """Return (number of weights in matrix products, with the output layer; H * head_dim)."""
    D, hd = raw['hidden_size'], raw['head_dim']
    heads, pairs = raw['num_attention_heads'] * hd, raw['num_key_value_heads'] * hd
    block = 2 * D * (heads + pairs) + 3 * D * raw['intermediate_size']
    return raw['num_hidden_layers'] * block + D * raw['vocab_size'], heads


def full_rows(V, length):
    """Return two steps of random documents of `length` tokens, as (tokens, loss mask)."""
    tokens = torch.randint(0, V, (2, ROWS * LENGTH // length, length)).numpy()
    return [[(row, row >= 0) for row in batch] for batch in tokens]


def real_batches(data, tokenizer, batch, length):
    """Return steps of `batch` conversations in random order, as (tokens, loss mask)."""
    sequences = load_conversations(data, load_tokenizer(Path(tokenizer)), template='tulu',
                                   max_length=length, add_bos=True, revision=None, workers=8,
                                   cache_dir='out/cache', on_bad_row='stop')
    order = torch.randperm(len(sequences)).tolist()
    return [[sequences[i] for i in order[start:start + batch]]
            for start in range(0, len(order) - batch + 1, batch)]


def our_config(options):
    return TrainConfig(**({'pack_len': LENGTH, 'max_length': LENGTH, 'smoothing': 0.1,
                           'dtype': 'bfloat16'} | options))


def our_rows(raw, batches, options):
    """Return the rows per forward pass that train.py would choose for such steps."""
    cfg = our_config(options)
    counts = [len(pack(batch, cfg.pack_len).tokens) for batch in batches[:16]]
    return cfg.micro_rows or pick_micro_rows(cfg, config_from_hf(raw), DEVICE, counts)


def our_training(raw, **options):
    """Return model, optimizer and TrainConfig of a run with these keys."""
    cfg = our_config(options)
    model = prepare(our_model(raw), cfg, DEVICE)
    return model, build_optimizer(model, cfg), cfg


def our_step(raw, **options):
    model, optimizer, cfg = our_training(raw, **options)
    rows = cfg.micro_rows or 1
    return lambda batch: train_step(model, optimizer, pack(batch, cfg.pack_len, rows),
                                    cfg, DEVICE)


# ------------------------------------------------------------------------------------------------
# Showing
# ------------------------------------------------------------------------------------------------

def print_table(table):
    """Print a table as Markdown; ratios are to the best other library."""
    good = {name: row for name, row in table['results'].items() if 'failed' not in row}
    best = max((row['tokens_per_s'] for name, row in good.items() if 'ours' not in name),
               default=None)
    print(f'\n### {table["shape"]}, {table["data"]}, bfloat16\n\n'
          '| method | tokens/s | ratio to best peer | compile, s | MFU | peak GiB | spread | '
          'graphs compiled late |\n|---|---|---|---|---|---|---|---|')
    for name, row in table['results'].items():
        if 'failed' in row:
            print(f'| {name} | failed: {cell(row["failed"])} | | | | | | |')
            continue
        ratio = f'{row["tokens_per_s"] / best:.3f}' if best else ''
        print(f'| {name} | {row["tokens_per_s"]:,} | {ratio} | {row["compile_s"]:.1f} | '
              f'{row["mfu"]:.3f} | {row["peak_gib"]:.1f} | {row["spread"]:.1%} | '
              f'{row["new_graphs"]} |')
    print(flush=True)


def draw(path):
    """Draw the tokens/s of each method, a panel per table."""
    draw_bars(path, 'Training steps', {
        f'{table["shape"]}, {table["data"]}: tokens/s': [
            (name, row['tokens_per_s'], f'{row["tokens_per_s"]:,}, {row["peak_gib"]:.0f} GiB')
            for name, row in table['results'].items() if 'failed' not in row]
        for table in load(path)['tables']})


def main(argv):
    if argv[:1] == ['one']:
        print(json.dumps(measure(**json.loads(argv[1]))))
    else:
        common.main(argv, __file__, BenchConfig, bench, draw)


if __name__ == '__main__':
    main(sys.argv[1:])
