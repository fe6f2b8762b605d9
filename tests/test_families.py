"""Every family against transformers: random configurations, rotary schemes, nested files."""

import json
import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from common import (by_transformers, cases_of, class_of, edit_config, image_model, logits_of, named,
                    off, parameters_of, reference_model, small_model)

from runtime import checkpoint, saving

T = 40
YARN = {'rope_type': 'yarn', 'original_max_position_embeddings': 16}


def plain(rng):
    """The keys of a random configuration that most families have."""
    kv_heads, head_dim = rng.choice([1, 2, 3]), rng.choice([4, 6, 10, 16])
    heads = kv_heads * rng.choice([1, 2, 4])
    return {'vocab_size': rng.randrange(50, 300), 'head_dim': head_dim,
            'hidden_size': heads * rng.choice([4, 8, head_dim]), 'num_attention_heads': heads,
            'num_key_value_heads': kv_heads, 'intermediate_size': rng.randrange(8, 90),
            'num_hidden_layers': rng.randrange(1, 5), 'rms_norm_eps': rng.choice([1e-6, 1e-3]),
            'tie_word_embeddings': rng.random() < 0.5, 'max_position_embeddings': 256,
            'rope_parameters': rope(rng, head_dim)}


class Deck(random.Random):
    """Draws each of several options once before it draws one of them again."""

    def __init__(self, seed):
        super().__init__(seed)
        self.left = {}      # options -> those that come next

    def choice(self, options):
        left = self.left.setdefault(repr(options), [])
        if not left:
            left += self.sample(options, len(options))
        return left.pop()


def rope(rng, head_dim, schemes=('default', 'linear', 'dynamic', 'llama3', 'yarn')):
    """A random block of rotary positions."""
    scheme, theta = rng.choice(schemes), rng.choice([1e3, 1e6])
    block, factor = {'rope_type': scheme, 'rope_theta': theta}, rng.choice([1.5, 8.0])
    if scheme == 'llama3':
        block |= {'low_freq_factor': 1.0, 'high_freq_factor': 4.0,
                  'original_max_position_embeddings': 32}
    if scheme == 'yarn':
        block |= YARN | rng.choice([{}, {'attention_factor': 0.8}, {'beta_fast': 4.0},
                                    {'mscale': 0.7, 'mscale_all_dim': 1.2}, {'truncate': False}])
    if scheme == 'longrope':
        half = head_dim // 2
        block |= {'short_factor': [rng.uniform(1, 2) for _ in range(half)],
                  'long_factor': [rng.uniform(2, 9) for _ in range(half)]}
    return block if scheme in ('default', 'longrope') else block | {'factor': factor}


def without(shape, *keys):
    return {key: value for key, value in shape.items() if key not in keys}


def windows(rng, shape):
    window, n = rng.randrange(3, 60), shape['num_hidden_layers']
    kinds = [rng.choice(['sliding_attention', 'full_attention']) for _ in range(n)]
    return {'sliding_window': window, 'layer_types': rng.choice([None, kinds])}


def blocks(rng, shape):
    """A block of rotary positions for each type of layer."""
    made = {kind: rope(rng, shape['head_dim']) for kind in ('sliding_attention', 'full_attention')}
    for block in made.values():
        block.pop('truncate', None)
    return {'rope_parameters': made}


def bias(rng, *keys):
    return {key: rng.random() < 0.5 for key in keys}


def no_own_heads(shape):
    """Heads that share the hidden size."""
    return without(shape, 'head_dim') | {
        'hidden_size': shape['num_attention_heads'] * shape['head_dim']}


def neox(rng, shape):
    rotated, hd = rng.choice([2, 4]), rng.choice([4, 5, 8, 16])
    return without(no_own_heads(shape | {'head_dim': hd}), 'num_key_value_heads', 'rms_norm_eps',
                   'tie_word_embeddings') | {
        'layer_norm_eps': rng.choice([1e-5, 1e-2]),
        **bias(rng, 'use_parallel_residual', 'attention_bias'), 'rope_parameters': rope(
            rng, hd, ('default', 'llama3')) | {'partial_rotary_factor': rotated / hd}}


