"""DPO compared with TRL's DPOTrainer, on one CUDA device: docs/benchmarks.md.

    python research/bench/align.py --data=pairs.json --tokenizer=Llama-3.2-1B
"""

import functools
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch

import train
from align import AlignConfig, pack_pairs, pair_objective
from alignment.reference import answer_sums
from research.bench.common import (DEVICE, MODELS, PeerOptions, Script, bars, chosen_methods,
                                   measure_methods, now, our_model, peak_gib, peer_model,
                                   require_files, reset_peak_memory, section, speed)
from research.bench.peers import TRL_SETTINGS, plain_tokenizer
from data.preferences import load_preferences, to_tree
from data.tokenizer import load_tokenizer
from runtime.build import build_optimizer, prepare


@dataclass
class BenchConfig(PeerOptions):
    shape: tuple[Literal['llama32_1b', 'llama31_8b'], ...] = ('llama32_1b',)
    data: str | None = None         # pairs, as in align.py
    batch: int = 64                 # pairs of a step


PACK_LEN = 4096
STEPS = 4           # that are timed, after as many that compile


def bench(config):
    require_files(config, data='a file of preferences')
    methods = chosen_methods('align', config)
    for name in config.shape:
        yield {'shape': name, 'results': measure_methods(
            __file__, name, methods, raw=MODELS[name], lora=name == 'llama31_8b', data=config.data,
            tokenizer=config.tokenizer, batch=config.batch)}


def measure(raw, ours, lora, data, tokenizer, batch, options):
    """Return the speed, the seconds of the reference and the peak memory of steps of `batch`."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        pairs = load_preferences(data, load_tokenizer(Path(tokenizer)), template='tulu',
                                 max_length=PACK_LEN // 2, pack_len=PACK_LEN, add_bos=True,
                                 cache_dir=folder)
        trees = [to_tree(*pairs[i])[0] for i in range(len(pairs))]
        chosen = [[(step * batch + i) % len(pairs) for i in range(batch)]
                  for step in range(2 * STEPS)]
        step, reference_s = (our_step if ours else trl_step)(raw, pairs, trees, lora, folder,
                                                             **options)
        seconds = []
        for number, indices in enumerate(chosen):
            if number == STEPS:
                reset_peak_memory()
            started = now()
            step(indices)
            seconds.append(now() - started)
    tokens = [sum(len(trees[i].prompt) + len(answer) for i in indices
                  for answer in trees[i].continuations[:2]) for indices in chosen]
    return speed(tokens[STEPS:], seconds[STEPS:]) | {
        'first_s': round(seconds[0], 1), 'reference_s': round(reference_s, 1),
        'peak_gib': round(peak_gib(), 1)}


def our_step(raw, pairs, trees, lora, folder, micro_rows=1):
    """Return (step(indices of the pairs), seconds for the reference of all pairs)."""
    cfg = AlignConfig(pack_len=PACK_LEN, micro_rows=micro_rows, lora=lora, lora_rank=16,
                      lora_targets=('q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj',
                                    'up_proj', 'down_proj'))
    model = prepare(our_model(raw), cfg, DEVICE)
    run = SimpleNamespace(cfg=cfg, device=DEVICE, sequences=pairs)
    started = now()
    run.reference = answer_sums(run, model)
    reference_s, optimizer = now() - started, build_optimizer(model, cfg)

    def step(indices):
        packed = pack_pairs(run, np.array(indices), micro_rows)
        train.train_step(model, optimizer, packed, cfg, DEVICE, pair_objective)
    return step, reference_s


def trl_step(raw, pairs, trees, lora, folder, size, liger=False, compiled=False):
    """Return as `our_step`, by TRL's collator and loss, in micro-batches of `size` pairs."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    class Tokenized(DPOTrainer):
        def _prepare_dataset(self, dataset, *_):
            return dataset

    rows = [{'prompt_ids': tree.prompt, 'chosen_ids': tree.continuations[0],
             'rejected_ids': tree.continuations[-1]} for tree in trees]
    config = DPOConfig(output_dir=folder, per_device_train_batch_size=size, beta=0.1,
                       precompute_ref_log_probs=True, max_length=None, use_liger_kernel=liger,
                       torch_compile=compiled, **TRL_SETTINGS)
    adapters = None
    if lora:
        from peft import LoraConfig
        adapters = LoraConfig(r=16, lora_alpha=32, target_modules='all-linear')
    model, started = peer_model(raw, 'sdpa'), now()
    trainer = Tokenized(model, args=config, train_dataset=Dataset.from_list(rows),
                        processing_class=plain_tokenizer(), peft_config=adapters)
    reference_s, model = now() - started, trainer.model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=5e-7, fused=DEVICE == 'cuda')
    call = torch.compile(model) if compiled else model

    def step(indices):
        for start in range(0, len(indices), size):
            some = [trainer.train_dataset[i] for i in indices[start:start + size]]
            inputs = {key: x.to(DEVICE) for key, x in trainer.data_collator(some).items()}
            loss = trainer._compute_loss(call, inputs, return_outputs=False)
            (loss * len(some) / len(indices)).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return step, reference_s


script = Script(__file__, BenchConfig, bench, functools.partial(section, 'align'),
                bars('tokens of pairs/s', 'tokens_per_s', ','), measure=measure)

if __name__ == '__main__':
    script.main(sys.argv[1:])
