"""research/bench/: every benchmark at a tiny size on the CPU."""

import importlib.util
import re
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed.run
import fused_ce
from research.bench import common as bench_common
from common import HERE, reference_model, write_rows
from model import CausalLM
from runtime.config_json import config_from_hf
from scripts import run_scripts

bench = SimpleNamespace(**{name: importlib.import_module(f'research.bench.{name}') for name in (
    'align', 'all', 'commands', 'cpu', 'eval', 'floors', 'generate', 'grpo', 'gsm8k_answers',
    'loss', 'metrics', 'optimizers', 'peers', 'several_gpus', 'sft', 'train')})
TINY = {'model_type': 'llama', 'vocab_size': 512, 'hidden_size': 32, 'intermediate_size': 64,
        'num_hidden_layers': 1, 'num_attention_heads': 2, 'num_key_value_heads': 1, 'head_dim': 16,
        'rms_norm_eps': 1e-5, 'rope_theta': 1e4, 'max_position_embeddings': 4096,
        'tie_word_embeddings': True}


def first_table(name, **settings):
    """Run a benchmark with these settings; return its first table."""
    script = getattr(bench, name)
    table, *_ = script.bench(script.BenchConfig(**settings))
    return table


def run_command(command):
    """`run_command` of the benchmarks, by a process that need not load torch."""
    started = time.perf_counter()
    module = command[:2] == ['-m', 'torch.distributed.run']
    done = run_scripts(1, *[torch.distributed.run.__file__] * module, *command[2 * module:])
    assert done.returncode == 0, done.stderr
    return [time.perf_counter() - started], done.stdout


@pytest.fixture
def small(monkeypatch):
    """Makes a benchmark a slow test at a tiny size, without a GPU; see conftest.py."""
    if torch.cuda.is_available():
        pytest.skip('compiles for minutes on a GPU')
    monkeypatch.setattr(bench.train, 'LENGTH', 48)
    # compiling all modules takes 40 seconds
    for module in (bench_common, bench.sft):
        monkeypatch.setattr(module, 'byte_code', dict)
    for module in (bench.generate, bench.gsm8k_answers, bench.several_gpus):
        monkeypatch.setattr(module, 'run_command', run_command)
    monkeypatch.setitem(bench_common.MODELS, 'llama32_1b', TINY)


@pytest.mark.parametrize('ours, options', [
    (True, {'master_weights': 'stochastic', 'checkpoint_activations': True}),
    (False, {'attention': 'sdpa', 'packed': 96}),
    (False, {'trl': True, 'attention': 'sdpa', 'length': 96})])
def test_training_steps_are_timed_without_late_graphs(small, ours, options):
    if 'trl' in options:
        pytest.importorskip('trl')
    torch.manual_seed(0)
    found = bench.train.measure(TINY, ours, None, options)
    assert found['tokens_per_s'] > 0 and found['new_graphs'] == 0 and found['compile_s'] >= 0


def test_optimizers_are_at_their_distances_from_float64(small):
    table = first_table('optimizers', spreads=(0.0,), rows=2, steps=30, ours=True)
    exact, compact, stochastic = (row['noise'] for row in table['results'].values())
    assert exact < 0.01 < compact < stochastic / 10


def test_steps_on_a_cpu_are_timed_beside_a_plain_loop(small, tmp_path):
    reference_model('llama', tmp_path)
    table = first_table('cpu', models=(str(tmp_path),), rows=2, length=16, steps=1)
    assert len(table['results']) == 4
    assert all(row['seconds'] > 0 and row['peak_gib'] > 0 for row in table['results'].values())
    assert 'ratio' in bench.cpu.view(table)[1][0]


def test_a_packed_peer_has_the_gradients_of_a_padded_one(small):
    rng = np.random.default_rng(0)
    batch = [(rng.integers(3, 500, n), np.arange(n) > 3) for n in (40, 17, 9, 30)]
    found = {}
    for kind in ('padded', 'packed'):
        torch.manual_seed(0)
        step = bench.peers.hugging_face_step(TINY, 'sdpa', **{kind: 64})
        model = step.model.float()
        for inputs in getattr(bench.peers, f'{kind}_inputs')(batch, 64):
            model(**inputs).loss.backward()
        found[kind] = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(found['packed'], found['padded'], rtol=1e-4, atol=1e-6)
    assert found['packed'].norm() > 0.01


