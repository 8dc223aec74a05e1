"""The command `python -m models.generate`: texts on stdout, its options, and how it ends."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from models import cli, cli_serve
from tests.support.commands import ROOT, run_command, save_tiny_model, start_command


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def run(checkpoint, capsys):
    return lambda *args: run_command(checkpoint, capsys, *args)


def test_one_completion_is_streamed_and_summed_up(checkpoint):
    process = start_command("--prompt", "ROMEO:", "--max-tokens", "20", checkpoint=checkpoint)
    start = time.perf_counter()
    assert process.stderr.readline() == "importing JAX ...\n"
    assert time.perf_counter() - start < 5  # within a second where the machine is idle
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert out.startswith("ROMEO:") and out.endswith("\n") and len(out) > 10
    loading, compiling, chosen, served, times, pool = err.splitlines()
    assert loading == f"loading {checkpoint} ..." and compiling.startswith("compiling ")
    assert chosen == "pallas_paged: implementation='xla' on cpu"
    assert served.startswith("1 of 1 prompts served in ") and "; seed " in served
    assert times.startswith("time to first token p50 ") and "per token p50 " in times
    assert "MiB of float32, at most 100.0% in use" in pool


def test_streamed_text_equals_the_text_of_the_json(run):
    args = ["--prompt", "ROMEO:", "--max-tokens", "30", "--seed", "3", "--temperature", "3"]
    record = json.loads(run(*args, "--json")[1])
    assert record["seed"] == 3
    text = record["outputs"][0]["text"]
    assert run(*args)[1] == f"ROMEO:{text}\n"
    pairs = itertools.pairwise(text[5:])
    stop = next(a + b for a, b in pairs if (a + b).isascii())
    assert run(*args, "--stop", stop)[1] == f"ROMEO:{text[: text.index(stop)]}\n"


def test_several_completions_are_printed_with_titles_when_their_prompt_is_done(run):
    status, out, err = run("--prompt", "ROMEO:", "--prompt", "x", "--n", "2", "--max-tokens", "9")
    assert status == 0 and err.startswith("2 of 2 prompts served in ")
    for number, prompt in ((1, "ROMEO:"), (2, "x")):
        for completion in (1, 2):
            title = f"=== prompt {number} of 2, completion {completion} of 2 (length)\n{prompt}"
            assert title in out


def test_a_refused_prompt_is_reported_beside_the_texts_of_the_others(run):
    prompts = ["--prompt", "x" * 64, "--prompt", "\udcff", "--prompt", "short"]
    status, out, err = run(*prompts, "--max-tokens", "5")
    assert status == 1 and "=== prompt 3 of 3, completion 1 of 1 (length)\nshort" in out
    not_text, too_long, summary = err.splitlines()[:3]
    assert too_long.startswith("error: prompt 1: a prompt of 64 tokens and max_tokens=5 are more")
    assert not_text == "error: prompt 2: the prompt must be valid UTF-8"
    assert summary.startswith("1 of 3 prompts served in ")


def test_a_pool_too_small_for_the_prompt_is_an_error_that_names_the_size(run):
    status, out, err = run("--prompt", "x" * 17, "--num-pages", "1")
    assert (status, out) == (1, "")
    assert err.startswith(
        "error: prompt 1: a prompt of 17 tokens and max_tokens=1 are more than the 16 tokens of"
        " a sequence (max_model_len=16, num_pages=1)\n"
    )


def test_progress_does_not_mix_with_texts_on_a_terminal(run, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    status, out, err = run("--prompt", "a", "--prompt", "b", "--max-tokens", "3")
    assert status == 0 and out.count("\n=== ") + out.startswith("=== ") == 2
    assert "2/2" in err and "prompt/s" in err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "no prompt: give --prompt TEXT, --prompts-file FILE or --chat"),
        (["--prompts-file", "/nowhere"], "/nowhere: No such file or directory"),
        (["--prompts-file", os.devnull], "/dev/null has no prompt: every line is blank"),
        (["--prompt", "x", "--checkpoint", "/nowhere"], "/nowhere: no such checkpoint folder"),
        (["--prompt", "x", "--n", "0"], "n=0 must be an integer in 1..16384"),
        (["--prompt", "x", "--n", "99999999999"], "n=99999999999 must be an integer in 1..16384"),
        (["--prompt", "x", "--n", "2", "--best-of", "1"], "best_of=1 must be an integer in 2.."),
        (["--prompt", "x", "--temperature", "1e39"], "temperature=1e+39 must be a finite number"),
        (["--prompt", "x", "--temperature", "hot"], "argument --temperature: invalid float value"),
        (["--prompt", "x", "--top-k", "-2"], "top_k=-2 must be an integer in -1.."),
        (["--prompt", "x", "--seed", "-1"], "seed=-1 must be an integer in 0.."),
        (["--prompt", "x", "--stop", ""], "stop=[''] must be a text or texts that are not empty"),
        (["--prompt", "x", "--num-pages", "0"], "num_pages=0 must be an integer in 1.."),
        (["--prompt", "x", "--page-size", "5"], "page_size=5 must be a power of two"),
        (
            ["--prompt", "x", "--max-num-seqs", "9", "--max-num-batched-tokens", "9"],
            "max_num_batched_tokens=9 must be more than max_num_seqs=9",
        ),
        (["--prompt", "x", "--kv-cache-dtype", "int4"], "argument --kv-cache-dtype: invalid"),
        (["--prompt", "x", "--implementation", "fast"], "implementation='fast' must be"),
        (["--prompt", "x", "--nonsense"], "unrecognized arguments: --nonsense"),
    ],
)
def test_bad_options_are_one_line_and_status_2(run, args, message):
    status, out, err = run(*args)
    assert (status, out) == (2, "")
    assert err.startswith(f"error: {message}") and err.count("\n") == 1


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_broken_checkpoint_is_one_line(run, checkpoint, tmp_path, name):
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / name).write_text("[" * 100_000)
    status, out, err = run("--prompt", "x", "--checkpoint", str(tmp_path))
    assert (status, out, err.count("\n"), err.count(name)) == (2, "", 1, 1)
    assert err.startswith("error: ")


def test_parsing_of_options_does_not_import_jax():
    code = "import sys; from models import cli; cli._parser(); print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


def test_a_closed_pipe_ends_the_command_without_an_error_message(checkpoint):
    process = start_command("--prompt", "ROMEO:", checkpoint=checkpoint)
    process.stdout.close()
    _, err = process.communicate(timeout=120)
    assert process.returncode == 141
    assert err.splitlines()[-1] == "pallas_paged: implementation='xla' on cpu"


def test_ctrl_c_during_imports_ends_the_process_with_status_130():
    process = start_command("--prompt", "ROMEO:")
    process.stderr.readline()
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == ("", "") and process.returncode == 130


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_closed_streams_are_noticed_before_the_work(closed, monkeypatch, capsys):
    monkeypatch.setattr(sys, closed, None)
    assert cli.main(["--prompt", "x", "--checkpoint", "/nowhere"]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == (
        "",
        "error: the standard output is closed\n" if closed == "stdout" else "",
    )


def test_a_full_disk_is_one_line():
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full")
    code = "from models import cli; cli._read_lines = lambda args: print('x', flush=True);"
    code += "raise SystemExit(cli.main([]))"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True
        )
    message = "error: standard output: No space left on device\n"
    assert (done.returncode, done.stderr) == (2, message)


@pytest.mark.parametrize(
    ("option", "set_before", "expected"),
    [
        (None, None, "cache/pallas_paged"),
        (None, "elsewhere", None),
        ("here", "elsewhere", "here"),
    ],
)
def test_compiled_programs_are_kept_in_the_folder_of_the_user(
    monkeypatch, tmp_path, option, set_before, expected
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    updates = {}
    config = SimpleNamespace(jax_compilation_cache_dir=set_before, update=updates.__setitem__)
    monkeypatch.setattr(cli_serve.jax, "config", config)
    cli_serve.use_compilation_cache(option)
    assert updates.get("jax_compilation_cache_dir") == expected
    if expected is not None:
        assert (tmp_path / expected).is_dir()
        assert updates["jax_persistent_cache_min_compile_time_secs"] == 0
    updates.clear()
    cli_serve.use_compilation_cache("off")
    assert updates == {"jax_enable_compilation_cache": False}


def test_a_cache_folder_that_cannot_be_made_is_an_error_only_if_it_was_given(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    config = SimpleNamespace(jax_compilation_cache_dir=None, update=None)
    monkeypatch.setattr(cli_serve.jax, "config", config)
    cli_serve.use_compilation_cache(None)
    with pytest.raises(OSError, match="Not a directory"):
        cli_serve.use_compilation_cache(str(tmp_path / "file" / "folder"))


def test_the_summary_names_the_devices(run):
    err = run("--prompt", "x", "--max-tokens", "1")[2]
    assert err.endswith(f"; 1 x {jax.devices()[0].device_kind}\n")
