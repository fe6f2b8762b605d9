"""align.py with rewards: advantages, losses against plain loops, whole runs, closed forms."""

import itertools
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from common import (cases_of, expect_step, head_of_32, log_of, off, plain_log_probs, program,
                    recorded, reference_model, same_weights, sentencepiece_folder, write_rows)

import align
import train
from align import AlignConfig
from alignment import objectives, rollouts
from alignment.advantages import (CORRECTIONS, RL_METHODS, credit, soft_overlong, standardized,
                                  whitened)
from alignment.objectives import policy_objective
from alignment.packed_answers import Answers
from alignment.prompts import load_prompts, to_prompt
from alignment.rewards import FunctionReward, load_reward
from data.packing import pack
from decoding.answers import Answer
from runtime.errors import CheckpointError, ConfigError, DataError, TrainingError
import test_align
from test_align import run_of

# ---- Advantages and divisors ---------------------------------------------------------------------

ADVANTAGES = {      # of all answers to one prompt
    'rloo': lambda r: r - (r.sum() - r) / (len(r) - 1),
    'dr_grpo': lambda r: r - r.mean(),
    **dict.fromkeys(('grpo', 'dapo', 'cispo'),
                    lambda r: (r - r.mean()) / (r.std(ddof=1) + 1e-4))}


@pytest.mark.parametrize('name', ADVANTAGES)
def test_advantages_are_those_of_their_definition_and_sum_to_0(name):
    rewards = np.random.default_rng(3).normal(size=(5, 7))
    advantages = RL_METHODS[name].advantage(rewards)
    expected = np.apply_along_axis(ADVANTAGES[name], 1, rewards)
    assert np.allclose(advantages, expected, rtol=0, atol=1e-12)
    assert np.allclose(advantages.sum(1), 0, atol=1e-12)
    costs = rewards[::-1]
    assert np.allclose(standardized(rewards, costs), standardized(rewards)
                       - (costs - costs.mean(1, keepdims=True)), atol=1e-12)
    for reward in (0.1, 1 / 3, -1e18, 1e-300):      # equal rewards: exactly 0
        assert (RL_METHODS[name].advantage(np.full((3, 7), reward)) == 0).all()
        assert (whitened(np.full(14, reward)) == 0).all()


def test_the_soft_penalty_of_length_is_that_of_dapo():
    lengths = np.array([[1, 5, 6], [8, 9, 10]])
    penalty = soft_overlong(lengths, AlignConfig(max_tokens=10, soft_overlong=5))
    assert np.allclose(penalty, [[0, 0, -0.2], [-0.6, -0.8, -1]])


# ---- The loss of a step --------------------------------------------------------------------------

REWARD = program('reward of letters')


def config(base, folder, *, n=4, **values):
    (folder / 'reward.py').write_text(REWARD)
    settings = {'method': 'grpo', 'reward': str(folder / 'reward.py'), 'pack_len': 80,
                'max_tokens': 12, 'group_size': 5, 'truncated': 'score', 'lr': 1e-3} | values
    if settings.get('kl', 'none') == 'none':        # what has no effect is refused
        settings.pop('kl_coef', None)
    prompts = [{'prompt': f'Name {i}' + '.' * i} for i in range(n)]
    return test_align.config(base, folder, prompts, **settings)


def made_up(rng, G):
    """Return G answers of random tokens to each of four prompts, and random rewards."""
    answers = [[Answer(i, k, tokens=rng.integers(3, 390, rng.integers(1, 12)).tolist(),
                       reason='end') for k in range(G)] for i in range(4)]
    for answer in sum(answers, []):
        answer.log_probs = answer.entropies = [0.0] * len(answer.tokens)
    return answers, rng.normal(size=(4, G))


