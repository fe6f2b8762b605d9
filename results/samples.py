"""Files of lines that grow: samples.jsonl of evaluate.py, answers.jsonl of generate.py.

Each of several processes appends to a part of its own, samples.jsonl.<rank>; the parts are merged
at the end, or by the next command if this one is interrupted. eval_config.json has what all samples
share: the model, the settings, and a hash of the questions of each task; answers.config.json is the
like beside answers.jsonl. Each sample has a hash of the former, and results.json has it whole, with
a checksum: neither is taken for that of another model.
"""

import functools
import glob
import hashlib
import json
import math
import re
from collections import Counter
from pathlib import Path

import numpy as np

from runtime import ownership
from runtime.digests import json_digest
from runtime.errors import ConfigError, DataError

SCALING = 'scaling.json'       # the fits of --fit_temperature, for --scaling
OUTPUTS = ('samples.jsonl', 'eval_config.json', 'results.json', 'results.md', 'results.csv',
           'results.tex', 'report.html')
DIAGRAM = 'reliability.png'
CHECKSUM = 'line_checksum'      # key of a row's hash, so that a damaged number is noticed
NORMS = ('token', 'sum', 'char', 'byte')    # see `option_lengths`
digest = functools.partial(json_digest, size=6)     # of a prompt
ANEW = 'remove it and evaluate its tasks again: with samples.jsonl beside it, that needs no model'
OTHER_FOLDER = 'choose another --out_dir, or --overwrite what was evaluated there'


def picture(task, kind='reliability', ending=''):
    """Return the name of a picture of a task, <kind>-<task>.png.

    A long task is cut, and what no name of a file has is replaced; then a hash tells tasks apart.
    """
    name = re.sub(r'[/\\\x00-\x1f\ud800-\udfff]', '_', task)
    if name != task or len(name.encode()) > 150:
        name = f'{name.encode()[:130].decode(errors="ignore")}-{json_digest(task, size=6)}'
    return f'{kind}-{name}{ending}.png'


def grid(task):
    """Return the name of the picture with a diagram per language."""
    return picture(task, ending='-languages')


def open_folder(out_dir, tasks, settings, *, pictures, overwrite, fit=False, processes=1):
    """Prepare `out_dir` for more samples of `tasks`; return (earlier, done).

    earlier: {task: its entry in results.json}; done: {(sample_key, prompt)} of the samples there,
    of a text if all its tokens are scored. Raises ConfigError as `open_lines` does.
    """
    samples, results = out_dir / 'samples.jsonl', out_dir / 'results.json'
    outputs = [*OUTPUTS, *[SCALING] * fit]
    if pictures:
        outputs += [DIAGRAM, *(grid(label) for label, task in tasks.items()
                               if len({item.language for item in task.items}) > 1)]
    if overwrite:
        ownership.rename_old(out_dir)
    sources = open_lines(out_dir, outputs, settings, 'samples', OTHER_FOLDER, processes,
                         [results]).get('tasks', {})
    for label, task in tasks.items():
        now = {'source': task.source, 'questions': task.fingerprint}
        earlier = sources.get(label, now)
        if all(now[key] != earlier[key] for key in now):
            raise ConfigError(f'{out_dir} holds {label} of {earlier["source"]}, and {task.source} '
                              f'has other questions; rename the file, or {OTHER_FOLDER}')
        sources[label] = now
    earlier = read_results(results, ANEW)['tasks'] if results.exists() else {}
    done = _scored(samples)
    claim_lines(out_dir, outputs, settings | {'tasks': sources}, processes)
    return earlier, done


