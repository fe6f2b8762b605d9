"""A model folder in the Hugging Face layout: config.json, safetensors, adapters, the hub.

A model is computed as transformers computes it. Any key of config.json that this program does not
support is an error that names the key. What is written here loads in transformers, vLLM and peft.
"""

import contextlib
import difflib
import functools
import hashlib
import json
import os
import pickle
import re
import shutil
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

from configs import CheckpointError
from data.tokenizer import load_tokenizer
from model import CausalLM, LoRALinear, ModelConfig, add_lora
from neox import NeoxCausalLM, NeoxConfig

SHARD_BYTES = 5_000_000_000
# what transformers and vLLM need besides the weights; copied from the folder of the base model
SIDE_FILES = ('generation_config.json', 'tokenizer.json', 'tokenizer.model', 'tokenizer.model.v*',
              'tokenizer_config.json', 'special_tokens_map.json', 'added_tokens.json',
              'chat_template.jinja', 'original/tokenizer.model')
HEAD, EMBEDDING = 'lm_head.weight', 'model.embed_tokens.weight'
# what old conversions hold besides weights: rotary frequencies, causal masks, their filling
BUFFERS = re.compile(r'.*rotary_emb\.inv_freq|gpt_neox\.layers\.\d+\.attention\.(masked_)?bias')


# ------------------------------------------------------------------------------------------------
# config.json
# ------------------------------------------------------------------------------------------------

ARCHITECTURES = {'llama': 'LlamaForCausalLM', 'mistral': 'MistralForCausalLM',
                 'qwen2': 'Qwen2ForCausalLM', 'qwen3': 'Qwen3ForCausalLM',
                 'gemma': 'GemmaForCausalLM', 'gemma2': 'Gemma2ForCausalLM',
                 'gpt_neox': 'GPTNeoXForCausalLM'}
ACTIVATION_KEYS = ('hidden_act', 'hidden_activation')
# keys that only some architectures have; transformers ignores them in the others
WINDOWED = {'sliding_window', 'layer_types'}
GEMMA_ONLY = {'query_pre_attn_scalar', 'attn_logit_softcapping', 'final_logit_softcapping'}
NOT_NEOX = {'num_key_value_heads', 'head_dim', 'rms_norm_eps', 'rope_theta',
            'partial_rotary_factor', 'hidden_activation', 'mlp_bias'}
FOREIGN = dict.fromkeys(ARCHITECTURES, WINDOWED | GEMMA_ONLY) | {
    'mistral': GEMMA_ONLY, 'gemma2': set(), 'gpt_neox': WINDOWED | GEMMA_ONLY | NOT_NEOX}
# {our name: the key in config.json}, outside the block rope_parameters
OWN_NAMES = {'gpt_neox': {'rope_theta': 'rotary_emb_base', 'partial_rotary_factor': 'rotary_pct'}}
# what transformers assumes for a missing key, where that differs from the defaults of ModelConfig
QWEN_DEFAULTS = {'num_key_value_heads': 32, 'max_position_embeddings': 32768}
GEMMA_DEFAULTS = {'tie_word_embeddings': True, 'head_dim': 256, 'max_position_embeddings': 8192}
DEFAULTS = {
    'llama': {},
    'mistral': {'num_key_value_heads': 8, 'sliding_window': 4096,
                'max_position_embeddings': 131072},
    'qwen2': QWEN_DEFAULTS,
    'qwen3': QWEN_DEFAULTS | {'head_dim': 128},
    'gemma': GEMMA_DEFAULTS | {'num_key_value_heads': 16},
    'gemma2': GEMMA_DEFAULTS | {
        'num_key_value_heads': 4, 'sliding_window': 4096, 'query_pre_attn_scalar': 256,
        'attn_logit_softcapping': 50.0, 'final_logit_softcapping': 30.0},
    'gpt_neox': {},
}

