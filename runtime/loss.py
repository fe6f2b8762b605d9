"""The key `loss` of a config: a text such as 'focal(2) + z_loss(1e-4)'."""

import ast
import difflib

from fused_ce import LOSSES, Loss
from runtime.errors import ConfigError

NODES = (ast.Expression, ast.BinOp, ast.Add, ast.Call, ast.Name, ast.Load, ast.UnaryOp, ast.USub)


def parse_loss(text):
    """Return the Loss of a sum of calls of LOSSES with numbers. Raises ConfigError."""
    try:
        tree = ast.parse(text.strip(), mode='eval')
        if sum(isinstance(node, ast.Call) for node in ast.walk(tree)) > 100:
            raise RecursionError    # each term calls those before it
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id not in LOSSES:
                near = difflib.get_close_matches(node.id, LOSSES, 1, 0)[0]
                raise ValueError(f'there is no {node.id!r}; did you mean {near!r}?')
            number = isinstance(node, ast.Constant) and type(node.value) in (int, float)
            if not (number or isinstance(node, NODES)):
                raise ValueError("write a sum of calls with numbers: 'focal(2) + z_loss(1e-4)'")
        # Only names of LOSSES, numbers, calls, + and - are left.
        loss = eval(compile(tree, text, 'eval'), {'__builtins__': {}}, LOSSES)
        if not isinstance(loss, Loss):
            raise ValueError("write calls, such as 'brier()'")
        if not loss.whole:
            raise ValueError('it has terms only; add a whole loss, as in '
                             "'cross_entropy() + z_loss(1e-4)'")
        return loss
    except SyntaxError:
        raise ConfigError(f"loss {text!r:.80}: not a sum of calls, such as 'focal(2) + "
                          f"z_loss(1e-4)'") from None
    except (TypeError, ValueError) as error:
        raise ConfigError(f'loss {text!r:.80}: {error}') from None
    except (RecursionError, MemoryError):
        raise ConfigError(f'loss {text!r:.80}: too many terms; at most 100') from None


def loss_options(model, cfg):
    """Return the arguments of `fused_loss` that are the same for all losses of a run."""
    memory = None if cfg.loss_memory is None else cfg.loss_memory * 10 ** 6     # MB to bytes
    return {'softcap': model.softcap, 'memory': memory}
