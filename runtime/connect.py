"""Connect the processes that torchrun started."""

import contextlib
import datetime
import os
import signal
import sys

import torch
import torch.distributed as dist

from runtime.parallel import barrier, own_gpu, rank, world_size


def join_processes():
    """Connect the processes; only the first one prints."""
    backend, gpu = 'gloo', own_gpu()
    if gpu is not None:
        torch.cuda.set_device(gpu)
        backend = 'cpu:gloo,cuda:nccl'
    # the others wait while the first process tokenizes and evaluates, which can take a day
    dist.init_process_group(backend, timeout=datetime.timedelta(days=2))
    if rank() > 0:
        sys.stdout = open(os.devnull, 'w')


@contextlib.contextmanager
def connected():
    """Connect the processes for a `with` block, after which they end together."""
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
