"""Decoding compared with transformers' `generate` and the hardware's limit, on one CUDA device.

    python research/bench/generate.py
    python research/bench/generate.py --shape=llama32_1b --ours --profile
    python research/bench/generate.py --ours --rows= --prompts=q.jsonl --tokenizer=Llama-3.2-1B
    python research/bench/generate.py --plot=out/bench_generate.json

Random weights in bfloat16 and random prompts; temperature 1, no end tokens. A step must read the
weights and the cache, and compute its products:

    limit of a step = max(bytes of the weights / copy rate, 2 rows weights / matrix rate)
                      + bytes of the cache / copy rate

Both rates are measured in the same run. The peer has a static cache and a compiled step; its second
call is timed. With `prompts` and `tokenizer`, the whole command `python generate.py` with 8 answers
per prompt is timed as well. Writes out/bench_generate.json and its picture.
"""

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch

from research.bench.common import (DEVICE, MODELS, ROOT, Shape, byte_code, cell, draw_bars, failure,
                                   free_memory, gpu_kernels, load, matrix_rate, memory_rate, now,
                                   our_model, peak_gib, peer_model, reset_peak_memory, script_main,
                                   table_text, write_lines)
from data.files import read_rows
from generate import stream
from runtime import checkpoint
from decoding.sampling import Sampling
from decoding.slots import Batch, step_cost

# of our rows, with their formats
COLUMNS = {'steps_tokens_per_s': ',.0f', 'of_limit': '.0%', 'gb_per_s': ',.0f', 'tflops': '.0f',
           'tokens_per_s': ',.0f', 'first_s': '.2f', 'peak_gib': '.1f', 'extra_gib': '.2f'}
# prompts, tokens of each, tokens of each answer
SETTINGS = ((1, 128, 512), (64, 512, 256), (256, 512, 256))


@dataclass
class BenchConfig:
    shape: tuple[Shape, ...] = ('llama32_1b', 'gemma2_2b', 'llama31_8b')
    rows: tuple[int, ...] = (1, 64, 256)    # of SETTINGS
    ours: bool = False              # only ours
    profile: bool = False           # also print the time of each kernel of a step
    prompts: str | None = None      # rows with `prompt` or `question`, for the whole command
    tokenizer: str | None = None    # a folder with a tokenizer, for the whole command
    plot: str | None = None         # only draw this file of results again
    out: str = 'out/bench_generate.json'


def bench(config):
    """Yield a table per model: tokens per second for each of SETTINGS."""
    rates = matrix_rate(), memory_rate()
    print(f'matrix rate {rates[0] / 1e12:.0f} TFLOP/s, copy rate {rates[1] / 1e12:.2f} TB/s')
    for name in config.shape:
        settings = [setting for setting in SETTINGS if setting[0] in config.rows]
        table = {'shape': name, 'matrix_rate': rates[0], 'copy_rate': rates[1], 'results': {}}
        model = our_model(MODELS[name]).eval()
        for setting in settings:
            table['results']['{} x {} + {}'.format(*setting)] = {
                'ours': measure_ours(model, *setting, rates)}
            if config.profile:
                print_kernels(model, *setting)
        if config.prompts:
            with tempfile.TemporaryDirectory() as folder:
                table['command'] = measure_command(model, config, Path(folder))
        del model
        free_memory()
        try:
            if not config.ours:
                model = peer_model(MODELS[name], 'sdpa').eval()
                for setting in settings:
                    table['results']['{} x {} + {}'.format(*setting)]['transformers'] = (
                        measure_peer(model, *setting))
        except Exception as error:      # a peer's
            for results in table['results'].values():
                results.setdefault('transformers', failure(error))
        model = None
        free_memory()
        print_table(table)
        yield table


def random_prompts(model, n, length):
    rng = np.random.default_rng(0)
    return rng.integers(0, model.config.vocab_size, (n, length)).tolist()


def measure_ours(model, n, length, new, rates):
    """Time whole calls; of the second one also the steps between a quarter and the end."""
    prompts, sampling = random_prompts(model, n, length), Sampling(max_tokens=new, batch_size=n)
    for _ in range(2):      # the first call loads kernels
        reset_peak_memory()
        started, times = now(), []
        for answer in stream(model, prompts, sampling):
            if answer.prompt == n - 1:
                times.append(now() if answer.reason else time.perf_counter())
        seconds = now() - started
    first = new // 4
    step = (times[-1] - times[first]) / (new - 1 - first)
    cached = n * (length + (first + new) / 2)
    weights, flops = step_cost(model, n, 0)
    cache_bytes = step_cost(model, n, cached)[0] - weights
    limit = max(weights / rates[1], flops / rates[0]) + cache_bytes / rates[1]
    slots = step_cost(model, n, (n + 1) * (length + new))[0] - weights
    stored = sum(p.nbytes for p in model.parameters())
    return {'tokens_per_s': n * new / seconds, 'steps_tokens_per_s': n / step,
            'limit_tokens_per_s': n / limit, 'of_limit': limit / step,
            'gb_per_s': (weights + cache_bytes) / step / 1e9, 'tflops': flops / step / 1e12,
            'first_s': times[0] - started, 'peak_gib': peak_gib(),
            'extra_gib': peak_gib() - (stored + slots) / 2 ** 30}


