"""Fine-tune a language model with label smoothing, or any other loss of fused_ce.py.

    python train.py configs/gemma2_ls01.py --lr=1e-5
    python train.py --help

A config file makes one run; several runs are a loop in a script (see demo.py).

From file to gradient: data/instruct.py reads rows (data/files.py), makes messages of them
(data/messages.py) and encodes these (data/chat.py, data/tokenizer.py), data/cache.py stores the
tokens, data/packing.py packs those of a step into rows; runtime/build.py makes the model and its
optimizer; `train_step` calls model.py with attention.py, fused_ce.py and runtime/optim.py. Another
kind of training is another `Stage`: see align.py.
"""

from runtime import cli

if __name__ == '__main__':
    cli.begin()

import contextlib
import functools
import gc
import importlib.util
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from data.eval_config import EvalConfig, check_report_config
from data.templates import TEMPLATES
from runtime.config import load_config, note_default, require_given, require_range
from runtime.errors import ConfigError, DataError, Stopped

# {name: share of the steps after warm-up that are done -> factor from 1, `lr`, to 0, `final_lr`}
SCHEDULES = {
    'linear': lambda done: 1 - done,
    'cosine': lambda done: (1 + math.cos(math.pi * done)) / 2,
}


@dataclass
class TrainConfig:
    # model
    model: str = 'google/gemma-2-2b'          # a folder in Hugging Face layout, or a hub name
    revision: str | None = None               # hub revision of the model
    from_scratch: bool = False                # random weights in the shape of config.json
    shape: dict = field(default_factory=dict)  # with from_scratch: keys of config.json to change
    attention: Literal['auto', 'explicit'] = 'auto'     # auto: FlexAttention on CUDA
    lora: bool = False                        # train adapters instead of the weights
    lora_rank: int = 8                        # rank of the adapters
    lora_alpha: float = 32.0                  # adapters are scaled by alpha / rank
    lora_dropout: float = 0.1                 # dropout on the input of an adapter
    lora_targets: tuple[str, ...] = ('q_proj', 'v_proj')  # layers: q_, k_, v_, o_, gate_, up_ and
    #                                           down_proj; in Pythia qkv_, o_, up_ and down_proj
    # data
    data: str = 'allenai/tulu-3-sft-mixture'  # a file, a folder or a hub dataset
    data_revision: str | None = None          # hub revision: pin it, datasets change
    # questions: `data` is a task of evaluate.py, and the loss is on the answer's letter alone
    data_kind: Literal['instruct', 'text', 'questions'] = 'instruct'
    # the chat template; auto: that of the model's tokenizer, for one that has none tulu
    template: Literal['auto', 'model', *TEMPLATES] = 'auto'
    answers: Literal['best', 'all'] = 'best'  # OASST1: the best-ranked answer to a prompt, or all
    train_on_inputs: bool = False             # conversations: supervise the prompt as well
    add_bos: bool | None = None               # begin with one BOS; None: as the tokenizer does
    max_length: int = 4096                    # tokens per sequence; longer ones are truncated
    on_bad_row: Literal['stop', 'skip'] = 'stop'  # skip: leave out unusable rows and count them
    data_limit: int | None = None             # sequences to train on, drawn by the seed; None: all
    cache_dir: str = 'out/cache'              # folder for tokenized data
    workers: int = 0                          # processes that tokenize; 0: one per core
    val_size: int = 0                         # sequences held out for the validation loss
    val_every: int = 200                      # steps between validation losses
    # batches
    batch_size: int = 128                     # sequences per optimizer step
    pack_len: int = 4096                      # tokens per packed row; >= max_length
    micro_rows: int | None = None             # rows per forward pass; None: as many as are fast and
    #                                           fit into memory. It changes rounding alone
    # loss
    loss: str = 'cross_entropy()'             # or 'focal(2) + z_loss(1e-4)', ...: docs/losses.md
    smoothing: float = 0.0                    # probability mass spread over the vocabulary
    base_smoothing: float = 0.0               # probability mass on what the base model predicts
    logit_softcap: float | None = None        # softcap of the logits, for models that have none
    logit_temperature: float = 1.0            # divides the logits before the cap. Both are saved as
    #                                           `nanocal` in config.json, for this program only
    loss_reduction: Literal['token', 'sequence'] = 'token'  # mean over the supervised tokens of a
    #                                           step, or mean of sequence means as in older recipes
    loss_memory: int | None = None            # MB per chunk of logits; None: 1100 on a GPU, else 8
    # optimizer
    epochs: float = 2.0                       # passes over the data; may be a fraction
    max_steps: int | None = None              # stop earlier; the schedule then ends there
    lr: float = 2e-5                          # learning rate at the end of warm-up
    schedule: Literal[*SCHEDULES] = 'linear'  # decay after warm-up
    warmup: float = 0.02                      # warm-up as a share of the steps
    warmup_steps: int | None = None           # warm-up as a number of steps, instead of warmup
    final_lr: float = 0.0                     # learning rate at the end, as a share of lr
    betas: tuple[float, float] = (0.9, 0.999)  # of AdamW
    eps: float = 1e-8                         # of AdamW
    weight_decay: float = 0.0                 # for matrices, not for norms
    grad_clip: float = 1.0                    # largest gradient norm; 0: no clipping
    # precision and memory
    dtype: Literal['auto', 'float32', 'bfloat16'] = 'auto'  # auto: bfloat16 on a GPU, else float32
    master_weights: Literal['exact', 'compact', 'stochastic'] = 'exact'  # for bfloat16. exact: as
    #                                           float32, 14 bytes per weight, 16 with micro-batches.
    #                                           compact: 24 bits, moments of 8 bits, 7.2 bytes.
    #                                           stochastic: all bfloat16, rounded at random, 8 bytes
    fp8: bool = False                         # products of the decoder blocks in eight bits, on an
    #                                           H100 or later and in bfloat16; for large models
    checkpoint_activations: bool = False      # compute blocks twice: 25 % slower, less memory
    compile: bool = True                      # compile the decoder blocks, on a GPU in bfloat16
    # calibration report: the settings of evaluate.py, such as {'tasks': ('mmlu',), 'shots': 5}; the
    # run itself decides model, revision, out_dir, device, dtype, seed and overwrite
    eval: EvalConfig | None = None
    eval_before: bool = True                  # also report before training, unless from_scratch
    pictures: bool = True                     # draw loss.png
    # running
    out_dir: str = 'out/run'                  # the run's folder
    overwrite: bool = False                   # rename an earlier out_dir to out_dir.1, or .2, ...
    resume: bool = False                      # continue the run in out_dir where it stopped
    save_every: int | None = 500              # steps between checkpoints; None: only on a signal
    checkpoint_epochs: bool = True            # keep the weights of each epoch in epoch-<n>/
    save_dtype: Literal['float32', 'bfloat16'] = 'bfloat16'  # dtype of the weights on disk
    device: str = 'auto'                      # 'cpu', 'cuda', 'cuda:1'; auto: a GPU if there is one
    seed: int = 0                             # of all random numbers
    log_every: int = 1                        # steps between printed lines; log.jsonl has them all
    # a service that gets the record of each step as well, if its package is installed
    tracker: Literal['none', 'wandb', 'trackio', 'tensorboard'] = 'none'
    push_to_hub: str | None = None            # hub name to send the finished model to, such as
    #                                           me/model; new ones are private
    dry_run: bool = False                     # print sizes, take two steps, write no run folder


