"""Tokenized datasets on disk: written once, then memory-mapped.

A cache folder holds the ARRAYS and `info.json` with their hash. Its name is a hash of what decides
the content: the raw files with their names, the settings and the code that reads and encodes.
"""

import collections
import hashlib
import json
import os
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data.files import parsed, text_digest, training_rows, without_bad
from runtime.digests import file_digest, json_digest, module_file, syntax_digest, with_imports
from runtime.errors import DataError
from runtime.ownership import temporary
from runtime.processes import forked_pool

# besides the module of `encode`
READERS = 'data.tokenizer', 'runtime.sources', 'runtime.readers', 'runtime.other_readers'
# {file .bin: its type}. offsets: where each sequence begins and the last ends; groups and margins:
# of each sequence, as in Sequences
ARRAYS = {'offsets': np.int64, 'tokens': np.uint32, 'loss_mask': np.uint8, 'groups': np.int64,
          'margins': np.float32}


class Sequences:
    """Memory-mapped sequences: `seqs[i]` is (tokens uint32 [n], loss mask uint8 [n]).

    groups:  int64, equal for sequences of one prompt or document, which are held out together
    margins: float32, 0 if it has none, see data/preferences.py; digest: hash of all and their order
    """

    def __init__(self, folder):
        try:
            self.info = json.loads((folder / 'info.json').read_text(encoding='utf-8'))
            (self.offsets, self.tokens, self.loss_mask, self.groups,
             self.margins) = _arrays(folder)
            self.digest = _digest(folder)
            if self.digest != self.info['digest'] or len(self.margins) != len(self):
                raise ValueError('it does not match its hash')
        except Exception as error:      # a damaged file can raise anything
            raise DataError(f'the token cache {folder} is damaged ({error!r}); delete it, and the '
                            f'same command tokenizes the data again') from error

    def __len__(self):
        return len(self.offsets) - 1

    def __getitem__(self, i):
        span = slice(self.offsets[i], self.offsets[i + 1])
        return self.tokens[span], self.loss_mask[span]

    @property
    def lengths(self):
        return np.diff(self.offsets)


def _arrays(folder):
    # slicing a plain array over the map is ten times as fast as slicing a memmap
    return [np.asarray(np.memmap(folder / f'{name}.bin', dtype, mode='r'))
            for name, dtype in ARRAYS.items()]


def _digest(folder):
    *arrays, margins = _arrays(folder)
    arrays += [margins] if margins.any() else []
    digest = hashlib.sha256(repr([len(array) for array in arrays]).encode())
    for array in arrays:
        digest.update(array)
    return digest.hexdigest()


def tokenize_once(files, encode, tokenizer, settings, cache_dir, on_bad_row='stop', workers=1,
                  read=training_rows):
    """Return the Sequences of all rows, from the cache if this was tokenized before.

    encode:   (row, place) -> list of (`group`, token ids, loss mask[, margin]), or why the row is
              left out, a text; may raise DataError; runs in worker processes
    settings: dict of what changes the result besides the files, the tokenizer and the code
    read:     (files, Counter of {why a row is left out: rows}) -> the (place, row) pairs to encode
    """
    settings = settings | {'tokenizer': tokenizer.fingerprint}
    key = json_digest([
        syntax_digest(*reader_files(encode)), encode.__qualname__,
        *map(file_digest, sorted(Path(__file__).parent.glob('*.json'))), settings, on_bad_row,
        # the name of a file can say its format, its split or its subject
        *([Path(file).parts[-2:], file_digest(file)] for file in files)])
    folder = Path(os.path.expanduser(cache_dir)) / key[:20]
    if not folder.exists():
        left_out, bad = collections.Counter(), []
        rows = read(files, left_out)
        with temporary(folder, folder=True) as part, forked_pool(
                workers, lambda pair: parsed(*pair, encode, pair[0])) as imap:
            results = tqdm(imap(rows, chunksize=64), 'tokenizing', unit=' rows', mininterval=1,
                           disable=None)
            n = _write(part, without_bad(results, on_bad_row, bad), left_out)
            info = {'bad_rows': len(bad), 'first_bad': bad[0] if bad else None,
                    'left_out': left_out, 'settings': settings}
            if n == 0:
                raise DataError('; '.join([f'{", ".join(map(str, files))}: an empty dataset, '
                                           f'nothing to train on', *gaps(info)]))
            info['digest'] = _digest(part)
            (part / 'info.json').write_text(json.dumps(info, indent=1), encoding='utf-8')
    sequences = Sequences(folder)
    for gap in gaps(sequences.info):
        print(gap)
    return sequences


def reader_files(encode):
    """Return the Python files that decide what becomes of the rows of a file."""
    files = [Path(encode.__code__.co_filename), *map(module_file, READERS)]
    return with_imports(files, {'data'}.__contains__)


def group(content):
    """Return the group of sequences that share this prompt or document: texts or token ids."""
    return int(text_digest(content)[:15], 16)


def gaps(info):
    """Return sentences about the rows that became no sequence."""
    sentences = [f'{n} rows left out: {reason}' for reason, n in info['left_out'].items()]
    if info['bad_rows']:
        sentences.append(f'{info["bad_rows"]} bad rows skipped, the first: {info["first_bad"]}')
    return sentences


def _write(folder, results, left_out):
    """Write what `encode` returned for each row, or count it in `left_out`; return how many."""
    offsets = [0]
    groups = []
    margins = []
    with open(folder / 'tokens.bin', 'wb') as tokens, open(folder / 'loss_mask.bin', 'wb') as masks:
        for sequences in results:
            if isinstance(sequences, str):
                left_out[sequences] += 1
                continue
            for shared, ids, loss_mask, *margin in sequences:
                groups.append(shared)
                tokens.write(np.asarray(ids, dtype=np.uint32))
                masks.write(np.asarray(loss_mask, dtype=np.uint8))
                offsets.append(offsets[-1] + len(ids))
                margins += margin or [0.0]
    for name, values in (('offsets', offsets), ('groups', groups), ('margins', margins)):
        # unlike ndarray.tofile, this raises an OSError with its reason if the disk is full
        (folder / f'{name}.bin').write_bytes(np.array(values, ARRAYS[name]).tobytes())
    return len(margins)
