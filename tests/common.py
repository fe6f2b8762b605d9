"""What tests of several rooms share: tiny models, tokenizers, tasks."""

import base64
import contextlib
import json
import os
import shutil
import string
import tomllib
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import sentencepiece
import torch
from safetensors.torch import load_file, save_file

import model as models
import train
from data.eval_config import EvalConfig
from results.samples import CHECKSUM, samples_digest
from runtime import checkpoint
from runtime.config import load_config
from runtime.config_json import config_from_hf
from runtime.config_keys import ARCHITECTURES as ARCHITECTURE_OF
from runtime.digests import json_digest
from runtime.errors import ConfigError

HERE = Path(__file__).parent.parent     # the repository

# real tokenizers and benchmarks, from tests/fetch_real_files.py
SHARED = Path(os.environ.get('NANOCAL_SHARED', HERE.parent / 'shared'))


def cases_of(name):
    """Return the tables in a .json or .toml file of tests/."""
    text = (HERE / 'tests' / name).read_text(encoding='utf-8')
    return (json if name.endswith('.json') else tomllib).loads(text)


def program(name, **values):
    """Return a program of tests/programs.toml with these values."""
    return string.Template(cases_of('programs.toml')[name]).safe_substitute(values)


def needs_files(*names):
    """Skip the test that calls this if a file or folder is missing in SHARED."""
    for name in names:
        if not (SHARED / name).exists():
            pytest.skip(f'needs {SHARED / name}: see tests/fetch_real_files.py')


def asking(**options):
    """Return an EvalConfig, by default without shots."""
    return EvalConfig(**{'shots': 0} | options)


def config(tmp_path, content, *arguments):
    path = tmp_path / 'experiment.py'
    path.write_text(content)
    return load_config(train.TrainConfig, [str(path), *arguments])


CORPUS = ['The quick brown fox jumps over the lazy dog.', 'Question: one or two?', 'Answer: A',
          'What is the colour of the sky? It is blue.', 'Antwort: zwölf Äpfel',
          'user model assistant system'] * 20

WORDS = 'quick brown fox jumps over the lazy dog blue river old stone'.split()

PIECES = cases_of('sentencepiece.json')       # the settings of the files of these models


def sentencepiece_folder(folder, kind, texts=()):
    """A tokenizer with the settings of PIECES[kind], trained on CORPUS and more texts."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ('spiece.model' if kind == 't5' else 'tokenizer.model'), 'wb') as file:
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter([*CORPUS, *texts]),
                                                 model_writer=file, minloglevel=2, **PIECES[kind])
    return folder


def tiktoken_folder(folder):
    """128,000 ranks in the format of Llama 3's file: the bytes, two real merges, and filling."""
    tokens = [bytes([i]) for i in range(256)] + [b'us', b'er', b'user', b'<|']
    filling = (b'\xff' + i.to_bytes(3, 'big') for i in range(128_000 - len(tokens)))
    folder.mkdir(parents=True)
    (folder / 'tokenizer.model').write_bytes(b''.join(
        base64.b64encode(token) + b' %d\n' % rank
        for rank, token in enumerate([*tokens, *filling])))
    return folder


