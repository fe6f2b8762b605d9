"""config_json.py and checkpoint.py: what is read, refused and written; transformers and peft."""

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from common import (HERE, add_to_hub, by_transformers, cases_of, edit_config, few_layers,
                    llama_config, logits_of, lora_model, named, program, reference_model, rewrite,
                    small_model, whole_rows)
from safetensors.torch import load_file, save_file

import model as models
from bridges import adapter
from results import evaluation
from runtime import checkpoint, config_keys, device, saving, weights
from runtime.errors import CheckpointError, ConfigError


def test_saved_shards_load_in_transformers(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, 'SHARD_BYTES', 40_000)
    reference = reference_model('llama3', tmp_path / 'theirs')
    model = checkpoint.load(tmp_path / 'theirs')
    names = saving.save(model, tmp_path / 'ours', torch.float32, tmp_path / 'theirs')
    again, tokens = by_transformers(tmp_path / 'ours'), torch.randint(0, 211, (1, 45))
    assert torch.equal(again(tokens).logits, reference(tokens).logits)
    files = {path.name for path in (tmp_path / 'ours').iterdir()}
    assert {*names} == files and 'generation_config.json' in files
    assert 'model.safetensors' not in files


def test_saving_removes_no_file_and_what_an_index_does_not_list_is_not_read(folder, monkeypatch):
    """A save that leaves another layout's files beside its own is refused when it is loaded."""
    model, theirs = checkpoint.load(folder), ('model-old.safetensors', 'notes.txt')
    for name in theirs:
        (folder / name).write_text('mine')
    monkeypatch.setattr(saving, 'SHARD_BYTES', 40_000)
    names = saving.save(model, folder, torch.float32)
    assert len(names) > 4 and all((folder / name).exists() for name in names)
    assert all((folder / name).read_text() == 'mine' for name in theirs)
    with pytest.raises(CheckpointError, match='holds two models: model.safetensors, '):
        checkpoint.load(folder)
    (folder / 'model.safetensors').unlink()
    assert all(map(torch.equal, model.parameters(), checkpoint.load(folder).parameters()))
    shards = sorted(folder.glob('model-0*.safetensors'))
    old = {key: torch.full_like(x, torch.nan) for key, x in load_file(shards[0]).items()}
    save_file(load_file(shards[-1]) | old | {'unlisted': DENSE}, shards[-1])
    assert all(map(torch.equal, model.parameters(), checkpoint.load(folder).parameters()))
    assert weights.nonfinite_tensor(folder) is None


@pytest.fixture
def folder(tmp_path):
    reference_model('llama', tmp_path / 'model')
    return tmp_path / 'model'


KEY = 'model.layers.1.mlp.up_proj.weight'


@pytest.mark.parametrize('damage, message', [
    (lambda f: rewrite(f, lambda t: t.pop('lm_head.weight')), 'is missing; if tied, set tie_w'),
    (lambda f: rewrite(f, lambda t: t.update({f'module.{KEY}': t.pop(KEY)})),
     f'tensor {KEY} is missing and tensor module.{KEY} is unknown'),
    (lambda f: rewrite(f, lambda t: t.update({KEY: torch.ones(2, 3)})),
     f'tensor {KEY} has shape [2, 3], config.json wants [80, 48]'),
    (lambda f: os.truncate(f / 'model.safetensors', 5000),
     'is truncated, out of date or not a file of weights'),
    (lambda f: (f / 'config.json').unlink(), 'is not a model folder: it has no config.json'),
    (lambda f: edit_config(f, attention_bias=True),
     'tensor model.layers.0.self_attn.k_proj.bias (and 11 more) is missing'),
    (lambda f: (f / 'model.safetensors.index.json').write_text(
        '{"weight_map": {"model.norm.weight": "../model.safetensors"}}'),
     "names '../model.safetensors', which is not a .safetensors file in this folder")])
def test_a_damaged_checkpoint_is_named_in_one_line(folder, damage, message):
    damage(folder)
    with pytest.raises(CheckpointError, match=r'^.*\Z') as error:
        checkpoint.load(folder)
    assert message in str(error.value) and str(folder) in str(error.value)


def same_logits(folder, model=None):
    """Return whether the logits of the model in `folder` are those of transformers."""
    tokens = torch.randint(0, 211, (1, 45))
    with torch.no_grad():
        return torch.allclose(logits_of(model or folder, tokens),
                              by_transformers(folder)(tokens).logits, rtol=1e-5, atol=2e-4)


ODD_VALUES = [None, 'yes', -1, 0, 1, 1.5, {}, True, False, float('nan'), 10**30,
              ['full_attention'] * 3]


