"""Start and end a script faster; nothing here changes what it computes.

Other modules are imported by the functions: until `begin`, Ctrl-C would print a traceback.
"""

import gc
import sys

from runtime import cli


def begin():
    """Prepare the script as `cli.begin` does, and its imports: call this before them.

    The imports make a million objects that stay. With Python's default threshold of 700 or 2,000
    new objects, searching these for garbage again and again takes 0.7 s on a machine with a GPU.
    """
    gc.set_threshold(100_000)
    cli.begin()


def load_libraries(device):
    """Import torch for a run on the setting `device`; meanwhile, a thread prepares the GPU."""
    import os
    import re
    import threading
    cli.begin()     # Ctrl-C in the middle of this import ends the process, see `cli`
    if gpu := re.fullmatch(r'auto|cuda(?::(\d+))?', device):
        number = int(gpu[1] or os.environ.get('LOCAL_RANK', 0))     # torchrun sets it
        threading.Thread(target=prepare_gpu, args=[number], daemon=True).start()
    import torch  # noqa: F401
    sys.setswitchinterval(5e-4)     # tokenizing must not delay the launch of kernels by 5 ms


def end_at_once():
    """End this process after the functions of atexit, without torch's own end of half a second.

    Profilers and coverage write their files before, or in a function of atexit. One of those
    functions waits up to 7 s for torch's compiling processes, if they have just been started.
    """
    import atexit
    import os

    def end():
        atexit.unregister(end)
        for pool in getattr(sys.modules.get('torch._inductor.async_compile'), '_pool_set', ()):
            if hasattr(pool, 'process'):    # it is told to end, and need not be awaited
                pool.process.wait = lambda *_: 0
        atexit._run_exitfuncs()     # the others: this one was registered last, so it runs first
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    atexit.register(end)


def prepare_gpu(number):
    """Create the CUDA context of a GPU, half a second, and compute the hash of Triton's own files,
    1.3 s, by which it finds compiled kernels on disk. Without a GPU, torch says so later."""
    import contextlib
    import ctypes
    with contextlib.suppress(OSError, AttributeError, ctypes.ArgumentError, ImportError):
        cuda, gpu, context = ctypes.CDLL('libcuda.so.1'), ctypes.c_int(), ctypes.c_void_p()
        if not (cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(gpu), number)):     # 0: no error
            cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), gpu)
            from triton.runtime.cache import triton_key
            triton_key()
