"""The implementation of a call by device, shape, config and JAX, and the reasons of refusals."""

import itertools
import logging
import sys
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from pallas_paged.attention import dispatch
from pallas_paged.attention.dispatch import LocalCall
from pallas_paged.attention.options import StaticOptions
from pallas_paged.kernels.call import Arrays, Call
from pallas_paged.kernels.families import FAMILIES
from pallas_paged.kernels.logits import LogitOptions
from pallas_paged.kernels.mosaic import support as mosaic_support
from pallas_paged.kernels.mosaic_sm90 import support as sm90_support
from tests.support import implementations, raw
from tests.support.attention_cases import Case
from tests.support.attention_configs import config_of
from tests.support.devices import A100, CPU, HOPPER, lower_for_cuda
from tests.support.marks import needs_mosaic, needs_triton
from tests.support.placement import named
from tests.support.static_calls import DECODE, PREFILL

FUNCTIONS = [(raw.paged_attention, Case()), (raw.ragged_paged_attention, Case(q_lens=(4, 1, 2)))]
BOTH_FUNCTIONS = pytest.mark.parametrize(("function", "case"), FUNCTIONS, ids=["decode", "ragged"])
BOTH = pytest.mark.parametrize("call", [PREFILL, DECODE], ids=["ragged", "decode"])
CONFIGS = {
    family: {
        kernel: config_of(family, ragged=kernel == "ragged") for kernel in ("decode", "ragged")
    }
    for family in ("triton", "mosaic_sm90", "mosaic_sm80")
}
SM90, SM80 = CONFIGS["mosaic_sm90"], CONFIGS["mosaic_sm80"]
F32 = {"dtype": jnp.dtype(jnp.float32)}
F16_PAGES, INT8, FP8 = ({"kv_dtype": jnp.dtype(x)} for x in ("float16", "int8", "float8_e4m3fn"))


def gpu(compute_capability, kind="NVIDIA A100"):
    return {"device": replace(A100, compute_capability=compute_capability, kind=kind)}


@pytest.fixture
def jax_without_triton(monkeypatch):
    for module in ("decode", "ragged"):
        monkeypatch.setitem(sys.modules, f"pallas_paged.kernels.triton.{module}", None)
        monkeypatch.delattr(f"pallas_paged.kernels.triton.{module}", raising=False)


@needs_triton
@pytest.mark.parametrize(
    ("call", "changes", "chosen"),
    [
        (PREFILL, {}, "mosaic_sm90"),
        (PREFILL, {"num_tokens": 60}, "triton"),
        (PREFILL, {"num_tokens": 60, "expected_seqs": 3}, "mosaic_sm90"),  # one row has none
        (PREFILL, {"num_tokens": 60, "expected_seqs": 5}, "triton"),
        (PREFILL, F32, "triton"),
        (PREFILL, {"head_dim": 80}, "triton"),
        (PREFILL, {"page_size": 4}, "triton"),
        (PREFILL, {"device": A100}, "triton"),
        (PREFILL, {"device": CPU}, "xla"),
        (DECODE, {}, "mosaic_sm90"),
        (DECODE, {"num_seqs": 500, "max_kv_len": 1024}, "triton"),
        (DECODE, {"device": A100}, "triton"),
        (DECODE, {"device": A100} | FP8, "mosaic_sm80"),  # Triton converts no fp8 there
        (DECODE, {"device": CPU}, "xla"),
    ],
    ids=lambda x: x.kernel if isinstance(x, Call) else str(x),
)
def test_none_chooses_the_best_for_the_call(any_jax, call, changes, chosen):
    assert dispatch.best_implementation(replace(call, **changes)) == chosen


@pytest.mark.parametrize("head_dim", [36, 64, 80, 96, 112, 128, 192, 256, 320, 512])
@BOTH
def test_without_triton_kernels_do_all_that_hopper_can(any_jax, jax_without_triton, call, head_dim):
    dtypes, kv_dtypes = ("bfloat16", "float16", "float32"), ("", "int8", "float8_e4m3fn")
    num_tokens, groups = (60, 4096), (1, 8, 40, 130)
    page_sizes = [1 << i for i in range(9)]
    for dtype, kv_dtype, page_size, group, tokens in itertools.product(
        dtypes, kv_dtypes, page_sizes, groups, num_tokens
    ):
        if dtype == "float32" or head_dim == 36:  # the matrix unit has TF32, which is not f32
            expected = "xla"
        elif call is DECODE or (head_dim in (64, 128, 256) and page_size >= 8):
            expected = "mosaic_sm90"
        else:
            expected = "mosaic_sm80"
        sizes = dict(head_dim=head_dim, num_q_heads=2 * group, num_kv_heads=2, num_tokens=tokens)
        dtypes_of_call = dict(dtype=jnp.dtype(dtype), kv_dtype=jnp.dtype(kv_dtype or dtype))
        given = replace(call, **sizes, **dtypes_of_call, page_size=page_size)
        assert dispatch.best_implementation(given) == expected, given


