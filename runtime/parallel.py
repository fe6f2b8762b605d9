"""Several processes, started by torchrun: ranks and gathering.

Only this file and speed/sharding.py, which shards weights, gradients and optimizer states over
the processes, call torch.distributed; the first process gathers them to write files.
"""

import contextlib
import datetime
import os
import signal
import sys

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from runtime import ownership
from runtime.processes import under_torchrun


def rank() -> int:
    """Return this process's number among those that torchrun started; 0 without torchrun."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of processes that torchrun started; 1 without torchrun."""
    return dist.get_world_size() if dist.is_initialized() else 1


def own_gpu() -> int | None:
    """Return the number of this process's GPU, if torchrun started one process per GPU or fewer."""
    # both numbers are the same in all processes of a host, so that all choose the same backend:
    # processes with different backends would wait for each other forever
    if (not under_torchrun()
            or torch.cuda.device_count() < int(os.environ['LOCAL_WORLD_SIZE'])):
        return None
    return int(os.environ['LOCAL_RANK'])


def join_processes():
    """Connect the processes that torchrun started; only the first one prints."""
    backend, gpu = 'gloo', own_gpu()
    if gpu is not None:
        torch.cuda.set_device(gpu)
        backend = 'cpu:gloo,cuda:nccl'
    # the others wait while the first process tokenizes and evaluates, which can take a day
    dist.init_process_group(backend, timeout=datetime.timedelta(days=2))
    if rank() > 0:
        sys.stdout = open(os.devnull, 'w')


@contextlib.contextmanager
def joined():
    """Connect the processes for a `with` block, after which they end together."""
    if not under_torchrun():
        yield
        return
    signal.signal(signal.SIGTERM, signal.SIG_DFL)   # Python's would wait for gloo's calls to end
    try:
        join_processes()
        yield
        if world_size() > 1:
            barrier()
            dist.destroy_process_group()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)     # gloo's threads sometimes abort a process that shuts down normally
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)   # that of the block may raise exceptions
        if dist.is_initialized():
            dist.destroy_process_group()


def barrier():
    """Wait until every process has called this; by gloo, so that no GPU is busy with waiting."""
    gather(None)


@contextlib.contextmanager
def first_process_first():
    """Run the block in the first process, then in the others, which reuse the files it wrote."""
    if rank() > 0:
        barrier()
    yield
    if rank() == 0:
        barrier()


def first_process_locks(folder):
    """Return ownership.lock(folder) in the first process; it holds the lock for the others too."""
    return ownership.lock(folder) if rank() == 0 else contextlib.nullcontext()


def gather(value) -> list:
    """Return [value of process 0, value of process 1, ...]; any Python object."""
    values = [value] * world_size()
    if world_size() > 1:
        dist.all_gather_object(values, value)
    return values


def progress_bar(label, total, unit):
    """Return the tqdm bar of the first process; in a file it has a line every 30 seconds."""
    seconds = 1 if sys.stderr.isatty() else 30
    return tqdm(total=total, desc=label, unit=f' {unit}', mininterval=seconds, delay=seconds - 1,
                disable=rank() > 0)


def sum_over_processes(x: Tensor) -> Tensor:
    """Sum a tensor over the processes, in place."""
    if world_size() > 1:
        dist.all_reduce(x)
    return x


def reshard(model):
    """Free the full weights of a sharded model after forward passes without a backward pass."""
    if hasattr(model, 'reshard'):
        model.reshard()


@contextlib.contextmanager
def evaluating(model, dropout=False):
    """Yield the model in evaluation mode, its adapters with dropout if asked; then restore it."""
    training = model.training
    model.eval()
    for module in model.modules():      # only adapters have dropout
        module.training = dropout and isinstance(module, torch.nn.Dropout)
    try:
        yield model
    finally:
        model.train(training)
        reshard(model)


def gather_full(x: Tensor) -> Tensor:
    """Return the full tensor of one that may be sharded; every process must call this."""
    x = x.detach()
    if hasattr(x, 'full_tensor'):   # a DTensor; importing its class takes a second
        # NCCL cannot send int16
        x = x.int().full_tensor().short() if x.dtype == torch.int16 else x.full_tensor()
    return x


def load_full(target: Tensor, x: Tensor):
    """Copy the full tensor `x` into `target`, or this process's shard; ValueError on a mismatch."""
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
