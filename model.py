"""Llama 3.x, Gemma 2 and Mistral: one decoder, read from and written to Hugging Face safetensors.

A batch is rows of packed tokens. Beside `tokens [B, T]` go two integer arrays of the same shape:

    positions   the token's position in its own text, for the rotary embedding and the window
    ends        the row index where the last token that may see this one stands, plus one

Token i sees token j when  j <= i < ends[j]  (and, in a windowed layer, positions[i] - positions[j]
< window). For training `ends` is the end of the token's document, so documents in a row are
isolated. For a tree, as in evaluation, a shared prefix ends where its last descendant ends, a
question where its last option ends, and an option where it ends itself. Padding ends at once.
`ends` may be None where each row is one document, and perhaps padding after it: that needs no mask.

The model returns hidden states, not logits: what to do with the output matrix `model.head` (and the
soft-cap `model.config.final_logit_softcapping`) is the loss's business. State-dict keys are the
Hugging Face keys, so nothing is renamed on the way in or out. This file imports nothing of ours.
"""

import difflib
import functools
import hashlib
import json
import math
import os
import re
import shutil
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

SHARD_BYTES = 5_000_000_000
# what transformers and vLLM want beside the weights; copied from the base model's folder
SIDE_FILES = ('generation_config.json', 'tokenizer.json', 'tokenizer.model', 'tokenizer.model.v*',
              'tokenizer_config.json', 'special_tokens_map.json', 'added_tokens.json',
              'chat_template.jinja', 'original/tokenizer.model')


class CheckpointError(ValueError):
    """A model folder, config or weight file that cannot be used; the message names it."""


# ------------------------------------------------------------------------------------------------
# Configuration
# ------------------------------------------------------------------------------------------------

ARCHITECTURES = {'llama': 'LlamaForCausalLM', 'mistral': 'MistralForCausalLM',
                 'gemma2': 'Gemma2ForCausalLM'}
ACTIVATIONS = {'llama': 'silu', 'mistral': 'silu', 'gemma2': 'gelu_pytorch_tanh'}
# the keys that only some architectures have; elsewhere a stray one means nothing
WINDOWED = {'sliding_window', 'layer_types'}
GEMMA_ONLY = {'query_pre_attn_scalar', 'attn_logit_softcapping', 'final_logit_softcapping'}
FOREIGN = {'llama': WINDOWED | GEMMA_ONLY, 'mistral': GEMMA_ONLY, 'gemma2': set()}
# what transformers assumes when a config.json leaves the key out, beside ModelConfig's defaults
DEFAULTS = {
    'llama': {},
    'mistral': {'num_key_value_heads': 8, 'sliding_window': 4096,
                'max_position_embeddings': 131072},
    'gemma2': {'num_key_value_heads': 4, 'tie_word_embeddings': True, 'sliding_window': 4096,
               'head_dim': 256, 'query_pre_attn_scalar': 256, 'max_position_embeddings': 8192,
               'attn_logit_softcapping': 50.0, 'final_logit_softcapping': 30.0},
}


def _whole(low, high=2**31 - 1):
    return f'an integer from {low} to {high}', lambda v: type(v) is int and low <= v <= high


def _real(low, high):
    return (f'a number from {low:g} to {high:g}',
            lambda v: type(v) in (int, float) and low <= v <= high)


def _one_of(*values):
    return (' or '.join(map(json.dumps, values)),
            lambda v: any(type(v) is type(value) and v == value for value in values))


def _list_of(item):
    return (f'a list, each item {item[0]}',
            lambda v: type(v) is list and v != [] and all(map(item[1], v)))


def _either(one, other):
    return f'{one[0]}, or {other[0]}', lambda v: one[1](v) or other[1](v)


NULL, FLAG, TEXT = _one_of(None), _one_of(True, False), ('a string', lambda v: type(v) is str)
TOKEN_IDS = _either(_whole(0), _either(_list_of(_whole(0)), NULL))
CAP = _either(_real(1e-3, 1e6), NULL)
# What every known key of a config.json may be: a description and a test. Values that would change
# the mathematics in a way that is not computed here are left out, and so refused.
FIELDS = {
    'vocab_size': _whole(1), 'hidden_size': _whole(1, 2**20),
    'intermediate_size': _whole(1, 2**24), 'num_hidden_layers': _whole(1, 10_000),
    'num_attention_heads': _whole(1, 2**16),
    'num_key_value_heads': _either(_whole(1, 2**16), NULL),
    'head_dim': _either(_whole(2, 2**16), NULL), 'max_position_embeddings': _whole(1),
    'rms_norm_eps': _real(1e-12, 1), 'rope_theta': _real(1, 1e30), 'tie_word_embeddings': FLAG,
    'sliding_window': _either(_whole(1), NULL),
    'layer_types': _either(_list_of(_one_of('sliding_attention', 'full_attention')), NULL),
    'query_pre_attn_scalar': _whole(1), 'attn_logit_softcapping': CAP,
    'final_logit_softcapping': CAP, 'initializer_range': _real(0, 1),
    'bos_token_id': TOKEN_IDS, 'eos_token_id': TOKEN_IDS, 'pad_token_id': TOKEN_IDS,
    'dtype': _either(_one_of('float32', 'bfloat16', 'float16', 'float64'), NULL),
    'architectures': _either(_list_of(TEXT), NULL), 'transformers_version': _either(TEXT, NULL),
    'use_cache': FLAG, 'attention_dropout': _real(0, 1),
    'attention_bias': _one_of(False), 'mlp_bias': _one_of(False),
    'pretraining_tp': _one_of(1, None), 'use_bidirectional_attention': _one_of(False, None),
    'is_causal': _one_of(True), 'partial_rotary_factor': _one_of(1.0, None),
    'per_layer_config': NULL, 'quantization_config': NULL,
}
FIELDS['torch_dtype'] = FIELDS['dtype']
FLOATS = {'rms_norm_eps', 'initializer_range', 'attn_logit_softcapping', 'final_logit_softcapping'}
# in these a null is an error, where other architectures have a meaning for it
NOT_NULL = {'llama': set(), 'mistral': {'num_key_value_heads'},
            'gemma2': {'num_key_value_heads', 'head_dim', 'sliding_window'}}
