"""P(IK) by tuning the whole model: does it know the answer? (Kadavath et al. 2022, 2207.05221)

samples.jsonl of an evaluation is the data. Each answer that the model drew to a question is a
training sequence, whose letter says whether the answer was right.
"""

import hashlib
import re

from data.files import has_fields, read_rows, require_text
from data.items import draw, parse_rows
from data.prompts import lettered
from data.questions import Loaded, Question
from data.tasks import chat_words
from runtime.errors import DataError
from runtime.sources import fetch
from written.variants import PTrueTask

P_IK = 'Do you know the answer?'        # follows a question


def sample_file(name):
    """Return the file of samples of a task 'p_ik:folder-or-file'; raises DataError."""
    if not (path := name.partition(':')[2]):
        raise DataError('p_ik: no samples given; evaluate the model on written answers, such as '
                        '--tasks=triviaqa --n=30, then use p_ik:FOLDER of that evaluation')
    return fetch(path, ['samples.jsonl'])[0]


def latest_answers(rows):
    """Return the last (place, row) of written answers of each question, and unreadable rows."""
    latest = {}
    for place, row in rows:
        if isinstance(row, DataError):
            latest[place] = place, row
        elif has_fields(row, 'task', 'language', 'id', 'greedy', 'answers'):
            latest[repr((row['task'], row['language'], row['id']))] = place, row
    return latest.values()


def drawn_questions(row, place):
    """Return a Question for each drawn answer of a sample; its answer is A if that one is right."""
    for name in ('task', 'language', 'id', 'subject', 'context'):
        require_text(row.get(name), f'the field "{name}"')
    answers = row['answers']
    if not isinstance(answers, list) or not answers or not all(
            has_fields(x, 'correct') and type(x['correct']) is bool for x in answers):
        raise DataError('"answers" must be a list of answers, whose "correct" is true or false; '
                        'evaluate again with written answers')
    question = re.sub(r'\n\w+:$', '', row['context'])       # without 'Answer:'
    context, options, *_ = lettered(f'{question}\n{P_IK}', ['Yes', 'No'])
    digest = hashlib.blake2b(question.encode(), digest_size=8).hexdigest()
    return [Question(f'{row["task"]}/{row["id"]}', context, options, int(not answer['correct']),
                     row['subject'], category=row['task'], language=row['language'], place=place,
                     digest=digest) for answer in answers]


def load_p_ik(name, cfg):
    """Return questions.Loaded: each question once, whose first drawn answer is judged."""
    if cfg.shots:
        raise DataError(f'{cfg.shots} shots wanted, but p_ik has none; use --shots=0')
    file = sample_file(name)
    questions, bad = parse_rows(latest_answers(read_rows(file)), lambda row, place, number:
                                drawn_questions(row, place)[0], cfg.on_bad_row)
    if not questions:
        raise DataError(f'{file} has no samples of written answers')
    return Loaded(draw(questions, cfg.limit, cfg.seed), {}, bad, len(questions))


class PIKTask(PTrueTask):
    """P(IK) of a tuned model: each question is asked without its answer."""
    settings, described = (), ('chat', 'shots')
    all_metrics = True

    read = staticmethod(load_p_ik)

    def distribution(self, cfg):
        return f'P(IK) of a drawn answer, asked in words, 0 shots, {chat_words(cfg)}'


TASK = PIKTask
