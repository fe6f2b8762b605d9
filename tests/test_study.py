"""The study: its runs, its worlds and figures, a small one from end to end, and its probe."""

import contextlib
import csv
import hashlib
import io
import json
import math
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from common import HERE, write_run

import compare
import metrics
import model as models
import scaling
from configs import ConfigError
from data.world import WorldSpec, make_world
from report import predictions, read_samples
from study import (
    architectures,
    base,
    common,
    effects,
    epochs,
    figures,
    homogeneous,
    lora,
    reach,
    size,
    smoothing,
    vocabulary,
)
from train import TrainConfig

SCRIPTS = architectures, base, epochs, homogeneous, lora, size, smoothing, vocabulary
# settings that the trainer has got since the study was run; their defaults are what it did then
ADDED = {'loss', 'logit_softcap', 'logit_temperature', 'answers', 'data_limit', 'warmup_steps'}


def digest(config):
    settings = {key: value for key, value in asdict(config).items() if key not in ADDED}
    if settings.get('eval'):    # added to the report since
        added = {key: settings['eval'].pop(key) for key in ('p_true', 'chat', 'passes')}
        assert added == {'p_true': False, 'chat': 'none', 'passes': 0}
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


def test_every_run_has_the_settings_it_was_made_with():
    """study/runs.csv is of the 685 runs behind the committed numbers."""
    with open(HERE / 'study' / 'runs.csv') as file:
        expected = {row['out_dir']: row['digest'] for row in csv.DictReader(file)}
    cfgs = [cfg for script in SCRIPTS for seed in common.SEEDS for cfg in script.runs(seed)]
    assert len(cfgs) == 685
    assert {cfg.out_dir: digest(cfg) for cfg in cfgs} == expected
    default = TrainConfig()
    assert all(getattr(cfg, key) == getattr(default, key) for cfg in cfgs for key in ADDED)


def test_the_worlds_are_those_the_study_was_made_with():
    assert digest(base.WORLD) == 'cfd7d081df24' and digest(vocabulary.WORLD) == '330c93bde51c'


@pytest.mark.parametrize('figure', figures.FIGURES)
def test_a_figure_follows_from_its_committed_numbers(figure, tmp_path, monkeypatch):
    committed = HERE / 'study' / 'results' / figure
    drawn = []
    monkeypatch.setattr(compare, 'draw_series', lambda path, *rest, **more: drawn.append(path))
    monkeypatch.setattr(figures, 'draw_bins', lambda path, *rest, **more: drawn.append(path))
    figures.draw(figure, tmp_path)
    tables = {path.name for path in committed.glob('*.csv')} | {'compare.md'}
    for name in tables:
        assert (tmp_path / name).read_bytes() == (committed / name).read_bytes(), name
    assert {path.name for path in drawn} == {path.name for path in committed.glob('*.png')}


def test_the_tables_of_claims_3_and_4_follow_from_the_committed_numbers(tmp_path, monkeypatch):
    for name in {figure for figure, _ in effects.TASKS.values()} | {'size', 'size_all'}:
        (tmp_path / name).symlink_to(HERE / 'study' / 'results' / name)
    monkeypatch.setattr(effects, 'RESULTS', tmp_path)
    effects.main()
    assert ((tmp_path / 'effects.md').read_text()
            == (HERE / 'study' / 'results' / 'effects.md').read_text())


def test_trends_are_least_squares_slopes():
    effect = np.random.default_rng(0).normal(size=(3, 4, 5))
    for axis, values in ((1, effects.ROWS), (0, effects.SIZES)):
        fits = np.polyfit(np.log2(values), effect.mean(1 - axis), 1)[0]
        width = np.log2(values[-1] / values[0])
        assert effects.slope(effect, axis, values) == pytest.approx(width * fits)


def small_runs(runs, **settings):
    """A function like a script's runs(), with fewer steps and rows."""
    def small(seed, root):
        for cfg in runs(seed, root):
            yield replace(cfg, workers=1, **settings, eval=replace(cfg.eval, pack_len=512))
    return small


@pytest.fixture(scope='module')
def small_study(tmp_path_factory):
    """The base model and two models tuned from it, of two seeds; the folder of the study."""
    root = tmp_path_factory.mktemp('study')
    world = WorldSpec(**asdict(base.WORLD) | dict(
        entities=500, unseen=20, first_names=40, family_names=40, documents=300,
        tokenizer_documents=300, vocab_sizes=(700,), instructions=80, questions=12,
        unseen_questions=6, validation=12, probes=10))

    def prepare(seed, root):
        make_world(f'{common.seed_folder("base", seed, root)}/world', seed, world)
    shape = base.llama(32, 64, 1, 2)
    common.train_all(small_runs(base.runs, batch_size=64, micro_rows=4, shape=shape), [0, 1],
                     ('base',), root, prepare, lambda cfg: reach.probe(cfg.out_dir, cfg.seed))
    common.train_all(small_runs(smoothing.runs, epochs=1.0), [0, 1], SMALL, root)
    return root


SMALL = 'tuned-smoothing0.0-lr0.0008', 'tuned-smoothing0.1-lr0.0008'


