"""Tokenised sequences on disk, and the packed rows of a training step.

A cache folder holds `tokens.bin` (uint32) and `learnt.bin` (uint8), all sequences one behind the
other, `offsets.npy` (where each begins, and the end) and `info.json` with a hash of the three. It
is written under a temporary name and renamed; one that its hash does not fit is written again.
"""

import errno
import hashlib
import json
import os
import shutil
import uuid
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data import (BAD_ROW, DataError, count_rows, forked_pool, local_path, row_error, writing)

FORMAT = 2  # of the cache; raise it when what is written changes
FILES = ('tokens.bin', 'learnt.bin', 'offsets.npy', 'info.json')
IGNORE = -100


class Sequences:
    """Memory-mapped sequences: `seqs[i]` gives (tokens, learnt), two numpy arrays.

    digest: of all tokens, of what is learnt and of the order. Raises DataError if the folder's
    files are not what was written into it.
    """

    def __init__(self, folder):
        folder = Path(folder)
        try:
            self.info = json.loads((folder / 'info.json').read_text(encoding='utf-8'))
            self.offsets = np.load(folder / 'offsets.npy')
            # as plain arrays over the maps: a memmap's own slices cost ten times as much
            self.tokens = np.asarray(np.memmap(folder / 'tokens.bin', dtype=np.uint32, mode='r'))
            self.learnt = np.asarray(np.memmap(folder / 'learnt.bin', dtype=np.uint8, mode='r'))
            self.digest = _digest(self.offsets, self.tokens, self.learnt)
            whole = self.info['digest'] == self.digest
        except Exception as error:      # reading junk raises anything
            raise DataError(f'the token cache {folder} is damaged ({error!r})') from error
        if not whole:
            raise DataError(f'the token cache {folder} is damaged (its hash differs)')

    def __len__(self):
        return len(self.offsets) - 1

    def __getitem__(self, i):
        span = slice(self.offsets[i], self.offsets[i + 1])
        return self.tokens[span], self.learnt[span]

    @property
    def lengths(self):
        return np.diff(self.offsets)


def _digest(*arrays):
    digest = hashlib.sha256(repr([len(array) for array in arrays]).encode())
    for array in arrays:
        digest.update(array)
    return digest.hexdigest()


def tokenize_once(files, rows, encode, settings, cache_dir, on_bad_row='stop', workers=1):
    """Sequences of every row, from the cache if `files` and `settings` were tokenised before.

    files:    the raw files; their kinds and contents are part of the key
    rows:     iterable of (place, row) from `read_rows`, read only when there is no cache
    encode:   row -> list of (ids, learnt); may raise DataError. It runs in worker processes.
    settings: dict of whatever else changes the result (tokenizer fingerprint, template, lengths)
    on_bad_row: 'stop' raises the first DataError; 'skip' counts and goes on, with the first shown
    """
    kinds = [Path(file).suffix for file in files]
    digest = hashlib.sha256(json.dumps([FORMAT, settings, on_bad_row, kinds],
                                       sort_keys=True).encode())
    for file in files:
        with open(file, 'rb') as raw:
            digest.update(hashlib.file_digest(raw, 'sha256').digest())
    folder = local_path(cache_dir) / digest.hexdigest()[:20]
    sequences = None
    if folder.exists():
        try:
            sequences = Sequences(folder)
        except DataError as error:
            print(f'{error}; the data is tokenised again')
    if sequences is None:
        with writing(folder):
            _tokenize(files, rows, encode, folder, settings, on_bad_row, workers)
        sequences = Sequences(folder)
    info = sequences.info
    if info['bad_rows']:
        print(f'{info["bad_rows"]} bad rows skipped, the first: {info["first_bad"]}')
    if not len(sequences):
        raise DataError(f'{", ".join(map(str, files))}: an empty dataset, nothing to train on '
                        f'({info["rows"]} rows, {info["bad_rows"]} of them bad)')
    return sequences


