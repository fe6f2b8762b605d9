"""generate.py: cached decoding, drawing, stops, files."""

import copy
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from common import (ARCHITECTURES, edit_config, greedy_tokens, head_of_32, kernel_variants,
                    lora_model, plain_log_probs, recorded, reference_model, rewrite, small_model,
                    write_rows)

import generate as program
from decoding.cache import Cache, DecodeMask
from data.chat import encode_prompt
from data.tokenizer import load_tokenizer
from decoding.answers import generate, stream
from scoring import confidences
from decoding import slots
from runtime import checkpoint
from decoding.draw import draw, draw_kernel, lowest_logits
from runtime.errors import ConfigError, DataError
from decoding.sampling import Sampling
from speed import kernels
from speed.kernels import decode_kernel

KERNEL_DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'      # there by the interpreter
GREEDY = Sampling(temperature=0.0, max_tokens=64, batch_size=4)


def random_prompts(seed, *lengths):
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 211, n).tolist() for n in lengths]


def sure(model, ids, answer):
    """Assert that the log-probabilities and entropies are those of one pass without a cache."""
    model.decoder.attention = 'explicit'    # FlexAttention is compiled again for each length
    with torch.no_grad():
        log_probs, entropies = plain_log_probs(model, ids, answer.tokens)
    # float32 rounds the logits of these random models, up to 30, by some 1e-6 in each layer
    assert answer.log_probs == pytest.approx(log_probs.tolist(), abs=3e-5)
    assert answer.entropies == pytest.approx(entropies.tolist(), abs=3e-5)


# ---- Cached decoding -----------------------------------------------------------------------------

@pytest.mark.parametrize('name', [
    name if name == 'mistral_window' else
    pytest.param(name, marks=pytest.mark.slow) for name in ARCHITECTURES])
def test_greedy_tokens_are_those_of_transformers(name, device, tmp_path):
    """20 tokens after prompts of mixed lengths, in fewer slots; windows are shorter than that."""
    reference = reference_model(name, tmp_path, use_cache=True)
    model = checkpoint.load(tmp_path, device)
    prompts, n = random_prompts(0, 1, 5, 9, 30, 17, 2), 20
    answers = dict(generate(model, prompts, replace(GREEDY, max_tokens=n)))
    for i, ids in enumerate(prompts):
        (answer,) = answers[i]
        assert answer.tokens == greedy_tokens(reference, ids, n) and answer.reason == 'max_tokens'
        assert answer.sample_log_probs == [0.0] * n
        sure(model, ids, answer)


@pytest.mark.slow
def test_an_answer_does_not_depend_on_the_others(tmp_path, tokenizers):
    reference_model('llama3', tmp_path)
    model = lora_model(tmp_path, dropout=0.5).train()       # whose dropout takes no part
    common, *rest = random_prompts(2, 11, 3, 8, 5)
    prompts = [common + ids for ids in rest] + rest
    settings = Sampling(n=3, max_tokens=20, batch_size=5, seed=4)
    fixed, stop = replace(settings, deterministic=True), {7, 8, 9, 50, 60, 70}

    def answers_to(prompts, settings):
        return dict(generate(model, prompts, settings, stop_ids=stop))
    together, exact = answers_to(prompts, settings), answers_to(prompts, fixed)
    backwards = answers_to(prompts[::-1], replace(settings, batch_size=7))
    assert len({len(answer.tokens) for answers in together.values() for answer in answers}) > 4
    assert all(module.training for module in model.modules())
    model.eval()
    for i, ids in enumerate(prompts):
        for answers in (answers_to([ids], settings)[0], backwards[len(prompts) - 1 - i]):
            assert [a.tokens for a in answers] == [a.tokens for a in together[i]]
        for answer in together[i]:
            assert (answer.reason == 'end') == (answer.tokens[-1] in stop)
            sure(model, ids, answer)
        assert [replace(a, prompt=i, slot=0) for a in answers_to([ids], fixed)[0]] == [
            replace(a, slot=0) for a in exact[i]]       # bitwise
    # 11 tokens of the model have no text, and are never drawn
    small = SimpleNamespace(n_vocab=200, decode=tokenizers['gemma'].decode)
    ((_, answers),) = generate(model, [[5, 6]], Sampling(
        n=20, max_tokens=20, temperature=50.0), small)
    drawn = {token for answer in answers for token in answer.tokens}
    assert max(drawn) < 200 and len(drawn) > 50


