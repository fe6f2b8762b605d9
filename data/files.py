"""Find data files, in a folder or on the hub, and read rows from them."""

import collections
import contextlib
import functools
import hashlib
import json
import os
import re
import shutil
from pathlib import Path

from runtime import readers
from runtime.errors import CheckpointError, ConfigError, DataError, escape_controls
from runtime.hub import download, is_hub_name
from runtime.ownership import note_inputs, temporary


# names of hidden files, and of what the library datasets writes beside rows
NO_DATA = re.compile(r'\.|(dataset_(infos?|dict)|state)\.json$')


def fetch(source, patterns, revision=None):
    """Return the files of a dataset, a sorted list of paths; raises DataError.

    source:   a file, a folder, or the name of a hub dataset
    patterns: globs; the first one with a match is used. In a folder, files of another format that
              later ones match are named in a note; from the hub they are not downloaded. With
              '*.zip' among them, archives on the hub are downloaded and unpacked first
    revision: the hub commit, tag or branch to read; pin it, because datasets change
    """
    path = Path(os.path.expanduser(source))
    if revision and path.exists():
        raise DataError(f'data_revision = {revision!r} is for datasets of the hub, but {source} '
                        f'is on disk; leave it out')
    if path.is_file():
        note_inputs(path)
        return [path]
    if not path.is_dir():
        if not is_hub_name(source):
            raise DataError(f'no file or folder at {source}, and it is not a hub dataset name')
        for pattern in patterns:
            path = download_files(source, pattern, '*.zip' in patterns, revision)
            if matches(path, pattern):
                break
    if path.exists() and not os.access(path, os.R_OK | os.X_OK):    # `glob` would find nothing
        raise DataError(f'cannot read the folder {source}: Permission denied')
    for i, pattern in enumerate(patterns):
        if files := matches(path, pattern):
            note_inputs(*files)
            if (n := re.search(r'-\d+-of-(\d+)\b', files[-1].name)) and len(files) < int(n[1]):
                print(f'{source}: only {len(files)} of {int(n[1])} files {pattern} are there')
            beside = matches(path, *(later for later in patterns[i + 1:] if '/' not in later))
            if unread := [p.name for p in beside if p.suffix != files[0].suffix
                          and p.with_suffix('') not in files]:
                print(f'{source}: {pattern} is read, and not {", ".join(unread[:3])}'
                      + ', ...' * (len(unread) > 3) + '; to read all, write them in one format')
            return files
    folders = sorted(str(p) for p in path.glob('[!.]*') if p.is_dir())
    raise DataError(f'{source} holds nothing that matches {" or ".join(patterns)}'
                    + (f'; name one of its folders {", ".join(folders[:9])}' if folders else ''))


def download_files(source, pattern, archives, revision):
    """Return the folder of a hub dataset with the files of a pattern, and unpacked `archives`."""
    path = download(source, [pattern, *['*.zip'] * archives], revision, repo_type='dataset')
    for archive in path.glob('*.zip'):
        unpacked = archive.with_suffix('')
        if not unpacked.exists():
            with writing(unpacked), temporary(unpacked, folder=True) as part:
                shutil.unpack_archive(archive, part)
    return path


def matches(folder, *patterns):
    """Return the data files of a folder that match a glob, sorted, without compressed copies."""
    files = {p for pattern in patterns for p in folder.glob(pattern)
             if p.is_file() and not NO_DATA.match(p.name)}
    return sorted(p for p in files if p.suffix != '.gz' or p.with_suffix('') not in files)


def fetch_training(source, patterns, revision=None):
    """Return the files of `fetch` but those that are named as a test or validation split."""
    files = fetch(source, patterns, revision)
    held_out = re.compile(r'(.*[-_.])?(test|dev|eval|val|valid|validation)([-_]\d[^.]*)?\.')
    chosen = [file for file in files if not held_out.match(file.name)] or files
    if others := [file.name for file in files if file not in chosen]:
        print(f'{source}: {", ".join(others)} not read, as held out; name a file to train on it')
    return chosen


@contextlib.contextmanager
def writing(path):
    """Raise a DataError that names `path` if writing fails; a full disk's own error names none."""
    try:
        yield
    except OSError as error:
        raise DataError(f'cannot write {path}: {error.strerror or error}') from error


# ---- Rows of files -------------------------------------------------------------------------------

def read_rows(*paths):
    """Yield (place, row) of files as `runtime.readers.read_rows` does; a row of a table is a dict.

    The first row of a .csv or .tsv file names its columns. Only a .csv file whose first row ends in
    a letter or a number, the answer of MMLU's own files, has no names: its rows are lists.
    """
    for path in map(Path, paths):
        note_inputs(path)
        yield from readers.read_rows(path, _named_cells)


def _named_cells(lines, delimiter):
    names = None
    for place, cells in lines:
        if names is None:
            first = [name.strip().lower() for name in cells]
            if (delimiter != ',' or {'question', 'answer'} <= {*first}
                    or not re.fullmatch('[A-Z]|[0-9]+', cells[-1].strip())):
                names = readers.column_names(place, first)
                continue
            names = []
        yield place, readers.to_dict(place, names, cells) if names else cells


