"""compare/scaling.py: each scaling finds what was done to the scores, and refuses no scores."""

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from common import by_transformers, exactly, reference_model, refused
from safetensors.torch import load_file

import metrics
from compare import scaling
from bridges import fold


def test_platt_scaling_recovers_what_was_applied():
    rng = np.random.default_rng(0)
    confidence = metrics.softmax(3 * rng.normal(size=(20000, 4))).max(1)
    right = rng.random(20000) < scaling.apply_platt(confidence, 0.7, -0.3)
    assert scaling.fit_platt(confidence, right) == pytest.approx((0.7, -0.3), abs=0.05)
    assert all(map(math.isfinite, scaling.fit_platt([0.9, 1.0], [True, True])))
    # Platt's targets of 3 right rows and 1 wrong one are 4/5 and 1/3
    few = scaling.fit_platt([0.5] * 4, [True, True, True, False])
    assert scaling.apply_platt([0.5], *few) == pytest.approx((3 * 4 / 5 + 1 / 3) / 4)


def test_vector_histogram_and_isotonic_scaling_fit_what_was_applied():
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(6000, 3)) * 2
    scores[::4, 2] = -np.inf
    bias = np.array([0.8, -0.3, 0.0])
    labels = (scores * [0.5, 1.0, 2.0] + bias + rng.gumbel(size=scores.shape)).argmax(1)
    w, b = scaling.fit_vector(scores, labels)
    assert w == pytest.approx([0.5, 1.0, 2.0], rel=0.15)
    assert b - b[2] == pytest.approx(bias, abs=0.2)
    probs = scaling.apply_vector(scores, w, b)
    assert probs.sum(1) == pytest.approx(1) and (probs[::4, 2] == 0).all()
    assert metrics.nll(probs, labels) < metrics.nll(metrics.softmax(scores), labels)
    c = metrics.softmax(scores).max(1)
    right = rng.random(len(c)) < c ** 2
    values = scaling.fit_histogram(c, right, 10)
    assert metrics.ece(scaling.apply_histogram(c, values), right, 1000) < 0.01
    assert values[0] == exactly(0.05)       # an empty bin
    x, y = scaling.fit_isotonic(c, right)
    fitted = scaling.apply_isotonic(c, x, y)
    assert (np.diff(y) >= 0).all() and (np.diff(x) > 0).all()
    assert np.abs(fitted - c ** 2).mean() < 0.03 and fitted.mean() == pytest.approx(right.mean())
    x, y = scaling.fit_isotonic([0.1, 0.2, 0.3, 0.4, 0.4], [True, False, False, True, False])
    assert scaling.apply_isotonic([0.05, 0.1, 0.3, 0.35, 0.4, 0.9], x, y) == pytest.approx(
        [1 / 3, 1 / 3, 1 / 3, 5 / 12, 1 / 2, 1 / 2])


def test_a_prior_is_the_mean_prediction_and_divides_the_probabilities():
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(50, 3)) + [2, 0, -1]
    scores[::4, 2] = -np.inf
    p = metrics.softmax(scores)
    prior = np.array([p[:, 0].mean(), p[:, 1].mean(), p[np.isfinite(scores[:, 2]), 2].mean()])
    assert scaling.fit_prior(scores) == pytest.approx(np.log(prior))
    rows = rng.dirichlet([1, 1, 1], size=50)
    for each in (prior, rows):
        ratios = p / each
        assert scaling.apply_prior(scores, np.log(each)) == pytest.approx(
            ratios / ratios.sum(1, keepdims=True))
    assert scaling.fit_prior([[0.0, -np.inf]]).tolist() == [0, np.log(0.5)]     # no row has it
    with pytest.raises(ValueError, match='log_prior must be .K. or .N, K. like scores'):
        scaling.apply_prior(scores, [0.0, 0.0])


def test_the_normalized_maximum_is_its_definition_for_any_shift_and_scale():
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(40, 5)) * 10
    scores[::3, 3:] = -np.inf
    finite = np.where(np.isfinite(scores), scores, np.nan)
    z = finite - np.nanmean(finite, 1, keepdims=True)
    for p in (0.5, 1, 2, 7.0):
        expected = np.nanmax(z, 1) / np.nansum(abs(z) ** p, 1) ** (1 / p)
        for x in (scores, 1e200 * scores, scores + 5):
            assert scaling.normalized_max(x, p) == pytest.approx(expected)
    assert scaling.normalized_max([[3.0, 3.0]]).tolist() == [0]
    for wrong, message in (([[0.0, np.nan]], 'option 1 is nan'), ([[-np.inf]], 'no score is')):
        with pytest.raises(ValueError, match=message):
            scaling.normalized_max(wrong)


