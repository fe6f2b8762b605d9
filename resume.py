"""What lets a training run survive: checkpoints to go on from, a lock, and a gentle stop.

out_dir/resume-<step>/ holds, in safetensors, all that the next step depends on: the trained weights
with the bits that float32 has more, the Adam moments, the random states. Data positions and
learning rates follow from the step. state.json is written last, and only then the checkpoint before
it is removed, so there is a complete one at any moment.

out_dir/written.json lists the files that runs wrote there. Nothing else is ever deleted or replaced.
"""

import contextlib
import fcntl
import json
import os
import re
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch.distributed.tensor import DTensor, distribute_tensor

from configs import ConfigError
from model import CheckpointError, write_tensors

FILE_BYTES = 4_000_000_000
# what a resumed run must have in common with the run that wrote the checkpoint
FACTS = {'data': 'training data', 'model': 'base model'}


class TrainingError(RuntimeError):
    """The run cannot go on; the message says at which step it stopped and why."""


class Stopped(Exception):
    """The run was asked to stop, and has saved what --resume needs; `signal` is the number."""

    def __init__(self, message, number):
        super().__init__(message)
        self.signal = number


def rank():
    """This process's number among those that torchrun started; 0 without torchrun."""
    return dist.get_rank() if dist.is_initialized() else 0


def world():
    """The number of processes that torchrun started; 1 without torchrun."""
    return dist.get_world_size() if dist.is_initialized() else 1


