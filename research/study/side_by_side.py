"""Do the runs of a study side by side: several GPUs, several processes on each.

    nvidia-cuda-mps-control -d
    python research/study/side_by_side.py --seeds=5,6 --gpus=4 --processes=10 --minutes=8
    python research/study/side_by_side.py --study=alignment --seeds=10,11 --processes=24

Each process does many runs, so it starts only once. A run begins as soon as its base model and its
data exist. Finished runs are skipped; a run that fails is reported, and the others continue; a
process that dies is replaced. After --minutes no further run is started: start the script again for
the rest. What the processes print is in out/study/side-by-side/.
"""

import os

# before numpy and torch; the processes inherit it. A compiler of one thread starts none of its own
os.environ.setdefault('OMP_NUM_THREADS', '1')
os.environ.setdefault('TORCHINDUCTOR_COMPILE_THREADS', '1')

import functools
import itertools
import math
import multiprocessing
import sys
import time
import traceback
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from data.tokenizer import load_model_tokenizer
from runtime import checkpoint
from research.common import OUT_DIR, command_line, names_of, seed_folder, seeds_option
from research.study import alignment, closed_form, runs
from research.study.loss_tables import BASES
from research.study.world import make_world
from train import load_sequences


class Job(NamedTuple):
    name: str
    function: object    # picklable, called with `arguments`
    arguments: tuple
    needs: tuple        # files that must exist before
    makes: Path         # its last file


# Jobs of a study: a function of a seed and the study's folder

def tuning_jobs(seed, root, bases, experiments, **changes):
    """Yield the jobs of experiments of runs.py: world, base models, known facts, tuned models."""
    folder, knows = (Path(seed_folder(name, seed, root)) for name in ('base', 'knows'))
    tokenized = folder / 'world-tokenized'
    yield Job(f'{folder}/world', tokenize_world, (seed, root, runs.WORLD), (), tokenized)
    for cfg in runs.base_runs(seed, root):
        if Path(cfg.out_dir).name in bases:
            yield run_job(replace(cfg, **changes), tokenized)
    for experiment in experiments:
        for name in runs.KNOWN_BASES if experiment == 'known' else ():
            yield Job(f'{knows}/{name}', runs.select_known, (seed, root, name),
                      (folder / name / 'config.json',),
                      knows / f'{name}-{runs.KNOWN_DATA[-1]}.jsonl')
        for cfg in runs.EXPERIMENTS[experiment](seed, root):
            yield run_job(replace(cfg, **changes))


def alignment_jobs(seed, root):
    """Yield the jobs of claims 13 and 14: world, tuned models, pairs, aligned models, answers.

    The last file of a model is config.json; that of a world, before its mark, model/config.json.
    """
    folder = Path(alignment.seed_folder(seed, root))
    yield Job(f'{folder}/world', alignment.world, (seed, root), (),
              folder / 'world' / 'model' / 'config.json')
    yield from map(run_job, alignment.base_runs(seed, root))
    yield Job(f'{folder}/pairs', alignment.select, (seed, root), (folder / 'sft' / 'config.json',),
              folder / 'pairs' / 'all.jsonl')
    aligned = [*map(run_job, alignment.runs(seed, root))]
    yield from aligned[:alignment.FIRST]
    for name, scaling in itertools.product(alignment.WRITTEN, alignment.SCALINGS):
        path = alignment.written_folder(seed, root, name, scaling)
        yield Job(f'{path}', alignment.write_answers, (seed, root, name, scaling),
                  (folder / name / 'results.json',), path / 'results.json')
    yield from aligned[alignment.FIRST:]


def closed_form_jobs(seed, root):
    """Yield the jobs of claim 15: world, base model, SFT, data, and the aligned models."""
    folder = Path(alignment.seed_folder(seed, root))
    yield from (job for job in alignment_jobs(seed, root)
                if Path(job.name).name in ('world', 'base', 'sft'))
    yield Job(f'{folder}/pairs', closed_form.prepare, (seed, root), tuple(
        folder / name / 'config.json' for name in ('base', 'sft')), folder / 'pairs' / 'own.jsonl')
    yield from map(run_job, closed_form.runs(seed, root))


def run_job(cfg, *needs):
    """Return the job of a run; it needs its model and its data, if nothing else."""
    epochs = alignment.epochs_before(cfg)
    last = Path(cfg.out_dir, f'report-{epochs[-1]}' if epochs else '', 'results.json')
    return Job(cfg.out_dir, fit, (cfg,), needs or (f'{cfg.model}/config.json', cfg.data), last)


