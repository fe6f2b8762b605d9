"""Read the conversation of a row as messages: [{'role', 'content'}, ...].

What a row says beside its list of turns belongs to the conversation as well: `with_context` puts it
there, or refuses the row. A message that says whether it is trained has 'train': True or False.
"""

import itertools
import json
import re

from data.files import (as_rows, dialogue, has_fields, is_empty, json_list, one_of, require_fields,
                        require_text)
from runtime.errors import DataError

# in any case: NeMo writes User and Assistant
ROLE_NAMES = {'system': 'system', 'developer': 'system', 'user': 'user', 'human': 'user',
              **dict.fromkeys(('assistant', 'gpt', 'model', 'function_call'), 'assistant'),
              **dict.fromkeys(('tool', 'ipython', 'function', 'observation'), 'tool')}
# a list of turns as JSON or Python print it; an answer may be a list of other objects
TURNS_AS_TEXT = re.compile(
    r"""\[\s*{\s*(?=['"](role|content|from|value)['"]).*?['"](role|from)['"]\s*:\s*['"]"""
    f"({'|'.join(ROLE_NAMES)})['\"]", re.DOTALL | re.IGNORECASE)
# dialogues in one text that are read
HH_RLHF = re.compile(r'(?:\A|\n\n)(Human|Assistant): ?')
NEMO = re.compile(r'(?:\A|\n)<extra_id_[01]>(System|User|Assistant)(?:\n|\Z)')
# those that are refused: in the marks of templates, and of Vicuna and others, as an answer may be
MARKED = re.compile(
    r"""\s*(<s>|<bos>|<[|]begin_of_text[|]>)?\s*(
    \[INST\].*\[/INST\] | <[|]im_start[|]>.*<[|]im_start[|]>assistant |
    <[|](system|user|prompter)[|]>.*<[|]assistant[|]> | <start_of_turn>.*<start_of_turn>model |
    <[|]start_header_id[|]>.*assistant<[|]end_header_id[|]> | <human>:.*<bot>: |
    [#]{2,3}\ ?(Human|User|System):.*[#]{2,3}\ ?(Assistant|Bot|AI):)
    """, re.DOTALL | re.VERBOSE)
SPOKEN = re.compile(r'\s*((SYSTEM|USER|HUMAN):.*\s(ASSISTANT|AI|BOT):|'
                    r'(System|User|Human):.*\n(Assistant|AI|Bot):)', re.DOTALL)
TEXT_PARTS = 'text', 'input_text', 'output_text'    # types of the parts of a content
SYSTEM = ('system', 'system_prompt', 'system_message', 'system_instruction', 'instructions',
          'developer', 'developer_message')
HISTORY = 'history', 'chat_history'
# the question of a row that has no list of turns, and its answer, under further names
QUESTIONS = 'prompt', 'question', 'query', 'problem', 'inputs'
ANSWERS = 'output', 'completion', 'response'
SOLUTIONS = 'solution', 'targets', 'answer'     # beside an answer they are its result
LISTS = 'messages', 'conversations', 'conversation'
# what begins an answer: of Step-DPO, and prefills
BEGINNINGS = ('initial_reason_steps', 'initial_reasoning_steps', 'initial_steps', 'prefix',
              'prefill', 'partial_answer', 'partial_response', 'partial_solution', *(
                  f'{kind}_prefix' for kind in ('reasoning', 'answer', 'response', 'assistant',
                                                'completion')))
TOOLS = 'tools', 'functions'
# what a model would have to read, and no template of ours shows
CONTEXT = (*TOOLS, 'documents', 'document', 'contexts', 'context', 'instruction', 'input',
           'chat_template_kwargs', *(kind + ending for kind in ('image', 'video', 'audio')
                                     for ending in ('', 's', '_path', '_paths', '_url', '_urls')))
# beside turns, 'knowledge' is an annotation, as in Magpie
BESIDE_QUESTION = ('definition', 'passages', 'passage', 'article', 'choices', 'options',
                   'option_a', 'option_0', 'choice0', 'a', 'knowledge')
