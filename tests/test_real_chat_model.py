"""The program on a real tuned model, SmolLM2 135M Instruct, in its own chat template.

The variable NANOCAL_REAL_CHAT_MODEL names a folder with its files in Hugging Face's layout; without
it these tests skip. On two cores they take minutes.
"""

import json
import os
from pathlib import Path

import pytest
import torch
from common import by_transformers, greedy_tokens

import train
from data.chat import encode_conversation, encode_prompt
from data.files import dialogue
from data.tokenizer import load_tokenizer
from decoding.sampling import Sampling
from generate import generate
from runtime import checkpoint

FOLDER = Path(os.environ.get('NANOCAL_REAL_CHAT_MODEL', ''))
pytestmark = [pytest.mark.slow, pytest.mark.skipif(
    'NANOCAL_REAL_CHAT_MODEL' not in os.environ, reason='needs SmolLM2 135M Instruct in the folder '
    'that NANOCAL_REAL_CHAT_MODEL names: see CONTRIBUTING.md')]
DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'
THINGS = 'the sky', 'a fox', 'rain', 'a prime number', 'Äpfel', 'die Straße', '数学', 'music'
ASKED = ('What is {}?', 'Write a sentence about {}.', '  Name three facts on {}.\n\n',
         'Is {} older than <|im_end|>? Answer yes or no.')
PROMPTS = [dialogue(text.format(thing)) for text in ASKED for thing in THINGS]


def greedy_answers(folder, prompts, n_tokens):
    """Return (our answers, those of transformers) as token ids up to the end of the turn."""
    import transformers
    tokenizer, reference = load_tokenizer(folder), by_transformers(
        folder, dtype=torch.float32).to(DEVICE)
    theirs, expected, ids, ends = transformers.AutoTokenizer.from_pretrained(folder), [], [], set()
    for messages in prompts:
        prompt, ends = encode_prompt(messages, tokenizer, 'model')
        ids.append(prompt)
        # transformers makes a control token of the name in the text
        right = theirs.apply_chat_template(messages, add_generation_prompt=True)['input_ids']
        assert ('<|im_end|>' in messages[0]['content']) != (prompt == right)
        expected.append(greedy_tokens(reference, prompt, n_tokens, sorted(ends)))
    model = checkpoint.load(folder, DEVICE, dtype=torch.float32)
    settings = Sampling(max_tokens=n_tokens, temperature=0)
    answers = dict(generate(model, ids, settings, tokenizer, stop_ids=ends))
    return [[*answers[i][0].tokens] for i in range(len(ids))], expected


def test_greedy_answers_in_its_own_template_are_those_of_transformers():
    answers, expected = greedy_answers(FOLDER, PROMPTS, 64 if DEVICE == 'cuda' else 12)
    assert answers == expected and len(answers) == 32


def test_they_are_after_a_round_of_training_and_saving_too(tmp_path):
    rows = tmp_path / 'rows.jsonl'
    rows.write_text('\n'.join(json.dumps({'messages': [*messages, {
        'role': 'assistant', 'content': f'Seven {i}.'}]}) for i, messages in enumerate(PROMPTS)))
    train.train(train.TrainConfig(
        model=str(FOLDER), data=str(rows), out_dir=str(tmp_path / 'run'), dtype='float32',
        cache_dir=str(tmp_path / 'cache'), max_length=128, pack_len=128, batch_size=8, max_steps=4,
        lr=1e-3, warmup_steps=1, checkpoint_epochs=False, save_every=None, pictures=False,
        save_dtype='float32'))
    answers, expected = greedy_answers(tmp_path / 'run', PROMPTS[:8], 12)
    tokenizer = load_tokenizer(tmp_path / 'run')
    assert answers == expected
    assert any('Seven' in tokenizer.decode(ids, start=False) for ids in answers)
    assert tokenizer.chat_templates == load_tokenizer(FOLDER).chat_templates
    ids, _ = encode_conversation(dialogue('x', 'y'), tokenizer, 'model')
    assert tokenizer.decode(ids).startswith('<|im_start|>system\nYou are a helpful AI assistant')
