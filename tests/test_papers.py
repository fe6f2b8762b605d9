"""The scripts of research/papers/ on small models and files, and what the papers print."""

import itertools
import re
import shutil
from types import SimpleNamespace

import metrics
import numpy as np
import pytest
import torch
from common import (HERE, SHARED, add_to_hub, by_transformers, cases_of, log_of, needs_files,
                    results_of, write_rows)
from data.benchmarks import BENCHMARKS
from data.tokenizer import load_tokenizer
from research.common import read_csv, read_lines
from research.papers import features, label_smoothing, multilingual, multilingual_printed
from results import report
from runtime import ownership
from runtime.errors import DataError
from scripts import run_scripts

FILES = HERE / 'tests' / 'paper_files'       # as the datasets are published
SMALL = ['--batch_size=4', '--max_length=256', '--pack_len=256', '--workers=1', '--device=cpu',
         '--dtype=float32', '--pictures=False', '--eval.n_bootstrap=0', '--eval.pictures=False',
         '--eval.pack_len=512']
SHORT = ['--val_size=2', '--max_steps=2']


def run_paper(hub, script, *arguments, code=0):
    """Run a script with the hub's cache in the folder `hub`; return what it prints."""
    done = run_scripts(1, f'research/papers/{script}.py', *arguments,
                       env={'HF_HUB_CACHE': str(hub)})
    printed = done.stdout + done.stderr
    assert done.returncode == code, printed
    return printed


def config_of(folder):
    return (folder / 'train_config.py').read_text()


def own_arguments(own, out):
    return [f'--model=Mine={own}/model', f'--data=Chats={own}/alpaca.json', f'--out_dir={out}']


def settings(**changed):
    """The options of a script, as its tables read them."""
    return SimpleNamespace(**{'out_dir': 'nowhere', 'changes': [], 'model': '', 'data': '',
                              'models': '', 'figures': '', 'rates': 'best'} | changed)


# The runs of each script

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


@pytest.mark.parametrize('arguments, message', cases_of('wrong_settings.toml')['paper'])
def test_a_wrong_option_is_named_in_one_line(own, tmp_path, arguments, message):
    printed = run_paper(tmp_path, 'label_smoothing', f'--out_dir={tmp_path / "out"}', '--plan',
                        arguments.format(own=own), code=1)
    assert message.format(own=own) in printed and 'Traceback' not in printed


def test_label_smoothing_smooths_at_the_chosen_rate_and_tabulates_its_reports(own, tmp_path):
    out, tasks = tmp_path / 'out', f'mmlu:{own}/mmlu,arc_easy:{own}/arc,arc_challenge:{own}/arc'
    arguments = [*own_arguments(own, out), *SMALL, *SHORT, f'--cache_dir={tmp_path}',
                 f'--eval.tasks={tasks}']
    planned = run_paper(tmp_path, 'label_smoothing', *arguments, '--plan', '--rates=all')
    assert re.findall(r'Mine/Chats-lr5e-05/(\S+)', planned) == ['lr5e-05', 'smoothing0', *(
        f'smoothing{s}' for s in (0.1, 0.2, 0.3, 0.4, 0.5)), 'cap30']
    assert '0 of 33 finished' in planned and 'to download' not in planned and not out.exists()
    assert 'smoothing0.1 waits for the 4 learning rates' in run_paper(
        tmp_path, 'label_smoothing', '--only=smoothing0.1', *arguments)
    arguments.append('--only=base,lr,smoothing0,smoothing0.3,cap')
    printed = run_paper(tmp_path, 'label_smoothing', *arguments)
    assert f'changed settings: --model=Mine={own}/model --data=Chats={own}/alpaca.json' in printed
    folder = out / 'Mine' / 'Chats'
    chosen = min(('5e-06', '2e-05', '5e-05', '0.0002'),
                 key=lambda lr: log_of(folder / f'lr{lr}')[-1]['val_nll'])
    smoothed, plain = config_of(folder / 'smoothing0.3'), results_of(folder / 'smoothing0')
    assert f'\nlr = {float(chosen)}\n' in smoothed and '\nsmoothing = 0.3\n' in smoothed
    assert plain['config']['model'] == str(folder / f'lr{chosen}')
    assert '\nlogit_softcap = 30.0\n' in config_of(folder / 'cap30')
    rows = read_csv(out / 'smoothing.csv')
    assert [(row['model, data'], row['method']) for row in rows] == [('Mine', 'base'), *(
        ('Mine, Chats', x) for x in ('smoothing 0', 'temperature scaling', 'platt scaling',
                                     'cap 30', 'smoothing 0.3'))]
    assert all(row[f'{task} ECE'] for row in rows for task in ('MMLU', 'ARC-Easy', 'ARC-Challenge'))
    assert rows[1]['MMLU ECE'] == f'{plain["tasks"]["mmlu"]["pooled"]["ece"]:.3f}'
    log = log_of(folder / f'lr{chosen}')[-1]
    assert rows[1]['held-out NLL (nats)'] == f'{log["val_nll"]:.3f}'
    assert not any('paper' in title or 'HellaSwag' in title for title in rows[0])
    tex = (out / 'smoothing.tex').read_text()
    assert (out / 'mmlu.png').exists() and '\\toprule' in tex and '\\textbf{0.' in tex
    # nothing is done again, and another model in the same folder is refused
    assert '===' not in run_paper(tmp_path, 'label_smoothing', *arguments)
    assert f'error: {out} was begun with --model=Mine=' in run_paper(
        tmp_path, 'label_smoothing', f'--model={own}/model', *arguments[1:], code=1)


