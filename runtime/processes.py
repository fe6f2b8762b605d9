"""Parallel map over forked processes, and the number of torch's threads."""

import contextlib
import multiprocessing
import os
import signal
import sys
import time


_work = None, ()    # (function, items) of the running `parallel_map`


def parallel_map(function, items, worth_it, most=32):
    """Return [function(x) for x in items], computed by up to `most` forked processes on Linux.

    A fork takes about 25 ms on a machine with a GPU; `worth_it` says whether the work takes longer.
    """
    global _work
    cores = min(_cores(), most, len(items))
    if cores <= 1 or not worth_it:
        return [function(item) for item in items]
    _work = function, items     # a fork inherits both, so only its results are copied
    try:
        with forked_pool(cores) as pool:
            return pool.map(_compute, range(len(items)), chunksize=1)
    finally:
        _work = None, ()


def _compute(i):
    function, items = _work
    return function(items[i])


@contextlib.contextmanager
def forked_pool(processes):
    """Yield a multiprocessing.Pool of forked processes, which inherit everything in memory.

    A worker does not run the signal handlers of its parent: Pool ends its workers by SIGTERM, and a
    worker that is about to wait for a task would never get to run a handler written in Python.
    Ctrl-C is left to the parent, which ends them.
    """
    # a signal right after the fork waits until the worker has replaced those handlers
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    try:
        pool = multiprocessing.get_context('fork').Pool(processes, _begin_worker)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    with pool:
        yield pool
        pool.close()
        pool.join()


def _begin_worker():
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})


def _cores():
    return len(os.sched_getaffinity(0)) if sys.platform == 'linux' else 1       # forking is unsafe


def pick_threads(seconds=1.0):
    """Set torch's number of threads to the fastest of 1, 2, 4, ..., its default; return it.

    While other processes are busy, one thread can be several times as fast as one per core. The
    test multiplies matrices of a small network for `seconds`, in turn with each number of threads.
    """
    import torch
    default = torch.get_num_threads()
    counts = sorted({default, *(2 ** i for i in range(default.bit_length()))})
    x, weight = torch.rand(2048, 128), torch.rand(128, 512)
    finished, ends = dict.fromkeys(counts, 0.0), time.perf_counter() + seconds
    while time.perf_counter() < ends:
        for n in counts:
            torch.set_num_threads(n)
            begins = time.perf_counter()
            for _ in range(4):
                (torch.nn.functional.silu(x @ weight) @ weight.T).softmax(-1)
            finished[n] += time.perf_counter() - begins
    fastest = min(finished, key=finished.get)
    torch.set_num_threads(fastest)
    return fastest
