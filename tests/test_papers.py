"""The scripts of research/papers/, with small stand-ins for every name on the hub that they use."""

import csv
import dataclasses
import hashlib
import itertools
import json
import re
import shutil
from types import SimpleNamespace

import metrics
import numpy as np
import pytest
import torch
from common import (HERE, SHARED, start_script, needs_files, reference_model,
                    sentencepiece_folder, t5_folder, write_rows)
from data.benchmarks import GLOBAL_MMLU, MMLU_PROX
from research.papers import common as papers
from research.papers import features, label_smoothing, multilingual, multilingual_printed
from runtime import ownership
from runtime.errors import DataError
from safetensors.torch import load_file, save_file
from test_tokenizer import train_bpe

PATTERN = 'data/train-00000-of-00001.parquet'
LETTERS = 'ABCD'


def add_to_hub(hub, name, content, kind='models', revision='main'):
    """Copy the folder `content` to where huggingface_hub keeps a repository."""
    place = hub / f'{kind}--{name.replace("/", "--")}'
    commit = hashlib.sha1(f'{name} {revision}'.encode()).hexdigest()
    shutil.copytree(content, place / 'snapshots' / commit)
    (place / 'refs').mkdir(exist_ok=True)
    (place / 'refs' / revision).write_text(commit)


def conversations(n):
    return [[f'What is {i} and {i + 1}?', f'It is {2 * i + 1}, a number.'] for i in range(n)]


def questions(n, subject='anatomy'):
    return [{'question': f'Which is {i}?', 'subject': subject, 'answer': i % 4,
             'choices': [f'the {i + k}' for k in range(4)]} for i in range(n)]


def multilingual_question(i, options):
    return {'sample_id': f'anatomy/{i}', 'subject': 'anatomy', 'question': f'Which is {i}?',
            'answer': 'ABCD'[i % 4], 'options': options} | {
                f'option_{letter.lower()}': f'the {i + k}' for k, letter in enumerate(LETTERS)}


def prox_question(i):
    return {'question_id': i, 'question': f'Which is {i}?', 'answer': LETTERS[i % 4],
            'answer_index': i % 4, 'category': 'biology', 'src': 'x', 'question_id_src': i} | {
                f'option_{k}': f'the {i + k}' for k in range(10)}


def oasst1():
    common = {'lang': 'en', 'deleted': False, 'review_result': True, 'rank': None}
    rows = []
    for i, (question, answer) in enumerate(conversations(6)):
        rows += [common | {'message_id': f'p{i}', 'parent_id': None, 'role': 'prompter',
                           'text': question},
                 *(common | {'message_id': f'a{i}-{k}', 'parent_id': f'p{i}', 'role': 'assistant',
                             'text': f'{answer} {k}', 'rank': k} for k in range(2))]
    return rows


DATASETS = {
    'allenai/tulu-3-sft-mixture': {PATTERN: [
        {'id': str(i), 'source': 's', 'messages': [{'role': 'user', 'content': question},
                                                   {'role': 'assistant', 'content': answer}]}
        for i, (question, answer) in enumerate(conversations(12))]},
    'teknium/OpenHermes-2.5': {'openhermes2_5.json': [
        {'conversations': [{'from': 'human', 'value': question}, {'from': 'gpt', 'value': answer}]}
        for question, answer in conversations(12)]},
    'tatsu-lab/alpaca': {'data/train-00000-of-00001-a09b74b3ef9c3b56.parquet': [
        {'instruction': question, 'input': '', 'output': answer, 'text': ''}
        for question, answer in conversations(16)]},
    'OpenAssistant/oasst1': {PATTERN: oasst1()},
    'EleutherAI/pile_val_test': {f'{split}.jsonl': [
        {'text': f'A {split} text about {i} and about the {i + 1} other things.',
         'meta': {'pile_set_name': 'Pile-CC'}} for i in range(4)] for split in ('val', 'test')},
    'cais/mmlu': {f'all/{split}-00000-of-00001.parquet': questions(n) for split, n in
                  (('test', 8), ('dev', 5), ('validation', 4))},
    'Rowan/hellaswag': {f'data/{split}-00000-of-00001.parquet': [
        {'ind': i, 'activity_label': 'Cooking', 'ctx_a': 'A man', 'ctx_b': 'he', 'ctx': 'A man he',
         'endings': [f'cooks {i + k}.' for k in range(4)], 'label': str(i % 4)} for i in range(8)]
        for split in ('validation', 'train')},
    'allenai/ai2_arc': {f'ARC-Easy/{split}-00000-of-00001.parquet': [
        {'id': f'{split}{i}', 'question': f'Which is {i}?', 'answerKey': LETTERS[i % 4],
         'choices': {'text': [f'the {i + k}' for k in range(4)], 'label': list(LETTERS)}}
        for i in range(8)] for split in ('test', 'train', 'validation')},
    'CohereLabs/Global-MMLU': {f'{language}/{split}-00000-of-00001.parquet': [
        multilingual_question(i, []) for i in range(n)]
        for language in GLOBAL_MMLU for split, n in (('test', 2), ('dev', 5))},
    'li-lab/MMLU-ProX': {f'{language}/{split}-00000-of-00001.parquet': [
        prox_question(i) for i in range(n)]
        for language in MMLU_PROX for split, n in (('test', 2), ('validation', 5))},
}
LLAMA = ('llama', ['meta-llama/Llama-3.1-8B', 'meta-llama/Llama-3.1-8B-Instruct',
                   *(f'huggyllama/llama-{size}' for size in ('7b', '13b', '30b', '65b')),
                   *(f'meta-llama/Llama-2-{size}-hf' for size in ('7b', '13b', '70b'))])
GEMMA = ('gemma2', ['google/gemma-2-2b', 'google/gemma-2-2b-it'])
MISTRAL = ('mistral', ['mistralai/Mistral-7B-v0.1', 'mistralai/Mistral-7B-Instruct-v0.1'])
PYTHIA = ('neox', [f'EleutherAI/pythia-{size}' for size in (
    '70m', '160m', '410m', '1b', '1.4b', '2.8b', '6.9b', '12b')])
AYA = ('cohere', ['CohereLabs/aya-expanse-8b'])
GEMMA3 = ('gemma3', ['google/gemma-3-4b-pt', 'google/gemma-3-4b-it'])
OPT = ('opt', [f'facebook/opt-{size}' for size in (
    '125m', '350m', '1.3b', '2.7b', '6.7b', '13b', '30b', '66b')])
STEPS = (256, 512, 2000, 4000, 8000, 16000, 32000, 64000, 128000, 143000)


