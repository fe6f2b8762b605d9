"""The tasks of an evaluation: load the questions or texts of each, and make token trees of them."""

import hashlib
import itertools
import os
import textwrap
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

from data.probes import INSTRUCTIONS, PATTERNS, WIKITEXT, load_texts, tokenize_texts
from data import written_answers
from data.benchmarks import BENCHMARKS, GENERIC
from data.written_answers import WRITTEN_TASKS, load_written
from data.p_ik import MEASURE, load_p_ik
from data.questions import Question, load_task, require_task
from data.trees import tokenize_questions
from runtime.errors import ConfigError, DataError
from runtime.sandbox import require_sandbox


HELP = """\
A task is read from its dataset on the hub, or from a folder as task:folder. In both, the first
pattern with a match is used. task:file reads one file, with --shots=0. The files of `test` are
scored. The files of `shots` are read unless --shots=0. The files of `validation`, if there are any,
are read for --fit_temperature.
"""

TASKS = *BENCHMARKS, *WRITTEN_TASKS, 'p_ik', *INSTRUCTIONS
BLOCKS = 8      # of questions per process; each block repeats the shots once


@dataclass
class Task:
    """A loaded task: questions with their shots, or texts."""
    kind: str                   # 'questions', 'permuted', 'p_true', 'clm' or 'facts'; 'free' for
    #                             written answers, and for confidences in them 'from_samples',
    #                             'p_ik', 'verbalized_1s', 'verbalized_2s' or 'p_true'
    source: str                 # see `task_source`
    items: list                 # of Question or Text
    total: int                  # number of items without `limit`
    bad_rows: list[str]
    shots: dict = field(default_factory=dict)       # {Question.group: solved questions}
    validation: list = field(default_factory=list)  # questions to fit a temperature on
    written: list = field(default_factory=list)     # samples of answers, to grade or judge
    measure: str = ''           # of written answers: what the confidence is, in words

    @property
    def unit(self):
        return 'texts' if self.kind in INSTRUCTIONS else 'questions'

    @property
    def fingerprint(self):
        """Return a hash of all questions or texts, the same for a copy of the files elsewhere.

        It does not depend on the prompt: Question.digest hashes the question and its choices.
        """
        digest = hashlib.blake2b(digest_size=8)
        left_out = 'place', 'orders', 'published', 'context', 'options', 'header', 'ending'
        for item in (*self.items, *self.validation):
            content = {key: value for key, value in vars(item).items() if key not in left_out}
            digest.update(repr(content).encode())
        return digest.hexdigest()

    @property
    def keys(self):
        """Return {(split, language, id)} of all questions or texts, as in their samples."""
        return {(split, item.language, item.id) for split, items in (
            ('test', self.items), ('validation', self.validation)) for item in items}

    def count_scored(self, label, done):
        """Return how many of `keys` have a sample of the task `label` in {(sample_key, prompt)}."""
        return len(self.keys & {key[1:] for key, _ in done if key[0] == label})

    @property
    def counts(self):
        """Return the numbers for `describe`, a Counter; the Counters of all shares add up."""
        return Counter(items=len(self.items), total=self.total, duplicate_options=sum(
            getattr(item, 'duplicate_options', 0) for item in self.items))

    def share(self, rank, n):
        """Return the Task of process `rank` of n: BLOCKS blocks of each language's questions.

        The blocks have about the same number of characters. They go to processes 0 .. n - 1, then
        n - 1 .. 0, and so on, since tokens per character differ between subjects. The questions of
        a block are consecutive, because they share their shots.
        """
        if n == 1:
            return self

        def assigned(items):
            for i, (_, group) in enumerate(itertools.groupby(items, lambda item: item.language)):
                group = [*group]
                ends = [*itertools.accumulate(map(n_characters, group))]
                for item, end in zip(group, ends):
                    middle = end - n_characters(item) / 2
                    turn, i_block = divmod(int(n * BLOCKS * middle / ends[-1]), n)
                    if ((n - 1 - i_block if turn % 2 else i_block) + i) % n == rank:
                        yield item

        items, first = [*assigned(self.items)], rank == 0
        return replace(self, items=items, validation=[*assigned(self.validation)],
                       bad_rows=self.bad_rows if first else [],
                       total=len(items) + (self.total - len(self.items)) * first)

    def tokenize(self, tokenizer, cfg):
        """Yield (item, Tree or DataError) of all items, then of the validation questions."""
        items = [*self.items, *self.validation]
        options = {'add_bos': cfg.add_bos, 'max_length': cfg.max_length}
        if self.kind not in INSTRUCTIONS:
            return tokenize_questions(items, self.shots, tokenizer, chat=cfg.chat, **options)
        return tokenize_texts(self.kind, items, tokenizer, instruct=cfg.instruct, seed=cfg.seed,
                              **options)

    def permuted(self, published):
        """Return the Task of the same questions with their options in the other orders.

        published: {(split, language, id): sample in the published order} of the scored questions
        """
        return self._variant('permuted', self.shots, published, lambda question, result:
                             replace(question, published=result))

    def proposing(self, top):
        """Return the P(True) Task: is the model's top option of each question right?

        top: {(split, language, id): index of the top option} of the scored questions. In each four
        shots, the first and last propose the correct option, the middle two the option after it.
        """
        shots = {group: [q.proposing((q.answer + (i % 4 in (1, 2))) % len(q.options))
                         for i, q in enumerate(solved)] for group, solved in self.shots.items()}
        return self._variant('p_true', shots, top, Question.proposing)

    def judging(self, name, measure, scored, n_ideas=5):
        """Return the Task of another confidence in the written answers; name: as in CONFIDENCES.

        scored: {(split, language, id): sample of the answers}. P(True) with samples shows n_ideas
        of them, the judged answer among them, and no shots.
        """
        def among(q, sample):
            greedy, *ideas = (answer['answer'] or answer['text'].strip() or '(none)' for answer in
                              (sample['greedy'], *sample['answers'][:n_ideas - 1]))
            return written_answers.proposed_among(q, [greedy, *ideas], greedy,
                                               sample['greedy']['correct'])

        rule = WRITTEN_TASKS[task_label(self.source)]
        kind, shots, ask = {
            'p_true': ('p_true', written_answers.proposed_shots(self.shots[''], rule),
                       lambda q, sample: written_answers.proposed(q, sample['greedy']['text'],
                                                               sample['greedy']['correct'])),
            'p_true_samples': ('p_true', [], among),
            'p_ik': (name, self.shots[''], lambda q, sample: q),
            'verbalized_1s': (name, [], lambda q, sample: written_answers.verbalized_1s(q)),
            'verbalized_2s': (name, [], lambda q, sample: written_answers.verbalized_2s(
                q, sample['greedy']['text'], sample['greedy']['correct'])),
        }.get(name, ('from_samples', self.shots[''], lambda q, sample: q))
        task = self._variant(kind, {'': shots}, scored, ask)
        return replace(task, measure=measure, written=[*scored.values()])

    def _variant(self, kind, shots, results, ask):
        """Return the Task with the questions ask(question, its result) of {key: result}."""
        def questions(items, split):
            return [ask(q, results[key]) for q in items
                    if (key := (split, q.language, q.id)) in results]

        items = questions(self.items, 'test')
        return replace(self, kind=kind, items=items, shots=shots, bad_rows=[],
                       total=self.total - len(self.items) + len(items),
                       validation=questions(self.validation, 'validation'))


