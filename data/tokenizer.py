"""Load the tokenizer of a model folder: sentencepiece, or byte-level BPE from bpe.py.

`encode` takes plain text and never produces a control token: `<|eot_id|>`, `[INST]` or
`<start_of_turn>` in it become ordinary pieces. To use a control token, append its id.
"""

import hashlib
import re
from pathlib import Path

from data.bpe import (added_beside, from_json, from_merges, from_tekken, from_tiktoken,
                      settings_beside)
from runtime.errors import CheckpointError, DataError
from runtime.ownership import read_json_object

# Gemma's file declares these as user-defined symbols, which sentencepiece would use in any text
GEMMA_CONTROLS = (rb'<start_of_turn>|<end_of_turn>|<start_of_image>|<end_of_image>|<mask>|<2mass>|'
                  rb'\[multimodal\]|\[@BOS@\]|<unused\d+>')
# the files of tokenizers, most wanted first
FILES = ('tokenizer.model', 'original/tokenizer.model', 'tokenizer.model.v*', 'spiece.model',
         'tokenizer.json', 'tekken.json', 'vocab.json')


class SentencePieceTokenizer:
    """Gemma, Mistral, Llama 2, T5 and the demo's own model, from a sentencepiece file.

    The files beside it can add control tokens, as Phi-3's do, name EOS, and say that no BOS is
    added. bos_id is None then, and for a model without BOS, such as T5.

    strips:      {id of an added token: (before it, after it)}, whether white space disappears
    fresh_after: ids after which a text is encoded as at its beginning
    """

    def __init__(self, path):
        import sentencepiece
        # A serialized piece is: name, 0x15 and a float score, 0x18 and its type. Change type 4
        # (user-defined) to 3 (control), which sentencepiece never finds in text.
        raw = re.sub(rb'(\x0a.(?:' + GEMMA_CONTROLS + rb')\x15.{4}\x18)\x04', b'\\g<1>\x03',
                     Path(path).read_bytes(), flags=re.DOTALL)
        try:
            model = sentencepiece.SentencePieceProcessor(model_proto=raw)
        except RuntimeError as error:
            raise DataError(f'{path}: neither a tiktoken nor a sentencepiece file: {error}'
                            ) from error
        self.model = model
        # Llama 2's and Mistral's models put a space before any text. A continuation must not have
        # it, so it is encoded after a newline, which never merges with what follows.
        self.leads_with_space = model.encode('a', out_type=str)[0].startswith('\u2581')
        self._newline = model.encode('\n') if self.leads_with_space else []
        self.n_pieces = model.get_piece_size()
        self.control_ids = {model.id_to_piece(i): i for i in range(self.n_pieces)
                            if model.is_control(i)}
        added, settings = added_beside(Path(path).parent), settings_beside(Path(path).parent)
        added = {i: token for i, token in added.items() if i >= self.n_pieces}
        self.control_ids |= {token['content']: i for i, token in added.items()}
        self.strips = {i: (token['lstrip'], token['rstrip']) for i, token in added.items()
                       if token['lstrip'] or token['rstrip']}
        self.fresh_after = frozenset(added if self.leads_with_space else ())
        self.n_vocab = max([self.n_pieces, *(i + 1 for i in added)])
        self.eos_id = self.control_ids.get(settings.get('eos_token'), model.eos_id())
        if self.eos_id < 0:
            raise DataError(f'{path}: the model has no EOS token')
        adds_bos = model.bos_id() >= 0 and settings.get('add_bos_token', True)
        self.bos_id = model.bos_id() if adds_bos else None

    def encode(self, text, start=True):
        """Return the ids of plain text, without BOS.

        start: True if the text stands alone or follows BOS: Llama 2's and Mistral's models then put
               a space before it. False if it continues text that was encoded before.
        """
        if start or not self._newline:
            return self.model.encode(text)
        return self._continued(text, self.model.encode('\n' + text))

    def _continued(self, text, ids):
        if ids[:len(self._newline)] != self._newline:
            raise DataError(f'this sentencepiece model merges a newline with {text[:20]!r}, so it '
                            f'cannot encode a continuation')
        return ids[len(self._newline):]

    def decode(self, ids, start=True):
        """Return the text of ids, control tokens by their names. `start` as in `encode`."""
        names = {i: name for name, i in self.control_ids.items()}
        parts, run = [], []
        for i in [*ids, None]:
            if i is not None and i < self.n_pieces and i not in names:
                run.append(int(i))
                continue
            # decoded after a newline too, or sentencepiece would drop a leading space
            text = self.model.decode(self._newline + run)[1 if self._newline else 0:]
            if start and run and self._newline:
                text = text.removeprefix(' ')
            start = start and not run and i == self.bos_id or i in self.fresh_after
            parts += [text, names.get(i, '')]
            run = []
        return ''.join(parts)


