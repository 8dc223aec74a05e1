"""Answers are parted into content, reasoning and calls, however their text arrives."""

import pytest

from pallas_paged.server.answer_format import find_formats
from pallas_paged.server.answer_parser import AnswerParser, Parts
from pallas_paged.server.calls import CallFinder

A, B = ("f", '{"a": 1}'), ("g", '{"b": "é"}')
SCHEMAS = {"f": {"properties": {"s": {"type": "string"}, "n": {"type": "integer"}}}}
HERMES = ("hermes", "qwen3")
F = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
G = '<tool_call>\n{"name": "g", "arguments": {"b": "é"}}\n</tool_call>'
CODER = """\
<tool_call>
<function=f>
<parameter=s>
1
2
</parameter>
<parameter=n>
3
</parameter>
</function>
</tool_call>"""
LLAMA = '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {"b": "é"}}'
LIST = '[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {"b": "é"}}]'
ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"
COMMENTARY = "<|start|>assistant<|channel|>commentary"
TO_F = f'{COMMENTARY} to=functions.f <|constrain|>json<|message|>{{"a": 1}}'
HARMONY = ("openai", "openai_gptoss")


def pushed(pieces, parsers, **options):
    """Return content, reasoning, complete calls and incomplete ones of an answer that comes so."""
    parser, parts = AnswerParser(*find_formats("", *parsers), SCHEMAS, **options), Parts()
    for index, piece in enumerate(pieces):
        new = parser.push(piece, is_last=index == len(pieces) - 1)
        parts.content += new.content
        parts.reasoning += new.reasoning
        parts.calls += new.calls
    calls, complete = {}, []
    for piece in parts.calls:
        assert bool(piece.name) == (piece.number not in calls)
        assert not piece.name or piece.number == len(calls)
        name, arguments = calls.get(piece.number, (piece.name, ""))
        calls[piece.number] = name, arguments + piece.arguments
        if piece.is_last:
            complete.append(piece.number)
    incomplete = [calls[number] for number in calls if number not in complete]
    return parts.content, parts.reasoning, [calls[number] for number in complete], incomplete


def parted(text, parsers, size=None, **options):
    size = size or len(text) or 1
    pieces = [text[i : i + size] for i in range(0, len(text), size)] or [""]
    *found, incomplete = pushed(pieces, parsers, **options)
    assert not incomplete or any(arguments in found[0] for _, arguments in incomplete)
    return tuple(found)


