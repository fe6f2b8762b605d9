"""How well does a model know what it knows? Scores the options of questions, and tokens of texts.

    python evaluate.py --model=out/run --tasks=mmlu,arc_easy,hellaswag --shots=5
    python evaluate.py --compare out/base out/sft out/ls01

Questions are packed into rows as trees, so prompts that begin alike share those tokens, and
scoring.py makes log-probabilities of them. Samples are appended to samples.jsonl as they are
scored, and an interrupted evaluation resumes from there; report.py computes the rest from them.
"""

import atexit
import gc
import os
import signal


def stop_at_once(*_):
    """Handle Ctrl-C while nothing is written yet: imports of C++ would crash by an exception."""
    os.write(2, b'stopped\n')
    os._exit(130)


if __name__ == '__main__':
    signal.signal(signal.SIGINT, stop_at_once)
    gc.disable()    # makes the imports a quarter faster

import contextlib
import ctypes
import math
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from data.benchmarks import BENCHMARKS
from data.chat import question_frame
from data.probes import INSTRUCTIONS
from data.prompts import PROMPT_FORMATS
from data.tasks import describe_tasks, load_tasks, show
from data.tokenizer import begins_with_bos, load_model_tokenizer
from results import compare, report, samples
from runtime import ownership, processes
from runtime.config import Later, load_config, read_assignments, require_range
from runtime.errors import CheckpointError, ConfigError, DataError

# imported at their first use: --help, misspelled keys and train.py's --help need no torch
checkpoint, device, log, scoring, torch = map(Later, (
    'runtime.checkpoint', 'runtime.device', 'runtime.log', 'scoring', 'torch'))


@dataclass
class EvalConfig:
    model: str = ''                           # a folder in Hugging Face layout, or a hub name
    revision: str | None = None               # the hub revision of the model
    # mmlu, global_mmlu, ..., clm, facts, each also as task:folder-or-file; or a file of questions
    tasks: tuple[str, ...] = ('mmlu',)
    data_revision: str | None = None          # the hub revision of the tasks' datasets
    languages: tuple[str, ...] = ('all',)     # of multilingual tasks
    prompt_format: Literal[tuple(PROMPT_FORMATS)] = 'mmlu'  # prompts of MMLU or of
    #                                           lm-evaluation-harness, or of data/prompts.py
    header: Literal['english', 'native'] = 'english'
    shots: int = 5                            # solved questions before each question
    scoring: Literal['auto', 'letters', 'text'] = 'auto'     # auto: letters, or as the harness does
    norm: Literal['token', 'sum', 'char', 'byte'] = 'token'  # what divides a log-probability
    passes: int = 0                           # sample the dropout of the adapters in adapter/ so
    #                                           often and average the probabilities; 0: no dropout
    p_true: bool = False                      # then ask if the top option is right: P(True)
    # ask in this chat template; trained: in that of the training here; none: as plain text
    chat: Literal['none', 'trained', 'tulu', 'llama3', 'gemma', 'mistral', 'chatml',
                  'alpaca'] = 'none'
    instruct: bool = False                    # clm and facts: begin with the paper's instruction
    show: int = 0                             # print so many prompts of each task, as the model
    #                                           reads them, and score nothing; needs no weights
    limit: int | None = None                  # only so many questions of each language, drawn by
    #                                           the seed evenly over subjects
    add_bos: bool | None = None               # None: as in training here, or as the tokenizer does
    max_length: int | None = None             # longest prompt in tokens; None: the model's context
    temperature: Literal['none', 'fit'] = 'none'    # fit: temperature and Platt scaling beside raw
    n_bootstrap: int = 1000                   # resamples for the intervals; 0: none
    pictures: bool = True                     # draw reliability diagrams
    pack_len: int | None = None               # tokens in a packed row; None: 32768 on a GPU, 16384
    #                                           there without the kernels, 4096 on a CPU
    batch_rows: int = 1                       # rows in a forward pass
    deterministic: bool = False               # scores bitwise independent of batch composition
    on_bad_row: Literal['stop', 'skip'] = 'stop'
    seed: int = 0                             # of clm's tokens, limit, bootstrap and dropout
    dtype: Literal['auto', 'float32', 'bfloat16'] = 'auto'  # auto: bfloat16 on a GPU
    device: str = 'auto'
    out_dir: str | None = None                # None: the model's folder; out/eval/ for a hub name
    overwrite: bool = False                   # delete what was evaluated in out_dir before


