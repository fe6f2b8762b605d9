"""Read, check and write the config.json of a model in the Hugging Face layout.

A model is computed as transformers computes it. A value that this program does not support is an
error that names its key.
"""

import difflib
import functools
import json
import math
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
                 'gemma3_text': 'Gemma3ForCausalLM', 'cohere': 'CohereForCausalLM',
                 'cohere2': 'Cohere2ForCausalLM', 'olmo2': 'Olmo2ForCausalLM',
                 'olmo3': 'Olmo3ForCausalLM', 'smollm3': 'SmolLM3ForCausalLM',
                 'phi3': 'Phi3ForCausalLM', 'ministral': 'MinistralForCausalLM',
                 'ministral3': 'Ministral3ForCausalLM', 'granite': 'GraniteForCausalLM',
                 'opt': 'OPTForCausalLM', 'gpt_neox': 'GPTNeoXForCausalLM'}
REWARD = 'CausalLM', 'SequenceClassification'     # how transformers names a reward model
# models of text and images, of which the text model is read, and the type of that if none is given
NESTED = {'gemma3': 'gemma3_text', 'mistral3': 'mistral'}
# The keys of a family beyond those of COMMON, and what transformers assumes where they are missing.
# A key that is in neither means nothing to transformers.
COMMON = {'vocab_size': None, 'hidden_size': None, 'num_hidden_layers': None,
          'num_attention_heads': None, 'max_position_embeddings': 2048,
          'initializer_range': 0.02, 'tie_word_embeddings': False, 'bos_token_id': None,
          'eos_token_id': None, 'pad_token_id': None}
REQUIRED = ('vocab_size', 'hidden_size', 'intermediate_size', 'num_hidden_layers',
            'num_attention_heads')
ROTARY = {'intermediate_size': None, 'num_key_value_heads': 0, 'head_dim': 0, 'hidden_act': 'silu',
          'rope_theta': 1e4, 'partial_rotary_factor': 1.0, 'attention_dropout': 0.0}
LLAMA = ROTARY | {'rms_norm_eps': 1e-6}
BIAS = {'attention_bias': False}
WINDOW = {'sliding_window': 4096, 'layer_types': None}
QWEN = LLAMA | {'num_key_value_heads': 32, 'max_position_embeddings': 32768,
                'use_sliding_window': False, 'max_window_layers': 28} | WINDOW
GEMMA = LLAMA | BIAS | {'tie_word_embeddings': True, 'head_dim': 256,
                        'max_position_embeddings': 8192, 'hidden_act': 'gelu_pytorch_tanh',
                        'hidden_activation': 'gelu_pytorch_tanh'}
GEMMA2 = GEMMA | WINDOW | {'num_key_value_heads': 4, 'query_pre_attn_scalar': 256,
                           'final_logit_softcapping': 30.0, 'attn_logit_softcapping': 50.0}
GEMMA3 = {key: value for key, value in GEMMA2.items() if key != 'attn_logit_softcapping'} | {
    'vocab_size': 262208, 'hidden_size': 2304, 'intermediate_size': 9216, 'num_hidden_layers': 26,
    'num_attention_heads': 8, 'max_position_embeddings': 131072, 'final_logit_softcapping': None,
    'rope_theta': 1e6, 'rope_local_base_freq': 1e4, 'sliding_window_pattern': 6}
MISTRAL = LLAMA | WINDOW | {'num_key_value_heads': 8, 'max_position_embeddings': 131072}
OLMO = LLAMA | BIAS | {'rms_norm_eps': 1e-5}
COHERE = ROTARY | BIAS | {'tie_word_embeddings': True, 'max_position_embeddings': 8192,
                          'logit_scale': 0.0625, 'layer_norm_eps': 1e-5}
