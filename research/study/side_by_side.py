"""Do the runs of a study side by side: several GPUs, several processes on each.

    nvidia-cuda-mps-control -d
    python research/study/side_by_side.py --seeds=5,6 --gpus=4 --processes=10

A run begins once its base model and its data exist. Finished runs are skipped; a run that fails is
reported, and the others continue. If a process dies, start the script again for the rest. What the
processes print is in out/study/side-by-side/.
"""

import os

# before numpy and torch; the processes inherit it. A compiler of one thread starts none of its own
os.environ.setdefault('OMP_NUM_THREADS', '1')
os.environ.setdefault('TORCHINDUCTOR_COMPILE_THREADS', '1')

import functools
import itertools
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

from research.common import OUT_DIR, command_line, names_of, seed_folder, seeds_option
from research.study import runs
from research.study.loss_tables import BASES
from research.study.world import make_world
from train import train_and_report


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
    yield Job(f'{folder}/world', make_world, (f'{folder}/world', seed, runs.WORLD), (),
              folder / 'world' / 'model' / 'config.json')       # the last file before its mark
    for cfg in runs.base_runs(seed, root):
        if Path(cfg.out_dir).name in bases:
            yield run_job(replace(cfg, **changes))
    for experiment in experiments:
        for name in runs.KNOWN_BASES if experiment == 'known' else ():
            yield Job(f'{knows}/{name}', runs.select_known, (seed, root, name),
                      (folder / name / 'config.json',),
                      knows / f'{name}-{runs.KNOWN_DATA[-1]}.jsonl')
        for cfg in runs.EXPERIMENTS[experiment](seed, root):
            yield run_job(replace(cfg, **changes))


def run_job(cfg):
    """Return the job of a run, which needs the last file of its model, and its data."""
    return Job(cfg.out_dir, fit, (cfg,), (f'{cfg.model}/config.json', cfg.data),
               Path(cfg.out_dir, 'results.json'))


# {name for --study: (function that yields the jobs of a seed, seeds)}. A job is done for all seeds
# before the next one. In `smoothing` nothing is compiled: on a fresh machine that takes longer
STUDIES = {
    'losses': (functools.partial(tuning_jobs, bases=BASES, experiments=(
        'losses', 'known', 'transfer')), runs.LATER_SEEDS),
    'smoothing': (functools.partial(tuning_jobs, bases=['base'], experiments=['smoothing'],
                                    compile=False, attention='explicit'), (0,))}


def jobs_of(study, seeds, root):
    function, usual_seeds = STUDIES[study]
    jobs = [function(seed, root) for seed in seeds or usual_seeds]
    return [*itertools.chain(*zip(*jobs, strict=True))]


# What a process does

kind = None         # of the last run in this process


def fit(cfg):
    """Do a run; forget the compiled code of models of another shape."""
    global kind
    model = cfg.out_dir if cfg.from_scratch else cfg.model.removesuffix('/model')
    before, kind = kind, (Path(model).name, cfg.lora)
    if before not in (None, kind):
        torch.compiler.reset()
    train_and_report(replace(cfg, resume=True))
    if torch.cuda.is_available():
        torch.cuda.empty_cache()        # for the other processes of this GPU


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

def do_all(jobs, pool, n_processes):
    """Do the jobs in this order as soon as their files exist; return the names that failed."""
    waiting, running, failed = [job for job in jobs if not job.makes.exists()], {}, []
    n_jobs = len(waiting)
    while True:
        ready = [job for job in waiting if all(Path(file).exists() for file in job.needs)]
        for job in ready[:n_processes - len(running)]:
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


def side_by_side(jobs, n_processes, gpus, folder):
    """Do the jobs in `n_processes`; return the names that failed. All stop if a process dies."""
    spawn = multiprocessing.get_context('spawn')
    numbers = spawn.Queue()
    for number in range(n_processes):
        numbers.put(number)
    try:
        with ProcessPoolExecutor(n_processes, spawn, begin, (numbers, gpus, folder)) as pool:
            return do_all(jobs, pool, n_processes)
    except BrokenProcessPool:
        sys.exit(f'error: a process died, {folder}/process-*.log has its last words; the same '
                 f'command does what is left')


def main():
    options = command_line(
        __doc__, study=names_of(STUDIES, 'losses'),
        seeds=seeds_option(None, 'all seeds of the study'),
        gpus={'type': int, 'default': 1, 'help': '0: none; default: %(default)s'},
        processes={'type': int, 'default': 10, 'help': 'per GPU; default: %(default)s'},
        out_dir=OUT_DIR)
    folder, n = Path(options.out_dir) / 'side-by-side', max(1, options.gpus) * options.processes
    folder.mkdir(parents=True, exist_ok=True)
    jobs = [job for study in options.study
            for job in jobs_of(study, options.seeds, options.out_dir)]
    sys.exit(bool(side_by_side(jobs, n, options.gpus, folder)))


if __name__ == '__main__':
    main()