# What each known key may be, as alternatives: (lowest, highest) of an integer or, if these are
# floats, of any number; a type; [what the items of a list may be]; or one value
SIZE, COUNT, TOKEN, CAP, SHARE = (1, 2**20), (1, 2**31), (0, 2**31), (1e-3, 1e6), (0.0, 1.0)
FIELDS = {key: rule for keys, rule in {
    'vocab_size hidden_size intermediate_size num_attention_heads num_key_value_heads': [SIZE],
    'head_dim': [SIZE, None],
    'num_hidden_layers': [(1, 10_000)],
    'max_position_embeddings query_pre_attn_scalar': [COUNT],
    'sliding_window': [COUNT, None],
    'layer_types': [['sliding_attention', 'full_attention'], None],
    'rms_norm_eps': [(1e-12, 1.0)],
    'rope_theta': [(1.0, 1e30)],
    'partial_rotary_factor': [(1.0, 1.0), None],
    'attn_logit_softcapping final_logit_softcapping': [CAP, None],
    'initializer_range attention_dropout': [SHARE],
    'bos_token_id eos_token_id pad_token_id': [TOKEN, [TOKEN], None],
    'dtype torch_dtype': ['float32', 'bfloat16', 'float16', 'float64', None],
    'tie_word_embeddings use_cache': [bool],
    'attention_bias mlp_bias': [False],
    'use_bidirectional_attention': [False, None],
    'is_causal': [True],
    'pretraining_tp': [1, None],
    'architectures': [[str], None],
    'transformers_version': [str, None],
    'rope_parameters rope_scaling nanocal': [dict, None],
    'per_layer_config quantization_config': [None],
}.items() for key in keys.split()}
# what is stricter in one architecture; the windows of Qwen are not implemented
QWEN_FIELDS = {'use_sliding_window': [False], 'layer_types': [['full_attention'], None],
               'max_window_layers': [(0, 10_000)], 'head_dim': [SIZE]}
OWN_FIELDS = {
    'qwen2': QWEN_FIELDS,
    'qwen3': QWEN_FIELDS,
    # 'gelu' in the first files means the tanh approximation, too
    'gemma': {'head_dim': [SIZE], 'hidden_act': ['gelu_pytorch_tanh', 'gelu'],
              'hidden_activation': ['gelu_pytorch_tanh', None]},
    'gemma2': {'head_dim': [SIZE], 'sliding_window': [COUNT],
               **dict.fromkeys(ACTIVATION_KEYS, ['gelu_pytorch_tanh'])},
    # head_dim would change the angles in transformers, but not the size of the heads
    'gpt_neox': {'head_dim': [None], 'hidden_act': ['gelu'], 'layer_norm_eps': [(1e-12, 1.0)],
                 'rotary_emb_base': FIELDS['rope_theta'], 'rotary_pct': [SHARE],
                 'hidden_dropout': [SHARE], 'classifier_dropout': [SHARE],
                 'attention_bias': [bool], 'use_parallel_residual': [bool], 'is_decoder': [bool],
                 'tie_word_embeddings': [False]},
}
FLOATS = {'rms_norm_eps', 'layer_norm_eps', 'initializer_range', 'attn_logit_softcapping',
          'final_logit_softcapping'}
ROPE_BLOCKS = ('rope_parameters', 'rope_scaling')   # of transformers 5 and 4
ROPE_FIELDS = {'rope_type': ['default', 'llama3'], 'type': ['default', 'llama3'],
               'rope_theta': FIELDS['rope_theta'], 'partial_rotary_factor': [(1.0, 1.0)]}
LLAMA3_ROPE = {'factor': [(1.0, 1e6)], 'low_freq_factor': [(1e-6, 1e6)],
               'high_freq_factor': [(1e-6, 1e6)], 'original_max_position_embeddings': [COUNT]}
# adapter_config.json, as `save_adapter` writes it
ADAPTER_FIELDS = {'peft_type': ['LORA'], 'task_type': ['CAUSAL_LM'],
                  'base_model_name_or_path': [str], 'r': [SIZE], 'lora_alpha': [(0.0, 1e9)],
                  'lora_dropout': [SHARE], 'target_modules': [[str]], 'bias': ['none'],
                  'fan_in_fan_out': [False], 'inference_mode': [True]}
# our own block `nanocal`: logits = softcap * tanh(hidden @ head.T / (temperature * softcap))
NANOCAL_FIELDS = {'softcap': [CAP, None], 'temperature': [(1e-3, 1e3)]}


def model_class(config: ModelConfig) -> type[CausalLM]:
    """Return the class of the models of a configuration."""
    return NeoxCausalLM if isinstance(config, NeoxConfig) else CausalLM


