"""Fine-tuning commands: `python train.py` compared with TRL's SFTTrainer, see docs/benchmarks.md.

    python research/bench/sft.py --data=conversations.jsonl --tokenizer=Llama-3.2-1B

Both supervise the last answer (ours every answer), pack rows of 4,096 tokens and take about as many
steps. TRL prints the end of the first step at once, ours after launching the second one.
"""

import itertools
import json
import os
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).parents[2]))

from research.bench.common import (DEVICE, METHODS, PeerOptions, Script, Shape, byte_code, cell,
                                   chosen_methods, empty_caches, last_error, require_files,
                                   run_command, save_model)
from research.common import write_lines
from bridges.export import tokenizer_files
from data.files import read_rows
from data.instruct import PATTERNS, first_turns, load_conversations
from data.messages import to_messages
from data.tokenizer import begins_with_bos, load_tokenizer
from runtime.sources import fetch
from train import TrainConfig


@dataclass
class BenchConfig(PeerOptions):
    shape: tuple[Shape, ...] = ('llama32_1b',)
    data: str | None = None         # conversations, as in train.py
    conversations: int | None = None    # only this many, the first ones; None: all
    tuning: tuple[Literal['full', 'LoRA'], ...] = ('full', 'LoRA')
    caches: tuple[Literal['cold', 'warm'], ...] = ('cold', 'warm')


TEMPLATE, PACK_LEN, BATCH = 'tulu', 4096, TrainConfig.batch_size
OURS = 'ours'
# the beginning of the line, of both commands, with which a stage ends; saving ends the command
STAGES = {'imports, data, weights': r'device: ', 'first step': r'step 1/',
          'other steps': r'peak memory \d'}
SAVING = 'saving'


def bench(config):
    require_files(config, data='a file of conversations')
    methods = chosen_methods('sft', config)
    byte_code()
    for shape in config.shape:
        with tempfile.TemporaryDirectory() as folder:
            table = {'shape': shape, **prepare(config, shape, Path(folder)), 'results': {}}
            for method, tuning in itertools.product(methods, config.tuning):
                row = table['results'][f'{method}, {tuning}'] = {}
                caches = empty_caches(Path(folder) / f'caches of {method} {tuning}')
                # a run with empty caches must fill them first
                for kind in ('cold', 'warm'):
                    if 'failed' not in row and (kind in config.caches or kind == 'cold'):
                        row |= run(method, tuning, kind, table, caches, Path(folder))
                if 'cold' not in config.caches:
                    row.pop('cold', None)
                print(f'{shape}: {method}, {tuning}: {row}', flush=True)
            yield table


def prepare(config, shape, folder):
    """Write the model and the conversations; return {what a table says about them}."""
    tokenizer = load_tokenizer(Path(config.tokenizer))
    add_bos = begins_with_bos(tokenizer, None)
    save_model(shape, folder / 'model', config.tokenizer,
               more=tokenizer_files(config.tokenizer, tokenizer, TEMPLATE, add_bos))
    rows = (row for file in fetch(config.data, PATTERNS) for row in read_rows(file))
    talks = [to_messages(row) for _, row in first_turns(rows)][:config.conversations]
    for name, to_row in (('ours', lambda talk: {'messages': talk}),
                         ('TRL', lambda talk: {'prompt': talk[:-1], 'completion': talk[-1:]})):
        write_lines(folder / f'{name}.jsonl', [to_row([
            {key: turn[key] for key in ('role', 'content')} for turn in talk]) for talk in talks])
    sequences = load_conversations(
        str(folder / 'ours.jsonl'), tokenizer, template=TEMPLATE, max_length=PACK_LEN,
        add_bos=add_bos, workers=os.cpu_count(), cache_dir=str(folder / 'tokens'),
        on_bad_row='stop')
    tokens = int(sequences.lengths.sum())
    # rows of TRL in a step, for as many steps as ours
    rows = max(1, round(tokens / len(sequences) * BATCH / PACK_LEN))
    return {'conversations': len(sequences), 'tokens': tokens, 'rows': rows}


def run(method, tuning, kind, table, caches, folder):
    """Return {kind: {stage: seconds}, 'steps', 'peak_gib'} of a command; ours must not fail."""
    out = folder / f'{method}-{tuning}-{kind}'
    if method == OURS:
        command = [
            'train.py', f'--model={folder / "model"}', f'--data={folder / "ours.jsonl"}',
            f'--template={TEMPLATE}', f'--pack_len={PACK_LEN}', f'--max_length={PACK_LEN}',
            '--epochs=1', '--checkpoint_epochs=False', f'--lora={tuning == "LoRA"}',
            f'--cache_dir={caches["HF_DATASETS_CACHE"]}', f'--out_dir={out}', f'--device={DEVICE}']
    else:
        adapters = {'r': TrainConfig.lora_rank, 'lora_alpha': TrainConfig.lora_alpha,
                    'lora_dropout': TrainConfig.lora_dropout,
                    'target_modules': list(TrainConfig.lora_targets)}
        command = ['research/bench/trl_sft.py', json.dumps(METHODS['sft']['peers'][method] | {
            'model': str(folder / 'model'), 'data': str(folder / 'TRL.jsonl'), 'out': str(out),
            'pack_len': PACK_LEN, 'rows': table['rows'],
            'lora': adapters if tuning == 'LoRA' else None})]
    try:
        ends, text = run_command(command, caches, STAGES.values())
    except RuntimeError as error:
        if method == OURS:
            raise
        return {'failed': f'{kind}: {last_error(str(error))}'}
    stages = {stage: round(end - before, 2) for stage, before, end in zip(
        (*STAGES, SAVING), (0, *ends), ends)}
    steps = re.search(r'^steps: (\d+)', text, re.MULTILINE)
    peak = re.search(r'^peak memory (\d+\.\d+) GiB', text, re.MULTILINE)
    return {kind: stages | {'until the end': round(ends[-1], 2)}, 'steps': int(steps[1]),
            'peak_gib': float(peak[1])}


def view(table):
    totals = {}     # (tuning, kind) -> {method: seconds until first step, until end}
    lines = [['command', 'caches', 'until the first step', 'until the end', *STAGES, SAVING,
              'steps', 'peak GiB']]
    for name, row in table['results'].items():
        method, _, tuning = name.rpartition(', ')
        for kind, stages in ((kind, row[kind]) for kind in ('cold', 'warm') if kind in row):
            total = sum(stages[stage] for stage in list(STAGES)[:2]), stages['until the end']
            totals.setdefault((tuning, kind), {})[method] = total
            lines.append([name, kind, *(f'{s:.1f}' for s in (
                *total, *(stages[stage] for stage in (*STAGES, SAVING)))),
                str(row['steps']), f'{row["peak_gib"]:.1f}'])
        if 'failed' in row:
            lines.append([name, f'failed: {cell(row["failed"])}'])
    ratios = []
    for (tuning, kind), methods in totals.items():
        ours = methods.pop(OURS, None)
        if ours and methods:
            first, end = (own / min(theirs) for own, theirs in zip(ours, zip(*methods.values())))
            ratios.append(f'{tuning}, {kind}: ours takes {first:.2f} of the fastest peer\'s time '
                          f'until the first step, {end:.2f} until the end.')
    return (f'{table["shape"]}, seconds of whole commands, {table["conversations"]:,} '
            f'conversations, {table["tokens"]:,} tokens', lines, '\n'.join(ratios))


script = Script(__file__, BenchConfig, bench, view)

if __name__ == '__main__':
    script.main(sys.argv[1:])
