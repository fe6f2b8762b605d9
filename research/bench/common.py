"""What the benchmarks share: models, the device, commands, results, and the frame of a script.

A script is a `Script`: its options, the generator of its tables, and how a table is shown. The
frame reads the command line, saves and prints each table, and draws a picture of all.
"""

import atexit
import contextlib
import functools
import gc
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Literal

import torch

import model as models
from data.benchmarks import BENCHMARKS
from data.files import read_rows
from data.questions import parse_row
from decoding.slots import step_cost
from research.common import panels
from results import tables
from results.plots import save_figure
from runtime import saving
from runtime.config import load_config
from runtime.config_json import config_from_hf
from runtime.errors import ConfigError
from runtime.sources import fetch
from runtime.log import peak_memory
from runtime.ownership import write_text
from speed.install import install
from speed.kernels import adjoin

MODELS = json.loads(Path(__file__).with_name('models.json').read_text())      # as config.json
METHODS, TABLES = (tomllib.loads(Path(__file__).with_name(f'{name}.toml').read_text())
                   for name in ('methods', 'tables'))       # of each script
Shape = Literal['gemma2_2b', 'gemma3_270m', 'llama32_1b', 'llama31_8b', 'mistral_7b']
ROOT = Path(__file__).resolve().parents[2]
DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'     # a CPU is for the tests alone


def our_model(raw):
    """Return our model of the shape `raw`, with random bfloat16 weights."""
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(DEVICE):
        model = models.CausalLM(config_from_hf(raw))
        model.init_weights()
    torch.set_default_dtype(torch.float32)
    adjoin(model)       # as `checkpoint.load` does
    if DEVICE == 'cuda':
        install()       # as the scripts do
    return model


def peer_model(raw, attention):
    """Return the Hugging Face model of the same shape."""
    import transformers
    config = transformers.AutoConfig.for_model(**raw, use_cache=False)
    with torch.device(DEVICE):
        return transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=attention)


def save_model(shape, folder, tokenizer, **more):
    """Save our model of a shape with the files of a tokenizer, and free its memory."""
    saving.save(our_model(MODELS[shape]), folder, torch.bfloat16, side_files=tokenizer, **more)
    free_memory()


def read_mmlu(folder):
    """Return {'test' or 'dev': [row with question, choices, answer, subject]} of MMLU's files."""
    rows = {'test': [], 'dev': []}
    for split, patterns in (('test', BENCHMARKS['mmlu'].test), ('dev', BENCHMARKS['mmlu'].shots)):
        for place, row in (pair for file in fetch(folder, patterns) for pair in read_rows(file)):
            if not isinstance(row, dict) or 'subject' not in row:
                raise ConfigError(f'{place}: no field "subject", by which lm_eval has its tasks; '
                                  f'give MMLU as .jsonl or .parquet')
            question, choices, answer = parse_row(row)
            rows[split].append({'question': question, 'choices': choices, 'answer': answer,
                                'subject': row['subject']})
    return rows


def now():
    """Return the time in seconds when the device has done its work."""
    if DEVICE == 'cuda':
        torch.cuda.synchronize()
    return time.perf_counter()


def reset_peak_memory():
    if DEVICE == 'cuda':
        torch.cuda.reset_peak_memory_stats()


def peak_gib():
    return peak_memory(DEVICE) if DEVICE == 'cuda' else 0.0


def free_memory():
    gc.collect()
    if DEVICE == 'cuda':
        torch.cuda.empty_cache()


def versions():
    installed = {'device': torch.cuda.get_device_name() if DEVICE == 'cuda' else 'CPU',
                 'torch': torch.__version__}
    for package in ('triton', 'transformers', 'liger-kernel', 'cut-cross-entropy', 'quack-kernels',
                    'trl', 'lm_eval', 'torchmetrics', 'netcal'):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[package] = importlib.metadata.version(package)
    return installed


