"""Paths, environment and the fixtures that several test files share.

Kernels run through Triton's interpreter where there is no GPU. Tests that need a GPU, or a real
tokenizer or benchmark (tests/fetch_real_files.py), skip with a reason where it is missing. Tests do
not depend on their order, and several processes can share them.
"""

import contextlib
import functools
import io
import os
import random
import shutil
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

os.environ.setdefault('TRANSFORMERS_VERBOSITY', 'error')
os.environ.setdefault('HF_HUB_OFFLINE', '1')
# transformers would start a thread for each tensor of models that have hardly any weights
os.environ.setdefault('HF_DEACTIVATE_ASYNC_LOAD', '1')
# the models are tiny, and with one process per core more threads only wait for each other
os.environ.setdefault('OMP_NUM_THREADS', '1')
sys.path.insert(0, str(Path(__file__).parent.parent))

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault('TRITON_INTERPRET', '1')      # before anything imports triton

from common import WORDS, reference_model, sentencepiece_folder, tiktoken_folder, write_rows
from data.tokenizer import load_tokenizer
from speed.install import install


SLOW = {'small_world', 'asked', 'whole', 'own', 'small', 'several'}      # fixtures
LONGEST = ('test_the_tests_that_a_contributor_runs_pass_with_every_recipe',
           'test_ruff_and_mypy_find_nothing[mypy]')


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark the tests of fixtures slow that take seconds, such as the demo's run.

    The longest tests begin first, so that no process waits for one at the end.
    """
    items.sort(key=lambda item: item.name not in LONGEST)
    for item in items:
        if SLOW & {*getattr(item, 'fixturenames', ())}:
            item.add_marker('slow')


def pytest_terminal_summary(terminalreporter):
    """Print how many tests skipped for each reason."""
    skipped = terminalreporter.stats.get('skipped', ())
    for reason, n in Counter(report.longrepr[2] for report in skipped).most_common():
        terminalreporter.write_line(f'{n} skipped: {reason.removeprefix("Skipped: ")}')


@pytest.fixture(params=['cpu', 'cuda'])
def device(request):
    if request.param == 'cuda' and not torch.cuda.is_available():
        pytest.skip('needs a CUDA device')
    if request.param == 'cuda':
        install()       # as the scripts do
    return request.param


@pytest.fixture(scope='session')
def tokenizers(tmp_path_factory):
    base = tmp_path_factory.mktemp('tokenizers')
    folders = {kind: sentencepiece_folder(base / kind, kind)
               for kind in ('gemma', 'mistral', 'llama2')}
    folders['llama3'] = tiktoken_folder(base / 'llama3')
    return {kind: load_tokenizer(folder) for kind, folder in folders.items()}


@pytest.fixture
def chat_folder(tmp_path):
    """A tiny random model that was trained in the template of tulu."""
    folder = sentencepiece_folder(tmp_path / 'model', 'llama2')
    reference_model('llama', folder, vocab_size=load_tokenizer(folder).n_vocab,
                    max_position_embeddings=200)
    (folder / 'train_config.py').write_text("data_kind = 'instruct'\ntemplate = 'tulu'\n")
    return folder


@pytest.fixture(scope='session')
def small_world(tmp_path_factory):
    """(folder, printed text) of the demo in a smaller world with fewer steps; tests must not write
    into the folder."""
    import demo
    from world import WorldSpec, make_world
    from train import train_and_report
    folder, printed = tmp_path_factory.mktemp('small_world'), io.StringIO()
    spec = WorldSpec(entities=300, documents=280, instructions=60, questions=40)
    few_steps = {'batch_size': 16, 'epochs': 1.5, 'checkpoint_epochs': True, 'val_size': 4,
                 'workers': 1}
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(demo, 'make_world', lambda folder, seed: make_world(folder, seed, spec))
        patch.setattr(demo, 'pick_threads', functools.partial(demo.pick_threads, seconds=0.01))
        patch.setattr(demo, 'train_and_report',
                      lambda cfg: train_and_report(replace(cfg, **few_steps)))
        demo.main([f'--out_dir={folder}', '--seed=7'])
    return folder, printed.getvalue()


@pytest.fixture
def settings_file(small_world):
    """The settings of the demo's tuned run, as the first argument of train.py."""
    return str(small_world[0] / 'tuned' / 'train_config.py')


@pytest.fixture(scope='module')
def base(request, tmp_path_factory):
    """A tiny random model with Llama 2's tokenizer: a Llama, or that of an indirect parameter."""
    folder = sentencepiece_folder(tmp_path_factory.mktemp('base'), 'llama2')
    reference_model(getattr(request, 'param', 'llama'), folder, vocab_size=400)
    return folder


@pytest.fixture(scope='session')
def own(tmp_path_factory):
    """A folder with a model, conversations, texts and benchmarks as they are published."""
    folder = tmp_path_factory.mktemp('own')
    shutil.copytree(Path(__file__).parent / 'paper_files', folder, dirs_exist_ok=True)
    reference_model('llama', sentencepiece_folder(folder / 'model', 'llama2'), vocab_size=450,
                    max_position_embeddings=2048)
    return folder


@pytest.fixture(scope='session')
def scored_folder(tmp_path_factory):
    """A tiny Llama with a sentencepiece tokenizer, and a task of 3 languages with shots."""
    folder, rng = tmp_path_factory.mktemp('scored'), random.Random(0)
    sentencepiece_folder(folder / 'model', 'mistral')
    reference_model('llama', folder / 'model', vocab_size=load_tokenizer(folder / 'model').n_vocab)
    for language in ('de', 'en', 'sw'):
        for split, n in (('dev', 6), ('test', 40)):
            rows = [{'sample_id': f'{split}/{i}', 'subject': ('anatomy', 'sociology')[i % 2],
                     'question': ' '.join(rng.sample(WORDS, 4)) + '?', 'answer': 'ABCD'[i % 4],
                     **{f'option_{c}': rng.choice(WORDS) for c in 'abcd'}} for i in range(n)]
            write_rows(folder / 'data' / f'{language}_{split}.jsonl', rows)
    return folder