@pytest.mark.parametrize("size", [None, 1, 7])
@pytest.mark.parametrize(
    ("parsers", "text", "expected"),
    [
        (HERMES, " Plain <b>text</b>\n", (" Plain <b>text</b>\n", "", [])),
        (HERMES, f"<think>\nHm.\n</think>\n\nFirst\n{F}\n{G}\n", ("First", "Hm.", [A, B])),
        (HERMES, f"Both.\n{F} and {G} Done", ("Both.\nand\nDone", "", [A, B])),
        (HERMES, "<think>\nNo end", ("", "No end", [])),
        (HERMES, "Of <think> or </think>", ("Of <think> or </think>", "", [])),
        (HERMES, F.removesuffix("</tool_call>"), ("", "", [A])),
        (HERMES, "Hi " + F[:30], ("Hi " + F[:30], "", [])),
        (HERMES, "<tool_call>x</tool_call>!", ("<tool_call>x</tool_call>!", "", [])),
        (HERMES, F.replace("1", '"</tool_call>"'), ("", "", [("f", '{"a": "</tool_call>"}')])),
        (HARMONY, TO_F[19:].replace("1", '"<|end|>"'), ("", "", [("f", '{"a": "<|end|>"}')])),
        (
            ("mistral", "none"),
            f'[TOOL_CALLS]f[ARGS]{{"a": "{"x" * 500}[TOOL_CALLS]"}}',
            ("", "", [("f", f'{{"a": "{"x" * 500}[TOOL_CALLS]"}}')]),
        ),
        (("qwen3_coder", "none"), CODER, ("", "", [("f", '{"s": "1\\n2", "n": 3}')])),
        (("qwen3_coder", "none"), CODER[:-30], (CODER[:-30], "", [])),
        (("llama3_json", "none"), LLAMA, ("", "", [A, B])),
        (("llama3_json", "none"), "<|python_tag|>" + LLAMA, ("", "", [A, B])),
        (("llama3_json", "none"), "See {x} " + LLAMA, ("See {x} " + LLAMA, "", [])),
        (("llama3_json", "none"), '{"x": 1} ', ('{"x": 1} ', "", [])),
        (("mistral", "mistral"), f"[THINK]Hm.[/THINK]Hi[TOOL_CALLS]{LIST}", ("Hi", "Hm.", [A, B])),
        (
            ("mistral", "none"),
            '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]x1[ARGS]{"b": "é"}',
            ("", "", [A, B]),
        ),
        (("mistral", "none"), '[TOOL_CALLS]f[ARGS]{"a"', ('[TOOL_CALLS]f[ARGS]{"a"', "", [])),
        (HARMONY, ANALYSIS + TO_F, ("", "Hm.", [A])),
        (HARMONY, f"{ANALYSIS}{COMMENTARY}<|message|>Now.<|end|>{TO_F}", ("Now.", "Hm.", [A])),
        (HARMONY, f"{ANALYSIS}{FINAL}Yes.", ("Yes.", "Hm.", [])),
        (HARMONY, '{"a": 1}', ('{"a": 1}', "", [])),
        (HARMONY, "<|channel|>ana", ("", "", [])),
        (HARMONY, ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}', ("", "", [A])),
        (("none", "none"), F, (F, "", [])),
    ],
)
def test_the_parts_of_an_answer(parsers, text, expected, size):
    assert parted(text, parsers, size) == expected


ANSWERS = [
    (HERMES, F.replace("1", '"</tool_call>"') + G),
    (HERMES, f"<think>Hm.</think>Hi {F}\n{G}"),
    (HERMES, '<tool_call>{"arguments": {"s": "\\"}{\\\\"}, "name": "f", "x": [{}]}</tool_call>.'),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>'),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": {"b": [1, {"c": "]}"}]}}}</tool_call>'),
    (("qwen3_coder", "none"), CODER + "\nDone"),
    (("llama3_json", "none"), LLAMA),
    (("llama3_json", "none"), '{"name": "f", "parameters": {"a": 1}, "arguments": {"b": 2}}'),
    (("mistral", "mistral"), f"[THINK]Hm.[/THINK]Hi[TOOL_CALLS]{LIST}"),
    (("mistral", "none"), '[TOOL_CALLS]f[ARGS]{"a": "["}[TOOL_CALLS]g[CALL_ID]x1[ARGS] {}'),
    (HARMONY, f"{ANALYSIS}{COMMENTARY}<|message|>Now.<|end|>{TO_F}"),
]


@pytest.mark.parametrize(("parsers", "text"), ANSWERS)
def test_an_answer_is_the_same_wherever_its_text_is_cut_in_two(parsers, text):
    at_once = pushed([text], parsers)
    assert at_once[2] and not at_once[3]
    for at in range(len(text)):
        assert pushed([text[:at], text[at:]], parsers) == at_once


@pytest.mark.parametrize(("parsers", "text"), ANSWERS)
def test_an_answer_that_ends_anywhere_has_the_same_content_and_calls_in_pieces(parsers, text):
    """Pieces of a truncated call have come already, and its text is content all the same."""
    for end in range(len(text)):
        content, reasoning, calls, _ = pushed([text[:end]], parsers)
        *found, incomplete = pushed([*text[:end]] or [""], parsers)
        assert (content, reasoning, calls) == tuple(found)
        assert all(arguments in content for _, arguments in incomplete)


