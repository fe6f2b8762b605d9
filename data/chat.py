"""Encode conversations as token ids with a loss mask, in a chat template of data/templates.py.

In the rendered text the names of control tokens become their ids, and the texts between them are
encoded as plain text: the ids of transformers' `apply_chat_template`. But contents never become
control tokens, since HIDE stands inside each name of one while the template is rendered; and in our
templates for base models the beginning of an answer is a border of tokens.

Supervised is what the assistant says, with the token that ends its turn: what {% generation %}
blocks render. For a model's template without them, data/model_chat.py finds the answers.
"""

import datetime
import functools
import re

from data.files import dialogue, require_text, text_digest
from data.templates import (BEGIN, END, QUESTION, render, template_names, template_source,
                            trained_only, without)
from runtime.errors import DataError

ROLES = ('system', 'user', 'assistant', 'tool')
HIDE = '\ufdd0'     # a noncharacter inside a name of a control token in a content
RESERVED = re.compile('[\ufdd0-\ufdef]')


def encode_conversation(messages, tokenizer, template='tulu', add_bos=True, tools=None):
    """Return (token ids, loss mask), two lists of equal length; the mask is 0 or 1 per token.

    messages: [{'role', 'content'}, ...]; an answer with 'train': False is not supervised
    tools:    what the model can call, as JSON schemas
    Raises DataError for a conversation without an answer or that the template refuses, ConfigError
    for a template with control tokens that the tokenizer lacks.
    """
    check_messages(messages)
    chat = chat_of(tokenizer, template, add_bos)
    return chat.encode(chat.text(messages, tools))


def encode_prompt(messages, tokenizer, template, add_bos=True, tools=None):
    """Return (token ids of `messages` up to the answer, the set of ids that end the answer); with
    the template '' the ids of the last message as plain text.
    """
    if not template:
        text = require_text(messages[-1]['content'], 'the prompt')
        return [tokenizer.bos_id] * add_bos + tokenizer.encode(text), tokenizer.end_ids
    chat = chat_of(tokenizer, template, add_bos)
    check_messages([*messages, {'role': 'assistant', 'content': ''}])
    return chat.encode(chat.text(messages, tools, ask=True))[0], chat.end_ids


def encode_answer(prompt, answer, tokenizer, template, add_bos=True):
    """Return (tokens of the prompt, tokens of the answer with the token that ends its turn)."""
    ids, loss_mask = encode_conversation([*prompt, {'role': 'assistant', 'content': answer}],
                                         tokenizer, template, add_bos)
    end = max(i for i, supervised in enumerate(loss_mask) if supervised) + 1
    start = max((i for i in range(end) if not loss_mask[i]), default=-1) + 1
    return ids[:start], ids[start:end]


def check_messages(messages):
    """Raise DataError for messages that no template takes, and if none is the assistant's."""
    if not messages:
        raise DataError('a conversation without messages')
    for message in messages:
        if message.get('role') not in ROLES:
            raise DataError(f'role {message.get("role")!r}; wanted one of {", ".join(ROLES)}')
        if not message.get('tool_calls'):
            require_text(message.get('content'), f'the content of the {message["role"]} message')
        if message['role'] == 'system' and message is not messages[0]:
            raise DataError('a system message must be the first message')
    if not any(message['role'] == 'assistant' for message in messages):
        raise DataError('no answer: there is no assistant message')


@functools.lru_cache(16)
def chat_of(tokenizer, template, add_bos):
    """Return the Chat of a tokenizer and the name of a template."""
    return Chat(tokenizer, template, add_bos)


