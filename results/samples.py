"""The output folder of an evaluation: open it for more samples, and read samples.jsonl.

samples.jsonl has one line per scored question or token. Each of several processes appends to a part
of its own, samples.jsonl.<rank>; the parts are merged at the end, or by the next command if this
one is interrupted. eval_config.json has what all samples share: the model, the settings, and a hash
of the questions of each task.
"""

import glob
import hashlib
import json
import math
import re
from pathlib import Path

from results.prediction_files import is_unstated, latest_samples, sample_key, sample_order
from runtime import ownership
from runtime.errors import ConfigError, DataError

OUTPUTS = ('samples.jsonl', 'eval_config.json', 'results.json', 'results.md', 'results.csv',
           'results.tex', 'report.html')
DIAGRAM, GRID = 'reliability.png', 'reliability-{}-languages.png'
KIND = 'evaluation'     # the name under which --overwrite sets earlier files aside
OTHER_FOLDER = 'choose another --out_dir, or --overwrite what was evaluated there'


def open_folder(out_dir, tasks, settings, *, pictures, overwrite, processes=1):
    """Prepare `out_dir` for more samples of `tasks`; return (earlier, done).

    earlier: {task: its entry in results.json}
    done:    {(sample_key, prompt)} of the samples there; a text counts if all its tokens are scored
    Raises ConfigError, before it changes anything, if a file of this name exists that no evaluation
    wrote, if the samples were made with other `settings`, or if a file is damaged. `overwrite`
    first sets the files of an evaluation aside. processes: how many will append to their `part`.
    The caller holds the lock.
    """
    ownership.remove_leftovers(out_dir)
    samples, results = out_dir / 'samples.jsonl', out_dir / 'results.json'
    parts = part_names(samples, processes)
    outputs = [*OUTPUTS, *parts]
    if pictures:
        outputs += [DIAGRAM, *(GRID.format(label) for label, task in tasks.items()
                               if len({item.language for item in task.items}) > 1)]
    ownership.check_free(out_dir, *outputs)
    if overwrite:
        ownership.set_aside(out_dir, KIND, [*OUTPUTS, DIAGRAM, GRID.format('*'), *parts,
                                            *merged_names(samples)], [samples.name, *parts])
    if samples.is_symlink():
        raise ConfigError(f'{samples} is a link to a file elsewhere, where nothing is appended; '
                          f'replace the link by that file, or {OTHER_FOLDER}')

    sources = _read_sources(out_dir, settings) if results.exists() or has_lines(samples) else {}
    for label, task in tasks.items():
        now = {'source': task.source, 'questions': task.fingerprint}
        before = sources.get(label, now)
        if all(now[key] != before[key] for key in now):
            raise ConfigError(f'{out_dir} holds {label} of {before["source"]}, and {task.source} '
                              f'has other questions; rename the file, or {OTHER_FOLDER}')
        sources[label] = now
    earlier = _read_results(results) if results.exists() else {}
    merge_parts(samples)
    done = _scored(samples) if samples.exists() else set()
    ownership.claim(out_dir, *outputs)
    ownership.write_text(out_dir / 'eval_config.json',
                         json.dumps(settings | {'tasks': sources}, indent=1) + '\n')
    return earlier, done


def _read_sources(out_dir, settings):
    """Return {task: {'source', 'questions'}}; raise ConfigError for other settings."""
    with ownership.read_json(out_dir / 'eval_config.json', OTHER_FOLDER) as old:
        sources = {label: {key: task[key] for key in ('source', 'questions')}
                   for label, task in old.pop('tasks').items()}
    if 'preset' in old:     # the name of prompt_format in earlier versions
        old['prompt_format'] = old.pop('preset')
    if other := difference(settings, old):
        raise ConfigError(f'{out_dir} holds samples {other}; {OTHER_FOLDER}')
    return sources