def test_a_missing_peer_or_our_lack_of_memory_is_a_row_and_our_other_errors_stop(monkeypatch):
    def measure(ours, error):
        monkeypatch.setattr(bench_common.subprocess, 'run', lambda *_, **__: SimpleNamespace(
            returncode=1, stderr=f'Traceback\n{error}\n'))
        name = 'ours' if ours else 'TRL'
        return bench_common.measure_methods('train.py', '', {name: {}}, warm=True)[name]

    memory = 'torch.OutOfMemoryError: CUDA out of memory.'
    for ours, error in ((True, memory), (False, memory), (False, 'ImportError: no liger')):
        assert measure(ours, error) == {'failed': error}
    with pytest.raises(RuntimeError, match='ValueError: x'):
        measure(True, 'ValueError: x')
    def fail(text):
        raise ImportError(text)

    for text, first_line in (('', ''), ('no liger\nin line 3', 'no liger')):
        assert bench_common.attempt(fail, text) == {'failed': f'ImportError: {first_line}'}
    table = {'shape': 'x', 'data': 'y', 'results': {'ours': {'failed': memory}}}
    assert bench.all.timings('train', {'tables': [table]}) == {}


def test_decoding_is_timed_beside_transformers_and_as_a_command(small, own, monkeypatch):
    monkeypatch.setattr(bench.generate, 'SETTINGS', ((1, 6, 9), (4, 8, 8)))
    table = first_table('generate', shape=('llama32_1b',), rows=(1, 4),
                        prompts=f'{own}/gsm8k/test.jsonl', tokenizer=f'{own}/model')
    for setting in ('1 x 6 + 9', '4 x 8 + 8'):
        ours, peer = (table['results'][setting][name] for name in ('ours', 'transformers'))
        assert ours['tokens_per_s'] > 0 and peer['tokens_per_s'] > 0
        assert 0 < ours['of_limit'] < 1 and ours['steps_tokens_per_s'] > 0
    whole = table['command']
    assert whole['prompts'] == 5 and 0 < whole['first_s'] <= whole['seconds']
    assert 5 * 8 <= whole['tokens'] <= 5 * 8 * 256
    # 2 bytes for each weight, the tied embedding once, and for keys and values of 17 tokens
    model = bench_common.our_model(TINY)
    weights = sum(p.numel() for p in CausalLM(config_from_hf(TINY)).parameters())
    assert bench.generate.step_cost(model, 4, 17) == ((weights + 2 * 16 * 17) * 2, 2 * weights * 4)


def test_written_answers_are_timed(small, own):
    table = first_table('gsm8k_answers', data=f'{own}/gsm8k', tokenizer=f'{own}/model', n=2,
                        max_tokens=5, ours=True)
    whole, alone = table['results'].values()
    assert whole['answers'] == alone['answers'] == 5 * 3 and 15 <= whole['tokens'] <= 75
    assert 0 < alone['seconds'] < whole['seconds']


def test_several_gpus(small, own, monkeypatch):
    monkeypatch.setenv('OMP_NUM_THREADS', '1')      # torchrun sets this, on which products depend
    names = '1 GPU, deterministic', '2 GPUs, deterministic, shared weights'
    table = first_table('several_gpus', data=f'{own}/mmlu', tokenizer=f'{own}/model',
                        languages=2, limit=5, only='|'.join(names))
    assert [(name, row['same']) for name, row in table['results'].items()] == [
        *zip(names, (None, True))]
    assert all(0 < row['before_s'] < row['seconds'] for row in table['results'].values())


@pytest.mark.parametrize('ours', [True, False])
def test_steps_of_dpo_and_of_grpo_are_timed(small, ours, own, tmp_path, monkeypatch):
    if not ours:
        pytest.importorskip('trl')
    tokenizer = f'{own}/model'
    for module, name, value in (
            (bench.align, 'STEPS', 1), (bench.grpo, 'PROMPTS', 2), (bench.grpo, 'ANSWERS', 2),
            (bench.grpo, 'TOKENS', 6), (bench.grpo, 'STEPS', 1)):
        monkeypatch.setattr(module, name, value)
    row = bench.align.measure(TINY, ours, ours, f'{own}/pairs.json', tokenizer, 4,
                              {} if ours else {'size': 2})
    assert row['tokens_per_s'] > 0 and row['reference_s'] >= 0
    bench.grpo.prepare('llama32_1b', bench.grpo.BenchConfig(
        tokenizer=tokenizer, prompts=f'{own}/gsm8k/train.jsonl'), tmp_path)
    row = bench.grpo.measure(str(tmp_path), ours, {'micro_rows' if ours else 'size': 2})
    assert min(row['rollout_s'], row['update_s'], row['step_s'], row['first_s']) >= 0


