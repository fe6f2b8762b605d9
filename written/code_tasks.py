"""Programming problems: HumanEval's files and prompts, and the check of a written solution.

Chen et al. 2021, arXiv:2107.03374. The check runs code that a model wrote: see written/sandbox.py.
"""

import ast
import builtins
import functools
import re
import symtable
import warnings
from typing import NamedTuple

from data.files import parsed, read_rows, require_fields, require_text, without_bad
from runtime.errors import DataError
from runtime.sources import fetch
from written.sandbox import run_program

HUMANEVAL = 'openai/openai_humaneval'
PATTERNS = '*/test-*.parquet', 'HumanEval.jsonl*', '*.jsonl*'
# strings that end a base model's continuation of the prompt, as published
STOPS = '\nclass', '\ndef', '\n#', '\nif', '\nprint'
# a line that begins or ends a block of code in Markdown
FENCE = re.compile(r'^.*```[^`\n]*$', re.MULTILINE)


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
    fields = {key: require_text(row.get(key), key)
              for key in ('task_id', 'prompt', 'entry_point', 'test')}
    try:
        defined = functions(fields['prompt'])
    except SyntaxError as error:
        raise DataError(f'the prompt is no Python with a docstring at its end: {error}') from error
    if fields['entry_point'] not in defined:
        raise DataError(f'the prompt defines no function {fields["entry_point"]!r}')
    solution = row.get('canonical_solution')
    problem = Problem(*fields.values(),
                      require_text('' if solution is None else solution, 'canonical_solution'))
    try:
        python(problem.test_source, 0)      # compiled, since 'return' outside of check parses
        check = functions(problem.test_source).get('check')
    except SyntaxError as error:
        raise DataError(f'test is no Python after the prompt: {error}') from error
    names = [] if check is None else [x.arg for x in (*check.args.posonlyargs, *check.args.args)]
    if not names or not any(isinstance(node, ast.Name) and node.id == names[0]
                            for node in ast.walk(check)):
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
    names = [name for scope in scopes for name in scope.get_symbols()
             if scope is scopes[0] or name.is_global()]
    defined = {name.get_name() for name in names if name.is_assigned() or name.is_imported()}
    used = {name.get_name() for name in names if name.is_referenced()}
    # a star import may define anything
    return [] if 'import *' in source else sorted(used - defined - {*dir(builtins), 'program'})


def functions(source):
    """Return {name: its node} of the functions that a program defines; raises SyntaxError."""
    return {node.name: node for node in python(source).body if isinstance(node, ast.FunctionDef)}


def load_problems(source=HUMANEVAL, revision=None):
    """Return the Problems of a file, a folder or a dataset on the hub. Raises DataError."""
    rows = read_rows(*fetch(source, PATTERNS, revision))
    return list(without_bad((parsed(*row, humaneval_row) for row in rows), 'stop', []))


def solution_source(problem, text):
    """Return the program that a model's text makes of the problem's prompt.

    A text that begins indented continues the prompt, up to the first of STOPS, if that is Python.
    Else the program is the Python that defines the function, in a block of code in Markdown or
    outside: the last one of several. Else it is a continuation up to a fence, or the first block.
    """
    text = re.sub('^([> \t]*)~~~', r'\1```', text, flags=re.MULTILINE)
    ends = [at for at in map(text.find, STOPS) if at >= 0]
    indented = re.match(r'(?:[ \t]*\n)*[ \t]+\S', text)
    continuation = problem.prompt + text[:min(ends, default=len(text))] + '\n'
    if indented and not syntax_error(continuation):
        return continuation
    if program := defining(text, problem.entry_point):
        return f'{problem.prompt}\n{program}'
    if fence := FENCE.search(text):
        continuation = problem.prompt + text[:min([*ends, fence.start()])] + '\n'
        if not indented or syntax_error(continuation):
            blocks = [block for block in FENCE.split(text)[1::2] if block.strip()]
            return f'{problem.prompt}\n{"".join(blocks[:1])}'
    return continuation


def syntax_error(source):
    """Return the SyntaxError of a program, or None."""
    try:
        python(source)
    except SyntaxError as error:
        return error
    return None


def defining(text, name):
    """Return the program in a text that defines the function `name`, without its margin, or ''.

    The last definition is preferred, then the first. The program begins at the first line from
    which all is Python up to there, and ends where that ends. If it begins a block of code, but
    does not end at a fence, the next line is returned with it, so it fails.
    """
    name = re.escape(name)
    attempts = 1000         # a text that is no program fails line by line
    definitions = [*re.finditer(rf'^([> \t]*)(?:(?:async +)?def|class) +{name}\b'
                                 rf'|^{name} *(?::[^=\n]*)?=(?!=)', text, re.MULTILINE)]
    margin = min([len(match[1] or '') for match in definitions], default=0)
    definitions = [match for match in definitions if len(match[1] or '') == margin]
    # the first line of a statement; a word alone is a title or a tag, such as [PYTHON]
    statement = re.compile(rf'^[> \t]{{{margin}}}(?![\[<*_#]*\w+[\]>*_:]*$)\S', re.MULTILINE)
    for definition in definitions[:-2:-1] + definitions[:1]:
        # no program has hundreds of statements before the function
        for start in [*statement.finditer(text, 0, definition.end())][-200:]:
            program = re.sub(f'^[> \t]{{0,{margin}}}', '', text[start.start():], flags=re.M)
            lines = [*program.split('\n'), '```']
            n = len(lines) - 1
            while error := syntax_error('\n'.join(lines[:n])):
                if not (attempts := attempts - 1):
                    return ''
                n = min(error.lineno or n, n) - 1
                code, fence, _ = lines[n].partition('```')
                if fence and code.strip():      # at the end of a line
                    lines[n:n + 1] = code, fence
                    n += 1
            if n > text.count('\n', start.start(), definition.start()):
                is_block = FENCE.match(text[:start.start()].rstrip().rpartition('\n')[2])
                return '\n'.join(lines[:n + bool(is_block and not FENCE.match(lines[n]))])
    return ''


@functools.lru_cache(1024)      # samples often repeat each other
def check(problem, text, **limits):
    """Return (right, reason) of a model's text: whether its function passes the problem's tests.

    The tests see the other functions of the prompt as published, whatever the text makes of them.
    `limits` are those of run_program.
    """
    outcome = run_program(solution_source(problem, text), problem.test_source, **limits)
    return outcome.passed, outcome.reason
