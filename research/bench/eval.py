"""5-shot MMLU, from files to results.json, compared with a Hugging Face loop, on one CUDA device.

    python research/bench/eval.py --data=mmlu --tokenizer=Llama-3.2-1B
    python research/bench/eval.py --data=mmlu --tokenizer=Llama-3.2-1B --ours --variants
    python research/bench/eval.py --plot=out/bench_eval.json

The models have random weights. For ours the whole evaluation is timed; for the loop, which does
what lm-evaluation-harness does, the forward passes alone. Writes out/bench_eval.json and its
picture.
"""

import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

import triton_ops
from research.bench.common import (DEVICE, MODELS, Shape, busy_time, cell, draw_bars, failure,
                                   free_memory, gpu_kernels, load, matrix_rate, now, our_model,
                                   peak_gib, peer_model, require_files, reset_peak_memory,
                                   script_main, table_text)
from data.tokenizer import load_model_tokenizer
from evaluate import EvalConfig, evaluate, load_tasks
from runtime import checkpoint
from scoring import option_log_probs, row_lengths


@dataclass
class BenchConfig:
    shape: tuple[Shape, ...] = ('gemma2_2b', 'llama32_1b', 'llama31_8b')
    data: str | None = None         # a folder or a hub dataset with MMLU's files
    tokenizer: str | None = None    # a folder with a tokenizer
    sample: int = 1024              # questions on which the Hugging Face loop is timed
    ours: bool = False              # only ours, without the Hugging Face loop
    variants: bool = False          # also time our forward pass with fewer kernels
    plot: str | None = None         # only draw this file of results again
    out: str = 'out/bench_eval.json'


# attention of the Hugging Face model, prompts per batch
PEERS = {'gemma2_2b': ('flex_attention', 16), 'llama32_1b': ('sdpa', 32),
         'llama31_8b': ('sdpa', 32), 'mistral_7b': ('sdpa', 32)}
# of our forward pass: (triton_ops.KERNELS, decoder.attention)
VARIANTS = {'all kernels': (True, 'auto'), 'the kernel of attention alone': (False, 'auto'),
            'no kernels, FlexAttention': (False, 'flex')}


def bench(config):
    """Yield a table per model: questions per second, of the peer its forward passes alone."""
    require_files(config, data="a folder with MMLU's files")
    rate = matrix_rate()
    print(f'matrix rate {rate / 1e12:.0f} TFLOP/s')
    for name in config.shape:
        raw = MODELS[name]
        with tempfile.TemporaryDirectory() as folder:
            table = {'shape': name, 'matrix_rate': rate,
                     'results': {'ours': measure_ours(raw, config, Path(folder), rate)}}
        free_memory()
        lengths = table['results']['ours'].pop('lengths')
        try:
            if not config.ours:
                table['results']['Hugging Face'] = measure_peer(raw, *PEERS[name], lengths,
                                                                config.sample)
        except Exception as error:      # a peer's
            table['results']['Hugging Face'] = failure(error)
        free_memory()
        print_table(table)
        yield table


