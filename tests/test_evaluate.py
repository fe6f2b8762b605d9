"""evaluate.py"""

import dataclasses
import gzip
import importlib.util
import json
import os
import random
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from common import (HERE, SHARED, WORDS, asking, by_transformers, edit_config, log_probs_after,
                    logits_of, lora_model, needs_files, recorded, reference_model, refused,
                    results_of, rewrite, tree, write_rows)

import evaluate
import scoring
import metrics
from data.questions import load_task
from data.tokenizer import load_tokenizer
from data.trees import tokenize_questions
from compare import runs, significance
from research.common import read_lines
from results import report
from results.samples import DIAGRAM, read_samples
from bridges import adapter
from runtime import checkpoint, ownership, saving
from runtime.errors import ConfigError, DataError
from written.benchmarks import encode, load_written


def test_questions_can_be_scored_in_the_chat_template(foxes, tmp_path, capsys):
    shutil.copytree(foxes.model, model := tmp_path / 'model')
    foxes.refuses('not trained here on conversations; name the', '--chat=trained', model=model)
    foxes.refuses('needs <.im_start.>, <.im_end.>, which the', '--chat=chatml', model=model)
    (model / 'train_config.py').write_text(
        "data_kind = 'instruct'\ntemplate = 'mistral_v1'\nadd_bos = False\n")
    result = foxes.score('--chat=trained', model=model)['foxes']
    config = results_of(foxes.out)['config']
    assert result['chat'] == config['chat'] == 'mistral_v1' and config['add_bos'] is False
    assert result['distribution'] == ('mmlu, 0 shots, options scored by letters, log-probabilities '
                                      'per token, chat template mistral_v1')
    assert result['distribution'] in capsys.readouterr().out


SMALL = ['--n_bootstrap=20', '--dtype=float32', '--pack_len=512', '--pictures=False']


def scored(model, tasks, out, *arguments):
    evaluate.main([f'--model={model}', f'--tasks={tasks}', f'--out_dir={out}', *SMALL, *arguments])
    return results_of(out)


@pytest.fixture(scope='module')
def whole(scored_folder, tmp_path_factory):
    """The results of an evaluation with all that can be derived from it, and their folder."""
    out, task = tmp_path_factory.mktemp('whole'), f'global_mmlu:{scored_folder / "data"}'
    return scored(scored_folder / 'model', task, out, '--shots=2', '--pictures',
                  '--fit_temperature', '--p_true', '--permute=2', '--contextual'), out


@pytest.fixture
def foxes(scored_folder, tmp_path):
    """A task of five questions, score(*arguments) that evaluates them and returns the results, and
    refuses(message, *arguments), which asserts that it fails and changes no file that is there."""
    task, out = write_words(tmp_path / 'foxes.jsonl', 5, 'fox'), tmp_path / 'out'

    def score(*arguments, model=scored_folder / 'model', out=out):
        return scored(model, task, out, '--shots=0', *arguments)['tasks']

    def refuses(message, *arguments, out=out, **model):
        before = tree(out)
        with pytest.raises((ConfigError, DataError, checkpoint.CheckpointError), match=message):
            score(*arguments, out=out, **model)
        assert before.items() <= tree(out).items()

    def fill(content):
        for name, data in content.items():
            (out / name).write_bytes(data)
    return SimpleNamespace(task=task, out=out, score=score, refuses=refuses, fill=fill,
                           model=scored_folder / 'model')


def altered(model, folder, change=lambda tensors: [x.mul_(1.1) for x in tensors.values()]):
    rewrite(shutil.copytree(model, folder), change)
    return folder


def write_words(path, n, word):
    """A task of n questions with three options; `word` makes it differ from others."""
    return write_rows(path, [{'question': f'the quick {word} {i}?', 'answer': i % 3,
                              'choices': ['blue', 'lazy', 'old']} for i in range(n)])


@pytest.mark.slow
def test_an_evaluation_with_the_dropout_of_adapters(foxes, tmp_path):
    # what train.py --lora leaves, with logit_temperature: in the config of the run alone
    run, model = tmp_path / 'model', lora_model(foxes.model, dropout=0.3)
    model.config.temperature = 1.5
    adapter.save_adapter(model, run / 'adapter', str(foxes.model))
    saving.save(model, run, torch.float32, foxes.model)
    tasks = foxes.score('--dropout_seed=3', '--p_true', model=run)
    assert list(tasks) == ['foxes', 'foxes.p_true'] and tasks['foxes']['dropout_seed'] == 3
    assert 'plain text, dropout with seed 3' in tasks['foxes']['distribution']
    evaluate.main([f'--model={run}', f'--tasks={foxes.task}', '--dropout_seed=2', '--shots=0',
                   '--n_bootstrap=0'])
    assert (run / 'dropout-2' / 'results.json').exists() and not (run / 'results.json').exists()
    foxes.refuses('holds samples with dropout_seed = ', model=run)
    foxes.refuses('has no adapter/, which train.py --lora', '--dropout_seed=2')
    edit_config(run / 'adapter', 'adapter_config.json', lora_dropout=0.0)
    foxes.refuses('trained with lora_dropout = 0, so nothing w', '--dropout_seed=2', model=run)


