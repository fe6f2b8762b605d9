"""Crash safety of a training run: checkpoints to resume from, and a graceful shutdown.

out_dir/resume-<step>/ holds in safetensors all that the next step depends on: the trained weights
with the low bits of their master, the Adam moments and the random states. The position in the data
and the learning rate follow from the step. state.json has a checksum of every file and of itself.
It is written last, then the older checkpoint is removed: a complete one exists at any moment.
"""

import contextlib
import functools
import json
import os
import re
import signal
import sys
from pathlib import Path

import torch

from runtime import cli
from runtime.config import run_settings
from runtime.digests import file_digest, json_digest
from runtime.errors import ConfigError, Stopped, TrainingError
from runtime.sources import full_path
from runtime.ownership import LIST, LOCK, check_free, discard, has_written, written_files
from runtime.parallel import gather, gather_full, joined, load_full, rank
from runtime.weights import read_tensors, write_files

FILE_BYTES = 4_000_000_000
# facts that a resumed run must share with the run that wrote the checkpoint, as messages name them
FACTS = {'data': 'training data or end tokens', 'model': 'base model',
         'dtype': 'weights on the device'}


class StopSignals:
    """A context in which the first SIGINT or SIGTERM sets `number` and the next one interrupts."""

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


def run_script(main):
    """Call `main` with the arguments of the command line, also under torchrun."""
    memory = ('--checkpoint_activations, --micro_rows=1 and a shorter --pack_len need less for a '
              'forward pass, --master_weights=compact less for the weights')
    with cli.one_line_errors(memory=memory), joined():
        signal.signal(signal.SIGTERM, cli.stop)
        main(sys.argv[1:])


@contextlib.contextmanager
def notes_how_to_continue(cfg):
    """Add to an exception that interrupts the block how --resume continues the run, if it does."""
    try:
        yield
    except (KeyboardInterrupt, RuntimeError, Stopped) as error:
        if not cfg.dry_run and checkpoints(cfg.out_dir):
            error.add_note('the same command continues' if cfg.resume else
                           '--resume continues from the last checkpoint')
        elif not cfg.dry_run and Path(cfg.out_dir, 'config.json').exists():
            error.add_note('the weights are saved, and --resume makes the card and the report')
        raise


def check_folder(cfg):
    """Raise ConfigError unless out_dir is missing, empty or the folder of a run."""
    out_dir = Path(cfg.out_dir)
    if Path(cfg.model).is_dir() and Path(os.path.realpath(cfg.model)).is_relative_to(
            os.path.realpath(out_dir)):     # unlike Path.resolve it accepts a link to itself
        raise ConfigError(f'out_dir = {cfg.out_dir} holds the model {cfg.model} itself')
    try:
        # a run that is killed while it writes its first list leaves that under a temporary name
        files = {path.name for path in out_dir.iterdir() if not path.name.startswith(f'{LIST}.')}
    except FileNotFoundError:
        files = set()
    except (OSError, ValueError) as error:      # ValueError: a NUL in the name
        raise ConfigError(f'out_dir = {cfg.out_dir!r} is no folder: {error}') from error
    if LIST not in files and files - {LOCK}:
        raise ConfigError(f'out_dir = {cfg.out_dir} is not empty and has no {LIST}, the list of '
                          f'what a run wrote; choose another --out_dir, or move that folder away')


def check_run(cfg, free_keys):
    """Raise ConfigError if the run in out_dir is neither to be resumed nor to be overwritten.

    To be resumed, a run must keep its settings except for `free_keys`.
    """
    out_dir = Path(cfg.out_dir)
    check_free(out_dir, *(path.relative_to(out_dir) for path in out_dir.glob('resume-*/state*')))
    if cfg.resume and (earlier := run_settings(out_dir)):
        for key, value in earlier.items():
            now = getattr(cfg, key, value)
            if key in ('model', 'data'):
                value, now = full_path(str(value)), full_path(now)
            chosen = (key, now) in (('micro_rows', None), ('template', 'auto'))  # by the run itself
            if key not in free_keys and now != value and not chosen:
                raise ConfigError(f'resume: the run in {out_dir} has {key} = {value!r}, not '
                                  f'{now!r}; keep it, or --overwrite the run')
    elif not (cfg.resume or cfg.overwrite) and has_written(out_dir):
        what = 'an earlier run or evaluation'
        if (out_dir / 'config.json').exists():
            what = 'a finished run'
        elif steps := list(checkpoints(out_dir)):
            what = f'a run that was interrupted after step {steps[-1]}: --resume continues it'
        raise ConfigError(f'{cfg.out_dir} holds {what}; --overwrite renames it, or choose another '
                          f'--out_dir')


def checkpoints(out_dir):
    """Return {step: folder} of the complete checkpoints that a run wrote, the newest last."""
    states = (re.fullmatch(r'resume-(\d+)/state\.json', name) for name in written_files(out_dir))
    steps = sorted(int(m[1]) for m in states if m and Path(out_dir, m[0]).exists())
    return {step: Path(out_dir, f'resume-{step}') for step in steps}