# Samples depend on these keys, so they must not change within a folder. The tokens of clm depend on
# the seed too, but each sample carries a hash of its prompt.
SETTINGS = ('prompt_format', 'header', 'shots', 'scoring', 'chat', 'instruct', 'add_bos',
            'max_length', 'deterministic', 'dtype')


def check_eval_config(cfg):
    """Raise ConfigError for a value that no evaluation can use."""
    require_range(cfg, 0, math.inf, 'shots', 'show', 'n_bootstrap', 'passes')
    require_range(cfg, 0, 2 ** 63 - 1, 'seed')
    require_range(cfg, 1, math.inf, 'limit', 'batch_rows', 'max_length')
    require_range(cfg, 16, math.inf, 'pack_len')
    for key, example in (('tasks', '--tasks=mmlu,arc_easy or --tasks=my_questions.jsonl'),
                         ('languages', '--languages=all or --languages=en,de')):
        if not getattr(cfg, key):
            raise ConfigError(f'{key} is empty; for example {example}')


# ------------------------------------------------------------------------------------------------
# Samples
# ------------------------------------------------------------------------------------------------

def score_task(load, folder, tokenizer, label, task, cfg, done, write):
    """Score what is not in `done` and hand each sample to `write`; return (prompts, bad rows).

    prompts: {(sample_key, prompt)} of everything that the task asks, scored now or before
    done:    the same of what is in samples.jsonl
    """
    prompts, bad_rows, waiting = set(), list(task.bad_rows), {}
    progress = log.Progress(label, len(task.items) + len(task.validation), task.unit)

    def trees():
        for index, (item, tree) in enumerate(task.tokenize(tokenizer, cfg)):
            if isinstance(tree, DataError):
                if cfg.on_bad_row == 'stop':
                    raise DataError(f'{label}: {tree}; --on_bad_row=skip leaves it out')
                bad_rows.append(str(tree))
                progress.update(scored=False)
                continue
            split = 'validation' if index >= len(task.items) else 'test'
            key, prompt = (label, split, item.language, item.id), tree.fingerprint
            prompts.add((key, prompt))
            if (key, prompt) in done:
                progress.update(scored=False)
                continue
            waiting[index] = key, prompt, item, tree
            yield index, tree

    to_samples = {'questions': question_samples, 'p_true': p_true_samples}.get(task.kind,
                                                                              text_samples)
    try:
        for index, numbers, values in scoring.score(
                load, trees(), cfg.pack_len, cfg.batch_rows, cfg.deterministic,
                statistics=task.kind in INSTRUCTIONS, trim=scoring.row_lengths(cfg)[1],
                dropout_seeds=[(cfg.seed, n) for n in range(cfg.passes)]):
            key, prompt, item, tree = waiting.pop(index)
            if not np.isfinite(values).all():
                raise CheckpointError(checkpoint.bad_logits(f'{label}: {item.place}', folder,
                                                            cfg.dtype))
            common = dict(zip(('task', 'split', 'language', 'id'), key)) | {'prompt': prompt}
            for sample in to_samples(item, tree, numbers, values):
                write(common | sample)
            progress.update()
    finally:
        progress.bar.close()
    if not prompts:
        raise DataError(f'{label}: no question could be scored ({len(bad_rows)} bad rows'
                        f'{f", the first: {bad_rows[0]}" if bad_rows else ""})')
    return prompts, bad_rows


def question_samples(question, tree, numbers, values):
    log_probs = scoring.mean_log_probs(numbers, values, len(tree.leaves))
    return [{'subject': question.subject, 'category': question.category, 'shots': tree.shots,
             'answer': question.answer,
             'options': [question.ending or option for option in question.options],
             'log_probs': log_probs.tolist(), 'n_tokens': tree.n_tokens}]


def p_true_samples(question, tree, numbers, values):
    """The confidence is P(True): the probability of (A), True, among the two options."""
    true, false = scoring.mean_log_probs(numbers, values, 2)
    log_probs = -np.logaddexp(0, [false - true, true - false])
    return [{'subject': question.subject, 'category': question.category, 'shots': tree.shots,
             'correct': question.answer == 0, 'confidence': float(np.exp(log_probs[0])),
             'log_prob': float(log_probs[question.answer]),
             'entropy': float(-(np.exp(log_probs) * log_probs).sum())}]