def plain_loss(model, run, cfg, answers, advantages, old, reference):
    """The loss of a step by a loop over the answers; cut answers are masked."""
    method, terms, bonus, tokens = cfg.method, [], 0, 0
    for answer in sum(answers, []):
        if answer.truncated:
            continue
        i, k = answer.prompt, answer.number
        log_p, entropy = plain_log_probs(model, run.sequences[i][0].tolist(), answer.tokens)
        n = len(answer.tokens)
        A = torch.as_tensor(advantages[i, k])       # PPO has one for each token
        ratios = (log_p - old[i, k]).exp()
        if method == 'rloo':
            ratios = ratios.prod()
        elif method == 'gspo':
            ratios = ratios.prod() ** (1 / n)
        high = 0.28 if method == 'dapo' else 0.2
        surrogate = -torch.minimum(A * ratios, A * ratios.clamp(1 - 0.2, 1 + high)).sum()
        if method == 'cispo':
            surrogate = -(A * ratios.detach().clamp(max=1 + cfg.clip_high) * log_p).sum()
        elif method == 'sapo':
            tau = 1.0 if A > 0 else 1.05
            surrogate = -(A * 4 / tau / (1 + (-tau * (ratios - 1)).exp())).sum()
        others, bonus, tokens = 0, bonus + cfg.entropy_coef * entropy.sum(), tokens + n
        d = log_p - reference[i, k]
        if cfg.kl == 'loss':
            others = cfg.kl_coef * (log_p - old[i, k]).sum().exp() * d.sum().item()
        elif cfg.kl == 'k3':
            others = cfg.kl_coef * ((-d).exp() - 1 + d).sum()
        terms.append(surrogate + others / n if method == 'gspo' else (surrogate + others) / {
            'grpo': n, 'sapo': n, 'ppo': n, 'dr_grpo': cfg.max_tokens}.get(method, 1))
    n_answers = sum(map(len, answers))
    return sum(terms) / (tokens if method in ('dapo', 'cispo') else n_answers) - bonus / tokens


@pytest.mark.parametrize('base, method, kl, entropy_coef', [
    ('llama', 'rloo', 'loss', 0.0), ('llama', 'grpo', 'k3', 0.1), ('llama', 'gspo', 'loss', 0.0),
    ('llama', 'dapo', 'none', 0.1), ('llama', 'dr_grpo', 'loss', 0.0),
    ('llama', 'cispo', 'k3', 0.1), ('llama', 'sapo', 'none', 0.0),
    pytest.param('gemma2', 'gspo', 'k3', 0.1, marks=pytest.mark.slow)], indirect=['base'])
def test_loss_and_gradients_are_those_of_plain_loops(base, method, kl, entropy_coef, tmp_path,
                                                     monkeypatch):
    cfg = config(base, tmp_path, method=method, kl=kl, entropy_coef=entropy_coef, kl_coef=0.3,
                 truncated='mask', **{'cispo': {'updates': 2, 'clip_high': 0.1}}.get(method, {}))
    run, model = run_of(cfg)
    rng = np.random.default_rng(1)
    answers, rewards = made_up(rng, 5)
    answers[2][1] = replace(answers[2][0], number=1)    # equal neighbors share a branch
    for i, k in ((0, 1), (1, 4), (3, 0)):
        answers[i][k].reason = 'max_tokens'
    advantages, old, reference = RL_METHODS[method].advantage(rewards), {}, {}
    for i, group in enumerate(answers):
        for k, answer in enumerate(group):
            with torch.no_grad():
                now, _ = plain_log_probs(model, run.sequences[i][0].tolist(), answer.tokens)
            noise = torch.from_numpy(rng.normal(size=(2, len(now)))) + 0.3 * rng.normal()
            old[i, k], reference[i, k] = now + 0.4 * noise
            if kl == 'none' and advantages[i, k] > 0:
                old[i, k][0] -= 100     # float32 cannot hold the ratio
    step = expect_step(model, plain_loss(model, run, cfg, answers, advantages, old, reference))
    for micro_rows, memory, pack_len in ((1, None, 80), (9, 0, 160)):
        case = replace(cfg, micro_rows=micro_rows, loss_memory=memory, pack_len=pack_len)
        monkeypatch.setattr(train.Run, 'row_multiple', 7)       # some rows are padding
        packed = rollouts.pack(replace(run, cfg=case), range(4), answers, rewards)
        packed.old, packed.reference = (np.concatenate([x[*w] for w in packed.where])
                                        for x in (old, reference))
        values = step(packed, case, policy_objective)
        assert (method == 'sapo' or 0.1 < values['clip_fraction'] < 0.9) and values['ratio'] != 1


