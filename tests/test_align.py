"""align.py: pairwise losses, trees against separate rows, whole runs."""

import contextlib
import itertools
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from common import (apart, cases_of, edit_config, expect_step, log_of, logits_of, off,
                    plain_log_probs, rewrite, write_rows)

import align
import train
from align import PAIR_LOSSES, STAGES, AlignConfig, Pairs
from alignment import reference, rewards, rollouts
from bridges import adapter
from data.preferences import to_tree
from runtime import checkpoint
from runtime.config import dump_config
from runtime.errors import CheckpointError, ConfigError, DataError
from scripts import run_scripts

E, BETA, GAMMA = 0.1, 0.3, 0.5


def derivatives(name, per_token=False):
    """Return (loss, dL/ds_w, dL/ds_l, the pairs in float64) for random pairs."""
    make = torch.Generator().manual_seed(1)
    n = torch.randint(1, 30, (2, 20), generator=make).double()
    s = -n * torch.rand(2, 20, generator=make).double() * 3
    r = s + torch.randn(2, 20, generator=make).double()
    pairs = Pairs(s[0].requires_grad_(), s[1].requires_grad_(), *n, *r)
    cfg = AlignConfig(beta=BETA, gamma=GAMMA, label_noise=E, per_token=per_token)
    loss = PAIR_LOSSES[name](pairs, cfg)
    return loss, *torch.autograd.grad(loss.sum(), (pairs.s_w, pairs.s_l)), pairs


# the weight dL/ds_w of the better answer, written down apart from the loss; S = sigmoid, x = beta d
WEIGHTS = {
    'dpo': lambda x, d: -BETA * torch.sigmoid(-x),
    'cdpo': lambda x, d: BETA * (torch.sigmoid(x) - 1 + E),
    'robust': lambda x, d: -BETA * (1 - E - (1 - 2 * E) * torch.sigmoid(x)) / (1 - 2 * E),
    'ipo': lambda x, d: 2 * (d - 1 / (2 * BETA)),
    'hinge': lambda x, d: -BETA * (x < 1).double(),
    'simpo': lambda x, d: -BETA * torch.sigmoid(GAMMA - x),
}


@pytest.mark.parametrize('per_token', [False, True])
@pytest.mark.parametrize('name', WEIGHTS)
def test_the_weights_of_both_answers_are_those_of_the_papers(name, per_token):
    _, g_w, g_l, p = derivatives(name, per_token)
    n_w, n_l = (p.n_w, p.n_l) if per_token or name == 'simpo' else (1, 1)
    r_w, r_l = (0, 0) if name == 'simpo' else (p.r_w, p.r_l)    # which has no reference
    d = (p.s_w - r_w) / n_w - (p.s_l - r_l) / n_l
    expected = WEIGHTS[name](BETA * d, d)
    assert off(g_w, expected / n_w) < 1e-12 and off(g_l, -expected / n_l) < 1e-12


def test_orpo_is_the_nll_and_the_log_odds_ratio():
    loss, _, _, p = derivatives('orpo')
    probability = torch.exp(torch.stack((p.s_w / p.n_w, p.s_l / p.n_l)))
    odds = probability / (1 - probability)
    expected = -p.s_w / p.n_w + BETA * torch.log1p(odds[1] / odds[0])
    assert off(loss, expected) < 1e-10
    certain = Pairs(*(torch.zeros(1, requires_grad=True) for _ in range(2)),
                    *(torch.ones(1) for _ in range(4)))
    loss = PAIR_LOSSES['orpo'](certain, AlignConfig())
    loss.backward()
    assert torch.isfinite(loss).all() and torch.isfinite(certain.s_w.grad).all()


# ---- Trees against separate rows -----------------------------------------------------------------

ROWS = [
    {'prompt': 'Name a color.', 'chosen': 'Red.', 'rejected': 'Seven, of course!', 'margin': 0.5},
    {'prompt': 'Why?', 'responses': ['Who knows.', 'I see', 'Because.', 'why not'],
     'scores': [3, 1, 3, 2]},
    {'prompt': 'Count to three.', 'chosen': 'One two three.', 'rejected': 'No.', 'margin': 2.5},
    {'prompt': 'a', 'chosen': 'b c d e f g', 'rejected': 'h'},
]


