"""Searches configs of a kernel on this device, from the heuristic on, and keeps the better ones.

Run `python -m bench.tune --help`; bench/README.md says how it searches.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import importlib.resources
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

import pallas_paged as pp
from bench import kv_dtypes, prefill_shapes, shapes, timing
from bench.measure import Variant, measure_all
from bench.options import PLAIN
from bench.report import table
from bench.shapes import Case, Shape, make_case, select_shapes
from pallas_paged.kernels import tuned
from pallas_paged.kernels.mosaic import config as mosaic_tuning
from pallas_paged.kernels.triton import config as tuning

TABLE = Path(str(importlib.resources.files("pallas_paged.kernels") / "tuned.json"))
LEAST_GAIN = 1.02
_SM_BYTES, _SM_THREADS = 228 << 10, 2048  # of Hopper
# Factors by which a step of the search changes a tile: one field, or some traded for each other.
_STEPS: tuple[dict[str, float], ...] = (
    {"block_k": 2},
    {"block_k": 1 / 2},
    {"block_q": 2},
    {"block_q": 1 / 2},
    {"num_warps": 2},
    {"num_warps": 1 / 2},
    {"num_stages": 3 / 2},
    {"num_stages": 2 / 3},
    {"programs_per_sm": 2},
    {"programs_per_sm": 3 / 2},
    {"programs_per_sm": 3 / 4},
    {"programs_per_sm": 1 / 2},
    {"block_k": 2, "programs_per_sm": 1 / 2},
    {"block_k": 1 / 2, "programs_per_sm": 2},
    {"num_warps": 2, "programs_per_sm": 1 / 2},
    {"num_warps": 1 / 2, "programs_per_sm": 2},
    {"num_warps": 2, "block_q": 2},
    {"num_warps": 1 / 2, "block_q": 1 / 2},
    {"num_warps": 1 / 2, "block_q": 1 / 2, "programs_per_sm": 2},
    {"num_stages": 3 / 2, "programs_per_sm": 3 / 4},
    {"num_stages": 3 / 2, "block_k": 1 / 2},
    {"num_stages": 3 / 2, "programs_per_sm": 1 / 2},
    {"num_stages": 2 / 3, "block_k": 2},
    {"num_consumers": 2},
    {"num_consumers": 1 / 2},
    {"num_q_stages": 2},
    {"num_q_stages": 1 / 2},
)

Tile = dict[str, int]  # a config with programs_per_sm in place of num_programs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """What is tuned: the call, its config, the heuristic that chooses it, and for what.

    Attributes:
      fits: whether an SM can hold so many programs of a config.
      ragged: a config depends on the number of query tokens, not on the page size.
      whole_device: `num_programs` counts those of all KV heads.
    """

    call: Callable[..., Any]
    config: type
    heuristic: Callable[..., Any]
    fits: Callable[[Any, int, Shape], bool]
    shapes: tuple[Shape, ...]
    tiny: Shape
    ragged: bool = False
    whole_device: bool = False

    def programs_at_once(self, shape: Shape) -> int:
        """Programs that one of `num_programs` stands for."""
        return 1 if self.whole_device else shape.num_kv_heads


def _triton_fits(config: Any, per_sm: int, shape: Shape) -> bool:
    row_bytes = tuning.next_power_of_2(shape.head_dim) * shape.itemsize
    held = max(1, config.num_stages - 1) * 2 * config.block_k * row_bytes
    return per_sm * held <= _SM_BYTES and per_sm * config.num_warps * 32 <= _SM_THREADS


def _mosaic_fits(config: Any, per_sm: int, shape: Shape) -> bool:
    group = shape.num_q_heads // shape.num_kv_heads
    needed = mosaic_tuning.shared_memory(
        config, group=group, head_dim=shape.head_dim, itemsize=shape.itemsize
    )
    return needed <= mosaic_tuning.shared_memory_limit(per_sm)


_DECODE = Kernel(
    call=pp.paged_attention,
    config=pp.DecodeConfig,
    heuristic=tuning.decode_config,
    fits=_triton_fits,
    shapes=shapes.SHAPES,
    tiny=shapes.TINY,
)
_RAGGED = Kernel(
    call=pp.ragged_paged_attention,
    config=pp.RaggedConfig,
    heuristic=tuning.ragged_config,
    fits=_triton_fits,
    shapes=tuple(s for s in prefill_shapes.SHAPES if s.options == PLAIN),
    tiny=prefill_shapes.TINY,
    ragged=True,
)
KERNELS = {  # as `tuned.KERNELS` names them; the kind of a config chooses the implementation
    "decode": _DECODE,
    "ragged": _RAGGED,
    "mosaic_decode": dataclasses.replace(
        _DECODE,
        config=mosaic_tuning.MosaicDecodeConfig,
        heuristic=mosaic_tuning.decode_config,
        fits=_mosaic_fits,
    ),
    "mosaic_ragged": dataclasses.replace(
        _RAGGED,
        config=mosaic_tuning.MosaicRaggedConfig,
        heuristic=mosaic_tuning.ragged_config,
        fits=_mosaic_fits,
        whole_device=True,
    ),
}


def num_sms() -> int:
    """Streaming multiprocessors of this device; some number where there are none."""
    return getattr(jax.devices()[0], "core_count", None) or 4


def static_key(kernel: Kernel, shape: Shape) -> dict[str, int]:
    """What a config may depend on."""
    key = {
        "num_q_heads": shape.num_q_heads,
        "num_kv_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_kv_len": shape.pages_per_seq * shape.page_size,
        "num_seqs": len(shape.seq_lens),
        "itemsize": shape.itemsize,
    }
    if kernel.ragged:
        key["num_tokens"] = sum(shape.asked)
    else:
        key["page_size"] = shape.page_size
    return key


def to_tile(kernel: Kernel, config: Any, shape: Shape) -> Tile:
    """The tile of a config."""
    fields = dataclasses.asdict(config)
    programs = fields.pop("num_programs") * kernel.programs_at_once(shape)
    del fields["fixed_split_size"]
    return fields | {"programs_per_sm": max(1, round(programs / num_sms()))}


def to_config(kernel: Kernel, tile: Tile, shape: Shape) -> Any:
    """The config of a tile.

    Raises:
      ValueError: if the kernel can't have it.
    """
    fields = {name: n for name, n in tile.items() if name != "programs_per_sm"}
    programs = tile["programs_per_sm"] * num_sms() // kernel.programs_at_once(shape)
    return kernel.config(num_programs=max(1, programs), **fields)


def neighbours(kernel: Kernel, tile: Tile, shape: Shape) -> list[Tile]:
    """Tiles a step away, without those of which an SM can't hold as many as they want."""
    found: list[Tile] = []
    for step in _STEPS:
        if not step.keys() <= tile.keys():
            continue
        near = tile | {name: round(tile[name] * factor) for name, factor in step.items()}
        per_sm = near["programs_per_sm"]
        if per_sm < 1 or near == tile or near in found:  # small numbers round to one another
            continue
        try:
            config = to_config(kernel, near, shape)
        except ValueError:
            continue
        if kernel.fits(config, per_sm, shape):
            found.append(near)
    return found


