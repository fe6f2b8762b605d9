"""Read, check and write the config.json of a model in the Hugging Face layout.

A model is computed as transformers computes it. A value that this program does not support is an
error that names its key.
"""

import difflib
import functools
import json
from dataclasses import fields, replace
from pathlib import Path

from families import t5
from model import FAMILIES, Layer, ModelConfig, Rope
from runtime import ownership
from runtime.errors import CheckpointError

read_json_object = functools.partial(ownership.read_json_object, error=CheckpointError)

ARCHITECTURES = {'llama': 'LlamaForCausalLM', 'mistral': 'MistralForCausalLM',
                 'qwen2': 'Qwen2ForCausalLM', 'qwen3': 'Qwen3ForCausalLM',
                 'gemma': 'GemmaForCausalLM', 'gemma2': 'Gemma2ForCausalLM',
                 'gpt_neox': 'GPTNeoXForCausalLM'}
REWARD = 'CausalLM', 'SequenceClassification'     # how transformers names a reward model
# The keys of a family beyond those of COMMON, and what transformers assumes where they are missing.
# A key that is in neither means nothing to transformers.
COMMON = {'vocab_size': None, 'hidden_size': None, 'num_hidden_layers': None,
          'num_attention_heads': None, 'max_position_embeddings': 2048,
          'initializer_range': 0.02, 'tie_word_embeddings': False, 'bos_token_id': None,
          'eos_token_id': None, 'pad_token_id': None}
REQUIRED = ('vocab_size', 'hidden_size', 'intermediate_size', 'num_hidden_layers',
            'num_attention_heads')
LLAMA = {'intermediate_size': None, 'num_key_value_heads': 0, 'head_dim': 0, 'hidden_act': 'silu',
         'rms_norm_eps': 1e-6, 'rope_theta': 1e4, 'partial_rotary_factor': 1.0,
         'attention_dropout': 0.0}
BIAS = {'attention_bias': False}
QWEN = LLAMA | {'num_key_value_heads': 32, 'max_position_embeddings': 32768,
                'use_sliding_window': False, 'sliding_window': 4096, 'max_window_layers': 28,
                'layer_types': None}
GEMMA = LLAMA | BIAS | {'tie_word_embeddings': True, 'head_dim': 256,
                        'max_position_embeddings': 8192, 'hidden_act': 'gelu_pytorch_tanh',
                        'hidden_activation': 'gelu_pytorch_tanh'}
GEMMA2 = GEMMA | {'num_key_value_heads': 4, 'query_pre_attn_scalar': 256, 'sliding_window': 4096,
                  'layer_types': None, 'final_logit_softcapping': 30.0,
                  'attn_logit_softcapping': 50.0}
MISTRAL = LLAMA | {'num_key_value_heads': 8, 'sliding_window': 4096, 'layer_types': None,
                   'max_position_embeddings': 131072}
DEFAULTS = {
    'llama': LLAMA | BIAS | {'mlp_bias': False},
    'mistral': MISTRAL,
    'qwen2': QWEN,
    'qwen3': QWEN | BIAS | {'head_dim': 128},
    'gemma': GEMMA | {'num_key_value_heads': 16},
    'gemma2': GEMMA2,
    'gpt_neox': {'intermediate_size': None, 'hidden_act': 'gelu', 'layer_norm_eps': 1e-5,
                 'rotary_emb_base': 1e4, 'rotary_pct': 0.25, 'attention_bias': True,
                 'use_parallel_residual': True, 'attention_dropout': 0.0, 'hidden_dropout': 0.0,
                 'classifier_dropout': 0.1, 'is_decoder': False},
}
PATTERN = {'gemma2': 2}     # every n-th layer has no window, if config.json does not say which

