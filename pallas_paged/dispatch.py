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

from pallas_paged.kernels import xla
from pallas_paged.kernels.call import Arrays, Call, Kernel
from pallas_paged.kernels.logits import LogitOptions
from pallas_paged.kernels.mosaic import implementation as mosaic
from pallas_paged.kernels.mosaic.config import prefer_mosaic
from pallas_paged.kernels.triton import implementation as triton

Implementation = Literal["triton", "triton_interpret", "mosaic_gpu", "mosaic_gpu_interpret", "xla"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend:
    """What runs under the name of an implementation.

    Attributes:
        configs: type of the config of each kernel; empty if it has none.
        why_not: returns why it can't do a call, to follow its name, or None.
        bind: returns the function that does a call which it can do.
    """

    configs: Mapping[Kernel, type]
    why_not: Callable[[Call], str | None]
    bind: Callable[[Call], Callable[..., Any]]


def _gpu_backends(name: str, family: Any) -> dict[str, Backend]:
    """Return a family of kernels as it runs on a GPU, and interpreted on any device."""
    return {
        name: Backend(
            configs=family.CONFIGS,
            why_not=family.why_not_here,
            bind=functools.partial(family.bind, interpret=False),
        ),
        f"{name}_interpret": Backend(
            configs=family.CONFIGS,
            why_not=family.why_not,
            bind=functools.partial(family.bind, interpret=True),
        ),
    }


def _bind_xla(call: Call) -> Callable[..., Any]:
    return xla.paged_decode if call.kernel == "decode" else xla.ragged_paged_attention


BACKENDS = {
    **_gpu_backends("triton", triton),
    **_gpu_backends("mosaic_gpu", mosaic),
    "xla": Backend(configs={}, why_not=lambda call: None, bind=_bind_xla),
}


def attend(
    kernel: Kernel,
    arrays: Arrays,
    *,
    options: LogitOptions,
    implementation: Implementation | None,
    config: Any = None,
    fixed_split_size: int | None = None,
    with_lse: bool = True,
) -> tuple[jax.Array, Any]:
    """Return `(out, lse)` of a call with checked arguments.

    Lengths and offsets are clipped to their ranges here. Without `with_lse` some implementations
    return None in place of `lse`.

    Raises:
        ValueError: as `resolve`.
        NotImplementedError: as `resolve`.
    """
    call = Call.of(
        kernel,
        arrays,
        with_lse=with_lse,
        config=config,
        fixed_split_size=fixed_split_size,
    )
    run = resolve(call, implementation)
    # The kernels count in i32 whatever the integers of the caller are.
    with jax.enable_x64(False):
        arrays = dataclasses.replace(arrays, seq_lens=jnp.clip(arrays.seq_lens, 0, call.max_kv_len))
        if kernel == "ragged":
            cu_q_lens = rising_offsets(arrays.cu_q_lens, call.num_tokens)
            arrays = dataclasses.replace(arrays, cu_q_lens=cu_q_lens)
        return run(arrays, options=options)


def rising_offsets(offsets: jax.Array, count: int) -> jax.Array:
    """Return `offsets` i32`[n + 1]` as offsets into `[0, count]`: from 0, rising, clipped."""
    return jnp.clip(lax.cummax(offsets.at[0].set(0)), 0, count)


def resolve(call: Call, implementation: Implementation | None) -> Callable[..., Any]:
    """Return the function that does a call.

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
    backend = BACKENDS[implementation]
    reason = backend.why_not(call)
    if reason is not None:
        raise NotImplementedError(f"{implementation=} {reason}")
    return backend.bind(call)


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
    names: list[Implementation] = ["triton", "mosaic_gpu", "xla"]
    if call.config is not None:  # its type is the choice
        return "mosaic_gpu" if isinstance(call.config, mosaic.CONFIGS[call.kernel]) else "triton"
    if prefer_mosaic(call.kernel, **call.sizes):
        names = ["mosaic_gpu", "triton", "xla"]
    return next(name for name in names if BACKENDS[name].why_not(call) is None)


@functools.cache  # so that it is logged once
def _log(implementation: str, device_kind: str) -> None:
    logging.getLogger("pallas_paged").info("implementation=%r on %s", implementation, device_kind)
