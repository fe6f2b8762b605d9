"""Cells with the values of metrics, their columns, and notes on them."""

import inspect
import re

import metrics

PRINTED = {measure.key: measure for measure in metrics.PRINTED}


def measure_of(key):
    """Return the row of metrics.MEASURES with this key; KeyError if there is none."""
    return PRINTED.get(key) or {measure.key: measure for measure in metrics.MEASURES}[key]


def title_of(key):
    """Return the title of the column of a metric."""
    return measure_of(key).title


class Heading(str):
    """The title of a column with the values of a metric; `mark_best` reads higher_is_better.

    definition: the first paragraph on the metric, for results/page.py
    """

    def __new__(cls, key, title=None):
        measure = measure_of(key)
        heading = super().__new__(cls, measure.title if title is None else title)
        heading.higher_is_better = measure.higher_is_better
        text = inspect.getdoc(getattr(measure.function, 'func', measure.function))
        first = text.split('\n\n')[0].removeprefix('Return ')
        heading.definition = re.sub(r', eq\. \(\d\)', '', first)
        return heading


def interval_ends(report, key):
    """Return the ends of a metric's interval, of the accuracy Wilson's; () if there is none."""
    if key == 'accuracy' and 'accuracy_low' in report:
        return report['accuracy_low'], report['accuracy_high']
    return report.get('intervals', {}).get(key, ())


def measure_cell(report, key, interval=False):
    """Return the value of a metric, '0.102' or '0.102 [0.091, 0.113]'; '' if it is missing."""
    if key not in report:
        return ''
    ends = interval_ends(report, key) if interval else ()
    return format(report[key], measure_of(key).format) + (
        ' [{:.3f}, {:.3f}]'.format(*ends) if ends else '')


def few_rows_note(report, unit='questions') -> str:
    """Return why rmsce and mad can be far below ece; '' for 1,000 rows or more."""
    n = report['n']
    n_bins = max(1, n // 100)
    if unit == 'questions' and 'questions' in report:
        unit = 'answers'
    return '' if n >= 1000 else (
        f'RMSCE and MAD have bins of 100 {unit}, so {n_bins} bin{"s" * (n_bins > 1)} here; with '
        f'few bins they can be far below ECE, which has 10')


def count_cell(report, unit='questions'):
    """Return the number of tokens or else of questions of a report; '' for a mean of reports."""
    n = report.get('n', '')
    return str(n if unit == 'tokens' else report.get('questions', n))


def shared_note(report, unit='questions'):
    """Return how many rows of a report are of how many questions; '' if each has its own."""
    if 'questions' not in report:
        return ''
    rows, whole = ('tokens', 'text') if unit == 'tokens' else ('answers', 'question')
    return (f'{report["n"]:,} {rows} in {report["questions"]:,} {whole}s: those of one {whole} are '
            f'drawn and tested together')
