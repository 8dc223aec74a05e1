"""The tokenizer of a checkpoint folder, and one for models of bytes."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers

from pallas_paged.server import HFTokenizer
from pallas_paged.server.tokenizer import BYTE_OF_SYMBOL


class Tokenizer(HFTokenizer):
    """The tokenizer of a checkpoint folder."""

    def __init__(self, folder: str | Path):
        """Read `folder`/tokenizer.json.

        Raises:
            ValueError: if the file is missing or not a tokenizer.
        """
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{path}: no such file")
        try:
            super().__init__(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"{path}: {error}") from error


def save_byte_tokenizer(folder: str | Path, *, max_length: int) -> None:
    """Write the tokenizer of a byte-level model: 256 tokens, the id of each is its byte.

    Args:
        folder: gets tokenizer.json and the tokenizer_config.json with which transformers'
            AutoTokenizer loads it.
        max_length: positions of the model, for tokenizer_config.json.
    """
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=BYTE_OF_SYMBOL, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(Path(folder) / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    path = Path(folder) / "tokenizer_config.json"
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
