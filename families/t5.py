"""T5, FLAN-T5 and mT5: an encoder reads the prompt, and a decoder scores the answers.

Raffel et al. 2020, arXiv:1910.10683, as transformers computes it, with its names of parameters:
attention scores are not scaled, but get a learned bias per head and distance, the same in all
blocks of a stack.
"""

import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention import visible_keys
from model import Family, Norm, gelu_tanh

ARCHITECTURES = {'t5': 'T5ForConditionalGeneration', 'mt5': 'MT5ForConditionalGeneration'}
# the allowed values of the keys of a config.json, as in runtime/json_rules.py
SIZE, TOKEN = (1, 2**20), (0, 2**31)
REQUIRED = {key: [SIZE] for key in ('vocab_size', 'd_model', 'd_kv', 'd_ff', 'num_layers',
                                    'num_heads')} | {'decoder_start_token_id': [TOKEN]}
RULES = REQUIRED | {
    'num_decoder_layers': [SIZE, None], 'relative_attention_num_buckets': [(4, 2**20)],
    'relative_attention_max_distance': [(3, 2**20)], 'layer_norm_epsilon': [(1e-12, 1.0)],
    'feed_forward_proj': ['relu', 'gated-gelu'], 'eos_token_id': [TOKEN],
    'quantization_config': [None], 'is_encoder_decoder': [True],
    **dict.fromkeys(('scale_decoder_outputs', 'tie_word_embeddings'), [bool]),
    **dict.fromkeys(('dtype', 'torch_dtype'), ['float32', 'bfloat16', 'float16', None])}


def config_from_hf(hf):
    """Return the keys of a config.json that fits RULES, and those that evaluate.py asks for."""
    kind = hf['model_type']
    # transformers 4 scales the output if the head is tied; 5 has a key for that; mT5 never does
    scale = kind == 't5' and hf.get('scale_decoder_outputs', hf.get('tie_word_embeddings', True))
    defaults = {'num_decoder_layers': hf['num_layers'], 'relative_attention_num_buckets': 32,
                'relative_attention_max_distance': 128, 'layer_norm_epsilon': 1e-6,
                'feed_forward_proj': 'relu' if kind == 't5' else 'gated-gelu', 'eos_token_id': 1,
                'dtype': hf.get('torch_dtype') or 'float32'}
    values = defaults | {key: hf[key] for key in RULES if hf.get(key) is not None}
    own = {'architectures': [ARCHITECTURES[kind]], 'scale_decoder_outputs': scale}
    rest = {key: hf[key] for key in hf if key not in ('dtype', 'torch_dtype')}
    return SimpleNamespace(**values | own | {
        'model_type': kind, 'hf': rest | own | {'tie_word_embeddings': scale},
        'tie_word_embeddings': True,    # unless the file has another head: see check_weights
        'max_position_embeddings': 2**31, 'family': Family(),
        'norm_eps': values['layer_norm_epsilon']})


