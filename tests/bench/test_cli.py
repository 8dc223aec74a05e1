"""Arguments that the benches can't use."""

import pytest

from bench import tune
from bench.decode import __main__ as decode
from bench.parallel import programs as parallel_programs
from bench.serving import __main__ as serving
from bench.serving import long_prompt, quality, start, structured, trainer
from bench.steps import __main__ as decode_step

TINY = "--shape tiny"
BAD = [
    *((decode, args) for args in ("--shapes 9x9", "--iterations 0", "--json no/such/folder")),
    (tune, "--kernel decode --seconds 0"),
    *((quality, args) for args in ("", "--text x", f"{TINY} --window 0", f"{TINY} --json no/x")),
    *((serving, f"{TINY} {args}") for args in ("--kv-gib 0.0001", "--requests 0", "--json no/x")),
    *((serving, f"{TINY} {args}") for args in ("--transformers-requests 0", "--prefix-share 2")),
    (decode_step, "--shapes tiny --rows 0"),
    *((start, f"{TINY} {args}") for args in ("--kv-gib 0.0001", "--page-size 0")),
    (trainer, f"{TINY} --num-seqs 0"),
    (long_prompt, f"{TINY} --lengths 999999"),
    (structured, f"{TINY} --vocab-size 255"),
    *((parallel_programs, args) for args in ("--rows 0", "--length 0")),
]


@pytest.mark.parametrize(("bench", "args"), BAD, ids=lambda x: getattr(x, "__name__", x))
def test_bad_arguments_end_with_one_error(bench, args, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main(args.split())
    message = str(ended.value) if ended.value.code != 2 else capsys.readouterr().err
    assert message.count("error: ") == 1 and message[message.index("error: ") :].count("\n") < 2
