"""Prompts: the text that a model reads before and of a question, and the options to score.

PROMPT_FORMATS is the table of `--prompt_format`. `mmlu` asks every task as MMLU does, as in the
papers: a header that names the subject, solved questions ('shots'), then the question; options are
scored as letters (` A` after `Answer:`) or as their full text. `harness` asks each task as
lm-evaluation-harness 0.4 does, by the function that the task's row in `benchmarks.BENCHMARKS`
names: one of the functions `harness_...` below. trees.py joins header, shots and question.
"""

import json
import string
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from runtime.errors import DataError

HEADER = 'The following are multiple choice questions (with answers) about {}.'
LETTERS = string.ascii_uppercase
# Kadavath et al. 2022, 'Language Models (Mostly) Know What They Know': after a proposed answer
P_TRUE = '\nIs the proposed answer:\n (A) True\n (B) False\nThe proposed answer is:'
# texts that benchmarks publish in other languages: MMLU-ProX's headers, CMMLU's names of subjects,
# XCOPA's connectives
WORDING = json.loads((Path(__file__).parent / 'wording.json').read_text(encoding='utf-8'))


@dataclass
class Item:
    """A question as its benchmark publishes it.

    row: the raw row, for a prompt that needs more of it than question and choices
    """
    question: str
    choices: list[str]
    subject: str
    language: str
    row: dict | list


class Prompt(NamedTuple):
    """How an item is asked; see `questions.Question`, which has the same fields."""
    context: str
    options: list[str]
    header: str = ''
    ending: str = ''


# ------------------------------------------------------------------------------------------------
# The format of MMLU, for every task
# ------------------------------------------------------------------------------------------------

def mmlu(item, benchmark, scoring, native):
    """Return the Prompt of an Item in MMLU's format.

    scoring: 'letters' or 'text'; 'auto' is 'letters'
    native:  whether header and `Answer:` are in the item's language, as the benchmark has them
    """
    header, answer = (benchmark.native if native else english_words)(item)
    question, choices = item.question.strip(), [choice.strip() for choice in item.choices]
    if scoring == 'text':
        context = question if benchmark.continues else f'{question}\n{answer}'
        return Prompt(context, [f' {choice}' for choice in choices], f'{header}\n\n')
    return lettered(question, choices, answer, f'{header}\n\n')


def harness(item, benchmark, scoring, native):
    """Return the Prompt of an Item in lm-evaluation-harness's format for its benchmark."""
    return benchmark.harness(item)


# A prompt format is a function(item, benchmark, scoring, native) that returns a Prompt
PROMPT_FORMATS = {'mmlu': mmlu, 'harness': harness}


def check_prompt_format(prompt_format, scoring, header, task, benchmark):
    """Raise DataError if `task` cannot be asked so; fail before any row is read."""
    if prompt_format not in PROMPT_FORMATS:
        raise DataError(f'prompt_format {prompt_format!r} is unknown; the formats are '
                        f'{", ".join(PROMPT_FORMATS)}')
    name = task or 'a file of questions'
    if prompt_format == 'harness' and benchmark.harness is None:
        raise DataError(f'lm-evaluation-harness lets the model write its answer to {name} and has '
                        f'no probabilities of options; use --prompt_format=mmlu')
    if prompt_format == 'harness' and scoring != 'auto':
        raise DataError(f'--prompt_format=harness scores {name} as lm-evaluation-harness does; '
                        f'leave out --scoring')
    if header == 'native' and (prompt_format != 'mmlu' or benchmark.native is None):
        raise DataError(f'--header=native: {name} has no header of its own in the format '
                        f'{prompt_format}; with --prompt_format=mmlu, mmlu_prox, mmlu_prox_lite '
                        f'and cmmlu do')


def english_words(item):
    """Return (header, the word before the answer) of MMLU."""
    return HEADER.format(item.subject.replace('_', ' ')), 'Answer:'


def mmlu_prox_words(item):
    """Return (header, the word before the answer) that MMLU-ProX publishes for a language."""
    header, answer = _wording('headers', item.language)
    return header.format(item.subject.replace('_', ' ')), answer


def cmmlu_words(item):
    """Return (header, the word before the answer) of CMMLU."""
    subject = WORDING['cmmlu_subjects'].get(item.subject, item.subject)
    return f'以下是关于{subject}的单项选择题，请直接给出正确答案的选项。', '答案：'


def listed(choices):
    """Return the choices as lines that begin with their letters."""
    return ''.join(f'\n{letter}. {choice}'
                   for letter, choice in zip(LETTERS, choices, strict=False))


def lettered(question, choices, answer='Answer:', header=''):
    """Return the Prompt that lists the choices and scores their letters."""
    return Prompt(f'{question}{listed(choices)}\n{answer}',
                  [f' {letter}' for letter in LETTERS[:len(choices)]], header)


def _wording(kind, language):
    if language not in WORDING[kind]:
        raise DataError(f'language {language!r} has no wording of its own; --languages= names the '
                        f'language of a file, one of {", ".join(WORDING[kind])}')
    return WORDING[kind][language]


# ------------------------------------------------------------------------------------------------
# The formats of lm-evaluation-harness. It does not strip white space from the choices.
# ------------------------------------------------------------------------------------------------

def harness_mmlu(item):
    return lettered(item.question.strip(), item.choices, header=f'{english_words(item)[0]}\n\n')


def harness_letters(item):
    return lettered(item.question.strip(), item.choices)


def harness_cmmlu(item):
    header, answer = cmmlu_words(item)
    return lettered(item.question.strip(), item.choices, answer, f'{header}\n\n')


def harness_hellaswag(item):
    return Prompt(item.question.strip(), [f' {choice}' for choice in item.choices])


def harness_question(item):
    """ARC and PIQA: the text of the choices after 'Question: ' and 'Answer:'."""
    return Prompt(f'Question: {item.question}\nAnswer:', [f' {choice}' for choice in item.choices])


def harness_boolq(item):
    return Prompt(f'{item.question}\nAnswer:', [f' {choice}' for choice in item.choices])


def harness_openbookqa(item):
    """The choices continue the question; white space that ends the question is scored."""
    question = item.question.rstrip()
    space = item.question[len(question):]
    return Prompt(question, [f'{space} {choice}' for choice in item.choices])


def harness_winogrande(item):
    """The end of the sentence is scored after each choice in the blank."""
    before, blank, after = item.question.partition('_')
    if not blank:
        raise DataError('the sentence has no blank, an underscore')
    return Prompt(before, item.choices, ending=f' {after.strip()}')


def harness_xcopa(item):
    """The choices continue the premise after 'because' or 'therefore' in its language."""
    link = _wording('xcopa', item.language)[item.row['question']]
    return Prompt(f'{item.row["premise"].strip()[:-1]} {link}',
                  [f' {choice[0].lower()}{choice[1:]}' for choice in item.choices])
