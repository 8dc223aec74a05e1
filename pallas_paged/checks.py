"""Checks of arguments, the numeric rules the library runs under, and its pytrees.

Bad input raises ValueError with the argument's name, its value and the rule that it breaks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import reprlib
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

INT32_MAX = 2**31 - 1  # slots, positions and offsets are int32
MAX_PAGE_SIZE = 256
_F32_BOUND = 1e38  # a number below it stays finite in float32 when multiplied by log2(e)

_T = TypeVar("_T")


@dataclass_transform(
    frozen_default=True,
    kw_only_default=True,
    eq_default=False,
    field_specifiers=(dataclasses.field,),
)
def pytree(cls: type[_T]) -> type[_T]:
    """Make a class a frozen dataclass that is a JAX pytree of its fields; decorator.

    Its instances are equal only to themselves: comparing arrays gives arrays.
    """
    made = dataclasses.dataclass(frozen=True, kw_only=True, eq=False)(cls)
    return jax.tree_util.register_dataclass(made)


@contextlib.contextmanager
def default_promotion() -> Iterator[None]:
    """Run under JAX's default promotion rules, whatever the caller has configured.

    Also a decorator. Code under `jax_numpy_rank_promotion="raise"` or
    `jax_numpy_dtype_promotion="strict"` can call the library as it is.
    """
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def as_array(name: str, value: Any) -> Any:
    """Return `value` as something that has a dtype and a shape; 64-bit arrays keep their dtype.

    Python numbers and nested sequences of them become int32, float32 or bool.

    Raises:
        ValueError: `value` is not an array of numbers, or holds an integer beyond int32.
    """
    dtype = getattr(value, "dtype", None)
    if isinstance(dtype, np.dtype) and dtype.kind not in "OSUmM" and hasattr(value, "shape"):
        return value  # jnp.asarray would silently narrow 64-bit NumPy arrays
    if dtype is not None:  # texts, keys, a type, an array of another library
        kind = type(value).__name__
        raise ValueError(f"{name} must be an array of numbers, got a {kind} of {dtype}")
    try:
        traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value))
        array: Any = jnp.asarray(value) if traced else np.asarray(value)
    except (TypeError, ValueError, OverflowError) as e:
        raise ValueError(f"{name}={reprlib.repr(value)} must be an array: {e}") from e
    if array.dtype.kind not in "biuf":
        raise ValueError(f"{name}={reprlib.repr(value)} must be an array of numbers")
    if array.dtype.kind in "iu" and not traced:
        if array.size and not -INT32_MAX - 1 <= array.min() <= array.max() <= INT32_MAX:
            raise ValueError(f"{name}={reprlib.repr(value)} must hold integers of int32")
        array = array.astype(np.int32)
    return array.astype(np.float32) if array.dtype.kind == "f" else array


def checked_array(
    name: str, value: Any, dtype: DTypeLike, shape: tuple[int, ...] | None = None
) -> jax.Array:
    """Return `value` as an array of this dtype and shape; None means one axis of any length.

    Raises:
        ValueError: it has another dtype or shape.
    """
    given = as_array(name, value)
    if not given.size and not hasattr(value, "dtype"):  # an empty list has no dtype of its own
        given = given.astype(dtype)
    shape = (given.size,) if shape is None else shape
    if given.dtype != dtype or given.shape != shape:
        want = f"{jnp.dtype(dtype)}{list(shape)}"
        raise ValueError(f"{name} must be {want}, got {given.dtype}{list(given.shape)}")
    return jnp.asarray(given)


def validate_positive(**sizes: Any) -> None:
    """Raise ValueError unless every size is a positive integer."""
    for name, size in sizes.items():
        if not isinstance(size, int | np.integer) or isinstance(size, bool) or size <= 0:
            raise ValueError(f"{name}={size!r} must be a positive integer")


def validate_page_size(page_size: int) -> None:
    """Raise ValueError unless `page_size` is a power of two up to `MAX_PAGE_SIZE`."""
    if page_size > MAX_PAGE_SIZE or page_size & (page_size - 1):
        raise ValueError(f"{page_size=} must be a power of two from 1 to {MAX_PAGE_SIZE}")


def validate_pool_size(num_pages: int, page_size: int) -> None:
    """Raise ValueError unless the sizes are allowed and int32 can name each slot and one more."""
    validate_positive(num_pages=num_pages, page_size=page_size)
    validate_page_size(page_size)
    if int(num_pages) * int(page_size) + 1 > INT32_MAX:  # NumPy's integers would overflow
        raise ValueError(f"{num_pages=} * {page_size=} + 1 must be at most {INT32_MAX}")


def check_integer(
    name: str, value: Any, least: int, most: int = INT32_MAX, *, power_of_2: bool = False
) -> None:
    """Raise ValueError unless `value` is an integer, or a power of two, in `least`..`most`."""
    rule = "a power of two" if power_of_2 else "an integer"
    is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_integer or not least <= value <= most or (power_of_2 and value & (value - 1)):
        raise ValueError(f"{name}={value!r} must be {rule} in {least}..{most}")


def check_implementation(implementation: Any, names: Sequence[str]) -> None:
    """Raise ValueError unless `implementation` is None or one of `names`."""
    is_name = isinstance(implementation, str) and implementation in names
    if implementation is not None and not is_name:
        raise ValueError(f"{implementation=} must be None or one of {names}")


def check_flag(name: str, value: Any) -> None:
    """Raise ValueError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be True or False")


