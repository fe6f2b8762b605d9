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
from runtime.config_keys import (ARCHITECTURES, BIASES, BY_LAYER_TYPE, CHANGES, COMMON,
                                 CONFIG_FIELDS, COUNT, DEFAULTS, FIELDS, FLOATS, LENGTH,
                                 MINISTRAL3_ROPE, NANOCAL_FIELDS, NESTED, OUTSIDE, OWN_ROPE_TYPES,
                                 PATTERN, REQUIRED, REWARD, ROPE_BLOCKS, ROPE_TYPES, SCHEMES,
                                 rules_of)
from runtime.errors import CheckpointError

read_json_object = functools.partial(ownership.read_json_object, error=CheckpointError)


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
    values = {'norm_eps': 1e-5} | {CONFIG_FIELDS.get(key, key): value for key, value in v.items()}
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
    changes |= {field: value for key, (when, field, value) in CHANGES.items() if v.get(key) is when}
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
    allowed = OWN_ROPE_TYPES.get(kind, ROPE_TYPES)
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
    theta = block.get('rope_theta', v.get(names['rope_theta'], DEFAULTS[kind].get('rope_theta')))
    share = block.get('partial_rotary_factor', v[names['partial_rotary_factor']])
    hd, dim = v['head_dim'], int(v['head_dim'] * (1 if share is None else share))
    if dim % 2 or not dim:
        problem = (f'head_dim = {hd} is odd' if dim == hd else
                   f'{names["partial_rotary_factor"]} = {share} of head_dim = {hd} is {dim}')
        raise CheckpointError(f'{where}: {problem}; rotary positions need pairs')
    longest = v['max_position_embeddings']
    outer = None if kind in BY_LAYER_TYPE else hf.get(LENGTH)   # as transformers reads it
    length = v.get(LENGTH) or block.get(LENGTH) or outer or longest
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
