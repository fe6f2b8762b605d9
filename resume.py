"""Crash safety of a training run: checkpoints to resume from, and a graceful shutdown.

out_dir/resume-<step>/ holds in safetensors all that the next step depends on: the trained weights
with the low 16 bits of their float32 master, the Adam moments, the random states. Data positions
and learning rates follow from the step. state.json is written last, and only then the checkpoint
before it is removed, so there is a complete one at any moment.
"""

import json
import os
import re
import signal
from dataclasses import fields
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from checkpoint import SIDE_FILES, CheckpointError, write_tensors
from configs import ConfigError, read_assignments
from outdir import LIST, claim, discard, foreign_file, is_empty, write_text, written_files
from parallel import fill, gather, rank, whole
from samples import OUTPUTS

FILE_BYTES = 4_000_000_000
# what a resumed run must have in common with the run that wrote the checkpoint
FACTS = {'data': 'training data', 'model': 'base model', 'dtype': 'weights on the device'}


# what a run writes into its folder
MODEL_FILES = ('config.json', 'model*.safetensors*', *SIDE_FILES)
REPORT_FILES = (*OUTPUTS, 'reliability*.png')
RUN_FILES = ('train_config.py', 'log.jsonl', 'loss.png', 'adapter/adapter_*', 'resume-*/state*',
             *MODEL_FILES, *REPORT_FILES, *(f'epoch-*/{name}' for name in MODEL_FILES),
             *(f'before/{name}' for name in REPORT_FILES))


class TrainingError(RuntimeError):
    """The run cannot continue; the message says at which step it stopped, and why."""


class DamagedCheckpoint(RuntimeError):
    """A checkpoint that cannot be read; the message names the file."""


class Stopped(Exception):
    """The run was asked to stop and has saved a checkpoint; `signal` is the signal's number."""

    def __init__(self, message, number):
        super().__init__(message)
        self.signal = number


