"""Configs of a tuning file: which calls take them, and what is ignored with a warning."""

import dataclasses
import json
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import pallas_paged as pp
from pallas_paged.attention import dispatch, tuning
from pallas_paged.attention.partition import ShardingRule, on_each_device
from pallas_paged.decoder.unmerged_attention import unmerged_attention
from pallas_paged.kernels.device import Device
from pallas_paged.kernels.families import FAMILIES
from tests.support import raw
from tests.support.attention_calls import assert_close, with_lse
from tests.support.attention_cases import Case
from tests.support.attention_configs import config_of
from tests.support.devices import HOPPER
from tests.support.marks import needs_mosaic, needs_triton, slow
from tests.support.static_calls import DECODE, PREFILL

FAMILY = pytest.mark.parametrize(
    "family",
    [
        pytest.param("triton", marks=needs_triton),
        *(pytest.param(name, marks=needs_mosaic) for name in ("mosaic_sm80", "mosaic_sm90")),
    ],
)
BOTH = pytest.mark.parametrize("call", [PREFILL, DECODE], ids=["ragged", "decode"])


# No other test has these shapes: what JAX has traced keeps its config.
SIZES = dict(num_q_heads=4, num_kv_heads=2, head_dim=32, page_size=8)
CASES = {
    "decode": (raw.paged_attention, DECODE, Case(dtype="bfloat16", pages_per_seq=13)),
    "ragged": (
        raw.ragged_paged_attention,
        PREFILL,
        Case(dtype="bfloat16", pages_per_seq=13, q_lens=(4, 1, 9)),
    ),
}


