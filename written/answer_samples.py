"""Write the answers to the questions of a task, grade them, and append them as samples.

A question's answers are a greedy one and, for most tasks, n that are drawn at temperature 1.
"""

import bisect
import math
import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from data.tasks import sample_fields
from decoding.answers import generate
from decoding.sampling import Sampling
from results import samples
from runtime.errors import DataError
from runtime.parallel import progress_bar

ANSWERS_AT_ONCE = 1024      # sequences decoded at once on a GPU, if their keys and values fit


def write_answers(task, scorer, writer, n, stop):
    """Generate what has no sample yet; return (prompts, bad rows) as `Task.collect` does.

    `prompt` of a sample has a hash of what decides the answers and one of the sample itself: known
    answers are graded again by the present rules, and a sample that this changes is appended again.
    """
    cfg, bad_rows = scorer.cfg, []
    prompts, end_ids = set(), set()
    stop, max_tokens = stop if cfg.chat == 'none' else (), task.max_tokens(cfg)
    earlier = {(samples.sample_key(s), s['prompt'].partition('-')[0]): s
               for s in writer.latest(task.label)}
    runs = [cfg.isolation] if task.rule and task.rule.runs_code else []
    ids_of, requests = [], []       # of the questions to answer

    def append(question, n_shots, digest, answers):
        answers = graded(answers, question, task.rule, cfg)
        sample = task.answer_sample(question, answers, cfg) | sample_fields(question, n_shots)
        key, prompt = task.sample_key(question), f'{digest}-{samples.digest(sample)}'
        if not samples.is_unstated(sample):
            prompts.add((key, prompt))
        writer.append(key, prompt, sample)

    for question in task.items:
        try:
            ids, ends, n_shots = task.encode(question, scorer.tokenizer, cfg)
        except DataError as error:
            bad_rows.append(task.bad_row(error, cfg))
            continue
        digest = samples.digest([ids, n, max_tokens, stop, sorted(ends), cfg.seed, *runs])
        if sample := earlier.get((task.sample_key(question), digest)):
            append(question, n_shots, digest, [sample['greedy'], *(sample.get('answers') or ())])
        else:
            ids_of.append(ids)
            requests.append((question, n_shots, digest))
            end_ids |= ends
    if not requests:
        return prompts, bad_rows
    greedy = Sampling(n=1, max_tokens=max_tokens, temperature=0.0, stop=stop, seed=cfg.seed,
                      deterministic=cfg.deterministic,
                      batch_size=ANSWERS_AT_ONCE if cfg.device.startswith('cuda') else 64)
    try:
        with progress_bar(task.label, len(requests), task.unit) as progress:
            for i, answers in greedy_and_drawn(task, scorer, ids_of, greedy, n, end_ids):
                append(*requests[i], answers)
                progress.update()
    except FloatingPointError as error:
        where = f'{task.label}: {requests[error.args[0]][0].place}'
        raise scorer.bad_logits(where) from error
    return prompts, bad_rows


def greedy_and_drawn(task, scorer, prompts, greedy, n, end_ids):
    """Yield (index of a prompt, its answer by the Sampling `greedy` and n drawn ones)."""
    model, tokenizer = scorer.load(), scorer.tokenizer
    answers = {}
    for i, (answer,) in generate(model, prompts, greedy, tokenizer, end_ids):
        answers[i] = [written(answer)]
        if task.rule:       # log-probabilities and entropies of the tokens, to five digits
            answers[i][0] |= {key: [float(f'{x:.5g}') for x in getattr(answer, key)] for key in (
                'log_probs', 'entropies')} | span(answer, task.rule, tokenizer)
        if n == 0:
            yield i, answers[i]
    if n:
        drawn = replace(greedy, n=n, temperature=1.0)
        for i, group in generate(model, prompts, drawn, tokenizer, end_ids):
            yield i, answers.pop(i) + [*map(written, group)]


def written(answer):
    """Return what a sample holds of an Answer."""
    return {'text': answer.text, 'reason': answer.reason, 'n_tokens': len(answer.tokens),
            'log_prob': math.fsum(answer.log_probs),
            'mean_prob': math.fsum(map(math.exp, answer.log_probs)) / len(answer.tokens)}


def graded(answers, question, rule, cfg):
    """Return answers, as a sample holds them, with their grades by `rule`, if there is one."""
    if rule is None:
        return answers
    options = {'isolation': cfg.isolation} if rule.runs_code else {}

    def grade(answer):
        if rule.runs_code and 'correct' in answer:      # it ran before an interruption
            return answer
        return answer | rule.grade(answer['text'], question.references, **options)

    with ThreadPoolExecutor(os.cpu_count() if rule.runs_code else 1) as pool:
        return [*pool.map(grade, answers)]


def begin_of(text, whole, rule):
    """Return where `text`, which the rule extracts, begins in the answer `whole`; None of None.

    If it occurs several times: the occurrence that the rule needs, else the last one.
    """
    if text is None or text not in whole:      # an answer around a stated confidence
        return None
    begins = [match.start() for match in re.finditer(f'(?={re.escape(text)})', whole)]
    # a model that repeats itself writes it thousands of times
    most = min(50, 1 + 100_000 // len(whole))
    return next((i for i in (*begins[:most], *begins[-most:]) if rule.extract(
        whole[:i] + '\0' * len(text) + whole[i + len(text):]) != text), begins[-1])


def span(answer, rule, tokenizer):
    """Return the extracted answer of an Answer, and the log-probability of its tokens."""
    whole, tokens = answer.text, range(len(answer.tokens))
    text = rule.extract(whole)
    if (begin := begin_of(text, whole, rule)) is None:
        return {'span': None, 'span_log_prob': 0.0}

    def whole_characters(i):
        """Return how many characters the tokens up to i hold, and whether a part of one follows."""
        decoded = tokenizer.decode(answer.tokens[:i + 1], start=False)
        n = len(os.path.commonprefix((decoded, whole)))
        return n, len(decoded) > n

    first = bisect.bisect_right(tokens, begin, key=lambda i: sum(whole_characters(i)))
    last = bisect.bisect_left(tokens, begin + len(text), first,
                              key=lambda i: whole_characters(i)[0])
    return {'span': text, 'span_log_prob': math.fsum(answer.log_probs[first:last + 1])}
