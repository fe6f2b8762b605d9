"""Load conversations to train on."""

import math

from data.cache import group, tokenize_once
from data.chat import chat_of, encode_conversation
from data.files import dialogue, has_fields, parsed, require_text, training_rows
from data.messages import first_prompt, take_tools, to_messages, without_nulls
from runtime.errors import DataError
from runtime.sources import fetch_training

# patterns of the files; the first one with a match is used
PATTERNS = ('data/train-*.parquet', 'data/train_sft-*.parquet', 'train_sft-*.parquet',  # UltraChat
            '*train*.parquet', '*.parquet', '*train*.jsonl*', '*.jsonl', '*.jsonl.gz', '*.json',
            '*.json.gz', '*.ndjson*', 'data-*.arrow', 'train/data-*.arrow', '*train*.csv*', '*.csv',
            '*.csv.gz', '*.tsv', '*.tsv.gz')


def first_turns(rows, answers='best'):
    """Yield (place, row) pairs, at last for OASST1's messages {'messages': [prompt, answer]} in
    English of each tree, with the `answers` 'best' (by rank, else the first) or 'all'.
    """
    prompts, replies = {}, {}

    def add(message, place):
        if (message['lang'] != 'en' or message.get('deleted')
                or message.get('review_result') is False):
            return
        text, rank = require_text(message['text'], 'the text'), message.get('rank')
        if not isinstance(rank, (int, float, type(None))):
            raise DataError(f'rank {rank!r} is not a number')
        if message['role'] == 'assistant':
            rank = math.inf if rank is None else rank
            replies.setdefault(message['parent_id'], []).append((rank, text))
        elif message['parent_id'] is None:
            prompts[message['message_id']] = place, text

    for place, row in rows:
        if not has_fields(row, 'message_id', 'parent_id', 'role', 'text'):
            yield place, row
        elif error := parsed(place, row, add, place):
            yield place, error
    for message_id, (place, prompt) in prompts.items():
        ranked = sorted(replies.get(message_id, ()), key=lambda reply: reply[0])
        for _, answer in ranked[:1] if answers == 'best' else ranked:
            yield place, {'messages': dialogue(prompt, answer)}


def load_conversations(source, tokenizer, *, template, max_length, add_bos, revision=None,
                       answers='best', train_on_inputs=False, **options):
    """Return Sequences of the conversations in a file, a folder or a hub dataset, truncated to
    max_length tokens; answers: see `first_turns`; train_on_inputs: supervise every token but BOS;
    options: of `tokenize_once`.
    """
    files = fetch_training(source, PATTERNS, revision)

    def encode(row, place):
        row, tools = take_tools(without_nulls(row))
        messages = to_messages(row)
        for name in 'label', 'kto_tag':     # unpaired preferences of TRL and LLaMA-Factory
            if str(row.get(name)).lower() == 'false':
                raise DataError(f'the field "{name}" of the row is {row[name]}: an answer to train '
                                f'against; leave the row out, or remove the field')
        for message in messages:
            train = message.get('train')
            if train is False if train_on_inputs else train and message['role'] != 'assistant':
                raise DataError(
                    f'a {message["role"]} message is marked as {"" if train else "not "}trained, '
                    f'but train_on_inputs = {train_on_inputs} trains '
                    f'{"all of them" if train_on_inputs else "only the answers"}')
        ids, loss_mask = encode_conversation(messages, tokenizer, template, add_bos, tools)
        for number, message in enumerate(messages, 1):
            says = message['content'].strip() or message.get('tool_calls')
            if message['role'] == 'assistant' and message.get('train', True) and not says:
                raise DataError(
                    f'message {number} of {len(messages)} is an empty answer, which would train '
                    f'the model to end at once; write its text, or mark it with "train": false')
        if not any(loss_mask):
            raise DataError('every assistant message is marked as not trained')
        if not any(loss_mask[:max_length]):
            raise DataError(f'the answer begins beyond max_length = {max_length} tokens; raise it')
        if train_on_inputs:
            begin = int(ids[0] == tokenizer.bos_id)
            loss_mask = [0] * begin + [1] * (len(ids) - begin)
        return [(group(first_prompt(messages)), ids[:max_length], loss_mask[:max_length])]

    chat = chat_of(tokenizer, template, add_bos)
    if template == 'model':
        from data import model_chat     # a template for base models needs nothing of it
        if model_chat.drops_thoughts(chat):
            print('note: the chat template leaves the thoughts of earlier answers out; the loss is '
                  'on what it shows')
    settings = {'template': chat.digest, 'max_length': max_length, 'add_bos': add_bos,
                'answers': answers, 'train_on_inputs': train_on_inputs}
    sequences = tokenize_once(files, encode, tokenizer, settings, **options,
                              read=lambda *source: first_turns(training_rows(*source), answers))
    if full := int((sequences.lengths == max_length).sum()):
        print(f'{full:,} of {len(sequences):,} conversations have max_length = {max_length} '
              f'tokens; longer ones are cut off and lack the end of the answer')
    return sequences
