"""Tune a language model on preferences or rewards: DPO, PPO, GRPO, their relatives, reward models.

    python align.py configs/dpo_tulu3_8b.py --lr=1e-6
    python align.py configs/grpo_gsm8k_1b.py --reward=my_reward.py
    python align.py --help

A run is one of train.py with other data and another loss: the same settings, folders, checkpoints
and reports. A row is a tree, [prompt][chosen][rejected], so the prompt is computed once and both
answers are in one micro-batch.

Every loss here is a function of the log-probabilities s of whole answers. Its derivatives by s are
the weights of the answer's tokens in a cross-entropy, and fused_ce.py computes them between the two
kernels of a chunk (`joint`): no logits are stored. The log-probabilities of the reference, the
model as it is before training, are computed once and cached.

Reinforcement learning generates its answers: a row is [prompt][answer 1..G]. The weight of each
token in the loss follows from the rewards, by one advantage function and one divisor per method;
PPO has a value head in place of the former.
"""

from runtime import cli

if __name__ == '__main__':
    cli.begin()

import contextlib
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import metrics
import train
from data.preferences import load_preferences, pack_rankings
from data.rl import load_prompts, load_reward, pack_rollouts
from data.tokenizer import begins_with_bos
from fused_ce import cross_entropy, fused_loss, joint
from generate import generate
from model import LoRALinear
from results.report import print_report
from runtime import checkpoint
from runtime.config import load_config, require_range
from runtime.device import pick_device, pick_dtype, to_device
from runtime.errors import ConfigError, TrainingError
from runtime.ownership import temporary
from runtime.parallel import world_size
from runtime.resume import advice
from runtime.sampling import Sampling

# ---- Losses of pairs -----------------------------------------------------------------------------


class Pairs(NamedTuple):
    """Float32 [pairs] of the better and the worse answer of each pair."""
    s_w: Tensor     # log-probability of the better answer
    s_l: Tensor     # of the worse one
    n_w: Tensor     # number of tokens
    n_l: Tensor
    r_w: Tensor     # log-probability by the reference
    r_l: Tensor

    def margin(self, cfg):
        """Return the difference of the implicit rewards, divided by beta."""
        better, worse = self.s_w - self.r_w, self.s_l - self.r_l
        return better / self.n_w - worse / self.n_l if cfg.per_token else better - worse


def dpo(pairs, cfg):
    """-log sigmoid(beta d). Rafailov 2023; with per_token as in Tulu 3 (2411.15124)."""
    return -F.logsigmoid(cfg.beta * pairs.margin(cfg))


def cdpo(pairs, cfg):
    """DPO for labels of which a share is wrong: its minimum is sigmoid(beta d) = 1 - label_noise.

    Mitchell 2023.
    """
    x, e = cfg.beta * pairs.margin(cfg), cfg.label_noise
    return -(1 - e) * F.logsigmoid(x) - e * F.logsigmoid(-x)


def robust(pairs, cfg):
    """DPO's loss corrected for wrong labels: unbiased, without a minimum. Chowdhury 2024."""
    x, e = cfg.beta * pairs.margin(cfg), cfg.label_noise
    return (-(1 - e) * F.logsigmoid(x) + e * F.logsigmoid(-x)) / (1 - 2 * e)


def ipo(pairs, cfg):
    """(d - 1 / (2 beta))^2. Azar 2023, where beta is called tau."""
    return (pairs.margin(cfg) - 1 / (2 * cfg.beta)).square()


def hinge(pairs, cfg):
    """max(0, 1 - beta d). SLiC, Zhao 2023."""
    return F.relu(1 - cfg.beta * pairs.margin(cfg))


def simpo(pairs, cfg):
    """-log sigmoid(beta (s_w / n_w - s_l / n_l) - gamma), without a reference. Meng 2024."""
    return -F.logsigmoid(cfg.beta * (pairs.s_w / pairs.n_w - pairs.s_l / pairs.n_l) - cfg.gamma)


