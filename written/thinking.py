"""Where the answer of a reasoning model begins, and the steps of thought before it."""

import re

# of DeepSeek, Qwen, GLM, Seed and others, EXAONE, recipes of GRPO; Magistral; Kimi; OpenThinker;
# gpt-oss, whose last channel is the answer
NAMES = r'(?:seed:)?think(?:ing)?|thoughts?|reasoning'
TAG = re.compile(rf'<(/?)(?:{NAMES})>|\[(/?)THINK\]|◁(/?)think▷'
                 r'|<\|(?:begin|(end))_of_thought\|>'
                 r'|<\|channel\|>(?:analysis|commentary|(final)) *<\|message\|>', re.IGNORECASE)

ANSWER_NOW = 'The answer is'    # ends the thoughts of `answer_now`


def final_answer(text):
    """Return what follows the last <think>...</think> of a text; None if that block is not closed.

    The opening tag may be missing, since many templates write it into the prompt.
    """
    tags = [*TAG.finditer(text)]
    if not tags:
        return text
    return text[tags[-1].end():] if any(tags[-1].groups()) else None


def answer_now(text, end, percent):
    """Return the first steps of a text, and words that ask for its answer; None as `final_answer`.

    A step is a sentence or a line. Without tags, the steps are those before the one that holds
    text[end], where the extracted answer begins; None if there is none.
    """
    tags, begin = [*TAG.finditer(text)], 0
    if tags and not any(tags[-1].groups()):
        return None
    if tags and not any(tags[0].groups()):
        begin = tags[0].end()
    before = text[:tags[-1].start() if tags else end]
    steps = re.split(r'(?<=[.!?])(?=[ \t])|(?<=\n)', before[begin:])
    steps = steps if tags else steps[:-1]       # without that of the answer
    said = text[:begin] + ''.join(steps[:round(len(steps) * percent / 100)])
    return said.rstrip() + (f'\n{tags[-1][0]}\n\n' if tags else ' ') + ANSWER_NOW
