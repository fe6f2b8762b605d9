"""configs"""

import dataclasses
import multiprocessing
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest
from common import HERE, cases_of, config

import align
import demo
import evaluate
import sample
import train
from data.eval_config import pick_chat, pick_template, training_settings
from data.files import parsed
from compare import compare
from runtime import cli
from runtime.config import dump_config, load_config, read_assignments
from runtime.errors import CheckpointError, ConfigError, DataError, ProcessError
from runtime.processes import forked_pool


def test_the_command_line_overrides_the_config_file(tmp_path):
    cfg = config(tmp_path, '"""why"""\nlr = 1\nmax_steps = 5\nlora_targets = ["x"]\n'
                 'shape = {"hidden_size": 8, "rope": {"factor": 2.0}}',
                 '--smoothing=0.1', '--max_steps=None', '--betas=0.9,0.95', '--dry_run',
                 '--model=a=b', '--lora_targets=k_proj,up_proj', '--shape.vocab_size=10',
                 '--shape.rope.factor=4.0', '--shape.rope.type=linear')
    assert cfg.lr == 1.0 and type(cfg.lr) is float
    assert cfg.max_steps is None and cfg.betas == (0.9, 0.95) and cfg.dry_run is True
    assert cfg.model == 'a=b' and cfg.lora_targets == ('k_proj', 'up_proj')
    assert cfg.shape == {'hidden_size': 8, 'rope': {'factor': 4.0, 'type': 'linear'},
                         'vocab_size': 10}
    assert load_config(train.TrainConfig, ['--lr=1']).lr == 1.0


@pytest.mark.parametrize('content, argument, message', [
    *cases_of('wrong_settings.toml')['cases'],
    ('', '--data=a\udcff.jsonl', "'--data=a\\udcff.jsonl' is not valid Unicode; rename the file")])
def test_a_wrong_setting_is_named_with_its_place(tmp_path, content, argument, message):
    with pytest.raises(ConfigError, match='.') as error:
        config(tmp_path, content, *filter(None, [argument]))
    assert message.replace('{}', str(tmp_path)) in str(error.value)


@dataclasses.dataclass
class Report:
    # what is asked
    tasks: tuple[str, ...] = ('mmlu',)  # names of files, a long comment that
    #                             goes on in a second line
    shots: int = 5              # solved questions
    # said before
    rate: float | None = None
    kind: Literal['a', 'b'] = 'a'


@dataclasses.dataclass
class Run:
    name: str = ''
    eval: Report | None = None  # the report
    first: Report = dataclasses.field(default_factory=Report)


def printed_help(capsys, load, *arguments):
    with pytest.raises(SystemExit, match='^0$'):
        load(*arguments)
    return capsys.readouterr().out


def test_help_prints_every_key_with_its_comment(capsys):
    out = printed_help(capsys, load_config, Report, ['--rate=1', '--help'], 'python small.py')
    assert ' '.join(out.split()) == (
        'python small.py keys, as --key=value or, before them, in a config file: # what is asked '
        '--tasks=mmlu (tuple[str, ...]) names of files, a long comment that goes on in a second '
        'line --shots=5 (int) solved questions # said before --rate=None (float | None) '
        "--kind=a (Literal['a', 'b'])")
    for cls in (train.TrainConfig, evaluate.EvalConfig):
        out = printed_help(capsys, load_config, cls, ['-h'])
        assert all(f'\n  --{f.name}=' in out for f in dataclasses.fields(cls))
        assert max(map(len, out.split('\n'))) <= 100 and 'def ' not in out
    out = printed_help(capsys, align.main, ['--help'])      # without the keys that it refuses
    assert '--lora=' in out and not any(f'--{key}=' in out for key in align.UNUSED)


def load_run(tmp_path, content, *arguments):
    (tmp_path / 'run.py').write_text(content)
    return load_config(Run, [str(tmp_path / 'run.py'), '--name=a', *arguments])


