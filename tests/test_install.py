"""pyproject.toml: what `pip install .` gives to other projects."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest
from common import HERE
from runtime.version import __version__

MODULES = {'fused_ce', 'metrics', 'catalog', 'scaling', 'stats', 'significance', 'model',
           'attention', 'optim', 'lm_eval_metrics'}
FOLDERS = 'bridges', 'compare', 'results', 'runtime', 'written'     # what the command imports
# what the command must not need
OTHERS = 'torch', 'triton', 'matplotlib', 'pyarrow', 'tqdm', 'huggingface_hub', 'safetensors'


@pytest.fixture(scope='module')
def installed(tmp_path_factory):
    """A function that runs Python in a fresh virtual environment, where only nanocal is installed.

    The dependencies are those of the environment that runs the tests; nothing is downloaded.
    """
    if not (importlib.util.find_spec('pip') and importlib.util.find_spec('hatchling')):
        pytest.skip('needs pip and hatchling')
    base = tmp_path_factory.mktemp('install')
    source, environment, elsewhere = (base / x for x in ('source', 'environment', 'elsewhere'))
    # every Python file of these folders, so that a wrong one could be installed
    shutil.copytree(HERE, source, ignore=lambda folder, names: [
        name for name in names
        if not name.endswith(('.py', '.toml', '.md', '.html', 'py.typed', 'LICENSE', *FOLDERS))])
    elsewhere.mkdir()
    for name in ('metrics', 'attention'):       # modules of the other project
        (elsewhere / f'{name}.py').write_text('raise RuntimeError("not ours")\n')
    subprocess.run([sys.executable, '-m', 'hatchling', 'build', '-t', 'sdist', '-d', base],
                   cwd=source, check=True)
    (source,) = base.glob('*.tar.gz')
    venv.create(environment)
    subprocess.run([sys.executable, '-m', 'pip', 'install', '--quiet', '--no-deps', '--no-index',
                    '--no-build-isolation', '--prefix', environment, source], check=True)
    packages = Path(sysconfig.get_path('purelib', vars={'base': str(environment)}))
    (packages / 'dependencies.pth').write_text(sysconfig.get_path('purelib') + '\n')

    def python(*arguments):
        return subprocess.run([environment / 'bin' / 'python', *arguments], cwd=elsewhere,
                              check=True, text=True, capture_output=True).stdout
    python.packages, python.folder, python.bin = packages, elsewhere, environment / 'bin'
    return python


def test_pip_installs_the_package_and_no_name_beside_it(installed):
    names = {x.name for x in installed.packages.iterdir()} - {'dependencies.pth'}
    assert names == {'nanocal', f'nanocal-{__version__}.dist-info'}
    files = {x.name for x in (installed.packages / 'nanocal').glob('[!_]*[!_]')}
    assert files == {'py.typed', *FOLDERS, *(f'{module}.py' for module in MODULES)}


def test_the_command_needs_numpy_alone(installed):
    (installed.folder / 'a.csv').write_text('id,confidence,correct\n' + ''.join(
        f'{i},{("60 %,0", "0.9,True")[i % 2]}\n' for i in range(18)))
    (installed.folder / 'b.jsonl').write_text(''.join(
        f'{{"id": {i}, "confidence": 0.7, "correct": 1}}\n' for i in range(18)))

    def nanocal(*arguments):
        return installed('-c', f"""
import sys
sys.modules.update(dict.fromkeys({OTHERS}))
from nanocal.__main__ import main
main()""", *arguments)

    assert nanocal('metrics', 'a.csv').startswith('n    ')
    assert 'b.jsonl - a.csv' in nanocal('compare', 'a.csv', 'b.jsonl')
    assert 'confidences of a file' in nanocal('report', 'a.csv')
    written = json.loads((installed.folder / 'out' / 'report' / 'results.json').read_text())
    assert written['tasks']['predictions']['pooled']['ece'] == pytest.approx(0.35)
    assert (installed.folder / 'out' / 'compare' / 'compare.html').exists()
    assert installed(installed.bin / 'nanocal', '--version') == f'{__version__}\n'


@pytest.mark.slow
def test_the_installed_modules_use_each_other_and_the_examples_of_the_readme_run(installed):
    printed = installed('-c', f"""
import json, sys
import nanocal
from nanocal import {', '.join(sorted(MODULES - {'lm_eval_metrics'}))}
print(nanocal.__version__)
print(json.dumps([*sys.modules]))
""")
    version, loaded = printed.splitlines()
    assert version == __version__ and not {*MODULES, *FOLDERS} & {*json.loads(loaded)}
    blocks = re.findall(r'```python\n(.*?)```', (HERE / 'README.md').read_text(), re.S)
    examples = [block for block in blocks if 'nanocal' in block]
    assert len(examples) > 1
    for example in examples:
        installed('-c', example)


def test_one_version_is_named_everywhere():
    project = tomllib.loads((HERE / 'pyproject.toml').read_text())
    assert project['project']['dynamic'] == ['version']
    assert f'\nversion: {__version__}\n' in (HERE / 'CITATION.cff').read_text()
    newest = re.search(r'^## (\S+)', (HERE / 'CHANGELOG.md').read_text(), re.M).group(1)
    assert newest == __version__
