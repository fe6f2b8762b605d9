"""resume.py: kills, signals, full disks, damaged files, and what a run may delete"""

import json
import os
import random
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
import train
from common import await_steps, rewrite, run_train, same_weights, steps_done
from runtime import log, optim, ownership, resume
from runtime.errors import ConfigError


@pytest.fixture(scope='module')
def long_run(small_world, tmp_path_factory):
    """(arguments of a run whose every random state matters, the folder of it undisturbed)"""
    folder = tmp_path_factory.mktemp('long') / 'whole'
    arguments = [small_world[0] / 'tuned' / 'train_config.py', '--eval=None', '--epochs=80',
                 '--save_every=7', '--dtype=bfloat16', '--master_weights=stochastic',
                 '--val_every=1000', '--checkpoint_epochs=False', '--device=cpu']
    code, _, error = run_train(*arguments, f'--out_dir={folder}')
    assert code == 0, error
    return arguments, folder


@pytest.mark.slow
def test_ten_kills_change_nothing(long_run, tmp_path):
    arguments, whole = long_run
    chance = random.Random()
    kills, out = 0, tmp_path / 'run'
    while kills < 10:
        process = run_train(*arguments, f'--out_dir={out}', '--resume', wait=False)
        before = steps_done(out)
        # at any moment: sometimes before the first step, mostly during or after a few of them
        await_steps(process, out, 1 if before == 0 else 0)
        if chance.random() < 0.8:
            found = list(resume.checkpoints(out))
            await_steps(process, out, max([before, *found]) + 1 if before else 1)
        time.sleep(chance.uniform(0, 0.4))
        process.kill()
        process.communicate()
        kills += 1
        assert len(resume.checkpoints(out)) <= 2 or (out / 'config.json').exists()
    code, _, error = run_train(*arguments, f'--out_dir={out}', '--resume')
    assert code == 0, error
    assert same_weights(out, whole)
    records = [[{k: v for k, v in json.loads(line).items() if k != 'tokens_per_s'}
                for line in (folder / 'log.jsonl').open()] for folder in (out, whole)]
    assert records[0] == records[1]
    assert not resume.checkpoints(out) and (out / 'loss.png').read_bytes().startswith(b'\x89PNG')
    assert not list(out.rglob('*.tmp'))


@pytest.mark.slow
@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_signals_save_and_leave(long_run, tmp_path, number):
    arguments, whole = long_run
    process = run_train(*arguments, f'--out_dir={tmp_path}', '--save_every=None', wait=False)
    await_steps(process, tmp_path, 3)
    process.send_signal(number)
    printed, errors = process.communicate()
    assert process.returncode == 128 + number and 'Traceback' not in errors
    [step] = resume.checkpoints(tmp_path)
    assert f'after step {step}; --resume continues' in printed and step == steps_done(tmp_path)
    code, _, error = run_train(*arguments, f'--out_dir={tmp_path}')
    assert code == 1 and f'interrupted after step {step}: --resume continues it' in error
    code, _, error = run_train(*arguments, f'--out_dir={tmp_path}', '--resume', '--lr=0.1')
    assert code == 1 and 'has lr = 0.001, not 0.1' in error
    code, printed, error = run_train(*arguments, f'--out_dir={tmp_path}', '--resume',
                                     '--save_every=None')
    assert code == 0 and f'resuming after step {step}' in printed, error
    assert same_weights(tmp_path, whole)
    # nothing is left to do
    code, printed, _ = run_train(*arguments, f'--out_dir={tmp_path}', '--resume')
    assert code == 0 and 'step ' not in printed


def test_a_signal_during_the_last_step(small_world, tmp_path, monkeypatch):
    train_step, steps = train.train_step, []

    def step_and_signal(*arguments):
        steps.append(1)
        if len(steps) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return train_step(*arguments)
    monkeypatch.setattr(train, 'train_step', step_and_signal)
    with pytest.raises(train.Stopped, match='SIGTERM after the last step; --resume makes the'):
        train.main([str(small_world[0] / 'tuned' / 'train_config.py'), f'--out_dir={tmp_path}',
                    '--max_steps=2'])
    assert (tmp_path / 'config.json').exists() and not (tmp_path / 'results.json').exists()


