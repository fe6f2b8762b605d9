"""The stage of align.py that learns from rewards: PPO, RLOO, GRPO and their relatives.

In each step the model generates answers, a training row is [prompt][answer 1] ... [answer G], and
the weight of each token in the loss follows from the rewards: by one advantage function and one
divisor per method, in PPO by a value head. Every loss depends on the log-probabilities of the
answers' tokens alone, so fused_ce.py computes it without storing logits. The settings are those of
align.py.
"""

import contextlib
import math
import os
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

import train
from data.answers import Answers, pack_rollouts
from data.export import tokenizer_files
from data.written_answers import WRITTEN_TASKS
from data.rl import load_prompts, load_reward
from data.tokenizer import begins_with_bos
from fused_ce import cross_entropy, fused_loss, joint
from generate import generate
from model import LoRALinear
from runtime.build import build_model
from runtime.config import require_range
from runtime.device import pick_device, pick_dtype
from runtime.errors import ConfigError, TrainingError
from runtime.loss import loss_options
from runtime.parallel import world_size
from runtime.resume import advice
from decoding.sampling import Sampling

# ---- Advantages and divisors ---------------------------------------------------------------------


# Of rewards and of costs, the KL in the reward: float64 [prompts, answers], in nats per answer

def deviation(x):
    """Return x minus its mean along the last axis; equal numbers of any size give exactly 0."""
    x = x - x[..., :1]      # the mean of equal numbers is rounded, except that of zeros
    return x - x.mean(-1, keepdims=True)


def centered(rewards, costs=0.0):
    """Return the rewards minus costs, minus their mean over the answers to each prompt."""
    return deviation(rewards) - deviation(np.broadcast_to(costs, rewards.shape))


def leave_one_out(rewards, costs=0.0):
    """Return the reward minus costs of each answer, minus the mean of the others'."""
    return centered(rewards, costs) * rewards.shape[1] / (rewards.shape[1] - 1)


def standardized(rewards, costs=0.0):
    """Return the centered rewards, divided by their standard deviation, minus the centered costs.

    The deviation is that of the rewards alone: divided by their own, the costs of answers with
    equal rewards would be noise of full size, whatever their weight.
    """
    std = deviation(rewards).std(1, ddof=1, keepdims=True)
    return centered(centered(rewards) / (std + 1e-4), costs)


def soft_overlong(lengths, cfg):
    """Return the length penalty: 0 for short answers, -1 at max_tokens. DAPO, eq. 13.

    Over the last cfg.soft_overlong tokens before max_tokens it falls linearly.
    """
    return -np.clip((lengths - cfg.max_tokens) / cfg.soft_overlong + 1, 0, 1)


# The weights of the losses of each answer's tokens. counts [N]: tokens of the step's answers;
# used [N]: whether an answer has a loss. Each answer's mean, then the mean over answers:
def per_answer(counts, used, cfg):
    return used / (len(counts) * counts)


def per_answer_sum(counts, used, cfg):      # each answer's sum, then the mean over answers
    return used / len(counts)


def per_limit(counts, used, cfg):       # a constant, which does not favor short wrong answers
    return used / (len(counts) * cfg.max_tokens)


def per_token(counts, used, cfg):       # the mean over all tokens of the step
    return used / max(1, counts[used].sum())


class Method(NamedTuple):
    """advantage: (rewards, costs) -> advantages, float64 [prompts, answers]; weight: see above.

    ratio: of the new to the old probability: of each 'token', of the whole 'answer', or 'mean',
    the geometric mean over the answer's tokens
    clip_high: the value that cfg.clip_high = None stands for
    """
    advantage: Callable | None
    weight: Callable
    ratio: str = 'token'
    clip_high: float | None = None


