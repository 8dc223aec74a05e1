"""Bytes that a decode step on many devices reads and sends: on paper, and in its program.

Run `python -m bench.parallel.programs --help`. It needs no GPU: the programs are for CPUs, as many
as these variables make:

    XLA_FLAGS=--xla_force_host_platform_device_count=16 JAX_PLATFORMS=cpu
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_paged as pp
from bench.measuring import cli, timing
from bench.measuring.report import table_of
from bench.parallel.model import Collective, Rates, decode_step
from bench.serving.models import SHAPES
from models.decoder import Decoder, ModelConfig, engine_model
from models.decoder.sharding import config_on
from pallas_paged.attention import context_parallel as cp
from pallas_paged.pages.sharding import TENSOR_AXIS

_PAGE_SIZE = 16
_COMPILED_LAYERS = 2  # all are alike
_RATES = Rates()
# (tensor, context): up to 2 hosts of 8 devices.
_MESHES = ((1, 1), (2, 1), (4, 1), (8, 1), (16, 1), (8, 2), (4, 2), (1, 2), (1, 8))
_ITEM_BYTES = {"f32": 4, "u32": 4, "s32": 4, "bf16": 2, "f16": 2, "u16": 2, "s8": 1, "u8": 1}
_COLLECTIVE = re.compile(
    r"= (\(?\w+\[.*?) (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)"
    r"(-start)?\(.*"
)


def compiled_collectives(
    config: ModelConfig, *, num_seqs: int, length: int, tensor: int = 1, context: int = 1
) -> Counter[Collective]:
    """Compile the step of `decode_step` in f32, and count the collectives of its program.

    Raises:
        ValueError: there are fewer devices than `tensor * context`.
    """
    devices = jax.devices()
    if len(devices) < tensor * context:
        raise ValueError(f"{tensor=} * {context=} must be at most {len(devices)}, the devices here")
    grid = np.array(devices[: tensor * context]).reshape(context, tensor)
    mesh = Mesh(grid, (cp.CONTEXT_AXIS, TENSOR_AXIS), axis_types=(AxisType.Auto,) * 2)
    config = config_on(config, tensor)
    decoder = nnx.eval_shape(lambda: Decoder(config, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    model: Any
    model, params = engine_model(decoder)

    def of(dtype: Any, shape: tuple[int, ...], spec: P) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    def weight(path: tuple[Any, ...], x: Any, spec: P) -> Any:
        both = any(getattr(key, "key", None) == "qkv_proj" for key in path)
        axes = TENSOR_AXIS if both else (TENSOR_AXIS, cp.CONTEXT_AXIS)
        return of(x.dtype, x.shape, P(*(axes if name == TENSOR_AXIS else None for name in spec)))

    weights = jax.tree_util.tree_map_with_path(weight, params, model.param_specs(params))
    width = -(-length // _PAGE_SIZE)
    num_pages = -(-num_seqs * width // context) * context
    pages_shape = (num_pages, _PAGE_SIZE, config.num_kv_heads, config.head_dim)
    pages = of(jnp.float32, pages_shape, P(cp.CONTEXT_AXIS, None, TENSOR_AXIS))
    layers = (pp.LayerKV(k_pages=pages, v_pages=pages),) * config.num_layers
    integers = [of(jnp.int32, shape, P()) for shape in [(num_seqs,)] * 3 + [(num_seqs, width)]]

    def step(weights: Any, layers: Any, tokens: Any, lens: Any, slots: Any, tables: Any) -> Any:
        local = cp.local_pages(tables, lens, page_size=_PAGE_SIZE, mesh=mesh)

        def attend(q: Any, k: Any, v: Any, layer: Any, *, sliding_window: int | None) -> Any:
            if context > 1:
                layer = cp.write_kv(layer, k, v, slots, mesh=mesh)
                return cp.paged_attention(q, layer, local, mesh=mesh, shard_heads=True), layer
            layer = pp.write_kv(layer, k, v, slots)
            return pp.paged_attention(q, layer, tables, lens), layer

        hidden, layers = model(weights, tokens, lens - 1, attend, layers)
        return jnp.argmax(model.logits(weights, hidden), axis=-1), layers

    program = jax.jit(step, donate_argnums=1).lower(weights, layers, *integers).compile()
    return read_collectives(program.as_text() or "", tensor * context)


def read_collectives(hlo: str, num_devices: int) -> Counter[Collective]:
    """Count the collectives in the text of a compiled program; one in a loop counts once."""
    found: Counter[Collective] = Counter()
    for match in _COLLECTIVE.finditer(hlo):
        results = re.findall(r"(\w+)\[([\d,]*)\]", match[1])
        if match[3] and match[2] == "all-gather":  # of the operands, and of the results
            results = results[len(results) // 2 :]
        num_bytes = [
            _ITEM_BYTES[dtype] * math.prod(int(n) for n in dims.split(",") if n)
            for dtype, dims in results
        ]
        found[Collective(match[2], sum(num_bytes), _group_size(match[0], num_devices))] += 1
    return found


def _group_size(line: str, num_devices: int) -> int:
    """Return how many devices of a collective exchange their parts with one another."""
    if by_axes := re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", by_axes[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", by_axes[2]))
    if by_shape := re.search(r"replica_groups=\[\d+,(\d+)\]<=", line):
        return int(by_shape[1])
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    return listed[1].count(",") + 1 if listed else num_devices


def measure(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the numbers of a model on every mesh that can share it."""
    found = []
    for num_seqs in args.rows:
        for tensor, context in _MESHES:
            config = SHAPES[name].config
            sizes = dict(num_seqs=num_seqs, length=args.length, tensor=tensor, context=context)
            try:
                step = decode_step(config, **sizes)
            except ValueError as e:
                print(f"{name}, {tensor} x {context}: {e}", file=sys.stderr)
                continue
            found.append(
                {
                    "model": name,
                    **sizes,
                    "weight_bytes": step.weight_bytes,
                    "kv_bytes": step.kv_bytes,
                    "collectives": [
                        asdict(one) | {"count": count} for one, count in step.collectives.items()
                    ],
                    "read_us": step.read_us(_RATES),
                    "collectives_us": step.collectives_us(_RATES),
                    "limit_us": step.limit_us(_RATES),
                    "with_latency_us": step.limit_us(
                        replace(_RATES, collective_us=args.collective_us)
                    ),
                    "as_compiled": _as_compiled(config, sizes),
                }
            )
    return found