def test_a_nested_record_is_set_by_file_and_command_line(tmp_path):
    file = "eval = {'tasks': ['arc', 'mmlu'], 'rate': 1}"
    for content, arguments, expected in (
            ('', (), Run('a')), (file, (), Run('a', Report(('arc', 'mmlu'), rate=1.0))),
            (file, ('--eval.shots=0', '--eval.tasks=a,b'), Run('a', Report(('a', 'b'), 0, 1.0))),
            ('', ('--eval.shots=0',), Run('a', Report(shots=0))),       # made from None
            (file, ('--eval=None', '--first.rate=None', '--first.shots=1'),
             Run('a', None, Report(shots=1))),
            (file, ("--eval={'shots': 2}",), Run('a', Report(shots=2)))):
        assert load_run(tmp_path, content, *arguments) == expected
    for run in (load_run(tmp_path, file), Run('x' * 200, Report(('long name ' * 9,) * 9))):
        assert load_run(tmp_path, dump_config(run), f'--name={run.name}') == run
        values = read_assignments(tmp_path / 'run.py')
        assert {key: value for key, (value, _) in values.items()} == dataclasses.asdict(run)


def test_help_and_misspelled_keys_load_no_torch():
    heavy = {'torch', 'matplotlib', 'pyarrow', 'sentencepiece', 'huggingface_hub'}
    for program, option, code in (('train.py', '--help', 0), ('evaluate.py', '--shotts=1', 1)):
        done = subprocess.run([sys.executable, '-X', 'importtime', program, option], cwd=HERE,
                              capture_output=True, text=True)
        loaded = {line.split('|')[-1].strip() for line in done.stderr.split('\n') if '|' in line}
        assert done.returncode == code and 'runtime.config' in loaded and not loaded & heavy
        assert code == 0 or 'Traceback' not in done.stderr


# A script as the real ones are; `body` is its main part.
SCRIPT = """
from runtime import cli
cli.begin()
import os, signal, sys
from runtime.errors import CheckpointError, Stopped
with cli.one_line_errors(resume='the same command continues', memory='lower --pack_len'):
    {body}
"""


def run_script(folder, body, redirect='', **environment):
    (folder / 'script.py').write_text(SCRIPT.format(body=body), encoding='utf-8')
    command = f'{sys.executable} {folder / "script.py"} {redirect}'
    return subprocess.run(['bash', '-c', command], capture_output=True, timeout=60,
                          env=os.environ | {'PYTHONPATH': str(HERE)} | environment)


SIGTERM = 'os.kill(os.getpid(), signal.SIGTERM)'
FULL = b'error: No space left on device\n'
MUCH = "for _ in range(10 ** 6): print('x' * 100)"


@pytest.mark.parametrize('body, options, code, printed, errors', [
    ('import numpy; numpy.zeros(10 ** 15)', {}, 1, b'',
     b'error: out of memory: Unable to allocate.*; lower --pack_len\n'),
    # of a GPU on which nothing is left
    (r"raise RuntimeError('CUDA error: out of memory\nCUDA kernel errors might be')", {}, 1, b'',
     b'error: out of memory: CUDA error: out of memory; lower --pack_len\n'),
    ("raise OSError(12, 'Cannot allocate memory')", {}, 1, b'',     # as a fork does
     b'error: Cannot allocate memory\n'),
    ('import no_such_module', {}, 1, b'',
     b"error: No module named 'no_such_module'; pip install -r requirements.txt\n"),
    (r"raise CheckpointError('tensor \x1b[2J\x9b\x07.weight\r is missing')", {}, 1, b'',
     rb'error: tensor \\x1b\[2J\\x9b\\x07.weight\\r is missing' + b'\n'),
    (f'signal.signal(signal.SIGTERM, cli.stop); {SIGTERM}', {}, 143, b'',
     b'stopped by SIGTERM; the same command continues\n'),
    ('raise KeyboardInterrupt', {}, 130, b'', b'stopped; the same command continues\n'),
    ("raise Stopped(15, 'after step 7')", {}, 143,
     b'stopped by SIGTERM after step 7; the same command continues\n', b''),
    ("raise RuntimeError('a bug')", {}, 1, b'', b'(?s)Traceback.*RuntimeError: a bug\n'),
    # output that is cut off, full, or of ASCII characters alone
    (MUCH, {'redirect': '| head -n 1; exit ${PIPESTATUS[0]}'}, 141, b'x' * 100 + b'\n', b''),
    *((body, {'redirect': '> /dev/full', 'PYTHONUNBUFFERED': buffering}, 1, b'', FULL)
      for body, buffering in ((MUCH, '1'), ("print('usage'); sys.exit()", ''))
      if Path('/dev/full').exists()),
    ("print('\u6c49\u5b57')", {'PYTHONIOENCODING': 'ascii'}, 0, b'\\u6c49\\u5b57\n', b'')])
