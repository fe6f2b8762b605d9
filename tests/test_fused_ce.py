"""fused_ce.py: every loss against float64 autograd through all the logits."""

import itertools
import math
import os
import re

import pytest
import torch
import torch.nn.functional as F
from common import cases_of, kernel_variants, off, recorded

import fused_ce
from fused_ce import (confidence_penalty, cross_entropy, entropy_weighted, focal,
                      fused_loss, gce, joint, max_sup, smoothed_cross_entropy, smoothing,
                      spherical, token_statistics, z_loss)
from runtime.loss import parse_loss


@pytest.fixture(params=['torch', 'interpreter', 'cuda'])
def ce_device(request, monkeypatch):
    """The device to put tensors on, once for each implementation."""
    if request.param == 'cuda':
        if not torch.cuda.is_available():
            pytest.skip('needs a CUDA device')
        torch.backends.cuda.matmul.allow_tf32 = False
    if request.param == 'interpreter':
        if fused_ce.triton is None:
            pytest.skip('triton is not installed')
        if os.environ.get('TRITON_INTERPRET') != '1':
            pytest.skip('the kernel is compiled for the GPU and tested there')
        monkeypatch.setattr(fused_ce, '_use_triton', lambda x: True)
    monkeypatch.setattr(fused_ce, 'BLOCK', 64)      # so that small rows take several blocks
    monkeypatch.setattr(fused_ce, 'ROWS', 4)        # memory=1 makes chunks of four tokens
    return 'cuda' if request.param == 'cuda' else 'cpu'


def ce_inputs(N, D, V, device='cpu', dtype=torch.float32, ignored=0.2, std=1.0, seed=0):
    """hidden, weight (logits of standard deviation `std`) and targets, some of them ignored."""
    make = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, D, generator=make) * std
    weight = torch.randn(V, D, generator=make) / D ** 0.5
    target = torch.randint(0, V, (N,), generator=make)
    target[torch.rand(N, generator=make) < ignored] = -100
    target[:1] = V - 1      # one counts, always
    hidden, weight = hidden.to(device, dtype), weight.to(device, dtype)
    return hidden.requires_grad_(), weight.requires_grad_(), target.to(device)


def capped(z, softcap):
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def nll_of(z, y):
    return F.cross_entropy(z, y, reduction='none')


def smoothed(rate):
    """Return the definition of cross-entropy with label smoothing."""
    return lambda z, y: F.cross_entropy(z, y, label_smoothing=rate, reduction='none')


def by_autograd(definition, hidden, weight, target, softcap=None, upstream=None, total=None,
                dtype=torch.float64):
    """Return the loss, dh and dW by autograd through all logits at once, the products in `dtype`.

    definition: function of logits [n, V] and labels [n] that gives the loss of each token, or
    their sum; upstream: the factor of each token, or all; total: what the sum is divided by,
    or the number of tokens that count
    """
    h, w = (x.detach().to(dtype).requires_grad_() for x in (hidden, weight))
    z = h @ w.T
    z = capped(z if dtype == torch.float64 else z.float(), softcap)
    keep = target != -100
    each = definition(z[keep], target[keep])
    loss = (each if upstream is None else each * upstream[keep]).sum() / (total or keep.sum())
    loss.backward()
    return loss.detach(), h.grad, w.grad


def ours(hidden, weight, target, loss=None, smoothing=0.0, **options):
    """Return the summed loss, dh and dW; cross-entropy if no loss is given."""
    hidden.grad = weight.grad = None
    value, _ = (smoothed_cross_entropy(hidden, weight, target, smoothing=smoothing, **options)
                if loss is None else fused_loss(hidden, weight, target, loss, **options))
    value.sum().backward()
    return value.detach().sum(), hidden.grad, weight.grad


def assert_close(values, reference, limit=1e-5):
    for name, a, b in zip(('loss', 'dh', 'dW'), values, reference, strict=True):
        assert off(a, b) < limit, f'{name} is off by {off(a, b):.1e}'