def entry(call, family, **config):
    """An entry for a call: a small config of the family with changes."""
    found = config_of(family, ragged=call.kernel == "ragged")
    return dict(
        device=call.device.kind,
        config_class=type(found).__name__,
        sizes=tuning.sizes_of(call),
        config=dataclasses.asdict(found) | config,
        us=1.0, heuristic_us=2.0, jax=jax.__version__, date="2026-11-27",
    )  # fmt: skip


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes the tuning file that this process is told of: entries, or a text."""

    def write(found):
        path = tmp_path / "tuning.json"
        path.write_text(found if isinstance(found, str) else json.dumps(found))
        monkeypatch.setenv("PALLAS_PAGED_TUNING", str(path))

    return write


def trace(function, *arrays):
    """The text of a trace, without the names that follow from static arguments."""
    return re.sub(r"attention_\w{12}", "", str(jax.make_jaxpr(function)(*arrays)))


def chosen(call, family):
    return dispatch.resolve(call, family).keywords["config"]


@BOTH
@FAMILY
def test_a_config_of_the_file_is_used_for_its_call(write, call, family):
    write([entry(call, family)])
    assert chosen(call, family) == config_of(family, ragged=call.kernel == "ragged")


@needs_triton
def test_partial_states_are_made_with_the_config_of_the_file(write):
    sizes = SIZES | dict(num_seqs=3, num_tokens=3, max_kv_len=11 * 8)
    call = replace(DECODE, device=Device.here(), **sizes)
    write([entry(call, "triton")])
    q, *pages, tables, lens = CASES["decode"][2].make()
    layer = pp.LayerKV(*map(jnp.asarray, pages), kv_layout="HPND")

    def states(q):
        options = raw.by("triton_interpret")
        return unmerged_attention(q, layer, tables[:, :11], lens, **options).states

    config = config_of("triton", ragged=False)
    assert jax.eval_shape(states, q).plan.block_k == config.block_k


FIXED = replace(PREFILL, fixed_split_size=512)
NOT_USED = {
    "another device": (dict(device="NVIDIA H100 80GB HBM3"), {}),
    "fewer SMs": ({}, dict(device=replace(HOPPER, num_sms=16))),
    "other sizes": ({}, dict(num_seqs=5)),
    "f32 queries": ({}, dict(dtype=jnp.dtype(jnp.float32))),
    "a fixed split size": (dict(sizes=tuning.sizes_of(FIXED)), dict(fixed_split_size=512)),
    "a config of its own": ({}, dict(config=config_of("triton", ragged=True, split=True))),
}


@needs_mosaic
def test_calls_of_a_narrow_v_take_no_config_and_warn_of_none(write, caplog):
    call = replace(PREFILL, num_kv_heads=32, head_dim=192, v_head_dim=128)
    before = chosen(call, "mosaic_sm90")
    write([entry(call, "mosaic_sm90"), entry(PREFILL, "mosaic_sm90")])
    assert chosen(call, "mosaic_sm90") == before and not caplog.records


@needs_triton
@pytest.mark.parametrize("name", NOT_USED)
def test_other_calls_do_not_take_the_config(write, name):
    of_entry, of_call = NOT_USED[name]
    call = replace(PREFILL, **of_call)
    before = chosen(call, "triton")
    write([entry(PREFILL, "triton") | of_entry])
    assert chosen(call, "triton") == before


# What the file has, the warning, and the family whose config it is.
WRONG = {
    "no JSON": ("{", "is not used: Expecting property name"),
    "no list": ("{}", "it must be a list of entries, not {}"),
    "deeply nested": ("[" * 200_000, "is not used: "),
    "no object": (["x"], "entry 0, 'x', is ignored: its fields must be config, config_class"),
    "a field more": ([entry(PREFILL, "triton") | {"dtype": "int8"}], "its fields must be config"),
    "a class of another library": (
        [entry(PREFILL, "triton") | {"config_class": "Config"}],
        "config_class='Config' must be one of DecodeConfig, RaggedConfig",
    ),
    "an unknown field": ([entry(PREFILL, "triton", block_m=64)], "argument 'block_m'"),
    "a value out of range": (
        [entry(PREFILL, "triton", num_warps=3)],
        "num_warps=3 must be a power of two in 1..16",
    ),
    "other names of sizes": (
        [entry(PREFILL, "triton") | {"sizes": {"rows": 4}}],
        "its sizes must be num_q_heads, num_kv_heads, head_dim, max_kv_len",
    ),
    "other devices": (
        [entry(PREFILL, "triton") | {"device": "TPU v7"}],
        "all entries are for other devices than 'a Hopper GPU'",
    ),
    "tiles that do not fit": (
        [entry(PREFILL, "triton", block_k=256, num_stages=8)],
        "triton may need 1056768 bytes of shared memory",
    ),
}


@needs_triton
@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_in_a_file_is_warned_of_once_and_the_heuristic_chooses(write, caplog, name):
    found, message = WRONG[name]
    before = chosen(PREFILL, "triton")
    write(found)
    assert [chosen(PREFILL, "triton") for _ in range(2)] == [before] * 2
    [warning] = (record.getMessage() for record in caplog.records)
    assert warning.startswith("PALLAS_PAGED_TUNING: /") and message in warning


@needs_triton
def test_a_missing_file_is_warned_of_once(caplog, monkeypatch, tmp_path):
    before = chosen(DECODE, "triton")
    monkeypatch.setenv("PALLAS_PAGED_TUNING", str(tmp_path / "none.json"))
    assert [chosen(DECODE, "triton") for _ in range(2)] == [before] * 2
    [warning] = (record.getMessage() for record in caplog.records)
    assert "none.json is not read: " in warning


@needs_mosaic
@pytest.mark.parametrize(
    ("call", "family", "config"),
    [
        (DECODE, "mosaic_sm80", dict(block_k=128, num_stages=8)),
        (PREFILL, "mosaic_sm90", dict(block_k=256, num_stages=8)),
        (replace(PREFILL, page_size=128), "mosaic_sm90", dict(block_k=192)),
    ],
    ids=["sm80 memory", "sm90 memory", "sm90 pages"],
)
def test_a_config_that_mosaic_refuses_is_ignored(write, caplog, call, family, config):
    before = chosen(call, family)
    write([entry(call, family, **config)])
    assert chosen(call, family) == before
    assert f"is ignored: {family} " in caplog.text


@needs_triton
def test_right_entries_of_a_file_with_wrong_ones_are_used(write, caplog):
    write([{}, entry(DECODE, "triton"), entry(PREFILL, "triton", num_warps=3)])
    assert chosen(DECODE, "triton") == config_of("triton", ragged=False)
    assert len(caplog.records) == 2


@needs_triton
@pytest.mark.parametrize("kernel", ["decode", *slow(["ragged"])])
def test_interpreted_kernels_run_with_the_config_and_give_the_same_results(write, kernel):
    function, call, case = CASES[kernel]
    arrays = case.make()
    sizes = SIZES | dict(num_tokens=len(arrays[0]), max_kv_len=13 * 8)
    call = replace(call, device=Device.here(), num_seqs=3, **sizes)
    write([entry(call, "triton")])
    config = config_of("triton", ragged=kernel == "ragged")

    def traced(**options):
        return trace(lambda q: function(q, *arrays[1:], **options), arrays[0])

    by_triton = dict(implementation="triton_interpret")
    assert traced(**by_triton) == traced(**by_triton, config=config)
    assert_close(with_lse(function, *arrays, **by_triton), arrays, case.tolerance)


def test_the_key_of_a_file_follows_from_its_contents(tmp_path, monkeypatch):
    monkeypatch.delenv("PALLAS_PAGED_TUNING", raising=False)
    keys = [tuning.tuning_key()]
    for name, text in (("a", "[]"), ("b", "[]"), ("c", "[{}]")):
        (tmp_path / name).write_text(text)
        monkeypatch.setenv("PALLAS_PAGED_TUNING", str(tmp_path / name))
        keys.append(tuning.tuning_key())
    assert keys[0] is None and keys[1] == keys[2] != keys[3]


def test_every_class_of_a_config_has_its_own_name():
    classes = {kind for family in FAMILIES.values() for kind in family.configs.values()}
    assert len({kind.__name__ for kind in classes}) == len(classes)


class OneFunction:
    """A function whose instances differ though their `repr` is the same."""

    one_device = False

    def __call__(self, x):
        return (2 * x,)

    def __repr__(self):
        return "OneFunction()"


def test_programs_with_another_file_have_another_name(write, monkeypatch):
    """JAX's compilation cache knows a program by its text, which may not show kernels."""
    rule = ShardingRule(names=("x",), inputs=(("n",),), outputs=(("n",),), shardable_axes=())
    names = []
    monkeypatch.delenv("PALLAS_PAGED_TUNING", raising=False)
    for _ in range(3):
        call = on_each_device(OneFunction(), rule, platform="cpu")
        names.append(re.search(r"attention_\w{12}", str(jax.make_jaxpr(call)(jnp.ones(3))))[0])
        if len(names) == 2:
            write([entry(DECODE, "triton")])
    assert names[0] == names[1] != names[2]