def orpo(pairs, cfg):
    """NLL of the better answer plus beta times -log sigmoid of the log odds ratio. Hong 2024."""
    def log_odds(s, n):
        u = (s / n).clamp(max=-1e-6)        # at u = 0 the odds are infinite
        return u - torch.log(-torch.expm1(u))
    ratio = log_odds(pairs.s_w, pairs.n_w) - log_odds(pairs.s_l, pairs.n_l)
    return -pairs.s_w / pairs.n_w - cfg.beta * F.logsigmoid(ratio)


# a loss of your own is a function (Pairs, AlignConfig) -> loss [pairs] and a name here
PAIR_LOSSES = {loss.__name__: loss for loss in (dpo, cdpo, robust, ipo, hinge, simpo, orpo)}
NO_REFERENCE = {'simpo', 'orpo', 'reward'}

# ---- Reinforcement learning: advantages and divisors ---------------------------------------------


def centered(rewards):
    """Return rewards [prompts, answers] minus the mean over the answers to each prompt."""
    return rewards - rewards.mean(1, keepdims=True)


def leave_one_out(rewards):
    """Return each reward minus the mean of the others'."""
    return centered(rewards) * rewards.shape[1] / (rewards.shape[1] - 1)


def standardized(rewards):
    """Return the centered rewards, divided by their standard deviation."""
    return centered(rewards) / (rewards.std(1, ddof=1, keepdims=True) + 1e-4)


# The weights of the losses of each answer's tokens. counts [N]: tokens of the step's answers;
# used [N]: whether an answer has a loss. Each answer's mean, then the mean over answers:
def per_answer(counts, used, cfg):
    return used / (len(counts) * counts)


def per_limit(counts, used, cfg):       # a constant, which does not favor short wrong answers
    return used / (len(counts) * cfg.max_tokens)


def per_token(counts, used, cfg):       # the mean over all tokens of the step
    return used / max(1, counts[used].sum())


class Method(NamedTuple):
    """advantage: rewards [prompts, answers] -> advantages, float64; weight: see above.

    ratio: that of the probabilities by the new and the old policy: of each 'token', of the whole
    'answer', or 'mean', the geometric mean over the answer's tokens
    clip_high: in place of cfg.clip_high = None
    """
    advantage: Callable | None
    weight: Callable
    ratio: str = 'token'
    clip_high: float | None = None


RL_METHODS = {
    'rloo': Method(leave_one_out, per_answer, ratio='answer'),      # Ahmadian 2024 (2402.14740)
    'grpo': Method(standardized, per_answer),                       # Shao 2024 (2402.03300)
    'dr_grpo': Method(centered, per_limit),                         # Liu 2025 (2503.20783)
    # Yu 2025 (2503.14476), without resampling of equal rewards and without the penalty of length
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
    return np.concatenate([(part - part.mean()) / np.sqrt(part.var(ddof=len(part) > 1) + 1e-8)
                           for part in parts])


def clipped_value_loss(value, old, returns, clip):
    """max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2."""
    clipped = old + (value - old).clamp(-clip, clip)
    return torch.maximum((value - returns).square(), (clipped - returns).square()) / 2


def clipped_loss(log_ratio, advantage, low, high):
    """max(-A ratio, -A clip(ratio, 1 - low, 1 + high)). PPO, Schulman 2017, eq. 7."""
    ratio = log_ratio.exp()
    return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high))


def k3(log_p, reference):
    """e^-d - 1 + d with d = log p - log ref: an estimate of KL(policy, reference), never negative.

    Its gradient is that of KL(reference, policy); times the ratio, that of KL(policy, reference).
    """
    d = log_p - reference
    return torch.expm1(-d) + d


