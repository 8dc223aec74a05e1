"""From the product with a fused q/k/v weight to rotated queries and written pages, in one kernel.

It computes the same as `split_qkv` and then `write_kv`, on any device.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal, cast, get_args

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from pallas_paged.attention.partition import Axes, ShardingRule, on_each_device
from pallas_paged.checks import (
    check_implementation,
    check_interpret,
    checked_array,
    default_promotion,
)
from pallas_paged.decoder.checks import (
    Rotation,
    checked_angles,
    checked_eps,
    checked_floats,
    checked_norms,
    checked_rotation,
)
from pallas_paged.decoder.rms_norm import rms_norm
from pallas_paged.kernels.device import Device
from pallas_paged.kernels.triton.family import TRITON
from pallas_paged.kernels.write_arrays import WriteArrays
from pallas_paged.pages.layer import LayerKV
from pallas_paged.pages.layout import AXIS_NAMES, KVLayout
from pallas_paged.pages.pool import write_kv

__all__ = ["rotate", "rotate_and_write_kv", "split_qkv"]

WriteImplementation = Literal["triton", "xla"]

# Names of the axes, as in attention/dispatch.py. Of pages, and of scales that a call writes, they
# depend on the layout.
_AXES: dict[str, Axes] = {
    "qkv": ("num_tokens", "num_kv_heads", "group_and_kv", "head_dim"),
    "latents": ("num_tokens", "head_dim"),
    "slots": ("num_tokens",),
    "k_pages": (),
    "v_pages": (),
    "k_scales": (),
    "v_scales": (),
    "cos": ("num_tokens", "num_angles"),
    "sin": ("num_tokens", "num_angles"),
    "q_norm": ("head_dim",),
    "k_norm": ("head_dim",),
    "norm": ("v_head_dim",),
}


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Return x `[..., D]` with the pairs (i, i + R / 2) rotated by angles, in f32 (RoFormer).

    Args:
        x: floating `[..., D]`.
        cos, sin: f32`[..., R / 2]`; elements from R on stay as they are.
    """
    half = cos.shape[-1]
    first, second = (x[..., i : i + half].astype(jnp.float32) for i in (0, half))
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate([*(t.astype(x.dtype) for t in turned), x[..., 2 * half :]], axis=-1)