def test_the_end_of_a_script_is_one_line_and_an_exit_status(
        body, options, code, printed, errors, tmp_path):
    done = run_script(tmp_path, body, **options)
    assert (done.returncode, done.stdout) == (code, printed)
    assert re.fullmatch(errors, done.stderr), done.stderr


def test_ctrl_c_during_the_import_of_torch_ends_the_process_at_once(tmp_path):
    """A KeyboardInterrupt there aborts in C++, or becomes an ImportError."""
    hook = ('def hook(event, arguments):\n'
            '    if event == "import" and arguments[0] == "torch":\n'
            '        print(signal.getsignal(signal.SIGINT).__name__, flush=True)\n'
            '        os.kill(os.getpid(), signal.SIGINT)\n'
            'sys.addaudithook(hook)')
    (tmp_path / 'config.py').write_text('seed = 1\n')
    code = (f'import os, runpy, signal, sys\n{hook}\n'
            f'sys.argv = ["train.py", {str(tmp_path / "config.py")!r}]\n'
            'runpy.run_path("train.py", run_name="__main__")')
    done = subprocess.run([sys.executable, '-c', code], cwd=HERE, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, '_stop_at_once\n', 'stopped\n')


def test_a_survivor_of_torchrun_has_no_traceback(monkeypatch):
    lost = RuntimeError('[gloo/transport/tcp/pair.cc:544] Connection closed by peer')
    assert not cli.is_lost_connection(lost)     # without torchrun it is a bug
    monkeypatch.setenv('TORCHELASTIC_RUN_ID', 'x')
    assert not cli.is_lost_connection(lost)     # which another program has set
    for name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE'):
        monkeypatch.setenv(name, '2' if 'SIZE' in name else '1')
    assert not cli.is_lost_connection(RuntimeError('mat1 and mat2 shapes cannot be multiplied'))
    monkeypatch.setattr(cli.time, 'sleep', lambda seconds: None)
    with pytest.raises(SystemExit, match='in process 1 of 2: another process has ended'):
        with cli.one_line_errors():
            raise lost


def test_messages_quote_no_more_than_needed():
    with pytest.raises(SystemExit) as end, cli.one_line_errors():
        raise DataError(f'a.jsonl:1: {"x" * 10 ** 6}; keep one of them')
    assert len(str(end.value)) < 2100 and str(end.value).endswith('x; keep one of them')
    error = parsed('a.jsonl:1', {'y' * 10 ** 5: 1}, lambda row: row['z'])
    assert len(str(error)) < 900 and str(error).startswith("a.jsonl:1: not the fields of its form")


def test_output_without_standard_streams_is_lost_and_in_no_file(tmp_path):
    body = """with open(sys.argv[1], 'w'):
        os.system('echo lost; echo lost >&2')
        print('lost', file=sys.stderr)"""
    done = run_script(tmp_path, body, redirect=f'{tmp_path / "file"} <&- >&- 2>&-')
    assert done.returncode == 0 and (tmp_path / 'file').read_text() == ''


LARGE = 'x' * 300_000       # more than a pipe holds


