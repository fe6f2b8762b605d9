"""Plain text to training documents: .txt files, or `text` fields of JSONL and parquet."""

from pathlib import Path

from data import DataError, fetch, read_rows, require_text
from data.packing import tokenize_once

PATTERNS = ('data/train-*.parquet', '*.parquet', '*.jsonl', '*.jsonl.gz', '*.txt')


def load_text(source, tokenizer, *, max_length, add_bos, revision=None, cache_dir,
              on_bad_row='stop', workers=1):
    """Sequences of the documents in `source`, every token learnt, EOS at the end of each document.

    A document longer than max_length tokens becomes several sequences, each beginning with BOS.
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
        yield str(path), {'text': Path(path).read_text(encoding='utf-8')}
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f'cannot read {path}: {error}') from error
