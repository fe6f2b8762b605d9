"""Pack the documents of a training step into rows of equal length."""

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.random import default_rng     # not at its first use: that import would lose a Ctrl-C

IGNORE = -100   # a target without loss


def first_fit(lengths, row_length):
    """Return the row of each sequence, int [n], by first-fit decreasing."""
    rows = np.zeros(len(lengths), dtype=np.int64)
    space = np.full(len(lengths), row_length)  # at most one row per sequence
    for i in np.argsort(-np.asarray(lengths), kind='stable'):
        rows[i] = np.argmax(space >= lengths[i])
        space[rows[i]] -= lengths[i]
    return rows


@dataclass
class Packed:
    """The rows of a step, int64 [R, T]: R rows of T tokens; see `device.micro_batches`."""
    tokens: np.ndarray      # padding is 0
    positions: np.ndarray   # of each token in its sequence, from 0
    ends: np.ndarray        # token i sees token j when j <= i < ends[j]; padding sees itself alone
    targets: np.ndarray     # the next token of the sequence if its loss mask is set, else IGNORE
    owner: np.ndarray       # index of the sequence, -1 for padding


def pack(sequences, row_length, multiple=1, groups=None):
    """Pack (tokens, loss mask) pairs into a multiple of `multiple` rows; return a Packed. Sequences
    of equal `groups`, int [n] from 0, such as a preference pair, share a row. Raises ValueError for
    a group that is longer than a row.
    """
    groups = np.arange(len(sequences)) if groups is None else np.asarray(groups)
    lengths = np.bincount(groups, [len(tokens) for tokens, _ in sequences]).astype(np.int64)
    if lengths.max() > row_length:
        raise ValueError(f'group {lengths.argmax()} has {lengths.max()} tokens, and a row has room '
                         f'for {row_length}')
    row_of = first_fit(lengths, row_length)[groups]
    n_rows = round_up(row_of.max() + 1, multiple)
    shape = (n_rows, row_length)
    packed = Packed(tokens=np.zeros(shape, np.int64), positions=np.zeros(shape, np.int64),
                    ends=np.tile(np.arange(1, row_length + 1), (n_rows, 1)),
                    targets=np.full(shape, IGNORE), owner=np.full(shape, -1))
    used = [0] * n_rows
    for i, ((tokens, loss_mask), row) in enumerate(zip(sequences, row_of)):
        begin, used[row] = used[row], used[row] + len(tokens)
        at = row, slice(begin, used[row])
        packed.tokens[at], packed.positions[at] = tokens, np.arange(len(tokens))
        packed.ends[at], packed.owner[at] = used[row], i
        packed.targets[row, begin:used[row] - 1] = np.where(
            loss_mask[1:], tokens[1:].astype(np.int64), IGNORE)
    return packed


def sequence_weights(packed):
    """Return each target's weight in the mean of sequence means, float32 [R, T]; sum 1."""
    supervised = packed.targets >= 0
    owner = packed.owner[supervised]
    count = np.bincount(owner)
    weights = np.zeros(supervised.shape, np.float32)
    weights[supervised] = 1 / (count[owner] * np.count_nonzero(count))
    return weights


def split_groups(groups, size, seed):
    """Return the indices of at most `size` sequences, drawn by the seed, and those of the others.
    A group of `groups`, int64 [n], is not divided; one larger than the rest of `size` is passed
    over.
    """
    order = default_rng(seed).permutation(len(groups))
    sizes, chosen = Counter(groups.tolist()), []
    for group in dict.fromkeys(groups[order].tolist()):
        if sizes[group] <= size:
            chosen.append(group)
            size -= sizes[group]
        if not size:
            break
    held_out = np.isin(groups[order], np.array(chosen, np.int64))
    return order[held_out], order[~held_out]


def epochs_of(n, epochs):
    """Return how many sequences `epochs` of n have: of 100 sequences 57 in 0.57, a float."""
    return math.floor(round(n * epochs, 6))


def epoch_order(n, epoch, seed):
    """Return a permutation of n sequences."""
    return default_rng([seed, epoch]).permutation(n)


def round_up(n, multiple):
    return -(-n // multiple) * multiple