def advice(out_dir):
    """Return the last part of an error message: how to continue."""
    folders = checkpoints(out_dir)
    if not folders:
        return 'there is no checkpoint yet'
    step, folder = folders.popitem()
    return f'the last good checkpoint is {folder}: --resume continues after step {step}'


def save_checkpoint(out_dir, step, named, optimizer, facts):
    """Write out_dir/resume-<step>/, state.json last, then remove the older checkpoints.

    named: {name: trained parameter}; facts: {name: JSON value} that a resumed run must share.
    Every process must call this; the first one writes. Raises TrainingError if that fails.
    """
    folder, random = Path(out_dir) / f'resume-{step}', {'cpu': torch.get_rng_state()}
    device = next(iter(named.values())).device
    if device.type == 'cuda':
        random['cuda'] = torch.cuda.get_rng_state(device)
    shares, size = [], FILE_BYTES       # {name: tensor} of each file
    for key, tensor in state_tensors(named, optimizer):
        if size >= FILE_BYTES:
            shares.append({})
            size = 0
        shares[-1][key] = tensor
        size += tensor.numel() * tensor.element_size()
    for number, states in enumerate(gather(random)):
        shares[-1] |= {f'random.{number}.{kind}': state for kind, state in states.items()}
    files = {f'state-{number:05d}.safetensors': functools.partial(_whole, share)
             for number, share in enumerate(shares, 1)}
    try:
        if rank() == 0:
            discard(out_dir, f'{folder.name}/*')
        write_files(folder, files, out_dir)
        if rank() == 0:
            content = {'step': step, 'optimizer_steps': optimizer.steps,
                       'files': {name: file_digest(folder / name) for name in files}} | facts
            write_files(folder, {'state.json': content | {'digest': json_digest(content)}}, out_dir)
    except (OSError, ConfigError) as error:
        discard(out_dir, f'{folder.name}/*')
        raise TrainingError(f'step {step}: saving {folder} failed: {error}; '
                            f'{advice(out_dir)}') from error
    if rank() == 0:     # not above: a failure here must not take the new checkpoint away
        discard(out_dir, 'resume-*', keep=f'{folder.name}/*')


def _whole(share):
    return {key: gather_full(tensor).cpu().contiguous() for key, tensor in share.items()}


def restore(out_dir, named, optimizer, facts):
    """Fill parameters and optimizer from the newest intact checkpoint; return its step, or 0.

    A damaged checkpoint is reported and an older one used. Raises TrainingError if all are damaged
    or if the run has other `facts` than the one that wrote the checkpoint.
    """
    damaged, device = None, next(iter(named.values())).device
    for step, folder in reversed(checkpoints(out_dir).items()):
        path = folder / 'state.json'
        try:
            content = json.loads(path.read_text(encoding='utf-8'))
            if content.pop('digest', None) != json_digest(content):
                raise ValueError('its content does not match its checksum')
            if content['step'] != step:
                raise ValueError(f'it holds step {content["step"]}, not {step}')
            for key, value in facts.items():
                if content[key] != value:
                    raise TrainingError(f'{path} has different {FACTS.get(key, key)}: '
                                        f'{content[key]}, not {value}; --overwrite starts over')
            unread, random = dict(state_tensors(named, optimizer)), {}
            for name, digest in content['files'].items():
                path = folder / name
                if file_digest(path) != digest:
                    raise ValueError('its content does not match its checksum in state.json')
                for key, tensor in read_tensors(path).items():
                    if key.startswith('random.'):
                        random[key] = tensor
                    else:
                        load_full(unread.pop(key), tensor)
            if unread:
                raise ValueError(f'{min(unread)} is missing')
            # a run of fewer processes, or on another device, has no state for this one
            if (state := random.get(f'random.{rank()}.cpu')) is not None:
                torch.set_rng_state(state)
            state = random.get(f'random.{rank()}.cuda')
            if device.type == 'cuda' and state is not None:
                torch.cuda.set_rng_state(state, device)
        except (OSError, ValueError, LookupError, TypeError, AttributeError,
                RecursionError) as error:
            damaged = f'{path} is damaged ({error if type(error) is ValueError else repr(error)})'
            print(f'warning: {damaged}')
            continue
        optimizer.steps = content['optimizer_steps']
        print(f'resuming after step {step}, from {folder}')
        return step
    if damaged:
        raise TrainingError(f'{damaged}, and there is no older checkpoint; --overwrite starts over')
    return 0


def state_tensors(named, optimizer):
    """Yield (name, tensor) of everything that a step changes."""
    for name, parameter in named.items():
        yield f'{name}.weight', parameter
        for key, tensor in optimizer.state[parameter].items():
            yield f'{name}.{key}', tensor
