"""Time the library beside FlashInfer and torch: the shapes of bench.decode, and causal prefill.

Needs torch with CUDA; with FlashInfer installed, that is in the table too. Neither is a dependency.
bench/README.md has the rules of timing. A peer's calls are captured in a CUDA graph, and
torch.profiler (CUPTI) times the kernels of its replays; overlapping time (programmatic dependent
launch) counts once. A peer's `wall_us` is the time of a replay by CUDA events. The library is timed
as in bench.decode, in a process of its own, because JAX and torch would compete for the GPU's
memory and for CUPTI.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib
import importlib.metadata
import importlib.util
import itertools
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np

from bench.decode.layouts import measure_layouts
from bench.measuring import calls, cli, profiler, timing
from bench.measuring.measure import best, best_variant, checked, failed, reason, times_of_kernels
from bench.measuring.shapes import SHAPES, TINY, Shape, page_tables, uniform
from pallas_paged.pages.layout import KVLayout

LAYOUTS: tuple[KVLayout, ...] = ("NHD", "HND", "2NHD", "HPND")  # the default, others of peers
NAMES = {
    "ours": "pallas_paged",
    "best_layout": "pallas_paged, best layout",
    "flashinfer": "FlashInfer",
    "sdpa": "torch SDPA, dense K/V",
}
PREFILLS = (
    uniform(4, 4096, q_len=4096, name="prefill 4x4096"),
    uniform(1, 8192, q_len=8192, name="prefill 1x8192"),
    uniform(16, 1024, q_len=1024, name="prefill 16x1024"),
    uniform(8, 8192 + 512, q_len=512, name="prefill 8x512 after 8192"),
    uniform(1, 16384, q_len=16384, name="prefill 1x16384"),
    uniform(1, 16384 + 512, q_len=512, name="prefill 1x512 after 16384"),
)
PACKAGES = ("torch", "nvidia-cudnn-cu13", "flashinfer-python")
WORKSPACE_BYTES = 512 << 20  # for FlashInfer's partial states; more than any shape here needs

Call = Callable[[Any, int], Any]  # (q [T, Hq, D], index of the set of pages) -> out [T, Hq, D]
Variants = Iterator[tuple[str, Callable[[], Call]]]  # label, and the work before the clock starts


def is_decode(shape: Shape) -> bool:
    """Whether each sequence has one query."""
    return max(shape.q_lens) == 1


def page_lists(shape: Shape) -> list[list[np.ndarray]]:
    """Pages of each row of each set, those of `make_case`."""
    blocks = [-(-n // shape.page_size) for n in shape.seq_lens]
    tables, _ = page_tables(shape)
    return [[row[:n] for row, n in zip(table, blocks, strict=True)] for table in tables]


def ours(shape: Shape, implementation: str | None, iterations: int) -> dict[str, dict[str, Any]]:
    """The library's results with the default layout and with the best one, as peers have it.

    It runs in a process without torch.
    """
    found = measure_layouts(shape, LAYOUTS, [implementation], iterations)
    gc.collect()
    results = [result for by_name in found.values() for result in by_name.values()]
    return {"ours": results[0], "best_layout": best(results)}


class TorchCase:
    """The data of a shape on the GPU, random normal bf16."""

    def __init__(self, shape: Shape) -> None:
        import torch

        self.shape, self.pages = shape, page_lists(shape)
        rng = torch.Generator("cuda").manual_seed(0)
        options = {"generator": rng, "dtype": torch.bfloat16, "device": "cuda"}
        q_dims = (sum(shape.q_lens), shape.num_q_heads, shape.head_dim)
        self.q = torch.randn(q_dims, **options) * shape.head_dim**-0.5
        num_pages = sum(len(row) for rows in self.pages for row in rows)
        kv_dims = (num_pages, shape.num_kv_heads, shape.page_size, shape.head_dim)
        self.k, self.v = (torch.randn(kv_dims, **options) for _ in range(2))

    def query(self, q: Any, token: int) -> Any:
        """A token's query with all elements of K."""
        return q[token]

    def error(self, states: Sequence[Any]) -> float:
        """Relative L2 error of a few queries of the first and last call, against attention in f32.

        Args:
            states: the first query, then the output of every call.
        """
        import torch

        errors = []
        for i in {0, len(states) - 2}:
            wants, gots = [], []
            for token, row, length in self.shape.sample():
                pages = torch.from_numpy(self.pages[i % self.shape.num_sets][row]).long().cuda()
                dense = (x[pages].transpose(0, 1).flatten(1, 2) for x in (self.k, self.v))
                k, v = (x[:, :length].float() for x in dense)  # [Hkv, T, D]
                q = self.query(states[i], token).float().unflatten(0, (len(k), -1))
                logits = q @ k.mT  # [Hkv, G, T]
                wants.append((logits.softmax(-1) @ v).flatten(0, 1).double())
                gots.append(states[i + 1][token].double())
            want, got = torch.stack(wants), torch.stack(gots)
            errors.append(((got - want).norm() / want.norm()).item())
        return float(np.max(errors))


