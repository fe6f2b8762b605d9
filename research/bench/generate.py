"""Decoding compared with transformers' `generate` and the hardware's limit, on one CUDA device.

    python research/bench/generate.py --shape=llama32_1b --ours
    python research/bench/generate.py --ours --rows= --prompts=q.jsonl --tokenizer=Llama-3.2-1B

    limit of a step = max(bytes of the weights / copy rate, 2 rows weights / matrix rate)
                      + bytes of the cache / copy rate

The rates are measured in the same run; docs/benchmarks.md says what else is measured.
"""

import functools
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch

from research.bench.common import (DEVICE, MODELS, Options, Script, Shape, attempt, cell,
                                   decoding_limit, device_rates, free_memory, now, our_model,
                                   peak_gib, peer_model, reset_peak_memory, run_command, section)
from research.common import write_lines
from data.files import read_rows
from decoding.answers import stream
from decoding.sampling import Sampling
from decoding.slots import step_cost
from runtime import saving

# prompts, tokens of each, tokens of each answer
SETTINGS = ((1, 128, 512), (64, 512, 256), (256, 512, 256))


@dataclass
class BenchConfig(Options):
    shape: tuple[Shape, ...] = ('llama32_1b', 'gemma2_2b', 'llama31_8b')
    rows: tuple[int, ...] = (1, 64, 256)    # of SETTINGS
    prompts: str | None = None      # rows with `prompt` or `question`, for the whole command
    tokenizer: str | None = None    # a folder with a tokenizer, for the whole command


def bench(config):
    rates = device_rates()
    settings = {'{} x {} + {}'.format(*setting): setting for setting in SETTINGS
                if setting[0] in config.rows}
    for name in config.shape:
        model, results = our_model(MODELS[name]).eval(), {}
        table = {'shape': name, 'matrix_rate': rates[0], 'copy_rate': rates[1], 'results': results}
        for text, setting in settings.items():
            results[text] = {'ours': measure_ours(model, *setting, rates)}
        if config.prompts:
            with tempfile.TemporaryDirectory() as folder:
                table['command'] = measure_command(model, config, Path(folder))
        del model
        free_memory()
        if not config.ours:
            peer = functools.cache(functools.partial(peer_model, MODELS[name], 'sdpa'))
            for text, setting in settings.items():
                results[text]['transformers'] = attempt(measure_peer, peer, *setting)
            del peer
            free_memory()
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
    limit, n_bytes, flops = decoding_limit(model, n, n * (length + (first + new) / 2), rates)
    slots = step_cost(model, n, (n + 1) * (length + new))[0] - step_cost(model, n, 0)[0]
    stored = sum(p.nbytes for p in model.parameters())
    return {'tokens_per_s': n * new / seconds, 'steps_tokens_per_s': n / step,
            'limit_tokens_per_s': n / limit, 'of_limit': limit / step,
            'gb_per_s': n_bytes / step / 1e9, 'tflops': flops / step / 1e12,
            'first_s': times[0] - started, 'peak_gib': peak_gib(),
            'extra_gib': peak_gib() - (stored + slots) / 2 ** 30}


def measure_command(model, config, folder):
    """Time `python generate.py`, from its start, in raw text with up to 256 tokens per answer."""
    saving.save(model, folder, torch.bfloat16, side_files=config.tokenizer)
    model.to('cpu')     # the process needs the memory
    free_memory()
    rows = [row for _, row in read_rows(config.prompts)]
    prompts, out = folder / 'prompts.jsonl', folder / 'out' / 'answers.jsonl'
    write_lines(prompts, [{'prompt': row.get('prompt') or row['question']} for row in rows])
    command = ['generate.py', f'--model={folder}', '--n=8', '--raw']
    few = folder / 'few.jsonl'      # fills the caches on disk
    few.write_text(''.join(prompts.read_text().splitlines(True)[:8]))
    run_command([*command, f'--prompts={few}', f'--out={folder / "few/answers.jsonl"}'])
    grown = []      # (seconds, bytes of the answers)
    with ThreadPoolExecutor() as pool:
        started = time.perf_counter()
        running = pool.submit(run_command, [*command, f'--prompts={prompts}', f'--out={out}'])
        while not running.done():
            if out.exists() and out.stat().st_size:
                grown.append((time.perf_counter() - started, out.stat().st_size))
            time.sleep(0.02)
    (seconds,), _ = running.result()
    grown.append((seconds, out.stat().st_size))
    quarter, three = (next(t for t, size in grown if size >= share * grown[-1][1])
                      for share in (0.25, 0.75))
    n_tokens = sum(answer['n_tokens'] for _, row in read_rows(out) for answer in row['answers'])
    return {'prompts': len(rows), 'tokens': n_tokens, 'seconds': seconds, 'first_s': grown[0][0],
            'tokens_per_s': n_tokens / seconds,
            'steady_tokens_per_s': n_tokens / 2 / max(three - quarter, 0.02)}


def measure_peer(build, n, length, new):
    """Time the second of two calls: static cache, compiled step."""
    model = build().eval()
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


def view(table):
    rows = {}
    for setting, results in table['results'].items():
        ours, peer = results['ours'], results.get('transformers', {})
        rows[setting] = ours | {'peer_gib': None}
        if 'failed' in peer:
            rows[setting]['peer'] = cell(peer['failed'])
        elif peer:
            rows[setting] |= {'peer': f'{peer["tokens_per_s"]:,.0f}', 'peer_gib': peer['peak_gib'],
                              'ratio': ours['tokens_per_s'] / peer['tokens_per_s']}
    text = (f'A large product has {table["matrix_rate"] / 1e12:.0f} TFLOP/s, a large copy '
            f'{table["copy_rate"] / 1e12:.2f} TB/s.')
    command = table.get('command') and (
        'The command `python generate.py`, 8 answers to each of {prompts:,} prompts: {tokens:,} '
        'tokens in {seconds:.1f} s, {tokens_per_s:,.0f} tokens/s, between a quarter and three '
        'quarters of the answers {steady_tokens_per_s:,.0f}; first answers after {first_s:.1f} s.'
    ).format(**table['command'])
    title, lines = section('generate', table, rows)
    return title, *[text, lines] * bool(rows), command


script = Script(__file__, BenchConfig, bench, view)

if __name__ == '__main__':
    script.main(sys.argv[1:])
