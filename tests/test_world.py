"""data: generated worlds"""

import hashlib

import pytest

from data.world import WorldSpec, make_world
from research.study import world as study_world
from research.study.world import StudySpec

SMALL = {'entities': 40, 'documents': 60, 'instructions': 12, 'questions': 10,
         'vocab_sizes': (400,), 'tokenizer_documents': 60}
WHOLE = {'entities': 60, 'unseen': 9, 'documents': 90, 'exam_share': 0.2, 'paraphrases': True,
         'language_shares': (0.5, 0.3, 0.2), 'vocab_sizes': (420, 440), 'tokenizer_documents': 90,
         'instructions': 15, 'questions': 10, 'unseen_questions': 4, 'validation': 5,
         'forms': ('text4', 'letters10'), 'probes': 6}


@pytest.mark.parametrize('make, spec, n_files, digest', [
    (make_world, WorldSpec(**SMALL), 6, '051c643fb74aa8ee9ed005a25c044f91'),
    (study_world.make_world, StudySpec(**SMALL), 6, '771de9d103de3065bc33b5a9792ce018'),
    (study_world.make_world, StudySpec(**WHOLE), 15, 'e863f508a0ae94306ea36173ebff0520')])
def test_worlds_stay_byte_for_byte(tmp_path, make, spec, n_files, digest):
    """Committed results are of these bytes; sentencepiece's own, tokenizer.model, may change."""
    make(tmp_path / 'world', 7, spec)
    files = sorted(path for path in (tmp_path / 'world').rglob('*') if path.is_file())
    content = hashlib.sha256()
    for path in files:
        if path.name != 'tokenizer.model':
            content.update(f'{path.relative_to(tmp_path / "world")}\n'.encode())
            content.update(path.read_bytes())
    assert len(files) == n_files and content.hexdigest().startswith(digest)


def test_a_world_is_made_once_and_anew_after_an_interruption(tmp_path):
    """It replaces no temporary file and writes through no link."""
    spec, world, victim = WorldSpec(**SMALL), tmp_path / 'world', tmp_path / 'victim'
    make_world(world, 7, spec)
    made = {path: (path.stat().st_mtime_ns, path.read_bytes())
            for path in world.rglob('*') if path.is_file()}
    make_world(world, 7, spec)
    assert all(path.stat().st_mtime_ns == time for path, (time, _) in made.items())
    (world / 'world.json').write_text('unfinished')
    victim.write_text('mine')
    (world / 'questions.jsonl').unlink()
    (world / 'questions.jsonl.tmp').write_text('mine')
    (world / 'instruct.jsonl').unlink()
    for name in ('text.jsonl.tmp', 'instruct.jsonl'):
        (world / name).symlink_to(victim)
    make_world(world, 7, spec)
    assert all(path.read_bytes() == content for path, (_, content) in made.items())
    assert (world / 'questions.jsonl.tmp').read_text() == victim.read_text() == 'mine'
    assert (world / 'text.jsonl.tmp').is_symlink() and not (world / 'instruct.jsonl').is_symlink()
