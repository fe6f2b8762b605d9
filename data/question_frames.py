"""Ask a question in a chat template: what stands around it, and its header."""

import functools

from data.chat import QUESTION, chat_of, without
from data.files import dialogue
from data.templates import BEGIN, END
from runtime.errors import DataError


def question_frame(tokenizer, template, add_bos=True, before=()):
    """Return what a template puts around a question after the messages `before`.

    (opening, before, after, closing, lead): a stripped question and its answer are encoded as the
    ids `opening`, the text before + question + after, the ids `closing`, the text lead + answer.
    Raises as `encode_conversation`.
    """
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
    return opening, parts[0][first:], parts[1][:last], closing, lead


@functools.cache
def note_header_left_out(header):
    print(f'note: the chat template refuses a system message, so the prompts lack their header, '
          f'{header.strip()!r:.80}, as in lm-evaluation-harness')


def with_header(header, messages, encode):
    """Return encode(messages) with a header as their system message, if the template has one."""
    if not header:
        return encode(messages)
    try:
        return encode([{'role': 'system', 'content': header}, *messages])
    except DataError:
        result = encode(messages)       # raises what has another reason
        note_header_left_out(header)
        return result