ROPE_TYPE = _one_of('default', 'llama3')
LLAMA3_ROPE = {'factor': _real(1, 1e6), 'low_freq_factor': _real(1e-6, 1e6),
               'high_freq_factor': _real(1e-6, 1e6),
               'original_max_position_embeddings': _whole(1)}
ROPE_FIELDS = LLAMA3_ROPE | {'rope_type': ROPE_TYPE, 'type': ROPE_TYPE,
                             'rope_theta': FIELDS['rope_theta'],
                             'partial_rotary_factor': _one_of(1.0)}
ROPE_BLOCKS = ('rope_parameters', 'rope_scaling')   # of transformers 5 and 4


def _check_field(table, key, value, where, block=''):
    wanted, valid = table[key]
    if not valid(value):
        raise CheckpointError(f'{where}: {block}{key} = {value!r} is not supported; it must be '
                              f'{wanted}')


def resolve_rope(raw: dict, where: str) -> tuple[float, dict | None]:
    """(rope_theta, the 'llama3' scheme or None) of a config.json of transformers 4 or 5.

    transformers 4 has rope_theta and rope_scaling, transformers 5 has both in rope_parameters.
    Raises CheckpointError where they disagree, or for a scheme that is not computed here.
    """
    if 'rope_theta' in raw:
        _check_field(FIELDS, 'rope_theta', raw['rope_theta'], where)
    resolved = {}
    for key in ROPE_BLOCKS:
        block = {} if raw.get(key) is None else raw[key]
        if not isinstance(block, dict):
            raise CheckpointError(f'{where}: {key} = {block!r} is not supported; it must be an '
                                  f'object or null')
        for name, value in block.items():
            if name not in ROPE_FIELDS:
                raise CheckpointError(f'{where}: {key}.{name} is not supported; the keys are '
                                      f'{", ".join(ROPE_FIELDS)}')
            _check_field(ROPE_FIELDS, name, value, where, f'{key}.')
        if block:
            resolved[key] = _resolve_block(raw, key, block, where)
    if len(resolved) == 2 and resolved['rope_parameters'] != resolved['rope_scaling']:
        raise CheckpointError(f'{where}: rope_parameters = {raw["rope_parameters"]} and rope_scaling '
                              f'= {raw["rope_scaling"]} disagree; remove the wrong one')
    return next(iter(resolved.values()), (float(raw.get('rope_theta', 10000.0)), None))


def _resolve_block(raw, key, block, where):
    theta = raw.get('rope_theta', block.get('rope_theta', 10000.0))
    if block.get('rope_theta', theta) != theta:
        raise CheckpointError(f'{where}: rope_theta = {theta} and {key}.rope_theta = '
                              f'{block["rope_theta"]} disagree; remove the wrong one')
    scheme = block.get('rope_type', block.get('type', 'default'))
    if block.get('type', scheme) != scheme:
        raise CheckpointError(f'{where}: {key}.type = {block["type"]!r} and {key}.rope_type = '
                              f'{scheme!r} disagree; remove the wrong one')
    used = {name: block[name] for name in LLAMA3_ROPE if name in block}
    if scheme == 'default':
        if used:
            raise CheckpointError(f"{where}: {key}.{min(used)} has no meaning for rope_type "
                                  f"'default'; name the rope_type, or remove it")
        return float(theta), None
    if used.keys() != LLAMA3_ROPE.keys():
        raise CheckpointError(f"{where}: {key} of rope_type 'llama3' without "
                              f"{', '.join(sorted(LLAMA3_ROPE.keys() - used.keys()))}")
    if used['high_freq_factor'] <= used['low_freq_factor']:
        raise CheckpointError(f'{where}: {key}.high_freq_factor = {used["high_freq_factor"]} must '
                              f'be greater than low_freq_factor = {used["low_freq_factor"]}')
    outer = raw.get('original_max_position_embeddings', used['original_max_position_embeddings'])
    if outer != used['original_max_position_embeddings']:
        raise CheckpointError(f'{where}: original_max_position_embeddings = {outer!r} and that of '
                              f'{key} disagree; remove the wrong one')
    return float(theta), {'rope_type': 'llama3'} | used


