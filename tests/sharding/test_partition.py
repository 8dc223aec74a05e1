"""How calls are divided among devices: the cut axes, the programs and how they are cached."""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from dataclasses import dataclass, field, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_paged as pp
from pallas_paged import dispatch
from pallas_paged.partition import KERNEL_CALLS, Layout, cut_of, on_each_device
from tests.support.attention_cases import Case
from tests.support.attention_oracle import attend, relative_error
from tests.support.devices import H200_MESH, lower_for_cuda, mesh
from tests.support.placement import (
    BY_HEADS,
    POSITIONAL,
    buffers,
    collectives,
    mesh_2d,
    place,
    several,
)

PAGES = ("num_kv_heads", "num_pages", "page_size", "kv_head_dim")
Q = ("num_seqs", "num_q_heads", "head_dim")
DECODE = Layout(
    names=POSITIONAL,
    inputs=(Q, PAGES, PAGES, ("num_seqs", "pages_per_seq"), ("num_seqs",)),
    outputs=(Q,),
    spread=("num_kv_heads", "num_q_heads", "num_seqs"),
)
GRADIENT = replace(DECODE, spread=DECODE.spread[:2], divides_groups=False)
WRITE = replace(DECODE, spread=("num_kv_heads",))
MESH = AbstractMesh((2, 2, 3), ("a", "b", "c"))


def shapes_of(num_seqs=4, num_q_heads=16, num_kv_heads=8):
    pages = (num_kv_heads, 7, 4, 16)
    return [(num_seqs, num_q_heads, 16), pages, pages, (num_seqs, 2), (num_seqs,)]


def cut(layout, sizes, on=MESH, **specs):
    """The cut of arrays with these specs; others are whole, and V is as K."""
    specs.setdefault("v_pages", specs.get("k_pages", P()))
    return cut_of(layout, shapes_of(**sizes), [specs.get(name, P()) for name in POSITIONAL], on)


@pytest.mark.parametrize(
    ("layout", "sizes", "specs", "heads", "q_heads", "rows"),
    [
        (DECODE, {}, dict(q=P(None, "a"), k_pages=P("a")), "a", "a", ""),
        (DECODE, {}, dict(k_pages=P("a")), "a", "a", ""),  # queries follow the pages
        (DECODE, {}, dict(q=P(None, "b"), k_pages=P("a")), "a", "a", ""),
        (DECODE, {}, dict(q=P(None, "a")), "", "", ""),  # and are whole where these are
        (DECODE, {}, dict(q=P(None, ("b", "a")), k_pages=P(("b", "a"))), "ba", "ba", ""),
        (DECODE, {}, dict(q=P(None, ("a", "b")), k_pages=P("a")), "a", "a", ""),  # 4 KV heads each
        (DECODE, {"num_kv_heads": 2}, dict(q=P(None, ("a", "b")), k_pages=P("a")), "a", "ab", ""),
        (DECODE, {"num_kv_heads": 2}, dict(q=P(None, ("b", "a")), k_pages=P("a")), "a", "a", ""),
        (
            DECODE,
            {"num_q_heads": 12, "num_kv_heads": 2},
            dict(q=P(None, ("b", "c")), k_pages=P("a")),
            "a",
            "a",
            "",
        ),
        (
            DECODE,
            {"num_kv_heads": 2},
            dict(q=P(None, ("a", "b")), k_pages=P("a"), block_tables=P("b")),
            "a",
            "ab",
            "",
        ),
        (DECODE, {"num_kv_heads": 1}, dict(q=P(None, "b")), "", "b", ""),
        (DECODE, {"num_kv_heads": 1}, dict(q=P(None, "c")), "", "", ""),  # 3 devices, 16 heads
        (DECODE, {}, dict(q=P("b", "a"), k_pages=P("a")), "a", "a", "b"),
        (DECODE, {}, dict(q=P("a"), k_pages=P("a")), "a", "a", ""),
        (DECODE, {}, dict(q=P(("a", "b")), k_pages=P("a")), "a", "a", "b"),
        (DECODE, {}, dict(q=P("b"), seq_lens=P("a")), "", "", "b"),  # the queries decide
        (DECODE, {}, dict(block_tables=P("a"), seq_lens=P("b")), "", "", "a"),
        (DECODE, {"num_seqs": 3}, dict(q=P("a")), "", "", ""),
        (DECODE, {"num_seqs": 3}, dict(q=P("c")), "", "", "c"),
        (DECODE, {}, dict(q=P(None, None, "a"), block_tables=P(None, "a")), "", "", ""),
        (GRADIENT, {}, dict(q=P("b", "a"), k_pages=P("a")), "a", "a", ""),
        (GRADIENT, {"num_kv_heads": 2}, dict(q=P(None, ("a", "b")), k_pages=P("a")), "a", "a", ""),
        (WRITE, {}, dict(q=P("b", "a"), k_pages=P("a")), "a", "", ""),
    ],
)
def test_the_pages_decide_which_axes_are_cut(layout, sizes, specs, heads, q_heads, rows):
    found = cut(layout, sizes, **specs)
    axes = ("num_kv_heads", "num_q_heads", "num_seqs")
    wanted = dict(zip(axes, (heads, q_heads, rows), strict=True))
    assert {axis: "".join(found.get(axis, ())) for axis in axes} == wanted
    assert set(found) == set(layout.spread)


