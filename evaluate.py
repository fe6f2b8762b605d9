"""How well does a model know what it knows? Scores options of questions, tokens and entities.

    python evaluate.py --model=out/run --tasks=mmlu,arc_easy,hellaswag --shots=5
    python evaluate.py --compare out/base out/sft out/ls01

Prompts that share a beginning share its tokens: a packed row holds [prefix | question | options |
question | options | ...] as a tree, and each token sees only its own ancestors. Log-probabilities
are float32 from the logits on. What is scored goes to samples.jsonl at once; an interrupted run
goes on from there. results.json, .md, .csv and the pictures are computed from it (results.py).
"""

import os
import signal

if __name__ == '__main__':      # Ctrl-C during the imports, which take seconds
    signal.signal(signal.SIGINT, lambda *_: (os.write(2, b'stopped\n'), os._exit(130)))

import copy
import hashlib
import json
import math
import platform
import queue
import re
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

import compare
import model as models
import resume
import results as reporting
from configs import ConfigError, load_config, read_assignments, require_range
from data import DataError, read_rows
from data.probes import INSTRUCTIONS, load_texts
from data.questions import TASKS, load_task
from data.tokenizer import load_tokenizer
from fused_ce import token_statistics


@dataclass
class EvalConfig:
    model: str = ''                           # a folder in Hugging Face layout, or a hub name
    revision: str | None = None               # the hub revision of the model
    # mmlu, global_mmlu, ..., clm, facts, each also as task:folder-or-file; or a file of questions
    tasks: tuple[str, ...] = ('mmlu',)
    data_revision: str | None = None          # the hub revision of the tasks' datasets
    languages: tuple[str, ...] = ('all',)     # of multilingual tasks
    preset: Literal['mmlu', 'harness'] = 'mmlu'     # prompts; harness: lm-evaluation-harness's
    header: Literal['english', 'native'] = 'english'
    shots: int = 5                            # solved questions before each question
    scoring: Literal['auto', 'letters', 'text'] = 'auto'     # auto: letters, or as the harness does
    norm: Literal['token', 'sum', 'char', 'byte'] = 'token'  # of an option's log-probability
    instruct: bool = False                    # clm and facts: with the paper's instruction
    limit: int | None = None                  # score only the first questions of each language
    add_bos: bool | None = None               # None: as the model was trained here, else one BOS
    max_length: int | None = None             # longest prompt in tokens; None: the model's context
    temperature: Literal['none', 'fit'] = 'none'    # fit: temperature and Platt scaling beside raw
    n_bootstrap: int = 1000                   # resamples for the intervals; 0: none
    reach: bool = False                       # also how sure and unsure the output matrix can be
    pictures: bool = True                     # the reliability diagrams
    pack_len: int | None = None               # tokens in a packed row; None: 16384 (CPU: 4096)
    batch_rows: int = 1                       # rows in a forward pass
    compile: bool = True                      # the decoder blocks, on a GPU in bfloat16
    deterministic: bool = False               # each question alone: the same bits in any company
    on_bad_row: Literal['stop', 'skip'] = 'stop'
    seed: int = 0                             # of clm's positions and of the bootstrap
    dtype: Literal['auto', 'float32', 'bfloat16'] = 'auto'  # auto: bfloat16 on a GPU
    device: str = 'auto'
    out_dir: str | None = None                # None: the model's folder; out/eval/ for a hub name
    overwrite: bool = False                   # forget samples made with other settings


# what samples depend on, and what must therefore not change in a folder; what clm asks for depends
# on the seed too, but a sample names what it was asked
SETTINGS = ('preset', 'header', 'shots', 'scoring', 'instruct', 'add_bos', 'max_length',
            'deterministic', 'dtype')


# ------------------------------------------------------------------------------------------------
# From questions to trees
# ------------------------------------------------------------------------------------------------

@dataclass
class Tree:
    """prefix + stem + leaves[k] is a prompt with option k; the option begins at token `start`.

    Without leaves the tokens at the places `wanted` of prefix + stem are predicted, each from those
    before it.
    """
    prefix: tuple[int, ...]     # shared with other trees: header and shots
    stem: list[int]             # shared by the options
    leaves: list[list[int]] = field(default_factory=list)
    start: int = 0
    wanted: list[int] = field(default_factory=list)
    shots: int = 0

    @property
    def size(self):
        return len(self.prefix) + len(self.stem) + sum(map(len, self.leaves))

    @property
    def n_tokens(self):
        """The number of scored tokens of each option."""
        before = len(self.prefix) + len(self.stem) - self.start
        return [before + len(leaf) for leaf in self.leaves]

    @property
    def n_scored(self):
        return len(self.wanted) + sum(self.n_tokens)

    @property
    def fingerprint(self):
        """Of all that is asked: a sample with another one is of another question."""
        digest = hashlib.blake2b(digest_size=6)
        for ids in (self.prefix, self.stem, *self.leaves, (self.start, *self.wanted)):
            digest.update(np.array([*ids, -1], dtype=np.int32).tobytes())
        return digest.hexdigest()


def tokenize_questions(questions, solved, tokenizer, cfg, max_length):
    """Yields (question, Tree or DataError), each with as many shots as fit; never a part of one.

    solved: shots by `Question.group`. Context and option are encoded jointly and cut where the
    context's own tokens end. The seam between shots and question is fixed: shots end in a blank
    line, where no tokenizer joins.
    """
    prefixes, encode = {}, OptionEncoder(tokenizer)

    def prefix(question, n):
        key = question.header, question.group, n
        if key not in prefixes:
            text = question.header + ''.join(s.solved for s in solved.get(question.group, [])[:n])
            bos = [] if cfg.add_bos is False else [tokenizer.bos_id]
            prefixes[key] = tuple(bos + tokenizer.encode(text)) if text else tuple(bos)
        return prefixes[key]

    def tree(question):
        for n in range(len(solved.get(question.group, [])), -1, -1):
            before = prefix(question, n)
            # with neither header nor shots the question begins the text
            context, prompts = encode(question, starts=not (n or question.header))
            longest = len(before) + max(map(len, prompts))
            if longest <= max_length:
                stem = os.path.commonprefix(prompts)
                return Tree(before, stem, [ids[len(stem):] for ids in prompts],
                            len(before) + len(context), shots=n)
        raise DataError(f'question {question.id} even without shots has a prompt of {longest} '
                        f'tokens; the model or max_length allows {max_length}')

    for i in range(0, len(questions), 64):
        some = questions[i:i + 64]
        encode.ahead([q.context for q in some if q.header or solved.get(q.group)])
        for question in some:
            try:
                yield question, tree(question)
            except DataError as error:
                yield question, error


