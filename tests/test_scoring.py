"""scoring.py: trees of tokens, the tokens of questions"""

import numpy as np
import pytest
import torch
from common import (asking, head_of_32, lora_model, plain_log_probs, recorded, reference_model,
                    small_model, write_rows)

import metrics
import scoring
from data import tree_rows, questions
from data.chat import encode_conversation
from data.trees import tokenize_questions
from decoding.answers import Answer
from runtime import checkpoint


def random_trees(rng, own_starts=True, n=12):
    """Trees with and without common prefixes; own_starts: a third has a start per option."""
    def ids(low, high):
        return rng.integers(0, 211, rng.integers(low, high)).tolist()
    prefixes = [tuple(ids(1, 20)) for _ in range(3)]
    trees = []
    for i in range(n):
        prefix, prompt = prefixes[i * len(prefixes) // n], ids(1, 9)
        options = [ids(1, 6) for _ in range(rng.integers(2, 6))]
        # a shared first token is in the prompt
        start = len(prefix) + len(prompt) + rng.integers(-1, 1)
        starts = [start] * len(options)
        if own_starts and i % 3 == 2:
            starts = [start + int(rng.integers(len(option))) for option in options]
        trees.append(tree_rows.Tree(prefix, prompt, options, starts))
    return trees


def plain_sums(model, tree):
    """The log-probability of each option, alone in its row."""
    return [plain_log_probs(model, ids[:start], ids[start:])[0].sum().item()
            for ids, start in zip(tree.sequences, tree.starts, strict=True)]


@pytest.mark.parametrize('name', ['llama3', 'gemma2', 'neox'])
def test_tree_equals_one_sequence_per_option(name, device, tmp_path):
    """Rows of 40 part questions, those of 16 are shorter than some prompts.

    Without BOS and shots, a row may hold nothing but tokens at position 0 that only one token sees,
    like padding: of a context and options of one token, or where each option has its own context.
    """
    model = small_model(name, tmp_path, device)
    model.decoder.attention = 'explicit'  # FlexAttention would compile every shape, for minutes
    one = tree_rows.Tree((), [4], [[1], [2]], [1, 1])
    own_context = tree_rows.Tree((), [], [[5, 6], [7, 8]], [1, 1])
    empty_leaf = tree_rows.Tree((), [9, 3], [[], [1]], [1, 1])    # one option begins the other
    for trees, *settings in (
            (random_trees(np.random.default_rng(len(name))), {'pack_len': 16}, {'pack_len': 40},
             {'deterministic': True}, {'pack_len': 128, 'batch_rows': 3, 'trim': 16},
             {'pack_len': 1024, 'trim': 0}),
            *((trees, {'pack_len': 2, 'batch_rows': 3}, {'pack_len': 16}) for trees in (
                [one], [own_context], [one, empty_leaf, own_context], [empty_leaf, one, one]))):
        right = [plain_sums(model, tree) for tree in trees]
        for options in settings:
            found = scoring.option_log_probs(model, trees, **options)
            for ours, theirs in zip(found, right, strict=True):
                assert ours == pytest.approx(theirs, abs=1e-4)


def test_the_hash_of_a_tree_stays_as_in_folders_that_are_there():
    """An evaluation resumes from the samples whose hash it finds."""
    tree, text = tree_rows.Tree((1, 2), [3], [[4], [5]], [3, 3]), tree_rows.Tree(
        (1, 2), [3, 9], scored=[2, 3])
    assert (tree.fingerprint, text.fingerprint) == ('f01b013bb70a', 'd4ec02025420')


def test_rows_of_many_long_answers_to_a_prompt_have_a_limit(tmp_path, monkeypatch):
    model, rng = small_model('llama', tmp_path), np.random.default_rng(0)
    lengths = recorded(monkeypatch, scoring, 'forward_values',
                       lambda model, arrays, *rest, **options: arrays.shape[-1])
    prompts = [rng.integers(0, 211, 9).tolist() for _ in range(2)]
    answers = [[Answer(i, k, rng.integers(0, 211, 700).tolist()) for k in range(n)]
               for i, n in enumerate((14, 2))]
    found = scoring.confidences(model, prompts, answers)
    assert max(lengths) < 5000 and [len(sums) for sums in found] == [14, 2]
    monkeypatch.undo()
    for i, k in ((0, 0), (0, 7), (0, 13), (1, 1)):
        [[alone]] = scoring.confidences(model, [prompts[i]], [[answers[i][k]]])
        assert found[i][k] == pytest.approx(alone, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['gemma2', 'smollm3'])
def test_bfloat16_trees_score_as_single_sequences(name, device, tmp_path):
    """Packed trees, by the kernels on a GPU, have no larger errors than one sequence per option."""
    reference_model(name, tmp_path, **head_of_32(name))
    exact, half = checkpoint.load(tmp_path), checkpoint.load(tmp_path, device, torch.bfloat16)
    half.decoder.attention = 'explicit'
    by_kernels = checkpoint.load(tmp_path, device, torch.bfloat16)
    n = 48 if device == 'cpu' else 120      # with 12 trees, chance decides which are larger
    for own_starts in (False, True):
        trees = random_trees(np.random.default_rng(3), own_starts, n)
        # three letters after each continuation, as after each order of the options
        trees[::4] = [tree_rows.Tree(tree.prefix, tree.prompt,
                                   [[*ids, k] for ids in tree.continuations for k in (7, 8, 9)],
                                   [len(ids) for ids in tree.sequences for _ in range(3)])
                      for tree in trees[::4]]
        with torch.no_grad():
            right = [np.array(plain_sums(exact, tree)) for tree in trees]
            plain = [np.array(plain_sums(half, tree)) for tree in trees]
        packed = scoring.option_log_probs(by_kernels, trees, pack_len=512, trim=128)
        plain, packed = (np.concatenate([metrics.softmax(found[i]) - metrics.softmax(right[i])
                                         for i in range(n)]) for found in (plain, packed))
        assert np.sqrt((packed ** 2).mean()) < 1.3 * np.sqrt((plain ** 2).mean())


@pytest.mark.slow
def test_deterministic_scores_are_bitwise_equal_also_with_the_dropout_of_adapters(tmp_path):
    reference_model('gemma2', tmp_path)
    trees = random_trees(np.random.default_rng(0))

    def log_probs(model, seed=None, trees=trees, **options):
        return np.concatenate(scoring.option_log_probs(model, trees, pack_len=64,
                                                       dropout_seed=seed, **options))
    fixed, model = lora_model(tmp_path, dropout=0.0), lora_model(tmp_path, dropout=0.3)
    plain, one = log_probs(model), log_probs(model, 0)
    assert np.array_equal(log_probs(fixed, 0), plain) and model.training
    assert np.array_equal(one, log_probs(model, 0)) and np.abs(one - plain).max() > 1e-2
    assert not np.allclose(one, log_probs(model, 1), atol=1e-2)
    # bitwise the same in any batch; alone in its row, what is dropped does not depend on others
    order = np.random.default_rng(1).permutation(len(trees))
    for seed in (None, 0):
        assert np.array_equal(
            log_probs(model, seed, [trees[i] for i in order], batch_rows=4, deterministic=True),
            np.concatenate([log_probs(model, seed, [trees[i]], deterministic=True)
                            for i in order]))


def test_each_option_of_winogrande_has_its_own_start(tokenizers, tmp_path):
    tokenizer, rest = tokenizers['mistral'], ' jumps over the dog.'
    row = {'sentence': 'The fox and the lazy dog: _' + rest, 'option1': 'the quick brown fox',
           'option2': 'the dog', 'answer': '1'}
    (question,), *_ = questions.load_task(
        f'winogrande_s:{write_rows(tmp_path / "dev.jsonl", [row])}',
        asking(prompt_format='harness'))
    for chat in ('none', 'tulu'):
        ((_, tree),) = tokenize_questions([question], {}, tokenizer, add_bos=True, max_length=200,
                                          chat=chat)
        assert tree.starts[0] != tree.starts[1]
        for option, ids, start in zip(question.options, tree.sequences, tree.starts, strict=True):
            context = question.context + option
            whole = [tokenizer.bos_id, *tokenizer.encode(context + rest)]
            if chat == 'tulu':
                whole, mask = encode_conversation(
                    [{'role': 'user', 'content': context},
                     {'role': 'assistant', 'content': rest.strip()}], tokenizer, chat)
                assert start == mask.index(1)
            assert ids == whole[:len(ids)] and len(whole) - len(ids) == (chat == 'tulu')
            assert tokenizer.decode(ids[start:]).strip() == rest.strip()


def test_whole_shots_are_dropped(tokenizers, tmp_path):
    tokenizer = tokenizers['gemma']
    for split in ('dev', 'test'):
        write_rows(tmp_path / f'{split}.jsonl', [
            {'question': f'What is the fox {i}?', 'choices': ['blue', 'a lazy dog', 'brown'],
             'answer': i % 3, 'subject': 'foxes'} for i in range(4)])
    asked, solved, *_ = questions.load_task(str(tmp_path), asking(shots=3, scoring='text'))

    def first_tree(n=3, max_length=2000):
        shots = {('', 'foxes'): solved['', 'foxes'][:n]}
        return next(tokenize_questions(asked, shots, tokenizer, add_bos=True,
                                       max_length=max_length))[1]
    for kept in range(4):
        tree = first_tree(kept)
        longest = len(tree.prefix) + len(tree.prompt) + max(map(len, tree.continuations))
        assert first_tree(max_length=longest) == tree and tree.shots == kept
        shorter = first_tree(max_length=longest - 1)
        if kept:        # the longest option must fit, and it is not the first
            assert shorter.shots == kept - 1
        else:
            assert 'even without shots the prompt has' in str(shorter)
