"""What the scripts of the papers share: their runs, the plan, tables beside the printed numbers.

    python research/papers/label_smoothing.py --plan     # the runs, GPU hours and disk space

from the root of the repository. What is finished is skipped and what was interrupted is resumed, so
a script that was stopped is simply started again. A run that cannot be done, because its model is
gated or too large for the GPU, is reported, and the next one begins. The tables are made from what
is finished. --key=value changes that key of train.py in all runs, --eval.key=value that key of
evaluate.py; --model=FOLDER and --data=FILE replace a script's models and datasets.
"""

import difflib
import functools
import itertools
import json
import math
import os
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

import evaluate
from align import UNUSED, AlignConfig, align
from data.instruct import PATTERNS
from data.tasks import task_label, task_source
from evaluate import EvalConfig
from research import common
from results import plots
from results.samples import check_results
from results.columns import Heading, title_of
from results.tables import aligned, latex, mark_best, markdown
from runtime import checkpoint, cli
from runtime.config import load_config
from runtime.errors import CheckpointError, ConfigError, DataError, TrainingError
from runtime.sources import fetch
from runtime.ownership import claim, lock, read_json, write_text
from runtime.resume import check_run
from train import FREE_KEYS, TrainConfig, train_and_report

# FLOP/s on one H100 or H200 in bfloat16: of the 989e12 of the data sheet and of the 780e12 of a
# large matrix product (research/bench/results/README.md)
TRAIN_RATE, EVAL_RATE = 0.5 * 989e12, 0.6 * 780e12
FOLDER = Path(__file__).parent
EVAL_STARTS = 40        # seconds to load and compile
PRINTED_LINES = 200     # longer tables are written only


@dataclass
class Run:
    """A run of train.py or align.py, with its report if cfg.eval is set, or an evaluation."""
    cfg: TrainConfig | AlignConfig | EvalConfig     # out_dir names the run
    params: float                   # weights of the model
    train_tokens: float = 0         # over all epochs; like eval_tokens an estimate for the plan
    eval_tokens: float = 0
    waits_for: str = ''             # the runs that decide its settings, if they are not finished

    @property
    def trains(self):
        return isinstance(self.cfg, TrainConfig)

    def changed(self, changes):
        """Return the run with the settings `changes` of the command line, such as '--lr=1e-5'."""
        if self.trains:
            unused = UNUSED if isinstance(self.cfg, AlignConfig) else ()
            allowed = [c for c in changes if c[2:].partition('=')[0] not in unused
                       and (self.cfg.eval or not c.startswith('--eval.'))]
            cfg = replace(load_config(TrainConfig, allowed, config=self.cfg), resume=True)
        else:
            cfg = load_config(TrainConfig, changes, config=TrainConfig(eval=self.cfg))
            cfg = replace(cfg.eval, device=cfg.device, dtype=cfg.dtype, seed=cfg.seed)
        return replace(self, cfg=cfg)

    @property
    def finished(self):
        """Return whether the weights are there, or a report of all tasks of the run's model."""
        if self.trains and not self.cfg.eval:
            return Path(self.cfg.out_dir, 'config.json').exists()
        report_of = self.cfg.eval if self.trains else self.cfg
        model, tasks = read_report(self.cfg.out_dir)
        # by the last part of the path: the folder of all runs may have been moved
        same = self.trains or Path(model).name == Path(self.cfg.model).name
        return same and all(tasks.get(task_label(name), {}).get('source') == task_source(name)
                            for name in report_of.tasks)

    @property
    def hours(self):
        """GPU hours on one H200: 6 operations per weight and trained token, 2 per scored one.

        Checkpointed activations take 2 more; LoRA, whose frozen weights have no gradient, 2 less.
        """
        more = self.cfg.checkpoint_activations - self.cfg.lora if self.trains else 0
        seconds = (6 + 2 * more) * self.params * self.train_tokens / TRAIN_RATE
        seconds += 2 * self.params * self.eval_tokens / EVAL_RATE
        return (seconds + EVAL_STARTS * (self.eval_tokens > 0)) / 3600

    @property
    def gigabytes(self):
        """The weights that the run keeps, in bfloat16."""
        copies = math.ceil(self.cfg.epochs) if self.trains and self.cfg.checkpoint_epochs else 1
        return 2e-9 * self.params * copies * self.trains


