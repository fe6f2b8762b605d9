"""One decoder for several families of models, with LoRA. Mathematics only: no files.

| model_type | models            | norm           | activation | more                              |
|------------|-------------------|----------------|------------|-----------------------------------|
| llama      | Llama 1, 2, 3     | w x / rms      | SiLU       | stretched rotary angles in 3.1 on |
| mistral    | Mistral 7B        | w x / rms      | SiLU       | may have a sliding window         |
| qwen2      | Qwen2, Qwen2.5    | w x / rms      | SiLU       | biases in q, k and v              |
| qwen3      | Qwen3             | w x / rms      | SiLU       | norms on the heads of q and k     |
| gemma      | Gemma 1           | (1 + w) x / rms| tanh GELU  | embeddings times sqrt(D)          |
| gemma2     | Gemma 2           | (1 + w) x / rms| tanh GELU  | as gemma; norms after attention   |
|            |                   |                |            | and MLP, soft-caps, every second  |
|            |                   |                |            | layer has a sliding window        |
| gpt_neox   | Pythia            | blocks of its own, in families/neox.py                          |

A batch is rows of packed tokens. Two integer arrays of the same shape go with `tokens [B, T]`:

    positions   the position of the token in its own text, for the rotary embedding and the window
    ends        one more than the row index of the last token that may see this one

Token i sees token j when  j <= i < ends[j]  (and, in a windowed layer, positions[i] - positions[j]
< window). In training, `ends` is the end of the token's document, so the documents of a row are
isolated. In evaluation, rows hold trees: a shared prefix ends where its last descendant ends, a
question where its last option ends, and an option at its own end. For padding, ends[j] = j + 1: a
padding token sees only itself.
`ends` may be None if each row is one document, perhaps followed by padding: no mask is needed then.

The model returns hidden states instead of logits: the loss multiplies them by the output matrix
`model.head` and applies `model.softcap`. State-dict keys are those of Hugging Face, so reading and
writing checkpoints renames nothing.

Training, evaluation and sampling use this one forward pass, so an edit here changes all of them.
Three of its functions (the RMS norms, `rotate`, `gated_product`) have a Triton kernel beside the
plain version, which computes the same without gradients. After an edit inside one of these
functions, set KERNELS = False, or edit its kernel at the end of this file as well.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING or not __package__:
    import attention            # in the clone, at the top level
else:
    from . import attention     # installed, as nanocal.model

try:
    import triton
    import triton.language as tl
except ImportError:     # for example on macOS: everything is plain torch
    triton = None

KERNELS = True      # False: the plain versions also on CUDA in bfloat16 without gradients


@dataclass
class ModelConfig:
    """The keys of a Hugging Face `config.json` that decide the computation; the rest is `extra`."""
    model_type: str                                 # a key of FAMILIES, or gpt_neox
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int = 0                    # 0: as many as attention heads
    head_dim: int = 0                               # 0: hidden_size / heads; differs in Gemma 2
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict | None = None                # the 'llama3' scheme or None
    tie_word_embeddings: bool = False
    sliding_window: int | None = None               # keys that a token sees, itself included
    layer_types: list[str] | None = None            # None: all layers alike, but see __post_init__
    query_pre_attn_scalar: float | None = None      # None: head_dim
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    initializer_range: float = 0.02
    bos_token_id: int | list | None = None
    eos_token_id: int | list | None = None
    dtype: str = 'float32'                          # of the weights on disk
    temperature: float = 1.0                        # divides the logits, before they are capped
    extra: dict = field(default_factory=dict)

    def __post_init__(self):
        self.num_key_value_heads = self.num_key_value_heads or self.num_attention_heads
        self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        if self.model_type == 'gemma2' and self.layer_types is None:
            self.layer_types = ['full_attention' if i % 2 else 'sliding_attention'
                                for i in range(self.num_hidden_layers)]

    @property
    def family(self) -> 'Family':
        return FAMILIES[self.model_type]

    @property
    def norm_eps(self) -> float:
        return self.rms_norm_eps

    @property
    def rotary_dim(self) -> int:
        """Return how many numbers of a head are rotated, the first ones: all but in GPT-NeoX."""
        return self.head_dim

    @property
    def windows(self) -> list[int | None]:
        """Return the sliding window of each layer; None if its tokens see all before them."""
        kinds = self.layer_types or ['sliding_attention'] * self.num_hidden_layers
        return [self.sliding_window if kind == 'sliding_attention' else None for kind in kinds]


# ------------------------------------------------------------------------------------------------
# Norms, rotary positions, gated product: each a plain version with a kernel beside it
# ------------------------------------------------------------------------------------------------

def by_kernel(x: Tensor) -> bool:
    """Return whether a kernel computes what is computed from x: see KERNELS."""
    return KERNELS and attention.kernels_apply(x)


class LlamaRMSNorm(nn.Module):
    """x / rms(x), rounded to the type of x, times the weight."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if by_kernel(x):
            return norm_kernel(x, self.weight, self.eps, gemma=False)
        return self.weight * F.rms_norm(x.float(), x.shape[-1:], eps=self.eps).to(x.dtype)


