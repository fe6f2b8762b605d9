"""Prompts for reinforcement learning, in the formats of instruction data and of the tasks."""

import collections
import hashlib

import numpy as np

from data.cache import gaps, group
from data.chat import encode_prompt
from data.files import parsed, require_text, training_rows, without_bad
from data.messages import (QUESTIONS, first_prompt, read_turns, require_contained,
                           require_question, to_messages, with_context, without_nulls)
from data.preferences import PREFERENCE_PATTERNS
from written.benchmarks import WRITTEN_TASKS
from runtime.errors import DataError
from runtime.sources import fetch_training

# patterns of the files; those of the tasks are tried first
PROMPT_PATTERNS = (*dict.fromkeys(pattern for name, task in WRITTEN_TASKS.items() if name != 'qa'
                                  for pattern in task.shots), *PREFERENCE_PATTERNS)


class Prompts:
    """Tokenized prompts: `prompts[i]` is (tokens uint32 [n], loss mask of zeros), as in a cache.

    rows, messages: of each; groups: as in Sequences; stop: ids of the tokens that end an
    answer; lengths: numbers of tokens; digest: a hash of tokens, rows, reward, tokenizer and `stop`
    """

    def __init__(self, encoded, reward, tokenizer):
        self.rows, self.messages, ids, stop = zip(*encoded, strict=True)
        self.reward = reward
        self.tokens = [np.array(x, np.uint32) for x in ids]
        self.groups = np.array([group(first_prompt(turns)) for turns in self.messages])
        self.stop, self.lengths = set().union(*stop), np.array([len(x) for x in ids])
        decides = reward.digest, tokenizer.fingerprint, sorted(self.stop)
        digest = hashlib.sha256(repr(decides).encode())
        for row, tokens in zip(self.rows, self.tokens, strict=True):
            digest.update(repr(row).encode('utf-8', 'backslashreplace') + tokens.tobytes())
        self.digest = digest.hexdigest()

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        return self.tokens[i], np.zeros(len(self.tokens[i]), np.uint8)


def to_prompt(row, instruction=''):
    """Return the messages before the answer of a row: [{'role', 'content'}, ...], the user's last.

    They are those of `prompt`, else of a list of turns, else of another name of a question, else of
    Alpaca's fields. instruction: text to follow the last after a blank line. Raises DataError.
    """
    row = without_nulls(row)
    lists = row.keys() & {'messages', 'conversations', 'conversation'}
    if name := next(filter(row.__contains__, QUESTIONS[:1] if lists else QUESTIONS), None):
        turns = read_turns(row[name], f'the {name}', 'user')
        require_question(turns, name)
        for other in lists:
            require_contained({'prompt': turns}, read_turns(row[other], f'"{other}"'))
        messages = with_context(row, turns, (name,))
    elif not lists and 'instruction' not in row:
        raise DataError(f'fields {", ".join(map(str, row)) or "(none)"}; wanted messages, '
                        f'conversations, {", ".join(QUESTIONS)}, or instruction and output')
    else:
        messages = to_messages(row)
    if messages and messages[-1]['role'] == 'assistant':
        messages.pop()
    if not messages or messages[-1]['role'] != 'user':
        raise DataError("the last message of the prompt is not the user's")
    if instruction:
        text = require_text(messages[-1].get('content'), 'the prompt')
        messages[-1] = {'role': 'user', 'content': f'{text}\n\n{instruction}'}
    return messages


def load_prompts(source, tokenizer, reward, *, template, max_length, add_bos, instruction='',
                 revision=None, on_bad_row='stop'):
    """Return the Prompts in `source`, a file, a folder or a hub dataset; longer ones are left out.

    reward: of rewards.load_reward, which checks each row; max_length: tokens of a prompt
    """
    def encode(row):
        messages = to_prompt(row, instruction)
        if reward.check:
            reward.check(row)
        return row, messages, *encode_prompt(messages, tokenizer, template, add_bos)

    left_out, bad = collections.Counter(), []
    rows = training_rows(fetch_training(source, PROMPT_PATTERNS, revision), left_out)
    encoded = list(without_bad((parsed(place, row, encode) for place, row in rows), on_bad_row,
                               bad))
    short = [prompt for prompt in encoded if len(prompt[2]) <= max_length]
    left_out[f'longer than {max_length} tokens'] = len(encoded) - len(short)
    lines = gaps({'left_out': +left_out, 'bad_rows': len(bad), 'first_bad': ''.join(bad[:1])})
    if not short:
        raise DataError('; '.join([f'{source} has no prompt of at most {max_length} tokens, which '
                                   f'is max_length minus max_tokens', *lines]))
    for line in lines:
        print(line)
    return Prompts(short, reward, tokenizer)
