"""Where the answer of a reasoning model begins: after the last block of its thoughts."""

import re

# DeepSeek, Qwen, GLM and others; Seed; Magistral; Kimi; OpenThinker; GRPO recipes, EXAONE
NAMES = r'(?:seed:)?think(?:ing)?|thoughts?|reasoning'
TAG = re.compile(rf'<(/?)(?:{NAMES})>|\[(/?)THINK\]|◁(/?)think▷'
                 r'|<\|(?:begin|(end))_of_thought\|>', re.IGNORECASE)


def final_answer(text):
    """Return what follows the last <think>...</think> of a text; None if that block is not closed.

    The opening tag may be missing, since many templates write it into the prompt. A text without
    tags is returned as it is.
    """
    tags = [*TAG.finditer(text)]
    if not tags:
        return text
    return text[tags[-1].end():] if any(tags[-1].groups()) else None
