"""5-shot MMLU, from files to results.json, compared with a Hugging Face loop: docs/benchmarks.md.

    python research/bench/eval.py --data=mmlu --tokenizer=Llama-3.2-1B
"""

import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from research.bench.common import (DEVICE, MODELS, Options, Script, Shape, attempt, bars, busy_time,
                                   device_rates, free_memory, gpu_kernels, now, our_model,
                                   peak_gib, peer_model, require_files, reset_peak_memory, section)
from data.tokenizer import load_model_tokenizer
from evaluate import EvalConfig, evaluate, load_tasks
from runtime import checkpoint, saving
from scoring import option_log_probs, row_lengths


@dataclass
class BenchConfig(Options):
    shape: tuple[Shape, ...] = ('gemma2_2b', 'llama32_1b', 'llama31_8b')
    data: str | None = None         # a folder or a hub dataset with MMLU's files
    tokenizer: str | None = None    # a folder with a tokenizer
    sample: int = 1024              # questions on which the Hugging Face loop is timed


# attention of the Hugging Face model, prompts per batch
PEERS = {'gemma2_2b': ('flex_attention', 16), 'llama32_1b': ('sdpa', 32),
         'llama31_8b': ('sdpa', 32), 'mistral_7b': ('sdpa', 32)}


def bench(config):
    require_files(config, data="a folder with MMLU's files")
    rate, _ = device_rates()
    for name in config.shape:
        raw = MODELS[name]
        with tempfile.TemporaryDirectory() as folder:
            ours, lengths = measure_ours(raw, config, Path(folder), rate)
        table = {'shape': name, 'matrix_rate': rate, 'results': {'ours': ours}}
        free_memory()
        if not config.ours:
            table['results']['Hugging Face'] = attempt(measure_peer, raw, *PEERS[name], lengths,
                                                       config.sample)
            free_memory()
        yield table


def measure_ours(raw, config, folder, rate):
    """Return the row of MMLU from its files to results.json, and the tokens of each prompt."""
    model = our_model(raw).eval()
    saving.save(model, folder, torch.bfloat16, side_files=config.tokenizer)
    cfg = EvalConfig(model=str(folder), chat='none', tasks=(f'mmlu:{config.data}',),
                     dtype='bfloat16', device=DEVICE, add_bos=True, max_length=8192, overwrite=True,
                     out_dir=str(folder / 'out'))
    (folder / 'out').mkdir()        # as the lock of evaluate.py's command does
    pack_len, trim = row_lengths(cfg)
    tokenizer = load_model_tokenizer(folder, checkpoint.read_config(folder))
    task = load_tasks(cfg)['mmlu']
    trees = [tree for _, tree in replace(task, items=task.tested).tokenize(tokenizer, cfg)]
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
    profiled = {'mmlu': replace(task, items=task.tested[:4000])}
    busy = busy_share(lambda: evaluate(folder, tokenizer, profiled, cfg, cfg.out_dir,
                                       lambda: model))
    row = {'questions_per_s': len(trees) / seconds, 'seconds': seconds, 'reading_s': reading,
           'scoring_s': scoring, 'results_s': seconds - reading - scoring, 'first_s': first,
           'tokens': tokens, 'rows': -(-tokens // pack_len), 'gpu_busy': busy, 'peak_gib': peak,
           'of_matrix_rate': flops * tokens / max(scoring, 0.01) / rate}
    return row, [len(tree.prefix) + len(tree.prompt) for tree in trees]


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


def view(table):
    ours, peer = table['results']['ours'], table['results'].get('Hugging Face', {})
    results = {'ours': ours}
    text = (f'{ours["tokens"]:,} tokens. A large matrix product has '
            f'{table["matrix_rate"] / 1e12:.0f} TFLOP/s. Loading the kernels took '
            f'{ours["first_s"]:.1f} s, which are not counted. "GPU busy" was measured in another '
            f'run, with 4,000 questions.')
    if 'failed' in peer:
        results['Hugging Face'] = peer
    elif peer:
        results[f'Hugging Face, {peer["attention"]}'] = dict.fromkeys(ours) | peer | {
            'scoring_s': peer['seconds']}
        text += (f'\nThe seconds of Hugging Face are those of its forward passes, computed from a '
                 f'sample of the questions. Ours is '
                 f'{ours["questions_per_s"] / peer["questions_per_s"]:.2f} times as fast.')
    return *section('eval', table, results), text


script = Script(__file__, BenchConfig, bench, view, bars('seconds for MMLU', 'seconds', '.1f'))

if __name__ == '__main__':
    script.main(sys.argv[1:])