class OptionEncoder:
    """Tokens of a question's context and of context + option, each encoded as a whole.

    No tokenizer joins a line break with what follows, so of `context + option` only the last line
    is encoded again for each option, if the context does end in the tokens of its last line.
    """

    def __init__(self, tokenizer):
        self.tokenizer, self.contexts, self.lines = tokenizer, {}, {}

    def ahead(self, contexts):
        """Encodes the contexts of questions to come, those that begin no text, in one batch."""
        self.contexts = dict(zip(contexts, self.tokenizer.encode_batch(contexts, start=False)))

    def __call__(self, question, starts):
        """(tokens of the context, [tokens of context + option]); starts: they begin the text."""
        context = None if starts else self.contexts.get(question.context)
        if context is None:
            context = self.tokenizer.encode(question.context, start=starts)
        head, newline, line = question.context.rpartition('\n')
        tail = self.line(line) if newline else []
        if tail and context[-len(tail):] == tail:
            prompts = [context[:-len(tail)] + self.line(line + o) for o in question.options]
        else:
            prompts = [self.tokenizer.encode(question.context + option, start=starts)
                       for option in question.options]
        for option, ids in zip(question.options, prompts, strict=True):
            if len(ids) <= len(context) or ids[:len(context)] != context:
                raise DataError(f'question {question.id}: option {option!r} does not begin at a '
                                f'token boundary after {question.context[-20:]!r}')
        return context, prompts

    def line(self, text):
        """Tokens of a text behind a line break; short ones, such as letters, come again."""
        if len(text) > 20:
            return self.tokenizer.encode(text, start=False)
        if text not in self.lines:
            self.lines[text] = self.tokenizer.encode(text, start=False)
        return self.lines[text]


def tokenize_texts(kind, texts, tokenizer, cfg, max_length):
    """Yields (Text, Tree or DataError): clm's random position, or the first token of each entity.

    A text is cut after `max_length` tokens. An entity whose text is encoded across its beginning is
    left out; the space before it counts as its own.
    """
    for text in texts:
        lead = f'{INSTRUCTIONS[kind]} ' if cfg.instruct else ''
        bos = [] if cfg.add_bos is False else [tokenizer.bos_id]
        ids = tokenizer.encode(lead + text.text)
        kept = (bos + ids)[:max_length]
        first = len(bos) + len(tokenizer.encode(lead.rstrip())) if lead else len(bos) + 1
        if kind == 'clm':
            if first >= len(kept):
                yield text, DataError(f'text {text.id}: {len(ids)} tokens leave nothing to predict')
                continue
            # by the text itself, so that its company does not matter
            digest = hashlib.blake2b(text.text.encode(), digest_size=8).digest()
            random = np.random.default_rng([cfg.seed, int.from_bytes(digest, 'little')])
            places = [int(random.integers(first, len(kept)))]
        else:
            places = set()
            for begin, _ in text.spans:
                before = lead + text.text[:begin]
                before = before[:-1] if before.endswith(' ') else before
                head = tokenizer.encode(before) if before else []
                place = len(bos) + len(head)
                if head and ids[:len(head)] == head and first <= place < len(kept):
                    places.add(place)
            if not places:
                yield text, DataError(f'text {text.id}: no entity begins at a token boundary with '
                                      f'text before it')
                continue
            places = sorted(places)
        yield text, Tree((), kept[:places[-1] + 1], wanted=places)


# ------------------------------------------------------------------------------------------------
# From trees to packed rows
# ------------------------------------------------------------------------------------------------

class Row:
    """A packed row under construction: what model.py takes, and `scored`: (tree, option or number,
    row index that predicts the token, token)."""

    def __init__(self):
        self.tokens, self.positions, self.ends, self.scored = [], [], [], []
        self.prefix = self.prefix_at = None

    def append(self, ids, position):
        """Appends tokens that end with themselves; returns their row indices."""
        begin = len(self.tokens)
        end = begin + len(ids)
        self.tokens += ids
        self.positions += range(position, position + len(ids))
        self.ends += [end] * len(ids)
        return range(begin, end)

    def end_here(self, at):
        self.ends[at.start:at.stop] = [len(self.tokens)] * len(at)

    def add(self, index, tree, options):
        """Appends the tree with those of its options; its prefix only if the row's last differs."""
        if self.prefix != tree.prefix:
            self.prefix, self.prefix_at = tree.prefix, self.append(tree.prefix, 0)
        before = len(tree.prefix)
        stem_at = self.append(tree.stem, before)
        trunk = [*self.prefix_at, *stem_at]
        leaves_at = [self.append(tree.leaves[k], len(trunk)) for k in options]
        self.end_here(self.prefix_at)
        self.end_here(stem_at)
        for k, leaf_at in zip(options, leaves_at, strict=True):
            path = [*trunk[tree.start - 1:], *leaf_at]
            self.scored += [(index, k, path[i - 1], self.tokens[path[i]])
                            for i in range(1, len(path))]
        self.scored += [(index, n, trunk[place - 1], self.tokens[trunk[place]])
                        for n, place in enumerate(tree.wanted)]

    def padded(self, length):
        """(int64 [3, length]: tokens, positions, ends; scored)"""
        used = len(self.tokens)
        arrays = np.zeros((3, length), dtype=np.int64)
        arrays[:, :used] = self.tokens, self.positions, self.ends
        arrays[2, used:] = np.arange(used + 1, length + 1)
        return arrays, self.scored


