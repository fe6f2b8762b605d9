"""results/page.py: report.html."""

import html.parser
import json
import re
import shutil
import subprocess
from collections import Counter

import numpy as np
import pytest
import metrics
from results import page

HOSTILE = '</script><script>alert(1)</script> <!--rows--> <b>bold</b> &amp; "quoted" ```\\u003c $x'
BROWSER = next(filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome'))),
               None)


def questions(n, **more):
    """Samples of n questions with random probabilities."""
    rng = np.random.default_rng(0)
    return [{'task': 'mmlu', 'split': 'test', 'language': '', 'id': f'{i}', 'prompt': 'p',
             'subject': f'subject {i % 2}', 'context': f'question {i}?',
             'answer': int(rng.integers(3)), 'options': [' A', ' B', ' C'], 'n_tokens': [1, 1, 1],
             'log_probs': np.log(rng.dirichlet(np.ones(3))).tolist()} | more for i in range(n)]


def tokens(n, task='clm'):
    """Samples of n tokens, all predicted wrongly."""
    return [{'task': task, 'split': 'test', 'language': '', 'id': f'{i}', 'prompt': 'p',
             'context': 'once upon a', 'predicted': ' mid', 'expected': ' time', 'correct': False,
             'confidence': i / n, 'log_prob': -3.0, 'entropy': 1.0} for i in range(n)]


def rows_of(**samples):
    results = {task: {'norm': 'token', 'pooled': {'n': len(rows)}}
               for task, rows in samples.items()}
    return page.to_read(results, samples)


def write(folder, rows):
    """Write report.html of `rows` and return its text."""
    report = metrics.report(np.array([[0.9, 0.1], [0.8, 0.2]]), np.array([0, 1]))
    result = {'distribution': '<0 shots>', 'norm': 'token', 'option_mass': 0.9,
              'unit': 'questions', 'pooled': report, 'subjects': {'<i>a</i>': report, 'b': report}}
    config = {'model': 'some/<model>', 'device': 'cpu', 'dtype': 'float32', 'seed': 0}
    versions = {'nanocal': '1.2.3', 'python': '3', 'device': ''}
    page.write_report({'tasks': dict.fromkeys(rows, result), 'versions': versions,
                       'config': config}, page.select(rows), [], folder)
    return (folder / 'report.html').read_text()


