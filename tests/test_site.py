"""The documentation site has every page of docs and every public module."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def test_the_navigation_has_every_page_of_docs_and_every_notebook():
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    notebooks = (ROOT / "examples").rglob("*.ipynb")
    pages |= {str(path.relative_to(ROOT).with_suffix(".md")) for path in notebooks}
    nav = set(re.findall(r"^ +- .*?([\w/.-]+\.md)", text_of(ROOT / "mkdocs.yml"), re.MULTILINE))
    assert pages <= nav


def test_the_reference_has_a_page_for_every_public_module():
    for path in (ROOT / "pallas_paged").rglob("*.py"):
        if re.search(r"^__all__ = ", text_of(path), re.MULTILINE):
            parts = path.relative_to(ROOT).with_suffix("").parts
            module = ".".join(parts).removesuffix(".__init__")
            page = DOCS / f"reference/{module}.md"
            assert page.exists(), f"{page} is missing"
            assert f"\n::: {module}\n" in text_of(page)