def _as_compiled(config: ModelConfig, sizes: dict[str, int]) -> bool | None:
    """Return whether the program has the collectives of the paper; None without the devices."""
    if len(jax.devices()) < sizes["tensor"] * sizes["context"]:
        return None
    config = replace(config, num_layers=_COMPILED_LAYERS)
    paper = decode_step(config, itemsize=4, **sizes)
    compiled = compiled_collectives(config, **sizes)
    if compiled != paper.collectives:
        print(f"{sizes}: {compiled} in the program, {paper.collectives}", file=sys.stderr)
    return compiled == paper.collectives


def markdown(run: dict[str, Any]) -> str:
    """Return the table and where its numbers come from."""
    columns = {
        "model, rows x tokens": lambda x: f"{x['model']}, {x['num_seqs']} x {x['length']}",
        "tensor x context": lambda x: f"{x['tensor']} x {x['context']}",
        "weights MB": lambda x: f"{x['weight_bytes'] / 1e6:.0f}",
        "K/V MB": lambda x: f"{x['kv_bytes'] / 1e6:.0f}",
        "read us": lambda x: f"{x['read_us']:.0f}",
        "collectives": lambda x: (
            " + ".join(f"{c['count']} {c['kind']}" for c in x["collectives"]) or "-"
        ),
        "MB each": lambda x: (
            " + ".join(f"{c['num_bytes'] / 1e6:.3f}" for c in x["collectives"]) or "-"
        ),
        "sent us": lambda x: f"{x['collectives_us']:.0f}",
        "limit us": lambda x: f"{x['limit_us']:.0f}",
        f"with {run['collective_us']:g} us a collective": lambda x: f"{x['with_latency_us']:.0f}",
        "program": lambda x: {True: "the same", False: "DIFFERENT", None: "-"}[x["as_compiled"]],
    }
    rates = f"Of each device: {_RATES.read:.0f} GB/s read, {_RATES.link:.0f} GB/s sent to others of"
    rates += f" its host, {_RATES.network:.0f} GB/s sent to other hosts. A host has 8 devices."
    compiled = f"Programs have {_COMPILED_LAYERS} layers in f32 and run on some of"
    compiled += (
        f" {run['num_devices']} devices; their collectives are compared with those on paper."
    )
    return timing.page(run["meta"], table_of(run["results"], columns), rates, compiled)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Count, print the table and return the raw numbers."""
    parser = cli.make_parser("bench.parallel.programs", __doc__)
    add, positive = parser.add_argument, cli.at_least(1)
    add("--shapes", nargs="+", choices=SHAPES, default=["1b", "8b", "qwen3-32b"])
    add("--rows", nargs="+", type=positive, default=[1, 64], help="sequences that decode together")
    add("--length", type=positive, default=2048, help="tokens of each")
    add("--collective-us", type=float, default=20.0, help="time of a collective without data")
    args = parser.parse_args(argv)
    run: dict[str, Any] = {
        "meta": timing.describe_run(parser.prog, argv),
        "collective_us": args.collective_us,
        "num_devices": len(jax.devices()),
        "results": [],
    }
    for name in args.shapes:
        run["results"] += measure(name, args)
        cli.write_json(args.json, run)
    print(markdown(run))
    return run


if __name__ == "__main__":
    main()
