"""bridges/adapter.py: PEFT adapters without merged weights, as peft merges them"""

import pytest
import torch
from common import (edit_config, image_model, logits_of, lora_model, named, reference_model,
                    rewrite, sentencepiece_folder, write_rows)
from safetensors.torch import load_file, save_file

import evaluate
import model as models
import test_t5
from bridges import adapter
from runtime import checkpoint
from runtime.errors import CheckpointError

SETTINGS = 'adapter_config.json'
ALL = 'q_proj k_proj v_proj o_proj gate_proj up_proj down_proj'.split()
CASES = {       # name: (model, target_modules, other settings)
    'lora': ('llama', ['q_proj', 'v_proj'], {}),
    'rslora': ('llama', ALL, {'use_rslora': True, 'lora_dropout': 0.1}),
    'regex': ('gemma2', r'.*layers\.[02]\..*(q_proj|down_proj)', {}),
    'all_linear': ('mistral', 'all-linear', {'lora_alpha': 5}),
    'patterns': ('qwen2', ALL, {'rank_pattern': {'v_proj': 3}, 'alpha_pattern': {
        r'layers\.1\.self_attn\.q_proj': 40, 'k_proj': 2}}),
    'head': ('llama', ['q_proj', 'lm_head'], {'layers_to_transform': [1]}),
    'neox': ('neox', ['query_key_value', 'dense_4h_to_h'], {}),
    **{f'all_linear_{x}': (x, 'all-linear', {}) for x in ('gemma3', 'phi3', 'opt', 'images')}}


def adapted(folder, name, targets, settings, dtype=torch.float32):
    """Save a random model in base/ and an adapter of it in peft/; return what peft merges."""
    import peft     # takes seconds, so the tests that need it are slow ones
    base = base_model(name, folder / 'base').to(dtype)
    base.save_pretrained(folder / 'base')
    model = peft.get_peft_model(base, peft.LoraConfig(
        **{'r': 4, 'lora_alpha': 16, 'task_type': 'CAUSAL_LM'} | settings, target_modules=targets))
    model.peft_config['default'].base_model_name_or_path = str(folder / 'base')
    torch.manual_seed(1)
    for key, p in model.named_parameters():
        if 'lora_' in key:
            p.data.normal_(0, 0.2)
    model.save_pretrained(folder / 'peft', save_embedding_layers=False)
    return model.merge_and_unload().eval()


def base_model(name, folder):
    """Return a random model of transformers, also one for text and images or T5."""
    if name == 'images':
        return image_model('Gemma3', 'Gemma3Text', dict(
            vocab_size=450, hidden_size=32, intermediate_size=40, num_hidden_layers=2, head_dim=16,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64))
    if name == 't5':
        return test_t5.reference(folder, 5, kind='T5', num_layers=2)
    return reference_model(name, folder, vocab_size=450)