@pytest.mark.slow
def test_a_folder_is_refused_as_it_is_and_repaired_by_hand(foxes, tmp_path, monkeypatch):
    first = foxes.score()['foxes']['pooled']
    whole = tree(foxes.out)
    lines = whole['samples.jsonl'].splitlines(keepends=True)
    other = write_words(tmp_path / 'other' / 'foxes.jsonl', 10, 'dog')
    for split, n in (('test', 5), ('dev', 1)):
        write_words(tmp_path / 'shots' / f'{split}.jsonl', n, 'fox')
    broken = altered(foxes.model, tmp_path / 'broken', lambda x: x.pop('model.norm.weight'))
    changed = altered(foxes.model, tmp_path / 'changed')
    (link := tmp_path / 'link.jsonl').symlink_to(foxes.out / 'samples.jsonl')
    for changes, arguments, message in (
            ({'eval_config.json': b'[]'}, '',
             'eval_config.json is not what .*choose another --out_dir, or --overwrite'),
            ({'samples.jsonl': b''.join([*lines[:2], lines[2][:40], b'\n', *lines[3:]])}, '',
             'samples.jsonl:3: .*; delete this line'),
            ({}, f'--tasks={other}', 'holds foxes of .*, and .*other.* has other questions'),
            ({}, f'--model={changed}', 'holds samples of another model'),
            *(({}, f'--tasks={tmp_path}/shots --{option}', f'samples with {option[:4]}.* = ')
              for option in ('shots=1', 'scoring=text', 'chat=tulu')),
            ({}, '--overwrite --tasks=foxs.jsonl', 'foxs'),
            ({}, f'--overwrite --model={broken}', 'norm.weight'),
            ({}, '--overwrite --shots=3', 'shots'),
            ({'samples.jsonl': foxes.task.read_bytes()}, f'--overwrite --tasks={link}',
             'and this command reads .*samples.jsonl')):
        foxes.fill(whole | changes)
        foxes.refuses(message, *arguments.split())
    # without results.json and one sample
    foxes.fill(whole | {'samples.jsonl': b''.join([*lines[:2], *lines[3:]])})
    (foxes.out / 'results.json').unlink()
    assert foxes.score()['foxes']['pooled']['accuracy'] == first['accuracy']
    # test_code.py has what counts as other code
    monkeypatch.setattr(checkpoint, 'code_digest', lambda *_: 'other')
    foxes.refuses('holds samples of other code: model.py or a file that')
    replaced = foxes.score('--overwrite', f'--tasks={other}', f'--model={changed}')
    assert list(replaced) == ['foxes'] and replaced['foxes']['pooled']['n'] == 10


@pytest.mark.slow
def test_results_and_samples_of_another_model_or_damaged_ones_are_not_believed(foxes, tmp_path):
    changed, other = altered(foxes.model, tmp_path / 'changed'), tmp_path / 'other'
    first = foxes.score()
    foxes.score(model=changed, out=other)
    foxes.refuses('changed holds another model', out=changed)
    whole, theirs = tree(foxes.out), tree(other)
    text = whole['results.json'].decode()
    half = b''.join(whole['samples.jsonl'].splitlines(keepends=True)[:2])
    mixed = [({name: theirs[name] for name in names}, message) for names, message in (
        (['results.json'], 'results.json is not what .*of another model'),
        (['results.json', 'samples.jsonl'], 'results.json is not what .*of another model'),
        (['samples.jsonl'], 'samples.jsonl:1: not of the model, settings'))]
    damaged = [({'results.json': content.encode()}, 'results.json is not what this program wrote '
                '.*; (remove it and evaluate|evaluate there again)') for content in (
        text.replace('"norm": "token"', '"norm": "sum"'), text[:1000], '5', '[' * 100_000,
        '{"tasks": {"foxes": 5}}', text.replace('"tasks": {', '"x": {'))]
    for changes, message in (*mixed, *damaged, (
            {'samples.jsonl': half}, 'has 2 samples of foxes, but results.json was made from 5')):
        foxes.fill(whole | changes)
        if half not in changes.values():        # the rest would be scored again
            foxes.refuses(message)
        with pytest.raises((ConfigError, DataError), match=message):    # by a comparison
            runs.read_run_samples(runs.read_run(foxes.out))
    assert foxes.score()['foxes']['pooled']['ece'] == pytest.approx(first['foxes']['pooled']['ece'])


def test_results_have_languages_groups_macro_and_scalings(whole):
    results, out = whole
    result = results['tasks']['global_mmlu']
    assert set(result['languages']) == {'de', 'en', 'sw'}
    assert set(result['subjects']) == {'anatomy', 'sociology'}
    assert set(result['categories']) == {'STEM', 'social sciences'}
    assert result['pooled']['n'] == 120 and result['macro']['groups'] == 3
    assert result['macro']['ece'] == pytest.approx(
        np.mean([r['ece'] for r in result['languages'].values()]))
    for name in ('reliability.png', 'reliability-global_mmlu-languages.png'):
        assert (out / name).read_bytes().startswith(b'\x89PNG')
    head, *lines = (out / 'results.csv').read_text().splitlines()
    assert 'brier_boot_low' in head
    # pooled, macro, 3 languages, 2 categories, 2 subjects, 4 scalings
    assert sum(line.startswith('global_mmlu,') for line in lines) == 13
    fitted, scaled = result['post_hoc'], result['post_hoc']['reports']['temperature']
    assert fitted['fitted_on'] == 'the other half of the questions'
    assert len(fitted['temperature']) == len(fitted['platt']) == 2
    assert scaled['accuracy'] == result['pooled']['accuracy']
    # the labels are unrelated to the questions, and the scaling learns how little is known
    assert scaled['ece'] < result['pooled']['ece'] + 0.05


@pytest.mark.slow
def test_a_corrected_answer_counts_in_the_same_folder(foxes, tmp_path):
    """The same folder evaluated again gives what a new folder gives, post-hoc and P(True) too."""
    def results(out):
        tasks = foxes.score('--deterministic', '--scoring=text', '--p_true', '--fit_temperature',
                            out=tmp_path / out)
        for result in tasks.values():
            del result['scoring_seconds']
        return tasks
    write_words(foxes.task, 12, 'fox')
    before = results('same')
    rows = read_lines(foxes.task)
    write_rows(foxes.task, [row | {'answer': (row['answer'] + 1) % 3} for row in rows])
    corrected = results('same')
    assert corrected == results('new') != before
    write_rows(foxes.task, rows)      # and back again
    assert results('same') == before


