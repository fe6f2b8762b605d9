"""Convert lm-evaluation-harness --log_samples files to our sample format."""

import math

from results.prediction_files import harness_sample, harness_task
from results.samples import read_jsonl
from runtime.errors import DataError


def find_files(sources):
    """Return {run: {subtask: file}} for the files `sources` and samples_*.jsonl below folders.

    A run is the folder of a model, with the newest file of each subtask, or a renamed file.
    """
    runs = {}
    for source in sources:
        paths = [source] if source.suffix == '.jsonl' else sorted(
            source.rglob('samples_*_????-??-??T*.jsonl'))
        for path in [path.absolute() for path in paths]:
            _, subtask, date = harness_task(path)
            files = runs.setdefault(path.parent if date else path, {})
            if subtask in files and path != files[subtask]:
                older, path = sorted((path, files[subtask]))    # by date, since the rest is equal
                print(f'{older} is left out: {path.name} is newer')
            files[subtask] = path
    return runs


def read_run(files, norm):
    """Return {task: samples}, as evaluate.py writes them, of {subtask: file}.

    Skip a file whose first line is not multiple choice, and say so. Raise DataError with file and
    line for any other unusable line, and if no file is left.
    """
    tasks = {}
    for subtask, path in files.items():
        task, samples = harness_task(path)[0], []
        for line, row in read_jsonl(path):
            if isinstance(row, DataError):
                raise row
            try:
                sample = harness_sample(row, norm)
                if not all(map(math.isfinite, sample['log_probs'])):
                    raise ValueError(f'the log-probabilities are {sample["log_probs"]}')
            except ValueError as error:
                if samples:
                    raise DataError(f'{line}: {error}') from None
                print(f'{path.name} is left out: {error}')
                break
            samples.append(sample | {'task': task, 'split': 'test', 'subject': subtask,
                                     'id': f'{subtask}:{sample["id"]}'})
        if samples:
            tasks.setdefault(task, []).extend(samples)
    if not tasks:
        raise DataError(f'{path}: no multiple-choice questions of lm_eval --log_samples')
    return {task: sorted(samples, key=lambda s: s['id']) for task, samples in tasks.items()}