RL_METHODS = {
    'rloo': Method(leave_one_out, per_answer_sum, ratio='answer'),  # Ahmadian 2024 (2402.14740)
    'grpo': Method(standardized, per_answer),                       # Shao 2024 (2402.03300)
    'dr_grpo': Method(centered, per_limit),                         # Liu 2025 (2503.20783)
    # Yu 2025 (2503.14476), with the settings resample and soft_overlong
    'dapo': Method(standardized, per_token, clip_high=0.28),
    'gspo': Method(standardized, per_answer, ratio='mean'),         # Zheng 2025 (2507.18071)
    'ppo': Method(None, per_answer),                                # Schulman 2017 (1707.06347)
}


def generalized_advantages(rewards, values, counts, cfg):
    """Return A_t = delta_t + discount gae_lambda A_{t+1}, float64 [n]. Schulman 2016 (1506.02438).

    delta_t = r_t + discount V_{t+1} - V_t. rewards, values: [n], the tokens of the answers one
    after another, counts [N] of each; after an answer's last token V and A are 0.
    """
    begin, advantages = np.cumsum(counts) - counts, np.zeros(len(values))
    following, advantage = np.zeros((2, len(counts)))
    for t in reversed(range(max(counts))):
        here = counts > t
        at = begin[here] + t
        delta = rewards[at] + cfg.discount * following[here] - values[at]
        advantage[here] = delta + cfg.discount * cfg.gae_lambda * advantage[here]
        advantages[at], following[here] = advantage[here], values[at]
    return advantages


def whitened(x, counts):
    """Return x [n] with mean 0 and variance 1 in each of its parts, of `counts` numbers."""
    parts = np.split(x, np.cumsum(counts)[:-1])
    return np.concatenate([part / np.sqrt(part.var(ddof=len(part) > 1) + 1e-8)
                           for part in map(deviation, parts)])


# ---- Losses of tokens ----------------------------------------------------------------------------

def clipped_loss(log_ratio, advantage, low, high):
    """max(-A ratio, -A clip(ratio, 1 - low, 1 + high)). PPO, Schulman 2017, eq. 7."""
    ratio = log_ratio.exp()
    return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high))


def k3(log_p, reference):
    """e^-d - 1 + d with d = log p - log ref: an estimate of KL(policy, reference), never negative.

    At tokens drawn from the policy its expected gradient is that of KL(reference, policy) for the
    next token, after the tokens that were drawn.
    """
    d = log_p - reference
    return torch.expm1(-d) + d


def policy_loss(log_p, column, answers, tokens, cfg):
    """Return the loss [n] of some answers' tokens, their ratios, and whether these are clipped.

    column: {name: [n]}; without `old`, this is the first update, whose ratios are 1
    tokens: those of whole answers
    """
    def shared(x):      # x [N], of each answer, in equal parts over its tokens
        return (x / answers.counts)[answers.answer[tokens]]

    method, old = RL_METHODS[cfg.method], column.get('old', log_p.detach())
    high = next(x for x in (cfg.clip_high, method.clip_high, cfg.clip) if x is not None)
    log_ratio = log_p - old
    of_answer = answers.sums(log_ratio, tokens)
    if method.ratio == 'mean':
        log_ratio = shared(of_answer)
    elif method.ratio == 'answer':
        log_ratio = of_answer[answers.answer[tokens]]
    loss, ratio = clipped_loss(log_ratio, column['advantage'], cfg.clip, high), log_ratio.exp()
    clipped = loss > -column['advantage'] * ratio       # the gradient is 0
    if method.ratio == 'answer':
        loss = loss / answers.counts[answers.answer[tokens]]
    if cfg.kl == 'k3':
        loss = loss + cfg.kl_coef * k3(log_p, column['reference'])
    elif cfg.kl == 'loss':
        # the gradient of KL(policy, reference) of whole answers is E[log(p / ref) dlog p]: a token
        # also decides what the KL of later ones will be
        kl = answers.sums((log_p - column['reference']).detach(), tokens)
        loss = loss + cfg.kl_coef * shared(of_answer.exp() * kl)
    return loss, ratio.detach(), clipped


def clipped_value_loss(value, old, returns, clip):
    """max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2."""
    clipped = old + (value - old).clamp(-clip, clip)
    return torch.maximum((value - returns).square(), (clipped - returns).square()) / 2


