"""`python -m models.generate --prompts-file`: prompts through the engine, a JSON line for each."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from models import cli_engine
from models.checkpoint import load_checkpoint, save_checkpoint
from models.config import KV_DTYPES
from models.decoder import Decoder
from models.engine import Engine, EngineConfig, EngineDeadError
from models.engine_worker import Worker
from models.request import SamplingParams
from tests.support.commands import CONFIG, run_command, save_tiny_model, start_command
from tests.support.marks import slow

# Few shapes to compile, and the same ones in most tests.
SIZES = ["--max-seqs", "4", "--token-budget", "32"]
PAGES = ["--num-pages", "16"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def run(checkpoint, capsys, tmp_path):
    """Runs the command on a file of lines: exit status, printed records by index, stderr."""

    def run(lines, *args, name="prompts.txt", pages=PAGES):
        file = tmp_path / name
        file.write_bytes(lines if isinstance(lines, bytes) else "\n".join(lines).encode())
        args = ["--prompts-file", str(file), *SIZES, *pages, *args]
        status, out, err = run_command(checkpoint, capsys, *args)
        records = [json.loads(line) for line in out.splitlines()]
        assert len({record["index"] for record in records}) == len(records)
        return status, {record["index"]: record for record in records}, err

    return run


@pytest.fixture
def run_objects(run):
    def run_objects(objects, *args):
        lines = [x if isinstance(x, str) else json.dumps(x) for x in objects]
        return run(lines, *args, name="prompts.jsonl")

    return run_objects


def test_each_prompt_gets_a_line_of_output(run, checkpoint, capsys):
    lines = b"\xef\xbb\xbfone\x0cstill one\r\n\n  \n\xc3\xa9t\xc3\xa9 \ntwo\n"
    greedy = ["--max-new-tokens", "9", "--temperature", "0"]
    status, results, err = run(lines, "--prompt", "zero", *greedy, pages=[])
    assert status == 0
    prompts = ["zero", "one\x0cstill one", "été ", "two"]
    assert [results[index]["prompt"] for index in range(4)] == prompts
    args = [x for prompt in prompts for x in ("--prompt", prompt)]
    generated = json.loads(run_command(checkpoint, capsys, *args, *greedy, "--json")[1])
    for index, (prompt, wanted) in enumerate(zip(prompts, generated["completions"], strict=True)):
        result = results[index]
        assert result["completions"] == [
            {"index": 0, **{key: wanted[key] for key in ("text", "tokens", "finish_reason")}}
        ]
        assert result["num_prompt_tokens"] == len(prompt.encode())
        assert result["num_cached_tokens"] == result["num_preemptions"] == 0
        assert 0 < result["ttft_s"] <= result["latency_s"]
    served, times, pool = err.splitlines()
    assert served.startswith("4 of 4 prompts served in ") and "requests/s, " in served
    assert times.startswith("time to first token p50 ") and "per token p50 " in times
    assert pool.startswith("prefix cache hit rate 0.0%; pool of ")
    assert " KiB of float32, utilization " in pool
    assert pool.endswith(f"0 preemptions; {jax.devices()[0].device_kind}")


def test_keys_of_an_object_override_the_options(run_objects):
    objects = [
        {"prompt": "ROMEO:"},
        {"prompt": "ROMEO:", "max_tokens": 2, "n": 3, "temperature": 0, "logprobs": None},
        {"prompt": "ROMEO:", "seed": 1},
        {"prompt": "ROMEO:", "max_tokens": None, "best_of": 3},
        {"prompt": "ROMEO:", "beam_width": 2, "n": 2, "length_penalty": 0.5},
    ]
    args = ["--max-new-tokens", "5", "--seed", "7", "--logprobs", "2", "--temperature", "3"]
    status, results, _ = run_objects(objects[:4], *args)
    assert status == 0
    first, greedy, other_seed, best = ([*results[i]["completions"]] for i in range(4))
    assert [len(x["tokens"]) for x in (*first, *greedy, *other_seed)] == [5, 2, 2, 2, 5]
    assert greedy[0]["tokens"] == greedy[1]["tokens"] == greedy[2]["tokens"]
    assert "logprobs" not in greedy[0] and "cumulative_logprob" not in greedy[0]
    assert first[0]["tokens"] != other_seed[0]["tokens"]
    entries = first[0]["logprobs"]
    assert sum(x["logprob"] for x in entries) == pytest.approx(first[0]["cumulative_logprob"])
    assert all(len(x["top"]) == 2 and max(x["top"].values()) >= x["logprob"] for x in entries)
    assert len(best) == 1 and len(best[0]["tokens"]) == 64 - len("ROMEO:")

    status, results, _ = run_objects(objects[4:])  # without draws
    assert status == 0
    beams = results[0]["completions"]
    assert beams[0]["tokens"] != beams[1]["tokens"]
    assert beams[0]["cumulative_logprob"] >= beams[1]["cumulative_logprob"]
    for beam in beams:
        wanted = bytes(beam["tokens"]).decode(errors="replace")
        assert beam["text"].rstrip("\ufffd") == wanted.rstrip("\ufffd") != ""


def test_a_stop_text_ends_a_completion(run_objects):
    whole = {"prompt": "ROMEO:", "temperature": 3}
    completion = run_objects([whole])[1][0]["completions"][0]
    pairs = zip(completion["text"][5:], completion["text"][6:], strict=False)
    stop = next(a + b for a, b in pairs if (a + b).isascii())
    cut, longer = run_objects([whole, whole | {"stop": []}], "--stop", stop)[1].values()
    assert longer["completions"] == [completion]
    assert cut["completions"][0]["finish_reason"] == "stopped"
    assert cut["completions"][0]["text"] == completion["text"][: completion["text"].index(stop)]


def test_refused_prompts_get_an_error_and_the_others_run(run_objects):
    refused = [
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": "x" * 64}, "a prompt of 64 tokens and max_tokens=1 are more than the 64"),
        ({"prompt": "x", "max_tokens": 64}, "a prompt of 1 tokens and max_tokens=64 are more"),
        ({"prompt": "x", "n": 5}, "5 sequences at a time are more than max_seqs=4"),
        ({"prompt": "x", "n": True}, "n=True must be an integer"),
        ({"prompt": "x", "top_k": 2**31}, "top_k=2147483648 must be an integer in 0..2147483647"),
        ({"prompt": "x", "temperature": "hot"}, "temperature='hot' must be a finite number"),
        ({"prompt": "x", "temperature": True}, "temperature=True must be a finite number"),
        ({"prompt": "x", "length_penalty": 10**400}, "length_penalty=1000"),
        ('{"prompt": "x", "min_p": NaN}', "min_p=nan must be a finite number"),
        ({"prompt": "x", "top_p": 2}, "top_p=2 must be above 0 and at most 1"),
        ({"prompt": "x", "stop": "END"}, "stop='END' must be a list"),
        ({"prompt": "x", "stop": [""]}, "stop=[''] must be texts that are not empty"),
        ({"prompt": "x", "stop_tokens": ["x"]}, "stop token='x' must be an integer"),
        ({"prompt": "x", "beam_width": 2, "temperature": 1}, "beam_width=2 excludes"),
        ({"prompt": "x", "best": 2}, "unknown key 'best'; there are prompt, max_tokens"),
        ({"prompt": "\ud800"}, "the prompt must be valid UTF-8"),
        ({"prompt": ["x"]}, "prompt=['x'] must be a text"),
        ({"n": 1}, "prompt=None must be a text"),
        ([1, 2], "[1, 2] must be a JSON object"),
        ('{"prompt": ', "not JSON: Expecting value"),
        ("[" * 100_000, "not JSON: "),
        ("9" * 5000, "not JSON: "),
    ]
    objects = [{"prompt": "first"}, *(x for x, _ in refused), {"prompt": "last"}]
    status, results, err = run_objects(objects)
    assert status == 1
    for index, (_, reason) in enumerate(refused, 1):
        assert set(results[index]) == {"index", "error"}
        assert results[index]["error"].startswith(reason)
    for index, prompt in (0, "first"), (len(objects) - 1, "last"):
        assert len(results[index]["completions"][0]["tokens"]) == 64 - len(prompt)
    assert err.startswith(f"2 of {len(objects)} prompts served in ")


def test_a_file_of_refused_prompts_only(run):
    status, results, err = run(b"\xff\xfe broken\n", "--prompt", "x" * 65)
    assert status == 1 and err.startswith("0 of 2 prompts served in ")
    assert results[0]["error"].startswith("a prompt of 65 tokens and max_tokens=1 are more than")
    assert results[1]["error"] == "the prompt must be valid UTF-8"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--json"], "--json does not go with --prompts-file"),
        (["--prefill-chunk", "8"], "--prefill-chunk does not go with --prompts-file"),
        (["--prompt", ""], "--prompt must not be empty"),
        (["--top-k", "-1"], "top_k=-1 must be an integer in 0.."),
        (["--num-samples", "0"], "n=0 must be an integer in 1.."),
        (["--num-samples", "2", "--best-of", "1"], "best_of=1 must be an integer in 2.."),
        (["--beam-width", "2", "--temperature", "1"], "beam_width=2 excludes temperature=1.0"),
        (["--logprobs", "21"], "logprobs=21 must be an integer in 0..20"),
        (["--seed", str(2**32)], "seed=4294967296 must be an integer in 0..4294967295"),
        (["--max-seqs", "0"], "max_seqs=0 must be an integer in 1.."),
        (["--token-budget", "4"], "token_budget=4 must be more than max_seqs=4"),
        (["--num-pages", "0"], "num_pages=0 must be an integer in 1.."),
        (["--page-size", "0"], "page_size=0 must be an integer in 1.."),
        (["--page-size", "5"], "page_size=5 must be a power of two"),
        (["--kv-dtype", "int4"], "argument --kv-dtype: invalid choice: 'int4'"),
        (["--kv-dtype", "fp16"], "kv_dtype='fp16' must be int8, fp8 or the dtype of the model"),
        (["--implementation", "fast"], "implementation='fast' must be"),
    ],
)
def test_a_bad_option_is_one_line_and_status_2(run, args, message):
    status, results, err = run(["x"], *args)
    assert (status, results) == (2, {})
    assert err.startswith(f"error: {message}") and err.count("\n") == 1


def test_shared_prefixes_are_cached_unless_disabled(run):
    lines = ["a prompt of more than a page"] * 5  # one more than there are rows
    _, results, err = run(lines)
    cached = [results[index]["num_cached_tokens"] for index in range(5)]
    assert cached[0] == 0 and cached[4] == 16
    assert f"prefix cache hit rate {sum(cached) / (5 * 28):.1%}" in err
    _, results, err = run(lines, "--no-prefix-cache")
    assert [results[index]["num_cached_tokens"] for index in range(5)] == [0] * 5


@pytest.mark.parametrize("kv_dtype", ["int8", *slow(["fp8"])])
def test_a_quantized_cache_gives_the_tokens_of_the_single_prompt(run, checkpoint, capsys, kv_dtype):
    args = ["--kv-dtype", kv_dtype, "--max-new-tokens", "9", "--temperature", "0"]
    status, results, err = run(["ROMEO:"], *args)
    assert status == 0
    assert f"pool of 16 pages, 10.0 KiB of {KV_DTYPES[kv_dtype]}, utilization" in err
    alone = json.loads(run_command(checkpoint, capsys, "--prompt", "ROMEO:", *args, "--json")[1])
    assert results[0]["completions"][0]["tokens"] == alone["completions"][0]["tokens"]


def test_a_small_pool_preempts_and_refuses_prompts_beyond_its_size(run):
    args = ["--num-pages", "3"]
    prompts = ["x" * 14, "y" * 14, "z" * 48]
    status, results, err = run(prompts, *args)
    assert status == 1 and "pool of 3 pages" in err
    assert results[2]["error"].startswith("a prompt of 48 tokens and max_tokens=1 are more than")
    # By default a completion is as long as the pool allows.
    assert len(results[0]["completions"][0]["tokens"]) == 3 * 16 - 14
    assert results[1]["num_preemptions"] == 1
    _, alone, _ = run(prompts[1:2], *args)
    assert results[1]["completions"] == alone[0]["completions"]


def test_ctrl_c_keeps_the_finished_results(run, monkeypatch):
    step = Engine.step

    def interrupted(engine):
        news = step(engine)
        if any(x.request.finished for x in news):
            monkeypatch.setattr(Engine, "step", interrupt)
        return news

    def interrupt(engine):
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "step", interrupted)
    objects = [{"prompt": "long"}, {"prompt": "short", "max_tokens": 2}]
    lines = [json.dumps(x) for x in objects]
    status, results, err = run(lines, name="prompts.jsonl")
    assert status == 130 and list(results) == [1] and err == ""


@pytest.mark.parametrize("error", ["RESOURCE_EXHAUSTED: out of memory", "a bug"])
def test_a_failed_step_is_one_line_only_if_memory_ran_out(run, monkeypatch, error):
    def read(worker, flight):
        raise RuntimeError(error)

    monkeypatch.setattr(Worker, "read", read)
    if error == "a bug":
        with pytest.raises(EngineDeadError, match="a step failed: a bug"):
            run(["x"])
        return
    assert run(["x"]) == (2, {}, f"error: a step failed: {error}\n")


def test_nan_logits_are_a_failure(run, tmp_path, checkpoint):
    model = Decoder(CONFIG, rngs=nnx.Rngs(0))
    model.embed_tokens.weight[...] *= jnp.nan
    save_checkpoint(tmp_path, model, CONFIG)
    (tmp_path / "tokenizer.json").write_bytes((checkpoint / "tokenizer.json").read_bytes())
    status, results, _ = run(["x"], "--checkpoint", str(tmp_path))
    assert status == 1
    assert results[0]["completions"][0]["finish_reason"] == "bad_logits"


def test_a_terminal_shows_a_progress_bar(run, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    status, results, err = run(["a", "b", "x" * 65])
    assert status == 1 and len(results) == 3
    assert "3/3" in err and "prompt/s" in err


def test_a_closed_pipe_ends_the_command_without_an_error_message(checkpoint, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("one\ntwo\n")
    process = start_command(checkpoint, "--prompts-file", str(file), *SIZES)
    process.stdout.close()
    _, err = process.communicate(timeout=120)
    assert process.returncode == 141
    assert err.decode().splitlines() == ["pallas_paged: implementation='xla' on cpu"]


@pytest.mark.parametrize(
    ("memory", "kv_dtype", "num_pages"),
    [
        (None, None, 4 * 4),  # max_seqs rows of 64 tokens
        ({"bytes_limit": 900_000, "bytes_in_use": 100_000}, None, 640_000 // (16 * 64)),
        ({"bytes_limit": 900_000, "bytes_in_use": 100_000}, "bf16", 640_000 // (16 * 64)),
        ({"bytes_limit": 900_000, "bytes_in_use": 100_000}, "int8", 640_000 // (16 * 40)),
        ({"bytes_limit": 900_000, "bytes_in_use": 100_000}, "fp8", 640_000 // (16 * 40)),
        (
            {"bytes_limit": 2**30, "bytes_in_use": 0},
            None,
            1000 * 2 * 3 + 4,
        ),  # all they need
        ({"bytes_limit": 1000, "bytes_in_use": 1000}, None, 1),
    ],
)
def test_the_pool_fills_the_free_memory(checkpoint, monkeypatch, memory, kv_dtype, num_pages):
    model, _ = load_checkpoint(checkpoint, dtype="bfloat16")
    device = SimpleNamespace(memory_stats=lambda: memory)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    params = SamplingParams(n=2, max_tokens=40)
    job = cli_engine._Job(index=0, prompt="x", tokens=[0], params=params)
    too_long = cli_engine._Job(index=1, prompt="x", tokens=[0], params=SamplingParams())
    config = EngineConfig(num_pages=1, max_seqs=4, token_budget=32, max_len=64, kv_dtype=kv_dtype)
    assert cli_engine._num_pages([job] * 1000 + [too_long], config, model) == num_pages


def test_a_pool_on_the_host_is_bounded(checkpoint, monkeypatch):
    model, _ = load_checkpoint(checkpoint, dtype="bfloat16")
    monkeypatch.setattr(cli_engine, "HOST_POOL_BYTES", 10 * 1024)
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(memory_stats=lambda: None)])
    job = cli_engine._Job(index=0, prompt="x", tokens=[0], params=SamplingParams(max_tokens=60))
    config = EngineConfig(num_pages=1, max_seqs=4, token_budget=32, max_len=64)
    assert cli_engine._num_pages([job] * 9, config, model) == 10
