"""The command `nanocal` of the installed package: prediction files of any origin, with numpy alone.

    nanocal metrics predictions.csv
    nanocal compare base.csv tuned.csv --out_dir=out/compare
    nanocal report predictions.csv --out_dir=out/report

In a clone it is `python -m results.command`.
"""

import math
import platform
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

if __package__ == 'nanocal':    # installed as nanocal/__main__.py, beside the folders of a clone
    sys.path.insert(0, str(Path(__file__).parent))

from results import compare, prediction_files, report
from results.compare import FileConfig, read_sources
from results.evaluation import write_results
from results.runs import find_prediction_files, predicted_run
from results.samples import DIAGRAM, GRID, OUTPUTS
from runtime import cli
from runtime.config import require_range
from runtime.errors import ConfigError, DataError
from runtime.ownership import claim, lock
from runtime.version import __version__

REPORT_USAGE = """\
usage: nanocal report FILE [...] [--key=value ...]

Write report.html, results.json, .md, .csv, .tex and a reliability diagram of files of predictions,
in a form that `nanocal metrics --help` lists. The files are those of one model.

example: nanocal report predictions.csv --out_dir=out/report"""


@dataclass
class ReportConfig(FileConfig):
    fit_temperature: bool = False             # also report temperature and Platt scaling
    n_bootstrap: int = 1000                   # resamples for the intervals; 0: none
    seed: int = 0                             # of the bootstrap
    pictures: bool = True                     # draw reliability diagrams
    out_dir: str = 'out/report'               # folder of the report


def write_report(argv):
    """Write the report of files of predictions that a command line names, and print it."""
    cfg, sources = read_sources(ReportConfig, argv, REPORT_USAGE)
    require_range(cfg, 0, math.inf, 'n_bootstrap', 'seed')
    if not sources:
        raise ConfigError('report: name a file of predictions; --help lists the settings')
    runs = [predicted_run(folder, files, cfg)
            for folder, files in find_prediction_files(sources).items()]
    samples = {task: rows for run in runs for task, rows in run.file_samples.items()}
    if sum(len(run.file_samples) for run in runs) > len(samples):
        raise ConfigError('report: two files have the same task, as those of two models; use '
                          'compare, or give each row the name of its task')
    results = {task: result for run in runs for task, result in run.results.items()}
    for task, result in results.items():
        if cfg.fit_temperature and len(samples[task]) < 2:
            raise DataError(f'{task}: fit_temperature needs two rows or more')
        result |= report.summarize(samples[task], 'token', n_bootstrap=cfg.n_bootstrap,
                                   fit=cfg.fit_temperature, seed=cfg.seed)
        result.pop('option_mass', None)     # of given probabilities it is 1
    out_dir = Path(cfg.out_dir).expanduser()
    with lock(out_dir):
        if (out_dir / OUTPUTS[0]).exists():
            raise ConfigError(f'{out_dir} holds an evaluation; choose another --out_dir')
        claim(out_dir, *OUTPUTS[2:], DIAGRAM, *map(GRID.format, results))
        model = ', '.join(run.model for run in runs)
        versions = {'nanocal': __version__, 'python': platform.python_version(),
                    'numpy': np.__version__}
        write_results({'schema': report.SCHEMA, 'config': asdict(cfg) | {'model': model},
                       'seed': cfg.seed, 'versions': versions, 'tasks': results},
                      {}, results, samples, samples, cfg.pictures, out_dir)
    print(report.to_text(results, results))


COMMANDS = {
    'metrics': lambda argv: prediction_files.main(argv, 'nanocal metrics'),
    'compare': lambda argv: compare.main(argv, compare.USAGE.replace(
        'python evaluate.py --compare', 'nanocal compare').replace(
        'python metrics.py', 'nanocal metrics')),
    'report': write_report}


def main():
    """Run the command that the first argument names."""
    cli.begin()
    with cli.one_line_errors():
        name = ''.join(sys.argv[1:2])
        if name == '--version':
            return print(__version__)
        if name not in COMMANDS:
            raise SystemExit(f'usage: nanocal {{{",".join(COMMANDS)}}} FILE [...]; nanocal metrics '
                             f'--help lists the forms of a FILE')
        COMMANDS[name](sys.argv[2:])


if __name__ == '__main__':
    main()
