"""Plants small errors in the library, one by one, and counts how many the default tests find.

    python -m tests.support.mutants  # a sample of every group, written to tests/mutants.md
    python -m tests.support.mutants --group sampler -n 0  # every mutant of one group, printed

A mutant is one change of a comparison, an operator, a constant, a branch, or a statement that is
left out. Each runs in a process forked from one that has imported JAX, on the tests of its group,
which are a part of the default run, until one fails. A mutant that survives either changes nothing
that a caller could see, or shows a test that is missing.
"""

import argparse
import ast
import contextlib
import datetime
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import platform
import random
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.cpu_seconds import RECORD

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "tests" / "mutants.md"
TIMEOUT = 240  # seconds; an endless loop is an error that is found
_PAGES = "tests/pages"
_ENGINE = "pallas_paged/engine"
# Imported once for all children.
_IMPORTED = ["jax.numpy", "flax.nnx", "hypothesis", "openai", "uvicorn", "starlette.applications"]

# The modules of a group, and the tests that must find their errors: quick ones first.
GROUPS: dict[str, tuple[list[str], list[str]]] = {
    "page table": (["pallas_paged/pages/table.py", "pallas_paged/pages/sharing.py"], [_PAGES]),
    "quantization": (
        ["pallas_paged/pages/quantization.py"],
        [_PAGES, "tests/attention/test_quantized.py"],
    ),
    "prefix cache": (
        ["pallas_paged/pages/prefix_cache.py"],
        ["tests/pages/test_prefix_cache.py", "tests/engine/test_scheduler.py"],
    ),
    "dispatch": (
        ["pallas_paged/attention/dispatch.py"],
        [
            *["tests/attention/test_dispatch.py", "tests/attention/test_input.py"],
            *["tests/decoder/test_unmerged_attention.py", "tests/attention"],
            *["tests/sharding/test_partition.py", "tests/sharding/test_attention.py"],
        ],
    ),
    "scheduler": (
        [f"{_ENGINE}/schedule/scheduler.py", f"{_ENGINE}/schedule/kv_cache_manager.py"],
        ["tests/engine/test_scheduler.py", "tests/engine/test_engine.py", "tests/engine"],
    ),
    "output processor": (
        [
            f"{_ENGINE}/requests/output_processor.py",
            f"{_ENGINE}/requests/detokenizer.py",
        ],
        ["tests/engine/test_detokenizer.py", "tests/engine"],
    ),
    "sampler": (
        [f"{_ENGINE}/sampling/sampler.py", f"{_ENGINE}/sampling/passes.py"],
        [
            *["tests/engine/test_sampler.py", "tests/parallel/test_sampling.py"],
            *["tests/engine/test_sampling.py", "tests/engine"],
        ],
    ),
    "server": (
        sorted(str(x.relative_to(ROOT)) for x in ROOT.glob("pallas_paged/server/[a-z]*.py")),
        ["tests/server"],
    ),
}

_PAIRS = [
    *[(ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot)],
    *[(ast.In, ast.NotIn), (ast.Add, ast.Sub), (ast.BitAnd, ast.BitOr), (ast.And, ast.Or)],
    *[("min", "max"), ("any", "all"), ("minimum", "maximum"), ("argmin", "argmax")],
]
_OTHER: dict[Any, Any] = dict(_PAIRS) | {b: a for a, b in _PAIRS}
_OTHER |= {ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult}


@dataclass(frozen=True)
class Mutant:
    """A module of the library with the change of this number."""

    group: str
    path: str
    number: int
    line: int
    change: str