class GemmaRMSNorm(nn.Module):
    """x / rms(x) times (1 + weight), rounded once at the end; the stored weight is around zero."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if by_kernel(x):
            return norm_kernel(x, self.weight, self.eps, gemma=True)
        return F.rms_norm(x.float(), x.shape[-1:], 1 + self.weight.float(), self.eps).to(x.dtype)


def rotary_angles(positions: Tensor, config: ModelConfig, dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin [B, 1, T, rotary_dim / 2] of positions [B, T], computed in float32.

    The 'llama3' scheme stretches long wavelengths by `factor` and keeps short ones, with a linear
    transition between them. It applies at every length, not only beyond the original context.
    """
    half = torch.arange(0, config.rotary_dim, 2, device=positions.device, dtype=torch.float32)
    frequency = config.rope_theta ** (-half / config.rotary_dim)
    if s := config.rope_scaling:
        turns = s['original_max_position_embeddings'] * frequency / (2 * math.pi)
        low, high = s['low_freq_factor'], s['high_freq_factor']
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        frequency = keep * frequency + (1 - keep) * frequency / s['factor']
    angle = (positions[..., None].float() * frequency)[:, None]
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x[i], x[i + hd/2]) of x [B, H, T, hd] by the angles of `rotary_angles`.

    This is Hugging Face's layout, not Meta's interleaved one.
    """
    if by_kernel(x):
        return rotate_kernel(x, cos, sin)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate='tanh')


def gated_product(activation: Callable, gate: Tensor, up: Tensor) -> Tensor:
    if by_kernel(gate) and activation in (F.silu, gelu_tanh):
        return gated_kernel(gate, up, silu=activation is F.silu)
    return activation(gate) * up


# ------------------------------------------------------------------------------------------------
# The blocks, and the families that they make up
# ------------------------------------------------------------------------------------------------

class Attention(nn.Module):
    """Grouped-query attention with rotary positions and, in Gemma 2, capped scores."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        D, H, K = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        self.head_dim = hd = config.head_dim
        bias = config.family.qkv_bias
        self.q_proj = nn.Linear(D, H * hd, bias=bias)
        self.k_proj = nn.Linear(D, K * hd, bias=bias)
        self.v_proj = nn.Linear(D, K * hd, bias=bias)
        self.qk_norm = config.family.qk_norm
        if self.qk_norm:
            self.q_norm, self.k_norm = (LlamaRMSNorm(hd, config.norm_eps) for _ in range(2))
        self.o_proj = nn.Linear(H * hd, D, bias=False)
        self.scale = (config.query_pre_attn_scalar or hd) ** -0.5
        self.softcap = config.attn_logit_softcapping

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], mask) -> Tensor:
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim))    # [B, T, heads, hd]
                   for project in (self.q_proj, self.k_proj, self.v_proj))
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        y = mask.attend(rotate(q, *rotary), rotate(k, *rotary), v, self.scale, self.softcap)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x))"""

    def __init__(self, config: ModelConfig):
        super().__init__()
        D, H = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(D, H, bias=False)
        self.up_proj = nn.Linear(D, H, bias=False)
        self.down_proj = nn.Linear(H, D, bias=False)
        self.activation = config.family.activation

    def forward(self, x: Tensor) -> Tensor:
        factors = self.activation, self.gate_proj(x), self.up_proj(x)
        if torch.compiler.is_compiling() and torch.is_grad_enabled():
            # the product is as large as its factors, and recomputing it costs less than storing it
            h = checkpoint(gated_product, *factors, use_reentrant=False)
        else:
            h = gated_product(*factors)
        return self.down_proj(h)


class Block(nn.Module):
    """Normalize before attention and before the MLP; in Gemma 2 also after each of them."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        D, eps, family = config.hidden_size, config.norm_eps, config.family
        self.self_attn = Attention(config)
        self.mlp = GatedMLP(config)
        self.input_layernorm = family.norm(D, eps)
        # the names are Hugging Face's: only Gemma 2 has this norm *after* attention, the others
        # have it before the MLP
        self.post_attention_layernorm = family.norm(D, eps)
        self.norms_after = family.norms_after
        if self.norms_after:
            self.pre_feedforward_layernorm = family.norm(D, eps)
            self.post_feedforward_layernorm = family.norm(D, eps)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], mask) -> Tensor:
        y = self.self_attn(self.input_layernorm(x), rotary, mask)
        if not self.norms_after:
            x = x + y
            return x + self.mlp(self.post_attention_layernorm(x))
        x = x + self.post_attention_layernorm(y)
        y = self.mlp(self.pre_feedforward_layernorm(x))
        return x + self.post_feedforward_layernorm(y)


