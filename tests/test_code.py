"""runtime/digests.py: which edits count as other code."""

import shutil

import pytest
from common import HERE

import evaluate
from alignment import reference
from data import cache, instruct, preferences
from runtime import digests

# of evaluate.py, generate.py and align.py
SAMPLES, ANSWERS = evaluate.CODE, ('decoding.answers', 'scoring')
REFERENCE = reference.__name__,
ALL = [SAMPLES, ANSWERS, REFERENCE]


@pytest.fixture(scope='module')
def copy(tmp_path_factory):
    return shutil.copytree(HERE, tmp_path_factory.mktemp('copy') / 'copy', ignore=(
        shutil.ignore_patterns('.*', '__pycache__', 'tests', 'research', 'docs', 'out')))


@pytest.fixture
def edited(copy, monkeypatch):
    """A function (file, text) that changes a file in a copy of the repository."""
    parsed, texts = digests.parsed, {}
    monkeypatch.setattr(digests, 'HERE', copy)
    monkeypatch.setattr(digests, 'parsed', lambda path: (
        parsed.__wrapped__ if path in texts else parsed)(path))

    def edit(file, text):
        texts.setdefault(copy / file, (copy / file).read_text())
        (copy / file).write_text(text)
    yield edit
    for path, text in texts.items():
        path.write_text(text)


@pytest.mark.parametrize('file, old, new, roots', [
    ('model.py', '    y, w = x.float(),', '    y, w = 2 * x.float(),', ALL),
    ('speed/kernels.py', 'shrink = tl.exp2(highest', 'shrink = tl.exp(highest', ALL),
    ('fused_ce.py', '    tl.store(lse + row', '    tl.store(1 + lse + row', ALL),
    ('data/tree_rows.py', 'return np.bincount(numbers', 'return -np.bincount(numbers', ALL),
    ('data/tasks.py', "'options': [question.ending", "'option': [question.ending", [SAMPLES]),
    ('written/variants.py', 'np.exp(log_p[0])', 'np.exp(log_p[1])', [SAMPLES]),
    ('scoring.py', '(logits - lse[at])', '(lse[at] - logits)', [SAMPLES, ANSWERS]),
    ('decoding/cache.py', 'newest - index', 'newest + index', [SAMPLES, ANSWERS]),
    ('written/answer_samples.py', '[first:last + 1]', '[first:last]', [SAMPLES]),
    ('alignment/packed_answers.py', 'room -= len(ids) - 1', 'room -= len(ids)', [REFERENCE]),
    ('alignment/reference.py', '-sequences.lengths', 'sequences.lengths', [REFERENCE]),
    # docstrings, line breaks
    ('model.py', '"""Return the output matrix', '"""Return a matrix', []),
    ('scoring.py', 'compute=token_log_probs,\n          trim=1', 'compute=token_log_probs, trim=1',
     []),
    # what samples hold by its content, or what reads them
    ('data/benchmarks.py', 'BENCHMARKS = {', 'MORE = 1\nBENCHMARKS = {', []),
    *((file, 'import', 'import sys\nimport', [])
      for file in ('runtime/log.py', 'metrics.py', 'results/report.py')),
    ('align.py', '-F.logsigmoid(cfg.beta', '-2 * F.logsigmoid(cfg.beta', [])])
def test_an_edit_of_a_file_that_makes_samples_is_other_code(edited, file, old, new, roots):
    before = [digests.code_digest(*names) for names in ALL]
    text = (digests.HERE / file).read_text()
    assert old in text
    edited(file, text.replace(old, new, 1))
    after = [digests.code_digest(*names) for names in ALL]
    assert [a != b for a, b in zip(before, after)] == [names in roots for names in ALL]


def test_a_file_counts_as_soon_as_it_is_imported_also_inside_a_function(edited):
    path = digests.HERE / 'decoding' / 'draw.py'
    path.with_name('penalty.py').write_text('STRENGTH = 1\n')
    before = digests.code_digest(*ANSWERS)
    edited('decoding/draw.py', path.read_text() + '\n\ndef penalized():\n'
           '    from decoding import penalty\n    return penalty\n')
    imported = digests.code_digest(*ANSWERS)
    edited('decoding/penalty.py', 'STRENGTH = 2\n')
    assert len({before, imported, digests.code_digest(*ANSWERS)}) == 3


@pytest.mark.parametrize('load, more', [
    (instruct.load_conversations, ''), (preferences.load_preferences, 'data/preferences.py')])
def test_tokens_depend_on_the_code_that_reads_and_encodes_rows(load, more):
    files = {str(path.relative_to(HERE)) for path in cache.reader_files(load)}
    # which data/tokenizer.py opens by rooms.load
    assert {'data/byte_pairs.py', 'data/sentence_pieces.py'} <= files
    assert files >= {more or 'data/chat.py', 'data/cache.py', 'data/files.py', 'data/messages.py',
                     'data/tokenizer.py', 'runtime/readers.py', 'runtime/sources.py',
                     'runtime/other_readers.py'}
    assert not files & {'data/benchmarks.py', 'data/tasks.py', 'runtime/log.py', 'train.py'}
