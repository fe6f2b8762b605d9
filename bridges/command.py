"""The command `nanocal` of the installed package: prediction files of any origin, with numpy alone.

    nanocal metrics predictions.csv
    nanocal compare base.csv tuned.csv --out_dir=out/compare
    nanocal report predictions.csv --out_dir=out/report

In a clone it is `python -m bridges.command`.
"""

import math
import platform
import sys
from array import array
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

if __package__ == 'nanocal':    # installed as nanocal/__main__.py, beside the folders of a clone
    sys.path.insert(0, str(Path(__file__).parent))

import metrics
import stats
from compare import compare, significance
from results import report
from compare.compare import FileConfig, read_sources
from results.evaluation import write_results
from bridges.harness_files import harness_task
from bridges.prediction_files import read_predictions
from compare.runs import SHARED_ID, find_prediction_files, predicted_run, question_of
from results.samples import DIAGRAM, OUTPUTS, SCALING, first_id, grid
from results.columns import few_rows_note
from runtime import cli
from runtime.config import require_range
from runtime.errors import ConfigError, DataError
from runtime.ownership import INPUTS, check_free, claim, lock, note_inputs, rename_old
from runtime.version import __version__

METRICS_USAGE = """\
usage: nanocal metrics FILE [...] [--key=value ...]         in a clone: python metrics.py FILE [...]

Print every calibration metric of files of predictions. Each line of a file is a JSON object of one
of these forms:

  {"probs": [0.7, 0.2, 0.1], "answer": 0}     answer, or label: index of the correct option, its
                                              letter, or its text in "options": ["red", ...]
  {"log_probs": [-3.1, -4.0], "answer": 1}    divided by "n_tokens": [2, 3] if given; then softmax
  {"confidence": 0.8, "correct": true}        the prediction alone; "80 %" is read, too
  {"answers": ["B", "b", "C"], "answer": "B"} several written answers: the share of the most
                                              frequent; with "response" and "correct" instead of
                                              "answer", the share that equals the response
  {"correct": true}                           without a confidence: accuracy alone
  or of samples_<task>_<date>.jsonl, which lm_eval --log_samples writes; a question that is repeated
  there counts once. A .json file may hold a list of such objects

A log of Inspect, .eval or .json, has a task for each scorer. A confidence is what the scorer wrote
in the metadata of its score as "confidence", or as NAME in --columns=confidence=NAME; or, for
choice(), the probability of the letter, if the log has it by --logprobs.

.csv, .tsv, .parquet and .arrow files have these keys as columns, probs_0, probs_1, ... for the
numbers of a list, or prob_A, prob_B, .... Names may be in capitals; --columns=answer=gold,probs=p
reads the column gold as answer, and p_0, p_1, ... as probs. Rows with another "split" than "test"
are left out. Each "task" of a file has a report of its own, and so has each group of one call of
lm_eval, such as mmlu. Files may be .gz.

examples: nanocal metrics out/base/samples.jsonl
          nanocal metrics --norm=char out/model/samples_hellaswag_*.jsonl
          nanocal metrics uqlm.csv \\
              --columns=confidence=exact_match,confidence=cosine_sim,correct=response_correct"""

REPORT_USAGE = """\
usage: nanocal report FILE [...] [--key=value ...]

Write report.html, results.json, .md, .csv, .tex and a reliability diagram of files of predictions,
in a form that `nanocal metrics --help` lists. The files are those of one model.

example: nanocal report predictions.csv --out_dir=out/report"""


