"""data: questions"""

import shutil

import numpy as np
import pyarrow.parquet
import pytest
import transformers
from common import asking, cases_of, sentencepiece_folder, write_rows

import evaluate
from data import benchmarks, questions
from data.chat import encode_conversation
from evaluate import load_tasks
from data.tokenizer import load_tokenizer
from data.trees import tokenize_questions
from runtime.errors import ConfigError, DataError
from test_tokenizer import KINDS, train_bpe


Q = {'question': 'Q?', 'choices': ['a', 'b'], 'answer': 0}
ROWS = cases_of('question_rows.json')


def parse(row, task=None):
    benchmark = benchmarks.BENCHMARKS[task] if task else benchmarks.GENERIC
    return questions.parse_row(row, benchmark.row)


def load_task(name, **options):
    return questions.load_task(str(name), asking(**options))


def load(path, rows, task='', **options):
    """Load a file with these rows."""
    return load_task(f'{task}:{write_rows(path, rows)}'.removeprefix(':'), **options)


@pytest.mark.parametrize('row, task', ROWS['schemes'])
def test_rows_in_every_naming_scheme(row, task):
    text, choices, answer = parse(row, task)
    assert text.strip() == 'Q?' and choices[:3] == ['a', 'b', 'c'] and answer == 2


@pytest.mark.parametrize('row, task, n_choices', ROWS['not_applicable'])
def test_an_option_not_applicable_is_an_option_unless_it_is_padding(row, task, n_choices):
    assert len(parse(row | {'question': 'Q?', 'answer': 'A'}, task)[1]) == n_choices


SCORED = ROWS['scored']


@pytest.mark.parametrize('row, task', SCORED)
def test_choices_with_scores_are_in_an_order_that_says_nothing_of_the_answer(row, task):
    """Their files begin with the right choice."""
    text, choices, answer = parse(row, task)
    assert text == 'Q?' and sorted(choices) == ['maybe', 'no', 'yes'] and choices[answer] == 'yes'
    field = 'input' if task is None else 'question'
    places = [parse(row | {field: f'{i}?'}, task)[2] for i in range(300)]
    assert 70 < min(np.bincount(places)) and len({*places}) == 3
    best = row[[*row][1]]   # with another answer the order stays the same
    other = {'choices': [*best['choices']], 'labels': [0, 1, 0]} if 'labels' in best else {
        'yes': 0, 'no': 1, 'maybe': 0}
    assert parse(row | {[*row][1]: other}, task) == (text, choices, choices.index('no'))


def test_big_bench_and_inverse_scaling_are_files_of_questions(tmp_path):
    examples = [SCORED[0][0], {'input': 'R?', 'target_scores': {'a': 0, 'b': 1}}]
    folder = tmp_path / 'causal_judgment'
    file = write_rows(folder / 'task.json', {'name': 'x', 'examples': examples})
    for place in (folder, file):
        first, second = load_task(place).items
        assert first.context.startswith('Q?\nA. ') and first.options == [' A', ' B', ' C']
        assert second.place == f'{file}: row 2'
    row = {'prompt': 'A beagle is not a\nA. dog\nB. bird\nAnswer:', 'classes': [' A', ' B'],
           'answer_index': 1, 'other_prompt': 'x'}
    rows = [row, row | {'prompt': 'Say it. ', 'classes': '[" A", " B"]'}]
    first, second = load(tmp_path / 'NeQA.jsonl', rows, prompt_format='harness').items
    assert (first.header, first.context, first.options) == ('', row['prompt'], [' A', ' B'])
    assert (second.context, second.options) == ('Say it.', ['  A', '  B'])      # as lm-eval does


def test_truthfulqa_is_asked_without_shots(tmp_path):
    path = tmp_path / 'multiple_choice' / 'validation-00000-of-00001.parquet'
    write_rows(path, [SCORED[2][0]])
    (question,), *_ = load_task(f'truthfulqa_mc1:{tmp_path}', prompt_format='harness')
    assert question.context.startswith('Q: What is human life expectancy in the United States?\n')
    assert question.context.endswith('Barcelona, Spain.\n\nQ: Q?\nA:')
    assert question.context.count('Q: ') == 7 and question.options[question.answer] == ' yes'
    for place in (tmp_path, path):
        with pytest.raises(DataError, match='truthfulqa_mc1 has no solved questions.*--shots=0'):
            load_task(f'truthfulqa_mc1:{place}', shots=5)
    with pytest.raises(DataError, match='truthfulqa_mc1 has no solved questions for training'):
        questions.solved_files(f'truthfulqa_mc1:{tmp_path}')


