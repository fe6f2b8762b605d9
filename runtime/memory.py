"""How many packed rows go through the model at once, and what happens where memory is lacking.

`run` is a `train.Run`.
"""

import gc
import time
from dataclasses import replace

import numpy as np
import torch

from model import CausalLM
from runtime.config import run_settings
from runtime.device import pick_dtype
from runtime.errors import out_of_memory
from runtime.parallel import gather, world_size

# Each forward pass costs as much as some tokens, whatever its length: the gradients of all weights
# are added to those of earlier passes (SUM_TOKENS), and a GPU waits for the launches of its kernels
# (LAUNCH_WEIGHTS / weights), at most MOST_TOKENS. With Gemma 3 270M on an H100 it is 10,000 tokens,
# and 4,400 if the launches are recorded; with Qwen 2.5 1.5B on an H200 it is 500.
SUM_TOKENS, LAUNCH_WEIGHTS, MOST_TOKENS = 300, 1e12, 8192
CPU_BYTES = 2 ** 30     # for activations; more rows at once are hardly faster there
WAIT = 10               # seconds between two tries to get memory that other programs have
PATIENCE = 3600         # seconds of such tries


def as_memory_allows(compute, fewer=None):
    """Return compute(), which is called again where memory is lacking.

    fewer: called with the error; makes compute() need less and returns whether it could. If not,
    compute() is called every WAIT seconds as long as other programs have memory of the GPU. Several
    processes give up at once: the others may wait in the middle of a pass.
    """
    until, waiting = time.monotonic() + PATIENCE, False
    while True:
        try:
            return compute()
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error) or world_size() > 1:
                raise
            lowered = fewer and fewer(error)
            if not lowered and (isinstance(error, MemoryError)      # of the host
                                or time.monotonic() > until or not others_have_memory()):
                raise
        gc.collect()        # not above, where the error holds the activations
        torch.cuda.empty_cache()
        if not lowered:
            if not waiting:
                print('out of memory, of which other programs have a part: waiting for theirs, at '
                      'most an hour', flush=True)
            waiting = True
            time.sleep(WAIT)


def others_have_memory():
    """Return whether other programs have more of the GPU's memory than a desktop does."""
    if not torch.cuda.is_initialized():
        return False
    try:
        free, total = torch.cuda.mem_get_info()
    except RuntimeError:    # not even enough to ask
        return True
    return total - free - torch.cuda.memory_reserved() > total / 8


def fit_into_memory(train, run):
    """Return train(run) with a number for cfg.micro_rows if the setting is None.

    It is that of the run to resume, else the fastest one. As long as memory is lacking before the
    end of the first step, it is halved, and training begins again.
    """
    cfg, log = run.cfg, run.out_dir / 'log.jsonl'
    if not cfg.micro_rows:
        rows = cfg.resume and run_settings(cfg.out_dir).get('micro_rows') or as_memory_allows(
            lambda: pick_micro_rows(cfg, run.config, run.device, row_counts(run)))
        cfg = replace(cfg, micro_rows=min(gather(rows)))    # the memory of processes may differ
        print(f'rows of {cfg.pack_len} tokens per forward pass: {cfg.micro_rows}')

    def fewer(error):
        if log.exists() and log.stat().st_size:
            raise error
        return cfg is not run.cfg and halve_rows(cfg, cfg.micro_rows)   # one that was set is kept

    return as_memory_allows(lambda: train(replace(run, cfg=cfg)), fewer)


def halve_rows(cfg, n_rows):
    """Halve cfg.micro_rows, or None, which stands for n_rows; return whether that is possible."""
    rows = min(cfg.micro_rows or n_rows, n_rows)
    if rows > 1:
        cfg.micro_rows = rows // 2
        print(f'out of memory; again with {cfg.micro_rows} rows per forward pass')
    return rows > 1


def row_counts(run):
    """Return the number of packed rows of up to 16 steps of the first epoch."""
    n_steps = min(run.steps, -(-len(run.training) // run.cfg.batch_size))
    steps = run.step_indices(0, n_steps)
    return [run.stage.count_rows(run, steps[i])
            for i in {*np.linspace(0, n_steps - 1, 16).astype(int)}]


def pick_micro_rows(cfg, config, device, row_counts):
    """Return the rows per forward pass that take the least time in the memory that there is.

    row_counts: packed rows of some steps, of all processes; the last pass is filled with padding.
    """
    counts = [-(-n // world_size()) for n in row_counts]
    per_pass = min(MOST_TOKENS, SUM_TOKENS + LAUNCH_WEIGHTS / count_weights(config))

    def cost(rows):
        return sum(-(-n // rows) * (rows * cfg.pack_len + per_pass) for n in counts)
    room = memory_for_activations(cfg, config, device) / row_bytes(cfg, config, device)
    options = range(1, max(1, min(int(room), max(counts))) + 1)
    least = min(map(cost, options))
    return next(rows for rows in options if cost(rows) <= 1.01 * least)


def memory_for_activations(cfg, config, device):
    """Return the bytes that weights, optimizer, gradients and logits leave, before they are there.

    The reference model of reinforcement learning and the cache of its answers are not counted. No
    margin is kept, since a first step that lacks memory is repeated with half as many rows.
    """
    if not device.startswith('cuda'):
        return CPU_BYTES
    torch.cuda.empty_cache()    # what an earlier report left
    free, _ = torch.cuda.mem_get_info(torch.device(device))
    weights = count_weights(config) / world_size()
    head = config.vocab_size * config.embed_size
    size = pick_dtype(cfg.dtype, device).itemsize
    # moments, what completes a bfloat16 weight to float32, and the gradient
    per_weight = 12 if size == 4 else {'exact': 14, 'stochastic': 6, 'compact': 5.2}[
        cfg.master_weights]
    trained = 0 if cfg.lora else weights
    if cfg.base_smoothing and not cfg.lora:
        per_weight += size      # of the base model
    logits = 1.1e9 if cfg.loss_memory is None else cfg.loss_memory * 1e6
    return free - size * (weights + head) - per_weight * trained - 1.5 * logits


def count_weights(config):
    with torch.device('meta'):
        return sum(p.numel() for p in CausalLM(config).parameters())


def row_bytes(cfg, config, device):
    """Return about how many bytes the backward pass needs of a row's forward pass, at most.

    Measured with compiled blocks: 461 kB per token of Gemma 3 270M, 3.9 MB of Llama 3.1 8B.
    """
    D, middle = config.hidden_size, config.intermediate_size
    size = pick_dtype(cfg.dtype, device).itemsize
    q, kv = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    # two norms, or four, of which the later two keep their inputs; attention; MLP; float32 input
    block = size * ((5 if config.family.norm_order == 'both' else 3) * D + 2 * (q + kv)
                    + bool(config.family.qk_norm) * (q + kv) + 2 * middle) + 4 * D
    if cfg.lora:            # the input of each adapter after its dropout, and the mask of that
        block += (size + 1) * (5 * D + q + middle)
    if not cfg.compile:     # products and conversions are stored as well
        block *= 2
    n = config.num_hidden_layers
    per_token = n * 4 * D + block if cfg.checkpoint_activations else n * block
    return 1.1 * per_token * cfg.pack_len
