"""train.py"""

import copy
import dataclasses
import functools
import shutil
import sys
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from common import (apart, cases_of, documents, expect_step, head_of_32, log_of,
                    logits_of, lora_model, program, reference_model, results_of, rewrite,
                    small_model, whole_rows, write_rows)

import evaluate
import metrics
import train
from data import packing
from bridges import trackers
from runtime import build, checkpoint, parallel, resume
from runtime.config import load_config
from runtime.device import pick_device
from runtime.errors import ConfigError, DataError, TrainingError
from scripts import run_scripts, torchrun
from speed import graphs


def tiny_config(**values):
    return train.TrainConfig(**({'dtype': 'float32', 'pack_len': 48, 'device': 'cpu'} | values))


@pytest.fixture(scope='module')
def tiny_model(tmp_path_factory):
    return small_model('gemma2', tmp_path_factory.mktemp('tiny'))


def supervised(model, sequences):
    """Yield the logits and labels of each sequence's supervised tokens, alone in its row."""
    for tokens, loss_mask in sequences:
        row, kept = torch.tensor(tokens)[None].long(), torch.tensor(loss_mask[1:]) > 0
        yield logits_of(model, row)[0, :-1][kept], row[0, 1:][kept]


def mean_of(rows, reduction):
    """The mean over all tokens, or over the means of the sequences."""
    return torch.cat(rows).mean() if reduction == 'token' else torch.stack(
        [row.mean() for row in rows]).mean()


@pytest.mark.parametrize('reduction', ['token', 'sequence'])
def test_packed_step_equals_unpacked_sequences(tiny_model, reduction):
    sequences = documents(1, [40, 7, 25, 30, 44, 12, 9])
    losses, nlls = [], []
    for z, labels in supervised(tiny_model, sequences):
        assert z.abs().max() < tiny_model.config.final_logit_softcapping == 3.0
        for rows, rate in ((losses, 0.1), (nlls, 0.0)):
            rows.append(F.cross_entropy(z, labels, label_smoothing=rate, reduction='none'))
    step = expect_step(tiny_model, mean_of(losses, reduction))
    for n in (1, 2, 100):
        values = step(packing.pack(sequences, 48), tiny_config(
            smoothing=0.1, loss_reduction=reduction, micro_rows=n))
        assert values['nll'].item() == pytest.approx(mean_of(nlls, reduction).item(), rel=1e-5)


@pytest.mark.parametrize('reduction', ['token', 'sequence'])
@pytest.mark.parametrize('lora', [False, True])
def test_smoothing_towards_the_base_model(lora, reduction, tmp_path):
    base = small_model('gemma2', tmp_path)      # it has a softcap
    model = lora_model(tmp_path, dropout=0.1) if lora else checkpoint.load(tmp_path)
    for p in filter(lambda p: p.requires_grad, model.parameters()):
        p.data += 0.02 * torch.randn_like(p)
    sequences = documents(1, [40, 7, 25, 30])
    losses, kls = [], []
    for (z, labels), (base_z, _) in zip(
            supervised(model.eval(), sequences), supervised(base, sequences), strict=True):
        log_p, base_z = z.double().log_softmax(1), base_z.detach().double()
        q = base_z.where(base_z >= base_z.topk(20).values[:, -1:], -torch.inf).softmax(1)
        kls.append((q * (q.log() - log_p).where(q > 0, 0)).sum(1))
        losses.append(0.7 * F.nll_loss(log_p, labels, reduction='none') + 0.3 * kls[-1])
    step = expect_step(model, mean_of(losses, reduction))
    for n in (1, 100):
        values = step(packing.pack(sequences, 48), tiny_config(
            base_smoothing=0.3, loss_reduction=reduction, micro_rows=n),
            functools.partial(train.token_loss, base=model if lora else base))
        assert values['base_kl'].item() == pytest.approx(mean_of(kls, reduction).item(), rel=1e-4)


