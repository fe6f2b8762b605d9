"""Encode questions as token trees.

A prompt has the tokens of its whole text, from header to option. Parts are encoded separately only
where that gives the same tokens.
"""

import functools
import os
import re
from dataclasses import replace

from data.chat import begins_text, question_frame
from data.tree_rows import Tree
from runtime.errors import DataError


def tokenize_questions(questions, shots, tokenizer, *, add_bos, max_length, chat='none'):
    """Yield (question, Tree or DataError), each with as many whole shots as max_length allows.

    shots: {Question.group: solved questions}
    chat:  name of the chat template, or 'none' for plain text
    """
    encoder = OptionEncoder(tokenizer, add_bos, chat)
    for question in questions:
        try:
            yield question, question_tree(question, shots.get(question.group, []), encoder,
                                          max_length)
        except DataError as error:
            yield question, error


def question_tree(question, shots, encoder, max_length):
    """Return the Tree of a question; DataError if it does not even fit without shots."""
    word = re.match(r'\s*\S*', question.context)[0]
    for n in range(len(shots), -1, -1):
        text = question.header + ''.join(shot.solved for shot in shots[:n])
        ids, parts = encoder.encode_before(text, word), question.parts
        if ids is None:     # a token spans both texts, so they are encoded as one
            ids, parts = [], [replace(part, context=text + part.context) for part in parts]
        before = (*encoder.opening, *ids)
        starts, prompts = [], []
        for part in parts:
            context, whole = encoder.encode(part, start=not ids)
            starts += [len(before) + len(context)] * len(whole)
            prompts += whole
        longest = len(before) + max(map(len, prompts))
        if longest <= max_length:
            prompt = os.path.commonprefix(prompts)
            return Tree(before, prompt, [ids[len(prompt):] for ids in prompts], starts, shots=n)
    raise DataError(f'{question.place}: even without shots the prompt has {longest} tokens; '
                    f'the model or max_length allows {max_length}')


class OptionEncoder:
    """Encode a question's context and context + option, with the tokens of the whole text.

    In a chat template, header, shots and context are the user's message, and an option, without
    white space around it, is the answer. The tokens are those of the conversation in training.
    """

    def __init__(self, tokenizer, add_bos, template):
        self.encode_text = tokenizer.encode
        self.encode_line = functools.lru_cache(1000)(functools.partial(tokenizer.encode,
                                                                       start=False))
        self.encode_before = functools.lru_cache(1000)(self._encode_before)
        bos, self.in_chat = [tokenizer.bos_id] * add_bos, template != 'none'
        self.opening, self.before, self.after, self.closing, self.lead = (
            question_frame(tokenizer, template, add_bos) if self.in_chat else (bos, '', '', [], ''))
        self.start = begins_text(self.opening, bos, tokenizer)

    def _encode_before(self, text, word):
        """Return the tokens of a text in front of a word, None if a token spans both."""
        if not text:
            return []
        whole = self.encode_text(self.before + text + word, self.start)
        end = self.encode_line(word)
        return whole[:-len(end)] if end and whole[-len(end):] == end else None

    def encode(self, question, start):
        """Return (tokens of the context, [tokens of context + option]).

        start: whether nothing but `opening` precedes the context
        """
        text = (self.before if start else '') + question.context + self.after
        start = start and self.start
        context = self.encode_text(text, start) + self.closing
        if self.in_chat:
            if not all(option.strip() for option in question.options):
                raise DataError(f'{question.place}: an option is empty')
            return context, [context + self.encode_line(self.lead + option.strip())
                             for option in question.options]
        # no tokenizer joins a line break with what follows, so if the context ends in the tokens of
        # its last line, only that line is encoded again for each option
        _, newline, line = text.rpartition('\n')
        tail = self.encode_line(line) if newline else []
        if tail and context[-len(tail):] == tail:
            prompts = [context[:-len(tail)] + self.encode_line(line + o) for o in question.options]
        else:
            prompts = [self.encode_text(text + option, start) for option in question.options]
        for option, ids in zip(question.options, prompts):
            if len(ids) <= len(context) or ids[:len(context)] != context:
                raise DataError(f'{question.place}: option {option!r} does not begin at a token '
                                f'boundary after {text[-20:]!r}')
        return context, prompts
