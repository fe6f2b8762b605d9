"""Read the pickled weights of older checkpoints, such as Pythia's: pytorch_model.bin."""

import pickle

import torch

from runtime.errors import CheckpointError


def read_pickle(path):
    """Return the tensors of a file, mapped; raises CheckpointError."""
    try:
        tensors = torch.load(path, 'cpu', mmap=True, weights_only=True)
        for key, x in tensors.items():
            if not isinstance(key, str) or x.layout is not torch.strided or (
                    x.is_meta or x.is_nested or x.is_quantized or x.is_complex()):
                raise TypeError(f'{key!r} is not the name of a dense tensor of real numbers')
    except (RuntimeError, OSError, EOFError, ValueError, TypeError, AttributeError,
            pickle.UnpicklingError) as error:
        reason = error if type(error) is TypeError else type(error).__name__
        raise CheckpointError(
            f"{path}: truncated, not a file of weights, or written by torch before 1.6 ({reason}); "
            f"download it again, or convert it in Python: "
            f"torch.save(torch.load('{path}', 'cpu', weights_only=True), '{path}')") from error
    return tensors
