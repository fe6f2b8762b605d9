"""Load weights and kernels while evaluate.py tokenizes; nothing here changes what it computes."""

import functools
import importlib
from concurrent.futures import wait
from dataclasses import replace

import numpy as np
import torch

from model import CausalLM
from runtime import adapter, checkpoint, device, parallel


def loads_kernels(cfg):
    """Return whether the forward pass uses the Triton kernels of triton_ops.py."""
    return cfg.device.startswith('cuda') and cfg.dtype == 'bfloat16'


def load_kernels(pool, config, cfg, forward):
    """Return [future] of a thread of `pool` that loads the kernels of a GPU; [] if none are used.

    config: of the model; the other arguments are those of `warm_up`
    """
    return [pool.submit(warm_up, config, cfg, forward)] if loads_kernels(cfg) else []


def load_ahead(pool, folder, base, cfg, n_items, kernels):
    """Return a function that returns the model, whose weights a thread of `pool` reads from now on.

    After that it imports matplotlib, for which scoring does not wait.
    n_items: of those to score; with 0 the model is read when it is asked for
    kernels: of `load_kernels`, for which the function waits
    """
    if not n_items:
        return functools.partial(load_model, folder, base, cfg)
    # processes that share the weights must not exchange messages from two threads
    weights = None if cfg.shard else pool.submit(load_model, folder, base, cfg)
    if cfg.pictures:
        pool.submit(importlib.import_module, 'matplotlib.figure')

    @functools.cache
    def load():
        wait(kernels)
        kernels.clear()     # the error of one that failed would keep its tensors on the GPU
        return weights.result() if weights else load_model(folder, base, cfg)

    return load


def load_model(folder, base, cfg):
    """Return the model in the folder `base`; with dropout_seed, with the adapters in `folder`."""
    share = functools.partial(parallel.shard, device=cfg.device) if cfg.shard else None
    model = checkpoint.load(base, cfg.device, getattr(torch, cfg.dtype), share=share)
    if cfg.dropout_seed is not None:
        adapter.add_adapter(model, folder)
    return model


def warm_up(config, cfg, forward):
    """Load every kernel of a forward pass, which takes seconds, by running a model of one layer.

    forward: (model, arrays of `Row.padded`, scored tokens) -> values, of one scored token
    """
    device.pick_device(cfg.device)      # the current GPU of a new thread is the first one
    # Triton makes other code for sizes that are multiples of 16
    config = replace(config, num_hidden_layers=1, layers=config.layers[:1],
                     vocab_size=4096 + config.vocab_size % 16)
    with torch.device('meta'):
        model = CausalLM(config)
    # Any values will do; drawing them would take float32 memory. model.to_empty imports sympy.
    for key, parameter in [*model.named_parameters()]:
        parent, _, name = key.rpartition('.')
        values = torch.empty(parameter.shape, dtype=torch.bfloat16, device=cfg.device)
        setattr(model.get_submodule(parent), name, torch.nn.Parameter(values))
    at = np.arange(cfg.pack_len)[None]
    with torch.no_grad():
        positions = at % config.max_position_embeddings     # OPT has embeddings for no more
        forward(model, np.stack([0 * at, positions, at + 1]), [(0, 0, 0, 0)])
