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

    Without a connection the hub's cache is read. repo_type: 'model' or 'dataset'. Raises
    CheckpointError, or DataError for a dataset.
    """
    from huggingface_hub import snapshot_download
    chosen = {'allow_patterns': list(patterns), 'ignore_patterns': list(ignore)}
    info, unreachable = _ask(name, revision, repo_type)
    try:
        if info:
            _announce(info, name, repo_type, chosen)
        return Path(snapshot_download(name, repo_type=repo_type, revision=revision, **chosen,
                                      **{'local_files_only': True} if unreachable else {}))
    except Exception as error:  # the hub and its HTTP client raise many kinds
        reason = unreachable or f'{type(error).__name__}: {str(error).strip()}'.split('\n')[0]
        kind = CheckpointError if repo_type == 'model' else DataError
        at = f' at revision {revision}' if revision else ''
        advice = ('check the network, or name a file or folder' if unreachable else 'check the '
                  'name; if it is gated, accept its license there and set HF_TOKEN or run '
                  '`hf auth login`')
        raise kind(f'there is no file or folder {name}, and downloading the {repo_type} {name}{at} '
                   f'from the hub failed ({reason}); {advice}') from error


def _ask(name, revision, repo_type):
    """Return (the hub's repo_info or None, why the hub cannot be reached or '')."""
    # without a timeout its client would wait for ever, also for what is in its cache
    from huggingface_hub import HfApi
    if name in _silent:
        return None, f'it does not answer within {SECONDS} s'
    try:
        return HfApi().repo_info(name, revision=revision, repo_type=repo_type, timeout=SECONDS,
                                 files_metadata=True), ''
    except Exception as error:      # of several HTTP clients; `download` meets the others again
        kind = type(error).__name__.lower()
        if 'timeout' in kind:
            _silent.add(name)
            return _ask(name, revision, repo_type)
        unreachable = any(word in kind for word in ('connect', 'offline'))
        return None, str(error).strip().split('\n')[0] if unreachable else ''


def _announce(info, name, repo_type, chosen):
    """Print how much of a repository is not in the cache of the hub yet."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.utils import filter_repo_objects
    missing = [file.size or 0 for file in filter_repo_objects(
        info.siblings, key=lambda file: file.rfilename, **chosen) if not isinstance(
            try_to_load_from_cache(name, file.rfilename, revision=info.sha, repo_type=repo_type),
            str)]
    if missing:
        print(f'downloading the {repo_type} {name} from the hub: {len(missing)} files, '
              f'{sum(missing) / 1e6:,.0f} MB', flush=True)


def files_on_hub(source, revision):
    """Return the names of the files of a hub dataset, or None where they cannot be listed."""
    info, _ = _ask(source, revision, 'dataset')     # without it `download` says what is wrong
    return [file.rfilename for file in info.siblings] if info else None


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
        if unreachable := _ask(name, None, 'model')[1]:
            raise TimeoutError(unreachable)
        HfApi().create_repo(name, private=True, exist_ok=True)
        HfApi().upload_folder(repo_id=name, folder_path=str(folder), allow_patterns=list(files),
                              commit_message='Model trained with nanoCal')
    except Exception as error:  # as above
        raise CheckpointError(f'sending {folder} to {name} failed ({type(error).__name__}: '
                              f'{error}); the run is complete: run `hf auth login` and the same '
                              f'command with --resume') from error
