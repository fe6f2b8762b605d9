"""The folder of a trained model: the files that a run writes there."""

import math
from dataclasses import replace
from pathlib import Path

import torch

from runtime import checkpoint, resume, rooms, saving
from runtime.errors import ConfigError, TrainingError

# `cfg` is a TrainConfig, `base` the folder of its model, `run` a train.Run


def model_config(cfg, base):
    """Return the config of the model to train; raise ConfigError if a setting does not fit it."""
    config = checkpoint.read_config(base, cfg.shape)
    layers = config.family.lora_targets
    if cfg.lora and (not cfg.lora_targets or set(cfg.lora_targets) - set(layers)):
        raise ConfigError(f'lora_targets = {cfg.lora_targets}, but the layers of '
                          f'{config.model_type} are {", ".join(layers)}; choose from them')
    if cfg.max_length > config.max_position_embeddings:
        raise ConfigError(f'max_length = {cfg.max_length}, but the context of {cfg.model} is '
                          f'{config.max_position_embeddings} tokens; lower max_length')
    if cfg.logit_softcap is not None:
        if config.final_logit_softcapping is not None:
            raise ConfigError(f'logit_softcap = {cfg.logit_softcap}, but {cfg.model} has a cap of '
                              f'{config.final_logit_softcapping}; leave it out')
        config = replace(config, final_logit_softcapping=cfg.logit_softcap)
    temperature = config.temperature * cfg.logit_temperature
    if not 1e-3 <= temperature <= 1e3:
        raise ConfigError(f'logit_temperature = {cfg.logit_temperature} times the {cfg.model} '
                          f"model's own {config.temperature} is not between 0.001 and 1000")
    return replace(config, temperature=temperature)


def model_files(run):
    cfg, model = run.cfg, checkpoint.build(run.config)
    names = [*saving.model_files(model, cfg.out_dir, getattr(torch, cfg.save_dtype), run.base,
                                     None, run.files)]
    if cfg.lora:
        names += [f'adapter/{name}' for name in rooms.load('adapter').FILES]
    return names


def run_files(run):
    """Return the names in out_dir of what a run writes besides checkpoints and reports."""
    names = model_files(run)
    epochs = range(1, math.ceil(run.cfg.epochs)) if run.cfg.checkpoint_epochs else ()
    return ['train_config.py', 'log.jsonl', 'loss.png', *names,
            *(f'epoch-{epoch}/{name}' for epoch in epochs for name in names)]


def save_weights(run, optimizer, below='.'):
    """Write the weights into out_dir/`below`, with LoRA merged, and the adapters in adapter/."""
    cfg, model = run.cfg, run.model
    folder, common = Path(cfg.out_dir, below), {'full': optimizer.master, 'owner': cfg.out_dir}
    try:
        if cfg.lora and not model.config.reward:    # a score head is no adapter
            rooms.load('adapter').save_adapter(model, folder / 'adapter', cfg.model, **common)
        saving.save(model, folder, getattr(torch, cfg.save_dtype), run.base, more=run.files,
                        **common)
    except (OSError, ConfigError) as error:
        raise TrainingError(f'saving the weights to {folder} failed: {error}; '
                            f'{resume.advice(cfg.out_dir)}') from error
