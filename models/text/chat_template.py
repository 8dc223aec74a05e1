"""The chat template of a checkpoint folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.files import read_json

if TYPE_CHECKING:
    from pallas_paged.server import ChatTemplate


def read_chat_template(folder: str | Path, *, file: Path | None = None) -> ChatTemplate:
    """Read the templates of a folder, if it has any, or a file in their place.

    These are chat_template.jinja and additional_chat_templates/*.jinja, or else "chat_template" in
    tokenizer_config.json, which also has the special tokens.

    Raises:
        ValueError: a file is damaged.
        OSError: `file` can't be read.
    """
    from pallas_paged.server import ChatTemplate  # which takes a while to import

    folder = Path(folder)
    path = folder / "tokenizer_config.json"
    config = read_json(path) if path.is_file() else {}
    special_tokens = {
        name: value if isinstance(value, str) else value["content"]
        for name, value in config.items()
        if name.endswith("_token")
        and (isinstance(value, str) or (isinstance(value, dict) and "content" in value))
    }
    sources = _named_templates(config.get("chat_template"), path)
    more = folder.glob("additional_chat_templates/*.jinja")
    files = {"default": folder / "chat_template.jinja"} | {x.stem: x for x in more}
    sources |= {name: _read_text(one) for name, one in files.items() if one.is_file()}
    if file is not None:
        sources = {"default": _read_text(file)}
    try:
        return ChatTemplate(sources, special_tokens=special_tokens)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error


def _named_templates(value: Any, path: Path) -> dict[str, str]:
    """Return templates by name from "chat_template" of a tokenizer_config.json."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    try:
        named = {entry["name"]: entry["template"] for entry in value}
    except (TypeError, KeyError):
        named = {None: None}
    if not all(isinstance(x, str) for pair in named.items() for x in pair):
        raise ValueError(f"{path}: chat_template must be a text, or a list with name and template")
    return named


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: {error}") from error
