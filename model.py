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
| gpt_neox   | Pythia            | in neox.py: other blocks under other names                      |

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
writing checkpoints (checkpoint.py) renames nothing.
"""

import functools
import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Family:
    """How the models of one model_type differ from Llama; see the table above."""
    gemma: bool = False         # norms times 1 + weight, GELU, scaled embeddings
    norms_after: bool = False   # a norm after attention and one after the MLP
    qkv_bias: bool = False
    qk_norm: bool = False


FAMILIES = {'llama': Family(), 'mistral': Family(), 'qwen2': Family(qkv_bias=True),
            'qwen3': Family(qk_norm=True), 'gemma': Family(gemma=True),
            'gemma2': Family(gemma=True, norms_after=True)}


@dataclass
class ModelConfig:
    """The keys of a Hugging Face `config.json` that decide the computation; the rest is `extra`."""
    model_type: str                                 # one of FAMILIES, or gpt_neox
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
    def family(self) -> Family:
        return FAMILIES[self.model_type]

    @property
    def rotary_dim(self) -> int:
        """Return how many numbers of a head are rotated: all, but for GPT-NeoX."""
        return self.head_dim

    @property
    def windows(self) -> list[int | None]:
        """Return the sliding window of each layer, None if its tokens see all before them."""
        kinds = self.layer_types or ['sliding_attention'] * self.num_hidden_layers
        return [self.sliding_window if kind == 'sliding_attention' else None for kind in kinds]


# ------------------------------------------------------------------------------------------------
# The decoder
# ------------------------------------------------------------------------------------------------

class LlamaRMSNorm(nn.Module):
    """x / rms(x), rounded to the type of x, times the weight."""

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

    def __init__(self, config: ModelConfig):
        super().__init__()
        D, H, K = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        self.head_dim = hd = config.head_dim
        bias = config.family.qkv_bias
        self.q_proj = nn.Linear(D, H * hd, bias=bias)
        self.k_proj = nn.Linear(D, K * hd, bias=bias)
        self.v_proj = nn.Linear(D, K * hd, bias=bias)
        if config.family.qk_norm:
            self.q_norm, self.k_norm = (LlamaRMSNorm(hd, config.rms_norm_eps) for _ in range(2))
        self.qk_norm = config.family.qk_norm
        self.o_proj = nn.Linear(H * hd, D, bias=False)
        self.scale = (config.query_pre_attn_scalar or hd) ** -0.5
        self.softcap = config.attn_logit_softcapping
        self.score_mod = cap_scores(self.softcap) if self.softcap else None

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], mask) -> Tensor:
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
                   for project in (self.q_proj, self.k_proj, self.v_proj))
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, *rotary), rotate(k, *rotary)
        if isinstance(mask, tuple):
            y = attend_flex(q, k, v, mask, self.scale, self.score_mod)
        else:
            y = attend_explicit(q, k, v, mask, self.scale, self.softcap)
        return self.o_proj(y.transpose(1, 2).flatten(2))


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
            # the product is as large as its factors, and recomputing it costs less than storing it
            h = checkpoint(self.gated, self.gate_proj(x), self.up_proj(x), use_reentrant=False)
        else:
            h = self.gated(self.gate_proj(x), self.up_proj(x))
        return self.down_proj(h)

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.activation(gate) * up


class Block(nn.Module):
    """Normalize before attention and before the MLP; in Gemma 2 also after each of them."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        D, eps, family = config.hidden_size, config.rms_norm_eps, config.family
        Norm = GemmaRMSNorm if family.gemma else LlamaRMSNorm
        gelu = functools.partial(F.gelu, approximate='tanh')
        self.self_attn = Attention(config)
        self.mlp = GatedMLP(config, gelu if family.gemma else F.silu)
        self.input_layernorm = Norm(D, eps)
        # the names are Hugging Face's: only Gemma 2 has this norm *after* attention, the others
        # have it before the MLP
        self.post_attention_layernorm = Norm(D, eps)
        self.norms_after = family.norms_after
        if self.norms_after:
            self.pre_feedforward_layernorm = Norm(D, eps)
            self.post_feedforward_layernorm = Norm(D, eps)

    def forward(self, x: Tensor, rotary, mask) -> Tensor:
        y = self.self_attn(self.input_layernorm(x), rotary, mask)
        if not self.norms_after:
            x = x + y
            return x + self.mlp(self.post_attention_layernorm(x))
        x = x + self.post_attention_layernorm(y)
        y = self.mlp(self.pre_feedforward_layernorm(x))
        return x + self.post_feedforward_layernorm(y)


class Embedding(nn.Embedding):
    def reset_parameters(self):
        if not self.weight.is_meta:     # normal_ of a meta tensor imports the compiler: seconds
            super().reset_parameters()


