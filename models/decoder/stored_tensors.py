"""Stored tensors and the parameters that are made of them: names, shapes, rows, their order."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from models.decoder.config import ModelConfig
from models.decoder.deepseek_config import LatentConfig
from models.decoder.sharding import param_spec
from models.decoder.stored_experts import read_stacked_experts, tensors_of_experts
from models.decoder.tensor_file import Tensor, read_each

_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "k_up_proj": ("kv_b_proj",),  # a part of its rows
    "v_up_proj": ("kv_b_proj",),
}


@dataclass(frozen=True, kw_only=True)
class Form:
    """How the files of a family differ from Llama's.

    Attributes:
        prefix: of the names of all tensors but, with a replacement, an output layer's; others are
            not read.
        replacement: what stands for the prefix in Llama's names.
        names: other names of modules.
        is_fused: whether q, k and v are one tensor, and gate and up.
        has_stacked_experts: whether a layer's experts are one tensor.
        is_mxfp4: whether the weights of these experts are MXFP4.
    """

    prefix: str = ""
    replacement: str = ""
    names: Mapping[str, str] = field(default_factory=dict)
    is_fused: bool = False
    has_stacked_experts: bool = False
    is_mxfp4: bool = False

    def name_in_file(self, name: str) -> str:
        """Return the name in a file of the tensor that `tensors_of` calls this."""
        if not name.startswith(self.replacement):
            return name
        return self.prefix + name.removeprefix(self.replacement)

    def name_in_model(self, name: str) -> str | None:
        """Return what `tensors_of` calls the tensor of a file; None: it is not read."""
        if name.startswith(self.prefix):
            return self.replacement + name.removeprefix(self.prefix)
        return name if self.replacement and name.startswith("lm_head.") else None


FORMS = {  # by `ModelConfig.stored_as`
    "llama": Form(),
    "language_model": Form(prefix="language_model."),
    "model.language_model": Form(prefix="model.language_model.", replacement="model."),
    "phi3": Form(is_fused=True),
    "mixtral": Form(
        names=dict(mlp="block_sparse_moe", gate_proj="w1", up_proj="w3", down_proj="w2")
    ),
    "gpt_oss": Form(names=dict(gate="router"), has_stacked_experts=True),
    "gpt_oss_mxfp4": Form(names=dict(gate="router"), has_stacked_experts=True, is_mxfp4=True),
}
_NORMS_OVER_HEADS = ("q_norm", "k_norm")  # if they have three axes
# Projections of latent attention, by heads or with rotary rows.
_LATENT = ("q_proj", "q_b_proj", "kv_a_proj_with_mqa", "k_up_proj", "v_up_proj")


def tensors_of(
    path: tuple[Any, ...], shape: tuple[int, ...], config: ModelConfig
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of the stored tensors that make a parameter."""
    form = FORMS[config.stored_as]
    *parents, module, leaf = path
    parts = _FUSED.get(str(module), (str(module),))
    if path[0] == "layers":
        config = config.of_layer(int(path[1]))
    if module == "qkv_proj" and config.k_eq_v:
        parts = parts[:-1]

    def name_of(*names: Any) -> str:
        names = tuple(form.names.get(name, str(name)) for name in names)
        return ".".join(names if path[0] == "lm_head" else ("model", *names))

    if "experts" in path and form.has_stacked_experts:
        name = name_of(*parents, module)
        yield from tensors_of_experts(name, str(leaf), shape, mxfp4=form.is_mxfp4)
        return
    if "experts" in path:  # [X, F, 2, E], or of down [X, E, F]
        for expert, part in itertools.product(range(shape[0]), parts):
            yield name_of(*parents, expert, part, leaf), (shape[1], shape[-1])
        return
    shapes = [_stored_shape(str(module), part, shape, config) for part in parts]
    if form.is_fused and module in _FUSED:
        yield name_of(*path), (sum(rows for rows, *_ in shapes), *shapes[0][1:])
        return
    for part, stored in zip(parts, shapes, strict=True):
        yield name_of(*parents, part, leaf), stored


def _stored_shape(
    module: str, part: str, shape: tuple[int, ...], config: ModelConfig
) -> tuple[int, ...]:
    """Return the shape of the tensor with this part of a parameter of this shape."""
    heads = config.num_q_heads if part in ("q_proj", "q_norm") else config.num_kv_heads
    if module == "qkv_proj":
        return heads * config.head_dim, *shape[3:]
    if module == "gate_up_proj":
        return shape[0], *shape[2:]
    if len(shape) == 3 and module in _NORMS_OVER_HEADS:
        return (heads * config.head_dim,)
    if len(shape) == 3 and config.latent is not None and module in _LATENT:
        return shape[0] * _rows_of_head(module, config.latent), shape[2]
    return shape


