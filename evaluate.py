"""How well does a model know what it knows? Scores the options of multiple-choice questions.

    python evaluate.py --model=out/run --tasks=mmlu,arc_easy,hellaswag --shots=5

Prompts that share a beginning share its tokens: a packed row holds [prefix | question | options |
question | options | ...] as a tree, and each token sees only its own ancestors. Log-probabilities
are float32 from the logits on. Writes results.json, samples-<task>.jsonl and reliability.png.
"""

import json
import math
import os
import platform
import re
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from tqdm import tqdm

import metrics
import model as models
from configs import ConfigError, load_config, read_assignments, require_range
from data import DataError, read_rows
from data.questions import TASKS, header, load_task
from data.tokenizer import load_tokenizer
from fused_ce import token_log_probs


@dataclass
class EvalConfig:
    model: str = ''                           # a folder in Hugging Face layout, or a hub name
    revision: str | None = None               # the hub revision of the model
    tasks: tuple[str, ...] = ('mmlu',)        # mmlu, arc_easy, ..., task:folder, or a JSONL file
    data_revision: str | None = None          # the hub revision of the tasks' datasets
    shots: int = 5                            # solved questions before each question
    scoring: Literal['letters', 'text'] = 'letters'
    norm: Literal['token', 'sum', 'char', 'byte'] = 'token'  # of an option's log-probability
    limit: int | None = None                  # score only the first questions of each task
    add_bos: bool | None = None               # None: as the model was trained here, else one BOS
    max_length: int | None = None             # longest prompt in tokens; None: the model's context
    pack_len: int = 4096                      # tokens in a packed row
    batch_rows: int = 1                       # rows in a forward pass
    on_bad_row: Literal['stop', 'skip'] = 'stop'
    dtype: Literal['auto', 'float32', 'bfloat16'] = 'auto'  # auto: bfloat16 on a GPU
    device: str = 'auto'
    out_dir: str | None = None                # None: the model's folder; out/eval/ for a hub name


# ------------------------------------------------------------------------------------------------
# From questions to packed rows
# ------------------------------------------------------------------------------------------------

@dataclass
class TokenisedQuestion:
    """prefix + stem + leaves[k] is the prompt with option k; the option begins at token starts."""
    prefix: tuple[int, ...]     # shared with other questions: header and shots
    stem: list[int]             # shared by the options
    leaves: list[list[int]]
    start: int                  # index of the first scored token in each of the prompts

    @property
    def tree_size(self):
        return len(self.stem) + sum(map(len, self.leaves))


def tokenize_question(question, solved, tokenizer, cfg, max_length, prefixes):
    """The question with as many of the `solved` shots as fit; whole shots are dropped, never cut.

    Context and option are encoded jointly and cut where the context's own tokens end. The seam
    between shots and question is fixed: shots end in a blank line, where no tokenizer joins.
    """
    context = tokenizer.encode(question.context, start=False)
    prompts = [tokenizer.encode(question.context + option, start=False)
               for option in question.options]
    for option, ids in zip(question.options, prompts, strict=True):
        if ids[:len(context)] != context or len(ids) == len(context):
            raise DataError(f'question {question.id}: option {option!r} does not begin at a token '
                            f'boundary after {question.context[-20:]!r}')
    shared = len(os.path.commonprefix(prompts))
    stem, leaves = prompts[0][:shared], [ids[shared:] for ids in prompts]
    longest, tree = max(map(len, prompts)), shared + sum(map(len, leaves))
    for n in range(len(solved), -1, -1):
        key = question.subject, n
        if key not in prefixes:
            text = header(question.subject) + ''.join(shot.solved for shot in solved[:n])
            bos = [] if cfg.add_bos is False else [tokenizer.bos_id]
            prefixes[key] = tuple(bos + tokenizer.encode(text))
        prefix = prefixes[key]
        if len(prefix) + longest <= max_length and len(prefix) + tree <= cfg.pack_len:
            return TokenisedQuestion(prefix, stem, leaves, len(prefix) + len(context)), n
    raise DataError(f'question {question.id} even without shots has a prompt of '
                    f'{len(prefix) + longest} tokens (the model or max_length allows {max_length}) '
                    f'and {len(prefix) + tree} with all its options (pack_len is {cfg.pack_len})')


