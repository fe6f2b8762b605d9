"""readings.py: what its world asks, a small one from end to end, and its committed table."""

from dataclasses import replace

import numpy as np
import pytest

from common import HERE
from results.samples import read_samples
from research.study import common, readings
from research.study.claims import read_csv

SMALL = replace(readings.WORLD, entities=40, documents=90, vocab_sizes=(700,), instructions=30,
                tokenizer_documents=90, questions=8, first_names=10, family_names=10)


def read_rows(path):
    return [{key: value if key in ('reading', 'model') else float(value)
             for key, value in row.items()} | {'shots': int(row['shots'])}
            for row in read_csv(path)]


@pytest.mark.slow
def test_a_small_study_of_readings_from_end_to_end(tmp_path, monkeypatch):
    of_study = readings.runs
    monkeypatch.setattr(readings, 'WORLD', SMALL)
    monkeypatch.setattr(readings, 'runs', lambda *args: (
        replace(cfg, max_steps=2, workers=1) for cfg in of_study(*args)))
    readings.main((1,), tmp_path, tmp_path)
    rows = read_rows(tmp_path / 'readings.csv')
    assert len({tuple(row[key] for key in ('reading', 'shots', 'model', 'seed'))
                for row in rows}) == len(rows) == 5 * 2 * 2
    assert (tmp_path / 'readings.md').read_text() == readings.table(rows)
    folder = f'{common.seed_folder("readings", 1, tmp_path)}/tuned'
    for row in rows:
        if row['model'] == 'tuned' and row['seed'] == 1:
            assert row['entropy_bits'] == pytest.approx(entropy_by_hand(folder, row), abs=2e-5)


def entropy_by_hand(folder, row):
    """Return the mean entropy in bits of a reading, from the log-probabilities of its samples."""
    options, scoring, norm = readings.READINGS[row['reading']]
    bits = []
    for sample in read_samples(f'{folder}/{options}-{scoring}-{row["shots"]}/samples.jsonl'):
        assert sample['shots'] == row['shots']
        assert (sample['options'] == [' A', ' B', ' C', ' D']) == (row['reading'] == 'letters')
        p = np.exp(np.divide(sample['log_probs'], sample['n_tokens'] if norm == 'token' else 1))
        p /= p.sum()
        bits.append(-(p * np.log2(p)).sum())
    return np.mean(bits)


def test_the_committed_table_follows_from_the_committed_numbers():
    folder = HERE / 'research' / 'study' / 'results' / 'readings'
    rows = read_rows(folder / 'readings.csv')
    assert readings.table(rows) == (folder / 'readings.md').read_text()
    keys = [tuple(row[key] for key in ('reading', 'shots', 'model')) for row in rows]
    assert {keys.count(key) for key in keys} == {3} and len(set(keys)) == 20