@pytest.mark.parametrize(("parsers", "text", "first"), [
    (HERMES, F, '<tool_call>\n{"name": "f", "arguments": {'),
    (("llama3_json", "none"), LLAMA, '{"name": "f", "parameters": {'),
    (("mistral", "none"), "[TOOL_CALLS]" + LIST, '[TOOL_CALLS][{"name": "f", "arguments": {'),
    (("mistral", "none"), '[TOOL_CALLS]f[ARGS]{"a": 1}', "[TOOL_CALLS]f[ARGS]{"),
    (HARMONY, ANALYSIS + TO_F, ANALYSIS + TO_F.partition("{")[0] + "{"),
])  # fmt: skip
def test_arguments_come_as_they_are_written(parsers, text, first):
    parser = AnswerParser(*find_formats("", *parsers))
    begun = [piece for one in first for piece in parser.push(one).calls]
    assert begun == [(0, "f", "{", False)]
    for one in '"a": 1}':
        (piece,) = parser.push(one).calls
        assert piece == (0, "", one, False)
    last = [piece for piece in parser.push(text[len(first) + 7 :], is_last=True).calls]
    assert last[0] == (0, "", "", True)


def test_what_is_no_call_sends_no_pieces():
    """An answer in JSON of a model that writes calls as bare JSON; text that only begins as one."""
    parsers = ("llama3_json", "none")
    for text in ('{"name": "Bob", "age": [3]}', '{"parameters": {"a": 1}}', '{"name": 5, "x": {}}'):
        assert pushed([*text], parsers) == (text, "", [], [])
    text = "[TOOL_CALLS]" + "x" * 1000 + '{"a": 1}'  # found at its end, and not while it arrives
    *_, calls, incomplete = pushed([*text], ("mistral", "none"))
    assert calls == [("x" * 1000, '{"a": 1}')] and not incomplete


def test_calls_that_are_not_valid_are_read_twice_at_most(monkeypatch):
    """Each would else read all that follow, as their markers are in strings of its own."""
    calls, read = [], CallFinder.read
    monkeypatch.setattr(CallFinder, "read", lambda self, x: (calls.append(1), read(self, x)))
    text = '<tool_call>{"</tool_call>"' * 500
    assert pushed([text], HERMES) == (text, "", [], [])
    assert len(calls) < 3 * 500


@pytest.mark.parametrize("size", [1, 7, 999])
def test_a_string_without_an_end_hides_no_call_behind_it(size):
    broken = F.replace("1}}", '"')
    text = f"{broken}!{G}"
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    assert pushed(pieces, HERMES)[:3] == (f"{broken}!", "", [B])


def test_an_answer_to_a_prompt_that_opens_the_reasoning():
    for size in None, 1:
        found = parted(f"\nHm.\n</think>\n{F}", HERMES, size, is_thinking=True)
        assert found == ("", "Hm.", [A])


def test_a_beginning_of_a_marker_is_held_back_and_no_more():
    parser = AnswerParser(*find_formats("", *HERMES))
    assert parser.push("a < b <tool").content == "a < b"
    assert parser.push(" c").content == " <tool c"
    assert parser.push("", is_last=True) == Parts()


@pytest.mark.parametrize(
    "arguments", ["[1]", '"x"', "null", "1e999", '{"a": NaN}', "[" * 100_000], ids=range(6)
)
def test_a_call_with_other_arguments_than_an_object_stays_text(arguments):
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    assert parted(text, HERMES) == (text, "", [])


def test_formats_are_found_in_a_template():
    for template, calls, reasoning in (
        ("<tool_call> </think>", "hermes", "qwen3"),
        ("<tool_call><function=", "qwen3_coder", "none"),
        ('{"name": function name, "parameters": {}}', "llama3_json", "none"),
        ("<|start|><|channel|>", "openai", "openai_gptoss"),
        ("{{ messages }}", "none", "none"),
    ):
        assert find_formats(template) == find_formats("", calls, reasoning)
    assert find_formats("[TOOL_CALLS]")[0].call[0].startswith("[TOOL_CALLS][")
    assert find_formats("[TOOL_CALLS] [ARGS]")[0].call[0] == "[TOOL_CALLS]NAME[ARGS]"
    assert find_formats("<tool_call>", "none") == (None, None)
