"""Written answers to GSM8K with every confidence, compared with lm-evaluation-harness, on CUDA.

    python research/bench/gsm8k_answers.py --data=gsm8k --tokenizer=Llama-3.2-1B

Both read the same prompts with five shots, draw at temperature 1, and end an answer at the end
token, before 'Question:' and after 256 tokens; docs/benchmarks.md says what is timed.
"""

import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from research.bench.common import (DEVICE, Options, Script, Shape, attempt, bars, free_memory, load,
                                   now, peak_gib, reset_peak_memory, run_command, save_model,
                                   section)
from data.eval_config import EvalConfig
from data.files import read_rows
from data.tokenizer import begins_with_bos, load_model_tokenizer
from written.benchmarks import WRITTEN_TASKS
from evaluate import load_tasks
from runtime import checkpoint
from runtime.errors import ConfigError


@dataclass
class BenchConfig(Options):
    shape: tuple[Shape, ...] = ('llama32_1b',)
    model: str | None = None        # a folder with weights, instead of random ones in a shape
    data: str | None = None         # a folder with GSM8K's test.jsonl and train.jsonl
    tokenizer: str | None = None    # a folder with a tokenizer, for random weights
    n: int = 16                     # samples per question
    max_tokens: int = WRITTEN_TASKS['gsm8k'].max_tokens
    questions: int = 64             # that lm_eval answers
    batch: tuple[int, ...] = (512, 1024)    # answers that lm_eval writes at once
    out: str = 'out/bench_answers.json'


def bench(config):
    if not (config.data and (config.tokenizer or config.model)):
        raise ConfigError("set --data, a folder with GSM8K's files, and --tokenizer or --model, "
                          'folders')
    for name in [config.model] if config.model else config.shape:
        with tempfile.TemporaryDirectory() as folder:
            model = Path(config.model).resolve() if config.model else Path(folder, 'model')
            if not config.model:
                save_model(name, model, config.tokenizer)
            table = {'shape': name, 'n': config.n,
                     'results': measure_ours(model, config, Path(folder, 'out'))}
            if not config.ours:
                peer = attempt(measure_peer, model, config)
                table['results'] |= {'lm_eval': peer} if 'failed' in peer else peer
        free_memory()
        yield table


def measure_ours(model, config, out):
    """Return {name: timing} of `python evaluate.py`: only the tokens of its answers count."""
    (whole,), _ = run_command([
        'evaluate.py', f'--model={model}', f'--tasks=gsm8k:{Path(config.data).resolve()}',
        f'--n={config.n}', f'--max_tokens={config.max_tokens}', '--p_true', '--p_ik',
        '--verbalized', f'--device={DEVICE}', '--dtype=bfloat16', f'--out_dir={out}'])
    answers = [answer for _, row in read_rows(out / 'samples.jsonl') if row['task'] == 'gsm8k'
               for answer in (row['greedy'], *row['answers'])]
    writing = load(out / 'results.json')['tasks']['gsm8k']['scoring_seconds']
    tokens = sum(answer['n_tokens'] for answer in answers)
    return {'ours, whole command with all confidences': timing(len(answers), tokens, whole),
            'ours, answers alone': timing(len(answers), tokens, writing)}


def timing(answers, tokens, seconds):
    return {'answers': answers, 'tokens': tokens, 'seconds': seconds,
            'tokens_per_s': tokens / max(seconds, 0.01)}


def measure_peer(model, config):
    """Return {name: timing} of HFLM.generate_until for each size of its batches."""
    started = time.perf_counter()
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    tokenizer = load_model_tokenizer(model, checkpoint.read_config(model))
    peer = HFLM(str(model), dtype='bfloat16', device=DEVICE,
                add_bos_token=begins_with_bos(tokenizer, None))
    print(f'lm_eval started in {time.perf_counter() - started:.1f} s', flush=True)
    tokens, generate = [], peer._model_generate

    def count(context, **options):
        written = generate(context=context, **options)
        tokens.append(int((written[:, context.shape[1]:] != peer.tokenizer.pad_token_id).sum()))
        return written

    def write(prompts, n, max_tokens):
        settings = {'until': list(WRITTEN_TASKS['gsm8k'].stop), 'max_gen_toks': max_tokens,
                    'do_sample': True, 'temperature': 1.0, 'top_k': 0, 'top_p': 1.0}
        return peer.generate_until([
            Instance('generate_until', {}, (prompt, settings), 0)
            for prompt in prompts for _ in range(n)], disable_tqdm=True)

    def time_answers():
        write(prompts[:1], 1, 2)        # loads kernels
        tokens.clear()
        reset_peak_memory()
        started = now()
        answers = write(prompts, config.n, config.max_tokens)
        return timing(len(answers), sum(tokens), now() - started) | {'peak_gib': peak_gib()}

    peer._model_generate = count
    task = load_tasks(EvalConfig(tasks=(f'gsm8k:{config.data}',)))['gsm8k']
    shots = ''.join(shot.solved for shot in task.shots[''])
    prompts, rows = [shots + question.context for question in task.tested[:config.questions]], {}
    for size in config.batch:
        peer.batch_size_per_gpu = size
        rows[f'lm_eval, {size} at once'] = attempt(time_answers)    # the memory may be full
        free_memory()
    return rows


def view(table):
    """Return a section for a table, see `Script`; ratios are to lm_eval at its best."""
    best = max((row['tokens_per_s'] for name, row in table['results'].items()
                if name.startswith('lm_eval') and 'failed' not in row), default=None)
    results = {name: row | {'ratio': row['tokens_per_s'] / best}
               if best and name.startswith('ours') else row
               for name, row in table['results'].items()}
    return section('answers', table, results)


script = Script(__file__, BenchConfig, bench, view, bars('tokens/s', 'tokens_per_s', ',.0f'))

if __name__ == '__main__':
    script.main(sys.argv[1:])
