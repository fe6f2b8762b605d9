"""Trees of tokens to log-probabilities: the rows, the device, the model and how it is loaded.

Every log-probability is float32 from the logits on. The host makes rows ahead of the device, and
never waits for work that it has just launched.
"""

import functools
import hashlib
import importlib
import math
from collections import deque
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace

import numpy as np
import torch

import fused_ce
from data.packing import pack_alone, pack_trees, stack_rows
from model import CausalLM
from runtime import checkpoint, device


def score(load, trees, pack_len=4096, batch_rows=1, deterministic=False, statistics=False,
          trim=1, dropout_seeds=()):
    """Yield (index, numbers, values) for each of `trees`, (index, Tree) pairs, as they are done.

    load:          returns the model; called once there is something to score
    deterministic: each tree in a row and a batch of its own
    statistics:    also what a next-token distribution is like, see values
    trim:          cut off what no score depends on, to a multiple of so many tokens; 0: nothing
    dropout_seeds: one pass with dropout for each; not with `statistics`
    numbers:       int [M], for each scored token its option, or its place in Tree.scored
    values:        float32 [M, 1] log-probability, or one of each pass; with `statistics` [M, 4]:
                   log-probability, top token, log-probability of that, entropy in nats
    """
    unfinished = {}

    def counted():
        for index, tree in trees:
            unfinished[index] = tree.n_scored, [], []
            yield index, tree

    rows = pack_alone(counted()) if deterministic else pack_trees(counted(), pack_len)
    batches = stack_rows(rows, 1 if deterministic else batch_rows, 0 if deterministic else trim)
    for copy, scored in launch(load, batches, statistics, dropout_seeds):
        for (index, number, _, _), value in zip(scored, copy.values(), strict=True):
            n, numbers, values = unfinished[index]
            numbers.append(number)
            values.append(value)
            if len(values) == n:
                del unfinished[index]
                yield index, np.array(numbers), np.array(values)


def launch(load, batches, statistics, dropout_seeds):
    """Yield (HostCopy of the values, scored) of each batch of `stack_rows`.

    A thread makes batches ahead of the device, and each is handed over once the next one has been
    launched: the device always has work.
    """
    model, last = None, None
    with ThreadPoolExecutor(1) as pool:
        ahead = deque(pool.submit(next, batches, None) for _ in range(4))
        try:
            while batch := ahead.popleft().result():
                ahead.append(pool.submit(next, batches, None))
                arrays, scored = batch
                if model is None:
                    model = load()
                    training = model.training
                    model.eval()
                    for module in model.modules():      # adapters have the only dropout
                        module.training = (bool(dropout_seeds)
                                           and isinstance(module, torch.nn.Dropout))
                with torch.no_grad():
                    values = (dropout_values(model, arrays, scored, dropout_seeds)
                              if dropout_seeds else
                              forward_values(model, arrays, scored, statistics))
                launched = device.HostCopy(values), scored
                if last:
                    yield last
                last = launched
            if last:
                yield last
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            if model is not None:
                model.train(training)


def forward_values(model, arrays, scored, statistics):
    """The values of `score` for each of `scored`, as a tensor [M, 1 or 4] on the model's device."""
    head, cap = model.head, model.softcap
    inputs = torch.from_numpy(np.ascontiguousarray(arrays))
    at, tokens = (torch.tensor([entry[i] for entry in scored]) for i in (2, 3))
    hidden = model(*to_device(inputs, head.device)).flatten(0, 1)
    if not statistics:
        return token_log_probs(hidden, head, at, tokens, cap)[:, None]
    s = fused_ce.token_statistics(hidden[to_device(at, head.device)], head, tokens, softcap=cap)
    return torch.stack([-s.nll, s.top_token.float(), s.top_logit - s.lse, s.entropy], 1)


def dropout_values(model, arrays, scored, seeds):
    """The log-probability of each of `scored` in a pass with dropout per seed, [M, len(seeds)].

    What is dropped depends on the seed and on the tokens of the batch alone.
    """
    columns = []
    for seed in seeds:
        digest = hashlib.blake2b(f'{seed} '.encode() + arrays.tobytes(), digest_size=8).digest()
        torch.manual_seed(int.from_bytes(digest))
        columns.append(forward_values(model, arrays, scored, statistics=False))
    return torch.cat(columns, 1)


