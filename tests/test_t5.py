"""T5: the forward pass, files and scores of transformers"""

import random

import numpy as np
import pytest
import torch
import transformers
from common import off, rewrite, sentencepiece_folder, write_rows
from safetensors.torch import load_file

import evaluate
import scoring
import sample
import train
from data.tree_rows import Tree
from data.tokenizer import load_tokenizer
from results.samples import read_samples
from runtime import checkpoint, saving
from runtime.errors import CheckpointError, ConfigError


def reference(folder, seed, **more):
    """A small random T5 or mT5 by transformers, saved into `folder` and loaded again."""
    draw = random.Random(seed)
    kind = more.pop('kind', draw.choice(['T5', 'MT5']))
    untied = more.pop('untied', draw.random() < 0.5)
    keys = {'vocab_size': 101, 'd_model': draw.choice([24, 32]), 'd_kv': draw.choice([4, 7, 8]),
            'd_ff': 40, 'num_layers': draw.choice([1, 2]), 'num_heads': draw.choice([2, 3]),
            'num_decoder_layers': draw.choice([None, 1, 3]), 'decoder_start_token_id': 0,
            'feed_forward_proj': draw.choice(['relu', 'gated-gelu']),
            'relative_attention_num_buckets': draw.choice([8, 12, 32]),
            'relative_attention_max_distance': draw.choice([17, 20, 128]),
            'layer_norm_epsilon': draw.choice([1e-6, 1e-5]),
            'tie_word_embeddings': draw.choice([True, False])} | more
    config = getattr(transformers, f'{kind}Config')(**keys)
    model = getattr(transformers, f'{kind}ForConditionalGeneration')(config)
    torch.manual_seed(seed)
    with torch.no_grad():
        for key, p in model.named_parameters():
            p.copy_(torch.randn_like(p) * 0.25 + key.endswith('norm.weight'))
    model.save_pretrained(folder)
    if untied:
        rewrite(folder, lambda tensors: tensors.update(
            {'lm_head.weight': torch.randn_like(tensors['shared.weight']) * 0.3}))
    return type(model).from_pretrained(folder, attn_implementation='eager').eval()


def sources_and_targets(seed, n=3, vocabulary=101):
    """Padded sources [n, S] with their lengths, and targets [n, T] without padding."""
    draw = np.random.default_rng(seed)
    lengths = draw.integers(1, 45, (n, 1))
    source = draw.integers(3, vocabulary, (n, lengths.max()))
    source[np.arange(source.shape[1]) >= lengths] = 0
    return [torch.tensor(x) for x in (source, lengths, draw.integers(3, vocabulary, (n, 30)))]


@pytest.mark.parametrize('seed', [*range(2), *(
    pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 8))])
def test_logits_and_gradients_equal_transformers(seed, tmp_path):
    theirs, ours = reference(tmp_path, seed), checkpoint.load(tmp_path)
    source, lengths, target = sources_and_targets(seed)
    positions = torch.arange(target.shape[1]).expand_as(target)
    mask = (torch.arange(source.shape[1]) < lengths).long()
    right = theirs(input_ids=source, attention_mask=mask, decoder_input_ids=target).logits
    logits = ours(source, lengths, target, positions,
                  torch.full_like(target, target.shape[1])) @ ours.head.T
    assert (logits - right).abs().max() < 1e-5 * right.abs().max()
    weights = torch.randn_like(right)
    (weights * right).sum().backward()
    (weights * logits).sum().backward()
    wanted = dict(theirs.named_parameters())
    assert wanted.keys() == {key for key, _ in ours.named_parameters()}
    for key, p in ours.named_parameters():
        assert off(p.grad, wanted[key].grad) < 5e-5, key


@pytest.mark.parametrize('kind, untied', [('T5', True), ('T5', False), ('MT5', True)])
def test_saved_models_are_read_by_transformers(kind, untied, tmp_path):
    theirs = reference(tmp_path / 'base', 5, kind=kind, untied=untied, tie_word_embeddings=False)
    model = checkpoint.load(tmp_path / 'base')
    sentencepiece_folder(tmp_path / 'base', 't5')
    saving.save(model, tmp_path / 'saved', torch.float32, tmp_path / 'base')
    assert (tmp_path / 'saved' / 'spiece.model').exists()
    again = type(theirs).from_pretrained(tmp_path / 'saved', attn_implementation='eager').eval()
    source, _, target = sources_and_targets(5)
    assert torch.equal(*(m(source, decoder_input_ids=target).logits for m in (theirs, again)))
    ours = checkpoint.load(tmp_path / 'saved')
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), ours.parameters(),
                                                 strict=True))
    saving.save(model, tmp_path / 'half', torch.bfloat16)
    assert checkpoint.load(tmp_path / 'half').head.dtype == torch.bfloat16


def test_copies_in_older_checkpoints_are_ignored(tmp_path):
    reference(tmp_path, 1, untied=False)
    right = checkpoint.load(tmp_path).state_dict()
    copies = ['lm_head.weight', *(f'{x}.embed_tokens.weight' for x in ('encoder', 'decoder'))]
    unused = 'decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight'
    rewrite(tmp_path, lambda tensors: tensors.update({
        unused: torch.ones(8, 2), **{key: tensors['shared.weight'].clone() for key in copies}}))
    again = checkpoint.load(tmp_path)
    assert again.config.tie_word_embeddings
    assert right.keys() == again.state_dict().keys() == load_file(
        tmp_path / 'model.safetensors').keys() - {unused, *copies}
    rewrite(tmp_path, lambda tensors: tensors.pop('encoder.block.0.layer.0.SelfAttention.q.weight'))
    with pytest.raises(CheckpointError, match='encoder.block.0.layer.0.SelfAttention.q.weight is'):
        checkpoint.load(tmp_path)


