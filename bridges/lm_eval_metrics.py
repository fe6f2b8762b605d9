"""Calibration metrics for task files of lm-evaluation-harness, of type multiple_choice.

    python -m nanocal.lm_eval_metrics run --tasks my_task ...       # the arguments of lm_eval

Importing this module registers every row of metrics.MEASURES under its key, and as an aggregation
of the same name, for `metric_list` of a task file:

    - {metric: ece, aggregation: ece, higher_is_better: false}

`ece_norm` and `ece_bytes` divide the log-probabilities by the characters or bytes of the choices,
as acc_norm and acc_bytes do. Metrics with a column in a table also have the ends of their 95 %
interval by bootstrap, `ece_boot_low` and `ece_boot_high`. docs/metrics.md has a whole file.

Source: the interface of lm-evaluation-harness 0.4.13. It computes no others for multiple choice, so
`process_results` of its tasks is extended here.
"""

import functools
from typing import TYPE_CHECKING

import numpy as np
from lm_eval.api.registry import register_aggregation, register_metric
from lm_eval.api.task import ConfigurableTask

if TYPE_CHECKING or __package__ != 'nanocal':
    import metrics              # in the clone, at the top level
    import stats
else:
    from . import metrics, stats        # installed

# {end of a metric's name: the length of a choice, by which its log-probability is divided}
LENGTHS = {'': lambda text: 1, '_norm': len, '_bytes': lambda text: len(text.encode())}
lengths_of = {}     # {name of a registered metric: its function of LENGTHS}


def item(task, doc, results, length):
    """Return (index of the right choice, log-probabilities / length [K]) of a question."""
    choices = task.doc_to_choice(doc)
    answer = task.doc_to_text(doc) if task.multiple_input else task.doc_to_target(doc)
    if isinstance(answer, list) and len(answer) == 1:
        answer = answer[0]
    if isinstance(answer, str) and answer in choices:
        answer = choices.index(answer)
    if type(answer) is not int or not 0 <= answer < len(choices):
        raise ValueError(f'{task.config.task}: calibration needs one right choice, from 0 to '
                         f'{len(choices) - 1}, not {answer!r}, in {doc!r:.200}')
    # with acc_mutual_info, results without the question come after those with it
    return answer, [log_prob / max(1, length(text))
                    for (log_prob, _), text in zip(results, choices, strict=False)]


def measured(items, measure, end=None):
    """Return a metric of items, or the lower (0) or upper (1) end of its interval, nan without one.
    """
    labels, rows = np.array([answer for answer, _ in items]), [scores for _, scores in items]
    n_options = np.array([*map(len, rows)])
    scores = np.full((len(rows), n_options.max()), -np.inf)
    for i, row in enumerate(rows):
        scores[i, :len(row)] = row
    arrays, options = (metrics.softmax(scores), labels, n_options), {'scores': scores}
    value = metrics.report(*arrays, **options, measures=[measure])[measure.key]
    if end is None:
        return value
    if stats.no_interval(measure, len(rows), metrics.accuracy(*arrays[:2]), n_options.max()):
        return float('nan')
    resampled = stats.bootstrap(*arrays, **options, keys=[measure.key])[measure.key]
    return float(stats.percentile_interval(resampled, value, not measure.is_mean)[end])


for row in metrics.MEASURES:
    for suffix, function in LENGTHS.items():
        for end, word in ((None, ''), (0, '_boot_low'), (1, '_boot_high'))[:3 if row.tables else 1]:
            name = f'{row.key}{suffix}{word}'
            register_aggregation(name)(functools.partial(measured, measure=row, end=end))
            register_metric(metric=name, aggregation=name, output_type='multiple_choice',
                            higher_is_better=bool(row.higher_is_better))(lambda item: item)
            lengths_of[name] = function

process_results = ConfigurableTask.process_results


def with_calibration(task, doc, results):
    """Add what our metrics of a task need to what its own metrics need."""
    values = process_results(task, doc, results)
    if task.OUTPUT_TYPE == 'multiple_choice':
        values |= {name: item(task, doc, results, lengths_of[name])
                   for name in task.aggregation().keys() & lengths_of.keys()}
    return values


ConfigurableTask.process_results = with_calibration

if __name__ == '__main__':
    from lm_eval.__main__ import cli_evaluate
    cli_evaluate()
