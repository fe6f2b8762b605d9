"""A temperature per token, T = exp(v h + b) of its hidden state h, beside a single temperature.

    python research/study/adaptive_temperature.py --model=DATA/model --data=wiki.test.txt.gz

Adaptive temperature scaling (Xie et al. 2024) with a linear head: v and b minimize the NLL of the
next tokens in half of the texts, and the other half is measured. The logits of h / T are those of h
divided by T, so fused_ce.py has the loss and its gradient.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch

import metrics
from data.tree_rows import Tree
from data.probes import load_texts
from data.tokenizer import begins_with_bos, load_model_tokenizer
from evaluate import EvalConfig, on_this_machine
from fused_ce import cross_entropy, fused_loss, token_statistics
from runtime import checkpoint
from research.common import command_line
from runtime.loading import load_model
from scoring import score, token_states


def divided(h, w):
    """Return h / T for T = exp(h v / sqrt(D) + b); h: [N, D], w: (v [D], b [1]), float32."""
    v, b = w
    return h * torch.exp(-(h.float() @ v / h.shape[1] ** 0.5 + b)).to(h)[:, None]


def fit(h, head, y, softcap, trained):
    """Return (v, b) after 200 steps of Adam on the NLL of y; what `trained` does not name is 0."""
    w = [torch.zeros(n, device=head.device) for n in (h.shape[1], 1)]
    optimizer = torch.optim.Adam([w[i].requires_grad_() for i in trained] or w, lr=0.02)
    for _ in range(200 * bool(trained)):
        optimizer.zero_grad()
        fused_loss(divided(h, w), head, y, cross_entropy(), softcap=softcap)[0].backward()
        optimizer.step()
    return w


def main():
    options = command_line(
        __doc__, model={'required': True, 'help': 'folder of a model'},
        data={'required': True, 'help': 'texts, as the task clm reads them'},
        limit={'type': int, 'default': 400, 'help': 'number of texts; %(default)s'})
    folder = checkpoint.fetch(options.model)
    tokenizer = load_model_tokenizer(folder, checkpoint.read_config(folder))
    model = load_model(folder, on_this_machine(EvalConfig(model=options.model)))
    texts = load_texts(f'clm:{options.data}', EvalConfig(limit=options.limit))
    bos = [tokenizer.bos_id] * begins_with_bos(tokenizer, None)
    ids = [[*bos, *tokenizer.encode(text.text)][:256] for text in texts.items]
    ids = [x for x in ids if len(x) > 1]
    trees = [Tree((), x, scored=[*range(1, len(x))]) for x in ids]
    states = {i: values[np.argsort(numbers)] for i, numbers, values in score(
        lambda: model, enumerate(trees), compute=token_states)}
    head, halves = model.head.detach(), []
    for part in (range(0, len(ids), 2), range(1, len(ids), 2)):
        h = torch.from_numpy(np.concatenate([states[i] for i in part])).to(head)
        halves.append((h, torch.tensor([t for i in part for t in ids[i][1:]])))
    (h, y), (h_test, y_test) = halves
    for name, trained in (('unscaled', ()), ('one temperature', (1,)), ('per token', (0, 1))):
        w = fit(h, head, y, model.softcap, trained)
        s = token_statistics(divided(h_test, w).detach(), head, y_test, softcap=model.softcap)
        top = (s.top_logit - s.lse).exp().clamp(max=1).cpu().numpy(), s.top_token.cpu() == y_test
        print(f'{name}: NLL {s.nll.mean():.4f}  ECE {metrics.ece(*top):.4f}  AUROC '
              f'{metrics.auroc(*top):.4f}  accuracy {metrics.accuracy(*top):.4f}')


if __name__ == '__main__':
    main()
