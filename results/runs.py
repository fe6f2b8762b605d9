"""Read what is compared: folders of runs, and prediction files, such as those of lm_eval."""

import itertools
import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import metrics
from results.confidence import outcome
from results.prediction_files import (SeveralAnswersError, harness_sample, harness_task,
                                      old_harness_tasks, read_predictions, read_rows, repeats,
                                      sample_order)
from results.samples import digest, read_results, read_splits
from runtime.config import run_settings
from runtime.errors import DataError
from runtime.ownership import ASIDE, put_back, read_json

# keys of train_config.py that do not distinguish runs: paths, files, devices and rounding
PATHS = {'model', 'out_dir', 'overwrite', 'resume', 'seed', 'cache_dir', 'eval', 'eval_before',
          'shape', 'workers', 'device', 'dry_run', 'pictures', 'micro_rows'}


@dataclass
class Run:
    """The content of the folder of a run, except samples.jsonl."""
    folder: Path
    model: str              # name of the model that was tuned or evaluated
    seed: int
    settings: dict          # {name: text}, of training and the shape of the model
    results: dict           # {task: its entry in results.json}
    questions: dict = field(default_factory=dict)   # {task: hash of all its questions}
    file_samples: dict | None = None                # {task: samples} of prediction files


def find_runs(sources, prediction_files=()):
    """Return the folders of runs: each source that is one, else all runs below it.

    Raises DataError for a source without a run and without one of `prediction_files`.
    """
    def is_run(folder):
        return (folder / 'results.json').exists() and (folder / 'samples.jsonl').exists()

    folders = []
    for source in sources:
        put_back(source)
        below = [source] if is_run(source) else [
            path.parent for path in sorted(source.rglob('samples.jsonl'))
            if is_run(path.parent) and path.parent.name != 'before'
            and not path.parent.name.startswith(ASIDE)]
        if not below and not any(source.absolute() in (file, *file.parents)
                                 for file in prediction_files):
            raise DataError(f'compare: {source} holds no run, neither results.json beside '
                            f'samples.jsonl nor what lm_eval --log_samples wrote; evaluate first, '
                            f'or name a file of predictions')
        folders += [folder.resolve() for folder in below]
    return folders


def read_run(folder):
    """Return the Run in `folder`: its results, and the configuration of training and model."""
    advice = 'evaluate there again'
    content = read_results(folder / 'results.json', advice)
    model, seed, results = content['config']['model'], content['seed'], content['tasks']
    questions, shape = {}, {}
    if (folder / 'eval_config.json').exists():
        with read_json(folder / 'eval_config.json', advice) as content:
            questions = {task: entry['questions'] for task, entry in content['tasks'].items()}

    # the training of this run, or of the model that it evaluates
    training, home = next(((run_settings(p), p) for p in (folder, Path(model))
                           if (p / 'train_config.py').exists()), ({}, None))
    if home and (home / 'config.json').exists():
        with read_json(home / 'config.json', 'restore it, or train again') as content:
            shape = {key: value for key, value in content.items()
                     if isinstance(value, (int, float, str)) or key == 'final_logit_softcapping'}
    settings = {key: value for key, value in training.items() if key not in PATHS}
    if isinstance(settings.get('data'), str):
        settings['data'] = Path(settings['data']).stem
    settings = {key: str(value) for key, value in (settings | shape).items()}
    return Run(folder, Path(str(training.get('model') or model)).name, training.get('seed', seed),
               settings, results, questions)


def read_run_samples(run):
    """Return ({task: samples}, {task: samples of the validation split}) of a run."""
    if run.file_samples:
        return run.file_samples, {}
    path = run.folder / 'samples.jsonl'
    test, held_out = read_splits(path)
    for task, result in run.results.items():
        n, n_samples = result['pooled']['n'], len(test.get(task, ()))
        if n != n_samples:
            raise DataError(f'{path} has {n_samples} samples of {task}, but results.json was made '
                            f'from {n}; evaluate {task} again without --limit or elsewhere')
    return {task: test[task] for task in run.results}, held_out


def sample_of(result):
    """Return {'sample_of': number of questions} for a result with --limit, else {}."""
    return {'sample_of': str(result['sample']['of'])} if 'sample' in result else {}


# Prediction files


