"""The progress bar of work that can take long."""

import sys

from tqdm import tqdm

from runtime.parallel import rank


def progress_bar(label, total, unit):
    """Return the tqdm bar of the first process; in a file it has a line every 30 seconds."""
    seconds = 1 if sys.stderr.isatty() else 30
    return tqdm(total=total, desc=label, unit=f' {unit}', mininterval=seconds, delay=seconds - 1,
                disable=rank() > 0)
