"""Read what is compared: folders of runs, and prediction files, such as those of lm_eval."""

from dataclasses import dataclass
from pathlib import Path

from bridges.harness_files import UnusableTaskError, harness_task
from bridges.prediction_files import read_predictions
from results.samples import read_results, read_splits, sample_order
from runtime.config import run_settings
from runtime.errors import DataError
from runtime.ownership import read_json

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
    file_samples: dict | None = None                # {task: samples} of prediction files


def find_runs(sources, prediction_files=()):
    """Return the folders of runs: each source that is one, else all runs below it.

    Raises DataError for a source without a run and without one of `prediction_files`.
    """
    def is_run(folder):
        return (folder / 'results.json').exists() and (folder / 'samples.jsonl').exists()

    folders = []
    for source in sources:
        below = [source] if is_run(source) else [
            path.parent for path in sorted(source.rglob('samples.jsonl'))
            if is_run(path.parent) and path.parent.name != 'before']
        if not below and not any(source.absolute() in (file, *file.parents)
                                 for file in prediction_files):
            raise DataError(f'compare: there is no {source}' if not source.exists() else
                            f'compare: {source} holds no run, neither results.json beside '
                            f'samples.jsonl nor what lm_eval --log_samples wrote; evaluate first, '
                            f'or name a file of predictions')
        folders += [folder.resolve() for folder in below]
    return folders


def read_run(folder):
    """Return the Run in `folder`: its results, and the configuration of training and model."""
    advice = f'evaluate there again, or compare a file: --compare {folder / "samples.jsonl"}'
    content = read_results(folder / 'results.json', advice)
    model, shape = content['config']['model'], {}
    seed, results = content['seed'], content['tasks']
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
               settings, results)


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
    """Return {run: {subtask: newest file}}; a run is a folder of lm_eval or another file."""
    runs = {}
    for source in sources:
        paths = [source] if source.is_file() or source.suffix and not source.exists() else sorted(
            path for ending in ('', '.gz')
            for path in source.rglob(f'samples_*_????-??-??T*.jsonl{ending}'))
        for path in map(Path.absolute, paths):
            _, subtask, date = harness_task(path)
            files = runs.setdefault(path.parent if date else path, {})
            if subtask in files and path != files[subtask]:
                older, path = sorted((path, files[subtask]))    # by date, since the rest is equal
                print(f'{older} is left out: {path.name} is newer')
            files[subtask] = path
    return runs


SHARED_ID = 'several answers to one question may share an id'


def question_of(sample):
    """Return what samples of a file with the same id and language have in common."""
    return [sample.get(key) for key in ('question', 'subject', 'options', 'answer', 'expected')]


def _add(samples, sample, path):
    """Add a sample to {sample_order: sample}; the second answer to question x is named x#2."""
    id = sample['id']
    k = 1
    while first := samples.get(sample_order(sample)):
        if question_of(first) != question_of(sample):
            raise DataError(f'{path}: the id {id} is there twice, for different questions; only '
                            f'{SHARED_ID}')
        k += 1
        sample['id'] = f'{id}#{k}'
    samples[sample_order(sample)] = sample


def predicted_run(folder, files, cfg):
    """Return the Run of {subtask: prediction file}; name files that are not multiple choice."""
    tasks, results = {}, {}
    for path in files.values():
        try:
            rows = [*read_predictions(path, cfg)]
        except UnusableTaskError as error:
            print(f'{path.name} is left out: {error.__cause__}')
            continue
        for sample, distribution in rows:
            task = sample['task'] = sample['task'] or 'predictions'
            _add(tasks.setdefault(task, {}), sample, path)
            results[task] = {'distribution': distribution, 'norm': 'token', 'unit': 'questions'}
    if not tasks:
        raise DataError(f'{path}: no multiple-choice questions of lm_eval --log_samples')
    return Run(folder, folder.name, 0, {}, results, file_samples={
        task: [samples[key] for key in sorted(samples)] for task, samples in tasks.items()})
