"""Small calls that run every kernel of every family, for tools that look at kernels.

Families are those that the library names, so a new one is in the list by itself. A family refuses
what it can't do with NotImplementedError when a call is traced.
"""

import dataclasses
import importlib
import re
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

import pallas_paged as pp
from pallas_paged.attention.options import Implementation
from pallas_paged.decoder.between_attentions import (
    BlockImplementation,
    BlockWeights,
    Residual,
    Routing,
    between_attentions,
)
from pallas_paged.decoder.latent_write import rotate_and_write_latents
from pallas_paged.decoder.rotary_write import WriteImplementation, rotate_and_write_kv
from pallas_paged.decoder.unmerged_attention import unmerged_attention, write_and_attend
from pallas_paged.engine.sampling.sampler import SamplingImplementation, sample
from pallas_paged.engine.sampling_params import SamplingMode
from pallas_paged.experts import ExpertsImplementation, fused_experts, grouped_matmul
from pallas_paged.kernels import xla
from pallas_paged.kernels.backward import attention_gradient
from pallas_paged.kernels.call import Arrays
from pallas_paged.kernels.logits import LogitOptions
from tests.support import experts_oracle, raw
from tests.support.attention_cases import Case, SharedPrefixes
from tests.support.block_weights import draw, routed_mlp, routed_weights, weights_of
from tests.support.placement import named
from tests.support.quantized_cases import Quantized
from tests.support.sampling_rows import metadata

DECODE = Case(
    num_q_heads=8, num_kv_heads=2, head_dim=128, page_size=16, seq_lens=(150, 0, 200, 1),
    pages_per_seq=16, dtype="bfloat16",
)  # fmt: skip
RAGGED = dataclasses.replace(DECODE, q_lens=(100, 0, 70, 1), num_tokens=175)
PREFIXES = SharedPrefixes(
    DECODE, (150, 140, 200, 160), prefix_lens=(128, 0), cu_group_sizes=(0, 3, 4)
)
ENTRIES: dict[str, tuple[Callable[..., Any], Case | SharedPrefixes]] = {
    "decode": (raw.paged_attention, DECODE),
    "ragged": (raw.ragged_paged_attention, RAGGED),
    "cascade": (raw.cascade_attention, PREFIXES),
}
# Rows of one-byte pages are converted before the ragged kernel, if tables are as wide.
WIDE_LENS = dict(seq_lens=(300, 0, 200, 1), q_lens=(300, 0, 200, 1))
WIDE = dataclasses.replace(RAGGED, **WIDE_LENS, num_tokens=1024, pages_per_seq=512)
# K of a head and its V, of DeepSeek's prompts.
SPLIT_DIMS = dataclasses.replace(RAGGED, num_kv_heads=8, head_dim=192)
# Of 512 elements, and 64 of a rotary key.
LATENTS = dict(num_kv_heads=1, head_dim=576)
KV_DTYPES = ("bfloat16", "int8", "float8_e4m3fn")
PER_HEAD = np.linspace(0.0, 1.0, 8, dtype=np.float32)
OPTIONS: dict[str, Any] = dict(
    sliding_window=90, soft_cap=30.0, alibi_slopes=PER_HEAD, sinks=PER_HEAD
)
OF_AMPERE = re.compile(r"decode |latents($| int8| float8)")
DIFFERENTIATED = ("q", "k_pages", "v_pages")
TREE_MASK = np.random.default_rng(7).random((4, 6, 6)) < 0.5


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class KernelCall:
    """A call of an implementation on small arrays."""

    family: str
    name: str
    function: Callable[..., Any]  # of the arrays and of `implementation`, which may be "xla"
    make: Callable[[], tuple[Any, ...]]
    tolerance: float = 0.02  # for the largest error, relative to the largest value of a result

    def __str__(self) -> str:
        return f"{self.family} {self.name}"

    def run(self, *arrays: Any) -> Any:
        """Return the results of the kernels."""
        return self.function(*arrays, implementation=self.family)

    def shapes(self) -> tuple[Any, ...]:
        """Return the shapes of the arrays."""
        return jax.eval_shape(lambda: jax.tree.map(jnp.asarray, self.make()))


