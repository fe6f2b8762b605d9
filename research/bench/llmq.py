"""Training steps compared with LLMQ, which is written in CUDA: docs/benchmarks.md.

    pip install pyllmq
    python research/bench/llmq.py

The step is that of LLMQ's page: Qwen 2.5's shape with random weights, 524,288 random tokens in rows
of 1,024, bfloat16 weights. LLMQ's moments are bfloat16, ours float32.
"""

import functools
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch

from data.packing import pack
from research.bench.common import (DEVICE, METHODS, PeerOptions, Script, bars, chosen_methods,
                                   measure_methods, now, peak_gib, section, speed)
from research.bench.train import our_training
from train import train_step

QWEN = METHODS['llmq']['shape']         # as config.json
LENGTH, ROWS, PASSES = 1024, 16, 32     # tokens of a row; rows of a pass of LLMQ; its passes


@dataclass
class BenchConfig(PeerOptions):
    steps: int = 3      # timed, after one


def bench(config):
    yield {'results': measure_methods(__file__, 'Qwen 2.5 1.5B', chosen_methods('llmq', config),
                                      steps=config.steps)}


def measure(ours, options, steps):
    """Return the speed of the steps after the first one, and the peak memory of ours."""
    step = our_step(options) if ours else llmq_step(options)
    seconds = []
    for number in range(1 + steps):
        started = now()
        step(number)
        seconds.append(now() - started)
    row = speed([ROWS * PASSES * LENGTH] * steps, seconds[1:])
    return row | ({'peak_gib': round(peak_gib(), 1)} if ours else {})


def our_step(options):
    raw = QWEN | {'head_dim': QWEN['hidden_size'] // QWEN['num_attention_heads']}
    tokens = np.random.default_rng(0).integers(0, QWEN['vocab_size'], (ROWS * PASSES, LENGTH))
    batch = [(row, row >= 0) for row in tokens]
    model, optimizer, cfg = our_training(
        raw, {'pack_len': LENGTH, 'max_length': LENGTH, 'smoothing': 0.0} | options, [batch])
    packed = pack(batch, LENGTH, cfg.micro_rows)
    return lambda number: train_step(model, optimizer, packed, cfg, DEVICE)


def llmq_step(options):
    import pyllmq
    with tempfile.TemporaryDirectory() as home:     # it looks for a model in the cache of the hub
        os.environ['HOME'] = home
        os.environ.pop('HF_HOME', None)
        hub = Path(home, '.cache/huggingface/hub/models--Qwen--shape')
        (hub / 'snapshots' / 'a').mkdir(parents=True)
        (hub / 'snapshots' / 'a' / 'config.json').write_text(json.dumps(QWEN))
        (hub / 'snapshots' / 'a' / 'model.safetensors').write_bytes(b'\2\0\0\0\0\0\0\0{}')
        config = pyllmq.LLamaConfig.from_pretrained('Qwen/shape', 'bf16')
    wanted = pyllmq.LLamaOptions()
    for name, value in {'momentum_type': 'bf16', 'variance_type': 'bf16',
                        'use_cuda_graphs': True, **options}.items():
        setattr(wanted, name, value)
    trainer = pyllmq.LLMQTrainer(
        ngpu=1, config=config, options=wanted, batch_size=ROWS, seq_len=LENGTH, grad_accum=PASSES,
        memcpy_all_gather=True, memcpy_send_recv=True)
    trainer.init_weights()
    random = np.random.default_rng(0)

    def step(number):
        for _ in range(PASSES):
            tokens = random.integers(0, QWEN['vocab_size'], (ROWS, LENGTH + 1), dtype=np.int32)
            trainer.step(*map(np.ascontiguousarray, (tokens[:, :-1], tokens[:, 1:])))
        trainer.update(1e-5, 0.9, 0.95, number + 1, 0.1, 1.0)
        torch.cuda.synchronize()
    return step


script = Script(__file__, BenchConfig, bench, functools.partial(section, 'llmq'),
                bars('tokens/s', 'tokens_per_s', ','), measure=measure)

if __name__ == '__main__':
    script.main(sys.argv[1:])