def measure_command(model, config, folder):
    """Time `python generate.py`, from its start, in raw text with up to 256 tokens per answer."""
    checkpoint.save(model, folder, torch.bfloat16, side_files=config.tokenizer)
    model.to('cpu')     # the process needs the memory
    free_memory()
    rows = [row for _, row in read_rows(config.prompts)]
    prompts, out = folder / 'prompts.jsonl', folder / 'out' / 'answers.jsonl'
    write_lines(prompts, [{'prompt': row.get('prompt') or row['question']} for row in rows])
    command = [sys.executable, 'generate.py', f'--model={folder}', '--n=8', '--raw']
    options = {'cwd': ROOT, 'env': os.environ | byte_code()}
    few = folder / 'few.jsonl'      # fills the caches on disk
    few.write_text(''.join(prompts.read_text().splitlines(True)[:8]))
    subprocess.run([*command, f'--prompts={few}', f'--out={folder / "few/answers.jsonl"}'],
                   check=True, **options)
    started = time.perf_counter()
    process = subprocess.Popen([*command, f'--prompts={prompts}', f'--out={out}'], **options)
    grown = []      # (seconds, bytes of the answers)
    while process.poll() is None:
        if out.exists() and out.stat().st_size:
            grown.append((time.perf_counter() - started, out.stat().st_size))
        time.sleep(0.02)
    seconds = time.perf_counter() - started
    if process.returncode:
        raise RuntimeError('generate.py failed')
    grown.append((seconds, out.stat().st_size))
    quarter, three = (next(t for t, size in grown if size >= share * grown[-1][1])
                      for share in (0.25, 0.75))
    answers = [answer for _, row in read_rows(out) for answer in row['answers']]
    n_tokens = sum(answer['n_tokens'] for answer in answers)
    return {'prompts': len(rows), 'tokens': n_tokens, 'seconds': seconds, 'first_s': grown[0][0],
            'tokens_per_s': n_tokens / seconds,
            'steady_tokens_per_s': n_tokens / 2 / max(three - quarter, 0.02)}


@torch.no_grad()
def print_kernels(model, n, length, new):
    """Print the kernels of one step without a graph, by their total time."""
    sampling = Sampling(max_tokens=new, batch_size=n)
    batch = Batch(model, sampling, n, length + new, model.config.vocab_size)
    batch.state[1, :-1], batch.rows[:n] = length + new // 2, torch.arange(n)
    batch.compute(n, length + new)
    totals = {}
    for name, begin, end in gpu_kernels(lambda: batch.compute(n, length + new)):
        count, total = totals.get(name, (0, 0))
        totals[name] = count + 1, total + end - begin
    print(f'{n} x {length} + {new}: kernels of one step, number, microseconds')
    for name, (count, total) in sorted(totals.items(), key=lambda item: -item[1][1])[:24]:
        print(f'{count:6d} {total:9.1f}  {name[:100]}')
    graph, _ = batch.capture(n, length + new)
    batch.state[1, :-1] = length + new // 2
    graph.replay()
    started = now()
    for _ in range(10):
        graph.replay()
    print(f'       {(now() - started) * 1e5:9.1f}  the step as a graph')


def measure_peer(model, n, length, new):
    """Time the second of two calls: static cache, compiled step."""
    ids = torch.tensor(random_prompts(model, n, length), device=DEVICE)
    for _ in range(2):
        reset_peak_memory()
        started = now()
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0,
                             temperature=1.0, max_new_tokens=new, min_new_tokens=new,
                             use_cache=True, cache_implementation='static', pad_token_id=0,
                             eos_token_id=None)
        seconds = now() - started
    if out.shape[1] != length + new:
        raise RuntimeError(f'{out.shape[1] - length} tokens instead of {new}')
    return {'tokens_per_s': n * new / seconds, 'peak_gib': peak_gib()}


def print_table(table):
    """Print a table as Markdown: steps, their share of the limit, whole calls, ours / theirs."""
    lines = []
    for setting, results in table['results'].items():
        ours, peer = results['ours'], results.get('transformers')
        compared = '', None, ''
        if peer and 'failed' in peer:
            compared = [cell(peer['failed'])]
        elif peer:
            compared = (f'{peer["tokens_per_s"]:,.0f}', f'{peer["peak_gib"]:.1f}',
                        f'{ours["tokens_per_s"] / peer["tokens_per_s"]:.1f}')
        lines.append((setting, *(format(ours[key], form) for key, form in COLUMNS.items()),
                      *compared))
    print(f'\n### {table["shape"]}, bfloat16\n')
    if lines:
        print(f'A large product has {table["matrix_rate"] / 1e12:.0f} TFLOP/s, a large copy '
              f'{table["copy_rate"] / 1e12:.2f} TB/s.\n', table_text((
                  'prompts x tokens + new tokens', 'steps, tokens/s', 'share of the limit', 'GB/s',
                  'TFLOP/s', 'whole call, tokens/s', 'first token, s', 'peak GiB',
                  'peak GiB without weights and cache', 'transformers, whole call, tokens/s',
                  'its peak GiB', 'ours / theirs'), lines), sep='\n')
    if whole := table.get('command'):
        print(f'\nThe command `python generate.py`, 8 answers to each of {whole["prompts"]:,} '
              f'prompts: {whole["tokens"]:,} tokens in {whole["seconds"]:.1f} s, '
              f'{whole["tokens_per_s"]:,.0f} tokens/s, between a quarter and three quarters of the '
              f'answers {whole["steady_tokens_per_s"]:,.0f}; first answers after '
              f'{whole["first_s"]:.1f} s.')
    sys.stdout.flush()


def draw(path):
    """Draw the tokens per second of each setting, ours and the peer's."""
    draw_bars(path, 'decoding', {
        f'{table["shape"]}: tokens/s': [
            (f'{setting}: {name}', row['tokens_per_s'], f'{row["tokens_per_s"]:,.0f}')
            for setting, results in table['results'].items() for name, row in results.items()
            if 'failed' not in row]
        for table in load(path)['tables']})


main = script_main(__file__, BenchConfig, bench, draw)

if __name__ == '__main__':
    main(sys.argv[1:])