@pytest.mark.parametrize('kind', CORRECTIONS)
def test_a_correction_multiplies_the_advantage_by_bounded_ratios(base, kind, tmp_path):
    cfg = config(base, tmp_path, correction=kind, correction_max=1.5)
    run, model = run_of(cfg)
    answers, rewards = made_up(np.random.default_rng(1), 5)
    plain = rollouts.pack(replace(run, cfg=replace(cfg, correction='none')), range(4), answers,
                          rewards)
    old, _ = objectives.log_probs(model, plain, run)
    noise = np.random.default_rng(2).normal(size=len(old)) / 2
    begin = np.cumsum(plain.counts) - plain.counts
    weights = []
    for (i, k), start, n in zip(plain.where, begin, plain.counts):
        answers[i][k].log_probs = (old - noise)[start:start + n].tolist()
        ratios = np.exp(noise[start:start + n])
        ratios = np.full(n, ratios.prod()) if 'answer' in kind else ratios
        weights += [(0 if 'mask' in kind else 1.5) if r > 1.5 else r for r in ratios]
    packed = rollouts.pack(run, range(4), answers, rewards)
    assert np.allclose(packed.advantage, plain.advantage * weights)
    assert packed.measured['correction'] == pytest.approx(np.mean(weights), rel=1e-5)
    assert len({*weights}) > 5 and (np.array(weights) == (0 if 'mask' in kind else 1.5)).any()


def test_the_tokenized_brier_score_is_that_of_a_plain_loop(base, tmp_path):
    run, model = run_of(config(base, tmp_path))
    levels = objectives.confidence_levels(run.tokenizer)
    ids, c = [*levels], [*levels.values()]
    assert c == [d / 10 for d in range(10)] and len({*ids}) == 10
    rng = np.random.default_rng(0)
    # as 0.9 or 0.0, whose first token can be a level, too
    sequences = [(np.array([1, *rng.integers(3, 90, n), ids[0], 5, ids[9 * right], 2]),
                  np.array([*[0] * (n + 1), 1, 1, 1, 1])) for n, right in ((5, 1), (9, 0), (2, 1))]
    for weight in (0.0, 0.5):       # of the cross-entropy of the twelve tokens
        expected = 0
        for tokens, _ in sequences:
            ahead = torch.from_numpy(tokens[None, :-1])
            hidden = model(ahead, torch.arange(ahead.shape[1])[None], None)[0].double()
            logits = hidden @ model.head.double().T
            q = logits[-2, ids].softmax(0)
            expected += sum(q[i] * (c[i] - (tokens[-2] == ids[9])) ** 2 for i in range(10)) / 3
            log_p = logits.log_softmax(1)
            expected -= weight / 12 * (log_p[-2, ids].logsumexp(0) + sum(
                log_p[i, tokens[i]] for i in (-4, -3, -1)))
        step = expect_step(model, expected)
        for micro_rows in (1, 3):
            step(pack(sequences, 16), replace(run.cfg, micro_rows=micro_rows),
                 objectives.tokenized_brier(levels, weight))
    sequences = [(tokens, mask * 0) for tokens, mask in sequences]
    with pytest.raises(DataError, match='no supervised token of a step states a confidence'):
        objectives.tokenized_brier(levels)(pack(sequences, 16), run.cfg)
    with pytest.raises(ConfigError, match='must differ in their last token alone'):
        objectives.confidence_levels(run.tokenizer, ('0.1', '1.00'))


# ---- Expected gradients, by exact enumeration ----------------------------------------------------

ANSWERS = [(0,), *itertools.product((1, 2), range(3))]      # token 0 ends an answer


def exact_log_probs(logits):
    """Those of each answer's tokens; logits [3, 3]: of the first token, after token 1, after 2."""
    p = logits.log_softmax(-1)
    return [p[[0, *answer[:-1]], answer] for answer in ANSWERS]


