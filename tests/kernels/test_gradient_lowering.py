"""The gradients of Triton's and of Hopper's kernels lower for a GPU on a machine without one."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.devices import lower_for_cuda
from tests.support.lowering import CUSTOM_CALL, few_with_every_level, named, pairwise
from tests.support.marks import needs_mosaic, needs_triton, slow
from tests.support.programs import Program

PER_HEAD = np.ones(6, np.float32)
OPTIONS = dict(
    sliding_window=100, soft_cap=30.0, sm_scale=-0.1, return_lse=True,
    tree_mask=np.ones((3, 8, 8), bool), alibi_slopes=PER_HEAD, sinks=PER_HEAD,
)  # fmt: skip


def gradient(implementation, num_q_heads, num_kv_heads, head_dim, options=None, **sizes):
    """The gradient of a call in q, pages, slopes and sinks: its kernels by name, and its text."""
    options = options or {}
    program = Program(
        function="ragged", implementation=implementation, num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads, head_dim=head_dim, num_seqs=3, num_tokens=500, max_kv_len=512,
        options=options, **sizes,
    )  # fmt: skip
    _, arrays = program.call_and_shapes()
    names = ["q"] if program.kv_dtype else ["q", "k_pages", "v_pages"]
    differentiated = {name: arrays.pop(name) for name in names if name in arrays}
    of_heads = {name: options[name] for name in ("alibi_slopes", "sinks") if name in options}

    def loss(differentiated, of_heads, arrays):
        given = dataclasses.replace(program, options=options | of_heads)
        call, _ = given.call_and_shapes()
        results = jax.tree.leaves(call(arrays | differentiated))
        return sum(x.astype(jnp.float32).sum() for x in results)

    arrays = differentiated, of_heads, arrays
    text = lower_for_cuda(jax.grad(loss, (0, 1)), *arrays).as_text()
    return set(re.findall(r"attention_gradient_of_([a-z]+)", text)), text


@needs_triton
@pytest.mark.parametrize(
    ("heads", "page_size", "dtype", "kv_dtype", "options"),
    [
        ((7, 1, 64), 256, "float16", None, {}),
        ((8, 8, 80), 1, "float32", None, {}),
        ((6, 2, 80), 16, "bfloat16", None, OPTIONS),
        ((8, 2, 64), 16, "bfloat16", "int8", {}),
        *slow(((32, 8, n), 16, "bfloat16", None, {}) for n in (16, 128, 192, 256, 512)),
        *slow([((6, 2, 80), 16, "float32", None, OPTIONS)]),
        *slow([((8, 2, 64), 16, "bfloat16", "float8_e4m3fn", {})]),
    ],
    ids=lambda x: "options" if x is OPTIONS else str(x),
)
def test_triton(heads, page_size, dtype, kv_dtype, options):
    types = dict(dtype=dtype, kv_dtype=kv_dtype)
    kernels, _ = gradient("triton", *heads, options, page_size=page_size, **types)
    assert kernels == ({"queries"} if kv_dtype else {"queries", "keys"})


HOPPER = pairwise(
    head_dim=(64, 128),
    group=(1, 3, 4),
    page_size=(8, 16, 256),
    dtype=("bfloat16", "float16"),
    kv_layout=("HPND", "NH2D"),
    causal=(True, False),
    sliding_window=(None, 100),
    soft_cap=(None, 30.0),
)


@needs_triton
@needs_mosaic
@pytest.mark.parametrize("row", few_with_every_level(HOPPER), ids=named)
def test_hopper(row):
    options = {name: row[name] for name in ("causal", "sliding_window", "soft_cap")}
    sizes = {name: row[name] for name in ("page_size", "dtype", "kv_layout")}
    heads = 2 * row["group"], 2, row["head_dim"]
    kernels, text = gradient("mosaic_sm90", *heads, options, **sizes)
    assert kernels == {"queries", "keys", "pages"}  # that of pages is Triton's
    assert len(CUSTOM_CALL.findall(text)) == 4  # and two of the forward pass