@pytest.mark.slow
def test_a_full_disk_leaves_the_last_checkpoint(long_run, tmp_path):
    arguments, whole = long_run
    process = run_train(*arguments, f'--out_dir={tmp_path}', wait=False)
    await_steps(process, tmp_path, 8)
    process.kill()
    process.communicate()
    [*_, before] = resume.checkpoints(tmp_path).values()
    files = {p: p.read_bytes() for p in before.iterdir()}
    code, _, error = run_train(*arguments, f'--out_dir={tmp_path}', '--resume', limit=500_000)
    assert code == 1 and re.match(r'error: step \d+: saving .*resume-\d+ failed: ', error)
    assert f'the last good checkpoint is {before}' in error
    assert files == {p: p.read_bytes() for p in before.iterdir()}
    assert not list(tmp_path.glob('*.tmp'))
    assert run_train(*arguments, f'--out_dir={tmp_path}', '--resume')[0] == 0
    assert same_weights(tmp_path, whole)


def test_a_disk_that_fills_up_at_the_end(small_world, tmp_path):
    # on a GPU the compiler would be the first to write a large file
    code, _, error = run_train(small_world[0] / 'tuned' / 'train_config.py', '--eval=None',
                               '--checkpoint_epochs=False', '--device=cpu',
                               f'--out_dir={tmp_path}', limit=500_000)
    assert code == 1 and 'saving the weights' in error
    assert not (tmp_path / 'config.json').exists() and not list(tmp_path.glob('*.tmp'))


def test_two_runs_in_one_folder(long_run, tmp_path):
    arguments, _ = long_run
    process = run_train(*arguments, f'--out_dir={tmp_path}', wait=False)
    await_steps(process, tmp_path, 1)
    process.send_signal(signal.SIGSTOP)     # so that it holds the folder until the others are done
    for option in ('--resume', '--overwrite'):
        code, _, error = run_train(*arguments, f'--out_dir={tmp_path}', option)
        assert code == 1 and 'another process is writing there; choose another --out_dir' in error
    process.kill()
    process.communicate()


def test_damaged_resume_checkpoints(long_run, tmp_path):
    arguments, _ = long_run
    process = run_train(*arguments, f'--out_dir={tmp_path}', wait=False)
    await_steps(process, tmp_path, 8)
    process.kill()
    process.communicate()
    [*_, folder] = resume.checkpoints(tmp_path).values()
    (folder.with_name('resume-100000')).mkdir()       # half written: not looked at
    whole = (folder / 'state.json').read_text()
    for content, message in ((whole[:50], 'state.json is damaged'),
                             (whole.replace('state-00001', 'state-00009'), '00009.* is damaged'),
                             (whole.replace('"sequences": ', '"sequences": 1'),
                              'of different sequences'),
                             (whole.replace('"dtype": "bfloat16"', '"dtype": "float32"'),
                              'of different weights on the device: float32, and this run has b')):
        (folder / 'state.json').write_text(content)
        with pytest.raises(train.TrainingError, match=message):
            train.main([*map(str, arguments), f'--out_dir={tmp_path}', '--resume'])


def test_a_finished_run_only_reports_what_is_missing(small_world, tmp_path, monkeypatch):
    again = tmp_path / 'again'
    shutil.copytree(small_world[0] / 'tuned', again)
    config = [str(small_world[0] / 'tuned' / 'train_config.py'), f'--out_dir={again}', '--resume']
    def numbers():
        tasks = json.loads((again / 'results.json').read_text())['tasks']
        return {task: {key: value for key, value in result.items() if key != 'scoring_seconds'}
                for task, result in tasks.items()}
    before = numbers()
    (again / 'results.json').unlink()
    monkeypatch.setattr(train, 'optimize', None)
    train.main(config)
    assert numbers() == before
    train.main([*config, '--eval.p_true=True'])
    assert numbers() == before | {'questions.p_true': numbers()['questions.p_true']}
    monkeypatch.setattr(train, 'evaluate', None)
    train.main([*config, '--eval.p_true=True'])


def tree(folder):
    """{relative path: content} of all files below `folder`, but the lock."""
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob('*'))
            if p.is_file() and p.name != '.lock'}


THEIRS = ('results.csv', 'results.tex', 'results.py', 'samples.jsonl', 'config.json', 'runs/mine',
          'wandb/mine', 'before/mine', 'epoch-1/mine', 'resume-3/state.json', 'model.safetensors',
          'notes.txt')


@pytest.mark.parametrize('more', [[], ['--overwrite'], ['--resume']])
def test_a_folder_that_no_run_made_is_refused(small_world, tmp_path, more):
    out = tmp_path / 'out'
    for name in THEIRS:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text('mine')
    before = tree(out)
    for name in THEIRS:
        place = out if '/' not in name else (out / name).parent
        with pytest.raises(ConfigError, match='is not empty .* no written.json, the list'):
            train.main([str(small_world[0] / 'tuned' / 'train_config.py'), f'--out_dir={place}',
                        '--max_steps=1', *more])
        assert tree(out) == before


