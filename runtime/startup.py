"""Start and end evaluate.py faster; nothing here changes what it computes."""

import atexit
import contextlib
import ctypes
import gc
import os
import re
import sys
import threading


def load_libraries(device):
    """Import torch, and Triton if it is there, for a run on `device`, the key of that name.

    Two things make this faster on a machine with a GPU, see docs/benchmarks.md: the CUDA context is
    created by a thread meanwhile, and nothing searches the imported objects for garbage.
    """
    if gpu := re.fullmatch(r'auto|cuda(?::(\d+))?', device):
        threading.Thread(target=create_context, args=[int(gpu[1] or 0)], daemon=True).start()
    gc.disable()            # the imports take a quarter less time
    import torch  # noqa: F401
    with contextlib.suppress(ImportError):
        import triton  # noqa: F401
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)    # or else Triton reports leaks
    sys.setswitchinterval(5e-4)     # tokenizing must not delay the launch of kernels by 5 ms


def end_at_once():
    """End this process after the functions of atexit, without torch's own end of half a second.

    Profilers and coverage write their files before, or in a function of atexit.
    """
    def end():
        atexit.unregister(end)
        atexit._run_exitfuncs()     # the others: this one was registered last, so it runs first
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    atexit.register(end)


def create_context(number):
    """Create the CUDA context of a GPU, which torch then finds; takes half a second or more.

    If that fails, torch says why when it is asked for the GPU.
    """
    with contextlib.suppress(OSError, AttributeError, ctypes.ArgumentError):
        cuda, gpu, context = ctypes.CDLL('libcuda.so.1'), ctypes.c_int(), ctypes.c_void_p()
        if not (cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(gpu), number)):     # 0: no error
            cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), gpu)
