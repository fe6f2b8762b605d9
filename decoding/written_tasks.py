"""Tasks whose answers the model writes, for evaluate.py: generate, grade, compute confidences.

The classes have the methods of those in data/tasks.py. A confidence in the answers is a variant of
its WrittenTask and has an entry of its own in the results; results/confidence.py has the table of
them. Prompts are in data/written_answers.py, extraction and match rules in data/grading.py.
"""

import bisect
import itertools
import math
import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from data import written_answers
from data.grading import stated_guess
from data.packing import Tree
from data.questions import sample_fields
from data.tasks import PTrueTask, Task, chat_words, task_label
from data.written_answers import WRITTEN_TASKS, load_written
from decoding.answers import generate
from decoding.sampling import Sampling
from results import confidence, samples
from results.p_ik_probe import cross_validated
from runtime import log, parallel
from runtime.errors import ConfigError, DataError
from runtime.sandbox import require_sandbox

ANSWERS_AT_ONCE = 1024      # sequences decoded at once on a GPU, if their keys and values fit


# ---- The answers ---------------------------------------------------------------------------------

class AnswerTask(Task):
    """What a result says of written answers and of each confidence in them."""

    def describe(self, cfg, counts):
        return Task.describe(self, cfg, counts) | {
            'chat': cfg.chat, 'shots': len(self.shots['']), 'n': cfg.n,
            'max_tokens': cfg.max_tokens}

    def distribution(self, cfg):
        """Return in words which probabilities are measured, for the header of a table."""
        return f'{self.title}, {len(self.shots[""])} shots, {chat_words(cfg)}'


class WrittenTask(AnswerTask):
    """Questions whose answers the model writes; a sample has the graded answers."""
    settings = 'p_true', 'p_ik', 'verbalized'
    is_written = continues = True
    title = confidence.GREEDY.title

    @staticmethod
    def read(name, cfg):
        """Return the Loaded questions of a name in --tasks; raises ConfigError or DataError."""
        kind = task_label(name)
        if cfg.languages != ('all',):
            raise ConfigError(f'languages = {cfg.languages}: {kind} has one language; leave it out')
        if cfg.dropout_seed is not None:
            raise ConfigError(f'dropout_seed: {kind} is answered without dropout; leave it out')
        if WRITTEN_TASKS[kind].runs_code:
            if not cfg.run_code:
                raise ConfigError(f'{kind} runs programs that the model wrote; read '
                                  f'docs/running_code.md, then allow it with --run_code')
            if not cfg.show:
                require_sandbox(cfg.isolation)      # before anything is generated
        return load_written(name, cfg)

    @property
    def rule(self):
        """Return the WrittenBenchmark: how answers are extracted and graded."""
        return WRITTEN_TASKS[self.label]

    def max_tokens(self, cfg):
        """Return the most tokens of an answer."""
        return cfg.max_tokens or self.rule.max_tokens

    def check(self, tokenizer, cfg):
        if cfg.verbalized:      # a template may refuse a second question
            question = written_answers.verbalized_2s(self.items[0], 'x', True)
            written_answers.encode(question, [], tokenizer, replace(cfg, max_length=math.inf), 0)

    def encode(self, question, tokenizer, cfg):
        """Return (token ids, ids that end the answer, number of shots) of a question's prompt."""
        return written_answers.encode(question, self.shots[''], tokenizer, cfg,
                                      self.max_tokens(cfg))

    def tokenize(self, tokenizer, cfg):
        """Yield (question, Tree of its prompt and its answer as a shot gives it), for --show."""
        for question in self.items:
            try:
                ids, _, n_shots = self.encode(question, tokenizer, cfg)
            except DataError as error:
                yield question, error
                continue
            solution = ' ' * (cfg.chat == 'none') + question.solution
            yield question, Tree((), ids, [tokenizer.encode(solution, start=False)], [len(ids)],
                                 shots=n_shots)

    def as_text(self, question):
        """Return a question as OptionTask.as_text does, with its answer as a shot gives it."""
        before = question.header + ''.join(shot.solved for shot in self.shots[''])
        return [(before + question.context, [f' {question.solution}'])]

    def collect(self, reader, writer):
        """Write and grade the answers, append the samples; return (prompts, bad rows)."""
        return write_answers(self, reader, writer, reader.cfg.n, self.max_tokens(reader.cfg),
                             self.rule.stop)

    def greedy(self, answer, tokenizer):
        """Return what a sample holds of the greedy Answer."""
        per_token = {key: [float(f'{x:.5g}') for x in getattr(answer, key)]
                     for key in ('log_probs', 'entropies')}
        return written(answer) | per_token | span(answer, self.rule, tokenizer)

    def sample(self, question, greedy, answers, cfg):
        """Return the sample of a question: its answers, graded, and the greedy one's probability.
        """
        rule = self.rule
        options = {'isolation': cfg.isolation} if rule.runs_code else {}

        def grade(answer):
            if rule.runs_code and 'correct' in answer:      # it ran before an interruption
                return answer
            return answer | rule.grade(answer['text'], question.references, **options)

        with ThreadPoolExecutor(os.cpu_count() if rule.runs_code else 1) as pool:
            greedy, *answers = pool.map(grade, (greedy, *answers))
        sample = {'greedy': greedy, 'answers': answers}
        return confidence.judged(question, *confidence.greedy_probability(sample)) | sample

    def variants(self, cfg):
        return confidence.variants(cfg)

    def variant(self, name, scored, top_option):
        """Return the Task of the confidence `name` of CONFIDENCES in the written answers.

        scored: {(split, language, id): sample of the answers}; top_option is not used
        """
        kind = KINDS.get(name, SampleConfidence)
        # all questions share the shots, also those that P(True) makes of them
        groups = '', *((q.language, q.subject) for q in self.items)
        shots = kind.make_shots(self.shots[''], self.rule)
        return self.changed(kind, name, scored, kind.ask, parent=self, answers=scored,
                            shots=dict.fromkeys(groups, shots))


