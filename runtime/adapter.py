"""PEFT adapters without merged weights: LoRA matrices that are merged into the base model on load.

`checkpoint.fetch` finds the folder of an adapter and calls `beside_base`, which returns a folder
with the files of the base model and a link `.adapter` to the adapter. From there on it is a model
folder like any other; `checkpoint.load` merges, and `checkpoint.fingerprint` covers the adapter.
"""

import hashlib
import math
import re
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from runtime.config_json import read_json_object
from runtime.errors import CheckpointError

CONFIG, WEIGHTS = 'adapter_config.json', ('adapter_model.safetensors', 'adapter_model.bin')
LINK = '.adapter'
PREFIX = 'base_model.model.'    # of the names of all matrices
# The keys of adapter_config.json that are read, or that merged weights do not depend on: which
# layers have matrices is read from the file of weights. Any other key must be empty or false.
KEYS = {'peft_type', 'task_type', 'base_model_name_or_path', 'revision', 'r', 'lora_alpha',
        'use_rslora', 'alpha_pattern', 'init_lora_weights', 'bias', 'auto_mapping',
        'exclude_modules', 'inference_mode', 'layers_pattern', 'layers_to_transform',
        'lora_dropout', 'peft_version', 'rank_pattern', 'target_modules', 'megatron_core',
        'qalora_group_size', 'eva_config', 'ensure_weight_tying'}
# another way to begin changes the base weights too
BEGINNINGS = (None, True, False, 'gaussian', 'orthogonal', 'eva')
_linked = []    # the temporary folders of this process; removed at its end


class LowRank(NamedTuple):
    """The change of a layer's weight, scale * B A, with A [r, in] and B [out, r]."""
    A: Tensor
    B: Tensor
    scale: float


def is_adapter(folder: Path) -> bool:
    """Return whether `folder` holds an adapter and not a whole model."""
    weights = [*folder.glob('model*.safetensors*'), *folder.glob('pytorch_model*.bin*')]
    return (folder / CONFIG).exists() and not (weights and (folder / 'config.json').exists())


def read_settings(folder: Path) -> dict:
    """Return the adapter_config.json of `folder`; raise CheckpointError for what is not read."""
    path = folder / CONFIG
    settings = read_json_object(path)
    if folder.name == 'adapter' and (folder.parent / 'config.json').exists():
        raise CheckpointError(f'{folder} holds the adapters of a run, whose merged weights and '
                              f'settings are in {folder.parent}; name that folder')
    wanted = {'peft_type': ('LORA',), 'task_type': ('CAUSAL_LM', 'SEQ_2_SEQ_LM', None),
              'bias': ('none', None), 'init_lora_weights': BEGINNINGS}
    for key, value in settings.items():
        if value not in wanted.get(key, (value,)):
            raise CheckpointError(f'{path}: {key} = {value!r} is not supported; it must be '
                                  f'{" or ".join(map(repr, wanted[key]))}')
        if key not in KEYS and value not in (None, False, 0, '', [], {}):
            raise CheckpointError(f'{path}: {key} = {value!r} is not supported; merge the adapter '
                                  f'with peft (merge_and_unload) and save the whole model')
    for key, kind in (('peft_type', str), ('base_model_name_or_path', str),
                      ('lora_alpha', (int, float)), ('alpha_pattern', (dict, type(None)))):
        value = settings.get(key)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise CheckpointError(f'{path}: {key} = {value!r} is missing or of the wrong type')
    return settings


def weights_file(folder: Path) -> Path:
    """Return the file with the matrices of the adapter in `folder`."""
    for name in WEIGHTS:
        if (folder / name).exists():
            return folder / name
    raise CheckpointError(f'{folder} has {CONFIG}, but no {" and no ".join(WEIGHTS)}')


def beside_base(folder: Path, base: Path) -> Path:
    """Return a temporary folder with links to all files of `base`, and the link `.adapter`."""
    if (base / LINK).exists():
        raise CheckpointError(f'{folder / CONFIG}: the base model is itself an adapter; merge that '
                              f'with peft (merge_and_unload) and name the merged model')
    _linked.append(tempfile.TemporaryDirectory(prefix=f'{folder.resolve().name}-'))
    both = Path(_linked[-1].name)
    for path in base.iterdir():
        (both / path.name).symlink_to(path.resolve())
    (both / LINK).symlink_to(folder.resolve())
    return both


def low_rank(folder: Path, tensors: dict[str, Tensor], shapes: dict) -> dict[str, LowRank]:
    """Return {weight of the base model: LowRank} of the adapter in `folder`.

    tensors: those of its file; shapes: {tensor of the base model: its shape}. As in peft, the scale
    is alpha / r or, with use_rslora, alpha / sqrt(r). Raises CheckpointError that names the tensor.
    """
    settings, changes = read_settings(folder), {}
    file, alphas = weights_file(folder), settings.get('alpha_pattern') or {}
    matrices = {}
    for key, tensor in tensors.items():
        match = re.fullmatch(rf'{re.escape(PREFIX)}(.+)\.lora_([AB])\.weight', key)
        if not match or tensor.ndim != 2:
            raise CheckpointError(f'{file}: tensor {key} is no LoRA matrix of a linear layer')
        if not tensor.isfinite().all():
            raise CheckpointError(f'{file}: tensor {key} holds NaN or infinity')
        matrices.setdefault(match[1], {})[match[2]] = tensor
    for layer, pair in matrices.items():
        if len(pair) < 2:
            raise CheckpointError(f'{file}: layer {layer} has lora_{"".join(pair)} alone')
        A, B = pair['A'], pair['B']
        weight, r = shapes.get(f'{layer}.weight'), A.shape[0]
        if weight is None:
            raise CheckpointError(f'{file}: the base model has no layer {layer}')
        if [B.shape[0], A.shape[1]] != [*weight] or B.shape[1] != r or not r:
            raise CheckpointError(f'{file}: layer {layer} has lora_A {[*A.shape]} and lora_B '
                                  f'{[*B.shape]}, but its weight in the base model is {[*weight]}')
        pattern = next((x for x in alphas if re.match(rf'(.*\.)?({x})$', layer)), None)
        alpha = alphas.get(pattern, settings['lora_alpha'])
        changes[f'{layer}.weight'] = LowRank(
            A, B, alpha / (math.sqrt(r) if settings.get('use_rslora') else r))
    if not changes:
        raise CheckpointError(f'{file} holds no matrices')
    return changes


def merged(weight: Tensor, change: LowRank) -> Tensor:
    """Return weight + scale * B A, computed in float32 and rounded once to the type of `weight`."""
    A, B = (x.to(weight.device, torch.float32) for x in (change.A, change.B))
    return (weight.float() + B @ A * change.scale).to(weight.dtype)


def fingerprint(folder: Path) -> bytes:
    """Return a hash of the adapter in `folder`: its settings and its matrices."""
    digest = hashlib.blake2b((folder / CONFIG).read_bytes(), digest_size=8)
    with open(weights_file(folder), 'rb') as file:
        return digest.digest() + hashlib.file_digest(file, 'blake2b').digest()
