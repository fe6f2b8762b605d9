"""Read the conversation of a row as messages: [{'role', 'content'}, ...].

`to_messages` reads the formats of instruction data. What a row says beside its list of turns
belongs to the conversation as well: `with_context` puts it there, or refuses the row. A message
that says whether it is trained has 'train': True or False.
"""

import itertools
import re

from data.files import has_fields, require_fields, require_text
from runtime.errors import DataError

ROLE_NAMES = {'human': 'user', 'gpt': 'assistant'}      # ShareGPT's
SYSTEM = ('system', 'system_prompt', 'system_message', 'system_instruction', 'instructions',
          'developer', 'developer_message')
HISTORY = 'history', 'chat_history'
# the question of a row that has no list of turns, and its answer, under further names
QUESTIONS = 'prompt', 'question', 'query', 'problem'
ANSWERS = 'output', 'completion', 'response'
# what a model would have to read, and no template of ours shows
CONTEXT = ('tools', 'functions', 'documents', 'document', 'context', 'knowledge', 'instruction',
           'input', 'images', 'image', 'videos', 'video', 'audios', 'audio',
           'chat_template_kwargs')
CONTEXT_OF_TURN = ('tool_calls', 'function_call', 'tools', 'functions', 'reasoning_content',
                   'reasoning', 'thinking', 'documents', 'context', 'input', 'images', 'image',
                   'videos', 'video', 'audios', 'audio')
TRAIN = 'train', 'training', 'trainable', 'weight', 'loss', 'loss_mask', 'loss_weight'
NOT_OBEYED = 'train_detail', 'training_detail', 'mask'
# of a whole row; a 'loss' or a 'mask' there may be anything
TRAIN_ROW = 'train', 'trainable', 'weight', 'sample_weight', 'loss_mask', 'loss_weight'


def dialogue(*texts):
    """Return texts as messages of the user and the assistant in turn, the user's first."""
    return [{'role': ('user', 'assistant')[i % 2], 'content': text} for i, text in enumerate(texts)]


def to_messages(row):
    """Return a row in a format of docs/training.md as [{'role', 'content'}, ...]; raises DataError.
    """
    row = without_nulls(row)
    if turns := [read_turns(row[name], f'"{name}"') for name in ('messages', 'conversations')
                 if name in row]:
        if turns[0] and turns[-1] and turns[0] != turns[-1]:
            raise DataError('"messages" and "conversations" differ; keep one of them')
        return with_context(row, turns[0] or turns[-1])
    pairs = ('instruction', 'output'), ('prompt', 'completion'), ('prompt', 'response')
    used = next((pair for pair in pairs if has_fields(row, *pair)), None)
    if used is None:
        raise DataError(f'fields {", ".join(map(str, row)) or "(none)"}; wanted messages, '
                        f'conversations, instruction and output, or prompt and completion')
    question, answer = used
    messages = [to_question(row)] if question == 'instruction' else read_turns(
        row[question], f'the {question}', 'user')
    messages += read_turns(row[answer], f'the {answer}', 'assistant')
    _require_one_answer(row, answer)
    used += ('input',) * (question == 'instruction')
    # many files in Alpaca's format have the whole row a second time, as one text
    copies = (name for name, value in row.items() if isinstance(value, str) and all(
        str(row.get(field, '')) in value for field in used))
    return with_context(row, messages, (*used, *copies))


def _require_one_answer(row, used):
    """Raise a DataError if a row has another answer than that of its field `used`.

    `answer` is none: beside a solution it is the result, in a form of its own.
    """
    def last_text(name):
        value = row.get(name, '')
        turn = value[-1] if isinstance(value, list) and value else value
        text = turn.get('content', turn.get('value')) if isinstance(turn, dict) else turn
        return str(text).strip()

    for name in ANSWERS:
        text, answer = last_text(name), last_text(used)
        if text and text != answer:
            raise DataError(f'"{used}" and "{name}" of the row are two answers that differ: '
                            f'{answer!r:.60} and {text!r:.60}; keep one of them')


def to_question(row):
    """Return the user's message of Alpaca's fields; the template `alpaca` uses its key 'input'."""
    question = {'role': 'user', 'content': require_text(row['instruction'], 'the instruction')}
    if row.get('input'):
        question['input'] = require_text(row['input'], 'the input')
        question['content'] += f'\n\n{row["input"]}'
    return question


def without_nulls(row):
    """Return the fields of a row or turn that are not null: parquet gives every row all columns.

    Raises DataError for a row without fields.
    """
    return {name: value for name, value in require_fields(row).items() if value is not None}


