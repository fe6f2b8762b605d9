"""A model folder in the Hugging Face layout: config.json, safetensors, adapters, the hub.

Every configuration is either computed as transformers computes it or refused with the key named.
What is written here loads in transformers, vLLM and peft. Also here: which device and type 'auto'
stands for.
"""

import difflib
import hashlib
import json
import os
import re
import shutil
from dataclasses import asdict, fields
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

from configs import ConfigError
from data.tokenizer import load_tokenizer
from model import CausalLM, LoRALinear, ModelConfig

SHARD_BYTES = 5_000_000_000
# what transformers and vLLM want beside the weights; copied from the folder of the base model
SIDE_FILES = ('generation_config.json', 'tokenizer.json', 'tokenizer.model', 'tokenizer.model.v*',
              'tokenizer_config.json', 'special_tokens_map.json', 'added_tokens.json',
              'chat_template.jinja', 'original/tokenizer.model')
HEAD, EMBEDDING = 'lm_head.weight', 'model.embed_tokens.weight'


class CheckpointError(ValueError):
    """A model folder, config or weight file that cannot be used; the message names it."""


# ------------------------------------------------------------------------------------------------
# config.json
# ------------------------------------------------------------------------------------------------

ARCHITECTURES = {'llama': 'LlamaForCausalLM', 'mistral': 'MistralForCausalLM',
                 'gemma2': 'Gemma2ForCausalLM'}
ACTIVATIONS = {'llama': 'silu', 'mistral': 'silu', 'gemma2': 'gelu_pytorch_tanh'}
# keys that only some architectures have; transformers ignores them in the others
WINDOWED = {'sliding_window', 'layer_types'}
GEMMA_ONLY = {'query_pre_attn_scalar', 'attn_logit_softcapping', 'final_logit_softcapping'}
FOREIGN = {'llama': WINDOWED | GEMMA_ONLY, 'mistral': GEMMA_ONLY, 'gemma2': set()}
# what transformers assumes for a missing key, where that differs from the defaults of ModelConfig
DEFAULTS = {
    'llama': {},
    'mistral': {'num_key_value_heads': 8, 'sliding_window': 4096,
                'max_position_embeddings': 131072},
    'gemma2': {'num_key_value_heads': 4, 'tie_word_embeddings': True, 'sliding_window': 4096,
               'head_dim': 256, 'query_pre_attn_scalar': 256, 'max_position_embeddings': 8192,
               'attn_logit_softcapping': 50.0, 'final_logit_softcapping': 30.0},
}


# A rule for a value: (its description, its test).

def _integer(low, high=2**31 - 1):
    return f'an integer from {low} to {high}', lambda v: type(v) is int and low <= v <= high


def _number(low, high):
    return (f'a number from {low:g} to {high:g}',
            lambda v: type(v) in (int, float) and low <= v <= high)


def _one_of(*values):
    return (' or '.join(map(json.dumps, values)),
            lambda v: any(type(v) is type(value) and v == value for value in values))


def _list_of(item):
    return (f'a list, each item {item[0]}',
            lambda v: type(v) is list and v != [] and all(map(item[1], v)))


def _either(*rules):
    return ', or '.join(text for text, _ in rules), lambda v: any(test(v) for _, test in rules)


