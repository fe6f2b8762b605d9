"""The repository as a whole: what each folder says of itself, lint, types."""

import ast
import functools
import importlib.util
import subprocess
import sys

import pytest
from common import HERE

FOLDERS = ('alignment', 'configs', 'data', 'decoding', 'families', 'research', 'results',
           'runtime', 'speed', 'written')
TOP = {'align', 'attention', 'demo', 'evaluate', 'fused_ce', 'generate', 'metrics', 'model',
       'sample', 'scaling', 'scoring', 'stats', 'test_all', 'train'}
# {file or folder: what of ours it may import}
ARROWS = {'attention.py': {'runtime'}, 'fused_ce.py': set(), 'metrics.py': set(),
          'model.py': {'attention'}, 'runtime/optim.py': set(),
          'results/prediction_files.py': {'metrics', 'results', 'runtime'},
          'scaling.py': {'metrics'}, 'stats.py': {'metrics'}}
SCRIPTS = {'evaluate', 'train', 'align', 'alignment', 'research'}
NEVER = {'data': {'results'} | SCRIPTS, 'results': {'data'} | SCRIPTS,
         'runtime': {'data', 'results'} | SCRIPTS}


@functools.cache
def ours(path):
    """Return the top-level names of this repository that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split('.')[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(node.module.split('.')[0])
    return names & (TOP | {*FOLDERS})


@pytest.mark.parametrize('folder', [
    str(path.parent.relative_to(HERE)) for name in FOLDERS
    for path in sorted((HERE / name).rglob('__init__.py'))])
def test_each_folder_says_in_three_lines_what_belongs_there(folder):
    docstring = ast.get_docstring(ast.parse((HERE / folder / '__init__.py').read_text()))
    summary, empty, *rest = docstring.split('\n')
    assert summary.endswith('.') and not empty and 1 <= len(rest) <= 3


def test_the_top_level_holds_only_what_is_run_read_first_or_copied():
    assert {path.stem for path in HERE.glob('*.py')} <= TOP
    tracked = subprocess.run(['git', 'ls-files'], cwd=HERE, capture_output=True, text=True).stdout
    folders = {line.split('/')[0] for line in tracked.splitlines() if '/' in line}
    assert folders <= {*FOLDERS, '.ci', '.github', 'assets', 'docs', 'tests'}


def test_imports_go_only_in_the_direction_of_the_design():
    for file, allowed in ARROWS.items():
        assert ours(HERE / file) <= allowed, file
    for folder, refused in NEVER.items():
        for path in (HERE / folder).rglob('*.py'):
            assert not ours(path) & refused, path


@pytest.mark.parametrize('command', ['ruff check --no-cache .', pytest.param(
    # what it found in torch stays in .mypy_cache: else 15 seconds in each run
    'mypy', marks=pytest.mark.slow)])
def test_ruff_and_mypy_find_nothing(command):
    program, *arguments = command.split()
    if importlib.util.find_spec(program) is None:
        pytest.skip(f'needs {program}')
    done = subprocess.run([sys.executable, '-m', program, *arguments], cwd=HERE, text=True,
                          capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
