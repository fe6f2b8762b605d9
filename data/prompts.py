"""Prompts: make a header, a context and the options to score from a question and its choices.

Two presets. `mmlu` is MMLU's prompt for every task, as in the papers: a header that names the
subject, solved questions ('shots'), then the question; options are scored as letters (` A` after
`Answer:`) or as their full text. `harness` is each task's prompt in lm-evaluation-harness 0.4.
"""

import json
import string
from pathlib import Path

from runtime.errors import DataError

HEADER = 'The following are multiple choice questions (with answers) about {}.'
LETTERS = string.ascii_uppercase
# the formats of lm-evaluation-harness that score text, see `questions.Benchmark`
TEXT_FORMATS = ('text', 'stem', 'arc', 'boolq', 'winogrande', 'xcopa')
# Kadavath et al. 2022, 'Language Models (Mostly) Know What They Know': after a proposed answer
P_TRUE = '\nIs the proposed answer:\n (A) True\n (B) False\nThe proposed answer is:'
# texts that benchmarks publish in other languages: MMLU-ProX's headers, CMMLU's names of subjects,
# XCOPA's connectives
WORDING = json.loads((Path(__file__).parent / 'wording.json').read_text(encoding='utf-8'))


class Prompt:
    """The prompt format of one task: its preset and its scoring ('letters' or 'text').

    task:    a key of questions.TASKS, '' for generic rows
    harness: the task's format in lm-evaluation-harness, see `questions.Benchmark`
    """

    def __init__(self, task, harness, preset='mmlu', scoring='auto', header='english'):
        harness = harness if preset == 'harness' else None
        if harness == '':
            raise DataError(f'lm-evaluation-harness lets the model write its answer to {task} and '
                            f'has no probabilities of options; use --preset=mmlu')
        usual = 'text' if harness in TEXT_FORMATS else 'letters'
        if harness and scoring not in ('auto', usual):
            raise DataError(f'--preset=harness scores {task or "such questions"} by {usual}; leave '
                            f'out --scoring')
        if header == 'native' and (harness or task not in ('mmlu_prox', 'mmlu_prox_lite', 'cmmlu')):
            raise DataError(f'--header=native: {task or "this task"} publishes no header of its '
                            f'own{" for the harness" if harness else ""}; mmlu_prox, '
                            f'mmlu_prox_lite and cmmlu do')
        self.task, self.harness, self.native = task, harness, header == 'native'
        self.chinese = harness == 'cmmlu' or self.native and task == 'cmmlu'
        self.scoring = usual if scoring == 'auto' else scoring

    def header(self, subject, language):
        """Return the text before the shots; it is empty or ends in a blank line."""
        if self.harness in ('no header', *TEXT_FORMATS):
            return ''
        if self.chinese:
            name = WORDING['cmmlu_subjects'].get(subject, subject)
            return f'以下是关于{name}的单项选择题，请直接给出正确答案的选项。\n\n'
        text = _wording('headers', language)[0] if self.native else HEADER
        return text.format(subject.replace('_', ' ')) + '\n\n'

    def ending(self, text):
        """Return what follows each option of a question, for `Question.ending`; '' for most."""
        return f' {text.partition("_")[2].strip()}' if self.harness == 'winogrande' else ''

    def format(self, row, text, choices, language):
        """Return (context, options) of a question and its choices, see `questions.Question`.

        row: the raw row, whose fields XCOPA's format needs
        """
        if not self.harness:    # the harness does not strip white space
            choices = [choice.strip() for choice in choices]
        if self.harness == 'xcopa':
            link = _wording('xcopa', language)[row['question']]
            return (f'{row["premise"].strip()[:-1]} {link}',
                    [f' {choice[0].lower()}{choice[1:]}' for choice in choices])
        if self.harness == 'winogrande':
            if '_' not in text:
                raise DataError('the sentence has no blank, an underscore')
            return text.partition('_')[0], choices
        if self.harness == 'stem':      # there, white space after the question is scored
            space = text[len(text.rstrip()):]
            return text.rstrip(), [f'{space} {choice}' for choice in choices]
        answer = 'Answer:'
        if self.chinese:
            answer = '答案：'
        elif self.native:
            answer = _wording('headers', language)[1]
        if self.scoring == 'text':
            context = f'{text.strip()}\n{answer}'
            if self.task == 'hellaswag':    # the options continue its sentence
                context = text.strip()
            elif self.harness in ('arc', 'boolq'):
                context = f'{"Question: " if self.harness == "arc" else ""}{text}\n{answer}'
            return context, [f' {choice}' for choice in choices]
        return (f'{text.strip()}{listed(choices)}\n{answer}',
                [f' {letter}' for letter in LETTERS[:len(choices)]])


def listed(choices):
    """Return the choices as lines that begin with their letters."""
    return ''.join(f'\n{letter}. {choice}' for letter, choice in zip(LETTERS, choices))


def _wording(kind, language):
    if language not in WORDING[kind]:
        raise DataError(f'language {language!r} has no wording of its own; --languages= names the '
                        f'language of a file, one of {", ".join(WORDING[kind])}')
    return WORDING[kind][language]