NULL, FLAG, TEXT = _one_of(None), _one_of(True, False), ('a string', lambda v: type(v) is str)
TOKEN_IDS = _either(_integer(0), _list_of(_integer(0)), NULL)
CAP = _either(_number(1e-3, 1e6), NULL)
OBJECT = _either(('an object', lambda v: type(v) is dict), NULL)
DTYPE = _either(_one_of('float32', 'bfloat16', 'float16', 'float64'), NULL)
# The rule for every known key of a config.json. Values that transformers computes in a way that is
# not implemented here do not pass, and so are refused.
FIELDS = {
    'vocab_size': _integer(1), 'hidden_size': _integer(1, 2**20),
    'intermediate_size': _integer(1, 2**24), 'num_hidden_layers': _integer(1, 10_000),
    'num_attention_heads': _integer(1, 2**16),
    'num_key_value_heads': _either(_integer(1, 2**16), NULL),
    'head_dim': _either(_integer(2, 2**16), NULL), 'max_position_embeddings': _integer(1),
    'rms_norm_eps': _number(1e-12, 1), 'rope_theta': _number(1, 1e30),
    'tie_word_embeddings': FLAG, 'sliding_window': _either(_integer(1), NULL),
    'layer_types': _either(_list_of(_one_of('sliding_attention', 'full_attention')), NULL),
    'query_pre_attn_scalar': _integer(1), 'attn_logit_softcapping': CAP,
    'final_logit_softcapping': CAP, 'initializer_range': _number(0, 1),
    'bos_token_id': TOKEN_IDS, 'eos_token_id': TOKEN_IDS, 'pad_token_id': TOKEN_IDS,
    'dtype': DTYPE, 'torch_dtype': DTYPE,
    'architectures': _either(_list_of(TEXT), NULL), 'transformers_version': _either(TEXT, NULL),
    'use_cache': FLAG, 'attention_dropout': _number(0, 1),
    'attention_bias': _one_of(False), 'mlp_bias': _one_of(False),
    'pretraining_tp': _one_of(1, None), 'use_bidirectional_attention': _one_of(False, None),
    'is_causal': _one_of(True), 'partial_rotary_factor': _one_of(1.0, None),
    'per_layer_config': NULL, 'quantization_config': NULL,
    'rope_parameters': OBJECT, 'rope_scaling': OBJECT, 'nanocal': OBJECT,
}
FLOATS = {'rms_norm_eps', 'initializer_range', 'attn_logit_softcapping', 'final_logit_softcapping'}
# keys that may not be null, although they may in other architectures
NOT_NULL = {'llama': set(), 'mistral': {'num_key_value_heads'},
            'gemma2': {'num_key_value_heads', 'head_dim', 'sliding_window'}}
ROPE_TYPE = _one_of('default', 'llama3')
LLAMA3_ROPE = {'factor': _number(1, 1e6), 'low_freq_factor': _number(1e-6, 1e6),
               'high_freq_factor': _number(1e-6, 1e6),
               'original_max_position_embeddings': _integer(1)}
ROPE_FIELDS = LLAMA3_ROPE | {'rope_type': ROPE_TYPE, 'type': ROPE_TYPE,
                             'rope_theta': FIELDS['rope_theta'],
                             'partial_rotary_factor': _one_of(1.0)}
# our own block `nanocal`: logits = softcap * tanh(hidden @ head.T / (temperature * softcap))
NANOCAL_FIELDS = {'softcap': CAP, 'temperature': _number(1e-3, 1e3)}
ROPE_BLOCKS = ('rope_parameters', 'rope_scaling')   # of transformers 5 and 4


def read_config(folder: str | Path, changes: dict | None = None) -> ModelConfig:
    """Read the config.json of `folder`, with `changes` to its keys.

    A change applies to the resolved value: {'rope_theta': 5e5} works for files that have it in
    rope_parameters, too. Raises CheckpointError, also for a key that the architecture lacks.
    """
    path = Path(folder) / 'config.json'
    try:
        raw = json.loads(path.read_text(encoding='utf-8'))
    except FileNotFoundError:
        raise CheckpointError(_not_a_model(Path(folder))) from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f'{path}: not valid JSON: {error}') from error
    config = config_from_hf(raw, str(path))     # first of all the file itself must be valid
    if not changes:
        return config
    raw = {k: v for k, v in raw.items() if k not in ROPE_BLOCKS}
    if 'rope_parameters' not in changes:
        raw['rope_scaling'] = config.rope_scaling
    block = changes.get('rope_parameters') or changes.get('rope_scaling') or {}
    raw['rope_theta'] = block.get('rope_theta', config.rope_theta)
    if 'torch_dtype' in changes:
        raw.pop('dtype', None)
    kind = changes.get('model_type', config.model_type)
    foreign = FOREIGN[kind] if kind in tuple(FOREIGN) else set()
    known = (raw.keys() | FIELDS.keys() | {'hidden_act', 'hidden_activation'}) - foreign
    for key in changes.keys() - known:
        near = difflib.get_close_matches(key, known, n=1)
        hint = f'; did you mean {near[0]!r}?' if near else ''
        raise CheckpointError(f'shape: {kind} has no key {key!r} in its config.json{hint}')
    return config_from_hf(raw | changes, f'{path} with shape = {changes}')