def read_arguments(argv):
    if not argv:
        raise ConfigError('no config file given: python train.py configs/gemma2_ls01.py --lr=1e-5; '
                          '--help lists all settings')
    return load_config(TrainConfig, argv, usage=__doc__)


if __name__ == '__main__':
    with cli.one_line_errors():     # --help and misspelled keys need no torch, which takes seconds
        read_arguments(sys.argv[1:])

import numpy as np
import torch

from data.instruct import load_conversations
from data.packing import epoch_order, epochs_of, pack, sequence_weights, split_groups
from data.tokenizer import begins_with_bos, load_model_tokenizer
from data.eval_config import pick_chat, pick_template
from fused_ce import fused_loss, smoothing, token_statistics
from runtime import checkpoint, ownership, resume, rooms, saving
from runtime.build import build_model, build_optimizer, model_config
from runtime.config_json import config_to_hf
from runtime.device import micro_batches, pick_device
from runtime.log import StepLog, peak_memory, print_sizes, show_example
from runtime.loss import loss_options, parse_loss
from runtime.memory import as_memory_allows, fit_into_memory, halve_rows
from runtime.parallel import (barrier, evaluating, first_process_first, first_process_locks, gather,
                              rank, sum_over_processes, world_size)
from runtime.processes import cores

# Keys that may differ when a run is resumed; all others decide its weights.
FREE_KEYS = {'out_dir', 'overwrite', 'resume', 'save_every', 'log_every', 'val_every', 'tracker',
             'cache_dir', 'workers', 'checkpoint_epochs', 'save_dtype', 'device', 'eval',
             'eval_before', 'pictures', 'dry_run', 'push_to_hub'}


