"""README.md, CONTRIBUTING.md and docs/: what they name exists, and their links lead somewhere."""

import ast
import functools
import re

import pytest
from common import HERE

PAGES = ['README.md', 'AGENTS.md', 'CONTRIBUTING.md', 'CHANGELOG.md', 'research/study/STUDY.md',
         'research/study/PLAN.md',
         *(f'docs/{path.name}' for path in sorted((HERE / 'docs').glob('*.md')))]
SKIPPED = {'.git', '.mypy_cache', '.venv', 'out', 'build', '__pycache__'}
FILES = [path for path in HERE.rglob('*')
         if path.is_file() and not SKIPPED & {*path.relative_to(HERE).parts}]
MODULES = {}        # {name of a module: its files}: metrics.py and research/bench/metrics.py
for path in FILES:
    if path.suffix == '.py' and path.parent != HERE / 'tests' and path.stem != '__init__':
        MODULES.setdefault(path.stem, []).append(path)
MODULES['metrics'].append(HERE / 'catalog.py')      # whose names metrics.py hands on
ENDINGS = 'py', 'md', 'toml', 'csv', 'png', 'json', 'jsonl', 'tex', 'txt', 'html', 'model'
# files of a reader, or of an older version
FOREIGN = {'DATA/alpaca.json', 'adaptive_temperature.py', 'stated_real.py',
           'research/bench/gradients.py', *(f'research/study/{name}.py' for name in (
               'base_smoothing', 'readings', 'remedies', 'selective', 'stated_confidence',
               'stated_real'))}


@functools.cache
def source():
    return '\n'.join(path.read_text() for path in FILES if path.suffix == '.py')


@functools.cache
def options():
    """Return every word that has a type or stands after two dashes in a Python file."""
    return {word for pair in re.findall(r'\b(\w+): |--(\w+)', source()) for word in pair}


@functools.cache
def names(path):
    """Return every name that a file defines: functions, classes, fields, variables, imports."""
    nodes = [*ast.walk(ast.parse(path.read_text()))]
    defined = {getattr(node, 'asname', None) or node.name for node in nodes
               if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.alias))}
    return defined | {node.id for node in nodes
                      if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def text_and_code(page):
    """Return (the text without blocks, the python blocks) of a page."""
    content = (HERE / page).read_text()
    blocks = re.findall(r'```python\n(.*?)```', content, re.S)
    return re.sub(r'```.*?```', '', content, flags=re.S), blocks


@pytest.mark.parametrize('page', PAGES)
def test_files_functions_options_and_imports_named_in_the_docs_exist(page):
    text, blocks = text_and_code(page)
    for word in re.findall(rf'`([\w./-]+\.(?:{"|".join(ENDINGS)}))`', text):
        exists = any((folder / word).exists() for folder in (HERE, (HERE / page).parent))
        assert exists or word in source() or word in FOREIGN, f'{page}: there is no {word}'
    for module, name in re.findall(r'`(\w+)\.(\w+)(?:\([^`]*\))?`', text):
        if module in MODULES and name not in ENDINGS:
            assert name in set().union(*map(names, MODULES[module])), (
                f'{page}: {module}.py has no {name}')
    for code in re.findall(r'`([^`]+)`', text):
        for key in re.findall(r'(?<![\w-])--(\w+)', code):
            assert key in options(), f'{page}: no program has an option --{key}'
    for node in (node for block in blocks if 'import ' in block
                 for node in ast.walk(ast.parse(block)) if isinstance(node, ast.ImportFrom)):
        folder = HERE / node.module.removeprefix('nanocal.').replace('.', '/')
        path = folder.with_suffix('.py')
        if node.module == 'nanocal':
            assert {alias.name for alias in node.names} <= {*MODULES}, page
        elif path.exists():
            assert {alias.name for alias in node.names} <= names(path), page
        elif folder.is_dir():
            assert {alias.name for alias in node.names} <= {x.stem for x in folder.iterdir()}, page
        else:
            assert node.module.split('.')[0] not in {'configs', 'compare', 'report', *MODULES}, (
                f'{page}: there is no {node.module}')


def anchors(path):
    """Return the anchors of the headings of a page, as GitHub makes them."""
    headings = re.findall(r'^#+ (.+)$', re.sub(r'```.*?```', '', path.read_text(), flags=re.S),
                          re.M)
    return {re.sub(r'[^\w\- ]', '', heading.lower()).replace(' ', '-') for heading in headings}


@pytest.mark.parametrize('page', PAGES)
def test_relative_links_resolve(page):
    text, _ = text_and_code(page)
    for link in re.findall(r'\]\((?!https?://)([^)\s]+)\)', text):
        file, _, anchor = link.partition('#')
        path = (HERE / page).parent / file if file else HERE / page
        assert path.exists(), f'{page}: {link}'
        assert not anchor or anchor in anchors(path), f'{page}: no heading for {link}'
