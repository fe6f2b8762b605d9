"""Conversations to token ids with a loss mask, in the Tulu, Llama 3, Gemma and Mistral templates.

A template turns messages into segments: plain text, or the id of a control token, each with a flag
that says whether it is learnt. Neighbouring text is encoded at once, but never across a change of
the flag: prompt and answer meet at the same token boundary in training as in generation.
"""

from data import DataError, require_text

ROLES = ('system', 'user', 'assistant')


def encode_conversation(messages, tokenizer, template='tulu', add_bos=True):
    """(ids, learnt): two lists of equal length, int token ids and 0 or 1.

    messages: [{'role': 'system' | 'user' | 'assistant', 'content': str}, ...]
    Learnt are the assistant's words and the token that ends its turn. Raises DataError for a
    conversation that the template cannot hold or that has nothing to learn.
    """
    _check(messages)
    ids = [tokenizer.bos_id] if add_bos else []
    learnt = [0] * len(ids)
    text, text_learnt, first = '', False, True

    def flush():
        nonlocal text, first
        if text:
            piece = tokenizer.encode(text, start=first)
            ids.extend(piece)
            learnt.extend([int(text_learnt)] * len(piece))
            text, first = '', False

    for segment, flag in TEMPLATES[template](messages, tokenizer):
        if isinstance(segment, int) or flag != text_learnt:
            flush()
        text_learnt = flag
        if isinstance(segment, int):
            ids.append(segment)
            learnt.append(int(flag))
            first = False
        else:
            text += segment
    flush()
    return ids, learnt


def _check(messages):
    if not messages:
        raise DataError('a conversation without messages')
    for message in messages:
        if message.get('role') not in ROLES:
            raise DataError(f'role {message.get("role")!r}; the roles are {", ".join(ROLES)}')
        require_text(message.get('content'), f'the content of a {message["role"]} message')
    if not any(m['role'] == 'assistant' and m['content'].strip() for m in messages):
        raise DataError('no answer: there is no assistant message with text')


def tulu(messages, tokenizer):
    """open-instruct's template: tags in plain text, EOS after each answer, no system default."""
    for i, message in enumerate(messages):
        answer = message['role'] == 'assistant'
        yield f'<|{message["role"]}|>\n', False
        yield message['content'] + ('' if answer else '\n'), answer
        if answer:
            yield tokenizer.eos_id, True
            if i < len(messages) - 1:
                yield '\n', True  # belongs to the answer in open-instruct's mask


def llama3(messages, tokenizer):
    """Llama 3's instruct template, without the dated system message of 3.1."""
    control = _controls(tokenizer, '<|start_header_id|>', '<|end_header_id|>', '<|eot_id|>')
    for message in messages:
        answer = message['role'] == 'assistant'
        yield control['<|start_header_id|>'], False
        yield message['role'], False
        yield control['<|end_header_id|>'], False
        yield '\n\n', False
        yield message['content'].strip(), answer
        yield control['<|eot_id|>'], answer


def gemma(messages, tokenizer):
    """Gemma 2's instruct template; it has no system role, so that text opens the first user turn.
    """
    control = _controls(tokenizer, '<start_of_turn>', '<end_of_turn>')
    for message in _system_into_user(messages):
        answer = message['role'] == 'assistant'
        yield control['<start_of_turn>'], False
        yield ('model' if answer else 'user') + '\n', False
        yield message['content'].strip(), answer
        yield control['<end_of_turn>'], answer
        yield '\n', False


def mistral(messages, tokenizer):
    """Mistral's instruct template: control tokens where the tokenizer has them (v0.3), else text.
    """
    opening = tokenizer.control_ids.get('[INST]', '[INST]')
    closing = tokenizer.control_ids.get('[/INST]', ' [/INST]')
    for i, message in enumerate(_system_into_user(messages)):
        if message['role'] == 'assistant':
            yield ' ' + message['content'], True
            yield tokenizer.eos_id, True
        else:
            # as text, a later turn begins with the space that its tokenizer puts before any text
            yield ' [INST]' if i > 0 and opening == '[INST]' else opening, False
            yield ' ' + message['content'], False
            yield closing, False


TEMPLATES = {'tulu': tulu, 'llama3': llama3, 'gemma': gemma, 'mistral': mistral}


def _controls(tokenizer, *names):
    missing = [name for name in names if name not in tokenizer.control_ids]
    if missing:
        raise DataError(f'the tokenizer has no {", ".join(missing)}, which this template needs; '
                        f"template = 'tulu' works with every tokenizer")
    return tokenizer.control_ids


def _system_into_user(messages):
    if messages[0]['role'] != 'system':
        return messages
    if len(messages) < 2 or messages[1]['role'] != 'user':
        raise DataError('a system message must be followed by a user message in this template')
    joined = messages[0]['content'] + '\n\n' + messages[1]['content']
    return [{'role': 'user', 'content': joined}, *messages[2:]]
