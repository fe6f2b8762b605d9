"""Kinds of tasks whose answers the model writes, and of the other confidences in these answers.

The classes have the methods of those in data/tasks.py. A confidence is a variant of its WrittenTask
and has an entry of its own in the results; results/confidence.py has the table of them.
"""

import math
from dataclasses import dataclass, field, replace

from data import grading, written_answers
from data.written_answers import WRITTEN_TASKS, VERBALIZED, load_written
from data.packing import Tree
from data.tasks import PTrueTask, Task, chat_words, task_label, task_source
from results import confidence
from runtime.errors import ConfigError, DataError
from runtime.sandbox import require_sandbox
from written.answers import judge_samples, write_answers
from written.p_ik import probe_answers

N_IDEAS = 5     # answers that P(True) with samples shows, the judged one among them


class WrittenTask(Task):
    """Questions whose answers the model writes; a sample has the graded answers."""
    settings = 'p_true', 'p_ik', 'verbalized'
    is_written = continues = True

    @classmethod
    def load(cls, name, cfg):
        """Return the task `name` of --tasks; raises ConfigError or DataError."""
        kind = task_label(name)
        if cfg.languages != ('all',):
            raise ConfigError(f'languages = {cfg.languages}: {kind} has one language; leave it out')
        if cfg.dropout_seed is not None:
            raise ConfigError(f'dropout_seed: the answers to {kind} are written without dropout; '
                              f'leave it out')
        if WRITTEN_TASKS[kind].runs_code and not cfg.run_code:
            raise ConfigError(f'{kind} runs programs that the model wrote; read '
                              f'docs/running_code.md, then allow it with --run_code')
        if WRITTEN_TASKS[kind].runs_code and not cfg.show:
            require_sandbox(cfg.isolation)      # before anything is generated
        loaded = load_written(name, header=cfg.header, shots=cfg.shots, limit=cfg.limit,
                              seed=cfg.seed, revision=cfg.data_revision, on_bad_row=cfg.on_bad_row)
        return cls(kind, task_source(name), loaded.questions, loaded.total, loaded.bad,
                   loaded.shots)

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
        stop = self.rule.stop if reader.cfg.chat == 'none' else ()
        return write_answers(self, reader, writer, reader.cfg.n, self.max_tokens(reader.cfg), stop)

    def greedy(self, answer, tokenizer):
        """Return what a sample holds of the greedy generate.Answer."""
        return (confidence.written(answer) | confidence.per_token(answer)
                | confidence.span(answer, self.rule, tokenizer))

    def sample(self, question, greedy, answers, cfg):
        """Return the sample of a question, with its answers graded."""
        return confidence.answer_sample(question, self.rule.isolated(cfg.isolation), greedy,
                                        answers)

    def variants(self, cfg):
        return confidence.variants(cfg)

    def variant(self, name, scored, top_option):
        """Return the Task of the confidence `name` of CONFIDENCES in the written answers.

        scored: {(split, language, id): sample of the answers}; top_option is not used
        """
        kind, shots, ask = {
            'p_true': (PTrueConfidence,
                       written_answers.proposed_shots(self.shots[''], self.rule),
                       about_greedy(written_answers.proposed)),
            'p_true_samples': (PTrueConfidence, [], proposed_among),
            'p_ik': (ProbeConfidence, self.shots[''], unchanged),
            'verbalized_1s': (StatedConfidence, [], lambda question, sample:
                              written_answers.verbalized_1s(question)),
            'verbalized_2s': (StatedConfidence, [], about_greedy(written_answers.verbalized_2s)),
        }.get(name, (SampleConfidence, self.shots[''], unchanged))
        # all questions share the shots, also those that P(True) makes of them
        groups = '', *((q.language, q.subject) for q in self.items)
        return self.changed(kind, name, scored, ask, shots=dict.fromkeys(groups, shots),
                            parent=self, answers=scored)

    def describe(self, cfg, counts):
        return super().describe(cfg, counts) | written_settings(self, cfg)

    def distribution(self, cfg):
        """Return in words which probabilities are measured, for the header of a table."""
        return written_words(self, confidence.GREEDY.title, cfg)


def written_settings(task, cfg):
    """Return the settings in the result of a WrittenTask or a Confidence."""
    return {'chat': cfg.chat, 'shots': len(task.shots['']), 'n': cfg.n,
            'max_tokens': cfg.max_tokens}


def written_words(task, title, cfg):
    return f'{title}, {len(task.shots[""])} shots, {chat_words(cfg)}'


# ------------------------------------------------------------------------------------------------
# Confidences in the answers
# ------------------------------------------------------------------------------------------------

@dataclass
class Confidence(Task):
    """A confidence in answers that were written before; a question without it is left out."""
    parent: WrittenTask | None = None
    answers: dict = field(default_factory=dict)     # {(split, language, id): sample of the answers}
    optional = True

    @property
    def entry(self):
        """Return the row of the table of confidences."""
        return confidence.CONFIDENCES[self.label.partition('.')[2]]

    def describe(self, cfg, counts):
        return Task.describe(self, cfg, counts) | written_settings(self, cfg)

    def distribution(self, cfg):
        return written_words(self, self.entry.title, cfg)


class SampleConfidence(Confidence):
    """A confidence that is computed from the samples of the answers."""

    def collect(self, reader, writer):
        return judge_samples(self, writer)


class PTrueConfidence(Confidence, PTrueTask):
    """P(True) of the greedy answer; its prompts are scored as those of PTrueTask."""


class ProbeConfidence(Confidence):
    """P(IK) by a probe of the hidden state at the end of the question."""
    left_out = 'a probe needs three different questions'

    def collect(self, reader, writer):
        return probe_answers(self, reader, writer)


class StatedConfidence(Confidence):
    """A probability that the model states in words."""
    left_out = 'no answer states a probability from 0 to 1'

    def encode(self, question, tokenizer, cfg):
        max_tokens, _ = VERBALIZED[self.label.partition('.')[2]]
        return written_answers.encode(question, [], tokenizer, cfg, max_tokens)

    def collect(self, reader, writer):
        max_tokens, stop = VERBALIZED[self.label.partition('.')[2]]
        stop = stop if reader.cfg.chat == 'none' else ()
        return write_answers(self, reader, writer, 0, max_tokens, stop)

    def greedy(self, answer, tokenizer):
        return confidence.written(answer)

    def sample(self, question, greedy, answers, cfg):
        lead = question.lead if cfg.chat == 'none' else ''
        return confidence.verbalized_sample(question, self.parent.rule, greedy,
                                            *grading.stated_guess(greedy['text'], lead))


# Questions of a confidence: (WrittenQuestion, the sample of its answers) -> the question to ask

def unchanged(question, sample):
    return question


def about_greedy(ask):
    """Return a function that calls ask(question, text of the greedy answer, is it right?)."""
    return lambda question, sample: ask(question, sample['greedy']['text'],
                                        sample['greedy']['correct'])


def proposed_among(question, sample):
    """Show N_IDEAS answers, the judged one among them."""
    greedy, *ideas = (answer['answer'] or answer['text'].strip() or '(none)' for answer in
                      (sample['greedy'], *sample['answers'][:N_IDEAS - 1]))
    return written_answers.proposed_among(question, [greedy, *ideas], greedy,
                                          sample['greedy']['correct'])
