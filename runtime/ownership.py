"""Track which files of an output folder belong to this program.

written.json lists the files that this program wrote in its folder; `claim` puts a name on the list
before its file is written. A file that is not on the list is never replaced or deleted.

Files are written under a temporary name and renamed, so a crash leaves the old file or the new one;
`lock` removes temporary files that a crash left behind. Files of lines, such as log.jsonl, grow.
"""

import contextlib
import fcntl
import glob
import itertools
import json
import os
import secrets
import shutil
from fnmatch import fnmatch
from pathlib import Path

from runtime.errors import ConfigError

LIST, LOCK = 'written.json', '.lock'
LOCKS = {}     # {real path of a folder: its lock file, which this process holds open}
INPUTS = set()      # the files that this command reads, which begins by `INPUTS.clear()`


@contextlib.contextmanager
def lock(folder, wait=False):
    """Lock `folder`, which is created; `wait` for another process, or raise ConfigError."""
    key = os.path.realpath(folder)
    LOCKS[key] = open_lock(folder, wait)
    try:
        _remove_leftovers(folder)
        yield
        check_in_place(*LOCKS.values())
    finally:
        LOCKS.pop(key).close()


def open_lock(folder, wait=False):
    path = Path(folder) / LOCK
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, 'ab')
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        raise ConfigError(f'{folder}: another process is writing there; choose another folder '
                          f'or wait until it has ended') from None
    except (OSError, ValueError) as error:      # ValueError: a NUL in the name
        raise ConfigError(f'{folder} cannot be written ({error}); choose another folder with '
                          f'--out_dir, or --out of generate.py') from error
    return file


def check_in_place(*files):
    """Raise ConfigError if one of the open `files`, or its folder, was removed or moved."""
    for file in files:
        path = Path(file.name)
        if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), path.stat()):
            raise ConfigError(f'{path.parent} was removed or moved, or its {path.name} was '
                              f'deleted, while this program was writing there')


def written_files(folder):
    """Return the relative paths of the files that this program wrote; ConfigError if damaged."""
    path = Path(folder) / LIST
    if not path.exists():
        return []
    with read_json(path, 'move the folder away or choose another folder') as content:
        names = [str(Path(name)) for name in content['files']]
        for name in names:
            if Path(name).is_absolute() or '..' in Path(name).parts or '\0' in name:
                raise ValueError(f'{name!r} is not a file below this folder')
        return names


@contextlib.contextmanager
def read_json(path, advice):
    """Yield the content of our JSON file; ConfigError with `advice` if a key cannot be read."""
    try:
        yield json.loads(Path(path).read_text(encoding='utf-8'))
    except ConfigError:     # of the block
        raise
    except PermissionError as error:
        raise ConfigError(f'{path} cannot be read: {error.strerror}') from error
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f'{path} is not what this program wrote ({error!r}); {advice}') from error


def check_free(folder, *names):
    """Return the `names` not on the list; ConfigError if one exists or is behind a link."""
    _refuse_links(folder, names)
    listed = written_files(folder)
    new = [str(name) for name in names if str(name) not in listed]
    for name in new:
        if os.path.lexists(Path(folder, name)):
            raise ConfigError(f'{Path(folder, name)} was not written by this program and is not '
                              f'replaced; move it away or choose another folder')
    return new


def _refuse_links(folder, names):
    """Raise ConfigError if a folder between `folder` and one of the files `names` is a link."""
    for parent in {Path(folder, parent) for name in names for parent in Path(name).parents[:-1]}:
        if parent.is_symlink():
            raise ConfigError(f'{parent} is a link to a folder elsewhere, where nothing is written '
                              f'or deleted; replace the link by that folder, or remove the link')


def claim(folder, *names):
    """Put `names` on the list of `folder`, before the files are written; see `check_free`."""
    check_in_place(*LOCKS.values())
    if new := check_free(folder, *names):
        Path(folder).mkdir(parents=True, exist_ok=True)
        _write_list(folder, written_files(folder) + new)


def discard(folder, *patterns, keep=''):
    """Delete the listed files of `folder` that match a pattern but not `keep`."""
    check_in_place(*LOCKS.values())
    names = [name for name in written_files(folder) if not fnmatch(name, keep)
             and any(fnmatch(name, pattern) for pattern in patterns)]
    _refuse_links(folder, names)
    # first the file whose presence says that a checkpoint is complete
    for name in sorted(names, key=lambda name: Path(name).name != 'state.json'):
        Path(folder, name).unlink(missing_ok=True)
        for parent in Path(name).parents[:-1]:      # the innermost first
            with contextlib.suppress(OSError):      # not empty
                Path(folder, parent).rmdir()
    if names:
        _write_list(folder, [name for name in written_files(folder) if name not in {*names}])


# ---- --overwrite: an old folder or file gets a free name, and nothing is deleted -----------------

def note_inputs(*paths):
    """Note files or folders that this command reads, so that `rename_old` refuses to move them."""
    INPUTS.update(map(os.path.abspath, paths))


def has_written(folder):
    """Return whether a file that this program wrote is in `folder`."""
    return any(os.path.lexists(Path(folder, name)) for name in written_files(folder))


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
        path.rename(new)
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


# ---- Writing -------------------------------------------------------------------------------------

def _write_list(folder, names):
    write_text(Path(folder, LIST), json.dumps({'files': names}, indent=0) + '\n')


@contextlib.contextmanager
def temporary(path, folder=False):
    """Yield a file or folder to write, then rename it to `path`.

    The files of a folder replace those of a folder there in the order of their names.
    """
    part = Path(f'{path}.{secrets.token_hex(4)}.nanocal-tmp')
    part.mkdir(parents=True) if folder else open(part, 'xb').close()
    try:
        yield part
        try:
            os.replace(part, path)
        except OSError:
            if not folder or not os.path.isdir(path):
                raise
            # unlike shutil.copytree, this leaves the mode of a folder that others may own
            for file in sorted(filter(Path.is_file, part.rglob('*'))):
                place = Path(path, file.relative_to(part))
                place.parent.mkdir(parents=True, exist_ok=True)
                os.replace(file, place)
    except OSError as error:
        error.filename = error.filename or str(path)    # which the error of a full disk lacks
        raise
    finally:
        shutil.rmtree(part, ignore_errors=True) if folder else part.unlink(missing_ok=True)


def write_text(path, text):
    """Write a file under a temporary name and rename it."""
    with temporary(path) as part:
        part.write_text(text, encoding='utf-8', errors='backslashreplace')


def _remove_leftovers(folder):
    """Remove the temporary files of listed names; the caller has locked `folder`."""
    for place in (folder, Path(folder, 'before')):
        for path in (Path(place, name) for name in (LIST, *written_files(place))):
            for part in path.parent.glob(f'{glob.escape(path.name)}.{"[0-9a-f]" * 8}.nanocal-tmp'):
                part.unlink(missing_ok=True)
