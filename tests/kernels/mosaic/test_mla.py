"""Multi-head latent attention by the kernels of both families, without a GPU interpreted."""

import itertools
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_paged as pp
from pallas_paged.kernels import xla
from pallas_paged.kernels.call import Arrays, Call, Sizes
from pallas_paged.kernels.logits import LogitOptions
from pallas_paged.kernels.mosaic import support as mosaic_support
from pallas_paged.kernels.mosaic_sm80.config import LatentConfig, head_tiles
from pallas_paged.kernels.mosaic_sm80.heuristics import latent_config, latent_shared_memory
from pallas_paged.kernels.mosaic_sm90.support import why_not_latents
from tests.support.attention_calls import (
    STATIC,
    assert_near,
    assert_same_bits,
    name_of,
    options_with_every_mask,
)
from tests.support.attention_cases import mosaic_case, without_tokens_left_of
from tests.support.attention_oracle import attend
from tests.support.devices import HOPPER, implementations_here
from tests.support.marks import slow
from tests.support.page_layouts import of_heads
from tests.support.quantized_cases import Quantized

if reason := mosaic_support.why_not_jax():
    pytest.skip(reason, allow_module_level=True)

from pallas_paged.kernels.mosaic_sm80 import latent

# The interpreter multiplies the poisoned values too.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")

SM80, SM90 = "mosaic_sm80", "mosaic_sm90"
INTERPRETED = {SM80, SM90} - {*implementations_here()}
SCALE = 0.1
V = 64  # elements of a latent, of Hopper's 512; a rotary key has the others
latents = partial(mosaic_case, num_kv_heads=1, pages_per_seq=9)
small = partial(latents, head_dim=V + 64, num_q_heads=4)
FEW = (130, 0, 64, 1)
decode = partial(small, seq_lens=FEW)
# A tile has rows of several tokens; a sequence has several tiles; one has no queries.
ragged = partial(small, seq_lens=(100, 40, 11), q_lens=(5, 0, 11), num_tokens=18)
TREE = np.random.default_rng(0).random((3, 11, 11)) < 0.5
TREE[0, 7] = False
# More than 16 query rows of a sequence: Hopper's kernel leaves fewer to that for Ampere.
large = partial(latents, head_dim=512 + 64)
decode_90 = partial(large, seq_lens=(70, 0), num_q_heads=24)
ragged_90 = partial(large, seq_lens=(70, 20), q_lens=(6, 5), num_tokens=13, num_q_heads=3)
TREE_90 = np.random.default_rng(0).random((2, 6, 6)) < 0.5
TREE_90[0, 3] = False
every_option = partial(options_with_every_mask, sliding_window=30)


@partial(jax.jit, static_argnames=(*STATIC, "interpret", "v"))
def _compiled(q, pages, *arrays, kv_layout, v, k_scales=None, **options):
    layer = pp.LayerKV(pages, k_scales=k_scales, kv_layout=kv_layout, v_head_dim=v)
    how = dict(sm_scale=SCALE, return_lse=True)
    return pp.mla_attention(q[..., :v], q[..., v:], layer, *arrays, **how, **options)


def attend_latents(arrays, v=V, family=SM80, kv_layout="HPND", **options):
    """(out, lse) of a call whose K pages are latents of `v` elements; with `k_scales` in HPND."""
    q, pages, _, *others = arrays
    how = dict(kv_layout=kv_layout, v=v, implementation=family, interpret=family in INTERPRETED)
    return _compiled(q, of_heads(pages, kv_layout), *others, **how, **options)


def expected_of(arrays, v=V, **options):
    q, pages, _, *others = arrays
    out, lse = attend(q, pages, pages, *others, sm_scale=SCALE, **options)
    return out[..., :v], lse


