"""One decoder for many families of models, with LoRA. Mathematics only: no files.

A family is a row of FAMILIES: its differences from Llama. docs/models.md lists the models of each.
A configuration has one `Layer` per layer: its window and its rotary positions.

A batch is rows of packed tokens. Two integer arrays of the same shape go with `tokens [B, T]`:

    positions   the position of the token in its own text, for the rotary embedding and the window
    ends        one more than the row index of the last token that may see this one

Token i sees token j when  j <= i < ends[j]  (and, in a windowed layer, positions[i] - positions[j]
< window). In training, `ends` is the end of the token's document, so the documents of a row are
isolated. In evaluation, rows hold trees: a shared prefix ends where its last descendant ends, a
question where its last option ends, and an option at its own end. A padding token sees only itself:
ends[j] = j + 1. `ends` may be None if each row is one document, perhaps followed by padding.

Parameters have the names of Llama in every family, except the norm before the MLP. Training,
evaluation and sampling use this one forward pass, which is plain torch. On a GPU speed/install.py
puts faster versions in the place of `norm`, `rotate`, `gate`, `products`, `float32_linear` and
`make_masks`; after an edit of such a function a note says so, and the function itself is used.
"""

import contextlib
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING or not __package__:    # in the clone, at the top level
    from attention import IMPLEMENTATION, make_masks
else:                                   # installed, as nanocal.model
    from .attention import IMPLEMENTATION, make_masks


# ---- Families and configurations -----------------------------------------------------------------

def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate='tanh')


@dataclass(frozen=True)
class Family:
    """How the models of one model_type differ from Llama, which has the defaults."""
    norm: str = 'llama'                 # kind of the norms: see the function `norm`
    norm_order: str = 'before'          # norms relative to attention and MLP: a key of NORMS
    qk_norm: str = ''                   # on q and k: of each 'head', of the 'whole' projection, or
    #                                     of each head with a weight of its own: 'each'
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    activation: Callable[[Tensor], Tensor] = F.silu
    gated: bool = True                  # False: down(activation(up(x)))
    fused: str = ''                     # q, k and v are one matrix, by 'rows' or by 'heads'; if
    #                                     'rows', so are the two halves of a gated MLP
    adjacent_pairs: bool = False        # rotate x[2i], x[2i + 1] instead of x[i], x[i + hd/2]
    learned_positions: bool = False     # embed_positions, with two rows before that of position 0
    scaled_embeddings: bool = False     # times sqrt(D)

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """Return the names of the linear layers of a block, which LoRA can adapt."""
        qkv = ('qkv_proj',) if self.fused else ('q_proj', 'k_proj', 'v_proj')
        both = ('gate_up_proj',) if self.fused == 'rows' else ('gate_proj', 'up_proj')
        return (*qkv, 'o_proj', *(both if self.gated else ('up_proj',)), 'down_proj')


# a new family needs rows in runtime/config_keys.py as well: see docs/models.md
GEMMA = Family(norm='gemma', activation=gelu_tanh, scaled_embeddings=True)
OLMO = Family(norm='once', norm_order='after', qk_norm='whole')
COHERE = Family(norm='mean', norm_order='parallel', adjacent_pairs=True)
FAMILIES = {
    'llama': Family(), 'mistral': Family(), 'ministral': Family(), 'ministral3': Family(),
    'granite': Family(), 'smollm3': Family(), 'phi3': Family(fused='rows'),
    'qwen2': Family(qkv_bias=True), 'qwen3': Family(qk_norm='head'),
    'gemma': GEMMA, 'gemma2': replace(GEMMA, norm_order='both'),
    'gemma3_text': replace(GEMMA, norm_order='both', qk_norm='head'),
    'olmo2': OLMO, 'olmo3': OLMO, 'cohere': COHERE, 'cohere2': COHERE,
    'gpt_neox': Family(norm='layer', norm_order='parallel, two norms', mlp_bias=True,
                       activation=F.gelu, gated=False, fused='heads'),
    'opt': Family(norm='layer', activation=F.relu, gated=False, learned_positions=True)}

