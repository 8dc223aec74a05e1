"""Time the layers of a decoder between two attentions beside the time to read their weights.

Run `python -m bench.between_attentions --help`; bench/README.md explains the numbers.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.decode.report import read_ceiling
from bench.measuring import cli, timing
from bench.measuring.measure import attempt, call_times, checked, failed, measure_floor
from bench.measuring.report import number, progress_of_limits, table_of_limits
from pallas_paged.decoder.between_attentions import BlockWeights, Residual, between_attentions

NAMES = {"ours": "pallas_paged", "mosaic_sm90": "pallas_paged mosaic_sm90", "xla": "XLA"}
_BYTES, _MAX_LAYERS = 2**31, 16  # of the weights of a run
_EPS = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerShape:
    """Layers of a model, and rows."""

    model: str
    num_rows: int
    attended_size: int  # A
    size: int  # E
    hidden_size: int  # F
    out_size: int  # N

    @property
    def name(self) -> str:
        sizes = (self.attended_size, self.size, self.hidden_size, self.out_size)
        return f"{self.model} {self.num_rows} rows {'/'.join(map(str, sizes))}"

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights of a layer."""
        return 2 * self.size * (self.attended_size + 3 * self.hidden_size + self.out_size)

    @property
    def num_layers(self) -> int:
        """Layers of a run, each with weights of its own."""
        return max(2, min(_MAX_LAYERS, _BYTES // self.num_bytes))


def _shapes(model: str, *sizes: int, rows: Sequence[int] = (1, 8, 64)) -> list[LayerShape]:
    names = ("attended_size", "size", "hidden_size", "out_size")
    fields: Any = dict(zip(names, sizes, strict=True))
    return [LayerShape(model=model, num_rows=n, **fields) for n in rows]


TINY = _shapes("tiny", 256, 128, 256, 384, rows=(2,))[0]
SHAPES = (
    *_shapes("Qwen3-0.6B", 2048, 1024, 3072, 4096),
    *_shapes("Qwen3-1.7B", 2048, 2048, 6144, 4096),
    *_shapes("Qwen3-4B", 4096, 2560, 9728, 6144),
    *_shapes("Qwen3-14B", 5120, 5120, 17408, 7168),
    *_shapes("Qwen3-32B", 8192, 5120, 25600, 10240),
    *_shapes("Qwen2.5-7B", 3584, 3584, 18944, 4608),
    *_shapes("Llama-1B", 2048, 2048, 8192, 3072),
    *_shapes("Llama-3B", 3072, 3072, 8192, 5120),
    *_shapes("Llama-8B", 4096, 4096, 14336, 6144),
    *_shapes("Phi-4", 5120, 5120, 17920, 7680),
)


def _inputs(shape: LayerShape) -> tuple[jax.Array, jax.Array, list[BlockWeights]]:
    """Outputs of attention, the residual, and the weights of each layer."""
    size = shape.size
    sizes = {
        "o": (size, shape.attended_size),
        "gate_up": (shape.hidden_size, 2, size),
        "down": (size, shape.hidden_size),
        "qkv": (shape.out_size, size),
    }

    @functools.partial(jax.jit, static_argnums=1)
    def normal(key: jax.Array, sizes: tuple[int, ...], scale: float) -> jax.Array:
        return (jax.random.normal(key, sizes) * scale).astype(jnp.bfloat16)

    def layer(seed: int) -> BlockWeights:
        keys = jax.random.split(jax.random.key(seed, impl="rbg"), len(sizes))
        weights = {
            name: normal(key, shape, shape[-1] ** -0.5)
            for key, (name, shape) in zip(keys, sizes.items(), strict=True)
        }
        ones = jnp.ones(size, jnp.bfloat16)
        return BlockWeights(mlp_norm=ones, out_norm=ones, **weights)

    keys = jax.random.split(jax.random.key(1000, impl="rbg"))
    rows = (
        normal(key, (shape.num_rows, n), 1.0)
        for key, n in zip(keys, (shape.attended_size, size), strict=True)
    )
    return *rows, [layer(i) for i in range(shape.num_layers)]


def _reference(attended: jax.Array, x: jax.Array, w: BlockWeights) -> jax.Array:
    """Return the product for the next attention, in f32."""
    attended, x, w = jax.tree.map(lambda a: a.astype(jnp.float32), (attended, x, w))
    with jax.default_matmul_precision("highest"):
        how: Any = dict(eps=_EPS, implementation="xla")
        return between_attentions(attended, Residual(x=x), w, **how)[1]


def _measure(implementation: Any, inputs: Any, iterations: int) -> dict[str, Any]:
    """The error of an implementation and, if that is small enough, its times per layer."""

    @jax.jit  # traced and lowered once for all layers
    def run(attended: jax.Array, residual: Residual, w: BlockWeights) -> tuple[Any, jax.Array]:
        how: Any = dict(eps=_EPS, implementation=implementation)
        return between_attentions(attended, residual, w, **how)[:2]

    @jax.jit
    def chain(attended: jax.Array, x: jax.Array, layers: list[BlockWeights]) -> list[jax.Array]:
        residual, outs = Residual(x=x), []
        for w in layers:
            residual, out = run(attended, residual, w)
            outs.append(out)
        return outs

    compiled = chain.lower(*inputs).compile()
    attended, x, layers = inputs
    want = np.asarray(jax.jit(_reference)(attended, x, layers[0]), np.float64)
    got = np.asarray(compiled(*inputs)[0]).astype(np.float64)
    result = checked(float(np.linalg.norm(got - want) / np.linalg.norm(want)))
    if result["status"] != "ok":
        return result
    return result | call_times(compiled, inputs, iterations, len(layers))


def measure(
    shape: LayerShape, names: Sequence[str], gbps: float | None, iterations: int
) -> dict[str, Any]:
    """Measure one shape by these implementations."""
    inputs, results = _inputs(shape), {}
    for name in names:
        result = attempt(_measure, None if name == "ours" else name, inputs, iterations)
        results[name] = failed(result) if isinstance(result, Exception) else result
    limit = shape.num_bytes / gbps / 1e3 if gbps else None
    found = {"name": shape.name, "num_bytes": shape.num_bytes, "num_calls": shape.num_layers}
    return found | {"limit_us": limit, "results": results}


def markdown(run: dict[str, Any]) -> str:
    """The table and the provenance of its numbers."""
    columns = {
        "model, rows, A/E/F/N": lambda x: x["name"],
        "weights MB": lambda x: number(x["num_bytes"] / 1e6),
    }
    times = table_of_limits(run["shapes"], NAMES, columns)
    words = "Times are those of a layer. The limit reads its weights at the read ceiling."
    return "\n\n".join([times, words, timing.provenance(run["meta"])])


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print the table and return the raw numbers."""
    parser = cli.make_call_parser("bench.between_attentions", __doc__)
    add = parser.add_argument
    add("--rows", type=cli.at_least(1), nargs="+", help="in place of those of the shapes")
    args = parser.parse_args(argv)
    shapes = cli.select(parser, args.shapes, SHAPES, TINY)
    if args.rows:
        models = dict.fromkeys(dataclasses.replace(shape, num_rows=0) for shape in shapes)
        shapes = [dataclasses.replace(model, num_rows=n) for model in models for n in args.rows]
    names = [args.implementation] if args.implementation else list(NAMES)
    floor = measure_floor(args.iterations)
    meta = timing.describe_run(parser.prog, argv)
    run: dict[str, Any] = {"meta": meta, "floors": [floor], "shapes": []}
    one = functools.partial(
        measure, names=names, gbps=read_ceiling(run), iterations=args.iterations
    )
    cli.measure_each(run["shapes"], shapes, one, progress_of_limits, run, args)
    print(markdown(run))
    return run


if __name__ == "__main__":
    main()