def pack_trees(trees, pack_len, alone=False):
    """Yields (arrays, scored) of packed rows from an iterable of (index, Tree), in order.

    A prefix is written once for trees that follow each other in a row. Options that do not fit
    beside the others go to another row with the stem again; a prompt longer than pack_len gets a
    row of a multiple of it. `alone`: each tree has a row whose length depends on nothing else.
    """
    row = Row()
    for index, tree in trees:
        if alone:
            row = Row()
            row.add(index, tree, range(len(tree.leaves)))
            yield row.padded(max(128, 1 << (len(row.tokens) - 1).bit_length()))
            continue
        stem, options = len(tree.stem), list(range(len(tree.leaves)))
        while True:
            prefix = 0 if row.prefix == tree.prefix else len(tree.prefix)
            room = pack_len - len(row.tokens) - prefix - stem
            if not row.tokens:      # an empty row takes one option, whatever its length
                room = max(room, len(tree.leaves[options[0]]) if options else 0)
            n, used = 0, 0
            while n < len(options) and used + len(tree.leaves[options[n]]) <= room:
                used += len(tree.leaves[options[n]])
                n += 1
            # a question is parted only where a whole row would not hold it
            fits = n == len(options) and room >= 0
            if row.tokens and not fits:
                yield row.padded(_multiple(len(row.tokens), pack_len))
                row = Row()
                continue
            row.add(index, tree, options[:n])
            options = options[n:]
            if not options:
                break
            yield row.padded(_multiple(len(row.tokens), pack_len))
            row = Row()
    if row.tokens and not alone:
        yield row.padded(_multiple(len(row.tokens), pack_len))


