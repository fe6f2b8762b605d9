"""What the benchmarks of training and of evaluation share: models, the device, results on disk."""

import gc
import importlib.metadata
import json
import time
from pathlib import Path

import torch

import model as models
from checkpoint import config_from_hf
from outdir import write_text

LLAMA3 = {'model_type': 'llama', 'vocab_size': 128256, 'num_attention_heads': 32,
          'num_key_value_heads': 8, 'rms_norm_eps': 1e-5, 'max_position_embeddings': 131072,
          'rope_theta': 5e5}
MODELS = {      # as in config.json
    'gemma2_2b': {'model_type': 'gemma2', 'vocab_size': 256000, 'hidden_size': 2304,
                  'intermediate_size': 9216, 'num_hidden_layers': 26, 'num_attention_heads': 8,
                  'num_key_value_heads': 4, 'head_dim': 256, 'hidden_activation':
                  'gelu_pytorch_tanh', 'tie_word_embeddings': True},
    'llama32_1b': LLAMA3 | {'hidden_size': 2048, 'intermediate_size': 8192, 'head_dim': 64,
                            'num_hidden_layers': 16, 'tie_word_embeddings': True},
    'llama31_8b': LLAMA3 | {'hidden_size': 4096, 'intermediate_size': 14336, 'head_dim': 128,
                            'num_hidden_layers': 32, 'tie_word_embeddings': False},
    'mistral_7b': {'model_type': 'mistral', 'vocab_size': 32768, 'hidden_size': 4096,
                   'intermediate_size': 14336, 'num_hidden_layers': 32, 'num_attention_heads': 32,
                   'num_key_value_heads': 8, 'head_dim': 128, 'sliding_window': None,
                   'rms_norm_eps': 1e-5, 'rope_theta': 1e6, 'max_position_embeddings': 32768,
                   'tie_word_embeddings': False},
}
DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'     # a CPU is for the tests alone


def our_model(raw):
    """Return our model of the shape `raw`, with random bfloat16 weights."""
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(DEVICE):
        model = models.CausalLM(config_from_hf(raw))
        model.init_weights()
    torch.set_default_dtype(torch.float32)
    return model


def peer_model(raw, attention):
    """Return the Hugging Face model of the same shape."""
    import transformers
    config = transformers.AutoConfig.for_model(**raw, use_cache=False)
    with torch.device(DEVICE):
        return transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=attention)


def compiled_graphs():
    return torch._dynamo.utils.counters['stats']['unique_graphs']


def now():
    """Return the time in seconds when the device has done its work."""
    if DEVICE == 'cuda':
        torch.cuda.synchronize()
    return time.perf_counter()


def reset_peak_memory():
    if DEVICE == 'cuda':
        torch.cuda.reset_peak_memory_stats()


def peak_gib():
    return torch.cuda.max_memory_allocated() / 2 ** 30 if DEVICE == 'cuda' else 0.0


def free_memory():
    gc.collect()
    if DEVICE == 'cuda':
        torch.cuda.empty_cache()


def versions():
    device = torch.cuda.get_device_name() if DEVICE == 'cuda' else 'CPU'
    found = {'device': device, 'torch': torch.__version__}
    for package in ('triton', 'transformers', 'liger-kernel', 'torchmetrics', 'netcal'):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def failure(error):
    """Return the entry of a peer that cannot do what was asked of it."""
    return {'failed': f'{type(error).__name__}: {str(error).splitlines()[0]}'[:300]}


def save(path, tables):
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps({'versions': versions(), 'tables': tables}, indent=1) + '\n')
    print(f'wrote {path}')


def load(path):
    return json.loads(Path(path).read_text(encoding='utf-8'))
