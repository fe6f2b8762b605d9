"""Find the files of datasets and models, in a folder or on the hub; upload a model."""

import fnmatch
import functools
import os
import re
import shutil
from pathlib import Path

from runtime.errors import CheckpointError, DataError
from runtime.ownership import note_inputs, temporary

SECONDS = 10    # for the first answer of the hub


def is_hub_name(name: str) -> bool:
    """Return whether `name` has the form of a hub repository's, such as google/gemma-2-2b."""
    return re.fullmatch(r'[^/:.~][^/:]*/[^/:]+', name) is not None


def full_path(name: str) -> str:
    """Return the full path of a file or folder whose name could be a hub name, others as they are.
    """
    return os.path.abspath(name) if is_hub_name(name) and os.path.exists(name) else name


def download(name: str, patterns, revision: str | None = None, repo_type: str = 'model',
             ignore=()) -> Path:
    """Return the folder with the files of a hub repository that match `patterns`, not `ignore`.

    repo_type: 'model' or 'dataset'. Raises CheckpointError, or DataError for a dataset.
    """
    from huggingface_hub import snapshot_download
    silent = _silence(name, revision, repo_type)
    try:
        return Path(snapshot_download(name, repo_type=repo_type, revision=revision,
                                      allow_patterns=list(patterns), ignore_patterns=list(ignore),
                                      **{'local_files_only': True} if silent else {}))
    except Exception as error:  # the hub and its HTTP client raise many kinds
        reason = silent or f'{type(error).__name__}: {str(error).strip()}'.split('\n')[0]
        kind = CheckpointError if repo_type == 'model' else DataError
        at = f' at revision {revision}' if revision else ''
        raise kind(f'there is no file or folder {name}, and downloading the {repo_type} {name}{at} '
                   f'from the hub failed ({reason}); check the name and '
                   f'the network; if it is gated, accept its license there and set HF_TOKEN or '
                   f'run `hf auth login`') from error


@functools.cache
def _silence(name, revision, repo_type):
    """Return '' or, if the hub accepts a connection and never answers, a sentence that says so.

    The hub's client would wait for ever, also for what is in its cache.
    """
    from huggingface_hub import HfApi
    try:
        HfApi().repo_info(name, revision=revision, repo_type=repo_type, timeout=SECONDS)
    except Exception as error:      # of several HTTP clients; `download` meets the others again
        if 'timeout' in type(error).__name__.lower():
            return f'it does not answer within {SECONDS} s'
    return ''


# ---- The files of a dataset ----------------------------------------------------------------------

# names of hidden files, and of what the library datasets writes beside rows
NO_DATA = re.compile(r'\.|(dataset_(infos?|dict)|state)\.json$')


def fetch(source, patterns, revision=None):
    """Return the files of a dataset, a sorted list of paths; raises DataError.

    source:   a file, a folder, or the name of a hub dataset
    patterns: globs; the first one with a match is used. In a folder, files of another format that
              later ones match are named in a note; from the hub they are not downloaded. With
              '*.zip' among them, archives on the hub are downloaded and unpacked first
    revision: the hub commit, tag or branch to read; pin it, because datasets change
    """
    path = Path(os.path.expanduser(source))
    if revision and path.exists():
        raise DataError(f'data_revision = {revision!r} is for datasets of the hub, but {source} '
                        f'is on disk; leave it out')
    if path.is_file():
        note_inputs(path)
        return [path]
    on_hub = not path.is_dir()
    if on_hub and not is_hub_name(source):
        raise DataError(f'no file or folder at {source}, and it is not a hub dataset name')
    if not on_hub and not os.access(path, os.R_OK | os.X_OK):   # `glob` would find nothing
        raise DataError(f'cannot read the folder {source}: Permission denied')
    names = files_on_hub(source, revision) if on_hub else None
    for i, pattern in enumerate(patterns):
        if on_hub:
            wanted = [pattern, *['*.zip'] * ('*.zip' in patterns)]
            if names is not None and not any(fnmatch.filter(names, glob) for glob in wanted):
                continue
            path = download_files(source, wanted, revision)
        if files := matches(path, pattern):
            note_inputs(*files)
            if (n := re.search(r'-\d+-of-(\d+)\b', files[-1].name)) and len(files) < int(n[1]):
                print(f'{source}: only {len(files)} of {int(n[1])} files {pattern} are there')
            beside = matches(path, *(later for later in patterns[i + 1:] if '/' not in later))
            if unread := [p.name for p in beside if p.suffix != files[0].suffix
                          and p not in files and p.with_suffix('') not in files]:
                print(f'{source}: {pattern} is read, and not {", ".join(unread[:3])}'
                      + ', ...' * (len(unread) > 3) + '; to read all, write them in one format')
            return files
    folders = sorted(str(p) for p in path.glob('[!.]*') if p.is_dir())
    raise DataError(f'{source} holds nothing that matches {" or ".join(patterns)}'
                    + (f'; name one of its folders {", ".join(folders[:9])}' if folders else ''))


