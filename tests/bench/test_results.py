"""Results: every table, chart and number comes from the JSON of one run."""

import importlib.util
import re
from pathlib import Path

import pytest

from bench.__main__ import BENCHES, listing
from bench.results.__main__ import ROOT, make
from bench.results.store import FOLDER, Store


@pytest.fixture(scope="module")
def store() -> Store:
    return Store.load()


def test_committed_tables_and_charts_are_made_of_the_json(store) -> None:
    """Run `python -m bench.results` after a change of the JSON, of a table or of the page."""
    made = make(store)
    committed = {
        path.relative_to(ROOT).as_posix()
        for card in FOLDER.iterdir()
        if card.is_dir()
        for path in [*card.glob("*.md"), *card.glob("*.svg"), *card.glob("*.png")]
    }
    assert committed == made.keys() - {"docs/results.md"}
    for name, text in made.items():
        assert (ROOT / name).read_text() == text, f"{name} is not what the JSON gives"


def test_each_run_names_its_device_date_version_and_command(store) -> None:
    assert len(store) == len([*FOLDER.glob("**/*.json")]), "a folder that store.CARDS does not name"
    for key, run in store.items():
        meta = run["meta"]
        assert meta["device"] and re.match(r"\d{4}-\d\d-\d\d", meta["date"]), key
        assert meta["command"].startswith("python ") and "jax" in meta, key


def test_charts_can_be_read_on_a_page_of_700_pixels(store) -> None:
    """Text has 12 pixels or more and stays inside; both color schemes, a title, a description."""
    charts = {name: text for name, text in make(store).items() if name.endswith(".svg")}
    assert len(charts) >= 5
    for name, text in charts.items():
        assert 'width="700"' in text and "prefers-color-scheme:dark" in text, name
        assert "<title" in text and len(text.partition("<desc")[2].partition("</desc>")[0]) > 50
        assert int(re.findall(r"text{font:(\d+)px", text)[0]) >= 12
        for x, anchor, words in re.findall(r'<text .*?x="(.*?)" .*?anchor="(\w+)".*?>(.*?)<', text):
            end = float(x) + 6.5 * len(words) * {"start": 1, "middle": 0.5, "end": 0}[anchor]
            assert end <= 700, f"{name}: {words}"


def test_readme_of_the_benches_lists_them_all() -> None:
    assert listing() in Path(FOLDER.parent, "README.md").read_text()
    programs = {
        path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
        for path in FOLDER.parent.rglob("*.py")
        if "def main(argv: Sequence[str] | None = None) -> dict" in path.read_text()
    }
    programs = {name.removesuffix(".__main__") for name in programs}
    assert {bench.module for bench in BENCHES} == programs
    assert all(importlib.util.find_spec(bench.module) for bench in BENCHES)
