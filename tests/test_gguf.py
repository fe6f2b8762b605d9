"""llama.cpp converts what this program saves. NANOCAL_LLAMA_CPP names a checkout of it."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

import scaling
from runtime import fold

CHECKOUT = os.environ.get('NANOCAL_LLAMA_CPP')


@pytest.mark.skipif(not CHECKOUT, reason='NANOCAL_LLAMA_CPP names no checkout of llama.cpp')
def test_llama_cpp_converts_the_weights_with_a_folded_temperature_and_the_tokenizer(base, tmp_path):
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
    tokenizer = AutoTokenizer.from_pretrained(folded)
    assert field('tokenizer.ggml.tokens') == tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    assert field('tokenizer.ggml.bos_token_id') == tokenizer.bos_token_id
