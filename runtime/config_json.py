"""Read, check and write the config.json of a model in the Hugging Face layout.

A model is computed as transformers computes it; a value that is not supported is an error.
"""

import difflib
import math
from dataclasses import fields, replace
from pathlib import Path

from model import FAMILIES, Layer, ModelConfig, Rope
from runtime import rooms
from runtime.config_keys import (
    ALWAYS, ARCHITECTURES, BIASES, BY_LAYER_TYPE, CHANGES, CONFIG_FIELDS, DEFAULTS, FIELDS, FLOATS,
    IGNORED, LAYER_TYPES, LENGTH, NANOCAL_FIELDS, NESTED, OUTSIDE, OWN_BLOCKS, OWN_OUTSIDE,
    OWN_SCHEMES, PATTERN, REWARD, ROPE_BLOCKS, SCHEMES, SEQ2SEQ, WHOLE_HEADS, rules_of)
from runtime.errors import CheckpointError
from runtime.json_rules import check_values, read_json_object


def read_config(folder: str | Path, changes: dict | None = None, seq2seq=False) -> ModelConfig:
    """Return the configuration in the config.json of `folder`, with `changes` to its keys.

    seq2seq: whether the caller can use T5 as well, whose configuration is that of families/t5.py
    Raises CheckpointError, also for a changed key that the family lacks.
    """
    path = Path(folder, 'config.json')
    if not path.exists():
        raise CheckpointError(f'{folder} is not a model folder: it has no config.json')
    raw = read_json_object(path)
    if raw.get('model_type') in SEQ2SEQ:
        t5 = rooms.load(raw['model_type'])
        if not seq2seq:
            raise CheckpointError(f'{path}: {raw["model_type"]} is an encoder and a decoder; '
                                  f'evaluate.py scores its answers, and nothing else can use it')
        check_values(raw, t5.RULES, str(path), required=t5.REQUIRED)
        return t5.config_from_hf(raw)
    config = config_from_hf(raw, str(path))     # check the file before the changes
    if not changes:
        return config
    raw = config_to_hf(config)
    config = config_from_hf(raw | changes, f'{path} with shape = {changes}')
    known = raw.keys() | rules_of(config.model_type).keys()
    for key in sorted(changes.keys() - known, key=str):
        near = difflib.get_close_matches(str(key), known, 1, 0)[0]
        raise CheckpointError(f'shape: {config.model_type} has no key {key!r} in its config.json; '
                              f'did you mean {near!r}?')
    return config


def config_from_hf(raw: dict, where: str = 'config.json') -> ModelConfig:
    """Return the ModelConfig of a config.json; a CheckpointError names `where` and the key."""
    check_values(raw, {'model_type': [*ARCHITECTURES, *NESTED], 'text_config': [dict]}, where,
                 required=['model_type'])
    if raw['model_type'] in NESTED:
        return config_from_hf(_text_part(raw), where)
    if raw.get('quantization_config') is not None:
        raise CheckpointError(f'{where}: quantization_config: name the unquantized model instead')
    kind = raw['model_type']
    defaults = DEFAULTS[kind]
    check_values(raw, rules_of(kind), where,
                 required=[key for key, value in defaults.items() if value is ...])
    own = raw.get('nanocal') or {}
    check_values(own, NANOCAL_FIELDS, where, 'nanocal.')
    if 'softcap' in own and 'final_logit_softcapping' in defaults:
        raise CheckpointError(f'{where}: nanocal.softcap is for other models; {kind} has '
                              f'final_logit_softcapping')
    hf = {k: float(v) if k in FLOATS and type(v) is int else v for k, v in raw.items()
          if k not in ('dtype', 'torch_dtype', 'architectures', 'nanocal')}
    if own.get('long_context'):
        hf['nanocal'] = {'long_context': True}
    v = {key: hf[key] for key in ALWAYS if key in hf} | defaults | {
        key: hf[key] for key in defaults if key in hf} | {
        'model_type': kind, 'long_context': own.get('long_context', False)}
    v['num_key_value_heads'] = v.get('num_key_value_heads') or v['num_attention_heads']
    v['head_dim'] = v.get('head_dim') or v['hidden_size'] // v['num_attention_heads']
    for key, divisor in (('hidden_size', 'num_attention_heads'),
                         ('num_attention_heads', 'num_key_value_heads')):
        if v[key] % v[divisor] and (key != 'hidden_size' or kind in WHOLE_HEADS):
            raise CheckpointError(f'{where}: {key} = {v[key]} is not a multiple of {divisor} = '
                                  f'{v[divisor]}')
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
    changes = {field: v[key] for key in BIASES.keys() & v.keys() for field in BIASES[key]}
    changes |= {field: value for key, (when, field, value) in CHANGES.items() if v.get(key) is when}
    values |= {'temperature': float(own.get('temperature', 1.0)), 'hf': hf,
               'family': replace(FAMILIES[kind], **changes),
               'layers': _layers(v, ropes, where), 'reward': 'SequenceClassification' in kinds,
               'dtype': raw.get('dtype') or raw.get('torch_dtype') or 'float32',
               'final_logit_softcapping': v.get('final_logit_softcapping', own.get('softcap'))}
    return ModelConfig(**{f.name: values[f.name] for f in fields(ModelConfig) if f.name in values})