def check_config(cfg):
    require_given(cfg, model='google/gemma-2-2b', data='allenai/tulu-3-sft-mixture',
                  out_dir='out/run', cache_dir='out/cache')
    require_range(cfg, 1, math.inf, 'batch_size', 'micro_rows', 'log_every', 'val_every',
                  'max_steps', 'save_every', 'lora_rank', 'data_limit')
    require_range(cfg, 2, math.inf, 'pack_len', 'max_length')
    require_range(cfg, 0, math.inf, 'val_size', 'workers', 'lr', 'eps', 'weight_decay',
                  'grad_clip', 'loss_memory', 'lora_alpha', 'warmup_steps')
    require_range(cfg, 0, 2 ** 63 - 1, 'seed')
    require_range(cfg, 0, 1e5, 'epochs')    # each can have a folder of weights
    require_range(cfg, 0, 1, 'smoothing', 'base_smoothing', 'warmup', 'final_lr', 'lora_dropout')
    require_range(cfg, 1e-3, 1e6, 'logit_softcap')
    require_range(cfg, 1e-3, 1e3, 'logit_temperature')      # as config_json.py reads it
    if not all(0 <= beta < 1 for beta in cfg.betas):
        raise ConfigError(f'betas = {cfg.betas}; each must be at least 0 and less than 1')
    if cfg.lora and cfg.from_scratch:
        raise ConfigError('lora = True needs a base model, from_scratch = True has none; set one')
    if cfg.shape and not cfg.from_scratch:
        raise ConfigError(f'shape = {cfg.shape} needs from_scratch = True')
    if cfg.pack_len < cfg.max_length:
        raise ConfigError(f'max_length = {cfg.max_length} must fit into a row of {cfg.pack_len}')
    if cfg.base_smoothing and (cfg.from_scratch or cfg.smoothing or cfg.loss != 'cross_entropy()'
                               or world_size() > 1):
        raise ConfigError(f'base_smoothing = {cfg.base_smoothing} needs a base model, one process, '
                          f"smoothing = 0 and loss = 'cross_entropy()'")
    if cfg.fp8 and (cfg.pack_len % 16 or cfg.dtype == 'float32'):
        raise ConfigError(f"fp8 = True needs a pack_len that is a multiple of 16, not "
                          f"{cfg.pack_len}, and dtype = 'auto' or 'bfloat16', not {cfg.dtype!r}")
    if cfg.tracker != 'none' and not importlib.util.find_spec(cfg.tracker):
        raise ConfigError(f'tracker = {cfg.tracker!r} is missing: pip install {cfg.tracker}')
    training_loss(cfg)
    if cfg.resume and cfg.overwrite:
        raise ConfigError('resume continues the run in out_dir, overwrite renames it; set one')
    if cfg.eval:
        check_report_config(cfg.eval, cfg.data_kind)


# ---- Stages --------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Stage:
    """A kind of training: the functions in which it differs, in the order of their calls."""
    # (cfg, tokenizer) -> sequences: `sequences[i]` is (tokens, loss mask), with a length, the
    # `lengths` of all and a `digest`, such as cache.Sequences
    load: Callable
    files: Callable         # (cfg, base, tokenizer) -> {name: content} of tokenizer files to save
    build: Callable         # (run) -> (the model to train, what `Run.reference` is)
    pack: Callable | None   # (run, chosen, multiple) -> Packed of the sequences `chosen`; None if
    #                         count_rows, batches and validate do without it
    count_rows: Callable    # (run, chosen) -> number of packed rows of a step
    batches: Callable       # (run, first, until) -> yields (chosen, Packed) of each step from first
    objective: Callable     # (packed, cfg) -> function of a micro-batch: see `token_loss`
    step: Callable          # (model, optimizer, packed, cfg, device, objective) -> metrics
    validate: Callable      # (run) -> {name: metric} of the held-out sequences


