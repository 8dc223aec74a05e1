"""Which implementation runs a call of attention."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_paged.attention.gradient import with_gradient
from pallas_paged.attention.options import Implementation, StaticOptions
from pallas_paged.attention.partition import Axes, ShardingRule, explicit_mesh, on_explicit_mesh
from pallas_paged.attention.tuning import tuned
from pallas_paged.checks import default_promotion
from pallas_paged.kernels import xla
from pallas_paged.kernels.call import Arrays, Call, Kernel
from pallas_paged.kernels.decode_states import DecodeStates
from pallas_paged.kernels.device import Device
from pallas_paged.kernels.families import FAMILIES
from pallas_paged.kernels.mosaic_sm80.heuristics import prefer_decode
from pallas_paged.kernels.mosaic_sm90.config import prefer_ragged
from pallas_paged.kernels.write_arrays import WriteArrays
from pallas_paged.pages.layout import AXIS_NAMES, LAYOUTS, KVLayout

# Axes with one name belong together, and XLA replicates the others. The pages have a head_dim of
# their own: they may not be moved, even where queries and results may. That of V may be smaller.
_AXES: dict[str, Axes] = {
    "q": ("num_seqs", "num_q_heads", "head_dim"),
    "q_pe": ("num_seqs", "num_q_heads", "rope_dim"),
    "k_pages": (),  # these four depend on the layout of the pages
    "v_pages": (),
    "block_tables": ("num_seqs", "pages_per_seq"),
    "seq_lens": ("num_seqs",),
    "cu_q_lens": ("num_offsets",),
    "q_positions": ("num_tokens",),
    "alibi_slopes": ("num_q_heads",),
    "sinks": ("num_q_heads",),
    "tree_mask": ("num_seqs", "tree_queries", "tree_keys"),
    "k_scales": (),
    "v_scales": (),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalCall:
    """Attention on the arrays of one device, which choose the implementation and the config there.

    The fields without a comment are as in `attend`, `Call` and `Arrays`.
    """

    kernel: Kernel
    how: StaticOptions
    device: Device
    with_lse: bool
    names: tuple[str, ...]  # the fields of `Arrays` that it takes, in order
    kv_layout: KVLayout

    @property
    def one_device(self) -> bool:
        # Mosaic's interpreter calls back into Python.
        return self.how.interpret and self.how.implementation != "triton"

    def gradient_families(self, arrays: Arrays) -> tuple[str, ...]:
        """Return the families whose kernels may make gradients of the call, the first best."""
        named, call = self.how.implementation, self.describe(arrays)
        sm90, triton = FAMILIES["mosaic_sm90"], FAMILIES["triton"]
        is_hopper = self.how.interpret or sm90.why_not_device(self.device) is None
        found = [sm90] if is_hopper and named in (None, sm90.name) else []
        if triton.why_not(call) is None:
            found.append(triton)
        return tuple(family.name for family in found)

    def describe(self, arrays: Arrays) -> Call:
        """Return the description of the call with these arrays."""
        return _call(self.kernel, arrays, self.how, self.device, with_lse=self.with_lse)

    def __call__(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        """Return `(out, lse)`, or `(out,)` without `with_lse`."""
        fields: dict[str, Any] = dict(zip(self.names, arrays, strict=True))
        # XLA's partitioner calls it in a thread of its own, which has no settings of the caller's.
        with default_promotion(), jax.enable_x64(False):
            given = Arrays(**fields, kv_layout=self.kv_layout)
            run = resolve(self.describe(given), self.how.implementation)
            out, lse = run(given, options=self.how.logits)
        return (out, lse) if self.with_lse else (out,)


def _call(
    kernel: Kernel, arrays: Arrays, how: StaticOptions, device: Device, *, with_lse: bool = True
) -> Call:
    return Call.of(
        kernel,
        arrays,
        device=device,
        with_lse=with_lse,
        interpret=how.interpret,
        config=how.config,
        fixed_split_size=how.fixed_split_size,
        expected_seqs=how.expected_seqs,
    )


@functools.cache
def _sharding_rule(
    kernel: Kernel, kv_layout: KVLayout, names: tuple[str, ...], scalars: bool, with_lse: bool
) -> ShardingRule:
    layout = LAYOUTS[kv_layout]
    pages, scales = (tuple(AXIS_NAMES[x] for x in y) for y in (layout.axes, layout.scale_axes))
    axes = _AXES | {"k_pages": pages, "v_pages": (*pages[:-1], "v_head_dim")}
    if not scalars:
        axes |= {"k_scales": scales, "v_scales": scales}
    if kernel == "ragged":
        axes |= {name: ("num_tokens", *axes[name][1:]) for name in ("q", "q_pe")}
    # In ragged calls any sequence may own any token.
    rows = ("num_seqs",) if kernel == "decode" else ()
    return ShardingRule(
        names=names,
        inputs=tuple(axes[name] for name in names),
        outputs=((*axes["q"][:2], "out_head_dim"), axes["q"][:2])[: 1 + with_lse],
        shardable_axes=("num_kv_heads", "num_q_heads", *rows),
    )


def attend(
    kernel: Kernel, arrays: Arrays, how: StaticOptions, *, with_lse: bool = True
) -> tuple[jax.Array, Any]:
    """Return `(out, lse)` of a call with checked arguments.

    Lengths and offsets are clipped to their ranges here. Without `with_lse` some implementations
    return None in place of `lse`. On a mesh each device runs the call on its own heads.

    Raises:
        ValueError, NotImplementedError: as `choose`.
    """
    local = LocalCall(
        kernel=kernel,
        how=how,
        device=Device.here(),
        with_lse=with_lse,
        names=tuple(name for name in _AXES if getattr(arrays, name) is not None),
        kv_layout=arrays.kv_layout,
    )
    call = local.describe(arrays)
    chosen = choose(call, how.implementation)
    name = "paged_attention" if kernel == "decode" else "ragged_paged_attention"
    # The kernels count in i32 whatever the integers of the caller are.
    with jax.named_scope(name), jax.enable_x64(False):
        arrays = dataclasses.replace(arrays, seq_lens=jnp.clip(arrays.seq_lens, 0, call.max_kv_len))
        if kernel == "ragged":
            cu_q_lens = rising_offsets(arrays.cu_q_lens, call.num_tokens)
            arrays = dataclasses.replace(arrays, cu_q_lens=cu_q_lens)
        scalars = arrays.k_scales is not None and not arrays.k_scales.ndim
        rule = _sharding_rule(kernel, arrays.kv_layout, local.names, scalars, with_lse)
        given = [getattr(arrays, name) for name in local.names]
        mesh = explicit_mesh(given)
        if chosen != "xla":
            out, *lse = with_gradient(local, rule, platform=local.device.platform)(*given)
        elif mesh is not None:
            out, *lse = on_explicit_mesh(mesh, local, rule, given)
        else:  # XLA partitions it
            out, *lse = local(*given)
    return out, lse[0] if lse else None


def decode_states(
    arrays: Arrays, how: StaticOptions, *, new: WriteArrays | None = None
) -> tuple[tuple[Any, ...], Callable[[DecodeStates], tuple[jax.Array, jax.Array]]] | None:
    """Return the partial states of a call of checked arrays of one device, and their merge.

    They have no gradient. With `new`, the newest tokens of the sequences, the kernel writes these
    as well, and the pages of K and V are behind the states. None if the implementation can't do it.

    Raises:
        ValueError, NotImplementedError: as `choose`.
    """
    call = _call("decode", arrays, how, Device.here())
    family = FAMILIES.get(choose(call, how.implementation))
    if family is None:
        return None
    bound = family.bind_states(tuned(call, family), writes=new is not None)
    if bound is None:
        return None
    states, merge = bound
    with jax.enable_x64(False):
        arrays = dataclasses.replace(arrays, seq_lens=jnp.clip(arrays.seq_lens, 0, call.max_kv_len))
        if new is None:
            return (states(arrays, options=how.logits),), merge
        return states(arrays, options=how.logits, new=new), merge


def rising_offsets(offsets: jax.Array, count: int) -> jax.Array:
    """Return `offsets` i32`[n + 1]` as offsets into `[0, count]`: from 0, rising, clipped."""
    return jnp.clip(lax.cummax(offsets.at[0].set(0)), 0, count)


def resolve(call: Call, implementation: Implementation | None) -> Callable[..., Any]:
    """Return the function that does a call, or raise as `choose`."""
    family = FAMILIES.get(choose(call, implementation))
    if family is not None:
        return family.bind(tuned(call, family))
    return xla.paged_decode if call.kernel == "decode" else xla.ragged_paged_attention


def choose(call: Call, implementation: Implementation | None) -> Implementation:
    """Return the implementation of a call: the one that is named, or the best for None.

    Raises:
        ValueError: it takes no config of this type.
        NotImplementedError: the implementation can't do the call; the message says why.
    """
    _check_config(call, implementation)
    if not isinstance(call.num_seqs, int):  # a symbolic size of jax.export
        if implementation in (None, "xla"):
            return "xla"
        raise NotImplementedError(
            f"{implementation=} needs sizes that are numbers, not num_seqs={call.num_seqs}"
        )
    if implementation is None:
        implementation = best_implementation(call)
        _log(implementation, call.device)
    if implementation == "xla":
        return implementation
    reason = FAMILIES[implementation].why_not(call)
    if reason is not None:
        raise NotImplementedError(f"{implementation=} {reason}")
    return implementation


def _check_config(call: Call, implementation: Implementation | None) -> None:
    if call.config is None:
        return
    if call.fixed_split_size is not None:
        raise ValueError(
            f"fixed_split_size={call.fixed_split_size} chooses a config itself: set the "
            f"fixed_split_size of config={call.config} instead"
        )
    # xla has no configs and ignores any given one, so a model tuned for a GPU also runs on a CPU.
    named = [FAMILIES[implementation]] if implementation in FAMILIES else FAMILIES.values()
    types = tuple(dict.fromkeys(family.configs[call.kernel] for family in named))
    if call.rope_dim:
        raise ValueError(f"config={call.config!r} must be None with pages of latents")
    if not isinstance(call.config, types):
        allowed = " or ".join(t.__name__ for t in types)
        place = "" if implementation is None else f" for {implementation=}"
        raise ValueError(f"config={call.config!r} must be a {allowed}{place}")


def best_implementation(call: Call) -> Implementation:
    """Return what `implementation=None` means: the fastest that can do the call on its device."""
    if call.device.platform != "gpu":
        return "xla"
    names: list[Implementation] = ["triton", "mosaic_sm90", "mosaic_sm80"]
    if call.config is not None:  # its type is the choice
        kind = type(call.config)
        return next(name for name in names[::-1] if FAMILIES[name].configs[call.kernel] is kind)
    prefer_mosaic = prefer_decode if call.kernel == "decode" else prefer_ragged
    if call.rope_dim or prefer_mosaic(call.for_heuristics):
        names = ["mosaic_sm90", "triton", "mosaic_sm80"]
    return next((name for name in names if FAMILIES[name].why_not(call) is None), "xla")


@functools.cache  # so that each is logged once
def _log(implementation: str, device: Device) -> None:
    logger = logging.getLogger("pallas_paged")
    logger.info("implementation=%r on %s", implementation, device.kind)
    reason = FAMILIES["mosaic_sm90"].why_not_jax() if device.is_hopper else None
    if reason is not None:
        logger.warning(
            "no kernel for Hopper runs on this %s: that %s. JAX 0.11 needs Python 3.12.",
            device.kind,
            reason,
        )
