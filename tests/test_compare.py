"""compare/compare.py and over_seeds.py: differences over questions and over seeds"""

import itertools
import re

import numpy as np
import pytest
import metrics
from common import results_of, write_results, write_rows, write_run
from research.common import read_csv
from compare import compare, over_seeds, significance
from results import samples
from runtime.errors import ConfigError, DataError
from test_prediction_files import HARNESS_FILES, harness_rows
from test_report import TOKEN, tabulars


MEASURES = '--metrics=accuracy,entropy_bits,ece,rmsce'      # by default, and those that you add


@pytest.fixture(autouse=True)
def undrawn(monkeypatch):
    """Pictures take most of the time of a comparison: they are drawn where a test undoes this."""
    for name in ('draw_reliability', 'draw_curves'):
        monkeypatch.setattr(compare, name, lambda *_: False)


def run_compare(*arguments):
    compare.main([*map(str, arguments)])


def compare_csv_of(folders, out, *arguments):
    run_compare(*folders, *arguments, f'--out_dir={out}')
    return read_csv(out / 'compare.csv')


@pytest.mark.slow
def test_runs_of_one_seed_are_compared_over_questions(tmp_path, capsys, monkeypatch):
    monkeypatch.undo()
    languages = 'de', 'en', 'sw'
    a, b = (write_run(tmp_path / name, languages=languages, n=90, settings=settings)
            for name, settings in (('a', {}), ('sharp', {'smoothing': 0.1, 'base_smoothing': 0.5})))
    write_rows(b / 'samples.jsonl', [row | {'log_probs': [5 * x for x in row['log_probs']]}
                                     for row in samples.read_samples(a / 'samples.jsonl')])
    rows = compare_csv_of([a, b], tmp_path / 'out', MEASURES, '--n_bootstrap=200')
    printed = capsys.readouterr().out
    assert '\nmmlu (prompt format mmlu, 5 shots, letters, token)\n' in printed
    assert all((tmp_path / 'out' / f'{kind}-mmlu.png').read_bytes().startswith(b'\x89PNG')
               for kind in ('reliability', 'curves'))
    assert [r['language'] for r in rows[::2]] == [*languages, 'pooled']
    first, second = rows[6:]
    assert first['accuracy'] == second['accuracy'] and second['smoothing'] == '0.1'
    assert [row['base_smoothing'] for row in rows[6:]] == ['', '0.5']
    lines = [line.split() for line in printed.split('\n') if line.startswith('sharp - a')]
    assert len(lines) == 8      # four metrics, over questions and over languages
    accuracy, _, ece, rmsce = (line for line in lines if line[3] == 'questions')
    assert accuracy[6:] == ['+0.0000', '+0.0000', '+0.0000', '1.000', '1.000']
    assert float(ece[6]) == pytest.approx(float(second['ece']) - float(first['ece']), abs=1e-4)
    assert float(ece[-2]) < 0.02 and float(ece[-1]) == pytest.approx(3 * float(ece[-2]), abs=3e-3)
    # RMSCE has no interval and no p below 10,000 questions
    assert rmsce[5:] == ['RMSCE', f'{float(second["rmsce"]) - float(first["rmsce"]):+.4f}']
    assert 'no interval of RMSCE (N below 10,000)\n' in printed


@pytest.mark.slow
def test_an_ensemble_is_one_more_row(tmp_path, capsys):
    folders = [write_run(tmp_path / name, seed=seed, languages=('de', 'en'), n=60)
               for seed, name in enumerate('abc')]
    rows = [samples.read_samples(folder / 'samples.jsonl') for folder in folders]
    for row in itertools.chain(*rows):
        row['context'] = f'{row["id"]} in {row["language"]}'
    for row in rows[1]:     # options of several tokens, which are scored with another norm
        row['n_tokens'] = [1, 2, 3, 1]
    rows[1][0]['options'] = [' A', ' B', ' C', ' x']    # another question
    rows[2][1]['answer'] = (rows[2][1]['answer'] + 1) % 4
    for folder, of_run in zip(folders, rows, strict=True):
        write_rows(folder / 'samples.jsonl', of_run)
    probs = [metrics.softmax([s['log_probs'] / np.array(s['n_tokens']) for s in of_run])
             for of_run in rows]
    mean, labels = np.mean(probs, 0)[2:], np.array([s['answer'] for s in rows[0]])[2:]

    *_, row = compare_csv_of(folders, tmp_path / 'out', MEASURES, '--ensemble', '--n_bootstrap=50')
    assert (row['run'], row['model'], row['n']) == ('ensemble of 3', 'base', '118')
    for key in ('accuracy', 'ece', 'entropy_bits', 'nll'):
        assert float(row[key]) == pytest.approx(metrics.report(mean, labels)[key], rel=1e-9), key
    lines = [x for x in capsys.readouterr().out.split('\n') if x.startswith('ensemble of 3 - ')]
    assert len(lines) == 3 * 8 and {x.split()[6] for x in lines if ' questions ' in x} == {'60'}