SPLIT = dict(fixed_split_size=64)
INT8, FP8 = (dict(kv_dtype=x) for x in ("int8", "float8_e4m3fn"))
# Cases, the kinds of their pages, where {} has the queries' 16 bits, and options.
CALLS = [
    (decode(), {}, SPLIT),
    (decode(num_q_heads=64, dtype="float16"), {}, every_option(64)),  # two tiles of heads
    (ragged(), {}, every_option(4, **SPLIT)),  # rows of a tile see keys in its second part only
    (decode(head_dim=128 + 64), INT8, SPLIT),
]
SLOW_CALLS = [
    # A query sees no key, neither in the first part of its tile nor in the second.
    (
        ragged(seq_lens=(70, 40, 11), q_lens=(8, 2, 8)),
        {},
        dict(tree_mask=TREE, sliding_window=6, **SPLIT),
    ),
    (decode(), {}, {}),
    (decode(num_q_heads=64), {}, SPLIT),
    (decode(num_q_heads=40), {}, every_option(40)),  # tiles begin within the heads of a token
    *((decode(page_size=size, pages_per_seq=256 // size), {}, {}) for size in (1, 128)),
    *((decode(), {}, dict(kv_layout=kv_layout)) for kv_layout in ("NHD", "HND")),
    (decode(head_dim=V + 24), {}, {}),  # a rotary key is padded
    (ragged(), {}, {}),
    (ragged(num_q_heads=48), {}, every_option(48)),
    (ragged(num_q_heads=64), {}, dict(tree_mask=TREE)),
    (ragged(), {}, dict(causal=False)),
    (ragged(head_dim=128 + 32), FP8, every_option(4, **SPLIT)),
    (decode(head_dim=128 + 64), INT8 | dict(per_tensor=True), {}),
    (decode(head_dim=256 + 64, dtype="float16", num_q_heads=40), INT8, {}),
    (ragged(head_dim=128 + 64), FP8 | dict(per_tensor=True), {}),
]
CALLS_90 = [
    (decode_90(), {}, every_option(24, **SPLIT)),
    (ragged_90(dtype="float16"), FP8, dict(tree_mask=TREE_90)),
]
SLOW_CALLS_90 = [
    (ragged_90(dtype="float16"), {}, dict(tree_mask=TREE_90, sliding_window=6, **SPLIT)),
    (decode_90(num_q_heads=128), {}, {}),  # a cluster of two programs
    (ragged_90(num_q_heads=72), {}, dict(tree_mask=TREE_90)),  # whose last has few rows
    (decode_90(page_size=8, pages_per_seq=16), {}, {}),
    (decode_90(page_size=128), {}, dict(kv_layout="NHD")),
    (ragged_90(), {}, every_option(3)),
    (ragged_90(num_q_heads=40), {}, {}),  # tiles begin within the heads of a token
    (ragged_90(), {}, dict(causal=False)),
    (decode_90(), INT8, every_option(24, **SPLIT)),
    (decode_90(num_q_heads=128), FP8 | dict(per_tensor=True), {}),
    (decode_90(dtype="float16"), INT8, dict(kv_layout="HPND")),
    (ragged_90(page_size=8, pages_per_seq=16), INT8, every_option(3)),
]


def arrays_of(case, kind):
    """The arrays of a call, the same call dequantized, and the scales of one-byte pages."""
    if not kind:
        arrays = case.make()
        return arrays, arrays, None
    (*arrays, k_scales, _), meant = Quantized(case=case, **kind).make()
    return arrays, meant, k_scales


@pytest.mark.parametrize(("case", "kind", "options"), [*CALLS, *slow(SLOW_CALLS)], ids=name_of)
def test_equals_the_oracle(case, kind, options):
    assert_equals_the_oracle(SM80, case, kind, options, case.head_dim // 128 * 128 if kind else V)


@pytest.mark.cpu_budget(25)  # interpreted
@pytest.mark.parametrize(
    ("case", "kind", "options"), [*CALLS_90, *slow(SLOW_CALLS_90)], ids=name_of
)
def test_on_hopper_equals_the_oracle(case, kind, options):
    assert_equals_the_oracle(SM90, case, kind, options, 512)


def assert_equals_the_oracle(family, case, kind, options, v):
    arrays, meant, k_scales = arrays_of(case, kind)
    actual = attend_latents(arrays, v, family, k_scales=k_scales, **options)
    given = {k: x for k, x in options.items() if k not in ("fixed_split_size", "kv_layout")}
    assert_near(actual, expected_of(meant, v, **given), case.tolerance)


REAL = dict(head_dim=576, page_size=64, pages_per_seq=80)
LENGTHS = dict(seq_lens=(0, 1, 31, 33, 5000, *range(200, 3000, 97)))
PROMPTS = dict(seq_lens=(700, 0, 65, 3000, 1), q_lens=(700, 0, 1, 130, 1), num_tokens=1000)
FEW_HEADS, MANY_HEADS = ((SM80, 16), (SM90, 20)), ((SM80, 128), (SM90, 128))
product = itertools.product


@pytest.mark.parametrize(
    ("rows", "kernel", "kind", "with_options"),
    [
        *product(
            (LENGTHS, dict(seq_lens=(5000,)), PROMPTS),
            FEW_HEADS + MANY_HEADS,
            ({},),
            (False, True),
        ),
        *product((LENGTHS, PROMPTS), FEW_HEADS, (INT8, FP8), (False,)),
        *product((LENGTHS,), MANY_HEADS[1:], (INT8, FP8), (False,)),
    ],
)
def test_real_sizes_on_a_gpu(rows, kernel, kind, with_options):
    family, num_q_heads = kernel
    if family in INTERPRETED:
        pytest.skip("takes too long where the kernel is interpreted")
    case = latents(num_q_heads=num_q_heads, **rows | REAL)
    arrays, meant, k_scales = arrays_of(case, kind)
    options = every_option(num_q_heads) if with_options else {}
    call = partial(attend_latents, arrays, 512, family, k_scales=k_scales, **options)
    first = call()
    assert_near(first, expected_of(meant, 512, **options), case.tolerance)
    for _ in range(100):
        assert_same_bits(call(), first)


@pytest.mark.slow
def test_tokens_left_of_a_window_are_not_read():
    case, window = ragged(), 20
    arrays = without_tokens_left_of(window, case.make(), case.page_size, entry=2**31 - 1)
    actual = attend_latents(arrays, sliding_window=window)
    assert_near(actual, expected_of(arrays, sliding_window=window), case.tolerance)


@pytest.mark.slow
def test_under_a_split_size_a_row_has_its_bits_in_any_batch():
    case = decode(num_q_heads=64)
    q, pages, v_pages, tables, lens = case.make()
    out, lse = attend_latents((q, pages, v_pages, tables, lens), **SPLIT)
    alone = attend_latents((q[:1], pages, v_pages, tables[:1], lens[:1]), **SPLIT)
    assert_same_bits((out[:1], lse[:1]), alone)


@pytest.mark.slow
def test_queries_with_positions_equal_xla():
    case = ragged()
    q, pages, _, tables, lens, cu_q_lens = map(jnp.asarray, case.make(poison=False))
    arrays = Arrays(
        q=q[..., :V],
        q_pe=q[..., V:],
        k_pages=pages,
        block_tables=tables,
        seq_lens=lens,
        cu_q_lens=cu_q_lens,
        q_positions=130 + jnp.arange(len(q)) % 7,
        alibi_slopes=jnp.linspace(0.1, 0.5, 4),
    )
    options = LogitOptions(sm_scale=0.1, sliding_window=40)
    config = LatentConfig(block_q=32, block_k=16, num_stages=2, num_programs=3)
    kernel = partial(latent.latent_attention, config=config, interpret=SM80 in INTERPRETED)
    functions = (partial(f, options=options) for f in (kernel, xla.ragged_paged_attention))
    for actual, expected in zip(*(jax.jit(f)(arrays) for f in functions), strict=True):
        np.testing.assert_allclose(np.float32(actual), np.float32(expected), atol=0.02)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(v=96, rope=32), "v_head_dim that is a multiple of 64 with .* bfloat16, not 96"),
        (dict(kv_dtype="int8"), "v_head_dim that is a multiple of 128 with pages of int8, not 64"),
        (dict(rope=4), "head_dim that is a multiple of 8, not 68"),
        (dict(heads=2), "latents of 1 KV head, not 2"),
        (dict(dtype="float32"), "needs bfloat16 or float16, not float32"),
    ],
    ids=str,
)
def test_other_latents_are_refused(change, message):
    sizes = dict(v=64, rope=64, heads=1, dtype="bfloat16", kv_dtype=None) | change
    v, rope, dtype = sizes["v"], sizes["rope"], jnp.dtype(sizes["dtype"])
    kv_dtype = jnp.dtype(sizes["kv_dtype"] or dtype)
    pages = jnp.zeros((2, 8, sizes["heads"], v + rope), kv_dtype)
    scales = jnp.float32(1) if kv_dtype.itemsize == 1 else None
    layer = pp.LayerKV(pages, k_scales=scales, v_head_dim=v)
    q, q_pe = (jnp.zeros((1, 4, x), dtype) for x in (v, rope))
    arrays = layer, np.zeros((1, 1), np.int32), np.ones(1, np.int32)
    with pytest.raises(NotImplementedError, match=message):
        pp.mla_attention(
            q, q_pe, *arrays, sm_scale=SCALE, implementation=SM80, interpret=SM80 in INTERPRETED
        )


DEEPSEEK = dict(num_kv_heads=1, head_dim=512, rope_dim=64, max_kv_len=4096, num_seqs=128)
KB = 1024


def test_few_keys_have_one_program_per_sm():
    how = dict(DEEPSEEK, max_kv_len=1024, num_q_heads=16, num_sms=132)
    for itemsize in (1, 2):
        config = latent_config(Sizes(**how, itemsize=itemsize))
        assert (config.num_programs, config.num_stages) == (132, 4)


@pytest.mark.parametrize(
    ("heads", "num_tokens", "memory", "expected"),
    [
        # On an H100 two programs share an SM, and the parts of 128 heads the programs.
        (16, None, 227 * KB, (16, 32, 2, 264)),
        (128, None, 227 * KB, (32, 32, 2, 264)),
        (16, 4096, 227 * KB, (32, 32, 2, 264)),
        # On an A100
        (16, None, 163 * KB, (16, 32, 3, 132)),
        (128, None, 163 * KB, (32, 16, 2, 264)),
        # With 100 KB of an SM
        (16, None, 99 * KB, (16, 32, 2, 132)),
        (128, None, 99 * KB, (32, 16, 2, 132)),
    ],
)
def test_as_many_programs_run_as_shared_memory_lets(heads, num_tokens, memory, expected):
    how = dict(num_q_heads=heads, num_tokens=num_tokens or 0, num_sms=132, shared_memory=memory)
    for itemsize in (1, 2):
        config = latent_config(Sizes(**how, itemsize=itemsize, **DEEPSEEK))
        sizes = dict(head_dim=512, rope_dim=64, itemsize=itemsize)
        assert latent_shared_memory(config, **sizes) <= memory
    rest = config.block_q, config.block_k, config.num_stages, config.num_programs
    assert rest == expected


def test_heads_are_divided_only_into_full_tiles():
    found = [head_tiles(heads, 32) for heads in (16, 32, 48, 64, 128)]
    assert found == [1, 1, 1, 2, 4]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        (dict(num_q_heads=16), "tiles of 64 rows"),
        (dict(num_q_heads=16, kernel="ragged", num_tokens=32), None),
        (dict(page_size=4), "page_size of at least 8, not 4"),
        # TMA can't halve a page of 8 tokens for the two programs of a cluster.
        (dict(num_q_heads=65, page_size=8), "page_size of at least 16, not 8"),
        (dict(head_dim=256), r"latents of \(512, 64\) elements, not \(256, 64\)"),
    ],
    ids=str,
)
def test_which_calls_are_left_to_the_kernel_for_ampere(change, reason):
    sizes = dict(kernel="decode", num_tokens=4, num_q_heads=32, head_dim=512, page_size=16)
    dtype = np.dtype("float16")
    call = Call(
        device=HOPPER, dtype=dtype, kv_dtype=dtype, num_seqs=4, num_kv_heads=1, max_kv_len=64,
        rope_dim=64, **sizes | change,
    )  # fmt: skip
    found = why_not_latents(call)
    assert found is None if reason is None else re.search(reason, found)