@BOTH
@pytest.mark.parametrize("capability", ["8.0", "8.6", "8.9", "12.0", None])
def test_none_without_triton_takes_a_kernel_for_all_that_fits_on_other_gpus(
    any_jax, jax_without_triton, call, capability
):
    call, small_memory = replace(call, **gpu(capability), page_size=1), ("8.6", "8.9", "12.0")
    head_dims = (36, 64, 80, 96, 112, 128, 192, 256, 512)
    for head_dim, kv_dtype, group in itertools.product(head_dims, ("bfloat16", "int8"), (1, 8, 40)):
        too_large = capability in small_memory and call.kernel == "ragged" and head_dim == 512
        expected = "xla" if head_dim == 36 or too_large else "mosaic_sm80"
        heads = dict(head_dim=head_dim, num_q_heads=2 * group, num_kv_heads=2)
        given = replace(call, **heads, kv_dtype=jnp.dtype(kv_dtype))
        assert dispatch.best_implementation(given) == expected, given


@needs_triton
def test_none_works_without_the_mosaic_lowering(monkeypatch):
    monkeypatch.setattr(mosaic_support, "why_not_jax", lambda: "is too old")
    assert dispatch.best_implementation(PREFILL) == "triton"


@BOTH
def test_a_fixed_split_size_makes_the_kernel_independent_of_the_batch(call):
    """Its config follows from the sizes, and so do the bits of a row."""
    batches = [
        replace(call, num_seqs=n, num_tokens=7 * n, max_kv_len=16 * n, expected_seqs=n)
        for n in (1, 3, 500)
    ]
    fixed = [replace(batch, fixed_split_size=64).sizes for batch in batches]
    assert fixed[0] == fixed[1] == fixed[2]
    assert batches[0].sizes != batches[1].sizes != batches[2].sizes


def test_no_more_rows_are_expected_than_there_are():
    more, fewer = (replace(PREFILL, expected_seqs=n) for n in (500, 3))
    assert more.sizes == PREFILL.sizes == fewer.sizes | {"expected_seqs": 4}


@BOTH
class TestConfig:
    @pytest.mark.parametrize("family", CONFIGS)
    def test_chooses_the_implementation_of_its_type(self, any_jax, call, family):
        call = replace(call, config=CONFIGS[family][call.kernel])
        family = "mosaic_sm80" if call.config == SM80["decode"] else family  # as on Hopper
        assert dispatch.best_implementation(call) == family
        elsewhere = replace(call, device=CPU)
        assert dispatch.best_implementation(elsewhere) == "xla"
        assert dispatch.resolve(elsewhere, None) is dispatch.resolve(elsewhere, "xla")

    def test_of_an_implementation_that_cannot_run_is_refused(self, any_jax, call):
        call = replace(call, device=A100, config=SM90[call.kernel])
        with pytest.raises(NotImplementedError, match="'mosaic_sm90' needs a Hopper GPU"):
            dispatch.resolve(call, None if call.kernel == "ragged" else "mosaic_sm90")

    @pytest.mark.parametrize("implementation", [None, *FAMILIES])
    def test_of_another_type_is_refused(self, any_jax, call, implementation):
        families = [implementation] if implementation else CONFIGS
        wanted = [CONFIGS[family][call.kernel] for family in families]
        names = " or ".join(dict.fromkeys(type(config).__name__ for config in wanted))
        for config in (config for pair in CONFIGS.values() for config in pair.values()):
            if config not in wanted:
                message = rf"config={type(config).__name__}\(.* must be a {names}"
                with pytest.raises(ValueError, match=message):
                    dispatch.resolve(replace(call, config=config), implementation)


SHARED_MEMORY = "Config.* needs {}[0-9]+ bytes of shared memory; a program has {}"