def test_the_learning_rate_warms_up_and_decays():
    cfg = tiny_config(lr=1.0, warmup=0.1, final_lr=0.1)
    rates = [train.learning_rate(s, 100, cfg) for s in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == pytest.approx(1.0)
    assert rates[10] == pytest.approx(1.0) and rates[55] == pytest.approx(0.1 + 0.9 * 0.5)
    assert 0.1 < rates[99] < 0.12
    cosine = dataclasses.replace(cfg, schedule='cosine')
    assert train.learning_rate(55, 100, cosine) == pytest.approx(0.55)
    in_steps = tiny_config(lr=1.0, warmup=0.5, warmup_steps=10, final_lr=0.1)
    assert [train.learning_rate(s, 100, in_steps) for s in range(100)] == rates
    assert train.learning_rate(3, 8, in_steps) == 0.4     # a run shorter than its warm-up


@pytest.mark.parametrize('values, message', cases_of('wrong_settings.toml')['train'])
def test_settings_without_a_meaning_are_refused(values, message, monkeypatch):
    monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
    train.check_config(tiny_config(max_length=8, loss='cross_entropy() + smoothing(0.1)'))
    if 'eval' in values:
        values = {'eval': evaluate.EvalConfig(**values['eval'])}
    with pytest.raises(ConfigError, match=message):
        train.check_config(tiny_config(**{'max_length': 8} | values))


@pytest.mark.parametrize('limit', [1e3, 1e-3])
def test_clipping_lowers_large_gradients_and_raises_none(tiny_model, limit):
    cfg = tiny_config(micro_rows=None, grad_clip=limit)
    optimizer, scales = train.build_optimizer(tiny_model, cfg), []
    optimizer.step = lambda scale: scales.append(float(scale))
    norm = float(train.train_step(tiny_model, optimizer, packing.pack(documents(3, [60]), 128), cfg,
                                  'cpu')['grad_norm'])
    assert scales == [pytest.approx(min(1, limit / norm), rel=1e-4)] and 1e-3 < norm < 1e3


def test_the_sequences_of_a_group_share_a_row():
    def rows(lengths, **options):
        packed = packing.pack(documents(0, lengths), 128, **options)
        return [{*row.tolist()} - {-1} for row in packed.owner]
    together = rows([50, 50, 60, 60, 10, 20], groups=[0, 0, 1, 1, 2, 2])
    assert all(sum({2 * g, 2 * g + 1} <= row for row in together) == 1 for g in range(3))
    assert any(len(row & {0, 1}) == 1 for row in rows([50, 80, 60, 60, 10, 20]))
    with pytest.raises(ValueError, match='group 0 has 130 tokens, and a row has room for 128'):
        rows([70, 60], groups=[0, 0])


def test_a_subset_is_drawn_by_the_seed(settings_file, tmp_path, capsys):
    cfg = load_config(train.TrainConfig, [settings_file])

    def drawn(**values):
        run = train.load_run(dataclasses.replace(cfg, **values), train.SFT, 'cpu')
        return run.training.tolist(), run.held_out.tolist()
    whole, held_out = drawn()
    fewer, more = drawn(data_limit=20), drawn(data_limit=30)
    assert cfg.val_size == 4 and fewer[1] == more[1] == held_out    # validation stays the same
    assert len(fewer[0]) == 20 and set(fewer[0]) < set(more[0]) < set(whole)
    assert fewer == drawn(data_limit=20) and fewer[0] == sorted(fewer[0]) != whole[:20]
    assert drawn(data_limit=20, seed=8)[0] != fewer[0]
    assert drawn(data_limit=len(whole))[0] == whole
    with pytest.raises(DataError, match=f'data_limit = 999, but it has {len(whole)} sequences '):
        drawn(data_limit=999)
    with pytest.raises(DataError, match='nowhere'):     # the sizes come before a missing benchmark
        train.main([settings_file, '--dry_run', f'--out_dir={tmp_path / "run"}', '--data_limit=20',
                    '--lora_rank=4', '--eval.tasks=mmlu:nowhere'])
    printed = capsys.readouterr().out
    assert f': 20 sequences (a sample of {len(whole)}), ' in printed
    assert 'no effect: lora_rank' in printed and 'val_loss' not in printed
    assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize('n, epochs, expected', [
    (100, 0.57, 57), (100, 0.29, 29), (1000, 1.001, 1001), (99, 1 / 3, 33), (99, 0.3333, 32),
    (10, 0.59, 5), (7, 2.0, 14)])
def test_a_fraction_of_an_epoch_is_that_share_of_the_rows(n, epochs, expected):
    assert packing.epochs_of(n, epochs) == expected


def test_a_held_out_part_shares_no_group_with_training():
    groups = np.random.default_rng(0).integers(0, 300, 1000)
    groups[:600] += 1000 * np.arange(600)       # many of their own
    held_out, rest = packing.split_groups(groups, 200, 0)
    assert len(held_out) == 200 and not {*groups[held_out]} & {*groups[rest]}
    assert sorted([*held_out, *rest]) == [*range(1000)]
    parts = packing.split_groups(np.arange(50), 7, 5)       # groups of one: of a permutation
    assert np.concatenate(parts).tolist() == np.random.default_rng(5).permutation(50).tolist()
    held_out, rest = packing.split_groups(np.repeat(np.arange(10), 4), 10, 0)
    assert (len(held_out), len(rest)) == (8, 32)
    cfg = train.TrainConfig(data='d', val_size=3, batch_size=1)
    with pytest.raises(DataError, match='= 3 holds out nothing: .* together, 4 or more; raise'):
        train.split_sequences(cfg, np.repeat(np.arange(10), 4))


def test_a_report_in_the_chat_template(settings_file, tmp_path):
    run = [settings_file, f'--out_dir={tmp_path}', '--max_steps=1', '--eval.chat=trained',
           '--eval.limit=8', '--eval_before=True']
    train.main(run)
    for place in ('.', 'before'):       # the base model is asked in the same way
        result = results_of(tmp_path / place)['tasks']['questions']
        assert result['chat'] == 'tulu' and result['pooled']['n'] == 8
    for option, message in (('--data_kind=text', 'needs data_kind = .instruct'), (
            '--eval.dropout_seed=2', 'eval: dropout_seed needs the adapters that a run')):
        with pytest.raises(ConfigError, match=message):
            train.main([*run, option])


def test_training_by_letter_learns_the_letter(small_world, tmp_path, monkeypatch):
    """A model learns that the answer is always B, and the report asks as the training did.

    The finished model is sent to the hub with its card, and without samples, logs and settings.
    """
    monkeypatch.setattr('huggingface_hub.HfApi', lambda: api)
    api = mock.Mock()
    path = write_rows(tmp_path / 'mine.jsonl', [
        {'question': f'{i} or {i + 1}?', 'choices': ['one', 'two'], 'answer_index': 1}
        for i in range(8)])
    results = train.train_and_report(train.TrainConfig(
        model=str(small_world[0] / 'base'), out_dir=str(tmp_path / 'out'), cache_dir=str(tmp_path),
        data=str(path), data_kind='questions', lr=3e-3, batch_size=8, epochs=30,
        max_length=128, pack_len=512, workers=1, push_to_hub='me/model',
        eval=evaluate.EvalConfig(tasks=(str(path),), shots=0, n_bootstrap=0, pictures=False)))
    sent = api.upload_folder.call_args.kwargs['allow_patterns']
    assert {'README.md', 'config.json', 'model.safetensors', 'tokenizer.model'} <= {*sent}
    assert not [x for x in sent if x.startswith(('epoch', 'train_', 'log', 'samples', 'results'))]
    assert '| mine | after' in (tmp_path / 'out' / 'README.md').read_text()
    before, after = (results[when]['tasks']['mine'] for when in ('before', 'after'))
    assert after['pooled']['accuracy'] == 1 and before['pooled']['nll'] > 0.3
    assert before['option_mass'] < 0.1 and after['option_mass'] > 0.5
    assert log_of(tmp_path / 'out')[-1]['nll'] < 1 and after['pooled']['nll'] < 0.1
    assert not (tmp_path / 'out' / 'chat_template.jinja').exists()


def test_a_nan_loss_stops_the_run(small_world, settings_file, tmp_path):
    broken = shutil.copytree(small_world[0] / 'base', tmp_path / 'broken')
    rewrite(broken, lambda t: t['model.norm.weight'].fill_(torch.nan))
    with pytest.raises(TrainingError, match='step 1: loss nan.* not finite in '
                                            'model.norm.weight; there is no checkpoint yet'):
        train.main([settings_file, f'--model={broken}', f'--out_dir={tmp_path / "run"}'])
    assert not (tmp_path / 'run' / 'model.safetensors').exists()


def test_any_loss_with_a_cap_and_a_temperature(settings_file):
    cfg = load_config(train.TrainConfig, [
        settings_file, '--loss=focal(2) + z_loss(1e-4)', '--smoothing=0.1', '--logit_softcap=20.0',
        '--logit_temperature=1.5'])
    run = train.load_run(cfg, train.SFT, 'cpu')
    chosen, packed = next(run.stage.batches(run, 0, 1))
    values = train.forward_backward(run.stage.build(run)[0], packed, cfg, 'cpu')
    base, sequences = checkpoint.load(cfg.model), [run.sequences[i] for i in chosen]
    z, targets = map(torch.cat, zip(*supervised(base, sequences)))
    z = 20 * torch.tanh(z.double() / 1.5 / 20)
    nll, smoothed = (F.cross_entropy(z, targets, reduction='none', label_smoothing=rate)
                     for rate in (0.0, 0.1))
    expected = (1 - (-nll).exp()) ** 2 * nll + 1e-4 * z.logsumexp(1) ** 2 + smoothed - nll
    assert values['nll'].item() == pytest.approx(nll.mean().item(), rel=1e-5)
    assert values['loss'].item() == pytest.approx(expected.mean().item(), rel=1e-5)


def test_the_end_of_a_script_closes_the_writer_of_tensorboard(monkeypatch):
    """The writer keeps two minutes of records, which it does not write by itself at the end."""
    writer, at_exit = mock.Mock(), []
    monkeypatch.setitem(sys.modules, 'torch.utils.tensorboard',
                        SimpleNamespace(SummaryWriter=lambda folder: writer))
    monkeypatch.setattr(trackers.atexit, 'register', at_exit.append)
    send = trackers.start(SimpleNamespace(tracker='tensorboard', out_dir='x'))
    send({'step': 7, 'lr': 0.5})
    assert writer.add_scalar.call_args_list == [mock.call('step', 7, 7), mock.call('lr', 0.5, 7)]
    assert at_exit == [writer.close]


@pytest.mark.parametrize('name, values, message', cases_of('wrong_settings.toml')['model'])
def test_settings_that_do_not_fit_the_model_are_refused(name, values, message, tmp_path):
    reference_model(name, tmp_path)
    with pytest.raises(ConfigError, match=message):
        build.model_config(tiny_config(**{'max_length': 8} | values), tmp_path)


@pytest.mark.parametrize('name', ['gemma2', 'neox'])
def test_checkpointed_activations_change_nothing(name, tmp_path):
    reference_model(name, tmp_path)
    packed = packing.pack(documents(3, [40, 31, 48, 9]), 48)
    results = []
    for again in (False, True):
        model = lora_model(tmp_path, dropout=0.2).train()
        model.decoder.checkpoint = again
        torch.manual_seed(5)
        values = train.forward_backward(model, packed, tiny_config(smoothing=0.1), 'cpu')
        results.append([values['loss'], *(p.grad for p in model.parameters() if p.requires_grad)])
    assert all(map(torch.equal, *results))


def test_validation_reports_the_next_tokens_ece(tiny_model):
    sequences = documents(4, [40, 31, 48, 9])
    found = train.validation_loss(SimpleNamespace(
        cfg=tiny_config(smoothing=0.1, pack_len=48, max_length=48), stage=train.SFT, device='cpu',
        model=tiny_model, sequences=sequences, held_out=range(4), row_multiple=1))
    z, labels = map(torch.cat, zip(*supervised(tiny_model, sequences)))
    top, predicted = z.detach().softmax(-1).max(-1)
    assert found['val_nll'] == pytest.approx(F.cross_entropy(z, labels).item(), rel=1e-5)
    assert found['val_ece'] == pytest.approx(metrics.ece(top, predicted == labels), abs=1e-5)
    assert found['val_loss'] > found['val_nll'] * 0.5


@pytest.mark.parametrize('n_gpus, wanted', [(0, 'gloo'), (1, 'gloo'), (2, 'cpu:gloo,cuda:nccl')])
def test_all_processes_connect_by_the_same_backend(n_gpus, wanted, monkeypatch):
    """Two processes on a machine of one GPU, as those that `--device=cpu` runs there."""
    backends, devices = [], []
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: n_gpus)
    monkeypatch.setattr(torch.cuda, 'set_device', devices.append)
    monkeypatch.setattr(parallel.dist, 'init_process_group', lambda x, **_: backends.append(x))
    for rank in ('0', '1'):
        for name in ('TORCHELASTIC_RUN_ID', 'LOCAL_RANK', 'RANK', 'LOCAL_WORLD_SIZE', 'WORLD_SIZE'):
            monkeypatch.setenv(name, '2' if 'SIZE' in name else rank)
        parallel.join_processes()
    assert backends == [wanted] * 2 and devices == ([0, 1] if n_gpus == 2 else [])
    # without a number, the GPU is that of the process: the second one here
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: n_gpus > 0)
    assert pick_device('auto') == ('cpu', 'cuda', 'cuda:1')[n_gpus]


