"""Tokenizers of sentencepiece: those of Gemma, Mistral, Llama 2, T5 and of the demo."""

import json
import re
from pathlib import Path

import sentencepiece
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers

from data.byte_pairs import IN_BRACKETS, added_beside, begin_with, merges
from data.tokenizer import Tokenizer, settings_beside
from runtime.errors import DataError

# Gemma's file declares these as user-defined symbols, which sentencepiece would use in any text
GEMMA_CONTROLS = re.compile(
    rb'<start_of_turn>|<end_of_turn>|<start_of_image>|<end_of_image>|<mask>|<2mass>|'
    rb'\[multimodal\]|\[@BOS@\]|<unused\d+>')
SPACE = '\u2581'        # stands for a space in the pieces of sentencepiece
# a user-defined piece in a serialized model: 0x0a, the size of its text and its text, 0x15 and a
# float score, 0x18 and its type
USER_DEFINED = re.compile(rb'\x0a(?=(.[^\x15]*)\x15.{4}\x18\x04)', re.DOTALL)


class SentencePieceTokenizer(Tokenizer):
    """A tokenizer from a sentencepiece file, whose neighbors can add control tokens, name EOS, and
    say that no BOS is added.
    """

    def __init__(self, path):
        folder = Path(path).parent
        settings, added = settings_beside(folder), added_beside(folder)
        # change the type 4 (user-defined) to 3 (control), which sentencepiece never finds in text
        names = {token['content'].encode() for token in added.values() if token['special']}
        raw = re.sub(
            rb'(\x0a.([^\x0a\x15]+)\x15.{4}\x18)\x04', lambda piece: piece[1] + (
                b'\x03' if piece[2] in names or GEMMA_CONTROLS.fullmatch(piece[2]) else b'\x04'),
            Path(path).read_bytes(), flags=re.DOTALL)
        try:
            self.model = model = sentencepiece.SentencePieceProcessor(model_proto=raw)
        except RuntimeError as error:
            raise DataError(f'{path}: neither a tiktoken nor a sentencepiece file: {error}'
                            ) from error
        self.n_pieces = model.get_piece_size()
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
            model.encode('a', out_type=str)[0].startswith(SPACE))
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


def sentencepiece_json(tokenizer):
    """Return the content of a tokenizer.json for a sentencepiece tokenizer.model; None if it is not
    BPE, normalizes text, or has control tokens in other files. The space that some models put
    before any text stands at the beginning and after BOS, but not beside another control token.
    """
    model, prefix = tokenizer.model, SPACE if tokenizer.leads_with_space else ''
    pieces = [model.id_to_piece(i) for i in range(tokenizer.n_pieces)]
    marked = {match[1] for match in USER_DEFINED.finditer(model.serialized_model_proto())}
    symbols = [piece for piece in pieces if len(text := piece.encode()) < 128
               and bytes([len(text)]) + text in marked]
    special = {*symbols} | {piece for i, piece in enumerate(pieces) if model.is_control(i)
                            or model.is_unknown(i) or model.is_unused(i) or model.is_byte(i)}
    # the scores of a BPE model are 0, -1, -2, ... in the order of merges
    scores = {piece: model.get_score(i) for i, piece in enumerate(pieces) if piece not in special}
    if (tokenizer.n_vocab > tokenizer.n_pieces
            or any(score != int(score) for score in scores.values())
            or model.normalize('  a \ufb01 ') != f'{prefix}  a \ufb01 '.replace(' ', SPACE)):
        return None
    library = tokenizers.Tokenizer(models.BPE(
        {piece: i for i, piece in enumerate(pieces)},
        merges(sorted(scores, key=scores.get, reverse=True)), fuse_unk=True,
        unk_token=pieces[model.unk_id()],
        byte_fallback=any(map(model.is_byte, range(len(pieces))))))
    spaces = normalizers.Replace(' ', SPACE)
    steps = [decoders.Replace(SPACE, ' '), decoders.ByteFallback(), decoders.Fuse()]
    bos = '' if tokenizer.bos_id is None else tokenizer.decode([tokenizer.bos_id])
    if prefix:
        names = '|'.join(map(re.escape, (*tokenizer.control_ids, *symbols)))
        begin = rf'(?:\A|(?<=\A{re.escape(bos)}))' if bos else r'\A'
        leading = normalizers.Replace(Regex(rf'{begin}(?=[\s\S])(?!{names})'), SPACE)
        spaces = normalizers.Sequence([leading, spaces])
        steps.append(decoders.Strip(' ', 1, 0))
    library.normalizer, library.decoder = spaces, decoders.Sequence(steps)
    # a normalizer sees the text between tokens that are not `normalized`, so the one that puts a
    # space at the beginning needs control tokens that are; a symbol may consist of spaces
    library.add_special_tokens([AddedToken(name, special=True, normalized=bool(prefix))
                                for name in tokenizer.control_ids])
    library.add_tokens([AddedToken(name, normalized=True) for name in symbols])
    library.post_processor = begin_with(bos, tokenizer.bos_id)
    return json.loads(library.to_str())
