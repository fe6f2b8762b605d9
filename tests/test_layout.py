"""The repository as a whole: what each folder says of itself, lint, types."""

import ast
import graphlib
import json
import shutil
import subprocess
import sys

import pytest
from common import HERE, WORDS, write_rows

from bridges import export
from data.files import dialogue
from data.tokenizer import load_tokenizer
from runtime import rooms

FOLDERS = ('alignment', 'bridges', 'compare', 'configs', 'data', 'decoding', 'families', 'research',
           'results', 'runtime', 'speed', 'written')
TOP = {'align', 'attention', 'catalog', 'demo', 'evaluate', 'fused_ce', 'generate', 'metrics',
       'model', 'sample', 'scoring', 'stats', 'test_all', 'train', 'world'}
# {file that can be copied: what of ours it may import}
COPYABLE = {'attention.py': set(), 'fused_ce.py': set(), 'metrics.py': set(),
            'model.py': {'attention'}, 'runtime/optim.py': set(), 'runtime/fast.py': set(),
            'compare/scaling.py': {'metrics'}, 'stats.py': {'metrics'}, 'catalog.py': {'metrics'},
            'compare/significance.py': {'metrics', 'stats'}}
# the core, which imports nothing else of ours; runtime/rooms.py opens the other rooms by name
CORE = {'attention', 'catalog', 'configs', 'data', 'evaluate', 'fused_ce', 'metrics', 'model',
        'results', 'runtime', 'scoring', 'stats', 'train'}
# {program: the most lines of ours that are loaded at its end}
MOST_LINES = {'import train': 6800, 'train.py without a report, on a CPU': 7300,
              'import evaluate': 8000, 'evaluate.py of MMLU with intervals': 9500}


def imports(path):
    """Return the names of our modules that a file imports, also inside functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= ({f'{node.module}.{alias.name}' for alias in node.names}
                      if node.module in FOLDERS else {node.module})
    return {name for name in names if name.partition('.')[0] in TOP | {*FOLDERS, 'tests'}}


def core_files():
    return [path for name in sorted(CORE) for path in (
        [HERE / f'{name}.py'] if name in TOP else sorted((HERE / name).rglob('*.py')))]


def test_the_top_level_holds_only_what_is_run_read_first_or_copied():
    assert {path.stem for path in HERE.glob('*.py')} <= TOP
    tracked = subprocess.run(['git', 'ls-files'], cwd=HERE, capture_output=True, text=True).stdout
    folders = {line.split('/')[0] for line in tracked.splitlines() if '/' in line}
    assert folders <= {*FOLDERS, '.ci', '.github', 'assets', 'docs', 'tests'}


def test_imports_go_only_in_the_direction_of_the_design():
    for file, allowed in COPYABLE.items():
        assert imports(HERE / file) <= allowed, file
    for path in core_files():
        if path.name != 'rooms.py':
            assert {name.partition('.')[0] for name in imports(path)} <= CORE, path
    for path in HERE.glob('*/*.py'):
        if path.parts[-2] not in ('research', 'tests'):
            assert not any(name.startswith(('research', 'tests')) for name in imports(path)), path


def test_no_files_import_each_other_in_a_circle():
    graphlib.TopologicalSorter({
        '.'.join(path.relative_to(HERE).with_suffix('').parts): imports(path)
        for path in HERE.rglob('*.py') if path.relative_to(HERE).parts[0] in
        {*FOLDERS, *(f'{name}.py' for name in TOP)}}).prepare()     # or CycleError names them


def test_the_core_opens_other_rooms_by_the_table_alone():
    """Modules of other rooms are named in runtime/rooms.py and in no other text of the core."""
    modules = {*rooms.ROOMS.values()}
    assert {*rooms.RESULTS.values()} <= rooms.ROOMS.keys()
    assert all((HERE / f'{module.replace(".", "/")}.py').exists() for module in modules)
    others = {module for module in modules if module.partition('.')[0] not in CORE}
    for path in core_files():
        texts = {node.value for node in ast.walk(ast.parse(path.read_text()))
                 if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        assert path.name == 'rooms.py' or not texts & others, path


@pytest.mark.parametrize('program', [
    program if program.startswith('import') else pytest.param(program, marks=pytest.mark.slow)
    for program in MOST_LINES])
def test_a_program_loads_only_what_it_needs(program, base, tmp_path):
    """Lines of ours in sys.modules at the end of a process; the model has a tokenizer.json."""
    model = shutil.copytree(base, tmp_path / 'model', ignore=shutil.ignore_patterns('tokenizer.*'))
    for name, content in export.tokenizer_files(base, load_tokenizer(base)).items():
        (model / name).write_text(json.dumps(content))
    for split in ('dev', 'test'):
        write_rows(tmp_path / 'mmlu' / f'{split}.jsonl', [
            {'question': f'fox {i}', 'choices': WORDS[:4], 'answer': i % 4, 'subject': 'anatomy',
             'messages': dialogue(f'fox {i}', 'Yes.')} for i in range(60)])
    common = [f'--model={model}', f'--out_dir={tmp_path / "out"}', '--device=cpu']
    runs = {'train.py': [*common, f'--data={tmp_path}/mmlu/test.jsonl', f'--cache_dir={tmp_path}',
                         '--batch_size=8', '--max_length=64', '--pack_len=128', '--max_steps=4'],
            'evaluate.py': [*common, f'--tasks=mmlu:{tmp_path}/mmlu']}
    name, _, _ = program.partition(' ')
    code = program if name == 'import' else f'import {name[:-3]}\n{name[:-3]}.main({runs[name]})'
    done = subprocess.run([sys.executable, '-c', f"""{code}
import sys
files = {{getattr(module, '__file__', None) or '' for module in [*sys.modules.values()]}}
lines = {{file: len(open(file).readlines()) for file in files if file.startswith({str(HERE)!r})}}
print(*sorted(lines.items()), sum(lines.values()), sep='\\n')"""],
                          cwd=HERE, text=True, capture_output=True, check=True)
    assert int(done.stdout.split()[-1]) <= MOST_LINES[program], done.stdout


@pytest.mark.parametrize('command', ['ruff check --no-cache .', pytest.param(
    # what it found in torch stays in .mypy_cache: else 15 seconds in each run
    'mypy', marks=pytest.mark.slow)])
def test_ruff_and_mypy_find_nothing(command):
    program, *arguments = command.split()
    pytest.importorskip(program, reason=f'needs {program}')
    done = subprocess.run([sys.executable, '-m', program, *arguments], cwd=HERE, text=True,
                          capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