# {norm_order: the norms of a block}
NORMS = {'before': ('input_layernorm', 'pre_feedforward_layernorm'),
         'after': ('post_attention_layernorm', 'post_feedforward_layernorm'),
         'both': ('input_layernorm', 'post_attention_layernorm',
                  'pre_feedforward_layernorm', 'post_feedforward_layernorm'),
         'after the sum': ('post_attention_layernorm', 'post_feedforward_layernorm'),
         'parallel': ('input_layernorm',),
         'parallel, two norms': ('input_layernorm', 'pre_feedforward_layernorm')}


@dataclass(frozen=True)
class Rope:
    """Rotary positions: what `frequencies` needs. docs/models.md names the schemes."""
    theta: float
    dim: int                            # how many numbers of a head are rotated: the first ones
    scheme: str = 'default'             # or 'linear', 'llama3', 'yarn', 'longrope'
    factor: float = 1.0                 # by which long wavelengths are stretched
    length: int = 0                     # of the texts before stretching, in tokens
    slow: float = 1.0                   # at most this many turns in `length`: fully stretched
    fast: float = 1.0                   # at least this many: not stretched
    truncate: bool = True               # yarn: round the bounds of the ramp to whole indices
    divisors: tuple[float, ...] = ()    # longrope: of each frequency
    magnitude: float = 1.0              # of cos and sin
    query_growth: float = 0.0           # Ministral 3: q times 1 + this * ln(1 + p // length)


@dataclass(frozen=True)
class Layer:
    window: int | None = None           # keys that a token sees, itself included; None: all
    rope: Rope | None = None            # None: no rotary positions


@dataclass
class ModelConfig:
    """What a model computes. runtime/config_json.py reads it from a Hugging Face config.json."""
    model_type: str                                 # a key of FAMILIES
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int = 0                    # 0: as many as attention heads
    head_dim: int = 0                               # 0: hidden_size / heads
    max_position_embeddings: int = 2048
    norm_eps: float = 1e-6
    layers: list[Layer] = field(default_factory=list)   # []: no windows, rotary base 10,000
    family: Family = None  # type: ignore[assignment] # None: that of model_type
    tie_word_embeddings: bool = False
    embed_size: int = 0                             # 0: hidden_size; differs in OPT 350M
    scale: float = 0.0                              # of the scores; 0: head_dim ** -0.5
    embed_scale: float = 1.0
    residual_scale: float = 1.0                     # of what a block adds
    logit_scale: float = 1.0                        # multiplies the logits, before they are capped
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    initializer_range: float = 0.02
    eos_token_id: int | list | None = None
    dtype: str = 'float32'                          # of the weights on disk
    temperature: float = 1.0                        # divides the logits, before they are capped
    reward: bool = False                            # a score head instead of the output matrix
    hf: dict = field(default_factory=dict)          # the config.json that this was read from

    def __post_init__(self):
        self.num_key_value_heads = self.num_key_value_heads or self.num_attention_heads
        self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        self.embed_size = self.embed_size or self.hidden_size
        self.scale = self.scale or self.head_dim ** -0.5
        self.family = self.family or FAMILIES[self.model_type]
        self.layers = self.layers or ([Layer(rope=Rope(1e4, self.head_dim))]
                                      * self.num_hidden_layers)

    @property
    def windows(self) -> list[int | None]:
        return [layer.window for layer in self.layers]


# ---- Norms, rotary positions, products: each has a faster version in speed/ ---------------------

def norm(x: Tensor, weight: Tensor, bias: Tensor | None, kind: str, eps: float) -> Tensor:
    """Normalize the last axis of x, in float32, which x may be in a bfloat16 model.

    | kind   | formula                         | rounded to the type of weight |
    |--------|---------------------------------|-------------------------------|
    | llama  | weight * x / rms                | before and after the product  |
    | gemma  | (1 + weight) * x / rms          | at the end                    |
    | once   | weight * x / rms                | at the end                    |
    | mean   | weight * (x - mean) / std       | at the end                    |
    | layer  | weight * (x - mean) / std + bias| at the end                    |
    """
    y, w = x.float(), weight.float()
    if kind == 'layer':
        b = bias if bias is None else bias.float()
        return F.layer_norm(y, w.shape, w, b, eps).to(weight.dtype)
    if kind == 'gemma':
        return F.rms_norm(y, w.shape[-1:], 1 + w, eps).to(weight.dtype)
    y = F.rms_norm(y - y.mean(-1, keepdim=True) if kind == 'mean' else y, w.shape[-1:], eps=eps)
    return weight * y.to(weight.dtype) if kind == 'llama' else (w * y).to(weight.dtype)


