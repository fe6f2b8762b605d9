"""evaluate.py"""

import copy
import dataclasses
import gzip
import importlib.util
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from common import (DEVICES, HERE, SHARED, head_of_32, lora_model, needs_files, reference_model,
                    rewrite, sentencepiece_folder, start_script, whole_rows, write_hub_tasks,
                    write_rows)
from safetensors.torch import load_file, save_file
import evaluate
import scoring
import metrics
import triton_ops
from data import benchmarks, packing, questions
from data.chat import encode_conversation
from data.tokenizer import load_tokenizer
from data.trees import tokenize_questions
from results import compare, evaluation, report, samples
from results.samples import read_samples, sample_order
from runtime import (adapter, checkpoint, device as devices, load_ahead, log, ownership, processes)
from runtime.errors import ConfigError, DataError
from test_tokenizer import train_bpe


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
        trees.append(packing.Tree(prefix, prompt, options, starts))
    return trees


def in_several_orders(tree):
    """The tree of three letters after each continuation, as after each order of the options."""
    return packing.Tree(tree.prefix, tree.prompt,
                        [[*ids, k] for ids in tree.continuations for k in (7, 8, 9)],
                        [len(ids) for ids in tree.sequences for _ in range(3)])


def plain_log_probs(model, tree, device):
    """Of each option, by a row for each that holds its sequence, then padding."""
    sequences = [torch.tensor(ids) for ids in tree.sequences]
    ids = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    logits = model.logits(model(*(x.to(device) for x in (ids, *whole_rows(ids)))))
    log_probs = logits.log_softmax(-1).cpu()[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    return [row[start - 1:len(sequence) - 1].sum().item()
            for row, start, sequence in zip(log_probs, tree.starts, sequences, strict=True)]


@pytest.mark.parametrize('device', DEVICES)
@pytest.mark.parametrize('name', ['llama3', 'mistral_window', 'gemma2', 'neox'])
def test_tree_equals_one_sequence_per_option(name, device, tmp_path):
    reference_model(name, tmp_path)
    model = checkpoint.load(tmp_path, device)
    model.decoder.attention = 'explicit'  # FlexAttention would compile every shape, for minutes
    trees = random_trees(np.random.default_rng(len(name)))
    right = [plain_log_probs(model, tree, device) for tree in trees]
    # rows of 40 part questions, those of 16 are shorter than some prompts
    for options in ({'pack_len': 16}, {'pack_len': 40}, {'pack_len': 64}, {'deterministic': True},
                    {'pack_len': 128, 'batch_rows': 3, 'trim': 16},
                    {'pack_len': 1024, 'trim': 0}):
        found = scoring.option_log_probs(model, trees, **options)
        for ours, theirs in zip(found, right, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-4)


@pytest.mark.parametrize('batch_rows', [1, 3])
def test_questions_of_one_token_are_scored(batch_rows, tmp_path):
    """Their row may hold nothing but tokens at position 0 that only one token sees, like padding.

    Without BOS and shots that is so for a context and options of one token, or where each option
    has a context of its own.
    """
    reference_model('llama', tmp_path)
    model = checkpoint.load(tmp_path)
    one = packing.Tree((), [4], [[1], [2]], [1, 1])
    own_context = packing.Tree((), [], [[5, 6], [7, 8]], [1, 1])
    empty_leaf = packing.Tree((), [9, 3], [[], [1]], [1, 1])    # one option begins the other
    for trees in ([one], [own_context], [one, empty_leaf, own_context], [empty_leaf, one, one]):
        found = scoring.option_log_probs(model, trees, pack_len=2, batch_rows=batch_rows)
        found += scoring.option_log_probs(model, trees, pack_len=16, batch_rows=batch_rows)
        for tree, ours in zip(trees * 2, found, strict=True):
            assert ours == pytest.approx(plain_log_probs(model, tree, 'cpu'), abs=1e-4)


def test_the_hash_of_a_tree_stays_as_in_folders_that_are_there():
    """An evaluation resumes from the samples whose hash it finds."""
    tree, text = packing.Tree((1, 2), [3], [[4], [5]], [3, 3]), packing.Tree(
        (1, 2), [3, 9], scored=[2, 3])
    assert (tree.fingerprint, text.fingerprint) == ('f01b013bb70a', 'd4ec02025420')
    for other in (packing.Tree((1, 7), [3], [[4], [5]], [3, 3]),
                  packing.Tree((1,), [2, 3], [[4], [5]], [3, 3])):
        assert other.fingerprint != tree.fingerprint


def test_an_option_that_begins_another_does_not_lengthen_a_row():
    """Such an option has an empty continuation; one token less than none was counted for it."""
    tree = packing.Tree((1, 2, 3), [4, 5], [[1] * 5, [], [2, 2]], [4, 4, 4])
    rows = list(packing.pack_trees([(0, tree)], 9))
    assert [arrays.shape for arrays, _ in rows] == [(3, 9)] * 2
    assert sum(len(scored) for _, scored in rows) == tree.n_scored
    one_option = packing.Tree((1, 2, 3), [4, 5, 6], [[]], [4])      # longer than the row
    assert len(list(packing.pack_trees([(0, one_option)], 5))) == 1


def test_options_that_differ_in_their_last_token_share_the_others(tmp_path):
    """As the letters after each order of the options do."""
    reference_model('llama', tmp_path)
    model, rng = checkpoint.load(tmp_path), np.random.default_rng(0)
    tree = in_several_orders(packing.Tree(
        (1, 2), [3, 4, 5], [rng.integers(1, 211, 6).tolist() for _ in range(3)]))
    ((arrays, scored),) = packing.pack_trees([(0, tree)], 64)
    assert arrays.shape == (3, 64) and len(scored) == tree.n_scored == 9
    assert np.count_nonzero(arrays[0]) == 5 + 3 * 6
    right = plain_log_probs(model, tree, 'cpu')
    for pack_len in (8, 16, 64):        # a row of 8 has room for one order and no more
        (sums,) = scoring.option_log_probs(model, [tree], pack_len=pack_len)
        assert sums == pytest.approx(right, abs=1e-4)


def test_deterministic_scores_are_bitwise_equal(tmp_path):
    reference_model('gemma2', tmp_path)
    model = checkpoint.load(tmp_path)
    trees = random_trees(np.random.default_rng(0))
    alone = [scoring.option_log_probs(model, [tree], deterministic=True)[0] for tree in trees]
    order = np.random.default_rng(1).permutation(len(trees))
    found = scoring.option_log_probs(model, [trees[i] for i in order], pack_len=64, batch_rows=4,
                                      deterministic=True)
    assert all(np.array_equal(alone[i], sums) for i, sums in zip(order, found, strict=True))


def test_scored_tokens_of_a_text_equal_the_plain_model(tmp_path):
    """Log-probability, top token, its log-probability and entropy, packed beside other texts."""
    reference_model('llama', tmp_path)
    model = checkpoint.load(tmp_path)
    rng = np.random.default_rng(0)
    trees = [packing.Tree((), rng.integers(0, 211, n).tolist(), scored=[1, n // 2, n - 1])
             for n in (9, 30, 17)]
    for index, numbers, values in scoring.score(lambda: model, enumerate(trees), 64,
                                                 compute=scoring.token_statistics):
        tree = trees[index]
        ids = torch.tensor([tree.prompt])
        log_probs = model.logits(model(ids, *whole_rows(ids))).log_softmax(-1)[0].detach()
        for n, (log_prob, top, top_log_prob, entropy) in zip(numbers, values, strict=True):
            row = log_probs[tree.scored[n] - 1]
            assert top == row.argmax()
            assert [log_prob, top_log_prob, entropy] == pytest.approx(
                [float(x) for x in (row[tree.prompt[tree.scored[n]]], row.max(),
                                    -(row.exp() * row).sum())], abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize('device', DEVICES)
@pytest.mark.parametrize('name', ['llama', 'mistral_window', 'gemma2', 'neox', 'gemma3', 'cohere2',
                                  'olmo3', 'smollm3', 'phi3', 'ministral3', 'granite', 'opt_350m'])
def test_bfloat16_trees_score_as_single_sequences(name, device, tmp_path):
    """Packed trees, by the kernels on a GPU, have no larger errors than one sequence per option."""
    reference_model(name, tmp_path, **head_of_32(name))
    exact, half = checkpoint.load(tmp_path), checkpoint.load(tmp_path, device, torch.bfloat16)
    half.decoder.attention = 'explicit'

    def errors(n, own_starts):
        trees = random_trees(np.random.default_rng(3), own_starts, n)
        trees[::4] = map(in_several_orders, trees[::4])
        with torch.no_grad():
            right = [np.array(plain_log_probs(exact, tree, 'cpu')) for tree in trees]
            plain = [np.array(plain_log_probs(half, tree, device)) for tree in trees]
        packed = scoring.option_log_probs(by_kernels, trees, pack_len=512, trim=128)
        return [np.concatenate([metrics.softmax(found[i]) - metrics.softmax(right[i])
                                for i in range(n)]) for found in (plain, packed)]

    by_kernels = checkpoint.load(tmp_path, device, torch.bfloat16)
    for own_starts in (False, True):    # with only 12 trees, chance decides which errors are larger
        plain, packed = errors(48 if device == 'cpu' else 120, own_starts)
        assert np.sqrt((packed ** 2).mean()) < 1.3 * np.sqrt((plain ** 2).mean())
    # 0.062 for smollm3 on a CPU, where one sequence per option has 0.056
    plain, packed = (np.abs(found).max() for found in errors(12, False))
    assert packed < max(0.04 if device == 'cpu' else 0.06, 1.2 * plain)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['llama', 'gemma2', 'neox'])
def test_a_dropout_seed_draws_the_dropout_of_adapters(name, tmp_path):
    reference_model(name, tmp_path)
    trees = random_trees(np.random.default_rng(0))

    def log_probs(model, seed=None, **options):
        return np.concatenate(scoring.option_log_probs(model, trees, pack_len=256,
                                                       dropout_seed=seed, **options))
    fixed = lora_model(tmp_path, dropout=0.0)
    assert np.array_equal(log_probs(fixed, 0), log_probs(fixed))
    model = lora_model(tmp_path, dropout=0.3)
    plain = log_probs(model)
    assert np.array_equal(plain, log_probs(fixed)) and model.training
    one, two = log_probs(model, 0), log_probs(model, 1)
    assert np.array_equal(one, log_probs(model, 0)) and not np.allclose(one, two, atol=1e-2)
    assert np.abs(one - plain).max() > 1e-2
    # alone in its row, what is dropped for a question does not depend on the others
    assert np.array_equal(log_probs(model, 0, deterministic=True), np.concatenate(
        [scoring.option_log_probs(model, [tree], deterministic=True, dropout_seed=0)[0]
         for tree in trees]))


@pytest.mark.slow
def test_the_mean_over_dropout_seeds_is_that_of_training_mode(tmp_path):
    reference_model('llama', tmp_path)
    model, trees = lora_model(tmp_path, dropout=0.5), random_trees(np.random.default_rng(0))[:1]
    with torch.no_grad():
        trained = np.array([plain_log_probs(model.train(), trees[0], 'cpu') for _ in range(40)])
    drawn = np.array([scoring.option_log_probs(model, trees, dropout_seed=seed)[0]
                      for seed in range(40)])
    error = trained.std(0) * (2 / 40) ** 0.5
    assert (np.abs(drawn.mean(0) - trained.mean(0)) < 4.5 * error).all()


def write_task(folder, n=4, choices=('blue', 'a lazy dog', 'brown')):
    rows = [{'question': f'What is the fox {i}?', 'choices': list(choices), 'answer': i % 3,
             'subject': 'foxes'} for i in range(n)]
    write_rows(folder / 'dev.jsonl', rows)
    write_rows(folder / 'test.jsonl', rows)
    return f'{folder}'


def first_tree(asked, solved, tokenizer, max_length=2000, **keys):
    found = next(tokenize_questions(asked, solved, tokenizer, max_length=max_length,
                                    **({'add_bos': True} | keys)))[1]
    if isinstance(found, DataError):
        raise found
    return found


@pytest.mark.parametrize('kind', ['gemma', 'mistral', 'llama2', 'llama3'])
@pytest.mark.parametrize('options', [dict(scoring='letters'), dict(scoring='text'),
                                     dict(prompt_format='harness')])
def test_question_tokens_are_the_joint_encoding(tokenizers, tmp_path, kind, options):
    tokenizer = tokenizers[kind]
    asked, solved, _, _ = questions.load_task(write_task(tmp_path), shots=2, **options)
    tree = first_tree(asked, solved, tokenizer)
    assert tree.shots == 2
    prefix = asked[0].header + ''.join(s.solved for s in solved['', 'foxes'])
    for option, ids in zip(asked[0].options, tree.sequences, strict=True):
        whole = [tokenizer.bos_id] + tokenizer.encode(prefix + asked[0].context + option)
        assert ids == whole
        assert tokenizer.decode(whole[tree.starts[0]:]).strip() == option.strip()


@pytest.mark.parametrize('add_bos', [True, False])
@pytest.mark.parametrize('kind, template', [
    *((kind, template) for kind in ('gemma', 'mistral', 'llama2', 'llama3')
      for template in ('tulu', 'mistral')),
    ('llama3', 'llama3'), ('gemma', 'gemma'), ('qwen', 'chatml')])
@pytest.mark.parametrize('options', [dict(shots=2), dict(scoring='text', shots=2), {},
                                     dict(prompt_format='harness')])
def test_chat_tokens_are_those_of_training(tokenizers, tmp_path, kind, template, add_bos, options):
    tokenizer = tokenizers[kind if kind != 'qwen' else 'llama3']
    if kind == 'qwen':      # the names of ChatML for two of its control tokens
        tokenizer = copy.copy(tokenizer)
        tokenizer.control_ids = {'<|im_start|>': 128100, '<|im_end|>': 128101}
    asked, solved, _, _ = questions.load_task(write_task(tmp_path), **options)
    if options.get('prompt_format'):   # no header and shots before the question
        asked = [dataclasses.replace(question, header='') for question in asked]
    trees = [tree for _, tree in tokenize_questions(asked, solved, tokenizer, add_bos=add_bos,
                                                    max_length=2000, chat=template)]
    assert len({tree.prefix for tree in trees}) == 1
    for question, tree in zip(asked, trees, strict=True):
        text = question.header + ''.join(s.solved for s in solved.get(question.group, []))
        for n, option in enumerate(question.options):
            ids, mask = encode_conversation(
                [{'role': 'user', 'content': text + question.context},
                 {'role': 'assistant', 'content': option.strip()}], tokenizer, template, add_bos)
            whole = tree.sequences[n]
            assert whole == ids[:len(whole)] and len(whole) - tree.starts[n] == tree.n_tokens[n]
            # what follows is the end of the turn
            assert mask[:len(whole)] == [0] * tree.starts[n] + [1] * tree.n_tokens[n]
            assert ids[len(whole)] in tokenizer.control_ids.values()


def test_each_option_of_winogrande_has_its_own_start(tokenizers, tmp_path):
    """In plain text and as a conversation: what follows the blank is scored, and nothing else."""
    tokenizer, rest = tokenizers['mistral'], ' jumps over the dog.'
    row = {'sentence': 'The fox and the lazy dog: _' + rest, 'option1': 'the quick brown fox',
           'option2': 'the dog', 'answer': '1'}
    (question,), *_ = questions.load_task(
        f'winogrande_s:{write_rows(tmp_path / "dev.jsonl", [row])}', prompt_format='harness')
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


@pytest.mark.parametrize('chat', ['none', 'tulu'])
def test_white_space_before_a_question_is_as_in_one_text(tmp_path, chat):
    """GPT-2's words (Pythia) join the line breaks at the end of a text, but not before a word."""
    from tokenizers import pre_tokenizers
    train_bpe(tmp_path, [pre_tokenizers.ByteLevel(add_prefix_space=False)], add_bos_token=True)
    tokenizer = load_tokenizer(tmp_path)
    asked, solved, _, _ = questions.load_task(write_task(tmp_path), shots=2)
    for question, tree in tokenize_questions(asked, solved, tokenizer, add_bos=True,
                                             max_length=2000, chat=chat):
        text = question.header + ''.join(s.solved for s in solved.get(question.group, []))
        text += question.context
        whole = [tokenizer.bos_id, *tokenizer.encode(text)] if chat == 'none' else (
            encode_conversation([{'role': 'user', 'content': text},
                                 {'role': 'assistant', 'content': 'x'}], tokenizer)[0])
        assert [*tree.prefix, *tree.prompt] == whole[:len(tree.prefix) + len(tree.prompt)]


@pytest.mark.slow
def test_questions_can_be_scored_in_the_chat_template(scored_folder, tmp_path, capsys):
    folder = tmp_path / 'run'
    shutil.copytree(scored_folder / 'model', folder / 'model')
    shutil.copytree(scored_folder / 'data', folder / 'data')
    with pytest.raises(ConfigError, match='not trained here on conversations; name the'):
        scored(folder, tmp_path / 'out', '--chat=trained')
    with pytest.raises(ConfigError, match="needs <.im_start.>, <.im_end.>, which the"):
        scored(folder, tmp_path / 'out', '--chat=chatml')
    (folder / 'model' / 'train_config.py').write_text(
        "data_kind = 'instruct'\ntemplate = 'mistral'\nadd_bos = False\n")
    found = scored(folder, tmp_path / 'chat', '--chat=trained', '--limit=10')
    result, config = found['tasks']['global_mmlu'], found['config']
    assert result['chat'] == config['chat'] == 'mistral' and config['add_bos'] is False
    said = ('mmlu, 2 shots, options scored by letters, log-probabilities per token, '
            'chat template mistral')
    assert result['distribution'] == said
    assert said in capsys.readouterr().out
    assert said in (tmp_path / 'chat' / 'results.md').read_text()
    plain = scored(folder, tmp_path / 'plain', '--limit=10')['tasks']['global_mmlu']
    assert plain['chat'] == 'none' and plain['pooled']['nll'] != result['pooled']['nll']
    # the log-probabilities are those of one conversation per option
    model, tokenizer = checkpoint.load(folder / 'model'), load_tokenizer(folder / 'model')
    asked, solved, _, _ = questions.load_task(f'global_mmlu:{folder / "data"}', shots=2, limit=10)
    samples = read_samples(tmp_path / 'chat' / 'samples.jsonl')
    for question, sample in list(zip(asked, samples, strict=True))[::10]:
        text = question.header + ''.join(s.solved for s in solved[question.group])
        for option, log_prob in zip(question.options, sample['log_probs'], strict=True):
            ids, mask = encode_conversation(
                [{'role': 'user', 'content': text + question.context},
                 {'role': 'assistant', 'content': option.strip()}], tokenizer, 'mistral', False)
            tokens = torch.tensor([ids])
            rows = model.logits(model(tokens, *whole_rows(tokens))).log_softmax(-1)[0].detach()
            at = np.flatnonzero(mask)[:-1]      # the last one ends the turn
            assert log_prob == pytest.approx(
                sum(rows[i - 1, ids[i]].item() for i in at), abs=1e-4)
    write_rows(tmp_path / 'texts.jsonl', [{'text': 'the quick brown fox jumps'}])
    with pytest.raises(ConfigError, match='chat = tulu: clm scores tokens of texts'):
        evaluate.main([f'--model={folder / "model"}', f'--tasks=clm:{tmp_path / "texts.jsonl"}',
                       f'--out_dir={tmp_path / "clm"}', '--chat=tulu'])


@pytest.mark.parametrize('kind', ['gemma', 'mistral', 'llama2', 'llama3'])
def test_a_question_may_begin_the_text(tokenizers, kind):
    """Without header and shots, as in the harness; and where every shot had to be dropped."""
    tokenizer = tokenizers[kind]
    question = questions.Question('1', 'A fox runs and', [' sleeps.', ' eats a hen.'], 1, 's')
    for solved, max_length in (({}, 2000), ({('', 's'): [question]}, 30)):
        tree = first_tree([question], solved, tokenizer, max_length)
        for option, ids in zip(question.options, tree.sequences, strict=True):
            assert ids == [
                tokenizer.bos_id, *tokenizer.encode(question.context + option)]


def test_whole_shots_are_dropped(tokenizers, tmp_path):
    tokenizer = tokenizers['gemma']
    asked, solved, _, _ = questions.load_task(write_task(tmp_path), shots=3)
    shots = solved['', 'foxes']
    sizes = [first_tree(asked, {('', 'foxes'): shots[:n]}, tokenizer) for n in range(4)]
    for kept, tree in enumerate(sizes):
        longest = len(tree.prefix) + len(tree.prompt) + max(map(len, tree.continuations))
        assert first_tree(asked, solved, tokenizer, longest) == tree and tree.shots == kept
    with pytest.raises(DataError, match='even without shots the prompt has'):
        first_tree(asked, {}, tokenizer, 10)


def test_options_that_cannot_be_scored(tokenizers):
    bad = questions.Question('7', 'Answer: ', ['', 'x'], 1, 's', 'H\n\n', place='q.jsonl:8')
    with pytest.raises(DataError, match="q.jsonl:8: option '' does not begin at a token boundary"):
        first_tree([bad], {}, tokenizers['llama3'])


def test_a_prompt_has_exactly_one_bos(tokenizers, tmp_path):
    asked, _, _, _ = questions.load_task(write_task(tmp_path))
    for add_bos in (True, False):
        for tokenizer in tokenizers.values():
            tree = first_tree(asked, {}, tokenizer, add_bos=add_bos)
            assert [*tree.prefix, *tree.prompt].count(tokenizer.bos_id) == int(add_bos)


@pytest.mark.slow
@pytest.mark.parametrize('file', ['llama3_tokenizer.model', 'llama2_tokenizer.model',
                                  'mistral_tokenizer.model.v1',
                                  'mistral_mistral_instruct_tokenizer_240323.model.v3'])
def test_real_questions_have_the_tokens_of_the_whole_text(file, tmp_path):
    """Prefix, question and options in pieces are the whole prompt's tokens, in every format."""
    needs_files(f'tokenizers/{file}', 'datasets/mmlu_pro/mmlu_pro_sample.jsonl')
    datasets = SHARED / 'datasets'
    shutil.copyfile(SHARED / 'tokenizers' / file, tmp_path / 'tokenizer.model')
    tokenizer = load_tokenizer(tmp_path)
    for name, options in ((f'mmlu:{datasets / "mmlu"}', dict(shots=5)),
                          (f'arc_easy:{datasets / "arc_easy"}',
                           dict(shots=2, prompt_format='harness')),
                          (f'hellaswag:{datasets / "hellaswag"}', dict(prompt_format='harness')),
                          (f'xcopa:{datasets / "xcopa"}', dict(prompt_format='harness', shots=1)),
                          (f'xcopa:{datasets / "xcopa"}', dict(scoring='text')),
                          (str(datasets / 'mmlu_pro' / 'mmlu_pro_sample.jsonl'), {})):
        asked, solved, _, _ = questions.load_task(name, **options)
        picked = random.Random(0).sample(asked, 100)
        for q, tree in tokenize_questions(picked, solved, tokenizer, add_bos=True,
                                          max_length=10**6):
            before = q.header + ''.join(s.solved for s in solved.get(q.group, []))
            for option, ids in zip(q.options, tree.sequences, strict=True):
                assert ids == [
                    tokenizer.bos_id, *tokenizer.encode(before + q.context + option)]


@pytest.fixture(scope='module')
def scored_folder(tmp_path_factory):
    """A tiny Llama with a sentencepiece tokenizer, and a task of 3 languages with shots."""
    folder = tmp_path_factory.mktemp('scored')
    sentencepiece_folder(folder / 'model', 'mistral')
    reference_model('llama', folder / 'model', vocab_size=load_tokenizer(folder / 'model').n_vocab)
    rng = random.Random(0)
    words = 'quick brown fox jumps over the lazy dog blue river old stone'.split()
    for language in ('de', 'en', 'sw'):
        for split, n in (('dev', 6), ('test', 40)):
            rows = [{'sample_id': f'{split}/{i}', 'subject': ('anatomy', 'sociology')[i % 2],
                     'question': ' '.join(rng.sample(words, 4)) + '?', 'answer': 'ABCD'[i % 4],
                     **{f'option_{c}': rng.choice(words) for c in 'abcd'}} for i in range(n)]
            write_rows(folder / 'data' / f'{language}_{split}.jsonl', rows)
    return folder


SMALL = ['--n_bootstrap=20', '--dtype=float32', '--pack_len=512', '--pictures=False']


def scored(folder, out, *arguments, tasks='global_mmlu'):
    evaluate.main([f'--model={folder / "model"}', f'--tasks={tasks}:{folder / "data"}',
                   f'--out_dir={out}', '--shots=2', *SMALL, *arguments])
    return json.loads((out / 'results.json').read_text())


def adapted_run(base, run, dropout=0.3):
    """What train.py --lora leaves: merged weights, the adapters, the tokenizer."""
    model = lora_model(base, dropout)
    model.config.temperature = 1.5      # as with logit_temperature: in the config of the run alone
    adapter.save_adapter(model, run / 'adapter', str(base))
    checkpoint.save(model, run, torch.float32, base)
    return model


@pytest.mark.slow
def test_an_evaluation_with_the_dropout_of_adapters(scored_folder, tmp_path, capsys):
    run = tmp_path / 'run' / 'model'
    model = adapted_run(scored_folder / 'model', run)
    shutil.copytree(scored_folder / 'data', tmp_path / 'run' / 'data')

    def samples(name, *arguments):
        out = tmp_path / name
        scored(tmp_path / 'run', out, '--limit=8', '--deterministic', '--device=cpu', *arguments)
        return {(s['task'], s['language'], s['id']): s['log_probs']
                for s in read_samples(out / 'samples.jsonl') if 'log_probs' in s}
    plain, dropped = samples('plain'), samples('dropped', '--dropout_seed=3', '--p_true')
    off = [np.abs(np.subtract(plain[key], dropped[key])).max() for key in plain]
    assert plain.keys() == dropped.keys() and min(off) > 1e-3
    # by hand, from the adapters themselves
    asked, solved, _, _ = questions.load_task(f'global_mmlu:{tmp_path / "run" / "data"}', shots=2,
                                              limit=8)
    tokenizer = load_tokenizer(run)
    trees = {(q.language, q.id): tree for q, tree in tokenize_questions(
        asked, solved, tokenizer, add_bos=True, max_length=2048)}
    keys = [*trees]
    for key, log_probs in zip(keys, scoring.option_log_probs(
            model, [trees[key] for key in keys], deterministic=True, dropout_seed=3), strict=True):
        assert dropped['global_mmlu', *key] == pytest.approx(log_probs.tolist(), abs=1e-6)
    # the record, the table and the label of P(True)
    record = json.loads((tmp_path / 'dropped' / 'eval_config.json').read_text())
    assert record['dropout_seed'] == 3 and record['adapter'] != record['base']
    assert 'dropout_seed' not in json.loads((tmp_path / 'plain' / 'eval_config.json').read_text())
    content = json.loads((tmp_path / 'dropped' / 'results.json').read_text())
    assert content['tasks']['global_mmlu']['dropout_seed'] == 3
    assert {'global_mmlu', 'global_mmlu.p_true'} == content['tasks'].keys()
    assert 'plain text, dropout with seed 3' in capsys.readouterr().out
    # a seed gives the same samples, also if the evaluation was interrupted
    path = tmp_path / 'cut' / 'samples.jsonl'
    assert samples('cut', '--dropout_seed=3') == dropped
    path.write_text(''.join(path.read_text().splitlines(True)[:9]))
    (tmp_path / 'cut' / 'results.json').unlink()
    assert samples('cut', '--dropout_seed=3') == dropped
    assert samples('other', '--dropout_seed=4') != dropped
    for arguments in (['--dropout_seed=4'], []):
        with pytest.raises(ConfigError, match='holds samples with dropout_seed = '):
            samples('dropped', *arguments)
    evaluate.main([f'--model={run}', f'--tasks=global_mmlu:{tmp_path / "run" / "data"}',
                   '--dropout_seed=2', '--limit=2', '--shots=0', '--n_bootstrap=0'])
    assert (run / 'dropout-2' / 'results.json').exists() and not (run / 'results.json').exists()


@pytest.mark.slow
def test_dropout_that_cannot_be_drawn(scored_folder, tmp_path):
    run = tmp_path / 'run' / 'model'
    adapted_run(scored_folder / 'model', run)
    settings = run / 'adapter' / 'adapter_config.json'
    content = json.loads(settings.read_text())

    def fails(message, folder=run.parent, **changes):
        settings.write_text(json.dumps(content | changes))
        with pytest.raises((ConfigError, checkpoint.CheckpointError), match=message):
            evaluate.main([f'--model={folder / "model"}', '--dropout_seed=2', '--shots=2',
                           f'--tasks=global_mmlu:{scored_folder / "data"}'])
        assert not (run / 'dropout-2' / 'samples.jsonl').exists()
    fails('model has no adapter/, which train.py --lora saves', scored_folder)
    fails('trained with lora_dropout = 0, so nothing would be dropped', lora_dropout=0.0)
    fails("adapter_config.json: use_dora = True is not supported; merge the adapter", use_dora=True)
    fails('adapter_config.json: r = 0 is not supported', r=0)
    fails("lora_targets = .*'query'.*; wanted some of q_proj", target_modules=['query'])
    fails('says rank 3 of layer .*, but its matrices in .* have rank 4', r=3)
    fails('target_modules does not name .*down_proj.weight is in only', target_modules=['q_proj'])
    fails('there is no file or folder|no model folder at', base_model_name_or_path='/none')


@pytest.mark.parametrize('change, used', [
    ({}, True), ({'deterministic': True}, True), ({'dtype': 'float32'}, False),
    ({'device': 'cpu'}, False)])
def test_kernels_are_loaded_where_they_compute(change, used, monkeypatch, tmp_path):
    cfg = evaluate.EvalConfig(**{'dtype': 'bfloat16', 'device': 'cuda'} | change)
    model, calls = SimpleNamespace(), []
    monkeypatch.setattr(checkpoint, 'load', lambda *_, **options: model)
    monkeypatch.setattr(load_ahead, 'warm_up', lambda *_: calls.append('warm'))
    load = load_ahead.load_ahead(tmp_path, SimpleNamespace(model_type=''), cfg, print)
    assert load() is load() is model
    assert calls == ['warm'] * used


@pytest.mark.parametrize('name', ['gemma2', 'mistral_window', 'qwen3', 'neox', 'opt'])
def test_the_kernels_are_loaded_by_a_model_of_two_layers(name, monkeypatch, tmp_path):
    reference_model(name, tmp_path, max_position_embeddings=32, **head_of_32(name))
    calls, place, random_state = [], [], torch.get_rng_state()
    monkeypatch.setattr(devices, 'pick_device', place.append)
    load_ahead.warm_up(checkpoint.read_config(tmp_path), evaluate.EvalConfig(
        device='cpu', pack_len=64), lambda *call: calls.append(call))
    (model, arrays, _), = calls
    assert len(model.decoder.layers) == 2 and model.head.dtype == torch.bfloat16
    assert torch.isfinite(model(*torch.from_numpy(arrays))).shape == (1, 64, model.head.shape[1])
    assert place == ['cpu']     # else kernels of a new thread go to the first GPU
    assert torch.equal(torch.get_rng_state(), random_state)     # no weights were drawn


def test_a_failed_warm_up_keeps_no_memory(monkeypatch, tmp_path):
    tensors, model = [], SimpleNamespace()

    def fails(*_):
        x = torch.zeros(3)
        tensors.append(weakref.ref(x))
        raise torch.OutOfMemoryError

    monkeypatch.setattr(load_ahead, 'warm_up', fails)
    monkeypatch.setattr(load_ahead, 'load_model', lambda *_: model)
    cfg = evaluate.EvalConfig(dtype='bfloat16', device='cuda', pictures=False)
    load = load_ahead.load_ahead(tmp_path, SimpleNamespace(model_type=''), cfg, print)
    assert load() is model and tensors[0]() is None


@pytest.mark.parametrize('device', DEVICES[1:])
def test_the_same_results_by_the_kernels_and_without(scored_folder, tmp_path, device, monkeypatch):
    probs = []
    for name in ('kernels', 'without'):
        scored(scored_folder, tmp_path / name, f'--device={device}', '--dtype=bfloat16',
               '--limit=20', '--pack_len=512')
        rows = read_samples(tmp_path / name / 'samples.jsonl')
        probs.append(report.predictions(sorted(rows, key=sample_order), 'token').probs)
        monkeypatch.setattr(triton_ops, 'kernels_apply', lambda x: False)
    assert 0 < np.abs(probs[0] - probs[1]).max() < 0.03


@pytest.mark.slow
def test_a_model_that_is_given_scores_as_the_one_that_is_loaded(scored_folder, tmp_path):
    folder = scored_folder / 'model'
    for name, model in (('given', checkpoint.load(folder)), ('loaded', None)):
        cfg = evaluate.EvalConfig(str(folder), tasks=(f'global_mmlu:{scored_folder / "data"}',),
                                  shots=1, n_bootstrap=0, pictures=False, device='cpu',
                                  pack_len=512)
        evaluate.evaluate(folder, load_tokenizer(folder), evaluate.load_tasks(cfg), cfg,
                          tmp_path / name, model and (lambda model=model: model))
    assert (tmp_path / 'given/samples.jsonl').read_bytes() == (
        tmp_path / 'loaded/samples.jsonl').read_bytes()


@pytest.mark.slow
def test_what_edited_code_computes_is_not_mixed_with_what_was_there(scored_folder, tmp_path):
    root, model = tmp_path / 'copy', scored_folder / 'model'
    shutil.copytree(HERE, root, ignore=shutil.ignore_patterns(
        '.*', 'study', 'assets', 'out', 'build', '*.png'))
    (tmp_path / 'prompts.jsonl').write_text('{"prompt": "When"}\n')

    def run(script, *arguments):
        process = start_script(script, f'--model={model}', '--device=cpu', *arguments, root=root)
        return process, process.communicate()[1]

    def both(*more):
        return [run('evaluate.py', f'--tasks=global_mmlu:{scored_folder / "data"}', *SMALL, *more,
                    f'--out_dir={tmp_path / "scored"}', '--limit=4', '--shots=2'),
                run('generate.py', f'--prompts={tmp_path / "prompts.jsonl"}', '--raw', *more,
                    f'--out={tmp_path / "answers.jsonl"}', '--max_tokens=4', '--temperature=0')]

    def edit(old, new):
        text = (root / 'model.py').read_text()
        assert old in text
        (root / 'model.py').write_text(text.replace(old, new))

    def written():
        lines = (tmp_path / 'scored/samples.jsonl').read_text().splitlines()
        return [json.loads(line)['log_probs'] for line in lines], (
            tmp_path / 'answers.jsonl').read_text()

    assert [error for process, error in both() if process.returncode] == []
    before = written()
    edit('        # the sums are in the order of transformers\n', '')
    (tmp_path / 'scored/eval_config.json').write_text(re.sub(   # as an older version wrote it
        ' "code": .*\n', '', (tmp_path / 'scored/eval_config.json').read_text()))
    assert [error for process, error in both() if process.returncode] == []
    edit('        h = self.input_layernorm(x).to', '        h = 2 * self.input_layernorm(x).to')
    for (process, error), message in zip(both(), ('holds samples of', 'has answers of')):
        assert process.returncode and f'{message} other code: model.py or a file that' in error
    assert written() == before
    assert [error for process, error in both('--overwrite') if process.returncode] == []
    assert written()[0] != before[0]


@pytest.mark.slow
@pytest.mark.parametrize('script, more', [
    ('evaluate.py', ['--tasks={}', '--shots=0', '--out_dir=out']),
    ('generate.py', ['--prompts={}', '--raw', '--max_tokens=2', '--out=out.jsonl']),
    ('train.py', ['--data={}', '--data_kind=text', '--max_length=16', '--dry_run',
                  '--batch_size=1', '--epochs=2'])])
def test_the_scripts_run_in_a_profiler(script, more, scored_folder, tmp_path):
    """cProfile of Python 3.11 leaves itself in sys.modules as the main module."""
    rows = {'question': 'What?', 'prompt': 'What?', 'text': 'What is this? ' * 20,
            'choices': ['one', 'two'], 'answer': 1}
    (tmp_path / 'rows.jsonl').write_text(f'{json.dumps(rows)}\n' * 3)
    done = subprocess.run(
        [sys.executable, '-m', 'cProfile', HERE / script, f'--model={scored_folder / "model"}',
         '--device=cpu', *(x.format('rows.jsonl') for x in more)], cwd=tmp_path, text=True,
        capture_output=True, env=os.environ | {'PYTHONPATH': str(HERE)})
    assert done.returncode == 0 and 'function calls' in done.stdout, done.stderr


@pytest.mark.slow
def test_results_have_languages_groups_and_macro(scored_folder, tmp_path, capsys):
    found = scored(scored_folder, tmp_path / 'all', '--pictures')
    result = found['tasks']['global_mmlu']
    assert set(result['languages']) == {'de', 'en', 'sw'}
    assert set(result['subjects']) == {'anatomy', 'sociology'}
    assert set(result['categories']) == {'STEM', 'social sciences'}
    assert result['pooled']['n'] == 120 and result['macro']['groups'] == 3
    assert result['macro']['ece'] == pytest.approx(
        np.mean([r['ece'] for r in result['languages'].values()]))
    assert found['versions']['torch'] == torch.__version__ and found['seed'] == 0
    for name in ('reliability.png', 'reliability-global_mmlu-languages.png'):
        assert (tmp_path / 'all' / name).read_bytes().startswith(b'\x89PNG')
    with open(tmp_path / 'all' / 'results.csv') as file:
        lines = file.read().split('\n')
    assert len(lines) == 1 + 2 + 2 + 3 + 1 + 1 + 1 and 'ece_boot_low' in lines[0]
    assert '| macro |' in (tmp_path / 'all' / 'results.md').read_text()
    one = scored(scored_folder, tmp_path / 'one', '--languages=sw')['tasks']['global_mmlu']
    same = result['languages']['sw']
    assert {k: one['pooled'][k] for k in ('n', 'accuracy')} == {k: same[k] for k in (
        'n', 'accuracy')} and one['pooled']['nll'] == pytest.approx(same['nll'])
    with pytest.raises(DataError, match="no language 'swa'; did you mean 'sw'"):
        scored(scored_folder, tmp_path / 'none', '--languages=swa')


def test_pictures_and_pages_of_other_processes_are_those_of_this_one(scored_folder, tmp_path,
                                                                     monkeypatch):
    def files(out):
        scored(scored_folder, out, '--pictures')
        return {path.name: path.read_bytes() for path in out.iterdir()
                if path.suffix in ('.png', '.html', '.md', '.csv')}

    def forked(function, jobs, worth_it):
        *made, pid = processes.parallel_map(function, [*jobs, os.getpid], worth_it=True)
        assert pid != os.getpid() and not worth_it
        return made

    alone = files(tmp_path / 'alone')
    assert len(alone) == 5
    monkeypatch.setattr(processes, 'cores', lambda: 2)
    monkeypatch.setattr(evaluation, 'parallel_map', forked)
    assert files(tmp_path / 'forked') == alone


@pytest.mark.slow
def test_batch_composition_changes_nothing_but_rounding(scored_folder, tmp_path):
    """Another order of rows, row length or batch: the same samples, bit by bit if asked for."""
    turned = tmp_path / 'turned'
    shutil.copytree(scored_folder / 'model', turned / 'model')
    for path in (scored_folder / 'data').glob('*.jsonl'):
        rows = path.read_text().splitlines()
        (turned / 'data').mkdir(exist_ok=True)
        (turned / 'data' / path.name).write_text('\n'.join(
            rows if 'dev' in path.name else rows[::-1]))

    def samples(folder, name, *arguments):
        scored(folder, tmp_path / name, *arguments)
        rows = read_samples(tmp_path / name / 'samples.jsonl')
        return {(r['language'], r['id']): r for r in rows}
    plain = samples(scored_folder, 'a')
    other = samples(turned, 'b', '--pack_len=200', '--batch_rows=3')
    assert plain.keys() == other.keys() and list(plain) != list(other)
    for key, row in plain.items():
        assert row['log_probs'] == pytest.approx(other[key]['log_probs'], abs=1e-4)
        assert {**row, 'log_probs': 0} == {**other[key], 'log_probs': 0}
    exact = samples(scored_folder, 'c', '--deterministic')
    assert exact == samples(turned, 'd', '--deterministic', '--pack_len=200', '--batch_rows=3')


@pytest.mark.slow
def test_scoring_resumes_where_it_stopped(scored_folder, tmp_path, monkeypatch, capsys):
    whole = scored(scored_folder, tmp_path / 'whole')
    samples = (tmp_path / 'whole' / 'samples.jsonl').read_text()
    # a process killed while it writes a line
    shutil.copytree(tmp_path / 'whole', tmp_path / 'cut')
    (tmp_path / 'cut' / 'results.json').unlink()
    (tmp_path / 'cut' / 'samples.jsonl').write_text(samples[:len(samples) // 2])
    launched, forward = [], scoring.forward_values
    monkeypatch.setattr(scoring, 'forward_values', lambda model, arrays, scored, **options: (
        launched.append(len({tree for tree, *_ in scored})),
        forward(model, arrays, scored, **options))[1])
    again = scored(scored_folder, tmp_path / 'cut')
    assert sum(launched) == 120 - samples[:len(samples) // 2].count('\n')
    # the time of the killed process is not known
    assert [found['tasks']['global_mmlu']['scoring_seconds'] is None
            for found in (whole, again)] == [False, True]
    pooled = (found['tasks']['global_mmlu']['pooled'] for found in (whole, again))
    assert np.allclose(*([report[k] for k in ('accuracy', 'confidence', 'ece', 'nll')]
                         for report in pooled), atol=1e-4)
    rows = read_samples(tmp_path / 'cut' / 'samples.jsonl')
    assert len(rows) == len({(r['language'], r['id']) for r in rows}) == 120
    # all is there: another normalisation needs no model, and gives the same results twice
    monkeypatch.setattr(checkpoint, 'load', None)
    assert scored(scored_folder, tmp_path / 'whole')['tasks']['global_mmlu']['pooled'] == (
        whole['tasks']['global_mmlu']['pooled'])
    flat = scored(scored_folder, tmp_path / 'whole', '--norm=sum')
    assert flat['tasks']['global_mmlu']['distribution'] == (
        'mmlu, 2 shots, options scored by letters, summed log-probabilities, plain text')
    for option in ('--shots=1', '--scoring=text', '--prompt_format=harness', '--deterministic',
                   '--chat=tulu'):
        with pytest.raises(ConfigError, match='holds samples with '
                                                      + option[2:].split('=')[0] + ' = '):
            scored(scored_folder, tmp_path / 'whole', option)
    # the same files in another place are the same task
    shutil.copytree(scored_folder, tmp_path / 'changed')
    scored(tmp_path / 'changed', tmp_path / 'whole')
    monkeypatch.undo()
    # another question under a known id is another question
    path = tmp_path / 'changed' / 'data' / 'sw_test.jsonl'
    path.write_text(path.read_text().replace('?', ' then?', 1))
    scored(tmp_path / 'changed', tmp_path / 'whole')
    rows = read_samples(tmp_path / 'whole' / 'samples.jsonl')
    assert len(rows) == 121
    assert json.loads((tmp_path / 'whole' / 'results.json').read_text())['tasks']['global_mmlu'][
        'pooled']['n'] == 120
    # another model's samples are not mixed in
    weights = load_file(tmp_path / 'changed' / 'model' / 'model.safetensors')
    save_file({k: 1.1 * x for k, x in weights.items()},
              tmp_path / 'changed' / 'model' / 'model.safetensors')
    with pytest.raises(ConfigError, match='holds samples of another model'):
        scored(tmp_path / 'changed', tmp_path / 'whole')
    assert scored(tmp_path / 'changed', tmp_path / 'whole', '--overwrite')['tasks']['global_mmlu'][
        'pooled']['n'] == 120


@pytest.mark.slow
@pytest.mark.parametrize('more', [[], ['--p_true', '--fit_temperature']])
def test_a_corrected_answer_counts_in_the_same_folder(more, scored_folder, tmp_path):
    """The same folder evaluated again gives what a new folder gives, post-hoc and P(True) too."""
    task = write_words(tmp_path / 'foxes.jsonl', 12, 'fox')

    def results(name):
        evaluate_words(scored_folder, tmp_path / name, f'--tasks={task}', '--deterministic',
                       '--scoring=text', *more)
        content = json.loads((tmp_path / name / 'results.json').read_text())
        for result in content['tasks'].values():
            del result['scoring_seconds']
        return content['tasks']
    before = results('same')
    rows = [json.loads(line) for line in task.read_text().splitlines()]
    write_rows(task, [row | {'answer': (row['answer'] + 1) % 3} for row in rows])
    corrected = results('same')
    assert corrected == results('new') != before
    write_rows(task, rows)      # and back again
    assert results('same') == before


def test_samples_of_questions_carry_the_hash_of_the_question(scored_folder, tmp_path):
    task = write_words(tmp_path / 'foxes.jsonl', 4, 'fox')

    def digests(name, *arguments):
        evaluate_words(scored_folder, tmp_path / name, f'--tasks={task}', *arguments)
        return [s['question'] for s in read_samples(tmp_path / name / 'samples.jsonl')]
    letters = digests('letters')
    assert len(set(letters)) == 4
    assert digests('text', '--scoring=text', '--p_true') == letters * 2     # no matter how asked
    task.write_text(task.read_text().replace('fox', 'hound', 1))
    assert [a == b for a, b in zip(digests('other'), letters, strict=True)] == [
        False, True, True, True]


def write_words(path, n, word):
    """A task of n questions with three options; `word` makes it differ from others."""
    return write_rows(path, [{'question': f'the quick {word} {i}?', 'answer': i % 3,
                              'choices': ['blue', 'lazy', 'old']} for i in range(n)])


def evaluate_words(scored_folder, out, *arguments):
    evaluate.main([f'--model={scored_folder / "model"}', f'--out_dir={out}', '--shots=0', *SMALL,
                   *arguments])
    return json.loads((out / 'results.json').read_text())


@pytest.mark.slow
def test_a_folder_holds_every_task_scored_there(scored_folder, tmp_path, capsys, monkeypatch):
    out, foxes = tmp_path / 'out', write_words(tmp_path / 'foxes.jsonl', 30, 'fox')
    stones = write_words(tmp_path / 'stones.jsonl', 20, 'stone')
    drawn = []
    draw = evaluation.draw_reliability
    monkeypatch.setattr(evaluation, 'draw_reliability', lambda path, panels, *rest, **more: (
        drawn.append([title for title, _ in panels]), draw(path, panels, *rest, **more))[1])
    first = evaluate_words(scored_folder, out, f'--tasks={foxes}')
    both = evaluate_words(scored_folder, out, f'--tasks={stones}', '--norm=sum', '--limit=12',
                          '--pictures')
    assert list(both['tasks']) == ['foxes', 'stones'] and drawn[-1] == ['foxes', 'stones (sample)']
    assert both['tasks']['foxes'] == first['tasks']['foxes']
    assert both['tasks']['stones']['pooled']['n'] == 12
    said = {label: [task[key] for key in ('distribution', 'norm', 'shots', 'limit')]
            for label, task in both['tasks'].items()}
    scoring = 'mmlu, 0 shots, options scored by letters'
    assert said == {
        'foxes': [f'{scoring}, log-probabilities per token, plain text', 'token', 0, None],
        'stones': [f'{scoring}, summed log-probabilities, plain text', 'sum', 0, 12]}
    for name in ('results.md', 'results.csv', 'results.tex'):
        text = (out / name).read_text()
        assert 'foxes' in text and 'stones' in text
    # the first again with another norm: its result is replaced, that of the other stays
    again = evaluate_words(scored_folder, out, f'--tasks={foxes}', '--norm=sum')
    assert again['tasks']['stones'] == both['tasks']['stones']
    assert again['tasks']['foxes']['norm'] == 'sum'
    # another file that would have the same name in the results
    other = write_words(tmp_path / 'other' / 'foxes.jsonl', 10, 'dog')
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    with pytest.raises(ConfigError, match=r'holds foxes of .*foxes.jsonl, and .*other.* has'
                                                  ' other questions'):
        evaluate_words(scored_folder, out, f'--tasks={other}')
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    replaced = evaluate_words(scored_folder, out, f'--tasks={other}', '--overwrite')
    assert 'stones' not in (out / 'results.tex').read_text()
    assert list(replaced['tasks']) == ['foxes'] and replaced['tasks']['foxes']['pooled']['n'] == 10


def test_files_that_the_program_did_not_write_are_kept(scored_folder, tmp_path):
    """What an evaluation did not write is neither replaced nor deleted, also by --overwrite."""
    task = write_words(tmp_path / 'foxes.jsonl', 5, 'fox')
    for name in ('samples.jsonl', 'results.csv', 'results.json', 'results.tex', 'reliability.png',
                 'eval_config.json'):
        out = tmp_path / f'out-{name}'
        out.mkdir()
        (out / name).write_text('mine')
        for option in ((), ('--overwrite',)):
            with pytest.raises(ConfigError, match=f'{name} was not written by'):
                evaluate_words(scored_folder, out, f'--tasks={task}', '--pictures', *option)
        assert (out / name).read_text() == 'mine'
        assert {p.name for p in out.iterdir()} <= {name, ownership.LOCK}
    # names that other programs give to temporary files
    out = tmp_path / 'temporary'
    out.mkdir()
    (out / 'results.json.tmp').write_text('mine')
    evaluate_words(scored_folder, out, f'--tasks={task}')
    assert (out / 'results.json.tmp').read_text() == 'mine' and (out / 'results.json').exists()
    out = tmp_path / 'out'
    evaluate_words(scored_folder, out, f'--tasks={task}')
    (out / 'results.py').write_text('mine')
    (out / 'reliability-of-mine.png').write_text('mine')
    evaluate_words(scored_folder, out, f'--tasks={task}', '--overwrite', '--pictures')
    assert (out / 'results.py').read_text() == (out / 'reliability-of-mine.png').read_text() == (
        'mine')


def test_samples_are_not_appended_to_a_file_behind_a_link(scored_folder, tmp_path):
    task, out = write_words(tmp_path / 'foxes.jsonl', 5, 'fox'), tmp_path / 'out'
    evaluate_words(scored_folder, out, f'--tasks={task}')
    (tmp_path / 'elsewhere').write_text('no whole line')
    (out / 'samples.jsonl').unlink()
    (out / 'samples.jsonl').symlink_to(tmp_path / 'elsewhere')
    with pytest.raises(ConfigError, match='samples.jsonl is a link to a file elsewhere'):
        evaluate_words(scored_folder, out, f'--tasks={task}')
    evaluate_words(scored_folder, out, f'--tasks={task}', '--overwrite')
    assert (tmp_path / 'elsewhere').read_text() == 'no whole line'


def test_overwrite_deletes_after_all_is_checked(scored_folder, tmp_path):
    out, task = tmp_path / 'out', write_words(tmp_path / 'foxes.jsonl', 5, 'fox')
    evaluate_words(scored_folder, out, f'--tasks={task}')
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    shutil.copytree(scored_folder / 'model', tmp_path / 'broken')
    rewrite(tmp_path / 'broken', lambda tensors: tensors.pop('model.norm.weight'))
    shutil.copytree(tmp_path / 'broken', tmp_path / 'empty')
    (tmp_path / 'empty' / 'tokenizer.model').unlink()
    for arguments in (['--tasks=foxs.jsonl'], ['--batch_rows=0'],
                      [f'--model={tmp_path / "broken"}'], [f'--model={tmp_path / "empty"}'],
                      ['--device=gpu'], [f'--tasks={task}', '--shots=3']):
        with pytest.raises((ConfigError, DataError, checkpoint.CheckpointError)):
            evaluate_words(scored_folder, out, f'--tasks={task}', '--overwrite', *arguments)
        assert {p.name: p.read_bytes() for p in out.iterdir()} == before


@pytest.mark.parametrize('error', [KeyboardInterrupt, SystemExit(143), MemoryError])
def test_what_a_failed_evaluation_would_have_replaced_is_put_back(
        scored_folder, tmp_path, monkeypatch, error):
    out, task = tmp_path / 'out', write_words(tmp_path / 'foxes.jsonl', 5, 'fox')
    evaluate_words(scored_folder, out, f'--tasks={task}', '--pictures')
    ownership.claim(out, 'answers.jsonl')
    (out / 'answers.jsonl').write_text('of generate.py')
    before = {p.name: p.read_bytes() for p in out.iterdir()}

    def fail(*_, **__):
        assert not (out / 'results.json').exists() and (out / 'answers.jsonl').exists()
        raise error
    monkeypatch.setattr(evaluate, 'score_tasks', fail)
    with pytest.raises(error if isinstance(error, type) else type(error)):
        evaluate_words(scored_folder, out, f'--tasks={task}', '--overwrite')
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before


def test_an_interrupted_evaluation_and_what_it_replaces_are_both_kept(
        scored_folder, tmp_path, monkeypatch, capsys):
    out, task = tmp_path / 'out', write_words(tmp_path / 'foxes.jsonl', 5, 'fox')
    evaluate_words(scored_folder, out, f'--tasks={task}')
    before, append = {p.name: p.read_bytes() for p in out.iterdir()}, samples.append
    write_words(tmp_path / 'foxes.jsonl', 7, 'fox')

    def interrupted(*arguments):
        append(*arguments)
        raise KeyboardInterrupt
    monkeypatch.setattr(samples, 'append', interrupted)
    for n in (1, 2):        # the first samples are set aside in turn
        with pytest.raises(KeyboardInterrupt):
            evaluate_words(scored_folder, out, f'--tasks={task}', '--overwrite')
        aside = out / '.replaced-evaluation-001'
        assert f'note: {aside} keeps what --overwrite replaces' in capsys.readouterr().out
        assert {p.name: p.read_bytes() for p in aside.iterdir()}.items() >= {
            k: v for k, v in before.items() if k not in ('.lock', 'written.json')}.items()
        assert len([*out.glob('.replaced*')]) == n
    monkeypatch.undo()
    results = evaluate_words(scored_folder, out, f'--tasks={task}')
    assert '1 scored earlier' in capsys.readouterr().out and not [*out.glob('.replaced*')]
    assert results['tasks']['foxes']['pooled']['n'] == 7


def test_overwrite_refuses_to_remove_the_questions_that_are_read(scored_folder, tmp_path):
    out = tmp_path / 'out'
    evaluate_words(scored_folder, out, f'--tasks={write_words(tmp_path / "a.jsonl", 5, "fox")}')
    shutil.copy(tmp_path / 'a.jsonl', out / 'samples.jsonl')
    (tmp_path / 'link.jsonl').symlink_to(out / 'samples.jsonl')
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    for name in (out / 'samples.jsonl', tmp_path / 'link.jsonl'):
        with pytest.raises(ConfigError, match='out/samples.jsonl is read by this command'):
            evaluate_words(scored_folder, out, f'--tasks={name}', '--overwrite')
        assert {p.name: p.read_bytes() for p in out.iterdir()} == before


@pytest.mark.parametrize('move', [shutil.rmtree, lambda out: out.rename(f'{out}-moved'),
                                  lambda out: (out / 'samples.jsonl').unlink(),
                                  lambda out: os.replace(shutil.copy(
                                      out / 'samples.jsonl', out / 'x'), out / 'samples.jsonl')])
def test_a_folder_that_is_removed_ends_an_evaluation_at_the_next_sample(
        scored_folder, tmp_path, monkeypatch, move):
    out, task = tmp_path / 'out', write_words(tmp_path / 'foxes.jsonl', 9, 'fox')
    append, written = samples.append, []

    def append_and_move(file, sample):
        append(file, sample)
        written.append(sample)
        if len(written) == 2:
            move(out)
    monkeypatch.setattr(samples, 'append', append_and_move)
    with pytest.raises(ConfigError, match='out was removed or moved, or its samples.jsonl was del'):
        evaluate_words(scored_folder, out, f'--tasks={task}')
    assert len(written) == 2


def test_a_second_process_on_one_folder_is_refused(scored_folder, tmp_path, capsys):
    task, out = write_words(tmp_path / 'foxes.jsonl', 40, 'fox'), tmp_path / 'out'
    with ownership.lock(out), pytest.raises(ConfigError, match='process is writing there'):
        evaluate_words(scored_folder, out, f'--tasks={task}')
    assert capsys.readouterr().out == '' and not (out / 'samples.jsonl').exists()
    evaluate_words(scored_folder, out, f'--tasks={task}')


@pytest.mark.parametrize('content', ['[]', '{"a"', '{}', '', '{"tasks": 3}', '\0', '[' * 100_000])
def test_a_damaged_eval_config_is_named(scored_folder, tmp_path, content):
    task = write_words(tmp_path / 'foxes.jsonl', 5, 'fox')
    evaluate_words(scored_folder, tmp_path / 'out', f'--tasks={task}')
    (tmp_path / 'out' / 'eval_config.json').write_text(content)
    with pytest.raises(ConfigError, match='eval_config.json is not what .*--overwrite'):
        evaluate_words(scored_folder, tmp_path / 'out', f'--tasks={task}')
    found = evaluate_words(scored_folder, tmp_path / 'out', f'--tasks={task}', '--overwrite')
    assert found['tasks']['foxes']['pooled']['n'] == 5


@pytest.mark.slow
def test_damaged_results_and_samples_are_named_and_repaired(scored_folder, tmp_path, monkeypatch):
    task, out = write_words(tmp_path / 'foxes.jsonl', 5, 'fox'), tmp_path / 'out'
    whole = evaluate_words(scored_folder, out, f'--tasks={task}')['tasks']
    for content in ('[]', '{"tasks": [1]}', '{"tasks": {"foxes": {}}}', 'junk', '\0',
                    '[' * 100_000):
        (out / 'results.json').write_text(content)
        with pytest.raises(ConfigError, match='results.json is not what .*; remove it'):
            evaluate_words(scored_folder, out, f'--tasks={task}')
    (out / 'results.json').unlink()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, 'load', None)     # as the message says: without the model
        again = evaluate_words(scored_folder, out, f'--tasks={task}')['tasks']
    assert again['foxes']['pooled'] == whole['foxes']['pooled']
    lines = (out / 'samples.jsonl').read_text().splitlines()
    for broken in (lines[2][:40], '5', '{}', '[]', lines[2].replace('"log_probs"', '"log"')):
        (out / 'samples.jsonl').write_text('\n'.join([*lines[:2], broken, *lines[3:], '']))
        with pytest.raises(DataError, match=r'samples.jsonl:3: .*; delete this line, and'):
            evaluate_words(scored_folder, out, f'--tasks={task}')
    (out / 'samples.jsonl').write_text('\n'.join([*lines[:2], *lines[3:], '']))
    assert evaluate_words(scored_folder, out, f'--tasks={task}')['tasks']['foxes']['pooled'][
        'accuracy'] == whole['foxes']['pooled']['accuracy']


@pytest.mark.slow
def test_a_full_disk_names_the_file_and_loses_nothing(scored_folder, tmp_path, capsys):
    task, out = write_words(tmp_path / 'foxes.jsonl', 400, 'fox'), tmp_path / 'out'
    # on a GPU the limit hits the compiler's own files too
    arguments = [f'--model={scored_folder / "model"}', '--shots=0', f'--tasks={task}',
                 f'--out_dir={out}', '--device=cpu', *SMALL]
    process = start_script('evaluate.py', *arguments, limit=20_000)
    _, errors = process.communicate()
    assert process.returncode == 1
    assert errors.strip().split('\n')[-1].startswith(
        f'error: {out / "samples.jsonl"} cannot be written: File too large')
    assert 'Traceback' not in errors
    n = (out / 'samples.jsonl').read_text().count('\n')
    evaluate.main(arguments)
    assert n > 10 and f'{n} scored earlier' in capsys.readouterr().out
    ids = [sample['id'] for sample in read_samples(out / 'samples.jsonl')]
    assert len(ids) == len(set(ids)) == 400


def test_nan_log_probabilities_stop_with_the_question_named(scored_folder, tmp_path):
    shutil.copytree(scored_folder / 'model', tmp_path / 'model')
    rewrite(tmp_path / 'model', lambda tensors: tensors['model.layers.1.mlp.up_proj.weight'][
        3].fill_(math.nan))
    task = write_words(tmp_path / 'foxes.jsonl', 5, 'fox')
    with pytest.raises(checkpoint.CheckpointError, match='foxes: .*foxes.jsonl:1: .* NaN or '
                       'infinite logits; model.layers.1.mlp.up_proj.weight in .* holds NaN'):
        evaluate_words(tmp_path, tmp_path / 'out', f'--tasks={task}')


def test_overflow_in_float32_is_not_advised_to_use_float32(scored_folder, tmp_path):
    shutil.copytree(scored_folder / 'model', tmp_path / 'model')
    rewrite(tmp_path / 'model', lambda tensors: [
        tensors[f'model.layers.1.mlp.{name}_proj.weight'].fill_(1e25) for name in ('gate', 'up')])
    task = write_words(tmp_path / 'foxes.jsonl', 5, 'fox')
    with pytest.raises(checkpoint.CheckpointError, match='overflow even in float32: check config'):
        evaluate_words(tmp_path, tmp_path / 'out', f'--tasks={task}', '--dtype=float32')
    assert 'evaluate.py --dtype=float32' in checkpoint.bad_logits(
        'x', scored_folder / 'model', 'bfloat16')


def test_a_run_that_scored_nothing_leaves_the_folder_free(scored_folder, tmp_path):
    task, out = write_words(tmp_path / 'foxes.jsonl', 5, 'fox'), tmp_path / 'out'
    with pytest.raises(DataError, match='foxes: .*foxes.jsonl:1: .* max_length allows 3'):
        evaluate_words(scored_folder, out, f'--tasks={task}', '--max_length=3')
    assert evaluate_words(scored_folder, out, f'--tasks={task}')['tasks']['foxes']['pooled'][
        'n'] == 5
    with pytest.raises(DataError, match='foxes: fit_temperature needs two questions or more'):
        evaluate_words(scored_folder, out, f'--tasks={task}', '--limit=1', '--fit_temperature')


def test_an_out_dir_that_cannot_be_created_is_one_line(scored_folder, tmp_path):
    task = write_words(tmp_path / 'foxes.jsonl', 5, 'fox')
    for out in (task, task / 'deeper', Path('/proc/nowhere')):
        with pytest.raises(ConfigError, match='cannot be written .* choose another'):
            evaluate_words(scored_folder, out, f'--tasks={task}')


@pytest.mark.slow
def test_a_tilde_in_paths_is_expanded(scored_folder, tmp_path, monkeypatch):
    monkeypatch.setenv('HOME', str(tmp_path))
    shutil.copytree(scored_folder / 'model', tmp_path / 'model')
    write_words(tmp_path / 'foxes.jsonl', 5, 'fox')
    shutil.copytree(scored_folder / 'data', tmp_path / 'data')
    evaluate.main(['--model=~/model', '--tasks=~/foxes.jsonl,global_mmlu:~/data', '--shots=0',
                   '--n_bootstrap=0', '--out_dir=~/out', '--limit=3'])
    found = json.loads((tmp_path / 'out' / 'results.json').read_text())['tasks']
    assert found['foxes']['source'] == str(tmp_path / 'foxes.jsonl')
    assert found['global_mmlu']['source'] == f'global_mmlu:{tmp_path / "data"}'


@pytest.mark.slow
def test_the_output_names_device_and_settings_in_plain_lines(scored_folder, tmp_path, capsys):
    """Device and dtype that 'auto' chose, progress in lines of their own, a quiet end at `head`."""
    task = write_words(tmp_path / 'foxes.jsonl', 60, 'fox')
    model = scored_folder / 'model'
    arguments = [f'--model={model}', '--shots=0', f'--tasks={task}', '--n_bootstrap=0',
                 '--device=cpu']
    evaluate.main([*arguments, f'--out_dir={tmp_path / "a"}'])
    printed = capsys.readouterr()
    lines = printed.out.split('\n')
    assert lines[0] == f'{model} (llama) in float32 on cpu'
    assert lines[1] == ('foxes: 60 questions, prompt format mmlu, 0 shots, options scored by '
                        'letters, log-probabilities per token, plain text')
    assert printed.err == ''        # no bar, and too short for a line of progress
    shell = ' '.join([sys.executable, 'evaluate.py', *arguments, f'--out_dir={tmp_path / "b"}',
                      '| head -n 1'])
    done = subprocess.run(['bash', '-c', shell], cwd=HERE, text=True, capture_output=True)
    assert done.stdout == f'{lines[0]}\n' and done.stderr == ''


def test_progress_is_a_line_per_interval_without_a_terminal(capsys, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, 'monotonic', lambda: clock[0])
    progress = log.Progress('foxes', 100, 'questions', interval=30)
    for _ in range(90):
        clock[0] += 1
        progress.update()
    printed = capsys.readouterr()
    assert printed.out == '' and printed.err.splitlines() == [
        'foxes: 31 of 100 questions, 1.0 per second, 01:09 left',
        'foxes: 62 of 100 questions, 1.0 per second, 00:38 left']


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason='needs two cores')
@pytest.mark.parametrize('to', ['group', 'parent'])
def test_interrupt_while_intervals_are_drawn(to, scored_folder, tmp_path):
    """Ctrl-C goes to the worker processes too: one line all the same, and an end."""
    task, out = write_words(tmp_path / 'foxes.jsonl', 100, 'fox'), tmp_path / 'out'
    model = scored_folder / 'model'
    tokenizer = load_tokenizer(model)
    cfg = evaluate.EvalConfig(str(model), tasks=(str(task),), shots=0, n_bootstrap=0,
                              pictures=False, out_dir=str(out))
    evaluate.evaluate(model, tokenizer, evaluate.load_tasks(cfg), cfg, out)
    process = subprocess.Popen([sys.executable, 'evaluate.py', f'--model={model}', '--shots=0',
                                f'--tasks={task}', f'--out_dir={out}', '--n_bootstrap=200000'],
                               cwd=HERE, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               start_new_session=True)

    children = Path(f'/proc/{process.pid}/task/{process.pid}/children')
    while process.poll() is None and len(children.read_text().split()) < 2:
        time.sleep(0.01)
    time.sleep(0.5)
    (os.killpg if to == 'group' else os.kill)(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=5)      # until no process holds the pipe
    assert errors.startswith('stopped') and errors.count('\n') == 1 and process.returncode == 130


def test_the_usage_and_the_help_name_the_commands_and_tasks(capsys):
    for arguments in ([], ['--help']):
        with pytest.raises(SystemExit) as end:
            evaluate.main(arguments)
        text = f'{end.value.code or ""}{capsys.readouterr().out}'
        for part in ('usage: python evaluate.py --model=', '--compare', 'example: ', 'arc_easy'):
            assert part in text


@pytest.mark.slow
@pytest.mark.parametrize('wait', [0.3, 1.0])
def test_an_early_interrupt_is_one_line(scored_folder, tmp_path, wait):
    task = write_words(tmp_path / 'foxes.jsonl', 20000, 'fox')
    errors = early = 'Fatal Python error: init'
    # Python itself, or the import of the module that handles Ctrl-C, had not ended yet
    while errors.startswith(early) or 'from runtime import cli' in errors:
        process = subprocess.Popen(
            [sys.executable, 'evaluate.py', f'--model={scored_folder / "model"}',
             f'--tasks={task}', '--shots=0', f'--out_dir={tmp_path / "out"}'],
            cwd=HERE, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        while b'evaluate.py' not in Path(f'/proc/{process.pid}/cmdline').read_bytes():
            time.sleep(0.001)
        time.sleep(wait)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        wait += 0.2
    assert errors.startswith('stopped') and errors.count('\n') == 1 and process.returncode == 130


@pytest.mark.slow
def test_a_killed_evaluation_is_resumed_to_the_same_results(scored_folder, tmp_path):
    arguments = [f'--model={scored_folder / "model"}', '--shots=0', *SMALL, '--pack_len=64',
                 f'--tasks={write_words(tmp_path / "many.jsonl", 600, "fox")}',
                 f'--out_dir={tmp_path}']
    samples, kills = tmp_path / 'samples.jsonl', 0
    for wait in (0.0, 0.2):
        process = start_script('evaluate.py', *arguments)
        size = samples.stat().st_size if samples.exists() else 0
        while process.poll() is None and not (samples.exists() and samples.stat().st_size > size):
            time.sleep(0.01)
        time.sleep(wait)
        kills += process.poll() is None
        process.kill()
        process.communicate()
    evaluate.main(arguments)
    found = read_samples(samples)
    assert len(found) == len({r['id'] for r in found}) == 600 and kills


@pytest.mark.slow
def test_scalings_are_fitted_on_halves_or_validation(scored_folder, tmp_path):
    found = scored(scored_folder, tmp_path / 'halves', '--fit_temperature')['tasks']['global_mmlu']
    fitted = found['post_hoc']
    assert fitted['fitted_on'] == 'the other half of the questions'
    assert len(fitted['temperature']) == len(fitted['platt']) == 2
    assert fitted['reports']['temperature']['accuracy'] == found['pooled']['accuracy']
    # labels unrelated to the questions: both learn how little is known
    assert fitted['reports']['temperature']['ece'] < found['pooled']['ece'] + 0.05
    # MMLU's validation split is neither scored nor shown
    rows = [{'question': f'q{i} fox?', 'choices': ['blue', 'lazy', 'old', 'dog'], 'answer': i % 4,
             'subject': 'anatomy'} for i in range(60)]
    shutil.copytree(scored_folder / 'model', tmp_path / 'mmlu' / 'model')
    for split, some in (('dev', rows[:2]), ('test', rows[2:30]), ('validation', rows[30:])):
        write_rows(tmp_path / 'mmlu' / 'data' / f'{split}.jsonl', some)
    found = scored(tmp_path / 'mmlu', tmp_path / 'out', '--fit_temperature', tasks='mmlu')
    assert found['tasks']['mmlu']['post_hoc']['fitted_on'] == '30 validation questions'
    assert found['tasks']['mmlu']['pooled']['n'] == 28
    assert len(found['tasks']['mmlu']['post_hoc']['temperature']) == 1










def documented_keys():
    """The keys in the three tables of the schema in docs/evaluation.md."""
    text = (HERE / 'docs' / 'evaluation.md').read_text()
    section = text[text.index('\n## Schema of results.json\n'):text.index('\n## Samples\n')]
    return [{key for line in table.splitlines() if line.startswith('| `')
             for key in re.findall('`([^`]+)`', line.split(' | ')[0])}
            for table in section.split('\n| key ')[1:]]


@pytest.mark.slow
def test_the_schema_of_results_is_documented(scored_folder, tmp_path):
    """Every key of real results is in docs/evaluation.md, and every key there is in one of them."""
    of_file, of_task, of_report = documented_keys()
    text = write_rows(tmp_path / 'text.jsonl', [{'text': 'the quick fox is old'}] * 6)
    found = scored(scored_folder, tmp_path / 'out', '--limit=10', '--fit_temperature', '--p_true',
                   '--permute=2')
    found['tasks'] |= evaluate_words(scored_folder, tmp_path / 'clm',
                                     f'--tasks=clm:{text}')['tasks']
    asked = write_rows(tmp_path / 'qa.jsonl', [{'question': 'Who?', 'answers': ['A', 'B']}] * 4)
    found['tasks'] |= evaluate_words(scored_folder, tmp_path / 'qa', f'--tasks=qa:{asked}',
                                     '--n=2', '--max_tokens=4')['tasks']
    assert found.keys() == of_file and found['schema'] == report.SCHEMA == 1
    assert found['config'].keys() == dataclasses.asdict(evaluate.EvalConfig()).keys()
    assert found['identity'].keys() == {'model', 'tokenizer', 'code'}
    # dropout needs adapters
    assert {key for task in found['tasks'].values() for key in task} == of_task - {'dropout_seed'}
    reports = []
    for task in found['tasks'].values():
        assert isinstance(task['distribution'], str) and isinstance(task['pooled']['n'], int)
        if 'post_hoc' in task:
            assert task['post_hoc'].keys() - {'temperature', 'languages'} == {
                'fitted_on', 'platt', 'reports'}
        reports += [of_kind for _, _, of_kind in report.report_rows(task)]
    metric_names = metrics.report(np.full((4, 2), 0.5), np.arange(4) % 2).keys()
    for of_kind in reports:
        assert {'n'} <= of_kind.keys() or {'groups'} <= of_kind.keys()
        assert of_kind.keys() <= of_report | metric_names
        assert all(value is None or isinstance(value, (int, float))
                   for key, value in of_kind.items() if key != 'intervals')
        assert all(len(ends) == 2 for ends in of_kind['intervals'].values())
    assert {'n', 'groups', 'intervals', 'accuracy_low'} <= {key for r in reports for key in r}
    # a folder of an earlier version, without the key, is read and completed
    path = tmp_path / 'clm' / 'results.json'
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items()
                                if k != 'schema'}))
    again = evaluate_words(scored_folder, tmp_path / 'clm', f'--tasks=clm:{text}')
    assert again['schema'] == 1
    assert again['tasks']['clm']['pooled'] == found['tasks']['clm']['pooled']


@pytest.mark.slow
def test_a_limit_is_a_sample_and_duplicate_options_are_counted(scored_folder, tmp_path, capsys,
                                                               monkeypatch):
    drawn = {}
    draw = evaluation.draw_reliability
    monkeypatch.setattr(evaluation, 'draw_reliability', lambda path, panels, *rest: (
        drawn.update({path.name: [title for title, _ in panels]}), draw(path, panels, *rest))[1])
    result = scored(scored_folder, tmp_path / 'some', '--limit=10', '--pictures')[
        'tasks']['global_mmlu']
    assert drawn == {'reliability.png': ['global_mmlu (sample)'],
                     'reliability-global_mmlu-languages.png': [
                         'de (sample)', 'en (sample)', 'sw (sample)']}
    assert result['sample'] == {'questions': 30, 'of': 120} and result['pooled']['n'] == 30
    assert {r['n'] for r in result['languages'].values()} == {10}
    assert {r['n'] for r in result['subjects'].values()} == {15}
    printed = capsys.readouterr().out
    assert ('global_mmlu: 30 questions, prompt format mmlu, 2 shots, options scored by letters, '
            'log-probabilities per token, plain text; a sample of 120' in printed)
    for name in ('results.md', 'results.tex'):
        assert 'sample of 30 of 120 questions' in (tmp_path / 'some' / name).read_text()
    assert 'sample' not in scored(scored_folder, tmp_path / 'some')['tasks']['global_mmlu']
    rows = [{'question': f'the quick fox {i}?', 'choices': ['blue', 'old', 'blue' if i else 'dog'],
             'answer': 1} for i in range(3)]
    found = evaluate_words(scored_folder, tmp_path / 'twice',
                           f'--tasks={write_rows(tmp_path / "twice.jsonl", rows)}')
    assert found['tasks']['twice']['duplicate_options'] == 2
    assert '2 questions list the same option twice' in capsys.readouterr().out


def test_languages_that_a_file_does_not_have(scored_folder, tmp_path):
    path = write_rows(tmp_path / 'two.jsonl', [
        {'question': 'the fox?', 'choices': ['blue', 'old'], 'answer': 0, 'language': language}
        for language in ('en', 'de')])
    with pytest.raises(DataError, match='klingon.*de, en'):
        evaluate_words(scored_folder, tmp_path / 'out', f'--tasks={path}', '--languages=klingon')


def test_bad_questions_are_counted_or_stop(scored_folder, tmp_path, capsys):
    good = {'question': 'the quick brown fox?', 'choices': ['dog', 'old'], 'answer': 0}
    rows = [good, good | {'choices': ['', 'dog']}, good | {'question': 'lazy dog ' * 300},
            good | {'answer': 'Q'}]
    path = write_rows(tmp_path / 'mixed.jsonl', rows)
    common = [f'--model={scored_folder / "model"}', f'--tasks={path}', '--shots=0',
              '--max_length=200']
    with pytest.raises(DataError, match='mixed.jsonl:2: choice A is empty; --on_bad_row=skip'):
        evaluate.main([*common, f'--out_dir={tmp_path / "stop"}'])
    evaluate.main([*common, f'--out_dir={tmp_path / "skip"}', '--on_bad_row=skip'])
    result = json.loads((tmp_path / 'skip' / 'results.json').read_text())['tasks']['mixed']
    assert result['bad_rows'] == 3 and result['pooled']['n'] == 1
    assert '3 bad rows left out, the first: ' in capsys.readouterr().out
    write_rows(tmp_path / 'mixed.jsonl', rows[2:3])
    with pytest.raises(DataError, match='mixed.jsonl:1: even without shots the prompt has .* '
                                        'tokens; .* max_length allows 200'):
        evaluate.main([*common, f'--out_dir={tmp_path / "long"}'])


@pytest.mark.slow
def test_next_tokens_and_facts_are_scored(scored_folder, tmp_path, capsys):
    words = 'the quick brown fox jumps over a lazy dog by the old stone river'.split()
    rows = [{'id': f't{i}', 'text': ' '.join(words[i:] + words[:i])} for i in range(12)]
    write_rows(tmp_path / 'texts.jsonl', rows)
    entity = [row | {'spans': [[row['text'].index(w), row['text'].index(w) + len(w)]
                               for w in ('dog', 'fox', 'dog')]} for row in rows]
    write_rows(tmp_path / 'facts.jsonl', entity)
    trex = [{'docid': 'x', 'text': 'a lazy dog', 'entities': [{'boundaries': [7, 10]},
                                                              {'boundaries': [0, 1]}]}]
    (tmp_path / 'trex.json').write_text(json.dumps(trex))

    def run(*arguments):
        out = tmp_path / str(len(list(tmp_path.iterdir())))
        evaluate.main([f'--model={scored_folder / "model"}', f'--out_dir={out}', '--dtype=float32',
                       *arguments])
        return json.loads((out / 'results.json').read_text())['tasks'], read_samples(
            out / 'samples.jsonl')
    tasks, samples = run(f'--tasks=clm:{tmp_path / "texts.jsonl"},facts:{tmp_path / "facts.jsonl"}')
    assert tasks['clm']['pooled']['n'] == 12 and tasks['facts']['pooled']['n'] >= 22
    assert tasks['clm']['pooled'].keys() >= {'accuracy', 'ece', 'rmsce', 'entropy_bits', 'nll'}
    tokenizer = load_tokenizer(scored_folder / 'model')
    model = checkpoint.load(scored_folder / 'model')
    for sample in samples:
        text = next(r['text'] for r in rows if r['id'] == sample['text'])
        ids = [tokenizer.bos_id, *tokenizer.encode(text)]
        assert sample['token'] == ids[sample['position']]
        tokens = torch.tensor([ids[:sample['position']]])
        probs = model.logits(model(tokens, *whole_rows(tokens)))[0, -1].softmax(-1)
        assert sample['top_token'] == probs.argmax()
        assert sample['confidence'] == pytest.approx(probs.max().item(), abs=1e-5)
        if sample['task'] == 'facts':   # the entity, from its beginning on
            rest = tokenizer.decode(ids[sample['position']:], start=False).strip()
            assert rest.startswith(('dog', 'fox'))
    again = run(f'--tasks=clm:{tmp_path / "texts.jsonl"}', '--limit=5')[1]
    assert {s['id']: s['position'] for s in again}.items() <= {
        s['id']: s['position'] for s in samples if s['task'] == 'clm'}.items()
    trex[0]['entities'] += [{'boundaries': [2, 6], 'annotator': 'Wikidata_Property_Linker'},
                            {'boundaries': [2, 6], 'annotator': 'Simple_Coreference'}]
    (tmp_path / 'trex.json').write_text(json.dumps(trex))
    _, told = run(f'--tasks=facts:{tmp_path / "trex.json"}', '--instruct')
    assert len(told) == 2 and all(s['id'] == f'x:{s["position"]}' for s in told)
    # another seed asks for other tokens, and is not taken for what was asked before
    out = [f'--model={scored_folder / "model"}', f'--out_dir={tmp_path / "seeds"}',
           f'--tasks=clm:{tmp_path / "texts.jsonl"}']
    evaluate.main([*out, '--seed=1'])
    evaluate.main([*out, '--seed=2'])
    count = json.loads((tmp_path / 'seeds' / 'results.json').read_text())['tasks']['clm']['pooled']
    positions = {}
    for sample in read_samples(tmp_path / 'seeds' / 'samples.jsonl'):
        positions.setdefault(sample['id'], []).append(sample['position'])
    assert count['n'] == 12 == len(positions) and any(len(p) == 2 for p in positions.values())
    with pytest.raises(DataError, match='facts: no folder or file given'):
        run('--tasks=facts')
    write_rows(tmp_path / 'bad.jsonl', [{'text': 'a dog', 'spans': [[2, 9]]}])
    with pytest.raises(DataError, match=r'bad.jsonl:1: span \[2, 9\] is not'):
        run(f'--tasks=facts:{tmp_path / "bad.jsonl"}')


def p_true_prompt(row, top, shots, subject):
    """The text before ' (A)' or ' (B)', and whether option `top` is right."""
    def ask(row, k):
        choices = ''.join(f'\n{c}. {row[f"option_{c.lower()}"]}' for c in 'ABCD')
        return (f'{row["question"]}{choices}\nProposed Answer: {"ABCD"[k]}\nIs the proposed answer:'
                f'\n (A) True\n (B) False\nThe proposed answer is:')
    right = ['ABCD'.index(shot['answer']) for shot in shots]    # of two, the second is wrong
    solved = f'{ask(shots[0], right[0])} (A)\n\n{ask(shots[1], (right[1] + 1) % 4)} (B)\n\n'
    header = f'The following are multiple choice questions (with answers) about {subject}.\n\n'
    return f'{header}{solved}{ask(row, top)}', 'ABCD'[top] == row['answer']


@pytest.mark.slow
def test_p_true_is_that_of_transformers(scored_folder, tmp_path):
    import transformers
    found = scored(scored_folder, tmp_path, '--p_true', '--languages=en,de')['tasks']
    samples = read_samples(tmp_path / 'samples.jsonl')
    options = {(s['language'], s['id']): s for s in samples if s['task'] == 'global_mmlu'}
    asked = [s for s in samples if s['task'] == 'global_mmlu.p_true']
    assert len(options) == len(asked) == 80
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        scored_folder / 'model', dtype=torch.float32, attn_implementation='eager')
    tokenizer = load_tokenizer(scored_folder / 'model')
    rows = {(language, split): [json.loads(line) for line in open(
        scored_folder / 'data' / f'{language}_{split}.jsonl')]
        for language in ('de', 'en') for split in ('dev', 'test')}
    for sample in asked[::9]:
        of_options, language = options[sample['language'], sample['id']], sample['language']
        shots = [r for r in rows[language, 'dev'] if r['subject'] == sample['subject']][:2]
        row = next(r for r in rows[language, 'test'] if r['sample_id'] == sample['id'])
        top = np.argmax(np.array(of_options['log_probs']) / of_options['n_tokens'])
        text, right = p_true_prompt(row, top, shots, sample['subject'])
        sums = []
        for option in (' (A)', ' (B)'):
            ids = torch.tensor([[tokenizer.bos_id, *tokenizer.encode(text + option)]])
            first = len(tokenizer.encode(text)) + 1
            with torch.no_grad():
                log_probs = reference(ids).logits[0].log_softmax(-1)
            sums.append(sum(log_probs[i - 1, ids[0, i]].item() for i in range(first, ids.shape[1])))
        assert sample['confidence'] == pytest.approx(metrics.softmax(np.array(sums))[0], abs=1e-5)
        assert sample['correct'] == right and sample['shots'] == 2
    result, p = found['global_mmlu.p_true'], np.array([s['confidence'] for s in asked])
    correct = np.array([s['correct'] for s in asked])
    assert set(result['languages']) == {'de', 'en'} and result['pooled']['n'] == 80
    assert result['pooled']['ece'] == pytest.approx(metrics.ece(p, correct))
    assert result['pooled']['nll'] == pytest.approx(-np.log(np.where(correct, p, 1 - p)).mean())
    assert result['pooled']['accuracy'] == found['global_mmlu']['pooled']['accuracy']
    assert result['distribution'].startswith('P(True) of the top option, mmlu, 2 shots')
    assert '### global_mmlu.p_true (P(True)' in (tmp_path / 'results.md').read_text()


@pytest.mark.slow
def test_p_true_is_added_resumed_and_compared(scored_folder, tmp_path, monkeypatch, capsys):
    """Asked for later, stopped, with another norm, compared; and a task without options."""
    words = 'the quick brown fox jumps over a lazy dog by the old stone river'.split()
    out, foxes = tmp_path / 'out', write_rows(tmp_path / 'foxes.jsonl', [
        {'question': f'the quick fox {i}?', 'answer': i % 3,
         'choices': [' '.join(words[i % 9:i % 9 + n]) for n in (1, 2, 4)]} for i in range(30)])
    plain = evaluate_words(scored_folder, out, f'--tasks={foxes}', '--scoring=text')
    launched, forward = [], scoring.forward_values
    monkeypatch.setattr(scoring, 'forward_values', lambda model, arrays, scored, **options: (
        launched.append(len({tree for tree, *_ in scored})),
        forward(model, arrays, scored, **options))[1])
    text = ['--scoring=text', f'--tasks={foxes}', '--p_true', '--fit_temperature']
    both = evaluate_words(scored_folder, out, *text)
    assert sum(launched) == 30 and 'foxes.p_true (P(True)' in capsys.readouterr().out
    assert list(both['tasks']) == ['foxes', 'foxes.p_true']
    assert both['tasks']['foxes']['pooled'] == plain['tasks']['foxes']['pooled']
    assert list(both['tasks']['foxes.p_true']['post_hoc']['reports']) == ['platt', 'isotonic']
    lines = (out / 'samples.jsonl').read_text().splitlines(keepends=True)
    (out / 'samples.jsonl').write_text(''.join(lines[:50]))
    launched.clear()
    again = evaluate_words(scored_folder, out, *text)
    assert sum(launched) == 10
    for key in ('n', 'accuracy', 'confidence', 'ece', 'nll', 'entropy_bits'):
        assert again['tasks']['foxes.p_true']['pooled'][key] == pytest.approx(
            both['tasks']['foxes.p_true']['pooled'][key], abs=1e-4)
    # questions with another top option are asked about again, the others are not
    launched.clear()
    evaluate_words(scored_folder, out, *text, '--norm=sum')
    tops = [[np.argmax(report.option_scores(s['log_probs'], s['options'], s['n_tokens'], norm))
             for s in map(json.loads, lines[:30])] for norm in ('token', 'sum')]
    assert sum(launched) == sum(a != b for a, b in zip(*tops)) > 0
    evaluate_words(scored_folder, tmp_path / 'second', *text, '--norm=sum', '--pack_len=64')
    compare.main([str(out), str(tmp_path / 'second'), f'--out_dir={tmp_path / "compare"}'])
    assert 'foxes.p_true' in (tmp_path / 'compare' / 'compare.md').read_text()
    write_rows(tmp_path / 'texts.jsonl', [{'text': 'the quick brown fox'}])
    with pytest.raises(ConfigError, match='p_true = True: tasks = .* have no options'):
        evaluate_words(scored_folder, tmp_path / 'none', f'--tasks=clm:{tmp_path / "texts.jsonl"}',
                       '--p_true')


def write_lettered(folder, n=12):
    """Questions with 3 and 4 options, and solved ones; return the rows to score."""
    rng = random.Random(1)
    words = 'quick brown fox jumps over the lazy dog blue river old stone'.split()
    rows = [{'question': ' '.join(rng.sample(words, 5)) + '?', 'answer': i % 3, 'id': f'q{i}',
             'subject': ('anatomy', 'sociology')[i % 2],
             'choices': rng.sample(words, 3 + i // 2 % 2)} for i in range(n)]
    for split in ('dev', 'test', 'validation'):
        write_rows(folder / f'{split}.jsonl', [row | {'id': f'{split}-{row["id"]}'}
                                               for row in (rows if split == 'test' else rows[:6])])
    return rows


@pytest.mark.slow
def test_orders_of_the_options_are_those_of_permuted_files(scored_folder, tmp_path, capsys):
    """The log-probabilities of each order are those of a file with the options in that order."""
    folder, out = tmp_path / 'quiz', tmp_path / 'out'
    rows = write_lettered(folder)
    found = evaluate_words(scored_folder, out, f'--tasks={folder}', '--permute=4',
                           '--shots=2', '--norm=sum')
    assert list(found['tasks']) == ['quiz', 'quiz.permuted']
    printed, result = capsys.readouterr().out, found['tasks']['quiz.permuted']
    asked = {s['id']: s for s in read_samples(out / 'samples.jsonl')
             if s['task'] == 'quiz.permuted'}
    single, chosen, options = [], [], []
    for shift in range(4):
        orders = [[(i + shift) % len(row['choices']) for i in range(len(row['choices']))]
                  for row in rows]
        write_rows(folder / 'test.jsonl', [row | {
            'id': f'test-{row["id"]}', 'choices': [row['choices'][i] for i in order],
            'answer': order.index(row['answer'])} for row, order in zip(rows, orders)])
        alone = evaluate_words(scored_folder, tmp_path / f'{shift}', f'--tasks={folder}',
                               '--shots=2', '--norm=sum')['tasks']['quiz']
        for key in ('accuracy', 'ece', 'nll', 'sce'):
            assert result['orders'][f'{shift + 1}'][key] == pytest.approx(
                alone['pooled'][key], abs=1e-5)
        samples_alone = read_samples(tmp_path / f'{shift}' / 'samples.jsonl')
        single.append({s['id']: (order, s['log_probs']) for s, order in zip(samples_alone, orders)})
        top = [int(np.argmax(s['log_probs'])) for s in samples_alone]
        chosen += top
        options.append([order[k] for order, k in zip(orders, top)])
    for id, sample in asked.items():
        n = len(sample['options'])
        assert len(sample['orders']) == n and sample['shots'] == 2
        probs = np.zeros((n, n))
        for k, order in enumerate(sample['orders']):
            expected, log_probs = single[k][id]
            assert order['order'] == expected
            assert order['log_probs'] == pytest.approx(log_probs, abs=1e-4)
            probs[k, expected] = metrics.softmax(np.array(log_probs))
        assert np.exp(sample['log_probs']) / np.exp(sample['log_probs']).sum() == pytest.approx(
            probs.mean(0), abs=1e-5)
        assert np.exp(sample['log_probs']).sum() == pytest.approx(np.mean(
            [np.exp(order['log_probs']).sum() for order in sample['orders']]))
    assert {k: v['chosen'] for k, v in result['letters'].items()} == pytest.approx(
        {letter: chosen.count(i) / 48 for i, letter in enumerate('ABCD')})
    assert result['same_option'] == np.mean([len({*tops}) == 1 for tops in zip(*options)])
    assert result['permute'] == 4 and result['distribution'].endswith(
        'plain text, mean over 4 orders of the options')
    for part in ('\norder 4 ', 'letters chosen (correct): A ', 'the same option in all orders: '):
        assert part in printed and part in (out / 'results.md').read_text().replace(
            '| order 4', '\norder 4')


@pytest.mark.slow
def test_orders_are_scored_once(scored_folder, tmp_path, monkeypatch):
    """Asked for later, stopped, with fewer orders, with P(True), compared."""
    folder, out = tmp_path / 'quiz', tmp_path / 'out'
    write_lettered(folder)
    quiz, launched, forward = f'--tasks={folder}', [], scoring.forward_values
    monkeypatch.setattr(scoring, 'forward_values', lambda model, arrays, scored, **options: (
        launched.append(len(scored)), forward(model, arrays, scored, **options))[1])
    evaluate_words(scored_folder, out, quiz, '--shots=2')
    plain = sum(launched)
    permuted = evaluate_words(scored_folder, out, quiz, '--shots=2', '--permute=2')
    assert sum(launched) == 2 * plain           # the published order is not scored again
    lines = (out / 'samples.jsonl').read_text().splitlines(keepends=True)
    (out / 'samples.jsonl').write_text(''.join(lines[:20]))
    again = evaluate_words(scored_folder, out, quiz, '--shots=2', '--permute=2', '--norm=sum')
    assert sum(launched) == 2 * plain + sum(
        sum(json.loads(line)['orders'][1]['n_tokens']) for line in lines[20:])
    for key in ('n', 'accuracy', 'ece', 'nll'):
        assert again['tasks']['quiz.permuted']['pooled'][key] == pytest.approx(
            permuted['tasks']['quiz.permuted']['pooled'][key], abs=1e-4)
    more = evaluate_words(scored_folder, out, quiz, '--shots=2', '--permute=3', '--p_true',
                          '--fit_temperature')
    assert list(more['tasks']) == ['quiz', 'quiz.permuted', 'quiz.p_true']
    assert list(more['tasks']['quiz.permuted']['orders']) == ['1', '2', '3']
    assert more['tasks']['quiz.permuted']['post_hoc']['fitted_on'] == '6 validation questions'
    evaluate_words(scored_folder, tmp_path / 'second', quiz, '--shots=2', '--permute=3')
    compare.main([str(out), str(tmp_path / 'second'), f'--out_dir={tmp_path / "compare"}'])
    assert 'quiz.permuted' in (tmp_path / 'compare' / 'compare.md').read_text()
    (tmp_path / 'text.jsonl').write_text('{"text": "the quick brown fox"}\n')
    for tasks, message in ((f'clm:{tmp_path / "text.jsonl"}', 'permute = 3: tasks = .* no options'),
                           (str(folder), 'quiz with these settings scores the text of its opt')):
        with pytest.raises((ConfigError, DataError), match=message):
            evaluate_words(scored_folder, tmp_path / 'none', f'--tasks={tasks}', '--permute=3',
                           '--scoring=text')


@pytest.mark.parametrize('orders, message', [
    ([], 'a list of orders'), ([3], 'a list of orders'),
    ([{'order': [0, 0], 'log_probs': [-1, -2], 'n_tokens': [1, 1]}], 'the index of each option'),
    ([{'order': [1, 0], 'log_probs': [-1], 'n_tokens': [1, 1]}], 'differ in length'),
    ([{'order': [1, 0], 'log_probs': [-1, 'x'], 'n_tokens': [1, 1]}], 'a list of numbers')])
def test_damaged_orders_name_their_line(tmp_path, orders, message):
    good = {'order': [1, 0], 'log_probs': [-1, -2], 'n_tokens': [1, 1]}
    sample = {'task': 't', 'id': 'a', 'prompt': 'p', 'options': ['A', 'B'], 'log_probs': [-1, -2],
              'n_tokens': [1, 1], 'answer': 0, 'orders': [good]}
    path = write_rows(tmp_path / 'samples.jsonl', [sample, sample | {'id': 'b', 'orders': orders}])
    with pytest.raises(DataError, match=f'samples.jsonl:2: .*{message}'):
        samples.read_samples(path)
    assert len(samples.read_samples(write_rows(path, [sample]))) == 1


def test_the_list_of_tasks_names_their_files(capsys):
    with pytest.raises(SystemExit):
        evaluate.main(['--tasks=help'])
    printed = capsys.readouterr().out
    for part in ('winogrande_m  allenai/winogrande\n    test        winogrande_m/validation-*',
                 '    shots       winogrande_m/train-*.parquet, train_m.jsonl*, train.jsonl*\n',
                 'clm  Salesforce/wikitext\n    test        wikitext-2-raw-v1/test-*.parquet',
                 'a file or folder of your own\n', '    {lang}      et ht id it'):
        assert part in printed
    assert all(f'\n{name}  {task.hub}\n' in printed for name, task in benchmarks.BENCHMARKS.items())
    assert max(map(len, printed.splitlines())) <= 100


HARNESS = """
import datasets, json, sys, torch, transformers, lm_eval
from lm_eval.models.huggingface import HFLM

model, data, calls = sys.argv[1], json.load(open(sys.argv[2])), json.loads(sys.argv[3])

def load_dataset(path, name=None, **options):
    rows = data[path]
    rows = rows.get(name) or rows['']
    return datasets.DatasetDict({split: datasets.Dataset.from_list(r) for split, r in rows.items()})
datasets.load_dataset = load_dataset
tokenizer = transformers.AutoTokenizer.from_pretrained(model)
lm = HFLM(transformers.AutoModelForCausalLM.from_pretrained(
    model, dtype=torch.float32, attn_implementation='eager'),
          tokenizer=tokenizer, batch_size=8, device='cpu')
found = {}
for tasks, shots in calls:
    results = lm_eval.simple_evaluate(lm, tasks=tasks, num_fewshot=shots, log_samples=True,
                                      bootstrap_iters=0)
    for task, samples in results['samples'].items():
        samples.sort(key=lambda s: s['doc_id'])
        found[task] = [[r[0] if isinstance(r[0], float) else r[0][0] for r in s['filtered_resps']]
                       if not isinstance(s['filtered_resps'][0][0], list) else
                       [r[0][0] for r in s['filtered_resps']] for s in samples]
json.dump({'versions': [lm_eval.__version__, transformers.__version__], 'found': found},
          open(sys.argv[4], 'w'))
"""


@pytest.mark.skipif(importlib.util.find_spec('lm_eval') is None, reason='needs lm-eval')
@pytest.mark.parametrize('name, file', [
    ('llama', 'llama2_tokenizer.model'), ('mistral', 'mistral_tokenizer.model.v1'),
    ('gemma2', 'llama2_tokenizer.model')])
def test_log_probs_equal_lm_evaluation_harness(name, file, tmp_path):
    """Every option of real rows, in float32, with lm-evaluation-harness's own tasks and model."""
    needs_files(f'tokenizers/{file}', 'datasets')
    folder = tmp_path / 'model'
    folder.mkdir()
    shutil.copyfile(SHARED / 'tokenizers' / file, folder / 'tokenizer.model')
    reference_model(name, folder, vocab_size=32000, max_position_embeddings=4096, head_dim=16)
    import transformers
    transformers.LlamaTokenizer.from_pretrained(folder, add_bos_token=True).save_pretrained(folder)
    datasets, rng = SHARED / 'datasets', random.Random(0)

    def rows(path):
        with gzip.open(datasets / path, 'rt') as lines:
            return [json.loads(line) for line in lines]
    # transformers parts two spaces otherwise than the sentencepiece model does
    xcopa = [json.loads(line) for line in open(datasets / 'xcopa' / 'test.sw.jsonl')
             if '  ' not in line]
    mmlu, dev = rows('mmlu/test.jsonl.gz'), rows('mmlu/dev.jsonl.gz')
    picked = {'mmlu/dev.jsonl': dev, 'xcopa/test.sw.jsonl': rng.sample(xcopa, 20),
              'mmlu/test.jsonl': rng.sample([r for r in mmlu if r['subject'] == 'anatomy'], 12),
              'arc/ARC-Easy-test.jsonl': rng.sample(rows('arc_easy/ARC-Easy-test.jsonl.gz'), 25),
              'hellaswag/hellaswag_val.jsonl': rng.sample(rows(
                  'hellaswag/hellaswag_val_1000.jsonl.gz'), 25)}
    for place, some in picked.items():
        write_rows(tmp_path / place, some)
    arc, hellaswag = picked['arc/ARC-Easy-test.jsonl'], picked['hellaswag/hellaswag_val.jsonl']
    anatomy = [row for row in dev if row['subject'] == 'anatomy']
    content = {'cais/mmlu': {'anatomy': {'test': picked['mmlu/test.jsonl'], 'dev': anatomy}},
               'allenai/ai2_arc': {'ARC-Easy': {k: arc for k in ('train', 'validation', 'test')}},
               'Rowan/hellaswag': {'': {'train': hellaswag, 'validation': hellaswag}},
               'cambridgeltl/xcopa': {'sw': {k: picked['xcopa/test.sw.jsonl']
                                             for k in ('validation', 'test')}}}
    content |= write_hub_tasks(tmp_path)
    neqa = [{'prompt': f'{i} is not a\nA. number\nB. bird\nAnswer:' + ' ' * (i % 2),
             'classes': [' A', ' B'] if i % 2 == 0 else ['A', 'B'], 'answer_index': 1}
            for i in range(12)]
    write_rows(tmp_path / 'neqa.jsonl', neqa)
    content['inverse-scaling/NeQA'] = {'': {'train': neqa}}
    (tmp_path / 'data.json').write_text(json.dumps(content))
    (tmp_path / 'harness.py').write_text(HARNESS)
    calls = [(['mmlu_anatomy'], 5), (['arc_easy', 'hellaswag', 'xcopa_sw', 'openbookqa', 'piqa',
                                      'winogrande', 'boolq', 'truthfulqa_mc1',
                                      'inverse_scaling_neqa'], 0)]
    # elsewhere: its package `evaluate` has the name of our file
    done = subprocess.run([sys.executable, 'harness.py', folder, 'data.json', json.dumps(calls),
                           'found.json'], cwd=tmp_path, capture_output=True, text=True,
                          env={**os.environ, 'HF_DATASETS_OFFLINE': '1', 'HF_HUB_OFFLINE': '1'})
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = json.loads((tmp_path / 'found.json').read_text())
    print('lm-eval {}, transformers {}'.format(*theirs['versions']))
    for task, place, shots in (('mmlu_anatomy', f'mmlu:{tmp_path / "mmlu"}', 5),
                               ('arc_easy', f'arc_easy:{tmp_path / "arc"}', 0),
                               ('hellaswag', f'hellaswag:{tmp_path / "hellaswag"}', 0),
                               ('xcopa_sw', f'xcopa:{tmp_path / "xcopa"}', 0),
                               ('openbookqa', f'openbookqa:{tmp_path / "openbookqa"}', 0),
                               ('piqa', f'piqa:{tmp_path / "piqa"}', 0),
                               ('winogrande', f'winogrande_xl:{tmp_path / "winogrande"}', 0),
                               ('boolq', f'boolq:{tmp_path / "super_glue"}', 0),
                               ('truthfulqa_mc1', f'truthfulqa_mc1:{tmp_path / "truthful_qa"}', 0),
                               ('inverse_scaling_neqa', str(tmp_path / 'neqa.jsonl'), 0)):
        out = tmp_path / f'out-{task}'
        evaluate.main([f'--model={folder}', f'--tasks={place}', f'--shots={shots}',
                       '--prompt_format=harness', f'--out_dir={out}', '--n_bootstrap=0'])
        ours = [s['log_probs'] for s in read_samples(out / 'samples.jsonl')]
        assert len(ours) == len(theirs['found'][task]) > 10
        for a, b in zip(ours, theirs['found'][task], strict=True):
            if task == 'truthfulqa_mc1':    # whose options have another order here
                a, b = sorted(a), sorted(b)
            assert a == pytest.approx(b, abs=1e-4)


def test_a_folder_that_calls_the_prompt_format_preset_is_resumed(tmp_path):
    sources = {'mmlu': {'source': 'cais/mmlu', 'questions': 'x'}}
    (tmp_path / 'eval_config.json').write_text(json.dumps(
        {'model': 'm', 'preset': 'mmlu', 'shots': 5, 'tasks': sources}))
    settings = {'model': 'm', 'prompt_format': 'mmlu', 'shots': 5}
    assert samples._read_sources(tmp_path, settings) == sources
    with pytest.raises(ConfigError, match="prompt_format = 'mmlu', not 'harness'"):
        samples._read_sources(tmp_path, settings | {'prompt_format': 'harness'})
