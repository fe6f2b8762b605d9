"""Fine-tunes Llama, Gemma 2 or Mistral with label-smoothed cross-entropy on one device.

    python train.py configs/gemma2_ls01.py --lr=1e-5

One config file makes one run, or several (`runs`) that are compared at the end. The run's folder
holds the config, log.jsonl, the weights in Hugging Face layout with the tokenizer beside them, and
the calibration report.
"""

import contextlib
import json
import math
import os
import re
import shutil
import sys
import time
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from tqdm import tqdm

import model as models
from configs import ConfigError, dump_config, load_config, override, require_range
from data import DataError
from data.demo import make_world
from data.instruct import load_conversations
from data.packing import epoch_order, pack
from data.text import load_text
from evaluate import (SHORT, EvalConfig, draw_reliability, evaluate, load_model_tokenizer,
                      load_tasks, pick_device, pick_dtype, read_samples, table, task_label,
                      to_arrays, write_text)
from fused_ce import smoothed_cross_entropy


@dataclass
class TrainConfig:
    # model
    model: str = 'google/gemma-2-2b'          # a folder in Hugging Face layout, or a hub name
    revision: str | None = None               # the hub revision of the model
    from_scratch: bool = False                # random weights, in the shape of the config.json
    attention: Literal['auto', 'flex', 'explicit'] = 'auto'  # auto: flex on CUDA
    attn_dropout: float = 0.0                 # on attention weights; needs attention='explicit'
    resid_dropout: float = 0.0                # on what attention and MLP add to the residual
    # data
    data: str = 'allenai/tulu-3-sft-mixture'  # a file, a folder, or a hub dataset
    data_revision: str | None = None          # pin it: datasets on the hub change
    data_kind: Literal['instruct', 'text'] = 'instruct'
    template: Literal['tulu', 'llama3', 'gemma', 'mistral'] = 'tulu'
    add_bos: bool = True                      # exactly one, in training and evaluation
    max_length: int = 4096                    # tokens in a sequence; longer ones are cut
    on_bad_row: Literal['stop', 'skip'] = 'stop'
    cache_dir: str = 'out/cache'              # of tokenised data
    workers: int = 0                          # processes that tokenise; 0: one a core
    val_size: int = 0                         # sequences held out for the validation loss
    val_every: int = 200                      # steps between validation losses
    # batches
    batch_size: int = 128                     # sequences in an optimizer step
    pack_len: int = 4096                      # tokens in a packed row; >= max_length
    micro_rows: int = 1                       # rows in a forward pass; does not change the result
    # loss
    smoothing: float = 0.0                    # mass of the target spread over the vocabulary
    loss_reduction: Literal['token', 'sequence'] = 'token'  # mean over the step's tokens, or the
    #                                           mean of sequence means, as in older recipes
    loss_memory: int | None = None            # MB of work space for the loss: fewer are slower;
    #                                           None: 1100 on a GPU, 0: the least
    # optimizer
    epochs: float = 2.0
    max_steps: int | None = None              # stop earlier; the schedule is set to end there
    lr: float = 2e-5                          # at the end of warm-up
    schedule: Literal['linear', 'cosine'] = 'linear'
    warmup: float = 0.02                      # share of the steps
    final_lr: float = 0.0                     # at the end of the schedule, as a share of lr
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0                 # on matrices, not on norms
    grad_clip: float = 1.0                    # largest gradient norm; 0: none
    # calibration report
    eval_tasks: tuple[str, ...] = ()          # as in evaluate.py; () for none
    eval_before: bool = True                  # also before training; not for random weights
    eval_shots: int = 5
    eval_scoring: Literal['letters', 'text'] = 'letters'
    eval_norm: Literal['token', 'sum', 'char', 'byte'] = 'token'
    eval_limit: int | None = None
    eval_pack_len: int = 4096
    eval_batch_rows: int = 1
    # running
    out_dir: str = 'out/run'
    overwrite: bool = False                   # replace a finished run in out_dir
    checkpoint_epochs: bool = True            # keep the weights of each epoch in epoch-<n>/
    save_dtype: Literal['float32', 'bfloat16'] = 'bfloat16'  # of the weights on disk
    dtype: Literal['auto', 'float32', 'bfloat16'] = 'auto'  # of products; auto: bfloat16 on a GPU
    device: str = 'auto'
    seed: int = 0
    log_every: int = 1                        # steps between printed lines; log.jsonl has them all
    dry_run: bool = False                     # print sizes, do two steps, write no run folder
    # several runs in one: name -> the keys that differ; each has its folder out_dir/name.
    # '{out_dir}' in a string stands for the common folder
    runs: dict = field(default_factory=dict)
    demo_world: str | None = None             # first generate the demo world into this folder


