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

import functools
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

LLAMA3_ROPE_KEYS = {'factor', 'low_freq_factor', 'high_freq_factor',
                    'original_max_position_embeddings'}
ARCHITECTURES = {'llama': 'LlamaForCausalLM', 'mistral': 'MistralForCausalLM',
                 'gemma2': 'Gemma2ForCausalLM'}
# the keys that only some architectures have; elsewhere a stray one means nothing
WINDOWED = {'sliding_window'}
GEMMA_ONLY = {'layer_types', 'query_pre_attn_scalar', 'attn_logit_softcapping',
              'final_logit_softcapping'}
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
# settings that would change the mathematics; any other value than these is refused
ONLY = {'attention_bias': (False,), 'mlp_bias': (False,), 'pretraining_tp': (1,),
        'use_bidirectional_attention': (False,), 'quantization_config': ()}
ACTIVATIONS = {'llama': 'silu', 'mistral': 'silu', 'gemma2': 'gelu_pytorch_tanh'}


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
    layer_types: list[str] | None = None            # Gemma 2: 'sliding_attention' on even layers
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
        if kind not in ARCHITECTURES:
            raise CheckpointError(f'{where}: model_type is {kind!r}; this file reads '
                                  f'{", ".join(ARCHITECTURES)}')
        for key, allowed in ONLY.items():
            if raw.get(key) is not None and raw[key] not in allowed:
                raise CheckpointError(f'{where}: {key} = {raw[key]!r} is not supported')
        activation = raw.get('hidden_activation') or raw.get('hidden_act') or ACTIVATIONS[kind]
        if activation != ACTIVATIONS[kind]:
            raise CheckpointError(f'{where}: activation {activation!r}; {kind} has '
                                  f'{ACTIVATIONS[kind]!r}')
        known = {f.name for f in fields(cls)} - {'extra'} - FOREIGN[kind]
        values = DEFAULTS[kind] | {k: v for k, v in raw.items() if k in known}
        # transformers 5 keeps rotary settings together and calls the data type `dtype`
        rope = raw.get('rope_parameters') or raw.get('rope_scaling') or {}
        scheme = rope.get('rope_type', rope.get('type', 'default'))
        if scheme not in ('default', 'llama3'):
            raise CheckpointError(f'{where}: rope type {scheme!r} is not supported; '
                                  f"'default' and 'llama3' are")
        if scheme == 'llama3' and not rope.keys() >= LLAMA3_ROPE_KEYS:
            raise CheckpointError(f'{where}: rope scaling without '
                                  f'{", ".join(LLAMA3_ROPE_KEYS - rope.keys())}')
        values['rope_theta'] = float(rope.get('rope_theta', raw.get('rope_theta', 10000.0)))
        values['rope_scaling'] = rope if scheme == 'llama3' else None
        values['dtype'] = raw.get('dtype') or raw.get('torch_dtype') or 'float32'
        values['extra'] = {k: v for k, v in raw.items() if k not in known | FOREIGN[kind]
                           and k not in ('rope_parameters', 'torch_dtype', 'architectures',
                                         'hidden_act', 'hidden_activation')}
        for key in ('vocab_size', 'hidden_size', 'intermediate_size', 'num_hidden_layers',
                    'num_attention_heads'):
            if not isinstance(values.get(key), int):
                raise CheckpointError(f'{where}: {key} is {values.get(key)!r}; wanted an int')
        return cls(**values)

    def to_hf(self) -> dict:
        """The dict of a `config.json` that transformers 4 and 5 and vLLM read."""
        values = asdict(self)
        extra = values.pop('extra')
        values['torch_dtype'] = values.pop('dtype')
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


def save_adapter(model: CausalLM, folder: str | Path, base: str, full=None, write=True):
    """Writes the adapters alone, as the folder that `peft` loads beside the model `base`."""
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
    if write:
        folder.mkdir(parents=True, exist_ok=True)
        write_tensors(folder / 'adapter_model.safetensors.tmp', tensors)
        (folder / 'adapter_config.json.tmp').write_text(json.dumps(config, indent=2) + '\n',
                                                        encoding='utf-8')
        for name in ('adapter_model.safetensors', 'adapter_config.json'):
            os.replace(folder / f'{name}.tmp', folder / name)


# ------------------------------------------------------------------------------------------------
# Checkpoints: a folder in the Hugging Face layout
# ------------------------------------------------------------------------------------------------

