"""results.py: samples to tables, intervals and diagrams"""

import csv
import io
import json

import numpy as np
import pytest

import metrics
import results
import train
from common import write_rows
from data import DataError


def question(i=0, **more):
    return {'task': 'mmlu', 'split': 'test', 'language': '', 'id': f'q{i}', 'prompt': 'p',
            'answer': i % 2, 'options': [' A', ' B'], 'log_probs': [-1.0 - 0.1 * i, -2.0],
            'n_tokens': [1, 1]} | more


TOKEN = {'task': 'clm', 'split': 'test', 'language': '', 'id': 't0', 'prompt': 'p',
         'confidence': 0.5, 'correct': True, 'log_prob': -0.7, 'entropy': 1.0}


def result(**more):
    samples = [question(i) for i in range(6)]
    return results.summarize(samples, 'token', n_bootstrap=20) | {
        'distribution': 'mmlu, 5 shots, letters, token', 'norm': 'token', 'bad_rows': 0} | more


def test_option_scores_norms():
    log_probs, options = np.array([-2.0, -6.0]), [' é', ' long']
    for norm, length in (('sum', (1, 1)), ('token', (1, 3)), ('char', (1, 4)), ('byte', (2, 4))):
        p = metrics.softmax(results.option_scores(log_probs, options, [1, 3], norm))
        score = np.exp(log_probs / np.array(length))
        assert np.allclose(p, score / score.sum())


# ------------------------------------------------------------------------------------------------
# Samples
# ------------------------------------------------------------------------------------------------

def test_a_sample_listed_twice(tmp_path):
    path = write_rows(tmp_path / 'samples.jsonl', [question(0), question(1), question(0)])
    assert results.read_samples(path) == [question(0), question(1)]
    # another prompt is another question: the last one counts
    write_rows(path, [question(0), question(1), question(0, prompt='new')])
    assert len(results.read_samples(path)) == 3
    assert results.last_asked(results.read_samples(path)) == [
        question(1), question(0, prompt='new')]
    write_rows(path, [question(0), question(1), question(0, log_probs=[-1.5, -2.0])])
    with pytest.raises(DataError, match=r'samples.jsonl:3: differs from .*samples.jsonl:1, .*q0'):
        results.read_samples(path)


@pytest.mark.parametrize('row, message', [
    ({'task': 'mmlu'}, 'it lacks id'),
    (question(log_probs=[-1.0]), 'must be lists with one value per option'),
    (question(log_probs='no'), 'must be lists with one value per option'),
    (question(log_probs=[None, -1.0]), 'log_probs must be finite numbers'),
    (question(log_probs=[float('nan'), -1.0]), 'log_probs must be finite numbers'),
    (question(answer=2), 'answer is 2; it must be a number below 2'),
    (question(answer=True), 'answer is True'),
    (TOKEN | {'confidence': '0.5'}, 'must be numbers'),
    ({k: v for k, v in TOKEN.items() if k != 'entropy'}, 'it lacks entropy')])
def test_a_damaged_sample_is_named(tmp_path, row, message):
    path = write_rows(tmp_path / 'samples.jsonl', [question(0), row, question(2)])
    with pytest.raises(DataError, match=f'samples.jsonl:2: .*{message}'):
        results.read_samples(path)


def test_only_a_cut_line_is_left_out(tmp_path):
    path = write_rows(tmp_path / 'samples.jsonl', [question(0), TOKEN])
    path.write_text(path.read_text() + '{"task": "mm')
    assert len(results.read_samples(path)) == 2
    path.write_text(path.read_text() + '\n')
    with pytest.raises(DataError, match='samples.jsonl:3: broken JSON'):
        results.read_samples(path)


def test_nll_of_sums_is_not_clipped():
    """Options of hundreds of nats: NLL from the log-probabilities, pooled, resampled and scaled."""
    samples = [question(i, log_probs=[-100.0 - i, -2.0], answer=i % 2) for i in range(8)]
    nll = np.mean([98 + i if i % 2 == 0 else 0 for i in range(8)])
    found = results.summarize(samples, 'sum', n_bootstrap=50, fit=True)
    assert found['pooled']['nll'] == pytest.approx(nll)
    low, high = found['pooled']['intervals']['nll']
    assert low < nll < high and high > 60
    temperatures = found['post_hoc']['temperature']
    assert found['post_hoc']['reports']['temperature']['nll'] < 5 and min(temperatures) > 20


# ------------------------------------------------------------------------------------------------
# Tables
# ------------------------------------------------------------------------------------------------

def test_a_sample_of_a_task_says_so():
    whole, part = result(), result(sample={'questions': 200, 'of': 14042})
    assert results.heading('mmlu', whole).startswith(
        'mmlu (preset mmlu, 5 shots, letters, token; the options together')
    assert 'sample of 200 of 14,042 questions' in results.heading('mmlu', part)
    tables = {'tasks': {'mmlu': whole, 'some': part}}
    assert '### some (preset mmlu, 5 shots, letters, token; sample of 200 of 14,042 questions' in (
        results.to_markdown(tables))
    rows = list(csv.DictReader(io.StringIO(results.to_csv(tables))))
    assert [(r['task'], r['sample_of']) for r in rows if r['kind'] == 'pooled'] == [
        ('mmlu', ''), ('some', '14042')]
    assert {r['distribution'] for r in rows} == {'mmlu, 5 shots, letters, token'}


