"""How calls are divided among devices: the sharded axes, the programs and how they are cached."""

import contextlib
import itertools
import math
import re
from dataclasses import dataclass, field, replace
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_paged.attention import dispatch
from pallas_paged.attention.partition import (
    CODE,
    KERNEL_CALLS,
    ShardingRule,
    axis_sharding,
    on_each_device,
)
from pallas_paged.kernels import families, xla
from pallas_paged.pages import pool
from tests.support import raw
from tests.support.attention_cases import Case
from tests.support.devices import H200_MESH, lower_for_cuda, mesh
from tests.support.placement import BY_HEADS, POSITIONAL, collectives, mesh_2d, place, shapes_on

PAGES = ("num_kv_heads", "num_pages", "page_size", "kv_head_dim")
Q = ("num_seqs", "num_q_heads", "head_dim")
AXES = ("num_kv_heads", "num_q_heads", "num_seqs")
INPUTS = Q, PAGES, PAGES, ("num_seqs", "pages_per_seq"), ("num_seqs",)
DECODE = ShardingRule(names=POSITIONAL, inputs=INPUTS, outputs=(Q,), shardable_axes=AXES)
GRADIENT = replace(DECODE, shardable_axes=AXES[:2], divides_groups=False)
WRITE = replace(DECODE, shardable_axes=AXES[:1])
MESH = AbstractMesh((2, 2, 3), ("a", "b", "c"))


def shapes_of(num_seqs=4, num_q_heads=16, num_kv_heads=8):
    pages = (num_kv_heads, 7, 4, 16)
    return [(num_seqs, num_q_heads, 16), pages, pages, (num_seqs, 2), (num_seqs,)]


def sharded_axes(rule, sizes, on=MESH, **specs):
    """The mesh axes of each axis for arrays with these specs, others replicated; V is as K."""
    specs.setdefault("v_pages", specs.get("k_pages", P()))
    return axis_sharding(
        rule, shapes_of(**sizes), [specs.get(name, P()) for name in POSITIONAL], on
    )


@pytest.mark.parametrize(
    ("rule", "sizes", "q", "k_pages", "rest", "expected"),
    [
        (DECODE, {}, P(None, "a"), P("a"), {}, "a a -"),
        (DECODE, {}, P(), P("a"), {}, "a a -"),  # queries follow the pages
        (DECODE, {}, P(None, "b"), P("a"), {}, "a a -"),
        (DECODE, {}, P(None, "a"), P(), {}, "- - -"),  # and are replicated where these are
        (DECODE, {}, P(None, ("b", "a")), P(("b", "a")), {}, "ba ba -"),
        (DECODE, {}, P(None, ("a", "b")), P("a"), {}, "a a -"),  # a device has 4 KV heads
        (DECODE, {"num_kv_heads": 2}, P(None, ("a", "b")), P("a"), {}, "a ab -"),
        (DECODE, {"num_kv_heads": 2}, P(None, ("b", "a")), P("a"), {}, "a a -"),
        (DECODE, dict(num_q_heads=12, num_kv_heads=2), P(None, ("b", "c")), P("a"), {}, "a a -"),
        (DECODE, {"num_kv_heads": 2}, P(None, ("a", "b")), P("a"), {"tables": "b"}, "a ab -"),
        (DECODE, {"num_kv_heads": 1}, P(None, "b"), P(), {}, "- b -"),
        (DECODE, {"num_kv_heads": 1}, P(None, "c"), P(), {}, "- - -"),  # 3 devices, 16 heads
        (DECODE, {}, P("b", "a"), P("a"), {}, "a a b"),
        (DECODE, {}, P("a"), P("a"), {}, "a a -"),
        (DECODE, {}, P(("a", "b")), P("a"), {}, "a a b"),
        (DECODE, {}, P("b"), P(), {"lens": "a"}, "- - b"),  # the queries decide
        (DECODE, {}, P(), P(), {"tables": "a", "lens": "b"}, "- - a"),
        (DECODE, {"num_seqs": 3}, P("a"), P(), {}, "- - -"),
        (DECODE, {"num_seqs": 3}, P("c"), P(), {}, "- - c"),
        (DECODE, {}, P(None, None, "a"), P(), {"tables": (None, "a")}, "- - -"),
        (GRADIENT, {}, P("b", "a"), P("a"), {}, "a a"),
        (GRADIENT, {"num_kv_heads": 2}, P(None, ("a", "b")), P("a"), {}, "a a"),
        (WRITE, {}, P("b", "a"), P("a"), {}, "a"),
    ],
)
def test_the_pages_decide_which_axes_are_sharded(rule, sizes, q, k_pages, rest, expected):
    names = {"tables": "block_tables", "lens": "seq_lens"}
    specs = {names[key]: P(*spec) for key, spec in rest.items()}
    found = sharded_axes(rule, sizes, q=q, k_pages=k_pages, **specs)
    assert " ".join("".join(found[axis]) or "-" for axis in rule.shardable_axes) == expected


