"""report.py: samples to tables, intervals and diagrams"""

import csv
import json
import re

import numpy as np
import pytest
import metrics
from compare import scaling
import stats
from common import refused, write_rows, write_run
from results import columns, evaluation, plots, report, samples, tables
from runtime import processes
from runtime.errors import DataError


def question(i=0, **more):
    return {'task': 'mmlu', 'split': 'test', 'language': '', 'id': f'q{i}', 'prompt': 'p',
            'answer': i % 2, 'options': [' A', ' B'], 'log_probs': [-1.0 - 0.1 * i, -2.0],
            'n_tokens': [1, 1]} | more


TOKEN = {'task': 'clm', 'split': 'test', 'language': '', 'id': 't0', 'prompt': 'p',
         'confidence': 0.5, 'correct': True, 'log_prob': -0.7, 'entropy': 1.0}


def result(**more):
    samples = [question(i) for i in range(6)]
    return report.summarize(samples, 'token', n_bootstrap=20) | {
        'distribution': 'mmlu, 5 shots, letters, token', 'norm': 'token', 'bad_rows': 0} | more


def test_a_repeated_sample_counts_once(tmp_path):
    path = tmp_path / 'samples.jsonl'
    # another prompt is another question: the last one counts, also if it was asked before
    new, again = question(0, prompt='new'), question(0, log_probs=[-1.00001, -2.0])
    for rows, read, latest in (
            ([question(0), question(1), question(0)], [question(0), question(1)], None),
            ([question(0), question(1), new], None, [question(1), new]),
            ([question(0), new, again], None, [again])):
        write_rows(path, rows)
        assert samples.read_samples(path) == (read or rows)
        assert samples.latest_samples(rows) == latest or latest is None
    write_rows(path, [question(0), question(1), again])
    with pytest.raises(DataError, match=r'samples.jsonl:3: differs from .*samples.jsonl:1, .*q0'):
        samples.read_samples(path)


def test_a_line_has_a_checksum_of_its_content(tmp_path):
    row = question(0) | {'context': 'a lone \udc80, ä and 1e-7', 'line_checksum': 'of another file'}
    path = tmp_path / 'samples.jsonl'
    with open(path, 'wb', buffering=0) as file:
        samples.append_line(file, row)
    whole = path.read_bytes()
    # in another order or layout it is the same content
    for text in (whole, json.dumps(json.loads(whole), sort_keys=True).encode() + b'\n'):
        path.write_bytes(text)
        assert samples.read_samples(path) == [question(0) | {'context': row['context']}]
    edited = [whole[:i] + bytes([byte ^ 1]) + whole[i + 1:] for i, byte in enumerate(whole)
              if chr(byte).isdecimal()]
    for line in (*edited, re.sub(rb', "line_checksum.*"', b'', whole), b'[1]\n', b'{"a"\n', b'\n'):
        path.write_bytes(line)
        with pytest.raises(DataError, match='samples.jsonl:1: damaged, edited or .* line_checksum'):
            samples.read_samples(path)


def test_nothing_is_cut_from_samples_where_the_command_is_refused(tmp_path):
    samples.open_folder(tmp_path, {}, {}, pictures=False, overwrite=False)      # owns its files
    (tmp_path / 'scaling.json').write_text('mine')
    with refused(tmp_path, 'scaling.json was not written by this program'):
        samples.open_folder(tmp_path, {}, {}, pictures=False, overwrite=False, fit=True)
    path = write_rows(tmp_path / 'samples.jsonl', [question(0), question(1)])
    whole = path.read_bytes()
    for content in (whole.replace(b'q0', b'q9') + b'{"cut', whole[:-1].replace(b'q0', b'q9')):
        path.write_bytes(content)
        with pytest.raises(DataError, match='samples.jsonl:1: damaged'):
            samples.open_folder(tmp_path, {}, {}, pictures=False, overwrite=False)
        assert path.read_bytes() == content
    for content, read in ((whole[:-1], whole), (whole + b'{"cut', whole)):
        path.write_bytes(content)       # an editor left out the last line break
        samples.merge_parts(path)
        assert path.read_bytes() == read


