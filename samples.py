"""The folder of an evaluation: which samples are there, and whether new ones belong to them.

samples.jsonl holds one line per scored question or token, eval_config.json what all of them were
scored with: the model, the settings, and for each task a hash of its questions.
"""

import json
import math
import time
from fnmatch import fnmatch

import outdir
import report
from configs import ConfigError

OUTPUTS = 'samples.jsonl', 'eval_config.json', 'results.json', 'results.md', 'results.csv'
DIAGRAM, GRID = 'reliability.png', 'reliability-{}-languages.png'


def open_folder(out_dir, tasks, settings, *, pictures, overwrite):
    """Return (earlier, done): what is in `out_dir`, to which samples of `tasks` will be added.

    earlier: {task: its entry of results.json}
    done:    {(sample_key, prompt)} of the samples; a text counts when all its tokens are scored
    Raises ConfigError, before it changes anything, if a file is there that no evaluation wrote, if
    the samples were made with other `settings`, or if a file of results or settings is damaged.
    `overwrite` deletes what an evaluation wrote there.
    """
    several = [label for label, task in tasks.items()
               if len({item.language for item in task.items}) > 1]
    grids = [GRID.format(label) for label in several]
    outdir.claim(out_dir, *OUTPUTS, *((DIAGRAM, *grids) if pictures else ()))
    if overwrite:
        for name in outdir.written_files(out_dir):
            if name in (*OUTPUTS, DIAGRAM) or fnmatch(name, GRID.format('*')):
                (out_dir / name).unlink(missing_ok=True)
    samples, results = out_dir / 'samples.jsonl', out_dir / 'results.json'
    begun = results.exists() or samples.exists() and samples.stat().st_size
    sources = _read_settings(out_dir, settings) if begun else {}
    for label, task in tasks.items():
        now = {'source': task.source, 'questions': task.fingerprint}
        before = sources.get(label, now)
        if now['source'] != before['source'] and now['questions'] != before['questions']:
            raise ConfigError(f'{out_dir} holds {label} of {before["source"]}, and {task.source} '
                              f'has other questions; rename the file, give another --out_dir, or '
                              f'--overwrite all that was evaluated there')
        sources[label] = now
    earlier = _read_results(results)
    done = _scored(samples) if samples.exists() else set()
    outdir.write_text(out_dir / 'eval_config.json',
                      json.dumps(settings | {'tasks': sources}, indent=1) + '\n')
    return earlier, done


def _read_settings(out_dir, settings):
    """{task: where it is from} of eval_config.json; ConfigError if it has other `settings`."""
    path = out_dir / 'eval_config.json'
    advice = 'give another --out_dir, or --overwrite what was evaluated there'
    try:
        old = json.loads(path.read_text(encoding='utf-8'))
        sources = {label: {key: task[key] for key in ('source', 'questions')}
                   for label, task in old.pop('tasks').items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f'{path} cannot be read ({error!r}), so it is not known with which model '
                          f'and settings the samples beside it were scored; {advice}') from error
    if old != settings:
        key = next(k for k in [*settings, *old] if settings.get(k) != old.get(k))
        raise ConfigError(f'{out_dir} holds samples with another {key}: {old.get(key)!r}, now '
                          f'{settings.get(key)!r}; {advice}')
    return sources


def _read_results(path):
    """{task: result} of a results.json, {} if there is none; raises ConfigError."""
    if not path.exists():
        return {}
    try:
        tasks = json.loads(path.read_text(encoding='utf-8'))['tasks']
        for result in tasks.values():
            result['norm'], result['distribution'], result['pooled']['n']
            for _, _, values in report.report_rows(result):
                values.update({k: math.nan for k, v in values.items() if v is None})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f'{path} is not what evaluate.py wrote ({error!r}); remove it and '
                          f'evaluate its tasks again: with samples.jsonl beside it that needs no '
                          f'model') from error
    return tasks


def _scored(path):
    """{(sample_key, prompt)} of the samples; cuts off a last line that was not written whole."""
    with open(path, 'rb+') as file:
        content = file.read()
        file.truncate(content.rfind(b'\n') + 1)
    ids, expected = {}, {}
    for sample in report.last_asked(report.read_samples(path)):
        asked = sample_key(sample), sample['prompt']
        ids.setdefault(asked, set()).add(sample['id'])
        expected[asked] = sample.get('of', 1)
    return {asked for asked, found in ids.items() if len(found) == expected[asked]}


def sample_key(sample):
    """The question or text that a sample belongs to."""
    return (sample['task'], sample['split'], sample['language'],
            sample.get('text', sample['id']))


class SampleFile:
    """samples.jsonl, open for appending; a kill costs the work of a second. Raises ConfigError."""

    def __init__(self, path):
        self.path, self.lines, self.flushed = path, [], time.monotonic()
        self.file = open(path, 'ab', buffering=0)   # closing it must not write again

    def __enter__(self):
        return self

    def __exit__(self, *error):
        try:
            self.flush()
        finally:
            self.file.close()

    def write(self, sample):
        self.lines.append(json.dumps(sample, ensure_ascii=False) + '\n')
        if time.monotonic() - self.flushed > 1:
            self.flush()

    def flush(self):
        left, self.lines = ''.join(self.lines).encode(), []
        try:
            while left:
                left = left[self.file.write(left):]
        except OSError as error:
            raise ConfigError(f'{self.path} cannot be written: {error.strerror}; the samples in it '
                              f'are kept, and the same command resumes from there') from error
        self.flushed = time.monotonic()
