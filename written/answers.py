"""Collect the samples of written answers: generate and grade them, or compute a confidence in them.

task, reader and writer are those of Task.collect in data/tasks.py, and so is what is returned.
"""

from dataclasses import replace

import generate
from data.questions import sample_fields
from results import confidence, samples
from runtime import log
from runtime.errors import DataError
from decoding.sampling import Sampling

ANSWERS_AT_ONCE = 1024      # sequences decoded at once on a GPU, if their keys and values fit


def write_answers(task, reader, writer, n, max_tokens, stop):
    """Generate the answers to the questions of `task`, and append the sample of each question.

    These are a greedy answer and n that are drawn at temperature 1. `prompt` of a sample has two
    hashes, one of what decides the answers and one of the sample itself: answers in samples.jsonl
    are graded again by the present rules, and a sample that this changes is appended again.
    """
    cfg, tokenizer = reader.cfg, reader.tokenizer
    settings = Sampling(n=1, max_tokens=max_tokens, temperature=0.0, stop=stop, seed=cfg.seed,
                        deterministic=cfg.deterministic,
                        batch_size=ANSWERS_AT_ONCE if cfg.device.startswith('cuda') else 64)
    prompts, bad_rows, left, end = set(), [], [], set()
    earlier = {(samples.sample_key(s), s['prompt'].partition('-')[0]): s
               for s in writer.latest(task.label)}

    def append_sample(question, key, request, n_shots, greedy, answers):
        sample = task.sample(question, greedy, answers, cfg) | sample_fields(question, n_shots)
        prompt = f'{request}-{samples.digest(sample)}'
        if not samples.is_unstated(sample):
            prompts.add((key, prompt))
        writer.append(key, prompt, sample)

    for question in task.items:
        try:
            ids, ends, n_shots = task.encode(question, tokenizer, cfg)
        except DataError as error:
            bad_rows.append(task.bad_row(error, cfg))
            continue
        key, end = (task.label, 'test', question.language, question.id), end | ends
        request = samples.digest([ids, n, max_tokens, stop, sorted(ends), cfg.seed])
        if sample := earlier.get((key, request)):
            append_sample(question, key, request, n_shots, sample['greedy'], sample.get('answers'))
        else:
            left.append((question, key, request, n_shots, ids))
    progress = log.Progress(task.label, len(left), task.unit)
    try:
        if left:
            model, ids = reader.load(), [entry[-1] for entry in left]
            greedy = ((i, task.greedy(answer, tokenizer)) for i, (answer,) in generate.generate(
                model, ids, settings, tokenizer, end))
            if n:
                first, settings = dict(greedy), replace(settings, n=n, temperature=1.0)
                answered = ((i, first[i], answers) for i, answers in generate.generate(
                    model, ids, settings, tokenizer, end))
            else:
                answered = ((i, answer, ()) for i, answer in greedy)
            for i, answer, drawn in answered:
                *entry, _ = left[i]
                append_sample(*entry, answer, [*map(confidence.written, drawn)])
                progress.update()
    except FloatingPointError as error:
        raise reader.bad_logits(f'{task.label}: {left[error.args[0]][0].place}') from error
    finally:
        progress.bar.close()
    return prompts, bad_rows


def judge_samples(task, writer):
    """Append the samples of a confidence that is computed from those of the answers."""
    prompts = set()
    for question in task.items:
        key = task.label, 'test', question.language, question.id
        sample = task.answers[key[1:]]
        value, answer = task.entry.function(sample)
        if value is not None:
            sample = (confidence.judged(question, value, answer)
                      | sample_fields(question, sample['shots']))
            prompts.add((key, prompt := samples.digest(sample)))
            writer.append(key, prompt, sample)
    return prompts, []