def cohere(rng, shape):
    return without(no_own_heads(shape), 'rms_norm_eps') | bias(rng, 'attention_bias') | {
        'layer_norm_eps': rng.choice([1e-5, 1e-2]), 'logit_scale': rng.choice([0.0625, 0.8])}


def phi3(rng, shape):
    hd = rng.choice([8, 16])
    share = rng.choice([1.0, 0.75])
    return no_own_heads(shape | {'head_dim': hd}) | {
        'sliding_window': rng.choice([None, 7]), 'original_max_position_embeddings': 64,
        'rope_parameters': rope(rng, int(share * hd), ('default', 'longrope')) | {
            'partial_rotary_factor': share}}


def opt(rng, shape):
    return without(no_own_heads(shape), 'rms_norm_eps', 'rope_parameters', 'intermediate_size',
                   'num_key_value_heads') | bias(rng, 'enable_bias', 'do_layer_norm_before') | {
        'ffn_dim': shape['intermediate_size'], 'word_embed_proj_dim': rng.choice([None, 12])}


# {class in transformers: the keys of a random configuration, from those of `plain`}
FAMILIES = {
    'Llama': lambda rng, shape: shape | bias(rng, 'attention_bias', 'mlp_bias'),
    'Mistral': lambda rng, shape: shape | {'sliding_window': rng.choice([None, 5, 60])},
    'Ministral': lambda rng, shape: shape | windows(rng, shape),
    'Ministral3': lambda rng, shape: shape | {
        'sliding_window': rng.choice([None, 7]),
        'rope_parameters': rope(rng, 8, ['yarn']) | {'llama_4_scaling_beta': 0.1}},
    'Qwen2': lambda rng, shape: shape | {
        'sliding_window': 7, 'max_window_layers': rng.randrange(4), **bias(rng,
                                                                           'use_sliding_window')},
    'Qwen3': lambda rng, shape: shape | bias(rng, 'attention_bias', 'use_sliding_window') | {
        'sliding_window': 9, 'max_window_layers': 1},
    'Gemma': lambda rng, shape: shape | bias(rng, 'attention_bias'),
    'Gemma2': lambda rng, shape: shape | windows(rng, shape) | {
        'query_pre_attn_scalar': rng.randrange(2, 40),
        'attn_logit_softcapping': rng.choice([None, 2.0]),
        'final_logit_softcapping': rng.choice([None, 5.0])},
    'Gemma3Text': lambda rng, shape: shape | windows(rng, shape) | blocks(rng, shape) | {
        'query_pre_attn_scalar': rng.randrange(2, 40), 'num_hidden_layers': 7, 'layer_types': None,
        'sliding_window_pattern': rng.choice([2, 6]), 'attn_logit_softcapping': 3.0,
        'final_logit_softcapping': rng.choice([None, 5.0])},
    'Olmo2': lambda rng, shape: no_own_heads(shape) | bias(rng, 'attention_bias'),
    'Olmo3': lambda rng, shape: (no_own_heads(shape) | windows(rng, shape) | blocks(rng, shape)
                                 | bias(rng, 'attention_bias')),
    'SmolLM3': lambda rng, shape: no_own_heads(shape) | bias(
        rng, 'attention_bias', 'mlp_bias', 'use_sliding_window') | {
            'sliding_window': 7, 'no_rope_layer_interval': rng.choice([2, 4])},
    'Cohere': lambda rng, shape: cohere(rng, shape) | bias(rng, 'use_qk_norm'),
    'Cohere2': lambda rng, shape: cohere(rng, shape) | windows(rng, shape),
    'Phi3': phi3,
    'Granite': lambda rng, shape: no_own_heads(shape) | bias(rng, 'attention_bias', 'mlp_bias') | {
        # larger scores and residuals, or a smaller divisor of the logits, would lift the rounding
        # of float32 above the tolerance
        'embedding_multiplier': rng.choice([0.22, 1.5, 8.0]),
        'residual_multiplier': rng.choice([0.22, 1.5]),
        'attention_multiplier': rng.choice([0.05, 0.4]), 'logits_scaling': rng.choice([1.5, 8.0])},
    'OPT': opt,
    'GPTNeoX': neox}


def shaken(model):
    """The model with random weights off their start, for the evaluation."""
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p + 0.2 * torch.randn_like(p))
    return model.eval()