@pytest.mark.parametrize('n, memory, rows', [
    (1000, 2 ** 40, [1000]), (1100, 512 * 4 * 512, [384, 384, 332]),    # three alike, not 512 twice
    (1000, 400 * 4 * 512, [384, 384, 232]),     # whole tiles of 128
    (300, 0, [128, 128, 44])])                  # never fewer than 128
def test_ce_memory_bounds_the_chunk(n, memory, rows, monkeypatch):
    """Memory is a bound on the logits that are alive at once: the largest product of a call."""
    sizes = recorded(monkeypatch, torch, 'mm', lambda *_, out: out.shape)
    monkeypatch.setattr(fused_ce, 'LEAST_MEMORY', 2 ** 18)
    hidden, weight, target = ce_inputs(n, 8, 512, ignored=0)
    with torch.no_grad():
        smoothed_cross_entropy(hidden, weight, target, memory=memory)
    assert [shape[0] for shape in sizes if shape[1] == 512] == rows


@pytest.mark.parametrize('ignore_index', [-100, 0, 39])
def test_ce_ignored_tokens_are_dropped(ce_device, ignore_index):
    hidden, weight, target = ce_inputs(9, 16, 40, ce_device, ignored=0.0)
    target = target.clamp(1, 38)
    drop = torch.arange(9, device=ce_device) % 3 == 1
    expected = by_autograd(smoothed(0.1), hidden[~drop], weight, target[~drop])
    with torch.no_grad():
        hidden[drop] = float('nan')     # what is ignored cannot spread
    kw = dict(smoothing=0.1, ignore_index=ignore_index)
    loss, dh, dw = ours(hidden, weight, target.masked_fill(drop, ignore_index), **kw)
    assert_close((loss, dh[~drop], dw), expected)
    assert dh[drop].eq(0).all()
    # where no token counts, and where there is none
    nothing = ours(hidden, weight, torch.full_like(target, ignore_index), **kw)
    assert all(x.eq(0).all() for x in nothing)
    assert smoothed_cross_entropy(hidden[:0], weight, target[:0], num_items=0)[0] == 0


def test_a_saturated_softcap_keeps_the_digits_of_its_gradient(ce_device):
    """Of logits of 3 to 6 times the cap, 1 - tanh^2 would have lost up to 1e-3."""
    weight = torch.linspace(-6, 6, 301, device=ce_device)[:, None].requires_grad_()
    hidden = torch.ones(2, 1, device=ce_device, requires_grad=True)
    target = torch.tensor([0, 300], device=ce_device)
    *_, dw = ours(hidden, weight, target, smoothing=0.1, softcap=1.0)
    *_, exact = by_autograd(smoothed(0.1), hidden, weight, target, 1.0)
    assert ((dw - exact) / exact).abs().max() < 2e-5


def test_ce_says_what_is_wrong():
    hidden, weight, target = ce_inputs(3, 8, 20, ignored=0)
    for options, message in (
            *(({'target': target + x}, 'is neither in [0, 20)') for x in (-20, 20, 2 ** 40)),
            ({'smoothing': 1.1}, 'smoothing must be in [0, 1]'),
            *(({'softcap': x}, 'softcap must be a positive number') for x in (0, math.inf)),
            ({'target': target[:2]}, 'leading shape of hidden, [3], got [2]'),
            ({'target': target.float()}, 'integer token ids'),
            ({'token_weight': torch.ones(2)}, 'token_weight must have the shape of target'),
            ({'hidden': hidden.bfloat16()}, 'is torch.bfloat16 but weight is torch.float32'),
            ({'hidden': hidden.half(), 'weight': weight.half()}, 'float16 is too narrow'),
            ({'reduction': 'sum', 'num_items': 3}, 'num_items'),
            *(({'num_items': x}, 'num_items must be positive') for x in (-1, torch.tensor(0)))):
        with pytest.raises(ValueError, match=re.escape(message)):
            smoothed_cross_entropy(**{'hidden': hidden, 'weight': weight, 'target': target}
                                   | options)
    with pytest.raises(ValueError, match='float16'), torch.autocast('cpu', torch.float16):
        smoothed_cross_entropy(hidden, weight, target)


