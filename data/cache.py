"""Tokenized datasets on disk: written once, then memory-mapped.

A cache folder holds `tokens.bin` (uint32) and `loss_mask.bin` (uint8) of all sequences,
concatenated; `offsets.npy`, the begin of each sequence and the end of the last; and `info.json`
with a hash of these three. Its name is a hash of everything that decides its content. It is written
under a temporary name and renamed; a folder that does not match its hash is rebuilt.
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

from data import BAD_ROW, DataError, count_rows, forked_pool, local_path, row_error, writing

FORMAT = 3  # of the cache; increase it when its content changes
FILES = ('tokens.bin', 'loss_mask.bin', 'offsets.npy', 'info.json')


class Sequences:
    """Memory-mapped sequences: `seqs[i]` is (tokens uint32 [n], loss mask uint8 [n]).

    digest: a hash of all tokens, loss masks and their order. Raises DataError if a file of
    the folder is missing or has changed since it was written.
    """

    def __init__(self, folder):
        folder = Path(folder)
        try:
            self.info = json.loads((folder / 'info.json').read_text(encoding='utf-8'))
            self.offsets = np.load(folder / 'offsets.npy')
            self.tokens = _map(folder / 'tokens.bin', np.uint32)
            self.loss_mask = _map(folder / 'loss_mask.bin', np.uint8)
            self.digest = _digest(self.offsets, self.tokens, self.loss_mask)
            matches = self.info['digest'] == self.digest
        except Exception as error:      # a damaged file can raise anything
            raise DataError(f'the token cache {folder} is damaged ({error!r})') from error
        if not matches:
            raise DataError(f'the token cache {folder} is damaged (it does not match its hash)')

    def __len__(self):
        return len(self.offsets) - 1

    def __getitem__(self, i):
        span = slice(self.offsets[i], self.offsets[i + 1])
        return self.tokens[span], self.loss_mask[span]

    @property
    def lengths(self):
        return np.diff(self.offsets)


def _map(path, dtype):
    # a plain array over the map: slicing a memmap costs ten times as much
    return np.asarray(np.memmap(path, dtype=dtype, mode='r'))


def _digest(*arrays):
    digest = hashlib.sha256(repr([len(array) for array in arrays]).encode())
    for array in arrays:
        digest.update(array)
    return digest.hexdigest()


def tokenize_once(files, rows, encode, settings, cache_dir, on_bad_row='stop', workers=1):
    """Return the Sequences of every row, from the cache if this was tokenized before.

    files:    the raw files; their types and contents are part of the key
    rows:     iterable of (place, row) from `read_rows`; only read if there is no cache
    encode:   row -> list of (token ids, loss mask); may raise DataError; runs in worker processes
    settings: dict of everything else that changes the result (tokenizer fingerprint, template, ...)
    on_bad_row: 'stop' raises the first DataError; 'skip' counts bad rows and shows the first
    """
    types = [Path(file).suffix for file in files]
    key = hashlib.sha256(json.dumps([FORMAT, settings, on_bad_row, types],
                                    sort_keys=True).encode())
    for file in files:
        with open(file, 'rb') as raw:
            key.update(hashlib.file_digest(raw, 'sha256').digest())
    folder = local_path(cache_dir) / key.hexdigest()[:20]
    sequences = None
    if folder.exists():
        try:
            sequences = Sequences(folder)
        except DataError as error:
            print(f'{error}; tokenizing the data again')
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
        with open(part / 'tokens.bin', 'wb') as tokens, open(part / 'loss_mask.bin', 'wb') as masks:
            for result in tqdm(_encoded(rows, encode, workers), 'tokenizing', count_rows(files),
                               unit=' rows', mininterval=1, smoothing=0.05, disable=None):
                info['rows'] += 1
                if isinstance(result, DataError):
                    if on_bad_row == 'stop':
                        raise DataError(f'{result}; --on_bad_row=skip leaves such rows out')
                    info['bad_rows'] += 1
                    info['first_bad'] = info['first_bad'] or str(result)
                    continue
                for ids, loss_mask in result:
                    tokens.write(np.asarray(ids, dtype=np.uint32).tobytes())
                    masks.write(np.asarray(loss_mask, dtype=np.uint8).tobytes())
                    offsets.append(offsets[-1] + len(ids))
            if offsets[-1] == 0:  # an empty file cannot be memory-mapped
                tokens.write(bytes(4))
                masks.write(bytes(1))
        offsets = np.asarray(offsets, dtype=np.int64)
        np.save(part / 'offsets.npy', offsets)
        info['digest'] = _digest(offsets, _map(part / 'tokens.bin', np.uint32),
                                 _map(part / 'loss_mask.bin', np.uint8))
        (part / 'info.json').write_text(json.dumps(info, indent=1), encoding='utf-8')
        _install(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _install(part, folder):
    """Rename `part` to `folder`, or replace the files of a damaged cache there, and no others."""
    try:
        os.rename(part, folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        for name in FILES:      # another run that builds the same cache writes the same bytes
            os.replace(part / name, folder / name)


def _encoded(rows, encode, workers):
    """Yield the result of `encode` for each row, in order: a list of sequences, or a DataError."""
    if workers <= 1:
        yield from map(_Guarded(encode), rows)
        return
    # workers inherit `encode` with its tokenizer, which cannot be pickled
    with forked_pool(workers, _set_encode, _Guarded(encode)) as pool:
        yield from pool.imap(_encode_in_worker, rows, chunksize=64)


class _Guarded:
    """Call `encode` on the row of (place, row); return a DataError for a bad row."""

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


def _set_encode(encode):
    global _encode
    _encode = encode


def _encode_in_worker(row):
    return _encode(row)
