"""What this program may write and delete in a folder.

written.json lists the files that runs and evaluations wrote in its folder. A name is put on the
list before its file is written, and nothing that is not listed is ever replaced or deleted. Files
are written under a temporary name and renamed, so a crash leaves the old file or the new one.
Exceptions: log.jsonl and samples.jsonl grow line by line, and resume.py says when a checkpoint is
complete.
"""

import contextlib
import fcntl
import json
import os
from fnmatch import fnmatch
from pathlib import Path

from runtime.errors import ConfigError

LIST, LOCK = 'written.json', '.lock'


def lock(folder):
    """Return an open file that keeps other processes out of `folder` until it is closed.

    The lock ends with the process, however that ends. Raises ConfigError if another one holds it.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        file = open(Path(folder) / LOCK, 'w')
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f'{folder}: another process is writing there; choose another --out_dir '
                          f'or wait until it has ended') from None
    except OSError as error:
        raise ConfigError(f'{folder} cannot be written ({error.strerror}); choose another '
                          f'--out_dir') from error
    return file


def written_files(folder):
    """Return the relative paths of the files that this program wrote; ConfigError if damaged."""
    path = Path(folder) / LIST
    if not path.exists():
        return []
    with read_json(path, 'move the folder away or choose another --out_dir') as content:
        return [str(Path(name)) for name in content['files']]


@contextlib.contextmanager
def read_json(path, advice):
    """Yield the content of a JSON file that this program wrote, for a `with` block.

    Raises ConfigError with `advice` if it cannot be read, or if reading its keys inside the block
    fails.
    """
    try:
        yield json.loads(Path(path).read_text(encoding='utf-8'))
    except (OSError, ValueError, LookupError, TypeError, AttributeError,
            RecursionError) as error:
        raise ConfigError(f'{path} is not what this program wrote ({error!r}); {advice}') from error


def claim(folder, *names, below='.'):
    """Put files on the folder's list before they are written; `names` are relative to `below`.

    Raises ConfigError for a file that exists and is not on the list: this program did not write it.
    """
    folder, listed = Path(folder), written_files(folder)
    new = [name for name in (str(Path(below, name)) for name in names) if name not in listed]
    for name in new:
        if (folder / name).exists():
            raise ConfigError(f'{folder / name} was not written by this program and is not '
                              f'replaced; move it away or choose another --out_dir')
    if new:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / LIST, json.dumps({'files': listed + new}, indent=0) + '\n')


def discard(folder, pattern='*', keep=''):
    """Delete the listed files of `folder` that match `pattern` and not `keep`, and no others.

    Subfolders that this leaves empty are removed too.
    """
    folder, listed = Path(folder), written_files(folder)
    gone = [name for name in listed if fnmatch(name, pattern) and not fnmatch(name, keep)]
    if not gone:
        return
    # config.json and state.json say that the other files are complete, so they go first
    for name in sorted(gone, key=lambda name: Path(name).name not in ('config.json', 'state.json')):
        (folder / name).unlink(missing_ok=True)
        (folder / f'{name}.tmp').unlink(missing_ok=True)
    parents = {parent for name in gone for parent in Path(name).parents} - {Path('.')}
    for parent in sorted(parents, reverse=True):
        with contextlib.suppress(OSError):      # it holds a file that is not ours
            (folder / parent).rmdir()
    if left := [name for name in listed if name not in gone]:
        write_text(folder / LIST, json.dumps({'files': left}, indent=0) + '\n')
    else:
        (folder / LIST).unlink(missing_ok=True)


def write_text(path, text):
    """Write a file under a temporary name and rename it."""
    part = Path(f'{path}.tmp')
    part.write_text(text, encoding='utf-8')
    os.replace(part, path)
