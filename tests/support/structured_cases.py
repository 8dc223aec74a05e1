"""A tokenizer of 40 pieces, grammars for it, and what their texts are like."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace

from pallas_paged.engine import StructuredOutputsParams
from pallas_paged.engine.sampling_params import SamplingMode
from tests.support.engine_calls import MODEL, make_engine

_TEXTS = [*"0123456789abcde", *'"{}[]:,', "true", "false", "null", "-", " ", "\n", '{"', '":']
_BYTES = [text.encode() for text in [*_TEXTS, "ab", '"a']] + [b"\xc3", b"\xa9"]
_SPECIAL = ["<s>", "<tool>"]
EOS = 39
# Of 40 pieces that can write JSON.
PIECES = [*_BYTES, *(name.encode() for name in _SPECIAL), b"\\", b".", b"</s>"]
ENDING = replace(MODEL, eos_token_ids=(EOS,))
MODES = [SamplingMode(masks=True, processors=True, draws=True, penalties=True, logprobs=0)]
PERSON = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "maxLength": 3},
        "b": {"type": "integer", "minimum": -50, "maximum": 99},
        "c": {"enum": ["ab", None, True]},
    },
    "required": ["a", "b", "c"],
    "additionalProperties": False,
}
LIST = {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3}
SUM = 'start: term ("," term)~1..3\nterm: /[0-9]{1,2}/ | "[" term "]"'
CHOICES = ["a", "ab", "é", 'b"c', "\\d", "e\ne"]


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


def make(tokenizer=None):
    return make_engine(ENDING, tokenizer=tokenizer, modes=MODES)


def structured(**fields):
    return {"structured_outputs": StructuredOutputsParams(**fields)}


def is_person(text):
    value = json.loads(text)
    assert [*value] == ["a", "b", "c"] and text == json.dumps(
        value, ensure_ascii=False, separators=(",", ":")
    )
    return len(value["a"]) <= 3 and -50 <= value["b"] <= 99 and value["c"] in ("ab", None, True)


def is_list(text):
    value = json.loads(text)
    return 1 <= len(value) <= 3 and {*map(type, value)} == {bool}


def is_sum(text):
    is_flat = re.fullmatch(r"\[*\d\d?\]*(,\[*\d\d?\]*){1,3}", text)
    return is_flat and text.count("[") == text.count("]")


CASES = [
    (dict(json=PERSON), is_person),
    (dict(json=json.dumps(LIST)), is_list),
    (dict(regex="(ab|c)+[0-9]{2}é?"), re.compile("(ab|c)+[0-9]{2}é?").fullmatch),
    (dict(choice=CHOICES), CHOICES.__contains__),
    (dict(grammar=SUM), is_sum),
]