def config(base, folder, rows, **values):
    settings = {'model': str(base), 'data': str(write_rows(folder / 'rows.jsonl', rows)),
                'out_dir': str(folder / 'run'), 'cache_dir': str(folder / 'cache'), 'workers': 1,
                'device': 'cpu', 'save_dtype': 'float32', 'pictures': False, 'max_length': 64,
                'batch_size': len(rows), 'pack_len': 96, 'checkpoint_epochs': False}
    if values.get('method', 'dpo') in PAIR_LOSSES:
        settings['beta'] = BETA
    return AlignConfig(**settings | values)


def run_of(cfg):
    """Return (the run with its data and model, the model)."""
    align.check_align_config(cfg)
    run = train.load_run(cfg, STAGES[cfg.method], 'cpu')
    torch.manual_seed(cfg.seed)
    run.model, run.reference = run.stage.build(run)
    return run, run.model


def plain_loss(model, run, cfg, reference):
    """Return the loss of all rows, each answer in a row of its own."""
    def score(prompt, option):
        """The log-probability of an answer, or its reward."""
        if cfg.method != 'reward':
            return plain_log_probs(model, prompt, option)[0].sum()
        tokens = torch.tensor([prompt + option])
        hidden = model.decoder(tokens, torch.arange(tokens.shape[1])[None], None)
        return hidden[0, -1].double() @ model.score.weight[0].double()

    def pair_loss(pairs, margin):
        if cfg.method != 'reward':
            return PAIR_LOSSES[cfg.method](pairs, cfg)
        return (-torch.nn.functional.logsigmoid(pairs.s_w - pairs.s_l - margin)
                + cfg.centering * (pairs.s_w + pairs.s_l) ** 2)
    total = 0
    for i, row in enumerate(ROWS):
        tree, ranks = to_tree(*run.sequences[i])
        s = [score(tree.prompt, option) for option in tree.continuations]
        n = torch.tensor([float(len(option)) for option in tree.continuations])
        r = torch.tensor(reference[i])
        losses = [pair_loss(Pairs(s[j], s[k], n[j], n[k], r[j], r[k]), row.get('margin', 0.0))
                  for j, k in itertools.permutations(range(len(s)), 2) if ranks[j] < ranks[k]]
        total = total + torch.stack(losses).mean() / len(ROWS)
    return total


@pytest.mark.parametrize('base, method', [
    ('llama', 'dpo'), ('llama', 'simpo'), ('llama', 'orpo'), ('llama', 'reward'),
    pytest.param('gemma2', 'robust', marks=pytest.mark.slow)], indirect=['base'])
def test_trees_have_the_loss_and_gradients_of_separate_rows(base, method, tmp_path, capsys):
    cfg = config(base, tmp_path, ROWS, method=method, centering=0.1 * (method == 'reward'))
    run, model = run_of(cfg)
    assert ('2 pairs have a margin, which' in capsys.readouterr().out) == (method != 'reward')
    if method == 'reward':      # which begins with zeros
        torch.nn.init.normal_(model.score.weight)
    make = torch.Generator().manual_seed(0)
    reference = np.zeros((4, 9))
    if run.reference is not None:     # another than the policy, else all margins are 0
        run.reference += torch.randn(run.reference.shape, generator=make).numpy()
        reference = run.reference
    step = expect_step(model, plain_loss(model, run, cfg, reference))
    for order, micro_rows, memory in ((range(4), 1, None), ([2, 0, 3, 1], 100, 0)):
        step(run.stage.pack(run, np.array(order), 1), replace(
            cfg, micro_rows=micro_rows, loss_memory=memory), run.stage.objective)


def test_the_reference_is_computed_once_and_belongs_to_model_and_data(base, tmp_path, monkeypatch):
    cfg = config(base, tmp_path, ROWS)
    run, model = run_of(cfg)
    with torch.no_grad():
        loss = plain_loss(model, run, cfg, run.reference)
    assert loss.item() == pytest.approx(math.log(2), abs=1e-5)
    counts = [len(to_tree(*run.sequences[i])[1]) for i in range(4)]
    assert [np.count_nonzero(row) for row in run.reference] == counts and max(counts) == 4
    monkeypatch.setattr(reference, 'answer_log_probs', lambda *_: pytest.fail('computed again'))
    again, _ = run_of(cfg)
    assert np.array_equal(run.reference, again.reference)
    with pytest.raises(pytest.fail.Exception, match='computed again'):
        run_of(config(base, tmp_path, ROWS[1:]))
    monkeypatch.undo()
    (path,) = Path(cfg.cache_dir).glob('reference-*.npz')
    content = path.read_bytes()
    path.write_bytes(content[:140] + bytes([content[140] ^ 1]) + content[141:])
    with pytest.raises(DataError, match=f'the reference in {path} is damaged'):
        reference.cached_reference(run, model)