def kernel_calls() -> list[KernelCall]:
    """Every kernel: of attention with all options at once, of its gradient, and the others."""
    found: list[KernelCall] = []

    def add(names: Any, name: str, function: Any, make: Any, **more: Any) -> None:
        for family in get_args(names):
            # Hopper has some kernels of mosaic_sm80: the same program is compiled once.
            is_twin = family == "mosaic_sm90" and OF_AMPERE.match(name)
            if family != "xla" and not is_twin:
                found.append(
                    KernelCall(family=family, name=name, function=function, make=make, **more)
                )

    for name, (function, case) in ENTRIES.items():
        for kv_dtype in KV_DTYPES:
            make = partial(_attention_arrays, function, case, kv_dtype)
            add(Implementation, f"{name} {kv_dtype}", partial(_attend, function), make)
        options = OPTIONS | ({"tree_mask": TREE_MASK} if name == "ragged" else {})
        make = partial(_attention_arrays, function, case, DECODE.dtype)
        add(Implementation, f"{name} with options", partial(_attend, function, **options), make)
    for name, case in {"latents": DECODE, "ragged latents": RAGGED}.items():
        case = dataclasses.replace(case, **LATENTS)
        add(Implementation, name, _attend_latents, case.make)
        for kv_dtype in KV_DTYPES[1:]:
            make = partial(_one_byte_latents, case, kv_dtype)
            add(Implementation, f"{name} {kv_dtype}", _attend_latents, make)
        # Some have the heads of a token in several programs.
        many = dataclasses.replace(case, num_q_heads=64)
        options = {k: np.resize(x, 64) if np.ndim(x) else x for k, x in OPTIONS.items()}
        if case.q_lens is not None:
            options |= {"tree_mask": TREE_MASK}
        add(Implementation, f"{name} with options", partial(_attend_latents, **options), many.make)
    ragged = raw.ragged_paged_attention
    for name, options in {"": {}, " with options": OPTIONS | {"tree_mask": TREE_MASK}}.items():
        function = partial(_attend_narrow_values, **options)
        add(Implementation, f"ragged 192 and 128{name}", function, SPLIT_DIMS.make)
    for kv_dtype in KV_DTYPES[1:]:
        make = partial(_attention_arrays, ragged, WIDE, kv_dtype)
        add(Literal["mosaic_sm90"], f"wide ragged {kv_dtype}", partial(_attend, ragged), make)
    add(Implementation, "gradient", _gradient, _gradient_arrays)
    for kv_dtype in KV_DTYPES:
        make = partial(_write_arrays, kv_dtype)
        add(WriteImplementation, f"rotary write {kv_dtype}", _rotate_and_write, make)
        make = partial(_latent_arrays, kv_dtype)
        add(WriteImplementation, f"latent write {kv_dtype}", _write_latents, make)
    add(SamplingImplementation, "sampling", _sample, _sampling_arrays, tolerance=0)
    for rows, name in {1: "between attentions", 12: "between attentions, 12 rows"}.items():
        make = partial(_block_arrays, rows)
        add(BlockImplementation, name, _between_attentions, make)
    for name in ("between", "experts"):
        make = partial(_states_arrays, has_experts=name == "experts")
        add(BlockImplementation, f"attention and {name}", _attention_and_between, make)
    add(ExpertsImplementation, "grouped matmul", grouped_matmul, _grouped_arrays)
    add(ExpertsImplementation, "gradient of grouped", _grouped_gradient, _grouped_arrays)
    for tokens in (12, 200):  # all through each expert, or sorted
        make = partial(_expert_arrays, tokens)
        add(ExpertsImplementation, f"fused experts, {tokens} tokens", _fused_experts, make)
    make = partial(decode_and_write_arrays, *DECODE.seq_lens, head_dim=DECODE.head_dim)
    add(Literal["triton"], "decode and write", _write_and_attend, make)
    return found


def _attend(function: Callable[..., Any], arrays: dict[str, Any], **options: Any) -> Any:
    return function(**arrays, return_lse=True, **options)