def test_evaluation_is_timed_beside_a_loop(small, own, monkeypatch):
    monkeypatch.setattr(bench.eval, 'busy_share', lambda call: len(call()) and 1.0)
    table = first_table('eval', shape=('llama32_1b',), data=f'{own}/mmlu',
                        tokenizer=f'{own}/model', sample=8)
    ours, peer = table['results']['ours'], table['results']['Hugging Face']
    assert ours['questions_per_s'] > 0 and peer['questions_per_s'] > 0 and ours['tokens'] > 0


@pytest.mark.slow
@pytest.mark.parametrize('name', [*bench.all.SCRIPTS])
def test_the_picture_of_each_script_is_drawn_from_its_file(name, tmp_path):
    kept = bench.all.result_files(HERE / 'research' / 'bench' / 'results', name)
    script = bench.all.script_of(name)
    if kept and script.plot:
        path = Path(shutil.copy(kept[0], tmp_path))
        script.main([f'--plot={path}'])
        assert path.with_suffix('.png').read_bytes().startswith(b'\x89PNG')


def test_each_kernel_belongs_to_one_item_of_a_step():
    kernels = {'triton_poi_fused_add_sqrt_3': 'AdamW', '_gradient_kernel': 'loss',
               'nvjet_sm90_tst_128x256': 'products', 'Memcpy HtoD (Pinned -> Device)': 'other',
               'triton_tem_fused_flex_attention_0': 'attention forward',
               'triton_tem_fused_flex_attention_backward_7': 'attention backward',
               'cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma': 'attention backward',
               'triton_poi_fused_cat_flex_attention_mul_2': 'elementwise',
               'void at::native::multi_tensor_apply_kernel<LpNormFunctor>': 'gradient norm'}
    for kernel, item in kernels.items():
        assert bench.floors.item_of(kernel, {'triton_poi_fused_add_sqrt_3'}) == item
    assert {'_row_sums_kernel', '_gradient_kernel'} <= bench.floors.LOSS or fused_ce.triton is None


@pytest.mark.parametrize('name', ['llama32_1b', 'gemma2_2b'])
def test_floors_count_what_the_model_has(name):
    raw = bench_common.MODELS[name]
    with torch.device('meta'):
        weights = sum(p.numel() for p in CausalLM(config_from_hf(raw)).parameters())
    found = bench.floors.floors(raw, 'exact', 4, 2048, {'matrix': 1e12, 'memory': 1e12})
    assert found['AdamW'][1] == 26 * weights and found['gradient norm'][1] == 2 * weights
    batch = [(np.zeros(2048), np.ones(2048))] * 4
    flops = found['products'][1] + 3 * found['attention forward'][1]     # mfu counts no repeat
    assert flops == pytest.approx(8192 * bench.train.flops_per_token(raw, [batch]))


def test_items_of_a_step_have_times_and_floors(small, monkeypatch):
    kernels = [('nvjet_1', 0, 2000), ('triton_tem_fused_flex_attention_0', 1000, 4000)]
    profiles = iter([[('triton_poi_fused_update', 0, 1)], kernels])
    monkeypatch.setattr(bench.floors, 'gpu_kernels', lambda call: (call(), next(profiles))[1])
    table = first_table('floors', shape=('llama32_1b',))
    items = table['items']
    assert items['products'] == pytest.approx(2 / 3) and items['attention forward'] == 1
    assert items['idle'] == pytest.approx(table['ms'] - 4 / 3)


def test_the_page_of_the_kept_results_is_of_their_files():
    """It has rows of methods that failed, and scripts that were run more than once."""
    folder = HERE / 'research' / 'bench' / 'results'
    assert bench.all.page(folder) == (folder / 'README.md').read_text(encoding='utf-8')


