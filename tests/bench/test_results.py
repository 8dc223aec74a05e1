"""Results: every table, chart and number comes from the JSON of one run."""

import importlib.util
import re
from pathlib import Path

import pytest

from bench.__main__ import BENCHES, listing
from bench.results import quotes
from bench.results.__main__ import ROOT, make, page
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


def test_sections_of_runs_that_are_missing_are_left_out(store) -> None:
    name, section = "h100/cascade", "### A shared prefix, H100"
    assert section in page(store) and "<!-- if" not in page(store)
    assert section not in page(Store({key: run for key, run in store.items() if key != name}))


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


UNIT = r"(?:us|ms|s|microseconds?|milliseconds?|seconds?|minutes?|tokens/s|TFLOP/s|[GT]B/s|%|times)"
DIGITS = r"(\d[\d,]*(?:\.\d+)?)"
MEASURED = re.compile(
    rf"(?<![\w.`-]){DIGITS}(?:(?: to| and| or|,) {DIGITS})?[ \n]?{UNIT}(?![\w/`])"
)
CELL = re.compile(rf"(?<=\| )\**{DIGITS}\**(?= \|)")
# What is chosen, not measured, or is of a command on a CPU.
SETTINGS = (
    *("about 10 ms", "within 10 ms of waiting", "every 16 ms", "250 us times", "600 s for a"),
    *("more than 30 s", "closed 5 s after", "On two CPU cores"),
)


def numbers(before: str, block: str) -> list[tuple[int, str]]:
    """Place and text of the numbers in a paragraph or a table that look measured.

    Cells of a table do if its first row or the paragraph before it has a unit.
    """
    if any(words in block for words in SETTINGS) and "|" not in block:
        return []
    head = before + block.partition("\n")[0]
    cells = CELL.finditer(block) if re.search(rf"(?<![\w']){UNIT}\b", head) else ()
    return [
        (match.start(), number)
        for match in (*MEASURED.finditer(block), *cells)
        for number in match.groups()
        if number and not any(words in near(block, match) for words in SETTINGS)
    ]


def near(block: str, match: re.Match[str]) -> str:
    return " ".join(block[max(0, match.start() - 12) : match.end() + 12].split())


def unfounded(name: str, text: str) -> list[str]:
    """The numbers of a page that neither quote a result nor stand in a note that it links to."""
    sentences = [*quotes.quoted(name, text)]
    text = re.sub(r"```.*?```", lambda code: re.sub(r"\S", " ", code[0]), text, flags=re.DOTALL)
    found, before = [], ""
    for block in re.finditer(r"[^\n](?:(?!\n\n).)*", text, flags=re.DOTALL):
        links = re.findall(r"bench/notes/(\w+\.md)", block[0])
        notes = "".join((FOLDER.parent / "notes" / link).read_text() for link in links)
        for place, number in numbers(before, block[0]):
            place += block.start()
            noted = re.search(rf"(?<![\d.]){re.escape(number)}(?!\d|\.\d)", notes)
            if not noted and not any(start <= place < end for start, end in sentences):
                found.append(f"{name}:{text.count(chr(10), 0, place) + 1}: {number}")
        before = block[0] if "|" not in block[0] else ""
    return found


PAGES = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md"))]


def test_measured_numbers_of_readme_and_docs_come_from_a_result_or_a_linked_note() -> None:
    for name in {"README.md", *PAGES} - {"docs/results.md"}:
        assert unfounded(name, (ROOT / name).read_text()) == []


def test_quoted_numbers_are_those_of_the_json(store) -> None:
    for name, text in quotes.renewed(store, ROOT).items():
        assert (ROOT / name).read_text() == text, "run python -m bench.results"


def test_a_changed_digit_and_a_number_without_a_result_are_found(store, tmp_path) -> None:
    for name in quotes.QUOTES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    readme = (tmp_path / "README.md").read_text()
    changed = readme.replace("**360.2**", "**350.2**")
    (tmp_path / "README.md").write_text(changed)
    assert changed != readme and quotes.renewed(store, tmp_path)["README.md"] == readme
    invented = "A call takes 12 us, 3 times less.\n\n| shape | us |\n|---|---|\n| a | 4.5 |\n"
    assert len(unfounded("README.md", readme + "\n" + invented)) == 3
    with pytest.raises(ValueError, match="does not have the sentence"):
        unfounded("README.md", readme.replace("attention scales", "attention grows"))