def t5_model(folder):
    import transformers
    transformers.T5ForConditionalGeneration(transformers.T5Config(
        vocab_size=512, d_model=32, d_kv=8, d_ff=40, num_layers=2, num_heads=2,
        decoder_start_token_id=0)).save_pretrained(folder)
    return t5_folder(folder)


@pytest.fixture(scope='module')
def hub(tmp_path_factory):
    """A hub cache that holds a small stand-in of every model and dataset of the papers."""
    from tokenizers.pre_tokenizers import ByteLevel
    from torch import save
    base = tmp_path_factory.mktemp('hub')
    hub = base / 'cache'
    hub.mkdir()
    for kind, names in (LLAMA, GEMMA, GEMMA3, MISTRAL, AYA, OPT, PYTHIA):
        folder = base / kind
        if kind == 'opt':
            tokenizer = train_bpe(folder, [ByteLevel(add_prefix_space=False)], special=['<s>'],
                                  bos_token='<|end|>', add_bos_token=True)
            tokenizer.model.save(str(folder))       # vocab.json and merges.txt, as OPT has them
            (folder / 'tokenizer.json').unlink()
        elif kind == 'neox':
            train_bpe(folder, [ByteLevel(add_prefix_space=False)])
        else:
            sentencepiece_folder(folder, {'llama': 'llama2', 'cohere': 'llama2', 'gemma2': 'gemma',
                                          'gemma3': 'gemma'}.get(kind, kind))
        reference_model(kind, folder, vocab_size=450, max_position_embeddings=2048)
        for name in names:
            add_to_hub(hub, name, folder)
    # a training step of Pythia has no safetensors
    save(load_file(folder / 'model.safetensors'), folder / 'pytorch_model.bin')
    (folder / 'model.safetensors').unlink()
    for step in STEPS:
        add_to_hub(hub, 'EleutherAI/pythia-1.4b', folder, revision=f'step{step}')
    add_to_hub(hub, 'google/flan-t5-small', t5_model(base / 't5'))
    for name, files in DATASETS.items():
        for path, rows in files.items():
            write_rows(base / 'data' / name / path, rows)
        add_to_hub(hub, name, base / 'data' / name, 'datasets')
    return hub


SMALL = ['--batch_size=4', '--max_length=256', '--pack_len=256', '--val_size=2', '--max_steps=2',
         '--workers=1', '--device=cpu', '--dtype=float32', '--pictures=False']
FAST = ['--eval.n_bootstrap=0', '--eval.pictures=False', '--eval.pack_len=512']


def run_paper(hub, script, *arguments, code=0, wait=True):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr('huggingface_hub.constants.HF_HUB_CACHE', str(hub))
        process = start_script(f'research/papers/{script}.py', *arguments,
                               env={'HF_HUB_CACHE': str(hub)})
    if not wait:
        return process
    printed = ''.join(process.communicate())
    assert process.returncode == code, printed
    return printed


def read_table(folder, name):
    with open(folder / f'{name}.csv', newline='') as file:
        return list(csv.DictReader(file))


def log_of(folder):
    return [json.loads(line) for line in (folder / 'log.jsonl').open()]


def config_of(folder):
    return (folder / 'train_config.py').read_text()


def results_of(folder):
    return json.loads((folder / 'results.json').read_text())


def next_token_nll(folder):
    return results_of(folder)['tasks']['clm']['pooled']['nll']


@pytest.mark.slow
@pytest.mark.parametrize('script, n_runs, model', [
    ('label_smoothing', 3 * (1 + 3 * 10) + 2 * 3, 'google/gemma-2-2b'),
    ('multilingual', 3 * (2 + 3 * 7), 'google/gemma-2-2b-it'),
    ('semantic_calibration', 4 * 2 + 3, 'HuggingFaceH4/zephyr-7b-beta'),
    ('code_calibration', 4, 'codellama/CodeLlama-7b-hf'),
    ('know', 4 * 3, 'Qwen/Qwen2.5-1.5B'),
    ('alignment', 15 + 13 + 10 + 1 + 4 * 3 + 4 + 2, 'meta-llama/Llama-2-70b-hf')])
def test_the_plan_lists_every_run_and_writes_nothing(tmp_path, script, n_runs, model):
    out = tmp_path / 'out'
    more = ['--rlhf=a,b', '--trex=c', '--comparisons=d'] if script == 'alignment' else []
    printed = run_paper(tmp_path, script, '--plan', f'--out_dir={out}', *more)
    assert f'0 of {n_runs} finished' in printed and model in printed
    assert re.search(r'[\d,]+ GPU hours are left', printed) and not out.exists()
    if script == 'alignment':       # 10 checkpoints of Pythia 1.4B count, and a and b
        assert 'The models to download have about 786 GB' in printed
        with ownership.lock(out):
            printed = run_paper(tmp_path, script, f'--out_dir={out}', code=1)
        assert 'out: another process is writing there' in printed
        assert not (out / 'changes.json').exists()


def test_label_smoothing_smooths_at_the_chosen_rate_and_tabulates_its_reports(hub, tmp_path):
    out = tmp_path / 'out'
    arguments = [f'--out_dir={out}', f'--cache_dir={tmp_path}', *SMALL, *FAST]
    printed = run_paper(hub, 'label_smoothing', '--only=Llama-3.1-8B/Tulu3,base,Gemma2-2B/Alpaca/'
                        'lr5e-06,Mistral-7B/OpenHermes/lr5e-06', *arguments)
    assert 'Gemma2-2B/Alpaca/smoothing0 waits' not in printed       # not selected
    folder = out / 'Llama-3.1-8B' / 'Tulu3'
    chosen = min(('5e-06', '2e-05', '5e-05', '0.0002'),
                 key=lambda lr: log_of(folder / f'lr{lr}')[-1]['val_nll'])
    smoothed = config_of(folder / 'smoothing0.3')
    assert f'\nlr = {float(chosen)}\n' in smoothed and '\nsmoothing = 0.3\n' in smoothed
    plain = results_of(folder / 'smoothing0')
    assert plain['config']['model'] == str(folder / f'lr{chosen}')
    capped = json.loads((folder / 'cap30' / 'config.json').read_text())
    assert capped['nanocal']['softcap'] == 30
    rows = read_table(out, 'smoothing')
    assert [row['method'] for row in rows if row['model, data'] == 'Llama-3.1-8B, Tulu3'] == [
        'smoothing 0', 'temperature scaling', 'platt scaling', 'cap 30', 'smoothing 0.1',
        'smoothing 0.2', 'smoothing 0.3', 'smoothing 0.4', 'smoothing 0.5']
    first = next(row for row in rows if row['method'] == 'smoothing 0')
    assert first['HellaSwag ECE'] == f'{plain["tasks"]["hellaswag"]["pooled"]["ece"]:.3f}'
    assert all(row['HellaSwag ECE'] and row['ARC-Easy accuracy'] for row in rows)
    tex = (out / 'smoothing.tex').read_text()
    assert (out / 'mmlu.png').exists() and '\\toprule' in tex and '\\textbf{0.' in tex
    assert 'Not stated, and chosen here' in (out / 'tables.md').read_text()
    assert 'smoothing0.1 waits for the 4 learning rates' in run_paper(
        hub, 'label_smoothing', '--only=OpenHermes/smoothing', *arguments)


