"""Select device and dtype, move batches to the device and results back."""

import re
import time

import numpy as np
import torch

from runtime import rooms
from runtime.errors import ConfigError
from runtime.parallel import own_gpu, rank, world_size


def pick_device(device: str) -> str:
    """Return `device`, or for 'auto' the GPU if there is one, else the CPU. Raises ConfigError.

    A GPU becomes the current one, under torchrun that of this process; see speed/install.py.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == 'auto':
        device = 'cuda' if count else 'cpu'
    if device == 'cuda' and own_gpu() is not None:
        device = f'cuda:{own_gpu()}'
    if not re.fullmatch(r'cpu|cuda(:\d+)?', device):
        raise ConfigError(f"device = {device!r}; it must be 'auto', 'cpu', 'cuda' or like 'cuda:0'")
    if device != 'cpu':
        if int(device[5:] or 0) >= count:
            available = f'CUDA devices 0 to {count - 1}' if count else 'no CUDA device'
            raise ConfigError(f'device = {device!r}, but this machine has {available}')
        if device[5:]:
            torch.cuda.set_device(int(device[5:]))
        rooms.load('fast versions').install()
    return device


def pick_dtype(dtype: str, device: str) -> torch.dtype:
    """Return the torch type named `dtype`; for 'auto' bfloat16 on a GPU, float32 elsewhere."""
    if dtype == 'auto':
        return torch.bfloat16 if device.startswith('cuda') else torch.float32
    return getattr(torch, dtype)


def to_device(x, device: str | torch.device) -> torch.Tensor:
    """Return a CPU tensor, an array or a list on `device`; the host does not wait for the copy."""
    x, cuda = torch.as_tensor(x), torch.device(device).type == 'cuda'
    return x.pin_memory().to(device, non_blocking=True) if cuda else x


def micro_batches(packed, n_rows, device):
    """Yield (row indices, model inputs on `device`, targets on the CPU) of `n_rows` rows each.

    packed: a `packing.Packed`. The rows are this process's share, all at once if n_rows is None.
    The inputs are tokens, positions and ends [n_rows, T]; ends is None if no row needs a mask.
    """
    rows = np.arange(rank(), len(packed.tokens), world_size())
    # decided for the whole step: rows with and without `ends` would need two compiled graphs
    one_document = ((packed.owner == packed.owner[:, :1]) | (packed.owner < 0)).all()
    n_rows = n_rows or len(rows)
    for i in range(0, len(rows), n_rows):
        chosen = rows[i:i + n_rows]
        inputs = [to_device(x[chosen], device)
                  for x in (packed.tokens, packed.positions, packed.ends)]
        if one_document:
            inputs[2] = None
        yield chosen, inputs, torch.from_numpy(packed.targets[chosen])


class HostCopy:
    """An asynchronous copy of a tensor to the host, and the time when it was computed."""

    def __init__(self, x):
        self.host = x
        self.event = None
        self.clock = time.perf_counter()
        if x.is_cuda:
            self.host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
            self.host.copy_(x, non_blocking=True)
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record()

    def values(self):
        if self.event:
            self.event.synchronize()
        return self.host.numpy()

    def seconds_after(self, earlier):
        """Return the seconds from `earlier` to this copy, by the device's clock if it has one."""
        if not self.event:
            return self.clock - earlier.clock
        self.event.synchronize()
        return earlier.event.elapsed_time(self.event) / 1000