def text_samples(text, tree, numbers, values):
    ids = [*tree.prefix, *tree.stem]
    found = []
    for n in np.argsort(numbers):
        at, (log_prob, top, top_log_prob, entropy) = tree.scored[numbers[n]], values[n]
        found.append({
            'id': f'{text.id}:{at}' if len(tree.scored) > 1 else text.id, 'text': text.id,
            'position': at, 'token': ids[at], 'top_token': int(top),
            'correct': bool(int(top) == ids[at]), 'confidence': min(1.0, math.exp(top_log_prob)),
            'log_prob': float(log_prob), 'entropy': float(entropy), 'of': len(tree.scored)})
    return found


# ------------------------------------------------------------------------------------------------
# An evaluation
# ------------------------------------------------------------------------------------------------

def evaluate(folder, tokenizer, tasks, cfg, out_dir, model=None):
    """Score `tasks`, as load_tasks(cfg) returns them, with the model in `folder`, or `model`.

    Resumes from `out_dir`/samples.jsonl. Writes that, eval_config.json, results.json, .md, .csv and
    .tex, and reliability diagrams into `out_dir`, where the results of other tasks that were
    evaluated with the same model and settings are kept. Returns the results. The caller holds the
    folder's lock. Raises ConfigError or CheckpointError before it changes anything, DataError for a
    question that cannot be scored, CheckpointError for logits that are not finite.
    """
    out_dir, config = Path(out_dir), checkpoint.read_config(folder)
    cfg = resolve(cfg, folder, config, tokenizer)
    if not model:
        checkpoint.check_weights(folder, config)    # before `overwrite` deletes anything
    identity = {'model': checkpoint.fingerprint(folder), 'tokenizer': tokenizer.fingerprint}
    settings = identity | {key: getattr(cfg, key) for key in SETTINGS}
    if cfg.passes:
        base = base_of_adapter(folder)
        settings |= {'passes': cfg.passes, 'seed': cfg.seed, 'base': checkpoint.fingerprint(base),
                     'adapter': checkpoint.adapter_fingerprint(folder)}
    earlier, done = samples.open_folder(out_dir, tasks, settings, pictures=cfg.pictures,
                                        overwrite=cfg.overwrite)
    announce(config, tasks, cfg, done)
    results, prompts, new = score_tasks(folder, tokenizer, tasks, cfg, out_dir, done, model)
    rows = samples_of(read_last(out_dir / 'samples.jsonl') if done else new, prompts)
    earlier = report.measure_again({label: earlier[label] for label in earlier
                                    if label not in results}, rows)
    with ThreadPoolExecutor(1) as pool:     # pictures are drawn while the workers compute
        drawn = cfg.pictures and pool.submit(draw_diagrams, earlier, results, rows, tasks, out_dir)
        for label in results:
            results[label] |= report.summarize(rows[label], cfg.norm, n_bootstrap=cfg.n_bootstrap,
                                               fit=cfg.temperature == 'fit', seed=cfg.seed)
            results[label]['fewer_shots'] = sum(s.get('shots', cfg.shots) < cfg.shots
                                                for s in rows[label])
    found = {'schema': report.SCHEMA, 'config': asdict(cfg) | {'model': str(cfg.model)},
             'seed': cfg.seed,
             'versions': device.versions(), 'identity': identity, 'tasks': earlier | results}
    report.write_results(found, out_dir)
    if drawn and (pictures := drawn.result()):      # raises its error
        print(f'wrote {", ".join(pictures)} to {out_dir}')
    return found


def score_tasks(folder, tokenizer, tasks, cfg, out_dir, done, model):
    """Append the samples of `tasks` to samples.jsonl.

    Returns {label: what is known of its results}, {label: its prompts} and the new samples.
    """
    results, prompts, new, path = {}, {}, [], out_dir / 'samples.jsonl'
    asked = [tasks[label.removesuffix('.p_true')] for label in result_labels(tasks, cfg)]
    n_items = sum(len(task.items) + len(task.validation) for task in asked)
    n_items = max(0, n_items - sum(key[0] in result_labels(tasks, cfg) for key, _ in done))
    with ThreadPoolExecutor(2) as pool, open(path, 'ab', buffering=0) as file:
        base = base_of_adapter(folder) if cfg.passes else folder
        load = (lambda: model) if model else scoring.load_ahead(pool, folder, base, cfg, n_items)

        def append(sample):
            samples.append(file, sample)
            new.append(sample)

        for label, task in with_p_true(tasks, path, prompts, cfg):
            started = time.perf_counter()
            prompts[label], bad_rows = score_task(load, folder, tokenizer, label, task, cfg, done,
                                                  append)
            results[label] = describe(task, cfg) | {
                'scoring_seconds': round(time.perf_counter() - started, 2),
                'bad_rows': len(bad_rows), 'first_bad': bad_rows[0] if bad_rows else None}
    return results, prompts, new    # and free the memory of the model: the metrics need some


