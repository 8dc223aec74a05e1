"""Conversations to prompts, by the chat template of a checkpoint folder."""

from __future__ import annotations

import datetime
import json
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from models.chat_messages import checked_messages

_GIVEN = ("messages", "tools", "documents", "add_generation_prompt")  # to a template by `render`


class ChatTemplate:
    """The chat template of a checkpoint folder; renders what transformers renders.

    Templates are programs of the checkpoint's author. They run in a sandbox, without access to
    files or to Python's internals.

    Attributes:
        special_tokens: texts of the special tokens by name, such as "bos_token".
    """

    def __init__(self, folder: str | Path, *, file: Path | None = None):
        """Read the templates of a folder, if it has any, or a file in their place.

        These are chat_template.jinja and additional_chat_templates/*.jinja, or else
        "chat_template" in tokenizer_config.json, which also has the special tokens.

        Raises:
            ValueError: a file is damaged.
            OSError: `file` can't be read.
        """
        self._folder = Path(folder)
        path = self._folder / "tokenizer_config.json"
        config = _read_json(path) if path.is_file() else {}
        self.special_tokens = {
            name: value if isinstance(value, str) else value["content"]
            for name, value in config.items()
            if name.endswith("_token")
            and (isinstance(value, str) or (isinstance(value, dict) and "content" in value))
        }
        sources = _named_templates(config.get("chat_template"), path)
        more = self._folder.glob("additional_chat_templates/*.jinja")
        files = {"default": self._folder / "chat_template.jinja"} | {x.stem: x for x in more}
        sources |= {name: _read_text(one) for name, one in files.items() if one.is_file()}
        if file is not None:
            sources = {"default": _read_text(file)}
        self._templates = {
            name: _Template(source, self._folder) for name, source in sources.items()
        }

    @property
    def exists(self) -> bool:
        """Whether the folder has a template; `render` refuses all messages otherwise."""
        return bool(self._templates)

    def render(
        self,
        messages: Any,
        *,
        tools: Any = None,
        documents: Any = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt of a conversation.

        The prompt has its special tokens, BOS included: encode it with `add_special_tokens=False`.

        Args:
            messages: as in OpenAI's API, see `checked_messages`. A "developer" message becomes a
                "system" message if the template does not know that role.
            tools: list of functions with their JSON schemas, for the template to describe.
            documents: list of objects, for templates that cite.
            add_generation_prompt: whether the prompt ends with what begins an answer.
            variables: more names for the template, such as `enable_thinking`.

        Raises:
            ValueError: there is no template, a message is not valid, or the template refuses the
                conversation or fails.
        """
        template = self._choose(tools)
        conversation = checked_messages(messages)
        if "developer" not in template.source:
            for message in conversation:
                if message["role"] == "developer":
                    message["role"] = "system"
        return template.render(
            messages=conversation,
            tools=_checked_objects("tools", tools),
            documents=_checked_objects("documents", documents),
            add_generation_prompt=add_generation_prompt,
            variables=self.special_tokens | _checked_variables(variables),
        )

    def _choose(self, tools: Any) -> _Template:
        if not self._templates:
            raise ValueError(
                f"{self._folder} has no chat template (chat_template.jinja, or chat_template in"
                " tokenizer_config.json): give a prompt instead of messages"
            )
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            names = ", ".join(sorted(self._templates))
            raise ValueError(f"there is no chat template named {name}, only {names}")
        return self._templates[name]


def _checked_objects(name: str, values: Any) -> list[Any] | None:
    """Return a list of objects; None for an empty one, because templates ask for None."""
    if values is None:
        return None
    if not isinstance(values, list | tuple) or not all(isinstance(x, Mapping) for x in values):
        raise ValueError(f"{name}={reprlib.repr(values)} must be a list of objects")
    return list(values) or None


def _checked_variables(variables: Any) -> dict[str, Any]:
    if variables is None:
        return {}
    if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
        raise ValueError(f"{variables=} of the chat template must be an object")
    for name in _GIVEN:
        if name in variables:
            raise ValueError(f"{name} can't be a variable of the chat template: it is an argument")
    return dict(variables)


class _Template:
    """One template, compiled."""

    def __init__(self, source: str, folder: Path):
        self.source = source
        try:
            self._template = _ENVIRONMENT.from_string(source)
        except (jinja2.TemplateSyntaxError, RecursionError) as error:
            raise ValueError(f"{folder}: the chat template is not valid: {error}") from error

    def render(self, *, variables: Mapping[str, Any], **given: Any) -> str:
        try:
            text = self._template.render({**variables, **given})
        except _RefusedError as error:
            raise ValueError(f"the chat template refuses the messages: {error}") from error
        except Exception as error:  # a program of another author
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"the chat template fails: {reason}") from error
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError("the messages must be valid UTF-8") from None
        return text


class _RefusedError(jinja2.TemplateError):
    """A template called `raise_exception`."""


class _Generation(Extension):
    """The block `generation`, with which templates mark answers for training."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    # Jinja's own filter escapes for HTML.
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise _RefusedError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


_ENVIRONMENT = _environment()


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


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object")
    return value


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: {error}") from error
