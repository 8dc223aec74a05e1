"""Plants small errors in the library, one by one, and counts how many the default tests find.

    python -m tests.support.mutants  # a sample of every group, written to tests/mutants.md
    python -m tests.support.mutants --group sampler -n 0  # every mutant of one group, printed

A mutant is one change of a comparison, an operator, a constant, a branch, or a statement that is
left out. Each runs in a process forked from one that has imported JAX, on the tests of its group,
which are a part of the default run, until one fails. A mutant that survives either changes nothing
that a caller could see, or shows a test that is missing.
"""

from __future__ import annotations

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

from tests.support.cpu_seconds import RECORD

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "tests" / "mutants.md"
TIMEOUT = 240  # seconds; an endless loop is an error that is found

# The modules of a group, and the tests that must find their errors: quick ones first.
GROUPS: dict[str, tuple[list[str], list[str]]] = {
    "page table": (
        ["pallas_paged/page_table.py", "pallas_paged/page_sharing.py"],
        ["tests/pages"],
    ),
    "quantization": (
        ["pallas_paged/quantization.py"],
        ["tests/pages", "tests/attention/test_quantized.py"],
    ),
    "prefix cache": (
        ["pallas_paged/prefix_cache.py"],
        ["tests/pages/test_prefix_cache.py", "tests/engine/test_scheduler.py"],
    ),
    "dispatch": (
        ["pallas_paged/dispatch.py"],
        ["tests/attention/test_dispatch.py", "tests/attention/test_input.py"],
    ),
    "scheduler": (
        ["pallas_paged/engine/scheduler.py", "pallas_paged/engine/kv_cache_manager.py"],
        ["tests/engine/test_scheduler.py", "tests/engine/test_engine.py", "tests/engine"],
    ),
    "output processor": (
        ["pallas_paged/engine/output_processor.py", "pallas_paged/engine/detokenizer.py"],
        ["tests/engine/test_detokenizer.py", "tests/engine"],
    ),
    "sampler": (
        [
            "pallas_paged/engine/sampler.py",
            "pallas_paged/engine/sampling_draw.py",
            "pallas_paged/engine/sampling_filters.py",
        ],
        ["tests/engine/test_sampler.py", "tests/engine/test_sampling.py", "tests/engine"],
    ),
    "server": (
        [
            f"models/server/{path.name}"
            for path in sorted((ROOT / "models/server").glob("[a-z]*.py"))
        ],
        ["tests/server"],
    ),
}

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "minimum": "maximum"}
_NAMES |= {"maximum": "minimum", "argmax": "argmin", "zeros": "ones", "ones": "zeros"}


@dataclass(frozen=True)
class Mutant:
    """A module of the library with the change of this number."""

    group: str
    path: str
    number: int
    line: int
    change: str


class _Change(ast.NodeTransformer):
    """Counts the places to change, and changes one."""

    def __init__(self, number: int | None = None):
        self.number = number
        self.found: list[tuple[int, str]] = []

    def _take(self, node: ast.AST, change: str) -> bool:
        self.found.append((node.lineno, change))  # type: ignore[attr-defined]
        return len(self.found) - 1 == self.number

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        new = _COMPARISONS.get(type(node.ops[0]))
        if new is not None and self._take(node, f"{ast.unparse(node)}: {new.__name__}"):
            return ast.Compare(node.left, [new(), *node.ops[1:]], node.comparators)
        return self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        new = _OPERATORS.get(type(node.op))
        text = isinstance(node.left, ast.JoinedStr) or (
            isinstance(node.left, ast.Name) and node.left.id[0].isupper()  # a type
        )
        if (
            new is not None
            and not text
            and self._take(node, f"{ast.unparse(node)}: {new.__name__}")
        ):
            return ast.BinOp(node.left, new(), node.right)
        return self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        new = ast.Or if isinstance(node.op, ast.And) else ast.And
        if self._take(node, f"{ast.unparse(node)}: {new.__name__}"):
            return ast.BoolOp(new(), node.values)
        return self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        if isinstance(node.op, ast.Not | ast.Invert | ast.USub) and self._take(
            node, f"{ast.unparse(node)}: no {type(node.op).__name__}"
        ):
            return node.operand
        return self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        if self._take(node, f"{ast.unparse(node)}: branches swapped"):
            return ast.IfExp(node.test, node.orelse, node.body)
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, bool):
            if self._take(node, f"{node.value}: {not node.value}"):
                return ast.Constant(not node.value)
        elif isinstance(node.value, int | float) and self._take(node, f"{node.value}: + 1"):
            return ast.Constant(node.value + 1)
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id in _NAMES and self._take(node, f"{node.id}: {_NAMES[node.id]}"):
            return ast.Name(_NAMES[node.id], node.ctx)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if node.attr in _NAMES and self._take(node, f"{node.attr}: {_NAMES[node.attr]}"):
            return ast.Attribute(node.value, _NAMES[node.attr], node.ctx)
        return self.generic_visit(node)

    def _statement(self, node: ast.stmt) -> ast.AST:
        if self._take(node, f"{ast.unparse(node)}: left out"):
            return ast.Pass()
        return self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        return node if isinstance(node.value, ast.Constant) else self._statement(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        is_state = not any(isinstance(target, ast.Name) for target in node.targets)
        return self._statement(node) if is_state else self.generic_visit(node)

    visit_AugAssign = visit_Continue = visit_Break = _statement

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        """An error that is not raised; its text is not changed."""
        return ast.Pass() if self._take(node, f"{ast.unparse(node)}: left out") else node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_Assert(self, node: ast.AST) -> ast.AST:
        return node

    visit_JoinedStr = visit_Assert  # texts

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.body = [self.visit(child) for child in node.body]
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        node.body = [self.visit(child) for child in node.body]
        node.args.defaults = [self.visit(value) for value in node.args.defaults]
        node.args.kw_defaults = [value and self.visit(value) for value in node.args.kw_defaults]
        return node

    visit_AsyncFunctionDef = visit_FunctionDef


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
    seconds = json.loads(RECORD.read_text())["files"]
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
    for name in (
        "jax.numpy",
        "flax.nnx",
        "hypothesis",
        "openai",
        "uvicorn",
        "starlette.applications",
    ):
        importlib.import_module(name)  # once for all children
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
