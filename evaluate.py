"""Evaluate a model's calibration: score answer options and next tokens, then compute metrics.

    python evaluate.py --model=out/run --tasks=mmlu,arc_easy,hellaswag --shots=5
    python evaluate.py --compare out/base out/sft out/ls01
    torchrun --nproc_per_node=8 evaluate.py --model=out/run --tasks=mmlu

Questions are packed into rows as trees, so that prompts share the tokens of a common prefix. The
host prepares rows ahead of the device; logits and log-probabilities are float32. Each sample is
appended to samples.jsonl as soon as it is scored, and an interrupted evaluation resumes from that
file. Each of several processes scores its share of the questions; the first one computes metrics.

From file to ECE: data/tasks.py loads questions (data/questions.py, with the row function in
data/benchmarks.py and the prompt in data/prompts.py), data/trees.py tokenizes them, data/packing.py
makes rows, `score` calls model.py and fused_ce.py, `question_samples` makes the samples, and
results/evaluation.py measures them (results/report.py, metrics.py). Tasks without options have
their prompts in data/written_answers.py and their match rules in data/grading.py:
written/answers.py lets generate.py write the answers and grades them, results/confidence.py
computes the confidences.
"""

from runtime import cli, startup

if __name__ == '__main__':
    startup.begin()

import functools
import itertools
import math
import os
import sys
import textwrap
import time
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np

from data import written_answers
from data.chat import question_frame
from data.written_answers import VERBALIZED
from data.packing import pack_alone, pack_trees, prompt_trees, stack_answers, stack_rows
from data.probes import INSTRUCTIONS
from data.tasks import TASKS, describe, describe_tasks, distribution, load_tasks, show_tasks
from data.tokenizer import begins_with_bos, load_model_tokenizer
from results import confidence, report, samples
from runtime.config import load_config, require_given
from runtime.errors import CheckpointError, ConfigError, DataError, escape_controls
from runtime.eval_config import EvalConfig, check_eval_config

USAGE = f"""\
usage: python evaluate.py --model=FOLDER_OR_HUB_NAME --tasks=TASK[,TASK] [--key=value ...]
       python evaluate.py --compare FOLDER FOLDER [...]     compare runs that were evaluated here or
                                                            with lm_eval --log_samples

example: python evaluate.py --model=out/run --tasks=mmlu,arc_easy,my_questions.jsonl --shots=5

The tasks are
{textwrap.fill(', '.join(TASKS), 100)},
each also as task:folder-or-file. A file of questions is a task, too. --tasks=help lists the files
of each task, --help the keys."""


def read_arguments(argv):
    """Return the EvalConfig of a command line; do what needs no model (--help) and exit."""
    if not argv:
        raise SystemExit(USAGE)
    if argv[0] == '--compare':
        from results import compare
        raise SystemExit(compare.main(argv[1:]))
    cfg = load_config(EvalConfig, argv, USAGE)
    check_eval_config(cfg)
    if cfg.tasks == ('help',):
        print(describe_tasks())
        raise SystemExit
    return cfg


if __name__ == '__main__':
    with cli.one_line_errors():     # none of this needs torch, whose import takes seconds
        startup.load_libraries(read_arguments(sys.argv[1:]).device)

import torch

import fused_ce
import generate
from families import t5
from results.evaluation import write_evaluation
from runtime import adapter, checkpoint, device, log, ownership, parallel
from runtime.code import code_digest
from runtime.load_ahead import load_ahead, load_model, loads_kernels
from runtime.trained import base_of_adapter, trained_template, trained_with_bos
from written.answers import judge_samples, write_answers
from written.p_ik import probe_answers

# Samples depend on these keys, so they must not change within a folder. The tokens of clm depend on
# the seed too, but each sample has a hash of its prompt.
SETTINGS = ('prompt_format', 'header', 'shots', 'scoring', 'chat', 'instruct', 'add_bos',
            'max_length', 'deterministic', 'dtype')
SHOWN_TOKENS = 100      # before a scored token of a text, in its sample
# the batch of a process that shares the weights and has no batch of its own left
IDLE = np.stack([np.zeros(128, int), np.zeros(128, int), np.arange(128) + 1])[:, None], [(0,) * 4]


# ------------------------------------------------------------------------------------------------
# Trees to log-probabilities
# ------------------------------------------------------------------------------------------------

