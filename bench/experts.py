"""Time `fused_experts` beside the time that a GPU needs at least, and other grouped products.

The limit of a call is to read the weights of the experts that its tokens hit, or to compute their
pairs at the rate of a dense product of as many rows, whichever takes longer.

Run `python -m bench.experts --help`; bench/README.md explains the numbers.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bench.decode.report import read_ceiling
from bench.measuring import cli, timing
from bench.measuring.measure import (
    attempt,
    call_times,
    checked,
    failed,
    measure_floor,
    times_of_kernels,
)
from bench.measuring.report import kernel_us, number, progress_of_limits, table_of_limits
from pallas_paged.experts import fused_experts

NAMES = {
    "ours": "pallas_paged",
    "xla": "pallas_paged xla",
    "jax_mgpu": "JAX's ragged_dot_mgpu",
    "ragged_dot": "lax.ragged_dot",
}
_TOKENS = (1, 8, 64, 512, 8192)
_MAX_CALLS, _MAX_ROUTES = 8, 65536  # calls of a run, each with routes of its own


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertShape:
    """Experts of a model, and tokens."""

    model: str
    num_tokens: int
    num_experts: int
    k: int
    size: int  # E
    features: int  # F

    @property
    def name(self) -> str:
        sizes = f"{self.num_experts}/{self.k}/{self.size}/{self.features}"
        return f"{self.model} {self.num_tokens} tokens {sizes}"

    @property
    def num_calls(self) -> int:
        """Calls of a run, fewer where one takes long."""
        return max(2, min(_MAX_CALLS, _MAX_ROUTES // (self.num_tokens * self.k)))

    @property
    def num_flops(self) -> int:
        return 6 * self.num_tokens * self.k * self.size * self.features

    def num_bytes(self, hit: float) -> int:
        """Bytes of the weights of a number of experts."""
        return int(6 * hit * self.size * self.features)


def _shapes(model: str, tokens: Sequence[int], *sizes: int) -> list[ExpertShape]:
    names = ("num_experts", "k", "size", "features")
    fields: Any = dict(zip(names, sizes, strict=True))
    return [ExpertShape(model=model, num_tokens=n, **fields) for n in tokens]


TINY = _shapes("tiny", (5,), 8, 2, 128, 64)[0]
SHAPES = (
    *_shapes("Qwen3-30B-A3B", _TOKENS, 128, 8, 2048, 768),
    *_shapes("gpt-oss-20b", _TOKENS, 32, 4, 2880, 2880),
    *_shapes("Mixtral-8x7B", _TOKENS, 8, 2, 4096, 14336),
)


Weights = tuple[jax.Array, jax.Array]
Experts = Callable[[jax.Array, Weights, jax.Array, jax.Array], jax.Array]


def _ours(implementation: Any) -> Experts:
    def run(x: jax.Array, weights: Weights, indices: jax.Array, scales: jax.Array) -> jax.Array:
        return fused_experts(x, *weights, indices, scales, implementation=implementation)

    return run


def _by_products(product: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]) -> Experts:
    """Experts as models with a grouped product `[M, K]` by `[G, N, K]` alone have them."""

    def run(x: jax.Array, weights: Weights, indices: jax.Array, scales: jax.Array) -> jax.Array:
        gate_up, down = weights
        num_experts, k = len(down), indices.shape[1]
        order = jnp.argsort(indices.reshape(-1), stable=True)
        sizes = jnp.bincount(indices.reshape(-1), length=num_experts).astype(jnp.int32)
        features = product(x[order // k], gate_up.reshape(num_experts, -1, x.shape[1]), sizes)
        features = features.reshape(len(order), -1, 2)
        hidden = jax.nn.silu(features[..., 0]) * features[..., 1]
        out = product(hidden, down, sizes)[jnp.argsort(order)].reshape(*indices.shape, -1)
        return jnp.einsum("tke,tk->te", out, scales.astype(out.dtype))

    return run


def _ragged_dot(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    return lax.ragged_dot(x, w.swapaxes(1, 2), sizes)


def _jax_mgpu(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot

    blocks: Any = dict(block_m=128, block_n=128, block_k=64, max_concurrent_steps=4, grid_block_n=1)
    return ragged_dot(x, w, group_sizes=sizes, transpose_rhs=True, **blocks)


FINDERS: dict[str, Experts] = {
    "ours": _ours(None),
    "xla": _ours("xla"),
    "jax_mgpu": _by_products(_jax_mgpu),
    "ragged_dot": _by_products(_ragged_dot),
}


def _inputs(shape: ExpertShape) -> tuple[jax.Array, Weights, list[tuple[jax.Array, jax.Array]]]:
    """Tokens, weights, and the routes of each call, uniform at random."""
    keys = jax.random.split(jax.random.key(0, impl="rbg"), 3)
    experts, size, features = shape.num_experts, shape.size, shape.features

    def normal(key: jax.Array, *sizes: int) -> jax.Array:
        draw = jax.jit(lambda key: jax.random.normal(key, sizes, jnp.bfloat16))
        return draw(key) * jnp.bfloat16(sizes[-1] ** -0.5)

    x = normal(keys[0], shape.num_tokens, size) * jnp.bfloat16(size**0.5)
    weights = normal(keys[1], experts, features, 2, size), normal(keys[2], experts, size, features)
    rng = np.random.default_rng(0)
    routes = []
    for _ in range(shape.num_calls):
        logits = rng.standard_normal((shape.num_tokens, experts))
        indices = np.argsort(-logits, axis=1)[:, : shape.k].astype(np.int32)
        scales = rng.dirichlet(np.ones(shape.k), shape.num_tokens).astype(np.float32)
        routes.append((jnp.asarray(indices), jnp.asarray(scales)))
    return x, weights, routes


def _reference(x: jax.Array, weights: Weights, route: Any, tokens: np.ndarray) -> np.ndarray:
    """Some tokens in float64."""
    indices, scales = (np.asarray(a)[tokens] for a in route)
    rows = np.asarray(x[tokens]).astype(np.float64)
    out = np.zeros_like(rows)
    for i, row in enumerate(rows):
        for expert, scale in zip(indices[i], scales[i], strict=True):
            gate_up, down = (np.asarray(w[expert]).astype(np.float64) for w in weights)
            gate, up = np.einsum("fie,e->if", gate_up, row)
            out[i] += scale * (down @ (gate / (1 + np.exp(-gate)) * up))
    return out


def _measure(run: Experts, shape: ExpertShape, inputs: Any, iterations: int) -> dict:
    """The error of an implementation and, if that is small enough, its times per call."""
    x, weights, routes = inputs
    run = jax.jit(run)  # traced and lowered once for all calls

    @jax.jit
    def chain(x: jax.Array, weights: Weights, routes: Any) -> tuple[jax.Array, jax.Array]:
        outs = [x]
        for route in routes:  # each call waits for the one before
            outs.append(run(outs[-1], weights, *route))
        return outs[1], outs[-1]

    args = x, weights, routes
    compiled = chain.lower(*args).compile()
    tokens = np.unique([0, shape.num_tokens // 2, shape.num_tokens - 1])
    want = _reference(x, weights, routes[0], tokens)
    got = np.asarray(compiled(*args)[0][tokens]).astype(np.float64)
    result = checked(float(np.linalg.norm(got - want) / np.linalg.norm(want)))
    if result["status"] != "ok":
        return result
    return result | call_times(compiled, args, iterations, shape.num_calls)


def _dense(shape: ExpertShape, iterations: int) -> dict:
    """Time of dense products of as many rows as there are pairs, the first two of a kind."""
    rows, size, features = shape.num_tokens * shape.k, shape.size, shape.features
    keys = jax.random.split(jax.random.key(1, impl="rbg"), 3)
    shapes = ((rows, size), (size, 2 * features), (features, size))
    arrays = [jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, shapes, strict=True)]

    @jax.jit
    def run(x: jax.Array, gate_up: jax.Array, down: jax.Array) -> tuple[jax.Array, jax.Array]:
        return x @ gate_up, x[:, :features] @ down

    try:
        runs = timing.kernel_times(run, tuple(arrays), iterations=iterations)
    except Exception as error:
        return failed(error)
    return {"status": "ok", **times_of_kernels(runs, num_calls=1)}


def measure(shape: ExpertShape, names: Sequence[str], gbps: float | None, iterations: int) -> dict:
    """Measure one shape by these implementations."""
    inputs = _inputs(shape)
    hit = float(np.mean([len(np.unique(indices)) for indices, _ in inputs[2]]))
    found: dict[str, Any] = {
        "name": shape.name,
        "experts_hit": hit,
        "num_bytes": shape.num_bytes(hit),
        "num_flops": shape.num_flops,
        "results": {},
    }
    for name in names:
        result = attempt(_measure, FINDERS[name], shape, inputs, iterations)
        found["results"][name] = failed(result) if isinstance(result, Exception) else result
    dense = _dense(shape, iterations)
    read_us = shape.num_bytes(hit) / gbps / 1e3 if gbps else None
    limits = [us for us in (read_us, kernel_us(dense)) if us]
    return found | {"dense": dense, "read_us": read_us, "limit_us": max(limits, default=None)}


def markdown(run: dict[str, Any]) -> str:
    """The table and the provenance of its numbers."""
    columns = {
        "shape (experts/k/E/F)": lambda x: x["name"],
        "experts read": lambda x: number(x["experts_hit"]),
    }
    limit = (
        "Limit: reads of the weights of the experts hit at the read ceiling, or dense products of "
        "as many rows, whichever takes longer."
    )
    times = table_of_limits(run["shapes"], NAMES, columns)
    return "\n\n".join([times, limit, timing.provenance(run["meta"])])


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print the table and return the raw numbers."""
    parser = cli.make_call_parser("bench.experts", __doc__)
    parser.add_argument("--peers", nargs="*", default=["xla"], choices=[*NAMES][1:])
    args = parser.parse_args(argv)
    shapes = cli.select(parser, args.shapes, SHAPES, TINY)
    names = [args.implementation or "ours", *args.peers]
    if args.implementation not in (None, "xla"):
        FINDERS["ours"], names[0] = _ours(args.implementation), "ours"
    floor = measure_floor(args.iterations)
    meta = timing.describe_run(parser.prog, argv)
    run: dict[str, Any] = {"meta": meta, "floors": [floor], "shapes": []}
    one = functools.partial(
        measure, names=[*dict.fromkeys(names)], gbps=read_ceiling(run), iterations=args.iterations
    )
    cli.measure_each(run["shapes"], shapes, one, progress_of_limits, run, args)
    print(markdown(run))
    return run


if __name__ == "__main__":
    main()
