"""The loss of a step's answers by their rewards: clipped policy losses, KL, values.

Also the log-probabilities from which the losses begin, and ConfTuner's objective for train.py.
"""

import numpy as np
import torch

from alignment.advantages import RL_METHODS
from alignment.packed_answers import COLUMNS, Answers
from data.packing import IGNORE
from fused_ce import cross_entropy, fused_loss, joint
from runtime.device import micro_batches, to_device
from runtime.errors import ConfigError, DataError
from runtime.loss import loss_options

# (log_p, ratio, advantage, low, high) -> (loss, whether the clip changes the gradient), each [n]

def clipped_loss(log_p, ratio, advantage, low, high):
    """max(-A ratio, -A clip(ratio, 1 - low, 1 + high)). PPO, Schulman 2017, eq. 7."""
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high))
    return loss, loss > -advantage * ratio      # the gradient is 0


def cispo_loss(log_p, ratio, advantage, low, high):
    """-A log p times the ratio, a constant of at most 1 + high. MiniMax-M1 (2506.13585), eq. 4."""
    return -advantage * log_p * ratio.detach().clamp(max=1 + high), ratio > 1 + high


def sapo_loss(log_p, ratio, advantage, low, high):
    """-A sigmoid(tau (ratio - 1)) 4 / tau: a soft clip. Gao 2025 (2511.20347), with its taus."""
    tau = torch.where(advantage > 0, torch.ones_like(ratio), 1.05)
    loss = -advantage * torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    return loss, torch.zeros_like(loss, dtype=torch.bool)


SURROGATES = {'clip': clipped_loss, 'cispo': cispo_loss, 'sapo': sapo_loss}


def bounded_exp(x):
    """exp(x) and its gradient, at most e^80: a gradient of 0 times infinity would be NaN."""
    return (x - (x.detach() - 80).clamp(min=0)).exp()


