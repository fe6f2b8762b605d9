"""Written answers: files, prompts, evaluations with a model."""

import math
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from common import (asking, cases_of, log_probs_after, recorded, reference_model, results_of,
                    sentencepiece_folder, write_rows)

import evaluate
from written import (answer_samples, benchmarks as written_answers, code_tasks,
                     tasks as written_tasks)
from data.chat import encode_prompt
from data.tokenizer import load_tokenizer
from data.question_answers import load_answers
from written.benchmarks import WRITTEN_TASKS, load_written
from results.samples import latest_samples, read_samples
from runtime.errors import ConfigError, DataError
from written.p_ik_probe import cross_validated
from written.sandbox import run_program

CASES = cases_of('grading_cases.toml')

# ---- Files ---------------------------------------------------------------------------------------

def test_triviaqa_asks_a_repeated_question_once(tmp_path):
    rows = [{'question_id': f'tc_{i // 2}', 'question': f'Who is {i // 2}?', 'answer': {
        'value': 'Ann', 'aliases': ['Ann', 'Anne'], 'normalized_value': 'ann'}} for i in range(6)]
    for split in ('validation', 'train'):
        write_rows(tmp_path / f'{split}.jsonl', rows)
    # to tune on: not the shots
    for task, ids in (('triviaqa', ['tc_0', 'tc_1', 'tc_2']), ('triviaqa_train', ['tc_2'])):
        loaded = load_written(f'{task}:{tmp_path}', asking(shots=2))
        assert [q.id for q in loaded.shots['']] == ['tc_0', 'tc_1']
        assert [q.id for q in loaded.items] == ids
    assert loaded.items[0].context == 'Question: Who is 2?\nAnswer:'


def test_popqa_is_read_from_its_tsv_and_a_malformed_row_is_a_bad_row(tmp_path):
    (tmp_path / 'test.tsv').write_text('id\tprop\tquestion\tpossible_answers\n'
                                       '42\tjob\tWhat?\t"[""politician"", ""a, b""]"\n')
    question, = load_written(f'popqa:{tmp_path}', asking()).items
    assert (question.id, question.subject) == ('42', 'job')
    assert question.references == ['politician', 'a, b']
    path = tmp_path / 'test.jsonl'
    good = {'question': 'Who?', 'possible_answers': '["a"]', 'answers': ['a'], 'prop': 'x', 'id': 1}
    for task, row, message in (
            ('popqa', {'possible_answers': '[]'}, 'possible_answers must be a JSON list'),
            ('popqa', {'possible_answers': '["a", 1]'}, 'a reference answer is not text but int'),
            ('popqa', {'possible_answers': '[""]'}, 'wanted a question and one reference answer'),
            ('popqa', {'prop': None}, 'the subject is missing'),
            ('qa', {'answer': 'Bob'}, '"answer" is not among "answers"')):
        write_rows(path, [good | row, good])
        with pytest.raises(DataError, match=f'test.jsonl:1: {message}'):
            load_written(f'{task}:{path}', asking())
        loaded = load_written(f'{task}:{path}', asking(on_bad_row='skip'))
        assert (len(loaded.items), len(loaded.bad_rows)) == (1, 1)


def test_a_proposed_or_verbalized_answer_continues_the_prompt_of_its_paper(tmp_path):
    rows = [{'question': 'Who?', 'answers': ['Ann'], 'language': 'de', 'subject': 'names'}]
    question, = load_written(f'qa:{write_rows(tmp_path / "q.jsonl", rows)}', asking()).items
    assert (question.language, question.subject) == ('de', 'names')
    one, two = (written_answers.as_text(stage.messages, stage.lead) for stage in (
        written_answers.verbalized_1s(question),
        written_answers.verbalized_2s(question, ' Ann\n', True)))
    assert one.startswith('Provide your best guess and the probability that it is correct (0.0 to')
    assert one.endswith('just the probability!>\n\nThe question is: Who?\n\nGuess:')
    assert two.startswith('Question: Who?\nAnswer: Ann\n\nProvide the probability that your guess')
    assert two.endswith('just the probability!>\n\nProbability:')
    question.context = 'def f():\n    """One."""'
    assert '"""\n    return 1\nIs the' in written_answers.proposed(
        question, '\n    return 1\n', True).context


# ---- With a model --------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def asked(tmp_path_factory):
    """A tiny Llama and a file of questions, some of whose references the model writes itself."""
    folder = tmp_path_factory.mktemp('asked')
    tokenizer = load_tokenizer(sentencepiece_folder(folder / 'model', 'mistral'))
    reference = reference_model('llama', folder / 'model', max_position_embeddings=4096,
                                num_hidden_layers=1, vocab_size=tokenizer.n_vocab)
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
    return results_of(out)['tasks']


