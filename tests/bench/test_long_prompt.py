"""The bench of long prompts, on a tiny model."""

from __future__ import annotations

import pytest

from bench import long_prompt
from bench.serving.models import SHAPES


@pytest.mark.slow  # compiles the steps of an engine
def test_prompts_are_served_in_chunks_without_compiling(capsys):
    run = long_prompt.main(
        ["--shape", "tiny", "--lengths", "40", "--max-num-batched-tokens", "16", "--runs", "2"]
    )
    [one] = run["results"]
    assert len(one["seconds"]) == 2 and min(one["seconds"]) > 0
    assert one["num_steps"] == 3 and one["compilations"] == 0
    assert "| 40 | 3 |" in capsys.readouterr().out


def test_operations_are_those_of_the_weights_and_of_the_keys_that_a_query_sees():
    config = SHAPES["8b"].config
    one, two = (long_prompt.prompt_flops(config, length) for length in (1, 2))
    weights = 2 * 32 * (4096 * (48 * 128 + 4096) + 3 * 4096 * 14336)
    assert one == {"weights": weights, "attention": 4 * 32 * 128 * 32}
    assert two == {"weights": 2 * weights, "attention": 3 * one["attention"]}


def test_a_prompt_longer_than_the_model_is_refused(capsys):
    with pytest.raises(SystemExit):
        long_prompt.main(["--shape", "tiny", "--lengths", "999999"])
    assert "must be from 1 to" in capsys.readouterr().err
