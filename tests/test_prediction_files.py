"""bridges/prediction_files.py: `python metrics.py FILES`, and lines of lm-evaluation-harness.

bridges/lm_eval_metrics.py: our metrics in a task of the installed lm-evaluation-harness.
"""

import contextlib
import csv
import gzip
import importlib.util
import io
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from decimal import Decimal

import numpy as np
import pytest
from common import HERE, cases_of, program, refused, tree, write_rows

import metrics
from bridges import command
from compare import runs, significance
from results import report
from compare.compare import FileConfig
from bridges.harness_files import harness_sample, harness_task
from bridges.prediction_files import read_predictions
from runtime import cli, ownership
from runtime.errors import DataError
from scripts import run_scripts

FILES = cases_of('prediction_files.toml')
HARNESS_FILES = HERE / 'tests' / 'harness_files'
needs_lm_eval = pytest.mark.skipif(importlib.util.find_spec('lm_eval') is None,
                                   reason='needs lm-eval')


def run_metrics(*arguments):
    """Do what `python metrics.py` does; return its exit status and what it prints."""
    printed, code, message = io.StringIO(), 0, ''
    try:
        with contextlib.redirect_stdout(printed), cli.one_line_errors():
            command.print_metrics([*map(str, arguments)])
    except SystemExit as stop:
        code, message = 1, f'{stop.code}\n'
    return subprocess.CompletedProcess(arguments, code, printed.getvalue(), message)


def values(done):
    """Return {name: value} of the lines that metrics.py printed, as text."""
    assert done.returncode == 0, done.stderr
    return dict(line.split() for line in done.stdout.splitlines() if len(line.split()) == 2)


def test_a_report_per_task_of_rows_of_any_form(tmp_path):
    path = write_rows(tmp_path / 'samples.jsonl', [
        {'probs': [0.7, 0.3], 'label': 0},
        {'log_probs': [-1.0, -2.0, -4.0], 'answer': 1, 'n_tokens': [1, 1, 2]},
        {'probs': [0.5, 0.5], 'answer': 1, 'split': 'validation'}])
    done = run_metrics(path)
    p = np.exp([-1, -2, -2])
    nll = metrics.report([[0.7, 0.3, 0], p / p.sum()], [0, 1], [2, 3])['nll']
    assert values(done)['nll'] == f'{nll:.4f}' and values(done)['n'] == '2'
    # the ECE that a calibrated model has on as many rows
    chance = significance.consistency_test([0.7, p[0] / p.sum()], [True, False], n_resamples=100)
    assert f' has an ECE of {chance["expected"]:.4f} on average, up to {chance["p95"]:.4f} in' in (
        done.stdout)
    write_rows(path, [{'confidence': 0.6, 'correct': True, 'task': 'Sprachmodell ü'},
                      {'log_probs': [-80.0, -2.0], 'answer': 0, 'task': 'mmlu'},
                      {'confidence': 0.6, 'correct': 0, 'task': 'Sprachmodell ü'}])
    done = run_metrics(path)
    assert done.stdout.startswith('Sprachmodell ü\nn  ') and '\nmmlu\nn  ' in done.stdout
    assert values(done)['nll'] == '78.0000'
    packed = tmp_path / 'samples.jsonl.gz'
    packed.write_bytes(gzip.compress(path.read_bytes()))
    script = run_scripts(1, 'metrics.py', packed)
    assert (script.returncode, script.stdout) == (0, done.stdout)
    (tmp_path / 'alone.py').write_text((HERE / 'metrics.py').read_text())
    script = run_scripts(1, tmp_path / 'alone.py', packed)
    assert script.returncode == 1 and script.stderr.startswith('error: the command needs all of na')
    packed.write_bytes(packed.read_bytes()[:-9])
    assert f'error: cannot read {packed}: Compressed file ended' in run_metrics(packed).stderr