def _text_part(raw):
    text = {'model_type': NESTED[raw['model_type']]} | raw.get('text_config', {})
    if text['model_type'] == 'mistral':     # where transformers reads no layer_types beside images
        text.pop('layer_types', None)
    # where transformers ties although the file does not say so, check_weights misses a tensor
    for key in ('tie_word_embeddings', 'eos_token_id', 'dtype', 'torch_dtype', 'nanocal',
                'quantization_config'):
        if key in raw:
            text[key] = raw[key]
    # transformers caps the logits of Gemma 3 with text alone, but not beside images
    if 'final_logit_softcapping' in text:
        text['final_logit_softcapping'] = None
    return text


def config_to_hf(config: ModelConfig) -> dict:
    """Return the content of a `config.json` that transformers 4 and 5 and vLLM read."""
    if config.model_type in SEQ2SEQ:
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


def _layers(v, ropes, where):
    """Return the list of layers: which have a window, and rotary positions, of which kind."""
    n = v['num_hidden_layers']
    window = v.get('sliding_window')
    kinds = v.get('layer_types')
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


def _ropes(hf, v, where):
    """Return ({layer type: Rope}, hf as transformers 4 spells it); v: hf with all defaults."""
    kind = v['model_type']
    names = OWN_OUTSIDE.get(kind, OUTSIDE)
    if names['rope_theta'] not in v:
        return dict.fromkeys(LAYER_TYPES), hf
    blocks = [key for key in ROPE_BLOCKS if hf.get(key)]
    if len(blocks) == 2:
        raise CheckpointError(f'{where}: has {blocks[0]} and {blocks[1]}; remove the wrong one')
    name = blocks[0] if blocks else 'rope_parameters'
    block = hf.get(name) or (OWN_BLOCKS.get(kind, {}) if hf.get('rope_parameters') is None else {})
    if kind in BY_LAYER_TYPE:
        if name == 'rope_scaling' and 'type' in block and 'rope_type' not in block:
            raise CheckpointError(f'{where}: rope_scaling.type means nothing to transformers in a '
                                  f'{kind}; name it rope_type')
        parts = {'full_attention': block} if name == 'rope_scaling' else block
        check_values(parts, dict.fromkeys(LAYER_TYPES, [dict, None]), where, f'{name}.')
        local = names | {'rope_theta': BY_LAYER_TYPE[kind]}
        return {layer: _rope(parts.get(layer) or {}, f'{name}.{layer}', outside, hf, v, where)
                for layer, outside in zip(LAYER_TYPES, (names, local), strict=True)}, hf
    rope = _rope(block, name, names, hf, v, where)
    if blocks:
        scheme = block.get('rope_type', block.get('type', 'default'))
        hf = {k: x for k, x in hf.items() if k not in ROPE_BLOCKS} | {
            'rope_scaling': None if scheme == 'default' else {
                k: x for k, x in block.items() if k not in names},
            **{names[k]: float(x) for k, x in block.items() if k in names},
            names['rope_theta']: rope.theta}
    return dict.fromkeys(LAYER_TYPES, rope), hf


