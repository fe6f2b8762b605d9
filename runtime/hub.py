"""Download models and datasets from the Hugging Face hub."""

from pathlib import Path

from runtime.errors import CheckpointError


def download(name: str, patterns, revision: str | None = None, repo_type: str = 'model',
             ignore=()) -> Path:
    """Return the folder with the files of a hub repository that match `patterns`, not `ignore`.

    repo_type: 'model' or 'dataset'. Raises CheckpointError.
    """
    from huggingface_hub import snapshot_download
    try:
        return Path(snapshot_download(name, repo_type=repo_type, revision=revision,
                                      allow_patterns=list(patterns), ignore_patterns=list(ignore)))
    except Exception as error:  # the hub and its HTTP client raise many kinds
        reason = str(error).strip().split('\n')[0]
        raise CheckpointError(f'there is no file or folder {name}, and downloading the {repo_type} '
                              f'{name} from the hub failed ({type(error).__name__}: {reason}); '
                              f'check the name and the network; if it is gated, accept its '
                              f'license there and set HF_TOKEN or run `hf auth login`') from error
