"""List the benches: `python -m bench`."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
from typing import Any

# What a bench answers | the arguments of `python -m` | the module of its tables, if another one
_TABLE = """
How long does a decode call take, and what does each option cost? | bench.decode | .report
What does another layout of the pages cost? | bench.decode.layouts
What does reading a shared prefix once save? | bench.decode.cascade
How long does multi-head latent attention take? | bench.decode.mla
How fast is latent attention in FlashInfer? | bench.peers.mla
How long do routed experts take? | bench.experts
How long do the layers between two attentions take? | bench.between_attentions
How long do prompts, chunks and a few tokens per sequence take? | bench.prefill | .__main__
How long do prompts of latent attention take, in both of its forms? | bench.prefill.mla
How fast are libraries outside JAX? | bench.peers | .__main__
Is there a config faster than the heuristic's on this device? | bench.tune --kernel decode
How long does a decode step of a model take, and its kernels? | bench.steps | .__main__
What does each way to sample add to a decode step? | bench.steps --sampling
How long does each way to sample take alone? | bench.steps.sampling
How many requests does the engine serve, with how much memory? | bench.serving | .report
How fast is the engine on nano-vllm's workload? | bench.serving --trace nano
How soon is the engine ready, cold and warm? | bench.serving.start
How long does a long prompt wait for its first token? | bench.serving.long_prompt
What do drafts cost, and what do they bring? | bench.serving.speculation
What do grammars cost a decode step? | bench.serving.structured
How long do new weights, scores, sleep and wake take? | bench.serving.trainer
How much quality does a model lose with 8-bit K/V? | bench.serving.quality
How do attention, decode steps and serving scale over GPUs? | bench.parallel | .__main__
What does a decode step read and send on up to 16 GPUs? | bench.parallel.programs
"""


@dataclasses.dataclass(frozen=True)
class Bench:
    """A bench: what it answers, how it is run, and the end of the name of its tables' module."""

    question: str
    command: str
    tables: str = ""

    @property
    def module(self) -> str:
        """The module that is run."""
        return self.command.partition(" ")[0]

    def markdown(self, run: dict[str, Any]) -> str:
        """The tables of a run."""
        return importlib.import_module(self.module + self.tables).markdown(run)


BENCHES = tuple(Bench(*line.split(" | ")) for line in _TABLE.strip().splitlines())


def find(module: str) -> Bench:
    """The bench that is run by `python -m module`."""
    return next(bench for bench in BENCHES if bench.module == module)


def listing() -> str:
    """A Markdown table of the questions and commands."""
    rows = (f"| {bench.question} | `python -m {bench.command}` |" for bench in BENCHES)
    return "\n".join(["| question | command |", "|---|---|", *rows])


def main() -> None:
    """Print the question and the command of each bench."""
    argparse.ArgumentParser(prog="bench", description=__doc__).parse_args()
    for bench in BENCHES:
        print(f"python -m {bench.command}\n    {bench.question}")


if __name__ == "__main__":
    main()