@pytest.mark.slow
def test_know_tunes_on_written_answers_and_tabulates_each_p_ik(tmp_path):
    """From hub names to tables, with a small random Llama and questions of its own."""
    sentencepiece_folder(tmp_path / 'model', 'llama2')
    reference_model('llama', tmp_path / 'model', vocab_size=450, max_position_embeddings=2048)
    add_to_hub(tmp_path / 'hub', 'meta-llama/Llama-3.2-1B', tmp_path / 'model')
    answer = {'value': 'a', 'aliases': ['the', 'e']}
    for name, test, row in (
            ('mandarjoshi/trivia_qa', 'validation', lambda i: {'answer': answer}),
            ('openai/gsm8k', 'test', lambda i: {'answer': f'It is {i}.\n#### {i}'})):
        folder = tmp_path / test
        for split, n in ((test, 5), ('train', 16)):
            write_rows(folder / f'{split}.jsonl', [
                {'question': f'What is {split} {i}?', 'question_id': f'{split}{i}'} | row(i)
                for i in range(n)])
        add_to_hub(tmp_path / 'hub', name, folder, 'datasets')
    out = tmp_path / 'out'
    printed = run_paper(tmp_path / 'hub', 'know', '--only=Llama-3.2-1B', f'--out_dir={out}',
                        f'--cache_dir={tmp_path}', *SMALL, *FAST, '--eval.n=3', '--eval.limit=10',
                        '--eval.max_tokens=5', '--lr=0.02')
    assert printed.count('=== Llama-3.2-1B/') == 3 and 'waits for' not in printed
    rows = read_table(out, 'p_ik')
    assert [(row['task'], row['P(IK)'], row['questions']) for row in rows] == [
        (task, method, '5') for task in ('TriviaQA', 'GSM8K')
        for method in ('probe', 'asked, not tuned', 'tuned on TriviaQA')]
    assert rows[2]['AUROC, 52B (paper, its own settings)'] == '0.864'
    assert {row['accuracy'] for row in rows} == {'0.000'}     # a random model is always wrong
    assert float(rows[1]['confidence']) > 0.1 > float(rows[2]['confidence'])    # and learns that
    assert [row['confidence'] for row in read_table(out, 'p_true')] and (
        out / 'reliability.png').exists() and (out / 'p_ik.png').exists()


def settings(**changed):
    """The options of a script, as its tables read them."""
    return SimpleNamespace(**{'out_dir': 'nowhere', 'changes': [], 'model': '', 'data': '',
                              'models': '', 'figures': '', 'rates': 'best'} | changed)


def test_label_smoothing_shows_the_printed_numbers_that_its_file_holds(tmp_path, monkeypatch):
    """Empty as it comes; a wrong row is named by its line."""
    paper, file = label_smoothing, tmp_path / 'printed.csv'
    head = 'benchmark,model,data,method,accuracy,ece,rms\n'
    assert paper.PRINTED_FILE.read_text() == head and paper.printed_numbers() == {}
    for rows, message in (
            ('arc,Gemma2-2B,,base,,,\n', "2: benchmark 'arc' is not one of 'mmlu', 'hellaswag'"),
            ('mmlu,Gemma2-2B,,base,50.1,,\n', "2: accuracy must be a number from 0 to 1, not '50"),
            (2 * 'mmlu,Gemma2-2B,,base,,,\n', '3: mmlu Gemma2-2B base is there twice')):
        file.write_text(head + rows)
        with pytest.raises(DataError, match=re.escape(f'{file}:{message}')):
            paper.printed_numbers(file)
    monkeypatch.setattr(paper, 'draw_lines', lambda *_: None)
    (_, _, ((*titles, _), *_)), = paper.tables(settings())
    assert not any('(paper)' in title for title in titles)
    file.write_text(
        head + 'mmlu,Gemma2-2B,Tulu3,smoothing 0.1,0.5,0.04,\nmmlu,Gemma2-2B,,base,,0.03,0.2\n')
    printed = paper.printed_numbers(file)
    assert [*printed.values()] == [{'accuracy': 0.5, 'ece': 0.04},
                                   {'ece': 0.03, 'rms_mmlu_repo': 0.2}]
    monkeypatch.setattr(paper, 'printed_numbers', lambda: printed)
    (_, _, (head, *rows)), = paper.tables(settings())
    assert [title for title in head if '(paper)' in title] == [
        'MMLU accuracy (paper)', 'MMLU ECE (paper)', 'MMLU RMS as printed (paper)']
    at = head.index('MMLU ECE (paper)')
    assert {(*row[:2], row[at]) for row in rows if row[at]} == {
        ('Gemma2-2B', 'base', '0.030'), ('Gemma2-2B, Tulu3', 'smoothing 0.1', '0.040')}