def test_two_processes_train_the_same(small_world, settings_file, tmp_path):
    def command(name, *more):
        return [settings_file, '--eval=None', '--max_steps=4', '--smoothing=0.1', '--micro_rows=2',
                '--device=cpu', '--pictures=False', f'--out_dir={tmp_path / name}', *more]

    def distance(one, two):
        return apart(tmp_path / one, tmp_path / two, small_world[0] / 'base')
    train.main(command('one'))
    done = torchrun('train.py', *command('two'))
    assert done.returncode == 0 and distance('one', 'two') < 1e-3, done.stderr
    for a, b in zip(*(log_of(tmp_path / name) for name in ('one', 'two')), strict=True):
        for key in ('loss', 'nll', 'grad_norm', 'tokens', 'supervised_tokens'):
            assert a[key] == pytest.approx(b[key], rel=1e-4), key
    # a checkpoint of two processes from which one resumes
    script = tmp_path / 'stop.py'
    script.write_text(program('training that stops'))
    # also of bfloat16 weights with the bits that float32 has more
    half = '--dtype=bfloat16', '--save_dtype=float32', '--master_weights=compact'
    train.main(command('one_half', *half))
    for name, whole, most, more in (('half', 'one', 1e-3, ()), ('compact', 'one_half', 0.1, half)):
        run_scripts(2, script, *command(name, '--save_every=2', *more))
        assert list(resume.checkpoints(tmp_path / name)) == [2]
        train.main(command(name, '--resume', *more))
        assert distance(whole, name) < most