# {name for --study: (function that yields the jobs of a seed, seeds, whether a job is done for all
# seeds before the next one)}. The order of the alignment jobs is that of PLAN.md's questions; in
# `smoothing` nothing is compiled: on a fresh machine that takes longer than these runs
STUDIES = {
    'losses': (functools.partial(tuning_jobs, bases=BASES, experiments=(
        'losses', 'known', 'transfer')), runs.LATER_SEEDS, False),
    'alignment': (alignment_jobs, alignment.SEEDS, True),
    'closed-form': (closed_form_jobs, alignment.SEEDS, True),
    'smoothing': (functools.partial(tuning_jobs, bases=['base'], experiments=['smoothing'],
                                    compile=False, attention='explicit'), (0,), False)}


def jobs_of(study, seeds, root):
    function, usual_seeds, in_turn = STUDIES[study]
    jobs = [[*function(seed, root)] for seed in seeds or usual_seeds]
    return [*itertools.chain(*(zip(*jobs, strict=True) if in_turn else jobs))]


# What a process does

def tokenize_world(seed, root, spec):
    """Make the world of a seed and tokenize its text, which all base models read."""
    make_world(f'{seed_folder("base", seed, root)}/world', seed, spec)
    cfg = next(runs.base_runs(seed, root))
    load_sequences(cfg, load_model_tokenizer(
        cfg.model, checkpoint.read_config(cfg.model, cfg.shape)))
    Path(seed_folder('base', seed, root), 'world-tokenized').touch()


kind = None         # of the last run in this process


def fit(cfg):
    """Do a run; forget the compiled code of models of another shape."""
    global kind
    before, kind = kind, (Path(cfg.out_dir if cfg.from_scratch else cfg.model).name, cfg.lora)
    if before not in (None, kind):
        torch.compiler.reset()
    alignment.fit(cfg)


def begin(numbers, gpus, folder):
    """Give this process its GPU and a file for what it prints."""
    number = numbers.get()
    if gpus:
        os.environ['CUDA_VISIBLE_DEVICES'] = str(number % gpus)
    with open(f'{folder}/process-{number}.log', 'a') as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def perform(job):
    """Return (seconds, what went wrong or None); the traceback is in the file of the process."""
    print(f'\n=== {job.name}', flush=True)
    started, error = time.perf_counter(), None
    try:
        job.function(*job.arguments)
    except Exception as exception:
        traceback.print_exc()
        if isinstance(exception, torch.AcceleratorError):
            os._exit(1)         # no later run of this process could use its GPU
        error = f'{type(exception).__name__}: {exception}'
    return time.perf_counter() - started, error


# The processes

def do_all(jobs, pool, n_processes, deadline):
    """Do the jobs in this order as soon as their files exist; return the names that failed."""
    waiting, running, failed = [job for job in jobs if not job.makes.exists()], {}, []
    n_jobs = len(waiting)
    while True:
        ready = [job for job in waiting if all(Path(file).exists() for file in job.needs)]
        for job in ready[:n_processes - len(running)] if time.monotonic() < deadline else ():
            waiting.remove(job)
            running[pool.submit(perform, job)] = job
        if not running:
            print(f'{len(failed)} failed, {len(waiting)} not started')
            return failed
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            job, (seconds, error) = running.pop(future), future.result()
            failed += [job.name] * bool(error)
            print(f'{n_jobs - len(waiting) - len(running)}/{n_jobs}  {job.name}  {seconds:.0f} s'
                  + f'  failed: {error}' * bool(error), flush=True)


def side_by_side(jobs, n_processes, gpus, folder, deadline=math.inf, starts=3):
    """Do the jobs in `n_processes`; return the names that failed.

    If a process dies, all start again with what is left, `starts` times at most.
    """
    spawn = multiprocessing.get_context('spawn')
    for _ in range(starts):
        numbers = spawn.Queue()
        for number in range(n_processes):
            numbers.put(number)
        try:
            with ProcessPoolExecutor(n_processes, spawn, begin, (numbers, gpus, folder)) as pool:
                return do_all(jobs, pool, n_processes, deadline)
        except BrokenProcessPool:
            print(f'a process died, see {folder}/process-*.log; starting again', flush=True)
    sys.exit(f'error: processes died {starts} times; {folder}/process-*.log has their last words')


def main():
    options = command_line(
        __doc__, study=names_of(STUDIES, 'losses'),
        seeds=seeds_option(None, 'all seeds of the study'),
        gpus={'type': int, 'default': 1, 'help': '0: none; default: %(default)s'},
        processes={'type': int, 'default': 10, 'help': 'per GPU; default: %(default)s'},
        minutes={'type': float, 'default': math.inf, 'help': 'start no run after them'},
        out_dir=OUT_DIR)
    deadline = time.monotonic() + 60 * options.minutes
    folder, n = Path(options.out_dir) / 'side-by-side', max(1, options.gpus) * options.processes
    folder.mkdir(parents=True, exist_ok=True)
    jobs = [job for study in options.study
            for job in jobs_of(study, options.seeds, options.out_dir)]
    sys.exit(bool(side_by_side(jobs, n, options.gpus, folder, deadline)))


if __name__ == '__main__':
    main()