class Decoder(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        gemma = config.family.gemma
        Norm = GemmaRMSNorm if gemma else LlamaRMSNorm
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.embed_scale = config.hidden_size ** 0.5 if gemma else 1
        self.attention = 'auto'     # or 'flex', 'explicit'; auto: flex on CUDA
        self.checkpoint = False     # store only the input of a block; recompute it in backward

    def forward(self, tokens: Tensor, positions: Tensor, ends: Tensor | None) -> Tensor:
        x = self.embed_tokens(tokens)
        # rounded to the type of the weights, as in transformers: for Gemma 2 9B 59.8665 in float32
        # (so in training here), 59.75 in bfloat16
        x = x * torch.tensor(self.embed_scale, dtype=x.dtype) if self.embed_scale != 1 else x
        # in a row no longer than the window, every token sees all before it
        windows = [w if w and w < tokens.shape[1] else None for w in self.config.windows]
        masks = self.masks(positions, ends, set(windows), x)
        rotary = rotary_angles(positions, self.config, x.dtype)
        recompute = self.checkpoint and self.training and torch.is_grad_enabled()
        for layer, window in zip(self.layers, windows, strict=True):
            if recompute:
                x = checkpoint(layer, x, rotary, masks[window], use_reentrant=False)
            else:
                x = layer(x, rotary, masks[window])
        return self.norm(x)

    def masks(self, positions: Tensor, ends: Tensor | None, windows: set, x: Tensor) -> dict:
        """Return {window: its mask, as attention takes it}; the mask None means causal."""
        if ends is None:
            if windows == {None} and not self.config.attn_logit_softcapping:
                return {None: None}
            ends = torch.full_like(positions, positions.shape[1])
        # FlexAttention's kernels take heads of 16 numbers and more
        fits = x.is_cuda and self.config.head_dim >= 16
        if fits if self.attention == 'auto' else self.attention == 'flex':
            options = flex_options(self.config.head_dim, x)
            return {w: flex_mask(positions, ends, w, options) for w in windows}
        return {w: explicit_mask(positions, ends, w) for w in windows}


class CausalLM(nn.Module):
    """`model(tokens, positions, ends)`, int [B, T] each, returns the hidden states [B, T, D].

    `ends` may be None: see the top of this file. The logits are cap * tanh(hidden @ head.T / cap)
    with cap = `softcap`. The hidden states are already divided by the temperature.
    """

    # the linear layers that LoRA can adapt, and those that write to the residual stream
    lora_targets = ('q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj')
    residual_layers = ('o_proj.weight', 'down_proj.weight')

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def head(self) -> Tensor:
        """Return the output matrix [V, D]: the embedding if they are tied."""
        layer = self.model.embed_tokens if self.config.tie_word_embeddings else self.lm_head
        return layer.weight

    @property
    def softcap(self) -> float | None:
        """Return the bound of the logits, None if they are not capped."""
        return self.config.final_logit_softcapping

    @property
    def temperature(self) -> float:
        """Return what `forward` divides the hidden states by, and so the logits before the cap."""
        return self.config.temperature

    def forward(self, tokens: Tensor, positions: Tensor, ends: Tensor | None) -> Tensor:
        hidden = self.model(tokens, positions, ends)
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
                residual = name.endswith(self.residual_layers)
                nn.init.normal_(parameter, std=depth_std if residual else std)
            elif name.endswith('bias'):
                nn.init.zeros_(parameter)


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
    """Rotate the pairs (x[i], x[i + hd/2]): Hugging Face's layout, not Meta's interleaved one."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


# ------------------------------------------------------------------------------------------------
# Attention: FlexAttention on CUDA, an explicit mask elsewhere
# ------------------------------------------------------------------------------------------------

def explicit_mask(positions: Tensor, ends: Tensor, window: int | None) -> Tensor:
    """Return bool [B, 1, T, T]: may the token at row index i (axis 2) see the one at j (axis 3)?"""
    index = torch.arange(ends.shape[1], device=ends.device)
    mask = (index <= index[:, None]) & (index[:, None] < ends[:, None, :])
    if window is not None:
        mask = mask & (positions[:, :, None] - positions[:, None, :] < window)
    return mask[:, None]


def attend_explicit(q, k, v, mask, scale, softcap):
    """Return the attention [B, H, T, hd] of q [B, H, T, hd] to k and v [B, H_kv, T, hd].

    mask: bool [B, 1, T, T], a TreeMask of inference.py, or None for causal. For the heads of
    Llama 3.1 8B on an H200, cuDNN takes 1.2 ms for the causal case, FlexAttention 1.8 ms.
    """
    if hasattr(mask, 'attend'):
        return mask.attend(q, k, v, scale, softcap)
    if softcap is None:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale,
            enable_gqa=q.shape[1] != k.shape[1])
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    # cap before masking: minus infinity would be capped to -softcap
    scores = softcap * torch.tanh((q @ k.mT).float() * scale / softcap)
    return scores.masked_fill(~mask, -torch.inf).softmax(-1).to(v.dtype) @ v


compiled = functools.cache(torch.compile)   # one compiled function per function and options


def flex_mask(positions: Tensor, ends: Tensor, window: int | None, options: dict) -> tuple:
    """Return (the BlockMask of the rule of `explicit_mask`, FlexAttention's kernel_options)."""
    def visible(b, h, i, j):
        seen = (j <= i) & (i < ends[b, j])
        if window is not None:
            seen = seen & (positions[b, i] - positions[b, j] < window)
        return seen
    B, T = ends.shape
    # With a static length making the mask takes 0.1 ms instead of 0.4, but Triton unrolls the row:
    # at 16,384 tokens compiling takes two minutes.
    dynamic = True if T > 4096 else None
    make = compiled(create_block_mask, dynamic=dynamic) if ends.is_cuda else create_block_mask
    return make(visible, B, None, T, T, device=str(ends.device)), options


def attend_flex(q, k, v, mask, scale, score_mod):
    """Return what `attend_explicit` does; mask from `flex_mask`, score_mod from `cap_scores`.

    Outside CUDA it runs uncompiled, slowly and without gradients: for tests.
    """
    block_mask, options = mask
    direct = torch.compiler.is_compiling() or not q.is_cuda
    attend = flex_attention if direct else compiled(flex_attention, dynamic=False)
    return attend(q, k, v, score_mod=score_mod, block_mask=block_mask, scale=scale,
                  enable_gqa=q.shape[1] != k.shape[1], kernel_options=options)


@functools.cache
def cap_scores(softcap: float):
    """Return softcap * tanh(score / softcap) as a score_mod: a sigmoid, which costs half as much.

    Cached, since a new function object per layer would compile every layer anew.
    """
    def cap(score, b, h, i, j):
        return 2 * softcap * torch.sigmoid(score * (2 / softcap)) - softcap
    return cap


# Block sizes of FlexAttention by head_dim: the fastest of some twenty on an H200 in bfloat16 with
# 8,192 tokens. Forward and backward take 1.5, 1.8 and 1.0 ms for the heads of Gemma 2 2B, Llama 3.1
# 8B and Llama 3.2 1B, instead of 2.4, 1.8 and 1.2 ms with the defaults.
HOPPER_OPTIONS = {
    256: {'fwd_BLOCK_M': 128, 'fwd_BLOCK_N': 64, 'fwd_num_warps': 8, 'fwd_num_stages': 2,
          'bwd_BLOCK_M1': 64, 'bwd_BLOCK_N1': 64, 'bwd_BLOCK_M2': 128, 'bwd_BLOCK_N2': 32,
          'bwd_num_warps': 8, 'bwd_num_stages': 2},
    128: {'fwd_BLOCK_M': 64, 'fwd_BLOCK_N': 64, 'fwd_num_warps': 4, 'fwd_num_stages': 3},
    64: {'fwd_BLOCK_M': 128, 'fwd_BLOCK_N': 64, 'fwd_num_warps': 4, 'fwd_num_stages': 3,
         'bwd_BLOCK_M1': 64, 'bwd_BLOCK_N1': 64, 'bwd_BLOCK_M2': 64, 'bwd_BLOCK_N2': 64,
         'bwd_num_warps': 4, 'bwd_num_stages': 3},
}


def flex_options(head_dim: int, x: Tensor) -> dict:
    """Return FlexAttention's kernel_options for the device and type of x; {} for its own."""
    hopper = x.is_cuda and torch.cuda.get_device_capability(x.device) == (9, 0)
    return HOPPER_OPTIONS.get(head_dim, {}) if hopper and x.dtype == torch.bfloat16 else {}


def compile_blocks(model: CausalLM):
    """Compile each decoder block in place, for static shapes; equal masks share one graph."""
    # One process may make models of several shapes. Beyond the default limit of 8, further blocks
    # would run uncompiled.
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
        # under the same keys as in the base checkpoint
        self.weight, self.bias = linear.weight, linear.bias
        self.scale = alpha / rank
        options = {'bias': False, 'device': self.weight.device, 'dtype': torch.float32}
        self.lora_A = nn.Linear(linear.in_features, rank, **options)
        self.lora_B = nn.Linear(rank, linear.out_features, **options)
        nn.init.zeros_(self.lora_B.weight)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        low = F.linear(self.dropout(x), self.lora_A.weight.to(x.dtype))
        return (F.linear(x, self.weight, self.bias)
                + self.scale * F.linear(low, self.lora_B.weight.to(x.dtype)))


def add_lora(model: CausalLM, rank: int, alpha: float, dropout: float, targets: tuple[str, ...]):
    """Freeze the model and add adapters to the linear layers named in `targets`, in place."""
    if not targets or set(targets) - set(model.lora_targets):
        raise ValueError(f'lora_targets = {targets}; wanted some of '
                         f'{", ".join(model.lora_targets)}')
    model.requires_grad_(False)
    for layer in model.model.layers:
        for parent in list(layer.children()):
            for name in (t for t in targets if hasattr(parent, t)):
                setattr(parent, name, LoRALinear(getattr(parent, name), rank, alpha, dropout))
