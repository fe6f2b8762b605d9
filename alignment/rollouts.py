"""The stage of align.py that learns from rewards: PPO, RLOO, GRPO and their relatives.

In each step the model generates answers, a training row is [prompt][answer 1] ... [answer G], and
the weight of each token in the loss follows from the rewards: by one advantage function and one
divisor per method, in PPO by a value head. `run` is a `train.Run`, with the settings of align.py.
"""

import functools
import math
import os
import time
from dataclasses import replace

import numpy as np
import torch

import train
from alignment.advantages import RL_METHODS, correction, credit, soft_overlong
from alignment.objectives import log_probs
from alignment.packed_answers import PackedRollouts, pack_answers
from alignment.prompts import load_prompts
from alignment.rewards import STATED, load_reward
from data.tokenizer import begins_with_bos
from written.benchmarks import WRITTEN_TASKS
from decoding.answers import generate
from decoding.sampling import Sampling
from model import without_adapters
from runtime.build import build_model
from runtime.config import require_range
from runtime.device import pick_device, pick_dtype
from runtime.errors import ConfigError, TrainingError
from runtime.parallel import world_size
from runtime.resume import advice


def check_rollouts(cfg):
    """Raise ConfigError for unusable values; `align.check_align_config` checks the others."""
    kind, _, task = cfg.reward.partition(':')
    # `load_reward` refuses the others of such a task
    if (task in WRITTEN_TASKS and WRITTEN_TASKS[task].runs_code and not cfg.run_code
            and kind not in STATED):
        raise ConfigError(f'reward = {cfg.reward!r} runs the programs that the model writes: read '
                          f'docs/running_code.md, then allow it with --run_code')
    require_range(cfg, 1, 10 ** 6, 'max_tokens', 'updates', 'decode_batch')
    require_range(cfg, 1 if cfg.method == 'ppo' else 2, 10 ** 6, 'group_size')
    require_range(cfg, 0, cfg.max_tokens, 'soft_overlong')
    require_range(cfg, 0, 100, 'resample')
    require_range(cfg, 0, 1, 'clip', 'discount', 'gae_lambda')
    require_range(cfg, 0, 1e3, 'clip_high', 'entropy_coef', 'kl_coef', 'value_clip', 'value_coef')
    require_range(cfg, 1e-6, 1e6, 'kl_target', 'kl_horizon')
    require_range(cfg, 1, 1e6, 'correction_max')
    if cfg.resample and cfg.group_size == 1:
        raise ConfigError(f'resample = {cfg.resample} replaces prompts whose answers have equal '
                          f'rewards, which is every prompt with group_size = 1')
    if cfg.kl_target and not (cfg.kl == 'reward' and cfg.kl_coef):
        raise ConfigError("kl_target multiplies the weight of the KL in the reward; set kl = "
                          "'reward' and kl_coef above 0")
    n_answers = cfg.batch_size * cfg.group_size
    if cfg.kl_target and n_answers >= 5 * cfg.kl_horizon:
        raise ConfigError(f'kl_horizon = {cfg.kl_horizon}: one step of batch_size times group_size '
                          f'= {n_answers} answers could make kl_coef 0 or negative; it must be '
                          f'above a fifth of them')
    if cfg.max_tokens >= cfg.max_length:
        raise ConfigError(f'max_tokens = {cfg.max_tokens} leaves no room for a prompt in '
                          f'max_length = {cfg.max_length}')
    if world_size() > 1:
        raise ConfigError(f'method = {cfg.method!r} generates its answers on one GPU; start it '
                          f'without torchrun')


# ---- Before the first step -----------------------------------------------------------------------

def load(cfg, tokenizer):
    """Return the Prompts, which have their reward."""
    device = pick_device(cfg.device)
    reward = load_reward(os.path.expanduser(cfg.reward), device, pick_dtype(cfg.dtype, device),
                         cfg.template)
    return load_prompts(
        cfg.data, tokenizer, reward, template=cfg.template,
        max_length=cfg.max_length - cfg.max_tokens,
        add_bos=begins_with_bos(tokenizer, cfg.add_bos), instruction=cfg.instruction,
        revision=cfg.data_revision, on_bad_row=cfg.on_bad_row)