def flashinfer(case: TorchCase) -> Variants:
    """FlashInfer's wrappers, planned for each set of pages.

    Decode runs on tensor cores and on CUDA cores, with and without programmatic dependent launch;
    prefill runs by the FA2 and the FA3 backend.

    Raises:
        ImportError: if FlashInfer is not installed.
    """
    import torch

    library: Any = importlib.import_module("flashinfer")
    shape = case.shape
    int32 = functools.partial(torch.tensor, dtype=torch.int32)
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    last_lens = int32([(n - 1) % shape.page_size + 1 for n in shape.seq_lens])
    cu_q_lens = int32([0, *itertools.accumulate(shape.q_lens)])
    sizes = (shape.num_q_heads, shape.num_kv_heads, shape.head_dim, shape.page_size)
    options = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16, "sm_scale": 1.0}
    kvs = {"HND": (case.k, case.v)}
    kvs["NHD"] = tuple(x.transpose(1, 2).contiguous() for x in kvs["HND"])

    def plan(layout: str, kind: str, rows: Sequence[np.ndarray]) -> Any:
        indptr = int32([0, *itertools.accumulate(map(len, rows))])
        pages = (indptr, torch.from_numpy(np.concatenate(rows)).cuda(), last_lens)
        if is_decode(shape):
            wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
                workspace, layout, use_tensor_cores=kind == "tensor cores"
            )
            wrapper.plan(*pages, *sizes, **options)
        else:
            wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, layout, backend=kind)
            wrapper.plan(cu_q_lens, *pages, *sizes, causal=True, **options)
        return wrapper

    def make(layout: str, kind: str, pdl: bool) -> Call:
        wrappers = [plan(layout, kind, rows) for rows in case.pages]
        return lambda q, index: wrappers[index].run(q, kvs[layout], enable_pdl=pdl)

    kinds = ("tensor cores", "CUDA cores") if is_decode(shape) else ("fa2", "fa3")
    pdls = (True, False) if is_decode(shape) else (False,)
    for layout, kind, pdl in itertools.product(kvs, kinds, pdls):
        yield f"{kind} {layout}" + " PDL" * pdl, functools.partial(make, layout, kind, pdl)


def sdpa(case: TorchCase) -> Variants:
    """torch's scaled_dot_product_attention over contiguous K/V, by cuDNN and flash attention.

    Raises:
        ValueError: if the rows are not equally long.
    """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    shape, q_len, length = case.shape, case.shape.q_lens[0], case.shape.seq_lens[0]
    if len(set(shape.seq_lens)) > 1 or length % shape.page_size:
        raise ValueError("dense K/V need rows of one length, in whole pages")
    pages = torch.from_numpy(np.array(case.pages)).long().cuda()  # [sets, B, N]
    # [sets, B, Hkv, T, D]
    dense_k, dense_v = (x[pages].transpose(2, 3).flatten(3, 4) for x in (case.k, case.v))

    def make(backend: Any, **options: Any) -> Call:
        def call(q: Any, index: int) -> Any:
            q = q.unflatten(0, (-1, q_len)).transpose(1, 2)  # [B, Hq, q_len, D]
            with sdpa_kernel(backend):
                out = torch.nn.functional.scaled_dot_product_attention(
                    q, dense_k[index], dense_v[index], scale=1.0, enable_gqa=True, **options
                )
            return out.transpose(1, 2).flatten(0, 1)

        return call

    cudnn: dict[str, Any] = {"is_causal": not is_decode(shape)}
    flash = cudnn
    if 1 < q_len < length:
        from torch.nn.attention.bias import causal_lower_right

        # `is_causal` would align the mask to the oldest keys. cuDNN reads its mask from memory.
        mask = torch.ones(q_len, length, dtype=torch.bool, device="cuda").tril(length - q_len)
        cudnn, flash = {"attn_mask": mask}, {"attn_mask": causal_lower_right(q_len, length)}
    yield "cuDNN", functools.partial(make, SDPBackend.CUDNN_ATTENTION, **cudnn)
    yield "flash", functools.partial(make, SDPBackend.FLASH_ATTENTION, **flash)


def _kernels(run: Callable[[], Any], num_runs: int) -> list[profiler.Kernel]:
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(num_runs):
            run()
        torch.cuda.synchronize()
    # Copies and fills are not kernels and are left out, as for JAX. FlashInfer's names have
    # thousands of characters.
    return [
        (event.name[:160], event.time_range.start, event.time_range.end)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
        and not event.name.startswith(("Memcpy", "Memset"))
    ]