def check(cfg):
    """Raises ConfigError for a value that no run can use."""
    require_range(cfg, 1, math.inf, 'batch_size', 'micro_rows', 'log_every', 'val_every',
                  'max_steps', 'eval_limit', 'eval_batch_rows')
    require_range(cfg, 2, math.inf, 'pack_len', 'max_length', 'eval_pack_len')
    require_range(cfg, 0, math.inf, 'val_size', 'workers', 'eval_shots', 'epochs', 'lr', 'eps',
                  'weight_decay', 'grad_clip', 'seed', 'loss_memory')
    if not all(0 <= beta < 1 for beta in cfg.betas):
        raise ConfigError(f'betas = {cfg.betas}; each must be at least 0 and less than 1')
    require_range(cfg, 0, 1, 'smoothing', 'warmup', 'final_lr', 'attn_dropout', 'resid_dropout')
    if cfg.pack_len < cfg.max_length:
        raise ConfigError(f'pack_len = {cfg.pack_len} is shorter than max_length = '
                          f'{cfg.max_length}: a sequence must fit into a row')
    cuda = pick_device(cfg.device).startswith('cuda')
    if cfg.attention == 'flex' and not cuda:
        raise ConfigError("attention = 'flex' needs a CUDA device; 'auto' takes what there is")
    if cfg.attn_dropout and (cfg.attention == 'flex' or cuda and cfg.attention == 'auto'):
        raise ConfigError(f'attn_dropout = {cfg.attn_dropout} does not work with FlexAttention; '
                          f"set attention = 'explicit' or attn_dropout = 0")
    out_dir = Path(cfg.out_dir)
    if Path(cfg.model).is_dir() and Path(cfg.model).resolve().is_relative_to(out_dir.resolve()):
        raise ConfigError(f'out_dir = {cfg.out_dir} holds the model {cfg.model} itself')
    if any(out_dir.glob('model*.safetensors')) and not (cfg.overwrite or cfg.dry_run):
        raise ConfigError(f'{cfg.out_dir} holds a finished run; choose another --out_dir, or '
                          f'--overwrite to replace it')


class TrainingError(RuntimeError):
    """The run cannot go on; the message says at which step it stopped and why."""


# ------------------------------------------------------------------------------------------------
# Data
# ------------------------------------------------------------------------------------------------

def load_sequences(cfg, tokenizer):
    """(training sequences, their indices, validation indices)."""
    common = {'max_length': cfg.max_length, 'add_bos': cfg.add_bos, 'revision': cfg.data_revision,
              'cache_dir': cfg.cache_dir, 'on_bad_row': cfg.on_bad_row,
              'workers': cfg.workers or os.cpu_count()}
    if cfg.data_kind == 'text':
        sequences = load_text(cfg.data, tokenizer, **common)
    else:
        sequences = load_conversations(cfg.data, tokenizer, template=cfg.template, **common)
    order = np.random.default_rng(cfg.seed).permutation(len(sequences))
    held_out, kept = order[:cfg.val_size], np.sort(order[cfg.val_size:])
    if len(kept) * cfg.epochs < cfg.batch_size:
        raise DataError(f'{cfg.data}: {len(kept)} sequences for training in {cfg.epochs:g} epochs '
                        f'do not fill one step of batch_size = {cfg.batch_size}')
    return sequences, kept, held_out


