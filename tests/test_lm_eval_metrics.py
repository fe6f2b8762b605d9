"""results/lm_eval_metrics.py: our metrics in a task of the installed lm-evaluation-harness."""

import importlib.util
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import metrics
from common import HERE
from results import report, runs
from results.compare import FileConfig

RUN = """
import functools, sys
import numpy as np

sys.path[:0] = [sys.argv[1]]
from results import lm_eval_metrics     # first: its package `evaluate` has the name of our script
sys.path.remove(sys.argv[1])
import lm_eval.tasks
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model


@register_model('seeded')
class Seeded(LM):
    def __init__(self, **options):
        super().__init__()

    def loglikelihood(self, requests):
        random = np.random.default_rng(0)
        return [(-random.gamma(2.0) * len(request.args[1]) / 5, False) for request in requests]

    def loglikelihood_rolling(self, requests):
        raise NotImplementedError

    generate_until = loglikelihood_rolling


# without the index of lm-eval's own tasks, which takes 15 seconds
lm_eval.tasks.TaskManager = functools.partial(lm_eval.tasks.TaskManager, include_defaults=False)
sys.argv[1:2] = ['run']
cli_evaluate()
"""
TASK = """
task: world
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: answer
metric_list:
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec('lm_eval') is None, reason='needs lm-eval')
def test_metrics_of_a_task_are_those_of_our_report_on_its_samples(tmp_path):
    """With 2 to 5 choices of different length, as sums and divided by characters."""
    random = np.random.default_rng(1)
    rows = [{'question': f'{i}?', 'choices': [f'{"long " * random.integers(4)}{k}' for k in range(
        random.integers(2, 6))]} for i in range(300)]
    for row in rows:
        row['answer'] = int(random.integers(len(row['choices'])))
    (tmp_path / 'world.jsonl').write_text(''.join(f'{json.dumps(row)}\n' for row in rows))
    page = (HERE / 'docs' / 'metrics.md').read_text()
    listed = re.search(r'^task: arc_easy_calibration\nmetric_list:\n(.*?)```', page, re.S | re.M)[1]
    names = [measure.key + end for measure in metrics.MEASURES for end in ('', '_norm')]
    names += [f'{measure.key}_norm_boot_{end}' for measure in metrics.MEASURES if measure.tables
              for end in ('low', 'high')]
    lines = [f'  - {{metric: {name}, aggregation: {name}, higher_is_better: false}}\n'
             for name in names if f'{{metric: {name},' not in listed]
    (tmp_path / 'world.yaml').write_text(
        TASK.replace('FILE', str(tmp_path / 'world.jsonl')) + listed + ''.join(lines))
    (tmp_path / 'run.py').write_text(RUN)
    done = subprocess.run(
        [sys.executable, 'run.py', HERE, '--model', 'seeded', '--tasks', 'world', '--include_path',
         tmp_path, '--output_path', 'out', '--log_samples'], cwd=tmp_path, text=True,
        capture_output=True, env={**os.environ, 'HF_DATASETS_OFFLINE': '1', 'HF_HUB_OFFLINE': '1',
                                  'HF_HOME': str(tmp_path / 'cache')})
    assert done.returncode == 0, done.stderr[-3000:]
    (results,), (samples,) = (tmp_path.glob(f'out/**/{name}') for name in (
        'results_*.json', 'samples_*.jsonl'))
    theirs = json.loads(results.read_text())['results']['world']
    for end, norm in (('', 'token'), ('_norm', 'char')):
        run = runs.predicted_run(samples.parent, {'world': samples}, FileConfig(norm=norm))
        ours = report.summarize(run.file_samples['world'], run.results['world']['norm'])
        for measure in metrics.MEASURES:
            found = theirs[f'{measure.key}{end},none']
            assert found == pytest.approx(ours['pooled'][measure.key], abs=1e-9), measure.key
            if measure.tables and end:
                low, high = expected = ours['pooled']['intervals'].get(measure.key, [np.nan] * 2)
                ends = [theirs[f'{measure.key}{end}_boot_{word},none'] for word in ('low', 'high')]
                # the same questions in another order, so other resamples of them
                off = 0.15 * (high - low)
                assert ends == pytest.approx(expected, abs=off, nan_ok=True), measure.key
