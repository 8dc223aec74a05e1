"""The README's example runs as it stands, and its quick start keeps its form."""

from __future__ import annotations

import re
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_the_example_runs(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(example, "README.md", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out == "[100 100 100 100] tokens; 228 of 256 pages are free\n"


def test_the_quick_start_is_two_commands():
    section = README.split("## Quick start")[1].split("\n## ")[0]
    run, test = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    assert "-m models.generate --prompt" in run and "-m pytest" in test
