"""What the time of a decode step is, over its limit: launches, attention, products, rest."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax

PARTS = ("products", "attention", "rest", "launches")
_ATTENTION = ("paged_", "mla_", "ragged_plan")  # parts of the names of the library's kernels
_PRODUCTS = re.compile(
    "gemm|gemv|nvjet|cutlass|splitk|linear|between_attentions|grouped_product", re.IGNORECASE
)
# An instruction of a compiled program whose operation, as JAX names it, is a product.
_PRODUCT_OF_HLO = re.compile(r'%([\w.\-]+) = .*op_name="[^"]*dot_general"')
_INSTRUCTION = re.compile(r"%([\w.\-]+) = ")


def times_of(kernels: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the microseconds of a step in attention with its merges, in products, in the rest.

    Args:
        kernels: with `name` and `us`.
    """
    products = _products({kernel["name"] for kernel in kernels})
    found = dict.fromkeys(("attention", "products", "rest"), 0.0)
    for kernel in kernels:
        name = kernel["name"]
        part = "rest"
        if is_attention(name):
            part = "attention"
        elif name in products or _PRODUCTS.search(name):
            part = "products"
        found[part] += kernel["us"]
    return found


def is_attention(kernel: str) -> bool:
    """Whether a kernel is of the library's attention, by its name."""
    return any(word in kernel for word in _ATTENTION)


def _products(names: Collection[str]) -> set[str]:
    """Return which kernels are products, by the program that has most of them.

    XLA computes products of one row in fusions whose names say nothing of them.
    """
    best: tuple[int, set[str]] = (0, set())
    for executable in jax.devices()[0].client.live_executables():
        for module in executable.hlo_modules():
            text = module.to_string()
            found = {_kernel(name) for name in _INSTRUCTION.findall(text)} & set(names)
            if len(found) > best[0]:
                best = len(found), {_kernel(name) for name in _PRODUCT_OF_HLO.findall(text)}
    return best[1]


def _kernel(instruction: str) -> str:
    """Return the name of the kernel of an instruction."""
    return re.sub(r"[.\-]", "_", instruction)


def gap_of(result: Mapping[str, Any]) -> dict[str, float] | None:
    """Return by what each part exceeds the limit, in microseconds; together `wall - limit`.

    The limit of the products is to read the weights, that of attention to read the K/V, and the
    rest has none. Launches are the wall time in which no kernel runs; None without kernel times.
    """
    if not result.get("parts_us") or not result["limit_us"]:
        return None
    parts, per_byte = result["parts_us"], result["limit_us"]
    per_byte /= result["weight_bytes"] + result["kv_bytes"]
    return {
        "products": parts["products"] - result["weight_bytes"] * per_byte,
        "attention": parts["attention"] - result["kv_bytes"] * per_byte,
        "rest": parts["rest"],
        "launches": result["wall_us"] - result["kernel_us"],
    }
