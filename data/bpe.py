"""Byte-level BPE by tiktoken: `tokenizer.json`, `vocab.json`, `tekken.json`, Llama 3's file."""

import binascii
import itertools
import re
import unicodedata
from pathlib import Path

from runtime.errors import DataError
from runtime.ownership import read_json_object

# Llama 3: the regular expression of words, and 256 control tokens after 128,000 ranks
LLAMA3_PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
                  r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
LLAMA3_RANKS, LLAMA3_CONTROLS = 128_000, 256
LLAMA3_NAMES = {0: '<|begin_of_text|>', 1: '<|end_of_text|>', 4: '<|finetune_right_pad_id|>',
                6: '<|start_header_id|>', 7: '<|end_header_id|>', 8: '<|eom_id|>', 9: '<|eot_id|>',
                10: '<|python_tag|>'}
# The characters of a word in Oniguruma, the library that other programs split texts with; Python's
# `regex` has zero-width joiners and no superscripts or fractions of Latin-1.
WORD = r'(?:(?![\u200c\u200d])[\w\xb2\xb3\xb9\xbc-\xbe])'
BOUNDARY = rf'(?:(?<={WORD})(?!{WORD})|(?<!{WORD})(?={WORD}))'
TEKKEN_CONTROLS = (
    '<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] '
    '[/TOOL_RESULTS] [TOOL_CALLS] [IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] '
    '[SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]').split()
UTF8_BYTES = {*range(256)} - {0xc0, 0xc1, *range(0xf5, 256)}    # no text has the others
# The step `ByteLevel` of a tokenizer.json, alone and after `Digits`, which makes each digit a word,
# and all white space before it, as at the end of a text: one expression is faster than two.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DIGITS_PATTERN = GPT2_PATTERN.replace(r' ?\p{N}+', r'\p{N}').replace(
    r'\s+(?!\S)', r'\s+(?=\p{N})|\s+(?!\S)')
ADDED_FLAGS = ('lstrip', 'rstrip', 'single_word')       # of an added token of a tokenizer.json
CONTROL = {'special': True, 'normalized': False} | dict.fromkeys(ADDED_FLAGS, False)
# the character that stands for each byte in the pieces of a tokenizer.json
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTE_CHARS = {byte: chr(byte) for byte in PRINTABLE} | {
    byte: chr(256 + i) for i, byte in enumerate(sorted(set(range(256)) - set(PRINTABLE)))}
# tiktoken's regular expression recurses on long runs of white space or of other characters, so
# longer ones are split
LONGEST_RUN = 25_000
LONG_RUN = rf'\S{{{LONGEST_RUN}}}(?=\S)|\s{{{LONGEST_RUN}}}(?=\s)'


