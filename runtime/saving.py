"""Write model folders in the Hugging Face layout: config.json, weights, the files beside them."""

import contextlib
import functools
import json
import math
import shutil
from pathlib import Path

import torch
from torch import Tensor

from model import CausalLM, LoRALinear
from runtime import ownership, resume, rooms
from runtime.checkpoint import SIDE_FILES, build
from runtime.config_json import config_to_hf
from runtime.errors import ConfigError, TrainingError
from runtime.parallel import rank
from runtime.weights import LowRank, merged, names_on_disk

SHARD_BYTES = 5_000_000_000
# the names of types in a safetensors file
TYPES = {torch.float64: 'F64', torch.float32: 'F32', torch.float16: 'F16', torch.bfloat16: 'BF16',
         torch.int16: 'I16', torch.int8: 'I8', torch.uint8: 'U8', torch.bool: 'BOOL'}


def save(model: CausalLM, folder: str | Path, dtype: torch.dtype,
         side_files: str | Path | None = None, *, full=Tensor.detach, more: dict | None = None,
         owner: str | Path | None = None) -> list[str]:
    """Write config and weights as `dtype`, in shards of at most 5 GB; return the files' names.

    LoRA is merged in float32. config.json is renamed last: a folder that has it is complete. Every
    process must call this; the first one writes.

    side_files:      the folder of the base model, whose tokenizer and generation files are copied
    full(parameter): the tensor to write, such as the float32 master, whole on every process
    more, owner:     {name: text or JSON} that replaces side files; the folder whose list has them
    Raises CheckpointError, ConfigError (as `ownership.claim`) or OSError.
    """
    files = saved_files(model, folder, dtype, side_files, full, more)
    write_files(folder, files, owner)
    config = files['config.json']
    if rank() == 0 and 'nanocal' in config:
        print(f'note: only this program applies {config["nanocal"]}, the key nanocal in '
              f'{Path(folder) / "config.json"}; transformers and vLLM will not')
    return list(files)


def saved_files(model, folder, dtype, side_files, full, more):
    """Return {name: content as in `write_files`} of a model's files, config.json last."""
    from huggingface_hub import split_torch_state_dict_into_shards
    ours = {theirs: key for theirs, key in names_on_disk(model).items()
            if '.lora_' not in key and key != 'value_head'}     # these serve training alone
    shapes = {theirs: torch.empty(model.get_parameter(key).shape, dtype=dtype, device='meta')
              for theirs, key in ours.items()}
    split = split_torch_state_dict_into_shards(shapes, max_shard_size=SHARD_BYTES)
    files = {name: functools.partial(_merged, model, {key: ours[key] for key in keys}, dtype, full)
             for name, keys in split.filename_to_tensors.items()}
    if side_files is not None and Path(side_files).resolve() != Path(folder).resolve():
        files |= {str(path.relative_to(side_files)): path for pattern in SIDE_FILES
                  for path in sorted(Path(side_files).glob(pattern))}
    if split.is_sharded:
        files['model.safetensors.index.json'] = {'metadata': split.metadata,
                                                 'weight_map': split.tensor_to_filename}
    config = config_to_hf(model.config) | {'torch_dtype': str(dtype).removeprefix('torch.')}
    return files | (more or {}) | {'config.json': config}


def _merged(model, keys, dtype, full):
    """Return {name on disk: tensor} on the CPU, LoRA merged; keys: {name on disk: our name}."""
    tensors = {}
    for theirs, key in keys.items():
        tensor, layer = full(model.get_parameter(key)), model.get_submodule(key.rpartition('.')[0])
        if isinstance(layer, LoRALinear) and key.endswith('.weight'):
            A, B = full(layer.lora_A.weight), full(layer.lora_B.weight)
            tensor = merged(tensor.float(), LowRank(A, B, layer.scale))
        tensors[theirs] = tensor.to(dtype).cpu().contiguous()
    return tensors


def write_files(folder, files, owner):
    """Write {name: a path to copy, function of tensors, text or JSON}; rename the last one last.

    Every process calls the functions, which gather tensors; the first one writes.
    """
    folder = Path(folder)
    if rank() == 0 and owner is not None:
        ownership.claim(owner, *(folder.relative_to(owner) / name for name in files))
    with contextlib.ExitStack() as renames:     # which happen in reverse order
        for name, content in reversed(files.items()):
            if callable(content):
                content = content()     # the same name, so that only one shard is in memory
            if rank() > 0:
                continue
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            part = renames.enter_context(ownership.temporary(folder / name))
            if isinstance(content, Path):
                shutil.copyfile(content, part)
            elif name.endswith('.safetensors'):
                write_tensors(part, content)
            else:
                text = content if isinstance(content, str) else json.dumps(content, indent=2) + '\n'
                part.write_text(text, encoding='utf-8')


def write_tensors(path: Path, tensors: dict[str, Tensor]):
    """Write a safetensors file of CPU tensors."""
    # safetensors' own function lets no other user read the file, and leaves others if killed
    header, end = {'__metadata__': {'format': 'pt'}}, 0
    # readers want aligned tensors: large items first
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    for key, tensor in ordered:
        header[key] = {'dtype': TYPES[tensor.dtype], 'shape': list(tensor.shape),
                       'data_offsets': [end, end := end + tensor.nbytes]}
    text = json.dumps(header).encode()
    text += b' ' * (-len(text) % 8)
    with open(path, 'wb') as file:
        file.write(len(text).to_bytes(8, 'little') + text)
        for _, tensor in ordered:
            file.write(tensor.reshape(-1).view(torch.uint8).numpy())


# ---- The folder of a train.Run -------------------------------------------------------------------

def model_files(run):
    """Return the names in out_dir of the trained model's files."""
    cfg = run.cfg
    names = [*saved_files(build(run.config), cfg.out_dir, getattr(torch, cfg.save_dtype), run.base,
                          None, run.files)]
    if cfg.lora:
        names += [f'adapter/{name}' for name in rooms.load('adapter').FILES]
    return names


def run_files(run):
    """Return the names in out_dir of what a run writes besides checkpoints and reports."""
    names = model_files(run)
    epochs = range(1, math.ceil(run.cfg.epochs)) if run.cfg.checkpoint_epochs else ()
    return ['train_config.py', 'log.jsonl', 'loss.png', *names,
            *(f'epoch-{epoch}/{name}' for epoch in epochs for name in names)]


def save_weights(run, optimizer, below='.'):
    """Write the weights into out_dir/`below`, with LoRA merged, and the adapters in adapter/."""
    cfg, model = run.cfg, run.model
    folder, common = Path(cfg.out_dir, below), {'full': optimizer.master, 'owner': cfg.out_dir}
    try:
        if cfg.lora and not model.config.reward:    # a score head is no adapter
            rooms.load('adapter').save_adapter(model, folder / 'adapter', cfg.model, **common)
        save(model, folder, getattr(torch, cfg.save_dtype), run.base, more=run.files, **common)
    except (OSError, ConfigError) as error:
        raise TrainingError(f'saving the weights to {folder} failed: {error}; '
                            f'{resume.advice(cfg.out_dir)}') from error
