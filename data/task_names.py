"""The names of --tasks: which there are, and what a result calls a task and its files."""

import os
from pathlib import Path

from data.benchmarks import BENCHMARKS
from data.probes import INSTRUCTIONS
from data.questions import require_task
from data.written_answers import WRITTEN_TASKS
from runtime.errors import ConfigError

TASKS = *BENCHMARKS, *WRITTEN_TASKS, 'p_ik', 'judge', *INSTRUCTIONS


def split_name(name):
    """Return ('mmlu', 'some/folder') for 'mmlu:some/folder', ('', 'some/file') for a path."""
    kind, _, path = name.partition(':')
    return (kind, path) if kind in TASKS else ('', name)


def task_label(name):
    """Return a task's name in results: 'mmlu' for 'mmlu:folder', 'q' for 'a/q.jsonl'."""
    kind, path = split_name(name)
    return kind or Path(path).name.split('.')[0]


def task_source(name):
    """Return a task's `source` in results: its name in --tasks, with the full path of a file."""
    kind, path = split_name(name)
    if path and os.path.exists(os.path.expanduser(path)):
        path = os.path.realpath(os.path.expanduser(path))
    return f'{kind}:{path}' if kind and path else kind or path


def check_names(names):
    """Raise ConfigError or DataError for names of --tasks that are no tasks, or clash."""
    labels = [task_label(name) for name in names]
    for name, label in zip(names, labels):
        kind, path = split_name(name)
        require_task(kind or path, TASKS)
        if not label or labels.count(label) > 1:
            raise ConfigError(f'tasks = {names}: {name!r} would be called {label!r} in the '
                              f'results; rename a file so that each task has a name of its own, or '
                              f'evaluate one of them with another --out_dir')