def test_multicalibration_leaves_no_cell_off_and_mends_groups_that_others_hide():
    rng = np.random.default_rng(0)
    n, groups = 8000, np.stack([rng.integers(0, 2, 16000), rng.integers(0, 5, 16000)], 1)
    c = 0.3 + 0.6 * rng.random(16000)
    right = rng.random(16000) < c + np.where(groups[:, 0], 0.1, -0.1)   # calibrated, pooled
    shifts = scaling.fit_multicalibration(c[:n], right[:n], groups[:n])
    fitted = scaling.apply_multicalibration(c, groups, shifts)
    bins = np.minimum(np.ceil(fitted[:n] * 10), 10)
    for names in (np.zeros(n), *groups[:n].T):
        for cell in {*zip(names, bins, strict=True)}:
            rows = (names == cell[0]) & (bins == cell[1])
            k, m = right[:n][rows].sum(), rows.sum()
            p = (k + 1) / (m + 2)
            assert abs(k - fitted[:n][rows].sum()) <= 3 * math.sqrt(m * p * (1 - p)) + 1e-9
    before, after = (metrics.worst_group_ece(x[n:], right[n:], groups[n:, 0]) for x in (c, fitted))
    assert before[0] > 0.08 and after[0] < 0.03 and before[1] in (0, 1)
    assert before[0] == max(metrics.ece(c[n:][rows], right[n:][rows])
                            for rows in (groups[n:, 0] == 0, groups[n:, 0] == 1))
    assert np.isnan(metrics.worst_group_ece(c[:99], right[:99], ['a'] * 99)[0])
    with pytest.raises(ValueError, match='groups must be int .N, J., N = 2'):
        scaling.fit_multicalibration([0.5, 0.5], [0, 1], [[0.0], [1.0]])


def test_ties_and_edges_are_those_of_the_metrics():
    c = np.float32([0.1, 0.1, 0.15])        # float32's 0.1 is above the float64 one
    values = scaling.fit_histogram(c, [True, True, False], 10)
    assert scaling.apply_histogram(c, values).tolist() == [1, 1, 0]
    assert scaling.fit_isotonic([0.6 - 5e-17, 0.6 + 1.2e-16], [True, False]) == ([0.6], [0.5])
    assert len(scaling.fit_isotonic([0.6, 0.6 + 2e-12], [False, True])[0]) == 2


@pytest.mark.parametrize('call, message', [
    *((lambda fit=fit: fit([0.5, 2.0], [1, 1]), 'row 1: confidence is 2.0, not from 0 to 1')
      for fit in (scaling.fit_platt, scaling.fit_histogram, scaling.fit_isotonic)),
    (lambda: scaling.fit_vector([[1.0, 2.0]], [0], 0), r'ridge must be a number in \(0, inf'),
    (lambda: scaling.apply_isotonic([0.5], [0.6, 0.4], [0.1, 0.2]), 'x ascending'),
    (lambda: scaling.fit_temperature([[0.0, math.nan]], [1]), 'row 0: the score of option 1 is'),
    (lambda: scaling.fit_temperature([[0.0, -math.inf]], [1]), 'row 0: label 1 is not'),
    *((lambda a=a, b=b: scaling.fit_temperature_to_base(a, b), message) for a, b, message in (
        ([[1.0, 0.0]], [[0.0, 1.0]], 'no prediction in common'),
        ([[1.0, -np.inf]], [[1.0, 0.0]], 'row 0: option 1 has the score -inf, and 0.0 of the')))])
def test_settings_and_scores_out_of_range_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_temperature_to_base_is_that_of_least_divergence_where_the_models_agree():
    """DACA by its definition, on a grid: without labels, and without the changed predictions."""
    rng = np.random.default_rng(0)
    base = rng.normal(size=(200, 4))
    tuned = 2.5 * base + 1.5 * rng.normal(size=(200, 4))
    base[:50, 3] = tuned[:50, 3] = -np.inf
    same = base.argmax(1) == tuned.argmax(1)
    assert 60 < same.sum() < 195

    def divergence(t, rows):
        p, q = metrics.softmax(base[rows]), metrics.softmax(tuned[rows] / t)
        return (p * np.log(np.where(p > 0, p, 1) / np.where(p > 0, q, 1))).sum()
    t = scaling.fit_temperature_to_base(tuned, base)
    assert np.argmin([divergence(t * x, same) for x in np.geomspace(1 / 1.1, 1.1, 21)]) == 10
    # a tuned model that is only sharper is brought back exactly
    assert scaling.fit_temperature_to_base(3 * base, base) == pytest.approx(3, rel=1e-9)


