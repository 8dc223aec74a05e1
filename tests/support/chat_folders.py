"""Checkpoint folders with chat templates of our own, and conversations for them.

The templates use what those of published models use: see the comment at the head of each.
"""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.processors import TemplateProcessing

from models.text import save_byte_tokenizer

TEMPLATES = Path(__file__).parents[1] / "models" / "goldens" / "chat"
NAMES = ("headers", "turns", "brackets")
SPECIAL_TOKENS = ("<s>", "</s>", "<|head|>", "<|end|>", "<|turn|>")
_PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
_WEATHER = {"name": "weather", "description": "Weather of a <city> & more: é"}
TOOLS = [{"type": "function", "function": _WEATHER | {"parameters": _PARAMETERS}}]


def _calls(content: str | None) -> dict[str, Any]:
    function = {"name": "weather", "arguments": {"city": "Zürich", "days": 2}}
    call = {"id": "abcdefghi", "type": "function", "function": function}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def _says(*texts: str, roles: str = "user assistant") -> list[dict[str, Any]]:
    names = roles.split()
    return [{"role": names[i % len(names)], "content": text} for i, text in enumerate(texts)]


_RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "name": "weather", "content": '{"t": 21}'}
_ANSWERED = _says("Warm.", "ok", roles="assistant user")
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "question": _says('Hi <b> & "x" é 子 🎭'),
    "system": _says("Be brief.", "  Hello \n", roles="system user"),
    "three turns": _says("a", "b ", "c"),
    "thoughts": [
        *_says("Be brief.", roles="system"),
        *_says("a", "<think>\nhm\n</think>\n\nb", "c", "<think>\nso\n</think>\n\nd\n"),
    ],
    "thought beside": [*_says("q"), *_says("x", roles="assistant")],
    "call": [*_says("w?"), _calls(""), _RESULT],
    "call answered": [*_says("w?"), _calls(None), _RESULT, *_ANSWERED],
    "two questions": _says("a", "b", roles="user"),
    "answer first": _says("a", roles="assistant"),
}
CONVERSATIONS["thought beside"][1]["reasoning_content"] = "\nlong\n"
_VARIABLES = dict(enable_thinking=False, tools_first=False, date="1 Jan", stop_after=1)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tools": {"tools": TOOLS},
    "no answer": {"add_generation_prompt": False},
    "variables": {"tools": TOOLS} | _VARIABLES,
}


def save_chat_folder(folder: Path, name: str) -> None:
    """Write a byte-level tokenizer with special tokens and a BOS, and a template."""
    save_byte_tokenizer(folder, max_length=1024)
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.add_special_tokens(list(SPECIAL_TOKENS))
    bos = ("<s>", inner.token_to_id("<s>"))
    inner.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[bos])
    inner.save(str(folder / "tokenizer.json"))
    path = folder / "tokenizer_config.json"
    eos = {"__type": "AddedToken", "content": "</s>", "special": True}
    settings = json.loads(path.read_text()) | {"bos_token": "<s>", "eos_token": eos}
    path.write_text(json.dumps(settings))
    template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