@dataclass
class AlignConfig(train.TrainConfig):
    # keys of train.py with other defaults
    model: str = 'allenai/Llama-3.1-Tulu-3-8B-SFT'      # also the reference
    data: str = 'allenai/llama-3.1-tulu-3-8b-preference-mixture'
    lora_dropout: float = 0.0                 # dropout would make policy and reference differ
    max_length: int = 2048                    # tokens of the prompt with one answer
    pack_len: int = 4096                      # tokens of a row, and of a prompt with all answers
    batch_size: int = 128                     # prompts per optimizer step
    epochs: float = 1.0
    lr: float = 5e-7
    warmup: float = 0.1
    # preferences
    method: Literal[*PAIR_LOSSES, 'reward', *RL_METHODS] = 'dpo'
    beta: float = 0.1                         # weight of the margin; in orpo of the odds ratio
    per_token: bool = False                   # margins of means per token: Tulu 3, with beta = 5
    label_noise: float = 0.1                  # cdpo and robust: share of the pairs that are swapped
    gamma: float = 1.0                        # simpo: the margin that is wanted
    centering: float = 0.0                    # reward: weight of (r_w + r_l)^2, such as 0.01
    # reinforcement learning
    # exact:TASK or rlcr:TASK, such as exact:gsm8k; the folder of a reward model; or a Python file,
    # which is executed: it defines reward(prompt, answer, row) -> number
    reward: str = ''
    instruction: str = ''                     # follows each prompt after a blank line
    group_size: int = 8                       # answers to each prompt
    max_tokens: int = 256                     # of an answer; max_length - max_tokens of a prompt
    decode_batch: int = 256                   # answers that are generated at once, at most
    # answers cut off at max_tokens: no loss; score them as they are; or reward = penalty
    truncated: Literal['mask', 'score', 'penalize'] = 'mask'
    penalty: float = 0.0
    updates: int = 1                          # optimizer steps with the answers of one rollout
    clip: float = 0.2                         # the ratio of probabilities stays above 1 - clip
    clip_high: float | None = None            # and below 1 + clip_high; None: clip, dapo 0.28
    entropy_coef: float = 0.0                 # weight of a bonus for the mean entropy of a token
    # KL to the model before training: none; logged only; in the reward; in the loss with the right
    # gradient; or k3 in the loss as in GRPO's paper
    kl: Literal['none', 'logged', 'reward', 'loss', 'k3'] = 'none'
    kl_coef: float = 0.05
    kl_target: float | None = None            # nats per answer; kl_coef adapts to it (Ziegler 2019)
    kl_horizon: int = 10000                   # n answers change it by at most 0.2 n / kl_horizon
    # ppo
    discount: float = 1.0
    gae_lambda: float = 0.95
    value_clip: float = 0.2                   # largest change of a value in the loss
    value_coef: float = 0.1                   # weight of the loss of the values
    whiten: Literal['batch', 'response'] = 'batch'      # response: as in TRL before 0.5.0
    lost_accumulation: int = 1                # of so many answers only the last one has a gradient:
    #                                           8 is what TRL before 0.4.5 did with 8 micro-batches


# keys of train.py that say how to load and score conversations
UNUSED = ('from_scratch', 'shape', 'data_kind', 'answers', 'train_on_inputs', 'loss', 'smoothing',
          'loss_reduction')


