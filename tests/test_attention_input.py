"""What `paged_attention` refuses, and which implementation it takes."""

from __future__ import annotations

import dataclasses
import logging
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_paged as pp
from pallas_paged import attention
from tests.attention_cases import Case


def _bad(**changes):
    names = ("q", "k_pages", "v_pages", "block_tables", "seq_lens")
    arrays = dict(zip(names, Case().make(poison=False), strict=True))
    return {name: changes.get(name, lambda x: x)(array) for name, array in arrays.items()}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": lambda x: x[0]}, r"q.shape=\(4, 32\) must be \[B, num_q_heads, head_dim\]"),
        ({"q": lambda x: x[:, :3]}, "num_q_heads=3 must be a multiple of num_kv_heads=2"),
        ({"q": lambda x: x[..., :16]}, "head_dim=16 of q must equal kv_head_dim=32"),
        ({"q": lambda x: x[:0]}, "must not hold a 0"),
        ({"q": lambda x: x.astype(np.int32)}, "q.dtype=int32 must be float32, bfloat16 or float16"),
        ({"k_pages": lambda x: x[0]}, "k_pages.shape="),
        ({"k_pages": lambda x: x[:, :-1]}, "must equal v_pages.shape"),
        ({"v_pages": lambda x: x.astype(np.float16)}, "v_pages.dtype=float16 must equal q.dtype"),
        ({"block_tables": lambda x: x[:2]}, r"block_tables.shape=\(2, 8\) must be .* with B=3"),
        ({"block_tables": lambda x: x[:, :0]}, "block_tables.shape"),
        (
            {"block_tables": lambda x: x.astype(np.uint32)},
            "block_tables.dtype=uint32 must be int32",
        ),
        ({"seq_lens": lambda x: x[:, None]}, r"seq_lens.shape=\(3, 1\)"),
        ({"seq_lens": lambda x: x.astype(np.int16)}, "seq_lens.dtype=int16 must be int32"),
    ],
)
def test_bad_arrays_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(pp.paged_attention, *_bad(**changes).values())


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Case(page_size=3, pages_per_seq=30), "page_size=3 must be a power of two"),
        (Case(page_size=512, pages_per_seq=1), "page_size=512"),
        (Case(head_dim=257), "head_dim=257 must be at most 256"),
    ],
    ids=["page_size 3", "page_size 512", "head_dim 257"],
)
def test_bad_sizes_are_named(case, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(pp.paged_attention, *case.make())


def test_pools_and_tables_whose_slots_are_no_int32_are_refused():
    shapes = [(1, 4, 16), (1, 2**24, 256, 16), (1, 2**24, 256, 16), (1, 1), (1,)]
    structs = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes[:3]]
    structs += [jax.ShapeDtypeStruct(s, jnp.int32) for s in shapes[3:]]
    with pytest.raises(ValueError, match=r"num_pages=16777216 \* page_size=256 must be at most"):
        jax.eval_shape(pp.paged_attention, *structs)
    structs[1] = structs[2] = jax.ShapeDtypeStruct((1, 4, 256, 16), jnp.bfloat16)
    structs[3] = jax.ShapeDtypeStruct((1, 2**23), jnp.int32)
    with pytest.raises(ValueError, match="pages_per_seq=8388608"):
        jax.eval_shape(pp.paged_attention, *structs)


def test_bad_options_are_named():
    arrays = Case().make()
    with pytest.raises(ValueError, match="implementation='cuda' must be None or one of"):
        pp.paged_attention(*arrays, implementation="cuda")
    with pytest.raises(ValueError, match="must be a DecodeConfig"):
        pp.paged_attention(*arrays, config={"block_k": 64})
    with pytest.raises(ValueError, match="sm_scale must be a static number"):
        jax.jit(lambda s: pp.paged_attention(*arrays, sm_scale=s))(1.0)
    for bad in ("0.5", True, 1j, [1.0], np.ones(1), np.nan, np.inf):
        with pytest.raises(ValueError, match=r"sm_scale=.* must be"):
            pp.paged_attention(*arrays, sm_scale=bad)
    with pytest.raises(NotImplementedError, match="quantized"):
        pp.paged_attention(*arrays, np.ones(1, np.float32))


class TestImplementation:
    def test_a_named_one_never_falls_back(self):
        with pytest.raises(NotImplementedError, match="mosaic_gpu"):
            pp.paged_attention(*Case().make(), implementation="mosaic_gpu")

    @pytest.mark.skipif(jax.default_backend() == "gpu", reason="triton runs here")
    def test_triton_says_that_it_needs_a_gpu(self):
        with pytest.raises(NotImplementedError, match="needs a GPU, but the device is a"):
            pp.paged_attention(*Case().make(), implementation="triton")

    def test_a_jax_without_the_triton_lowering_is_no_import_error(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "pallas_paged.kernels.triton_decode", None)
        monkeypatch.delattr("pallas_paged.kernels.triton_decode", raising=False)
        with pytest.raises(NotImplementedError, match="Triton lowering"):
            pp.paged_attention(*Case().make(), implementation="triton_interpret")

    def test_the_choice_is_logged_once(self, caplog):
        attention._best_implementation.cache_clear()
        with caplog.at_level(logging.INFO, logger="pallas_paged"):
            for _ in range(3):
                pp.paged_attention(*Case().make())
        assert len(caplog.records) == 1
        chosen = "triton" if jax.default_backend() == "gpu" else "xla"
        assert f"implementation={chosen!r}" in caplog.text


class TestConfig:
    GOOD = pp.DecodeConfig(block_k=64, num_programs=8, num_warps=2, num_stages=2)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"block_k": 48}, "block_k=48 must be a power of two"),
            ({"block_k": 8}, "block_k=8"),
            ({"num_warps": 3}, "num_warps=3"),
            ({"num_stages": 0}, "num_stages=0"),
            ({"num_programs": 0}, "num_programs=0"),
            ({"num_programs": 2.5}, "num_programs=2.5 must be an integer"),
            ({"num_programs": 2**31}, "num_programs=2147483648"),
            ({"block_k": 64.0}, "block_k=64.0"),
            ({"num_stages": True}, "num_stages=True"),
        ],
    )
    def test_is_validated_when_built(self, change, message):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(self.GOOD, **change)