def build(run):
    """Return (model to train, the reference: this model without LoRA, or a second copy)."""
    cfg = run.cfg
    parts = cfg, run.config, run.base, run.device
    model = build_model(*parts)
    # its parameters keep requires_grad, which selects the kernels of training
    reference = build_model(*parts) if cfg.kl != 'none' and not cfg.lora else model
    if cfg.method == 'ppo':
        model.value_head = torch.nn.Parameter(torch.zeros(model.head.shape[1], device=run.device))
    # a buffer, so that checkpoints hold it
    model.register_buffer('kl_coef', torch.tensor(cfg.kl_coef, dtype=torch.float64))
    return model, reference


def count_rows(run, chosen):
    """Return the packed rows of a step whose answers have half of their greatest length."""
    answers = run.cfg.group_size * run.cfg.max_tokens / 2
    return math.ceil(sum(run.sequences.lengths[chosen] + answers) / run.cfg.pack_len)


# ---- One rollout ---------------------------------------------------------------------------------

def batches(run, first, until):
    """Yield (indices of the prompts, PackedRollouts) of each step, generated at that step."""
    for step, chosen in enumerate(run.step_indices(first, until), first):
        started = time.perf_counter()
        chosen, answers, rewards = rollout(run, chosen, step)
        sampled = time.perf_counter()
        if step == first:
            print(f'first answer, with reward {rewards[0, 0]:g}:')
            print('    ' + answers[0][0].text[:1000].replace('\n', '\n    '))
        packed = pack(run, chosen, answers, rewards)
        packed.measured |= {'rollout_s': sampled - started,
                            'scoring_s': time.perf_counter() - sampled}
        yield chosen, packed


def rollout(run, chosen, step):
    """Return (prompts, answers, rewards) of a step, which depend on it and the weights alone.

    Prompts whose answers all have equal rewards have no advantages. As in DAPO they are replaced,
    at most cfg.resample times; the others are drawn from all prompts in run.training.
    """
    cfg, answers = run.cfg, [None] * len(chosen)
    rewards = np.zeros((len(chosen), cfg.group_size))
    chosen, new = chosen.copy(), np.arange(len(chosen))
    seeds = np.random.SeedSequence([cfg.seed, step]).generate_state(1 + cfg.resample, np.uint64)
    for trial, seed in enumerate((seeds >> 1).tolist()):
        if trial:
            others = np.random.default_rng([cfg.seed, step, trial]).permutation(run.training)
            chosen[new] = np.resize(others, len(new))
        groups, rewards[new] = sample(run, chosen[new], seed, cfg.group_size)
        for i, group in zip(new, groups, strict=True):
            answers[i] = group
        new = np.flatnonzero(rewards.max(1) == rewards.min(1))
        if not len(new):
            break
    return chosen, answers, rewards


def sample(run, chosen, seed, n):
    """Return (n Answers to each prompt, their rewards float64 [prompts, n])."""
    cfg, prompts = run.cfg, run.sequences
    sampling = Sampling(n=n, max_tokens=cfg.max_tokens, seed=seed, batch_size=cfg.decode_batch)
    ids = [prompts[i][0].tolist() for i in chosen]
    repeats = [ids[:i].count(prompt) for i, prompt in enumerate(ids)]
    try:
        done = dict(generate(run.model, ids, sampling, run.tokenizer, prompts.stop, repeats))
    except FloatingPointError as error:
        raise TrainingError(f'prompt {error.args[0] + 1} of a step: the model in training gives '
                            f'NaN or infinite logits; lower lr; {advice(cfg.out_dir)}') from error
    answers = [done[i] for i in range(len(ids))]
    rewards = prompts.reward.scores([prompts.messages[i] for i in chosen],
                                    [[answer.text for answer in group] for group in answers],
                                    [prompts.rows[i] for i in chosen])
    if cfg.truncated == 'penalize':
        cut = np.array([[answer.truncated for answer in group] for group in answers])
        rewards[cut] = cfg.penalty
    if cfg.soft_overlong:
        lengths = np.array([[len(answer.tokens) for answer in group] for group in answers])
        rewards += soft_overlong(lengths, cfg)
    return answers, rewards