def check_align_config(cfg):
    """Raise ConfigError for unusable values; train.py checks its own."""
    defaults = AlignConfig()
    for key in UNUSED:
        if getattr(cfg, key) != getattr(defaults, key):
            raise ConfigError(f'{key} = {getattr(cfg, key)!r} is a setting of train.py; '
                              f'align.py has no use for it')
    require_range(cfg, 1e-6, 1e3, 'beta')
    require_range(cfg, 0, 1e3, 'gamma', 'centering')
    if cfg.method == 'reward' and cfg.eval:
        raise ConfigError('a reward model has no output matrix, so eval cannot be set')
    if not 0 <= cfg.label_noise < 0.5:
        raise ConfigError(f'label_noise = {cfg.label_noise}; it must be at least 0 and below 0.5')
    if cfg.lora_dropout and cfg.method not in NO_REFERENCE:
        raise ConfigError(f'lora_dropout = {cfg.lora_dropout}: the policy would differ from its '
                          f'reference at random; set it to 0')
    if bool(cfg.reward) != (cfg.method in RL_METHODS):
        raise ConfigError(f'method = {cfg.method!r} and reward = {cfg.reward!r}: '
                          f'{", ".join(RL_METHODS)} need a reward, and only they')
    require_range(cfg, 1, 10 ** 6, 'max_tokens', 'updates', 'decode_batch', 'lost_accumulation')
    require_range(cfg, 1 if cfg.method == 'ppo' else 2, 10 ** 6, 'group_size')
    require_range(cfg, 0, 1, 'clip', 'discount', 'gae_lambda')
    require_range(cfg, 0, 1e3, 'clip_high', 'entropy_coef', 'kl_coef', 'value_clip', 'value_coef')
    require_range(cfg, 1e-6, 1e6, 'kl_target', 'kl_horizon')
    if cfg.kl_target and cfg.kl != 'reward':
        raise ConfigError(f'kl_target = {cfg.kl_target} adapts the weight of the KL in the reward; '
                          f"set kl = 'reward'")
    if cfg.batch_size * cfg.group_size % cfg.lost_accumulation:
        raise ConfigError(f'lost_accumulation = {cfg.lost_accumulation} does not divide batch_size '
                          f'times group_size, {cfg.batch_size * cfg.group_size}')
    if cfg.reward and cfg.max_tokens >= cfg.max_length:
        raise ConfigError(f'max_tokens = {cfg.max_tokens} leaves no room for a prompt in '
                          f'max_length = {cfg.max_length}')
    if world_size() > 1:
        raise ConfigError('align.py runs on one GPU; start it without torchrun')


# ---- A run on preferences ------------------------------------------------------------------------

