"""Completions match what their requests ask for, whatever else happens to them."""

import re
import sys
import threading
from functools import reduce

import pytest

from pallas_paged.engine import SamplingParams, StructuredOutputsParams
from pallas_paged.engine.requests import grammar
from pallas_paged.engine.requests.grammar import GrammarCompiler
from pallas_paged.engine.schedule import scheduler
from tests.support.engine_calls import (
    PROMPTS,
    greedy,
    run,
    sampling,
    serve,
    step,
    steps_of,
    tokens_of,
)
from tests.support.structured_cases import (
    CASES,
    EOS,
    LIST,
    PERSON,
    PIECES,
    PieceTokenizer,
    PlainPieceTokenizer,
    is_list,
    make,
    structured,
)


@pytest.fixture(scope="module")
def engine():
    pytest.importorskip("llguidance", reason="needs the extra [structured]")
    return make(PieceTokenizer())


ENDLESS = {"$ref": "#/$defs/a", "$defs": {"a": {"properties": {"a": {"$ref": "#/$defs/a"}}}}}
ENDLESS["$defs"]["a"] |= {"type": "object", "required": ["a"]}


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


def test_rows_with_and_without_grammars_share_calls(engine):
    steps_of(engine, 8)
    plain = sampling(max_tokens=20)
    alone = tokens_of(serve(engine, [PROMPTS[1]], plain))
    params = [plain, sampling(**structured(json=LIST)), greedy(**structured(choice=["ab", "cde"]))]
    requests = serve(engine, [PROMPTS[1]] * 3, params)
    assert tokens_of(requests)[0] == alone[0]
    assert is_list(requests[1].outputs[0].text)
    assert requests[2].outputs[0].text in ("ab", "cde")


def test_steps_that_go_ahead_of_their_masks_draw_the_same_tokens(engine, monkeypatch):
    """Also where rows end, are forced, wait for others or for pages, or have no grammar."""
    options = [structured(**fields) for fields, _ in CASES] + [{}, structured(regex="[ab]+")]
    params = [sampling(**one, seed=i, max_tokens=24) for i, one in enumerate(options * 2)]
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(params))]
    before = engine.stats().num_preemptions
    found, num_ahead, go = [], [], scheduler.Scheduler._goes_ahead.fget
    for least in (10**9, 0, 3):
        monkeypatch.setattr(scheduler, "_FREE_TOKENS", least)
        ahead = []
        spy = property(lambda one, ahead=ahead: (ahead.append(go(one)), ahead[-1])[1])
        monkeypatch.setattr(scheduler.Scheduler, "_goes_ahead", spy)
        found.append(tokens_of(serve(engine, prompts, params)))
        num_ahead.append(sum(ahead))
    assert found[0] == found[1] == found[2]
    assert num_ahead[0] < num_ahead[2] <= num_ahead[1]
    assert engine.stats().num_preemptions > before


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


def test_an_aborted_request_leaves_others_and_no_page(engine):
    first = engine.submit(PROMPTS[0], sampling(**structured(regex="[ab]+"), max_tokens=30))
    other = engine.submit(PROMPTS[1], sampling(**structured(json=LIST)))
    step(engine, 3)
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


def test_a_grammar_that_compiles_for_too_long_is_refused_and_others_compile(engine, monkeypatch):
    end = threading.Event()
    monkeypatch.setattr(grammar, "_COMPILE_SECONDS", 0.01)
    monkeypatch.setattr(GrammarCompiler, "_compile", lambda *_: end.wait())
    with pytest.raises(ValueError, match=re.escape("the grammar must compile in 0.01 s")):
        engine.submit(PROMPTS[0], greedy(**structured(regex="[bc]{3}")))
    monkeypatch.undo()
    (request,) = serve(engine, PROMPTS[:1], greedy(**structured(regex="[bc]{3}")))
    end.set()
    assert request.outputs[0].finish_reason == "stop"


def test_a_long_chain_of_rules_does_not_exhaust_the_stack(engine):
    """Of schemas, of rules and of terminals."""
    links = {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(3000)}
    schema = {"$defs": links | {"3000": {"const": 1}}, "$ref": "#/$defs/0"}
    rules = "\n".join(f"r{i}: r{i + 1}" for i in range(6000)) + "\nr6000: /1/"
    rules, terminals = (f"start: {x}0\n{rules.replace('r', x)}" for x in "rR")
    for fields in (dict(json=schema), dict(grammar=rules), dict(grammar=terminals)):
        (request,) = serve(engine, PROMPTS[:1], greedy(**structured(**fields)))
        assert request.outputs[0].text == "1"


def test_repetitions_that_would_force_text_without_end_force_none(engine):
    """A billion characters are drawn one by one."""
    regex = "((a{1000}){1000}){1000}"
    for fields in (
        dict(regex=regex),
        dict(json={"type": "string", "pattern": f"^{regex}$"}),
        dict(json={"type": "string", "pattern": "^a*$", "minLength": 10**9}),
        dict(grammar="start: B\nA: /(a{1000}){1000}/\nB: A{1000}"),
    ):
        (request,) = serve(engine, PROMPTS[:1], greedy(**structured(**fields), max_tokens=3))
        assert request.outputs[0].text.strip('"')[-2:] == "aa"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(json={"type": "strin"}), "Invalid type: strin"),
        (dict(json={"$ref": "#/x"}), "structured_outputs: "),
        (dict(regex="(("), "unclosed group"),
        (dict(grammar="begin: /x/"), "start"),
        (dict(regex=""), "no token of the vocabulary begins"),
        (dict(regex="x+"), "no token of the vocabulary begins"),
        (dict(json=ENDLESS), "Too many items"),
        (dict(json={"items": {"multipleOf": 99400891}}), "multipleOf=99400891 is too large"),
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
        (dict(json=reduce(lambda inner, _: {"items": inner}, range(10**5), {})), "must be a JSON"),
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
