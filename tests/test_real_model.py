"""The program on a real pretrained model, Gemma 3 270M, beside transformers and peft.

Random weights have neither the outliers of a trained model nor its tokenizer. The variable
NANOCAL_REAL_MODEL names a folder with config.json, model.safetensors (bfloat16) and
tokenizer.model; without it these tests skip. On a CPU they take minutes.
"""

import csv
import gzip
import io
import itertools
import json
import os
import re
import tarfile
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import torch
from common import SHARED, named, needs_files, off, parameters_of, whole_rows

import evaluate
import train
from data.packing import pack
from data.tokenizer import load_tokenizer
from generate import generate
from runtime import checkpoint
from decoding.sampling import Sampling

FOLDER = Path(os.environ.get('NANOCAL_REAL_MODEL', ''))
pytestmark = [pytest.mark.slow, pytest.mark.skipif(
    'NANOCAL_REAL_MODEL' not in os.environ,
    reason='needs Gemma 3 270M in the folder that NANOCAL_REAL_MODEL names: see CONTRIBUTING.md')]
DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'
SHORT_TEXTS = [     # scripts that the files of `real_texts` do not have
    'Все счастливые семьи похожи друг на друга.', 'Η θάλασσα ήταν ήρεμη, και ο ουρανός γαλάζιος.',
    'ذهب الولدُ إلى المدرسةِ في الصباح.', 'הילד הלך לבית הספר בבוקר.',
    'बच्चा सुबह स्कूल गया और शाम को लौटा।', '아이는 아침에 학교에 갔다.',
    '子どもは朝、学校へ行きました。カタカナも。', 'ልጁ ጠዋት ወደ ትምህርት ቤት ሄደ።',
    'ბავშვი დილით სკოლაში წავიდა.']


def lines(path):
    return gzip.decompress((SHARED / 'datasets' / path).read_bytes()).decode().splitlines()


def wiki_lines():
    """Without <unk>, which transformers reads as a control token in any text, and ours never."""
    return [line.replace('<unk>', 'it') for line in lines('wikitext2/wiki.test.txt.gz')
            if len(line) > 200]


def alpaca_rows():
    needs_files('datasets/alpaca/alpaca_en_demo.json')
    return json.loads((SHARED / 'datasets/alpaca/alpaca_en_demo.json').read_text())


def real_texts():
    """More than 2,000 texts: 11 languages of XCOPA, Chinese exams, instructions, code, ..."""
    needs_files(*(f'datasets/{name}' for name in (
        'xcopa', 'cmmlu', 'wikitext2', 'humaneval', 'gsm8k')))
    texts = [json.loads(line)['premise'] for path in sorted((SHARED / 'datasets/xcopa').glob(
        'test.*')) for line in path.read_text().splitlines()[:120]]
    with tarfile.open(SHARED / 'datasets/cmmlu/cmmlu_data.tar.gz') as archive:
        exam = io.TextIOWrapper(archive.extractfile('data/dev/economics.csv'), 'utf-8')
        texts += [' '.join(row) for row in csv.reader(exam)]
    texts += [row['output'] for row in alpaca_rows()[:250]]
    texts += wiki_lines()[:200]
    for name, keys in (('humaneval/HumanEval', ('prompt', 'canonical_solution')),
                       ('gsm8k/test', ('answer',))):
        texts += [json.loads(line)[key] for line in lines(f'{name}.jsonl.gz')[:150] for key in keys]
    return texts + SHORT_TEXTS


def ours(dtype=torch.float32, folder=FOLDER):
    return checkpoint.load(folder, DEVICE, dtype=dtype)


def theirs(dtype=torch.float32, folder=FOLDER):
    import transformers
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation='eager').to(DEVICE).eval()