def sweep(folder, rates, smoothings, cfg, **sizes):
    """Yield the Runs that choose a learning rate, then those that smooth at that rate.

    Each of `rates` is trained without smoothing and report. The one with the least NLL on the
    held-out sequences is evaluated as smoothing0, and smoothing{s} is trained at its rate for each
    s of `smoothings`. cfg: the TrainConfig of all; sizes: params, train_tokens, eval_tokens.
    """
    # all weights of Llama 3.1 8B otherwise take up to 136 of the 140 GiB of an H200
    cfg = replace(cfg, checkpoint_activations=sizes['params'] > 8e9 and not cfg.lora)
    grid = [replace(cfg, lr=lr, out_dir=f'{folder}/lr{lr:g}') for lr in rates]
    for one in grid:
        yield Run(replace(one, eval=None), **sizes | {'eval_tokens': 0})
    losses, best, waits_for = [held_out(one.out_dir) for one in grid], grid[0], ''
    if None in losses:
        waits_for = f'the {len(rates)} learning rates' if len(rates) > 1 else 'its training'
    elif len(rates) > 1:
        if {} in losses:
            raise ConfigError(f'{grid[losses.index({})].out_dir} has no validation loss, by which '
                              f'the learning rate is chosen; val_size must be above 0')
        best = grid[losses.index(min(losses, key=lambda loss: loss['nll']))]
    yield Run(replace(cfg.eval, model=best.out_dir, out_dir=f'{folder}/smoothing0'),
              **sizes | {'train_tokens': 0}, waits_for=waits_for)
    waits_for *= len(rates) > 1
    for smoothing in smoothings:
        yield Run(replace(cfg, lr=best.lr, smoothing=smoothing,
                          out_dir=f'{folder}/smoothing{smoothing:g}'), **sizes, waits_for=waits_for)


def held_out(folder):
    """Return {'nll' (nats per token), 'ece'} of the next tokens of the held-out sequences after the
    last step of a run; {} if it has held out none, None if it is not finished."""
    if not Path(folder, 'config.json').exists():
        return None
    values = [{'nll': line['val_nll'], 'ece': line['val_ece']}
              for line in common.read_lines(Path(folder, 'log.jsonl')) if 'val_ece' in line]
    return values[-1] if values else {}     # pairs have none


def read_report(folder):
    """Return (model, {task: result}) of the report in the folder of a run; ('', {}) without one."""
    path = Path(folder, 'results.json')
    if not path.exists():
        return '', {}
    with read_json(path, 'remove it, and the report is made again') as results:
        check_results(path, results)
        return results['config']['model'], results['tasks']


def measured(folder, task):
    """Return the results of a task in the folder of a run; {} if there are none yet."""
    return read_report(folder)[1].get(task, {})


def pooled(folder, task, scaling=''):
    """Return the report of a task, scaled if `scaling` names it; {} if there is none yet."""
    result = measured(folder, task)
    if scaling:
        return result.get('post_hoc', {}).get('reports', {}).get(scaling, {})
    return result.get('pooled', {})


# Models and files of your own

# options of a script with tables of models and datasets
OWN = {'model': {'action': 'append', 'default': [], 'metavar': '[NAME=]FOLDER', 'help':
                 "your model in Hugging Face layout instead of the paper's; commas separate "
                 'several'},
       'data': {'action': 'append', 'default': [], 'metavar': '[NAME=]FILE', 'help':
                "your conversations instead of the paper's data; commas separate several"}}
TAKEN = 'base', 'instruct', 'aligned'       # folders of other runs beside those with the names
FILE_ENDING = re.compile(r'(\.(jsonl?|csv|tsv|parquet|txt|gz))+$')


def read_models(paper):
    """Return {group: {name: (hub name, weights)}} of a paper in models.csv."""
    groups = {}
    for row in common.read_csv(FOLDER / 'models.csv'):
        if row['paper'] == paper:
            groups.setdefault(row['group'], {})[row['name']] = row['hub'], float(row['weights'])
    return groups


