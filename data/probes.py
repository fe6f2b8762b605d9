"""Texts whose tokens are to be predicted: at a random position, or where an entity begins.

The two tasks beside multiple choice of Zhu et al. 2023, 'On the Calibration of Large Language
Models and Alignment': causal language modelling (`clm`) and fact generation (`facts`).
"""

from dataclasses import dataclass
from typing import NamedTuple

from data import DataError, draw, fetch, parse_rows, require_text
from data.text import PATTERNS, documents

WIKITEXT = 'Salesforce/wikitext'
# what an aligned model is told before the text (table 1 there)
INSTRUCTIONS = {'clm': 'Finish this sentence:', 'facts': 'Finish this Wikipedia description:'}


@dataclass
class Text:
    """A text, and for facts the (begin, end) characters of its entities."""
    id: str
    text: str
    spans: list[tuple[int, int]]
    language: str = ''
    place: str = ''     # file and line or row, for messages
    subject = ''        # texts have none


class LoadedTexts(NamedTuple):
    """The texts of a task, messages of its bad rows, and how many texts `limit` chose from."""
    texts: list
    bad: list
    total: int


def load_texts(name, *, limit=None, seed=0, revision=None, on_bad_row='stop'):
    """LoadedTexts of a task 'clm:place' or 'facts:place'; raises DataError.

    clm:   .txt files, or `text` fields of JSONL and parquet; `clm` alone is wikitext-2's test split
    facts: T-REx's files (a list of {docid, text, entities: [{boundaries: [begin, end]}]}), or JSONL
           of {text, spans: [[begin, end], ...]}
    limit: only so many texts of each language, drawn by the seed
    """
    kind, _, place = name.partition(':')
    if not place and kind == 'facts':
        raise DataError('facts: where are the texts? --tasks=facts:folder-or-file, in the format '
                        'of T-REx or JSONL of {text, spans}')
    patterns = (*PATTERNS, '*.json') if place else ('wikitext-2-raw-v1/test-*.parquet',)
    rows = (item for file in fetch(place or WIKITEXT, patterns, revision)
            for item in documents(file))
    texts, bad = parse_rows(rows, lambda row, number: _to_text(kind, row, number), on_bad_row)
    if not texts:
        raise DataError(f'{place or WIKITEXT} has no texts ({len(bad)} bad rows)')
    return LoadedTexts(draw(texts, limit, seed), bad, len(texts))


def _to_text(kind, row, number):
    if not isinstance(row, dict):
        raise DataError(f'a row must be an object with named fields, not {type(row).__name__}')
    text = require_text(row.get('text'), 'the field "text"')
    id = next((row[key] for key in ('id', 'docid') if row.get(key) is not None), number)
    id = require_text(str(id), 'the id')
    language = require_text(str(row.get('language') or ''), 'the language')
    if kind == 'clm':
        # wikitext's blank lines and headings are no texts
        return Text(id, text, [], language) if len(text.split()) > 3 else None
    spans = row.get('spans')
    if spans is None and isinstance(row.get('entities'), list):
        spans = [e.get('boundaries') if isinstance(e, dict) else None for e in row['entities']]
    if not isinstance(spans, list):
        raise DataError('no spans: wanted "spans": [[begin, end], ...] or T-REx\'s "entities"')
    found = set()
    for span in spans:
        if not (isinstance(span, (list, tuple)) and len(span) == 2
                and all(isinstance(x, int) and not isinstance(x, bool) for x in span)
                and 0 <= span[0] < span[1] <= len(text)):
            raise DataError(f'span {span!r} is not [begin, end] within a text of {len(text)} '
                            f'characters')
        found.add(tuple(span))
    return Text(id, text, sorted(found), language)