def token_log_probs(hidden, head, at, tokens, softcap):
    """Return log p(tokens[i] | hidden[at[i]]), float32 [M, 1].

    hidden [N, D] and head [V, D] on one device; at [M], whose values may repeat, and tokens [M] on
    the CPU, so that the host does not wait for the device.
    """
    at, tokens = device.to_device(torch.stack((at, tokens)), head.device)
    label = torch.zeros(len(hidden), dtype=int)     # any label: lse does not depend on it
    lse = fused_ce.token_statistics(hidden, head, label, softcap=softcap).lse
    logits = torch.cat([(hidden[i].float() * head[k].float()).sum(1)
                        for i, k in zip(at.split(4096), tokens.split(4096), strict=True)])
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return (logits - lse[at])[:, None]


def token_statistics(hidden, head, at, tokens, softcap):
    """Return float32 [M, 4]: the log-probability of each token, the top token of the distribution
    that predicts it, the log-probability of that, and the entropy in nats.

    Arguments: `token_log_probs`.
    """
    s = fused_ce.token_statistics(hidden[device.to_device(at, head.device)], head, tokens,
                                  softcap=softcap)
    return torch.stack([-s.nll, s.top_token.float(), s.top_logit - s.lse, s.entropy], 1)


def token_states(hidden, head, at, tokens, softcap):
    """Return the hidden state that predicts each token, float32 [M, D]."""
    return hidden[device.to_device(at, head.device)].float()


def score(load, trees, pack_len=4096, batch_rows=1, deterministic=False, compute=token_log_probs,
          trim=1, dropout_seed=None, seq2seq=None, sharded=False):
    """Yield (index, numbers, values) for each of `trees`, (index, Tree) pairs, as they are done.

    load:          returns the model; called once there is something to score
    deterministic: each tree in a row and a batch of its own
    compute:       what to compute per token: one of the three functions `token_...`
    trim:          drop trailing tokens that no score needs and round the length up to a multiple
                   of `trim`; 0: keep all
    dropout_seed:  score with the dropout of adapters, drawn by this seed; None: without
    seq2seq:       the configuration of a T5, whose encoder reads the prompts; None: a CausalLM
    sharded:       processes share the weights, so all must call this and take the same steps
    numbers:       int [M], for each scored token its option, or its index in Tree.scored
    values:        float32 [M, C], as `compute` returns them
    """
    unfinished = {}

    def counted():
        for index, tree in trees:
            unfinished[index] = tree.n_scored, [], []
            yield index, tree

    if seq2seq:
        batches = stack_answers(counted(), seq2seq.decoder_start_token_id, seq2seq.eos_token_id,
                                pack_len, deterministic)
    else:
        rows = pack_alone(counted()) if deterministic else pack_trees(counted(), pack_len)
        batches = stack_rows(rows, 1 if deterministic else batch_rows, 0 if deterministic else trim)
    # products of the few rows that are read can be rounded in another way where processes share the
    # weights, so deterministic scores need those of all rows
    forward = functools.partial(forward_values, compute=compute, every_token=deterministic)
    for copy, scored in launch(load, batches, forward, dropout_seed, sharded):
        for (index, number, _, _), value in zip(scored, copy.values(), strict=True):
            n, numbers, values = unfinished[index]
            numbers.append(number)
            values.append(value)
            if len(values) == n:
                del unfinished[index]
                yield index, np.array(numbers), np.array(values)


