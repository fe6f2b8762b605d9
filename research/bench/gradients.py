"""Errors of bfloat16 gradients, ours and transformers', against float32, for Gemma 3 on a GPU.

    python research/bench/gradients.py --model=DATA/model --data=DATA/alpaca.json --steps=300
    python research/bench/gradients.py --model=DATA/model --data=DATA/alpaca.json --random

Trains as train.py does. Before each step it computes the gradient of the same weights and rows in
float32 (ours; transformers' differs by 4e-6), in bfloat16 as train.py does, and in bfloat16 by
transformers with the same rows and masks. An error is |g - g32| / |g32| over all weights. At the
step with the largest error it then rounds the float32 model at one kind of place at a time, forward
or backward, for the document that has most of the error and for a typical one.

--random keeps the norms and replaces each matrix by random numbers of its own standard deviation.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch
import torch.nn.functional as F

import train
from attention import visible_keys
from research.bench.common import DEVICE, Options, Script, method_table
from data.packing import pack
from runtime import checkpoint
from runtime.build import build_optimizer, prepare


@dataclass
class BenchConfig(Options):
    model: str | None = None        # a folder with a Gemma 3, which has all the norms of `places`
    data: str | None = None         # conversations, as in train.py
    steps: int = 300
    lr: float = 5e-5
    random: bool = False            # random matrices of the same size


def bench(config):
    """Yield one table: the errors before each step, and those of rounding at each place."""
    import transformers
    cfg = train.TrainConfig(
        model=config.model, data=config.data, epochs=1000.0, batch_size=32, max_length=1024,
        pack_len=2048, micro_rows=4, lr=config.lr, dtype='bfloat16', max_steps=config.steps)
    run = train.load_run(cfg, train.SFT, DEVICE)
    model = checkpoint.load(config.model, DEVICE, torch.bfloat16)
    if config.random:
        torch.manual_seed(0)
        with torch.no_grad():
            for p in (p for p in model.parameters() if p.ndim > 1):
                p.normal_(0, p.float().std().item())
    model = prepare(model, cfg, DEVICE)
    exact = checkpoint.load(config.model, DEVICE, torch.float32)
    exact.decoder.attention = 'explicit'
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        config.model, dtype=torch.bfloat16, attn_implementation='sdpa').to(DEVICE)
    optimizer, names = build_optimizer(model, cfg), [name for name, _ in model.named_parameters()]
    window = max(filter(None, run.config.windows))

    def their_logits(tokens, positions, ends):
        masks = {'full_attention': visible_keys(positions, ends, None),
                 'sliding_attention': visible_keys(positions, ends, window)}
        return theirs(input_ids=tokens, position_ids=positions, attention_mask=masks,
                      use_cache=False).logits

    rows, worst = [], (0.0, None, None)
    for step, (chosen, packed) in enumerate(train.packed_batches(run, 0, config.steps)):
        copy_weights(dict(model.named_parameters()), exact, theirs)
        right = gradient(exact, names, packed)
        optimizer.begin(-(-len(packed.tokens) // cfg.micro_rows))
        train.forward_backward(model, packed, cfg, DEVICE)
        own = dict(zip(optimizer.parameters(), optimizer.gradients(), strict=True))
        rows.append({'step': step + 1, 'norm': right.norm().item(),
                     'ours': error(flat(own[p] for p in model.parameters()), right),
                     'transformers': error(gradient(theirs, names, packed, their_logits), right)})
        print(', '.join(f'{key} {value:.5g}' for key, value in rows[-1].items()), flush=True)
        if rows[-1]['ours'] > worst[0]:
            worst = rows[-1]['ours'], chosen, {
                name: p.detach().cpu() for name, p in model.named_parameters()}
        for group in optimizer.param_groups:
            group['lr'] = train.learning_rate(step, config.steps, cfg)
        optimizer.step(torch.ones((), device=DEVICE) / max(1.0, rows[-1]['norm']))
    _, chosen, weights = worst
    copy_weights(weights, exact)
    yield {'model': config.model, 'rows': rows,
           'places': attribution(exact, names, [run.sequences[i] for i in chosen])}


@torch.no_grad()
def copy_weights(weights, *models):
    for name, weight in weights.items():
        for model in models:
            model.get_parameter(name).copy_(weight)


def flat(gradients):
    return torch.cat([g.float().flatten() for g in gradients])


def error(gradient, right):
    return ((gradient - right).norm() / right.norm()).item()


def gradient(model, names, packed, logits_of=None):
    """Return the gradient of the mean loss of `packed`, float32 sums over its rows, as one vector.

    logits_of: function of tokens, positions and ends [1, T] instead of our model's
    """
    total, n_supervised = 0, int((packed.targets >= 0).sum())
    for row in range(len(packed.tokens)):
        *inputs, targets = (
            torch.from_numpy(x[row:row + 1]).to(DEVICE)
            for x in (packed.tokens, packed.positions, packed.ends, packed.targets))
        logits = logits_of(*inputs) if logits_of else F.linear(model(*inputs), model.head)
        seen = targets >= 0
        loss = F.cross_entropy(logits[seen].float(), targets[seen], reduction='sum')
        (loss / n_supervised).backward()
        total = total + flat(model.get_parameter(name).grad for name in names)
        model.zero_grad()
    return total


def rounded_gradient(model, names, packed, modules, forward, backward):
    """Return `gradient` where the outputs of modules, or their gradients, are rounded to bfloat16.
    """
    def rounded(x):
        return x.bfloat16().float()

    def hook(module, inputs, y):
        y = y + (rounded(y) - y).detach() if forward else y.clone()
        if backward:
            y.register_hook(rounded)
        return y

    hooks = [module.register_forward_hook(hook) for module in modules]
    result = gradient(model, names, packed)
    for handle in hooks:
        handle.remove()
    return result


def places(model):
    """Return {kind of place: modules whose output is rounded}, and all of them."""
    def of_blocks(*names):
        return [block.get_submodule(name) for block in model.decoder.layers for name in names]

    kinds = {
        'norms before attention and MLP': of_blocks('input_layernorm', 'pre_feedforward_layernorm'),
        'q, k, v': of_blocks('self_attn.q_proj', 'self_attn.k_proj', 'self_attn.v_proj'),
        'norms of q and k': of_blocks('self_attn.q_norm', 'self_attn.k_norm'),
        'output of attention': of_blocks('self_attn.o_proj'),
        'norms after attention and MLP': of_blocks('post_attention_layernorm',
                                                   'post_feedforward_layernorm'),
        'gate and up': of_blocks('mlp.gate_proj', 'mlp.up_proj'),
        'output of the MLP': of_blocks('mlp.down_proj'),
        'residual stream': [*model.decoder.layers], 'last norm': [model.decoder.norm]}
    return kinds | {'all': [module for modules in kinds.values() for module in modules]}


def attribution(model, names, sequences):
    """Return {place: {'worst forward', ...: error}} of two documents, the worst and a typical one.
    """
    kinds, distances = places(model), []
    documents = [pack([sequence], len(sequence[0])) for sequence in sequences]
    for packed in documents:
        right = gradient(model, names, packed)
        both = rounded_gradient(model, names, packed, kinds['all'], True, True)
        distances.append((both - right).norm().item())
    order, errors = np.argsort(distances), {kind: {} for kind in kinds}
    for name, index in (('worst', order[-1]), ('typical', order[len(order) // 2])):
        right = gradient(model, names, documents[index])
        for kind, modules in kinds.items():
            for where in ('forward', 'backward'):
                errors[kind][f'{name} {where}'] = error(rounded_gradient(
                    model, names, documents[index], modules, where == 'forward',
                    where == 'backward'), right)
    return errors


def view(table):
    errors = {name: [row[name] for row in table['rows']] for name in ('ours', 'transformers')}
    quantiles = {name: dict(zip(('median', 'high', 'maximum'), np.quantile(e, (0.5, 0.9, 1))))
                 for name, e in errors.items()}
    above = sum(ours > peer for ours, peer in zip(*errors.values()))
    columns = [(name, name, '.1%') for name in table['places']['all']]
    return (f'{table["model"]}: errors of gradients in bfloat16', method_table(quantiles, [
        ('median', 'median', '.1%'), ('90 % quantile', 'high', '.1%'),
        ('maximum', 'maximum', '.1%')]),
        f'Ours is above transformers in {above} of {len(table["rows"])} steps. At the worst step, '
        f'for two documents, rounding of one kind of place:',
        method_table(table['places'], columns, 'place'))


script = Script(__file__, BenchConfig, bench, view)

if __name__ == '__main__':
    script.main(sys.argv[1:])
