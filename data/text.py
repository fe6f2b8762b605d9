"""Plain text to training documents: .txt files, or `text` fields of JSONL and parquet."""

from pathlib import Path

from data import DataError, fetch, read_rows, read_text, require_text
from data.packing import tokenize_once

PATTERNS = ('data/train-*.parquet', '*.parquet', '*.jsonl', '*.jsonl.gz', '*.txt')


def load_text(source, tokenizer, *, max_length, add_bos, revision=None, cache_dir,
              on_bad_row='stop', workers=1):
    """Sequences of the documents in `source`, every token learnt, EOS at the end of each document.

    A document longer than max_length tokens becomes several sequences, each beginning with BOS. If
    its EOS alone is left for a last one, that is dropped: nothing goes before it to learn it from.
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
    """`read_rows`, and a .txt file as one row."""
    if Path(path).suffix != '.txt':
        yield from read_rows(path)
        return
    try:
        yield str(path), {'text': read_text(path)}
    except DataError as error:
        yield str(path), error
