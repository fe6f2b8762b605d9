"""Every benchmark with one command, to one page; or our speed at two commits.

    python research/bench/all.py --data=mmlu --tokenizer=Llama-3.2-1B --conversations=alpaca.jsonl
    timeout 9m python research/bench/all.py --only=loss,generate --shape=llama32_1b ...
    python research/bench/all.py --compare main~10 main --data=mmlu --tokenizer=Llama-3.2-1B

docs/benchmarks.md explains both. The page, out/bench/README.md, has all results in its folder, also
the tables that a stopped run has finished; `--only=` runs nothing. A comparison exits with 1 if the
new commit lacks a row, or if one became slower by more than the spread of its runs plus 3 %.
"""

import contextlib
import importlib
import itertools
import statistics
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from research import common
from research.bench.common import load, markdown
from results import tables

SCRIPTS = tomllib.loads(Path(__file__).with_name('scripts.toml').read_text(encoding='utf-8'))
FILES = SCRIPTS.pop('files')      # {option: the file that it names}
MARGIN = 0.03       # beyond the spread


def file_of(name):
    return f'research/bench/{SCRIPTS[name].get("file", name)}.py'


def script_of(name):
    return importlib.import_module(file_of(name)[:-3].replace('/', '.')).script


def command(name, options, out, ours=False):
    """Return the arguments of python that run a script, or None if it lacks its files.

    out: path of its results, without suffix
    """
    arguments = [file_of(name), f'--out={out}.json', *['--ours'] * ours]
    needs = SCRIPTS[name].get('needs')
    data = getattr(options, needs) if needs else None
    if data and options.tokenizer:
        key = 'prompts' if needs == 'prompts' else 'data'
        arguments += [f'--{key}={data}', f'--tokenizer={options.tokenizer}']
    elif needs and 'less' not in SCRIPTS[name]:
        return None
    if options.shape and name not in ('llmq', 'metrics', 'optimizers'):
        arguments.append(f'--shape{"s" * (name == "loss")}={options.shape}')
    return arguments


# One page

def run_all(options):
    """Run the scripts that are wanted and write the page; return 1 if one of them failed."""
    import torch
    folder, failed = Path(options.out), []
    folder.mkdir(parents=True, exist_ok=True)
    for name in options.only:
        script = file_of(name)
        if name == 'several_gpus' and torch.cuda.device_count() < 2:
            print(f'{script} needs two GPUs; left out')
            continue
        part = f'-{options.shape.replace(",", "-")}' if options.shape else ''
        arguments = command(name, options, folder / f'{name}{part}')
        if arguments is None:
            print(f'{script} needs --{SCRIPTS[name]["needs"]} and --tokenizer; left out')
        elif run_script(arguments):
            failed.append(name)
    for name in SCRIPTS:
        if 'picture' in SCRIPTS[name]:
            draw_together(name, folder)
    (folder / 'README.md').write_text(page(folder), encoding='utf-8')
    print(f'wrote {folder / "README.md"}')
    if failed:
        print(f'failed: {", ".join(failed)}', file=sys.stderr)
    return int(bool(failed))


def run_script(arguments):
    return subprocess.run([sys.executable, *arguments], cwd=ROOT).returncode


def page(folder):
    """Return the Markdown page of the results in `folder`."""
    parts = ['# Benchmarks\n\nMade by `python research/bench/all.py`. Below each title: command, '
             'date and versions of each run.\n']
    for name, script in SCRIPTS.items():
        paths, title, one_picture = result_files(folder, name), script['title'], 'picture' in script
        parts += [f'## {title}'] * bool(paths)
        for path in paths:
            content = load(path)
            details = {'date': content.get('date')} | content['versions']
            parts += [('Another run: ' if is_again(path) else '') + f'`{content["command"]}`: '
                      + ', '.join(f'{key} {value}' for key, value in details.items() if value),
                      content.get('note', ''),
                      *(markdown(*script_of(name).view(table)) for table in content['tables'])]
            if path.with_suffix('.png').exists() and not one_picture:
                parts.append(f'![{title}]({path.stem}.png)')
        if one_picture and (folder / f'{name}.png').exists():
            parts.append(f'![{title}]({name}.png)')
    parts += repeated(folder)
    return '\n\n'.join(part.strip() for part in parts if part) + '\n'


def result_files(folder, name):
    """Return the files of a script's results in `folder`, last those ending in '-again'."""
    return sorted(folder.glob(f'{name}*.json'), key=lambda path: (is_again(path), path))


def is_again(path):
    """Return whether a file has another run, to see how much times differ."""
    return path.stem.endswith('-again')


def draw_together(name, folder):
    """Draw the tables of a script for the same GPU as one picture, <name>.png.

    Files ending in '-again' are left out; of a method in two others, the last one's is drawn.
    """
    contents = [load(path) for path in result_files(folder, name) if not is_again(path)]
    merged = {}     # (model, data) -> table
    for content in contents:
        if content['versions']['device'] == contents[0]['versions']['device']:
            for table in content['tables']:
                key = table['shape'], table.get('data')
                before = merged.get(key, {'results': {}})['results']
                merged[key] = table | {'results': before | table['results']}
    if merged:
        script_of(name).plot(contents[0] | {'tables': [*merged.values()]}, folder / f'{name}.png')


