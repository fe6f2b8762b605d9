"""Hashes: of values, of the content of files, and of the code that can change a result.

The code that counts is what a result uses: functions, classes and constants, without docstrings,
comments and line breaks. `code_digest` is for samples, `used_code` for any other result.
"""

import ast
import functools
import hashlib
import inspect
import json
import os
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PIECE = 2 ** 26     # bytes that one thread hashes at once
HERE = Path(__file__).parent.parent
# whose definitions count in `code_digest`, if they are used
FILES = tuple(HERE / file for file in (
    'model.py', 'attention.py', 'triton_ops.py', 'fused_ce.py', 'scaling.py', 'data/packing.py',
    'data/tree_rows.py',
    'alignment/objectives.py', 'alignment/packed_answers.py', 'decoding/answers.py',
    'decoding/answer_samples.py', 'decoding/cache.py', 'decoding/draw.py', 'decoding/slots.py',
    'results/p_ik_probe.py'))


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


def code_digest(config, *roots):
    """Return a hash of the code that computes `roots` with a model of this configuration.

    roots: functions and classes. What they and the model use of FILES counts as well, and the
    model's own row of FAMILIES, but no other family's.
    """
    if config.model_type in ('t5', 'mt5'):
        return used_code((*FILES, HERE / 'families/t5.py'), 'Seq2Seq', *roots)
    family = vars(config.family) | {'activation': config.family.activation.__name__}
    return used_code(FILES, 'CausalLM', 'LoRALinear', family['activation'], *roots,
                     without='FAMILIES', more=repr(family))


def used_code(files, *roots, without='', more=''):
    """Return a hash of the definitions `roots` and of all in `files` that they use, by name.

    roots: functions and classes, also nested ones, which count with all that is around them; or
           names of definitions in `files`; without: a name whose definition does not count
    """
    known, texts, seen = definitions(files), [more], {without}
    modules = {Path(file).stem for file in files}
    new = []
    for root in roots:
        if isinstance(root, str):
            new += known.get(root, ())
        else:
            names = root.__qualname__.partition('.<locals>')[0].split('.')
            around = functools.reduce(getattr, names, sys.modules[root.__module__])
            source = textwrap.dedent(inspect.getsource(around))
            new += WithoutDocstrings().visit(ast.parse(source)).body
    while new:
        statement = new.pop()
        texts.append(ast.unparse(statement))
        nodes = [*ast.walk(statement)]
        mentioned = {node.id for node in nodes if isinstance(node, ast.Name)} | {
            node.attr for node in nodes if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name) and node.value.id in modules}
        for name in mentioned & known.keys() - seen:
            seen.add(name)
            new += known[name]
    return hashlib.blake2b('\n'.join(sorted({*texts})).encode(), digest_size=8).hexdigest()


class WithoutDocstrings(ast.NodeTransformer):
    def visit_Expr(self, node):
        return None if isinstance(node.value, ast.Constant) else node


@functools.cache
def definitions(files):
    """Return {name: statements that define it} of the top level of Python files."""
    known, statements = {}, []
    for file in files:
        tree = ast.parse(Path(file).read_text(encoding='utf-8'))
        statements += WithoutDocstrings().visit(tree).body
    for statement in statements:
        if isinstance(statement, (ast.If, ast.Try)):
            statements += statement.body        # the loop goes on with them
        elif isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            known.setdefault(statement.name, []).append(statement)
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
            targets = getattr(statement, 'targets', None) or [statement.target]
            for node in (node for target in targets for node in ast.walk(target)):
                if isinstance(node, ast.Name):
                    known.setdefault(node.id, []).append(statement)
    return known
