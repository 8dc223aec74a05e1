"""Arguments that the attention functions refuse."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_paged as pp
from tests.support.attention_cases import Case
from tests.support.page_layouts import call_in_layout

NAMES = ("q", "k_pages", "v_pages", "block_tables", "seq_lens", "cu_q_lens")
RAGGED = Case(q_lens=(4, 1, 2))
CALLS = [(pp.paged_attention, Case()), (pp.ragged_paged_attention, RAGGED)]
BOTH = pytest.mark.parametrize(("function", "case"), CALLS, ids=["decode", "ragged"])


@functools.cache
def arrays_of(case):
    """The arrays of a call."""
    return case.make(poison=False)


def changed(case, changes):
    """The arrays of a call, with some of them replaced by wrong ones."""
    arrays = arrays_of(case)
    return [changes.get(name, lambda x: x)(x) for name, x in zip(NAMES, arrays, strict=False)]


@BOTH
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": lambda x: x[0]}, r"q.shape=\(4, 32\) must be \[[BT], num_q_heads, head_dim\]"),
        ({"q": lambda x: x[:, :3]}, "num_q_heads=3 must be a multiple of num_kv_heads=2"),
        ({"q": lambda x: x[..., :16]}, "head_dim=16 of q must equal kv_head_dim=32"),
        ({"q": lambda x: x[:0]}, "must not hold a 0"),
        ({"q": lambda x: x.astype(np.int32)}, "q.dtype=int32 must be float32, bfloat16 or float16"),
        ({"k_pages": lambda x: x[0]}, "k_pages.shape="),
        ({"k_pages": lambda x: x[:, :-1]}, "must equal v_pages.shape"),
        ({"v_pages": lambda x: x.astype(np.float16)}, "v_pages.dtype=float16 must equal q.dtype"),
        ({"block_tables": lambda x: x[:2]}, r"block_tables.shape=\(2, 8\) must be .* with B=3"),
        ({"block_tables": lambda x: x[:, :0]}, "block_tables.shape"),
        *(
            ({"block_tables": lambda x, n=n: np.zeros(n, np.int32)}, rf"shape=\({n},\) .* with B=3")
            for n in (0, 7, 41)
        ),
        (
            {"block_tables": lambda x: x.astype(np.uint32)},
            "block_tables.dtype=uint32 must be int32",
        ),
        (
            {"block_tables": lambda x: x[:0], "seq_lens": lambda x: x[:0]},
            r"seq_lens.shape=\(0,\) must be \[B\] with B >= 1",
        ),
        ({"seq_lens": lambda x: x[:, None]}, r"seq_lens.shape=\(3, 1\)"),
        ({"seq_lens": lambda x: x.astype(np.int16)}, "seq_lens.dtype=int16 must be int32"),
    ],
)
def test_bad_arrays_are_refused_by_name(function, case, changes, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(function, *changed(case, changes))


def test_q_of_decode_without_a_row_for_each_sequence_is_refused():
    with pytest.raises(
        ValueError,
        match=r"q.shape=\(2, 4, 32\) and seq_lens.shape=\(3,\) must have the same batch size",
    ):
        jax.eval_shape(pp.paged_attention, *changed(Case(), {"q": lambda x: x[:2]}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x[:-1], r"cu_q_lens.shape=\(3,\) must be \(4,\): 0, then .* of 3 "),
        (lambda x: x[:, None], r"cu_q_lens.shape=\(4, 1\)"),
        (lambda x: x.astype(np.int64), "cu_q_lens.dtype=int64 must be int32"),
    ],
)
def test_bad_cu_q_lens_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        pp.ragged_paged_attention(*changed(RAGGED, {"cu_q_lens": change}))


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Case(page_size=3, pages_per_seq=30), "page_size=3 must be a power of two"),
        (Case(page_size=512, pages_per_seq=1), "page_size=512"),
        (Case(head_dim=513), "head_dim=513 must be at most 512"),
    ],
    ids=["page_size 3", "page_size 512", "head_dim 257"],
)
def test_bad_sizes_are_refused_by_name(case, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(pp.paged_attention, *arrays_of(case))


def test_pools_and_tables_with_slots_beyond_int32_are_refused():
    shapes = [(1, 4, 16), (1, 2**24, 256, 16), (1, 2**24, 256, 16), (1, 1), (1,)]
    structs = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes[:3]]
    structs += [jax.ShapeDtypeStruct(s, jnp.int32) for s in shapes[3:]]
    with pytest.raises(ValueError, match=r"num_pages=16777216 \* page_size=256 must be at most"):
        jax.eval_shape(pp.paged_attention, *structs)
    structs[1] = structs[2] = jax.ShapeDtypeStruct((1, 4, 256, 16), jnp.bfloat16)
    structs[3] = jax.ShapeDtypeStruct((1, 2**23), jnp.int32)
    with pytest.raises(ValueError, match="pages_per_seq=8388608"):
        jax.eval_shape(pp.paged_attention, *structs)


@BOTH
class TestOptions:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"implementation": "cuda"}, "implementation='cuda' must be None or one of"),
            ({"config": {"block_k": 64}}, r"config=\{'block_k': 64\} must be a \w+Config"),
            ({"soft_cap": 0}, "soft_cap=0 must be positive"),
            ({"soft_cap": -2.0}, "soft_cap=-2.0 must be positive"),
            ({"soft_cap": 1e-38}, "soft_cap=1e-38 must be positive, and at least 1e-30"),
            ({"sliding_window": 0}, "sliding_window=0 must be an integer that is at least 1"),
            ({"sliding_window": -3}, "sliding_window=-3 must be"),
            ({"sliding_window": 2.5}, "sliding_window=2.5 must be an integer"),
            *(
                ({name: value}, f"{name}=.* must be")
                for name in ("sm_scale", "soft_cap", "q_scale")
                for value in (1e39, 10**400, np.complex64(1))
            ),
            ({"q_scale": np.inf}, "q_scale=inf must be finite"),
            ({"q_scale": "1"}, "q_scale='1' must be a number"),
            ({"q_scale": 1e30, "sm_scale": 1e30}, r"sm_scale \* q_scale=.* must be finite"),
            *(({"num_seqs": n}, "num_seqs .* must be int32") for n in (1.0, np.int64(2), True)),
            ({"num_seqs": np.int32([2])}, r"num_seqs int32\[1\] must be int32\[\]"),
            *(
                ({name: value}, rf"{name} {dtype}{shape} must be float32\[num_q_heads\] .*=4")
                for name in ("alibi_slopes", "sinks")
                for value, dtype, shape in (
                    (np.ones(2, np.float32), "float32", r"\[2\]"),
                    (np.ones((4, 1), np.float32), "float32", r"\[4, 1\]"),
                    (np.ones(4, np.float64), "float64", r"\[4\]"),
                    (np.ones(4, np.int32), "int32", r"\[4\]"),
                )
            ),
        ],
        ids=str,
    )
    def test_bad_values_are_refused_by_name(self, function, case, options, message):
        with pytest.raises(ValueError, match=message):
            function(*arrays_of(case), **options)

    @pytest.mark.parametrize("name", ["sm_scale", "soft_cap", "sliding_window"])
    def test_traced_and_infinite_numbers_are_refused(self, function, case, name):
        arrays = arrays_of(case)
        with pytest.raises(ValueError, match=f"{name} must be a static number"):
            jax.jit(lambda x: function(*arrays, **{name: x}))(1.0)
        for bad in ("0.5", True, 1j, [1.0], np.ones(1), np.nan, np.inf):
            with pytest.raises(ValueError, match=rf"{name}=.* must be"):
                function(*arrays, **{name: bad})

    def test_numpy_numbers_are_accepted(self, function, case):
        options = dict(sm_scale=np.float32(0.5), soft_cap=np.float64(2), sliding_window=np.int64(3))
        jax.eval_shape(lambda *x: function(*x, **options), *arrays_of(case))

    def test_a_config_of_the_other_function_is_refused(self, function, case):
        loop = dict(block_k=16, num_programs=1, num_warps=1, num_stages=1)
        decode = function is pp.paged_attention
        wrong = pp.RaggedConfig(block_q=16, **loop) if decode else pp.DecodeConfig(**loop)
        with pytest.raises(ValueError, match=r"config=\w+Config\(.* must be a \w+Config"):
            function(*arrays_of(case), config=wrong)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (np.ones((3, 4, 5), bool), r"tree_mask bool\[3, 4, 5\] must be bool\[B, n, n\]"),
        (np.ones((4, 4), bool), r"tree_mask bool\[4, 4\]"),
        (np.ones((3, 0, 0), bool), r"tree_mask bool\[3, 0, 0\]"),
        (np.ones((3, 4, 4), np.int8), r"tree_mask int8\[3, 4, 4\]"),
        (np.ones((2, 4, 4), bool), r"tree_mask.shape=\(2, 4, 4\) must begin with B=3"),
    ],
    ids=["not square", "no rows", "empty", "int8", "2 rows"],
)
def test_a_bad_tree_mask_is_refused_by_name(mask, message):
    with pytest.raises(ValueError, match=message):
        pp.ragged_paged_attention(*arrays_of(RAGGED), tree_mask=mask)


def test_a_tree_mask_beyond_int32_elements_is_refused():
    mask = jax.ShapeDtypeStruct((3, 2**15, 2**15), bool)
    with pytest.raises(ValueError, match="must hold at most 2147483647 elements"):
        jax.eval_shape(pp.ragged_paged_attention, *arrays_of(RAGGED), tree_mask=mask)


@BOTH
class TestNotArrays:
    @pytest.mark.parametrize("name", ["q", "k_pages", "v_pages", "block_tables", "seq_lens"])
    @pytest.mark.parametrize("bad", [None, "abc", [[1], [2, 3]], {1: 2}], ids=repr)
    def test_are_refused_by_name(self, function, case, name, bad):
        arrays = dict(zip(NAMES, arrays_of(case), strict=False)) | {name: bad}
        with pytest.raises(ValueError, match=f"^{name}=.* must be an array"):
            function(**arrays)

    @pytest.mark.parametrize("name", ["block_tables", "seq_lens"])
    def test_integers_beyond_int32_are_named(self, function, case, name):
        arrays = dict(zip(NAMES, arrays_of(case), strict=False))
        for beyond in (2**31, -(2**31) - 1):
            wrong = np.zeros(arrays[name].shape, np.int64)
            wrong.flat[1] = beyond
            with pytest.raises(ValueError, match=f"{name}=.* must hold integers of int32"):
                function(**arrays | {name: wrong.tolist()})


@pytest.mark.parametrize(
    ("name", "bad"),
    [("cu_q_lens", None), ("alibi_slopes", "abc"), ("sinks", [[1.0], [2.0, 3.0]])],
)
def test_optional_arrays_are_named(name, bad):
    arrays = dict(zip(NAMES, arrays_of(RAGGED), strict=True)) | {name: bad}
    with pytest.raises(ValueError, match=f"^{name}=.* must be an array"):
        pp.ragged_paged_attention(**arrays)


def test_arrays_of_cascade_attention_are_named():
    arrays = arrays_of(Case())
    for groups, name in (((None, [0, 3]), "prefix_lens"), (([8], "ab"), "cu_group_sizes")):
        with pytest.raises(ValueError, match=f"^{name}=.* must be an array"):
            pp.cascade_attention(*arrays, *groups)


@pytest.mark.parametrize("implementation", [["xla"], {"xla": 1}, 3, np.array(["xla"])], ids=repr)
@BOTH
def test_an_implementation_other_than_a_name_is_refused(function, case, implementation):
    with pytest.raises(ValueError, match=r"implementation=.* must be None or one of"):
        function(*arrays_of(case), implementation=implementation)


@BOTH
class TestFixedSplitSize:
    @pytest.mark.parametrize("bad", [0, -64, 63, 96, 1.5, "64", True, 2**30 + 64, 2**31])
    def test_is_a_multiple_of_64(self, function, case, bad):
        with pytest.raises(ValueError, match=f"fixed_split_size={bad!r} must be"):
            function(*arrays_of(case), fixed_split_size=bad)

    def test_excludes_a_config(self, function, case):
        config = TestConfig.GOOD[function is pp.ragged_paged_attention]
        with pytest.raises(ValueError, match="fixed_split_size=64 chooses a config"):
            function(*arrays_of(case), fixed_split_size=64, config=config)


@pytest.mark.parametrize("bad", [0, -1, 1.5, "1"])
def test_expected_rows_are_a_positive_integer(bad):
    case = RAGGED
    with pytest.raises(ValueError, match=f"expected_seqs={bad!r} must be"):
        pp.ragged_paged_attention(*arrays_of(case), expected_seqs=bad)


class TestKeywordsOfTheJaxOp:
    def test_mean_the_same(self):
        """The traces are equal, so the results are."""
        q, k_pages, v_pages, tables, lengths = arrays_of(Case())
        pages, scales = [x.astype(np.int8) for x in (k_pages, v_pages)], np.ones(k_pages.shape[:3])

        def trace(lens, k_scales, v_scales, cap):
            def call(q, k_pages, v_pages, tables, x, y, z):
                arrays = {lens: x, k_scales: y, v_scales: z}
                return pp.paged_attention(q, k_pages, v_pages, tables, **arrays, **{cap: 2.0})

            return str(jax.make_jaxpr(call)(q, *pages, tables, lengths, *[np.float32(scales)] * 2))

        ours = trace("seq_lens", "k_scales", "v_scales", "soft_cap")
        theirs = "lengths", "k_scales_pages", "v_scales_pages", "attn_logits_soft_cap"
        assert trace(*theirs) == ours
        assert trace("lengths", "v_scales_pages", "k_scales_pages", "soft_cap") != ours

    def test_are_refused_beside_ours(self):
        arrays = arrays_of(Case())
        with pytest.raises(TypeError, match="got seq_lens twice, the second time as lengths"):
            pp.paged_attention(*arrays, lengths=arrays[-1])

    def test_lengths_are_required(self):
        for missing in ({}, {"lengths": None}):
            with pytest.raises(ValueError, match="seq_lens=None must be an array"):
                pp.paged_attention(*arrays_of(Case())[:4], **missing)

    def test_unknown_ones_are_refused(self):
        with pytest.raises(TypeError, match="keyword argument 'k_splits'"):
            pp.paged_attention(*arrays_of(Case()), k_splits=4)


class TestConfig:
    GOOD = (
        pp.DecodeConfig(block_k=64, num_programs=8, num_warps=2, num_stages=2),
        pp.RaggedConfig(block_q=32, block_k=64, num_programs=8, num_warps=2, num_stages=2),
    )

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
            ({"fixed_split_size": 96}, "fixed_split_size=96 must be a multiple of block_k=64"),
            ({"fixed_split_size": 32}, "fixed_split_size=32 must be an integer in"),
            ({"fixed_split_size": 64.0}, "fixed_split_size=64.0"),
        ],
    )
    def test_is_validated_when_built(self, change, message):
        for good in self.GOOD:
            with pytest.raises(ValueError, match=message):
                dataclasses.replace(good, **change)

    @pytest.mark.parametrize("block_q", [8, 48, 512, 16.0])
    def test_tiles_of_queries_are_powers_of_two(self, block_q):
        with pytest.raises(ValueError, match=f"block_q={block_q} must be a power of two"):
            dataclasses.replace(self.GOOD[1], block_q=block_q)


def refused(kv_layout, message, **changes):
    call = call_in_layout("HPND", arrays_of(Case(head_dim=16))) | changes
    with pytest.raises(ValueError, match=message):
        pp.paged_attention(**call, kv_layout=kv_layout)


def test_pages_that_are_not_of_the_layout_are_refused():
    one = np.zeros((5, 8, 4, 16), np.float32)
    refused("NHDX", "kv_layout='NHDX' must be one of .*'HPND', 'NHD'")
    refused(["NHD"], r"kv_layout=\['NHD'\] must be one of")
    refused("NH2D", "v_pages must be None with kv_layout='NH2D', whose k_pages hold K and V")
    refused("NHD", "v_pages=None must be an array", v_pages=None)
    refused("2NHD", r"must be \[num_pages, 2, page_size, num_kv_heads, head_dim\] with kv_layout=",
            k_pages=one, v_pages=None)  # fmt: skip
    three = np.zeros((5, 3, 8, 2, 16), np.float32)
    refused("2NHD", r"k_pages.shape=\(5, 3, 8, 2, 16\) must be", k_pages=three, v_pages=None)
    refused("NH2D", r"must be \[num_pages, page_size, 2 \* num_kv_heads, head_dim\]",
            k_pages=one[:, :, :3], v_pages=None)  # fmt: skip
    refused("N2HD", "num_q_heads=4 must be a multiple of num_kv_heads=3",
            k_pages=np.zeros((5, 8, 6, 16), np.float32), v_pages=None)  # fmt: skip


@pytest.mark.parametrize("causal", [None, 0, np.bool_(False), "no"])
def test_causal_other_than_a_bool_is_refused(causal):
    with pytest.raises(ValueError, match="must be True or False"):
        pp.ragged_paged_attention(*arrays_of(RAGGED), causal=causal)


def test_a_tree_mask_excludes_causal_false():
    with pytest.raises(ValueError, match="causal=False excludes a tree_mask"):
        mask = np.ones((3, 4, 4), bool)
        pp.ragged_paged_attention(*arrays_of(RAGGED), causal=False, tree_mask=mask)
