"""Calibration metrics of random predictions, compared with torchmetrics and netcal, on the CPU.

    python research/bench/metrics.py
    python research/bench/metrics.py --ours

Seconds, input checks included, for 14,042 questions with 4 options and for 1,000,000 with 10. Peers
that are not installed are left out.
"""

import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch

import metrics
import stats
from research.bench.common import Options, Script, method_table


@dataclass
class BenchConfig(Options):
    ours: bool = False              # ours alone


def bench(config):
    """Yield a table of seconds for each number of questions."""
    for n, k in ((14_042, 4), (1_000_000, 10)):
        yield {'n': n, 'k': k, 'seconds': measure(n, k, not config.ours)}


def measure(n, k, peers=True):
    """Return {measure: {method: seconds}} for n questions with k options."""
    rng = np.random.default_rng(0)
    probs = rng.dirichlet(np.full(k, 0.5), n)
    labels = rng.integers(0, k, n)
    small = n < 10 ** 5
    calls = {'report': {'ours': lambda: metrics.report(probs, labels)}}
    if small:
        calls['bootstrap, 1000 resamples'] = {'ours': lambda: stats.bootstrap(probs, labels)}
    calls |= {'ECE, 10 bins': {'ours': lambda: metrics.ece(probs, labels)},
              'MCE, 10 bins': {'ours': lambda: metrics.mce(probs, labels)}}
    if small:       # netcal holds an n x n matrix
        calls['MMCE'] = {'ours': lambda: metrics.mmce(probs, labels)}
    for peer in (torchmetrics_calls, netcal_calls) if peers else ():
        try:
            for name, method in peer(probs, labels).items():
                if name in calls:
                    calls[name][peer.__name__.removesuffix('_calls')] = method
        except ImportError as error:
            print(f'{error.name} is not installed')
    return {name: {method: seconds(call) for method, call in methods.items()}
            for name, methods in calls.items()}


def torchmetrics_calls(probs, labels):
    from torchmetrics.functional.classification import multiclass_calibration_error
    p, y = torch.from_numpy(probs), torch.from_numpy(labels)
    return {name: lambda norm=norm: multiclass_calibration_error(
        p, y, num_classes=probs.shape[1], n_bins=10, norm=norm)
        for name, norm in (('ECE, 10 bins', 'l1'), ('MCE, 10 bins', 'max'))}


def netcal_calls(probs, labels):
    import netcal.metrics
    return {'ECE, 10 bins': lambda: netcal.metrics.ECE(10).measure(probs, labels),
            'MCE, 10 bins': lambda: netcal.metrics.MCE(10).measure(probs, labels),
            'MMCE': lambda: netcal.metrics.MMCE().measure(probs, labels)}


def seconds(call):
    """Return the median time of three calls, after a warm-up call."""
    call()
    times = []
    for _ in range(3):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def view(table):
    return f'{table["n"]} x {table["k"]}, seconds', method_table(
        table['seconds'], [(method, method, '.4f') for method in (
            'ours', 'torchmetrics', 'netcal')], None)


script = Script(__file__, BenchConfig, bench, view, needs_gpu=False)

if __name__ == '__main__':
    script.main(sys.argv[1:])
