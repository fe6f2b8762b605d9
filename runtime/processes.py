"""A function of many items, computed by forked processes."""

import contextlib
import multiprocessing
import os
import signal
import sys


_workers = None     # the connection to the process of `start_workers`


def parallel_map(function, items, worth_it, most=32):
    """Return [function(x) for x in items], on Linux by a process per core.

    Without `start_workers`, `most` processes are forked at most, and only if that is worth it.
    """
    cores = min(_cores(), 32)
    if _workers and items and most:
        # if it has ended, or the function has failed, the lines below raise the error
        with contextlib.suppress(EOFError, OSError):
            _workers.send((function, items, min(cores, len(items))))
            return _workers.recv()
    if cores == 1 or not worth_it:
        return [function(item) for item in items]
    with forked_pool(min(cores, most)) as pool:
        return pool.map(function, items, chunksize=1)


def start_workers():
    """Fork a process that will fork the workers of `parallel_map`; it ends when this one does.

    The time of a fork depends on the memory: 1 ms before torch is imported, 25 ms on a GPU.
    """
    global _workers
    if _cores() == 1:
        return
    try:
        _workers, theirs = multiprocessing.Pipe()
        child = os.fork()
    except OSError:     # too many files or processes
        _workers = None
        return
    if child:
        theirs.close()
        return
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)    # Ctrl-C ends the workers
        _workers.close()
        while True:
            function, items, processes = theirs.recv()
            with forked_pool(processes) as pool:
                results = pool.map_async(function, items, chunksize=1)
                while not results.ready():
                    results.wait(0.1)
                    if theirs.poll():       # the other process has ended
                        theirs.recv()       # raises EOFError
                theirs.send(results.get())
    finally:        # the message of whatever ends this process comes from its parent
        os._exit(0)


@contextlib.contextmanager
def forked_pool(processes):
    """A multiprocessing.Pool of forked processes, which inherit everything that is in memory.

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
