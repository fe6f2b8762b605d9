"""Rows of trees, [prompt][answer 0][answer 1] ..., and where the tokens of the answers are."""

from dataclasses import dataclass

import numpy as np
import torch

from data.packing import IGNORE, Packed, first_fit
from data.tree_rows import PackedRow, Tree
from data.preferences import to_tree
from runtime.device import to_device

COLUMNS = ('advantage', 'weight', 'old', 'reference', 'value', 'returns')     # of PackedRollouts


@dataclass
class PackedAnswers(Packed):
    """Rows R of trees: n answer tokens of N answers; targets and owner only serve to count."""
    token: np.ndarray       # int64 [n]: a token of an answer
    at: np.ndarray          # int64 [n]: index in its row of the token before it, which predicts it
    answer: np.ndarray      # int64 [n]: number of its answer
    begin: np.ndarray       # int64 [R + 1]: number of each row's first token
    counts: np.ndarray      # int64 [N]: tokens of each answer
    where: np.ndarray       # int64 [N, 2]: prompt of each answer, and its number there


@dataclass
class PackedPairs(PackedAnswers):
    """Ranked answers to prompts."""
    pairs: np.ndarray       # int64 [P, 2]: numbers of the better and the worse answer; no ties
    pair_weight: np.ndarray     # float32 [P], in the mean over prompts of means over their pairs
    reference: np.ndarray   # float32 [N]: log-probability by the reference; 0 without one
    margin: np.ndarray      # float32 [P], by which the rewards of a pair are to differ


@dataclass
class PackedRollouts(PackedAnswers):
    """The answers of a rollout, with a number per answer token for each of COLUMNS, float64 [n]."""
    advantage: np.ndarray   # of the token
    weight: np.ndarray      # of the token's loss; 0 for an answer without a loss
    sampled: np.ndarray     # log-probability when it was generated
    old: np.ndarray | None  # by the kernels of training; None if the first update computes it
    reference: np.ndarray | None    # the same before training; None if kl = 'none'
    value: np.ndarray | None    # by the value head, before the token; None or zeros without one
    returns: np.ndarray | None      # that the value is to predict, of PPO; else None
    measured: dict          # {name: number}: means over the answers, for the log
    n_supervised: int       # number of tokens that have a loss, at least 1


def pack_answers(prompts, answers, row_length, multiple=1, last=False):
    """Pack prompts with their answers into rows of `row_length` tokens; return a PackedAnswers.

    prompts:  lists of token ids, with several trees if their answers need more than a row
    answers:  per prompt, lists of token ids
    multiple: rows of padding make the number of rows a multiple of this
    last:     only the index of each answer's last token is scored, which a reward needs
    """
    trees = []      # ((prompt, number of the first answer here), Tree)
    for i, prompt in enumerate(prompts):
        room = -1
        for k, answer in enumerate(answers[i]):
            # the last token of an answer is computed only if something follows it
            ids = [*answer, 0] if last else [*answer]
            if room < len(ids) - 1:
                tree = Tree((), [*prompt])
                trees.append(((i, k), tree))
                room = row_length - len(prompt)
            tree.continuations.append(ids)
            tree.starts.append(len(prompt) + last * len(answer))
            room -= len(ids) - 1
    lengths = [len(tree.prompt) + sum(len(tree.continuations[k]) - 1 for k, *_ in tree.branches)
               for _, tree in trees]
    row_of = first_fit(lengths, row_length)
    rows = [PackedRow() for _ in range(-(-(row_of.max() + 1) // multiple) * multiple)]
    for (index, tree), row in zip(trees, row_of, strict=True):
        rows[row].add(index, tree, tree.branches)
    tokens, positions, ends = np.stack([row.padded(row_length)[0] for row in rows], 1)
    scored = np.array([(i, first + k, at, token) for row in rows
                       for (i, first), k, at, token in row.scored])
    where = scored[:, :2]
    at, token = scored[:, 2:].T
    begins = np.flatnonzero((np.diff(where, axis=0, prepend=-1) != 0).any(1))
    counts = np.diff([*begins, len(where)])
    sizes, used = np.array([(len(row.scored), len(row.tokens)) for row in rows]).T
    targets = np.full_like(tokens, IGNORE)
    targets[np.repeat(np.arange(len(rows)), sizes), at] = token
    # stretches of consecutive positions are numbered
    owner = np.cumsum(np.diff(positions, prepend=0) != 1, axis=1)
    owner[np.arange(row_length) >= used[:, None]] = -1
    return PackedAnswers(tokens, positions, ends, targets, owner, token=token, at=at,
                         answer=np.repeat(np.arange(len(counts)), counts),
                         begin=np.cumsum([0, *sizes]), counts=counts,
                         where=where[begins])


def pack_rankings(sequences, row_length, multiple=1, last=False, reference=None, margins=None):
    """Pack sequences of `preferences.load_preferences` as `pack_answers` does; return PackedPairs.

    reference: float32 [sequences, answers], margins: float32 [sequences]; None: zeros
    """
    trees, ranks = zip(*(to_tree(*sequence) for sequence in sequences), strict=True)
    packed = pack_answers([tree.prompt for tree in trees], [tree.continuations for tree in trees],
                          row_length, multiple, last)
    number = {tuple(place): i for i, place in enumerate(packed.where.tolist())}
    pairs, weights = [], []
    for t, rank in enumerate(ranks):
        ordered = [(number[t, j], number[t, k]) for j in range(len(rank))
                   for k in range(j + 1, len(rank)) if rank[j] < rank[k]]
        pairs += ordered
        weights += [1 / len(ordered) / len(trees)] * len(ordered)
    pairs = np.array(pairs)
    tree, answer = packed.where.T
    if reference is None:
        reference = np.zeros((len(trees), answer.max() + 1), np.float32)
    if margins is None:
        margins = np.zeros(len(trees), np.float32)
    return PackedPairs(
        **vars(packed), pairs=pairs, pair_weight=np.array(weights, np.float32),
        reference=reference[tree, answer], margin=margins[tree[pairs[:, 0]]])


class Answers:
    """The answers in some rows of a PackedAnswers, on a device; the names are those there."""

    def __init__(self, packed, rows, device):
        length, begin = packed.tokens.shape[1], packed.begin
        parts = [np.arange(begin[row], begin[row + 1]) for row in rows]
        offsets = np.repeat(np.arange(len(rows)) * length, [len(part) for part in parts])
        self.part = np.concatenate(parts)       # int64 [n], numbers of the tokens in these rows
        self.at = to_device(packed.at[self.part] + offsets, device)     # in the flattened rows
        self.token = torch.from_numpy(packed.token[self.part])      # on the CPU
        self.answer = to_device(packed.answer[self.part], device)
        self.counts = to_device(packed.counts, device).float()      # of all answers of the batch

    def gather(self, hidden):
        """Return the hidden states [n, D] that predict the answers' tokens, of hidden [B, T, D]."""
        return hidden.flatten(0, 1).index_select(0, self.at)

    def sums(self, x, tokens=slice(None)):
        """Return the sum [N] over each answer of x, a number for each of `tokens`."""
        return torch.zeros_like(self.counts).index_add(0, self.answer[tokens], x)

    def present(self, tokens=slice(None)):
        """Return 1 for each answer that has one of `tokens`, else 0: float32 [N]."""
        return torch.zeros_like(self.counts).index_fill(0, self.answer[tokens], 1)
