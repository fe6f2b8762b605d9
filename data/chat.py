"""Encode conversations as token ids with a loss mask, in the templates that TEMPLATES names.

A template yields segments of (plain text or the id of a control token, whether it is supervised):
True, False, or None in an answer that is not trained. Adjacent text of one kind is encoded
together, never across the border between prompt and answer, which is therefore the same token
boundary in training, whether the answer is trained or not, and in generation.

A template is a row of TURNS; only `alpaca`, whose prompt depends on a second field, is a function.
chat_templates/ has both a second time in Jinja, for transformers and vLLM.
"""

import functools
import itertools
import json
import re
from pathlib import Path

from data.files import dialogue, require_text
from runtime.errors import ConfigError, DataError

ROLES = ('system', 'user', 'assistant')


def encode_conversation(messages, tokenizer, template='tulu', add_bos=True):
    """Return (token ids, loss mask), two lists of equal length; the mask is 0 or 1 per token.

    messages: [{'role': 'system' | 'user' | 'assistant', 'content': str}, ...]
    The assistant's text and the token that ends its turn are supervised, unless the message has
    'train': False. Raises DataError for a conversation that does not fit the template or has no
    assistant message, ConfigError for a template with control tokens that the tokenizer lacks.
    """
    check_messages(messages)
    bos = [tokenizer.bos_id] if add_bos else []
    ids, loss_mask = [*bos], [0] * len(bos)
    for piece, supervised in _joined_segments(messages, tokenizer, template):
        if isinstance(piece, str):
            piece = tokenizer.encode(piece, start=begins_text(ids, bos, tokenizer))
        ids += piece
        loss_mask += [int(bool(supervised))] * len(piece)
    return ids, loss_mask


def begins_text(ids, bos, tokenizer):
    """Return whether a text after `ids` is encoded as at the beginning."""
    return ids == bos or bool(ids) and ids[-1] in tokenizer.fresh_after


def encode_prompt(messages, tokenizer, template, add_bos=True):
    """Return (token ids of `messages` up to the answer, the set of ids that end the answer).

    template: '' encodes the last message as plain text
    """
    if not template:
        text = require_text(messages[-1]['content'], 'the prompt')
        return [tokenizer.bos_id] * add_bos + tokenizer.encode(text), tokenizer.end_ids
    prompt, answer = encode_answer(messages, 'x', tokenizer, template, add_bos)
    return prompt, {answer[-1]} | tokenizer.end_ids


def encode_answer(prompt, answer, tokenizer, template, add_bos=True):
    """Return (tokens of the prompt, tokens of the answer with the token that ends its turn)."""
    ids, loss_mask = encode_conversation([*prompt, {'role': 'assistant', 'content': answer}],
                                         tokenizer, template, add_bos)
    end = max(i for i, supervised in enumerate(loss_mask) if supervised) + 1
    start = max((i for i in range(end) if not loss_mask[i]), default=-1) + 1
    return ids[:start], ids[start:end]


def question_frame(tokenizer, template, add_bos=True):
    """Return what a template puts around a question: (opening, before, after, closing, lead).

    A stripped question and its answer are encoded as the ids `opening`, the text before + question
    + after, the ids `closing`, the text lead + answer. Raises as `encode_conversation`.
    """
    question, answer = '\0', '\1'
    messages = dialogue(question, answer)
    around, opening, closing = None, [tokenizer.bos_id] if add_bos else [], []
    for piece, supervised in _joined_segments(messages, tokenizer, template):
        if supervised:
            if around is None or answer not in piece:
                break
            lead = piece.partition(answer)[0]
            # the space that the tokenizer puts at the beginning of a text
            return opening, *around, closing, lead or ' ' * begins_text(closing, None, tokenizer)
        if isinstance(piece, str) and question in piece:
            around = piece.split(question)
        else:   # text stands here only between control tokens
            ids = opening if around is None else closing
            ids += tokenizer.encode(piece, start=begins_text(ids, None, tokenizer)) if isinstance(
                piece, str) else piece
    raise DataError(f"template {template!r} cannot ask a question: it must yield the user's text "
                    f"and then, supervised, the assistant's text")


def _joined_segments(messages, tokenizer, template):
    segments = [*TEMPLATES[template](messages, tokenizer)]
    # without the white space that control tokens strip, as those of Phi do: forwards, then back
    for side, strip in ((1, str.lstrip), (0, str.rstrip)) if tokenizer.strips else ():
        stripping = False
        for i, (piece, supervised) in enumerate(segments):
            if isinstance(piece, str):
                segments[i] = strip(piece) if stripping else piece, supervised
                stripping = stripping and not segments[i][0]
            else:
                stripping = tokenizer.strips.get(piece, (False, False))[side]
        segments.reverse()
    for (is_text, supervised), group in itertools.groupby(
            segments, lambda segment: (isinstance(segment[0], str), segment[1])):
        piece = [segment for segment, _ in group]
        yield ''.join(piece) if is_text else piece, supervised