# ---- Whole runs ----------------------------------------------------------------------------------

@pytest.mark.slow
@pytest.mark.parametrize('method', ['dpo', 'reward'])
def test_a_run_begins_at_its_reference_and_learns_its_pairs(base, tmp_path, method):
    rows = [{'prompt': f'Name {i}.', 'chosen': 'Yes.', 'rejected': 'No!'} for i in range(10)]
    cfg = config(base, tmp_path, rows, method=method, epochs=25, lr=1e-2, lora=True,
                 val_size=4, val_every=10, pictures=True, batch_size=6, checkpoint_activations=True)
    align.align(cfg)
    first, *_, last = log_of(tmp_path / 'run')
    assert first['loss'] == pytest.approx(math.log(2), abs=1e-4)
    assert last['loss'] < 0.1 and last['accuracy'] == last['val_accuracy'] == 1
    assert last['val_loss'] < 0.4
    checkpoint.load(cfg.out_dir, reward=method == 'reward')
    files = {path.relative_to(cfg.out_dir).as_posix() for path in Path(cfg.out_dir).rglob('*')}
    assert files > {'loss.png', 'tokenizer.model'}
    # a score is no adapter
    assert ('adapter/adapter_model.safetensors' in files) == (method == 'dpo')
    if method == 'reward':
        assert last['val_ece'] == pytest.approx(1 - math.exp(-last['val_loss']), abs=0.02)
    else:
        assert last['margin'] > 1
        assert last['chosen'] - first['chosen'] > last['rejected'] - first['rejected']
        model, tokens = checkpoint.load(base), torch.arange(3, 40)[None]
        before, merged = logits_of(model, tokens), logits_of(tmp_path / 'run', tokens)
        adapter.add_adapter(model, tmp_path / 'run')
        assert torch.allclose(logits_of(model, tokens), merged, atol=1e-3)
        assert not torch.allclose(before, merged, atol=1e-2)


# ---- Reward models -------------------------------------------------------------------------------

# pad_token_id of config.json, and a file of the tokenizer; <s> = 1 and </s> = 2
PADS = {
    'null': (None, '', ''),
    'of the tokenizer alone': (None, 'tokenizer_config.json', '{"pad_token": "<unk>"}'),
    'another one': (0, 'tokenizer_config.json',
                    '{"pad_token": {"content": "<unk>", "__type": "AddedToken"}}'),
    'a special token of old files': (None, 'special_tokens_map.json', '{"pad_token": "</s>"}')}


@pytest.mark.slow
@pytest.mark.parametrize('case', PADS)
def test_transformers_reads_each_reward_at_the_token_that_ends_the_answer(base, case, tmp_path):
    """Single texts and padded batches, with and without the pad token inside a text."""
    transformers = pytest.importorskip('transformers')
    pad, name, content = PADS[case]
    folder = shutil.copytree(base, tmp_path / 'base')
    edit_config(folder, pad_token_id=pad)
    if name:
        (folder / name).write_text(content)
    cfg = config(folder, tmp_path, ROWS, method='reward', epochs=2, lr=3e-2)
    align.align(cfg)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(
        cfg.out_dir, dtype=torch.float32, attn_implementation='eager').eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(cfg.out_dir)
    assert tokenizer.pad_token_id == theirs.config.pad_token_id not in (None, 2)
    assert theirs.config.num_labels == 1
    for path, reward, message in ((cfg.out_dir, False, 'is a reward model; an output matrix'),
                                  (folder, True, 'is no reward model')):
        with pytest.raises(CheckpointError, match=message):
            checkpoint.load(path, reward=reward)
    model = rewards.ModelReward(cfg.out_dir, 'cpu', torch.float32, 'tulu')
    messages = [[{'role': 'user', 'content': f'Name {i}.'}] for i in range(3)]
    texts = [['Red.', 'Seven and so on'], ['', 'Blue'], ['x', 'y']]
    ours = model.scores(messages, texts, None)
    sequences = [[*ids, *answer] for pair in zip(messages, texts, strict=True)
                 for ids, answers in [model.encode(*pair)] for answer in answers]
    with torch.no_grad():
        single = [theirs(torch.tensor([ids])).logits.item() for ids in sequences]
        assert single == pytest.approx(ours.ravel().tolist(), rel=1e-4, abs=1e-5)
        assert np.std(single) > 1e-3
        sequences.append([*sequences[0][:4], tokenizer.pad_token_id, *sequences[0][4:]])
        inside = torch.tensor([sequences[-1]])
        hidden = model.model(inside, torch.arange(inside.shape[1])[None], None)
        single.append(model.model.rewards(hidden[:, -1]).item())
        for side in ('right', 'left'):
            batch = tokenizer.pad({'input_ids': sequences}, padding_side=side, return_tensors='pt')
            assert theirs(**batch).logits.ravel().tolist() == pytest.approx(
                single, rel=1e-4, abs=1e-5)
    rewrite(tmp_path / 'run', lambda tensors: tensors['score.weight'][0, 3].fill_(torch.nan))
    broken = rewards.load_reward(cfg.out_dir, 'cpu', torch.float32, 'tulu')
    with pytest.raises(CheckpointError, match=r'reward = .*/run: the model gives NaN or infinite '
                                              r'rewards; score.weight in .*/run holds NaN'):
        broken.scores(messages, texts, None)