class BytePairTokenizer:
    """Byte-level BPE.

    patterns:    regular expressions. The words of a text, which are encoded one by one, are the
                 matches of the last one. Each earlier one first splits the text into its matches
                 and the text between them.
    pieces:      {bytes: id}, in the order in which they are merged
    control_ids: {name: id} of tokens that no text produces
    added:       {text: id} of tokens that are split off first
    nfc:         whether the text between them is then normalized to NFC
    added_late:  {text: id} of tokens that are split off after that
    strips:      {id of a control token: (before it, after it)}, whether white space disappears
    """

    fresh_after = frozenset()   # as in SentencePieceTokenizer: no text gets a leading space here

    def __init__(self, patterns, pieces, control_ids, bos_id, eos_id, added=(), nfc=False,
                 added_late=(), strips=()):
        import regex
        import tiktoken
        *splits, self.pattern = patterns
        self.pieces, self.strips = pieces, dict(strips)
        ranks = {piece: rank for rank, piece in enumerate(pieces)}
        self._encoding = tiktoken.Encoding('bpe', pat_str=self.pattern, mergeable_ranks=ranks,
                                           special_tokens={})
        self._splits = [regex.compile(split.replace(r'\b', BOUNDARY)) for split in splits]
        ids = list(pieces.values())
        self._ids = None if ids == list(range(len(ids))) else ids
        self._added, self._nfc, self._added_late = dict(added), nfc, dict(added_late)
        names = control_ids | self._added | self._added_late
        self._bytes = ({i: piece for piece, i in pieces.items()}
                       | {i: name.encode() for name, i in names.items()})
        self.control_ids, self.bos_id, self.eos_id = control_ids, bos_id, eos_id
        self.n_vocab = max(self._bytes) + 1

    def encode(self, text, start=True):
        """Return the ids of plain text, without BOS. `start` has no effect here."""
        ids = []
        for part in self._parts(text):
            if isinstance(part, int):
                ids.append(part)
            else:
                ranks = self._encoding.encode_ordinary(part)
                ids += ranks if self._ids is None else [self._ids[rank] for rank in ranks]
        return ids

    def decode(self, ids, start=True):
        """Return the text of ids, control tokens by their names, '' for an id without a token.

        `start` has no effect here.
        """
        return b''.join(self._bytes.get(int(i), b'') for i in ids).decode('utf-8', errors='replace')

    def _parts(self, text):
        """Return the parts of a text: strings to encode, and ids of added tokens."""
        parts = []
        for part in _cut(text, self._added):
            if self._nfc and isinstance(part, str):
                part = unicodedata.normalize('NFC', part)
            for piece in _cut(part, self._added_late) if isinstance(part, str) else [part]:
                if isinstance(piece, str) and len(piece) > LONGEST_RUN:
                    cuts = [0, *(m.end() for m in re.finditer(LONG_RUN, piece)), len(piece)]
                    parts += [piece[a:b] for a, b in itertools.pairwise(cuts)]
                else:
                    parts.append(piece)
        for split in self._splits:
            parts = [piece for part in parts for piece in (
                _matches_and_gaps(split, part) if isinstance(part, str) else [part])]
        return parts


def _cut(text, added):
    """Split a text at the tokens of `added`, the longest first; return texts and ids in order."""
    if not added:
        return [text]
    longest_first = '|'.join(map(re.escape, sorted(added, key=len, reverse=True)))
    return [added.get(part, part) for part in re.split(f'({longest_first})', text) if part]


def _matches_and_gaps(pattern, text):
    """Split a text into the matches of a compiled expression and the text between them."""
    ends = [end for match in pattern.finditer(text) for end in match.span()]
    return [text[a:b] for a, b in itertools.pairwise([0, *ends, len(text)]) if a < b]


def from_tiktoken(path):
    """Return the tokenizer of Llama 3's `tokenizer.model`: per line a base64 token and its rank."""
    try:
        words = Path(path).read_bytes().split()
        ranks = dict(zip(map(binascii.a2b_base64, words[::2]), map(int, words[1::2]), strict=True))
    except ValueError as error:
        raise DataError(f'{path}: not a tiktoken file: {error}') from error
    if sorted(ranks.values()) != list(range(LLAMA3_RANKS)):
        raise DataError(f'{path}: {len(ranks)} ranks; only the Llama 3 file ({LLAMA3_RANKS} ranks) '
                        f'is supported')
    control_ids = {LLAMA3_NAMES.get(i, f'<|reserved_{i}|>'): LLAMA3_RANKS + i
                   for i in range(LLAMA3_CONTROLS)}
    pieces = dict(sorted(ranks.items(), key=lambda item: item[1]))
    return BytePairTokenizer([LLAMA3_PATTERN], pieces, control_ids,
                             control_ids['<|begin_of_text|>'], control_ids['<|end_of_text|>'])


