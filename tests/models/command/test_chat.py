"""The command `python -m models.generate --chat`: conversations over pipes and on a terminal."""

import io
import json
import os
import pty
import select
import shutil
import signal
import sys
import time

import pytest

from models.text import Tokenizer, chat_defaults, read_chat_template
from pallas_paged.engine import EngineDeadError
from pallas_paged.engine.async_engine import AsyncEngine
from pallas_paged.engine.requests.request import RequestStream
from tests.support.commands import CONFIG, ROOT, start_command

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}{{ mark }}a:"


@pytest.fixture(scope="module")
def folder(checkpoint, tmp_path_factory):
    folder = shutil.copytree(checkpoint, tmp_path_factory.mktemp("chat") / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def prompts(monkeypatch):
    seen = []
    submit = AsyncEngine.submit

    def recording(engine, token_ids, params):
        seen.append((bytes(token_ids).decode(errors="replace"), params))
        return submit(engine, token_ids, params)

    monkeypatch.setattr(AsyncEngine, "submit", recording)
    return seen


@pytest.fixture
def chat(run, folder, monkeypatch):
    """Run the command on lines of input: exit status, stdout and stderr."""

    def chat(*lines, args=()):
        data = "".join(f"{line}\n" for line in lines).encode(errors="surrogateescape")
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), "utf-8"))
        return run("--chat", "--temperature", "0", "--checkpoint", str(folder), *args)

    return chat


def test_answers_are_streamed_and_the_conversation_goes_on(chat, prompts):
    status, out, err = chat("how are you?", "", " more ", args=["--max-tokens", "9"])
    assert status == 0
    (first, _), (second, _) = prompts
    assert first == "u:how are you?\na:"
    answer = second.removeprefix("u:how are you?\na:").removesuffix("\nu: more \na:")
    assert second == f"u:how are you?\na:{answer}\nu: more \na:" and 1 <= len(answer) <= 9
    assert out.startswith(f"{answer}\n") and out.endswith("\n")
    context, *stops, summary = err.splitlines()
    assert context.startswith("a context of 64 tokens; /reset begins a new conversation")
    assert stops == ["stopped after --max-tokens 9"] * 2
    # Pages of 16 tokens: the second turn finds the first.
    assert summary.startswith("2 answers; ") and not summary.endswith("hit rate 0.0%")


def test_reset_begins_again_and_quit_ends(chat, prompts):
    lines = ["one", "/reset", "two", "/unknown", "/path/to a file", "/quit", "three"]
    status, _, err = chat(*lines, args=["--system", "Be brief.", "--max-tokens", "1"])
    assert status == 0
    texts = [prompt for prompt, _ in prompts]
    assert texts[:2] == ["s:Be brief.\nu:one\na:", "s:Be brief.\nu:two\na:"]
    assert len(texts) == 3 and texts[2].endswith("\nu:/path/to a file\na:")
    assert "a new conversation\n" in err and "unknown command /unknown; /reset begins" in err


def test_template_and_engine_get_options_and_defaults_of_the_checkpoint(
    chat, prompts, copy, tmp_path
):
    defaults = {"top_k": 7, "top_p": 0.5, "stop_strings": "p"}
    (copy / "generation_config.json").write_text(json.dumps(defaults))
    file = tmp_path / "other.jinja"
    file.write_text("{{ mark }}" + TEMPLATE)
    given = ["--checkpoint", str(copy), "--chat-template", str(file)]
    given += ["--chat-template-kwargs", '{"mark": "!"}', "--top-p", "0.9"]
    _, _, err = chat("x", args=[*given, "--max-tokens", "2", "--stop", "q", "--seed", "5"])
    ((prompt, params),) = prompts
    assert prompt == "!u:x\n!a:"
    assert (params.max_tokens, params.stop, params.seed) == (2, ("p", "q"), 5)
    assert (params.top_k, params.top_p, params.temperature) == (7, 0.9, 0.0)
    assert "defaults of the checkpoint: top_k=7, top_p=0.5, stop=p\n" in err


def test_answer_may_take_the_rest_of_the_context_and_then_it_is_full(chat, prompts):
    lines = ["x", "y" * 10, "/reset", "z" * 59]
    status, _, err = chat(*lines, args=["--max-tokens", "58"])  # 6 tokens are the first prompt's
    assert status == 0
    ((prompt, params),) = prompts
    assert params.max_tokens == 64 - len(prompt) == 58
    messages = [line for line in err.splitlines() if "context" in line][1:]
    assert messages[0] == "the context of 64 tokens is full: /reset begins a new one"
    assert messages[1].startswith("error: the conversation has ")
    assert messages[2].startswith("error: the conversation has 64 tokens, and the context 64: /res")


def test_an_answer_with_min_tokens_ends_with_the_context(chat, prompts):
    status, _, err = chat("y" * 40, args=["--min-tokens", "30"])
    ((prompt, params),) = prompts
    assert status == 0 and params.min_tokens == params.max_tokens == 64 - len(prompt)
    assert "the context of 64 tokens is full: /reset begins a new one\n" in err


