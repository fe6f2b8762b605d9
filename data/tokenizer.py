"""Load the tokenizer of a model folder, by the libraries `tokenizers` and `sentencepiece`.

`encode` takes plain text and never produces a control token: `<|eot_id|>`, `[INST]` or
`<start_of_turn>` in it become ordinary pieces. To use a control token, append its id.
"""

import contextlib
import hashlib
import itertools
import os
import re
from pathlib import Path

from runtime import rooms
from runtime.errors import CheckpointError, DataError
from runtime.json_rules import read_json_object

# the files of tokenizers, most wanted first
FILES = ('tokenizer.model', 'original/tokenizer.model', 'tokenizer.model.v*', 'spiece.model',
         'tokenizer.json', 'tekken.json', 'vocab.json')


class Tokenizer:
    """What both kinds of tokenizers share. `load_tokenizer` adds end_ids, those that end an answer;
    fingerprint, a hash of all its files; special_names, {'bos_token': name}; chat_templates.
    """

    def __init__(self, control_ids, bos_id, eos_id, n_vocab, strips, leads_with_space):
        self.control_ids = control_ids      # {name: id} of tokens that no text produces
        self.bos_id = bos_id                # None if the tokenizer adds no BOS
        self.eos_id = eos_id                # the token that ends a text
        self.n_vocab = n_vocab              # above every id
        # {id of a control token: (before it, after it)}, whether white space disappears
        self.strips = {i: sides for i, sides in strips.items() if any(sides)}
        self.fresh_after = frozenset()      # ids after which a text is encoded as at its beginning
        # Llama 2's and Mistral's models put a space before any text. A continuation must not have
        # it, so it is encoded after a newline, which never merges with what follows.
        self.leads_with_space = leads_with_space
        self._newline = self._encode('\n') if leads_with_space else []

    def encode(self, text, start=True):
        """Return the ids of plain text, without BOS; start: whether it stands alone or follows BOS,
        where Llama 2's and Mistral's models put a space, or continues an encoded text.
        """
        if start or not self._newline:
            return self._encode(text)
        ids = self._encode('\n' + text)
        if ids[:len(self._newline)] != self._newline:
            raise DataError(f'this tokenizer merges a newline with {text[:20]!r}, so it cannot '
                            f'encode a continuation')
        return ids[len(self._newline):]

    def begins_text(self, ids):
        """Return whether a text after `ids` is encoded as at the beginning."""
        return not ids or ids == [self.bos_id] or ids[-1] in self.fresh_after

    def decode(self, ids, start=True):
        """Return the text of ids, control tokens by their names, '' for an id without a token."""
        names, parts = {i: name for name, i in self.control_ids.items()}, []
        for is_control, run in itertools.groupby(map(int, ids), names.__contains__):
            if is_control:
                for i in run:
                    parts.append(names[i])
                    start = start and i == self.bos_id or i in self.fresh_after
                continue
            # decoded after a newline too, or sentencepiece would drop a leading space
            text = self._decode([*self._newline, *run])[1 if self._newline else 0:]
            parts.append(text.removeprefix(' ') if start and self._newline else text)
            start = False
        return ''.join(parts)


class LibraryTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library: any tokenizer.json, and what byte_pairs.py builds.

    Its ids are those of AutoTokenizer, except that names of special tokens in a text are text. BOS
    and EOS are control tokens in any case, but no special token that ordinary merges produce too.
    """

    def __init__(self, library, eos, path):
        from tokenizers import AddedToken
        # its threads gain nothing for one text at a time, and would not survive a fork
        os.environ.setdefault('TOKENIZERS_PARALLELISM', 'false')
        self.library = library
        self.path = path
        library.no_truncation()
        library.no_padding()
        library.encode_special_tokens = True
        if getattr(library.model, 'dropout', None):
            raise DataError(f'{path}: model.dropout is not supported, since ids would be random')
        if library.token_to_id(eos or '') is None:
            raise DataError(f'{path.parent / "tokenizer_config.json"} must have eos_token, the '
                            f'name of a token in {path.name}')
        with library_errors(path):
            encoded = library.encode('a')
        bos_id = encoded.ids[0] if encoded.special_tokens_mask[:1] == [1] else None
        first, = library.encode('a', add_special_tokens=False).tokens[:1] or ['']
        if first.startswith('\u0120'):
            raise DataError(f'{path}: pre_tokenizer with add_prefix_space is not supported, since '
                            f'an answer must not begin with a space of its own')

        ends = {eos} if bos_id is None else {eos, library.id_to_token(bos_id)}
        library.add_special_tokens([AddedToken(name, special=True, normalized=False)
                                    for name in sorted(ends - special_tokens(library).keys())])
        controls = special_tokens(library)
        # the neighbors of a name decide which pieces are merged first
        words = {name for name, (i, _) in controls.items()
                 if i in self._encode(f'{name} a{name}\n{name}')}
        if words & ends:
            raise DataError(f'{path}: the text {min(words & ends)!r} would become the token that '
                            f'begins or ends a text; download tokenizer.model or spiece.model')
        controls = {name: controls[name] for name in controls.keys() - words}
        super().__init__(
            {name: i for name, (i, _) in sorted(controls.items(), key=lambda item: item[1][0])},
            bos_id, library.token_to_id(eos), max(library.get_vocab().values()) + 1,
            {i: (token.lstrip, token.rstrip) for i, token in controls.values()},
            first.startswith('\u2581'))
        if self.leads_with_space:   # the library may put the space after each control token too
            library.encode_special_tokens = False
            self.fresh_after = frozenset(
                i for name, i in self.control_ids.items()
                if self._encode(name + 'a') == [i, *self._encode('a')])
            library.encode_special_tokens = True

    def _encode(self, text):
        with library_errors(self.path):
            # a quarter faster than `encode`, since it computes no offsets
            return self.library.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def _decode(self, ids):
        return self.library.decode(ids, skip_special_tokens=False)


def special_tokens(library):
    """Return {name: (id, AddedToken)} of the special tokens of a tokenizers.Tokenizer."""
    return {token.content: (i, token)
            for i, token in library.get_added_tokens_decoder().items() if token.special}


@contextlib.contextmanager
def library_errors(path):
    """Raise a DataError that names `path` for an error of the tokenizers library in its block."""
    try:
        yield
    except BaseException as error:
        # PanicException, of a regular expression that does not end, is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != 'PanicException':
            raise
        raise DataError(f'{path}: the tokenizers library cannot read this file, or encode a text '
                        f'with it: {error}') from error


# ---- Files of a model folder ---------------------------------------------------------------------

def load_tokenizer(folder):
    """Return the Tokenizer of a model folder, from the first of FILES in it; raises DataError."""
    import tokenizers
    folder = Path(folder)
    files = [path for pattern in FILES for path in sorted(folder.glob(pattern))]
    if not files:
        raise DataError(f'{folder} has no tokenizer: none of {", ".join(FILES)}')
    path, raw = files[0], files[0].read_bytes()
    if not raw:
        raise DataError(f'{path} is empty; download it again')
    if path.name in ('tokenizer.json', 'vocab.json'):
        if path.name == 'vocab.json':
            library = rooms.load('byte pairs').from_merges(path)
            raw += (folder / 'merges.txt').read_bytes()
        else:
            with library_errors(path):
                library = tokenizers.Tokenizer.from_file(str(path))
        tokenizer = LibraryTokenizer(library, _eos(folder, library), path)
    elif path.name == 'tekken.json':
        tokenizer = LibraryTokenizer(*rooms.load('byte pairs').from_tekken(path), path)
    elif re.match(rb'[A-Za-z0-9+/]+=* \d+\r?\n', raw):
        tokenizer = LibraryTokenizer(*rooms.load('byte pairs').from_tiktoken(path), path)
    else:
        tokenizer = rooms.load('sentence pieces').SentencePieceTokenizer(path)
    said_beside = tokenizer.bos_id, tokenizer.eos_id, tokenizer.control_ids, tokenizer.strips
    tokenizer.fingerprint = hashlib.sha256(raw + repr(said_beside).encode()).hexdigest()[:16]
    tokenizer.end_ids = {tokenizer.eos_id, *generation_ends(folder)}
    tokenizer.special_names = {key: value for key, value in settings_beside(folder).items()
                               if key.endswith('_token') and isinstance(value, str)}
    tokenizer.chat_templates = chat_templates(folder)
    return tokenizer


def _eos(folder, library):
    """Return the name of EOS that tokenizer_config.json or config.json says, or None."""
    name = settings_beside(folder).get('eos_token')
    if library.token_to_id(name or '') is not None:
        return name
    i = read_beside(folder, 'config.json').get('eos_token_id')
    i = i[0] if i and isinstance(i, list) else i
    return library.id_to_token(i) if type(i) is int and i >= 0 else None


def read_beside(folder, name):
    """Return the object in a JSON file of a folder, {} without the file."""
    path = Path(folder) / name
    return read_json_object(path, DataError) if path.exists() else {}


def settings_beside(folder):
    """Return the keys of special_tokens_map.json and tokenizer_config.json, tokens as names."""
    settings = (read_beside(folder, 'special_tokens_map.json')
                | read_beside(folder, 'tokenizer_config.json'))
    settings = {key: value['content'] if isinstance(value, dict) and 'content' in value else value
                for key, value in settings.items()}
    for key in ('bos_token', 'eos_token'):
        if not isinstance(settings.get(key, ''), str | None):
            raise DataError(f'{folder}: {key} = {settings[key]!r} in tokenizer_config.json or '
                            f'special_tokens_map.json; it must be the name of a token, or null')
    return settings


def chat_templates(folder):
    """Return {name: Jinja source} of the chat templates in a folder; the usual one is 'default'."""
    path = Path(folder) / 'chat_template.jinja'
    if path.exists():
        others = Path(folder).glob('additional_chat_templates/*.jinja')
        return {'default': path.read_text(encoding='utf-8')} | {
            other.stem: other.read_text(encoding='utf-8') for other in others}
    for name in ('chat_template.json', 'tokenizer_config.json'):
        templates = read_beside(folder, name).get('chat_template')
        if isinstance(templates, list):
            templates = {part['name']: part['template'] for part in templates}
        if templates:
            return templates if isinstance(templates, dict) else {'default': templates}
    return {}


def generation_ends(folder):
    """Return the ids in eos_token_id of a folder's generation_config.json; [] without any."""
    ends = read_beside(folder, 'generation_config.json').get('eos_token_id')
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    if not all(type(i) is int and i >= 0 for i in ends):
        raise DataError(f'{Path(folder) / "generation_config.json"}: eos_token_id = {ends!r} must '
                        f'be the number of a token, or a list of them')
    return ends