def buckets(distance: Tensor, both: bool, n: int, furthest: int) -> Tensor:
    """Return the bucket, 0 .. n - 1, of each distance: position of the key - that of the query.

    both: each direction has n/2 buckets, else later keys are in that of distance 0. Half of the
    buckets hold one distance each; the others grow, up to the distance `furthest`.
    """
    n, first = (n // 2, (distance > 0) * (n // 2)) if both else (n, 0)
    m, small = distance.abs() if both else (-distance).clamp_min(0), n // 2
    share = torch.log(m.clamp_min(1).float() / small) / math.log(furthest / small)
    large = small + (share * (n - small)).long()
    return first + torch.where(m < small, m, large.clamp_max(n - 1))


class Attention(nn.Module):
    """x [B, T, D] attends to source [B, S, D]; scores get the bias [B, H or 1, T or 1, S]."""

    def __init__(self, config, n_buckets=0):    # 0: without a table of biases
        super().__init__()
        D = config.d_model
        inner = config.num_heads * config.d_kv
        self.n_heads = config.num_heads
        self.q, self.k, self.v = (nn.Linear(D, inner, bias=False) for _ in range(3))
        self.o = nn.Linear(inner, D, bias=False)
        if n_buckets:
            self.relative_attention_bias = nn.Embedding(n_buckets, self.n_heads)

    def forward(self, x: Tensor, source: Tensor, bias: Tensor) -> Tensor:
        q, k, v = (layer(y).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
                   for layer, y in ((self.q, x), (self.k, source), (self.v, source)))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
        return self.o(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gated = config.feed_forward_proj == 'gated-gelu'
        for name in ('wi_0', 'wi_1') if self.gated else ('wi',):
            self.add_module(name, nn.Linear(config.d_model, config.d_ff, bias=False))
        self.wo = nn.Linear(config.d_ff, config.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.wo(gelu_tanh(self.wi_0(x)) * self.wi_1(x) if self.gated else F.relu(self.wi(x)))


class Stack(nn.Module):
    """The encoder, or the decoder, whose blocks also attend to the states of the encoder."""

    def __init__(self, config, n_blocks, decoder):
        super().__init__()
        self.config = config
        self.decoder = decoder
        self.block = nn.ModuleList()
        for i in range(n_blocks):
            n_buckets = 0 if i else config.relative_attention_num_buckets
            parts = {'SelfAttention': Attention(config, n_buckets),
                     **({'EncDecAttention': Attention(config)} if decoder else {}),
                     'DenseReluDense': MLP(config)}
            self.block.append(nn.ModuleDict({'layer': nn.ModuleList(
                nn.ModuleDict({name: part, 'layer_norm': Norm(config, config.d_model)})
                for name, part in parts.items())}))
        self.final_layer_norm = Norm(config, config.d_model)

    def forward(self, x, distance, unseen, states=None, states_bias=None):
        """Return [B, T, D]; distance [B or 1, T, T]; unseen: bool [B, 1, T or 1, T]."""
        table = self.block[0]['layer'][0]['SelfAttention'].relative_attention_bias
        bias = table(buckets(distance, not self.decoder, table.num_embeddings,
                             self.config.relative_attention_max_distance)).permute(0, 3, 1, 2)
        bias = bias.contiguous().masked_fill(unseen, -torch.inf)    # as fast kernels want it
        for layer in (layer for block in self.block for layer in block['layer']):
            y = layer['layer_norm'](x)
            if 'SelfAttention' in layer:
                x = x + layer['SelfAttention'](y, y, bias)
            elif 'EncDecAttention' in layer:
                x = x + layer['EncDecAttention'](y, states, states_bias)
            else:
                x = x + layer['DenseReluDense'](y)
        return self.final_layer_norm(x)


class Seq2Seq(nn.Module):
    """`model(source [B, S], lengths [B, 1], tokens, positions, ends)`: the decoder's hidden states.

    They are [B, T, D], for answers that share a row as in model.py, int [B, T] each; logits are
    hidden @ head.T. The sources end with EOS, then padding.
    """
    softcap = None

    def __init__(self, config):
        super().__init__()
        self.config, self.shared = config, nn.Embedding(config.vocab_size, config.d_model)
        self.encoder = Stack(config, config.num_layers, decoder=False)
        self.decoder = Stack(config, config.num_decoder_layers, decoder=True)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)

    @property
    def head(self) -> Tensor:
        return (self.shared if self.config.tie_word_embeddings else self.lm_head).weight

    def forward(self, source, lengths, tokens, positions, ends, at=None) -> Tensor:
        index = torch.arange(source.shape[1], device=source.device)
        padding = (index >= lengths)[:, None, None]
        states = self.encoder(self.shared(source), (index - index[:, None])[None], padding)
        bias = states.new_zeros(padding.shape).masked_fill(padding, -torch.inf)
        x = self.decoder(self.shared(tokens), positions[:, None] - positions[:, :, None],
                         ~visible_keys(positions, ends, None), states, bias)
        x = x if at is None else x.flatten(0, 1)[None, at]
        return x * self.config.d_model ** -0.5 if self.config.scale_decoder_outputs else x