class Preferences:
    """The stage of a run of train.py that learns from pairs of answers: see `train.train`."""

    batches = staticmethod(train.batches)
    train_step = staticmethod(train.train_step)

    def __init__(self):
        self.sequences = self.reference = None

    def load_sequences(self, cfg, tokenizer):
        """Return (sequences, indices of those to train on, indices of the held-out ones)."""
        self.sequences = load_preferences(
            cfg.data, tokenizer, template=cfg.template, max_length=cfg.max_length,
            pack_len=cfg.pack_len, add_bos=begins_with_bos(tokenizer, cfg.add_bos),
            revision=cfg.data_revision, cache_dir=cfg.cache_dir, on_bad_row=cfg.on_bad_row,
            workers=cfg.workers or os.cpu_count())
        print_lengths(self.sequences)
        return train.split_sequences(cfg, self.sequences)

    def build_model(self, cfg, config, base, device):
        """Return the model to train; the log-probabilities of the reference are computed first."""
        model = train.build_model(cfg, config, base, device)
        if cfg.method not in NO_REFERENCE:
            self.reference = self.cached_reference(cfg, model, base, device)
        return model

    def cached_reference(self, cfg, model, base, device):
        """Return the sum of log-probabilities of each answer, float32, one list per sequence.

        The untrained model computes them with the kernels of training, so that the first margin is
        0 but for the order of sums. The cache's name says on what they depend.
        """
        key = hashlib.sha256(json.dumps([
            self.sequences.digest, checkpoint.fingerprint(base), str(model.head.dtype),
            cfg.attention, model.softcap, model.temperature]).encode()).hexdigest()[:20]
        path = Path(cfg.cache_dir, f'reference-{key}.npz')
        if not path.exists():
            sums = self.answer_sums(cfg, model, device)
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary(path) as part, open(part, 'wb') as file:
                np.savez(file, sums=np.concatenate(sums), counts=[len(s) for s in sums])
        with np.load(path) as file:
            return np.split(file['sums'], np.cumsum(file['counts'])[:-1])

    def answer_sums(self, cfg, model, device, rows_at_once=64):
        """Return the log-probabilities of the answers by the model as it is."""
        sums, order = [None] * len(self.sequences), np.argsort(-self.sequences.lengths)
        for begin in range(0, len(order), rows_at_once):
            chosen = order[begin:begin + rows_at_once]
            packed = self.pack_batch(cfg, self.sequences, chosen, cfg.micro_rows)
            total = torch.zeros(len(packed['counts']), device=device)
            for answers, log_p, _ in answer_log_probs(model, packed, cfg, device):
                total += answers.sums(log_p)
            by_tree = total.cpu().numpy()[np.lexsort(packed['where'].T[::-1])]
            sizes = np.bincount(packed['where'][:, 0])
            for i, part in zip(chosen, np.split(by_tree, np.cumsum(sizes)[:-1]), strict=True):
                sums[i] = part
        return sums

    def pack_batch(self, cfg, sequences, chosen, multiple):
        """Return the packed trees of the sequences with the indices `chosen`."""
        packed = pack_rankings([sequences[i] for i in chosen], cfg.pack_len, multiple)
        reference = [self.reference[chosen[tree]][k] if self.reference else 0.0
                     for tree, k in packed['where']]
        return packed | {'reference': np.array(reference, np.float32)}

    def token_loss(self, packed, cfg):
        """Return the function (model, rows, inputs, targets) -> (loss, {name: metric}) of a step.

        Loss and metrics are means over the prompts of the step, of means over a prompt's pairs.
        """
        pair_loss = PAIR_LOSSES[cfg.method]
        memory = None if cfg.loss_memory is None else cfg.loss_memory * 10 ** 6

        def compute(model, rows, inputs, _):
            answers, measured = Answers(packed, rows, model.head.device), {}
            w, l = answers.on_device(packed['pairs']).T         # noqa: E741
            n, r, pair_weight = answers.counts, *(
                answers.on_device(packed[key]) for key in ('reference', 'pair_weight'))

            def function(log_p, entropy, tokens):
                # called for the groups of each chunk, and in the end for all of them
                present = answers.present(tokens)
                weight = pair_weight * present[w]
                # the others, which a later call gets, must not give infinities times 0
                s = torch.where(present > 0, answers.sums(log_p, tokens), -n)
                pairs = Pairs(s[w], s[l], n[w], n[l], r[w], r[l])
                margin = pairs.margin(cfg)
                if cfg.method in NO_REFERENCE:      # the implicit reward is the mean per token
                    margin = pairs.s_w / pairs.n_w - pairs.s_l / pairs.n_l
                values = {'nll': -pairs.s_w / pairs.n_w, 'margin': cfg.beta * margin,
                          'accuracy': (margin.sign() + 1) / 2,    # 0.5 if both rewards are equal
                          'chosen': pairs.s_w, 'rejected': pairs.s_l}
                measured.update({name: (value.detach() * weight).sum()
                                 for name, value in values.items()})
                return (pair_loss(pairs, cfg) * weight).sum()

            loss, _ = fused_loss(answers.gather(model(*inputs)), model.head, answers.token,
                                 joint(function), softcap=model.softcap, reduction='sum',
                                 memory=memory, group=torch.from_numpy(
                                     packed['where'][packed['answer'][answers.part], 0]))
            return loss, measured

        return compute

    @torch.no_grad()
    def validation_loss(self, model, packed, cfg, device):
        """Return {val_loss, val_accuracy, ...}: means over the held-out prompts."""
        model.eval()
        compute, total = self.token_loss(packed, cfg), {}
        for rows, inputs, targets in train.micro_batches(packed, cfg, device):
            loss, values = compute(model, rows, inputs, targets)
            for name, value in {'loss': loss, **values}.items():
                total[f'val_{name}'] = total.get(f'val_{name}', 0) + value.item()
        model.train()
        return total


class RewardModel(Preferences):
    """The stage that trains a reward model: -log sigmoid(r_w - r_l) (Bradley and Terry 1952).

    The reward of an answer is a product of its last hidden state with a score [D], in float32. The
    saved folder is that of transformers' AutoModelForSequenceClassification with one label.
    """

    def build_model(self, cfg, config, base, device):
        """Return the model with a score of zeros, which is trained beside adapters, too."""
        model = train.build_model(cfg, config, base, device)
        model.become_reward_model()
        return model

    def pack_batch(self, cfg, sequences, chosen, multiple):
        """Return the packed trees of the sequences with the indices `chosen`."""
        return pack_rankings([sequences[i] for i in chosen], cfg.pack_len, multiple, last=True)

    def margins(self, model, packed, rows, inputs):
        """Return (r_w - r_l, r_w + r_l, weight) of the pairs in some rows."""
        answers = Answers(packed, rows, model.head.device)
        rewards = answers.sums(model.rewards(answers.gather(model.decoder(*inputs))))
        r_w, r_l = rewards[answers.on_device(packed['pairs']).T]
        weight = answers.on_device(packed['pair_weight'])
        present = answers.present()[answers.on_device(packed['pairs'][:, 0])]
        return r_w - r_l, r_w + r_l, weight * present

    def token_loss(self, packed, cfg):
        """Return the function that `Preferences.token_loss` returns, for rewards."""
        def compute(model, rows, inputs, _):
            margin, both, weight = self.margins(model, packed, rows, inputs)
            values = {'nll': F.softplus(-margin), 'margin': margin,
                      'accuracy': (margin.sign() + 1) / 2}
            loss = values['nll'] + cfg.centering * both.square()
            return (loss * weight).sum(), {
                name: (value.detach() * weight).sum() for name, value in values.items()}
        return compute

    @torch.no_grad()
    def validation_loss(self, model, packed, cfg, device):
        """Return the means over held-out prompts, and the ECE of sigmoid(r_w - r_l) over pairs."""
        values, margins = super().validation_loss(model, packed, cfg, device), []
        for rows, inputs, _ in train.micro_batches(packed, cfg, device):
            margin, _, weight = self.margins(model, packed, rows, inputs)
            margins.append(margin[weight > 0].double().cpu())
        margin = torch.cat(margins)
        return values | {'val_ece': metrics.ece(torch.sigmoid(margin.abs()).numpy(),
                                                (margin > 0).numpy())}


class Answers:
    """The answers in some rows of a batch, on a device; `pack_answers` has the fields.

    part    numpy int64 [n], numbers of the tokens in these rows, of which the others are
    at      in the flattened rows; token: on the CPU
    counts  float32 [N], of all answers of the batch
    """

    def __init__(self, packed, rows, device):
        length, begin, self.device = packed['tokens'].shape[1], packed['begin'], device
        parts = [np.arange(begin[row], begin[row + 1]) for row in rows]
        offsets = np.repeat(np.arange(len(rows)) * length, [len(part) for part in parts])
        self.part = np.concatenate(parts)
        self.at = self.on_device(packed['at'][self.part] + offsets)
        self.token = torch.from_numpy(packed['token'][self.part])
        self.answer = self.on_device(packed['answer'][self.part])
        self.counts = self.on_device(packed['counts']).float()

    def on_device(self, x):
        return to_device(torch.from_numpy(x), self.device)

    def gather(self, hidden):
        """Return the hidden states [n, D] that predict the answers' tokens, of hidden [B, T, D]."""
        return hidden.flatten(0, 1).index_select(0, self.at)

    def sums(self, x, tokens=slice(None)):
        """Return the sum [N] over each answer of x, a number for each of `tokens`."""
        return torch.zeros_like(self.counts).index_add(0, self.answer[tokens], x)

    def present(self, tokens=slice(None)):
        """Return 1 for the answers of which `tokens` are tokens, else 0: float32 [N]."""
        return torch.zeros_like(self.counts).index_fill(0, self.answer[tokens], 1)


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


def print_lengths(sequences):
    """Print the mean number of tokens of the best and of the worst answers: a bias shows here."""
    masks = [sequences[i][1] for i in range(len(sequences))]
    best = np.mean([np.count_nonzero(mask == 1) for mask in masks])
    worst = np.mean([np.count_nonzero(mask == mask[-1]) for mask in masks])
    print(f'answers: {best:.0f} tokens in the mean of the best, {worst:.0f} of the worst')


# ---- A run on rewards ----------------------------------------------------------------------------