@dataclass(frozen=True)
class Family:
    """How the models of one model_type differ from Llama; see the table at the top."""
    norm: Callable[[int, float], nn.Module] = LlamaRMSNorm      # of (size, eps)
    activation: Callable[[Tensor], Tensor] = F.silu
    norms_after: bool = False           # a norm after attention and one after the MLP
    scaled_embeddings: bool = False     # times sqrt(D)
    qkv_bias: bool = False
    qk_norm: bool = False
    block: Callable[[ModelConfig], nn.Module] = Block
    # names of the parts in the state dict
    decoder: str = 'model'
    embedding: str = 'embed_tokens'
    last_norm: str = 'norm'
    head: str = 'lm_head'
    # the linear layers that LoRA can adapt, and those that write to the residual stream
    lora_targets: tuple[str, ...] = ('q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj',
                                     'up_proj', 'down_proj')
    residual_layers: tuple[str, ...] = ('o_proj', 'down_proj')


# a new family needs rows in runtime/config_json.py as well: see docs/training.md
GEMMA = Family(norm=GemmaRMSNorm, activation=gelu_tanh, scaled_embeddings=True)
FAMILIES = {'llama': Family(), 'mistral': Family(), 'qwen2': Family(qkv_bias=True),
            'qwen3': Family(qk_norm=True), 'gemma': GEMMA,
            'gemma2': replace(GEMMA, norms_after=True)}


# ------------------------------------------------------------------------------------------------
# The decoder
# ------------------------------------------------------------------------------------------------

class Embedding(nn.Embedding):
    def reset_parameters(self):
        if not self.weight.is_meta:     # normal_ of a meta tensor imports the compiler: seconds
            super().reset_parameters()