def compare(reference, folder, shape):
    """Check that logits and every gradient in `folder` are those of the reference.

    Two texts are one packed row of our model, in which they do not see each other. Hidden states at
    some tokens are those of all: the last MLP skips the other tokens.
    """
    model = checkpoint.load(folder)
    tokens = torch.randint(1, shape['vocab_size'], (2, T))      # without padding, 0
    row = tokens.flatten(), torch.arange(T).repeat(2), torch.tensor([T, 2 * T]).repeat_interleave(T)
    row = [x[None] for x in row]
    hidden, some = model(*row), torch.tensor([2 * T - 1, 0, 50, 50])
    torch.testing.assert_close(model(*row, at=some), hidden[:, some], rtol=1e-4, atol=1e-5)
    logits = model.logits(hidden).view(2, T, -1)
    expected = reference(tokens).logits
    error = (logits - expected).abs().max()
    assert error < 1e-4 + 1e-5 * expected.abs().max(), shape
    for z in (logits, expected):
        F.cross_entropy(z.flatten(0, 1), tokens.roll(-1, 1).flatten()).backward()
    theirs, ours = parameters_of(reference), named(model)
    assert theirs.keys() == ours.keys()
    for key, p in ours.items():
        g, right = (torch.zeros_like(p) if x.grad is None else x.grad for x in (p, theirs[key]))
        assert (g - right).norm() < 1e-3 * right.norm() + 1e-6, (key, shape)
    return model, tokens, expected