def fetch(name: str, revision: str | None = None) -> Path:
    """The folder of a model: `name` if it is one, else a snapshot from the Hugging Face hub."""
    if Path(name).is_dir():
        return Path(name)
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
    """The config.json of `folder`, with `changes` to its keys."""
    path = Path(folder) / 'config.json'
    try:
        raw = json.loads(path.read_text(encoding='utf-8'))
    except FileNotFoundError:
        raise CheckpointError(f'{folder} is not a model folder: it has no config.json') from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f'{path}: not valid JSON: {error}') from error
    if isinstance(raw, dict):
        raw |= changes or {}
    return ModelConfig.from_hf(raw, str(path))


def load(folder: str | Path, device='cpu', dtype: torch.dtype | None = None,
         attn_dropout: float = 0.0, resid_dropout: float = 0.0) -> CausalLM:
    """A CausalLM with the weights of `folder`, as `dtype` (None: the type in config.json).

    Tensors are read one at a time, so no second copy of the model is ever held. Raises
    CheckpointError naming the tensor that is missing, unknown or misshaped, or the broken file.
    """
    config = read_config(folder)
    dtype = dtype or getattr(torch, config.dtype)
    with torch.device('meta'):
        model = CausalLM(config, attn_dropout, resid_dropout)
    wanted = dict(model.named_parameters())
    files = weight_files(Path(folder))
    # old Llama conversions carry rotary buffers, some tied checkpoints a copy of the embedding
    files = {k: f for k, f in files.items() if k in wanted or not (
        k.endswith('rotary_emb.inv_freq') or k == 'lm_head.weight')}
    for problem, keys in (('is missing', wanted.keys() - files.keys()),
                          ('is unknown to this architecture', files.keys() - wanted.keys())):
        if keys:
            more = f' (and {len(keys) - 1} more)' if len(keys) > 1 else ''
            raise CheckpointError(f'{folder}: tensor {min(keys)}{more} {problem}')
    shards = sorted(set(files.values()))
    for path in tqdm(shards, 'loading', unit=' shards', disable=len(shards) == 1):
        with _open(path) as tensors:
            for key in (k for k, f in files.items() if f == path):
                _put(model, key, tensors, path, device, dtype)
    return model


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


def _put(model: CausalLM, key: str, tensors, path: Path, device, dtype: torch.dtype):
    """Replaces the meta parameter `key` by the tensor of that name in an open file."""
    owner_name, _, name = key.rpartition('.')
    owner = model.get_submodule(owner_name)
    shape = list(getattr(owner, name).shape)
    if key not in tensors.keys():
        raise CheckpointError(f'{path}: tensor {key} is missing, though the index puts it there')
    if tensors.get_slice(key).get_shape() != shape:
        raise CheckpointError(f'{path}: tensor {key} has shape {tensors.get_slice(key).get_shape()}'
                              f', config.json wants {shape}')
    tensor = tensors.get_tensor(key)
    if not tensor.is_floating_point():
        raise CheckpointError(f'{path}: tensor {key} is {tensor.dtype}; quantised weights are not '
                              f'supported')
    # a copy of its own, never a view into the file, which may be replaced while we train
    setattr(owner, name, nn.Parameter(tensor.to(device, dtype, copy=True)))


def save(model: CausalLM, folder: str | Path, dtype: torch.dtype, side_files: Path | None = None,
         full=None, write=True):
    """Writes config and weights as `dtype` in the Hugging Face layout, shards of 5 GB at most.

    `side_files`: the base model's folder, from which tokenizer and generation files are copied.
    `full(parameter)`: the tensor to write for it, where that is not the parameter itself: float32
    if another has the missing bits, whole if it is spread over processes. All of these take part
    then, and one of them writes (`write`). LoRA is merged, in float32.
    All files get temporary names first and are renamed together once every byte is written,
    config.json last: a folder that has it is whole. Raises CheckpointError or OSError.
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
        folder.mkdir(parents=True, exist_ok=True)
    try:
        for name, keys in zip(names, shards, strict=True):
            tensors = {k: tensor(k, parameters[k]) for k in keys}
            if write:
                write_tensors(folder / f'{name}.tmp', tensors)
        if not write:
            return
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
    for old in folder.glob('model*.safetensors*'):  # shards of an earlier save in this folder
        if old.name not in written:
            old.unlink()


def write_tensors(path: Path, tensors: dict[str, Tensor]):
    """A safetensors file of CPU tensors; raises CheckpointError where the disk is full."""
    try:
        save_file(tensors, path, metadata={'format': 'pt'})
    except SafetensorError as error:
        Path(path).unlink(missing_ok=True)
        raise CheckpointError(f'{path}: could not be written: {error}') from error