def write_rows(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == '.parquet':
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == '.arrow':       # what save_to_disk of datasets writes
        batch = pyarrow.RecordBatch.from_pylist(rows)
        with pyarrow.ipc.new_stream(path, batch.schema) as stream:
            stream.write(batch)
    elif path.suffix == '.json':
        path.write_text(json.dumps(rows))
    else:
        if path.name == 'samples.jsonl':
            rows = [row | {CHECKSUM: json_digest(row, 4)} for row in rows]
        path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    return path


# name: (class in transformers, its settings)
ARCHITECTURES = cases_of('architectures.json')


def class_of(config):
    import transformers
    return getattr(transformers, ARCHITECTURE_OF[config.model_type])


def reference_model(name, folder, **more):
    """A small random model by transformers, saved into `folder`; `more`: other config keys."""
    import transformers
    kind, options = ARCHITECTURES[name]
    shape = {'vocab_size': 211, 'hidden_size': 48, 'intermediate_size': 80, 'num_hidden_layers': 3,
             'num_attention_heads': 4, 'num_key_value_heads': 2, 'attn_implementation': 'eager',
             'pad_token_id': None}      # transformers drops gradients of the pad token
    config = getattr(transformers, f'{kind}Config')(**(shape | options | more))
    torch.manual_seed(list(ARCHITECTURES).index(name))
    reference = class_of(config)(config).eval()
    with torch.no_grad():
        # norms off their start, attention far from uniform
        for key, p in reference.named_parameters():
            norm = 'norm' in key and not kind.startswith('Gemma') and not key.endswith('bias')
            p.copy_(torch.randn_like(p) * 0.25 + norm)
    reference.save_pretrained(folder)
    return reference


def small_model(name, folder, device='cpu', dtype=None, **more):
    """The model of `reference_model`, loaded by us."""
    reference_model(name, folder, **more)
    return checkpoint.load(folder, device, dtype)


def head_of_32(name):
    """The keys of a model with heads of 32 numbers: FlexAttention wants a power of two."""
    own = ARCHITECTURES[name][0].startswith(('Llama', 'Mistral', 'Ministral', 'Qwen', 'Gemma'))
    return {'head_dim': 32} if own else {'num_attention_heads': 2, 'hidden_size': 64}


def few_layers(name, n):
    """The keys of a model with n layers, with and without windows or positions in turn."""
    alternate = {'layer_types': ['sliding_attention' if i % 2 == 0 else 'full_attention'
                                 for i in range(n)]}
    own = {'smollm3': {'no_rope_layers': [1 - i % 2 for i in range(n)]},
           **dict.fromkeys(('gemma2', 'gemma3', 'olmo3', 'cohere2', 'ministral'), alternate)}
    return {'num_hidden_layers': n} | own.get(name, {})


def parameters_of(reference):
    """The parameters of a transformers model under the names that it has on disk."""
    neox = reference.config.model_type == 'gpt_neox'
    return {key.replace('lm_head', 'embed_out') if neox else key: p
            for key, p in reference.named_parameters()}


def named(model):
    """The parameters of our model under the names that they have on disk."""
    return {checkpoint.their_key(key, model.config): p for key, p in model.named_parameters()}


def llama_config(**more):
    """A configuration of a tiny Llama, as a config.json says it."""
    return config_from_hf({'model_type': 'llama', 'vocab_size': 50, 'hidden_size': 16,
                           'intermediate_size': 24, 'num_hidden_layers': 2,
                           'num_attention_heads': 2} | more)


def whole_rows(tokens):
    """positions and ends of rows that hold one text each."""
    B, T = tokens.shape
    return (torch.arange(T, device=tokens.device).expand(B, T),
            torch.full((B, T), T, device=tokens.device))


def logits_of(model, tokens):
    """The logits [B, T, V] of rows that hold one text each; model: one of ours, or its folder."""
    model = checkpoint.load(model) if isinstance(model, Path) else model
    return model.logits(model(tokens, *whole_rows(tokens)))


def by_transformers(folder, **options):
    import transformers
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, **{'attn_implementation': 'eager'} | options).eval()


def add_to_hub(hub, name, content, kind='models'):
    """Copy the folder `content` to where huggingface_hub keeps a repository."""
    place, commit = hub / f'{kind}--{name.replace("/", "--")}', 40 * '0'
    shutil.copytree(content, place / 'snapshots' / commit)
    (place / 'refs').mkdir()
    (place / 'refs' / 'main').write_text(commit)


def rewrite(folder, change, name='model.safetensors'):
    tensors = load_file(folder / name)
    change(tensors)
    save_file(tensors, folder / name, metadata={'format': 'pt'})