# the allowed values of each key, as alternatives: (lowest, highest) of integers or, if these are
# floats, of any numbers; a type; [alternatives for the items of a list]; or a value
SIZE, COUNT, TOKEN, CAP, SHARE = (1, 2**20), (1, 2**31), (0, 2**31), (1e-3, 1e6), (0.0, 1.0)
FACTOR, EPS = (1.0, 1e6), (1e-12, 1.0)
FIELDS = {key: rule for keys, rule in {
    'vocab_size hidden_size intermediate_size num_attention_heads num_key_value_heads': [SIZE],
    'head_dim': [SIZE, None],
    'num_hidden_layers': [(1, 10_000)],
    'max_position_embeddings query_pre_attn_scalar': [COUNT],
    'max_window_layers': [(0, 10_000)],
    'sliding_window': [COUNT, None],
    'layer_types': [['sliding_attention', 'full_attention'], None],
    'rms_norm_eps layer_norm_eps': [EPS],
    'rope_theta rotary_emb_base': [(1.0, 1e30)],
    'partial_rotary_factor': [(1.0, 1.0), None],
    'rotary_pct': [SHARE],
    'attn_logit_softcapping final_logit_softcapping': [CAP, None],
    'initializer_range attention_dropout hidden_dropout classifier_dropout': [SHARE],
    'bos_token_id eos_token_id': [TOKEN, [TOKEN], None],
    'pad_token_id': [(-1, 2**31), [TOKEN], None],    # -1: none, in early conversions of LLaMA
    'dtype torch_dtype': ['float32', 'bfloat16', 'float16', 'float64', None],
    'tie_word_embeddings use_cache attention_bias mlp_bias use_parallel_residual is_decoder '
    'use_sliding_window': [bool],
    'hidden_act': ['silu'],
    'hidden_activation': ['gelu_pytorch_tanh'],
    'use_bidirectional_attention': [False, None],
    'is_causal': [True],
    'pretraining_tp': [1, None],
    'architectures': [[str], None],
    'transformers_version': [str, None],
    'rope_parameters rope_scaling nanocal': [dict, None],
    'per_layer_config quantization_config': [None],
}.items() for key in keys.split()}
ALWAYS = {'dtype', 'torch_dtype', 'use_cache', 'use_bidirectional_attention', 'is_causal',
          'pretraining_tp', 'architectures', 'transformers_version', 'rope_parameters',
          'rope_scaling', 'nanocal', 'per_layer_config', 'quantization_config'}
# other rules of one family
OWN_FIELDS = {
    'qwen2': {'head_dim': [SIZE]},
    'qwen3': {'head_dim': [SIZE]},
    # Gemma's first config files say 'gelu' and mean the tanh approximation, too
    'gemma': {'head_dim': [SIZE], 'hidden_act': ['gelu_pytorch_tanh', 'gelu'],
              'hidden_activation': ['gelu_pytorch_tanh', None]},
    'gemma2': {'head_dim': [SIZE], 'sliding_window': [COUNT], 'hidden_act': ['gelu_pytorch_tanh']},
    # in transformers, head_dim would change the rotary angles but not the size of the heads
    'gpt_neox': {'head_dim': [None], 'hidden_act': ['gelu'], 'tie_word_embeddings': [False]},
}
FLOATS = {'rms_norm_eps', 'layer_norm_eps', 'initializer_range', 'attn_logit_softcapping',
          'final_logit_softcapping', 'rope_theta', 'rotary_emb_base'}

# rotary positions: a block of transformers 5 or 4, and two keys outside it, with their names there
ROPE_BLOCKS = ('rope_parameters', 'rope_scaling')
OUTSIDE = {'gpt_neox': {'rope_theta': 'rotary_emb_base', 'partial_rotary_factor': 'rotary_pct'}}
TURNS = (1e-6, 1e6)
SCHEMES = {     # {rope_type: (the keys that it needs, those that it may have)}
    'default': ({}, {}),
    'llama3': ({'factor': [FACTOR], 'low_freq_factor': [TURNS], 'high_freq_factor': [TURNS],
                'original_max_position_embeddings': [COUNT]}, {}),
}
ROPE_FIELDS = {'rope_type': [*SCHEMES], 'type': [*SCHEMES], 'rope_theta': FIELDS['rope_theta']}
# adapter_config.json, as `save_adapter` writes it
ADAPTER_FIELDS = {'peft_type': ['LORA'], 'task_type': ['CAUSAL_LM'],
                  'base_model_name_or_path': [str], 'r': [SIZE], 'lora_alpha': [(0.0, 1e9)],
                  'lora_dropout': [SHARE], 'target_modules': [[str]], 'bias': ['none'],
                  'fan_in_fan_out': [False], 'inference_mode': [True]}
# the block `nanocal`: logits = softcap * tanh(hidden @ head.T / (temperature * softcap))
NANOCAL_FIELDS = {'softcap': [CAP, None], 'temperature': [(1e-3, 1e3)]}