def test_latex_of_a_comparison_marks_the_best(tmp_path, monkeypatch, capsys):
    drawn, out = {}, tmp_path / 'out'
    monkeypatch.setattr(compare, 'draw_reliability', lambda path, panels: drawn.update(
        {path.name: [title for title, _ in panels]}))
    a, b = write_run(tmp_path / 'run_a'), write_run(tmp_path / 'b', sharpness=3.0)
    write_run(a, result={'sample': {'questions': 40, 'of': 500}})
    *lines, ensemble = compare_csv_of([a, b], out, MEASURES, '--n_bootstrap=20', '--ensemble')
    assert [line.get('sample_of') for line in (*lines, ensemble)] == ['500', '', '500']
    assert drawn == {'reliability-mmlu.png': ['run_a (sample)', 'b', 'ensemble of 2 (sample)']}
    table, differences, changes = tabulars((out / 'compare.tex').read_text())
    column = table[0].index('ECE')
    assert table[1][0] == r'run\_a'
    best = min((*lines, ensemble), key=lambda line: float(line['ece']))['run'].replace('_', r'\_')
    assert [row[0] for row in table[1:] if row[column].startswith(r'\textbf{0.')] == [best]
    assert differences[1][0] == r'b - run\_a' and changes[1][:2] == [r'run\_a to b', '40']
    for text in (capsys.readouterr().out, *((out / f'compare.{x}').read_text()
                                            for x in ('md', 'tex'))):
        assert text.count('sample of 40 of 500 questions') == 1
        assert "Cochran's Q" not in text        # of two runs


def test_answers_that_change_are_counted_and_tested(tmp_path, capsys):
    """Over shared questions only, with McNemar's p, Holm's correction, and Cochran's Q of three."""
    folders = [write_run(tmp_path / name, n=60) for name in 'abc']
    rows = samples.read_samples(folders[0] / 'samples.jsonl')
    right = np.random.default_rng(0).random((3, 60)) < [[0.8], [0.5], [0.4]]
    for folder, correct in zip(folders, right, strict=True):
        for i, (row, good) in enumerate(zip(rows, correct, strict=True)):
            p = np.full(4, 0.1)
            p[(row['answer'] + (not good)) % 4] = 0.7
            other = folder.name if i >= 50 and folder.name == 'c' else ''
            row |= {'log_probs': np.log(p).tolist(), 'question': f'h{i}{other}'}
        write_rows(folder / 'samples.jsonl', rows[::-1])
    compare_csv_of(folders, tmp_path / 'out', '--n_bootstrap=5')
    printed, p_values = capsys.readouterr().out, {}
    for a, b, n in ((0, 1, 60), (0, 2, 50), (1, 2, 50)):
        first, second = right[a, :n], right[b, :n]
        line, = (x.split() for x in printed.splitlines()
                 if x.startswith(f'{"abc"[a]} to {"abc"[b]}'))
        lost, won, p = significance.mcnemar(first, second)
        low, high = metrics.wilson_interval(np.ones(n), first & ~second)
        assert line[3:-1] == [str(n), str(won), str(lost), f'{lost / n:.4f}', f'{low:.4f}',
                              f'{high:.4f}', f'{p:.2g}']
        p_values[p] = line[-1]
    assert [f'{p:.2g}' for p in significance.holm([*p_values])] == [*p_values.values()]
    q, p = significance.cochran_q(right[:, :50])
    assert (f"Cochran's Q of equal accuracy, over the 50 questions that all runs have: {q:.2f}, "
            f'p {p:.2g}') in printed