def require_files(config, **files):
    """Raise ConfigError unless the tokenizer and `files`, {option: its meaning}, are set."""
    if not all(getattr(config, key) for key in ('tokenizer', *files)):
        raise ConfigError('set ' + ''.join(f'--{key}, {what}, ' for key, what in files.items())
                          + 'and --tokenizer, a folder')


def chosen_methods(script, config):
    """Return {method: options} of a script that --ours and --only choose."""
    methods = METHODS[script]
    return chosen(config.only, methods['ours'] | ({} if config.ours else methods['peers']))


def chosen(only, methods):
    """Return those of {method: options} that --only names, separated by '|'; None: all of them."""
    names = only.split('|') if only else [*methods]
    if unknown := {*names} - {*methods}:
        raise ConfigError(f'only = {only!r}: there is no {sorted(unknown)[0]!r}; the names are '
                          f'{", ".join(map(repr, methods))}')
    return {name: options for name, options in methods.items() if name in names}


def attempt(call, *arguments):
    """Return what a call returns or, if it raises, the row of a method that failed."""
    try:
        return call(*arguments)
    except Exception as error:
        return {'failed': f'{type(error).__name__}: {error}'.splitlines()[0][:300]}


def last_error(stderr):
    """Return the line of a process's stderr that says why it failed: the last one of an error."""
    lines = [line for line in stderr.split('\n') if line.strip()] or ['no message']
    errors = [line for line in lines if re.match(r'[\w.]*(Error|Exception|Exit)\b', line)]
    return (errors or lines)[-1][:300]


def measure_methods(script, label, methods, warm=False, **spec):
    """Return {method: measure(**spec, ours=..., options=...)} of a script, and print each.

    Each has a new process, since some libraries patch modules, which unless `warm` finds no
    compiled kernels. If ours fails for another reason than memory, RuntimeError is raised.
    """
    results = {}
    for name, options in methods.items():
        ours = name.startswith('ours')
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [sys.executable, script, 'one', json.dumps(spec | {'ours': ours,
                                                                   'options': options})],
                env=os.environ | ({} if warm else empty_caches(folder)), capture_output=True,
                text=True)
        if not done.returncode:
            results[name] = json.loads(done.stdout.strip().split('\n')[-1])
        else:
            results[name] = {'failed': last_error(done.stderr)}
            if ours and 'OutOfMemoryError' not in results[name]['failed']:
                raise RuntimeError(done.stderr)
        print(f'{label}: {name}: {results[name]}', flush=True)
    return results


def run_command(command, caches=None, stages=()):
    """Run `python <command>`; return ([seconds until each stage and until the end], its output).

    caches: of `empty_caches`; None: those of earlier commands. stages: patterns; a stage ends with
    the first line that its pattern matches. Raises RuntimeError with the command's stderr if it
    fails or ends before one of the stages.
    """
    environment = os.environ | byte_code() | (caches or {}) | {'HF_HUB_OFFLINE': '1',
                                                               'PYTHONUNBUFFERED': '1'}
    seconds, lines, stages = [], [], [*stages]
    with tempfile.TemporaryFile('w+') as errors:
        started = time.perf_counter()
        process = subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE,
                                   stderr=errors, text=True, env=environment)
        for line in process.stdout:
            lines.append(line)
            if stages and re.match(stages[0], line):
                seconds.append(time.perf_counter() - started)
                stages.pop(0)
        returncode = process.wait()
        seconds.append(time.perf_counter() - started)
        errors.seek(0)
        if returncode or stages:
            raise RuntimeError(errors.read() or f'the command printed no line for {stages}')
    return seconds, ''.join(lines)


