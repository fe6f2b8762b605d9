"""What runs print and record: sizes, one example, the steps, progress."""

import contextlib
import datetime
import json
import math
import resource
import sys
import time
from collections import deque
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from runtime import ownership, rooms
from runtime.config import dump_config
from runtime.device import HostCopy
from runtime.errors import ConfigError, TrainingError, escape_controls
from runtime.sources import full_path
from runtime.parallel import rank
from runtime.resume import advice
from runtime.weights import nonfinite_tensor


def print_sizes(run):
    cfg = run.cfg
    model = run.model
    steps = run.steps
    lengths = run.sequences.lengths[run.training]
    total = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    adapters = f' ({trained:,} of them trained)' if trained < total else ''
    name = torch.cuda.get_device_name(run.device) if run.device.startswith('cuda') else 'CPU'
    print(f'device: {run.device} ({name}), {str(model.head.dtype).split(".")[-1]}')
    print(f'model: {cfg.model}: {model.config.model_type}, {total:,} parameters{adapters}')
    if unused := [key for key, value in vars(cfg).items() if key.startswith('lora_')
                  and not cfg.lora and value != getattr(type(cfg), key)]:
        print(f'note: without lora = True all weights are trained; no effect: {", ".join(unused)}')
    others = len(run.sequences) - len(run.held_out)
    sample = f' (a sample of {others:,})' if cfg.data_limit else ''
    print(f'data: {cfg.data}: {len(lengths):,} sequences{sample}, {lengths.sum():,} tokens '
          f'(mean {lengths.mean():.0f}, longest {lengths.max()})')
    print(f'steps: {steps} of {cfg.batch_size} sequences, about '
          f'{lengths.mean() * cfg.batch_size:,.0f} tokens each')
    if len(run.held_out) < cfg.val_size:
        print(f'note: val_size = {cfg.val_size}, and {len(run.held_out)} sequences are held out: '
              f'those of a prompt or document stay together')
    used, available = steps * cfg.batch_size, run.available
    if used < available:
        cause = (f'max_steps = {cfg.max_steps}' if cfg.max_steps == steps else
                 f'the rest does not fill a step of {cfg.batch_size}')
        never = f'; {len(lengths) - used:,} are never seen' if used < len(lengths) else ''
        print(f'sequences trained on: {used:,} of {available:,} (epochs = {cfg.epochs:g}, each of '
              f'{len(lengths):,}): {cause}{never}')
    print(f'folder: {cfg.out_dir}' + ' (a dry run writes nothing there)' * cfg.dry_run)


def show_example(example, tokenizer):
    """Print one training example, (tokens, loss mask), with the supervised tokens marked."""
    tokens, loss_mask = example
    print('first example, supervised tokens between {{ and }}:')
    pieces, changes = [], np.flatnonzero(np.diff(loss_mask)) + 1
    for part, supervised in zip(np.split(tokens, changes), np.split(loss_mask, changes),
                                 strict=True):
        piece = tokenizer.decode(part.tolist(), start=not pieces)
        if len(piece) > 1000:
            piece = f'{piece[:500]} [... {len(piece) - 1000} characters ...] {piece[-500:]}'
        pieces.append('{{' + piece + '}}' if supervised[0] else piece)
    print('    ' + escape_controls(''.join(pieces)).replace('\n', '\n    '))


