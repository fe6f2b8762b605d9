"""Errors of bfloat16 gradients, ours and transformers', against float32, for Gemma 3 on a GPU.

    python research/bench/gradients.py --model=DATA/model --data=DATA/alpaca.json --steps=300
    python research/bench/gradients.py --model=DATA/model --data=DATA/alpaca.json --steps=20 \\
        --random

Trains as train.py does. Before each step it computes the gradient of the same weights and rows in
float32 (ours; transformers' differs by 4e-6), in bfloat16 as train.py does, and in bfloat16 by
transformers with the same rows and masks. An error is |g - g32| / |g32| over all weights. At the
step with the largest error it then rounds the float32 model at one kind of place at a time, forward
or backward, for the document that has most of the error and for a typical one.

--random keeps the norms and replaces each matrix by random numbers of its own standard deviation.
"""

import json
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch
import torch.nn.functional as F

import train
from attention import visible_keys
from research.bench.common import DEVICE
from data.packing import pack
from runtime import checkpoint
from runtime.build import build_optimizer, prepare
from runtime.cli import one_line_errors
from runtime.config import load_config
from runtime.ownership import write_text


@dataclass
class BenchConfig:
    model: str | None = None        # a folder with a Gemma 3, which has all the norms of `places`
    data: str | None = None         # conversations, as in train.py
    steps: int = 300
    lr: float = 5e-5
    random: bool = False            # random matrices of the same size
    out: str = 'out/bench_gradients.json'


def norm(gradients):
    return math.sqrt(sum(g.float().square().sum().item() for g in gradients))


def error(gradients, right):
    return norm([a.float() - b for a, b in zip(gradients, right, strict=True)]) / norm(right)


def summed(model, packed, forward):
    """Return the gradients of model's parameters, float32 sums over rows; forward gives the loss
    of a row [1, T], divided by the supervised tokens of all rows."""
    total = None
    for row in range(len(packed.tokens)):
        tokens, positions, ends, targets = (
            torch.from_numpy(x[row:row + 1]).to(DEVICE)
            for x in (packed.tokens, packed.positions, packed.ends, packed.targets))
        loss = forward(model, tokens, positions, ends, targets)
        (loss / int((packed.targets >= 0).sum())).backward()
        part = [p.grad.float() for p in model.parameters()]
        total = part if total is None else [a + b for a, b in zip(total, part, strict=True)]
        model.zero_grad()
    return total


def sum_of_losses(logits, targets):
    seen = targets >= 0
    return F.cross_entropy(logits[seen].float(), targets[seen], reduction='sum')


def our_loss(model, tokens, positions, ends, targets):
    hidden = model(tokens, positions, ends)
    return sum_of_losses(F.linear(hidden, model.head), targets)


def their_loss(windows):
    def loss(model, tokens, positions, ends, targets):
        masks = {'full_attention': visible_keys(positions, ends, None),
                 'sliding_attention': visible_keys(positions, ends, max(filter(None, windows)))}
        return sum_of_losses(model(input_ids=tokens, position_ids=positions, attention_mask=masks,
                                   use_cache=False).logits, targets)
    return loss


class Rounding(torch.autograd.Function):
    """Round to bfloat16 in the forward pass, the backward pass, or both."""

    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.backward_too = backward
        return x.bfloat16().float() if forward else x.clone()

    @staticmethod
    def backward(ctx, g):
        return (g.bfloat16().float() if ctx.backward_too else g), None, None


def places(model):
    """Return {kind of place: modules whose output is rounded}."""
    blocks = list(model.decoder.layers)
    return {'norms before attention and MLP': [
        m for b in blocks for m in (b.input_layernorm, b.pre_feedforward_layernorm)],
        'q, k, v': [m for b in blocks for m in (
            b.self_attn.q_proj, b.self_attn.k_proj, b.self_attn.v_proj)],
        'norms of q and k': [m for b in blocks for m in (b.self_attn.q_norm, b.self_attn.k_norm)],
        'output of attention': [b.self_attn.o_proj for b in blocks],
        'norms after attention and MLP': [
            m for b in blocks for m in (b.post_attention_layernorm, b.post_feedforward_layernorm)],
        'gate and up': [m for b in blocks for m in (b.mlp.gate_proj, b.mlp.up_proj)],
        'output of the MLP': [b.mlp.down_proj for b in blocks],
        'residual stream': blocks, 'last norm': [model.decoder.norm]}


def attribute(model, packed):
    """Return {place: errors of rounding it (forward, backward)}, and of all of them."""
    right, kinds = summed(model, packed, our_loss), places(model)

    def with_rounding(modules, *when):
        hooks = [m.register_forward_hook(lambda m, _, y: Rounding.apply(y, *when)) for m in modules]
        result = error(summed(model, packed, our_loss), right)
        for hook in hooks:
            hook.remove()
        return round(result, 5)
    kinds['all'] = [m for modules in kinds.values() for m in modules]
    return {name: [with_rounding(modules, *when) for when in ((True, False), (False, True))]
            for name, modules in kinds.items()}


