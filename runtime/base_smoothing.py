"""Smoothing towards the base model instead of the uniform distribution: the key `base_smoothing`.

    loss = (1 - s) CE(y) + s KL(q, p)        s: base_smoothing

p are the probabilities of the model in training, and q those of the model before training, which
has read the same tokens. With logits z, CE(y) = lse - z_y, which fused_ce.py computes, and

    KL(q, p) = lse + sum_k q_k (log q_k - z_k)
    loss = CE(y) + s (z_y + sum_k q_k (log q_k - z_k))

Of q only the `TOP` most probable tokens are kept, and scaled to sum 1, so that the rest needs the
logits of 21 tokens, no pass over the vocabulary. With LoRA the base model is the model without
adapters, else a second copy of it. Each batch is one forward pass more.

Source: distilled label smoothing (2502.11306), with the base model as the teacher.
"""

import torch
from torch import Tensor

from model import without_adapters

TOP = 20
LOGITS = 2 ** 27        # of the base model at once


def add_base_term(loss, values, share: float, model, base, hidden: Tensor, inputs, targets: Tensor,
                  weight: Tensor):
    """Return `loss` and `values` of CE(y), changed to those of the target above.

    base: the model before training, or `model` itself if it has adapters
    hidden [..., D]: what model(*inputs) returned; targets [...] on the CPU, negative: no loss
    weight [...] on the CPU: of each token in the mean
    """
    at = [i.to(hidden.device) for i in (targets >= 0).nonzero(as_tuple=True)]
    h, y, weight = hidden[*at], *(x[targets >= 0].to(hidden.device) for x in (targets, weight))
    ids, log_q = top_tokens(base, inputs, at)
    z = logits_at(model, h, torch.cat((y[:, None], ids), 1))
    kl_minus_ce = z[:, 0] + (log_q.exp() * (log_q - z[:, 1:])).sum(1)
    term = (weight * kl_minus_ce).sum()
    return loss + share * term, values | {'base_kl': values['nll'] + term.detach()}


@torch.no_grad()
def top_tokens(model, inputs, at):
    """Return the TOP most probable tokens [n, TOP] after those `at`, and the logarithms of their
    probabilities, scaled to sum 1.
    """
    with without_adapters(model):
        h, head = model(*inputs)[*at], model.head
    ids = torch.cat([(part @ head.T).topk(min(TOP, len(head))).indices
                     for part in h.split(max(1, LOGITS // len(head)))])
    return ids, logits_at(model, h.float(), ids).log_softmax(1)


def logits_at(model, h: Tensor, ids: Tensor) -> Tensor:
    """Return the logits [n, k], float32, of the tokens `ids` [n, k] after the states `h` [n, D]."""
    return model.cap(torch.bmm(model.head[ids].to(h.dtype), h[:, :, None])[:, :, 0].float())
