"""Read and write model folders in the Hugging Face layout: config.json, weights, adapters."""

import contextlib
import functools
import hashlib
import json
import os
import pickle
import re
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from tqdm import tqdm

from families import t5
from model import CausalLM, LoRALinear, ModelConfig, add_lora
from runtime import adapter, ownership
from runtime.config_json import config_to_hf, read_config, read_json_object
from runtime.config_keys import ADAPTER_FIELDS
from runtime.errors import CheckpointError
from runtime.hub import download
from runtime.json_rules import check_values
from runtime.parallel import load_full, rank, shard

SHARD_BYTES = 5_000_000_000
# the names of types in a safetensors file; weights have one of the first four
TYPES = {torch.float64: 'F64', torch.float32: 'F32', torch.float16: 'F16', torch.bfloat16: 'BF16',
         torch.int16: 'I16', torch.uint8: 'U8', torch.bool: 'BOOL'}
# files that transformers and vLLM need besides the weights; copied from the base model's folder
SIDE_FILES = ('generation_config.json', 'tokenizer.json', 'tokenizer.model', 'tokenizer.model.v*',
              'tokenizer_config.json', 'special_tokens_map.json', 'added_tokens.json',
              'chat_template.jinja', 'original/tokenizer.model', 'spiece.model', 'tekken.json',
              'vocab.json', 'merges.txt')
ADAPTER_FILES = ('adapter_model.safetensors', 'adapter_config.json')
HEAD, EMBEDDING = 'lm_head.weight', 'model.embed_tokens.weight'
# what files hold besides the weights of a model of text: rotary frequencies, causal masks and their
# fill value; T5's copies of the embedding, and a table that it does not use; weights for images
BUFFERS = re.compile(r'.*rotary_emb\.inv_freq|gpt_neox\.layers\.\d+\.attention\.(masked_)?bias|'
                     r'(en|de)coder\.embed_tokens\.weight|'
                     r'decoder.*\.EncDecAttention\.relative_attention_bias\.weight|'
                     r'(model\.)?(vision_tower|multi_modal_projector)\..*')
# (part of our name, part of the name on disk) of a parameter, applied one after the other
LLAMA_NAMES = (('pre_feedforward_layernorm', 'post_attention_layernorm'),)
NAMES = {
    'gemma2': (), 'gemma3_text': (), 'olmo2': (), 'olmo3': (),
    'gpt_neox': (*LLAMA_NAMES, ('model.norm', 'gpt_neox.final_layer_norm'), ('model.', 'gpt_neox.'),
                 ('embed_tokens', 'embed_in'), ('lm_head', 'embed_out'),
                 ('self_attn.qkv_proj', 'attention.query_key_value'),
                 ('self_attn.o_proj', 'attention.dense'), ('mlp.up_proj', 'mlp.dense_h_to_4h'),
                 ('mlp.down_proj', 'mlp.dense_4h_to_h')),
    'opt': (('model.norm', 'model.final_layer_norm'), ('model.', 'model.decoder.'),
            ('input_layernorm', 'self_attn_layer_norm'), ('o_proj', 'out_proj'),
            ('pre_feedforward_layernorm', 'final_layer_norm'),
            ('post_attention_layernorm', 'self_attn_layer_norm'),
            ('post_feedforward_layernorm', 'final_layer_norm'),
            ('mlp.up_proj', 'fc1'), ('mlp.down_proj', 'fc2')),
    **dict.fromkeys(t5.ARCHITECTURES, (('model.embed_tokens', 'shared'),)),
}
# beginnings of names in models of text and images or in OPT's files, and those that are meant
PREFIXES = ((r'^language_model\.(?=model\.|lm_head)', ''), (r'^model\.language_model\.', 'model.'))
OPT_PREFIXES = ((r'^decoder\.', 'model.decoder.'),)


def their_key(key: str, config: ModelConfig) -> str:
    """Return the name on disk of a parameter, or of a part of one, such as an adapted layer."""
    for ours, theirs in NAMES.get(config.model_type, LLAMA_NAMES):
        key = key.replace(ours, theirs)
    return key


