"""`python -m models.generate`: what it prints, and one line and exit status 2 for bad input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from models.checkpoint import save_checkpoint
from models.config import KV_DTYPES
from models.decoder import Decoder
from models.text_stream import TextStream
from models.tokenizer import Tokenizer
from tests.support.commands import CONFIG, ROOT, run_command, save_tiny_model, start_command


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def run(checkpoint, capsys):
    return lambda *args: run_command(checkpoint, capsys, *args)


@pytest.fixture
def start(checkpoint):
    return lambda *args: start_command(checkpoint, *args)


def test_one_sample_is_streamed_and_summed_up(start):
    process = start("--prompt", "ROMEO:", "--max-new-tokens", "20")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert out.startswith(b"ROMEO:") and out.endswith(b"\n")
    assert len(out.decode()) > 10
    chosen, summary = err.decode().splitlines()
    assert chosen == "pallas_paged: implementation='xla' on cpu"
    assert summary.startswith("20 new tokens (max_tokens), ")
    used = "KV pages used 2/2, pool utilization 78.1%, size 4.0 KiB of float32"
    for part in ("tokens/s", used, "cpu"):
        assert part in summary


def test_json_is_one_object_with_everything(run):
    args = ["--prompt", "ROMEO:", "--prompt", "BENVOLIO:", "--prompt", "TYBALT:"]
    args += ["--num-samples", "2"]
    status, out, err = run(*args, "--max-new-tokens", "9", "--json", "--seed", "3")
    assert status == 0 and err == ""
    result = json.loads(out)
    assert result["prompts"] == ["ROMEO:", "BENVOLIO:", "TYBALT:"]
    completions = result["completions"]
    assert [(c["prompt"], c["sample"]) for c in completions] == [
        (prompt, sample) for prompt in range(3) for sample in range(2)
    ]
    for completion in completions:
        assert len(completion["tokens"]) == 9 and completion["finish_reason"] == "max_tokens"
        wanted = bytes(completion["tokens"]).decode(errors="replace")
        assert completion["text"].rstrip("\ufffd") == wanted.rstrip("\ufffd")
    assert result["stats"]["decode_tokens"] == 6 * 8
    assert result["stats"]["decode_tokens_per_second"] > 0
    assert result["seed"] == 3 and result["implementation"] == "xla"
    assert result["device"] == jax.devices()[0].device_kind
    assert run(*args, "--max-new-tokens", "9", "--json", "--seed", "3")[1] != out  # times differ
    more = ["--max-new-tokens", "9", "--json", "--seed", "3", "--prefill-chunk", "7"]
    assert json.loads(run(*args, *more)[1])["completions"] == completions


def test_several_samples_are_printed_when_done(run):
    status, out, err = run("--prompt", "ROMEO:", "--num-samples", "2", "--max-new-tokens", "9")
    assert status == 0
    assert "=== prompt 1 of 1, sample 1 of 2 (max_tokens)\nROMEO:" in out
    assert "=== prompt 1 of 1, sample 2 of 2 (max_tokens)\nROMEO:" in out
    assert err.startswith("18 new tokens (max_tokens), ")


def test_a_text_cut_short_by_the_pool_is_reported(run):
    status, out, err = run("--prompt", "ROMEO:", "--num-pages", "1", "--max-new-tokens", "20")
    assert status == 0 and out.startswith("ROMEO:")
    assert err.startswith("11 new tokens (out_of_pages), ")  # the last token needs no slot


def test_stop_text_cuts_the_text_and_ends_the_sample(run):
    args = ["--prompt", "ROMEO:", "--max-new-tokens", "40", "--json", "--temperature", "3"]
    whole = json.loads(run(*args)[1])["completions"][0]
    stop = next(
        a + b
        for a, b in zip(whole["text"][5:], whole["text"][6:], strict=False)
        if (a + b).isascii()
    )
    cut = json.loads(run(*args, "--stop", stop, "--stop", "never to be seen")[1])["completions"][0]
    assert cut["text"] == whole["text"][: whole["text"].index(stop)]
    assert cut["finish_reason"] == "stopped"
    assert cut["tokens"] == whole["tokens"][: len(cut["tokens"])]
    assert bytes(cut["tokens"]).endswith(stop.encode())
    streamed = run(*args[:4], *args[5:], "--stop", stop)[1]
    assert streamed == "ROMEO:" + cut["text"] + "\n"


def test_the_text_stream_holds_back_the_beginning_of_a_stop(checkpoint):
    stream = TextStream(Tokenizer(checkpoint), b"say: ", ["END", "\n\n"])
    assert stream.push(b"hello E") == "hello "
    assert stream.push(b"N") == ""
    assert stream.push(b"JOY \n") == "ENJOY "
    assert stream.push("é".encode()[:1]) == ""
    assert stream.push("é".encode()[1:]) == "\né"
    assert stream.push(b"xEND of it") == "x"
    assert stream.stopped and stream.finish() == ""
    assert stream.text == "hello ENJOY \néx"
    assert bytes(stream.tokens).endswith(b"xEND")

    marked = TextStream(Tokenizer(checkpoint), "what\ufffd".encode(), [])
    assert marked.push(b"? ") == "? " and marked.finish() == ""

    unfinished = TextStream(Tokenizer(checkpoint), b"", ["END"])
    assert unfinished.push(b"an E") == "an "
    assert unfinished.finish() == "E" and unfinished.text == "an E"


TOKEN_BYTES = {"fp32": 2 * 16 * 4, "int8": 2 * (16 + 4), "fp8": 2 * (16 + 4)}


@pytest.mark.parametrize("kv_dtype", TOKEN_BYTES)
def test_the_cache_has_the_given_dtype(run, kv_dtype):
    args = ["--prompt", "ROMEO:", "--max-new-tokens", "3", "--json", "--temperature", "0"]
    status, out, _ = run(*args, "--kv-dtype", kv_dtype)
    assert status == 0
    stats = json.loads(out)["stats"]
    assert stats["kv_dtype"] == jnp.dtype(KV_DTYPES[kv_dtype]).name
    assert stats["pool_bytes"] == stats["num_pages"] * 16 * TOKEN_BYTES[kv_dtype]


def test_the_scales_of_a_checkpoint_are_used_in_an_fp8_cache_only(run, tmp_path, checkpoint):
    config = replace(CONFIG, k_scales=(0.01,), v_scales=(0.01,))
    save_checkpoint(tmp_path, Decoder(config, rngs=nnx.Rngs(0)), config)
    (tmp_path / "tokenizer.json").write_bytes((checkpoint / "tokenizer.json").read_bytes())
    args = ["--prompt", "ROMEO:", "--max-new-tokens", "3", "--json", "--checkpoint", str(tmp_path)]
    sizes = {}
    for kv_dtype in ("int8", "fp8"):
        status, out, err = run(*args, "--kv-dtype", kv_dtype)
        assert status == 0, err
        sizes[kv_dtype] = json.loads(out)["stats"]["pool_bytes"]
    # One page: without scales of tokens, but with two numbers of the layer.
    assert sizes == {"int8": 16 * 2 * (16 + 4), "fp8": 16 * 2 * 16 + 2 * 4}


def test_default_length_fills_the_model_positions(run):
    _, out, _ = run("--prompt", "ROMEO:", "--json")
    assert len(json.loads(out)["completions"][0]["tokens"]) == 64 - 6


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "no prompt: give --prompt TEXT or --prompts-file FILE"),
        (["--prompt", ""], "--prompt must not be empty"),
        (["--prompts-file", "/nowhere"], "/nowhere: No such file or directory"),
        (["--prompts-file", os.devnull], "/dev/null has no prompt: every line is blank"),
        (["--prompt", "x" * 60, "--max-new-tokens", "5"], "prompt 0 of 60 tokens and"),
        (["--prompt", "x" * 64], "prompt 0 of 64 tokens and"),
        (["--prompt", "x", "--max-new-tokens", "0"], "max_new_tokens=0 must be at least 1"),
        (["--prompt", "x", "--num-samples", "0"], "num_samples=0 must be at least 1"),
        (["--prompt", "x", "--checkpoint", "/nowhere"], "/nowhere: no such checkpoint folder"),
        (
            ["--prompt", "x", "--implementation", "fast"],
            "implementation='fast' must be",
        ),
        (["--prompt", "x", "--kv-dtype", "int4"], "argument --kv-dtype: invalid choice: 'int4'"),
        (["--prompt", "x", "--kv-dtype", "bf16"], "kv_dtype='bf16' must be int8, fp8 or the dtype"),
        (["--prompt", "x", "--temperature", "-1"], "temperature=-1.0 must be finite"),
        (["--prompt", "x", "--temperature", "hot"], "argument --temperature: invalid float value"),
        (["--prompt", "x", "--top-k", "-2"], "top_k=-2 must not be negative"),
        (["--prompt", "x", "--top-k", str(2**31)], "top_k=2147483648 must be integers of 32 bits"),
        (["--prompt", "x", "--prefill-chunk", "0"], "prefill_chunk=0 must be at least 1"),
        (["--prompt", "x", "--top-p", "0"], "top_p=0.0 must be above 0"),
        (["--prompt", "x", "--min-p", "1"], "min_p=1.0 must be at least 0 and below 1"),
        (["--prompt", "x", "--seed", "-1"], "seed=-1 must be in 0.."),
        (["--prompt", "x", "--page-size", "5"], "page_size=5 must be a power of two"),
        (["--prompt", "x", "--num-pages", "0"], "num_pages=0 must be at least 1"),
        (["--prompt", "x", "--stop", ""], "--stop must not be empty"),
        (["--prompt", "x", "--max-seqs", "2"], "--max-seqs needs --prompts-file"),
        (["--prompt", "x", "--no-prefix-cache"], "--no-prefix-cache needs --prompts-file"),
        (["--prompt", "x", "--nonsense"], "unrecognized arguments: --nonsense"),
    ],
)
def test_bad_input_is_one_line_and_status_2(run, args, message):
    status, out, err = run(*args)
    assert (status, out) == (2, "")
    assert err.startswith(f"error: {message}") and err.count("\n") == 1


def test_a_broken_checkpoint_is_one_line(run, checkpoint, tmp_path):
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((checkpoint / name).read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"not a safetensors file")
    status, out, err = run("--prompt", "x", "--checkpoint", str(tmp_path))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ") and "model.safetensors" in err


@pytest.mark.parametrize(
    "changes",
    [
        {"rms_norm_eps": "x"},
        {"rope_theta": 0},
        {"eos_token_id": 2**40},
        {"rope_scaling": {"rope_type": "llama3", "factor": None}},
    ],
)
def test_a_broken_config_is_one_line(run, tmp_path, checkpoint, changes):
    config = json.loads((checkpoint / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    status, out, err = run("--prompt", "x", "--checkpoint", str(tmp_path))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ") and "config.json: " in err


def test_a_process_ends_with_status_2_and_no_traceback(start):
    process = start("--prompt", "x", "--num-samples", "0")
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (2, b"")
    assert err == b"error: num_samples=0 must be at least 1\n"


def test_help_does_not_import_jax():
    code = "import sys; from models import cli; cli._parser(); print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


def test_a_closed_pipe_ends_the_command_without_an_error_message(start):
    process = start("--prompt", "ROMEO:")
    process.stdout.close()
    _, err = process.communicate(timeout=120)
    assert process.returncode == 141
    assert err.decode().splitlines() == ["pallas_paged: implementation='xla' on cpu"]


def test_ctrl_c_ends_quietly(run, monkeypatch):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("models.generate.generate", interrupted)
    assert run("--prompt", "ROMEO:") == (130, "", "")


def test_an_interrupted_process_runs_no_exit_handlers():
    """An exit handler of JAX would crash while another thread compiles."""
    code = """
import atexit
from models import cli
atexit.register(print, "torn down")
print("done", end="")
cli.main = lambda: {status}
cli.run()
"""
    for status, out in ((130, "done"), (2, "donetorn down\n")):
        command = [sys.executable, "-c", code.format(status=status)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (status, out, "")


def test_a_prompt_of_invalid_utf8_is_one_line(run):
    message = "error: --prompt must be valid UTF-8\n"
    assert run("--prompt", "\udcff\udcfe") == (2, "", message)
