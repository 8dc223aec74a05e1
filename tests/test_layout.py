"""Test modules share code through tests/support/ and fixtures only."""

from __future__ import annotations

import re
from pathlib import Path


def test_no_test_module_imports_another():
    imports = re.compile(r"^\s*(?:from|import) tests\.(?:\w+\.)*(?:test_\w+|conftest)\b", re.M)
    for path in Path(__file__).parent.rglob("*.py"):
        assert not imports.search(path.read_text()), path
