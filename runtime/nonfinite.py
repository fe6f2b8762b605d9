"""Which tensor of a model's folder has NaN or infinity in it: the cause of such a loss or logit."""

from pathlib import Path

from runtime.weights import BUFFERS, read_weights


def nonfinite_tensor(folder: str | Path) -> str | None:
    """Return the name of the first tensor of a model folder with NaN or infinity in it, or None."""
    for _, key, tensor in read_weights(Path(folder)):
        # the fill value of Pythia's masks, -1e9, is minus infinity in float16
        if (tensor.is_floating_point() and not tensor.isfinite().all()
                and not BUFFERS.fullmatch(key)):
            return key
    return None


def bad_logits(where: str, folder: str | Path, dtype: str, what: str = 'logits') -> str:
    """Return the message for NaN or infinite logits: which tensor is damaged, if one is."""
    if name := nonfinite_tensor(folder):
        cause = f'{name} in {folder} holds NaN or infinity: download or train the model again'
    elif dtype == 'float32':
        cause = (f'the weights in {folder} are finite, but activations overflow even in float32: '
                 f'check config.json, or train the model again with a lower lr')
    else:
        cause = (f'the weights in {folder} are finite; activations probably overflow in {dtype}: '
                 f'compute in float32 (align.py, evaluate.py --dtype=float32; '
                 f'sample.py --device=cpu)')
    return f'{where}: the model gives NaN or infinite {what}; {cause}'