def k3(log_p, reference):
    """e^-d - 1 + d with d = log p - log ref: an estimate of KL(policy, reference), never negative.

    At tokens drawn from the policy its mean gradient is that of KL(reference, policy) per token.
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
    ratio = bounded_exp(log_ratio)
    loss, clipped = SURROGATES[method.surrogate](log_p, ratio, column['advantage'], cfg.clip, high)
    if method.ratio == 'answer':
        loss = loss / answers.counts[answers.answer[tokens]]
    if cfg.kl == 'k3':
        loss = loss + cfg.kl_coef * k3(log_p, column['reference'])
    elif cfg.kl == 'loss':
        # its gradient is E[log(p / ref) dlog p] of answers: a token decides the KL of later ones
        kl = answers.sums((log_p - column['reference']).detach(), tokens)
        loss = loss + cfg.kl_coef * shared(bounded_exp(of_answer) * kl)
    return loss, ratio.detach(), clipped


def tokenized_brier(levels, text=0.0):
    """Return an objective of `train.Stage` that trains a stated confidence: ConfTuner's loss.

    sum_i q_i (c_i - correct)^2, Li 2025 (2508.18847), where q is the softmax over the tokens that
    state a confidence and c_i the one that token i states: a proper score.

    levels: {token id: c}, such as those of `confidence_levels`. In the data, a supervised token
            with the largest c says that the answer before it is right, one with the smallest c
            that it is wrong. Of consecutive supervised tokens only the last level counts
    text:   weight of a term that keeps the format of the answer, as in the paper's code: the mean
            over all supervised tokens of their cross-entropy, at levels of -log P(any level)
    """
    ids, c = torch.tensor([*levels]), torch.tensor([*levels.values()])
    labels = (c - c.min()) / (c.max() - c.min())

    def objective(packed, cfg, base=None):
        if base is not None or cfg.smoothing or (cfg.loss, cfg.loss_reduction) != (
                'cross_entropy()', 'token'):
            raise ConfigError('loss, smoothing, base_smoothing and loss_reduction have no effect '
                              'with the objective tokenized_brier; leave them out')
        stretch = np.cumsum(packed.targets == IGNORE)   # equal for consecutive supervised tokens
        stated = np.flatnonzero(np.isin(packed.targets, ids.numpy()))
        stated = stated[np.diff(stretch[stated], append=-1) != 0]       # the last of each
        n, has_loss = len(stated), np.zeros(packed.targets.shape, bool)
        has_loss.flat[stated] = True
        if not n:
            raise DataError('no supervised token of a step states a confidence; the trained answer '
                            'must be one, such as 0.9 if the answer before it is right, else 0.0')
        n_supervised = int((packed.targets != IGNORE).sum())

        def compute(model, rows, inputs, targets):
            at = torch.from_numpy(has_loss[rows]).nonzero(as_tuple=True)
            level = (targets[at][:, None] == ids).int().argmax(1)
            device = model.head.device
            hidden = model(*inputs)
            states = hidden[at[0].to(device), at[1].to(device)]
            logits = model.cap((states @ model.head.T).float())
            z = logits[:, ids.to(device)]
            q, correct = z.softmax(-1), labels[level].to(device)
            loss = (q * (c.to(device) - correct[:, None]).square()).sum() / n
            nll = -z.log_softmax(-1).gather(1, level.to(device)[:, None]).sum() / n
            if text:
                others = targets.masked_fill(torch.from_numpy(has_loss[rows]), IGNORE)
                format_loss = (logits.logsumexp(-1) - z.logsumexp(-1)).sum() / n_supervised
                format_loss += fused_loss(hidden, model.head, others, cross_entropy(),
                                          num_items=n_supervised, **loss_options(model, cfg))[0]
                loss = loss + text * format_loss
            return loss, {'nll': nll.detach(), 'confidence': (q.detach() * c.to(device)).sum() / n}

        return compute

    return objective


def confidence_levels(tokenizer, texts=tuple(f'0.{digit}' for digit in range(10))):
    """Return {token id: confidence} of texts that differ in the last token; raises ConfigError."""
    encoded = {float(text): tokenizer.encode(text, start=False) for text in texts}
    if len({tuple(ids[:-1]) for ids in encoded.values()}) > 1 or (
            len({ids[-1] for ids in encoded.values()}) < len(encoded)):
        raise ConfigError(f'the confidences {", ".join(texts)} must differ in their last token '
                          f'alone, and this tokenizer encodes them as {[*encoded.values()]}')
    return {ids[-1]: confidence for confidence, ids in encoded.items()}


def policy_objective(packed, cfg, record=None):
    """Return the function of `train.token_loss` for a PackedRollouts.

    record: float32 [n] on the device, which gets the log-probabilities of this update, or None
    """
    n_tokens, n_answers = packed.begin[-1], len(packed.counts)

    def compute(model, rows, inputs, _):
        device, measured = model.head.device, {}
        answers = Answers(packed, rows, device)
        columns = {name: to_device(column[answers.part].astype(np.float32), device)
                   for name in COLUMNS if (column := getattr(packed, name)) is not None}

        def function(log_p, entropy, tokens):
            column = {name: x[tokens] for name, x in columns.items()}
            loss, ratio, clipped = policy_loss(log_p, column, answers, tokens, cfg)
            if record is not None:
                record[to_device(answers.part, device)[tokens]] = log_p.detach()
            measured.update(ratio=ratio.sum() / n_tokens,
                            clip_fraction=clipped.sum() / n_tokens)
            if cfg.kl != 'none':
                measured['kl'] = (log_p.detach() - column['reference']).sum() / n_answers
            loss = (loss * column['weight']).sum()
            if cfg.entropy_coef:    # the mean over the tokens that have a loss
                bonus = (entropy * (column['weight'] > 0)).sum() / packed.n_supervised
                loss = loss - cfg.entropy_coef * bonus
            return loss

        hidden = answers.gather(model(*inputs))
        loss, _ = fused_loss(hidden, model.head, answers.token,
                             joint(function, entropy=cfg.entropy_coef > 0), reduction='sum',
                             group=torch.from_numpy(packed.answer[answers.part]),
                             **loss_options(model, cfg))
        if cfg.method == 'ppo':
            # max((V - R)^2, (clip(V, V_old - value_clip, V_old + value_clip) - R)^2) / 2
            value = values_of(model, hidden)
            change = (value - columns['value']).clamp(-cfg.value_clip, cfg.value_clip)
            errors = torch.maximum((value - columns['returns']).square(), (
                columns['value'] + change - columns['returns']).square()) / 2
            measured['value_loss'] = (errors.detach() * columns['weight']).sum()
            loss = loss + cfg.value_coef * (errors * columns['weight']).sum()
        return loss, measured

    return compute


def values_of(model, hidden):
    """Return the values, float32 [n], of hidden states [n, D]."""
    return hidden.float() @ model.value_head


def answer_log_probs(model, packed, micro_rows, device):
    """Yield (Answers, float32 [n] log-probability of each token, hidden states) per micro-batch."""
    # without gradients, but with the kernels of training: ratios begin at 1 and margins at 0
    for rows, inputs, _ in micro_batches(packed, micro_rows, device):
        answers = Answers(packed, rows, device)
        hidden = answers.gather(model(*inputs)).detach()
        nll = fused_loss(hidden, model.head.detach(), answers.token, cross_entropy(),
                         softcap=model.softcap, reduction='none')[1]
        yield answers, -nll, hidden


def log_probs(model, packed, run):
    """Return float64 [2, n] of the answer tokens: log-probabilities, and values before or 0."""
    parts = []
    for _, log_p, hidden in answer_log_probs(model, packed, run.cfg.micro_rows, run.device):
        has_values = hasattr(model, 'value_head')
        value = values_of(model, hidden).detach() if has_values else torch.zeros_like(log_p)
        parts.append(torch.stack((log_p, value)).double().cpu().numpy())
    return np.concatenate(parts, axis=1)
