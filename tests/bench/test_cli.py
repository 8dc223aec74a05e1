"""Arguments of all benches that can't be used."""

from __future__ import annotations

import pytest

from bench import (
    decode,
    decode_step,
    long_prompt,
    offline,
    parallel_programs,
    peers_torch,
    products,
    quality,
    trainer,
    tune,
)
from bench.serving import cli as serving

_SHAPES = (["--shapes", "9x9"], ["--iterations", "0"], ["--json", "no/such/folder"])
_TUNE = ["--kernel", "decode"]
_QUALITY = ["--shape", "tiny"]
_SERVING = ["--shape", "tiny"]


@pytest.mark.parametrize(
    ("bench", "args"),
    [
        *((decode, args) for args in _SHAPES),
        *((peers_torch, args) for args in _SHAPES),
        *((tune, [*_TUNE, *args]) for args in (*_SHAPES, ["--seconds", "0"])),
        (quality, []),
        (quality, ["--text", "x"]),
        (quality, ["--shape", "none"]),
        (quality, [*_QUALITY, "--window", "0"]),
        (quality, [*_QUALITY, "--json", "no/such/folder"]),
        (serving, [*_SERVING, "--kv-gib", "0.0001"]),
        (serving, [*_SERVING, "--systems", "vllm"]),
        (serving, [*_SERVING, "--json", "no/such/folder"]),
        (serving, [*_SERVING, "--transformers-requests", "0"]),
        (decode_step, ["--shapes", "tiny", "--rows", "0"]),
        (decode_step, ["--shapes", "none"]),
        (offline, ["--shape", "tiny", "--kv-gib", "0.0001"]),
        (offline, ["--shape", "tiny", "--runs", "0"]),
        (trainer, ["--shape", "tiny", "--num-seqs", "0"]),
        (trainer, ["--json", "no/such/folder"]),
        (long_prompt, ["--shape", "tiny", "--lengths", "999999"]),
        *((parallel_programs, [f"--{name}", "0"]) for name in ("rows", "length", "shapes")),
        (products, ["--models", "none"]),
        (products, ["--rows", "0"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value.__name__,
)
def test_bad_arguments_end_with_status_2(bench, args, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main(args)
    assert ended.value.code == 2 and "error:" in capsys.readouterr().err