@pytest.fixture
def simple(tmp_path):
    """A folder with a model in base/ and an adapter of its queries in peft/, to be changed."""
    reference_model('llama', tmp_path / 'base', vocab_size=450)
    model = lora_model(tmp_path / 'base', targets=['q_proj'])
    adapter.save_adapter(model, tmp_path / 'peft', str(tmp_path / 'base'))
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize('case', CASES)
def test_logits_are_those_of_the_model_that_peft_merges(tmp_path, case):
    reference = adapted(tmp_path, *CASES[case])
    folder = checkpoint.fetch(str(tmp_path / 'peft'))
    tokens = torch.randint(450, (2, 11), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs, model = reference(tokens).logits, checkpoint.load(folder)
        torch.testing.assert_close(logits_of(model, tokens), theirs, atol=1e-4, rtol=1e-4)
        assert (logits_of(tmp_path / 'base', tokens) - theirs).abs().max() > 0.05
    changes = adapter.changes(folder / '.adapter', model)
    assert case != 'patterns' or len({change.A.shape[0] for change in changes.values()}) == 2
    if case == 'images':
        keys = load_file(tmp_path / 'peft' / 'adapter_model.safetensors').keys()
        assert any('vision' in key for key in keys)


@pytest.mark.slow
@pytest.mark.parametrize('name, targets, dtype, task', [
    ('llama', ALL, torch.bfloat16, 'CAUSAL_LM'),
    ('t5', ['q', 'v', 'wo'], torch.float32, 'SEQ_2_SEQ_LM')])
def test_merged_weights_are_rounded_as_peft_rounds_them(tmp_path, name, targets, dtype, task):
    """Float32 product, added to the rounded weight, rounded once more: bit for bit."""
    reference = adapted(tmp_path, name, targets, {'task_type': task}, dtype)
    ours = named(checkpoint.load(checkpoint.fetch(str(tmp_path / 'peft')), dtype=dtype))
    theirs = dict(reference.named_parameters())
    assert all(torch.equal(p, theirs[key]) for key, p in ours.items()) and len(ours) > 20


def test_bin_files_and_base_models_from_another_folder(simple, monkeypatch):
    expected = checkpoint.load(checkpoint.fetch(str(simple / 'peft'))).state_dict()
    weights = simple / 'peft' / 'adapter_model.safetensors'
    torch.save(load_file(weights), weights.with_name('adapter_model.bin'))
    weights.unlink()
    monkeypatch.chdir(simple)
    edit_config(simple / 'peft', SETTINGS, base_model_name_or_path='./base', revision='of the hub')
    folder = checkpoint.fetch('peft')
    assert all(torch.equal(x, expected[key])
               for key, x in checkpoint.load(folder).state_dict().items())


@pytest.mark.parametrize('change, message', [
    ({'use_dora': True}, 'use_dora = True is not supported; merge the adapter with peft'),
    ({'a_key_of_tomorrow': 'x'}, "a_key_of_tomorrow = 'x' is not supported"),
    ({'bias': 'all'}, "bias = 'all' is not supported; it must be .none."),
    ({'alpha_pattern': {'q_proj': '16'}}, 'alpha_pattern.q_proj = .* it must be a number from -1'),
    ({'base_model_name_or_path': 'peft'}, 'the base model .* is itself an adapter; name a'),
    ({'base_model_name_or_path': '/'}, 'the base model: / has no config.json'),
    ({'base_model_name_or_path': ''}, "the base model: '' is no model: neither a folder")])
def test_settings_that_merged_weights_do_not_have_are_refused_by_name(simple, change, message,
                                                                       monkeypatch):
    monkeypatch.chdir(simple)
    edit_config(simple / 'peft', SETTINGS, **change)
    with pytest.raises(CheckpointError, match=f'{SETTINGS}: .*{message}'):
        checkpoint.fetch(str(simple / 'peft'))


@pytest.mark.parametrize('change', [
    {'use_rslora': True}, {'alpha_pattern': {r'layers\.1\..*': 40}},
    {'r': 8, 'rank_pattern': {'q_proj': 4}}])
def test_the_adapters_of_a_run_compute_what_is_merged(simple, change):
    edit_config(simple / 'peft', SETTINGS, **change)
    merged = checkpoint.load(checkpoint.fetch(str(simple / 'peft')))
    (simple / 'peft').rename(simple / 'base' / 'adapter')
    model = checkpoint.load(simple / 'base')
    adapter.add_adapter(model, simple / 'base')
    tokens = torch.randint(450, (1, 11))
    torch.testing.assert_close(logits_of(model, tokens), logits_of(merged, tokens), atol=1e-4,
                               rtol=1e-4)
    assert {layer.scale for layer in model.modules() if isinstance(layer, models.LoRALinear)} == (
        {8.0} if 'use_rslora' in change else {4.0, 10.0} if 'alpha_pattern' in change else {4.0})


LAYER = 'base_model.model.model.layers.0.self_attn.q_proj'


@pytest.mark.parametrize('change, message', [
    (lambda t: t.pop(f'{LAYER}.lora_A.weight'), r'q_proj has lora_A \[0, 0\] and lora_B \[48'),
    (lambda t: t.update({f'{LAYER}.lora_magnitude_vector': torch.zeros(48)}),
     'lora_magnitude_vector .* is no LoRA matrix'),
    (lambda t: t[f'{LAYER}.lora_B.weight'].fill_(float('nan')), r'lora_B.weight \[torch.float32\]'),
    (lambda t: t.update({f'{LAYER.replace("0", "9")}.lora_{x}.weight': torch.zeros(4, 4)
                         for x in 'AB'}), 'layer model.layers.9.self_attn.*base model is missing'),
    (lambda t: t.clear(), 'holds no matrices'),
    ({'rank_pattern': {'v_proj': 4, '*q_proj': 4}},
     r"rank_pattern: '\*q_proj' is not a regular expression"),
    ({'rank_pattern': {'q_proj': 2}}, 'r or rank_pattern says rank 2 of layer model.layers.0.'
     'self_attn.q_proj, but its matrices in adapter_model.safetensors have rank 4')])
def test_matrices_that_do_not_fit_the_base_model_are_refused_by_name(simple, change, message):
    name = f'{SETTINGS}: ' if isinstance(change, dict) else 'adapter_model.safetensors.*'
    if isinstance(change, dict):
        edit_config(simple / 'peft', SETTINGS, **change)
    else:
        rewrite(simple / 'peft', change, 'adapter_model.safetensors')
    folder = checkpoint.fetch(str(simple / 'peft'))
    with pytest.raises(CheckpointError, match=name + message):
        checkpoint.check_weights(folder, checkpoint.read_config(folder))


def test_the_adapters_of_a_run_are_refused(simple):
    (simple / 'peft').rename(simple / 'adapter')
    (simple / 'config.json').write_text('{}')
    with pytest.raises(CheckpointError, match=f'settings are in {simple}; name that folder'):
        checkpoint.fetch(str(simple / 'adapter'))


def test_an_adapter_is_evaluated_in_its_own_folder(simple):
    sentencepiece_folder(simple / 'base', 'llama2')
    rows = [{'question': 'Which?', 'choices': ['one', 'two'], 'answer': i % 2} for i in range(4)]
    _, _, out_dir = evaluate.run(evaluate.EvalConfig(
        model=str(simple / 'peft'), tasks=(str(write_rows(simple / 'q.jsonl', rows)),), shots=0,
        n_bootstrap=0, pictures=False, device='cpu'))
    assert out_dir == simple / 'peft'       # not that of the links


def test_another_adapter_is_another_model_and_its_folder_of_links_is_removed_at_the_end(simple):
    folder = checkpoint.fetch(str(simple / 'peft'))
    assert all(path.is_symlink() for path in folder.iterdir())
    assert {*folder.iterdir()} == {folder / '.adapter', *(folder / path.name for path in (
        simple / 'base').iterdir())}
    known = {checkpoint.fingerprint(path) for path in (folder, simple / 'base')}
    assert len(known) == 2
    weights = simple / 'peft' / 'adapter_model.safetensors'
    save_file({key: 2 * x for key, x in load_file(weights).items()}, weights)
    assert checkpoint.fingerprint(checkpoint.fetch(str(simple / 'peft'))) not in known
    while adapter._linked:
        adapter._linked.pop().cleanup()
    assert not folder.exists() and (simple / 'base' / 'model.safetensors').exists()
