"""Chat templates: prompts as transformers renders them, and messages that are not valid."""

import itertools
import json
import os
import re
from pathlib import Path

import pytest

from models.text import Tokenizer, read_chat_template
from pallas_paged.server.chat_template import checked_messages
from tests.support.chat_folders import CONVERSATIONS, NAMES, OPTIONS, TEMPLATES, save_chat_folder

GOLDEN = json.loads((TEMPLATES / "golden.json").read_text())
USER = {"role": "user", "content": "a"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folders = {name: tmp_path_factory.mktemp(name) for name in NAMES}
    for name, folder in folders.items():
        save_chat_folder(folder, name)
    return folders


def render(template, messages, **options):
    """Render with what `apply_chat_template` takes as keywords."""
    ours = ("tools", "add_generation_prompt")
    given = {name: options.pop(name) for name in ours if name in options}
    return template.render(messages, **given, variables=options)


def write(folder, template=None, **config):
    folder.mkdir(exist_ok=True)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return read_chat_template(folder)


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("name", NAMES)
def test_prompts_equal_those_of_transformers(name, kind, folders):
    template, tokenizer = read_chat_template(folders[name]), Tokenizer(folders[name])
    for title, messages in CONVERSATIONS.items():
        expected = GOLDEN[f"{name}, {title}, {kind}"]
        if expected is None:
            with pytest.raises(ValueError, match="refuses the messages: two messages of the role"):
                render(template, messages, **OPTIONS[kind])
            continue
        prompt = render(template, messages, **OPTIONS[kind])
        assert tokenizer.encode(prompt, add_special_tokens=False) == expected, title
        # A template writes the BOS, if the model wants one, and it is not added again.
        assert expected.count(tokenizer.token_id("<s>")) == (name != "turns")


def test_texts_in_parts_are_joined_and_keys_of_null_are_left_out():
    parts = [{"type": "text", "text": text} for text in ("He", "llo")]
    message = {"role": "user", "content": parts, "name": None}
    assert checked_messages([message]) == [{"role": "user", "content": "Hello"}]
    assert message["content"] is parts  # the caller's


def test_templates_are_found_where_transformers_finds_them(tmp_path):
    assert not write(tmp_path / "none").exists
    messages = [USER]
    assert write(tmp_path / "text", chat_template="text").render(messages) == "text"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    template = write(tmp_path / "list", chat_template=named)
    assert template.render(messages) == template.render(messages, tools=[]) == "plain"
    assert template.render(messages, tools=[{}]) == "tools"
    assert write(tmp_path / "list", "file").render(messages) == "file"
    more = tmp_path / "list" / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("another")
    assert read_chat_template(tmp_path / "list").render(messages, tools=[{}]) == "another"
    other = tmp_path / "other.jinja"
    other.write_text("of an option")
    template = read_chat_template(tmp_path / "list", file=other)
    assert template.render(messages, tools=[{}]) == "of an option"


def test_special_tokens_may_be_texts_or_objects(tmp_path):
    names = {"bos_token": "<s>", "eos_token": "</s>", "image_token": "<i>"}
    tokens = names | {"eos_token": {"content": "</s>"}, "pad_token": None, "add_bos_token": True}
    text = "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ image_token }}"
    template = write(tmp_path, text, **tokens)
    assert template.special_tokens == names
    assert template.render([USER]) == "<s></s><i>"
    assert template.render([USER], variables={"bos_token": "B", "self": 5}) == "B</s><i>"


def test_templates_see_system_messages_for_those_of_a_developer_and_none_for_empty_tools(tmp_path):
    messages = [{"role": "developer", "content": "x"}]
    assert write(tmp_path, "{{ messages[0].role }}").render(messages) == "system"
    template = "{% if messages[0].role == 'developer' %}yes{% endif %}"
    assert write(tmp_path, template).render(messages) == "yes"
    assert messages[0]["role"] == "developer"  # the caller's
    template = write(tmp_path, "{{ tools is none }} {{ documents is none }}")
    assert template.render([USER], tools=[], documents=None) == "True True"
    assert template.render([USER], tools=[{}], documents=[{"text": "x"}]) == "False False"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no') }}", "the chat template refuses the messages: no"),
        ("{{ absent.name }}", "chat template fails: UndefinedError: 'absent' is undefined"),
        ("{{ messages[0].content + 1 }}", "chat template fails: TypeError: "),
        ("{{ ''.__class__.mro() }}", "chat template fails: SecurityError: access to attribute"),
        ("{{ messages.append(1) }}", "chat template fails: SecurityError: "),
        ("{% for i in range(10000000) %}{% endfor %}", "chat template fails: OverflowError: "),
        ("{% if %}", "the chat template is not valid: "),
        ("{% unknown %}", "the chat template is not valid: Encountered unknown tag 'unknown'"),
        ("{{ '\\ud800' }}", "the messages must be valid UTF-8"),
    ],
)
def test_templates_that_refuse_fail_or_are_not_valid_are_named(tmp_path, template, message):
    with pytest.raises(ValueError, match=message) as error:
        write(tmp_path, template).render([USER])
    if "not valid" in message:
        assert str(error.value).startswith(f"{tmp_path}: ")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("tokenizer_config.json", "{", "tokenizer_config.json: not JSON: "),
        ("tokenizer_config.json", "[]", "tokenizer_config.json: expected a JSON object"),
        ("tokenizer_config.json", '{"chat_template": 1}', "chat_template must be a text, or a"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "x"}]}', "must be a text, or a"),
        ("chat_template.jinja", b"\xff", "chat_template.jinja: 'utf-8' codec can't decode"),
    ],
)
def test_damaged_files_are_named(tmp_path, name, text, message):
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=message):
        read_chat_template(tmp_path)


