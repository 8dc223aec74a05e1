"""Pages of a row on several devices: as on one device."""

import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_paged as pp
from pallas_paged.attention import context_parallel as cp
from tests.support import raw
from tests.support.attention_cases import Case, NarrowCase, cumulated
from tests.support.attention_oracle import attend, relative_error
from tests.support.devices import implementations_here
from tests.support.kv_pools import copies_of, pool_bytes
from tests.support.marks import slow
from tests.support.page_layouts import layer_in_layout
from tests.support.page_tables import assert_same, extend, fork, free, i32
from tests.support.placement import mesh_2d
from tests.support.quantized_cases import Quantized

SINKS = np.float32([1.0, -3.0, 0.0, 8.0])
OPTIONS = dict(sinks=SINKS, soft_cap=1.5, sm_scale=-0.7)
SHARD_HEADS = dict(shard_heads=True)
SIZES = dict(num_layers=2, num_pages=40, num_kv_heads=2, page_size=4, head_dim=16)
# An empty row, a row of one page, rows on all devices; table entries and slots of no row are junk.
GQA = Case(head_dim=16, page_size=4, seq_lens=(37, 0, 3, 64), pages_per_seq=16, num_pages=40)
MQA = replace(GQA, num_kv_heads=1)
NARROW = NarrowCase(**vars(GQA), v_head_dim=8)


def mesh_of(num_context: int, num_tensor: int = 1) -> Mesh:
    return mesh_2d(num_context, num_tensor, names=(cp.CONTEXT_AXIS, "tensor"))


def in_place_order(num_pages: int, mesh: Mesh) -> np.ndarray:
    """The page at each place of a pool, on device after device."""
    return np.arange(num_pages).reshape(-1, mesh.shape[cp.CONTEXT_AXIS]).T.ravel()


def place(layer: pp.LayerKV, mesh: Mesh) -> pp.LayerKV:
    """A layer on one device as a layer over devices."""

    def put(x):
        if not np.ndim(x):
            return jax.device_put(x, NamedSharding(mesh, P()))
        ordered = np.asarray(x)[:, in_place_order(x.shape[1], mesh)]
        return jax.device_put(ordered, NamedSharding(mesh, P("tensor", cp.CONTEXT_AXIS)))

    return jax.tree.map(put, layer)


def collect(pool, mesh: Mesh):
    """A pool over devices as NumPy arrays, its pages in the order of the page table."""
    axis = pool.layers[0].layout.page_axis

    def get(x):
        x = np.asarray(x)
        return x.take(np.argsort(in_place_order(x.shape[axis], mesh)), axis) if x.ndim else x

    return jax.tree.map(get, pool)


INT8 = Quantized(case=GQA, kv_dtype="int8", per_tensor=False)
KERNELS = [name for name in implementations_here() if name != "xla"]


@pytest.mark.parametrize(
    ("case", "devices", "given"),
    [
        (MQA, (2,), OPTIONS),
        (GQA, (2, 2), OPTIONS | SHARD_HEADS),
        (replace(GQA, dtype="float16"), (2, 2), {"sinks": SINKS}),
        (NARROW, (2, 2), {}),
        (INT8, (2, 2), {}),
        (replace(INT8, per_tensor=True), (2, 2), {}),
        *((GQA.on(name), (2,), dict(sinks=SINKS, implementation=name)) for name in KERNELS),
        *slow([(MQA, (8,), OPTIONS), (GQA, (4, 2), OPTIONS), (MQA, (4,), OPTIONS | SHARD_HEADS)]),
        *slow([(replace(GQA, dtype="bfloat16"), (2, 2), {})]),
    ],
    ids=lambda value: " and ".join(value) if isinstance(value, dict) else str(value),
)
def test_decoding_equals_the_oracle(case, devices, given):
    quantized, mesh = isinstance(case, Quantized), mesh_of(*devices)
    arrays, meant = case.make() if quantized else [case.make()] * 2
    q, k, v, tables, lens, *scales = arrays
    layer = pp.LayerKV(k, v, *scales, kv_layout="HPND")

    @jax.jit
    def decode(q, layer, tables, lens):
        pages = cp.local_pages(tables, lens, page_size=4, mesh=mesh)
        how = raw.by(given["implementation"]) if "implementation" in given else {}
        return cp.paged_attention(q, layer, pages, mesh=mesh, **given | how)

    out = decode(q, place(layer, mesh), tables, lens)
    if "shard_heads" in given:
        assert out.addressable_shards[0].data.shape[1] * mesh.size == q.shape[1]
    options = {key: x for key, x in given.items() if key not in ("shard_heads", "implementation")}
    expected, _ = attend(*meant[:5], **options)
    assert out.dtype == q.dtype
    np.testing.assert_array_equal(np.asarray(out)[lens == 0], 0)
    # Rounded on each device, and once more after the merge.
    assert relative_error(out, expected) <= 2 * (GQA if quantized else case).tolerance