def own_table(options, key, table):
    """Return {name: (path, `size_of` it)} of the option --model or --data; `table` without it.

    Raises ConfigError.
    """
    own = {}
    for text in filter(None, getattr(options, key).split(',')):
        *names, path = text.split('=', 1)
        path = os.path.expanduser(path)
        name, = names or [FILE_ENDING.sub('', Path(path).resolve().name)]
        if not re.fullmatch(r'\w[\w.+-]*', name) or name in (*TAKEN, *own):
            raise ConfigError(f'--{key}={text}: {name!r} cannot be its name in the results; name '
                              f'it as {OWN[key]["metavar"]}, with letters, digits and . _ + -, '
                              f'each name once, and not {", ".join(TAKEN)}')
        own[name] = path, size_of(path, f'--{key}={text}', PATTERNS if key == 'data' else None)
    return own or table


@functools.cache
def size_of(path, option, patterns=None):
    """Return the number of weights of a model by the headers of its files, nan for a hub name, or
    with the `patterns` of data nan for its tokens. Raises ConfigError if nothing is there.
    """
    # owner/name, and no file or folder, even misspelled
    if re.fullmatch(r'[\w.-]+/[\w.-]+', path) and not Path(path).parent.exists():
        return math.nan
    if not (patterns or Path(path).is_dir()):
        raise ConfigError(f'{option}: there is no folder {path}; wanted the folder of a model, '
                          f'with config.json, weights and tokenizer, or a hub name')
    try:
        if patterns:
            fetch(path, patterns)
            return math.nan
        return sum(x.numel() for *_, x in checkpoint.read_weights(checkpoint.fetch(path)))
    except (CheckpointError, DataError) as error:
        raise ConfigError(f'{option}: {error}') from error


# The command line

def main(runs, tables, **more):
    """Do the runs of a script and write its tables, as the options of the command line say.

    runs(options) yields the Runs; tables(options) yields (name, title, lines of cells). Each of
    `more` is an option of the script, as keyword arguments of argparse; one with choices or of OWN
    is a setting of the runs. options.changes lists the changed settings that results depend on.
    """
    script = sys.modules['__main__']
    name, paper = Path(script.__file__).stem, Path(script.__file__).with_suffix('.md')
    more = {key: {'default': ''} | arguments for key, arguments in more.items()}
    parser = common.command_parser(
        script.__doc__, plan={'action': 'store_true', 'help': 'print the runs and their cost'},
        only={'default': '', 'help': 'parts of names of runs, such as Alpaca/lr,base'},
        out_dir={'default': f'out/papers/{name}', 'help': 'default: %(default)s'}, **more)
    options, changes = parser.parse_known_args()
    for key in OWN.keys() & more.keys():        # an option may be given several times
        if '' in getattr(options, key):
            parser.error(f'--{key} is empty; wanted --{key}={OWN[key]["metavar"]}')
        setattr(options, key, ','.join(getattr(options, key)))
    with cli.one_line_errors(resume='the same command continues'):
        if stray := [text for text in changes if not text.startswith('--')]:
            raise ConfigError(f'unexpected argument {stray[0]!r}; settings are --key=value')
        for key in (change[2:].partition('=')[0] for change in changes):
            near = difflib.get_close_matches(key, vars(options), 1)
            if near and not hasattr(TrainConfig(), key):
                raise ConfigError(f'there is no option --{key}; did you mean --{near[0]}?')
        load_config(TrainConfig, changes)       # fail on a misspelled key before anything is done
        chosen = [f'--{key}={getattr(options, key)}' for key, arguments in more.items()
                  if ('choices' in arguments or key in OWN)
                  and getattr(options, key) not in ('', arguments['default'])]
        options.changes = [*chosen, *(change for change in changes
                                      if change[2:].split('=')[0] not in FREE_KEYS)]
        changed = (run.changed(changes) for run in runs(options)
                   if selected(run.cfg.out_dir, options))       # later runs wait for earlier ones
        if not (first := next(changed, None)):
            raise ConfigError(f'--only={options.only}: no run has such a name; --plan lists them')
        changed = itertools.chain([first], changed)
        if options.plan:
            print_plan(changed, options)
            return
        with lock(options.out_dir):     # not while runs are done: several processes can share them
            keep_changes(options.out_dir, [*chosen, *changes])
        failed = do(changed, options)
        with lock(options.out_dir):
            write_tables(tables(options), options.out_dir, f'{script.__doc__}\n{paper.read_text()}',
                         options.changes)
        if failed:
            sys.exit('error: not done: ' + ', '.join(failed) + '; the messages are above')