class Norm(nn.Module):
    """The norm of a family, over the last of the axes in `size`."""

    def __init__(self, config: ModelConfig, *size: int):
        super().__init__()
        self.kind, self.eps = config.family.norm, config.norm_eps
        self.weight = nn.Parameter(torch.zeros(size) if self.kind == 'gemma' else torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size)) if self.kind == 'layer' else None

    def forward(self, x: Tensor) -> Tensor:
        return norm(x, self.weight, self.bias, self.kind, self.eps)


@functools.cache
def frequencies(rope: Rope, device: torch.device) -> Tensor:
    """Return the angle per position of each pair, float32 [dim / 2]."""
    pair = torch.arange(0, rope.dim, 2, device=device, dtype=torch.float32)
    frequency = rope.theta ** (-pair / rope.dim)
    if rope.scheme == 'llama3':     # linear in the turns
        turns = rope.length * frequency / (2 * math.pi)
        keep = ((turns - rope.slow) / (rope.fast - rope.slow)).clamp(0, 1)
    elif rope.scheme == 'yarn':     # linear in the index of the pair
        low, high = (rope.dim * math.log(rope.length / (turns * 2 * math.pi))
                     / (2 * math.log(rope.theta)) for turns in (rope.fast, rope.slow))
        if rope.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rope.dim - 1)
        keep = 1 - ((pair / 2 - low) / (high - low or 0.001)).clamp(0, 1)
    else:
        return frequency / torch.tensor(rope.divisors or rope.factor, device=device)
    return keep * frequency + (1 - keep) * frequency / rope.factor


