"""Parallel map over forked processes."""

import contextlib
import multiprocessing
import os
import signal
import sys
import traceback
from collections import deque
from itertools import islice

from runtime.errors import ProcessError


def parallel_map(function, items, worth_it, most=32):
    """Return [function(x) for x in items]; `worth_it`: by up to `most` forked processes."""
    processes = min(cores(), most, len(items)) if worth_it else 1
    with forked_pool(processes, lambda i: function(items[i])) as imap:
        return list(imap(range(len(items))))    # the items are inherited, so indices are enough


@contextlib.contextmanager
def forked_pool(processes, function):
    """Yield `imap(items, chunksize=1)`, which yields function(x) for each item, in order.

    The forked processes inherit `function`; items and results are pickled. Each has a pipe of its
    own: multiprocessing.Pool would wait forever if one is killed. 0 or 1 `processes`: none.
    """
    if processes <= 1:
        yield lambda items, chunksize=1: map(function, items)
        return
    context, workers = multiprocessing.get_context('fork'), {}      # pipe -> process
    try:
        # a signal right after the fork waits until the worker has replaced its parent's handlers
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
        try:
            for _ in range(processes):
                pipe, end = context.Pipe()
                with end:       # so that the pipe is closed when this worker ends
                    process = context.Process(
                        target=_work, args=(function, end, [*workers, pipe]), daemon=True)
                    process.start()
                workers[pipe] = process
        except OSError as error:
            raise ProcessError(f'cannot start {processes} processes: {error}; --workers=1, where '
                               f'there is this key, starts none') from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        yield lambda items, chunksize=1: _imap(workers, iter(items), chunksize)
    finally:
        for process in workers.values():
            process.terminate()
        for pipe, process in workers.items():
            process.join()
            pipe.close()


def _imap(workers, items, chunksize):
    chunks, busy = iter(lambda: [*islice(items, chunksize)], []), deque()

    def send_next(pipe):
        if chunk := next(chunks, None):
            with contextlib.suppress(ConnectionError):      # of an ended process, see `recv` below
                pipe.send(chunk)
            busy.append(pipe)

    for pipe in workers:
        send_next(pipe)
    while busy:
        pipe = busy.popleft()
        try:
            results, error = pipe.recv()
        except (EOFError, ConnectionError):
            process = workers[pipe]
            process.join()
            reason = ('it was killed, perhaps since the memory is too small for so many'
                      if process.exitcode < 0 else 'see above')
            raise ProcessError(f'a worker process ended with exit code {process.exitcode}: '
                               f'{reason}') from None
        send_next(pipe)
        yield from results
        if error:
            raise error


def _work(function, pipe, others):
    """Compute chunks of items from `pipe` until the parent ends or closes it."""
    for other in others:    # the parent's ends
        other.close()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)    # the parent ends its workers
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            chunk = pipe.recv()
            results = []
            error = None
            try:
                for item in chunk:
                    results.append(function(item))
                sys.stdout.flush()      # what was printed, since a signal will end this process
            except Exception as raised:
                error = raised
                error.add_note(traceback.format_exc())      # only its text can be pickled
            pipe.send((results, error))


def under_torchrun():
    """Return whether torchrun started this process: all that it sets is there."""
    return os.environ.keys() >= {'TORCHELASTIC_RUN_ID', 'RANK', 'WORLD_SIZE', 'LOCAL_RANK',
                                 'LOCAL_WORLD_SIZE'}


def cores():
    """Return the number of cores of this process, 1 where forking is unsafe."""
    return len(os.sched_getaffinity(0)) if sys.platform == 'linux' else 1
