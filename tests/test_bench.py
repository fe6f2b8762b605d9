"""bench/: every benchmark at a tiny size on the CPU."""

import json

import numpy as np
import pytest
import torch
from common import sentencepiece_folder, write_rows

import bench.eval
import bench.metrics
import bench.peers
import bench.train
from bench import common as bench_common
from configs import ConfigError

TINY = {'model_type': 'llama', 'vocab_size': 512, 'hidden_size': 32, 'intermediate_size': 64,
        'num_hidden_layers': 1, 'num_attention_heads': 2, 'num_key_value_heads': 1, 'head_dim': 16,
        'rms_norm_eps': 1e-5, 'rope_theta': 1e4, 'max_position_embeddings': 4096,
        'tie_word_embeddings': True}
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(),
                                  reason='compiles for minutes on a GPU')


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(bench.train, 'LENGTH', 48)
    for module in (bench.train, bench.eval, bench_common):
        monkeypatch.setitem(module.MODELS, 'llama32_1b', TINY)


@needs_no_gpu
@pytest.mark.parametrize('ours, options', [
    (True, {}), (True, {'master_weights': 'stochastic', 'checkpoint_activations': True}),
    (True, {'lora': True}), (False, {'attention': 'eager'}),
    (False, {'attention': 'sdpa', 'padded': 2}), (False, {'attention': 'sdpa', 'packed': 96})])
def test_steps_of_training(small, ours, options):
    torch.manual_seed(0)
    found = bench.train.measure(TINY, ours, None, options)
    assert found['tokens_per_s'] > 0 and found['new_graphs'] == 0 and found['compile_s'] >= 0


@needs_no_gpu
@pytest.mark.parametrize('options', [{'length': 48, 'rows': 4}, {'length': 96}])
def test_steps_of_trl(small, options):
    pytest.importorskip('trl')
    found = bench.train.measure(TINY, False, None,
                                {'trl': True, 'attention': 'sdpa'} | options)
    assert found['tokens_per_s'] > 0


@needs_no_gpu
def test_a_packed_peer_has_the_gradients_of_a_padded_one(monkeypatch):
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


@needs_no_gpu
def test_training_table_and_picture(small, tmp_path, monkeypatch, capsys):
    def measured(spec, warm):
        return ({'tokens_per_s': 1000, 'mfu': 0.5, 'peak_gib': 1.0, 'new_graphs': 0,
                 'compile_s': 3.0, 'spread': 0.01}
                if spec['ours'] else {'failed': 'ImportError: no liger'})
    monkeypatch.setattr(bench.train, 'measure_in_process', measured)
    path = tmp_path / 'bench_train.json'
    bench_common.save(path, bench.train.bench(bench.train.BenchConfig(shape=('llama32_1b',))))
    assert 'no liger' in capsys.readouterr().out
    bench.train.main([f'--plot={path}'])
    assert path.with_suffix('.png').read_bytes().startswith(b'\x89PNG')
    with pytest.raises(ConfigError, match='data and tokenizer go together'):
        bench.train.bench(bench.train.BenchConfig(data='x.jsonl'))
    with pytest.raises(ConfigError, match="'x' names no method; they are 'HF sdpa'"):
        bench.train.bench(bench.train.BenchConfig(only='x'))


@needs_no_gpu
def test_evaluation(small, tmp_path, monkeypatch, capsys):
    tokenizer = sentencepiece_folder(tmp_path / 'tokenizer', 'llama2')
    rows = [{'question': f'the quick fox {i}?', 'choices': ['blue', 'lazy', 'old', 'dog'],
             'answer': i % 4, 'subject': 'anatomy'} for i in range(20)]
    for split, part in (('dev', rows[:5]), ('test', rows[5:])):
        write_rows(tmp_path / 'mmlu' / f'{split}.jsonl', part)
    monkeypatch.setattr(bench.eval, 'matrix_rate', lambda: 1e12)
    monkeypatch.setattr(bench.eval, 'busy_share', lambda call: len(call()) and 1.0)
    tables = bench.eval.bench(bench.eval.BenchConfig(
        shape=('llama32_1b',), data=str(tmp_path / 'mmlu'), tokenizer=str(tokenizer), sample=8))
    ours, peer = tables[0]['results']['ours'], tables[0]['results']['Hugging Face']
    assert ours['questions_per_s'] > 0 and peer['questions_per_s'] > 0 and ours['tokens'] > 0
    path = tmp_path / 'bench_eval.json'
    bench_common.save(path, tables)
    bench.eval.main([f'--plot={path}'])
    assert path.with_suffix('.png').read_bytes().startswith(b'\x89PNG')


def test_metrics():
    found = bench.metrics.measure(500, 4)
    assert {'report', 'bootstrap, 1000 resamples', 'ECE, 10 bins', 'MMCE'} <= found.keys()
    assert all(np.isfinite(list(times.values())).all() for times in found.values())


@needs_no_gpu
@pytest.mark.parametrize('script', ['train', 'eval'])
def test_without_a_gpu_they_say_so(script):
    with pytest.raises(SystemExit, match=f'error: bench/{script}.py needs a CUDA device'):
        getattr(bench, script).main([])


def test_results_read_back(tmp_path):
    bench_common.save(tmp_path / 'out' / 'x.json', [{'n': 1}])
    content = bench_common.load(tmp_path / 'out' / 'x.json')
    assert content['tables'] == [{'n': 1}] and 'torch' in content['versions']
    assert json.loads((tmp_path / 'out' / 'x.json').read_text()) == content
