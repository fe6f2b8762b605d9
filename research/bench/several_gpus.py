"""`evaluate.py` on one GPU and on several: seconds, and whether the numbers are bitwise equal.

    python research/bench/several_gpus.py --data=mmlu --tokenizer=Llama-3.2-1B --processes=2,8

Each of `languages` of Global-MMLU has the questions of MMLU in `data`; `limit` of each are also
scored with --deterministic, and compared with one process. --only='1 GPU|2 GPUs' chooses commands.
"""

import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from data.benchmarks import BENCHMARKS
from research.bench.common import (DEVICE, Options, Script, Shape, bars, chosen, load, read_mmlu,
                                   require_files, run_command, save_model, section)
from research.common import write_lines


@dataclass
class BenchConfig(Options):
    shape: tuple[Shape, ...] = ('llama32_1b',)
    data: str | None = None         # a folder with MMLU's files
    tokenizer: str | None = None    # a folder with a tokenizer
    processes: tuple[int, ...] = (2,)   # to compare with one
    languages: int = 8              # this many of Global-MMLU, the first ones
    limit: int = 500                # questions per language of the commands with --deterministic
    only: str | None = None         # commands, separated by '|', instead of all of them


LANGUAGES = BENCHMARKS['global_mmlu'].languages


def bench(config):
    require_files(config, data="a folder with MMLU's files")
    for shape in config.shape:
        with tempfile.TemporaryDirectory() as folder:
            save_model(shape, Path(folder, 'model'), config.tokenizer)
            for split, rows in read_mmlu(config.data).items():
                for language in LANGUAGES[:config.languages]:
                    write_lines(Path(folder, 'data', f'{language}_{split}.jsonl'), rows)
            yield {'shape': shape, 'languages': config.languages, 'limit': config.limit,
                   'results': measure(config, Path(folder))}


def measure(config, folder):
    """Return {command: {'processes', 'seconds', 'before_s', 'scoring_s', 'same'}}.

    before_s: until scoring begins; same: whether the numbers are bitwise those of one process with
    --deterministic, or None
    """
    exact = ['--deterministic', f'--limit={config.limit}']
    kinds = {'': [], ', shared weights': ['--shard'], ', deterministic': exact,
             ', deterministic, shared weights': [*exact, '--shard']}
    commands = {f'{n} GPU{"s" * (n > 1)}{kind}': (n, options) for kind, options in kinds.items()
                for n in (1, *config.processes) if n > 1 or '--shard' not in options}
    commands, results, expected = chosen(config.only, commands), {}, None
    run(['--limit=1', f'--languages={LANGUAGES[0]}'], 1, folder / 'first')  # fills caches on disk
    for name, (n, options) in commands.items():
        out, started = folder / name, time.time()
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
    (seconds,), _ = run_command([
        *torchrun * (processes > 1), 'evaluate.py', f'--model={out.parent / "model"}',
        f'--tasks=global_mmlu:{out.parent / "data"}', f'--device={DEVICE}', '--dtype=bfloat16',
        f'--out_dir={out}', *options])
    return seconds


def view(table):
    """Return a section for a table, see `Script`; speed-ups are those over one GPU."""
    rows = {}
    for name, row in table['results'].items():
        one = table['results'].get('1 GPU' + ', deterministic' * ('deterministic' in name))
        row = row | {'same': {None: '', True: 'yes', False: 'no'}[row['same']]}
        if one:
            row |= {f'speed-up, {key}': one[key] / max(row[key], 0.01)
                    for key in ('seconds', 'scoring_s')}
        if 'before_s' in row:       # results of older versions lack it
            row['after_s'] = row['seconds'] - row['before_s'] - row['scoring_s']
        rows[name.replace('deterministic', f'deterministic, {table["limit"]} questions per '
                                           f'language')] = row
    return section('several_gpus', table, rows)


script = Script(__file__, BenchConfig, bench, view, bars('seconds', 'seconds', '.1f'))

if __name__ == '__main__':
    script.main(sys.argv[1:])
