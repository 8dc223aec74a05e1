"""A family of attention kernels: what it can do, and the functions that do it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from pallas_paged.kernels.call import Arrays, Call, Kernel
from pallas_paged.kernels.device import Device


class Family:
    """Kernels that share a compiler and a generation of GPUs.

    A reason, as the methods return it, follows the name of the family in an error. Importing a
    family imports no kernels: `bind` does.
    """

    name: ClassVar[str]  # as `implementation` names it
    # The type of the config of each kernel; empty if it has none.
    configs: ClassVar[Mapping[Kernel, type]] = {}
    reads_latents: ClassVar[bool] = False  # multi-head latent attention, which takes no config
    # Pairs of a head_dim of K and another one of V that its ragged kernel takes.
    v_head_dims: ClassVar[tuple[tuple[int, int], ...]] = ()

    def why_not(self, call: Call) -> str | None:
        """Return why the kernels can't do a call on its device, or None."""
        reason = None if call.interpret else self.why_not_device(call.device)
        if call.rope_dim and not self.reads_latents:
            reason = reason or "has no multi-head latent attention"
        if call.v_head_dim is not None:
            reason = reason or self._why_not_v_head_dim(call)
        return reason or self.why_not_jax() or self.why_not_call(call)

    def _why_not_v_head_dim(self, call: Call) -> str | None:
        given = (call.head_dim, call.v_head_dim)
        if call.kernel == "ragged" and given in self.v_head_dims:
            return None
        known = f", or the pairs {self.v_head_dims} in ragged calls" if self.v_head_dims else ""
        return f"needs K and V of one head_dim{known}, not {given}"

    def why_not_device(self, device: Device) -> str | None:
        """Return why the kernels can't run on a device, or None."""
        return None

    def why_not_jax(self) -> str | None:
        """Return why the kernels can't be built with this JAX, or None."""
        return None

    def why_not_call(self, call: Call) -> str | None:
        """Return why the kernels can't do a call on a device that they run on, or None."""
        return None

    def why_not_tuned(self, call: Call) -> str | None:
        """Return why the kernels can't do a call with a config from a file, or None."""
        return self.why_not(call)

    def why_no_gradient(self, arrays: Arrays) -> str | None:
        """Return why the kernels should not make the gradient of a call, or None."""
        return "has no gradient"

    def bind(self, call: Call) -> Callable[..., Any]:
        """Return the function of `Arrays` and `options` that does a call."""
        raise NotImplementedError

    def bind_states(
        self, call: Call, *, writes: bool
    ) -> tuple[Callable[..., Any], Callable[..., Any]] | None:
        """Return functions that make the partial states of a decode call and merge them, or None.

        With `writes` the kernel is to write the newest tokens as well.
        """
        return None

    def bind_decode(self, call: Call) -> Callable[..., Any]:
        """Return the function of a decode call of a family with partial states, as `bind` does."""
        bound: Any = self.bind_states(call, writes=False)
        states, merge = bound
        return functools.partial(_decode, states.func, merge, **states.keywords)

    def gradients(self) -> Callable[..., Any]:
        """Return the function that makes gradients, see `backward.attention_gradient`."""
        raise NotImplementedError


def _decode(
    states: Callable[..., Any], merge: Callable[..., Any], arrays: Arrays, **how: Any
) -> Any:
    """Return `(out, lse)`, merged from states that are made with the keywords."""
    return merge(states(arrays, **how))