def test_a_folder_holds_every_task_scored_there(foxes, tmp_path, monkeypatch):
    monkeypatch.setenv('HOME', str(tmp_path))
    model = tmp_path / 'model'
    model.symlink_to(foxes.model)
    evaluate.main(['--model=~/model', '--tasks=~/foxes.jsonl', '--out_dir=~/out', '--shots=0',
                   '--device=cpu', *SMALL])
    first = results_of(foxes.out)['tasks']
    stones = write_words(tmp_path / 'stones.jsonl', 20, 'stone')
    both = foxes.score(f'--tasks={stones}', '--norm=sum', '--limit=12', model=model)
    assert list(both) == ['foxes', 'stones'] and both['foxes'] == first['foxes']
    assert [both['stones'][key] for key in ('norm', 'shots', 'limit')] == ['sum', 0, 12]
    for name in ('results.md', 'results.csv', 'results.tex', 'report.html'):
        text = (foxes.out / name).read_text()
        assert 'foxes' in text and 'stones' in text


def test_defaults_are_named_and_other_settings_get_a_folder_of_their_own(foxes, tmp_path, capsys,
                                                                         monkeypatch):
    """A file of questions needs no --shots=0; that --tasks is missing is said before a download."""
    folder = shutil.copytree(foxes.model, tmp_path / 'model')
    keys = {'model': str(folder), 'tasks': (str(foxes.task),), 'pictures': False, 'n_bootstrap': 0}
    for more, below in (({}, '.'), ({'scoring': 'text'}, 'eval-2'), ({'header': 'none'}, 'eval-3'),
                        ({'scoring': 'text'}, 'eval-2'), ({'shots': 0}, '.')):
        results, labels, out_dir = evaluate.run(evaluate.EvalConfig(**keys, **more))
        assert (out_dir, labels) == (folder / below, ['foxes']), more
        assert results['config']['shots'] == 0 and results['tasks']['foxes']['shots'] == 0
        assert ('other settings; these go to' in capsys.readouterr().out) == (below != '.')

    def load_tasks(cfg):
        raise DataError(capsys.readouterr().out)
    monkeypatch.setattr(evaluate, 'load_tasks', load_tasks)
    with pytest.raises(DataError, match='^tasks: mmlu, which is the default; --tasks=my_questions'):
        evaluate.run(evaluate.EvalConfig(model=str(folder)))


@pytest.mark.slow
def test_files_of_others_are_kept_and_overwrite_renames_the_folder(foxes, tmp_path):
    samples = foxes.out / 'samples.jsonl'
    foxes.out.mkdir()
    samples.write_text('mine')
    for option in ((), ('--overwrite',)):
        foxes.refuses('samples.jsonl was not written by', *option)
    samples.unlink()
    foxes.score('--pictures')
    ownership.claim(foxes.out, 'answers.jsonl')
    for name in ('answers.jsonl', 'reliability-of-mine.png'):
        (foxes.out / name).write_text('mine')
    before = tree(foxes.out)
    foxes.score('--overwrite')
    assert tree(foxes.out.with_name(f'{foxes.out.name}.1')) == before
    assert not {'answers.jsonl', DIAGRAM} & tree(foxes.out).keys()
    # a link leads to a file that is not appended to
    (tmp_path / 'elsewhere').write_text('no whole line')
    samples.unlink()
    samples.symlink_to(tmp_path / 'elsewhere')
    foxes.refuses('samples.jsonl is a link to a file elsewhere')
    foxes.score('--overwrite')
    assert (tmp_path / 'elsewhere').read_text() == 'no whole line'


def test_logits_that_are_not_finite_stop_with_the_question_named(foxes, tmp_path):
    huge = altered(foxes.model, tmp_path / 'model', lambda tensors: [
        tensors[f'model.layers.1.mlp.{name}_proj.weight'].fill_(1e25) for name in ('gate', 'up')])
    foxes.refuses('foxes: .*foxes.jsonl:1: .* NaN or infinite logits; .* overflow even in float32',
                  model=huge)


def test_a_run_that_scored_nothing_leaves_the_folder_free(foxes):
    foxes.refuses('foxes: .*foxes.jsonl:1: .* max_length allows 3', '--max_length=3')
    foxes.refuses('foxes: fit_temperature needs two questions', '--limit=1', '--fit_temperature')
    with ownership.lock(foxes.out):
        foxes.refuses('process is writing there')
    assert foxes.score()['foxes']['pooled']['n'] == 5
    foxes.refuses('cannot be written .* with --out_dir', out=foxes.task / 'deeper')


@pytest.mark.slow
def test_the_validation_split_is_fitted_on_and_neither_scored_nor_shown(scored_folder, tmp_path):
    for split, n in (('dev', 2), ('test', 28), ('validation', 30)):
        write_words(tmp_path / 'data' / f'{split}.jsonl', n, split)
    # the fits travel to other results
    keys = scored_folder / 'model', f'mmlu:{tmp_path}/data'
    from_file = f'--scaling={tmp_path}/out/scaling.json'
    (result, p_true), (applied, again) = (
        scored(*keys, tmp_path / out, '--shots=2', '--p_true', option)['tasks'].values()
        for out, option in (('out', '--fit_temperature'), ('other', from_file)))
    assert again['scaled']['fits'] == p_true['post_hoc']['fits'] != result['post_hoc']['fits']
    assert result['post_hoc']['fitted_on'] == '30 validation questions'
    assert result['pooled']['n'] == 28 and len(result['post_hoc']['temperature']) == 1
    scaled, fitted = (x['reports'] for x in (applied['scaled'], result['post_hoc']))
    assert scaled['temperature']['nll'] == pytest.approx(fitted['temperature']['nll'])
    assert scaled['platt']['ece'] == pytest.approx(fitted['platt']['ece'])
    with refused(tmp_path / 'out', 'would rename .*, and this command reads .*scaling.json;'):
        scored(*keys, tmp_path / 'out', '--shots=2', '--overwrite', from_file)


