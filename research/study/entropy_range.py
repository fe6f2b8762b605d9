"""Measure the least and the most entropy that the output layer of a model can express.

The experiment `vocabulary` of runs.py writes entropy_range.json into the folder of each model, and
figures.py reads it.
"""

import copy
import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F

from data.tokenizer import load_model_tokenizer
from runtime import checkpoint, ownership
from runtime.device import pick_device, pick_dtype

FILE = 'entropy_range.json'


def measure(folder, seed=0):
    """Write the entropy range of the model in `folder` to its entropy_range.json, once."""
    folder = Path(folder)
    if (folder / FILE).exists():
        return
    device = pick_device('auto')
    model = checkpoint.load(folder, device, pick_dtype('auto', device))
    n_pieces = load_model_tokenizer(folder, model.config).n_vocab
    content = entropy_range(model, n_pieces, seed=seed)
    with ownership.lock(folder):
        ownership.claim(folder, FILE)
        ownership.write_text(folder / FILE, json.dumps(content, indent=1) + '\n')


def entropy_range(model, n_pieces, *, n_tokens=64, steps=300, lr=0.1, seed=0):
    """Return the least and the most entropy of a next-token distribution of `model`, in bits:
    {'unused_rows', 'lowest_bits', 'lowest_nll_bits', 'highest_bits', 'log2_vocab'}.

    The final norm gives every hidden state the same length, up to its weights, so the output matrix
    and the softcap bound the entropy. Both ends are searched for by Adam over the input of the
    norm, in float32. For the lowest, each of n_tokens tokens of the first n_pieces rows is made as
    probable as possible; the result is the mean, and lowest_nll_bits their NLL. The highest is the
    best of n_tokens random starts. Both are results of the search, not bounds.
    """
    head, cap = model.head.detach().float(), model.softcap
    norm = copy.deepcopy(model.decoder.norm).float().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randperm(n_pieces, generator=generator)[:n_tokens].to(head.device)

    def log_probs(x):
        logits = norm(x) @ head.T
        return F.log_softmax(logits if cap is None else cap * torch.tanh(logits / cap), dim=-1)

    def entropy(log_p):
        return -(log_p.exp() * log_p).sum(1) / math.log(2)

    def token_nll(log_p):
        return F.nll_loss(log_p, tokens, reduction='none')

    def minimize(loss, start):
        x = start.clone().requires_grad_()
        optimizer = torch.optim.Adam([x], lr=lr)
        decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
        for _ in range(steps):
            optimizer.zero_grad()
            loss(log_probs(x)).sum().backward()
            optimizer.step()
            decay.step()
        return log_probs(x).detach()

    centered = F.normalize(head[tokens] - head.mean(0)) * head.shape[1] ** 0.5
    sure = minimize(token_nll, centered)
    start = torch.randn(n_tokens, head.shape[1], generator=generator).to(head.device)
    unsure = minimize(lambda log_p: -entropy(log_p), start)
    return {'unused_rows': len(head) - n_pieces, 'lowest_bits': entropy(sure).mean().item(),
            'lowest_nll_bits': token_nll(sure).mean().item() / math.log(2),
            'highest_bits': entropy(unsure).max().item(), 'log2_vocab': math.log2(len(head))}