@dataclass
class ModelConfig:
    """The keys of a Hugging Face `config.json` that shape the computation; the rest is `extra`."""
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None          # None: as many as attention heads
    head_dim: int | None = None                     # None: hidden_size / heads; differs in Gemma 2
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict | None = None                # the 'llama3' scheme or None
    tie_word_embeddings: bool = False
    sliding_window: int | None = None               # keys a token sees, itself included
    layer_types: list[str] | None = None            # None: all alike; Gemma 2: even ones sliding
    query_pre_attn_scalar: float | None = None      # None: head_dim
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    initializer_range: float = 0.02
    bos_token_id: int | list | None = None
    eos_token_id: int | list | None = None
    dtype: str = 'float32'                          # of the weights on disk
    extra: dict = field(default_factory=dict)

    def __post_init__(self):
        self.num_key_value_heads = self.num_key_value_heads or self.num_attention_heads
        self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        if self.model_type == 'gemma2' and self.layer_types is None:
            self.layer_types = ['full_attention' if i % 2 else 'sliding_attention'
                                for i in range(self.num_hidden_layers)]

    @property
    def windows(self) -> list[int | None]:
        """The sliding window of each layer, None where a layer sees everything."""
        if self.layer_types is None:
            return [self.sliding_window] * self.num_hidden_layers
        return [self.sliding_window if kind == 'sliding_attention' else None
                for kind in self.layer_types]

    @classmethod
    def from_hf(cls, raw: dict, where: str = 'config.json') -> 'ModelConfig':
        """Reads the dict of a `config.json` of transformers 4 or 5; raises CheckpointError."""
        kind = raw.get('model_type') if isinstance(raw, dict) else None
        if kind not in tuple(ARCHITECTURES):
            raise CheckpointError(f'{where}: model_type is {kind!r}; this program reads '
                                  f'{", ".join(ARCHITECTURES)}')
        for key in raw.keys() & FIELDS.keys() - FOREIGN[kind]:
            _check_field(FIELDS, key, raw[key], where)
        for key in ('hidden_activation', 'hidden_act'):
            _check_field({key: _one_of(ACTIVATIONS[kind])}, key, raw.get(key, ACTIVATIONS[kind]),
                         where)
        known = {f.name for f in fields(cls)} - {'extra'} - FOREIGN[kind]
        values = DEFAULTS[kind] | {k: v for k, v in raw.items() if k in known}
        values['rope_theta'], values['rope_scaling'] = resolve_rope(raw, where)
        values['dtype'] = raw.get('dtype') or raw.get('torch_dtype') or 'float32'
        values['extra'] = {k: v for k, v in raw.items() if k not in known | FOREIGN[kind]
                           and k not in ('rope_parameters', 'torch_dtype', 'architectures',
                                         'hidden_act', 'hidden_activation')}
        for key in ('vocab_size', 'hidden_size', 'intermediate_size', 'num_hidden_layers',
                    'num_attention_heads'):
            if key not in values:
                raise CheckpointError(f'{where}: {key} is missing; it must be {FIELDS[key][0]}')
        for key in FLOATS & values.keys():      # transformers refuses an integer there
            values[key] = values[key] if values[key] is None else float(values[key])
        for key in NOT_NULL[kind]:
            if values[key] is None:
                raise CheckpointError(f'{where}: {key} = None is not supported for {kind}')
        config = cls(**values)
        config.check(where)
        return config

    def check(self, where: str):
        """Raises CheckpointError where the values do not fit each other."""
        D, H, K = self.hidden_size, self.num_attention_heads, self.num_key_value_heads
        n_layers, n_types = self.num_hidden_layers, len(self.layer_types or ())
        for problem, wrong in (
                (f'hidden_size = {D} is not a multiple of num_attention_heads = {H}', D % H),
                (f'num_attention_heads = {H} is not a multiple of num_key_value_heads = {K}', H % K),
                (f'head_dim = {self.head_dim} is odd; rotary positions need pairs',
                 self.head_dim % 2),
                (f'layer_types has {n_types} items for num_hidden_layers = {n_layers}',
                 n_types not in (0, n_layers)),
                ('sliding_window = None beside layer_types; it must be an integer',
                 self.layer_types is not None and self.sliding_window is None)):
            if wrong:
                raise CheckpointError(f'{where}: {problem}')

    def to_hf(self) -> dict:
        """The dict of a `config.json` that transformers 4 and 5 and vLLM read."""
        values = asdict(self)
        extra = values.pop('extra')
        values['torch_dtype'] = values.pop('dtype')
        if self.layer_types is None:    # transformers takes a Mistral with this key for a Ministral
            values.pop('layer_types')
        values = {k: v for k, v in values.items() if k not in FOREIGN[self.model_type]}
        key = 'hidden_activation' if self.model_type == 'gemma2' else 'hidden_act'
        values[key] = ACTIVATIONS[self.model_type]
        return extra | {'architectures': [ARCHITECTURES[self.model_type]]} | values


# ------------------------------------------------------------------------------------------------
# The decoder
# ------------------------------------------------------------------------------------------------

class LlamaRMSNorm(nn.Module):
    """x / rms(x), rounded to x's type, times the weight: Llama and Mistral."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * F.rms_norm(x.float(), x.shape[-1:], eps=self.eps).to(x.dtype)


class GemmaRMSNorm(nn.Module):
    """x / rms(x) times (1 + weight), rounded once at the end; the stored weight is around zero."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], 1 + self.weight.float(), self.eps).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions and, in Gemma 2, capped scores."""

    def __init__(self, config: ModelConfig, dropout: float):
        super().__init__()
        D, hd = config.hidden_size, config.head_dim
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads, config.num_key_value_heads, hd)
        self.q_proj = nn.Linear(D, self.heads * hd, bias=False)
        self.k_proj = nn.Linear(D, self.kv_heads * hd, bias=False)
        self.v_proj = nn.Linear(D, self.kv_heads * hd, bias=False)
        self.o_proj = nn.Linear(self.heads * hd, D, bias=False)
        self.scale = (config.query_pre_attn_scalar or hd) ** -0.5
        self.softcap = config.attn_logit_softcapping
        self.score_mod = _cap_scores(self.softcap) if self.softcap else None
        self.dropout = dropout

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], mask) -> Tensor:
        B, T, _ = x.shape
        q = self.q_proj(x).view(B, T, self.heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(B, T, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(B, T, self.kv_heads, self.head_dim).transpose(1, 2)
        q, k = rotate(q, *rotary), rotate(k, *rotary)
        dropout = self.dropout if self.training else 0.0
        if isinstance(mask, tuple):
            y = attend_flex(q, k, v, mask, self.scale, self.score_mod, dropout)
        else:
            y = attend_explicit(q, k, v, mask, self.scale, self.softcap, dropout)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, -1))