def computed_or_refused(folder, raw, changes):
    """True where a config.json of raw | changes is computed as transformers does it; else it is
    refused in one line that names the key or the tensor that does not fit it."""
    (folder / 'config.json').write_text(json.dumps(raw | changes))
    try:
        model = checkpoint.load(folder)
    except CheckpointError as error:
        assert str(folder) in str(error) and '\n' not in str(error), changes
        assert any(part in str(error)
                   for part in (*changes, f'{folder}: tensor', 'config.json wants')), changes
        return False
    assert same_logits(folder, model), changes
    return True


@pytest.mark.slow
@pytest.mark.parametrize('name', [      # those of other families have the rules of one of these
    'llama3', 'mistral_window', 'gemma', 'gemma2', 'qwen2', 'neox', 'gemma3', 'olmo3', 'smollm3',
    'cohere2', 'phi3', 'ministral3', 'granite', 'opt'])
def test_every_field_of_the_config_is_checked(name, tmp_path):
    reference_model(name, tmp_path, **few_layers(name, 3))      # as many as in ODD_VALUES
    raw = json.loads((tmp_path / 'config.json').read_text())
    keys, computed = raw.keys() | config_keys.rules_of(raw['model_type']).keys(), set()
    for key in sorted(keys):
        for value in ODD_VALUES:
            # transformers refuses integers where it wants floats, which are computed here
            value = float(value) if key in config_keys.FLOATS and type(value) is int else value
            if computed_or_refused(tmp_path, raw, {key: value}):
                computed.add((key, repr(value)))
    assert (('attention_bias', str(name == 'neox')) in computed) == ('attention_bias' in keys)
    assert ('rope_theta', '1.5') not in computed
    assert (('sliding_window', '1') in computed) == ('sliding_window' in keys)


# Keys of config.json. Of rotary positions: whether they are computed; test_families.py computes
# each scheme, here are the spellings.
FILES = cases_of('config_files.json')


@pytest.mark.parametrize('name, cases', FILES['rope_computed_or_refused'].items())
def test_rotary_positions_are_computed_as_in_transformers_or_refused(name, cases, tmp_path):
    reference_model(name, tmp_path)
    raw = json.loads((tmp_path / 'config.json').read_text())
    del raw['rope_parameters']
    for computed, changes in cases:
        assert computed_or_refused(tmp_path, raw, changes) == computed, changes


def test_old_buffers_of_neox_are_ignored(tmp_path):
    at, plain = 'gpt_neox.layers.0.attention', small_model('neox', tmp_path).state_dict()
    rewrite(tmp_path, lambda t: t.update({
        f'{at}.bias': torch.ones(1, 1, 64, 64, dtype=torch.uint8),
        f'{at}.masked_bias': torch.tensor(-1e9).half(),
        f'{at}.rotary_emb.inv_freq': torch.ones(2)}))
    assert checkpoint.load(tmp_path).state_dict().keys() == plain.keys()
    assert weights.nonfinite_tensor(tmp_path) is None and checkpoint.fingerprint(tmp_path)
    assert same_logits(tmp_path)
    rewrite(tmp_path, lambda t: t.update({f'{at}.old.bias': torch.ones(1)}))
    with pytest.raises(CheckpointError, match=f'tensor {at}.old.bias is unknown'):
        checkpoint.load(tmp_path)


@pytest.mark.parametrize('name, values, message', FILES['refused'])
def test_values_of_config_json_that_are_refused_by_name(name, values, message, tmp_path):
    reference_model(name, tmp_path)
    edit_config(tmp_path, **values)
    with pytest.raises(CheckpointError, match=f'^{tmp_path}/config.json: .*{message}.*\\Z'):
        checkpoint.read_config(tmp_path)


def test_changes_to_the_config_apply_to_what_the_file_means(tmp_path):
    reference_model('llama3', tmp_path)
    raw = json.loads((tmp_path / 'config.json').read_text())
    assert 'rope_theta' not in raw and raw['rope_parameters']['factor'] == 8.0
    changed = checkpoint.read_config(tmp_path, {'rope_theta': 5e5, 'hidden_size': 64})
    a, b = (x.layers[0].rope for x in (checkpoint.read_config(tmp_path), changed))
    assert (b.theta, b.dim, b.factor, changed.hidden_size) == (5e5, a.dim, 8.0, 64)
    changed = checkpoint.read_config(
        tmp_path, {'rope_scaling': {'rope_type': 'default'}, 'rope_theta': 77.0})
    assert changed.layers[0].rope == models.Rope(77.0, 18)
    for changes, message in (
            ({'hiden_size': 64}, "llama has no key 'hiden_size' .*; did you mean 'hidden_size"),
            ({'rotary_pct': 0.5}, "llama has no key 'rotary_pct'"),
            ({'rope_scaling': {'rope_type': 'default', 'rope_theta': 77.0}}, 'disagree; remove')):
        with pytest.raises(CheckpointError, match=message):
            checkpoint.read_config(tmp_path, changes)