def read_param(
    path: tuple[Any, ...],
    shape: tuple[int, ...],
    parts: Sequence[Tensor],
    dtype: DTypeLike,
    mesh: Mesh | None,
    config: ModelConfig,
) -> jax.Array:
    """Read a parameter of this shape from the tensors that it is made of."""
    module, form = str(path[-2]), FORMS[config.stored_as]
    offset = config.norm_offset if module.endswith("norm") else 0.0
    if path[-1] in ("e_score_correction_bias", "sinks") or offset:
        dtype = np.float32
    if form.is_fused and module in _FUSED:
        rows, q_rows = parts[0].shape[0], config.num_q_heads * config.head_dim
        kv_rows = (rows - q_rows) // 2  # not those of `config`, whose KV heads may be repeated
        of_qkv = q_rows, kv_rows, kv_rows
        parts = parts[0].split(of_qkv if module == "qkv_proj" else (rows // 2, rows // 2))

    def read(index: Any) -> np.ndarray:  # a slice of each axis
        if "experts" in path and form.has_stacked_experts:
            return read_stacked_experts(parts, index, shape, dtype)
        if "experts" in path:
            return _read_experts(parts, index, shape, dtype)
        if config.latent is not None and module in _LATENT:
            value = _read_latent(module, parts[0], index[0], config.latent)
            return value.astype(dtype, copy=False)
        if module == "qkv_proj":
            return _read_heads(parts, index[0], shape, dtype)
        if module == "gate_up_proj":
            return _read_pairs(parts, index[0], shape, dtype)
        if module in _NORMS_OVER_HEADS and len(shape) == 3:
            num_heads, *rest = shape
            rows = math.prod(rest)
            value = _read_repeated(parts[0], index[0], num_heads, tuple(rest), rows)
            return value.astype(dtype, copy=False)
        value = parts[0].read(*index).astype(dtype, copy=False)
        return value + np.float32(offset) if offset else value

    if mesh is None:
        return jnp.asarray(read(tuple(slice(0, size) for size in shape)))
    sharding = NamedSharding(mesh, param_spec(path, shape))
    return jax.make_array_from_callback(shape, sharding, read)


def _read_heads(
    parts: Sequence[Tensor], heads: slice, shape: tuple[int, ...], dtype: DTypeLike
) -> np.ndarray:
    """Read these KV heads of a fused q, k and v of this shape, with their query heads."""
    start, stop, _ = heads.indices(shape[0])
    value = np.empty((stop - start, *shape[1:]), dtype)
    q, *kv = parts  # no V where it is K
    groups, head_dim = shape[1] - len(kv), shape[2]
    rows = slice(start * groups * head_dim, stop * groups * head_dim)
    value[:, :groups] = q.read(rows).reshape(value[:, :groups].shape)
    for column, part in enumerate(kv, groups):
        value[:, column] = _read_repeated(part, heads, shape[0], shape[2:], head_dim)
    return value


def _read_repeated(
    part: Tensor, heads: slice, count: int, shape: tuple[int, ...], rows: int
) -> np.ndarray:
    """Read these of `count` KV heads of a shape and as many rows; devices may repeat a head."""
    start, stop, _ = heads.indices(count)
    stored = np.arange(start, stop) // (count * rows // part.shape[0])
    value = part.read(slice(int(stored[0]) * rows, int(stored[-1] + 1) * rows))
    return value.reshape(-1, *shape)[stored - stored[0]]


def _read_pairs(
    parts: Sequence[Tensor], pairs: slice, shape: tuple[int, ...], dtype: DTypeLike
) -> np.ndarray:
    """Read these pairs of a fused gate and up of this shape."""
    start, stop, _ = pairs.indices(shape[0])
    value = np.empty((stop - start, *shape[1:]), dtype)
    for column, part in enumerate(parts):
        part.read_into(value[:, column], slice(start, stop))
    return value


def _read_experts(
    parts: Sequence[Tensor], index: Any, shape: tuple[int, ...], dtype: DTypeLike
) -> np.ndarray:
    """Read these experts of pairs of gate and up [X, F, 2, E], or of down [X, E, F]."""
    start, stop, _ = index[0].indices(shape[0])
    value = np.empty((stop - start, *shape[1:]), dtype)
    count = len(parts) // shape[0]  # tensors of an expert

    def read(place: int) -> None:
        first = count * (start + place)
        stored = parts[first : first + count]
        columns = [value[place]] if count == 1 else value[place].swapaxes(0, 1)
        for part, column in zip(stored, columns, strict=True):
            part.read_into(column)

    read_each(range(stop - start), read)
    return value


def _read_latent(module: str, part: Tensor, heads: slice, latent: LatentConfig) -> np.ndarray:
    """Read these heads of a projection of latent attention, or all of one that has none."""
    size = _rows_of_head(module, latent)
    start, stop, _ = heads.indices(part.shape[0] // size)
    value = part.read(slice(start * size, stop * size)).reshape(stop - start, size, -1)
    if module == "k_up_proj":
        return value[:, : latent.qk_nope_head_dim]
    if module == "v_up_proj":
        return value[:, latent.qk_nope_head_dim :]
    if latent.rope_interleave:
        # `rotate` turns (i, i + R / 2) where a file has pairs (2i, 2i + 1).
        order, rotary = np.arange(size), slice(size - latent.qk_rope_head_dim, size)
        order[rotary] = order[rotary].reshape(-1, 2).T.ravel()
        value = value[:, order]
    return value[0] if module == "kv_a_proj_with_mqa" else value


def _rows_of_head(module: str, latent: LatentConfig) -> int:
    """Return the rows of a head in the stored tensor; of one without heads, all of them."""
    if module in ("k_up_proj", "v_up_proj"):
        return latent.qk_nope_head_dim + latent.v_head_dim
    return latent.cached_dim if module == "kv_a_proj_with_mqa" else latent.head_dim


def parts_of(path: tuple[Any, ...], value: np.ndarray) -> list[np.ndarray]:
    """Return the parts of a parameter, each with as many elements as its stored tensor."""
    if path[-2] == "qkv_proj":
        return [value[:, :-2], value[:, -2], value[:, -1]]
    return [value[:, 0], value[:, 1]] if path[-2] == "gate_up_proj" else [value]