@default_promotion()
def split_qkv(
    qkv: ArrayLike,
    *,
    rotation: Rotation | None = None,
    q_norm: ArrayLike | None = None,
    k_norm: ArrayLike | None = None,
    eps: float = 1e-6,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return queries and keys, normed and then rotated, and values.

    Args:
        qkv: floating `[..., Hkv, G + 2, D]`, the G queries, K and V of each KV head.
        rotation: cosines and sines, f32`[..., 1, R / 2]`, with R up to D; None: no rotation.
        q_norm, k_norm: weights `[D]` of an RMS norm of each head; None: no norm.
        eps: epsilon of the norms.

    Returns:
        q `[..., Hkv * G, D]`, k and v `[..., Hkv, D]`.

    Raises:
        ValueError: a shape or dtype is wrong, or `eps` is negative.
    """
    qkv, eps = checked_floats("qkv", qkv), checked_eps(eps)
    if qkv.ndim < 3 or qkv.shape[-2] < 3:
        raise ValueError(
            "qkv must be [..., num_kv_heads, G + 2, head_dim], with G of 1 or more, got "
            f"{qkv.shape}"
        )
    *batch, num_kv_heads, kinds, head_dim = qkv.shape
    q = qkv[..., :-2, :].reshape(*batch, num_kv_heads * (kinds - 2), head_dim)
    k, v = qkv[..., -2, :], qkv[..., -1, :]
    norms = checked_norms(head_dim, q_norm=q_norm, k_norm=k_norm)
    q = rms_norm(q, norms["q_norm"], eps) if "q_norm" in norms else q
    k = rms_norm(k, norms["k_norm"], eps) if "k_norm" in norms else k
    if rotation is not None:

        def is_of_batch(shape: tuple[int, ...]) -> bool:
            sizes = zip(reversed(shape[:-2]), reversed(batch), strict=False)
            fits = all(size in (1, count) for size, count in sizes)
            return fits and 2 <= len(shape) <= len(batch) + 2 and shape[-2] == 1

        angles = checked_angles(rotation, is_of_batch, [*batch, 1], head_dim).values()
        q, k = rotate(q, *angles), rotate(k, *angles)
    return q, k, v


@default_promotion()
def rotate_and_write_kv(
    layer: LayerKV,
    qkv: ArrayLike,
    slots: ArrayLike,
    *,
    rotation: Rotation | None = None,
    q_norm: ArrayLike | None = None,
    k_norm: ArrayLike | None = None,
    eps: float = 1e-6,
    implementation: WriteImplementation | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, LayerKV]:
    """Norm and rotate q and k of new tokens, and write K and V into the pages of a layer.

    On a GPU it is one kernel, in place where the pages are donated. Gradients and other devices
    take the steps one by one. Both compute in f32 and round to the dtype of `qkv` after the norm
    and after the rotation. K and V go into the pages as by `write_kv`.

    Args:
        layer: pages, and scales if they are int8 or fp8.
        qkv: floating `[T, Hkv, G + 2, D]`, the product with a fused weight, biases included: the G
            queries, K and V of each KV head.
        slots: i32`[T]` from `slot_mapping`. Slots outside [0, num_pages * page_size) are dropped;
            a slot that is named twice gets undefined values.
        rotation: cosines and sines of the tokens' angles, f32`[T, R / 2]` or f32`[T, 1, R / 2]`.
            They rotate the pairs (i, i + R / 2); elements from R on stay. None: no rotation.
        q_norm: floating `[D]`, weight of an RMS norm of each query; None: no norm.
        k_norm: floating `[D]`, the same for each key.
        eps: epsilon of the norms.
        implementation: `"triton"`, a kernel on a GPU; `"xla"`; or None for the best. Static.
        interpret: run the kernel of `"triton"` interpreted, on any device. Static.

    Returns:
        The queries `[T, Hkv * G, D]`, and the layer with the new tokens.

    Raises:
        ValueError: a shape or dtype is wrong, or quantized pages lack scales.
        NotImplementedError: the implementation can't do this call; the message says why.
    """
    arrays = checked_write(layer, qkv, slots, rotation, q_norm, k_norm)
    eps = checked_eps(eps)
    chosen = chosen_write(layer, implementation, interpret)
    if chosen == "xla" or not arrays.qkv.size:  # a grid of 0 is an error
        q, k, v = _split(arrays, eps)
        return q, write_kv(layer, k, v, arrays.slots)
    (q,), layer = write(arrays, layer, eps=eps, interpret=interpret)
    return q.reshape(q.shape[0], -1, q.shape[-1]), layer


def write(
    arrays: WriteArrays, layer: LayerKV, *, eps: float, interpret: bool, by_steps: bool = False
) -> tuple[tuple[jax.Array, ...], LayerKV]:
    """Write K and V, or latents; return the queries `[T, Hkv, G, D]` or nothing, and the layer.

    Args:
        arrays, layer: of one layer, checked.
        eps, interpret: as in `rotate_and_write_kv`.
        by_steps: without a kernel.
    """
    names = tuple(name for name in _AXES if getattr(arrays, name) is not None)
    of_layer: Any = dict(kv_layout=arrays.kv_layout, v_head_dim=arrays.v_head_dim)
    local = _LocalWrite(names=names, **of_layer, eps=eps, interpret=interpret)
    run = local.steps if by_steps else _write_kernel(local)
    results = run(*(getattr(arrays, name) for name in names))
    count = len(results) - len(arrays.written)
    written: dict[str, Any] = dict(zip(arrays.written, results[count:], strict=True))
    written["k_pages"] = arrays.layout.with_given_axes(written["k_pages"])
    return results[:count], dataclasses.replace(layer, **written)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _LocalWrite:
    """The kernel on the arrays of one device."""

    names: tuple[str, ...]  # the fields of `WriteArrays` that it takes, in order
    kv_layout: KVLayout  # of the layer
    v_head_dim: int | None  # of the layer
    eps: float  # as in `write`
    interpret: bool  # as in `write`
    one_device = False

    def arrays(self, arrays: tuple[jax.Array, ...]) -> WriteArrays:
        fields: dict[str, Any] = dict(zip(self.names, arrays, strict=True))
        return WriteArrays(**fields, kv_layout=self.kv_layout, v_head_dim=self.v_head_dim)

    def __call__(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        """Return the queries, the pages, and their scales if each token has its own."""
        from pallas_paged.decoder.kernels import latent_write, rotary_write

        given = self.arrays(arrays)
        kernel: Any = rotary_write if given.latents is None else latent_write
        with default_promotion(), jax.enable_x64(False):
            return kernel.rotate_and_write(given, eps=self.eps, interpret=self.interpret)

    def steps(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        """Return the results of the kernel, by separate steps."""
        given = self.arrays(arrays)
        if given.latents is None:
            q, k, v = _split(given, self.eps)
            num_tokens, num_kv_heads, kinds, head_dim = given.qkv.shape
            queries = [q.reshape(num_tokens, num_kv_heads, kinds - 2, head_dim)]
        else:
            queries, k, v = [], _latents(given, self.eps), None
        layer = LayerKV(
            k_pages=given.layout.with_given_axes(given.k_pages),
            v_pages=given.v_pages,
            k_scales=given.k_scales,
            v_scales=given.v_scales,
            kv_layout=given.kv_layout,
            v_head_dim=given.v_head_dim,
        )
        layer = write_kv(layer, k, v, given.slots)
        written = {name: getattr(layer, name) for name in given.written}
        written["k_pages"] = given.layout.with_all_axes(layer.k_pages)
        return *queries, *written.values()

    def rule(self, given: tuple[jax.Array, ...]) -> ShardingRule:
        axes, arrays = dict(_AXES), self.arrays(given)
        of_pages, of_scales = arrays.layout.axes, arrays.layout.scale_axes
        for name in arrays.written:
            letters = of_pages if name.endswith("pages") else of_scales
            axes[name] = tuple(AXIS_NAMES[letter] for letter in letters)
        queries = [("num_tokens", "num_kv_heads", "group", "head_dim")]
        if arrays.latents is not None:
            queries = []
        return ShardingRule(
            names=self.names,
            inputs=tuple(axes[name] for name in self.names),
            outputs=(*queries, *(axes[name] for name in arrays.written)),
            shardable_axes=("num_kv_heads",),
        )


def _split(arrays: WriteArrays, eps: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    rotation = None
    if arrays.cos is not None:
        rotation = arrays.cos[:, None], arrays.sin[:, None]
    norms = dict(q_norm=arrays.q_norm, k_norm=arrays.k_norm)
    return split_qkv(arrays.qkv, rotation=rotation, **norms, eps=eps)


def _latents(arrays: WriteArrays, eps: float) -> jax.Array:
    """Return new latents and their keys as K `[T, 1, D]`."""
    latent, key = arrays.latents[:, : arrays.v_head_dim], arrays.latents[:, arrays.v_head_dim :]
    if arrays.norm is not None:
        latent = rms_norm(latent, arrays.norm, eps)
    if arrays.cos is not None:
        key = rotate(key, arrays.cos, arrays.sin)
    return jnp.concatenate([latent, key], axis=1)[:, None]


@functools.cache
def _write_kernel(local: _LocalWrite) -> Any:
    """Return `local` on each device, by its `rule`, with the gradient of its `steps`."""

    @jax.custom_vjp
    def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        run = on_each_device(local, local.rule(arrays), platform=Device.here().platform)
        return tuple(run(*arrays))

    def forward(*arrays: jax.Array) -> tuple[Any, ...]:
        return run(*arrays), arrays

    @default_promotion()  # JAX calls it after the entry has returned
    def backward(arrays: tuple[jax.Array, ...], cotangents: Any) -> Any:
        return jax.vjp(local.steps, *arrays)[1](cotangents)

    run.defvjp(forward, backward)
    return run


def chosen_write(layer: LayerKV, implementation: Any, interpret: bool) -> WriteImplementation:
    """Return the implementation that writes to the pages of a layer.

    Raises:
        ValueError, NotImplementedError: as `rotate_and_write_kv`.
    """
    check_implementation(implementation, get_args(WriteImplementation))
    check_interpret(interpret, implementation)
    if implementation == "xla":
        return "xla"
    reason = _why_not(layer, interpret=interpret)
    if implementation is None:
        return "triton" if reason is None else "xla"
    if reason is not None:
        raise NotImplementedError(f"{implementation=} {reason}")
    return cast(WriteImplementation, implementation)


def _why_not(layer: LayerKV, *, interpret: bool) -> str | None:
    """Return why the kernel can't write the pages of this layer, or None."""
    pages = layer.k_pages
    fp8 = pages.dtype == jnp.float8_e4m3fn  # which older GPUs can't convert
    if not interpret and (reason := Device.here().why_not(least="8.9" if fp8 else None)):
        return reason
    if pages.dtype.itemsize == 1 and pages.size >= 2**31:  # Pallas would overflow its offsets
        return f"needs fewer than 2**31 elements in one-byte pages of a layer, not {pages.size}"
    return TRITON.why_not_jax()


def checked_write(
    layer: Any, qkv: Any, slots: Any, rotation: Any, q_norm: Any, k_norm: Any
) -> WriteArrays:
    """Return the arguments of `rotate_and_write_kv`, checked against each other.

    Raises:
        ValueError: as there.
    """
    qkv = checked_floats("qkv", qkv)
    if qkv.ndim != 4 or qkv.shape[2] < 3:
        raise ValueError(
            f"qkv must be [T, num_kv_heads, G + 2, head_dim], with G of 1 or more, got {qkv.shape}"
        )
    num_tokens, num_kv_heads, _, head_dim = qkv.shape
    slots = checked_array("slots", slots, jnp.int32, (num_tokens,))

    def write() -> LayerKV:
        new = jnp.zeros((num_tokens, num_kv_heads, head_dim), qkv.dtype)
        return write_kv(layer, new, new, slots)

    jax.eval_shape(write)  # raises where the layer is wrong, or qkv is not as its pages are
    layer = jax.tree.map(jnp.asarray, layer)
    angles: Any = checked_rotation(rotation, num_tokens, head_dim)
    arrays = WriteArrays(
        qkv=qkv,
        slots=slots,
        k_pages=layer.layout.with_all_axes(layer.k_pages),
        v_pages=layer.v_pages,
        k_scales=layer.k_scales,
        v_scales=layer.v_scales,
        kv_layout=layer.kv_layout,
        **angles,
    )
    norms = checked_norms(head_dim, q_norm=q_norm, k_norm=k_norm)
    return dataclasses.replace(arrays, **norms)