def load_model_tokenizer(folder, config):
    """Return the tokenizer of a model folder, with the end_ids of config.json as well and without
    last control tokens that the model has no row for, such as the image token of Gemma 3 1B. Raises
    CheckpointError if the model has fewer tokens.
    """
    tokenizer, size = load_tokenizer(folder), config.vocab_size
    ends = getattr(config, 'eos_token_id', None)
    tokenizer.end_ids |= {*ends} if isinstance(ends, list) else {ends} - {None}
    controls = {name: i for name, i in tokenizer.control_ids.items() if i < size}
    without_row = len(tokenizer.control_ids) - len(controls)
    if without_row and without_row == tokenizer.n_vocab - size and tokenizer.eos_id < size:
        tokenizer.n_vocab, tokenizer.control_ids = size, controls
    if tokenizer.n_vocab > size:
        raise CheckpointError(f'{folder}: the tokenizer has {tokenizer.n_vocab} tokens, but '
                              f'vocab_size in config.json is {size}')
    return tokenizer


def begins_with_bos(tokenizer, add_bos):
    """Return `add_bos`, or if it is None whether the tokenizer adds BOS."""
    if add_bos and tokenizer.bos_id is None:
        raise DataError('add_bos = True, but the tokenizer of this model adds no BOS; leave it out')
    return tokenizer.bos_id is not None if add_bos is None else add_bos
