"""The gradient of attention that kernels compute, under `jax.grad`.

The forward pass is the call that it is without a gradient, with its log-sum-exps: same kernel, same
bits. The backward pass is one more call that is divided among devices, and is made by the kernels
of one family, or by XLA where neither family can make it, as without the Triton lowering of Pallas.
On a mesh sequences are replicated and all query heads of a KV head are on one device, so that no
gradient is a sum over devices.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from pallas_paged.attention.partition import KV_HEADS, Q_HEADS, ShardingRule, on_each_device
from pallas_paged.checks import default_promotion, pytree
from pallas_paged.kernels import xla
from pallas_paged.kernels.backward import Kernels, attention_gradient
from pallas_paged.kernels.call import Arrays
from pallas_paged.kernels.device import Device
from pallas_paged.kernels.families import FAMILIES
from pallas_paged.kernels.logits import LogitOptions
from pallas_paged.pages.layout import KVLayout

_DIFFERENTIABLE = ("q", "k_pages", "v_pages", "alibi_slopes", "sinks")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _LocalGradient:
    """The gradient of a call on the arrays of one device.

    It takes the arrays of the call, its `out` and `lse`, and their gradients, that of `lse` if
    there is one.
    """

    names: tuple[str, ...]  # of the call
    wanted: tuple[str, ...]  # the arrays whose gradients are returned, in order
    kv_layout: KVLayout  # of the call
    device: Device  # of the call
    options: LogitOptions  # of the call
    interpret: bool  # whether kernels are interpreted
    # Names of the families whose kernels may make them; the first that can does, and XLA if none.
    families: tuple[str, ...]

    @property
    def one_device(self) -> bool:
        return self.interpret and "mosaic_sm90" in self.families  # which calls back into Python

    def __call__(self, *given: jax.Array) -> tuple[jax.Array, ...]:
        count = len(self.names)
        fields: dict[str, Any] = dict(zip(self.names, given[:count], strict=True))
        out, lse, d_out, *d_lse = given[count:]
        with default_promotion(), jax.enable_x64(False):
            arrays = Arrays(**fields, kv_layout=self.kv_layout)
            kernels = self._kernels(arrays)
            results = out, lse, d_out, d_lse[0] if d_lse else None
            if kernels is None:
                gradients = _xla_gradient(arrays, *results, names=self.wanted, options=self.options)
            else:
                gradients = attention_gradient(arrays, *results, names=self.wanted, kernels=kernels)
        return tuple(gradients[name].astype(fields[name].dtype) for name in self.wanted)

    def _kernels(self, arrays: Arrays) -> Kernels | None:
        """Return the function that computes gradients by the kernels of a family, or None."""
        for family in (FAMILIES[name] for name in self.families):
            if family.why_no_gradient(arrays) is None:
                return functools.partial(
                    family.gradients(), options=self.options, interpret=self.interpret
                )
        return None


def _xla_gradient(
    arrays: Arrays,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    d_lse: jax.Array | None,
    *,
    names: tuple[str, ...],
    options: LogitOptions,
) -> dict[str, jax.Array]:
    """Return the gradients of `attention_gradient`, by XLA."""
    attend = xla.paged_decode if arrays.cu_q_lens is None else xla.ragged_paged_attention

    def forward(given: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
        return attend(dataclasses.replace(arrays, **given), options=options)

    _, pull_back = jax.vjp(forward, {name: getattr(arrays, name) for name in names})
    if d_lse is None:
        d_lse = jnp.zeros_like(lse)
    # Queries without keys have no gradient, whatever the cotangent of their -inf is.
    (gradients,) = pull_back((d_out.astype(out.dtype), jnp.where(jnp.isneginf(lse), 0.0, d_lse)))
    return gradients


@pytree
class _Residuals:
    """Residuals of the backward pass: arrays of the call, its result, and the wanted gradients."""

    given: tuple[jax.Array, ...]
    out: jax.Array
    lse: jax.Array
    wanted: tuple[str, ...] = dataclasses.field(metadata={"static": True})


@functools.cache
def with_gradient(
    local: Any, rule: ShardingRule, *, platform: str
) -> Callable[..., tuple[jax.Array, ...]]:
    """Return `on_each_device(local, rule)` of a `LocalCall`, with a gradient.

    The function raises NotImplementedError where it is differentiated and can't be.
    """

    def call(*given: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(on_each_device(local, rule, platform=platform)(*given))

    def forward(*primals: Any) -> tuple[tuple[jax.Array, ...], _Residuals]:
        given = tuple(primal.value for primal in primals)
        wanted = tuple(n for n, p in zip(local.names, primals, strict=True) if p.perturbed)
        arrays = Arrays(**dict(zip(local.names, given, strict=True)), kv_layout=local.kv_layout)
        reason = _why_not(arrays, wanted)
        if reason is not None:
            raise NotImplementedError(f"the gradient of attention by GPU kernels {reason}")
        axes = rule.outputs[0]
        outputs = dataclasses.replace(rule, outputs=(axes, axes[:2]))
        complete = dataclasses.replace(local, with_lse=True)
        out, lse = on_each_device(complete, outputs, platform=platform)(*given)
        result = (out, lse)[: len(rule.outputs)]
        return result, _Residuals(given=given, out=out, lse=lse, wanted=wanted)

    def backward(residuals: _Residuals, cotangents: Sequence[Any]) -> tuple[Any, ...]:
        d_out, *d_lse = cotangents
        given = dict(zip(local.names, residuals.given, strict=True))
        arrays = Arrays(**given, kv_layout=local.kv_layout)
        if isinstance(d_out, SymbolicZero):
            d_out = jnp.zeros_like(residuals.out)
        d_lse = [d for d in d_lse if not isinstance(d, SymbolicZero)]
        gradient = _LocalGradient(
            names=local.names,
            wanted=residuals.wanted,
            kv_layout=local.kv_layout,
            device=local.device,
            options=local.how.logits,
            interpret=local.how.interpret,
            families=local.gradient_families(arrays),
        )
        axes = dict(zip(local.names, rule.inputs, strict=True))
        of_out = rule.outputs[0]
        results = {"out": of_out, "lse": of_out[:2], "d_out": of_out}
        if d_lse:
            results["d_lse"] = of_out[:2]
        gradient_rule = ShardingRule(
            names=(*local.names, *results),
            inputs=(*rule.inputs, *results.values()),
            outputs=tuple(axes[name] for name in residuals.wanted),
            shardable_axes=(KV_HEADS, Q_HEADS),
            divides_groups=False,
        )
        run = on_each_device(gradient, gradient_rule, platform=platform)
        found = run(*residuals.given, residuals.out, residuals.lse, d_out, *d_lse)
        gradients = dict(zip(residuals.wanted, found, strict=True))
        return tuple(
            _like(gradients[name], x) if name in gradients else None
            for name, x in zip(local.names, residuals.given, strict=True)
        )

    function: Any = jax.custom_vjp(call)
    function.defvjp(forward, backward, symbolic_zeros=True)
    return function


def _why_not(arrays: Arrays, wanted: Sequence[str]) -> str | None:
    """Return why the gradients of these arrays can't be had, or None."""
    dtype = arrays.k_pages.dtype
    if arrays.q_pe is not None:
        return "has no multi-head latent attention; implementation='xla' has it"
    if dtype.itemsize == 1 and ("k_pages" in wanted or "v_pages" in wanted):
        return (
            f"is not that of pages of {dtype.name}, which are rounded: differentiate q and sinks "
            "alone, as with jax.lax.stop_gradient(pages)"
        )
    others = [name for name in wanted if name not in _DIFFERENTIABLE]
    if others:
        return f"is not that of {', '.join(others)}; implementation='xla' has it"
    return None


def _like(gradient: jax.Array, x: jax.Array) -> jax.Array:
    """Return a gradient as a device of a `shard_map` has `x`: their sum where all have one `x`."""
    kinds = [jax.typeof(y).manual_axis_type for y in (gradient, x)]
    axes = kinds[0].varying - kinds[1].varying
    return lax.psum(gradient, tuple(axes)) if axes else gradient
