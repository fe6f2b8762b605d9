"""One forward pass for training, evaluation and sampling: an edit of model.py moves all alike."""

import copy
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from common import (HERE, documents, head_of_32, plain_log_probs, recorded, small_model,
                    uninstall)
from safetensors.torch import load_model, save_model

import attention
import model as models
import scoring
import generate
import train
from data import packing, tree_rows
from decoding.sampling import Sampling
from speed import install, kernels


def edited_rule(i, j, i_position, j_position, j_end, window):
    """No token sees the second one of its text, and each sees the first one beyond its window."""
    visible = (j <= i) & (i < j_end) & ((j_position != 1) | (i_position == 1))
    return visible if window is None else visible & (
        (i_position - j_position < window) | (j_position == 0))


def rolled(original):
    def edited(*arguments):     # a norm after it would undo a multiplication by a number
        y = original(*arguments)
        return y - 2 * y.roll(1, -1)
    return edited


# what a reader edits: a method of a class, or a function, and how
EDITS = {
    'block': (models.Block, 'forward', rolled), 'attention': (models.Attention, 'forward', rolled),
    'mlp': (models.MLP, 'forward', rolled), 'norm': (models.Norm, 'forward', rolled),
    'mask': (attention.ExplicitMask, 'attend', rolled),
    'rotary_angles': (models, 'rotary_angles', lambda angles: (
        lambda positions, *more: angles(3 * positions, *more))),
    'sees': (attention, 'sees', lambda rule: edited_rule)}


def random_tree(seed):
    rng = np.random.default_rng(seed)
    prefix, prompt, *continuations = (rng.integers(3, 211, n).tolist() for n in (3, 4, 2, 3, 1))
    return tree_rows.Tree(tuple(prefix), prompt, continuations, [START] * 3)


START = 7       # of the options of a tree
TREES = [random_tree(seed) for seed in range(2)]
TEXTS = documents(0, [30, 17])
PROMPT = [5, 60, 7, 11, 90, 4, 8, 150, 33, 12]      # longer than the window of Gemma 2 and others


@pytest.fixture
def calls_of_kernels(device, monkeypatch):
    """The kernels wherever no gradient is needed, and a list that grows with their calls."""
    calls = []
    if device == 'cpu':
        if torch.cuda.is_available():
            pytest.skip("Triton's interpreter runs where there is no GPU")
        for name in ('kernels_apply', 'available'):
            monkeypatch.setattr(kernels, name, lambda x: not torch.is_grad_enabled())
    install.install()
    for owner, name in ((kernels.NORM, 'kernel'), (kernels.ROTATE, 'kernel'),
                        (kernels.GATE, 'kernel'), (kernels, 'tree_kernel'),
                        (kernels, 'decode_kernel')):
        name_of = getattr(owner, name).__name__
        recorded(monkeypatch, owner, name, lambda *_, name=name_of: calls.append(name))
    yield calls
    uninstall()


def measured(model, device):
    """Return {use: numbers} as the program computes them, and the tokens that were drawn."""
    model.decoder.attention = 'auto'
    packed = packing.pack(TEXTS, 128)
    nll = train.forward_backward(model, packed, train.TrainConfig(), device)['nll']
    scores = scoring.option_log_probs(model, TREES[:1], pack_len=16)
    settings = Sampling(temperature=0.0, max_tokens=2)
    ((_, (drawn,)),) = generate.generate(model, [PROMPT], settings)
    return {'training': [nll.item()], 'evaluation': np.concatenate(scores),
            'sampling': np.array(drawn.log_probs)}, drawn.tokens


def plain(model, drawn):
    """Return the numbers of `measured` from the logits of one text at a time, by plain torch."""
    model.decoder.attention = 'explicit'

    def log_probs(ids, start):
        return plain_log_probs(model, ids[:start], ids[start:])[0].detach().cpu().numpy()
    trained = [log_probs(ids, 1)[loss_mask[1:] == 1] for ids, loss_mask in TEXTS]
    return {'training': -np.mean(np.concatenate(trained)),
            'evaluation': [log_probs(ids, START).sum() for ids in TREES[0].sequences],
            'sampling': log_probs(PROMPT + drawn, len(PROMPT))}


@pytest.mark.parametrize('what, name', [('block', 'llama'), *(
    pytest.param(what, name, marks=pytest.mark.slow) for what, name in (
        ('sees', 'llama'), ('attention', 'llama'), ('mlp', 'cohere'), ('mask', 'gemma3'),
        ('rotary_angles', 'phi3'), ('norm', 'opt')))])
