"""Kinds of tasks: questions with options; all others are in the rooms of runtime/rooms.py."""

import hashlib
import itertools
import os
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from data.benchmarks import BENCHMARKS
from data.questions import load_task, require_task
from data.trees import tokenize_questions
from runtime import rooms
from runtime.errors import ConfigError, DataError

TASKS = *BENCHMARKS, *rooms.TASKS
# {setting: name of the variant}
VARIANTS = {'permute': 'permuted', 'p_true': 'p_true', 'contextual': 'contextual'}
# the settings that ask for results besides those of a task itself
MORE_RESULTS = *VARIANTS, 'p_ik', 'verbalized'
OPTIONS = "options other than a judge's"
BLOCKS = 8          # at most, of questions of a language per process; each repeats the shots once
BLOCK_LENGTH = 8    # questions, at least, where a process has several blocks


# ---- The names of --tasks ------------------------------------------------------------------------

def split_name(name):
    """Return ('mmlu', 'some/folder') for 'mmlu:some/folder', ('', 'some/file') for a path."""
    kind, _, path = name.partition(':')
    return (kind, path) if kind in TASKS else ('', name)


def task_label(name):
    """Return a task's name in results: 'mmlu' for 'mmlu:folder', 'q' for 'a/q.jsonl'."""
    kind, path = split_name(name)
    return kind or Path(path).name.split('.')[0]


def task_source(name):
    """Return a task's `source` in results: its name in --tasks, with the full path of a file."""
    kind, path = split_name(name)
    if path and os.path.exists(os.path.expanduser(path)):
        path = os.path.realpath(os.path.expanduser(path))
    return f'{kind}:{path}' if kind and path else kind or path


def check_names(names):
    """Raise ConfigError or DataError for names of --tasks that are no tasks, or clash."""
    labels = [task_label(name) for name in names]
    for name, label in zip(names, labels):
        kind, path = split_name(name)
        require_task(kind or path, TASKS)
        if not label or labels.count(label) > 1:
            raise ConfigError(f'tasks = {names}: {name!r} would be called {label!r} in the '
                              f'results; rename it, or evaluate it with another --out_dir')


def with_shots(cfg):
    """Return `cfg` with a number of shots: 0 for files, which have no solved questions beside."""
    files = (os.path.isfile(os.path.expanduser(split_name(name)[1])) for name in cfg.tasks)
    return cfg if cfg.shots is not None else replace(cfg, shots=0 if all(files) else 5)


def kind_of(name):
    """Return the class of a task of --tasks."""
    kind = split_name(name)[0]
    return rooms.load(kind).TASK if kind in rooms.TASKS else OptionTask


def check_settings(tasks, cfg):
    """Raise ConfigError for a setting that asks for something that no task has."""
    for key in MORE_RESULTS:
        if getattr(cfg, key) and not any(key in task.settings for task in tasks):
            missing = OPTIONS if key in OptionTask.settings else 'written answers'
            raise ConfigError(f'{key} = {getattr(cfg, key)}: tasks = {cfg.tasks} have no '
                              f'{missing}; leave it out')
    if cfg.group_by and not all('permute' in task.settings for task in tasks):
        raise ConfigError(f'group_by = {cfg.group_by!r} needs tasks with {OPTIONS}; leave it out')


# ---- What all kinds share ------------------------------------------------------------------------

