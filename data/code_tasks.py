"""Programming problems: HumanEval's files and prompts, and the check of a written solution.

Chen et al. 2021, arXiv:2107.03374. The check runs code that a model wrote: see runtime/sandbox.py.
"""

import ast
import builtins
import functools
import re
import symtable
import warnings
from typing import NamedTuple

from data.files import fetch, parsed, read_rows, require_fields, require_text, without_bad
from runtime.errors import DataError
from runtime.sandbox import run_program

HUMANEVAL = 'openai/openai_humaneval'
PATTERNS = '*/test-*.parquet', 'HumanEval.jsonl*', '*.jsonl*'
# strings that end a base model's continuation of the prompt, as published
STOPS = '\nclass', '\ndef', '\n#', '\nif', '\nprint'
FENCE = re.compile(r'^[ \t]*(?:`{3}|~{3}).*\n?', re.MULTILINE)     # around a block in Markdown
# the first line of a statement; a word alone is a title or a tag, such as [PYTHON]
STATEMENT = re.compile(r'^(?!~~~|[\[<*_#]*\w+[\]>*_:]*$)\S', re.MULTILINE)


class Problem(NamedTuple):
    """A function to complete: `prompt` ends with its docstring, `tests` define check(candidate)."""
    name: str
    prompt: str
    entry_point: str
    tests: str
    solution: str = ''

    @property
    def test_source(self):
        """The program that runs the tests of `program`, the module that a solution makes."""
        name = self.entry_point
        return (f'import random\nrandom.seed(0)\n{self.prompt}\n{name} = program.{name}\n'
                f'{self.tests}\ncheck({name})')


def humaneval_row(row):
    """Return the Problem of a row of HumanEval, or of another file in its schema."""
    require_fields(row)
    solution = row.get('canonical_solution')
    problem = Problem(*(require_text(row.get(key), key)
                        for key in ('task_id', 'prompt', 'entry_point', 'test')),
                      require_text('' if solution is None else solution, 'canonical_solution'))
    try:
        python(problem.test_source, 0)      # compiled, since 'return' outside of check parses
    except SyntaxError as error:
        raise DataError(f'prompt and test are no Python: {error}') from error
    if not re.search(rf'^def {re.escape(problem.entry_point)}\b', problem.prompt, re.MULTILINE):
        raise DataError(f'the prompt defines no function {problem.entry_point!r}')
    check = re.search(r'^def check\(\s*(\w+)', problem.tests, re.MULTILINE)
    if not check or not re.search(rf'\b{check[1]}\b', problem.tests[check.end():]):
        raise DataError('test has no function check(candidate) that calls the candidate')
    if missing := undefined_names(problem.test_source):
        raise DataError(f'prompt and test define no {missing[0]!r}, which they use')
    return problem


def python(source, flags=ast.PyCF_ONLY_AST):
    """Return compile(source), by default its syntax tree; raises SyntaxError."""
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', SyntaxWarning)      # a string with an invalid escape
        try:
            return compile(source, '<program>', 'exec', flags, dont_inherit=True)
        except (ValueError, RecursionError, MemoryError) as error:      # a null byte; deep nesting
            raise SyntaxError(str(error) or type(error).__name__) from error


def undefined_names(source):
    """Return the names that a program of tests uses without a definition, sorted."""
    scopes = [symtable.symtable(source, '<program>', 'exec')]
    for scope in scopes:
        scopes += scope.get_children()
    names = [(scope, name) for scope in scopes for name in scope.get_symbols()]
    defined = {name.get_name() for scope, name in names if name.is_global() or scope is scopes[0]
               if name.is_assigned() or name.is_imported()}
    used = {name.get_name() for scope, name in names if name.is_global() or scope is scopes[0]
            if name.is_referenced()}
    # a star import may define anything
    return [] if 'import *' in source else sorted(used - defined - {*dir(builtins), 'program'})


def load_problems(source=HUMANEVAL, revision=None):
    """Return the Problems of a file, a folder or a dataset on the hub. Raises DataError."""
    rows = (row for path in fetch(source, PATTERNS, revision) for row in read_rows(path))
    return list(without_bad((parsed(*row, humaneval_row) for row in rows), 'stop', []))


def solution_source(problem, text):
    """Return the program that a model's text makes of the problem's prompt.

    A text that begins indented continues the prompt, up to the first of STOPS or of the fences of
    Markdown. Else the program is what defines the function, in a block of Markdown, a quotation or
    neither; else the first block, or all of the text.
    """
    name = re.escape(problem.entry_point)
    stop = min((at for at in map(text.find, STOPS) if at >= 0), default=len(text))
    fences = [*FENCE.finditer(text)]
    if re.match(r'(?:[ \t]*\n)*[ \t]+\S', text):
        # lines of backquotes in the strings of a program are no fences
        for end in (stop, *(fence.start() for fence in fences[:1])):
            if text[:end].strip() and not syntax_error(f'{problem.prompt}{text[:end]}\n'):
                return f'{problem.prompt}{text[:end]}\n'
    definitions = [*re.finditer(rf'^(?:(?:async +)?def|class) +{name}\b|'
                                rf'^{name} *(?::[^=\n]*)?=(?!=)', text, re.MULTILINE)]
    if program := program_around(text, definitions):
        return f'{problem.prompt}\n{program}'
    margin = re.search(rf'^([ \t]+|> ?)(?:async +)?def {name}\b', text, re.MULTILINE)
    if margin and not definitions:      # a quotation, or a block of code by its indentation
        return solution_source(problem, re.sub(f'^{margin[1]}', '', text, flags=re.MULTILINE))
    if fences:
        block = text[fences[0].end():fences[1].start() if fences[1:] else None]
        return f'{problem.prompt}\n{block}'
    return f'{problem.prompt}{text[:stop]}\n'


def syntax_error(source):
    """Return the SyntaxError of a program, or None."""
    try:
        python(source)
    except SyntaxError as error:
        return error
    return None


def program_around(text, definitions):
    """Return the program that defines the function in a text, or ''.

    definitions: matches of where it is defined; the last one is preferred. The program begins at
    the first line from which all is Python up to there, and ends where that ends.
    """
    for definition in definitions[:-2:-1] + definitions[:1]:
        # no program has hundreds of statements before the function
        for start in [*STATEMENT.finditer(text, 0, definition.end())][-200:]:
            lines = text[start.start():].split('\n')
            while error := syntax_error('\n'.join(lines)):
                del lines[min(error.lineno or len(lines), len(lines)) - 1:]
            program = '\n'.join(lines)
            if start.start() + len(program) > definition.start():
                return program
    return ''


@functools.lru_cache(1024)      # samples often repeat each other
def check(problem, text, **limits):
    """Return (right, reason) of a model's text: whether its function passes the problem's tests.

    The tests see the other functions of the prompt as published, whatever the text makes of them.
    `limits` are those of run_program.
    """
    outcome = run_program(solution_source(problem, text), problem.test_source, **limits)
    return outcome.passed, outcome.reason
