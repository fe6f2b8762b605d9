"""Advantages and divisors of the methods with rewards: the table RL_METHODS.

`rewards` and `costs` are float64 [prompts, answers]. A cost is the weighted KL of an answer if
kl = 'reward', in nats; else 0.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np


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
    """Return the centered rewards by their standard deviation, minus the centered costs."""
    # divided by their own, the costs of answers with equal rewards would be noise of full size
    std = deviation(rewards).std(1, ddof=1, keepdims=True)
    return centered(centered(rewards) / (std + 1e-4), costs)


def soft_overlong(lengths, cfg):
    """Return the penalty: linear over soft_overlong tokens, -1 at max_tokens. DAPO, eq. 13."""
    return -np.clip((lengths - cfg.max_tokens) / cfg.soft_overlong + 1, 0, 1)


# The weight of each answer's token losses, [N]. counts [N]: tokens; used [N]: whether with a loss

def per_answer(counts, used, cfg):          # each answer's mean, then the mean over answers
    return used / (len(counts) * counts)


def per_answer_sum(counts, used, cfg):      # each answer's sum, then the mean over answers
    return used / len(counts)


def per_limit(counts, used, cfg):       # a constant, which does not favor short wrong answers
    return used / (len(counts) * cfg.max_tokens)


def per_token(counts, used, cfg):       # the mean over all tokens of the step
    return used / max(1, counts[used].sum())


class Method(NamedTuple):
    advantage: Callable | None      # (rewards, costs) -> advantages, float64 [prompts, answers]
    weight: Callable                # see above
    ratio: str = 'token'            # or of the 'answer', or the geometric 'mean' over its tokens
    clip_high: float | None = None      # the value that cfg.clip_high = None stands for
    surrogate: str = 'clip'         # makes a loss of both, a name in `objectives.SURROGATES`


RL_METHODS = {
    'rloo': Method(leave_one_out, per_answer_sum, ratio='answer'),  # Ahmadian 2024 (2402.14740)
    'grpo': Method(standardized, per_answer),                       # Shao 2024 (2402.03300)
    'dr_grpo': Method(centered, per_limit),                         # Liu 2025 (2503.20783)
    # Yu 2025 (2503.14476), with the settings resample and soft_overlong
    'dapo': Method(standardized, per_token, clip_high=0.28),
    'gspo': Method(standardized, per_answer, ratio='mean'),         # Zheng 2025 (2507.18071)
    # MiniMax-M1 (2506.13585); weights of at most 5, as in ScaleRL (2510.13786)
    'cispo': Method(standardized, per_token, clip_high=4.0, surrogate='cispo'),
    'sapo': Method(standardized, per_answer, surrogate='sapo'),     # Gao 2025 (2511.20347)
    'ppo': Method(None, per_answer),                                # Schulman 2017 (1707.06347)
}


def generalized_advantages(rewards, values, counts, cfg):
    """Return A_t = delta_t + discount gae_lambda A_{t+1}, float64 [n]. Schulman 2016 (1506.02438).

    delta_t = r_t + discount V_{t+1} - V_t. rewards, values: [n], of answers with counts [N] tokens;
    after an answer's last token V and A are 0.
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


def whitened(x):
    """Return x [n] with mean 0 and variance 1."""
    x = deviation(x)
    return x / np.sqrt(x.var(ddof=len(x) > 1) + 1e-8)


def credit(packed, rewards, old, reference, value, cfg, kl_coef):
    """Return (advantages, returns) of the answer tokens, float64 [n]; returns of PPO, else None.

    packed: a PackedAnswers; rewards: float64 [N], one per answer; the others as in PackedRollouts.
    The KL in the reward is log p - log ref of the token that was drawn.
    """
    counts, where = packed.counts, packed.where
    begin = np.cumsum(counts) - counts
    costs = kl_coef * (old - reference) if cfg.kl == 'reward' else np.zeros(counts.sum())
    if cfg.method == 'ppo':
        gains = -costs
        gains[begin + counts - 1] += rewards
        advantage = generalized_advantages(gains, value, counts, cfg)
        return whitened(advantage), advantage + value
    tables = np.zeros((2, *where.max(0) + 1))
    tables[:, *where.T] = rewards, np.add.reduceat(costs, begin)
    advantage = RL_METHODS[cfg.method].advantage(*tables)[tuple(where.T)]
    return np.repeat(advantage, counts), None


CORRECTIONS = 'token_truncate', 'token_mask', 'answer_truncate', 'answer_mask'


def correction(log_ratio, counts, kind, most):
    """Return the importance weight [n] of each token of a rollout; it multiplies the advantage.

    log_ratio: float64 [n], log-probability in training minus that in the rollout, of answers with
    `counts` [N] tokens. kind: of CORRECTIONS. The ratio is that of the token, or of the whole
    answer; above `most` it is cut to it (truncated importance sampling) or becomes 0 (masked).
    """
    level, bound = kind.split('_')
    if level == 'answer':
        log_ratio = np.repeat(np.add.reduceat(log_ratio, np.cumsum(counts) - counts), counts)
    ratio = np.exp(np.minimum(log_ratio, 700))
    return np.minimum(ratio, most) if bound == 'truncate' else np.where(ratio > most, 0, ratio)
