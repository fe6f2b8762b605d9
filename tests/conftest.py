"""Paths, environment and the fixtures that tests of several rooms share.

Kernels run through Triton's interpreter where there is no GPU. Tests that need a GPU, or a file of
../shared (real tokenizers and benchmarks), skip with a reason where it is missing.
"""

import os
import subprocess
import sys
from pathlib import Path

os.environ.setdefault('TRANSFORMERS_VERBOSITY', 'error')
os.environ.setdefault('HF_HUB_OFFLINE', '1')
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

if not torch.cuda.is_available():
    os.environ.setdefault('TRITON_INTERPRET', '1')  # before anything imports triton

import pytest

from common import HERE, sentencepiece_folder, tiktoken_folder
from data.tokenizer import load_tokenizer


@pytest.fixture(scope='session')
def tokenizers(tmp_path_factory):
    base = tmp_path_factory.mktemp('tokenizers')
    folders = {kind: sentencepiece_folder(base / kind, kind)
               for kind in ('gemma', 'mistral', 'llama2')}
    folders['llama3'] = tiktoken_folder(base / 'llama3')
    return {kind: load_tokenizer(folder) for kind, folder in folders.items()}


@pytest.fixture(scope='session')
def small_world(tmp_path_factory):
    """The demo's road with a smaller world and few steps; the folder that it left."""
    folder = tmp_path_factory.mktemp('demo')
    small = {'entities': 300, 'documents': 400, 'instructions': 60, 'questions': 40}
    done = subprocess.run([sys.executable, 'train.py', 'configs/demo.py', f'--out_dir={folder}',
                           *(f'--world.{name}={value}' for name, value in small.items()),
                           '--checkpoint_epochs', '--seed=7', '--val_size=4', '--workers=1',
                           *(f'--runs.{run}.{value}' for run in ('base', 'tuned', 'tuned_ls01')
                             for value in ('batch_size=16', 'epochs=1.5'))],
                          cwd=HERE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout
