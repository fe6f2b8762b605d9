"""Fast versions: what they stand for, what counts as an edit, and that each pair computes the same.

An edit that matters only for distant tokens, large values or long inputs changes what runs, too.
"""

import functools
import importlib.util
import itertools
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from common import HERE, off, plain_log_probs, reference_model, uninstall

import attention
import fused_ce
import generate
import model as models
import scoring
from attention import ExplicitMask, visible_keys
from data import tree_rows
from decoding import cache, draw
from decoding.cache import Cache, DecodeMask
from decoding.sampling import Sampling
from runtime import checkpoint, fast, optim
from runtime.fast import FastVersion, digests_of
from speed import adamw, fp8, install, kernels
from speed.masks import (CAUSAL, FLEX, TREE, FlexMask, TreeMask, flex_options, maker,
                         masks_by)

DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'     # there by Triton's interpreter
MASKS = visible_keys, ExplicitMask.attend
PLAIN = {       # all fast versions, and the plain functions that each of them stands for
    CAUSAL: [visible_keys], FLEX: MASKS, TREE: MASKS,
    install.WHOLE['products']: [models.products],
    install.WHOLE['float32_linear']: [models.float32_linear],
    install.WHOLE['make_masks']: [attention.make_masks],
    kernels.NORM: [models.norm], kernels.ROTATE: [models.rotate],
    kernels.GATE: [models.gate], kernels.GELU: [models.gelu_tanh],
    cache.DECODE: [DecodeMask.plainly, DecodeMask.visible, attention.sees, ExplicitMask.attend],
    draw.DRAW: [draw.draw_plainly], fp8.LORA: [models.LoRALinear.forward],
    install.LOSS: [fused_ce._plain], adamw.ADAMW: [optim._adamw]}


@pytest.fixture(autouse=True)
def plain_again():
    yield
    uninstall()


def masks_of(kind, positions, ends, window, compiled=False):
    """Return the masks of a decoder with one layer of this window and heads of 16 numbers."""
    config = SimpleNamespace(windows=[window], attn_logit_softcapping=None)
    make = maker(kind, torch.zeros(1), 16, compiled)
    return masks_by(make, config, positions, ends)


# ---- Digests -------------------------------------------------------------------------------------

def test_each_fast_version_has_the_digests_of_today():
    assert {*PLAIN} == {version for version in fast.VERSIONS if version.digests.keys() & {
        key for plain in PLAIN.values() for key in digests_of(*plain)[0]}}
    for version, plain in PLAIN.items():
        assert digests_of(*plain)[0] == version.digests, version.note(digests_of(*plain)[0])


SOURCE = '''
SCALE = 2.0

def half(x):
    return x / SCALE

def plain(x, y=1):
    """The mean."""
    if y:       # not 0
        return half(x + y)
    return f'{x:.3f}'
'''


