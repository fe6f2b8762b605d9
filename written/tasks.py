"""Tasks whose answers the model writes, for evaluate.py, and the confidences in the answers.

The classes have the methods of those in data/tasks.py. A confidence in the answers is a variant of
its WrittenTask and has an entry of its own in the results; written/confidence.py has the table of
them. Prompts are in written/benchmarks.py, extraction and match rules in written/grading.py.
"""

import itertools
import math
from dataclasses import dataclass, field, replace

import numpy as np

from written import benchmarks as written_answers
from data.tree_rows import Tree
from data.tasks import Task, chat_words, sample_fields, task_label
from written.benchmarks import WRITTEN_TASKS, load_written
from written.answer_samples import write_answers
from results import samples
from written import confidence
from written.p_ik_probe import cross_validated
from results.samples import question_numbers
from runtime import parallel
from runtime.digests import code_digest
from runtime.errors import ConfigError, DataError
from written.sandbox import require_sandbox
from written.variants import PTrueTask

# ---- The answers ---------------------------------------------------------------------------------

class AnswerTask(Task):
    """What written answers and each confidence in them share: `row`, of the table of confidences.

    rule: the WrittenBenchmark that extracts and grades answers; None: nothing is graded
    """
    rule = None

    def encode(self, question, tokenizer, cfg):
        """Return (token ids, ids that end the answer, number of shots) of a question's prompt."""
        return written_answers.encode(question, self.shots[''], tokenizer, cfg,
                                      self.max_tokens(cfg))

    def answer_sample(self, question, answers, cfg):
        """Return the sample of a question with its answers; `confidence` is None if it has none."""
        sample = {'greedy': answers[0]} | ({'answers': answers[1:]} if self.is_written else {})
        value, answer = self.judge(question, sample, cfg)
        if value is None:
            return {'confidence': None} | sample
        return confidence.judged(question, value, answer) | sample

    def judge(self, question, sample, cfg):
        """Return (confidence or None, the graded answer that it is in) of a sample."""
        return self.row.function(sample)

    def describe(self, cfg, counts):
        return Task.describe(self, cfg, counts) | {
            'chat': cfg.chat, 'shots': len(self.shots['']), 'n': cfg.n,
            'max_tokens': cfg.max_tokens} | (
                {'instruction': self.rule.instruction} if cfg.chat != 'none' and self.rule else {})

    def distribution(self, cfg):
        """Return in words which probabilities are measured, for the header of a table."""
        return f'{self.row.title}, {len(self.shots[""])} shots, {chat_words(cfg)}'


class WrittenTask(AnswerTask):
    """Questions whose answers the model writes; a sample has the graded answers."""
    settings = 'p_true', 'p_ik', 'verbalized'
    is_written = continues = all_metrics = True
    identity = ('id', 'text', 'references', 'solution', 'subject', 'category', 'language', 'digest',
                'messages', 'lead', 'judged')
    row = confidence.GREEDY

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
        return WRITTEN_TASKS[self.label]

    def max_tokens(self, cfg):
        """Return the most tokens of an answer."""
        return cfg.max_tokens or self.rule.max_tokens

    def check(self, tokenizer, cfg):
        if cfg.verbalized:      # a template may refuse a second question
            question = written_answers.verbalized_2s(self.items[0], 'x', True)
            written_answers.encode(question, [], tokenizer, replace(cfg, max_length=math.inf), 0)

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

    def collect(self, scorer, writer):
        return write_answers(self, scorer, writer, scorer.cfg.n, self.rule.stop)

    def variants(self, cfg):
        return confidence.variants(cfg)

    def variant(self, name, scored, top_option):
        """Return the Task of the confidence `name` of CONFIDENCES in the written answers.

        scored: {(split, language, id): sample of the answers}; top_option is not used
        """
        kind = globals()[confidence.CONFIDENCES[name].kind]
        # all questions share the shots, also those that P(True) makes of them
        groups = '', *((q.language, q.subject) for q in self.items)
        shots = dict.fromkeys(groups, kind.make_shots(self.shots[''], self.rule))
        return self.changed(kind, name, scored, kind.ask, shots, parent=self, answers=scored)


# ---- Confidences in the answers ------------------------------------------------------------------

def about_greedy(ask):
    """Return `ask` of a Confidence that asks about the text of the greedy answer and its grade."""
    return staticmethod(lambda question, sample: ask(
        question, sample['greedy']['text'], sample['greedy']['correct']))


