"""Tokenized datasets on disk: written once, then memory-mapped.

A cache folder holds `tokens.bin` (uint32) and `loss_mask.bin` (uint8), the concatenated sequences;
`offsets.npy` (int64), where each begins and the last ends; `margins.npy` (float32), of pairs of
answers; and `info.json` with the hash of these. The folder's name is a hash of what decides the
content: the raw files, the settings and the code of data/ that is used. A folder that does not
match its hashes is rebuilt.
"""

import collections
import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import time
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data.files import parsed, read_rows, without_bad, writing
from runtime.code import used_code
from runtime.digests import json_digest
from runtime.errors import DataError
from runtime.processes import forked_pool

TEMPORARY = re.compile(r'([0-9a-f]{20}|reference-[0-9a-f]{20}\.np[yz])\.[0-9a-f]{8}\.nanocal-tmp')


class Sequences:
    """Memory-mapped sequences: `seqs[i]` is (tokens uint32 [n], loss mask uint8 [n]).

    margins: float32, of each sequence, 0 if it has none; see data/preferences.py
    digest:  hash of the tokens, loss masks, margins and their order
    """

    def __init__(self, folder):
        try:
            self.info = json.loads((folder / 'info.json').read_text(encoding='utf-8'))
            self.offsets, self.margins = (np.load(folder / f'{name}.npy')
                                          for name in ('offsets', 'margins'))
            self.tokens = _map(folder / 'tokens.bin', np.uint32)
            self.loss_mask = _map(folder / 'loss_mask.bin', np.uint8)
            self.digest = _digest(self.offsets, self.tokens, self.loss_mask, self.margins)
            check = self.info.pop('check')
            if (check, self.info['digest'], str(self.offsets.dtype), self.offsets.ndim,
                    len(self.margins)) != (json_digest([folder.name, self.info]), self.digest,
                                           'int64', 1, len(self)):
                raise ValueError('it does not match its hash')
        except Exception as error:      # a damaged file can raise anything
            raise DataError(f'the token cache {folder} is damaged ({error!r})') from error

    def __len__(self):
        return len(self.offsets) - 1

    def __getitem__(self, i):
        span = slice(self.offsets[i], self.offsets[i + 1])
        return self.tokens[span], self.loss_mask[span]

    @property
    def lengths(self):
        return np.diff(self.offsets)


def _map(path, dtype):
    # slicing a plain array over the map is ten times as fast as slicing a memmap
    return np.asarray(np.memmap(path, dtype=dtype, mode='r'))


def _remove_leftovers(folder):
    """Remove the temporary files of killed runs: those to which nothing was written for a day."""
    for path in folder.glob('*.nanocal-tmp'):
        with contextlib.suppress(OSError):      # removed by another run, or a cache without write
            if TEMPORARY.fullmatch(path.name) and time.time() - 86_400 > max(
                    file.stat().st_mtime for file in (path, *path.glob('*'))):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _digest(offsets, tokens, loss_mask, margins=()):
    arrays = [offsets, tokens, loss_mask, *([margins] if np.any(margins) else [])]
    digest = hashlib.sha256(repr([len(array) for array in arrays]).encode())
    for array in arrays:
        digest.update(array)
    return digest.hexdigest()


def source_digest(encode):
    """Return a hash of the code and text of data/ that decide what `encode` returns."""
    folder = Path(__file__).parent
    digest = hashlib.sha256(used_code(
        tuple(sorted(folder.glob('*.py'))), encode, 'load_tokenizer').encode())
    for path in sorted(folder.glob('*.json')):
        digest.update(f'{path.name} {path.stat().st_size} '.encode() + path.read_bytes())
    return digest.hexdigest()