def launch(load, batches, forward, dropout_seed, sharded):
    """Yield (HostCopy of the values, scored) of each batch of `stack_rows`.

    A thread makes batches ahead of the device, so the generators behind `batches`, which tokenize,
    run in that thread. A batch is yielded once the next one has been launched: the device always
    has work.
    """
    with ThreadPoolExecutor(1) as pool:
        ahead = deque(pool.submit(next, batches, None) for _ in range(4))

        def upcoming():
            batch = ahead.popleft().result()
            ahead.append(pool.submit(next, batches, None))
            return parallel.in_step(batch, IDLE) if sharded else batch

        try:
            if not (batch := upcoming()):
                return
            launched = deque()
            with adapter.evaluation_mode(load(), dropout=dropout_seed is not None) as model:
                while batch:
                    arrays, scored = batch
                    if dropout_seed is not None:
                        adapter.seed_dropout(dropout_seed, arrays)
                    with torch.no_grad():
                        values = forward(model, arrays, scored)
                    if batch is not IDLE:
                        launched.append((device.HostCopy(values), scored))
                    if len(launched) == 2:
                        yield launched.popleft()
                    batch = upcoming()
                yield from launched
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def forward_values(model, arrays, scored, compute=token_log_probs, every_token=False):
    """Return `compute` of each of `scored`, [M, C], on the model's device.

    every_token: compute the last MLP for every token, not only where a prediction is read
    """
    inputs = [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
    at, tokens = (torch.tensor([entry[i] for entry in scored]) for i in (2, 3))
    rows, at = at.unique(return_inverse=True)   # a row may predict several tokens
    *inputs, rows = (device.to_device(x, model.head.device) for x in (*inputs, rows))
    hidden = model(*inputs).flatten(0, 1)[rows] if every_token else model(*inputs, at=rows)[0]
    return compute(hidden, model.head, at, tokens, model.softcap)


def option_log_probs(model, trees, **options):
    """Return the summed log-probability of every option: a float64 array [K] per tree.

    options: the other arguments of `score`
    """
    sums = {index: np.bincount(numbers, values[:, 0], len(trees[index].continuations))
            for index, numbers, values in score(lambda: model, enumerate(trees), **options)}
    return [sums[index] for index in range(len(trees))]


def row_lengths(cfg):
    """Return (tokens in a packed row, `trim` of `score`) that are fastest for `cfg`.

    Longer rows repeat the shots less often. Triton compiles the kernels again for a length that is
    not a multiple of 16, and FlexAttention for each new length.
    """
    if loads_kernels(cfg):
        return 32768, 128
    return (16384, 0) if cfg.device.startswith('cuda') else (4096, 1)


def t5_config(folder):
    """Return the configuration of the T5 in `folder`; None for another model."""
    config = checkpoint.read_config(folder, seq2seq=True)
    return config if config.model_type in t5.ARCHITECTURES else None


def prompt_states(load, prompts, cfg):
    """Return the hidden state at the end of each of `prompts`, lists of tokens, float32 [N, D]."""
    states = {index: values[0] for index, _, values in score(
        load, enumerate(prompt_trees(prompts)), cfg.pack_len, cfg.batch_rows, cfg.deterministic,
        token_states, row_lengths(cfg)[1])}
    return np.stack([states[i] for i in range(len(prompts))])


# ------------------------------------------------------------------------------------------------
# Samples
# ------------------------------------------------------------------------------------------------

def score_task(load, folder, tokenizer, label, task, cfg, done, append):
    """Score the items of `task` not in `done`, append each sample; return (prompts, bad rows).

    prompts: {(sample_key, prompt)} of every item of the task, scored now or earlier
    done:    the same, of the samples in samples.jsonl
    append:  (sample_key, prompt, sample) -> None writes a sample, unless it is in `done`
    """
    tokenized = []
    n_left = len(task.keys) - task.count_scored(label, done)
    progress = log.Progress(label, n_left, task.unit)
    collect_text = functools.partial(text_samples, tokenizer)
    compute = token_statistics if task.kind in INSTRUCTIONS else token_log_probs
    to_samples = {'questions': question_samples, 'permuted': permuted_samples,
                  'p_true': p_true_samples}.get(task.kind, collect_text)
    try:
        for index, numbers, values in score(
                load, unscored(task, label, tokenizer, cfg, done, tokenized), cfg.pack_len,
                cfg.batch_rows, cfg.deterministic, compute,
                row_lengths(cfg)[1], cfg.dropout_seed, t5_config(folder), cfg.shard):
            key, prompt, item, tree = tokenized[index]
            tokenized[index] = key, prompt, None, None      # free the tree
            if not np.isfinite(values).all():
                raise CheckpointError(checkpoint.bad_logits(f'{label}: {item.place}', folder,
                                                            cfg.dtype))
            for sample in to_samples(item, tree, numbers, values):
                append(key, prompt, sample)
            progress.update()
    finally:
        progress.bar.close()
    bad_rows = [*task.bad_rows, *(str(entry) for entry in tokenized
                                  if isinstance(entry, DataError))]
    return {entry[:2] for entry in tokenized if not isinstance(entry, DataError)}, bad_rows


def unscored(task, label, tokenizer, cfg, done, tokenized):
    """Tokenize the items of `task`; yield (index, Tree) of each that is not in `done`.

    Append every item to the list `tokenized`, at its index: (sample_key, prompt, item, tree), or
    the DataError that says why it cannot be scored. `launch` runs this in its thread.
    """
    for index, (item, tree) in enumerate(task.tokenize(tokenizer, cfg)):
        if isinstance(tree, DataError):
            if cfg.on_bad_row == 'stop':
                raise DataError(f'{label}: {tree}; --on_bad_row=skip leaves it out')
            tokenized.append(tree)
            continue
        split = 'validation' if index >= len(task.items) else 'test'
        key, prompt = (label, split, item.language, item.id), tree.fingerprint
        if task.kind not in INSTRUCTIONS:
            prompt += f'-{item.answer}'     # a question whose answer was corrected is scored again
        tokenized.append((key, prompt, item, tree))
        if (key, prompt) not in done:
            yield index, tree


def question_samples(question, tree, numbers, values):
    """Return the one sample of a question: the summed log-probability of each option."""
    log_probs = np.bincount(numbers, values[:, 0], len(tree.continuations))    # in float64
    blank = {'choices': question.options} if question.ending else {}
    return [samples.question_fields(question, tree.shots) | blank | {
        'answer': question.answer,
        'options': [question.ending or option for option in question.options],
        'log_probs': log_probs.tolist(), 'n_tokens': tree.n_tokens}]


def permuted_samples(question, tree, numbers, values):
    """Return the one sample of a question in several orders: their mean, and each of them."""
    n = len(question.options)
    log_probs = np.bincount(numbers, values[:, 0], len(tree.continuations)).reshape(-1, n)
    n_tokens = np.reshape(tree.n_tokens, (-1, n))
    orders = [{'order': [*range(n)], 'log_probs': question.published['log_probs'],
               'n_tokens': question.published['n_tokens']}]
    orders += [{'order': order, 'log_probs': log_probs[k].tolist(),
                'n_tokens': n_tokens[k].tolist()} for k, order in enumerate(question.orders)]
    return [samples.question_fields(question, tree.shots) | {
        'answer': question.answer, 'options': question.options,
        'log_probs': samples.mean_over_orders(orders), 'n_tokens': [1] * n, 'orders': orders}]


def p_true_samples(question, tree, numbers, values):
    """Return the one sample of P(True), the probability of (A), True, among the two options."""
    true, false = np.bincount(numbers, values[:, 0], 2)
    log_probs = -np.logaddexp(0, [false - true, true - false])
    return [samples.question_fields(question, tree.shots) | {
        'correct': question.answer == 0, 'confidence': float(np.exp(log_probs[0])),
        'log_prob': float(log_probs[question.answer]),
        'entropy': float(-(np.exp(log_probs) * log_probs).sum())}]


def text_samples(tokenizer, text, tree, numbers, values):
    """Return a sample for each scored token of a text: whether the top token is the next one."""
    ids, token_samples = [*tree.prefix, *tree.prompt], []
    for n in np.argsort(numbers):
        at, (log_prob, top, top_log_prob, entropy) = tree.scored[numbers[n]], values[n]
        token_samples.append({
            'id': f'{text.id}:{at}' if len(tree.scored) > 1 else text.id, 'text': text.id,
            'position': at, 'token': ids[at], 'top_token': int(top),
            'correct': bool(int(top) == ids[at]), 'confidence': min(1.0, math.exp(top_log_prob)),
            'log_prob': float(log_prob), 'entropy': float(entropy), 'of': len(tree.scored),
            'context': tokenizer.decode(ids[max(0, at - SHOWN_TOKENS):at], start=False),
            'predicted': tokenizer.decode([int(top)], start=False),
            'expected': tokenizer.decode([ids[at]], start=False)})
    return token_samples


# {kind of a Task: the function that makes its samples}; score_task does for all others
COLLECT = dict.fromkeys(('free', *VERBALIZED), write_answers) | {
    'from_samples': judge_samples, 'p_ik': functools.partial(probe_answers, prompt_states)}

# what decides a sample besides the forward pass, the settings and the prompt
CODE = (forward_values, token_log_probs, token_statistics, prompt_states, question_samples,
        permuted_samples, p_true_samples, text_samples, write_answers, judge_samples, probe_answers,
        samples.question_fields, samples.mean_over_orders, *generate.CODE)


# ------------------------------------------------------------------------------------------------
# An evaluation
# ------------------------------------------------------------------------------------------------

def evaluate(folder, tokenizer, tasks, cfg, out_dir, load=None):
    """Score `tasks`, as load_tasks(cfg) returns them, with the model in `folder`.

    load: a function that returns this model when there is something to score; None: it is read then

    Resume from samples.jsonl in `out_dir`; write that file, eval_config.json, results.json, .md,
    .csv, .tex, report.html and reliability diagrams there; keep the results of other tasks with the
    same model and settings. Return the results; under torchrun, None in all processes but the
    first, which holds the folder's lock. Raises ConfigError or CheckpointError before anything is
    changed, DataError for a question that cannot be scored, CheckpointError for logits that are not
    finite.
    """
    out_dir, config = Path(out_dir), checkpoint.read_config(folder, seq2seq=True)
    cfg = resolve(cfg, folder, config, tokenizer)
    texts = [label for label, task in tasks.items() if task.kind in ('free', *INSTRUCTIONS)]
    if texts and t5_config(folder):
        raise ConfigError(f'{texts[0]} needs a model that continues a text, and '
                          f'{config.model_type} scores answers alone; choose tasks with options')
    if cfg.shard:
        check_shard(folder, tasks, cfg)
    for task in tasks.values() if cfg.verbalized else ():
        if task.kind == 'free':     # a template may refuse a second question
            question = written_answers.verbalized_2s(task.items[0], 'x', True)
            written_answers.encode(question, [], tokenizer, replace(cfg, max_length=math.inf), 0)
    if not load:
        checkpoint.check_weights(folder, config)    # before `overwrite` deletes anything
        load = functools.cache(functools.partial(load_model, folder, cfg))
    identity = {'model': checkpoint.fingerprint(folder), 'tokenizer': tokenizer.fingerprint,
                'code': code_digest(config, *CODE)}
    settings = identity | {key: getattr(cfg, key) for key in SETTINGS}
    if cfg.dropout_seed is not None:
        settings |= {'dropout_seed': cfg.dropout_seed,
                     'base': checkpoint.fingerprint(base_of_adapter(folder)),
                     'adapter': adapter.fingerprint(Path(folder, 'adapter'))}
    n, first = parallel.world_size(), parallel.rank() == 0
    earlier, done = parallel.broadcast(samples.open_folder(
        out_dir, tasks, settings, pictures=cfg.pictures, overwrite=cfg.overwrite, processes=n)
        if first else None)
    announce(config, tasks, cfg, done)
    results, prompts, new = score_tasks(folder, tokenizer, tasks, cfg, out_dir, done, load)
    if not first:
        return None
    samples.merge_parts(out_dir / 'samples.jsonl')
    rows = samples.by_task(latest_samples(out_dir) if done else new, prompts)
    results = write_evaluation(results, earlier, rows, tasks, cfg, identity, out_dir)
    ownership.remove_aside(out_dir, samples.KIND)
    return results


def check_shard(folder, tasks, cfg):
    """Raise ConfigError for an evaluation in which processes cannot share the weights."""
    written = [label for label, task in tasks.items() if task.kind == 'free']
    if parallel.world_size() == 1:
        why = 'there is one process; start several with torchrun --nproc_per_node=8 evaluate.py ...'
    elif written:
        why = f'the model writes the answers to {written[0]}, which needs all weights on each GPU'
    elif cfg.dropout_seed is not None:
        why = 'dropout_seed adds adapters, which needs all weights on each GPU'
    elif t5_config(folder):
        why = f'{t5_config(folder).model_type} is not sharded'
    else:
        return
    raise ConfigError(f'shard = True: {why}')


def score_tasks(folder, tokenizer, tasks, cfg, out_dir, done, load):
    """Append the samples of this process's share of `tasks` to its part of samples.jsonl.

    Return {label: result without metrics}, {label: its prompts} and the new samples, in the first
    process those of all.
    """
    scored, prompts, new = {}, {}, []
    process = parallel.rank(), parallel.world_size()
    tasks = {label: task.share(*process) for label, task in tasks.items()}
    with open(samples.part(out_dir / 'samples.jsonl', *process), 'ab', buffering=0) as file:
        def append(key, prompt, sample):
            if (key, prompt) not in done:
                new.append(dict(zip(('task', 'split', 'language', 'id'), key), prompt=prompt)
                           | sample)
                samples.append(file, new[-1])

        for label, task in with_variants(tasks, out_dir, prompts, cfg):
            started = time.perf_counter()
            if task.kind in ('free', *VERBALIZED) and done:
                task.written = [s for s in latest_samples(out_dir, silent=True)
                                if s['task'] == label]
            collect = COLLECT.get(task.kind, score_task)
            # an answer too long to be shown in the next prompt must not cost the results of others
            rule = replace(cfg, on_bad_row='skip') if is_confidence(label, task) else cfg
            prompts[label], bad_rows = collect(load, folder, tokenizer, label, task, rule, done,
                                               append)
            scored[label] = task, prompts[label], bad_rows, time.perf_counter() - started
    return *collect_results(scored, cfg, done), [*itertools.chain(*parallel.collect(new))]


def collect_results(scored, cfg, done):
    """Return {label: result without metrics} and {label: its prompts} of all processes.

    scored: {label: (this process's Task, prompts, bad rows, seconds)}; done: of `open_folder`.
    Raises DataError for a task of which no question could be scored. Both are {} in all processes
    but the first.
    """
    results, prompts = {}, {}
    shares = parallel.collect({label: (task.counts, *rest) for label, (task, *rest)
                               in scored.items()})
    for label, (task, *_) in scored.items() if shares else ():
        counts, share_prompts, bad_rows, seconds = zip(*(share[label] for share in shares))
        prompts[label], bad_rows = set().union(*share_prompts), [*itertools.chain(*bad_rows)]
        if is_confidence(label, task):
            if bad_rows:
                print(f'{label}: {len(bad_rows)} questions left out, the first: {bad_rows[0]}')
            elif not prompts[label] and task.kind in VERBALIZED:
                print(f'{label}: left out, since no answer states a probability from 0 to 1')
            if not prompts[label]:
                continue        # for example, no answer states a <confidence>
        if not prompts[label]:
            raise DataError(f'{label}: no question could be scored ({len(bad_rows)} bad rows'
                            f'{f", the first: {bad_rows[0]}" if bad_rows else ""})')
        results[label] = describe(task, cfg, sum(counts, Counter())) | {
            # an interrupted evaluation leaves samples, but not the time that they took
            'scoring_seconds': None if any(key[0] == label for key, _ in done)
            else round(max(seconds), 2),
            'bad_rows': len(bad_rows), 'first_bad': bad_rows[0] if bad_rows else None}
    return results, prompts


def is_confidence(label, task):
    """Return whether `task` asks for a confidence in answers that were written before."""
    return '.' in label and bool(task.measure)


def latest_samples(out_dir, silent=False):
    """Return the latest samples in `out_dir`; with several processes, those of this process."""
    paths = dict.fromkeys((out_dir / 'samples.jsonl', samples.part(
        out_dir / 'samples.jsonl', parallel.rank(), parallel.world_size())))
    return samples.latest_samples([sample for path in paths if path.exists()
                                   for sample in samples.read_samples(path)], silent)


def with_variants(tasks, out_dir, prompts, cfg):
    """Yield (label, Task) of `tasks`, then of their variants by permute and p_true.

    By then the samples of `tasks` must be in samples.jsonl. prompts: as in `samples.by_task`.
    """
    yield from tasks.items()
    variants = result_labels(tasks, cfg)[len(tasks):]
    rows = samples.by_task(latest_samples(out_dir), prompts) if variants else {}
    for variant in variants:
        label, kind = variant.split('.')
        scored = {samples.sample_key(s)[1:]: s for s in rows[label]}
        if tasks[label].kind == 'free':
            yield variant, tasks[label].judging(kind, confidence.CONFIDENCES[kind].title, scored)
        elif kind == 'permuted':
            yield variant, tasks[label].permuted(scored)
        else:
            top = {key: int(np.argmax(report.option_scores(
                s['log_probs'], s['options'], s['n_tokens'], cfg.norm)))
                for key, s in scored.items()}
            yield variant, tasks[label].proposing(top)


def result_labels(tasks, cfg):
    """Return the labels of all results of `tasks`: theirs, and those of the variants asked for."""
    variants = ['permuted'] * bool(cfg.permute) + ['p_true'] * cfg.p_true
    by_kind = {'questions': variants, 'free': confidence.variants(cfg)}
    return [*tasks, *(f'{label}.{variant}' for label, task in tasks.items()
                      for variant in by_kind.get(task.kind, ()))]


def resolve(cfg, folder, config, tokenizer):
    """Return `cfg` with 'auto' and None replaced by the values for this machine and model."""
    context = config.max_position_embeddings
    add_bos = trained_with_bos(folder) if cfg.add_bos is None else cfg.add_bos
    add_bos, chat = begins_with_bos(tokenizer, add_bos), cfg.chat
    if chat == 'trained':
        chat = trained_template(folder)
    if chat != 'none':
        question_frame(tokenizer, chat, add_bos)    # raise for a template that does not fit
    return replace(on_this_machine(cfg), add_bos=add_bos, chat=chat,
                   max_length=min(cfg.max_length or context, context))


def on_this_machine(cfg):
    """Return `cfg` with the device, the dtype and the length of rows for this machine."""
    target = device.pick_device(cfg.device)
    dtype = str(device.pick_dtype(cfg.dtype, target)).split('.')[-1]
    cfg = replace(cfg, device=target, dtype=dtype)
    return replace(cfg, pack_len=cfg.pack_len or row_lengths(cfg)[0])


def announce(config, tasks, cfg, done):
    """Print the model, its device, and what will be scored."""
    name = f', {torch.cuda.get_device_name(cfg.device)}' if cfg.device.startswith('cuda') else ''
    print(f'{cfg.model} ({config.model_type}) in {cfg.dtype} on {cfg.device}{name}')
    for label, task in tasks.items():
        n_done = task.count_scored(label, done)
        form = '' if task.kind in INSTRUCTIONS or task.measure else 'prompt format '
        print(f'{label}: {len(task.items):,} {task.unit}, {form}{distribution(task, cfg)}'
              + (f'; a sample of {task.total:,}' if len(task.items) < task.total else '')
              + (f'; {len(task.validation):,} for validation' if task.validation else '')
              + (f'; {n_done:,} scored earlier in this folder' if n_done else ''), flush=True)


# ------------------------------------------------------------------------------------------------
# The command line
# ------------------------------------------------------------------------------------------------

def run(cfg):
    """Run the evaluation `cfg`; return (results, labels of its tasks, the folder of the results).

    The results are None in all processes but the first. Raises ConfigError, DataError or
    CheckpointError.
    """
    check_eval_config(cfg)
    require_given(cfg, model='out/run or --model=google/gemma-2-2b')
    cfg = replace(on_this_machine(cfg), model=os.path.expanduser(cfg.model))
    ownership.forget_inputs()
    with parallel.first_process_first():
        folder = checkpoint.fetch(cfg.model, cfg.revision)
    config = checkpoint.read_config(folder, seq2seq=True)
    checkpoint.check_weights(folder, config)
    default = Path(cfg.model if Path(cfg.model).is_dir() else
                   f'out/eval/{cfg.model.replace("/", "--")}')
    if cfg.dropout_seed is not None:
        default = default / f'dropout-{cfg.dropout_seed}'
    out_dir = Path(os.path.expanduser(cfg.out_dir or default))
    tasks = load_tasks(cfg)     # fail on a bad task before the model is loaded
    # a folder with samples may have nothing left to score
    new = cfg.overwrite or not (out_dir / 'samples.jsonl').exists()
    load = load_ahead(folder, config, cfg, forward_values) if new else None
    tokenizer = load_model_tokenizer(folder, config)
    with parallel.first_process_locks(out_dir):
        results = evaluate(folder, tokenizer, tasks, cfg, out_dir, load)
    labels = [label for label in result_labels(tasks, cfg) if results and label in results['tasks']]
    return results, labels, out_dir


def show_prompts(cfg):
    """Print the prompts of --show; without a model as plain text."""
    tasks, tokenizer = load_tasks(cfg), None
    if cfg.model:
        folder = checkpoint.fetch(cfg.model, cfg.revision, weights=False)
        config = checkpoint.read_config(folder, seq2seq=True)
        tokenizer = load_model_tokenizer(folder, config)
        cfg = resolve(cfg, folder, config, tokenizer)
    elif cfg.chat != 'none':
        raise ConfigError(f'chat = {cfg.chat}: the template needs the tokenizer of --model')
    print(escape_controls(show_tasks(tasks, tokenizer, cfg)))


def main(argv):
    cfg = read_arguments(argv)
    if cfg.show:
        return show_prompts(cfg)
    results, labels, _ = run(cfg)
    if not results:
        return      # the first process prints them
    print(escape_controls(report.to_text(results['tasks'], labels)))


if __name__ == '__main__':
    with (cli.one_line_errors(
            resume='the scored samples are kept, and the same command resumes from there',
            memory='lower --batch_rows or --pack_len'), parallel.joined()):
        main(sys.argv[1:])
    startup.end_at_once()
