"""Pack token trees, the questions of an evaluation with their options, into rows of model.py."""

import hashlib
import itertools
import os
from dataclasses import dataclass, field

import numpy as np

from data.packing import round_up


@dataclass
class Tree:
    """A prompt and its continuations, the options, or none for a text."""
    prefix: tuple[int, ...]     # shared with other trees: BOS, header and shots
    prompt: list[int]           # shared by the continuations: the question
    continuations: list[list[int]] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)     # of each option: index of its first token
    scored: list[int] = field(default_factory=list)     # indices of the scored tokens of a text
    shots: int = 0

    @property
    def sequences(self):
        """Return prefix + prompt + continuation of each option."""
        return [[*self.prefix, *self.prompt, *ids] for ids in self.continuations]

    @property
    def n_tokens(self):
        """Return the number of scored tokens of each option."""
        return [len(ids) - start for ids, start in zip(self.sequences, self.starts, strict=True)]

    def sums(self, numbers, values):
        """Return the summed log-probability of each option, float64 [K], from `numbers`, int [M],
        the option of each scored token, and `values` [M, 1], its log-probability.
        """
        return np.bincount(numbers, values[:, 0], len(self.continuations))

    @property
    def branches(self):
        """Return lists of consecutive options that differ in their last token, if at all."""
        groups = itertools.groupby(range(len(self.continuations)),
                                   key=lambda k: self.continuations[k][:-1])
        return [[*group] for _, group in groups]

    @property
    def fingerprint(self):
        """Return a hash of the scored tokens and of those before them; changes with the prompt."""
        digest = hashlib.blake2b(digest_size=6)
        starts = dict.fromkeys(self.starts or [0])      # nearly always the same for all options
        for ids in (self.prefix, self.prompt, *self.continuations, (*starts, *self.scored)):
            digest.update(np.array([*ids, -1], dtype=np.int32).tobytes())
        return digest.hexdigest()


class PackedRow:
    """A packed row of trees that is being filled. scored: per scored token (tree, option or index
    in Tree.scored, index in the row of the token before it, which predicts it, the token).
    """

    def __init__(self):
        self.tokens = []
        self.positions = []
        self.ends = []
        self.scored = []
        self.prefix = self.prefix_at = None

    def append(self, ids, position):
        """Append tokens from `position` of their prompt on; return their row indices."""
        begin, end = len(self.tokens), len(self.tokens) + len(ids)
        self.tokens += ids
        self.positions += range(position, position + len(ids))
        self.ends += [end] * len(ids)
        return range(begin, end)

    def add(self, index, tree, branches):
        """Append a tree with these branches, without a prefix that the previous tree has as well;
        return the row indices of its prefix and prompt.
        """
        if self.prefix != tree.prefix:
            self.prefix, self.prefix_at = tree.prefix, self.append(tree.prefix, 0)
        prompt_at = self.append(tree.prompt, len(tree.prefix))
        shared, shared_at = [*tree.prefix, *tree.prompt], [*self.prefix_at, *prompt_at]
        branches_at = [self.append(tree.continuations[k][:-1], len(shared)) for k, *_ in branches]
        for at in (self.prefix_at, prompt_at):  # all tokens after them see these
            self.ends[at.start:at.stop] = [len(self.tokens)] * len(at)
        for branch, branch_at in zip(branches, branches_at, strict=True):
            row_at = [*shared_at, *branch_at]
            for k in branch:
                tokens = [*shared, *tree.continuations[k]]
                self.scored += [(index, k, row_at[i - 1], tokens[i])
                                for i in range(tree.starts[k], len(tokens))]
        self.scored += [(index, n, shared_at[i - 1], shared[i]) for n, i in enumerate(tree.scored)]
        return shared_at

    def padded(self, length):
        """Return (int64 [3, length] of tokens, positions and ends; scored)."""
        n = len(self.tokens)
        arrays = np.zeros((3, length), dtype=np.int64)
        arrays[:, :n] = self.tokens, self.positions, self.ends
        arrays[2, n:] = np.arange(n + 1, length + 1)    # padding sees only itself
        return arrays, self.scored


