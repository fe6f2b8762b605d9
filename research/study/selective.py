"""Does smoothing harm abstention, and does a normalized score mend it? See PLAN.md.

    python research/study/selective.py          # reads out/study/real, writes results/real

It reads the samples of the runs of research/study/real.py and needs no model. Each question has two
confidences: the largest probability, and the largest score divided by the p-norm of the question's
scores (scaling.normalized_max), with the p of least AURC on the validation questions of ARC-Easy.
selective.csv has a line per run and task; selective.md the means over seeds with half of their 95 %
intervals, and the paired tests of the plan.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import metrics
from compare import scaling
from results.report import predictions
from results.samples import read_splits
from results.tables import csv_text
from runtime import cli
from runtime.errors import ConfigError
from runtime.ownership import write_text
from research.common import command_line
from research.study.claims import MEANS, TESTS, Numbers, paired_tests, setting_lines, write_page
from research.study.real_table import FOLDER, OUT, PLAIN, SETTINGS, SMOOTHED

TASKS = ('arc_easy', 'arc_challenge')
POWERS = (1, 2, 3, 4, 6, 8)
KEYS = {'auroc': metrics.auroc, 'aurc': metrics.aurc,
        'risk': lambda *rows: 1 - metrics.accuracy_at_coverage(*rows)}     # at coverage 0.5


def read_lines(root):
    """Return a line per run, task and confidence, with the metrics of KEYS."""
    lines = []
    for path in sorted(root.rglob('samples.jsonl')):
        *_, seed, name = ('', *path.parent.relative_to(root).parts)
        test, held_out = read_splits(path)
        fit = predictions(held_out['arc_easy'], 'token')
        p = min(POWERS, key=lambda p: metrics.aurc(*with_norm(fit, p)))
        for task in TASKS:
            rows = predictions(test[task], 'token')
            for confidence, pair in (('largest', (rows.probs, rows.labels)),
                                     ('normalized', with_norm(rows, p))):
                lines.append({'run': name, 'seed': seed.removeprefix('seed-') or '0', 'task': task,
                              'confidence': confidence, 'p': p if confidence != 'largest' else ''}
                             | {key: f'{measure(*pair):.6g}' for key, measure in KEYS.items()})
    return lines


def with_norm(rows, p):
    """Return (normalized confidence [N], correct [N]) of Predictions."""
    return scaling.normalized_max(rows.scores, p), metrics.top_label(rows.probs, rows.labels)[1]


def means(numbers):
    """Return the lines of the table of all settings."""
    columns = [(task, key, x) for task in TASKS for key in KEYS for x in ('largest', 'normalized')]
    return [('setting', *(' '.join(column).replace('_', ' ') for column in columns)),
            *setting_lines(numbers, SETTINGS, [(key, {'task': task, 'confidence': x})
                                               for task, key, x in columns])]


def tests(numbers):
    """Return the lines of the tests of the plan; a seed counts if it has both runs."""
    planned = []
    for task in TASKS:
        for key in KEYS:
            plain, smoothed = ({x: numbers.of(run, key, task=task, confidence=x)
                                for x in ('largest', 'normalized')} for run in (PLAIN, SMOOTHED))
            planned += [((task, key, title), values) for title, values in (
                ('smoothing 0.1 - 0', smoothed['largest'] - plain['largest']),
                ('normalized - largest, smoothing 0.1',
                 smoothed['normalized'] - smoothed['largest']),
                ('normalized - largest, smoothing 0', plain['normalized'] - plain['largest']))]
    return paired_tests(('task', 'metric', 'difference', 'seeds', 'mean'), planned, '+.4f')


def main():
    options = command_line(__doc__, root=FOLDER, out_dir={'type': Path, 'default': OUT})
    if not (lines := read_lines(options.root)):
        raise ConfigError(f'{options.root} has no samples.jsonl; research/study/real.py makes them')
    options.out_dir.mkdir(parents=True, exist_ok=True)
    write_text(options.out_dir / 'selective.csv', csv_text(lines))
    numbers = Numbers(lines, {'task': '', 'confidence': ''})
    write_page(options.out_dir / 'selective.md', __doc__.splitlines()[0],
               (f'{MEANS}; risk is the error of the surer half.', means(numbers)),
               (f'{TESTS} (PLAN.md).', tests(numbers)))


if __name__ == '__main__':
    with cli.one_line_errors():
        main()
