"""Time prompts of multi-head latent attention in both forms: absorbed, and by K and V of each head.

Run `python -m bench.prefill.mla --help`; bench/README.md explains each number.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_paged as pp
from bench.decode.latents import LatentCase, LatentShape, make_latents
from bench.measuring import calls, cli, timing
from bench.measuring.measure import Variant, compare
from bench.measuring.shapes import Shape, normal

NAMES = {"absorbed": "absorbed", "heads": "by heads"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptShape(LatentShape):
    """Prompts, whose heads have `nope_dim` elements besides the rotary ones, and as many of V."""

    page_size: int = 64
    nope_dim: int = 128
    num_sets: int = 1  # the products bound these calls, and not reads from memory
    num_calls: int = 4

    @property
    def num_flops(self) -> int:
        """Operations of both products by heads, whose queries see older tokens by heads, too."""
        dims = self.head_dim - self.v_head_dim + 2 * self.nope_dim
        return super().num_flops * dims // (self.head_dim + self.v_head_dim)


def _prompts(num_seqs: int, q_len: int, num_q_heads: int, older: int = 0) -> PromptShape:
    after = f" after {older}" if older else ""
    return PromptShape(
        name=f"{num_seqs}x{q_len}{after} {num_q_heads} heads",
        seq_lens=(older + q_len,) * num_seqs,
        q_lens=(q_len,) * num_seqs,
        num_q_heads=num_q_heads,
    )


SHAPES = tuple(
    _prompts(num_seqs, q_len, num_q_heads, older)
    for num_q_heads in (16, 128)
    for num_seqs, q_len, older in (
        (1, 128, 0),
        (1, 512, 0),
        (1, 2048, 0),
        (1, 8192, 0),
        (8, 500, 0),  # which begin on no page
        (1, 512, 8192),
        (1, 2048, 8192),
    )
)
# Small enough for a CPU; runs only when named.
TINY = PromptShape(
    name="tiny",
    seq_lens=(9, 32, 17),
    q_lens=(9, 3, 1),
    num_q_heads=4,
    head_dim=24,
    v_head_dim=16,
    nope_dim=12,
    page_size=8,
    num_calls=2,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptCase(LatentCase):
    """A `LatentCase` whose `q` are `q_nope` before they are absorbed, and the new tokens.

    Attributes:
        latents: `bf16[T, head_dim]`, latents and rotary keys of the new tokens, as in the pages.
        w_uk, w_uv: `bf16[Hq, nope_dim, v_head_dim]`.
    """

    latents: jax.Array
    w_uk: jax.Array
    w_uv: jax.Array

    @property
    def lens(self) -> tuple[jax.Array, ...]:
        return self.seq_lens, self.cu_q_lens

    def in_layout(self, kv_layout: Any) -> tuple[jax.Array, None, dict]:
        names = ("q_pe", "latents", "w_uk", "w_uv")
        return self.k_pages, None, {name: getattr(self, name) for name in names}

    def reference(
        self, q: jax.Array, token: np.ndarray, tables: jax.Array, lens: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        exact = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)
        w_uk, w_uv = (w.astype(jnp.float32) for w in (self.w_uk, self.w_uv))
        absorbed = jnp.zeros((len(q), *w_uk.shape[::2]), jnp.float32)
        rows = exact("thn,hnl->thl", q[token].astype(jnp.float32), w_uk)
        out, lse = super().reference(absorbed.at[token].set(rows), token, tables, lens)
        return exact("thl,hnl->thn", out, w_uv), lse


def make_prompts(shape: PromptShape) -> PromptCase:
    """Make random normal data on the device."""
    case = make_latents(shape)
    keys = jax.random.split(jax.random.key(1, impl="rbg"), 3)
    num_tokens, num_heads = case.q.shape[:2]
    dims = (num_heads, shape.nope_dim, shape.v_head_dim)
    # K and V of a head have the size of latents, and logits that of one.
    weights = [normal(key, dims) * jnp.bfloat16(shape.v_head_dim**-0.5) for key in keys[:2]]
    scale = jnp.bfloat16((shape.nope_dim + case.q_pe.shape[-1]) ** -0.5)
    fields = {field.name: getattr(case, field.name) for field in dataclasses.fields(case)}
    fields["q"] = normal(keys[2], (num_tokens, num_heads, shape.nope_dim)) * scale
    fields["q_pe"] = case.q_pe * (scale / jnp.bfloat16(shape.head_dim**-0.5))
    return PromptCase(
        **fields,
        latents=_newest(case.k_pages, jnp.asarray(case.tables[0]), shape),
        w_uk=weights[0],
        w_uv=weights[1],
    )


@functools.partial(jax.jit, static_argnames="shape")
def _newest(pages: jax.Array, table: jax.Array, shape: Shape) -> jax.Array:
    rows = zip(table, shape.seq_lens, shape.q_lens, strict=True)
    dense = [pages[row].reshape(-1, pages.shape[-1])[n - q : n] for row, n, q in rows]
    return jnp.concatenate(dense)


def forms(shape: PromptShape, implementation: str | None) -> dict[str, Variant]:
    """Both forms of the attention of a layer, between the projections that they share."""
    size, how = shape.v_head_dim, dict(sm_scale=1.0, implementation=implementation)

    def attend_pages(q, q_pe, pages, tables, lens, ends, w_uk, w_uv, **options):
        absorbed = jnp.einsum("thn,hnl->thl", q, w_uk)
        layer = pp.LayerKV(pages, v_head_dim=size)
        out = pp.mla_attention(absorbed, q_pe, layer, tables, lens, ends, **how, **options)
        latents, *lse = out if isinstance(out, tuple) else (out,)
        return jnp.einsum("thl,hnl->thn", latents, w_uv), *lse

    def absorbed(q, pages, _, tables, lens, ends, *, q_pe, latents, w_uk, w_uv):
        del latents
        return attend_pages(q, q_pe, pages, tables, lens, ends, w_uk, w_uv)[0]

    def by_heads(q, pages, _, tables, lens, ends, *, q_pe, latents, w_uk, w_uv):
        latents, q = lax.optimization_barrier((latents, q))  # else the calls share projections
        k_nope, v = (jnp.einsum("tl,hnl->thn", latents[:, :size], w) for w in (w_uk, w_uv))
        both, older = jnp.concatenate([q, q_pe], axis=-1), shape.seq_lens != shape.q_lens
        new = pp.mla_prefill(both, k_nope, latents[:, size:], v, ends, return_lse=older, **how)
        if not older:
            return new
        options = dict(causal=False, return_lse=True)
        before = lens - jnp.diff(ends)
        old = attend_pages(q, q_pe, pages, tables, before, ends, w_uk, w_uv, **options)
        return pp.merge_attention_states(*(jnp.stack(x) for x in zip(new, old, strict=True)))[0]

    label = implementation or "default"
    return {
        name: Variant(label=label, attend=attend, kv_layout="NHD")
        for name, attend in (("absorbed", absorbed), ("heads", by_heads))
    }


def measure_shape(shape: PromptShape, args: argparse.Namespace) -> dict:
    """Measure both forms of one shape."""
    finders: dict[str, Callable[[], list[Variant]]] = {
        name: functools.partial(list, [form])
        for name, form in forms(shape, args.implementation).items()
    }
    results = compare(make_prompts(shape), finders, args.iterations)
    return cli.describe(shape) | {"results": results}


def markdown(run: dict) -> str:
    """The table, the provenance of its numbers and the summary."""
    return calls.markdown({"": run["shapes"]}, NAMES, run["meta"])


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print the table and return the raw numbers."""
    parser = cli.make_call_parser("bench.prefill.mla", __doc__)
    args = parser.parse_args(argv)
    shapes = cli.select(parser, args.shapes, SHAPES, TINY)
    run: dict[str, Any] = {"meta": timing.describe_run(parser.prog, argv), "shapes": []}
    measure = functools.partial(measure_shape, args=args)
    progress = functools.partial(calls.progress, NAMES)
    cli.measure_each(run["shapes"], shapes, measure, progress, run, args)
    print(markdown(run))
    return run


if __name__ == "__main__":
    main()