@pytest.mark.skipif(KERNEL_DEVICE == 'cpu', reason='needs a CUDA device')
def test_a_kernel_serves_texts_of_any_length(tmp_path):
    model = small_model('gemma3', tmp_path, 'cuda', torch.bfloat16, **head_of_32('gemma3'))
    variants = []
    for lengths in ((5, 40), (64, 7, 33), (200, 16)):
        list(generate(model, random_prompts(0, *lengths), Sampling(max_tokens=8)))
        variants.append(kernel_variants(kernels))
    assert variants[0] == variants[1] == variants[2]


@pytest.mark.parametrize('softcap, size, hd, group, split, dtype, tolerance', [
    (2.0, 40, 20, 3, 1024, torch.float32, 2e-6), *(
        pytest.param(*case, marks=pytest.mark.slow) for case in (
            (None, 300, 32, 2, 256, torch.bfloat16, 2e-2),
            (30.0, 1500, 20, 3, 1024, torch.float32, 1e-4)))])
def test_the_decode_kernel_equals_the_plain_version(softcap, size, hd, group, split, dtype,
                                                    tolerance, monkeypatch):
    """Lengths around the borders of blocks and splits; in the smaller caches entries are reused."""
    torch.manual_seed(0)
    monkeypatch.setattr(kernels, 'SPLIT', split)
    positions = torch.tensor([0, 1, 63, 64, 255, 256, 1250], device=KERNEL_DEVICE)
    B, K = len(positions), 2
    like = torch.zeros(1, device=KERNEL_DEVICE, dtype=dtype)
    stored = Cache(B + 3, K, size, hd, like, size)
    stored.k.normal_()
    stored.v.normal_()
    plain = copy.deepcopy(stored)
    slots = torch.randperm(B + 3).to(KERNEL_DEVICE)[:B]
    q, k, v = (torch.randn(B, heads, 1, hd).to(like) for heads in (K * group, K, K))
    inputs = q * 30 if size > 1000 else q, k, v, 0.3, softcap
    expected = DecodeMask(plain, slots, positions, 1500).plainly(*inputs)
    out = decode_kernel(DecodeMask(stored, slots, positions, 1500), *inputs)
    assert torch.allclose(out, expected, atol=tolerance, rtol=5 * tolerance)
    assert torch.equal(plain.k, stored.k) and torch.equal(plain.v, stored.v)
    for b in (0, 3, 6):     # bitwise the same alone, and with more splits than are needed
        one = DecodeMask(stored, slots[b:b + 1], positions[b:b + 1], int(positions[b]) + 1)
        alone = decode_kernel(one, *(x[b:b + 1] for x in inputs[:3]), 0.3, softcap)
        assert torch.equal(alone, out[b:b + 1])


# ---- Drawing -------------------------------------------------------------------------------------

RULES = [{'temperature': 0.5}, {'top_k': 7}, {'top_p': 0.7, 'temperature': 1.5}, {'min_p': 0.1},
         {'top_k': 30, 'top_p': 0.9, 'min_p': 0.02, 'temperature': 0.8}]


def warped(logits, s):
    """Log-probabilities of the distribution that transformers draws from."""
    from transformers.generation import logits_process
    z = logits.clone() / s.temperature
    for wanted, name, value in ((s.top_k, 'TopKLogitsWarper', s.top_k),
                                (s.top_p < 1, 'TopPLogitsWarper', s.top_p),
                                (s.min_p, 'MinPLogitsWarper', s.min_p)):
        z = getattr(logits_process, name)(value)(None, z) if wanted else z
    return z.log_softmax(-1)


@pytest.mark.parametrize('rules', RULES)
def test_tokens_follow_the_distribution_of_transformers(rules, device):
    s = Sampling(**rules)
    logits = torch.randn(1, 211, generator=torch.Generator().manual_seed(5)) * 2
    log_q = warped(logits, s)[0].double()
    n = 20_000      # evenly spaced numbers: a token is drawn n times its probability, rounded
    uniforms = (torch.arange(n, dtype=torch.float64, device=device) + 0.5) / n
    values = draw(logits.expand(n, -1).contiguous().to(device), uniforms, s, 211).cpu()
    tokens = values[:, 0].long()
    assert torch.allclose(values[:, 2].double(), log_q[tokens], atol=1e-5)
    assert torch.allclose(values[:, 1], logits.log_softmax(-1)[0, tokens], atol=1e-5)
    counts = torch.bincount(tokens, minlength=211)
    assert not counts[log_q.isinf()].any() and (counts - n * log_q.exp()).abs().max() < 1.05