@dataclass
class Run:
    """A run whose settings, model and data have been checked, before its first step."""
    cfg: TrainConfig
    stage: Stage
    device: str
    base: Path              # folder of the model to start from
    config: Any             # its ModelConfig, with the settings that change it
    tokenizer: Any
    sequences: Any          # of `Stage.load`
    training: np.ndarray    # indices of the sequences to train on
    held_out: np.ndarray    # indices of the others
    files: dict             # of `Stage.files`
    model: Any = None       # of `Stage.build`, and what this stage's functions compare it with:
    reference: Any = None   # the model before training, its log-probabilities, or None

    @property
    def out_dir(self):
        return Path(self.cfg.out_dir)

    @property
    def available(self):
        """Return the number of sequences in all epochs."""
        return epochs_of(len(self.training), self.cfg.epochs)

    @property
    def steps(self):
        steps = self.available // self.cfg.batch_size
        return min(steps, self.cfg.max_steps or steps)

    def step_indices(self, first, until):
        """Return [indices of the sequences, ...] of each step from `first` to `until` - 1.

        Epochs are concatenated, so every step has exactly batch_size sequences.
        """
        size, n = self.cfg.batch_size, len(self.training)
        order = np.concatenate([self.training[epoch_order(n, epoch, self.cfg.seed)]
                                for epoch in range(math.ceil(until * size / n))])
        return [order[step * size:(step + 1) * size] for step in range(first, until)]

    @property
    def row_multiple(self):
        """Return the divisor of each step's number of rows: on a GPU, of full micro-batches."""
        return world_size() * (self.cfg.micro_rows if self.device.startswith('cuda') else 1)


def load_run(cfg, stage, device):
    """Return the Run of a training; raise an error for all that does not fit, and write nothing."""
    with first_process_first():
        base = checkpoint.fetch(cfg.model, cfg.revision)
        config = model_config(cfg, base)
        tokenizer = load_model_tokenizer(base, config)
        cfg = replace(cfg, template=pick_template(cfg.template, base, tokenizer, 'tulu'))
        if cfg.eval:
            cfg = replace(cfg, eval=replace(cfg.eval, chat=cfg.template if cfg.eval.chat ==
                                            'trained' else pick_chat(cfg.eval.chat, base,
                                                                     tokenizer)))
        sequences = stage.load(cfg, tokenizer)
        training, held_out = split_sequences(cfg, sequences.groups)
        if not cfg.from_scratch:
            checkpoint.check_weights(base, config)
    return Run(cfg, stage, device, base, config, tokenizer, sequences, training,
               held_out, stage.files(cfg, base, tokenizer))


def split_sequences(cfg, groups):
    """Return indices of the sequences to train on and of those held out; groups: of each sequence.
    """
    held_out, rest = split_groups(groups, cfg.val_size, cfg.seed)
    if cfg.val_size and not len(held_out):
        fewest = np.unique(groups, return_counts=True)[1].min()
        raise DataError(f'{cfg.data}: val_size = {cfg.val_size} holds out nothing: the sequences '
                        f'of a prompt or document stay together, {fewest} or more; raise it')
    if len(rest) < (cfg.data_limit or 0):
        raise DataError(f'{cfg.data}: data_limit = {cfg.data_limit}, but it has {len(rest)} '
                        f'sequences' + f' besides val_size = {cfg.val_size}' * (cfg.val_size > 0))
    training = np.sort(rest[:cfg.data_limit])
    if epochs_of(len(training), cfg.epochs) < cfg.batch_size:
        raise DataError(f'{cfg.data}: {len(training)} sequences for training besides val_size = '
                        f'{cfg.val_size}, with epochs = {cfg.epochs:g}, do not fill one step of '
                        f'batch_size = {cfg.batch_size}; lower one of the two, or raise epochs')
    return training, held_out


# ---- Supervised fine-tuning: data, batches, one step ---------------------------------------------

def load_sequences(cfg, tokenizer):
    options = reader_options(cfg, tokenizer)
    if cfg.data_kind == 'text':
        return rooms.load('texts').load_text(cfg.data, tokenizer, **options)
    if cfg.data_kind == 'questions':
        return rooms.load('questions').load_answers(cfg.data, tokenizer, **options)
    options |= {key: getattr(cfg, key) for key in ('template', 'answers', 'train_on_inputs')}
    return load_conversations(cfg.data, tokenizer, **options)


