"""Evaluate a model's calibration: score answer options and next tokens, then compute metrics.

    python evaluate.py --model=out/run --tasks=mmlu,arc_easy,my_questions.jsonl --shots=5
    python evaluate.py --compare out/base out/sft out/ls01
    torchrun --nproc_per_node=8 evaluate.py --model=out/run --tasks=mmlu

Each sample is appended to samples.jsonl as soon as it is scored, and an interrupted evaluation
resumes from that file. Each of several processes scores its share of the questions.

From file to ECE: each kind of task is a class of data/tasks.py. Its `load` reads questions
(data/questions.py, with the row function in data/benchmarks.py and the prompt in data/prompts.py).
Its `collect` tokenizes them (data/trees.py), lets scoring.py score them, which packs rows
(data/tree_rows.py) and calls model.py and fused_ce.py, and makes samples of the values.
results/evaluation.py measures the samples. Tasks without options are in written/tasks.py.
"""

from runtime import cli

if __name__ == '__main__':
    cli.begin()

import contextlib
import functools
import itertools
import os
import sys
import textwrap
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np

from data.eval_config import EvalConfig, check_eval_config, pick_chat, training_settings
from data.tasks import TASKS, check_names, check_settings, kind_of, with_shots
from data.tokenizer import begins_with_bos, load_model_tokenizer
from results import samples
from runtime import rooms
from runtime.config import load_config, note_default, require_given, run_folder, run_settings
from runtime.errors import ConfigError, DataError, escape_controls

USAGE = f"""{__doc__}
The tasks are
{textwrap.fill(', '.join(TASKS), 100)},
each also as task:folder-or-file. A file of questions is a task, too. --tasks=help lists the files
of each task, --help the keys."""


def read_arguments(argv):
    """Return the EvalConfig of a command line; do what needs no model (--help) and exit."""
    if not argv:
        raise SystemExit(USAGE)
    if argv[0] == '--compare':
        raise SystemExit(rooms.load('compare').main(argv[1:]))
    cfg = load_config(EvalConfig, argv, USAGE)
    check_eval_config(cfg)
    if cfg.tasks == ('help',):
        print(rooms.load('show').describe_tasks())
        raise SystemExit
    return cfg


if __name__ == '__main__':
    with cli.one_line_errors():     # none of this needs torch, whose import takes seconds
        read_arguments(sys.argv[1:])

import torch

import scoring
from model import CausalLM
from runtime import checkpoint, device, ownership, parallel

# Samples depend on these keys, so they must not change within a folder. The tokens of clm depend on
# the seed too, but each sample has a hash of its prompt.
SETTINGS = ('prompt_format', 'header', 'shots', 'scoring', 'chat', 'instruct', 'add_bos',
            'max_length', 'deterministic')

# the modules that make samples, with what they import: see digests.code_digest
CODE = 'scoring', 'data.tasks', rooms.ROOMS['permuted'], *{*rooms.TASKS.values()}


def load_tasks(cfg):
    """Return {label: Task} of an EvalConfig; raise ConfigError or DataError for a bad task."""
    cfg = with_shots(cfg)
    check_names(cfg.tasks)
    loaded = [kind_of(name).load(name, cfg) for name in cfg.tasks]
    tasks = {task.label: task for task in loaded}
    check_settings(loaded, cfg)
    for label, task in tasks.items():
        if cfg.scaling:
            rooms.load('measures').saved_fits(cfg, label)
        if cfg.fit_temperature and len(task.items) < 2:
            raise DataError(f'{label}: fit_temperature needs two {task.unit} or more')
    return tasks


# ---- An evaluation -------------------------------------------------------------------------------

