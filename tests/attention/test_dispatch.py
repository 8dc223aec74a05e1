"""The implementation of a call by device, shape, config and JAX, and the reasons of refusals."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import sys
from functools import partial

import jax
import jax.numpy as jnp
import pytest

import pallas_paged as pp
from pallas_paged import dispatch
from pallas_paged.dispatch import BACKENDS
from pallas_paged.kernels.call import Call, Device
from pallas_paged.kernels.mosaic import support as mosaic_support
from tests.support.attention_cases import Case
from tests.support.devices import A100, CPU, lower_for_cuda
from tests.support.marks import needs_triton
from tests.support.static_calls import DECODE, PREFILL

CALLS = [(pp.paged_attention, Case()), (pp.ragged_paged_attention, Case(q_lens=(4, 1, 2)))]
BOTH = pytest.mark.parametrize(("function", "case"), CALLS, ids=["decode", "ragged"])
CONFIGS = {
    ("triton", "decode"): pp.DecodeConfig(block_k=64, num_programs=8, num_warps=4, num_stages=2),
    ("triton", "ragged"): pp.RaggedConfig(
        block_q=64, block_k=64, num_programs=8, num_warps=4, num_stages=2
    ),
    ("mosaic_gpu", "decode"): pp.MosaicDecodeConfig(block_k=64, num_programs=8, num_stages=2),
    ("mosaic_gpu", "ragged"): pp.MosaicRaggedConfig(
        block_k=64, num_programs=8, num_consumers=2, num_stages=2
    ),
    ("mosaic_sm80", "decode"): pp.MosaicSm80DecodeConfig(block_k=64, num_programs=8, num_stages=2),
    ("mosaic_sm80", "ragged"): pp.MosaicSm80RaggedConfig(
        block_q=64, block_k=64, num_programs=8, num_warpgroups=1
    ),
}
FAMILIES = list(dict.fromkeys(family for family, _ in CONFIGS))
FP8 = {"kv_dtype": jnp.dtype(jnp.float8_e4m3fn)}


@pytest.fixture
def jax_without_triton(monkeypatch):
    for module in ("decode", "ragged"):
        monkeypatch.setitem(sys.modules, f"pallas_paged.kernels.triton.{module}", None)
        monkeypatch.delattr(f"pallas_paged.kernels.triton.{module}", raising=False)


@needs_triton
@pytest.mark.parametrize(
    ("call", "changes", "chosen"),
    [
        (PREFILL, {}, "mosaic_gpu"),
        (PREFILL, {"num_tokens": 60}, "triton"),
        (PREFILL, {"num_tokens": 60, "expected_seqs": 3}, "mosaic_gpu"),  # one row has none
        (PREFILL, {"num_tokens": 60, "expected_seqs": 5}, "triton"),
        (PREFILL, {"dtype": jnp.dtype(jnp.float32)}, "triton"),
        (PREFILL, {"head_dim": 80}, "triton"),
        (PREFILL, {"page_size": 4}, "triton"),
        (PREFILL, {"device": A100}, "triton"),
        (PREFILL, {"device": CPU}, "xla"),
        (DECODE, {"device": A100}, "triton"),
        (DECODE, {"device": A100} | FP8, "mosaic_sm80"),  # Triton converts no fp8 there
        (DECODE, {"device": CPU}, "xla"),
    ],
    ids=lambda x: x.kernel if isinstance(x, Call) else str(x),
)
def test_none_chooses_the_best_for_the_call(any_jax, call, changes, chosen):
    assert dispatch.best_implementation(dataclasses.replace(call, **changes)) == chosen


@needs_triton
@pytest.mark.parametrize("prefer", [False, True])
@pytest.mark.parametrize("call", [PREFILL, DECODE], ids=["ragged", "decode"])
def test_none_follows_the_preference_on_hopper(any_jax, monkeypatch, call, prefer):
    monkeypatch.setattr(dispatch, "prefer_mosaic", lambda *_, **__: prefer)
    assert dispatch.best_implementation(call) == ("mosaic_gpu" if prefer else "triton")


def test_none_works_without_the_triton_lowering(any_jax, jax_without_triton):
    slow = dataclasses.replace(PREFILL, num_tokens=60)
    assert dispatch.best_implementation(slow) == "mosaic_gpu"
    assert dispatch.best_implementation(dataclasses.replace(slow, head_dim=80)) == "mosaic_sm80"
    for call in (PREFILL, DECODE):
        elsewhere = dataclasses.replace(call, device=A100)
        assert dispatch.best_implementation(elsewhere) == "mosaic_sm80"
        odd = dataclasses.replace(elsewhere, head_dim=36)
        assert dispatch.best_implementation(odd) == "xla"


def _expected_on_hopper(kernel, head_dim, page_size):
    """What None takes for bf16 or f16 queries where JAX has no Triton lowering."""
    wgmma = (64, 128, 192, 256) if kernel == "decode" else (64, 128, 256)
    if head_dim in wgmma and (kernel == "decode" or page_size >= 8):
        return "mosaic_gpu"
    return "mosaic_sm80" if head_dim % 16 == 0 and head_dim <= 512 else "xla"


@pytest.mark.parametrize("head_dim", [36, 64, 80, 96, 112, 128, 192, 256, 320, 512])
@pytest.mark.parametrize("call", [PREFILL, DECODE], ids=["ragged", "decode"])
def test_none_without_triton_takes_a_kernel_for_all_that_hopper_can_do(
    any_jax, jax_without_triton, call, head_dim
):
    page_sizes = [1 << i for i in range(8)]
    kv_dtypes = ("", "int8", "float8_e4m3fn")
    groups = (1, 8, 40, 130)
    for page_size, kv_dtype, group in itertools.product(page_sizes, kv_dtypes, groups):
        for dtype in ("bfloat16", "float16", "float32"):
            given = dataclasses.replace(
                call,
                head_dim=head_dim,
                page_size=page_size,
                dtype=jnp.dtype(dtype),
                kv_dtype=jnp.dtype(kv_dtype or dtype),
                num_q_heads=2 * group,
                num_kv_heads=2,
            )
            expected = _expected_on_hopper(call.kernel, head_dim, page_size)
            # The matrix unit has TF32 only, which is not f32: XLA computes what was asked for.
            expected = "xla" if dtype == "float32" else expected
            assert dispatch.best_implementation(given) == expected


@needs_triton
def test_none_works_without_the_mosaic_lowering(monkeypatch):
    monkeypatch.setattr(mosaic_support, "why_not_jax", lambda: "is too old")
    assert dispatch.best_implementation(PREFILL) == "triton"


@pytest.mark.parametrize("call", [PREFILL, DECODE], ids=["ragged", "decode"])
def test_a_fixed_split_size_makes_the_kernel_independent_of_the_batch(call):
    """Its config follows from the sizes, and so do the bits of a row."""
    batches = [
        dict(num_seqs=n, num_tokens=7 * n, max_kv_len=16 * n, expected_seqs=n) for n in (1, 3, 500)
    ]
    sizes = [dataclasses.replace(call, **batch, fixed_split_size=64).sizes for batch in batches]
    assert sizes[0] == sizes[1] == sizes[2]
    others = [dataclasses.replace(call, **batch).sizes for batch in batches]
    assert others[0] != others[1] != others[2]


def test_no_more_rows_are_expected_than_there_are():
    more = dataclasses.replace(PREFILL, expected_seqs=500)
    fewer = dataclasses.replace(PREFILL, expected_seqs=3)
    assert more.sizes == PREFILL.sizes == fewer.sizes | {"expected_seqs": 4}


@needs_triton
def test_triton_needs_pairs_of_one_byte_elements_and_a_gpu_that_converts_fp8():
    call = dataclasses.replace(DECODE, device=A100, head_dim=66, kv_dtype=jnp.dtype(jnp.int8))
    why_not = BACKENDS["triton"].why_not
    assert why_not(call) is None
    assert "needs an even head_dim" in why_not(dataclasses.replace(call, head_dim=67))
    for capability, can in (("8.6", False), ("8.9", True), ("9.0", True), ("12.0", True)):
        device = dataclasses.replace(A100, compute_capability=capability)
        assert (why_not(dataclasses.replace(call, device=device, **FP8)) is None) == can


@pytest.mark.parametrize("call", [PREFILL, DECODE], ids=["ragged", "decode"])
class TestConfig:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_chooses_the_implementation_of_its_type(self, any_jax, call, family):
        call = dataclasses.replace(call, config=CONFIGS[family, call.kernel])
        assert dispatch.best_implementation(call) == family
        elsewhere = dataclasses.replace(call, device=CPU)
        assert dispatch.best_implementation(elsewhere) == "xla"
        assert dispatch.resolve(elsewhere, None) is dispatch.resolve(elsewhere, "xla")

    def test_of_an_implementation_that_cannot_run_is_refused(self, any_jax, call):
        config = CONFIGS["mosaic_gpu", call.kernel]
        call = dataclasses.replace(call, device=A100, config=config)
        with pytest.raises(NotImplementedError, match="'mosaic_gpu' needs a Hopper GPU"):
            dispatch.resolve(call, None)

    @pytest.mark.parametrize("implementation", [None, *BACKENDS])
    def test_of_another_type_is_refused(self, any_jax, call, implementation):
        family = (implementation or "").removesuffix("_interpret")
        families = [family] if family in FAMILIES else FAMILIES
        wanted = [CONFIGS[family, call.kernel] for family in families]
        names = " or ".join(type(config).__name__ for config in wanted)
        for config in CONFIGS.values():
            if config not in wanted:
                message = rf"config={type(config).__name__}\(.* must be a {names}"
                with pytest.raises(ValueError, match=message):
                    dispatch.resolve(dataclasses.replace(call, config=config), implementation)


class TestMosaicSm80Refuses:
    @pytest.mark.parametrize(
        ("call", "changes", "reason"),
        [
            (PREFILL, {"dtype": jnp.dtype(jnp.float32)}, "bfloat16 or float16, not float32"),
            (DECODE, {"kv_dtype": jnp.dtype(jnp.float16)}, "int8 or float8_e4m3fn, not of float16"),
            (DECODE, {"head_dim": 68}, "a multiple of 8 with pages of bfloat16, not 68"),
            (DECODE, {"head_dim": 72} | FP8, "a multiple of 16 with pages of float8_e4m3fn"),
            (DECODE, {"device": CPU}, "a GPU, but the device has the platform 'cpu'"),
            (DECODE, {"device": dataclasses.replace(A100, compute_capability="7.5")}, "not 7.5"),
            (
                DECODE,
                {"device": dataclasses.replace(A100, compute_capability="8.6")}
                | {"config": pp.MosaicSm80DecodeConfig(block_k=128, num_stages=2, num_programs=1)},
                "MosaicSm80DecodeConfig.* needs 1[0-9]+ bytes of shared .*; a program has 101376",
            ),
        ],
        ids=lambda x: x if isinstance(x, str) else "",
    )
    def test_with_the_reason(self, any_jax, call, changes, reason):
        with pytest.raises(NotImplementedError, match=rf"'mosaic_sm80' .*{reason}"):
            dispatch.resolve(dataclasses.replace(call, **changes), "mosaic_sm80")

    @pytest.mark.parametrize("capability", ["8.0", "8.6", "8.9", "9.0", "12.0", None])
    def test_no_shape_of_the_contract_with_enough_shared_memory(self, any_jax, capability):
        device = dataclasses.replace(A100, compute_capability=capability)
        for kernel_call, kv_dtype, head_dim, group in itertools.product(
            (DECODE, PREFILL),
            (jnp.bfloat16, jnp.int8),
            (64, 80, 96, 112, 128, 192, 256, 512),
            (1, 8, 40),
        ):
            call = dataclasses.replace(
                kernel_call,
                device=device,
                kv_dtype=jnp.dtype(kv_dtype),
                head_dim=head_dim,
                num_q_heads=2 * group,
                num_kv_heads=2,
                page_size=1,
            )
            small = capability in ("8.6", "8.9", "12.0")
            if small and kernel_call is PREFILL and head_dim == 512:
                assert "a program has 101376" in BACKENDS["mosaic_sm80"].why_not(call)
            else:
                assert BACKENDS["mosaic_sm80"].why_not(call) is None


class TestMosaicRefuses:
    @pytest.mark.parametrize(
        ("call", "changes", "reason"),
        [
            (PREFILL, {"dtype": jnp.dtype(jnp.float32)}, "bfloat16 or float16, not float32"),
            (
                DECODE,
                {"kv_dtype": jnp.dtype(jnp.float16)},
                "pages of q's dtype bfloat16, not of fl",
            ),
            (DECODE, {"head_dim": 96}, r"a head_dim of \(64, 128, 192, 256\), not 96"),
            (PREFILL, {"head_dim": 512}, r"a head_dim of \(64, 128, 256\), not 512"),
            (PREFILL, {"page_size": 4}, "a page_size of at least 8, not 4"),
            (
                DECODE,
                {"config": pp.MosaicDecodeConfig(block_k=192, num_stages=2, num_programs=1)}
                | {"page_size": 128},
                "block_k=192 that is a multiple or a divisor of page_size=128",
            ),
            (
                DECODE,
                {
                    "config": pp.MosaicDecodeConfig(
                        block_k=64, num_stages=2, num_programs=1, num_pairs=2
                    )
                },
                "num_pairs=2 with int8 and fp8 pages only",
            ),
            (
                DECODE,
                {"config": pp.MosaicDecodeConfig(block_k=128, num_stages=4, num_programs=1)},
                "MosaicDecodeConfig.* needs 2[0-9]+ bytes of shared memory; a program has 232448",
            ),
            (
                PREFILL,
                {"head_dim": 256}
                | {
                    "config": pp.MosaicRaggedConfig(
                        block_k=64, num_stages=2, num_programs=1, num_consumers=2, num_q_stages=2
                    )
                },
                "MosaicRaggedConfig.* needs 2[0-9]+ bytes of shared memory; a program has 232448",
            ),
            (PREFILL, {"device": A100}, "a Hopper GPU, but .*NVIDIA A100"),
            (PREFILL, {"device": CPU}, "a Hopper GPU, but .*'cpu'"),
        ],
        ids=lambda x: x if isinstance(x, str) else "",
    )
    def test_with_the_reason(self, any_jax, call, changes, reason):
        call = dataclasses.replace(call, **changes)
        assert BACKENDS["mosaic_gpu"].why_not(PREFILL) is None
        with pytest.raises(NotImplementedError, match=rf"'mosaic_gpu' .*{reason}"):
            dispatch.resolve(call, "mosaic_gpu")
        interpreted = BACKENDS["mosaic_gpu_interpret"].why_not(call)
        assert (interpreted is None) == ("device" in changes)

    @pytest.mark.parametrize(
        "changes",
        [
            {},
            {"dtype": jnp.dtype(jnp.float16), "kv_dtype": jnp.dtype(jnp.float16)},
            {"head_dim": 64, "page_size": 8},
            {"head_dim": 256, "page_size": 256},
            {"num_kv_heads": 32},
            {"num_q_heads": 7, "num_kv_heads": 1},
            {"num_q_heads": 130, "num_kv_heads": 1},
        ],
        ids=str,
    )
    def test_no_supported_call(self, any_jax, changes):
        for call in (PREFILL, DECODE):
            call = dataclasses.replace(call, **changes)
            assert BACKENDS["mosaic_gpu"].why_not(call) is None

    @pytest.mark.parametrize(
        ("kind", "capability", "hopper"),
        [
            *((f"NVIDIA {name}", None, True) for name in ("H200", "H100 80GB HBM3", "H20", "H800")),
            ("NVIDIA GH200 480GB", None, True),
            *((f"NVIDIA {name}", None, False) for name in ("A100", "B200", "GB200", "H2000", "L4")),
            ("NVIDIA of tomorrow", "9.0", True),
            ("NVIDIA H200", "10.0", False),
        ],
    )
    def test_gpus_other_than_hopper(self, kind, capability, hopper):
        device = Device(platform="gpu", kind=kind, num_sms=132, compute_capability=capability)
        assert (mosaic_support.why_not_device(device) is None) == hopper

    def test_a_jax_without_its_apis(self):
        reason = mosaic_support.why_not_jax()
        assert (reason is None) == (jax.__version_info__ >= (0, 11))
        assert reason is None or f"({jax.__version__}) lacks" in reason

    @BOTH
    def test_a_jax_without_the_lowering_without_an_import_error(self, function, case, monkeypatch):
        monkeypatch.setitem(sys.modules, "jax.experimental.pallas.mosaic_gpu", None)
        monkeypatch.delattr("jax.experimental.pallas.mosaic_gpu", raising=False)
        with pytest.raises(NotImplementedError, match="needs the Mosaic GPU lowering of Pallas"):
            function(*case.make(), implementation="mosaic_gpu_interpret")


@pytest.mark.skipif(mosaic_support.why_not_jax() is not None, reason="this JAX is too old")
class TestMosaicRuns:
    @needs_triton
    @BOTH
    def test_with_the_gradient_of_triton(self, function, case):
        q, *rest = case.on("mosaic_gpu").make()

        def total(q):
            return function(q, *rest, implementation="mosaic_gpu_interpret").sum()

        assert "attention_gradient_of_queries" in str(jax.make_jaxpr(jax.grad(total))(q))

    @needs_triton  # which has the others; without it those for Ampere have them
    @pytest.mark.parametrize(("head_dim", "return_lse"), [(32, False), (64, True)])
    def test_calls_that_it_supports_by_default(self, head_dim, return_lse):
        case = Case(head_dim=head_dim, dtype="bfloat16", q_lens=(64, 64, 64), seq_lens=(64, 64, 64))
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in case.make()]

        def attend(*arrays):
            return pp.ragged_paged_attention(*arrays, return_lse=return_lse)

        assert ("@mosaic_gpu" in lower_for_cuda(attend, *shapes).as_text()) == (head_dim == 64)


@pytest.mark.skipif(mosaic_support.why_not_jax() is not None, reason="this JAX is too old")
@BOTH
def test_none_lowers_any_head_dim_without_triton(jax_without_triton, function, case):
    case = dataclasses.replace(case, head_dim=80, page_size=1, dtype="bfloat16", pages_per_seq=64)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in case.make()]
    assert "@mosaic_gpu" in lower_for_cuda(function, *shapes).as_text()


@BOTH
class TestNamed:
    def test_unknown(self, function, case):
        with pytest.raises(ValueError, match="implementation='cuda' must be None or one of"):
            function(*case.make(), implementation="cuda")

    @pytest.mark.skipif(jax.default_backend() == "gpu", reason="they may run here")
    @pytest.mark.parametrize("implementation", ["triton", "mosaic_gpu"])
    def test_needs_a_gpu(self, any_jax, function, case, implementation):
        message = f"implementation='{implementation}' needs a .*GPU, but .*'cpu'"
        with pytest.raises(NotImplementedError, match=message):
            function(*case.make(), implementation=implementation)

    def test_a_jax_without_the_triton_lowering_gives_the_reason(
        self, function, case, jax_without_triton
    ):
        with pytest.raises(NotImplementedError, match="needs the Triton lowering of Pallas"):
            function(*case.make(), implementation="triton_interpret")


def test_the_choice_is_logged_once_for_each_implementation(caplog):
    dispatch._log.cache_clear()
    f32 = Case().make()
    with caplog.at_level(logging.INFO, logger="pallas_paged"):
        for _ in range(3):
            jax.eval_shape(pp.paged_attention, *f32)
            dispatch.resolve(dataclasses.replace(DECODE, device=A100), None)
        named = partial(pp.paged_attention, implementation="triton_interpret")
        jax.eval_shape(named, *f32)  # no choice, so no record
    chosen = "triton" if jax.default_backend() == "gpu" else "xla"
    assert [record.getMessage() for record in caplog.records] == [
        f"implementation={chosen!r} on {jax.devices()[0].device_kind}",
        "implementation='triton' on NVIDIA A100",
    ]
