"""Several processes on one machine, started by torchrun: ranks, FSDP2, gathering.

This is the only file that asks for a rank. Weights, gradients and optimizer states are spread over
the processes by PyTorch's FSDP2; files are written by the first process, which gathers them.
"""

import contextlib
import datetime
import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh


def rank() -> int:
    """Return this process's number among those that torchrun started; 0 without torchrun."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of processes that torchrun started; 1 without torchrun."""
    return dist.get_world_size() if dist.is_initialized() else 1


def join_processes():
    """Under torchrun, connect the processes: NCCL with a GPU each, else gloo; the first prints."""
    if 'TORCHELASTIC_RUN_ID' not in os.environ:
        return
    backend = 'gloo'    # the same for all: else they would wait for each other forever
    if torch.cuda.device_count() >= int(os.environ['LOCAL_WORLD_SIZE']):
        torch.cuda.set_device(int(os.environ['LOCAL_RANK']))
        backend = 'cpu:gloo,cuda:nccl'
    # the others wait while the first process tokenizes and evaluates, which can take a day
    dist.init_process_group(backend, timeout=datetime.timedelta(days=2))
    if rank() > 0:
        sys.stdout = open(os.devnull, 'w')


def leave_processes():
    """End a process that join_processes connected, once all of them are done."""
    if world_size() > 1:
        barrier()
        dist.destroy_process_group()
        # in the interpreter's own shutdown the threads of gloo now and then abort the process
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def abort_processes():
    """Disconnect after an error in this process."""
    if dist.is_initialized():
        dist.destroy_process_group()


def barrier():
    """Wait until all processes are here."""
    if world_size() > 1:
        dist.barrier()


@contextlib.contextmanager
def first_process_first():
    """Run the block in the first process, then in the others, which find the files it made."""
    if rank() > 0:
        barrier()
    yield
    if rank() == 0:
        barrier()


def gather(value) -> list:
    """Return [value of process 0, value of process 1, ...]; any Python object."""
    values = [value] * world_size()
    if world_size() > 1:
        dist.all_gather_object(values, value)
    return values


def sum_over_processes(x: Tensor) -> Tensor:
    """Add up a tensor over the processes, in place."""
    if world_size() > 1:
        dist.all_reduce(x)
    return x


def shard(model):
    """Spread weights, gradients and optimizer states over the processes, in place."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    options = {'mesh': init_device_mesh(model.head.device.type, (world_size(),)),
               'mp_policy': MixedPrecisionPolicy(reduce_dtype=torch.float32)}
    for layer in model.decoder.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)


def whole(x: Tensor) -> Tensor:
    """Return a tensor with the parts of all processes; every process takes part."""
    x = x.detach()
    if hasattr(x, 'full_tensor'):   # a DTensor; importing its class takes a second
        # NCCL cannot send int16
        x = x.int().full_tensor().short() if x.dtype == torch.int16 else x.full_tensor()
    return x


def fill(target: Tensor, x: Tensor):
    """Copy `x` into `target`, or this process's part of it; ValueError if they do not match."""
    target = target.detach()
    if target.shape != x.shape or target.dtype != x.dtype:
        raise ValueError(f'a tensor is {x.dtype} {list(x.shape)}, not {target.dtype} '
                         f'{list(target.shape)}')
    if hasattr(target, 'full_tensor'):
        from torch.distributed.tensor import distribute_tensor
        x = distribute_tensor(x.to(target.device), target.device_mesh, target.placements,
                              src_data_rank=None).to_local()
        target = target.to_local()
    target.copy_(x)
