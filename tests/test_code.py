"""runtime/digests.py: which edits count as other code."""

import importlib.util
import sys

import pytest
from common import llama_config

import evaluate
from decoding import answers
from decoding.written_tasks import DistractorConfidence
from results import confidence
from runtime import digests


def load(path, monkeypatch):
    """Return the module of a file."""
    spec = importlib.util.spec_from_file_location(f'edited_{path.stem}', path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize('file, old, new, other', [
    ('model.py', '    y, w = x.float(),', '    y, w = 2 * x.float(),', True),
    ('model.py', '"""Return the output matrix', '"""Return a matrix', False),
    ('model.py', "'qwen2': Family(qkv_bias=True)", "'qwen2': Family()", False),
    ('model.py', "'llama': Family()", "'llama': Family(o_bias=True)", True),
    ('attention.py', 'visible = (j <= i)', 'visible = (j < i)', True),
    ('fused_ce.py', '    tl.store(lse + row', '    tl.store(1 + lse + row', True),
    ('cache.py', 'newest - index', 'newest + index', True),
    ('answer_samples.py', '[first:last + 1]', '[first:last]', True),
    ('p_ik_probe.py', 'x = x - x.mean(0)', 'x = x - 1', True),
    ('packed_answers.py', 'room -= len(ids) - 1', 'room -= len(ids)', False)])
def test_an_edit_of_what_samples_use_is_other_code(file, old, new, other, tmp_path, monkeypatch):
    config, copies = llama_config(), []
    before = digests.code_digest(config, *evaluate.CODE)
    for number, path in enumerate(digests.FILES):
        copies.append(tmp_path / str(number) / path.name)
        copies[-1].parent.mkdir()
        copies[-1].write_text(path.read_text())
        if path.name == file:
            assert old in path.read_text()
            copies[-1].write_text(path.read_text().replace(old, new, 1))
        if path.name == file == 'model.py':     # whose row of the table the configuration holds
            config.family = load(copies[-1], monkeypatch).FAMILIES['llama']
    monkeypatch.setattr(digests, 'FILES', tuple(copies))
    assert (digests.code_digest(config, *evaluate.CODE) != before) == other


def test_the_kind_of_model_and_each_root_count():
    llama, qwen2, mistral = (digests.code_digest(config, answers.stream) for config in (
        llama_config(model_type=kind, num_key_value_heads=2)
        for kind in ('llama', 'qwen2', 'mistral')))
    assert llama != qwen2 and llama == mistral
    assert digests.code_digest(llama_config(), answers.stream, answers.generate) != llama
    assert {DistractorConfidence.samples, confidence.distractor_normalized} < {*evaluate.CODE}


def test_of_a_method_only_the_method_counts_and_of_a_function_what_it_calls(tmp_path, monkeypatch):
    def used(source):
        path = tmp_path / f'm{len([*tmp_path.iterdir()])}.py'
        path.write_text(source)
        module = load(path, monkeypatch)
        return [digests.used_code((), module.C.f), digests.used_code((path,), module.g)]
    source = ('A = B = 2\n\nclass C:\n    def f(self):\n        return 1\n'
              '    def h(self):\n        return 2\n'
              '\ndef g():\n    "Text."\n    return k(A)\n\ndef k(x):\n    return x\n')
    before = used(source)
    for old, new, differ in (('return 2', 'return 3', [False, False]),
                             ('return 1', 'return 3', [True, False]),
                             ('return x', 'return -x', [False, True]),
                             ('B = 2', 'B = 3', [False, True]),
                             ('"Text."', '"Words."', [False, False])):
        after = used(source.replace(old, new))
        assert [a != b for a, b in zip(before, after)] == differ, old
