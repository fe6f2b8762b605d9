"""Tune a language model on preferences or rewards: DPO, PPO, GRPO, their relatives, reward models.

    python align.py configs/dpo_tulu3_8b.py --lr=1e-6
    python align.py configs/grpo_gsm8k_1b.py --reward=my_reward.py
    python align.py --help

A run works like one of train.py, with other data and another loss: settings, folders, checkpoints
and reports are the same. A row is a tree, [prompt][chosen][rejected], so the prompt is computed
once and both answers are in one micro-batch.

Every loss here is a function of the log-probabilities s of whole answers. Its gradient is that of a
cross-entropy whose token weights are the derivatives with respect to s; fused_ce.py computes them
between the two kernels of a chunk (`joint`), so no logits are stored. The log-probabilities of the
reference, the model before training, are computed once and cached.

From pair to gradient: data/preferences.py reads the rankings, alignment/packed_answers.py packs
them, `pair_objective` gathers the hidden states of the answers' tokens and gives a function of
PAIR_LOSSES to fused_ce.py; the step is that of train.py. Reinforcement learning, which generates
its answers, is in alignment/rollouts.py. STAGES says which functions a method runs.
"""

from runtime import cli

if __name__ == '__main__':
    cli.begin()

import ast
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import metrics
import train
from alignment import rollouts
from alignment.advantages import CORRECTIONS, RL_METHODS
from alignment.objectives import policy_objective
from alignment.packed_answers import Answers, pack_rankings
from alignment.reference import cached_reference
from bridges.export import pad_token, tokenizer_files
from data.preferences import load_preferences
from data.tokenizer import begins_with_bos
from fused_ce import fused_loss, joint
from runtime import resume
from runtime.build import build_model
from runtime.config import load_config, require_range
from runtime.device import micro_batches, to_device
from runtime.errors import ConfigError
from runtime.fast import definition
from runtime.loss import loss_options
from runtime.parallel import evaluating, gather

