"""The table of docs/attention.md of what each implementation can do, made from `why_not`.

`python -m tests.support.implementations` writes it into the page.
"""

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from pallas_paged.kernels.families import FAMILIES
from pallas_paged.kernels.family import Family
from tests.support.devices import A100
from tests.support.static_calls import DECODE, PREFILL

PAGE = Path(__file__).parents[2] / "docs" / "attention.md"
BEGIN, END = "<!-- made by tests.support.implementations -->\n", "<!-- end -->\n"
CAPABILITIES = ("8.0", "8.6", "8.9", "9.0", "10.0", "12.0")
FLOATS, BYTES = ("float32", "bfloat16", "float16"), ("int8", "float8_e4m3fn")
SHORT = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float8_e4m3fn": "fp8"}
JAX = {"triton": "with the Triton lowering", "mosaic_sm90": "0.11", "mosaic_sm80": "0.11"}


def head_dims(takes: Callable[[int], bool]) -> str:
    """The head_dims up to 512 that are taken, in words."""
    taken = [n for n in range(1, 513) if takes(n)]
    for step in (1, 2, 4, 8, 16, 32):
        if taken == list(range(step, taken[-1] + 1, step)):
            return f"1 to {taken[-1]}" if step == 1 else f"multiples of {step} to {taken[-1]}"
    return ", ".join(map(str, taken))


def names(taken: Sequence[str]) -> str:
    return ", ".join(SHORT.get(x, x) for x in taken)


def row(family: Family) -> list[str]:
    """The cells of a family: where it runs, and what it takes on the one with most memory."""

    def takes(call: Any, **changes: Any) -> bool:
        dtypes = {k: jnp.dtype(v) for k, v in changes.items() if k.endswith("dtype")}
        return family.why_not(replace(call, **changes | dtypes)) is None

    device = {c: replace(A100, compute_capability=c) for c in CAPABILITIES}
    found = [c for c in CAPABILITIES if takes(DECODE, device=device[c])]
    on = dict(device=max((device[c] for c in found), key=lambda x: x.shared_memory))
    rest = [c for c in found if takes(DECODE, device=device[c], kv_dtype="float8_e4m3fn")]
    where = ", ".join(found) + (f" (fp8: {', '.join(rest)})" if rest != found else "")
    floats = [x for x in FLOATS if takes(DECODE, **on, dtype=x, kv_dtype=x)]
    some = dict(on, dtype="bfloat16")
    pages = [x for x in BYTES if takes(DECODE, **some, kv_dtype=x)]
    cells = [f"`{family.name!r}`".replace("'", '"'), where, JAX[family.name], names(floats)]
    cells.append(f"of q's dtype, {names(pages)}")
    for call in (DECODE, PREFILL):
        by_pages = {
            x: head_dims(lambda n, x=x, call=call: takes(call, **some, kv_dtype=x, head_dim=n))
            for x in ("bfloat16", *pages)
        }
        texts = []
        for text, several in itertools.groupby(by_pages, by_pages.__getitem__):
            kinds = list(several)
            is_all = len(kinds) == len(by_pages)
            texts.append(text if is_all or kinds == ["bfloat16"] else f"{names(kinds)}: {text}")
        if call is PREFILL:
            texts[0] += "".join(
                f", {k} with V of {v} in pages of q's dtype"
                for k, v in family.v_head_dims
                if takes(call, **on, head_dim=k, v_head_dim=v)
            )
        sizes = [1 << i for i in range(9) if takes(call, **on, page_size=1 << i)]
        cells.append("; ".join(texts) + f"; pages from {sizes[0]} token{'s' * (sizes[0] > 1)}")
    return [*cells, latents(takes, on)]


def latents(takes: Callable[..., bool], on: dict[str, Any]) -> str:
    """The cell of calls on latents of 512 elements, and rotary keys of 64."""
    sizes = dict(num_kv_heads=1, head_dim=512, rope_dim=64)
    texts = []
    for call in (replace(DECODE, **sizes), replace(PREFILL, **sizes)):
        floats = [x for x in FLOATS if takes(call, **on, dtype=x, kv_dtype=x)]
        pages = [x for x in BYTES if takes(call, **on, kv_dtype=x)]
        tokens = [1 << i for i in range(9) if takes(call, **on, page_size=1 << i)]
        texts.append(f"{names([*floats, *pages])}; pages from {tokens[0]}" if floats else "-")
    decode, ragged = texts
    return decode if decode == ragged else f"decode: {decode}; ragged: {ragged}"


def table() -> str:
    """The table, as if this JAX had all kernels."""
    head = [
        "`implementation`", "compute capability", "JAX", "q", "pages", "head_dim of decode",
        "head_dim of ragged calls", "latents",
    ]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for family in FAMILIES.values():
            patch.setattr(type(family), "why_not_jax", lambda self: None)
        rows = [head, ["---"] * len(head), *map(row, FAMILIES.values())]
    rows.append(['`"xla"`', "any device", "any", names(FLOATS), f"of q's dtype, {names(BYTES)}"])
    rows[-1] += ["1 to 512; pages from 1 token"] * 2 + [f"{names([*FLOATS, *BYTES])}; pages from 1"]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def with_table(text: str) -> str:
    """The page with the table between its marks."""
    marks = re.escape(BEGIN), re.escape(END)
    pattern = re.compile(rf"(?<={marks[0]}).*?(?={marks[1]})", re.DOTALL)
    return pattern.sub(lambda _: table(), text)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