def from_tekken(path):
    """Return the tokenizer of Mistral's `tekken.json`: special tokens, then pieces by their rank.

    Files before v11 may lack the list of special tokens, which are TEKKEN_CONTROLS then.
    """
    path = Path(path)
    content = read_json_object(path)
    try:
        settings = content['config']
        controls = content.get('special_tokens') or [
            {'rank': i, 'token_str': name} for i, name in enumerate(TEKKEN_CONTROLS)]
        n_special = settings['default_num_special_tokens']
        n_pieces = settings['default_vocab_size'] - n_special
        pieces = {binascii.a2b_base64(token['token_bytes']): token['rank'] + n_special
                  for token in sorted(content['vocab'], key=lambda token: token['rank'])[:n_pieces]}
        control_ids = {token['token_str']: token['rank'] for token in controls}
        control_ids |= {f'<SPECIAL_{i}>': i for i in range(len(control_ids), n_special)}
        if [*pieces.values()] != [*range(n_special, n_special + n_pieces)]:
            raise DataError(f'{path}: the ranks in vocab are not {n_pieces} in a row from 0')
        return BytePairTokenizer([settings['pattern']], pieces, control_ids, control_ids['<s>'],
                                 control_ids['</s>'])
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise DataError(f'{path}: not a tekken.json: {type(error).__name__}: '
                        f'{error}; download tokenizer.json from the same hub repository') from error


def from_merges(path):
    """Return the tokenizer of a `vocab.json` with `merges.txt` beside it: GPT-2 and OPT.

    A piece that no merge makes, such as OPT's `<s>`, is a control token.
    """
    path = Path(path)
    vocab, merges_path = read_json_object(path), path.parent / 'merges.txt'
    if not merges_path.exists():
        raise DataError(f'{path} needs {merges_path.name} beside it; download both')
    lines = merges_path.read_text(encoding='utf-8').split('\n')
    merges = [line for line in lines if line and not line.startswith('#version')]
    made = {merge.replace(' ', '') for merge in merges}
    unmade = {i: CONTROL | {'content': name} for name, i in vocab.items()
              if len(name) > 1 and name not in made}
    return _from_content(path, {
        'model': {'type': 'BPE', 'vocab': vocab, 'merges': merges}, 'normalizer': None,
        'pre_tokenizer': {'type': 'ByteLevel', 'add_prefix_space': False},
        'added_tokens': [token | {'id': i}
                         for i, token in (unmade | added_beside(path.parent)).items()]})


def _read_beside(folder, name):
    return read_json_object(folder / name) if (folder / name).exists() else {}


def settings_beside(folder):
    """Return the keys of special_tokens_map.json and tokenizer_config.json, tokens as names.

    Raises DataError for a damaged file.
    """
    settings = (_read_beside(folder, 'special_tokens_map.json')
                | _read_beside(folder, 'tokenizer_config.json'))
    settings = {key: value['content'] if isinstance(value, dict) and 'content' in value else value
                for key, value in settings.items()}
    for key in ('bos_token', 'eos_token'):
        if not isinstance(settings.get(key, ''), str | None):
            raise DataError(f'{folder}: {key} = {settings[key]!r} in tokenizer_config.json or '
                            f'special_tokens_map.json; it must be the name of a token, or null')
    return settings


def added_beside(folder):
    """Return the tokens that added_tokens.json and tokenizer_config.json add: {id: object}.

    An object has the keys of a token in a tokenizer.json: content, special, ADDED_FLAGS,
    normalized. Raises DataError for a damaged file.
    """
    names = _read_beside(folder, 'added_tokens.json').items()
    settings = settings_beside(folder)
    try:
        tokens = settings.get('added_tokens_decoder', {}).items()
        return ({int(i): CONTROL | {'content': name} for name, i in names}
                | {int(i): CONTROL | token | {'content': token['content']} for i, token in tokens})
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise DataError(f'{folder}: added_tokens.json or added_tokens_decoder in '
                        f'tokenizer_config.json is damaged: {type(error).__name__}: {error}'
                        ) from error


def from_json(path):
    """Return the tokenizer of a `tokenizer.json`: Llama 3, Qwen, OLMo 2, Aya, Phi-4, Pythia, ...

    Its ids are those of the `tokenizers` library with `encode_special_tokens`. The files beside it
    name BOS and EOS; bos_id is None if the tokenizer adds no BOS. A special token that is also a
    word made by merges is no control token. Raises DataError for other kinds of tokenizer. tiktoken
    joins two pieces whenever the result is a piece: with a file made by hand, whose merges lack
    such a pair, ids can differ.
    """
    return _from_content(Path(path), read_json_object(Path(path)))


