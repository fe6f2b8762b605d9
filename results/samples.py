"""Open the output folder of an evaluation: read its samples, or refuse it if the settings differ.

samples.jsonl has one line per scored question or token. eval_config.json has what all samples
share: the model, the settings, and a hash of the questions of each task.
"""

import json
import math

from results import report
from runtime import ownership
from runtime.errors import ConfigError

OUTPUTS = ('samples.jsonl', 'eval_config.json', 'results.json', 'results.md', 'results.csv',
           'results.tex')
DIAGRAM, GRID = 'reliability.png', 'reliability-{}-languages.png'
OTHER_FOLDER = 'choose another --out_dir, or --overwrite what was evaluated there'


def open_folder(out_dir, tasks, settings, *, pictures, overwrite):
    """Prepare `out_dir` for more samples of `tasks`; return (earlier, done).

    earlier: {task: its entry in results.json}
    done:    {(sample_key, prompt)} of the samples there; a text counts if all its tokens are scored
    Raises ConfigError, before it changes anything, if an output file exists that no evaluation
    wrote, if the samples were made with other `settings`, or if a file of results or settings is
    damaged. `overwrite` first deletes what an evaluation wrote there. The caller holds the lock.
    """
    ownership.remove_leftovers(out_dir)
    grids = [GRID.format(label) for label, task in tasks.items()
             if len({item.language for item in task.items}) > 1]
    outputs = [*OUTPUTS, *((DIAGRAM, *grids) if pictures else ())]
    ownership.check_free(out_dir, *outputs)
    if overwrite:
        ownership.discard(out_dir, *OUTPUTS, DIAGRAM, GRID.format('*'))
    samples, results = out_dir / 'samples.jsonl', out_dir / 'results.json'
    begun = results.exists() or samples.exists() and samples.stat().st_size
    sources = _read_sources(out_dir, settings) if begun else {}
    for label, task in tasks.items():
        now = {'source': task.source, 'questions': task.fingerprint}
        before = sources.get(label, now)
        if now['source'] != before['source'] and now['questions'] != before['questions']:
            raise ConfigError(f'{out_dir} holds {label} of {before["source"]}, and {task.source} '
                              f'has other questions; rename the file, or {OTHER_FOLDER}')
        sources[label] = now
    earlier = _read_results(results) if results.exists() else {}
    done = _scored(samples) if samples.exists() else set()
    ownership.claim(out_dir, *outputs)
    ownership.write_text(out_dir / 'eval_config.json',
                         json.dumps(settings | {'tasks': sources}, indent=1) + '\n')
    return earlier, done


def _read_sources(out_dir, settings):
    """Return {task: {'source', 'questions'}} from eval_config.json; ConfigError if its settings
    are not `settings`."""
    with ownership.read_json(out_dir / 'eval_config.json', OTHER_FOLDER) as old:
        sources = {label: {key: task[key] for key in ('source', 'questions')}
                   for label, task in old.pop('tasks').items()}
    if old != settings:
        key = next(k for k in [*settings, *old] if settings.get(k) != old.get(k))
        raise ConfigError(f'{out_dir} holds samples with {key} = {old.get(key)!r}, not '
                          f'{settings.get(key)!r}; {OTHER_FOLDER}')
    return sources


def _read_results(path):
    """Return {task: result} of a results.json, with NaN for null."""
    with ownership.read_json(path, 'remove it and evaluate its tasks again: with samples.jsonl '
                                   'beside it, that needs no model') as content:
        for result in content['tasks'].values():
            result['norm'], result['distribution'], result['pooled']['n']
            for _, _, values in report.report_rows(result):
                values.update({k: math.nan for k, v in values.items() if v is None})
        return content['tasks']


def _scored(path):
    """Return {(sample_key, prompt)} of the samples; remove an incomplete last line."""
    with open(path, 'rb+') as file:
        file.truncate(file.read().rfind(b'\n') + 1)
    ids, expected = {}, {}
    for sample in report.last_asked(report.read_samples(path)):
        key = report.sample_key(sample), sample['prompt']
        ids.setdefault(key, set()).add(sample['id'])
        expected[key] = sample.get('of', 1)
    return {key for key, scored in ids.items() if len(scored) == expected[key]}


def append(file, sample):
    """Append a line to samples.jsonl, opened unbuffered; ConfigError if the disk is full."""
    left = (json.dumps(sample, ensure_ascii=False) + '\n').encode()
    try:
        while left:
            left = left[file.write(left):]
    except OSError as error:
        raise ConfigError(f'{file.name} cannot be written: {error.strerror}; the samples in it are '
                          f'kept, and the same command resumes from there') from error
