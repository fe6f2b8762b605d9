"""Plain texts as training sequences."""

from data.cache import group, tokenize_once
from data.files import require_fields, require_text
from runtime.errors import DataError
from runtime.sources import fetch_training

TEXT_PATTERNS = ('data/train-*.parquet', '*.parquet', '*.jsonl', '*.jsonl.gz', '*.txt', '*.txt.gz',
                 'data-*.arrow', 'train/data-*.arrow')


def load_text(source, tokenizer, *, max_length, add_bos, revision=None, **options):
    """Return Sequences of the documents in `source`, with a loss on every token but BOS.

    EOS ends each document. One longer than max_length tokens becomes several sequences that each
    begin with BOS, of which a last one of EOS alone is dropped. options: of `tokenize_once`
    """
    files = fetch_training(source, TEXT_PATTERNS, revision)
    bos = [tokenizer.bos_id] if add_bos else []
    step = max_length - len(bos)

    def encode(row, place):
        text = require_text(require_fields(row)['text'], 'the field "text"')
        ids = tokenizer.encode(text) if text.strip() else []
        if not ids:
            raise DataError('the field "text" is empty')
        ids.append(tokenizer.eos_id)
        pieces = [ids[i:i + step] for i in range(0, len(ids), step)]
        return [(group(text.strip()), bos + piece, [0] * len(bos) + [1] * len(piece))
                for piece in pieces if piece != [tokenizer.eos_id]]

    settings = {'max_length': max_length, 'add_bos': add_bos}
    return tokenize_once(files, encode, tokenizer, settings, **options)