def random_call(rng, on):
    """Sizes of a call, and specs of its arrays on a mesh."""

    def names(size):
        found = [str(x) for x in rng.permutation(on.axis_names)][: rng.integers(0, 4)]
        while size % math.prod(on.shape[name] for name in found):
            found.pop()
        return tuple(found)

    num_seqs, kv_heads = int(rng.choice([1, 4, 6, 16])), int(rng.choice([1, 2, 4, 8, 16]))
    q_heads = kv_heads * int(rng.choice([1, 2, 4, 8]))
    heads, wished = names(kv_heads), names(q_heads)
    if rng.random() < 0.7:  # often cut as the pages, and further
        wished = (*heads, *(x for x in wished if x not in heads))
        while q_heads % math.prod(on.shape[name] for name in wished):
            wished = wished[:-1]
    rows = tuple(x for x in names(num_seqs) if x not in wished)
    specs = dict(q=P(rows, wished), k_pages=P(heads), v_pages=P(heads))
    specs |= dict(block_tables=P(names(num_seqs)), seq_lens=P(names(num_seqs)))
    return dict(num_seqs=num_seqs, num_q_heads=q_heads, num_kv_heads=kv_heads), specs


def part(size, axes, device, on):
    """The elements that a device has of an axis of this size, cut over axes of the mesh."""
    counts = [on.shape[name] for name in axes]
    index = 0
    for name, count in zip(axes, counts, strict=True):
        index = index * count + device[name]
    each = size // math.prod(counts)
    return range(index * each, (index + 1) * each)


