"""Written answers: extraction, agreement, confidences, files."""

import itertools
import json
import math
import random
import re
import shutil
import string
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from common import (SHARED, needs_files, reference_model, run_scripts, sentencepiece_folder,
                    write_rows)

import evaluate
import scoring
import generate
import metrics
from data import code_tasks, grading, written_answers
from data.written_answers import WRITTEN_TASKS, load_written
from data.chat import encode_prompt
from data.p_ik import load_p_ik
from data.tokenizer import load_tokenizer
from data.trees import load_answers
from results import confidence, plots
from results.samples import latest_samples, read_samples
from decoding import slots
from runtime import checkpoint
from runtime.errors import CheckpointError, ConfigError, DataError
from decoding.sampling import Sampling
from runtime.sandbox import run_program
from train import TrainConfig, train
from written import p_ik

# ------------------------------------------------------------------------------------------------
# Extraction and match rules
# ------------------------------------------------------------------------------------------------

# text: (lenient, strict) extraction of GSM8K
NUMBERS = {
    'She makes 9 * 2 = 18 dollars.\n#### 18': ('18', '18'),
    '#### $1,000.': ('$1,000', None),
    '#### -3.50 dollars': ('-3.50', '-3.50'),
    'The answer is 18': ('18', None),               # no character follows the number
    'So the answer is $29.00.': ('$29.00', None),
    'It is 10-3 = 7': ('7', None),
    'It is 10-3': ('3', None),                      # a difference, not a negative number
    'It is -3, or −3': ('−3', None),
    'He eats 1/2': ('1/2', None),
    'The answer is \\boxed{42}. I am sure, in 100 %': ('42', None),
    '\\[ \\boxed{\\frac{1}{2} + 7} \\] after 3 steps': ('1', None),
    'He has 18 (see step 2.)': ('2', None),         # nothing marks the number
    'no number ... at all.': (None, None),
    '': (None, None),
    'H2O and x2 are 5.': ('5', None),
    'about .5': ('.5', None),
    'the pair (3,4)': ('4', None),
    '#### 18\n\nThe answer is 20': ('20', '18'),
    '<answer>12</answer> 99': ('12', None),
    'Answer: 1,234,567.89': ('1,234,567.89', None),
    r'The answer is \boxed{1{,}234}.': ('1{,}234', None),
    r'so $\boxed{12\!,345{,}678}$': (r'12\!,345{,}678', None),
    r'\boxed{\$1,\!000}': (r'\$1,\!000', None),
    r'is -\$12\,500.50': (r'-\$12\,500.50', None),
    r'the pair (1,\,200)': ('200', None),           # a wide space after a comma separates numbers
    r'1\text{,}200 is 1\,200\,000 / 1000, so 3\ 000': (r'3\ 000', None),
    '1\u202f200': ('1\u202f200', None),
    '**Answer**: 7 of 9': ('7', None), '### Final Answer\n\n7 of 9': ('7', None)}


@pytest.mark.parametrize('text', NUMBERS)
def test_numbers_are_extracted(text):
    lenient, strict = NUMBERS[text]
    assert grading.any_number(text) == lenient
    assert (grading.gsm8k_number(text) or '').rstrip('.') == (strict or '')


@pytest.mark.parametrize('a, b, equal', [
    ('29.00', '29', True), ('$1,000', '1000', True), ('18.', '18', True), ('50%', '50', True),
    ('1/2', '0.5', True), ('−3', '-3', True), ('.5', '0.50', True), ('1/0', '1', False),
    (r'1{,}000', '1000', True), (r'12\!,345{,}678', '12345678', True),
    (r'1\,000.5', '1000.5', True),
    (r'-\$1,\!000', '-1000', True), (r'50\%', '50', True), (r'1\text{,}200', '1200', True),
    ('1\u2009200', '1200', True), (r'1{,}000', '1', False),
    ('10', '1', False), ('-3', '3', False), ('...', '0', False), ('1e2', '100', True),
    ('1e999999999', '2', False), ('4210_5', '42105', False)])
def test_numbers_are_equal_by_value(a, b, equal):
    assert (grading.number(a) == grading.number(b)) == equal


def lm_eval_gsm8k(text, pattern, first):
    """lm-evaluation-harness's filters and its exact_match for GSM8K, as its yaml has them."""
    found = re.findall(pattern, text)
    match = found[0 if first else -1] if found else '[invalid]'
    match = next(filter(None, match), '') if isinstance(match, tuple) else match
    for ignored in (',', r'\$', r'(?s).*#### ', r'\.$'):
        match = re.sub(ignored, '', match.strip())
    return match.lower()


@pytest.mark.slow
def test_gsm8k_is_graded_as_by_lm_eval():
    """On all reference solutions, whole, cut off, and with other numbers behind them."""
    needs_files('datasets/gsm8k/test.jsonl.gz')
    rule, n = WRITTEN_TASKS['gsm8k'], 0
    for question in load_written(f'gsm8k:{SHARED}/datasets/gsm8k').questions:
        solution, (target,) = question.solution, question.references
        target = target.replace(',', '')
        for text in (solution, solution.partition('####')[0], solution + '0', f'{solution}\nDone.'):
            grade = rule.grade(text, question.references)
            theirs = lm_eval_gsm8k(text, r'#### (\-?[0-9\.\,]+)', first=True)
            assert grade['strict'] == (theirs == target)
            theirs = lm_eval_gsm8k(text, r'(-?[$0-9.,]{2,})|(-?[0-9]+)', first=False)
            n += grade['correct'] != (theirs == target)
            # where ours differs, '16.00' equals 16, and once '1/3' at the end is not cut to 3
    assert n <= 36


def official_triviaqa(text):
    """normalize_answer of TriviaQA's own evaluation."""
    exclude = set(string.punctuation + '‘’´`')
    text = ''.join(c if c not in exclude else ' ' for c in text.replace('_', ' ').lower())
    return ' '.join(re.sub(r'\b(a|an|the)\b', ' ', text).split())


def official_squad(text):
    text = ''.join(c for c in text.lower() if c not in set(string.punctuation))
    return ' '.join(re.sub(r'\b(a|an|the)\b', ' ', text).split())


@pytest.mark.parametrize('key, official', [(grading.triviaqa_text, official_triviaqa),
                                           (grading.squad_text, official_squad)])
def test_texts_are_normalized_as_by_the_papers(key, official):
    rng = random.Random(0)
    pieces = ['The', 'an', 'Beatles', "O'Brien", 'J.R.R.', '_', '-', '‘', '’s', ' ', ' ', '\t',
              '1,000', 'É', 'Washington, D.C.', '"']
    texts = [''.join(rng.choices(pieces, k=6)) for _ in range(500)]
    for text in [*texts, "O'Brien", 'The Beatles', '1,000', 'J.R.R. Tolkien']:
        assert key(text) == (official(text) or text.lower().strip())
    assert key('The') == 'the' and key('?!') == '?!'        # not all equal to nothing


@pytest.mark.parametrize('text, lenient, strict', [
    (' Paris', 'Paris', 'Paris'), (' Paris.\n\nQuestion: Who', 'Paris', 'Paris.'),
    (' J.R.R. Tolkien', 'J.R.R. Tolkien', 'J.R.R. Tolkien'),
    ('Washington, D.C.', 'Washington, D.C.', 'Washington, D.C.'),
    ('St. Louis. It lies on a river.', 'St. Louis', 'St. Louis. It lies on a river.'),
    ('Paris. It is in France', 'Paris', 'Paris. It is in France'),
    ('Perú. Está en Lima', 'Perú', 'Perú. Está en Lima'), ('Москва. Да', 'Москва', 'Москва. Да'),
    ('И. С. Тургенев', 'И. С. Тургенев', 'И. С. Тургенев'),
    ('**Paris**', 'Paris', '**Paris**'),
    ('The answer is "Paris".', 'Paris', 'The answer is "Paris".'),
    ('Let me see.\nAnswer: Paris', 'Paris', 'Let me see.'),
    ('<answer>\nParis\n</answer>', 'Paris', '<answer>'),
    ('**Answer**: Paris', 'Paris', '**Answer**: Paris'), ('## Answer\nParis', 'Paris', '## Answer'),
    ('<think>x</think><answer>Paris</answer>', 'Paris', '<think>x</think><answer>Paris</answer>'),
    ('', None, None), (' \n', None, None), ('"."', None, '"."')])
