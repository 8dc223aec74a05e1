"""Summaries and tables of results that a GPU might have given."""

from pathlib import Path

import pytest

from bench.decode import mla
from bench.decode import report as decode_report
from bench.measuring import kv_dtypes
from bench.peers import __main__ as peers_torch
from bench.prefill import __main__ as prefill
from bench.serving import quality
from bench.serving import report as serving_report
from bench.serving.record import Record, Served, Usage
from bench.serving.requests import describe_trace, make_trace
from bench.steps import __main__ as decode_step
from bench.steps import gap
from tests.bench.fakes import FAILED, META, WRONG, ok, ours

GIB = 1 << 30
GOLDENS = Path(__file__).parent / "goldens"


def record(name: str, num_bytes: int, num_flops: int = 10**9, **results: dict) -> dict:
    return {"name": name, "num_bytes": num_bytes, "num_flops": num_flops, "results": results}


def one_byte(base: str, name: str, num_bytes: int, **results: dict) -> dict:
    """The record of one shape with int8 or fp8 K/V."""
    found = record(f"{base} {name}", num_bytes, **results)
    return found | {"kv_dtype": kv_dtypes.NAMES[name], "base": base}


@pytest.fixture
def decode_run() -> dict:
    """Two shapes, two options, and int8 and fp8 K/V of the first shape and of one more."""
    jax_op = ok(600)
    big = ours("mosaic", triton=310, mosaic=300) | {"jax_op": jax_op, "xla_gather": WRONG}
    small = ours("triton", triton=4, mosaic=3.2) | {"jax_op": ok(10), "xla_gather": FAILED}
    base = {"base": {"name": "big", "results": big}}
    capped = ours("mosaic", triton=310, mosaic=330) | {"jax_op": jax_op}
    floors = [
        {"num_bytes": size, "status": "ok", "kernel_us": {"median": us}}
        for size, us in ((GIB, 240.0), (GIB, 250.0), (1 << 20, 2.0), (GIB // 2, 150.0), (9, 60.0))
    ]
    return {
        "meta": META,
        "floors": floors,
        "shapes": [record("big", GIB, **big), record("small", 1 << 20, **small)],
        "options": [
            record("big soft_cap=50", GIB, **capped) | base,
            record("big fixed_split_size=512", GIB, triton=ok(341), mosaic=FAILED) | base,
        ],
        "one_byte": [
            one_byte("big", "int8", GIB // 2, ours=ok(180.0, error=4e-3), jax_op=ok(450.0)),
            one_byte("big", "fp8", GIB // 2, ours=ok(240.0), jax_op=FAILED),
            one_byte("more", "int8", 9, ours=ok(80.0)),
        ],
    }


@pytest.fixture
def prefill_run() -> dict:
    """A prompt, speculation, which reads more than it computes, and int8 K/V of the prompt."""
    prompt = {**ours("triton", triton=1000.0, mosaic=800.0), "cudnn": ok(800.0), "mha": WRONG}
    short = {**ours("triton", triton=500.0, mosaic=505.0), "mha": FAILED}
    short["cudnn"] = ok(500.0, num_flops=20 * 10**9)
    found = [record("prompt", 10**8, 4 * 10**11, **prompt), record("short", 10**9, 10**10, **short)]
    int8 = one_byte("prompt", "int8", 1, ours=ok(12))
    return {"meta": META, "shapes": found, "one_byte": [int8]}


@pytest.fixture
def mla_run() -> dict:
    """A shape that is bound by reads at 4 TB/s, and one that is bound by operations."""
    found = ok(80.0, "mosaic_gpu_v2")
    results = {"ours": found, "mosaic_sm90": found, "mosaic_sm80": FAILED, "xla": ok(900.0)}
    shapes = [record("reads", 300_000_000, 10**9, **results), record("operations", 1, 7 * 10**10)]
    shapes[1]["results"] = {"ours": ok(100.0, "mosaic_gpu_v2"), "flashinfer": ok(110.0)}
    floor = {"num_bytes": 4 * 10**9, "status": "ok", "kernel_us": {"median": 1000.0}}
    shapes = [mla.with_limit(shape, 4000.0) for shape in shapes]
    return {"meta": META, "floors": [floor], "shapes": shapes}


@pytest.fixture
def step_run() -> dict:
    kernels = [{"name": "gemm", "us": 75.0, "launches": 4.0}]
    kernels.append({"name": "paged_decode", "us": 25.0, "launches": 1.0})
    one = {"model": "1b", "case": "greedy", "num_seqs": 1, "context": 2100.0, "wall_us": 150.0}
    one |= {"kernel_us": 100.0, "kernels": kernels, "limit_us": 60.0, "kv_cache_dtype": "bfloat16"}
    one |= {"order": [("gemm", 75.0), ("paged_decode", 25.0)]}
    one |= {"parts_us": gap.times_of(kernels), "weight_bytes": 50e6, "kv_bytes": 10e6}
    return {"meta": META, "results": [one]}


@pytest.fixture
def serving_run() -> dict:
    usage = [Usage(time=float(i), live=10 * i, reserved=100, waits=i < 2) for i in range(5)]
    served = [Served(arrival=0.0, first_token=0.5, finish=4.5, num_tokens=9)] * 8
    extra = {"compilations": 0, "preemptions": 7, "cache_hit_rate": 0.25}
    same = dict(served=served, usage=usage, wall=5.0, capacity=100, extra=extra)
    counts = {"static": 1000, "engine": 2500}
    systems = {k: Record(**same, num_tokens=count).summarize() for k, count in counts.items()}
    return {
        "meta": META,
        "shape": "1b",
        "sizes": {"kv_gib": 2.0, "capacity": 65536, "max_len": 2048},
        "trace": describe_trace(make_trace(3, vocab_size=9, max_len=2048)),
        "systems": {"transformers": {"status": "failed", "reason": "no torch"}, **systems},
    }


@pytest.fixture
def torch_run() -> dict:
    """A decode shape, whose limit is bytes, and a prompt, whose limit is operations."""
    results = {"ours": ok(4.0), "flashinfer": ok(6.0, variant="x"), "sdpa": WRONG}
    shapes = [record("8x8", 2_000_000, 1, **results) | {"decode": True}]
    shapes.append(record("big", 1_000_000, 10**9, **results) | {"decode": False})
    meta = META | {"torch": "2.11.0", "nvidia-cudnn-cu13": "9", "flashinfer-python": None}
    return {"meta": meta, "shapes": shapes}


@pytest.fixture
def quality_run() -> dict:
    """Nats are per byte, and perplexity per token."""
    kv = {name: {"nats": 2.0, "top1": 1.0, "kl": 0.0} for name in quality.NAMES}
    kv["int8"] = {"nats": 2.1, "top1": 0.5, "kl": 0.01}
    found = {"checkpoint": "c", "dtype": "bfloat16", "window": 8, "kv": kv}
    found |= {"num_tokens": 10, "num_bytes": 40, "shape": "tiny"}
    return {"meta": META, "checkpoint": found, "random": found}


MARKDOWN = {
    "decode": decode_report.markdown,
    "prefill": prefill.markdown,
    "mla": mla.markdown,
    "torch": peers_torch.markdown,
    "serving": serving_report.markdown,
    "step": lambda run: decode_step.markdown(run, 1),
    "quality": quality.markdown,
}


@pytest.mark.parametrize("name", MARKDOWN)
def test_summaries_and_tables_are_those_on_record(name, request) -> None:
    """They were checked by hand. After a deliberate change read the new ones and keep them."""
    run = request.getfixturevalue(f"{name}_run")
    assert MARKDOWN[name](run) == (GOLDENS / f"{name}.md").read_text()