def open_lines(folder, names, settings, what, advice, processes, more=()):
    """Prepare a file of lines to append to; return what all its lines share, or {} without lines.

    names: of the file, of the JSON file beside it, and of all others that will be written; more:
    other files that depend on the settings. Raises ConfigError, before it changes anything, for
    files that this program did not write, for other settings, or if the file that has them is
    damaged. The caller holds the folder's lock.
    """
    path, parts = folder / names[0], part_names(folder / names[0], processes)
    ownership.check_free(folder, *names, *parts)
    if path.is_symlink():
        raise ConfigError(f'{path} is a link to a file elsewhere, where nothing is appended; '
                          f'replace the link by that file, or {advice}')
    files = [path, *map(path.with_name, merged_names(path)), *more]
    if not any(file.exists() and file.stat().st_size for file in files):
        return {}
    with ownership.read_json(folder / names[1], advice) as before:
        for task in before.get('tasks', {}).values():
            task['source'], task['questions']
        keys = [key for key in (settings | before) if key != 'tasks'
                and settings.get(key) != before.get(key)]
    for key in keys[:1]:
        other = f'with {key} = {before.get(key)!r}, not {settings.get(key)!r}'
        if key in ('model', 'tokenizer'):       # hashes
            other = f'of another {key}'
        elif key == 'code':
            other = 'of other code: model.py or a file that it needs has been edited since'
        raise ConfigError(f'{path} holds {what} {other}; {advice}')
    return before


def identity_digest(settings):
    """Return a hash of what all samples of a folder share."""
    return json_digest({key: x for key, x in settings.items()
                        if key != 'tasks' and x is not None}, size=6)


def folder_identity(folder):
    """Return the hash of the settings in a folder, which its samples have; None without them."""
    path = folder / OUTPUTS[1]
    if not path.exists():
        return None
    with ownership.read_json(path, 'evaluate in another folder') as settings:
        return identity_digest(settings)


def samples_digest(samples):
    """Return a hash of what the metrics depend on, of the samples of the test split."""
    digest = hashlib.blake2b(digest_size=8)
    for s in sorted(of_split(samples), key=sample_order):
        numbers = (s['log_probs'], s['answer']) if 'log_probs' in s else (
            s['confidence'], s['correct'])
        digest.update(json.dumps([sample_order(s), *numbers], default=float).encode())
    return digest.hexdigest()


def claim_lines(folder, names, content, processes):
    """Put the files of `open_lines` on the list of `folder`; merge the parts of an earlier command;
    write what all lines share.
    """
    merge_parts(folder / names[0])
    ownership.claim(folder, *names, *part_names(folder / names[0], processes))
    ownership.write_text(folder / names[1], json.dumps(content, indent=1) + '\n')


def check_results(path, content):
    """Raise ValueError unless the content of a results.json is what was written, in this folder."""
    if content.pop('checksum', None) != json_digest(content):
        raise ValueError('edited, damaged or of an older version: it does not match its '
                         'checksum')
    identity = folder_identity(Path(path).parent)
    if identity and identity != identity_digest(content.get('identity', {})):
        raise ValueError(f'of another model, other settings or code than {OUTPUTS[1]} names')


def read_results(path, advice):
    """Return the content of a results.json, with NaN for null in reports; raises ConfigError."""
    with ownership.read_json(path, advice) as content:
        check_results(path, content)
        Path(content['config']['model']), content['seed']
        for result in content['tasks'].values():
            result['distribution'], result['pooled']['n'], NORMS.index(result['norm'])
            result |= {key: _null_to_nan(x) for key, x in result.items() if isinstance(x, dict)}
        return content


def _null_to_nan(value):
    if isinstance(value, dict):
        return {key: _null_to_nan(x) for key, x in value.items()}
    return math.nan if value is None else value


def _scored(path):
    """Return {(sample_key, prompt)} of the complete questions and texts, and of each sample."""
    latest = latest_samples(read_samples(*with_parts(path)), unstated=True)
    n_scored = Counter((sample_key(s), s['prompt']) for s in latest)
    return {(sample_order(s), s['prompt']) for s in latest} | {
        key for s in latest if n_scored[key := (sample_key(s), s['prompt'])] == s.get('of', 1)}