@pytest.mark.parametrize('task, row, message', ROWS['bad'])
def test_bad_rows_name_their_line(tmp_path, task, row, message):
    with pytest.raises(DataError, match=f'some.jsonl:1: .*{message}'):
        load(tmp_path / 'some.jsonl', [Q | row if isinstance(row, dict) else row], task,
             prompt_format='harness' if task.startswith('winogrande') else 'mmlu')


@pytest.mark.parametrize('answers, message', ROWS['two_ways'])
def test_answers_that_could_be_read_in_two_ways_are_refused(tmp_path, answers, message):
    rows = [Q | {'choices': list('wxyz'), 'answer': answer} for answer in answers]
    path = tmp_path / 'some.jsonl'
    if message is None:
        assert [q.answer for q in load(path, rows, on_bad_row='skip').items] == [
            'abcd'.index(str(answer).lower()) if str(answer).isalpha() else int(answer)
            for answer in answers if answer != 7]
        return
    with pytest.raises(DataError, match=f'some.jsonl:{message}'):
        load(path, rows, on_bad_row='skip')
    _, to_questions, read = questions.solved_files(str(write_rows(tmp_path / 'dev.jsonl', rows)))
    with pytest.raises(DataError, match=message.replace('some', 'dev')):    # in training
        [*read([tmp_path / 'dev.jsonl'], {})]


@pytest.mark.parametrize('choices, named', ROWS['named'])
def test_options_that_name_options_are_counted_if_their_order_changes(tmp_path, capsys, choices,
                                                                     named):
    load(tmp_path / 'some.jsonl', [Q | {'choices': choices}], permute=2)
    noted = 'the options of 1 questions seem to name options' in capsys.readouterr().out
    assert noted == named
    load(tmp_path / 'some.jsonl', [Q | {'choices': choices}])
    assert not capsys.readouterr().out


def test_bad_rows_stop_or_are_skipped(tmp_path):
    write_rows(tmp_path / 'dev.jsonl', [Q | {'answer': 7}, Q | {'question': 'Shot?'}])
    write_rows(tmp_path / 'test.jsonl', [Q])
    with pytest.raises(DataError, match='dev.jsonl:1: no valid answer.*--on_bad_row=skip'):
        load_task(tmp_path, shots=1)
    (question,), shots, bad_rows, _ = load_task(tmp_path, shots=1, on_bad_row='skip')
    assert len(bad_rows) == 1 and question.context[:2] == 'Q?'
    assert [q.context[:5] for q in shots['', 'various things']] == ['Shot?']


def test_the_shots_of_a_folder_of_own_files_are_not_asked(tmp_path, capsys):
    for name in ('dev', 'validation', 'mine'):
        write_rows(tmp_path / f'{name}.jsonl', [Q | {'question': f'{name}?'}])
    (tmp_path / 'more.jsonl.gz').touch()
    assert [q.context[:5] for q in load_task(tmp_path, shots=1).items] == ['mine?']
    printed = capsys.readouterr().out
    assert printed.count('*.jsonl is read, and not more.jsonl.gz; to read all') == 1
    assert 'among their shots' not in printed
    in_another_order = {'question': 'dev? ', 'choices': ['b', 'a'], 'answer': 1}
    for row in (Q | {'question': 'dev?'}, in_another_order):
        write_rows(tmp_path / 'mine.jsonl', [Q, row])
        load_task(tmp_path, shots=1)
        assert f'{tmp_path}: 1 questions are also among their shots' in capsys.readouterr().out


def test_ids_and_digests_differ_and_duplicate_options_are_marked(tmp_path):
    path = tmp_path / 'some.jsonl'
    ids = ['x', 'x', 'x#2', 'x', 3, '3', None, {'a': 1}, '']
    unique = [q.id for q in load(path, [Q | {'id': id} for id in ids])[0]]
    assert len(set(unique)) == len(ids) and unique[:2] == ['x', 'x#2'] and unique[6] == '6'
    choices = (['a', 'b'], ['a', ' a'], ['a', 'A'], ['a', 'b', 'b'])
    loaded = load(path, [Q | {'choices': x} for x in choices])
    assert [q.duplicate_options for q in loaded.items] == [False, True, False, True]
    # a digest does not depend on the prompt
    rows = [Q, Q | {'answer': 1}, Q | {'choices': ['a', 'c']}, Q | {'question': 'R?'}]
    first, same = ([q.digest for q in load(path, rows, **options).items]
                   for options in ({}, {'scoring': 'text'}))
    assert first[0] == first[1] and len(set(first)) == 3 and same == first


