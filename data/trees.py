"""Encode questions as token trees: a prompt has the tokens of its whole text, header to option."""

import functools
import os
import re
from dataclasses import replace
from typing import NamedTuple

from data.files import dialogue
from data.tree_rows import Tree
from runtime.errors import DataError
from runtime.readers import row_or_error


def tokenize_questions(questions, shots, tokenizer, *, add_bos, max_length, chat='none',
                       multiturn=False, header_as_system=False):
    """Yield (question, Tree or DataError), each with as many whole shots, {Question.group: solved
    questions}, as max_length allows; chat and later arguments: see OptionEncoder.
    """
    encoder = OptionEncoder(tokenizer, add_bos, chat, multiturn, header_as_system)
    for question in questions:
        yield question, row_or_error(question_tree, question, shots.get(question.group, []),
                                     encoder, max_length)


def question_tree(question, shots, encoder, max_length):
    """Return the Tree of a question; DataError if it does not even fit without shots."""
    word = re.match(r'\s*\S*', question.context)[0]
    for n in range(len(shots), -1, -1):
        frame, text = encoder.around(question, shots[:n])
        start = encoder.tokenizer.begins_text(frame.opening)
        ids, parts = encoder.before(frame.before, text, word, start), question.parts
        if ids is None:     # a token spans both texts, so they are encoded as one
            ids, parts = [], [replace(part, context=text + part.context) for part in parts]
        before = (*frame.opening, *ids)
        starts, prompts = [], []
        for part in parts:
            context, whole = encoder.encode(part, frame, start=not ids)
            starts += [len(before) + len(context)] * len(whole)
            prompts += whole
        longest = len(before) + max(map(len, prompts))
        if longest <= max_length:
            prompt = os.path.commonprefix(prompts)
            return Tree(before, prompt, [ids[len(prompt):] for ids in prompts], starts, shots=n)
    raise DataError(f'{question.place}: even without shots the prompt has {longest} tokens; '
                    f'the model or max_length allows {max_length}')


class Frame(NamedTuple):
    """What stands around a question: a stripped question and its answer are encoded as the ids
    `opening`, the text before + question + after, the ids `closing`, the text lead + answer.
    """
    opening: list = []
    before: str = ''
    after: str = ''
    closing: list = []
    lead: str = ''


def question_frame(tokenizer, template, add_bos=True, before=()):
    """Return the Frame of a question in a chat template, after the messages `before`; raises as
    `encode_conversation`.
    """
    from data.chat import chat_of       # plain text needs none of it
    from data.templates import BEGIN, END, QUESTION, without
    chat = chat_of(tokenizer, template, add_bos)
    parts = chat.text([*before, *dialogue(QUESTION)], ask=True).split(QUESTION)
    if len(parts) != 2:
        raise DataError(f"template {template!r} cannot ask a question: it must show the user's "
                        f"text once, and not {len(parts) - 1} times")
    first = max((match.end() for match in chat.control.finditer(parts[0])), default=0)
    last = next((match.start() for match in chat.control.finditer(parts[1])), len(parts[1]))
    opening, closing = (chat.encode(text)[0] for text in (parts[0][:first], parts[1][last:]))
    whole = without(BEGIN + END, chat.text([*before, *dialogue(QUESTION, QUESTION)]))
    gap = whole[len(QUESTION.join(parts)):].partition(QUESTION)[0]
    # the space that the tokenizer puts at the beginning of a text
    lead = gap if gap.isspace() else ' ' * bool(closing and tokenizer.begins_text(closing))
    return Frame(opening, parts[0][first:], parts[1][:last], closing, lead)


@functools.cache
def note_header_left_out(header):
    print(f'note: the chat template refuses a system message, so the prompts lack their header, '
          f'{header.strip()!r:.80}, as in lm-evaluation-harness')


class OptionEncoder:
    """Encode a question's context and context + option, with the tokens of the whole text.

    template: 'none' for plain text. In a chat, header, shots and context are the user's message,
    and an option without the space before it is the answer, as in lm-evaluation-harness; multiturn:
    each shot is a message and an answer; header_as_system: the header is the system message.
    """

    def __init__(self, tokenizer, add_bos, template, multiturn=False, header_as_system=False):
        self.tokenizer = tokenizer
        self.template, self.multiturn = template, multiturn
        self.header_as_system = header_as_system
        self.add_bos, self.in_chat = add_bos, template != 'none'
        cached = functools.lru_cache(1000)
        self.encode_line = cached(functools.partial(tokenizer.encode, start=False))
        self.before = cached(self._before)
        self.frame = cached(self._frame)

    def around(self, question, shots):
        """Return (the Frame of a question, the text of the header and shots in front of it)."""
        header, turns = question.header, ()
        system, header = (header, '') if self.in_chat and self.header_as_system else ('', header)
        if not (self.in_chat and self.multiturn and shots):
            return self.frame(system, ()), header + ''.join(shot.solved for shot in shots)
        for shot in shots:
            answer = shot.options[shot.answer].removeprefix(' ') + shot.ending
            turns += (header + shot.context, answer)
            header = ''
        return self.frame(system, turns), ''

    def _frame(self, system, turns):
        if not self.in_chat:
            return Frame([self.tokenizer.bos_id] * self.add_bos)
        ask = functools.partial(question_frame, self.tokenizer, self.template, self.add_bos)
        try:
            return ask([{'role': 'system', 'content': system}] * bool(system) + dialogue(*turns))
        except DataError:
            frame = ask(dialogue(*turns))       # raises what has another reason
            note_header_left_out(system)
            return frame

    def _before(self, before, text, word, start):
        """Return the tokens of a text in front of a word, None if a token spans both."""
        if not text:
            return []
        whole = self.tokenizer.encode(before + text + word, start)
        end = self.encode_line(word)
        return whole[:-len(end)] if end and whole[-len(end):] == end else None

    def encode(self, question, frame, start):
        """Return (tokens of the context, [tokens of context + option]); start: whether nothing but
        the opening of the Frame precedes the context.
        """
        text = (frame.before if start else '') + question.context + frame.after
        start = start and self.tokenizer.begins_text(frame.opening)
        context = self.tokenizer.encode(text, start) + frame.closing
        if self.in_chat:
            if not all(option.strip() for option in question.options):
                raise DataError(f'{question.place}: an option is empty')
            return context, [context + self.encode_line(frame.lead + option.removeprefix(' '))
                             for option in question.options]
        # no tokenizer joins a line break with what follows, so if the context ends in the tokens of
        # its last line, only that line is encoded again for each option
        _, newline, line = text.rpartition('\n')
        tail = self.encode_line(line) if newline else []
        if tail and context[-len(tail):] == tail:
            prompts = [context[:-len(tail)] + self.encode_line(line + o) for o in question.options]
        else:
            prompts = [self.tokenizer.encode(text + option, start) for option in question.options]
        for option, ids in zip(question.options, prompts):
            if len(ids) <= len(context) or ids[:len(context)] != context:
                raise DataError(f'{question.place}: option {option!r} does not begin at a token '
                                f'boundary after {text[-20:]!r}')
        return context, prompts
