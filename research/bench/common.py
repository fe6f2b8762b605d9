"""What the benchmarks share: models, the device, results on disk and as a picture."""

import atexit
import functools
import gc
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Literal

import torch

import model as models
from data.benchmarks import BENCHMARKS
from data.files import fetch, read_rows
from data.questions import parse_row
from runtime import checkpoint
from runtime.config import load_config
from runtime.config_json import config_from_hf
from runtime.errors import ConfigError
from runtime.ownership import write_text
from triton_ops import adjoin

LLAMA3 = {'model_type': 'llama', 'vocab_size': 128256, 'num_attention_heads': 32,
          'num_key_value_heads': 8, 'rms_norm_eps': 1e-5, 'max_position_embeddings': 131072,
          'rope_theta': 5e5}
MODELS = {      # as in config.json
    'gemma2_2b': {'model_type': 'gemma2', 'vocab_size': 256000, 'hidden_size': 2304,
                  'intermediate_size': 9216, 'num_hidden_layers': 26, 'num_attention_heads': 8,
                  'num_key_value_heads': 4, 'head_dim': 256, 'hidden_activation':
                  'gelu_pytorch_tanh', 'tie_word_embeddings': True},
    'gemma3_270m': {'model_type': 'gemma3_text', 'vocab_size': 262144, 'hidden_size': 640,
                    'intermediate_size': 2048, 'num_hidden_layers': 18, 'num_attention_heads': 4,
                    'num_key_value_heads': 1, 'head_dim': 256, 'sliding_window': 512,
                    'query_pre_attn_scalar': 256, 'max_position_embeddings': 32768,
                    'hidden_activation': 'gelu_pytorch_tanh', 'tie_word_embeddings': True,
                    'layer_types': (['sliding_attention'] * 5 + ['full_attention']) * 3,
                    'rope_parameters': {
                        'sliding_attention': {'rope_type': 'default', 'rope_theta': 1e4},
                        'full_attention': {'rope_type': 'default', 'rope_theta': 1e6}}},
    'llama32_1b': LLAMA3 | {'hidden_size': 2048, 'intermediate_size': 8192, 'head_dim': 64,
                            'num_hidden_layers': 16, 'tie_word_embeddings': True},
    'llama31_8b': LLAMA3 | {'hidden_size': 4096, 'intermediate_size': 14336, 'head_dim': 128,
                            'num_hidden_layers': 32, 'tie_word_embeddings': False},
    'mistral_7b': {'model_type': 'mistral', 'vocab_size': 32768, 'hidden_size': 4096,
                   'intermediate_size': 14336, 'num_hidden_layers': 32, 'num_attention_heads': 32,
                   'num_key_value_heads': 8, 'head_dim': 128, 'sliding_window': None,
                   'rms_norm_eps': 1e-5, 'rope_theta': 1e6, 'max_position_embeddings': 32768,
                   'tie_word_embeddings': False},
}
Shape = Literal['gemma2_2b', 'llama32_1b', 'llama31_8b', 'mistral_7b']     # of most scripts
ROOT = Path(__file__).parents[2]
DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'     # a CPU is for the tests alone


def our_model(raw):
    """Return our model of the shape `raw`, with random bfloat16 weights."""
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(DEVICE):
        model = models.CausalLM(config_from_hf(raw))
        model.init_weights()
    torch.set_default_dtype(torch.float32)
    adjoin(model)       # as `checkpoint.load` does
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
    checkpoint.save(our_model(MODELS[shape]), folder, torch.bfloat16, side_files=tokenizer, **more)
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


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows))


def now():
    """Return the time in seconds when the device has done its work."""
    if DEVICE == 'cuda':
        torch.cuda.synchronize()
    return time.perf_counter()


def reset_peak_memory():
    if DEVICE == 'cuda':
        torch.cuda.reset_peak_memory_stats()


def peak_gib():
    return torch.cuda.max_memory_allocated() / 2 ** 30 if DEVICE == 'cuda' else 0.0


def free_memory():
    gc.collect()
    if DEVICE == 'cuda':
        torch.cuda.empty_cache()


def versions():
    device = torch.cuda.get_device_name() if DEVICE == 'cuda' else 'CPU'
    installed = {'device': device, 'torch': torch.__version__}
    for package in ('triton', 'transformers', 'liger-kernel', 'cut-cross-entropy', 'quack-kernels',
                    'trl', 'lm_eval', 'torchmetrics', 'netcal'):
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            installed[package] = None
    return installed