def _not_a_model(folder):
    if not (folder / 'adapter_config.json').exists():
        return f'{folder} is not a model folder: it has no config.json'
    merged = folder.resolve().parent
    where = (f'the merged model is in {merged}' if (merged / 'config.json').exists() else
             'merge them into the base model that adapter_config.json names')
    return f'{folder} holds LoRA adapters alone, which are not a model; {where}'


def config_from_hf(raw: dict, where: str = 'config.json') -> ModelConfig:
    """The ModelConfig of a parsed `config.json` of transformers 4 or 5.

    Raises CheckpointError that begins with `where` and names the key.
    """
    kind = raw.get('model_type') if isinstance(raw, dict) else None
    if kind not in tuple(ARCHITECTURES):
        raise CheckpointError(f'{where}: model_type is {kind!r}; this program reads '
                              f'{", ".join(ARCHITECTURES)}')
    activation = dict.fromkeys(('hidden_act', 'hidden_activation'), _one_of(ACTIVATIONS[kind]))
    rules = {k: rule for k, rule in (FIELDS | activation).items() if k not in FOREIGN[kind]}
    _check_values(raw, rules, where)
    names = {f.name for f in fields(ModelConfig)} - {'extra', 'temperature'} - FOREIGN[kind]
    values = DEFAULTS[kind] | {k: v for k, v in raw.items() if k in names}
    values['rope_theta'], values['rope_scaling'] = _resolve_rope(raw, where)
    values['dtype'] = raw.get('dtype') or raw.get('torch_dtype') or 'float32'
    values['extra'] = {k: v for k, v in raw.items() if k not in names | FOREIGN[kind] and k not in
                       (*ROPE_BLOCKS, 'nanocal', 'torch_dtype', 'architectures', *activation)}
    block = raw.get('nanocal') or {}
    _check_values(block, NANOCAL_FIELDS, where, 'nanocal.', strict=True)
    values['temperature'] = float(block.get('temperature', 1.0))
    if 'softcap' in block:
        if kind == 'gemma2':
            raise CheckpointError(f'{where}: nanocal.softcap is for other models; gemma2 has '
                                  f'final_logit_softcapping')
        values['final_logit_softcapping'] = block['softcap']
    for key in ('vocab_size', 'hidden_size', 'intermediate_size', 'num_hidden_layers',
                'num_attention_heads'):
        if key not in values:
            raise CheckpointError(f'{where}: {key} is missing; it must be {FIELDS[key][0]}')
    for key in NOT_NULL[kind]:
        if values[key] is None:
            raise CheckpointError(f'{where}: {key} = None is not supported for {kind}')
    for key in FLOATS & values.keys():      # transformers refuses an integer for them
        values[key] = None if values[key] is None else float(values[key])
    config = ModelConfig(**values)
    _check_shape(config, where)
    return config


def config_to_hf(config: ModelConfig) -> dict:
    """The content of a `config.json` that transformers 4 and 5 and vLLM read."""
    values, kind = asdict(config), config.model_type
    extra = values.pop('extra')
    values['torch_dtype'] = values.pop('dtype')
    block = {} if config.temperature == 1 else {'temperature': config.temperature}
    del values['temperature']
    if config.final_logit_softcapping and 'final_logit_softcapping' in FOREIGN[kind]:
        block['softcap'] = config.final_logit_softcapping
    if block:
        values['nanocal'] = block
    if config.layer_types is None:      # transformers takes a Mistral with this key for a Ministral
        del values['layer_types']
    values = {k: v for k, v in values.items() if k not in FOREIGN[kind]}
    values['hidden_activation' if kind == 'gemma2' else 'hidden_act'] = ACTIVATIONS[kind]
    return extra | {'architectures': [ARCHITECTURES[kind]]} | values