def read_config(folder: str | Path, changes: dict | None = None) -> ModelConfig:
    """Return the configuration in the config.json of `folder`, with `changes` to its keys.

    A change applies to the resolved value: {'rope_theta': 5e5} works for files that have it in
    rope_parameters, too. Raises CheckpointError, also for a key that the architecture lacks.
    """
    folder = Path(folder)
    path = folder / 'config.json'
    if not path.exists() and (folder / 'adapter_config.json').exists():
        merged = folder.resolve().parent
        where = (f'the merged model is in {merged}' if (merged / 'config.json').exists() else
                 'merge them into the base model that adapter_config.json names')
        raise CheckpointError(f'{folder} holds LoRA adapters alone, which are not a model; {where}')
    if not path.exists():
        raise CheckpointError(f'{folder} is not a model folder: it has no config.json')
    raw = _read_json(path)
    config = config_from_hf(raw, str(path))     # validate the file before applying changes
    if not changes:
        return config

    names = {'rope_theta': 'rope_theta'} | OWN_NAMES.get(config.model_type, {})
    raw = {k: v for k, v in raw.items() if k not in (*ROPE_BLOCKS, 'dtype')} | {
        'torch_dtype': config.dtype, 'rope_scaling': config.rope_scaling,
        **{theirs: getattr(config, ours) for ours, theirs in names.items()}}
    for block in (changes[key] for key in ROPE_BLOCKS if key in changes):
        raw['rope_scaling'] = None
        for ours in names.keys() & (block if isinstance(block, dict) else ()):
            raw.pop(names[ours], None)
    config = config_from_hf(raw | changes, f'{path} with shape = {changes}')
    own = OWN_FIELDS.get(config.model_type, {}).keys()
    known = (raw.keys() | FIELDS.keys() | set(ACTIVATION_KEYS) | own) - FOREIGN[config.model_type]
    for key in sorted(changes.keys() - known, key=str):
        near = difflib.get_close_matches(str(key), known, n=1)
        raise CheckpointError(f'shape: {config.model_type} has no key {key!r} in its config.json'
                              + (f'; did you mean {near[0]!r}?' if near else ''))
    return config


def _read_json(path):
    try:
        content = json.loads(path.read_text(encoding='utf-8'))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f'{path}: not valid JSON: {error}') from error
    if not isinstance(content, dict):
        raise CheckpointError(f'{path}: not a JSON object')
    return content


def config_from_hf(raw: dict, where: str = 'config.json') -> ModelConfig:
    """Return the ModelConfig of a parsed `config.json` of transformers 4 or 5.

    Raises CheckpointError that begins with `where` and names the key.
    """
    _check_values(raw, {'model_type': [*ARCHITECTURES]}, where, required=['model_type'])
    kind = raw['model_type']
    rules = FIELDS | dict.fromkeys(ACTIVATION_KEYS, ['silu']) | OWN_FIELDS.get(kind, {})
    for key in FOREIGN[kind] - OWN_FIELDS.get(kind, {}).keys():
        del rules[key]
    _check_values(raw, rules, where, required=[f.name for f in fields(ModelConfig)
                                               if f.default is f.default_factory is MISSING])
    ours = {theirs: key for key, theirs in OWN_NAMES.get(kind, {}).items()}
    raw = {ours.get(k, k): v for k, v in raw.items() if k not in FOREIGN[kind]}
    own = raw.get('nanocal') or {}
    _check_values(own, NANOCAL_FIELDS, where, 'nanocal.')
    if kind == 'gemma2' and 'softcap' in own:
        raise CheckpointError(f'{where}: nanocal.softcap is for other models; gemma2 has '
                              f'final_logit_softcapping')

    record = NeoxConfig if kind == 'gpt_neox' else ModelConfig
    names = {f.name for f in fields(record)} - {'extra', 'temperature'}
    values = DEFAULTS[kind] | {k: v for k, v in raw.items() if k in names}
    values |= {k: v for k, v in _resolve_rope(raw, where).items() if k in names}
    values['dtype'] = raw.get('dtype') or raw.get('torch_dtype') or 'float32'
    values['temperature'] = float(own.get('temperature', 1.0))
    values.setdefault('final_logit_softcapping', own.get('softcap'))
    for key in FLOATS & values.keys():      # transformers refuses an integer for them
        values[key] = None if values[key] is None else float(values[key])
    resolved = {*names, *ROPE_BLOCKS, *ACTIVATION_KEYS, 'nanocal', 'torch_dtype', 'architectures'}
    config = record(**values, extra={k: v for k, v in raw.items() if k not in resolved})
    _check_shape(config, where)
    return config


