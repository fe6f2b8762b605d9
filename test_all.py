"""Runs every test in tests/: `python test_all.py`, with any of pytest's options."""

import sys
from pathlib import Path

import pytest

if __name__ == '__main__':
    tests = str(Path(__file__).parent / 'tests')
    quiet = ['-q', '--durations=10', '-W', 'ignore::pytest.PytestAssertRewriteWarning']
    sys.exit(pytest.main([tests, *quiet, *sys.argv[1:]]))