def test_multilingual_puts_its_numbers_beside_the_printed_ones(hub, tmp_path):
    out = tmp_path / 'out'
    printed = run_paper(
        hub, 'multilingual', '--only=Gemma2-2B/base,Gemma3-4B/instruct,Aya-Expanse-8B/base,'
        'Mistral-7B/OpenHermes', '--models=aya,gemma3', f'--out_dir={out}',
        f'--cache_dir={tmp_path}', '--figures=am', *SMALL, *FAST)
    assert 'Global-MMLU, all languages together' in printed
    assert 'changed settings: --batch_size=4' in printed and '--cache_dir' not in printed
    rows = read_table(out, 'global_mmlu')
    assert rows[0]['model'] == 'Gemma2-2B' and rows[0]['data'] == 'base' and rows[0]['accuracy']
    assert rows[0]['accuracy (paper, its own settings)'] == '0.326'
    smoothed = next(row for row in rows if [row[key] for key in ('model', 'data', 'smoothing')]
                    == ['Mistral-7B', 'OpenHermes', '0.1'])
    assert smoothed['ECE (paper, its own settings)'] == '0.043' and smoothed['RMS as defined']
    assert smoothed['p ECE, languages'] and 0 < float(smoothed['p ECE, questions']) <= 1
    classes = read_table(out, 'mmlu_prox_classes')
    assert [row['class'] for row in classes[:3]] == ['high', 'mid', 'low']
    assert sum(len(read_table(out, f'{task}_languages')) for task in ('global_mmlu', 'mmlu_prox')
               ) == 71 * (4 * 11 + 10)
    appendix = (out / 'appendix.md').read_text()
    assert appendix.count('## ') == 71 and '| instruct | Gemma3-4B |' in appendix
    assert '**' in appendix and (out / 'appendix.tex').read_text().count('\\toprule') == 71
    assert all((out / f'{name}.png').exists() for name in (
        'figure1', 'figure2', 'global_mmlu-am')) and not (out / 'mmlu_prox-yo.png').exists()
    config = config_of(out / 'Mistral-7B' / 'OpenHermes' / 'lr5e-06')
    assert '\nlora_rank = 64\n' in config and '\nlora_alpha = 16.0\n' in config
    assert 'up_proj' in config
    cfg = results_of(out / 'Gemma2-2B' / 'base')['config']
    assert cfg['shots'] == 0 and cfg['scoring'] == 'letters'


def test_the_appendix_has_the_better_smoothing_bold_and_italic_if_significant(tmp_path,
                                                                              monkeypatch):
    numbers = {'base': 0.02, 'smoothing0': 0.3, 'smoothing0.1': 0.1, 'smoothing0.2': 0.05}
    monkeypatch.setattr(multilingual, 'measured', lambda folder, task: (
        {} if 'instruct' in folder or task == 'mmlu_prox' else {'languages': {
            'yo': dict.fromkeys(multilingual.PRINTED, numbers[folder.split('/')[-1]])}}))
    with ownership.lock(tmp_path):
        multilingual.write_appendix(settings(out_dir=str(tmp_path), changes=['--lr=1']), {
            'global_mmlu': {('Gemma2-2B', 'Tulu3', '0.1'): {'yo': {
                'ece': 0.049, 'accuracy': 0.051}}}})
    title, _, head, _, *lines = (tmp_path / 'appendix.md').read_text().splitlines()
    assert title == ('## Global-MMLU in yo by SFT dataset, model and smoothing; '
                     'changed settings: --lr=1')
    cells = {tuple(line.split(' | ')[:3]): line[2:-2].split(' | ')[3:] for line in lines if line}
    assert len(cells) == 3 * (1 + 3 * 3)        # models: base, and data with three rates
    assert cells['| Tulu3', 'Gemma2-2B', '0.0'] == ['**0.300**', '0.300', '0.300', '0.300']
    assert cells['| Tulu3', 'Gemma2-2B', '0.1'] == ['0.100', '0.100', '***0.100***', '**0.100**']
    assert cells['| Alpaca', 'Gemma2-2B', '0.1'] == ['0.100', '0.100', '**0.100**', '**0.100**']
    tex = (tmp_path / 'appendix.tex').read_text()
    assert tex.count(r'\textbf{\textit{0.100}}') == 1 and r'-{}-lr=1\par' in tex


def tables_of_languages(languages, out):
    """Return {name: lines} of the multilingual tables of an evaluation in a few languages."""
    return {name: lines for name, _, lines in multilingual.tables(
        settings(out_dir=str(out), changes=[f'--eval.languages={languages}']))}


def test_tables_of_a_few_languages_or_one_are_of_these_languages(tmp_path, monkeypatch):
    lines = tables_of_languages('de,en,sw', 'nowhere')
    column = lines['global_mmlu'][0].index('accuracy (paper, its own settings)')
    assert not any(line[column] for line in lines['global_mmlu'][1:])       # the pool of 42
    printed = multilingual_printed.printed_numbers()
    of = {x: printed['global_mmlu', x, 'Gemma2-2B', 'base', '']['accuracy'] for x in ('de', 'en')}
    assert lines['global_mmlu_classes'][1][column + 1] == f'{sum(of.values()) / 2:.3f}'
    assert {line[0] for line in lines['mmlu_prox_languages'][1:]} == {'de', 'en', 'sw'}
    # the results of a single language are the pooled ones: results.json has no others
    monkeypatch.setattr(multilingual, 'draw_figures', lambda _: None)
    monkeypatch.setattr(multilingual, 'measured', lambda folder, task: {'pooled': dict.fromkeys(
        (*multilingual.PRINTED, 'rmsce'), 0.125)} if folder.endswith('Gemma2-2B/base') else {})
    with ownership.lock(tmp_path):
        lines = tables_of_languages('yo', tmp_path)
    for name in ('global_mmlu_classes', 'global_mmlu_languages', 'mmlu_prox_languages'):
        assert [line[:5] for line in lines[name] if line[4] == '0.125'] == [
            ('low' if 'classes' in name else 'yo', 'Gemma2-2B', 'base', '', '0.125')]
    assert '0.125' in (tmp_path / 'appendix.tex').read_text()


@pytest.mark.slow
def test_the_printed_tables_count_where_the_claims_of_the_paper_hold(tmp_path):
    """Without a model. The counts and means were found separately, from the text of the paper."""
    out = tmp_path / 'out'
    printed = run_paper(tmp_path, 'multilingual', '--printed', f'--out_dir={out}')
    assert 'Printed: cells in which a claim holds' in printed and (out / 'printed.png').exists()
    assert 'unrecognized arguments' in run_paper(tmp_path, 'multilingual', '--printed', '--plan',
                                                 code=2)
    tables = {name: [[*row.values()] for row in read_table(out, f'printed_{name}')]
              for name in ('classes', 'claims', 'settings', 'checks')}
    means = {name: [cell.split()[0] for cell in cells] for name, _, *cells in tables['classes']}
    for task, column, expected in (
            ('Global-MMLU', 0, ['+0.144', '+0.140', '+0.077']),
            ('Global-MMLU', 3, ['-0.087', '-0.090', '-0.058']),
            ('MMLU-ProX', 0, ['+0.041', '+0.039', '+0.030']),
            ('MMLU-ProX', 3, ['-0.077', '-0.077', '-0.070']),
            ('MMLU-ProX', 4, ['+0.013', '+0.013', '+0.008'])):
        assert [means[f'{task}, {x}'][column] for x in ('high', 'mid', 'low')] == expected
    settings = {tuple(line[:3]): line[3:] for line in tables['settings']}
    assert len(settings) == 18
    assert settings['Mistral-7B', 'Tulu3', 'Global-MMLU'][0] == '14 of 42'
    for column, n in ((2, 37), (3, 91), (5, 218)):
        assert sum(int(line[column].split()[0]) for line in settings.values()) == n
    checks = {name: cells for name, *cells in tables['checks']}
    assert checks['by language: RMS is below ECE'][0] == '396 of 1260'
    assert checks['by language: RMS^2 sqrt(bins of 100) is below ECE'] == ['0 of 1260', '1 of 870']
    assert checks['table 2: no confidence fits accuracy, entropy, ECE'] == ['0 of 21', '19 of 21']


