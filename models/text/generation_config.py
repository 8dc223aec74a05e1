"""Sampling defaults of a checkpoint folder: its generation_config.json."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.files import read_json
from models.text.tokenizer import Tokenizer
from pallas_paged.engine import Model, SamplingParams

if TYPE_CHECKING:
    from pallas_paged.server import ChatTemplate

_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def sampling_defaults(folder: str | Path) -> dict[str, Any]:
    """Return the fields of `SamplingParams` that generation_config.json sets.

    These are temperature, top_k, top_p, min_p and repetition_penalty. `"do_sample": false` is a
    temperature of 0. Other keys, and a file that is not there, set nothing; `load_checkpoint` reads
    eos_token_id.

    Raises:
        ValueError: the file is not JSON, or a value is out of range.
    """
    contents = _read(folder)
    defaults = {name: contents[name] for name in _FIELDS if contents.get(name) is not None}
    if contents.get("do_sample") is False:
        defaults["temperature"] = 0.0
    return _checked(folder, defaults)


def chat_defaults(
    folder: str | Path, model: Model, tokenizer: Tokenizer, template: ChatTemplate
) -> dict[str, Any]:
    """Return `sampling_defaults`, and `stop` and `stop_token_ids` where an answer ends.

    An answer ends at "stop_strings" of generation_config.json, or at "chat_stop_strings", a key of
    this project for models without an end of sequence. It also ends at the tokenizer's end of
    sequence, which fine-tuned models often have beside that of `model`.

    Raises:
        ValueError: generation_config.json is not JSON, or a value is out of range.
    """
    defaults, contents = sampling_defaults(folder), _read(folder)
    if stop := contents.get("stop_strings") or contents.get("chat_stop_strings"):
        defaults["stop"] = stop
    end = tokenizer.token_id(template.special_tokens.get("eos_token", ""))
    if end is not None and end < model.vocab_size and end not in model.eos_token_ids:
        defaults["stop_token_ids"] = [end]
    return _checked(folder, defaults)


def _read(folder: str | Path) -> dict[str, Any]:
    path = Path(folder) / "generation_config.json"
    return read_json(path) if path.is_file() else {}


def _checked(folder: str | Path, defaults: dict[str, Any]) -> dict[str, Any]:
    try:
        SamplingParams(**defaults)
    except ValueError as error:
        raise ValueError(f"{Path(folder) / 'generation_config.json'}: {error}") from error
    return defaults
