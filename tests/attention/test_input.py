"""Arguments that the attention functions refuse."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_paged as pp
from tests.support import raw
from tests.support.attention_cases import Case
from tests.support.attention_configs import config_of
from tests.support.page_layouts import call_in_layout


def call_of(case):
    """The arrays of a call, by name."""
    return call_in_layout("HPND", case.make(poison=False))


DECODE, RAGGED = call_of(Case()), call_of(Case(q_lens=(4, 1, 2)))
CALLS = [(raw.paged_attention, DECODE), (raw.ragged_paged_attention, RAGGED)]
BOTH = pytest.mark.parametrize(("function", "call"), CALLS, ids=["decode", "ragged"])
CONFIGS = {entry: config_of("triton", ragged="cu_q_lens" in call) for entry, call in CALLS}


NUM_POSITIONAL = {pp.paged_attention: 4, pp.ragged_paged_attention: 5, pp.cascade_attention: 6}


def assert_refused(function, call, changes, message, error=ValueError):
    """The call is refused with these arguments; callables are applied to those of the call."""
    changes = {name: x(call[name]) if callable(x) else x for name, x in changes.items()}
    with pytest.raises(error, match=message):
        function(**call | changes)


def to(dtype):
    return lambda x: x.astype(dtype)


NOT_NUMBERS = ("0.5", True, 1j, [1.0], np.ones(1), np.nan, np.inf)
TOO_LARGE_FLOATS = (1e39, 10**400, np.complex64(1), *NOT_NUMBERS)
INTS, TOO_LARGE = ("block_tables", "seq_lens"), (2**31, -(2**31) - 1)
NO_NAMES = ("cuda", ["xla"], {"xla": 1}, 3, np.array(["xla"]))
NO_ARRAYS = (None, "abc", [[1], [2, 3]], {1: 2})
BAD_ARGUMENTS = [
    ({"q": lambda x: x[0]}, r"q.shape=\(4, 32\) must be \[[BT], num_q_heads, head_dim\]"),
    ({"q": lambda x: x[:, :3]}, "num_q_heads=3 must be a multiple of num_kv_heads=2"),
    ({"q": lambda x: x[..., :16]}, "head_dim=16 of q must equal head_dim=32: the pages are"),
    ({"q": lambda x: x[:0]}, "must not hold a 0"),
    ({"q": to(np.int32)}, "q.dtype=int32 must be float32, bfloat16 or float16"),
    ({"block_tables": lambda x: x[:2]}, r"block_tables.shape=\(2, 8\) must be .* with B=3"),
    ({"block_tables": lambda x: x[:, :0]}, "block_tables.shape"),
    *(({"block_tables": np.zeros(n, np.int32)}, rf"=\({n},\) .* with B=3") for n in (0, 7, 41)),
    ({"block_tables": to(np.uint32)}, "block_tables.dtype=uint32 must be int32"),
    (
        {"block_tables": lambda x: x[:0], "seq_lens": lambda x: x[:0]},
        r"seq_lens.shape=\(0,\) must be \[B\] with B >= 1",
    ),
    ({"seq_lens": lambda x: x[:, None]}, r"seq_lens.shape=\(3, 1\)"),
    ({"seq_lens": to(np.int16)}, "seq_lens.dtype=int16 must be int32"),
    *(({x: bad}, f"^{x}=.* must be an array") for x in DECODE for bad in NO_ARRAYS),
    *(({x: [[n, 0]]}, f"{x}=.* must hold integers of int32") for x in INTS for n in TOO_LARGE),
    *(({"num_seqs": n}, "num_seqs .* must be int32") for n in (1.0, np.int64(2), True)),
    ({"num_seqs": np.int32([2])}, r"num_seqs int32\[1\] must be int32\[\]"),
    *(
        ({name: np.ones(shape, dtype)}, rf"{name} {dtype}{found} must be float32\[num_q_heads\].*4")
        for name in ("alibi_slopes", "sinks")
        for shape, dtype, found in (
            (2, "float32", r"\[2\]"),
            ((4, 1), "float32", r"\[4, 1\]"),
            (4, "float64", r"\[4\]"),
            (4, "int32", r"\[4\]"),
        )
    ),
    ({"alibi_slopes": "abc"}, "^alibi_slopes=.* must be an array"),
    ({"sinks": [[1.0], [2.0, 3.0]]}, "^sinks=.* must be an array"),
    *(({"implementation": x}, "implementation=.* must be None or one of") for x in NO_NAMES),
    ({"config": {"block_k": 64}}, r"config=\{'block_k': 64\} must be a \w+Config"),
    *(({"soft_cap": x}, f"soft_cap={x} must be from 1e-30") for x in (0, -2.0, 1e-38)),
    ({"soft_cap": 1e37}, r"soft_cap=1e\+37 must be from .* to 1e\+36"),
    *(({"interpret": x}, "interpret=.* must be True or False") for x in (1, None, "no")),
    *(({"return_lse": x}, "return_lse=.* must be True or False") for x in ("no", 1)),
    ({"sliding_window": np.True_}, "sliding_window=.* must be a number"),
    ({"interpret": True}, "interpret=True needs a family of kernels, not implementation=None"),
    ({"interpret": True, "implementation": "xla"}, "needs a family of kernels, not .*'xla'"),
    ({"sliding_window": 0}, "sliding_window=0 must be an integer that is at least 1"),
    ({"sliding_window": -3}, "sliding_window=-3 must be"),
    ({"sliding_window": 2.5}, "sliding_window=2.5 must be an integer"),
    *(({x: bad}, f"{x}=.* must be") for x in ("sm_scale", "soft_cap") for bad in TOO_LARGE_FLOATS),
    *(({"sliding_window": x}, "sliding_window=.* must be") for x in NOT_NUMBERS),
    *(
        ({"fixed_split_size": bad}, f"fixed_split_size={bad!r} must be")
        for bad in (0, -64, 63, 96, 1.5, "64", True, 2**30 + 64, 2**31)
    ),
]


@BOTH
@pytest.mark.parametrize(
    ("changes", "message"), BAD_ARGUMENTS, ids=lambda x: x if isinstance(x, str) else ""
)
def test_bad_arguments_are_refused_by_name(function, call, changes, message):
    assert_refused(function, call, changes, message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": lambda x: x[:2]}, r"q.shape=\(2, .* seq_lens.shape=\(3,\) must have the same batch"),
        (call_of(Case(page_size=512, pages_per_seq=1)), "page_size=512"),
        (call_of(Case(head_dim=513)), "head_dim=513 must be at most 512"),
        ({"seq_lens": None}, "seq_lens=None must be an array"),
    ],
    ids=["rows of q", "page_size 512", "head_dim 513", "no lengths"],
)
def test_bad_decode_calls_are_refused_by_name(changes, message):
    assert_refused(raw.paged_attention, DECODE, changes, message)


TREE = np.ones((3, 4, 4), bool)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cu_q_lens": lambda x: x[:-1]}, r"cu_q_lens.shape=\(3,\) must be \(4,\): 0, then .* 3 "),
        ({"cu_q_lens": lambda x: x[:, None]}, r"cu_q_lens.shape=\(4, 1\)"),
        ({"cu_q_lens": to(np.int64)}, "cu_q_lens.dtype=int64 must be int32"),
        ({"cu_q_lens": None}, "^cu_q_lens=.* must be an array"),
        *(({"expected_seqs": n}, f"expected_seqs={n!r} must be") for n in (0, -1, 1.5, "1")),
        *(({"causal": x}, "must be True or False") for x in (None, 0, np.bool_(False), "no")),
        ({"causal": False, "tree_mask": TREE}, "causal=False excludes a tree_mask"),
        ({"tree_mask": np.ones((3, 4, 5), bool)}, r"bool\[3, 4, 5\] must be bool\[B, n, n\]"),
        ({"tree_mask": TREE[0]}, r"tree_mask bool\[4, 4\]"),
        ({"tree_mask": TREE[:, :0, :0]}, r"tree_mask bool\[3, 0, 0\]"),
        ({"tree_mask": TREE.astype(np.int8)}, r"tree_mask int8\[3, 4, 4\]"),
        ({"tree_mask": TREE[:2]}, r"tree_mask.shape=\(2, 4, 4\) must begin with B=3"),
        ({"tree_mask": jax.ShapeDtypeStruct((3, 2**15, 2**15), bool)}, "at most 2147483647 elem"),
    ],
)
def test_bad_ragged_calls_are_refused_by_name(changes, message):
    assert_refused(raw.ragged_paged_attention, RAGGED, changes, message)


@pytest.mark.parametrize(
    ("num_pages", "pages_per_seq", "message"),
    [(2**24, 1, r"num_pages=16777216 \* page_size=256"), (4, 2**23, "pages_per_seq=8388608")],
)
def test_slots_beyond_int32_are_refused(num_pages, pages_per_seq, message):
    q, pages = (jax.ShapeDtypeStruct(x, "bfloat16") for x in ((1, 4, 16), (1, num_pages, 256, 16)))
    tables, lens = (jax.ShapeDtypeStruct(x, jnp.int32) for x in ((1, pages_per_seq), (1,)))
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(raw.paged_attention, q, pages, pages, tables, lens)


@BOTH
class TestOptions:
    @pytest.mark.parametrize("name", ["sm_scale", "soft_cap", "sliding_window"])
    def test_traced_numbers_are_refused(self, function, call, name):
        with pytest.raises(ValueError, match=f"{name} must be a static number"):
            jax.eval_shape(lambda x: function(**call | {name: x}), 1.0)

    def test_numpy_numbers_are_accepted(self, function, call):
        options = dict(sm_scale=np.float32(0.5), soft_cap=np.float64(2), sliding_window=np.int64(3))
        jax.eval_shape(partial(function, **options), **call)

    def test_a_fixed_split_size_excludes_a_config(self, function, call):
        options = dict(fixed_split_size=64, config=CONFIGS[function])
        assert_refused(function, call, options, "fixed_split_size=64 chooses a config")

    def test_a_config_of_the_other_function_is_refused(self, function, call):
        [wrong] = (config for other, config in CONFIGS.items() if other is not function)
        assert_refused(function, call, {"config": wrong}, r"=\w+Config\(.* must be a \w+Config")


@pytest.mark.parametrize(
    ("entry", "name", "message"),
    [
        (pp.paged_attention, "softmax_scale", "did you mean 'sm_scale'"),
        (pp.paged_attention, "logits_soft_cap", "did you mean 'soft_cap'"),
        (pp.paged_attention, "window_size", "did you mean 'sliding_window'"),
        (pp.paged_attention, "lengths", "did you mean 'seq_lens'"),
        (pp.paged_attention, "sink", "did you mean 'sinks'"),
        (pp.paged_attention, "causal", "$"),
        (pp.ragged_paged_attention, "casual", "did you mean 'causal'"),
        (pp.cascade_attention, "fixed_split_size", "which it does not support"),
        *((pp.paged_attention, x, rf"the layer, LayerKV\(k_pages, v_pages, {x}=")
          for x in ("k_scales", "kv_layout")),
    ],
)  # fmt: skip
def test_an_unknown_keyword_is_refused_with_the_name_that_is_meant(entry, name, message):
    arrays = [None] * 6
    with pytest.raises(TypeError, match=f"{entry.__name__}.*{name!r}.*{message}"):
        entry(*arrays[: NUM_POSITIONAL[entry]], **{name: 1})


@pytest.mark.parametrize(
    ("function", "symbolic", "how", "message"),
    [
        (raw.paged_attention, ("q", "block_tables", "seq_lens"), {"implementation": "xla"}, None),
        (raw.paged_attention, ("q", "block_tables", "seq_lens"),
         {"implementation": "triton_interpret"}, "needs sizes that are numbers, not num_seqs=b"),
        (raw.paged_attention, ("k_pages", "v_pages"), {}, "pages.shape=.* must be numbers"),
        (raw.ragged_paged_attention, ("q",), {}, "q.shape=.* must be numbers"),
    ],
    ids=["xla", "kernel", "pages", "ragged"],
)  # fmt: skip
def test_of_symbolic_sizes_only_sequences_of_decoding_are_taken(function, symbolic, how, message):
    [size] = jax.export.symbolic_shape("b")
    call = RAGGED if function is raw.ragged_paged_attention else DECODE
    shapes = {
        name: jax.ShapeDtypeStruct((size, *x.shape[1:]) if name in symbolic else x.shape, x.dtype)
        for name, x in call.items()
    }
    export = jax.export.export(jax.jit(partial(function, **how)))
    if message is None:
        assert export(**shapes).in_avals[0].shape[0] == size
    else:
        with pytest.raises(NotImplementedError, match=message):
            export(**shapes)


def test_pages_without_a_layer_are_refused():
    with pytest.raises(ValueError, match=r"must be a LayerKV, got ndarray: LayerKV\(k_pages, v_p"):
        pp.paged_attention(
            DECODE["q"], DECODE["k_pages"], DECODE["block_tables"], DECODE["seq_lens"]
        )


@pytest.mark.parametrize("good", CONFIGS.values(), ids=["decode", "ragged"])
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
        ({"fixed_split_size": 24}, "fixed_split_size=24 must be a multiple of block_k=16"),
        ({"fixed_split_size": 8}, "fixed_split_size=8 must be an integer in"),
        ({"fixed_split_size": 64.0}, "fixed_split_size=64.0"),
    ],
)
def test_a_config_is_validated_when_built(good, change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(good, **change)


@pytest.mark.parametrize("block_q", [8, 48, 512, 16.0])
def test_tiles_of_queries_are_powers_of_two(block_q):
    with pytest.raises(ValueError, match=f"block_q={block_q} must be a power of two"):
        dataclasses.replace(CONFIGS[raw.ragged_paged_attention], block_q=block_q)
