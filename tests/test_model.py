"""model.py; its masks and kernels against their plain versions. test_families.py: transformers."""

import os
import re
import subprocess
import sys

import pytest
import torch
from common import HERE, documents, lora_model, reference_model, uninstall, whole_rows

import model as models
from attention import ExplicitMask, visible_keys
from data import packing
from runtime import checkpoint, saving
from speed import install, kernels
from speed.masks import visible_blocks


def test_the_residual_stream_of_a_bfloat16_model_is_float32():
    config = models.ModelConfig('gemma2', 9, 3584, 8, 2, 2, head_dim=4)
    with torch.device('meta'):
        model = models.CausalLM(config)
    decoder = model.decoder.to_empty(device='cpu').to(torch.bfloat16)
    for parameter in decoder.parameters():
        torch.nn.init.ones_(parameter)
    seen = []
    for layer in decoder.layers:
        layer.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    hidden = decoder(torch.zeros(1, 1, dtype=torch.long), *whole_rows(torch.zeros(1, 1)))
    assert [x.dtype for x in seen] == [torch.float32] * 2 and hidden.dtype == torch.bfloat16
    assert seen[0].flatten()[0].item() == pytest.approx(3584 ** 0.5, rel=1e-6)  # not 59.75


@pytest.mark.parametrize('name', ['phi3', 'qwen2'])
def test_lora_begins_at_the_base_model_and_merges_exactly(name, tmp_path):
    reference_model(name, tmp_path / 'base')
    tokens = torch.randint(0, 211, (2, 30))
    plain = checkpoint.load(tmp_path / 'base')
    hidden = plain(tokens, *whole_rows(tokens))
    model = checkpoint.load(tmp_path / 'base')
    targets = ('qkv_proj',) if name == 'phi3' else ('q_proj', 'v_proj')
    models.add_lora(model, 8, 32.0, 0.1, targets * 2)   # named twice, adapted once
    assert torch.equal(model.eval()(tokens, *whole_rows(tokens)), hidden)   # B begins at zero
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * len(targets) * plain.config.num_hidden_layers
    assert all(re.search(rf'({"|".join(targets)}).lora_[AB].weight$', n) for n in trained)
    a, b = (model.train()(tokens, *whole_rows(tokens)) for _ in range(2))
    assert torch.equal(a, b)                        # dropout on what B, still zero, multiplies
    model = lora_model(tmp_path / 'base')
    adapted = model(tokens, *whole_rows(tokens))
    assert not torch.allclose(adapted, hidden, atol=1e-2)
    adapted.square().sum().backward()
    assert all((p.grad is not None) == ('lora' in n) for n, p in model.named_parameters())
    # merged, as anybody loads it
    saving.save(model, tmp_path / 'merged', torch.float32)
    merged = checkpoint.load(tmp_path / 'merged')
    assert torch.allclose(merged(tokens, *whole_rows(tokens)), adapted, atol=1e-4)
    assert merged.state_dict().keys() == plain.state_dict().keys()
    names = 'qkv_proj, o_proj' if 'qkv_proj' in targets else 'q_proj'
    with pytest.raises(ValueError, match=f"lora_targets = .'query',.; wanted some of {names}"):
        models.add_lora(plain, 8, 32.0, 0.1, ('query',))


@pytest.mark.parametrize('window', [None, 7, 100])
@pytest.mark.parametrize('T, M, N', [(130, 64, 32), (257, 32, 64)])
def test_blocks_of_a_mask_hold_what_each_token_sees(T, M, N, window):
    packed = packing.pack(documents(T, [30, T - 40, 9, 20, 1, 25]), T)
    positions, ends = (torch.from_numpy(x) for x in (packed.positions, packed.ends))
    seen, full = visible_blocks(positions, ends, window, M, N)
    visible = visible_keys(positions, ends, window)[:, 0]

    def in_blocks(fill):    # [B, blocks of queries, blocks of keys, queries of a block, keys]
        x = torch.nn.functional.pad(visible, (0, -T % N, 0, -T % M), value=fill)
        return x.unflatten(2, (-1, N)).unflatten(1, (-1, M)).transpose(2, 3)
    assert not (in_blocks(False).any(-1).any(-1) & ~seen).any()
    assert not (full & ~in_blocks(True).all(-1).all(-1)).any() and not (full & ~seen).any()
    if window is None:      # and no block more, where a document is seen to its end
        assert torch.equal(seen, in_blocks(False).any(-1).any(-1))


