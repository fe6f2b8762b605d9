"""demo.py: its settings, what it leaves and prints, and that a second call only looks."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest

import demo
from common import HERE, log_of, results_of
from runtime.errors import ConfigError


def test_the_two_tuned_models_differ_in_base_smoothing_alone(tmp_path):
    runs = demo.runs(demo.DemoConfig(out_dir='place', base_smoothing=0.2, seed=3))
    assert list(runs) == ['base', 'tuned', 'tuned_bs02']
    tuned, smoothed = runs['tuned'], runs['tuned_bs02']
    assert (tuned.base_smoothing, tuned.model, tuned.seed) == (0.0, 'place/base', 3)
    assert smoothed == replace(tuned, base_smoothing=0.2, out_dir='place/tuned_bs02')
    assert runs['base'].out_dir == 'place/base' and runs['base'].seed == 3
    # nothing is read or written elsewhere
    assert 'out/' not in json.dumps([asdict(cfg) for cfg in runs.values()])
    # a bad setting of the last run stops the demo before the first
    with pytest.raises(ConfigError, match='base_smoothing = 2.0; it must be between 0 and 1'):
        demo.main(['--base_smoothing=2', f'--out_dir={tmp_path / "out"}'])
    assert not (tmp_path / 'out').exists()
    (tmp_path / 'base').mkdir()
    (tmp_path / 'base' / 'train_config.py').write_text('seed = 0\n')
    with pytest.raises(ConfigError, match='of a demo with --seed=0; .* --out_dir=.*-seed3'):
        demo.main(['--seed=3', f'--out_dir={tmp_path}'])


@pytest.mark.slow
def test_the_demo_leaves_a_report_and_the_files_of_three_runs(small_world):
    folder, printed = small_world
    header, _, *rows = printed.split('\nquestions (')[-1].split('\n')[1:6]
    assert header.split()[:3] == ['run', 'questions', 'accuracy']
    for row, run in zip(rows, ('base', 'tuned', 'tuned_bs05'), strict=True):
        pooled = results_of(folder / run)['tasks']['questions']['pooled']
        assert row.split()[:3] == [run, '40', f'{pooled["accuracy"]:.3f}']
        files = {str(p.relative_to(folder / run)) for p in (folder / run).rglob('*') if p.is_file()}
        assert {'config.json', 'model.safetensors', 'tokenizer.model', 'results.md', 'results.csv',
                'results.tex', 'train_config.py', 'samples.jsonl', 'reliability.png',
                'epoch-1/model.safetensors', 'epoch-1/README.md'} <= files
        log = log_of(folder / run)
        assert [r['step'] for r in log] == list(range(1, len(log) + 1))
        assert all(r['nll'] <= r['loss'] + 1e-6 or run == 'tuned_bs05' for r in log)
        assert 'val_nll' in log[-1] and not list((folder / run).rglob('*.nanocal-tmp'))
        assert run != 'base' or log[-1]['nll'] < 0.8 * log[0]['nll']
    for words in ('{{Answer: ', 'supervised tokens between', 'peak memory'):
        assert words in printed, words
    assert (folder / 'reliability-questions.png').read_bytes().startswith(b'\x89PNG')


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(small_world, tmp_path, monkeypatch, capsys):
    """On finished runs: training itself is the same call as in demo.py."""
    folder = shutil.copytree(small_world[0], tmp_path / 'demo')
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(HERE)
    monkeypatch.setattr(demo, 'make_world', lambda place, seed: None)
    monkeypatch.setattr(demo, 'train_and_report',
                        lambda cfg: {'after': results_of(Path(cfg.out_dir))})
    notebook = (HERE / 'docs' / 'demo.ipynb').read_text()
    cells = json.loads(notebook.replace("'out/demo'", f"'{folder}'").replace(
        'Path.cwd(), *Path.cwd().parents', f"Path('{HERE}'),"))['cells']
    names = {}
    for cell in cells:
        if cell['cell_type'] == 'code':
            assert not cell['outputs']
            exec(''.join(cell['source']), names)
    printed = capsys.readouterr().out
    assert 'tuned_bs05' in printed and printed.splitlines()[-1].startswith('T = ')
    assert names['temperature'] > 0


def test_a_second_call_trains_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, 'print_report', lambda reports, out_dir: None)
    seen = []

    def finished(cfg):
        seen.append(cfg)
        pooled = {'accuracy': 0.5 + len(seen) / 10, 'ece': len(seen) / 10}
        return {'after': {'tasks': {'questions': {'pooled': pooled}}}}
    monkeypatch.setattr(demo, 'make_world', lambda place, seed: None)
    monkeypatch.setattr(demo, 'train_and_report', finished)
    monkeypatch.setattr(demo, 'pick_threads', lambda: 1)
    monkeypatch.setenv('HOME', str(tmp_path.parent))
    demo.main([f'--out_dir=~/{tmp_path.name}'])
    assert {Path(cfg.out_dir).parent for cfg in seen} == {tmp_path}
    assert len(seen) == 3 and all(cfg.resume and not cfg.overwrite for cfg in seen)
    printed = capsys.readouterr().out       # what is seen, and where to look next
    assert ('from 0.600 to 0.700 and the ECE, the distance between confidence and accuracy, from '
            '0.100 to 0.200; with --base_smoothing=0.5 they are 0.800 and 0.300. Open ') in (
                ' '.join(printed.split()))
    assert f'--compare {tmp_path}/tuned {tmp_path}/tuned_bs05\n' in printed
