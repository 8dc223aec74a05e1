"""List the benches: `python -m bench --list`."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """A bench: what it answers, and how it is run.

    Attributes:
        question: what it answers.
        module: run by `python -m module`.
        tables: the module of the function `markdown`, which turns its JSON into tables.
        options: arguments without which it does not answer the question.
    """

    question: str
    module: str
    tables: str
    options: str = ""

    @property
    def command(self) -> str:
        """The command that answers the question."""
        return f"python -m {self.module} {self.options}".strip()

    def markdown(self, run: dict[str, Any]) -> str:
        """The tables of a run."""
        return importlib.import_module(self.tables).markdown(run)


def _bench(question: str, command: str, tables: str = "") -> Bench:
    module, _, options = command.partition(" ")
    return Bench(question=question, module=module, tables=tables or module, options=options)


BENCHES = (
    _bench(
        "How long does a decode call take, and what does each option cost?",
        "bench.decode",
        "bench.decode.report",
    ),
    _bench("What does another layout of the pages cost?", "bench.decode.layouts"),
    _bench("What does reading a shared prefix once save?", "bench.decode.cascade"),
    _bench(
        "How long do prompts, chunks of prompts and a few tokens per sequence take?",
        "bench.prefill",
        "bench.prefill.__main__",
    ),
    _bench("How fast are libraries outside JAX?", "bench.peers", "bench.peers.__main__"),
    _bench("Is there a config faster than the heuristic's?", "bench.tune --kernel decode"),
    _bench(
        "How long does one decode step of a model take, and which kernels run in it?",
        "bench.steps",
        "bench.steps.__main__",
    ),
    _bench("What do ways to sample cost in a model?", "bench.steps --sampling"),
    _bench("And without a model?", "bench.steps.sampling"),
    _bench(
        "How many requests does the engine serve, and with how much memory?",
        "bench.serving",
        "bench.serving.report",
    ),
    _bench("How fast is nano-vllm's workload?", "bench.serving --trace nano"),
    _bench("How soon is the engine ready, cold and warm?", "bench.serving.start"),
    _bench("How long does a long prompt wait for its first token?", "bench.serving.long_prompt"),
    _bench("How long do new weights, scores, sleep and wake take?", "bench.serving.trainer"),
    _bench("How much quality does a model lose with 8-bit K/V?", "bench.serving.quality"),
    _bench(
        "How do attention, decode steps and serving scale over GPUs?",
        "bench.parallel",
        "bench.parallel.__main__",
    ),
    _bench("What does a decode step read and send on up to 16 GPUs?", "bench.parallel.programs"),
)


def find(module: str) -> Bench:
    """The bench that is run by `python -m module`."""
    return next(bench for bench in BENCHES if bench.module == module)


def listing() -> str:
    """A Markdown table of the questions and commands."""
    rows = (f"| {bench.question} | `{bench.command}` |" for bench in BENCHES)
    return "\n".join(["| question | command |", "|---|---|", *rows])


def main() -> None:
    """Print the question and the command of each bench."""
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("--list", action="store_true", help="print all benches; the default")
    parser.parse_args()
    for bench in BENCHES:
        print(f"{bench.command}\n    {bench.question}")


if __name__ == "__main__":
    main()
