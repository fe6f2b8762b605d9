"""Fine-tunes Llama, Gemma 2 or Mistral with label-smoothed cross-entropy on one device.

    python train.py configs/gemma2_ls01.py --lr=1e-5

One config file makes one run, or several (`runs`) that are compared at the end. The run's folder
holds the config, log.jsonl, the weights in Hugging Face layout with the tokenizer beside them, and
the calibration report.
"""

import os
import signal
import sys

if __name__ == '__main__':      # Ctrl-C while the libraries load, which takes seconds
    signal.signal(signal.SIGINT, lambda *_: (os.write(2, b'stopped before it began\n'),
                                             os._exit(128 + signal.SIGINT)))

import contextlib
import datetime
import importlib.util
import itertools
import json
import math
import re
import resource
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from tqdm import tqdm

import metrics
import model as models
import resume
from configs import (ConfigError, dump_config, load_config, override, read_assignments,
                     require_range)
from data import DataError
from data.demo import WorldSpec, make_world
from data.instruct import load_conversations
from data.packing import epoch_order, pack
from data.text import load_text
from evaluate import (EvalConfig, HostCopy, evaluate, load_model_tokenizer, load_tasks, pick_device,
                      pick_dtype, task_label)
from fused_ce import smoothed_cross_entropy, token_statistics
from optim import AdamW
from results import (SHORT, draw_reliability, figure_title, predictions, read_samples, save_figure,
                     setting, table, write_text)
from resume import Stopped, TrainingError, rank, world


USAGE = ('python train.py configs/gemma2_ls01.py --lr=1e-5, or --help for all settings; '
         'python evaluate.py --compare out/a out/b compares runs')


@dataclass
class TrainConfig:
    # model
    model: str = 'google/gemma-2-2b'          # a folder in Hugging Face layout, or a hub name
    revision: str | None = None               # the hub revision of the model
    from_scratch: bool = False                # random weights, in the shape of the config.json
    shape: dict = field(default_factory=dict)  # with from_scratch: keys of config.json that differ
    attention: Literal['auto', 'flex', 'explicit'] = 'auto'  # auto: flex on CUDA
    attn_dropout: float = 0.0                 # on attention weights; needs attention='explicit'
    resid_dropout: float = 0.0                # on what attention and MLP add to the residual
    lora: bool = False                        # train adapters, not the weights
    lora_rank: int = 8
    lora_alpha: float = 32.0                  # adapters are scaled by alpha / rank
    lora_dropout: float = 0.1                 # on what enters an adapter
    lora_targets: tuple[str, ...] = ('q_proj', 'v_proj')  # or k_, o_, gate_, up_, down_proj
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
    # precision and memory
    dtype: Literal['auto', 'float32', 'bfloat16'] = 'auto'  # of weights and products; auto:
    #                                           bfloat16 on a GPU
    master_weights: Literal['exact', 'stochastic'] = 'exact'  # of bfloat16 weights: kept with the
    #                                           bits that float32 has more, moments and sums of
    #                                           gradients float32 (14 bytes a weight, 16 with
    #                                           micro-batches); or all in bfloat16, rounded at
    #                                           random (8 bytes)
    checkpoint_activations: bool = False      # compute blocks twice: a quarter slower, less memory
    compile: bool = True                      # the blocks, on a GPU in bfloat16
    # calibration report
    eval_tasks: tuple[str, ...] = ()          # as in evaluate.py; () for none
    eval_before: bool = True                  # also before training; not for random weights
    eval_shots: int = 5
    eval_preset: Literal['mmlu', 'harness'] = 'mmlu'
    eval_scoring: Literal['auto', 'letters', 'text'] = 'auto'
    eval_norm: Literal['token', 'sum', 'char', 'byte'] = 'token'
    eval_limit: int | None = None
    eval_temperature: Literal['none', 'fit'] = 'none'
    eval_n_bootstrap: int = 1000
    eval_reach: bool = False
    eval_pack_len: int | None = None
    eval_batch_rows: int = 1
    pictures: bool = True                     # of the report and of the loss
    # running
    out_dir: str = 'out/run'
    overwrite: bool = False                   # replace the run in out_dir
    resume: bool = False                      # go on with the run in out_dir, wherever it stopped
    save_every: int | None = 500              # steps between checkpoints to go on from; None: only
    #                                           when a signal stops the run
    checkpoint_epochs: bool = True            # keep the weights of each epoch in epoch-<n>/
    save_dtype: Literal['float32', 'bfloat16'] = 'bfloat16'  # of the weights on disk
    device: str = 'auto'
    seed: int = 0
    log_every: int = 1                        # steps between printed lines; log.jsonl has them all
    tracker: Literal['none', 'wandb', 'tensorboard'] = 'none'  # also log there, if installed
    dry_run: bool = False                     # print sizes, do two steps, write no run folder
    # several runs in one: name -> the keys that differ; each has its folder out_dir/name.
    # '{out_dir}' in a string stands for the common folder, '{seed}' for the seed
    runs: dict = field(default_factory=dict)
    # name -> values: a run whose keys mention '{name}' is done with each of them, in the folder
    # out_dir/run-name<value>; of several, with each combination. In place of a tuple of values a
    # dict: value -> {further name: what '{further name}' stands for beside that value}
    vary: dict = field(default_factory=dict)
    seeds: tuple[int, ...] = ()               # all of it with each of them, in out_dir/seed-<n>
    only: tuple[str, ...] = ()                # of the runs, those whose names begin so
    demo_world: str | None = None             # first generate a world into this folder
    world: dict = field(default_factory=dict)  # keys of data.demo.WorldSpec that differ