def repeated(folder):
    """Return the part of the page about times of ours that several files have for the same GPU."""
    measured = {}       # (what, GPU) -> numbers
    for name in SCRIPTS:
        for path in result_files(folder, name):
            content = load(path)
            for what, value in timings(name, content).items():
                measured.setdefault((what, content['versions']['device']), []).append(value)
    lines = [['time', 'GPU', 'runs', 'lowest', 'highest', 'difference']]
    lines += [[what, device, str(len(values)), f'{min(values):.4g}', f'{max(values):.4g}',
               f'{max(values) / min(values) - 1:.1%}']
              for (what, device), values in measured.items() if len(values) > 1]
    if len(lines) == 1:
        return []
    return ['## Our times that were measured more than once', tables.markdown(lines)]


# Two commits

def timings(name, content):
    """Return {what: a number that grows with the time} of our rows in a script's results."""
    script, numbers = {'rows': 'results', 'times': {}, 'least': 0} | SCRIPTS[name], {}
    for table in content['tables']:
        ours = {method: row for method, row in table[script['rows']].items()
                if method != 'idle' and ('all' in script or method.startswith('ours'))}
        for (method, number), (what, path) in itertools.product(
                ours.items(), script['times'].items()):
            for key in filter(None, path.split('/')):
                number = (number or {}).get(key)
            if isinstance(number, list):
                number = min(number)
            if number and path.endswith('tokens_per_s'):
                number = 1e6 / number
            if number is not None and number > script['least']:
                numbers[what.format(method=method, **table)] = number
    return numbers


def compare(old, new, options):
    """Print how our times changed between two commits, or folders that hold their files; return 1
    if one is slower or missing."""
    measured = {}       # what -> {side: [number, number]}
    names = [name for name in options.only if name != 'several_gpus']   # which has no --ours
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        trees = {side: checkout(commit, Path(folder, side), stack)
                 for side, commit in (('old', old), ('new', new))}
        for turn, side in itertools.product((1, 2), trees):
            print(f'{side}, run {turn} of 2', flush=True)
            for name in names:
                for what, value in measure_ours(name, options, trees[side], folder).items():
                    measured.setdefault(what, {}).setdefault(side, []).append(value)
    return print_comparison(measured, old, new)


def checkout(commit, tree, stack):
    """Return a folder with the files of a commit: itself, or `tree` until `stack` is closed."""
    if Path(commit).is_dir():
        return Path(commit)
    git('worktree', 'add', '--detach', str(tree), commit)
    stack.callback(git, 'worktree', 'remove', '--force', str(tree))
    return tree


def measure_ours(name, options, tree, folder):
    """Return `timings` of a script of the commit in `tree`, none if it lacks its files."""
    arguments = command(name, options, Path(folder, name), ours=True)
    if arguments is None:
        return {}
    if subprocess.run([sys.executable, *arguments], cwd=tree, stdout=subprocess.DEVNULL).returncode:
        sys.exit(f'error: {" ".join(arguments)} failed in {tree}, see above; a commit can be '
                 f'compared if its script of this name knows --ours')
    return timings(name, load(f'{folder}/{name}.json'))


def print_comparison(measured, old, new):
    """Print {what: {'old': numbers, 'new': numbers}} as a table; return 1 if one is slower, or
    missing in a run of the new commit, for example because it is out of memory."""
    lines, slower = [['time', old, new, 'new / old', 'spread', '']], []
    for what, sides in measured.items():
        missing = len(sides.get('new', ())) < len(sides.get('old', ()))
        if 'old' in sides and not missing:
            before, after = (statistics.median(sides[side]) for side in ('old', 'new'))
            spread = max(max(values) / min(values) - 1 for values in sides.values())
            mark = 'slower' if after / before > 1 + spread + MARGIN else ''
            lines.append([what, f'{before:.4g}', f'{after:.4g}', f'{after / before:.3f}',
                          f'{spread:.1%}', mark])
        else:
            mark = 'missing' if missing else 'added'
            lines.append([what, *[''] * 4, mark])
        slower += [what] * (mark in ('slower', 'missing'))
    print(f'\n{tables.markdown(lines)}\nslower or missing: {", ".join(slower) or "nothing"}',
          flush=True)
    return int(bool(slower))


def git(*arguments):
    done = subprocess.run(['git', *arguments], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f'error: git {" ".join(arguments)}: {done.stderr.strip()}')


def main(argv=None):
    parser = common.command_parser(
        __doc__, **{key: {'help': what} for key, what in FILES.items()},
        only={'default': ','.join(SCRIPTS), 'help': 'scripts; default: %(default)s'},
        shape={'help': 'models, separated by commas; default: the script decides'},
        out={'default': 'out/bench', 'help': 'a folder; default: %(default)s'},
        compare={'nargs': '+', 'metavar': 'COMMIT',
                 'help': 'one commit or two, or folders that hold them'})
    options = parser.parse_args(argv)
    options.only = [name for name in options.only.split(',') if name]
    unknown = set(options.only) - SCRIPTS.keys()
    if unknown or len(options.compare or ()) > 2:
        parser.error(f'--only takes {", ".join(SCRIPTS)}; --compare one or two commits')
    if options.compare and options.only == ['several_gpus']:
        parser.error('--compare leaves out several_gpus')
    for key in (*FILES, 'out'):     # the scripts run elsewhere
        value = getattr(options, key)
        setattr(options, key, value and str(Path(value).resolve()))
    if options.compare:
        return compare(options.compare[0], (options.compare + ['HEAD'])[1], options)
    return run_all(options)


if __name__ == '__main__':
    sys.exit(main())