# ---- The stage -----------------------------------------------------------------------------------

def check_rollouts(cfg):
    """Raise ConfigError for unusable values; `align.check_align_config` checks the others."""
    task = WRITTEN_TASKS.get(cfg.reward.partition(':')[2])
    # `load_reward` refuses rlcr of such a task
    if task and task.runs_code and not cfg.run_code and not cfg.reward.startswith('rlcr:'):
        raise ConfigError(f'reward = {cfg.reward!r} runs the programs that the model writes: read '
                          f'docs/running_code.md, then allow it with --run_code')
    require_range(cfg, 1, 10 ** 6, 'max_tokens', 'updates', 'decode_batch', 'lost_accumulation')
    require_range(cfg, 1 if cfg.method == 'ppo' else 2, 10 ** 6, 'group_size')
    require_range(cfg, 0, cfg.max_tokens, 'soft_overlong')
    require_range(cfg, 0, 100, 'resample')
    require_range(cfg, 0, 1, 'clip', 'discount', 'gae_lambda')
    require_range(cfg, 0, 1e3, 'clip_high', 'entropy_coef', 'kl_coef', 'value_clip', 'value_coef')
    require_range(cfg, 1e-6, 1e6, 'kl_target', 'kl_horizon')
    if cfg.resample and cfg.group_size == 1:
        raise ConfigError(f'resample = {cfg.resample} replaces prompts whose answers all have '
                          f'equal rewards, which is every prompt with group_size = 1')
    if cfg.kl_target and cfg.kl != 'reward':
        raise ConfigError(f'kl_target = {cfg.kl_target} adapts the weight of the KL in the reward; '
                          f"set kl = 'reward'")
    if cfg.kl_target and cfg.batch_size * cfg.group_size >= 5 * cfg.kl_horizon:
        raise ConfigError(f'kl_horizon = {cfg.kl_horizon}: one step of batch_size times group_size '
                          f'= {cfg.batch_size * cfg.group_size} answers could make kl_coef 0 or '
                          f'negative; it must be above a fifth of them')
    if cfg.kl_target and not cfg.kl_coef:
        raise ConfigError('kl_target multiplies kl_coef by a factor, and kl_coef = 0 stays 0; set '
                          'kl_coef above 0')
    if cfg.batch_size * cfg.group_size % cfg.lost_accumulation:
        raise ConfigError(f'lost_accumulation = {cfg.lost_accumulation} does not divide batch_size '
                          f'times group_size, {cfg.batch_size * cfg.group_size}')
    if cfg.max_tokens >= cfg.max_length:
        raise ConfigError(f'max_tokens = {cfg.max_tokens} leaves no room for a prompt in '
                          f'max_length = {cfg.max_length}')
    if world_size() > 1:
        raise ConfigError(f'method = {cfg.method!r} generates its answers on one GPU; start it '
                          f'without torchrun')