@pytest.mark.parametrize('rules, size', [
    (RULES[-1], 3), ({'temperature': 0.0}, 3), ({'temperature': 0.5}, 3),
    ({'temperature': 1.5, 'top_p': 0.95}, 50)])
def test_the_kernel_draws_what_torch_draws(rules, size):
    s, V, n_vocab = Sampling(**rules), 9001, 8990
    torch.manual_seed(7)
    logits = torch.randn(6, V) * size
    # never drawn, though higher by more than float32 can hold after exp at a low temperature
    logits[0, 8995] = 60.0
    logits[1, [17, 5000]] = logits[1].max() + 1         # a tie: the first one is the greedy token
    uniforms = torch.rand(6, dtype=torch.float64)
    uniforms[2:4] = torch.tensor([0.0, 1 - 1e-16])
    plain = draw(logits, uniforms, s, n_vocab)
    logits, uniforms = logits.to(KERNEL_DEVICE), uniforms.to(KERNEL_DEVICE)
    kernel = draw_kernel(logits, uniforms, s.temperature, lowest_logits(logits[:, :n_vocab], s),
                         n_vocab).cpu()
    assert torch.equal(kernel[:, 0], plain[:, 0]) and plain[:, 0].max() < n_vocab
    assert torch.allclose(kernel, plain, atol=1e-4)
    if s.temperature == 0:
        assert plain[1, 0] == 17


def test_equal_logits_at_the_edge_are_all_kept():
    logits = torch.log(torch.tensor([[0.4, 0.2, 0.2, 0.2], [0.25] * 4]))
    for rules, lowest in (({'top_k': 2}, [0.2, 0.25]), ({'top_p': 0.5}, [0.2, 0.25]),
                          ({'top_p': 0.4 - 1e-6}, [0.4, 0.25]), ({'min_p': 0.51}, [0.4, 0.25])):
        kept = logits >= lowest_logits(logits, Sampling(**rules))[:, None]
        expected = logits.exp() >= torch.tensor(lowest)[:, None] - 1e-6
        assert torch.equal(kept, expected), rules


# ---- Ends, room ----------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def model_of_many_tokens(tmp_path_factory):
    return small_model('llama', tmp_path_factory.mktemp('model'), vocab_size=128_300)


@pytest.fixture
def speaker(model_of_many_tokens, monkeypatch, tokenizers):
    """Return a function that generates with a model whose every answer is the given tokens."""
    def speak(kind, ids, ends=frozenset({2, 128009}), **settings):
        def forced(logits, uniforms, s, n_vocab):
            return torch.tensor([[next(tokens), -1.0, -1.0, 1.0]] * len(logits))
        tokens = iter([*ids, *[3] * 100])
        monkeypatch.setattr(slots, 'draw', forced)
        settings = Sampling(**{'max_tokens': 40} | settings)
        ((_, (answer,)),) = generate(model_of_many_tokens, [[5, 6]], settings, tokenizers[kind],
                                     ends)
        return answer
    return speak


@pytest.mark.parametrize('kind', ['gemma', 'llama3'])
def test_a_stop_string_ends_the_answer_across_token_borders(speaker, tokenizers, kind):
    tokenizer, body = tokenizers[kind], 'The fox 狐. Question: two'
    ids = tokenizer.encode(body, start=False)
    for stop in ('Question:', 'on: t', '狐', ' ', '. Q'):
        # of two strings that end at the same token, the one that begins first cuts the text
        answer = speaker(kind, ids, stop=(stop[1:] or 'never', stop))
        assert answer.reason == 'stop' and answer.text == body.partition(stop)[0]
        assert stop in tokenizer.decode(answer.tokens, start=False)
        assert stop not in tokenizer.decode(answer.tokens[:-1], start=False)
    answer = speaker(kind, ids, stop=('fox jumps',), max_tokens=len(ids))
    assert answer.reason == 'max_tokens' and answer.text == body