def reader_options(cfg, tokenizer):
    return {'max_length': cfg.max_length, 'add_bos': begins_with_bos(tokenizer, cfg.add_bos),
            'revision': cfg.data_revision, 'cache_dir': cfg.cache_dir,
            'on_bad_row': cfg.on_bad_row, 'workers': cfg.workers or cores()}


def saved_tokenizer(cfg, base, tokenizer):
    return rooms.load('export').tokenizer_files(
        base, tokenizer, cfg.template if cfg.data_kind == 'instruct' else None,
        begins_with_bos(tokenizer, cfg.add_bos))


def build(run):
    """Return (model to train, with `base_smoothing` the model before training, else None)."""
    cfg, model = run.cfg, build_model(run.cfg, run.config, run.base, run.device)
    if not cfg.base_smoothing:
        return model, None
    return model, model if cfg.lora else build_model(
        replace(cfg, fp8=False), run.config, run.base, run.device)


def pack_documents(run, chosen, multiple):
    return pack([run.sequences[i] for i in chosen], run.cfg.pack_len, multiple)


def count_rows(run, chosen):
    return len(run.stage.pack(run, chosen, 1).tokens)


def packed_batches(run, first, until):
    for chosen in run.step_indices(first, until):
        yield chosen, run.stage.pack(run, chosen, run.row_multiple)


def training_loss(cfg):
    """Return the sum of the keys `loss` and `smoothing`; raises ConfigError."""
    if cfg.smoothing and 'smoothing' in cfg.loss:
        raise ConfigError(f'smoothing = {cfg.smoothing} and loss = {cfg.loss!r} both set the '
                          f'smoothing; set one of them')
    return parse_loss(cfg.loss) + smoothing(cfg.smoothing)


def token_loss(packed, cfg, base=None):
    """Return the function (model, rows, inputs, targets) -> (loss, {name: metric}) of a step.

    rows, inputs and targets come from `micro_batches`; loss and metrics are scalars on the device,
    which are summed over the step. base: the model before training, for `base_smoothing`.
    """
    n_targets = int((packed.targets >= 0).sum())
    weights = sequence_weights(packed) if cfg.loss_reduction == 'sequence' else None
    loss_function = training_loss(cfg)

    def compute(model, rows, inputs, targets):
        mean = ({'num_items': n_targets} if weights is None else
                {'reduction': 'sum', 'token_weight': torch.from_numpy(weights[rows])})
        hidden = model(*inputs)
        loss, nll = fused_loss(hidden, model.head, targets, loss_function,
                               **mean, **loss_options(model, cfg))
        if base is None:
            return loss, {'nll': nll}
        weight = mean.get('token_weight', torch.full(targets.shape, 1 / n_targets))
        return rooms.load('base smoothing').add_base_term(
            loss, {'nll': nll}, cfg.base_smoothing, model, base, hidden, inputs, targets, weight)

    return compute


def forward_backward(model, packed, cfg, device, objective=token_loss):
    """Accumulate the gradients of a step, if enabled; return {'loss', 'nll'}, scalars on `device`.

    Splitting a step into more micro-batches changes nothing but rounding.
    """
    compute, total = objective(packed, cfg), 0
    for rows, inputs, targets in micro_batches(packed, cfg.micro_rows, device):
        loss, values = compute(model, rows, inputs, targets)
        if loss.requires_grad:
            (loss * world_size()).backward()    # FSDP averages gradients over processes
        total = total + torch.stack([x.detach() for x in (loss, *values.values())])
    return dict(zip(('loss', *values), sum_over_processes(total), strict=True))