def with_p_true(tasks, path, prompts, cfg):
    """Yield (label, Task) of `tasks`; then, with p_true, of what asks about their top options.

    By then the samples of `tasks` must be in the file `path`; prompts: as of `samples_of`.
    """
    yield from tasks.items()
    rows = samples_of(read_last(path), prompts) if cfg.p_true else {}
    for label, task in tasks.items():
        if cfg.p_true and task.kind == 'questions':
            top = {samples.sample_key(s)[1:]: int(np.argmax(report.option_scores(
                s['log_probs'], s['options'], s['n_tokens'], cfg.norm))) for s in rows[label]}
            yield f'{label}.p_true', task.proposing(top)


def result_labels(tasks, cfg):
    """Return the labels of all results of `tasks`, those of P(True) included."""
    return [*tasks, *(f'{label}.p_true' for label, task in tasks.items()
                      if cfg.p_true and task.kind == 'questions')]


def resolve(cfg, folder, config, tokenizer):
    """`cfg` with what 'auto' and None stand for here."""
    place, context = device.pick_device(cfg.device), config.max_position_embeddings
    dtype = str(device.pick_dtype(cfg.dtype, place))
    add_bos = trained_with_bos(folder) if cfg.add_bos is None else cfg.add_bos
    add_bos, chat = begins_with_bos(tokenizer, add_bos), cfg.chat
    if chat == 'trained':
        chat = trained_template(folder)
    if chat != 'none':
        question_frame(tokenizer, chat, add_bos)    # raise for a template that does not fit
    cfg = replace(cfg, device=place, dtype=dtype.split('.')[-1], add_bos=add_bos, chat=chat,
                  max_length=min(cfg.max_length or context, context))
    return replace(cfg, pack_len=cfg.pack_len or scoring.row_lengths(cfg)[0])


def trained_with_bos(folder):
    """Return the add_bos with which the model in `folder` was trained here; None for others."""
    return training_settings(folder).get('add_bos')


def trained_template(folder):
    """Return the chat template with which the model in `folder` was trained here; ConfigError."""
    settings = training_settings(folder)
    if settings.get('data_kind') != 'instruct' or 'template' not in settings:
        raise ConfigError(f'chat = trained, but {folder} was not trained here on conversations; '
                          f'name the template, for example --chat=llama3; --raw of sample.py '
                          f'uses none')
    return settings['template']


def training_settings(folder):
    """Return the settings of the run that trained the model in `folder`; {} if there was none."""
    folder = Path(folder).resolve()
    if re.fullmatch(r'epoch-\d+', folder.name):     # the config is in the folder of the run
        folder = folder.parent
    path = folder / 'train_config.py'
    assigned = read_assignments(path) if path.exists() else {}
    return {key: value for key, (value, _) in assigned.items()}


def base_of_adapter(folder):
    """Return the folder of the model that the adapters in `folder`/adapter were trained on.

    Raises ConfigError if they have no dropout to sample, CheckpointError if they or the base model
    are missing or do not fit each other.
    """
    adapter = checkpoint.read_adapter(folder)
    if not adapter['lora_dropout']:
        raise ConfigError(f'passes: {folder} was trained with lora_dropout = 0, so all passes '
                          f'would be equal; leave out --passes')
    base = checkpoint.fetch(adapter['base_model_name_or_path'],
                            training_settings(folder).get('revision'))
    config = checkpoint.read_config(base)
    checkpoint.check_weights(base, config)
    with torch.device('meta'):      # fail on adapters of another model before anything is scored
        checkpoint.add_adapter(checkpoint.CausalLM(config), folder)
    return base