@pytest.mark.parametrize(
    ("implementation", "call", "changes", "reason"),
    [
        *(pytest.param("triton", *row, marks=needs_triton) for row in (
            (DECODE, {"head_dim": 67} | INT8, "an even head_dim with pages of int8, not 67"),
            (PREFILL, gpu("8.6") | FP8, "capability 8.9, not 8.6, with pages of float8_e4m3fn"),
            (DECODE, {"device": CPU}, "a GPU, but the platform is 'cpu': interpret=True runs"),
            (DECODE, {"head_dim": 512, "num_q_heads": 130, "num_kv_heads": 2},
             "262144 bytes of shared memory to decode 65 query heads .* has 232448"),
        )),
        ("mosaic_sm80", PREFILL, F32, "bfloat16 or float16, not float32"),
        ("mosaic_sm80", DECODE, F16_PAGES, "int8 or float8_e4m3fn, not of float16"),
        ("mosaic_sm80", DECODE, {"head_dim": 68}, "a multiple of 8 with pages of bf.*, not 68"),
        ("mosaic_sm80", DECODE, {"head_dim": 72} | FP8, "a multiple of 16 with pages of float8_"),
        ("mosaic_sm80", DECODE, {"device": CPU}, "a GPU, but the platform is 'cpu': interpret="),
        ("mosaic_sm80", DECODE, gpu("7.5"), "compute capability 8.0, not 7.5"),
        ("mosaic_sm80", DECODE, gpu("8.6") | {"config": replace(SM80["decode"], block_k=128)},
         SHARED_MEMORY.format(1, 101376)),
        ("mosaic_sm90", PREFILL, F32, "bfloat16 or float16, not float32"),
        ("mosaic_sm90", PREFILL, F16_PAGES, "pages of q's dtype bfloat16, not of float16"),
        ("mosaic_sm90", DECODE, {"head_dim": 68}, "a multiple of 8 with pages of bf.*, not 68"),
        ("mosaic_sm90", PREFILL, {"head_dim": 512}, r"a head_dim of \(64, 128, 256\), not 512"),
        ("mosaic_sm90", PREFILL, {"page_size": 4}, "a page_size of at least 8, not 4"),
        ("mosaic_sm90", PREFILL,
         {"config": replace(SM90["ragged"], block_k=192), "page_size": 128},
         "block_k=192 that is a multiple or a divisor of page_size=128"),
        ("mosaic_sm90", PREFILL,
         {"config": replace(SM90["ragged"], num_q_stages=2), "head_dim": 256},
         SHARED_MEMORY.format(2, 232448)),
        ("mosaic_sm90", PREFILL, {"device": A100}, "a Hopper GPU, but .*NVIDIA A100"),
        ("mosaic_sm90", PREFILL, {"device": CPU}, "a Hopper GPU, but .*'cpu'"),
    ],
    ids=lambda x: x.kernel if isinstance(x, Call) else x if isinstance(x, str) else "",
)  # fmt: skip
def test_calls_that_a_family_cannot_do_are_refused(any_jax, implementation, call, changes, reason):
    call = replace(call, **changes)
    with pytest.raises(NotImplementedError, match=rf"'{implementation}' .*{reason}"):
        dispatch.resolve(call, implementation)
    interpreted = FAMILIES[implementation].why_not(replace(call, interpret=True))
    of_the_device = ("device" in changes and "config" not in changes) or "to decode" in reason
    assert (interpreted is None) == of_the_device


def test_hopper_gpus_are_known_by_capability_or_name():
    def is_hopper(kind, capability=None):
        device = gpu(capability, kind=f"NVIDIA {kind}")["device"]
        return sm90_support.why_not_device(device) is None

    hopper = ["H200", "H100 80GB HBM3", "H20", "H800", "GH200 480GB"]
    others = ["A100", "B200", "GB200", "H2000", "L4"]
    assert [kind for kind in hopper + others if is_hopper(kind)] == hopper
    assert is_hopper("of tomorrow", "9.0") and not is_hopper("H200", "10.0")


def test_a_card_that_was_not_measured_reads_as_an_h100_for_each_sm():
    rates = {
        kind: replace(HOPPER, kind=f"NVIDIA {kind}", num_sms=num_sms).read_gbps
        for kind, num_sms in (("H200", 132), ("H100 80GB HBM3", 132), ("H800", 132), ("H20", 78))
    }
    assert rates["H200"] == 4400 and rates["H800"] == rates["H100 80GB HBM3"] == 2950
    assert rates["H20"] == pytest.approx(2950 * 78 / 132)


def test_mosaic_names_a_jax_that_is_too_old():
    reason = mosaic_support.why_not_jax()
    assert (reason is None) == (jax.__version_info__ >= (0, 11))
    assert reason is None or f"({jax.__version__}) lacks" in reason