@dataclass
class Confidence(AnswerTask):
    """A confidence in answers that were written before; a question without it is left out.

    ask:        (WrittenQuestion, sample of its answers) -> the question to ask about them
    make_shots: (shots of the WrittenTask, its rule) -> the solved questions before that question
    """
    parent: WrittenTask | None = None
    answers: dict = field(default_factory=dict)     # {(split, language, id): sample of the answers}
    optional = True
    ask = staticmethod(lambda question, sample: question)
    make_shots = staticmethod(lambda shots, rule: shots)

    @property
    def row(self):
        """Return the row of this confidence in the table."""
        return confidence.CONFIDENCES[self.label.partition('.')[2]]


class SampleConfidence(Confidence):
    """A confidence that is computed from the samples of the answers."""

    def collect(self, scorer, writer):
        prompts = set()
        for question in self.items:
            key = self.sample_key(question)
            sample = self.answers[key[1:]]
            value, answer = self.row.function(sample)
            if value is not None:
                sample = (confidence.judged(question, value, answer)
                          | sample_fields(question, sample['shots']))
                prompts.add((key, prompt := samples.digest(sample)))
                writer.append(key, prompt, sample)
        return prompts, []


class PTrueConfidence(Confidence, PTrueTask):
    """P(True) of the greedy answer; its prompts are scored as those of PTrueTask."""
    ask = about_greedy(written_answers.proposed)
    make_shots = staticmethod(written_answers.proposed_shots)


class PTrueAmongSamples(PTrueConfidence):
    """P(True) of the greedy answer, which is shown with others."""
    ask = staticmethod(written_answers.proposed_among)
    make_shots = staticmethod(lambda shots, rule: [])


class ProbeConfidence(Confidence):
    """P(IK) by a probe of the hidden state at the end of the question.

    The first drawn answer is judged, since P(IK) is the probability that a drawn answer is right.
    """
    left_out = 'a probe needs three different questions'

    def collect(self, scorer, writer):
        keys = [self.sample_key(question) for question in self.items]
        answers = [self.answers[key[1:]] for key in keys]
        prompts = [self.parent.encode(question, scorer.tokenizer, scorer.cfg)[0]
                   for question in self.items]
        shares = [float(np.mean([answer['correct'] for answer in sample['answers']]))
                  for sample in answers]
        own = zip(keys, map(samples.digest, prompts), shares,
                  (question.digest for question in self.items))
        # the prompt of a sample is the hash of all questions of all processes and of their shares
        # of right answers, since each of them counts in the fit, and of the code of the fit
        rows = sorted(itertools.chain(*parallel.gather([*own])))
        # a question has one text in each language, and texts may be there twice
        shared, first = question_numbers([{'id': key[-1]} for key, *_ in rows]), {}
        groups = [first.setdefault(shared[0][i] if shared else i, text)
                  for i, (*_, text) in enumerate(rows)]
        prompt = samples.digest([rows, code_digest('written.p_ik_probe', 'compare.scaling')])
        if len({*groups}) < 3:
            return set(), []
        if not all((key, prompt) in writer.done for key, *_ in rows):
            states = scorer.states(prompts)
            scorer.require_finite(states, self.label)
            states = dict(itertools.chain(*parallel.gather([*zip(keys, states)])))
            every, _, shares, _ = zip(*rows)
            p_ik = dict(zip(every, cross_validated(np.array([states[key] for key in every]),
                                                   np.array(shares), groups).tolist()))
            for key, question, sample in zip(keys, self.items, answers):
                writer.append(key, prompt, sample_fields(question, sample['shots'])
                              | confidence.judged(question, p_ik[key], sample['answers'][0]))
        return {(key, prompt) for key in keys}, []


class StatedConfidence(Confidence):
    """A probability that the model states in words after its greedy answer."""
    left_out = 'no answer states a probability from 0 to 1'
    longest, stop = 16, ('\n',)
    ask = about_greedy(written_answers.verbalized_2s)
    make_shots = staticmethod(lambda shots, rule: [])

    def max_tokens(self, cfg):
        return self.longest

    def collect(self, scorer, writer):
        return write_answers(self, scorer, writer, 0, self.stop)

    def judge(self, question, sample, cfg):
        """Return as AnswerTask. After two stages, the answer that the question shows is judged."""
        lead = question.lead if cfg.chat == 'none' else ''
        guess, value = confidence.stated_guess(sample['greedy']['text'], lead)
        answer = question.judged
        if answer is None and guess is not None:
            answer = self.parent.rule.grade(guess, question.references)
        return (None if answer is None else value), answer


class GuessConfidence(StatedConfidence):
    """A probability that the model states with a new guess."""
    longest, stop = 64, ('\n\n',)
    ask = staticmethod(lambda question, sample: written_answers.verbalized_1s(question))


TASK = WrittenTask