def sequences():
    """Token ids of real texts; the first is longer than the sliding window of 512 tokens."""
    needs_files('datasets/wikitext2')
    tokenizer = load_tokenizer(FOLDER)
    texts = [' '.join(wiki_lines()[:6]), *wiki_lines()[6:8], alpaca_rows()[0]['output']]
    return [np.array([tokenizer.bos_id, *tokenizer.encode(text)])[:n]
            for text, n in zip(texts, (600, 60, 60, 48), strict=True)]


def packed_logits(model):
    """The logits of all sequences, packed into one row."""
    texts = sequences()
    packed = pack([(ids, np.ones(len(ids), int)) for ids in texts], sum(map(len, texts)))
    with torch.no_grad():
        return model.logits(model(*(torch.from_numpy(x).to(DEVICE) for x in (
            packed.tokens, packed.positions, packed.ends))))[0].float()


def separate_logits(reference):
    """The logits of each sequence by itself, concatenated in the order of `pack`."""
    with torch.no_grad():
        return torch.cat([reference(torch.from_numpy(ids)[None].to(DEVICE)).logits[0].float()
                          for ids in sequences()])


def logits_of(folder):
    """Our logits of the shortest sequence in float32, and its ids."""
    ids = torch.from_numpy(sequences()[-1])[None].to(DEVICE)
    model = ours(folder=folder)
    with torch.no_grad():
        return model.logits(model(ids, *(x.to(DEVICE) for x in whole_rows(ids)))), ids


def test_tokens_of_real_texts_are_those_of_transformers():
    """Also runs of spaces, which Gemma's file has as pieces of their own.

    A file made from GGUF writes these pieces with spaces, not with sentencepiece's own sign for
    them. Then sentencepiece finds none of them and transformers all, so such texts are left out.
    """
    import transformers
    reference = transformers.AutoTokenizer.from_pretrained(FOLDER)
    tokenizer, texts = load_tokenizer(FOLDER), real_texts()
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(FOLDER / 'tokenizer.model'))
    if any(' ' in pieces.id_to_piece(i) for i in range(pieces.vocab_size())):
        texts = [re.sub(' +', ' ', text) for text in texts]
    assert len(texts) >= 2000
    for text in texts:
        assert tokenizer.encode(text) == reference(text, add_special_tokens=False).input_ids, text
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_packed_logits_in_float32_are_those_of_transformers():
    """Relative error 1e-5: float32 rounds at 6e-8, and 18 layers of outliers multiply that."""
    assert off(packed_logits(ours()), separate_logits(theirs())) < 1e-5


def test_gradients_of_a_packed_batch_in_float32_are_those_of_transformers():
    """Relative error 1e-2 per tensor, 1e-3 of all: here a rounding of 6e-8 in the forward pass
    changes the gradient of a norm by 1e-3 (docs/training.md, rounding of gradients)."""
    texts = sequences()
    cfg = train.TrainConfig(dtype='float32')
    packed = pack([(ids, np.ones(len(ids), int)) for ids in texts], 640)
    model, reference = ours(), theirs()
    values = train.forward_backward(model, packed, cfg, DEVICE)
    n_targets, loss = sum(len(ids) - 1 for ids in texts), 0.0
    for ids in texts:
        ids = torch.from_numpy(ids).to(DEVICE)
        part = torch.nn.functional.cross_entropy(reference(ids[None]).logits[0, :-1], ids[1:],
                                                 reduction='sum') / n_targets
        part.backward()
        loss += part.item()
    assert values['loss'].item() == pytest.approx(loss, rel=1e-5)
    gradients = {key: p.grad for key, p in parameters_of(reference).items()}
    errors = {key: off(p.grad, gradients[key]) for key, p in named(model).items()}
    assert len(errors) == len(gradients) and max(errors.values()) < 1e-2, errors
    assert off(*(torch.cat([g.flatten() for g in part]) for part in zip(
        *((p.grad, gradients[key]) for key, p in named(model).items()), strict=True))) < 1e-3


