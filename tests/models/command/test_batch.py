"""The command `python -m models.generate --prompts-file`: a JSON object for each prompt."""

import json
from dataclasses import replace

import numpy as np
import pytest

from pallas_paged.engine import (
    CompletionOutput,
    Engine,
    EngineDeadError,
    Logprob,
    Request,
    SamplingParams,
    StructuredOutputsParams,
)
from tests.support.chat_folders import save_chat_folder
from tests.support.checkpoints import edit


@pytest.fixture
def serve(run, tmp_path):
    """Run the command on a file of lines or objects: exit status, records by index, stderr."""

    def serve(lines, *args):
        name = "prompts.txt"
        if not isinstance(lines, bytes):
            if not all(isinstance(x, str) for x in lines):
                name = "prompts.jsonl"
                lines = [x if isinstance(x, str) else json.dumps(x) for x in lines]
            lines = "\n".join(lines).encode()
        (tmp_path / name).write_bytes(lines)
        status, out, err = run("--prompts-file", str(tmp_path / name), *args)
        records = [json.loads(line, parse_constant=pytest.fail) for line in out.splitlines()]
        assert len({record["index"] for record in records}) == len(records)
        return status, {record["index"]: record for record in records}, err

    return serve


def tokens_of(record):
    return [completion["token_ids"] for completion in record["outputs"]]


def test_each_prompt_gets_a_line_of_output(serve):
    lines = b"\xef\xbb\xbfone\x0cstill one\r\n\n  \n\xc3\xa9t\xc3\xa9 \ntwo\n"
    status, results, err = serve(lines, "--prompt", "zero", "--max-tokens", "9")
    assert status == 0
    prompts = ["zero", "one\x0cstill one", "été ", "two"]
    assert [results[index]["prompt"] for index in range(4)] == prompts
    for index, prompt in enumerate(prompts):
        result = results[index]
        (completion,) = result["outputs"]
        assert completion["finish_reason"] == "length" and len(completion["token_ids"]) == 9
        wanted = bytes(completion["token_ids"]).decode(errors="replace")
        assert completion["text"].rstrip("\ufffd") == wanted.rstrip("\ufffd")
        assert result["num_prompt_tokens"] == len(prompt.encode())
        assert result["num_cached_tokens"] == result["num_preemptions"] == 0
        assert 0 < result["ttft_s"] <= result["latency_s"]
    served, times, pool = err.splitlines()
    assert served.startswith("4 of 4 prompts served in ") and " tokens/s, " in served
    assert times.startswith("time to first token p50 ")
    assert pool.startswith("prefix cache hit rate 0.0%; pool of ")


def test_without_a_seed_equal_prompts_differ_and_the_reported_seed_repeats_them(serve):
    lines, args = ["ROMEO:", "ROMEO:"], ["--max-tokens", "12", "--temperature", "1"]
    _, results, err = serve(lines, *args)
    assert tokens_of(results[0]) != tokens_of(results[1])
    seed = results[0]["seed"]
    assert results[1]["seed"] == (seed + 1) % 2**32
    assert err.splitlines()[0].endswith(f"; seed {seed}")
    _, again, _ = serve(lines, *args, "--seed", str(seed))
    assert [tokens_of(again[index]) for index in (0, 1)] == [tokens_of(results[i]) for i in (0, 1)]
    assert serve(lines, *args)[1][0]["seed"] != seed


def test_messages_are_rendered_by_the_template_without_a_second_bos(serve, copy):
    save_chat_folder(copy, "headers")
    (copy / "chat_template.jinja").write_text(
        "{{ bos }}{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
        "{{ tools | length if tools else '' }}{{ mark }}"
    )
    say = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    objects = [say, say | {"tools": [{}, {}], "chat_template_kwargs": {"mark": "!"}}]
    objects.append({"prompt": list(b"hi"), "max_tokens": 2})
    refused = [
        (say | {"prompt": "x"}, "prompt and messages exclude each other"),
        ({"prompt": "x", "tools": []}, "tools needs messages"),
        (say | {"chat_template_kwargs": []}, "chat_template_kwargs=[] must be an object"),
    ]
    objects += [one for one, _ in refused]
    args = ["--checkpoint", str(copy), "--chat-template-kwargs", '{"mark": "?"}']
    status, results, _ = serve(objects, *args)
    assert status == 1
    assert [results[index]["prompt"] for index in (0, 1)] == ["user: hi?", "user: hi2!"]
    # Byte-level tokens, without the BOS that the tokenizer adds to texts.
    assert [results[index]["num_prompt_tokens"] for index in range(3)] == [9, 10, 2]
    assert [len(*tokens_of(results[index])) for index in range(3)] == [2] * 3
    for index, (_, reason) in enumerate(refused, 3):
        assert results[index]["error"].startswith(reason)