def evaluate(folder, tokenizer, tasks, cfg, out_dir, load=None):
    """Score `tasks`, as load_tasks(cfg) returns them, with the model in `folder`.

    load: a function that returns this model when there is something to score; None: it is read then

    Resume from samples.jsonl in `out_dir`, whose lock the caller holds; write that file, the files
    of results and the diagrams there; keep the results of other tasks with the same model and
    settings. Return the results; None in all processes but the first. Raises ConfigError or
    CheckpointError before anything is changed, DataError for a question that cannot be scored,
    CheckpointError for logits that are not finite.
    """
    out_dir, config = Path(out_dir), checkpoint.read_config(folder, seq2seq=True)
    cfg = resolve(cfg, folder, config, tokenizer)
    texts = [label for label, task in tasks.items() if task.continues]
    if texts and scoring.t5_config(folder):
        raise ConfigError(f'{texts[0]} needs a model that continues a text, and '
                          f'{config.model_type} scores answers alone; choose tasks with options')
    if (out_dir / 'config.json').exists() and not out_dir.samefile(folder):
        raise ConfigError(f'{out_dir} holds another model, whose report this would seem to be; '
                          f'choose another --out_dir')
    if cfg.shard:
        rooms.load('sharding').check_evaluation(tasks, cfg, scoring.t5_config(folder))
    for task in tasks.values():
        task.check(tokenizer, cfg)
    if not load:
        checkpoint.check_weights(folder, config)    # before `overwrite` renames anything
        load = functools.cache(functools.partial(load_model, folder, cfg))
    identity = checkpoint.identity(folder, tokenizer, cfg.dtype, *CODE)
    settings = identity | {key: getattr(cfg, key) for key in SETTINGS} | {
        key: getattr(cfg, key) for key in ('multiturn', 'group_by') if getattr(cfg, key)}
    if cfg.dropout_seed is not None:
        settings |= {'dropout_seed': cfg.dropout_seed,
                     'base': checkpoint.fingerprint(base_of_adapter(folder)),
                     'adapter': rooms.load('adapter').fingerprint(Path(folder, 'adapter'))}
    n, first = parallel.world_size(), parallel.rank() == 0
    earlier, done = parallel.gather(samples.open_folder(
        out_dir, tasks, settings, pictures=cfg.pictures, overwrite=cfg.overwrite,
        fit=cfg.fit_temperature, processes=n) if first else None)[0]
    announce(config, tasks, cfg, done)
    scorer = scoring.Scorer(folder, tokenizer, cfg, load)
    results, prompts, new = score_tasks(tasks, scorer, out_dir, done)
    if not first:
        return None
    samples.merge_parts(out_dir / 'samples.jsonl')
    rows = samples.by_task(samples.latest_samples(
        samples.read_samples(out_dir / 'samples.jsonl')) if done else new, prompts)
    results = rooms.load('measures').write_evaluation(
        results, earlier, rows, tasks, cfg, settings, out_dir)
    if run_settings(run_folder(out_dir)):       # the model was trained here
        rooms.load('card').write(out_dir)
    return results


def base_of_adapter(folder):
    """Return the base model's folder of the adapters in `folder`/adapter, which need dropout."""
    adapter = rooms.load('adapter')
    settings = adapter.read_adapter(folder)
    if not settings.get('lora_dropout'):
        raise ConfigError(f'dropout_seed: {folder} was trained with lora_dropout = 0, so nothing '
                          f'would be dropped; leave out --dropout_seed')
    run = run_settings(run_folder(Path(folder).resolve()))
    base = checkpoint.fetch(settings['base_model_name_or_path'], run.get('revision'))
    config = checkpoint.read_config(base)
    checkpoint.check_weights(base, config)
    with torch.device('meta'):      # fail on adapters of another model before anything is scored
        adapter.add_adapter(CausalLM(config), folder)
    return base


def load_model(folder, cfg):
    """Return the model in `folder`; with dropout_seed, its base with the adapters beside it."""
    drops = cfg.dropout_seed is not None
    share = (functools.partial(rooms.load('sharding').shard, device=cfg.device) if cfg.shard
             else None)
    model = checkpoint.load(base_of_adapter(folder) if drops else folder, cfg.device,
                            getattr(torch, cfg.dtype), share=share)
    if drops:
        rooms.load('adapter').add_adapter(model, folder)
    return model


def load_ahead(folder, cfg):
    """Return a function that returns the model; a thread loads it from now on."""
    if cfg.shard:       # these processes must not exchange messages from two threads
        return None
    pool = ThreadPoolExecutor(1)
    model = pool.submit(load_model, folder, cfg)
    pool.shutdown(wait=False)       # nothing else will be submitted
    return model.result