def test_multilingual_has_the_languages_and_classes_of_its_files(own, tmp_path):
    out = tmp_path / 'out'
    tasks = f'--eval.tasks=xcopa:{own}/xcopa,cmmlu:{own}/cmmlu'
    printed = run_paper(tmp_path, 'multilingual', *own_arguments(own, out), *SMALL, *SHORT,
                        '--figures=all', f'--cache_dir={tmp_path}', tasks)
    assert '\nxcopa, all languages together\n' in printed
    keys = [('base', ''), *(('Chats', s) for s in ('0.0', '0.1', '0.2'))]
    for name in ('xcopa', 'cmmlu'):
        rows = read_csv(out / f'{name}.csv')
        assert [(row['data'], row['smoothing']) for row in rows] == keys
        assert all(row['ECE'] for row in rows) and not any('paper' in title for title in rows[0])
        assert 0 < float(rows[2]['p ECE, questions']) <= 1 and not rows[1]['p ECE, questions']
    assert {row['class'] for row in read_csv(out / 'xcopa_classes.csv') if row['ECE']} == {
        'low', 'other'}         # Joshi et al.'s class of Estonian is not in the script
    rows = read_csv(out / 'xcopa_languages.csv')
    assert [row['language'] for row in rows if row['ECE']] == 4 * ['et'] + 4 * ['sw']
    assert 'xcopa in sw by SFT' in (out / 'appendix.tex').read_text()
    assert {path.stem for path in out.glob('*.png')} == {'xcopa-et', 'xcopa-sw', 'cmmlu'}
    config = config_of(out / 'Mine' / 'Chats' / 'lr5e-06')
    assert '\nlora_rank = 64\n' in config and '\nlora_alpha = 16.0\n' in config
    cfg = results_of(out / 'Mine' / 'base')['config']
    assert cfg['shots'] == 0 and cfg['scoring'] == 'letters'