def read_config(folder: str | Path, changes: dict | None = None, seq2seq=False) -> ModelConfig:
    """Return the configuration in the config.json of `folder`, with `changes` to its keys.

    seq2seq: whether the caller can use T5 as well, whose configuration is that of families/t5.py
    {'rope_theta': 5e5} also changes a file that has it in rope_parameters. Raises CheckpointError,
    also for a key that the family lacks.
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
    if raw.get('model_type') in [*t5.ARCHITECTURES]:
        if not seq2seq:
            raise CheckpointError(f'{path}: {raw["model_type"]} is an encoder and a decoder; '
                                  f'evaluate.py scores its answers, and nothing else can use it')
        check_values(raw, t5.RULES, str(path), required=t5.REQUIRED)
        return t5.config_from_hf(raw)
    config = config_from_hf(raw, str(path))     # check the file before the changes
    if not changes:
        return config
    raw = config_to_hf(config)
    for block in (changes[key] for key in ROPE_BLOCKS if key in changes):
        outside = _outside(config.model_type)
        inside = [theirs for ours, theirs in outside.items() if ours in (block or ())]
        raw = {k: v for k, v in raw.items() if k not in (*ROPE_BLOCKS, *inside)}
    config = config_from_hf(raw | changes, f'{path} with shape = {changes}')
    known = raw.keys() | rules_of(config.model_type).keys()
    for key in sorted(changes.keys() - known, key=str):
        near = difflib.get_close_matches(str(key), known, n=1)
        raise CheckpointError(f'shape: {config.model_type} has no key {key!r} in its config.json'
                              + (f'; did you mean {near[0]!r}?' if near else ''))
    return config


def rules_of(kind: str) -> dict:
    """Return {key: its allowed values} of the keys that mean something in a family."""
    keys = ALWAYS | COMMON.keys() | DEFAULTS[kind].keys()
    return {key: FIELDS[key] for key in FIELDS if key in keys} | OWN_FIELDS.get(kind, {})


def config_from_hf(raw: dict, where: str = 'config.json') -> ModelConfig:
    """Return the ModelConfig of the content of a config.json of transformers 4 or 5.

    Raises CheckpointError, which begins with `where` and names the key.
    """
    check_values(raw, {'model_type': [*ARCHITECTURES]}, where, required=['model_type'])
    kind = raw['model_type']
    defaults = COMMON | DEFAULTS[kind]
    check_values(raw, rules_of(kind), where, required=[k for k in REQUIRED if k in defaults])
    own = raw.get('nanocal') or {}
    check_values(own, NANOCAL_FIELDS, where, 'nanocal.')
    if 'softcap' in own and 'final_logit_softcapping' in defaults:
        raise CheckpointError(f'{where}: nanocal.softcap is for other models; {kind} has '
                              f'final_logit_softcapping')
    hf = {k: float(v) if k in FLOATS and type(v) is int else v for k, v in raw.items()
          if k not in ('dtype', 'torch_dtype', 'architectures', 'nanocal')}
    v = defaults | {key: hf[key] for key in defaults.keys() & hf.keys()} | {'model_type': kind}
    D, H = v['hidden_size'], v['num_attention_heads']
    v['num_key_value_heads'] = v.get('num_key_value_heads') or H
    v['head_dim'] = v.get('head_dim') or D // H
    if D % H:
        raise CheckpointError(f'{where}: hidden_size = {D} is not a multiple of '
                              f'num_attention_heads = {H}')
    if H % v['num_key_value_heads']:
        raise CheckpointError(f'{where}: num_attention_heads = {H} is not a multiple of '
                              f'num_key_value_heads = {v["num_key_value_heads"]}')
    ropes, hf = _ropes(hf, v, where)
    config = ModelConfig(
        norm_eps=v.get('rms_norm_eps', v.get('layer_norm_eps', 1e-5)), family=_family(v),
        layers=_layers(v, ropes, where), temperature=float(own.get('temperature', 1.0)),
        dtype=raw.get('dtype') or raw.get('torch_dtype') or 'float32', hf=hf,
        **{f.name: v[f.name] for f in fields(ModelConfig) if f.name in v})
    kinds = [name.rpartition('For')[2] for name in raw.get('architectures') or ()]
    config.reward = 'SequenceClassification' in kinds
    config.final_logit_softcapping = v.get('final_logit_softcapping', own.get('softcap'))
    if 'query_pre_attn_scalar' in v:
        config.scale = v['query_pre_attn_scalar'] ** -0.5
    return config


def config_to_hf(config: ModelConfig) -> dict:
    """Return the content of a `config.json` that transformers 4 and 5 and vLLM read."""
    if config.model_type in t5.ARCHITECTURES:
        return config.hf
    kind, cap = config.model_type, config.final_logit_softcapping
    own = {} if config.temperature == 1 else {'temperature': config.temperature}
    values = {'architectures': [ARCHITECTURES[kind]], 'torch_dtype': config.dtype}
    if config.reward:       # transformers has as many labels as names
        values |= {'architectures': [ARCHITECTURES[kind].replace(*REWARD)],
                   'id2label': {'0': 'LABEL_0'}, 'label2id': {'LABEL_0': 0}}
    if 'final_logit_softcapping' in DEFAULTS[kind]:
        values['final_logit_softcapping'] = cap
    elif cap:
        own['softcap'] = cap
    return config.hf | values | ({'nanocal': own} if own else {})


def _family(v):
    """Return the row of FAMILIES with what the keys of a config.json change in it."""
    changes = {}
    if 'attention_bias' in v:
        changes |= dict.fromkeys(('qkv_bias', 'o_bias'), v['attention_bias'])
    if 'mlp_bias' in v:
        changes['mlp_bias'] = v['mlp_bias']
    if v.get('use_parallel_residual') is False:
        changes['place'] = 'before'
    return replace(FAMILIES[v['model_type']], **changes)


def _layers(v, ropes, where):
    """Return the list of layers: which have a window, and rotary positions, of which kind."""
    n, window, kinds = v['num_hidden_layers'], v.get('sliding_window'), v.get('layer_types')
    if not v.get('use_sliding_window', True):
        window = None
    if kinds is None and (pattern := v.get('sliding_window_pattern', PATTERN.get(v['model_type']))):
        kinds = ['sliding_attention' if (i + 1) % pattern else 'full_attention' for i in range(n)]
    elif kinds is None:
        kinds = ['sliding_attention' if window and i >= v.get('max_window_layers', 0) else
                 'full_attention' for i in range(n)]
    if len(kinds) != n:
        raise CheckpointError(f'{where}: layer_types has {len(kinds)} items for '
                              f'num_hidden_layers = {n}')
    if 'sliding_attention' in kinds and not window:
        raise CheckpointError(f'{where}: sliding_window = None beside layer_types with '
                              f'sliding_attention; it must be an integer')
    return [Layer(window if kind == 'sliding_attention' else None, ropes[kind]) for kind in kinds]


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


def _outside(kind):
    """Return {key of a block: its name outside} of the keys that may be in either place."""
    return {'rope_theta': 'rope_theta', 'partial_rotary_factor': 'partial_rotary_factor',
            } | OUTSIDE.get(kind, {})


def _ropes(hf, v, where):
    """Return ({layer type: Rope}, the content of config.json as transformers 4 spells it).

    transformers 4 has rope_theta and rope_scaling, transformers 5 has both in rope_parameters.
    Raises CheckpointError if two values disagree, or for a scheme that is not implemented.
    """
    names = _outside(v['model_type'])
    if names['rope_theta'] not in v:
        return dict.fromkeys(('full_attention', 'sliding_attention')), hf
    blocks = [key for key in ROPE_BLOCKS if hf.get(key)]
    if len(blocks) == 2:
        raise CheckpointError(f'{where}: has {blocks[0]} and {blocks[1]}; remove the wrong one')
    name, block = (blocks[0], hf[blocks[0]]) if blocks else ('', {})
    rope = _rope(block, name, names, hf, v, where)
    if block:
        rest = {k: x for k, x in block.items() if k not in names}
        scheme = block.get('rope_type', block.get('type', 'default'))
        hf = {k: x for k, x in hf.items() if k not in ROPE_BLOCKS} | {
            'rope_scaling': None if scheme == 'default' else rest,
            **{names[k]: float(x) for k, x in block.items() if k in names},
            names['rope_theta']: rope.theta}
    return dict.fromkeys(('full_attention', 'sliding_attention'), rope), hf


def _rope(block, name, names, hf, v, where):
    """Return the Rope of a block; `names` are those of its keys outside, in hf."""
    scheme = block.get('rope_type', block.get('type', 'default'))
    needed, optional = SCHEMES.get(scheme, ({}, {})) if isinstance(scheme, str) else ({}, {})
    part = {'partial_rotary_factor': rules_of(v['model_type'])[names['partial_rotary_factor']]}
    rules = ROPE_FIELDS | part | needed | optional
    check_values(block, rules, f'{where}: rope_type {scheme!r}', f'{name}.', needed)
    for key, value in block.items():
        outside = names.get(key, key)
        other = block.get('rope_type', value) if key == 'type' else hf.get(outside, value)
        if value != other:
            raise CheckpointError(f'{where}: {name}.{key} = {value!r} and {outside} = {other!r} '
                                  f'disagree; remove the wrong one')
    theta = block.get('rope_theta', v[names['rope_theta']])
    share = block.get('partial_rotary_factor', v[names['partial_rotary_factor']])
    hd, dim = v['head_dim'], int(v['head_dim'] * (1 if share is None else share))
    if dim % 2 or not dim:
        problem = (f'head_dim = {hd} is odd' if dim == hd else
                   f'{names["partial_rotary_factor"]} = {share} of head_dim = {hd} is {dim}')
        raise CheckpointError(f'{where}: {problem}; rotary positions need pairs')
    rope = Rope(float(theta), dim)
    if scheme == 'llama3':
        low, high = block['low_freq_factor'], block['high_freq_factor']
        if high <= low:
            raise CheckpointError(f'{where}: {name}.high_freq_factor must be greater than '
                                  f'low_freq_factor = {low}')
        return replace(rope, scheme=scheme, factor=block['factor'], slow=low, fast=high,
                       length=block['original_max_position_embeddings'])
    return rope