def _multiple(n, of):
    return -(-n // of) * of


def batches(rows, batch_rows, trim):
    """Yields (arrays [3, B, T], scored with flat indices) of rows of one length; `trim` cuts T."""
    batch = []
    for row in rows:
        if batch and (len(batch) == batch_rows or row[0].shape != batch[0][0].shape):
            yield _batch(batch, trim)
            batch = []
        batch.append(row)
    if batch:
        yield _batch(batch, trim)


def _batch(rows, trim):
    arrays = np.stack([arrays for arrays, _ in rows], 1)
    if trim:
        # padding ends behind itself and nothing else does so at position 0
        padding = (arrays[2] == np.arange(1, arrays.shape[2] + 1)) & (arrays[1] == 0)
        arrays = arrays[:, :, :max(1, int((~padding).any(0).nonzero()[0].max()) + 1)]
    T = arrays.shape[2]
    scored = [(tree, k, b * T + at, token)
              for b, (_, scored) in enumerate(rows) for tree, k, at, token in scored]
    return arrays, scored


def prefetch(items, depth=4):
    """The items of an iterable, made in a thread while the caller is busy with those before."""
    ready, done = queue.Queue(depth), threading.Event()

    def put(item):
        while not done.is_set():
            try:
                ready.put(item, timeout=0.1)
                return
            except queue.Full:
                pass

    def work():
        try:
            for item in items:
                put((item, None))
                if done.is_set():
                    return
            put((None, StopIteration()))
        except BaseException as error:
            put((None, error))

    threading.Thread(target=work, daemon=True).start()
    try:
        while True:
            item, error = ready.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield item
    finally:
        done.set()


# ------------------------------------------------------------------------------------------------
# Scoring
# ------------------------------------------------------------------------------------------------

class HostCopy:
    """A tensor's values on the host and the time when it was ready.

    Asking waits for the tensor alone, not for what the device was given after it.
    """

    def __init__(self, x):
        self.host, self.event, self.clock = x, None, time.perf_counter()
        if x.is_cuda:
            self.host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
            self.host.copy_(x, non_blocking=True)
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record()

    def values(self):
        """The values as a numpy array."""
        if self.event:
            self.event.synchronize()
        return self.host.numpy()

    def seconds_after(self, earlier):
        """Seconds from `earlier`'s being ready to this, by the device's clock where it has one."""
        if not self.event:
            return self.clock - earlier.clock
        self.event.synchronize()
        return earlier.event.elapsed_time(self.event) / 1000


def score(load, trees, pack_len=4096, batch_rows=1, deterministic=False, statistics=False,
          trim=True):
    """Yields (index, numbers, values) of trees, an iterable of (index, Tree), as they are done.

    load: gives the model, and is called when there is something to score. numbers int [M] tells
    which option, or which wanted place, each scored token belongs to; values float32 [M, 1] is its
    log-probability, or [M, 4] with `statistics`: log-probability, top token, the top token's
    log-probability, entropy in nats. `trim` cuts the padding off, where shapes may vary.
    """
    left = {}

    def counted():
        for index, tree in trees:
            left[index] = tree.n_scored, [], []
            yield index, tree

    def collect(launched):
        copy, scored = launched
        for (index, k, _, _), value in zip(scored, copy.values(), strict=True):
            n, numbers, values = left[index]
            numbers.append(k)
            values.append(value)
            if len(values) == n:
                del left[index]
                yield index, np.array(numbers), np.array(values)

    rows = pack_trees(counted(), pack_len, deterministic)
    model, launched, before = None, None, None
    try:
        for arrays, scored in prefetch(batches(rows, 1 if deterministic else batch_rows,
                                               trim and not deterministic)):
            if model is None:
                model = load()
                before = model.training
                model.eval()
            # the host reads a batch while the device is at work on the next
            last, launched = launched, _launch(model, arrays, scored, statistics)
            if last is not None:
                yield from collect(last)
        if launched is not None:
            yield from collect(launched)
    finally:
        if model is not None:
            model.train(before)


@torch.no_grad()
def _launch(model, arrays, scored, statistics):
    """(values [M, 1 or 4] as a HostCopy, scored)"""
    device, head, cap = model.head.device, model.head, model.config.final_logit_softcapping
    packed = torch.from_numpy(np.ascontiguousarray(arrays))
    if device.type == 'cuda':
        packed = packed.pin_memory()
    hidden = model(*packed.to(device, non_blocking=True)).flatten(0, 1)
    at, token = (torch.tensor([s[i] for s in scored]) for i in (2, 3))
    if statistics:
        found = token_statistics(hidden[at.to(device)], head, token, softcap=cap)
        values = torch.stack([-found.nll, found.top_token.float(), found.top_logit - found.lse,
                              found.entropy], 1)
    else:
        values = token_log_probs(hidden, head, at, token, cap)[:, None]
    return HostCopy(values), scored


@torch.no_grad()
def token_log_probs(hidden, head, at, tokens, softcap):
    """log p(tokens[i] | hidden[at[i]]) as float32 [M]. Each row in use meets the head once.

    hidden [N, D], head [V, D]; at [M], whose places may repeat, and tokens [M] are on the CPU.
    """
    used, place = at.unique(return_inverse=True)        # used[place] = at
    indices = torch.cat((at, tokens, place, used))
    if hidden.is_cuda:
        indices = indices.pin_memory().to(hidden.device, non_blocking=True)
    at, tokens, place, rows = indices.split([len(at)] * 3 + [len(used)])
    lse = token_statistics(hidden[rows], head, torch.zeros_like(used), softcap=softcap).lse
    logits = (hidden[at].float() * head[tokens].float()).sum(1)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return logits - lse[place]


def option_log_probs(model, trees, **options):
    """Summed log-probability of every option: list of float64 arrays [K], one a tree.

    options: as of `score`
    """
    sums = [np.zeros(len(tree.leaves)) for tree in trees]
    for index, numbers, values in score(lambda: model, enumerate(trees), **options):
        np.add.at(sums[index], numbers, values[:, 0].astype(np.float64))
    return sums


# ------------------------------------------------------------------------------------------------
# Tasks
# ------------------------------------------------------------------------------------------------

@dataclass
class Work:
    """What a task asks: questions with their shots, or texts."""
    kind: str                   # 'questions', 'clm' or 'facts'
    items: list                 # Question or Text
    bad: list[str]
    solved: dict = field(default_factory=dict)
    held: list = field(default_factory=list)        # validation questions
    source: str = ''            # the task as it was named, a local path in full

    @property
    def unit(self):
        return 'questions' if self.kind == 'questions' else 'texts'

    @property
    def fingerprint(self):
        """Hash of every question or text; the same for a copy of the files elsewhere."""
        digest = hashlib.blake2b(digest_size=8)
        for item in (*self.items, *self.held):
            content = {key: value for key, value in vars(item).items() if key != 'place'}
            digest.update(repr(content).encode('utf-8', 'surrogatepass'))
        return digest.hexdigest()


def load_tasks(cfg):
    """{label: Work} for every task of `cfg`; all of them, before any model work."""
    labels = [task_label(name) for name in cfg.tasks]
    for name, label in zip(cfg.tasks, labels, strict=True):
        if not label:
            raise ConfigError(f'tasks: {name!r} gives no name for its results; rename the file or '
                              f'folder')
        if labels.count(label) > 1:
            raise ConfigError(f'tasks = {cfg.tasks}: {labels.count(label)} of them would be called '
                              f'{label!r} in the results; rename a file, or evaluate one of them '
                              f'with another --out_dir')
    found = {}
    for label, name in zip(labels, cfg.tasks, strict=True):
        if label in INSTRUCTIONS and name.partition(':')[0] == label:
            texts, bad, _ = load_texts(name, limit=cfg.limit, seed=cfg.seed,
                                       revision=cfg.data_revision, on_bad_row=cfg.on_bad_row)
            found[label] = Work(label, texts, bad)
            continue
        options = dict(preset=cfg.preset, scoring=cfg.scoring, header=cfg.header,
                       languages=cfg.languages, revision=cfg.data_revision,
                       on_bad_row=cfg.on_bad_row)
        questions, solved, bad, _ = load_task(name, shots=cfg.shots, limit=cfg.limit,
                                              seed=cfg.seed, **options)
        found[label] = Work('questions', questions, bad, solved)
        if cfg.temperature == 'fit':
            found[label].held = load_task(name, split='validation', **options)[0]
    for label, work in found.items():
        if cfg.temperature == 'fit' and len(work.items) < 2 and not work.held:
            raise DataError(f'{label}: temperature = fit needs two {work.unit} or more')
    for name, work in zip(cfg.tasks, found.values(), strict=True):
        work.source = task_source(name)
    return found


def split_task(name):
    """('mmlu', 'some/folder') of 'mmlu:some/folder'; ('', 'some/file') of a path alone."""
    kind, _, place = name.partition(':')
    return (kind, place) if kind in TASKS or kind in INSTRUCTIONS else ('', name)


def task_source(name):
    kind, place = split_task(name)
    place = str(Path(place).resolve()) if place and Path(place).exists() else place
    return f'{kind}:{place}' if kind and place else kind or place


def task_label(name):
    """'mmlu:some/folder' -> 'mmlu', 'some/questions.jsonl' -> 'questions': for file names."""
    kind, place = split_task(name)
    return kind or Path(place).name.split('.')[0]


class Progress:
    """A progress bar on a terminal; elsewhere a line on standard error every `interval` seconds."""

    def __init__(self, label, total, unit, interval=30.0):
        self.label, self.total, self.unit, self.interval = label, total, unit, interval
        self.bar = tqdm(total=total, desc=label, unit=f' {unit}', mininterval=1, disable=None)
        self.count = self.scored = 0
        self.started = self.printed = time.monotonic()

    def update(self, scored=True):
        """One more is done; `scored` is False for one that needed no model."""
        self.count += 1
        self.scored += scored
        self.bar.update()
        now = time.monotonic()
        if self.bar.disable and now - self.printed > self.interval and self.scored:
            rate = self.scored / (now - self.started)
            left = tqdm.format_interval((self.total - self.count) / rate)
            print(f'{self.label}: {self.count} of {self.total} {self.unit}, {rate:.1f} per second, '
                  f'{left} left', file=sys.stderr, flush=True)
            self.printed = now


def score_task(load, folder, context, tokenizer, label, work, cfg, done, write):
    """Score what is not in `done` and hand each sample to `write`; return (wanted, bad rows).

    wanted: {(key, prompt)} of all that this task asks, scored now or before
    done:   the same of what is scored already
    """
    max_length = min(cfg.max_length or context, context)
    items, bad, wanted, asked = [*work.items, *work.held], list(work.bad), set(), {}
    progress = Progress(label, len(items), work.unit)

    def trees():
        if work.kind == 'questions':
            tokenised = tokenize_questions(items, work.solved, tokenizer, cfg, max_length)
        else:
            tokenised = tokenize_texts(work.kind, items, tokenizer, cfg, max_length)
        for index, (item, tree) in enumerate(tokenised):
            if isinstance(tree, DataError):
                if cfg.on_bad_row == 'stop':
                    raise DataError(f'{label}: {tree}; --on_bad_row=skip leaves it out')
                bad.append(str(tree))
                progress.update(scored=False)
                continue
            split = 'validation' if index >= len(work.items) else 'test'
            key, name = (label, split, item.language, item.id), tree.fingerprint
            wanted.add((key, name))
            if (key, name) in done:
                progress.update(scored=False)
                continue
            asked[index] = key, name, item, tree
            yield index, tree

    try:
        for index, numbers, values in score(
                load, trees(), cfg.pack_len, cfg.batch_rows, cfg.deterministic,
                statistics=work.kind != 'questions', trim=not cfg.device.startswith('cuda')):
            key, name, item, tree = asked.pop(index)
            common = dict(zip(('task', 'split', 'language', 'id'), key)) | {'prompt': name}
            make = question_sample if work.kind == 'questions' else text_samples
            if not np.isfinite(values).all():
                raise models.CheckpointError(bad_logits(f'{label}: {work.unit[:-1]} {item.id}',
                                                        folder))
            for sample in make(item, tree, numbers, values):
                write(common | sample)
            progress.update()
    finally:
        progress.bar.close()
    return wanted, bad


def bad_logits(place, folder):
    """The message for NaN or infinite logits: which tensor is damaged, if one is."""
    name = models.nonfinite_tensor(folder)
    reason = f'{name} in {folder} holds NaN or infinity: download or train the model again' if name \
        else f'the weights in {folder} are finite, so its activations overflow: try --dtype=float32'
    return f'{place}: the model gives NaN or infinite logits; {reason}'


# what every sample has, and what one of a question or of a text has beside it
COMMON_KEYS = 'task', 'split', 'language', 'id', 'prompt'
QUESTION_KEYS = (*COMMON_KEYS, 'subject', 'category', 'shots', 'answer', 'options', 'log_probs',
                 'n_tokens')
TEXT_KEYS = (*COMMON_KEYS, 'text', 'position', 'token', 'top_token', 'correct', 'confidence',
             'log_prob', 'entropy', 'of')


def question_sample(question, tree, numbers, values):
    sums = np.zeros(len(tree.leaves))
    np.add.at(sums, numbers, values[:, 0].astype(np.float64))
    return [{'subject': question.subject, 'category': question.category, 'shots': tree.shots,
             'answer': question.answer, 'options': question.options, 'log_probs': sums.tolist(),
             'n_tokens': tree.n_tokens}]


def text_samples(text, tree, numbers, values):
    path = [*tree.prefix, *tree.stem]
    order = np.argsort(numbers)
    return [{'id': f'{text.id}:{tree.wanted[n]}' if len(tree.wanted) > 1 else text.id,
             'text': text.id, 'position': tree.wanted[n], 'token': path[tree.wanted[n]],
             'top_token': int(top), 'correct': bool(int(top) == path[tree.wanted[n]]),
             'confidence': min(1.0, math.exp(top_log_prob)), 'log_prob': float(log_prob),
             'entropy': float(entropy), 'of': len(tree.wanted)}
            for n, (log_prob, top, top_log_prob, entropy) in zip(numbers[order], values[order])]


# ------------------------------------------------------------------------------------------------
# A run
# ------------------------------------------------------------------------------------------------

def evaluate(folder, tokenizer, tasks, cfg, out_dir, model=None):
    """Score `tasks`, as `load_tasks(cfg)` gives them, with the model in `folder`, or `model`.

    Resumes from `out_dir`/samples.jsonl. Writes that, eval_config.json, results.json, .md, .csv and
    the reliability diagrams into `out_dir`, beside the results of other tasks that were evaluated
    there with the same model and settings; returns the results dict. The caller holds the folder's
    lock. Raises ConfigError before it changes anything, also for a file that it did not write.
    """
    device = pick_device(cfg.device)
    cfg = replace(cfg, device=device, dtype=str(pick_dtype(cfg.dtype, device)).split('.')[-1],
                  pack_len=cfg.pack_len or (16384 if device.startswith('cuda') else 4096),
                  add_bos=trained_with_bos(folder) if cfg.add_bos is None else cfg.add_bos)
    out_dir = Path(out_dir)
    config = models.read_config(folder)
    identity = {'model': models.fingerprint(folder), 'tokenizer': tokenizer.fingerprint}
    loaded = [model] if model else []

    def load():
        if not loaded:
            loaded.append(models.load(folder, device, pick_dtype(cfg.dtype, device)))
            prepare(loaded[0], cfg)
        return loaded[0]

    if not model:
        models.check_weights(folder, config)    # before --overwrite deletes anything
    resume.claim(out_dir, *output_files(tasks, cfg))
    earlier, done = open_folder(out_dir, tasks, cfg, identity)
    announce(config, tasks, cfg, done)
    found, wanted = {}, {}
    with SampleFile(out_dir / 'samples.jsonl') as file:
        for label, work in tasks.items():
            started = time.perf_counter()
            wanted[label], bad = score_task(load, folder, config.max_position_embeddings,
                                            tokenizer, label, work, cfg, done, file.write)
            found[label] = describe(work, cfg) | {
                'scoring_seconds': round(time.perf_counter() - started, 2),
                'bad_rows': len(bad), 'first_bad': bad[0] if bad else None}
            if not wanted[label]:
                raise DataError(f'{label}: nothing is left to score ({len(bad)} bad rows'
                                f'{f", the first: {bad[0]}" if bad else ""})')
    reach = reachable_entropy(load(), tokenizer.n_vocab, seed=cfg.seed) if cfg.reach else None
    loaded.clear()      # its memory, before the metrics
    samples = samples_by_task(out_dir / 'samples.jsonl')
    for label, work in tasks.items():
        rows = [s for s in samples[label] if (sample_key(s), s['prompt']) in wanted[label]]
        found[label] = reporting.summarize(
            rows, cfg.norm, n_bootstrap=cfg.n_bootstrap, fit=cfg.temperature == 'fit',
            seed=cfg.seed) | found[label]
        if work.kind == 'questions':
            found[label]['fewer_shots'] = sum(s['shots'] < cfg.shots for s in rows)
        samples[label] = rows
    results = {'config': asdict(cfg) | {'model': str(cfg.model)}, 'preset': cfg.preset,
               'distribution': distribution('questions', cfg), 'seed': cfg.seed,
               'versions': versions(), 'identity': identity, 'reach': reach,
               'tasks': earlier | found}
    reporting.save(results, draw_panels(results['tasks'], samples, found) if cfg.pictures else {},
                   out_dir)
    return results


def describe(work, cfg):
    """What a task's result says of how it came about."""
    found = {'source': work.source, 'distribution': distribution(work.kind, cfg),
             'selected_languages': cfg.languages, 'limit': cfg.limit, 'seed': cfg.seed,
             'n_bootstrap': cfg.n_bootstrap, 'data_revision': cfg.data_revision}
    if work.kind == 'questions':
        found |= {'preset': cfg.preset, 'shots': cfg.shots, 'scoring': cfg.scoring}
    return found | {'norm': cfg.norm}


def distribution(kind, cfg):
    """How probabilities come about, for the head of a table."""
    if kind != 'questions':
        return 'top token, with an instruction' if cfg.instruct else 'top token'
    scoring = {'auto': 'letters' if cfg.preset == 'mmlu' else 'as the harness'}.get(cfg.scoring,
                                                                                  cfg.scoring)
    return f'{cfg.preset}, {cfg.shots} shots, {scoring}, {cfg.norm}'


def draw_panels(tasks, samples, found):
    """What reporting.save draws: {task: (Predictions, {language: Predictions})}.

    The diagrams by language are drawn of the tasks in `found` alone: the others are there. A task
    evaluated earlier is left out where its samples have become others than its results are of.
    """
    panels = {}
    for label, result in tasks.items():
        rows = [s for s in samples.get(label, []) if s['split'] == 'test']
        if len(rows) != result['pooled']['n']:
            print(f'reliability.png leaves out {label}: of its {result["pooled"]["n"]} questions '
                  f'samples.jsonl now holds {len(rows)}; evaluate {label} again to draw it')
            continue
        languages = reporting.split_languages(rows) if label in found else {}
        panels[label] = reporting.predictions(rows, result['norm']), {
            language: reporting.predictions(some, result['norm'])
            for language, some in sorted(languages.items()) if len(languages) > 1}
    return panels


def announce(config, tasks, cfg, done):
    """Print what is about to be scored, and on which device."""
    name = torch.cuda.get_device_name(cfg.device) if cfg.device.startswith('cuda') else ''
    print(f'{cfg.model} ({config.model_type}) in {cfg.dtype} on {cfg.device}'
          f'{f", {name}" if name else ""}')
    scored = {}
    for key, _ in done:
        scored[key[0]] = scored.get(key[0], 0) + 1
    for label, work in tasks.items():
        held = f' and {len(work.held)} for validation' if work.held else ''
        there = f'; {scored[label]} scored earlier in this folder' if label in scored else ''
        print(f'{label}: {len(work.items)} {work.unit}{held}, '
              f'{distribution(work.kind, cfg)}{there}', flush=True)


# ------------------------------------------------------------------------------------------------
# The folder of an evaluation
# ------------------------------------------------------------------------------------------------

OUTPUTS = 'samples.jsonl', 'eval_config.json', 'results.json', 'results.md', 'results.csv'
DIAGRAM, GRID = 'reliability.png', 'reliability-{}-languages.png'


def output_files(tasks, cfg):
    """Names of all files that evaluating `tasks` writes."""
    if not cfg.pictures:
        return OUTPUTS
    return *OUTPUTS, DIAGRAM, *(GRID.format(label) for label, work in tasks.items()
                                if len({item.language for item in work.items}) > 1)


def open_folder(out_dir, tasks, cfg, identity):
    """({task: result} of earlier evaluations in `out_dir`, {(key, prompt)} of the scored samples).

    What is there must be of the same model and settings, or ConfigError is raised; `overwrite`
    deletes it, if an evaluation wrote it. Drops a last line that a crash has cut off.
    """
    if cfg.overwrite:
        for name in resume.written_files(out_dir):
            if name in (*OUTPUTS, DIAGRAM) or fnmatch(name, GRID.format('*')):
                (out_dir / name).unlink(missing_ok=True)
    samples, results = out_dir / 'samples.jsonl', out_dir / 'results.json'
    settings = identity | {key: getattr(cfg, key) for key in SETTINGS}
    sources = {label: {'source': work.source, 'questions': work.fingerprint}
               for label, work in tasks.items()}
    begun = results.exists() or samples.exists() and samples.stat().st_size
    known = read_settings(out_dir, settings) if begun else {}
    for label, now in sources.items():
        before = known.get(label, now)
        if now['source'] != before['source'] and now['questions'] != before['questions']:
            raise ConfigError(f'{out_dir} holds {label} of {before["source"]}, and {now["source"]} '
                              f'has other questions; rename the file, give another --out_dir, or '
                              f'--overwrite all that was evaluated there')
    earlier, done = read_results(results), scored_prompts(samples)
    reporting.write_text(out_dir / 'eval_config.json',
                         json.dumps(settings | {'tasks': known | sources}, indent=1) + '\n')
    return earlier, done


def read_settings(out_dir, settings):
    """{task: its source} of what was evaluated in `out_dir`; ConfigError for other `settings`."""
    path = out_dir / 'eval_config.json'
    remedy = 'give another --out_dir, or --overwrite what was evaluated there'
    try:
        old = json.loads(path.read_text(encoding='utf-8'))
        known = old.pop('tasks')
        for task in known.values():
            task['source'], task['questions']
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f'{path} cannot be read ({error!r}), so with which model and settings '
                          f'the samples beside it were made is not known; {remedy}') from None
    if old != settings:
        key = next(k for k in [*settings, *old] if settings.get(k) != old.get(k))
        raise ConfigError(f'{out_dir} holds samples with another {key}: {old.get(key)!r}, now '
                          f'{settings.get(key)!r}; {remedy}')
    return known