@pytest.mark.parametrize('name', ['llama', 'gemma2'])
def test_softcap_and_temperature_of_our_own(name, tmp_path, capsys):
    """logits = cap * tanh(h W' / (T cap)) after a round trip through config.json."""
    plain = small_model(name, tmp_path / 'plain')
    tokens = torch.randint(0, 211, (1, 45))
    z = torch.nn.functional.linear(plain(tokens, *whole_rows(tokens)), plain.head)
    saving.save(plain, tmp_path / 'same', torch.float32)
    assert 'note' not in capsys.readouterr().out
    plain.config.final_logit_softcapping, plain.config.temperature = 3.0, 1.5
    saving.save(plain, tmp_path / 'ours', torch.float32)
    assert 'transformers and vLLM will not' in capsys.readouterr().out
    written, own = json.loads((tmp_path / 'ours' / 'config.json').read_text()), name == 'gemma2'
    assert written['nanocal'] == {'temperature': 1.5} | ({} if own else {'softcap': 3.0})
    assert written.get('final_logit_softcapping') == (3.0 if own else None)
    model = checkpoint.load(tmp_path / 'ours')
    assert (model.softcap, model.config.temperature) == (3.0, 1.5)
    assert 'nanocal' not in model.config.hf
    assert torch.allclose(logits_of(model, tokens), 3 * torch.tanh(z / (1.5 * 3)), atol=1e-5)


def test_tied_embeddings_beside_an_output_matrix(tmp_path):
    plain = small_model('llama3', tmp_path).head.detach()
    rewrite(tmp_path, lambda t: t.update({'lm_head.weight': plain}))
    assert torch.equal(checkpoint.load(tmp_path).head, plain)
    rewrite(tmp_path, lambda t: t['lm_head.weight'][-1, 0].add_(1))
    with pytest.raises(CheckpointError, match='lm_head.weight differs .*tie_word_embeddings = tr'):
        checkpoint.load(tmp_path)
    edit_config(tmp_path, tie_word_embeddings=False)
    assert same_logits(tmp_path)


def test_a_device_is_named_as_it_was_chosen(monkeypatch):
    assert evaluation.versions('cpu')['device'] == platform.processor()
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 2)
    monkeypatch.setattr(torch.cuda, 'set_device', lambda device: None)
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda device: f'GPU {device}')
    assert evaluation.versions('cuda:1')['device'] == 'GPU cuda:1'
    assert device.pick_device('auto') == device.pick_device('cuda') == 'cuda'
    with pytest.raises(ConfigError, match="'cuda:2', but .* CUDA devices 0 to 1"):
        device.pick_device('cuda:2')


def test_the_first_nonfinite_tensor_is_named(folder):
    assert weights.nonfinite_tensor(folder) is None
    for dtype, cause in (('float32', 'overflow even in float32'), ('bfloat16', 'in bfloat16')):
        assert cause in weights.bad_logits('step 1', folder, dtype)
    rewrite(folder, lambda t: t[KEY][3].fill_(float('inf')))
    assert f'{KEY} in {folder} holds NaN' in weights.bad_logits('', folder, 'float32')


def test_every_byte_of_the_weights_decides_whether_a_model_is_the_same(tmp_path):
    """Also where size, inode and time of modification stay, as after an edit by another program."""
    path = tmp_path / 'model.safetensors'
    (tmp_path / 'config.json').write_text('{"a": 1.5, "b": [2]}')
    save_file({'a': torch.zeros(3, 1000, dtype=torch.bfloat16),
               'b': torch.arange(200_000).float()}, path)
    old = path.stat().st_mtime_ns - 10 ** 10        # so that the hash is kept
    os.utime(path, ns=(old, old))
    first, whole = checkpoint.fingerprint(tmp_path), path.read_bytes()
    n_header = len(whole) - 806_000
    for at in (n_header, len(whole) - 1, *range(n_header + 3, 806_000, 150_000)):
        for content in (whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1:], whole):
            path.write_bytes(content)
            os.utime(path, ns=(old, old))
            assert (checkpoint.fingerprint(tmp_path) == first) == (content is whole), at
    # of config.json the values count, not their order
    for content, same in (('{"b": [2], "a": 1.5}', True), ('{"a": 1.5, "b": [3]}', False)):
        (tmp_path / 'config.json').write_text(content)
        assert (checkpoint.fingerprint(tmp_path) == first) == same


