"""The implementations of attention: what each can do, and the functions that do it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_paged.kernels import xla
from pallas_paged.kernels.mosaic import config as mosaic_tuning
from pallas_paged.kernels.mosaic import support as mosaic_support
from pallas_paged.kernels.mosaic.config import MosaicDecodeConfig, MosaicRaggedConfig
from pallas_paged.kernels.triton import config as tuning
from pallas_paged.kernels.triton.config import DecodeConfig, RaggedConfig

# Without a GPU to ask, a wave this small still makes shares that span and that split rows.
_INTERPRETED_SMS = 4

Kernel = Literal["decode", "ragged"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """What the choice of an implementation and of a config depends on.

    Attributes:
      platform, kind: as JAX names them.
      num_sms: streaming multiprocessors, or as many as interpreted kernels take for granted.
      compute_capability: such as "9.0"; None where there is none or nobody knows.
    """

    platform: str
    kind: str
    num_sms: int
    compute_capability: str | None

    @classmethod
    def here(cls) -> Device:
        """The device that the trace is for."""
        device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
        if device is None:
            device = getattr(jax.config, "jax_default_device", None) or jax.local_devices()[0]
            if isinstance(device, str):
                device = jax.local_devices(backend=device)[0]
        # An abstract device calls it num_cores, a CUDA device core_count; others have neither.
        num_sms = getattr(device, "core_count", None) or getattr(device, "num_cores", None)
        return cls(
            platform=device.platform,
            kind=device.device_kind,
            num_sms=num_sms if device.platform == "gpu" and num_sms else _INTERPRETED_SMS,
            compute_capability=getattr(device, "compute_capability", None),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """What is static of a call.

    Attributes:
      kernel: which of the two is called.
      device: what for.
      dtype, kv_dtype: of the queries and of the pages.
      num_tokens: query tokens.
      num_seqs, num_q_heads, num_kv_heads, head_dim, page_size: as in the arrays' shapes.
      max_kv_len: tokens that a full row of the block table can hold.
      with_lse: whether the log-sum-exps are asked for.
      config: as given, if one was.
    """

    kernel: Kernel
    device: Device
    dtype: Any
    kv_dtype: Any
    num_tokens: int
    num_seqs: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    max_kv_len: int
    with_lse: bool
    config: Any

    @property
    def sizes(self) -> dict[str, int]:
        """What a config is chosen by."""
        sizes = {
            "num_q_heads": self.num_q_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_kv_len": self.max_kv_len,
            "num_seqs": self.num_seqs,
            "itemsize": self.kv_dtype.itemsize,
        }
        if self.kernel == "decode":
            return sizes | {"page_size": self.page_size}
        return sizes | {"num_tokens": self.num_tokens}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Implementation:
    """A way to attend.

    Attributes:
      configs: of which type the config of each kernel is; none if there is nothing to tell it.
      why_not: the reason that it can't do a call, or None. Follows the implementation's name.
      attend: the function that does a call which it can do.
    """

    configs: Mapping[Kernel, type]
    why_not: Callable[[Call], str | None]
    attend: Callable[[Call], Callable[..., Any]]


def _triton_missing(call: Call) -> str | None:
    try:
        from pallas_paged.kernels.triton import decode as triton_decode  # noqa: F401
        from pallas_paged.kernels.triton import ragged as triton_ragged  # noqa: F401
    except ImportError as e:
        return f"needs the Triton lowering of Pallas, which this JAX ({jax.__version__}) lacks: {e}"
    if call.kv_dtype.itemsize == 1 and call.head_dim % 2:
        return f"needs an even head_dim with pages of {call.kv_dtype.name}, not {call.head_dim}"
    return None


def _triton_missing_here(call: Call) -> str | None:
    device = call.device
    if device.platform != "gpu":
        return (
            f"needs a GPU, but the device is a {device.platform}; "
            "'triton_interpret' runs the same kernels there"
        )
    capability = device.compute_capability
    known = capability is not None and tuple(map(int, capability.split(".")))
    if known and known < (8, 9) and call.kv_dtype == jnp.float8_e4m3fn:  # has no such conversion
        return f"needs compute capability 8.9 with pages of float8_e4m3fn, not {capability}"
    return _triton_missing(call)


def _triton(call: Call, *, interpret: bool) -> Callable[..., Any]:
    from pallas_paged.kernels.triton import decode as triton_decode
    from pallas_paged.kernels.triton import ragged as triton_ragged

    device = call.device
    config = call.config or tuning.choose_config(
        call.kernel, device_kind=device.kind, num_sms=device.num_sms, **call.sizes
    )
    entry: Any = triton_ragged.ragged_paged_attention
    if call.kernel == "decode":
        entry = triton_decode.paged_decode
    return functools.partial(_kernel, entry, config=config, interpret=interpret)


def _mosaic_missing(call: Call) -> str | None:
    return mosaic_support.why_not_jax() or mosaic_support.why_not(
        call.kernel,
        dtype=call.dtype,
        kv_dtype=call.kv_dtype,
        num_q_heads=call.num_q_heads,
        num_kv_heads=call.num_kv_heads,
        head_dim=call.head_dim,
        page_size=call.page_size,
        config=call.config,
    )


def _mosaic_missing_here(call: Call) -> str | None:
    device = call.device
    return mosaic_support.why_not_device(
        platform=device.platform,
        device_kind=device.kind,
        compute_capability=device.compute_capability,
    ) or _mosaic_missing(call)


def _mosaic(call: Call, *, interpret: bool) -> Callable[..., Any]:
    from pallas_paged.kernels.mosaic import decode as mosaic_decode
    from pallas_paged.kernels.mosaic import ragged as mosaic_ragged

    device = call.device
    config = call.config or mosaic_tuning.choose_config(
        call.kernel, device_kind=device.kind, num_sms=device.num_sms, **call.sizes
    )
    if call.kernel == "decode":
        return functools.partial(
            _kernel, mosaic_decode.paged_decode, config=config, interpret=interpret
        )
    return functools.partial(
        _kernel,
        mosaic_ragged.ragged_paged_attention,
        config=config,
        interpret=interpret,
        with_lse=call.with_lse,
    )


def _kernel(entry: Callable[..., Any], *arrays: jax.Array | None, **static: Any) -> Any:
    return _jitted(entry, **static)(*arrays)


@functools.cache
def _jitted(entry: Callable[..., Any], **static: Any) -> Callable[..., Any]:
    """One function for all layers of a model, so that JAX traces and lowers its kernels once.

    It raises an error that says so if somebody differentiates it.
    """
    function: Any = jax.custom_vjp(functools.partial(entry, **static))

    def forward(*_):
        raise NotImplementedError(
            "the GPU kernels of attention have no gradient; implementation='xla' has one"
        )

    function.defvjp(forward, lambda *_: None)
    return jax.jit(function)


def _xla(call: Call) -> Callable[..., Any]:
    return xla.paged_decode if call.kernel == "decode" else xla.ragged_paged_attention


_TRITON_CONFIGS: dict[Kernel, type] = {"decode": DecodeConfig, "ragged": RaggedConfig}
_MOSAIC_CONFIGS: dict[Kernel, type] = {"decode": MosaicDecodeConfig, "ragged": MosaicRaggedConfig}

IMPLEMENTATIONS = {
    "triton": Implementation(
        configs=_TRITON_CONFIGS,
        why_not=_triton_missing_here,
        attend=functools.partial(_triton, interpret=False),
    ),
    "triton_interpret": Implementation(
        configs=_TRITON_CONFIGS,
        why_not=_triton_missing,
        attend=functools.partial(_triton, interpret=True),
    ),
    "mosaic_gpu": Implementation(
        configs=_MOSAIC_CONFIGS,
        why_not=_mosaic_missing_here,
        attend=functools.partial(_mosaic, interpret=False),
    ),
    "mosaic_gpu_interpret": Implementation(
        configs=_MOSAIC_CONFIGS,
        why_not=_mosaic_missing,
        attend=functools.partial(_mosaic, interpret=True),
    ),
    "xla": Implementation(configs={}, why_not=lambda call: None, attend=_xla),
}
