"""Tasks whose answers the model writes: their files, prompts, and the table of them.

A new task is an entry of WRITTEN_TASKS, and a row function if no task has its schema; what is right
is decided by written/grading.py.
"""

import functools
import itertools
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from written import code_tasks
from data.chat import encode_prompt
from data.files import has_fields, json_list, read_rows, require_fields, require_text, text_digest
from data.items import draw, parse_rows, with_passage
from written.grading import (any_formula, any_number, contains, formula, gsm8k_number, last_boxed,
                          number, only_line, only_number, passes, same, short_answer, short_number,
                          squad_text, triviaqa_text, whole, without_confidence)
from data.files import dialogue
from data.prompts import P_TRUE, WORDING, proposing
from data.questions import Loaded, Question, fetch_split
from runtime.errors import DataError
from written.thinking import final_answer

N_IDEAS = 5     # answers that P(True) with samples shows, the judged one among them


class WrittenRow(NamedTuple):
    """A question as its file holds it. solution: the text of the answer in a shot."""
    question: str
    references: list
    solution: str
    subject: str = ''
    category: str = ''


@dataclass
class WrittenQuestion:
    """A question whose answer the model writes. The prompt is header + shots + context."""
    id: str
    text: str                   # the question alone
    context: str                # the question as its task asks it; ends where an answer begins
    references: list            # each of them is a right answer
    solution: str               # the answer as a shot gives it
    subject: str = ''
    header: str = ''            # empty, or ends in a blank line
    category: str = ''
    language: str = ''
    place: str = ''             # file and line or row, for messages
    digest: str = ''            # hash of question and references
    instruction: str = ''       # in a chat in place of header and 'Answer:'
    messages: list = field(default_factory=list)    # asked instead of header and context
    lead: str = ''              # begins the answer to `messages` in plain text
    judged: dict | None = None  # the earlier answer that `messages` ask about, graded
    group = ending = by = ''    # one set of shots for all subjects, no --group_by
    split = 'test'

    @property
    def solved(self):
        """Return the question with its answer, as a shot."""
        return f'{self.context} {self.solution}\n\n'


# ---- Row functions -------------------------------------------------------------------------------

def triviaqa_row(row):
    """TriviaQA on the hub. The first alias of an answer is its usual name."""
    answer = row['answer']
    if not has_fields(answer, 'aliases') or not isinstance(answer['aliases'], list):
        raise DataError(f'"answer" must be an object with a "value" and a list of "aliases", not '
                        f'{answer!r:.60}; a file with texts as answers is of the task qa')
    return WrittenRow(row['question'], [answer['value'], *answer['aliases']], answer['value'])


def answers_row(row):
    """NQ-open, SQuAD, your files: `question`, and `answers` (or `answer`), a list or a text."""
    answers = row['answers'] if 'answers' in row else row['answer']
    if has_fields(answers, 'text', 'answer_start'):     # SQuAD's
        answers = answers['text']
    if isinstance(answers, str) and answers.startswith(('["', "['")):
        answers = json_list(answers, '"answers"')
    answers = answers if isinstance(answers, list) else [answers]
    other = row.get('answer')
    if any(x not in (None, *answers) for x in (other if isinstance(other, list) else [other])):
        raise DataError(f'"answer" is not among "answers": {other!r:.60} and {answers!r:.60}; keep '
                        f'one of them')
    return WrittenRow(with_passage(row, row['question']), answers, answers[0] if answers else '',
                      str(row.get('subject') or ''))


def popqa_row(row):
    """PopQA: the answers are a JSON list in a text; the subject is the relation that is asked."""
    answers = json_list(row['possible_answers'], 'possible_answers')
    return WrittenRow(row['question'], answers, answers[0], row['prop'])


def gsm8k_row(row):
    """GSM8K: a solution that ends in '#### number'."""
    solution, mark, number = str(row['answer']).rpartition('####')
    if not mark:
        raise DataError("the answer has no '####' before its number")
    return WrittenRow(row['question'], [number.strip()], row['answer'])


def gsm8k_short_row(row):
    """GSM8K without a chain of thought: the shots have the number alone."""
    row = gsm8k_row(row)
    return row._replace(solution=row.references[0])