def _change(node: Any) -> tuple[str, ast.AST] | None:
    """Returns what to change at a node, in words, and the node in its place."""
    match node:
        case ast.BinOp(left=ast.JoinedStr()) | ast.BinOp(left=ast.Name(id="ArrayLike")):
            return None  # of texts and of types
        case ast.Compare(left=left, ops=[op, *ops], comparators=values) if type(op) in _OTHER:
            new = _OTHER[type(op)]()
            return type(new).__name__, ast.Compare(left, [new, *ops], values)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OTHER:
            new = _OTHER[type(op)]()
            return type(new).__name__, ast.BinOp(left, new, right)
        case ast.BoolOp(op=op, values=values):
            new = _OTHER[type(op)]()
            return type(new).__name__, ast.BoolOp(new, values)
        case ast.UnaryOp(operand=operand):
            return "the operand alone", operand
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return "branches swapped", ast.IfExp(test, orelse, body)
        case ast.Constant(value=bool(value)):
            return str(not value), ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            return "+ 1", ast.Constant(value + 1)
        case ast.Name(id=name, ctx=context) if name in _OTHER:
            return _OTHER[name], ast.Name(_OTHER[name], context)
        case ast.Attribute(value=value, attr=name, ctx=context) if name in _OTHER:
            return _OTHER[name], ast.Attribute(value, _OTHER[name], context)
        case ast.Expr(value=ast.Constant()):
            return None  # a docstring
        case ast.Assign(targets=[ast.Name() | ast.Tuple()]):
            return None  # an error wherever the name is used
        case (
            ast.Expr() | ast.Assign() | ast.AugAssign() | ast.Raise() | ast.Continue() | ast.Break()
        ):
            return "left out", ast.Pass()
    return None


class _Change(ast.NodeTransformer):
    """Finds the places to change, and changes the one of this number."""

    def __init__(self, number: int | None = None):
        self._number = number
        self.found: list[tuple[int, str]] = []  # lines and changes

    def visit(self, node: Any) -> Any:
        if (change := _change(node)) is not None:
            self.found.append((getattr(node, "lineno", 0), f"{ast.unparse(node)}: {change[0]}"))
            if len(self.found) - 1 == self._number:
                return change[1]
        match node:
            case ast.Raise() | ast.Assert() | ast.JoinedStr() | ast.arg():
                return node  # texts and types
            case ast.AnnAssign(value=value):
                node.value = value and self.visit(value)
                return node
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                node.args = self.generic_visit(node.args)
                node.body = [self.visit(child) for child in node.body]
                return node
            case ast.ClassDef():
                node.body = [self.visit(child) for child in node.body]
                return node
        return self.generic_visit(node)


def mutants(group: str) -> Iterator[Mutant]:
    """Yields every mutant of the modules of a group."""
    for path in GROUPS[group][0]:
        change = _Change()
        change.visit(ast.parse((ROOT / path).read_text()))
        for number, (line, text) in enumerate(change.found):
            yield Mutant(group, path, number, line, " ".join(text.split()))


