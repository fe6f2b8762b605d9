"""runtime/digests.py: which edits count as other code."""

import importlib.util
import sys

import pytest
from common import llama_config

import evaluate
from decoding import answers
from runtime import digests


@pytest.fixture
def edited(tmp_path):
    """Return a function that copies files, with one edit in that of a name, and returns them."""
    def copy(files, name, old, new):
        copies, found = [], 0
        for number, file in enumerate(files):
            text = file.read_text()
            if file.name == name:
                found = text.count(old)
                text = text.replace(old, new, 1)
            copies.append(tmp_path / str(number) / file.name)
            copies[-1].parent.mkdir(exist_ok=True)
            copies[-1].write_text(text)
        assert found
        return tuple(copies)
    return copy


@pytest.mark.parametrize('file, old, new, other', [
    ('model.py', '    y, w = x.float(),', '    y, w = 2 * x.float(),', True),
    ('model.py', '"""Return the output matrix', '"""Return a matrix', False),
    ('model.py', "'qwen2': Family(qkv_bias=True)", "'qwen2': Family()", False),
    ('model.py', "'llama': Family()", "'llama': Family(o_bias=True)", True),
    ('attention.py', 'visible = (j <= i)', 'visible = (j < i)', True),
    ('fused_ce.py', '    tl.store(lse + row', '    tl.store(1 + lse + row', True),
    ('cache.py', 'newest - index', 'newest + index', True)])
def test_an_edit_of_what_samples_use_is_other_code(file, old, new, other, edited, monkeypatch):
    before = digests.code_digest(llama_config(), *evaluate.CODE)
    copies = edited(digests.FORWARD, file, old, new)
    monkeypatch.setattr(digests, 'FORWARD', copies)
    config = llama_config()
    if "'llama'" in old or "'qwen2'" in old:    # whose row the configuration holds
        path, = (path for path in copies if path.name == file)
        spec = importlib.util.spec_from_file_location('edited_model', path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, 'edited_model', module)
        spec.loader.exec_module(module)
        config.family = module.FAMILIES['llama']
    assert (digests.code_digest(config, *evaluate.CODE) != before) == other


def test_the_kind_of_model_and_each_root_count():
    llama, qwen2, mistral = (digests.code_digest(config, answers.stream) for config in (
        llama_config(model_type=kind, num_key_value_heads=2)
        for kind in ('llama', 'qwen2', 'mistral')))
    assert llama != qwen2 and llama == mistral
    assert digests.code_digest(llama_config(), answers.stream, answers.generate) != llama


def test_of_a_method_only_the_method_counts_and_of_a_function_what_it_calls(tmp_path, monkeypatch):
    def used(source):
        path = tmp_path / f'm{len([*tmp_path.iterdir()])}.py'
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, path.stem, module)
        spec.loader.exec_module(module)
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
