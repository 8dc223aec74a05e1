"""Time `mla_attention` beside FlashInfer's kernels: the shapes of bench.decode.mla.

Needs torch with CUDA and FlashInfer, which are timed as in bench.peers. bench/README.md has the
rules of timing.
"""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.decode import mla
from bench.decode.latents import SHAPES, TINY, LatentShape
from bench.decode.report import read_ceiling
from bench.measuring import calls, cli
from bench.measuring.measure import measure_floor
from bench.peers.__main__ import (
    PACKAGES,
    WORKSPACE_BYTES,
    Call,
    TorchCase,
    Variants,
    beside_torch,
    elsewhere,
    measure_peer,
)


class TorchLatents(TorchCase):
    """The data of a shape on the GPU, random normal bf16; V is a view of K."""

    def __init__(self, shape: LatentShape) -> None:
        super().__init__(shape)
        parts = self.q.tensor_split([shape.v_head_dim], dim=-1)
        self.q, self.q_pe = (part.contiguous() for part in parts)
        self.v = self.k[..., : shape.v_head_dim]

    def query(self, q: Any, token: int) -> Any:
        import torch

        return torch.cat([q[token], self.q_pe[token]], dim=-1)


def flashinfer(case: TorchLatents) -> Variants:
    """FlashInfer's wrapper, planned for each set of pages, by its FA3 and FA2 backends.

    Raises:
        ImportError: if FlashInfer is not installed.
    """
    import torch

    library: Any = importlib.import_module("flashinfer.mla")
    shape = case.shape
    int32 = functools.partial(torch.tensor, dtype=torch.int32)
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    latent_dim = case.v.shape[-1]
    parts = case.k.squeeze(1).tensor_split([latent_dim], dim=-1)
    latents, keys = (part.contiguous() for part in parts)
    cu_q_lens = int32([0, *itertools.accumulate(shape.q_lens)])

    def plan(backend: str, rows: Sequence[np.ndarray]) -> Any:
        wrapper = library.BatchMLAPagedAttentionWrapper(workspace, backend=backend)
        indptr = int32([0, *itertools.accumulate(map(len, rows))])
        tables = (indptr, torch.from_numpy(np.concatenate(rows)), int32(shape.seq_lens))
        sizes = (shape.num_q_heads, latent_dim, keys.shape[-1], shape.page_size)
        dtypes = (torch.bfloat16, torch.bfloat16)
        wrapper.plan(*(x.cuda() for x in (cu_q_lens, *tables)), *sizes, True, 1.0, *dtypes)
        return wrapper

    def make(backend: str) -> Call:
        wrappers = [plan(backend, rows) for rows in case.pages]
        return lambda q, index: wrappers[index].run(q, case.q_pe, latents, keys)

    for backend in ("fa3", "fa2"):
        yield backend, functools.partial(make, backend)


def markdown(run: dict) -> str:
    """The tables of `bench.decode.mla`, and the versions of the peer."""
    versions = ", ".join(f"{name} {run['meta'][name]}" for name in PACKAGES)
    return f"{mla.markdown(run)}- {versions}.\n"


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print the table and return the raw numbers."""
    parser = cli.make_call_parser("bench.peers.mla", __doc__)
    args = parser.parse_args(argv)
    shapes = cli.select(parser, args.shapes, SHAPES, TINY)
    with beside_torch("bench.peers.mla", argv) as (pool, meta):
        floors = [pool.submit(measure_floor, args.iterations).result()]
        run: dict[str, Any] = {"meta": meta, "floors": floors, "shapes": []}
        ours = {"ours": args.implementation}

        def measure_shape(shape: LatentShape) -> dict:
            results = elsewhere(pool, mla.measure_ours, shape, ours, args.iterations)
            results["flashinfer"] = measure_peer(TorchLatents(shape), flashinfer, args.iterations)
            found = cli.describe(shape) | {"results": results}
            return mla.with_limit(found, read_ceiling(run))

        progress = functools.partial(calls.progress, mla.NAMES)
        cli.measure_each(run["shapes"], shapes, measure_shape, progress, run, args)
    print(markdown(run))
    return run


if __name__ == "__main__":
    main()