def prompt_trees(prompts):
    """Return a Tree for the state at the end of each of `prompts`, which share a prefix."""
    shared = min(len(os.path.commonprefix(prompts)), min(map(len, prompts)) - 1)
    return [Tree(tuple(ids[:shared]), ids[shared:], [[0]], [len(ids)]) for ids in prompts]


def pack_prompts(prompts, numbers):
    """Return a PackedRow of the prompts at the indices `numbers`, {number: indices of tokens}."""
    row, trees = PackedRow(), prompt_trees([prompts[i] for i in numbers])
    return row, {i: row.add(i, tree, ()) for i, tree in zip(numbers, trees)}


def pack_trees(trees, row_length):
    """Yield (arrays, scored) of packed rows, see `PackedRow.padded`, from (index, Tree) pairs; the
    row of a longer tree is a multiple of row_length.
    """
    row = PackedRow()
    for index, tree in trees:
        branches = tree.branches
        n_new = len(tree.prompt) + sum(max(0, len(tree.continuations[k]) - 1) for k, *_ in branches)
        if row.prefix != tree.prefix:
            n_new += len(tree.prefix)
        if row.tokens and len(row.tokens) + n_new > row_length:
            yield row.padded(round_up(len(row.tokens), row_length))
            row = PackedRow()
        row.add(index, tree, branches)
    if row.tokens:
        yield row.padded(round_up(len(row.tokens), row_length))


def pack_alone(trees):
    """Yield (arrays, scored) like `pack_trees`, each tree alone in a row of its own length."""
    for index, tree in trees:
        row = PackedRow()
        row.add(index, tree, tree.branches)
        yield row.padded(max(128, 1 << (len(row.tokens) - 1).bit_length()))


def stack_rows(rows, batch_rows, trim):
    """Yield (arrays [3, B, T], scored with indices into B * T) of up to `batch_rows` equal rows,
    without trailing tokens that no score needs; T is a multiple of `trim`; 0: all tokens stay.
    """
    for _, group in itertools.groupby(rows, key=lambda row: row[0].shape):
        while batch := list(itertools.islice(group, batch_rows)):
            arrays = np.stack([arrays for arrays, _ in batch], 1)
            if trim:
                last = max((at for _, scored in batch for _, _, at, _ in scored), default=0)
                arrays = arrays[:, :, :round_up(last + 1, trim)]
            T = arrays.shape[2]
            yield arrays, [(tree, k, b * T + at, token)
                           for b, (_, scored) in enumerate(batch) for tree, k, at, token in scored]


def stack_answers(trees, start, eos, pack_len, deterministic=False):
    """Yield (arguments of Seq2Seq in families/t5.py, scored as in `stack_rows`) of (index, Tree).

    The encoder reads a prompt and `eos`; the options follow `start` in one row of the decoder. A
    batch has about `pack_len` tokens of the encoder, fewer for prompts of more than 1,024, whose
    attention takes memory by the square; if deterministic, one tree.
    """
    batch = []
    for index, tree in trees:
        ids = tree.sequences
        prompts = [(*option[:at], eos) for option, at in zip(ids, tree.starts, strict=True)]
        answers = Tree((start,), [], [
            option[at:] for option, at in zip(ids, tree.starts, strict=True)], [1] * len(ids))
        # several, if the options are in the prompt
        rows = {prompt: PackedRow() for prompt in prompts}
        for prompt, row in rows.items():
            row.add(index, answers, [[k] for k, p in enumerate(prompts) if p == prompt])
        longest = max(len(prompt) for prompt, _ in [*batch, *rows.items()])
        n_tokens = (len(batch) + len(rows)) * longest * max(1, longest / 1024)
        if batch and (deterministic or n_tokens > pack_len):
            yield _stack_answers(batch)
            batch = []
        batch += rows.items()
    if batch:
        yield _stack_answers(batch)


def _stack_answers(batch):
    lengths = [len(prompt) for prompt, _ in batch]
    padded = np.zeros((len(batch), round_up(max(lengths), 8)), dtype=np.int64)     # for kernels
    for row, (prompt, _) in zip(padded, batch, strict=True):
        row[:len(prompt)] = prompt
    width = max(len(row.tokens) for _, row in batch)
    (arrays, scored), = stack_rows([row.padded(width) for _, row in batch], len(batch), 0)
    return [padded, np.array(lengths)[:, None], *arrays], scored