class _Finder(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    """Imports the mutant in place of its module."""

    def __init__(self, mutant: Mutant):
        name = mutant.path.removesuffix(".py").replace("/", ".")
        super().__init__(name, str(ROOT / mutant.path))
        self._number = mutant.number

    def find_spec(self, fullname, path=None, target=None):
        if fullname == self.name:
            return importlib.util.spec_from_file_location(fullname, self.path, loader=self)
        return None

    def get_code(self, fullname):
        tree = _Change(self._number).visit(ast.parse(Path(self.path).read_text()))
        return compile(ast.fix_missing_locations(tree), self.path, "exec")


def files_of(tests: list[str]) -> list[str]:
    """Returns the files of these paths; those of a folder with the cheapest first."""
    seconds = json.loads(RECORD.read_text())
    files: list[str] = []
    for path in tests:
        inside = [str(x.relative_to(ROOT)) for x in (ROOT / path).rglob("test_*.py")]
        files += sorted(inside, key=lambda name: seconds.get(name, 0.0)) or [path]
    return list(dict.fromkeys(files))


def run_tests(mutant: Mutant | None, tests: list[str]) -> int:
    """Runs tests in this process, with a mutant or without; returns the exit status."""
    import pytest

    if mutant is not None:
        sys.meta_path.insert(0, _Finder(mutant))
    return int(pytest.main(["-x", "-n0", "-p", "no:cacheprovider", *files_of(tests)]))


def start(mutant: Mutant | None, tests: list[str]) -> int:
    """Starts the tests of a mutant in a child, and returns its process id."""
    if pid := os.fork():
        return pid
    status = 1
    with contextlib.suppress(BaseException):
        os.setsid()
        quiet = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(quiet, descriptor)
        status = run_tests(mutant, tests)
    os._exit(status)


def run_all(found: list[Mutant], jobs: int) -> dict[Mutant, bool]:
    """Runs the tests of all mutants; returns which of them a test finds."""
    results: dict[Mutant, bool] = {}
    running: dict[int, tuple[Mutant, float]] = {}
    waiting = found[::-1]
    while waiting or running:
        while waiting and len(running) < jobs:
            mutant = waiting.pop()
            running[start(mutant, GROUPS[mutant.group][1])] = mutant, time.monotonic() + TIMEOUT
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            for late in [x for x, (_, end) in running.items() if time.monotonic() > end]:
                os.killpg(late, signal.SIGKILL)
            time.sleep(0.1)
            continue
        mutant, _ = running.pop(pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # processes that its tests had started
        results[mutant] = status != 0
        if not status:
            print(f"survives: {mutant.path}:{mutant.line}: {mutant.change}", flush=True)
    return results


def reasons() -> dict[tuple[str, str], str]:
    """Reads from the last result why a mutant may survive, by its module and change."""
    found = {}
    for line in RESULT.read_text().splitlines() if RESULT.exists() else []:
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if len(cells) == 4 and cells[0].endswith(".py") and cells[3]:
            found[cells[0], cells[2]] = cells[3]
    return found


def report(results: dict[Mutant, bool], command: str) -> str:
    """Returns the result in Markdown: a row for each group, and one for each survivor."""
    why = reasons()
    rows, survivors = [], []
    counts = [0, 0, 0]
    for group in GROUPS:
        mine = {mutant: is_found for mutant, is_found in results.items() if mutant.group == group}
        alive = [mutant for mutant, is_found in mine.items() if not is_found]
        cells = [(x.path, str(x.line), f"`{x.change.replace('|', '¦')[:100]}`") for x in alive]
        same = sum((path, change) in why for path, _, change in cells)
        survivors += [" | ".join((*cell, why.get((cell[0], cell[2]), ""))) for cell in cells]
        row = [len(mine), len(mine) - len(alive), same]
        rows.append([group, *row])
        counts = [x + y for x, y in zip(counts, row, strict=True)]
    rows.append(["all", *counts])
    lines = [
        "# Mutants",
        "",
        "Small errors planted one by one (`tests/support/mutants.py`), and how many the default",
        "tests find. The share leaves out survivors that change nothing that a test could see.",
        "",
        "group | mutants | found | no change | share found",
        "--- | --: | --: | --: | --:",
        *(f"{g} | {n} | {f} | {s} | {f / max(n - s, 1):.0%}" for g, n, f, s in rows if n),
        "",
        "## Survivors",
        "",
        "module | line | change | why it changes nothing",
        "--- | --: | --- | ---",
        *survivors,
        "",
        f"`{command}`, {datetime.date.today()}, Python {platform.python_version()}, "
        f"JAX {importlib.metadata.version('jax')}",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Runs a sample of the mutants of every group, or of one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--group", choices=GROUPS, help="one group; writes no result")
    parser.add_argument("-n", type=int, default=40, help="mutants of a group; 0: all")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--result", type=Path, default=RESULT)
    args = parser.parse_args()
    os.chdir(ROOT)
    os.environ["JAX_PLATFORMS"] = "cpu"
    for name in _IMPORTED:
        importlib.import_module(name)
    groups = [args.group] if args.group else list(GROUPS)
    for group in groups:
        _, status = os.waitpid(start(None, GROUPS[group][1]), 0)
        if status:
            sys.exit(f"error: the tests of the {group} fail without a mutant")
    sample = []
    for group in groups:
        found = list(mutants(group))
        random.Random(args.seed).shuffle(found)
        sample += found[: args.n or None]
    started = time.monotonic()
    results = run_all(sample, args.jobs)
    command = f"python -m tests.support.mutants -n {args.n} --seed {args.seed}"
    text = report({mutant: results[mutant] for mutant in sample}, command)
    print(text, f"{time.monotonic() - started:.0f} s", sep="\n")
    if not args.group:
        args.result.write_text(text)


if __name__ == "__main__":
    main()
