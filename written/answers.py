"""Collect the samples of written answers: generate and grade them, or compute a confidence in them.

A collector has the arguments and the result of evaluate.score_task. append(key, prompt, sample)
writes a sample unless (key, prompt) is in `done`.
"""

from dataclasses import replace

import generate
from data import grading, written_answers
from data.written_answers import WRITTEN_TASKS, VERBALIZED
from results import confidence, samples
from runtime import checkpoint, log
from runtime.errors import CheckpointError, DataError
from decoding.sampling import Sampling

ANSWERS_AT_ONCE = 1024      # sequences decoded at once on a GPU, if their keys and values fit


def write_answers(load, folder, tokenizer, label, task, cfg, done, append):
    """Generate the answers to the questions of `task`, and append the sample of each question.

    For a task itself ('free') these are a greedy answer and cfg.n drawn at temperature 1; for a
    stated probability only the greedy one. `prompt` of a sample has two hashes, one of what decides
    the answers and one of the sample itself: answers in samples.jsonl are graded again by the
    present rules, and a sample that this changes is appended again.
    """
    rule = WRITTEN_TASKS[label.partition('.')[0]].isolated(cfg.isolation)
    n = cfg.n if task.kind == 'free' else 0
    max_tokens, stop = cfg.max_tokens or rule.max_tokens, rule.stop
    if not n:
        max_tokens, stop = VERBALIZED[task.kind]
    if cfg.chat != 'none':
        stop = ()
    settings = Sampling(n=1, max_tokens=max_tokens, temperature=0.0, stop=stop, seed=cfg.seed,
                        deterministic=cfg.deterministic,
                        batch_size=ANSWERS_AT_ONCE if cfg.device.startswith('cuda') else 64)
    prompts, bad_rows, left, end = set(), [], [], set()
    earlier = {(samples.sample_key(s), s['prompt'].partition('-')[0]): s for s in task.written}

    def append_sample(question, key, request, n_shots, greedy, answers):
        if n:
            sample = confidence.answer_sample(question, rule, greedy, answers)
        else:
            stated = grading.stated_guess(
                greedy['text'], question.lead if cfg.chat == 'none' else '')
            sample = confidence.verbalized_sample(question, rule, greedy, *stated)
        sample |= samples.question_fields(question, n_shots)
        prompt = f'{request}-{samples.digest(sample)}'
        if not samples.is_silent(sample):
            prompts.add((key, prompt))
        append(key, prompt, sample)

    for question in task.items:
        try:
            ids, ends, n_shots = written_answers.encode(question, task.shots[''], tokenizer, cfg,
                                                     max_tokens)
        except DataError as error:
            if cfg.on_bad_row == 'stop':
                raise DataError(f'{label}: {error}; --on_bad_row=skip leaves it out') from error
            bad_rows.append(str(error))
            continue
        key, end = (label, 'test', question.language, question.id), end | ends
        request = samples.digest([ids, n, max_tokens, stop, sorted(ends), cfg.seed])
        if sample := earlier.get((key, request)):
            append_sample(question, key, request, n_shots, sample['greedy'], sample.get('answers'))
        else:
            left.append((question, key, request, n_shots, ids))
    progress = log.Progress(label, len(left), task.unit)
    try:
        if left:
            model, ids = load(), [entry[-1] for entry in left]
            greedy = generate.generate(model, ids, settings, tokenizer, end)
            drawn = generate.generate(model, ids, replace(settings, n=n, temperature=1.0),
                                      tokenizer, end)
            first = {i: confidence.written(answer) | confidence.per_token(answer)
                     | confidence.span(answer, rule, tokenizer)
                     for i, (answer,) in greedy} if n else {}
            for i, answers in drawn if n else greedy:
                *entry, _ = left[i]
                answers = [*map(confidence.written, answers)]
                append_sample(*entry, *((first[i], answers) if n else (answers[0], None)))
                progress.update()
    except FloatingPointError as error:
        where = f'{label}: {left[error.args[0]][0].place}'
        raise CheckpointError(checkpoint.bad_logits(where, folder, cfg.dtype)) from error
    finally:
        progress.bar.close()
    return prompts, bad_rows


def judge_samples(load, folder, tokenizer, label, task, cfg, done, append):
    """Append the samples of a confidence that is computed from those of the answers."""
    function, prompts = confidence.CONFIDENCES[label.partition('.')[2]].function, set()
    scored = {samples.sample_key(s)[1:]: s for s in task.written}
    for question in task.items:
        key = label, 'test', question.language, question.id
        value, answer = function(scored[key[1:]])
        if value is not None:
            sample = (confidence.judged(question, value, answer)
                      | samples.question_fields(question, scored[key[1:]]['shots']))
            prompts.add((key, prompt := samples.digest(sample)))
            append(key, prompt, sample)
    return prompts, []
