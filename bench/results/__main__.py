"""Write the tables and charts of bench/results and docs/results.md from its JSON.

Run `python -m bench.results` after a bench has written a JSON there. Numbers that README and docs
quote are written too; bench/results/quotes.py names them.
"""

from __future__ import annotations

import argparse
import re
from typing import Any

from bench.__main__ import find
from bench.measuring.report import table
from bench.results import quotes
from bench.results.pictures import CHARTS
from bench.results.store import FOLDER, Store, values
from bench.results.tables import TABLES

ROOT = FOLDER.parents[1]
_OPTIONAL = re.compile(r"<!-- if (\S+) -->\n(.*?)<!-- end -->\n", re.DOTALL)  # (run, text)


def markdown(run: dict[str, Any]) -> str:
    """The tables of a run."""
    command = run["meta"]["command"].split()
    if command[1] == "-m":
        return find(command[2]).markdown(run)
    meta = run["meta"]  # of another project: what its program printed
    rows = [["system", "output tokens/s", "seconds"]]
    rows += [[run["system"], f"{run['tokens_per_s']:.0f}", f"{run['wall_s']:.2f}"]]
    return f"{table(rows)}\n\n{meta['device']}, {meta['date']}.\nCommand: `{meta['command']}`\n"


def page(store: Store) -> str:
    """docs/results.md."""
    texts = {f"table_{name}": make(store) for name, make in TABLES.items()}
    texts |= {key: _body(markdown(run)) for key, run in store.items()}
    text = _OPTIONAL.sub(
        lambda part: part[2] if part[1] in store else "", (FOLDER / "page.md").read_text()
    )
    return text.format_map({**values(store), **texts})


def _body(text: str) -> str:
    """Tables without where they are from and what they say in the mean."""
    blocks = text.strip().split("\n\n")
    return "\n\n".join(x for x in blocks if "\nCommand: `" not in x and not x.startswith("- "))


def make(store: Store) -> dict[str, str]:
    """All files by their path in the repository, without those that quote numbers."""
    files = {f"bench/results/{key}.md": markdown(run) for key, run in store.items()}
    charts = {key: draw(store) for key, draw in CHARTS.items()}
    files |= {f"bench/results/{key}.svg": text for key, text in charts.items() if text}
    return files | {"docs/results.md": page(store)}


def main() -> None:
    """Write all files."""
    argparse.ArgumentParser(prog="bench.results", description=__doc__).parse_args()
    store = Store.load()
    for name, text in (make(store) | quotes.renewed(store, ROOT)).items():
        (ROOT / name).write_text(text)


if __name__ == "__main__":
    main()