def _one_byte_latents(case: Case, kv_dtype: str) -> tuple[Any, ...]:
    (q, pages, _, *arrays, k_scales, _), _ = Quantized(case=case, kv_dtype=kv_dtype).make()
    return q, pages, k_scales, *arrays


def _attend_latents(
    q: Any, pages: Any, k_scales: Any, *arrays: Any, implementation: str, **options: Any
) -> Any:
    if pages.dtype.itemsize > 1:
        k_scales = None  # V of the case, which latents have in K
    layer = pp.LayerKV(pages, k_scales=k_scales, kv_layout="HPND", v_head_dim=512)
    how = dict(sm_scale=0.07, return_lse=True, **raw.by(implementation))
    return pp.mla_attention(q[..., :512], q[..., 512:], layer, *arrays, **how, **options)


def _attend_narrow_values(q: Any, k_pages: Any, v_pages: Any, *arrays: Any, **options: Any) -> Any:
    arrays = q, k_pages, v_pages[..., :128], *arrays
    return raw.ragged_paged_attention(*arrays, return_lse=True, **options)


def _attention_arrays(
    function: Callable[..., Any], case: Case | SharedPrefixes, kv_dtype: str
) -> tuple[dict[str, Any]]:
    if kv_dtype == DECODE.dtype:
        return (named(function, case.make()),)
    rest: tuple[Any, ...] = ()
    if isinstance(case, SharedPrefixes):  # groups of one row, which need not share pages
        case = dataclasses.replace(case.case, seq_lens=case.seq_lens)
        rest = np.full(4, 128, np.int32), np.arange(5, dtype=np.int32)
    (*arrays, k_scales, v_scales), _ = Quantized(case=case, kv_dtype=kv_dtype).make()
    scales = dict(k_scales=k_scales, v_scales=v_scales)
    return (named(function, (*arrays, *rest)) | scales,)


