"""Prompts: the text of a question, what precedes it, and the options to score.

PROMPT_FORMATS is the table of `--prompt_format`: `mmlu` asks every task as MMLU does, `harness` as
lm-evaluation-harness 0.4 does, and `own` by the prompt in `benchmarks.BENCHMARKS`.
"""

import functools
import json
import re
import string
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from data.files import has_fields
from runtime.errors import DataError

HEADER = 'The following are multiple choice questions (with answers) about {}.'
LETTERS = string.ascii_uppercase
# follows a proposed answer (Kadavath et al. 2022, 'Language Models (Mostly) Know What They Know')
P_TRUE = '\nIs the proposed answer:\n (A) True\n (B) False\nThe proposed answer is:'
# words that benchmarks publish: MMLU-ProX's headers, names of subjects, XCOPA's connectives
WORDING = json.loads((Path(__file__).parent / 'wording.json').read_text(encoding='utf-8'))


@dataclass
class Item:
    """A question as its benchmark publishes it."""
    question: str
    choices: list[str]
    subject: str
    language: str
    row: dict | list    # the raw row, for a prompt that needs further fields


class Prompt(NamedTuple):
    """The text of an item; `questions.Question` explains the fields."""
    context: str
    options: list[str]
    header: str = ''
    ending: str = ''


# ---- The format of MMLU, for every task ----------------------------------------------------------

def mmlu(item, benchmark, scoring, native):
    """Return the Prompt of an Item in MMLU's format; scoring: 'letters' (or 'auto') or 'text';
    native: header and `Answer:` are the benchmark's own.
    """
    header, answer = (benchmark.native if native else english_words)(item)
    question, choices = item.question.strip(), [choice.strip() for choice in item.choices]
    if scoring == 'text':
        context = question if benchmark.continues else f'{question}\n{answer}'
        return Prompt(context, [f' {choice}' for choice in choices], f'{header}\n\n')
    return lettered(question, choices, answer, f'{header}\n\n')


# what contextual calibration puts in place of a question (Zhao et al. 2021)
CONTENT_FREE = 'N/A', '[MASK]', ''


def content_free(item, prompt, make_prompt):
    """Return the Prompts of an Item whose question is one of CONTENT_FREE, and its choices too
    where the scored words are not theirs. Raises DataError for a Prompt without the question.
    """
    def blank(text):
        without = make_prompt(replace(item, question=text, choices=[text] * len(item.choices)))
        return (without if without.options == prompt.options else
                make_prompt(replace(item, question=text)))

    if prompt.ending or blank(CONTENT_FREE[0]).context == prompt.context:
        raise DataError('contextual needs a prompt in which N/A can stand for the question, and in '
                        'which its options follow; use --prompt_format=mmlu')
    # a context without any text may have no token to predict from
    return [free for free in map(blank, CONTENT_FREE) if free.context]


PROMPT_FORMATS = {
    'mmlu': mmlu,
    'harness': lambda item, benchmark, *_: benchmark.harness(item),
    'own': lambda item, benchmark, *_: benchmark.prompt(item)}


def proposing(context, proposal):
    """Return (context, options) that ask whether the answer `proposal` to a question is true."""
    context = re.sub(r'\bAnswer:$', 'Proposed Answer:', context)
    return f'{context}{proposal}{P_TRUE}', [' (A)', ' (B)']


def check_prompt_format(task, benchmark, cfg):
    """Raise DataError if the prompts that an EvalConfig asks for do not exist for `task`."""
    if cfg.prompt_format not in PROMPT_FORMATS:
        raise DataError(f'prompt_format {cfg.prompt_format!r} is unknown; the formats are '
                        f'{", ".join(PROMPT_FORMATS)}')
    name = task or 'a file of questions'
    prompts = {'harness': benchmark.harness, 'own': benchmark.prompt}
    if prompts.get(cfg.prompt_format, mmlu) is None:
        raise DataError(f'{name} has no prompt in data/benchmarks.py for --prompt_format='
                        f'{cfg.prompt_format}; use --prompt_format=mmlu')
    if cfg.prompt_format in prompts and cfg.scoring != 'auto':
        raise DataError(f'--prompt_format={cfg.prompt_format} decides how {name} is scored; leave '
                        f'out --scoring')
    if cfg.header == 'native' and (cfg.prompt_format != 'mmlu' or benchmark.native is None):
        raise DataError(f'--header=native: {name} has no header of its own in the format '
                        f'{cfg.prompt_format}; mmlu_prox and cmmlu have, in mmlu')


def english_words(item):
    """Return MMLU's (header, word before the answer)."""
    return HEADER.format(item.subject.replace('_', ' ')), 'Answer:'


def mmlu_prox_words(item):
    """Return the (header, word before the answer) that MMLU-ProX publishes for a language."""
    header, answer = _wording('headers', item.language)
    return header.format(item.subject.replace('_', ' ')), answer


def cmmlu_words(item):
    """Return CMMLU's (header, word before the answer)."""
    subject = WORDING['cmmlu_subjects'].get(item.subject, item.subject)
    return f'以下是关于{subject}的单项选择题，请直接给出正确答案的选项。', '答案：'


