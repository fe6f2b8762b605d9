"""fetch_real_files.py: from the hub's files to those that the tests read; nothing is downloaded."""

import gzip
import json
import re

import fetch_real_files
import pyarrow
import pyarrow.parquet
import pytest
from common import HERE, SHARED, needs_files


def read(path):
    return gzip.decompress(path.read_bytes()) if path.suffix == '.gz' else path.read_bytes()


def as_on_the_hub(target, source, path):
    """Write what the hub has for `target` into `path`, made from the real file in SHARED."""
    data = read(SHARED / target)
    if not source.file.endswith('.parquet'):
        path = path.with_suffix('.bin')
        path.write_bytes(data)
        return path
    if '.txt' in target:
        rows = [{'text': line} for line in re.findall('.*\n', data.decode())]
    else:
        rows = [json.loads(line) for line in data.splitlines()]
        if source.names:
            rows = [{theirs: row[ours] for ours, theirs in source.names.items()} for row in rows]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize('target', fetch_real_files.FILES)
def test_a_fetched_file_has_the_content_that_the_tests_read(target, tmp_path, monkeypatch):
    needs_files(target)
    source = fetch_real_files.FILES[target]
    monkeypatch.setattr(fetch_real_files, 'FILES', {target: source})
    monkeypatch.setattr(fetch_real_files, 'download', lambda source: as_on_the_hub(
        target, source, tmp_path / 'hub.parquet'))
    assert fetch_real_files.fetch(tmp_path) == {}
    ours, real = read(tmp_path / target), read(SHARED / target)
    if 'jsonl' in target:
        ours, real = ([json.loads(line) for line in x.splitlines()] for x in (ours, real))
    assert ours == real


def test_every_real_file_that_a_test_names_is_fetched():
    named = set()
    for path in (HERE / 'tests').glob('test_*.py'):
        named |= set(re.findall(r"'([\w.]*tokenizer[\w.]*\.(?:model(?:\.v\d)?|json\.gz))'",
                                path.read_text()))
    fetched = {target.split('/')[-1] for target in fetch_real_files.FILES}
    real = {name for name in named if re.match('llama|mistral_|qwen3_|neox_', name)}
    assert len(real) >= 3 and real <= fetched