def test_names_of_pictures_fit_a_folder():
    for task in ('x' * 300, '漢' * 240, 'a/../b', 'mmlu'):
        name = samples.grid(task)
        assert len(name.encode()) < 200 and '/' not in name
    assert name == 'reliability-mmlu-languages.png'
    assert samples.picture('x' * 300) != samples.picture('x' * 301)
    assert len({*map(samples.picture, ('a/b', 'a_b', 'a\\b', 'a\ud83db'))}) == 4


def test_metrics_are_computed_again_if_their_code_changed(capsys):
    rows = [question(i) for i in range(6)]
    earlier = {'mmlu': result(n_bootstrap=20, seed=0)}
    edited = {'mmlu': earlier['mmlu'] | {'measured_by': 'other code', 'pooled': {'n': 6}}}
    for results, scored, same in ((earlier, rows, earlier), (edited, rows, earlier),
                                  (edited, rows[1:], {}),       # other samples
                                  (earlier, [rows[0] | {'answer': 1}, *rows[1:]], {})):
        again = evaluation.measure_again(results, {'mmlu': scored})
        assert json.dumps(again, sort_keys=True) == json.dumps(same, sort_keys=True)     # with NaN
    assert capsys.readouterr().out.count(
        'mmlu: its metrics are computed again from samples.jsonl') == 1


def test_intervals_do_not_depend_on_the_number_of_cores(monkeypatch):
    random = np.random.default_rng(0)
    groups = {n: report.Predictions(random.random(n), random.random(n) < 0.5) for n in (50, 2100)}
    reports, resampled = report.measure(groups, 20, 0)
    right = reports[2100]['intervals']
    assert right['accuracy'] == pytest.approx(np.percentile(
        resampled[2100]['accuracy'], (2.5, 97.5)).tolist(), abs=1e-12)
    for n_cores in (1, 3, 64):
        monkeypatch.setattr(processes, 'cores', lambda n=n_cores: n)
        assert report.measure(groups, 20, 0)[0][2100]['intervals'] == right


@pytest.mark.parametrize('n, has_interval', [(9, False), (10, True)])
def test_small_groups_have_no_intervals_where_these_would_not_hold(n, has_interval):
    for key in ('rmsce', 'mad'):        # which need 10,000 questions
        assert bool(stats.no_interval(report.PRINTED[key], 9990 + n, 0.5)) != has_interval
    rows = [question(i, id=f'{subject}{i}', subject=subject, answer=(i + len(subject)) % 2)
            for subject, count in (('law', 40), ('logic', n)) for i in range(count)]
    macro = report.summarize(rows, 'token', n_bootstrap=50)['macro']
    assert ('intervals' in macro) == has_interval
    assert [*report.cells([('macro', macro)])[0]].count('95 % interval') == has_interval