def t5_with_task(folder):
    """A tiny T5 with a tokenizer, and a task: its solved questions and those that are asked."""
    sentencepiece_folder(folder / 'model', 't5', ['A B C D', '(with answers)', 'various things'])
    model = reference(folder / 'model', 3, kind='T5', untied=True, tie_word_embeddings=False,
                      vocab_size=load_tokenizer(folder / 'model').n_vocab + 28)
    draw, words = random.Random(0), 'quick brown fox jumps over the lazy dog sky blue'.split()
    rows = [{'question': ' '.join(draw.choices(words, k=draw.randrange(2, 30))) + '?\n\nWhich one?',
             'choices': [' '.join(draw.choices(words, k=draw.randrange(1, 5))) for _ in range(4)],
             'answer': i % 4} for i in range(14)]
    for split, part in (('dev', rows[:2]), ('test', rows[2:])):
        write_rows(folder / 'questions' / f'{split}.jsonl', part)
    return model, rows[:2], rows[2:]


def loop_log_probs(model, source, answer):
    """Of an answer by transformers, as lm-evaluation-harness scores it: without EOS."""
    source, target = torch.tensor([[*source, 1]]), torch.tensor([[0, *answer[:-1]]])
    log_probs = model(source, decoder_input_ids=target).logits[0].log_softmax(-1)
    return log_probs[range(len(answer)), answer].sum().item()


@pytest.mark.slow
@pytest.mark.parametrize('scoring', ['letters', 'text'])
def test_scores_equal_a_plain_loop_over_transformers(scoring, tmp_path):
    """The prompt with its shots is tokenized as a whole, and each answer alone."""
    model, solved, rows = t5_with_task(tmp_path)
    tokenizer, results = load_tokenizer(tmp_path / 'model'), []
    for name, more in (('a', ['--pack_len=40']), ('b', ['--deterministic=True'])):
        evaluate.main([f'--model={tmp_path / "model"}', f'--tasks={tmp_path / "questions"}',
                       f'--out_dir={tmp_path / name}', '--shots=2', f'--scoring={scoring}',
                       '--n_bootstrap=0', '--pictures=False', '--dtype=float32', *more])
        results.append(read_samples(tmp_path / name / 'samples.jsonl'))

    def answers_of(row):
        return [*'ABCD'] if scoring == 'letters' else row['choices']

    def asked(row):
        options = zip('ABCD', row['choices'], strict=True) if scoring == 'letters' else ()
        listed = ''.join(f'\n{letter}. {option}' for letter, option in options)
        return f'{row["question"]}{listed}\nAnswer:'

    shots = 'The following are multiple choice questions (with answers) about various things.\n\n'
    shots += ''.join(f'{asked(row)} {answers_of(row)[row["answer"]]}\n\n' for row in solved)
    for found in results:
        for sample_of, row in zip(sorted(found, key=lambda s: int(s['id'])), rows, strict=True):
            prompt, answers = shots + asked(row), answers_of(row)
            right = [loop_log_probs(model, tokenizer.encode(prompt), tokenizer.encode(answer))
                     for answer in answers]
            assert sample_of['log_probs'] == pytest.approx(right, rel=1e-6, abs=2e-5)
            assert sample_of['n_tokens'] == [len(tokenizer.encode(answer)) for answer in answers]


@pytest.mark.slow
def test_answers_to_several_prompts_of_one_question(device, tmp_path):
    """WinoGrande's options are in the prompt, and the same ending is scored."""
    model = reference(tmp_path, 2)
    trees = [Tree((), [7, 8], [[9, 4, 5], [3, 3, 4, 5]], [3, 4]),
             Tree((7,), [8, 8], [[4], [5, 6, 7], [6, 6, 6]], [3, 3, 3])]
    config = checkpoint.read_config(tmp_path, seq2seq=True)
    ours, rounded = (checkpoint.load(tmp_path, device, dtype)
                     for dtype in (torch.float32, torch.bfloat16))
    for options in ({}, {'pack_len': 9}, {'deterministic': True}):
        sums = scoring.option_log_probs(ours, trees, seq2seq=config, **options)
        for tree, found in zip(trees, sums, strict=True):
            right = [loop_log_probs(model, path[:at], path[at:])
                     for path, at in zip(tree.sequences, tree.starts, strict=True)]
            assert found == pytest.approx(right, abs=1e-4)
    for a, b in zip(sums, scoring.option_log_probs(rounded, trees, seq2seq=config), strict=True):
        assert a == pytest.approx(b, abs=0.5) and not np.array_equal(a, b)


def test_only_evaluate_uses_a_t5(tmp_path):
    t5_with_task(tmp_path)
    refused = 't5 is an encoder and a decoder; evaluate.py scores its answers, and nothing else'
    with pytest.raises(CheckpointError, match=refused):
        train.main([f'--model={tmp_path / "model"}', f'--data={tmp_path / "questions"}',
                    f'--out_dir={tmp_path / "run"}'])
    assert not [*tmp_path.glob('run/*.safetensors')]
    with pytest.raises(CheckpointError, match=refused):
        sample.main([f'--model={tmp_path / "model"}', '--prompt=x'])
    write_rows(tmp_path / 'texts.jsonl', [{'text': 'The quick brown fox jumps over ' * 40}])
    with pytest.raises(ConfigError, match='clm needs a model that continues a text, and t5 scores'):
        evaluate.main([f'--model={tmp_path / "model"}', f'--tasks=clm:{tmp_path / "texts.jsonl"}',
                       f'--out_dir={tmp_path / "out"}'])
