"""Programming problems: HumanEval's files and prompts, and the check of a written solution.

Chen et al. 2021, arXiv:2107.03374. The check runs code that a model wrote: see written/sandbox.py.
"""

import ast
import builtins
import functools
import itertools
import re
import symtable
import textwrap
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
# the first line of a block of code in Markdown: its margin, which may hold the mark of a list, the
# fence, and a language. Behind other words a fence needs a language.
FENCE = re.compile(r'^(?:(?P<margin>[ \t]*(?:(?:[-*+]|\d+[.)])[ \t]+)?)|[^`~\n]+(?=[`~]{3}.*\w))'
                   r'(?P<fence>`{3,}|~{3,})[^`\n]*$', re.MULTILINE)
# the first line of a statement; a word alone is a title or a tag, such as [PYTHON]
STATEMENT = re.compile(r'^(?![\[<*_#]*\w+[\]>*_:]*$)\S', re.MULTILINE)


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

    A block of code in Markdown counts if it defines the function: the last one of several. Else a
    text that begins indented continues the prompt, up to the first of STOPS or of the blocks. Else
    the program is what defines the function outside of blocks, or the first block.
    """
    name, begin = re.escape(problem.entry_point), FENCE.search(text)
    defines = re.compile(rf'^(?:(?:async +)?def|class) +{name}\b|^{name} *(?::[^=\n]*)?=(?!=)',
                         re.MULTILINE)
    ends = [at for at in map(text.find, STOPS) if at >= 0]
    indented = re.match(r'(?:[ \t]*\n)*[ \t]+\S', text)
    continuation = problem.prompt + text[:min(ends, default=len(text))] + '\n'
    # lines of backquotes in the strings of a program are no fences
    is_program = not syntax_error(text) or indented and not syntax_error(continuation)
    blocks = fenced(text) if begin and not is_program else []
    whole = [block if defines.search(block) else textwrap.dedent(block) for block in blocks]
    if whole := [block for block in whole if defines.search(block)]:
        return f'{problem.prompt}\n{whole[-1]}'
    if blocks:
        continuation = problem.prompt + text[:min([*ends, begin.start()])] + '\n'
    if indented and not syntax_error(continuation):
        return continuation
    if program := unfenced(text, [*defines.finditer(text)]):
        return f'{problem.prompt}\n{program}'
    # a quotation, or a block of code by its indentation
    margin = re.search(rf'^([ \t]+|> ?)(?:async +)?def {name}\b', text, re.MULTILINE)
    if margin and not defines.search(text):
        return solution_source(problem, re.sub(f'^{margin[1]}', '', text, flags=re.MULTILINE))
    return f'{problem.prompt}\n{blocks[0]}' if blocks else continuation


def syntax_error(source):
    """Return the SyntaxError of a program, or None."""
    try:
        python(source)
    except SyntaxError as error:
        return error
    return None


def fenced(text):
    """Return the blocks of code in Markdown that are not blank, without their fence's indentation.

    A block ends at a fence with the indentation of its first one, but not inside a string of a
    program. If the model closed it in another way, it ends at the first other fence before which it
    is Python. A block that is not closed ends with the text.
    """
    blocks, at = [], 0
    while begin := FENCE.search(text, at):
        fence, margin = begin['fence'], begin['margin'] or ''
        start = min(begin.end() + 1, len(text))
        outdented = re.compile(rf'^[ \t]{{0,{len(margin)}}}', re.MULTILINE)
        own = re.compile(rf'^[ \t]{{{len(margin)}}}{fence}{fence[0]}*[ \t]*$', re.MULTILINE)

        end = (end_of_program(text, start, own, outdented)
               or end_of_program(text, start, re.compile(fence), outdented)
               or own.search(text, start))
        stop, at = end.span() if end else (len(text), len(text))
        blocks.append(outdented.sub('', text[start:stop]))
    return [block for block in blocks if block.strip()]


def end_of_program(text, start, fence, outdented):
    """Return the first match of `fence` that is not in a string of the program, None if no program.
    """
    # a string of a program holds few fences; one that is not closed, all that follow
    for match in itertools.islice(fence.finditer(text, start), 20):
        error = syntax_error(textwrap.dedent(outdented.sub('', text[start:match.start()])))
        if not error or 'unterminated triple-quoted' not in str(error):
            return None if error else match
    return None


def unfenced(text, definitions):
    """Return the program in a text that is not in blocks, or ''.

    definitions: matches of where the function is defined; the last one is preferred. The program
    begins at the first line from which all is Python up to there, and ends where that ends.
    """
    attempts = 1000         # a text that is no program fails line by line
    for definition in definitions[:-2:-1] + definitions[:1]:
        # no program has hundreds of statements before the function
        for start in [*STATEMENT.finditer(text, 0, definition.end())][-200:]:
            lines = text[start.start():].split('\n')
            while error := syntax_error('\n'.join(lines)):
                if not (attempts := attempts - 1):
                    return ''
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