DEFAULTS = {
    'llama': LLAMA | BIAS | {'mlp_bias': False},
    'mistral': MISTRAL,
    'qwen2': QWEN,
    'qwen3': QWEN | BIAS | {'head_dim': 128},
    'gemma': GEMMA | {'num_key_value_heads': 16},
    'gemma2': GEMMA2,
    'gemma3_text': GEMMA3,
    'cohere': COHERE | {'rope_theta': 5e5, 'use_qk_norm': False},
    'cohere2': COHERE | WINDOW | {'sliding_window_pattern': 4},
    'olmo2': OLMO,
    'olmo3': OLMO | WINDOW | {'rope_theta': 5e5},
    'smollm3': LLAMA | BIAS | {
        'mlp_bias': False, 'num_key_value_heads': 4, 'max_position_embeddings': 32768,
        'rope_theta': 2e6, 'tie_word_embeddings': True, 'use_sliding_window': False,
        'sliding_window': None, 'layer_types': None, 'no_rope_layers': None,
        'no_rope_layer_interval': 4},
    'phi3': LLAMA | {'rms_norm_eps': 1e-5, 'max_position_embeddings': 4096, 'sliding_window': None,
                     'original_max_position_embeddings': 4096, 'resid_pdrop': 0.0,
                     'embd_pdrop': 0.0},
    'ministral': MISTRAL,
    'ministral3': LLAMA | {'num_key_value_heads': 8, 'head_dim': 128, 'rms_norm_eps': 1e-5,
                           'max_position_embeddings': 262144, 'sliding_window': None},
    'granite': LLAMA | BIAS | {'mlp_bias': False, 'embedding_multiplier': 1.0,
                               'residual_multiplier': 1.0, 'attention_multiplier': 1.0,
                               'logits_scaling': 1.0},
    'opt': {'ffn_dim': 3072, 'word_embed_proj_dim': None, 'do_layer_norm_before': True,
            'enable_bias': True, 'tie_word_embeddings': True, 'init_std': 0.02,
            'activation_function': 'relu', 'layer_norm_elementwise_affine': True,
            '_remove_final_layer_norm': False, 'dropout': 0.1, 'attention_dropout': 0.0,
            'layerdrop': 0.0},
    'gpt_neox': {'intermediate_size': None, 'hidden_act': 'gelu', 'layer_norm_eps': 1e-5,
                 'rotary_emb_base': 1e4, 'rotary_pct': 0.25, 'attention_bias': True,
                 'use_parallel_residual': True, 'attention_dropout': 0.0, 'hidden_dropout': 0.0,
                 'classifier_dropout': 0.1, 'is_decoder': False},
}
# every n-th layer has no window, if config.json does not say which
PATTERN = {'gemma2': 2, 'olmo3': 4}