def test_every_device_has_the_kv_heads_of_its_query_heads():
    """However heads are sharded; and no device needs pages that it does not have."""
    on = AbstractMesh((2, 4, 2), ("a", "b", "c"))
    devices = np.arange(on.size).reshape(on.axis_sizes)
    orders = [x for n in range(4) for x in itertools.permutations(on.axis_names, n)]

    def count(axes):
        return math.prod(on.shape[name] for name in axes)

    def part(size, axes):
        """The elements of an axis of this size on each device, [devices, elements]."""
        others = [name for name in on.axis_names if name not in axes]
        order = devices.transpose([on.axis_names.index(name) for name in (*axes, *others)])
        shard = np.argsort(order.ravel()) // (on.size // count(axes))
        return np.arange(size).reshape(count(axes), -1)[shard]

    for heads, wished, per_device in itertools.product(orders, orders, (1, 2)):
        kv_heads = per_device * count(heads)
        sizes = dict(num_seqs=6, num_q_heads=4 * kv_heads, num_kv_heads=kv_heads)
        rows = [name for name in on.axis_names if name not in wished]
        specs = dict(q=P(rows[:2], wished), k_pages=P(heads), seq_lens=P("b"))
        found = sharded_axes(DECODE, sizes, on, **specs)
        assert found["num_kv_heads"] == heads
        used = [*found["num_q_heads"], *found["num_seqs"]]
        assert len(set(used)) == len(used) and 6 % count(found["num_seqs"]) == 0, specs
        q_heads, pages = part(4 * kv_heads, found["num_q_heads"]), part(kv_heads, heads)
        here = np.arange(q_heads.shape[1]) * pages.shape[1] // q_heads.shape[1]
        np.testing.assert_array_equal(pages[:, here], q_heads // 4, err_msg=f"{sizes}, {specs}")


# K and V of 2NHD are one array, whose scales are another.
FUSED = ShardingRule(
    names=("q", "k_pages", "k_scales", "v_scales"),
    inputs=(Q, ("num_pages", "k_and_v", "num_kv_heads"), *[("num_pages", "num_kv_heads")] * 2),
    outputs=(Q,),
    shardable_axes=AXES[:2],
)
FUSED_SHAPES = [(4, 16, 8), (7, 2, 8), (7, 8), (7, 8)]
HEADS = P(None, "a")


@pytest.mark.parametrize(
    ("rule", "specs", "message"),
    [
        (DECODE, [P(None, "a"), P()], "k_pages is sharded along num_pages over ('a',)"),
        (DECODE, [P(("a", "b"), "c"), P()], "k_pages is sharded along num_pages over ('c',)"),
        (DECODE, [P(), P(None, None, "b")], "v_pages is sharded along page_size over ('b',)"),
        (DECODE, [P(*[None] * 3, "a"), P()], "k_pages is sharded along kv_head_dim over ('a',)"),
        (DECODE, [P("a"), P("b")], "over ('b',) of the mesh, and k_pages over ('a',)"),
        (DECODE, [P("a"), P()], "v_pages is sharded along num_kv_heads over ()"),
        (DECODE, [P(), P("a")], "v_pages is sharded along num_kv_heads over ('a',)"),
        (FUSED, [P(None, "a"), P(), P()], "k_pages is sharded between K and V over ('a',): shard"),
        (FUSED, [P(), P(), P("a")], "v_scales is sharded along num_pages over ('a',)"),
        (FUSED, [P(None, None, "a"), HEADS, P()], "v_scales is sharded along num_kv_heads over ()"),
        (FUSED, [P(), HEADS, P()], "k_scales is sharded along num_kv_heads over ('a',)"),
    ],
)
def test_pages_that_would_be_gathered_are_refused(rule, specs, message):
    shapes = shapes_of() if rule is DECODE else FUSED_SHAPES
    specs = [P(), *specs, *[P()] * (len(shapes) - len(specs) - 1)]
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        axis_sharding(rule, shapes, specs, MESH)
    cure = "along the KV heads alone, as pallas_paged.pages.sharding.kv_pool_sharding does"
    assert cure in str(caught.value) or "between" in message


def test_a_rule_in_shardys_notation_shards_scales_as_pages():
    """It replicates axes that may not be sharded, but not those of the pool."""
    q, pages, tables = (" ".join(axes) for axes in DECODE.inputs[:1] + DECODE.inputs[2:4])
    assert DECODE.shardy == f"{q}, {pages}, {pages}, {tables}, num_seqs -> {q}"
    assert DECODE.replicated_axes == ("head_dim", "pages_per_seq")
    assert WRITE.replicated_axes == ("num_seqs", "num_q_heads", "head_dim", "pages_per_seq")
    batched = DECODE.batched("x", [True, False, False, True, False])
    assert [axes[0] == "x" for axes in batched.inputs] == [True, False, False, True, False]
    assert batched.outputs == (("x", *Q),)
    assert batched.shardable_axes == (*DECODE.shardable_axes, "x")
    found = axis_sharding(FUSED, FUSED_SHAPES, [P(), P(None, None, "a"), HEADS, HEADS], MESH)
    assert found == {"num_kv_heads": ("a",), "num_q_heads": ("a",)}


@dataclass(frozen=True, kw_only=True)
class Local:
    """A small call on one device that mixes all arrays, and notes the shapes of its queries."""

    scale: float = 2.0
    one_device: bool = False
    seen: list = field(default_factory=list, repr=False, compare=False)

    def __call__(self, q, k, v, tables, lens):
        self.seen.append(q.shape)
        heads = jnp.repeat(k[:, 1, 2] + 3 * v[:, 2, 1], q.shape[1] // k.shape[0], axis=0)
        return (q * heads * self.scale + (tables[:, 1] + 10 * lens)[:, None, None],)

    def divided(self):
        run = on_each_device(self, DECODE, platform=jax.default_backend())
        return lambda arrays: run(*(arrays[name] for name in POSITIONAL))[0]


def arrays_of(**sizes):
    rng = np.random.default_rng(0)
    *shapes, tables, lens = shapes_of(**sizes)
    floats = [rng.integers(-9, 9, shape).astype(np.float32) for shape in shapes]  # exact sums
    integers = [rng.integers(0, 9, shape).astype(np.int32) for shape in (tables, lens)]
    return dict(zip(POSITIONAL, (*floats, *integers), strict=True))


def expected(arrays, scale=2.0):
    return np.asarray(Local(scale=scale)(*arrays.values())[0])


def compiled_on(local, placed):
    return jax.jit(local.divided()).lower(placed).compile()


ARRAYS = arrays_of()
AB, BA = ("a", "b"), ("b", "a")


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
@pytest.mark.parametrize(
    ("num_kv_heads", "q", "pages", "rest", "result"),
    [
        (8, P("b", "a"), P("a"), dict(seq_lens=P("b")), P("b", "a")),
        (2, P(None, AB), P("a"), {}, P(None, AB)),
        (1, P(None, "b"), P(), dict(block_tables=P("a", "b")), P("a", "b")),
        (8, P(None, BA), P(BA), {}, P(None, BA)),
        (8, P(), P(AB), {}, None),
        (8, P(None, "b", "a"), P("a"), dict(seq_lens=P("a")), None),
    ],
)
def test_devices_use_their_parts_and_gather_no_pages(num_kv_heads, q, pages, rest, result, kind):
    arrays, on = arrays_of(num_kv_heads=num_kv_heads), mesh_2d(2, 2, names=AB, kind=kind)
    placed = place(arrays, on, rest | dict(q=q, k_pages=pages, v_pages=pages))
    compiled = compiled_on(Local(), placed)
    found = compiled(placed)
    np.testing.assert_array_equal(found, expected(arrays))
    if result is not None:
        assert found.sharding.is_equivalent_to(NamedSharding(found.sharding.mesh, result), 3)
    assert not [line for line in collectives(compiled) if ",7,4," in line]


def test_the_name_of_a_program_depends_on_the_code_of_kernels():
    """Programs are cached by their text, in which kernels are not."""
    for module in (xla, families, dispatch, pool):
        assert module.__name__.startswith(CODE)


def test_layers_share_one_lowering_for_the_sizes_of_a_device():
    local = Local(scale=0.5)

    @jax.jit
    def model(arrays):
        for _ in range(5):
            arrays = arrays | {"q": local.divided()(arrays)}
        return arrays["q"]

    with mock.patch.object(export, "export", wraps=export.export) as lower:
        model.lower(place(ARRAYS, mesh(2))).compile()
    assert lower.call_count == 1
    assert set(local.seen) == {(4, 16, 16), (4, 8, 16)}


def test_the_implementation_is_chosen_by_the_sizes_of_a_device():
    on = AbstractMesh((2, 4), ("data", "tensor"), (AxisType.Explicit,) * 2)
    shapes = shapes_on(on, ARRAYS, BY_HEADS | {"q": P("data", "tensor")})
    attention = partial(raw.paged_attention, implementation="xla", sm_scale=0.123)
    with mock.patch.object(dispatch, "resolve", wraps=dispatch.resolve) as resolve:
        out = jax.eval_shape(lambda arrays: attention(**arrays), shapes)
    call, _ = resolve.call_args.args
    assert (call.num_q_heads, call.num_kv_heads, call.num_seqs) == (4, 2, 2)
    assert resolve.call_count == 1
    assert out.sharding.spec[:2] == ("data", "tensor")


@contextlib.contextmanager
def gspmd(_):
    jax.config.update("jax_use_shardy_partitioner", False)
    yield
    jax.config.update("jax_use_shardy_partitioner", True)


@pytest.mark.parametrize(("context", "scale"), [(jax.set_mesh, 3.0), (gspmd, 4.0)])
def test_settings_of_the_caller_do_not_reach_a_device(context, scale):
    on = mesh(2)
    local, placed = Local(scale=scale), place(ARRAYS, on)
    with context(on):
        compiled = compiled_on(local, placed)
        found = compiled(placed)
    assert collectives(compiled) == [] and local.seen[-1] == (4, 8, 16)
    np.testing.assert_array_equal(found, expected(ARRAYS, scale))


def test_programs_are_cached_by_what_devices_do():
    """As the persistent cache sees them where callbacks are left out of its keys."""
    placed = place(ARRAYS, mesh(2))

    class Same(Local):  # as in another process
        __hash__ = object.__hash__
        __eq__ = object.__eq__

    def text_of(function):
        text = jax.jit(function).lower(placed).as_text()
        return re.sub(r'backend_config = "\d+"', "", text)

    first = text_of(Same().divided())
    assert "CustomSPMDPartitioning" in first and text_of(Same().divided()) == first
    texts = [first, text_of(Same(scale=3.0).divided())]
    for options in ({}, dict(sm_scale=0.5), dict(sliding_window=5), dict(fixed_split_size=64)):
        call = partial(raw.paged_attention, implementation="triton_interpret", **options)
        texts.append(text_of(lambda arrays, call=call: call(**arrays)))
    assert len({re.search(r"attention_[0-9a-f]{12}", text)[0] for text in texts}) == len(texts)


def test_one_device_runs_the_call_itself_which_can_be_exported():
    for local, num_devices, arrays in [
        (Local(scale=5.0), 2, ARRAYS),  # which are on one device
        (Local(scale=6.0, one_device=True), 2, place(ARRAYS, mesh(2))),
        (Local(scale=7.0), 1, ARRAYS),
    ]:
        with contextlib.nullcontext() if num_devices > 1 else jax.set_mesh(mesh(1)):
            text = jax.jit(local.divided()).lower(arrays).as_text()
        assert "CustomSPMDPartitioning" not in text, local
    exported = export.export(jax.jit(Local().divided()))(ARRAYS)
    np.testing.assert_array_equal(exported.call(ARRAYS), expected(ARRAYS))


def test_calls_run_eagerly_and_on_a_mesh_of_one_device_and_have_no_gradient():
    found = Local().divided()(place(ARRAYS, mesh(2)))
    assert found.sharding.spec[:2] == (None, "tensor")
    np.testing.assert_array_equal(found, expected(ARRAYS))
    one = mesh_2d(1, names=("tensor",), kind=AxisType.Explicit)
    with jax.set_mesh(one):
        found = jax.jit(Local().divided())(place(ARRAYS, one))
    np.testing.assert_array_equal(found, expected(ARRAYS))
    with pytest.raises(NotImplementedError, match="has no gradient itself"):
        jax.eval_shape(jax.grad(lambda x: Local().divided()(x).sum(), allow_int=True), ARRAYS)


@pytest.mark.parametrize("mapped", [("q",), ("q", "k_pages", "v_pages", "seq_lens")], ids=str)
def test_vmap_divides_calls_with_one_pool_or_a_pool_for_each(mapped):
    both = [ARRAYS, ARRAYS | {name: ARRAYS[name] + 1 for name in mapped}]
    batched = ARRAYS | {name: np.stack([one[name] for one in both]) for name in mapped}
    specs = BY_HEADS | {name: P("data", *BY_HEADS.get(name, P())) for name in mapped}
    placed = place(batched, mesh_2d(2, 2, names=("data", "tensor")), specs)
    axes = ({name: 0 if name in mapped else None for name in POSITIONAL},)
    compiled = jax.jit(jax.vmap(Local().divided(), in_axes=axes)).lower(placed).compile()
    assert collectives(compiled) == []
    np.testing.assert_array_equal(compiled(placed), [expected(one) for one in both])


@pytest.mark.parametrize("implementation", ["triton", "mosaic_sm90"])
def test_kernels_of_gpus_can_be_lowered_once(implementation):
    case = Case(num_q_heads=16, num_kv_heads=8, head_dim=64, page_size=8, dtype="float16")
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in case.make(poison=False)]
    call = jax.jit(partial(raw.paged_attention, implementation=implementation))
    lower = export.export(call, platforms=("cuda",), disabled_checks=KERNEL_CALLS)
    try:
        with jax.sharding.use_abstract_mesh(H200_MESH):
            lowered = lower(*shapes)
    except NotImplementedError as e:
        pytest.skip(str(e))
    text = lower_for_cuda(lowered.call, *shapes).as_text()
    assert text.count("custom_call") >= 2  # attention and its merge
