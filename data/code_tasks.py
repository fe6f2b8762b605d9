"""Programming problems: HumanEval's files and prompts, and the check of a written solution.

Chen et al. 2021, arXiv:2107.03374. The check runs code that a model wrote: see runtime/sandbox.py.
"""

import ast
import functools
import math
import re
from typing import NamedTuple

from data.files import fetch, parsed, read_rows, require_fields, require_text, without_bad
from runtime.errors import DataError
from runtime.sandbox import run_program

HUMANEVAL = 'openai/openai_humaneval'
PATTERNS = '*/test-*.parquet', 'HumanEval.jsonl*', '*.jsonl*'
# strings that end a base model's continuation of the prompt, as published
STOPS = '\nclass', '\ndef', '\n#', '\nif', '\nprint'
FENCED = re.compile(r'```[^\n`]*\n(.*?)(?:```|\Z)', re.DOTALL)


class Problem(NamedTuple):
    """A function to complete: `prompt` ends with its docstring, `tests` define check(candidate)."""
    name: str
    prompt: str
    entry_point: str
    tests: str
    solution: str = ''


def humaneval_row(row):
    """Return the Problem of a row of HumanEval, or of another file in its schema."""
    require_fields(row)
    fields = {key: require_text(row.get(key), key)
              for key in ('task_id', 'prompt', 'entry_point', 'test')}
    try:
        defined = {node.name for node in ast.parse(fields['prompt']).body
                   if isinstance(node, ast.FunctionDef)}
    except SyntaxError as error:
        raise DataError(f'the prompt is no Python with a docstring at its end: {error}') from error
    if fields['entry_point'] not in defined:
        raise DataError(f'the prompt defines no function {fields["entry_point"]!r}')
    return Problem(*fields.values(), row.get('canonical_solution') or '')


def load_problems(source=HUMANEVAL, revision=None):
    """Return the Problems of a file, a folder or a dataset on the hub. Raises DataError."""
    rows = (row for path in fetch(source, PATTERNS, revision) for row in read_rows(path))
    return list(without_bad((parsed(*row, humaneval_row) for row in rows), 'stop', []))


def solution_source(problem, text):
    """Return the program that a model's text makes of the problem's prompt.

    A text with a block of code in ``` is a chat's answer: the first block that defines the function
    counts, else the first block. Any other text continues the prompt, up to the first of STOPS.
    """
    blocks = FENCED.findall(text)
    if blocks:
        defines = re.compile(rf'^def {re.escape(problem.entry_point)}\b', re.MULTILINE)
        return problem.prompt + '\n' + next(filter(defines.search, blocks), blocks[0])
    ends = [at for at in map(text.find, STOPS) if at >= 0]
    return problem.prompt + text[:min(ends, default=len(text))] + '\n'


@functools.lru_cache(1024)      # samples often repeat each other
def check(problem, text, **limits):
    """Return (right, reason) of a model's text: whether its function passes the problem's tests.

    The tests see the other functions of the prompt as published, whatever the text makes of them.
    `limits` are those of run_program.
    """
    name = problem.entry_point
    tests = (f'import random\nrandom.seed(0)\n{problem.prompt}\n{name} = program.{name}\n'
             f'{problem.tests}\ncheck({name})')
    outcome = run_program(solution_source(problem, text), tests, **limits)
    return outcome.passed, outcome.reason


def pass_at_k(n, right, k):
    """Return the unbiased estimate of pass@k from n samples of which `right` are right.

    1 - C(n - right, k) / C(n, k), equation 1 of the paper: the probability that k samples drawn
    without replacement hold a right one. Raises ValueError unless 0 <= right <= n and 1 <= k <= n.
    """
    if not (0 <= right <= n and 1 <= k <= n):
        raise ValueError(f'pass@{k} of {right} right among {n}: wanted right <= n and 1 <= k <= n')
    return 1 - math.comb(n - right, k) / math.comb(n, k)
