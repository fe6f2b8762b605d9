"""Load weights and kernels while evaluate.py tokenizes; nothing here changes what it computes."""

import functools
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace

import numpy as np
import torch

from families import t5
from model import CausalLM
from runtime import adapter, checkpoint, device, parallel
from runtime.trained import base_of_adapter


def loads_kernels(cfg):
    """Return whether the forward pass uses the Triton kernels of triton_ops.py."""
    return cfg.device.startswith('cuda') and cfg.dtype == 'bfloat16'


def load_ahead(folder, config, cfg, forward):
    """Return a function that returns the model; a thread loads it from now on.

    Where kernels are used, another thread loads them. The function waits for both.
    config: of the model in `folder`; forward: as in `warm_up`
    """
    pool = ThreadPoolExecutor(2)
    with_kernels = loads_kernels(cfg) and config.model_type not in t5.ARCHITECTURES
    kernels = [pool.submit(warm_up, config, cfg, forward)] if with_kernels else []
    # processes that share the weights must not exchange messages from two threads
    weights = None if cfg.shard else pool.submit(load_model, folder, cfg)
    pool.shutdown(wait=False)       # nothing else will be submitted

    @functools.cache
    def load():
        wait(kernels)
        kernels.clear()     # the error of one that failed would keep its tensors on the GPU
        return weights.result() if weights else load_model(folder, cfg)

    return load


def load_model(folder, cfg):
    """Return the model in `folder`; with dropout_seed, its base with the adapters beside it."""
    drops = cfg.dropout_seed is not None
    share = functools.partial(parallel.shard, device=cfg.device) if cfg.shard else None
    model = checkpoint.load(base_of_adapter(folder) if drops else folder, cfg.device,
                            getattr(torch, cfg.dtype), share=share)
    if drops:
        adapter.add_adapter(model, folder)
    return model


def warm_up(config, cfg, forward):
    """Load every kernel of a forward pass, which takes seconds, by running a model of two layers.

    The MLP of the last layer computes the scored tokens alone, so one layer would not be enough.
    forward: (model, arrays of `Row.padded`, scored tokens) -> values; called with two scored
        tokens, since Triton makes other code for a size of 1
    """
    device.pick_device(cfg.device)      # the current GPU of a new thread is the first one
    # Triton makes other code for sizes that are multiples of 16
    layers = config.layers[:2]
    config = replace(config, num_hidden_layers=len(layers), layers=layers,
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
        forward(model, np.stack([0 * at, positions, at + 1]), [(0, 0, 0, 0), (0, 0, 1, 0)])
