"""The model of a training run, with adapters, compiled and sharded, and its optimizer."""

import functools
from dataclasses import replace

import torch
from torch import nn

from model import CausalLM, Norm, add_lora
from runtime import checkpoint, optim, rooms
from runtime.device import pick_dtype
from runtime.errors import ConfigError
from runtime.memory import memory_for_activations, row_bytes
from runtime.parallel import rank, world_size


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


def build_model(cfg, config, base, device, reward=False):
    """Return the model to train, loaded or random; of several processes, each has its share."""
    ready = functools.partial(prepare, cfg=cfg, device=device, reward=reward)
    dtype, several = pick_dtype(cfg.dtype, device), world_size() > 1
    if cfg.from_scratch:
        model = CausalLM(config)
        model.init_weights()
        # FSDP moves one layer after the other to the device
        return ready(model.to('cpu' if several else device, dtype))
    model = checkpoint.load(base, device, dtype, share=ready if several else None)
    model.config.final_logit_softcapping = config.final_logit_softcapping
    model.config.temperature = config.temperature
    return model if several else ready(model)


def prepare(model, cfg, device, reward=False):
    """Return the model with adapters, a score head of zeros (`reward`), compiled and sharded."""
    if reward:
        model.score = nn.Linear(model.config.embed_size, 1, bias=False).to(device, model.head.dtype)
        nn.init.zeros_(model.score.weight)
        if not model.config.tie_word_embeddings:
            del model.lm_head
        model.config.reward = True
    if cfg.lora:
        add_lora(model, cfg.lora_rank, cfg.lora_alpha, cfg.lora_dropout, cfg.lora_targets, device)
        # so the first block has the graph of the others; compiling another one takes 8 s
        model.decoder.embed_tokens.register_forward_hook(
            lambda module, inputs, x: x.requires_grad_(torch.is_grad_enabled()))
    if cfg.fp8:
        rooms.load('fp8').use_fp8(model, device)
    if cfg.attention != 'auto':
        model.decoder.attention = cfg.attention
    model.decoder.checkpoint = cfg.checkpoint_activations
    # Triton 3.6 cannot compile some float32 blocks; FlexAttention is compiled either way
    if cfg.compile and device.startswith('cuda') and model.head.dtype == torch.bfloat16:
        # of models of several shapes, blocks beyond the limit of 8 would run uncompiled
        torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
        for layer in model.decoder.layers:      # for static shapes; equal masks share one graph
            layer.compile(dynamic=False)
        if world_size() == 1 and not cfg.checkpoint_activations:
            # the recordings of two shapes keep their memory, and other passes need as much again
            needed = 3 * (cfg.micro_rows or 1) * row_bytes(cfg, model.config, device)
            if needed <= memory_for_activations(cfg, model.config, device):
                rooms.load('recorded passes').record_blocks(model.decoder)
    if world_size() > 1:
        rooms.load('sharding').shard(model, device)
        torch.manual_seed(cfg.seed + rank())    # the dropout of adapters differs between processes
    return model.train()


def build_optimizer(model, cfg):
    """Return AdamW over the weights that are trained; `weight_decay` is on matrices only."""
    # Cohere's norms of q and k have two axes
    norms = {p for part in model.modules() if isinstance(part, Norm) for p in part.parameters()}
    matrices, others = [], []
    for p in filter(lambda p: p.requires_grad, model.parameters()):
        (matrices if p.ndim >= 2 and p not in norms else others).append(p)
    groups = [{'params': matrices, 'weight_decay': cfg.weight_decay},
              {'params': others, 'weight_decay': 0.0}]
    options = {'betas': cfg.betas, 'eps': cfg.eps, 'seed': cfg.seed, 'rank': rank()}
    rooms.load('fused AdamW').install()
    make = (rooms.load('compact').CompactAdamW if cfg.master_weights == 'compact' else
            functools.partial(optim.AdamW, kind=cfg.master_weights))
    return make([group for group in groups if group['params']], cfg.lr, **options)
