"""`evaluate.py` on one GPU and on several: seconds, and whether the numbers are bitwise equal.

    python research/bench/several_gpus.py --data=mmlu --tokenizer=Llama-3.2-1B
    python research/bench/several_gpus.py --data=mmlu --tokenizer=Llama-3.2-1B --processes=8 \\
        --languages=42
    python research/bench/several_gpus.py --plot=out/bench_several_gpus.json

Times whole commands, from their start, on a model with random weights: each of `languages` of
Global-MMLU has the questions of MMLU in `data`. With --shard the processes share the weights. Then
`limit` questions per language are scored with --deterministic, and samples and metrics compared
with those of one process. --only='1 GPU|2 GPUs' chooses commands. `tokenizer` is a folder with a
tokenizer. Writes out/bench_several_gpus.json and its picture.
"""

import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from research.bench import common
from research.bench.commands import seconds
from research.bench.common import (DEVICE, MODELS, chosen, draw_bars, free_memory, load,
                          our_model)
from data.benchmarks import BENCHMARKS
from data.files import fetch, read_rows
from data.questions import parse_row
from runtime import checkpoint
from runtime.errors import ConfigError


@dataclass
class BenchConfig:
    shape: tuple[Literal['gemma2_2b', 'llama32_1b', 'llama31_8b', 'mistral_7b'], ...] = (
        'llama32_1b',)
    data: str | None = None         # a folder with MMLU's files
    tokenizer: str | None = None    # a folder with a tokenizer
    processes: tuple[int, ...] = (2,)   # to compare with one
    languages: int = 8              # this many of Global-MMLU, the first ones
    limit: int = 500                # questions per language of the commands with --deterministic
    only: str | None = None         # commands, separated by '|', instead of all of them
    plot: str | None = None         # only draw this file of results again
    out: str = 'out/bench_several_gpus.json'


# ------------------------------------------------------------------------------------------------
# Measuring
# ------------------------------------------------------------------------------------------------

def bench(config):
    """Yield a table per model: seconds of each command, and whether its numbers are the same."""
    if config.data is None or config.tokenizer is None:
        raise ConfigError("set --data, a folder with MMLU's files, and --tokenizer, a folder")
    for shape in config.shape:
        with tempfile.TemporaryDirectory() as folder:
            checkpoint.save(our_model(MODELS[shape]), Path(folder, 'model'), torch.bfloat16,
                            side_files=config.tokenizer)
            free_memory()
            write_languages(config, Path(folder))
            table = {'shape': shape, 'languages': config.languages, 'limit': config.limit,
                     'results': measure(config, Path(folder))}
        print_table(table)
        yield table


def write_languages(config, folder):
    """Write MMLU's questions once for each language, and its solved ones."""
    for split, patterns in (('test', BENCHMARKS['mmlu'].test), ('dev', BENCHMARKS['mmlu'].shots)):
        lines = []
        for file in fetch(config.data, patterns):
            for _, row in read_rows(file):
                question, choices, answer = parse_row(row)
                lines.append(json.dumps({'question': question, 'choices': choices,
                                         'answer': answer, 'subject': row['subject']}) + '\n')
        for language in BENCHMARKS['global_mmlu'].languages[:config.languages]:
            path = folder / 'data' / f'{language}_{split}.jsonl'
            path.parent.mkdir(exist_ok=True)
            path.write_text(''.join(lines))


def measure(config, folder):
    """Return {command: {'processes', 'seconds', 'before_s', 'scoring_s', 'same'}}.

    before_s: until scoring begins: imports, reading the questions
    same: whether the numbers are bitwise those of one process with --deterministic; None for one
        process, without --deterministic, and if it was not measured
    """
    exact = ['--deterministic', f'--limit={config.limit}']
    commands, results, expected = {}, {}, None
    for kind, options in {'': [], ', shared weights': ['--shard'], ', deterministic': exact,
                          ', deterministic, shared weights': [*exact, '--shard']}.items():
        for n in (1, *config.processes) if '--shard' not in options else config.processes:
            commands[f'{n} GPU{"s" * (n > 1)}{kind}'] = n, options
    names = chosen(config.only, commands)
    first = f'--languages={BENCHMARKS["global_mmlu"].languages[0]}'
    run(['--limit=1', first], 1, folder / 'first')      # fills the caches on disk
    for name in names:
        (n, options), out = commands[name], folder / name
        started = time.time()
        row = results[name] = {'processes': n, 'seconds': run(options, n, out)}
        # written when the questions have been read
        row['before_s'] = (out / 'eval_config.json').stat().st_mtime - started
        tasks = load(out / 'results.json')['tasks']
        row['scoring_s'] = tasks['global_mmlu'].pop('scoring_seconds')
        found = sorted((out / 'samples.jsonl').read_text().splitlines()), tasks
        row['same'] = expected and found == expected
        if name == '1 GPU, deterministic':
            expected = found
        print(f'{name}: {row}', flush=True)
    return results


def run(options, processes, out):
    """Return the seconds of an evaluation by this number of processes."""
    torchrun = ['-m', 'torch.distributed.run', f'--nproc_per_node={processes}', '--standalone']
    return seconds([*torchrun * (processes > 1), 'evaluate.py', f'--model={out.parent / "model"}',
                    f'--tasks=global_mmlu:{out.parent / "data"}', f'--device={DEVICE}',
                    '--dtype=bfloat16', f'--out_dir={out}', *options])


# ------------------------------------------------------------------------------------------------
# Showing
# ------------------------------------------------------------------------------------------------

def print_table(table):
    """Print the table as Markdown; speed-ups are relative to one GPU with whole weights."""
    results = table['results']
    print(f'\n### {table["shape"]}, MMLU as {table["languages"]} languages, whole commands\n\n'
          '| command | s | speed-up | before scoring, s | scoring, s | speed-up | after it, s | '
          'bitwise as one GPU |\n|---|---|---|---|---|---|---|---|')
    for name, row in results.items():
        one = results.get('1 GPU' + ', deterministic' * ('deterministic' in name))
        speed_up = {key: f'{one[key] / max(row[key], 0.01):.2f}' if one else ''
                    for key in ('seconds', 'scoring_s')}
        before, after = '', ''
        if 'before_s' in row:       # results of older versions lack it
            before = f'{row["before_s"]:.1f}'
            after = f'{row["seconds"] - row["before_s"] - row["scoring_s"]:.1f}'
        same = {None: '', True: 'yes', False: 'no'}[row['same']]
        print(f'| {label(name, table)} | {row["seconds"]:.1f} | {speed_up["seconds"]} | '
              f'{before} | {row["scoring_s"]:.1f} | {speed_up["scoring_s"]} | {after} | {same} |')
    sys.stdout.flush()


def label(name, table):
    """Return the name of a command with the number of questions, if it is not all of them."""
    return name.replace('deterministic',
                        f'deterministic, {table["limit"]} questions per language')


def draw(path):
    """Draw the seconds of each command."""
    draw_bars(path, 'Evaluation on several GPUs', {
        f'{table["shape"]}: seconds': [
            (f'ours, {label(name, table)}', row['seconds'], f'{row["seconds"]:.1f}')
            for name, row in table['results'].items()]
        for table in load(path)['tables']})


def main(argv):
    common.main(argv, __file__, BenchConfig, bench, draw)


if __name__ == '__main__':
    main(sys.argv[1:])