def variant(kernel: Kernel, config: Any, implementation: str | None) -> Variant:
    """The call with a config."""

    def attend(q, k, v, *rest):
        return kernel.call(
            q, k, v, *rest, sm_scale=1.0, implementation=implementation, config=config
        )

    return Variant(label=str(config), attend=attend)


def _times(case: Case, variants: list[Variant], iterations: int) -> list[float | None]:
    found = measure_all(case, lambda: variants, iterations)["variants"]
    return [
        (r["kernel_us"] or r["wall_us"])["median"] if r["status"] == "ok" else None for r in found
    ]


def search(
    kernel: Kernel, shape: Shape, *, implementation: str | None, seconds: float, iterations: int
) -> dict[str, Any]:
    """The best tile found in about so many seconds: steps from the best one while they help.

    Returns:
      `key`, `config` (a tile), its `us`, `heuristic_us`, and what was `tried` in us. The first two
      times are of a second measurement, side by side.

    Raises:
      RuntimeError: if the heuristic's config gives no right result.
    """
    deadline = time.perf_counter() + seconds
    case, key = make_case(shape), static_key(kernel, shape)
    heuristic = kernel.heuristic(**key, num_sms=num_sms())
    make = functools.partial(variant, kernel, implementation=implementation)
    best = to_tile(kernel, heuristic, shape)
    tried: dict[tuple[tuple[str, int], ...], float | None] = {}
    ahead = [best, *neighbours(kernel, best, shape)]
    while ahead and (not tried or time.perf_counter() < deadline):
        variants = [make(to_config(kernel, tile, shape)) for tile in ahead]
        times = _times(case, variants, max(1, iterations // 3))
        tried |= {tuple(t.items()): us for t, us in zip(ahead, times, strict=True)}
        right = [(us, tile) for tile, us in tried.items() if us is not None]
        if not right:
            break
        best = dict(min(right)[1])
        near = neighbours(kernel, best, shape)
        ahead = [tile for tile in near if tuple(tile.items()) not in tried]
    pair = [make(heuristic), make(to_config(kernel, best, shape))]
    before, after = _times(case, pair, iterations)
    if before is None:
        raise RuntimeError(f"{heuristic} gives no right result")
    return {
        "key": tuned.bucket(key),
        "config": best,
        "us": before if after is None else after,
        "heuristic_us": before,
        "tried": [{"config": dict(tile), "us": us} for tile, us in tried.items()],
    }


def merge(found: dict[str, Any], kernel: str, entries: Sequence[dict]) -> dict[str, Any]:
    """A device's table with new entries in place of older ones for their keys.

    Those that beat the heuristic by less than `LEAST_GAIN` leave the key to it.
    """
    keys = [entry["key"] for entry in entries]
    kept = [entry for entry in found.get(kernel, []) if entry["key"] not in keys]
    kept += [
        {
            "key": entry["key"],
            "config": entry["config"],
            "us": round(entry["us"], 2),
            "heuristic_us": round(entry["heuristic_us"], 2),
        }
        for entry in entries
        if entry["heuristic_us"] >= LEAST_GAIN * entry["us"]
    ]
    return found | {kernel: sorted(kept, key=lambda entry: sorted(entry["key"].items()))}


def _write(kernel: str, entries: Sequence[dict], meta: dict[str, Any]) -> None:
    devices = json.loads(TABLE.read_text())
    head = {"date": meta["date"], "jax": meta["jax"]}
    devices[meta["device"]] = merge(devices.get(meta["device"], {}) | head, kernel, entries)
    TABLE.write_text(json.dumps(devices, indent=1) + "\n")


def _row(name: str, entry: dict) -> list[str]:
    config = " ".join(f"{field}={n}" for field, n in entry["config"].items())
    gain = entry["heuristic_us"] / entry["us"]
    row = [name, f"{entry['heuristic_us']:.1f}", f"{entry['us']:.1f}", f"{gain:.2f}"]
    return [*row, config, str(len(entry["tried"]))]


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.tune", description=__doc__)
    parser.add_argument("--kernel", choices=KERNELS, required=True)
    parser.add_argument("--implementation", help="default: the best for the platform")
    parser.add_argument(
        "--shapes", nargs="+", default=[], metavar="TEXT", help="only shapes whose name has TEXT"
    )
    parser.add_argument(
        "--kv-dtype",
        choices=kv_dtypes.NAMES,
        default="bf16",
        help="of K and V; a config that is kept for one of one byte holds for both",
    )
    parser.add_argument("--seconds", type=float, default=240.0, help="for all shapes together")
    parser.add_argument("--iterations", type=int, default=12, help="timed runs of the final pair")
    parser.add_argument("--json", type=Path, help="write all that was tried here")
    parser.add_argument(
        "--write", action="store_true", help=f"keep what is better in {TABLE.name}, shape by shape"
    )
    options = parser.parse_args(argv)
    if options.iterations < 1:
        parser.error(f"--iterations {options.iterations} must be at least 1")
    if not options.seconds > 0:
        parser.error(f"--seconds {options.seconds} must be more than 0")
    kernel = KERNELS[options.kernel]
    if not select_shapes(options.shapes, kernel.shapes, kernel.tiny):
        names = ", ".join(repr(shape.name) for shape in (*kernel.shapes, kernel.tiny))
        parser.error(f"--shapes {' '.join(options.shapes)} matches none of {names}")
    if options.json and not options.json.parent.is_dir():
        parser.error(f"{options.json}: there is no folder {options.json.parent}")
    if options.write and jax.default_backend() != "gpu":
        parser.error("--write needs a GPU: without one there are no kernel times")
    return options


def main(argv: Sequence[str] | None = None) -> dict[str, dict]:
    """Searches, prints the table and returns the entries by shape."""
    argv = sys.argv[1:] if argv is None else argv
    options = _parse(argv)
    kernel, meta = KERNELS[options.kernel], timing.describe_run("bench.tune", argv)
    # Shapes with the same key would overwrite each other: the first one speaks for all.
    by_key: dict[tuple, Shape] = {}
    for plain in select_shapes(options.shapes, kernel.shapes, kernel.tiny):
        shape = kv_dtypes.with_dtype(plain, options.kv_dtype)
        key = tuned.bucket(static_key(kernel, shape))
        by_key.setdefault(tuple(key.items()), shape)
    deadline = time.perf_counter() + options.seconds
    entries: dict[str, dict] = {}
    for i, shape in enumerate(by_key.values()):
        seconds = (deadline - time.perf_counter()) / (len(by_key) - i)
        if seconds <= 0:
            print(f"no time left from {shape.name!r} on", file=sys.stderr, flush=True)
            break
        try:
            entries[shape.name] = search(
                kernel,
                shape,
                implementation=options.implementation,
                seconds=seconds,
                iterations=options.iterations,
            )
        except RuntimeError as error:
            print(f"{shape.name}: {error}", file=sys.stderr, flush=True)
            continue
        gc.collect()  # this shape's pages, before those of the next
        print(*_row(shape.name, entries[shape.name]), file=sys.stderr, flush=True)
        if options.write:
            _write(options.kernel, list(entries.values()), meta)
        if options.json:
            options.json.write_text(json.dumps({"meta": meta, "shapes": entries}, indent=1) + "\n")
    header = ["shape", "heuristic us", "best us", "gain", "best config", "configs tried"]
    print(table([header, *(_row(name, entry) for name, entry in entries.items())]))
    print(f"\n{timing.provenance(meta)}")
    return entries


if __name__ == "__main__":
    main()
