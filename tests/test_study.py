"""The study: its runs, its worlds and figures, a small one from end to end, and its probe."""

import argparse
import contextlib
import csv
import hashlib
import io
import json
import math
import multiprocessing
import os
import re
import runpy
import sys
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import metrics
import model as models
import scaling
from common import HERE, write_run
from results import over_seeds
from results.report import predictions
from results.runs import read_run, read_run_samples
from results.samples import read_samples
from results.tables import csv_text
from runtime.errors import ConfigError
from stats import mean_interval, student_t
from research.study import (
    aligned, alignment, architectures, base, closed_form, common, effects, epochs, figures,
    frontier, gather, homogeneous, known, lora, losses, metrics_agree, pivot, reach, side_by_side,
    size, smoothing, transfer, vocabulary)
from research.study.world import StudySpec, make_world
from align import AlignConfig, check_align_config
from data.written_answers import WRITTEN_TASKS, WrittenQuestion, proposed
from alignment.rewards import exact, rlcr
from data.world import write_world
from runtime.eval_config import EvalConfig
from train import TrainConfig, check_config, training_loss

SCRIPTS = architectures, base, epochs, homogeneous, lora, size, smoothing, vocabulary
# settings that the trainer has got since the study was run; their defaults are what it did then
ADDED = {'loss', 'logit_softcap', 'logit_temperature', 'answers', 'data_limit', 'warmup_steps',
         'train_on_inputs'}


def digest(config):
    settings = {key: value for key, value in asdict(config).items() if key not in ADDED}
    if settings.get('eval'):    # added to the report since
        for key in ('p_true', 'chat', 'dropout_seed', 'show', 'permute', 'n', 'max_tokens',
                    'verbalized', 'run_code', 'isolation', 'p_ik', 'shard'):
            assert settings['eval'].pop(key) == getattr(EvalConfig, key)
        settings['eval']['preset'] = settings['eval'].pop('prompt_format')
        fit = settings['eval'].pop('fit_temperature')       # by its name of then
        settings['eval']['temperature'] = 'fit' if fit else 'none'
        settings['eval']['compile'] = True      # evaluation had a compiler then
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


DEFAULTS = json.loads((HERE / 'research' / 'study' / 'defaults.json').read_text())


def settings(config):
    """Return {key: value} of what differs from the defaults when the study was made.

    A key that the program has got since must have its default of today.
    """
    recorded, today, different = DEFAULTS[type(config).__name__], type(config)(), {}
    for key in (field.name for field in fields(config)):
        value = getattr(config, key)
        if key not in recorded:
            assert value == getattr(today, key), key
            continue
        value = json.loads(json.dumps(settings(value) if is_dataclass(value) else value))
        if value != recorded[key]:
            different[key] = value
    return different