class GatedMLP(nn.Module):
    def __init__(self, config: ModelConfig, activation):
        super().__init__()
        D, H = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(D, H, bias=False)
        self.up_proj = nn.Linear(D, H, bias=False)
        self.down_proj = nn.Linear(H, D, bias=False)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling() and torch.is_grad_enabled():
            # the product is as large as its factors, and cheaper to compute again than to keep
            h = checkpoint(self.gated, self.gate_proj(x), self.up_proj(x), use_reentrant=False)
        else:
            h = self.gated(self.gate_proj(x), self.up_proj(x))
        return self.down_proj(h)

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.activation(gate) * up


class LlamaBlock(nn.Module):
    """Llama and Mistral: normalise before attention and before the MLP."""

    def __init__(self, config: ModelConfig, attn_dropout: float, resid_dropout: float):
        super().__init__()
        self.self_attn = Attention(config, attn_dropout)
        self.mlp = GatedMLP(config, F.silu)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        # the name is Hugging Face's: in Llama it stands *before* the MLP
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.dropout = nn.Dropout(resid_dropout)

    def forward(self, x: Tensor, rotary, mask) -> Tensor:
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), rotary, mask))
        return x + self.dropout(self.mlp(self.post_attention_layernorm(x)))


class GemmaBlock(nn.Module):
    """Gemma 2: normalise before and after attention, before and after the MLP."""

    def __init__(self, config: ModelConfig, attn_dropout: float, resid_dropout: float):
        super().__init__()
        self.self_attn = Attention(config, attn_dropout)
        self.mlp = GatedMLP(config, functools.partial(F.gelu, approximate='tanh'))
        D, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = GemmaRMSNorm(D, eps)
        self.post_attention_layernorm = GemmaRMSNorm(D, eps)
        self.pre_feedforward_layernorm = GemmaRMSNorm(D, eps)
        self.post_feedforward_layernorm = GemmaRMSNorm(D, eps)
        self.dropout = nn.Dropout(resid_dropout)

    def forward(self, x: Tensor, rotary, mask) -> Tensor:
        y = self.self_attn(self.input_layernorm(x), rotary, mask)
        x = x + self.dropout(self.post_attention_layernorm(y))
        y = self.mlp(self.pre_feedforward_layernorm(x))
        return x + self.dropout(self.post_feedforward_layernorm(y))


class Decoder(nn.Module):
    def __init__(self, config: ModelConfig, attn_dropout: float, resid_dropout: float):
        super().__init__()
        gemma = config.model_type == 'gemma2'
        Block, Norm = (GemmaBlock, GemmaRMSNorm) if gemma else (LlamaBlock, LlamaRMSNorm)
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, attn_dropout, resid_dropout)
                                    for _ in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.embed_scale = config.hidden_size ** 0.5 if gemma else None
        self.attention = 'auto'                     # 'flex', 'explicit', or by device
        self.checkpoint = False                     # keep a block's input only, compute it again

    def forward(self, tokens: Tensor, positions: Tensor, ends: Tensor | None) -> Tensor:
        x = self.embed_tokens(tokens)
        if self.embed_scale:
            # rounded to the weights' type as transformers does: 59.8665 for the 9B model in float32
            # (so in training here), 59.75 in bfloat16
            x = x * torch.tensor(self.embed_scale, dtype=x.dtype)
        flex = tokens.is_cuda if self.attention == 'auto' else self.attention == 'flex'
        T = tokens.shape[1]
        # a row no longer than the window cannot leave it
        windows = [w if w is not None and w < T else None for w in self.config.windows]
        plain = ends is None and set(windows) == {None} and not self.config.attn_logit_softcapping
        if ends is None:
            ends = torch.full_like(tokens, T)
        masks = {None: None} if plain else {
            w: flex_mask(positions, ends, w, flex_options(self.config.head_dim, x)) if flex else
            explicit_mask(positions, ends, w) for w in set(windows)}
        rotary = rotary_angles(positions, self.config, x.dtype)
        again = self.checkpoint and self.training and torch.is_grad_enabled()
        for layer, window in zip(self.layers, windows, strict=True):
            if again:
                x = checkpoint(layer, x, rotary, masks[window], use_reentrant=False)
            else:
                x = layer(x, rotary, masks[window])
        return self.norm(x)