@pytest.mark.parametrize('n_options', [4, 10])
def test_every_set_of_predictions_is_within_its_confidence_range(n_options):
    random = np.random.default_rng(n_options)
    for sharpness in (0.1, 0.5, 1, 3, 10):
        weights = random.random((500, n_options)) ** (1 / random.random((500, 1)) * sharpness)
        probs = weights / weights.sum(1, keepdims=True)
        labels = np.where(random.random(500) < random.random(), probs.argmax(1),
                          random.integers(n_options, size=500))
        row = {key: round(value, 3) for key, value in metrics.report(probs, labels).items()
               if key in ('accuracy', 'entropy_bits', 'ece')}
        low, high = multilingual_printed.confidence_range(row, n_options)
        assert low <= metrics.mean_confidence(probs, labels) <= high
    assert multilingual_printed.confidence_range(
        {'accuracy': 0.192, 'entropy_bits': 0.391, 'ece': 0.143}, 10) == pytest.approx(
        (0.7623, 0.336), abs=1e-3)      # impossible: Llama 3.1 8B on MMLU-ProX in table 2


def test_every_printed_row_has_a_setting_of_its_own_and_the_numbers_of_the_paper():
    """Tables 27 and 31 print the last smoothing of Tulu3 as 0.1 a second time."""
    with open(HERE / 'research' / 'papers' / 'multilingual_printed.csv', newline='') as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 42 + 71 * 30
    data = [('base', ''), *itertools.product(('Alpaca', 'OpenHermes', 'Tulu3'),
                                             ('0.0', '0.1', '0.2'))]
    assert sorted(tuple(row.values())[:5] for row in rows if row['language'] != 'all') == sorted(
        (task, language, model, *setting)
        for task, languages in (('global_mmlu', GLOBAL_MMLU), ('mmlu_prox', MMLU_PROX))
        for language in languages for model in ('Gemma2-2B', 'Mistral-7B', 'Llama-3.1-8B')
        for setting in data)
    needs_files('seeds')        # the text of the paper
    text = next(path.read_text() for path in (SHARED / 'seeds').iterdir()
                if path.read_text().startswith('Investigating the Multilingual'))
    tables = text[text.index('Table 2:'):text.index('Appendix D')]
    assert [row[key] for row in rows for key in ('accuracy', 'entropy_bits', 'ece', 'rms')
            ] == re.findall(r'(?<![\d.])\d\.\d{3}(?!\d)', tables)


def test_alignment_evaluates_every_epoch_and_repeats_nothing_after_a_move(hub, tmp_path):
    out = tmp_path / 'out'
    facts = [{'docid': str(i), 'text': f'The sky is blue and {i} is a number.', 'triples': [],
              'entities': [{'boundaries': [11, 15], 'annotator': 'Wikidata_Spotlight_Entity_Linker',
                            'surfaceform': 'blue', 'uri': 'http://www.wikidata.org/entity/Q1088'}]}
             for i in range(6)]
    write_rows(tmp_path / 'trex' / 're-nlg_0-10000.json', facts)
    # after PPO: merged weights, and the adapter of a model that is not merged
    lora = tmp_path / 'ppo-2'
    write_rows(lora / 'adapter_config.json', {
        'peft_type': 'LORA', 'task_type': 'CAUSAL_LM', 'r': 2, 'lora_alpha': 32,
        'base_model_name_or_path': 'huggyllama/llama-7b', 'target_modules': ['q_proj']})
    layer = 'base_model.model.model.layers.0.self_attn.q_proj'
    save_file({f'{layer}.lora_A.weight': torch.ones(2, 48),
               f'{layer}.lora_B.weight': torch.ones(48, 2)}, lora / 'adapter_model.safetensors')
    add_to_hub(hub, 'some/ppo-2', lora)
    arguments = ['--only=pythia-70m,llama-2-7b,flan-t5-small,opt-125m,step256,aligned/base,'
                 'alpaca-lora,oasst1-full,rlhf',
                 f'--cache_dir={tmp_path}', '--eval.limit=8', *FAST,
                 *(x for x in SMALL if not x.startswith(('--max_steps', '--val')))]
    more = [f'--trex={tmp_path / "trex"}', '--rlhf=huggyllama/llama-13b,some/ppo-2']
    run_paper(hub, 'alignment', f'--out_dir={out}', *arguments, '--only=pythia-70m,')
    assert not (out / 'aligned').exists()
    assert not read_table(out, 'scales')[0]['facts generation ECE']
    printed = run_paper(hub, 'alignment', f'--out_dir={out}', *arguments, *more)
    assert 'Alignment of LLaMA 7B' in printed
    title = r'with instructions \(figures 5 and 12\)(\n\n`|; )changed settings: \S*eval\.limit=8 '
    for name in ('tables.md', 'alignment.tex'):
        assert re.search(title, (out / name).read_text())
    rows = {row['model']: row for row in read_table(out, 'alignment')}
    assert [*rows] == ['base', *(f'{data}-{method}, epoch {epoch}' for method in ('full', 'lora')
                                 for data in ('alpaca', 'oasst1') for epoch in (1, 2, 3)),
                       *(f'{name}, epoch {epoch}' for name in ('ppo', 'rlhf')
                         for epoch in (1, 2, 3))]
    assert {name for name, row in rows.items() if row['facts generation ECE']} == {
        'base', 'rlhf, epoch 1', 'rlhf, epoch 2',
        *(f'{name}, epoch {i}' for name in ('alpaca-lora', 'oasst1-full') for i in (1, 2, 3))}
    losses = [next_token_nll(out / 'aligned' / name)
              for name in ('base', 'rlhf/report-1', 'rlhf/report-2')]
    assert losses[0] == losses[1] != losses[2]      # the stand-ins are one model
    # both datasets have the 12 pairs of OASST1
    for name in ('alpaca-lora', 'oasst1-full'):
        assert len(log_of(out / 'aligned' / name)) == 3 * 12 // 4
    config = config_of(out / 'aligned' / 'alpaca-lora')
    assert '\nwarmup_steps = 100\n' in config and '\ndata_limit = 12\n' in config
    assert read_table(out, 'steps')[0]['MMLU ECE'] and not read_table(out, 'steps')[1]['MMLU ECE']
    assert len([*out.glob('figure*.png')]) == 10
    scales = {row['model']: row for row in read_table(out, 'scales')}
    for model, generates in (('pythia-70m', True), ('opt-125m', True), ('flan-t5-small', False)):
        assert scales[model]['MMLU ECE']
        assert bool(scales[model]['facts generation ECE']) == generates     # T5 scores answers
    # without instructions no header; Alpaca-LoRA's recipe has a loss on the prompt too
    for folder, header, on_inputs in (
            ('pythia-70m', 'none', None), ('aligned/base', 'english', None),
            ('aligned/oasst1-full', 'english', False), ('aligned/alpaca-lora', 'english', True)):
        settings = json.loads((out / folder / 'eval_config.json').read_text())
        assert settings['header'] == header and settings['instruct'] == (header == 'english')
        assert on_inputs is None or f'\ntrain_on_inputs = {on_inputs}\n' in config_of(out / folder)
    # the ECE of MMLU with the letter's probability among all tokens
    samples = [json.loads(x) for x in (out / 'pythia-70m' / 'samples.jsonl').open()]
    log_probs, answers = zip(*((s['log_probs'], s['answer']) for s in samples
                               if s['task'] == 'mmlu'), strict=True)
    top, right = np.exp(np.max(log_probs, 1)), np.argmax(log_probs, 1) == answers
    assert scales['pythia-70m']['MMLU ECE, unnormalized'] == f'{metrics.ece(top, right):.3f}'
    # nothing is done again after a move; another checkpoint does not pass for the first
    moved = f'--out_dir={shutil.move(out, tmp_path / "moved")}'
    assert '===' not in run_paper(hub, 'alignment', moved, *arguments, *more)
    assert 'holds samples of another model' in run_paper(
        hub, 'alignment', moved, *arguments, *more, '--only=rlhf', '--rlhf=EleutherAI/pythia-70m',
        code=1)