def test_workers_end_by_sigterm_and_with_the_first_error(request):
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    request.addfinalizer(lambda: signal.signal(signal.SIGTERM, before))
    with forked_pool(2, lambda _: signal.getsignal(signal.SIGTERM)) as imap:
        assert [*imap(range(8))] == [signal.SIG_DFL] * 8
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    with pytest.raises(DataError, match='bad'), forked_pool(2, time.sleep) as imap:
        next(imap([0, 60, 60]))
        raise DataError('bad')      # which does not wait for the workers
    # nor for those that write large results
    with pytest.raises(DataError, match='bad'), forked_pool(4, lambda x: LARGE) as imap:
        for number, _ in enumerate(imap(range(200))):
            if number == 20:
                raise DataError('bad')
    assert not multiprocessing.active_children()
    assert not {signal.SIGTERM, signal.SIGINT} & signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_worker_that_ends_stops_the_work_with_a_message(capfd):
    with pytest.raises(ProcessError, match='exit code -9: it was killed, perhaps since the memory'):
        with forked_pool(2, lambda x: LARGE * (not os.kill(os.getpid(), x))) as imap:
            list(imap([0, 0, signal.SIGKILL, 0, 0, 0]))
    with pytest.raises(ProcessError, match='exit code 1: see above'):   # an unpicklable result
        with forked_pool(2, lambda x: lambda: x) as imap:
            list(imap(range(9)))
    assert 'pickle' in capfd.readouterr().err


@pytest.mark.parametrize('content, message', [
    ("template = 3", "template = 3 is not supported"),
    ("add_bos = 'no'", "add_bos = 'no' is not supported; it must be true or false or null")])
def test_a_wrong_setting_of_the_run_that_trained_a_model_is_named(tmp_path, content, message):
    (tmp_path / 'train_config.py').write_text(f"data_kind = 'instruct'\n{content}\n")
    (tmp_path / 'epoch-1').mkdir()
    for read in (training_settings, lambda folder: pick_template('auto', folder, None),
                 lambda folder: pick_chat('auto', folder, None)):
        with pytest.raises(CheckpointError, match=f'train_config.py: {message}'):
            read(tmp_path / 'epoch-1')


def test_the_template_of_a_model_is_its_own_or_that_of_its_run(tmp_path):
    brings, none = (SimpleNamespace(chat_templates=own) for own in ({'default': 'x'}, {}))
    assert pick_template('auto', tmp_path, brings) == pick_chat('auto', tmp_path, brings) == 'model'
    assert pick_template('auto', tmp_path, none, 'tulu') == 'tulu'
    assert pick_chat('auto', tmp_path, none) == 'none'
    assert pick_template('alpaca', tmp_path, brings) == 'alpaca'
    with pytest.raises(ConfigError, match='brings no chat template and was not trained .*=tulu'):
        pick_template('auto', tmp_path, none)
    with pytest.raises(ConfigError, match=f'{tmp_path} was not trained here on .*--chat=model'):
        pick_chat('trained', tmp_path, brings)      # not by a run here
    for template, own in (('tulu', 'tulu'), ('model', 'model'), ('olmo2', 'model')):
        (tmp_path / 'train_config.py').write_text(
            f"data_kind = 'instruct'\ntemplate = {template!r}\n")
        assert pick_template('trained', tmp_path, brings) == own
        # asked as its base model was, which brought a template if that was trained
        assert pick_chat('auto', tmp_path, brings) == ('model' if template == 'model' else 'none')


def test_shipped_configs_and_the_commands_of_the_docs_have_valid_keys():
    classes = {'train.py': train.TrainConfig, 'align.py': align.AlignConfig,
               'evaluate.py': evaluate.EvalConfig,
               'sample.py': sample.SampleConfig, 'demo.py': demo.DemoConfig}
    commands = [('align.py' if 'method' in read_assignments(path) else 'train.py',
                 f'configs/{path.name}') for path in (HERE / 'configs').glob('[!_]*.py')
                if path.name != 'loss.py']      # which reads the key `loss`
    for path in (HERE / 'README.md', *sorted((HERE / 'docs').glob('*.md'))):
        text = path.read_text().replace('\\\n', ' ').replace('$seed', '0')
        commands += re.findall(r'^ *(?:\$ )?python (\w+\.py) (.*)', text, re.MULTILINE)
    n_checked = 0
    for program, line in commands:
        argv = shlex.split(line, comments=True)
        if program in classes and '--help' not in argv and not argv[0].startswith('out/'):
            compared = argv[0] == '--compare'
            keys = [a for a in argv if a.startswith('--')][compared:]
            files = [a for a in argv[:1] if a.endswith('.py')]
            cls = compare.CompareConfig if compared else classes[program]
            load_config(cls, [*(str(HERE / f) for f in files), *keys])
            n_checked += 1
    assert n_checked > 36
