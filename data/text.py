"""Plain text to training sequences: .txt files, or `text` fields of JSONL and parquet."""

from pathlib import Path

from data import DataError, fetch, read_rows, read_text, require_text
from data.cache import tokenize_once

PATTERNS = ('data/train-*.parquet', '*.parquet', '*.jsonl', '*.jsonl.gz', '*.txt')


def load_text(source, tokenizer, *, max_length, add_bos, revision=None, cache_dir,
              on_bad_row='stop', workers=1):
    """Return Sequences of the documents in `source`, with a loss on every token but BOS.

    EOS ends each document. A document longer than max_length tokens becomes several sequences, each
    of which begins with BOS. A last sequence of only EOS is dropped: nothing would precede EOS.
    """
    files = fetch(source, PATTERNS, revision)
    bos = [tokenizer.bos_id] if add_bos else []
    step = max_length - len(bos)

    def encode(row):
        text = row.get('text') if isinstance(row, dict) else None
        if not require_text(text, 'the field "text"').strip():
            raise DataError('the field "text" is empty')
        ids = tokenizer.encode(text) + [tokenizer.eos_id]
        pieces = [bos + ids[i:i + step] for i in range(0, len(ids), step)]
        if len(pieces[-1]) == len(bos) + 1:
            pieces.pop()
        if not pieces:
            raise DataError('the field "text" has no tokens')
        return [(piece, [0] * len(bos) + [1] * (len(piece) - len(bos))) for piece in pieces]

    rows = (item for file in files for item in documents(file))
    settings = {'kind': 'text', 'tokenizer': tokenizer.fingerprint, 'max_length': max_length,
                'add_bos': add_bos}
    return tokenize_once(files, rows, encode, settings, cache_dir, on_bad_row, workers)


def documents(path):
    """Yield (place, row) as `read_rows` does; a .txt file is one row."""
    if Path(path).suffix != '.txt':
        yield from read_rows(path)
        return
    try:
        yield str(path), {'text': read_text(path)}
    except DataError as error:
        yield str(path), error