class Chat:
    """A tokenizer with a chat template: conversations to text, and that to token ids. end_ids:
    those that end an answer; digest: hash of the template, and of the day if it shows it.
    """

    def __init__(self, tokenizer, template, add_bos):
        self.tokenizer, self.template = tokenizer, template
        self.names = template_names(template, tokenizer, add_bos)
        self.sources = [template_source(template, tokenizer, tools) for tools in (False, True)]
        names = any_of(tokenizer.control_ids)
        self.control = re.compile(names)
        # an answer in a template of ours is encoded by itself, as it is generated
        self.splitter = re.compile(f'({names})' if template == 'model' else
                                   f'({names})|(?={BEGIN})')
        # white space that disappears before and after a control token, as in Phi
        strips = [any_of(name for name, i in tokenizer.control_ids.items()
                         if tokenizer.strips.get(i, (False, False))[side]) for side in (0, 1)]
        self.strips = [re.compile(rf'([\s{BEGIN}{END}]+)({strips[0]})'),
                       re.compile(rf'({strips[1]})([\s{BEGIN}{END}]+)')] * bool(tokenizer.strips)
        ids, loss_mask = self.encode(self.text(dialogue('x', 'y')))
        supervised = [i for i, flag in zip(ids, loss_mask, strict=True) if flag]
        self.digest = text_digest(self.sources, self.names, datetime.date.today() if any(
            'strftime_now' in source for source in self.sources) else '')
        self.end_ids = tokenizer.end_ids | {*supervised[-1:]} & {*tokenizer.control_ids.values()}

    def render(self, messages, tools=None, ask=False):
        """Return the text of messages; ask: with what precedes the next answer."""
        return render(self.sources[bool(tools)], messages, tools=tools, add_generation_prompt=ask,
                      **self.names)

    def text(self, messages, tools=None, ask=False):
        """Return the text of messages, with BEGIN and END around what is supervised."""
        self.require_shown(messages, tools)
        hidden = [{key: self.hide(value) for key, value in message.items() if value is not None}
                  for message in messages]
        tools = self.hide(tools) if tools else None
        text = self.render(hidden, tools, ask)
        if self.template != 'model':        # ours put nothing beside a content that it could join
            return trained_only(text, messages) if BEGIN in text else text
        from data import model_chat     # a template for base models needs nothing of it
        return model_chat.marked(self, text, messages, hidden, tools, ask)

    def require_shown(self, messages, tools):
        """Raise DataError for a part of a conversation that the template does not show."""
        source = self.sources[bool(tools)]
        # an input is in the content as well, and an id or a name only says whose result it is
        fields = {key for message in messages for key in message
                  if message['role'] != 'tool' or key not in ('tool_call_id', 'name')}
        for key in [*['tools'] * bool(tools), *sorted(fields)]:
            if key not in ('role', 'content', 'train', 'input') and key not in source:
                raise DataError(f'the chat template {self.template!r} does not show "{key}"; write '
                                f'it into a message, or remove it')
        if self.template != 'model' and any(message['role'] == 'tool' for message in messages):
            raise DataError(f"the chat template {self.template!r} has no role 'tool'; use that of "
                            f"a model that knows tools: --template=model")

    def hide(self, value):
        """Return a value of a message or tool with HIDE in every name of a control token."""
        if isinstance(value, dict):
            return {self.hide(key): self.hide(part) for key, part in value.items()}
        if isinstance(value, list):
            return [*map(self.hide, value)]
        if not isinstance(value, str):
            return value
        if value != QUESTION and (reserved := RESERVED.search(value)):
            raise DataError(f'a message has the character {reserved[0]!a}, which is no text; '
                            f'remove it')
        return self.control.sub(lambda name: name[0][0] + HIDE + name[0][1:], value)

    def encode(self, text):
        """Return (token ids, loss mask) of what `text` returns."""
        for pattern in self.strips:
            text = pattern.sub(lambda match: ''.join(
                part if part in self.tokenizer.control_ids else re.sub(r'\s', '', part)
                for part in match.groups()), text)
        ids, loss_mask = [], []
        supervised = 0
        for piece in filter(None, self.splitter.split(text)):
            start = self.tokenizer.begins_text(ids)
            parts = re.split(f'([{BEGIN}{END}])', without(HIDE, piece))
            if piece in self.tokenizer.control_ids:
                new = [self.tokenizer.control_ids[piece]]
            else:
                new = self.tokenizer.encode(''.join(parts[::2]), start) if any(parts[::2]) else []
            for k in range(1, len(parts), 2):       # the borders of an answer within a text
                text = ''.join(parts[:k:2])
                n = self.tokens_within(new, text, start)
                if parts[k] == END and self.tokenizer.decode(new[:n], start) != text:
                    n = min(n + 1, len(new))    # a token that holds the end and what follows
                loss_mask += [supervised] * (len(ids) + n - len(loss_mask))
                supervised = int(parts[k] == BEGIN)
            ids += new
            loss_mask += [supervised] * (len(ids) - len(loss_mask))
        return ids, loss_mask

    def tokens_within(self, ids, text, start):
        """Return how many of the first ids are no longer than a text that they begin with."""
        n = min(len(ids), len(self.tokenizer.encode(text, start))) if text else 0
        while len(self.tokenizer.decode(ids[:n], start)) > len(text):
            n -= 1
        while n < len(ids) and len(self.tokenizer.decode(ids[:n + 1], start)) <= len(text):
            n += 1
        return n


def any_of(names):
    """Return a regular expression of the names, the longest first, that is fast for thousands."""
    groups = {}
    for name in names:
        groups.setdefault(name[:1], []).append(name[1:])
    optional = groups.pop('', None) is not None
    parts = [re.escape(first) + (any_of(rest) if any(rest) else '')
             for first, rest in groups.items()]
    return f'(?:{"|".join(parts) or "(?!)"})' + '?' * optional