def expected_gradient(cfg, policy, reference, rewards):
    """That of the loss of a step with one prompt, over all groups of two answers."""
    logits = policy.clone().requires_grad_()
    now, then = exact_log_probs(logits), exact_log_probs(reference)
    probability, total = [x.sum().exp().item() for x in now], 0
    for group in itertools.product(range(len(ANSWERS)), repeat=2):
        counts = np.array([len(ANSWERS[i]) for i in group])
        answer = torch.from_numpy(np.repeat(np.arange(2), counts))
        answers = Answers.__new__(Answers)      # with what policy_loss needs, in float64
        answers.answer, answers.counts = answer, torch.from_numpy(counts).double()
        log_p, reference_p = (torch.cat([x[i] for i in group]) for x in (now, then))
        packed = SimpleNamespace(counts=counts, where=np.array([[0, 0], [0, 1]]))
        advantage, _ = credit(packed, rewards[[*group]], log_p.detach().numpy(),
                              reference_p.numpy(), None, cfg, cfg.kl_coef)
        loss, _, _ = objectives.policy_loss(
            log_p, {'old': log_p.detach(), 'reference': reference_p,
                    'advantage': torch.from_numpy(advantage)},
            answers, torch.arange(len(answer)), cfg)
        weight = torch.from_numpy(RL_METHODS[cfg.method].weight(counts, counts > 0, cfg))
        total += np.prod([probability[i] for i in group]) * (loss * weight[answer]).sum()
    return torch.autograd.grad(total, logits)[0]


# share: dr_grpo's mean of two rewards holds the answer itself; divisor: its max_tokens
@pytest.mark.parametrize('method, share, divisor', [('rloo', 1, 1), ('dr_grpo', 1 / 2, 3)])
@pytest.mark.parametrize('kl', ['loss', 'reward'])
def test_the_gradient_is_that_of_the_kl_of_whole_answers_and_the_reward(method, share, divisor, kl):
    rng = np.random.default_rng(0)
    policy, reference = (torch.from_numpy(rng.normal(size=(3, 3))) for _ in range(2))
    rewards = rng.normal(size=len(ANSWERS))
    logits = policy.clone().requires_grad_()
    p, q = (torch.stack([x.sum() for x in exact_log_probs(z)]) for z in (logits, reference))
    objective = (0.7 * (share if kl == 'reward' else 1) * (p.exp() * (p - q)).sum()
                 - share * (p.exp() * torch.from_numpy(rewards)).sum()) / divisor
    cfg = AlignConfig(method=method, reward='exact', max_tokens=3, kl=kl, kl_coef=0.7)
    assert off(expected_gradient(cfg, policy, reference, rewards),
               torch.autograd.grad(objective, logits)[0]) < 1e-12


# ---- The first step ------------------------------------------------------------------------------