def test_an_edit_moves_training_evaluation_and_sampling_alike(what, name, device, monkeypatch,
                                                              calls_of_kernels, tmp_path, capsys):
    # Cohere's usual scale of the logits is so small that their rounding would hide an edit
    own = {'logit_scale': 1.0, 'intermediate_size': 64} if name == 'cohere' else {}
    model = small_model(name, tmp_path, device, torch.float32 if device == 'cpu' else
                        torch.bfloat16, num_hidden_layers=2, **head_of_32(name), **own)
    if device == 'cpu':     # where the interpreter takes half a second for the products of a token
        monkeypatch.setattr(kernels, 'gemv_kernel', F.linear)
    with monkeypatch.context() as patch:
        owner, attribute, edit = EDITS[what]
        patch.setattr(owner, attribute, edit(getattr(owner, attribute)))
        ours, drawn = measured(model, device)
        assert ('norm_kernel' if name == 'opt' else 'rotate_kernel') in calls_of_kernels
        for kernel in ('tree_kernel', 'decode_kernel'):
            assert (kernel not in calls_of_kernels) == (what in ('sees', 'mask'))
        assert ('was edited' in capsys.readouterr().out) == (what in ('sees', 'mask'))
        calls_of_kernels.clear()
        edited = plain(model, drawn)
    unedited = plain(model, drawn)
    assert not calls_of_kernels     # which have no gradients
    for use, values in ours.items():
        error, change = (np.abs(np.subtract(values, x[use])).max() for x in (edited, unedited))
        tolerance = 1e-4 if device == 'cpu' else 0.6 * change     # a missed edit: 1
        assert error < tolerance and change > 0.01, (use, error, change)


def random(*shape, device, dtype=torch.float32):
    generator = torch.Generator().manual_seed(len(shape) + shape[-1])
    return torch.randn(*shape, generator=generator).to(device, dtype)


def rotated(x, B=2, T=9):
    positions = torch.arange(B * T).view(B, T).to(x.device)
    cos, sin, _ = models.rotary_angles(positions[:B], models.Rope(1e4, x.shape[-1]))
    return models.rotate(x, cos, sin)


def normed(family, x, *size, dtype=None):
    """A norm with random weights, of x's type by default; x as `random` makes it."""
    layer = models.Norm(models.ModelConfig(family, 9, 8, 8, 1, 1, norm_eps=1e-3), *size)
    for parameter in layer.parameters():
        parameter.copy_(random(*size, device='cpu'))
    return layer.to(x.device, dtype or x.dtype)(x)


WITH_KERNELS = {    # function of (device, dtype) that computes something that has a kernel
    'norm of Llama': lambda **on: normed('llama', random(2, 9, 48, **on), 48),
    'norm of Gemma': lambda **on: normed('gemma', random(7, 130, **on), 130),
    'norm of OLMo': lambda **on: normed('olmo2', random(2, 9, 48, **on), 48),
    'norm of GPT-NeoX': lambda **on: normed('gpt_neox', 3 + random(2, 9, 130, **on), 130),
    'norm of a float32 residual stream': lambda device, dtype: normed(
        'llama', random(2, 9, 130, device=device), 130, dtype=dtype),
    'norm of heads with weights of their own': lambda **on: normed(
        'cohere', 3 + random(2, 9, 3, 20, **on), 3, 20),
    'rotate': lambda **on: rotated(random(2, 3, 9, 20, **on).transpose(1, 2)),
    'rotate by shared angles': lambda **on: rotated(random(3, 9, 2, 8, **on), B=1),
    'gated by GELU': lambda **on: models.gate(
        3 * random(5, 4097, **on), random(5, 4097, **on), models.gelu_tanh),
    'gated by SiLU': lambda **on: models.gate(*random(9, 64, **on).chunk(2, -1), F.silu),
    'gated by ReLU': lambda **on: models.gate(*random(9, 64, **on).chunk(2, -1), F.relu),
    **{f'large numbers, {name}': lambda use=use, **on: use(1e4 * random(2, 9, 4, 40, **on))
       for name, use in {'norm': lambda x: normed('gemma', x, 40), 'rotate': rotated,
                         'SiLU': lambda x: models.gate(x, x, F.silu),
                         'GELU': lambda x: models.gate(x, x, models.gelu_tanh)}.items()},
}


@pytest.mark.slow
@pytest.mark.parametrize('dtype, tolerance', [(torch.float32, 2e-6), (torch.bfloat16, 0.01)])
@pytest.mark.parametrize('what', WITH_KERNELS)
def test_each_kernel_computes_what_its_plain_version_does(what, dtype, tolerance, device,
                                                          monkeypatch, calls_of_kernels):
    if device == 'cuda' and dtype == torch.float32:
        monkeypatch.setattr(kernels, 'kernels_apply', lambda x: not torch.is_grad_enabled())
    with torch.no_grad():
        by_kernel = WITH_KERNELS[what](device=device, dtype=dtype)
        assert len(calls_of_kernels) == 1
        monkeypatch.setattr(kernels, 'KERNELS', False)
        plainly = WITH_KERNELS[what](device=device, dtype=dtype)
    assert len(calls_of_kernels) == 1 and by_kernel.dtype == plainly.dtype == dtype
    assert by_kernel.shape == plainly.shape
    assert (by_kernel - plainly).abs().max() < tolerance * plainly.abs().max()