def keep_changes(folder, changes):
    """Record the changed settings of all runs; raise ConfigError if earlier runs had others."""
    path = Path(folder, 'changes.json')
    if path.exists():
        with read_json(path, 'choose another --out_dir') as earlier:
            if earlier != changes:
                raise ConfigError(f'{folder} was begun with {" ".join(earlier) or "no changes"}; '
                                  f'start it with the same settings or choose another --out_dir')
    claim(folder, path.name)
    write_text(path, json.dumps(changes) + '\n')


def name_of(folder, options):
    return Path(folder).relative_to(options.out_dir).as_posix()


def changed_report(cfg, options):
    """Return the EvalConfig `cfg` with the settings --eval.key=value of the command line."""
    changes = [change for change in options.changes if change.startswith('--eval.')]
    return load_config(TrainConfig, changes, config=TrainConfig(eval=cfg)).eval


def titles_of(cfg, titles, options):
    """Return {task: its title, by default its name} of the EvalConfig `cfg`, changed likewise."""
    labels = map(task_label, changed_report(cfg, options).tasks)
    return {label: titles.get(label, label) for label in labels}


def selected(folder, options):
    """Return whether --only selects the run in `folder`: smoothing0 is no part of smoothing0.1."""
    parts = [re.escape(part) + r'(?![\d.])' * part[-1].isdigit()
             for part in options.only.split(',') if part]
    return not parts or any(re.search(part, name_of(folder, options)) for part in parts)


def do(runs, options):
    """Do the runs, unless they are finished; return the names of those that failed.

    Raises ConfigError if a run was made with other settings.
    """
    failed = []
    for run in runs:
        name = name_of(run.cfg.out_dir, options)
        if run.waits_for:
            print(f'\n=== {name} waits for {run.waits_for}', flush=True)
            continue
        if run.finished:
            if run.trains:      # the folder of all runs, with a model in it, may have been moved
                check_run(run.cfg, FREE_KEYS | {
                    key for key in ('model', 'reward')
                    if getattr(run.cfg, key, '').startswith(f'{options.out_dir}/')})
            continue
        print(f'\n=== {name}', flush=True)
        start = (align if isinstance(run.cfg, AlignConfig) else
                 train_and_report if run.trains else evaluate.run)
        try:
            start(run.cfg)
            continue
        except (CheckpointError, TrainingError) as error:
            if isinstance(error, TrainingError) and error.__cause__:
                raise       # the disk is full: no other run could be saved
            problem = str(error)    # the error itself would keep the model in memory
        except torch.OutOfMemoryError:
            problem = ('out of GPU memory; --master_weights=stochastic, --checkpoint_activations '
                       'and --eval.pack_len=4096 need less, in another --out_dir')
        print(f'error: {problem}', file=sys.stderr, flush=True)
        failed.append(name)
    return failed


def print_plan(runs, options):
    runs, lines = [*runs], [('run', 'state', 'GPU hours', 'GB')]
    for run in runs:
        state = ('finished' if run.finished else f'waits for {run.waits_for}' if run.waits_for else
                 'started' if Path(run.cfg.out_dir).exists() else '')
        lines.append((name_of(run.cfg.out_dir, options), state,
                      f'{run.hours:.2f}', f'{run.gigabytes:.1f}'))
    left = sum(run.hours for run in runs if not run.finished)
    downloads = {(run.cfg.model, run.cfg.revision): run.params for run in runs
                 if not run.cfg.model.startswith(f'{options.out_dir}/')
                 and not Path(run.cfg.model).is_dir()}
    largest = max(run.params * run.trains for run in runs)
    lines.append(('all', f'{sum(run.finished for run in runs)} of {len(runs)} finished',
                  f'{sum(run.hours for run in runs):.1f}',
                  f'{sum(run.gigabytes for run in runs):.1f}'))
    print(aligned(lines))
    names = ', '.join(dict.fromkeys(model for model, _ in downloads))
    print(f'\n{left:,.1f} GPU hours are left, estimated for one H200 from the numbers of tokens in '
          f'the script (nan: of your data, or a model on the hub) and the speeds in '
          f'research/bench/results. --key=value does not change them. GB is the size of the '
          f'weights that a run keeps. While a run trains, its checkpoints need up to '
          f'{24e-9 * largest:.0f} GB more.' + bool(downloads) * (
              f' The models to download have about {2e-9 * sum(downloads.values()):.0f} GB: '
              f'{names}.'))