def test_bfloat16_logits_are_no_further_from_float32_than_those_of_transformers():
    exact = separate_logits(theirs())
    assert (off(packed_logits(ours(torch.bfloat16)), exact)
            <= off(separate_logits(theirs(torch.bfloat16)), exact))


def test_greedy_answers_in_float32_are_those_of_transformers():
    """32 prompts; 64 tokens each on a GPU, 8 on a CPU, which decodes a few tokens per second."""
    needs_files('datasets/wikitext2')
    n_tokens, tokenizer, reference = 64 if DEVICE == 'cuda' else 8, load_tokenizer(FOLDER), theirs()
    prompts = [[tokenizer.bos_id, *tokenizer.encode(line)][:8 + i]
               for i, line in enumerate(wiki_lines()[:32])]
    settings = Sampling(max_tokens=n_tokens, temperature=0)
    answers = dict(generate(ours(), prompts, settings, tokenizer, stop_ids={tokenizer.eos_id}))
    longest = max(map(len, prompts))
    padded = torch.tensor([[0] * (longest - len(ids)) + ids for ids in prompts]).to(DEVICE)
    expected = reference.generate(padded, attention_mask=(padded != 0).long(), do_sample=False,
                                  max_new_tokens=n_tokens, pad_token_id=0)[:, longest:].tolist()
    for i, ids in enumerate(expected):
        until_eos = [*itertools.takewhile(lambda k: k != tokenizer.eos_id, ids)]
        assert [k for k in answers[i][0].tokens if k != tokenizer.eos_id] == until_eos, prompts[i]


@pytest.mark.skipif(DEVICE == 'cpu', reason='needs a CUDA device: many minutes on a CPU')
def test_accuracy_on_arc_easy_is_the_measured_one(tmp_path):
    needs_files('datasets/arc_easy')
    cfg = evaluate.EvalConfig(
        model=str(FOLDER), tasks=(f'arc_easy:{SHARED / "datasets/arc_easy"}',), shots=0,
        prompt_format='harness', n_bootstrap=0, pictures=False,
        out_dir=str(tmp_path / 'eval'))
    results, (label,), _ = evaluate.run(cfg)
    assert results['tasks'][label]['pooled']['accuracy'] == pytest.approx(0.586, abs=0.01)


def fine_tune(tmp_path, **settings):
    """Two steps at a rate that moves the logits; return the run's folder."""
    rows = tmp_path / 'rows.json'
    rows.write_text(json.dumps(alpaca_rows()[:8]))
    train.train(train.TrainConfig(
        model=str(FOLDER), data=str(rows), out_dir=str(tmp_path / 'run'), dtype='float32',
        cache_dir=str(tmp_path / 'cache'), max_length=128, pack_len=128, batch_size=4, max_steps=2,
        warmup_steps=1, checkpoint_epochs=False, save_every=None, pictures=False, **settings))
    return tmp_path / 'run'


def test_a_fine_tuned_folder_gives_the_same_in_transformers(tmp_path):
    import transformers
    run = fine_tune(tmp_path, lr=1e-4)
    logits, ids = logits_of(run)
    with torch.no_grad():
        assert off(logits, theirs(folder=run)(ids).logits) < 1e-5
    assert off(logits, logits_of(FOLDER)[0]) > 1e-2
    reference, tokenizer = transformers.AutoTokenizer.from_pretrained(run), load_tokenizer(run)
    for text in SHORT_TEXTS:
        assert reference(text).input_ids == [tokenizer.bos_id, *tokenizer.encode(text)]


def test_an_adapter_gives_the_same_in_peft(tmp_path):
    peft = pytest.importorskip('peft')
    run = fine_tune(tmp_path, lora=True, lr=1e-2)
    logits, ids = logits_of(run)
    with torch.no_grad():
        assert off(logits, peft.PeftModel.from_pretrained(theirs(), run / 'adapter')(ids).logits
                   ) < 1e-5
    assert off(logits, logits_of(FOLDER)[0]) > 1e-2
