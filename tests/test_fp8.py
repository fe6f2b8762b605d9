"""fp8.py: on a CPU, where torch multiplies in eight bits as well, but more slowly"""

import copy

import pytest
import torch
from common import lora_model, off, reference_model, small_model, whole_rows

import train
from runtime import checkpoint
from speed import fp8


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(fp8, 'supported', lambda device: True)
    monkeypatch.setattr(fp8, 'NARROWEST', 0)


@pytest.mark.parametrize('size', [1.0, 1e-8, 1e8])
@pytest.mark.parametrize('sizes', [(96,), (64, 32, 16)])
def test_products_have_the_error_of_their_types_and_no_more(sizes, size):
    """Against float64: 3.7 % forward, 5.8 % for both gradients, for numbers of any size."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(256, n, bias=n == 64 and size == 1).bfloat16() for n in sizes]
    exact = copy.deepcopy(layers)
    x = (torch.randn(2, 64, 256) * size).bfloat16()
    x[0, 0, 0] *= 30        # an outlier
    ends = []
    for dtype, linears in ((torch.float64, exact), (torch.bfloat16, layers)):
        z, ours = x.to(dtype).requires_grad_(), linears is layers
        y = fp8.products(z, *layers) if ours else [layer.double()(z) for layer in exact]
        torch.manual_seed(1)
        torch.autograd.backward(y, [torch.randn(part.shape).to(dtype) / size for part in y])
        ends.append([torch.cat(y, -1), z.grad, torch.cat([layer.weight.grad for layer in linears])])
    for right, got, error in zip(*ends, (0.037, 0.058, 0.058)):
        assert got.dtype == torch.bfloat16
        assert 0.8 * error < (got.double() - right).norm() / right.norm() < 1.15 * error


def test_zeros_stay_zeros_and_nan_stays_nan():
    layer = torch.nn.Linear(32, 16).bfloat16()
    x = torch.zeros(16, 32, dtype=torch.bfloat16)
    assert torch.equal(fp8.products(x, layer)[0], layer(x))
    x[3, 5] = float('nan')
    assert fp8.products(x, layer)[0].isnan().all()


@pytest.mark.parametrize('name, lora', [
    ('gemma3', False), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ('phi3', True), ('neox', False)))])
def test_a_model_trains_in_eight_bits_compiled_or_not_and_evaluates_as_before(lora, name, tmp_path):
    reference_model(name, tmp_path, hidden_size=64, intermediate_size=96)
    tokens, direction = torch.randint(3, 200, (2, 16)), torch.randn(2, 16, 64)

    def outcome(eight_bits, dtype=torch.bfloat16, compiled=False):
        model = (lora_model if lora else checkpoint.load)(tmp_path, dtype=dtype)
        model.decoder.attention = 'explicit'
        if eight_bits:
            fp8.use_fp8(model, 'cuda')
        with torch.no_grad():
            before = model(tokens, *whole_rows(tokens))
        if compiled:
            for layer in model.decoder.layers:
                layer.compile(backend='aot_eager', dynamic=False)
        hidden = model(tokens, *whole_rows(tokens))
        (hidden.float() * direction).sum().backward()
        return before, hidden, torch.cat([p.grad.float().flatten() for p in model.parameters()
                                          if p.grad is not None])
    right, half, eight = outcome(False, torch.float32), outcome(False), outcome(True)
    assert torch.equal(half[0], eight[0])
    # bfloat16 has 8 bits, e4m3 has 4 and e5m2 3
    for exact, plain, rounded, most in zip(right[1:], half[1:], eight[1:], (16, 32)):
        assert 1.5 * off(plain, exact) < off(rounded, exact) < most * off(plain, exact)
    assert all(map(torch.equal, eight, outcome(True, compiled=True)))


def test_what_cannot_be_in_eight_bits_is_said(tmp_path, capsys, monkeypatch):
    model = small_model('llama', tmp_path, dtype=torch.bfloat16, intermediate_size=90)
    fp8.use_fp8(model, 'cuda')
    assert '9 of 21 linear layers stay in bfloat16' in capsys.readouterr().out
    monkeypatch.setattr(fp8, 'NARROWEST', model.config.hidden_size + 1)
    fp8.use_fp8(model, 'cuda')
    assert 'is no faster in eight bits' in capsys.readouterr().out
    fp8.use_fp8(model.float(), 'cuda')
    assert 'fp8 = True has no effect, products are in float32' in capsys.readouterr().out
    monkeypatch.undo()
    assert not fp8.supported('cpu')


def test_a_run_trains_in_eight_bits(settings_file, tmp_path):
    weights = []
    for name, more in (('fp8', ['--fp8']), ('bfloat16', [])):
        train.main([settings_file, f'--out_dir={tmp_path / name}', '--eval=None', '--device=cpu',
                    '--dtype=bfloat16', '--pictures=False', '--max_steps=1', '--pack_len=512',
                    *more])
        weights.append((tmp_path / name / 'model.safetensors').read_bytes())
    assert weights[0] != weights[1]
