"""Whole commands, from start to exit, compared with lm-evaluation-harness: docs/benchmarks.md.

    python research/bench/commands.py --shape=llama32_1b --data=mmlu --tokenizer=Llama-3.2-1B
"""

import importlib.util
import json
import os
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).parents[2]))

from research.bench.common import (DEVICE, PeerOptions, Script, Shape, chosen, empty_caches,
                                   last_error, load, read_mmlu, require_files, run_command,
                                   save_model, section)
from research.common import write_lines


@dataclass
class BenchConfig(PeerOptions):
    shape: tuple[Shape, ...] = ('llama32_1b', 'llama31_8b')
    data: str | None = None         # a folder with MMLU's files, whose rows name their subject
    caches: tuple[Literal['cold', 'warm'], ...] = ('cold', 'warm')
    repeats: int = 1                # runs with warm caches; each is listed
    batch_size: int = 32            # of lm_eval; its `auto` searches for one first
    lm_limit: int | None = None     # questions of each subject for lm_eval; None: all


MMLU, FEW, HELP, LM_EVAL = ('ours, MMLU, 5 shots', 'ours, 200 questions, no shots',
                            'ours, train.py --help', 'lm_eval, MMLU, 5 shots')
TASK = 'local_mmlu'


def bench(config):
    require_files(config, data="a folder with MMLU's files")
    # the commands run in the root of the repository
    config = replace(config, data=str(Path(config.data).resolve()))
    for shape in config.shape:
        with tempfile.TemporaryDirectory() as temporary:
            folder, results = Path(temporary), {}
            save_model(shape, folder / 'model', config.tokenizer)
            write_tasks(config, folder)
            for name, command in chosen(config.only, commands(config, folder)).items():
                results[name] = run(name, command, config, folder)
                print(f'{shape}: {name}: {results[name]}', flush=True)
            yield {'shape': shape, 'results': results}


def commands(config, folder):
    """Return {name: arguments of python} of the commands to time; with --ours not lm_eval's."""
    ours = ['evaluate.py', f'--model={folder / "model"}', '--add_bos=True', '--overwrite',
            f'--out_dir={folder / "out"}', f'--device={DEVICE}', '--dtype=bfloat16']
    lm_eval = ['-m', 'lm_eval', 'run', '--model', 'hf', '--model_args',
               f'pretrained={folder / "model"},dtype=bfloat16,add_bos_token=True', '--tasks', TASK,
               '--include_path', str(folder / 'tasks'), '--num_fewshot', '5', '--batch_size',
               str(config.batch_size), '--device', DEVICE, '--output_path', str(folder / 'lm_eval')]
    if config.lm_limit is not None:
        lm_eval += ['--limit', str(config.lm_limit)]
    return {
        MMLU: [*ours, f'--tasks=mmlu:{config.data}', '--shots=5', '--prompt_format=harness'],
        **({} if config.ours else {LM_EVAL: lm_eval}),
        FEW: [*ours, f'--tasks={folder / "few.jsonl"}', '--shots=0'], HELP: ['train.py', '--help']}


def run(name, command, config, folder):
    """Time a command as `config.caches` says; ours must not fail.

    If only warm runs are wanted, one fills the caches first: of lm_eval, a question per subject.
    """
    caches = empty_caches(folder / f'caches of {name}')
    plan = [kind for kind in ('cold', 'warm') if kind in config.caches
            for _ in range(config.repeats if kind == 'warm' else 1)]
    result = {}
    try:
        if 'cold' not in plan:
            run_command(command + ['--limit', '1'] * (name == LM_EVAL), caches)
        for kind in plan:
            (seconds,), _ = run_command(command, caches)
            result.setdefault(kind, []).append(round(seconds, 2))
    except RuntimeError as error:
        if name != LM_EVAL:
            raise
        return {'failed': last_error(str(error))}
    if name == MMLU:
        tasks = load(folder / 'out/results.json')['tasks']
        result['accuracy'] = tasks['mmlu']['pooled']['accuracy']
    if name == LM_EVAL:
        newest = max((folder / 'lm_eval').rglob('results_*.json'), key=os.path.getmtime)
        result['accuracy'] = load(newest)['results'][TASK]['acc,none']
        result['batch_size'], result['questions per subject'] = config.batch_size, config.lm_limit
    return result


def write_tasks(config, folder):
    """Write the first 200 questions, and MMLU's files for lm_eval: its own tasks, read from disk.

    A task of ours includes that of lm_eval and changes nothing but where the rows are.
    """
    rows = read_mmlu(config.data)
    write_lines(folder / 'few.jsonl', rows['test'][::max(1, len(rows['test']) // 200)][:200])
    spec = importlib.util.find_spec('lm_eval')
    if spec is None or config.ours:
        return      # its command fails then, and says why
    tasks, published = folder / 'tasks', Path(spec.origin).parent / 'tasks/mmlu/default'
    subjects = [*dict.fromkeys(row['subject'] for row in rows['test'])]
    for subject in subjects:
        files = {split: str(tasks / f'{subject}_{split}.jsonl') for split in rows}
        for split, path in files.items():
            write_lines(Path(path), [row for row in rows[split] if row['subject'] == subject])
        (tasks / f'{subject}.yaml').write_text(json.dumps({     # JSON is YAML
            'include': str(published / f'mmlu_{subject}.yaml'), 'task': f'{TASK}_{subject}',
            'tag': None, 'dataset_path': 'json', 'dataset_name': None,
            'dataset_kwargs': {'data_files': files}}))
    (tasks / 'group.yaml').write_text(json.dumps({
        'group': TASK, 'task': [f'{TASK}_{subject}' for subject in subjects],
        'aggregate_metric_list': [{'metric': 'acc', 'weight_by_size': True}]}))


def view(table):
    """Return a section for a table, see `Script`; ratios are lm_eval's seconds over ours."""
    peer, rows = table['results'].get(LM_EVAL, {}), {}
    for name, row in table['results'].items():
        rows[name] = row | {'note': ''}
        for kind in {'cold', 'warm'} & row.keys():
            rows[name][kind] = ', '.join(f'{value:.1f}' for value in row[kind])
            if name == MMLU and kind in peer and not peer.get('questions per subject'):
                rows[name][f'{kind} ratio'] = f'{min(peer[kind]) / min(row[kind]):.1f} x'
        if 'batch_size' in row:
            rows[name]['note'] = f'batch size {row["batch_size"]}'
        if row.get('questions per subject'):
            rows[name]['note'] += f', only {row["questions per subject"]} questions per subject'
    return section('commands', table, rows)


script = Script(__file__, BenchConfig, bench, view)

if __name__ == '__main__':
    script.main(sys.argv[1:])
