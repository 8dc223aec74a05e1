"""The command `python -m models.generate`: texts on stdout, its options, and how it ends."""

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from models.command import batch, main, setup
from tests.support.commands import ROOT, start_command


def test_ctrl_c_during_imports_ends_the_process_with_status_130():
    process = start_command("--prompt", "ROMEO:")
    process.stderr.readline()
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == ("", "") and process.returncode == 130


@pytest.mark.smoke
def test_one_completion_is_streamed_and_summed_up(run, monkeypatch, capsys):
    written, write = [], sys.stdout.write
    monkeypatch.setattr(sys.stdout, "write", lambda text: written.append(text) or write(text))
    status, out, err = run("--prompt", "ROMEO:", "--max-tokens", "40")
    assert status == 0 and out == "".join(written)
    assert out.startswith("ROMEO:") and out.endswith("\n") and len(out) > 10
    assert written[0] == "ROMEO:" and len([text for text in written if text]) > 3
    served, times, pool = err.splitlines()
    assert served.startswith("1 of 1 prompts served in ") and "; seed " in served
    assert times.startswith("time to first token p50 ") and "per token p50 " in times
    assert "pool of 12 pages, 0.02 MiB of float32, at most 25.0% in use; 0 preemptions" in pool
    assert pool.endswith(f"; 1 x {jax.devices()[0].device_kind}")


def test_streamed_text_equals_that_of_json_and_ends_before_a_stop_text(run):
    args = ["--prompt", "ROMEO:", "--max-tokens", "30", "--seed", "3", "--temperature", "3"]
    record = json.loads(run(*args, "--json")[1])
    assert record["seed"] == 3
    text = record["outputs"][0]["text"]
    assert run(*args)[1] == f"ROMEO:{text}\n"
    stop = next(a + b for a, b in itertools.pairwise(text[5:]) if (a + b).isascii())
    before = text[: text.index(stop)]
    assert run(*args, "--stop", stop)[1] == f"ROMEO:{before}\n"
    (output,) = json.loads(run(*args, "--stop", stop, "--json")[1])["outputs"]
    found = (output["text"], output["finish_reason"], output["stop_reason"])
    assert found == (before, "stop", stop)


def test_several_completions_are_printed_with_titles_beside_refusals_and_progress(run, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    prompts = ["x" * 64, "\udcff", "ROMEO:", "x"]
    args = [word for prompt in prompts for word in ("--prompt", prompt)]
    status, out, err = run(*args, "--n", "2", "--max-tokens", "9")
    assert status == 1 and out.count("\n\n=== ") == 3 and out.endswith("\n\n")
    for number, completion in itertools.product((3, 4), (1, 2)):
        title = f"=== prompt {number} of 4, completion {completion} of 2 (length)\n"
        assert title + prompts[number - 1] in out
    assert "error: prompt 1: a prompt of 64 tokens and max_tokens=9 are more than the 64" in err
    assert "error: prompt 2: the prompt must be valid UTF-8\n" in err
    assert "4/4" in err and "prompt/s" in err and "2 of 4 prompts served in " in err


def test_closed_pipe_ends_the_command_without_an_error_message(run, monkeypatch, capsys):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        status, _, err = run("--prompt", "ROMEO:", "--max-tokens", "40")
        assert (status, err) == (141, "")
        print("more", flush=True)  # goes nowhere


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("", "no prompt: give --prompt TEXT, --prompts-file FILE or --chat"),
        ("--prompts-file /nowhere", "/nowhere: No such file or directory"),
        ("--prompts-file /dev/null", "/dev/null has no prompt: every line is blank"),
        ("--prompt x --checkpoint /nowhere", "/nowhere: no such checkpoint folder"),
        ("--prompt x --system y", "--system needs --chat"),
        ("--prompt x --chat-template /nowhere", "/nowhere: No such file or directory"),
        ("--prompt x --n 0", "n=0 must be an integer in 1..16384"),
        ("--prompt x --temperature hot", "argument --temperature: invalid float value"),
        ("--prompt x --stop=", "stop=[''] must be a text or texts that are not empty"),
        ("--prompt x --num-pages 0", "num_pages=0 must be an integer in 1.."),
        ("--prompt x --kv-cache-dtype int4", "argument --kv-cache-dtype: invalid"),
        ("--prompt x --speculative-config [1]", "--speculative-config: '[1]' must be a JSON"),
        ('--prompt x --speculative-config {"methods":1}', "no 'methods'; did you mean 'method'?"),
        *(
            (
                f'--prompt x --speculative-config {{"method":"{method}","model":"/nowhere"}}',
                "/nowhere: no such checkpoint folder",
            )
            for method in ("draft_model", "eagle")
        ),
        ("--prompt x --implementation fast", "implementation='fast' must be"),
        ("--prompt x --nonsense", "unrecognized arguments: --nonsense"),
        *(
            (f"--chat --{option}", f"--{option.split()[0]} is not possible with --chat")
            for option in ("prompt x", "prompts-file x", "json", "n 2", "best-of 2", "beam-width 2")
        ),
        *((f"--chat --logprobs {n}", "--logprobs is not possible with --chat") for n in (2, 0)),
        ("--chat", " has no chat template, --chat needs one: give --chat-template FILE"),
        ("--chat --temperature -1", "temperature=-1.0 must be at least 0"),
        ("--chat --chat-template-kwargs x", "argument --chat-template-kwargs: 'x' must be a JSON"),
        ("--chat --chat-template /nowhere", "/nowhere: No such file or directory"),
        ("--chat --checkpoint /nowhere", "/nowhere: no such checkpoint folder"),
    ],
)
def test_bad_options_are_one_line_and_status_2(run, args, message):
    status, out, err = run(*args.split())
    assert (status, out) == (2, "")
    assert err.startswith("error: ") and message in err and err.count("\n") == 1


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_broken_checkpoint_is_one_line(run, copy, name):
    (copy / name).write_text("[" * 100_000)
    status, out, err = run("--prompt", "x", "--checkpoint", str(copy))
    assert (status, out, err.count("\n"), err.count(name)) == (2, "", 1, 1)
    assert err.startswith("error: ")