def config_to_hf(config: ModelConfig) -> dict:
    """Return the content of a `config.json` that transformers 4 and 5 and vLLM read."""
    values, kind = asdict(config), config.model_type
    names = OWN_NAMES.get(kind, {})
    extra, temperature, dtype = (values.pop(key) for key in ('extra', 'temperature', 'dtype'))
    own = {} if temperature == 1 else {'temperature': temperature}
    if config.final_logit_softcapping and 'final_logit_softcapping' in FOREIGN[kind]:
        own['softcap'] = config.final_logit_softcapping
    if own:
        extra['nanocal'] = own
    if config.layer_types is None:      # with this key transformers loads a Mistral as a Ministral
        del values['layer_types']
    activation = {'gemma': 'gelu_pytorch_tanh', 'gemma2': 'gelu_pytorch_tanh', 'gpt_neox': 'gelu'}
    return (extra | {'architectures': [ARCHITECTURES[kind]], 'torch_dtype': dtype,
                     'hidden_activation' if kind == 'gemma2' else 'hidden_act':
                         activation.get(kind, 'silu')}
            | {names.get(k, k): v for k, v in values.items()
               if k in names or k not in FOREIGN[kind]})


def _check_values(values, rules, where, block='', required=()):
    """Raise CheckpointError for a missing or a wrong value or, in a block, an unknown key."""
    for key in rules | values:
        if block and key not in rules:
            problem = f'is not supported; the keys are {", ".join(rules)}'
        elif key in required and key not in values:
            problem = f'is missing; it must be {_describe(rules[key])}'
        elif key in rules and key in values and not _fits(values[key], rules[key]):
            problem = f'= {values[key]!r} is not supported; it must be {_describe(rules[key])}'
        else:
            continue
        raise CheckpointError(f'{where}: {block}{key} {problem}')


def _fits(value, rule):
    def fits(option):
        match option:
            case tuple((low, high)):
                return type(value) in (int, type(low)) and low <= value <= high
            case list():
                return type(value) is list and value != [] and all(_fits(x, option) for x in value)
        return option is type(value) or type(value) is type(option) and value == option
    return any(map(fits, rule))


def _describe(rule):
    names = {int: 'an integer', float: 'a number', str: 'a string', bool: 'true or false',
             dict: 'an object'}

    def text(option):
        match option:
            case tuple((low, high)):
                return f'{names[type(low)]} from {low} to {high}'
            case list():
                return f'a list, each item {_describe(option)}'
        return names.get(option) or json.dumps(option)
    return ' or '.join(map(text, rule))


def _check_shape(config, where):
    """Raise CheckpointError if the values do not fit each other."""
    D, H, K = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    n_layers, n_types = config.num_hidden_layers, len(config.layer_types or ())
    hd, R = config.head_dim, config.rotary_dim
    part = (f'head_dim = {hd} is odd' if R == hd else
            f'rotary_pct = {config.partial_rotary_factor} of head_dim = {hd} is {R}')
    for wrong, problem in (
            (D % H, f'hidden_size = {D} is not a multiple of num_attention_heads = {H}'),
            (H % K, f'num_attention_heads = {H} is not a multiple of num_key_value_heads = {K}'),
            (R % 2 or not R, f'{part}; rotary positions need pairs'),
            (n_types not in (0, n_layers),
             f'layer_types has {n_types} items for num_hidden_layers = {n_layers}'),
            (n_types and config.sliding_window is None,
             'sliding_window = None beside layer_types; it must be an integer')):
        if wrong:
            raise CheckpointError(f'{where}: {problem}')