def test_the_schema_of_results_is_documented(whole, foxes, tmp_path):
    text = (HERE / 'docs' / 'evaluation.md').read_text()
    section = text[text.index('\n## Schema of results.json\n'):text.index('\n## Samples\n')]
    of_file, of_task, of_report = [
        {key for line in table.splitlines() if line.startswith('| `')
         for key in re.findall('`([^`]+)`', line.split(' | ')[0])}
        for table in section.split('\n| key ')[1:]]
    text = write_rows(tmp_path / 'text.jsonl', [{'text': 'the quick fox is old'}] * 6)
    levels = write_rows(tmp_path / 'levels.jsonl', [
        {'question': f'the fox {i}?', 'choices': ['old', 'blue'], 'answer': i % 3 % 2,
         'level': i % 2} for i in range(200)])
    grouped = foxes.score(f'--tasks={levels}', '--group_by=level', out=tmp_path / 'l')['levels']
    worst, name = grouped['worst_group_ece']['groups']['unscaled']
    assert [*grouped['groups']] == ['level 0', 'level 1']
    assert pytest.approx(worst) == grouped['groups'][name]['ece'] == max(
        x['ece'] for x in grouped['groups'].values())
    foxes.refuses("levels.jsonl:1: group_by = 'leval': the row has no", f'--tasks={levels}',
                  '--group_by=leval')
    foxes.refuses("group_by = 'level' needs tasks with options", f'--tasks=clm:{text}',
                  '--group_by=level')
    asked = write_rows(tmp_path / 'qa.jsonl', [{'question': 'Who?', 'answers': ['A', 'B']}] * 4)
    pairs = write_rows(tmp_path / 'pairs.jsonl', [{'chosen': '\n\nHuman: q\n\nAssistant: fox',
                                                   'rejected': '\n\nHuman: q\n\nAssistant: dog'}])
    found = whole[0]
    tasks = [*found['tasks'].values(), grouped]
    for options in (f'clm:{text} --limit=5', f'qa:{asked} --n=2 --max_tokens=4', f'judge:{pairs}'):
        tasks += foxes.score(*f'--tasks={options}'.split()).values()
    assert found.keys() == of_file and found['schema'] == report.SCHEMA == 1
    assert found['config'].keys() == dataclasses.asdict(evaluate.EvalConfig()).keys()
    # dropout needs adapters, scaled a file
    assert {key for task in tasks for key in task} == of_task - {'dropout_seed', 'scaled'}
    reports = [of_kind for task in tasks for _, _, of_kind in report.report_rows(task)]
    metric_names = metrics.report(np.full((4, 2), 0.5), np.arange(4) % 2).keys()
    for of_kind in reports:
        assert {'n'} <= of_kind.keys() or {'groups'} <= of_kind.keys()
        assert of_kind.keys() <= of_report | metric_names
        assert all(value is None or isinstance(value, (int, float))
                   for key, value in of_kind.items() if key not in ('intervals', 'no_interval'))
        assert all(len(ends) == 2 for ends in of_kind['intervals'].values())
        assert all(isinstance(why, str) for why in of_kind.get('no_interval', {}).values())
    assert {'n', 'groups', 'intervals', 'accuracy_low'} <= {key for r in reports for key in r}


def test_bad_and_duplicate_options_are_counted(foxes):
    good = {'question': 'the quick brown fox?', 'choices': ['dog', 'old', 'dog'], 'answer': 0}
    rows = [good, good | {'choices': ['', 'dog']},
            good | {'question': 'lazy dog ' * 300}]     # left out, so its options are not counted
    write_rows(foxes.task, rows)
    foxes.refuses('foxes.jsonl:2: choice A is null or empty; --on_bad', '--max_length=200')
    result = foxes.score('--max_length=200', '--on_bad_row=skip')['foxes']
    assert (result['bad_rows'], result['pooled']['n'], result['duplicate_options']) == (2, 1, 1)


@pytest.mark.slow
def test_next_tokens_and_facts_are_scored(foxes, tmp_path):
    rows = [{'id': f't{i}', 'text': ' '.join(WORDS[i:] + WORDS[:i])} for i in range(12)]
    clm = f'clm:{write_rows(tmp_path / "texts.jsonl", rows)}'
    facts = write_rows(tmp_path / 'facts.jsonl', [row | {'spans': [
        [row['text'].index(w), row['text'].index(w) + len(w)] for w in ('dog', 'fox', 'dog')]}
        for row in rows])

    def run(name, *arguments):
        tasks = foxes.score(*arguments, out=tmp_path / name)
        return tasks, read_samples(tmp_path / name / 'samples.jsonl')
    tasks, samples = run('both', f'--tasks={clm},facts:{facts}')
    assert tasks['clm']['pooled']['n'] == 12 and tasks['facts']['pooled']['n'] >= 22
    tokenizer, model = load_tokenizer(foxes.model), checkpoint.load(foxes.model)
    for sample in samples:
        text = next(r['text'] for r in rows if r['id'] == sample['text'])
        ids = [tokenizer.bos_id, *tokenizer.encode(text)]
        assert sample['token'] == ids[sample['position']]
        log_p = logits_of(model, torch.tensor([ids[:sample['position']]]))[0, -1].log_softmax(-1)
        values = log_p.max().exp(), log_p[sample['token']], -(log_p.exp() * log_p).sum()
        assert [sample[key] for key in ('confidence', 'log_prob', 'entropy')] == pytest.approx(
            [x.item() for x in values], abs=1e-4)
        top = log_p.argmax().item()
        assert sample['correct'] == (sample['token'] == top)
        assert sample['predicted'] == tokenizer.decode([top], start=False)
        if sample['task'] == 'facts':   # the entity, from its beginning on
            rest = tokenizer.decode(ids[sample['position']:], start=False).strip()
            assert rest.startswith(('dog', 'fox'))
    # a text of which one sample is missing is scored again
    path = tmp_path / 'both' / 'samples.jsonl'
    lines = path.read_text().splitlines(keepends=True)
    del lines[max(i for i, s in enumerate(samples) if s['of'] > 1)]
    path.write_text(''.join(lines))
    again = run('both', f'--tasks={clm},facts:{facts}')[1]
    assert {(s['task'], s['id']) for s in again} == {(s['task'], s['id']) for s in samples}
    # another seed asks for other tokens, and is not taken for what was asked before
    some = {s['id'] for s in run('some', f'--tasks={clm}', '--limit=5')[1]}
    assert some < {s['id'] for s in samples if s['task'] == 'clm'}
    tasks, seeds = run('some', f'--tasks={clm}', '--seed=2')
    assert tasks['clm']['pooled']['n'] == 12 == len({s['id'] for s in seeds}) < len(seeds)
    # T-REx: its pronouns and relations are no entities
    trex = [{'docid': 'x', 'text': 'a lazy dog', 'entities': [
        {'boundaries': [7, 10]}, {'boundaries': [0, 1]},
        {'boundaries': [2, 6], 'annotator': 'Wikidata_Property_Linker'}]}]
    _, entities = run('trex', f'--tasks=facts:{write_rows(tmp_path / "trex.json", trex)}',
                      '--instruct')
    assert len(entities) == 2 and all(s['id'] == f'x:{s["position"]}' for s in entities)
    bad = write_rows(tmp_path / 'bad.jsonl', [{'text': 'a dog', 'spans': [[2, 9]]}])
    foxes.refuses(r'bad.jsonl:1: span .2, 9. is no', f'--tasks=facts:{bad}')