def find_prediction_files(sources):
    """Return {run: {subtask: file}} for the files `sources` and those of lm_eval below folders.

    A run is the folder of a model, with the newest file of each subtask, or a file of another name.
    """
    runs = {}
    for source in sources:
        paths = [source] if source.is_file() or source.suffix and not source.exists() else sorted((
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


def predicted_run(folder, files, cfg):
    """Return the Run of {subtask: prediction file}; `norm` and so on as in CompareConfig."""
    if '' in files and (run := file_run(files[''], cfg)):
        return run
    tasks = {}
    for subtask, path in files.items():
        task = harness_task(path)[0]
        tasks.setdefault(task, []).extend(
            sample | {'task': task, 'split': 'test', 'subject': subtask,
                      'id': f'{subtask}:{sample["id"]}'}
            for sample in _harness_samples(path, cfg.norm))
    tasks = {task: sorted(samples, key=sample_order) for task, samples in tasks.items() if samples}
    if not tasks:
        raise DataError(f'{path}: no multiple-choice questions of lm_eval --log_samples')
    norm = 'sum' if cfg.norm == 'token' else cfg.norm       # the files do not count tokens
    # n_tokens of these samples holds the lengths that `norm` names
    results = {task: {'distribution': f'lm-evaluation-harness, {norm}', 'norm': 'token'}
               for task in tasks}
    return Run(folder, folder.name, 0, {}, results, file_samples=tasks)


def file_run(path, cfg):
    """Return the Run of a prediction file of any other origin; None for one of lm_eval.

    Its samples are paired with those of another file by `id`, or by their position where there
    is none, and by the text of the question where there is one.
    """
    tasks, results, ids = {}, {}, set()
    try:
        if any('filtered_resps' in row for _, row in itertools.islice(read_rows(path), 1)):
            return None
        for task, position, row, (kind, values, label) in read_predictions(
                path, cfg.norm, cfg.confidence, cfg.correct):
            task = task.replace('/', '-') or 'predictions'      # it names pictures
            sample = {'task': task, 'split': 'test', 'id': str(row.get('id', position))} | {
                key: str(row.get(key) or '') for key in ('language', 'subject', 'category')}
            texts = [str(row[key]) for key in ('context', 'question', 'prompt') if row.get(key)]
            if texts:
                sample |= {'context': texts[0], 'question': digest(texts[-1])}
            if kind == 'confidence':
                sample |= outcome(values, label)
                sample |= {'predicted': str(row['response'])} if 'response' in row else {}
            else:
                if kind == 'probs':
                    values = np.log(np.maximum(values, metrics.NLL_FLOOR))
                options = row.get('choices') or row.get('options') or range(1, len(values) + 1)
                sample |= {'log_probs': values.tolist(), 'n_tokens': [1] * len(values),
                           'options': [*map(str, options)], 'answer': label}
            if sample_order(sample) in ids:
                raise ValueError(f' the id {sample["id"]} is there twice')
            ids.add(sample_order(sample))
            tasks.setdefault(task, []).append(sample)
            form = {'probs': 'probabilities', 'confidence': 'confidences'}.get(
                kind, f'log-probabilities, {cfg.norm}')
            results[task] = {'distribution': f'{form} of a file', 'norm': 'token'}
    except OSError as error:
        raise DataError(f'cannot read {path}: {error.strerror}') from error
    except ValueError as error:
        raise DataError(f'{path}:{error}') from None
    return Run(path, path.name, 0, {}, results, file_samples={
        task: sorted(samples, key=sample_order) for task, samples in tasks.items()})


def _harness_samples(path, norm):
    """Return the samples of a file of one subtask.

    Return [], and say so, if its first line is not multiple choice or a question has several right
    options. Raise DataError with file and line for any other unusable line.
    """
    logged = {}     # {id: (sample, filter)}
    try:
        for number, row in read_rows(path):
            try:
                sample = harness_sample(row, norm)
                if not all(map(math.isfinite, sample['log_probs'])):
                    raise ValueError(f'the log-probabilities are {sample["log_probs"]}')
                repeats(sample, row.get('filter'), logged)
            except ValueError as error:
                if logged and not isinstance(error, SeveralAnswersError):
                    raise ValueError(f'{number}: {error}') from None
                print(f'{path.name} is left out: {error}')
                return []
    except OSError as error:
        raise DataError(f'cannot read {path}: {error.strerror}') from error
    except ValueError as error:
        raise DataError(f'{path}:{error}') from None
    return [sample for sample, _ in logged.values()]