def pack_trees(questions, pack_len):
    """Yields packed rows: dict of tokens, positions, ends (lists of pack_len ints; see model.py)
    and `wanted`: (question, option, row index that predicts the token, token) for scored tokens.

    Questions keep their order; a prefix is written once for those that follow each other in a row.
    """
    row = None
    for q, item in enumerate(questions):
        shared = row is not None and row['prefix'] == item.prefix
        size = item.tree_size + (0 if shared else len(item.prefix))
        if row is None or len(row['tokens']) + size > pack_len:
            if row is not None:
                yield _pad(row, pack_len)
            row = {'tokens': [], 'positions': [], 'ends': [], 'wanted': [], 'prefix': None}
            shared = False
        if not shared:
            row['prefix'] = item.prefix
            row['prefix_at'] = _append(row, item.prefix, 0)
        stem_at = _append(row, item.stem, len(item.prefix))
        leaves_at = []
        for leaf in item.leaves:
            leaves_at.append(_append(row, leaf, len(item.prefix) + len(item.stem)))
        end = len(row['tokens'])
        row['ends'][row['prefix_at'].start:row['prefix_at'].stop] = [end] * len(item.prefix)
        row['ends'][stem_at.start:stem_at.stop] = [end] * len(item.stem)
        for k, leaf_at in enumerate(leaves_at):
            path = [*row['prefix_at'], *stem_at, *leaf_at]
            row['wanted'] += [(q, k, path[i - 1], row['tokens'][path[i]])
                              for i in range(item.start, len(path))]
    if row is not None:
        yield _pad(row, pack_len)


def _append(row, ids, position):
    """Appends tokens that end with themselves; returns their row indices."""
    begin = len(row['tokens'])
    end = begin + len(ids)
    row['tokens'] += ids
    row['positions'] += range(position, position + len(ids))
    row['ends'] += [end] * len(ids)
    return range(begin, end)


def _pad(row, pack_len):
    used = len(row['tokens'])
    row['tokens'] += [0] * (pack_len - used)
    row['positions'] += [0] * (pack_len - used)
    row['ends'] += range(used + 1, pack_len + 1)
    return row


# ------------------------------------------------------------------------------------------------
# Scoring
# ------------------------------------------------------------------------------------------------

@torch.inference_mode()
def option_log_probs(model, questions, pack_len, batch_rows=1, label=''):
    """Summed float32 log-probability of every option: list of float64 arrays [K], one a question.
    """
    sums = [np.zeros(len(item.leaves)) for item in questions]
    rows = list(pack_trees(questions, pack_len))
    device, head, cap = model.head.device, model.head, model.config.final_logit_softcapping
    was_training = model.training
    model.eval()
    for i in tqdm(range(0, len(rows), batch_rows), f'{label}: scoring', unit=' batches',
                  mininterval=1):
        batch = rows[i:i + batch_rows]
        tensors = [torch.tensor([row[key] for row in batch], device=device)
                   for key in ('tokens', 'positions', 'ends')]
        hidden = model(*tensors).flatten(0, 1)
        wanted = [(q, k, b * pack_len + at, token)
                  for b, row in enumerate(batch) for q, k, at, token in row['wanted']]
        at, token = (torch.tensor(column, device=device)
                     for column in ([w[2] for w in wanted], [w[3] for w in wanted]))
        log_probs = token_log_probs(hidden, head, at, token, softcap=cap).tolist()
        for (q, k, _, _), log_prob in zip(wanted, log_probs, strict=True):
            sums[q][k] += log_prob
    model.train(was_training)
    return sums


def option_probs(log_probs, options, n_tokens, norm):
    """Distribution over the options [K]: softmax of the log-probabilities divided by length.

    token: mean over tokens, the inverse perplexity normalised; sum: as it is; char and byte: over
    the option's characters or UTF-8 bytes without the leading space.
    """
    length = {'token': n_tokens, 'sum': np.ones(len(options)),
              'char': [len(o) - 1 for o in options],
              'byte': [len(o.encode()) - 1 for o in options]}[norm]
    score = log_probs / np.maximum(length, 1)
    weight = np.exp(score - score.max())
    return weight / weight.sum()


