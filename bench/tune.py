"""Search for configs that are faster than the heuristic's on this device.

Run `python -m bench.tune --help`; bench/README.md explains the search.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
from jax.experimental import pallas as pl

import pallas_paged as pp
from bench.decode import peers
from bench.measuring import cli, kv_dtypes, shapes, timing
from bench.measuring.measure import Variant, measure_all, reason
from bench.measuring.options import PLAIN
from bench.measuring.report import table
from bench.measuring.shapes import Case, Shape, make_case
from bench.prefill import shapes as prefill_shapes
from pallas_paged.kernels.call import Sizes
from pallas_paged.kernels.device import HOPPER_SHARED_MEMORY, Device
from pallas_paged.kernels.mosaic_sm80 import heuristics as sm80
from pallas_paged.kernels.mosaic_sm90 import config as sm90_config
from pallas_paged.kernels.mosaic_sm90 import support
from pallas_paged.kernels.triton import config as triton_config

_SM_BYTES, _SM_THREADS = 228 << 10, 2048  # of Hopper
# Factors by which a step of the search changes a config: one field, or a trade between fields.
_STEPS: tuple[dict[str, float], ...] = (
    {"block_k": 2},
    {"block_k": 1 / 2},
    {"block_q": 2},
    {"block_q": 1 / 2},
    {"num_warps": 2},
    {"num_warps": 1 / 2},
    {"num_stages": 3 / 2},
    {"num_stages": 2 / 3},
    {"num_programs": 2},
    {"num_programs": 3 / 2},
    {"num_programs": 3 / 4},
    {"num_programs": 1 / 2},
    {"block_k": 2, "num_programs": 1 / 2},
    {"block_k": 1 / 2, "num_programs": 2},
    {"num_warps": 2, "num_programs": 1 / 2},
    {"num_warps": 1 / 2, "num_programs": 2},
    {"num_warps": 2, "block_q": 2},
    {"num_warps": 1 / 2, "block_q": 1 / 2},
    {"num_warps": 1 / 2, "block_q": 1 / 2, "num_programs": 2},
    {"num_stages": 3 / 2, "num_programs": 3 / 4},
    {"num_stages": 3 / 2, "block_k": 1 / 2},
    {"num_stages": 3 / 2, "num_programs": 1 / 2},
    {"num_stages": 2 / 3, "block_k": 2},
    {"num_consumers": 2},
    {"num_consumers": 1 / 2},
    {"num_q_stages": 2},
    {"num_q_stages": 1 / 2},
    {"num_warpgroups": 2, "block_q": 2, "num_programs": 1 / 2},
    {"num_warpgroups": 1 / 2, "block_q": 1 / 2, "num_programs": 2},
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """A kernel whose configs are searched.

    Attributes:
        call: the attention function.
        heuristic: returns the heuristic's config for `Sizes`.
        fits: whether an SM can hold `programs` programs of a config.
        shapes: the shapes to search for.
        tiny: a shape small enough for a CPU.
        ragged: a config depends on the number of query tokens and not on the page size.
    """

    call: Callable[..., Any]
    heuristic: Callable[..., Any]
    fits: Callable[[Any, int, Shape], bool]
    shapes: tuple[Shape, ...]
    tiny: Shape
    ragged: bool = False


def _triton_fits(config: Any, programs: int, shape: Shape) -> bool:
    rows = getattr(config, "block_q", shape.num_q_heads // shape.num_kv_heads)
    of_one = triton_config.most_shared_memory(
        config, rows=rows, head_dim=shape.head_dim, itemsize=shape.itemsize
    )
    if of_one > HOPPER_SHARED_MEMORY:  # the library would not take it from a file
        return False
    row_bytes = pl.next_power_of_2(shape.head_dim) * shape.itemsize
    tiles = max(1, config.num_stages - 1) * 2 * config.block_k * row_bytes
    return programs * tiles <= _SM_BYTES and programs * config.num_warps * 32 <= _SM_THREADS


def _mosaic_sm90_fits(config: Any, programs: int, shape: Shape) -> bool:
    group = shape.num_q_heads // shape.num_kv_heads
    needed = support.shared_memory(
        config, group=group, head_dim=shape.head_dim, kv_dtype=shape.kv_dtype
    )
    return programs * (needed + 1024) <= _SM_BYTES


def _mosaic_sm80_fits(config: Any, programs: int, shape: Shape) -> bool:
    sizes = {"head_dim": shape.head_dim, "itemsize": shape.itemsize}
    if isinstance(config, pp.MosaicSm80DecodeConfig):
        group = shape.num_q_heads // shape.num_kv_heads
        needed = sm80.decode_shared_memory(config, group=group, **sizes)
        return programs * (needed + 1024) <= _SM_BYTES
    # A thread has registers for 64 rows of a large head_dim, and takes up to 255 of them.
    if config.rows_per_warpgroup > 64 and shape.head_dim > 128:
        return False
    needed = sm80.ragged_shared_memory(config, **sizes)
    return config.num_warpgroups * programs <= 2 and programs * (needed + 1024) <= _SM_BYTES


_DECODE = Kernel(
    call=pp.paged_attention,
    heuristic=triton_config.decode_config,
    fits=_triton_fits,
    shapes=shapes.SHAPES,
    tiny=shapes.TINY,
)
_RAGGED = Kernel(
    call=pp.ragged_paged_attention,
    heuristic=triton_config.ragged_config,
    fits=_triton_fits,
    shapes=tuple(s for s in prefill_shapes.SHAPES if s.options == PLAIN),
    tiny=prefill_shapes.TINY,
    ragged=True,
)
KERNELS = {  # the class of a config chooses the implementation
    "decode": _DECODE,
    "ragged": _RAGGED,
    "mosaic_sm90_ragged": dataclasses.replace(
        _RAGGED, heuristic=sm90_config.ragged_config, fits=_mosaic_sm90_fits
    ),
    "mosaic_sm80_decode": dataclasses.replace(
        _DECODE, heuristic=sm80.decode_config, fits=_mosaic_sm80_fits
    ),
    "mosaic_sm80_ragged": dataclasses.replace(
        _RAGGED, heuristic=sm80.ragged_config, fits=_mosaic_sm80_fits
    ),
}


def num_sms() -> int:
    """Streaming multiprocessors of this device; 4 where there are none."""
    return Device.here().num_sms


def sizes_of(kernel: Kernel, shape: Shape) -> dict[str, int]:
    """The sizes of a shape from which a config follows."""
    sizes = {
        "num_q_heads": shape.num_q_heads,
        "num_kv_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_kv_len": shape.pages_per_seq * shape.page_size,
        "num_seqs": len(shape.seq_lens),
        "itemsize": shape.itemsize,
        "num_sms": num_sms(),
    }
    if kernel.ragged:
        sizes |= {"num_tokens": sum(shape.q_lens), "expected_seqs": len(shape.seq_lens)}
    else:
        sizes["page_size"] = shape.page_size
    return sizes


def heuristic_config(kernel: Kernel, shape: Shape) -> Any:
    """The heuristic's config for a shape."""
    return kernel.heuristic(Sizes(**sizes_of(kernel, shape)))


