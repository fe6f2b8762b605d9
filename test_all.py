"""Run the tests in tests/, one process per core.

    python test_all.py              # all of them
    python test_all.py --fast       # without those marked slow
    python test_all.py -n0 -k ece   # any of pytest's options; -n0: in this process
"""

import os
import sys
from pathlib import Path

import pytest

if __name__ == '__main__':
    arguments = sys.argv[1:]
    fast = '--fast' in arguments
    if fast:
        arguments.remove('--fast')
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()
    sys.exit(pytest.main([
        str(Path(__file__).parent / 'tests'), '-q', '--durations=10', f'-n{cores}',
        '-W', 'ignore::pytest.PytestAssertRewriteWarning', *(['-m', 'not slow'] if fast else []),
        *arguments]))