@pytest.mark.slow
@pytest.mark.parametrize('values', [
    {'method': 'dpo', 'micro_rows': 2}, {'method': 'reward', 'lora': True}],
    ids=['DPO', 'a reward model with LoRA'])
def test_two_processes_align_as_one(base, values, tmp_path):
    """To rounding: the numbers of each step, which need the reference of both, and weights."""
    lengths = [3, 17, 8, 1, 12, 5, 9, 2, 14, 6]     # so that the two have answers of other prompts
    rows = ROWS[:2] + [{'prompt': f'Name {i}.', 'chosen': 'Yes. ' * n, 'rejected': 'No! ' * (n % 4)
                        + 'So.'} for i, n in enumerate(lengths)]
    cfg = config(base, tmp_path, rows, lr=1e-3, epochs=3, val_size=4, val_every=2, batch_size=5,
                 max_length=160, pack_len=160, **values)
    for n in (1, 2):
        case = replace(cfg, out_dir=str(tmp_path / str(n)), cache_dir=str(tmp_path / f'cache-{n}'))
        (tmp_path / 'config.py').write_text(dump_config(case))
        done = run_scripts(n, 'align.py', tmp_path / 'config.py')
        assert done.returncode == 0, done.stderr
    one, two = (log_of(tmp_path / n) for n in '12')
    assert len(one) == 4 and {'val_loss', 'val_accuracy'} <= one[-1].keys()
    for a, b in zip(one, two, strict=True):
        assert a.keys() == b.keys()
        for key in a.keys() - {'tokens_per_s', 'micro_rows'}:
            assert a[key] == pytest.approx(b[key], rel=1e-3, abs=1e-4), key
    assert apart(tmp_path / '1', tmp_path / '2', base) < 2e-3


def above_a_margin(pairs, cfg):
    margin = pairs.margin(cfg)
    return torch.where(margin > 50, cfg.gamma - margin, -margin)


def by_a_name(pairs, settings):
    return getattr(settings, 'gam' + 'ma') * pairs.s_l


@pytest.mark.parametrize('loss, keys', [
    (align.dpo, 'per_token'), (align.cdpo, 'per_token, label_noise'), (align.ipo, 'per_token'),
    (align.robust, 'per_token, label_noise'), (align.hinge, 'per_token'), (align.simpo, 'gamma'),
    (align.orpo, ''), (above_a_margin, 'per_token, gamma'),
    (by_a_name, 'per_token, label_noise, gamma'),       # all, if it is not known which
    (lambda pairs, cfg: cfg.gamma * pairs.s_w, 'per_token, label_noise, gamma')])
def test_a_setting_is_refused_if_the_loss_cannot_read_it(loss, keys, monkeypatch):
    monkeypatch.setitem(align.PAIR_LOSSES, 'own', loss)
    for key, value in (('per_token', True), ('label_noise', 0.2), ('gamma', 2.0)):
        refuses = pytest.raises(ConfigError, match=f'{key} = {value} has no effect')
        with contextlib.nullcontext() if key in keys else refuses:
            align.check_align_config(AlignConfig(**{'method': 'own', key: value}))


@pytest.mark.parametrize('values, message', cases_of('wrong_settings.toml')['align'])
def test_settings_without_use_or_sense_are_refused(values, message, monkeypatch):
    # not that it needs --run_code, which would not help
    rollouts.check_rollouts(AlignConfig(method='grpo', reward='rlcr:humaneval'))
    if 'one GPU' in message:
        monkeypatch.setattr(rollouts, 'world_size', lambda: 2)
    with pytest.raises(ConfigError, match=message):
        align.check_align_config(AlignConfig(**values))
    with pytest.raises(ConfigError, match='no settings given: python align.py configs/'):
        align.main([])
