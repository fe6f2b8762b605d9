"""resume.py: kills, signals, full disks, damaged files, and what a run may delete"""

import functools
import itertools
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import evaluate
import model as models
import train
from bridges import adapter
from common import (edit_config, llama_config, log_of, recorded, refused, results_of, rewrite,
                    same_weights, tree)
from runtime import checkpoint, log, optim, ownership, resume, resume_state, saving
from runtime.errors import ConfigError, TrainingError
from scripts import Script, await_steps, run_scripts, steps_done


@pytest.fixture
def tuned(small_world, tmp_path):
    """A copy of the demo's tuned run, in tmp_path/out."""
    return shutil.copytree(small_world[0] / 'tuned', tmp_path / 'out')


@pytest.fixture
def train_again(settings_file, tmp_path):
    """A function that trains in this process by the settings of that run, into tmp_path/out."""
    return lambda *options: train.main([settings_file, f'--out_dir={tmp_path / "out"}',
                                        '--device=cpu', *options])


def without_list(folder):
    """{relative path: content} of all files below `folder`, but the list of what a run wrote."""
    return {name: data for name, data in tree(folder).items() if name != 'written.json'}


def put(folder, *names, content='mine'):
    """Write files of that content below `folder`."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)


def before_each_step(monkeypatch, action):
    step = train.train_step
    stage = replace(train.SFT, step=lambda *rest: action() or step(*rest))
    monkeypatch.setattr(train, 'train_and_report',
                        functools.partial(train.train_and_report, stage=stage))


def test_kills_and_a_signal_change_no_bit_of_the_final_files(settings_file, tmp_path):
    """Of a run whose every random state matters, and whose loss needs the base model."""
    arguments = [settings_file, '--eval=None', '--epochs=8', '--dtype=bfloat16', '--resume',
                 '--master_weights=compact', '--val_every=1000', '--checkpoint_epochs=False',
                 '--base_smoothing=0.5', '--device=cpu']
    out, whole = tmp_path / 'run', tmp_path / 'whole'
    done = run_scripts(1, 'train.py', *arguments, f'--out_dir={whole}', '--pictures=False')
    assert done.returncode == 0, done.stderr
    arguments.append(f'--out_dir={out}')
    for steps, wait in ((0, 0.3), (8, random.uniform(0, 0.2))):     # early, and around a checkpoint
        script = Script('train.py', *arguments, '--save_every=7')
        await_steps(script, out, steps)
        time.sleep(wait)
        script.kill()
        assert script.wait().returncode == -signal.SIGKILL
    script = Script('train.py', *arguments, '--save_every=None')
    await_steps(script, out, steps_done(out) + 3)
    os.kill(script.pid, signal.SIGINT)
    done = script.wait()
    assert done.returncode == 128 + signal.SIGINT and 'Traceback' not in done.stderr
    [step] = resume.checkpoints(out)
    assert f'after step {step}; --resume continues' in done.stdout
    assert step == steps_done(out)
    done = run_scripts(1, 'train.py', *arguments, '--save_every=7')
    assert done.returncode == 0 and f'resuming after step {step}' in done.stdout, done.stderr
    assert same_weights(out, whole)
    assert log_of(out) == log_of(whole) and log_of(out)[-1]['base_kl'] > 0
    assert not resume.checkpoints(out) and (out / 'loss.png').read_bytes().startswith(b'\x89PNG')
    assert not list(out.rglob('*.nanocal-tmp'))


# ---- A save that is killed at each of its file operations, and in the middle of its writes -------

class TinyRun:
    """What train.py holds when it saves, for a model of 3,000 weights after some steps."""

    def __init__(self, folder):
        self.base, self.out = folder / 'base', folder / 'run'
        self.files = {'tokenizer.json': '{"made": "up"}'}
        self.cfg = train.TrainConfig(out_dir=str(self.out), save_dtype='float32', resume=True)
        torch.manual_seed(0)
        self.model = models.CausalLM(llama_config())
        self.model.init_weights()
        put(self.base, 'tokenizer_config.json', content='{}')
        self.named = dict(self.model.named_parameters())
        self.optimizer = optim.AdamW([{'params': [*self.named.values()]}], 1e-2)
        self.step = 0

    def take_steps(self, until):
        while self.step < until:
            self.step += 1
            for i, p in enumerate(self.named.values()):
                p.grad = torch.full_like(p, 0.01 * (i + self.step))
            self.optimizer.step(scale=torch.ones(()))

    def save_checkpoint(self):
        resume_state.save_checkpoint(self.out, self.step, self.named, self.optimizer, {'steps': 9})

    def begin(self):
        """Go to the moment before the save: a checkpoint of step 1 on disk, step 2 in memory."""
        ownership.claim(self.out, 'train_config.py')
        put(self.out, 'train_config.py', content='lora = False\n')
        self.take_steps(1)
        self.save_checkpoint()
        self.take_steps(2)
        return self

    def save_weights(self):
        saving.save_weights(self, self.optimizer)

    def restore(self):
        return resume_state.restore(self.out, self.named, self.optimizer, {'steps': 9})


OPERATIONS = {'open', 'os.rename', 'os.remove', 'os.mkdir', 'os.rmdir'}


def killed(save, folder, operation=None, size=None):
    """Call `save` in a forked child that is killed before its file operation number `operation`
    below `folder`, or when a file of it reaches `size`. Return whether it was killed."""
    if child := os.fork():
        status = os.waitpid(child, 0)[1]
        assert os.WIFSIGNALED(status) or status == 0
        return os.WIFSIGNALED(status)
    number = itertools.count()

    def watch(event, arguments):
        writes = event != 'open' or arguments[2] & (os.O_CREAT | os.O_WRONLY)
        if event in OPERATIONS and str(arguments[0]).startswith(str(folder)) and writes:
            if next(number) == operation:
                os.kill(os.getpid(), signal.SIGKILL)
    try:
        if size is None:
            sys.addaudithook(watch)
        else:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        save()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


@pytest.mark.slow
@pytest.mark.parametrize('save, least', [('save_checkpoint', 20), ('save_weights', 60)])
def test_a_save_killed_at_any_moment_is_resumed(tmp_path, monkeypatch, save, least):
    monkeypatch.setattr(saving, 'SHARD_BYTES', 4000)
    whole = TinyRun(tmp_path / 'whole').begin()
    getattr(whole, save)()
    expected = without_list(whole.out)
    run = TinyRun(tmp_path / 'killed').begin()
    begun = shutil.copytree(run.out, tmp_path / 'begun')
    n_kills = 0
    for at in (*({'size': n} for n in (90, 1000, 6000)), *({'operation': n} for n in range(200))):
        was_killed = killed(getattr(run, save), run.out, **at)
        n_kills += was_killed
        again = TinyRun(tmp_path / 'killed')        # as train.py does it with --resume
        resume.check_folder(again.cfg)
        with ownership.lock(again.out):
            resume.check_run(again.cfg, train.FREE_KEYS)
            again.step = again.restore()
            assert again.step in (1, 2)
            again.take_steps(2)
            getattr(again, save)()
        assert {*ownership.written_files(again.out)} >= without_list(again.out).keys()
        assert without_list(again.out) == expected, at
        shutil.rmtree(run.out)
        shutil.copytree(begun, run.out)
        if not was_killed and 'operation' in at:
            break
    assert not was_killed and n_kills >= least, n_kills


# ---- Signals, and disks that fill up -------------------------------------------------------------

@pytest.mark.parametrize('at_the_save', [False, True])
def test_a_signal_during_the_last_step_or_the_save(train_again, tmp_path, monkeypatch, at_the_save):
    def stop(*_):
        os.kill(os.getpid(), signal.SIGTERM)
    if at_the_save:
        recorded(monkeypatch, saving, 'save_weights', stop)
    else:
        steps = iter([lambda: None, stop])
        before_each_step(monkeypatch, lambda: next(steps)())
    with pytest.raises(train.Stopped, match='SIGTERM after the last step, before the report'):
        train_again('--max_steps=2', '--checkpoint_epochs=False')
    files = tree(tmp_path / 'out').keys()
    assert 'config.json' in files and 'results.json' not in files


def test_a_finished_run_only_reports_what_is_missing(tuned, train_again, monkeypatch):
    def numbers():
        return {task: {key: value for key, value in result.items() if key != 'scoring_seconds'}
                for task, result in results_of(tuned)['tasks'].items()}
    before = numbers()
    (tuned / 'results.json').unlink()
    monkeypatch.setattr(train, 'optimize', None)
    train_again('--resume')
    assert numbers() == before
    train_again('--resume', '--eval.p_true=True')
    assert numbers() == before | {'questions.p_true': numbers()['questions.p_true']}
    monkeypatch.setattr(evaluate, 'load_model', lambda *_: pytest.fail('a model was loaded'))
    train_again('--resume', '--eval.p_true=True')
    assert numbers() == before | {'questions.p_true': numbers()['questions.p_true']}
    train_again('--resume', '--eval.norm=sum')      # other settings have other numbers
    assert numbers()['questions']['norm'] == 'sum'


# ---- What a run may be resumed from --------------------------------------------------------------

def test_resume_refuses_other_settings_other_data_and_another_model(
        small_world, train_again, tmp_path, monkeypatch):
    base = shutil.copytree(small_world[0] / 'base', tmp_path / 'base')
    data = shutil.copyfile(small_world[0] / 'world' / 'instruct.jsonl', tmp_path / 'data.jsonl')
    options = ['--eval=None', '--lora', '--checkpoint_epochs=False', f'--model={base}',
               f'--data={data}', '--save_every=1', '--resume']
    done = []
    before_each_step(monkeypatch, lambda: 1 / 0 if done else done.append(1))
    with pytest.raises(ZeroDivisionError):
        train_again(*options)
    assert list(resume.checkpoints(tmp_path / 'out')) == [1]
    with pytest.raises(ConfigError, match='has lr = 0.001, not 0.1; keep it, or --overwrite'):
        train_again(*options, '--lr=0.1')
    lines = data.read_text().splitlines(keepends=True)
    for path, change, what in (
            (data, lambda: data.write_text(''.join(lines[::-1])), 'data'),
            (base / 'config.json', lambda: edit_config(base, rms_norm_eps=1e-3), 'model'),
            (base / 'model.safetensors', lambda: rewrite(base, lambda t: t[
                'model.layers.0.mlp.up_proj.weight'].mul_(1.01)), 'model')):
        before = path.read_bytes()
        change()
        with pytest.raises(TrainingError, match=f'different {what}: '):
            train_again(*options)
        path.write_bytes(before)


STATE, UP = 'state-00001.safetensors', 'model.layers.{}.mlp.up_proj.weight.weight'


@pytest.mark.parametrize('damage, message', [
    (lambda f: rewrite(f, lambda t: t.update(       # two tensors that are swapped
        {UP.format(i): t[UP.format(1 - i)] for i in range(2)}), STATE),
     'safetensors is damaged .*checksum in state.json'),
    (lambda f: (f / STATE).unlink(), 'safetensors is damaged .*No such file'),
    (lambda f: (f / 'state.json').write_text(
        (f / 'state.json').read_text().replace('"step": 2', '"step": 3')),
     'state.json is damaged .*checksum'),
    (lambda f: f.rename(f.with_name('resume-9999')),
     'resume-9999/state.json is damaged .*it holds step 2, not 9999')])
def test_a_damaged_checkpoint_is_named_and_the_older_one_used(tmp_path, capsys, monkeypatch,
                                                              damage, message):
    run = TinyRun(tmp_path).begin()
    with monkeypatch.context() as patch:
        patch.setattr(resume_state, 'discard', lambda *_, **__: None)   # the older one is kept
        run.save_checkpoint()
    newer = run.out / 'resume-2'
    ownership.claim(run.out, *(f'resume-9999/{path.name}' for path in newer.iterdir()))
    damage(newer)
    again, wanted = (TinyRun(tmp_path) for _ in range(2))
    wanted.take_steps(1)
    assert again.restore() == 1
    assert re.search(message, capsys.readouterr().out)
    assert all(torch.equal(p, wanted.named[name]) for name, p in again.named.items())
    shutil.rmtree(run.out / 'resume-1')
    with pytest.raises(TrainingError, match='is damaged .*no older checkpoint; --overwrite'):
        again.restore()


def test_a_checkpoint_of_fewer_processes_is_resumed(tmp_path, monkeypatch):
    run = TinyRun(tmp_path).begin()
    monkeypatch.setattr(resume_state, 'rank', lambda: 1)
    assert run.restore() == 1


def test_a_full_disk_leaves_the_last_checkpoint_and_the_error_names_the_file(tmp_path, monkeypatch):
    run = TinyRun(tmp_path).begin()
    run.save_checkpoint()

    def full(path, *rest, **options):
        raise OSError(28, 'No space left on device', str(path))
    before, run.step = tree(run.out).keys(), 3
    message = 'step 3: saving .*resume-3 failed: .*No space left.*resume continues after step 2'
    with monkeypatch.context() as patch, pytest.raises(TrainingError, match=message):
        patch.setattr(Path, 'write_text', full)
        run.save_checkpoint()
    assert tree(run.out).keys() == before
    with refused(run.out, 'No space left on device: .*results.json', OSError):
        with ownership.temporary(run.out / 'results.json'), open('/dev/full', 'w') as file:
            file.write('x' * 100_000)


def test_a_damaged_log_is_kept_aside(tmp_path, capsys):
    cfg, path = train.TrainConfig(out_dir=str(tmp_path)), tmp_path / 'log.jsonl'
    ownership.claim(tmp_path, 'log.jsonl')
    log.open_log(cfg, 4).close()        # there is none
    path.write_bytes(b'junk\n\xff\n[]\n{}\n')
    log.open_log(cfg, 4).close()
    assert capsys.readouterr().out.count('lacks 4 of the first 4 steps') == 2
    assert (tmp_path / 'log.jsonl.damaged').read_bytes() == b'junk\n\xff\n[]\n{}\n'
    # what a resumed run repeats is cut off; a last line that a crash cut off is no damage
    path.write_text(''.join(f'{{"step": {step}}}\n' for step in range(1, 7)) + '{"st')
    log.open_log(cfg, 4).close()
    assert 'lacks' not in capsys.readouterr().out
    assert [json.loads(line)['step'] for line in path.open()] == [1, 2, 3, 4]
    path.write_text(path.read_text().rstrip())      # without its last line break
    with log.open_log(cfg, 4) as file:
        file.write('{"step": 5}\n')
    assert [json.loads(line)['step'] for line in path.open()] == [1, 2, 3, 4, 5]


# ---- Whose files are whose -----------------------------------------------------------------------

def test_a_folder_that_no_run_made_is_refused(settings_file, train_again, tmp_path, monkeypatch):
    out = tmp_path / 'theirs'
    put(out, 'results.csv', 'config.json', 'runs/mine', 'before/mine', 'resume-3/state.json')
    for folder in (out, *(path for path in out.iterdir() if path.is_dir())):
        with refused(out, 'is not empty .* no written.json, the list'):
            resume.check_folder(train.TrainConfig(out_dir=str(folder), model='base'))
    monkeypatch.chdir(out)
    for name, message in (('.', 'is not empty'), ('', 'no out_dir given')):
        with refused(out, message):
            train.main([settings_file, f'--out_dir={name}', '--overwrite'])
    with ownership.lock(tmp_path / 'out'):      # as another process would
        for option in ('--resume', '--overwrite'):
            with pytest.raises(ConfigError, match='another process is writing there'):
                train_again(option)


@pytest.mark.parametrize('content', [
    '{"files": ["../../victim"]}', '{"files": ["VICTIM"]}', '[' * 100_000])
def test_a_list_that_names_files_elsewhere_is_refused(tmp_path, content):
    out = tmp_path / 'a' / 'out'
    put(tmp_path, 'victim')
    put(out, 'written.json', content=content.replace('VICTIM', f'{tmp_path}/victim'))
    for use in (lambda: ownership.discard(out, '*'), lambda: ownership.claim(out, 'x'),
                lambda: ownership.lock(out).__enter__(), lambda: resume.checkpoints(out)):
        with refused(tmp_path, 'written.json is not what this program wrote'):
            use()


def test_temporary_files_replace_nothing_and_are_removed_after_a_crash(tmp_path):
    theirs = ['results.json.tmp', 'results.json.nanocal-tmp', 'x.0123abcd.nanocal-tmp',
              'before/x.0123abcd.nanocal-tmp']
    ours = ['results.json.0123abcd.nanocal-tmp', 'written.json.0123abcd.nanocal-tmp',
            'before/results.json.0123abcd.nanocal-tmp']
    ownership.claim(tmp_path, 'results.json', 'before/results.json')
    put(tmp_path, *theirs, *ours)
    ownership.write_text(tmp_path / 'results.json', '1')
    with ownership.lock(tmp_path):
        pass
    assert without_list(tmp_path) == {'results.json': b'1'} | dict.fromkeys(theirs, b'mine')
    (tmp_path / 'x').symlink_to('nowhere')      # dangling: `exists` says False
    with pytest.raises(ConfigError, match='x was not written by this program'):
        ownership.claim(tmp_path, 'x')


@pytest.mark.parametrize('old, least', [((), 3), (('results.json', 'mine'), 5)])
def test_a_run_killed_at_any_moment_before_its_first_file_loses_nothing(tmp_path, old, least):
    """In a new folder, and with --overwrite in that of an earlier run."""
    def begin(out):
        resume.check_folder(train.TrainConfig(out_dir=str(out), model='base'))
        with ownership.lock(out):
            ownership.rename_old(out)
            ownership.claim(out, 'results.json')
            ownership.write_text(out / 'results.json', 'new')

    n_kills, was_killed = 0, True
    while was_killed:
        out = tmp_path / f'{n_kills}'
        if old:
            ownership.claim(out, 'results.json', 'gone')
        put(out, *old)
        before = tree(out)
        was_killed = killed(functools.partial(begin, out), out, n_kills)
        n_kills += was_killed
        assert before in (tree(out), tree(tmp_path / f'{out.name}.1'))
        begin(out)
        assert without_list(out) == {'results.json': b'new'}
    assert n_kills > least, n_kills


def test_a_temporary_folder_is_merged_into_one_that_exists_whose_mode_stays(tmp_path):
    folder = tmp_path / 'cache'
    put(folder, 'theirs', 'a/old', content='1')
    folder.chmod(0o770)
    with ownership.temporary(folder, folder=True) as part:
        put(part, 'new', 'a/old', content='2')
    assert tree(tmp_path) == {'cache/theirs': b'1', 'cache/a/old': b'2', 'cache/new': b'2'}
    assert folder.stat().st_mode & 0o777 == 0o770


def test_files_get_the_mode_that_the_umask_says(tmp_path, request):
    request.addfinalizer(functools.partial(os.umask, os.umask(0o002)))
    run = TinyRun(tmp_path).begin()
    run.save_weights()
    assert {p.stat().st_mode & 0o777 for p in run.out.rglob('*') if p.is_file()} == {0o664}


def test_overwrite_renames_the_old_folder_and_deletes_nothing(tuned, train_again, capsys):
    listed = set(ownership.written_files(tuned))
    assert listed | {'written.json'} == tree(tuned).keys(), 'a run lists all that it writes'
    put(tuned, 'notes.txt', 'epoch-1/mine', 'README.md')
    before, options = tree(tuned), ('--overwrite', '--max_steps=1', '--eval=None')
    train_again(*options)
    old = tuned.with_name('out.1')
    assert tree(old) == before and f'--overwrite: {tuned} is now {old}' in capsys.readouterr().out
    now = tree(tuned)
    assert not {'notes.txt', 'results.json', 'epoch-1/config.json'} & now.keys()
    assert len(now['log.jsonl'].splitlines()) == 1


def test_a_folder_moved_under_a_run_ends_it_with_an_error(tmp_path):
    run = TinyRun(tmp_path).begin()
    moved, message = tmp_path / 'moved', 'run was removed or moved, or its .lock was deleted'
    with pytest.raises(ConfigError, match=message), ownership.lock(run.out):
        run.out.rename(moved)
    with pytest.raises(ConfigError, match=message), ownership.lock(run.out):
        shutil.rmtree(run.out)
        with pytest.raises(ConfigError, match=message):     # and nothing is written elsewhere
            run.save_checkpoint()
        assert not run.out.exists()
    with ownership.lock(moved):
        assert resume.checkpoints(moved)


def test_nothing_behind_a_link_is_written_or_deleted(tmp_path):
    out, elsewhere = tmp_path / 'out', tmp_path / 'elsewhere'
    ownership.claim(out, 'config.json', 'epoch-1/adapter/a')
    put(elsewhere, 'adapter/a')
    (out / 'epoch-1').symlink_to(elsewhere)
    for use in (lambda: ownership.discard(out, '*'), lambda: ownership.claim(out, 'epoch-1/b'),
                lambda: ownership.check_free(out, 'epoch-1/adapter/a')):
        with refused(tmp_path, 'epoch-1 is a link to a folder elsewhere'):
            use()
    ownership.discard(out, 'config.json')
    with ownership.lock(out):       # a link to which nothing is written does no harm
        ownership.claim(out, 'results.json')


# ---- --overwrite ---------------------------------------------------------------------------------

def test_a_folder_is_renamed_with_its_lock_to_the_first_free_name(tmp_path, monkeypatch):
    real, link = tmp_path / 'run.v2', tmp_path / 'link'
    ownership.claim(real, 'a')
    link.symlink_to(real)
    put(tmp_path, 'run.v2.1')
    with ownership.lock(link):
        ownership.rename_old(link)      # whose files are gone: nothing to keep
        (real / 'a').write_text('old')
        ownership.rename_old(link)
        assert (tmp_path / 'run.v2.2' / 'a').read_text() == 'old' and not [*tree(real)]
        for folder in (real, link):
            with pytest.raises(ConfigError, match='another process is writing there'):
                ownership.lock(folder).__enter__()
        ownership.claim(link, 'a')
        (real / 'a').write_text('new')
        with ownership.lock(real / 'epoch-1'), refused(tmp_path, 'epoch-1: another process is'):
            ownership.rename_old(link)
        monkeypatch.chdir(real / 'epoch-1')
        with refused(tmp_path, 'this command reads .*/epoch-1;'):
            ownership.rename_old(link)
    with ownership.lock(real), ownership.lock(tmp_path / 'run.v2.2'):
        pass


def test_overwrite_checks_everything_before_it_renames_and_not_what_the_run_reads(
        small_world, tuned, tmp_path):
    shutil.copytree(small_world[0] / 'base', tmp_path / 'truncated')
    os.truncate(tmp_path / 'truncated' / 'model.safetensors', 1000)
    linked, peft = tmp_path / 'linked', tmp_path / 'peft'
    linked.mkdir()
    for path in filter(Path.is_file, tuned.iterdir()):
        (linked / path.name).symlink_to(path)
    model = models.CausalLM(checkpoint.read_config(tuned))
    models.add_lora(model, 2, 4.0, 0.0, ('q_proj',))
    adapter.save_adapter(model, peft, str(tuned))
    for name in ('instruct.jsonl', 'questions.jsonl'):
        ownership.claim(tuned, name)
        shutil.copy(small_world[0] / 'world' / name, tuned)
    (tmp_path / 'link').symlink_to(tuned)
    (tmp_path / 'data').mkdir()
    (tmp_path / 'data' / 'instruct.jsonl').symlink_to(tuned / 'instruct.jsonl')
    shutil.copy(tuned / 'train_config.py', tmp_path / 'settings.py')
    options = f'--out_dir={tuned}', '--overwrite', '--max_steps=1', '--device=cpu'
    command = [str(tmp_path / 'settings.py'), *options]
    with refused(tmp_path, 'this command reads .*/train_config.py;'):
        train.main([str(tuned / 'train_config.py'), *options])
    for option, message in (
            (f'--model={tmp_path}/truncated', 'truncated'),
            ('--eval.tasks=nothing', 'no task, file or folder'),
            ('--batch_size=100000', 'do not fill one step')):
        with refused(tuned, message, ValueError):
            train.main([*command, option])
    for option, name in ((f'--model={linked}', '.*'), (f'--model={peft}', '.*'),
                         (f'--data={tmp_path}/link/instruct.jsonl', 'instruct.jsonl'),
                         (f'--data={tmp_path}/data', 'instruct.jsonl'),
                         (f'--eval.tasks={tuned}/questions.jsonl', 'questions.jsonl')):
        with refused(tmp_path, f'would rename .*out, and this command reads .*{name};'):
            train.main([*command, option])
    with pytest.raises(ConfigError, match='and this command reads .*/out/cache;'):
        train.main([*command, f'--cache_dir={tuned}/cache'])
    train.main([*command, '--eval=None'])
    assert 'instruct.jsonl' not in tree(tuned)