class Request(NamedTuple):
    """The prompt of a question. digest: a hash of all that decides its answers."""
    question: object
    key: tuple          # the sample_key
    ids: list
    n_shots: int
    digest: str


def write_answers(task, reader, writer, n, max_tokens, stop):
    """Generate the answers to the questions of `task`, append their samples; return as `collect`.

    These are a greedy answer and n that are drawn at temperature 1. `prompt` of a sample has two
    hashes, one of what decides the answers and one of the sample itself: answers in samples.jsonl
    are graded again by the present rules, and a sample that this changes is appended again.
    """
    cfg, left, bad_rows, prompts, end = reader.cfg, [], [], set(), set()
    stop = stop if cfg.chat == 'none' else ()
    earlier = {(samples.sample_key(s), s['prompt'].partition('-')[0]): s
               for s in writer.latest(task.label)}

    def append(request, greedy, answers):
        sample = (task.sample(request.question, greedy, answers, cfg)
                  | sample_fields(request.question, request.n_shots))
        prompt = f'{request.digest}-{samples.digest(sample)}'
        if not samples.is_unstated(sample):
            prompts.add((request.key, prompt))
        writer.append(request.key, prompt, sample)

    for question in task.items:
        try:
            ids, ends, n_shots = task.encode(question, reader.tokenizer, cfg)
        except DataError as error:
            bad_rows.append(task.bad_row(error, cfg))
            continue
        request = Request(
            question, (task.label, 'test', question.language, question.id), ids, n_shots,
            samples.digest([ids, n, max_tokens, stop, sorted(ends), cfg.seed]))
        if sample := earlier.get((request.key, request.digest)):
            append(request, sample['greedy'], sample.get('answers'))
        else:
            left.append(request)
            end |= ends
    settings = Sampling(n=1, max_tokens=max_tokens, temperature=0.0, stop=stop, seed=cfg.seed,
                        deterministic=cfg.deterministic,
                        batch_size=ANSWERS_AT_ONCE if cfg.device.startswith('cuda') else 64)
    for answered in new_answers(task, reader, left, settings, n, end):
        append(*answered)
    return prompts, bad_rows


