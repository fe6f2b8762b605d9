"""Load plain text for training: .txt files, or `text` fields of JSONL and parquet."""

from data.cache import tokenize_once
from data.files import fetch, require_fields, require_text
from runtime.errors import DataError

PATTERNS = ('data/train-*.parquet', '*.parquet', '*.jsonl', '*.jsonl.gz', '*.txt', '*.txt.gz')


def load_text(source, tokenizer, *, max_length, add_bos, revision=None, **options):
    """Return Sequences of the documents in `source`, with a loss on every token but BOS.

    EOS ends each document. A document longer than max_length tokens becomes several sequences that
    each begin with BOS. A last sequence of EOS alone is dropped. options: of `tokenize_once`
    """
    files = fetch(source, PATTERNS, revision)
    bos = [tokenizer.bos_id] if add_bos else []
    step = max_length - len(bos)

    def encode(row):
        text = require_text(require_fields(row).get('text'), 'the field "text"')
        if not text.strip():
            raise DataError('the field "text" is empty')
        ids = tokenizer.encode(text) + [tokenizer.eos_id]
        pieces = [bos + ids[i:i + step] for i in range(0, len(ids), step)]
        if len(pieces[-1]) == len(bos) + 1:
            pieces.pop()
        if not pieces:
            raise DataError('the field "text" has no tokens')
        return [(piece, [0] * len(bos) + [1] * (len(piece) - len(bos))) for piece in pieces]

    settings = {'kind': 'text', 'tokenizer': tokenizer.fingerprint, 'max_length': max_length,
                'add_bos': add_bos}
    return tokenize_once(files, encode, settings, **options)