def test_the_same_answers_in_eight_languages_tell_no_more_than_in_one(tmp_path, capsys):
    """Interval, p, McNemar's p and Cochran's Q are those of the questions, not of the rows."""
    shown = []
    for languages in ([''], [*'abcdefgh']):
        folders = [write_run(tmp_path / str(len(languages)) / name, n=60, seed=seed, result={
            'pooled': {'n': 60 * len(languages)}}) for seed, name in enumerate('abc')]
        for folder in folders:
            rows = samples.read_samples(folder / 'samples.jsonl')
            write_rows(folder / 'samples.jsonl', [row | {'language': language} for row in rows
                                                  for language in languages])
            (folder / 'train_config.py').write_text('seed = 0')
        compare_csv_of(folders, tmp_path / 'out', '--n_bootstrap=200', '--metrics=accuracy,brier')
        lines = capsys.readouterr().out.splitlines()
        shown.append([line.split() for line in lines if ' questions ' in f'{line} '
                      and line.startswith(('b - a', 'c - ', "Cochran's"))])
        shown[-1] += [[*line.split()[:4], *line.split()[6:]] for line in lines
                      if line.startswith(('a to', 'b to'))]
    assert shown[0] == shown[1] and len(shown[0]) == 6 + 1 + 3
    assert any(line.startswith('480 answers in 60 questions') for line in lines)
    assert any(line.startswith("Student's t over languages takes them") for line in lines)


def test_folders_and_files_that_cannot_be_compared(tmp_path, monkeypatch):
    a, b = write_run(tmp_path / 'a'), write_run(tmp_path / 'b', sharpness=2.0)
    (tmp_path / 'empty').mkdir()
    good, rows = harness_rows('endings')
    written, written_rows = harness_rows('written')
    own = write_rows(tmp_path / 'own.jsonl', rows)
    wrong = write_rows(tmp_path / 'wrong.jsonl', [rows[0], rows[1] | {'acc': 0.5}])
    for sources, message in (
            ([a], 'needs two runs or more: .*; there is .*/a'),
            ([a, tmp_path / 'empty'], '/empty holds no run'), ([a, b, a], '/a is named twice'),
            ([a, b, '--metrics=ece,acuracy'],
             "metrics: there is no 'acuracy'; there are accuracy, "),
            ([a, b, '--metrics=ece,ece'], "metrics: 'ece' is named twice"),
            # of lm-evaluation-harness
            ([good, written], 'needs two runs or more'),
            ([good, wrong], "wrong.jsonl:2: its target, '1', is not the only right option"),
            ([good, own], 'no task in common: first: endings; own.jsonl: samples')):
        with pytest.raises((ConfigError, DataError), match=message):
            run_compare(f'--out_dir={tmp_path / "out"}', *sources)
        assert good in sources or not (tmp_path / 'out').exists()
    # relative paths and ~
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('HOME', str(tmp_path))
    run_compare('a', '~/b', '--out_dir=~/home', '--n_bootstrap=10')
    assert (tmp_path / 'home' / 'compare.md').exists()


def test_tasks_that_a_run_lacks_are_left_out(tmp_path, capsys):
    a, b = write_run(tmp_path / 'a'), write_run(tmp_path / 'b', sharpness=2.0)
    c = write_run(tmp_path / 'c', task='arc')
    tokens = [TOKEN | {'id': str(i), 'token': i} for i in range(9)]
    for folder, more in ((a, [*samples.read_samples(c / 'samples.jsonl'), *tokens]), (b, tokens)):
        path = folder / 'samples.jsonl'
        write_rows(path, [*more, *samples.read_samples(path)])
        entry = {'distribution': 'top token', 'norm': 'token', 'unit': 'tokens'}
        results, counts = results_of(folder), {'clm': 9, 'arc': len(more) - 9}
        tasks = {task: entry | {'pooled': {'n': n}} for task, n in counts.items() if n}
        write_results(folder, results | {'tasks': tasks | results['tasks']})
    rows = compare_csv_of([a, b], tmp_path / 'out', '--n_bootstrap=10', '--ensemble')
    said = capsys.readouterr().out
    assert 'arc is left out: not every run has it' in said and '\nclm (top token)\n' in said
    # the first task of the CSV has fewer metrics than the second, and no distributions to average
    assert [row['brier'] != '' for row in rows] == [False, False, True, True, True]
    assert '\nclm has no ensemble: its samples hold the probability of one token' in said