def test_alignment_trains_a_reward_model_and_ppo_and_draws_the_last_group(hub, tmp_path):
    out, words = tmp_path / 'out', ('fox', 'dog', 'sky', 'blue')
    rows = [{'user_input': f'What is {i}?', 'responses_and_scores': [
        {'response': f'It is {i}, a number.', 'source': 'gpt4', 'score': 9.0},
        {'response': f'The {words[i % 4]}.', 'source': 'text-davinci-003', 'score': 9.0 - (i > 5)},
        {'response': '' if i % 3 else 'It.', 'source': 'icm-1.3b', 'score': 2.0}]}
        for i in range(524)]    # 4 of them are ties
    write_rows(tmp_path / 'comparison_data_v2.json', rows)
    # keys that align.py has no use for reach the other runs alone; Alpaca's prompt needs room
    arguments = [f'--cache_dir={tmp_path}', '--eval.limit=8', *FAST, '--batch_size=8', *SMALL[5:],
                 '--max_length=512', '--pack_len=512', '--smoothing=0.1',
                 f'--comparisons={tmp_path / "comparison_data_v2.json"}']
    printed = run_paper(hub, 'alignment', '--only=aligned/ppo', f'--out_dir={out}', *arguments)
    assert 'aligned/ppo waits for alpaca-full and reward' in printed
    arguments.insert(0, '--only=aligned/alpaca-full,reward,ppo')
    printed = run_paper(hub, 'alignment', f'--out_dir={out}', *arguments)
    assert '4 rows left out: answers of equal score' in printed
    for line in (f"model = '{out}/aligned/alpaca-full'", f"reward = '{out}/aligned/reward'",
                 'smoothing = 0.0', 'kl_target = 6.0', 'updates = 4'):
        assert f'{line}\n' in config_of(out / 'aligned/ppo')
    assert '\nsmoothing = 0.1\n' in config_of(out / 'aligned/alpaca-full')
    log = log_of(out / 'aligned/reward')
    assert len(log) == 2 * 20 // 8 and {'val_loss', 'val_accuracy', 'val_ece'} <= log[-1].keys()
    log = log_of(out / 'aligned/ppo')
    assert len(log) == 3 * 16 // 8 and len({r['reward'] for r in log}) > 4
    # the KL is below its target
    assert log[0]['kl_coef'] == pytest.approx(0.2) and log[-1]['kl_coef'] < 0.1999
    rows = {row['model']: row for row in read_table(out, 'alignment')}
    assert all(rows[f'{name}, epoch {epoch}'][f'{task} ECE'] for name in ('alpaca-full', 'ppo')
               for epoch in (1, 2, 3) for task in ('causal language modeling', 'MMLU'))
    assert not any('rlhf' in name for name in rows) and (out / 'figure5.png').exists()
    # each epoch of PPO has other weights
    assert len({next_token_nll(out / 'aligned' / name) for name in (
        'alpaca-full', 'ppo/report-1', 'ppo/report-2', 'ppo')}) == 4
    # nothing is done again after a move, though PPO's model and reward model are in the folder
    moved = shutil.move(out, tmp_path / 'moved')
    assert '===' not in run_paper(hub, 'alignment', f'--out_dir={moved}', *arguments)