def test_several_answers_to_a_question_count_as_one(tmp_path):
    """They share an id, or have x and x#2, which is another question where there is no x."""
    answers = [(f'{i}', end, i % 3 > 0) for i in range(30) for end in ('', '#2', '#3')]
    same, named, apart = ([{'id': name(id, end), 'confidence': 0.7, 'correct': correct}
                           for id, end, correct in answers] for name in (
        lambda id, end: id, lambda id, end: id + end, lambda id, end: f'{id}{end or "#1"}'))
    path = tmp_path / 'a.jsonl'
    printed = [run_metrics(write_rows(path, rows)) for rows in (same, named, apart)]
    assert printed[0].stdout == printed[1].stdout and values(printed[0])['questions'] == '30'
    assert 'questions' not in values(printed[2])
    write_rows(path, [{'task': task, 'correct': 1} for task in ('a/b', 'a-b')])
    assert [*runs.predicted_run(path, {'': path}, FileConfig()).results] == ['a/b', 'a-b']


def test_tables_of_any_form_give_the_report_of_the_json_lines(tmp_path):
    """One with semicolons has decimal commas; one has the line breaks of an old Mac."""
    rows = [{'id': i, 'probs': p, 'answer': i % 2, 'question': 'a; ' * 12 + '"b",\nc'}
            for i, p in enumerate(([0.7, 0.3], [0.2, 0.5, 0.3], [0.25, 0.75]))]
    expected = run_metrics(write_rows(tmp_path / 'a.jsonl', rows)).stdout
    paths = [write_rows(tmp_path / 'a.parquet', rows)]
    for name, separator, end in (('a.csv', ',', '\r\n'), ('b.csv', ';', '\n'),
                                 ('c.csv', ',', '\r'), ('a.tsv', '\t', '\n')):
        paths.append(tmp_path / name)
        with open(paths[-1], 'w', newline='') as file:
            table = csv.writer(file, delimiter=separator, lineterminator=end)
            table.writerow(['id', 'probs_0', 'probs_1', 'probs_2', 'answer', 'question'])
            for row in rows:
                probs = [f'{x}' if separator != ';' else f'{x}'.replace('.', ',')
                         for x in row['probs']]
                table.writerow([row['id'], *[*probs, ''][:3], row['answer'], row['question']])
    assert expected.startswith('n   ')
    paths.append(write_rows(tmp_path / 'decimal.parquet', [
        row | {'probs': [Decimal(f'{x}') for x in row['probs']]} for row in rows]))
    assert [run_metrics(path).stdout for path in paths] == [expected] * 6
    compared = runs.predicted_run(paths[0], {'': paths[0]}, FileConfig()).file_samples
    assert [x['log_probs'] for x in compared['predictions']] == [
        pytest.approx(np.log(row['probs'])) for row in rows]


def test_answers_of_an_api_without_probabilities_are_sampled_or_stated(tmp_path):
    table = tmp_path / 'uqlm.csv'
    table.write_text(FILES['tables']['uqlm'])
    by_text = run_metrics(table, '--columns=correct=response_correct')
    named = run_metrics(table, '--columns=correct=response_correct,confidence=exact_match')
    assert named.stdout == f'exact_match\n{by_text.stdout}\n'
    assert values(by_text)['ece'] == f'{(0.8 + 0.6) / 2:.4f}'
    parquet = write_rows(tmp_path / 'uqlm.parquet', [
        {'response': response, 'sampled_responses': [*samples], 'response_correct': correct}
        for response, samples, correct in (('3', '44344', True), ('6', '56665', False))])
    assert run_metrics(parquet, '--columns=correct=response_correct').stdout == by_text.stdout
    path = write_rows(tmp_path / 'api.jsonl', [
        {'confidence': 'Sure.', 'correct': True}, {'confidence': 'I am 80% sure', 'correct': True},
        {'confidence': None, 'correct': False, 'probs': None}, {'confidence': 'NA', 'correct': 1},
        {'answers': ['Paris.', 'paris', 'Lyon'], 'answer': ['Paris', 'City of Paris']},
        {'answers': ['A', 'B', 'B'], 'answer': 'A'}])
    done = run_metrics(path)
    assert done.stdout.startswith(
        f"3 rows state no probability, the first: {path}:1: 'Sure.'; they are left out\n")
    assert values(done)['n'] == '3'
    assert values(done)['brier_top_label'] == f'{(0.04 + 1 / 9 + 4 / 9) / 3:.4f}'
    path.write_text('{"confidence": "high", "correct": true}')
    assert run_metrics(path).stderr == (
        f"error: {path}: 1 rows state no probability, the first: {path}:1: 'high'\n")


