"""Weights, gradients and optimizer states sharded over several GPUs, by PyTorch's FSDP2."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

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
