"""Completions match what their requests ask for, whatever else happens to them."""

import itertools
import json
import random
import re
import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from pallas_paged.engine import SamplingParams, StructuredOutputsParams
from pallas_paged.engine.requests.grammar import GrammarCompiler
from pallas_paged.engine.sampling_params import SamplingMode
from tests.support.engine_calls import (
    MODEL,
    PROMPTS,
    greedy,
    make_engine,
    run,
    sampling,
    serve,
    step,
    steps_of,
    tokens_of,
)

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


@pytest.fixture(scope="module")
def engine():
    pytest.importorskip("llguidance", reason="needs the extra [structured]")
    return make(PieceTokenizer())


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


@pytest.mark.parametrize(("fields", "holds"), CASES, ids=[next(iter(one)) for one, _ in CASES])
def test_every_completion_that_stops_matches(engine, fields, holds):
    params = [greedy(**structured(**fields), max_tokens=25)]
    params += [sampling(**structured(**fields), seed=i, max_tokens=25) for i in range(8)]
    requests = serve(engine, [PROMPTS[0]] * len(params), params, check=False)
    outputs = [request.outputs[0] for request in requests]
    for output in outputs:
        assert output.finish_reason != "stop" or holds(output.text), output.text
        assert output.finish_reason in ("stop", "length")
    assert any(output.finish_reason == "stop" for output in outputs)


def test_rows_with_and_without_grammars_share_calls_of_several_steps(engine):
    steps_of(engine, 8)
    plain = sampling(max_tokens=20)
    alone = tokens_of(serve(engine, [PROMPTS[1]], plain))
    params = [plain, sampling(**structured(json=LIST)), greedy(**structured(choice=["ab", "cde"]))]
    requests = serve(engine, [PROMPTS[1]] * 3, params)
    assert tokens_of(requests)[0] == alone[0]
    assert is_list(requests[1].outputs[0].text)
    assert requests[2].outputs[0].text in ("ab", "cde")


def test_samples_of_a_prompt_have_states_of_their_own(engine):
    params = sampling(**structured(json=LIST), n=6)
    (request,) = serve(engine, [PROMPTS[4]], params)
    assert all(is_list(output.text) for output in request.outputs)
    assert len({output.text for output in request.outputs}) > 1


def test_preemption_and_the_prefix_cache_change_nothing(engine):
    params = [sampling(**structured(json=PERSON), seed=i, max_tokens=24) for i in range(4)]
    prompt = [*range(20, 28)]
    alone = [tokens_of(serve(engine, [prompt], one))[0] for one in params]
    requests = serve(engine, [prompt] * 4, params)
    assert sum(request.num_preemptions for request in requests) > 0
    assert sum(request.num_cached_tokens for request in requests) > 0
    assert tokens_of(requests) == alone


@pytest.mark.parametrize(("fields", "holds"), CASES, ids=[next(iter(one)) for one, _ in CASES])
def test_forced_tokens_take_no_steps_and_are_those_that_steps_draw(engine, fields, holds):
    """With log-probabilities every token is drawn."""
    several = (greedy, {}), (sampling, {}), (sampling, dict(repetition_penalty=1.3, n=2))
    for make_params, more in several:
        options = structured(**fields) | dict(max_tokens=24) | more
        before = engine.stats()
        skipped = serve(engine, PROMPTS[:2], make_params(**options))
        between = engine.stats()
        drawn = serve(engine, PROMPTS[:2], make_params(**options, logprobs=0))
        after = engine.stats()
        assert tokens_of(skipped) == tokens_of(drawn)
        num_tokens = sum(len(x.token_ids) for request in skipped for x in request.outputs)
        assert between.generated_tokens - before.generated_tokens == num_tokens
        num_steps = between.num_steps - before.num_steps, after.num_steps - between.num_steps
        assert num_steps[0] <= num_steps[1]
        assert num_steps[0] <= num_steps[1] // 2 or "json" not in fields or "items" in str(fields)


def test_a_grammar_allows_one_token_where_it_forces_one(engine):
    compiler = GrammarCompiler(PieceTokenizer(), MODEL.vocab_size, (EOS,))
    num_forced = 0
    for (fields, _), seed in itertools.product(CASES, range(5)):
        rng = random.Random(seed)
        state = compiler.compile(StructuredOutputsParams(**fields)).start((EOS,))
        for _ in range(40):
            forced = state.forced_tokens()
            for token_id in forced:
                assert allowed(state) == [token_id]
                state.accept(token_id)
            num_forced += len(forced)
            if state.is_complete or (token_id := rng.choice(allowed(state))) == EOS:
                break
            state.accept(token_id)
    assert num_forced > 100