class CausalLM(nn.Module):
    """`model(tokens, positions, ends)`, int [B, T] each, gives the hidden states [B, T, D].

    `ends` may be None: see the top of this file.
    """

    def __init__(self, config: ModelConfig, attn_dropout: float = 0.0, resid_dropout: float = 0.0):
        super().__init__()
        self.config = config
        self.model = Decoder(config, attn_dropout, resid_dropout)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def head(self) -> Tensor:
        """The output matrix [V, D]: the embedding where they are tied."""
        tied = self.config.tie_word_embeddings
        return self.model.embed_tokens.weight if tied else self.lm_head.weight

    def forward(self, tokens: Tensor, positions: Tensor, ends: Tensor | None) -> Tensor:
        return self.model(tokens, positions, ends)

    def logits(self, hidden: Tensor) -> Tensor:
        """Capped logits [..., V] in float32. Large: for tests and single positions."""
        z = F.linear(hidden.float(), self.head.float())
        cap = self.config.final_logit_softcapping
        return cap * torch.tanh(z / cap) if cap else z

    def init_weights(self, generator: torch.Generator | None = None):
        """Random weights for training from nothing: normal, smaller where the residual adds up."""
        std = self.config.initializer_range
        depth_std = std / math.sqrt(2 * self.config.num_hidden_layers)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                residual = name.endswith(('o_proj.weight', 'down_proj.weight'))
                nn.init.normal_(parameter, std=depth_std if residual else std, generator=generator)