def _check_values(values, rules, where, prefix='', strict=False):
    """Raise CheckpointError for a value that breaks its rule and, if strict, for any other key."""
    for key in values.keys() - rules.keys() if strict else ():
        raise CheckpointError(f'{where}: {prefix}{key} is not supported; the keys are '
                              f'{", ".join(rules)}')
    for key in sorted(values.keys() & rules.keys()):
        description, valid = rules[key]
        if not valid(values[key]):
            raise CheckpointError(f'{where}: {prefix}{key} = {values[key]!r} is not supported; it '
                                  f'must be {description}')


def _check_shape(config, where):
    """Raise CheckpointError if the values do not fit each other."""
    D, H, K = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    n_layers, n_types = config.num_hidden_layers, len(config.layer_types or ())
    for wrong, problem in (
            (D % H, f'hidden_size = {D} is not a multiple of num_attention_heads = {H}'),
            (H % K, f'num_attention_heads = {H} is not a multiple of num_key_value_heads = {K}'),
            (config.head_dim % 2,
             f'head_dim = {config.head_dim} is odd; rotary positions need pairs'),
            (n_types not in (0, n_layers),
             f'layer_types has {n_types} items for num_hidden_layers = {n_layers}'),
            (n_types and config.sliding_window is None,
             'sliding_window = None beside layer_types; it must be an integer')):
        if wrong:
            raise CheckpointError(f'{where}: {problem}')


def _resolve_rope(raw, where):
    """(rope_theta, the 'llama3' scheme or None) of a config.json.

    transformers 4 has rope_theta and rope_scaling, transformers 5 has both in rope_parameters.
    Raises CheckpointError if they disagree, or for a scheme that is not implemented.
    """
    resolved = [_resolve_rope_block(raw, key, where) for key in ROPE_BLOCKS if raw.get(key)]
    if len(resolved) == 2:
        _check_equal('rope_parameters', resolved[0], 'rope_scaling', resolved[1], where)
    return resolved[0] if resolved else (float(raw.get('rope_theta', 10000.0)), None)


def _resolve_rope_block(raw, key, where):
    block = raw[key]
    # strict: transformers also has blocks with one scheme per layer type
    _check_values(block, ROPE_FIELDS, where, f'{key}.', strict=True)
    kind = block.get('rope_type', block.get('type', 'default'))
    _check_equal(f'{key}.type', block.get('type', kind), f'{key}.rope_type', kind, where)
    for name in ('rope_theta', 'original_max_position_embeddings'):     # also beside the block
        if name in raw and name in block:
            _check_equal(name, raw[name], f'{key}.{name}', block[name], where)
    theta = float(block.get('rope_theta', raw.get('rope_theta', 10000.0)))
    scheme = {name: block[name] for name in LLAMA3_ROPE if name in block}
    if kind == 'default':
        for name in scheme:
            raise CheckpointError(f"{where}: {key}.{name} has no meaning for rope_type 'default'; "
                                  f"name the rope_type, or remove it")
        return theta, None
    for name in LLAMA3_ROPE.keys() - scheme.keys():
        raise CheckpointError(f"{where}: {key} of rope_type 'llama3' lacks {name}")
    low, high = scheme['low_freq_factor'], scheme['high_freq_factor']
    if high <= low:
        raise CheckpointError(f'{where}: {key}.high_freq_factor = {high} must be greater than '
                              f'low_freq_factor = {low}')
    return theta, {'rope_type': 'llama3'} | scheme


def _check_equal(name, value, other, other_value, where):
    if value != other_value:
        raise CheckpointError(f'{where}: {name} = {value!r} and {other} = {other_value!r} '
                              f'disagree; remove the wrong one')


# ------------------------------------------------------------------------------------------------
# Reading weights
# ------------------------------------------------------------------------------------------------