def edit_config(folder, name='config.json', **values):
    """Set keys of a file of settings; '...' removes one."""
    path = folder / name
    values = json.loads(path.read_text()) | values
    path.write_text(json.dumps({k: v for k, v in values.items() if v != '...'}))


def image_model(kind, text, shape, **more):
    """A model of transformers for text and images, by the class and keys of its text model."""
    import transformers
    vision = {'hidden_size': 16, 'intermediate_size': 16, 'num_hidden_layers': 1,
              'num_attention_heads': 2, 'image_size': 28, 'patch_size': 14}
    config = getattr(transformers, f'{kind}Config')(
        text_config=getattr(transformers, f'{text}Config')(**shape).to_dict(),
        vision_config=vision | ({'head_dim': 8} if kind == 'Mistral3' else {}),
        attn_implementation='eager', mm_tokens_per_image=4, **more)
    return getattr(transformers, f'{kind}ForConditionalGeneration')(config).eval()


def documents(seed, lengths):
    rng = np.random.default_rng(seed)
    return [(rng.integers(0, 211, n), (np.arange(n) > n // 3).astype(int)) for n in lengths]


def expect_step(model, loss):
    """Return a function that takes a step of training and asserts that it has this loss, a tensor
    of plain torch, with its gradients; it returns the values of the step."""
    model.zero_grad()
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}

    def step(packed, cfg, *objective):
        model.zero_grad()
        values = train.forward_backward(model, packed, cfg, 'cpu', *objective)
        assert values['loss'].item() == pytest.approx(loss.item(), rel=1e-5, abs=3e-6)
        for name, p in model.named_parameters():
            assert not p.requires_grad or off(p.grad, gradients[name]) < 2e-5, name
        return values
    return step


def exactly(value):
    return pytest.approx(value, rel=0, abs=1e-12)


def off(a, b):
    """Relative error of a in the Euclidean norm."""
    a, b = a.detach().double(), b.detach().double()
    return ((a - b).norm() / b.norm().clamp_min(1e-30)).item()


def same_weights(a, b):
    a, b = (load_file(folder / 'model.safetensors') for folder in (a, b))
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def tree(folder):
    """{relative path: content} of all files below `folder`, but the lock."""
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob('*'))
            if p.is_file() and p.name != '.lock'}


@contextlib.contextmanager
def refused(folder, message, error=ConfigError):
    """Assert that what is done here raises the error, and changes no file below `folder`."""
    before = tree(folder)
    with pytest.raises(error, match=message):
        yield
    assert tree(folder) == before


def apart(one, two, base):
    """How far the weights in two folders are apart, relative to their distance from the base."""
    one, two, base = (load_file(folder / 'model.safetensors') for folder in (one, two, base))
    changed = [key for key, x in one.items() if key not in base or not torch.equal(x, base[key])]
    assert one.keys() == two.keys() and len(changed) > 3
    return max(((one[key] - two[key]).norm() / (one[key] - base.get(key, 0)).norm()).item()
               for key in changed)


def lora_model(folder, dropout=0.0, seed=0, targets=None, dtype=None):
    """A model with adapters that do something."""
    model = checkpoint.load(folder, dtype=dtype)
    torch.manual_seed(seed)
    models.add_lora(model, 4, 16.0, dropout, targets or model.config.family.lora_targets)
    for name, p in model.named_parameters():
        if 'lora_B' in name:
            torch.nn.init.normal_(p, std=0.05)
    return model