def rotary_angles(positions: Tensor, config: ModelConfig, dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [B, 1, T, head_dim / 2] of positions [B, T], computed in float32, then rounded.

    The 'llama3' scheme stretches long wavelengths by `factor` and keeps short ones, with a linear
    passage between; it holds at every length, not only beyond the original context.
    """
    half = torch.arange(0, config.head_dim, 2, device=positions.device, dtype=torch.float32)
    frequency = config.rope_theta ** (-half / config.head_dim)
    if config.rope_scaling:
        s = config.rope_scaling
        turns = s['original_max_position_embeddings'] * frequency / (2 * math.pi)
        low, high = s['low_freq_factor'], s['high_freq_factor']
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        frequency = keep * frequency + (1 - keep) * frequency / s['factor']
    angle = (positions[..., None].float() * frequency)[:, None]
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (x[i], x[i + hd/2]): Hugging Face's layout, not Meta's interleaved one."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


# ------------------------------------------------------------------------------------------------
# Attention: FlexAttention on CUDA, an explicit mask elsewhere
# ------------------------------------------------------------------------------------------------

def explicit_mask(positions: Tensor, ends: Tensor, window: int | None) -> Tensor:
    """bool [B, 1, T, T]: may row index i (third axis) see row index j (fourth)?"""
    index = torch.arange(ends.shape[1], device=ends.device)
    mask = (index <= index[:, None]) & (index[:, None] < ends[:, None, :])
    if window is not None:
        mask = mask & (positions[:, :, None] - positions[:, None, :] < window)
    return mask[:, None]


def attend_explicit(q, k, v, mask, scale, softcap, dropout):
    """q [B, H, T, hd], k and v [B, H_kv, T, hd], mask [B, 1, T, T] -> [B, H, T, hd].

    No mask means causal. cuDNN then takes 1.2 ms for the heads of Llama 3.1 8B, FlexAttention 1.8.
    """
    if softcap is None:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, dropout_p=dropout, scale=scale,
            enable_gqa=q.shape[1] != k.shape[1])
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    # the cap comes before the mask: capped minus infinity would be minus fifty
    scores = softcap * torch.tanh((q @ k.mT).float() * scale / softcap)
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1).to(v.dtype)
    return F.dropout(weights, dropout) @ v


@functools.cache
def _compiled_flex():
    return torch.compile(flex_attention, dynamic=False)


@functools.cache
def _compiled_mask(long: bool):
    # for a fixed length the mask takes 0.1 ms instead of 0.4, but compiling it takes two minutes
    # at 16384 tokens, since Triton unrolls the row
    return torch.compile(create_block_mask, dynamic=True if long else None)


@functools.cache
def _cap_scores(softcap: float):
    # one function object for each cap: a new one in every layer would compile every layer anew.
    # cap * tanh(score / cap), in a form that costs the kernel half as much and is as exact
    def cap(score, b, h, i, j):
        return 2 * softcap * torch.sigmoid(score * (2 / softcap)) - softcap
    return cap


def flex_mask(positions: Tensor, ends: Tensor, window: int | None, options: dict) -> tuple:
    """(the BlockMask of the same rule as `explicit_mask`, FlexAttention's kernel_options)."""
    def visible(b, h, i, j):
        seen = (j <= i) & (i < ends[b, j])
        if window is not None:
            seen = seen & (positions[b, i] - positions[b, j] < window)
        return seen
    B, T = ends.shape
    make = _compiled_mask(T > 4096)
    return make(visible, B, None, T, T, device=str(ends.device)), options


# The fastest of some twenty block sizes, on an H200 in bfloat16 with 8192 tokens: 1.5, 1.8 and 1.0
# ms forward and backward for the heads of Gemma 2 2B, Llama 3.1 8B and 3.2 1B; the defaults took
# 2.4, 1.8 and 1.2. By head_dim.
HOPPER_OPTIONS = {
    256: dict(fwd_BLOCK_M=128, fwd_BLOCK_N=64, fwd_num_warps=8, fwd_num_stages=2,
              bwd_BLOCK_M1=64, bwd_BLOCK_N1=64, bwd_BLOCK_M2=128, bwd_BLOCK_N2=32,
              bwd_num_warps=8, bwd_num_stages=2),
    128: dict(fwd_BLOCK_M=64, fwd_BLOCK_N=64, fwd_num_warps=4, fwd_num_stages=3),
    64: dict(fwd_BLOCK_M=128, fwd_BLOCK_N=64, fwd_num_warps=4, fwd_num_stages=3,
             bwd_BLOCK_M1=64, bwd_BLOCK_N1=64, bwd_BLOCK_M2=64, bwd_BLOCK_N2=64,
             bwd_num_warps=4, bwd_num_stages=3),
}


def flex_options(head_dim: int, x: Tensor) -> dict:
    """FlexAttention's kernel_options for x's device and type; {} leaves them to FlexAttention."""
    hopper = x.is_cuda and torch.cuda.get_device_capability(x.device) == (9, 0)
    return HOPPER_OPTIONS.get(head_dim, {}) if hopper and x.dtype == torch.bfloat16 else {}


def attend_flex(q, k, v, mask, scale, score_mod, dropout):
    """The same with the mask of `flex_mask`, and `_cap_scores(softcap)` or None for the cap."""
    if dropout:
        raise ValueError('FlexAttention has no dropout: set attn_dropout = 0, or '
                         "attention = 'explicit' for the slower path that has it")
    block_mask, options = mask
    attend = flex_attention if torch.compiler.is_compiling() else _compiled_flex()
    return attend(q, k, v, score_mod=score_mod, block_mask=block_mask, scale=scale,
                  enable_gqa=q.shape[1] != k.shape[1], kernel_options=options)


def compile_blocks(model):
    """Compiles each decoder block in place, all by one graph a mask; needs static shapes."""
    # a process may make models of several shapes; past the limit, 8 of old, blocks run eagerly
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    for layer in model.model.layers:
        layer.compile(dynamic=False)


# ------------------------------------------------------------------------------------------------
# LoRA
# ------------------------------------------------------------------------------------------------

class LoRALinear(nn.Module):
    """W x + alpha / rank * B A dropout(x), W frozen, A and B float32 (Hu et al. 2021, eq. 3)."""

    def __init__(self, linear: nn.Linear, rank: int, alpha: float, dropout: float):
        super().__init__()
        self.weight = linear.weight                 # the key of the base checkpoint stays
        self.scale = alpha / rank
        options = {'bias': False, 'device': self.weight.device, 'dtype': torch.float32}
        self.lora_A = nn.Linear(linear.in_features, rank, **options)
        self.lora_B = nn.Linear(rank, linear.out_features, **options)
        nn.init.zeros_(self.lora_B.weight)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        low = F.linear(self.dropout(x), self.lora_A.weight.to(x.dtype))
        return F.linear(x, self.weight) + self.scale * F.linear(low, self.lora_B.weight.to(x.dtype))


LORA_TARGETS = ('q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj')


def add_lora(model: CausalLM, rank: int, alpha: float, dropout: float, targets: tuple[str, ...]):
    """Freezes the model and gives the linear layers named in `targets` adapters, in place."""
    if not targets or set(targets) - set(LORA_TARGETS):
        raise ValueError(f'lora_targets = {targets}; wanted some of {", ".join(LORA_TARGETS)}')
    model.requires_grad_(False)
    for layer in model.model.layers:
        for owner in (layer.self_attn, layer.mlp):
            for name in (t for t in targets if hasattr(owner, t)):
                setattr(owner, name, LoRALinear(getattr(owner, name), rank, alpha, dropout))


def save_adapter(model: CausalLM, folder: str | Path, base: str, full=None,
                 write=True, claim=None) -> list[str]:
    """Writes the adapters alone, as the folder that `peft` loads beside the model `base`.

    Returns the names of the files, relative to `folder`.
    """
    folder = Path(folder)
    adapted = {name: m for name, m in model.named_modules() if isinstance(m, LoRALinear)}
    tensors = {f'base_model.model.{name}.{part}.weight':
               (full or Tensor.detach)(getattr(m, part).weight).cpu().contiguous()
               for name, m in adapted.items() for part in ('lora_A', 'lora_B')}
    some = next(iter(adapted.values()))
    rank = some.lora_A.out_features
    config = {'peft_type': 'LORA', 'task_type': 'CAUSAL_LM', 'base_model_name_or_path': base,
              'r': rank, 'lora_alpha': some.scale * rank, 'lora_dropout': some.dropout.p,
              'target_modules': sorted({name.rpartition('.')[2] for name in adapted}),
              'bias': 'none', 'fan_in_fan_out': False, 'inference_mode': True}
    names = ['adapter_model.safetensors', 'adapter_config.json']
    if write:
        if claim:
            claim(*names)
        folder.mkdir(parents=True, exist_ok=True)
        write_tensors(folder / 'adapter_model.safetensors.tmp', tensors)
        (folder / 'adapter_config.json.tmp').write_text(json.dumps(config, indent=2) + '\n',
                                                        encoding='utf-8')
        for name in names:
            os.replace(folder / f'{name}.tmp', folder / name)
    return names


# ------------------------------------------------------------------------------------------------
# Checkpoints: a folder in the Hugging Face layout
# ------------------------------------------------------------------------------------------------

def fetch(name: str, revision: str | None = None) -> Path:
    """The folder of a model: `name` if it is one, else a snapshot from the Hugging Face hub."""
    path = Path(os.path.expanduser(name))
    if path.is_dir():
        return path
    if path.is_file():
        raise CheckpointError(f'{name} is a file; a model is the folder that holds its config.json')
    if name.startswith(('/', '.', '~')) or name.count('/') != 1:
        raise CheckpointError(f'no model folder at {name}, and it is not a hub name '
                              f'like google/gemma-2-2b')
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=[
            'config.json', '*.safetensors', '*.safetensors.index.json', *SIDE_FILES],
            ignore_patterns=['original/*.safetensors', 'consolidated*']))
    except GatedRepoError as error:
        raise CheckpointError(f'{name} is gated: accept its licence on the hub, then run '
                              f'`hf auth login`') from error
    except Exception as error:  # the hub raises many kinds, of its own and of its HTTP client
        reason = str(error).strip().split('\n')[0]
        raise CheckpointError(f'there is no folder {name}, and getting {name} from the hub failed '
                              f'({type(error).__name__}: {reason}); check the name and the network'
                              ) from error