def _resolve_rope(raw, where):
    """Return rope_theta, rope_scaling (the 'llama3' scheme or None) and what else the block holds.

    transformers 4 has rope_theta and rope_scaling, transformers 5 has both in rope_parameters.
    Raises CheckpointError if they disagree, or for a scheme that is not implemented.
    """
    blocks = [key for key in ROPE_BLOCKS if raw.get(key)]
    if len(blocks) == 2:
        raise CheckpointError(f'{where}: has {blocks[0]} and {blocks[1]}; remove the wrong one')
    name, block = (blocks[0], raw[blocks[0]]) if blocks else ('', {})
    kind = block.get('rope_type', block.get('type', 'default'))
    scheme = LLAMA3_ROPE if kind == 'llama3' else {}
    part = {'partial_rotary_factor': [SHARE]} if raw['model_type'] == 'gpt_neox' else {}
    _check_values(block, ROPE_FIELDS | part | scheme, f'{where}: rope_type {kind!r}', f'{name}.',
                  scheme)
    names = {'type': 'rope_type'} | OWN_NAMES.get(raw['model_type'], {})
    for key, value in block.items():
        other = block.get('rope_type', value) if key == 'type' else raw.get(key, value)
        if value != other:
            raise CheckpointError(f'{where}: {name}.{key} = {value!r} and {names.get(key, key)} = '
                                  f'{other!r} disagree; remove the wrong one')
    if scheme and block['high_freq_factor'] <= block['low_freq_factor']:
        raise CheckpointError(f'{where}: {name}.high_freq_factor must be greater than '
                              f'low_freq_factor = {block["low_freq_factor"]}')
    theta = float(block.get('rope_theta', raw.get('rope_theta', 10000.0)))
    stretched = {'rope_type': 'llama3'} | {k: block[k] for k in scheme} if scheme else None
    return block | {'rope_theta': theta, 'rope_scaling': stretched}


# ------------------------------------------------------------------------------------------------
# Reading weights
# ------------------------------------------------------------------------------------------------

def fetch(name: str, revision: str | None = None) -> Path:
    """Return the folder of a model: `name` if that is a folder, else a snapshot from the hub."""
    path = Path(os.path.expanduser(name))
    if path.is_dir():
        return path
    if path.is_file():
        raise CheckpointError(f'{name} is a file; a model is the folder that holds its config.json')
    if name.startswith(('/', '.', '~')) or name.count('/') != 1:
        raise CheckpointError(f'no model folder at {name}, and it is not a hub name '
                              f'like google/gemma-2-2b')
    wanted = ['config.json', '*.safetensors', '*.safetensors.index.json', *SIDE_FILES]
    folder = download(name, wanted, revision, ignore=['original/*.safetensors', 'consolidated*'])
    if not any(folder.glob('*.safetensors')):
        # older checkpoints, such as Pythia's at a training step, have only these
        folder = download(name, ['pytorch_model*.bin', 'pytorch_model*.bin.index.json'], revision)
    return folder


def download(name: str, patterns, revision: str | None = None, repo_type: str = 'model',
             ignore=()) -> Path:
    """Return a local snapshot of a hub repository: its files that match one of `patterns`.

    repo_type: 'model' or 'dataset'. Raises CheckpointError.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError
    try:
        return Path(snapshot_download(name, repo_type=repo_type, revision=revision,
                                      allow_patterns=list(patterns), ignore_patterns=list(ignore)))
    except Exception as error:  # the hub raises many kinds, of its own and of its HTTP client
        reason = str(error).strip().split('\n')[0]
        advice = ('accept its license there, then set HF_TOKEN or run `hf auth login`'
                  if isinstance(error, GatedRepoError) else 'check the name and the network')
        raise CheckpointError(f'there is no file or folder {name}, and downloading the {repo_type} '
                              f'{name} from the hub failed ({type(error).__name__}: {reason}); '
                              f'{advice}') from error


def load(folder: str | Path, device='cpu', dtype: torch.dtype | None = None) -> CausalLM:
    """Return a CausalLM with the weights of `folder`, as `dtype` (None: the type in config.json).

    Tensors are read one at a time, so there is never a second copy of the model. Raises
    CheckpointError as `read_config` and `check_weights` do.
    """
    config = read_config(folder)
    dtype = dtype or getattr(torch, config.dtype)
    files = check_weights(folder, config)
    with torch.device('meta'):
        model = model_class(config)(config)
    for key, path in tqdm(files.items(), 'loading', unit=' tensors', delay=1, disable=None):
        parent, _, name = key.rpartition('.')
        with _open(path) as tensors:
            # a copy, not a view into the file, which may be replaced in the meantime
            tensor = tensors.get_tensor(key).to(device, dtype, copy=True)
        setattr(model.get_submodule(parent), name, nn.Parameter(tensor))
    return model


def read_adapter(folder: str | Path) -> dict:
    """Return the adapter_config.json in the adapter/ of a run's folder; raises CheckpointError."""
    path = Path(folder) / 'adapter' / 'adapter_config.json'
    if not path.exists():
        raise CheckpointError(f'{folder} has no adapter/, which train.py --lora saves beside the '
                              f'merged weights')
    adapter = _read_json(path)
    _check_values(adapter, ADAPTER_FIELDS, path, 'adapter.', ADAPTER_FIELDS)
    return adapter