def test_ce_keeps_infinite_and_nan_logits_in_their_row(ce_device):
    hidden, weight, target = ce_inputs(3, 8, 300, ce_device, ignored=0)
    hidden, weight = hidden.detach().abs(), weight.detach()
    weight[:270] = float('-inf')        # a whole block, and some of the next
    target.fill_(280)
    hard, _ = smoothed_cross_entropy(hidden, weight, target)
    assert off(hard, by_autograd(nll_of, hidden, weight, target)[0]) < 1e-5
    assert smoothed_cross_entropy(hidden, weight, target, smoothing=0.1)[0] == float('inf')
    hidden[1, 2] = float('nan')
    loss, _ = smoothed_cross_entropy(hidden, weight[270:], target - 270, reduction='none')
    assert loss.isnan().tolist() == [False, True, False]


def test_ce_label_entry_keeps_its_digits(ce_device):
    # as p_y nears 1 - smoothing + smoothing / V, the label's gradient is a small difference
    V, smoothing = 300, 0.1
    identity = torch.eye(V, device=ce_device)
    for p in (0.5, 0.85, 0.9, 0.9003, 0.95, 0.9999):
        logits = torch.zeros(1, V, device=ce_device)
        logits[0, 7] = math.log(p / (1 - p) * (V - 1))
        logits = logits.bfloat16().requires_grad_()
        target = torch.tensor([7], device=ce_device)
        loss, _ = smoothed_cross_entropy(logits, identity.bfloat16(), target, smoothing=smoothing)
        loss.backward()
        expected = logits.detach().double().softmax(1) - smoothing / V
        expected[0, 7] -= 1 - smoothing
        assert abs(logits.grad[0, 7] - expected[0, 7]) < 2 ** -7 * abs(expected[0, 7]) + 1e-6


def test_ce_takes_any_layout(ce_device):
    B, T, D, V = 2, 4, 16, 40
    hidden, weight, target = ce_inputs(B * T, D, V, ce_device)
    expected = ours(hidden, weight, target, smoothing=0.1)
    # [B, T, D] with columns that are rows of something else, int32 labels with a stride on a CPU
    rows = hidden.detach().view(B, T, D).transpose(0, 1).contiguous().requires_grad_()
    columns = weight.detach().T.contiguous().requires_grad_()
    labels = torch.stack([target.view(B, T)] * 2, dim=-1).int()[..., 0].cpu()
    loss, _ = smoothed_cross_entropy(rows.transpose(0, 1), columns.T, labels, smoothing=0.1)
    loss.backward()
    dh = rows.grad.transpose(0, 1).reshape(B * T, D)
    assert_close((loss, dh, columns.grad.T), expected, 1e-6)


def test_ce_takes_any_upstream_gradient_and_has_no_second_derivative(ce_device):
    hidden, weight, target = ce_inputs(8, 16, 40, ce_device)
    kw = dict(smoothing=0.1, softcap=5.0)
    upstream = torch.linspace(-2, 3, 8, device=ce_device)
    loss, nll = smoothed_cross_entropy(hidden, weight, target, memory=1, reduction='none', **kw)
    loss.backward(upstream)
    # the sum of the tokens' losses times `upstream` has these gradients
    _, dh, dw = by_autograd(smoothed(0.1), hidden, weight, target, 5.0, upstream, total=1)
    assert off(hidden.grad, dh) < 1e-5 and off(weight.grad, dw) < 1e-5
    assert loss[target == -100].eq(0).all() and nll[target == -100].eq(0).all()
    assert loss.dtype == nll.dtype == torch.float32 and not nll.requires_grad
    _, dh, dw = by_autograd(smoothed(0.1), hidden, weight, target, 5.0)
    loss, _ = smoothed_cross_entropy(hidden, weight, target, **kw)
    for factor in (-7.3, 0.0):      # two backward passes through one graph
        hidden.grad = weight.grad = None
        (loss * factor).backward(retain_graph=True)
        assert off(hidden.grad, factor * dh) < 1e-5 and off(weight.grad, factor * dw) < 1e-5
    loss, _ = smoothed_cross_entropy(hidden, weight, target, **kw)
    with pytest.raises(RuntimeError, match='no second derivative'):
        torch.autograd.grad(loss, hidden, create_graph=True)