def read_results(path):
    """{task: result} of a results.json, {} if there is none; raises ConfigError."""
    if not path.exists():
        return {}
    try:
        tasks = json.loads(path.read_text(encoding='utf-8'))['tasks']
        for result in tasks.values():
            result['norm'], result['distribution'], result['pooled']['n']
            for _, _, report in reporting.report_rows(result):
                report.update({k: math.nan for k, v in report.items() if v is None})
        return tasks
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f'{path} is not what evaluate.py wrote ({error!r}); remove it and '
                          f'evaluate its tasks again: with samples.jsonl beside it that needs no '
                          f'model') from None


def sample_key(sample):
    """The question or text that a sample belongs to."""
    return (sample['task'], sample['split'], sample['language'],
            sample.get('text', sample['id']))


def scored_prompts(path):
    """{(key, prompt)} of what is scored in samples.jsonl; raises DataError for a damaged line.

    Drops a last line that a crash has cut off.
    """
    if not path.exists():
        return set()
    with open(path, 'rb+') as file:
        content = file.read()
        if content and not content.endswith(b'\n'):
            file.truncate(content.rfind(b'\n') + 1)
    found, last = {}, {}
    for place, sample in read_rows(path):
        try:
            if isinstance(sample, DataError):
                raise sample
            missing = [key for key in (QUESTION_KEYS if 'options' in sample else TEXT_KEYS)
                       if key not in sample]
            if missing:
                raise DataError(f'{place}: no {missing[0]!r}')
            last[sample_key(sample)] = sample['prompt']
            asked = sample_key(sample), sample['prompt'], sample.get('of', 1)
            found.setdefault(asked, set()).add(sample['id'])
        except (DataError, TypeError, AttributeError) as error:
            message = str(error) if isinstance(error, DataError) else f'{place}: {error!r}'
            raise DataError(f'{message}: not a sample that evaluate.py wrote; delete this line, '
                            f'and its question is scored again') from None
    # facts: a text is done when all its entities are
    return {(key, prompt) for (key, prompt, of), ids in found.items()
            if len(ids) == of and last[key] == prompt}