def test_message_that_the_template_refuses_is_left_out(chat, prompts, tmp_path):
    file = tmp_path / "strict.jinja"
    refusal = "{% if messages[-1].content == 'bad' %}{{ raise_exception('no') }}{% endif %}"
    file.write_text(refusal + TEMPLATE)
    given = ["--chat-template", str(file), "--max-tokens", "1"]
    status, _, err = chat("bad", "good", "\udcff", args=given)
    assert status == 0 and [prompt for prompt, _ in prompts] == ["u:good\na:"]
    assert "error: the chat template refuses the messages: no\n" in err
    assert "error: the messages must be valid UTF-8\n" in err


def test_dead_engine_ends_the_program(chat, monkeypatch):
    def dying(self):
        raise EngineDeadError("a step failed", cause)

    monkeypatch.setattr(RequestStream, "__iter__", dying)
    cause = NotImplementedError("not here")
    status, _, err = chat("x")
    assert status == 2 and err.splitlines()[1:] == ["error: not here"]
    cause = TypeError("a bug")
    with pytest.raises(EngineDeadError, match="a bug"):
        chat("x")


def test_ctrl_c_stops_an_answer_and_keeps_its_beginning(chat, prompts, monkeypatch):
    iterate = RequestStream.__iter__
    turns = iter(["in the answer", "before it", "never"])

    def interrupted(stream):
        when = next(turns)
        for news in iterate(stream):
            if when == "before it":
                raise KeyboardInterrupt
            yield news
            if when == "in the answer" and news.outputs[0].text:
                raise KeyboardInterrupt

    monkeypatch.setattr(RequestStream, "__iter__", interrupted)
    status, _, err = chat("one", "two", "three", args=["--max-tokens", "8"])
    assert status == 0 and err.count("stopped\n") == 2
    texts = [prompt for prompt, _ in prompts]
    assert texts[0] == "u:one\na:"
    # The second answer had not begun: its question is left out.
    assert texts[1].startswith("u:one\na:") and texts[1].endswith("\nu:two\na:")
    assert texts[2] == texts[1].replace("two", "three")


@pytest.mark.slow  # a process of its own
def test_ctrl_c_on_a_terminal_stops_the_answer_and_not_the_program(copy):
    """In a process of its own, whose main thread waits for input or for the engine."""
    (copy / "chat_template.jinja").write_text(TEMPLATE)
    config = json.loads((copy / "config.json").read_text())
    config["max_position_embeddings"] = 2**13  # for an answer that takes minutes
    (copy / "config.json").write_text(json.dumps(config))
    main, child = pty.openpty()
    args = ("--chat", "--checkpoint", copy, "--max-num-batched-tokens", "32")
    streams = dict(stdin=child, stdout=child, stderr=child, start_new_session=True)
    process = start_command(*args, "--temperature", "0", **streams)
    os.close(child)
    seen = b""

    def wait_for(text, count=1, *, interrupts=False):
        """Read until a text has come; send Ctrl-C each second where one may be too early."""
        nonlocal seen
        end = time.monotonic() + 120
        while seen.count(text) < count and time.monotonic() < end:
            if select.select([main], [], [], 1.0)[0]:
                try:
                    seen += os.read(main, 4096)
                except OSError:  # the process has ended
                    break
            elif interrupts:
                process.send_signal(signal.SIGINT)
        assert seen.count(text) >= count, seen.decode()

    try:
        start = time.monotonic()
        wait_for(b"importing JAX ...")
        assert time.monotonic() - start < 5  # within a second where the machine is idle
        wait_for(b"> ")
        wait_for(b"/reset begins", 2, interrupts=True)  # the first is in the greeting
        os.write(main, b"hello\n")
        wait_for(b"stopped", interrupts=True)
        assert process.poll() is None
        os.write(main, b"/quit\n")
        wait_for(b" answers; ")
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(main)


def test_the_demo_checkpoint_has_a_template_whose_answers_end_at_a_blank_line():
    folder = ROOT / "models" / "checkpoints" / "shakespeare"
    template = read_chat_template(folder)
    messages = [{"role": "system", "content": "Verona."}, {"role": "user", "content": " Ho! "}]
    assert template.render(messages) == "Verona.\n\nJULIET:\nHo!\n\nROMEO:\n"
    with pytest.raises(ValueError, match="knows the roles system, user, assistant and tool"):
        template.render([{"role": "ipython", "content": "x"}])
    call = {"type": "function", "function": {"name": "ride", "arguments": "{}"}}
    messages = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "Done."}]
    written = '<tool_call>\n{"name": "ride", "arguments": {}}\n</tool_call>'
    assert template.render(messages) == f"ROMEO:\n{written}\n\nNURSE:\nDone.\n\nROMEO:\n"
    assert chat_defaults(folder, CONFIG, Tokenizer(folder), template) == {"stop": ["\n\n"]}
