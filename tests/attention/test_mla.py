"""`mla_attention` over pages of latents: its meaning, its rules, its gradient and its kernels."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_paged as pp
from pallas_paged.decoder.unmerged_attention import unmerged_attention
from pallas_paged.kernels.families import FAMILIES
from tests.support import raw
from tests.support.attention_calls import assert_close, assert_same_bits, mla
from tests.support.attention_cases import LatentCase, of_latents
from tests.support.devices import latent_implementations_here
from tests.support.marks import needs_mosaic, slow
from tests.support.page_layouts import call_in_layout
from tests.support.page_tables import write_kv
from tests.support.quantized_cases import Quantized

# Random combinations of options, dtypes and shapes are in test_combinations.py.
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", latent_implementations_here())
LATENT, ROPE = 32, 4
SCALE = 0.2
DECODE = LatentCase(head_dim=LATENT + ROPE, seq_lens=(37, 5, 0, 64))
RAGGED = replace(DECODE, q_lens=(9, 1, 0, 3), num_tokens=16)
CASES = pytest.mark.parametrize("case", [DECODE, RAGGED], ids=["decode", "ragged"])


def made(case, **how):
    return of_latents(case.make(**how), case.v_head_dim)


class Heads:
    """A model's heads, whose K and V are up-projections of latents, and a text of 11 tokens."""

    NUM, NOPE, VALUE, LENGTH, PAGE = 3, 16, 12, 11, 4
    SCALE = (NOPE + ROPE) ** -0.5

    def __init__(self):
        rng = np.random.default_rng(0)
        draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
        self.latents, self.k_pe = draw(self.LENGTH, LATENT), draw(self.LENGTH, ROPE)
        self.w_uk, self.w_uv = draw(self.NUM, self.NOPE, LATENT), draw(self.NUM, LATENT, self.VALUE)
        self.q_nope, self.q_pe = (draw(self.LENGTH, self.NUM, n) for n in (self.NOPE, ROPE))
        pool = pp.create_kv_pool(
            num_layers=1, num_pages=3, num_kv_heads=1, page_size=self.PAGE, dtype="float32",
            head_dim=LATENT + ROPE, v_head_dim=LATENT,
        )  # fmt: skip
        tokens = np.concatenate([self.latents, self.k_pe], axis=-1)[:, None]
        slots = np.arange(self.LENGTH, dtype=np.int32)
        self.layer = write_kv(pool.layers[0], tokens, None, slots)

    def of_heads(self, tokens):
        """(out [T, heads, VALUE], lse) of some tokens among themselves, by K and V of each head."""
        k = np.einsum("tl,hnl->htn", self.latents[tokens], self.w_uk)
        k_pe = np.tile(self.k_pe[tokens], (self.NUM, 1, 1))
        k = np.concatenate([k, k_pe], axis=-1)
        v = np.einsum("tl,hlv->htv", self.latents[tokens], self.w_uv)
        q = np.concatenate([self.q_nope, self.q_pe], axis=-1)[tokens].swapaxes(0, 1)
        logits = np.float64(q @ k.swapaxes(1, 2)) * self.SCALE
        logits = np.where(np.tri(logits.shape[1]) > 0, logits, -np.inf)
        lse = np.logaddexp.reduce(logits, axis=-1)
        out = np.exp(logits - lse[..., None]) @ v
        return np.float32(out.swapaxes(0, 1)), np.float32(lse.T)

    def prefilled(self, tokens):
        """The same by `mla_prefill`."""
        q = np.concatenate([self.q_nope, self.q_pe], axis=-1)[tokens]
        latents, ends = self.latents[tokens], np.int32([0, len(q)])
        k_nope = np.einsum("tl,hnl->thn", latents, self.w_uk)
        v = np.einsum("tl,hlv->thv", latents, self.w_uv)
        prefill = jax.jit(partial(pp.mla_prefill, return_lse=True))
        return prefill(q, k_nope, self.k_pe[tokens], v, ends)

    def of_latents(self, tokens, length, **options):
        """The same of tokens that see a text of a length, by absorbed queries."""
        absorbed = np.einsum("thn,hnl->thl", self.q_nope[tokens], self.w_uk)
        ends = np.int32([0, len(absorbed)])
        rows = np.int32([[0, 1, 2]]), np.int32([length]), ends
        attend = jax.jit(partial(pp.mla_attention, sm_scale=self.SCALE, return_lse=True, **options))
        out, lse = attend(absorbed, self.q_pe[tokens], self.layer, *rows)
        return np.einsum("thl,hlv->thv", out, self.w_uv), np.asarray(lse)