def write_run(folder, *, seed=0, n=40, task='mmlu', sharpness=1.0, languages=('',), held_out=0,
              settings=None, result=None):
    """Put what evaluate.py and train.py leave into `folder`: random answers to n questions.

    settings: lines of train_config.py; result: more of the task's entry in results.json
    """
    random = np.random.default_rng([seed, int(1000 * sharpness)])
    answers = np.random.default_rng(5).integers(4, size=n)      # the same questions in every run
    samples = []
    for language in languages:
        for split, count in (('test', n), ('validation', held_out)):
            for i in range(count):
                logits = sharpness * random.normal(size=4)
                logits[answers[i % n]] += 1
                samples.append({
                    'task': task, 'split': split, 'language': language, 'id': f'q{i}',
                    'prompt': 'p', 'subject': 's', 'category': '', 'shots': 5,
                    'answer': int(answers[i % n]), 'options': [' A', ' B', ' C', ' D'],
                    'log_probs': (logits - np.log(np.exp(logits).sum())).tolist(),
                    'n_tokens': [1] * 4})
    write_rows(folder / 'samples.jsonl', samples)
    entry = {'distribution': 'mmlu, 5 shots, letters, token', 'norm': 'token', 'option_mass': 0.9,
             'unit': 'questions', 'pooled': {'n': n * len(languages)}} | (result or {})
    entry['samples_digest'] = samples_digest(samples)
    write_results(folder, {'config': {'model': str(folder)}, 'seed': seed, 'tasks': {task: entry}})
    settings = {'model': 'some/base', 'seed': seed} | (settings or {})
    (folder / 'train_config.py').write_text(
        ''.join(f'{key} = {value!r}\n' for key, value in settings.items()))
    return folder


def write_results(folder, content):
    """Write a results.json with its checksum."""
    content = {key: x for key, x in content.items() if key != 'checksum'}
    content = json.loads(json.dumps(content), parse_constant=lambda name: None)
    (folder / 'results.json').write_text(json.dumps(content | {'checksum': json_digest(content)}))


def results_of(folder):
    """The content of the results.json of a run."""
    return json.loads((folder / 'results.json').read_text())


def log_of(folder):
    """The records of a run's log.jsonl, without the times."""
    return [{k: v for k, v in json.loads(line).items() if not k.endswith('_s')}
            for line in (folder / 'log.jsonl').read_text().splitlines()]


def log_probs_after(reference, prompt, tokens):
    """Return the log-probabilities of `tokens` after the ids of a prompt, by transformers."""
    with torch.no_grad():
        logits = reference(torch.tensor([prompt + tokens])).logits[0].double().log_softmax(-1)
    return [logits[len(prompt) - 1 + i, token].item() for i, token in enumerate(tokens)]


def greedy_tokens(reference, prompt, n, ends=None):
    """Return the n likeliest tokens after a prompt by transformers, or those up to an end token."""
    tokens = torch.tensor([prompt], device=reference.device)
    return reference.generate(tokens, do_sample=False, max_new_tokens=n, pad_token_id=0,
                              eos_token_id=ends)[0, len(prompt):].tolist()


def plain_log_probs(model, prompt, answer):
    """Return (log-probabilities, entropies) of an answer's tokens, alone in its row."""
    tokens = torch.tensor([[*prompt, *answer]], device=model.head.device)
    log_p = logits_of(model, tokens)[0, len(prompt) - 1:-1].double().log_softmax(-1)
    return log_p[torch.arange(len(answer)), answer], -(log_p.exp() * log_p).sum(-1)


def recorded(monkeypatch, owner, name, record=lambda *arguments, **options: arguments):
    """Return a list that grows with what `record` makes of each call that succeeds."""
    calls, function = [], getattr(owner, name)

    def call(*arguments, **options):
        entry = record(*arguments, **options)
        value = function(*arguments, **options)
        calls.append(entry)
        return value
    monkeypatch.setattr(owner, name, call)
    return calls


def kernel_variants(module):
    """{name: how often Triton has compiled it} for the kernels of a module, on the first GPU."""
    return {name: len(kernel.device_caches[0][0]) for name, kernel in vars(module).items()
            if hasattr(kernel, 'device_caches')}


def uninstall():
    """Let model.py and fused_ce.py compute by their own functions again, after speed.install."""
    import fused_ce
    import model
    from speed.install import _installed
    for name, (plain, fast) in _installed.items():
        if getattr(model, name) is fast:
            setattr(model, name, plain)
    _installed.clear()
    fused_ce.stands_for = callable