def add_adapter(model: CausalLM, folder: str | Path):
    """Add the adapters in `folder`/adapter to their base model, in place.

    Soft-cap and temperature of the logits become those of `folder`. Raises CheckpointError if the
    adapters do not fit the model; with a model on the meta device it only checks that.
    """
    adapter, path = read_adapter(folder), Path(folder) / 'adapter' / 'adapter_model.safetensors'
    config = read_config(folder)
    model.config.final_logit_softcapping = config.final_logit_softcapping
    model.config.temperature = config.temperature
    try:
        add_lora(model, adapter['r'], adapter['lora_alpha'], adapter['lora_dropout'],
                 adapter['target_modules'])
    except ValueError as error:
        raise CheckpointError(f'{path.parent}: {error}') from error
    wanted = {f'base_model.model.{name}': p for name, p in model.named_parameters()
              if '.lora_' in name}
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
    files = (Path(folder) / 'adapter' / name
             for name in ('adapter_config.json', 'adapter_model.safetensors'))
    return hashlib.blake2b(b''.join(file.read_bytes() for file in files),
                           digest_size=8).hexdigest()


def check_weights(folder: str | Path, config: ModelConfig) -> dict[str, Path]:
    """Return {parameter: its file} after a check of the headers; read no weights.

    Raises CheckpointError naming the tensor that is missing, unknown, misshaped or quantized, or
    the damaged file. An output matrix beside tied embeddings is read, and must equal them.
    """
    with torch.device('meta'):
        shapes = {k: list(p.shape) for k, p in model_class(config)(config).named_parameters()}
    files = weight_files(Path(folder))
    if config.tie_word_embeddings and {HEAD, EMBEDDING} <= files.keys():
        with _open(files[HEAD]) as a, _open(files[EMBEDDING]) as b:
            head, embedding = a.get_tensor(HEAD), b.get_tensor(EMBEDDING)
        if head.dtype != embedding.dtype or not torch.equal(head, embedding):
            raise CheckpointError(f'{files[HEAD]}: tensor {HEAD} differs from {EMBEDDING}, but '
                                  f'config.json has tie_word_embeddings = true: set that to false '
                                  f'to use both, or remove {HEAD}')
    # some tied checkpoints carry a copy of the embedding
    files = {k: f for k, f in files.items() if not (
        BUFFERS.fullmatch(k) or k == HEAD and config.tie_word_embeddings and k not in shapes)}
    for problem, keys in (('is missing', shapes.keys() - files.keys()),
                          ('is unknown to this architecture', files.keys() - shapes.keys())):
        if keys:
            more = f' (and {len(keys) - 1} more)' if len(keys) > 1 else ''
            raise CheckpointError(f'{folder}: tensor {min(keys)}{more} {problem}')
    for key, path in files.items():
        with _open(path) as tensors:
            tensor = tensors.get_slice(key)
            shape, dtype = tensor.get_shape(), tensor.get_dtype()
        if shape != shapes[key]:
            raise CheckpointError(f'{path}: tensor {key} has shape {shape}, config.json wants '
                                  f'{shapes[key]}')
        if dtype not in ('F64', 'F32', 'F16', 'BF16'):
            raise CheckpointError(f'{path}: tensor {key} is {dtype}; quantized weights are not '
                                  f'supported')
    return files


def weight_files(folder: Path) -> dict[str, Path]:
    """Return {tensor: its file}, from a single file or an index of shards.

    safetensors come before pytorch_model.bin, which is read without running code from it.
    """
    for single in (folder / 'model.safetensors', folder / 'pytorch_model.bin'):
        index = single.with_name(f'{single.name}.index.json')
        if index.exists():
            names = _read_json(index).get('weight_map')
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
    """The tensors of a pytorch_model.bin, mapped, with the methods of safe_open used here."""
    get_tensor = dict.__getitem__

    def get_slice(self, key):
        names = {torch.float64: 'F64', torch.float32: 'F32', torch.float16: 'F16',
                 torch.bfloat16: 'BF16'}
        tensor = self[key]
        return SimpleNamespace(get_shape=lambda: list(tensor.shape),
                               get_dtype=lambda: names.get(tensor.dtype, str(tensor.dtype)))