QUESTION = '{question}\nA. {option_a}\nB. {option_b}\nC. {option_c}\nD. {option_d}\n'
P_TRUE = QUESTION + ('Proposed Answer: {proposed}\nIs the proposed answer:\n (A) True\n (B) False\n'
                     'The proposed answer is:')
CONTENT_FREE = '{0}\nA. {0}\nB. {0}\nC. {0}\nD. {0}\nAnswer:'


def prompts_of(row, top, shots):
    """The prompts of a question: that of P(True) about option `top`, and three without content."""
    header = ('The following are multiple choice questions (with answers) about '
              f'{row["subject"]}.\n\n')
    right, other = shots
    wrong = 'ABCD'[('ABCD'.index(other['answer']) + 1) % 4]
    judged = (P_TRUE.format(**right, proposed=right['answer']) + ' (A)\n\n'
              + P_TRUE.format(**other, proposed=wrong) + ' (B)\n\n')
    solved = ''.join((QUESTION + 'Answer: {answer}\n\n').format(**shot) for shot in shots)
    return header + judged + P_TRUE.format(**row, proposed='ABCD'[top]), [
        header + solved + CONTENT_FREE.format(text) for text in ('N/A', '[MASK]', '')]


def test_p_true_and_contextual_calibration_are_those_of_transformers(scored_folder, whole):
    tasks, samples = whole[0]['tasks'], read_samples(whole[1] / 'samples.jsonl')
    options, asked, ratios = ({(s['language'], s['id']): s for s in samples if s['task'] == name}
                              for name in ('global_mmlu', 'global_mmlu.p_true',
                                           'global_mmlu.contextual'))
    assert len(options) == len(asked) == len(ratios) == 120
    reference = by_transformers(scored_folder / 'model', dtype=torch.float32)
    tokenizer = load_tokenizer(scored_folder / 'model')

    def sums(text, *continuations):
        prompt = [tokenizer.bos_id, *tokenizer.encode(text)]
        for option in continuations:
            tokens = tokenizer.encode(text + option)[len(prompt) - 1:]
            yield sum(log_probs_after(reference, prompt, tokens))

    for key, sample in [*asked.items()][::25]:
        shots, rows = (read_lines(scored_folder / 'data' / f'{sample["language"]}_{split}.jsonl')
                       for split in ('dev', 'test'))
        row = next(r for r in rows if r['sample_id'] == sample['id'])
        shots, first = [r for r in shots if r['subject'] == row['subject']][:2], options[key]
        top = np.argmax(np.divide(first['log_probs'], first['n_tokens']))
        judging, content_free = prompts_of(row, top, shots)
        p_true = metrics.softmax([*sums(judging, ' (A)', ' (B)')])
        assert sample['confidence'] == pytest.approx(p_true[0], abs=1e-5)
        free = [np.exp([*sums(prompt, ' A', ' B', ' C', ' D')]) for prompt in content_free]
        assert ratios[key]['log_probs'] == pytest.approx(
            first['log_probs'] - np.log(np.mean(free, 0)), abs=1e-4)
        assert sample['correct'] == ('ABCD'[top] == row['answer']) and sample['shots'] == 2
        assert sample['question'] == first['question'] != ''
    result = tasks['global_mmlu.p_true']
    assert result['pooled']['accuracy'] == tasks['global_mmlu']['pooled']['accuracy']
    assert result['distribution'].startswith('P(True) of the top option, mmlu, 2 shots')


