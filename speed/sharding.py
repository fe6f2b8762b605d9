"""Weights, gradients and optimizer states sharded over several GPUs, by PyTorch's FSDP2."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from runtime.errors import ConfigError
from runtime.parallel import world_size


def shard(model, device):
    """Shard weights, gradients and optimizer states over the processes, in place; return the model.

    A forward pass gathers the weights of one layer at a time, so every process must take the same
    number of them. device: that of the weights, which may still be on the meta device
    """
    options = {'mesh': init_device_mesh(torch.device(device).type, (world_size(),)),
               'mp_policy': MixedPrecisionPolicy(reduce_dtype=torch.float32)}
    for layer in model.decoder.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def check_evaluation(tasks, cfg, t5):
    """Raise ConfigError for an evaluation in which processes cannot share the weights.

    t5: the configuration of a T5, or None
    """
    written = [label for label, task in tasks.items() if task.is_written]
    if world_size() == 1:
        why = 'there is one process; start several with torchrun --nproc_per_node=8 evaluate.py ...'
    elif written:
        why = f'the model writes the answers to {written[0]}, which needs all weights on each GPU'
    elif cfg.dropout_seed is not None:
        why = 'dropout_seed adds adapters, which needs all weights on each GPU'
    elif t5:
        why = f'{t5.model_type} is not sharded'
    else:
        return
    raise ConfigError(f'shard = True: {why}')