@functools.lru_cache(4)
def _read_pickle(path, _time):
    try:
        return _PickledTensors(torch.load(path, 'cpu', mmap=True, weights_only=True))
    except (RuntimeError, OSError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise CheckpointError(f'{path}: truncated, or not a file of weights '
                              f'({type(error).__name__}); download it again') from error


@contextlib.contextmanager
def _open(path):
    """Open a file of weights; what it raises becomes a CheckpointError that names the file."""
    if path.suffix == '.bin':
        yield _read_pickle(path, path.stat().st_mtime_ns)
        return
    try:
        with safe_open(path, framework='pt') as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f'{path}: truncated, out of date or not a safetensors file '
                              f'({error}); download or save it again') from error


def nonfinite_tensor(folder: str | Path) -> str | None:
    """Return the name of the first tensor of a model folder with NaN or infinity in it, or None."""
    for key, path in weight_files(Path(folder)).items():
        with _open(path) as tensors:
            tensor = tensors.get_tensor(key)
        # the filling of Pythia's masks, -1e9, is minus infinity in float16
        if (tensor.is_floating_point() and not tensor.isfinite().all()
                and not BUFFERS.fullmatch(key)):
            return key
    return None


def fingerprint(folder: str | Path) -> str:
    """Return a hash of a model: of the values in config.json and of a sample of every tensor.

    The sample is the name, type and shape of the tensor and 16 blocks of 4 KiB spread evenly over
    its bytes: under a second for a model of 16 GB on an SSD. The formatting of config.json and the
    split into shards do not matter.
    """
    folder = Path(folder)
    config = json.dumps(_read_json(folder / 'config.json'), sort_keys=True)
    whole = hashlib.blake2b(config.encode(), digest_size=8)
    for key, path in sorted(weight_files(folder).items()):
        with _open(path) as tensors:
            header, tensor = tensors.get_slice(key), tensors.get_tensor(key)
        # mapped: only the sample is read
        data = tensor.contiguous().view(-1).view(torch.uint8).numpy()
        offsets = (range(0, data.size, 4096) if data.size <= 16 * 4096 else
                   [i * (data.size - 4096) // 15 for i in range(16)])
        digest = hashlib.blake2b(f'{key} {header.get_dtype()} {header.get_shape()}'.encode())
        for offset in offsets:
            digest.update(data[offset:offset + 4096])
        whole.update(digest.digest())
    return whole.hexdigest()


# ------------------------------------------------------------------------------------------------
# Writing
# ------------------------------------------------------------------------------------------------

def save(model: CausalLM, folder: str | Path, dtype: torch.dtype,
         side_files: str | Path | None = None, full=None, write: bool = True, claim=None,
         more: dict | None = None) -> list[str]:
    """Write config and weights as `dtype` in the Hugging Face layout, in shards of at most 5 GB.

    LoRA is merged in float32. config.json is renamed last: a folder that has it is complete. No
    other file of the folder is touched. Returns the names of the files, relative to `folder`.

    side_files:      the folder of the base model; its tokenizer and generation files are copied
    full(parameter): the tensor to write for a parameter, if that is not the parameter itself: the
                     float32 master copy, or what FSDP2 spreads over processes, gathered
    write:           False in all processes but one; `full` runs in all of them
    claim(*names):   called with the names of the files before any of them is written
    more:            {name: text, or the content of a JSON file} of files to write besides, in place
                     of copies

    Raises CheckpointError or OSError.
    """
    from huggingface_hub import split_torch_state_dict_into_shards
    shapes = {key: torch.empty(p.shape, dtype=dtype, device='meta')
              for key, p in model.named_parameters() if '.lora_' not in key}
    split = split_torch_state_dict_into_shards(shapes, max_shard_size=SHARD_BYTES)
    files = {name: functools.partial(_merged, model, keys, dtype, full or Tensor.detach)
             for name, keys in split.filename_to_tensors.items()}
    if side_files is not None and Path(side_files).resolve() != Path(folder).resolve():
        files |= {str(path.relative_to(side_files)): path for pattern in SIDE_FILES
                  for path in sorted(Path(side_files).glob(pattern))}
    if split.is_sharded:
        files['model.safetensors.index.json'] = {'metadata': split.metadata,
                                                 'weight_map': split.tensor_to_filename}
    files |= more or {}
    config = config_to_hf(model.config) | {'torch_dtype': str(dtype).removeprefix('torch.')}
    files['config.json'] = config
    _write(folder, files, write, claim)
    if write and 'nanocal' in config:
        print(f'note: only this program applies {config["nanocal"]}, the key nanocal in '
              f'{Path(folder) / "config.json"}; transformers and vLLM will not')
    return list(files)


def _merged(model, keys, dtype, full):
    """Return {key: tensor} for a shard, LoRA merged in float32, on the CPU."""
    tensors = {}
    for key in keys:
        tensor, owner = full(model.get_parameter(key)), model.get_submodule(key.rpartition('.')[0])
        if isinstance(owner, LoRALinear) and key.endswith('.weight'):
            low_rank = full(owner.lora_B.weight) @ full(owner.lora_A.weight)
            tensor = tensor.float() + owner.scale * low_rank
        tensors[key] = tensor.to(dtype).cpu().contiguous()
    return tensors


def save_adapter(model: CausalLM, folder: str | Path, base: str, full=None,
                 write: bool = True, claim=None) -> list[str]:
    """Write the adapters alone, in the folder that `peft` loads beside the model `base`.

    full, write, claim: as in `save`. Returns the names of the files, relative to `folder`.
    """
    full = full or Tensor.detach
    adapted = {name: m for name, m in model.named_modules() if isinstance(m, LoRALinear)}
    tensors = {f'base_model.model.{name}.{part}.weight':
               full(getattr(m, part).weight).cpu().contiguous()
               for name, m in adapted.items() for part in ('lora_A', 'lora_B')}
    layer = next(iter(adapted.values()))    # all have the same rank, alpha and dropout
    rank = layer.lora_A.out_features
    config = {'peft_type': 'LORA', 'task_type': 'CAUSAL_LM', 'base_model_name_or_path': base,
              'r': rank, 'lora_alpha': layer.scale * rank, 'lora_dropout': layer.dropout.p,
              'target_modules': sorted({name.rpartition('.')[2] for name in adapted}),
              'bias': 'none', 'fan_in_fan_out': False, 'inference_mode': True}
    files = {'adapter_model.safetensors': lambda: tensors, 'adapter_config.json': config}
    _write(folder, files, write, claim)
    return list(files)


def _write(folder, files, write, claim):
    """Write all files under temporary names, and rename them when every byte is on disk.

    files: {name: a path to copy, a function that returns tensors, text, or the content of a JSON
    file}.
    Without `write` only the functions are called: they may gather from all processes.
    """
    if write and claim:
        claim(*files)
    parts = {name: Path(folder) / f'{name}.tmp' for name in files} if write else {}
    try:
        for name, content in files.items():
            if callable(content):
                content = content()     # the same name, so that only one shard is in memory
            if not write:
                continue
            part = parts[name]
            part.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, Path):
                shutil.copyfile(content, part)
            elif name.endswith('.safetensors'):
                write_tensors(part, content)
            else:
                text = content if isinstance(content, str) else json.dumps(content, indent=2) + '\n'
                part.write_text(text, encoding='utf-8')
        for name, part in parts.items():
            os.replace(part, Path(folder) / name)
    finally:
        for part in parts.values():
            part.unlink(missing_ok=True)


def write_tensors(path: Path, tensors: dict[str, Tensor]):
    """Write a safetensors file of CPU tensors; CheckpointError if that fails (full disk)."""
    try:
        save_file(tensors, path, metadata={'format': 'pt'})
    except SafetensorError as error:
        Path(path).unlink(missing_ok=True)
        raise CheckpointError(f'{path}: could not be written: {error}') from error


def load_model_tokenizer(folder: str | Path, config: ModelConfig | None = None):
    """Return the tokenizer of a model folder; raises CheckpointError if it has too many tokens."""
    vocab_size = (config or read_config(folder)).vocab_size
    tokenizer = load_tokenizer(folder)
    if tokenizer.n_vocab > vocab_size:
        raise CheckpointError(f'{folder}: the tokenizer has {tokenizer.n_vocab} pieces, the model '
                              f'{vocab_size}')
    return tokenizer