# Tables and figures

COLUMNS = {key: Heading(key) for key in ('accuracy', 'entropy_bits', 'ece', 'nll')} | {
    'rms_mmlu_repo': Heading('rms_mmlu_repo', 'RMS as printed'),
    'rmsce': Heading('rmsce', 'RMS as defined')}


def numbers(result, keys):
    """Return the cells of the metrics `keys` in a report, '' where it has none."""
    return [f'{result[key]:.3f}' if result.get(key) is not None else '' for key in keys]


def counted(report, keys):
    """Return the cells of the number of questions and of the metrics `keys`."""
    return [str(report['n']), *numbers(report, keys)]


def paper_column(heading, options):
    """Return the title of the printed numbers beside the column `heading`."""
    return f'{heading} (paper{", its own settings" * bool(options.changes)})'


def write_tables(tables, folder, doc, changes=()):
    """Print each (name, title, lines) and write <name>.csv, <name>.tex, and tables.md of all.

    changes: settings other than the script's own, for below or above each table. In LaTeX the best
    of the lines with the same first cell is bold.
    """
    texts, changed = [], 'changed settings: ' + ' '.join(changes)
    for name, title, lines in tables:
        print(f'\n{title}', *[changed] * bool(changes),
              aligned(lines) if len(lines) <= PRINTED_LINES else
              f'{len(lines) - 1:,} lines, in {name}.csv', sep='\n')
        texts += [f'## {title}\n', *[f'`{changed}`\n'] * bool(changes), markdown(lines)]
        claim(folder, f'{name}.csv', f'{name}.tex')
        common.write_csv(Path(folder, f'{name}.csv'), lines)
        marked = mark_best(lines, [first for first, *_ in lines[1:]])
        write_text(Path(folder, f'{name}.tex'), latex(
            marked, f'{title}; {changed}' * bool(changes)))
    claim(folder, 'tables.md')
    write_text(Path(folder, 'tables.md'), '\n'.join([*texts, '## How', '', doc.strip(), '']))
    print(f'\nwrote tables.md, and each table as CSV and LaTeX, to {folder}')


def draw_curves(path, panels, columns=3):
    """Draw the reliability curves of panels = {title: {line: entry of results.json}}, but for lines
    without an entry and panels without lines."""
    panels = {title: {label: entry['bins'] for label, entry in entries.items() if 'bins' in entry}
              for title, entries in panels.items()}
    if any(panels.values()):
        claim(Path(path).parent, Path(path).name)
        plots.draw_curves(path, {title: bins for title, bins in panels.items() if bins}, columns)


def draw_lines(path, panels, x_label, metric='ece', log=False):
    """Draw panels = {title: {line: [(x, report), ...]}} of one metric with its 95 % intervals, but
    for points without a report; without any point nothing is drawn."""
    if not any(result.get(metric) is not None for series in panels.values()
               for points in series.values() for _, result in points):
        return
    figure, axes = common.panels(len(panels), len(panels), 4, 3.4)
    for ax, (title, series) in zip(axes, panels.items(), strict=True):
        for label, points in series.items():
            rows = [(x, y, *result.get('intervals', {}).get(metric, (y, y)))
                    for x, result in points if (y := result.get(metric)) is not None]
            if rows:
                x, y, low, high = np.array(rows, float).T
                ax.errorbar(x, y, np.maximum(0, (y - low, high - y)), marker='o', markersize=4,
                            capsize=2, label=label)
        ax.set_title(plots.figure_title(title, 40), fontsize=10)
        ax.set(xlabel=x_label, ylabel=title_of(metric), xscale='log' if log else 'linear')
        if not log:
            ax.set_xticks(sorted({x for points in series.values() for x, _ in points}))
        ax.set_ylim(0, 1.05 * ax.get_ylim()[1])     # a marker at the top is not cut
        if ax.get_legend_handles_labels()[0]:
            ax.legend(fontsize=8)
    with plots.warn_on_failure(path):
        claim(Path(path).parent, Path(path).name)
        plots.save_figure(figure, path, 150)
