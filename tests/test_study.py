"""The study: its runs, worlds, tables and figures, and small studies from end to end."""

import functools
import hashlib
import itertools
import json
import math
import os
import re
import runpy
import sys
from dataclasses import is_dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from common import HERE, llama_config, log_of, recorded, results_of, write_run

import metrics
import model as models
from compare import scaling
import stats
import world
from results.report import predictions
from compare.runs import read_run
from results.samples import read_samples
from research import common
from research.study import (alignment_tables, claims, closed_form, coverage, effects, entropy_range,
                            figures, loss_tables, metrics_agree, runs, side_by_side)
from research.study.world import StudySpec, make_world
from scripts import FORKS
from train import check_config, training_loss

STUDY = HERE / 'research' / 'study'


# The settings of all runs

DEFAULTS = json.loads((STUDY / 'defaults.json').read_text())
ROWS = {384: 36, 96: 11, 64: 4}     # {batch_size: micro_rows, which changes rounding alone}


def settings(config):
    """Return {key: value} of what differs from the defaults when the study was made.

    A key that the program has got since must have its default of today.
    """
    recorded, today, different = DEFAULTS[type(config).__name__], type(config)(), {}
    for key, value in vars(config).items():
        if key not in recorded:
            assert value == getattr(today, key), key
            continue
        if key == 'micro_rows' and value is None:
            value = ROWS[config.batch_size]
        value = json.loads(json.dumps(settings(value) if is_dataclass(value) else value))
        if value != recorded[key]:
            different[key] = value
    return different


