"""Texts whose tokens are to be predicted: at a random position, or where an entity begins.

The two tasks beside multiple choice of Zhu et al. 2023, 'On the Calibration of Large Language
Models and Alignment': causal language modelling (`clm`) and fact generation (`facts`).
"""

from dataclasses import dataclass

from data import DataError, fetch, require_text
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


def load_texts(name, *, limit=None, revision=None, on_bad_row='stop'):
    """(texts, bad rows) of a task 'clm:place' or 'facts:place'; raises DataError.

    clm:   .txt files, or `text` fields of JSONL and parquet; `clm` alone is wikitext-2's test split
    facts: T-REx's files (a list of {docid, text, entities: [{boundaries: [begin, end]}]}), or JSONL
           of {text, spans: [[begin, end], ...]}
    """
    kind, _, place = name.partition(':')
    if not place and kind == 'facts':
        raise DataError('facts: where are the texts? --tasks=facts:folder-or-file, in the format '
                        'of T-REx or JSONL of {text, spans}')
    patterns = (*PATTERNS, '*.json') if place else ('wikitext-2-raw-v1/test-*.parquet',)
    texts, bad, seen = [], [], {}
    for file in fetch(place or WIKITEXT, patterns, revision):
        for where, row in documents(file):
            if limit is not None and len(texts) >= limit:
                return texts, bad
            try:
                if isinstance(row, DataError):
                    raise row
                text = _to_text(kind, row, len(texts) + len(bad), where)
                if text is None:
                    continue
                again = seen[text.id] = seen.get(text.id, 0) + 1
                text.id += f'#{again}' if again > 1 else ''
                texts.append(text)
            except DataError as error:
                message = str(error) if where in str(error) else f'{where}: {error}'
                if on_bad_row == 'stop':
                    raise DataError(f'{message}; --on_bad_row=skip leaves such rows out') from None
                bad.append(message)
    if not texts:
        raise DataError(f'{place or WIKITEXT} has no texts ({len(bad)} bad rows)')
    return texts, bad


def _to_text(kind, row, number, where):
    if not isinstance(row, dict):
        raise DataError(f'a row must be an object with named fields, not {type(row).__name__}')
    text = require_text(row.get('text'), 'the field "text"')
    id = str(row.get('id', row.get('docid', number)))
    language = str(row.get('language') or '')
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
