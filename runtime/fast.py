"""Fast versions name the plain functions that they stand for, by digests of their syntax trees.

A kernel, or a shortcut such as causal attention without a mask, computes what plain functions do,
and whoever edits one of these wants the edit to run. So a fast version is used only as long as the
functions, and those of the same module that they call, have the digests that it was written for:

    ROTATE = FastVersion(rotate_kernel, {'model.rotate': '8f5bd6c5'})
    y = (rotate_kernel if ROTATE.stands_for(rotate) else rotate)(x, cos, sin)

Else a note has the new digests, to be written there once the fast version computes the same again;
tests/test_fast.py holds each pair together. A digest is of names, operations and constants, also
those of the module: layout, comments, docstrings and annotations do not count. A function whose
source is unknown, or that is a closure, is always another one. This file imports nothing of ours.
"""

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Callable
from tokenize import TokenError
from types import FunctionType
from typing import Any

VERSIONS: list['FastVersion'] = []      # all of them, for the tests
IGNORED = {'annotation', 'returns', 'type_comment', 'type_params', 'ctx', 'kind'}
NUMBERS_AND_TEXTS = bool, int, float, complex, str, bytes, tuple, type(None)


class FastVersion:
    """What computes the same as plain functions: a kernel, or the name of a shortcut."""

    def __init__(self, kernel: Any, digests: dict[str, str]):
        self.kernel, self.digests = kernel, digests
        self.plain: tuple = ()      # the functions of the last call, and the globals they read
        self.globals: list[tuple] = []
        self.is_current = False
        VERSIONS.append(self)

    def stands_for(self, *plain: Callable) -> bool:
        """Return whether the functions are those of the digests; print a note if they are not."""
        if plain != self.plain or any(space.get(name) is not value
                                      for space, name, value in self.globals):
            digests, self.globals = digests_of(*plain)
            self.plain = plain
            self.is_current = digests == self.digests and all(digests.values())
            if not self.is_current:
                print(self.note(digests))
        return self.is_current

    def note(self, digests: dict[str, str]) -> str:
        name = getattr(self.kernel, '__name__', self.kernel)
        edited = [key for key, digest in self.digests.items() if digests.get(key) != digest]
        edited = edited or sorted(digests.keys() - self.digests.keys())
        digests = dict.fromkeys(self.digests, '') | digests     # '': the source is unknown
        return (f'note: {", ".join(edited)} was edited or replaced, so {name} is not used; to use '
                f'it again, let it compute the same, run the tests, and write in its FastVersion: '
                f'{digests}')


def digests_of(*functions: Callable) -> tuple[dict[str, str], list[tuple]]:
    """Return {name: digest} of functions and those of their modules that they call, by name; and
    (namespace, name, value) of the globals that they read.
    """
    digests = {}
    read = []
    waiting = list(functions)
    while waiting:
        function = waiting.pop(0)
        module = getattr(function, '__module__', '') or ''
        name = f'{module.rpartition(".")[2]}.{getattr(function, "__qualname__", function)}'
        tree, constants = definition(function), []
        if name in digests:
            continue
        for node in ast.walk(tree) if tree else ():
            space = function.__globals__    # type: ignore[attr-defined]
            if isinstance(node, ast.Name) and node.id in space:
                value = space[node.id]
                read.append((space, node.id, value))
                if isinstance(value, FunctionType) and value.__module__ == module:
                    waiting.append(value)
                elif isinstance(value, NUMBERS_AND_TEXTS):
                    constants.append(f'{node.id} = {value!r}')
        text = f'{structure(tree)} {sorted({*constants})}'
        digests[name] = hashlib.blake2b(text.encode(), digest_size=4).hexdigest() if tree else ''
    return digests, read


def definition(function: Callable) -> ast.FunctionDef | None:
    """Return the syntax tree of a function; None if its source is unknown or it is a closure."""
    code = getattr(function, '__code__', None)
    if code is None or getattr(function, '__closure__', None):
        return None
    try:
        node = ast.parse(textwrap.dedent(inspect.getsource(code))).body[0]
    except (OSError, SyntaxError, IndexError, TokenError):
        return None     # there is no file, or it has been edited since it was imported
    return node if isinstance(node, ast.FunctionDef) and node.name == code.co_name else None


def structure(node) -> str:
    """Return a syntax tree as a text that is the same in all versions of Python."""
    if isinstance(node, list):
        return f'[{", ".join(structure(x) for x in node if not is_docstring(x))}]'
    if not isinstance(node, ast.AST):
        return repr(node)
    if isinstance(node, ast.JoinedStr):     # Python 3.12 adds empty texts to f-strings
        node = ast.JoinedStr([x for x in node.values if getattr(x, 'value', x) != ''])
    fields = (f'{name}={structure(value)}' for name, value in ast.iter_fields(node)
              if name not in IGNORED and value is not None and value != [])
    return f'{type(node).__name__}({", ".join(fields)})'


def is_docstring(node) -> bool:
    return (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str))
