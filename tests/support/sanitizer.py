"""compute-sanitizer over small calls of every kernel, on a GPU.

`python -m tests.support.sanitizer` prints what the tools find in each call of `kernel_calls`. The
status is 1 after a finding, and also if a tool missed an error that was planted for it. The tools
run side by side.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from tests.support.kernel_calls import KernelCall, kernel_calls

TOOLS = {
    "memcheck": ["--report-api-errors", "no"],
    "synccheck": [],
    "racecheck": ["--racecheck-report", "all"],
}
# memcheck knows the size of each array of this allocator, and blocks of 2 MB or more of the others;
# kernels are launched one by one, not as a graph; and programs are compiled once for all tools.
ENVIRONMENT = {
    "XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "XLA_FLAGS": "--xla_gpu_enable_command_buffer= --xla_gpu_autotune_level=0",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
PLANTED = {"memcheck": "planted read past the end", "racecheck": "planted race"}
# The start of a finding; its details are indented.
_FINDING = re.compile(r"^========= (?P<text>\S.*)")
_NO_FINDING = re.compile(r"COMPUTE-SANITIZER|SUMMARY|^Target application|^Saved|^Copyright")
_ACCESS = re.compile(r"^=========\s+.*\bat (?P<kernel>\w+)\S*\+0x\w+(?: in (?P<line>\S+))?")
_PLACE = re.compile(r"0x[0-9a-f]+|\(\d+,\d+,\d+\)")


# Of a tool and a call: how the call ended, and the findings.
Found = dict[tuple[str, str], tuple[str, list[str]]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One process of a tool, and the names of the calls that it runs."""

    tool: str
    names: Sequence[str]
    process: subprocess.Popen[bytes]
    log: Path


def planted_calls() -> list[KernelCall]:
    """Calls with an error that a tool must find."""
    make = partial(np.ones, 100, np.float32)
    names_and_functions = {"planted read past the end": _read_past_the_end, "planted race": _race}
    return [
        KernelCall(family="", name=name, function=function, make=lambda: (make(),))
        for name, function in names_and_functions.items()
    ]


def _read_past_the_end(x: jax.Array, *, implementation: str) -> jax.Array:
    """Copy by a Triton kernel that reads 28 elements past the end."""
    del implementation
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plgpu

    def body(x_ref, out_ref):
        out_ref[...] = plgpu.load(x_ref.at[jnp.arange(128)])

    return pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((128,), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=4),
    )(x)


def _race(x: jax.Array, *, implementation: str) -> jax.Array:
    del implementation
    from tests.support.planted_race import add_by_two

    return add_by_two(jnp.pad(x, (0, 28)))


def run_calls(names: Sequence[str]) -> None:
    """Run calls once, with a line before each and a line after it."""
    calls = {str(call).strip(): call for call in [*kernel_calls(), *planted_calls()]}
    for name in names:
        call = calls[name]
        print(f"BEGIN {name}", flush=True)
        try:
            jax.block_until_ready(jax.jit(call.run)(*call.make()))
            status = "ok"
        except NotImplementedError as e:
            status = f"refused: {e}"
        except Exception as e:  # a fault ends the context of CUDA, in one of many ways
            status = f"failed: {type(e).__name__}: {str(e).strip().splitlines()[-1][:200]}"
        time.sleep(0.3)  # the findings come through another process
        print(f"END {name}: {status}", flush=True)


def parse(log: str) -> dict[str, tuple[str, list[str]]]:
    """Return the status and the findings of each call in the output of `run_calls` under a tool."""
    found: dict[str, tuple[str, list[str]]] = {}
    name, findings = "", []
    for line in log.splitlines():
        if line.startswith("BEGIN "):
            name, findings = line.removeprefix("BEGIN "), []
            found[name] = ("not finished", findings)
        elif line.startswith(f"END {name}: "):
            found[name] = (line.removeprefix(f"END {name}: "), findings)
        elif (match := _FINDING.match(line)) and not _NO_FINDING.search(match["text"]):
            findings.append(_PLACE.sub("..", match["text"]))
        elif findings and (match := _ACCESS.match(line)) and findings[-1].count("[") < 2:
            findings[-1] += f" [{' '.join(filter(None, match.groups()))}]"
    return found