class Rollouts:
    """The stage of a run of train.py that learns from rewards of answers that it generates."""

    def load_sequences(self, cfg, tokenizer):
        """Return (prompts, indices of those to train on, indices of the held-out ones)."""
        device = pick_device(cfg.device)
        self.reward = load_reward(os.path.expanduser(cfg.reward), device,
                                  pick_dtype(cfg.dtype, device), cfg.template)
        self.tokenizer, self.prompts = tokenizer, load_prompts(
            cfg.data, tokenizer, template=cfg.template, max_length=cfg.max_length - cfg.max_tokens,
            add_bos=begins_with_bos(tokenizer, cfg.add_bos), instruction=cfg.instruction,
            digest=self.reward.digest, revision=cfg.data_revision, on_bad_row=cfg.on_bad_row)
        return train.split_sequences(cfg, self.prompts)

    def build_model(self, cfg, config, base, device):
        """Return the model to train; its reference is itself without adapters, or a second one."""
        model, self.device = train.build_model(cfg, config, base, device), device
        self.model = self.reference = model
        if cfg.kl != 'none' and not cfg.lora:
            # with gradients, though none is computed: the kernels are those of training
            self.reference = train.build_model(cfg, config, base, device)
        if cfg.method == 'ppo':
            model.value_head = torch.nn.Parameter(torch.zeros(model.head.shape[1], device=device))
        # a buffer, so that checkpoints hold it
        model.register_buffer('kl_coef', torch.tensor(cfg.kl_coef, dtype=torch.float64))
        return model

    def pack_batch(self, cfg, sequences, chosen, multiple):
        """Return the prompts' indices: their answers depend on the weights of a later time."""
        return chosen

    def batches(self, cfg, sequences, training, first, until, multiple, pack_batch):
        """Yield (indices of the prompts, packed answers) of each step, generated at that step."""
        order = train.batches(cfg, sequences, training, first, until, multiple, pack_batch)
        for step, (chosen, _) in enumerate(order, first):
            seed = np.random.SeedSequence([cfg.seed, step]).generate_state(1, np.uint64)[0] >> 1
            started = time.perf_counter()
            answers, rewards = self.sample(cfg, chosen, int(seed), cfg.group_size)
            sampled = time.perf_counter()
            if step == first:
                print(f'first answer, with reward {rewards[0, 0]:g}:')
                print('    ' + answers[0][0].text[:1000].replace('\n', '\n    '))
            packed = self.pack(cfg, chosen, answers, rewards, multiple)
            packed['measured'] |= {'rollout_s': sampled - started,
                                   'scoring_s': time.perf_counter() - sampled}
            yield chosen, packed | {'step': step}

    def sample(self, cfg, chosen, seed, n):
        """Return (n Answers to each prompt, their rewards float64 [prompts, n])."""
        sampling = Sampling(n=n, max_tokens=cfg.max_tokens, seed=seed, batch_size=cfg.decode_batch)
        ids = [self.prompts[i][0].tolist() for i in chosen]
        try:
            done = dict(generate(self.model, ids, sampling, self.tokenizer, self.prompts.stop))
        except FloatingPointError as error:
            raise TrainingError(f'{error} of a step: the model in training gives NaN or infinite '
                                f'logits; lower lr; {advice(cfg.out_dir)}') from error
        answers = [done[i] for i in range(len(ids))]
        rewards = self.reward.scores([self.prompts.messages[i] for i in chosen],
                                     [[answer.text for answer in group] for group in answers],
                                     [self.prompts.rows[i] for i in chosen])
        if cfg.truncated == 'penalize':
            cut = np.array([[is_truncated(answer) for answer in group] for group in answers])
            rewards[cut] = cfg.penalty
        return answers, rewards

    def pack(self, cfg, chosen, answers, rewards, multiple):
        """Return the packed rows of a step's answers with all that the loss needs.

        Besides what `pack_rollouts` returns: `columns`, a number per answer token, and `measured`,
        means over the answers.
        """
        packed = pack_rollouts([self.prompts[i][0].tolist() for i in chosen],
                               [[answer.tokens for answer in group] for group in answers],
                               cfg.pack_len, multiple)
        group = [answers[i][j] for i, j in packed['where']]
        measured = {'reward': rewards.mean(), 'length': packed['counts'].mean(),
                    'entropy': np.concatenate([answer.entropies for answer in group]).mean(),
                    'truncated': np.mean([is_truncated(answer) for answer in group])}
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
        used = np.array([cfg.truncated != 'mask' or not is_truncated(answer) for answer in group])
        weight = RL_METHODS[cfg.method].weight(packed['counts'], used, cfg)
        columns['weight'] = np.repeat(weight, packed['counts'])
        return packed | {'columns': columns, 'measured': measured}

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
        table = np.zeros(where.max(0) + 1)
        table[tuple(where.T)] = rewards - np.add.reduceat(costs, begin)
        advantage = RL_METHODS[cfg.method].advantage(table)[tuple(where.T)]
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
        memory = None if cfg.loss_memory is None else cfg.loss_memory * 10 ** 6
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
                return loss - (cfg.entropy_coef * entropy.sum() / n_tokens if cfg.entropy_coef
                               else 0)

            hidden = answers.gather(model(*inputs))
            loss, _ = fused_loss(hidden, model.head, answers.token,
                                 joint(function, entropy=cfg.entropy_coef > 0),
                                 softcap=model.softcap, reduction='sum', memory=memory,
                                 group=torch.from_numpy(packed['answer'][answers.part]))
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