def test_an_end_token_belongs_to_the_answer_but_not_to_its_text(speaker, tokenizers):
    ids = tokenizers['llama2'].encode('fox', start=False)
    answer = speaker('llama2', [*ids, 2, *ids])
    assert answer.reason == 'end' and answer.tokens == [*ids, 2] and answer.text == 'fox'
    assert len(answer.log_probs) == len(answer.entropies) == len(ids) + 1
    assert speaker('llama2', [2]).text == ''
    assert speaker('llama2', [*ids, 2], max_tokens=len(ids)).reason == 'max_tokens'


def test_a_full_context_ends_an_answer_and_is_named(tmp_path):
    model = small_model('llama', tmp_path, max_position_embeddings=20)
    settings = replace(GREEDY, max_tokens=8)
    answers = dict(generate(model, random_prompts(5, 19, 12, 4), settings))
    assert [(answers[i][0].reason, len(answers[i][0].tokens)) for i in range(3)] == [
        ('context', 1), ('max_tokens', 8), ('max_tokens', 8)]
    # each token is yielded as soon as the next step has begun
    assert [len(answer.tokens) for answer in stream(model, [[5, 6, 7]], settings)] == [*range(1, 9)]
    for prompt, settings, message in (
            ([5] * 20, GREEDY, 'prompt 2 has 20 tokens; it may have 1 to 19'),
            ([5] * 9, replace(GREEDY, cache_memory=1e-6),
             'prompt 2 has 9 tokens: with max_tokens = 64 it needs .* GiB of cache')):
        with pytest.raises(DataError, match=message):
            next(generate(model, [[5], prompt], settings))


def test_less_memory_means_fewer_slots_and_equal_answers(tmp_path):
    model, prompts = small_model('mistral_window', tmp_path), random_prompts(6, 9, 4, 13, 2, 20)
    settings = Sampling(n=4, max_tokens=10, seed=1)
    # a slot has 3 layers of 7 tokens, for two K/V heads of 12 numbers in float32
    tight = replace(settings, cache_memory=4 * 3 * 7 * 2 * 2 * 12 * 4 / 2 ** 30)
    assert program.room(model, prompts, tight) == (3, 30)
    assert program.room(model, prompts, replace(settings, cache_memory=1e300)) == (20, 30)
    expected, answers = ({i: [a.tokens for a in x] for i, x in generate(model, prompts, s)}
                         for s in (settings, tight))
    assert answers == expected


def test_answers_to_a_prompt_share_its_computation_and_slots_are_used_again(tmp_path, monkeypatch):
    model = small_model('llama', tmp_path)
    shapes = recorded(monkeypatch, type(model), 'forward', lambda self, tokens, *_: tokens.shape)
    common, *rest = random_prompts(7, 30, 4, 6, 5, 3, 7, 8)
    prompts = [common + ids for ids in rest]
    [*generate(model, prompts, Sampling(n=4, max_tokens=6, batch_size=8))]
    # three waves of two prompts
    assert sum(B * T for B, T in shapes if T > 1) == 3 * 30 + sum(map(len, rest))
    rows = [B for B, T in shapes if T == 1]
    assert max(rows) == 8 and sum(rows) == 5 * 4 * 6        # no row computes after its end


# ---- The command ---------------------------------------------------------------------------------

QUESTIONS = [{'prompt': 'What?', 'gold': '7'}, {'id': 'b', 'messages': [
    {'role': 'user', 'content': 'one <s> [INST]'}, {'role': 'assistant', 'content': 'two'},
    {'role': 'user', 'content': 'three'}]}, {'id': 3, 'prompt': 'four'}]


def run(folder, tmp_path, *arguments, questions=QUESTIONS):
    prompts, out = tmp_path / 'prompts.jsonl', tmp_path / 'out' / 'answers.jsonl'
    write_rows(prompts, questions)
    program.main([f'--model={folder}', f'--prompts={prompts}', '--device=cpu', f'--out={out}',
                  '--max_tokens=6', *arguments])
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_the_tokens_of_three_files_end_an_answer(chat_folder, tmp_path):
    before = {row['id']: row['answers'][0]['tokens']
              for row in run(chat_folder, tmp_path, '--per_token')}
    ends = before['0'][2], before['b'][3]
    (chat_folder / 'generation_config.json').write_text(json.dumps({'eos_token_id': [ends[0]]}))
    with pytest.raises(ConfigError, match='holds answers with .*end_ids'):
        run(chat_folder, tmp_path, '--per_token')
    edit_config(chat_folder, eos_token_id=ends[1])
    for row in run(chat_folder, tmp_path, '--per_token', '--overwrite'):
        (answer,), tokens = row['answers'], before[row['id']]
        n = min((tokens.index(end) + 1 for end in ends if end in tokens), default=len(tokens))
        assert answer['tokens'] == tokens[:n]
        assert answer['reason'] == ('end' if n < 6 or tokens[-1] in ends else 'max_tokens')