def difference(settings, old):
    """Return what a message says about the first setting that differs; '' if none does."""
    old = {'code': settings.get('code')} | old  # older versions wrote no hash of the code
    for key in [*settings, *old]:
        if settings.get(key) != old.get(key):
            if key == 'code':
                return 'of other code: model.py or a file that it needs has been edited since'
            if key in ('model', 'tokenizer'):       # hashes
                return f'of another {key}'
            return f'with {key} = {old.get(key)!r}, not {settings.get(key)!r}'
    return ''


def _read_results(path):
    """Return {task: result} of a results.json, with NaN for null in reports."""
    with ownership.read_json(path, 'remove it and evaluate its tasks again: with samples.jsonl '
                                   'beside it, that needs no model') as content:
        for result in content['tasks'].values():
            use_new_names(result)
            result['norm'], result['distribution'], result['pooled']['n']
            result |= {key: _null_to_nan(x) for key, x in result.items() if isinstance(x, dict)}
        return content['tasks']


def use_new_names(result):
    """Give a task's result that an earlier version wrote the names of today, in place."""
    for old, new in (('mass', 'option_mass'), ('preset', 'prompt_format')):
        if old in result:
            result[new] = result.pop(old)


def _null_to_nan(value):
    if isinstance(value, dict):
        return {key: _null_to_nan(x) for key, x in value.items()}
    return math.nan if value is None else value


def _scored(path):
    """Return {(sample_key, prompt)} of the complete questions and texts, and of each sample."""
    done, groups = set(), {}
    for sample in latest_samples(read_samples(path), unstated=True):
        key = sample_key(sample), sample['prompt']
        groups.setdefault(key, set()).add(sample['id'])
        done.add(((*key[0][:3], sample['id']), sample['prompt']))
        if len(groups[key]) == sample.get('of', 1):
            done.add(key)
    return done


class SampleWriter:
    """Append the samples of one process to its part of samples.jsonl in `out_dir`.

    done: {(sample_key, prompt)} of the samples that are there; new: the samples that were appended
    """

    def __init__(self, out_dir, done, rank=0, processes=1):
        self.paths = [out_dir / 'samples.jsonl', part(out_dir / 'samples.jsonl', rank, processes)]
        self.done, self.new = done, []
        self.file = open(self.paths[1], 'ab', buffering=0)

    def append(self, key, prompt, sample):
        """Write a sample with its key, unless one of this prompt is there."""
        if not {(key, prompt), ((*key[:3], sample.get('id', key[3])), prompt)} & self.done:
            self.new.append(dict(zip(('task', 'split', 'language', 'id'), key), prompt=prompt)
                            | sample)
            append(self.file, self.new[-1])

    def latest(self, task=None):
        """Return the latest samples that are there, of one task or of all.

        Those of one task include the `is_unstated`.
        """
        rows = [sample for path in dict.fromkeys(self.paths) if path.exists()
                for sample in read_samples(path)]
        return latest_samples([row for row in rows if task in (None, row['task'])],
                              unstated=task is not None)