def _from_content(path, content):
    """Return the tokenizer with the content of a tokenizer.json; `path` names it in errors."""
    try:
        model, added = content['model'], content['added_tokens']
        if model.get('byte_fallback') or model.get('type') == 'Unigram':
            raise DataError(f'{path} is a sentencepiece model, which is read from tokenizer.model '
                            f'or spiece.model: download that file from the same hub repository')
        patterns, nfc = _patterns(content, path), content['normalizer'] is not None
        _require_ids(path, model['vocab'], added)
        merges = _merges(path, model, {token['content'] for token in added})
        settings = settings_beside(path.parent)
        # whatever the file says, the tokens that begin and end a text are no part of it
        ends = {_bos(content, settings), settings.get('eos_token')}
        controls = [token for token in added if token['special'] or token['content'] in ends]
        plain = [token for token in added if token not in controls]
        for problem, occurs in (
                ('model.type', model['type'] != 'BPE'), ('model.dropout', model.get('dropout')),
                ('model.continuing_subword_prefix', model.get('continuing_subword_prefix')),
                ('model.end_of_word_suffix', model.get('end_of_word_suffix')),
                ('normalizer', nfc and content['normalizer'] != {'type': 'NFC'}),
                ('an added token with lstrip, rstrip or single_word', any(
                    token[key] for token in plain for key in ADDED_FLAGS))):
            if occurs:
                raise DataError(f'{path}: {problem} is not supported; only byte-level BPE is, with '
                                f'or without NFC')
        special = {token['content']: token['id'] for token in controls}
        bos_id, eos_id = _bos_and_eos(path, content, model['vocab'] | special)
        words = {*merges}
        special = {name: i for name, i in special.items()
                   if not (name.isalpha() and name in words) or i in (bos_id, eos_id)}
        strips = {token['id']: (token['lstrip'], token['rstrip']) for token in added
                  if token['content'] in special and (token['lstrip'] or token['rstrip'])}
        first, late = ({token['content']: token['id'] for token in plain
                        if token['normalized'] is normalized} for normalized in (False, True))
        pieces = _pieces(model, merges, special | first | late)
        missing = [byte for byte in UTF8_BYTES if bytes([byte]) not in pieces]
        if missing:
            raise DataError(f'{path}: model.vocab has no piece for byte {missing[0]}')
        return BytePairTokenizer(patterns, pieces, special, bos_id, eos_id, first, nfc, late,
                                 strips)
    except DataError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise DataError(f'{path}: not a tokenizer.json, or a wrong file beside it: '
                        f'{type(error).__name__}: {error}') from error


def _patterns(content, path):
    """Return the regular expressions of `pre_tokenizer`, as BytePairTokenizer takes them."""
    steps = content['pre_tokenizer']
    *splits, last = steps.get('pretokenizers', [steps])
    by_itself = last['type'] == 'ByteLevel' and last.get('use_regex', True)
    patterns = [_split_pattern(step, i == len(splits) - 1 and not by_itself)
                for i, step in enumerate(splits)]
    if last['type'] == 'ByteLevel' and not last['add_prefix_space'] and None not in patterns:
        if by_itself:
            patterns.append(GPT2_PATTERN)
        if patterns == [r'\p{N}', GPT2_PATTERN]:
            return [DIGITS_PATTERN]
        if patterns:
            _require_words(patterns, path)
            return patterns
    kinds = ', '.join(step['type'] for step in [*splits, last])
    raise DataError(f'{path}: pre_tokenizer with {kinds} is not supported; only ByteLevel is, '
                    f'alone or after Digits or Splits by regular expressions')


def _require_words(patterns, path):
    """Raise DataError for what is no regular expression or matches an empty word."""
    import regex
    for pattern in patterns:
        try:
            problem = 'it matches the empty text' if regex.match(pattern, '') else ''
        except (regex.error, RecursionError) as error:
            problem = error
        if problem:
            raise DataError(f'{path}: pre_tokenizer: {pattern!r} is not a regular expression of '
                            f'words: {problem}')


