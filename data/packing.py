"""Packed rows: whole sequences side by side in rows of equal length, which attention keeps apart.

Token i of a row sees token j when j <= i < ends[j] (see model.py).
"""

import numpy as np

IGNORE = -100   # a target without loss


def first_fit(lengths, row_length):
    """Return the row of each sequence, int [n], by first-fit decreasing; lengths <= row_length."""
    rows = np.zeros(len(lengths), dtype=np.int64)
    space = np.full(len(lengths), row_length)  # at most one row per sequence
    for i in np.argsort(-np.asarray(lengths), kind='stable'):
        rows[i] = np.argmax(space >= lengths[i])
        space[rows[i]] -= lengths[i]
    return rows


def pack(sequences, row_length, multiple=1):
    """Pack (tokens, loss mask) pairs into rows; return a dict of int64 arrays [rows, row_length].

    tokens, positions (from 0 in each sequence), ends, targets (the next token of the same sequence
    if its loss mask is set, else -100) and owner (index of the sequence, -1 for padding). Rows of
    padding make the number of rows a multiple of `multiple`.
    """
    row_of = first_fit([len(tokens) for tokens, _ in sequences], row_length)
    n_rows = -(-(row_of.max() + 1) // multiple) * multiple
    shape = (n_rows, row_length)
    index = np.broadcast_to(np.arange(row_length), shape)
    packed = {'tokens': np.zeros(shape, np.int64), 'positions': np.zeros(shape, np.int64),
              'ends': index + 1,  # padding sees only itself
              'targets': np.full(shape, IGNORE, np.int64), 'owner': np.full(shape, -1, np.int64)}
    used = np.zeros(n_rows, dtype=np.int64)
    for i, (tokens, loss_mask) in enumerate(sequences):
        row, begin = row_of[i], used[row_of[i]]
        end = begin + len(tokens)
        packed['tokens'][row, begin:end] = tokens
        packed['positions'][row, begin:end] = np.arange(len(tokens))
        packed['ends'][row, begin:end] = end
        packed['targets'][row, begin:end - 1] = np.where(loss_mask[1:],
                                                         tokens[1:].astype(np.int64), IGNORE)
        packed['owner'][row, begin:end] = i
        used[row] = end
    return packed


def epoch_order(n, epoch, seed):
    """Return a permutation of n sequences that depends only on the epoch and the seed."""
    return np.random.default_rng([seed, epoch]).permutation(n)