@pytest.mark.smoke
def test_absorbed_queries_equal_attention_over_keys_and_values_of_each_head():
    heads, tokens = Heads(), slice(None)
    found, expected = heads.of_latents(tokens, heads.LENGTH), heads.of_heads(tokens)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_older_tokens_by_latents_and_new_ones_by_heads_merge_into_all():
    """As docs/mla.md says of a chunk of a prompt: the new tokens are not absorbed."""
    heads, first = Heads(), 7
    new = slice(first, None)
    parts = heads.of_latents(new, first, causal=False), heads.prefilled(new)
    merged = jax.jit(pp.merge_attention_states)(*map(np.stack, zip(*parts, strict=True)))
    for a, b in zip(merged, heads.of_heads(slice(None)), strict=True):
        np.testing.assert_allclose(a, b[first:], rtol=1e-4, atol=1e-4)


@IMPLEMENTATIONS
@CASES
def test_memory_of_others_the_order_of_pages_and_repeats_change_no_bit(case, implementation):
    case = case.on(implementation)
    call = partial(mla, sm_scale=SCALE, implementation=implementation)
    first = call(*made(case))
    assert_close(first, made(case), case.tolerance, sm_scale=SCALE)
    for how in (dict(poison=False), dict(order=1), {}):
        assert_same_bits(call(*made(case, **how)), first)


@pytest.mark.parametrize("kv_dtype", ["float32", *slow(["int8"])])
@pytest.mark.parametrize("kv_layout", ["NHD", *slow(["HND", "HPND"])])
@CASES
def test_xla_reads_a_pool_once_and_makes_nothing_of_its_size(case, kv_layout, kv_dtype):
    case = replace(case, num_pages=4000)
    stored = (
        case.make() if kv_dtype == "float32" else Quantized(case=case, kv_dtype="int8").make()[0]
    )
    call = call_in_layout(kv_layout, of_latents(stored, LATENT))
    call["v_pages"] = np.zeros(LATENT)  # its size alone is used
    entry = partial(raw.mla_attention, kv_layout=kv_layout, implementation="xla", sm_scale=SCALE)
    lowered = jax.jit(entry).lower(**call)
    reads = [x for x in lowered.as_text().splitlines() if "stablehlo.gather" in x and "4000x" in x]
    assert len([x for x in reads if f"x{LATENT + ROPE}x" in x.partition("->")[0]]) == 1
    memory = lowered.compile().memory_analysis()
    assert memory.temp_size_in_bytes < call["k_pages"].nbytes // 4


# Of the kernels that there are; `FAMILIES` says which of them have latents.
INTERPRETED = [x for x in ("mosaic_sm90", "mosaic_sm80") if FAMILIES[x].reads_latents]


