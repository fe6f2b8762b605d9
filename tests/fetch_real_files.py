"""Download the real tokenizers and benchmarks that some tests read.

    python tests/fetch_real_files.py ../shared

The tests look in ../shared, beside the repository, or in the folder NANOCAL_SHARED. None of these
files may stand in the repository itself: some licenses forbid it. Meta's tokenizers are gated:
accept the license on the hub and run `hf auth login` first. A file that cannot be had is named at
the end; the tests that need it skip.
"""

import gzip
import json
import sys
import urllib.request
from pathlib import Path
from typing import NamedTuple


class Source(NamedTuple):
    repo: str               # on the hub, or a URL up to the file
    file: str
    kind: str = 'dataset'   # 'dataset', 'model', or 'url'
    n_rows: int | None = None   # the first rows of a dataset; None: all


# licenses: Llama 2 and 3 community; Apache-2.0 for the tokenizers of Mistral, Qwen, EleutherAI and
# OLMo; MIT for MMLU, HellaSwag, GSM8K and HumanEval; CC BY-SA 4.0 for ARC; CC BY 4.0 for XCOPA;
# CC BY-SA for WikiText
FILES = {name: Source(**source) for name, source in json.loads(
    Path(__file__).with_name('real_files.json').read_text()).items()}


def download(source):
    """Return the path of a file of the hub, or of one that a URL names."""
    if source.kind == 'url':
        return Path(urllib.request.urlretrieve(f'{source.repo}/{source.file}')[0])
    from huggingface_hub import hf_hub_download
    return Path(hf_hub_download(source.repo, source.file, repo_type=source.kind))


def content(target, source, path):
    """Return the bytes of `target`, before compression, from the downloaded file."""
    if path.suffix != '.parquet':
        return path.read_bytes()
    import pyarrow.parquet
    rows = pyarrow.parquet.read_table(path).to_pylist()[:source.n_rows]
    if '.txt' in target:
        return ''.join(row['text'] for row in rows).encode()
    return ''.join(json.dumps(row, ensure_ascii=False) + '\n' for row in rows).encode()


def fetch(folder):
    """Write every file of FILES that `folder` lacks; return {target: why it could not be had}."""
    missing = {}
    for target, source in FILES.items():
        path = Path(folder, target)
        if path.exists():
            continue
        try:
            data = content(target, source, download(source))
        except Exception as error:      # of the hub, its HTTP client, or the network
            missing[target] = f'{type(error).__name__}: {str(error).strip().splitlines()[0]}'
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(data) if path.suffix == '.gz' else data)
        print(path)
    return missing


if __name__ == '__main__':
    if len(sys.argv) != 2 or sys.argv[1].startswith('-'):
        sys.exit(__doc__)
    missing = fetch(sys.argv[1])
    for target, reason in missing.items():
        print(f'not fetched: {target} ({reason})')
    sys.exit(bool(missing))
