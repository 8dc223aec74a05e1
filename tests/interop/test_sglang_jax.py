"""sglang-jax's reference against the function that takes the place of its kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.attention_oracle import relative_error
from tests.support.rpa_cases import RpaCase

theirs = pytest.importorskip(
    "sgl_jax.srt.kernels.ragged_paged_attention.ragged_paged_attention_v3", exc_type=ImportError
)

from pallas_paged.interop import sglang_jax as ours  # noqa: E402

CASE = RpaCase(head_dim=128, padding=0, dead_rows=0)
SINKS = np.float32([0.5, -1.0, 2.0, 0.0])
OPTIONS = {
    "plain": {},
    "window": dict(sliding_window=9),
    "off": dict(sliding_window=0, soft_cap=0),
    "cap": dict(soft_cap=2.0),
    "sinks": dict(attention_sink=SINKS),
}


@pytest.mark.parametrize("traced_scale", [False, True])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_equals_the_reference(options, traced_scale):
    arrays = CASE.make()
    lens, page_size = arrays["kv_lens"], CASE.page_size
    table = arrays["page_indices"].reshape(len(lens), -1)
    counts = -(-lens // page_size)
    ragged = np.concatenate([row[:count] for row, count in zip(table, counts, strict=True)])
    starts = np.int32([0, *np.cumsum(counts * page_size)])
    scale = jnp.float32(0.1) if traced_scale else 0.1
    out, cache = jax.jit(
        lambda x: ours.ragged_paged_attention(
            *(x[name] for name in ("queries", "keys", "values")),
            x["kv_cache"].reshape(*x["kv_cache"].shape[:2], 2, 2, 128),
            x["kv_lens"],
            jnp.pad(ragged, (0, 7)),
            x["cu_q_lens"],
            starts,
            x["distribution"],
            sm_scale=scale,
            max_pages_per_seq=4,
            **options,
        )
    )(arrays)
    cache = np.asarray(cache).reshape(arrays["kv_cache"].shape)
    meant = theirs.ref_ragged_paged_attention(
        arrays["queries"],
        *(jnp.asarray(cache[:, :, i::2]) for i in (0, 1)),
        lens,
        jnp.asarray(np.clip(table, 0, len(cache) - 1)),
        arrays["cu_q_lens"],
        arrays["distribution"][2:],
        sm_scale=0.1,
        **{name: value if np.ndim(value) or value else None for name, value in options.items()},
    )
    assert relative_error(out, np.float64(meant)) < 1e-5


def test_install_replaces_the_kernel_of_the_backend(monkeypatch):
    from sgl_jax.srt.layers.attention import flashattention_backend as backend

    monkeypatch.setattr(backend, "ragged_paged_attention_v3", None)
    ours.install(max_pages_per_seq=4)
    assert backend.ragged_paged_attention_v3.func is ours.ragged_paged_attention