def announce(config, tasks, cfg, done):
    """Print what is about to be scored, and on which device."""
    name = f', {torch.cuda.get_device_name(cfg.device)}' if cfg.device.startswith('cuda') else ''
    print(f'{cfg.model} ({config.model_type}) in {cfg.dtype} on {cfg.device}{name}')
    for label, task in tasks.items():
        n_done = sum(key[0] == label for key, _ in done)
        print(f'{label}: {len(task.items):,} {task.unit}, {distribution(task, cfg)}'
              + (f'; a sample of {task.total:,}' if len(task.items) < task.total else '')
              + (f'; {len(task.validation):,} for validation' if task.validation else '')
              + (f'; {n_done:,} scored earlier in this folder' if n_done else ''), flush=True)


def describe(task, cfg):
    """The part of a task's result that says how it was scored."""
    facts = {'source': task.source, 'distribution': distribution(task, cfg), 'norm': cfg.norm,
             'selected_languages': cfg.languages, 'limit': cfg.limit, 'seed': cfg.seed,
             'n_bootstrap': cfg.n_bootstrap, 'data_revision': cfg.data_revision}
    if cfg.passes:
        facts['passes'] = cfg.passes
    if len(task.items) < task.total:
        facts['sample'] = {'questions': len(task.items), 'of': task.total}
    if task.kind not in INSTRUCTIONS:
        facts |= {'prompt_format': cfg.prompt_format, 'shots': cfg.shots,
                  'scoring': cfg.scoring, 'chat': cfg.chat,
                  'duplicate_options': sum(q.duplicate_options for q in task.items)}
    return facts


def distribution(task, cfg):
    """Which probabilities are measured, for the head of a table."""
    if task.kind in INSTRUCTIONS:
        return 'top token, with an instruction' if cfg.instruct else 'top token'
    default = 'letters' if cfg.prompt_format == 'mmlu' else f'as {cfg.prompt_format} does'
    scored_as = default if cfg.scoring == 'auto' else cfg.scoring
    asked = 'P(True) of the top option, ' if task.kind == 'p_true' else ''
    form = 'plain text' if cfg.chat == 'none' else f'chat template {cfg.chat}'
    form += f', {cfg.passes} passes with dropout' if cfg.passes else ''
    return f'{asked}{cfg.prompt_format}, {cfg.shots} shots, {scored_as}, {cfg.norm}, {form}'


def read_last(path):
    """Return the samples of the last prompt of each question or text in samples.jsonl."""
    return samples.last_asked(samples.read_samples(path))


def samples_of(rows, prompts):
    """{task: its samples}; of a task in `prompts`, {task: {(sample_key, prompt)}}, only those."""
    by_label = {label: [] for label in prompts}
    for sample in rows:
        label, asked = sample['task'], (samples.sample_key(sample), sample['prompt'])
        if label not in prompts or asked in prompts[label]:
            by_label.setdefault(label, []).append(sample)
    return by_label


def draw_diagrams(earlier, results, rows, tasks, out_dir):
    """Draw reliability.png of all tasks, and a grid of the languages of each of `tasks`.

    Earlier tasks have their grids. One whose samples are no longer those of its result is left out.
    Return the names of the pictures that were written.
    """
    panels, pictures = [], {}
    for label, result in (earlier | results).items():
        test = [s for s in rows.get(label, []) if s['split'] == 'test']
        if label not in results and len(test) != result['pooled']['n']:
            print(f'reliability.png leaves out {label}: of its {result["pooled"]["n"]} questions '
                  f'samples.jsonl now holds {len(test)}; evaluate {label} again to draw it')
            continue
        of_all = report.predictions(test, result['norm'])
        panels.append((report.panel_title(label, result), of_all))
        languages = report.split_groups(test, 'language', of_all) if label in tasks else {}
        if languages:
            pictures[samples.GRID.format(label)] = [
                (report.panel_title(name, result), p) for name, p in languages.items()], 7
    if panels:
        pictures[samples.DIAGRAM] = panels, 5
    return [name for name, arguments in pictures.items()
            if report.draw_reliability(out_dir / name, *arguments)]


# ------------------------------------------------------------------------------------------------
# The command line
# ------------------------------------------------------------------------------------------------

USAGE = f"""\
usage: python evaluate.py --model=FOLDER_OR_HUB_NAME --tasks=TASK[,TASK] [--key=value ...]
       python evaluate.py --compare FOLDER FOLDER [...]     evaluated runs side by side, or models
                                                            that lm_eval --log_samples evaluated

example: python evaluate.py --model=out/run --tasks=mmlu,arc_easy,my_questions.jsonl --shots=5

The tasks are {', '.join([*BENCHMARKS, *INSTRUCTIONS])},
each also as task:folder-or-file, and files of questions. --tasks=help lists their files, --help
the keys."""