NOT_IN_TURNS = 'function_call', 'channel', *CONTEXT, 'train_detail', 'training_detail', 'mask'
# what the template of a model may show besides the text of a message
SHOWN_BY_TEMPLATES = 'tool_calls', 'tool_call_id', 'name', 'reasoning_content'
THOUGHTS = 'reasoning_content', 'reasoning', 'thinking'
TRAIN = 'train', 'training', 'trainable', 'weight', 'loss', 'loss_mask', 'loss_weight'
# of a whole row; a 'loss' or a 'mask' there may be anything
TRAIN_ROW = 'train', 'trainable', 'weight', 'sample_weight', 'loss_mask', 'loss_weight'


def to_messages(row):
    """Return a row, see docs/training.md, as [{'role', 'content'}, ...]; raises DataError."""
    row = without_nulls(row)
    lists = {name: read_turns(row[name], f'"{name}"') or None for name in LISTS if name in row}
    if lists:
        messages = one_of(lists, *lists) or []
        if messages and messages[-1]['role'] == 'user' and any(map(row.get, ANSWERS)):
            messages += read_turns(one_of(row, *ANSWERS), 'the answer', 'assistant')
        require_contained(row, messages)
        require_contained(row, messages, ANSWERS, 'assistant')
        return with_context(row, messages)
    questions = ('instruction', *QUESTIONS) if 'output' in row else (*QUESTIONS, 'instruction')
    used = question, answer = [next(filter(row.__contains__, names), None)
                               for names in (questions, ANSWERS + SOLUTIONS)]
    if None in used:
        raise DataError(f'fields {", ".join(map(str, row)) or "(none)"}; wanted messages, '
                        f'conversations, or one of {", ".join(questions)} with one of '
                        f'{", ".join(ANSWERS + SOLUTIONS)}')
    messages = [to_question(row)] if question == 'instruction' else read_turns(
        row[question], f'the {question}', 'user')
    require_question(messages, question)
    texts = {}      # of all answers of the row, which must agree
    for name in dict.fromkeys((answer, *ANSWERS)):
        turns = read_turns(row.get(name, ''), f'the {name}', 'assistant')
        if name == answer:
            if turns and turns[0]['role'] != 'assistant':
                raise DataError(f'the {answer} begins with a {turns[0]["role"]} message, not an '
                                f'answer')
            messages += turns
        texts[name] = str(turns[-1]['content']).strip() or None if turns else None
    one_of(texts, *texts)
    used += ['input'] * (question == 'instruction')
    # many files in Alpaca's format have the whole row a second time, as one text
    copies = (name for name, value in row.items() if isinstance(value, str) and all(
        str(row.get(field, '')) in value for field in used))
    return with_context(row, messages, (*used, *copies))


def require_question(messages, name):
    """Raise DataError for the messages of a question that end in an answer."""
    if messages and messages[-1]['role'] == 'assistant':
        raise DataError(f'the {name} ends with an assistant message; write it into the answer, or '
                        f'remove it')


def require_contained(row, messages, names=QUESTIONS, role='user'):
    """Raise DataError for a second form of a question, or of the answer, that no message has."""
    def words(message):
        return ' '.join(str(message['content']).split())

    texts = [words(message) for message in messages
             if (message['role'] == 'assistant') == (role == 'assistant')]
    for name, value in _given(row, names):
        for turn in read_turns(value, f'the {name}', role):
            part = words(turn)
            if turn['role'] == role and not any(
                    part in text or text in part and role == 'user' for text in texts):
                raise DataError(f'the field "{name}" of the row is not in its turns: '
                                f'{turn["content"]!r:.60}; keep one of them')


def first_prompt(messages):
    """Return the texts up to the first message of the user: conversations with equal ones may be
    several answers, or several lengths of one conversation.
    """
    first = next((i for i, message in enumerate(messages) if message['role'] == 'user'), 0)
    return [message['content'].strip() for message in messages[:first + 1]]


def to_question(row):
    """Return the user's message of Alpaca's or Dolly's fields; template `alpaca` reads 'input'."""
    context = row['input'] if row.get('input') not in (None, '', []) else row.get('context') or ''
    texts = [text for text in (require_text(row['instruction'], 'the instruction'),
                               require_text(context, 'the input')) if text.strip()]
    question = {'role': 'user', 'content': '\n\n'.join(texts)}
    if split_dialogue(question['content'], 'the instruction'):
        raise DataError('the instruction is a dialogue in one text; write it as "messages"')
    return question | {'input': context} if len(texts) > 1 else question