def score_tasks(tasks, scorer, out_dir, done):
    """Append the samples of this process's share of `tasks` to its part of samples.jsonl.

    Return {label: result without metrics}, {label: its prompts} and the new samples of all
    processes. Raises DataError for a task without a scored question.
    """
    scored = {}
    prompts = {}
    process = (parallel.rank(), parallel.world_size())
    tasks = {label: task.share(*process) for label, task in tasks.items()}
    writer = samples.SampleWriter(out_dir, done, *process)
    with contextlib.closing(writer.file):
        for task in with_variants(tasks, writer, prompts, scorer.cfg):
            started = time.perf_counter()
            prompts[task.label], bad_rows = task.collect(scorer, writer)
            scored[task.label] = (task, prompts[task.label], bad_rows,
                                  time.perf_counter() - started)
    results = collect_results(scored, scorer.cfg, done)
    return *results, [*itertools.chain(*parallel.gather(writer.new))]


def collect_results(scored, cfg, done):
    """Return the first two results of `score_tasks`.

    scored: {label: (this process's Task, prompts, bad rows, seconds)}; done: of `open_folder`
    """
    results, prompts = {}, {}
    shares = parallel.gather({
        label: (task.counts(share_prompts), share_prompts, bad_rows, seconds)
        for label, (task, share_prompts, bad_rows, seconds) in scored.items()})
    for label, (task, *_) in scored.items():
        counts, share_prompts, bad_rows, seconds = zip(*(share[label] for share in shares))
        prompts[label], bad_rows = set().union(*share_prompts), [*itertools.chain(*bad_rows)]
        if task.optional and bad_rows:
            print(f'{label}: {len(bad_rows)} questions left out, the first: {bad_rows[0]}')
        elif task.left_out and not prompts[label]:
            print(f'{label}: left out, since {task.left_out}')
        if task.optional and not prompts[label]:
            continue        # for example, no answer states a <confidence>
        if not prompts[label]:
            raise DataError(f'{label}: no question could be scored ({len(bad_rows)} bad rows'
                            f'{f", the first: {bad_rows[0]}" if bad_rows else ""})')
        results[label] = task.describe(cfg, sum(counts, Counter())) | {
            # an interrupted evaluation leaves samples, but not the time that they took
            'scoring_seconds': None if any(key[0] == label for key, _ in done)
            else round(max(seconds), 2),
            'bad_rows': len(bad_rows), 'first_bad': bad_rows[0] if bad_rows else None}
    return results, prompts


def with_variants(tasks, writer, prompts, cfg):
    """Yield `tasks` and, once their samples are there, their variants, such as those by permute."""
    yield from tasks.values()
    variants = [(task, name) for task in tasks.values() for name in task.variants(cfg)]
    rows = samples.by_task(writer.latest(), prompts) if variants else {}

    def top_option(sample):
        return int(np.argmax(samples.option_scores(sample['log_probs'], sample['options'],
                                                   sample['n_tokens'], cfg.norm)))
    for task, name in variants:
        scored = {samples.sample_key(s)[1:]: s for s in rows[task.label]}
        yield task.variant(name, scored, top_option)


def resolve(cfg, folder, config, tokenizer):
    """Return `cfg` with 'auto' and None replaced by the values for this machine and model."""
    context = config.max_position_embeddings
    add_bos = training_settings(folder).get('add_bos') if cfg.add_bos is None else cfg.add_bos
    add_bos, chat = begins_with_bos(tokenizer, add_bos), cfg.chat
    chat = pick_chat(chat, folder, tokenizer)
    if cfg.multiturn and chat == 'none':
        raise ConfigError('multiturn = True needs a chat template, such as --chat=model')
    if chat != 'none':      # plain text needs nothing of data/chat.py
        from data.trees import question_frame
        question_frame(tokenizer, chat, add_bos)    # raise for a template that does not fit
    return replace(on_this_machine(with_shots(cfg)), add_bos=add_bos, chat=chat,
                   max_length=min(cfg.max_length or context, context))


def on_this_machine(cfg):
    """Return `cfg` with the device, the dtype and the length of rows for this machine."""
    target = device.pick_device(cfg.device)
    dtype = str(device.pick_dtype(cfg.dtype, target)).split('.')[-1]
    cfg = replace(cfg, device=target, dtype=dtype)
    return replace(cfg, pack_len=cfg.pack_len or scoring.row_lengths(cfg)[0])