def test_each_task_says_how_it_was_scored():
    other = result(distribution='harness, 0 shots, text, sum')
    tables = {'tasks': {'mmlu': result(), 'arc': other}}
    text = results.to_markdown(tables)
    assert '### mmlu (preset mmlu, 5 shots, letters, token;' in text
    assert '### arc (preset harness, 0 shots, text, sum;' in text
    old = result()
    del old['distribution']
    with pytest.raises(DataError, match='mmlu do not say how it was scored: .*; evaluate again'):
        results.heading('mmlu', old)


def test_notes_below_a_table():
    assert results.notes(result()) == []
    noted = result(duplicate_options=9, fewer_shots=2, bad_rows=1, first_bad='x.csv:3: no answer')
    text = results.task_text('mmlu', noted)
    for line in ('9 questions list the same option twice', '2 questions had fewer shots',
                 '1 bad rows left out, the first: x.csv:3: no answer'):
        assert f'\n{line}' in text
        assert f'\n{line}' in results.to_markdown({'tasks': {'mmlu': noted}})


def test_csv_of_lines_with_different_columns():
    assert results.csv_text([{'a': 1}, {'a': 2, 'b': 3}]) == 'a,b\n1,\n2,3\n'


# ------------------------------------------------------------------------------------------------
# Files and pictures
# ------------------------------------------------------------------------------------------------

def panels_of(n):
    random = np.random.default_rng(n)
    return [('a' * 60 + f' $\\x$ {i}', results.Predictions(
        metrics.softmax(random.normal(size=(i + 1, 4))), random.integers(4, size=i + 1)))
        for i in range(n)]


def test_a_picture_that_fails_costs_no_numbers(tmp_path, capsys):
    (tmp_path / 'reliability.png.tmp').mkdir()
    (tmp_path / 'results.md.tmp').mkdir()
    written = {'tasks': {'mmlu': result()}}
    results.save(written, {'mmlu': (panels_of(1)[0][1], {})}, tmp_path)
    assert json.loads((tmp_path / 'results.json').read_text())['tasks']['mmlu']['pooled']['n'] == 6
    assert (tmp_path / 'results.csv').exists() and not (tmp_path / 'results.md').exists()
    said = capsys.readouterr().err
    assert 'results.md was not written: IsADirectoryError' in said
    assert 'reliability.png was not written: IsADirectoryError' in said


@pytest.mark.parametrize('n', [1, 3, 12])
def test_reliability_diagrams(tmp_path, monkeypatch, n):
    figures = []
    monkeypatch.setattr(results, 'save_figure', lambda figure, *rest: figures.append(figure))
    results.draw_reliability(tmp_path / 'a.png', panels_of(n))
    figure = figures[0]
    labels = {text.get_text(): patch for legend in figure.legends
              for text, patch in zip(legend.get_texts(), legend.legend_handles)}
    over, under = (labels[name].get_facecolor() for name in (
        'overconfident: confidence above accuracy', 'underconfident: confidence below accuracy'))
    assert over != under != labels['accuracy of the bin'].get_facecolor()
    assert '95 % Wilson interval of the accuracy' in labels
    assert len([ax for ax in figure.axes if ax.axison]) == 2 * n
    # the bin of the one question of the first panel: an interval of more than half the axis
    top = figure.axes[0]
    segments = [x for c in top.collections for x in c.get_segments()]
    assert len(segments) == 1 and abs(segments[0][1][1] - segments[0][0][1]) > 0.5
    assert 'n = 1' in top.get_title()
    figure.canvas.draw()    # no mathematics in a name


def test_reliability_of_certain_answers(tmp_path, capsys):
    sure = results.Predictions(np.ones(5), np.array([True] * 4 + [False]))
    results.draw_reliability(tmp_path / 'a.png', [('sure', sure)])
    assert (tmp_path / 'a.png').read_bytes().startswith(b'\x89PNG') and not capsys.readouterr().err


@pytest.mark.parametrize('norms', [[1.25], [1.1, 1.3, 1.2], [0.0] * 3, [0.01, 5000.0, 3.0]])
def test_loss_is_drawn_over_whole_steps(tmp_path, monkeypatch, norms):
    log = [{'step': i + 1, 'loss': 3.0 - i, 'nll': 2.0 - i, 'grad_norm': norm}
           for i, norm in enumerate(norms)]
    write_rows(tmp_path / 'log.jsonl', log)
    figures = []
    monkeypatch.setattr(train, 'save_figure', lambda figure, *rest: figures.append(figure))
    train.draw_loss(tmp_path)
    figures[0].canvas.draw()
    _, bottom = figures[0].axes
    low, high = bottom.get_xlim()
    steps = [tick for tick in bottom.get_xticks() if low <= tick <= high]
    assert steps and all(tick == int(tick) for tick in steps)
    low, high = bottom.get_ylim()
    labels = [text for text in bottom.get_yticklabels(which='both')
              if text.get_text() and low <= text.get_position()[1] <= high]
    boxes = sorted((text.get_window_extent().y0, text.get_window_extent().y1) for text in labels)
    assert labels and all(a[1] <= b[0] for a, b in zip(boxes, boxes[1:]))