def allowed(state):
    mask = np.zeros(-(-MODEL.vocab_size // 32), np.int32)
    state.fill(mask)
    return [token for token in range(MODEL.vocab_size) if mask[token // 32] >> token % 32 & 1]


def test_a_completion_may_end_within_forced_tokens(engine):
    text = '{"a":"'
    for num_tokens in range(1, 6):
        params = greedy(**structured(json=PERSON), max_tokens=num_tokens)
        (request,) = serve(engine, [PROMPTS[0]], params)
        (output,) = request.outputs
        assert (len(output.token_ids), output.finish_reason) == (num_tokens, "length")
        assert text.startswith(output.text) and output.text
    (request,) = serve(engine, [PROMPTS[0]], greedy(**structured(json=PERSON), stop='":'))
    (output,) = request.outputs
    assert (output.text, output.stop_reason) == ('{"a', '":')
    (request,) = serve(engine, [PROMPTS[0]], greedy(**structured(choice=["ab" * 20])))
    assert request.outputs[0].text == "ab" * 7  # as many tokens as max_tokens


class Spelling(PieceTokenizer):
    """Begins texts with a special token, as tokenizers do; it never writes "ab" as one token."""

    def encode(self, text: str) -> list[int]:
        if "é" in text:
            raise ValueError(text)
        return [PIECES.index(b"<s>"), *super().encode(text)]


@pytest.mark.parametrize(
    ("tokenizer", "text", "pieces"),
    [
        (Spelling(), "cab", ["c", "a", "b"]),  # as the tokenizer spells it
        (Spelling(), "cabé", ["c", "ab", b"\xc3", b"\xa9"]),  # it fails: the longest
        (PlainPieceTokenizer(), "cab", ["c", "a", "b"]),
    ],
)
def test_forced_text_is_spelt_as_the_tokenizer_spells_it(engine, tokenizer, text, pieces):
    wanted = [PIECES.index(one if isinstance(one, bytes) else one.encode()) for one in pieces]
    (request,) = serve(make(tokenizer), [PROMPTS[0]], greedy(**structured(choice=[text])))
    assert request.outputs[0].token_ids == wanted and request.outputs[0].finish_reason == "stop"


def test_an_aborted_request_leaves_others_and_no_page(engine):
    first = engine.submit(PROMPTS[0], sampling(**structured(regex="[ab]+"), max_tokens=30))
    other = engine.submit(PROMPTS[1], sampling(**structured(json=LIST)))
    for _ in range(3):
        step(engine)
    engine.abort(first.request_id)
    run(engine)
    assert first.outputs[0].finish_reason == "abort" and is_list(other.outputs[0].text)


def test_a_complete_text_ends_where_no_token_ends_a_row(engine):
    """Token 0 must not stand for the end, and with no token to choose all logits were -inf."""
    params = sampling(**structured(regex="[1-9]{1,4}"), ignore_eos=True, n=4)
    (request,) = serve(engine, [PROMPTS[0]], params)
    for output in request.outputs:
        assert output.finish_reason == "stop"
        assert re.fullmatch("[1-9]{4}", output.text) and not {0, EOS} & {*output.token_ids}


def test_tokens_that_are_lost_in_the_text_are_not_chosen(engine):
    specials = {token for token in range(40) if PieceTokenizer().is_special(token)}
    params = sampling(**structured(regex="(.|\n)*"), n=4, max_tokens=40, temperature=4.0)
    (request,) = serve(engine, [PROMPTS[0]], params)
    for output in request.outputs:
        inner = output.token_ids[: -1 if output.finish_reason == "stop" else None]
        assert not specials & {*inner}
        assert output.text.encode() == b"".join(PIECES[token] for token in inner)


def test_a_tokenizer_that_only_decodes_serves_as_well(engine):
    params = [greedy(**structured(choice=["a b", " c", "é"])), greedy(**structured(regex="é|b"))]
    requests = serve(make(PlainPieceTokenizer()), PROMPTS[:2], params)
    assert requests[0].outputs[0].text in ("a b", " c")  # "é" takes two tokens, none of them text
    assert requests[1].outputs[0].text == "b"


def test_json_has_no_whitespace_without_end(engine):
    space = [PieceTokenizer().encode(text)[0] for text in " \n"]
    params = greedy(**structured(json=LIST), logit_bias=dict.fromkeys(space, 100.0))
    (request,) = serve(engine, [PROMPTS[0]], params)
    assert is_list(request.outputs[0].text)


def test_a_bias_and_filters_choose_among_what_is_allowed(engine):
    params = sampling(**structured(choice=["ab", "c"]), top_k=1, logit_bias={0: 100, 12: 50})
    (request,) = serve(engine, [PROMPTS[0]], params)
    assert request.outputs[0].text == "c"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(json={"type": "strin"}), "Invalid type: strin"),
        (dict(json={"$ref": "#/x"}), "structured_outputs: "),
        (dict(regex="(("), "unclosed group"),
        (dict(grammar="begin: /x/"), "start"),
        (dict(regex=""), "no token of the vocabulary begins"),
        (dict(regex="x+"), "no token of the vocabulary begins"),
    ],
    ids=lambda x: x if isinstance(x, str) else str(x)[:20],
)
def test_a_grammar_that_does_not_compile_is_refused_with_the_compilers_text(
    engine, fields, message
):
    with pytest.raises(ValueError, match=re.escape(message)):
        engine.submit(PROMPTS[0], greedy(**structured(**fields)))
    assert engine.idle


def test_a_grammar_that_becomes_too_complex_ends_its_request_only(engine):
    objects = [
        {"type": "object", "properties": {f"a{j}": {"minimum": i} for j in range(20)}}
        for i in range(100)
    ]
    requests = serve(
        engine,
        PROMPTS[:2],
        [greedy(**structured(json={"anyOf": objects})), greedy(**structured(json=LIST))],
    )
    assert requests[0].outputs[0].finish_reason == "error" and "items" in requests[0].error
    assert is_list(requests[1].outputs[0].text)


def test_a_text_that_ends_because_its_grammar_is_too_complex_is_an_error(engine):
    """The mask then allows only the end, which is no end of a text that matches."""
    many = "{0,90}"
    regex = f"(((.*a.{many}){many}b.{many}){many}a.{many}){many}c"
    params = sampling(**structured(regex=regex), max_tokens=50, logit_bias={10: 99, 11: 99})
    (request,) = serve(engine, PROMPTS[:1], params, check=False)
    assert request.outputs[0].finish_reason == "error" and "lexer error" in request.error


def test_a_grammar_is_compiled_once(engine, monkeypatch):
    import llguidance

    serve(engine, PROMPTS[:1], greedy(**structured(choice=["a", "b"])))
    monkeypatch.setattr(llguidance, "LLMatcher", None)
    serve(engine, PROMPTS[:1], greedy(**structured(choice=["a", "b"])))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (dict(min_tokens=1), "min_tokens=1 is not possible with structured_outputs"),
        (dict(beam_width=2), "is not possible with beam_width=2"),
    ],
)
def test_what_can_not_be_combined_is_refused_by_name(params, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        SamplingParams(**structured(choice=["a"]), **params)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "has nothing, must have one of"),
        (dict(regex="a", choice=["a"]), "has ['regex', 'choice'], must have one of"),
        (dict(json="[1]"), "must be a JSON schema: it is no object"),
        (dict(json="{"), "must be a JSON schema"),
        (dict(json={"a": {1, 2}}), "must be a JSON schema"),
        (dict(regex=5), "regex=5 must be a text"),
        (dict(choice="ab"), "choice='ab' must be a list"),
        (dict(choice=[]), "choice=[] must be a list"),
        (dict(choice=["a", ""]), "choice has '', must have texts"),
        (dict(regex="a" * 200_000), "regex has 200000 characters, must have at most"),
    ],
)
def test_parameters_are_checked(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        StructuredOutputsParams(**fields)


def test_without_llguidance_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ValueError, match=re.escape("pip install 'pallas-paged[structured]'")):
        make(PieceTokenizer()).submit(PROMPTS[0], greedy(**structured(choice=["a"])))


def test_without_a_tokenizer_the_error_says_so():
    with pytest.raises(ValueError, match="structured_outputs needs a tokenizer"):
        make().submit(PROMPTS[0], greedy(**structured(choice=["a"])))