@pytest.mark.slow
def test_scoring_resumes_where_it_stopped_also_that_of_derived_tasks(foxes, tmp_path, monkeypatch):
    launched = recorded(        # how many trees each forward pass scores
        monkeypatch, scoring, 'forward_values',
        lambda model, arrays, scored, **options: len({tree for tree, *_ in scored}))
    words = [*WORDS, 'and', 'the', 'old']
    write_rows(foxes.task, [
        {'question': f'the quick fox {i}?', 'answer': i % 3,
         'choices': [' '.join(words[i % 9:i % 9 + n]) for n in (1, 2, 4)]} for i in range(30)])
    path = foxes.out / 'samples.jsonl'

    def counted(*arguments, kept=None):
        if kept:        # a process was killed while it wrote the next line
            lines = path.read_text().splitlines(keepends=True)
            path.write_text(''.join(lines[:kept]) + lines[kept][:20])
            (foxes.out / 'results.json').unlink()
        launched.clear()
        return foxes.score(*arguments), sum(launched)
    text = '--scoring=text', '--p_true', '--fit_temperature'
    plain, _ = counted('--scoring=text')
    both, n = counted(*text)
    assert n == 30 and both['foxes']['pooled'] == plain['foxes']['pooled']
    assert list(both['foxes.p_true']['post_hoc']['reports']) == ['platt', 'isotonic']
    again, n = counted(*text, kept=50)
    assert n == 10 and again['foxes.p_true']['pooled']['nll'] == pytest.approx(
        both['foxes.p_true']['pooled']['nll'], abs=1e-4)
    assert len({(s['task'], s['id']) for s in read_samples(path)}) == 60 == len(read_samples(path))
    again, n = counted('--scoring=text', kept=20)
    assert n == 10
    for key in ('accuracy', 'confidence', 'ece', 'nll'):
        assert again['foxes']['pooled'][key] == pytest.approx(
            plain['foxes']['pooled'][key], abs=1e-4)
    # the time of the killed process is not known
    assert plain['foxes']['scoring_seconds'] is not None
    assert again['foxes']['scoring_seconds'] is None
    # another normalization needs no model; the same file in another place is the same task
    moved = write_rows(tmp_path / 'moved' / foxes.task.name, [])
    shutil.copy(foxes.task, moved)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, 'load', None)
        summed = foxes.score('--scoring=text', '--norm=sum', f'--tasks={moved}')['foxes']
    assert 'summed log-probabilities' in summed['distribution']
    counted(*text)
    # questions with another top option are asked about again, the others are not
    tops = [[np.argmax(report.option_scores(s['log_probs'], s['options'], s['n_tokens'], norm))
             for s in read_samples(path)[:30]] for norm in ('token', 'sum')]
    _, n = counted(*text, '--norm=sum')
    assert n == sum(a != b for a, b in zip(*tops)) > 0
    counted('--overwrite')
    permuted, n = counted('--permute=2')
    assert n == 30 and list(permuted['foxes.permuted']['orders']) == ['1', '2']
    _, n = counted('--permute=2', '--norm=sum', kept=50)    # the published order is there
    assert n == 10


