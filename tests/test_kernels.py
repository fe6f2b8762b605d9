"""Triton kernels compile for a Hopper GPU, which need not be there."""

import os
import subprocess
import sys

import pytest
from common import HERE

COMPILE = """
import sys
import fused_ce, triton, triton_ops
from decoding import draw
from triton.backends.compiler import GPUTarget

def compile(kernel, constants, warps=4, **types):
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature = {name: 'constexpr' if name in constants else types.get(
        name, '*fp32' if name.endswith('_ptr') else 'i32') for name in kernel.arg_names}
    source = triton.compiler.ASTSource(kernel, signature, {
        (kernel.arg_names.index(name),): value for name, value in constants.items()})
    shared = triton.compile(source, target=GPUTarget('cuda', 90, 32),
                            options={'num_warps': warps}).metadata.shared
    assert shared < 227 * 1024, (kernel.__name__, constants, shared)

def decoding():
    scores = {'scale': 'fp32', 'softcap': 'fp32', 'slot_ptr': '*i64', 'position_ptr': '*i64'}
    for dtype, width, warps in (('bf16', 64, 2), ('fp32', 256, 4)):
        x = dict.fromkeys(('q_ptr', 'k_ptr', 'v_ptr', 'cache_k_ptr', 'cache_v_ptr', 'out_ptr'),
                          '*' + dtype)
        compile(triton_ops._decode, {'GROUP': 16, 'WIDTH': width, 'SPLIT': 256, 'BLOCK': 32}, warps,
                **scores, **x)
        compile(triton_ops._decode, {'GROUP': 16, 'WIDTH': width, 'SPLIT': 1024, 'BLOCK': 32},
                warps, **scores, **x, part_ptr='*' + dtype)
        compile(triton_ops._merge, {'WIDTH': width, 'SPLIT': 256}, **scores, **x)
    for greedy in (False, True):
        options = {'GREEDY': greedy, 'BLOCK': 4096}
        compile(draw._summarize, options, 8, inverse='fp32')
        compile(draw._pick, options | {'BLOCKS': 64}, 8, inverse='fp32', uniform_ptr='*fp64')

def forward():
    bf16 = dict.fromkeys(('x_ptr', 'weight_ptr', 'bias_ptr', 'out_ptr', 'cos_ptr', 'sin_ptr',
                          'gate_ptr', 'up_ptr', 'q_ptr', 'k_ptr', 'v_ptr'), '*bf16')
    for kind in ('llama', 'gemma', 'layer'):
        compile(triton_ops._norm, {'WIDTH': 4096, 'ROUND': kind == 'llama', 'BIAS': kind == 'layer',
                                   'PLUS_ONE': kind == 'gemma', 'CENTER': kind == 'layer'}, 16,
                eps='fp32', **bf16)
    compile(triton_ops._rotate, {'HEADS': 32, 'HALF': 64}, **bf16)
    compile(triton_ops._gate, {'SILU': True, 'BLOCK': 4096}, 8, **bf16)
    integers = dict.fromkeys(('position_ptr', 'end_ptr', 'block_ptr', 'full_ptr', 'seen_ptr'),
                             '*i32')
    for width, (m, n, warps, _) in triton_ops.BLOCKS.items():
        compile(triton_ops._attend, {'WIDTH': width, 'BLOCK_M': m, 'BLOCK_N': n}, warps,
                scale='fp32', softcap='fp32', **bf16, **integers)

def loss():
    rows = dict.fromkeys(('z_y', 'lse', 'scale', 'a', 'b', 'c', 'e', 'f', 'sum_z', 'sum_p2',
                          'entropy', 'top_logit', 'factor'), '*fp32')
    x = dict.fromkeys(('logits', 'hidden', 'weight', 'x'), '*bf16')
    integers = {'target': '*i64', 'top_token': '*i32'}
    some = {'sum_p2': None, 'entropy': None, 'top_logit': None, 'top_token': None}
    for softcap in ({'softcap': None}, {}):
        for unused in ({}, some):
            compile(fused_ce._row_sums_kernel, {'FAST': True, 'BLOCK': 2048} | softcap | unused,
                    softcap='fp32', **rows, **x, **integers)
        compile(fused_ce._gradient_kernel, {'FAST': True, 'BLOCK': 2048} | softcap,
                softcap='fp32', **rows, **x, **integers)
    compile(fused_ce._scale_kernel, {'BLOCK': 16384}, **rows, **x)

globals()[sys.argv[1]]()
"""


@pytest.mark.slow
@pytest.mark.parametrize('use', ['decoding', 'forward', 'loss'])
def test_the_kernels_compile_for_a_gpu_that_is_not_there(use):
    environment = {key: value for key, value in os.environ.items() if key != 'TRITON_INTERPRET'}
    done = subprocess.run([sys.executable, '-c', COMPILE, use], cwd=HERE, capture_output=True,
                          text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