def test_fits_travel_in_a_file(tmp_path):
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(300, 4)) * 3 - 50
    scores[::5, 3] = -np.inf
    labels = (scores / 2 + rng.gumbel(size=scores.shape)).argmax(1)
    confidence, correct = metrics.top_label(metrics.softmax(scores), labels)
    fits = {'vector': scaling.fit_vector(scores, labels), 'prior': [scaling.fit_prior(scores)],
            'temperature': [scaling.fit_temperature(scores, labels)],
            'platt': scaling.fit_platt(confidence, correct), 'isotonic': scaling.fit_isotonic(
                confidence, correct), 'histogram': [scaling.fit_histogram(confidence, correct)]}
    assert fits.keys() == scaling.SCALINGS.keys()
    path = tmp_path / 'scaling.json'
    scaling.save(path, {'mmlu': fits})
    for name, parameters in scaling.load(path)['mmlu'].items():
        function, _, of_scores = scaling.SCALINGS[name]
        values = scores if of_scores else confidence
        assert (scaling.apply(name, values, parameters) == function(values, *fits[name])).all()
    scaling.save(path, {'mmlu': {'platt': [1.0]}})
    with pytest.raises(ValueError, match='scaling.json: platt with 1 parameters'):
        scaling.load(path)
    scaling.save(path, {'mmlu': {'temperature': [1.7]}})
    text = path.read_text()
    for damaged in (text.replace('1.7', '1.8'), text.replace('mmlu', 'arc'), text[:40], '[]', '5',
                    text.replace('1.7', '"1.7"'), '[' * 100_000, '{"nanocal_scaling": 1}', ''):
        path.write_text(damaged)
        with pytest.raises(ValueError, match='scaling.json is damaged, edited'):
            scaling.load(path)


@pytest.mark.parametrize('name', ['llama', 'gemma2', 'neox', 'cohere'])
def test_a_temperature_folded_into_the_weights_divides_the_logits_of_transformers(name, tmp_path):
    reference_model(name, tmp_path / 'model')
    fits = {'mmlu': {'temperature': [1.7]}, 'arc': {'temperature': [1000.0]}}
    scaling.save(tmp_path / 'scaling.json', fits)
    arguments = f'--model={tmp_path}/model', f'--scaling={tmp_path}/scaling.json'
    fold.main([*arguments, '--task=mmlu', f'--out_dir={tmp_path}/folded'])
    before, after = (by_transformers(tmp_path / x)(torch.arange(3, 21).view(2, 9)).logits
                     for x in ('model', 'folded'))
    assert before.abs().max() > 0.1
    torch.testing.assert_close(after, before / 1.7, rtol=1e-4, atol=1e-5)
    assert 'divided by 1.7' in (tmp_path / 'folded' / 'README.md').read_text()
    for task, out, message in (
            ('xcopa', 'new', 'name one of .*: mmlu, arc'), ('arc', 'new', 'no temperature is best'),
            ('mmlu', 'model', 'model is not empty, it holds config.json'),
            ('mmlu', 'folded', 'folded is not empty, it holds README.md')):
        with refused(tmp_path, message):
            fold.main([*arguments, f'--task={task}', f'--out_dir={tmp_path}/{out}'])


CHECKOUT = os.environ.get('NANOCAL_LLAMA_CPP')       # of llama.cpp, which converts what is saved


@pytest.mark.skipif(not CHECKOUT, reason='NANOCAL_LLAMA_CPP names no checkout of llama.cpp')
def test_llama_cpp_converts_the_weights_with_a_folded_temperature_and_the_tokenizer(base, tmp_path):
    import transformers
    gguf = pytest.importorskip('gguf')
    folded, path = tmp_path / 'folded', tmp_path / 'folded.gguf'
    scaling.save(tmp_path / 'scaling.json', {'mmlu': {'temperature': [1.7]}})
    fold.main([f'--model={base}', f'--scaling={tmp_path}/scaling.json', f'--out_dir={folded}'])
    subprocess.run([sys.executable, Path(CHECKOUT, 'convert_hf_to_gguf.py'), folded,
                    '--outtype=f32', f'--outfile={path}'], check=True, capture_output=True)

    reader, saved = gguf.GGUFReader(path), load_file(folded / 'model.safetensors')
    def field(name):
        return reader.fields[name].contents()
    heads = {'q_proj': field('llama.attention.head_count'),
             'k_proj': field('llama.attention.head_count_kv')}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, field('llama.block_count'))
    theirs = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    assert len(theirs) == len(saved)
    for key, weight in saved.items():
        if n := heads.get(key.split('.')[-2]):
            # llama.cpp rotates neighbors, transformers the halves of a head
            weight = weight.unflatten(0, (n, 2, -1)).swapaxes(1, 2).flatten(0, 2)
        converted = torch.from_numpy(theirs[names.get_name(key, ('.weight',))])
        assert torch.equal(converted.reshape(weight.shape), weight.float()), key
    before = load_file(base / 'model.safetensors')['model.norm.weight']
    torch.testing.assert_close(torch.from_numpy(theirs['output_norm.weight']), before.float() / 1.7)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folded)
    assert field('tokenizer.ggml.tokens') == tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    assert field('tokenizer.ggml.bos_token_id') == tokenizer.bos_token_id