def n_characters(item):
    """Return the length of a question with its options, or of a text; 1 or more."""
    options = getattr(item, 'options', ())
    return 1 + len(item.context if options else item.text) + sum(map(len, options))


def _refuse_split_paths(tasks):
    """Raise ConfigError if two consecutive `tasks` are the parts of a path with a comma."""
    for name, following in zip(tasks, tasks[1:]):
        whole = f'{name},{following}'
        if not Path(name).exists() and Path(whole.partition(':')[2] or whole).exists():
            raise ConfigError(f'tasks: a comma separates tasks, so {whole!r} was read as two; '
                              f'write --tasks="({whole!r},)"')


def load_tasks(cfg):
    """Return {label: Task} for every task of the EvalConfig `cfg`.

    Raises ConfigError or DataError for a bad task before anything is tokenized.
    """
    _refuse_split_paths(cfg.tasks)
    labels = [task_label(name) for name in cfg.tasks]
    for name, label in zip(cfg.tasks, labels):
        kind, path = _split(name)
        require_task(kind or path, TASKS)
        if not label:
            raise ConfigError(f'tasks: {name!r} gives no name for its results; rename the file or '
                              f'folder')
        if labels.count(label) > 1:
            raise ConfigError(f'tasks = {cfg.tasks}: {labels.count(label)} of them would be called '
                              f'{label!r} in the results; rename a file, or evaluate one of them '
                              f'with another --out_dir')
    tasks = {label: _load(name, cfg) for label, name in zip(labels, cfg.tasks)}
    for key, kinds in (('permute', ('questions',)), ('p_true', ('questions', 'free')),
                       ('p_ik', ('free',)), ('verbalized', ('free',))):
        if getattr(cfg, key) and all(task.kind not in kinds for task in tasks.values()):
            missing = 'written answers' if kinds == ('free',) else 'options'
            raise ConfigError(f'{key} = {getattr(cfg, key)}: tasks = {cfg.tasks} have no '
                              f'{missing}; leave it out')
    for label, task in tasks.items():
        if cfg.fit_temperature and len(task.items) < 2 and not task.validation:
            raise DataError(f'{label}: fit_temperature needs two {task.unit} or more')
    return tasks


