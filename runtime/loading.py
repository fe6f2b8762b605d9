"""Load the model of an evaluation: ahead of its first use, or with dropout of its adapters."""

import functools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from model import CausalLM
from runtime import checkpoint, rooms
from runtime.config import run_folder, run_settings
from runtime.errors import ConfigError


def base_of_adapter(folder):
    """Return the base model's folder of the adapters in `folder`/adapter, which need dropout."""
    adapter = rooms.load('adapter')
    settings = adapter.read_adapter(folder)
    if not settings.get('lora_dropout'):
        raise ConfigError(f'dropout_seed: {folder} was trained with lora_dropout = 0, so nothing '
                          f'would be dropped; leave out --dropout_seed')
    run = run_settings(run_folder(Path(folder).resolve()))
    base = checkpoint.fetch(settings['base_model_name_or_path'], run.get('revision'))
    config = checkpoint.read_config(base)
    checkpoint.check_weights(base, config)
    with torch.device('meta'):      # fail on adapters of another model before anything is scored
        adapter.add_adapter(CausalLM(config), folder)
    return base


def load_model(folder, cfg):
    """Return the model in `folder`; with dropout_seed, its base with the adapters beside it."""
    drops = cfg.dropout_seed is not None
    share = None
    if cfg.shard:
        share = functools.partial(rooms.load('sharding').shard, device=cfg.device)
    model = checkpoint.load(base_of_adapter(folder) if drops else folder, cfg.device,
                            getattr(torch, cfg.dtype), share=share)
    if drops:
        rooms.load('adapter').add_adapter(model, folder)
    return model


def load_ahead(folder, cfg):
    """Return a function that returns the model; a thread loads it from now on."""
    if cfg.shard:       # these processes must not exchange messages from two threads
        return functools.cache(functools.partial(load_model, folder, cfg))
    pool = ThreadPoolExecutor(1)
    model = pool.submit(load_model, folder, cfg)
    pool.shutdown(wait=False)       # nothing else will be submitted
    return model.result