def files_on_hub(source, revision):
    """Return the names of the files of a hub dataset, or None where they cannot be listed."""
    from huggingface_hub import HfApi
    if _silence(source, revision, 'dataset'):
        return None
    try:
        return HfApi().list_repo_files(source, revision=revision, repo_type='dataset')
    except Exception:   # offline, so `download` looks in the cache, or says what is wrong
        return None


def download_files(source, patterns, revision):
    """Return the folder of a hub dataset with the files of some patterns, and archives unpacked."""
    path = download(source, patterns, revision, repo_type='dataset')
    for archive in path.glob('*.zip'):
        unpacked = archive.with_suffix('')
        if not unpacked.exists():
            with temporary(unpacked, folder=True) as part:
                shutil.unpack_archive(archive, part)
    return path


def matches(folder, *patterns):
    """Return the data files of a folder that match a glob, sorted, without compressed copies."""
    files = {p for pattern in patterns for p in folder.glob(pattern)
             if not p.is_dir() and not NO_DATA.match(p.name)}
    return sorted(p for p in files if p.suffix != '.gz' or p.with_suffix('') not in files)


# words in names of files and splits
HELD_OUT = re.compile(r'(test|dev(elopment)?|eval(uation)?|val(id(ation)?)?)'
                      r'(s|ing|set|split|mini|[abx])?|heldout|holdout')


def is_held_out(name):
    """Return whether a file or split is named as one that is held out, such as test_sft.

    Of several words, as in test_train.jsonl, the last one decides.
    """
    spaced = re.sub('([a-z])([A-Z])', r'\1 \2', name).lower()
    words = re.findall('[a-z]+', re.sub('(held|hold)[-_. ]out', r'\1out', spaced))
    named = [word for word in words if HELD_OUT.fullmatch(word) or word.startswith('train')]
    return bool(named) and not named[-1].startswith('train')


def fetch_training(source, patterns, revision=None):
    """Return the files of `fetch` but those named as a split that is held out; name the others."""
    files = fetch(source, patterns, revision)
    chosen = [file for file in files if not is_held_out(file.name)] or files
    in_folder = os.path.isdir(os.path.expanduser(source))
    beside = matches(files[0].parent, f'*{files[0].suffix}') if in_folder else files
    if others := [file.name for file in beside if file not in chosen]:
        print(f'{source}: {", ".join(others[:3])}{", ..." * (len(others) > 3)} not read; name a '
              f'file to train on it')
    return chosen


# ---- A finished model ----------------------------------------------------------------------------

def upload(folder, name: str, files):
    """Send these files of a folder to the hub as the model `name`, private if it is new."""
    from huggingface_hub import HfApi
    try:
        if silent := _silence(name, None, 'model'):
            raise TimeoutError(silent)
        HfApi().create_repo(name, private=True, exist_ok=True)
        HfApi().upload_folder(repo_id=name, folder_path=str(folder), allow_patterns=list(files),
                              commit_message='Model trained with nanoCal')
    except Exception as error:  # as above
        raise CheckpointError(f'sending {folder} to {name} failed ({type(error).__name__}: '
                              f'{error}); the run is complete: run `hf auth login` and the same '
                              f'command with --resume') from error