def show_example(example, tokenizer):
    """Prints one training example, (tokens, learnt), what is learnt marked."""
    tokens, learnt = example
    print('first example, what is learnt between >>> and <<<:')
    text, start = '', 0
    for i in range(1, len(tokens) + 1):
        if i == len(tokens) or learnt[i] != learnt[start]:
            piece = tokenizer.decode(tokens[start:i].tolist(), start=start == 0)
            if len(piece) > 1000:
                piece = f'{piece[:500]} [... {len(piece) - 1000} characters ...] {piece[-500:]}'
            text += f'>>>{piece}<<<' if learnt[start] else piece
            start = i
    print('    ' + text.replace('\n', '\n    '))


# ------------------------------------------------------------------------------------------------
# One step
# ------------------------------------------------------------------------------------------------

def sequence_weights(packed):
    """Weight of each target in the mean of sequence means, float32 [rows, T]; they sum to one."""
    learnt = packed['targets'] >= 0
    owner = packed['owner'][learnt]
    count = np.bincount(owner)
    weights = np.zeros(learnt.shape, np.float32)
    weights[learnt] = 1 / (count[owner] * np.count_nonzero(count))
    return weights


def forward_loss(model, packed, cfg, device, backward):
    """(smoothed loss, NLL) of packed rows as floats, over micro-batches; gradients if `backward`.

    The divisor is that of the whole step, so how it is split changes nothing but rounding.
    """
    autocast = (torch.autocast(torch.device(device).type, torch.bfloat16)
                if pick_dtype(cfg.dtype, device) == torch.bfloat16 else contextlib.nullcontext())
    n_targets = int((packed['targets'] >= 0).sum())
    weights = sequence_weights(packed) if cfg.loss_reduction == 'sequence' else None
    memory = None if cfg.loss_memory is None else cfg.loss_memory * 10 ** 6
    total = torch.zeros(2, device=device)
    for i in range(0, len(packed['tokens']), cfg.micro_rows):
        rows = slice(i, i + cfg.micro_rows)
        tokens, positions, ends = (torch.from_numpy(packed[key][rows]).to(device, non_blocking=True)
                                   for key in ('tokens', 'positions', 'ends'))
        targets = torch.from_numpy(packed['targets'][rows])     # best on the CPU
        options = ({'num_items': n_targets} if weights is None else
                   {'reduction': 'sum', 'token_weight': torch.from_numpy(weights[rows])})
        with autocast:
            loss, nll = smoothed_cross_entropy(model(tokens, positions, ends), model.head, targets,
                                               smoothing=cfg.smoothing,
                                               softcap=model.config.final_logit_softcapping,
                                               memory=memory, **options)
        if backward:
            loss.backward()
        total += torch.stack((loss.detach(), nll))
    return total.tolist()


@torch.no_grad()
def validation_loss(model, sequences, held_out, cfg, device):
    model.eval()
    packed = pack([sequences[i] for i in held_out], cfg.pack_len)
    loss, nll = forward_loss(model, packed, cfg, device, backward=False)
    model.train()
    return loss, nll


def learning_rate(step, steps, cfg):
    """Of step 0 .. steps - 1: warm-up from lr / warm-up steps, then decay to final_lr * lr."""
    warmup = max(1, round(cfg.warmup * steps))
    if step < warmup:
        return cfg.lr * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    share = 1 - done if cfg.schedule == 'linear' else (1 + math.cos(math.pi * done)) / 2
    return cfg.lr * (cfg.final_lr + (1 - cfg.final_lr) * share)


# ------------------------------------------------------------------------------------------------
# One run
# ------------------------------------------------------------------------------------------------