def math_row(row):
    """MATH-500, and MATH, whose answer stands in the solution. One of both may be missing."""
    answer = row['answer'] if 'answer' in row else last_boxed(row['solution'])
    return WrittenRow(row['problem'], [answer], row.get('solution') or f'\\boxed{{{answer}}}',
                      row.get('subject') or row.get('type') or '', str(row.get('level') or ''))


def humaneval_row(row):
    """HumanEval: the prompt is the beginning of a program, the references are its Problem."""
    problem = code_tasks.humaneval_row(row)
    return WrittenRow(problem.prompt, [*problem], problem.solution)


# ---- The table -----------------------------------------------------------------------------------

@dataclass
class WrittenBenchmark:
    """A task with references."""
    hub: str                    # the hub dataset
    test: tuple                 # patterns of the files to ask
    shots: tuple                # patterns of the files with solved questions
    row: Callable               # raw row -> WrittenRow
    strict: Callable | None = only_line     # text -> answer or None; None: as lenient
    lenient: Callable = short_answer    # text -> answer or None
    key: Callable = triviaqa_text       # answer -> text that is equal for equal answers
    match: Callable = same      # (key, lenient answer, references) -> right or wrong
    prompt: str = 'Question: {}\nAnswer:'
    header: str = 'Answer these questions as briefly as possible.\n\n'
    stop: tuple = ('\n',)       # of plain text; an answer in a chat ends by itself
    max_tokens: int = 32        # of an answer
    runs_code: bool = False     # `match` runs what the model wrote
    # ends the question in a chat, but for the format 'harness': what an answer looks like
    instruction: str = 'Give only the answer, in one to five words.'

    def final(self, text):
        """Return the text without thoughts, which must end, and without stated confidences."""
        final = final_answer(text) or ''
        return final if self.runs_code else without_confidence(final)

    def extract(self, text):
        """Return the answer by the lenient rule, or None."""
        return self.lenient(self.final(text))

    def grade(self, text, references, **options):
        """Return {'answer': extracted or None, 'key', 'correct', 'strict': right by that rule}.

        'names_reference' is True for a wrong text with a reference in it, such as a sentence. What
        is right by the strict rule is right. options: of `match`, such as the isolation of programs
        """
        answer = self.extract(text)
        correct = strict = answer is not None and self.match(self.key, answer, references,
                                                             **options)
        if self.strict:
            stated = self.strict(self.final(text))
            strict = stated is not None and same(self.key, stated, references)
            if strict and not correct:      # 'Hook' in 'Capt. Hook' seemed to be a sentence
                answer, correct = stated, True
        named = not correct and self.lenient is short_answer and contains(
            self.key, self.final(text), references)
        return {'answer': answer, 'key': None if answer is None else self.key(answer),
                'correct': correct, 'strict': strict} | ({'names_reference': True} if named else {})


ANSWER_LEAD = r'\n(Answer|Solution):$'     # what a prompt ends with in plain text
GSM8K_FILES = (('main/test-*.parquet', 'test.jsonl*'), ('main/train-*.parquet', 'train*.jsonl*'))
WRITTEN_TASKS = {
    'triviaqa': WrittenBenchmark(
        'mandarjoshi/trivia_qa',
        ('unfiltered.nocontext/validation-*.parquet', 'rc.nocontext/validation-*.parquet',
         'validation.jsonl*'),
        ('unfiltered.nocontext/train-*.parquet', 'rc.nocontext/train-*.parquet', 'train.jsonl*'),
        triviaqa_row),
    'nq_open': WrittenBenchmark(
        'google-research-datasets/nq_open',
        ('nq_open/validation-*.parquet', 'NQ-open.dev.jsonl*', 'validation.jsonl*'),
        ('nq_open/train-*.parquet', 'NQ-open.train.jsonl*', 'train.jsonl*'),
        answers_row, key=squad_text),
    # there is no other split for shots
    'popqa': WrittenBenchmark('akariasai/PopQA', ('test.tsv', 'test-*.parquet', 'test.jsonl*'), (),
                              popqa_row, match=contains),
    'gsm8k': WrittenBenchmark(
        'openai/gsm8k', *GSM8K_FILES, gsm8k_row, gsm8k_number, any_number, number,
        header='', stop=('Question:',), max_tokens=256,
        instruction='Solve it step by step. End with a line that has "####" and the number alone.'),
    'gsm8k_short': WrittenBenchmark(
        'openai/gsm8k', *GSM8K_FILES, gsm8k_short_row, only_number, short_number, number,
        header='Answer these questions with a number alone.\n\n', max_tokens=16,
        instruction='Give only the number.'),
    'math500': WrittenBenchmark(
        'HuggingFaceH4/MATH-500', ('test.jsonl*',), ('train.jsonl*',), math_row,
        last_boxed, any_formula, formula, prompt='Problem: {}\nSolution:',
        header='Solve these problems. Put each final answer in \\boxed{}.\n\n',
        stop=('Problem:',), max_tokens=1024,
        instruction='Solve it step by step. Put the final answer in \\boxed{}.'),
    'humaneval': WrittenBenchmark(
        code_tasks.HUMANEVAL, code_tasks.PATTERNS, (), humaneval_row, None, whole, str, passes,
        prompt='{}', header='', stop=code_tasks.STOPS, max_tokens=512, runs_code=True,
        instruction='Complete this program. Give only the whole code.'),
    # a file or folder of your own
    'qa': WrittenBenchmark('', ('test.jsonl*', 'test.json', 'test*.parquet'),
                           ('shots.jsonl*', 'dev.jsonl*', 'train.jsonl*'), answers_row),
}
# the questions that shots are taken from, to tune a model on what it answers: written/p_ik.py
WRITTEN_TASKS |= {f'{name}_train': replace(WRITTEN_TASKS[name], test=WRITTEN_TASKS[name].shots)
                  for name in ('triviaqa', 'nq_open', 'gsm8k')}


