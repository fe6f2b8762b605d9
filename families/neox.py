"""GPT-NeoX, the architecture of Pythia: blocks of its own in the decoder of model.py.

What differs from Llama: LayerNorm with a bias instead of RMSNorm; attention and MLP side by side,
both on the block's input (`use_parallel_residual`); rotary positions on the first part of each
head; one matrix for queries, keys and values; biases; a plain MLP with the exact GELU; an output
matrix that is never tied to the embedding. State-dict keys are those of Hugging Face.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model import Family, ModelConfig, rotate


@dataclass
class NeoxConfig(ModelConfig):
    """ModelConfig, and the keys that only GPT-NeoX has; `rms_norm_eps` has no meaning here."""
    layer_norm_eps: float = 1e-5
    partial_rotary_factor: float = 0.25     # the part of each head that is rotated
    use_parallel_residual: bool = True
    attention_bias: bool = True

    @property
    def family(self) -> Family:
        return GPT_NEOX

    @property
    def norm_eps(self) -> float:
        return self.layer_norm_eps

    @property
    def rotary_dim(self) -> int:
        """Return how many numbers of a head are rotated: the first ones."""
        return int(self.head_dim * self.partial_rotary_factor)


class NeoxAttention(nn.Module):
    """Attention with as many keys as queries, their projections fused head by head."""

    def __init__(self, config: NeoxConfig):
        super().__init__()
        D = config.hidden_size
        self.head_dim, self.rotary_dim = config.head_dim, config.rotary_dim
        self.query_key_value = nn.Linear(D, 3 * D, bias=config.attention_bias)
        self.dense = nn.Linear(D, D, bias=config.attention_bias)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], mask) -> Tensor:
        heads = self.query_key_value(x).unflatten(-1, (-1, 3 * self.head_dim))  # [B, T, H, 3 hd]
        q, k, v = heads.transpose(1, 2).chunk(3, dim=-1)
        q, k = self.rotate_part(q, rotary), self.rotate_part(k, rotary)
        y = mask.attend(q, k, v, self.head_dim ** -0.5, None)
        return self.dense(y.transpose(1, 2).flatten(2))

    def rotate_part(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        rotated, rest = x[..., :self.rotary_dim], x[..., self.rotary_dim:]
        return torch.cat((rotate(rotated, *rotary), rest), dim=-1)


class NeoxMLP(nn.Module):
    def __init__(self, config: NeoxConfig):
        super().__init__()
        self.dense_h_to_4h = nn.Linear(config.hidden_size, config.intermediate_size)
        self.dense_4h_to_h = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(x)))


class NeoxBlock(nn.Module):
    def __init__(self, config: NeoxConfig):
        super().__init__()
        D, eps = config.hidden_size, config.norm_eps
        self.input_layernorm = nn.LayerNorm(D, eps)
        self.post_attention_layernorm = nn.LayerNorm(D, eps)
        self.attention = NeoxAttention(config)
        self.mlp = NeoxMLP(config)
        self.parallel = config.use_parallel_residual

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], mask) -> Tensor:
        y = self.attention(self.input_layernorm(x), rotary, mask)
        if self.parallel:       # summed in the order of transformers, for the same rounding
            return self.mlp(self.post_attention_layernorm(x)) + y + x
        x = x + y
        return x + self.mlp(self.post_attention_layernorm(x))


GPT_NEOX = Family(
    norm=nn.LayerNorm, block=NeoxBlock, decoder='gpt_neox', embedding='embed_in',
    last_norm='final_layer_norm', head='embed_out',
    lora_targets=('query_key_value', 'dense', 'dense_h_to_4h', 'dense_4h_to_h'),
    residual_layers=('dense', 'dense_4h_to_h'))