# keys that may differ when a run goes on: the others decide what its weights become
FREE_KEYS = {'out_dir', 'overwrite', 'resume', 'save_every', 'log_every', 'val_every', 'tracker',
             'cache_dir', 'workers', 'checkpoint_epochs', 'save_dtype', 'device', 'eval_before',
             'eval_batch_rows', 'eval_pack_len', 'eval_n_bootstrap', 'pictures', 'dry_run', 'runs',
             'vary', 'seeds', 'only', 'demo_world', 'world'}


def check(cfg):
    """Raises ConfigError for a value that no run can use."""
    require_range(cfg, 1, math.inf, 'batch_size', 'micro_rows', 'log_every', 'val_every',
                  'max_steps', 'eval_limit', 'eval_batch_rows', 'save_every', 'lora_rank')
    require_range(cfg, 2, math.inf, 'pack_len', 'max_length', 'eval_pack_len')
    require_range(cfg, 0, math.inf, 'val_size', 'workers', 'eval_shots', 'epochs', 'lr', 'eps',
                  'weight_decay', 'grad_clip', 'seed', 'loss_memory', 'lora_alpha',
                  'eval_n_bootstrap')
    if not all(0 <= beta < 1 for beta in cfg.betas):
        raise ConfigError(f'betas = {cfg.betas}; each must be at least 0 and less than 1')
    require_range(cfg, 0, 1, 'smoothing', 'warmup', 'final_lr', 'attn_dropout', 'resid_dropout',
                  'lora_dropout')
    if cfg.lora and (not cfg.lora_targets or set(cfg.lora_targets) - set(models.LORA_TARGETS)):
        raise ConfigError(f'lora_targets = {cfg.lora_targets}; wanted some of '
                          f'{", ".join(models.LORA_TARGETS)}')
    if cfg.lora and cfg.from_scratch:
        raise ConfigError('lora = True trains adapters of a model that knows something; '
                          'from_scratch = True has none')
    if cfg.shape and not cfg.from_scratch:
        raise ConfigError(f'shape = {cfg.shape} needs from_scratch = True: weights that are loaded '
                          f'have their shape')
    if cfg.pack_len < cfg.max_length:
        raise ConfigError(f'pack_len = {cfg.pack_len} is shorter than max_length = '
                          f'{cfg.max_length}: a sequence must fit into a row')
    cuda = pick_device(cfg.device).startswith('cuda')
    if cfg.attention == 'flex' and not cuda:
        raise ConfigError("attention = 'flex' needs a CUDA device; 'auto' takes what there is")
    if cfg.attn_dropout and (cfg.attention == 'flex' or cuda and cfg.attention == 'auto'):
        raise ConfigError(f'attn_dropout = {cfg.attn_dropout} does not work with FlexAttention; '
                          f"set attention = 'explicit' or attn_dropout = 0")
    if cfg.tracker != 'none' and not importlib.util.find_spec(cfg.tracker):
        raise ConfigError(f"tracker = '{cfg.tracker}', which is not installed: "
                          f'pip install {cfg.tracker}')
    out_dir = Path(cfg.out_dir)
    if Path(cfg.model).is_dir() and Path(cfg.model).resolve().is_relative_to(out_dir.resolve()):
        raise ConfigError(f'out_dir = {cfg.out_dir} holds the model {cfg.model} itself')
    if cfg.resume and cfg.overwrite:
        raise ConfigError('resume goes on with the run in out_dir, overwrite removes it: one of '
                          'the two')
    if not cfg.dry_run:
        check_folder(cfg)


# what a run writes into its folder, beside its checkpoints
MODEL_FILES = ('config.json', 'model*.safetensors*', *models.SIDE_FILES)
REPORT_FILES = ('results.json', 'results.md', 'results.csv', 'samples.jsonl', 'eval_config.json',
                'reliability*.png')
RUN_FILES = ('train_config.py', 'log.jsonl', 'loss.png', 'adapter/adapter_*', 'resume-*/state*',
             *MODEL_FILES, *REPORT_FILES, *(f'epoch-*/{name}' for name in MODEL_FILES),
             *(f'before/{name}' for name in REPORT_FILES))


