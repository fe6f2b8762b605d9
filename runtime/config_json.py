"""Read, check and write the config.json of a model in the Hugging Face layout.

A model is computed as transformers computes it. A value that this program does not support is an
error that names its key.
"""

import difflib
import functools
import json
from dataclasses import MISSING, asdict, fields
from pathlib import Path

from families.neox import NeoxConfig
from model import ModelConfig
from runtime import ownership
from runtime.errors import CheckpointError

read_json_object = functools.partial(ownership.read_json_object, error=CheckpointError)

ARCHITECTURES = {'llama': 'LlamaForCausalLM', 'mistral': 'MistralForCausalLM',
                 'qwen2': 'Qwen2ForCausalLM', 'qwen3': 'Qwen3ForCausalLM',
                 'gemma': 'GemmaForCausalLM', 'gemma2': 'Gemma2ForCausalLM',
                 'gpt_neox': 'GPTNeoXForCausalLM'}
ACTIVATION_KEYS = ('hidden_act', 'hidden_activation')
# keys of some architectures only; transformers ignores them in the others, listed in FOREIGN
WINDOWED = {'sliding_window', 'layer_types'}
GEMMA_ONLY = {'query_pre_attn_scalar', 'attn_logit_softcapping', 'final_logit_softcapping'}
NOT_NEOX = {'num_key_value_heads', 'head_dim', 'rms_norm_eps', 'rope_theta',
            'partial_rotary_factor', 'hidden_activation', 'mlp_bias'}
FOREIGN = dict.fromkeys(ARCHITECTURES, WINDOWED | GEMMA_ONLY) | {
    'mistral': GEMMA_ONLY, 'gemma2': set(), 'gpt_neox': WINDOWED | GEMMA_ONLY | NOT_NEOX}
# {our name: the key in config.json}, outside the block rope_parameters
OWN_NAMES = {'gpt_neox': {'rope_theta': 'rotary_emb_base', 'partial_rotary_factor': 'rotary_pct'}}
# what transformers assumes for a missing key, where that is not the default of ModelConfig
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

# the allowed values of each key, as alternatives: (lowest, highest) of integers or, if these are
# floats, of any numbers; a type; [alternatives for the items of a list]; or a value
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
# other rules of one architecture; the sliding windows of Qwen are not implemented
QWEN_FIELDS = {'use_sliding_window': [False], 'layer_types': [['full_attention'], None],
               'max_window_layers': [(0, 10_000)], 'head_dim': [SIZE]}
OWN_FIELDS = {
    'qwen2': QWEN_FIELDS,
    'qwen3': QWEN_FIELDS,
    # Gemma's first config files say 'gelu' and mean the tanh approximation, too
    'gemma': {'head_dim': [SIZE], 'hidden_act': ['gelu_pytorch_tanh', 'gelu'],
              'hidden_activation': ['gelu_pytorch_tanh', None]},
    'gemma2': {'head_dim': [SIZE], 'sliding_window': [COUNT],
               **dict.fromkeys(ACTIVATION_KEYS, ['gelu_pytorch_tanh'])},
    # in transformers, head_dim would change the rotary angles but not the size of the heads
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
# the block `nanocal`: logits = softcap * tanh(hidden @ head.T / (temperature * softcap))
NANOCAL_FIELDS = {'softcap': [CAP, None], 'temperature': [(1e-3, 1e3)]}


def read_config(folder: str | Path, changes: dict | None = None) -> ModelConfig:
    """Return the configuration in the config.json of `folder`, with `changes` to its keys.

    {'rope_theta': 5e5} also changes a file that has it in rope_parameters. Raises CheckpointError,
    also for a key that the architecture lacks.
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
    raw = read_json_object(path)
    config = config_from_hf(raw, str(path))     # check the file before the changes
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


def config_from_hf(raw: dict, where: str = 'config.json') -> ModelConfig:
    """Return the ModelConfig of the content of a config.json of transformers 4 or 5.

    Raises CheckpointError, which begins with `where` and names the key.
    """
    check_values(raw, {'model_type': [*ARCHITECTURES]}, where, required=['model_type'])
    kind = raw['model_type']
    rules = FIELDS | dict.fromkeys(ACTIVATION_KEYS, ['silu']) | OWN_FIELDS.get(kind, {})
    for key in FOREIGN[kind] - OWN_FIELDS.get(kind, {}).keys():
        del rules[key]
    check_values(raw, rules, where, required=[f.name for f in fields(ModelConfig)
                                               if f.default is f.default_factory is MISSING])
    ours = {theirs: key for key, theirs in OWN_NAMES.get(kind, {}).items()}
    raw = {ours.get(k, k): v for k, v in raw.items() if k not in FOREIGN[kind]}
    own = raw.get('nanocal') or {}
    check_values(own, NANOCAL_FIELDS, where, 'nanocal.')
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
    for key in FLOATS & values.keys():      # so that they are saved as transformers wants them
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
    if config.layer_types is None:      # transformers takes a Mistral with this key for a Ministral
        del values['layer_types']
    activation = {'gemma': 'gelu_pytorch_tanh', 'gemma2': 'gelu_pytorch_tanh', 'gpt_neox': 'gelu'}
    return (extra | {'architectures': [ARCHITECTURES[kind]], 'torch_dtype': dtype,
                     'hidden_activation' if kind == 'gemma2' else 'hidden_act':
                         activation.get(kind, 'silu')}
            | {names.get(k, k): v for k, v in values.items()
               if k in names or k not in FOREIGN[kind]})


def check_values(values, rules, where, block='', required=()):
    """Raise CheckpointError for a missing or wrong value and, inside a block, an unknown key."""
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
    """Raise CheckpointError if two values contradict each other."""
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
    """Return rope_theta, rope_scaling ('llama3' scheme or None) and the other keys of the block.

    transformers 4 has rope_theta and rope_scaling, transformers 5 has both in rope_parameters.
    Raises CheckpointError if two values disagree, or for a scheme that is not implemented.
    """
    blocks = [key for key in ROPE_BLOCKS if raw.get(key)]
    if len(blocks) == 2:
        raise CheckpointError(f'{where}: has {blocks[0]} and {blocks[1]}; remove the wrong one')
    name, block = (blocks[0], raw[blocks[0]]) if blocks else ('', {})
    kind = block.get('rope_type', block.get('type', 'default'))
    scheme = LLAMA3_ROPE if kind == 'llama3' else {}
    part = {'partial_rotary_factor': [SHARE]} if raw['model_type'] == 'gpt_neox' else {}
    check_values(block, ROPE_FIELDS | part | scheme, f'{where}: rope_type {kind!r}', f'{name}.',
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
