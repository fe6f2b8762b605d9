"""--overwrite: an old folder or file gets a free name beside it, and nothing is deleted."""

import itertools
import os
from pathlib import Path

from runtime.errors import ConfigError
from runtime.ownership import INPUTS, LOCK, LOCKS, check_in_place, has_written, open_lock


def rename_old(*paths):
    """Rename a folder that this program wrote, or files: 'run' to 'run.1' if that name is free.

    paths: one folder that this process has locked, or files with the same stem, which get the same
    number. Raises ConfigError if this command reads something there, or another process writes.
    """
    check_in_place(*LOCKS.values())
    stem = paths[0].stem
    if paths[0].is_dir():
        paths = [Path(os.path.realpath(paths[0]))] * has_written(paths[0])
        stem = paths[0].name if paths else ''
    old = [path for path in paths if os.path.lexists(path)]
    for path in old:
        refuse_inputs(path, *sorted(INPUTS), os.getcwd())
        for inner in path.rglob(f'*/{LOCK}'):
            open_lock(inner.parent).close()        # raises if a process holds it
    named = ([path.with_name(path.name.replace(stem, f'{stem}.{n}', 1)) for path in old]
             for n in itertools.count(1))
    free = next(new for new in named if not any(map(os.path.lexists, new)))
    for path, new in zip(old, free, strict=True):
        try:
            path.rename(new)
        except OSError as error:
            raise ConfigError(f'{path} cannot be renamed to {new} ({error.strerror}); choose '
                              f'another name for what this command writes') from error
        print(f'--overwrite: {path} is now {new}')
        if file := LOCKS.get(str(path)):
            file.close()
            LOCKS[str(path)] = open_lock(path)


def refuse_inputs(place, *names):
    """Raise ConfigError if one of `names`, which this command reads, is `place` or below it."""
    for name in map(os.path.abspath, names if place.exists() else ()):
        for path in map(Path, (name, os.path.realpath(name))):
            if any(at.exists() and at.samefile(place) for at in (path, *path.parents)):
                raise ConfigError(f'--overwrite would rename {place}, and this command reads '
                                  f'{path}; write to another place, or read a copy from elsewhere')
