"""The rotary positions of a config.json: the blocks that hold them, and the schemes.

transformers 5 has a block `rope_parameters`, transformers 4 a block `rope_scaling` beside
rope_theta. docs/models.md explains the schemes; `frequencies` of model.py computes them.
"""

import math

from model import Rope
from runtime.config_keys import COUNT, DEFAULTS, FACTOR, FIELDS, POSITIVE, rules_of
from runtime.errors import CheckpointError
from runtime.json_rules import check_values, each

ROPE_BLOCKS = ('rope_parameters', 'rope_scaling')
LAYER_TYPES = ('full_attention', 'sliding_attention')
# {key of a block: its name outside the block, where it may be instead}
OUTSIDE = {'rope_theta': 'rope_theta', 'partial_rotary_factor': 'partial_rotary_factor'}
OWN_OUTSIDE = {'gpt_neox': {'rope_theta': 'rotary_emb_base', 'partial_rotary_factor': 'rotary_pct'}}
# families with a block per layer type, and the name of the base of windowed layers outside it
BY_LAYER_TYPE = {'gemma3_text': 'rope_local_base_freq', 'olmo3': ''}
LENGTH = 'original_max_position_embeddings'
SCALED = {'factor': [FACTOR]}
YARN = each({'attention_factor': [POSITIVE, None], LENGTH: [COUNT], 'truncate': [bool],
             # 0 is as if the key were missing
             'beta_fast beta_slow mscale mscale_all_dim': [(0.0, 1e6), None]})
SCHEMES = {     # {rope_type: (the keys that it needs, those that it may have)}
    'default': ({}, {}),
    'linear': (SCALED, {}),
    'dynamic': (SCALED, {}),
    'llama3': (SCALED | each({'low_freq_factor high_freq_factor': [POSITIVE], LENGTH: [COUNT]}),
               {}),
    'yarn': (SCALED, YARN),
    'longrope': (each({'short_factor long_factor': [[POSITIVE]]}),
                 SCALED | {LENGTH: [COUNT], 'attention_factor': [POSITIVE, None]}),
}
# keys that transformers ignores where the scheme has no use for them; any other one is an error
IGNORED = {'finetuned'}.union(*(part for parts in SCHEMES.values() for part in parts))
OWN_SCHEMES = {
    'phi3': {'default': SCHEMES['default'], 'longrope': SCHEMES['longrope'],
             'su': SCHEMES['longrope']},
    'ministral3': {'yarn': (SCALED | {'llama_4_scaling_beta': [(0.0, 1e3)]},
                            YARN | {'max_position_embeddings': [COUNT]})},
    # in a block per layer type, transformers does not read `truncate`
    **dict.fromkeys(BY_LAYER_TYPE, SCHEMES | {'yarn': (SCALED, YARN | {'truncate': [True]})}),
}
# the block of a family, if it has none
OWN_BLOCKS = {'ministral3': {
    'rope_type': 'yarn', 'rope_theta': 1e6, 'factor': 16.0, LENGTH: 16384, 'beta_fast': 32.0,
    'beta_slow': 1.0, 'mscale_all_dim': 1.0, 'mscale': 1.0, 'llama_4_scaling_beta': 0.1}}


def read_ropes(hf: dict, v: dict, where: str) -> tuple[dict, dict]:
    """Return ({layer type: Rope}, the content of config.json as transformers 4 spells it).

    hf: that content; v: its values, with defaults where they are missing. Raises CheckpointError if
    two values disagree, or for a scheme that is not implemented.
    """
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
    factor, magnitude, own = block.get('factor') or longest / length, 1.0, {}
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