@pytest.mark.parametrize('trained', [*itertools.product((True, False), repeat=2)])
@pytest.mark.parametrize('reduction', ['sum', 'none'])
def test_ce_frozen_inputs_cost_no_product(ce_device, reduction, trained, monkeypatch):
    hidden, weight, target = ce_inputs(5, 16, 40, ce_device)
    expected = by_autograd(smoothed(0.1), hidden, weight, target, total=1)
    products = [recorded(monkeypatch, torch, name) for name in ('mm', 'addmm')]
    inputs = [x.detach().requires_grad_(needed)
              for x, needed in zip((hidden, weight), trained, strict=True)]
    loss = smoothed_cross_entropy(*inputs, target, smoothing=0.1, reduction=reduction)[0].sum()
    if any(trained):
        loss.backward()
    again = reduction == 'none' and any(trained)        # the logits in the forward pass, too
    assert sum(map(len, products)) == 1 + sum(trained) + again
    for x, gradient in zip(inputs, expected[1:], strict=True):
        assert off(x.grad, gradient) < 1e-5 if x.requires_grad else x.grad is None
    with torch.no_grad():
        smoothed_cross_entropy(*inputs, target, smoothing=0.1, reduction=reduction)
    assert sum(map(len, products)) == 2 + sum(trained) + again


def test_autocast_is_followed(ce_device):
    hidden, weight, target = ce_inputs(10, 64, 300, ce_device)
    with torch.autocast(ce_device, dtype=torch.bfloat16):
        mixed = smoothed_cross_entropy(hidden.bfloat16(), weight, target, smoothing=0.1)[0]
        loss, dh, dw = ours(hidden, weight, target, smoothing=0.1, memory=1)
    assert dh.dtype == dw.dtype == torch.float32
    assert_close((loss, dh, dw), by_autograd(smoothed(0.1), hidden, weight, target), 2e-2)
    assert off(mixed, loss) < 1e-5
    assert not torch.equal(dw, dw.bfloat16().float())     # it kept its digits


@pytest.mark.parametrize('N, D, V, dtype, softcap', [
    (7, 31, 300, torch.bfloat16, None), (1, 8, 5, torch.float32, 5.0)])
def test_token_statistics_equal_float64(ce_device, N, D, V, dtype, softcap):
    hidden, weight, target = ce_inputs(N, D, V, ce_device, dtype, std=8.0)
    target[1:2] = -100
    hidden, target = hidden.view(N, 1, D), target.view(N, 1)
    z = capped(hidden.detach().double() @ weight.detach().double().T, softcap)
    found = token_statistics(hidden, weight, target, cross_entropy() + smoothing(0.1),
                             softcap=softcap)
    loss, nll = (smoothed(rate)(z[:, 0], target[:, 0])[:, None] for rate in (0.1, 0.0))
    top_logit, top_token = z.max(-1)
    for name, expected in (('loss', loss), ('nll', nll), ('lse', z.logsumexp(-1)),
                           ('top_logit', top_logit), ('entropy', entropy_of(z))):
        got = getattr(found, name)
        assert got.shape == (N, 1) and got.dtype == torch.float32 and not got.requires_grad
        assert (got - expected).abs().max() < 1e-4, name
    assert torch.equal(found.top_token, top_token)