def test_a_folder_without_a_template_for_the_messages_is_refused(tmp_path):
    with pytest.raises(ValueError, match="there is no chat template: give a prompt"):
        read_chat_template(tmp_path).render([USER])
    template = write(tmp_path, chat_template=[{"name": "rag", "template": ""}])
    with pytest.raises(ValueError, match="there is no chat template named default, only rag"):
        template.render([USER])


def calls(*each) -> dict:
    return {"role": "assistant", "content": None, "tool_calls": list(each)}


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages=[] must be a list of messages, not empty"),
        ("hello", "messages='hello' must be a list of messages"),
        ({"role": "user"}, "messages={'role': 'user'} must be a list"),
        ([USER, "x"], "messages[1]='x' must be an object"),
        ([{"content": "x"}], ".role=None must be one of system, developer, user,"),
        ([USER | {"role": ["user"]}], ".role=['user'] must be one of"),
        ([USER | {"role": "asistant"}], ".role='asistant' must be one of"),
        ([{"role": "user"}], ".content=None must be a text or a list of text parts"),
        ([USER | {"content": 5}], ".content=5 must be a text"),
        ([USER | {"content": ["x"]}], ".content[0]='x' must be a part of type 'text'"),
        ([USER | {"content": [{"type": "image_url"}]}], "} must be a part of type 'text'"),
        ([USER | {"content": [{"type": "text", "text": 1}]}], ".content[0].text=1 must be a text"),
        ([calls() | {"tool_calls": "x"}], ".tool_calls='x' must be a list"),
        ([calls()], ".content=None must be a text"),
        ([calls({"function": {}})], ".tool_calls[0]={'function': {}} must have a function with a"),
        ([calls({"name": "f", "arguments": "{x"})], ": arguments='{x' must be a JSON object"),
    ],
)
def test_messages_that_are_not_valid_are_named(messages, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        checked_messages(messages)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tools": "x"}, "tools='x' must be a list of objects"),
        ({"tools": ["x"]}, r"tools=\['x'\] must be a list of objects"),
        ({"documents": 1}, "documents=1 must be a list of objects"),
        ({"variables": []}, r"variables=\[\] of the chat template must be an object"),
        ({"variables": {"messages": []}}, "messages can't be a variable of the chat template"),
    ],
)
def test_other_arguments_that_are_not_valid_are_named(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        write(tmp_path, "x").render([USER], **options)


@pytest.mark.parametrize("text", ["absent", None, "", '{"a": 1}'])
def test_arguments_of_calls_become_objects(text):
    function = {"name": "f"} | ({} if text == "absent" else {"arguments": text})
    wanted = {"name": "f", "arguments": {"a": 1} if text and "{" in text else {}}
    given = calls(function, {"id": "x", "function": function})
    expected = calls(wanted, {"id": "x", "function": wanted})
    del expected["content"]
    assert checked_messages([given]) == [expected]
    del given["content"]
    assert checked_messages([given]) == [expected]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}[{{ m.content }}]{% endfor %}", "[a][]"),
        ("{% for m in messages %}[{{ m.content | length }}]{% endfor %}", "[1][0]"),
        ("{{ messages[1].content is defined }} {{ messages[1].content is none }}", "False False"),
    ],
)
def test_null_content_beside_tool_calls_is_undefined(tmp_path, template, expected):
    assert write(tmp_path, template).render([USER, calls({"name": "f"})]) == expected


def test_the_templates_of_a_folder_render_as_in_transformers(tmp_path):
    """With published templates: CHAT_TEMPLATES=FOLDER, of .jinja files, and transformers."""
    if "CHAT_TEMPLATES" not in os.environ:
        pytest.skip("CHAT_TEMPLATES is not set")
    transformers = pytest.importorskip("transformers")
    for file in sorted(Path(os.environ["CHAT_TEMPLATES"]).glob("*.jinja")):
        folder = tmp_path / file.stem
        folder.mkdir()
        save_chat_folder(folder, NAMES[0])
        (folder / "chat_template.jinja").write_bytes(file.read_bytes())
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        ours = read_chat_template(folder)
        for messages, options in itertools.product(CONVERSATIONS.values(), OPTIONS.values()):
            options = {"add_generation_prompt": True} | options
            try:
                expected = theirs.apply_chat_template(messages, tokenize=False, **options)
            except Exception:
                with pytest.raises(ValueError, match="the chat template"):
                    render(ours, messages, **options)
            else:
                assert render(ours, messages, **options) == expected, file