@pytest.mark.slow
@pytest.mark.parametrize('pooling', ['mean', 'last'])
def test_features_are_the_hidden_states_of_transformers_and_their_covariance(tmp_path, capsys,
                                                                            pooling):
    """Pooled without BOS and padding; the singular values by numpy's SVD."""
    reference = reference_model('llama', tmp_path / 'model', vocab_size=450)
    sentencepiece_folder(tmp_path / 'model', 'llama2')
    rows = [{'instruction': f'What is {i}?', 'output': f'It is {i * i}, ' + 'quick fox ' * (i % 7)}
            for i in range(90)]
    write_rows(tmp_path / 'a.json', rows)
    write_rows(tmp_path / 'b.json', [*rows[:70], {'output': 3}])
    cfg = features.FeatureConfig(
        models=(str(tmp_path / 'model'),), pooling=pooling,
        data=(str(tmp_path / 'a.json'), str(tmp_path / 'b.json')),
        n=80, batch_tokens=200, device='cpu', out_dir=str(tmp_path / 'out'))
    _, first, second = features.run(cfg)
    assert 'b.json: 70 texts (1 bad rows left out' in capsys.readouterr().out
    tokenizer = features.load_model_tokenizer(
        tmp_path / 'model', features.checkpoint.read_config(tmp_path / 'model'))
    x = []
    for i in np.random.default_rng(0).permutation(90)[:70]:     # as many as the smaller dataset has
        ids = [tokenizer.bos_id, *tokenizer.encode(rows[i]['output'])]
        with torch.no_grad():
            states = reference.model(torch.tensor([ids])).last_hidden_state[0, 1:]
        x.append(states.mean(0) if pooling == 'mean' else states[-1])
    x = torch.stack(x).double().numpy()
    values = np.linalg.svd(x - x.mean(0), compute_uv=False) ** 2 / 69
    share = values / values.sum()
    cosines = (x @ x.T) / np.outer(*[np.linalg.norm(x, axis=1)] * 2)
    expected = [values[-1], values[-1] / values.mean(), np.exp(-(share * np.log(share)).sum()),
                cosines[~np.eye(70, dtype=bool)].mean()]
    assert [float(cell) for cell in first[3:]] == pytest.approx(expected, rel=0.01)
    assert (first[1], first[2], second[2]) == ('a.json', '70', '70')
    assert (tmp_path / 'out' / 'figure6.png').read_bytes().startswith(b'\x89PNG')
    (points,), shares = features.projected([x])
    assert (points ** 2).sum(0) / 69 == pytest.approx(values[:2])
    assert shares == pytest.approx(share[:2])
    # fewer texts than features
    features.run(dataclasses.replace(cfg, n=40, out_dir=str(tmp_path / 'few')))
    assert 'too few for the smallest singular value of 48 features' in capsys.readouterr().out


def test_the_other_runs_continue_without_a_gated_model(hub, tmp_path):
    (tmp_path / 'hub').mkdir()
    for place in hub.iterdir():
        if place.name != 'models--google--gemma-2-2b':
            (tmp_path / 'hub' / place.name).symlink_to(place)
    out = tmp_path / 'out'
    arguments = ['--only=base', f'--out_dir={out}', '--device=cpu', *FAST]
    printed = run_paper(tmp_path / 'hub', 'label_smoothing', *arguments, code=1)
    assert 'downloading the model google/gemma-2-2b from the hub failed' in printed
    assert printed.endswith('error: not done: Gemma2-2B/base; the messages are above\n')
    assert [row['MMLU ECE'] > '' for row in read_table(out, 'smoothing')] == [False, True, True]


# ---- On your own model and files -----------------------------------------------------------------

@pytest.fixture(scope='module')
def own(tmp_path_factory):
    """A folder with a model, conversations, pairs, texts and benchmarks as they are published."""
    folder = tmp_path_factory.mktemp('own')
    sentencepiece_folder(folder / 'model', 'gemma')
    reference_model('gemma3', folder / 'model', vocab_size=450, max_position_embeddings=2048)
    rows = DATASETS['tatsu-lab/alpaca']['data/train-00000-of-00001-a09b74b3ef9c3b56.parquet']
    write_rows(folder / 'alpaca.json', rows)
    write_rows(folder / 'pairs.json', [{
        'conversations': [{'from': 'user', 'content': question}],
        'chosen': {'from': 'assistant', 'content': answer},
        'rejected': {'from': 'assistant', 'content': 'No.'}} for question, answer in
        conversations(12)])
    for split, n in (('test', 8), ('dev', 5)):
        write_rows(folder / 'mmlu' / f'{split}.jsonl', questions(n))
    arc = DATASETS['allenai/ai2_arc']['ARC-Easy/test-00000-of-00001.parquet']
    for name in ('Easy', 'Challenge'):
        for split in ('test', 'train'):
            write_rows(folder / 'arc' / f'ARC-{name}-{split}.jsonl', arc)
    for language in ('et', 'sw'):
        write_rows(folder / 'xcopa' / f'test.{language}.jsonl', [
            {'premise': f'It is {i}.', 'choice1': 'the one', 'choice2': 'the two', 'idx': i,
             'question': 'cause', 'label': i % 2} for i in range(4)])
    for split in ('test', 'dev'):
        (folder / 'cmmlu' / split).mkdir(parents=True)
        (folder / 'cmmlu' / split / 'anatomy.csv').write_text(
            ',Question,A,B,C,D,Answer\n' + ''.join(
                f'{i},Which is {i}?,the one,the two,the red,the fox,{LETTERS[i % 4]}\n'
                for i in range(4)))
    (folder / 'wiki').mkdir()
    (folder / 'wiki' / 'wiki.test.txt').write_text(''.join(
        f' The quick fox is {i} and a number . \n' for i in range(8)))
    return folder


def own_arguments(own, out):
    return [f'--model=Mine={own}/model', f'--data=Chats={own}/alpaca.json', f'--out_dir={out}']


def test_a_plan_for_your_own_model_counts_its_weights_and_the_size_of_your_files(own, tmp_path):
    out = tmp_path / 'out'
    tasks = f'--eval.tasks=mmlu:{own}/mmlu,arc_challenge:{own}/arc'
    printed = run_paper(tmp_path, 'label_smoothing', *own_arguments(own, out), tasks, '--plan',
                        '--rates=all')
    assert re.findall(r'Mine/Chats-lr5e-05/(\S+)', printed) == ['lr5e-05', 'smoothing0', *(
        f'smoothing{s}' for s in (0.1, 0.2, 0.3, 0.4, 0.5)), 'cap30']
    assert '0 of 33 finished' in printed and 'to download' not in printed and not out.exists()
    options = settings(model=f'Mine={own}/model', data=f'{own}/alpaca.json')
    state = load_file(own / 'model' / 'model.safetensors')
    assert papers.own_table(options, 'model', {}) == {
        'Mine': (f'{own}/model', sum(x.numel() for x in state.values()))}
    assert papers.own_table(options, 'data', {}) == {'alpaca': (
        f'{own}/alpaca.json', (own / 'alpaca.json').stat().st_size / 5)}
    run = papers.Run(papers.EvalConfig(), 1, eval_tokens=5).changed([tasks])
    assert run.eval_tokens == pytest.approx(sum((own / path).stat().st_size for path in (
        'mmlu/test.jsonl', 'arc/ARC-Challenge-test.jsonl')) / 5)