def test_a_limit_is_a_sample_over_the_subjects_of_each_language(tmp_path):
    (tmp_path / 'test').mkdir()     # MMLU's own csv files, one per subject
    for subject, n in {'algebra': 100, 'anatomy': 135, 'virology': 3, 'zoology': 400}.items():
        (tmp_path / 'test' / f'{subject}_test.csv').write_text('\ufeff' + ''.join(
            f'"{subject}, {i}?",w,x,y,z,A\n' for i in range(n)))
    loaded = load_task(f'mmlu:{tmp_path}', limit=100, seed=3)
    subjects, contexts = zip(*((q.subject, q.context) for q in loaded.items))
    assert loaded.total == 638 and len(subjects) == 100 and subjects.count('virology') == 3
    assert {subjects.count(s) for s in set(subjects) - {'virology'}} == {32, 33}
    whole = {q.id: q.context for q in load_task(f'mmlu:{tmp_path}').items}
    assert all(whole[q.id] == q.context for q in loaded.items)      # ids do not change


def test_csv_rows_fit_their_header(tmp_path):
    path = tmp_path / 'some.csv'
    for text, message in (
            ('question,A,B,C,D,answer\nQ?,a,b,c,d,B\nQ, and more?,a,b,c,d,B\n',
             '3: 7 columns; the header names 6'),
            ('question,A,A,C,D,answer\nQ?,a,b,c,d,B\n', "1: the header names 'a' twice"),
            ('id,question,A,B,target\n0,Q?,a,b,B\n', '2: no answer among .* a, b, target; wa')):
        path.write_text(text)
        with pytest.raises(DataError, match=f'some.csv:{message}'):
            load_task(path)
    path.write_text('Q?,a,b,c,d,B\n\nWhich?,question,answer,c,d,A\nQ?,a,b,c,d,B\n')
    assert [q.place[-1] for q in load_task(path).items] == ['1', '3', '4']    # no header there
    path.write_text('"Q; or\n, ?",a, b,c,d,B\n')       # a space may be part of a choice
    assert [*questions.read_rows(path)] == [(f'{path}:1', ['Q; or\n, ?', 'a', ' b', 'c', 'd', 'B'])]
    path.write_text('Prompt,response\n"Q, ?",A\n')
    assert [*questions.read_rows(path)] == [(f'{path}:2', {'prompt': 'Q, ?', 'response': 'A'})]
    columns = pyarrow.table([['Q?'], ['A'], ['B']], names=['question', 'answer', 'answer'])
    pyarrow.parquet.write_table(columns, tmp_path / 'some.parquet')
    with pytest.raises(DataError, match="some.parquet: the header names 'answer' twice"):
        [*questions.read_rows(tmp_path / 'some.parquet')]