def policy_loss(log_p, column, answers, tokens, cfg):
    """Return the loss [n] of some answers' tokens, their ratios, and whether these are clipped.

    column: {name: [n]}; without `old`, this is the first update, whose ratios are 1
    """
    method, old = RL_METHODS[cfg.method], column.get('old', log_p.detach())
    high = next(x for x in (cfg.clip_high, method.clip_high, cfg.clip) if x is not None)
    log_ratio = log_p - old
    if method.ratio != 'token':     # the loss of an answer, in each of its tokens
        sums = answers.sums(log_ratio, tokens)
        sums = sums / answers.counts if method.ratio == 'mean' else sums
        log_ratio = sums[answers.answer[tokens]]
    loss, ratio = clipped_loss(log_ratio, column['advantage'], cfg.clip, high), log_ratio.exp()
    clipped = loss > -column['advantage'] * ratio       # the gradient is 0
    if cfg.kl in ('loss', 'k3'):
        factor = (log_p - old).exp() if cfg.kl == 'loss' else 1
        loss = loss + cfg.kl_coef * factor * k3(log_p, column['reference'])
    return loss, ratio.detach(), clipped


def values_of(model, hidden):
    """Return the values float32 [n] of states, from the hidden states [n, D]."""
    return hidden.float() @ model.value_head


def is_truncated(answer):
    return answer.reason in ('max_tokens', 'context')


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


# ---- The command ---------------------------------------------------------------------------------

def align(cfg):
    """Do the run `cfg`, an AlignConfig; return and raise as `train.train`."""
    check_align_config(cfg)
    stages = {'reward': RewardModel} | dict.fromkeys(RL_METHODS, Rollouts)
    return train.train(cfg, stages.get(cfg.method, Preferences)())


def main(argv):
    cfg = load_config(AlignConfig, argv, usage=__doc__)
    results = align(cfg)
    if results:
        print_report({name: (result, Path(cfg.out_dir) / ('before' if name == 'before' else ''))
                      for name, result in results.items()}, cfg.out_dir, cfg.eval.pictures)
    if not cfg.dry_run:
        print(f'\nwrote weights and log.jsonl to {cfg.out_dir}')


if __name__ == '__main__':
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with cli.one_line_errors(
            resume='--resume continues from the last checkpoint',
            memory='--checkpoint_activations, --micro_rows=1 and a shorter --pack_len need less '
                   'for a forward pass, --master_weights=stochastic less for the weights'):
        main(sys.argv[1:])