@pytest.fixture
def submitted(monkeypatch):
    """Parameters and priorities of requests; the engine refuses all, so that nothing runs."""
    seen = []

    def submit(engine, token_ids, params, *, priority):
        seen.append((params, priority))
        raise ValueError("not today")

    monkeypatch.setattr(Engine, "submit", submit)
    return seen


def test_keys_of_an_object_override_the_options(serve, submitted):
    objects = [
        {"prompt": "x"},
        {"prompt": "x", "max_tokens": 2, "n": 3, "temperature": 0, "logprobs": None},
        {"prompt": list(b"x"), "seed": 1, "priority": -1, "max_tokens": None, "best_of": 3},
        {"prompt": "x", "logit_bias": {"65": 100}},
        {"prompt": "x", "structured_outputs": {"choice": ["yes", "no"]}},
    ]
    options = dict(max_tokens=5, seed=7, logprobs=2, temperature=3.0)
    args = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    assert serve(objects, *args)[0] == 1
    params, choice = SamplingParams(**options), StructuredOutputsParams(choice=["yes", "no"])
    assert submitted == [
        (params, 0),
        (replace(params, max_tokens=2, n=3, temperature=0, seed=8), 0),
        (replace(params, seed=1, best_of=3), -1),
        (replace(params, seed=10, logit_bias={65: 100}), 0),
        (replace(params, seed=11, structured_outputs=choice), 0),
    ]


def test_records_have_log_probabilities_and_all_completions(serve):
    objects = [
        {"prompt": list(b"ROMEO:"), "logprobs": 2, "temperature": 3, "n": 2},
        {"prompt": "ROMEO:", "beam_width": 2, "n": 2},
    ]
    status, results, _ = serve(objects, "--max-tokens", "5")
    assert status == 0 and results[0]["prompt"] == list(b"ROMEO:")
    for record in results.values():
        first, second = record["outputs"]
        assert first["token_ids"] != second["token_ids"] and second["index"] == 1
    assert first["cumulative_logprob"] >= second["cumulative_logprob"]  # of beams
    for output in results[0]["outputs"]:
        entries = output["logprobs"]
        sampled = [entry[str(x)] for entry, x in zip(entries, output["token_ids"], strict=True)]
        total = sum(entry["logprob"] for entry in sampled)
        assert total == pytest.approx(output["cumulative_logprob"], abs=1e-4)
        assert all({1, 2} <= {each["rank"] for each in entry.values()} for entry in entries)


def test_without_max_tokens_a_completion_has_400_or_the_rest_of_the_context(serve, copy, submitted):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    long = ["--checkpoint", str(copy), "--max-model-len", "1024", "--num-pages", "64"]
    serve(["x" * 14], *long)
    serve(["x" * 14], "--max-model-len", "40")
    serve([{"prompt": "x" * 14, "priority": 3}, {"prompt": "y"}], "--seed", str(2**32 - 1))
    params, priorities = zip(*submitted, strict=True)
    assert [one.max_tokens for one in params] == [400, 40 - 14, 64 - 14, 64 - 1]
    assert [one.temperature for one in params] == [0.8] * 4
    assert [one.seed for one in params[2:]] == [2**32 - 1, 0]
    assert priorities == (0, 0, 3, 0)