def test_alignment_evaluates_every_epoch_of_each_method_and_repeats_nothing(own, tmp_path):
    """Instruction tuning, a reward model, PPO, DPO, a checkpoint of another PPO."""
    out = tmp_path / 'out'
    # keys that align.py has no use for reach the other runs alone; Alpaca's prompt needs room
    arguments = [f'--cache_dir={tmp_path}', *SMALL, '--eval.limit=4', '--smoothing=0.1',
                 '--batch_size=5', '--val_size=2', '--max_length=512', '--pack_len=512',
                 f'--trex={own}/trex', f'--pairs={own}/pairs.json',
                 f'--comparisons={own}/comparison_data_v2.json', f'--rlhf=a/missing,{own}/model',
                 f'--eval.tasks=mmlu:{own}/mmlu,clm:{own}/wiki,facts:{own}/trex']
    own_model = own_arguments(own, out)
    printed = run_paper(tmp_path, 'alignment', '--only=aligned/ppo', *own_model, *arguments)
    assert 'aligned/ppo waits for Chats-full and reward' in printed
    # a model that is not there does not stop the others
    printed = run_paper(tmp_path, 'alignment', *own_model, *arguments, code=1)
    assert 'downloading the model a/missing from the hub failed' in printed
    assert printed.endswith('error: not done: aligned/rlhf/report-1; the messages are above\n')
    assert '4 rows left out: answers of equal score' in printed
    assert {path.stem for path in out.glob('*.png')} == {
        'figure3', 'figure3_curves', 'figure5', 'figure7', 'figure12'}

    (scales,), rows = (read_csv(out / f'{name}.csv') for name in ('scales', 'alignment'))
    assert {row['model'] for row in rows if row['facts generation ECE']} == {
        'base', 'rlhf, epoch 2', *(f'{name}, epoch {epoch}' for epoch in (1, 2, 3)
                                   for name in ('Chats-full', 'Chats-lora', 'ppo', 'dpo'))}
    # each epoch of PPO has other weights; the checkpoint of another PPO is the model itself
    losses = {name: results_of(out / 'aligned' / name)['tasks']['clm']['pooled']['nll']
              for name in ('base', 'Chats-full', 'ppo/report-1', 'ppo/report-2', 'ppo', 'dpo',
                           'rlhf/report-2')}
    assert len({*losses.values()}) == 6 and losses['base'] == losses['rlhf/report-2']
    # the ECE of MMLU with the letter's probability among all tokens
    samples = read_lines(out / 'Mine' / 'samples.jsonl')
    log_probs, answers = zip(*((s['log_probs'], s['answer']) for s in samples
                               if s['task'] == 'mmlu'), strict=True)
    top, right = np.exp(np.max(log_probs, 1)), np.argmax(log_probs, 1) == answers
    assert scales['MMLU ECE, unnormalized'] == f'{metrics.ece(top, right):.3f}'
    tuned = f"model = '{out}/aligned/Chats-full'"
    for name, *lines in (('ppo', tuned, f"reward = '{out}/aligned/reward'", 'smoothing = 0.0'),
                         ('dpo', tuned), ('Chats-full', 'smoothing = 0.1'),
                         ('Chats-lora', 'train_on_inputs = True')):
        assert {*lines} <= {*config_of(out / 'aligned' / name).splitlines()}

    # nothing is done again after a move; another checkpoint does not pass for the first
    moved = own_arguments(own, shutil.move(out, tmp_path / 'moved'))
    printed = run_paper(tmp_path, 'alignment', *moved, *arguments,
                        f'--rlhf=a/missing,{tmp_path}/moved/aligned/Chats-full', code=1)
    assert re.findall('=== (.*)', printed) == ['aligned/rlhf/report-1', 'aligned/rlhf/report-2']
    assert 'holds samples of another model' in printed


def test_know_tunes_on_written_answers_and_tabulates_each_p_ik(own, tmp_path):
    """From hub names to tables, with a small random Llama and questions of its own."""
    add_to_hub(tmp_path / 'hub', 'meta-llama/Llama-3.2-1B', own / 'model')
    for name in ('mandarjoshi/trivia_qa', 'openai/gsm8k'):
        add_to_hub(tmp_path / 'hub', name, FILES / name.split('/')[1], 'datasets')
    out = tmp_path / 'out'
    printed = run_paper(tmp_path / 'hub', 'know', '--only=Llama-3.2-1B', f'--out_dir={out}',
                        f'--cache_dir={tmp_path}', *SMALL, '--val_size=3', '--max_steps=2',
                        '--eval.n=3', '--eval.limit=10', '--eval.max_tokens=5', '--lr=0.02')
    assert printed.count('=== Llama-3.2-1B/') == 3 and 'waits for' not in printed
    rows = read_csv(out / 'p_ik.csv')
    assert [(row['task'], row['P(IK)'], row['questions']) for row in rows] == [
        (task, method, '5') for task in ('TriviaQA', 'GSM8K')
        for method in ('probe', 'asked, not tuned', 'tuned on TriviaQA')]
    assert rows[2]['AUROC, 52B (paper, its own settings)'] == '0.864'
    assert {row['accuracy'] for row in rows} == {'0.000'}     # a random model is always wrong
    assert float(rows[1]['confidence']) > 0.1 > float(rows[2]['confidence'])    # and learns that
    assert [row['confidence'] for row in read_csv(out / 'p_true.csv')]
    assert (out / 'reliability.png').exists() and (out / 'p_ik.png').exists()