def pack(run, chosen, answers, rewards):
    """Return the PackedRollouts of a step's answers: what the loss needs, and the log."""
    cfg = run.cfg
    packed = pack_answers([run.sequences[i][0].tolist() for i in chosen],
                           [[answer.tokens for answer in group] for group in answers],
                           cfg.pack_len, run.row_multiple)
    group = [answers[i][j] for i, j in packed.where]
    measured = {'reward': rewards.mean(), 'length': packed.counts.mean(),
                'entropy': np.concatenate([answer.entropies for answer in group]).mean(),
                'truncated': np.mean([answer.truncated for answer in group])}
    if cfg.group_size > 1:
        measured['equal'] = np.mean(rewards.max(1) == rewards.min(1))
    sampled = np.concatenate([answer.log_probs for answer in group])
    old = value = reference = None
    if cfg.kl == 'reward' or cfg.method == 'ppo' or cfg.correction != 'none':
        old, value = log_probs(run.model, packed, run)
    if cfg.kl != 'none':
        with without_adapters(run.model):
            reference, _ = log_probs(run.reference, packed, run)
    if cfg.kl_target:
        measured['kl_coef'] = run.model.kl_coef.item()
    advantage, returns = credit(packed, rewards[tuple(packed.where.T)], old, reference, value, cfg,
                                run.model.kl_coef.item())
    if cfg.correction != 'none':
        weights = correction(old - sampled, packed.counts, cfg.correction, cfg.correction_max)
        advantage, measured['correction'] = advantage * weights, weights.mean()
    used = np.array([cfg.truncated != 'mask' or not answer.truncated for answer in group])
    weight = np.repeat(RL_METHODS[cfg.method].weight(packed.counts, used, cfg), packed.counts)
    return PackedRollouts(
        **vars(packed), advantage=advantage, weight=weight, sampled=sampled, old=old,
        reference=reference, value=value, returns=returns, measured=measured,
        n_supervised=max(1, packed.counts[used].sum()))


# ---- One step ------------------------------------------------------------------------------------

def update(model, optimizer, packed, cfg, device, objective):
    """Take cfg.updates optimizer steps; return the means of their metrics."""
    total, measured = [], dict(packed.measured)
    for _ in range(cfg.updates):
        record = None
        if packed.old is None and cfg.updates > 1:      # the first update computes it
            record = torch.zeros(len(packed.token), device=device)
        total.append(train.train_step(model, optimizer, packed, cfg, device,
                                      functools.partial(objective, record=record)))
        if record is not None:
            packed = replace(packed, old=record.double().cpu().numpy())
    values = {name: torch.stack([step[name] for step in total]).mean() for name in total[0]}
    if packed.old is not None:
        measured['mismatch'] = np.abs(packed.old - packed.sampled).mean()
    if cfg.kl_target:       # of the answers, before these updates
        n = len(packed.counts)
        kl = (packed.old - packed.reference).sum() / n
        model.kl_coef *= 1 + np.clip(kl / cfg.kl_target - 1, -0.2, 0.2) * n / cfg.kl_horizon
    norm = values.pop('grad_norm')
    return values | {name: torch.tensor(value, dtype=torch.float32, device=norm.device)
                     for name, value in measured.items()} | {'grad_norm': norm}


def validate(run):
    """Return {val_reward, val_length} of one answer to each held-out prompt."""
    answers, rewards = sample(run, run.held_out, run.cfg.seed, 1)
    return {'val_reward': rewards.mean(),
            'val_length': np.mean([len(answer.tokens) for answer, in answers])}