def read_config(folder: str | Path, changes: dict | None = None) -> ModelConfig:
    """The config.json of `folder`, with `changes` to its keys.

    Changes apply to the resolved value: {'rope_theta': 5e5} also where the file has it in
    rope_parameters. Raises CheckpointError for a key that the architecture does not have.
    """
    path, changes = Path(folder) / 'config.json', changes or {}
    try:
        raw = json.loads(path.read_text(encoding='utf-8'))
    except FileNotFoundError:
        raise CheckpointError(_not_a_model(Path(folder))) from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f'{path}: not valid JSON: {error}') from error
    if not changes:
        return ModelConfig.from_hf(raw, str(path))
    ModelConfig.from_hf(raw, str(path))     # what is wrong with the file itself is said first
    theta, scaling = resolve_rope(raw, str(path))
    raw = {k: v for k, v in raw.items() if k not in ROPE_BLOCKS}
    own = changes.get('rope_parameters') or changes.get('rope_scaling') or {}
    raw |= {} if 'rope_parameters' in changes else {'rope_scaling': scaling}
    raw['rope_theta'] = own.get('rope_theta', theta)
    if 'torch_dtype' in changes:
        raw.pop('dtype', None)
    raw |= changes
    kind = raw['model_type'] if raw['model_type'] in tuple(ARCHITECTURES) else 'llama'
    known = (raw.keys() - changes.keys() | FIELDS.keys() | {*ROPE_BLOCKS, 'model_type'}
             | {'hidden_act', 'hidden_activation'}) - FOREIGN[kind]
    for key in changes:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f'; did you mean {near[0]!r}?' if near else ''
            raise CheckpointError(f'shape: {kind} has no key {key!r} in its config.json{hint}')
    return ModelConfig.from_hf(raw, f'{path} with shape = {changes}')


def _not_a_model(folder):
    adapter = folder / 'adapter_config.json'
    if not adapter.exists():
        return f'{folder} is not a model folder: it has no config.json'
    merged = folder.resolve().parent
    where = (f'the merged model is in {merged}' if (merged / 'config.json').exists() else
             'merge them into the base model that adapter_config.json names')
    return f'{folder} holds LoRA adapters alone, which are not a model; {where}'


def load(folder: str | Path, device='cpu', dtype: torch.dtype | None = None,
         attn_dropout: float = 0.0, resid_dropout: float = 0.0) -> CausalLM:
    """A CausalLM with the weights of `folder`, as `dtype` (None: the type in config.json).

    Tensors are read one at a time, so no second copy of the model is ever held. Raises
    CheckpointError as `check_weights` does.
    """
    config = read_config(folder)
    dtype = dtype or getattr(torch, config.dtype)
    files = check_weights(folder, config)
    with torch.device('meta'):
        model = CausalLM(config, attn_dropout, resid_dropout)
    shards = sorted(set(files.values()))
    for path in tqdm(shards, 'loading', unit=' shards', disable=len(shards) == 1):
        with _open(path) as tensors:
            for key in (k for k, f in files.items() if f == path):
                owner, _, name = key.rpartition('.')
                # a copy of its own, never a view into the file, which may be replaced meanwhile
                tensor = tensors.get_tensor(key).to(device, dtype, copy=True)
                setattr(model.get_submodule(owner), name, nn.Parameter(tensor))
    return model


def check_weights(folder: str | Path, config: ModelConfig) -> dict[str, Path]:
    """{parameter: its safetensors file} of `folder`, checked from the files' headers alone.

    Raises CheckpointError naming the tensor that is missing, unknown, misshaped or quantized, or
    the broken file. An output matrix beside tied embeddings is read, and must equal them.
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
                    raise CheckpointError(f'{path}: tensor {key} is {tensor.get_dtype()}; quantized '
                                          f'weights are not supported')
    return files


HEAD, EMBEDDING = 'lm_head.weight', 'model.embed_tokens.weight'


def _check_tied(files):
    with _open(files[HEAD]) as a, _open(files[EMBEDDING]) as b:
        head, embedding = a.get_slice(HEAD), b.get_slice(EMBEDDING)
        shape = head.get_shape()
        if shape == embedding.get_shape() and all(      # some rows at a time: both may be large
                torch.equal(head[i:i + 4096].float(), embedding[i:i + 4096].float())
                for i in range(0, shape[0], 4096)):
            return
    raise CheckpointError(f'{files[HEAD]}: tensor {HEAD} differs from {EMBEDDING}, but '
                          f'tie_word_embeddings = true in config.json says that they are one; set '
                          f'it to false to use both, or remove {HEAD}')


def nonfinite_tensor(folder: str | Path) -> str | None:
    """The name of the first tensor of a model folder that holds NaN or infinity, None if none."""
    for key, path in sorted(weight_files(Path(folder)).items()):
        with _open(path) as tensors:
            tensor = tensors.get_tensor(key)
            if tensor.is_floating_point() and not tensor.isfinite().all():
                return key
    return None


def fingerprint(folder: str | Path) -> str:
    """A hash of a model folder: config.json as parsed, and of every tensor its name, type, shape
    and 16 blocks of 4 KiB spread evenly over its bytes.

    It does not depend on formatting or on how the tensors are spread over files. A model of 16 GB
    takes less than a second from an SSD.
    """
    folder = Path(folder)
    config = json.loads((folder / 'config.json').read_text(encoding='utf-8'))
    digest = hashlib.blake2b(json.dumps(config, sort_keys=True).encode(), digest_size=8)
    blocks = {}
    files = weight_files(folder)
    for path in sorted(set(files.values())):
        with open(path, 'rb', buffering=0) as file:
            size = int.from_bytes(file.read(8), 'little')
            header = json.loads(file.read(size))
            for key in (k for k, f in files.items() if f == path and k in header):
                start, end = header[key]['data_offsets']
                starts = range(start, end, 4096)
                if len(starts) > 16:
                    starts = [start + i * (end - start - 4096) // 15 for i in range(16)]
                described = f'{key} {header[key]["dtype"]} {header[key]["shape"]}'.encode()
                blocks[key] = hashlib.blake2b(described)
                for at in starts:
                    file.seek(8 + size + at)
                    blocks[key].update(file.read(min(4096, end - at)))
    for key in sorted(blocks):
        digest.update(blocks[key].digest())
    return digest.hexdigest()


def weight_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> safetensors file, from the single file or the index of shards."""
    index, single = folder / 'model.safetensors.index.json', folder / 'model.safetensors'
    if index.exists():
        try:
            names = json.loads(index.read_text(encoding='utf-8'))['weight_map'].items()
            names = {str(key): str(name) for key, name in names}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
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
            return {key: single for key in tensors.keys()}
    hint = ''
    if any(folder.glob('*.bin')) or any(folder.glob('*.pth')):
        hint = '; its .bin or .pth files are not read: convert them to safetensors'
    raise CheckpointError(f'{folder} has no model.safetensors and no index of shards{hint}')