# ---- Rows to items -------------------------------------------------------------------------------

def require_fields(row):
    """Return `row` if it is a dict; raise a DataError for another."""
    if not isinstance(row, dict):
        raise DataError(f'a row must be an object with named fields, which the first line of a '
                        f'table names, not {type(row).__name__}')
    return row


def has_fields(row, *names):
    """Return whether a raw row is a dict with all these fields."""
    return isinstance(row, dict) and row.keys() >= {*names}


def one_of(row, *names):
    """Return the value of the fields `names` of a row, which mean one thing; None if it has none.

    Raises DataError if two of them differ.
    """
    given = [name for name in names if row.get(name) is not None]
    for name in given[1:]:
        if row[name] != row[given[0]]:
            raise DataError(f'"{given[0]}" and "{name}" of the row differ: {row[given[0]]!r:.60} '
                            f'and {row[name]!r:.60}; keep one of them')
    return row[given[0]] if given else None


def with_passage(row, question):
    """Return a question after the passage that a row has beside it, as in RACE and SQuAD."""
    for name in ('passage', 'article', 'context'):
        text = row.get(name)
        if isinstance(question, str) and text and text == text and str(text) not in question:
            question = f'{require_text(text, f"the {name}")}\n{question}'
    return question


def json_list(text, what):
    """Return the list, not an empty one, in a cell of a table; raise a DataError naming `what`."""
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        if isinstance(value := json.loads(text), list) and value:
            return value
    raise DataError(f'{what} must be a JSON list: {text!r:.60}')


def require_text(value, what):
    """Return `value` if it is a string of valid Unicode; raise a DataError that names `what`."""
    if not isinstance(value, str):
        wrong = 'missing' if value is None else f'not text but {type(value).__name__}'
        raise DataError(f'{what} is {wrong}')
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(f'{what} is not valid Unicode: {error.reason}') from None
    return value


def parsed(place, row, parse, *arguments):
    """Return parse(row, *arguments), or a DataError that says what is wrong with the row."""
    try:
        if isinstance(row, DataError):
            raise row
        return parse(row, *arguments)
    except (ConfigError, CheckpointError):      # ValueErrors too, but not of the row
        raise
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError,
            RecursionError) as error:
        # a parser does not check the fields that it uses
        fields = f' among {", ".join(map(str, row)):.200}' if isinstance(row, dict) else ''
        message = str(error) if isinstance(error, DataError) else (
            'not the fields of its format: '
            + (f'there is no {error}' if isinstance(error, KeyError) else repr(error)) + fields)
        message = escape_controls(message.encode('utf-8', 'backslashreplace').decode())
        return DataError(message if message.startswith(place) else f'{place}: {message}')


def without_bad(results, on_bad_row, bad):
    """Yield results; 'stop' raises a DataError among them, 'skip' adds its message to `bad`."""
    for result in results:
        if not isinstance(result, DataError):
            yield result
        elif on_bad_row == 'stop':
            raise DataError(f'{result}; --on_bad_row=skip leaves such rows out')
        else:
            bad.append(str(result))


def parse_rows(rows, parse, on_bad_row):
    """Return (items, messages of bad rows) of (place, row) pairs; see `without_bad`.

    parse(row, place, number) returns an item, or None to ignore the row; `number` counts from 0.
    The ids of the items are made unique: the second 'x' becomes 'x#2'.
    """
    items, bad, seen = [], [], collections.Counter()
    results = (parsed(place, row, parse, place, len(items) + len(bad)) for place, row in rows)
    for item in without_bad(results, on_bad_row, bad):
        if item is None:
            continue
        seen[item.id] += 1
        while seen[item.id] > 1:
            item.id = f'{item.id}#{seen[item.id]}'
            seen[item.id] += 1
        items.append(item)
    return items, bad


def text_digest(*content):
    """Return a hash of texts, numbers and lists of these."""
    return hashlib.blake2b(repr(content).encode(), digest_size=8).hexdigest()


def draw(items, limit, seed):
    """Return at most `limit` items per language, drawn evenly from its subjects, in their order.

    The choice depends only on the seed and on the items' subjects and ids. The sample of a larger
    limit contains that of a smaller one; languages that share ids get the same questions.
    """
    if limit is None:
        return items
    rank = functools.partial(text_digest, seed)
    counts, queues = collections.Counter(), collections.defaultdict(list)
    for i in sorted(range(len(items)), key=lambda i: rank(items[i].subject, items[i].id)):
        language, subject = items[i].language, items[i].subject
        # the first item of every subject comes before the second of any
        counts[language, subject] += 1
        queues[language].append((counts[language, subject], rank(subject), i))
    chosen = [sorted(queue)[:limit] for queue in queues.values()]
    return [items[i] for i in sorted(i for queue in chosen for _, _, i in queue)]