def test_a_task_that_cannot_be_loaded_so_is_named_with_what_would_help(tmp_path):
    folder, about = tmp_path / 'folder', Q | {'subject': 'abstract_algebra'}
    for name in ('dev.jsonl', 'test.jsonl', 'de/test-00000-of-00001.parquet'):
        write_rows(folder / name, [about] * 2)
    mixed = write_rows(tmp_path / 'mixed' / 'test.jsonl', [Q | {'language': x}
                                                           for x in ('de', 'english', 'sw')])
    plain = write_rows(tmp_path / 'plain.jsonl', [Q])
    blank = write_rows(tmp_path / 'blank.jsonl', [
        {'sentence': 'A _ is old.', 'option1': 'fox', 'option2': 'dog', 'answer': '1'}])
    for name, options, message in (
            (f'mmlu:{folder}', {'shots': 5},
             "2 solved questions about 'abstract_algebra', 5 wanted; --shots=2 would"),
            (f'mmlu:{folder}/test.jsonl', {'shots': 5}, 'is one file: give a folder .* or --shot'),
            (f'mmlu_prox:{folder}', {'languages': ('xx',)}, "has no language 'xx'. It has af"),
            (f'mmlu_prox:{folder}', {'prompt_format': 'harness'}, 'has no prompt .*=harness'),
            (f'mmlu:{folder}', {'prompt_format': 'harness', 'scoring': 'text'}, 'leave out --scor'),
            (mixed, {'languages': ('de', 'englisch')}, "did you mean 'english'"),
            (plain, {'languages': ('de',)}, 'plain.jsonl has no language .* no field "language"'),
            (f'mmlu_prox:{plain}', {'header': 'native'}, "language '' has no wording"),
            (plain, {'permute': 3, 'scoring': 'text'}, 'settings scores the text of its options'),
            (f'winogrande_s:{blank}', {'contextual': True, 'prompt_format': 'harness'},
             'blank.jsonl:1: contextual needs a prompt in which N/A'),
            (f'clm:{folder}', {'chat': 'tulu'}, 'chat.*: clm scores'),
            (f'facts:{folder}', {'languages': ('de',)}, 'lang.*: facts s'),
            ('gsm9k', {}, 'did you mean .gsm8k.. The tasks are .*, gsm8k, .* clm, facts.*, each')):
        with pytest.raises((ConfigError, DataError), match=message):
            load_tasks(asking(tasks=(str(name),), **options))
    assert [q.language for q in load_task(
        mixed.parent, languages=('sw', 'de', 'de')).items] == ['de', 'sw']
    (question,), *_ = load_task(f'mmlu_prox:{plain}', languages=('de',), header='native')
    assert question.language == 'de' and question.context.endswith('\nAntwort:')


def test_an_archive_on_the_hub_is_unpacked(tmp_path, monkeypatch):
    def download(name, repo_type, allow_patterns, **_):
        assert (name, repo_type) == ('haonan-li/cmmlu', 'dataset') and '*.zip' in allow_patterns
        return str(tmp_path / 'snapshot')
    for split, n in (('dev', 2), ('test', 3)):
        path = tmp_path / 'content' / split / 'agronomy.csv'
        path.parent.mkdir(parents=True)
        path.write_text(',Question,A,B,C,D,Answer\n' + ''.join(
            f'{i},问题{split}{i},甲,乙,丙,丁,{"ABCD"[i]}\n' for i in range(n)))
    (tmp_path / 'snapshot').mkdir()
    (tmp_path / 'snapshot' / 'cmmlu_v1_0_1.tmp').write_text('mine')
    shutil.make_archive(tmp_path / 'snapshot' / 'cmmlu_v1_0_1', 'zip', tmp_path / 'content')
    monkeypatch.setattr('huggingface_hub.snapshot_download', download)
    for _ in range(2):
        asked, solved, *_ = load_task('cmmlu', shots=2, header='native')
        assert [q.answer for q in asked] == [0, 1, 2] and len(solved['', 'agronomy']) == 2
        assert asked[0].header.startswith('以下是关于农学的') and asked[0].subject == 'agronomy'
        assert asked[1].context == '问题test1\nA. 甲\nB. 乙\nC. 丙\nD. 丁\n答案：'
    assert {path.name for path in (tmp_path / 'snapshot').iterdir()} == {
        'cmmlu_v1_0_1', 'cmmlu_v1_0_1.zip', 'cmmlu_v1_0_1.tmp'}


@pytest.mark.parametrize('task, file, row, prompts, answer, letters',
                         [row.values() for row in cases_of('golden_prompts.json')])
def test_prompts_of_bayesian_lora_are_known(tmp_path, task, file, row, prompts, answer, letters):
    write_rows(tmp_path / file, [row])
    (question,), *_ = load_task(f'{task}:{tmp_path}', prompt_format='harness')
    assert not question.header and question.answer == answer
    assert [f'{part.context}|{option}' for part in question.parts
            for option in part.options] == prompts
    assert question.solved == prompts[answer].replace('|', '') + '\n\n'
    proposed = question.proposing(1)
    assert proposed.parts == [proposed] and proposed.options == [' (A)', ' (B)']
    assert prompts[1].rpartition('\n')[2].partition('|')[2].strip() in proposed.context
    (question,), *_ = load_task(f'{task}:{tmp_path}')
    assert question.context == letters and question.options == [' A', ' B']
    assert question.answer == answer and question.header.startswith('The following are multiple')


@pytest.mark.parametrize('kind, chat', [
    ('gpt2', 'none'), ('words', 'none'), ('gemma', 'none'), ('gemma', 'tulu'),
    ('mistral', 'tulu'), ('llama3', 'none'), ('llama3', 'tulu')])