def _tokenize(files, rows, encode, folder, settings, on_bad_row, workers):
    part = folder.with_name(f'{folder.name}.{uuid.uuid4().hex[:8]}.tmp')
    part.mkdir(parents=True)
    info = {'rows': 0, 'bad_rows': 0, 'first_bad': None, 'settings': settings}
    offsets = [0]
    try:
        with open(part / 'tokens.bin', 'wb') as tokens, open(part / 'learnt.bin', 'wb') as learnt:
            for outcome in tqdm(_encoded(rows, encode, workers), 'tokenising', count_rows(files),
                                unit=' rows', mininterval=1, smoothing=0.05, disable=None):
                info['rows'] += 1
                if isinstance(outcome, DataError):
                    if on_bad_row == 'stop':
                        raise DataError(f'{outcome}; --on_bad_row=skip leaves such rows out')
                    info['bad_rows'] += 1
                    info['first_bad'] = info['first_bad'] or str(outcome)
                    continue
                for ids, flags in outcome:
                    tokens.write(np.asarray(ids, dtype=np.uint32).tobytes())
                    learnt.write(np.asarray(flags, dtype=np.uint8).tobytes())
                    offsets.append(offsets[-1] + len(ids))
            if offsets[-1] == 0:  # an empty file cannot be memory-mapped
                tokens.write(bytes(4))
                learnt.write(bytes(1))
        offsets = np.asarray(offsets, dtype=np.int64)
        np.save(part / 'offsets.npy', offsets)
        info['digest'] = _digest(offsets, np.memmap(part / 'tokens.bin', np.uint32, 'r'),
                                 np.memmap(part / 'learnt.bin', np.uint8, 'r'))
        (part / 'info.json').write_text(json.dumps(info, indent=1), encoding='utf-8')
        _install(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _install(part, folder):
    """Make `part` the folder, or put its files in place of a damaged cache's, and no others."""
    try:
        os.rename(part, folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        for name in FILES:      # another run that makes the same cache writes the same bytes
            os.replace(part / name, folder / name)


def _encoded(rows, encode, workers):
    """The outcome of `encode` for each row, in order: a list of sequences, or a DataError."""
    if workers <= 1:
        yield from map(_Guarded(encode), rows)
        return
    with forked_pool(workers, _keep, _Guarded(encode)) as pool:     # with the tokenizer in `encode`
        yield from pool.imap(_call_kept, rows, chunksize=64)


class _Guarded:
    """Turns a bad row into a DataError that says where it stands, as a value."""

    def __init__(self, encode):
        self.encode = encode

    def __call__(self, place_and_row):
        place, row = place_and_row
        if isinstance(row, DataError):
            return row
        try:
            return self.encode(row)
        except BAD_ROW as error:
            return row_error(place, error)


def _keep(function):
    global _kept
    _kept = function


def _call_kept(row):
    return _kept(row)


# ------------------------------------------------------------------------------------------------
# Packing
# ------------------------------------------------------------------------------------------------

def first_fit(lengths, row_length):
    """Row of each sequence (int [n]) by first-fit decreasing; every length <= row_length."""
    rows = np.zeros(len(lengths), dtype=np.int64)
    space = np.full(len(lengths), row_length)  # at most one row a sequence
    for i in np.argsort(-np.asarray(lengths), kind='stable'):
        rows[i] = np.argmax(space >= lengths[i])
        space[rows[i]] -= lengths[i]
    return rows


def pack(sequences, row_length, multiple=1):
    """Packs (tokens, learnt) pairs into rows; returns a dict of arrays [rows, row_length].

    Rows of padding make their number a multiple of `multiple`.

    tokens, positions (from 0 in each sequence), ends (see model.py), targets (the next token of
    the same sequence where that one is learnt, else -100), and owner (which sequence, -1 padding).
    """
    row_of = first_fit([len(tokens) for tokens, _ in sequences], row_length)
    n_rows = -(-(row_of.max() + 1) // multiple) * multiple
    shape = (n_rows, row_length)
    index = np.broadcast_to(np.arange(row_length), shape)
    packed = {'tokens': np.zeros(shape, np.int64), 'positions': np.zeros(shape, np.int64),
              'ends': index + 1,  # padding sees itself alone
              'targets': np.full(shape, IGNORE, np.int64), 'owner': np.full(shape, -1, np.int64)}
    used = np.zeros(shape[0], dtype=np.int64)
    for i, (tokens, learnt) in enumerate(sequences):
        row, begin = row_of[i], used[row_of[i]]
        end = begin + len(tokens)
        packed['tokens'][row, begin:end] = tokens
        packed['positions'][row, begin:end] = np.arange(len(tokens))
        packed['ends'][row, begin:end] = end
        packed['targets'][row, begin:end - 1] = np.where(learnt[1:], tokens[1:].astype(np.int64),
                                                         IGNORE)
        packed['owner'][row, begin:end] = i
        used[row] = end
    return packed


def epoch_order(n, epoch, seed):
    """A permutation of n sequences that depends on the epoch and the seed alone."""
    return np.random.default_rng([seed, epoch]).permutation(n)