def digest(configs):
    text = json.dumps([settings(config) for config in configs], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def configs(experiments):
    return [cfg for name in experiments for seed in runs.seeds_of(name)
            for cfg in runs.EXPERIMENTS[name](seed)]


def test_every_run_has_the_settings_it_was_made_with():
    """research/study/runs.csv is of the 685 runs behind the numbers of claims 1 to 6."""
    recorded = {row['out_dir']: row['digest'] for row in claims.read_csv(STUDY / 'runs.csv')}
    assert len(recorded) == 685
    assert recorded == {cfg.out_dir: digest([cfg]) for cfg in configs(runs.EXPERIMENTS)
                        if cfg.out_dir in recorded}
    assert digest([runs.WORLD, runs.VOCABULARY_WORLD]) == '975063d37d7c'


def test_a_plan_has_the_settings_that_were_fixed():
    cfgs = configs(runs.LATER)
    assert digest(cfgs) == 'dc8e78719e09'
    assert len({cfg.out_dir for cfg in cfgs}) == len(cfgs) == 600
    for cfg in cfgs[:120]:
        check_config(cfg)
        training_loss(cfg)
    names = {Path(cfg.out_dir).name for cfg in cfgs}
    assert {choice.split()[0] for choice in loss_tables.CHOICES.values()} <= names


# Tables and figures from the committed numbers

@pytest.mark.slow
@pytest.mark.parametrize('figure', figures.FIGURES)
def test_a_figure_follows_from_its_committed_numbers(figure, tmp_path, monkeypatch):
    committed, drawn = STUDY / 'results' / figure, []
    for name in ('draw_means', 'draw_bins'):
        monkeypatch.setattr(figures, name, lambda path, *rest, **more: drawn.append(path))
    figures.draw(figure, tmp_path)
    for name in {path.name for path in committed.glob('*.csv')} | {'compare.md'}:
        assert (tmp_path / name).read_bytes() == (committed / name).read_bytes(), name
    assert {path.name for path in drawn} == {path.name for path in committed.glob('*.png')}


def test_the_page_of_effects_follows_from_the_committed_numbers():
    assert effects.page() == (STUDY / 'results' / 'effects.md').read_text()


@pytest.mark.slow
@pytest.mark.parametrize('script, titles', [
    (loss_tables, [f'{i}. ' for i in range(7, 12)]), (alignment_tables, ['13. ', '14. ']),
    (closed_form, ['15. '])])
def test_the_tables_of_a_claim_follow_from_the_committed_numbers(script, titles):
    """They are also those of STUDY.md."""
    numbers = script.CLAIMS.numbers()
    sections = (STUDY / 'STUDY.md').read_text().split('\n## ')
    sections = [text for text in sections if text.startswith(tuple(titles))]
    for name, text in zip(script.CLAIMS.pages, sections, strict=True):
        made = script.CLAIMS.page(name, numbers)
        assert made == (script.CLAIMS.folder / f'{name}.md').read_text()
        cells = set(re.findall(r'(?<=\| )[-+]?0\.\d{3} ± [^|]*(?= \|)', text))
        assert len(cells) > 10 and {cell for cell in cells if cell not in made} == set(), name


def test_means_of_two_seeds_are_drawn_without_whiskers():
    assert claims.mean_and_ends([1.0, 3.0]) == [2.0, 2.0, 2.0]
    assert claims.mean_and_ends([1.0, 2.0, 3.0]) == pytest.approx((2.0, -0.484138, 4.484138))


def test_bins_of_two_runs_are_those_of_their_questions_together(tmp_path):
    both = [read_run(write_run(tmp_path / f'seed-{seed}', seed=seed)) for seed in (0, 1)]
    together = figures.pool_bins(list(figures.bins_of(both).values()))
    samples = [s for run in both for s in read_samples(run.folder / 'samples.jsonl')]
    p = predictions(samples, 'token')
    expected = metrics.bins(p.probs, p.labels)
    assert together['count'].sum() == 80
    for key in ('low', 'high', 'count'):
        assert np.allclose(together[key], expected[key], equal_nan=True)


def test_a_ratio_to_what_may_be_0_has_no_interval():
    x, y = np.random.default_rng(1).normal([[3.0], [2.0]], 0.3, (2, 5))
    assert loss_tables.ratio_interval(x, y - y.mean()) is None


# A small study from worlds to tables

SMALL_WORLD = replace(
    runs.WORLD, entities=500, unseen=20, first_names=40, family_names=40, documents=300,
    tokenizer_documents=300, vocab_sizes=(700,), instructions=80, questions=12,
    unseen_questions=6, validation=12, probes=10)


def small(cfg):
    """Return the settings of a run with few steps, which is not compiled."""
    if cfg.from_scratch:
        more = {'shape': runs.llama(32, 64, 1, 2), 'micro_rows': 4, 'batch_size': 64}
    else:
        more = {'batch_size': 16, 'max_steps': 3, 'val_size': min(8, cfg.val_size)}
    return replace(cfg, workers=1, eval=replace(cfg.eval, pack_len=512), compile=False,
                   attention='explicit', **more)


@pytest.mark.slow
def test_a_small_study_runs_from_worlds_to_tables(tmp_path, monkeypatch):
    """A base model and two models tuned from it, with fewer steps and rows."""
    def few(experiment, seed, root):
        for cfg in map(small, experiment(seed, root)):
            tasks = tuple(task for task in cfg.eval.tasks if task.endswith('/text4'))
            yield replace(cfg, pictures=False, eval=replace(cfg.eval, tasks=tasks, n_bootstrap=10))
    for name in ('base', 'smoothing'):
        monkeypatch.setitem(runs.EXPERIMENTS, name, functools.partial(few, runs.EXPERIMENTS[name]))
    monkeypatch.setattr(runs, 'WORLD', SMALL_WORLD)
    monkeypatch.setattr(figures, 'draw_means', lambda path, *rest: path.write_bytes(b'png'))
    for name, only in (('base', 'base'), ('smoothing', 'tuned-smoothing0.0-lr0.0008,'
                                                       'tuned-smoothing0.1-lr0.0008')):
        monkeypatch.setattr('sys.argv', ['runs.py', name, '--seeds=1', f'--only={only}',
                                         f'--out_dir={tmp_path}'])
        runs.main()
    table = (tmp_path / 'smoothing' / 'compare.md').read_text().splitlines()
    assert table[0].startswith('| task | smoothing | seeds | ECE |')
    assert [row.split(' | ')[1:3] for row in table[2:4]] == [['0.0', '1'], ['0.1', '1']]

    folder = tmp_path / 'base' / 'seed-1' / 'base'
    entropy_range.measure(folder, 1)
    figures.draw('temperature', tmp_path / 'temperature', tmp_path)
    lines = claims.read_csv(tmp_path / 'temperature' / 'compare.csv')
    line = next(r for r in lines if (r['kind'], r['seed'], r['language'], r['category'],
                                     r['scaling']) == ('base', '1', 'l2', 'seen', 'temperature'))
    samples = [s for s in read_samples(folder / 'samples.jsonl') if s['task'] == 'text4']
    held = predictions([s for s in samples if s['split'] == 'validation'], 'token')
    scored = predictions([s for s in samples if s['split'] == 'test'
                          and (s['language'], s['category']) == ('l2', 'seen')], 'token')
    temperature = scaling.fit_temperature(held.scores, held.labels)
    assert len(held.labels) == 12
    assert float(line['temperature']) == pytest.approx(temperature, rel=1e-4)
    assert float(line['ece']) == pytest.approx(
        metrics.ece(metrics.softmax(scored.scores, temperature), scored.labels), rel=1e-4)

    measured = json.loads((folder / 'entropy_range.json').read_text())
    assert {line['reach_lowest_bits'] for line in figures.run_lines(read_run(folder))} == {
        float(f'{measured["lowest_bits"]:.5g}')}


@pytest.mark.slow
def test_the_entropy_range_equals_the_closed_form():
    model = models.CausalLM(llama_config(vocab_size=8, hidden_size=8, num_hidden_layers=1))
    with torch.no_grad():
        model.lm_head.weight.copy_(2 * torch.eye(8))

    def entropy(gap):
        """Return (bits, probability) where one logit exceeds the seven others by `gap`."""
        p = 1 / (1 + 7 * math.exp(-gap))
        return -p * math.log2(p) - (1 - p) * math.log2((1 - p) / 7), p

    measured = entropy_range.entropy_range(model, 8, n_tokens=8)
    # the surest state puts all of its length sqrt(8) into one direction, or a little against the
    # others: logits a for one and b for the others, a^2 + 7 b^2 = 4 * 8
    a = np.linspace(0, 32 ** 0.5, 100_001)
    bits, p = entropy((a + np.sqrt(np.maximum(32 - a ** 2, 0) / 7)).max())
    assert measured['lowest_bits'] == pytest.approx(bits, abs=1e-3)
    assert measured['lowest_nll_bits'] == pytest.approx(-math.log2(p), abs=1e-3)
    assert measured['highest_bits'] == pytest.approx(3, abs=1e-3) and measured['log2_vocab'] == 3
    model.config.final_logit_softcapping = 1.0
    capped = entropy_range.entropy_range(model, 8, n_tokens=8)['lowest_bits']
    assert capped > max(entropy(2)[0], measured['lowest_bits'])     # at best logits of 1 and -1


# Jobs side by side

def test_a_job_needs_what_an_earlier_one_makes():
    jobs, made = side_by_side.jobs_of('smoothing', None, 'out/study'), set()
    for job in jobs:
        for file in map(Path, job.needs):
            assert {file, *file.parents} & made, (job.name, file)
        made |= {job.makes, Path(job.name)}
    assert len(jobs) == 26


@pytest.mark.slow
def test_a_failed_run_does_not_stop_those_side_by_side(tmp_path, capsys, monkeypatch):
    """Two processes: a world's base models, what they know, tuned models; then the numbers."""
    # which need not load torch anew
    monkeypatch.setattr(side_by_side, 'multiprocessing',
                        SimpleNamespace(get_context=lambda kind: FORKS))
    names = {'world', 'base', 'tuned-crossentropy-lr0.0008', 'tuned-gce0.7-lr0.0008',
             'lora-dft-lr0.0032', 'base-known-dft', 'tuned-dft-lr0.0008'}
    jobs = [job._replace(arguments=(small(job.arguments[0]),))
            if hasattr(job.arguments[0], 'batch_size') else job for job in side_by_side.jobs_of(
                'losses', [5], str(tmp_path)) if Path(job.name).name in names]
    assert len(jobs) == 7 + 1       # the job `base` of `knows` says what that model knows
    jobs[0] = jobs[0]._replace(arguments=(f'{tmp_path}/base/seed-5/world', 5, SMALL_WORLD))
    (bad,) = (i for i, job in enumerate(jobs) if job.name.endswith('tuned-dft-lr0.0008'))
    jobs[bad] = jobs[bad]._replace(arguments=(replace(jobs[bad].arguments[0], lr=-1.0),))
    failed = side_by_side.side_by_side(jobs, folder=tmp_path, n_processes=2, gpus=0)
    printed = capsys.readouterr().out
    assert [Path(name).name for name in failed] == ['tuned-dft-lr0.0008']
    assert 'failed: ConfigError: lr = -1.0' in printed and '8/8' in printed
    assert sum(job.makes.exists() for job in jobs) == len(jobs) - 1

    knows = tmp_path / 'knows' / 'seed-5'
    samples = read_samples(knows / 'base' / 'samples.jsonl')
    p = predictions(samples, 'token')
    right = {s['id'] for s, yes in zip(samples, p.probs.argmax(1) == p.labels, strict=True) if yes}
    rows = common.read_lines(tmp_path / 'base' / 'seed-5' / 'world' / 'instruct-homogeneous.jsonl')
    chosen = {data: {str(rows.index(row)) for row in common.read_lines(
        knows / f'base-{data}.jsonl')} for data in runs.KNOWN_DATA}
    assert {len(numbers) for numbers in chosen.values()} == {2 * (len(right) // 2)}
    assert chosen['known'] <= right and not right & chosen['unknown']
    assert len(right & chosen['half']) == len(right) // 2

    loss_tables.CLAIMS.main('', [f'--runs={tmp_path}', f'--folder={tmp_path}/numbers'])
    numbers = loss_tables.CLAIMS.numbers(tmp_path / 'numbers')
    assert len({run for _, run, *_ in numbers.lines}) == 5
    results = results_of(tmp_path / 'losses' / 'seed-5' / 'tuned-gce0.7-lr0.0008')
    pooled = results['tasks']['text4']['pooled']
    assert numbers.of('tuned-gce0.7-lr0.0008', 'ece') == pytest.approx(pooled['ece'], rel=1e-4)
    assert numbers.of('base', 'accuracy', task='base') == len(right) / len(p.labels)
    steps = log_of(tmp_path / 'transfer' / 'seed-5' / 'lora-dft-lr0.0032')
    for task, nll in (('held out', steps[-1]['val_nll']),
                      ('trained', np.mean([step['nll'] for step in steps]))):
        assert numbers.of('lora-dft-lr0.0032', 'nll', task=task) == pytest.approx(nll, rel=1e-4)


# How metrics agree

def test_the_agreement_of_metrics_follows_from_the_committed_numbers():
    """tau to all digits; the intervals are of resamples: only the first, for time."""
    rows = claims.read_csv(metrics_agree.RESULTS / 'metrics_agree' / 'agree.csv')
    expected = {(x['task'], frozenset((x['a'], x['b']))): (x['runs'], x['tau']) for x in rows}
    values, binned = metrics_agree.committed()
    first = metrics_agree.kendall(
        *metrics_agree.table_of(values[rows[0]['task']], (rows[0]['a'], rows[0]['b'])))
    assert [f'{x:.5f}' for x in first[:3]] == [rows[0][key] for key in ('tau', 'low', 'high')]
    assert np.isnan(metrics_agree.kendall(np.ones(4), np.arange(4.0), 10)[:3]).all()
    found = {}
    for task, numbers in values.items():
        keys, (tau, _, _, n_runs) = metrics_agree.agreements(numbers, 1)
        found |= {(task, frozenset((keys[i], keys[j]))): (f'{n_runs[i, j]:.0f}', f'{tau[i, j]:.5f}')
                  for i, j in itertools.combinations(range(len(keys)), 2)}
    assert found == expected
    # bins.csv numbers its bins from 0
    for name, bins in figures.read_bins(metrics_agree.RESULTS / 'headline' / 'bins.csv').items():
        gaps = bins['count'] * (bins['accuracy'] - bins['confidence'])
        pairs = np.abs(gaps[::2] + gaps[1::2]).sum() / bins['count'].sum()
        assert binned[name[3]][name[0], name[2]][5] == pytest.approx(pairs, abs=1e-12)
    # ten bins, from counts and means to five digits, give the ECE that the tables state
    for task, eces in binned.items():
        for run, ece in eces.items():
            if run in values[task]:
                assert ece[10] == pytest.approx(values[task][run]['ece'], abs=2e-5)


# Intervals

@pytest.mark.parametrize('kind, error, x', coverage.MODELS[:5])
def test_the_models_behind_the_coverage_have_the_error_that_they_state(kind, error, x):
    """Too confident everywhere, so the ECE is the mean confidence minus that of the truth."""
    (probs, labels), = coverage.draw(50_000, 1, (kind, x))
    truth = metrics.softmax(np.log(probs) / x)
    assert probs.max(1).mean() - truth.max(1).mean() == pytest.approx(error, abs=2e-3)
    right = truth[np.arange(50_000), labels]
    assert right.mean() == pytest.approx((truth ** 2).sum(1).mean(), abs=4e-3)


def test_coverage_counts_the_intervals_that_hold_the_truth(monkeypatch):
    for name, value in (('SIZES', [200]), ('N_SETS', 6), ('N_RESAMPLES', 20), ('MANY', 4000)):
        monkeypatch.setattr(coverage, name, value)
    model = 'too confident', 0.06, 1.274
    true = metrics.ece(*coverage.draw(4000, 2, model[::2])[0])
    ends = [stats.interval(metrics.ece, *coverage.draw(200, [200, seed], model[::2])[0],
                           n_resamples=20, seed=seed) for seed in range(6)]
    (line,) = coverage.coverage(*model)
    assert line[6] == f'{np.mean([low <= true <= high for low, high in ends]):.2f}'


# Generated worlds

TINY = {'entities': 40, 'documents': 60, 'instructions': 12, 'questions': 10,
        'vocab_sizes': (400,), 'tokenizer_documents': 60}
WHOLE = {'entities': 60, 'unseen': 9, 'documents': 90, 'exam_share': 0.2, 'paraphrases': True,
         'language_shares': (0.5, 0.3, 0.2), 'vocab_sizes': (420, 440), 'tokenizer_documents': 90,
         'instructions': 15, 'questions': 10, 'unseen_questions': 4, 'validation': 5,
         'forms': ('text4', 'letters10'), 'probes': 6}


@pytest.mark.parametrize('make, spec, n_files, digest', [
    (world.make_world, world.WorldSpec(**TINY), 6, '051c643fb74aa8ee9ed005a25c044f91'),
    (make_world, StudySpec(**TINY), 6, '5d6bdf27bf814a4a725db35f186d7d07'),
    (make_world, StudySpec(**WHOLE), 15, '660b48f5f869653325ea46655f2b8712')])
def test_worlds_stay_byte_for_byte(tmp_path, make, spec, n_files, digest):
    """Committed results are of these bytes; sentencepiece's own, tokenizer.model, may change."""
    make(tmp_path / 'world', 7, spec)
    files = sorted(path for path in (tmp_path / 'world').rglob('*') if path.is_file())
    content = hashlib.sha256()
    for path in files:
        if path.name != 'tokenizer.model':
            content.update(f'{path.relative_to(tmp_path / "world")}\n'.encode())
            content.update(path.read_bytes())
    assert len(files) == n_files and content.hexdigest().startswith(digest)


def test_a_world_is_made_once_and_replaces_another(tmp_path, monkeypatch):
    """It replaces no temporary file and writes through no link."""
    spec, folder, victim = world.WorldSpec(**TINY), tmp_path / 'world', tmp_path / 'victim'
    world.make_world(folder, 7, spec)
    made = {path: (path.stat().st_mtime_ns, path.read_bytes())
            for path in folder.rglob('*') if path.is_file()}
    world.make_world(folder, 7, spec)
    assert all(path.stat().st_mtime_ns == time for path, (time, _) in made.items())
    (folder / 'world.json').write_text('{\n "seed": 8')      # of another world
    victim.write_text('mine')
    (folder / 'questions.jsonl').unlink()
    (folder / 'questions.jsonl.tmp').write_text('mine')
    (folder / 'instruct.jsonl').unlink()
    for name in ('text.jsonl.tmp', 'instruct.jsonl'):
        (folder / name).symlink_to(victim)
    replaced = recorded(monkeypatch, os, 'replace', lambda source, target: Path(target).name)
    world.make_world(folder, 7, spec)
    assert replaced[-1] == 'world.json' and len(replaced) == len(made)
    assert all(path.read_bytes() == content for path, (_, content) in made.items())
    assert (folder / 'questions.jsonl.tmp').read_text() == victim.read_text() == 'mine'
    assert (folder / 'text.jsonl.tmp').is_symlink() and not (folder / 'instruct.jsonl').is_symlink()


# Command lines

@pytest.mark.parametrize('script', [path for path in sorted(STUDY.glob('*.py')) if (
    "__name__ == '__main__'" in path.read_text())], ids=lambda path: path.name)
def test_every_script_has_help(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', [str(script), '--help'])
    with pytest.raises(SystemExit):
        runpy.run_path(str(script), run_name='__main__')
    assert 'usage: ' in capsys.readouterr().out


@pytest.mark.parametrize('name', ['real', 'real-second'])
def test_the_tables_of_the_real_model_are_those_of_its_runs(name, tmp_path, monkeypatch, capsys):
    published = STUDY / 'results' / name
    (tmp_path / 'runs.csv').write_bytes((published / 'runs.csv').read_bytes())
    monkeypatch.setattr(sys, 'argv', ['real_table.py', '--csv', f'--out_dir={tmp_path}'])
    runpy.run_path(str(STUDY / 'real_table.py'), run_name='__main__')
    assert (tmp_path / 'tables.md').read_text() == (published / 'tables.md').read_text()
