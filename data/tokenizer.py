"""Llama 3's tiktoken files and sentencepiece files (Gemma, Mistral, Llama 2) behind one interface.

`encode` takes plain text and never produces a control token: `<|eot_id|>`, `[INST]` or
`<start_of_turn>` in it become ordinary pieces. To use a control token, append its id.
"""

import base64
import hashlib
import re
from pathlib import Path

from data import DataError

# Llama 3's pre-tokenization, and the 256 control tokens that follow its 128,000 ranks
LLAMA3_PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
                  r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
LLAMA3_RANKS, LLAMA3_CONTROLS = 128_000, 256
LLAMA3_NAMES = {0: '<|begin_of_text|>', 1: '<|end_of_text|>', 4: '<|finetune_right_pad_id|>',
                6: '<|start_header_id|>', 7: '<|end_header_id|>', 8: '<|eom_id|>', 9: '<|eot_id|>',
                10: '<|python_tag|>'}
# Gemma's file declares these as user-defined symbols, which sentencepiece would find in any text
GEMMA_CONTROLS = rb'<start_of_turn>|<end_of_turn>|<mask>|<2mass>|\[@BOS@\]|<unused\d+>'
# tiktoken's regular expression recurses on long runs, so a longer run of white space, or of other
# characters, is split
LONGEST_RUN = 25_000
LONG_RUN = rf'\S{{{LONGEST_RUN}}}(?=\S)|\s{{{LONGEST_RUN}}}(?=\s)'


class TiktokenTokenizer:
    """Llama 3.x, from its `tokenizer.model`: one base64 token and its rank per line."""

    def __init__(self, path):
        import tiktoken
        try:
            lines = [line.split() for line in Path(path).read_bytes().splitlines() if line]
            ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
        except ValueError as error:
            raise DataError(f'{path}: not a tiktoken file: {error}') from error
        if len(ranks) != LLAMA3_RANKS:
            raise DataError(f'{path}: {len(ranks)} ranks; only the Llama 3 file '
                            f'({LLAMA3_RANKS} ranks) is known')
        self.control_ids = {LLAMA3_NAMES.get(i, f'<|reserved_{i}|>'): LLAMA3_RANKS + i
                            for i in range(LLAMA3_CONTROLS)}
        self.n_vocab = LLAMA3_RANKS + LLAMA3_CONTROLS
        self.bos_id = self.control_ids['<|begin_of_text|>']
        self.eos_id = self.control_ids['<|end_of_text|>']
        self._encoding = tiktoken.Encoding('llama3', pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks,
                                           special_tokens=self.control_ids)

    def encode(self, text, start=True):
        """Return the ids of plain text, without BOS. `start` has no effect here."""
        cuts = [m.end() for m in re.finditer(LONG_RUN, text)] if len(text) > LONGEST_RUN else []
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        return [i for piece in pieces for i in self._encoding.encode_ordinary(piece)]

    def encode_batch(self, texts, start=True):
        """Return `encode` of each text, computed in several threads."""
        if max(map(len, texts), default=0) > LONGEST_RUN:
            return [self.encode(text) for text in texts]
        return self._encoding.encode_ordinary_batch(texts)

    def decode(self, ids, start=True):
        """Return the text of ids, control tokens by their names. `start` has no effect here."""
        return self._encoding.decode(list(ids))


class SentencePieceTokenizer:
    """Gemma, Mistral, Llama 2 and the demo's own model, from a sentencepiece `tokenizer.model`."""

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
        self._model = model
        # Llama 2's and Mistral's models put a space before any text. A continuation must not have
        # it, so it is encoded after a newline, which never merges with what follows.
        leads_with_space = model.encode('a', out_type=str)[0].startswith('\u2581')
        self._newline = model.encode('\n') if leads_with_space else []
        self.n_vocab = model.get_piece_size()
        self.bos_id, self.eos_id = model.bos_id(), model.eos_id()
        self.control_ids = {model.id_to_piece(i): i for i in range(self.n_vocab)
                            if model.is_control(i)}

    def encode(self, text, start=True):
        """Return the ids of plain text, without BOS.

        start: True if the text stands alone or follows BOS: Llama 2's and Mistral's models then put
               a space before it. False if it continues text that was encoded before.
        """
        if start or not self._newline:
            return self._model.encode(text)
        return self._continued(text, self._model.encode('\n' + text))

    def encode_batch(self, texts, start=True):
        """Return `encode` of each text, computed in several threads."""
        if start or not self._newline:
            return self._model.encode(texts)
        ids = self._model.encode(['\n' + text for text in texts])
        return [self._continued(*pair) for pair in zip(texts, ids, strict=True)]

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
            if i is not None and i not in names:
                run.append(int(i))
                continue
            # decoded after a newline too, or sentencepiece would drop a leading space
            text = self._model.decode(self._newline + run)[1 if self._newline else 0:]
            if start and run and self._newline:
                text = text.removeprefix(' ')
            start = start and not run and i == self.bos_id
            parts += [text, names.get(i, '')]
            run = []
        return ''.join(parts)


def load_tokenizer(folder):
    """Return the tokenizer of a model folder, by the content of its file; raises DataError.

    Looks for tokenizer.model, original/tokenizer.model (Llama 3 on the hub) and tokenizer.model.v*
    (Mistral). The returned object has encode, encode_batch, decode, bos_id, eos_id, control_ids
    (name -> id), n_vocab, and `fingerprint`, a hash of the file.
    """
    folder = Path(folder)
    files = [p for pattern in ('tokenizer.model', 'original/tokenizer.model', 'tokenizer.model.v*')
             for p in sorted(folder.glob(pattern))]
    if not files:
        hint = ''
        if (folder / 'tokenizer.json').exists():
            hint = ('; tokenizer.json is not read: take tokenizer.model from the same hub '
                    'repository (for Llama 3 it is original/tokenizer.model)')
        raise DataError(f'{folder} has no tokenizer.model{hint}')
    raw = files[0].read_bytes()
    if not raw:
        raise DataError(f'{files[0]} is empty; download it again')
    tiktoken_like = re.match(rb'[A-Za-z0-9+/]+=* \d+\r?\n', raw)
    tokenizer = (TiktokenTokenizer if tiktoken_like else SentencePieceTokenizer)(files[0])
    tokenizer.fingerprint = hashlib.sha256(raw).hexdigest()[:16]
    if tokenizer.bos_id < 0 or tokenizer.eos_id < 0:
        raise DataError(f'{files[0]}: the model has no BOS or no EOS token')
    return tokenizer
