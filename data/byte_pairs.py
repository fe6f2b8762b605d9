"""Byte-level BPE for the `tokenizers` library from the files that it does not read by itself:
Llama 3's `tokenizer.model`, Mistral's `tekken.json`, and `vocab.json` with `merges.txt`.
"""

import binascii
import json
import re
from pathlib import Path

from data.tokenizer import library_errors, read_beside, settings_beside
from runtime.errors import DataError
from runtime.json_rules import read_json_object

# how names of control tokens look, in files that do not say whether a token is one
IN_BRACKETS = re.compile(r'<.+>|\[.+\]')
# Llama 3: the regular expression of words, and 256 control tokens after 128,000 ranks
LLAMA3_PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
                  r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
LLAMA3_RANKS, LLAMA3_CONTROLS = 128_000, 256
LLAMA3_NAMES = {0: '<|begin_of_text|>', 1: '<|end_of_text|>', 4: '<|finetune_right_pad_id|>',
                6: '<|start_header_id|>', 7: '<|end_header_id|>', 8: '<|eom_id|>', 9: '<|eot_id|>',
                10: '<|python_tag|>'}
TEKKEN_CONTROLS = (
    '<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] '
    '[/TOOL_RESULTS] [TOOL_CALLS] [IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] '
    '[SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]').split()
# the character that stands for each byte in the pieces of byte-level BPE
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTE_CHARS = {byte: chr(byte) for byte in PRINTABLE} | {
    byte: chr(256 + i) for i, byte in enumerate(sorted(set(range(256)) - set(PRINTABLE)))}


def from_tiktoken(path):
    """Return the tokenizer of Llama 3's `tokenizer.model` and the name of EOS."""
    try:
        words = Path(path).read_bytes().split()
        ranks = dict(zip(map(binascii.a2b_base64, words[::2]), map(int, words[1::2]), strict=True))
    except ValueError as error:
        raise DataError(f'{path}: not a tiktoken file: {error}') from error
    if sorted(ranks.values()) != list(range(LLAMA3_RANKS)):
        raise DataError(f'{path}: {len(ranks)} ranks; only the Llama 3 file ({LLAMA3_RANKS} ranks) '
                        f'is supported; download tokenizer.json from the same hub repository')
    control_ids = {LLAMA3_NAMES.get(i, f'<|reserved_{i}|>'): LLAMA3_RANKS + i
                   for i in range(LLAMA3_CONTROLS)}
    pieces = dict(sorted(ranks.items(), key=lambda item: item[1]))
    return _byte_pairs(LLAMA3_PATTERN, pieces, control_ids, LLAMA3_NAMES[0]), LLAMA3_NAMES[1]


def from_tekken(path):
    """Return the tokenizer of Mistral's `tekken.json` and the name of EOS.

    Special tokens come before the pieces, which are numbered by their rank. Files before v11 may
    lack the list of special tokens, which are TEKKEN_CONTROLS then.
    """
    content = read_json_object(Path(path), DataError)
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
        pattern = settings['pattern']
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise DataError(f'{path}: not a tekken.json: {type(error).__name__}: {error}; download '
                        f'tokenizer.json from the same hub repository') from error
    if [*pieces.values()] != [*range(n_special, n_special + n_pieces)]:
        raise DataError(f'{path}: the ranks in vocab are not {n_pieces} in a row from 0')
    with library_errors(path):
        return _byte_pairs(pattern, pieces, control_ids, '<s>'), '</s>'


def _byte_pairs(pattern, pieces, control_ids, bos):
    """Return a tokenizer of {bytes: id} in the order of merges, whose texts begin with `bos`."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    names = {''.join(map(BYTE_CHARS.get, piece)): i for piece, i in pieces.items()}
    # a word that is a piece is not merged from others, as in tiktoken
    library = Tokenizer(models.BPE(control_ids | names, merges(names), ignore_merges=True))
    library.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(pattern), 'isolated'),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(name, special=True, normalized=False)
                                for name in sorted(control_ids, key=control_ids.get)])
    library.post_processor = begin_with(bos, control_ids[bos])
    return library


def merges(pieces):
    """Return every (left, right) that joins to one of `pieces`, in their order."""
    ranks, pairs = {piece: rank for rank, piece in enumerate(pieces)}, []
    for piece in pieces:
        splits = [(piece[:i], piece[i:]) for i in range(1, len(piece))
                  if piece[:i] in ranks and piece[i:] in ranks]
        pairs += sorted(splits, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return pairs


def begin_with(bos, bos_id):
    """Return the post-processor that puts BOS before a text; None without BOS."""
    from tokenizers import processors
    return processors.TemplateProcessing(single=[bos, '$A'], pair=[bos, '$A', '$B:1'],
                                         special_tokens=[(bos, bos_id)]) if bos else None


def from_merges(path):
    """Return the tokenizer of a `vocab.json` with `merges.txt` beside it: GPT-2 and OPT. A piece
    that no merge makes, such as OPT's `<s>`, is a control token.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    settings = settings_beside(path.parent)
    added = added_beside(path.parent)
    bos = settings.get('add_bos_token') and settings.get('bos_token')
    vocab, merges_path = read_json_object(path, DataError), path.parent / 'merges.txt'
    if not merges_path.exists():
        raise DataError(f'{path} needs {merges_path.name} beside it; download both')
    lines = merges_path.read_text(encoding='utf-8').split('\n')
    made = {line.replace(' ', '') for line in lines if not line.startswith('#version')}
    unmade = {i: {'content': name, 'special': True, 'normalized': False}
              for name, i in vocab.items() if len(name) > 1 and name not in made}
    with library_errors(path):
        library = Tokenizer(models.BPE.from_file(str(path), str(merges_path)))
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = decoders.ByteLevel()
        library.add_tokens([AddedToken(**token) for _, token in sorted((unmade | added).items())])
    library.post_processor = begin_with(bos, library.token_to_id(bos)) if bos else None
    return library


def added_beside(folder):
    """Return {id: attributes of an AddedToken} of the tokens that JSON files of a folder add."""
    names = read_beside(folder, 'added_tokens.json')
    tokens = settings_beside(folder).get('added_tokens_decoder') or {}
    control = dict.fromkeys(('lstrip', 'rstrip', 'single_word', 'normalized'), False) | {
        'special': True}
    path = Path(folder, 'tokenizer.json')
    try:
        if not tokens and path.exists():    # by transformers 5; Gemma's whole file takes a second
            part = re.search(rb'(?s)"added_tokens":\s*(\[.*?\]),\s*"normalizer"', path.read_bytes())
            tokens = {token['id']: token for token in json.loads(part[1] if part else '[]')}
        named = [(i, {'content': name, 'special': bool(IN_BRACKETS.fullmatch(name))})
                 for name, i in names.items()] + [*tokens.items()]
        return {int(i): {key: token.get(key, value) for key, value in control.items()}
                | {'content': '' + token['content']} for i, token in named}     # fails if no text
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise DataError(f'{folder}: damaged tokens in added_tokens.json, tokenizer_config.json or '
                        f'tokenizer.json: {error!r}') from error