def _load(name, cfg):
    kind, source = _split(name)[0], task_source(name)
    common = {'seed': cfg.seed, 'revision': cfg.data_revision, 'on_bad_row': cfg.on_bad_row}
    if kind in INSTRUCTIONS:
        if cfg.chat != 'none':
            raise ConfigError(f'chat = {cfg.chat}: {kind} scores tokens of texts, not answers; '
                              f'evaluate it without --chat into another --out_dir')
        if cfg.languages != ('all',):
            raise ConfigError(f'languages = {cfg.languages}: {kind} scores all texts of its files; '
                              f'evaluate it without --languages')
        loaded = load_texts(name, limit=cfg.limit, **common)
        return Task(kind, source, loaded.texts, loaded.total, loaded.bad)
    if kind in WRITTEN_TASKS:
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
        loaded = load_written(name, header=cfg.header, shots=cfg.shots, limit=cfg.limit, **common)
        return Task('free', source, loaded.questions, loaded.total, loaded.bad, loaded.shots,
                    measure='probability of the greedy answer')
    if kind == 'p_ik':
        del common['revision']
        loaded = load_p_ik(name, shots=cfg.shots, limit=cfg.limit, **common)
        return Task('p_true', source, loaded.questions, loaded.total, loaded.bad, {'': []},
                    measure=MEASURE)
    common |= {key: getattr(cfg, key)
               for key in ('prompt_format', 'scoring', 'header', 'languages', 'permute')}
    loaded = load_task(name, shots=cfg.shots, limit=cfg.limit, **common)
    task = Task('questions', source, loaded.questions, loaded.total, loaded.bad, loaded.shots)
    if cfg.fit_temperature:
        task.validation = load_task(name, split='validation', **common).questions
    return task


def show_tasks(tasks, tokenizer, cfg):
    """Return the text of --show: the first cfg.show prompts of each Task as the model reads them.

    It has the whole prompt, the options or scored tokens, and the tokens with '|' between them.
    Without a tokenizer it has the prompt with all shots, and no tokens.
    """
    if cfg.permute:
        tasks = tasks | {f'{label}.permuted': task.permuted(
            {('test', q.language, q.id): {} for q in task.items})
            for label, task in tasks.items() if task.kind == 'questions'}
    return '\n'.join(f'{label}: {min(cfg.show, len(task.items))} of {len(task.items):,} '
                     f'{task.unit}\n{_show(task, tokenizer, cfg)}\n'
                     for label, task in tasks.items())


def _show(task, tokenizer, cfg):
    task, lines = replace(task, items=task.items[:cfg.show], validation=[]), []
    if tokenizer is None:
        return '\n'.join(_show_text(item, task.shots) for item in task.items)
    for item, tree in task.tokenize(tokenizer, cfg):
        if isinstance(tree, DataError):
            lines.append(f'--- {tree}')
            continue
        ids, contexts = [*tree.prefix, *tree.prompt], {}
        for prompt, start in zip(tree.sequences, tree.starts):
            contexts.setdefault(tuple(prompt[:start]), []).append(prompt[start:])
        for i in tree.scored:
            contexts[tuple(ids[:i])] = [ids[i:i + 1]]
        n_shots = len(task.shots.get(getattr(item, 'group', None), ()))
        if tree.shots < n_shots:
            lines.append(f'fewer shots: {tree.shots} of {n_shots}; the prompt would be too long')
        for context, options in contexts.items():
            lines += _show_prompt(item, tokenizer.decode(context), [
                tokenizer.decode(option, start=False) for option in options])
            tokens = '|'.join(tokenizer.decode([i], start=False) for i in [*context, *options[0]])
            lines += ['--- its tokens, with the first option',
                      tokens.replace('\n', '\\n').replace('\\n|', '\\n|\n')]
    return '\n'.join(lines)


def _show_text(item, shots):
    """Return the prompt of a Question, or the text of a Text, without tokens."""
    if not hasattr(item, 'options'):
        return f'--- {item.place}\n{item.text}'
    before = item.header + ''.join(shot.solved for shot in shots.get(item.group, []))
    return '\n'.join(line for part in item.parts
                     for line in _show_prompt(item, before + part.context, part.options))


