"""A tokenizer of 40 pieces that can write JSON."""

from collections.abc import Sequence

_TEXTS = [*"0123456789abcde", *'"{}[]:,', "true", "false", "null", "-", " ", "\n", '{"', '":']
_BYTES = [text.encode() for text in [*_TEXTS, "ab", '"a']] + [b"\xc3", b"\xa9"]
_SPECIAL = ["<s>", "<tool>"]
EOS = 39
PIECES = [*_BYTES, *(name.encode() for name in _SPECIAL), b"\\", b".", b"</s>"]


class PieceTokenizer:
    """Decodes special tokens to nothing, as tokenizers do; token 0 is the text "0"."""

    def encode(self, text: str) -> list[int]:
        return [PIECES.index(character.encode()) for character in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        pieces = [PIECES[token_id] for token_id in token_ids if not self.is_special(token_id)]
        return b"".join(pieces).decode(errors="replace")

    def is_special(self, token_id: int) -> bool:
        return token_id == EOS or PIECES[token_id].decode(errors="replace") in _SPECIAL

    def token_bytes(self, token_id: int) -> bytes:
        return PIECES[token_id]


class PlainPieceTokenizer:
    """The same tokens with no more than an engine needs; a text does not begin with a space."""

    def __init__(self) -> None:
        self.encode, self._decode = PieceTokenizer().encode, PieceTokenizer().decode

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._decode(token_ids).removeprefix(" ")
