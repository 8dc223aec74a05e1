"""Time `mla_attention` on pages of latents, beside the time that a GPU needs at least.

Run `python -m bench.decode.mla --help`; bench/README.md explains each number.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pallas_paged as pp
from bench.decode.latents import SHAPES, TINY, LatentShape, make_latents
from bench.decode.report import read_ceiling
from bench.measuring import calls, cli, kv_dtypes, timing
from bench.measuring.measure import Variant, compare, measure_floor

IMPLEMENTATIONS = ("mosaic_sm90", "mosaic_sm80", "xla")
NAMES = {
    "ours": "pallas_paged",
    **{name: f"pallas_paged {name}" for name in IMPLEMENTATIONS},
    "flashinfer": "FlashInfer",
    "limit": "limit",
}


def ours(implementation: str | None) -> list[Variant]:
    """`mla_attention`, called as a user calls it."""

    def attend(q, pages, _, block_tables, seq_lens, cu_q_lens=None, *, q_pe, k_scales=None):
        layer = pp.LayerKV(pages, k_scales=k_scales, v_head_dim=q.shape[2])
        return pp.mla_attention(
            *(q, q_pe, layer, block_tables, seq_lens, cu_q_lens),
            sm_scale=1.0,
            implementation=implementation,
        )

    return [Variant(label=implementation or "default", attend=attend, kv_layout="NHD")]


def measure_ours(
    shape: LatentShape, implementations: dict[str, str | None], iterations: int
) -> dict[str, dict]:
    """Measure one shape by some of our implementations, by the names of their results."""
    finders: dict[str, Callable[[], list[Variant]]] = {
        name: functools.partial(ours, implementation)
        for name, implementation in implementations.items()
    }
    return compare(make_latents(shape), finders, iterations)


def implementations(only: str | None) -> dict[str, str | None]:
    """Our implementations by the names of their results: None's choice and all, or only one."""
    return {"ours": only} if only else {"ours": None} | {name: name for name in IMPLEMENTATIONS}


def with_limit(shape: dict, gbps: float | None) -> dict:
    """The result of a shape with its limit: reads at this rate, or operations at the peak."""
    if not gbps:
        return shape
    us = max(shape["num_bytes"] / gbps / 1e3, shape["num_flops"] / calls.PEAK_TFLOPS / 1e6)
    limit = {"status": "ok", "kernel_us": {"median": us}}
    return shape | {"results": shape["results"] | {"limit": limit}}


def markdown(run: dict) -> str:
    """The table, the provenance of its numbers and the summary."""
    gbps = read_ceiling(run)
    words = f"at {gbps:.0f} GB/s" if gbps else "unknown without a floor"
    limit = f"Limit: the latents {words}, or all operations at {calls.PEAK_TFLOPS} TFLOP/s"
    return calls.markdown({"": run["shapes"]}, NAMES, run["meta"], limit)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print the table and return the raw numbers."""
    parser = cli.make_call_parser("bench.decode.mla", __doc__)
    kv_dtypes.add_argument(parser, "bf16")
    args = parser.parse_args(argv)
    selected = cli.select(parser, args.shapes, SHAPES, TINY)
    meta = timing.describe_run(parser.prog, argv)
    floor = measure_floor(args.iterations)
    run: dict[str, Any] = {"meta": meta, "floors": [floor], "shapes": []}

    def measure_shape(shape: LatentShape) -> dict:
        results = measure_ours(shape, implementations(args.implementation), args.iterations)
        return with_limit(cli.describe(shape) | {"results": results}, read_ceiling(run))

    shapes = [kv_dtypes.with_dtype(shape, name) for shape in selected for name in args.kv_dtypes]
    progress = functools.partial(calls.progress, NAMES)
    cli.measure_each(run["shapes"], shapes, measure_shape, progress, run, args)
    print(markdown(run))
    return run


if __name__ == "__main__":
    main()