def rotary_angles(positions: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return cos and sin [B, T, 1, dim / 2] of positions [B, T], float32, and the factor of the
    queries [B, T, 1, 1] if they grow with the position, else None.
    """
    angle = positions[..., None, None].float() * frequencies(rope, positions.device)
    cos = rope.magnitude * angle.cos()
    sin = rope.magnitude * angle.sin()
    growth = None
    if rope.query_growth:
        ages = torch.log(1 + torch.floor(positions / rope.length))
        growth = (1 + rope.query_growth * ages)[..., None, None]
    return cos, sin, growth


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x[i], x[i + hd/2]) of x [B, T, H, hd] by the angles of `rotary_angles`."""
    a, b = x.chunk(2, dim=-1)       # the products are float32, as the angles are
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def gate(x: Tensor, up: Tensor, activation: Callable) -> Tensor:
    return activation(x) * up


def products(x: Tensor, *layers: nn.Module) -> list[Tensor]:
    """Return [layer(x), ...] of linear layers with the same input."""
    return [layer(x) for layer in layers]


def float32_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T in float32."""
    return F.linear(x.float(), weight.float())


# ---- The blocks ----------------------------------------------------------------------------------

class Attention(nn.Module):
    """Grouped-query attention, with rotary positions where the layer has them."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        D = config.hidden_size
        hd = config.head_dim
        self.family = config.family
        H, K = self.heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim, bias = hd, self.family.qkv_bias
        if self.family.fused:
            self.qkv_proj = nn.Linear(D, (H + 2 * K) * hd, bias=bias)
        else:
            self.q_proj = nn.Linear(D, H * hd, bias=bias)
            self.k_proj = nn.Linear(D, K * hd, bias=bias)
            self.v_proj = nn.Linear(D, K * hd, bias=bias)
        if self.family.qk_norm:
            self.q_norm, self.k_norm = (
                Norm(config, *{'head': (hd,), 'whole': (n * hd,), 'each': (n, hd)}
                     [self.family.qk_norm]) for n in (H, K))
        self.o_proj = nn.Linear(H * hd, D, bias=self.family.o_bias)
        self.scale, self.softcap = config.scale, config.attn_logit_softcapping

    def forward(self, x: Tensor, rotary: tuple | None, mask) -> Tensor:
        q, k, v = self.project(x)
        if self.family.qk_norm == 'whole':
            q, k = self.q_norm(q.flatten(-2)).view_as(q), self.k_norm(k.flatten(-2)).view_as(k)
        elif self.family.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotary is not None:
            cos, sin, growth = rotary
            q, k = self.rotate_heads(q, cos, sin), self.rotate_heads(k, cos, sin)
            q = q if growth is None else q * growth.to(q.dtype)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        y = mask.attend(q, k, v, self.scale, self.softcap)
        return products(y.transpose(1, 2).flatten(2), self.o_proj)[0]

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return q, k and v [B, T, heads, hd] of x [B, T, D]."""
        layers = (self.qkv_proj,) if self.family.fused else (self.q_proj, self.k_proj, self.v_proj)
        qkv = products(x, *layers)
        if self.family.fused == 'heads':
            return qkv[0].unflatten(-1, (-1, 3 * self.head_dim)).chunk(3, dim=-1)
        if self.family.fused:
            H, K = self.heads
            return qkv[0].unflatten(-1, (-1, self.head_dim)).split((H, K, K), dim=-2)
        return tuple(y.unflatten(-1, (-1, self.head_dim)) for y in qkv)

    def rotate_heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate the first numbers of each head of x [B, T, heads, hd]."""
        n = 2 * cos.shape[-1]
        first, rest = (x, None) if n == self.head_dim else (x[..., :n], x[..., n:])
        if self.family.adjacent_pairs:      # in another order, the same for q and k
            first = first.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        first = rotate(first, cos, sin)
        return first if rest is None else torch.cat((first, rest), dim=-1)


class MLP(nn.Module):
    """down(activation(gate(x)) * up(x)), or down(activation(up(x)))"""

    def __init__(self, config: ModelConfig):
        super().__init__()
        D = config.hidden_size
        H = config.intermediate_size
        self.family = config.family
        bias = self.family.mlp_bias
        if self.family.gated and self.family.fused:
            self.gate_up_proj = nn.Linear(D, 2 * H, bias=bias)
        else:
            if self.family.gated:
                self.gate_proj = nn.Linear(D, H, bias=bias)
            self.up_proj = nn.Linear(D, H, bias=bias)
        self.down_proj = nn.Linear(H, D, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        family, activation = self.family, self.family.activation
        if not family.gated:
            return products(activation(products(x, self.up_proj)[0]), self.down_proj)[0]
        a, b = (products(x, self.gate_up_proj)[0].chunk(2, dim=-1) if family.fused else
                products(x, self.gate_proj, self.up_proj))
        if torch.compiler.is_compiling() and torch.is_grad_enabled():
            # the product is as large as its factors, and recomputing it costs less than storing it
            h = checkpoint(gate, a, b, activation, use_reentrant=False)
        else:
            h = gate(a, b, activation)
        return products(h, self.down_proj)[0]


class Block(nn.Module):
    """Attention and MLP, each added to its input; `norm_order` says where the norms are.

    Also in a bfloat16 model the residual stream x is float32, and only the norms round it: in Gemma
    3 it grows to 100,000, where bfloat16 has steps of 512 (docs/training.md has measurements).
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.norm_order, self.residual_scale = config.family.norm_order, config.residual_scale
        (self.input_layernorm, self.post_attention_layernorm, self.pre_feedforward_layernorm,
         self.post_feedforward_layernorm) = (
            Norm(config, config.hidden_size) if name in NORMS[self.norm_order] else nn.Identity()
            for name in NORMS['both'])

    def forward(self, x: Tensor, rotary: tuple | None, mask, at: Tensor | None = None) -> Tensor:
        dtype = self.mlp.down_proj.weight.dtype     # for families without these norms
        h = self.input_layernorm(x).to(dtype)
        y = self.self_attn(h, rotary, mask)
        if at is not None:      # nothing after attention depends on other tokens
            x, h, y = (z.flatten(0, 1)[None, at] for z in (x, h, y))
        # the sums are in the order of transformers
        if self.norm_order == 'parallel':
            return x + y + self.mlp(h)
        if self.norm_order == 'parallel, two norms':
            return self.mlp(self.pre_feedforward_layernorm(x)) + y + x
        if self.norm_order == 'after the sum':
            x = self.post_attention_layernorm(x + y)
            return self.post_feedforward_layernorm(x + self.mlp(x))
        x = x + self.scaled(self.post_attention_layernorm(y))
        y = self.mlp(self.pre_feedforward_layernorm(x).to(dtype))
        return x + self.scaled(self.post_feedforward_layernorm(y))

    def scaled(self, y: Tensor) -> Tensor:
        return y if self.residual_scale == 1 else y * self.residual_scale


# ---- The decoder ---------------------------------------------------------------------------------

class Embedding(nn.Embedding):
    def reset_parameters(self):
        if not self.weight.is_meta:     # normal_ of a meta tensor imports the compiler: seconds
            super().reset_parameters()


class Decoder(nn.Module):
    """Embedding, blocks and last norm."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        D = config.hidden_size
        E = config.embed_size
        family = config.family
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, E)
        if family.learned_positions:
            self.embed_positions = Embedding(config.max_position_embeddings + 2, D)
        self.project_in = nn.Linear(E, D, bias=False) if E != D else nn.Identity()
        self.project_out = nn.Linear(D, E, bias=False) if E != D else nn.Identity()
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.Identity() if family.norm_order == 'after the sum' else Norm(config, D)
        self.attention = IMPLEMENTATION     # of the masks, also those of decoding
        self.checkpoint = False     # store only the input of a block; recompute it in backward

    @property
    def compiled(self) -> bool:
        return any(layer._compiled_call_impl for layer in self.layers)

    def forward(self, tokens: Tensor, positions: Tensor, ends: Tensor | None,
                masks: list | None = None, at: Tensor | None = None) -> Tensor:
        config = self.config
        scale = config.hidden_size ** 0.5 if config.family.scaled_embeddings else config.embed_scale
        x = self.project_in(self.embed_tokens(tokens)).float() * scale
        if config.family.learned_positions:
            x = x + self.embed_positions(positions + 2)
        return self.run_blocks(x, positions, ends, masks, at)

    def run_blocks(self, x: Tensor, positions: Tensor, ends: Tensor | None,
                   masks: list | None = None, at: Tensor | None = None) -> Tensor:
        config = self.config
        if masks is None:
            masks = make_masks(self, positions, ends)
        rotary = {rope: rope and rotary_angles(positions, rope)
                  for rope in {layer.rope for layer in config.layers}}
        recompute = self.checkpoint and self.training and torch.is_grad_enabled()
        last = len(self.layers) - 1
        for i, (block, layer, mask) in enumerate(zip(self.layers, config.layers, masks,
                                                     strict=True)):
            inputs = x, rotary[layer.rope], mask, at if i == last else None
            x = checkpoint(block, *inputs, use_reentrant=False) if recompute else block(*inputs)
        return self.project_out(self.norm(x))


class CausalLM(nn.Module):
    """`model(tokens, positions, ends)`, int [B, T] each, returns the hidden states [B, T, D].

    They are divided by the temperature. The loss computes the logits from them:
    cap * tanh(hidden @ head.T / cap) with cap = `softcap`. `masks`, one per layer (attention.py),
    replace those of `ends`, as for a cache. With `at`, int [M], indices into the B * T tokens that
    may repeat, only the states [1, M, D] of these are returned, and the last MLP skips the others.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        if config.reward:
            self.score = nn.Linear(config.embed_size, 1, bias=False)
        elif not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.embed_size, config.vocab_size, bias=False)

    @property
    def decoder(self) -> Decoder:
        return self.model

    @property
    def head(self) -> Tensor:
        """Return the output matrix [V, D]: the embedding if they are tied, or in a reward model."""
        tied = self.config.tie_word_embeddings or self.config.reward
        return (self.model.embed_tokens if tied else self.lm_head).weight

    @property
    def softcap(self) -> float | None:
        """Return the bound of the logits; None if they are not capped."""
        return self.config.final_logit_softcapping

    @property
    def temperature(self) -> float:
        """Return the divisor of the hidden states, and so of the logits before the cap."""
        return 1 if self.config.reward else self.config.temperature / self.config.logit_scale

    def forward(self, tokens: Tensor, positions: Tensor, ends: Tensor | None,
                masks: list | None = None, at: Tensor | None = None) -> Tensor:
        hidden = self.model(tokens, positions, ends, masks, at)
        return hidden if self.temperature == 1 else hidden / self.temperature

    def logits(self, hidden: Tensor) -> Tensor:
        """Return capped logits [..., V] in float32: large, so for tests and single positions."""
        return self.cap(float32_linear(hidden, self.head))

    def cap(self, z: Tensor) -> Tensor:
        """Return logits, float32 of any shape, with the softcap of the model if it has one."""
        return self.softcap * torch.tanh(z / self.softcap) if self.softcap else z

    def rewards(self, hidden: Tensor) -> Tensor:
        """Return the rewards [...] of hidden states [..., D] at the last token of an answer."""
        return F.linear(hidden.float(), self.score.weight.float()).squeeze(-1)

    def init_weights(self):
        """Draw normal weights to train from scratch, smaller for writes to the residual stream."""
        std = self.config.initializer_range
        depth_std = std / math.sqrt(2 * self.config.num_hidden_layers)
        for key, parameter in self.named_parameters():
            if key.endswith('bias'):
                nn.init.zeros_(parameter)
            elif 'norm' not in key:
                residual = key.endswith(('o_proj.weight', 'down_proj.weight'))
                nn.init.normal_(parameter, std=depth_std if residual else std)


# ---- LoRA ----------------------------------------------------------------------------------------

class LoRALinear(nn.Module):
    """W x + alpha / rank * B A dropout(x), W frozen, A and B float32 (Hu et al. 2021, eq. 3)."""

    def __init__(self, linear: nn.Linear, rank: int, alpha: float, dropout: float, device=None):
        super().__init__()
        # under the same keys as in the base checkpoint
        self.weight, self.bias = linear.weight, linear.bias
        self.scale = alpha / rank
        self.lora_A, self.lora_B = (
            nn.Linear(*sizes, bias=False, device=device or self.weight.device, dtype=torch.float32)
            for sizes in ((linear.in_features, rank), (rank, linear.out_features)))
        nn.init.zeros_(self.lora_B.weight)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) + self.adapter(x)

    def adapter(self, x: Tensor) -> Tensor:
        low = F.linear(self.dropout(x), self.lora_A.weight.to(x.dtype))
        return self.scale * F.linear(low, self.lora_B.weight.to(x.dtype))


def add_lora(model: CausalLM, rank: int, alpha: float, dropout: float, targets: tuple[str, ...],
             device=None):
    """Freeze the model and add adapters to the linear layers named in `targets`, in place.

    device: of the adapters; None: that of the weights. Raises ValueError for an unknown layer.
    """
    possible = model.config.family.lora_targets
    if not targets or set(targets) - set(possible):
        raise ValueError(f'lora_targets = {targets}; wanted some of {", ".join(possible)}')
    model.requires_grad_(False)
    for layer in model.decoder.layers:
        for parent in list(layer.children()):
            for name in (t for t in possible if t in targets and hasattr(parent, t)):
                linear = getattr(parent, name)
                setattr(parent, name, LoRALinear(linear, rank, alpha, dropout, device))


@contextlib.contextmanager
def without_adapters(model):
    """A context in which LoRA adds nothing: the model as it was before training."""
    scales = {layer: layer.scale for layer in model.modules() if isinstance(layer, LoRALinear)}
    try:
        for layer in scales:
            layer.scale = 0.0
        yield
    finally:
        for layer, scale in scales.items():
            layer.scale = scale