def lock(folder):
    """Makes the folder this process's own until the returned file is closed; TrainingError."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    file = open(Path(folder) / '.lock', 'w')
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)    # gone with the process, however it ends
    except BlockingIOError:
        file.close()
        raise TrainingError(f'{folder}: another run is writing there; choose another '
                            f'--out_dir') from None
    return file


LIST = 'written.json'


def written_files(folder):
    """Relative paths of the files in `folder` that this program wrote; None if it has no list."""
    path = Path(folder) / LIST
    try:
        return list(json.loads(path.read_text(encoding='utf-8'))['files'])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f'{path}: not a list of the files that a run wrote ({error!r}); move '
                          f'the folder away or choose another --out_dir') from error


def claim(folder, *names):
    """Put files that are about to be written on the folder's list; `names` are relative to it.

    Raises ConfigError for a file that exists and is not on the list: somebody else wrote it.
    """
    folder, names = Path(folder), [Path(name).as_posix() for name in names]
    listed = written_files(folder) or []
    for name in names:
        if name not in listed and (folder / name).exists():
            raise ConfigError(f'{folder / name} was not written by a run of this folder and is not '
                              f'replaced; move it away or choose another --out_dir')
    new = [name for name in names if name not in listed]
    if new:
        _write_list(folder, listed + new)


def discard(folder, under=''):
    """Delete the listed files of `folder` (those below its subfolder `under`), and no others.

    Subfolders that this leaves empty go too.
    """
    folder, listed = Path(folder), written_files(folder) or []
    gone = [name for name in listed if name.startswith(f'{under}/' if under else '')]
    # what says that the rest is complete goes first
    for name in sorted(gone, key=lambda name: Path(name).name not in ('config.json', 'state.json')):
        (folder / name).unlink(missing_ok=True)
        (folder / f'{name}.tmp').unlink(missing_ok=True)
    for parent in sorted({p for name in gone for p in Path(name).parents} - {Path('.')},
                         key=lambda p: -len(p.parts)):
        with contextlib.suppress(OSError):      # holds a file that is not ours
            (folder / parent).rmdir()
    if gone:
        _write_list(folder, [name for name in listed if name not in gone])


def _write_list(folder, names):
    folder.mkdir(parents=True, exist_ok=True)
    if not names:
        (folder / LIST).unlink(missing_ok=True)
        return
    part = folder / f'{LIST}.tmp'
    part.write_text(json.dumps({'files': names}, indent=0) + '\n', encoding='utf-8')
    os.replace(part, folder / LIST)


class StopSignals:
    """Within it the first SIGINT or SIGTERM is noted in `number`; a second one ends at once."""

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


def checkpoints(out_dir):
    """{step: folder} of the complete checkpoints that runs in `out_dir` wrote, the newest last."""
    listed = written_files(out_dir) or []
    found = {int(name[7:-11]): Path(out_dir) / name[:-11] for name in listed
             if re.fullmatch(r'resume-\d+/state.json', name) and (Path(out_dir) / name).exists()}
    return dict(sorted(found.items()))


def remedy(out_dir):
    """How to go on after an error, as the end of a sentence."""
    found = checkpoints(out_dir)
    if not found:
        return 'there is no checkpoint yet'
    step, folder = found.popitem()
    return f'the last good checkpoint is {folder}, after step {step}: --resume goes on from there'


def save(out_dir, step, named, optimizer, facts):
    """Writes out_dir/resume-<step>/, state.json last, and then removes the older ones.

    named: {name: trained parameter}; facts: what must be the same when going on, for JSON. All
    processes take part, the first one writes. Raises TrainingError where that fails.
    """
    folder = Path(out_dir) / f'resume-{step}'
    random = gather(random_state(next(iter(named.values())).device))
    files, names = [{}], []

    def place(name):
        claim(out_dir, f'{folder.name}/{name}')
        folder.mkdir(exist_ok=True)
        return folder / f'{name}.tmp'

    def flush():
        if rank() == 0:
            names.append(f'state-{len(names) + 1:05d}.safetensors')
            write_tensors(place(names[-1]), files[0])
            os.replace(folder / f'{names[-1]}.tmp', folder / names[-1])
        files[0] = {}

    try:
        if rank() == 0:
            discard(out_dir, folder.name)
        for key, tensor in _tensors(named, optimizer):
            files[0][key] = _whole(tensor).cpu().contiguous()
            if sum(t.nbytes for t in files[0].values()) > FILE_BYTES:
                flush()
        for r, states in enumerate(random):
            files[0] |= {f'random.{r}.{device}': state for device, state in states.items()}
        flush()
        if rank() == 0:
            content = {'step': step, 'optimizer_steps': optimizer.steps, 'files': names} | facts
            place('state.json').write_text(json.dumps(content, indent=1), encoding='utf-8')
            os.replace(folder / 'state.json.tmp', folder / 'state.json')
    except (OSError, CheckpointError, ConfigError) as error:
        discard(out_dir, folder.name)
        raise TrainingError(f'step {step}: saving {folder} failed: {error}; '
                            f'{remedy(out_dir)}') from error
    if rank() == 0:
        discard_checkpoints(out_dir, keep=folder.name)


def discard_checkpoints(out_dir, keep=None):
    """Delete the checkpoints that runs in `out_dir` wrote, complete or not, all but `keep`."""
    listed = written_files(out_dir) or []
    for folder in {name.partition('/')[0] for name in listed if name.startswith('resume-')}:
        if folder != keep:
            discard(out_dir, folder)


def restore(out_dir, named, optimizer, facts):
    """Puts the newest readable checkpoint into parameters and optimizer; returns its step.

    0 if there is none. A damaged one is reported, and the one before it taken; if all are damaged,
    or the run would not be the same, raises TrainingError.
    """
    damaged = None
    for step, folder in reversed(checkpoints(out_dir).items()):
        try:
            _read(folder, named, optimizer, facts)
        except _Damaged as error:
            print(f'warning: {error}')
            damaged = error
            continue
        print(f'going on after step {step}, from {folder}')
        return step
    if damaged:
        raise TrainingError(f'{damaged}, and there is no older checkpoint; --overwrite begins anew')
    return 0


class _Damaged(RuntimeError):
    """A checkpoint that cannot be read; the message names the file."""


def _read(folder, named, optimizer, facts):
    path = folder / 'state.json'
    try:
        content = json.loads(path.read_text(encoding='utf-8'))
        names, steps = content['files'], int(content['optimizer_steps'])
        before = {key: content[key] for key in facts}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _Damaged(f'{path} is damaged ({error!r})') from error
    for key, value in facts.items():
        if before[key] != value:
            raise TrainingError(f'{path}: the run began with other {FACTS.get(key, key)} '
                                f'({before[key]}, now {value}); go on with what it began with, or '
                                f'--overwrite to begin anew')
    wanted, states = dict(_tensors(named, optimizer)), {}
    device = next(iter(named.values())).device
    for name in names:
        path = folder / str(name)
        try:
            with safe_open(path, framework='pt') as tensors:
                for key in tensors.keys():
                    if key.startswith('random.'):
                        states[key] = tensors.get_tensor(key)
                    else:
                        _fill(wanted.pop(key), tensors.get_tensor(key))
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise _Damaged(f'{path} is damaged ({error!r})') from error
    if wanted:
        raise _Damaged(f'{folder}: {min(wanted)} is missing')
    optimizer.steps = steps
    if f'random.{rank()}.cpu' in states:
        torch.set_rng_state(states[f'random.{rank()}.cpu'])
    if f'random.{rank()}.cuda' in states and device.type == 'cuda':
        torch.cuda.set_rng_state(states[f'random.{rank()}.cuda'], device)


def random_state(device):
    states = {'cpu': torch.get_rng_state()}
    return states | ({'cuda': torch.cuda.get_rng_state(device)} if device.type == 'cuda' else {})


def gather(value):
    """[value of process 0, value of process 1, ...]"""
    values = [value] * world()
    if world() > 1:
        dist.all_gather_object(values, value)
    return values


def _tensors(named, optimizer):
    for name, parameter in named.items():
        yield f'{name}.weight', parameter
        for key, tensor in optimizer.state[parameter].items():
            yield f'{name}.{key}', tensor


def _whole(tensor):
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.dtype == torch.int16:     # which NCCL cannot send
        return tensor.int().full_tensor().short()
    return tensor.full_tensor()


def _fill(target, whole):
    target = target.detach()
    if target.shape != whole.shape or target.dtype != whole.dtype:
        raise ValueError(f'a tensor is {whole.dtype} {list(whole.shape)}, not {target.dtype} '
                         f'{list(target.shape)}')
    if isinstance(target, DTensor):
        whole = distribute_tensor(whole.to(target.device), target.device_mesh, target.placements,
                                  src_data_rank=None).to_local()
        target = target.to_local()
    target.copy_(whole)