@pytest.mark.parametrize('pooling', ['mean', 'last'])
def test_features_are_the_hidden_states_and_their_covariance(own, tmp_path, capsys, pooling):
    """Pooled without BOS and padding; the singular values by numpy's SVD."""
    model, reference = own / 'model', by_transformers(own / 'model')
    rows = [{'instruction': f'What is {i}?', 'output': f'It is {i * i}, ' + 'quick fox ' * (i % 7)}
            for i in range(90)]
    write_rows(tmp_path / 'a.json', rows)
    write_rows(tmp_path / 'b.json', [*rows[:70], {'output': 3}])
    _, first, second = features.run(features.FeatureConfig(
        models=(str(model),), data=tuple(f'{tmp_path}/{x}.json' for x in 'ab'), n=80,
        pooling=pooling, batch_tokens=200, device='cpu', out_dir=str(tmp_path / 'out')))
    assert 'b.json: 70 texts (1 bad rows left out' in capsys.readouterr().out
    tokenizer = load_tokenizer(model)
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


# What the papers print

def test_label_smoothing_shows_the_printed_numbers_that_its_file_holds(tmp_path, monkeypatch):
    paper, file = label_smoothing, tmp_path / 'printed.csv'
    head = 'benchmark,model,data,method,accuracy,ece,rms\n'
    assert paper.PRINTED_FILE.read_text() == head and paper.printed_numbers() == {}
    file.write_text(head + 'mmlu,Gemma2-2B,,base,50.1,,\n')
    with pytest.raises(DataError, match=f'{file}:2: accuracy must be a number from 0 to 1'):
        paper.printed_numbers(file)
    monkeypatch.setattr(paper, 'draw_lines', lambda *_: None)
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


def test_the_appendix_has_the_better_smoothing_bold_and_italic_if_significant(tmp_path):
    numbers = {'base': 0.02, '0.0': 0.3, '0.1': 0.1, '0.2': 0.05}
    reports = {(model, data, s): {} if data == 'instruct' else {
        'yo': dict.fromkeys(multilingual.PRINTED, numbers[s or data])}
        for (model, data, s), _ in multilingual.rows(settings())}
    with ownership.lock(tmp_path):
        multilingual.write_appendix(settings(out_dir=str(tmp_path), changes=['--lr=1']), {
            'global_mmlu': ('Global-MMLU', ['yo'], reports, {('Gemma2-2B', 'Tulu3', '0.1'): {
                'yo': {'ece': 0.049, 'accuracy': 0.051}}})})
    tex = (tmp_path / 'appendix.tex').read_text()
    assert ('Global-MMLU in yo by SFT dataset, model and smoothing; '
            r'changed settings: -{}-lr=1\par') in tex
    body = tex.partition('\\midrule\n')[2].partition('\\bottomrule')[0].splitlines()
    rows = [line.removesuffix(r' \\').split(' & ') for line in body]
    cells = {tuple(row[:3]): row[3:] for row in rows}
    assert len(cells) == 3 * (1 + 3 * 3)        # models: base, and data with three rates
    bold, italic = r'\textbf{0.100}', r'\textbf{\textit{0.100}}'
    assert cells['Tulu3', 'Gemma2-2B', '0.0'] == [r'\textbf{0.300}', '0.300', '0.300', '0.300']
    assert cells['Tulu3', 'Gemma2-2B', '0.1'] == ['0.100', '0.100', italic, bold]
    assert cells['Alpaca', 'Gemma2-2B', '0.1'] == ['0.100', '0.100', bold, bold]