class ReportInput:
    """The numbers of a task's samples that metrics.report reads, in 8 bytes each."""

    def __init__(self):
        self.probs, self.scores = array('d'), array('d')
        self.labels, self.n_options = array('q'), array('q')
        self.ids, self.first_ids = array('q'), array('q')       # hashes
        self.keys, self.questions = array('q'), array('q')

    def append(self, sample):
        """Add a sample of `read_predictions`."""
        self.ids.append(hash(sample['id']))
        self.first_ids.append(hash(first_id(sample['id'])))
        self.keys.append(hash((sample['id'], sample['language'])))
        self.questions.append(hash(repr(question_of(sample))))
        if 'log_probs' not in sample:
            self.probs.append(sample.get('confidence', math.nan))
            self.labels.append(sample['correct'])
            return
        scores = sample['log_probs']
        self.scores.extend(scores)
        self.probs.extend(sample.get('probs', [math.nan] * len(scores)))
        self.labels.append(sample['answer'])
        self.n_options.append(len(scores))

    def predictions(self, task):
        """Return the Predictions; DataError if questions of `task` that differ have the same id."""
        order = np.lexsort((self.questions, self.keys))     # rows with one id side by side
        same_id, same_question = (np.diff(np.array(x)[order]) == 0
                                  for x in (self.keys, self.questions))
        for i in np.flatnonzero(same_id & ~same_question)[:1]:
            first, second = sorted(order[i:i + 2] + 1)
            raise DataError(f'{task}: the rows {first} and {second} have one id, for different '
                            f'questions; only {SHARED_ID}')
        ids = np.where(np.isin(self.first_ids, self.ids), self.first_ids, self.ids)
        questions = stats.question_index(ids, len(ids))
        is_graded = not self.n_options and math.isnan(self.probs[0])
        arrays = self.arrays()
        return report.Predictions(np.ones(len(self.ids)) if is_graded else arrays[0], *arrays[1:],
                                  questions=questions, is_graded=is_graded)

    def arrays(self):
        """Return probs, labels, n_options and scores, the arguments of metrics.report."""
        labels, n_options = np.array(self.labels), np.array(self.n_options)
        if not len(n_options):
            return np.array(self.probs), labels, None, None
        is_option = np.arange(n_options.max()) < n_options[:, None]
        probs, scores = np.zeros(is_option.shape), np.full(is_option.shape, -np.inf)
        probs[is_option], scores[is_option] = self.probs, self.scores
        unstated = np.isnan(probs[:, 0])
        if not unstated.any():
            return probs, labels, n_options, None
        probs[unstated] = metrics.softmax(scores[unstated])
        return probs, labels, n_options, scores


def print_metrics(argv):
    """Print every metric of each task in the files of predictions that a command line names."""
    cfg, sources = read_sources(FileConfig, argv, METRICS_USAGE)
    if not sources:
        raise ConfigError('metrics: name a file of predictions; --help lists the forms of a file')
    tasks = defaultdict(ReportInput)        # by (file or call of lm_eval, task)
    for path in dict.fromkeys(sources):
        date = harness_task(path)[2]
        source = f'{path.parent}, {date}' if date else str(path)
        for sample, _ in read_predictions(path, cfg):
            tasks[source, sample['task']].append(sample)
    several = len({source for source, _ in tasks}) > 1
    for (source, task), numbers in tasks.items():
        title = ': '.join(filter(None, (several and source, task)))
        predicted = numbers.predictions(': '.join(filter(None, (source, task))))
        measured, notes = predicted.report(), []
        if not predicted.is_graded:
            calibrated = significance.consistency_test(*metrics.top_label(*predicted[:2]),
                                                       n_resamples=100)
            notes = ['a calibrated model with these confidences has an ECE of {expected:.4f} on '
                     'average, up to {p95:.4f} in 95 % of samples'.format(**calibrated),
                     few_rows_note(measured, 'rows')]
        print(*filter(None, (title, measured, *notes)), sep='\n')
        if title:
            print()


@dataclass
class ReportConfig(FileConfig):
    fit_temperature: bool = False             # also report temperature and Platt scaling
    n_bootstrap: int = 1000                   # resamples for the intervals; 0: none
    seed: int = 0                             # of the bootstrap
    pictures: bool = True                     # draw reliability diagrams
    out_dir: str = 'out/report'               # folder of the report
    overwrite: bool = False                   # rename an earlier out_dir to out_dir.1, or .2, ...