def measure(case: TorchCase, call: Call, iterations: int) -> dict[str, Any]:
    """Result of one variant: its error and, if that is small enough, its times per call."""
    import torch

    num_runs, num_calls = iterations + 2, case.shape.num_calls  # two more, which warm up
    sets = [i % case.shape.num_sets for i in range(num_calls)]

    def chain() -> list[Any]:  # each call's output is the next one's query
        return list(itertools.accumulate(sets, call, initial=case.q))

    chain()  # first-time work, such as loading kernels, can't be captured
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        states = chain()
    graph.replay()
    result = checked(case.error(states))
    if result["status"] != "ok":
        return result
    events = [torch.cuda.Event(enable_timing=True) for _ in range(num_runs + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    walls = [1e3 * a.elapsed_time(b) / num_calls for a, b in itertools.pairwise(events)]
    result["wall_us"] = timing.spread(walls[2:])
    try:
        kernels = _kernels(graph.replay, num_runs)
        runs = profiler.split_runs(profiler.own_times(kernels), num_runs)
    except Exception as cause:  # perhaps no CUPTI; the replay's time is still valid
        return result | {"kernel_us": None, "reason": reason(cause)}
    return result | times_of_kernels(runs[2:], num_calls)


def measure_peer(case: TorchCase, find: Callable[..., Variants], iterations: int) -> dict:
    """Result of a peer's best variant; an exception becomes the reason."""
    results = []
    try:
        for label, make in find(case):
            try:
                result = measure(case, make(), iterations)
            except Exception as error:
                result = failed(error)
            results.append({"variant": label} | result)
            gc.collect()
    except Exception as error:
        return failed(error)
    return best_variant(results)


def measure_shape(shape: Shape, args: argparse.Namespace, pool: ProcessPoolExecutor) -> dict:
    """Measure one shape by all libraries; ours runs in `pool`."""
    results = elsewhere(pool, ours, shape, args.implementation, args.iterations)
    case = TorchCase(shape)
    for name, find in (("flashinfer", flashinfer), ("sdpa", sdpa)):
        results[name] = measure_peer(case, find, args.iterations)
    return cli.describe(shape) | {"decode": is_decode(shape), "results": results}


def elsewhere(
    pool: ProcessPoolExecutor, measure_ours: Callable[..., dict[str, dict]], *args: Any
) -> dict[str, dict]:
    """The library's results, from a process of the pool."""
    import torch

    torch.cuda.empty_cache()  # JAX may need the memory of the previous shape
    try:
        return pool.submit(measure_ours, *args).result()
    except Exception as error:
        return {"ours": failed(error)}


def markdown(run: dict) -> str:
    """A table for decode, one for prefill, and the provenance of their numbers."""
    decode, prefill = ([s for s in run["shapes"] if s["decode"] is one] for one in (True, False))
    versions = ", ".join(f"{name} {run['meta'][name]}" for name in PACKAGES)
    return calls.markdown(
        {"Decode": decode, "Causal prefill": prefill},
        NAMES,
        run["meta"],
        "Ours: CUPTI through JAX. Peers: torch.profiler (CUPTI) over replays of a CUDA graph",
        versions,
    )


@contextlib.contextmanager
def beside_torch(
    module: str, argv: Sequence[str] | None
) -> Iterator[tuple[ProcessPoolExecutor, dict[str, Any]]]:
    """A process for the library, and the provenance of a run of `python -m module`.

    Raises:
        SystemExit: there is no torch, or no GPU that it can use.
    """
    if importlib.util.find_spec("torch") is None:
        raise SystemExit(f"error: {module} needs torch, which is not installed")
    import torch

    if not torch.cuda.is_available():
        raise SystemExit(f"error: {module} needs an NVIDIA GPU that torch can use")
    torch.set_float32_matmul_precision("highest")  # of the reference
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # our process shares the GPU
    installed = {found.name: found.version for found in importlib.metadata.distributions()}
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        argv = sys.argv[1:] if argv is None else argv  # of this process
        meta = pool.submit(timing.describe_run, module, argv).result()
        yield pool, meta | {name: installed.get(name) for name in PACKAGES}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print the tables and returns the raw numbers."""
    parser = cli.make_call_parser("bench.peers", __doc__)
    args = parser.parse_args(argv)
    shapes = cli.select(parser, args.shapes, (*SHAPES, *PREFILLS), TINY)
    with beside_torch("bench.peers", argv) as (pool, meta):
        run: dict[str, Any] = {"meta": meta, "shapes": []}
        measure_one = functools.partial(measure_shape, args=args, pool=pool)
        progress = functools.partial(calls.progress, NAMES)
        cli.measure_each(run["shapes"], shapes, measure_one, progress, run, args)
    print(markdown(run))
    return run


if __name__ == "__main__":
    main()
