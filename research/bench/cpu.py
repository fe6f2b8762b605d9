"""Steps of full fine-tuning without a GPU, compared with a plain loop around transformers.

    python research/bench/cpu.py --models=HuggingFaceTB/SmolLM2-135M,google/gemma-3-270m

Float32, with clipping at 1 and AdamW, on rows of random tokens that all count. The methods take
turns in one process, and the least time of each counts. `CPU` is the time that the threads
computed. The peak memory is that of a process for each method. Ours has as many rows in a pass as
train.py chooses.
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from data.packing import pack
from research.bench.common import Options, Script, chosen, measure_methods, section
from runtime import checkpoint
from runtime.build import build_model, build_optimizer
from runtime.log import peak_memory
from runtime.memory import pick_micro_rows
from train import TrainConfig, train_step


@dataclass
class BenchConfig(Options):
    models: tuple[str, ...] = ('HuggingFaceTB/SmolLM2-135M',)    # folders or hub names
    rows: int = 3                   # per step
    length: int = 512               # tokens in a row
    steps: int = 4                  # of each method that are timed
    only: str | None = None         # methods, separated by '|', instead of all of them


METHODS = {'ours': {}, 'transformers, fused': {'fused': True},
           'transformers, foreach': {'foreach': True},
           'transformers, fused, a row at once': {'fused': True, 'at_once': 1}}


def bench(config):
    for model in config.models:
        data = {'model': model, 'rows': config.rows, 'length': config.length}
        methods = chosen('ours' if config.ours else config.only, METHODS)
        results = measure_methods(__file__, model, methods, True, **data)
        steps = {name: make_step(**data, ours=name == 'ours', options=options)
                 for name, options in methods.items()}
        times = {name: [] for name in steps}
        for _ in range(config.steps + 1):
            for name, step in steps.items():
                started, cpu = time.perf_counter(), time.process_time()
                step()
                times[name].append((time.perf_counter() - started, time.process_time() - cpu))
        for name, row in results.items():
            row['seconds'], row['cpu_s'] = (min(column) for column in zip(*times[name][1:]))
        yield {'shape': model, 'threads': torch.get_num_threads(), 'rows': config.rows,
               'length': config.length, 'results': results}


def measure(**data):
    """Return the peak memory of a process that takes two steps."""
    step = make_step(**data)
    step()
    step()
    return {'peak_gib': peak_memory('cpu')}


def make_step(model, rows, length, ours, options):
    """Return a function that takes a step of `rows` random rows with a method of METHODS."""
    torch.manual_seed(0)
    folder = checkpoint.fetch(model)
    config = checkpoint.read_config(folder)
    tokens = torch.randint(0, config.vocab_size, (rows, length))
    if not ours:
        return plain_step(folder, tokens, **options)
    cfg = TrainConfig(pack_len=length, max_length=length, dtype='float32')
    cfg.micro_rows = pick_micro_rows(cfg, config, 'cpu', [rows])
    trained = build_model(cfg, config, folder, 'cpu')
    optimizer = build_optimizer(trained, cfg)
    packed = pack([(row, row >= 0) for row in tokens.numpy()], length, 1)
    return lambda: train_step(trained, optimizer, packed, cfg, 'cpu')


def plain_step(folder, tokens, at_once=None, **options):
    """Return a step of a loop as people write it; options: those of torch's AdamW."""
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, weight_decay=0.0, **options)

    def step():
        for part in tokens.split(at_once or len(tokens)):
            loss = model(input_ids=part, labels=part, use_cache=False).loss
            (loss * len(part) / len(tokens)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return step


def view(table):
    """Return a section for a table, see `Script`; ratios are to the best of the other rows."""
    rows = {name: dict(row) for name, row in table['results'].items()}
    for key in ('seconds', 'cpu_s', 'peak_gib') if len(rows) > 1 else ():
        best = min(row[key] for name, row in rows.items() if name != 'ours')
        rows['ours'][f'{key} ratio'] = rows['ours'][key] / best
    return section('cpu', table, rows)


script = Script(__file__, BenchConfig, bench, view, measure=measure, needs_gpu=False)

if __name__ == '__main__':
    script.main(sys.argv[1:])