def test_the_current_folder_is_no_out_dir(small_world, tmp_path, monkeypatch):
    (tmp_path / 'results.py').write_text('mine')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match='is not empty'):
        train.main([str(small_world[0] / 'tuned' / 'train_config.py'), '--out_dir=', '--overwrite'])
    assert tree(tmp_path) == {'results.py': b'mine'}


def test_overwrite_removes_what_runs_wrote_and_nothing_else(small_world, tmp_path):
    out, config = tmp_path / 'out', str(small_world[0] / 'tuned' / 'train_config.py')
    shutil.copytree(small_world[0] / 'tuned', out)
    listed = set(ownership.written_files(out))
    assert listed | {'written.json'} == tree(out).keys(), 'a run lists all that it writes'
    for name in ('notes.txt', 'results.py', 'epoch-1/mine', 'runs/mine', 'wandb/mine', 'epoch-9/x'):
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text('mine')
    (out / 'epoch-9' / 'x').unlink()
    train.main([config, f'--out_dir={out}', '--overwrite', '--max_steps=1', '--eval=None'])
    now = tree(out)
    for name in ('notes.txt', 'results.py', 'epoch-1/mine', 'runs/mine', 'wandb/mine'):
        assert now[name] == b'mine'
    assert 'results.json' not in now and 'epoch-1/config.json' not in now
    assert len(now['log.jsonl'].splitlines()) == 1
    # somebody's file where a run would write
    (out / 'epoch-1' / 'model.safetensors').write_text('mine')
    before = tree(out)
    with pytest.raises(ConfigError, match='epoch-1/m.* was not written by a run'):
        train.main([config, f'--out_dir={out}', '--overwrite', '--max_steps=1', '--eval=None'])
    assert tree(out) == before


@pytest.mark.parametrize('typo, message', [
    ('--data={}/none.jsonl', 'no file or folder'), ('--model={}/none', 'no model folder'),
    ('--model={}/truncated', 'truncated'), ('--eval.tasks=nothing', 'no task, file or folder'),
    ('--smoothing=2', 'between 0 and 1'), ('--batch_size=100000', 'do not fill one step')])
def test_overwrite_checks_everything_before_it_deletes(small_world, tmp_path, typo, message):
    out = tmp_path / 'out'
    shutil.copytree(small_world[0] / 'tuned', out)
    shutil.copytree(small_world[0] / 'base', tmp_path / 'truncated')
    os.truncate(tmp_path / 'truncated' / 'model.safetensors', 1000)
    before = tree(out)
    with pytest.raises(ValueError, match=message):
        train.main([str(small_world[0] / 'tuned' / 'train_config.py'), f'--out_dir={out}',
                    '--overwrite', typo.format(tmp_path)])
    assert tree(out) == before


def test_weights_survive_a_picture_that_fails(small_world, tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise RuntimeError('no fonts')
    monkeypatch.setattr(log, 'save_figure', fail)
    train.main([str(small_world[0] / 'tuned' / 'train_config.py'), f'--out_dir={tmp_path}',
                '--max_steps=1', '--eval=None'])
    assert (tmp_path / 'config.json').exists() and not (tmp_path / 'loss.png').exists()
    assert "loss.png" in capsys.readouterr().err


@pytest.fixture
def interrupted(small_world, tmp_path):
    """(arguments of a run in `tmp_path`/run that stopped after step 4, that folder)"""
    base, data = tmp_path / 'base', tmp_path / 'data.jsonl'
    shutil.copytree(small_world[0] / 'base', base)
    shutil.copyfile(small_world[0] / 'world' / 'instruct.jsonl', data)
    out = tmp_path / 'run'
    arguments = [str(small_world[0] / 'tuned' / 'train_config.py'), '--eval=None', '--lora',
                 '--checkpoint_epochs=False', f'--model={base}', f'--data={data}', '--epochs=8',
                 f'--out_dir={out}', '--save_every=2', '--device=cpu']
    train_step, done = train.train_step, []

    def stop_after(*rest):
        done.append(1)
        if len(done) == 6:
            raise KeyboardInterrupt
        return train_step(*rest)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, 'train_step', stop_after)
        with pytest.raises(KeyboardInterrupt):
            train.main(arguments)
    assert list(resume.checkpoints(out)) == [4]
    return [*arguments, '--resume'], out


def swap_rows(tmp_path):
    lines = (tmp_path / 'data.jsonl').read_text().splitlines(keepends=True)
    (tmp_path / 'data.jsonl').write_text(''.join([lines[1], lines[0], *lines[2:]]))


def change_config(tmp_path):
    path = tmp_path / 'base' / 'config.json'
    path.write_text(json.dumps(json.loads(path.read_text()) | {'rms_norm_eps': 1e-3}))