@pytest.mark.slow
@pytest.mark.parametrize('name, master', [('llama', 'stochastic'), ('gemma2', 'exact')])
def test_compiled_steps_follow_float32_and_compile_once(name, master, device, tmp_path):
    """Steps in bfloat16, compiled on a GPU, follow float32 ones; later batches compile nothing."""
    torch._dynamo.reset()
    reference_model(name, tmp_path, **head_of_32(name))
    rng = np.random.default_rng(0)
    batches = [documents(i, rng.integers(5, 128, rng.integers(6, 20)))
               for i in range(4 if device == 'cpu' else 8)]
    runs = []
    for dtype, place in (('float32', 'cpu'), ('bfloat16', device)):
        cfg = tiny_config(dtype=dtype, pack_len=128, micro_rows=2, lr=1e-3, smoothing=0.1,
                          master_weights=master, device=place)
        model = train.build_model(cfg, checkpoint.read_config(tmp_path), tmp_path, place)
        optimizer = train.build_optimizer(model, cfg)
        losses = []
        for i, batch in enumerate(batches):
            packed = packing.pack(batch, 128, cfg.micro_rows if place == 'cuda' else 1)
            late = i >= len(batches) / 2
            with torch.compiler.set_stance('fail_on_recompile' if late else 'default'):
                losses.append([float(x) for x in train.train_step(
                    model, optimizer, packed, cfg, place).values()])
        runs.append(np.array(losses))
    # gradients in bfloat16: after eight steps their norm is off by 3 % on an H200
    assert np.allclose(runs[0], runs[1], rtol=0.05 if master == 'exact' else 0.1)
    # rounding grows with the width of these random weights: in a Llama of width 128 to 0.007
    assert np.allclose(runs[0][:, :2], runs[1][:, :2], rtol=0.003)