def load_tasks(cfg):
    """{label: what load_task gives} for every task of `cfg`; all of them, before any model work."""
    labels = [task_label(name) for name in cfg.tasks]
    for label in labels:
        if not label or labels.count(label) > 1:
            raise ConfigError(f'tasks = {cfg.tasks}: {labels.count(label)} of them would be called '
                              f'{label!r} in the results; rename a file or evaluate them apart')
    return {label: load_task(name, cfg.scoring, shots=cfg.shots, limit=cfg.limit,
                             revision=cfg.data_revision, on_bad_row=cfg.on_bad_row)
            for label, name in zip(labels, cfg.tasks, strict=True)}


def evaluate_task(model, tokenizer, name, task, cfg):
    """(samples, notes): one dict a question, as written to samples-<task>.jsonl, and counts.

    task: (questions, shots by subject, bad rows), as `load_task` gives them
    """
    questions, solved, bad = task
    bad = list(bad)
    context = model.config.max_position_embeddings
    max_length = min(cfg.max_length or context, context)
    kept, tokenised, fewer, prefixes = [], [], 0, {}
    for question in tqdm(questions, f'{name}: tokenising', unit=' questions', mininterval=1):
        try:
            item, shots = tokenize_question(question, solved.get(question.subject, []), tokenizer,
                                            cfg, max_length, prefixes)
        except DataError as error:
            if cfg.on_bad_row == 'stop':
                raise DataError(f'{name}: {error}; --on_bad_row=skip leaves it out') from None
            bad.append(str(error))
            continue
        kept.append(question)
        tokenised.append(item)
        fewer += shots < cfg.shots
    if not kept:
        raise DataError(f'{name}: no question is left to score ({len(bad)} bad rows, '
                        f'the first: {bad[0]})')
    log_probs = option_log_probs(model, tokenised, cfg.pack_len, cfg.batch_rows, name)
    samples = []
    for question, item, sums in zip(kept, tokenised, log_probs, strict=True):
        if not np.isfinite(sums).all():
            raise DataError(f'{name}: question {question.id}: log-probability {sums.tolist()}; '
                            f'the model gives NaN or infinite logits')
        n_tokens = [len(item.prefix) + len(item.stem) + len(leaf) - item.start
                    for leaf in item.leaves]
        probs = option_probs(sums, question.options, n_tokens, cfg.norm)
        samples.append({'id': question.id, 'subject': question.subject, 'answer': question.answer,
                        'options': question.options, 'log_probs': sums.tolist(),
                        'n_tokens': n_tokens, 'probs': probs.tolist(),
                        'mass': float(np.exp(sums).sum())})
    return samples, {'bad_rows': len(bad), 'first_bad': bad[0] if bad else None,
                     'fewer_shots': fewer}


# ------------------------------------------------------------------------------------------------
# Results
# ------------------------------------------------------------------------------------------------

def to_arrays(samples):
    """(probs [N, K] padded with zeros, labels [N], n_options [N]) of samples."""
    n_options = np.array([len(s['probs']) for s in samples])
    probs = np.zeros((len(samples), n_options.max()))
    for i, sample in enumerate(samples):
        probs[i, :n_options[i]] = sample['probs']
    return probs, np.array([s['answer'] for s in samples]), n_options


def read_samples(path):
    """The samples written by `evaluate`, as a list of dicts."""
    return [row for _, row in read_rows(path)]


def summarize(samples):
    """Metrics pooled over all questions, for each subject, and their macro mean over subjects."""
    subjects = {}
    for sample in samples:
        subjects.setdefault(sample['subject'], []).append(sample)
    by_subject = {s: metrics.report(*to_arrays(rows)) for s, rows in sorted(subjects.items())}
    pooled = metrics.report(*to_arrays(samples))
    macro = {key: float(np.mean([r[key] for r in by_subject.values()]))
             for key in pooled if key != 'n' and not key.startswith('accuracy_')}
    return {'pooled': pooled, 'macro': macro, 'subjects': by_subject,
            'mass': float(np.mean([s['mass'] for s in samples]))}


