"""Instruction data to sequences: Alpaca, OpenHermes 2.5, Tulu 3 and any file of `messages`."""

from data import DataError, fetch, read_rows, require_text
from data.chat import encode_conversation
from data.cache import tokenize_once

# the files to read in a folder or a hub dataset; the first pattern with a match decides
PATTERNS = ('data/train-*.parquet', '*train*.parquet', '*.parquet', '*train*.jsonl*', '*.jsonl',
            '*.jsonl.gz', '*.json', '*.json.gz')
# OpenHermes has other names for the roles
ROLE_NAMES = {'human': 'user', 'gpt': 'assistant', 'user': 'user', 'assistant': 'assistant',
              'system': 'system'}


def to_messages(row):
    """Return a row of a known format as [{'role', 'content'}, ...]; raises DataError.

    messages                      Tulu 3 and any chat JSONL
    conversations (from, value)   OpenHermes 2.5, ShareGPT
    instruction, input, output    Alpaca; a non-empty input follows the instruction and a blank line
    """
    if not isinstance(row, dict):
        raise DataError(f'a row must be an object with named fields, not {type(row).__name__}')
    if 'messages' in row:
        messages = row['messages']
        if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
            raise DataError('"messages" must be a list of {"role", "content"}')
        return messages
    if 'conversations' in row:
        turns = row['conversations']
        if not isinstance(turns, list) or not all(isinstance(t, dict) for t in turns):
            raise DataError('"conversations" must be a list of {"from", "value"}')
        return [{'role': ROLE_NAMES.get(t.get('from'), t.get('from')), 'content': t.get('value')}
                for t in turns]
    if 'instruction' in row and 'output' in row:
        prompt = require_text(row['instruction'], 'the instruction')
        if row.get('input'):
            prompt += '\n\n' + require_text(row['input'], 'the input')
        return [{'role': 'user', 'content': prompt},
                {'role': 'assistant', 'content': row['output']}]
    raise DataError(f'fields {", ".join(map(str, row)) or "(none)"}; wanted messages, '
                    f'conversations, or instruction and output')


def load_conversations(source, tokenizer, *, template, max_length, add_bos, revision=None,
                       cache_dir, on_bad_row='stop', workers=1):
    """Return Sequences of the conversations in `source`: a file, a folder or a hub dataset.

    Conversations are truncated to max_length tokens; without a supervised token left the row is
    bad. The other arguments are those of `encode_conversation` and `tokenize_once`.
    """
    files = fetch(source, PATTERNS, revision)

    def encode(row):
        ids, loss_mask = encode_conversation(to_messages(row), tokenizer, template, add_bos)
        if not any(loss_mask[:max_length]):
            raise DataError(f'the answer begins beyond max_length = {max_length} tokens')
        return [(ids[:max_length], loss_mask[:max_length])]

    rows = (item for file in files for item in read_rows(file))
    settings = {'kind': 'instruct', 'tokenizer': tokenizer.fingerprint, 'template': template,
                'max_length': max_length, 'add_bos': add_bos}
    return tokenize_once(files, rows, encode, settings, cache_dir, on_bad_row, workers)