# ---- Losses -------------------------------------------------------------------------------------

def entropy_of(z):
    return torch.special.entr(z.softmax(-1)).sum(-1)


def weighted_of(z, y, weight):
    return weight.detach() * nll_of(z, y)


REFERENCES = {      # the definition of each, of float64 logits [n, V] and labels [n]
    'cross_entropy()': nll_of,
    'brier()': lambda z, y: (z.softmax(-1) - F.one_hot(y, z.shape[-1])).square().sum(-1),
    'spherical()': lambda z, y: -(-nll_of(z, y)).exp() / z.softmax(-1).square().sum(-1).sqrt(),
    'focal(2)': lambda z, y: (1 - (-nll_of(z, y)).exp()) ** 2 * nll_of(z, y),
    'focal(0.5)': lambda z, y: (1 - (-nll_of(z, y)).exp()) ** 0.5 * nll_of(z, y),
    'gce(0.7)': lambda z, y: (1 - (-0.7 * nll_of(z, y)).exp()) / 0.7,
    'gce(1)': lambda z, y: 1 - (-nll_of(z, y)).exp(),
    'dft()': lambda z, y: weighted_of(z, y, (-nll_of(z, y)).exp()),
    'entropy_weighted(1)': lambda z, y: weighted_of(z, y, entropy_of(z)),
    'entropy_weighted(0.5)': lambda z, y: weighted_of(z, y, entropy_of(z) ** 0.5),
    'cross_entropy() + smoothing(0.1)': smoothed(0.1),
    'cross_entropy() + smoothing(1)': smoothed(1.0),
    'cross_entropy() + adaptive_smoothing(0.4)': lambda z, y: nll_of(z, y) + 0.4 * (
        1 - entropy_of(z) / math.log(z.shape[-1])).detach() * (z.gather(-1, y[:, None])[:, 0]
                                                               - z.mean(-1)),
    'cross_entropy() + max_sup(0.2)':
        lambda z, y: nll_of(z, y) + 0.2 * (z.max(-1).values - z.mean(-1)),
    'cross_entropy() + z_loss(0.01)': lambda z, y: nll_of(z, y) + 0.01 * z.logsumexp(-1) ** 2,
    'cross_entropy() + confidence_penalty(0.3)': lambda z, y: nll_of(z, y) - 0.3 * entropy_of(z),
    'smoothing(0.2) + focal(2) + confidence_penalty(0.1) + z_loss(0.001) + max_sup(0.3)':
        lambda z, y: ((1 - (-nll_of(z, y)).exp()) ** 2 * nll_of(z, y) - 0.1 * entropy_of(z)
                      + 0.2 * (z.gather(-1, y[:, None])[:, 0] - z.mean(-1))
                      + 0.001 * z.logsumexp(-1) ** 2 + 0.3 * (z.max(-1).values - z.mean(-1)))}

# every loss with one of the softcaps, which are within the kernels' bound and beyond it
LOSS_CASES = [*zip(REFERENCES, itertools.cycle((None, 5.0, 60.0)))]
GOLDEN = cases_of('golden_losses.json')


@pytest.mark.parametrize('case', GOLDEN['cases'], ids=lambda c: f'{c["loss"]}, {c["softcap"]}')
def test_losses_equal_golden_values(ce_device, case):
    """Values and gradients of the logits from an independent computation in float64."""
    logits = torch.tensor(GOLDEN['logits'], device=ce_device, requires_grad=True)
    labels = torch.tensor(GOLDEN['labels'])
    value, _ = fused_loss(logits, torch.eye(11, device=ce_device), labels, parse_loss(case['loss']),
                          softcap=case['softcap'], reduction='none')
    value.sum().backward()
    for found, exact in (value, case['value']), (logits.grad, case['dlogits']):
        assert off(found.cpu(), torch.tensor(exact)) < 2e-6