def check_interpret(interpret: Any, implementation: str | None) -> None:
    """Raise ValueError unless `interpret` is a bool, and False without a family of kernels."""
    check_flag("interpret", interpret)
    if interpret and implementation in (None, "xla"):
        raise ValueError(f"{interpret=} needs a family of kernels, not {implementation=}")


def check_has(name: str, value: Any, *attributes: str) -> None:
    """Raise ValueError unless `value` has these attributes."""
    missing = [attribute for attribute in attributes if not hasattr(value, attribute)]
    if missing:
        raise ValueError(f"{name}={reprlib.repr(value)} must have {', '.join(missing)}")


def check_number(name: str, value: Any) -> None:
    """Raise ValueError unless `value` is a number that is finite in float32."""
    is_number = isinstance(value, int | float | np.integer | np.floating)
    largest = float(np.finfo(np.float32).max)
    if not is_number or isinstance(value, bool) or not -largest <= value <= largest:
        raise ValueError(f"{name}={value!r} must be a finite number")


def static_number(name: str, value: Any) -> float:
    """Return `value` as a finite number that is known while tracing.

    Raises:
        ValueError: it is traced, no number, not finite, or 1e38 or more in size.
    """
    if isinstance(value, jax.core.Tracer):
        raise ValueError(f"{name} must be a static number, got a traced value")
    is_other = isinstance(value, str | bool | np.bool_ | complex | np.complexfloating)
    if is_other or not hasattr(value, "__float__") or np.ndim(value):
        raise ValueError(f"{name}={value!r} must be a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not abs(number) < _F32_BOUND:
        raise ValueError(f"{name}={value!r} must be finite, and less than {_F32_BOUND:g} in size")
    return number


def static_integer(name: str, value: Any) -> int:
    """Return `value` as a positive integer that is known while tracing.

    Values beyond int32 are taken as its largest.

    Raises:
        ValueError: it is traced or not a positive integer.
    """
    number = static_number(name, value)
    if number != int(number) or number < 1:
        raise ValueError(f"{name}={value!r} must be an integer that is at least 1")
    return int(min(number, INT32_MAX))


def checked_dtype(dtype: Any, allowed: Sequence[str]) -> jnp.dtype:
    """Return a dtype, one of those with these names."""
    try:
        element = None if dtype is None else jnp.dtype(dtype)  # NumPy takes None for float64
    except TypeError:
        element = None
    if element is None or element.name not in allowed:
        name = repr(dtype) if element is None else element.name
        raise ValueError(f"dtype={name} must be one of {', '.join(allowed)}")
    return element


def check_num_programs(num_programs: int) -> None:
    """Raise ValueError unless `num_programs` is an integer that CUDA takes as a grid size."""
    check_integer("num_programs", num_programs, 1, 65535)


def check_fixed_split_size(fixed_split_size: int | None, block_k: int) -> None:
    """Raise ValueError unless `fixed_split_size` is None or a multiple of `block_k`."""
    if fixed_split_size is not None:
        check_integer("fixed_split_size", fixed_split_size, block_k, 2**30)
        if fixed_split_size % block_k:
            raise ValueError(f"{fixed_split_size=} must be a multiple of {block_k=}")