def require_files(config, **files):
    """Raise ConfigError unless the tokenizer and each of `files`, {option: its meaning}, are set.
    """
    if not all(getattr(config, key) for key in ('tokenizer', *files)):
        raise ConfigError('set ' + ''.join(f'--{key}, {what}, ' for key, what in files.items())
                          + 'and --tokenizer, a folder')


def chosen(only, methods):
    """Return those of `methods` that --only asks for, separated by '|'; all of them if it is None.
    """
    if unknown := {*(only.split('|') if only else ())} - {*methods}:
        raise ConfigError(f'only = {only!r}: there is no {sorted(unknown)[0]!r}; the names are '
                          f'{", ".join(map(repr, methods))}')
    return [name for name in methods if not only or name in only.split('|')]


def failure(error):
    """Return the entry of a peer that cannot run this benchmark."""
    return {'failed': f'{type(error).__name__}: {str(error).splitlines()[0]}'[:300]}


def last_error(stderr):
    """Return the line of a process's stderr that says why it failed: the last one of an error."""
    lines = [line for line in stderr.strip().split('\n') if line.strip()]
    errors = [line for line in lines if re.match(r'[\w.]*(Error|Exception|Exit)\b', line)]
    return (errors or lines or ['no message'])[-1][:300]


def measure_in_process(script, spec, warm=False):
    """Return measure(**spec) of a script from a new process, since some libraries patch modules.

    Unless `warm`, it finds no compiled kernels on disk. If it fails, return {'failed': the reason};
    RuntimeError if spec['ours'] and memory is not lacking.
    """
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([sys.executable, script, 'one', json.dumps(spec)],
                              env=os.environ | ({} if warm else empty_caches(folder)),
                              capture_output=True, text=True)
    if not done.returncode:
        return json.loads(done.stdout.strip().split('\n')[-1])
    reason = last_error(done.stderr)
    if spec['ours'] and 'OutOfMemoryError' not in reason:
        raise RuntimeError(done.stderr)
    return {'failed': reason}


def command_seconds(command, caches=None):
    """Return the seconds of `python <command>`; raise RuntimeError with its stderr if it fails.

    caches: what `empty_caches` returned; None: the caches of earlier commands
    """
    environment = os.environ | byte_code() | (caches or {}) | {'HF_HUB_OFFLINE': '1'}
    started = time.perf_counter()
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True,
                          env=environment)
    passed = time.perf_counter() - started
    if done.returncode:
        raise RuntimeError(done.stderr)
    return passed


@functools.cache
def byte_code():
    """Compile all modules once; return environment variables that use their byte code.

    pip does this when it installs a library. Container images often skip it and set
    PYTHONDONTWRITEBYTECODE, so that every start would compile 1,000 modules of torch.
    """
    print('compiling all modules to byte code', flush=True)
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    variables = {'PYTHONPYCACHEPREFIX': folder, 'PYTHONDONTWRITEBYTECODE': ''}
    root = ROOT.resolve()
    ours = {*root.glob('*.py'), *(path.parent for path in root.glob('*/*.py'))}
    installed = {path for path in map(Path, sys.path)
                 if path.is_dir() and path.resolve() != root} - ours
    # some libraries have files for other versions of Python, so the exit code says nothing
    subprocess.run([sys.executable, '-W', 'ignore', '-m', 'compileall', '-qq', '-j0',
                    *ours, *installed], env=os.environ | variables)
    if not [*Path(folder, *Path(torch.__file__).parent.parts[1:]).glob('__init__.*.pyc')]:
        raise ConfigError(f'python -m compileall could not compile torch into {folder}; is the '
                          f'disk full?')
    return variables


def empty_caches(folder):
    """Return environment variables that put compiled kernels and processed data into `folder`."""
    return {name: str(Path(folder) / name.lower()) for name in (
        'TORCHINDUCTOR_CACHE_DIR', 'TRITON_CACHE_DIR', 'CUDA_CACHE_PATH', 'HF_DATASETS_CACHE')}


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


def matrix_rate():
    """Return the FLOP/s of a product of two 8192 x 8192 matrices in bfloat16."""
    from triton.testing import do_bench
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192 ** 3 / do_bench(lambda: a @ b, return_mode='median') * 1e3


