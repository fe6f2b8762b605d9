"""The checkpoints of a training run, out_dir/resume-<step>/.

They hold in safetensors all that the next step depends on: the trained weights with the low bits of
their master, the Adam moments and the random states. The position in the data and the learning rate
follow from the step. state.json has a checksum of every file and of itself. It is written last,
then the older checkpoint is removed: a complete one exists at any moment.
"""

import json
import os
from pathlib import Path

import torch

from runtime.digests import file_digest, json_digest
from runtime.errors import ConfigError, TrainingError
from runtime.ownership import claim, discard
from runtime.parallel import gather, gather_full, load_full, rank
from runtime.resume import advice, checkpoints
from runtime.saving import write_files
from runtime.weights import read_tensors

FILE_BYTES = 4_000_000_000


def save_checkpoint(out_dir, step, named, optimizer, facts):
    """Write out_dir/resume-<step>/, state.json last, then remove the older checkpoints.

    named: {name: trained parameter}; facts: {name: JSON value} that a resumed run must share.
    Every process must call this. Raises TrainingError if it fails.
    """
    folder, random = Path(out_dir) / f'resume-{step}', {'cpu': torch.get_rng_state()}
    device = next(iter(named.values())).device
    if device.type == 'cuda':
        random['cuda'] = torch.cuda.get_rng_state(device)
    tensors = [*state_tensors(named, optimizer)]
    n = 1 + sum(tensor.nbytes for _, tensor in tensors) // FILE_BYTES
    shares = [dict(tensors[i::n]) for i in range(n)]        # {name: tensor} of each file
    for number, states in enumerate(gather(random)):
        shares[-1] |= {f'random.{number}.{kind}': state for kind, state in states.items()}
    files = {f'state-{number:05d}.safetensors': lambda share=share: {
        key: gather_full(tensor).cpu().contiguous() for key, tensor in share.items()}
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


def restore(out_dir, named, optimizer, facts):
    """Fill parameters and optimizer from the newest intact checkpoint; return its step, or 0.

    Raises TrainingError if all are damaged, or of a run with other `facts`.
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
                    raise TrainingError(f'{path} is of different {key}: {content[key]}, not '
                                        f'{value}; --overwrite starts over')
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


def log_until(path, step):
    """Return the lines of log.jsonl up to `step`; a damaged file gets another name."""
    records, damaged = [], False
    lines = (path.read_text(encoding='utf-8', errors='replace').splitlines(keepends=True)
             if path.exists() else [])
    for number, line in enumerate(lines, 1):
        try:
            if json.loads(line)['step'] <= step:
                records.append(line.rstrip() + '\n')      # which the last one may lack
        except (ValueError, KeyError, TypeError, RecursionError):
            damaged |= number < len(lines)      # a crash may cut off the last line
    if damaged:
        claim(path.parent, f'{path.name}.damaged')
        os.replace(path, f'{path}.damaged')
    if len(records) < step:
        print(f'warning: {path} lacks {step - len(records)} of the first {step} steps'
              + '; the damaged file is now log.jsonl.damaged' * damaged)
    return ''.join(records)


def state_tensors(named, optimizer):
    """Yield (name, tensor) of everything that a step changes."""
    for name, parameter in named.items():
        yield f'{name}.weight', parameter
        for key, tensor in optimizer.state[parameter].items():
            yield f'{name}.{key}', tensor
