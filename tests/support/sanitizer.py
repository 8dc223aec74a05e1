"""compute-sanitizer over small calls of every kernel, on a GPU.

`python -m tests.support.sanitizer` prints what the tools find in each call of `kernel_calls`. The
status is 1 after a finding, and also if a tool missed an error that was planted for it.

Ordinary processes trace and compile the calls, and leave programs in a folder. Processes of the
tools take one after another and only run it. A process ends after a call that failed, since that
may be the end of its CUDA context, and another one goes on.
"""

import argparse
import contextlib
import dataclasses
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.serialize_executable import deserialize_and_load, serialize

from tests.support.kernel_calls import KernelCall, kernel_calls

TOOLS = {"memcheck": ["--report-api-errors", "no"], "synccheck": []}
TOOLS["racecheck"] = ["--racecheck-report", "all"]
# memcheck knows the size of each array of this allocator, and blocks of 2 MB or more of the others;
# kernels are launched one by one, not as a graph; and what comes from a cache can't be serialized.
ENVIRONMENT = {
    "XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "JAX_ENABLE_COMPILATION_CACHE": "false",
    "XLA_FLAGS": "--xla_gpu_enable_command_buffer= --xla_gpu_autotune_level=0",
}
FAILED = 3  # status of a process after a call that failed
PLANTED = {"memcheck": "planted read past the end", "racecheck": "planted race"}
# The start of a finding; its details are indented.
_FINDING = re.compile(r"^========= (?P<text>\S.*)")
_NO_FINDING = re.compile(r"COMPUTE-SANITIZER|SUMMARY|^Target application|^Saved|^Copyright")
_ACCESS = re.compile(r"^=========\s+.*\bat (?P<kernel>\w+)\S*\+0x\w+(?: in (?P<line>\S+))?")
_PLACE = re.compile(r"0x[0-9a-f]+|\(\d+,\d+,\d+\)")
# Cascades run the kernels of the other functions, with other sizes.
LEFT_OUT = re.compile("cascade (?!bfloat16)")

# Of a tool and a call: how the call ended, and the findings.
Found = dict[tuple[str, str], tuple[str, list[str]]]


