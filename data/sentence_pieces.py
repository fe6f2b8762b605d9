"""Tokenizers of sentencepiece: those of Gemma, Mistral, Llama 2, T5 and of the demo."""

import re
from pathlib import Path

import sentencepiece

from data.byte_pairs import IN_BRACKETS, added_beside
from data.tokenizer import Tokenizer, settings_beside
from runtime.errors import DataError

# Gemma's file declares these as user-defined symbols, which sentencepiece would use in any text
GEMMA_CONTROLS = re.compile(
    rb'<start_of_turn>|<end_of_turn>|<start_of_image>|<end_of_image>|<mask>|<2mass>|'
    rb'\[multimodal\]|\[@BOS@\]|<unused\d+>')


class SentencePieceTokenizer(Tokenizer):
    """A tokenizer from a sentencepiece file.

    The files beside it can add control tokens, name EOS, and say that no BOS is added.
    """

    def __init__(self, path):
        folder = Path(path).parent
        settings, added = settings_beside(folder), added_beside(folder)
        # A serialized piece is: name, 0x15 and a float score, 0x18 and its type. Change type 4
        # (user-defined) to 3 (control), which sentencepiece never finds in text.
        names = {token['content'].encode() for token in added.values() if token['special']}
        raw = re.sub(
            rb'(\x0a.([^\x0a\x15]+)\x15.{4}\x18)\x04', lambda piece: piece[1] + (
                b'\x03' if piece[2] in names or GEMMA_CONTROLS.fullmatch(piece[2]) else b'\x04'),
            Path(path).read_bytes(), flags=re.DOTALL)
        try:
            model = sentencepiece.SentencePieceProcessor(model_proto=raw)
        except RuntimeError as error:
            raise DataError(f'{path}: neither a tiktoken nor a sentencepiece file: {error}'
                            ) from error
        self.model, self.n_pieces = model, model.get_piece_size()
        added = {i: token for i, token in added.items() if i >= self.n_pieces}
        controls = {model.id_to_piece(i): i for i in range(self.n_pieces) if model.is_control(i)}
        controls |= {token['content']: i for i, token in added.items()}
        adds_bos = model.bos_id() >= 0 and settings.get('add_bos_token', True)
        eos = settings.get('eos_token') or ''
        super().__init__(
            controls, model.bos_id() if adds_bos else None,
            controls.get(eos, -1) if eos else model.eos_id(),
            max([self.n_pieces, *(i + 1 for i in added)]),
            {i: (token['lstrip'], token['rstrip']) for i, token in added.items()},
            model.encode('a', out_type=str)[0].startswith('\u2581'))
        if self.eos_id < 0:
            raise DataError(f'{path} has no EOS token {eos}; see tokenizer_config.json')
        if words := [token['content'] for token in added.values()
                     if not (token['special'] or IN_BRACKETS.fullmatch(token['content']))]:
            raise DataError(f'{path}: the files beside it add words, such as {words[0]!r}, which '
                            f'only tokenizer.json can hold; save that, and remove {path.name}')
        self.fresh_after = frozenset(added if self.leads_with_space else ())

    def _encode(self, text):
        return self.model.encode(text)

    def _decode(self, ids):
        return self.model.decode([i for i in ids if i < self.n_pieces])