@pytest.mark.slow
def test_orders_of_the_options_are_those_of_permuted_files(foxes, tmp_path):
    folder, rng = tmp_path / 'quiz', random.Random(1)
    rows = [{'question': ' '.join(rng.sample(WORDS, 5)) + '?', 'answer': i % 3, 'id': f'q{i}',
             'subject': ('anatomy', 'sociology')[i % 2],
             'choices': rng.sample(WORDS, 3 + i // 2 % 2)} for i in range(12)]
    write_rows(folder / 'dev.jsonl', rows[:6])
    write_rows(folder / 'test.jsonl', rows)
    arguments = [f'--tasks={folder}', '--shots=2', '--norm=sum']
    result = foxes.score(*arguments, '--permute=4')['quiz.permuted']
    asked = {s['id']: s for s in read_samples(foxes.out / 'samples.jsonl')
             if s['task'] == 'quiz.permuted'}
    letters, chosen = np.zeros((2, 4, 12), int)     # in each order, by each question
    for shift in range(4):
        orders = [np.roll(range(len(row['choices'])), -shift).tolist() for row in rows]
        write_rows(folder / 'test.jsonl', [
            row | {'choices': [row['choices'][i] for i in order],
                   'answer': order.index(row['answer'])} for row, order in zip(rows, orders)])
        alone = foxes.score(*arguments, out=tmp_path / f'{shift}')['quiz']
        for key in ('accuracy', 'ece', 'nll', 'sce'):
            assert result['orders'][f'{shift + 1}'][key] == pytest.approx(
                alone['pooled'][key], abs=1e-5)
        samples = read_samples(tmp_path / f'{shift}' / 'samples.jsonl')
        for i, (sample, order) in enumerate(zip(samples, orders, strict=True)):
            letters[shift, i] = top = np.argmax(sample['log_probs'])
            chosen[shift, i] = order[top]
            if shift < len(order):      # the fourth order of three options is the first one
                one = asked[sample['id']]['orders'][shift]
                assert one['order'] == order
                assert one['log_probs'] == pytest.approx(sample['log_probs'], abs=1e-4)
    for sample in asked.values():
        n = len(sample['options'])
        assert len(sample['orders']) == n and sample['shots'] == 2
        probs, mass = np.zeros(n), 0
        for order in sample['orders']:
            probs[order['order']] += metrics.softmax(np.array(order['log_probs'])) / n
            mass += np.exp(order['log_probs']).sum() / n
        assert np.exp(sample['log_probs']) == pytest.approx(probs * mass)
    assert {k: v['chosen'] for k, v in result['letters'].items()} == pytest.approx(
        {letter: np.mean(letters == i) for i, letter in enumerate('ABCD')})
    assert result['same_option'] == np.mean((chosen == chosen[0]).all(0))


def test_a_judge_is_asked_in_both_orders_and_measured_beside_ties_and_win_rates(foxes, tmp_path):
    rng = random.Random(0)
    rows = [{'prompt': f'Say {i}', 'subset': 'xy'[i % 2], 'responses': [
        ' '.join(rng.sample(WORDS, 3)) for _ in range(2)], 'scores': [i % 3 > 0, i % 3 > 1]}
        for i in range(45)]
    rows[1]['responses'][1] = rows[1]['responses'][0] + ' '     # no two answers
    rows += [{key: row[key] for key in ('prompt', 'responses')} for row in rows[2:9]]
    rows += [{'prompt': 'q', 'responses': ['a fox', 'a dog', 'a river'], 'scores': [1, 3, 3]},
             {'prompt': 'q', 'chosen': 'the fox', 'rejected': 'the dog', 'responses': None},
             {'prompt': 'q', 'response': 'a stone', 'helpfulness': 2, 'language': 'en'},
             {'prompt': 'q', 'response': 'an old stone', 'helpfulness': 1}]
    pairs = write_rows(tmp_path / 'pairs.jsonl', rows)
    arguments = f'--tasks=judge:{pairs}', '--on_bad_row=skip'
    result = foxes.score(*arguments)['judge']
    assert result['bad_rows'] == 1 and 'pairs.jsonl:2: fewer than two dif' in result['first_bad']
    found = [s for s in read_samples(foxes.out / 'samples.jsonl') if s['task'] == 'judge']
    split, answer, first = (np.array([s[key] for s in found]) for key in (
        'split', 'answer', 'first'))        # first: the option that is first in the file
    test, tied, unlabeled = (split == name for name in ('test', 'tied', 'unlabeled'))
    assert [sum(test), sum(tied), sum(unlabeled)] == [18, 31, 7] and result['pooled']['n'] == 18
    assert all([order['order'] for order in s['orders']] == [[0, 1], [1, 0]] for s in found)
    logs = np.array([[order['log_probs'] for order in s['orders']] for s in found])
    shown_first = logs.argmax(-1) == 0      # whether the answer that was shown first is preferred
    judge = np.where(shown_first[:, 0] != shown_first[:, 1], logs[:, 0].argmax(-1), 2)  # 2: a tie
    human = np.where(test, answer, 2).astype(int)
    probs = metrics.softmax(logs.reshape(-1, 2)).reshape(-1, 2, 2)
    verdict = (probs[:, 0] + probs[:, 1, ::-1]).argmax(-1)
    facts = result['judge']
    assert result['pooled']['accuracy'] == pytest.approx(np.mean((verdict == answer)[test]))
    assert facts['position_bias'] == pytest.approx(np.mean(shown_first[test]) - 0.5)
    assert facts['ties'] == pytest.approx(np.mean(judge[test] == 2))
    assert facts['ties_of_tied'] == pytest.approx(np.mean(judge[tied] == 2))
    assert facts['kappa_with_ties'] == pytest.approx(
        metrics.cohen_kappa(human[~unlabeled], judge[~unlabeled]), nan_ok=True)
    win, for_first = facts['win_rate'], verdict == first
    assert win['judged'] == np.mean(for_first[unlabeled])
    assert (win['corrected'], win['low'], win['high']) == pytest.approx(significance.corrected_rate(
        for_first[unlabeled], for_first[test], (answer == first)[test]), nan_ok=True)
    assert {*result['subjects']} == {'', 'x', 'y'}
    few = foxes.score(*arguments, '--limit=2', out=tmp_path / 'few')['judge']
    assert [few['pooled']['n'], few['judge']['tied'], few['judge']['unlabeled']] == [3, 2, 2]
    foxes.refuses('It has en', *arguments, '--languages=zz')
    write_rows(tmp_path / 'tied.jsonl', rows[:1])
    foxes.refuses('has no pair of which one', f'--tasks=judge:{tmp_path}/tied.jsonl')


def rows_of(path, n, keep=lambda line: True):
    """Return n random rows of a real file, or all if n is None."""
    with (gzip.open if path.endswith('.gz') else open)(SHARED / 'datasets' / path, 'rt') as lines:
        rows = [json.loads(line) for line in lines if keep(line)]
    return random.Random(0).sample(rows, n) if n else rows


def hub_tasks():
    """Return {lm-eval's task: (ours, its file for us, the hub's dataset, rows)}."""
    names, things = ('Maria', 'Tom', 'Aisha', 'Wei'), ('a lamp', 'Warm water', 'the moon', 'ice.')
    sentences = ('The {0} met {1} at {2}, but _ was late again.', '_ thanked {1} for {2}.',
                 "Because of {2} {0} could not stand _'s dog.")
    n = range(12)
    return {
        'mmlu_anatomy': ('mmlu', 'test.jsonl', 'cais/mmlu', rows_of(
            'mmlu/test.jsonl.gz', 12, lambda line: '"anatomy"' in line)),
        'arc_easy': ('arc_easy', 'ARC-Easy-test.jsonl', 'allenai/ai2_arc', rows_of(
            'arc_easy/ARC-Easy-test.jsonl.gz', 25)),
        'hellaswag': ('hellaswag', 'hellaswag_val.jsonl', 'Rowan/hellaswag', rows_of(
            'hellaswag/hellaswag_val_1000.jsonl.gz', 25)),
        # transformers parts two spaces otherwise than the sentencepiece model does
        'xcopa_sw': ('xcopa', 'test.sw.jsonl', 'cambridgeltl/xcopa', rows_of(
            'xcopa/test.sw.jsonl', 20, lambda line: '  ' not in line)),
        'winogrande': ('winogrande_xl', 'dev.jsonl', 'allenai/winogrande', [{
            'sentence': sentences[i % 3].format(names[i % 4], names[(i + 1) % 4], i),
            'option1': names[i % 4], 'option2': names[(i + 1) % 4] + ' Smith' * (i % 2),
            'answer': '12'[i % 2]} for i in n]),
        'boolq': ('boolq', 'val.jsonl', 'aps/super_glue', [{
            'question': f'is number {i} even', 'idx': i, 'label': 1 - i % 2,
            'passage': f'Numbers -- {i} is a number.\nIt follows {i - 1}.' + '\n' * (i % 3)}
            for i in n]),
        'truthfulqa_mc1': ('truthfulqa_mc1', 'mc.jsonl', 'truthfulqa/truthful_qa', [{
            'question': f'What do {i} fish eat?', 'mc1_targets': {
                'choices': [f'{i} fish eat {thing}' for thing in things[:2 + i % 3]],
                'labels': [1] + [0] * (1 + i % 3)}} for i in n]),
        'inverse_scaling_neqa': ('', 'neqa.jsonl', 'inverse-scaling/NeQA', [{
            'prompt': f'{i} is not a\nA. number\nB. bird\nAnswer:' + ' ' * (i % 2),
            'classes': [' A', ' B'] if i % 2 == 0 else ['A', 'B'], 'answer_index': 1} for i in n])}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec('lm_eval') is None, reason='needs lm-eval')
@pytest.mark.parametrize('name, file, chat', [
    ('llama', 'llama2_tokenizer.model', ''), ('mistral', 'mistral_tokenizer.model.v1', ''),
    ('llama', 'qwen3_tokenizer.json.gz', 'chat'),
    ('llama', 'qwen3_tokenizer.json.gz', 'multiturn')])
def test_log_probs_equal_lm_evaluation_harness(name, file, chat, tmp_path):
    """Every option of each row, in float32, with lm-evaluation-harness's own tasks and model.

    In the chat template of the tokenizer as well, where the prompts of GSM8K are compared, too.
    """
    import transformers
    needs_files(f'tokenizers/{file}', 'datasets')
    (folder := tmp_path / 'model').mkdir()
    if chat:
        (folder / 'tokenizer.json').write_bytes(gzip.decompress(
            (SHARED / 'tokenizers' / file).read_bytes()))
        template = (HERE / 'tests' / 'chat_templates' / 'default_system.jinja').read_text()
        (folder / 'tokenizer_config.json').write_text(json.dumps({
            'tokenizer_class': 'PreTrainedTokenizerFast', 'eos_token': '<|im_end|>',
            'chat_template': template}))
        reference_model(name, folder, vocab_size=151936, max_position_embeddings=4096, head_dim=16)
    else:
        shutil.copyfile(SHARED / 'tokenizers' / file, folder / 'tokenizer.model')
        reference_model(name, folder, vocab_size=32000, max_position_embeddings=4096, head_dim=16)
        transformers.LlamaTokenizer.from_pretrained(
            folder, add_bos_token=True).save_pretrained(folder)
    problems = rows_of('gsm8k/test.jsonl.gz', 12)
    tasks = {task: row for task, row in hub_tasks().items()     # NeQA's prompts end in a space
             if not (chat and task == 'inverse_scaling_neqa')}
    dev = rows_of('mmlu/dev.jsonl.gz', None, lambda line: '"anatomy"' in line)
    content = {hub: dict.fromkeys(('train', 'validation', 'test'), rows) | {'dev': dev}
               for _, _, hub, rows in tasks.values()}
    content['openai/gsm8k'] = {'train': problems[:1] * 12, 'test': problems}
    (tmp_path / 'data.json').write_text(json.dumps(content))
    script = HERE / 'tests' / 'harness_files' / 'score.py'
    done = subprocess.run([sys.executable, script, folder, 'data.json', 'found.json', chat, *tasks,
                           *['gsm8k'] * bool(chat)], cwd=tmp_path, capture_output=True, text=True,
                          env={**os.environ, 'HF_DATASETS_OFFLINE': '1', 'HF_HUB_OFFLINE': '1'})
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = json.loads((tmp_path / 'found.json').read_text())
    asked = [f'--chat={"model" if chat else "none"}', *['--multiturn'] * (chat == 'multiturn')]
    for task, (ours, file, _, rows) in tasks.items():
        write_rows(tmp_path / task / 'dev.jsonl', dev if ours == 'mmlu' else rows)
        path = write_rows(tmp_path / task / file, rows)
        place = path.parent if ours in ('mmlu', 'xcopa') else path
        place = f'{ours}:{place}'.removeprefix(':')
        evaluate.main([f'--model={folder}', f'--tasks={place}', f'--shots={5 * (ours == "mmlu")}',
                       '--prompt_format=harness', f'--out_dir={tmp_path / f"out-{task}"}',
                       '--n_bootstrap=0', '--dtype=float32', *asked])
        found = read_samples(tmp_path / f'out-{task}' / 'samples.jsonl')
        assert len(found) == len(theirs[task]) > 10
        for sample, b in zip(found, theirs[task], strict=True):
            a, b = ((sorted(x) if task == 'truthfulqa_mc1' else x)     # in another order here
                    for x in (sample['log_probs'], b))
            if chat:        # it scores the line break that ends the prompt with each option, too
                a, b = (np.subtract(x, x[0]) for x in (a, b))
            assert a == pytest.approx(b, abs=1e-4) or (
                chat and ours == 'winogrande_xl')      # after another context with each option
        if chat:
            cfg = asking(chat='model', multiturn=chat == 'multiturn', prompt_format='harness',
                         shots=5 * (ours == 'mmlu'))
            loaded = load_task(place, cfg)
            trees = tokenize_questions(loaded.items, loaded.shots, load_tokenizer(folder), chat=chat
                                       and 'model', add_bos=False, max_length=10 ** 6,
                                       multiturn=cfg.multiturn, header_as_system=True)
            prompts = [[load_tokenizer(folder).decode(ids[:start]) for ids, start in zip(
                tree.sequences, tree.starts, strict=True)] for _, tree in trees]
            assert prompts == theirs[f'{task} prompts']
    if chat:
        write_rows(tmp_path / 'gsm8k' / 'test.jsonl', problems)
        write_rows(tmp_path / 'gsm8k' / 'train.jsonl', problems[:1] * 12)
        cfg = asking(chat='model', multiturn=chat == 'multiturn', prompt_format='harness', shots=5,
                     max_length=10 ** 6, add_bos=False)
        loaded = load_written(f'gsm8k:{tmp_path / "gsm8k"}', cfg)
        prompts = [encode(question, loaded.shots[''], load_tokenizer(folder), cfg, 0)[0]
                   for question in loaded.items]
        assert [[load_tokenizer(folder).decode(ids)] for ids in prompts] == theirs['gsm8k prompts']