@pytest.fixture
def imported(tmp_path):
    """A function that imports a source as the module `edited`, from another file each time."""
    def load(source):
        path = tmp_path / f'edited{len([*tmp_path.iterdir()])}.py'
        path.write_text(source)
        spec = importlib.util.spec_from_file_location('edited', path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    return load


@pytest.mark.parametrize('old, new, same', [
    ('"""The mean."""', '"""Half of the sum."""\n    # as it was', True),
    ('return half(x + y)', 'return (half(\n            x+y))', True),
    ('def plain(x, y=1):', 'def plain(x: float, y: int = 1) -> str:', True),
    ('def half', 'def other(x):\n    return x\n\ndef half', True),
    ('y=1', 'y=True', False), ('x + y', 'x - y', False), ('.3f', '.4f', False),
    ('x / SCALE', 'x / SCALE / SCALE', False), ('SCALE = 2.0', 'SCALE = 2.5', False),
    ('x / SCALE', 'x / 2.0', False), ('if y:', 'while y:', False)])
def test_an_edit_is_what_changes_the_syntax_tree_of_a_function_or_its_helpers(
        old, new, same, imported, capsys):
    assert SOURCE.count(old) == 1
    before, after = imported(SOURCE), imported(SOURCE.replace(old, new))
    version = FastVersion('a kernel', digests_of(before.plain)[0])
    assert version.stands_for(before.plain) and version.stands_for(after.plain) == same
    assert version.stands_for(before.plain)
    note = capsys.readouterr().out
    assert (note == '') == same
    # what the note says makes it current again
    digests = eval(note[note.index('{'):]) if note else version.digests
    assert FastVersion('a kernel', digests).stands_for(after.plain)


def test_a_replaced_function_is_another_one_even_if_it_has_the_name_of_the_first(
        imported, monkeypatch, capsys):
    module = imported(SOURCE)
    plain, half = module.plain, module.half
    version = FastVersion(half, digests_of(plain)[0])

    @functools.wraps(plain)
    def wrapped(*arguments):
        return 2 * plain(*arguments)
    namespace = {}
    exec('def plain(x, y=1): return x', namespace)      # as at the prompt: without source
    for other in (wrapped, lambda x, y: x, namespace['plain'], functools.partial(plain, y=2)):
        assert not version.stands_for(other) and version.stands_for(plain)
        assert not FastVersion(half, {'edited.plain': '', 'edited.half': ''}).stands_for(other)
    for other in (lambda x: x, functools.wraps(half)(lambda x: half(x) + 1)):
        monkeypatch.setattr(module, 'half', other)      # also if it is no longer the first call
        assert not version.stands_for(plain)
        monkeypatch.undo()
        assert version.stands_for(plain)
    assert 'note: edited.half was edited or replaced, so half is not' in capsys.readouterr().out
    module.SCALE = 3.0
    assert not version.stands_for(plain)


def test_digests_are_the_same_in_all_versions_of_python():
    program = '''
import ast, hashlib, importlib.util, pathlib
spec = importlib.util.spec_from_file_location('fast', 'runtime/fast.py')
fast = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fast)
trees = [fast.structure(tree) for path in sorted(pathlib.Path('.').glob('r[eu]*/[m-z]*.py'))
         for tree in ast.walk(ast.parse(path.read_text(encoding='utf-8')))
         if isinstance(tree, ast.FunctionDef)]
print(len(trees), hashlib.blake2b('\\n'.join(trees).encode()).hexdigest())'''
    here = Path(sys.base_prefix)        # other versions may be beside it, as pyenv installs them
    programs = {sys.executable, *map(str, here.parent.glob('3.1[1-9]*/bin/python3')), *(
        f'/usr/bin/python3.{n}' for n in range(11, 20) if Path(f'/usr/bin/python3.{n}').exists())}
    if len(programs) == 1:
        pytest.skip('needs a second version of Python')
    assert len({subprocess.run([python, '-c', program], cwd=HERE, check=True, text=True,
                               capture_output=True).stdout for python in programs}) == 1


# ---- Edits of the rule that matter only far away -------------------------------------------------

def within(distance):
    def sees(i, j, i_position, j_position, j_end, window):
        visible = (j <= i) & (i < j_end) & (i_position - j_position < distance)
        return visible if window is None else visible & (i_position - j_position < window)
    return sees


WAYS = ('auto', 'explicit', 'flex', 'tree'), (False, True)      # kind, compiled


@pytest.mark.parametrize('distance, T, window', [
    (100, 128, None), (200, 512, None), (400, 1024, None), (100, 130, 5000), (700, 1000, 800)])
def test_an_edited_rule_holds_in_every_mask_however_far_away_it_matters(distance, T, window,
                                                                        monkeypatch, capsys):
    monkeypatch.setattr(attention, 'sees', within(distance))
    for name in ('available', 'kernels_apply'):
        monkeypatch.setattr(kernels, name, lambda x: True)
    positions = torch.arange(T)[None]
    gap = positions.mT - positions
    for kind, compiled, ends in itertools.product(*WAYS, (None, torch.full_like(positions, T))):
        mask, = masks_of(kind, positions, ends, window, compiled)
        assert type(mask) is ExplicitMask
        assert torch.equal(mask.visible[0, 0], (gap >= 0) & (gap < distance))
    assert 'attention.sees was edited or replaced' in capsys.readouterr().out
    assert cache.keys_to_keep(window, T) == T


def test_an_edited_rule_holds_alike_in_training_scores_and_decoding(tmp_path, monkeypatch):
    reference_model('llama', tmp_path, max_position_embeddings=400)
    model = checkpoint.load(tmp_path)
    prompt = np.random.default_rng(0).integers(3, 211, 150).tolist()
    positions = torch.arange(len(prompt))[None]
    for name in ('available', 'kernels_apply'):
        monkeypatch.setattr(kernels, name, lambda x: False)
    before = model(torch.tensor([prompt]), positions, None)
    monkeypatch.setattr(attention, 'sees', within(100))
    after = model(torch.tensor([prompt]), positions, None)
    assert torch.allclose(before[:, :100], after[:, :100], atol=1e-5)
    assert not torch.allclose(before[:, 101:], after[:, 101:], atol=1e-3)
    ((_, (answer,)),) = generate.generate(model, [prompt], Sampling(temperature=0.0, max_tokens=5))
    expected = plain_log_probs(model, prompt, answer.tokens)[0]
    assert np.allclose(answer.log_probs, expected.detach().numpy(), atol=1e-4)
    tree = tree_rows.Tree((), prompt[:120], [prompt[120:]], [120])
    (score,), = scoring.option_log_probs(model, [tree], pack_len=256)
    assert score == pytest.approx(
        plain_log_probs(model, prompt[:120], prompt[120:])[0].sum().item(), abs=1e-3)


def test_an_edit_of_attend_reaches_every_mask(monkeypatch, capsys):
    monkeypatch.setattr(ExplicitMask, 'attend', capped(ExplicitMask.attend))
    monkeypatch.setattr(kernels, 'available', lambda x: True)
    index = torch.arange(20)[None]
    for kind, compiled in itertools.product(*WAYS):
        assert type(*masks_of(kind, index, index + 20, None, compiled)) is ExplicitMask
    assert 'ExplicitMask.attend was edited' in capsys.readouterr().out


# ---- Edits of other functions that matter only for large values or long inputs -------------------

def capped(plain, most=1000.0):
    return lambda *arguments: plain(*arguments).clamp(-most, most)


def gelu_tanh(x):
    return F.gelu(x, approximate='tanh').clamp(max=1000)


LARGE, ONES = 5000 * torch.ones(1, 2, 3, 16), torch.ones(1, 2, 3, 16)
EDITS = {       # (function, its edit, where it matters); each result is 1000 at the most
    'norm': (models, capped, lambda: models.norm(ONES, LARGE[0, 0, 0], None, 'llama', 0.0)),
    'gate': (models, capped, lambda: models.gate(LARGE, ONES, F.silu)),
    'rotate': (models, capped, lambda: models.rotate(
        LARGE, ONES[:, :, :1, :8], 0 * ONES[:, :, :1, :8])),
    'gelu_tanh': (models, lambda plain: gelu_tanh, lambda: models.gate(
        LARGE, ONES, models.gelu_tanh)),
    # of equal logits the token 1900 of 2000 is drawn
    'draw_plainly': (draw, capped, lambda: draw.draw(
        torch.zeros(1, 2000, device=DEVICE), torch.tensor([0.95], device=DEVICE).double(),
        Sampling(), 2000)[:, 0]),
    '_plain': (fused_ce, lambda plain: lambda z, *more: plain(z.clamp_(max=1000), *more),
               lambda: fused_ce.smoothed_cross_entropy(*(torch.tensor(x, device=DEVICE) for x in (
                   [[5000.0]], [[0.0], [1.0]], [0])))[0])}


@pytest.mark.parametrize('name', EDITS)
def test_an_edit_for_large_values_alone_reaches_what_has_a_kernel(name, monkeypatch, capsys):
    owner, edit, use = EDITS[name]
    for module, switch in ((kernels, 'kernels_apply'), (draw, 'available'),
                           (fused_ce, '_use_triton')):
        monkeypatch.setattr(module, switch, lambda x: True)
    assert (use() > 1000).all()
    monkeypatch.setattr(owner, name, edit(getattr(owner, name)))
    install.install()
    install.install()
    assert (use() == 1000).all()
    assert capsys.readouterr().out.count(f'{name} was edited') == 1


@pytest.mark.parametrize('owner, name, edited', [
    (DecodeMask, 'visible', lambda mask: torch.arange(mask.longest)[None] <= 100),
    (attention, 'sees', within(101)), (ExplicitMask, 'attend', capped(ExplicitMask.attend, 0.0))])
def test_an_edit_for_long_texts_alone_reaches_decoding(owner, name, edited, monkeypatch, capsys):
    monkeypatch.setattr(kernels, 'available', lambda x: True)
    like, one = torch.zeros(1), torch.tensor([0])
    stored = Cache(1, 1, 400, 16, like)
    stored.v[:, :, 250:] = 1.0
    q, k, v = torch.zeros(3, 1, 1, 1, 16)
    mask = DecodeMask(stored, one, torch.tensor([349]), 350)
    monkeypatch.setattr(owner, name, edited)
    y = mask.attend(q, k, v, 1.0, None).mean()      # all scores are equal: the mean of the values
    assert y == pytest.approx({'visible': 0, 'sees': 99 / 101, 'attend': 0}[name], abs=1e-6)
    assert 'so decode_kernel is not used' in capsys.readouterr().out


@pytest.mark.parametrize('of', ['Linear', 'LoRALinear'])
def test_an_edit_of_a_linear_layer_for_large_values_alone_reaches_training_in_eight_bits(
        of, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fp8, 'supported', lambda device: True)
    monkeypatch.setattr(fp8, 'NARROWEST', 0)
    reference_model('llama', tmp_path, hidden_size=64, intermediate_size=96)
    model = checkpoint.load(tmp_path, dtype=torch.bfloat16)
    models.add_lora(model, 2, 4.0, 0.0, ('up_proj',))
    kind = models.LoRALinear if of == 'LoRALinear' else torch.nn.Linear
    monkeypatch.setattr(kind, 'forward', capped(kind.forward, 0.5))
    fp8.use_fp8(model, 'cuda')
    layers = [getattr(x, name) for x in model.decoder.layers.modules()
              for name in model.config.family.lora_targets if hasattr(x, name)]
    assert {type(x).__name__ for x in layers if hasattr(x, 'eight_bit')} == {
        'Linear', 'LoRALinear'} - {of}
    assert 'linear layers stay in bfloat16' in capsys.readouterr().out
    mlp, x = model.decoder.layers[0].mlp, torch.full((1, 16, 64), 100.0, dtype=torch.bfloat16)
    assert kernels.products(x, mlp.gate_proj if of == 'Linear' else mlp.up_proj)[0].max() == 0.5


# ---- Each pair on random inputs ------------------------------------------------------------------

def packed_rows(T):
    """Positions and ends [2, T] of random trees; the first one has T / 4 tokens thrice."""
    trees = [tree_rows.Tree((), [0] * n, [[0] * (n + 1), [1] * (n + 1)], [n, n])
             for n in [T // 4, *torch.randint(1, 30, (30,)).tolist()]]
    arrays, _ = next(tree_rows.stack_rows(tree_rows.pack_trees(enumerate(trees), T), 2, 0))
    return torch.from_numpy(arrays[1:]).to(DEVICE)


@pytest.mark.parametrize('T, window', [(1024, None), (1500, 1500)])
def test_a_row_without_a_mask_is_what_the_rule_says(T, window):
    mask, = masks_of('auto', torch.arange(T)[None], None, window)
    visible = visible_keys(torch.arange(T)[None], torch.full((1, T), T), window)[0, 0]
    assert mask.visible is None and torch.equal(visible, torch.ones_like(visible).tril())


@pytest.mark.slow
@pytest.mark.parametrize('kind, T, window, head_dim, size, softcap', [
    ('flex', 600, None, 64, 3, None), ('flex', 520, 100, 128, 3, None),
    ('flex', 700, 300, 256, 30, 50.0), ('flex', 520, 1, 32, 1, 5.0),
    ('tree', 257, None, 20, 2, 5.0), ('tree', 257, 120, 64, 30, None),
    ('tree', 257, 90, 256, 2, 50.0), ('tree', 130, 1, 32, 2, None)])
def test_fast_masks_equal_the_explicit_mask(kind, T, window, head_dim, size, softcap):
    """On a GPU FlexAttention has gradients, and block sizes of its own in bfloat16."""
    print(f'torch.manual_seed({torch.seed()})')     # another one each time
    positions, ends = packed_rows(T)
    inputs = [torch.randn(2, heads, T, head_dim, device=DEVICE) for heads in (4, 2, 2, 4)]
    inputs[0] *= size
    torch._dynamo.reset()       # other tests may have used up the number of variants
    # in float32 a GPU has no room for the blocks of large heads
    types = [torch.float32] * (DEVICE == 'cpu' or head_dim < 128) + [
        torch.float16] * (kind == 'tree') + [torch.bfloat16]
    gradients = kind == 'flex' and DEVICE == 'cuda'
    for dtype in types:
        options = head_dim if kind == 'tree' else flex_options(head_dim, inputs[0].to(dtype))
        fast = {'tree': TreeMask, 'flex': FlexMask}[kind](positions, ends, window, options)
        explicit, outcomes = ExplicitMask(visible_keys(positions, ends, window)), []
        for mask, precision in ((fast, dtype), (explicit, torch.float64)):
            *x, upstream = (t.to(dtype).to(precision).requires_grad_(gradients) for t in inputs)
            y = mask.attend(*x, head_dim ** -0.5, softcap)
            outcomes.append([y, *(torch.autograd.grad(y, x, upstream) if gradients else ())])
        tolerance = {torch.float32: 1e-4 if size == 30 else 1e-5, torch.float16: 2e-3,
                     torch.bfloat16: 2e-2}[dtype]
        assert outcomes[0][0].dtype == dtype
        for ours, right in zip(*outcomes, strict=True):
            if window == 1 and not right.any():     # q and k have no gradient
                assert ours.abs().max() < tolerance
                continue
            assert off(ours, right) < tolerance / 2
            assert (ours - right).abs().max() < tolerance * right.abs().max()