def test_short_answers_are_extracted(text, lenient, strict):
    assert grading.short_answer(text) == lenient
    assert grading.first_line(text) == strict


@pytest.mark.parametrize('task, text, answer, strict', [
    ('qa', '<think>Rome</think>\n\nParis', 'Paris', True),
    ('qa', 'Rome\n</think>Paris', 'Paris', True),
    ('qa', '<think>\n\n</think>\n\nParis.', 'Paris', True),
    ('qa', '<think>a</think> Rome <think>b</think> Paris', 'Paris', True),
    ('nq_open', '<THINKING>The answer is Rome</THINKING>Paris', 'Paris', True),
    ('popqa', '[THINK]Rome[/THINK]Paris', 'Paris', True),
    ('qa', '<|begin_of_thought|>Rome<|end_of_thought|>Paris', 'Paris', True),
    ('qa', '◁think▷Rome◁/think▷Paris', 'Paris', True),
    ('qa', '<|channel|>analysis<|message|>Rome<|channel|>final<|message|>Paris', 'Paris', True),
    ('gsm8k', '<think>#### 3\n</think>\n#### 4', '4', True),
    ('gsm8k', '<think>It is 3.</think> So 4.', '4', False),
    ('gsm8k_short', '<think>3</think>4', '4', True),
    ('math500', r'<think>\boxed{3}</think>It is \boxed{4}', '4', True),
    ('math500', r'<think>\boxed{3}</think>It is $4$', '4', False)])
def test_thoughts_are_no_part_of_an_answer(task, text, answer, strict):
    rule, references = WRITTEN_TASKS[task], ['Paris' if answer == 'Paris' else '4']
    grade = rule.grade(text, references)
    assert (grade['answer'], grade['correct'], grade['strict']) == (answer, True, strict)
    for cut_off in (f'{text}<think>{answer}', f'<think>{answer}'):
        assert rule.grade(cut_off, references) == {
            'answer': None, 'key': None, 'correct': False, 'strict': False}


def test_no_program_is_run_of_thoughts():
    rule, seen = WRITTEN_TASKS['humaneval'], []
    rule = replace(rule, match=lambda key, answer, references: seen.append(answer) or True)
    assert rule.grade('<think>\n    return 1\n</think>    return 2\n', [])['correct']
    assert not rule.grade('<think>\n    return 1\n', [])['correct']
    assert seen == ['    return 2']


@pytest.mark.parametrize('a, b', [
    (r'\frac{1}{2}', '0.5'), (r'\dfrac12', r'\frac{1}{2}'), (r'-\frac{14}{3}', '-14/3'),
    (r'\left( 3, \frac{\pi}{2} \right)', r'(3,\frac{\pi}{2})'), (r'11,\! 111', '11111'),
    ('90^\\circ', '90'), (r'\text{Evelyn}', 'Evelyn'), (r'3\sqrt{2}', r'3\sqrt2'),
    ('x=5', '5'), (r'\$18.90', '18.9'), (r'50\%', '50'), ('p - q', 'p-q'), ('1,234', '1234'),
    (r'\begin{pmatrix} 1 \\ 2 \end{pmatrix}', r'\begin{pmatrix}1\\2\end{pmatrix}'),
    ('4210_{5}', '4210_5'), ('x^{3}-x', 'x^3-x'),
    ('7', '7.'), (r'\frac{\sqrt{3}}2', r'\frac{\sqrt{3}}{2}'),
    # units, by the words of Lewkowycz et al. or the \text{ of Hendrycks et al.
    (r'5 \text{ cm}', '5'), ('10 degrees', '10'), (r'5\text{ cm}^2', '5'), ('5 hours.', '5'),
    (r'5\,\text{cm}^{2}', '5'), (r'5\mathrm{~km}', '5'), (r'5\text{ m}', '5'), ('$5$ km', '5'),
    (r'\frac{5}{2}\mbox{ gallons}', '5/2'), ('12 square units', '12'), (r'5\text{m}^3', '5'),
    (r'x+5\text{ dollars}', 'x+5'), (r'(3\text{ cm}, 4\text{ cm})', '(3,4)'), ('5mph', '5'),
    (r'5{,}000', '5000'), (r'5{\,}000', '5000'), (r'5\,000', '5000'), (r'5\text{,}000', '5000')])
def test_formulas_are_equal_in_another_writing(a, b):
    assert grading.formula(a) == grading.formula(b)


@pytest.mark.parametrize('a, b', [('(1,2)', '12'), ('1,2', '12'), ('x+1', 'x-1'), ('3', '-3'),
                                  ('4210_5', '42105'), ('square', 'points'), ('5m', '5'),
                                  (r'\text{ Evelyn}', r'\text{ Ann}'), ('3cm^4', '3cm^5'),
                                  (r'3 \text{ or }5', '3'), (r'\text{ cm}', r'\text{ km}'),
                                  (r'\sqrt{2}', '2'), (r'\frac{1}{2}', r'\frac{2}{1}')])
def test_formulas_that_differ_are_not_equal(a, b):
    assert grading.formula(a) != grading.formula(b)


@pytest.mark.parametrize('text, answer', [
    (r'so \[ \boxed{42} \]', '42'),
    (r'\boxed{\frac{1}{2}} or \boxed{\frac{3}{4}}.', r'\frac{3}{4}'),
    (r'\boxed{1', '1'), (r'\boxed{x} \boxed{', 'x'), (r'} \fbox \fboxed {a{b}} {', 'a{b}'),
    ('Final Answer: The final answer is $x^2$. I hope it is correct.', 'x^2'),
    ('It is $3$ then $4$', '4'), ('the sum is 7', '7'), ('none', None)])
def test_formulas_are_extracted(text, answer):
    assert grading.any_formula(text) == answer


def test_popqa_takes_an_answer_that_contains_a_reference():
    grade = WRITTEN_TASKS['popqa'].grade(' a politician from France', ['politician', 'lawyer'])
    assert grade['correct'] and not grade['strict']
    assert not WRITTEN_TASKS['popqa'].grade(' politicians', ['politician'])['correct']


def test_every_reference_of_nq_open_is_right():
    needs_files('datasets/nq_open/NQ-open.dev.jsonl.gz')
    rule = WRITTEN_TASKS['nq_open']
    questions = load_written(f'nq_open:{SHARED}/datasets/nq_open').questions
    assert len(questions) == 3610
    grades = [rule.grade(f' {text}', q.references) for q in questions for text in q.references]
    assert all(grade['strict'] for grade in grades)
    assert np.mean([grade['correct'] for grade in grades]) > 0.998      # 'No. 2' loses its end


# ------------------------------------------------------------------------------------------------
# Files
# ------------------------------------------------------------------------------------------------

def test_triviaqa_asks_a_repeated_question_once(tmp_path):
    rows = [{'question_id': f'tc_{i // 2}', 'question': f'Who is {i // 2}?', 'answer': {
        'value': 'Ann', 'aliases': ['Ann', 'Anne'], 'normalized_value': 'ann'}} for i in range(6)]
    for split in ('validation', 'train'):
        write_rows(tmp_path / f'{split}.jsonl', rows)
    loaded = load_written(f'triviaqa:{tmp_path}', shots=2)
    assert [q.id for q in loaded.shots['']] == ['tc_0', 'tc_1']
    assert [q.id for q in loaded.questions] == ['tc_0', 'tc_1', 'tc_2']
    assert loaded.questions[0].context == 'Question: Who is 0?\nAnswer:'


@pytest.mark.parametrize('row, message', [
    *[({'possible_answers': wrong}, 'possible_answers must be a JSON list')
      for wrong in ('writer', '{"a": 1}', '"writer"', '[]', None, 3, ['writer'], '[' * 100_000)],
    ({'possible_answers': '["a", 1]'}, 'a reference answer is not text but int'),
    ({'possible_answers': '["\\ud800"]'}, 'a reference answer is not valid Unicode'),
    ({'prop': None}, 'the subject or category is missing'),
    ({'id': '\ud800'}, 'the id is not valid'),
    ({'question': 5}, 'the question is not text')])
def test_a_malformed_row_of_popqa_is_a_bad_row(tmp_path, row, message):
    good = {'question': 'Who?', 'possible_answers': '["a"]', 'prop': 'occupation', 'id': 1}
    write_rows(tmp_path / 'test.jsonl', [good | row, good])
    with pytest.raises(DataError, match=f'test.jsonl:1: {message}'):
        load_written(f'popqa:{tmp_path / "test.jsonl"}', shots=0)
    loaded = load_written(f'popqa:{tmp_path / "test.jsonl"}', shots=0, on_bad_row='skip')
    assert (len(loaded.questions), len(loaded.bad)) == (1, 1)