@pytest.mark.parametrize('text, softcap', LOSS_CASES)
def test_loss_equals_autograd(ce_device, text, softcap):
    hidden, weight, target = ce_inputs(6, 31, 300, ce_device, std=3.0)
    target[1:3] = torch.tensor([63, 64])    # the labels at the border of two blocks
    token_weight = torch.linspace(0, 2, 6, device=ce_device)
    loss, options = parse_loss(text), {'softcap': softcap, 'token_weight': token_weight}
    expected, nll = (by_autograd(definition, hidden, weight, target, softcap, token_weight, 11)
                     for definition in (REFERENCES[text], nll_of))
    assert_close(ours(hidden, weight, target, loss, memory=1, num_items=11, **options), expected,
                 2e-5)
    each = ours(hidden, weight, target, loss, reduction='none', **options)
    assert_close([x / 11 for x in each], expected, 2e-5)
    assert off(fused_loss(hidden, weight, target, loss, num_items=11, **options)[1], nll[0]) < 1e-5


@pytest.mark.parametrize('text, softcap', LOSS_CASES)
def test_loss_at_the_ends_of_probability(ce_device, text, softcap):
    """p_y = 1, p_y = 0, a huge range of logits, saturated caps, equal logits: finite and right."""
    V = 300
    rows = torch.zeros(7, V)
    rows[0, 3] = rows[1, 4] = 50.0
    rows[2, 3] = 1e4
    rows[3, 3], rows[4, 4] = -1e4, 1e4
    rows[5] = torch.linspace(-1e4, 1e4, V)
    logits = rows.to(ce_device).requires_grad_()
    target = torch.full((7,), 3, device=ce_device)
    value, _ = fused_loss(logits, torch.eye(V, device=ce_device), target, parse_loss(text),
                          softcap=softcap, reduction='none')
    value.sum().backward()
    z = logits.detach().double().requires_grad_()
    exact = REFERENCES[text](capped(z, softcap), target)
    exact.sum().backward()
    assert value.isfinite().all() and logits.grad.isfinite().all()
    assert ((value - exact).abs() < 2e-5 * exact.abs() + 2e-5).all()
    right = z.grad.isfinite()       # autograd itself makes 0 * inf of some
    allowed = 2e-5 * z.grad.abs().amax(1, keepdim=True) + 1e-5
    assert ((logits.grad - z.grad).abs() < allowed)[right].all()


def test_loss_refuses_what_is_no_loss():
    for wrong in (z_loss(1e-4), focal):
        with pytest.raises(ValueError, match='loss must be one whole Loss'):
            fused_loss(*ce_inputs(3, 8, 20), wrong)
    for make, wrong in ((smoothing, 1.1), (gce, 0), (focal, -1), (entropy_weighted, -1),
                        (max_sup, math.inf), (z_loss, -1e-4), (confidence_penalty, math.inf)):
        for x in (wrong, math.nan):
            with pytest.raises(ValueError, match=f'{make.__name__}.*got'):
                make(x)


def test_parse_loss_reads_sums_and_names_errors():
    inputs = ce_inputs(5, 8, 20)
    loss = spherical() + confidence_penalty(-0.5)
    assert all(map(torch.equal, ours(*inputs, loss), ours(
        *inputs, parse_loss(' spherical()+confidence_penalty(-.5)'))))
    for text, message in (
            *cases_of('wrong_settings.toml')['loss'],
            *((f'brier(){" + z_loss(1)" * n}', 'too many terms') for n in (100, 3000, 10 ** 5))):
        found = f'loss {re.escape(repr(text)[:80])}: .*{re.escape(message)}'
        with pytest.raises(ValueError, match=found):
            parse_loss(text)


# ---- Joint losses: weights of tokens that depend on whole groups of tokens -----------------------

GROUPS = torch.tensor([0] * 7 + [1] * 2 + [2] * 12 + [3] + [5] * 8)     # two answers each


