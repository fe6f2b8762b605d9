"""Parallel map over forked processes, and the number of torch's threads."""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice

from runtime.errors import ProcessError


def parallel_map(function, items, worth_it, most=32):
    """Return [function(x) for x in items], computed by up to `most` forked processes on Linux.

    A fork takes about 25 ms on a machine with a GPU; `worth_it` says whether the work takes longer.
    The first item with an error raises it.
    """
    processes = min(cores(), most, len(items))
    if processes <= 1 or not worth_it:
        return [function(item) for item in items]
    with forked_pool(processes, lambda i: function(items[i])) as imap:
        return list(imap(range(len(items))))    # the items are inherited, so indices are enough


@contextlib.contextmanager
def forked_pool(processes, function):
    """Yield `imap(items, chunksize=1)`, which yields function(x) for each item, in order.

    The forked processes inherit `function` and all that it needs; items and results are pickled.
    ProcessError if a process is killed.
    """
    others = set(multiprocessing.active_children())
    # a signal right after the fork waits until the worker has replaced the handlers of its parent
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    try:
        pool = ProcessPoolExecutor(processes, multiprocessing.get_context('fork'), _begin_worker,
                                   (function,))
        pool.submit(int)    # forks all processes
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def imap(items, chunksize=1):
        items, ahead = iter(items), deque()
        try:
            while chunk := [*islice(items, chunksize)]:
                ahead.append(pool.submit(_compute, chunk))
                if len(ahead) > 8 * processes:
                    yield from ahead.popleft().result()
            while ahead:
                yield from ahead.popleft().result()
        except BrokenProcessPool:
            raise ProcessError(f'one of {processes} processes on this machine was killed; the '
                               f'memory may be too small for so many') from None
    try:
        yield imap
    except BaseException:
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _begin_worker(function):
    global _function
    _function = function
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)    # the parent ends its workers
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent():
    multiprocessing.parent_process().join()
    os._exit(1)


def _compute(chunk):
    return [_function(item) for item in chunk]


def cores():
    """Return the number of cores for this process, 1 where forking is unsafe."""
    if sys.platform != 'linux':
        return 1
    return len(os.sched_getaffinity(0)) // int(os.environ.get('LOCAL_WORLD_SIZE', 1))


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
