"""Counts the CPU seconds of a run, orders its files by those on record, and checks a budget."""

import json
import os
import statistics
import time
from collections import Counter
from pathlib import Path

import pytest

RECORD = Path(__file__).parents[1] / "cpu_seconds.json"
MAX_SECONDS = 450.0  # of a run without slow tests, from an empty compilation cache
MAX_TEST_SECONDS = 3.0
NOISE = 1.5  # two runs of one test may differ by as much, as other programs share the cores
WORK_SECONDS = 0.21  # of `seconds_of_fixed_work` on the machine whose seconds the budgets are


def cpu_seconds() -> float:
    """Returns the CPU time of this process and of those that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def seconds_of_fixed_work() -> float:
    """Returns the CPU seconds that Python takes to compile a module: how slow a machine is now."""
    source = Path(json.__file__).with_name("decoder.py").read_text()
    start = time.process_time()
    for _ in range(200):
        compile(source, "decoder.py", "exec")
    return time.process_time() - start


class CpuSeconds:
    """A plugin of pytest, in the process that was started and in the workers of xdist.

    A slower machine has the same budget: its seconds are scaled by the mean time of a fixed amount
    of work at the start and at the end of its processes.
    """

    def __init__(self, config: pytest.Config):
        self._config = config
        self._worker = getattr(config, "workeroutput", None)
        self._recorded: dict[str, float] = json.loads(RECORD.read_text())
        self._last = cpu_seconds()
        self._tests: Counter[str] = Counter()
        self._budgets: dict[str, float] = {}
        self._processes = 0.0  # seconds of the workers, their tests included
        self._work = [seconds_of_fixed_work()] if config.getoption("cpu_budget") else []
        self._lines: list[str] = []

    @staticmethod
    def add_options(parser: pytest.Parser) -> None:
        group = parser.getgroup("CPU seconds")
        group.addoption(
            "--cpu-budget",
            action="store_true",
            help=f"fail if a test takes more than {MAX_TEST_SECONDS:g} CPU seconds, or the run more"
            f" than {MAX_SECONDS:g}",
        )
        record = dict(action="store_true", help=f"write tests/{RECORD.name}")
        group.addoption("--record-cpu-seconds", **record)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Costly files first, those not on record before all: xdist gives a worker one by one."""

        def seconds(item: pytest.Item) -> float:
            return self._recorded.get(item.nodeid.partition("::")[0], float("inf"))

        if self._worker is not None:
            items.sort(key=seconds, reverse=True)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item):
        report = yield
        now = cpu_seconds()
        report.cpu_seconds, self._last = now - self._last, now
        marker = item.get_closest_marker("cpu_budget")
        report.cpu_budget = marker.args[0] if marker else MAX_TEST_SECONDS
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # A test during which its worker crashed has neither.
        self._tests[report.nodeid] += getattr(report, "cpu_seconds", 0.0)
        self._budgets[report.nodeid] = getattr(report, "cpu_budget", MAX_TEST_SECONDS)

    def pytest_collection_finish(self) -> None:
        self._last = cpu_seconds()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node) -> None:
        output = getattr(node, "workeroutput", {})  # none of a worker that crashed
        self._processes += output.get("cpu_seconds", 0.0)
        self._work += output.get("fixed_work", [])

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._worker is not None:
            self._worker["cpu_seconds"] = cpu_seconds()
            self._worker["fixed_work"] = [*self._work, seconds_of_fixed_work()]
        elif self._tests:
            # Workers have ended, and are children; alone, a test's own children count.
            own = time.process_time() if self._processes else cpu_seconds()
            total = own + self._processes
            if self._config.getoption("record_cpu_seconds"):
                self._write()
            self._lines = [self._summary(total)]
            if self._config.getoption("cpu_budget"):
                work = statistics.mean([*self._work, seconds_of_fixed_work()])
                failures = self._failures(total, WORK_SECONDS / work)
                self._lines += failures
                if failures and not session.exitstatus:
                    session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter) -> None:
        for line in self._lines:
            terminalreporter.write_line(line)

    def _summary(self, total: float) -> str:
        folders: Counter[str] = Counter()
        for name, seconds in self._tests.items():
            folders[Path(name.partition("::")[0]).with_suffix("").parts[1]] += seconds
        folders["start and collection"] = total - sum(folders.values())
        parts = ", ".join(f"{folder} {seconds:.0f}" for folder, seconds in folders.most_common())
        return f"CPU seconds: {total:.0f} ({parts})"

    def _failures(self, total: float, scale: float) -> list[str]:
        """What is above its budget, in the seconds of the budget's machine."""
        return [
            f"error: {name} takes {seconds * scale:.1f} CPU seconds, more than {limit:g}"
            for name, seconds, limit in [
                ("the run", total, MAX_SECONDS),
                *((name, x, self._budgets[name]) for name, x in self._tests.most_common()),
            ]
            if seconds * scale > limit * NOISE
        ]

    def _write(self) -> None:
        files: Counter[str] = Counter()
        for name, seconds in self._tests.items():
            files[name.partition("::")[0]] += seconds
        record = {name: round(seconds, 1) for name, seconds in sorted(files.items())}
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