def test_options_and_keys_override_the_sampling_defaults_of_the_checkpoint(serve, copy, submitted):
    defaults = {"temperature": 0.3, "top_k": 9, "top_p": 0.5, "repetition_penalty": 1.5}
    stops = {"stop_strings": ["\n\n"]}  # of chats
    (copy / "generation_config.json").write_text(json.dumps(defaults | stops))
    (copy / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (copy / "tokenizer_config.json").write_text('{"eos_token": "z"}')
    one, chat = {"prompt": "x", "max_tokens": 1}, {"messages": [{"role": "user", "content": "x"}]}
    objects = [one, one | {"top_p": 0.7, "temperature": None}, chat, chat | {"beam_width": 2}]
    objects.append(chat | {"stop": "y", "stop_token_ids": [5]})
    _, _, err = serve(objects, "--checkpoint", str(copy), "--top-k", "3")
    serve([one, one | {"stop": []}, one | {"stop": "y"}], "--stop", "x")
    found = [params for params, _ in submitted]
    assert [params.stop for params in found[:5]] == [(), (), ("\n\n",), (), ("\n\n", "y")]
    assert [params.stop for params in found[5:]] == [("x",), (), ("y",)]
    assert [params.top_p for params in found[:3]] == [0.5, 0.7, 0.5]
    for params in found[:3]:
        assert (params.temperature, params.top_k, params.repetition_penalty) == (0.3, 3, 1.5)
    assert found[3].repetition_penalty == 1.0
    ends = [params.stop_token_ids for params in found[1:5]]
    assert ends == [(), (ord("z"),), (ord("z"),), (ord("z"), 5)]
    printed = "temperature=0.3, top_k=9, top_p=0.5, repetition_penalty=1.5"
    assert err.startswith(f"defaults of the checkpoint: {printed}\n")


def test_refused_prompts_get_an_error_and_the_others_run(serve, checkpoint):
    refused = [
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": "x" * 64}, "a prompt of 64 tokens and max_tokens=1 are more than the 64"),
        ({"prompt": "x", "n": True}, "n=True must be an integer"),
        ('{"prompt": "x", "min_p": NaN}', "min_p=nan must be a finite number"),
        ({"prompt": "x", "logit_bias": {"x": 1}}, "logit_bias={'x': 1} must have token ids as"),
        ({"prompt": "x", "structured_outputs": {"x": 1}}, "structured_outputs={'x': 1} must have"),
        ({"prompt": "x", "structured_outputs": "x"}, "structured_outputs='x' must be"),
        ({"prompt": "x", "return_routed_experts": True}, "unknown key 'return_routed_experts'"),
        ({"prompt": "x", "best": 2}, "unknown key 'best'; there are prompt, messages, tools, "),
        ({"n": 1}, "prompt=None must be a text"),
        ({"messages": [{"role": "user", "content": "x"}]}, "there is no chat template"),
        ([1, 2], "[1, 2] must be a JSON object"),
        ('{"prompt": ', "not JSON: Expecting value"),
        ("[" * 100_000, "not JSON: "),
    ]
    objects = [{"prompt": "first"}, *(x for x, _ in refused), {"prompt": "last"}]
    status, results, err = serve(objects)
    assert status == 1
    for index, (_, reason) in enumerate(refused, 1):
        assert set(results[index]) == {"index", "error"}
        assert results[index]["error"].startswith(reason)
    for index, prompt in (0, "first"), (len(objects) - 1, "last"):
        assert len(*tokens_of(results[index])) == 64 - len(prompt)
    assert err.startswith(f"2 of {len(objects)} prompts served in ")

    status, results, err = serve(b"\xff\xfe broken\n", "--prompt", "x" * 65)
    assert status == 1 and err.startswith("0 of 2 prompts served in ")
    assert results[0]["error"].startswith("a prompt of 65 tokens and max_tokens=1 are more than")
    assert results[1]["error"] == "the prompt must be valid UTF-8"


def test_shared_prefixes_are_cached_unless_disabled(serve):
    lines, cached = ["a prompt of more than a page"] * 5, []  # one more than there are slots
    for args in ([], ["--no-enable-prefix-caching"]):
        _, results, err = serve(lines, "--max-tokens", "2", *args)
        cached.append([results[index]["num_cached_tokens"] for index in range(5)])
        assert f"prefix cache hit rate {sum(cached[-1]) / (5 * 28):.1%}" in err
    assert (cached[0][0], cached[0][4]) == (0, 16) and cached[1] == [0] * 5


def test_cache_has_the_given_dtype_and_the_scales_of_the_checkpoint(serve, copy, submitted):
    scale = np.array(0.01, np.float32)
    edit(copy, {f"model.layers.0.self_attn.{x}_scale": scale for x in "kv"})
    args = ["--num-pages", "4096", "--checkpoint", str(copy), "--kv-cache-dtype"]
    # Bytes of K and V of a token, and of scales in int8.
    for option, dtype, size in (("int8", "int8", 2 * 20), ("fp8", "float8_e4m3fn", 2 * 16)):
        _, _, err = serve(["ROMEO:"], *args, option)
        assert f"pool of 4096 pages, {4096 * 16 * size / 2**20:.2f} MiB of {dtype}" in err


@pytest.mark.slow  # programs of its own
def test_drafts_of_another_checkpoint_leave_the_tokens_as_they_are(serve, checkpoint):
    drafts = dict(method="draft_model", model=str(checkpoint), num_speculative_tokens=2)
    args = ["--max-tokens", "12", "--seed", "3"]
    _, wanted, _ = serve(["ROMEO:"], *args)
    status, results, _ = serve(["ROMEO:"], *args, "--speculative-config", json.dumps(drafts))
    assert status == 0 and tokens_of(results[0]) == tokens_of(wanted[0])


def test_preemptions_in_a_small_pool_are_reported(serve):
    prompts = [letter * 14 for letter in "wxyz"]  # and completions: 16 of the 12 pages
    status, results, err = serve(prompts, "--temperature", "0")
    assert status == 0 and "at most 100.0% in use; " in err
    assert [results[i]["num_preemptions"] > 0 for i in range(4)] == [False, False, False, True]
    assert f"{results[3]['num_preemptions']} preemptions" in err


def test_ctrl_c_keeps_the_finished_results(serve, monkeypatch):
    step = Engine.step

    def interrupted(engine):
        news = step(engine)
        if any(each.finished for each in news):
            monkeypatch.setattr(Engine, "step", interrupt)
        return news

    def interrupt(engine):
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "step", interrupted)
    status, results, err = serve([{"prompt": "long"}, {"prompt": "short", "max_tokens": 2}])
    assert status == 130 and list(results) == [1] and err == ""