def check_folder(cfg):
    """Raises ConfigError unless out_dir is free, or holds a run that is to be resumed or replaced.

    Nothing is ever deleted or replaced that is not on the folder's list of files that runs wrote.
    """
    out_dir = Path(cfg.out_dir)
    if out_dir.exists() and not out_dir.is_dir():
        raise ConfigError(f'out_dir = {cfg.out_dir} is a file; a run needs a folder')
    written = resume.written_files(out_dir)
    there = sorted(p.name for p in out_dir.iterdir() if p.name != '.lock') if out_dir.exists() else []
    if written is None and there:
        raise ConfigError(
            f'out_dir = {cfg.out_dir} is not empty (it holds {there[0]}) and has no '
            f'{resume.LIST}, the list of files that a run wrote, so nothing in it is touched; '
            f'choose another --out_dir, or move that folder away')
    listed = {*(written or ()), *(f'before/{name}' for name in
                                  resume.written_files(out_dir / 'before') or ())}
    for path in sorted(p for pattern in RUN_FILES for p in out_dir.glob(pattern)):
        name = path.relative_to(out_dir).as_posix()
        if name not in listed and not path.is_dir() and name.removesuffix('.tmp') not in listed:
            raise ConfigError(f'{path} was not written by a run, and a run would replace it; move '
                              f'it away or choose another --out_dir')
    before = out_dir / 'train_config.py'
    if cfg.resume and before.exists():
        values = read_assignments(before)
        for key, value in asdict(cfg).items():
            if key not in FREE_KEYS and key in values and values[key][0] != value:
                raise ConfigError(f'resume: {out_dir} was begun with {key} = {values[key][0]!r}, '
                                  f'not {value!r}; go on with that, or --overwrite to begin anew')
    if not (cfg.resume or cfg.overwrite) and written:
        steps = list(resume.checkpoints(out_dir))
        if (out_dir / 'config.json').exists():
            raise ConfigError(f'{cfg.out_dir} holds a finished run; choose another --out_dir, or '
                              f'--overwrite to replace it')
        if steps:
            raise ConfigError(f'{cfg.out_dir} holds a run that was interrupted after step '
                              f'{steps[-1]}; --resume goes on with it, --overwrite begins anew')
        raise ConfigError(f'{cfg.out_dir} holds {written[0]}, which an earlier run or evaluation '
                          f'wrote; choose another --out_dir, or --overwrite to replace what is '
                          f'listed in {resume.LIST}')


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


def micro_batches(packed, cfg, device):
    """This process's share of packed rows, micro_rows at a time, as tensors.

    Yields (the rows' indices, inputs of the model on `device`, targets on the CPU, where the loss
    wants them).
    """
    rows = np.arange(rank(), len(packed['tokens']), world())
    for i in range(0, len(rows), cfg.micro_rows):
        some = rows[i:i + cfg.micro_rows]
        inputs = [torch.from_numpy(packed[key][some]) for key in ('tokens', 'positions', 'ends')]
        if device.startswith('cuda'):   # from pinned memory the host need not wait
            inputs = [x.pin_memory().to(device, non_blocking=True) for x in inputs]
        owner = packed['owner'][some]
        if ((owner == owner[:, :1]) | (owner < 0)).all():   # each row one document
            inputs[2] = None
        yield some, inputs, torch.from_numpy(packed['targets'][some])


def rows_multiple(cfg, device):
    """What the number of packed rows must be a multiple of: shapes are compiled once."""
    return world() * (cfg.micro_rows if device.startswith('cuda') else 1)


def forward_backward(model, packed, cfg, device):
    """Gradients of a step's loss; returns its smoothed loss and NLL as a tensor [2] on `device`.

    The divisor is that of the whole step, so how it is split changes nothing but rounding.
    """
    n_targets = int((packed['targets'] >= 0).sum())
    weights = sequence_weights(packed) if cfg.loss_reduction == 'sequence' else None
    memory = None if cfg.loss_memory is None else cfg.loss_memory * 10 ** 6
    total = torch.zeros(2, device=device)
    for rows, inputs, targets in micro_batches(packed, cfg, device):
        options = ({'num_items': n_targets} if weights is None else
                   {'reduction': 'sum', 'token_weight': torch.from_numpy(weights[rows])})
        loss, nll = smoothed_cross_entropy(model(*inputs), model.head, targets,
                                           smoothing=cfg.smoothing, memory=memory,
                                           softcap=model.config.final_logit_softcapping, **options)
        (loss * world()).backward()     # gradients are averaged over processes
        total += torch.stack((loss.detach(), nll))
    if world() > 1:
        dist.all_reduce(total)
    return total


