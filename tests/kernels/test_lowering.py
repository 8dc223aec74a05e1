"""The kernels of every family lower for GPUs on a machine without one, and copy no pool."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_paged as pp
from pallas_paged.pages.layout import LAYOUTS
from tests.support.devices import lower_for_cuda
from tests.support.kernel_calls import kernel_calls
from tests.support.lowering import CUSTOM_CALL, few_with_every_level, named, options_of, pairwise
from tests.support.marks import needs_mosaic, needs_triton, slow
from tests.support.programs import Program, kernel_configs, parsed

INT8, FP8 = "int8", "float8_e4m3fn"
RAGGED = ("ragged_paged_attention", "ragged_paged_attention_merge")
DECODE = ("paged_decode", "paged_decode_merge")
KERNELS = {"decode": DECODE, "ragged": RAGGED, "cascade": RAGGED + DECODE}
VIEWS = re.compile(
    r"func\.func|^\s*return| call @|stablehlo\.(reshape|bitcast_convert|custom_call)|"
    r"sdy\.sharding_constraint"
)


def pool_operations(text: str, program: Program) -> list[str]:
    """The lines with an array of the size of a pool, but for views and kernels.

    The number of a pool's pages is a prime that no other array's size has as a factor. Pools are
    also viewed as wider words; scales of tokens are smaller.
    """
    elements = program.num_pages * program.page_size * program.num_kv_heads * program.head_dim

    def is_pool(shape: str) -> bool:
        size = int(np.prod([int(n) for n in re.findall(r"\d+", shape)], dtype=np.int64))
        return size >= elements // 4 and size % program.num_pages == 0

    return [
        line.strip()
        for line in text.splitlines()
        if not VIEWS.search(line) and any(map(is_pool, re.findall(r"tensor<((?:\d+x)+)", line)))
    ]


def lowered(family, function, row, **options):
    """The text of a call with the levels of a row; it has the kernels, and copies no pool."""
    row = dict(num_kv_heads=2, max_kv_len=512) | row
    num_q_heads = row["group"] * row["num_kv_heads"]
    options = options_of(row, num_q_heads) | options
    if "config" not in options and function != "cascade":
        options["fixed_split_size"] = row["fixed_split_size"]
    if function == "ragged":
        tree = np.ones((row["num_seqs"], 8, 8), bool) if row["mask"] == "tree" else None
        options |= dict(tree_mask=tree, causal=row["mask"] is not None)
    else:
        row = row | dict(num_tokens=0)
    sizes = {name: row[name] for name in Program.__dataclass_fields__.keys() & row.keys()}
    how = dict(function=function, implementation=family, options=options)
    program = Program(**how, **sizes, num_q_heads=num_q_heads)
    text = program.text()
    assert all(name in text for name in KERNELS[function])
    assert pool_operations(text, program) == []
    return text


OPTIONS = dict(
    num_seqs=(1, 4, 300),
    num_tokens=(7, 203, 5000),
    mask=("causal", "tree", None),
    kv_dtype=(None, INT8, FP8),
    one_scale=(False, True),
    kv_layout=tuple(LAYOUTS),
    soft_cap=(None, 30.0),
    sliding_window=(None, 100),
    alibi_slopes=(False, True),
    sinks=(False, True),
    return_lse=(False, True),
    fixed_split_size=(None, 256),
)
TRITON = pairwise(
    group=(1, 3, 4, 7, 40, 128),
    num_kv_heads=(1, 2, 8),
    head_dim=(16, 64, 80, 128, 192, 256, 320, 512),
    page_size=(1, 2, 16, 32, 256),
    dtype=("bfloat16", "float16", "float32"),
    sm_scale=(None, -0.1),
    **OPTIONS,
)
HOPPER_RAGGED = pairwise(
    group=(1, 3, 5, 8, 32),
    head_dim=(64, 128, 256),
    page_size=(8, 16, 64, 256),
    dtype=("bfloat16", "float16"),
    **OPTIONS,
)
# Lowering decides which copies and conversions exist on an architecture, and how registers hold
# each matrix.
AMPERE = pairwise(
    architecture=((8, 0), (8, 6), (8, 9), (9, 0), (12, 0)),
    group=(4, 5, 20),
    head_dim=(64, 80, 112, 128, 192, 256, 512),
    page_size=(1, 16),
    dtype=("bfloat16", "float16"),
    **OPTIONS,
)


@needs_triton
@pytest.mark.parametrize("function", ["decode", "ragged"])
@pytest.mark.parametrize("row", few_with_every_level(TRITON), ids=named)
def test_triton(function, row):
    lowered("triton", function, row, sm_scale=row["sm_scale"])


# Cascade runs the kernels of the other two; its own code depends on shapes little.
@needs_triton
@pytest.mark.parametrize("row", [TRITON[0], *slow(TRITON[8::8])], ids=named)
def test_triton_cascade(row):
    lowered("triton", "cascade", row | dict(num_seqs=4), sm_scale=row["sm_scale"])


@needs_mosaic
@pytest.mark.parametrize("row", [HOPPER_RAGGED[0], *slow(HOPPER_RAGGED[8::8])], ids=named)
def test_hopper_cascade(row):
    text = lowered("mosaic_sm90", "cascade", row | dict(num_seqs=5, kv_dtype=None))
    assert len(CUSTOM_CALL.findall(text)) == 4


@needs_mosaic
@pytest.mark.parametrize("row", few_with_every_level(HOPPER_RAGGED), ids=named)
def test_hopper_ragged(row):
    from pallas_paged.kernels.mosaic_sm90 import converted_rows

    text = lowered("mosaic_sm90", "ragged", row | dict(max_kv_len=4096))
    logits = row["num_tokens"] * 2 * row["group"] * 4096
    converts = bool(row["kv_dtype"]) and logits >= converted_rows.MIN_LOGITS
    assert ("ragged_convert_rows" in text) == converts
    assert len(CUSTOM_CALL.findall(text)) == 2 + converts
    # The merge writes into the kernel's output in place, and into lse only if the call returns it.
    merge = [line for line in text.splitlines() if CUSTOM_CALL.search(line)][-1]
    assert merge.count("output_operand_alias<") == 1 + row["return_lse"]


# What a kernel for Ampere must not have. From 9.0 on, Mosaic begins every kernel with some of it.
HOPPER_ONLY = re.compile(r"wgmma|nvvm\.(mbarrier|elect)|try_wait|griddepcontrol|cp\.async\.bulk")


@needs_mosaic
@pytest.mark.parametrize("function", ["decode", "ragged"])
@pytest.mark.parametrize("row", few_with_every_level(AMPERE), ids=named)
def test_ampere(function, row, monkeypatch):
    from jax.experimental.mosaic.gpu import utils

    # Without a GPU, Mosaic takes (9, 0).
    monkeypatch.setattr(utils, "_infer_arch", lambda: row["architecture"])
    text = lowered("mosaic_sm80", function, row)
    assert len(CUSTOM_CALL.findall(text)) == 2
    assert row["architecture"] >= (9, 0) or not HOPPER_ONLY.search(text)


@needs_mosaic
@pytest.mark.parametrize("name", ["latents", "ragged latents with options"])
def test_ampere_latents(name, monkeypatch):
    from jax.experimental.mosaic.gpu import utils

    monkeypatch.setattr(utils, "_infer_arch", lambda: (8, 0))
    (call,) = (x for x in kernel_calls() if str(x) == f"mosaic_sm80 {name}")
    text = lower_for_cuda(call.run, *call.shapes()).as_text()
    assert "mla_attention" in text and len(CUSTOM_CALL.findall(text)) == 2
    assert not HOPPER_ONLY.search(text)
    pool = [line for line in text.splitlines() if "x16x576xbf16" in line and not VIEWS.search(line)]
    assert pool == []


@needs_triton
def test_a_copy_of_a_pool_would_be_seen():
    program = Program(function="decode", implementation="triton")
    call, arrays = program.call_and_shapes()

    def transposed(arrays):
        pages = {name: arrays[name].swapaxes(1, 2) for name in ("k_pages", "v_pages")}
        return call(arrays | pages)

    shape = np.array(arrays["k_pages"].shape)[[0, 2, 1, 3]]
    pages = jax.ShapeDtypeStruct(shape, arrays["k_pages"].dtype)
    text = lower_for_cuda(transposed, arrays | dict(k_pages=pages, v_pages=pages)).as_text()
    assert len(pool_operations(text, program)) == 2


@needs_mosaic
@pytest.mark.parametrize(("function", "num_tokens"), [("decode", 0), ("ragged", 40)])
def test_a_step_writes_into_the_pool_that_was_donated(function, num_tokens):
    program = Program(function=function, implementation="mosaic_sm90", num_tokens=num_tokens)
    call, arrays = program.call_and_shapes()
    pool = {name: arrays.pop(name) for name in ("k_pages", "v_pages")}

    def step(pool, arrays, new, slots):
        layer = pp.write_kv(pp.LayerKV(**pool, kv_layout="HPND"), new, new, slots)
        pool = dict(k_pages=layer.k_pages, v_pages=layer.v_pages)
        return call(arrays | pool), *pool.values()

    new = jax.ShapeDtypeStruct((num_tokens or 4, 8, 128), jnp.bfloat16)
    slots = jax.ShapeDtypeStruct((num_tokens or 4,), jnp.int32)
    donated = dict(donate_argnums=0, keep_unused=True)
    text = lower_for_cuda(step, pool, arrays, new, slots, **donated).as_text()
    assert len(re.findall(r"tf.aliasing_output|jax.buffer_donor", text)) == 2
    # The kernel reads the very arrays that are returned.
    k_pages, v_pages = re.search(r"return \S+, (%\w+), (%\w+) :", text).groups()
    (entry,) = (x for x in text.splitlines() if " call @" in x and "x1009x" in x)
    assert f" {k_pages}, {v_pages}, " in entry
    # Beside views of the pool there is one scatter for K and one for V.
    others = pool_operations(text, program)
    assert len(others) == 2 and all(line.startswith("}) : ") for line in others)


@needs_triton
@pytest.mark.parametrize("function", ["decode", "ragged"])
@pytest.mark.parametrize(
    ("num_pages", "kv_dtype", "wide"),
    [
        (2**17, None, False),
        (2**17 + 1, None, True),  # more than 2^32 bytes, of 16-bit elements
        (2**17 + 1, INT8, False),  # more than 2^31: out of reach for a 32-bit element offset
        (2**18, INT8, False),  # 2^32 bytes, the most for which Pallas computes with 32 bits
        (2**18 + 1, INT8, True),
    ],
)
def test_offsets_reach_all_elements_of_a_large_pool(num_pages, kv_dtype, wide, function):
    sizes = dict(num_pages=num_pages, kv_dtype=kv_dtype, max_kv_len=512)
    num_tokens = 40 if function == "ragged" else 0
    program = Program(function=function, implementation="triton", num_tokens=num_tokens, **sizes)
    # A ragged call has its plan before it.
    config = next(x for x in kernel_configs(program.lower()) if "plan" not in str(x["name"]))
    with parsed(config["ir"]) as module:
        text = module.get_asm(enable_debug_info=False)
    if kv_dtype:
        assert "!tt.ptr<i16>" in text and "!tt.ptr<i8>" not in text  # offsets count 16-bit words
    assert ("i64" in text) == wide
    assert wide or 8 * num_pages * 16 * 128 // 2 <= 2**31