def test_a_question_in_several_languages_is_one_question(monkeypatch):
    """It is drawn once for all languages, counted once, and in one half of a scaling's fits."""
    random, halves, fit = np.random.default_rng(0), [], scaling.fit_platt
    monkeypatch.setattr(scaling, 'fit_platt', lambda *rows: halves.append({*rows[0]}) or fit(*rows))
    rows = [question(i, language=language, answer=random.integers(2).item(),
                     log_probs=[i / 100, -1]) for language in ('de', 'en') for i in range(60)]
    del rows[7]                             # not every language has every question
    # of rows with one id in a file
    rows += [rows[9] | {'id': 'q10#2'}, rows[-1] | {'id': 'q59#3'}]
    summary = report.summarize(rows, 'token', n_bootstrap=30, fit=True)
    pooled = summary['pooled']
    assert (pooled['n'], pooled['questions']) == (121, 60)
    assert report.cells([('pooled', pooled), ('de', summary['languages']['de'])])[1:] == [
        ('pooled', '60', *report.cells([('pooled', pooled)])[1][2:]),
        ('de', '59', *report.cells([('de', summary['languages']['de'])])[1][2:])]
    p = report.predictions(sorted(rows, key=samples.sample_order), 'token')
    assert [pooled['accuracy_low'], pooled['accuracy_high']] == pytest.approx(stats.share_interval(
        p.probs.argmax(1) == p.labels, p.questions[0]))
    # the same interval in report.html and LaTeX
    assert '{accuracy:.3f} [{accuracy_low:.3f}, {accuracy_high:.3f}]'.format(**pooled) in (
        report.cells([('pooled', pooled)], intervals=True)[1])
    assert [len(x) for x in halves[:2]] == [30, 30] and not halves[0] & halves[1]
    assert 'post_hoc' not in report.summarize(rows[:1], 'sum', n_bootstrap=0, fit=True)
    # what is drawn of one language is drawn of the other
    same = report.predictions([s | {'answer': 0} for s in rows], 'token')
    drawn = [same.at(np.flatnonzero(report.names_of(rows, 'language') == name)).bootstrap(9, 0)
             for name in ('de', 'en')]
    assert np.corrcoef(*(x['confidence'] for x in drawn))[0, 1] > 0.9


def test_conformal_sets_of_a_group_have_the_thresholds_of_all_rows():
    """Pooled, the coverage is 0.9 by construction; a language that is known less has less."""
    random = np.random.default_rng(0)
    probs = metrics.softmax(random.normal(size=(400, 4)) * 2)
    answers = {'sw': random.integers(4, size=400), 'en': [random.choice(4, p=p) for p in probs]}
    rows = [question(i, options=[' A', ' B', ' C', ' D'], n_tokens=[1] * 4, language=language,
                     answer=int(answers[language][i]), log_probs=np.log(probs[i]).tolist())
            for k, language in enumerate(('en', 'sw')) for i in range(k, 400, 2)]
    rows.sort(key=samples.sample_order)
    summary = report.summarize(rows, 'token', n_bootstrap=50)
    p = report.predictions(rows, 'token')
    covered = metrics.conformal_sets(p.probs, p.labels, p.n_options)[np.arange(400), p.labels]
    for name, low, high in (('sw', 0, 0.85), ('en', 0.95, 1)):
        group = summary['languages'][name]
        assert group['lac_coverage'] == covered[[s['language'] == name for s in rows]].mean()
        ends = group['intervals']['lac_coverage']
        assert ends[0] <= group['lac_coverage'] <= ends[1]
        assert low < group['lac_coverage'] < high
    assert summary['pooled']['lac_coverage'] == 0.9


def test_notes_below_a_table_name_what_was_left_out():
    many = result(option_mass=0.004)        # of whole texts, which says nothing of the prompt
    many['pooled']['n'] = 1000
    del many['pooled']['no_interval']
    expected = ['the options together have a mean probability of 0.004']
    assert report.notes(many) == expected
    expected[0] += '; with so little, another scoring or prompt may suit the model better'
    many |= {'distribution': 'mmlu, 0 shots, options scored by letters', 'shots': 0, 'chance': 0.25}
    assert report.notes(many | {'pooled': many['pooled'] | {'accuracy_low': 0.26}}) == expected
    included = 'the 95 % interval, 0.240-0.260, includes the accuracy of guessing'
    for high, verdict in ((0.26, included), (0.25, 'this is no better than guessing')):
        _, advice = report.notes(many | {'pooled': many['pooled'] | {'accuracy_low': 0.24,
                                                                     'accuracy_high': high}})
        assert advice.startswith(f'{verdict} (0.250); ') and '--shots=5' in advice
    many['pooled']['n'] = 50
    assert any('bins of 100 questions, so 1 bin here' in line for line in report.notes(many))
    many['pooled']['questions'] = 20
    assert any('bins of 100 answers, so 1 bin' in line for line in report.notes(many))