def train(cfg):
    """Trains as `cfg` says; returns {'before' and 'after': results of evaluate()}, where asked."""
    device, out_dir = pick_device(cfg.device), Path(cfg.out_dir)
    torch.manual_seed(cfg.seed)
    folder = models.fetch(cfg.model, cfg.revision)
    tokenizer = load_model_tokenizer(folder)
    context = models.read_config(folder).max_position_embeddings
    if cfg.max_length > context:
        raise ConfigError(f'max_length = {cfg.max_length}, but the context of {cfg.model} is '
                          f'{context} tokens')
    tasks = load_tasks(eval_config(cfg, folder, out_dir))  # what is wrong there is said first
    sequences, kept, held_out = load_sequences(cfg, tokenizer)
    results = {}
    if not cfg.dry_run:
        clear(out_dir)
    if cfg.eval_tasks and cfg.eval_before and not (cfg.from_scratch or cfg.dry_run):
        results['before'] = report(cfg, folder, tokenizer, tasks, device, out_dir / 'before')
    model = make_model(cfg, folder, device)
    steps = int(len(kept) * cfg.epochs) // cfg.batch_size
    steps = min(steps, cfg.max_steps or steps)
    print_sizes(cfg, model, sequences, kept, steps)
    show_example(sequences[kept[epoch_order(len(kept), 0, cfg.seed)[0]]], tokenizer)
    if cfg.dry_run:
        optimize(cfg, model, sequences, kept, held_out, min(steps, 2), device, None, folder)
        return results
    out_dir.mkdir(parents=True, exist_ok=True)
    write_text(out_dir / 'train_config.py', dump_config(cfg))
    with open(out_dir / 'log.jsonl', 'w', encoding='utf-8') as log:
        optimize(cfg, model, sequences, kept, held_out, steps, device, log, folder)
    models.save(model, out_dir, getattr(torch, cfg.save_dtype), folder)
    del model  # the report reads what was saved: the weights that people will use
    if cfg.eval_tasks:
        results['after'] = report(cfg, out_dir, tokenizer, tasks, device, out_dir)
    return results


def clear(out_dir):
    """Removes what an earlier run left in `out_dir`: a folder never mixes two runs."""
    for pattern in ('model*.safetensors*', 'log.jsonl', 'train_config.py', 'results.json',
                    'samples-*.jsonl', 'reliability*.png'):
        for path in out_dir.glob(pattern):
            path.unlink()
    for folder in (out_dir / 'before', *out_dir.glob('epoch-*')):
        shutil.rmtree(folder, ignore_errors=True)


def make_model(cfg, folder, device):
    """The model to train, with float32 weights."""
    if cfg.from_scratch:
        model = models.CausalLM(models.read_config(folder), cfg.attn_dropout, cfg.resid_dropout)
        model.init_weights()
        model.to(device)
    else:
        model = models.load(folder, device, torch.float32, cfg.attn_dropout, cfg.resid_dropout)
    model.model.attention = cfg.attention
    return model.train()