def digest(value):
    """Return a hash of a value that JSON can hold."""
    text = json.dumps(value, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def append(file, sample):
    """Append a line to samples.jsonl, opened unbuffered.

    Raises ConfigError if the disk is full, or if the file or its folder was removed or moved.
    """
    ownership.check_in_place(file)
    # a lone surrogate in a field of the user's file becomes JSON's escape for it, as it was there
    left = (json.dumps(sample, ensure_ascii=False) + '\n').encode('utf-8', 'backslashreplace')
    try:
        while left:
            left = left[file.write(left):]
    except OSError as error:
        raise ConfigError(f'{file.name} cannot be written: {error.strerror}; the samples in it are '
                          f'kept, and the same command resumes from there') from error


# Parts: the lines of several processes

def part(path, rank, processes):
    """Return the file to which process `rank` of `processes` appends lines of the file `path`."""
    return path if processes == 1 else path.with_name(f'{path.name}.{rank}')


def part_names(path, processes):
    """Return the names of the parts of `path`; [] for one process."""
    return [part(path, rank, processes).name for rank in range(processes) if processes > 1]


def merged_names(path):
    """Return the names of the parts of `path` that are there, of any number of processes."""
    pattern = re.compile(rf'{re.escape(path.name)}\.(\d+)')
    names = {int(match[1]): name for name in ownership.written_files(path.parent)
             if (match := pattern.fullmatch(name))}
    return [names[rank] for rank in sorted(names)]


def has_lines(path):
    """Return whether `path` or one of its parts exists and is not empty."""
    return any(file.exists() and file.stat().st_size
               for file in (path, *map(path.with_name, merged_names(path))))


def merge_parts(path):
    """Add the lines of the parts of `path` to it, part by part, and remove the parts.

    A crash at any moment loses no line and doubles none. A last line that a crash cut off is left
    out, and so is a line that `path` has already.
    """
    names = merged_names(path)
    files = [file for file in (path, *map(path.with_name, names)) if file.exists()]
    texts = [file.read_bytes() for file in files]
    if names or any(text[-1:] not in (b'', b'\n') for text in texts):
        lines = dict.fromkeys(line for text in texts for line in text.split(b'\n')[:-1])
        with ownership.temporary(path) as whole, open(whole, 'wb') as file:
            file.writelines(line + b'\n' for line in lines)
        ownership.discard(path.parent, *map(glob.escape, names))


# Reading: the samples of a file, and which of them count

def read_samples(path):
    """Return the samples in `path` in the order of the file, as a list of dicts.

    Skip lines that repeat an earlier one. Raise DataError with file and line for a damaged line,
    and for a sample that differs from the latest one of the same question and prompt.
    """
    samples, last = [], {}
    for line, row in read_jsonl(path):
        if fault := _fault(row):
            raise DataError(f'{line}: not a sample that evaluate.py wrote: {fault}; delete this '
                            f'line, and its question is scored again')
        earlier_line, earlier = last.get(sample_order(row), (None, {}))
        if row == earlier:
            continue
        if earlier and row['prompt'] == earlier['prompt']:
            raise DataError(f'{line}: differs from {earlier_line}, of the same question '
                            f'({row["task"]} {row["id"]}); two processes wrote this file, or it '
                            f'was edited: remove one of the two lines')
        last[sample_order(row)] = line, row
        samples.append(row)
    return samples


def read_jsonl(path):
    """Yield ('file:line', row) of a JSON Lines file, without a last line that a crash cut off."""
    try:
        lines = Path(path).read_bytes().split(b'\n')
    except OSError as error:
        raise DataError(f'cannot read {path}: {error.strerror}') from error
    for number, raw in enumerate(lines, 1):
        if raw := raw.strip():
            try:
                row = json.loads(raw.decode('utf-8-sig'))
            except (ValueError, RecursionError) as error:
                if number == len(lines):    # a complete line ends in a newline
                    return
                raise DataError(f'{path}:{number}: broken JSON: {error}; delete this line, and '
                                f'repeat the command') from error
            yield f'{path}:{number}', row


LARGEST = 1e300     # a whole number may be written with more digits than a float can hold
ROUNDING = 1e-2     # nats: a probability of 1 may be scored as 1.00001, but not as 1.1


def _number(low, high):
    return lambda x: type(x) in (int, float) and low <= x <= high


# {what a value must be: whether it is}; below, {keys of a sample: what their values must be}
VALID = {
    'text': lambda x: isinstance(x, str),
    'an object': lambda x: isinstance(x, dict),
    'true or false': lambda x: type(x) is bool,
    'a whole number, 1 or more': lambda x: type(x) is int and 1 <= x < LARGEST,
    'the index of an option': lambda x: type(x) is int and x >= 0,
    'a number from 0 to 1': _number(0, 1),
    'a probability': _number(0, 1 + ROUNDING),
    'a finite number of at most 0': _number(-LARGEST, ROUNDING),
    'a finite number of at least 0': _number(-ROUNDING, LARGEST)}
LIST, OR_NULL = 'a list, each ', ' or null'
SAMPLE = {'task id prompt': 'text', 'of': 'a whole number, 1 or more or null',
          'split language subject category text question context predicted expected':
              'text or null'}
OPTIONS = {'options': 'a list, each text', 'choices': 'a list, each text or null',
           'log_probs': 'a list, each a finite number of at most 0',
           'n_tokens': 'a list, each a whole number, 1 or more',
           'answer': 'the index of an option', 'orders': 'a list, each an object or null'}
ORDER = {'order': 'a list, each the index of an option'}
TOKEN = {'correct': 'true or false', 'confidence': 'a number from 0 to 1',
         'log_prob': 'a finite number of at most 0', 'entropy': 'a finite number of at least 0'}
WRITTEN = {'greedy': 'an object', 'answers': 'a list, each an object or null'}
ANSWER = {'text reason': 'text', 'n_tokens': 'a whole number, 1 or more',
          'log_prob': 'a finite number of at most 0', 'mean_prob': 'a probability'}
GRADED = {'answer key': 'text or null', 'correct strict': 'true or false'}


def _is_valid(x, kind):
    if kind.endswith(OR_NULL):
        return x is None or _is_valid(x, kind.removesuffix(OR_NULL))
    if kind.startswith(LIST):
        return isinstance(x, list) and x != [] and all(_is_valid(y, kind.removeprefix(LIST))
                                                       for y in x)
    return VALID[kind](x)


def _broken_rule(values, rules):
    """Return the first of `rules` that an object breaks, as a sentence; '' if it fits them."""
    return next((f'{key} must be {kind}, not {values.get(key)!r:.60}'
                 for keys, kind in rules.items() for key in keys.split()
                 if not _is_valid(values.get(key), kind)), '')


def _fault(row):
    """Return what is wrong with a row of samples.jsonl, as a sentence; '' if nothing is."""
    if not isinstance(row, dict):
        return f'{row!r:.60} is no JSON object'
    has_options, is_written = 'log_probs' in row, 'greedy' in row or is_unstated(row)
    rules = OPTIONS if has_options else {} if is_unstated(row) else TOKEN
    if fault := _broken_rule(row, SAMPLE | rules | (WRITTEN if is_written else {})):
        return fault
    # the greedy answer alone, without a grade, is that of a stated probability
    for answer in (row['greedy'], *(row.get('answers') or ())) if is_written else ():
        if fault := _broken_rule(answer, ANSWER | (GRADED if 'answers' in row else {})):
            return f'in an answer, {fault}'
    if has_options:
        n = len(row['options'])
        if not len(row['log_probs']) == len(row['n_tokens']) == n > row['answer']:
            return 'options, log_probs and n_tokens differ in length, or answer is too large'
        for order in row.get('orders') or ():
            if fault := _broken_rule(order, ORDER) or _fault(row | {'orders': None} | order):
                return fault
            if sorted(order['order']) != [*range(n)]:
                return f'order must have the index of each option, not {order["order"]}'
    return ''


def by_order(samples):
    """Return {'1', '2', ...: samples as an evaluation in that order of the options gives them}.

    samples: with `orders`. A question with fewer orders than others has its first one again after
    its last.
    """
    orders = {}
    for k in range(max(len(s['orders']) for s in samples)):
        chosen = [(s, s['orders'][k % len(s['orders'])]) for s in samples]
        orders[str(k + 1)] = [s | order | {'answer': order['order'].index(s['answer'])}
                              for s, order in chosen]
    return orders


def read_splits(path):
    """Return ({task: its latest samples}, likewise of the validation split), by `sample_order`."""
    test, held_out = {}, {}
    for sample in sorted(latest_samples(read_samples(path)), key=sample_order):
        split = held_out if sample.get('split') == 'validation' else test
        split.setdefault(sample['task'], []).append(sample)
    return test, held_out


def by_task(samples, prompts):
    """Return {task: its samples}; of a task in {task: {(sample_key, prompt)}} only those."""
    tasks = {task: [] for task in prompts}
    for sample in samples:
        task, prompt = sample['task'], (sample_key(sample), sample['prompt'])
        if task not in prompts or prompt in prompts[task]:
            tasks.setdefault(task, []).append(sample)
    return tasks
