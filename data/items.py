"""Rows of files as the items of a task: questions or texts with an id, and a sample of them."""

import collections
import functools

from data.files import is_empty, parsed, require_text, text_digest, without_bad
from runtime.errors import DataError


def with_passage(row, question):
    """Return a question after the passage beside it, as in RACE; raise DataError for an image."""
    if not (is_empty(row.get('image')) and is_empty(row.get('images'))):
        raise DataError('the question has an image, which the model would not see; leave it out')
    for name in ('passage', 'article', 'context'):
        text = row.get(name)
        if isinstance(question, str) and text and text == text and str(text) not in question:
            question = f'{require_text(text, f"the {name}")}\n{question}'
    return question


def parse_rows(rows, parse, on_bad_row):
    """Return (items, messages of bad rows) of (place, row) pairs; see `without_bad`.

    parse(row, place, number) returns an item, or None to ignore the row; `number` counts from 0.
    The ids of the items are made unique: the second 'x' becomes 'x#2'.
    """
    items = []
    bad = []
    seen = collections.Counter()
    results = (parsed(place, row, parse, place, len(items) + len(bad)) for place, row in rows)
    for item in without_bad(results, on_bad_row, bad):
        if item is not None:
            seen[item.id] += 1
            while seen[item.id] > 1:
                item.id = f'{item.id}#{seen[item.id]}'
                seen[item.id] += 1
            items.append(item)
    return items, bad


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
    chosen = (i for queue in queues.values() for _, _, i in sorted(queue)[:limit])
    return [items[i] for i in sorted(chosen)]
