"""Chat templates, which make prompts of conversations."""

from __future__ import annotations

import contextlib
import datetime
import json
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

_GIVEN = ("messages", "tools", "documents", "add_generation_prompt")  # to a template by `render`
ROLES = ("system", "developer", "user", "assistant", "tool", "ipython")


class ChatTemplate:
    """A chat template; one of Jinja renders what transformers renders.

    Jinja texts are programs of their author. They run in a sandbox, without access to files or to
    Python's internals.

    Attributes:
        special_tokens: texts of the special tokens by name, such as "bos_token".
    """

    def __init__(
        self,
        template: str | Callable[..., str] | Mapping[str, str],
        *,
        special_tokens: Mapping[str, str] | None = None,
    ):
        """Compile a template.

        Args:
            template: Jinja text; several by name, where "tool_use" renders conversations with
                tools and "default" the others; or a function of the messages, with the keywords of
                `render` and the variables as more keywords, such as
                `functools.partial(tokenizer.apply_chat_template, tokenize=False)` of transformers.
            special_tokens: that a Jinja text can name.

        Raises:
            ValueError: it is not of these kinds, or not valid Jinja.
        """
        self.special_tokens = dict(special_tokens or {})
        named = template if isinstance(template, Mapping) else {"default": template}
        self._templates = {name: _Template(one) for name, one in named.items()}

    @property
    def source(self) -> str:
        """Text of all templates of Jinja."""
        return "\n".join(one.source for one in self._templates.values())

    @property
    def exists(self) -> bool:
        """Whether there is a template; `render` refuses all messages otherwise."""
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
            raise ValueError("there is no chat template: give a prompt instead of messages")
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

    def __init__(self, template: Any):
        if not (isinstance(template, str) or callable(template)):
            raise ValueError(f"{template=} must be Jinja text or a function")
        self.source = template if isinstance(template, str) else ""
        self._render = template
        if isinstance(template, str):
            try:
                jinja = _ENVIRONMENT.from_string(template)
            except (jinja2.TemplateSyntaxError, RecursionError) as error:
                raise ValueError(f"the chat template is not valid: {error}") from error
            self._render = lambda messages, **given: jinja.render({**given, "messages": messages})

    def render(
        self, messages: list[dict[str, Any]], *, variables: Mapping[str, Any], **given: Any
    ) -> str:
        try:
            text = self._render(messages, **{**variables, **given})
        except _RefusedError as error:
            raise ValueError(f"the chat template refuses the messages: {error}") from error
        except Exception as error:  # a program of another author
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"the chat template fails: {reason}") from error
        if not isinstance(text, str):
            raise ValueError(f"the chat template fails: {reprlib.repr(text)} must be a text")
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


_ENVIRONMENT = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
)
_ENVIRONMENT.filters["tojson"] = _to_json  # Jinja's own filter escapes for HTML
_ENVIRONMENT.globals["raise_exception"] = _raise_exception
_ENVIRONMENT.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)


def checked_messages(messages: Any) -> list[dict[str, Any]]:
    """Return a copy of the messages of a conversation, in the form that templates expect.

    A list of text parts becomes one text, arguments of tool calls in JSON become objects, and keys
    of null are left out, as by transformers 5.24: many templates would write "None".

    Args:
        messages: list of objects with "role" (one of `ROLES`) and "content" (a text or a list of
            `{"type": "text", "text": ...}`, or null beside "tool_calls"). Other keys are the
            template's.

    Raises:
        ValueError: a message is not of this form; it names the place, the value and the rule.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ValueError(f"messages={reprlib.repr(messages)} must be a list of messages, not empty")
    return [_checked_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _checked_message(message: Any, place: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ValueError(f"{place}={reprlib.repr(message)} must be an object")
    checked = {key: value for key, value in message.items() if value is not None}
    role = checked.get("role")
    if role not in ROLES:
        raise ValueError(f"{place}.role={reprlib.repr(role)} must be one of {', '.join(ROLES)}")
    if not checked.get("tool_calls", True):  # templates ask whether the key is there
        del checked["tool_calls"]
    if not isinstance(call_id := checked.get("tool_call_id", ""), str):
        raise ValueError(f"{place}.tool_call_id={reprlib.repr(call_id)} must be a text")
    if (calls := checked.get("tool_calls")) is not None:
        if not isinstance(calls, list):
            raise ValueError(f"{place}.tool_calls={reprlib.repr(calls)} must be a list")
        checked["tool_calls"] = [
            _checked_call(call, f"{place}.tool_calls[{i}]") for i, call in enumerate(calls)
        ]
    content = message.get("content")
    if isinstance(content, list):
        parts = enumerate(content)
        checked["content"] = "".join(_text_of(x, f"{place}.content[{i}]") for i, x in parts)
    elif not isinstance(content, str) and not (content is None and "tool_calls" in checked):
        rule = "must be a text or a list of text parts"
        raise ValueError(f"{place}.content={reprlib.repr(content)} {rule}")
    return checked


def _text_of(part: Any, place: str) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text":
        raise ValueError(f"{place}={reprlib.repr(part)} must be a part of type 'text'")
    if not isinstance(part.get("text"), str):
        raise ValueError(f"{place}.text={reprlib.repr(part.get('text'))} must be a text")
    return part["text"]


def _checked_call(call: Any, place: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"{place}={reprlib.repr(call)} must have a function with a name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):  # as models write and OpenAI's API has them
        with contextlib.suppress(ValueError, RecursionError):  # refused below
            arguments = json.loads(arguments or "{}")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise ValueError(f"{place}: arguments={reprlib.repr(arguments)} must be a JSON object")
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function
