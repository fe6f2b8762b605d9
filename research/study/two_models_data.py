"""Make the data of research/study/two_models.py from public files: PLAN.md says which.

    python research/study/two_models_data.py --files=FILES --out_dir=DATA

FILES has the files under their published names, also compressed by gzip, at any depth.
"""

import gzip
import io
import json
import random
import sys
import tarfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from research import common
from runtime.errors import ConfigError

MMLU = 2_000            # questions
CMMLU = 30              # questions of each subject
# {folder of two_models.py: patterns of the files that are copied}
COPIED = {'arc': ('ARC-*.jsonl',), 'hellaswag': ('hellaswag_val*.jsonl',),
          'wiki': ('wiki.test.txt',), 'xcopa': ('val.??.jsonl', 'test.??.jsonl')}


def main():
    options = common.command_line(
        __doc__, files={'required': True, 'type': Path, 'help': 'folder of the files'},
        out_dir={'required': True, 'type': Path, 'help': 'folder for the data'})
    files, out = options.files, options.out_dir
    for folder, patterns in COPIED.items():
        for path in (path for pattern in patterns for path in found(files, pattern)):
            write(out / folder / path.name.removesuffix('.gz'), text(path))
    questions = rows(files, 'mmlu/test.jsonl')
    common.write_lines(out / 'mmlu/test.jsonl', random.Random(0).sample(questions, MMLU))
    with tarfile.open(found(files, 'cmmlu*.tar.gz')[0]) as archive:
        for member in archive:
            if Path(member.name).match('test/*.csv') and not Path(member.name).name.startswith('.'):
                lines = io.TextIOWrapper(archive.extractfile(member), 'utf-8').readlines()
                write(out / 'cmmlu/test' / Path(member.name).name, ''.join(lines[:1 + CMMLU]))
    alpaca = [*rows(files, 'alpaca_en_demo.json'), *rows(files, 'gumbelsoft_alpaca_data.json')]
    common.write_lines(out / 'alpaca.jsonl', alpaca)
    common.write_lines(out / 'mixed.jsonl', [
        {'messages': [{'role': role, 'content': content} for role, content in turns]}
        for turns in conversations(files, alpaca)])


def conversations(files, alpaca):
    """Yield the conversations of `mixed`, lists of (role, content)."""
    for row in [*alpaca, *rows(files, 'alpaca_zh_demo.json')]:
        yield turn('\n\n'.join(filter(None, (row['instruction'], row['input']))), row['output'])
    for row in [*rows(files, 'train_first1000.jsonl'), *rows(files, 'gsm8k/test.jsonl')]:
        yield turn(row['question'], row['answer'])
    for row in rows(files, 'NQ-open.dev.jsonl'):
        yield turn(row['question'], row['answer'][0])
    for row in rows(files, 'dpo_en_demo.json'):
        yield [(message['from'], message['content'])
               for message in [*row['conversations'], row['chosen']]]
    for row in rows(files, 'self_instruct_seed_tasks.jsonl'):
        first = row['instances'][0]
        yield turn('\n\n'.join(filter(None, (row['instruction'], first['input']))), first['output'])


def turn(question, answer):
    return [('user', question), ('assistant', answer)]


def rows(files, pattern):
    """Return the rows of a JSON file or a file of JSON lines."""
    content = text(found(files, pattern)[0])
    return json.loads(content) if '.jsonl' not in pattern else [
        json.loads(line) for line in content.split('\n') if line]


def found(files, pattern):
    """Return the files that match a pattern, sorted; raise ConfigError if there are none."""
    paths = sorted({*files.rglob(pattern), *files.rglob(f'{pattern}.gz')})
    if not paths:
        raise ConfigError(f'{files} has no {pattern}')
    return paths


def text(path):
    return (gzip.decompress(path.read_bytes()) if path.suffix == '.gz' else
            path.read_bytes()).decode()


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


if __name__ == '__main__':
    main()