def _show_prompt(item, context, options):
    return [f'--- {item.place}', context, '--- options' if len(options) > 1 else '--- scored',
            *map(repr, options)]


def describe(task, cfg, counts):
    """Return the part of a task's result that says how it was scored; counts: of the whole Task."""
    facts = {'source': task.source, 'distribution': distribution(task, cfg), 'norm': cfg.norm,
             'selected_languages': cfg.languages, 'limit': cfg.limit, 'seed': cfg.seed,
             'n_bootstrap': cfg.n_bootstrap, 'data_revision': cfg.data_revision}
    if task.kind == 'permuted':
        facts['permute'] = cfg.permute
    if cfg.dropout_seed is not None:
        facts['dropout_seed'] = cfg.dropout_seed
    if counts['items'] < counts['total']:
        facts['sample'] = {'questions': counts['items'], 'of': counts['total']}
    if task.measure:
        facts |= {'chat': cfg.chat, 'shots': len(task.shots[''])}
        if task_label(task.source) in WRITTEN_TASKS:
            facts |= {'n': cfg.n, 'max_tokens': cfg.max_tokens}
    elif task.kind not in INSTRUCTIONS:
        facts |= {key: getattr(cfg, key) for key in ('prompt_format', 'shots', 'scoring', 'chat')}
        facts['duplicate_options'] = counts['duplicate_options']
    return facts


LENGTHS = {'token': 'log-probabilities per token', 'sum': 'summed log-probabilities',
           'char': 'log-probabilities per character', 'byte': 'log-probabilities per byte'}


def distribution(task, cfg):
    """Return in words which probabilities are measured, for the header of a table."""
    dropout = '' if cfg.dropout_seed is None else f', dropout with seed {cfg.dropout_seed}'
    if task.kind in INSTRUCTIONS:
        return 'top token' + ', with an instruction' * cfg.instruct + dropout
    default = 'letters' if cfg.prompt_format == 'mmlu' else f'the rule of {cfg.prompt_format}'
    scored = default if cfg.scoring == 'auto' else cfg.scoring
    p_true = 'P(True) of the top option, ' if task.kind == 'p_true' else ''
    orders = f', mean over {cfg.permute} orders of the options' if task.kind == 'permuted' else ''
    form = 'plain text' if cfg.chat == 'none' else f'chat template {cfg.chat}'
    if task.measure:
        return f'{task.measure}, {len(task.shots[""])} shots, {form}'
    return (f'{p_true}{cfg.prompt_format}, {cfg.shots} shots, options scored by {scored}, '
            f'{LENGTHS[cfg.norm]}, {form}{orders}{dropout}')


def describe_tasks():
    """Return the text of --tasks=help: the hub dataset and the file names of each task."""
    lines = [HELP]

    def add(label, text):
        lines.extend(textwrap.wrap(text, 100, initial_indent=f'    {label:<12}',
                                   subsequent_indent=' ' * 16, break_on_hyphens=False))

    for name, benchmark in (BENCHMARKS | {'a file or folder of your own': GENERIC}).items():
        lines.append(f'{name}  {benchmark.hub}'.rstrip())
        for split in ('test', 'shots', 'validation'):
            add(split, ', '.join(getattr(benchmark, split)))
        add('{lang}', ' '.join(benchmark.languages))
    for name, free in WRITTEN_TASKS.items():
        lines.append(f'{name}  {free.hub}'.rstrip())
        for split in ('test', 'shots'):
            add(split, ', '.join(getattr(free, split)))
    lines.append('p_ik')
    add('test', 'samples.jsonl of an evaluation of written answers')
    for name, hub in (('clm', WIKITEXT), ('facts', '')):
        lines.append(f'{name}  {hub}'.rstrip())
        add('test', ', '.join(PATTERNS[name]))
    return '\n'.join(lines)


def _split(name):
    """Return ('mmlu', 'some/folder') for 'mmlu:some/folder', ('', 'some/file') for a path."""
    kind, _, path = name.partition(':')
    return (kind, path) if kind in TASKS else ('', name)


def task_label(name):
    """Return a task's name in results: 'mmlu' for 'mmlu:folder', 'q' for 'a/q.jsonl'."""
    kind, path = _split(name)
    return kind or Path(path).name.split('.')[0]


def task_source(name):
    """Return a task's `source` in results: its name in --tasks, with the full path of a file."""
    kind, path = _split(name)
    if path and os.path.exists(os.path.expanduser(path)):
        path = os.path.realpath(os.path.expanduser(path))
    return f'{kind}:{path}' if kind and path else kind or path
