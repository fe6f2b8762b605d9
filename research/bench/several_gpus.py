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

import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from data.benchmarks import BENCHMARKS
from research.bench.common import (DEVICE, Shape, chosen, command_seconds, draw_bars, load,
                                   read_mmlu, require_files, save_model, script_main, table_text,
                                   write_lines)


@dataclass
class BenchConfig:
    shape: tuple[Shape, ...] = ('llama32_1b',)
    data: str | None = None         # a folder with MMLU's files
    tokenizer: str | None = None    # a folder with a tokenizer
    processes: tuple[int, ...] = (2,)   # to compare with one
    languages: int = 8              # this many of Global-MMLU, the first ones
    limit: int = 500                # questions per language of the commands with --deterministic
    only: str | None = None         # commands, separated by '|', instead of all of them
    plot: str | None = None         # only draw this file of results again
    out: str = 'out/bench_several_gpus.json'


LANGUAGES = BENCHMARKS['global_mmlu'].languages


def bench(config):
    """Yield a table per model: seconds of each command, and whether its numbers are the same."""
    require_files(config, data="a folder with MMLU's files")
    for shape in config.shape:
        with tempfile.TemporaryDirectory() as folder:
            save_model(shape, Path(folder, 'model'), config.tokenizer)
            for split, rows in read_mmlu(config.data).items():
                for language in LANGUAGES[:config.languages]:
                    write_lines(Path(folder, 'data', f'{language}_{split}.jsonl'), rows)
            table = {'shape': shape, 'languages': config.languages, 'limit': config.limit,
                     'results': measure(config, Path(folder))}
        print_table(table)
        yield table


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
    # fills the caches on disk
    run(['--limit=1', f'--languages={LANGUAGES[0]}'], 1, folder / 'first')
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
    return command_seconds([
        *torchrun * (processes > 1), 'evaluate.py', f'--model={out.parent / "model"}',
        f'--tasks=global_mmlu:{out.parent / "data"}', f'--device={DEVICE}', '--dtype=bfloat16',
        f'--out_dir={out}', *options])


def print_table(table):
    """Print the table as Markdown; speed-ups are relative to one GPU with whole weights."""
    results, lines = table['results'], []
    for name, row in results.items():
        one = results.get('1 GPU' + ', deterministic' * ('deterministic' in name))
        speed_up = {key: f'{one[key] / max(row[key], 0.01):.2f}' if one else ''
                    for key in ('seconds', 'scoring_s')}
        before, after = '', ''
        if 'before_s' in row:       # results of older versions lack it
            before = f'{row["before_s"]:.1f}'
            after = f'{row["seconds"] - row["before_s"] - row["scoring_s"]:.1f}'
        lines.append((label(name, table), f'{row["seconds"]:.1f}', speed_up['seconds'], before,
                      f'{row["scoring_s"]:.1f}', speed_up['scoring_s'], after,
                      {None: '', True: 'yes', False: 'no'}[row['same']]))
    print(f'\n### {table["shape"]}, MMLU as {table["languages"]} languages, whole commands\n',
          table_text(('command', 's', 'speed-up', 'before scoring, s', 'scoring, s', 'speed-up',
                      'after it, s', 'bitwise as one GPU'), lines), sep='\n', flush=True)


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


main = script_main(__file__, BenchConfig, bench, draw)

if __name__ == '__main__':
    main(sys.argv[1:])