def begins_with_bos(tokenizer, add_bos):
    """Return `add_bos`, or if it is None whether the tokenizer adds BOS.

    Raises DataError if add_bos is True and the tokenizer adds no BOS.
    """
    if add_bos and tokenizer.bos_id is None:
        raise DataError('add_bos = True, but the tokenizer of this model adds no BOS; leave it out')
    return tokenizer.bos_id is not None if add_bos is None else add_bos


def load_tokenizer(folder):
    """Return the tokenizer of a model folder, by the content of its file; raises DataError.

    The first of FILES is read. A tokenizer has encode, decode, bos_id (None if it adds no BOS),
    eos_id, end_ids (of the tokens that end an answer: eos_id and those of generation_config.json),
    control_ids (name -> id), strips, fresh_after, n_vocab (above every id), and `fingerprint`, a
    hash of the file and of what the files beside it change.
    """
    folder = Path(folder)
    files = [path for pattern in FILES for path in sorted(folder.glob(pattern))]
    if not files:
        raise DataError(f'{folder} has no tokenizer: none of {", ".join(FILES)}')
    raw = files[0].read_bytes()
    if not raw:
        raise DataError(f'{files[0]} is empty; download it again')
    if files[0].suffix == '.json':
        kinds = {'tekken.json': from_tekken, 'vocab.json': from_merges}
        tokenizer = kinds.get(files[0].name, from_json)(files[0])
        raw += f'{tokenizer.bos_id} {tokenizer.eos_id}'.encode()
        if files[0].name == 'vocab.json':
            raw += (folder / 'merges.txt').read_bytes() + _controls(tokenizer)
    elif re.match(rb'[A-Za-z0-9+/]+=* \d+\r?\n', raw):
        tokenizer = from_tiktoken(files[0])
    else:
        tokenizer = SentencePieceTokenizer(files[0])
        own = tokenizer.model.bos_id(), tokenizer.model.eos_id(), tokenizer.n_pieces
        if (tokenizer.bos_id, tokenizer.eos_id, tokenizer.n_vocab) != own:
            raw += f'{tokenizer.bos_id} {tokenizer.eos_id}'.encode() + _controls(tokenizer)
    tokenizer.fingerprint = hashlib.sha256(raw).hexdigest()[:16]
    tokenizer.end_ids = {tokenizer.eos_id, *generation_ends(folder)}
    return tokenizer


def generation_ends(folder):
    """Return the ids in eos_token_id of a folder's generation_config.json; [] without any."""
    path = Path(folder, 'generation_config.json')
    ends = read_json_object(path).get('eos_token_id') if path.exists() else None
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    if not all(type(i) is int and i >= 0 for i in ends):
        raise DataError(f'{path}: eos_token_id = {ends!r} must be the number of a token, or a list '
                        f'of them')
    return ends


def _controls(tokenizer):
    return repr((sorted(tokenizer.control_ids.items()), sorted(tokenizer.strips.items()))).encode()


def load_model_tokenizer(folder, config):
    """Return the tokenizer of a model folder; CheckpointError if the model has fewer tokens.

    Its end_ids have those of config.json as well.
    """
    tokenizer = load_tokenizer(folder)
    ends = getattr(config, 'eos_token_id', None)
    tokenizer.end_ids |= {*ends} if isinstance(ends, list) else {ends} - {None}
    n_pieces = getattr(tokenizer, 'n_pieces', tokenizer.n_vocab)
    if n_pieces <= config.vocab_size < tokenizer.n_vocab:
        # Gemma 3 1B's files add an image token for which it has no row
        tokenizer.n_vocab = config.vocab_size
        tokenizer.control_ids = {name: i for name, i in tokenizer.control_ids.items()
                                 if i < config.vocab_size}
    if tokenizer.n_vocab > config.vocab_size:
        raise CheckpointError(f'{folder}: the tokenizer has {tokenizer.n_vocab} tokens, but '
                              f'vocab_size in config.json is {config.vocab_size}')
    return tokenizer