def optimize(cfg, model, sequences, kept, held_out, steps, device, log, folder):
    """The training loop. Writes one JSON object a step to `log`, and checkpoints at epochs.

    Without a log it is a dry run and writes nothing.
    """
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW([{'params': matrices, 'weight_decay': cfg.weight_decay},
                                   {'params': vectors, 'weight_decay': 0.0}],
                                  lr=cfg.lr, betas=cfg.betas, eps=cfg.eps, fused=True)
    # sequences in the order they are used, epoch behind epoch: every step takes batch_size of them
    epochs = range(math.ceil(steps * cfg.batch_size / len(kept)))
    order = np.concatenate([kept[epoch_order(len(kept), e, cfg.seed)] for e in epochs])
    bar = tqdm(range(steps), Path(cfg.out_dir).name, unit=' steps', mininterval=1)
    for step in bar:
        started = time.perf_counter()
        chosen = order[step * cfg.batch_size:(step + 1) * cfg.batch_size]
        packed = pack([sequences[i] for i in chosen], cfg.pack_len)
        lr = learning_rate(step, steps, cfg)
        for group in optimizer.param_groups:
            group['lr'] = lr
        loss, nll = forward_loss(model, packed, cfg, device, backward=True)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.grad_clip or math.inf).item()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise TrainingError(f'step {step + 1}: loss {loss}, gradient norm {norm}; the sequences'
                                f' were {chosen.tolist()[:8]}...; lower lr or check the data')
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds = time.perf_counter() - started
        n_tokens, n_learnt = int((packed['owner'] >= 0).sum()), int((packed['targets'] >= 0).sum())
        record = {'step': step + 1, 'loss': loss, 'nll': nll, 'lr': lr, 'grad_norm': norm,
                  'tokens': n_tokens, 'learnt_tokens': n_learnt, 'tokens_per_s': n_tokens / seconds}
        last = step + 1 == steps
        if len(held_out) and ((step + 1) % cfg.val_every == 0 or last):
            record['val_loss'], record['val_nll'] = validation_loss(model, sequences, held_out,
                                                                    cfg, device)
        if (step + 1) % cfg.log_every == 0 or last:
            val = f'  val nll {record["val_nll"]:.4f}' if 'val_nll' in record else ''
            bar.write(f'step {step + 1}/{steps}  loss {loss:.4f}  nll {nll:.4f}{val}  lr {lr:.2e}  '
                      f'grad norm {norm:.2f}  {n_tokens / seconds:.0f} tokens/s')
        if log:
            log.write(json.dumps(record) + '\n')
            log.flush()
        epoch, before = ((step + i) * cfg.batch_size // len(kept) for i in (1, 0))
        if log and cfg.checkpoint_epochs and epoch > before and not last:
            save_epoch(cfg, model, epoch, folder)
    if device.startswith('cuda'):
        print(f'peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB')


def save_epoch(cfg, model, epoch, folder):
    """Writes out_dir/epoch-<n>/ whole: under a temporary name, then renamed."""
    final = Path(cfg.out_dir) / f'epoch-{epoch}'
    part = final.with_name(f'{final.name}.tmp')
    shutil.rmtree(part, ignore_errors=True)
    models.save(model, part, getattr(torch, cfg.save_dtype), folder)
    shutil.rmtree(final, ignore_errors=True)
    os.rename(part, final)


def report(cfg, folder, tokenizer, tasks, device, out_dir):
    """Calibration of the model saved in `folder` on eval_tasks; files go to `out_dir`."""
    model = models.load(folder, device, pick_dtype(cfg.dtype, device))
    return evaluate(model, tokenizer, tasks, eval_config(cfg, folder, out_dir), out_dir)


def eval_config(cfg, folder, out_dir):
    return EvalConfig(model=str(folder), tasks=cfg.eval_tasks, shots=cfg.eval_shots,
                      scoring=cfg.eval_scoring, norm=cfg.eval_norm, limit=cfg.eval_limit,
                      add_bos=cfg.add_bos, pack_len=cfg.eval_pack_len,
                      batch_rows=cfg.eval_batch_rows, on_bad_row=cfg.on_bad_row,
                      dtype=cfg.dtype, device=cfg.device, out_dir=str(out_dir))


def print_sizes(cfg, model, sequences, kept, steps):
    n_parameters = sum(p.numel() for p in model.parameters())
    lengths = sequences.lengths[kept]
    c, compute_bytes = model.config, pick_dtype(cfg.dtype, str(model.head.device)).itemsize
    # float32 weights, gradients and two Adam moments; rounded copies for the products
    state = n_parameters * (16 + (compute_bytes if compute_bytes < 4 else 0))
    # what the backward pass of a block keeps: about a dozen activations of width D and four of the
    # MLP's, for every token of a micro-batch
    kept_width = 12 * c.hidden_size + 4 * c.intermediate_size
    activations = (cfg.micro_rows * cfg.pack_len * c.num_hidden_layers * kept_width * compute_bytes)
    print(f'{c.model_type}, {n_parameters:,} parameters; {len(kept):,} sequences, '
          f'{lengths.sum():,} tokens (mean {lengths.mean():.0f}, longest {lengths.max()}); '
          f'{steps} steps of {cfg.batch_size} sequences, about '
          f'{lengths.mean() * cfg.batch_size:,.0f} tokens each')
    print(f'estimated memory: weights, gradients, optimizer {state / 2**30:.1f} GiB, activations '
          f'{activations / 2**30:.1f} GiB, loss about '
          f'{(1100 if cfg.loss_memory is None else max(cfg.loss_memory, 156)) / 1000:.1f} GB')


# ------------------------------------------------------------------------------------------------
# Several runs, and the comparison
# ------------------------------------------------------------------------------------------------

def expand_runs(cfg):
    """[(name, config)] of the runs of `cfg`, all checked before the first one starts."""
    runs = []
    common = {'runs', 'out_dir', 'demo_world', 'eval_tasks', 'dry_run'}
    for name, keys in cfg.runs.items():
        if not (isinstance(name, str) and re.fullmatch(r'\w[\w.-]*', name)):
            raise ConfigError(f'runs: {name!r} is not a name for a folder')
        if not isinstance(keys, dict):
            raise ConfigError(f'runs: {name!r} must be a dict of the keys that differ')
        if common & keys.keys():
            raise ConfigError(f'runs: {name}: {min(common & keys.keys())} is the same for all runs')
        run = fill_out_dir(override(cfg, keys, f'runs: {name}'), cfg.out_dir)
        runs.append((name, replace(run, runs={}, demo_world=None,
                                   out_dir=str(Path(cfg.out_dir) / name))))
    return runs


def fill_out_dir(cfg, out_dir):
    """`cfg` with '{out_dir}' replaced in every string and every tuple of strings."""
    def fill(value):
        if isinstance(value, tuple):
            return tuple(map(fill, value))
        return value.replace('{out_dir}', out_dir) if isinstance(value, str) else value
    return replace(cfg, **{f.name: fill(getattr(cfg, f.name)) for f in fields(cfg)})


def compare(cfg, rows, out_dir):
    """Prints one table a task and draws the reliability diagrams side by side.

    rows: [(name, results of evaluate, folder that holds its samples)]
    """
    for task in map(task_label, cfg.eval_tasks):
        print(f'\n{task} ({rows[0][1]["distribution"]})')
        print(table([(name, results['tasks'][task]['pooled']) for name, results, _ in rows],
                    SHORT))
        panels = [(name, *to_arrays(read_samples(Path(folder) / f'samples-{task}.jsonl'))[:2])
                  for name, _, folder in rows]
        picture = Path(out_dir) / f'reliability-{task}.png'
        draw_reliability(picture, panels)
        print(f'wrote {picture}')


def main(argv):
    cfg = load_config(TrainConfig, argv)
    cfg = fill_out_dir(cfg, cfg.out_dir)
    print(dump_config(cfg))
    runs = expand_runs(cfg)
    for run in [run for _, run in runs] or [cfg]:
        check(run)
    if cfg.demo_world:
        make_world(cfg.demo_world, cfg.seed)
    if not runs:
        results = train(cfg)
        folders = {'before': Path(cfg.out_dir) / 'before', 'after': Path(cfg.out_dir)}
        if results:
            compare(cfg, [(k, r, folders[k]) for k, r in results.items()], cfg.out_dir)
        return
    if cfg.dry_run:
        print(f'dry run: only the first of {len(runs)} runs, the others may need its result')
        runs = runs[:1]
    rows, reported = [], set()
    for name, run in runs:
        print(f'\n=== {name}')
        results = train(replace(run, eval_before=run.eval_before and run.model not in reported))
        if 'before' in results:
            reported.add(run.model)
            rows.append((run.model, results['before'], Path(run.out_dir) / 'before'))
        if 'after' in results:
            rows.append((name, results['after'], run.out_dir))
    if rows:
        compare(runs[-1][1], rows, cfg.out_dir)


if __name__ == '__main__':
    try:
        main(sys.argv[1:])
    except (ConfigError, DataError, models.CheckpointError, TrainingError, OSError) as error:
        sys.exit(f'error: {error}')
    except torch.OutOfMemoryError:
        sys.exit('error: out of GPU memory; lower --micro_rows, then --pack_len and --max_length. '
                 '--dry_run prints what weights and optimizer need at least')
