"""Evaluation, decoding and reports by several processes of torchrun equal those of one process."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import evaluate
from common import HERE, WORDS, program, results_of, write_rows
from data.questions import Question
from data.tasks import OptionTask
from results import samples
from runtime import ownership
from runtime.errors import ConfigError
from scripts import run_scripts, torchrun
from speed import sharding


@pytest.fixture(scope='module')
def several(scored_folder, tmp_path_factory):
    """The model and questions of `scored_folder`, and other tasks and prompts."""
    folder = tmp_path_factory.mktemp('several')
    for name in ('model', 'data'):
        (folder / name).symlink_to(scored_folder / name)
    texts = [' '.join(WORDS[i:] + WORDS[:i]) for i in range(12)]
    for name, rows in (
            ('texts', [{'text': text} for text in texts[:2]]),
            ('answers', [{'question': f'What is {x}?', 'answers': ['blue']} for x in WORDS[:7]]),
            ('talks', [{'messages': [{'role': 'user', 'content': word},
                                     {'role': 'assistant', 'content': 'fox'}]} for word in WORDS]),
            ('prompts', [{'prompt': text[:4 + 5 * (i % 5)]} for i, text in enumerate(texts)])):
        write_rows(folder / f'{name}.jsonl', rows)
    return folder


def run(command, n=1):
    """Run a script of this repository by n processes, and return what it prints."""
    done = run_scripts(n, *command)
    assert done.returncode == 0, done.stderr
    return done.stdout


def evaluation(folder, out, *more, tasks='global_mmlu:{0}/data,clm:{0}/texts.jsonl'):
    return ['evaluate.py', f'--model={folder / "model"}', f'--out_dir={out}', '--device=cpu',
            f'--tasks={tasks.format(folder)}', *(['--shots=2'] if 'mmlu' in tasks else []),
            '--n_bootstrap=20', '--deterministic', '--pictures=False', *more]


def outcome(out):
    """What an evaluation leaves in its folder, but for the time and the order of the lines."""
    results = results_of(out)
    del results['config']['out_dir'], results['checksum']
    for result in results['tasks'].values():
        seconds = result.pop('scoring_seconds')
        assert seconds is None or seconds >= 0      # None if it was resumed
    lines = (out / 'samples.jsonl').read_text().splitlines()
    assert len(set(lines)) == len(lines)
    return sorted(lines), results


@pytest.mark.parametrize('n', [2, 8, 100])
def test_the_shares_of_a_task_are_all_of_it_and_about_equal(n):
    def question(i, language=''):
        return Question(str(i), f'q{i} ' + 'fox ' * (i % 7), [' A', ' B'], i % 2, 's',
                        language=language)
    items = [question(i, language) for language in ('de', 'en', 'sw') for i in range(50)]
    items += [replace(question(i), split='validation') for i in range(7)]
    task = OptionTask('x', 'x', items, {}, ['bad'], 400)
    shares = [task.share(rank, n) for rank in range(n)]
    keys = [task.sample_key(q) for share in shares for q in share.items]
    assert sorted(keys) == sorted(map(task.sample_key, items))
    assert sum(share.total for share in shares) == 400
    assert [row for share in shares for row in share.bad_rows] == ['bad']
    prompts = {(task.sample_key(item), 'prompt') for item in items}
    assert sum((share.counts(prompts) for share in shares), Counter()) == task.counts(prompts)
    # of few questions or languages no share has more than its part and the longest question
    for few in (items[:1], items[:5], items[:20], items[:49], [*items[:3], *items[50:53]]):
        task = replace(task, items=few)
        longest = max(sum(len(q.context) for q in task.share(k, n).items) for k in range(n))
        assert longest <= sum(len(q.context) for q in few) / n + max(len(q.context) for q in few)


def test_parts_are_merged_in_order_whatever_was_interrupted(tmp_path):
    """Also where the merging itself was: with lines that were merged and whose part is left."""
    path, names = tmp_path / 'samples.jsonl', ['samples.jsonl.2', 'samples.jsonl.10']
    with ownership.lock(tmp_path):
        ownership.claim(tmp_path, path.name, *names, 'samples.jsonl.11')
        path.write_text('{"a": 1}\n{"a": 2}\n')
        (tmp_path / names[0]).write_text('{"a": 2}\n{"a": 3}\n{"a": 3')
        (tmp_path / names[1]).write_text('{"a": 4}\n')
        (tmp_path / 'samples.jsonl.3').write_text('mine')
        samples.merge_parts(path)
        assert path.read_text() == '{"a": 1}\n{"a": 2}\n{"a": 3}\n{"a": 4}\n'
        assert (tmp_path / 'samples.jsonl.3').read_text() == 'mine'
        assert ownership.written_files(tmp_path) == [path.name]
        assert not any((tmp_path / name).exists() for name in names)


@pytest.mark.parametrize('tasks, derived, more', [
    # with shared weights; of the two texts the third process has none
    ('global_mmlu:{0}/data,clm:{0}/texts.jsonl', {'global_mmlu.permuted', 'global_mmlu.p_true'},
     ['--permute=2', '--p_true', '--fit_temperature', '--limit=5', '--shard']),
    ('qa:{0}/answers.jsonl', {'qa.p_true', 'qa.p_ik', 'qa.agreement'},
     ['--shots=0', '--n=3', '--max_tokens=5', '--p_true', '--p_ik', '--verbalized'])])
def test_several_processes_evaluate_as_one(several, tasks, derived, more, tmp_path):
    for n in (1, 3):
        options = [option for option in more if n > 1 or option != '--shard']
        run(evaluation(several, tmp_path / str(n), *options, tasks=tasks), n)
    (lines, alone), (same, shared) = (outcome(tmp_path / n) for n in '13')
    assert shared['config'].pop('shard') == ('--shard' in more) and not alone['config'].pop('shard')
    assert lines == same and alone == shared and derived <= alone['tasks'].keys()


def test_each_process_loads_only_its_share_of_the_weights(several, tmp_path):
    """To evaluate and to train, also with adapters, a score in place of an output matrix, or from
    random weights: bitwise those of one process."""
    script = tmp_path / 'load.py'
    script.write_text(program('shares of the weights'))
    assert run([script, several / 'model'], 2) == 6 * 'True True True\n'


def test_what_cannot_share_the_weights_is_refused(scored_folder, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match='shard = True: there is one process'):
        evaluate.main([f'--model={scored_folder}/model', '--shard', '--shots=0', '--device=cpu',
                       f'--tasks=global_mmlu:{scored_folder}/data', f'--out_dir={tmp_path}'])
    monkeypatch.setattr(sharding, 'world_size', lambda: 2)
    with pytest.raises(ConfigError, match='shard = True: the model writes the answers to qa'):
        sharding.check_evaluation({'qa': SimpleNamespace(is_written=True)}, evaluate.EvalConfig(),
                                  None)


def test_all_processes_of_a_run_make_its_reports(several, tmp_path):
    """The report before training equals that of one process; the other, that of the weights."""
    def options(prefix, **values):
        return [f'--{prefix}{key}={value}' for key, value in values.items()]
    evaluated = {'tasks': f'global_mmlu:{several / "data"}', 'shots': 2, 'n_bootstrap': 20,
                 'deterministic': True, 'pictures': False}
    for n in (1, 2):
        run(['train.py', *options('eval.', **evaluated), *options(
            '', model=several / 'model', data=several / 'talks.jsonl', out_dir=tmp_path / str(n),
            cache_dir=tmp_path / 'cache', batch_size=4, max_steps=1, max_length=64, pack_len=128,
            lr=1e-3, device='cpu', pictures=False, save_dtype='float32')], n)
    before, after = outcome(tmp_path / '2' / 'before'), outcome(tmp_path / '2')
    assert outcome(tmp_path / '1' / 'before') == before
    run(['evaluate.py', *options('', model=tmp_path / '2', out_dir=tmp_path / 'alone',
                                 device='cpu', **evaluated)])
    lines, results = outcome(tmp_path / 'alone')
    assert lines == after[0] != before[0] and results['tasks'] == after[1]['tasks']


@pytest.mark.parametrize('script, name, n', [
    ('evaluate', 'samples.jsonl', 20), ('generate', 'answers.jsonl', 2)])
def test_a_killed_process_is_named_and_loses_no_line(several, tmp_path, script, name, n):
    def command(out):
        return evaluation(several, out) if script == 'evaluate' else [
            'generate.py', f'--model={several / "model"}', '--raw', '--device=cpu', '--n=2',
            f'--prompts={several / "prompts.jsonl"}', f'--out={out / name}',
            '--max_tokens=8', '--deterministic', '--confidence']
    whole, killed = tmp_path / 'whole', tmp_path / 'killed'
    run(command(whole))
    (tmp_path / 'dying.py').write_text(program('a process that dies', script=script, n=n))
    done = torchrun(tmp_path / 'dying.py', *command(killed)[1:])
    assert done.returncode and 'rank      : 1' in done.stderr, done.stderr
    scored = {line for part in killed.glob(f'{name}.*')
              for line in part.read_text().split('\n')[:-1]}
    assert len(scored) >= n and not (killed / 'results.json').exists()
    printed = run(command(killed), 3)
    lines = (killed / name).read_text().splitlines()
    assert scored == {*lines[:len(scored)]}     # as they were, and first
    assert sorted(lines) == sorted((whole / name).read_text().splitlines())
    assert not [*killed.glob(f'{name}.*')]
    if script == 'evaluate':
        assert f'{sum("clm" not in line for line in scored)} scored earlier' in printed
        assert outcome(killed) == outcome(whole)


def test_an_error_in_one_process_names_it_and_ends_all(several, tmp_path):
    write_rows(tmp_path / 'q.jsonl', [
        {'question': 'fox ' * (900 if i == 19 else 150), 'choices': ['a', 'b'], 'answer': 0}
        for i in range(20)])
    command = ['evaluate.py', f'--model={several / "model"}', f'--tasks={tmp_path / "q.jsonl"}',
               '--shots=0', '--device=cpu', f'--out_dir={tmp_path / "out"}', '--max_length=300']
    errors = torchrun(*command).stderr
    assert 'rank      : 1' in errors and 'error in process 1 of 2: q: ' in errors
    assert 'q.jsonl:20: even without shots the prompt has' in errors
    assert 'Traceback (most recent call last):\n  File "' + str(HERE) not in errors
