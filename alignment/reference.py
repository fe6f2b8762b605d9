"""The reference of preferences: log-probabilities of answers by the model before training."""

from pathlib import Path

import numpy as np
import torch

from alignment.objectives import answer_log_probs
from alignment.packed_answers import pack_rankings
from data.preferences import TIED
from runtime import checkpoint
from runtime.digests import json_digest
from runtime.errors import DataError
from runtime.ownership import temporary
from runtime.parallel import gather, rank, reshard, sum_over_processes, world_size


def cached_reference(run, model):
    """Return the `answer_sums` of the untrained model, cached by a hash of what decides them."""
    cfg = run.cfg
    identity = checkpoint.identity(run.base, run.tokenizer, model.head.dtype, __name__)
    key = json_digest([run.sequences.digest, identity, cfg.attention, model.softcap,
                       model.temperature])
    path = Path(cfg.cache_dir, f'reference-{key}.npz')
    if all(gather(path.exists())):
        try:
            return np.load(path)[path.stem]     # checked by the checksum of zip files
        except Exception as error:      # a damaged file can raise anything
            raise DataError(f'the reference in {path} is damaged ({error!r}); remove the file, and '
                            f'it is computed again') from error
    sums = answer_sums(run, model)
    if rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary(path) as part, open(part, 'wb') as file:
            np.savez(file, **{path.stem: sums})
    return sums


def answer_sums(run, model):
    """Return log-probabilities by the model as it is, float32 [sequences, answers or zeros]."""
    cfg, sequences = run.cfg, run.sequences
    order = np.argsort(-sequences.lengths)
    sums = np.zeros((len(order), (sequences.loss_mask % TIED).max()), np.float32)
    for chosen in np.split(order, range(64, len(order), 64)):
        packed = pack_rankings([sequences[i] for i in chosen], cfg.pack_len,
                               world_size() * (cfg.micro_rows or 1))
        total = torch.zeros(len(packed.counts), device=run.device)
        for answers, log_p, _ in answer_log_probs(model, packed, cfg.micro_rows, run.device):
            total += answers.sums(log_p)
        tree, number = packed.where.T
        sums[chosen[tree], number] = sum_over_processes(total).cpu().numpy()
    reshard(model)
    return sums
