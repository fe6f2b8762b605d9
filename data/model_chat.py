"""Find what is supervised in the text of a model's own chat template, and hold its contents apart.

The template is rendered a second time with marks around the contents. Where that changes something
else, or calls of tools are shown, it is rendered up to each answer instead.
"""

import collections
import functools
import os
import re

from data.files import dialogue
from data.templates import BEGIN, END, QUESTION, trained_only, without
from runtime.errors import DataError

EDGE = '\ufdd3'     # a noncharacter of Unicode around a content that is no answer


def marked(chat, text, messages, hidden, tools, ask):
    """Return the text of messages with BEGIN and END around the answers that are trained.

    hidden: the messages without names of control tokens. Raises DataError for a content that would
    become a part of a control token.
    """
    edged = chat.render([*map(with_edges, hidden)], tools, ask)
    shown, safe = (collections.Counter(chat.control.findall(x)) for x in (text, edged))
    if shown - safe:
        raise DataError(f'a message would become a part of the control token '
                        f'{min(shown - safe)!r} in the chat template; change its beginning or end')
    if ask or BEGIN in text:        # no loss, or a template with {% generation %}
        return text if ask else trained_only(text, messages)
    answers = [message for message in messages if message['role'] == 'assistant']
    finder = AnswerFinder(chat, text)
    if without(BEGIN + END + EDGE, edged) == text and edged.count(BEGIN) == len(answers):
        spans = finder.by_contents(edged)
    else:
        spans = finder.by_prefixes(hidden, tools)
    for (start, end), message in reversed([*zip(spans, answers, strict=True)]):
        if message.get('train', True):
            text = text[:start] + BEGIN + text[start:end] + END + text[end:]
    return text


def with_edges(message):
    """Return a message with BEGIN and END around its text if it is an answer, else EDGE twice;
    thoughts stay outside, since templates leave them out of earlier answers.
    """
    content = message.get('content')
    if not isinstance(content, str) or not content.strip():
        return message
    opening, closing = (BEGIN, END) if message['role'] == 'assistant' else (EDGE, EDGE)
    text = content.rpartition('</think>')[2]
    before = content[:len(content) - len(text.lstrip())]
    return message | {'content': f'{before}{opening}{text.strip()}{closing}'
                      f'{text[len(text.rstrip()):]}'}


def drops_thoughts(chat):
    """Return whether a template leaves the thoughts of earlier answers out."""
    thought = f'<think>\n{QUESTION}\n</think>\n\ny'
    try:
        return QUESTION not in chat.render(dialogue('x', thought, 'x', 'y'))
    except DataError:       # it takes one turn
        return False


@functools.lru_cache(16)
def around_answers(chat):
    """Return (what a prompt shows after the user's message, whether control tokens end answers)."""
    asked, prompt = (chat.render(dialogue(QUESTION), ask=ask) for ask in (False, True))
    after = chat.render(dialogue('x', QUESTION)).rpartition(QUESTION)[2]
    return (prompt.removeprefix(asked) if prompt.startswith(asked) else '',
            bool(chat.control.search(after)))


class AnswerFinder:
    """The answers in a text that a Chat has rendered, as [(start, end)]."""

    def __init__(self, chat, text):
        self.chat, self.text = chat, text
        self.opening, self.ends_answers = around_answers(chat)

    def by_contents(self, edged):
        """Return the answers by the text with marks around all contents."""
        position, edges = 0, []
        for piece in re.split(f'([{BEGIN}{END}{EDGE}])', edged):
            if piece in (BEGIN, END, EDGE):
                edges.append((piece, position))
            else:
                position += len(piece)
        spans, before = [], 0
        for k in range(0, len(edges), 2):
            (kind, start), (_, end) = edges[k:k + 2]
            if kind == BEGIN:
                limit = edges[k + 2][1] if k + 2 < len(edges) else len(self.text)
                spans.append((self.start(before, start), self.end(end, limit)))
            before = end
        return spans

    def cuts(self):
        """Return the lengths of `opening` and of its parts up to a token or line, decreasing."""
        cuts = {len(self.opening), len(self.opening.rstrip()), *(
            match.end() for match in re.finditer(f'{self.chat.control.pattern}|\\n', self.opening))}
        return sorted(cuts - {0}, reverse=True)

    def start(self, low, high):
        """Return where an answer begins, after `opening` or the part of it that stands there; low:
        end of the last content, high: begin of its own.
        """
        for cut in self.cuts():
            at = self.text.rfind(self.opening[:cut], low, high)
            if at >= 0:
                return at + cut
        return low + len(self.text[low:high].rstrip())

    def end(self, low, high):
        """Return where the turn of an answer ends: after the first control token before `high`,
        else at `low`. If no token ends answers, that is the next turn's, where few models stop.
        """
        name = self.chat.control.search(self.text, low, high)
        tokenizer = self.chat.tokenizer
        ends = name and (self.ends_answers or tokenizer.control_ids[name[0]] in tokenizer.end_ids)
        return name.end() if ends else low

    def by_prefixes(self, messages, tools):
        """Return the answers by rendering the beginnings of the conversation. Where a later turn
        changes how an answer is shown, its end is that of its turn in the text.
        """
        text, spans = self.text, []
        for i, message in enumerate(messages):
            if message['role'] == 'assistant':
                asked = self.chat.render(messages[:i], tools)
                start = self.chat.render(messages[:i], tools, ask=True)
                if not text.startswith(start) and text.startswith(asked):
                    start = asked + next((self.opening[:cut] for cut in self.cuts()
                                          if text.startswith(self.opening[:cut], len(asked))), '')
                if not text.startswith(start):
                    raise DataError(f'the chat template shows the messages before answer '
                                    f'{len(spans) + 1} otherwise once more messages follow, so '
                                    f'where that answer begins is not known')
                whole = without(BEGIN + END, self.chat.render(messages[:i + 1], tools))
                same = len(os.path.commonprefix([text, whole]))
                ends = [name.end() for name in self.chat.control.finditer(whole, len(start))]
                end = ends[-1] if ends else same
                if same < len(whole):
                    name = self.chat.control.search(text, same)
                    end = max(name.start() if name else len(text), self.end(same, len(text)))
                spans.append((len(start), end))
        return spans