@pytest.mark.parametrize('n', [1, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize('kind', FAMILIES)
def test_random_configurations_equal_transformers(kind, n, tmp_path):
    import transformers
    rng = Deck(f'{kind} {n}')
    torch.manual_seed(n)
    for _ in range(n):
        shape = FAMILIES[kind](rng, plain(rng))
        config = getattr(transformers, f'{kind}Config')(
            **shape, pad_token_id=0, attn_implementation='eager')
        reference = shaken(class_of(config)(config))
        reference.save_pretrained(tmp_path / 'theirs')
        model, tokens, expected = compare(reference, tmp_path / 'theirs', shape)
        saving.save(model, tmp_path / 'ours', torch.float32)
        again = by_transformers(tmp_path / 'ours')(tokens).logits
        assert torch.equal(again, expected), shape
        assert checkpoint.read_config(tmp_path / 'ours') == model.config, shape


@pytest.mark.parametrize('kind, text, tied', [
    ('Gemma3', 'Gemma3Text', True), ('Mistral3', 'Mistral', False),
    ('Mistral3', 'Ministral3', True)])
def test_the_text_part_of_a_model_with_images(kind, text, tied, tmp_path):
    torch.manual_seed(0)
    shape = FAMILIES[text](random.Random(1), plain(random.Random(1)))
    if text == 'Mistral':   # alone it would be a Ministral
        shape |= {'sliding_window': 7, 'layer_types': ['full_attention'] * shape[
            'num_hidden_layers']}
    reference = shaken(image_model(kind, text, shape, tie_word_embeddings=tied))
    reference.save_pretrained(tmp_path / 'nested')
    model = checkpoint.load(tmp_path / 'nested')
    assert model.config.tie_word_embeddings == tied
    tokens = torch.randint(1, 50, (2, T))
    expected = reference(tokens).logits
    assert torch.allclose(logits_of(model, tokens), expected, rtol=1e-4, atol=1e-4)
    saving.save(model, tmp_path / 'text', torch.float32)
    again = by_transformers(tmp_path / 'text')(tokens).logits
    assert torch.allclose(again, expected, rtol=1e-5, atol=1e-5)
    assert model.config == checkpoint.read_config(tmp_path / 'text')


def test_the_nested_files_of_gemma_3_are_read(tmp_path):
    """As in google/gemma-3-4b-it's config.json, which leaves out most sizes of the text model."""
    import transformers
    raw = {'model_type': 'gemma3', 'eos_token_id': [1, 106], 'torch_dtype': 'bfloat16',
           'text_config': {'hidden_size': 2560, 'intermediate_size': 10240,
                           'model_type': 'gemma3_text', 'num_hidden_layers': 34,
                           'rope_scaling': {'factor': 8.0, 'rope_type': 'linear'},
                           'sliding_window': 1024}, 'vision_config': {'hidden_size': 1152}}
    (tmp_path / 'config.json').write_text(json.dumps(raw))
    transformers.AutoConfig.from_pretrained(tmp_path).text_config.save_pretrained(tmp_path / 'text')
    ours, theirs = map(checkpoint.read_config, (tmp_path, tmp_path / 'text'))
    assert ours == replace(theirs, eos_token_id=[1, 106], dtype='bfloat16', hf=ours.hf)
    assert ours.vocab_size == 262208 and ours.tie_word_embeddings
    assert (ours.layers[0].window, ours.layers[5].window) == (1024, None)
    assert (ours.layers[5].rope.theta, ours.layers[5].rope.factor) == (1e6, 8.0)


@pytest.mark.parametrize('long', [False, True])
def test_longrope_is_short_or_long_for_a_whole_run(long, tmp_path):
    """Up to the original length transformers agrees with the short factors, above with the long."""
    original = T - 9 if long else T
    reference = reference_model(
        'phi3', tmp_path, max_position_embeddings=256, original_max_position_embeddings=original,
        rope_parameters=rope(random.Random(0), 12, ['longrope']) | {'partial_rotary_factor': 1.0})
    assert checkpoint.read_config(tmp_path).max_position_embeddings == original
    if long:
        edit_config(tmp_path, nanocal={'long_context': True})
        assert checkpoint.read_config(tmp_path).max_position_embeddings == 256
    model, _, _ = compare(reference, tmp_path, {'vocab_size': 211})
    saving.save(model, tmp_path / 'again', torch.float32)
    assert checkpoint.read_config(tmp_path / 'again') == model.config


@pytest.mark.parametrize('name, keys', cases_of('config_files.json')['older'])
def test_keys_of_older_files_reach_the_layers_that_transformers_gives_them(name, keys, tmp_path):
    """Of keys that transformers 5 writes otherwise or ignores; the last are of
    CohereForAI/c4ai-command-r7b-12-2024."""
    reference_model(name, tmp_path, max_position_embeddings=64)
    edit_config(tmp_path, rope_parameters='...', **keys)
    compare(by_transformers(tmp_path), tmp_path, {'vocab_size': 211})


@pytest.mark.parametrize('name', ['llama', 'gemma3', 'olmo2', 'granite', 'cohere'])
def test_norms_in_bfloat16_are_those_of_transformers_bit_for_bit(name, tmp_path):
    """Of the norms without mean; those of Cohere differ in few elements, by one rounding."""
    theirs = reference_model(name, tmp_path).model.norm
    ours = checkpoint.load(tmp_path).decoder.norm
    torch.manual_seed(0)
    x = (3 * torch.randn(4000, 48) + 1).bfloat16()
    a, b = (layer.to(torch.bfloat16)(x) for layer in (ours, theirs))
    assert a.dtype == b.dtype == torch.bfloat16
    different = (a != b).float().mean()
    assert different < 1e-3 if name == 'cohere' else different == 0
    assert (a.float() - b.float()).abs().max() <= 2 ** -7 * b.float().abs().max()


@pytest.mark.parametrize('name, dtype', [
    ('gemma3', torch.bfloat16), *((name, torch.float16) for name in (
        'gemma3', 'olmo3', 'cohere2', 'granite', 'opt_350m', 'neox'))])
def test_half_precision_is_as_near_to_float32_as_in_transformers(name, dtype, tmp_path):
    single = small_model(name, tmp_path / 'single', initializer_range=0.02)
    saving.save(single, tmp_path / 'half', dtype)
    half = checkpoint.load(tmp_path / 'half')
    assert half.head.dtype == dtype
    exact = checkpoint.load(tmp_path / 'half', dtype=torch.float32)
    reference = by_transformers(tmp_path / 'half', attn_implementation='sdpa', dtype=dtype)
    tokens = torch.randint(1, 211, (2, T))
    with torch.no_grad():
        right = logits_of(exact, tokens)
        assert off(logits_of(half, tokens), right) < 1.1 * off(reference(tokens).logits, right)