def check_messages(messages):
    """Raise DataError for messages that no template takes, and if none is the assistant's."""
    if not messages:
        raise DataError('a conversation without messages')
    for message in messages:
        if message.get('role') not in ROLES:
            raise DataError(f'role {message.get("role")!r}; wanted one of {", ".join(ROLES)}')
        require_text(message.get('content'), f'the content of the {message["role"]} message')
        if message['role'] == 'system' and message is not messages[0]:
            raise DataError('a system message must be the first message')
    if not any(message['role'] == 'assistant' for message in messages):
        raise DataError('no answer: there is no assistant message')


def supervision(message):
    """Return True for an answer, None for one that is not trained, False for another message."""
    return message['role'] == 'assistant' and (message.get('train', True) or None)


def turns(messages, tokenizer, name):
    """A template of TURNS; a system message without a row of its own opens the first user turn."""
    rows, control_ids = template_rows(name, tokenizer)
    if 'begin' in rows:
        yield control_ids[rows['begin']], False
    messages = messages if 'system' in rows else _system_into_user(messages)
    for i, message in enumerate(messages):
        text, answer = message['content'], supervision(message)
        marks = control_ids | {
            '{text}': text, '{stripped}': text.strip(), '{eos}': tokenizer.eos_id,
            '{space}': ' ' if i > 0 else '', '{line}': '\n' if i < len(messages) - 1 else ''}
        for piece, in_answer in split_turn(rows[message['role']]):
            yield marks.get(piece, piece), answer if in_answer else False


def template_rows(name, tokenizer):
    """Return (the row of a template in TURNS, {control token in it: id}); raises ConfigError."""
    if name == 'mistral' and '[INST]' not in tokenizer.control_ids:
        name = 'mistral as text'
    rows = TURNS[name]
    text = rows.get('begin', '') if name in TEXT_TAGS else ''.join(rows.values())
    names = dict.fromkeys(CONTROL_TOKEN.findall(text))
    if missing := [name for name in names if name not in tokenizer.control_ids]:
        raise ConfigError(f'the template needs {", ".join(missing)}, which the tokenizer of the '
                          f"model lacks, or has with \"special\": false in tokenizer.json; 'tulu' "
                          f"works with every tokenizer")
    return rows, {name: tokenizer.control_ids[name] for name in names}


@functools.cache
def split_turn(turn):
    """Return [(piece, whether it belongs to an answer)] of a turn in TURNS."""
    pieces, inside = [], False
    for piece in re.split(rf'({CONTROL_TOKEN.pattern}|{{\w+}}|[«»])', turn):
        if piece in ('«', '»'):
            inside = piece == '«'
        elif piece:
            pieces.append((piece, inside))
    return pieces


def alpaca(messages, tokenizer):
    """Stanford Alpaca's prompt, with a section for the user message's field 'input'; one turn."""
    roles = [message['role'] for message in messages]
    if roles != ['user', 'assistant']:
        raise DataError(f"template = 'alpaca' takes one user message and one answer, not "
                        f"{', '.join(roles)}; template = 'tulu' takes any conversation")
    (question, answer), paired, section = messages, '', ''
    instruction, context = question['content'], question.get('input')
    if context:
        instruction = instruction.removesuffix(f'\n\n{require_text(context, "the input")}')
        paired = ', paired with an input that provides further context'
        section = f'### Input:\n{context}\n\n'
    yield (f'Below is an instruction that describes a task{paired}. Write a response that '
           f'appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n{section}'
           f'### Response:'), False
    yield answer['content'], supervision(answer)
    yield tokenizer.eos_id, supervision(answer)


# {template: its turn of every role, or {role: its turn}}. {text} stands for the message, {stripped}
# for the message without white space around it, {eos} for EOS, {space} for a space but in the first
# turn, {line} for a line break but in the last turn. An answer is supervised between « and ». What
# looks like a control token is one, except in TEXT_TAGS; `begin` is one in front of everything.
CONTROL_TOKEN = re.compile(r'<[^<>\s]+>|\[[^\[\]\s]+\]')
TEXT_TAGS = 'tulu', 'olmo2', 'mistral as text'
TULU = {'system': '<|system|>\n{text}\n', 'user': '<|user|>\n{text}\n',
        'assistant': '<|assistant|>\n«{text}{eos}{line}»'}
