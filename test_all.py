"""Run the tests, one process per core.

    python test_all.py              # all of them
    python test_all.py --fast       # without those marked slow
    python test_all.py -n0 -k ece   # any of pytest's options and paths; -n0: in this process
"""

import os
import sys
from pathlib import Path

import pytest

if __name__ == '__main__':
    # else each process compiles the tests anew, which takes seconds
    os.environ.pop('PYTHONDONTWRITEBYTECODE', None)
    arguments = sys.argv[1:]
    if '--fast' in arguments:
        arguments[arguments.index('--fast')] = '-mnot slow'
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()
    if not any(Path(argument.split('::')[0]).exists() for argument in arguments):
        arguments.append(str(Path(__file__).parent / 'tests'))
    sys.exit(pytest.main(['-q', '--durations=10', f'-n{cores}', '--dist=worksteal',
                          '-W', 'ignore::pytest.PytestAssertRewriteWarning', *arguments]))