@BOTH_FUNCTIONS
class TestNamed:
    def test_without_the_lowering_of_mosaic_is_refused(self, function, case, monkeypatch):
        monkeypatch.setitem(sys.modules, "jax.experimental.pallas.mosaic_gpu", None)
        monkeypatch.delattr("jax.experimental.pallas.mosaic_gpu", raising=False)
        with pytest.raises(NotImplementedError, match="needs the Mosaic GPU lowering of Pallas"):
            function(*case.make(), implementation="mosaic_sm90_interpret")

    def test_without_the_lowering_of_triton_is_refused(self, function, case, jax_without_triton):
        with pytest.raises(NotImplementedError, match="needs the Triton lowering of Pallas"):
            function(*case.make(), implementation="triton_interpret")

    @needs_triton
    @pytest.mark.parametrize(
        "name", ["triton_interpret", pytest.param("mosaic_sm90_interpret", marks=needs_mosaic)]
    )
    def test_has_the_gradient_of_triton_for_short_rows(self, function, case, name):
        q, *rest = case.on(name).make()

        def total(q):
            return function(q, *rest, implementation=name).sum()

        assert "attention_gradient_of_queries" in str(jax.make_jaxpr(jax.grad(total))(q))


@needs_triton
@pytest.mark.parametrize("interpret", [False, True])
@pytest.mark.parametrize("implementation", [None, *FAMILIES, "xla"])
def test_families_of_a_gradient_follow_from_device_and_name(any_jax, implementation, interpret):
    if interpret and implementation in (None, "xla"):
        pytest.skip("has no kernels to interpret")
    how = StaticOptions(
        logits=LogitOptions(sm_scale=1.0), implementation=implementation, interpret=interpret
    )
    arrays = Arrays(**{
        name: jnp.asarray(x)
        for name, x in named(raw.ragged_paged_attention, FUNCTIONS[1][1].make()).items()
    })  # fmt: skip
    static = dict(kernel="ragged", how=how, with_lse=True, names=(), kv_layout="HPND")
    on_hopper, on_ampere = (LocalCall(device=x, **static) for x in (HOPPER, A100))
    assert on_hopper.one_device == (interpret and implementation != "triton")
    by_sm90 = ("mosaic_sm90",) * (implementation in (None, "mosaic_sm90"))
    assert on_hopper.gradient_families(arrays) == (*by_sm90, "triton")
    assert on_ampere.gradient_families(arrays) == (*by_sm90 * interpret, "triton")


@needs_triton
@pytest.mark.parametrize("interpret", [False, True])
@BOTH
def test_kernels_are_interpreted_on_request(call, interpret):
    family, call = FAMILIES["triton"], replace(call, interpret=interpret)
    functions = [family.bind(call)]
    if call.kernel == "decode":
        functions += family.bind_states(call, writes=False)
    assert all(function.keywords["interpret"] is interpret for function in functions)


@needs_mosaic
@needs_triton  # which takes the other calls
@pytest.mark.parametrize(("head_dim", "return_lse"), [(32, False), (64, True)])
def test_none_lowers_the_calls_that_mosaic_supports_for_hopper(head_dim, return_lse):
    case = Case(head_dim=head_dim, dtype="bfloat16", q_lens=(64,) * 3, seq_lens=(64,) * 3)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in case.make()]
    attend = partial(raw.ragged_paged_attention, return_lse=return_lse)
    assert ("@mosaic_gpu" in lower_for_cuda(attend, *shapes).as_text()) == (head_dim == 64)


def test_the_choice_of_none_is_logged_once_for_each_kind_of_device(caplog):
    first, second = (replace(DECODE, **gpu("8.0", kind=kind)) for kind in ("GPU 1", "GPU 2"))
    with caplog.at_level(logging.INFO, logger="pallas_paged"):
        for _ in range(3):
            dispatch.resolve(first, None)
            dispatch.resolve(replace(second, device=replace(second.device, platform="cpu")), None)
            dispatch.resolve(first, "xla")  # no choice, so no record
    assert [record.getMessage() for record in caplog.records] == [
        f"implementation={dispatch.best_implementation(first)!r} on GPU 1",
        "implementation='xla' on GPU 2",
    ]


def test_the_table_of_the_docs_is_what_the_families_can_do():
    text = implementations.PAGE.read_text(encoding="utf-8")
    assert implementations.with_table(text) == text, "run python -m tests.support.implementations"


def test_a_hopper_gpu_without_mosaic_is_warned_of_once(caplog, monkeypatch):
    monkeypatch.setattr(mosaic_support, "why_not_jax", lambda: "needs JAX 0.11")
    call = replace(DECODE, device=replace(HOPPER, kind="a Hopper GPU of this test"))
    for _ in range(2):
        dispatch.resolve(call, None)
    [warning] = (x for x in caplog.records if x.levelno == logging.WARNING)
    assert "needs JAX 0.11. JAX 0.11 needs Python 3.12" in warning.getMessage()