def evaluate(model, tokenizer, tasks, cfg, out_dir):
    """Scores `tasks`, as `load_tasks(cfg)` gives them; returns the results dict.

    Writes results.json, samples-<task>.jsonl and reliability.png into `out_dir`.
    """
    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    results = {'config': asdict(cfg), 'distribution': f'{cfg.scoring}, {cfg.norm}',
               'versions': {'python': platform.python_version(), 'torch': torch.__version__,
                            'numpy': np.__version__},
               'tasks': {}}
    panels = []
    for label, task in tasks.items():
        samples, notes = evaluate_task(model, tokenizer, label, task, cfg)
        lines = ''.join(json.dumps(sample, ensure_ascii=False) + '\n' for sample in samples)
        write_text(out_dir / f'samples-{label}.jsonl', lines)
        results['tasks'][label] = summarize(samples) | notes
        panels.append((label, *to_arrays(samples)[:2]))
        if notes['bad_rows']:
            print(f'{label}: {notes["bad_rows"]} bad rows left out, the first: '
                  f'{notes["first_bad"]}')
        if notes['fewer_shots']:
            print(f'{label}: {notes["fewer_shots"]} questions had fewer than {cfg.shots} shots: '
                  f'too long')
    write_text(out_dir / 'results.json', json.dumps(results, indent=1, ensure_ascii=False) + '\n')
    draw_reliability(out_dir / 'reliability.png', panels)
    return results


def task_label(name):
    """'mmlu:some/folder' -> 'mmlu', 'some/questions.jsonl' -> 'questions': for file names."""
    kind, _, _ = name.partition(':')
    return kind if kind in TASKS else Path(name).name.split('.')[0]


def write_text(path, text):
    """Writes a file whole: under a temporary name, then renamed."""
    part = Path(f'{path}.tmp')
    part.write_text(text, encoding='utf-8')
    os.replace(part, path)


# key in a report, or 'interval' of the accuracy; title; format
SHORT = (('n', 'questions', 'd'), ('accuracy', 'accuracy', '.3f'),
         ('interval', '95 % interval', ''), ('confidence', 'confidence', '.3f'),
         ('entropy_bits', 'entropy (bits)', '.3f'), ('ece', 'ECE', '.3f'),
         ('rmsce', 'RMSCE', '.3f'))
FULL = (*SHORT, ('mad', 'MAD', '.3f'), ('sce', 'SCE', '.3f'), ('ace', 'ACE', '.3f'),
        ('brier', 'Brier', '.3f'), ('nll', 'NLL', '.3f'))


def table(reports, columns):
    """A text table of [(row name, dict as of metrics.report)]; what a report lacks stays empty."""
    cells = [['', *(title for _, title, _ in columns)]]
    for name, report in reports:
        values = dict(report)
        if 'accuracy_low' in report:
            values['interval'] = f'{report["accuracy_low"]:.3f}-{report["accuracy_high"]:.3f}'
        cells.append([name, *(format(values[key], spec) if key in values else ''
                              for key, _, spec in columns)])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ['  '.join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(r, widths)))
             for r in cells]
    return '\n'.join([lines[0], '-' * len(lines[0]), *lines[1:]])


def draw_reliability(path, panels, n_bins=10):
    """Reliability diagrams side by side, PNG: panels = [(title, probs [N, K], labels [N]), ...].

    Bars: accuracy of the questions whose confidence falls into the bin; the gap to the diagonal is
    shaded. Below: the share of questions in each bin.
    """
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(2, len(panels), figsize=(3.6 * len(panels), 4.6), squeeze=False,
                                sharex=True, sharey='row', height_ratios=(3, 1),
                                layout='constrained')
    for column, (title, probs, labels) in enumerate(panels):
        top, bottom = axes[:, column]
        bins = metrics.bins(probs, labels, n_bins)
        used = bins['count'] > 0
        left, width = np.arange(n_bins)[used] / n_bins, 1 / n_bins
        accuracy, confidence = bins['accuracy'][used], bins['confidence'][used]
        top.bar(left, accuracy, width, align='edge', color='#4878a8', edgecolor='white')
        top.bar(left, confidence - accuracy, width, bottom=accuracy, align='edge', color='#d1605e',
                alpha=0.35, label='gap to confidence')
        top.plot((0, 1), (0, 1), color='black', linewidth=1, linestyle='--')
        top.set_title(f'{title}\naccuracy {metrics.accuracy(probs, labels):.3f}, confidence '
                      f'{metrics.mean_confidence(probs, labels):.3f}\nECE '
                      f'{metrics.ece(probs, labels, n_bins):.3f}', fontsize=9)
        top.set(xlim=(0, 1), ylim=(0, 1))
        bottom.bar(left, bins['count'][used] / len(labels), width, align='edge', color='#888888',
                   edgecolor='white')
        bottom.set_xlabel('confidence')
    axes[0, 0].set_ylabel('accuracy')
    axes[1, 0].set_ylabel('share')
    axes[0, 0].legend(loc='upper left', fontsize=8, frameon=False)
    part = f'{path}.tmp'
    figure.savefig(part, format='png', dpi=150)
    plt.close(figure)
    os.replace(part, path)


