"""Convert lm-evaluation-harness --log_samples files to our sample format."""

import math

from results.prediction_files import (SeveralAnswersError, array_rows, harness_sample,
                                      harness_task, old_harness_tasks, repeats)
from results.samples import read_jsonl
from runtime.errors import DataError


def find_files(sources):
    """Return {run: {subtask: file}} for the files `sources` and those of lm_eval below folders.

    A run is the folder of a model, with the newest file of each subtask, or a renamed file.
    """
    runs = {}
    for source in sources:
        paths = [source] if source.suffix == '.jsonl' else sorted((
            *source.rglob('samples_*_????-??-??T*.jsonl'),
            *(path for results in source.rglob('results.json') if old_harness_tasks(results)
              for path in results.parent.glob('*.jsonl') if harness_task(path)[1])))
        for path in [path.absolute() for path in dict.fromkeys(paths)]:
            _, subtask, call = harness_task(path)
            files = runs.setdefault(path.parent if call else path, {})
            if subtask in files and path != files[subtask]:
                older, path = sorted((path, files[subtask]))    # by date, since the rest is equal
                print(f'{older} is left out: {path.name} is newer')
            files[subtask] = path
    return runs


def read_run(files, norm):
    """Return {task: samples}, as evaluate.py writes them, of {subtask: file}.

    Skip a file whose first line is not multiple choice or that has a question with several right
    options, and say so. Raise DataError with file and line for any other unusable line, and if no
    file is left.
    """
    tasks = {}
    for subtask, path in files.items():
        task, samples, logged = harness_task(path)[0], [], {}
        for line, row in _read_rows(path):
            if isinstance(row, DataError):
                raise row
            try:
                sample = harness_sample(row, norm)
                if not all(map(math.isfinite, sample['log_probs'])):
                    raise ValueError(f'the log-probabilities are {sample["log_probs"]}')
                if repeats(sample, row.get('filter'), logged):
                    continue
            except ValueError as error:
                if samples and not isinstance(error, SeveralAnswersError):
                    raise DataError(f'{line}: {error}') from None
                print(f'{path.name} is left out: {error}')
                samples = []
                break
            samples.append(sample | {'task': task, 'split': 'test', 'subject': subtask,
                                     'id': f'{subtask}:{sample["id"]}'})
        if samples:
            tasks.setdefault(task, []).extend(samples)
    if not tasks:
        raise DataError(f'{path}: no multiple-choice questions of lm_eval --log_samples')
    return {task: sorted(samples, key=lambda s: s['id']) for task, samples in tasks.items()}


def _read_rows(path):
    """Yield (place, row) of a file of lines, or of JSON arrays; a bad row is a DataError."""
    try:
        with open(path, 'rb') as file:
            array = array_rows(file)
    except OSError as error:
        raise DataError(f'cannot read {path}: {error.strerror}') from error
    except ValueError as error:
        raise DataError(f'{path}:{error}') from None
    if array is None:
        return read_jsonl(path)
    return [(f'{path}: row {number}', row) for number, row in enumerate(array, 1)]