def build(config):
    """Return a model with this configuration: a CausalLM, or a Seq2Seq of families/t5.py."""
    return (t5.Seq2Seq if config.model_type in t5.ARCHITECTURES else CausalLM)(config)


def _text_key(stored: str, config) -> str:
    """Return the name of a tensor in a file as it is in a file of the text model alone."""
    for pattern, replacement in OPT_PREFIXES if config.model_type == 'opt' else PREFIXES:
        stored = re.sub(pattern, replacement, stored)
    return stored


# ------------------------------------------------------------------------------------------------
# Reading weights
# ------------------------------------------------------------------------------------------------

def fetch(name: str, revision: str | None = None, weights: bool = True) -> Path:
    """Return the folder of a model: `name` if that is a folder, else a snapshot from the hub.

    For a PEFT adapter it is a folder with the files of its base model, see runtime/adapter.py.
    weights: False downloads only its configuration and tokenizer
    """
    path = Path(os.path.expanduser(name))
    folder = path if path.is_dir() else _download(name, path, revision, weights)
    if not adapter.is_adapter(folder):
        return folder
    settings = adapter.read_settings(folder)
    try:
        base = fetch(settings['base_model_name_or_path'], settings.get('revision'), weights)
    except CheckpointError as error:
        raise CheckpointError(f'{folder / adapter.CONFIG}: the base model: {error}') from error
    return adapter.beside_base(folder, base)


def _download(name, path, revision, weights):
    if path.is_file():
        raise CheckpointError(f'{name} is a file; a model is the folder that holds its config.json')
    if name.startswith(('/', '.', '~')) or name.count('/') != 1:
        raise CheckpointError(f'no model folder at {name}, and it is not a hub name '
                              f'like google/gemma-2-2b')
    wanted = ['config.json', adapter.CONFIG, *SIDE_FILES,
              *['*.safetensors', '*.safetensors.index.json'] * weights]
    folder = download(name, wanted, revision, ignore=['original/*.safetensors', 'consolidated*'])
    if weights and not any(folder.glob('*.safetensors')):
        # older checkpoints, such as Pythia's at a training step, have only these
        folder = download(name, ['pytorch_model*.bin', 'pytorch_model*.bin.index.json',
                                 'adapter_model.bin'], revision)
    return folder


def load(folder: str | Path, device='cpu', dtype: torch.dtype | None = None,
         reward: bool = False, sharded: bool = False) -> CausalLM:
    """Return a CausalLM with the weights of `folder`, as `dtype` (None: the type in config.json).

    reward:  whether it must be a reward model, which has a score in place of the output matrix
    sharded: each process keeps its share of every weight: see `parallel.shard`
    Raises CheckpointError for the other kind, and as `read_config` and `check_weights` do.
    """
    config = read_config(folder, seq2seq=True)
    if getattr(config, 'reward', False) != reward:
        raise CheckpointError(f'{folder} is {"no" if reward else "a"} reward model: it has '
                              f'{"an output matrix" if reward else "a score"}, and '
                              f'{"a score" if reward else "an output matrix"} is needed')
    dtype = dtype or getattr(torch, config.dtype)
    files = check_weights(folder, config)
    with torch.device('meta'):
        model = build(config)
    if sharded:
        shard(model.to(dtype), device).to_empty(device=device)
    ours = {their_key(key, config): key for key, _ in model.named_parameters()}
    changes = adapter_changes(folder, config)
    for key, tensor in tqdm(_tensors(files), 'loading', len(files), unit=' tensors', delay=1,
                            disable=None):
        text_key = _text_key(key, config)
        parent, _, name = ours[text_key].rpartition('.')
        # a copy, not a view into the file, which may be replaced in the meantime
        weight = tensor.to(device, dtype, copy=True)
        if text_key in changes:
            weight = adapter.merged(weight, changes[text_key])
        if sharded:
            load_full(model.get_parameter(ours[text_key]), weight)
        else:
            setattr(model.get_submodule(parent), name, nn.Parameter(weight))
    return model


