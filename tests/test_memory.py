"""memory.py: the number of rows per forward pass"""

import contextlib
import re

import torch

import train
from research.bench.common import MODELS
from common import llama_config, run_scripts
from model import CausalLM
from runtime import build, memory
from runtime.config import read_assignments
from runtime.config_json import config_from_hf


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


def test_the_run_writes_down_what_it_chose_and_resumes_with_it(settings_file, tmp_path):
    command = [1, 'train.py', settings_file, '--eval=None', '--device=cpu', '--pictures=False',
               '--max_steps=2', '--micro_rows=None', f'--out_dir={tmp_path}']
    done = run_scripts(*command)
    assert done.returncode == 0, done.stderr
    chosen = int(re.search(r'rows of \d+ tokens per forward pass: (\d+)', done.stdout)[1])
    path = tmp_path / 'train_config.py'
    assert read_assignments(path)['micro_rows'][0] == chosen > 1
    (tmp_path / 'config.json').unlink()         # as if it had been killed
    path.write_text(path.read_text().replace(f'micro_rows = {chosen}', 'micro_rows = 3'))
    done = run_scripts(*command, '--resume')
    assert done.returncode == 0 and 'per forward pass: 3\n' in done.stdout, done.stderr
    done = run_scripts(*command, '--resume', '--micro_rows=2')
    assert done.returncode and 'micro_rows = 3, not 2' in done.stderr


def test_too_little_memory_in_the_first_step_halves_the_rows(tmp_path, capsys, monkeypatch):
    run = train.Run(train.TrainConfig(out_dir=str(tmp_path)), *[None] * 10)
    monkeypatch.setattr(memory, 'row_counts', lambda run: [])
    monkeypatch.setattr(memory, 'pick_micro_rows', lambda *_: 5)

    def tried(most, rows=None):
        """The numbers of rows that are tried where `most` fit; None: where a step fails."""
        tried, run.cfg.micro_rows = [], rows

        def step(run):
            tried.append(run.cfg.micro_rows)
            if run.cfg.micro_rows > most:
                raise torch.OutOfMemoryError('CUDA out of memory')
        with contextlib.suppress(torch.OutOfMemoryError):
            memory.fit_into_memory(step, run)
            return tried
        return [*tried, None]
    assert tried(2) == [5, 2] and 'again with 2 rows' in capsys.readouterr().out
    assert tried(0) == [5, 2, 1, None]          # one row does not fit either
    assert tried(2, rows=4) == [4, None]        # a number that was set is kept