def _open(path: Path):
    try:
        return safe_open(path, framework='pt')
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f'{path}: truncated or not a safetensors file ({error}); '
                              f'download or save it again') from error


def save(model: CausalLM, folder: str | Path, dtype: torch.dtype, side_files: Path | None = None,
         full=None, write=True, claim=None) -> list[str]:
    """Writes config and weights as `dtype` in the Hugging Face layout, shards of 5 GB at most.

    `side_files`: the base model's folder, from which tokenizer and generation files are copied.
    `full(parameter)`: the tensor to write for it, where that is not the parameter itself: float32
    if another has the missing bits, whole if it is spread over processes. All of these take part
    then, and one of them writes (`write`). LoRA is merged, in float32.
    All files get temporary names first and are renamed together once every byte is written,
    config.json last: a folder that has it is whole. No other file is touched. Returns the names of
    the files, relative to `folder`; `claim(*names)` is called with them before any is written.
    Raises CheckpointError or OSError.
    """
    folder = Path(folder)
    full = full or Tensor.detach
    adapted = {f'{name}.weight': m for name, m in model.named_modules()
               if isinstance(m, LoRALinear)}

    def tensor(key, parameter):
        w = full(parameter)
        if key in adapted:
            lora = adapted[key]
            w = w.float() + lora.scale * (full(lora.lora_B.weight) @ full(lora.lora_A.weight))
        return w.to(dtype).cpu().contiguous()

    parameters = {k: p for k, p in model.named_parameters() if '.lora_' not in k}
    shards, sizes = [[]], [0]
    for key, parameter in parameters.items():
        size = parameter.numel() * dtype.itemsize
        if shards[-1] and sizes[-1] + size > SHARD_BYTES:
            shards.append([])
            sizes.append(0)
        shards[-1].append(key)
        sizes[-1] += size
    one = len(shards) == 1
    names = ['model.safetensors'] if one else [
        f'model-{i + 1:05d}-of-{len(shards):05d}.safetensors' for i in range(len(shards))]
    texts = {'config.json': model.config.to_hf() | {'torch_dtype': str(dtype).split('.')[-1]}}
    if not one:
        texts['model.safetensors.index.json'] = {
            'metadata': {'total_size': sum(sizes)},
            'weight_map': {k: n for n, keys in zip(names, shards, strict=True) for k in keys}}
    copied = {source.relative_to(side_files): source for pattern in SIDE_FILES if side_files
              for source in Path(side_files).glob(pattern)}
    copied = {k: v for k, v in copied.items() if v.resolve() != (folder / k).resolve()}
    written = [*names, *copied, *reversed(texts)]
    if write:
        if claim:
            claim(*written)
        folder.mkdir(parents=True, exist_ok=True)
    try:
        for name, keys in zip(names, shards, strict=True):
            tensors = {k: tensor(k, parameters[k]) for k in keys}
            if write:
                write_tensors(folder / f'{name}.tmp', tensors)
        if not write:
            return [str(name) for name in written]
        for name, content in texts.items():
            (folder / f'{name}.tmp').write_text(json.dumps(content, indent=2) + '\n',
                                                encoding='utf-8')
        for name, source in copied.items():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source, folder / f'{name}.tmp')
        for name in written:
            os.replace(folder / f'{name}.tmp', folder / name)
    finally:
        for name in written if write else ():
            (folder / f'{name}.tmp').unlink(missing_ok=True)
    return [str(name) for name in written]


def write_tensors(path: Path, tensors: dict[str, Tensor]):
    """A safetensors file of CPU tensors; raises CheckpointError where the disk is full."""
    try:
        save_file(tensors, path, metadata={'format': 'pt'})
    except SafetensorError as error:
        Path(path).unlink(missing_ok=True)
        raise CheckpointError(f'{path}: could not be written: {error}') from error