def memory_rate():
    """Return the bytes/s, read and written, of a copy of 2 GiB."""
    from triton.testing import do_bench
    a = torch.empty(2 ** 31, dtype=torch.uint8, device=DEVICE)
    b = torch.empty_like(a)
    return 2 * a.nbytes / do_bench(lambda: b.copy_(a), return_mode='median') * 1e3


def save(path, tables, **more):
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {'command': f'python {shlex.join(sys.argv)}', 'date': str(date.today()),
               'versions': versions(), **more, 'tables': tables}
    write_text(path, json.dumps(content, indent=1) + '\n')
    print(f'wrote {path}')


def load(path):
    return json.loads(Path(path).read_text(encoding='utf-8'))


def cell(reason):
    """Return the reason of a failure, shortened, as a cell of a Markdown table."""
    reason = ' '.join(reason.split())
    return (reason if len(reason) <= 120 else f'{reason[:116]} ...').replace('|', '\\|')


def table_text(head, lines):
    """Return a Markdown table; a line with fewer cells than `head` ends with empty ones, None."""
    first, *rows = ('|' + '|'.join(' ' if text is None else f' {text} ' for text in (
        *line, *[None] * (len(head) - len(line)))) + '|' for line in (head, *lines))
    return '\n'.join([first, '|---' * len(head) + '|', *rows])


def print_results(title, head, results, cells, last=()):
    """Print {method: row} as Markdown: cells(method, row) or the failure, then the lines `last`."""
    print(f'\n### {title}\n', table_text(head, [
        [name, f'failed: {cell(row["failed"])}'] if 'failed' in row else [name, *cells(name, row)]
        for name, row in results.items()] + [*last]), '', sep='\n', flush=True)


def draw_results(path, what, key, form, panel='{shape}', prefix=''):
    """Draw row[key] of each method that did not fail, a panel per table."""
    draw_bars(path, what, {panel.format(**table): [
        (f'{prefix}{name}', row[key], format(row[key], form))
        for name, row in table['results'].items() if 'failed' not in row]
        for table in load(path)['tables']})


def draw_bars(path, what, panels):
    """Draw panels {title: [(name, value, text)]} as bars, ours in blue: a .png beside `path`."""
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    n_rows, n_columns = -(-len(panels) // 2), min(2, len(panels))
    figure, axes = plt.subplots(n_rows, n_columns, squeeze=False, layout='constrained',
                                figsize=(4 + 4 * n_columns, 3.2 * n_rows))
    for axis in axes.flat[len(panels):]:
        axis.axis('off')
    for axis, (title, rows) in zip(axes.flat, panels.items()):
        bars = axis.barh([name for name, _, _ in rows], [value for _, value, _ in rows],
                         color=['#4878a8' if 'ours' in name else '#bbbbbb' for name, _, _ in rows])
        axis.bar_label(bars, [f' {text}' for _, _, text in rows], fontsize=7)
        axis.invert_yaxis()
        axis.tick_params(labelsize=7)
        axis.set_title(title, fontsize=9)
        axis.margins(x=0.35)
    used = load(path)['versions']
    figure.suptitle(f'{what}: bfloat16, {used["device"]}, torch {used["torch"]}',
                    fontsize=10)
    picture = Path(path).with_suffix('.png')
    figure.savefig(picture, dpi=130)
    print(f'wrote {picture}')


def script_main(file, config_class, bench, draw, measure=None):
    """Return main(argv) of a script: it saves the tables that bench(config) yields, and draws them.

    They are saved after each table, since a later one may fail or be stopped. With --plot the file
    is drawn again. `one` and a JSON object as arguments print measure(**object) as JSON.
    """
    def main(argv):
        if argv[:1] == ['one']:
            print(json.dumps(measure(**json.loads(argv[1]))))
            return
        try:
            config, tables = load_config(config_class, argv), []
            if config.plot:
                draw(config.plot)
                return
            if DEVICE == 'cpu':
                raise ConfigError(f'research/bench/{Path(file).name} needs a CUDA device, '
                                  f'found none')
            print(', '.join(f'{key} {value}' for key, value in versions().items()))
            for table in bench(config):
                tables.append(table)
                save(config.out, tables)
            draw(config.out)
        except ConfigError as error:
            sys.exit(f'error: {error}')
    return main
