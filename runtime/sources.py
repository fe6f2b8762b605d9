"""Find the files of datasets, in a folder or by bridges/hub.py on the hub."""

import fnmatch
import os
import re
from pathlib import Path

from runtime import rooms
from runtime.errors import DataError
from runtime.ownership import note_inputs

def is_hub_name(name: str) -> bool:
    """Return whether `name` has the form of a hub repository's, such as google/gemma-2-2b."""
    return re.fullmatch(r'[^/:.~][^/:]*/[^/:]+', name) is not None


def full_path(name: str) -> str:
    """Return the full path of a file or folder that could be a hub name, others as they are."""
    return os.path.abspath(name) if is_hub_name(name) and os.path.exists(name) else name


# names of hidden files, and of what the library datasets writes beside rows
NO_DATA = re.compile(r'\.|(dataset_(infos?|dict)|state)\.json$')


def fetch(source, patterns, revision=None):
    """Return the files of a dataset, a sorted list of paths; raises DataError.

    source:   a file, a folder, or the name of a hub dataset
    patterns: globs; the first one with a match is used, and files of another format that later
              ones match are named in a note. '*.zip': unpack archives on the hub first
    revision: the hub commit, tag or branch to read
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
    names = rooms.load('hub').files_on_hub(source, revision) if on_hub else None
    for i, pattern in enumerate(patterns):
        if on_hub:
            wanted = [pattern, *['*.zip'] * ('*.zip' in patterns)]
            if names is not None and not any(fnmatch.filter(names, glob) for glob in wanted):
                continue
            path = rooms.load('hub').download_files(source, wanted, revision)
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


def matches(folder, *patterns):
    """Return the data files of a folder that match a glob, sorted, without compressed copies."""
    files = {p for pattern in patterns for p in folder.glob(pattern)
             if not p.is_dir() and not NO_DATA.match(p.name)}
    return sorted(p for p in files if p.suffix != '.gz' or p.with_suffix('') not in files)


# words in names of files and splits
HELD_OUT = re.compile(r'(test|dev(elopment)?|eval(uation)?|val(id(ation)?)?)'
                      r'(s|ing|set|split|mini|[abx])?|heldout|holdout')


def is_held_out(name):
    """Return whether a file or split is named as one that is held out, such as test_sft; of several
    words, as in test_train.jsonl, the last one decides.
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
