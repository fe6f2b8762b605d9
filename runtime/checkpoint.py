"""Read and write model folders in the Hugging Face layout: config.json and weights."""

import os
from collections.abc import Callable
from pathlib import Path

import torch
from tqdm import tqdm

from model import CausalLM, ModelConfig
from runtime import rooms
from runtime.config_json import read_config
from runtime.config_keys import SEQ2SEQ
from runtime.digests import code_digest, file_digest, json_digest
from runtime.errors import CheckpointError
from runtime.sources import is_hub_name
from runtime.json_rules import read_json_object
from runtime.ownership import note_inputs
from runtime.parallel import load_full
from runtime.weights import (BUFFERS, FLOAT_TYPES, merged, names_on_disk, read_weights,
                             shapes_on_disk, text_key, their_key, weight_files)

# files that transformers and vLLM need besides the weights
SIDE_FILES = ('generation_config.json', 'tokenizer.json', 'tokenizer.model', 'tokenizer.model.v*',
              'tokenizer_config.json', 'special_tokens_map.json', 'added_tokens.json',
              'chat_template.jinja', 'original/tokenizer.model', 'spiece.model', 'tekken.json',
              'vocab.json', 'merges.txt')
ADAPTER = 'adapter_config.json'
ADAPTER_LINK = '.adapter'   # to the folder of an adapter, in a folder with links to its base model
MODEL_FILES = ('config.json', ADAPTER, *SIDE_FILES, '*.safetensors',
               '*.safetensors.index.json')
BIN_FILES = 'pytorch_model*.bin', 'pytorch_model*.bin.index.json', 'adapter_model.bin'
HEAD, EMBEDDING = 'lm_head.weight', 'model.embed_tokens.weight'


def build(config):
    """Return a CausalLM or Seq2Seq on the meta device, whose state_dict has the names on disk."""
    with torch.device('meta'):
        model = (rooms.load(config.model_type).Seq2Seq if config.model_type in SEQ2SEQ
                 else CausalLM)(config)
    model.register_state_dict_post_hook(_rename_for_disk)
    model.register_load_state_dict_pre_hook(_rename_from_disk)
    return model


def _rename_for_disk(model, state, prefix, _):
    for theirs, ours in names_on_disk(model).items():
        state[prefix + theirs] = state.pop(prefix + ours)


def _rename_from_disk(model, state, prefix, *_):
    for theirs, ours in names_on_disk(model).items():
        if prefix + theirs in state:
            state[prefix + ours] = state.pop(prefix + theirs)


# ---- Reading weights -----------------------------------------------------------------------------

def fetch(name: str, revision: str | None = None, weights: bool = True) -> Path:
    """Return the folder of a model: `name` if that is a folder, else a snapshot from the hub.

    A PEFT adapter comes with its base model (bridges/adapter.py). weights=False downloads none
    """
    folder = _own_folder(name, revision, weights)
    if not is_adapter(folder):
        return folder
    if folder.name == 'adapter' and (folder.parent / 'config.json').exists():
        raise CheckpointError(f'{folder} holds the adapters of a run, whose merged weights and '
                              f'settings are in {folder.parent}; name that folder')
    adapter = rooms.load('adapter')
    settings = adapter.read_settings(folder)
    base = settings['base_model_name_or_path']
    try:
        base = _own_folder(base, None if os.path.isdir(base) else settings.get('revision'), weights)
    except CheckpointError as error:
        raise CheckpointError(f'{folder / ADAPTER}: the base model: {error}') from error
    return adapter.beside_base(folder, base)


def is_adapter(folder: Path) -> bool:
    """Return whether `folder` holds an adapter and not a whole model."""
    weights = [*folder.glob('model*.safetensors*'), *folder.glob('pytorch_model*.bin*')]
    return (folder / ADAPTER).exists() and not (weights and (folder / 'config.json').exists())


def _own_folder(name, revision, weights):
    folder = Path(os.path.expanduser(name))
    if name and os.path.isdir(folder):      # False also for a name that is too long
        if revision:
            raise CheckpointError(f'revision = {revision!r} is that of a hub name, and model = '
                                  f'{name} is a folder; set one of them')
    elif os.path.isfile(folder) or not is_hub_name(name):
        raise CheckpointError(f'{name!r} is no model: neither a folder with config.json nor a hub '
                              f'name like google/gemma-2-2b')
    else:
        wanted = [pattern for pattern in MODEL_FILES if weights or 'safetensors' not in pattern]
        hub = rooms.load('hub')
        folder = hub.download(name, wanted, revision,
                              ignore=['original/*.safetensors', 'consolidated*'])
        if weights and not any(folder.glob('*.safetensors')):
            # older checkpoints, such as Pythia's at a training step, have only these
            folder = hub.download(name, BIN_FILES, revision)
    files = [file for pattern in MODEL_FILES + BIN_FILES for file in folder.glob(pattern)]
    for file in files:
        if file.is_fifo() or file.is_socket() or file.is_char_device():     # which may never end
            raise CheckpointError(f'{file} is not a regular file; copy the model into a folder')
    note_inputs(*files)
    return folder