def test_a_recording_is_replayed_only_when_nobody_needs_its_memory(tmp_path, monkeypatch):
    replayed = []

    def record(run, examples):
        return lambda *inputs: replayed.append(inputs[0].shape[1]) or run(*inputs)
    monkeypatch.setattr(torch.cuda, 'make_graphed_callables', record)
    monkeypatch.setattr(torch.random, 'fork_rng', mock.MagicMock())
    monkeypatch.setattr(torch.cuda, 'reset_peak_memory_stats', lambda: None)
    model = small_model('gemma3', tmp_path).train()
    graphs.record_blocks(model.decoder)

    def forward(T, n):
        """Pass a row of T tokens; there are n replays in all."""
        tokens = torch.ones(1, T, dtype=torch.long)
        y = model(tokens, *whole_rows(tokens))
        assert len(replayed) == n
        return y
    model.eval()
    forward(4, 0).sum().backward()      # not in training
    model.train().zero_grad()
    first, second = forward(4, 1), forward(4, 1)    # the activations of the first are there
    first.sum().backward()
    forward(4, 1).sum().backward()                  # and here its gradients
    second.sum().backward()
    model.zero_grad()
    with torch.no_grad():
        forward(4, 1)
    for T, n in ((4, 2), (6, 3), (8, 3)):           # a third shape
        forward(T, n).sum().backward()
        model.zero_grad()
    assert replayed == [4, 4, 6]
    assert copy.deepcopy(model).decoder.graphs is None      # which would replay with these weights