@pytest.mark.parametrize('change, message', [
    *[({'answers': wrong}, '"answers" must be a list of answers, whose "correct" is true or false')
      for wrong in ([{'correct': 'no'}], [{'correct': 1}], [{}], [5], [], 'x', {'correct': True})],
    ({'task': ['qa']}, '"task" is not text but list'), ({'id': {}}, '"id" is not text'),
    ({'language': None}, '"language" is missing'), ({'subject': 3}, '"subject" is not text'),
    ({'context': None}, '"context" is missing'), ({'context': '\ud800'}, 'not valid Unicode')])
def test_a_malformed_sample_of_p_ik_is_a_bad_row(tmp_path, change, message):
    good = {'task': 'qa', 'language': '', 'id': '0', 'greedy': {}, 'subject': '',
            'context': 'Who?\nAnswer:', 'answers': [{'correct': False}]}
    path = write_rows(tmp_path / 'samples.jsonl', [good | {'id': '1'} | change, good])
    with pytest.raises(DataError, match=f'samples.jsonl:1: .*{message}'):
        load_p_ik(f'p_ik:{path}')
    question, = load_p_ik(f'p_ik:{path}', on_bad_row='skip').questions
    assert question.answer == 1


def test_popqa_is_read_from_its_tsv(tmp_path):
    (tmp_path / 'test.tsv').write_text(
        'id\tsubj\tprop\ts_pop\tquestion\tpossible_answers\n'
        '42\tGeorge\toccupation\t14\tWhat is George\'s occupation?\t"[""politician"", ""a, b""]"\n')
    question, = load_written(f'popqa:{tmp_path}').questions
    assert question.references == ['politician', 'a, b'] and question.subject == 'occupation'
    assert question.id == '42'


def test_math_takes_the_boxed_answer_of_a_solution(tmp_path):
    row = {'problem': 'Add 1 and 1.', 'solution': r'It is $\boxed{2}$.', 'level': 1,
           'type': 'Algebra'}
    path = write_rows(tmp_path / 'test.jsonl', [row])
    question, = load_written(f'math500:{path}').questions
    assert question.references == ['2'] and question.subject == 'Algebra'


@pytest.mark.parametrize('rows, arguments, message', [
    ([{'question': 'Q?', 'answers': []}], {}, 'test.jsonl:1: wanted a question and'),
    ([{'question': ' ', 'answers': ['a']}], {}, 'wanted a question'),
    ([{'question': 'Q?', 'answers': [3]}], {}, 'reference answer is not text'),
    ([{'question': 'Q?'}], {}, "test.jsonl:1: not the fields of its format: there is no 'answer'"),
    ([{'question': 'Q?', 'answers': ['a']}], {'header': 'native'}, 'no header of its own'),
    ([{'question': 'Q?', 'answers': ['a']}], {'shots': 3}, '2 solved questions, 3 wanted'),
    ([{'question': 'Q?', 'answers': ['a']}], {'revision': 'main'}, "data_revision = 'main' is")])
def test_bad_files_are_refused(rows, arguments, message, tmp_path):
    write_rows(tmp_path / 'test.jsonl', rows)
    write_rows(tmp_path / 'train.jsonl', [{'question': 'Q?', 'answers': 'a'}] * 2)
    with pytest.raises(DataError, match=re.escape(message)):
        load_written(f'qa:{tmp_path}', **arguments)


def test_the_share_of_right_answers_is_left_out_if_there_are_none():
    answer = {'answer': None, 'correct': False, 'strict': False, 'reason': 'max_tokens'}
    written = confidence.shares([{'greedy': answer, 'answers': [answer] * 2}])
    text = '\n'.join(confidence.notes({'written': written}))
    assert 'from 1.000 of them' in text and 'nan' not in text and 'pass@' not in text
    right = answer | {'correct': True}
    written = confidence.shares([{'greedy': answer, 'answers': [right, *[answer] * 5]}] * 2)
    assert 'samples right: pass@5 = 0.833' in '\n'.join(confidence.notes({'written': written}))
    text = '\n'.join(confidence.notes({'written': written | {
        'no_answer': 0.5, 'accuracy_of_answered': 0.25}}))
    assert 'of those with an answer 0.250' in text