def test_an_edit_of_attention_reaches_compiled_blocks(tmp_path, monkeypatch, capsys):
    reference_model('llama', tmp_path, head_dim=16)
    model, tokens = checkpoint.load(tmp_path), torch.randint(0, 211, (1, 20))
    positions, ends = whole_rows(tokens)
    attend = ExplicitMask.attend
    monkeypatch.setattr(ExplicitMask, 'attend', lambda *inputs: 1.5 * attend(*inputs))
    expected = model(tokens, positions, ends)
    for layer in model.decoder.layers:
        layer.compile(backend='eager')
    install.install()
    monkeypatch.setattr(kernels, 'available', lambda x: True)    # as on a GPU
    assert torch.allclose(model(tokens, positions, ends), expected, atol=1e-5)
    assert 'ExplicitMask.attend was edited' in capsys.readouterr().out
    uninstall()


# Triton kernels compile for a Hopper GPU, which need not be there.
COMPILE = """
import sys
import fused_ce, triton
from decoding import draw
from speed import kernels
from triton.backends.compiler import GPUTarget

# {type: names of arguments, without _ptr}; others are pointers to float32, or integers
FORWARD = {'fp32': 'eps scale softcap', '*i32': 'position end block full seen',
           '*bf16': 'x weight bias out cos sin gate up q k v y'}
DECODING = {'fp32': 'scale softcap inverse', '*i64': 'slot position', '*fp64': 'uniform'}
LOSS = {'*fp32': 'z_y lse scale a b c e f t sum_z sum_p2 entropy top_logit factor',
        'fp32': 'softcap', '*bf16': 'logits hidden weight x', '*i64': 'target', '*i32': 'top_token'}

def compile(kernel, warps, types, **constants):
    types = {name: kind for kind, names in types.items() for name in names.split()}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature = {name: 'constexpr' if name in constants else types.get(name.removesuffix(
        '_ptr'), '*fp32' if name.endswith('_ptr') else 'i32') for name in kernel.arg_names}
    source = triton.compiler.ASTSource(kernel, signature, {
        (kernel.arg_names.index(name),): value for name, value in constants.items()})
    shared = triton.compile(source, target=GPUTarget('cuda', 90, 32),
                            options={'num_warps': warps}).metadata.shared
    assert shared < 227 * 1024, (kernel.__name__, constants, shared)

def decoding():
    for dtype, width, warps in (('*bf16', 64, 2), ('*fp32', 256, 4)):
        for part in ('', 'part'):
            compile(kernels._decode, warps, DECODING | {dtype: 'q k v cache_k cache_v out ' + part},
                    GROUP=16, WIDTH=width, BLOCK=32)
        compile(kernels._merge, 4, DECODING | {dtype: 'out'}, WIDTH=width)
    for greedy in (False, True):
        for kernel in (draw._summarize, draw._pick):
            compile(kernel, 8, DECODING, GREEDY=greedy, BLOCK=4096, BLOCKS=64)

def forward():
    for kind in ('llama', 'gemma', 'layer'):
        compile(kernels._norm, 16, FORWARD, WIDTH=4096, ROUND=kind == 'llama',
                PLUS_ONE=kind == 'gemma', BIAS=kind == 'layer', CENTER=kind == 'layer')
    compile(kernels._rotate, 4, FORWARD, HEADS=32, HALF=64)
    compile(kernels._gate, 8, FORWARD, SILU=True, BLOCK=4096)
    compile(kernels._gemv, 4, FORWARD, BIAS=True, ROWS=2, BLOCK=1024)
    for width, (m, n, warps, _) in kernels.BLOCKS.items():
        compile(kernels._attend, warps, FORWARD, WIDTH=width, BLOCK_M=m, BLOCK_N=n)

def loss():
    for constants in ({}, dict.fromkeys(('sum_p2', 'entropy', 'top_logit', 'top_token', 't'))):
        for softcap in ({}, {'softcap': None}):
            for kernel in (fused_ce._row_sums_kernel, fused_ce._gradient_kernel):
                compile(kernel, 4, LOSS, FAST=True, BLOCK=2048, **constants, **softcap)
    compile(fused_ce._scale_kernel, 4, LOSS, BLOCK=16384)

globals()[sys.argv[1]]()
"""


@pytest.mark.slow
@pytest.mark.parametrize('use', ['decoding', 'forward', 'loss'])
def test_the_kernels_compile_for_a_gpu_that_is_not_there(use):
    environment = {key: value for key, value in os.environ.items() if key != 'TRITON_INTERPRET'}
    done = subprocess.run([sys.executable, '-c', COMPILE, use], cwd=HERE, capture_output=True,
                          text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
