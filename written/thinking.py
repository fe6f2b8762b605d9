"""Where the answer of a reasoning model begins."""

import re

# of DeepSeek, Qwen, GLM, Seed, EXAONE, recipes of GRPO; Magistral; Kimi; OpenThinker; gpt-oss
NAMES = r'(?:seed:)?think(?:ing)?|thoughts?|reasoning'
TAG = re.compile(rf'<(/?)(?:{NAMES})>|\[(/?)THINK\]|◁(/?)think▷'
                 r'|<\|(?:begin|(end))_of_thought\|>'
                 r'|<\|channel\|>(?:analysis|commentary|(final)) *<\|message\|>', re.IGNORECASE)


def final_answer(text):
    """Return what follows the last <think>...</think> of a text, None if it is not closed."""
    tags = [*TAG.finditer(text)]
    if not tags:
        return text
    return text[tags[-1].end():] if any(tags[-1].groups()) else None
