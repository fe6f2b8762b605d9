"""pyproject.toml"""

import importlib.metadata
import shutil
import subprocess
import sys

import pytest
from common import HERE

MODULES = 'fused_ce', 'metrics', 'scaling', 'stats'


def setuptools_is_new_enough():
    try:
        importlib.metadata.version('pip')
        return int(importlib.metadata.version('setuptools').split('.')[0]) >= 77
    except importlib.metadata.PackageNotFoundError:
        return False


@pytest.mark.skipif(not setuptools_is_new_enough(), reason='needs pip and setuptools 77')
def test_pip_installs_these_files_and_no_others(tmp_path):
    source, target, elsewhere = (tmp_path / x for x in ('source', 'target', 'elsewhere'))
    # all files at the top, so that one which should not be installed could be
    shutil.copytree(HERE, source, ignore=lambda folder, names: [
        name for name in names if not name.endswith(('.py', '.toml', '.md', 'LICENSE'))])
    elsewhere.mkdir()
    subprocess.run([sys.executable, '-m', 'pip', 'install', '--quiet', '--no-deps', '--no-index',
                    '--no-build-isolation', '--target', target, source], check=True)
    assert sorted(x.name for x in target.iterdir() if x.suffix != '.dist-info'
                  and x.name != '__pycache__') == sorted(f'{name}.py' for name in MODULES)

    def python(*arguments):
        # without this repository in the path
        return subprocess.run([sys.executable, *arguments], cwd=elsewhere, check=True, text=True,
                              capture_output=True, env={'PYTHONPATH': str(target)}).stdout
    printed = python('-c', f'import {", ".join(MODULES)}; print(*(x.__file__ for x in (fused_ce, '
                           f'metrics, scaling, stats)))')
    assert printed.split() == [str(target / f'{name}.py') for name in MODULES]
    (elsewhere / 'mine.jsonl').write_text('{"probs": [0.7, 0.3], "answer": 0}\n')
    assert python('-m', 'metrics', 'mine.jsonl').startswith('n        ')