def samples_by_task(path):
    """{task: samples}: of each question or text what was asked last, and each sample once."""
    found, last = {}, {}
    for sample in reporting.read_samples(path):
        key = sample_key(sample)
        last[key] = sample['prompt']
        found.setdefault(sample['task'], {})[key, sample['prompt'], sample['id']] = sample
    return {task: [sample for (key, prompt, _), sample in of_task.items() if last[key] == prompt]
            for task, of_task in found.items()}


class SampleFile:
    """samples.jsonl, opened to append; a kill costs a second's work. Raises ConfigError."""

    def __init__(self, path):
        self.path, self.lines, self.flushed = path, [], time.monotonic()
        self.file = open(path, 'ab', buffering=0)   # what cannot be written is not tried again

    def __enter__(self):
        return self

    def __exit__(self, *error):
        try:
            self.flush()
        finally:
            self.file.close()

    def write(self, sample):
        self.lines.append(json.dumps(sample, ensure_ascii=False) + '\n')
        if time.monotonic() - self.flushed > 1:
            self.flush()

    def flush(self):
        left, self.lines = ''.join(self.lines).encode(), []
        try:
            while left:
                left = left[self.file.write(left):]
        except OSError as error:
            raise ConfigError(f'{self.path} cannot be written: {error.strerror}; what is in it is '
                              f'kept, and the same command resumes from there') from error
        self.flushed = time.monotonic()