def test_tables_of_a_few_languages_or_one_are_of_these_languages(tmp_path, monkeypatch):
    def tables(languages):
        return {name: lines for name, _, lines in multilingual.tables(
            settings(out_dir=str(tmp_path), changes=[f'--eval.languages={languages}']))}
    lines = tables('de,en,sw')
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
        lines = tables('yo')
    for name in ('global_mmlu_classes', 'global_mmlu_languages', 'mmlu_prox_languages'):
        assert [line[:5] for line in lines[name] if line[4] == '0.125'] == [
            ('low' if 'classes' in name else 'yo', 'Gemma2-2B', 'base', '', '0.125')]
    assert '0.125' in (tmp_path / 'appendix.tex').read_text()


@pytest.mark.slow
def test_the_printed_tables_count_where_the_claims_of_the_paper_hold(tmp_path):
    """Without a model. The counts and means were found separately, from the text of the paper."""
    out = tmp_path / 'out'
    printed = run_paper(tmp_path, 'multilingual', '--printed', f'--out_dir={out}')
    assert 'Printed: cells in which a claim holds' in printed
    assert 'unrecognized arguments' in run_paper(tmp_path, 'multilingual', '--printed', '--plan',
                                                 code=2)
    tables = {name: [[*row.values()] for row in read_csv(out / f'printed_{name}.csv')]
              for name in ('classes', 'claims', 'settings', 'checks')}
    means = {name: [cell.split()[0] for cell in cells] for name, _, *cells in tables['classes']}
    for task, column, expected in (
            ('Global-MMLU', 0, '+0.144 +0.140 +0.077'), ('Global-MMLU', 3, '-0.087 -0.090 -0.058'),
            ('MMLU-ProX', 0, '+0.041 +0.039 +0.030'), ('MMLU-ProX', 3, '-0.077 -0.077 -0.070'),
            ('MMLU-ProX', 4, '+0.013 +0.013 +0.008')):
        assert [means[f'{task}, {x}'][column] for x in ('high', 'mid', 'low')] == expected.split()
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
    rows = read_csv(HERE / 'research' / 'papers' / 'multilingual_printed.csv')
    assert len(rows) == 42 + 71 * 30
    data = [('base', ''), *itertools.product(('Alpaca', 'OpenHermes', 'Tulu3'),
                                             ('0.0', '0.1', '0.2'))]
    assert sorted(tuple(row.values())[:5] for row in rows if row['language'] != 'all') == sorted(
        (task, language, model, *setting)
        for task in ('global_mmlu', 'mmlu_prox') for language in BENCHMARKS[task].languages
        for model in ('Gemma2-2B', 'Mistral-7B', 'Llama-3.1-8B') for setting in data)
    needs_files('seeds')        # the text of the paper
    text = next(path.read_text() for path in (SHARED / 'seeds').iterdir()
                if path.read_text().startswith('Investigating the Multilingual'))
    tables = text[text.index('Table 2:'):text.index('Appendix D')]
    assert [row[key] for row in rows for key in ('accuracy', 'entropy_bits', 'ece', 'rms')
            ] == re.findall(r'(?<![\d.])\d\.\d{3}(?!\d)', tables)


# Questions that runs and languages share

def test_resampled_metrics_are_those_of_the_drawn_questions_in_every_language():
    random = np.random.default_rng(0)
    names, rows = [f'q{i:02}' for i in range(30)], np.arange(50)
    p = report.Predictions(random.dirichlet(np.ones(4), 50), random.integers(4, size=50))
    groups = {'en': (names, p.at(rows[:30])),
              'sw': (names[::-1][:20], p.at(rows[30:]))}      # another order, and fewer
    ids, values = multilingual.resample(groups, 5, seed=3)
    assert ids == names
    again = np.random.default_rng(3)
    for r in range(6):      # the first are the questions as they are
        drawn = [names[i] for i in again.integers(30, size=30)] if r else names
        parts = {}
        for language, (own, p) in groups.items():
            rows = [own.index(name) for name in drawn if name in own]
            parts[language] = p.probs[rows], p.labels[rows]
        parts['all'] = map(np.concatenate, zip(*parts.values()))
        for language, part in parts.items():
            expected = metrics.report(*part)
            for key, (value, resampled) in values[language].items():
                assert [value, *resampled][r] == pytest.approx(expected[key], abs=1e-12)
    # runs of other questions have no p
    other = multilingual.resample({'en': (['q', *names[1:]], groups['en'][1])}, 5)
    assert multilingual.p_values((ids, values), other) == {}