def load_written(name, cfg):
    """Return questions.Loaded of a task of WRITTEN_TASKS: 'gsm8k', or 'gsm8k:folder-or-file'."""
    name, _, path = name.partition(':')
    task, shots = WRITTEN_TASKS[name], cfg.shots
    source = os.path.expanduser(path) or task.hub
    if not source:
        raise DataError(f'{name}: no file given; use --tasks={name}:folder-or-file, with rows of '
                        f'{{question, answers}}')
    if cfg.header == 'native':
        raise DataError(f'--header=native: {name} has no header of its own; leave it out')
    if shots and (not task.shots or os.path.isfile(source)):
        raise DataError(f'{shots} shots wanted, but {source} has no solved questions beside those '
                        f'to ask; use --shots=0, into another --out_dir than tasks with shots')
    header = '' if cfg.header == 'none' else task.header
    instruction = '' if cfg.header == 'none' else task.instruction

    def read(split, limit=None):
        files = fetch_split(source, getattr(task, split), split, cfg.data_revision)
        rows = _distinct(read_rows(*files))
        parse = functools.partial(_to_question, task, header, instruction)
        return parse_rows(itertools.islice(rows, limit), parse, cfg.on_bad_row)

    questions, bad = read('test')
    solved, bad_shots = read('shots', shots) if shots else ([], [])
    if task.test == task.shots:     # the first ones are the shots
        questions = questions[shots:]
    if not questions or len(solved) < shots:
        raise DataError(f'{source} has {len(questions)} questions and {len(solved)} solved ones '
                        f'({len(bad + bad_shots)} bad rows); --shots={shots} needs {shots} of them')
    return Loaded(draw(questions, cfg.limit, cfg.seed), {'': solved}, bad + bad_shots,
                  len(questions))


def _distinct(rows):
    """Leave out rows that repeat a question_id: TriviaQA has a row per document of a question."""
    seen = set()
    for place, row in rows:
        id = repr(row.get('question_id') if isinstance(row, dict) else None)
        if id == 'None' or id not in seen:
            yield place, row
        seen.add(id)


def _to_question(task, header, instruction, row, place, number):
    question, references, solution, subject, category = task.row(require_fields(row))
    question = require_text(question, 'the question').strip()
    if not question or not isinstance(references, list) or not any(references):
        raise DataError('wanted a question and one reference answer or more')
    id = str(next((row[key] for key in ('id', 'question_id', 'unique_id', 'task_id')
                   if row.get(key) is not None), number))
    for what, text in (*[('a reference answer', text) for text in (*references, solution)],
                       ('the subject', subject), ('the category', category), ('the id', id)):
        require_text(text, what)
    return WrittenQuestion(
        id, question, task.prompt.format(question), references, solution.strip(), subject, header,
        category, str(row.get('language') or ''), place, text_digest(question, references),
        instruction=instruction)