class Decoder(nn.Module):
    """Embedding, blocks and last norm, under the names of the family."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        D, family = config.hidden_size, config.family
        self.config = config
        self.add_module(family.embedding, Embedding(config.vocab_size, D))
        self.layers = nn.ModuleList(family.block(config) for _ in range(config.num_hidden_layers))
        self.add_module(family.last_norm, family.norm(D, config.norm_eps))
        self.embed_scale = D ** 0.5 if family.scaled_embeddings else 1
        self.attention = 'auto'     # or 'explicit', 'flex', 'tree': see attention.make_masks
        self.checkpoint = False     # store only the input of a block; recompute it in backward

    def forward(self, tokens: Tensor, positions: Tensor, ends: Tensor | None,
                masks: list | None = None) -> Tensor:
        config, family = self.config, self.config.family
        x = self.get_submodule(family.embedding)(tokens)
        # rounded to the type of the weights, as in transformers: for Gemma 2 9B 59.8665 in float32
        # (so in training here), 59.75 in bfloat16
        x = x * torch.tensor(self.embed_scale, dtype=x.dtype) if self.embed_scale != 1 else x
        if masks is None:
            # in a row no longer than the window, every token sees all before it
            windows = [w if w and w < tokens.shape[1] else None for w in config.windows]
            by_window = attention.make_masks(self.attention, positions, ends, set(windows),
                                             config.head_dim, config.attn_logit_softcapping, x)
            masks = [by_window[window] for window in windows]
        rotary = rotary_angles(positions, config, x.dtype)
        recompute = self.checkpoint and self.training and torch.is_grad_enabled()
        for layer, mask in zip(self.layers, masks, strict=True):
            if recompute:
                x = checkpoint(layer, x, rotary, mask, use_reentrant=False)
            else:
                x = layer(x, rotary, mask)
        return self.get_submodule(family.last_norm)(x)


class CausalLM(nn.Module):
    """`model(tokens, positions, ends)`, int [B, T] each, returns the hidden states [B, T, D].

    `ends` may be None: see the top of this file. `masks`, one per layer (see attention.py), take
    the place of those that `ends` describes, as for a cache. The logits are
    cap * tanh(hidden @ head.T / cap) with cap = `softcap`. The hidden states are already divided by
    the temperature.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.add_module(config.family.decoder, Decoder(config))
        if not config.tie_word_embeddings:
            self.add_module(config.family.head, nn.Linear(config.hidden_size, config.vocab_size,
                                                          bias=False))

    @property
    def decoder(self) -> Decoder:
        return getattr(self, self.config.family.decoder)

    @property
    def head(self) -> Tensor:
        """Return the output matrix [V, D]: the embedding if they are tied."""
        family = self.config.family
        return (getattr(self.decoder, family.embedding) if self.config.tie_word_embeddings else
                getattr(self, family.head)).weight

    @property
    def softcap(self) -> float | None:
        """Return the bound of the logits; None if they are not capped."""
        return self.config.final_logit_softcapping

    @property
    def temperature(self) -> float:
        """Return the divisor of the hidden states, and so of the logits before the cap."""
        return self.config.temperature

    def forward(self, tokens: Tensor, positions: Tensor, ends: Tensor | None,
                masks: list | None = None) -> Tensor:
        hidden = self.decoder(tokens, positions, ends, masks)
        return hidden if self.temperature == 1 else hidden / self.temperature

    def logits(self, hidden: Tensor) -> Tensor:
        """Return capped logits [..., V] in float32: large, so for tests and single positions."""
        z = F.linear(hidden.float(), self.head.float())
        return self.softcap * torch.tanh(z / self.softcap) if self.softcap else z

    def init_weights(self):
        """Draw normal weights for training from scratch, smaller if the output is a residual."""
        std = self.config.initializer_range
        depth_std = std / math.sqrt(2 * self.config.num_hidden_layers)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                residual = name.split('.')[-2] in self.config.family.residual_layers
                nn.init.normal_(parameter, std=depth_std if residual else std)
            elif name.endswith('bias'):
                nn.init.zeros_(parameter)


def compile_blocks(model: CausalLM):
    """Compile each decoder block in place, for static shapes; equal masks share one graph."""
    # One process may make models of several shapes. Beyond the default limit of 8, further blocks
    # would run uncompiled.
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    if model.decoder.attention == 'auto':
        # validation has no gradients, but the tree kernel would compile another kind of graph
        model.decoder.attention = 'flex'
    for layer in model.decoder.layers:
        layer.compile(dynamic=False)


# ------------------------------------------------------------------------------------------------
# LoRA
# ------------------------------------------------------------------------------------------------

class LoRALinear(nn.Module):
    """W x + alpha / rank * B A dropout(x), W frozen, A and B float32 (Hu et al. 2021, eq. 3)."""

    def __init__(self, linear: nn.Linear, rank: int, alpha: float, dropout: float):
        super().__init__()
        # under the same keys as in the base checkpoint
        self.weight, self.bias = linear.weight, linear.bias
        self.scale = alpha / rank
        self.lora_A, self.lora_B = (
            nn.Linear(*sizes, bias=False, device=self.weight.device, dtype=torch.float32)
            for sizes in ((linear.in_features, rank), (rank, linear.out_features)))
        nn.init.zeros_(self.lora_B.weight)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        low = F.linear(self.dropout(x), self.lora_A.weight.to(x.dtype))
        return (F.linear(x, self.weight, self.bias)
                + self.scale * F.linear(low, self.lora_B.weight.to(x.dtype)))


def add_lora(model: CausalLM, rank: int, alpha: float, dropout: float, targets: tuple[str, ...]):
    """Freeze the model and add adapters to the linear layers named in `targets`, in place."""
    possible = model.config.family.lora_targets
    if not targets or set(targets) - set(possible):
        raise ValueError(f'lora_targets = {targets}; wanted some of {", ".join(possible)}')
    model.requires_grad_(False)
    for layer in model.decoder.layers:
        for parent in list(layer.children()):
            for name in (t for t in possible if t in targets and hasattr(parent, t)):
                setattr(parent, name, LoRALinear(getattr(parent, name), rank, alpha, dropout))