def announce(config, tasks, cfg, done):
    name = f', {torch.cuda.get_device_name(cfg.device)}' if cfg.device.startswith('cuda') else ''
    print(f'{cfg.model} ({config.model_type}) in {cfg.dtype} on {cfg.device}{name}')
    for label, task in tasks.items():
        n, n_done = len(task.tested), task.count_scored(done)
        n_others, has_format = len(task.items) - n, 'prompt_format' in task.described
        print(f'{label}: {n:,} {task.unit}, {"prompt format " * has_format}{task.distribution(cfg)}'
              + (f'; a sample of {task.total:,}' if n < task.total else '')
              + (f'; {n_others:,} {task.others}' if n_others else '')
              + (f'; {n_done:,} scored earlier in this folder' if n_done else ''), flush=True)


# ---- The command line ----------------------------------------------------------------------------

def run(cfg):
    """Return (results, None but in the first process; labels of tasks; the folder of results)."""
    check_eval_config(cfg)
    require_given(cfg, model='out/run or --model=google/gemma-2-2b')
    cfg = replace(on_this_machine(cfg), model=os.path.expanduser(cfg.model))
    ownership.INPUTS.clear()
    with parallel.first_process_first():
        folder = checkpoint.fetch(cfg.model, cfg.revision)
    config = checkpoint.read_config(folder, seq2seq=True)
    default = Path(cfg.model if Path(cfg.model).is_dir() else
                   f'out/eval/{cfg.model.replace("/", "--")}')
    if cfg.dropout_seed is not None:
        default = default / f'dropout-{cfg.dropout_seed}'
    out_dir = Path(os.path.expanduser(cfg.out_dir or default))
    checkpoint.check_weights(folder, config)
    note_default(cfg, 'tasks', 'my_questions.jsonl')
    tasks = load_tasks(cfg)     # fail on a bad task before the model is loaded
    # a folder with samples may have nothing left to score
    new = cfg.overwrite or not (out_dir / 'samples.jsonl').exists()
    load = load_ahead(folder, cfg) if new else None
    tokenizer = load_model_tokenizer(folder, config)
    if not cfg.out_dir and not cfg.overwrite:
        out_dir = own_folder(out_dir, resolve(cfg, folder, config, tokenizer))
    with parallel.first_process_locks(out_dir):
        results = evaluate(folder, tokenizer, tasks, cfg, out_dir, load)
    labels = [*tasks, *(f'{label}.{name}' for label, task in tasks.items()      # of variants, too
                        for name in task.variants(cfg))]
    return results, [x for x in labels if results and x in results['tasks']], out_dir


def own_folder(folder, cfg):
    """Return `folder`, or the first of folder/eval-2, ... without samples of other settings."""
    for n in itertools.count(1):
        place = folder / f'eval-{n}' if n > 1 else folder
        if not (place / samples.OUTPUTS[1]).exists():
            break
        with ownership.read_json(place / samples.OUTPUTS[1], samples.OTHER_FOLDER) as before:
            other = [key for key in SETTINGS if before.get(key) != getattr(cfg, key)]
        if not other:
            break
    if place != folder and parallel.rank() == 0:
        print(f'{folder} holds samples of other settings; these go to {place}')
    return place


def show_prompts(cfg):
    """Print the prompts of --show; without a model as plain text."""
    tasks, tokenizer = load_tasks(cfg), None
    if cfg.model:
        folder = checkpoint.fetch(cfg.model, cfg.revision, weights=False)
        config = checkpoint.read_config(folder, seq2seq=True)
        tokenizer = load_model_tokenizer(folder, config)
        cfg = resolve(cfg, folder, config, tokenizer)
    elif cfg.chat not in ('none', 'auto'):
        raise ConfigError(f'chat = {cfg.chat}: the template needs the tokenizer of --model')
    print(escape_controls(rooms.load('show').show_tasks(tasks, tokenizer, cfg)))


def main(argv):
    cfg = read_arguments(argv)
    if cfg.show:
        return show_prompts(cfg)
    results, labels, _ = run(cfg)
    if not results:
        return      # the first process prints them
    report = rooms.load('report')
    print(escape_controls(report.to_text(results['tasks'], labels)))


if __name__ == '__main__':
    with (cli.one_line_errors(
            resume='the scored samples are kept, and the same command resumes from there',
            memory='lower --batch_rows or --pack_len'), parallel.joined()):
        main(sys.argv[1:])