def is_empty(value):
    """Return whether a field says nothing: null, false, blank, or a list or object of these."""
    if isinstance(value, (list, dict)):
        return all(map(is_empty, value.values() if isinstance(value, dict) else value))
    return value is None or value is False or (
        isinstance(value, str) and value.strip() in ('', '[]', '{}', 'null', 'None'))


def read_turns(value, what, speaker=None):
    """Return the messages of a list of turns, of one turn, or of a text if `speaker` is its role.

    A turn has role and content, or from and value.
    """
    if isinstance(value, str) and speaker:
        return [{'role': speaker, 'content': value}]
    turns = [value] if isinstance(value, dict) else value
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        text = 'text or ' if speaker else ''
        raise DataError(f'{what} must be {text}a list of {{"role", "content"}}')
    return [_message(without_nulls(turn)) for turn in turns]


def _message(turn):
    roles = [ROLE_NAMES.get(turn[name], turn[name]) for name in ('role', 'from') if name in turn]
    texts = [turn[name] for name in ('content', 'value') if name in turn]
    for names, values in (('role" and "from', roles), ('content" and "value', texts)):
        if values[1:] and values[0] != values[1]:
            raise DataError(f'"{names}" of a message differ: {values!r:.120}')
    message = {'role': roles[0] if roles else None, 'content': texts[0] if texts else None}
    for name in (*CONTEXT_OF_TURN, *NOT_OBEYED):
        if not is_empty(turn.get(name)):
            raise DataError(f'the field "{name}" of a message (role {message["role"]!r}) is not '
                            f'supported; write it into the content, or remove it')
    train = {name: turn[name] for name in TRAIN if name in turn}
    for name, value in train.items():
        if isinstance(value, (str, list, dict)) or value not in (0, 1):
            raise DataError(f'"{name}" of a message is {value!r:.60}; wanted true, false, 1 or 0')
    if len({*train.values()}) > 1:
        raise DataError(f'{" and ".join(train)} of a message contradict each other')
    return message | ({'train': bool(value)} if train else {})


def with_context(row, messages, used=()):
    """Return `messages` after the system message and the history that stand beside them in a row.

    used: names of the fields that `messages` were read from, unless they are a list of turns.
    Raises DataError for context that is not in the messages and that no template shows, such as
    tools, for two questions, histories or system messages, and for a weight of the row other than
    1.
    """
    for name, value in row.items():
        if name in TRAIN_ROW and value not in (1, None):
            raise DataError(f'the field "{name}" of the row is {value!r:.60}, and rows have no '
                            f'weights; leave the row out, or remove the field')
    texts = [message['content'] for message in messages
             if message['role'] != 'assistant' and isinstance(message['content'], str)]
    source = f' (read from {", ".join(used)})' if used else ''
    for name, value in _given(row, CONTEXT + QUESTIONS if used else CONTEXT):
        if name not in used and not (
                isinstance(value, str) and any(value.strip() in text for text in texts)):
            raise DataError(f'the field "{name}" is in no message{source}, so the model would not '
                            f'see it; write it into a message, or remove it')
    histories = _given(row, HISTORY)
    if len(histories) > 1 and histories[0][1] != histories[1][1]:
        raise DataError(f'"{histories[0][0]}" and "{histories[1][0]}" of the row differ; keep one '
                        f'of them')
    for name, value in histories:
        if isinstance(value, list) and all(     # pairs of question and answer, of LLaMA-Factory
                isinstance(pair, list) and len(pair) == 2 for pair in value):
            value = dialogue(*itertools.chain(*value))
        turns = read_turns(value, f'"{name}"')
        n_system = int(messages[:1] != [] and messages[0]['role'] == 'system')
        if turns != messages[n_system:-1][:len(turns)]:     # else they hold the history already
            messages = [*messages[:n_system], *turns, *messages[n_system:]]
    for name, value in _given(row, SYSTEM):
        text = require_text(value, f'the field "{name}"')
        if not messages or messages[0]['role'] != 'system':
            messages = [{'role': 'system', 'content': text}, *messages]
        elif text.strip() not in require_text(messages[0]['content'], 'the system message'):
            raise DataError(f'the field "{name}" differs from the system message of the row: '
                            f'{text!r:.60} and {messages[0]["content"]!r:.60}; keep one of them')
    return messages


def _given(row, names):
    """Return [(name, value)] of the fields of a row that say something, named as one of `names`.

    systemPrompt and System-Prompt are names for system_prompt.
    """
    plain = {name.replace('_', '') for name in names}
    return [(name, value) for name, value in row.items()
            if re.sub('[ _-]', '', name).lower() in plain and not is_empty(value)]