def test_a_small_study(small_study, tmp_path, capsys):
    figures.draw('headline', tmp_path / 'headline', small_study)
    assert {'compare.png', 'compare.csv', 'bins.csv', 'reliability.png'} <= {
        path.name for path in (tmp_path / 'headline').iterdir()}
    figures.draw('temperature', tmp_path / 'temperature', small_study)
    with open(tmp_path / 'temperature' / 'compare.csv') as file:
        lines = list(csv.DictReader(file))
    assert {line['scaling'] for line in lines} == {'none', 'temperature'}
    assert {line['language'] for line in lines} == {'en', 'l1', 'l2', 'l3'}
    line = next(r for r in lines if (r['kind'], r['seed'], r['language'], r['category'],
                                     r['scaling']) == ('base', '1', 'l2', 'seen', 'temperature'))
    samples = [s for s in read_samples(small_study / 'base' / 'seed-1' / 'base' / 'samples.jsonl')
               if s['task'] == 'text4']
    held = predictions([s for s in samples if s['split'] == 'validation'], 'token')
    assert len(held.labels) == 12
    scored = predictions([s for s in samples if s['split'] == 'test'
                          and (s['language'], s['category']) == ('l2', 'seen')], 'token')
    temperature = scaling.fit_temperature(held.scores, held.labels)
    assert float(line['temperature']) == pytest.approx(temperature, rel=1e-4)
    assert float(line['ece']) == pytest.approx(
        metrics.ece(metrics.softmax(scored.scores, temperature), scored.labels), rel=1e-4)


def test_reliability_over_seeds(tmp_path):
    """The bins of two runs together are those of their questions together."""
    runs = [compare.read_run(write_run(tmp_path / f'seed-{seed}', seed=seed)) for seed in (0, 1)]
    together = figures.pool_bins(list(figures.bins_of(runs).values()))
    rows = [predictions(read_samples(run.folder / 'samples.jsonl'), 'token') for run in runs]
    expected = metrics.bins(*(np.concatenate([getattr(p, key) for p in rows])
                              for key in ('probs', 'labels')))
    assert together['count'].sum() == 80
    for key in ('low', 'high', 'count'):
        assert np.allclose(together[key], expected[key], equal_nan=True)


def test_what_is_finished_is_skipped(small_study, capsys):
    files = sorted(path for path in small_study.rglob('*') if path.is_file())
    before = {path: path.stat().st_mtime_ns for path in files if path.name != '.lock'}
    common.train_all(small_runs(smoothing.runs, epochs=1.0), [0], SMALL, small_study)
    assert all(path.stat().st_mtime_ns == before[path] for path in before)
    assert 'step 1' not in capsys.readouterr().out


def test_a_script_ends_in_a_table_over_its_seeds(small_study, capsys, monkeypatch):
    monkeypatch.setattr(compare, 'draw_series', lambda path, *rest: path.write_bytes(b'png'))
    monkeypatch.setattr('sys.argv', ['smoothing.py', '--seeds=1', f'--only={SMALL[0]}',
                                     f'--out_dir={small_study}'])
    monkeypatch.setattr('__main__.__doc__', smoothing.__doc__)
    common.main(small_runs(smoothing.runs, epochs=1.0))
    folder = small_study / 'smoothing'
    printed, table = capsys.readouterr().out, (folder / 'compare.md').read_text().splitlines()
    assert table[0].startswith('| task | smoothing | seeds | ECE |') and 'text4' in printed
    assert [row.split(' | ')[1:3] for row in table[2:4]] == [['0.0', '2'], ['0.1', '2']]
    assert {'compare.csv', 'compare.tex', 'compare.png', 'compare.md', 'written.json'} == {
        path.name for path in folder.iterdir() if path.is_file()}
    common.main(small_runs(smoothing.runs, epochs=1.0))
    assert (folder / 'compare.md').read_text().splitlines() == table
    (folder / 'written.json').unlink()      # then they are somebody's
    with pytest.raises(SystemExit, match='compare.csv was not written by this program'):
        common.main(small_runs(smoothing.runs, epochs=1.0))


def test_a_name_that_no_run_has():
    with pytest.raises(ConfigError, match='--only=lora: no run has such a name; there are tuned-'):
        common.train_all(smoothing.runs, only=('lora',))


def test_the_probe_is_a_column_of_the_figures(small_study):
    folder = small_study / 'base' / 'seed-1' / 'base'
    found = json.loads((folder / 'reach.json').read_text())
    assert 0 < found['lowest_bits'] <= found['highest_bits'] <= found['log2_vocab']
    run = compare.read_run(folder)
    with contextlib.redirect_stdout(io.StringIO()):
        lines = compare.run_lines(run)
    assert {line['reach_lowest_bits'] for line in lines} == {float(f'{found["lowest_bits"]:.5g}')}
    assert {line['unused_rows'] for line in lines} == {'0'}


def test_reachable_entropy():
    config = models.ModelConfig(model_type='llama', vocab_size=8, hidden_size=8,
                                intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
                                num_key_value_heads=2, head_dim=4, tie_word_embeddings=False)
    model = models.CausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.copy_(2 * torch.eye(8))
    found = reach.reachable_entropy(model, 8, n_tokens=8)
    # the surest state puts all of its length sqrt(8) into one direction, or a little against the
    # others: logits a for one and b for the others, a^2 + 7 b^2 = 4 * 8
    a = np.linspace(0, 32 ** 0.5, 100_001)
    gap = (a + np.sqrt(np.maximum(32 - a ** 2, 0) / 7)).max()
    p = 1 / (1 + 7 * math.exp(-gap))
    entropy = -p * math.log2(p) - (1 - p) * math.log2((1 - p) / 7)
    assert found['lowest_bits'] == pytest.approx(entropy, abs=1e-3)
    assert found['lowest_nll_bits'] == pytest.approx(-math.log2(p), abs=1e-3)
    assert found['highest_bits'] == pytest.approx(3, abs=1e-3) and found['log2_vocab'] == 3
    model.config.final_logit_softcapping = 1.0
    capped = reach.reachable_entropy(model, 8, n_tokens=8)['lowest_bits']
    p = 1 / (1 + 7 * math.exp(-2))      # at best logits of 1 and -1
    floor = -p * math.log2(p) - (1 - p) * math.log2((1 - p) / 7)
    assert floor < capped and capped > found['lowest_bits']