# the allowed values of each key, as alternatives: (lowest, highest) of integers or, if these are
# floats, of any numbers; a type; [alternatives for the items of a list]; or a value
SIZE, COUNT, TOKEN, CAP, SHARE = (1, 2**20), (1, 2**31), (0, 2**31), (1e-3, 1e6), (0.0, 1.0)
FACTOR, EPS, POSITIVE = (1.0, 1e6), (1e-12, 1.0), (1e-6, 1e6)
FIELDS = {key: rule for keys, rule in {
    'vocab_size hidden_size intermediate_size num_attention_heads num_key_value_heads '
    'ffn_dim': [SIZE],
    'head_dim word_embed_proj_dim': [SIZE, None],
    'num_hidden_layers': [(1, 10_000)],
    'max_position_embeddings query_pre_attn_scalar original_max_position_embeddings': [COUNT],
    'max_window_layers': [(0, 10_000)],
    'sliding_window_pattern no_rope_layer_interval': [(1, 10_000)],
    'no_rope_layers': [[(0, 1)], None],
    'embedding_multiplier residual_multiplier attention_multiplier logits_scaling '
    'logit_scale': [POSITIVE],
    'sliding_window': [COUNT, None],
    'layer_types': [['sliding_attention', 'full_attention'], None],
    'rms_norm_eps layer_norm_eps': [EPS],
    'rope_theta rope_local_base_freq rotary_emb_base': [(1.0, 1e30)],
    'partial_rotary_factor': [(1.0, 1.0), None],
    'rotary_pct': [SHARE],
    'attn_logit_softcapping final_logit_softcapping': [CAP, None],
    'initializer_range init_std attention_dropout hidden_dropout classifier_dropout dropout '
    'layerdrop resid_pdrop embd_pdrop': [SHARE],
    'bos_token_id eos_token_id': [TOKEN, [TOKEN], None],
    'pad_token_id': [(-1, 2**31), [TOKEN], None],    # -1: none, in early conversions of LLaMA
    'dtype torch_dtype': ['float32', 'bfloat16', 'float16', 'float64', None],
    'tie_word_embeddings use_cache attention_bias mlp_bias use_parallel_residual is_decoder '
    'use_sliding_window use_qk_norm do_layer_norm_before enable_bias': [bool],
    'activation_function': ['relu'],
    'layer_norm_elementwise_affine': [True],
    '_remove_final_layer_norm': [False],
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
    'gemma3_text': {'head_dim': [SIZE], 'hidden_act': ['gelu_pytorch_tanh'],
                    'attn_logit_softcapping': [CAP, None]},     # not used by transformers
    **dict.fromkeys(('cohere', 'cohere2', 'olmo2', 'olmo3', 'smollm3', 'granite'),
                    {'head_dim': [SIZE]}),
    'phi3': {'head_dim': [SIZE], 'partial_rotary_factor': [SHARE]},
    # in transformers, head_dim would change the rotary angles but not the size of the heads
    'gpt_neox': {'head_dim': [None], 'hidden_act': ['gelu'], 'tie_word_embeddings': [False]},
}
FLOATS = {'rms_norm_eps', 'layer_norm_eps', 'initializer_range', 'attn_logit_softcapping',
          'final_logit_softcapping', 'rope_theta', 'rotary_emb_base', 'logit_scale',
          'init_std'}
OUR_NAMES = {'rms_norm_eps': 'norm_eps', 'layer_norm_eps': 'norm_eps', 'ffn_dim':
             'intermediate_size', 'word_embed_proj_dim': 'embed_size', 'init_std':
             'initializer_range', 'embedding_multiplier': 'embed_scale', 'residual_multiplier':
             'residual_scale', 'attention_multiplier': 'scale'}
# {key: the fields of Family that it sets}
BIASES = {'attention_bias': ('qkv_bias', 'o_bias'), 'mlp_bias': ('mlp_bias',),
          'enable_bias': ('qkv_bias', 'o_bias', 'mlp_bias')}
# {key: (value, field of Family, its value then)}
PLACES = {'use_parallel_residual': (False, 'place', 'before'), 'use_qk_norm': (True, 'qk_norm',
          'each'), 'do_layer_norm_before': (False, 'place', 'after the sum')}

# rotary positions: a block of transformers 5 or 4, and two keys outside it, with their names there
ROPE_BLOCKS = ('rope_parameters', 'rope_scaling')
OUTSIDE = {'gpt_neox': {'rope_theta': 'rotary_emb_base', 'partial_rotary_factor': 'rotary_pct'}}
LENGTH = 'original_max_position_embeddings'
MAYBE = dict.fromkeys(('attention_factor', 'beta_fast', 'beta_slow', 'mscale', 'mscale_all_dim'),
                      [POSITIVE, None])
LONGROPE = ({'short_factor': [[POSITIVE]], 'long_factor': [[POSITIVE]]},
            {LENGTH: [COUNT], 'factor': [FACTOR], 'attention_factor': [POSITIVE, None]})
SCHEMES = {     # {rope_type: (the keys that it needs, those that it may have)}
    'default': ({}, {}),
    'linear': ({'factor': [FACTOR]}, {}),
    'dynamic': ({'factor': [FACTOR]}, {}),
    'llama3': ({'factor': [FACTOR], 'low_freq_factor': [POSITIVE], 'high_freq_factor': [POSITIVE],
                LENGTH: [COUNT]}, {}),
    'yarn': ({'factor': [FACTOR]}, MAYBE | {LENGTH: [COUNT], 'truncate': [bool]}),
    'longrope': LONGROPE, 'su': LONGROPE,
}
OWN_SCHEMES = {'phi3': ['default', 'longrope', 'su'], 'ministral3': ['yarn']}
OTHERS = ['default', 'linear', 'dynamic', 'llama3', 'yarn', 'longrope']
MINISTRAL3_ROPE = {'rope_type': 'yarn', 'rope_theta': 1e6, 'factor': 16.0, LENGTH: 16384,
                   'beta_fast': 32.0, 'beta_slow': 1.0, 'mscale_all_dim': 1.0, 'mscale': 1.0,
                   'llama_4_scaling_beta': 0.1}
# families with a block per layer type, and the name of the base of windowed layers outside it
BY_LAYER_TYPE = {'gemma3_text': 'rope_local_base_freq', 'olmo3': ''}
# adapter_config.json, as `save_adapter` writes it
ADAPTER_FIELDS = {'peft_type': ['LORA'], 'task_type': ['CAUSAL_LM'],
                  'base_model_name_or_path': [str], 'r': [SIZE], 'lora_alpha': [(0.0, 1e9)],
                  'lora_dropout': [SHARE], 'target_modules': [[str]], 'bias': ['none'],
                  'fan_in_fan_out': [False], 'inference_mode': [True]}
# the block `nanocal`: logits = softcap * tanh(hidden @ head.T / (temperature * softcap))
NANOCAL_FIELDS = {'softcap': [CAP, None], 'temperature': [(1e-3, 1e3)], 'long_context': [bool]}


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
    check_values(raw, {'model_type': [*ARCHITECTURES, *NESTED], 'text_config': [dict]}, where,
                 required=['model_type'])
    if raw['model_type'] in NESTED:
        return config_from_hf(_text_part(raw), where)
    kind = raw['model_type']
    defaults = COMMON | DEFAULTS[kind]
    check_values(raw, rules_of(kind), where,
                 required=[key for key in REQUIRED if defaults.get(key, 0) is None])
    own = raw.get('nanocal') or {}
    check_values(own, NANOCAL_FIELDS, where, 'nanocal.')
    if 'softcap' in own and 'final_logit_softcapping' in defaults:
        raise CheckpointError(f'{where}: nanocal.softcap is for other models; {kind} has '
                              f'final_logit_softcapping')
    hf = {k: float(v) if k in FLOATS and type(v) is int else v for k, v in raw.items()
          if k not in ('dtype', 'torch_dtype', 'architectures', 'nanocal')}
    if own.get('long_context'):
        hf['nanocal'] = {'long_context': True}
    v = defaults | {key: hf[key] for key in defaults.keys() & hf.keys()} | {
        'model_type': kind, 'long_context': own.get('long_context', False)}
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
    kinds = [name.rpartition('For')[2] for name in raw.get('architectures') or ()]
    # OPT has the eps of torch
    values = {'norm_eps': 1e-5} | {OUR_NAMES.get(key, key): value for key, value in v.items()}
    if 'query_pre_attn_scalar' in v:
        values['scale'] = v['query_pre_attn_scalar'] ** -0.5
    if 'logits_scaling' in v:
        values['logit_scale'] = 1 / v['logits_scaling']
    rope = ropes['full_attention']
    if rope and rope.scheme == 'longrope' and not v['long_context']:
        values['max_position_embeddings'] = min(v['max_position_embeddings'], rope.length)
    values |= {'temperature': float(own.get('temperature', 1.0)), 'hf': hf, 'family': _family(v),
               'layers': _layers(v, ropes, where), 'reward': 'SequenceClassification' in kinds,
               'dtype': raw.get('dtype') or raw.get('torch_dtype') or 'float32',
               'final_logit_softcapping': v.get('final_logit_softcapping', own.get('softcap'))}
    return ModelConfig(**{f.name: values[f.name] for f in fields(ModelConfig) if f.name in values})


def _text_part(raw):
    """Return the config.json of the text model alone, from that of a model of text and images."""
    text = {'model_type': NESTED[raw['model_type']]} | raw.get('text_config', {})
    # where transformers ties although the file does not say so, check_weights misses a tensor
    for key in ('tie_word_embeddings', 'eos_token_id', 'dtype', 'torch_dtype', 'nanocal',
                'quantization_config'):
        if key in raw:
            text[key] = raw[key]
    return text


def config_to_hf(config: ModelConfig) -> dict:
    """Return the content of a `config.json` that transformers 4 and 5 and vLLM read."""
    if config.model_type in t5.ARCHITECTURES:
        return config.hf
    kind, cap = config.model_type, config.final_logit_softcapping
    own = dict(config.hf.get('nanocal', {}))
    if config.temperature != 1:
        own['temperature'] = config.temperature
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
    changes = {field: v[key] for key in BIASES.keys() & v.keys() for field in BIASES[key]}
    changes |= {field: value for key, (when, field, value) in PLACES.items() if v.get(key) is when}
    return replace(FAMILIES[v['model_type']], **changes)


def _layers(v, ropes, where):
    """Return the list of layers: which have a window, and rotary positions, of which kind."""
    n, window, kinds = v['num_hidden_layers'], v.get('sliding_window'), v.get('layer_types')
    rotated = [True] * n
    if 'no_rope_layers' in v:       # 1 means with rotary positions
        rotated = v['no_rope_layers'] or [(i + 1) % v['no_rope_layer_interval'] for i in range(n)]
    if not v.get('use_sliding_window', True) and not ('no_rope_layers' in v and kinds):
        window = None
    if kinds is None:
        pattern = v.get('sliding_window_pattern', PATTERN.get(v['model_type']))
        windowed = ([(i + 1) % pattern for i in range(n)] if pattern else
                    [window and not rotated[i] for i in range(n)] if 'no_rope_layers' in v else
                    [window and i >= v.get('max_window_layers', 0) for i in range(n)])
        kinds = ['sliding_attention' if yes else 'full_attention' for yes in windowed]
    for key, values in (('layer_types', kinds), ('no_rope_layers', rotated)):
        if len(values) != n:
            raise CheckpointError(f'{where}: {key} has {len(values)} items for '
                                  f'num_hidden_layers = {n}')
    if 'sliding_attention' in kinds and not window:
        raise CheckpointError(f'{where}: sliding_window = None beside layer_types with '
                              f'sliding_attention; it must be an integer')
    if v['model_type'] == 'cohere2':
        rotated = [kind == 'sliding_attention' for kind in kinds]
    return [Layer(window if kind == 'sliding_attention' else None, ropes[kind] if yes else None)
            for kind, yes in zip(kinds, rotated, strict=True)]


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
    kind, names = v['model_type'], _outside(v['model_type'])
    if names['rope_theta'] not in v:
        return dict.fromkeys(('full_attention', 'sliding_attention')), hf
    blocks = [key for key in ROPE_BLOCKS if hf.get(key)]
    if len(blocks) == 2:
        raise CheckpointError(f'{where}: has {blocks[0]} and {blocks[1]}; remove the wrong one')
    name, block = (blocks[0], hf[blocks[0]]) if blocks else ('rope_parameters', {})
    if kind in BY_LAYER_TYPE:
        parts = {'full_attention': block} if name == 'rope_scaling' else block
        check_values(parts, dict.fromkeys(('full_attention', 'sliding_attention'), [dict, None]),
                     where, f'{name}.')
        local = names | {'rope_theta': BY_LAYER_TYPE[kind]}
        return {layer: _rope(parts.get(layer) or {}, f'{name}.{layer}', outside, hf, v, where)
                for layer, outside in (('full_attention', names), ('sliding_attention', local))}, hf
    missing = kind == 'ministral3' and not block and hf.get('rope_parameters') is None
    rope = _rope(MINISTRAL3_ROPE if missing else block, name, names, hf, v, where)
    if block:
        scheme = block.get('rope_type', block.get('type', 'default'))
        hf = {k: x for k, x in hf.items() if k not in ROPE_BLOCKS} | {
            'rope_scaling': None if scheme == 'default' else {
                k: x for k, x in block.items() if k not in names},
            **{names[k]: float(x) for k, x in block.items() if k in names},
            names['rope_theta']: rope.theta}
    return dict.fromkeys(('full_attention', 'sliding_attention'), rope), hf


def _rope(block, name, names, hf, v, where):
    """Return the Rope of a block; `names` are those of its keys outside, in hf."""
    kind, scheme = v['model_type'], block.get('rope_type', block.get('type', 'default'))
    allowed = OWN_SCHEMES.get(kind, OTHERS)
    needed, optional = SCHEMES[scheme] if scheme in allowed else ({}, {})
    if kind == 'ministral3':
        needed = needed | {'llama_4_scaling_beta': [(0.0, 1e3)]}
        optional = optional | {'max_position_embeddings': [COUNT]}
    if kind in BY_LAYER_TYPE and 'truncate' in optional:
        optional = optional | {'truncate': [True]}      # which transformers does not read there
    rules = {'rope_type': allowed, 'type': allowed, 'rope_theta': FIELDS['rope_theta'],
             'partial_rotary_factor': rules_of(kind)[names['partial_rotary_factor']]}
    check_values(block, rules | needed | optional, f'{where}: rope_type {scheme!r}', f'{name}.',
                 needed)
    outside = {**names, 'type': 'rope_type', LENGTH: LENGTH}
    for key in outside.keys() & block.keys():
        other = (block if key == 'type' else hf).get(outside[key], block[key])
        if block[key] != other:
            raise CheckpointError(f'{where}: {name}.{key} = {block[key]!r} and {outside[key]} = '
                                  f'{other!r} disagree; remove the wrong one')
    theta = block.get('rope_theta', v.get(names['rope_theta'], DEFAULTS[kind]['rope_theta']
                                          if not names['rope_theta'] else None))
    share = block.get('partial_rotary_factor', v[names['partial_rotary_factor']])
    hd, dim = v['head_dim'], int(v['head_dim'] * (1 if share is None else share))
    if dim % 2 or not dim:
        problem = (f'head_dim = {hd} is odd' if dim == hd else
                   f'{names["partial_rotary_factor"]} = {share} of head_dim = {hd} is {dim}')
        raise CheckpointError(f'{where}: {problem}; rotary positions need pairs')
    longest = v['max_position_embeddings']
    length = v.get(LENGTH) or block.get(LENGTH) or hf.get(LENGTH) or longest
    rope = Rope(float(theta), dim, scheme, block.get('factor') or 1.0, length)
    if scheme in ('default', 'dynamic'):    # dynamic: within max_position_embeddings
        return Rope(float(theta), dim)
    if scheme == 'llama3':
        rope = replace(rope, slow=block['low_freq_factor'], fast=block['high_freq_factor'])
        if rope.fast <= rope.slow:
            raise CheckpointError(f'{where}: {name}.high_freq_factor must be greater than '
                                  f'low_freq_factor = {rope.slow}')
    elif scheme == 'yarn':
        a, b = block.get('mscale'), block.get('mscale_all_dim')
        magnitude = (_yarn_magnitude(rope.factor, a) / _yarn_magnitude(rope.factor, b) if a and b
                     else _yarn_magnitude(rope.factor))
        rope = replace(rope, slow=block.get('beta_slow') or 1.0, fast=block.get('beta_fast') or 32,
                       truncate=block.get('truncate', True),
                       magnitude=block.get('attention_factor') or magnitude,
                       query_growth=block.get('llama_4_scaling_beta', 0.0))
    elif scheme in ('longrope', 'su'):
        for key in ('short_factor', 'long_factor'):
            if len(block[key]) != dim // 2:
                raise CheckpointError(f'{where}: {name}.{key} has {len(block[key])} items for '
                                      f'{dim // 2} pairs of rotated numbers')
        factor = block.get('factor') or longest / length
        magnitude = math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 else 1.0
        divisors = block['long_factor' if v['long_context'] else 'short_factor']
        rope = replace(rope, scheme='longrope', divisors=tuple(divisors),
                       magnitude=block.get('attention_factor') or magnitude)
    return rope


def _yarn_magnitude(factor, scale=1.0):
    return 0.1 * scale * math.log(factor) + 1
