"""PEFT adapters: those of other programs, which are merged on load, and those of our runs.

For an adapter, `checkpoint.fetch` returns a folder with links to the files of the base model and a
link `.adapter`; `checkpoint.load` merges.
"""

import math
import re
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from model import CausalLM, LoRALinear, add_lora
from runtime.checkpoint import ADAPTER, ADAPTER_LINK, is_adapter
from runtime.config_json import read_config
from runtime.config_keys import SHARE, SIZE
from runtime.digests import file_digest, json_digest
from runtime.errors import CheckpointError
from runtime.json_rules import check_values, read_json_object
from runtime.saving import write_files
from runtime.weights import (BUFFERS, FLOAT_TYPES, LowRank, names_on_disk, read_tensors,
                             shapes_on_disk, text_key, their_key)

WEIGHTS = 'adapter_model.safetensors', 'adapter_model.bin'
FILES = WEIGHTS[0], ADAPTER     # written for the adapters of a run
PREFIX = 'base_model.model.'    # all names of matrices begin with it
# the allowed values of the keys of adapter_config.json that are read; null: a key may be missing
RULES = {'peft_type': ['LORA'], 'task_type': ['CAUSAL_LM', 'SEQ_2_SEQ_LM', None],
         'bias': ['none', None],
         # the other initializations of peft also change the base weights
         'init_lora_weights': [None, True, False, 'gaussian', 'orthogonal', 'eva'],
         'base_model_name_or_path': [str], 'r': [SIZE], 'lora_alpha': [(-1e9, 1e9)],
         'use_rslora': [bool, None], 'alpha_pattern': [dict, None], 'rank_pattern': [dict, None],
         'lora_dropout': [SHARE, None], 'revision': [str, None]}
# keys that do not change the merged weights; any other key must be empty or false
UNUSED = {'auto_mapping', 'exclude_modules', 'inference_mode', 'layers_pattern',
          'layers_to_transform', 'peft_version', 'target_modules', 'megatron_core',
          'qalora_group_size', 'eva_config', 'ensure_weight_tying'}
PATTERNS = ('alpha_pattern', 'lora_alpha'), ('rank_pattern', 'r')   # keys by layer and for all
MERGE = 'merge the adapter with peft (merge_and_unload) and save the whole model'
_linked = []    # the temporary folders of this process; removed at its end


def read_settings(folder: Path) -> dict:
    """Return the adapter_config.json of `folder`; raises CheckpointError."""
    path = folder / ADAPTER
    settings = read_json_object(path)
    for key, value in settings.items():
        if key not in RULES.keys() | UNUSED and value not in (None, False, 0, '', [], {}):
            raise CheckpointError(f'{path}: {key} = {value!r} is not supported; {MERGE}')
    check_values(settings, RULES, path, required=None)
    for key, default in PATTERNS:
        patterns = settings.get(key) or {}
        check_values(patterns, dict.fromkeys(patterns, RULES[default]), path, f'{key}.')
    return settings


def weights_file(folder: Path) -> Path:
    """Return the file with the matrices of the adapter in `folder`."""
    for name in WEIGHTS:
        if (folder / name).exists():
            return folder / name
    raise CheckpointError(f'{folder} has {ADAPTER}, but no {" and no ".join(WEIGHTS)}')


def beside_base(folder: Path, base: Path) -> Path:
    """Return a temporary folder with links to all files of `base`, and the link `.adapter`."""
    if is_adapter(base):
        raise CheckpointError(f'{folder / ADAPTER}: the base model {base} is itself an adapter; '
                              f'name a whole model, or merge that one with peft (merge_and_unload)')
    if not (base / 'config.json').exists():
        raise CheckpointError(f'{folder / ADAPTER}: the base model: {base} has no config.json')
    _linked.append(tempfile.TemporaryDirectory(prefix=f'{folder.resolve().name}-'))
    both = Path(_linked[-1].name)
    for path in base.iterdir():
        (both / path.name).symlink_to(path.resolve())
    (both / ADAPTER_LINK).symlink_to(folder.resolve())
    return both