@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
@pytest.mark.parametrize('more', [{}, {'master_weights': 'stochastic'},
                                  {'lora': True, 'lora_rank': 4, 'lora_dropout': 0.5}])
def test_recorded_passes_compute_what_the_blocks_do(more, tmp_path, monkeypatch):
    """Bitwise, of one and two passes per step, with one document per row and several."""
    reference_model('gemma3', tmp_path, **head_of_32('gemma3'))
    ends = []
    # the first run tunes the kernels: torch tunes one that two graphs share for each of them
    for most in (0, 0, 1e9):
        monkeypatch.setattr(graphs, 'MOST_WEIGHTS', most)
        torch.manual_seed(0)
        cfg = tiny_config(dtype='bfloat16', pack_len=128, micro_rows=2, lr=1e-3, **more)
        model = train.build_model(cfg, checkpoint.read_config(tmp_path), tmp_path, 'cuda')
        optimizer = train.build_optimizer(model, cfg)
        steps = [packing.pack(documents(i, lengths), 128, 2) for i, lengths in enumerate(
            ([100, 90], [60, 50, 40], [99, 98, 97, 96], [30, 20, 70, 80, 100], [9, 9, 9, 99]))]
        for packed in steps:
            train.train_step(model, optimizer, packed, cfg, 'cuda')
        ends.append([*model.parameters(), torch.randn(3, device='cuda')])
    assert all(map(torch.equal, *ends[1:]))
    assert len(model.decoder.graphs.recorded) == 2


def test_bad_input_gives_one_line(small_world, settings_file, tmp_path):
    folder, out = small_world[0], tmp_path / 'out'
    model = [f'--model={folder / "base"}', f'--out_dir={out}']
    for main, options, message in (
            (train.main, [], 'no config file given: python train.py configs/'),
            (train.main, [settings_file, f'--out_dir={folder}/base'], 'itself'),
            (train.main, [settings_file, f'--out_dir={folder}/tuned_bs05'], 'holds a finished run'),
            (evaluate.main, [*model, '--tasks=arc_eassy'], "did you mean 'arc_easy'. The tasks"),
            (evaluate.main, [*model, '--tasks=mmlu:a,mmlu:b'], "'mmlu:a' would be called 'mmlu'")):
        with pytest.raises(ValueError, match=rf'^.*{message}.*\Z'):
            main(options)
    assert not list(out.rglob('*.safetensors')) and not list(out.rglob('*.nanocal-tmp'))
