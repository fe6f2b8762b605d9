"""The versions of the software that made a result."""

import contextlib
import platform
import subprocess
from pathlib import Path

import numpy as np
import torch

from runtime.version import __version__


def versions(device: str) -> dict[str, str]:
    """Return the versions of the software, ours with the commit, and the name of `device`."""
    commit = ''
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        commit = subprocess.run(['git', 'describe', '--always', '--dirty'], capture_output=True,
                                cwd=Path(__file__).parent, text=True, errors='replace',
                                check=True, timeout=10).stdout.strip()
    name = torch.cuda.get_device_name(device) if device.startswith('cuda') else platform.processor()
    return {'nanocal': f'{__version__}+{commit}' if commit else __version__,
            'python': platform.python_version(), 'torch': torch.__version__,
            'numpy': np.__version__, 'device': name}