def dpo(log_p, entropy, tokens):
    """Sum of -log sigmoid(beta (log p of one answer - log p of the other)) over groups."""
    answer = (GROUPS * 2 + torch.arange(30) % 3 // 2).to(tokens.device)     # of unequal lengths
    groups = torch.unique(GROUPS.to(tokens.device)[tokens])
    sums = log_p.new_zeros(12).index_add(0, answer[tokens], log_p).view(6, 2)[groups]
    return -F.logsigmoid(0.3 * (sums[:, 0] - sums[:, 1])).sum()


def ppo(log_p, entropy, tokens):
    """Sum of PPO's clipped loss with an entropy bonus over tokens."""
    old = -5 + torch.arange(30, device=tokens.device)[tokens].sin().to(log_p.dtype)
    advantage = torch.arange(30, device=tokens.device)[tokens].cos().to(log_p.dtype)
    ratio = (log_p - old).exp()
    clipped = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)).sum()
    return clipped - 0.1 * entropy.sum()


@pytest.mark.parametrize('memory', [None, 1, 12 * 4 * 77], ids=['one-chunk', 'divided', 'chunks'])
@pytest.mark.parametrize('softcap, function', [
    (3.0, ppo), pytest.param(None, dpo, marks=pytest.mark.slow)])
def test_a_joint_loss_equals_autograd_whether_its_groups_fit_a_chunk_or_not(
        ce_device, function, softcap, memory):
    hidden, weight, target = ce_inputs(30, 24, 77, ce_device)
    target[GROUPS == 3] = -100      # a group whose tokens have no loss
    of_groups, options = joint(function, entropy=function is ppo), {
        'softcap': softcap, 'reduction': 'sum'}
    loss, nll = fused_loss(hidden, weight, target, of_groups, group=GROUPS, memory=memory,
                           **options)
    loss.backward()
    tokens = torch.nonzero(target >= 0).squeeze(1)
    expected = by_autograd(lambda z, y: function(-nll_of(z, y), entropy_of(z), tokens),
                           hidden, weight, target, softcap, total=1)
    assert_close((loss, hidden.grad, weight.grad), expected, 2e-6)
    plain, _ = fused_loss(hidden, weight, target, cross_entropy(), **options)
    assert off(nll, plain) < 2e-6
    nothing = ours(hidden, weight, target.fill_(-100), of_groups, group=GROUPS, **options)
    assert not any(x.any() for x in nothing)


# ---- The compiler, and GPUs ---------------------------------------------------------------------

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')


def needs_memory(gigabytes):
    if torch.cuda.mem_get_info()[0] < gigabytes * 2 ** 30:
        pytest.skip(f'needs {gigabytes} GB of GPU memory')


@pytest.mark.slow
def test_ce_breaks_the_graph_of_a_compiled_step_once(device):
    torch._dynamo.reset()
    torch.manual_seed(0)
    body, head = torch.nn.Linear(8, 8, device=device), torch.nn.Linear(8, 50, device=device)

    def step(x, target):
        loss, nll = smoothed_cross_entropy(body(x).relu(), head.weight, target, smoothing=0.1)
        return loss * 2, nll

    x = torch.randn(12, 8, device=device)
    targets = [torch.arange(12).masked_fill(torch.arange(12) < k, -100) for k in (0, 5, 9, 12)]
    explained = torch._dynamo.explain(step)(x, targets[0])
    assert explained.graph_break_count == 1
    torch._dynamo.reset()
    compiled = torch.compile(step, backend='eager')
    compiled(x, targets[0])
    with torch.compiler.set_stance('fail_on_recompile'):    # for any number of supervised tokens
        for target in targets:
            loss, _ = compiled(x, target)
            assert torch.equal(loss, step(x, target)[0])
            loss.backward()