@functools.cache
def byte_code():
    """Compile all modules once, as pip does; return environment variables that use the byte code.

    Container images often set PYTHONDONTWRITEBYTECODE: then every start would compile torch.
    """
    print('compiling all modules to byte code', flush=True)
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    variables = {'PYTHONPYCACHEPREFIX': folder, 'PYTHONDONTWRITEBYTECODE': ''}
    ours = {*ROOT.glob('*.py'), *(path.parent for path in ROOT.glob('*/*.py'))}
    installed = {path for path in map(Path, sys.path) if path.is_dir() and path.resolve() != ROOT}
    # some libraries have files for other versions of Python, so the exit code says nothing
    subprocess.run([sys.executable, '-W', 'ignore', '-m', 'compileall', '-qq', '-j0',
                    *ours, *installed - ours], env=os.environ | variables)
    if not [*Path(folder, *Path(torch.__file__).parent.parts[1:]).glob('__init__.*.pyc')]:
        raise ConfigError(f'python -m compileall could not compile torch into {folder}; is the '
                          f'disk full?')
    return variables


def empty_caches(folder):
    """Return environment variables that put compiled kernels and processed data into `folder`."""
    return {name: str(Path(folder) / name.lower()) for name in (
        'TORCHINDUCTOR_CACHE_DIR', 'TRITON_CACHE_DIR', 'CUDA_CACHE_PATH', 'HF_DATASETS_CACHE')}


def speed(tokens, seconds):
    """Return the median tokens per second of some steps, and how far they spread."""
    rates = [n / s for n, s in zip(tokens, seconds, strict=True)]
    return {'tokens_per_s': round(statistics.median(rates)),
            'spread': round(max(rates) / min(rates) - 1, 3)}