def new_answers(task, reader, requests, settings, n, end):
    """Yield (request, greedy answer, n drawn answers), as a sample holds them, as they are done.

    end: the ids that end an answer
    """
    if not requests:
        return
    model, ids = reader.load(), [request.ids for request in requests]
    try:
        with log.progress_bar(task.label, len(requests), task.unit) as progress:
            answered = ((i, task.greedy(answer, reader.tokenizer), []) for i, (answer,) in generate(
                model, ids, settings, reader.tokenizer, end))
            if n:
                first = {i: greedy for i, greedy, _ in answered}
                drawn = replace(settings, n=n, temperature=1.0)
                answered = ((i, first[i], [*map(written, answers)]) for i, answers in generate(
                    model, ids, drawn, reader.tokenizer, end))
            for i, *answers in answered:
                yield requests[i], *answers
                progress.update()
    except FloatingPointError as error:
        where = f'{task.label}: {requests[error.args[0]].question.place}'
        raise reader.bad_logits(where) from error


def written(answer):
    """Return what a sample holds of an Answer."""
    return {'text': answer.text, 'reason': answer.reason, 'n_tokens': len(answer.tokens),
            'log_prob': math.fsum(answer.log_probs),
            'mean_prob': math.fsum(map(math.exp, answer.log_probs)) / len(answer.tokens)}


def span(answer, rule, tokenizer):
    """Return the extracted answer of an Answer, and the log-probability of its tokens."""
    text = rule.extract(answer.text)
    if text is None:
        return {'span': None, 'span_log_prob': 0.0}
    whole, tokens = answer.text, range(len(answer.tokens))
    # if the text occurs several times: the occurrence that the rule needs, else the last one; a
    # model that repeats itself writes it thousands of times
    begins = [match.start() for match in re.finditer(f'(?={re.escape(text)})', whole)]
    begin = next((i for i in (*begins[:50], *begins[-50:]) if rule.extract(
        whole[:i] + '\0' * len(text) + whole[i + len(text):]) != text), begins[-1])

    def whole_characters(i):
        """Return how many characters the tokens up to i hold, and whether a part of one follows."""
        decoded = tokenizer.decode(answer.tokens[:i + 1], start=False)
        n = len(os.path.commonprefix((decoded, whole)))
        return n, len(decoded) > n

    first = bisect.bisect_right(tokens, begin, key=lambda i: sum(whole_characters(i)))
    last = bisect.bisect_left(tokens, begin + len(text), first,
                              key=lambda i: whole_characters(i)[0])
    return {'span': text, 'span_log_prob': math.fsum(answer.log_probs[first:last + 1])}


# ---- Confidences in the answers ------------------------------------------------------------------

def no_shots(shots, rule):
    return []


@dataclass
class Confidence(AnswerTask):
    """A confidence in answers that were written before; a question without it is left out."""
    parent: WrittenTask | None = None
    answers: dict = field(default_factory=dict)     # {(split, language, id): sample of the answers}
    optional = True

    @staticmethod
    def ask(question, sample):
        """Return the question to ask about a WrittenQuestion and the sample of its answers."""
        return question

    @staticmethod
    def make_shots(shots, rule):
        """Return the solved questions before the question, from those of the WrittenTask."""
        return shots

    @property
    def title(self):
        return confidence.CONFIDENCES[self.label.partition('.')[2]].title


class SampleConfidence(Confidence):
    """A confidence that is computed from the samples of the answers."""

    def collect(self, reader, writer):
        prompts, function = set(), confidence.CONFIDENCES[self.label.partition('.')[2]].function
        for question in self.items:
            key = self.label, 'test', question.language, question.id
            sample = self.answers[key[1:]]
            value, answer = function(sample)
            if value is not None:
                sample = (confidence.judged(question, value, answer)
                          | sample_fields(question, sample['shots']))
                prompts.add((key, prompt := samples.digest(sample)))
                writer.append(key, prompt, sample)
        return prompts, []


class PTrueConfidence(Confidence, PTrueTask):
    """P(True) of the greedy answer; its prompts are scored as those of PTrueTask."""
    make_shots = staticmethod(written_answers.proposed_shots)

    @staticmethod
    def ask(question, sample):
        greedy = sample['greedy']
        return written_answers.proposed(question, greedy['text'], greedy['correct'])