def test_a_report_lists_its_scalings_and_replaces_none_of_others(tmp_path):
    path = write_rows(tmp_path / 'rows.jsonl', [
        {'probs': [0.6, 0.4], 'answer': i % 3 // 2, 'options': (['a', 'b'], ['one'], 'ab')[i % 3]}
        for i in range(12)])

    def write_report(file=path, out=tmp_path / 'report', *more):
        command.write_report([str(file), f'--out_dir={out}', '--fit_temperature',
                              '--pictures=False', '--n_bootstrap=0', *more])
    write_report()
    assert 'scaling.json' in ownership.written_files(tmp_path / 'report')
    # options that are not one text per probability are numbered
    assert '[["1",0.6],["2",0.4]]' in (tmp_path / 'report/report.html').read_text()
    before, copy = tree(tmp_path / 'report'), tmp_path / 'report' / 'rows.jsonl'
    with refused(tmp_path, 'report holds an earlier report or evaluation, results.json; --overw'):
        write_report()
    write_report(path, tmp_path / 'report', '--overwrite')
    assert tree(tmp_path / 'report.1') == before
    shutil.copy(path, copy)
    with refused(tmp_path, 'and this command reads .*report/rows.jsonl'):
        write_report(copy, tmp_path / 'report', '--overwrite')
    theirs = tmp_path / 'theirs' / 'scaling.json'
    theirs.parent.mkdir()
    theirs.write_text('mine')
    with refused(tmp_path, 'scaling.json was not written by this program'):
        write_report(path, theirs.parent)


@pytest.mark.parametrize('text', ['2.50', '10.00', '1e3', '[1,2]', 'Infinity', '007',
                                  'true', '0x1', 'a, b', '٢'])
def test_texts_of_a_table_stay_texts(tmp_path, text):
    """As a response, as a sample in a list that Python or JSON printed, and as an id."""
    table = tmp_path / 'table.csv'
    for printed in (str([text, text, 'b']), json.dumps([text, text, 'b'])):
        with open(table, 'w', newline='') as file:
            csv.writer(file).writerows([['response', 'answers', 'correct', 'id'],
                                        [text, printed, 1, text]])
        (sample, _), = read_predictions(table, FileConfig())
        assert (sample['confidence'], sample['predicted'], sample['id']) == (2 / 3, text, text)
        table.write_text(table.read_text().replace('response', 'answer', 1))
        (sample, _), = read_predictions(table, FileConfig(columns=('answers=answers',)))
        assert (sample['confidence'], sample['correct']) == (2 / 3, True)
    table.write_text('answers,answer\n"[2.50, 2.50, 2.5]",2.50\n')
    (sample, _), = read_predictions(table, FileConfig())
    assert (sample['confidence'], sample['correct']) == (2 / 3, True)


@pytest.mark.parametrize('header, row, settings', FILES['columns'])
def test_columns_of_any_case_are_found_or_named_by_the_user(tmp_path, header, row, settings):
    table = tmp_path / 'table.csv'
    table.write_text(f'{header}\n{row}\n')
    measured = values(run_metrics(table, *[f'--columns={settings}'] * bool(settings)))
    assert (measured['accuracy'], measured['confidence']) == ('1.0000', '0.8000')


def test_help_is_no_error_and_a_missing_library_is_named(tmp_path, monkeypatch, capsys):
    for name in ('--help', '-h', ''):
        monkeypatch.setattr(sys, 'argv', ['nanocal', *[name] * bool(name)])
        with contextlib.nullcontext() if name else pytest.raises(SystemExit, match='usage: nanoc'):
            command.main()
        assert ('usage: nanocal metrics|compare|report FILE' in capsys.readouterr().out) == (
            name != '')
    for library in ('matplotlib', 'pyarrow'):
        monkeypatch.setitem(sys.modules, library, None)
    table = tmp_path / 'a.csv'
    table.write_text('confidence,correct\n' + '0.9,1\n0.6,0\n' * 9)
    command.write_report([str(table), f'--out_dir={tmp_path}/out', '--n_bootstrap=0'])
    assert "pip install matplotlib, or 'nanocal[files]'" in capsys.readouterr().err
    (tmp_path / 'a.parquet').write_bytes(b'PAR1')
    assert 'nanocal[files]' in run_metrics(tmp_path / 'a.parquet').stderr


def test_settings_of_columns_that_mean_nothing_are_named(tmp_path):
    for setting in ('anwser=gold', 'answer', 'answer=', 'answer=a,answer=b',
                    'confidence=a,confidence=a'):
        message = run_metrics(tmp_path / 'a.csv', f'--columns={setting}').stderr
        assert message.startswith('error: columns: ') and 'wanted NAME once for some of' in message


def test_norm_divides_log_probabilities_as_in_evaluation(tmp_path):
    row = {'log_probs': [-2.0, -6.0], 'n_tokens': [1, 3], 'answer': 0, 'options': [' é', ' long']}
    path = write_rows(tmp_path / 'samples.jsonl', [row])
    for norm, lengths in (('token', (1, 3)), ('sum', (1, 1)), ('char', (1, 4)), ('byte', (2, 4))):
        p = metrics.softmax([row['log_probs'] / np.array(lengths)])
        assert values(run_metrics(path, f'--norm={norm}'))['confidence'] == f'{p.max():.4f}', norm
    assert run_metrics(path).stdout == run_metrics(path, '--norm=token').stdout
    write_rows(path, [row | {'options': ['a']}])
    assert '1: --norm=char needs options' in run_metrics(path, '--norm=char').stderr


@pytest.mark.parametrize('name, lines, message', [
    *((name, *case) for name, cases in FILES['wrong'].items() for case in cases),
    *(('a.csv', f'confidence,correct\n{x},1\n',
       f"2: confidence is '{x}'; wanted a number from 0 to 1, such as 0.8, or 80 %")
      for x in ('13.4', '0x1', '1e999', '-0.1', '1_0', '0.8.1', '[0.8]')),
    ('b.csv', f'{",".join(map(str, range(900)))}\n{"1," * 899}1\n', '2: no column is named probs')])
def test_a_wrong_line_or_cell_is_named_with_what_would_be_right(tmp_path, name, lines, message):
    path = tmp_path / name
    path.write_bytes(lines.encode('latin-1'))
    done = run_metrics(path)
    assert done.returncode == 1 and done.stdout == ''
    assert done.stderr.startswith(f'error: {path}:{message}'), done.stderr
    assert done.stderr.count('\n') <= 2 and len(done.stderr) < 700


def harness_rows(task, model='first'):
    path, = (HARNESS_FILES / model).glob(f'samples_{task}_2*.jsonl')
    return path, [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize('model, n_tasks', [
    ('first', 5), ('second', 3), pytest.param('installed', 5, marks=needs_lm_eval)])
def test_accuracy_of_lm_eval_files_is_their_own(tmp_path, monkeypatch, model, n_tasks):
    """Also of those that the installed version writes now."""
    folder = HARNESS_FILES / model
    if model == 'installed':
        folder = tmp_path / 'first'
        monkeypatch.setattr(sys, 'argv', ['write.py', str(tmp_path), 'first'])
        runpy.run_path(str(HARNESS_FILES / 'write.py'), run_name='__main__')
    files = [path for path in folder.glob('samples_*.jsonl') if not re.search(
        'several|written|last_word|whole_text', path.name)]
    results = json.loads(next(folder.glob('results_*.json')).read_text())['results']
    for norm, metric in (('sum', 'acc'), ('char', 'acc_norm'), ('byte', 'acc_bytes')):
        lines = run_metrics(f'--norm={norm}', *files).stdout.split('\n')
        ours = {line: float(lines[i + 2].split()[1]) for i, line in enumerate(lines)
                if line and not lines[i - 1]}
        assert len(ours) == n_tasks
        theirs = {task: results[task][f'{metric},none'] for task in ours
                  if f'{metric},none' in results[task]}
        assert {task: ours[task] for task in theirs} == pytest.approx(theirs, abs=1e-4)
        assert 'endings' in theirs


def test_a_sample_of_lm_eval_has_its_log_probs_lengths_and_answer():
    _, rows = harness_rows('endings')
    row = rows[2]       # Im Café trank er: einen süßen Tee., Öl., über.
    theirs = [float(x) for x, _ in row['filtered_resps']]
    for norm, lengths in (('sum', [1, 1, 1]), ('char', [16, 3, 5]), ('byte', [18, 4, 6])):
        sample = harness_sample(row, norm)
        assert (sample['log_probs'], sample['n_tokens']) == (theirs, lengths)
        assert sample['options'] == [' einen süßen Tee.', ' Öl.', ' über.']
        assert sample['answer'] == 0 and sample['id'] == f'2:{row["doc_hash"][:16]}'
    # the answer of two contexts, of an option's text, and of log-probabilities beside others
    assert [harness_sample(row)['answer'] for row in harness_rows('gaps')[1]] == [0, 1]
    assert harness_sample(harness_rows('named')[1][0])['answer'] == 1
    unconditional = [harness_sample(row) for row in harness_rows('against_nothing')[1]]
    assert unconditional == [harness_sample(row) for row in rows]
    path, _ = harness_rows('trivia_animals')
    assert harness_task(path) == ('trivia', 'trivia_animals', '2026-' + path.stem[-21:])
    assert harness_task(path.with_name('mine.jsonl')) == ('samples', '', '')


def test_the_array_of_lm_eval_0_4_0_is_read_as_the_lines_of_later_versions(tmp_path):
    """It is named .jsonl; its rows have no hashes, and lists of [context, option]."""
    path, rows = harness_rows('endings')
    old = [{key: row[key] for key in ('doc_id', 'doc', 'target', 'resps', 'filtered_resps', 'acc')}
           | {'arguments': [[*call.values()] for call in row['arguments'].values()]}
           for row in rows]
    array = tmp_path / 'pretrained__first_endings.jsonl'
    array.write_text(json.dumps(old, indent=2, ensure_ascii=False))
    new = [sample for sample, _ in read_predictions(path, FileConfig(norm='byte'))]
    assert [sample | {'task': 'endings', 'subject': '', 'id': f'endings:{sample["id"]}'}
            for sample, _ in read_predictions(array, FileConfig(norm='byte'))] == [
                sample | {'subject': ''} for sample in new]
    assert run_metrics(array).stdout.splitlines()[1:] == run_metrics(path).stdout.splitlines()[1:]


def test_results_beside_the_samples_of_lm_eval_that_cannot_be_read_are_named(tmp_path):
    path, _ = harness_rows('trivia_animals')
    results = tmp_path / f'results_2026-{path.stem[-21:]}.json'
    for content, why in (('{"group', ':1: broken JSON'), ('[1]', ' is not what lm_eval wrote'),
                         ('{"group_subtasks": 3}', ' is not what lm_eval wrote')):
        results.write_text(content)
        with pytest.raises(DataError, match=f'[.]json{why}'):
            harness_task(tmp_path / path.name)
    results.write_text('{"group_subtasks": null}')
    assert harness_task(tmp_path / f'{path.name}.gz')[:2] == ('trivia_animals', 'trivia_animals')


def test_a_repeated_question_of_lm_eval_counts_once_and_two_models_are_not_mixed(tmp_path):
    path, rows = harness_rows('endings')
    once = run_metrics(path).stdout.splitlines()[1:]

    def report_of(rows):
        return run_metrics(write_rows(tmp_path / 'mine.jsonl', rows))

    by_filter = [row | {'filter': name} for row in rows for name in ('none', 'custom')]
    assert report_of(by_filter).stdout.splitlines()[1:] == once
    assert run_metrics(write_rows(tmp_path / 'x.parquet', rows)).stdout.splitlines()[1:] == once
    other = rows[1] | {'filtered_resps': rows[1]['filtered_resps'][::-1], 'acc': 1 - rows[1]['acc']}
    for change, why in (({'filter': 'custom'}, 'of the filters none and custom; keep the lines'),
                        ({}, 'of several models or calls; give each of them')):
        message = report_of([*rows, other | change]).stderr
        assert 'mine.jsonl:5: question 1:' in message and why in message
    # the two subtasks of each model are one task
    lines = run_metrics(*(harness_rows(f'trivia_{x}', model)[0] for model in ('first', 'second')
                          for x in ('animals', 'rivers'))).stdout.split('\n')
    titles = [i for i, line in enumerate(lines) if line and not lines[i - 1]]
    assert sorted(re.sub(', .*: ', ' ', lines[i].split('/')[-1]) for i in titles) == [
        'first trivia', 'second trivia']
    assert all(lines[i + 1].split() == ['n', '6'] for i in titles)


def test_rows_are_read_one_by_one_and_samples_of_an_earlier_prompt_left_out(tmp_path):
    row = {'probs': [0.7, 0.3], 'answer': 0}
    ours = {'task': 'mmlu', 'split': 'test', 'language': '', 'id': 'q', 'log_probs': [-1.0, -2.0],
            'answer': 1}
    path = write_rows(tmp_path / 'a.jsonl', [row | {'id': 'p'}, ours | {'prompt': 'old'},
                                             ours | {'prompt': 'new', 'id': 'r'},
                                             ours | {'prompt': 'new'}])
    found = [sample['id'] for sample, _ in read_predictions(path, FileConfig())]
    assert found == ['p', 'r', 'q']
    for name, lines in (('a.jsonl', f'{json.dumps(row)}\n' + 'x\n' * 99_999),
                        ('a.csv', 'probs_0,probs_1,answer\n0.7,0.3,0\n' + 'x\n' * 99_999)):
        (tmp_path / name).write_text(lines)
        samples = read_predictions(tmp_path / name, FileConfig())
        assert next(samples)[0]['probs'] == [0.7, 0.3]      # before the broken rows are read
        with pytest.raises(ValueError, match=f'{name}:[23]: '):
            next(samples)


@pytest.mark.slow
@needs_lm_eval
def test_metrics_of_a_task_are_those_of_our_report_on_its_samples(tmp_path):
    """With 2 to 5 choices of different length, as sums and divided by characters."""
    random = np.random.default_rng(1)
    rows = [{'question': f'{i}?', 'choices': [f'{"long " * random.integers(4)}{k}' for k in range(
        random.integers(2, 6))]} for i in range(300)]
    for row in rows:
        row['answer'] = int(random.integers(len(row['choices'])))
    data = write_rows(tmp_path / 'world.jsonl', rows)
    page = (HERE / 'docs' / 'metrics.md').read_text()
    listed = re.search(r'^task: arc_easy_calibration\nmetric_list:\n(.*?)```', page, re.S | re.M)[1]
    names = [measure.key + end for measure in metrics.MEASURES for end in ('', '_norm')]
    names += [f'{measure.key}_norm_boot_{end}' for measure in metrics.MEASURES if measure.tables
              for end in ('low', 'high')]
    lines = [f'  - {{metric: {name}, aggregation: {name}, higher_is_better: false}}\n'
             for name in names if f'{{metric: {name},' not in listed]
    (tmp_path / 'world.yaml').write_text(
        program('task of lm-eval', file=data) + listed + ''.join(lines))
    run = runpy.run_path(str(HARNESS_FILES / 'write.py'))['RUN']
    (tmp_path / 'run.py').write_text(program('our metrics in lm-eval') + run)
    done = subprocess.run(
        [sys.executable, 'run.py', HERE, '--model', 'dummy', '--tasks', 'world', '--include_path',
         tmp_path, '--output_path', 'out', '--log_samples'], cwd=tmp_path, text=True,
        capture_output=True, env={**os.environ, 'HF_DATASETS_OFFLINE': '1', 'HF_HUB_OFFLINE': '1',
                                  'HF_HOME': str(tmp_path / 'cache')})
    assert done.returncode == 0, done.stderr[-3000:]
    (results,), (samples,) = (tmp_path.glob(f'out/**/{name}') for name in (
        'results_*.json', 'samples_*.jsonl'))
    theirs = json.loads(results.read_text())['results']['world']
    for end, norm in (('', 'token'), ('_norm', 'char')):
        run = runs.predicted_run(samples.parent, {'world': samples}, FileConfig(norm=norm))
        ours = report.summarize(run.file_samples['world'], run.results['world']['norm'],
                                all_metrics=True)
        for measure in metrics.MEASURES:
            found = theirs[f'{measure.key}{end},none']
            assert found == pytest.approx(ours['pooled'][measure.key], abs=1e-9), measure.key
            if measure.tables and end:
                low, high = expected = ours['pooled']['intervals'].get(measure.key, [np.nan] * 2)
                ends = [theirs[f'{measure.key}{end}_boot_{word},none'] for word in ('low', 'high')]
                # the same questions in another order, so other resamples of them
                off = 0.15 * (high - low)
                assert ends == pytest.approx(expected, abs=off, nan_ok=True), measure.key