def adapter_changes(folder: str | Path, config: ModelConfig) -> dict[str, adapter.LowRank]:
    """Return what a PEFT adapter changes in its base model, {tensor: LowRank}; {} without one."""
    place = Path(folder) / adapter.LINK
    if not place.exists():
        return {}
    with _open(adapter.weights_file(place)) as file:
        names = {key: key.removeprefix(adapter.PREFIX) for key in file.keys()}
        tensors = {adapter.PREFIX + _text_key(name, config): file.get_tensor(key)
                   for key, name in names.items() if not BUFFERS.fullmatch(name)}
    return adapter.low_rank(place.resolve(), tensors, _shapes(config))


def _shapes(config):
    """Return {tensor of a model's files: its shape}."""
    with torch.device('meta'):
        return {their_key(k, config): [*p.shape] for k, p in build(config).named_parameters()}


def read_adapter(folder: str | Path) -> dict:
    """Return the adapter_config.json in the adapter/ of a run's folder; raises CheckpointError."""
    path = Path(folder) / 'adapter' / 'adapter_config.json'
    if not path.exists():
        raise CheckpointError(f'{folder} has no adapter/, which train.py --lora saves beside the '
                              f'merged weights')
    settings = read_json_object(path)
    check_values(settings, ADAPTER_FIELDS, path, 'adapter.', ADAPTER_FIELDS)
    return settings


def add_adapter(model: CausalLM, folder: str | Path):
    """Add the adapters in `folder`/adapter to their base model, in place.

    The softcap and the temperature of the logits become those of `folder`. Raises CheckpointError
    if the adapters do not fit the model; a model on the meta device is only checked.
    """
    settings, path = read_adapter(folder), Path(folder) / 'adapter' / ADAPTER_FILES[0]
    config = read_config(folder)
    model.config.final_logit_softcapping = config.final_logit_softcapping
    model.config.temperature = config.temperature
    ours = {their_key(f'{parent}.{layer}', model.config).rpartition('.')[2]: layer
            for parent in ('self_attn', 'mlp') for layer in model.config.family.lora_targets}
    try:
        add_lora(model, settings['r'], settings['lora_alpha'], settings['lora_dropout'],
                 [ours.get(name, name) for name in settings['target_modules']])
    except ValueError as error:
        raise CheckpointError(f'{path.parent}: {error}') from error
    wanted = {f'base_model.model.{their_key(name, model.config)}': p
              for name, p in model.named_parameters() if '.lora_' in name}
    with _open(path) as tensors:
        values = {key: tensors.get_tensor(key) for key in tensors.keys()}
    for key in sorted(values.keys() | wanted.keys()):
        shape, right = ([*x[key].shape] if key in x else None for x in (values, wanted))
        if shape != right:
            raise CheckpointError(f'{path}: tensor {key} has shape {shape}, the base model and '
                                  f'adapter_config.json want {right}')
        wanted[key].data.copy_(values[key])


def adapter_fingerprint(folder: str | Path) -> str:
    """Return a hash of the adapters in `folder`/adapter and of their settings."""
    files = (Path(folder) / 'adapter' / name for name in sorted(ADAPTER_FILES))
    return hashlib.blake2b(b''.join(file.read_bytes() for file in files),
                           digest_size=8).hexdigest()


