"""Test modules share code through tests/support/ and fixtures only."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent


def test_no_test_module_imports_another():
    for path in TESTS.rglob("*.py"):
        imports = re.findall(r"^\s*(?:from|import) (tests\.[\w.]+)", path.read_text(), re.M)
        assert all(name.startswith("tests.support.") for name in imports), path