def samples_of(out, task):
    return [s for s in latest_samples(read_samples(out / 'samples.jsonl')) if s['task'] == task]


HEADER = 'Answer these questions as briefly as possible.\n\n'
INSTRUCTION = 'Give only the answer, in one to five words.'
PROMPT = HEADER + ('Question: What is fox 0?\nAnswer: blue 0\n\n'
                   'Question: What is fox 1?\nAnswer: blue 1\n\n'
                   'Question: What is the colour of {}?\nAnswer:')


@pytest.mark.parametrize('chat', ['none', 'tulu'])
def test_probabilities_of_an_answer_are_those_of_transformers(asked, tmp_path, monkeypatch, chat):
    folder, reference, _ = asked
    tokenizer = load_tokenizer(folder / 'model')
    written = recorded(monkeypatch, answer_samples, 'written', lambda answer: (
        (answer.text, math.fsum(answer.log_probs)), [*answer.tokens]))
    shots, words = (2, 'plain text') if chat == 'none' else (0, 'chat template tulu')
    tasks = ask(folder, tmp_path, '--limit=2', f'--chat={chat}', f'--shots={shots}')
    assert tasks['qa']['distribution'].endswith(f'greedy answer, {shots} shots, {words}')
    tokens = dict(written)
    for row in samples_of(tmp_path, 'qa'):
        prompt = [tokenizer.bos_id, *tokenizer.encode(PROMPT.format(row['id']))]
        if chat == 'tulu':
            text = f'Question: What is the colour of {row["id"]}?\n{INSTRUCTION}'
            prompt, _ = encode_prompt([{'role': 'user', 'content': text}], tokenizer, 'tulu')
        greedy = row['greedy']
        for answer in (greedy, *row['answers']):
            log_probs = log_probs_after(reference, prompt,
                                        tokens[answer['text'], answer['log_prob']])
            assert answer['log_prob'] == pytest.approx(sum(log_probs), abs=2e-4)
            assert answer['mean_prob'] == pytest.approx(np.exp(log_probs).mean(), abs=1e-4)
            assert answer['n_tokens'] == len(log_probs)
            if answer is greedy:
                np.testing.assert_allclose(answer['log_probs'], log_probs, atol=1e-4, rtol=1e-3)
                assert len(answer['entropies']) == len(log_probs) and min(answer['entropies']) > 0
        assert row['confidence'] == pytest.approx(math.exp(greedy['log_prob']))


def test_p_true_is_that_of_transformers(asked):
    folder, reference, _ = asked
    tokenizer = load_tokenizer(folder / 'model')
    answers = {s['id']: s for s in samples_of(folder / 'out', 'qa')}

    def p_true(text):
        ids = tokenizer.encode(text)
        true, false = (sum(log_probs_after(reference, [tokenizer.bos_id, *ids],
                                           tokenizer.encode(text + option)[len(ids):]))
                       for option in (' (A)', ' (B)'))
        return pytest.approx(1 / (1 + math.exp(false - true)), abs=1e-4)

    ending = '\nIs the {0} answer:\n (A) True\n (B) False\nThe {0} answer is:'
    proposed, possible = ending.format('proposed'), ending.format('possible')
    shots = ''.join(f'Question: What is fox {i}?\nProposed Answer: blue 0{proposed} ({mark})\n\n'
                    for i, mark in enumerate('AB'))
    plain, among = (samples_of(folder / 'out', f'qa.{name}')
                    for name in ('p_true', 'p_true_samples'))
    assert len(plain) == len(among) == 10 and {s['correct'] for s in plain} == {True, False}
    for row, other in zip(plain[:4], among[:4]):
        question = f'Question: What is the colour of {row["id"]}?\n'
        greedy = answers[row['id']]['greedy']
        assert row['correct'] == greedy['correct'] and other['id'] == row['id']
        assert row['confidence'] == p_true(f'{HEADER}{shots}{question}Proposed Answer: '
                                           f'{greedy["text"].strip()}{proposed}')
        ideas = [answer['answer'] or answer['text'].strip() or '(none)'
                 for answer in (greedy, *answers[row['id']]['answers'])]
        assert other['confidence'] == p_true(
            f'{question}Here are some brainstormed ideas: ' + '\n'.join(ideas) +
            f'\nPossible Answer: {ideas[0]}{possible}')