def test_every_device_has_the_kv_heads_of_its_query_heads():
    """For random calls; and no device needs pages that it does not have."""
    rng, on = np.random.default_rng(0), AbstractMesh((2, 4, 2), ("a", "b", "c"))
    for _ in range(500):
        sizes, specs = random_call(rng, on)
        found = cut(DECODE, sizes, on, **specs)
        num_seqs, q_heads, kv_heads = sizes.values()
        assert P(found["num_kv_heads"]) == specs["k_pages"], specs
        used = [*found["num_q_heads"], *found["num_seqs"]]
        assert len(set(used)) == len(used), specs
        assert num_seqs % math.prod(on.shape[x] for x in found["num_seqs"]) == 0, specs
        for device in itertools.product(*(range(size) for size in on.axis_sizes)):
            device = dict(zip(on.axis_names, device, strict=True))
            mine = part(q_heads, found["num_q_heads"], device, on)
            pages = part(kv_heads, found["num_kv_heads"], device, on)
            per_page = len(mine) / len(pages)
            needed = [head * kv_heads // q_heads for head in mine]
            assert needed == [pages[int(i // per_page)] for i in range(len(mine))], (sizes, specs)


CURE = "cut pages and scales along the KV heads alone, as pallas_paged.sharding.kv_pool_sharding"


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (dict(k_pages=P(None, "a")), "k_pages is cut along num_pages over ('a',)"),
        (dict(k_pages=P(("a", "b"), "c")), "k_pages is cut along num_pages over ('c',)"),
        (dict(v_pages=P(None, None, "b")), "v_pages is cut along page_size over ('b',)"),
        (dict(k_pages=P(*[None] * 3, "a")), "k_pages is cut along kv_head_dim over ('a',)"),
        (
            dict(k_pages=P("a"), v_pages=P("b")),
            "v_pages is cut along num_kv_heads over ('b',) of the mesh, and k_pages over ('a',)",
        ),
        (dict(k_pages=P("a"), v_pages=P()), "v_pages is cut along num_kv_heads over ()"),
        (dict(k_pages=P(), v_pages=P("a")), "v_pages is cut along num_kv_heads over ('a',)"),
    ],
)
def test_pages_that_would_be_gathered_are_refused(specs, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        cut(DECODE, {}, **specs)
    assert CURE in str(caught.value)


def test_scales_and_pages_of_k_and_v_are_cut_alike():
    pages = ("num_pages", "k_and_v", "num_kv_heads")
    scales = ("num_pages", "num_kv_heads")
    layout = Layout(
        names=("q", "k_pages", "k_scales", "v_scales"),
        inputs=(Q, pages, scales, scales),
        outputs=(Q,),
        spread=("num_kv_heads", "num_q_heads"),
    )
    shapes = [(4, 16, 8), (7, 2, 8), (7, 8), (7, 8)]
    heads = P(None, "a")
    found = cut_of(layout, shapes, [P(), P(None, None, "a"), heads, heads], MESH)
    assert found == {"num_kv_heads": ("a",), "num_q_heads": ("a",)}
    for specs, message in [
        ([P(), P(None, "a"), P(), P()], "k_pages is cut between K and V over ('a',): the first"),
        ([P(), P(), P(), P("a")], "v_scales is cut along num_pages over ('a',)"),
        ([P(), P(None, None, "a"), heads, P()], "v_scales is cut along num_kv_heads over ()"),
        ([P(), P(), heads, P()], "k_scales is cut along num_kv_heads over ('a',)"),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            cut_of(layout, shapes, specs, MESH)


def test_a_layout_as_a_rule_of_the_partitioner():
    """It makes whole what no device has a part of, but not the axes of the pool."""
    q, pages, tables = (" ".join(axes) for axes in DECODE.inputs[:1] + DECODE.inputs[2:4])
    assert DECODE.rule == f"{q}, {pages}, {pages}, {tables}, num_seqs -> {q}"
    assert DECODE.whole == ("head_dim", "pages_per_seq")
    assert WRITE.whole == ("num_seqs", "num_q_heads", "head_dim", "pages_per_seq")
    batched = DECODE.batched("x", [True, False, False, True, False])
    assert [axes[0] == "x" for axes in batched.inputs] == [True, False, False, True, False]
    assert (batched.outputs, batched.spread) == ((("x", *Q),), (*DECODE.spread, "x"))


@dataclass(frozen=True, kw_only=True)
class Local:
    """A small call on one device that mixes all arrays, and notes the shapes of its queries."""

    scale: float = 2.0
    one_device: bool = False
    seen: list = field(default_factory=list, repr=False, compare=False)

    def __call__(self, q, k, v, tables, lens):
        self.seen.append(q.shape)
        group = q.shape[1] // k.shape[0]
        heads = jnp.repeat(k[:, 1, 2] + 3 * v[:, 2, 1], group, axis=0)
        return (q * heads * self.scale + (tables[:, 1] + 10 * lens)[:, None, None],)

    def divided(self, layout=DECODE):
        run = on_each_device(self, layout, platform=jax.default_backend())
        return lambda arrays: run(*(arrays[name] for name in POSITIONAL))[0]


def arrays_of(**sizes):
    rng = np.random.default_rng(0)
    *shapes, tables, lens = shapes_of(**sizes)
    floats = [rng.integers(-9, 9, shape).astype(np.float32) for shape in shapes]  # exact sums
    integers = [rng.integers(0, 9, shape).astype(np.int32) for shape in (tables, lens)]
    return dict(zip(POSITIONAL, (*floats, *integers), strict=True))


def expected(arrays, scale=2.0):
    q, k, v, tables, lens = arrays.values()
    heads = np.repeat(k[:, 1, 2] + 3 * v[:, 2, 1], q.shape[1] // k.shape[0], axis=0)
    return q * heads * np.float32(scale) + (tables[:, 1] + 10 * lens)[:, None, None]


ARRAYS = arrays_of()
AB = ("a", "b")


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
@pytest.mark.parametrize(
    ("num_kv_heads", "specs", "result"),
    [
        (8, dict(q=P("b", "a"), k_pages=P("a"), v_pages=P("a"), seq_lens=P("b")), P("b", "a")),
        (2, dict(q=P(None, AB), k_pages=P("a"), v_pages=P("a")), P(None, AB)),
        (1, dict(q=P(None, "b"), block_tables=P("a", "b")), P("a", "b")),
        (8, dict(q=P(None, AB[::-1]), k_pages=P(AB[::-1]), v_pages=P(AB[::-1])), P(None, AB[::-1])),
        (8, dict(k_pages=P(AB), v_pages=P(AB)), None),
        (8, dict(q=P(None, "b", "a"), k_pages=P("a"), v_pages=P("a"), seq_lens=P("a")), None),
    ],
)
def test_devices_compute_with_their_parts_and_gather_no_pages(num_kv_heads, specs, result, kind):
    local, arrays = Local(), arrays_of(num_kv_heads=num_kv_heads)
    placed = place(arrays, mesh_2d(2, 2, names=("a", "b"), kind=kind), specs)
    compiled = jax.jit(local.divided()).lower(placed).compile()
    found = compiled(placed)
    np.testing.assert_array_equal(found, expected(arrays))
    if result is not None:
        assert found.sharding.is_equivalent_to(NamedSharding(found.sharding.mesh, result), 3)
    assert not [line for line in collectives(compiled) if ",7,4," in line]


@pytest.mark.slow
def test_any_layout_of_eight_devices():
    on, rng = mesh_2d(2, 2, 2, names=("a", "b", "c")), np.random.default_rng(0)
    for _ in range(60):
        sizes, specs = random_call(rng, on)
        arrays = arrays_of(**sizes)
        placed = place(arrays, on, specs)
        compiled = jax.jit(Local().divided()).lower(placed).compile()
        np.testing.assert_array_equal(compiled(placed), expected(arrays), err_msg=str(specs))
        assert not [line for line in collectives(compiled) if ",7,4," in line], specs


def test_layers_share_one_lowering_for_the_sizes_of_a_device(monkeypatch):
    local, placed, lowered = Local(scale=0.5), place(ARRAYS, mesh(2)), []
    lower = export.export
    monkeypatch.setattr(export, "export", lambda *a, **k: lowered.append(a) or lower(*a, **k))

    @jax.jit
    def model(arrays):
        for _ in range(5):
            arrays = arrays | {"q": local.divided()(arrays)}
        return arrays["q"]

    model.lower(placed).compile()
    assert len(lowered) == 1
    assert set(local.seen) == {(4, 16, 16), (4, 8, 16)}


def test_the_implementation_is_chosen_by_the_sizes_of_a_device(monkeypatch):
    calls, resolve = [], dispatch.resolve

    def spy(call, implementation):
        calls.append((call.num_q_heads, call.num_kv_heads, call.num_seqs))
        return resolve(call, implementation)

    monkeypatch.setattr(dispatch, "resolve", spy)
    on = AbstractMesh((2, 4), ("data", "tensor"), (AxisType.Explicit,) * 2)
    specs = BY_HEADS | {"q": P("data", "tensor")}
    shapes = {
        name: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(on, specs.get(name, P()))
        )
        for name, x in ARRAYS.items()
    }
    call = partial(pp.paged_attention, implementation="xla", sm_scale=0.123)
    out = jax.eval_shape(lambda arrays: call(**arrays), shapes)
    assert calls == [(4, 2, 2)]
    assert out.sharding.spec[:2] == ("data", "tensor")


@contextlib.contextmanager
def gspmd():
    """The partitioner that JAX had before Shardy."""
    jax.config.update("jax_use_shardy_partitioner", False)
    yield
    jax.config.update("jax_use_shardy_partitioner", True)


@pytest.mark.parametrize(
    ("context", "scale"),
    [(jax.set_mesh, 3.0), (lambda on: gspmd(), 4.0)],
    ids=["set_mesh", "GSPMD"],
)
def test_settings_of_the_caller_do_not_reach_a_device(context, scale):
    on = mesh(2)
    local, placed = Local(scale=scale), place(ARRAYS, on)
    with context(on):
        compiled = jax.jit(local.divided()).lower(placed).compile()
        found = compiled(placed)
    assert collectives(compiled) == []
    np.testing.assert_array_equal(found, expected(ARRAYS, scale))


def test_programs_are_cached_by_what_devices_do():
    """As the persistent cache sees them where callbacks are left out of its keys."""
    placed = place(ARRAYS, mesh(2))

    class Same(Local):  # as in another process
        __hash__ = object.__hash__
        __eq__ = object.__eq__

        def __repr__(self):
            return f"Local(scale={self.scale})"

    def text_of(scale):
        text = jax.jit(Same(scale=scale).divided()).lower(placed).as_text()
        return re.sub(r'backend_config = "\d+"', "", text)

    first = text_of(2.0)
    assert "CustomSPMDPartitioning" in first and text_of(2.0) == first
    names = [re.search(r"attention_\w+", text)[0] for text in (first, text_of(3.0))]
    assert names[0] != names[1]


def test_programs_of_other_options_have_other_names():
    placed = place(ARRAYS, mesh(2))
    names = set()
    for options in ({}, dict(sm_scale=0.5), dict(sliding_window=5), dict(fixed_split_size=64)):
        call = partial(pp.paged_attention, implementation="triton_interpret", **options)
        text = jax.jit(lambda arrays, call=call: call(**arrays)).lower(placed).as_text()
        names |= set(re.findall(r"attention_[0-9a-f]{12}", text))
    assert len(names) == 4


def test_one_device_runs_the_call_itself():
    placed = place(ARRAYS, mesh(2))
    for scale, one_device, arrays in [(5.0, False, ARRAYS), (6.0, True, placed)]:
        local = Local(scale=scale, one_device=one_device)
        text = jax.jit(local.divided()).lower(arrays).as_text()
        assert "CustomSPMDPartitioning" not in text
    with jax.set_mesh(mesh(1)):
        text = jax.jit(Local(scale=7.0).divided()).lower(ARRAYS).as_text()
    assert "CustomSPMDPartitioning" not in text


def test_calls_run_eagerly_under_vmap_and_on_an_explicit_mesh_of_one_device():
    found = Local().divided()(place(ARRAYS, mesh(2)))
    assert found.sharding.spec[:2] == (None, "tensor")
    np.testing.assert_array_equal(found, expected(ARRAYS))

    one = mesh_2d(1, names=("tensor",), kind=AxisType.Explicit)
    with jax.set_mesh(one):
        found = jax.jit(Local().divided())(place(ARRAYS, one))
    np.testing.assert_array_equal(found, expected(ARRAYS))

    on = mesh_2d(2, 2, names=("data", "tensor"))
    others = ARRAYS | {"q": ARRAYS["q"] + 1}
    mapped = {"q": np.stack([ARRAYS["q"], others["q"]])}
    specs = BY_HEADS | {"q": P("data", None, "tensor")}
    axes = ({name: 0 if name == "q" else None for name in POSITIONAL},)
    each = jax.jit(jax.vmap(Local().divided(), in_axes=axes))
    placed = place(ARRAYS | mapped, on, specs)
    compiled = each.lower(placed).compile()
    assert collectives(compiled) == []
    wanted = [expected(ARRAYS), expected(others)]
    np.testing.assert_array_equal(compiled(placed), wanted)


def test_a_divided_call_has_no_gradient_of_its_own():
    with pytest.raises(NotImplementedError, match="has no gradient itself"):
        jax.eval_shape(jax.grad(lambda x: Local().divided()(x).sum(), allow_int=True), ARRAYS)


@pytest.mark.parametrize("implementation", ["triton", "mosaic_gpu"])
def test_kernels_of_gpus_can_be_lowered_once(implementation):
    case = Case(num_q_heads=16, num_kv_heads=8, head_dim=64, page_size=8, dtype="float16")
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in case.make(poison=False)]
    call = jax.jit(partial(pp.paged_attention, implementation=implementation))
    lower = export.export(call, platforms=("cuda",), disabled_checks=KERNEL_CALLS)
    try:
        with jax.sharding.use_abstract_mesh(H200_MESH):
            lowered = lower(*shapes)
    except NotImplementedError as e:
        pytest.skip(str(e))
    text = lower_for_cuda(lowered.call, *shapes).as_text()
    assert text.count("custom_call") >= 2  # attention and its merge


def test_a_function_for_one_device_can_be_exported():
    arrays = {name: ARRAYS[name] for name in sorted(ARRAYS)}
    exported = export.export(jax.jit(Local().divided()))(arrays)
    np.testing.assert_array_equal(exported.call(arrays), expected(ARRAYS))


def test_a_loop_of_steps_moves_nothing_and_copies_no_pool(implementation):
    sizes = dict(num_q_heads=16, num_kv_heads=8, head_dim=16, page_size=4, pages_per_seq=4)
    case, on = Case(**sizes, seq_lens=(13, 0, 5, 14)).on(implementation), several()
    q, k_pages, v_pages, tables, lens = case.make(poison=False)
    tokens = np.random.default_rng(0).standard_normal((2, 4, 8, case.head_dim)).astype(q.dtype)

    def step(i, state):
        layer, q = state
        layer = pp.write_kv(layer, *tokens, jnp.arange(4, dtype=jnp.int32) * 4 + i)
        pages = layer.k_pages, layer.v_pages
        return layer, pp.paged_attention(q, *pages, tables, lens + i, implementation=implementation)

    @partial(jax.jit, donate_argnums=0)
    def loop(layer, q):
        return lax.fori_loop(0, 3, step, (layer, q))

    heads = NamedSharding(on, P("tensor"))
    layer = pp.LayerKV(k_pages=k_pages.copy(), v_pages=v_pages.copy())
    layer = jax.tree.map(jnp.copy, jax.device_put(layer, heads))  # NumPy's memory can't be donated
    placed = layer, jax.device_put(q, NamedSharding(on, P(None, "tensor")))
    compiled = loop.lower(*placed).compile()
    assert collectives(compiled) == []
    before = buffers(layer)
    shape = ",".join(map(str, (8 // on.size, *k_pages.shape[1:])))
    assert not re.findall(rf"= \w+\[{shape}\]\S* copy\(", compiled.as_text())
    layer, out = compiled(*placed)
    assert buffers(layer) == before
    for i in range(3):
        k_pages[:, :4, i], v_pages[:, :4, i] = tokens.swapaxes(1, 2)
        q = attend(q, k_pages, v_pages, tables, lens + i)[0].astype(q.dtype)
    np.testing.assert_array_equal(np.asarray(layer.k_pages), k_pages)
    np.testing.assert_array_equal(np.asarray(layer.v_pages), v_pages)
    assert relative_error(out, q) <= 3 * case.tolerance