def reachable_entropy(model, n_pieces, *, n_tokens=64, steps=300, rate=0.1, seed=0):
    """The least and the most entropy a next-token distribution of `model` can have, in bits.

    The final norm gives every hidden state the same length before its weights, so that the output
    matrix and the soft-cap bound how sure and how unsure any of them can be. Both ends are sought
    by Adam over what enters the norm: `lowest` is the mean over n_tokens of the first n_pieces
    rows, drawn at random, each made as probable as it can be; `highest` the best of as many random
    starts. Float32. Both are what was found, not proven bounds.
    {'unused_rows', 'lowest_bits', 'lowest_nll_bits': of those tokens themselves, 'highest_bits',
    'log2_vocab'}
    """
    head, cap = model.head.detach().float(), model.config.final_logit_softcapping
    norm = copy.deepcopy(model.model.norm).float()
    random = torch.Generator().manual_seed(seed)
    wanted = torch.randperm(n_pieces, generator=random)[:n_tokens].to(head.device)
    norm.requires_grad_(False)

    def log_probs(x):
        logits = norm(x) @ head.T
        return F.log_softmax(logits if cap is None else cap * torch.tanh(logits / cap), dim=-1)

    def entropy(of):
        return -(of.exp() * of).sum(1) / math.log(2)

    def descend(start, loss):
        x = start.clone().requires_grad_()
        optimizer = torch.optim.Adam([x], lr=rate)
        for step in range(steps):
            for group in optimizer.param_groups:
                group['lr'] = rate * (1 - step / steps)
            optimizer.zero_grad()
            loss(log_probs(x)).sum().backward()
            optimizer.step()
        with torch.no_grad():
            return log_probs(x)

    def own(of):
        return -of.gather(1, wanted[:, None])[:, 0]

    centred = head[wanted] - head.mean(0)
    sure = descend(centred / centred.norm(dim=1, keepdim=True) * head.shape[1] ** 0.5, own)
    start = torch.randn(n_tokens, head.shape[1], generator=random).to(head.device)
    unsure = descend(start, lambda of: -entropy(of))
    return {'unused_rows': len(head) - n_pieces, 'lowest_bits': entropy(sure).mean().item(),
            'lowest_nll_bits': own(sure).mean().item() / math.log(2),
            'highest_bits': entropy(unsure).max().item(), 'log2_vocab': math.log2(len(head))}