# ------------------------------------------------------------------------------------------------
# Kernels without gradients. Arithmetic is float32 and is rounded once, where the plain versions
# round products of bfloat16 in between
# ------------------------------------------------------------------------------------------------

def norm_kernel(x: Tensor, weight: Tensor, eps: float, gemma: bool) -> Tensor:
    x, D = x.contiguous(), x.shape[-1]
    out, width = torch.empty_like(x), triton.next_power_of_2(D)
    _norm[x.numel() // D,](x, weight, out, D, eps, GEMMA=gemma, WIDTH=width,
                           num_warps=min(16, max(1, width // 256)))
    return out


def rotate_kernel(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    B, H, T, hd = x.shape
    cos, sin = (angles.expand(B, 1, T, hd // 2).contiguous() for angles in (cos, sin))
    out = x.new_empty(B, T, H, hd)
    _rotate[B * T,](x, cos, sin, out, *x.stride(), T, H, hd // 2, HEADS=triton.next_power_of_2(H),
                    HALF=triton.next_power_of_2(hd // 2))
    return out.transpose(1, 2)


def gated_kernel(gate: Tensor, up: Tensor, silu: bool) -> Tensor:
    gate, up, block = gate.contiguous(), up.contiguous(), 4096
    out = torch.empty_like(gate)
    _gated[triton.cdiv(out.numel(), block),](gate, up, out, out.numel(), SILU=silu, BLOCK=block,
                                             num_warps=8)
    return out


if triton is not None:
    @triton.jit
    def _norm(x_ptr, weight_ptr, out_ptr, D, eps, GEMMA: tl.constexpr, WIDTH: tl.constexpr):
        # the vector of one token
        d = tl.arange(0, WIDTH)
        at = tl.program_id(0).to(tl.int64) * D + d
        x = tl.load(x_ptr + at, mask=d < D, other=0.0)
        weight = tl.load(weight_ptr + d, mask=d < D, other=0.0).to(tl.float32)
        y = x.to(tl.float32)
        y = y * tl.rsqrt(tl.sum(y * y) / D + eps)
        y = y * (1 + weight) if GEMMA else y.to(x.dtype).to(tl.float32) * weight
        tl.store(out_ptr + at, y.to(x.dtype), mask=d < D)

    @triton.jit
    def _rotate(x_ptr, cos_ptr, sin_ptr, out_ptr, x_row, x_head, x_token, x_d, T, n_heads, half,
                HEADS: tl.constexpr, HALF: tl.constexpr):
        # the pairs (x[d], x[d + half]) of all heads of one token
        token, head, d = (tl.program_id(0).to(tl.int64), tl.arange(0, HEADS)[:, None],
                          tl.arange(0, HALF))
        mask = (head < n_heads) & (d < half)[None, :]
        cos = tl.load(cos_ptr + token * half + d, mask=d < half, other=0.0).to(tl.float32)[None, :]
        sin = tl.load(sin_ptr + token * half + d, mask=d < half, other=0.0).to(tl.float32)[None, :]
        x_ptr += token // T * x_row + token % T * x_token
        at = x_ptr + head * x_head + d[None, :] * x_d
        a = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(at + half * x_d, mask=mask, other=0.0).to(tl.float32)
        to = out_ptr + (token * n_heads + head) * 2 * half + d[None, :]
        tl.store(to, (a * cos - b * sin).to(out_ptr.dtype.element_ty), mask=mask)
        tl.store(to + half, (b * cos + a * sin).to(out_ptr.dtype.element_ty), mask=mask)

    @triton.jit
    def _gated(gate_ptr, up_ptr, out_ptr, n, SILU: tl.constexpr, BLOCK: tl.constexpr):
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(gate_ptr + at, mask=at < n, other=0.0).to(tl.float32)
        up = tl.load(up_ptr + at, mask=at < n, other=0.0).to(tl.float32)
        if SILU:
            y = x * tl.sigmoid(x)
        else:   # x / 2 (1 + tanh(z)) = x sigmoid(2 z), with sqrt(2 / pi) = 0.79788...
            y = x * tl.sigmoid(2 * 0.7978845608028654 * (x + 0.044715 * x * x * x))
        tl.store(out_ptr + at, (y * up).to(out_ptr.dtype.element_ty), mask=at < n)