def start(tool: str, names: Sequence[str], folder: Path, sanitizer: str) -> Job:
    """Start a tool on the calls of these names."""
    log = folder / f"{tool}-{len(list(folder.iterdir()))}.log"
    python = [sys.executable, "-m", "tests.support.sanitizer", "--run", *names]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sanitizer, "--tool", tool, *TOOLS[tool], *python],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | ENVIRONMENT,
            start_new_session=True,  # to end the tool with the program under it
        )
    return Job(tool=tool, names=names, process=process, log=log)


def find_sanitizer() -> str:
    """Return the path of compute-sanitizer."""
    places = sorted(Path("/usr/local").glob("cuda*/bin"), reverse=True)
    found = shutil.which("compute-sanitizer") or next(
        (str(p / "compute-sanitizer") for p in places if (p / "compute-sanitizer").exists()), None
    )
    if found is None:
        raise FileNotFoundError("compute-sanitizer is neither on PATH nor in /usr/local/cuda*/bin")
    return found


def start_all(names: Sequence[str], tools: Sequence[str], folder: Path, parts: int) -> list[Job]:
    """Start every tool on all calls, in `parts` processes, and on what is planted for it."""
    sanitizer = find_sanitizer()
    return [
        start(tool, part, folder, sanitizer)
        for tool in tools
        for part in [*(names[i::parts] for i in range(parts)), [PLANTED.get(tool, "")]]
        if part and part[0]
    ]


def collect(jobs: Sequence[Job], deadline: float) -> Found:
    """Wait for processes until a time of `time.monotonic`, and return what they found."""
    found: Found = {}
    for job in jobs:
        try:
            job.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(job.process.pid, signal.SIGKILL)
        log = job.log.read_text(errors="replace")
        parsed = parse(log)
        found |= {(job.tool, name): parsed.get(name, ("not run", [])) for name in job.names}
        if not parsed or job.names == [PLANTED.get(job.tool)]:
            lines = [line for line in log.splitlines() if line.startswith("=====") or not parsed]
            print(f"log of {job.tool}, {job.names[0]}:", *lines[-15:], sep="\n  ", flush=True)
    return found


def report(found: Found, names: Sequence[str], tools: Sequence[str]) -> bool:
    """Print a table of calls and tools, then the findings; return whether all is well."""
    good = True
    print(f"| call | {' | '.join(tools)} |\n|---|{'---|' * len(tools)}")
    for name in names:
        cells = []
        for tool in tools:
            status, findings = found[tool, name]
            refused = status.startswith("refused")
            good &= (status == "ok" or refused) and not findings
            word = "refused" if refused else status
            cells.append(f"{len(findings)} findings, {word}" if findings else word)
        print(f"| {name} | {' | '.join(cells)} |")
    for tool in tools:
        if planted := PLANTED.get(tool):
            status, findings = found[tool, planted]
            good &= bool(findings)
            print(f"{tool} {'found' if findings else 'MISSED'} the {planted} ({status})")
    for (tool, name), (status, findings) in found.items():
        if name not in PLANTED.values() and (findings or status.startswith("failed")):
            print(f"{tool}, {name}: {status}")
            for text in list(dict.fromkeys(findings))[:6]:
                print(f"  {findings.count(text)} times: {text}")
    return good


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program, and return its status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tools", nargs="*", default=list(TOOLS), choices=[*TOOLS])
    parser.add_argument("--only", default="", help="a part of the names of calls")
    parser.add_argument("--parts", type=int, default=5, help="processes of each tool")
    parser.add_argument("--seconds", type=float, default=600.0, help="limit of time")
    parser.add_argument("--run", nargs="*", help=argparse.SUPPRESS)  # a process of a tool
    options = parser.parse_args(arguments)
    if options.run:
        run_calls(options.run)
        return 0
    deadline = time.monotonic() + options.seconds
    names = [str(call) for call in kernel_calls() if options.only in str(call)]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = f"{folder}/cache"
        logs = Path(folder, "logs")
        logs.mkdir()
        jobs = start_all(names, options.tools, logs, options.parts)
        good = report(collect(jobs, deadline), names, options.tools)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