# ------------------------------------------------------------------------------------------------

def pick_device(device):
    if device == 'auto':
        return 'cuda' if torch.cuda.is_available() else 'cpu'
    if not re.fullmatch(r'cpu|cuda(:\d+)?', device):
        raise ConfigError(f"device = {device!r}; wanted 'auto', 'cpu', 'cuda' or 'cuda:0'")
    if device.startswith('cuda') and not torch.cuda.is_available():
        raise ConfigError(f'device = {device!r}, but this machine has no CUDA device')
    return device


def pick_dtype(dtype, device):
    if dtype == 'auto':
        return torch.bfloat16 if device.startswith('cuda') else torch.float32
    return getattr(torch, dtype)


def load_model_tokenizer(folder):
    """The tokenizer of a model folder, checked against the size of the model's vocabulary."""
    vocab_size, tokenizer = models.read_config(folder).vocab_size, load_tokenizer(folder)
    if tokenizer.n_vocab > vocab_size:
        raise ConfigError(f'{folder}: the tokenizer has {tokenizer.n_vocab} pieces, the model '
                          f'{vocab_size}')
    return tokenizer


def trained_with_bos(folder):
    """What add_bos was when the model in `folder` was trained here; True for any other model."""
    path = Path(folder) / 'train_config.py'
    return read_assignments(path).get('add_bos', (True, ''))[0] if path.exists() else True


def main(argv):
    cfg = load_config(EvalConfig, argv)
    require_range(cfg, 0, math.inf, 'shots')
    require_range(cfg, 1, math.inf, 'limit', 'batch_rows', 'max_length', 'pack_len')
    if not cfg.model:
        raise ConfigError('which model? --model=out/run or --model=google/gemma-2-2b')
    device = pick_device(cfg.device)
    if not cfg.tasks:
        raise ConfigError('which tasks? --tasks=mmlu,arc_easy or --tasks=my_questions.jsonl')
    folder = models.fetch(cfg.model, cfg.revision)
    if cfg.add_bos is None:
        cfg = replace(cfg, add_bos=trained_with_bos(folder))
    tokenizer = load_model_tokenizer(folder)
    tasks = load_tasks(cfg)  # whatever is wrong with them is said before the model is loaded
    model = models.load(folder, device, pick_dtype(cfg.dtype, device))
    local = Path(cfg.model).is_dir()
    out_dir = cfg.out_dir or (folder if local else Path('out/eval') / cfg.model.replace('/', '--'))
    results = evaluate(model, tokenizer, tasks, cfg, out_dir)
    for name, result in results['tasks'].items():
        rows = [('pooled', result['pooled'])]
        if len(result['subjects']) > 1:
            rows = [*result['subjects'].items(), *rows, ('macro', result['macro'])]
        print(f'\n{name} ({results["distribution"]}; the model gives all options together '
              f'{result["mass"]:.3f} of its probability)')
        print(table(rows, FULL))
    print(f'\nwrote {out_dir}/results.json, samples-*.jsonl and reliability.png')


if __name__ == '__main__':
    try:
        main(sys.argv[1:])
    except (ConfigError, DataError, models.CheckpointError, OSError) as error:
        sys.exit(f'error: {error}')
    except torch.OutOfMemoryError:
        sys.exit('error: out of GPU memory; lower --batch_rows or --pack_len')