def write_report(argv):
    """Write the report of files of predictions that a command line names, and print it."""
    cfg, sources = read_sources(ReportConfig, argv, REPORT_USAGE)
    require_range(cfg, 0, math.inf, 'n_bootstrap', 'seed')
    if not sources:
        raise ConfigError('report: name a file of predictions; --help lists the settings')
    INPUTS.clear()
    note_inputs(*sources)
    runs = [predicted_run(folder, files, cfg)
            for folder, files in find_prediction_files(sources).items()]
    for run in runs:
        for task in [task for task, rows in run.file_samples.items()
                     if not rows[0].keys() & {'confidence', 'log_probs'}]:
            del run.file_samples[task], run.results[task]
            print(f'{task} is left out: a report needs confidences')
    samples = {task: rows for run in runs for task, rows in run.file_samples.items()}
    if sum(len(run.file_samples) for run in runs) > len(samples):
        raise ConfigError('report: two files have the same task, as those of two models; use '
                          'compare, or give each row the name of its task')
    if not samples:
        raise ConfigError(f'report: {", ".join(map(str, sources))} holds no '
                          f'{"confidences" if runs else "samples of lm_eval"}; name a file of '
                          f'predictions')
    results = {task: result for run in runs for task, result in run.results.items()}
    for task, result in results.items():
        if cfg.fit_temperature and len(samples[task]) < 2:
            raise DataError(f'{task}: fit_temperature needs two rows or more')
        result |= report.summarize(samples[task], 'token', n_bootstrap=cfg.n_bootstrap,
                                   fit=cfg.fit_temperature, seed=cfg.seed, all_metrics=True)
        result.pop('option_mass', None)     # of given probabilities it is 1
    out_dir = Path(cfg.out_dir).expanduser()
    with lock(out_dir):
        if cfg.overwrite:
            rename_old(out_dir)
        names = [*OUTPUTS[2:], DIAGRAM, *[SCALING] * cfg.fit_temperature, *map(grid, results)]
        check_free(out_dir, *names)
        if earlier := [name for name in (*OUTPUTS, *names) if (out_dir / name).exists()]:
            raise ConfigError(f'{out_dir} holds an earlier report or evaluation, {earlier[0]}; '
                              f'--overwrite renames that folder, or choose another --out_dir')
        claim(out_dir, *names)
        model = ', '.join(run.model for run in runs)
        versions = {'nanocal': __version__, 'python': platform.python_version(),
                    'numpy': np.__version__}
        write_results({'schema': report.SCHEMA, 'config': asdict(cfg) | {'model': model},
                       'seed': cfg.seed, 'versions': versions, 'tasks': results},
                      samples, samples, cfg.pictures, out_dir)
    print(report.to_text(results, results))


COMMANDS = {
    'metrics': print_metrics,
    'compare': lambda argv: compare.main(argv, compare.USAGE.replace(
        'python evaluate.py --compare', 'nanocal compare').replace(
        'python metrics.py', 'nanocal metrics')),
    'report': write_report}


USAGE = (f'usage: nanocal {"|".join(COMMANDS)} FILE [...] [--key=value ...]\n'
         f'nanocal COMMAND --help lists its settings, nanocal metrics --help the forms of a FILE')


def main():
    """Run the command that the first argument names."""
    cli.begin()
    with cli.one_line_errors():
        name = ''.join(sys.argv[1:2])
        if name == '--version':
            return print(__version__)
        if name in ('--help', '-h', 'help'):
            return print(__doc__.strip() + f'\n\n{USAGE}')
        if name not in COMMANDS:
            raise SystemExit(USAGE)
        COMMANDS[name](sys.argv[2:])


if __name__ == '__main__':
    main()