def test_the_speeds_in_readme_are_those_of_the_kept_results():
    """Ratios, which the page need not show, are followed by 'times'."""
    def numbers(text):
        return re.findall(r'(?<![\w.,])\d[\d,]*(?:\.\d+)?(?!\w|[.,]\d)(?! times)', text)

    readme = (HERE / 'README.md').read_text(encoding='utf-8')
    speeds = readme.partition('## Speed\n')[2].partition('\n## ')[0]
    page = (HERE / 'research' / 'bench' / 'results' / 'README.md').read_text(encoding='utf-8')
    measured = [float(x.replace(',', '')) for x in numbers(page)]
    checked = [x for x in numbers(speeds) if ',' in x or '.' in x]
    assert len(checked) > 4
    for x in checked:
        digits = len(x.partition('.')[2])
        assert any(abs(float(x.replace(',', '')) - y) <= 0.5001 * 10 ** -digits
                   for y in measured), x


@pytest.mark.parametrize('runs, code, lines', [
    ([{'step': s, 'same': 1.0} for s in (1.0, 2.0, 1.02, 2.1)], 1, '| 2.030 | 5.0% | slower |'),
    ([{'step': 1.0}] * 4, 0, 'slower or missing: nothing'),
    ([{'step': 1.0}, {'other': 1.0}] * 2, 1,        # the new commit has another row
     '| step |  |  |  |  | missing |\n| other |  |  |  |  | added |\n\nslower or missing: step\n'),
    ([{'step': 1.0}] * 3 + [{}], 1, '| step |  |  |  |  | missing |')])     # one run has no memory
def test_two_commits_are_compared(tmp_path, monkeypatch, capsys, runs, code, lines):
    left = iter(runs)
    monkeypatch.setattr(bench.all, 'measure_ours', lambda *_: next(left))
    assert bench.all.main(['--compare', *[str(tmp_path)] * 2, '--only=metrics']) == code
    assert lines in capsys.readouterr().out


def test_one_command_writes_one_page(small, tmp_path, monkeypatch, capsys):
    def run_script(arguments):
        try:
            getattr(bench, Path(arguments[0]).stem).script.main(arguments[1:])
        except SystemExit as error:
            print(error)
            return 1

    monkeypatch.setattr(bench.all, 'run_script', run_script)
    measure = bench.metrics.measure
    monkeypatch.setattr(bench.metrics, 'measure', lambda n, k, peers: measure(500, k, peers))
    argv = [f'--out={tmp_path}', '--shape=llama32_1b']
    # a script that fails is named, one without its files left out
    assert bench.all.main(['--only=commands,generate,metrics', *argv]) == 1
    printed = capsys.readouterr()
    assert 'research/bench/commands.py needs --data and --tokenizer; left out' in printed.out
    assert 'failed: generate' in printed.err
    assert (tmp_path / 'README.md').read_text().count('### 14042 x 4') == 1


def test_fine_tuning_commands_are_timed_by_stage(small, own, tmp_path):
    """Also TRL's, if it is installed."""
    talks = write_rows(tmp_path / 'talks.jsonl', [
        {'instruction': f'the fox {i}?', 'output': 'the lazy dog ' * (i % 5 + 1)}
        for i in range(300)])
    table = first_table('sft', only='ours|TRL', caches=('cold',), tuning=('LoRA',),
                        data=str(talks), tokenizer=f'{own}/model',
                        conversations=280)
    assert table['conversations'] == 280 and table['rows'] == 1
    row, peer = table['results']['ours, LoRA'], table['results']['TRL, LoRA']
    assert row['steps'] == 2 and sum(row['cold'][stage] for stage in bench.sft.STAGES) > 0
    assert row['cold']['until the end'] == pytest.approx(
        sum(seconds for stage, seconds in row['cold'].items() if stage != 'until the end'), abs=0.1)
    if importlib.util.find_spec('trl'):
        assert peer['cold'].keys() == row['cold'].keys() and peer['steps'] > 0
    else:
        assert "No module named 'trl'" in peer['failed'] or "'datasets'" in peer['failed']


def test_whole_commands_are_timed_and_get_the_same_questions(tmp_path, small, own):
    config = bench.commands.BenchConfig(data=f'{own}/mmlu', ours=True, caches=('warm',))
    bench.commands.write_tasks(config, tmp_path)
    assert (tmp_path / 'few.jsonl').read_text().count('\n') == 8
    commands = bench.commands.commands(config, tmp_path)
    helped = bench.commands.run(bench.commands.HELP, commands[bench.commands.HELP], config,
                                tmp_path)
    assert 0 < helped['warm'][0] < 30 and 'cold' not in helped
    peer = bench.commands.run(bench.commands.LM_EVAL, ['-c', 'import nothing'], config, tmp_path)
    assert peer == {'failed': "ModuleNotFoundError: No module named 'nothing'"}