def without_nulls(row):
    """Return a row or turn without nulls, NaN for pandas; raises DataError if it has no fields."""
    return {name: value for name, value in require_fields(row).items()
            if value is not None and value == value}


def read_turns(value, what, speaker=None):
    """Return the messages of turns, see docs/training.md, or of a text if `speaker` is its role."""
    if isinstance(value, str) and TURNS_AS_TEXT.match(value):       # in a cell of a table
        value = json_list(value, what)
    if isinstance(value, str) and speaker:
        value = split_dialogue(value, what, speaker) or [{'role': speaker, 'content': value}]
        if speaker == 'user' and len(value) > 1 and not value[-1]['content'].strip():
            value.pop()     # where the answer begins
    value = as_rows(value)
    turns = [value] if isinstance(value, dict) else value
    if not speaker and isinstance(turns, list):
        if all(isinstance(turn, str) for turn in turns):                    # LIMA
            turns = dialogue(*turns)
        elif all(has_fields(turn, 'input', 'output') for turn in turns):    # Capybara, XTuner
            turns = [message for turn in turns for message in (
                *[{'role': 'system', 'content': turn.get('system')}] * bool(turn.get('system')),
                turn | {'input': None, 'role': 'user', 'content': turn['input']},
                {'role': 'assistant', 'content': turn['output'],
                 'train': turn.get('output_with_loss')})]
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        text = 'text or ' if speaker else ''
        raise DataError(f'{what} must be {text}a list of {{"role", "content"}}')
    return [_message(without_nulls(turn)) for turn in turns]


def split_dialogue(text, what, speaker='user'):
    """Return the turns of a dialogue in one text, as in HH-RLHF or HelpSteer2; [] if `speaker` says
    it all. Raises DataError for a dialogue with other marks.
    """
    before, *parts = NEMO.split(text)
    if parts and before.strip():    # HelpSteer2 has no mark before the first turn
        parts = ['User', before, *parts]
    if not parts:
        before, *parts = HH_RLHF.split(text)
        asks = speaker == 'user'
        begins = text.startswith('\n\n') or (
            asks and parts[:1] == ['Human'] and 'Assistant' in parts[::2])
        if before.strip() or not begins:
            unanswered = 'Human' in parts[::2] and not (parts[-2] == 'Human' or parts[-1].strip())
            if MARKED.match(text) or asks and (unanswered or SPOKEN.match(text)):
                raise DataError(f'{what} is a dialogue in one text, {text.strip()!r:.60}; write it '
                                f'as a list of {{"role", "content"}}')
            return []
    return [{'role': role.lower(), 'content': turn}
            for role, turn in zip(parts[::2], parts[1::2], strict=True)]


def _message(turn):
    roles = {name: ROLE_NAMES.get(str(turn[name]).lower(), turn[name])
             for name in ('role', 'from') if name in turn}
    content = one_of(turn, 'content', 'value')
    calls = _tool_calls(turn.get('tool_calls'))
    if 'function_call' in (turn.get('role'), turn.get('from')):     # LLaMA-Factory
        calls, content = _tool_calls(content), None
    message = {'role': one_of(roles, 'role', 'from'), 'content': _text(
        '' if content is None and calls else content)}
    for name in NOT_IN_TURNS:
        if not is_empty(turn.get(name)):
            raise DataError(f'the field "{name}" of a message (role {message["role"]!r}) is not '
                            f'supported; write it into the content, or remove it')
    if None in message.values():
        raise DataError(f'a message has the fields {", ".join(turn) or "(none)"}; wanted role and '
                        f'content, or from and value')
    shown = turn | {'tool_calls': calls, 'reasoning_content': one_of(turn, *THOUGHTS)}
    message |= {name: shown[name] for name in SHOWN_BY_TEMPLATES if not is_empty(shown.get(name))}
    train = one_of(turn, *TRAIN)
    if isinstance(train, (str, list, dict)) or train not in (0, 1, None):
        names = ' and '.join(name for name in TRAIN if name in turn)
        raise DataError(f'"{names}" of a message is {train!r:.60}; wanted true, false, 1 or 0')
    return message if train is None else message | {'train': bool(train)}