# ---- Pairwise losses -----------------------------------------------------------------------------

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
    """DPO for a share of wrong labels: the minimum is at sigmoid(beta d) = 1 - label_noise.

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


@dataclass
class AlignConfig(train.TrainConfig):
    # keys of train.py with other defaults
    model: str = 'allenai/Llama-3.1-Tulu-3-8B-SFT'  # to train; also the reference
    data: str = 'allenai/llama-3.1-tulu-3-8b-preference-mixture'
    lora_dropout: float = 0.0                 # dropout would make policy and reference differ
    max_length: int = 2048                    # tokens of the prompt with one answer
    pack_len: int = 4096                      # tokens of a row, and of a prompt with all answers
    batch_size: int = 128                     # prompts per optimizer step
    epochs: float = 1.0                       # passes over the prompts
    lr: float = 5e-7                          # learning rate at the end of warm-up
    warmup: float = 0.1                       # warm-up as a share of the steps
    # preferences
    method: Literal[*PAIR_LOSSES, 'reward', *RL_METHODS] = 'dpo'
    beta: float = 0.1                         # weight of the margin; in orpo of the odds ratio
    per_token: bool = False                   # margins of means per token: Tulu 3, with beta = 5
    label_noise: float = 0.1                  # cdpo and robust: assumed share of swapped pairs
    gamma: float = 1.0                        # simpo: the margin to reach
    centering: float = 0.0                    # reward: weight of (r_w + r_l)^2, such as 0.01
    # reinforcement learning
    # a rule and a task: exact:gsm8k, or rlcr, log_score, abstain or abstain_stated with a task; the
    # folder of a reward model; or a Python file, which is executed and defines
    # reward(prompt, answer, row)
    reward: str = ''
    run_code: bool = False                    # allow exact:humaneval: it runs what is generated
    instruction: str = ''                     # text that follows each prompt after a blank line
    group_size: int = 8                       # answers to each prompt
    max_tokens: int = 256                     # longest answer; a prompt has the rest of max_length
    decode_batch: int = 256                   # largest number of answers generated at once
    # answers cut off at max_tokens: no loss; score them as they are; or reward = penalty
    truncated: Literal['mask', 'score', 'penalize'] = 'mask'
    penalty: float = 0.0                      # reward of an answer cut off, with 'penalize'
    soft_overlong: int = 0                    # DAPO: over this many tokens before max_tokens, the
    #                                           reward falls linearly by up to 1; 0: never
    resample: int = 0                         # DAPO: how many times to replace the prompts whose
    #                                           answers all have equal rewards
    updates: int = 1                          # optimizer steps with the answers of one rollout
    clip: float = 0.2                         # the ratio of probabilities stays above 1 - clip
    clip_high: float | None = None            # the ratio stays below 1 + clip_high; None: 0.28 in
    #                                           dapo, 4 in cispo, else as clip
    # weights for tokens whose probabilities in generation and in training differ: ratios by token
    # or by answer, cut to correction_max, or 0 above it
    correction: Literal['none', *CORRECTIONS] = 'none'
    correction_max: float = 3.0               # as in TRL, whose default is answer_mask
    entropy_coef: float = 0.0                 # weight of a bonus for the mean entropy per token
    # KL to the model before training: none; logged only; subtracted from the reward; added to the
    # loss, for whole answers; or added as the estimate k3 per token, as in GRPO's paper
    kl: Literal['none', 'logged', 'reward', 'loss', 'k3'] = 'none'
    kl_coef: float = 0.05                     # weight of the KL
    kl_target: float | None = None            # nats per answer; kl_coef adapts to it (Ziegler 2019)
    kl_horizon: int = 10000                   # n answers change kl_coef by 0.2 n / kl_horizon of it
    #                                           at most
    # ppo
    discount: float = 1.0                     # of later rewards, per token
    gae_lambda: float = 0.95                  # of the generalized advantages
    value_clip: float = 0.2                   # largest change of a value in its loss
    value_coef: float = 0.1                   # weight of the value loss


# keys of train.py that no method here reads; setting one is an error
UNUSED = ('from_scratch', 'shape', 'data_kind', 'answers', 'train_on_inputs', 'loss', 'smoothing',
          'loss_reduction', 'base_smoothing', 'fp8')


def may_read(loss, key):
    """Return whether a function of (Pairs, AlignConfig) may read a setting, by its syntax tree.

    So it may if its source is unknown, or if it uses the settings in other ways than by their
    names, as in `cfg.beta`, and in methods of Pairs, as in `pairs.margin(cfg)`.
    """
    tree = definition(loss)
    if tree is None or len(tree.args.args) != 2:
        return True
    pairs, cfg = (argument.arg for argument in tree.args.args)
    other_uses = 0
    for node in ast.walk(tree):
        match node:
            case ast.Name(name) if name == cfg:
                other_uses += 1
            case ast.Attribute(ast.Name(name), attribute) if name == cfg and attribute != key:
                other_uses -= 1
            case ast.Call(ast.Attribute(ast.Name(name), method), [ast.Name(argument)]) if (
                    (name, argument) == (pairs, cfg)
                    and not may_read(getattr(Pairs, method, None), key)):
                other_uses -= 1
    return other_uses > 0


def check_settings_are_read(cfg):
    """Raise ConfigError for a setting that differs from its default but has no effect."""
    defaults, loss = AlignConfig(), PAIR_LOSSES.get(cfg.method)
    # without the sizes of rollouts, which runs of several methods may share
    ppo_keys = 'discount', 'gae_lambda', 'value_clip', 'value_coef'
    reward_keys = ('run_code', 'instruction', 'truncated', 'penalty', 'soft_overlong', 'resample',
                   'updates', 'clip', 'clip_high', 'correction', 'correction_max', 'entropy_coef',
                   'kl', 'kl_coef', 'kl_target', 'kl_horizon', *ppo_keys)
    # (deciding setting, '' for this script; whether this run reads the keys; the keys)
    for decider, is_read, keys in (
            ('', False, UNUSED),
            ('method', loss, ['beta']),     # also of the margin in the log
            *(('method', loss and may_read(loss, key), [key])
              for key in ('per_token', 'label_noise', 'gamma')),
            ('method', cfg.method in RL_METHODS, reward_keys),
            ('method', cfg.method == 'ppo', ppo_keys),
            ('method', cfg.method == 'reward', ['centering']),
            ('truncated', cfg.truncated == 'penalize', ['penalty']),
            ('kl', cfg.kl in ('reward', 'loss', 'k3'), ['kl_coef']),
            ('kl_target', cfg.kl_target, ['kl_horizon']),
            ('correction', cfg.correction != 'none', ['correction_max']),
            ('method', cfg.method not in ('cispo', 'sapo'), ['clip']),
            ('method', cfg.method != 'sapo', ['clip_high']),
            ('updates', cfg.updates > 1, ['clip', 'clip_high', 'value_clip'])):
        for key in keys:
            if not is_read and (value := getattr(cfg, key)) != getattr(defaults, key):
                where = f'with {decider} = {getattr(cfg, decider)!r}' if decider else 'in align.py'
                raise ConfigError(f'{key} = {value!r} has no effect {where}; leave it out')


def check_align_config(cfg):
    """Raise ConfigError for unusable values; train.py checks its own."""
    require_range(cfg, 1e-6, 1e3, 'beta')
    require_range(cfg, 0, 1e3, 'gamma', 'centering')
    if cfg.method == 'reward' and cfg.eval:
        raise ConfigError('a reward model has no output matrix, so eval cannot be set')
    if not 0 <= cfg.label_noise < 0.5:
        raise ConfigError(f'label_noise = {cfg.label_noise}; it must be at least 0 and below 0.5')
    if cfg.lora_dropout and cfg.method not in NO_REFERENCE:
        raise ConfigError('lora_dropout: the policy would differ from its reference; set it to 0')
    if bool(cfg.reward) != (cfg.method in RL_METHODS):
        raise ConfigError(f'method = {cfg.method!r} and reward = {cfg.reward!r}: '
                          f'{", ".join(RL_METHODS)} need a reward, and only they')
    check_settings_are_read(cfg)
    if cfg.reward:
        rollouts.check_rollouts(cfg)


# ---- Preferences ---------------------------------------------------------------------------------

def load_rankings(cfg, tokenizer):
    """Return the Sequences of the rankings in cfg.data; print what biases them."""
    sequences = load_preferences(cfg.data, tokenizer, template=cfg.template, pack_len=cfg.pack_len,
                                 **train.reader_options(cfg, tokenizer))
    masks = [mask for _, mask in sequences]
    best = np.mean([np.count_nonzero(mask == 1) for mask in masks])
    worst = np.mean([np.count_nonzero(mask == mask[-1]) for mask in masks])
    if (n := np.count_nonzero(sequences.margins)) and cfg.method != 'reward':
        print(f'note: {n} pairs have a margin, which only method = reward uses')
    # a bias to long or short answers shows here
    print(f'answers: {best:.0f} tokens on average in the best, {worst:.0f} in the worst')
    return sequences


def build_with_reference(run):
    """Return (model to train, the `answer_sums` of it before training, None without reference)."""
    model, _ = train.build(run)
    return model, None if run.cfg.method in NO_REFERENCE else cached_reference(run, model)


def pack_pairs(run, chosen, multiple):
    """Return the PackedPairs of the sequences with the indices `chosen`, with their reference."""
    return pack_rankings(
        [run.sequences[i] for i in chosen], run.cfg.pack_len, multiple,
        last=run.cfg.method == 'reward', margins=run.sequences.margins[chosen],
        reference=None if run.reference is None else run.reference[chosen])


def pair_objective(packed, cfg):
    """Return the function of `train.token_loss`: the mean over prompts of means over pairs."""
    pair_loss = PAIR_LOSSES[cfg.method]

    def compute(model, rows, inputs, _):
        device, measured = model.head.device, {}
        answers = Answers(packed, rows, device)
        w, l = to_device(packed.pairs, device).T         # noqa: E741
        n, r = answers.counts, to_device(packed.reference, device)
        pair_weight = to_device(packed.pair_weight, device)

        def function(log_p, entropy, tokens):
            # called for the prompts of each chunk, and at the end for all of them
            present = answers.present(tokens)
            weight = pair_weight * present[w]
            # weight 0 for pairs of other chunks; finite values too, since 0 times infinity is NaN
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

        prompt = torch.from_numpy(packed.where[packed.answer[answers.part], 0])
        loss, _ = fused_loss(answers.gather(model(*inputs)), model.head, answers.token,
                             joint(function), reduction='sum', group=prompt,
                             **loss_options(model, cfg))
        return loss, measured

    return compute


def pair_validation(run):
    """Return {val_loss, val_accuracy, ...}: means over the held-out prompts."""
    packed = run.stage.pack(run, run.held_out, run.row_multiple)
    with evaluating(run.model), torch.no_grad():
        values = train.forward_backward(run.model, packed, run.cfg, run.device,
                                        run.stage.objective)
    return {f'val_{name}': value.item() for name, value in values.items()}


# ---- Reward models -------------------------------------------------------------------------------

# The loss is -log sigmoid(r_w - r_l - m) (Bradley and Terry 1952). m is the margin of a pair
# (Llama 2, 2307.09288), 0 without one. The reward of an answer is the dot product of its last
# hidden state and a score head [D], in float32. transformers loads the saved folder as
# AutoModelForSequenceClassification, one label.

def reward_tokenizer(cfg, base, tokenizer):
    """Return the tokenizer files to save, with a pad token that never ends an answer."""
    return tokenizer_files(base, tokenizer, cfg.template, begins_with_bos(tokenizer, cfg.add_bos),
                           reward=True)


def build_reward_model(run):
    """Return (model with a score head of zeros, which is trained with LoRA as well, None)."""
    model = build_model(run.cfg, run.config, run.base, run.device, reward=True)
    model.score.requires_grad_()
    _, pad_id = pad_token(run.base, run.tokenizer, run.cfg.template)
    model.config.hf = model.config.hf | {'pad_token_id': pad_id}
    return model, None


def reward_margins(model, packed, rows, inputs):
    """Return (r_w - r_l, r_w + r_l, weight) of the pairs in some rows."""
    device = model.head.device
    answers = Answers(packed, rows, device)
    pairs, weight = (to_device(x, device) for x in (packed.pairs, packed.pair_weight))
    r_w, r_l = answers.sums(model.rewards(answers.gather(model(*inputs))))[pairs.T]
    return r_w - r_l, r_w + r_l, weight * answers.present()[pairs[:, 0]]


def reward_objective(packed, cfg):
    """Return the function of `train.token_loss`, for rewards."""
    def compute(model, rows, inputs, _):
        margin, both, weight = reward_margins(model, packed, rows, inputs)
        values = {'nll': F.softplus(-margin), 'margin': margin,
                  'accuracy': (margin.sign() + 1) / 2}
        wanted = to_device(packed.margin, margin.device)
        loss = F.softplus(wanted - margin) + cfg.centering * both.square()
        return (loss * weight).sum(), {
            name: (value.detach() * weight).sum() for name, value in values.items()}
    return compute


def reward_validation(run):
    """Return the log loss and accuracy over held-out prompts, and the ECE over their pairs."""
    packed = run.stage.pack(run, run.held_out, run.row_multiple)
    with evaluating(run.model), torch.no_grad():
        parts = [torch.stack(reward_margins(run.model, packed, rows, inputs)).double().cpu().numpy()
                 for rows, inputs, _ in micro_batches(packed, run.cfg.micro_rows, run.device)]
    margin, _, weight = sum(part for parts in gather(parts) for part in parts)
    return {'val_loss': weight @ np.logaddexp(0, -margin),
            'val_accuracy': weight @ (np.sign(margin) + 1) / 2,
            'val_ece': metrics.ece(1 / (1 + np.exp(-np.abs(margin))), margin > 0)}


# ---- The command ---------------------------------------------------------------------------------

PAIRS = replace(train.SFT, load=load_rankings, build=build_with_reference, pack=pack_pairs,
                objective=pair_objective, validate=pair_validation)
REWARD_MODEL = replace(PAIRS, files=reward_tokenizer, build=build_reward_model,
                       objective=reward_objective, validate=reward_validation)
ROLLOUTS = replace(train.SFT, load=rollouts.load, build=rollouts.build, pack=None,
                   count_rows=rollouts.count_rows, batches=rollouts.batches,
                   objective=policy_objective, step=rollouts.update, validate=rollouts.validate)
STAGES = {**dict.fromkeys(PAIR_LOSSES, PAIRS), 'reward': REWARD_MODEL,
          **dict.fromkeys(RL_METHODS, ROLLOUTS)}


def align(cfg):
    """Run the training `cfg`, an AlignConfig; return and raise as `train_and_report` does."""
    check_align_config(cfg)
    return train.train_and_report(cfg, STAGES[cfg.method])


def main(argv):
    if not argv:
        raise ConfigError('no settings given: python align.py configs/dpo_tulu3_8b.py --lr=1e-6; '
                          '--help lists all settings')
    cfg = load_config(AlignConfig, argv, usage=__doc__, hidden=UNUSED)
    train.print_results(cfg, align(cfg))


if __name__ == '__main__':
    resume.run_script(main)
