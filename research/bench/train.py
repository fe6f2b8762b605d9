"""Whole training steps compared with other libraries at their best: docs/benchmarks.md.

    python research/bench/train.py --shape=llama32_1b --data=alpaca.jsonl --tokenizer=Llama-3.2-1B
    python research/bench/train.py --only='ours|HF sdpa, Liger'
"""

import itertools
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from research.bench.common import (DEVICE, METHODS, MODELS, PeerOptions, Script, Shape, bars,
                                   measure_methods, now, our_model, peak_gib, reset_peak_memory,
                                   section, speed)
from research.bench.peers import hugging_face_step, trl_steps
from data.instruct import load_conversations
from data.packing import pack
from data.tokenizer import load_tokenizer
from runtime.build import build_optimizer, prepare
from runtime.config_json import config_from_hf
from runtime.errors import ConfigError
from runtime.memory import pick_micro_rows
from train import TrainConfig, train_step


@dataclass
class BenchConfig(PeerOptions):
    """Without --only those of `usual` in methods.toml are measured."""
    shape: tuple[Shape, ...] = tuple(MODELS)
    data: str | None = None         # conversations, as in train.py
    batch: int = 128                # conversations per step
    pack_len: int = 4096            # tokens in a row of conversations
    steps: int = 3                  # per timed part; a small model needs dozens for a second
    warm: bool = False              # use compiled kernels that are in the caches on disk


ROWS, LENGTH = 4, 2048      # documents per step, their tokens
PEAK = 989e12               # FLOP/s of an H100 or H200 in bfloat16


def bench(config):
    if (config.data is None) != (config.tokenizer is None):
        raise ConfigError('data and tokenizer go together; set both or none')
    for name in config.shape:
        kinds = {f'{LENGTH}-token documents': None}
        if config.data:
            kinds[Path(config.data).name] = (config.data, config.tokenizer, config.batch,
                                             config.pack_len)
        for data, real in kinds.items():
            wanted = config.only or METHODS['train']['usual']['packed' if real else name]
            methods = {method: method_options(method, config.pack_len)
                       for method in wanted.split('|')}
            methods = {method: options for method, options in methods.items()
                       if on_conversations(method) == bool(real)
                       and (method.startswith('ours') or not config.ours)}
            if methods:
                yield {'shape': name, 'data': data, 'results': measure_methods(
                    __file__, f'{name}, {data}', methods, config.warm, raw=MODELS[name],
                    real=real, steps=config.steps)}


def method_options(name, pack_len):
    """Return what the parts of a method's name say, for conversations in rows of `pack_len`."""
    flex = {'attention': 'flex_attention'}
    ours = METHODS['train']['ours'] | {'packed': {'pack_len': pack_len, 'max_length': pack_len}}
    peers = METHODS['train']['peers'] | {
        'HF packed': flex | {'packed': pack_len},
        'TRL packed': flex | {'trl': True, 'length': pack_len}}
    options = {}
    for part in name.split(', '):
        known = (ours if name.startswith('ours') else peers) | {
            f'{n} at once': {'micro_rows': n} for n in (1, 2, 4, 8, 16)}
        if part not in known:
            raise ConfigError(f'only = {name!r}: there is no {part!r}; the parts of a name are '
                              f'{", ".join(map(repr, known))}')
        options |= known[part]
    return options


def on_conversations(method):
    return 'packed' in method or 'padded' in method


def measure(raw, ours, real, options, steps=3):
    """Return the speed and peak memory of steps after the first ones, which compile."""
    torch.manual_seed(0)
    batches = (real_batches(*real) if real else
               full_rows(raw['vocab_size'], options.get('pack_len', LENGTH)))
    marks = []

    def mark():
        marks.append((now(), torch._dynamo.utils.counters['stats']['unique_graphs']))
        if len(marks) == 2:
            reset_peak_memory()

    if options.get('trl'):
        options = {key: value for key, value in options.items() if key != 'trl'}
        with tempfile.TemporaryDirectory() as folder:
            tokens = [trl_steps(raw, batches, mark, steps, folder, **options) * steps] * 4
    else:
        step = our_step(raw, batches, options) if ours else hugging_face_step(raw, **options)
        tokens = []
        mark()
        for start in range(0, 4 * steps, steps):
            chosen = [batches[i % len(batches)] for i in range(start, start + steps)]
            for batch in chosen:
                step(batch)
            tokens.append(sum(len(ids) for batch in chosen for ids, _ in batch))
            mark()
    seconds = [after - before for (before, _), (after, _) in itertools.pairwise(marks)]
    row = speed(tokens[1:], seconds[1:])
    return row | {
        'compile_s': round(max(0, seconds[0] - statistics.median(seconds[1:])), 1),
        'mfu': round(row['tokens_per_s'] * flops_per_token(raw, batches) / PEAK, 4),
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


def our_training(raw, options, batches=()):
    """Return model, optimizer and TrainConfig of a run with these keys.

    It has as many rows per forward pass as train.py chooses for `batches`.
    """
    cfg = TrainConfig(**{'pack_len': LENGTH, 'max_length': LENGTH, 'smoothing': 0.1,
                         'dtype': 'bfloat16'} | options)
    if batches and not cfg.micro_rows:
        counts = [len(pack(batch, cfg.pack_len).tokens) for batch in batches[:16]]
        cfg.micro_rows = pick_micro_rows(cfg, config_from_hf(raw), DEVICE, counts)
    model = prepare(our_model(raw), cfg, DEVICE)
    return model, build_optimizer(model, cfg), cfg


def our_step(raw, batches, options):
    model, optimizer, cfg = our_training(raw, options, batches)
    return lambda batch: train_step(
        model, optimizer, pack(batch, cfg.pack_len, cfg.micro_rows), cfg, DEVICE)


def view(table):
    """Return a section for a table, see `Script`; ratios are to the best other library."""
    rows = {name: row for name, row in table['results'].items() if 'failed' not in row}
    best = max((row['tokens_per_s'] for name, row in rows.items() if 'ours' not in name),
               default=None)
    results = {name: row | ({'ratio': row['tokens_per_s'] / best} if best and name in rows else {})
               for name, row in table['results'].items()}
    return section('train', table, results)


script = Script(__file__, BenchConfig, bench, view, bars('tokens/s', 'tokens_per_s', ','),
                measure=measure)

if __name__ == '__main__':
    script.main(sys.argv[1:])