@dataclasses.dataclass(kw_only=True)
class Job:
    """A process that compiles calls, or one of a tool (not "") that runs them."""

    command: Sequence[str]
    log: Path  # of its output; a process that is started again goes on in it
    tool: str = ""
    names: Sequence[str]
    process: subprocess.Popen[bytes] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Start the process."""
        streams = {"stderr": subprocess.STDOUT, "env": os.environ | ENVIRONMENT}
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(self.command, stdout=output, **streams)

    def goes_on(self) -> bool:
        """Return whether the process runs; one that failed is started again for its other calls."""
        status = self.process.poll()
        again = bool(self.tool) and status == FAILED
        if again:
            self.start()
        return again or status is None


def planted_calls() -> list[KernelCall]:
    """Calls with an error that a tool must find."""
    functions = {"planted read past the end": _read_past_the_end, "planted race": _race}
    ones = (np.ones(100, np.float32),)
    return [
        KernelCall(family="", name=name, function=function, make=lambda: ones)
        for name, function in functions.items()
    ]


def _read_past_the_end(x: jax.Array, *, implementation: str) -> jax.Array:
    """Copy by a Triton kernel that reads 28 elements past the end."""
    from jax.experimental.pallas import triton as plgpu

    def body(x_ref, out_ref):
        out_ref[...] = plgpu.load(x_ref.at[jnp.arange(128)])

    params = plgpu.CompilerParams(num_warps=4)
    out = jax.ShapeDtypeStruct((128,), jnp.float32)
    return pl.pallas_call(body, out_shape=out, compiler_params=params)(x)


def _race(x: jax.Array, *, implementation: str) -> jax.Array:
    from tests.support.planted_race import add_by_two

    return add_by_two(jnp.pad(x, (0, 28)))


def compile_calls(folder: Path, names: Sequence[str]) -> None:
    """Leave the program of each call with its arguments or, as a string, why there is none."""
    calls = {str(call).strip(): call for call in [*kernel_calls(), *planted_calls()]}
    for name in names:
        call = calls[name]
        leaves, tree = jax.tree.flatten(call.make())

        def run(*leaves: Any, call: KernelCall = call, tree: Any = tree) -> list[Any]:
            return jax.tree.leaves(call.run(*jax.tree.unflatten(tree, leaves)))

        try:
            compiled = jax.jit(run).lower(*leaves).compile()
            found: Any = serialize(compiled), [np.asarray(x) for x in leaves]
        except NotImplementedError as e:
            found = f"refused: {e}"
        except Exception as e:  # the table says so
            found = f"failed: {_last_line(e)}"
        part = folder / f"part{os.getpid()}"
        part.write_bytes(pickle.dumps(found))
        part.rename(folder / name)  # all at once


def run_calls(folder: Path, tool: str, names: Sequence[str]) -> None:
    """Run calls that no other process of the tool has, with a line before each and one after it."""
    from jax.experimental.pallas import mosaic_gpu  # noqa: F401  XLA looks for its functions

    for name in names:
        path = folder / name
        while not path.exists():
            time.sleep(0.05)
        try:
            path.with_name(f"{path.name}.{tool}").touch(exist_ok=False)
        except FileExistsError:
            continue
        print(f"BEGIN {name}", flush=True)
        status = _run(pickle.loads(path.read_bytes()))
        time.sleep(0.1)  # the findings come through another process
        print(f"END {name}: {status}", flush=True)
        if status.startswith("failed"):
            os._exit(FAILED)


def _run(program: Any) -> str:
    if isinstance(program, str):
        return program.replace("failed", "not compiled")
    (serialized, in_tree, out_tree), leaves = program
    devices = jax.devices()[:1]
    try:
        loaded = deserialize_and_load(serialized, in_tree, out_tree, execution_devices=devices)
        jax.block_until_ready(loaded(*leaves))
    except Exception as e:  # a fault ends the context of CUDA, in one of many ways
        return f"failed: {_last_line(e)}"
    return "ok"


def _last_line(e: Exception) -> str:
    lines = str(e).strip().splitlines() or [""]
    return f"{type(e).__name__}: {lines[-1][:200]}"


def parse(log: str) -> dict[str, tuple[str, list[str]]]:
    """Return the status and the findings of each call in the output of `run_calls` under a tool."""
    found: dict[str, tuple[str, list[str]]] = {}
    name, findings = "", list[str]()
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


def start_all(names: Sequence[str], tools: Sequence[str], folder: Path, parts: int) -> list[Job]:
    """Start what compiles, every tool on all calls, and every tool on what is planted for it.

    Args:
        parts: processes of each tool; three times as many compile.
    """
    places = [os.environ["PATH"], *map(str, sorted(Path("/usr/local").glob("cuda*/bin"))[::-1])]
    sanitizer = shutil.which("compute-sanitizer", path=os.pathsep.join(places))
    if sanitizer is None:
        raise FileNotFoundError("compute-sanitizer is neither on PATH nor in /usr/local/cuda*/bin")
    programs = folder / "programs"
    programs.mkdir()
    python = [sys.executable, "-m", "tests.support.sanitizer", "--folder", str(programs)]
    every = [*(PLANTED[tool] for tool in tools if tool in PLANTED), *names]
    compiled = [every[i :: 3 * parts] for i in range(3 * parts)]
    jobs = [
        Job(command=[*python, "--compile", *part], log=folder / f"compile{i}.log", names=part)
        for i, part in enumerate(compiled)
        if part
    ]
    for tool in tools:
        prefix = [sanitizer, "--tool", tool, *TOOLS[tool], *python, "--tools", tool, "--run"]
        planted = [[PLANTED[tool]]] if tool in PLANTED else []
        for i, part in enumerate([*planted, *[names] * parts]):
            log = folder / f"{tool}{i}.log"
            jobs.append(Job(command=[*prefix, *part], log=log, tool=tool, names=part))
    return jobs


def end_all(folder: Path) -> None:
    """End all processes that were started with a folder; a tool leaves the program under it."""
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            if os.fsencode(folder) in command.read_bytes():
                os.kill(int(command.parent.name), signal.SIGKILL)


def collect(jobs: Sequence[Job], folder: Path, deadline: float) -> Found:
    """Wait for processes until a time of `time.monotonic`, and return what they found."""
    try:
        while [job for job in jobs if job.goes_on()] and time.monotonic() < deadline:
            time.sleep(0.1)
    finally:
        end_all(folder)
    found: Found = {}
    for job in jobs:
        job.process.wait()
        log = job.log.read_text(errors="replace")
        parsed = parse(log)
        found |= {(job.tool, name): result for name, result in parsed.items()}
        planted = job.names == [PLANTED.get(job.tool)]
        if planted or (job.process.returncode not in (0, -signal.SIGKILL) and not parsed):
            lines = [line for line in log.splitlines() if line.startswith("=====") or not planted]
            print(f"log of {job.log.stem}, {job.names[0]}:", *lines[-15:], sep="\n  ", flush=True)
    return found


def report(found: Found, names: Sequence[str], tools: Sequence[str]) -> bool:
    """Print a table of calls and tools, then the findings; return whether all is well."""
    good = True
    print(f"| call | {' | '.join(tools)} |\n|---|{'---|' * len(tools)}")
    for name in names:
        cells = []
        for tool in tools:
            status, findings = found.get((tool, name), ("not run", []))
            refused = status.startswith("refused")
            good &= (status == "ok" or refused) and not findings
            word = "refused" if refused else status
            cells.append(f"{len(findings)} findings, {word}" if findings else word)
        print(f"| {name} | {' | '.join(cells)} |")
    for tool in tools:
        if planted := PLANTED.get(tool):
            status, findings = found.get((tool, planted), ("not run", []))
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
    parts = max(1, (os.cpu_count() or 1) // 3)
    parser.add_argument("--parts", type=int, default=parts, help="processes of each tool")
    parser.add_argument("--seconds", type=float, default=600.0, help="limit of time")
    for process in ("--folder", "--compile", "--run"):  # of a process that this program starts
        parser.add_argument(process, nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.compile:
        compile_calls(Path(*options.folder), options.compile)
        return 0
    if options.run:
        run_calls(Path(*options.folder), options.tools[0], options.run)
        return 0
    deadline = time.monotonic() + options.seconds
    names = [str(call) for call in kernel_calls() if options.only in str(call)]
    names = [name for name in reversed(names) if not LEFT_OUT.search(name)]
    with tempfile.TemporaryDirectory() as folder:
        jobs = start_all(names, options.tools, Path(folder), options.parts)
        good = report(collect(jobs, Path(folder), deadline), names, options.tools)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