@pytest.mark.slow
def test_a_grid_has_a_line_for_each_combination_of_settings(tmp_path, capsys):
    """Two settings differ: the first is x, the second `by`; runs of one seed are paired."""
    grid, out = tmp_path / 'grid', tmp_path / 'out'

    def rows_of_grid(*arguments):
        lines = compare_csv_of([grid], out, *arguments)
        rows = [[cell.strip() for cell in line.split('|')[1:-1]]
                for line in (out / 'compare.md').read_text().splitlines()]
        return lines, rows[0], rows[2:]

    for seed, lr, smoothing in itertools.product(range(3), (1e-4, 1e-3), (0.0, 0.1)):
        write_run(grid / f'seed-{seed}' / f'tuned-{lr}-{smoothing}', seed=seed,
                  sharpness=1 + 500 * lr + smoothing,
                  settings={'lr': lr, 'batch_size': 32, 'smoothing': smoothing})
    lines, head, rows = rows_of_grid('--metrics=ece')
    assert '3 seeds, by smoothing, lr\n' in capsys.readouterr().out
    assert head == ['task', 'smoothing', 'lr', 'seeds', 'ECE', 'ECE minus that of lr 0.0001']
    assert [row[1:4] for row in rows] == [[smoothing, lr, '3'] for smoothing in ('0.0', '0.1')
                                          for lr in ('0.0001', '0.001')]
    ece = {(line['lr'], line['seed']): float(line['ece']) for line in lines
           if line['smoothing'] == '0.0'}
    d = [ece['0.001', seed] - ece['0.0001', seed] for seed in '012']
    mean, low, high = significance.mean_interval(d)
    assert [row[5] for row in rows[:2]] == ['', f'{mean:+.3f} ± {(high - low) / 2:.3f}, '
                                            f'p {significance.student_t(d)[2]:.1g}']
    # one of three seeds of a run is missing
    (grid / 'seed-0' / 'tuned-0.001-0.1' / 'results.json').unlink()
    assert [row[3] for row in rows_of_grid()[2]] == ['3', '3', '3', '2']


def test_a_difference_over_fewer_seeds_says_so():
    values = dict(zip('012', (0.1, 0.2, 0.3), strict=True))
    assert over_seeds.paired(values, values) == '+0.000 ± 0.000, p 1'
    assert over_seeds.paired(values, {'0': 0.0, '2': 0.1}).endswith(', 2 seeds')
    assert over_seeds.paired(values, {'1': 0.1}) == '+0.100, 1 seed'
    assert over_seeds.paired(values, {'5': 0.1}) == ''


@pytest.mark.slow
def test_models_of_lm_eval_are_compared(tmp_path, capsys):
    """Their accuracies are lm-eval's own: test_prediction_files.py."""
    for norm, sources in (
            ('token', [HARNESS_FILES / 'first', HARNESS_FILES / 'second']),
            ('char', [HARNESS_FILES])):      # a folder that holds both
        rows = compare_csv_of(sources, tmp_path / 'out', f'--norm={norm}', '--n_bootstrap=50')
        assert [(row['dataset'], row['run']) for row in rows] == [
            (task, run) for task in ('endings', 'gaps', 'trivia') for run in ('first', 'second')]
    printed = capsys.readouterr().out
    for line in ('\ntrivia (lm-evaluation-harness, sum)\n',
                 '\nendings (lm-evaluation-harness, char)\n',
                 '.jsonl is left out: not multiple choice',
                 '\nnamed is left out: not every run has it'):
        assert line in printed
    # of the six questions of trivia, 2 and 3 are right
    assert re.search(r'second - first +questions +6 +accuracy +\+0\.1667', printed)


ROWS = [{'probs': p, 'answer': k} for p, k in (
    ([0.9, 0.1], 0), ([0.2, 0.8], 0), ([0.6, 0.4], 1), ([0.3, 0.7], 1), ([0.55, 0.45], 0),
    ([0.1, 0.9], 1))]
NUMBERED = [row | {'id': i} for i, row in enumerate(ROWS)]
ASKED = [row | {'question': f'{i}?'} for i, row in enumerate(ROWS)]
STATED = [{'confidence': max(row['probs']), 'correct': i % 3 > 0} for i, row in enumerate(ROWS)]


