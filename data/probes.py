"""Texts whose tokens are scored: one at a random position (`clm`), or the first of each entity
(`facts`), of Zhu et al. 2023, 'On the Calibration of Large Language Models and Alignment'.
"""

import functools
import hashlib
import io
import math
from dataclasses import dataclass

import numpy as np

from data.files import read_rows, require_fields, require_text
from data.items import draw, parse_rows
from data.texts import TEXT_PATTERNS
from data.questions import Loaded
from data.tasks import Task, dropout_words
from data.tree_rows import Tree
from runtime.errors import ConfigError, DataError
from runtime.sources import fetch

WIKITEXT = 'Salesforce/wikitext'
# patterns of the files; the first one with a match is used
PATTERNS = {'clm': ('wikitext-2-raw-v1/test-*.parquet', 'wiki.test.txt*', *TEXT_PATTERNS, '*.json'),
            'facts': (*TEXT_PATTERNS, '*.json')}
# T-REx's annotators of pronouns and of words that express a relation
NOT_ENTITIES = 'Simple_Coreference', 'Wikidata_Property_Linker'
SHOWN_TOKENS = 100      # before a scored token, in its sample
# the instruction before the text, for an aligned model (table 1 of the paper)
INSTRUCTIONS = {'clm': 'Finish this sentence:', 'facts': 'Finish this Wikipedia description:'}


@dataclass
class Text:
    """A text, and for facts the [begin, end) character spans of its entities."""
    id: str
    text: str
    spans: list[tuple[int, int]]
    place: str          # file and line or row, for messages
    language: str = ''
    subject = group = ''    # texts have no subjects and no shots
    split = 'test'


def load_texts(name, cfg):
    """Return questions.Loaded with the texts of 'clm', 'clm:path' or 'facts:path'; raises
    DataError, and ConfigError for a setting that texts do not have.
    """
    kind, _, path = name.partition(':')
    for key, defaults in (('chat', ('auto', 'none')), ('languages', (('all',),))):
        if getattr(cfg, key) not in defaults:
            raise ConfigError(f'{key} = {getattr(cfg, key)}: {kind} scores tokens of all its '
                              f'texts; evaluate it without --{key} into another --out_dir')
    if not path and kind == 'facts':
        raise DataError('facts: no folder or file given; use --tasks=facts:folder-or-file, with '
                        'the format of T-REx or JSONL of {text, spans}')
    patterns = PATTERNS[kind] if path else PATTERNS[kind][:1]
    files = fetch(path or WIKITEXT, patterns, cfg.data_revision)
    rows = (row for file in files for row in _rows(file))
    texts, bad = parse_rows(rows, functools.partial(_to_text, kind), cfg.on_bad_row)
    if not texts:
        raise DataError(f'{path or WIKITEXT} has no texts' + ' of four words or more' * (
            kind == 'clm') + f' ({len(bad)} bad rows)')
    return Loaded(draw(texts, cfg.limit, cfg.seed), {}, bad, len(texts))


def _rows(file):
    """Yield the (place, row) pairs of a file; a line of wikitext's .txt files is a row."""
    for place, row in read_rows(file):
        if file.name.startswith('wiki.') and '.txt' in file.suffixes and isinstance(row, dict):
            for number, line in enumerate(io.StringIO(row['text']), 1):
                yield f'{place}:{number}', {'text': line}
        else:
            yield place, row


def _to_text(kind, row, place, number):
    text = require_text(require_fields(row).get('text'), 'the field "text"')
    id = next((row[key] for key in ('id', 'docid') if row.get(key) is not None), number)
    id = require_text(str(id), 'the id')
    language = require_text(str(row.get('language') or ''), 'the language')
    if kind == 'clm':
        # skip wikitext's blank lines and headings
        return Text(id, text, [], place, language) if len(text.split()) > 3 else None
    spans = row.get('spans')        # else T-REx's entities, without pronouns and relations
    if spans is None and isinstance(row.get('entities'), list):
        spans = [e.get('boundaries') for e in map(require_fields, row['entities'])
                 if e.get('annotator') not in NOT_ENTITIES]
    if not isinstance(spans, list):
        raise DataError('no spans: wanted "spans": [[begin, end], ...] or T-REx\'s "entities"')
    for span in spans:
        if not (isinstance(span, (list, tuple)) and [type(x) for x in span] == [int, int]
                and 0 <= span[0] < span[1] <= len(text)):
            raise DataError(f'span {span!r} is not [begin, end] within a text of {len(text)} '
                            f'characters')
    return Text(id, text, sorted({tuple(span) for span in spans}), place, language)


class TextTask(Task):
    """Texts whose tokens are scored; a sample says whether the top token is the next one."""
    unit = 'texts'
    continues = statistics = True
    identity = 'id', 'text', 'spans', 'language'

    read = staticmethod(load_texts)

    def tokenize(self, tokenizer, cfg):
        """Yield (Text, Tree or DataError) of each text, cut to cfg.max_length tokens; clm scores a
        random token, facts the first of each entity that begins, with the space before it, at a
        token border.
        """
        lead = f'{INSTRUCTIONS[self.label]} ' if cfg.instruct else ''
        bos = [tokenizer.bos_id] if cfg.add_bos else []
        first = len(bos) + len(tokenizer.encode(lead.rstrip())) if lead else len(bos) + 1
        for text in self.items:
            ids = (bos + tokenizer.encode(lead + text.text))[:cfg.max_length]
            if self.label == 'clm':
                missing = f'{len(ids)} tokens leave none to predict'
                digest = hashlib.blake2b(text.text.encode(), digest_size=8).digest()
                rng = np.random.default_rng([cfg.seed, int.from_bytes(digest, 'little')])
                scored = {int(rng.integers(first, len(ids)))} if first < len(ids) else set()
            else:
                missing = 'no entity begins at a token boundary with text before it'
                before = [(lead + text.text[:begin]).removesuffix(' ') for begin, _ in text.spans]
                heads = [bos + tokenizer.encode(part) if part else bos for part in before]
                scored = {len(head) for head in heads
                          if first <= len(head) < len(ids) and ids[:len(head)] == head}
            yield text, Tree((), ids[:max(scored) + 1], scored=sorted(scored)) if scored else (
                DataError(f'{text.place}: {missing}'))

    def as_text(self, text):
        return [(text.text, [])]

    @staticmethod
    def samples(tokenizer, text, tree, numbers, values):
        ids, token_samples = [*tree.prefix, *tree.prompt], []
        for n in np.argsort(numbers):
            at = tree.scored[numbers[n]]
            log_prob, top, top_log_prob, entropy = values[n]
            token_samples.append({
                'id': f'{text.id}:{at}' if len(tree.scored) > 1 else text.id, 'text': text.id,
                'position': at, 'token': ids[at], 'top_token': int(top),
                'correct': bool(int(top) == ids[at]),
                'confidence': min(1.0, math.exp(top_log_prob)), 'log_prob': float(log_prob),
                'entropy': float(entropy), 'of': len(tree.scored),
                'context': tokenizer.decode(ids[max(0, at - SHOWN_TOKENS):at], start=False),
                'predicted': tokenizer.decode([int(top)], start=False),
                'expected': tokenizer.decode([ids[at]], start=False)})
        return token_samples

    def distribution(self, cfg):
        return 'top token' + ', with an instruction' * cfg.instruct + dropout_words(cfg)


TASK = TextTask