def _text(content):
    """Return a content as text; parts, which must be texts, are joined as chat templates do."""
    if isinstance(content, dict):       # the result of a tool
        return json.dumps(content, ensure_ascii=False)
    if not isinstance(content, list):
        return content
    for part in content:
        if not has_fields(part, 'type', 'text') or part['type'] not in TEXT_PARTS:
            raise DataError(f'only parts of text are supported in a content, not {part!r:.80}')
    return ''.join(require_text(part['text'], 'a part of a content') for part in content)


def take_tools(row):
    """Return (a row without its tools, the tools as JSON schemas or None); raises DataError."""
    name = next((name for name in TOOLS if not is_empty(row.get(name))), None)
    if name is None:
        return row, None
    tools = [_json(tool, f'a tool in "{name}"') for tool in _json_list(row[name], f'"{name}"')]
    if not tools or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f'"{name}" must be a list of JSON schemas, not {row[name]!r:.60}')
    if name == 'functions':
        tools = [{'type': 'function', 'function': tool} for tool in tools]
    return {key: value for key, value in row.items() if key != name}, tools


def _tool_calls(calls):
    """Return the tool calls of a turn, their arguments as objects; [] if it has none."""
    read = []
    for call in [] if is_empty(calls) else _json_list(calls, '"tool_calls"'):
        call = _json(call, 'a tool call')
        function = call.get('function', call) if isinstance(call, dict) else None
        if not has_fields(function, 'name', 'arguments'):
            raise DataError(f'a tool call must have a name and arguments, got {call!r:.60}')
        arguments = _json(function['arguments'], 'the arguments')
        function = {'name': function['name'], 'arguments': arguments}
        read.append({'type': 'function', 'function': function}
                    | {key: call[key] for key in ('id',) if key in call})
    return read


def _json_list(value, what):
    """Return a list, also one that is written as JSON, or one object in a list."""
    value = _json(value, what)
    return value if isinstance(value, list) else [value]


def _json(value, what):
    """Return a value, read from JSON if it is a text; raises DataError."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise DataError(f'{what} is no JSON: {value!r:.60}') from error


def with_context(row, messages, used=(), answers=()):
    """Return `messages` after the system message and the history that stand beside them in a row.

    used: the fields that `messages` were read from, unless they are a list of turns; answers: texts
    that are not among the messages. Raises DataError for context that the messages lack, for a
    beginning that the answers lack, for two questions or histories, and for a weight other than 1.
    """
    for name, value in row.items():
        if name in TRAIN_ROW and value not in (1, None):
            raise DataError(f'the field "{name}" of the row is {value!r:.60}, and rows have no '
                            f'weights; leave the row out, or remove the field')
    texts = [message['content'] for message in messages
             if message['role'] != 'assistant' and isinstance(message['content'], str)]
    source = f' (read from {", ".join(used)})' if used else ''
    for name, value in _given(row, CONTEXT + QUESTIONS + BESIDE_QUESTION if used else CONTEXT):
        if name not in used and not all(
                isinstance(part, str) and any(part.strip() in text for text in texts)
                for part in (value if isinstance(value, list) else [value])):
            raise DataError(f'the field "{name}" is in no message{source}, so the model would not '
                            f'see it; write it into a message, or remove it')
    answers = answers or [message['content'] for message in messages[-1:]]
    for name, value in _given(row, BEGINNINGS):
        if not isinstance(value, str) or not (
                any(value.strip() in text for text in texts)
                or all(value.strip() in str(answer) for answer in answers)):
            raise DataError(f'the field "{name}" begins the answer and is not in it; write it into '
                            f'each answer, or into the question, or remove it')
    histories = dict(_given(row, HISTORY))
    one_of(histories, *histories)
    for name, value in histories.items():
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
    """Return [(name, value)] of the fields of a row that say something and are named as one of
    `names`; systemPrompt and System-Prompt are names for system_prompt.
    """
    plain = {name.replace('_', '') for name in names}
    return [(name, value) for name, value in row.items()
            if re.sub('[ _-]', '', name).lower() in plain and not is_empty(value)]