# ---- Prompts -------------------------------------------------------------------------------------

def encode(question, shots, tokenizer, cfg, max_tokens):
    """Return (token ids, ids that end the answer, number of shots) of the prompt of a question.

    Shots are left out until it and max_tokens more fit into cfg.max_length; DataError if none does.
    """
    template = '' if cfg.chat == 'none' else cfg.chat
    for n in range(len(shots), -1, -1):
        ids, stop = encode_prompt(_messages(question, shots[:n], cfg), tokenizer, template,
                                  cfg.add_bos)
        if len(ids) + max_tokens <= cfg.max_length:
            return ids, stop, n
    raise DataError(f'{question.place}: even without shots the prompt has {len(ids)} tokens; with '
                    f'max_tokens = {max_tokens} the model or max_length allows '
                    f'{max(0, cfg.max_length - max_tokens)}')


def _messages(question, shots, cfg):
    """Return the messages that ask a question after its shots; in plain text one."""
    in_chat = cfg.chat != 'none'
    header, context = question.header, question.context
    if question.messages:
        return question.messages if in_chat else dialogue(as_text(question.messages,
                                                                  question.lead))
    if in_chat and cfg.prompt_format != 'harness' and question.instruction:
        header, context = '', f'{re.sub(ANSWER_LEAD, "", context)}\n{question.instruction}'
    if not cfg.multiturn:
        return dialogue(header + ''.join(shot.solved for shot in shots) + context)
    turns = [text for shot in shots for text in (shot.context, shot.solution)]
    first, *others = *turns, context
    return dialogue(header + first, *others)


def shown(question, text):
    """Return an answer as later prompts show it: stripped, but a program keeps its indentation."""
    return (text.strip() if question.context.endswith(':') else text.rstrip()) or '(none)'


def proposed(question, text, correct):
    """Return the P(True) Question: is `text`, the model's own answer, right?"""
    space = ' ' * question.context.endswith(':')
    context, _ = proposing(question.context, space + shown(question, text))
    return _p_true(question, context, correct, header=question.header)


def proposed_shots(shots, task):
    """Return solved P(True) questions; in each four the middle two propose the next's answer."""
    questions = []
    for i, shot in enumerate(shots):
        other = shots[(i + 1) % len(shots)]
        wrong = i % 4 in (1, 2) and not same(task.key, other.references[0], shot.references)
        questions.append(proposed(shot, (other if wrong else shot).solution, not wrong))
    return questions


def proposed_among(question, sample):
    """Return the P(True) Question that shows drawn answers before the greedy one."""
    ideas = [answer['answer'] or answer['text'].strip() or '(none)'
             for answer in (sample['greedy'], *sample['answers'][:N_IDEAS - 1])]
    lines = '\n'.join(ideas)
    context = (f'Question: {question.text}\nHere are some brainstormed ideas: {lines}\n'
               f'Possible Answer: {ideas[0]}{P_TRUE.replace("proposed", "possible")}')
    return _p_true(question, context, sample['greedy']['correct'])


def _p_true(question, context, correct, **header):
    """Return the Question about a WrittenQuestion whose first option is right if `correct`."""
    fields = {key: getattr(question, key)
              for key in ('id', 'subject', 'category', 'language', 'place', 'digest')}
    return Question(context=context, options=[' (A)', ' (B)'], answer=int(not correct), **fields,
                    **header)


def verbalized_1s(question):
    """Return the question for a guess and its probability (Tian et al. 2023, 2305.14975)."""
    return replace(question, lead='Guess:',
                   messages=dialogue(WORDING['verbalized_1s'].format(question.text)))


def verbalized_2s(question, text, correct):
    """Return the question that asks for the probability of an answer that was given before."""
    answer = shown(question, text)
    return replace(question, lead='Probability:', judged={'answer': answer, 'correct': correct},
                   messages=dialogue(question.context, answer, WORDING['verbalized_2s']))


def as_text(messages, lead):
    """Return a conversation as plain text, for a model without a chat template."""
    first, *others = (message['content'] for message in messages)
    if others:      # an answer, which follows a program without a space
        first += ' ' * first.endswith(':') + others.pop(0)
    return '\n\n'.join([first, *others, lead])