def listed(choices):
    """Return the choices as lines that begin with their letters."""
    return ''.join(f'\n{letter}. {choice}' for letter, choice in zip(LETTERS, choices))


def lettered(question, choices, answer='Answer:', header=''):
    """Return the Prompt that lists the choices and scores their letters."""
    return Prompt(f'{question}{listed(choices)}\n{answer}',
                  [f' {letter}' for letter in LETTERS[:len(choices)]], header)


# an option that speaks of the others, such as 'None of the above', in the languages of benchmarks
OF_THE_OTHERS = re.compile(
    r'^\W*(all|none|both|neither|either|any|each|some)( of| \w+ of)? (of )?'
    r'(the (above|options|choices|answers)|above|these|those|them)\b|\bof the above\b|'
    # zh, ja, ko
    r'^(以上|上述|所有以上|其他选项|都不是|均不是)\D|上記|以上の(すべて|いずれ|どれ)|選択肢|위의|상기|보기|'
    # de, nl, sv, da, es, pt, it, fr, ro, ca
    r'\b(der (oben )?genannten|bovenstaande|ovanstående|ovenstående|anteriores|precedenti|'
    r'ci-dessus|yukarıda\w*)\b|\b(oben|acima|de mai sus|di atas|trên)\W*$|'
    # ru, uk, sr, pl, cs, lt, el, ar, fa, he, hi, bn, te, th, sw
    r'перечислен|вышеуказан|вищезазначен|наведен|powyższ|výše|aukščiau|παραπάνω|أعلاه|ما سبق|'
    r'موارد بالا|לעיל|उपरोक्त|उपर्युक्त|উপরের|পূর্বোক্ত|పైవ|ข้างต้น|ถูกทุกข้อ|hapo juu',
    re.IGNORECASE)


def names_options(choices):
    """Return the first choice that says something else in another order, or None: that names its
    letter, 'Both A and B' or 'All of these'.
    """
    letters = LETTERS[:len(choices)]
    if all(re.match(rf'\W*{letter}\s?[.):\]：、．）]', choice, re.IGNORECASE)
           for letter, choice in zip(letters, choices)):
        return choices[0]
    letter = rf'(?<![A-Za-z0-9])[{letters}](?![A-Za-z0-9])'
    pair = re.compile(rf'{letter}[^\w.]{{0,3}}(\w{{1,5}}\W{{1,3}}|[和与與及或とや])?{letter}')
    return next((choice for choice in choices if len(choice) <= 60 and (
        pair.search(choice) or OF_THE_OTHERS.search(choice))), None)


def _wording(kind, language):
    if language not in WORDING[kind]:
        raise DataError(f'language {language!r} has no wording of its own; --languages= names the '
                        f'language of a file, one of {", ".join(WORDING[kind])}')
    return WORDING[kind][language]


# ---- The formats of lm-evaluation-harness, which does not strip white space from the choices -----

def harness_letters(item, words=None):
    """The letters of the choices; words: Item -> (header, word before the answer)."""
    header, answer = words(item) if words else ('', 'Answer:')
    return lettered(item.question.strip(), item.choices, answer, header and f'{header}\n\n')


def harness_text(item, text='{}'):
    """The choices as text after the question, which stands in `text`."""
    return Prompt(text.format(item.question).rstrip(), [f' {choice}' for choice in item.choices])


harness_mmlu = functools.partial(harness_letters, words=english_words)
harness_cmmlu = functools.partial(harness_letters, words=cmmlu_words)
harness_boolq = functools.partial(harness_text, text='{}\nAnswer:')
harness_question = functools.partial(harness_text, text='Question: {}\nAnswer:')   # ARC and PIQA
# after six questions and answers that are the same for all
harness_truthfulqa = functools.partial(harness_text, text=WORDING['truthfulqa'] + '\n\nQ: {}\nA:')


def harness_openbookqa(item, space=' '):
    """The choices continue the question; white space at its end is scored."""
    text = item.question + space
    context = text.rstrip()
    return Prompt(context, [text[len(context):] + choice for choice in item.choices])


def harness_generic(item):
    """MMLU's, except for rows of inverse-scaling, whose choices follow their prompt unchanged."""
    is_text = has_fields(item.row, 'prompt', 'classes')
    return harness_openbookqa(item, space='') if is_text else harness_mmlu(item)


def harness_winogrande(item):
    """The part of the sentence after the blank is scored, with each choice in the blank."""
    before, blank, after = item.question.partition('_')
    if not blank:
        raise DataError('the sentence has no blank, an underscore')
    return Prompt(before, item.choices, ending=f' {after.strip()}')


def harness_xcopa(item):
    """The choices continue the premise, after 'because' or 'therefore' in its language."""
    link = _wording('xcopa', item.language)[item.row['question']]
    return Prompt(f'{item.row["premise"].strip()[:-1]} {link}',
                  [f' {choice[0].lower()}{choice[1:]}' for choice in item.choices])
