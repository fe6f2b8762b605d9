"""Crash safety of a training run: checkpoints to resume from, and a graceful shutdown.

out_dir/resume-<step>/ holds in safetensors all that the next step depends on: the trained weights
with the low 16 bits of their float32 master, the Adam moments, the random states. Data positions
and learning rates follow from the step. state.json is written last, and only then the checkpoint
before it is removed, so there is a complete one at any moment.
"""

import json
import re
import signal
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from results.samples import OUTPUTS
from runtime.checkpoint import SIDE_FILES, write_tensors
from runtime.config import read_assignments
from runtime.errors import CheckpointError, ConfigError, TrainingError
from runtime.ownership import LIST, LOCK, claim, discard, write_text, written_files
from runtime.parallel import fill, gather, rank, whole

FILE_BYTES = 4_000_000_000
# what a resumed run must have in common with the run that wrote the checkpoint
FACTS = {'data': 'training data', 'model': 'base model', 'dtype': 'weights on the device'}

# what a run writes into its folder
MODEL_FILES = ('config.json', 'model*.safetensors*', *SIDE_FILES)
REPORT_FILES = (*OUTPUTS, 'reliability*.png')
RUN_FILES = ('train_config.py', 'log.jsonl', 'loss.png', 'adapter/adapter_*', 'resume-*/state*',
             *MODEL_FILES, *REPORT_FILES, *(f'epoch-*/{name}' for name in MODEL_FILES),
             *(f'before/{name}' for name in REPORT_FILES))


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
    files = {path.name for path in out_dir.iterdir()} if out_dir.exists() else set()
    if files - {LOCK, f'{LIST}.tmp'} and LIST not in files:
        raise ConfigError(f'out_dir = {cfg.out_dir} is not empty and has no {LIST}, the '
                          f'list of the files that a run wrote, so nothing in it is touched; '
                          f'choose another --out_dir, or move that folder away')
    written = written_files(out_dir)
    listed = {Path(name) for name in written} | {
        Path('before', name) for name in written_files(out_dir / 'before')}
    for path in sorted(path for pattern in RUN_FILES for path in out_dir.glob(pattern)):
        if path.is_file() and path.relative_to(out_dir) not in listed:
            raise ConfigError(f'{path} was not written by a run, and a run would replace it; move '
                              f'it away or choose another --out_dir')
    before = out_dir / 'train_config.py'
    if cfg.resume and before.exists():
        for key, (value, _) in read_assignments(before).items():
            if key not in free_keys and getattr(cfg, key, value) != value:
                raise ConfigError(f'resume: the run in {out_dir} has {key} = {value!r}, not '
                                  f'{getattr(cfg, key)!r}; keep it, or --overwrite the run')
    elif any(Path(out_dir, name).exists() for name in written) and not (
            cfg.resume or cfg.overwrite):
        what = 'an earlier run or evaluation'
        if (out_dir / 'config.json').exists():
            what = 'a finished run'
        elif steps := list(checkpoints(out_dir)):
            what = f'a run that was interrupted after step {steps[-1]}: --resume continues it'
        raise ConfigError(f'{cfg.out_dir} holds {what}; --overwrite replaces it, or choose another '
                          f'--out_dir')


def checkpoints(out_dir):
    """Return {step: folder} of the complete checkpoints that a run wrote, the newest last."""
    states = [Path(out_dir, name) for name in written_files(out_dir)
              if re.fullmatch(r'resume-\d+/state\.json', name)]
    found = {int(path.parent.name[7:]): path.parent for path in states if path.exists()}
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
    folder, files, tensors = Path(out_dir) / f'resume-{step}', [], {}
    device = next(iter(named.values())).device
    random = {'cpu': torch.get_rng_state()}
    if device.type == 'cuda':
        random['cuda'] = torch.cuda.get_rng_state(device)
    every_random = gather(random)

    def write():
        if rank() == 0:
            files.append(f'state-{len(files) + 1:05d}.safetensors')
            claim(out_dir, files[-1], below=folder.name)
            folder.mkdir(exist_ok=True)
            write_tensors(folder / files[-1], tensors)
        tensors.clear()

    try:
        if rank() == 0:
            discard(out_dir, f'{folder.name}/*')
        for key, tensor in state_tensors(named, optimizer):
            tensors[key] = whole(tensor).cpu().contiguous()
            if sum(t.nbytes for t in tensors.values()) > FILE_BYTES:
                write()
        for number, states in enumerate(every_random):
            tensors |= {f'random.{number}.{kind}': state for kind, state in states.items()}
        write()
        if rank() == 0:
            content = {'step': step, 'optimizer_steps': optimizer.steps, 'files': files} | facts
            claim(out_dir, 'state.json', below=folder.name)
            write_text(folder / 'state.json', json.dumps(content, indent=1))
    except (OSError, CheckpointError, ConfigError) as error:
        discard(out_dir, f'{folder.name}/*')
        raise TrainingError(f'step {step}: saving {folder} failed: {error}; '
                            f'{advice(out_dir)}') from error
    if rank() == 0:     # not above: a failure here must not take the new checkpoint away
        discard(out_dir, 'resume-*', keep=f'{folder.name}/*')


def restore(out_dir, named, optimizer, facts):
    """Fill parameters and optimizer from the newest readable checkpoint; return its step, or 0.

    A damaged checkpoint is reported, and an older one used. Raises TrainingError if all are damaged
    or if the run has other `facts` than the one that wrote the checkpoint.
    """
    damaged = None
    for step, folder in reversed(checkpoints(out_dir).items()):
        wanted, random = dict(state_tensors(named, optimizer)), {}
        path = folder / 'state.json'
        try:
            content = json.loads(path.read_text(encoding='utf-8'))
            for key, value in facts.items():
                if content[key] != value:
                    raise TrainingError(f'{path}: the checkpoint is of different '
                                        f'{FACTS.get(key, key)}: {content[key]}, and this run has '
                                        f'{value}; use the same, or --overwrite to start over')
            steps = int(content['optimizer_steps'])
            for path in [folder / str(name) for name in content['files']]:
                with safe_open(path, framework='pt') as tensors:
                    for key in tensors.keys():
                        if key.startswith('random.'):
                            random[key] = tensors.get_tensor(key)
                        else:
                            fill(wanted.pop(key), tensors.get_tensor(key))
            if wanted:
                raise ValueError(f'{min(wanted)} is missing')
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            damaged = f'{path} is damaged ({error!r})'
            print(f'warning: {damaged}')
            continue
        optimizer.steps = steps
        device = next(iter(named.values())).device
        if f'random.{rank()}.cpu' in random:
            torch.set_rng_state(random[f'random.{rank()}.cpu'])
        if f'random.{rank()}.cuda' in random and device.type == 'cuda':
            torch.cuda.set_rng_state(random[f'random.{rank()}.cuda'], device)
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