class StopSignals:
    """A context in which the first SIGINT or SIGTERM sets `number`; the next one interrupts."""

    def __enter__(self):
        self.number = 0
        self.before = {s: signal.signal(s, self.note) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def note(self, number, _):
        if self.number:
            raise KeyboardInterrupt
        self.number = number

    def __exit__(self, *_):
        for number, handler in self.before.items():
            signal.signal(number, handler)


def check_folder(cfg, free_keys):
    """Raise ConfigError unless out_dir is empty, or holds a run that is to be resumed or replaced.

    A resumed run must have the same settings as before, except for `free_keys`.
    """
    out_dir = Path(cfg.out_dir)
    if out_dir.exists() and not out_dir.is_dir():
        raise ConfigError(f'out_dir = {cfg.out_dir} is a file; a run needs a folder')
    if Path(cfg.model).is_dir() and Path(cfg.model).resolve().is_relative_to(out_dir.resolve()):
        raise ConfigError(f'out_dir = {cfg.out_dir} holds the model {cfg.model} itself')
    written = written_files(out_dir)
    if written is None and not is_empty(out_dir):
        raise ConfigError(f'out_dir = {cfg.out_dir} is not empty and has no {LIST}, the '
                          f'list of the files that a run wrote, so nothing in it is touched; '
                          f'choose another --out_dir, or move that folder away')
    if foreign := foreign_file(out_dir, RUN_FILES):
        raise ConfigError(f'{foreign} was not written by a run, and a run would replace it; move '
                          f'it away or choose another --out_dir')
    before = out_dir / 'train_config.py'
    if cfg.resume and before.exists():
        values = read_assignments(before)
        for key in {f.name for f in fields(cfg)} - free_keys:
            if key in values and values[key][0] != getattr(cfg, key):
                raise ConfigError(f'resume: the run in {out_dir} has {key} = {values[key][0]!r}, '
                                  f'not {getattr(cfg, key)!r}; keep it, or --overwrite the run')
    elif written and not (cfg.resume or cfg.overwrite):
        what = 'files of an earlier run or evaluation: --overwrite replaces them'
        if (out_dir / 'config.json').exists():
            what = 'a finished run: --overwrite replaces it'
        elif steps := list(checkpoints(out_dir)):
            what = (f'a run that was interrupted after step {steps[-1]}: --resume continues it, '
                    f'--overwrite replaces it')
        raise ConfigError(f'{cfg.out_dir} holds {what}, or choose another --out_dir')


def checkpoints(out_dir):
    """Return {step: folder} of the complete checkpoints that a run wrote, the newest last."""
    found = {int(name[7:-11]): Path(out_dir) / name[:-11] for name in written_files(out_dir) or ()
             if re.fullmatch(r'resume-\d+/state\.json', name) and (Path(out_dir) / name).exists()}
    return dict(sorted(found.items()))


def advice(out_dir):
    """Return how to continue after an error, as the end of a sentence."""
    found = checkpoints(out_dir)
    if not found:
        return 'there is no checkpoint yet'
    step, folder = found.popitem()
    return f'the last good checkpoint is {folder}: --resume continues after step {step}'


def save_checkpoint(out_dir, step, named, optimizer, facts):
    """Write out_dir/resume-<step>/, state.json last, then remove the older checkpoints.

    named: {name: trained parameter}; facts: what a resumed run must have in common, for JSON. All
    processes take part and the first one writes. Raises TrainingError if that fails.
    """
    folder = Path(out_dir) / f'resume-{step}'
    random = gather(random_state(next(iter(named.values())).device))
    files, tensors = [], {}

    def write():
        if rank() == 0:
            path = folder / f'state-{len(files) + 1:05d}.safetensors'
            claim(out_dir, path.relative_to(out_dir))
            folder.mkdir(exist_ok=True)
            write_tensors(f'{path}.tmp', tensors)
            os.replace(f'{path}.tmp', path)
            files.append(path.name)
        tensors.clear()

    try:
        if rank() == 0:
            discard(out_dir, folder.name)
        for key, tensor in state_tensors(named, optimizer):
            tensors[key] = whole(tensor).cpu().contiguous()
            if sum(t.nbytes for t in tensors.values()) > FILE_BYTES:
                write()
        for number, states in enumerate(random):
            tensors |= {f'random.{number}.{device}': state for device, state in states.items()}
        write()
        if rank() == 0:
            content = {'step': step, 'optimizer_steps': optimizer.steps, 'files': files} | facts
            claim(out_dir, f'{folder.name}/state.json')
            write_text(folder / 'state.json', json.dumps(content, indent=1))
            discard_checkpoints(out_dir, keep=folder.name)
    except (OSError, CheckpointError, ConfigError) as error:
        discard(out_dir, folder.name)
        raise TrainingError(f'step {step}: saving {folder} failed: {error}; '
                            f'{advice(out_dir)}') from error


def discard_checkpoints(out_dir, keep=None):
    """Delete the checkpoints that runs in `out_dir` wrote, complete or not, except `keep`."""
    for folder in {name.partition('/')[0] for name in written_files(out_dir) or ()}:
        if re.fullmatch(r'resume-\d+', folder) and folder != keep:
            discard(out_dir, folder)


def restore(out_dir, named, optimizer, facts):
    """Fill parameters and optimizer from the newest readable checkpoint; return its step, or 0.

    A damaged checkpoint is reported, and an older one used. Raises TrainingError if all are damaged
    or if the run has other `facts` than the one that wrote the checkpoint.
    """
    damaged = None
    for step, folder in reversed(checkpoints(out_dir).items()):
        try:
            read_checkpoint(folder, named, optimizer, facts)
        except DamagedCheckpoint as error:
            print(f'warning: {error}')
            damaged = error
            continue
        print(f'resuming after step {step}, from {folder}')
        return step
    if damaged:
        raise TrainingError(f'{damaged}, and there is no older checkpoint; --overwrite starts over')
    return 0


def read_checkpoint(folder, named, optimizer, facts):
    """Fill parameters, optimizer and random states; raise DamagedCheckpoint or TrainingError."""
    path = folder / 'state.json'
    try:
        content = json.loads(path.read_text(encoding='utf-8'))
        names, steps = content['files'], int(content['optimizer_steps'])
        before = {key: content[key] for key in facts}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpoint(f'{path} is damaged ({error!r})') from error
    for key, value in facts.items():
        if before[key] != value:
            raise TrainingError(f'{path}: the checkpoint is of different {FACTS.get(key, key)}: '
                                f'{before[key]}, and this run has {value}; use the same, or '
                                f'--overwrite to start over')
    wanted, random = dict(state_tensors(named, optimizer)), {}
    for path in (folder / str(name) for name in names):
        try:
            with safe_open(path, framework='pt') as tensors:
                for key in tensors.keys():
                    if key.startswith('random.'):
                        random[key] = tensors.get_tensor(key)
                    else:
                        fill(wanted.pop(key), tensors.get_tensor(key))
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise DamagedCheckpoint(f'{path} is damaged ({error!r})') from error
    if wanted:
        raise DamagedCheckpoint(f'{folder}: {min(wanted)} is missing')
    optimizer.steps = steps
    device = next(iter(named.values())).device
    if f'random.{rank()}.cpu' in random:
        torch.set_rng_state(random[f'random.{rank()}.cpu'])
    if f'random.{rank()}.cuda' in random and device.type == 'cuda':
        torch.cuda.set_rng_state(random[f'random.{rank()}.cuda'], device)


def random_state(device):
    """Return {'cpu': state, 'cuda': state} of the random generators that a step uses."""
    states = {'cpu': torch.get_rng_state()}
    return states | ({'cuda': torch.cuda.get_rng_state(device)} if device.type == 'cuda' else {})


def state_tensors(named, optimizer):
    """Yield (name, tensor) of everything that a step changes."""
    for name, parameter in named.items():
        yield f'{name}.weight', parameter
        for key, tensor in optimizer.state[parameter].items():
            yield f'{name}.{key}', tensor