def test_a_model_is_found_by_its_path_and_in_the_hub_cache(folder, tmp_path, monkeypatch):
    monkeypatch.setenv('HOME', str(folder.parent))
    assert checkpoint.fetch('~/model') == folder
    for *name, message in (('~/nothing', '.~/nothing. is no model: neither a folder'),
                           ('~/model/config.json', 'config.json. is no model: neither a folder'),
                           ('~/model', 'step9', "revision = 'step9' is that of a hub"),
                           ('google/gemma-2-2b', 'downloading the model google/gemma-2-2b')):
        with pytest.raises(CheckpointError, match=message):
            checkpoint.fetch(*name)
    shutil.copytree(folder, tmp_path / 'pipe')
    (tmp_path / 'pipe/model.safetensors').unlink()
    os.mkfifo(tmp_path / 'pipe/model.safetensors')
    with pytest.raises(CheckpointError, match='pipe/model.safetensors is not a regular file'):
        checkpoint.fetch(tmp_path / 'pipe')     # and does not wait for a writer
    add_to_hub(tmp_path / 'hub', 'some/model', folder)
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_CACHE', str(tmp_path / 'hub'))
    assert checkpoint.fetch('some/model').parent == tmp_path / 'hub/models--some--model/snapshots'


@pytest.mark.slow
@pytest.mark.skipif(not Path('/proc/self/status').exists(), reason='needs /proc')
def test_loading_holds_one_copy_of_the_weights_in_memory(tmp_path):
    # many tensors of 4 MB: none of them is a large part of the whole
    config = llama_config(vocab_size=4000, hidden_size=1024, intermediate_size=2048,
                          num_hidden_layers=16, num_attention_heads=16, dtype='bfloat16')
    model = models.CausalLM(config).to(torch.bfloat16)
    saving.save(model, tmp_path, torch.bfloat16)
    done = subprocess.run([sys.executable, '-c', program('memory of loading'), tmp_path],
                          text=True, stdout=subprocess.PIPE, cwd=HERE, check=True)
    size = sum(p.numel() for p in model.parameters()) * 2
    assert 0.9 * size < 1024 * int(done.stdout) < 1.3 * size


@pytest.mark.slow
@pytest.mark.parametrize('name', ['llama', 'neox', 'phi3'])
def test_adapters_load_in_peft_and_merged_weights_compute_the_same(name, tmp_path):
    import peft
    reference_model(name, base := tmp_path / 'base')
    model, tokens = lora_model(base), torch.randint(0, 211, (2, 30))
    adapter.save_adapter(model, tmp_path / 'adapter', str(base))
    saving.save(model, merged := tmp_path / 'merged', torch.float32)
    reference = peft.PeftModel.from_pretrained(by_transformers(base), tmp_path / 'adapter').eval()
    for ours in (logits_of(model, tokens), logits_of(merged, tokens),
                 by_transformers(merged)(tokens).logits):
        assert torch.allclose(ours, reference(tokens).logits, atol=2e-4)
    assert not torch.allclose(ours, reference.unload()(tokens).logits, atol=1e-2)


@pytest.mark.slow
def test_pickled_weights_are_read(tmp_path):
    reference_model('neox', pickled := tmp_path / 'pickled')
    wanted = load_file(pickled / 'model.safetensors')
    (pickled / 'model.safetensors').unlink()
    shard_of = {key: f'pytorch_model-{i % 2}.bin' for i, key in enumerate(wanted)}
    for name in {*shard_of.values()}:
        torch.save({key: x for key, x in wanted.items() if shard_of[key] == name}, pickled / name)
    (pickled / 'pytorch_model.bin.index.json').write_text(json.dumps({'weight_map': shard_of}))
    loaded = named(checkpoint.load(pickled, dtype=torch.float32))
    assert loaded.keys() == wanted.keys()
    assert all(torch.equal(loaded[key], tensor) for key, tensor in wanted.items())
    assert weights.nonfinite_tensor(pickled) is None
    os.truncate(pickled / 'pytorch_model-0.bin', 3000)
    with pytest.raises(CheckpointError, match='truncated, out of date or not a file'):
        checkpoint.load(pickled)


DENSE = torch.ones(3, 3)


class Attack:
    def __reduce__(self):
        return Path('attacked').touch, ()


@pytest.mark.parametrize('content, message', [
    ({'model': {'x': DENSE}}, 'not a file of weights'),
    ({'model.norm.weight': Attack()}, 'not a file of weights'),
    *(({'x': DENSE, key: tensor}, f'{key!r} is not the name of a dense tensor') for key, tensor in (
        (0, DENSE), ('a', DENSE.to_sparse())))])
def test_a_pickle_of_other_things_is_refused_and_not_run(content, message, folder, monkeypatch):
    (folder / 'model.safetensors').unlink()
    torch.save(content, folder / 'pytorch_model.bin')
    monkeypatch.chdir(folder)
    for read in (checkpoint.load, weights.nonfinite_tensor):
        with pytest.raises(CheckpointError, match=f'pytorch_model.bin cannot be read, .*{message}'):
            read(folder)
    assert not Path('attacked').exists()