@needs_cuda
@pytest.mark.parametrize('V, softcap', [(128256, None), (256000, 30.0)])
def test_ce_is_as_exact_as_torch_for_real_vocabularies(V, softcap):
    hidden, weight, target = ce_inputs(40, 128, V, 'cuda', torch.bfloat16, std=3.0)
    exact, by_torch = (by_autograd(smoothed(0.1), hidden, weight, target, softcap, dtype=dtype)
                       for dtype in (torch.float64, torch.bfloat16))
    found = ours(hidden, weight, target, smoothing=0.1, softcap=softcap)
    for a, b, c in zip(found, by_torch, exact, strict=True):
        assert off(a, c) < 1.2 * off(b, c) + 1e-4


@needs_cuda
@pytest.mark.parametrize('memory', [None, 2 ** 27, 0, 2 ** 40, 'none'])
def test_ce_at_full_size_keeps_to_its_memory(memory):
    N, D, V = 8192, 2304, 256000        # Gemma 2 2B
    needs_memory(60)
    hidden, weight, target = ce_inputs(N, D, V, 'cuda', torch.bfloat16, ignored=0, std=3.0)
    options = {'reduction': 'none'} if memory == 'none' else {'memory': memory}

    def run():
        hidden.grad = weight.grad = None
        smoothed_cross_entropy(hidden, weight, target, smoothing=0.1, softcap=30.0,
                               **options)[0].mean().backward()
        return hidden.grad[::61].clone(), weight.grad[::997].clone()

    first = run()
    hidden.grad = weight.grad = None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    again = run()
    extra = torch.cuda.max_memory_allocated() - before - hidden.nbytes - weight.nbytes
    assert all(map(torch.equal, first, again))
    limit = {None: 1.1e9, 'none': 1.1e9, 0: 2 ** 26}.get(memory, memory)
    assert extra < min(limit, 2 * N * V) + 4e6


@needs_cuda
def test_ce_is_right_for_more_logits_than_int32():
    N, D, V = 8704, 64, 256000      # 2.2e9 logits in one chunk
    needs_memory(20)
    hidden, weight, target = ce_inputs(N, D, V, 'cuda', torch.bfloat16)
    whole, parts = (ours(hidden, weight, target, smoothing=0.1, softcap=30.0, **options)
                    for options in ({'memory': 2 ** 40}, {}))
    assert_close(whole, parts, 5e-3)
    assert off(whole[1][-64:], parts[1][-64:]) < 5e-3       # the rows behind 2**31


@needs_cuda
@pytest.mark.parametrize('reduction', ['mean', 'none'])
def test_ce_never_waits(reduction):
    hidden, weight, target = ce_inputs(300, 64, 1000, 'cuda', torch.bfloat16)
    all_learnt, host = target.clamp_min(0), target.cpu()
    smoothed_cross_entropy(hidden, weight, host, smoothing=0.1)[0].backward()
    token_statistics(hidden, weight, host)
    before = kernel_variants(fused_ce)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode('error')
    try:
        for i, (y, kw) in enumerate(((host, {}), (all_learnt, dict(ignore_index=None)))):
            loss, nll = smoothed_cross_entropy(hidden, weight, y, smoothing=0.1 + i / 10, **kw,
                                               softcap=None, reduction=reduction)
            loss.sum().backward()
            token_statistics(hidden, weight, host)
    finally:
        torch.cuda.set_sync_debug_mode('default')
    if reduction == 'mean':     # nor is a kernel compiled again for another rate or count
        assert {name: n for name, n in kernel_variants(fused_ce).items() if before[name]} == {
            name: n for name, n in before.items() if n}


@needs_cuda
def test_a_kernel_serves_chunks_that_begin_anywhere():
    hidden, weight, target = ce_inputs(400, 64, 200000, 'cuda', torch.bfloat16)
    variants = []
    for size in (96, 97, 95):       # tokens of a group, each in a chunk of its own
        fused_loss(hidden, weight, target, joint(lambda log_p, entropy, tokens: log_p.sum()),
                   reduction='sum', group=torch.arange(400) // size, memory=0)[0].backward()
        variants.append(kernel_variants(fused_ce))
    assert variants[0] == variants[1] == variants[2]
