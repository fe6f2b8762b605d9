"""GRPO compared with TRL's GRPOTrainer: seconds of the parts of a step, see docs/benchmarks.md.

    python research/bench/grpo.py --prompts=gsm8k.jsonl --tokenizer=Llama-3.2-1B
"""

import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).parents[2]))

import train
from align import ROLLOUTS, AlignConfig
from research.bench.common import (DEVICE, MODELS, PeerOptions, Script, bars, chosen_methods,
                                   decoding_limit, device_rates, measure_methods, now, peak_gib,
                                   require_files, save_model, section)
from research.common import write_lines
from research.bench.peers import TRL_SETTINGS
from bridges.export import tokenizer_files
from data.files import read_rows
from data.tokenizer import begins_with_bos, load_tokenizer
from runtime import checkpoint
from runtime.build import build_optimizer
from runtime.config_json import config_from_hf


@dataclass
class BenchConfig(PeerOptions):
    shape: tuple[Literal['llama32_1b', 'llama31_8b'], ...] = ('llama32_1b',)
    prompts: str | None = None      # rows with `prompt` or `question`, such as GSM8K's


PROMPTS, ANSWERS, TOKENS = 32, 8, 256       # of a step: prompts, answers to each, their tokens
STEPS = 2           # that are timed, after one that compiles
KL = 0.04           # weight of the KL in the loss
FRAME = '<|user|>\n{}\n<|assistant|>\n'     # the template tulu
PARTS = 'rollout_s', 'scoring_s', 'update_s'


def bench(config):
    require_files(config, prompts='a file of questions')
    methods, rates = chosen_methods('grpo', config), device_rates()
    for name in config.shape:
        with tempfile.TemporaryDirectory() as folder:
            prepare(name, config, Path(folder))
            yield {'shape': name, 'rates': rates,
                   'results': measure_methods(__file__, name, methods, folder=folder)}


def prepare(shape, config, folder):
    """Write the model, the prompts and a reward to `folder`."""
    tokenizer = load_tokenizer(Path(config.tokenizer))
    save_model(shape, folder / 'model', config.tokenizer,
               more=tokenizer_files(config.tokenizer, tokenizer, 'tulu',
                                    begins_with_bos(tokenizer, None)))
    questions = [row.get('prompt') or row['question'] for _, row in read_rows(config.prompts)]
    for name, prompts in (('ours', questions), ('TRL', map(FRAME.format, questions))):
        write_lines(folder / f'{name}.jsonl', [{'prompt': prompt} for prompt in prompts])
    (folder / 'reward.py').write_text(
        'def reward(prompt, answer, row):\n    return answer.count("e") / 100\n')


def measure(folder, ours, options):
    """Return the median seconds of each part of a step and the peak memory."""
    marks = [*(our_steps if ours else trl_steps)(Path(folder), **options)]
    parts = {part: round(statistics.median(mark[i] for mark in marks[1:]), 2)
             for i, part in enumerate(PARTS)}
    return parts | {'step_s': round(sum(parts.values()), 2), 'first_s': round(sum(marks[0]), 1),
                    'peak_gib': round(peak_gib(), 1)}


def our_steps(folder, micro_rows=1):
    """Yield (rollout, scoring, update) seconds of each step."""
    cfg = AlignConfig(
        model=str(folder / 'model'), data=str(folder / 'ours.jsonl'), template='tulu',
        method='grpo', reward=str(folder / 'reward.py'), group_size=ANSWERS, max_tokens=TOKENS,
        max_length=1024, batch_size=PROMPTS, truncated='score', kl='loss', kl_coef=KL,
        micro_rows=micro_rows, val_size=0, out_dir=str(folder / 'run'), device=DEVICE)
    run = train.load_run(cfg, ROLLOUTS, DEVICE)
    run.model, run.reference = ROLLOUTS.build(run)
    optimizer = build_optimizer(run.model, cfg)
    for _, packed in ROLLOUTS.batches(run, 0, 1 + STEPS):
        started = now()
        ROLLOUTS.step(run.model, optimizer, packed, cfg, DEVICE, ROLLOUTS.objective)
        yield [packed.measured[part] for part in PARTS[:2]] + [now() - started]


def trl_steps(folder, size, liger=False):
    """Yield as `our_steps`, with micro-batches of `size` answers."""
    from datasets import load_dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    marks, seconds = [], {}

    def timed(name):
        def method(trainer, *arguments, **more):
            started = now()
            result = getattr(GRPOTrainer, name)(trainer, *arguments, **more)
            seconds[name] = now() - started
            return result
        return method

    class Steps(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            seconds['begin'] = now()

        def on_step_end(self, args, state, control, **_):
            rollout, both = (seconds[name] for name in names)
            marks.append((rollout, both - rollout, now() - seconds['begin'] - both))

    names = '_generate', '_generate_and_score_completions'
    trainer_class = type('Timed', (GRPOTrainer,), {name: timed(name) for name in names})
    config = GRPOConfig(
        output_dir=str(folder / 'trl'), max_steps=1 + STEPS, per_device_train_batch_size=size,
        gradient_accumulation_steps=PROMPTS * ANSWERS // size, num_generations=ANSWERS,
        max_completion_length=TOKENS, beta=KL, loss_type='grpo', temperature=1.0, top_k=0,
        learning_rate=5e-7, use_liger_kernel=liger, model_init_kwargs={'dtype': 'bfloat16'},
        **TRL_SETTINGS)
    trainer_class(
        str(folder / 'model'), args=config, callbacks=[Steps()],
        reward_funcs=lambda completions, **_: [text.count('e') / 100 for text in completions],
        train_dataset=load_dataset('json', data_files=str(folder / 'TRL.jsonl'), split='train'),
        processing_class=AutoTokenizer.from_pretrained(folder / 'model')).train()
    yield from marks


def limits(shape, rates, prompt_tokens=120):
    """Return {part: seconds} that the hardware needs at least, for prompts of that length."""
    model = checkpoint.build(config_from_hf(MODELS[shape])).bfloat16()
    n = PROMPTS * ANSWERS
    step, *_ = decoding_limit(model, n, n * (prompt_tokens + TOKENS / 2), rates)
    # the embedding is a lookup; the output matrix is needed for the answers alone
    blocks = sum(p.numel() for p in model.decoder.layers.parameters())
    forward = 2 * (PROMPTS * prompt_tokens * blocks + n * TOKENS * (blocks + model.head.numel()))
    return dict(zip(PARTS, (TOKENS * step, forward / rates[0], 3 * forward / rates[0])))


def view(table):
    limit, (title, lines) = limits(table['shape'], table['rates']), section('grpo', table)
    return title, [*lines, ['limit', *(f'{s:.2f}' for s in (sum(limit.values()), *limit.values()))]]


script = Script(__file__, BenchConfig, bench, view, bars('seconds of a step', 'step_s', '.2f'),
                measure=measure)

if __name__ == '__main__':
    script.main(sys.argv[1:])
