"""How calls are divided among devices: every layout, what a program holds, how it is cached."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_paged as pp
from pallas_paged import dispatch, partition
from pallas_paged.kernels.logits import LogitOptions
from tests.support.attention_cases import Case
from tests.support.devices import H200_MESH, HOPPER, lower_for_cuda, mesh
from tests.support.placement import collectives, mesh_2d, named, place, several

CASE = Case(
    num_q_heads=16, num_kv_heads=8, head_dim=16, page_size=4, seq_lens=(13, 0, 5, 16),
    pages_per_seq=4,
)  # fmt: skip
ARRAYS = named(pp.paged_attention, CASE.make(poison=False))


def local_call(implementation, **changes):
    """A decode call as each device does it."""
    fields = dict(
        kernel="decode",
        implementation=implementation,
        device=dispatch.Device.here(),
        options=LogitOptions(sm_scale=0.25),
        config=None,
        fixed_split_size=None,
        with_lse=True,
        names=tuple(ARRAYS),
        kv_layout="HPND",
    )
    return dispatch.LocalCall(**fields | changes)


def divided(local):
    """A decode call, divided among devices: of "xla" too, which compiles fast."""
    layout = dispatch._layout("decode", local.kv_layout, local.names, scalars=False, with_lse=True)
    return partition.on_each_device(local, layout, platform=local.device.platform)


def test_any_layout(num_layouts=12):
    on = mesh_2d(2, 2, 2, names=("a", "b", "c"))
    rng = np.random.default_rng(0)
    for _ in range(num_layouts):
        num_kv_heads = int(rng.choice([1, 2, 4, 8]))
        arrays = named(
            pp.paged_attention, dataclasses.replace(CASE, num_kv_heads=num_kv_heads).make()
        )
        want = local_call("xla")(*arrays.values())

        def axes(most, rng=rng):
            names = list(rng.permutation(["a", "b", "c"]))[: rng.integers(0, 4)]
            while 2 ** len(names) > most:
                names.pop()
            return names

        def spec(names):
            return tuple(map(str, names)) or None

        heads, q_heads = axes(num_kv_heads), axes(8)
        if rng.random() < 0.7:  # often cut as the pages, and further
            q_heads = heads + [n for n in q_heads if n not in heads][: 3 - len(heads)]
        rows = [name for name in axes(4) if name not in q_heads]
        specs = {
            "q": P(spec(rows), spec(q_heads)),
            "k_pages": P(spec(heads)),
            "v_pages": P(spec(heads)),
            "block_tables": P(spec(axes(4))),
            "seq_lens": P(spec(axes(4))),
        }
        placed = place(arrays, on, specs)
        compiled = jax.jit(divided(local_call("xla"))).lower(*placed.values()).compile()
        for got, wanted in zip(compiled(*placed.values()), want, strict=True):
            np.testing.assert_allclose(np.asarray(got), wanted, rtol=1e-5, atol=1e-5, err_msg=specs)
        # Pages stay where they are.
        _, num_pages, page_size, _ = arrays["k_pages"].shape
        pool = re.compile(rf"\[\d+,{num_pages},{page_size},")
        assert not [line for line in collectives(compiled) if pool.search(line)], specs


def test_the_implementation_is_chosen_by_the_sizes_of_a_device(monkeypatch):
    calls = []
    resolve = dispatch.resolve

    def spy(call, implementation):
        calls.append((call.num_q_heads, call.num_kv_heads, call.num_seqs))
        return resolve(call, implementation)

    monkeypatch.setattr(dispatch, "resolve", spy)
    local = local_call("triton_interpret", options=LogitOptions(sm_scale=0.123))
    on = mesh_2d(2, 4, names=("data", "tensor"))
    specs = {"q": P("data", "tensor"), "k_pages": P("tensor"), "v_pages": P("tensor")}
    jax.jit(divided(local)).lower(*place(ARRAYS, on, specs).values()).compile()
    assert (4, 2, 2) in calls


def test_layers_share_one_lowering():
    partition._lowered.cache_clear()
    local = local_call("triton_interpret", options=LogitOptions(sm_scale=0.321))
    attend = divided(local)

    @jax.jit
    def model(q, *rest):
        for _ in range(5):
            q = attend(q, *rest)[0]
        return q

    specs = {"q": P(None, "tensor"), "k_pages": P("tensor"), "v_pages": P("tensor")}
    model.lower(*place(ARRAYS, mesh(2), specs).values()).compile()
    info = partition._lowered.cache_info()
    assert (info.misses, info.hits) == (1, 4)


@pytest.mark.parametrize("implementation", ["triton", "mosaic_gpu"])
def test_kernels_of_gpus_can_be_lowered_once(implementation):
    local = local_call(implementation, device=HOPPER)
    case = dataclasses.replace(CASE, head_dim=64, page_size=8, dtype="float16")
    arrays = named(pp.paged_attention, case.make())
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays.values()]
    lower = export.export(
        jax.jit(local), platforms=("cuda",), disabled_checks=partition.KERNEL_CALLS
    )
    try:
        with jax.sharding.use_abstract_mesh(H200_MESH):
            lowered = lower(*shapes)
    except NotImplementedError as e:
        pytest.skip(str(e))
    with jax.sharding.use_abstract_mesh(H200_MESH):
        text = lower_for_cuda(lowered.call, *shapes).as_text()
    assert text.count("custom_call") >= 2  # attention and its merge


@pytest.mark.parametrize(
    "context",
    [jax.set_mesh, lambda on: jax.enable_x64(True), lambda on: gspmd()],
    ids=["set_mesh", "x64", "GSPMD"],
)
def test_settings_of_the_caller_do_not_reach_a_device(context):
    partition._lowered.cache_clear()
    partition._build.cache_clear()
    on = mesh(2)
    specs = {"q": P(None, "tensor"), "k_pages": P("tensor"), "v_pages": P("tensor")}
    placed = place(ARRAYS, on, specs)
    call = partial(pp.paged_attention, implementation="triton_interpret")
    want = call(**ARRAYS)
    with context(on):
        compiled = jax.jit(lambda arrays: call(**arrays)).lower(placed).compile()
        got = compiled(placed)
    assert collectives(compiled) == []
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-5, atol=1e-5)


@contextlib.contextmanager
def gspmd():
    """The partitioner that JAX had before Shardy."""
    jax.config.update("jax_use_shardy_partitioner", False)
    yield
    jax.config.update("jax_use_shardy_partitioner", True)


def text_of(call, arrays):
    """A program as the persistent cache sees it where callbacks are left out of its keys."""
    text = jax.jit(lambda arrays: call(**arrays)).lower(arrays).as_text()
    return re.sub(r'backend_config = "\d+"', "", text)


def test_programs_are_cached_by_what_devices_do():
    placed = place(ARRAYS, mesh(2))
    call = partial(pp.paged_attention, implementation="triton_interpret")
    first = text_of(call, placed)
    assert "CustomSPMDPartitioning" in first
    jax.clear_caches()
    partition._build.cache_clear()
    assert text_of(call, placed) == first
    for changes in (dict(sm_scale=0.5), dict(sliding_window=5), dict(fixed_split_size=64)):
        assert text_of(partial(call, **changes), placed) != first


def test_one_device_runs_the_call_itself():
    call = partial(pp.paged_attention, implementation="triton_interpret")
    text = jax.jit(lambda arrays: call(**arrays)).lower(ARRAYS).as_text()
    assert "CustomSPMDPartitioning" not in text


def test_an_explicit_mesh_of_one_device():
    on = mesh_2d(1, names=("tensor",), kind=AxisType.Explicit)
    call = jax.jit(partial(pp.paged_attention, implementation="triton_interpret"))
    with jax.set_mesh(on):
        got = call(**place(ARRAYS, on))
    np.testing.assert_array_equal(np.asarray(got), np.asarray(call(**ARRAYS)))


def test_a_function_for_one_device_can_be_exported():
    function = jax.jit(partial(pp.paged_attention, implementation="triton_interpret"))
    exported = export.export(function)(*ARRAYS.values())
    got, want = exported.call(*ARRAYS.values()), function(*ARRAYS.values())
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


def test_a_loop_of_steps_moves_nothing_and_copies_no_pool(implementation):
    on, (k, v) = several(), np.random.default_rng(0).standard_normal((2, 4, 8, 16), np.float32)

    def step(i, state):
        layer, q = state
        layer = pp.write_kv(layer, k, v, jnp.arange(4, dtype=jnp.int32) * 4 + i)
        lens = ARRAYS["seq_lens"] + i
        q = pp.paged_attention(
            q,
            layer.k_pages,
            layer.v_pages,
            ARRAYS["block_tables"],
            lens,
            implementation=implementation,
        )
        return layer, q

    def loop(layer, q):
        return lax.fori_loop(0, 3, step, (layer, q))

    heads = NamedSharding(on, P("tensor"))
    layer = pp.LayerKV(k_pages=ARRAYS["k_pages"], v_pages=ARRAYS["v_pages"])
    want = jax.jit(loop)(layer, ARRAYS["q"])
    placed = (
        jax.device_put(layer, heads),
        jax.device_put(ARRAYS["q"], NamedSharding(on, P(None, "tensor"))),
    )
    placed = jax.tree.map(jnp.copy, placed)  # NumPy's memory can't be donated
    compiled = jax.jit(loop, donate_argnums=0).lower(*placed).compile()
    assert collectives(compiled) == []
    before = [shard.data.unsafe_buffer_pointer() for shard in placed[0].k_pages.addressable_shards]
    got = compiled(*placed)
    after = [shard.data.unsafe_buffer_pointer() for shard in got[0].k_pages.addressable_shards]
    assert after == before
    shape = ",".join(map(str, (8 // on.size, *layer.k_pages.shape[1:])))
    assert not re.findall(rf"f32\[{shape}\]\S* copy\(", compiled.as_text())
    np.testing.assert_array_equal(np.asarray(got[0].k_pages), np.asarray(want[0].k_pages))
    np.testing.assert_allclose(np.asarray(got[1]), np.asarray(want[1]), rtol=1e-5, atol=1e-5)