def _rope(block, name, names, hf, v, where):
    """Return the Rope of a block; `names` are those of its keys outside, in hf."""
    kind, scheme = v['model_type'], block.get('rope_type', block.get('type', 'default'))
    schemes = OWN_SCHEMES.get(kind, SCHEMES)
    needed, optional = schemes[scheme] if scheme in [*schemes] else ({}, {})
    rules = {'rope_type': [*schemes], 'type': [*schemes], 'rope_theta': FIELDS['rope_theta'],
             'partial_rotary_factor': rules_of(kind)[names['partial_rotary_factor']]}
    rules |= needed | optional
    block = {key: value for key, value in block.items() if key in rules or key not in IGNORED}
    check_values({'rope_type': scheme} | block, rules,
                 f'{where}: rope_type {scheme!r}', f'{name}.', needed)
    for key, outside in {**names, 'type': 'rope_type', LENGTH: LENGTH}.items():
        other = (block if key == 'type' else hf).get(outside, block.get(key))
        if key in block and block[key] != other:
            raise CheckpointError(f'{where}: {name}.{key} = {block[key]!r} and {outside} = '
                                  f'{other!r} disagree; remove the wrong one')
    theta = block.get('rope_theta', v.get(names['rope_theta'], DEFAULTS[kind].get('rope_theta')))
    share = block.get('partial_rotary_factor', v[names['partial_rotary_factor']])
    dim = int(v['head_dim'] * (1 if share is None else share))
    if dim % 2 or not dim:
        raise CheckpointError(f'{where}: {names["partial_rotary_factor"]} = {share} of head_dim = '
                              f'{v["head_dim"]} is {dim}; it must be even and above 0. Without '
                              f'head_dim that is hidden_size / num_attention_heads')
    if scheme in ('default', 'dynamic'):    # dynamic: within max_position_embeddings
        return Rope(float(theta), dim)
    longest = v['max_position_embeddings']
    outer = None if kind in BY_LAYER_TYPE else hf.get(LENGTH)   # as transformers reads it
    length = v.get(LENGTH) or block.get(LENGTH) or outer or longest
    factor = block.get('factor') or longest / length
    magnitude = 1.0
    own = {}
    if scheme == 'llama3':
        own = {'slow': block['low_freq_factor'], 'fast': block['high_freq_factor']}
        if own['fast'] <= own['slow']:
            raise CheckpointError(f'{where}: {name}.high_freq_factor must be greater than '
                                  f'low_freq_factor = {own["slow"]}')
    elif scheme == 'yarn':
        a, b = block.get('mscale'), block.get('mscale_all_dim')
        a, b = (0.1 * x * math.log(factor) + 1 for x in ((a, b) if a and b else (1.0, 0.0)))
        magnitude = a / b
        own = {'slow': block.get('beta_slow') or 1.0, 'fast': block.get('beta_fast') or 32,
               'truncate': block.get('truncate', True),
               'query_growth': block.get('llama_4_scaling_beta', 0.0)}
    elif scheme in ('longrope', 'su'):
        scheme = 'longrope'
        for key in ('short_factor', 'long_factor'):
            if len(block[key]) != dim // 2:
                raise CheckpointError(f'{where}: {name}.{key} has {len(block[key])} items for '
                                      f'{dim // 2} pairs of rotated numbers')
        if factor > 1:
            magnitude = math.sqrt(1 + math.log(factor) / math.log(length))
        own = {'divisors': tuple(block['long_factor' if v['long_context'] else 'short_factor'])}
    return Rope(float(theta), dim, scheme, factor, length,
                magnitude=block.get('attention_factor') or magnitude, **own)
