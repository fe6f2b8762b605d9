"""optim.py"""

import gc
import weakref

import pytest
import torch
from common import off, reference_model

from runtime import build, checkpoint, optim
from speed import compact
from train import TrainConfig

ONE = torch.tensor(1.0)
KINDS = 'exact', 'stochastic', 'compact'


def AdamW(*arguments, kind='exact', **options):
    """The optimizer of this kind of master weights."""
    if kind == 'compact':
        return compact.CompactAdamW(*arguments, **options)
    return optim.AdamW(*arguments, kind=kind, **options)


def moves(kind, steps=1000, n=4096, gradient=None, lr=5e-6):
    """How far each of n weights moved in `steps` of AdamW; kind says in what precision."""
    start = (torch.randn(n // 32, 32, generator=torch.Generator().manual_seed(3)) * 0.02).bfloat16()
    half = kind in (*KINDS, 'plain bfloat16')
    p = torch.nn.Parameter(start.clone() if half else start.to(
        torch.float64 if kind == 'float64' else torch.float32))
    options = {'lr': lr, 'weight_decay': 0.01}
    ours = kind in (*KINDS, 'float32')
    optimizer = AdamW([p], kind=kind, **options) if ours else torch.optim.AdamW([p], **options)
    noise = torch.Generator().manual_seed(1)
    slope = torch.randn(start.shape, generator=noise) * 0.3
    for _ in range(steps):
        g = slope + torch.randn(start.shape, generator=noise)
        if gradient:
            g = g + gradient(p.detach().double(), start.double()).float()
        p.grad = g.bfloat16().to(p.dtype)
        optimizer.step(*([ONE] if ours else []))
    return (optimizer.master(p) if ours else p).detach().double() - start.double()


@pytest.mark.slow
@pytest.mark.parametrize('gradient', [None, lambda w, start: 3e2 * (w - start)])
def test_bfloat16_weights_follow_the_float32_run(gradient):
    """1000 steps at lr 5e-6, on given gradients and on such as depend on the weights."""
    right = moves('float64', gradient=gradient)
    moved = {kind: moves(kind, gradient=gradient) for kind in ('float32', *KINDS, 'plain bfloat16')}
    error = {kind: off(x, right) for kind, x in moved.items()}
    assert error['float32'] < 2e-3
    assert error['exact'] < (2e-3 if gradient is None else 0.1)
    assert error['stochastic'] < 0.5
    assert error['compact'] < error['stochastic'] / 10
    assert error['plain bfloat16'] > 0.6
    # what stochastic rounding loses is noise, not progress
    for kind, most in (('stochastic', 0.05), ('compact', 0.01)):
        assert (moved[kind] * right).sum() / right.square().sum() == pytest.approx(1, abs=most)


def test_compact_second_moments_stay_on_their_scale():
    """Zeros, v over 60 powers of two, and the largest of a group, whose code must not wrap."""
    torch.manual_seed(0)
    v = torch.exp2(-60 * torch.rand(2 ** 14, 32) - 60 * torch.rand(2 ** 14, 1))
    v[torch.rand_like(v) < 0.1] = 0
    v[:, 0] = largest = v.amax(1)
    expected = torch.maximum(v, largest[:, None] / 2 ** 24)

    def coded(v, noise):
        m, code, ranges = compact._encode(torch.zeros_like(v), v, noise.int())
        return compact._decode(m.to(torch.int8), code.to(torch.uint8), ranges.bfloat16())[1]

    # a step is 24 / 255 of a power of two, rounded up; above a power of two that is 0.0945 of v
    for noise in (0, -1):
        assert (coded(v, torch.full(v.shape, noise)) / expected - 1).abs().max() < 0.0945
    mean = sum(coded(v, torch.randint(-2 ** 31, 2 ** 31, v.shape)) for _ in range(100)) / 100
    assert (mean / expected).mean() == pytest.approx(1, abs=3e-3)
    tiny = coded(v * 2.0 ** -60, torch.zeros(v.shape))      # bits that would be negative are 0
    assert (tiny >= 0).all() and (tiny <= expected * 2.0 ** -59 + 1e-38).all()
    assert (coded(torch.zeros(4, 32), torch.zeros(4, 32)) == 0).all()


def test_the_code_of_v_is_right_on_average_also_across_a_power_of_two():
    values = torch.linspace(0.9, 1.1, 41)
    rows = torch.stack([torch.tensor([1.9, 2.0 ** -20] + [x] * 30) for x in values.tolist()])
    v = rows.repeat_interleave(2000, 0)
    noise = optim._noise(torch.arange(v.numel(), dtype=torch.int32).view(v.shape), torch.tensor(7))
    codes = compact._encode(torch.zeros_like(v), v, noise)
    mean = compact._decode(*codes)[1][:, 2:].reshape(41, -1).mean(1)
    # the cells are 0.05 wide, and each mean is of 60,000 codes
    torch.testing.assert_close(mean, values, rtol=5e-4, atol=0)


def test_compact_takes_5_2_bytes_beside_the_gradient_and_vectors_are_exact():
    params = [torch.nn.Parameter(torch.ones(*shape, dtype=torch.bfloat16))
              for shape in ((64, 96), (96,), (64, 40))]
    optimizer = AdamW(params, lr=1e-3, kind='compact')
    matrix, *others = (sum(x.nbytes for x in optimizer.state[p].values()) / p.numel()
                       for p in params)
    assert matrix + 2 == pytest.approx(5.1875) and others == [10, 10]


def test_exact_master_is_the_float32_run_bit_for_bit():
    ours, theirs = moves('float32', 200), moves('torch float32', 200)
    assert torch.equal(moves('exact', 200), ours) and off(ours, theirs) < 1e-5


def test_rounding_noise_is_random():
    seeds = [hash((0, step, 3, 0)) % 2 ** 31 for step in range(2 ** 12)]
    for noise in (optim._noise(torch.arange(2 ** 20).int(), torch.tensor(seeds[5]).int()),
                  optim._noise(torch.tensor(12345).int(), torch.tensor(seeds).int())):
        x, n = (noise & 0xffff).double() / 0xffff - 0.5, len(noise)
        assert abs(x.mean()) < 5 * (1 / 12 / n) ** 0.5
        assert x.var().item() == pytest.approx(1 / 12, rel=5 * (0.8 / n) ** 0.5)
        for lag in (1, 2, 64, 1024):     # neighbors, and rows of a matrix
            assert abs((x[lag:] * x[:-lag]).mean()) * 12 < 5 / (n - lag) ** 0.5, lag


def test_gradients_of_micro_batches_are_summed_in_float32():
    p = torch.nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))
    parts = torch.randn(32, 1000).bfloat16()
    exact = parts.double().sum(0)
    def error(kind):
        optimizer = AdamW([p], lr=0.0, kind=kind)
        for _ in range(2):      # the second step must begin from nothing
            optimizer.begin(len(parts))
            for part in parts:
                (p * part).sum().backward()
            [total] = [g.double() for g in optimizer.gradients()]
            optimizer.step(ONE)
        assert p.grad is None and not any(s.any() for s in optimizer.sums.values())
        return off(total, exact)
    assert error('stochastic') > 1e-3       # before the hook of the other one is there
    assert error('exact') < 1e-6


