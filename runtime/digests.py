"""Hashes: of values, of the content of files, and of the code that can change a result.

Code is compared by its syntax trees without docstrings, file by file, not by its formatting.
"""

import ast
import functools
import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from runtime import rooms

PIECE = 2 ** 26     # bytes that one thread hashes at once
HERE = Path(__file__).parent.parent
# Rooms and files that compute no sample. What data/ and runtime/ read (tokens, settings, weights)
# is in an identity by its content; the others measure samples that are there.
OUTSIDE = 'data', 'runtime', 'results', 'compare', 'bridges', 'metrics.py', 'stats.py'


def json_digest(content, size=16):
    """Return a hash of `size` bytes of a value that JSON can hold."""
    text = json.dumps(content, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=size).hexdigest()


def file_digest(path):
    """Return the hash of the hashes of a file's pieces: 1 s per GB on each of up to 8 threads."""
    def digest(start):
        with open(path, 'rb') as file:
            file.seek(start)
            return hashlib.blake2b(file.read(PIECE)).digest()

    with ThreadPoolExecutor(min(8, os.cpu_count())) as pool:
        pieces = pool.map(digest, range(0, os.path.getsize(path), PIECE))
        return hashlib.blake2b(b''.join(pieces), digest_size=16).hexdigest()


def code_digest(*modules):
    """Return a hash of the code of `modules`, names such as 'decoding.answers', of the model, its
    fast versions and rows, and of what they import of ours, directly or not, but what is OUTSIDE.
    """
    always = 'model', rooms.ROOMS['fast versions'], 'data.packing', 'data.tree_rows'
    files = map(module_file, (*always, *modules))
    return syntax_digest(*with_imports(files, lambda room: room not in OUTSIDE))


def module_file(name):
    return HERE / f'{name.replace(".", "/")}.py'


def with_imports(files, counts):
    """Return `files` and those that they import of ours, directly or not, read from the files.

    counts: whether a room, the name of a folder or of a file at the top level, counts
    """
    chosen, new = set(), {*files}

    def inside(path):
        return path.is_relative_to(HERE) and counts(path.relative_to(HERE).parts[0])
    while new:
        chosen |= new
        new = {path for file in new if inside(file) for path in parsed(file).imports
               if inside(path)} - chosen
    return chosen


def syntax_digest(*files):
    """Return a hash of the syntax trees of Python files, without docstrings."""
    texts = sorted(parsed(file).text for file in files)
    return hashlib.blake2b('\n'.join(texts).encode(), digest_size=8).hexdigest()


class Parsed(NamedTuple):
    text: str       # the syntax tree without docstrings
    imports: set    # paths of our modules that are imported, also in functions and by rooms.load


@functools.cache
def parsed(file):
    tree, names = ast.parse(Path(file).read_text(encoding='utf-8')), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {node.module, *(f'{node.module}.{alias.name}' for alias in node.names)}
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == 'rooms.load':
            names |= {rooms.ROOMS[name.value] for name in node.args
                      if isinstance(name, ast.Constant)}
    imports = {path for path in map(module_file, names) if path.exists()}
    return Parsed(ast.unparse(WithoutDocstrings().visit(tree)), imports)


class WithoutDocstrings(ast.NodeTransformer):
    def visit_Expr(self, node):
        return None if isinstance(node.value, ast.Constant) else node