def changes(folder: Path, model) -> dict[str, LowRank]:
    """Return what the adapter in `folder` changes in a base model, {tensor: LowRank}.

    As in peft, the scale is alpha / r or, with use_rslora, alpha / sqrt(r). Raises CheckpointError
    that names the tensor.
    """
    folder = folder.resolve()       # of a model folder it is a link
    settings = read_settings(folder)
    file = weights_file(folder)
    shapes = shapes_on_disk(model)
    matrices, low_rank = {}, {}
    for key, tensor in read_tensors(file).items():
        if BUFFERS.fullmatch(key.removeprefix(PREFIX)):
            continue
        match = re.fullmatch(rf'{re.escape(PREFIX)}(.+)\.lora_([AB])\.weight', key)
        if (not match or tensor.ndim != 2 or tensor.dtype not in FLOAT_TYPES
                or not tensor.isfinite().all()):
            raise CheckpointError(f'{file}: tensor {key} [{tensor.dtype}] is no LoRA matrix of a '
                                  f'linear layer, is quantized, or holds NaN; {MERGE}')
        matrices.setdefault(match[1], {})[match[2]] = tensor
    for name, pair in matrices.items():
        layer = text_key(name, model.config)
        A, B = (pair.get(part, torch.empty(0, 0)) for part in 'AB')
        weight, r = shapes.get(f'{layer}.weight'), A.shape[0]
        if [B.shape[0], A.shape[1]] != weight or B.shape[1] != r or not r:
            raise CheckpointError(f'{file}: layer {layer} has lora_A {[*A.shape]} and lora_B '
                                  f'{[*B.shape]}, but its weight in the base model is '
                                  f'{weight or "missing"}')
        alpha, rank = (_layer_setting(settings, name, *keys, folder / ADAPTER) for keys in PATTERNS)
        if rank != r:
            raise CheckpointError(f'{folder / ADAPTER}: r or rank_pattern says rank {rank} of '
                                  f'layer {layer}, but its matrices in {file.name} have rank {r}')
        scale = alpha / (math.sqrt(r) if settings.get('use_rslora') else r)
        low_rank[f'{layer}.weight'] = LowRank(A, B, scale)
    if not low_rank:
        raise CheckpointError(f'{file} holds no matrices')
    return low_rank


def _layer_setting(settings, name, patterns, default, path):
    """Return the value of the first pattern that matches a layer's name, else the default."""
    for pattern, value in (settings.get(patterns) or {}).items():
        try:
            if re.match(rf'(.*\.)?({pattern})$', name):     # as peft searches
                return value
        except (re.error, RecursionError, OverflowError) as error:
            raise CheckpointError(f'{path}: {patterns}: {pattern!r} is not a regular expression of '
                                  f'names of layers: {error}') from error
    return settings[default]


def fingerprint(folder: Path) -> str:
    """Return a hash of the adapter in `folder`: its settings and its matrices."""
    return json_digest([file_digest(folder / ADAPTER), file_digest(weights_file(folder))], size=8)


# ---- The adapters of a run, in the folder adapter/ beside the merged weights ---------------------

def adapted_layers(model):
    return {name: m for name, m in model.named_modules() if isinstance(m, LoRALinear)}


def save_adapter(model: CausalLM, folder: str | Path, base: str, *, full=Tensor.detach,
                 owner: str | Path | None = None):
    """Write the adapters alone, for `peft` beside the model `base`; see `saving.save`."""
    adapted = {their_key(name, model.config): m for name, m in adapted_layers(model).items()}
    tensors = {f'{PREFIX}{name}.{part}.weight': full(getattr(m, part).weight).cpu().contiguous()
               for name, m in adapted.items() for part in ('lora_A', 'lora_B')}
    layer = next(iter(adapted.values()))    # all have the same rank, alpha and dropout
    r = layer.lora_A.out_features
    settings = {'peft_type': 'LORA', 'task_type': 'CAUSAL_LM', 'base_model_name_or_path': base,
                'r': r, 'lora_alpha': layer.scale * r, 'lora_dropout': layer.dropout.p,
                'target_modules': sorted({name.rpartition('.')[2] for name in adapted}),
                'bias': 'none', 'fan_in_fan_out': False, 'inference_mode': True}
    write_files(folder, dict(zip(FILES, (lambda: tensors, settings), strict=True)), owner)


def read_adapter(folder: str | Path) -> dict:
    """Return the adapter_config.json in the adapter/ of a run's folder; raises CheckpointError."""
    path = Path(folder, 'adapter')
    if not (path / ADAPTER).exists():
        raise CheckpointError(f'{folder} has no adapter/, which train.py --lora saves beside the '
                              f'merged weights')
    return read_settings(path)


def add_adapter(model: CausalLM, folder: str | Path):
    """Add the adapters of a run, its softcap and temperature to their base; or CheckpointError."""
    settings, path = read_adapter(folder), Path(folder, 'adapter')
    config, ours = read_config(folder), names_on_disk(model)
    model.config.final_logit_softcapping = config.final_logit_softcapping
    model.config.temperature = config.temperature
    low_rank = {ours[key].removesuffix('.weight'): change
                for key, change in changes(path, model).items()}
    try:
        add_lora(model, settings['r'], settings['lora_alpha'], settings.get('lora_dropout') or 0,
                 {name.rpartition('.')[2] for name in low_rank})
    except ValueError as error:
        raise CheckpointError(f'{path}: {error}') from error
    for name, layer in adapted_layers(model).items():
        if name not in low_rank:
            raise CheckpointError(f'{path / WEIGHTS[0]} has no matrices for {name}, but for the '
                                  f'same layer of other blocks')
        A, B, layer.scale = low_rank[name]
        layer.lora_A.weight.data = A.to(layer.lora_A.weight)    # its rank may differ: rank_pattern
        layer.lora_B.weight.data = B.to(layer.lora_B.weight)