@pytest.mark.parametrize('lora', [False, True])
def test_the_first_step_has_ratio_1_and_no_kl_and_the_second_its_probabilities(
        base, tmp_path, monkeypatch, lora):
    cfg = config(base, tmp_path, kl='reward', updates=2, micro_rows=1, lora=lora)
    run, model = run_of(cfg)
    _, packed = next(rollouts.batches(run, 0, 1))
    values = train.forward_backward(model, packed, cfg, 'cpu', policy_objective)
    assert (packed.old == packed.reference).all()       # the same weights and kernels
    assert values['ratio'].item() == pytest.approx(1, abs=1e-5) and values['clip_fraction'] == 0
    assert values['kl'].item() == pytest.approx(0, abs=1e-3)
    # the mean of each answer's mean: 0, but not the gradient
    assert values['loss'].item() == pytest.approx(0, abs=1e-5)
    assert sum(p.grad.norm() for p in model.parameters() if p.grad is not None) > 1e-3
    assert np.abs(packed.old - packed.sampled).mean() < 1e-4    # decoding has those of training
    begins = recorded(monkeypatch, train, 'train_step', lambda *arguments: arguments[2].old)
    old, packed.old = packed.old, None      # as without a KL in the reward
    assert rollouts.update(model, train.build_optimizer(model, cfg), packed, cfg, 'cpu',
                           policy_objective)['mismatch'] < 1e-4
    assert begins[0] is None and np.allclose(begins[1], old, rtol=0, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
@pytest.mark.parametrize('values', [{'method': 'ppo', 'lora': True}, {'method': 'dr_grpo'}])
def test_on_a_gpu_ratio_kl_and_the_probabilities_of_decoding_agree(tmp_path, values):
    base = sentencepiece_folder(tmp_path / 'base', 'llama2')
    reference_model('llama', base, vocab_size=400, **head_of_32('llama'))
    cfg = config(base, tmp_path, kl='reward', updates=2, epochs=3, lr=1e-4, group_size=4, **values)
    align.align(replace(cfg, device='cuda', dtype='bfloat16', pack_len=256))
    first, *_, last = log_of(tmp_path / 'run')
    assert abs(first['kl']) < 0.1 and first['mismatch'] < 0.05      # bfloat16, compiled blocks
    assert abs(first['ratio'] - 1) < 0.05 and abs(last['ratio'] - 1) < 0.3


def test_without_adapters_the_model_is_the_base_whatever_they_hold(base, tmp_path):
    run, model = run_of(config(base, tmp_path, lora=True, kl='logged'))
    answers, rewards = made_up(np.random.default_rng(0), 5)
    before = rollouts.pack(run, range(4), answers, rewards).reference
    for name, p in model.named_parameters():
        if 'lora_B' in name:
            torch.nn.init.normal_(p)
    packed = rollouts.pack(run, range(4), answers, rewards)
    assert (packed.reference == before).all()
    assert np.abs(objectives.log_probs(model, packed, run)[0] - before).max() > 0.1
    model.decoder.norm.weight.data.fill_(torch.nan)
    with pytest.raises(TrainingError, match='prompt 1 of a step: the model in training gives NaN'):
        rollouts.sample(run, np.array([2, 0]), 0, 3)


@pytest.mark.parametrize('truncated, n_used', [('mask', 1), ('score', 2), ('penalize', 2)])
def test_a_truncated_answer_is_masked_scored_or_penalized(base, truncated, n_used, tmp_path,
                                                          monkeypatch):
    cfg = config(base, tmp_path, n=1, group_size=2, truncated=truncated, method='dapo',
                 penalty=-3.0 if truncated == 'penalize' else 0.0)
    run, _ = run_of(cfg)
    long = Answer(0, 0, tokens=[5] * 12, log_probs=[0.0] * 12, entropies=[0.0] * 12, text='e',
                  reason='max_tokens')
    short = replace(long, number=1, tokens=[5] * 11 + [2], reason='end')
    monkeypatch.setattr(rollouts, 'generate', lambda *_: [(0, [long, short])])
    answers, rewards = rollouts.sample(run, [0], 0, 2)
    assert rewards[0, 0] == (-3 if truncated == 'penalize' else rewards[0, 1])
    packed = rollouts.pack(run, [0], answers, rewards)
    weight = packed.weight.reshape(2, -1)
    assert packed.measured['truncated'] == 0.5 and (weight[:, 0] > 0).sum() == n_used
    packed = rollouts.pack(run, [0], [[long, replace(long, number=1)]], rewards)
    assert packed.weight.any() == (truncated != 'mask') and np.isfinite(packed.weight).all()


@pytest.mark.slow
def test_prompts_with_equal_rewards_are_replaced_as_often_as_said(base, tmp_path, monkeypatch):
    cfg = config(base, tmp_path, n=8, batch_size=4, method='dapo', resample=2)
    (tmp_path / 'reward.py').write_text(program('reward of odd prompts'))
    for resample, n_calls in ((0, 1), (2, 3)):
        case = replace(cfg, resample=resample)
        run, _ = run_of(case)
        run.training, first = np.array([1, 2, 4, 6]), np.array([0, 1, 2, 4])
        with monkeypatch.context() as patch:
            calls = recorded(patch, rollouts, 'sample', lambda run, chosen, seed, n: (
                list(chosen), seed))
            chosen, answers, rewards = rollouts.rollout(run, first, 5)
        assert len(calls) == n_calls and first.tolist() == [0, 1, 2, 4]
        assert len({seed for _, seed in calls}) == n_calls
        assert chosen[1] == 1 and np.ptp(rewards[1]) > 0        # what has an advantage is kept
        assert [len(tried) for tried, _ in calls][:2] == [4, 3][:n_calls]
        # the last rewards belong to the last answers
        for i, group, row in zip(chosen, answers, rewards, strict=True):
            assert row.tolist() == [i % 2 and len(answer.text) % 3 for answer in group]
    assert set(chosen) - {0, 1} <= {2, 4, 6} and chosen[0] != 0


# ---- PPO -----------------------------------------------------------------------------------------

@pytest.mark.parametrize('values', [
    {'kl': 'reward'}, {'kl': 'none'}, {'kl': 'loss', 'discount': 0.9}])
def test_ppo_is_that_of_plain_loops(base, values, tmp_path):
    cfg = config(base, tmp_path, method='ppo', group_size=2, kl_coef=0.3, value_coef=0.4, **values)
    run, model = run_of(cfg)
    rng = np.random.default_rng(1)
    answers, scores = made_up(rng, 2)
    with torch.no_grad():
        model.value_head.copy_(torch.from_numpy(rng.normal(size=48)) * 0.05)
    packed = rollouts.pack(run, range(4), answers, scores)
    for name in ('old', 'reference', 'value'):     # as after some updates
        if (column := getattr(packed, name)) is not None:
            setattr(packed, name, column + 0.3 * rng.normal(size=len(column)))
    packed.advantage, packed.returns = credit(
        packed, scores[tuple(packed.where.T)], packed.old, packed.reference, packed.value, cfg, 0.3)

    where, ends = [*map(tuple, packed.where)], np.cumsum(packed.counts)[:-1]
    old, reference, value = (
        dict(zip(where, map(torch.from_numpy, np.split(column, ends)), strict=True)) for column in (
            packed.old, packed.old if packed.reference is None else packed.reference, packed.value))
    raw, advantages, value_loss = {}, {}, 0
    for answer in where:
        rewards = -0.3 * (cfg.kl == 'reward') * (old[answer] - reference[answer]).numpy()
        rewards[-1] += scores[answer]
        # generalized advantages, by the sum of the definition
        V, t = np.append(value[answer], 0), np.arange(len(rewards))
        deltas = rewards + cfg.discount * V[1:] - V[:-1]
        raw[answer] = np.triu((cfg.discount * 0.95) ** (t - t[:, None])) @ deltas
    every = np.concatenate([*raw.values()])
    for i, k in where:
        advantages[i, k] = (raw[i, k] - every.mean()) / np.sqrt(every.var(ddof=1) + 1e-8)
        row = torch.tensor([[*run.sequences[i][0].tolist(), *answers[i][k].tokens]])
        hidden = model(row, torch.arange(row.shape[1])[None], None)[0, -len(raw[i, k]) - 1:-1]
        V, V_old = (hidden @ model.value_head).double(), value[i, k]
        V_clipped = torch.minimum(torch.maximum(V, V_old - 0.2), V_old + 0.2)
        R = torch.from_numpy(raw[i, k]) + V_old
        errors = torch.maximum((V - R) ** 2, (V_clipped - R) ** 2)
        value_loss += 0.4 * errors.mean() / 2 / len(where)
    policy_loss = plain_loss(model, run, cfg, answers, advantages, old, reference)
    expect_step(model, policy_loss + value_loss)(packed, cfg, policy_objective)


# ---- Whole runs ----------------------------------------------------------------------------------

@pytest.mark.slow
@pytest.mark.parametrize('values', [
    {'resample': 2, 'group_size': 2, 'lora': True},
    {'method': 'ppo', 'kl_coef': 0.2, 'kl_target': 6.0, 'kl_horizon': 1000}])
def test_a_killed_run_resumes_to_the_same_answers_and_weights(base, tmp_path, monkeypatch, values):
    cfg = config(base, tmp_path, epochs=8, save_every=2, updates=2, kl='reward', **values)
    align.align(cfg)
    again, rate = replace(cfg, out_dir=str(tmp_path / 'again')), train.learning_rate

    def die(step, *rest):
        if step == 5:
            raise KeyboardInterrupt
        return rate(step, *rest)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(train, 'learning_rate', die)
        align.align(again)
    align.align(replace(again, resume=True))
    assert same_weights(tmp_path / 'run', tmp_path / 'again')
    log = log_of(tmp_path / 'run')
    assert log == log_of(tmp_path / 'again')
    # no KL in the first step: the coefficient falls by the most that is possible
    assert cfg.kl_target is None or [record['kl_coef'] for record in log[:2]] == pytest.approx(
        [0.2, 0.2 * (1 - 0.2 * 20 / 1000)])


def test_a_prompt_that_is_twice_in_a_step_gets_other_answers(base, tmp_path):
    run, _ = run_of(config(base, tmp_path, n=2, group_size=3))
    (first, other, again), _ = rollouts.sample(run, np.array([0, 1, 0]), 5, 3)
    assert len({tuple(answer.tokens) for answer in first + again}) == 6
    # the first of them has the answers that it has alone
    alone, _ = rollouts.sample(run, np.array([1, 0]), 5, 3)
    assert [[answer.tokens for answer in group] for group in (other, first)] == [
        [answer.tokens for answer in group] for group in alone]


def test_other_end_tokens_and_an_edited_reward_are_other_data(base, tmp_path):
    cfg = config(shutil.copytree(base, tmp_path / 'base'), tmp_path)
    digests = [run_of(cfg)[0].sequences.digest]
    for name, content in (('base/generation_config.json', '{"eos_token_id": [2, 9]}'),
                          ('reward.py', REWARD + '# edited\n')):
        (tmp_path / name).write_text(content)
        digests.append(run_of(cfg)[0].sequences.digest)
    assert len({*digests}) == 3


@pytest.mark.slow
def test_a_run_raises_its_reward_and_scores_held_out_prompts(base, tmp_path, capsys):
    cfg = config(base, tmp_path, n=6, batch_size=4, val_size=2, epochs=12, val_every=6, lr=4e-3,
                 group_size=16, method='dr_grpo')
    (tmp_path / 'reward.py').write_text(program('reward of short answers'))
    align.align(cfg)
    log = log_of(tmp_path / 'run')
    assert log[-1]['reward'] > log[0]['reward'] + 0.2
    assert {'val_reward', 'val_length'} <= log[-1].keys() and log[0]['ratio'] == 1
    assert 'first answer, with reward' in capsys.readouterr().out


# ---- Rewards and prompts -------------------------------------------------------------------------

def reward_of(name, answer, row):
    return load_reward(name, 'cpu', None, 'tulu').score('', answer, row)


RATED = '<answer>{}</answer><confidence>{}</confidence>'
WHY = {'role': 'user', 'content': 'Why?'}


@pytest.mark.parametrize('name, answer, target, reward', [
    (name, *case) for name, cases in cases_of('rewards.toml').items() for case in cases])
def test_a_reward_is_that_of_the_rule_of_the_task(name, answer, target, reward):
    assert reward_of(name, answer, {'prompt': '?', 'answer': target}) == pytest.approx(reward)


def test_rewards_of_a_confidence_are_highest_at_the_accuracy_and_those_of_abstaining_agree():
    row = {'question': '?', 'answer': '#### 3'}
    for p in (0.2, 0.55, 0.9):
        for name in ('rlcr', 'log_score', 'abstain_stated'):
            mean = [p * reward_of(f'{name}:gsm8k', RATED.format(3, q / 100), row)
                    + (1 - p) * reward_of(f'{name}:gsm8k', RATED.format(4, q / 100), row)
                    for q in range(1, 100)]
            assert np.argmax(mean) + 1 == round(100 * p), name
    # over thresholds: wrong answers that are given cost -t / (1 - t)
    paid = [reward_of('abstain:gsm8k', '#### 4' if 0.8 >= t else "I don't know",
                      row | {'threshold': t}) for t in ((np.arange(10000) + 0.5) / 10000).tolist()]
    assert np.mean(paid) == pytest.approx(
        reward_of('abstain_stated:gsm8k', RATED.format(4, 0.8), row), abs=1e-3)


@pytest.mark.parametrize('row', [
    {'question': 'Why?', 'prompt': None, 'answer': '3'}, {'problem': 'Why?'},
    {'instruction': 'Why?', 'output': 'x'}, {'prompt': [{'from': 'human', 'value': 'Why?'}]},
    {'query': 'Why?', 'messages': [WHY, {'role': 'assistant', 'content': 'x'}]}])
def test_each_format_of_prompts_is_read_with_the_context_before_it(row):
    assert to_prompt(row) == [WHY]
    assert to_prompt(row, 'Be brief.') == [{'role': 'user', 'content': 'Why?\n\nBe brief.'}]
    assert to_prompt(row | {'system': 'Be brief.', 'history': [['Hi', 'Yo']]}) == [
        {'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': 'Hi'},
        {'role': 'assistant', 'content': 'Yo'}, WHY]
    with pytest.raises(DataError, match='"tools" is in no message'):
        to_prompt(row | {'tools': 'f(x)'})


@pytest.mark.parametrize('raw, message', cases_of('wrong_settings.toml')['prompts'])
def test_prompts_without_a_usable_row_say_why(tmp_path, tokenizers, raw, message):
    (tmp_path / 'x.jsonl').write_text(raw)
    with pytest.raises(DataError, match=message):
        load_prompts(str(tmp_path / 'x.jsonl'), tokenizers['gemma'], FunctionReward('', len, ''),
                     template='tulu', max_length=20, add_bos=True, on_bad_row='skip')


@pytest.mark.parametrize('name, code, message', cases_of('wrong_settings.toml')['reward'])
def test_an_error_in_a_reward_names_its_file_and_line(name, code, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path('reward.py').write_text(code, encoding='latin-1')
    with pytest.raises((CheckpointError, ConfigError, DataError), match=message):
        load_reward(name, 'cpu', None, 'tulu').score('p', 'a', {})


def test_a_reward_gets_a_copy_of_its_row_and_returns_any_number(tmp_path):
    (tmp_path / 'reward.py').write_text(program('reward that changes its row'),
                                        encoding='utf-8-sig')
    row = {'seen': []}
    reward = load_reward(f'{tmp_path}/reward.py', 'cpu', None, 'tulu')
    messages = [{'role': 'user', 'content': 'p'}]
    assert reward.scores([messages], [['a', 'a', 'b']], [row]).tolist() == [[1, 1, 1]]
    assert row == {'seen': []}


def test_a_reward_imports_modules_beside_it_which_are_part_of_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, 'path', [*sys.path])
    files = {'reward.py': program('reward of modules'), 'unused_of_digest.py': '',
             'words_of_digest.py': 'import deep_of_digest as deep', 'deep_of_digest.py': 'x = 1',
             'pack_of_digest/__init__.py': '', 'pack_of_digest/sister.py': 'x = 2'}
    (tmp_path / 'pack_of_digest').mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    reward = f'{tmp_path}/reward.py'
    assert reward_of(reward, 'a', {}) == 3
    digests = [load_reward(reward, 'cpu', None, 'tulu').digest]
    for name in ('unused_of_digest.py', 'deep_of_digest.py', 'pack_of_digest/sister.py'):
        (tmp_path / name).write_text(files[name] + '  # edited\n')
        digests.append(load_reward(reward, 'cpu', None, 'tulu').digest)
    assert digests[0] == digests[1] and len({*digests}) == 3


def test_a_row_without_the_answer_of_the_reward_is_found_before_training(base, tmp_path):
    cfg = replace(config(base, tmp_path), reward='exact:gsm8k')
    write_rows(Path(cfg.data), [{'question': 'Why?', 'answer': 'So. #### 3'},
                                {'question': 'Why?', 'answer': '3'}, {'question': 'Why?'}])
    with pytest.raises(DataError, match=r"rows.jsonl:2: the answer has no '####'"):
        run_of(cfg)
    run, _ = run_of(replace(cfg, on_bad_row='skip', batch_size=1))
    assert len(run.sequences) == 1
    for row, message in (({'answer': 3}, 'a reference answer is not text but int'),
                         ({'answer': 'x', 'threshold': 1}, '"threshold" must be a .* got 1')):
        write_rows(Path(cfg.data), [{'question': 'Why?'} | row])
        with pytest.raises(DataError, match=f'rows.jsonl:1: {message}'):
            run_of(replace(cfg, reward='abstain'))