class SampleWriter:
    """Append the samples of one process to its part of samples.jsonl in `out_dir`.

    done: {(sample_key, prompt)} of the samples that are there; new: the samples that were appended
    """

    def __init__(self, out_dir, done, rank=0, processes=1):
        self.paths = [out_dir / 'samples.jsonl', part(out_dir / 'samples.jsonl', rank, processes)]
        self.done, self.new = done, []
        self.identity = folder_identity(out_dir)
        self.file = open(self.paths[1], 'ab', buffering=0)

    def append(self, key, prompt, sample):
        """Write a sample with its key, unless one of this prompt is there."""
        if not {(key, prompt), ((*key[:3], sample.get('id', key[3])), prompt)} & self.done:
            self.new.append(dict(zip(('task', 'split', 'language', 'id'), key), prompt=prompt)
                            | sample | {'identity': self.identity})
            append_line(self.file, self.new[-1])

    def latest(self, task=None):
        """Return the latest samples of all tasks, or of one with its `is_unstated`."""
        rows = [sample for path in dict.fromkeys(self.paths) if path.exists()
                for sample in read_samples(path)]
        return latest_samples([row for row in rows if task in (None, row['task'])],
                              unstated=task is not None)


def append_line(file, sample):
    """Append a line with its checksum to a file that is opened unbuffered.

    Raises ConfigError if the disk is full, or if the file or its folder was removed or moved.
    """
    ownership.check_in_place(file)
    # a lone surrogate in a field of the user's file becomes JSON's escape for it, as it was there
    sample = {key: x for key, x in sample.items() if key != CHECKSUM}   # of a file read as prompts
    text = json.dumps(sample | {CHECKSUM: json_digest(sample, 4)}, ensure_ascii=False)
    left = f'{text}\n'.encode('utf-8', 'backslashreplace')
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
    """Return the names of the parts of `path` that are there, by rank."""
    parts = re.compile(rf'{re.escape(path.name)}\.\d+')
    names = filter(parts.fullmatch, ownership.written_files(path.parent))
    return sorted(names, key=lambda name: int(name.rpartition('.')[2]))


def with_parts(path):
    """Return the file `path` and its parts, by rank, those that are there."""
    return [file for file in (path, *map(path.with_name, merged_names(path))) if file.exists()]


def merge_parts(path):
    """Add the lines of the parts of `path` to it, part by part, and remove the parts.

    A crash at any moment loses no line and doubles none; a last line that it cut off is left out.
    """
    names, texts = merged_names(path), [file.read_bytes() for file in with_parts(path)]
    if names or any(text[-1:] not in (b'', b'\n') for text in texts):
        lines = dict.fromkeys(line for text in texts for line in text.split(b'\n')[:-1])
        # an editor may have left out the last line break
        lines |= dict.fromkeys(last for text in texts
                               if _checked(last := text.rpartition(b'\n')[2]) is not None)
        with ownership.temporary(path) as whole, open(whole, 'wb') as file:
            file.writelines(line + b'\n' for line in lines)
        ownership.discard(path.parent, *map(glob.escape, names))


# Reading: the samples of a file, and which of them count

def read_samples(*paths):
    """Return the samples in `paths` in the order of the files, each once.

    Raise DataError with file and line for a damaged line, one of another model, other settings or
    code than those of eval_config.json, and one that differs from the latest one of the same
    question and prompt.
    """
    samples, last = [], {}
    identity = folder_identity(Path(paths[0]).parent) if paths else None
    for line, row in read_jsonl(*paths):
        if identity and row.get('identity') != identity:
            raise DataError(f'{line}: not of the model, settings and code in {OUTPUTS[1]}, or of '
                            f'an older version; evaluate in another folder, or compare the file as '
                            f'it is: --compare {paths[0]}')
        earlier_line, earlier = last.get(sample_order(row), (None, {}))
        if row == earlier:
            continue
        if earlier and row['prompt'] == earlier['prompt']:
            raise DataError(f'{line}: differs from {earlier_line}, of the same question '
                            f'({row["task"]} {row["id"]}); remove one of the two lines')
        last[sample_order(row)] = line, row
        samples.append(row)
    return samples


def read_jsonl(*paths):
    """Yield ('file:line', row) of the lines that `append_line` wrote, but for a last one that a
    crash cut off; DataError for another line.
    """
    for path in paths:
        with open(path, 'rb') as file:
            for number, line in enumerate(file, 1):
                row = _checked(line)
                if row is not None:
                    yield f'{path}:{number}', row
                elif line.endswith(b'\n'):
                    raise DataError(
                        f'{path}:{number}: damaged, edited or of an older version: it does not '
                        f'match its {CHECKSUM}; delete this line and repeat the command, or '
                        f'compare the file as it is: --compare {path}')