def measure_ours(raw, config, folder, rate):
    """Time MMLU from its files to results.json, after a few questions that load the kernels."""
    model = our_model(raw).eval()
    checkpoint.save(model, folder, torch.bfloat16, side_files=config.tokenizer)
    cfg = EvalConfig(model=str(folder), tasks=(f'mmlu:{config.data}',), dtype='bfloat16',
                     device=DEVICE, add_bos=True, max_length=8192, overwrite=True,
                     out_dir=str(folder / 'out'))
    pack_len, trim = row_lengths(cfg)
    tokenizer = load_model_tokenizer(folder, checkpoint.read_config(folder))
    task = load_tasks(cfg)['mmlu']
    trees = [tree for _, tree in replace(task, validation=[]).tokenize(tokenizer, cfg)]
    started = now()
    option_log_probs(model, trees[:16], pack_len=pack_len, trim=trim)
    first = now() - started
    reset_peak_memory()
    started = now()
    tasks = load_tasks(cfg)
    reading = now() - started
    results = evaluate(folder, tokenizer, tasks, cfg, cfg.out_dir, lambda: model)
    seconds = now() - started
    scoring, peak = results['tasks']['mmlu']['scoring_seconds'], peak_gib()
    # the last token of an option is not computed
    tokens = (sum(len(tree.prompt) + sum(max(0, len(ids) - 1) for ids in tree.continuations)
                  for tree in trees)
              + sum(map(len, {tree.prefix for tree in trees})))
    # the last MLP is computed for one token per question
    flops = 2 * (sum(p.numel() for p in model.parameters())
                 - sum(p.numel() for p in model.decoder.layers[-1].mlp.parameters())
                 - raw['vocab_size'] * raw['hidden_size'] * (2 - raw['tie_word_embeddings']))
    profiled = {'mmlu': replace(task, items=task.items[:4000])}
    busy = busy_share(lambda: evaluate(folder, tokenizer, profiled, cfg, cfg.out_dir,
                                       lambda: model))
    return {'variants': time_variants(model, trees[:2000]) if config.variants else {},
            'questions_per_s': len(trees) / seconds, 'seconds': seconds, 'reading_s': reading,
            'scoring_s': scoring, 'results_s': seconds - reading - scoring, 'first_s': first,
            'tokens': tokens, 'rows': -(-tokens // pack_len),
            'of_matrix_rate': flops * tokens / max(scoring, 0.01) / rate,
            'gpu_busy': busy, 'peak_gib': peak,
            'lengths': [len(tree.prefix) + len(tree.prompt) for tree in trees]}


def time_variants(model, trees):
    """Return {variant: seconds to score `trees`} in rows of one length, after a warm-up."""
    seconds = {}
    for name, (kernels, attention) in VARIANTS.items():
        triton_ops.KERNELS, model.decoder.attention = kernels, attention
        for _ in range(2):      # the first time kernels are loaded or compiled
            started = now()
            option_log_probs(model, trees, pack_len=16384, trim=0)
            seconds[name] = now() - started
    triton_ops.KERNELS = True
    return seconds


def busy_share(call):
    """Return the share of the time between the first kernel and the last that a kernel ran."""
    kernels = gpu_kernels(call)
    return (busy_time(kernels) / (max(end for *_, end in kernels) - kernels[0][1])
            if kernels else 0.0)


def measure_peer(raw, attention, batch, lengths, sample):
    """Time the way of lm-evaluation-harness: sorted, padded, one forward pass per question."""
    model = peer_model(raw, attention).eval()
    generator = torch.Generator().manual_seed(0)
    picked = torch.randperm(len(lengths), generator=generator)[:sample].tolist()
    longest_first = sorted((lengths[i] for i in picked), reverse=True)

    @torch.no_grad()
    def run(lengths):
        for i in range(0, len(lengths), batch):
            rows = torch.tensor(lengths[i:i + batch], device=DEVICE)
            ids = torch.randint(0, raw['vocab_size'], (len(rows), lengths[i]), device=DEVICE)
            log_probs = torch.log_softmax(model(input_ids=ids).logits, -1)
            log_probs[torch.arange(len(rows)), rows - 1, 32:36].float().cpu()
            del log_probs
    run(longest_first[:2 * batch])
    started = now()
    reset_peak_memory()
    run(longest_first)
    rate = len(longest_first) / (now() - started)
    return {'questions_per_s': rate, 'seconds': len(lengths) / rate, 'attention': attention,
            'peak_gib': peak_gib()}


def print_table(table):
    """Print a table as Markdown, and what its numbers mean."""
    ours, peer = table['results']['ours'], table['results'].get('Hugging Face')
    lines = [['ours', f'{ours["questions_per_s"]:,.0f}', *(
        f'{ours[key]:.1f}' for key in ('seconds', 'reading_s', 'scoring_s', 'results_s')),
        f'{ours["of_matrix_rate"]:.1%}', f'{ours["gpu_busy"]:.1%}', f'{ours["peak_gib"]:.1f}']]
    if peer:
        lines.append(['Hugging Face', cell(peer['failed'])] if 'failed' in peer else [
            f'Hugging Face, {peer["attention"]}', f'{peer["questions_per_s"]:,.0f}',
            seconds := f'{peer["seconds"]:.1f}', None, seconds, None, None, None,
            f'{peer["peak_gib"]:.1f}'])
    print(f'\n### {table["shape"]}, MMLU with 5 shots, bfloat16\n', table_text((
        'method', 'questions/s', 's', 'reading, s', 'scoring, s', 'metrics and files, s',
        'of the matrix rate', 'GPU busy', 'peak GiB'), lines), sep='\n')
    print(f'\n{ours["tokens"]:,} tokens. A large matrix product has '
          f'{table["matrix_rate"] / 1e12:.0f} TFLOP/s. Loading the kernels took '
          f'{ours["first_s"]:.1f} s, which are not counted. "GPU busy" was measured in another '
          f'run, with 4,000 questions.')
    if peer and 'failed' not in peer:
        print(f'The seconds of Hugging Face are those of its forward passes, computed from a '
              f'sample of the questions. Ours is '
              f'{ours["questions_per_s"] / peer["questions_per_s"]:.2f} times as fast.')
    for name, seconds in ours.get('variants', {}).items():
        print(f'\n2,000 questions with {name}: {seconds:.2f} s')
    sys.stdout.flush()


def draw(path):
    """Draw the seconds for the test set, ours and the peer's."""
    draw_bars(path, 'MMLU', {'seconds, 14,042 questions with 5 shots': [
        (f'{table["shape"]}: {name}', row['seconds'], f'{row["seconds"]:.1f}')
        for table in load(path)['tables'] for name, row in table['results'].items()
        if 'failed' not in row]})


main = script_main(__file__, BenchConfig, bench, draw)

if __name__ == '__main__':
    main(sys.argv[1:])