def settings_digest(configs):
    text = json.dumps([settings(config) for config in configs], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def test_every_run_has_the_settings_it_was_made_with():
    """research/study/runs.csv is of the 685 runs behind the committed numbers."""
    with open(HERE / 'research' / 'study' / 'runs.csv') as file:
        rows = [*csv.DictReader(file)]
    expected, settings_expected = ({row['out_dir']: row[key] for row in rows}
                                   for key in ('digest_of_all_keys', 'digest'))
    cfgs = [cfg for script in SCRIPTS for seed in common.SEEDS for cfg in script.runs(seed)]
    assert len(cfgs) == 685
    assert {cfg.out_dir: digest(cfg) for cfg in cfgs} == expected
    assert {cfg.out_dir: settings_digest([cfg]) for cfg in cfgs} == settings_expected
    default = TrainConfig()
    assert all(getattr(cfg, key) == getattr(default, key) for cfg in cfgs for key in ADDED)


def test_the_worlds_are_those_the_study_was_made_with():
    assert digest(base.WORLD) == 'cfd7d081df24' and digest(vocabulary.WORLD) == '330c93bde51c'
    assert settings_digest([base.WORLD, vocabulary.WORLD]) == '975063d37d7c'


@pytest.mark.slow
@pytest.mark.parametrize('figure', figures.FIGURES)
def test_a_figure_follows_from_its_committed_numbers(figure, tmp_path, monkeypatch):
    committed = HERE / 'research' / 'study' / 'results' / figure
    drawn = []
    monkeypatch.setattr(pivot, 'draw_series', lambda path, *rest, **more: drawn.append(path))
    monkeypatch.setattr(figures, 'draw_bins', lambda path, *rest, **more: drawn.append(path))
    figures.draw(figure, tmp_path)
    tables = {path.name for path in committed.glob('*.csv')} | {'compare.md'}
    for name in tables:
        assert (tmp_path / name).read_bytes() == (committed / name).read_bytes(), name
    assert {path.name for path in drawn} == {path.name for path in committed.glob('*.png')}


def test_the_tables_of_claims_3_and_4_follow_from_the_committed_numbers(tmp_path, monkeypatch):
    for name in {figure for figure, _ in effects.TASKS.values()} | {'size', 'size_all'}:
        (tmp_path / name).symlink_to(HERE / 'research' / 'study' / 'results' / name)
    monkeypatch.setattr(effects, 'RESULTS', tmp_path)
    effects.main()
    assert ((tmp_path / 'effects.md').read_text()
            == (HERE / 'research' / 'study' / 'results' / 'effects.md').read_text())


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
            yield replace(cfg, workers=1, pictures=False, **settings,
                          eval=replace(cfg.eval, pack_len=512, n_bootstrap=50))
    return small


SMALL_WORLD = StudySpec(**asdict(base.WORLD) | dict(
    entities=500, unseen=20, first_names=40, family_names=40, documents=300,
    tokenizer_documents=300, vocab_sizes=(700,), instructions=80, questions=12,
    unseen_questions=6, validation=12, probes=10))


@pytest.fixture(scope='module')
def small_study(tmp_path_factory):
    """The base model and two models tuned from it, of two seeds; the folder of the study."""
    root = tmp_path_factory.mktemp('study')

    def prepare(seed, root):
        make_world(f'{common.seed_folder("base", seed, root)}/world', seed, SMALL_WORLD)
    shape = base.llama(32, 64, 1, 2)
    common.train_all(small_runs(base.runs, batch_size=64, micro_rows=4, shape=shape), [0, 1],
                     ('base',), root, prepare, lambda cfg: reach.probe(cfg.out_dir, cfg.seed))
    common.train_all(small_runs(smoothing.runs, epochs=1.0), [0, 1], SMALL, root)
    return root


SMALL = 'tuned-smoothing0.0-lr0.0008', 'tuned-smoothing0.1-lr0.0008'


@pytest.mark.slow
def test_a_small_study_runs_from_worlds_to_tables(small_study, tmp_path, capsys):
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


def test_bins_of_two_runs_add_up(tmp_path):
    """The bins of two runs together are those of their questions together."""
    runs = [read_run(write_run(tmp_path / f'seed-{seed}', seed=seed)) for seed in (0, 1)]
    together = figures.pool_bins(list(figures.bins_of(runs).values()))
    rows = [predictions(read_samples(run.folder / 'samples.jsonl'), 'token') for run in runs]
    expected = metrics.bins(*(np.concatenate([getattr(p, key) for p in rows])
                              for key in ('probs', 'labels')))
    assert together['count'].sum() == 80
    for key in ('low', 'high', 'count'):
        assert np.allclose(together[key], expected[key], equal_nan=True)


@pytest.mark.slow
def test_what_is_finished_is_skipped(small_study, capsys):
    files = sorted(path for path in small_study.rglob('*') if path.is_file())
    before = {path: path.stat().st_mtime_ns for path in files if path.name != '.lock'}
    common.train_all(small_runs(smoothing.runs, epochs=1.0), [0], SMALL, small_study)
    assert all(path.stat().st_mtime_ns == before[path] for path in before)
    assert 'step 1' not in capsys.readouterr().out


@pytest.mark.slow
def test_a_script_ends_in_a_table_over_its_seeds(small_study, capsys, monkeypatch):
    monkeypatch.setattr(over_seeds, 'draw_means', lambda path, *rest: path.write_bytes(b'png'))
    monkeypatch.setattr('sys.argv', ['smoothing.py', '--seeds=1', f'--only={SMALL[0]}',
                                     f'--out_dir={small_study}'])
    monkeypatch.setattr('__main__.__doc__', smoothing.__doc__)
    common.main(small_runs(smoothing.runs, epochs=1.0))
    folder = small_study / 'smoothing'
    printed, table = capsys.readouterr().out, (folder / 'compare.md').read_text().splitlines()
    assert table[0].startswith('| task | smoothing | seeds | ECE |') and 'text4' in printed
    assert [row.split(' | ')[1:3] for row in table[2:4]] == [['0.0', '2'], ['0.1', '2']]
    assert {'compare.csv', 'compare.tex', 'compare.png', 'compare.md', 'written.json', '.lock'} == {
        path.name for path in folder.iterdir() if path.is_file()}
    common.main(small_runs(smoothing.runs, epochs=1.0))
    assert (folder / 'compare.md').read_text().splitlines() == table
    (folder / 'written.json').unlink()      # then they are somebody's
    with pytest.raises(SystemExit, match='compare.csv was not written by this program'):
        common.main(small_runs(smoothing.runs, epochs=1.0))


@pytest.mark.parametrize('main, arguments, message', [
    (lambda: common.main(smoothing.runs), '--seeds=x', "'x' is no list of seeds such as 0,1"),
    (gather.main, '--seeds=', "'' is no list of seeds such as 0,1"),
    (side_by_side.main, '--seeds=1,b', "'1,b' is no list of seeds such as 0,1"),
    (side_by_side.main, '--study=foo', "there is no 'foo'; there are losses, alignment")])
def test_seeds_and_studies_are_checked(main, arguments, message, monkeypatch, capsys):
    monkeypatch.setattr('sys.argv', ['script.py', arguments])
    monkeypatch.setattr('__main__.__doc__', smoothing.__doc__)
    with pytest.raises(SystemExit):
        main()
    assert message in capsys.readouterr().err


@pytest.mark.parametrize('main, keys', [
    (lambda: common.main(smoothing.runs), ['out_dir']), (gather.main, ['runs', 'out_dir']),
    (figures.main, ['runs', 'out_dir']), (side_by_side.main, ['out_dir']),
    (aligned.main, ['runs', 'folder']), (frontier.main, ['folder']),
    (metrics_agree.main, ['out_dir'])])
def test_a_tilde_is_the_home_folder(main, keys, monkeypatch):
    parse, parsed = argparse.ArgumentParser.parse_args, {}

    def only_parse(parser, arguments=None):
        parsed.update(vars(parse(parser, arguments)))
        raise SystemExit

    monkeypatch.setattr(argparse.ArgumentParser, 'parse_args', only_parse)
    monkeypatch.setattr('sys.argv', ['script.py', *(f'--{key}=~/{key}' for key in keys)])
    monkeypatch.setattr('__main__.__doc__', smoothing.__doc__)
    monkeypatch.setenv('HOME', '/home/ann')
    with pytest.raises(SystemExit):
        main()
    assert [parsed[key] for key in keys] == [f'/home/ann/{key}' for key in keys]


def test_a_name_that_no_run_has_is_refused():
    with pytest.raises(ConfigError, match='--only=lora: no run has such a name; there are tuned-'):
        common.train_all(smoothing.runs, only=('lora',))


@pytest.mark.slow
def test_the_probe_is_a_column_of_the_figures(small_study):
    folder = small_study / 'base' / 'seed-1' / 'base'
    found = json.loads((folder / 'reach.json').read_text())
    assert 0 < found['lowest_bits'] <= found['highest_bits'] <= found['log2_vocab']
    run = read_run(folder)
    with contextlib.redirect_stdout(io.StringIO()):
        lines = pivot.run_lines(run)
    assert {line['reach_lowest_bits'] for line in lines} == {float(f'{found["lowest_bits"]:.5g}')}
    assert {line['unused_rows'] for line in lines} == {'0'}


@pytest.mark.slow
def test_reachable_entropy_equals_the_closed_form():
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


# Chosen lines along chosen axes: research/study/pivot.py

# of a study: five seeds, two rates, a base model; ECE falls by 0.02 with smoothing, but for seed 4
def study_lines():
    for seed in range(5):
        for kind, rate in (('base', ''), ('tuned', '0.0'), ('tuned', '0.1')):
            for task in ('text4', 'facts'):
                ece = {'': 0.02, '0.0': 0.1, '0.1': 0.08}[rate] + 0.001 * seed
                ece += 0.01 * (seed == 4 and rate == '0.1')
                yield {'run': f'{kind}-smoothing{rate}', 'kind': kind, 'seed': seed,
                       'task': task, 'language': 'all', 'category': 'all', 'scaling': 'none',
                       'smoothing': rate, 'n': 100, 'ece': ece, 'accuracy': 0.5}


def write_lines(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(csv_text(list(lines)))
    return path


def show(tables, out_dir, **view):
    out_dir.mkdir(exist_ok=True, parents=True)
    pivot.show([], [table.resolve() for table in tables], pivot.View(**view), out_dir)
    return [[c.strip() for c in line.split('|')[1:-1]]
            for line in (out_dir / 'compare.md').read_text().splitlines()]


def test_a_view_shows_means_over_seeds_beside_its_reference(tmp_path):
    path = write_lines(tmp_path / 'study' / 'compare.csv', study_lines())
    rows = show([path], tmp_path / 'out', x='smoothing', reference=('base',),
                where=('task=text4',))
    assert rows[0][:7] == ['task', 'smoothing', 'seeds', 'ECE', 'ECE minus that of base',
                           'ECE minus that of smoothing 0.0', 'accuracy']
    assert [row[1] for row in rows[2:]] == ['base', '0.0', '0.1'] and {r[2] for r in rows[2:]} == {
        '5'}
    d = [-0.02] * 4 + [-0.01]
    mean, low, high = mean_interval(d)
    assert rows[4][5] == f'{mean:+.3f} ± {(high - low) / 2:.3f}, p {student_t(d)[2]:.1g}'
    assert rows[2][4] == rows[2][5] == rows[3][5] == ''
    assert rows[3][4].startswith('+0.080 ± 0.000, p 0')
    assert (tmp_path / 'out' / 'compare.png').read_bytes().startswith(b'\x89PNG')
    lines = pivot.read_lines(tmp_path / 'out' / 'compare.csv')
    assert len(lines) == 15 and {line['task'] for line in lines} == {'text4'}


@pytest.mark.parametrize('change, message', [
    ({'x': 'kind', 'by': (), 'reference': ()}, 'to one group; they differ in run, .*smoothing'),
    ({'where': ('task=none|some',)}, 'where: task is never none or some'),
    ({'where': ('tusk=a',)}, 'where: tusk is never a')])
def test_a_view_without_lines_or_with_several_per_seed_is_refused(tmp_path, change, message):
    path = write_lines(tmp_path / 'compare.csv', study_lines())
    view = {'x': 'smoothing', 'reference': ('base',), 'where': ('task=text4',)} | change
    with pytest.raises(ConfigError, match=message):
        show([path], tmp_path / 'out', **view)


@pytest.mark.slow
def test_the_only_language_of_a_task_need_not_be_named(tmp_path):
    lines = list(study_lines())
    one = [line | {'language': 'en'} if line['task'] == 'text4' else line for line in lines]
    two = one + [line | {'language': 'de'} for line in one if line['language'] == 'en']
    view = {'x': 'smoothing', 'reference': ('base',), 'where': ('task=text4',)}
    path = write_lines(tmp_path / 'study' / 'compare.csv', one)
    assert show([path], tmp_path / 'out', **view)[4][:3] == ['text4', '0.1', '5']
    write_lines(path, two)
    with pytest.raises(ConfigError, match='they differ in language'):
        show([path], tmp_path / 'out', **view)
    rows = show([path], tmp_path / 'out', panel=('task', 'language'), **view)
    assert ['text4', 'de', '0.1', '5'] in [row[:4] for row in rows]


def test_a_table_is_not_cut_by_where(tmp_path):
    """compare.csv is a source and would be written again without the lines of another task."""
    path = write_lines(tmp_path / 'study' / 'compare.csv', study_lines())
    content = path.read_text()
    with pytest.raises(ConfigError, match='would lose the lines .*; give another'):
        show([path], path.parent.resolve(), x='smoothing', where=('task=facts',))
    assert path.read_text() == content
    show([path], path.parent, x='smoothing', reference=('base',))
    assert len(pivot.read_lines(path)) == len(list(study_lines()))


def test_reachable_entropy_has_a_column_if_it_was_probed(tmp_path):
    runs = []
    for seed in range(2):
        for rows in (0, 512):
            folder = write_run(tmp_path / 'runs' / f'a-{rows}-{seed}', seed=seed)
            (folder / 'reach.json').write_text(json.dumps(
                {'unused_rows': rows, 'lowest_bits': 0.25 + rows, 'highest_bits': 9.0}))
            runs.append(read_run(folder))
    (tmp_path / 'out').mkdir()
    pivot.show(runs, [], pivot.View(metrics=('reach_lowest_bits',)), tmp_path / 'out')
    lines = (tmp_path / 'out' / 'compare.md').read_text().splitlines()
    assert lines[0].startswith('| task | unused_rows | seeds | least entropy (bits) |')
    assert lines[2].startswith('| mmlu | 0 | 2 | 0.250 ± 0.000 |') and '512.25' in lines[3]


# The losses: research/study/PLAN.md


@pytest.mark.slow
def test_the_tables_of_the_losses_are_those_of_the_committed_numbers():
    numbers = frontier.Numbers(frontier.RESULTS)
    claims = re.split(r'\n## \d+\. ', (HERE / 'research' / 'study' / 'STUDY.md').read_text())
    claims = claims[7:7 + len(frontier.CLAIMS)]
    for (name, (title, tables, _)), text in zip(frontier.CLAIMS.items(), claims, strict=True):
        made = frontier.page(numbers, title, tables)
        assert made == (frontier.RESULTS / f'{name}.md').read_text()
        cells = set(re.findall(r'(?<=\| )[-+]?0\.\d{3} ± [^|]*(?= \|)', text))
        assert len(cells) > 10 and {cell for cell in cells if cell not in made} == set(), name


def test_the_plan_has_600_runs_with_settings_that_were_fixed():
    cfgs = [cfg for script in (losses, transfer, known) for seed in losses.SEEDS
            for cfg in script.runs(seed)]
    assert len({cfg.out_dir for cfg in cfgs}) == len(cfgs) == 600
    settings = json.dumps([[cfg.out_dir, digest(cfg), cfg.loss] for cfg in cfgs])
    assert hashlib.sha256(settings.encode()).hexdigest()[:12] == '4f1f667c79b6'
    assert settings_digest(cfgs) == 'dc8e78719e09'
    for cfg in cfgs:
        training_loss(cfg)
    names = {Path(cfg.out_dir).name for cfg in cfgs}
    assert {run for _, run, _ in frontier.choices()} <= names


def small_jobs(root, seed, names):
    """The jobs of the loss study whose runs are in `names`, with few steps and not compiled."""
    shape = base.llama(32, 64, 2, 2)
    for job in side_by_side.jobs_of(seed, str(root)):
        if job.function is side_by_side.once:
            cfg, = job.arguments
            more = {'batch_size': 64, 'shape': shape} if cfg.from_scratch else {
                'batch_size': 16, 'val_size': min(8, cfg.val_size)}
            job = job._replace(arguments=(replace(
                cfg, workers=1, max_steps=2, eval=replace(cfg.eval, pack_len=512), compile=False,
                attention='explicit', **more),))
        if job.makes.parent.name in names or job.function is not side_by_side.once:
            yield job


@pytest.fixture
def forked(monkeypatch):
    """Processes of side_by_side are forks of this one, which spares them seconds of imports."""
    if not torch.cuda.is_available():       # which cannot be used in a fork
        fork = multiprocessing.get_context('fork')
        monkeypatch.setattr(multiprocessing, 'get_context', lambda method: fork)


def die_once(file):
    if not file.exists():
        file.touch()
        os._exit(1)


@pytest.mark.slow
def test_a_failed_run_does_not_stop_those_side_by_side(tmp_path, capsys, forked):
    """Two processes: a world's base models, what they know, tuned models; then the numbers."""
    seed, names = 5, {'base', 'medium', 'tuned-crossentropy-lr0.0008', 'tuned-gce0.7-lr0.0008',
                      'lora-dft-lr0.0032', 'medium-focal2-lr0.0004', 'base-known-dft',
                      'medium-unknown-smoothing0.1', 'tuned-dft-lr0.0008'}
    make_world(tmp_path / 'base' / 'seed-5' / 'world', seed, SMALL_WORLD)
    (tmp_path / 'base' / 'seed-5' / 'world-tokenized').touch()
    jobs = list(small_jobs(tmp_path, seed, names))
    assert len(jobs) == 1 + 9 + 2       # the world is there; two say what is known
    for i, job in enumerate(jobs):
        if job.name.endswith('tuned-dft-lr0.0008'):
            jobs[i] = job._replace(arguments=(replace(job.arguments[0], lr=-1.0),))
    failed = side_by_side.side_by_side(jobs, 2, 0, tmp_path)
    printed = capsys.readouterr().out
    assert [Path(name).name for name in failed] == ['tuned-dft-lr0.0008']
    assert 'failed: ConfigError: lr = -1.0' in printed
    assert printed.endswith('1 failed, 0 not started\n') and '11/11' in printed
    assert all(job.makes.exists() for job in jobs if not job.name.endswith('dft-lr0.0008'))
    finished = [job for job in jobs if job.makes.exists()]
    assert side_by_side.side_by_side(finished, 2, 0, tmp_path) == []
    assert capsys.readouterr().out == '0 failed, 0 not started\n'

    knows = tmp_path / 'knows' / 'seed-5'
    samples = read_samples(knows / 'base' / 'samples.jsonl')
    p = predictions(samples, 'token')
    right = {s['id'] for s, yes in zip(samples, p.probs.argmax(1) == p.labels, strict=True) if yes}
    rows = (tmp_path / 'base' / 'seed-5' / 'world' / 'instruct-homogeneous.jsonl').read_text()
    chosen = {data: [str(rows.splitlines().index(line)) for line in
                     (knows / f'base-{data}.jsonl').read_text().splitlines()]
              for data in known.DATA}
    assert {len(numbers) for numbers in chosen.values()} == {2 * (len(right) // 2)}
    assert set(chosen['known']) <= right and not right & set(chosen['unknown'])
    assert len(right & set(chosen['half'])) == len(right) // 2

    assert gather.write_numbers(seed, tmp_path, tmp_path / 'numbers') == 10
    numbers = frontier.Numbers(tmp_path / 'numbers')
    with open(tmp_path / 'losses' / 'seed-5' / 'tuned-gce0.7-lr0.0008' / 'results.json') as file:
        pooled = json.load(file)['tasks']['text4']['pooled']
    assert numbers.value('5', 'tuned-gce0.7-lr0.0008', 'ece') == pytest.approx(
        pooled['ece'], rel=1e-4)
    assert numbers.value('5', 'base', 'accuracy', task='base') == len(right) / len(p.labels)
    with open(tmp_path / 'transfer' / 'seed-5' / 'lora-dft-lr0.0032' / 'log.jsonl') as file:
        steps = [json.loads(line) for line in file]
    for task, nll in (('held out', steps[-1]['val_nll']),
                      ('trained', np.mean([step['nll'] for step in steps]))):
        assert numbers.value('5', 'lora-dft-lr0.0032', 'nll', task=task) == pytest.approx(
            nll, rel=1e-4)
    assert math.isnan(numbers.value('5', 'base-known-dft', 'nll', task='held out'))
    for _, tables, _ in frontier.CLAIMS.values():
        assert all(len(table(numbers)) > 2 for table in tables)      # most of them without values


@pytest.mark.slow
def test_a_process_that_dies_is_replaced(tmp_path, capsys, request):
    file = tmp_path / 'died'
    job = side_by_side.Job('once', die_once, (file,), (), tmp_path / 'made')
    assert side_by_side.side_by_side([job], 1, 0, tmp_path) == []
    assert f'a process died, see {tmp_path}' in capsys.readouterr().out
    file.unlink()
    request.getfixturevalue('forked')
    with pytest.raises(SystemExit, match='error: processes died 1 times'):
        side_by_side.side_by_side([job], 1, 0, tmp_path, starts=1)
    late = side_by_side.side_by_side([job], 1, 0, tmp_path, deadline=0)
    assert late == [] and '0 failed, 1 not started' in capsys.readouterr().out


@pytest.fixture
def made_up(tmp_path):
    """Numbers of all runs of five seeds, in which smoothing takes 0.02 from ECE at any accuracy."""
    for seed in losses.SEEDS:
        random, lines = np.random.default_rng(seed), []

        def add(run, accuracy, ece, seed=seed, lines=lines, **more):
            lines.append({'run': run, 'seed': seed, 'task': 'text4', 'language': 'all',
                          'category': 'all', 'scaling': 'none', 'accuracy': accuracy, 'ece': ece,
                          'smooth_ece': ece, 'nll': 1 + ece, 'brier': 0.5} | more)
        for run in ('base', 'medium', 'large'):
            add(run, 0.6, 0.02)
            add(run, 0.45 + 0.001 * seed, 0.0, task=run)
        for cfg in (cfg for script in (losses, transfer, known) for cfg in script.runs(seed)):
            accuracy = 0.6 - 80 * cfg.lr * random.uniform(0.9, 1.1)
            smoothed = 'smoothing(0.1)' in cfg.loss
            add(Path(cfg.out_dir).name, accuracy, 0.02 + (0.6 - accuracy) - 0.02 * smoothed
                + 0.05 * ('unknown' in cfg.out_dir) + random.normal(scale=1e-4))
        for line in [line for line in lines if line['task'] == 'text4']:
            lines += [line | {'task': 'facts'}, line | {'task': 'clm'},
                      line | {'scaling': 'temperature'}]
            lines += [line | {'language': language} for language in frontier.UNTUNED]
            lines += [line | {'task': task, 'nll': 2.0} for task in ('held out', 'trained')]
        (tmp_path / f'seed-{seed}.csv').write_text(csv_text(lines))
    return tmp_path


@pytest.mark.slow
def test_the_tables_and_figures_of_the_losses(made_up, monkeypatch, capsys):
    monkeypatch.setattr('sys.argv', ['frontier.py', f'--folder={made_up}'])
    frontier.main()
    assert {path.name for path in made_up.iterdir()} >= {
        f'{claim}.{ending}' for claim in frontier.CLAIMS for ending in ('md', 'png')}
    rows = {line.split(' | ')[0].strip('| '): line.split(' | ') for line in
            (made_up / 'equal-accuracy.md').read_text().splitlines()}
    smoothed = rows['cross_entropy() + smoothing(0.1)'][1]
    # where the curves leave the base model, the difference grows from 0 to 0.02
    assert -0.02 < float(smoothed.split()[0]) < -0.012 and float(smoothed.split()[-1]) < 0.001
    assert 'p' not in rows['cross_entropy() + smoothing(0.2)'][1]       # not tested
    assert float(rows['focal(2)'][1].split()[-1]) > 0.05
    known_table = (made_up / 'known.md').read_text()
    assert '| cross-entropy: ECE unknown - known, 6 million | +0.05' in known_table
    assert '| recipe' not in known_table and 'free' in (made_up / 'recipe.md').read_text()
    for seed in losses.SEEDS[1:]:
        (made_up / f'seed-{seed}.csv').unlink()
    frontier.main()         # one seed: neither intervals nor p
    assert '±' not in (made_up / 'equal-accuracy.md').read_text()


# Alignment and written answers: claims 13 and 14


SMALL_ALIGNMENT = alignment.AlignmentSpec(**asdict(alignment.WORLD) | dict(
    entities=300, first_names=30, family_names=30, documents=400, tokenizer_documents=400,
    vocab_sizes=(700,), instructions=64, judged=16, prompts=48, questions=24, validation=24,
    written=8))


def small_alignment_jobs(seed, root, names, jobs=side_by_side.alignment_jobs):
    """The jobs whose folders are in `names`, with few steps and answers."""
    for job in jobs([seed], str(root)):
        if job.function is alignment.fit:
            cfg, = job.arguments
            more = {'shape': base.llama(32, 64, 1, 2), 'micro_rows': 4, 'batch_size': 64}
            if isinstance(cfg, AlignConfig):
                more = {'batch_size': 24, 'group_size': 2, 'max_steps': min(6, cfg.max_steps or 6)}
            elif not cfg.from_scratch:
                more = {'batch_size': 16, 'max_steps': 3}
            job = job._replace(arguments=(replace(cfg, workers=1, **more),))
        if Path(job.name).name in names:
            yield job


@pytest.mark.parametrize('study', ['alignment', 'closed-form', 'smoothing'])
def test_a_job_needs_what_an_earlier_one_makes(study):
    make, seeds = side_by_side.STUDIES[study]
    made, n_jobs = set(), 0
    for job in make(seeds, 'out/study'):
        for file in map(Path, job.needs):
            assert {file, *file.parents} & made, (job.name, file)
        made |= {job.makes, Path(job.name)}
        n_jobs += 1
    assert n_jobs == {'alignment': 33, 'closed-form': 24, 'smoothing': 26}[study] * len(seeds)


def test_an_alignment_world_asks_as_evaluate_does(tmp_path):
    rows = alignment.make_rows(SMALL_ALIGNMENT, 10)
    assert rows == alignment.make_rows(SMALL_ALIGNMENT, 10)
    facts = [{row['id'] for row in rows[file]} for file in (
        'prompts/test.jsonl', 'chat/test.jsonl', 'chat/validation.jsonl')]
    assert [*map(len, facts)] == [48, 24, 24] and len(set.union(*facts)) == 96
    told = {message['messages'][0]['content'] for message in rows['instruct.jsonl']}
    asked = rows['plain/test.jsonl'][0]
    assert asked['prompt'] not in told and len(asked['classes']) == 24
    question = rows['qa.jsonl'][0]
    assert asked['prompt'] == WRITTEN_TASKS['qa'].prompt.format(question['question'])
    assert asked['classes'][asked['answer_index']] == f' {question["answer"]}'
    # the judged conversations have the form in which P(True) is asked
    (name,), judged = re.findall(r'of (.*)\?', question['question']), rows['instruct.jsonl'][64:]
    free = WrittenQuestion('0', question['question'], asked['prompt'], [], '')
    form = proposed(free, f'Answer: {question["answer"]}', True).context
    form = re.escape(form).replace(re.escape(name), '.*').replace(question['answer'], '.*')
    form = re.sub(r'What.*of', 'What is the .* of', form.replace('\\ ', ' '), count=1)
    assert len(judged) == 16 and all(re.fullmatch(form, row['messages'][0]['content'])
                                     for row in judged)
    assert {row['messages'][1]['content'] for row in judged} == {'(A)', '(B)'}
    text = ''.join(row['text'] for row in rows['text.jsonl'])
    assert 0.35 < text.count('answer is: (A)') / text.count('The proposed answer is:') < 0.65


def test_a_rewarded_answer_of_the_alignment_world_is_the_true_one():
    row = alignment.make_rows(SMALL_ALIGNMENT, 10)['qa.jsonl'][0]
    task, value = WRITTEN_TASKS['qa'], row['answer']
    assert exact(task, '', f'Answer: {value}', row) == 1 == 1 - exact(task, '', 'Answer: x', row)
    assert rlcr(task, '', alignment.STATED.format(value, 0.9), row) == pytest.approx(1.495)


@pytest.mark.slow
def test_alignment_from_the_world_to_tables(tmp_path, capsys, forked):
    """Two processes: tuned models, pairs, aligned models and their written answers."""
    seed, names = 10, {'base', 'sft', 'stated', 'pairs', 'ppo-both', 'dpo', 'grpo-known', 'rlcr',
                       'brier', 'dpo-none', 'dpo-temperature', 'base-none'}
    write_world(f'{alignment.seed_folder(seed, tmp_path)}/world', seed, SMALL_ALIGNMENT,
                alignment.make_rows)
    jobs = list(small_alignment_jobs(seed, tmp_path, names))
    assert [*map(len, (jobs, names))] == [12, 12]
    failed = side_by_side.side_by_side(jobs, 2, 0, tmp_path)
    printed = capsys.readouterr().out
    assert failed == [], printed
    aligned.main([f'--runs={tmp_path}', f'--folder={tmp_path}/numbers'])
    assert {path.name for path in (tmp_path / 'numbers').iterdir()} == {
        'seed-10.csv', 'alignment.md', 'alignment.png', 'written.md', 'written.png'}
    numbers = aligned.Numbers(tmp_path / 'numbers')
    folder = Path(alignment.seed_folder(10, tmp_path))
    # the KL and the reward against plain loops over the samples
    policy, reference = ({s['id']: s for s in read_samples(folder / name / 'samples.jsonl')
                          if s['split'] == 'test'} for name in ('dpo', 'sft'))
    kl, reward = 0, 0
    for id, sample in policy.items():
        p, q = (np.exp(s['log_probs']) / np.exp(s['log_probs']).sum()
                for s in (sample, reference[id]))
        kl += sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)) / len(policy)
        reward += p[sample['answer']] / len(policy)
    assert numbers.of('dpo', 'kl') == pytest.approx(kl, rel=1e-3) and kl > 0
    assert numbers.of('dpo', 'reward') == pytest.approx(reward, rel=1e-3)
    assert [*np.isfinite(numbers.path('dpo', 'ece')[0])] == [True] * 4
    assert np.isnan(numbers.of('ppo', 'ece')) and numbers.of('ppo-both', 'trained_reward') >= 0
    with open(folder / 'ppo-both' / 'log.jsonl') as file:
        assert ['reward' in json.loads(line) for line in file] == [True] * 6
    # one temperature divides all logits
    t = alignment.temperature_of(folder / 'dpo')
    with open(folder / 'scaled' / 'dpo' / 'config.json') as file:
        assert json.load(file)['nanocal'] == {'temperature': t}
    written = {scaling: alignment.written_folder(10, tmp_path, 'dpo', scaling)
               for scaling in ('none', 'temperature')}
    for task in aligned.CONFIDENCES:
        assert np.isfinite(aligned.written(numbers, 'dpo', 'ece', task, 'temperature'))
    texts = {scaling: [s['greedy']['text'] for s in read_samples(path / 'samples.jsonl')
                       if s['task'] == 'qa'] for scaling, path in written.items()}
    assert texts['none'] == texts['temperature'] and len(texts['none']) == 8
    known, unknown, everything = ((folder / 'pairs' / f'{name}.jsonl').read_text().splitlines()
                                  for name in ('known', 'unknown', 'all'))
    assert len(known) == len(unknown) > 0 and len(everything) == 48
    assert {*known, *unknown} <= {*everything} and not {*known} & {*unknown}


def test_the_kl_of_options_is_a_mean_over_questions():
    p = np.array([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]])
    q = np.array([[0.25, 0.25, 0.5], [0.2, 0.3, 0.5]])
    assert alignment.mean_kl(p, q) == pytest.approx(math.log(2) / 2)
    assert alignment.mean_kl(p, p) == 0


@pytest.mark.slow
def test_the_tables_and_figures_of_alignment(tmp_path):
    """Made-up numbers: the true differences are found, and missing runs have none."""
    runs = [Path(cfg.out_dir).name for make in (alignment.base_runs, alignment.runs)
            for cfg in make(10)]
    for seed in alignment.SEEDS:
        random, lines = np.random.default_rng(seed), []
        for run in runs:
            for epoch in (('1', '2', '3') if run in ('ppo', 'dpo', 'grpo') else ('3',)):
                for scaled in ('none', 'temperature'):
                    kl = 0.1 * int(epoch) * (run not in ('base', 'sft'))
                    ece = 0.05 + 0.5 * kl * (run == 'ppo') + random.normal(scale=1e-4)
                    lines.append(dict.fromkeys(alignment.COLUMNS, 0.1) | {
                        'run': run, 'epoch': epoch, 'seed': seed, 'scaling': scaled, 'kl': kl,
                        'task': 'plain' if run == 'base' else 'chat', 'reward': 0.2 + kl,
                        'ece': ece})
        for run in aligned.WRITERS:
            for task in aligned.CONFIDENCES:
                lines += [dict.fromkeys(alignment.COLUMNS, 0.1) | {
                    'run': run, 'epoch': 'written', 'seed': seed, 'task': task, 'scaling': scaled,
                    'ece': 0.02 + 0.1 * (run == 'ppo') * (scaled == 'none')
                    + random.normal(scale=1e-4)} for scaled in ('none', 'temperature')]
        (tmp_path / f'seed-{seed}.csv').write_text(csv_text(lines))
    aligned.main([f'--folder={tmp_path}'])
    text = (tmp_path / 'alignment.md').read_text()
    found = dict(re.findall(r'\| (.*?) \| ([-+]\d\.\d+ ± .*?) \|', text))
    assert found['ECE of PPO - SFT'].startswith('+0.150 ± 0.000')
    assert found['ECE of PPO - PPO, both'].startswith('+0.150 ± 0.000')
    # the mean of 0.5 kl over 0 < kl < 0.3
    assert found['ECE of PPO - DPO, at equal KL'].startswith('+0.075 ± 0.000')
    assert found['KL of GRPO - DPO, at equal held-out reward'].startswith('+0.000 ± 0.000')
    assert '| RLCR | stated | none for 5 of 5 seeds |' in text
    text = (tmp_path / 'written.md').read_text()
    assert '| PPO | +0.000 ± 0.000 | +0.000 ± 0.000 |' in text.replace('-0.000', '+0.000')
    assert '| 3 of 3 |' in text and 'P(True): PPO - SFT | +0.100 ± 0.000' in text
    for seed in alignment.SEEDS[1:]:
        (tmp_path / f'seed-{seed}.csv').unlink()
    aligned.main([f'--folder={tmp_path}'])
    assert '±' not in (tmp_path / 'alignment.md').read_text()


@pytest.mark.slow
@pytest.mark.parametrize('script, titles', [
    (aligned, ('Alignment\n', 'Written answers\n')), (closed_form, ('The closed form\n',))])
def test_the_tables_of_alignment_are_those_of_the_committed_numbers(script, titles):
    numbers = aligned.Numbers(script.RESULTS)
    claims = re.split(r'\n## (?:\d+\. )?', (HERE / 'research' / 'study' / 'STUDY.md').read_text())
    claims = [text for text in claims if text.startswith(titles)]
    for (name, (title, tables, _)), text in zip(script.CLAIMS.items(), claims, strict=True):
        made = frontier.page(numbers, title, tables)
        assert made == (script.RESULTS / f'{name}.md').read_text()
        cells = set(re.findall(r'(?<=[| ])[-+]?0\.\d{3} ± \d\.\d{3}(?:, p [\d.e-]*\d)?', text))
        assert len(cells) > 30 and {cell for cell in cells if cell not in made} == set(), name


# Claim 15


@pytest.mark.parametrize('method, weight', [('dpo', 0.3), ('dpo', 1.0), ('ppo', 0.2)])
def test_the_closed_form_is_the_optimum_of_its_objective(method, weight):
    """Gradient steps on the logits of one question end there."""
    p, q = torch.from_numpy(np.random.default_rng(0).dirichlet(np.ones(4), 2))
    logits = p.log().clone().requires_grad_()
    optimizer = torch.optim.LBFGS([logits], max_iter=500, tolerance_grad=1e-10,
                                  tolerance_change=0, line_search_fn='strong_wolfe')

    def objective():
        optimizer.zero_grad()
        log_p = logits.log_softmax(0)
        if method == 'dpo':     # q[k]: k is right; then j is rejected with p[j] / (1 - p[k])
            drawn = (q / (1 - p))[:, None] * p * (1 - torch.eye(4))
            reward = weight * (log_p - p.log())
            loss = -(drawn * torch.nn.functional.logsigmoid(reward[:, None] - reward)).sum()
        else:
            loss = -(log_p.exp() * (q - weight * (log_p - p.log()))).sum()
        loss.backward()
        return loss

    optimizer.step(objective)
    ended = closed_form.closed_form(method, weight, p.numpy()[None], q.numpy()[None])
    assert ended[0] == pytest.approx(logits.softmax(0).detach().numpy(), abs=1e-5)
    assert np.abs(ended[0] - p.numpy()).max() > 0.05


@pytest.mark.slow
def test_the_closed_form_from_the_world_to_tables(tmp_path, capsys, forked):
    seed, names = 10, {'base', 'sft', 'pairs', 'own', 'brier-base', 'rlcr-own', 'ppo-0.05-lora',
                       'cdpo-noisy'}
    write_world(f'{alignment.seed_folder(seed, tmp_path)}/world', seed, SMALL_ALIGNMENT,
                alignment.make_rows)
    jobs = list(small_alignment_jobs(seed, tmp_path, names, side_by_side.closed_form_jobs))
    assert len(jobs) == len(names)
    failed = side_by_side.side_by_side(jobs, 2, 0, tmp_path)
    assert failed == [], capsys.readouterr().out
    closed_form.main([f'--runs={tmp_path}', f'--folder={tmp_path}/numbers'])
    assert {path.name for path in (tmp_path / 'numbers').iterdir()} == {
        'seed-10.csv', 'closed-form.md', 'closed-form.png'}
    folder = Path(alignment.seed_folder(seed, tmp_path))
    # each answer states the probability that the base model gives to it
    probs = {s['id']: dict(zip(map(str.strip, s['options']), np.exp(s['log_probs'])
                               / np.exp(s['log_probs']).sum(), strict=True))
             for s in read_samples(folder / 'base-knows' / 'samples.jsonl')}
    asked = {row['prompt']: row['id'] for row in closed_form.read_lines(
        folder / 'world' / 'prompts' / 'test.jsonl')}
    own = closed_form.read_lines(folder / 'pairs' / 'own.jsonl')
    for ask, answer in (row['messages'] for row in own):
        value, stated = re.fullmatch(alignment.STATED.format('(.*)', '(.*)'),
                                     answer['content']).groups()
        assert stated == f'{probs[asked[ask["content"]]][value]:.2f}'
    # the pairs are those of the first facts, a few of which are swapped
    pairs, noisy = (closed_form.read_lines(folder / 'pairs' / f'{name}.jsonl')
                    for name in ('all', 'noisy'))
    swapped = [a['chosen'] == b['rejected'] for a, b in zip(pairs, noisy, strict=True)]
    assert 0 < sum(swapped) < 20 and len(own) == len(noisy) == 48
    numbers = aligned.Numbers(tmp_path / 'numbers')
    # as beta grows, the closed form comes back to the model before alignment
    kl = [numbers.of(f'ppo-{weight}-expected', 'kl')[0] for weight in (0.0125, 0.05, 0.2)]
    assert kl == sorted(kl, reverse=True) and kl[-1] > 0
    # the implicit preference against a plain loop over log-probabilities, which need no norm
    (sft,), (cdpo,) = (read_run_samples(read_run(folder / name))[0].values()
                       for name in ('sft', 'cdpo-noisy'))
    rng, preference = np.random.default_rng([seed, 6]), 0
    for before, after in zip(sft, cdpo, strict=True):
        true, p = before['answer'], np.exp(before['log_probs'])
        p[true] = 0
        wrong = rng.choice(24, p=p / p.sum())
        change = np.subtract(after['log_probs'], before['log_probs'])
        preference += 1 / (1 + np.exp(-0.3 * (change[true] - change[wrong]))) / len(sft)
    assert preference != pytest.approx(0.5, rel=1e-3)
    assert numbers.of('cdpo-noisy', 'preference') == pytest.approx(preference, rel=1e-5)
    assert numbers.of('cdpo-noisy', 'margin') > 0 and numbers.of('cdpo-noisy', 'fitted') > 0.3
    assert 0.5 > numbers.of('cdpo-noisy', 'preference_ece') > 0
    assert np.isfinite(numbers.of('ppo-0.05-lora', 'kl')) and np.isnan(numbers.of('dpo-1.0', 'ece'))
    assert np.isfinite(numbers.of('brier-base', 'ece', task='qa'))


@pytest.mark.slow
def test_the_tables_and_figure_of_the_closed_form(tmp_path):
    """Made-up numbers: the true differences are found, and a missing run has none."""
    names = {Path(cfg.out_dir).name for cfg in closed_form.runs(10)} | {'sft'} | {
        closed_form.name_of(*each, '-expected') for each in closed_form.WEIGHTED}
    for seed in alignment.SEEDS:
        random, lines = np.random.default_rng(seed), []
        for name in sorted(names - {'dpo-1.0-lora'}):
            weight = float((re.findall(r'-(\d[\d.]*)', name) or ['1'])[0])
            kl = 0.1 / weight
            values = {'kl': kl, 'reward': 0.2 + kl, 'margin': math.log(4) + (name == 'dpo-noisy'),
                      'ece': 0.05 + kl / 20 + 0.02 * ('lora' in name and 'ppo' in name)
                      + random.normal(scale=1e-4), 'preference_ece': kl}
            values['auroc'] = 0.6 + random.normal(scale=1e-3)
            lines += [dict.fromkeys((*alignment.COLUMNS, *closed_form.PAIR_COLUMNS), 0.1) | values
                      | {'run': name, 'epoch': 3, 'seed': seed, 'task': task, 'scaling': 'none'}
                      for task in ('chat', 'qa', 'qa.stated', 'qa.answer_span')]
        (tmp_path / f'seed-{seed}.csv').write_text(csv_text(lines))
    closed_form.main([f'--folder={tmp_path}'])
    text = (tmp_path / 'closed-form.md').read_text()
    found = dict(re.findall(r'\| (.*?) \| ([-+]\d\.\d+ ± .*?|none.*?) \|', text))
    assert found['ECE of Dr. GRPO, 0.05 - expected'].startswith(('+0.000 ±', '-0.000 ±'))
    assert found['ECE of DPO, 0.1 - 1.0'].startswith('+0.045 ± 0.000')
    assert found['margin of DPO - log 4'].startswith('+1.000')
    assert found['AUROC of RLCR, stated - 0.5'].startswith('+0.100')
    assert found['ECE of DPO, LoRA - full weights, at equal KL'] == 'none for 5 of 5 seeds'
    assert found['tau of preference ECE and ECE of answers'] == 'none for 5 of 5 seeds'
    assert (tmp_path / 'closed-form.png').exists()


@pytest.mark.parametrize('makes, n, digest, new_digest', [
    ((alignment.base_runs, alignment.runs), 19, 'e12679ac42c7', 'bdaebb1c1276'),
    ((closed_form.runs,), 20, '352727304051', '69d33e4b9f8b')])
def test_the_plan_of_alignment_has_settings_that_were_fixed(makes, n, digest, new_digest):
    cfgs = [cfg for seed in alignment.SEEDS for make in makes for cfg in make(seed)]
    assert len({cfg.out_dir for cfg in cfgs}) == len(cfgs) == 5 * n
    assert settings_digest([*cfgs, alignment.WORLD]) == new_digest
    all_settings = [asdict(cfg) for cfg in cfgs] + [asdict(alignment.WORLD)]
    for values in all_settings:     # keys that were added since have their defaults
        for key, default in (('resample', 0), ('soft_overlong', 0), ('run_code', False)):
            assert values.pop(key, default) == default
        for key in ('p_ik', 'shard') if values.get('eval') else ():
            assert values['eval'].pop(key) == getattr(EvalConfig, key)
    text = json.dumps(all_settings)
    assert hashlib.sha256(text.encode()).hexdigest()[:12] == digest
    for cfg in cfgs:
        if isinstance(cfg, AlignConfig):
            check_align_config(cfg)
        check_config(cfg)


def test_differences_at_equal_accuracy():
    reference = np.array([[0.4, 0.5, 0.6], [0.3, 0.2, 0.0]])
    assert frontier.at_equal_accuracy(reference - [[0], [0.01]], reference) == pytest.approx(-0.01)
    half = np.array([[0.5, 0.6], [0.1, 0.0]])       # both reach 0.5 to 0.6: 0.1 less, then equal
    assert frontier.at_equal_accuracy(half, reference) == pytest.approx(-0.05)
    apart = np.array([[0.6, 0.7], [0.1, 0.0]])
    assert math.isnan(frontier.at_equal_accuracy(apart, reference))
    assert math.isnan(frontier.at_equal_accuracy(np.full((2, 3), np.nan), reference))


def test_holm_multiplies_the_smallest_p_by_the_number_of_tests():
    # Holm 1979: the smallest p times 4, the next times 3, ..., never less than the one before
    assert frontier.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert frontier.holm([0.6, 0.5]) == pytest.approx([1, 1])
    assert frontier.p_of(np.array([0.1, np.nan, 0.1])) == 1


def test_the_interval_of_a_ratio_ends_where_a_t_test_does():
    x, y = np.random.default_rng(1).normal([[3.0], [2.0]], 0.3, (2, 5))
    low, high = frontier.ratio_interval(x, y)
    assert low < x.mean() / y.mean() < high
    for end in (low, high):
        assert student_t(x - end * y)[2] == pytest.approx(0.05, abs=1e-6)
    assert frontier.ratio_interval(x, y - y.mean()) is None


@pytest.mark.parametrize('script', [
    path for path in sorted((HERE / 'research' / 'study').glob('*.py'))
    if "__name__ == '__main__'" in path.read_text()], ids=lambda path: path.name)
def test_every_script_has_help_and_refuses_unknown_options(script, monkeypatch, capsys):
    for option, printed in (('--help', 'usage: '), ('--no_such_option', 'no_such_option')):
        monkeypatch.setattr(sys, 'argv', [str(script), 'folder', option])
        with pytest.raises(SystemExit):
            runpy.run_path(str(script), run_name='__main__')
        assert printed in ''.join(capsys.readouterr())
