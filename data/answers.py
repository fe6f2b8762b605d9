"""Rows of prompts with their answers, and where the tokens of the answers are.

A row holds trees, [prompt][answer 0][answer 1] ..., so a prompt is computed once, and answers that
are compared are in one micro-batch.
"""

import numpy as np
import torch

from data.packing import IGNORE, Row, Tree, first_fit
from runtime.device import to_device


def pack_answers(trees, row_length, multiple=1):
    """Pack trees into rows, each tree in one row; return a dict of int64 arrays.

    tokens, positions, ends, targets, owner: [rows, row_length] as in `packing.pack`; the last two
    only serve to count. The answers and their tokens are numbered in the order of the rows:

    token   [n]         a token of an answer
    at      [n]         index in its row of the token before it, whose hidden state predicts it
    answer  [n]         number of its answer
    begin   [rows + 1]  number of each row's first token
    counts  [N]         tokens of each answer
    where   [N, 2]      tree and continuation of each answer
    """
    lengths = [len(tree.prompt) + sum(len(tree.continuations[k]) - 1 for k, *_ in tree.branches)
               for tree in trees]
    row_of = first_fit(lengths, row_length)
    rows = [Row() for _ in range(-(-(row_of.max() + 1) // multiple) * multiple)]
    for index, (tree, row) in enumerate(zip(trees, row_of, strict=True)):
        rows[row].add(index, tree, tree.branches)
    arrays = np.stack([row.padded(row_length)[0] for row in rows], 1)
    packed = dict(zip(('tokens', 'positions', 'ends'), arrays, strict=True))
    sizes = [len(row.scored) for row in rows]
    scored = np.concatenate([np.array(row.scored, dtype=np.int64).reshape(-1, 4) for row in rows])
    where, at, token = scored[:, :2], scored[:, 2], scored[:, 3]
    first = np.flatnonzero((np.diff(where, axis=0, prepend=-1) != 0).any(1))
    counts = np.diff([*first, len(where)])
    packed['targets'] = np.full_like(packed['tokens'], IGNORE)
    packed['targets'][np.repeat(np.arange(len(rows)), sizes), at] = token
    packed['owner'] = np.full_like(packed['tokens'], -1)
    for i, row in enumerate(rows):
        # number the stretches of consecutive positions: a row with trees is not one document
        packed['owner'][i, :len(row.tokens)] = np.cumsum(np.diff(row.positions, prepend=0) != 1)
    return packed | {'token': token, 'at': at, 'answer': np.repeat(np.arange(len(counts)), counts),
                     'begin': np.cumsum([0, *sizes]), 'counts': counts, 'where': where[first]}


def pack_rollouts(prompts, answers, row_length, multiple=1, last=False):
    """Pack prompts with their answers into rows of trees, as `pack_answers`.

    prompts: lists of token ids; answers: per prompt, lists of token ids. A prompt with answers that
    do not fit into one row has several trees. where: int64 [N, 2], (prompt, number) of each answer
    last=True: only the index of each answer's last token is scored
    """
    trees, members = [], []
    for i, prompt in enumerate(prompts):
        room = -1
        for k, answer in enumerate(answers[i]):
            # the last token of an answer is computed only if something follows it
            ids = [*answer, 0] if last else [*answer]
            if room < len(ids) - 1:
                trees.append(Tree((), [*prompt]))
                members.append([])
                room = row_length - len(prompt)
            trees[-1].continuations.append(ids)
            trees[-1].starts.append(len(prompt) + last * len(answer))
            members[-1].append((i, k))
            room -= len(ids) - 1
    packed = pack_answers(trees, row_length, multiple)
    return packed | {'where': np.array([members[tree][k] for tree, k in packed['where']])}


class Answers:
    """The answers in some rows of a batch, on a device; `pack_answers` has the fields.

    part    numpy int64 [n], numbers of the answer tokens in these rows
    at      [n], of these tokens, in the flattened rows
    token   [n], these tokens, on the CPU
    answer  [n], of these tokens
    counts  float32 [N], of all answers of the batch
    """

    def __init__(self, packed, rows, device):
        length, begin, self.device = packed['tokens'].shape[1], packed['begin'], device
        parts = [np.arange(begin[row], begin[row + 1]) for row in rows]
        offsets = np.repeat(np.arange(len(rows)) * length, [len(part) for part in parts])
        self.part = np.concatenate(parts)
        self.at = self.on_device(packed['at'][self.part] + offsets)
        self.token = torch.from_numpy(packed['token'][self.part])
        self.answer = self.on_device(packed['answer'][self.part])
        self.counts = self.on_device(packed['counts']).float()

    def on_device(self, x):
        return to_device(torch.from_numpy(x), self.device)

    def gather(self, hidden):
        """Return the hidden states [n, D] that predict the answers' tokens, of hidden [B, T, D]."""
        return hidden.flatten(0, 1).index_select(0, self.at)

    def sums(self, x, tokens=slice(None)):
        """Return the sum [N] over each answer of x, a number for each of `tokens`."""
        return torch.zeros_like(self.counts).index_add(0, self.answer[tokens], x)

    def present(self, tokens=slice(None)):
        """Return 1 for each answer that has one of `tokens`, else 0: float32 [N]."""
        return torch.zeros_like(self.counts).index_fill(0, self.answer[tokens], 1)