def test_no_interval_is_printed_for_few_right_or_wrong_answers_and_a_note_says_why():
    random = np.random.default_rng(0)
    rows = []
    for i in range(150):        # half of 120 English answers are right, all 30 Swahili ones
        language, wrong = ('sw', 0) if i >= 120 else ('en', i % 2)
        p = random.uniform(0.5, 0.9)
        rows.append(question(i, language=language, answer=wrong,
                             log_probs=np.log([p, 1 - p]).tolist()))
    summary = report.summarize(rows, 'token', n_bootstrap=50) | {
        'distribution': 'mmlu', 'norm': 'token'}
    few, class_wise = 'fewer than 30 right or 30 wrong', 'fewer than 100 right or 100 wrong'
    swahili, english = (summary['languages'][name] for name in ('sw', 'en'))
    assert {*swahili['intervals']} >= {'accuracy', 'nll', 'brier'}
    assert swahili['no_interval'].items() >= {'ece': few, 'sce': few, 'ace': class_wise}.items()
    assert {*english['intervals']} >= {'ece', 'sce'}
    assert english['no_interval']['ace'] == class_wise
    # the mean over languages has one where every language has
    assert summary['macro']['no_interval']['ece'] == f'{few} in a group'
    assert 'accuracy' in summary['macro']['intervals']
    tasks = {'mmlu': summary}
    note = rf'no 95 % interval of ECE, [^\n]*SCE[^\n]* \({few}\): sw\n'
    assert all(re.search(note, text) for text in (
        report.to_text(tasks, tasks), report.section('mmlu', tasks).as_markdown()))
    row, = (line for line in csv.DictReader(report.to_csv(tasks).splitlines())
            if line['name'] == 'sw')
    assert row['ece_boot_low'] == '' and f'ece: {few}; ' in row['no_interval']


def tabulars(text):
    """The rows of the tables in LaTeX as lists of cells; it is checked to be well-formed."""
    assert text.isascii() and re.sub(r'\\[{}]', '', text).count('{') == re.sub(
        r'\\[{}]', '', text).count('}')
    found = re.findall(r'\\begin\{tabular\}\{(l?r*)\}\n\\toprule\n(.*?)\n\\midrule\n(.*?)'
                       r'\n\\bottomrule\n\\end\{tabular\}', text, re.DOTALL)
    assert len(found) == text.count('tabular}') // 2
    tables = []
    for alignment, head, body in found:
        rows = [head, *body.split('\n')]
        assert all(row.endswith(r' \\') for row in rows)
        cells = [re.split(r' (?<!\\)& ', row.removesuffix(r' \\')) for row in rows]
        assert {len(row) for row in cells} == {len(alignment)}
        tables.append(cells)
    return tables


def test_latex_escapes_everything():
    lines = [('a_b', '95 % [x]', '#1'), ('[run]', '$5 & ~{^}', r'C:\x'),
             ('*', '-0.5 ± 0.1, p 2e-05', '-1 +2'), ('', 'a|b<c>', '--limit Llama-3-8B')]
    table, = tabulars(tables.latex(lines))
    assert table == [
        [r'a\_b', r'95 \% {[}x]', r'\#1'],
        ['{[}run]', r'\$5 \& \textasciitilde{}\{\textasciicircum{}\}', r'C:\textbackslash{}x'],
        ['{*}', r'$-$0.5 $\pm$ 0.1, p 2e-05', '$-$1 +2'],
        ['', r'a\textbar{}b\textless{}c\textgreater{}', '-{}-limit Llama-3-8B']]


def test_the_best_of_each_group_is_marked():
    heading = columns.Heading
    lines = [('run', heading('accuracy', 'MMLU accuracy'), heading('ece'), heading('gap')),
             ('a', '0.50 ± 0.1', '0.10 [0.05, 0.20]', '0.1'), ('a', '0.60 ± 0.1', '0.10', '0.2'),
             ('a', '0.60 ± 0.3', '0.20', '0.3'), ('a', '', 'nan', ''),
             ('b', '0.01', '0.01', '0.01'), ('c', '0.3', '0.3', ''), ('c', '0.3', '0.4', '')]
    marked = tables.mark_best(lines, [line[0] for line in lines[1:]])
    stars = {(i, j) for i, line in enumerate(marked) for j, cell in enumerate(line)
             if cell.endswith(' *')}
    assert stars == {(2, 1), (3, 1), (1, 2), (2, 2), (6, 2)}
    assert [[c.removesuffix(' *') for c in line] for line in marked] == [*map(list, lines)]
    assert tabulars(tables.latex([('run', 'ECE'), ('a', '0.102 [0.091, 0.113] *')])) == [
        [['run', 'ECE'], ['a', r'\textbf{0.102}\confint{0.091}{0.113}']]]


