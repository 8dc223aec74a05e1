"""Arguments that the benches can't use."""

from __future__ import annotations

import pytest

from bench import (
    decode,
    decode_step,
    long_prompt,
    offline,
    parallel_programs,
    products,
    quality,
    trainer,
    tune,
)
from bench.serving import cli as serving

BAD = {
    decode: ["--shapes 9x9", "--iterations 0", "--json no/such/folder"],
    tune: ["--kernel decode --shapes 9x9", "--kernel decode --seconds 0"],
    quality: ["", "--text x", "--shape tiny --window 0", "--shape tiny --json no/such/folder"],
    serving: [
        "--shape tiny --kv-gib 0.0001",
        "--shape tiny --transformers-requests 0",
        "--shape tiny --requests 0",
        "--shape tiny --json no/such/folder",
    ],
    decode_step: ["--shapes tiny --rows 0", "--shapes tiny --json no/such/folder"],
    offline: ["--shape tiny --kv-gib 0.0001", "--shape tiny --runs 0"],
    trainer: ["--shape tiny --num-seqs 0", "--json no/such/folder"],
    long_prompt: ["--shape tiny --lengths 999999"],
    parallel_programs: ["--rows 0", "--length 0"],
    products: ["--rows 0"],
}


@pytest.mark.parametrize(
    ("bench", "args"),
    [
        pytest.param(bench, line.split(), id=f"{bench.__name__} {line}")
        for bench, lines in BAD.items()
        for line in lines
    ],
)
def test_bad_arguments_end_with_one_error(bench, args, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main(args)
    message = str(ended.value) if ended.value.code != 2 else capsys.readouterr().err
    assert message.count("error: ") == 1 and message[message.index("error: ") :].count("\n") < 2