def change_base(tmp_path):
    rewrite(tmp_path / 'base', lambda t: t['model.layers.0.mlp.up_proj.weight'].mul_(1.01))


@pytest.mark.parametrize('change, message', [
    (swap_rows, 'different training data'), (change_config, 'different base model'),
    (change_base, 'different base model')])
def test_resume_wants_the_same_data_and_model(interrupted, tmp_path, change, message):
    change(tmp_path)
    with pytest.raises(train.TrainingError, match=message):
        train.main(interrupted[0])


def test_resume_from_the_older_of_two_checkpoints(interrupted, tmp_path, capsys):
    arguments, out = interrupted
    newer = out / 'resume-6'
    shutil.copytree(out / 'resume-4', newer)
    state = json.loads((newer / 'state.json').read_text())
    (newer / 'state.json').write_text(json.dumps(state | {'step': 6}))
    ownership.claim(tmp_path / 'other', 'x')       # another folder's list is another matter
    names = [f'resume-6/{p.name}' for p in newer.iterdir()]
    (out / 'written.json').write_text(json.dumps({'files': ownership.written_files(out) + names}))
    os.truncate(newer / 'state-00001.safetensors', 1000)
    train.main(arguments)
    printed = capsys.readouterr().out
    assert 'state-00001.safetensors is damaged' in printed and 'resuming after step 4' in printed
    assert not resume.checkpoints(out) and not newer.exists()


@pytest.mark.parametrize('name, content', [
    ('state.json', b'[1, 2]'), ('state.json', b'{"step": 4'), ('state.json', b'\xff\xfe'),
    ('state-00001.safetensors', b'junk'), ('state-00001.safetensors', None)])
def test_a_damaged_checkpoint_is_named(interrupted, name, content):
    arguments, out = interrupted
    path = out / 'resume-4' / name
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    with pytest.raises(train.TrainingError, match=f'resume-4/{name} is damaged .* --overwrite'):
        train.main(arguments)


@pytest.mark.parametrize('content, lacking', [(None, 4), (b'junk\n\xff\n', 4), (b'[]\n{}\n', 4)])
def test_a_damaged_log_is_kept_aside(interrupted, capsys, content, lacking):
    arguments, out = interrupted
    if content is None:
        (out / 'log.jsonl').unlink()
    else:
        (out / 'log.jsonl').write_bytes(content)
    train.main(arguments)
    assert f'lacks {lacking} of the first 4 steps' in capsys.readouterr().out
    if content:
        assert (out / 'log.jsonl.damaged').read_bytes() == content
    assert json.loads((out / 'log.jsonl').read_text().splitlines()[0])['step'] == 5


def test_a_checkpoint_that_is_complete_survives_its_clean_up(tmp_path, monkeypatch):
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = optim.AdamW([parameter], 1e-3)
    optimizer.begin(1)
    parameter.sum().backward()
    optimizer.step(scale=torch.ones(()))

    def save(step):
        resume.save_checkpoint(tmp_path, step, {'w': parameter}, optimizer, {})
    save(5)
    unlink = Path.unlink

    def fail(path, **options):
        if 'resume-5' in str(path) and path.name.startswith('state-'):
            raise OSError(5, 'Input/output error', str(path))
        unlink(path, **options)
    monkeypatch.setattr(Path, 'unlink', fail)
    with pytest.raises(OSError):
        save(10)
    assert 10 in resume.checkpoints(tmp_path)
    monkeypatch.undo()

    def full(path, *rest, **options):
        raise OSError(28, 'No space left on device', str(path))
    monkeypatch.setattr(Path, 'write_text', full)
    with pytest.raises(train.TrainingError, match='resume continues after step 10'):
        save(15)


def test_a_run_killed_in_its_first_report_goes_on(small_world, tmp_path, monkeypatch):
    config = [str(small_world[0] / 'tuned' / 'train_config.py'), f'--out_dir={tmp_path / "run"}',
              '--max_steps=2', '--eval_before']

    def killed(*_):
        raise KeyboardInterrupt
    monkeypatch.setattr(train, 'evaluate', killed)
    with pytest.raises(KeyboardInterrupt):
        train.main(config)
    monkeypatch.undo()
    (tmp_path / 'run' / 'written.json.tmp').write_text('{"fi')
    train.main(config)          # nothing of a run was written, so no option is needed
    (tmp_path / 'run' / 'loss.png').unlink()
    train.main([*config, '--resume'])
    assert (tmp_path / 'run' / 'loss.png').exists()
    with pytest.raises(ConfigError, match='a finished run'):
        train.main(config)