def train_step(model, optimizer, packed, cfg, device, objective=token_loss):
    """Take one optimizer step; return {'loss', 'nll', 'grad_norm'}, scalars on `device`.

    The host never waits for the device.
    """
    rows = -(-len(packed.tokens) // world_size())

    def passes():
        optimizer.begin(-(-rows // (cfg.micro_rows or rows)))
        return forward_backward(model, packed, cfg, device, objective)

    def fewer(_):       # the gradients change by rounding alone
        optimizer.zero_grad()
        model.decoder.graphs = None     # recordings, which keep their memory
        return halve_rows(cfg, rows)

    values = as_memory_allows(passes, fewer)
    norms = torch._foreach_norm(optimizer.gradients(), dtype=torch.float32)
    norm = sum_over_processes(torch.stack(norms).square().sum()).sqrt()
    optimizer.step(scale=((cfg.grad_clip or math.inf) / (norm + 1e-6)).clamp(max=1.0))
    return values | {'grad_norm': norm}


def validation_loss(run):
    """Return {val_loss, val_nll, val_ece}: means over tokens, and ECE of the next token."""
    import metrics      # training itself needs none of it
    model = run.model
    parts = []
    loss_function = training_loss(run.cfg)
    packed = run.stage.pack(run, run.held_out, run.row_multiple)
    with evaluating(model), torch.no_grad():
        for _, inputs, targets in micro_batches(packed, run.cfg.micro_rows, run.device):
            s = token_statistics(model(*inputs), model.head, targets, loss_function,
                                 softcap=model.softcap)
            columns = s.loss, s.nll, (s.top_logit - s.lse).exp(), s.top_token.cpu() == targets
            parts.append(torch.stack([x.cpu()[targets >= 0].double() for x in columns]).numpy())
    loss, nll, confidence, correct = np.concatenate(
        [part for parts in gather(parts) for part in parts], axis=1)
    return {'val_loss': loss.mean(), 'val_nll': nll.mean(),
            'val_ece': metrics.ece(np.minimum(confidence, 1), correct > 0)}


def learning_rate(step, steps, cfg):
    """Learning rate at `step` of 0 .. steps - 1: linear warm-up, then decay to final_lr * lr."""
    if cfg.schedule not in SCHEDULES:
        raise ConfigError(f'schedule = {cfg.schedule!r}; the schedules are {", ".join(SCHEDULES)}')
    warmup = max(1, round(cfg.warmup * steps) if cfg.warmup_steps is None else cfg.warmup_steps)
    if step < warmup:
        return cfg.lr * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return cfg.lr * (cfg.final_lr + (1 - cfg.final_lr) * SCHEDULES[cfg.schedule](done))


SFT = Stage(load=load_sequences, files=saved_tokenizer, build=build, pack=pack_documents,
            count_rows=count_rows, batches=packed_batches, objective=token_loss, step=train_step,
            validate=validation_loss)


# ---- One run -------------------------------------------------------------------------------------

def train(cfg, stage=None):
    """Run the training `cfg` and save its weights in out_dir: no report, card or picture.

    resume=True continues from the last checkpoint in out_dir. stage: another Stage than SFT, see
    align.py. Raises ConfigError, DataError, CheckpointError or TrainingError.
    """
    with opened(cfg, stage) as run:
        claim_folder(run)
        take_steps(run)


def train_and_report(cfg, stage=None):
    """Check all, report before, train, report after; return {'before', 'after': results}.

    The results are those of evaluate(), none without cfg.eval; the rest is as in `train`.
    """
    results = {}
    with opened(cfg, stage) as run:
        cfg, reports = run.cfg, rooms.load('reports') if run.cfg.eval else None
        if cfg.dry_run:
            take_steps(run)     # prints sizes before a benchmark is downloaded
        tasks = reports.load_report_tasks(run) if reports else {}
        if cfg.dry_run:
            return {}
        claim_folder(run, *(reports.OUTPUTS if reports else ()))
        if tasks and cfg.eval_before and not cfg.from_scratch:
            results['before'] = reports.calibration_report(run, tasks, run.base,
                                                           run.out_dir / 'before')
        take_steps(run)
        card = rooms.load('card')
        if rank() == 0:
            card.finish(run)
        if tasks:
            results['after'] = reports.calibration_report(run, tasks, run.out_dir, run.out_dir)
        if rank() == 0 and cfg.push_to_hub:
            card.upload(run)
    return results


@contextlib.contextmanager
def opened(cfg, stage=None):
    """Check the settings, model and data of a run and lock its folder; yield the Run."""
    cfg = replace(cfg, **{key: os.path.expanduser(getattr(cfg, key))
                          for key in ('out_dir', 'cache_dir', 'model', 'data')})
    check_config(cfg)
    ownership.INPUTS.clear()
    stage = stage or SFT
    device = pick_device(cfg.device)
    torch.manual_seed(cfg.seed)
    if rank() == 0:
        note_default(cfg, 'model', 'my/model')
        note_default(cfg, 'data', 'my.jsonl')
    if cfg.dry_run:
        yield load_run(cfg, stage, device)
        return
    if rank() == 0:
        resume.check_folder(cfg)
    with first_process_locks(cfg.out_dir):
        if rank() == 0:
            resume.check_run(cfg, FREE_KEYS)
        barrier()
        yield load_run(cfg, stage, device)


def claim_folder(run, *more):
    """Make out_dir the run's folder, with `more` files; ConfigError if others' are in the way."""
    if rank() == 0 and not run.cfg.dry_run:
        if run.cfg.overwrite:
            ownership.note_inputs(run.cfg.cache_dir)
            ownership.rename_old(run.out_dir)
        ownership.check_free(run.out_dir, *saving.run_files(run), *more)
        ownership.claim(run.out_dir, 'train_config.py', 'log.jsonl')
    barrier()       # what the folder holds is for all processes to see


def take_steps(run):
    """Train to the last step, unless the trained weights are there; a dry run takes two steps."""
    finished = run.out_dir / 'config.json'      # the last file to be written
    if run.cfg.dry_run or not finished.exists():
        fit_into_memory(optimize, run)
        gc.collect()    # a recording of the blocks, whose memory a report may need
    elif rank() == 0:
        # the run may have been killed right after it saved its weights
        ownership.discard(run.out_dir, 'resume-*')
    barrier()       # until the first process has saved the weights


def optimize(run):
    """Train to the last step, from the newest checkpoint if there is one, and save the weights.

    A dry run takes two steps and saves nothing. The report then reads the saved weights.
    """
    model, reference = run.stage.build(run)
    run = replace(run, model=model, reference=reference)
    cfg = run.cfg
    stage = run.stage
    optimizer = build_optimizer(model, cfg)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    named |= dict(model.named_buffers())
    objective = (functools.partial(stage.objective, base=run.reference) if cfg.base_smoothing
                 else stage.objective)
    print_sizes(run)
    show_example(run.sequences[run.step_indices(0, 1)[0][0]], run.tokenizer)
    facts = {'steps': run.steps, 'sequences': len(run.training), 'data': run.sequences.digest,
             'dtype': str(model.head.dtype).removeprefix('torch.'),
             'model': (config_to_hf(model.config) if cfg.from_scratch
                       else checkpoint.fingerprint(run.base))}
    first = (rooms.load('resume state').restore(run.out_dir, named, optimizer, facts)
             if cfg.resume and not cfg.dry_run else 0)
    until = min(run.steps, 2) if cfg.dry_run else run.steps
    with resume.StopSignals() as stop:
        with StepLog(run, first, until) as log:
            for step, (chosen, packed) in enumerate(stage.batches(run, first, until), first + 1):
                lr = learning_rate(step - 1, run.steps, cfg)
                for group in optimizer.param_groups:
                    group['lr'] = lr
                log.begin()
                log.end(step, lr, chosen, packed,
                        stage.step(model, optimizer, packed, cfg, run.device, objective))
                epoch, rest = divmod(step * cfg.batch_size, len(run.training))
                epoch_ends = cfg.checkpoint_epochs and rest < cfg.batch_size    # within this step
                signalled = max(gather(stop.number))
                save = signalled or cfg.save_every and step % cfg.save_every == 0
                if save or epoch_ends or step % cfg.val_every == 0 or step == until:
                    log.read()      # a loss that is not finite must not be saved
                if cfg.dry_run or step == until:
                    continue
                if epoch_ends:
                    saving.save_weights(run, optimizer, f'epoch-{epoch}')
                if save:
                    rooms.load('resume state').save_checkpoint(run.out_dir, step, named,
                                                               optimizer, facts)
                if signalled:
                    raise Stopped(signalled, f'after step {step}')
        print(f'peak memory {peak_memory(run.device):.2f} GiB')
        if not cfg.dry_run:     # despite a signal: without the weights, all steps would be lost
            saving.save_weights(run, optimizer)
            if rank() == 0:
                ownership.discard(run.out_dir, 'resume-*')
        if signalled := max(gather(stop.number)):
            raise Stopped(signalled, f'after the last step{", before the report" * bool(cfg.eval)}')


def print_results(cfg, results):
    """Print the results that `train_and_report` returned, and which files it wrote."""
    if rank() or cfg.dry_run:
        return
    if results:
        rooms.load('reports').print_results(cfg, results)
    print(f'\nwrote weights, log.jsonl{", loss.png" * Path(cfg.out_dir, "loss.png").exists()} to '
          f'{cfg.out_dir}')


def main(argv):
    cfg = read_arguments(argv)
    print_results(cfg, train_and_report(cfg))


if __name__ == '__main__':
    resume.run_script(main)