def neighbours(kernel: Kernel, config: Any, shape: Shape) -> list[Any]:
    """Valid configs one step away whose programs all fit on the device at once."""
    found: list[Any] = []
    for step in _STEPS:
        if not all(hasattr(config, field) for field in step):
            continue
        try:
            fields = {name: round(getattr(config, name) * factor) for name, factor in step.items()}
            near = dataclasses.replace(config, **fields)
        except (TypeError, ValueError):  # not a field, or a value out of range
            continue
        if near == config or near in found:  # small numbers round to one another
            continue
        if kernel.fits(near, math.ceil(near.num_programs / num_sms()), shape):
            found.append(near)
    return found


def variant(kernel: Kernel, config: Any, implementation: str | None) -> Variant:
    """The call with a config."""
    call = functools.partial(kernel.call, config=config)
    [variant] = peers.ours(call, implementation)
    return dataclasses.replace(variant, label=str(config))


def _times(case: Case, variants: list[Variant], iterations: int) -> list[float | None]:
    found = measure_all(case, lambda: variants, iterations)["variants"]
    return [
        (r["kernel_us"] or r["wall_us"])["median"] if r["status"] == "ok" else None for r in found
    ]


def search(
    kernel: Kernel, shape: Shape, *, implementation: str | None, seconds: float, iterations: int
) -> dict[str, Any]:
    """Step from the heuristic's config to better neighbours for about `seconds`.

    Returns:
        The `heuristic` and the best `config` with their times `heuristic_us` and `us`, measured
        again side by side, and all configs `tried` with their first times.

    Raises:
        RuntimeError: if the heuristic's config gives no right result.
    """
    deadline = time.perf_counter() + seconds
    case, heuristic = make_case(shape), heuristic_config(kernel, shape)
    make = functools.partial(variant, kernel, implementation=implementation)
    best = heuristic
    tried: dict[Any, float | None] = {}
    ahead = [best, *neighbours(kernel, best, shape)]
    while ahead and (not tried or time.perf_counter() < deadline):
        times = _times(case, [make(config) for config in ahead], max(1, iterations // 3))
        tried |= zip(ahead, times, strict=True)
        right = {config: us for config, us in tried.items() if us is not None}
        if not right:
            break
        best = min(right, key=right.__getitem__)
        ahead = [config for config in neighbours(kernel, best, shape) if config not in tried]
    before, after = _times(case, [make(heuristic), make(best)], iterations)
    if before is None:
        raise RuntimeError(f"{heuristic} gives no right result")
    return {
        "config_class": type(best).__name__,
        "sizes": sizes_of(kernel, shape),
        "heuristic": dataclasses.asdict(heuristic),
        "heuristic_us": before,
        "config": dataclasses.asdict(best),
        "us": before if after is None else after,
        "tried": [{"config": dataclasses.asdict(one), "us": us} for one, us in tried.items()],
    }


def read_entries(path: Path) -> list[dict[str, Any]]:
    """The entries of a tuning file, none if there is no file.

    Raises:
        ValueError: it is something else.
    """
    found = json.loads(path.read_text()) if path.exists() else []
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise ValueError("it is no list of entries")
    return found


def with_result(entries: list[dict[str, Any]], result: dict[str, Any]) -> list[dict[str, Any]]:
    """The entries of a tuning file with what `search` found, instead of an older one of its call.

    A call for which nothing was faster than the heuristic's config has no entry.
    """
    key = {"device": Device.here().kind}
    key |= {name: result[name] for name in ("config_class", "sizes")}
    others = [entry for entry in entries if not key.items() <= entry.items()]
    if result["us"] >= result["heuristic_us"]:
        return others
    found = {name: result[name] for name in ("config", "us", "heuristic_us")}
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    return [*others, key | found | {"jax": jax.__version__, "date": today}]


def _cells(result: dict) -> list[str]:
    if result["status"] != "ok":
        return [result["name"], *["-"] * 5]
    config = " ".join(f"{name}={n}" for name, n in result["config"].items() if n is not None)
    before, after = result["heuristic_us"], result["us"]
    times = [f"{before:.1f}", f"{after:.1f}", f"{before / after:.2f}"]
    return [result["name"], *times, config, str(len(result["tried"]))]


def progress(result: dict, seconds: float) -> str:
    """One line about the shape just searched."""
    why = [result["reason"]] if "reason" in result else []
    return ", ".join([*_cells(result), f"took {seconds:.0f} s", *why])


def markdown(run: dict) -> str:
    """The table and the provenance of its numbers."""
    header = ["shape", "heuristic us", "best us", "gain", "best config", "configs tried"]
    rows = [header, *map(_cells, run["shapes"])]
    return timing.page(run["meta"], table(rows))


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Search, print the table and return the raw numbers."""
    parser = cli.make_call_parser("bench.tune", __doc__)
    parser.add_argument("--kernel", choices=KERNELS, required=True)
    parser.add_argument("--kv-dtype", choices=kv_dtypes.NAMES, default="bf16", help="of K and V")
    parser.add_argument("--seconds", type=float, default=240.0, help="for all shapes together")
    text = "write faster configs into this file for PALLAS_PAGED_TUNING"
    parser.add_argument("--output", type=cli.output, help=text)
    parser.set_defaults(iterations=12)
    args = parser.parse_args(argv)
    kernel = KERNELS[args.kernel]
    selected = cli.select(parser, args.shapes, kernel.shapes, kernel.tiny)
    if not args.seconds > 0:
        parser.error(f"--seconds {args.seconds} must be more than 0")
    entries: list[dict[str, Any]] = []
    if args.output:
        try:
            entries = read_entries(args.output)
        except (OSError, ValueError, RecursionError) as error:
            parser.error(f"--output {args.output} is no tuning file: {error}")
    chosen = [kv_dtypes.with_dtype(shape, args.kv_dtype) for shape in selected]
    run: dict[str, Any] = {"meta": timing.describe_run(parser.prog, argv), "shapes": []}
    deadline = time.perf_counter() + args.seconds

    def measure(shape: Shape) -> dict:
        seconds = (deadline - time.perf_counter()) / (len(chosen) - len(run["shapes"]))
        found = {"name": shape.name, "status": "failed"}
        if seconds <= 0:
            return found | {"reason": "no time left"}
        try:
            result = search(
                kernel,
                shape,
                implementation=args.implementation,
                seconds=seconds,
                iterations=args.iterations,
            )
        except RuntimeError as error:
            return found | {"reason": reason(error)}
        if args.output:
            entries[:] = with_result(entries, result)
            # The file holds what other runs and cards have found: it is replaced in one step.
            written = args.output.with_name(f"{args.output.name}.new")
            written.write_text(cli.as_json(entries))
            written.replace(args.output)
        return found | {"status": "ok"} | result

    cli.measure_each(run["shapes"], chosen, measure, progress, run, args)
    print(markdown(run))
    return run


if __name__ == "__main__":
    main()
