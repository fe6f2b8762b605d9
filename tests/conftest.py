"""Paths, environment and the fixtures that tests of several rooms share.

Kernels run through Triton's interpreter where there is no GPU. Tests that need a GPU, or a file of
../shared (real tokenizers and benchmarks), skip with a reason where it is missing.
"""

import contextlib
import io
import os
import sys
from dataclasses import replace
from pathlib import Path

os.environ.setdefault('TRANSFORMERS_VERBOSITY', 'error')
os.environ.setdefault('HF_HUB_OFFLINE', '1')
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

if not torch.cuda.is_available():
    os.environ.setdefault('TRITON_INTERPRET', '1')  # before anything imports triton

import pytest
import demo
from common import sentencepiece_folder, tiktoken_folder
from data.tokenizer import load_tokenizer
from data.world import WorldSpec, make_world
from train import train


@pytest.fixture(scope='session')
def tokenizers(tmp_path_factory):
    base = tmp_path_factory.mktemp('tokenizers')
    folders = {kind: sentencepiece_folder(base / kind, kind)
               for kind in ('gemma', 'mistral', 'llama2')}
    folders['llama3'] = tiktoken_folder(base / 'llama3')
    return {kind: load_tokenizer(folder) for kind, folder in folders.items()}


@pytest.fixture(scope='session')
def small_world(tmp_path_factory):
    """(folder, printed text) of the demo in a smaller world with fewer steps."""
    folder, printed = tmp_path_factory.mktemp('demo'), io.StringIO()
    spec = WorldSpec(entities=300, documents=400, instructions=60, questions=40)
    few_steps = {'batch_size': 16, 'epochs': 1.5, 'checkpoint_epochs': True, 'val_size': 4,
                 'workers': 1}
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(demo, 'make_world', lambda place, seed: make_world(place, seed, spec))
        patch.setattr(demo, 'train', lambda cfg: train(replace(cfg, **few_steps)))
        demo.main([f'--out_dir={folder}', '--seed=7'])
    return folder, printed.getvalue()