def test_the_command_writes_one_line_per_prompt_and_resumes(chat_folder, tmp_path, capsys):
    def answers_of(rows):
        return {row['id']: [a['tokens'] for a in row['answers']] for row in rows}
    options = '--n=2', '--confidence', '--per_token'
    rows = run(chat_folder, tmp_path, *options)
    by_id = {row['id']: row for row in rows}
    assert by_id.keys() == {'0', 'b', 3} and by_id['0']['gold'] == '7'
    model, tokenizer = checkpoint.load(chat_folder), load_tokenizer(chat_folder)
    for row in rows:
        messages = row.get('messages') or [{'role': 'user', 'content': row['prompt']}]
        ids, stop = encode_prompt(messages, tokenizer, 'tulu')
        assert ids.count(tokenizer.bos_id) == 1     # text never becomes a control token
        ((_, answers),) = generate(model, [ids], Sampling(n=2, max_tokens=6), tokenizer, stop)
        scored = confidences(model, [ids], [answers])[0]
        for entry, answer, log_p in zip(row['answers'], answers, scored, strict=True):
            assert entry['tokens'] == answer.tokens and entry['text'] == answer.text
            assert entry['confidence'] == pytest.approx(np.exp(log_p), rel=1e-4)
            assert entry['log_prob'] == pytest.approx(sum(answer.log_probs), abs=1e-4)
            assert entry['sample_log_prob'] == pytest.approx(sum(entry['sample_log_probs']))
            assert entry['n_tokens'] == len(entry['entropies'])
    # a crash cut the second line; the rest is computed again and nothing else
    out = tmp_path / 'out' / 'answers.jsonl'
    lines = out.read_text().splitlines(keepends=True)
    out.write_text(lines[0] + lines[1][:40])
    capsys.readouterr()
    again = run(chat_folder, tmp_path, *options)
    assert again[0] == rows[0] and answers_of(again) == answers_of(rows)
    assert '2 of 3 prompts' in capsys.readouterr().out
    # a prompt that changed is answered; other settings or another model are refused
    changed = [QUESTIONS[0] | {'prompt': 'When?'}, *QUESTIONS[1:]]
    assert len(run(chat_folder, tmp_path, *options, questions=changed)) == 4
    assert f'{out} also has 1 rows for prompts that are not in' in capsys.readouterr().out
    with pytest.raises(ConfigError, match='holds answers with .*choose another --out'):
        run(chat_folder, tmp_path, *options, '--seed=1')
    rewrite(chat_folder, lambda tensors: tensors['model.norm.weight'].mul_(1.1))
    with pytest.raises(ConfigError, match='holds answers of another model'):
        run(chat_folder, tmp_path, *options)


def test_unusable_prompts_and_settings_are_refused(chat_folder, tmp_path):
    for row, message in (
            ({'text': 'x'}, 'prompts.jsonl:2: fields text; wanted either "prompt" or "mess'),
            ({'prompt': 'a', 'id': '0'}, r"the id '0' is already at .*prompts.jsonl:1"),
            ({'prompt': 'a' * 900}, 'prompt 2 has .* tokens; it may have 1 to 199')):
        with pytest.raises(DataError, match=message):
            run(chat_folder, tmp_path, questions=[QUESTIONS[0], row])
    for options, message in (
            ('--n=2 --min_p=2', 'min_p'), ('--out=answers.txt', 'must end in .jsonl'),
            ('--n=2 --temperature=0', 'n = 2 needs a temperature above 0'),
            ('--raw --chat=tulu', '--raw is plain text, and --chat=')):
        with pytest.raises(ConfigError, match=message):
            run(chat_folder, tmp_path, *options.split())
    assert not (tmp_path / 'out' / 'answers.jsonl').exists()