class Parsed(html.parser.HTMLParser):
    """The tags of a page, its text outside of scripts, and the content of its elements by id."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.text, self.content, self._id = [], [], '', {}, None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        self._id = dict(attributes).get('id') or tag

    def handle_data(self, data):
        self.content[self._id] = self.content.get(self._id, '') + data
        if self._id != 'script':
            self.text += data


def browse(folder, text, script):
    """Return the HTML of a page after a browser has opened it and run `script`."""
    if BROWSER is None:
        pytest.skip('needs Chromium')
    (folder / 'open.html').write_text(text.replace('</html>', f'<script>{script}</script>'))
    done = subprocess.run([BROWSER, '--headless', '--no-sandbox', '--disable-gpu', '--dump-dom',
                           f'--user-data-dir={folder / "profile"}',
                           (folder / 'open.html').as_uri()], capture_output=True, text=True,
                          timeout=60)
    return done.stdout


def test_the_most_confident_mistakes_come_first_with_the_probabilities_of_the_metrics():
    samples = questions(50, choices=['Lyon', 'Paris', 'Bonn'])   # shown instead of options
    by_id = {s['id']: s for s in samples}
    rows = rows_of(mmlu=samples)['mmlu']
    assert len(rows) == 50
    for row in rows:
        sample = by_id[row['id']]
        probs = np.exp(sample['log_probs'])
        np.testing.assert_allclose([p for _, p in row['options']], probs, atol=1e-4)
        assert [text for text, _ in row['options']] == sample['choices']
        assert row['chosen'] == probs.argmax() and abs(row['confidence'] - probs.max()) < 1e-4
        assert row['correct'] == (probs.argmax() == sample['answer'])
        assert row['text'] == sample['context'] and row['answer'] == sample['answer']
    order = [(row['correct'], -row['confidence']) for row in rows]
    assert order == sorted(order)


def test_a_page_of_too_many_samples_has_some_of_every_task_and_language():
    rows = rows_of(mmlu=[*questions(40, language='de'), *questions(40, language='en')],
                   clm=tokens(5))
    chosen, total = page.select(rows, most=45)
    assert total == 85
    assert Counter((row['task'], row['language']) for row in chosen) == {
        ('mmlu', 'de'): 20, ('mmlu', 'en'): 20, ('clm', ''): 5}
    assert [row['correct'] for row in chosen] == sorted(row['correct'] for row in chosen)
    assert page.select(rows, most=85) == page.select(rows, most=100)


def test_a_confidence_in_written_answers_shows_the_answers_of_its_task():
    answers = [{'answer': answer} for answer in ('Paris', 'Lyon', 'Paris', None)]
    written = [sample | {'greedy': {'text': ' Paris\n'}, 'answers': answers}
               for sample in tokens(2, 'triviaqa')]
    agreement = tokens(2, 'triviaqa.agreement')
    rows = rows_of(triviaqa=written, **{
        'triviaqa.agreement': agreement,
        'triviaqa.verbalized_1s': [agreement[0] | {'greedy': {'text': 'Guess: Bonn'}}]})
    for task, text in (('triviaqa', ' Paris\n'), ('triviaqa.agreement', ' Paris\n'),
                       ('triviaqa.verbalized_1s', 'Guess: Bonn')):
        assert {(row['written'], row['predicted'], row['expected'], row['samples'])
                for row in rows[task]} == {(text, ' mid', ' time', '2 × Paris, 1 × Lyon, 1 × none')}
    empty = [sample | {'predicted': ''} for sample in written]
    assert {row['predicted'] for row in rows_of(triviaqa=empty)['triviaqa']} == {'none'}


def test_text_of_a_question_is_never_markup_and_the_page_needs_no_other_file(tmp_path):
    plain = write(tmp_path, rows_of(mmlu=questions(4)))
    assert r'half \ud83d' in write(tmp_path, rows_of(mmlu=questions(4, context='half \ud83d')))
    rows = rows_of(mmlu=questions(4, context=HOSTILE, subject=HOSTILE, options=[HOSTILE] * 3))
    parsed = Parsed(write(tmp_path, rows))
    assert parsed.tags == Parsed(plain).tags and not {'link', 'iframe'} & {*parsed.tags}
    assert json.loads(parsed.content['rows']) == json.loads(json.dumps(rows['mmlu']))
    assert '<i>a</i>' in parsed.text and '2 subjects' in parsed.text and '<!--' not in plain
    assert re.search(r'some/<model>: mmlu \(\d{4}-\d\d-\d\d, nanoCal 1.2.3\)', parsed.text)
    assert all(value.startswith('data:') for key, value in Parsed(plain).attributes
               if key in ('src', 'href'))
    assert not re.search(r'https?:|url\(|@import|fetch\(|import\(', plain)


def test_the_page_of_a_run_has_its_settings_loss_intervals_and_what_the_names_mean(tmp_path):
    """No hovering is needed; a folder without a run, whatever it holds, has no settings."""
    (tmp_path / 'loss.png').write_bytes(b'a picture')
    picture = 'alt="loss.png" src="data:image/png;base64,YSBwaWN0dXJl"'
    assert picture not in write(tmp_path, rows_of(mmlu=questions(4)))
    (tmp_path / 'train_config.py').write_text(
        "model = 'some/base'\ndata = 'my<b>.json'\nsmoothing = 0.1\nlr = 1e-05\nseed = 0\n")
    text = write(tmp_path, rows_of(mmlu=questions(4)))
    assert picture in text
    summary = 'model some/base, data my&lt;b&gt;.json, smoothing 0.1, lr 1e-05, seed 0'
    assert f'<summary>{summary}</summary>' in text and 'evaluation: model some/&lt;' in text
    # accuracy and ECE are in view on a telephone
    head, _ = text[text.index('>group\n'):].split('>RMSCE\n', 1)
    assert re.findall('>(.*)\n', head)[:3] == ['group', 'accuracy', 'ECE']
    assert '<dt>ECE<dd>the expected calibration error: sum_B' in text and '<dt>MCE' not in text
    table = page.table_html([('group', 'ECE'), ('a [x]', '0.102 [0.091, 0.113]')])
    assert '<td>a [x]<td>0.102<small>[0.091, 0.113]</small>' in table


@pytest.mark.slow
def test_a_browser_shows_markup_as_text_filters_and_sorts(tmp_path):
    samples = questions(120, options=[f' {HOSTILE} A', ' B', ' C'])
    for i, sample in enumerate(samples):
        sample['context'] = f'{HOSTILE} question {i}'
    rows = rows_of(mmlu=samples, clm=tokens(3))
    text = write(tmp_path, rows)
    shown = Parsed(browse(tmp_path, text, 'show(50)'))
    assert shown.tags.count('article') == 50 and '51 to 100 of 123' in shown.content['count']
    assert shown.text.count('<b>bold</b> &amp; "quoted"') >= 90 and 'b' not in shown.tags
    wanted = sorted(row['confidence'] for row in rows['mmlu'] if row['correct']
                    and row['subject'] == 'subject 1' and '5' in row['id'])   # HOSTILE has none
    shown = browse(tmp_path, text, """
        form.task.value = 'mmlu'; form.subject.value = 'subject 1'; form.verdict.value = 'right';
        form.words.value = '5 QUESTION'; form.order.value = 'low';
        form.dispatchEvent(new Event('input'));""")
    confidences = [float(x) for x in re.findall(r'>right, confidence ([\d.]+)<', shown)]
    assert len(confidences) == len(wanted) > 2 and '>wrong, confidence' not in shown
    np.testing.assert_allclose(confidences, wanted, atol=6e-4)
