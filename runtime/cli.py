"""How every script begins and ends: standard streams, Ctrl-C, and errors as one line."""

import contextlib
import io
import os
import re
import signal
import sys
import time

from runtime.errors import (CheckpointError, ConfigError, DataError, ProcessError, Stopped,
                            TrainingError, escape_controls, out_of_memory, shorten)
from runtime.processes import under_torchrun


def begin():
    """Prepare streams, threads and signals; a script calls this before its other imports."""
    for number, name in enumerate(('stdin', 'stdout', 'stderr')):
        if getattr(sys, name) is None:      # closed: the next file would get its number and output
            os.open(os.devnull, os.O_RDWR)      # takes the lowest free number, which is this one
            setattr(sys, name, open(number, 'w' if number else 'r', closefd=False))
    # of OpenMP: while other programs run, threads that wait for each other must not hold the cores
    os.environ.setdefault('GOMP_SPINCOUNT', '5000')
    sys.setswitchinterval(5e-4)     # a thread that tokenizes must not delay kernels by 5 ms
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop_at_once)


def _stop_at_once(number, _):
    """End the process: an exception inside the import of a C++ library would crash."""
    if _rank()[0] == 0:
        os.write(2, f'{_stopped(number)}\n'.encode())
    os._exit(128 + number)


def stop(number, _):
    """A handler of signals: end the block of `one_line_errors` as Ctrl-C does."""
    raise KeyboardInterrupt(number)


def _stopped(number):
    return 'stopped' if number == signal.SIGINT else f'stopped by {signal.Signals(number).name}'


@contextlib.contextmanager
def one_line_errors(resume='', memory=''):
    """Run the block of a `with`; if it fails, end the script with one line and an exit status.

    resume: how to continue after an interruption; memory: which settings need less memory
    """
    for stream in (sys.stdout, sys.stderr):     # no UnicodeEncodeError where the locale is ASCII
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors='backslashreplace')
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:         # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(128 + signal.SIGPIPE)
    except OSError as error:
        reason = str(error).removeprefix(f'[Errno {error.errno}] ')
        if not error.filename:      # such as standard output, which would fail again at the end
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        _fail(reason)
    except (ConfigError, DataError, CheckpointError, TrainingError) as error:
        _fail(error)
    except ProcessError as error:
        _fail(error, resume)
    except ModuleNotFoundError as error:
        _fail(f'{error}; pip install -r requirements.txt')
    except (MemoryError, RuntimeError) as error:
        if is_lost_connection(error):
            _sleep_until_torchrun_ends_this(10)     # which names the other one
            _fail('another process has ended; its message, or that of torchrun, says why', resume)
        if not (lacking := out_of_memory(error)):
            raise
        reason = str(lacking).strip().split('\n')[0] or 'the system gives this process no more'
        _fail(f'out of memory: {reason}', memory)
    except Stopped as stopped:
        print('; '.join(filter(None, (str(stopped), resume))))
        sys.exit(128 + stopped.signal)
    except KeyboardInterrupt as interrupt:
        number = interrupt.args[0] if interrupt.args else signal.SIGINT
        if _rank()[0] == 0:
            print('; '.join(filter(None, (_stopped(number), resume))), file=sys.stderr)
        sys.exit(128 + number)
    finally:
        signal.signal(signal.SIGINT, before)


def _fail(*parts):
    """End the script with a message; if all processes fail, torchrun ends others in their sleep."""
    rank, size = _rank()
    if rank > 0:
        _sleep_until_torchrun_ends_this(3)
    message = escape_controls('; '.join(shorten(str(part), 2000) for part in parts if part))
    sys.exit(f'error{f" in process {rank} of {size}" * (size > 1)}: {message}')


def _sleep_until_torchrun_ends_this(seconds):
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)       # an exception here would print a traceback
    time.sleep(seconds)


def _rank():
    """Return (number of this process, number of processes) as torchrun says, without torch."""
    if not under_torchrun():
        return 0, 1
    return int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])


def is_lost_connection(error):
    """Return whether an error of a process of torchrun says that another one has ended."""
    return _rank()[1] > 1 and (type(error).__module__.startswith('torch.distributed')
                               or type(error).__name__.startswith('Dist')
                               or re.search('gloo|nccl|connection (closed|reset|refused)',
                                            str(error), re.IGNORECASE) is not None)
