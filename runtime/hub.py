"""Download models and datasets from the Hugging Face hub; upload a model."""

import os
import re
from pathlib import Path

from runtime.errors import CheckpointError, DataError


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
    try:
        return Path(snapshot_download(name, repo_type=repo_type, revision=revision,
                                      allow_patterns=list(patterns), ignore_patterns=list(ignore)))
    except Exception as error:  # the hub and its HTTP client raise many kinds
        reason = str(error).strip().split('\n')[0]
        kind = CheckpointError if repo_type == 'model' else DataError
        raise kind(f'there is no file or folder {name}, and downloading the {repo_type} {name} '
                   f'from the hub failed ({type(error).__name__}: {reason}); check the name and '
                   f'the network; if it is gated, accept its license there and set HF_TOKEN or '
                   f'run `hf auth login`') from error


def upload(folder, name: str, files):
    """Send these files of a folder to the hub as the model `name`, private if it is new."""
    from huggingface_hub import HfApi
    try:
        HfApi().create_repo(name, private=True, exist_ok=True)
        HfApi().upload_folder(repo_id=name, folder_path=str(folder), allow_patterns=list(files),
                              commit_message='Model trained with nanoCal')
    except Exception as error:  # as above
        raise CheckpointError(f'sending {folder} to {name} failed ({type(error).__name__}: '
                              f'{error}); the run is complete: run `hf auth login` and the same '
                              f'command with --resume') from error