class TestGradient:
    """Of latents, which are K and V at once."""

    def test_equals_that_of_dense_attention(self):
        case = replace(RAGGED, seq_lens=(20, 9), q_lens=(5, 2), pages_per_seq=3, num_tokens=0)
        arrays = q, pages, _, tables, lens, offsets = made(case, poison=False)

        def dense(q, pages):
            outs = []
            for b, (length, begin, end) in enumerate(zip(lens, offsets, offsets[1:], strict=False)):
                k = pages[0, tables[b]].reshape(-1, LATENT + ROPE)[:length]
                logits = jnp.einsum("qhd,kd->hqk", q[begin:end], k, precision="highest") * SCALE
                seen = jnp.tri(end - begin, length, length - (end - begin), dtype=bool)
                weights = jax.nn.softmax(jnp.where(seen, logits, -jnp.inf), axis=-1)
                outs.append(jnp.einsum("hqk,kd->qhd", weights, k[:, :LATENT], precision="highest"))
            return jnp.sin(jnp.concatenate(outs)).sum()

        def paged(q, pages):
            out, _ = mla(q, pages, *arrays[2:], sm_scale=SCALE, implementation="xla")
            return jnp.sin(out).sum()

        found, expected = (jax.jit(jax.grad(f, (0, 1)))(q, pages) for f in (paged, dense))
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)

    @needs_mosaic
    @pytest.mark.parametrize("family", INTERPRETED)
    def test_is_refused_of_kernels_by_name(self, family):
        q, *rest = made(DECODE.on(family), poison=False)

        def loss(q):
            out, _ = mla(q, *rest, sm_scale=SCALE, implementation=f"{family}_interpret")
            return out.astype(jnp.float32).sum()

        with pytest.raises(NotImplementedError, match=r"no multi-head latent.*'xla' has it"):
            jax.eval_shape(jax.grad(loss), q)


def call_of(case):
    """The arguments of `mla_attention` by name, and those of its layer."""
    q, k_pages, _, tables, lens, *offsets = made(case, poison=False)
    call = dict(q_nope=q[..., :LATENT], q_pe=q[..., LATENT:], block_tables=tables, seq_lens=lens)
    layer = dict(k_pages=k_pages, v_head_dim=LATENT, kv_layout="HPND")
    return call | dict(zip(["cu_q_lens"], offsets, strict=False)) | dict(sm_scale=SCALE), layer


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sm_scale": None}, r"sm_scale must be given: it is that of the model's heads"),
        ({"sm_scale": "1"}, "sm_scale='1' must be a number"),
        ({"q_pe": None}, "^q_pe=None must be an array"),
        ({"q_nope": None}, "^q_nope=None must be an array"),
        ({"q_nope": np.zeros((4, LATENT), np.float32)}, r"q_nope.shape=\(4, 32\) must be \[[BT], "),
        ({"q_nope": np.zeros((4, 4, LATENT), np.int8)}, "q_nope.dtype=int8 must be float32"),
        ({"q_pe": np.zeros((4, 4, ROPE))}, r"q_pe float64\[4, 4, 4\] must have"),
        ({"q_pe": np.zeros((4, 4, ROPE), np.float16)}, r"q_pe float16\[4, 4, 4\] must have"),
        ({"q_pe": np.zeros((4, 3, ROPE), np.float32)}, r"q_pe float32\[4, 3, 4\] must have"),
        ({"q_pe": np.zeros((4, ROPE), np.float32)}, r"q_pe float32\[4, 4\] must have the tokens"),
        ({"v_head_dim": 28}, r"q_nope.shape=\(4, 4, 32\) and q_pe.* must end with v_head_dim=28 "
                             "and the other 8 of head_dim=36 of the pages"),
        ({"v_head_dim": 36}, "v_head_dim=36 must be less than head_dim=36 of the pages"),
        ({"v_head_dim": 0}, "v_head_dim=0 must be"),
        ({"v_head_dim": 32.5}, "v_head_dim=32.5 must be an integer"),
        ({"v_head_dim": None, "v_pages": "k_pages"}, r"reads a layer of latents: LayerKV\("),
        ({"v_pages": "k_pages"}, "v_pages must be None with v_head_dim=32"),
        ({"k_scales": np.float32(1)}, "must be None with pages of float32"),
        ({"v_scales": np.float32(1)}, "v_scales must be None with v_head_dim=32: k_scales"),
        ({"k_pages": np.zeros((3, 4, 8, 36), np.float32)}, "num_q_heads=4 must be a multiple of "),
        ({"k_pages": np.zeros((1, 4, 8, 36), np.int8)}, "^pages of int8 need k_scales$"),
        ({"k_pages": np.zeros((1, 4, 8, 36), np.float16)}, "k_pages.dtype=float16 must equal q.d"),
        ({"block_tables": np.zeros((3, 8), np.int32)}, r"block_tables.shape=\(3, 8\) must be \[B"),
        ({"seq_lens": np.zeros(4, np.int64)}, "seq_lens.dtype=int64 must be int32"),
        ({"sinks": np.zeros(3, np.float32)}, r"sinks float32\[3\] must be float32\[num_q_heads\]"),
    ],
)  # fmt: skip
@CASES
def test_bad_arguments_are_refused_by_name(case, changes, message):
    call, layer = call_of(replace(case, num_tokens=0, q_lens=case.q_lens and (1, 1, 0, 2)))
    for name, value in changes.items():
        value = layer["k_pages"] if isinstance(value, str) and value == "k_pages" else value
        (call if name in (*call, "sinks") else layer)[name] = value
    with pytest.raises(ValueError, match=message):
        pp.mla_attention(**call, layer=pp.LayerKV(**layer))