class Rollouts:
    """The stage of a run of train.py that learns from rewards of answers that it generates."""

    tokenizer_files = staticmethod(tokenizer_files)

    def load_sequences(self, cfg, tokenizer):
        """Return (prompts, indices of those to train on, indices of the held-out ones)."""
        device = pick_device(cfg.device)
        self.reward = load_reward(os.path.expanduser(cfg.reward), device,
                                  pick_dtype(cfg.dtype, device), cfg.template)
        self.tokenizer, self.prompts = tokenizer, load_prompts(
            cfg.data, tokenizer, template=cfg.template, max_length=cfg.max_length - cfg.max_tokens,
            add_bos=begins_with_bos(tokenizer, cfg.add_bos), instruction=cfg.instruction,
            digest=self.reward.digest, check=self.reward.check, revision=cfg.data_revision,
            on_bad_row=cfg.on_bad_row)
        return train.split_sequences(cfg, self.prompts)

    def build_model(self, cfg, config, base, device):
        """Return the model to train; the reference is this model without LoRA, or a second copy."""
        model, self.device = build_model(cfg, config, base, device), device
        self.model = self.reference = model
        if cfg.kl != 'none' and not cfg.lora:
            # parameters keep requires_grad, which selects the kernels of training
            self.reference = build_model(cfg, config, base, device)
        if cfg.method == 'ppo':
            model.value_head = torch.nn.Parameter(torch.zeros(model.head.shape[1], device=device))
        # a buffer, so that checkpoints hold it
        model.register_buffer('kl_coef', torch.tensor(cfg.kl_coef, dtype=torch.float64))
        return model

    def pack_batch(self, cfg, sequences, chosen, multiple):
        """Return the prompts' indices: the answers are generated later, at their step."""
        return chosen

    def count_rows(self, cfg, sequences, chosen):
        """Return the packed rows of a step whose answers have half of their greatest length."""
        tokens = sum(len(sequences[i][0]) + cfg.group_size * cfg.max_tokens / 2 for i in chosen)
        return math.ceil(tokens / cfg.pack_len)

    def batches(self, cfg, sequences, training, first, until, multiple, pack_batch):
        """Yield (indices of the prompts, packed answers) of each step, generated at that step."""
        order = train.batches(cfg, sequences, training, first, until, multiple, pack_batch)
        for step, (chosen, _) in enumerate(order, first):
            started = time.perf_counter()
            chosen, answers, rewards = self.rollout(cfg, chosen, training, step)
            sampled = time.perf_counter()
            if step == first:
                print(f'first answer, with reward {rewards[0, 0]:g}:')
                print('    ' + answers[0][0].text[:1000].replace('\n', '\n    '))
            packed = self.pack(cfg, chosen, answers, rewards, multiple)
            packed['measured'] |= {'rollout_s': sampled - started,
                                   'scoring_s': time.perf_counter() - sampled}
            yield chosen, packed | {'step': step}

    def rollout(self, cfg, chosen, training, step):
        """Return (prompts, answers, rewards) of a step, which depend on it and the weights alone.

        Prompts whose answers all have equal rewards have no advantages. As in DAPO they are
        replaced, at most cfg.resample times; the others are drawn from all prompts in `training`.
        """
        answers, rewards = [None] * len(chosen), np.zeros((len(chosen), cfg.group_size))
        chosen, new = chosen.copy(), np.arange(len(chosen))
        seeds = np.random.SeedSequence([cfg.seed, step]).generate_state(1 + cfg.resample, np.uint64)
        for trial, seed in enumerate((seeds >> 1).tolist()):
            if trial:
                others = np.random.default_rng([cfg.seed, step, trial]).permutation(training)
                chosen[new] = np.resize(others, len(new))
            groups, rewards[new] = self.sample(cfg, chosen[new], seed, cfg.group_size)
            for i, group in zip(new, groups, strict=True):
                answers[i] = group
            new = np.flatnonzero(rewards.max(1) == rewards.min(1))
            if not len(new):
                break
        return chosen, answers, rewards

    def sample(self, cfg, chosen, seed, n):
        """Return (n Answers to each prompt, their rewards float64 [prompts, n])."""
        sampling = Sampling(n=n, max_tokens=cfg.max_tokens, seed=seed, batch_size=cfg.decode_batch)
        ids = [self.prompts[i][0].tolist() for i in chosen]
        try:
            done = dict(generate(self.model, ids, sampling, self.tokenizer, self.prompts.stop))
        except FloatingPointError as error:
            raise TrainingError(f'prompt {error.args[0] + 1} of a step: the model in training '
                                f'gives NaN or infinite logits; lower lr; {advice(cfg.out_dir)}'
                                ) from error
        answers = [done[i] for i in range(len(ids))]
        rewards = self.reward.scores([self.prompts.messages[i] for i in chosen],
                                     [[answer.text for answer in group] for group in answers],
                                     [self.prompts.rows[i] for i in chosen])
        if cfg.truncated == 'penalize':
            cut = np.array([[answer.truncated for answer in group] for group in answers])
            rewards[cut] = cfg.penalty
        if cfg.soft_overlong:
            lengths = np.array([[len(answer.tokens) for answer in group] for group in answers])
            rewards += soft_overlong(lengths, cfg)
        return answers, rewards

    def pack(self, cfg, chosen, answers, rewards, multiple):
        """Return the packed rows of a step's answers with all that the loss needs.

        Besides what `pack_rollouts` returns: `columns`, a number per answer token; `measured`,
        means over the answers; and `n_supervised`, the number of tokens that have a loss.
        """
        packed = pack_rollouts([self.prompts[i][0].tolist() for i in chosen],
                               [[answer.tokens for answer in group] for group in answers],
                               cfg.pack_len, multiple)
        group = [answers[i][j] for i, j in packed['where']]
        measured = {'reward': rewards.mean(), 'length': packed['counts'].mean(),
                    'entropy': np.concatenate([answer.entropies for answer in group]).mean(),
                    'truncated': np.mean([answer.truncated for answer in group])}
        if cfg.group_size > 1:
            measured['equal'] = np.mean(rewards.max(1) == rewards.min(1))
        columns = {}
        if cfg.updates > 1 or cfg.kl == 'reward' or cfg.method == 'ppo':
            columns['old'], columns['value'] = self.log_probs(self.model, packed, cfg)
            sampled = np.concatenate([answer.log_probs for answer in group])
            measured['mismatch'] = np.abs(columns['old'] - sampled).mean()
        if cfg.kl != 'none':
            with without_adapters(self.model):
                columns['reference'], _ = self.log_probs(self.reference, packed, cfg)
        if cfg.kl_target:
            measured['kl_coef'] = self.model.kl_coef.item()
        self.assign_credit(cfg, packed, columns, rewards[tuple(packed['where'].T)])
        used = np.array([cfg.truncated != 'mask' or not answer.truncated for answer in group])
        weight = RL_METHODS[cfg.method].weight(packed['counts'], used, cfg)
        columns['weight'] = np.repeat(weight, packed['counts'])
        return packed | {'columns': columns, 'measured': measured,
                         'n_supervised': max(1, packed['counts'][used].sum())}

    def assign_credit(self, cfg, packed, columns, rewards):
        """Add the column `advantage` and, for PPO, `returns`; rewards float64 [N], one per answer.

        The KL in the reward is log p - log ref of the token that was drawn.
        """
        counts, where = packed['counts'], packed['where']
        begin, costs = np.cumsum(counts) - counts, np.zeros(counts.sum())
        if cfg.kl == 'reward':
            costs = self.model.kl_coef.item() * (columns['old'] - columns['reference'])
        if cfg.method == 'ppo':
            costs[begin + counts - 1] -= rewards
            advantage = generalized_advantages(-costs, columns['value'], counts, cfg)
            columns['returns'] = advantage + columns['value']
            columns['advantage'] = whitened(
                advantage, counts if cfg.whiten == 'response' else [len(advantage)])
            return
        tables = np.zeros((2, *where.max(0) + 1))
        tables[:, *where.T] = rewards, np.add.reduceat(costs, begin)
        advantage = RL_METHODS[cfg.method].advantage(*tables)[tuple(where.T)]
        columns['advantage'] = np.repeat(advantage, counts)

    def log_probs(self, model, packed, cfg):
        """Return float64 [2, n] of the answer tokens: log-probabilities, and values before them.

        The values are 0 for a model without a value head.
        """
        parts = []
        for _, log_p, hidden in answer_log_probs(model, packed, cfg, self.device):
            value = (values_of(model, hidden) if hasattr(model, 'value_head') else
                     torch.zeros_like(log_p))
            parts.append(torch.stack((log_p, value.detach())).double().cpu().numpy())
        return np.concatenate(parts, axis=1)

    def train_step(self, model, optimizer, packed, cfg, device, objective):
        """Take cfg.updates optimizer steps; return the means of their metrics."""
        total = []
        for update in range(cfg.updates):
            columns, answer = packed['columns'], packed['answer']
            if cfg.lost_accumulation > 1:
                order = np.random.default_rng([cfg.seed, packed['step'], update]).permutation(
                    len(packed['counts']))
                last = order % cfg.lost_accumulation == cfg.lost_accumulation - 1
                columns = columns | {'weight': columns['weight'] * last[answer]}
            total.append(train.train_step(model, optimizer, packed | {'columns': columns}, cfg,
                                          device, objective))
        values = {name: torch.stack([step[name] for step in total]).mean() for name in total[0]}
        if cfg.kl_target:       # of the answers, before these updates
            kl = (packed['columns']['old'] - packed['columns']['reference']).sum()
            error = np.clip(kl / len(packed['counts']) / cfg.kl_target - 1, -0.2, 0.2)
            model.kl_coef *= 1 + error * len(packed['counts']) / cfg.kl_horizon
        norm = values.pop('grad_norm')
        return values | {name: torch.tensor(value, dtype=torch.float32, device=norm.device)
                         for name, value in packed['measured'].items()} | {'grad_norm': norm}

    def token_loss(self, packed, cfg):
        """Return the function (model, rows, inputs, targets) -> (loss, {name: metric})."""
        n_tokens, n_answers = packed['begin'][-1], len(packed['counts'])

        def compute(model, rows, inputs, _):
            answers, measured = Answers(packed, rows, model.head.device), {}
            columns = {name: answers.on_device(column[answers.part].astype(np.float32))
                       for name, column in packed['columns'].items()}

            def function(log_p, entropy, tokens):
                column = {name: x[tokens] for name, x in columns.items()}
                loss, ratio, clipped = policy_loss(log_p, column, answers, tokens, cfg)
                measured.update(ratio=ratio.sum() / n_tokens,
                                clip_fraction=clipped.sum() / n_tokens)
                if cfg.kl != 'none':
                    measured['kl'] = (log_p.detach() - column['reference']).sum() / n_answers
                loss = (loss * column['weight']).sum()
                if cfg.entropy_coef:    # the mean over the tokens that have a loss
                    bonus = (entropy * (column['weight'] > 0)).sum() / packed['n_supervised']
                    loss = loss - cfg.entropy_coef * bonus
                return loss

            hidden = answers.gather(model(*inputs))
            loss, _ = fused_loss(hidden, model.head, answers.token,
                                 joint(function, entropy=cfg.entropy_coef > 0), reduction='sum',
                                 group=torch.from_numpy(packed['answer'][answers.part]),
                                 **loss_options(model, cfg))
            if cfg.method == 'ppo':
                errors = clipped_value_loss(values_of(model, hidden), columns['value'],
                                            columns['returns'], cfg.value_clip)
                measured['value_loss'] = (errors.detach() * columns['weight']).sum()
                loss = loss + cfg.value_coef * (errors * columns['weight']).sum()
            return loss, measured

        return compute

    def validation_loss(self, model, held_out, cfg, device):
        """Return {val_reward, val_length} of one answer to each held-out prompt."""
        answers, rewards = self.sample(cfg, held_out, cfg.seed, 1)
        return {'val_reward': rewards.mean(),
                'val_length': np.mean([len(answer.tokens) for answer, in answers])}


def values_of(model, hidden):
    """Return the values float32 [n] of states, from the hidden states [n, D]."""
    return hidden.float() @ model.value_head


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


def answer_log_probs(model, packed, cfg, device):
    """Yield (Answers, float32 [n] log-probability of each token, hidden states) per micro-batch.

    Without gradients, but with the kernels of training: ratios begin at 1 and margins at 0.
    """
    for rows, inputs, _ in train.micro_batches(packed, cfg, device):
        answers = Answers(packed, rows, device)
        hidden = answers.gather(model(*inputs)).detach()
        nll = fused_loss(hidden, model.head.detach(), answers.token, cross_entropy(),
                         softcap=model.softcap, reduction='none')[1]
        yield answers, -nll, hidden
