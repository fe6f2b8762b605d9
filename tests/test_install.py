"""pyproject.toml and setup.py: what `pip install .` gives to other projects."""

import importlib.metadata
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest
import runtime
from common import HERE


def setuptools_is_new_enough():
    try:
        importlib.metadata.version('pip')
        return int(importlib.metadata.version('setuptools').split('.')[0]) >= 77
    except importlib.metadata.PackageNotFoundError:
        return False


@pytest.fixture(scope='module')
def installed(tmp_path_factory):
    """A function that runs Python in a fresh virtual environment, where only nanocal is installed.

    The dependencies are those of the environment that runs the tests; nothing is downloaded.
    """
    if not setuptools_is_new_enough():
        pytest.skip('needs pip and setuptools 77')
    base = tmp_path_factory.mktemp('install')
    source, environment, elsewhere = (base / x for x in ('source', 'environment', 'elsewhere'))
    # every Python file of these folders, so that a wrong one could be installed
    shutil.copytree(HERE, source, ignore=lambda folder, names: [
        name for name in names
        if not name.endswith(('.py', '.toml', '.in', '.md', 'LICENSE', 'runtime', 'results'))])
    elsewhere.mkdir()
    for name in ('metrics', 'attention'):       # modules of the other project
        (elsewhere / f'{name}.py').write_text('raise RuntimeError("not ours")\n')
    venv.create(environment)
    subprocess.run([sys.executable, '-m', 'pip', 'install', '--quiet', '--no-deps', '--no-index',
                    '--no-build-isolation', '--prefix', environment, source], check=True)
    packages = Path(sysconfig.get_path('purelib', vars={'base': str(environment)}))
    (packages / 'dependencies.pth').write_text(sysconfig.get_path('purelib') + '\n')

    def python(*arguments):
        return subprocess.run([environment / 'bin' / 'python', *arguments], cwd=elsewhere,
                              check=True, text=True, capture_output=True).stdout
    python.packages, python.folder = packages, elsewhere
    return python


@pytest.mark.slow
def test_pip_installs_the_package_and_no_name_beside_it(installed):
    names = {x.name for x in installed.packages.iterdir()} - {'dependencies.pth'}
    assert names == {'nanocal', f'nanocal-{runtime.__version__}.dist-info'}
    files = {x.name for x in (installed.packages / 'nanocal').glob('[!_]*[!_]')}
    assert files == {'fused_ce.py', 'metrics.py', 'scaling.py', 'stats.py', 'model.py',
                     'attention.py', 'triton_ops.py', 'optim.py', 'prediction_files.py', 'py.typed'}


@pytest.mark.slow
def test_the_installed_modules_use_each_other_and_no_file_of_the_clone_or_the_project(installed):
    printed = installed('-c', """
import sys
import nanocal
from nanocal import attention, fused_ce, metrics, model, optim, scaling, stats, triton_ops
print(nanocal.__version__)
print(scaling.fit_temperature([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]], [0, 1, 1]) > 0)
clash = {'metrics', 'scaling', 'stats', 'model', 'attention', 'optim', 'runtime',
         'triton_ops'} & set(sys.modules)
print(clash)
""")
    assert printed.split('\n')[:3] == [runtime.__version__, 'True', 'set()']


def test_the_installed_metrics_read_a_file_of_predictions(installed):
    (installed.folder / 'mine.jsonl').write_text('{"probs": [0.7, 0.3], "answer": 0}\n')
    assert installed('-m', 'nanocal.metrics', 'mine.jsonl').startswith('n        ')


def test_one_version_is_named_everywhere():
    project = tomllib.loads((HERE / 'pyproject.toml').read_text())
    assert project['project']['dynamic'] == ['version']
    version = runtime.__version__
    assert f'\nversion: {version}\n' in (HERE / 'CITATION.cff').read_text()
    newest = re.search(r'^## (\S+)', (HERE / 'CHANGELOG.md').read_text(), re.M).group(1)
    assert newest == version
