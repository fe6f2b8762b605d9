"""memory.py: the number of rows per forward pass"""

import contextlib
import gc
import re
from unittest import mock

import pytest
import torch

import train
from research.bench.common import MODELS
from common import documents, llama_config, log_of
from model import CausalLM
from runtime import build, memory
from runtime.config import read_assignments
from runtime.config_json import config_from_hf
from runtime.errors import ConfigError
from speed import graphs


OTHERS_HAVE_MEMORY = memory.others_have_memory


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Other tests on the same GPU are no reason to wait."""
    monkeypatch.setattr(memory, 'others_have_memory', lambda: False)


def picked(monkeypatch, counts, gib=80.0, shape='llama32_1b', **settings):
    """Rows per pass on a GPU with so many free GiB, for steps of these numbers of rows."""
    monkeypatch.setattr(torch.cuda, 'mem_get_info', lambda device: (gib * 2 ** 30, 80 * 2 ** 30))
    cfg = train.TrainConfig(**{'pack_len': 2048, 'max_length': 2048} | settings)
    return memory.pick_micro_rows(cfg, config_from_hf(MODELS[shape]), 'cuda', counts)


def test_a_step_takes_one_pass_where_it_fits(monkeypatch):
    assert picked(monkeypatch, [4] * 16) == 4
    assert picked(monkeypatch, [1] * 16) == 1
    assert picked(monkeypatch, [4] * 15 + [5]) == 4        # mostly one pass, once 3 empty rows
    assert picked(monkeypatch, [5] * 16) == 5              # passes of 4 would have 3 empty rows
    assert picked(monkeypatch, [400] * 16) in range(10, 60)     # longer passes are hardly faster
    # less memory means fewer rows
    rows = [picked(monkeypatch, [8] * 16, gib) for gib in (80, 40, 28, 10, 0)]
    assert rows == sorted(rows, reverse=True) and rows[0] == 8 and rows[-1] == rows[-2] == 1
    assert picked(monkeypatch, [8] * 16, shape='llama31_8b', master_weights='stochastic') < 8
    assert (picked(monkeypatch, [8] * 16, 30, checkpoint_activations=True)
            > picked(monkeypatch, [8] * 16, 30))


def test_a_pass_is_recorded_if_three_of_them_fit_into_memory(monkeypatch):
    for gib, recorded in ((1.9, True), (1.7, False)):   # 1.65 are for the logits
        monkeypatch.setattr(torch.cuda, 'mem_get_info', lambda device, gib=gib: (gib * 1e9, 80e9))
        cfg = train.TrainConfig(micro_rows=10)
        model = build.prepare(CausalLM(llama_config()).bfloat16(), cfg, 'cuda')
        assert hasattr(model.decoder, 'graphs') == recorded


def test_the_run_writes_down_what_it_chose_and_resumes_with_it(settings_file, tmp_path, capsys):
    command = [settings_file, '--eval=None', '--device=cpu', '--pictures=False', '--max_steps=2',
               '--micro_rows=None', f'--out_dir={tmp_path}']
    train.main(command)
    printed = capsys.readouterr().out
    chosen = int(re.search(r'rows of \d+ tokens per forward pass: (\d+)', printed)[1])
    path = tmp_path / 'train_config.py'
    assert read_assignments(path)['micro_rows'][0] == chosen > 1
    (tmp_path / 'config.json').unlink()         # as if it had been killed
    path.write_text(path.read_text().replace(f'micro_rows = {chosen}', 'micro_rows = 3'))
    train.main([*command, '--resume'])
    assert 'per forward pass: 3\n' in capsys.readouterr().out
    with pytest.raises(ConfigError, match='micro_rows = 3, not 2'):
        train.main([*command, '--resume', '--micro_rows=2'])


LACKING = torch.OutOfMemoryError('CUDA out of memory')


@pytest.mark.parametrize('picked, rows, most, tried', [
    ([5], None, 2, [5, 2]),
    ([5], None, 0, [5, 2, 1, None]),        # None: one row does not fit either
    ([5], 4, 2, [4, None]),                 # a number that was set is kept
    ([LACKING, 3], None, 4, [3])])          # on a full GPU even asking what is free fails
def test_too_little_memory_in_the_first_step_halves_the_rows(picked, rows, most, tried, tmp_path,
                                                             monkeypatch):
    run = train.Run(train.TrainConfig(out_dir=str(tmp_path), micro_rows=rows), *[None] * 10)
    monkeypatch.setattr(memory, 'row_counts', lambda run: [])
    monkeypatch.setattr(memory, 'pick_micro_rows', mock.Mock(side_effect=picked))
    monkeypatch.setattr(memory, 'others_have_memory', lambda: LACKING in picked)
    monkeypatch.setattr(memory, 'WAIT', 0)
    numbers = []

    def step(run):
        numbers.append(run.cfg.micro_rows)
        if run.cfg.micro_rows > most:
            raise LACKING
    with pytest.raises(torch.OutOfMemoryError) if None in tried else contextlib.nullcontext():
        memory.fit_into_memory(step, run)
    assert numbers == [n for n in tried if n]


@pytest.mark.parametrize('results, others, n_pauses', [
    ([LACKING, LACKING, 'done'], [True, True], 2),
    ([LACKING, LACKING], [True, False], 1), ([LACKING], [False], 0),
    ([LACKING] * 9, [True] * 9, 4),     # no longer than PATIENCE
    ([MemoryError()], [True], 0), ([RuntimeError('a bug')], [True], 0)])
def test_what_lacks_memory_waits_as_long_as_others_have_it(results, others, n_pauses, capsys,
                                                           monkeypatch):
    pauses, last = [], results[-1]
    monkeypatch.setattr(memory, 'others_have_memory', mock.Mock(side_effect=others))
    monkeypatch.setattr(memory, 'PATIENCE', 3 * memory.WAIT)
    monkeypatch.setattr(memory.time, 'sleep', pauses.append)
    monkeypatch.setattr(memory.time, 'monotonic', lambda: sum(pauses))
    with contextlib.nullcontext() if last == 'done' else pytest.raises(type(last)):
        assert memory.as_memory_allows(mock.Mock(side_effect=results)) == 'done'
    assert pauses == [memory.WAIT] * n_pauses
    assert capsys.readouterr().out.count('other programs have a part') == (n_pauses > 0)


@pytest.mark.parametrize('initialized, free, expected', [
    (False, 0, False), (True, 70, False), (True, 66, True), (True, None, True)])
def test_an_eighth_of_the_gpu_is_what_others_have(initialized, free, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_initialized', lambda: initialized)
    monkeypatch.setattr(torch.cuda, 'mem_get_info', mock.Mock(
        side_effect=[RuntimeError('no memory to ask') if free is None else (free << 30, 80 << 30)]))
    monkeypatch.setattr(torch.cuda, 'memory_reserved', lambda: 3 * 2 ** 30)
    assert OTHERS_HAVE_MEMORY() == expected


# ---- A step that lacks memory is taken again -----------------------------------------------------

def step_gradients(model, optimizer, packed, micro_rows):
    """Return the gradients of a step, its loss and the rows per pass that the settings end with."""
    cfg, gradients = train.TrainConfig(micro_rows=micro_rows), []

    def step(scale):
        gradients.extend(g.double().flatten() for g in optimizer.gradients())
        optimizer.zero_grad()
    optimizer.step = step
    values = train.train_step(model, optimizer, packed, cfg, str(model.head.device))
    return torch.cat(gradients), values['loss'].item(), cfg.micro_rows


@contextlib.contextmanager
def little_memory(model, most, where='forward', n_fit=1):
    """Let passes of more than `most` rows run out of memory, all but the first `n_fit` of them."""
    calls, fail = [], mock.Mock(side_effect=LACKING)

    def check(module, inputs, hidden):
        calls.append(len(hidden))
        if len(hidden) > most and sum(n > most for n in calls) > n_fit:
            fail() if where == 'forward' else hidden.register_hook(fail)
    with model.register_forward_hook(check):
        yield calls


@pytest.mark.parametrize('dtype, kind', [(torch.float32, 'exact'), (torch.bfloat16, 'exact'),
                                         (torch.bfloat16, 'stochastic')])
@pytest.mark.parametrize('where', ['forward', 'backward'])
def test_a_step_that_lacks_memory_is_taken_again_with_fewer_rows(dtype, kind, where, capsys):
    torch.manual_seed(0)
    model = CausalLM(llama_config(vocab_size=211))
    model.init_weights()
    model = model.to(dtype)
    optimizer = train.build_optimizer(model, train.TrainConfig(master_weights=kind))
    packed = train.pack(documents(0, [30] * 12), 32, 1)
    right, loss, _ = step_gradients(model, optimizer, packed, 6)
    with little_memory(model, 3, where) as calls:
        again, loss_again, rows = step_gradients(model, optimizer, packed, 6)
    assert calls == [6, 6] + [3] * 4 and rows == 3      # the gradients of the first pass are gone
    assert 'again with 3 rows' in capsys.readouterr().out
    assert (again - right).norm() < (1e-5 if dtype == torch.float32 else 2e-2) * right.norm()
    assert loss_again == pytest.approx(loss, rel=1e-4)
    with little_memory(model, 0, where), pytest.raises(torch.OutOfMemoryError):
        step_gradients(model, optimizer, packed, 8)     # 8, 4, 2 and 1 rows
    assert capsys.readouterr().out.count('again with') == 3


def test_a_run_survives_a_step_that_lacks_memory(settings_file, tmp_path, monkeypatch):
    def build(*arguments):
        model = build_model(*arguments)
        stack.enter_context(little_memory(model, 2, n_fit=6))
        return model
    build_model = train.build_model
    monkeypatch.setattr(train, 'build_model', build)
    with contextlib.ExitStack() as stack:
        train.main([settings_file, '--eval=None', '--device=cpu', '--pictures=False',
                    '--pack_len=32', '--max_length=32', '--micro_rows=4', f'--out_dir={tmp_path}'])
    assert [record['micro_rows'] for record in log_of(tmp_path)] == [4] + [2] * 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
def test_a_step_fits_into_a_small_part_of_a_gpu(capsys):
    """Real errors of the allocator, with compiled and recorded blocks."""
    torch.manual_seed(0)
    cfg = train.TrainConfig(pack_len=1024, micro_rows=32)
    model = CausalLM(llama_config(vocab_size=211, hidden_size=256, intermediate_size=512))
    model.init_weights()
    model = build.prepare(model.cuda().bfloat16(), cfg, 'cuda')
    optimizer = train.build_optimizer(model, cfg)
    packed = train.pack(documents(0, [1024] * 32), 1024, 1)
    right, _, _ = step_gradients(model, optimizer, packed, 32)
    model.decoder.graphs = None
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    step_gradients(model, optimizer, packed, 32)
    needed = torch.cuda.max_memory_reserved() - before
    gc.collect()
    torch.cuda.empty_cache()
    graphs.record_blocks(model.decoder)     # recording the first shape fails
    limit = torch.cuda.memory_reserved() + 0.7 * needed
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.mem_get_info()[1])
    try:
        again, _, rows = step_gradients(model, optimizer, packed, 32)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert rows < 32 and 'again with' in capsys.readouterr().out
    assert (again - right).norm() < 2e-2 * right.norm()