def check_weights(folder: str | Path, config: ModelConfig) -> dict[str, Path]:
    """Check the headers of the weight files and return {tensor: its file}; read no weights but
    those of a PEFT adapter.

    Raises CheckpointError naming the damaged file, or the tensor that is missing, unknown,
    misshaped, quantized or listed twice. Only an output matrix beside tied embeddings is read; it
    must equal them. T5's may differ, and config.tie_word_embeddings becomes False then.
    """
    files = weight_files(Path(folder))
    adapter_changes(folder, config)
    for path in dict.fromkeys(files.values()):
        _check_header(path)
    stored = {_text_key(key, config): key for key in files}
    head, embedding = (stored.get(their_key(key, config)) for key in (HEAD, EMBEDDING))
    if config.tie_word_embeddings and head and embedding:
        # some tied checkpoints carry a copy of the embedding
        a, b = (x for _, x in _tensors({k: files[k] for k in (head, embedding)}))
        if a.dtype == b.dtype and torch.equal(a, b):
            del stored[_text_key(head, config)]
        elif config.model_type in t5.ARCHITECTURES:
            config.tie_word_embeddings = False
        else:
            raise CheckpointError(f'{files[head]}: tensor {head} differs from {embedding}, but '
                                  f'config.json has tie_word_embeddings = true: set that to false '
                                  f'to use both, or remove {head}')
    shapes = _shapes(config)
    stored = {text: key for text, key in stored.items()
              if text in shapes or not BUFFERS.fullmatch(key)}
    for problem, keys in (('is missing', shapes.keys() - stored.keys()),
                          ('is unknown to this architecture', stored.keys() - shapes.keys())):
        if keys:
            more = f' (and {len(keys) - 1} more)' if len(keys) > 1 else ''
            raise CheckpointError(f'{folder}: tensor {min(keys)}{more} {problem}')
    files = {key: files[key] for key in stored.values()}
    for key, tensor in _tensors(files):
        shape = shapes[_text_key(key, config)]
        if [*tensor.shape] != shape:
            raise CheckpointError(f'{files[key]}: tensor {key} has shape {[*tensor.shape]}, '
                                  f'config.json wants {shape}')
        if tensor.dtype not in [*TYPES][:4]:
            raise CheckpointError(f'{files[key]}: tensor {key} is {tensor.dtype}; quantized '
                                  f'weights are not supported')
    return files


def _check_header(path):
    """Raise CheckpointError if the header of a safetensors file lists a tensor twice."""
    if path.suffix != '.safetensors':
        return
    with _open(path), open(path, 'rb') as file:     # a header that _open accepts is valid JSON
        header = file.read(int.from_bytes(file.read(8), 'little'))
    keys = [key for key, _ in json.loads(header, object_pairs_hook=list)]
    if len(keys) > len(set(keys)):
        raise CheckpointError(f'{path}: {max(keys, key=keys.count)} is listed twice in the header; '
                              f'download or save the file again')


def weight_files(folder: Path) -> dict[str, Path]:
    """Return {tensor: its file}, from a single file or an index of shards.

    model.safetensors is preferred to pytorch_model.bin, from which no code is run.
    """
    for single in (folder / 'model.safetensors', folder / 'pytorch_model.bin'):
        index = single.with_name(f'{single.name}.index.json')
        if index.exists():
            names = read_json_object(index).get('weight_map')
            if not isinstance(names, dict) or not names:
                raise CheckpointError(f'{index}: not an index of shards: weight_map must be an '
                                      f'object')
            here = [path.name for path in folder.glob(f'*{single.suffix}')]
            for name in names.values():
                if name not in here:
                    raise CheckpointError(f'{index} names {name!r}, which is not a {single.suffix} '
                                          f'file in this folder; download it again')
            if single.exists() and single.name not in names.values():
                raise CheckpointError(f'{folder} holds two models: {single.name}, and the shards '
                                      f'of {index.name}; remove the one that is out of date')
            return {key: folder / name for key, name in names.items()}
        if single.exists():
            with _open(single) as tensors:
                return dict.fromkeys(tensors.keys(), single)
    raise CheckpointError(f'{folder} has no model.safetensors, no pytorch_model.bin and no index '
                          f'of shards; .pth files are not read: convert them to safetensors')


class _PickledTensors(dict):
    """The tensors of a pytorch_model.bin, mapped, with the method of safe_open used here."""
    get_tensor = dict.__getitem__