def bench(config):
    import transformers
    cfg = train.TrainConfig(
        model=config.model, data=config.data, epochs=1000.0, batch_size=32, max_length=1024,
        pack_len=2048, micro_rows=4, lr=config.lr, dtype='bfloat16', max_steps=config.steps)
    run = train.load_run(cfg, train.SFT, DEVICE)
    model = checkpoint.load(config.model, DEVICE, torch.bfloat16)
    exact = checkpoint.load(config.model, DEVICE, torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        config.model, dtype=torch.bfloat16, attn_implementation='sdpa').to(DEVICE)
    if config.random:
        torch.manual_seed(0)
        with torch.no_grad():
            for p in (p for p in model.parameters() if p.ndim > 1):
                p.normal_(0, p.float().std().item())
    model, exact.decoder.attention = prepare(model, cfg, DEVICE), 'explicit'
    optimizer, named = build_optimizer(model, cfg), dict(theirs.named_parameters())
    rows, worst = [], (0.0, None, None)
    for step, (chosen, packed) in enumerate(
            train.packed_batches(run, 0, config.steps)):
        with torch.no_grad():
            for name, p in model.named_parameters():
                for other in (exact.get_parameter(name), named[name]):
                    other.copy_(p)
        right = summed(exact, packed, our_loss)
        optimizer.begin(-(-len(packed.tokens) // cfg.micro_rows))
        train.forward_backward(model, packed, cfg, DEVICE)
        own = dict(zip(optimizer.parameters(), optimizer.gradients(), strict=True))
        ours = error([own[p] for p in model.parameters()], right)
        peer = dict(zip(named, summed(theirs, packed, their_loss(run.config.windows)), strict=True))
        peer = error([peer[name] for name, _ in model.named_parameters()], right)
        rows.append({'step': step + 1, 'norm': norm(right), 'ours': ours, 'transformers': peer})
        print(step + 1, *(f'{key} {rows[-1][key]:.4f}' for key in ('norm', 'ours', 'transformers')),
              flush=True)
        if ours > worst[0]:
            worst = ours, chosen, {k: p.detach().cpu() for k, p in model.named_parameters()}
        for group in optimizer.param_groups:
            group['lr'] = train.learning_rate(step, config.steps, cfg)
        optimizer.step(torch.ones((), device=DEVICE) / max(1.0, rows[-1]['norm']))
    return {'rows': rows, 'summary': summary(rows),
            'places': attribution(exact, worst, run.sequences)}


def summary(rows):
    """Return {model: median, 90 % quantile and maximum of its errors}, and where ours is above."""
    errors = {key: np.array([row[key] for row in rows]) for key in ('ours', 'transformers')}
    return {key: [round(float(x), 4) for x in (np.median(e), np.quantile(e, 0.9), e.max())]
            for key, e in errors.items()} | {
        'ours above': [(row['step'], round(row['ours'], 3), round(row['transformers'], 3))
                       for row in rows if row['ours'] > row['transformers']]}


def attribution(exact, worst, sequences):
    """Return {'worst' and 'typical' document: see `attribute`} at the step with the worst error."""
    _, chosen, weights = worst
    with torch.no_grad():
        for name, p in exact.named_parameters():
            p.copy_(weights[name])
    errors = []
    for i in chosen:
        packed = pack([sequences[i]], len(sequences[i][0]))
        right, every = summed(exact, packed, our_loss), places(exact)
        hooks = [m.register_forward_hook(lambda m, _, y: Rounding.apply(y, True, True))
                 for modules in every.values() for m in modules]
        errors.append((norm([a - b for a, b in zip(summed(exact, packed, our_loss), right,
                                                   strict=True)]), int(i)))
        for hook in hooks:
            hook.remove()
    errors.sort()
    return {name: attribute(exact, pack([sequences[i]], len(sequences[i][0])))
            for name, (_, i) in (('worst', errors[-1]), ('typical', errors[len(errors) // 2]))}


def main(argv):
    config = load_config(BenchConfig, argv, __doc__)
    with one_line_errors():
        result = bench(config)
        print(json.dumps(result['summary'], indent=1))
        for name, kinds in result['places'].items():
            print(f'\n{name} document: error of rounding forward, backward')
            for kind, values in kinds.items():
                print(f'  {kind:32}', *values)
        os.makedirs(Path(config.out).parent, exist_ok=True)
        write_text(config.out, json.dumps(result))
        print(f'\nwrote {config.out}')


if __name__ == '__main__':
    main(sys.argv[1:])
