"""The calibration reports of a training run: its model before and after, on the tasks of cfg.eval.

train.py opens this room for runs with `eval`, and nothing here is needed to train. `run` is a
train.Run.
"""

import json
from dataclasses import replace
from pathlib import Path

from evaluate import evaluate, load_tasks
from results.report import print_report
from results.samples import OUTPUTS as OUTPUTS
from runtime.parallel import barrier, first_process_first


def load_report_tasks(run):
    """Return {label: Task} of cfg.eval; raise ConfigError or DataError for a bad task."""
    with first_process_first():
        return load_tasks(report_config(run.cfg, run.base, run.out_dir))


def calibration_report(run, tasks, model_folder, out_dir):
    """Evaluate a saved model on `tasks` into `out_dir`, if not yet there; return the results."""
    evaluate(model_folder, run.tokenizer, tasks, report_config(run.cfg, model_folder, out_dir),
             out_dir)
    barrier()
    return json.loads((out_dir / 'results.json').read_text(encoding='utf-8'))


def report_config(cfg, model_folder, out_dir):
    """Return cfg.eval with what the run decides."""
    return replace(cfg.eval, model=str(model_folder), out_dir=str(out_dir), device=cfg.device,
                   dtype=cfg.dtype, seed=cfg.seed,
                   add_bos=cfg.add_bos if cfg.eval.add_bos is None else cfg.eval.add_bos)


def print_results(cfg, results):
    """Print the results that `train_and_report` returned."""
    folders = {'before': Path(cfg.out_dir) / 'before', 'after': Path(cfg.out_dir)}
    print_report({name: (result, folders[name]) for name, result in results.items()},
                 cfg.out_dir, cfg.eval.pictures)