@functools.lru_cache(4)
def _read_pickle(path, _time):
    try:
        tensors = torch.load(path, 'cpu', mmap=True, weights_only=True)
        if not (isinstance(tensors, dict)
                and all(isinstance(x, torch.Tensor) for x in tensors.values())):
            raise TypeError('not a dict of tensors')
        return _PickledTensors(tensors)
    except (RuntimeError, OSError, EOFError, ValueError, TypeError,
            pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"{path}: truncated, not a file of weights, or written by torch before 1.6 "
            f"({type(error).__name__}); download it again, or convert it in Python: "
            f"torch.save(torch.load('{path}', 'cpu', weights_only=True), '{path}')") from error


@contextlib.contextmanager
def _open(path):
    """Open a file of weights; raise a CheckpointError that names the file if that fails."""
    if not path.is_file():      # a FIFO would wait for a writer
        raise CheckpointError(f'{path} is not a regular file')
    try:
        open(path, 'rb').close()    # safe_open would not tell a missing permission from damage
    except OSError as error:
        raise CheckpointError(f'{path} cannot be read: {error.strerror}') from error
    if path.suffix == '.bin':
        yield _read_pickle(path, path.stat().st_mtime_ns)
        return
    try:
        with safe_open(path, framework='pt') as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f'{path}: truncated, out of date or not a safetensors file '
                              f'({error}); download or save it again') from error
    except RuntimeError as error:       # of torch, for example for too many open files
        raise CheckpointError(f'{path} cannot be read: {error}') from error


def _tensors(files):
    """Yield (key, tensor) of {key: path}; the tensor is mapped, and read when it is used."""
    for key, path in files.items():
        with _open(path) as file:   # for each tensor: pages that stay mapped count as our memory
            yield key, file.get_tensor(key)


def nonfinite_tensor(folder: str | Path) -> str | None:
    """Return the name of the first tensor of a model folder with NaN or infinity in it, or None."""
    for key, tensor in _tensors(weight_files(Path(folder))):
        # the fill value of Pythia's masks, -1e9, is minus infinity in float16
        if (tensor.is_floating_point() and not tensor.isfinite().all()
                and not BUFFERS.fullmatch(key)):
            return key
    return None


def bad_logits(where: str, folder: str | Path, dtype: str) -> str:
    """Return the message for NaN or infinite logits: which tensor is damaged, if one is."""
    if name := nonfinite_tensor(folder):
        cause = f'{name} in {folder} holds NaN or infinity: download or train the model again'
    elif dtype == 'float32':
        cause = (f'the weights in {folder} are finite, but activations overflow even in float32: '
                 f'check config.json, or train the model again with a lower lr')
    else:
        cause = (f'the weights in {folder} are finite; activations probably overflow in {dtype}: '
                 f'compute in float32 (evaluate.py --dtype=float32, sample.py --device=cpu)')
    return f'{where}: the model gives NaN or infinite logits; {cause}'


