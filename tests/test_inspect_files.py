"""bridges/inspect_files.py: logs of Inspect as files of predictions."""

import functools
import importlib.util
import json
import math
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest
from test_prediction_files import run_metrics, values

from bridges import command
from bridges.inspect_files import log_rows
from compare import compare
from runtime.errors import ConfigError

# the first keys of a log
HEADER = {'version': 2, 'status': 'success', 'eval': {'task': 'arc', 'model': 'mockllm/model'}}


def sample(id, epoch=1, **more):
    return {'id': id, 'epoch': epoch, 'input': f'Question {id}?', 'target': 'A',
            'output': {'choices': []}, 'metadata': {}, 'scores': {}} | more


def graded(id, value, epoch=1, scorer='match', **score):
    return sample(id, epoch, scores={scorer: {'value': value, 'answer': 'a', **score}})


def chosen(id, letter, p, value='C', explanation=None):
    """A sample of multiple_choice() with the probability of its letter."""
    tokens = ['I', ' like', ' B', '.\n', 'AN', 'SWER', ':', f' {letter}', '\n']
    logprobs = [-1.0] * 7 + [math.log(p), -1.0]
    return graded(id, value, scorer='choice', answer='A' if explanation else letter,
                  explanation=explanation or ''.join(tokens)) | {
        'choices': ['w', 'x', 'y', 'z'], 'output': {'choices': [{'logprobs': {'content': [
            {'token': t, 'logprob': x} for t, x in zip(tokens, logprobs, strict=True)]}}]}}


def write_log(path, samples, method=zipfile.ZIP_DEFLATED):
    """Write a log as Inspect does, NaN included."""
    if path.suffix == '.json':
        path.write_text(json.dumps(HEADER | {'samples': samples}))
        return path
    files = {'_journal/start.json': HEADER, 'summaries.json': [], 'header.json': HEADER} | {
        f'samples/{s["id"]}_epoch_{s["epoch"]}.json': s for s in samples}
    with zipfile.ZipFile(path, 'w', method) as archive:
        for name, content in files.items():
            archive.writestr(name, json.dumps(content))
    return path


def test_each_scorer_is_a_task_and_what_has_no_score_is_counted(tmp_path):
    judged = [graded(i, x, scorer='judge') for i, x in enumerate([*'CCCINP', math.nan])]
    path = write_log(tmp_path / 'a.eval', [
        *judged, sample('e', error={'message': 'timed out'}),
        sample('n', scores={'match': {'value': 1}, 'f1': {'value': 0.3},
                            'parts': {'value': {'a': True, 'b': 0.0}}}, limit={'type': 'message'})])
    done = run_metrics(path)
    tasks = {part.split('\n')[0]: part for part in done.stdout.split('\n\n')}
    assert ['accuracy', '0.5000'] in [*map(str.split, done.stdout.splitlines())]
    assert [name for name in tasks if name.startswith('arc')] == [
        'arc.match', 'arc.parts.a', 'arc.parts.b']
    assert f'{path}: sample n, epoch 1: arc.f1 is 0.3; wanted C, I, N, P, 1, 0, ' in done.stdout
    assert f'2 without a score are left out, the first: {path}: sample 6, epoch 1: ' in done.stdout
    assert f'{path}: 1 are partly right, P, and count as wrong' in done.stdout
    assert f'{path}: without confidences there is only the accuracy of arc.judge, arc.match, ' in (
        done.stdout)


def test_the_probability_of_the_chosen_letter_is_the_confidence(tmp_path):
    """After the last ANSWER; of shuffled options the letter is the one that was written."""
    shuffled = ('Choices were shuffled before generating a response, the following was sent to '
                'the model:\n\nA) y\nB) x\nShuffled answer:\nANSWER: D')
    samples = [chosen(1, 'B', 0.8), chosen(2, 'D', 0.6, 'I', shuffled), chosen(3, 'C', 0.5),
               graded(4, 'N', scorer='choice')]
    rows = [row for _, row in log_rows(write_log(tmp_path / 'a.eval', samples))]
    assert [row['confidence'] for row in rows] == [*map(pytest.approx, (0.8, 0.6, 0.5)), None]
    done = run_metrics(tmp_path / 'a.eval')
    assert done.stdout.startswith('1 rows state no probability, the first: ')
    assert values(done)['brier_top_label'] == f'{(0.04 + 0.36 + 0.25) / 3:.4f}'
    assert run_metrics(write_log(tmp_path / 'a.json', samples)).stdout == (
        done.stdout.replace('a.eval', 'a.json'))


def test_a_confidence_in_the_metadata_of_a_score_is_read_by_its_name(tmp_path):
    samples = [graded(i, x, metadata={'confidence': c, 'sure': 1 - c}) for i, (x, c) in enumerate(
        [('C', 0.9), ('I', 0.25)])]
    samples[0]['scores']['includes'] = {'value': 'C'}
    path = write_log(tmp_path / 'a.eval', samples)
    assert values(run_metrics(path))['confidence'] == '0.5750'
    done = run_metrics(path, '--columns=confidence=sure')
    assert done.stdout.startswith('arc.match.sure\n') and 'includes' not in done.stdout
    assert values(done)['confidence'] == '0.4250'
    assert "there is no column 'shure', but " in run_metrics(
        path, '--columns=confidence=shure').stderr
    probs = [graded(i, x, metadata={'probs': [0.7, 0.2, 0.1]}) | {'target': target}
             for i, (x, target) in enumerate(['CA', 'IC'])]
    nll = -np.log([0.7, 0.1]).mean()
    assert values(run_metrics(write_log(path, probs)))['nll'] == f'{nll:.4f}'