def prepare(model, cfg):
    """Compiles the blocks where that pays: on a GPU, in bfloat16, with rows of one length."""
    if cfg.compile and not cfg.deterministic and model.head.is_cuda and cfg.dtype == 'bfloat16':
        models.compile_blocks(model)


def versions():
    """Of what computed the numbers, and the commit where this is a checkout of git."""
    done = subprocess.run(['git', 'describe', '--always', '--dirty'], capture_output=True,
                          cwd=Path(__file__).parent, text=True)
    commit = done.stdout.strip() if done.returncode == 0 else None
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    return {'nanocal': commit, 'python': platform.python_version(), 'torch': torch.__version__,
            'numpy': np.__version__, 'device': device}


def pick_device(device):
    """`device`, for 'auto' what this machine has.

    A GPU named by its number is made the current one: kernels and events go there.
    """
    if device == 'auto':
        return 'cuda' if torch.cuda.is_available() else 'cpu'
    if not re.fullmatch(r'cpu|cuda(:\d+)?', device):
        raise ConfigError(f"device = {device!r}; wanted 'auto', 'cpu', 'cuda' or 'cuda:0'")
    if device.startswith('cuda') and not torch.cuda.is_available():
        raise ConfigError(f'device = {device!r}, but this machine has no CUDA device')
    if ':' in device:
        number, there = int(device.partition(':')[2]), torch.cuda.device_count()
        if number >= there:
            raise ConfigError(f'device = {device!r}, but this machine has CUDA devices '
                              f'0 to {there - 1}')
        torch.cuda.set_device(number)
    return device


def pick_dtype(dtype, device):
    if dtype == 'auto':
        return torch.bfloat16 if device.startswith('cuda') else torch.float32
    return getattr(torch, dtype)


def load_model_tokenizer(folder, config=None):
    """The tokenizer of a model folder, checked against the size of the model's vocabulary."""
    vocab_size = (config or models.read_config(folder)).vocab_size
    tokenizer = load_tokenizer(folder)
    if tokenizer.n_vocab > vocab_size:
        raise ConfigError(f'{folder}: the tokenizer has {tokenizer.n_vocab} pieces, the model '
                          f'{vocab_size}')
    return tokenizer


def trained_with_bos(folder):
    """What add_bos was when the model in `folder` was trained here; True for any other model."""
    path = Path(folder) / 'train_config.py'
    return read_assignments(path).get('add_bos', (True, ''))[0] if path.exists() else True


def check(cfg):
    require_range(cfg, 0, math.inf, 'shots', 'n_bootstrap', 'seed')
    require_range(cfg, 1, math.inf, 'limit', 'batch_rows', 'max_length')
    require_range(cfg, 16, math.inf, 'pack_len')
    if not cfg.tasks:
        raise ConfigError('which tasks? --tasks=mmlu,arc_easy or --tasks=my_questions.jsonl')
    if not cfg.languages:
        raise ConfigError('which languages? --languages=all or --languages=en,de')


def main(argv):
    if argv[:1] == ['--compare']:
        compare.main(argv[1:])
        return
    if not argv:
        raise SystemExit(USAGE)
    if '-h' in argv or '--help' in argv:
        print(USAGE)
    cfg = load_config(EvalConfig, argv)
    check(cfg)
    cfg = replace(cfg, model=os.path.expanduser(cfg.model), tasks=tuple(map(expand, cfg.tasks)))
    if not cfg.model:
        raise ConfigError('which model? --model=out/run or --model=google/gemma-2-2b')
    pick_device(cfg.device)
    folder = models.fetch(cfg.model, cfg.revision)
    tokenizer = load_model_tokenizer(folder)
    tasks = load_tasks(cfg)  # whatever is wrong with them is said before the model is loaded
    local = Path(cfg.model).is_dir()
    out_dir = Path(cfg.out_dir).expanduser() if cfg.out_dir else (
        folder if local else Path('out/eval') / cfg.model.replace('/', '--'))
    with lock_output(out_dir):
        results = evaluate(folder, tokenizer, tasks, cfg, out_dir)
    for name in tasks:
        print(f'\n{reporting.task_text(name, results["tasks"][name])}')
    if results['reach']:
        print('\nentropy in reach of the output matrix: {lowest_bits:.3f} to {highest_bits:.3f} of '
              '{log2_vocab:.3f} bits'.format(**results['reach']))
    print(f'\nwrote samples.jsonl, results.json, results.md and results.csv to {out_dir}')


def expand(name):
    """A task with `~` in its place written out."""
    kind, place = split_task(name)
    return f'{kind}:{os.path.expanduser(place)}' if kind and place else os.path.expanduser(name)


def lock_output(out_dir):
    """resume.lock, with a message for a folder that cannot be written."""
    try:
        return resume.lock(out_dir)
    except OSError as error:
        raise ConfigError(f'{out_dir} cannot be written ({error.strerror}); give another '
                          f'--out_dir') from error


USAGE = """\
usage: python evaluate.py --model=FOLDER_OR_HUB_NAME --tasks=TASK[,TASK] [--key=value ...]
       python evaluate.py --compare FOLDER FOLDER [...]     runs that were evaluated, side by side

example: python evaluate.py --model=out/run --tasks=mmlu,arc_easy,my_questions.jsonl --shots=5

The tasks are """ + ', '.join([*TASKS, *INSTRUCTIONS]) + """,
each also as task:folder-or-file, and files of questions. --help lists the keys.
"""


if __name__ == '__main__':
    stopped = 'stopped; what is scored is kept, and the same command resumes from there'
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        main(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:     # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except (ConfigError, DataError, models.CheckpointError, resume.TrainingError,
            OSError) as error:
        sys.exit(f'error: {error}')
    except torch.OutOfMemoryError:
        sys.exit('error: out of GPU memory; lower --batch_rows or --pack_len')
    except KeyboardInterrupt:
        print(stopped, file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