def test_results_have_an_entry_for_each_confidence(asked):
    folder, _, share = asked
    tasks = results_of(folder / 'out')['tasks']
    entries = {'qa', *(f'qa.{name}' for name in (
        'length_normalized', 'mean_token', 'answer_span', 'agreement', 'greedy_agreement',
        'entropy', 'p_true', 'p_true_samples', 'p_ik'))}
    assert tasks.keys() >= entries and 'qa.stated' not in tasks
    accuracy = tasks['qa']['pooled']['accuracy']
    assert accuracy == share == tasks['qa']['written']['lenient_accuracy'] and share > 0
    for name in entries:
        assert tasks[name]['pooled']['n'] == 10 - tasks[name].get('unparsed', 0)
        assert [*tasks[name]['post_hoc']['reports']] == ['platt', 'isotonic']
    assert tasks['qa.agreement']['ece_floor'] > 0 == tasks['qa.agreement']['unparsed']


def test_an_interrupted_evaluation_resumes(asked, tmp_path):
    folder, *_ = asked
    whole = (folder / 'out' / 'samples.jsonl').read_bytes()
    out = shutil.copytree(folder / 'out', tmp_path / 'out')
    (out / 'samples.jsonl').write_bytes(whole[:len(whole) // 3])
    (out / 'results.json').unlink()
    ask(folder, out, '--p_true', '--p_ik', '--verbalized')
    assert sorted((out / 'samples.jsonl').read_bytes().split(b'\n')) == sorted(whole.split(b'\n'))


def test_answers_with_other_end_tokens_are_not_added_to_earlier_ones(asked, tmp_path):
    for name in ('model', 'qa'):
        shutil.copytree(asked[0] / name, tmp_path / name)
    ask(tmp_path, tmp_path / 'out')
    lines = (tmp_path / 'out' / 'samples.jsonl').read_bytes().splitlines(keepends=True)
    (tmp_path / 'out' / 'samples.jsonl').write_bytes(b''.join(lines[:5]))
    (tmp_path / 'model' / 'generation_config.json').write_text('{"eos_token_id": [2, 9]}')
    with pytest.raises(ConfigError, match=r'holds samples with end_ids = \[2\], not \[2, 9\]'):
        ask(tmp_path, tmp_path / 'out')


def test_a_confidence_in_earlier_answers_is_left_out(asked, tmp_path, capsys, monkeypatch):
    folder, *_ = asked
    entries = {'qa.p_true', 'qa.p_true_samples', 'qa.p_ik'}
    out = shutil.copytree(folder / 'out', tmp_path / 'out')
    before = ask(folder, out)
    assert entries <= before.keys()
    capsys.readouterr()
    assert not entries & ask(folder, out, '--seed=1').keys()
    assert 'qa.p_ik: left out, since the answers to qa have changed' in capsys.readouterr().out
    after = ask(folder, out, '--p_true', '--p_ik')     # each is still in samples.jsonl
    assert {name: after[name]['pooled'] for name in entries} == {
        name: before[name]['pooled'] for name in entries}
    # other grades: the same answers are graded again, and the confidences were in others
    monkeypatch.setattr(WRITTEN_TASKS['qa'], 'match', lambda *_: True)
    monkeypatch.setattr(answer_samples, 'generate',
                        lambda *_: pytest.fail('answers were generated'))
    graded = ask(folder, out)
    assert not entries & graded.keys() and before['qa']['pooled']['accuracy'] < 1
    assert graded['qa']['pooled']['accuracy'] == graded['qa.agreement']['pooled']['accuracy'] == 1


def test_written_programs_are_run_only_if_that_is_allowed(asked, tmp_path, monkeypatch):
    problem = cases_of('sandbox_programs.toml')['problems']['add']
    path = write_rows(tmp_path / 'humaneval.jsonl', [problem, problem | {'task_id': 'T/1'}])
    arguments = [f'--tasks=humaneval:{path}', '--shots=0', '--n=2', '--p_true']
    with pytest.raises(ConfigError, match='--run_code'):
        ask(asked[0], tmp_path, *arguments)
    try:
        run_program('', 'pass')
    except ConfigError as error:
        pytest.skip(str(error))
    question, _ = load_written(f'humaneval:{path}', asking()).items
    assert question.id == 'T/0' and question.context.endswith('"""')
    grades = [WRITTEN_TASKS['humaneval'].grade(text, question.references)['correct']
              for text in ('\n    return a + b\nprint(1)', '\n    return a', ' \n')]
    assert grades == [True, False, False]
    ask(asked[0], tmp_path, *arguments, '--run_code')
    rows = samples_of(tmp_path, 'humaneval')
    assert [row['greedy']['correct'] for row in rows] == [False, False]
    monkeypatch.setattr(code_tasks, 'check', lambda *_, **__: pytest.fail('a program ran again'))
    ask(asked[0], tmp_path, *arguments, '--run_code')
    assert samples_of(tmp_path, 'humaneval') == rows
    with pytest.raises(pytest.fail.Exception, match='ran again'):
        ask(asked[0], tmp_path, *arguments, '--run_code', '--isolation=limits')


def test_settings_that_do_not_apply_are_refused(asked, tmp_path):
    for arguments, message in ((['--permute=2'], 'permute'), (['--languages=de'], 'one language'),
                               (['--n=0'], 'n = 0'), (['--max_length=20'], 'even without shots'),
                               (['--chat=alpaca', '--verbalized'], 'one turn|one user|single')):
        with pytest.raises((ConfigError, DataError), match=message):
            ask(asked[0], tmp_path, *arguments)


# ---- Stated probabilities ------------------------------------------------------------------------

@pytest.mark.parametrize('text, lead, outcome', [
    (text, lead, tuple(outcome) or None) for text, lead, *outcome in CASES['guesses']])
def test_a_stated_probability_is_of_the_guess_or_of_the_greedy_answer(text, lead, outcome):
    question = written_answers.WrittenQuestion('0', 'Who?', 'Question: Who?\nAnswer:', ['Ann'], '')
    stage = (written_answers.verbalized_2s(question, 'Bob', True)
             if 'uess' not in text + lead and 'Ann' not in text
             else written_answers.verbalized_1s(question))
    task = written_tasks.StatedConfidence('qa.x', 'qa', [], {}, [], 0, parent=SimpleNamespace(
        rule=WRITTEN_TASKS['qa']))
    sample = task.answer_sample(stage, [{'text': text}], asking(chat='none' if lead else 'tulu'))
    assert (sample['confidence'] and (sample['confidence'], sample['correct'])) == outcome
    assert not stage.judged or not outcome or sample['predicted'] == 'Bob'


def test_p_ik_reads_the_state_at_the_end_of_each_prompt(asked, tmp_path, monkeypatch):
    folder, reference, _ = asked
    tokenizer = load_tokenizer(folder / 'model')
    fits = recorded(monkeypatch, written_tasks, 'cross_validated')
    ask(folder, tmp_path, '--p_ik', '--pack_len=64')
    (states, shares, names), = fits
    values = cross_validated(states, shares, names)
    answers = {s['id']: s for s in samples_of(tmp_path, 'qa')}
    rows = {s['id']: s for s in samples_of(tmp_path, 'qa.p_ik')}
    assert len(rows) == 10
    for i, id in enumerate(sorted(answers)):
        ids = torch.tensor([[tokenizer.bos_id, *tokenizer.encode(PROMPT.format(id))]])
        with torch.no_grad():
            state = reference(ids, output_hidden_states=True).hidden_states[-1][0, -1]
        np.testing.assert_allclose(states[i], state, atol=1e-4)
        right = [answer['correct'] for answer in answers[id]['answers']]
        assert shares[i] == np.mean(right) and rows[id]['correct'] == right[0]
        assert rows[id]['confidence'] == values[i]


def test_a_model_can_be_tuned_and_asked_to_say_what_it_knows(asked, tmp_path):
    folder, *_ = asked
    tokenizer, rows = load_tokenizer(folder / 'model'), samples_of(folder / 'out', 'qa')
    for i, row in enumerate(rows):      # shares from 0 to 1, of 4 answers
        for k, answer in enumerate(row['answers']):
            answer['correct'] = k < i % 5
    outdated = rows[3] | {'prompt': 'x', 'answers': []}
    write_rows(tmp_path / 'samples.jsonl', [outdated, *rows,
                                            *samples_of(folder / 'out', 'qa.agreement')])
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
    result = ask(folder, tmp_path / 'out', f'--tasks=p_ik:{tmp_path}', '--shots=0')['p_ik']
    assert {f'qa/{row["id"]}': i % 5 > 0 for i, row in enumerate(rows)} == {    # the first drawn
        s['id']: s['correct'] for s in samples_of(tmp_path / 'out', 'p_ik')}
    assert result['distribution'] == 'P(IK) of a drawn answer, asked in words, 0 shots, plain text'
    assert 'n' not in result and {'auroc', 'brier_skill', 'prr'} <= result['pooled'].keys()