def fetch(name: str, revision: str | None = None) -> Path:
    """The folder of a model: `name` if that is a folder, else a snapshot from the hub."""
    path = Path(os.path.expanduser(name))
    if path.is_dir():
        return path
    if path.is_file():
        raise CheckpointError(f'{name} is a file; a model is the folder that holds its config.json')
    if name.startswith(('/', '.', '~')) or name.count('/') != 1:
        raise CheckpointError(f'no model folder at {name}, and it is not a hub name '
                              f'like google/gemma-2-2b')
    return download(name, ['config.json', '*.safetensors', '*.safetensors.index.json', *SIDE_FILES],
                    revision, ignore=['original/*.safetensors', 'consolidated*'])


def download(name: str, patterns, revision: str | None = None, repo_type: str = 'model',
             ignore=()) -> Path:
    """The local snapshot of a hub repository with the files that match one of `patterns`.

    repo_type: 'model' or 'dataset'. Raises CheckpointError.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError
    try:
        return Path(snapshot_download(name, repo_type=repo_type, revision=revision,
                                      allow_patterns=list(patterns), ignore_patterns=list(ignore)))
    except GatedRepoError as error:
        raise CheckpointError(f'{name} is gated: accept its license on the hub, then run '
                              f'`hf auth login`') from error
    except Exception as error:  # the hub raises many kinds, of its own and of its HTTP client
        reason = str(error).strip().split('\n')[0]
        raise CheckpointError(f'there is no file or folder {name}, and downloading the {repo_type} '
                              f'{name} from the hub failed ({type(error).__name__}: {reason}); '
                              f'check the name and the network') from error


def load(folder: str | Path, device='cpu', dtype: torch.dtype | None = None) -> CausalLM:
    """A CausalLM with the weights of `folder`, as `dtype` (None: the type in config.json).

    Tensors are read one at a time, so there is never a second copy of the model. Raises
    CheckpointError as `read_config` and `check_weights` do.
    """
    config = read_config(folder)
    dtype = dtype or getattr(torch, config.dtype)
    files = check_weights(folder, config)
    with torch.device('meta'):
        model = CausalLM(config)
    shards = sorted(set(files.values()))
    for path in tqdm(shards, 'loading', unit=' shards', disable=len(shards) == 1):
        with _open(path) as tensors:
            for key in (k for k, f in files.items() if f == path):
                parent, _, name = key.rpartition('.')
                # a copy, not a view into the file, which may be replaced in the meantime
                tensor = tensors.get_tensor(key).to(device, dtype, copy=True)
                setattr(model.get_submodule(parent), name, nn.Parameter(tensor))
    return model


def check_weights(folder: str | Path, config: ModelConfig) -> dict[str, Path]:
    """{parameter: its safetensors file}, after a check of the headers; no weights are read.

    Raises CheckpointError naming the tensor that is missing, unknown, misshaped or quantized, or
    the damaged file. An output matrix beside tied embeddings is read, and must equal them.
    """
    folder = Path(folder)
    with torch.device('meta'):
        shapes = {k: list(p.shape) for k, p in CausalLM(config).named_parameters()}
    files = weight_files(folder)
    if config.tie_word_embeddings and {HEAD, EMBEDDING} <= files.keys():
        _check_tied(files)
    # old Llama conversions carry rotary buffers, some tied checkpoints a copy of the embedding
    files = {k: f for k, f in files.items() if k in shapes or not (
        k.endswith('rotary_emb.inv_freq') or k == HEAD)}
    for problem, keys in (('is missing', shapes.keys() - files.keys()),
                          ('is unknown to this architecture', files.keys() - shapes.keys())):
        if keys:
            more = f' (and {len(keys) - 1} more)' if len(keys) > 1 else ''
            raise CheckpointError(f'{folder}: tensor {min(keys)}{more} {problem}')
    for path in sorted(set(files.values())):
        with _open(path) as tensors:
            present = set(tensors.keys())
            for key in (k for k, f in files.items() if f == path):
                if key not in present:
                    raise CheckpointError(f'{path}: tensor {key} is missing, though the index puts '
                                          f'it there')
                tensor = tensors.get_slice(key)
                if tensor.get_shape() != shapes[key]:
                    raise CheckpointError(f'{path}: tensor {key} has shape {tensor.get_shape()}, '
                                          f'config.json wants {shapes[key]}')
                if tensor.get_dtype() not in ('F64', 'F32', 'F16', 'BF16'):
                    raise CheckpointError(f'{path}: tensor {key} is {tensor.get_dtype()}; '
                                          f'quantized weights are not supported')
    return files


def _check_tied(files):
    with _open(files[HEAD]) as a, _open(files[EMBEDDING]) as b:
        head, embedding = a.get_slice(HEAD), b.get_slice(EMBEDDING)
        shape = head.get_shape()
        if shape == embedding.get_shape() and all(      # some rows at a time: both may be large
                torch.equal(head[i:i + 4096].float(), embedding[i:i + 4096].float())
                for i in range(0, shape[0], 4096)):
            return
    raise CheckpointError(f'{files[HEAD]}: tensor {HEAD} differs from {EMBEDDING}, but config.json '
                          f'has tie_word_embeddings = true: set that to false to use both, or '
                          f'remove {HEAD}')


def weight_files(folder: Path) -> dict[str, Path]:
    """{tensor name: safetensors file}, from the single file or the index of shards."""
    index, single = folder / 'model.safetensors.index.json', folder / 'model.safetensors'
    if index.exists():
        try:
            names = json.loads(index.read_text(encoding='utf-8'))['weight_map'].items()
            names = {str(key): str(name) for key, name in names}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f'{index}: not a safetensors index: {error!r}') from error
        for name in sorted(set(names.values())):
            if not re.fullmatch(r'[\w.-]+\.safetensors', name):
                raise CheckpointError(f'{index}: refuses {name!r}: a shard is a .safetensors file '
                                      f'in the same folder')
            if not (folder / name).exists():
                raise CheckpointError(f'{index} names {name}, which is not there; '
                                      f'download it again')
        if single.exists() and single.name not in names.values():
            raise CheckpointError(f'{folder} holds two models: {single.name}, and the shards of '
                                  f'{index.name}; remove the one that is out of date')
        return {key: folder / name for key, name in names.items()}
    if single.exists():
        with _open(single) as tensors:
            return {key: single for key in tensors.keys()}  # noqa: SIM118, not a dict
    hint = ''
    if any(folder.glob('*.bin')) or any(folder.glob('*.pth')):
        hint = '; its .bin or .pth files are not read: convert them to safetensors'
    raise CheckpointError(f'{folder} has no model.safetensors and no index of shards{hint}')


def _open(path):
    try:
        return safe_open(path, framework='pt')
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f'{path}: truncated or not a safetensors file ({error}); '
                              f'download or save it again') from error


def nonfinite_tensor(folder: str | Path) -> str | None:
    """The name of the first tensor of a model folder with NaN or infinity in it, or None."""
    for key, path in weight_files(Path(folder)).items():
        with _open(path) as tensors:
            tensor = tensors.get_tensor(key)
        if tensor.is_floating_point() and not tensor.isfinite().all():
            return key
    return None


def fingerprint(folder: str | Path) -> str:
    """A hash of a model: of the values in config.json and of a sample of every tensor.

    The sample is the name, type and shape of the tensor and 16 blocks of 4 KiB spread evenly over
    its bytes: under a second for a model of 16 GB on an SSD. The formatting of config.json and the
    split into shards do not matter.
    """
    folder = Path(folder)
    files, digests = weight_files(folder), {}
    for path in sorted(set(files.values())):
        with _open(path), open(path, 'rb', buffering=0) as file:
            size = int.from_bytes(file.read(8), 'little')
            header = json.loads(file.read(size))
            for key in (k for k, f in files.items() if f == path and k in header):
                start, end = header[key]['data_offsets']
                offsets = range(start, end, 4096)
                if len(offsets) > 16:
                    offsets = [start + i * (end - start - 4096) // 15 for i in range(16)]
                described = f'{key} {header[key]["dtype"]} {header[key]["shape"]}'
                digests[key] = hashlib.blake2b(described.encode())
                for offset in offsets:
                    file.seek(8 + size + offset)
                    digests[key].update(file.read(min(4096, end - offset)))
    config = json.loads((folder / 'config.json').read_text(encoding='utf-8'))
    whole = hashlib.blake2b(json.dumps(config, sort_keys=True).encode(), digest_size=8)
    for key in sorted(digests):
        whole.update(digests[key].digest())
    return whole.hexdigest()


# ------------------------------------------------------------------------------------------------
# Writing: every file under a temporary name first; all are renamed when every byte is on disk
# ------------------------------------------------------------------------------------------------

def save(model: CausalLM, folder: str | Path, dtype: torch.dtype,
         side_files: str | Path | None = None, full=None, write: bool = True, claim=None
         ) -> list[str]:
    """Write config and weights as `dtype` in the Hugging Face layout, in shards of at most 5 GB.

    LoRA is merged in float32. config.json is renamed last: a folder that has it is complete. No
    other file of the folder is touched. Returns the names of the files, relative to `folder`.

    side_files:      the folder of the base model; its tokenizer and generation files are copied
    full(parameter): the tensor to write for a parameter, if that is not the parameter itself: the
                     float32 master copy, or what FSDP2 spreads over processes, gathered
    write:           False in all processes but one; `full` runs in all of them
    claim(*names):   called with the names of the files before any of them is written

    Raises CheckpointError or OSError.
    """
    folder, full = Path(folder), full or Tensor.detach
    shards, copies, texts = _plan(model, folder, dtype, side_files)
    names = [*shards, *copies, *texts]
    parameters, modules = dict(model.named_parameters()), dict(model.named_modules())
    if write:
        if claim:
            claim(*names)
        folder.mkdir(parents=True, exist_ok=True)
    try:
        for name, keys in shards.items():       # one shard in memory at a time
            tensors = {}
            for key in keys:
                tensor, owner = full(parameters[key]), modules[key.rpartition('.')[0]]
                if isinstance(owner, LoRALinear):
                    low_rank = full(owner.lora_B.weight) @ full(owner.lora_A.weight)
                    tensor = tensor.float() + owner.scale * low_rank
                tensors[key] = tensor.to(dtype).cpu().contiguous()
            if write:
                write_tensors(folder / f'{name}.tmp', tensors)
        if write:
            for name, source in copies.items():
                (folder / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(source, folder / f'{name}.tmp')
            for name, content in texts.items():
                _write_json(folder / f'{name}.tmp', content)
            for name in names:
                os.replace(folder / f'{name}.tmp', folder / name)
            if 'nanocal' in texts['config.json']:
                print(f'note: only this program applies {texts["config.json"]["nanocal"]}, the key '
                      f'nanocal in {folder / "config.json"}; transformers and vLLM will not')
    finally:
        for name in names if write else ():
            (folder / f'{name}.tmp').unlink(missing_ok=True)
    return names


def _plan(model, folder, dtype, side_files):
    """({shard: its keys}, {file to copy: its source}, {JSON file: its content}), in that order."""
    from huggingface_hub import split_torch_state_dict_into_shards
    shapes = {key: torch.empty(p.shape, dtype=dtype, device='meta')
              for key, p in model.named_parameters() if '.lora_' not in key}
    split = split_torch_state_dict_into_shards(shapes, max_shard_size=SHARD_BYTES)
    copies = {}
    if side_files is not None and Path(side_files).resolve() != folder.resolve():
        copies = {str(path.relative_to(side_files)): path for pattern in SIDE_FILES
                  for path in sorted(Path(side_files).glob(pattern))}
    config = config_to_hf(model.config) | {'torch_dtype': str(dtype).removeprefix('torch.')}
    index = {'metadata': split.metadata, 'weight_map': split.tensor_to_filename}
    texts = {'model.safetensors.index.json': index} if split.is_sharded else {}
    return split.filename_to_tensors, copies, texts | {'config.json': config}


def save_adapter(model: CausalLM, folder: str | Path, base: str, full=None,
                 write: bool = True, claim=None) -> list[str]:
    """Write the adapters alone, in the folder that `peft` loads beside the model `base`.

    full, write, claim: as in `save`. Returns the names of the files, relative to `folder`.
    """
    folder = Path(folder)
    adapted = {name: m for name, m in model.named_modules() if isinstance(m, LoRALinear)}
    tensors = {f'base_model.model.{name}.{part}.weight':
               (full or Tensor.detach)(getattr(m, part).weight).cpu().contiguous()
               for name, m in adapted.items() for part in ('lora_A', 'lora_B')}
    layer = next(iter(adapted.values()))    # all have the same rank, alpha and dropout
    rank = layer.lora_A.out_features
    config = {'peft_type': 'LORA', 'task_type': 'CAUSAL_LM', 'base_model_name_or_path': base,
              'r': rank, 'lora_alpha': layer.scale * rank, 'lora_dropout': layer.dropout.p,
              'target_modules': sorted({name.rpartition('.')[2] for name in adapted}),
              'bias': 'none', 'fan_in_fan_out': False, 'inference_mode': True}
    names = ['adapter_model.safetensors', 'adapter_config.json']
    if write:
        if claim:
            claim(*names)
        folder.mkdir(parents=True, exist_ok=True)
        write_tensors(folder / f'{names[0]}.tmp', tensors)
        _write_json(folder / f'{names[1]}.tmp', config)
        for name in names:
            os.replace(folder / f'{name}.tmp', folder / name)
    return names


def write_tensors(path: Path, tensors: dict[str, Tensor]):
    """Write a safetensors file of CPU tensors; CheckpointError if that fails (a full disk)."""
    try:
        save_file(tensors, path, metadata={'format': 'pt'})
    except SafetensorError as error:
        Path(path).unlink(missing_ok=True)
        raise CheckpointError(f'{path}: could not be written: {error}') from error


def _write_json(path, content):
    path.write_text(json.dumps(content, indent=2) + '\n', encoding='utf-8')


# ------------------------------------------------------------------------------------------------
# Device and type
# ------------------------------------------------------------------------------------------------

def pick_device(device: str) -> str:
    """`device`, or for 'auto' the GPU if there is one. Raises ConfigError.

    A GPU named by its number becomes the current one: kernels and events go there.
    """
    if device == 'auto':
        return 'cuda' if torch.cuda.is_available() else 'cpu'
    if not re.fullmatch(r'cpu|cuda(:\d+)?', device):
        raise ConfigError(f"device = {device!r}; wanted 'auto', 'cpu', 'cuda' or 'cuda:0'")
    if device.startswith('cuda') and not torch.cuda.is_available():
        raise ConfigError(f'device = {device!r}, but this machine has no CUDA device')
    if ':' in device:
        number, count = int(device.partition(':')[2]), torch.cuda.device_count()
        if number >= count:
            raise ConfigError(f'device = {device!r}, but this machine has CUDA devices '
                              f'0 to {count - 1}')
        torch.cuda.set_device(number)
    return device


def pick_dtype(dtype: str, device: str) -> torch.dtype:
    """The torch type named `dtype`; for 'auto' bfloat16 on a GPU, float32 elsewhere."""
    if dtype == 'auto':
        return torch.bfloat16 if device.startswith('cuda') else torch.float32
    return getattr(torch, dtype)


def load_model_tokenizer(folder: str | Path, config: ModelConfig | None = None):
    """The tokenizer of a model folder; raises CheckpointError if the model has too few tokens."""
    vocab_size = (config or read_config(folder)).vocab_size
    tokenizer = load_tokenizer(folder)
    if tokenizer.n_vocab > vocab_size:
        raise CheckpointError(f'{folder}: the tokenizer has {tokenizer.n_vocab} pieces, the model '
                              f'{vocab_size}')
    return tokenizer