TURNS = {
    # open-instruct, without its default system message; OLMo 2, whose tokenizer adds no BOS
    'tulu': TULU,
    'olmo2': TULU | {'begin': '<|endoftext|>'},
    # Mistral until 2024: tokenizers with these control tokens (v0.3), and without
    'mistral': {'user': '[INST] {text}[/INST]', 'assistant': '« {text}{eos}»'},
    'mistral as text': {'user': '{space}[INST] {text} [/INST]', 'assistant': '« {text}{eos}»'},
    # Llama 3, without the dated system message of 3.1
    'llama3': '<|start_header_id|>{role}<|end_header_id|>\n\n«{stripped}<|eot_id|>»',
    # Qwen, without its default system message; SmolLM3, without its dated one; OLMo 3
    'chatml': '<|im_start|>{role}\n«{text}<|im_end|>»\n',
    # Gemma 1 to 3, which have no system message
    'gemma': {'user': '<start_of_turn>user\n{stripped}<end_of_turn>\n',
              'assistant': '<start_of_turn>model\n«{stripped}<end_of_turn>»\n'},
    # Command R, Aya 23, Aya Expanse
    'cohere': {'system': '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>{text}<|END_OF_TURN_TOKEN|>',
               'user': '<|START_OF_TURN_TOKEN|><|USER_TOKEN|>{stripped}<|END_OF_TURN_TOKEN|>',
               'assistant': '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>«{stripped}'
                            '<|END_OF_TURN_TOKEN|>»'},
    # Granite 3, without its default system message
    'granite': '<|start_of_role|>{role}<|end_of_role|>«{text}<|end_of_text|>»\n',
    # Phi-3 and 3.5, without the EOS after the last turn; Phi-4; Phi-4-mini
    'phi3': '<|{role}|>\n«{text}<|end|>»\n',
    'phi4': '<|im_start|>{role}<|im_sep|>«{text}<|im_end|>»',
    'phi4_mini': '<|{role}|>«{text}<|end|>»',
    # Mistral Small 3 and Ministral 3
    'tekken': {'system': '[SYSTEM_PROMPT]{text}[/SYSTEM_PROMPT]', 'user': '[INST]{text}[/INST]',
               'assistant': '«{text}</s>»'},
}
TURNS = {name: turn if isinstance(turn, dict) else {
    role: turn.replace('{role}', role) for role in ROLES} for name, turn in TURNS.items()}
TEMPLATES = {name: functools.partial(turns, name=name) for name in TURNS
             if name != 'mistral as text'} | {'alpaca': alpaca}


def jinja(template, tokenizer, add_bos=True, reward=False):
    """Return the Jinja form of a template, which renders what `encode_conversation` encodes.

    reward: whether for a reward model, which reads the token that ends the last answer: no line
    break follows it
    """
    bos = tokenizer.decode([tokenizer.bos_id]) if add_bos else ''
    eos = tokenizer.decode([tokenizer.eos_id])
    variables = {'eos': eos}
    if template != 'alpaca':
        turns, _ = template_rows(template, tokenizer)
        bos += turns.get('begin', '')
        answer = turns['assistant'].replace('{line}', '')

        def parts(turn, space=' '):
            turn = turn.replace('{eos}', eos).replace('{space}', space).replace('{line}', '\n')
            before, mark, after = re.split('({text}|{stripped})', re.sub('[«»]', '', turn))
            return before, mark == '{stripped}', after
        variables = {
            'rows': {role: parts(turns[role]) for role in ROLES if role in turns},
            'first': parts(turns['user'], space='')[0], 'opening': answer.partition('«')[0],
            'end': parts(answer.partition('»')[0] if reward else answer)[2]}
    folder = Path(__file__).parent / 'chat_templates'
    body = ''.join((folder / f'{part}.jinja').read_text(encoding='utf-8')
                   for part in (['alpaca'] if template == 'alpaca' else ['roles', 'turns']))
    lines = [f'{{%- set {name} = {json.dumps(value)} -%}}\n' for name, value in variables.items()]
    return ''.join([*lines, f'{{{{- {json.dumps(bos)} -}}}}\n', body])


def _system_into_user(messages):
    if messages[0]['role'] != 'system':
        return messages
    if len(messages) < 2 or messages[1]['role'] != 'user':
        raise DataError('a system message must be followed by a user message in this template')
    joined = messages[0]['content'] + '\n\n' + messages[1]['content']
    return [{'role': 'user', 'content': joined}, *messages[2:]]