def train_step(model, optimizer, packed, cfg, device):
    """One optimizer step; returns loss, NLL and gradient norm as a tensor [3] on `device`.

    Nothing in it waits for the device.
    """
    optimizer.begin(-(-len(packed['tokens']) // (world() * cfg.micro_rows)))
    losses = forward_backward(model, packed, cfg, device)
    norms = torch._foreach_norm(optimizer.gradients(), dtype=torch.float32)     # in few launches
    norm = torch.stack(norms).square().sum()
    if world() > 1:
        dist.all_reduce(norm)
    norm = norm.sqrt()
    limit = cfg.grad_clip or math.inf
    optimizer.step(scale=(limit / (norm + 1e-6)).clamp(max=1.0))
    return torch.cat((losses, norm[None]))


@torch.no_grad()
def validation_loss(model, packed, cfg, device):
    """{val_loss, val_nll, val_ece} of packed rows: means over tokens, ECE of the next token."""
    model.eval()
    parts = []
    for _, inputs, targets in micro_batches(packed, cfg, device):
        s = token_statistics(model(*inputs), model.head, targets, smoothing=cfg.smoothing,
                             softcap=model.config.final_logit_softcapping)
        right = s.top_token.cpu() == targets
        confidence = (s.top_logit - s.lse).exp().cpu()
        learnt = targets >= 0
        parts.append(torch.stack([x.cpu()[learnt].double() for x in (s.loss, s.nll, confidence,
                                                                     right)]).numpy())
    model.train()
    if world() > 1:
        model.reshard()
    loss, nll, confidence, right = np.concatenate(
        [part for parts in resume.gather(parts) for part in parts], axis=1)
    return {'val_loss': loss.mean(), 'val_nll': nll.mean(),
            'val_ece': metrics.ece(np.minimum(confidence, 1), right > 0)}


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
    """Trains as `cfg` says; returns {'before' and 'after': results of evaluate()}, where asked.

    With --resume what is there already is kept: reports, weights, the last checkpoint.
    """
    device, out_dir = pick_device(cfg.device), Path(cfg.out_dir)
    if cfg.dry_run:
        return run(cfg, device, out_dir)
    with contextlib.ExitStack() as stack:
        if rank() == 0:
            stack.enter_context(resume.lock(out_dir))
            check_folder(cfg)       # again: now nobody else can change it
        return run(cfg, device, out_dir)


def run(cfg, device, out_dir):
    torch.manual_seed(cfg.seed)
    with first_process_first():
        folder = models.fetch(cfg.model, cfg.revision)
        config = models.read_config(folder, cfg.shape)
        tokenizer = load_model_tokenizer(folder, config)
        context = config.max_position_embeddings
        if cfg.max_length > context:
            raise ConfigError(f'max_length = {cfg.max_length}, but the context of {cfg.model} is '
                              f'{context} tokens')
        tasks = load_tasks(eval_config(cfg, folder, out_dir))  # what is wrong there is said first
        sequences, kept, held_out = load_sequences(cfg, tokenizer)
        if not (cfg.from_scratch or cfg.dry_run):
            models.check_weights(folder, config)
    results = {}
    if cfg.overwrite and not cfg.dry_run and rank() == 0:   # now that everything is checked
        resume.discard(out_dir / 'before')
        resume.discard(out_dir)
    if cfg.eval_tasks and cfg.eval_before and not (cfg.from_scratch or cfg.dry_run):
        results['before'] = report(cfg, folder, tokenizer, tasks, out_dir / 'before')
    steps = int(len(kept) * cfg.epochs) // cfg.batch_size
    steps = min(steps, cfg.max_steps or steps)
    if cfg.dry_run or not (out_dir / 'config.json').exists():   # the last file that is written
        model = make_model(cfg, config, folder, device)
        print_sizes(cfg, model, sequences, kept, steps, device)
        show_example(sequences[kept[epoch_order(len(kept), 0, cfg.seed)[0]]], tokenizer)
        optimize(cfg, model, sequences, kept, held_out, steps, device, folder)
        del model  # the report reads what was saved: the weights that people will use
    if cfg.eval_tasks and not cfg.dry_run:
        results['after'] = report(cfg, out_dir, tokenizer, tasks, out_dir)
    return results


def make_model(cfg, config, folder, device):
    dtype = pick_dtype(cfg.dtype, device)
    if cfg.from_scratch:
        model = models.CausalLM(config, cfg.attn_dropout, cfg.resid_dropout)
        model.init_weights()
        model.to(device, dtype)
    else:
        model = models.load(folder, device, dtype, cfg.attn_dropout, cfg.resid_dropout)
    return prepare(model, cfg, device)


def prepare(model, cfg, device):
    """`model` with adapters, checkpointing, compilation and processes as `cfg` says."""
    if cfg.lora:
        models.add_lora(model, cfg.lora_rank, cfg.lora_alpha, cfg.lora_dropout, cfg.lora_targets)
    model.model.attention = cfg.attention
    model.model.checkpoint = cfg.checkpoint_activations
    # Triton 3.6 cannot compile some float32 blocks; FlexAttention is compiled either way
    if cfg.compile and device.startswith('cuda') and model.head.dtype == torch.bfloat16:
        models.compile_blocks(model)
    if world() > 1:
        spread(model)
        torch.manual_seed(cfg.seed + rank())    # dropout differs between processes
    return model.train()


def spread(model):
    """Cuts weights, gradients and Adam moments over the processes: PyTorch's FSDP2."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    options = {'mesh': init_device_mesh(model.head.device.type, (world(),)),
               'mp_policy': MixedPrecisionPolicy(reduce_dtype=torch.float32)}
    for layer in model.model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)


def make_optimizer(model, cfg):
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{'params': [p for p in trained if p.ndim >= 2], 'weight_decay': cfg.weight_decay},
              {'params': [p for p in trained if p.ndim < 2], 'weight_decay': 0.0}]
    return AdamW([group for group in groups if group['params']], cfg.lr, cfg.betas, cfg.eps,
                 stochastic=cfg.master_weights == 'stochastic', seed=cfg.seed)


def optimize(cfg, model, sequences, kept, held_out, steps, device, folder):
    """The training loop, from the last checkpoint if there is one, to the saved weights.

    Writes one JSON object a step to log.jsonl. A dry run does two steps and writes nothing.
    """
    optimizer, out_dir = make_optimizer(model, cfg), Path(cfg.out_dir)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    facts = {} if cfg.dry_run else {
        'steps': steps, 'sequences': len(kept), 'data': sequences.digest,
        'model': model.config.to_hf() if cfg.from_scratch else models.fingerprint(folder)}
    first = 0
    if cfg.resume and not cfg.dry_run:
        first = resume.restore(out_dir, named, optimizer, facts)
    # sequences in the order they are used, epoch behind epoch: every step takes batch_size of them
    epochs = range(math.ceil(steps * cfg.batch_size / len(kept)))
    order = np.concatenate([kept[epoch_order(len(kept), e, cfg.seed)] for e in epochs])
    multiple = rows_multiple(cfg, device)

    def batch(step):
        chosen = order[step * cfg.batch_size:(step + 1) * cfg.batch_size]
        return chosen, pack([sequences[i] for i in chosen], cfg.pack_len, multiple)

    validation = pack([sequences[i] for i in held_out], cfg.pack_len,
                      multiple) if len(held_out) else None
    until = min(steps, 2) if cfg.dry_run else steps
    log = contextlib.nullcontext() if cfg.dry_run or rank() else open_log(cfg, first)
    track = start_tracker(cfg) if not (cfg.dry_run or rank()) else lambda record: None
    bar = tqdm(range(first, until), out_dir.name, unit=' steps', mininterval=1, initial=first,
               total=until, disable=rank() > 0 or None)     # None: no bar unless on a terminal
    unread = []     # the step that the device may still be busy with
    started = time.monotonic()

    def read():
        """Waits for the unread step, checks and logs it."""
        for record, packed, chosen, begun, ended in unread:
            loss, nll, norm = ended.values().tolist()
            step = record['step']
            if not (math.isfinite(loss) and math.isfinite(norm)):
                bad = None if cfg.from_scratch else models.nonfinite_tensor(folder)
                cause = (f'the base model {cfg.model} has a value that is not finite in {bad}'
                         if bad else f'lower lr or check the data: the sequences were '
                         f'{chosen.tolist()} of {cfg.data}, counted from 0')
                raise TrainingError(f'step {step}: loss {loss}, gradient norm {norm}; {cause}; '
                                    f'{resume.remedy(out_dir)}')
            seconds = ended.seconds_after(begun)
            n_tokens = int((packed['owner'] >= 0).sum())
            record |= {'loss': loss, 'nll': nll, 'grad_norm': norm, 'tokens': n_tokens,
                       'learnt_tokens': int((packed['targets'] >= 0).sum()),
                       'tokens_per_s': n_tokens / seconds}
            if validation and (step % cfg.val_every == 0 or step == until):
                record |= validation_loss(model, validation, cfg, device)
            if step % cfg.log_every == 0 or step == until:
                val = (f'  val nll {record["val_nll"]:.4f} ECE {record["val_ece"]:.3f}'
                       if 'val_nll' in record else '')
                left = (time.monotonic() - started) / (step - first) * (until - step)
                bar.write(f'step {step}/{steps}  loss {loss:.4f}  nll {nll:.4f}{val}  '
                          f'lr {record["lr"]:.2e}  grad norm {norm:.2f}  '
                          f'{n_tokens / seconds:.0f} tokens/s  '
                          f'{datetime.timedelta(seconds=round(left))} left')
            if step == first + 1:
                bar.write(f'peak memory after the first step: {peak_memory(device):.2f} GiB')
            if not (cfg.dry_run or rank()):
                try:
                    log.write(json.dumps(record) + '\n')
                    log.flush()
                except OSError as error:
                    raise TrainingError(f'{log.name}: {error.strerror}; '
                                        f'{resume.remedy(out_dir)}') from error
                track(record)
        unread.clear()

    with log, ThreadPoolExecutor(1) as pool, resume.StopSignals() as stop:
        upcoming = pool.submit(batch, first)
        for step in bar:
            chosen, packed = upcoming.result()
            if step + 1 < until:
                upcoming = pool.submit(batch, step + 1)     # while the device is busy
            lr = learning_rate(step, steps, cfg)
            for group in optimizer.param_groups:
                group['lr'] = lr
            # it begins as the step before ends, or now, if that was read: a validation came between
            begun = unread[0][-1] if unread else HostCopy(torch.zeros((), device=device))
            ended = HostCopy(train_step(model, optimizer, packed, cfg, device))
            read()
            done = step + 1
            unread.append(({'step': done, 'lr': lr}, packed, chosen, begun, ended))
            epoch, before = ((step + i) * cfg.batch_size // len(kept) for i in (1, 0))
            epoch_ends = cfg.checkpoint_epochs and epoch > before
            signalled = max(resume.gather(stop.number))
            save = cfg.save_every and done % cfg.save_every == 0
            if done == until or done % cfg.val_every == 0 or epoch_ends or save or signalled:
                read()
            if cfg.dry_run or done == until:
                continue
            if epoch_ends:
                save_epoch(cfg, model, optimizer, epoch, folder)
            if save or signalled:
                resume.save(out_dir, done, named, optimizer, facts)
            if signalled:
                raise Stopped(f'stopped by {signal.Signals(signalled).name} after step {done}; '
                              f'--resume goes on from there', signalled)
    print(f'peak memory {peak_memory(device):.2f} GiB')
    if not cfg.dry_run:
        save_weights(cfg, model, optimizer, out_dir, folder)
        if rank() == 0:
            resume.discard_checkpoints(out_dir)
            if cfg.pictures:
                draw_loss(out_dir)


def peak_memory(device):
    """GiB: of the GPU, or of this process where there is none."""
    if device.startswith('cuda'):
        return torch.cuda.max_memory_allocated() / 2 ** 30
    unit = 1 if sys.platform == 'darwin' else 1024      # bytes there, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2 ** 30


def open_log(cfg, first):
    """log.jsonl with the records of the first `first` steps; the config is put beside it.

    What else an interrupted run's log holds, such as damaged lines, is kept in log.jsonl.damaged.
    """
    out_dir = Path(cfg.out_dir)
    path, kept, damaged = out_dir / 'log.jsonl', [], 0
    resume.claim(out_dir, 'train_config.py', path.name)
    write_text(out_dir / 'train_config.py', dump_config(replace(cfg, resume=False)))
    if first:
        lines = (path.read_text(encoding='utf-8', errors='replace').splitlines(keepends=True)
                 if path.exists() else [])
        for number, line in enumerate(lines, 1):
            try:
                if json.loads(line)['step'] <= first:
                    kept.append(line)
            except (ValueError, KeyError, TypeError):
                damaged += number < len(lines)      # a crash may cut the last line off
        if damaged:
            resume.claim(out_dir, 'log.jsonl.damaged')
            os.replace(path, out_dir / 'log.jsonl.damaged')
        if damaged or len(kept) < first:
            print(f'warning: {path} lacks {first - len(kept)} of the first {first} steps'
                  + ('; what was found there is kept in log.jsonl.damaged' if damaged else ''))
    write_text(path, ''.join(kept))
    return open(path, 'a', encoding='utf-8')


def start_tracker(cfg):
    """A function that also sends each step's record to where `cfg.tracker` says.

    A tracker that fails is a warning, once: the run goes on without it.
    """
    send = None
    try:
        if cfg.tracker == 'wandb':
            import wandb
            run = wandb.init(project='nanocal', name=Path(cfg.out_dir).name, dir=cfg.out_dir,
                             config=asdict(cfg))
            send = run.log
        elif cfg.tracker == 'tensorboard':
            from torch.utils.tensorboard import SummaryWriter
            writer = SummaryWriter(Path(cfg.out_dir) / 'runs')

            def send(record, step):
                for key, value in record.items():
                    writer.add_scalar(key, value, step)
    except Exception as error:      # theirs can be any kind
        print(f'warning: {cfg.tracker} could not be started, the run goes on without it: {error}')

    def track(record):
        nonlocal send
        try:
            if send:
                send(record, step=record['step'])
        except Exception as error:
            print(f'warning: {cfg.tracker} failed, the run goes on without it: {error}')
            send = None
    return track


def save_weights(cfg, model, optimizer, out_dir, folder):
    """Weights in Hugging Face layout; of LoRA merged, and the adapters alone in adapter/."""
    common = {'full': optimizer.master, 'write': rank() == 0}

    def claim(place):
        below = place.relative_to(cfg.out_dir)
        return lambda *names: resume.claim(cfg.out_dir, *(below / name for name in names))
    try:
        if cfg.lora:
            models.save_adapter(model, out_dir / 'adapter', cfg.model,
                                claim=claim(out_dir / 'adapter'), **common)
        models.save(model, out_dir, getattr(torch, cfg.save_dtype), folder, claim=claim(out_dir),
                    **common)
    except (OSError, models.CheckpointError, ConfigError) as error:
        raise TrainingError(f'saving the weights to {out_dir} failed: {error}; '
                            f'{resume.remedy(cfg.out_dir)}') from error


def save_epoch(cfg, model, optimizer, epoch, folder):
    """Writes out_dir/epoch-<n>/, config.json last: a folder that has it is complete."""
    save_weights(cfg, model, optimizer, Path(cfg.out_dir) / f'epoch-{epoch}', folder)


def draw_loss(out_dir):
    """loss.png, from log.jsonl; a picture that cannot be drawn is a warning."""
    try:
        resume.claim(out_dir, 'loss.png')
        _draw_loss(out_dir)
    except Exception as error:      # matplotlib's can be any kind
        print(f'warning: {out_dir / "loss.png"} was not drawn: {error!r}')


def _draw_loss(out_dir):
    """Draw loss, NLL and gradient norm by step, from log.jsonl to loss.png."""
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter
    with open(out_dir / 'log.jsonl', encoding='utf-8') as lines:
        log = [json.loads(line) for line in lines]
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(7, 5), sharex=True, height_ratios=(3, 1),
                                         layout='constrained')
    marker = '.' if len(log) < 50 else None     # a line of one step would not be seen
    for key, title, style in (('loss', 'smoothed loss', marker), ('nll', 'NLL', marker),
                              ('val_nll', 'NLL, held out', 'o')):
        points = [(r['step'], r[key]) for r in log if key in r]
        if points and not (key == 'loss' and all(r['loss'] == r['nll'] for r in log)):
            top.plot(*zip(*points, strict=True), marker=style, label=title, linewidth=1,
                     markersize=4)
    top.set(ylabel='nats per token')
    top.set_title(figure_title(out_dir.name, 70), fontsize=10)
    top.legend(frameon=False)
    norms = [(r['step'], r['grad_norm']) for r in log if 0 < r['grad_norm'] < math.inf]
    bottom.plot([step for step, _ in norms], [norm for _, norm in norms], marker=marker,
                color='grey', linewidth=1)
    # the limits hold a tick, however close the norms are
    low = min((norm for _, norm in norms), default=1) / 2
    high = max((norm for _, norm in norms), default=1) * 2
    bottom.set(xlabel='step', ylabel='gradient\nnorm', yscale='log', ylim=(low, high))
    bottom.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 30 * low else (1,)))
    bottom.yaxis.set_major_formatter('{x:g}')
    bottom.yaxis.set_minor_formatter(NullFormatter())
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1,
                                                steps=(1, 2, 5, 10)))
    save_figure(figure, out_dir / 'loss.png', 150)


def report(cfg, folder, tokenizer, tasks, out_dir):
    """Calibration of the model saved in `folder` on eval_tasks; files go to `out_dir`."""
    path = out_dir / 'results.json'

    def complete():
        try:
            return tasks.keys() <= json.loads(path.read_text(encoding='utf-8'))['tasks'].keys()
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return False
    if rank() == 0 and not (cfg.resume and complete()):
        evaluate(folder, tokenizer, tasks, eval_config(cfg, folder, out_dir), out_dir)
    if world() > 1:
        dist.barrier()
    return json.loads(path.read_text(encoding='utf-8'))


def eval_config(cfg, folder, out_dir):
    return EvalConfig(model=str(folder), tasks=cfg.eval_tasks, shots=cfg.eval_shots,
                      preset=cfg.eval_preset, scoring=cfg.eval_scoring, norm=cfg.eval_norm,
                      limit=cfg.eval_limit, temperature=cfg.eval_temperature,
                      n_bootstrap=cfg.eval_n_bootstrap, reach=cfg.eval_reach,
                      pictures=cfg.pictures, add_bos=cfg.add_bos, pack_len=cfg.eval_pack_len,
                      batch_rows=cfg.eval_batch_rows, compile=cfg.compile,
                      on_bad_row=cfg.on_bad_row, seed=cfg.seed, dtype=cfg.dtype, device=cfg.device,
                      out_dir=str(out_dir))


def print_sizes(cfg, model, sequences, kept, steps, device):
    """What the run is about to do; all settings are in the run's folder."""
    lengths, c = sequences.lengths[kept], model.config
    total = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    adapters = f' ({trained:,} of them trained)' if trained < total else ''
    name = torch.cuda.get_device_name(device) if device.startswith('cuda') else 'CPU'
    print(f'device: {device} ({name}), {str(model.head.dtype).split(".")[-1]}')
    print(f'model: {cfg.model}: {c.model_type}, {total:,} parameters{adapters}')
    print(f'data: {cfg.data}: {len(kept):,} sequences, {lengths.sum():,} tokens '
          f'(mean {lengths.mean():.0f}, longest {lengths.max()})')
    print(f'steps: {steps} of {cfg.batch_size} sequences, about '
          f'{lengths.mean() * cfg.batch_size:,.0f} tokens each')
    used = steps * cfg.batch_size
    rest = int(len(kept) * cfg.epochs) - used
    if 0 < rest < cfg.batch_size:
        print(f'unused: {rest} sequences at the end do not fill a step of {cfg.batch_size}')
    if used < len(kept):
        print(f'unused: {len(kept) - used:,} of {len(kept):,} sequences are never seen')
    print(f'folder: {cfg.out_dir}')


@contextlib.contextmanager
def first_process_first():
    """What is in it runs in the first process, then in the others, which find its files."""
    if rank() > 0:
        dist.barrier()
    yield
    if rank() == 0 and world() > 1:
        dist.barrier()


# ------------------------------------------------------------------------------------------------
# Several runs, and the comparison
# ------------------------------------------------------------------------------------------------

def expand_runs(cfg):
    """[(name, config)] of the runs of `cfg`, all checked before the first one starts."""
    runs = []
    common = {'runs', 'vary', 'seeds', 'only', 'out_dir', 'demo_world', 'world', 'eval_tasks',
              'dry_run'}
    for v, values in cfg.vary.items():
        if f'{{{v}}}' not in repr(cfg.runs):
            raise ConfigError(f'vary: no run mentions {{{v}}}')
        if not (isinstance(values, (tuple, list)) or isinstance(values, dict)
                and all(isinstance(further, dict) for further in values.values())):
            raise ConfigError(f'vary: {v} is {values!r}; wanted values in a tuple, or a dict of '
                              f'value: {{name: what goes with it}}')
    for name, keys in cfg.runs.items():
        if not (isinstance(name, str) and re.fullmatch(r'\w[\w.-]*', name)):
            raise ConfigError(f'runs: {name!r} is not a name for a folder')
        if not isinstance(keys, dict):
            raise ConfigError(f'runs: {name!r} must be a dict of the keys that differ')
        if common & keys.keys():
            raise ConfigError(f'runs: {name}: {min(common & keys.keys())} is the same for all runs')
        varied = [v for v in cfg.vary if f'{{{v}}}' in repr(keys)]
        for values in itertools.product(*(cfg.vary[v] for v in varied)):
            known = dict(zip(varied, values, strict=True))
            full = '-'.join([name, *(f'{v}{value}' for v, value in known.items())])
            if cfg.only and not full.startswith(cfg.only):
                continue
            for v, value in list(known.items()):
                if isinstance(cfg.vary[v], dict):
                    known |= cfg.vary[v][value]
            filled = fill(keys, known)
            if left := re.search(r'{[A-Za-z_]\w*}', repr(filled)):
                raise ConfigError(f'runs: {full}: vary gives nothing to put in for {left[0]}')
            run = override(cfg, filled, f'runs: {full}')
            runs.append((full, replace(run, runs={}, vary={}, demo_world=None, world={},
                                       out_dir=str(Path(cfg.out_dir) / full))))
    if cfg.only and not runs:
        raise ConfigError(f'only = {cfg.only}: no run is called so; there are '
                          f'{", ".join(cfg.runs)}')
    return runs


def expand_seeds(cfg):
    """`cfg` for each of its seeds, in a folder of its own; '{out_dir}' and '{seed}' filled in."""
    if len(set(cfg.seeds)) < len(cfg.seeds):
        raise ConfigError(f'seeds = {cfg.seeds}: one of them twice would replace its own run')
    seeds = [replace(cfg, seed=seed, seeds=(), out_dir=str(Path(cfg.out_dir) / f'seed-{seed}'))
             for seed in cfg.seeds] or [cfg]
    return [replace(one, **fill({f.name: getattr(one, f.name) for f in fields(one)},
                                {'out_dir': one.out_dir, 'seed': one.seed})) for one in seeds]


def fill(value, known):
    """`value` with '{name}' replaced in its strings; a string that is nothing else gets its type.

    known: {name: value}
    """
    if isinstance(value, dict):
        return {key: fill(x, known) for key, x in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(fill(x, known) for x in value)
    if isinstance(value, str):
        for name, x in known.items():
            if value == f'{{{name}}}':
                return x
            value = value.replace(f'{{{name}}}', str(x))
    return value


def compare(cfg, rows, out_dir):
    """Prints one table a task and draws the reliability diagrams side by side.

    rows: [(name, results of evaluate, folder that holds its samples)]
    """
    for task in map(task_label, cfg.eval_tasks):
        print(f'\n{setting(task, rows[0][1]["tasks"][task])}')
        print(table([(name, results['tasks'][task]['pooled']) for name, results, _ in rows],
                    SHORT, 'run'))
        if len(rows) > 10 or not cfg.pictures:     # --compare groups many
            continue
        panels = [(name, predictions([s for s in read_samples(Path(folder) / 'samples.jsonl')
                                      if s['task'] == task], cfg.eval_norm))
                  for name, _, folder in rows]
        picture = Path(out_dir) / f'reliability-{task}.png'
        draw_reliability(picture, panels)
        print(f'wrote {picture}')


def main(argv):
    if not argv:
        raise ConfigError(f'which experiment? {USAGE}')
    cfg = load_config(TrainConfig, argv)
    cfg = replace(cfg, **{key: os.path.expanduser(getattr(cfg, key))
                          for key in ('out_dir', 'cache_dir', 'model', 'data')})
    experiments = []
    for one in expand_seeds(cfg):
        runs = expand_runs(one)
        for run in [run for _, run in runs] or [one]:
            check(run)
        if one.world and not one.demo_world:
            raise ConfigError(f'world = {one.world} needs demo_world, the folder to make it in')
        experiments.append((one, runs, override(WorldSpec(), one.world, 'world')))
    for one, runs, spec in experiments:
        if one.demo_world:
            with first_process_first():
                if rank() == 0:
                    try:
                        make_world(one.demo_world, one.seed, spec)
                    except (ValueError, RuntimeError) as error:     # sentencepiece's are the latter
                        raise ConfigError(f'world = {one.world}: {error}') from error
        experiment(one, runs)


def experiment(cfg, runs):
    """Does the runs [(name, config)], or `cfg` itself if there are none, and compares them."""
    if not runs:
        results = train(cfg)
        folders = {'before': Path(cfg.out_dir) / 'before', 'after': Path(cfg.out_dir)}
        if results and rank() == 0:
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
    if rows and rank() == 0:
        compare(runs[-1][1], rows, cfg.out_dir)


def join_processes():
    """Under torchrun: one process a GPU, or on the CPU through gloo; only the first one prints."""
    if 'TORCHELASTIC_RUN_ID' not in os.environ:
        return
    backend, local_rank = 'gloo', int(os.environ['LOCAL_RANK'])
    if local_rank < torch.cuda.device_count():
        torch.cuda.set_device(local_rank)
        backend = 'cpu:gloo,cuda:nccl'
    # the others wait while the first one tokenises and evaluates
    dist.init_process_group(backend, timeout=datetime.timedelta(days=2))
    if rank() > 0:
        sys.stdout = open(os.devnull, 'w')


if __name__ == '__main__':
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        join_processes()
        main(sys.argv[1:])
        if world() > 1:
            dist.barrier()      # none may leave while another is still talking to it
            dist.destroy_process_group()
            # at the interpreter's own end gloo's threads now and then abort the process
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit('stopped: nobody reads the output any more (| head?); --resume goes on with the last '
                 'checkpoint, > train.log keeps the output')
    except (ConfigError, DataError, models.CheckpointError, TrainingError, OSError) as error:
        sys.exit(f'error: {error}')
    except torch.OutOfMemoryError:
        sys.exit('error: out of GPU memory; --checkpoint_activations, --micro_rows=1 and a shorter '
                 '--pack_len lower what a forward pass takes, --master_weights=stochastic what '
                 'weights do. --dry_run prints both')
    except Stopped as stopped:
        print(stopped)
        sys.exit(128 + stopped.signal)
    except KeyboardInterrupt:
        print('stopped before a checkpoint could be saved; the same command begins again, --resume '
              'goes on with an earlier checkpoint', file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