def _gradient(arrays: dict[str, Any], d_out: jax.Array, *, implementation: str) -> dict[str, Any]:
    given = Arrays(**{name: jnp.asarray(x) for name, x in arrays.items()})
    options = LogitOptions(sm_scale=0.125, sliding_window=90)

    def forward(differentiated: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        call = dataclasses.replace(given, **differentiated)
        return xla.ragged_paged_attention(call, options=options)

    exact = {name: getattr(given, name).astype(jnp.float32) for name in DIFFERENTIATED}
    (out, lse), of_xla = jax.vjp(forward, exact)
    if implementation == "xla":
        return of_xla((d_out.astype(jnp.float32), jnp.zeros_like(lse)))[0]
    try:
        backward = importlib.import_module(f"pallas_paged.kernels.{implementation}.backward")
    except ImportError as e:
        raise NotImplementedError(f"{implementation} has no gradient: {e}") from e
    kernels = partial(backward.gradients, options=options, interpret=False)
    names = DIFFERENTIATED
    return attention_gradient(given, out, lse, d_out, None, names=names, kernels=kernels)


def _gradient_arrays() -> tuple[Any, ...]:
    (arrays,) = _attention_arrays(*ENTRIES["ragged"], DECODE.dtype)
    d_out = np.random.default_rng(1).standard_normal(arrays["q"].shape)
    return arrays, d_out.astype(jnp.bfloat16)


def _rotate_and_write(
    layer: Any, qkv: Any, slots: Any, rotation: Any, norm: Any, **how: Any
) -> Any:
    return rotate_and_write_kv(
        layer, qkv, slots, rotation=rotation, q_norm=norm, k_norm=norm, **how
    )


def _write_arrays(kv_dtype: str) -> tuple[Any, ...]:
    num_tokens, head_dim, pages_shape = 37, 128, (2, 9, 16, 128)
    rng = np.random.default_rng(2)
    qkv = rng.standard_normal((num_tokens, 2, 6, head_dim)).astype(jnp.bfloat16)
    slots = rng.permutation(9 * 16)[:num_tokens].astype(np.int32)
    slots[::5] = -1  # dropped
    angles = rng.standard_normal((num_tokens, head_dim // 2)).astype(np.float32)
    pages = jnp.zeros(pages_shape, kv_dtype)
    scales = None if kv_dtype == "bfloat16" else jnp.zeros(pages_shape[:3])
    layer = pp.LayerKV(pages, pages, scales, scales, kv_layout="HPND")
    norm = rng.standard_normal(head_dim).astype(jnp.bfloat16)
    return layer, qkv, slots, (np.cos(angles), np.sin(angles)), norm


def _write_latents(
    layer: Any, latents: Any, slots: Any, rotation: Any, norm: Any, **how: Any
) -> Any:
    return rotate_and_write_latents(layer, latents, slots, rotation=rotation, norm=norm, **how)


def _latent_arrays(kv_dtype: str) -> tuple[Any, ...]:
    _, _, slots, *_ = _write_arrays(kv_dtype)
    rng = np.random.default_rng(3)
    latents = rng.standard_normal((len(slots), 576)).astype(jnp.bfloat16)
    angles = rng.standard_normal((len(slots), 32)).astype(np.float32)
    scales = None if kv_dtype == "bfloat16" else jnp.zeros((9, 16, 1))
    layer = pp.LayerKV(jnp.zeros((9, 16, 1, 576), kv_dtype), k_scales=scales, v_head_dim=512)
    norm = rng.standard_normal(512).astype(jnp.bfloat16)
    return layer, latents, slots, (np.cos(angles), np.sin(angles)), norm


def _sample(logits: Any, rows: Any, lens: Any, **how: Any) -> jax.Array:
    return sample(logits, rows, lens, SamplingMode(draws=True, filters=2), **how)


def _sampling_arrays() -> tuple[Any, ...]:
    logits = np.random.default_rng(3).standard_normal((3, 5003)).astype(np.float32)
    rows = metadata(3, top_k=50, top_p=0.9, min_p=0.01)
    return logits, rows, np.arange(3, dtype=np.int32)


def _between_attentions(
    attended: Any, x: Any, weights: BlockWeights, **how: Any
) -> tuple[jax.Array, jax.Array]:
    if weights.router is not None:
        limit = None if weights.gate_up_bias is None else 7.0
        routing = Routing(
            num_experts_per_tok=4, norm_topk_prob=True, scaling=1.0, swiglu_limit=limit
        )
        how |= dict(mlp=lambda normed: routed_mlp(normed, weights, routing), routing=routing)
    residual, out, _ = between_attentions(attended, Residual(x=x), weights, eps=1e-5, **how)
    return residual.x, out


def _block_arrays(num_rows: int) -> tuple[Any, ...]:
    size, attended = 512, 256 if num_rows == 1 else 512  # clusters of 4 programs need 512
    weights = BlockWeights(**weights_of(attended, size, 1024, 256))
    inputs = (draw(i, num_rows, n, scale=n**-0.5) for i, n in ((10, attended), (11, size)))
    return *inputs, weights


def _grouped_arrays() -> tuple[Any, ...]:
    draw = partial(experts_oracle.draw, dtype="bfloat16")
    return draw(1, 350, 128), draw(2, 6, 128, 192), np.array([3, 0, 2, 290, 0, 40], np.int32)


def _grouped_gradient(x: Any, w: Any, sizes: Any, *, implementation: Any) -> Any:
    def function(x: Any, w: Any) -> jax.Array:
        return grouped_matmul(x, w, sizes, implementation=implementation)

    return jax.grad(lambda *args: function(*args).astype(jnp.float32).sum(), (0, 1))(x, w)


def _fused_experts(*arrays: Any, implementation: str) -> jax.Array:
    biases = dict(zip(("gate_up_bias", "down_bias"), arrays[5:], strict=True))
    how: Any = dict(implementation=implementation, swiglu_limit=1.5)
    return fused_experts(*arrays[:5], **biases, **how)


def _expert_arrays(num_tokens: int) -> tuple[Any, ...]:
    draw = partial(experts_oracle.draw, dtype="bfloat16", scale=0.1)
    biases = draw(7, 16, 192, 2), draw(8, 16, 256)
    weights = draw(2, 16, 192, 2, 256), draw(3, 16, 256, 192)
    x = draw(1, num_tokens, 256)
    return x, *weights, *experts_oracle.routes(4, num_tokens, 16, 4), *biases


def _attention_and_between(
    arrays: dict[str, Any], x: Any, weights: BlockWeights, *, implementation: Any
) -> tuple[jax.Array, jax.Array]:
    layer = pp.LayerKV(arrays["k_pages"], arrays["v_pages"], kv_layout="HPND")
    q, *rows = (arrays[name] for name in ("q", "block_tables", "seq_lens"))
    options = raw.by(implementation) | {"sinks": arrays.get("sinks")}
    attended: Any = unmerged_attention(q, layer, *rows, **options)
    if attended is None:
        attended = raw.paged_attention(**arrays, implementation=implementation).reshape(1, -1)
    return _between_attentions(attended, x, weights, implementation=implementation)


def _states_arrays(*, has_experts: bool) -> tuple[Any, ...]:
    case = dataclasses.replace(DECODE, num_q_heads=2, num_kv_heads=1, seq_lens=(150,))
    attended, x, weights = _block_arrays(1)
    if has_experts:
        weights = routed_weights(attended.shape[1], x.shape[1], 256, 256, 128)
    return named(raw.paged_attention, case.make()), x, weights


def gpt_oss_layer() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """One row of a layer of gpt-oss-20b, and the shapes of its arrays."""

    def of(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    size = hidden = 2880
    num_experts, attended, out = 32, 4096, 5120
    weights: dict[str, Any] = dict(
        o=of(size, attended),
        o_bias=of(size),
        mlp_norm=of(size),
        router=of(num_experts, size),
        router_bias=of(num_experts),
        gate_up=of(num_experts, hidden, 2, size),
        gate_up_bias=of(num_experts, hidden, 2),
        down=of(num_experts, size, hidden),
        down_bias=of(num_experts, size),
        out_norm=of(size),
        qkv=of(out, size),
        qkv_bias=of(out),
    )
    arrays = dict(
        q=of(1, 64, 64),
        k_pages=of(8, 64, 16, 64),
        v_pages=of(8, 64, 16, 64),
        block_tables=of(1, 64, dtype=jnp.int32),
        seq_lens=of(1, dtype=jnp.int32),
        sinks=of(64, dtype=jnp.float32),
    )
    function = partial(_attention_and_between, implementation="mosaic_sm90")
    return function, (arrays, of(1, size), BlockWeights(**weights))


def _write_and_attend(
    layer: Any, qkv: Any, slots: Any, table: Any, lens: Any, rotation: Any, **how: Any
) -> Any:
    options = raw.by(how["implementation"])
    found = write_and_attend(qkv, layer, table, lens, slots, rotation=rotation, **options)
    if found is not None:
        return found[0].merged(), found[1]
    q, layer = rotate_and_write_kv(layer, qkv, slots, rotation=rotation, **how)
    out = pp.paged_attention(q, layer, table, lens, **options)
    return out.reshape(len(qkv), -1), layer


def decode_and_write_arrays(*seq_lens: int, head_dim: int = 64) -> tuple[Any, ...]:
    """Pages, the fused product of the newest tokens, their slots, tables, lengths, rotation."""
    rng, lens, page_size, pages_per_seq = np.random.default_rng(6), np.int32(seq_lens), 16, 13
    num_pages = len(lens) * pages_per_seq
    shape = 2, num_pages, page_size, head_dim
    k, v = (rng.standard_normal(shape).astype(jnp.bfloat16) for _ in range(2))
    table = rng.permutation(num_pages).reshape(-1, pages_per_seq).astype(np.int32)
    last = np.maximum(lens - 1, 0)
    slots = table[np.arange(len(lens)), last // page_size] * page_size + last % page_size
    slots = np.where(lens > 0, slots, -1).astype(np.int32)
    qkv = rng.standard_normal((len(lens), 2, 3 + 2, head_dim)).astype(jnp.bfloat16)
    angles = rng.uniform(0, 6, (len(lens), head_dim // 2)).astype(np.float32)
    layer = pp.LayerKV(k, v, kv_layout="HPND")
    return layer, qkv, slots, table, lens, (np.cos(angles), np.sin(angles))