def load(folder: str | Path, device='cpu', dtype: torch.dtype | None = None,
         reward: bool = False, share: Callable | None = None) -> CausalLM:
    """Return a CausalLM with the weights of `folder`, as `dtype` (None: the type in config.json).

    reward: whether it must have a score head instead of the output matrix
    share:  calls `sharding.shard` on the model before it has weights, and may change its layers
    Raises CheckpointError.
    """
    config = read_config(folder, seq2seq=True)
    if getattr(config, 'reward', False) != reward:
        raise CheckpointError(f'{folder} is {"no" if reward else "a"} reward model; '
                              f'{"a score head" if reward else "an output matrix"} is needed')
    dtype = dtype or getattr(torch, config.dtype)
    model, tensors, changes = check_weights(folder, config)
    ours = names_on_disk(model)
    model.to(dtype)
    if share:
        share(model)
    elif torch.device(device).type == 'cuda':
        rooms.load('kernels').adjoin(model, device=device)
    # as model.to_empty, but what `share` has added keeps its values; empty_like of a plain meta
    # tensor would import the compiler, which takes seconds
    model._apply(lambda x: x if not x.is_meta else torch.empty_like(x, device=device) if share else
                 x.new_empty(x.shape, device=device))
    parameters = dict(model.named_parameters())
    for key, tensor in tqdm(tensors.items(), 'loading', unit=' tensors', delay=1, disable=None):
        if ours[key] in parameters:     # `share` may have removed it
            tensor = tensor.to(device, dtype)
            if key in changes:
                tensor = merged(tensor, changes[key])
            load_full(parameters[ours[key]], tensor)
    return model


def check_weights(folder: str | Path, config: ModelConfig):
    """Return a model on the meta device, {name on disk: mapped tensor} and an adapter's changes.

    Raises CheckpointError naming the damaged file, or the tensor that is missing, unknown or
    misshaped. An output matrix beside tied embeddings must equal them; T5's may differ, and
    config.tie_word_embeddings becomes False then.
    """
    stored = {text_key(key, config): (path, key, tensor)
              for path, key, tensor in read_weights(Path(folder))}
    head, embedding = (stored.get(their_key(key, config)) for key in (HEAD, EMBEDDING))
    if config.tie_word_embeddings and head and embedding:
        # some tied checkpoints carry a copy of the embedding
        (path, name, a), (_, other, b) = head, embedding
        if a.dtype == b.dtype and torch.equal(a, b):
            del stored[their_key(HEAD, config)]
        elif config.model_type in SEQ2SEQ:
            config.tie_word_embeddings = False
        else:
            raise CheckpointError(f'{path}: tensor {name} differs from {other}, but '
                                  f'tie_word_embeddings = true; set that to false in config.json, '
                                  f'or remove {name}')
    model = build(config)
    shapes = shapes_on_disk(model)
    link = Path(folder, ADAPTER_LINK)
    changes = rooms.load('adapter').changes(link, model) if link.exists() else {}
    stored = {text: (path, key, tensor) for text, (path, key, tensor) in stored.items()
              if text in shapes or not BUFFERS.fullmatch(key)}
    missing, unknown = shapes.keys() - stored.keys(), stored.keys() - shapes.keys()
    problems = [f'tensor {min(keys)}{f" (and {len(keys) - 1} more)" * (len(keys) > 1)} {problem}'
                for problem, keys in (('is missing', missing),
                                      ('is unknown to this architecture', unknown)) if keys]
    if problems:
        hint = '; if tied, set tie_word_embeddings = true' * (missing == {their_key(HEAD, config)})
        raise CheckpointError(f'{folder}: {" and ".join(problems)}{hint}')
    for text, (path, key, tensor) in stored.items():
        if [*tensor.shape] != shapes[text]:
            raise CheckpointError(f'{path}: tensor {key} has shape {[*tensor.shape]}, config.json '
                                  f'wants {shapes[text]}')
        if tensor.dtype not in FLOAT_TYPES:
            raise CheckpointError(f'{path}: tensor {key} is {tensor.dtype}; quantized weights are '
                                  f'not supported')
    return model, {text: tensor for text, (_, _, tensor) in stored.items()}, changes


def fingerprint(folder: str | Path) -> str:
    """Return a hash of config.json's values, of the files of weights and of an adapter."""
    folder = Path(folder)
    config = read_json_object(folder / 'config.json')
    content = [config, *sorted(map(file_digest, weight_files(folder)))]
    if (link := folder / ADAPTER_LINK).exists():
        content.append(rooms.load('adapter').fingerprint(link))
    return json_digest(content, size=8)


def identity(folder: str | Path, tokenizer, dtype, *modules: str) -> dict:
    """Return what decides samples of the model in `folder`, besides prompts and settings.

    dtype: of the weights on the device; modules: names of those that make the samples
    """
    family = read_json_object(Path(folder) / 'config.json').get('model_type')
    modules += (rooms.ROOMS[family],) if family in SEQ2SEQ else ()
    return {'model': fingerprint(folder), 'tokenizer': tokenizer.fingerprint,
            'end_ids': sorted(tokenizer.end_ids), 'dtype': str(dtype).removeprefix('torch.'),
            'code': code_digest(*modules)}
