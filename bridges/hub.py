"""The Hugging Face hub: download models and datasets, upload a finished model."""

import shutil
from pathlib import Path

from runtime.errors import CheckpointError, DataError
from runtime.ownership import temporary

SECONDS = 10    # for the first answer of the hub
_silent: set = set()    # names of which the hub did not answer; it is not waited for again


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


def _silence(name, revision, repo_type):
    """Return '' or, if the hub accepts a connection and never answers, a sentence that says so.

    The hub's client would wait for ever, also for what is in its cache.
    """
    from huggingface_hub import HfApi
    try:
        if name not in _silent:
            HfApi().repo_info(name, revision=revision, repo_type=repo_type, timeout=SECONDS)
    except Exception as error:      # of several HTTP clients; `download` meets the others again
        if 'timeout' in type(error).__name__.lower():
            _silent.add(name)
    return f'it does not answer within {SECONDS} s' if name in _silent else ''


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