def tokenize_once(files, encode, settings, cache_dir, on_bad_row='stop', workers=1, regroup=iter):
    """Return the Sequences of all rows, from the cache if this was tokenized before.

    encode:   (row, place) -> list of (token ids, loss mask[, margin]), or a text that says why the
              row is left out; may raise DataError; runs in worker processes
    settings: dict of what changes the result besides the content of the files and the code: the
              tokenizer's fingerprint, the name of the template, ...
    on_bad_row: 'stop' raises the first DataError; 'skip' counts bad rows and prints the first
    regroup:  maps the (place, row) pairs of all files to those to encode
    """
    types = [Path(file).suffixes[-2:] for file in files]
    key = hashlib.sha256(json.dumps([source_digest(encode), settings, on_bad_row, types],
                                    sort_keys=True).encode())
    for file in files:
        with open(file, 'rb') as raw:
            key.update(hashlib.file_digest(raw, 'sha256').digest())
    folder = Path(os.path.expanduser(cache_dir)) / key.hexdigest()[:20]
    _remove_leftovers(folder.parent)
    try:
        sequences = Sequences(folder)
    except DataError as error:
        if folder.exists():
            print(f'{error}; tokenizing the data again')
        with writing(folder):
            _tokenize(files, encode, folder, settings, on_bad_row, workers, regroup)
        sequences = Sequences(folder)
    for reason, n in sequences.info['left_out'].items():
        print(f'{n} rows left out: {reason}')
    if sequences.info['bad_rows']:
        print(f'{sequences.info["bad_rows"]} bad rows skipped, the first: '
              f'{sequences.info["first_bad"]}')
    return sequences


def _tokenize(files, encode, folder, settings, on_bad_row, workers, regroup):
    """Write the cache elsewhere and move it; in an existing folder, replace only its files."""
    part = folder.with_name(f'{folder.name}.{secrets.token_hex(4)}.nanocal-tmp')
    bad, left_out, offsets, margins = [], collections.Counter(), [0], []
    part.mkdir(parents=True)
    try:
        with open(part / 'tokens.bin', 'wb') as tokens, open(part / 'loss_mask.bin', 'wb') as masks:
            rows = regroup(row for file in files for row in read_rows(file))
            results = tqdm(_encoded(rows, encode, workers), 'tokenizing', unit=' rows',
                           mininterval=1, disable=None)
            for sequences in without_bad(results, on_bad_row, bad):
                if isinstance(sequences, str):
                    left_out[sequences] += 1
                    continue
                for ids, loss_mask, *margin in sequences:
                    tokens.write(np.asarray(ids, dtype=np.uint32))
                    masks.write(np.asarray(loss_mask, dtype=np.uint8))
                    offsets.append(offsets[-1] + len(ids))
                    margins += margin or [0.0]
        if len(offsets) == 1:
            raise DataError(f'{", ".join(map(str, files))}: an empty dataset, nothing to train on'
                            + (f' ({len(bad)} bad rows, the first: {bad[0]})' if bad else '')
                            + ''.join(f'; {n} rows left out: {reason}'
                                      for reason, n in left_out.items()))
        offsets = np.asarray(offsets, dtype=np.int64)
        margins = np.asarray(margins, dtype=np.float32)
        np.save(part / 'offsets.npy', offsets)
        np.save(part / 'margins.npy', margins)
        info = {'bad_rows': len(bad), 'first_bad': bad[0] if bad else None,
                'left_out': left_out, 'settings': settings,
                'digest': _digest(offsets, _map(part / 'tokens.bin', np.uint32),
                                  _map(part / 'loss_mask.bin', np.uint8), margins)}
        info['check'] = json_digest([folder.name, info])
        (part / 'info.json').write_text(json.dumps(info, indent=1), encoding='utf-8')
        try:
            os.rename(part, folder)
        except OSError:     # a damaged cache, or one that another run has just built
            for file in part.iterdir():
                os.replace(file, folder / file.name)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _encoded(rows, encode, workers):
    """Yield the result of `encode` for each row, in order, or a DataError."""
    def encode_row(place_and_row):
        return parsed(*place_and_row, encode, place_and_row[0])
    if workers <= 1:
        yield from map(encode_row, rows)
        return
    with contextlib.ExitStack() as stack:
        try:
            imap = stack.enter_context(forked_pool(workers, encode_row))
        except OSError as error:
            raise DataError(f'cannot start {workers} processes for tokenizing: {error}; '
                            f'--workers=1 uses none') from error
        yield from imap(rows, chunksize=64)