def test_batches_of_other_sizes_are_refused():
    call, layer = call_of(DECODE)
    call |= {name: call[name][:3] for name in ("q_nope", "q_pe")}
    with pytest.raises(ValueError, match=r"q_nope.shape=\(3, 4, 32\) and seq_lens.shape=\(4,\)"):
        pp.mla_attention(**call, layer=pp.LayerKV(**layer))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"config": pp.DecodeConfig(block_k=64, num_programs=6, num_warps=4, num_stages=2)},
         "'config', which it does not support"),
        ({"causal": False}, "'causal', which it does not support"),
        ({"softmax_scale": 1.0}, "did you mean 'sm_scale'"),
        ({"v_head_dim": 512}, "it belongs to the layer"),
    ],
    ids=lambda x: next(iter(x), None) if isinstance(x, dict) else "",
)  # fmt: skip
def test_options_that_it_does_not_have_are_refused(option, message):
    call, layer = call_of(DECODE)
    with pytest.raises(TypeError, match=message):
        pp.mla_attention(**call | option, layer=pp.LayerKV(**layer))


@pytest.mark.parametrize("family", [x for x in FAMILIES if not FAMILIES[x].reads_latents])
def test_a_family_without_latents_is_refused_by_name(family, any_jax):
    call, layer = call_of(DECODE)
    with pytest.raises(NotImplementedError, match=f"'{family}' has no multi-head latent attention"):
        pp.mla_attention(**call | raw.by(f"{family}_interpret"), layer=pp.LayerKV(**layer))


def test_other_entries_refuse_a_layer_of_latents():
    arrays, layer = call_of(RAGGED)
    layer, message = pp.LayerKV(**layer), "of latents, v_head_dim=32, is read by mla_attention"
    q = np.concatenate([arrays["q_nope"], arrays["q_pe"]], axis=-1)
    at = layer, arrays["block_tables"], arrays["seq_lens"]
    groups = np.int32([8]), np.int32([0, 4])
    qkv, slots = np.zeros((4, 1, 6, LATENT + ROPE), np.float32), np.zeros(4, np.int32)
    with pytest.raises(ValueError, match="v must be None with v_head_dim=32: V is a part of k"):
        pp.rotate_and_write_kv(layer, qkv, slots, **raw.by("triton_interpret"))
    for call in (
        lambda: unmerged_attention(q[:4], *at),
        lambda: pp.paged_attention(q[:4], *at),
        lambda: pp.ragged_paged_attention(q, *at, arrays["cu_q_lens"]),
        lambda: pp.cascade_attention(q[:4], *at, *groups),
    ):
        with pytest.raises(ValueError, match=message):
            call()