def fingerprint(folder: str | Path) -> str:
    """Return a hash of the values in config.json and of a sample of every tensor.

    The sample is the tensor's name, type, shape and 16 blocks of 4 KiB spread evenly over its
    bytes: under a second for a model of 16 GB on an SSD. Shards and formatting do not matter.
    """
    config = json.dumps(read_json_object(Path(folder) / 'config.json'), sort_keys=True)
    total = hashlib.blake2b(config.encode(), digest_size=8)
    for key, tensor in _tensors(dict(sorted(weight_files(Path(folder)).items()))):
        data = tensor.contiguous().view(-1).view(torch.uint8).numpy()
        offsets = (range(0, data.size, 4096) if data.size <= 16 * 4096 else
                   [i * (data.size - 4096) // 15 for i in range(16)])
        kind = TYPES.get(tensor.dtype, tensor.dtype)
        digest = hashlib.blake2b(f'{key} {kind} {[*tensor.shape]}'.encode())
        for offset in offsets:
            digest.update(data[offset:offset + 4096])
        total.update(digest.digest())
    if (place := Path(folder) / adapter.LINK).exists():
        total.update(adapter.fingerprint(place))
    return total.hexdigest()


# ------------------------------------------------------------------------------------------------
# Writing
# ------------------------------------------------------------------------------------------------

def save(model: CausalLM, folder: str | Path, dtype: torch.dtype,
         side_files: str | Path | None = None, *, full=Tensor.detach, more: dict | None = None,
         owner: str | Path | None = None) -> list[str]:
    """Write config and weights as `dtype`, in shards of at most 5 GB; return the files' names.

    LoRA is merged in float32. config.json is renamed last: a folder that has it is complete. Every
    process must call this; the first one writes.

    side_files:      the folder of the base model, whose tokenizer and generation files are copied
    full(parameter): the tensor to write, such as the float32 master, whole on every process
    more:            {name: text, or the content of a JSON file}; these replace side files
    owner:           the folder of the run, whose list gets the names before the files are written

    Raises CheckpointError, ConfigError (as `ownership.claim`) or OSError.
    """
    files = _files(model, folder, dtype, side_files, full, more)
    _write(folder, files, owner)
    config = files['config.json']
    if rank() == 0 and 'nanocal' in config:
        print(f'note: only this program applies {config["nanocal"]}, the key nanocal in '
              f'{Path(folder) / "config.json"}; transformers and vLLM will not')
    return list(files)


def saved_names(config: ModelConfig, folder, dtype, side_files=None, more=None) -> list[str]:
    """Return the names of the files that `save` would write for a model with this config."""
    with torch.device('meta'):
        return list(_files(CausalLM(config), folder, dtype, side_files, None, more))


def _files(model, folder, dtype, side_files, full, more):
    """Return {name: content as in `_write`} of a model's files, config.json last."""
    from huggingface_hub import split_torch_state_dict_into_shards
    ours = {their_key(key, model.config): key
            for key, _ in model.named_parameters()
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
    """Return {name on disk: tensor} for a shard, LoRA merged in float32, on the CPU.

    keys: {name on disk: our name}
    """
    tensors = {}
    for theirs, key in keys.items():
        tensor, layer = full(model.get_parameter(key)), model.get_submodule(key.rpartition('.')[0])
        if isinstance(layer, LoRALinear) and key.endswith('.weight'):
            low_rank = full(layer.lora_B.weight) @ full(layer.lora_A.weight)
            tensor = tensor.float() + layer.scale * low_rank
        tensors[theirs] = tensor.to(dtype).cpu().contiguous()
    return tensors


def save_adapter(model: CausalLM, folder: str | Path, base: str, *, full=Tensor.detach,
                 owner: str | Path | None = None) -> list[str]:
    """Write the adapters alone, in the folder that `peft` loads beside the model `base`.

    full, owner: as in `save`. Returns the names of the files, relative to `folder`.
    """
    adapted = {their_key(name, model.config): m for name, m in model.named_modules()
               if isinstance(m, LoRALinear)}
    tensors = {f'base_model.model.{name}.{part}.weight':
               full(getattr(m, part).weight).cpu().contiguous()
               for name, m in adapted.items() for part in ('lora_A', 'lora_B')}
    layer = next(iter(adapted.values()))    # all have the same rank, alpha and dropout
    r = layer.lora_A.out_features
    config = {'peft_type': 'LORA', 'task_type': 'CAUSAL_LM', 'base_model_name_or_path': base,
              'r': r, 'lora_alpha': layer.scale * r, 'lora_dropout': layer.dropout.p,
              'target_modules': sorted({name.rpartition('.')[2] for name in adapted}),
              'bias': 'none', 'fan_in_fan_out': False, 'inference_mode': True}
    files = dict(zip(ADAPTER_FILES, (lambda: tensors, config), strict=True))
    _write(folder, files, owner)
    return list(files)


def _write(folder, files, owner):
    """Write all files under temporary names, then rename them, the last one of `files` last.

    files: {name: a path to copy, a function that returns tensors, text, or the content of a JSON
    file}. Every process calls the functions, which gather tensors; the first one writes.
    """
    folder = Path(folder)
    if rank() == 0 and owner is not None:
        ownership.claim(owner, *files, below=folder.relative_to(owner))
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
    """Write a safetensors file of CPU tensors.

    safetensors' own function, if killed, leaves a file under a name of its own; and nobody but the
    user may read what it writes.
    """
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