def five_steps(dtype, kind, device):
    """The float32 masters of several weights after five steps, in a row."""
    make = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(*shape, generator=make).to(device, dtype))
              for shape in ((64, 100), (7,), (1000, 33), (1000, 96), (2048, 1024))]
    optimizer = AdamW(params, lr=1e-3, weight_decay=0.1, kind=kind)
    for _ in range(5):
        for p in params:
            p.grad = torch.randn(p.shape, generator=make).to(device, dtype)
        optimizer.step(ONE.to(device) / 3)
    return torch.cat([optimizer.master(p).cpu().flatten() for p in params])


def assert_same_steps(one, other, kind):
    # rounding at random may fall on the other side where the last bit of an update differs; the
    # last bit of the largest weights is 5e-7
    differ = (one - other).abs() > (1e-4 if kind == 'compact' else 3e-6)
    assert differ.double().mean() < (1e-9 if kind == 'exact' else 0.01)


@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
@pytest.mark.parametrize('dtype, kind', [
    (torch.float32, 'exact'), *((torch.bfloat16, kind) for kind in KINDS)])
def test_the_optimizer_does_the_same_on_a_gpu(dtype, kind):
    assert_same_steps(*(five_steps(dtype, kind, device) for device in ('cpu', 'cuda')), kind)


@pytest.mark.parametrize('kind', KINDS)
def test_the_update_of_the_library_is_the_plain_one_and_pieces_change_no_bit(kind, monkeypatch):
    for dtype in (torch.float32, torch.bfloat16):
        by_library = five_steps(dtype, kind, 'cpu')
        with monkeypatch.context() as patch:
            patch.setattr(optim, 'stands_for', lambda plain: False)
            patch.setattr(optim, 'adamw', None)
            assert_same_steps(by_library, five_steps(dtype, kind, 'cpu'), kind)
    monkeypatch.setattr(optim, 'PIECE', 2 ** 13)
    assert torch.equal(five_steps(torch.bfloat16, kind, 'cpu'), by_library)


@pytest.mark.parametrize('kind', KINDS)
def test_weights_and_moments_are_freed(kind):
    """Several runs in one process would not fit on a GPU otherwise."""
    p = torch.nn.Parameter(torch.ones(8, 32, dtype=torch.bfloat16))
    optimizer = AdamW([p], 1e-3, kind=kind)
    for micro_batches in (1, 2):
        optimizer.begin(micro_batches)
        for _ in range(micro_batches):
            (p.float() ** 2).sum().backward()
        optimizer.step(torch.tensor(1.0))
    alive = weakref.ref(optimizer), weakref.ref(optimizer.state[p]['exp_avg']), weakref.ref(p)
    del optimizer, p
    gc.collect()
    assert [ref() for ref in alive] == [None] * 3


@pytest.mark.parametrize('name', ['cohere', 'neox', 'qwen3'])
def test_weight_decay_is_on_matrices_only_whatever_the_axes_of_norms_and_biases(name, tmp_path):
    reference_model(name, tmp_path)
    cfg = TrainConfig(dtype='float32', weight_decay=0.1, compile=False)
    model = build.build_model(cfg, checkpoint.read_config(tmp_path), tmp_path, 'cpu')
    model.value_head = torch.nn.Parameter(torch.zeros(5))
    groups = build.build_optimizer(model, cfg).param_groups
    decay = {id(p): group['weight_decay'] for group in groups for p in group['params']}
    wrong = {key for key, p in model.named_parameters() if decay[id(p)] != (
        0 if 'norm' in key or key.endswith('bias') or key == 'value_head' else 0.1)}
    assert len(decay) == len([*model.parameters()]) and not wrong
    assert name != 'cohere' or model.decoder.layers[0].self_attn.q_norm.weight.ndim == 2