def test_newer_logs_are_compressed_by_zstandard(tmp_path, monkeypatch):
    pyarrow = pytest.importorskip('pyarrow')
    compress = functools.partial(pyarrow.compress, codec='zstd', asbytes=True)
    with monkeypatch.context() as patch:        # Python writes these files from 3.14 on
        patch.setattr(zipfile, '_check_compression', lambda method: None)
        patch.setattr(zipfile, '_get_compressor',
                      lambda *_: SimpleNamespace(compress=compress, flush=bytes))
        path = write_log(tmp_path / 'a.eval', [graded(i, 'C') for i in range(3)], method=93)
    assert values(run_metrics(path))['n'] == '3'


def test_two_logs_without_confidences_are_compared_by_accuracy_over_questions(tmp_path, capsys):
    """Epochs of one question are drawn together; a table with `correct` alone gives the same."""
    random = np.random.default_rng(0)
    right = random.random((2, 3, 40)) < [[[0.5]], [[0.8]]]
    for name, by_epoch in zip(('base.eval', 'tuned.json'), right, strict=True):
        rows = [(i, int(x), epoch) for epoch, xs in enumerate(by_epoch, 1)
                for i, x in enumerate(xs)]
        write_log(tmp_path / name, [graded(*row) for row in rows])
    (tmp_path / 'tuned.csv').write_text('id,correct\n' + ''.join(f'{i},{x}\n' for i, x, _ in rows))
    compare.main([f'{tmp_path}/base.eval', f'{tmp_path}/tuned.json', f'--out_dir={tmp_path}/out'])
    printed = capsys.readouterr().out
    difference = right[1].mean() - right[0].mean()
    assert f' questions         40  accuracy  {difference:+.4f}  +0.' in printed
    assert '120 answers in 40 questions' in printed and 'ECE' not in printed
    html = (tmp_path / 'out' / 'compare.html').read_text()
    assert '"confidence":null' in html and 'data:image' not in html
    log, table = (values(run_metrics(tmp_path / name)) for name in ('tuned.json', 'tuned.csv'))
    assert log == table and log['questions'] == '40'
    with pytest.raises(ConfigError, match='holds no confidences'):
        command.write_report([f'{tmp_path}/base.eval', f'--out_dir={tmp_path}/report'])


def test_a_log_that_holds_no_score_is_refused_with_its_name(tmp_path):
    path = tmp_path / 'a.eval'
    assert f'{path}: no sample has a score; `inspect score` adds scores' in run_metrics(
        write_log(path, [sample(1)])).stderr
    assert f'{path}: sample 1, epoch 1: arc.match is 0.3; wanted C, I, N, P' in run_metrics(
        write_log(path, [graded(1, 0.3)])).stderr
    for key in ('target', 'id', 'scores'):
        rows = [graded(1, 1), {x: y for x, y in graded(2, 1).items() if x != key}]
        rows[1] |= {'scores': [1]} if key == 'scores' else {}
        done = run_metrics(write_log(path.with_suffix('.json'), rows))
        assert 'a.json: sample 2' in done.stderr and 'not as Inspect writes it: ' in done.stderr
    path.write_text('no zip')
    assert f'cannot read {path} as a log of Inspect: File is not a zip' in run_metrics(path).stderr
    assert 'No such file' in run_metrics(tmp_path / 'b.eval').stderr


@pytest.mark.skipif(importlib.util.find_spec('inspect_ai') is None, reason='needs inspect-ai')
def test_accuracy_of_the_installed_version_is_its_own(tmp_path):
    from inspect_ai import Task, eval
    from inspect_ai.dataset import Sample
    from inspect_ai.model import Logprob, Logprobs, ModelOutput, ModelUsage, get_model
    from inspect_ai.scorer import choice
    from inspect_ai.solver import multiple_choice
    outputs = []
    for i in range(20):
        output = ModelOutput.from_content('mockllm/model', f'ANSWER: {"ABCD"[i % 3]}')
        output.usage = ModelUsage(input_tokens=1, output_tokens=1, total_tokens=2)
        output.choices[0].logprobs = Logprobs(content=[
            Logprob(token='ANSWER:', logprob=0.0),
            Logprob(token=f' {"ABCD"[i % 3]}', logprob=math.log(0.5 + i / 50))])
        outputs.append(output)
    task = Task(dataset=[Sample(input=f'{i}', choices=[*'wxyz'], target='ABCD'[i % 4])
                         for i in range(10)],
                solver=multiple_choice(), scorer=choice(), epochs=2, name='arc')
    for kind in ('eval', 'json'):
        log, = eval(task, model=get_model('mockllm/model', custom_outputs=[*outputs]),
                    log_dir=str(tmp_path), log_format=kind, display='none', logprobs=True)
        path, = tmp_path.glob(f'*.{kind}')
        measured = values(run_metrics(path))
        own = log.results.scores[0].metrics['accuracy'].value
        assert measured['accuracy'] == f'{own:.4f}'
        assert measured['confidence'] == f'{np.mean([0.5 + i / 50 for i in range(20)]):.4f}'