@pytest.mark.parametrize('n, right', [(1, 0), (5, 2), (6, 6), (7, 1)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(n, right):
    answers = [{'correct': i < right} for i in range(n)]
    for k in range(1, n + 1):
        subsets = [*itertools.combinations([i < right for i in range(n)], k)]
        assert confidence.pass_at_k(answers, k) == pytest.approx(np.mean([*map(any, subsets)]))


def test_a_proposed_answer_continues_its_prompt(tmp_path):
    rows = [{'question': 'Who?', 'answers': ['Ann'], 'language': 'de', 'subject': 'names'}]
    question, = load_written(f'qa:{write_rows(tmp_path / "q.jsonl", rows)}').questions
    assert (question.language, question.subject) == ('de', 'names')
    proposal = written_answers.proposed(question, '  Ann\n', True)
    assert proposal.context.startswith('Question: Who?\nProposed Answer: Ann\nIs the proposed')
    assert proposal.options == [' (A)', ' (B)'] and proposal.answer == 0
    empty = written_answers.proposed(question, '\n', False)
    assert 'Answer: (none)\nIs' in empty.context and empty.answer == 1
    question.context = 'def f():\n    """One."""'
    assert '"""\n    return 1\nIs the' in written_answers.proposed(
        question, '\n    return 1\n', True).context


def test_a_task_of_ones_own_needs_a_file():
    with pytest.raises(DataError, match='no file given'):
        load_written('qa')
    with pytest.raises(DataError, match='no solved questions'):
        load_written('popqa', shots=5)


# ------------------------------------------------------------------------------------------------
# Confidences
# ------------------------------------------------------------------------------------------------

def sample_of(*keys, right='a', greedy='a'):
    def answer(key):
        return {'text': key or '', 'reason': 'end', 'n_tokens': 4, 'log_prob': math.log(0.5),
                'mean_prob': 0.8, 'answer': key, 'key': key, 'correct': key == right,
                'strict': key == right, 'span': key, 'span_log_prob': math.log(0.9)}
    return {'greedy': answer(greedy), 'answers': [*map(answer, keys)]}


def value_and_grade(function, sample):
    value, answer = function(sample)
    return value, answer['correct']


@pytest.mark.parametrize('keys, share, correct, greedy_share', [
    ('aaab', 0.75, True, 0.75), ('bbba', 0.75, False, 0.25), ('abab', 0.5, True, 0.5),
    ('baba', 0.5, False, 0.5), ((None, None, None, 'a'), 0.25, False, 0.25),
    ((None,) * 4, 0.25, False, 0.0), ((None, 'a', 'a', None), 0.5, True, 0.5)])
def test_agreement_is_the_share_of_the_largest_class(keys, share, correct, greedy_share):
    sample = sample_of(*keys)
    assert value_and_grade(confidence.agreement, sample) == (share, correct)
    assert value_and_grade(confidence.greedy_agreement, sample) == (greedy_share, True)
    counts = [*{x: keys.count(x) for x in keys if x}.values(), *[1] * [*keys].count(None)]
    entropy = -sum(n / 4 * math.log(n / 4) for n in counts)
    assert confidence.class_entropy(sample)[0] == pytest.approx(1 - entropy / math.log(4))


def test_confidences_from_the_tokens_of_an_answer():
    sample = sample_of('a')
    for function, value in ((confidence.greedy_probability, 0.5),
                            (confidence.length_normalized, 0.5 ** 0.25),
                            (confidence.mean_token_probability, 0.8),
                            (confidence.answer_span, 0.9)):
        assert value_and_grade(function, sample) == (pytest.approx(value), True)
    assert confidence.class_entropy(sample)[0] is None      # of one sample


@pytest.mark.parametrize('text, value', [
    ('.8', 0.8), ('0.80', 0.8), ('80%', 0.8), ('80 %', 0.8), ('80/100', 0.8), ('1', 1.0),
    ('0', 0.0), ('1.', 1.0), ('95', None), ('very likely', None), ('1%', 0.01),
    ('7/0', None), ('', None), ('-0.5', None), ('1e-3', 0.001), ('0,8', None), ('1,000', None),
    ('1.2.3', None), ('0.7, I think', 0.7), ('0.7.', 0.7), ('1 percent', 0.01), ('90-95%', None),
    ('between 0 and 1', None), ('a number from 0.0 to 1.0', None), ('0-1', None), ('[0, 1]', None),
    ('0% to 100%', None), ('0 < p < 1', None), ('between 0 and 1, so 0.85', 0.85), ('50/50', None),
    ('on a scale of 0.0-1.0: 0.9', 0.9), ('0.8 (between 0 and 1)', 0.8), ('0.7 to 0.9', None),
    ('between 80% and 90%', None), ('9 in 10', 0.9), ('80\\%', 0.8), ('p of H2O: 0.7', 0.7),
    ('1 out of 4', 0.25), ('1 Out of 4', 0.25), ('8 / 10', 0.8), ('about 1.', 1.0)])
def test_stated_probabilities_are_parsed(text, value):
    assert confidence.parse_probability(text) == value
    sample = sample_of('a')
    sample['greedy']['text'] = f'<answer>a</answer> <confidence>{text}</confidence>'
    assert value_and_grade(confidence.stated, sample) == (value, True)
    sample['greedy']['text'] += '<think> <confidence>0.3</confidence>'      # not closed
    assert confidence.stated(sample)[0] is None


@pytest.mark.parametrize('task, text, begin', [
    ('qa', 'Paris. Paris is right.', 0), ('qa', 'Answer: Rome', 8),
    ('gsm8k', '<think>5, or 6</think> #### 5 and 15', 28),
    ('gsm8k', r'So 1{,}000 or 1{,}000', 14),
    ('gsm8k', '5 + 10 = 15 #### 5 and 15', 17), ('gsm8k', 'So 5, or 15, or 5', 16)])
def test_the_span_is_where_the_answer_was_extracted(task, text, begin):
    class Characters:
        def decode(self, tokens, start):
            return ''.join(map(chr, tokens))
    log_probs = [-float(i) for i in range(len(text))]
    answer = generate.Answer(0, 0, [*map(ord, text)], log_probs, text=text)
    span = confidence.span(answer, WRITTEN_TASKS[task], Characters())
    assert span['span_log_prob'] == sum(log_probs[begin:begin + len(span['span'])])


@pytest.mark.parametrize('text', ['\\boxed{' * 10_000, '1,' * 5000 + '1', pytest.param(
    '5 ' * 20_000, marks=pytest.mark.slow)])
def test_a_text_that_repeats_itself_is_graded_in_seconds(text):
    class Characters:
        def decode(self, tokens, start):
            return text[:len(tokens)]
    begun, rule = time.process_time(), WRITTEN_TASKS['math500']
    assert not rule.grade(text, ['7'])['correct']
    confidence.span(generate.Answer(0, 0, [*text], [0.0] * len(text), text=text), rule,
                    Characters())
    assert time.process_time() - begun < 10


@pytest.mark.parametrize('text, begin, end', [
    ('ß', 0, 1), (' 日本\n', 1, 3), ('It is café. Yes', 0, 10), ('Answer: 東京都', 8, 11),
    ('a日 👩\u200d👧!', 0, 7), ('Answer: x\u0301.', 8, 11)])
@pytest.mark.parametrize('size', [1, 2, 3, 5])
def test_the_span_holds_all_tokens_of_its_characters(text, begin, end, size):
    """A token is `size` bytes, so that characters begin and end inside tokens."""
    class Bytes:
        def decode(self, tokens, start):
            return b''.join(tokens).decode('utf-8', 'replace')
    whole = text.encode()
    tokens = [whole[i:i + size] for i in range(0, len(whole), size)]
    log_probs = [-float(2 ** i) for i in range(len(tokens))]
    answer = generate.Answer(0, 0, tokens, log_probs, text=text)
    span = confidence.span(answer, WRITTEN_TASKS['qa'], Bytes())
    assert span['span'] == text[begin:end]
    first, last = len(text[:begin].encode()) // size, (len(text[:end].encode()) - 1) // size
    assert span['span_log_prob'] == sum(log_probs[first:last + 1])


@pytest.mark.slow
def test_the_ece_floor_is_that_of_a_calibrated_model():
    """Simulated: 6,000 questions, 10 classes, shares drawn from a Dirichlet distribution."""
    rng, k, samples, correct = np.random.default_rng(0), 10, [], []
    for _ in range(6000):
        p = rng.dirichlet([0.1] * 10)
        right, drawn = rng.choice(10, p=p), rng.choice(10, size=k, p=p)
        samples.append(sample_of(*(str(i) for i in drawn), right=str(right),
                                 greedy=str(p.argmax())))
        correct.append(value_and_grade(confidence.agreement, samples[-1]))
    observed = metrics.ece(*(np.array(x) for x in zip(*correct, strict=True)))
    floor = confidence.ece_floor(samples, 'agreement', n_resamples=20)
    assert 0.75 < floor / observed < 1.1
    assert confidence.ece_floor(samples[:500], 'greedy_agreement') > 0.01
    assert confidence.ece_floor(samples, 'entropy') is None
    certain = [sample_of('a', 'a', 'a') for _ in range(50)]
    assert confidence.ece_floor(certain, 'agreement') == 0.0


# ------------------------------------------------------------------------------------------------
# With a model
# ------------------------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def asked(tmp_path_factory):
    """A tiny Llama and a file of questions, some of whose references the model writes itself."""
    folder = tmp_path_factory.mktemp('asked')
    sentencepiece_folder(folder / 'model', 'mistral')
    reference = reference_model('llama', folder / 'model', max_position_embeddings=4096,
                                vocab_size=load_tokenizer(folder / 'model').n_vocab)
    write_rows(folder / 'qa' / 'shots.jsonl', [
        {'question': f'What is fox {i}?', 'answers': [f'blue {i}', 'x']} for i in range(4)])
    rows = [{'question': f'What is the colour of {i}?', 'answers': ['blue']} for i in range(10)]
    write_rows(folder / 'qa' / 'test.jsonl', rows)
    ask(folder, folder / 'first', '--n=1')
    # not in the order of the lines, which is that in which the answers ended
    greedy = {s['id']: s['greedy']['answer'] for s in samples_of(folder / 'first', 'qa')}
    right = [i for i in range(0, 10, 2) if greedy[f'{i}']]
    for i in right:
        rows[i]['answers'].append(greedy[f'{i}'])
    write_rows(folder / 'qa' / 'test.jsonl', rows)
    ask(folder, folder / 'out', '--p_true', '--p_ik', '--verbalized')
    return folder, reference, len(right) / 10


def ask(folder, out, *arguments):
    evaluate.main([f'--model={folder / "model"}', f'--tasks=qa:{folder / "qa"}', '--shots=2',
                   f'--out_dir={out}', '--n=4', '--max_tokens=6', '--n_bootstrap=20',
                   '--dtype=float32', '--deterministic', '--pictures=False', *arguments])
    return json.loads((out / 'results.json').read_text())['tasks']


def samples_of(out, task):
    return [s for s in latest_samples(read_samples(out / 'samples.jsonl')) if s['task'] == task]


HEADER = 'Answer these questions as briefly as possible.\n\n'
SHOTS = ('Question: What is fox 0?\nAnswer: blue 0\n\n'
         'Question: What is fox 1?\nAnswer: blue 1\n\n')


def log_probs_after(reference, tokenizer, text, *continuations):
    """Log-probabilities by transformers, each continuation in a pass of its own, token by token."""
    ids, values = [tokenizer.bos_id, *tokenizer.encode(text)], []
    for tokens in continuations:
        with torch.no_grad():
            logits = reference(torch.tensor([ids + tokens])).logits[0].double().log_softmax(-1)
        values.append([logits[len(ids) - 1 + i, token].item() for i, token in enumerate(tokens)])
    return values


def test_probabilities_of_an_answer_are_those_of_transformers(asked, monkeypatch):
    folder, reference, _ = asked
    tokenizer = load_tokenizer(folder / 'model')
    written, tokens = confidence.written, {}

    def with_tokens(answer):
        tokens[answer.text, math.fsum(answer.log_probs)] = [*answer.tokens]
        return written(answer)

    monkeypatch.setattr(confidence, 'written', with_tokens)
    ask(folder, folder / 'tokens', '--limit=3')
    rows = samples_of(folder / 'tokens', 'qa')
    assert len(rows) == 3
    for row in rows:
        number = int(row['id'])
        prompt = f'{HEADER}{SHOTS}Question: What is the colour of {number}?\nAnswer:'
        for answer in (row['greedy'], *row['answers']):
            ids = tokens[answer['text'], answer['log_prob']]
            (log_probs,) = log_probs_after(reference, tokenizer, prompt, ids)
            assert answer['log_prob'] == pytest.approx(sum(log_probs), abs=2e-4)
            assert answer['mean_prob'] == pytest.approx(np.exp(log_probs).mean(), abs=1e-4)
            assert answer['n_tokens'] == len(log_probs)
            if answer is row['greedy'] and answer['answer']:    # tokens that add to the span
                ends = [len(tokenizer.decode(ids[:i], start=False)) for i in range(len(ids) + 1)]
                begin = answer['text'].rindex(answer['answer'])
                end = begin + len(answer['answer'])
                inside = [x for x, a, b in zip(log_probs, ends, ends[1:]) if a < end and b > begin]
                assert answer['span_log_prob'] == pytest.approx(sum(inside), abs=2e-4)
        assert row['confidence'] == pytest.approx(math.exp(row['greedy']['log_prob']))


def test_p_true_is_that_of_transformers(asked):
    folder, reference, _ = asked
    tokenizer = load_tokenizer(folder / 'model')
    answers = {s['id']: s for s in samples_of(folder / 'out', 'qa')}

    def p_true(text):
        both = [tokenizer.encode(text + option)[len(tokenizer.encode(text)):]
                for option in (' (A)', ' (B)')]
        true, false = map(sum, log_probs_after(reference, tokenizer, text, *both))
        return 1 / (1 + math.exp(false - true))

    ending = '\nIs the {0} answer:\n (A) True\n (B) False\nThe {0} answer is:'
    shots = ''.join(f'Question: What is fox {i}?\nProposed Answer: blue 0'
                    f'{ending.format("proposed")} ({mark})\n\n' for i, mark in enumerate('AB'))
    plain, among = (samples_of(folder / 'out', f'qa.{name}') for name in ('p_true',
                                                                        'p_true_samples'))
    assert len(plain) == len(among) == 10
    assert {s['correct'] for s in plain} == {True, False}
    for row in plain[:4]:
        greedy = answers[row['id']]['greedy']
        text = (f'{HEADER}{shots}Question: What is the colour of {row["id"]}?\n'
                f'Proposed Answer: {greedy["text"].strip()}{ending.format("proposed")}')
        assert row['confidence'] == pytest.approx(p_true(text), abs=1e-4)
        assert row['correct'] == greedy['correct']
    for row in among[:4]:
        sample = answers[row['id']]
        ideas = [answer['answer'] or answer['text'].strip() or '(none)'
                 for answer in (sample['greedy'], *sample['answers'])]
        lines = '\n'.join(ideas)
        text = (f'Question: What is the colour of {row["id"]}?\nHere are some brainstormed ideas: '
                f'{lines}\nPossible Answer: {ideas[0]}{ending.format("possible")}')
        assert row['confidence'] == pytest.approx(p_true(text), abs=1e-4)


def test_results_have_an_entry_for_each_confidence(asked):
    folder, _, share = asked
    tasks = json.loads((folder / 'out' / 'results.json').read_text())['tasks']
    entries = {'qa', *(f'qa.{name}' for name in (
        'length_normalized', 'mean_token', 'answer_span', 'agreement', 'greedy_agreement',
        'entropy', 'p_true', 'p_true_samples', 'p_ik'))}
    assert tasks.keys() >= entries and 'qa.stated' not in tasks
    accuracy = tasks['qa']['pooled']['accuracy']
    assert accuracy == share == tasks['qa']['written']['lenient_accuracy'] and share > 0
    for name in entries:
        report = tasks[name]['pooled']
        assert report['n'] == 10 - tasks[name].get('unparsed', 0)
        assert {'ece', 'smooth_ece', 'auroc', 'aurc', 'prr', 'brier_skill', 'bas',
                'brier_top_label'} <= report.keys()
        assert [*tasks[name]['post_hoc']['reports']] == ['platt', 'isotonic']
    assert tasks['qa.agreement']['ece_floor'] > 0 == tasks['qa.agreement']['unparsed']
    text = (folder / 'out' / 'results.md').read_text()
    assert 'with 4 samples per question' in text and '| qa.greedy_agreement |' in text
    page = (folder / 'out' / 'report.html').read_text()
    assert page.count('<th>floor of ECE') == 1 and '<td>qa.greedy_agreement<td>10' in page


def test_a_question_whose_logits_are_not_finite_is_named(asked, tmp_path, monkeypatch):
    def draw(logits, *_):       # in a CUDA graph, so nothing is copied from the CPU
        values = logits.new_full((len(logits), 4), torch.nan)
        values[:, 0] = 3
        return values
    monkeypatch.setattr(slots, 'draw', draw)
    with pytest.raises(CheckpointError, match=r'qa: .*test.jsonl:\d+: the model gives NaN'):
        ask(asked[0], tmp_path)


@pytest.mark.slow
def test_answers_in_a_chat_are_those_to_its_template(asked, tmp_path, capsys):
    folder, _, share = asked
    model, tokenizer = checkpoint.load(folder / 'model'), load_tokenizer(folder / 'model')
    tasks = ask(folder, tmp_path, '--chat=tulu', '--shots=0', '--limit=2', '--p_true',
                '--verbalized')
    assert tasks['qa']['distribution'].endswith('greedy answer, 0 shots, chat template tulu')
    printed = capsys.readouterr().out
    for label in ('qa.verbalized_1s', 'qa.verbalized_2s'):      # no silence about a missing entry
        assert (label in tasks) != (f'{label}: left out' in printed)
    for row in samples_of(tmp_path, 'qa'):
        text = f'{HEADER}Question: What is the colour of {row["id"]}?\nAnswer:'
        ids, stop = encode_prompt([{'role': 'user', 'content': text}], tokenizer, 'tulu')
        settings = Sampling(n=4, max_tokens=6, deterministic=True)
        (_, answers), = generate.generate(model, [ids], settings, tokenizer, stop)
        assert [a.text for a in answers] == [a['text'] for a in row['answers']]


@pytest.mark.slow
@pytest.mark.parametrize('share', [0, 0.2, 0.5, 0.9])
def test_an_interrupted_evaluation_resumes(asked, share, tmp_path):
    """The file of samples is cut off anywhere, also inside a line; all else is lost."""
    folder, *_ = asked
    whole = (folder / 'out' / 'samples.jsonl').read_bytes()
    out = shutil.copytree(folder / 'out', tmp_path / 'out')
    (out / 'samples.jsonl').write_bytes(whole[:int(share * len(whole))])
    (out / 'results.json').unlink()
    ask(folder, out, '--p_true', '--p_ik', '--verbalized')
    assert sorted((out / 'samples.jsonl').read_bytes().split(b'\n')) == sorted(whole.split(b'\n'))


@pytest.mark.slow
def test_answers_do_not_depend_on_the_other_questions(asked, tmp_path):
    folder, _, share = asked
    ask(folder, tmp_path, '--limit=3')
    every = {s['id']: s for s in samples_of(folder / 'out', 'qa')}
    some = samples_of(tmp_path, 'qa')
    assert len(some) == 3 and all(s == every[s['id']] for s in some)
    ask(folder, tmp_path / 'other', '--limit=3', '--seed=1')
    others = samples_of(tmp_path / 'other', 'qa')
    assert all(a['answers'] != every[a['id']]['answers'] and a['greedy']['text'] ==
               every[a['id']]['greedy']['text'] for a in others)


@pytest.mark.slow
def test_a_confidence_in_earlier_answers_is_left_out(asked, tmp_path, capsys, monkeypatch):
    folder, *_ = asked
    entries = {'qa.p_true', 'qa.p_true_samples', 'qa.p_ik'}
    before = ask(folder, tmp_path, '--p_true', '--p_ik')
    assert entries <= before.keys() and entries <= ask(folder, tmp_path).keys()
    capsys.readouterr()
    assert not entries & ask(folder, tmp_path, '--seed=1').keys()
    assert 'qa.p_ik: left out, since the answers to qa have changed' in capsys.readouterr().out
    after = ask(folder, tmp_path, '--p_true', '--p_ik')     # each is still in samples.jsonl
    assert {name: after[name]['pooled'] for name in entries} == {
        name: before[name]['pooled'] for name in entries}
    ask(folder, tmp_path, '--p_true', '--p_ik', '--limit=4')
    for split in ('train', 'validation'):       # another task, which leaves these as they are
        write_rows(tmp_path / 'nq' / f'{split}.jsonl', [{'question': 'Who?', 'answer': ['x']}] * 2)
    assert entries < ask(folder, tmp_path, f'--tasks=nq_open:{tmp_path / "nq"}').keys()
    monkeypatch.setattr(WRITTEN_TASKS['qa'], 'match', lambda *_: True)     # other grades
    assert not entries & ask(folder, tmp_path).keys()


@pytest.mark.slow
def test_an_edited_rule_grades_the_same_answers_again(asked, tmp_path, monkeypatch):
    folder, _, share = asked
    before = ask(folder, tmp_path)
    monkeypatch.setattr(WRITTEN_TASKS['qa'], 'match', lambda *_: True)
    monkeypatch.setattr(generate, 'generate', lambda *_: pytest.fail('answers were generated'))
    after = ask(folder, tmp_path)
    assert before['qa']['pooled']['accuracy'] == share and after['qa']['pooled']['accuracy'] == 1
    assert after['qa.agreement']['pooled']['accuracy'] == 1
    # the order of the lines is that in which the answers ended
    texts, expected = ({s['id']: [a['text'] for a in s['answers']] for s in samples_of(out, 'qa')}
                       for out in (tmp_path, folder / 'out'))
    assert texts == expected


@pytest.mark.slow
def test_an_answer_that_states_no_probability_is_not_written_again(asked, tmp_path, monkeypatch):
    folder, *_ = asked
    before, stated = ask(folder, tmp_path, '--verbalized'), grading.stated_guess
    rows = {name: len(samples_of(tmp_path, f'qa.{name}')) for name in written_answers.VERBALIZED}
    assert min(rows.values()) < 10
    assert rows == {name: before.get(f'qa.{name}', {'pooled': {'n': 0}})['pooled']['n']
                    for name in rows}
    monkeypatch.setattr(generate, 'generate', lambda *_: pytest.fail('answers were generated'))
    whole = (tmp_path / 'samples.jsonl').read_bytes()
    after = ask(folder, tmp_path, '--verbalized')
    assert (tmp_path / 'samples.jsonl').read_bytes() == whole
    assert {name: task['pooled'] for name, task in after.items()} == {
        name: task['pooled'] for name, task in before.items()}
    # a better parser finds a number in each of them, and a worse one in none
    monkeypatch.setattr(grading, 'stated_guess', lambda *_: ('Ann', '0.5'))
    assert ask(folder, tmp_path, '--verbalized')['qa.verbalized_1s']['pooled']['n'] == 10
    monkeypatch.setattr(grading, 'stated_guess', lambda *_: (None, None))
    ask(folder, tmp_path, '--verbalized')
    assert not samples_of(tmp_path, 'qa.verbalized_1s')
    monkeypatch.setattr(grading, 'stated_guess', stated)
    assert ask(folder, tmp_path, '--verbalized')['qa']['pooled']['n'] == 10


@pytest.mark.slow
def test_runs_are_compared_by_each_confidence(asked, tmp_path, capsys, monkeypatch):
    folder, _, share = asked
    monkeypatch.setattr(plots, 'save_figure', lambda *_: None)
    with pytest.raises(SystemExit):
        evaluate.main(['--compare', str(folder / 'first'), str(folder / 'out'),
                       f'--out_dir={tmp_path}', '--n_bootstrap=50'])
    assert 'qa.agreement' in (tmp_path / 'compare.md').read_text()


@pytest.mark.slow
def test_written_programs_are_run_only_if_that_is_allowed(asked, tmp_path, monkeypatch):
    folder, _, share = asked
    problem = {'task_id': 'T/0', 'entry_point': 'add', 'canonical_solution': '    return a + b\n',
               'prompt': 'def add(a, b):\n    """Add two numbers."""\n',
               'test': 'def check(candidate):\n    assert candidate(2, 3) == 5\n'}
    path = write_rows(tmp_path / 'humaneval.jsonl', [problem, problem | {'task_id': 'T/1'}])
    arguments = [f'--model={folder / "model"}', f'--tasks=humaneval:{path}', '--shots=0', '--n=2',
                 '--max_tokens=6', f'--out_dir={tmp_path}', '--pictures=False', '--p_true']
    with pytest.raises(ConfigError, match='--run_code'):
        evaluate.main(arguments)
    try:
        run_program('', 'pass')
    except ConfigError as error:
        pytest.skip(str(error))
    question, _ = load_written(f'humaneval:{path}').questions
    rule = WRITTEN_TASKS['humaneval']
    assert question.id == 'T/0' and question.context.endswith('"""')
    for text, right in (('\n    return a + b\nprint(1)', True), ('\n    return a', False),
                        (f'```python\n{problem["prompt"]}    return b + a\n```', True)):
        grade = rule.grade(text, question.references)
        assert grade['correct'] == grade['strict'] == right
    assert not rule.grade(' \n', question.references)['correct']
    evaluate.main([*arguments, '--run_code'])
    rows = samples_of(tmp_path, 'humaneval')
    assert [row['greedy']['correct'] for row in rows] == [False, False]
    monkeypatch.setattr(code_tasks, 'check', lambda *_, **__: pytest.fail('a program ran again'))
    evaluate.main([*arguments, '--run_code'])
    assert samples_of(tmp_path, 'humaneval') == rows


def test_settings_that_do_not_apply_are_refused(asked, tmp_path):
    folder, _, share = asked
    for arguments, message in ((['--permute=2'], 'permute'), (['--languages=de'], 'one language'),
                               (['--n=0'], 'n = 0')):
        with pytest.raises(ConfigError, match=message):
            ask(folder, tmp_path, *arguments)
    with pytest.raises(DataError, match='one turn|one user|single'):
        ask(folder, tmp_path, '--chat=alpaca', '--verbalized')
    with pytest.raises(DataError, match='even without shots'):
        ask(folder, tmp_path, '--max_length=20')


# ------------------------------------------------------------------------------------------------
# Stated probabilities
# ------------------------------------------------------------------------------------------------

@pytest.mark.slow
def test_an_answer_too_long_to_be_shown_leaves_the_question_out_of_that_entry(
        asked, tmp_path, capsys):
    folder, _, _ = asked
    tokenizer = load_tokenizer(folder / 'model')
    prompts = [f'Who is {"very " * n}blue?' for n in (0, 1, 300)]

    def entries(name, prompts):
        """The entries if the longest prompt has just enough room for an answer of 6 tokens."""
        write_rows(tmp_path / name, [{'question': text, 'answers': ['x']} for text in prompts])
        room = 7 + max(len(tokenizer.encode(f'{HEADER}Question: {text}\nAnswer:'))     # 1 for BOS
                       for text in prompts)
        found = ask(folder, tmp_path / f'{name}-out', f'--tasks=qa:{tmp_path / name}', '--shots=0',
                    '--p_true', '--verbalized', f'--max_length={room}')
        return {label: (task['pooled']['n'], task['bad_rows']) for label, task in found.items()}

    found = entries('some.jsonl', prompts)
    assert found['qa'] == found['qa.agreement'] == (3, 0)
    assert found['qa.p_true'] == found['qa.p_true_samples'] == (2, 1)
    assert 'qa.p_true: 1 questions left out, the first: ' in capsys.readouterr().out
    assert '1 bad rows left out, ' in (tmp_path / 'some.jsonl-out/results.md').read_text()
    found = entries('all.jsonl', prompts[:2])
    assert found['qa'] == (2, 0) and 'qa.p_true' not in found
    assert 'qa.p_true: 2 questions left out, the first: ' in capsys.readouterr().out


def test_verbalized_prompts_are_those_of_the_paper(tmp_path):
    write_rows(tmp_path / 'q.jsonl', [{'question': 'Who?', 'answers': ['Ann']}])
    question, = load_written(f'qa:{tmp_path / "q.jsonl"}').questions
    one = written_answers.verbalized_1s(question)
    text = written_answers.as_text(one.messages, one.lead)
    assert text.startswith('Provide your best guess and the probability that it is correct (0.0 to')
    assert text.endswith('just the probability!>\n\nThe question is: Who?\n\nGuess:')
    two = written_answers.verbalized_2s(question, ' Ann\n', True)
    text = written_answers.as_text(two.messages, two.lead)
    assert text.startswith('Question: Who?\nAnswer: Ann\n\nProvide the probability that your guess')
    assert text.endswith('just the probability!>\n\nProbability:')


@pytest.mark.parametrize('text, lead, outcome', [
    (' Ann\nProbability: 0.7', 'Guess:', (0.7, True)),
    (' Bob\nProbability: 70%', 'Guess:', (0.7, False)),
    ('**Guess:** Ann\n**Probability:** .9', '', (0.9, True)), ('Ann, 0.7', '', None),
    ('**Guess**: Ann\n\n**Probability**: 0.9', '', (0.9, True)),
    ('**Guess:**\nAnn\n\n**Probability:**\n0.9', '', (0.9, True)),
    ('Guess: Ann, Probability (0.0 to 1.0): 0.8', '', (0.8, True)),
    ('Guess: Ann\nProbability that it is right: `0.8`', '', (0.8, True)),
    ('{"guess": "Ann", "probability": 0.8}', '', (0.8, True)),
    ('**Guess:**\n**Probability:** 0.9', '', (0.9, False)),
    ('Guess: Ann\nProbability: between 0 and 1', '', None),
    ('<think>Guess: Bob\nProbability: 0.1</think>\nGuess: Ann\nProbability: 1', '', (1.0, True)),
    ('<think>Guess: Ann\nProbability: 0.1', '', None),
    (' Ann', 'Guess:', None), (' Ann\nProbability: high', 'Guess:', None)])
def test_one_stage_judges_its_guess(text, lead, outcome, tmp_path):
    write_rows(tmp_path / 'q.jsonl', [{'question': 'Who?', 'answers': ['Ann']}])
    question, = load_written(f'qa:{tmp_path / "q.jsonl"}').questions
    sample = confidence.verbalized_sample(
        written_answers.verbalized_1s(question), WRITTEN_TASKS['qa'], {'text': text},
        *grading.stated_guess(text, lead))
    assert (sample['confidence'] and (sample['confidence'], sample['correct'])) == outcome


@pytest.mark.parametrize('text, lead, value', [(' 0.7', 'Probability:', 0.7), ('0.7', '', 0.7),
                                               ('Probability: 0.7', '', 0.7), ('sure', '', None),
                                               ('**Probability**\n: 0.7', '', 0.7),
                                               ('<think>0.1 or 0.2?</think> 0.7', '', 0.7),
                                               ('<think>0.1', '', None)])
def test_two_stages_judge_the_greedy_answer(text, lead, value, tmp_path):
    write_rows(tmp_path / 'q.jsonl', [{'question': 'Who?', 'answers': ['Ann']}])
    question, = load_written(f'qa:{tmp_path / "q.jsonl"}').questions
    sample = confidence.verbalized_sample(
        written_answers.verbalized_2s(question, 'Bob', True), WRITTEN_TASKS['qa'], {'text': text},
        *grading.stated_guess(text, lead))
    assert (sample['confidence'] and (sample['confidence'], sample['correct'],
                                      sample['predicted'])) == (value and (value, True, 'Bob'))


# ------------------------------------------------------------------------------------------------
# P(IK)
# ------------------------------------------------------------------------------------------------

def least_loss(x, shares, penalty):
    """w and b of the least mean cross-entropy + penalty * |w|^2, by LBFGS in float64."""
    x, shares = torch.tensor(x), torch.tensor(shares)
    w, b = torch.zeros(x.shape[1], dtype=torch.float64, requires_grad=True), torch.zeros(
        1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([w, b], max_iter=2000, tolerance_grad=1e-12,
                                  tolerance_change=1e-15, line_search_fn='strong_wolfe')

    def loss():
        optimizer.zero_grad()
        z = x @ w + b
        value = torch.nn.functional.binary_cross_entropy_with_logits(z, shares) + penalty * w @ w
        value.backward()
        return value

    optimizer.step(loss)
    return lambda new: torch.sigmoid(torch.tensor(new) @ w + b).detach().numpy()


@pytest.mark.slow
@pytest.mark.parametrize('n, dimensions', [(60, 7), (40, 90)])
def test_p_ik_is_a_cross_validated_ridge_logistic_regression(n, dimensions):
    """Against a plain loop over folds and penalties, in the dimensions themselves."""
    rng = np.random.default_rng(0)
    states = rng.normal(size=(n, dimensions)) * rng.uniform(0.1, 30, dimensions) + 5
    shares = rng.binomial(8, 1 / (1 + np.exp(-2 * (states[:, 0] - 5)))) / 8
    groups = [f'{i:03}' for i in rng.permutation(n)]
    order = sorted(range(n), key=lambda i: (shares[i], groups[i]))
    ranks = {i: rank for rank, i in enumerate(order)}
    x = (states - states.mean(0)) / states.std(0) / math.sqrt(dimensions)
    expected, folds = np.empty(n), np.array([ranks[i] % 5 for i in range(n)])
    for fold in range(5):
        losses = {}
        for penalty in p_ik.PENALTIES:
            p, y = [], []
            fit = least_loss(x[(folds != fold) & (folds != (fold + 1) % 5)],
                             shares[(folds != fold) & (folds != (fold + 1) % 5)], penalty)
            for i in np.flatnonzero(folds == (fold + 1) % 5):
                p.append(float(fit(x[i])[0]))
                y.append(shares[i])
            losses[penalty] = -np.mean([s * math.log(c) + (1 - s) * math.log(1 - c)
                                        for c, s in zip(p, y, strict=True)])
        best = min(losses, key=losses.get)
        fit = least_loss(x[folds != fold], shares[folds != fold], best)
        for i in np.flatnonzero(folds == fold):
            expected[i] = fit(x[i])[0]
    np.testing.assert_allclose(p_ik.cross_validated(states, shares, groups), expected, atol=2e-5)


def test_p_ik_knows_what_the_states_tell_and_no_more():
    rng = np.random.default_rng(1)
    states, k = rng.normal(size=(1000, 30)), 10
    p = 1 / (1 + np.exp(-2 * states[:, 3]))
    shares, first = rng.binomial(k, p) / k, rng.random(1000) < p
    groups = [*map(str, range(1000))]
    told = p_ik.cross_validated(states, shares, groups)
    assert np.abs(told - p).mean() < 0.05 and metrics.ece(told, first) < 0.06
    order = rng.permutation(1000)
    again = p_ik.cross_validated(states[order], shares[order], [groups[i] for i in order])
    np.testing.assert_allclose(again, told[order], atol=1e-7)
    blind = p_ik.cross_validated(states, rng.permutation(shares), groups)
    assert blind.std() < 0.06 and abs(blind.mean() - shares.mean()) < 0.02
    # the same question in five languages: a fit to the others would know its answers
    states = np.repeat(rng.normal(size=(60, 100)), 5, 0) + 0.01 * rng.normal(size=(300, 100))
    shares = np.repeat(rng.integers(0, 2, 60), 5).astype(float)
    for names, low, high in (([*map(str, range(300))], 0.95, 1), (
            [str(i // 5) for i in range(300)], 0.3, 0.7)):
        values = p_ik.cross_validated(states, shares, names)
        assert low <= metrics.auroc(values, shares > 0) <= high


@pytest.mark.parametrize('shares', [0.0, 1.0])
def test_p_ik_of_what_is_always_or_never_right(shares):
    states = np.ones((6, 3))        # and states that do not differ
    values = p_ik.cross_validated(states, np.full(6, shares), 'abcdef')
    np.testing.assert_allclose(values, shares, atol=1e-3)


@pytest.mark.slow
def test_p_ik_reads_the_state_at_the_end_of_each_prompt(asked, tmp_path, monkeypatch):
    folder, reference, _ = asked
    tokenizer = load_tokenizer(folder / 'model')
    seen, fit = [], p_ik.cross_validated

    def remember(*arguments):
        seen.append((*arguments, fit(*arguments)))
        return seen[-1][-1]

    monkeypatch.setattr(p_ik, 'cross_validated', remember)
    ask(folder, tmp_path, '--p_ik', '--pack_len=64')
    (states, shares, _, values), = seen
    answers = {s['id']: s for s in samples_of(tmp_path, 'qa')}
    rows = {s['id']: s for s in samples_of(tmp_path, 'qa.p_ik')}
    assert len(rows) == 10 and sorted(s['confidence'] for s in rows.values()) == sorted(values)
    for i, id in enumerate(sorted(answers)):
        prompt = f'{HEADER}{SHOTS}Question: What is the colour of {id}?\nAnswer:'
        ids = torch.tensor([[tokenizer.bos_id, *tokenizer.encode(prompt)]])
        with torch.no_grad():
            state = reference(ids, output_hidden_states=True).hidden_states[-1][0, -1]
        np.testing.assert_allclose(states[i], state, atol=1e-4)
        right = [answer['correct'] for answer in answers[id]['answers']]
        assert shares[i] == np.mean(right) and rows[id]['correct'] == right[0]
        assert rows[id]['confidence'] == values[i]
    monkeypatch.setattr(scoring.Reader, 'states', lambda *_: pytest.fail('states again'))
    ask(folder, tmp_path, '--p_ik', '--pack_len=64')


@pytest.mark.slow
def test_a_model_is_tuned_to_say_what_it_knows(asked, tmp_path):
    """train.py on samples.jsonl: as many letters A as right answers; then evaluate.py asks."""
    folder, *_ = asked
    tokenizer, rows = load_tokenizer(folder / 'model'), samples_of(folder / 'out', 'qa')
    for i, row in enumerate(rows):      # shares from 0 to 1, of 4 answers
        for k, answer in enumerate(row['answers']):
            answer['correct'] = k < i % 5
    stale = rows[3] | {'prompt': 'x', 'answers': []}
    (tmp_path / 'samples.jsonl').write_text('\n'.join(json.dumps(row) for row in (
        stale, *rows, *samples_of(folder / 'out', 'qa.agreement'))) + '\n')
    sequences = load_answers(f'p_ik:{tmp_path}', tokenizer, max_length=200, add_bos=True,
                             cache_dir=tmp_path / 'cache')
    letters = {}
    for tokens, loss_mask in (sequences[i] for i in range(len(sequences))):
        text = tokenizer.decode(tokens.tolist()[1:])        # without BOS
        assert tokenizer.decode(tokens[loss_mask == 1].tolist(), start=False).strip() == text[-1]
        letters.setdefault(text[:-2], []).append(text[-1])
    assert letters == {(f'Question: What is the colour of {row["id"]}?\nDo you know the answer?\n'
                        f'A. Yes\nB. No\nAnswer:'): [*'A' * (i % 5), *'B' * (4 - i % 5)]
                       for i, row in enumerate(rows)}
    train(TrainConfig(model=str(folder / 'model'), data=f'p_ik:{tmp_path}', data_kind='questions',
                      cache_dir=str(tmp_path / 'cache'), out_dir=str(tmp_path / 'tuned'),
                      max_length=200, pack_len=200, micro_rows=10, batch_size=40, epochs=60,
                      lr=3e-3, warmup=0.1, checkpoint_epochs=False, save_every=None,
                      device='cpu', pictures=False, save_dtype='float32'))
    arguments = [f'--model={tmp_path / "tuned"}', f'--tasks=p_ik:{tmp_path}', '--device=cpu',
                 '--n_bootstrap=10', '--pictures=False']
    with pytest.raises(DataError, match='5 shots wanted, but p_ik has none'):
        evaluate.main(arguments)
    evaluate.main([*arguments, '--shots=0'])
    known = {s['id']: s for s in samples_of(tmp_path / 'tuned', 'p_ik')}
    assert len(known) == 10
    for i, row in enumerate(rows):
        sample = known[f'qa/{row["id"]}']
        assert sample['correct'] == (i % 5 > 0)     # its first drawn answer
        assert sample['confidence'] == pytest.approx(i % 5 / 4, abs=0.1)
    result = json.loads((tmp_path / 'tuned' / 'results.json').read_text())['tasks']['p_ik']
    assert result['distribution'] == 'P(IK) of a drawn answer, asked in words, 0 shots, plain text'
    assert 'n' not in result and {'auroc', 'brier_skill', 'prr'} <= result['pooled'].keys()


@pytest.mark.parametrize('name, message', [
    ('p_ik', 'no samples given'), ('p_ik:{}/none', 'no file or folder'),
    ('p_ik:{}', 'has no samples of written answers')])
def test_samples_without_written_answers_are_refused(name, message, tmp_path):
    write_rows(tmp_path / 'samples.jsonl', [{'task': 'mmlu', 'id': '1', 'answer': 1}])
    with pytest.raises(DataError, match=message):
        load_p_ik(name.format(tmp_path))


def test_questions_to_tune_on_are_not_the_shots(tmp_path):
    rows = [{'question_id': f'q{i}', 'question': f'Who is {i}?', 'answer': {
        'value': 'Ann', 'aliases': []}} for i in range(6)]
    write_rows(tmp_path / 'train.jsonl', rows)
    loaded = load_written(f'triviaqa_train:{tmp_path}', shots=2)
    assert [q.id for q in loaded.shots['']] == ['q0', 'q1']
    assert [q.id for q in loaded.questions] == ['q2', 'q3', 'q4', 'q5']


# ------------------------------------------------------------------------------------------------
# The papers' scripts
# ------------------------------------------------------------------------------------------------

def tables_of(script, out, hubs, tasks):
    """The lines that a script writes when each run, {folder: hub name}, has the results `tasks`."""
    for folder, hub in hubs.items():
        (out / folder).mkdir(parents=True)
        (out / folder / 'results.json').write_text(json.dumps({'config': {'model': hub},
                                                               'tasks': tasks}))
    done = run_scripts(1, f'research/papers/{script}.py', f'--out_dir={out}')
    assert done.returncode == 0, done.stderr
    return (out / 'calibration.csv').read_text().splitlines()


def models_of(tmp_path, script):
    code = tmp_path / f'{script}_models.py'
    code.write_text(f"import json, sys; sys.path.insert(0, 'research/papers'); "
                    f"import {script}; print(json.dumps({script}.MODELS))")
    return json.loads(run_scripts(1, code).stdout)


@pytest.mark.slow
def test_semantic_calibration_tabulates_the_share_of_the_largest_class(tmp_path):
    """Its table is made of finished runs; no model is needed."""
    hubs = {f'{model}/{stage}': hub for model, (_, stages) in models_of(
        tmp_path, 'semantic_calibration').items() for stage, hub in stages.items()}
    pooled = {key: 0.25 for key in ('accuracy', 'confidence', 'gap', 'smooth_ece', 'ece')}
    tasks = {task: {'source': task} for task in ('triviaqa', 'gsm8k', 'gsm8k_short')}
    bins = {key: x.tolist() for key, x in metrics.bins(np.full(50, 0.4), np.arange(50) % 3 == 0
                                                       ).items()}
    tasks['gsm8k.agreement'] = {'pooled': pooled | {'n': 1319}, 'ece_floor': 0.02, 'bins': bins}
    lines = tables_of('semantic_calibration', tmp_path, hubs, tasks)
    assert len(lines) == 1 + 11
    assert lines[1].startswith('"GSM8K, chain of thought",Qwen2.5-1.5B,base,1319,0.250')
    assert lines[-1].endswith('Mistral-7B,DPO,1319,0.250,0.250,0.250,0.250,0.250,0.020')
    assert (tmp_path / 'reliability.png').read_bytes().startswith(b'\x89PNG')


def test_code_calibration_tabulates_each_confidence_before_and_after_scaling(tmp_path):
    hubs = {model: hub for model, (hub, _) in models_of(tmp_path, 'code_calibration').items()}
    pooled = {key: 0.25 for key in ('accuracy', 'confidence', 'ece', 'brier_top_label', 'auroc')}
    pooled |= {'brier_skill': -0.5, 'n': 164}
    scaled = {'post_hoc': {'reports': {'platt': pooled | {'ece': 0.125}}}}
    tasks = {'humaneval': {'source': 'humaneval', 'pooled': pooled} | scaled,
             'humaneval.mean_token': {'pooled': pooled} | scaled}
    lines = tables_of('code_calibration', tmp_path, hubs, tasks)
    assert len(lines) == 1 + 4 * 2 * 2
    assert lines[1] == 'CodeLlama-7B,p_avg,none,164,0.250,0.250,0.250,0.250,-0.500,0.250'
    assert lines[2] == 'CodeLlama-7B,p_avg,Platt,164,0.250,0.250,0.125,0.250,-0.500,0.250'