def gpu_kernels(call):
    """Return [(name, start, end)] in microseconds of the kernels that `call` runs, in order."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        now()
    return sorted(((e.name, e.time_range.start, e.time_range.end) for e in profile.events()
                   if e.device_type == torch.autograd.DeviceType.CUDA), key=lambda e: e[1:])


def busy_time(kernels):
    """Return the time in which at least one of `gpu_kernels` ran."""
    busy, end = 0, 0
    for _, begin, stop in kernels:
        busy, end = busy + max(0, stop - max(begin, end)), max(end, stop)
    return busy


def device_rates():
    """Return (FLOP/s of a product of two 8192 x 8192 matrices, bytes/s of a copy of 2 GiB)."""
    if DEVICE != 'cuda':
        return 1e12, 1e12
    from triton.testing import do_bench
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    matrix = 2 * 8192 ** 3 / do_bench(lambda: a @ b, return_mode='median') * 1e3
    source = torch.empty(2 ** 31, dtype=torch.uint8, device=DEVICE)
    copy = torch.empty_like(source)
    memory = 2 * source.nbytes / do_bench(lambda: copy.copy_(source), return_mode='median') * 1e3
    print(f'matrix rate {matrix / 1e12:.0f} TFLOP/s, copy rate {memory / 1e12:.2f} TB/s')
    return matrix, memory


def decoding_limit(model, n, cached, rates):
    """Return (seconds of a step that writes a token in `n` rows, the bytes it reads, its FLOPs).

    cached: tokens in the cache; rates: of `device_rates`
    """
    weights, flops = step_cost(model, n, 0)
    cache = step_cost(model, n, cached)[0] - weights
    return max(weights / rates[1], flops / rates[0]) + cache / rates[1], weights + cache, flops


def load(path):
    """Return the content of a .json file, such as {'command', 'versions', 'tables', ...}."""
    content = json.loads(Path(path).read_text(encoding='utf-8'))
    if isinstance(content.get('tables'), dict):     # of loss.py, when its tables were named
        content['tables'] = [{'shape': shape, 'n': content['n']} | table
                             for shape, table in content['tables'].items()]
    return content


def save(path, finished):
    content = {'command': f'python {shlex.join(sys.argv)}', 'date': str(date.today()),
               'versions': versions(), 'tables': finished}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(content, indent=1) + '\n')
    print(f'wrote {path}')


def cell(reason):
    """Return the reason of a failure, shortened."""
    reason = ' '.join(reason.split())
    return reason if len(reason) <= 120 else f'{reason[:116]} ...'


def section(name, table, results=None):
    """Return (title, lines of the table, header first) of {method: row}, as tables.toml says.

    results: by default those of the table. A cell is empty where a row lacks the key
    """
    spec = TABLES[name]
    lines = [[spec.get('first', 'method'), *(title for title, _, _ in spec['columns'])]]
    for method, row in (table['results'] if results is None else results).items():
        if 'failed' in row:
            lines.append([method, f'failed: {cell(row["failed"])}'])
        else:
            cells = [(row.get(key), form) for _, key, form in spec['columns']]
            lines.append([method, *('' if x is None else format(x, form) for x, form in cells)])
    return spec['section'].format(**table), lines


def markdown(title, *parts):
    """Return a section of a page. A part is a paragraph, or the lines of a table, header first;
    lines with fewer cells than the header are filled."""
    texts = [f'### {title}']
    for part in filter(None, parts):
        texts.append(part.strip() if isinstance(part, str) else tables.markdown(
            [[*line, *[''] * (len(part[0]) - len(line))] for line in part]).strip())
    return '\n\n'.join(texts)


@dataclass
class Options:
    """The options of every script."""
    plot: str | None = None         # only draw this file of results again
    out: str | None = None          # .json file to write; None: out/bench_<script>.json
    ours: bool = False              # ours alone


@dataclass
class PeerOptions(Options):
    """The options of a script that compares methods."""
    tokenizer: str | None = None    # a folder with a tokenizer
    only: str | None = None         # methods to measure, separated by '|'; None: all of them


@dataclass
class Script:
    """A benchmark.

    bench(options) yields tables, which are saved as JSON after each, since a later one may fail.
    view(table) returns the title and the parts of a section, see `markdown`. plot(content, path)
    draws the picture of all tables. `measure` is for `measure_methods`.
    """
    file: str
    options: type
    bench: Callable
    view: Callable
    plot: Callable | None = None
    measure: Callable | None = None
    needs_gpu: bool = True

    def main(self, argv):
        if argv[:1] == ['one']:
            print(json.dumps(self.measure(**json.loads(argv[1]))))
            return
        try:
            options, finished = load_config(self.options, argv), []
            path = Path(options.plot or options.out or f'out/bench_{Path(self.file).stem}')
            path = path if path.suffix == '.json' else Path(f'{path}.json')
            if options.plot and not self.plot:
                raise ConfigError(f'plot: {Path(self.file).name} draws no picture')
            if not options.plot:
                if self.needs_gpu and DEVICE == 'cpu':
                    raise ConfigError(f'{Path(self.file).name} needs a CUDA device, found none')
                print(', '.join(f'{key} {value}' for key, value in versions().items()))
                for table in self.bench(options):
                    print('', markdown(*self.view(table)), '', sep='\n', flush=True)
                    finished.append(table)
                    save(path, finished)
            if self.plot:
                self.plot(load(path), path.with_suffix('.png'))
        except ConfigError as error:
            sys.exit(f'error: {error}')


def bars(title, key, form):
    """Return the `plot` of a Script: a bar for the number `key` of each row, a panel per table."""
    def plot(content, picture):
        figure, axes = panels(len(content['tables']), 2, 6.5, 3.2)
        for axis, table in zip(axes, content['tables']):
            numbers = {name: row[key] for name, row in table['results'].items() if row.get(key)}
            colors = ['#4878a8' if 'ours' in name else '#bbbbbb' for name in numbers]
            drawn = axis.barh([*numbers], [*numbers.values()], color=colors)
            axis.bar_label(drawn, [f' {x:{form}}' for x in numbers.values()], fontsize=7)
            axis.invert_yaxis()
            axis.tick_params(labelsize=7)
            axis.set_title(', '.join(table[name] for name in ('shape', 'data') if name in table),
                           fontsize=9)
            axis.margins(x=0.35)
        used = content['versions']
        figure.suptitle(f'{title}: {used["device"]}, torch {used["torch"]}', fontsize=10)
        save_figure(figure, picture, 130)
        print(f'wrote {picture}')
    return plot