def test_questions_with_any_beginning_have_the_tokens_of_the_whole_text(kind, chat, tokenizers,
                                                                        tmp_path):
    if kind in KINDS:
        train_bpe(tmp_path, **KINDS[kind])
        tokenizers = {kind: load_tokenizer(tmp_path)}
    tokenizer = tokenizers[kind]
    for header in ('', 'About 7 foxes \n \n'):
        asked = [questions.Question(str(i), f'{beginning} is it?\nAnswer:', [' A', ' 1'], 0, 's',
                                    header) for i, beginning in enumerate(ROWS['beginnings'])]
        shots = {asked[0].group: asked[:2]}
        for question, tree in tokenize_questions(asked, shots, tokenizer, add_bos=False,
                                                 max_length=10 ** 6, chat=chat):
            text = header + ''.join(shot.solved for shot in asked[:2]) + question.context
            for option, ids in zip(question.options, tree.sequences, strict=True):
                whole = tokenizer.encode(text + option)
                if chat != 'none':
                    messages = [{'role': 'user', 'content': text},
                                {'role': 'assistant', 'content': option.strip()}]
                    whole, _ = encode_conversation(messages, tokenizer, chat, add_bos=False)
                assert ids == whole[:len(ids)] and len(ids) >= len(whole) - (chat != 'none')


SHOT = ('The following are multiple choice questions (with answers) about abstract algebra.\n\n'
        'Q0?\nA. w\nB. x\nAnswer: A\n\n')


@pytest.mark.parametrize('chat', ['none', 'tulu'])
def test_show_prints_what_is_scored_and_needs_no_weights(tmp_path, capsys, chat):
    rows = [{'question': f'Q{i}?', 'choices': ['w', 'x'], 'answer': i % 2,
             'subject': 'abstract_algebra'} for i in range(4)]
    write_rows(tmp_path / 'mmlu' / 'dev.jsonl', rows[:1])
    write_rows(tmp_path / 'mmlu' / 'test.jsonl', rows[1:])
    mmlu = f'mmlu:{tmp_path}/mmlu'
    evaluate.main([f'--tasks={mmlu}', '--shots=1', '--show=2'])     # and no model
    printed = capsys.readouterr().out
    for i in (1, 2):
        assert f"{SHOT}Q{i}?\nA. w\nB. x\nAnswer:\n--- options\n' A'\n' B'\n" in printed
    assert 'mmlu: 2 of 3 questions' in printed and 'Q3?' not in printed
    (text, *_), *_ = load_task(mmlu, scoring='text', header='none')
    assert (text.header, text.context, text.options) == ('', 'Q1?\nAnswer:', [' w', ' x'])
    with pytest.raises(ConfigError, match='chat = tulu: the template needs .*--model'):
        evaluate.main([f'--tasks={mmlu}', '--shots=1', '--show=2', '--chat=tulu'])
    with pytest.raises(SystemExit):
        evaluate.main(['--tasks=help'])
    printed = capsys.readouterr().out
    assert all(f'\n{name}  {task.hub}\n' in printed for name, task in benchmarks.BENCHMARKS.items())

    folder = sentencepiece_folder(tmp_path / 'model', 'llama2')
    transformers.LlamaConfig(vocab_size=400, hidden_size=16, num_attention_heads=2,
                             intermediate_size=16).save_pretrained(folder)
    text = write_rows(tmp_path / 'text.jsonl', [{'text': 'The quick brown fox'}])
    evaluate.main([f'--model={folder}', f'--tasks={mmlu}' + f',clm:{text}' * (chat == 'none'),
                   '--shots=1', '--show=1', f'--chat={chat}', '--device=cpu'])
    printed, tokenizer = capsys.readouterr().out, load_tokenizer(folder)
    items, shots, *_ = load_task(mmlu, shots=1)
    (_, tree), *_ = tokenize_questions(items, shots, tokenizer, add_bos=True, max_length=999,
                                       chat=chat)
    ids = [*tree.prefix, *tree.prompt]
    assert SHOT in tokenizer.decode(ids)
    tokens = '|'.join(tokenizer.decode([i], start=False) for i in [*ids, *tree.continuations[0]])
    assert f"{tokenizer.decode(ids)}\n--- options\n" in printed
    assert tokens.replace('\n', '\\n').replace('\\n|', '\\n|\n') in printed
    assert ('clm: 1 of 1 texts' in printed) == (chat == 'none')