def test_label_smoothing_on_your_own_model_smooths_at_every_rate(own, tmp_path):
    out, tasks = tmp_path / 'out', f'mmlu:{own}/mmlu,arc_easy:{own}/arc,arc_challenge:{own}/arc'
    arguments = [
        *own_arguments(own, out), *SMALL, *FAST, '--rates=all', f'--cache_dir={tmp_path}',
        f'--eval.tasks={tasks}',
        '--only=base,lr0.0002/lr,lr0.0002/smoothing0,lr0.0002/smoothing0.1,lr2e-05/lr,'
        'lr2e-05/smoothing0.5,lr2e-05/cap']
    printed = run_paper(tmp_path, 'label_smoothing', *arguments)
    assert f'changed settings: --model=Mine={own}/model --data=Chats={own}/alpaca.json' in printed
    rows = read_table(out, 'smoothing')
    assert [(row['model, data'], row['method']) for row in rows] == [
        ('Mine', 'base'), *(('Mine, Chats-lr2e-05', x) for x in ('cap 30', 'smoothing 0.5')),
        *(('Mine, Chats-lr0.0002', x) for x in (
            'smoothing 0', 'temperature scaling', 'platt scaling', 'smoothing 0.1'))]
    assert all(row[f'{task} ECE'] for row in rows for task in ('MMLU', 'ARC-Easy', 'ARC-Challenge'))
    assert not any('paper' in title or 'HellaSwag' in title for title in rows[0])
    folder = out / 'Mine' / 'Chats-lr0.0002'
    log, row = log_of(folder / 'lr0.0002')[-1], rows[3]
    assert row['held-out NLL (nats)'] == f'{log["val_nll"]:.3f}'
    assert row['held-out ECE'] == f'{log["val_ece"]:.3f}' and not rows[5]['held-out ECE']
    config = config_of(folder / 'smoothing0.1')
    assert '\nlr = 0.0002\n' in config and f"model = '{own}/model'" in config
    # nothing is done again, and another model in the same folder is refused
    assert '===' not in run_paper(tmp_path, 'label_smoothing', *arguments)
    assert f'error: {out} was begun with --model=Mine=' in run_paper(
        tmp_path, 'label_smoothing', f'--model={own}/model', *arguments[1:], code=1)


def test_multilingual_on_your_own_files_has_their_languages_and_no_printed_numbers(own, tmp_path):
    out = tmp_path / 'out'
    printed = run_paper(
        tmp_path, 'multilingual', *own_arguments(own, out), *SMALL, *FAST, '--figures=all',
        f'--cache_dir={tmp_path}', f'--eval.tasks=xcopa:{own}/xcopa,cmmlu:{own}/cmmlu')
    assert '\nxcopa, all languages together\n' in printed
    keys = [('base', ''), *(('Chats', s) for s in ('0.0', '0.1', '0.2'))]
    for name in ('xcopa', 'cmmlu'):
        rows = read_table(out, name)
        assert [(row['data'], row['smoothing']) for row in rows] == keys
        assert all(row['ECE'] for row in rows) and not any('paper' in title for title in rows[0])
        assert rows[2]['p ECE, questions'] and not rows[1]['p ECE, questions']
    assert {row['class'] for row in read_table(out, 'xcopa_classes') if row['ECE']} == {
        'low', 'other'}         # Joshi et al.'s class of Estonian is not in the script
    rows = read_table(out, 'xcopa_languages')
    assert [row['language'] for row in rows if row['ECE']] == 4 * ['et'] + 4 * ['sw']
    assert '## xcopa in sw by SFT' in (out / 'appendix.md').read_text()
    assert {path.stem for path in out.glob('*.png')} == {'xcopa-et', 'xcopa-sw', 'cmmlu'}


def test_alignment_of_your_own_model_by_epoch_and_then_by_dpo(own, tmp_path):
    out = tmp_path / 'out'
    printed = run_paper(
        tmp_path, 'alignment', *own_arguments(own, out), f'--pairs={own}/pairs.json', *FAST,
        f'--eval.tasks=clm:{own}/wiki', f'--cache_dir={tmp_path}', '--val_size=2',
        *(x for x in SMALL if not x.startswith(('--max_steps', '--val'))))
    assert 'Alignment of Mine, with instructions\n' in printed and 'LLaMA' not in printed
    (row,) = read_table(out, 'scales')
    assert row['model'] == 'Mine' and 'MMLU ECE' not in row
    rows = read_table(out, 'alignment')
    assert [row['model'] for row in rows] == ['base', *(
        f'{name}, epoch {i}' for name in ('Chats-full', 'Chats-lora', 'dpo') for i in (1, 2, 3))]
    assert all(row['causal language modeling ECE'] for row in rows)
    config = config_of(out / 'aligned' / 'dpo')
    assert f"model = '{out}/aligned/Chats-full'" in config and "method = 'dpo'" in config
    assert len({next_token_nll(out / 'aligned' / name)
                for name in ('Chats-full', 'dpo/report-1', 'dpo')}) == 3


@pytest.mark.parametrize('arguments, message', [
    ('--max_step=3', "there is no key 'max_step'; did you mean 'max_steps'?"),
    ('--plan --rate=all', 'there is no option --rate; did you mean --rates?'),
    ('--plan --only=zz', '--only=zz: no run has such a name; --plan lists them'),
    ('stray', "unexpected argument 'stray'"),
    ('--plan --model=', '--model is empty; wanted --model=[NAME=]FOLDER'),
    # the option, what is wrong
    ('--plan --model=Mine={own}/modle',
     ': there is no folder {own}/modle; wanted the folder of a model'),
    ('--plan --model={own}/mmlu', ': {own}/mmlu has no model.safetensors'),
    ('--plan --model=a/b={own}/model',
     ": 'a/b' cannot be its name in the results; name it as [NAME=]FO"),
    ('--plan --data={own}/alpaca.jsonl', ': no file or folder at {own}/alpaca.jsonl'),
    ('--plan --pairs={own}/pair.json', ': no file or folder at {own}/pair.json'),
    ('--plan --eval.tasks=mmlu:{own}/wiki',
     ': {own}/wiki holds nothing that matches all/test-*.parquet'),
    ('--plan --model={own}/model,{own}/model',
     "--model={own}/model: 'model' cannot be its name in the results; name it as")])
def test_bad_arguments_of_a_script_are_named_in_one_line(own, tmp_path, arguments, message):
    script = 'alignment' if '--pairs' in arguments else 'label_smoothing'
    *more, last = arguments.format(own=own).split()
    message = f'{last}{message}' if message.startswith(': ') else message
    printed = run_paper(tmp_path, script, f'--out_dir={tmp_path / "out"}', *more, last,
                        code=2 if last == '--model=' else 1)
    assert message.format(own=own) in printed and 'Traceback' not in printed