MEMORY = RuntimeError("RESOURCE_EXHAUSTED: out of memory")


@pytest.mark.parametrize("cause", [MEMORY, NotImplementedError("not here"), TypeError("a bug")])
def test_prompts_get_an_error_where_the_engine_dies(serve, monkeypatch, cause):
    step = Engine.step

    def dying(engine):
        if engine.stats().num_finished:
            raise EngineDeadError("a step failed", cause)
        return step(engine)

    monkeypatch.setattr(Engine, "step", dying)
    objects = [{"prompt": "x", "max_tokens": n} for n in (2, 40, 40)]
    if isinstance(cause, TypeError):
        with pytest.raises(EngineDeadError, match="a bug"):
            serve(objects)
        return
    status, results, _ = serve(objects)
    assert status == 1 and "outputs" in results[0]
    for index in (1, 2):
        assert results[index] == {"index": index, "error": f"a step failed: {cause}"}


def test_failed_completion_has_its_error_and_status_1(serve, run, copy):
    name = "model.embed_tokens.weight"
    edit(copy, {name: np.full((256, 32), np.nan, np.float32)})
    args = ["--checkpoint", str(copy)]
    status, results, _ = serve(["x"], *args)
    assert status == 1 and results[0]["outputs"][0]["finish_reason"] == "error"
    status, _, err = run("--prompt", "x", *args)
    assert status == 1 and f"error: prompt 1: {results[0]['error']}\n" in err


def test_infinite_log_probabilities_are_null(serve, monkeypatch):
    entries = [None, {200: Logprob(logprob=-np.inf, rank=3), 65: Logprob(logprob=-0.5, rank=1)}]
    monkeypatch.setattr(Request, "prompt_logprobs", property(lambda self: entries, lambda *_: None))
    infinite = property(lambda self: -np.inf, lambda *_: None)
    monkeypatch.setattr(CompletionOutput, "cumulative_logprob", infinite)
    status, results, _ = serve([{"prompt": [65, 200], "max_tokens": 2}])
    assert status == 0 and results[0]["outputs"][0]["cumulative_logprob"] is None
    infinite, finite = {"logprob": None, "rank": 3}, {"logprob": -0.5, "rank": 1}
    assert results[0]["prompt_logprobs"] == [None, {"200": infinite, "65": finite}]