def _split_pattern(step, final):
    """Return the regular expression of a step before ByteLevel; None if it is not supported.

    final: whether its matches are the words, and tiktoken drops what is between them
    """
    pattern = behavior = None
    if step['type'] == 'Digits':
        pattern, behavior = r'\p{N}' if step['individual_digits'] else r'\p{N}+', 'Isolated'
    elif step['type'] == 'Split':
        pattern, behavior = step['pattern'].get('Regex'), step['behavior']
    if behavior == 'Removed' and step['invert'] and final:
        return pattern
    if behavior != 'Isolated' or pattern is None:
        return None
    return rf'{pattern}|(?:(?!{pattern})[\s\S])+' if final else pattern


def _require_ids(path, vocab, added):
    """Raise DataError unless the ids are distinct integers from 0."""
    names = {}
    for name, i in [*vocab.items(), *((token['content'], token['id']) for token in added)]:
        if type(i) is not int or i < 0:
            raise DataError(f'{path}: the token {name!r} has the id {i!r}; an id is an integer '
                            f'from 0')
        if names.setdefault(i, name) != name:
            raise DataError(f'{path}: the tokens {names[i]!r} and {name!r} have the same id {i}')


def _merges(path, model, added):
    """Return the pieces that merges make, in order; in the file 'a b' or, newer, ['a', 'b']."""
    merges = []
    for number, merge in enumerate(model['merges']):
        pair = merge if isinstance(merge, list) else merge.split(' ')
        if len(pair) != 2 or not all(pair):
            raise DataError(f'{path}: model.merges[{number}] is {merge!r}; wanted two pieces')
        merges.append(pair[0] + pair[1])
    long = next((piece for piece in model['vocab'] if len(piece) > 1 and piece not in added), None)
    if long and not merges and not model.get('ignore_merges'):
        raise DataError(f'{path}: model.merges is empty, so that nothing makes the piece {long!r} '
                        f'of model.vocab; download the file again')
    return merges


def _pieces(model, merges, added):
    """Return {bytes: id} in the order of tiktoken's ranks: single bytes, then the merges."""
    to_byte = {char: byte for byte, char in BYTE_CHARS.items()}
    ids = {piece: i for piece, i in model['vocab'].items() if piece not in added}
    order = dict.fromkeys(sorted((piece for piece in ids if len(piece) == 1), key=ids.get))
    order |= dict.fromkeys(merges)      # several merges may make the same piece
    if model.get('ignore_merges'):      # a word that is a piece is not merged from others
        order |= ids
    # of all pieces, so that bad characters are refused in those left out, too
    raw = {piece: bytes(map(to_byte.__getitem__, piece)) for piece in order | ids}
    return {raw[piece]: ids[piece] for piece in order if piece in ids}


def _bos_and_eos(path, content, ids):
    """Return bos_id, None if the tokenizer adds no BOS, and eos_id."""
    settings, config = settings_beside(path.parent), _read_beside(path.parent, 'config.json')
    eos_id = ids.get(settings.get('eos_token'), config.get('eos_token_id'))
    eos_id = eos_id[0] if isinstance(eos_id, list) else eos_id
    eos_id = eos_id if eos_id in ids.values() else None
    bos = _bos(content, settings)
    if eos_id is None:
        raise DataError(f'{path.parent / "tokenizer_config.json"} must have eos_token, the name of '
                        f'a token in {path.name}')
    if bos and bos not in ids:
        raise DataError(f'{path}: no token has the name {bos!r}, with which each text begins by '
                        f'post_processor or, in tokenizer_config.json, bos_token')
    return ids[bos] if bos else None, eos_id


def _bos(content, settings):
    """Return the name of the token that the tokenizer puts first, or None.

    In a tokenizer.json its post-processor alone decides, as in transformers. A vocab.json has none,
    and the key add_bos_token decides.
    """
    if 'post_processor' not in content:
        return settings.get('bos_token') if settings.get('add_bos_token') else None
    steps = content['post_processor'] or {}
    for step in steps.get('processors', [steps]):
        if step.get('type') == 'TemplateProcessing' and 'SpecialToken' in step['single'][0]:
            return step['single'][0]['SpecialToken']['id']
    return None
