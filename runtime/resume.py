"""Crash safety of a training run: its folder, which runs continue there, a graceful shutdown.

runtime/resume_state.py writes and reads the checkpoints, out_dir/resume-<step>/.
"""

import os
import re
import signal
import sys
from pathlib import Path

from runtime import cli
from runtime.config import run_settings
from runtime.errors import ConfigError
from runtime.sources import full_path
from runtime.ownership import LIST, LOCK, check_free, has_written, written_files
from runtime.parallel import joined


class StopSignals:
    """In this context the first SIGINT or SIGTERM sets `number` and the next one interrupts."""

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
    memory = ('--checkpoint_activations, --micro_rows=1 and a shorter --pack_len need less for a '
              'forward pass, --master_weights=compact less for the weights')
    resume = '--resume continues from the last checkpoint, if there is one'
    with cli.one_line_errors(resume, memory), joined():
        signal.signal(signal.SIGTERM, cli.stop)
        main(sys.argv[1:])


def check_folder(cfg):
    """Raise ConfigError unless out_dir is missing, empty or the folder of a run."""
    out_dir = Path(cfg.out_dir)
    if Path(cfg.model).is_dir() and Path(os.path.realpath(cfg.model)).is_relative_to(
            os.path.realpath(out_dir)):     # unlike Path.resolve it accepts a link to itself
        raise ConfigError(f'out_dir = {cfg.out_dir} holds the model {cfg.model} itself')
    # a run that is killed while it writes its first list leaves that under a temporary name
    files = {path.name for path in (out_dir.iterdir() if out_dir.is_dir() else ())
             if not path.name.startswith(f'{LIST}.')}
    if LIST not in files and files - {LOCK}:
        raise ConfigError(f'out_dir = {cfg.out_dir} is not empty and has no {LIST}, the list of '
                          f'what a run wrote; choose another --out_dir, or move that folder away')


def check_run(cfg, free_keys):
    """Raise ConfigError if the run in out_dir is neither to be overwritten nor to be resumed, for
    which it must keep its settings except for `free_keys`.
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