@dataclass
class Task:
    """A loaded task. The class variables say how its kind differs; see the methods for the rest."""
    label: str              # its name in results, see `task_label`
    source: str             # see `task_source`
    items: list             # this and the next fields are those of questions.Loaded
    shots: dict
    bad_rows: list[str]
    total: int

    unit: ClassVar = 'questions'
    settings: ClassVar = ()         # keys of EvalConfig that ask for variants of the task
    described: ClassVar = ()        # keys of EvalConfig that a result repeats
    is_written: ClassVar = False    # the model writes the answers
    all_metrics: ClassVar = False   # its tables show metrics that no other table does
    continues: ClassVar = False     # needs a model that continues a text, so no T5
    statistics: ClassVar = False    # samples need the top token and the entropy of each token
    identity: ClassVar = ()         # fields of an item that its `fingerprint` covers
    optional: ClassVar = False      # its questions are left out where they cannot be asked
    left_out: ClassVar = ''         # of an optional task: why there may be no questions at all
    others: ClassVar = 'for validation'     # what items of other splits are, when announced

    @property
    def tested(self):
        """Return the items of the split 'test', of which the task's numbers are."""
        return [item for item in self.items if item.split == 'test']

    @classmethod
    def load(cls, name, cfg):
        """Return the task `name` of --tasks; raises as `read` of its kind."""
        return cls(task_label(name), task_source(name), *cls.read(name, cfg))

    @property
    def fingerprint(self):
        """Return a hash of all questions or texts, whatever their prompts and their files."""
        digest = hashlib.blake2b(digest_size=8)
        for item in self.items:
            digest.update(repr({key: getattr(item, key) for key in self.identity}).encode())
        return digest.hexdigest()

    def sample_key(self, item):
        """Return the key of the samples of an item."""
        return self.label, item.split, item.language, item.id

    def count_scored(self, done):
        """Return how many items have a sample in {(sample_key, prompt)}."""
        return len({*map(self.sample_key, self.items)} & {key for key, _ in done})

    def counts(self, prompts):
        """Return the numbers for `describe`, which add up over shares; prompts: of `collect`."""
        scored = {key for key, _ in prompts}
        return Counter(items=len(self.tested), total=self.total, duplicate_options=sum(
            self.sample_key(item) in scored for item in self.tested
            if getattr(item, 'duplicate_options', False)))

    def share(self, rank, n):
        """Return the Task of process `rank` of n: blocks of questions are dealt out in turn, each
        of a language, which shares its shots, and about as many characters as any other.
        """
        if n == 1:
            return self
        blocks = []
        for _, group in itertools.groupby(self.items, lambda item: (item.split, item.language)):
            group = [*group]
            n_blocks = n * min(BLOCKS, max(1, len(group) // (n * BLOCK_LENGTH)))
            sizes = np.array([1 + len(getattr(item, 'text', '') or item.context)
                              for item in group])
            ends = np.cumsum(sizes)
            numbers = (n_blocks * (ends - sizes / 2) / ends[-1]).astype(int)
            starts = [0, *np.flatnonzero(np.diff(numbers)) + 1, len(group)]
            blocks += [group[a:b] for a, b in itertools.pairwise(starts)]
        items = [item for block in blocks[rank::n] for item in block]
        share = replace(self, items=items, bad_rows=self.bad_rows * (rank == 0))
        # the first process has what is counted once
        share.total = len(share.tested) + (self.total - len(self.tested)) * (rank == 0)
        return share

    def check(self, tokenizer, cfg):
        """Raise DataError for a prompt that the chat template refuses."""

    def collect(self, scorer, writer):
        """Score the items without a sample, by a Scorer, and append their samples to a
        SampleWriter; return ({(sample_key, prompt)} of all items, bad rows).
        """
        unscored, prompts = {}, set()
        bad_rows = [*self.bad_rows]

        def trees():
            for index, (item, tree) in enumerate(self.tokenize(scorer.tokenizer, scorer.cfg)):
                if isinstance(tree, DataError):
                    bad_rows.append(self.bad_row(tree, scorer.cfg))
                    continue
                key, prompt = self.sample_key(item), self.prompt_hash(item, tree)
                prompts.add((key, prompt))
                if (key, prompt) not in writer.done:
                    unscored[index] = key, prompt, item, tree
                    yield index, tree

        n_left = len(self.items) - self.count_scored(writer.done)
        for index, numbers, values in scorer.score(self, trees(), n_left):
            key, prompt, item, tree = unscored.pop(index)
            scorer.require_finite(values, f'{self.label}: {item.place}')
            for sample in self.samples(scorer.tokenizer, item, tree, numbers, values):
                writer.append(key, prompt, sample)
        return prompts, bad_rows

    def prompt_hash(self, item, tree):
        """Return a hash of all that decides the samples of an item."""
        answer = f'-{item.answer}' if hasattr(item, 'answer') else ''
        return tree.fingerprint + answer    # one that was corrected is scored again

    def bad_row(self, error, cfg):
        """Return the message of an item that cannot be asked; raise it if that is to stop."""
        if cfg.on_bad_row == 'stop' and not self.optional:
            raise DataError(f'{self.label}: {error}; --on_bad_row=skip leaves it out') from error
        return str(error)

    def variants(self, cfg):
        """Return the names of the results that `cfg` asks for besides the task's own."""
        return [VARIANTS[key] for key in self.settings if getattr(cfg, key)]

    def changed(self, kind, name, scored, ask, shots, **fields):
        """Return the variant `name` of this task, of the class `kind` with these `fields`: the
        questions ask(question, sample) of `scored`, {(split, language, id): sample}.
        """
        items = [ask(item, scored[key]) for item in self.items
                 if (key := self.sample_key(item)[1:]) in scored]
        task = kind(f'{self.label}.{name}', self.source, items, shots, [], self.total, **fields)
        task.total += len(task.tested) - len(self.tested)
        return task

    def describe(self, cfg, counts):
        """Return the part of a result that says how it was scored; counts: of the whole Task."""
        facts = {'source': self.source, 'distribution': self.distribution(cfg), 'norm': cfg.norm,
                 'selected_languages': cfg.languages, 'limit': cfg.limit, 'seed': cfg.seed,
                 'n_bootstrap': cfg.n_bootstrap, 'data_revision': cfg.data_revision}
        if cfg.dropout_seed is not None:
            facts['dropout_seed'] = cfg.dropout_seed
        if counts['items'] < counts['total']:
            facts['sample'] = {'questions': counts['items'], 'of': counts['total']}
        return facts | {key: getattr(cfg, key) for key in self.described}


def sample_fields(question, n_shots):
    """Return the part of a sample that says which question it is of."""
    return ({'group': question.by} if question.by else {}) | {
            'question': question.digest, 'subject': question.subject,
            'category': question.category, 'shots': n_shots,
            'context': question.context + (question.ending and f'_{question.ending}')}


def dropout_words(cfg):
    return '' if cfg.dropout_seed is None else f', dropout with seed {cfg.dropout_seed}'


def chat_words(cfg):
    turns = ', shots as turns' * cfg.multiturn
    return 'plain text' if cfg.chat == 'none' else f'chat template {cfg.chat}{turns}'


# ---- Questions with options ----------------------------------------------------------------------

LENGTHS = {'token': 'log-probabilities per token', 'sum': 'summed log-probabilities',
           'char': 'log-probabilities per character', 'byte': 'log-probabilities per byte'}


class OptionTask(Task):
    """Questions whose options are scored; a sample has the log-probability of each option."""
    settings = 'permute', 'p_true', 'contextual'
    described = 'prompt_format', 'shots', 'scoring', 'chat'
    identity = ('id', 'answer', 'subject', 'category', 'language', 'duplicate_options', 'digest',
                'by')

    read = staticmethod(load_task)

    def tokenize(self, tokenizer, cfg):
        """Yield (question, Tree or DataError) of each of `items`."""
        return tokenize_questions(
            self.items, self.shots, tokenizer, add_bos=cfg.add_bos, max_length=cfg.max_length,
            chat=cfg.chat, multiturn=cfg.multiturn, header_as_system=cfg.prompt_format == 'harness')

    def as_text(self, question):
        """Return (context, options) pairs of a question as plain text, with all shots."""
        shots = ''.join(shot.solved for shot in self.shots.get(question.group, []))
        return [(question.header + shots + part.context, part.options) for part in question.parts]

    def samples(self, tokenizer, question, tree, numbers, values):
        return [sample_fields(question, tree.shots)
                | self.sample(question, tree.sums(numbers, values), tree.n_tokens)]

    @staticmethod
    def sample(question, log_probs, n_tokens):
        """Return what was scored; log_probs, n_tokens: of the options of all `parts`."""
        blank = {'choices': question.options} if question.ending else {}
        return blank | {'answer': question.answer,
                        'options': [question.ending or option for option in question.options],
                        'log_probs': log_probs.tolist(), 'n_tokens': n_tokens}

    def variant(self, name, scored, top_option):
        """Return the Task of the variant `name` of the questions in `scored`, {(split, language,
        id): sample}; top_option: sample -> index of the option that the model prefers.
        """
        return rooms.load(name).variant(self, name, scored, top_option)

    def describe(self, cfg, counts):
        return super().describe(cfg, counts) | {'duplicate_options': counts['duplicate_options']}

    def distribution(self, cfg, orders=''):
        default = 'letters' if cfg.prompt_format == 'mmlu' else f'the rule of {cfg.prompt_format}'
        scored = default if cfg.scoring == 'auto' else cfg.scoring
        return (f'{cfg.prompt_format}, {cfg.shots} shots, options scored by {scored}, '
                f'{LENGTHS[cfg.norm]}, {chat_words(cfg)}{orders}{dropout_words(cfg)}')
