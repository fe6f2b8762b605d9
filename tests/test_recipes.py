"""The recipes of the docs: each is applied to a copy of the repository, as its text says, and run.

A recipe is a section of a page. Its steps are python blocks behind a sentence that names the file
and where the block goes, and that ends with a colon:

    In `train.py`, add to `SCHEDULES`:          rows, at the end of that table
    In `train.py`, add to `TrainConfig`:        fields, at the end of that class
    At the end of `check_config`:               lines, at the end of that function
    instead of the last line of `learning_rate`:  lines, in place of its last statement
    In `fused_ce.py`, add the function:         before the table that the next step extends

`the table` may follow without naming the file again. Other blocks are examples.
"""

import ast
import re
import shutil
import textwrap
import tomllib

import pytest
from common import HERE
from scripts import run_scripts

STEP = re.compile(r'([^\n](?:[^\n]|\n(?!\n|```))*):\n+```python\n(.*?)```', re.S)
PLACES = {      # how a step's sentence ends, with the name of the place
    'to': r'\b(?:to|in) `([A-Z_]+)`$', 'end': r'\b(?:[Aa]t the end of|add to) `(\w+)`$',
    'last': r'\binstead of the last line of `(\w+)`$', 'add': r'\badd the functions?\b()'}


def section(page, heading):
    """Return the text of a page under `heading`, up to the next heading of its level."""
    text = (HERE / 'docs' / page).read_text()
    level = re.search(rf'^(#+) {re.escape(heading)}$', text, re.M)
    assert level, f'docs/{page} has no section {heading!r}'
    return re.split(rf'^#{{2,{len(level[1])}}} ', text[level.end():], flags=re.M)[0]


def steps(text):
    """Yield (file, kind, name, block) of every step; kind: a key of PLACES."""
    file = None
    for sentence, block in STEP.findall(text):
        sentence = ' '.join(sentence.split())
        file = next(iter(re.findall(r'\b[Ii]n `([\w/]+\.py)`', sentence)), file)
        for kind, pattern in PLACES.items():
            if file and (found := re.search(pattern, sentence)):
                yield file, kind, found[1], block
                break


def top_level(lines):
    """Return {name: node} of what a module assigns and defines."""
    return {getattr(node, 'name', None) or ast.unparse(node.targets[0]): node
            for node in ast.parse(''.join(lines)).body
            if hasattr(node, 'name') or isinstance(node, ast.Assign)}


def add_rows(lines, name, block):
    """Add rows before the bracket that closes a table, or the tuple of {... for x in (rows)}."""
    table = top_level(lines)[name].value
    if isinstance(table, ast.DictComp):
        table = table.generators[0].iter
    last, end = table.end_lineno - 1, table.end_col_offset - 1
    rows, brackets = lines[last][:end], lines[last][end:]
    comma = ',' if rows.strip() and not rows.endswith(',') else ''
    lines[last] = f'{rows}{comma}\n{block}{brackets}'


def apply(text, root):
    """Edit the copy of the repository in `root` as the steps of a recipe say."""
    edits = list(steps(text))
    assert edits, 'no step in this section'
    for i, (file, kind, name, block) in enumerate(edits):
        block, lines = textwrap.dedent(block), (root / file).read_text().splitlines(keepends=True)
        if kind == 'to':
            add_rows(lines, name, textwrap.indent(block, '    '))
        elif kind in ('end', 'last'):
            body = top_level(lines)[name].body
            first = body[-1].lineno - 1 if kind == 'last' else body[-1].end_lineno
            lines[first:body[-1].end_lineno] = [textwrap.indent(block, '    ')]
        else:
            table = next(step[2] for step in edits[i:] if step[0] == file and step[1] == 'to')
            lines.insert(top_level(lines)[table].lineno - 1, f'{block}\n\n')
        (root / file).write_text(''.join(lines))


# the tests of the tables that the recipes extend, and ruff
ROOMS = ('align', 'compare', 'configs', 'layout', 'metrics', 'questions', 'report', 'study',
         'train')

FILE = tomllib.loads((HERE / 'tests' / 'recipes.toml').read_text())
# (page, heading): a program, after the prelude, that shows that the recipe works
RECIPES = {(page, heading): program for page, programs in FILE['recipes'].items()
           for heading, program in programs.items()}


@pytest.fixture(scope='module')
def root(tmp_path_factory):
    """A copy of the repository in which all recipes are applied."""
    root = tmp_path_factory.mktemp('recipes') / 'copy'
    shutil.copytree(HERE, root, ignore=shutil.ignore_patterns('.*', 'assets', 'out', 'build'))
    for page, heading in RECIPES:
        apply(section(page, heading), root)
    return root


@pytest.mark.slow
@pytest.mark.parametrize('page, heading', list(RECIPES))
def test_a_recipe_of_the_docs_works_in_a_copy_of_the_repository(page, heading, root):
    program = root / 'program.py'
    program.write_text(FILE['prelude'] + RECIPES[page, heading])
    done = run_scripts(1, program, folder=root)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_tests_that_a_contributor_runs_pass_with_every_recipe(root):
    done = run_scripts(1, pytest.__path__[0] + '/__main__.py', '-q', '-n0', '-p',
                       'no:cacheprovider', '--show-capture=no', '-m', 'not slow',
                       *(f'tests/test_{name}.py' for name in ROOMS), folder=root)
    assert done.returncode == 0, done.stdout[-3000:]