class StepLog(contextlib.AbstractContextManager):
    """Check and record each step's numbers while the device computes the next step."""

    def __init__(self, run, first, until):
        self.run = run
        self.until = until
        self.cfg = cfg = run.cfg
        self.unread, self.times = None, deque([time.monotonic()], maxlen=51)    # of steps' ends
        self.file = self.send = None
        if rank() == 0 and not cfg.dry_run:
            self.file = open_log(cfg, first)
            self.track()
        self.bar = tqdm(total=until, initial=first, desc=Path(cfg.out_dir).name, unit=' steps',
                        mininterval=1, disable=rank() > 0 or None)  # None: only on a terminal

    def __exit__(self, *_):
        self.bar.close()
        if self.file:
            self.file.close()

    def begin(self):
        """Note when a step begins: at the end of an unread step before it, else now."""
        now = torch.zeros((), device=self.run.device)
        self.began = self.unread[-1] if self.unread else HostCopy(now)

    def end(self, step, lr, chosen, packed, values):
        """Keep the `values` of a step, {name: scalar on the device}; read the step before it."""
        ended = HostCopy(torch.stack([*values.values()]))
        self.read()
        self.unread = (step, lr, chosen, packed, self.cfg.micro_rows, [*values], self.began, ended)

    def read(self):
        """Wait for the unread step, if there is one; check and record it."""
        if not self.unread:
            return
        (step, lr, chosen, packed, rows, names, began, ended), self.unread = self.unread, None
        values = dict(zip(names, ended.values().tolist(), strict=True))
        if not (math.isfinite(values['loss']) and math.isfinite(values['grad_norm'])):
            bad = None if self.cfg.from_scratch else nonfinite_tensor(self.run.base)
            cause = (f'the base model {self.cfg.model} has a value that is not finite in {bad}'
                     if bad else f'lower lr or check the data: the sequences were '
                     f'{chosen.tolist()} of {self.cfg.data}, counted from 0')
            raise TrainingError(f'step {step}: loss {values["loss"]}, gradient norm '
                                f'{values["grad_norm"]}; {cause}; {advice(self.cfg.out_dir)}')
        n_tokens = int((packed.owner >= 0).sum())
        record = {'step': step, 'lr': lr, **values,
                  'tokens': n_tokens, 'supervised_tokens': int((packed.targets >= 0).sum()),
                  'tokens_per_s': n_tokens / ended.seconds_after(began), 'micro_rows': rows}
        if len(self.run.held_out) and not self.cfg.dry_run and (
                step % self.cfg.val_every == 0 or step == self.until):
            record |= self.run.stage.validate(self.run)
        self.bar.update()
        self.times.append(time.monotonic())
        if step % self.cfg.log_every == 0 or step == self.until:
            self.print(record)
        if self.file:
            try:
                ownership.check_in_place(self.file)
                print(json.dumps(record), file=self.file, flush=True)
            except (OSError, ConfigError) as error:
                raise TrainingError(f'{self.file.name}: {getattr(error, "strerror", error)}; '
                                    f'{advice(self.cfg.out_dir)}') from error
            self.track(record)

    def track(self, record=None):
        """Start the tracker, or send it a record; a failure is a warning, printed once."""
        try:
            if not record:
                if self.cfg.tracker != 'none':
                    self.send = rooms.load('trackers').start(self.cfg)
            elif self.send:
                self.send(record)
        except Exception as error:      # a tracker may raise anything
            print(f'warning: {self.cfg.tracker} failed, the run continues without it: '
                  f'{escape_controls(str(error))}')
            self.send = None

    def print(self, record):
        per_step = (self.times[-1] - self.times[0]) / (len(self.times) - 1)
        left = datetime.timedelta(seconds=round(per_step * (self.until - record['step'])))
        keys = [*record]    # from the loss to the gradient norm: what the objective returned
        keys = keys[keys.index('loss'):keys.index('grad_norm')] + [
            key for key in keys if key.startswith('val_')]
        values = '  '.join(f'{key} {record[key]:.4f}' for key in keys)
        self.bar.write(f'step {record["step"]}/{self.until}  {values}  lr {record["lr"]:.2e}  '
                       f'grad norm {record["grad_norm"]:.2f}  '
                       f'{record["tokens_per_s"]:.0f} tokens/s  {left} left')
        sys.stdout.flush()      # for those who follow a redirected output


def open_log(cfg, first):
    """Open log.jsonl, cut to the first `first` steps; write train_config.py beside it.

    There a folder such as out/base has its full path, which no later reader takes for a hub name.
    """
    out_dir = Path(cfg.out_dir)
    path = out_dir / 'log.jsonl'
    ownership.claim(out_dir, 'train_config.py', path.name)
    recorded = replace(cfg, resume=False, model=full_path(cfg.model), data=full_path(cfg.data))
    ownership.write_text(out_dir / 'train_config.py', dump_config(recorded))
    ownership.write_text(path, rooms.load('resume state').log_until(path, first) if first else '')
    return open(path, 'a', encoding='utf-8')


def peak_memory(device):
    """Return the peak memory in GiB: of the GPU, or of this process if there is none."""
    if device.startswith('cuda'):
        recorded = rooms.load('recorded passes').recorded_memory()
        return (torch.cuda.max_memory_allocated() + recorded) / 2 ** 30
    unit = 1 if sys.platform == 'darwin' else 1024      # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2 ** 30
