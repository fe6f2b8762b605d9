"""Which code computed a result: what an edit changes must not be mixed with what was there."""

import ast
import functools
import hashlib
import inspect
import textwrap

import attention
import fused_ce
import model
import triton_ops
from families import t5


@functools.cache
def code_digest(*parts):
    """Return a hash of the code of the forward pass and of `parts`, modules or functions.

    Comments and line breaks do not matter. A new loss makes no difference, since scores need none.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in (model, attention, triton_ops, fused_ce, t5, *parts):
        for statement in ast.parse(textwrap.dedent(inspect.getsource(part))).body:
            if not (part is fused_ce and _is_loss(statement)):
                digest.update(ast.unparse(statement).encode())
    return digest.hexdigest()


def _is_loss(statement):
    """Return whether a statement of fused_ce.py defines a loss, or the table of all."""
    return getattr(statement, 'name', None) in fused_ce.LOSSES or (
        ast.unparse(statement).startswith('LOSSES = '))