def test_bad_options_end_the_process_with_status_2_before_jax_is_imported():
    command = [sys.executable, "-X", "importtime", "-m", "models.generate", "--n", "x"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "error: argument --n: invalid int value" in done.stderr
    modules = done.stderr.split()
    assert "argparse" in modules and "jax" not in modules


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_closed_streams_are_noticed_before_the_work(closed, monkeypatch, capsys):
    monkeypatch.setattr(sys, closed, None)
    assert main.main(["--prompt", "x", "--checkpoint", "/nowhere"]) == 2
    message = "error: the standard output is closed\n" if closed == "stdout" else ""
    assert capsys.readouterr() == ("", message)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_full_disk_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(batch, "serve", lambda *_: print("x", flush=True))
    with open("/dev/full", "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert main.main(["--prompt", "x"]) == 2
    message = "error: standard output: No space left on device\n"
    assert capsys.readouterr().err == f"importing JAX ...\n{message}"


def test_interrupts_and_lack_of_memory_have_a_status_and_other_errors_are_raised(
    monkeypatch, capsys
):
    def serve(*_):
        raise error

    monkeypatch.setattr(batch, "serve", serve)
    memory = RuntimeError("RESOURCE_EXHAUSTED: 1")
    for error, status in ((KeyboardInterrupt(), 130), (memory, 2)):  # noqa: B007
        assert main.main(["--prompt", "x"]) == status
        message = "error: RESOURCE_EXHAUSTED: 1\n" if status == 2 else ""
        assert capsys.readouterr().err == f"importing JAX ...\n{message}"
    error = RuntimeError("a bug")
    with pytest.raises(RuntimeError, match="a bug"):
        main.main(["--prompt", "x"])


@pytest.mark.parametrize(
    ("option", "set_before", "expected"),
    [
        (None, None, {"jax_compilation_cache_dir": "cache/pallas_paged"}),
        (None, "elsewhere", {}),
        ("here", "elsewhere", {"jax_compilation_cache_dir": "here"}),
        ("off", "elsewhere", {"jax_enable_compilation_cache": False}),
    ],
)
def test_programs_are_kept_in_the_users_folder(monkeypatch, tmp_path, option, set_before, expected):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    updates = {}
    config = SimpleNamespace(jax_compilation_cache_dir=set_before, update=updates.__setitem__)
    monkeypatch.setattr(setup.jax, "config", config)
    setup.use_compilation_cache(option)
    if folder := expected.get("jax_compilation_cache_dir"):
        assert (tmp_path / folder).is_dir()
        expected |= {"jax_persistent_cache_min_compile_time_secs": 0}
        expected |= {"jax_remove_custom_partitioning_ptr_from_cache_key": True}
    assert updates == expected

    # A folder that can't be made is an error only if it was given.
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", "file")
    monkeypatch.setattr(config, "jax_compilation_cache_dir", None)
    setup.use_compilation_cache(None)
    assert updates == expected
    with pytest.raises(OSError, match="Not a directory"):
        setup.use_compilation_cache("file/folder")