def run(cfg):
    """Do the evaluation `cfg`; return (results, labels of its tasks, the folder of the results).

    Raises ConfigError, DataError or CheckpointError.
    """
    check_eval_config(cfg)
    if not cfg.model:
        raise ConfigError('no model given; for example --model=out/run or '
                          '--model=google/gemma-2-2b')
    device.pick_device(cfg.device)
    cfg = replace(cfg, model=os.path.expanduser(cfg.model))
    folder = checkpoint.fetch(cfg.model, cfg.revision)
    tokenizer = load_model_tokenizer(folder, checkpoint.read_config(folder))
    tasks = load_tasks(cfg)     # fail on a bad task before the model is loaded
    default = Path(folder if Path(cfg.model).is_dir() else
                   f'out/eval/{cfg.model.replace("/", "--")}')
    default = default / f'passes-{cfg.passes}' if cfg.passes else default
    out_dir = Path(os.path.expanduser(cfg.out_dir or default))
    if signal.getsignal(signal.SIGINT) is stop_at_once:     # nothing was written so far
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with ownership.lock(out_dir):
        return evaluate(folder, tokenizer, tasks, cfg, out_dir), result_labels(tasks, cfg), out_dir


def show_prompts(cfg):
    """Print the prompts of --show; without a model as plain text."""
    check_eval_config(cfg)
    tasks, tokenizer = load_tasks(cfg), None
    if cfg.model:
        folder = checkpoint.fetch(cfg.model, cfg.revision, weights=False)
        config = checkpoint.read_config(folder)
        tokenizer = load_model_tokenizer(folder, config)
        cfg = resolve(cfg, folder, config, tokenizer)
    elif cfg.chat != 'none':
        raise ConfigError(f'chat = {cfg.chat}: the template needs the tokenizer of --model')
    for label, task in tasks.items():
        print(f'{label}: {min(cfg.show, len(task.items))} of {len(task.items):,} {task.unit}\n'
              f'{show(task, tokenizer, cfg)}\n')


def create_context(number):
    """Create the CUDA context of a GPU, in which torch will work.

    If that fails, torch says why when it is asked for the GPU.
    """
    with contextlib.suppress(OSError, AttributeError, ctypes.ArgumentError):
        cuda, gpu, context = ctypes.CDLL('libcuda.so.1'), ctypes.c_int(), ctypes.c_void_p()
        if not (cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(gpu), number)):     # 0: no error
            cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), gpu)


def main(argv):
    if argv[:1] == ['--compare']:
        compare.main(argv[1:])
        return
    if not argv:
        raise SystemExit(USAGE)
    cfg = load_config(EvalConfig, argv, USAGE)
    if cfg.tasks == ('help',):
        print(describe_tasks())
        return
    if cfg.show:
        show_prompts(cfg)
        return
    results, labels, out_dir = run(cfg)
    for label in labels:
        print(f'\n{report.task_text(label, results["tasks"][label])}')
    print(f'\nwrote samples.jsonl, results.json, .md, .csv and .tex to {out_dir}')


if __name__ == '__main__':
    try:
        if sys.argv[1:] and sys.argv[1] != '--compare':
            cfg = load_config(EvalConfig, sys.argv[1:], USAGE)
            check_eval_config(cfg)
            processes.start_workers()
            if gpu := re.fullmatch(r'auto|cuda(?::(\d+))?', cfg.device):
                threading.Thread(target=create_context, args=[int(gpu[1] or 0)],
                                 daemon=True).start()
            from runtime import log
            import scoring     # torch and Triton, before Ctrl-C raises
        else:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        gc.freeze()     # what is imported need not be searched for garbage
        gc.enable()
        atexit.register(gc.unfreeze)    # or else Triton reports leaks
        sys.setswitchinterval(5e-4)     # tokenizing must not delay the launch of kernels by 5 ms
        main(sys.argv[1:])
        sys.stdout.flush()
        os._exit(0)     # torch would need half a second to end itself
    except BrokenPipeError:     # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except (ConfigError, DataError, CheckpointError, OSError) as error:
        sys.exit(f'error: {error}')
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError):
            raise
        sys.exit('error: out of GPU memory; lower --batch_rows or --pack_len')
    except KeyboardInterrupt:
        print('stopped; the scored samples are kept, and the same command resumes from there',
              file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