def test_a_picture_that_fails_is_a_warning_and_certain_answers_give_none(tmp_path, capsys):
    right = report.Predictions(np.full(12, 0.95), np.ones(12, bool))    # interval ends at 1 - 2e-16
    plots.draw_reliability(tmp_path / 'a.png', [('right', right)])
    assert (tmp_path / 'a.png').read_bytes().startswith(b'\x89PNG') and not capsys.readouterr().err
    (tmp_path / 'reliability.png').mkdir()
    plots.draw_reliability(tmp_path / 'reliability.png', [('right', right)])
    assert 'reliability.png was not written: IsADirectoryError' in capsys.readouterr().err


@pytest.mark.slow
def test_a_reliability_diagram_has_bars_gaps_and_intervals(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(plots, 'save_figure', lambda figure, *rest: figures.append(figure))
    random = np.random.default_rng(6)
    plots.draw_reliability(tmp_path / 'a.png', [
        (f'{"a" * 60} $\\x$ {i}', report.Predictions(
            metrics.softmax(random.normal(size=(i + 1, 4))), random.integers(4, size=i + 1)))
        for i in range(6)])
    figure, = figures
    labels = {text.get_text() for legend in figure.legends for text in legend.get_texts()}
    assert labels >= {'overconfident: confidence above accuracy', 'accuracy of the bin',
                      '95 % Wilson interval of the accuracy'}
    assert len([ax for ax in figure.axes if ax.axison]) == 2 * 6
    # the bin of the one question of the first panel: an interval of more than half the axis
    top = figure.axes[0]
    (segment,) = [x for c in top.collections for x in c.get_segments()]
    assert abs(segment[1][1] - segment[0][1]) > 0.5 and 'n = 1' in top.get_title()
    figure.draw_without_rendering()    # no mathematics in a name


def test_runs_are_reported_side_by_side(tmp_path, monkeypatch, capsys):
    """One table per task; validation questions are in no diagram, a run may have no results."""
    runs, tested = {'none': (None, tmp_path)}, {}
    for name, sharpness in (('before', 1.0), ('after', 2.0)):
        folder = write_run(tmp_path / name, sharpness=sharpness, held_out=9)
        rows = sorted(samples.read_samples(folder / 'samples.jsonl'), key=samples.sample_order)
        runs[name] = {'tasks': {'mmlu': report.summarize(rows, 'token', n_bootstrap=10) | {
            'norm': 'token', 'distribution': 'mmlu, x'}}}, folder
        tested[name] = report.predictions([s for s in rows if s['split'] == 'test'], 'token')
    drawn = {}
    monkeypatch.setattr(report, 'draw_reliability',
                        lambda path, panels: drawn.update({path.name: panels}))
    report.print_report(runs, tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in (lines[2], *lines[4:7])] == [
        ['run', 'questions'], ['before', '40'], ['after', '40'], ['RMSCE', 'and']]
    before, after = tested['before'], tested['after']
    t = scaling.fit_temperature_to_base(after.scores, before.scores)
    ece = metrics.ece(metrics.softmax(after.scores, t), after.labels)
    assert lines[-1] == (f'temperature without labels, from the answers that stayed the same: '
                         f'{t:.3f}; with it the ECE is {ece:.3f}')
    assert [(name, len(p.labels)) for name, p in drawn['reliability-mmlu.png']] == [
        ('before', 40), ('after', 40)]