def mean_log_probs(numbers, values, n_options):
    """Log of the mean over passes of each option's probability, float64 [n_options].

    numbers, values: as of `score`, one column of values per pass
    """
    sums = [np.bincount(numbers, of_pass, n_options) for of_pass in values.T]   # in float64
    return np.logaddexp.reduce(sums) - math.log(len(sums))


def token_log_probs(hidden, head, at, tokens, softcap):
    """log p(tokens[i] | hidden[at[i]]), float32 [M]. Each row in use is multiplied with head once.

    hidden [N, D] and head [V, D] on one device; at [M], whose values may repeat, and tokens [M] on
    the CPU, so that the host does not wait for the device.
    """
    used, place = at.unique(return_inverse=True)        # used[place] = at
    indices = to_device(torch.cat((at, tokens, place, used)), head.device)
    at, tokens, place, rows = indices.split([len(at)] * 3 + [len(used)])
    label = torch.zeros_like(used)      # any: the sum over all tokens does not depend on it
    lse = fused_ce.token_statistics(hidden[rows], head, label, softcap=softcap).lse
    logits = torch.cat([(hidden[i].float() * head[k].float()).sum(1)
                        for i, k in zip(at.split(4096), tokens.split(4096), strict=True)])
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return logits - lse[place]


def to_device(x, device):
    """A CPU tensor on `device`; the host does not wait for the copy."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == 'cuda' else x


def option_log_probs(model, trees, **options):
    """Summed log-probability of every option: a list of float64 arrays [K], one per tree.

    options: as of `score`
    """
    sums = {index: mean_log_probs(numbers, values, len(trees[index].leaves))
            for index, numbers, values in score(lambda: model, enumerate(trees), **options)}
    return [sums[index] for index in range(len(trees))]


# ------------------------------------------------------------------------------------------------
# The model
# ------------------------------------------------------------------------------------------------

def load_ahead(pool, folder, base, cfg, n_items):
    """Return the `load` of `score`: threads of `pool` read the weights while items are tokenized.

    Other threads meanwhile load the kernels of a GPU and, once a thread of `pool` is free, the
    library that draws pictures, for which no score waits.
    """
    if not n_items:
        return lambda: load_model(folder, base, cfg)
    warm = []
    if loads_kernels(cfg):
        warm.append(pool.submit(warm_up, checkpoint.read_config(folder), cfg))
    weights = pool.submit(load_model, folder, base, cfg)
    if cfg.pictures:
        pool.submit(importlib.import_module, 'matplotlib.figure')

    @functools.cache
    def load():
        wait(warm)
        warm.clear()    # the error of one that failed would keep its tensors on the GPU
        return weights.result()

    return load


def loads_kernels(cfg):
    """Return whether the forward pass uses the Triton kernels of model.py and attention.py."""
    return cfg.device.startswith('cuda') and cfg.dtype == 'bfloat16'


def row_lengths(cfg):
    """Return (tokens in a packed row, `trim` of `score`) that are fastest for `cfg`.

    Longer rows repeat the shots less often. Triton compiles the kernels again for a length that is
    not a multiple of 16, and FlexAttention for each new length.
    """
    if loads_kernels(cfg):
        return 32768, 128
    return (16384, 0) if cfg.device.startswith('cuda') else (4096, 1)


def load_model(folder, base, cfg):
    """Return the model in the folder `base`; for dropout passes, with the adapters in `folder`."""
    model = checkpoint.load(base, cfg.device, getattr(torch, cfg.dtype))
    if cfg.passes:
        checkpoint.add_adapter(model, folder)
    return model


def warm_up(config, cfg):
    """Load every kernel of a forward pass, which takes seconds, by running a model of one layer."""
    device.pick_device(cfg.device)      # the current GPU of a new thread is the first one
    # Triton makes other code for sizes that are multiples of 16
    config = replace(config, num_hidden_layers=1, layer_types=(config.layer_types or [])[:1],
                     vocab_size=4096 + config.vocab_size % 16)
    with torch.device('meta'):
        model = CausalLM(config)
    # Any values will do; drawing them would take float32 memory. model.to_empty imports sympy.
    for key, parameter in [*model.named_parameters()]:
        parent, _, name = key.rpartition('.')
        values = torch.empty(parameter.shape, dtype=torch.bfloat16, device=cfg.device)
        setattr(model.get_submodule(parent), name, torch.nn.Parameter(values))
    at = np.arange(cfg.pack_len)[None]
    with torch.no_grad():
        forward_values(model, np.stack([0 * at, at, at + 1]), [(0, 0, 0, 0)], statistics=False)