class PTrueAmongSamples(PTrueConfidence):
    """P(True) of the greedy answer, which is shown with others."""
    make_shots = staticmethod(no_shots)
    ask = staticmethod(written_answers.proposed_among)


class ProbeConfidence(Confidence):
    """P(IK) by a probe of the hidden state at the end of the question.

    The first drawn answer is judged, since P(IK) is the probability that a drawn answer is right.
    """
    left_out = 'a probe needs three different questions'

    def collect(self, reader, writer):
        keys = [(self.label, 'test', question.language, question.id) for question in self.items]
        answers = [self.answers[key[1:]] for key in keys]
        prompts = [self.parent.encode(question, reader.tokenizer, reader.cfg)[0]
                   for question in self.items]
        shares = [float(np.mean([answer['correct'] for answer in sample['answers']]))
                  for sample in answers]
        own = zip(keys, map(samples.digest, prompts), shares,
                  (question.digest for question in self.items))
        # the prompt of a sample is the hash of all questions of all processes and of their shares
        # of right answers, since each of them counts in the fit
        rows = sorted(itertools.chain(*parallel.gather([*own])))
        prompt = samples.digest(rows)
        if len({digest for *_, digest in rows}) < 3:
            return set(), []
        if not all((key, prompt) in writer.done for key, *_ in rows):
            states = reader.states(prompts)
            reader.require_finite(states, self.label)
            states = dict(itertools.chain(*parallel.gather([*zip(keys, states)])))
            every, _, shares, digests = zip(*rows)
            p_ik = dict(zip(every, cross_validated(np.array([states[key] for key in every]),
                                                   np.array(shares), digests).tolist()))
            for key, question, sample in zip(keys, self.items, answers):
                writer.append(key, prompt, sample_fields(question, sample['shots'])
                              | confidence.judged(question, p_ik[key], sample['answers'][0]))
        return {(key, prompt) for key in keys}, []


class StatedConfidence(Confidence):
    """A probability that the model states in words after its greedy answer."""
    left_out = 'no answer states a probability from 0 to 1'
    max_tokens, stop = 16, ('\n',)
    make_shots = staticmethod(no_shots)

    @staticmethod
    def ask(question, sample):
        greedy = sample['greedy']
        return written_answers.verbalized_2s(question, greedy['text'], greedy['correct'])

    def encode(self, question, tokenizer, cfg):
        return written_answers.encode(question, [], tokenizer, cfg, self.max_tokens)

    def collect(self, reader, writer):
        return write_answers(self, reader, writer, 0, self.max_tokens, self.stop)

    def greedy(self, answer, tokenizer):
        return written(answer)

    def sample(self, question, greedy, answers, cfg):
        lead = question.lead if cfg.chat == 'none' else ''
        return stated_sample(question, self.parent.rule, greedy,
                             *stated_guess(greedy['text'], lead))


class GuessConfidence(StatedConfidence):
    """A probability that the model states with a new guess."""
    max_tokens, stop = 64, ('\n\n',)
    ask = staticmethod(lambda question, sample: written_answers.verbalized_1s(question))


def stated_sample(question, rule, greedy, guess, probability):
    """Return the sample of a stated probability; `confidence` is None if it has none from 0 to 1.

    guess, probability: as `stated_guess` returns them. After two stages, the answer that the
    question shows is judged.
    """
    value, answer = confidence.parse_probability(probability or ''), question.judged
    if answer is None and guess is not None:
        answer = rule.grade(guess, question.references)
    if answer is None or value is None:
        return {'confidence': None, 'greedy': greedy}
    return confidence.judged(question, value, answer) | {'greedy': greedy}


# {name in CONFIDENCES: kind of its Task}; the others are computed from samples
KINDS = {'p_true': PTrueConfidence, 'p_true_samples': PTrueAmongSamples, 'p_ik': ProbeConfidence,
         'verbalized_1s': GuessConfidence, 'verbalized_2s': StatedConfidence}
