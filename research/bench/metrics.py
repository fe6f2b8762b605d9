"""Calibration metrics of random predictions, compared with torchmetrics and netcal, on the CPU.

    python research/bench/metrics.py

Seconds, input checks included, for 14,042 questions with 4 options and for 1,000,000 with 10.
"""

import statistics
import sys
import timeit
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch

import metrics
import stats
from research.bench.common import Options, Script, section


def bench(config):
    """Yield a table of seconds for each number of questions."""
    for n, k in ((14_042, 4), (1_000_000, 10)):
        yield {'n': n, 'k': k, 'seconds': measure(n, k, not config.ours)}


def measure(n, k, peers=True):
    """Return {measure: {method: seconds}} for n questions with k options."""
    rng = np.random.default_rng(0)
    probs = rng.dirichlet(np.full(k, 0.5), n)
    labels = rng.integers(0, k, n)
    libraries = {'ours': ours} | ({'torchmetrics': torchmetrics, 'netcal': netcal} if peers else {})
    measured = {}
    for library, functions in libraries.items():
        try:
            calls = functions(probs, labels)
        except ImportError as error:
            print(f'{error.name} is not installed')
            continue
        for name, call in calls.items():
            if n < 10 ** 5 or name not in ('bootstrap, 1000 resamples', 'MMCE'):    # of n x n
                measured.setdefault(name, {})[library] = seconds(call)
    return measured


def ours(probs, labels):
    return {'report': lambda: metrics.report(probs, labels),
            'bootstrap, 1000 resamples': lambda: stats.bootstrap(probs, labels),
            'ECE, 10 bins': lambda: metrics.ece(probs, labels),
            'MCE, 10 bins': lambda: metrics.mce(probs, labels),
            'MMCE': lambda: metrics.mmce(probs, labels)}


def torchmetrics(probs, labels):
    from torchmetrics.functional.classification import multiclass_calibration_error
    p, y = torch.from_numpy(probs), torch.from_numpy(labels)
    return {name: lambda norm=norm: multiclass_calibration_error(
        p, y, num_classes=probs.shape[1], n_bins=10, norm=norm)
        for name, norm in (('ECE, 10 bins', 'l1'), ('MCE, 10 bins', 'max'))}


def netcal(probs, labels):
    import netcal.metrics
    return {'ECE, 10 bins': lambda: netcal.metrics.ECE(10).measure(probs, labels),
            'MCE, 10 bins': lambda: netcal.metrics.MCE(10).measure(probs, labels),
            'MMCE': lambda: netcal.metrics.MMCE().measure(probs, labels)}


def seconds(call):
    """Return the median time of three calls, after a warm-up call."""
    call()
    return statistics.median(timeit.repeat(call, number=1, repeat=3))


def view(table):
    return section('metrics', table, table['seconds'])


script = Script(__file__, Options, bench, view, needs_gpu=False)

if __name__ == '__main__':
    script.main(sys.argv[1:])