CHANGES = {     # function of (MLP, monkeypatch) that changes what its layers compute
    'hook': lambda mlp, _: mlp.up_proj.register_forward_hook(lambda *more: 2 * more[-1]),
    'forward of the class': lambda mlp, patch: patch.setattr(
        torch.nn.Linear, 'forward', lambda layer, x: 2 * F.linear(x, layer.weight).flip(-1)),
    'transposed weights': lambda mlp, _: [
        setattr(layer, 'weight', torch.nn.Parameter(2 * layer.weight.detach().T.contiguous().T))
        for layer in mlp.children()],
}


@pytest.mark.slow
@pytest.mark.parametrize('change', CHANGES)
def test_changed_layers_compute_the_same_with_kernels(change, device, monkeypatch,
                                                      calls_of_kernels, tmp_path):
    dtype = torch.float32 if device == 'cpu' else torch.bfloat16
    mlp = small_model('llama', tmp_path, device, dtype).decoder.layers[0].mlp
    inputs = [random(*shape, 48, device=device, dtype=dtype) for shape in ((2, 9), (1, 1))]
    before = [mlp(x) for x in inputs]
    CHANGES[change](mlp, monkeypatch)
    for x, unchanged in zip(inputs, before):
        expected = mlp(x)       # with gradients, so without kernels
        with torch.no_grad():
            by_kernels = mlp(x)
        tolerance = 1e-5 if device == 'cpu' else 0.02
        assert (by_kernels - expected).norm() < tolerance * expected.norm()
        assert (expected - unchanged).norm() > 0.1


def test_adjoined_weights_are_saved_as_others(device, tmp_path):
    model, other = (small_model('qwen2', tmp_path, device, torch.float32) for _ in range(2))
    weight = model.decoder.layers[0].self_attn.k_proj.weight
    state = model.state_dict()
    state['model.layers.0.self_attn.k_proj.weight'].add_(1)     # it is the weight, no copy
    assert torch.equal(weight, other.decoder.layers[0].self_attn.k_proj.weight + 1)
    save_model(model, tmp_path / 'saved.safetensors')
    assert not load_model(other, tmp_path / 'saved.safetensors', device=device)[1]
    torch.save(copy.deepcopy(model).state_dict(), tmp_path / 'saved.pt')
    for saved in (other.state_dict(), torch.load(tmp_path / 'saved.pt')):
        assert saved.keys() == state.keys()
        assert all(torch.equal(saved[key], value) for key, value in state.items())
    # tensors that are adjacent by chance are not joined
    memory = bytearray(40 * 4)
    apart = [torch.frombuffer(memory, dtype=torch.float32, count=20, offset=at) for at in (0, 80)]
    assert apart[0].data_ptr() + apart[0].nbytes == apart[1].data_ptr()
    assert kernels.side_by_side(apart) is None


@pytest.mark.slow
def test_kernels_score_a_question_bitwise_the_same_in_any_batch_and_one_constant_turns_them_off(
        device, tmp_path, monkeypatch, calls_of_kernels):
    shape = {'num_hidden_layers': 1, 'num_attention_heads': 2, 'num_key_value_heads': 1}
    if device == 'cpu':
        monkeypatch.setattr(kernels, 'gemv_kernel', F.linear)
    for kind, expected in (('auto', {'tree_kernel', 'decode_kernel'}), ('explicit', set())):
        monkeypatch.setattr(models, 'IMPLEMENTATION', kind)
        calls_of_kernels.clear()
        model = small_model('gemma2', tmp_path, device, torch.bfloat16, **shape,
                            **head_of_32('gemma2'))
        # of 128 tokens if deterministic, for which the interpreter takes seconds
        alone, = scoring.option_log_probs(model, TREES[:1], pack_len=16,
                                          deterministic=kind == 'auto')
        [*generate.generate(model, [PROMPT], Sampling(max_tokens=2))]
        assert {*calls_of_kernels} & {'tree_kernel', 'decode_kernel'} == expected
        assert 'norm_kernel' in calls_of_kernels
        if kind == 'auto':
            together = scoring.option_log_probs(model, TREES[::-1], pack_len=16, batch_rows=3,
                                                deterministic=True)
            assert np.array_equal(alone, together[1])


@pytest.mark.slow
def test_without_triton_the_model_is_plain_torch():
    code = """import sys
sys.modules['triton'] = None
import torch, fused_ce, model
from speed import kernels, masks
from speed.install import install
install()
layers = [model.Layer(2, model.Rope(1e4, 4)), model.Layer(None)]
config = model.ModelConfig('gemma2', 9, 8, 8, 2, 2, layers=layers, attn_logit_softcapping=5.0)
at = torch.arange(6)[None]
with torch.no_grad():
    hidden = model.CausalLM(config)(at, at, at + 1)
    loss, nll = fused_ce.smoothed_cross_entropy(hidden[0], torch.ones(9, 8), at[0])
assert kernels.triton is fused_ce.triton is None and hidden.isfinite().all()
assert abs(loss - torch.tensor(9.0).log()) < 1e-5 and loss == nll
assert masks.fastest(hidden, 64) == 'explicit'
"""
    subprocess.run([sys.executable, '-c', code], cwd=HERE, check=True)