def _checked(line):
    """Return the row in a line, or None if it does not match its checksum."""
    try:
        row = json.loads(line)
        checksum = row.pop(CHECKSUM)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    return row if checksum == json_digest(row, 4) else None


def of_split(samples, split='test'):
    """Return the samples of a split; older files have none, and are all of 'test'."""
    return [s for s in samples if s.get('split', 'test') == split]


def by_order(samples):
    """Return {'1', '2', ...: samples as an evaluation in that order of the options gives them}.

    A question with fewer orders than others has its first one again after its last.
    """
    orders = {}
    for k in range(max(len(s['orders']) for s in samples)):
        chosen = [(s, s['orders'][k % len(s['orders'])]) for s in samples]
        orders[str(k + 1)] = [s | order | {'answer': order['order'].index(s['answer'])}
                              for s, order in chosen]
    return orders


def read_splits(path):
    """Return ({task: its latest samples}, likewise of the validation split), by `sample_order`."""
    samples = sorted(latest_samples(read_samples(path)), key=sample_order)
    return tuple(by_task(of_split(samples, split), {}) for split in ('test', 'validation'))


def by_task(samples, prompts):
    """Return {task: its samples}; of a task in {task: {(sample_key, prompt)}} only those."""
    tasks = {task: [] for task in prompts}
    for sample in samples:
        task, prompt = sample['task'], (sample_key(sample), sample['prompt'])
        if task not in prompts or prompt in prompts[task]:
            tasks.setdefault(task, []).append(sample)
    return tasks


def sample_order(sample):
    """Return a key to sort samples by; it is equal only for samples of the same question."""
    return sample['task'], sample.get('split', ''), sample.get('language', ''), sample['id']


def sample_key(sample):
    """Return a key of the question or text that a sample belongs to."""
    return (*sample_order(sample)[:3], sample.get('text', sample['id']))


def first_id(id):
    """Return x of 'x#2', which is another answer to the question x if that is there."""
    return re.sub(r'(#\d+)+$', '', id)


def question_numbers(samples):
    """Return (the number of each sample's question, int [N]; how many), or None if all differ.

    Samples with one id are of one question: in several languages, as tokens of one text, or as 'x'
    and 'x#2', which rows with one id in a file become. Ids that are equal by chance do no harm:
    within a language they differ, and unrelated rows that are drawn together vary as they should.
    """
    ids = [s.get('text', s['id']) for s in samples]
    known, numbers = {*ids}, {}
    for i, id in enumerate(ids):
        first = first_id(id)
        ids[i] = numbers.setdefault(first if first in known else id, len(numbers))
    return (np.array(ids), len(numbers)) if len(numbers) < len(ids) else None


def latest_samples(samples, unstated=False):
    """Return the samples of the latest prompt of each question or text, without repetitions.

    unstated: also answers that were to state a probability and did not: their `confidence` is None
    """
    prompts = {sample_key(s): s.get('prompt') for s in samples}
    latest = {(sample_key(s), s['id']): s for s in samples
              if s.get('prompt') == prompts[sample_key(s)]}
    return [s for s in latest.values() if unstated or not is_unstated(s)]


def is_unstated(sample):
    return sample.get('confidence', 0) is None


# The scores of options


def option_scores(log_probs, options, n_tokens, norm):
    """Return log-probabilities / length [K]; their softmax is the distribution over the options."""
    texts = [option.removeprefix(' ') for option in options]
    return np.asarray(log_probs) / option_lengths(texts, n_tokens, norm)


def option_lengths(texts, n_tokens, norm):
    """Return the divisor of each option's log-probability, int [K], at least 1, for a norm.

    token: n_tokens; sum: 1; char, byte: those of the texts, which have no leading space
    """
    if norm in ('token', 'sum'):
        return [*n_tokens] if norm == 'token' else [1] * len(n_tokens)
    return [max(1, len(text if norm == 'char' else text.encode())) for text in texts]
