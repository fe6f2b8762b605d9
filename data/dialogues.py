"""Dialogues in one text: those of HH-RLHF and of NeMo (HelpSteer2) are read, others refused."""

import re

from runtime.errors import DataError

HH_RLHF = re.compile(r'(?:\A|\n\n)(Human|Assistant): ?')
NEMO = re.compile(r'(?:\A|\n)<extra_id_[01]>(System|User|Assistant)(?:\n|\Z)')
# of templates
MARKED = re.compile(
    r"""\s*(<s>|<bos>|<[|]begin_of_text[|]>)?\s*(
    \[INST\].*\[/INST\] | <[|]im_start[|]>.*<[|]im_start[|]>assistant |
    <[|](system|user|prompter)[|]>.*<[|]assistant[|]> | <start_of_turn>.*<start_of_turn>model |
    <[|]start_header_id[|]>.*assistant<[|]end_header_id[|]> | <human>:.*<bot>: |
    [#]{2,3}\ ?(Human|User|System):.*[#]{2,3}\ ?(Assistant|Bot|AI):)
    """, re.DOTALL | re.VERBOSE)
# of Vicuna and others; an answer may well be such a text
SPOKEN = re.compile(r'\s*((SYSTEM|USER|HUMAN):.*\s(ASSISTANT|AI|BOT):|'
                    r'(System|User|Human):.*\n(Assistant|AI|Bot):)', re.DOTALL)


def split_dialogue(text, what, speaker='user'):
    """Return the turns of a dialogue in one text, as in HH-RLHF or HelpSteer2; [] if it is none.

    speaker: who would say it all. Raises DataError for a dialogue with other marks.
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
            parts = []
    return [{'role': role.lower(), 'content': turn}
            for role, turn in zip(parts[::2], parts[1::2], strict=True)]
