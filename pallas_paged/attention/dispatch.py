"""Which implementation runs a call of attention."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax

from pallas_paged.attention.gradient import with_gradient
from pallas_paged.attention.partition import Axes, ShardingRule, explicit_mesh, on_explicit_mesh
from pallas_paged.checks import default_promotion
from pallas_paged.kernels import xla
from pallas_paged.kernels.call import Arrays, Call, Device, Kernel
from pallas_paged.kernels.decode_states import DecodeStates
from pallas_paged.kernels.logits import LogitOptions
from pallas_paged.kernels.mosaic_sm80 import implementation as mosaic_sm80
from pallas_paged.kernels.mosaic_sm90 import implementation as mosaic
from pallas_paged.kernels.mosaic_sm90.config import prefer_mosaic
from pallas_paged.kernels.triton import implementation as triton
from pallas_paged.kernels.write_arrays import WriteArrays
from pallas_paged.pages.layout import AXIS_NAMES, LAYOUTS, KVLayout

Implementation = Literal[
    "triton",
    "triton_interpret",
    "mosaic_gpu",
    "mosaic_gpu_interpret",
    "mosaic_sm80",
    "mosaic_sm80_interpret",
    "xla",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend:
    """What runs under the name of an implementation.

    Attributes:
        configs: type of the config of each kernel; empty if it has none.
        why_not: returns why it can't do a call, to follow its name, or None.
        bind: returns the function that does a call which it can do.
        bind_states: returns the function that makes the `DecodeStates` of a call, and their merge;
            it or its result is None if it has none.
    """

    configs: Mapping[Kernel, type]
    why_not: Callable[[Call], str | None]
    bind: Callable[[Call], Callable[..., Any]]
    bind_states: Callable[..., tuple[Callable[..., Any], Callable[..., Any]] | None] | None = None


def _gpu_backends(name: str, family: Any) -> dict[str, Backend]:
    """Return a family of kernels as it runs on a GPU, and interpreted on any device."""
    return {
        name: Backend(
            configs=family.CONFIGS,
            why_not=family.why_not_here,
            bind=functools.partial(family.bind, interpret=False),
            bind_states=_bind_states(family, interpret=False),
        ),
        f"{name}_interpret": Backend(
            configs=family.CONFIGS,
            why_not=family.why_not,
            bind=functools.partial(family.bind, interpret=True),
            bind_states=_bind_states(family, interpret=True),
        ),
    }


def _bind_states(family: Any, *, interpret: bool) -> Callable[..., Any] | None:
    bind = getattr(family, "bind_states", None)
    return None if bind is None else functools.partial(bind, interpret=interpret)


def _bind_xla(call: Call) -> Callable[..., Any]:
    return xla.paged_decode if call.kernel == "decode" else xla.ragged_paged_attention


BACKENDS = {
    **_gpu_backends("triton", triton),
    **_gpu_backends("mosaic_gpu", mosaic),
    **_gpu_backends("mosaic_sm80", mosaic_sm80),
    "xla": Backend(configs={}, why_not=lambda call: None, bind=_bind_xla),
}


# Axes with one name belong together, and XLA makes those whole of which a device has no part. The
# pages have a head_dim of their own: they may not be moved, even where queries may.
_AXES: dict[str, Axes] = {
    "q": ("num_seqs", "num_q_heads", "head_dim"),
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

    Attributes:
        names: the fields of `Arrays` that it takes, in order.
        kv_layout: as in `Arrays`.
        Others: as in `attend` and `Call`.
    """

    kernel: Kernel
    implementation: Implementation | None
    device: Device
    options: LogitOptions
    config: Any
    fixed_split_size: int | None
    expected_seqs: int | None = None
    with_lse: bool
    names: tuple[str, ...]
    kv_layout: KVLayout

    @property
    def one_device(self) -> bool:
        # Mosaic's interpreter calls back into Python.
        return self.implementation in ("mosaic_gpu_interpret", "mosaic_sm80_interpret")

    @property
    def interpret(self) -> bool:
        """Whether kernels are interpreted."""
        return self.implementation is not None and self.implementation.endswith("_interpret")

    @property
    def may_be_mosaic(self) -> bool:
        """Whether the call may be one of the Mosaic kernels."""
        if self.interpret:
            return self.implementation == "mosaic_gpu_interpret"
        hopper = mosaic.support.why_not_device(self.device) is None
        return hopper and self.implementation in (None, "mosaic_gpu")

    def triton_makes_gradients(self, arrays: Arrays) -> bool:
        """Return whether the Triton kernels can make the gradients."""
        why_not = triton.why_not if self.interpret else triton.why_not_here
        return why_not(self.describe(arrays)) is None

    def describe(self, arrays: Arrays) -> Call:
        """Return the description of the call with these arrays."""
        return Call.of(
            self.kernel,
            arrays,
            device=self.device,
            with_lse=self.with_lse,
            config=self.config,
            fixed_split_size=self.fixed_split_size,
            expected_seqs=self.expected_seqs,
        )

    def __call__(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        """Return `(out, lse)`, or `(out,)` without `with_lse`."""
        fields: dict[str, Any] = dict(zip(self.names, arrays, strict=True))
        # XLA's partitioner calls it in a thread of its own, which has no settings of the caller's.
        with default_promotion(), jax.enable_x64(False):
            given = Arrays(**fields, kv_layout=self.kv_layout)
            run = resolve(self.describe(given), self.implementation)
            out, lse = run(given, options=self.options)
        return (out, lse) if self.with_lse else (out,)


@functools.cache
def _layout(
    kernel: Kernel, kv_layout: KVLayout, names: tuple[str, ...], scalars: bool, with_lse: bool
) -> ShardingRule:
    layout = LAYOUTS[kv_layout]
    pages, scales = (tuple(AXIS_NAMES[x] for x in y) for y in (layout.axes, layout.scale_axes))
    axes = _AXES | {"k_pages": pages, "v_pages": pages}
    if not scalars:
        axes |= {"k_scales": scales, "v_scales": scales}
    if kernel == "ragged":
        axes["q"] = ("num_tokens", *axes["q"][1:])
    # Of ragged calls any row may own any token.
    rows = ("num_seqs",) if kernel == "decode" else ()
    return ShardingRule(
        names=names,
        inputs=tuple(axes[name] for name in names),
        outputs=(axes["q"], axes["q"][:2])[: 1 + with_lse],
        shardable_axes=("num_kv_heads", "num_q_heads", *rows),
    )


def attend(
    kernel: Kernel,
    arrays: Arrays,
    *,
    options: LogitOptions,
    implementation: Implementation | None,
    config: Any = None,
    fixed_split_size: int | None = None,
    expected_seqs: int | None = None,
    with_lse: bool = True,
) -> tuple[jax.Array, Any]:
    """Return `(out, lse)` of a call with checked arguments.

    Lengths and offsets are clipped to their ranges here. Without `with_lse` some implementations
    return None in place of `lse`. On a mesh each device runs the call on its own heads.

    Raises:
        ValueError, NotImplementedError: as `choose`.
    """
    local = LocalCall(
        kernel=kernel,
        implementation=implementation,
        device=Device.here(),
        options=options,
        config=config,
        fixed_split_size=fixed_split_size,
        expected_seqs=expected_seqs,
        with_lse=with_lse,
        names=tuple(name for name in _AXES if getattr(arrays, name) is not None),
        kv_layout=arrays.kv_layout,
    )
    call = local.describe(arrays)
    chosen = choose(call, implementation)
    # The kernels count in i32 whatever the integers of the caller are.
    with jax.enable_x64(False):
        arrays = dataclasses.replace(arrays, seq_lens=jnp.clip(arrays.seq_lens, 0, call.max_kv_len))
        if kernel == "ragged":
            cu_q_lens = rising_offsets(arrays.cu_q_lens, call.num_tokens)
            arrays = dataclasses.replace(arrays, cu_q_lens=cu_q_lens)
        scalars = arrays.k_scales is not None and not arrays.k_scales.ndim
        layout = _layout(kernel, arrays.kv_layout, local.names, scalars, with_lse)
        given = [getattr(arrays, name) for name in local.names]
        mesh = explicit_mesh(given)
        if chosen != "xla":
            out, *lse = with_gradient(local, layout, platform=local.device.platform)(*given)
        elif mesh is not None:
            out, *lse = on_explicit_mesh(mesh, local, layout, given)
        else:  # XLA partitions it
            out, *lse = local(*given)
    return out, lse[0] if lse else None


def decode_states(
    arrays: Arrays,
    *,
    options: LogitOptions,
    implementation: Implementation | None,
    new: WriteArrays | None = None,
) -> tuple[tuple[Any, ...], Callable[[DecodeStates], tuple[jax.Array, jax.Array]]] | None:
    """Return the partial states of a call of checked arrays of one device, and their merge.

    They have no gradient.

    Args:
        arrays, options, implementation: as in `attend`.
        new: the newest tokens of the rows, if the kernel is to write them.

    Returns:
        The states, behind them the pages of K and V with `new`; and the merge. None if the
        implementation has no partial states or, with `new`, does not write.

    Raises:
        ValueError, NotImplementedError: as `choose`.
    """
    call = Call.of("decode", arrays, device=Device.here())
    bind_states = BACKENDS[choose(call, implementation)].bind_states
    bound = None if bind_states is None else bind_states(call, writes=new is not None)
    if bound is None:
        return None
    states, merge = bound
    with jax.enable_x64(False):
        arrays = dataclasses.replace(arrays, seq_lens=jnp.clip(arrays.seq_lens, 0, call.max_kv_len))
        if new is None:
            return (states(arrays, options=options),), merge
        return states(arrays, options=options, new=new), merge


def rising_offsets(offsets: jax.Array, count: int) -> jax.Array:
    """Return `offsets` i32`[n + 1]` as offsets into `[0, count]`: from 0, rising, clipped."""
    return jnp.clip(lax.cummax(offsets.at[0].set(0)), 0, count)


def resolve(call: Call, implementation: Implementation | None) -> Callable[..., Any]:
    """Return the function that does a call.

    Raises:
        ValueError, NotImplementedError: as `choose`.
    """
    return BACKENDS[choose(call, implementation)].bind(call)


def choose(call: Call, implementation: Implementation | None) -> Implementation:
    """Return the implementation of a call: the one that is named, or the best for None.

    Raises:
        ValueError: there is no such implementation, or it takes no config of this type.
        NotImplementedError: the implementation can't do the call; the message says why.
    """
    names = get_args(Implementation)
    named = isinstance(implementation, str) and implementation in names
    if implementation is not None and not named:
        raise ValueError(f"{implementation=} must be None or one of {names}")
    _check_config(call, implementation)
    if implementation is None:
        implementation = best_implementation(call)
        _log(implementation, call.device.kind)
    reason = BACKENDS[implementation].why_not(call)
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
    named = [] if implementation is None else [BACKENDS[implementation]]
    takers = [backend for backend in named if backend.configs] or BACKENDS.values()
    types = tuple(dict.fromkeys(b.configs[call.kernel] for b in takers if b.configs))
    if not isinstance(call.config, types):
        allowed = " or ".join(t.__name__ for t in types)
        place = "" if implementation is None else f" for {implementation=}"
        raise ValueError(f"config={call.config!r} must be a {allowed}{place}")


def best_implementation(call: Call) -> Implementation:
    """Return what `implementation=None` means: the fastest that can do the call on its device."""
    if call.device.platform != "gpu":
        return "xla"
    names: list[Implementation] = ["triton", "mosaic_gpu", "mosaic_sm80", "xla"]
    if call.config is not None:  # its type is the choice
        kind = type(call.config)
        return next(name for name in names if BACKENDS[name].configs.get(call.kernel) is kind)
    if prefer_mosaic(call.kernel, **call.sizes):
        names = ["mosaic_gpu", "triton", "mosaic_sm80", "xla"]
    return next(name for name in names if BACKENDS[name].why_not(call) is None)


@functools.cache  # so that it is logged once
def _log(implementation: str, device_kind: str) -> None:
    logging.getLogger("pallas_paged").info("implementation=%r on %s", implementation, device_kind)
