"""The joint losses of fused_ce.py: weights of tokens that depend on whole groups of tokens."""

import pytest
import torch
from common import off
from test_fused_ce import ce_device, ce_inputs  # noqa: F401

from fused_ce import cross_entropy, fused_loss, joint

GROUPS = torch.tensor([0] * 7 + [1] * 2 + [2] * 12 + [3] + [5] * 8)     # two answers each


def answer_sums(log_p, tokens):
    """Return the log-probability of each of the 12 answers, which are of unequal lengths."""
    answer = (GROUPS * 2 + torch.arange(30) % 3 // 2).to(tokens.device)
    return torch.zeros(12, dtype=log_p.dtype, device=log_p.device).index_add(
        0, answer[tokens], log_p)


def seen(tokens):
    return torch.unique(GROUPS.to(tokens.device)[tokens])


def dpo(log_p, entropy, tokens):
    """Sum of -log sigmoid(beta (log p of one answer - log p of the other)) over groups."""
    sums = answer_sums(log_p, tokens).view(6, 2)[seen(tokens)]
    return -torch.nn.functional.logsigmoid(0.3 * (sums[:, 0] - sums[:, 1])).sum()


def ppo(log_p, entropy, tokens):
    """Sum of PPO's clipped loss with an entropy bonus over tokens."""
    old = -5 + torch.arange(30, device=tokens.device)[tokens].sin().to(log_p.dtype)
    advantage = torch.arange(30, device=tokens.device)[tokens].cos().to(log_p.dtype)
    ratio = (log_p - old).exp()
    clipped = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)).sum()
    return clipped - 0.1 * entropy.sum()


def by_autograd(function, hidden, weight, target, softcap):
    """Return loss, dh and dW in float64, through all logits at once."""
    h, w = (x.detach().double().requires_grad_() for x in (hidden, weight))
    z = h @ w.T
    log_p = (z if softcap is None else softcap * torch.tanh(z / softcap)).log_softmax(1)
    tokens = torch.nonzero(target >= 0).squeeze(1)
    loss = function(log_p[tokens, target[tokens]], -(log_p.exp() * log_p).sum(1)[tokens], tokens)
    return loss.detach(), *torch.autograd.grad(loss, (h, w))


@pytest.mark.parametrize('memory', [None, 1, 12 * 4 * 77], ids=['one-chunk', 'divided', 'chunks'])
@pytest.mark.parametrize('softcap, function, dtype, limit', [
    (3.0, ppo, torch.float32, 2e-6), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        (None, dpo, torch.float32, 2e-6), (3.0, dpo, torch.bfloat16, 2e-2)))])
def test_a_joint_loss_equals_autograd_whether_its_groups_fit_a_chunk_or_not(
        ce_device, function, softcap, memory, dtype, limit):  # noqa: F811
    hidden, weight, target = ce_inputs(30, 24, 77, ce_device, dtype)
    loss, nll = fused_loss(hidden, weight, target, joint(function, entropy=function is ppo),
                           softcap=softcap, reduction='sum', group=GROUPS, memory=memory)
    loss.backward()
    expected = by_autograd(function, hidden, weight, target, softcap)
    for name, a, b in zip(('loss', 'dh', 'dW'), (loss, hidden.grad, weight.grad), expected,
                          strict=True):
        assert off(a.detach(), b) < limit, (name, off(a.detach(), b))
    assert off(nll, fused_loss(hidden, weight, target, cross_entropy(), softcap=softcap,
                               reduction='sum')[0].detach()) < limit


@pytest.mark.parametrize('memory, products', [(None, 3), (12 * 4 * 77, 9), (1, 32)])
def test_logits_are_computed_twice_only_if_a_group_exceeds_the_chunk(memory, products,
                                                                     monkeypatch):
    import fused_ce
    monkeypatch.setattr(fused_ce, 'ROWS', 4)
    calls, multiply = [], fused_ce._product
    monkeypatch.setattr(fused_ce, '_product', lambda *x, **y: (calls.append(x), multiply(*x, **y)))
    hidden, weight, target = ce_inputs(30, 24, 77, ignored=0)
    fused_loss(hidden, weight, target, joint(dpo), reduction='sum', group=GROUPS,
               memory=memory)[0].backward()
    assert len(calls) == products


def test_a_token_without_loss_belongs_to_no_group():
    hidden, weight, target = ce_inputs(30, 24, 77)
    target[GROUPS == 2] = -100
    joint_loss = fused_loss(hidden, weight, target, joint(dpo), reduction='sum', group=GROUPS)[0]
    assert off(joint_loss.detach(), by_autograd(dpo, hidden, weight, target, None)[0]) < 1e-6
    target[:] = -100
    nothing = joint(lambda log_p, entropy, tokens: log_p.sum())
    loss, _ = fused_loss(hidden, weight, target, nothing, reduction='sum', group=GROUPS)
    loss.backward()
    assert loss == 0 and not hidden.grad.any()


@pytest.mark.parametrize('change, message', [
    ({'group': None}, 'a joint loss needs `group`'),
    ({'reduction': 'mean'}, 'a joint loss needs `group`'),
    ({'token_weight': torch.ones(30)}, 'a joint loss needs `group`'),
    ({'loss': cross_entropy()}, 'others no group'),
    ({'group': GROUPS[:-1]}, 'group must have the shape of target')])
def test_a_joint_loss_says_what_it_needs(change, message):
    hidden, weight, target = ce_inputs(30, 24, 77)
    with pytest.raises(ValueError, match=message):
        fused_loss(hidden, weight, target, **{'loss': joint(dpo), 'reduction': 'sum',
                                              'group': GROUPS} | change)