@pytest.mark.parametrize('first, second, outcome', [
    (NUMBERED, NUMBERED[::-1], 6), (ASKED, ASKED[::-1], 6), (ROWS, ROWS, 6),
    (ASKED, [row | {'id': 9 - i} for i, row in enumerate(ASKED)], 6),
    ([row | {'id': f'q{i}'} for i, row in enumerate(STATED)],
     [row | {'id': f'q{i}'} for i, row in enumerate(ROWS)], 6),
    (NUMBERED, NUMBERED[:4], 4), (ASKED, ASKED[2:], 4),
    (NUMBERED, ROWS, 'a.jsonl has ids in all rows; b.jsonl has neither ids nor questions in all'),
    (ASKED, ROWS, 'a.jsonl has questions in all rows; b.jsonl has neither ids nor questions in'),
    ([*NUMBERED[:5], ROWS[5]], NUMBERED, 'a.jsonl has neither ids nor questions in all rows; b'),
    (ROWS, ROWS[:5], 'without ids, a.jsonl has 6 rows, b.jsonl has 5 rows'),
    (ROWS, [*ROWS[:5], ROWS[5] | {'answer': 0}], 'row 6 has the answer 1 in a.jsonl, 0 in b'),
    (NUMBERED, [row | {'id': row['id'] + 1} for row in NUMBERED], 'id 2 has the answer 1 in a'),
    ([{'id': i, 'probs': [0.7, 0.3], 'answer': 0} for i in range(6)],
     [{'id': i, 'probs': [0.6, 0.2, 0.2], 'answer': 0} for i in range(6)],
     'id 0 has 2 options in a.jsonl, 3 in b.jsonl'),
    (STATED, STATED, 'they have neither ids nor questions, and no answers to check their order by'),
    (ASKED, [*ASKED, ASKED[0]], 'b.jsonl has no ids, and a question twice'),
    # several answers to a question, which counts once
    ([*NUMBERED, NUMBERED[0]], NUMBERED, 6), (NUMBERED[:2] * 3, NUMBERED[:2] * 2, 2),
    ([*NUMBERED, NUMBERED[2] | {'id': 0}], NUMBERED, 'the id 0 is there twice, for different'),
    # one question in two languages
    *(([row | {'language': x} for row in NUMBERED for x in ('de', 'sw')][::step],
       [row | {'language': x} for x in ('sw', 'de') for row in NUMBERED], 6)
      for step in (1, -1))])
def test_rows_of_files_are_paired_by_what_both_have_or_refused(tmp_path, capsys, first, second,
                                                               outcome):
    """Never by numbers of rows beside ids, and in the same order whatever that of the files."""
    files = [write_rows(tmp_path / f'{name}.jsonl', rows) for name, rows in (
        ('a', first), ('b', second))]
    arguments = [*files, '--n_bootstrap=5', '--metrics=accuracy', f'--out_dir={tmp_path / "out"}']
    if isinstance(outcome, str):
        with pytest.raises(DataError, match=outcome):
            run_compare(*arguments)
        return
    run_compare(*arguments)
    line, = (x.split() for x in capsys.readouterr().out.splitlines() if x.startswith('a.jsonl to'))
    assert line[3] == str(outcome)
    if first[0].keys() & second[0].keys() >= {'probs'}:
        assert line[4:6] == ['0', '0']      # no answer has changed


@pytest.mark.parametrize('second, messages', [
    ([*ASKED[:5], ASKED[5] | {'answer': 0}],
     ['1 questions are left out of b.jsonl - a.jsonl: they have another right']),
    ([row | {'question': f'not {row["question"]}'} for row in ASKED],
     ['a.jsonl and b.jsonl have no question in common, and a', 'predictions has no ensemble: no'])])
def test_other_questions_and_right_answers_are_left_out(tmp_path, capsys, second, messages):
    files = [write_rows(tmp_path / 'a.jsonl', ASKED), write_rows(tmp_path / 'b.jsonl', second)]
    run_compare(*files, '--n_bootstrap=5', '--ensemble', f'--out_dir={tmp_path / "out"}')
    printed = capsys.readouterr().out
    assert all(message in printed for message in messages)
    with pytest.raises(DataError, match=f'compare: there is no {tmp_path}/nodir'):
        run_compare(files[0], tmp_path / 'nodir', f'--out_dir={tmp_path / "out"}')
    # its own table is no input that it may replace
    table = tmp_path / 'out' / 'compare.csv'
    table.write_text('id,confidence,correct\n1,0.5,1\n')
    with pytest.raises(ConfigError, match='compare.csv is compared, and would be replaced by'):
        run_compare(table, files[0], f'--out_dir={tmp_path / "out"}')