def test_each_device_lists_its_own_pages_in_order():
    mesh, (_, _, _, tables, lens) = mesh_of(4), MQA.make()
    lens[0] = -5  # negative lengths are empty rows, and long ones end with the table
    lens[2] = 2**31 - 1
    tables[2] = np.arange(16)
    pages = jax.jit(partial(cp.local_pages, page_size=4, mesh=mesh))(tables, lens)
    for device in range(4):
        for row, length in enumerate(np.clip(lens, 0, 64)):
            blocks = [j for j in range(-(-length // 4)) if tables[row, j] % 4 == device]
            expected = np.zeros(16, np.int32)
            expected[: len(blocks)] = tables[row, blocks] // 4
            np.testing.assert_array_equal(pages.block_tables[device, row], expected)
            assert pages.seq_lens[device, row] == sum(min(4, length - 4 * j) for j in blocks)


class Model:
    """Random q, k, v of each token, and a step of attention on one device or over devices."""

    def __init__(self, mesh: Mesh | None, dtype: str, kv_layout: str = "HPND"):
        self.dtype = jnp.dtype("float32" if dtype == "int8" else dtype)
        on = pp if mesh is None else partial_module(mesh)
        self.pool = on.create_kv_pool(**SIZES, dtype=dtype, kv_layout=kv_layout)
        rows = dict(max_seqs=4, pages_per_seq=16)
        self.table = pp.create_page_table(num_pages=SIZES["num_pages"], page_size=4, **rows)
        self.step = jax.jit(partial(self._step, on), donate_argnums=0)
        self.copy = jax.jit(on.copy_pages, donate_argnums=0)

    @staticmethod
    def _step(on, pool, table, q, k, v, cu_q_lens):
        q_lens = jnp.diff(cu_q_lens)
        tokens = jnp.arange(q.shape[0], dtype=jnp.int32)
        rows = jnp.searchsorted(cu_q_lens[1:], tokens, side="right").astype(jnp.int32)
        older = table.seq_lens - q_lens
        starts = jnp.append(older - cu_q_lens[:-1], 0)
        slots = pp.slot_mapping(table, rows, starts[rows] + tokens)
        layers, outs = [], []
        for index, layer in enumerate(pool.layers):
            k, v = k + index, v - index
            layer = on.write_kv(layer, k, v, slots)
            if on is pp:
                at = table.block_tables, table.seq_lens
                out = pp.ragged_paged_attention(q, layer, *at, cu_q_lens, sinks=SINKS)
            else:
                pages = on.local_pages(table.block_tables, older, page_size=4)
                out = on.ragged_paged_attention(q, layer, pages, cu_q_lens, k, v, sinks=SINKS)
            layers.append(layer)
            outs.append(out)
        return pp.KVPool(layers=tuple(layers)), jnp.stack(outs)

    def feed(self, q_lens, seed: int):
        self.table, ok = extend(self.table, i32(*q_lens))
        assert np.all(ok)
        rng = np.random.default_rng(seed)
        num_tokens = 40  # some are padding
        shapes = [(num_tokens, heads, 16) for heads in (4, 2, 2)]
        q, *kv = (rng.standard_normal(shape).astype(self.dtype) for shape in shapes)
        self.pool, outs = self.step(self.pool, self.table, q, *kv, cumulated(q_lens))
        return np.asarray(outs)

    def fork(self, src, dst):
        self.table, copies, ok = fork(self.table, i32(src), i32(dst))
        assert np.all(ok)
        self.pool = self.copy(self.pool, copies)


def partial_module(mesh: Mesh):
    names = ("create_kv_pool", "local_pages", "copy_pages", "write_kv")
    found = {name: partial(getattr(cp, name), mesh=mesh) for name in names}
    attend = partial(cp.ragged_paged_attention, mesh=mesh, shard_heads=mesh.shape["tensor"] > 1)
    return SimpleNamespace(**found, ragged_paged_attention=attend)


@pytest.mark.cpu_budget(8)  # compiles a loop on four devices and on one
@pytest.mark.parametrize(
    ("devices", "dtype", "kv_layout"),
    [
        ((2, 2), "int8", "HND"),
        *slow([((4,), "float32", "HPND"), ((8,), "bfloat16", "HPND"), ((2, 2), "int8", "HPND")]),
        *slow([((2, 2), "float32", "NH2D")]),
    ],
    ids=str,
)
def test_prompts_chunks_forks_and_tokens_equal_one_device(devices, dtype, kv_layout):
    mesh = mesh_of(*devices)
    ours, alone = Model(mesh, dtype, kv_layout), Model(None, dtype)
    q_dtype_error = 1e-5 if dtype != "bfloat16" else 1e-2

    def feed(*q_lens, seed):
        outs, expected = ours.feed(q_lens, seed), alone.feed(q_lens, seed)
        assert relative_error(outs, expected) <= q_dtype_error
        np.testing.assert_array_equal(outs[:, sum(q_lens) :], 0)

    feed(18, 0, 9, 5, seed=0)  # prompts
    for model in (ours, alone):
        model.table = free(model.table, np.array([False, False, False, True]))
    feed(21, 3, 1, 11, seed=1)  # chunks, tokens and prompts; pages in another order
    for model in (ours, alone):
        model.table = free(model.table, np.array([False, True, False, True]))
        model.fork(0, 1)
        model.fork(2, 3)
    feed(1, 1, 1, 1, seed=2)
    feed(1, 1, 0, 6, seed=3)
    for layer, wanted in zip(collect(ours.pool, mesh).layers, alone.pool.layers, strict=True):
        for name, x in layer_in_layout(kv_layout, wanted).items():
            np.testing.assert_array_equal(getattr(layer, name), x, err_msg=name)


def test_pages_are_copied_between_all_devices():
    mesh = mesh_of(4)
    how = dict(kv_layout="HPND", dtype="float8_e4m3fn", k_scales=[0.5, 2.0], v_scales=[1.0, 3.0])
    pool = cp.create_kv_pool(mesh=mesh, **SIZES, **how)
    alone = pp.create_kv_pool(**SIZES, **how)
    for x in jax.tree.leaves(pool):
        assert x.is_fully_replicated if x.ndim < 3 else x.addressable_shards[0].data.shape[1] == 10
    slots = i32(*range(160), 160, -1, -(2**31), 2**31 - 1)  # the last are not in the pool
    kv = np.random.default_rng(0).standard_normal((2, 164, 2, 16), np.float32)
    write = partial(jax.jit(cp.write_kv, static_argnames="mesh"), mesh=mesh)
    pool = pp.KVPool(layers=tuple(write(layer, *kv, slots) for layer in pool.layers))
    alone = pp.KVPool(layers=tuple(pp.write_kv(layer, *kv, slots) for layer in alone.layers))
    # Between devices both ways, within one, a swap, and entries that are dropped.
    copies = copies_of(i32(0, 1, 5, 9, 8, 40, 6, -1, 7), i32(11, 4, 13, 8, 9, 20, 40, 21, -1))
    copied = jax.jit(partial(cp.copy_pages, mesh=mesh))(pool, copies)
    expected = jax.jit(pp.copy_pages)(alone, copies)
    bits = partial(jax.tree.map, lambda x: np.asarray(x).view(f"u{x.dtype.itemsize}"))
    assert_same(bits(collect(copied, mesh)), bits(expected))


def collectives(compiled) -> list[str]:
    names = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    return re.findall(rf" ({names})(?:-start)?\(", compiled.as_text())


@pytest.mark.parametrize(("dtype", "shard_heads"), [("float32", False), ("int8", True)])
def test_a_step_has_one_collective_a_layer_and_works_in_place(dtype, shard_heads):
    mesh, kind = mesh_of(2, 2), "all-to-all" if shard_heads else "all-gather"
    # Large, so that a copy of a pool would be seen beside the rest.
    pool = cp.create_kv_pool(mesh=mesh, **SIZES | dict(num_pages=16384), dtype=dtype)
    num_layers, part = SIZES["num_layers"], pool_bytes(pool) // mesh.size

    def step(pool, q, k, v, tables, lens, slots):
        pages = cp.local_pages(tables, lens, page_size=4, mesh=mesh)
        layers, outs = [], []
        for layer in pool.layers:
            layer = cp.write_kv(layer, k, v, slots, mesh=mesh)
            outs.append(cp.paged_attention(q, layer, pages, mesh=mesh, shard_heads=shard_heads))
            layers.append(layer)
        return pp.KVPool(layers=tuple(layers)), outs

    def of(dtype, *shape, spec=()):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

    q, kv = (of(jnp.float32, 4, heads, 16, spec=(None, "tensor")) for heads in (4, 2))
    integers = of(jnp.int32, 4, 16), of(jnp.int32, 4), of(jnp.int32, 4)
    compiled = jax.jit(step, donate_argnums=0).lower(pool, q, kv, kv, *integers).compile()
    assert collectives(compiled) == [kind] * num_layers
    shape = "[2,4,1,17]" if shard_heads else "[2,4,2,17]"  # with log-sum-exps, of two devices
    assert f"u32{shape}" in compiled.as_text()
    copies = copies_of(*[i32(0, 1, 2, 3)] * 2)
    copy = jax.jit(partial(cp.copy_pages, mesh=mesh), donate_argnums=0)
    compiled_copy = copy.lower(pool, copies).compile()
    assert collectives(compiled_copy) == ["all-reduce"]
    for memory in (compiled.memory_analysis(), compiled_copy.memory_analysis()):
        assert memory.alias_size_in_bytes >= part
        assert memory.temp_size_in_bytes < part / num_layers / 8


def test_the_functions_run_inside_shard_map():
    mesh, (q, k, v, tables, lens) = mesh_of(2, 2), GQA.make()

    def step(q, layer, new, slots, tables, lens):
        layer = cp.write_kv(layer, new, new, slots)
        layer = cp.copy_pages(pp.KVPool(layers=(layer,)), copies_of(slots, slots)).layers[0]
        return cp.paged_attention(q, layer, cp.local_pages(tables, lens, page_size=4))

    heads, pages = P(None, "tensor"), P("tensor", cp.CONTEXT_AXIS)
    specs = dict(in_specs=(heads, pages, heads, P(), P(), P()), out_specs=heads, check_vma=False)
    layer, new = place(pp.LayerKV(k, v, kv_layout="HPND"), mesh), np.zeros((1, 2, 16), np.float32)
    run = jax.jit(jax.shard_map(step, mesh=mesh, **specs))
    out = run(q, layer, new, i32(160), tables, lens)
    assert relative_error(out, attend(q, k, v, tables, lens)[0]) <= 1e-5


def test_bad_input_is_refused():
    mesh, (q, k, v, tables, lens) = mesh_of(4, 2), GQA.make()
    layer = pp.LayerKV(k, v, kv_layout="HPND")
    pages = cp.LocalPages(block_tables=np.stack([tables] * 4), seq_lens=np.stack([lens] * 4))
    attention = jax.jit(partial(cp.paged_attention, mesh=mesh), static_argnames="shard_heads")
    ragged = jax.jit(partial(cp.ragged_paged_attention, mesh=mesh))
    create = partial(cp.create_kv_pool, mesh=mesh, dtype="float32", **SIZES)
    on, token, new = dict(mesh=mesh), k[:, 0, :1], (layer, pages, i32(0, 4), q[:3, :2], q[:3, :2])
    for message, call in {
        "num_pages=42 must be a multiple of 4, mesh axis 'context'": lambda: create(num_pages=42),
        "num_kv_heads=3 must be a multiple of 2, mesh axis": lambda: create(num_kv_heads=3),
        "page_size=3 must be": lambda: create(page_size=3),
        "must be a mesh with an axis 'context'": lambda: cp.write_kv(layer, token, token, i32(0)),
        "block_tables.shape=": lambda: cp.local_pages(tables[0], lens, page_size=4, **on),
        "seq_lens.dtype=int64": lambda: cp.local_pages(tables, np.int64(lens), page_size=4, **on),
        "page_size=0": lambda: cp.local_pages(tables, lens, page_size=0, **on),
        "head_dim=8 of q": lambda: attention(q[..., :8], layer, pages),
        "pages must be LocalPages, got ": lambda: attention(q, layer, tables),
        "layer must be a LayerKV, got tuple": lambda: attention(q, (layer,), pages),
        "of the same T, got {'q': (4, 4, 16), 'k': (3,": lambda: ragged(q, *new),
        "sinks": lambda: attention(q, layer, pages, sinks=SINKS[:2]),
        "shard_heads=1 must be True or False": lambda: attention(q, layer, pages, shard_heads=1),
        "shard_heads=True needs query heads, here": lambda: attention(
            q, layer, pages, shard_heads=True
        ),
    }.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            call()
    with pytest.raises(TypeError, match="sliding_window"):
        cp.paged_attention(q, layer, pages, mesh=mesh, sliding_window=3)
    with pytest.raises(NotImplementedError, match="no gradient"):
        jax.grad(lambda q: attention(q, layer, pages).sum())(q)
