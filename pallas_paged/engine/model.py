"""What a model is to the engine: two functions of its weights, and the sizes of its cache."""

from __future__ import annotations

from typing import Any, Protocol

import jax
from jax.typing import ArrayLike

from pallas_paged.engine.device.kv_cache import KVCacheSpec
from pallas_paged.pages.layer import LayerKV


class Attend(Protocol):
    """Attention of one layer over the paged cache; the engine passes it to the model."""

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        cache: LayerKV,
        *,
        sliding_window: int | None = None,
        sm_scale: float | None = None,
        soft_cap: float | None = None,
        alibi_slopes: ArrayLike | None = None,
        sinks: ArrayLike | None = None,
    ) -> tuple[jax.Array, LayerKV]:
        """Write the new K and V to their pages, then attend causally.

        Args:
            q: `[T, Hq, D]`, queries of the new tokens, with positions already applied.
            k: `[T, Hkv, D]`, their keys.
            v: `[T, Hkv, D]`, their values.
            cache: pages of this layer.
            sliding_window, sm_scale, soft_cap, alibi_slopes, sinks: as in `paged_attention`.

        Returns:
            The output `[T, Hq, D]`, and the layer with the new K and V.
        """

    def fused(
        self,
        qkv: jax.Array,
        cache: LayerKV,
        *,
        rotation: tuple[jax.Array, jax.Array] | None = None,
        q_norm: jax.Array | None = None,
        k_norm: jax.Array | None = None,
        eps: float = 1e-6,
        sliding_window: int | None = None,
        sm_scale: float | None = None,
        soft_cap: float | None = None,
        alibi_slopes: ArrayLike | None = None,
        sinks: ArrayLike | None = None,
        unmerged: bool = False,
    ) -> tuple[Any, LayerKV]:
        """Do the same from the product with a fused weight, with fewer kernels.

        What stands between the product and attention is one: the norms and the rotation of q and k,
        and the write.

        Args:
            qkv: `[T, Hkv, G + 2, D]`, of each KV head its G queries, its K and its V.
            cache: pages of this layer.
            rotation, q_norm, k_norm, eps: as in `rotate_and_write_kv`.
            sliding_window, sm_scale, soft_cap, alibi_slopes, sinks: as in `paged_attention`.
            unmerged: return in place of the output of one row, where its kernel has partial
                states, an `UnmergedAttention`, which `between_attentions` takes.

        Returns:
            The output `[T, Hkv * G, D]`, and the layer with the new K and V.
        """

    def row_linear(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        """Return `x @ weight.T` of which each device has a part of the columns of both.

        On one device it is the product. On several GPUs a kernel adds up the parts, where XLA would
        ask NCCL, which is slower in a decode step. Such sums must depend on one another, as those
        of layers do that follow one another: two of them must not run at the same time.

        Args:
            x: `[T, K]`, K cut over the axis "tensor".
            weight: `[N, K]`, likewise.

        Returns:
            `[T, N]`, whole on every device.
        """

    def row_linear_norm(
        self, x: jax.Array, weight: jax.Array, residual: jax.Array, norm: jax.Array, eps: float
    ) -> tuple[jax.Array, jax.Array]:
        """Return `residual + row_linear(x, weight)`, and its RMS norm, by the same kernel.

        Args:
            x, weight: as in `row_linear`.
            residual: `[T, N]`.
            norm: `[N]`, the weight of the norm.
            eps: of the norm.
        """

    def embed(self, token_ids: jax.Array, table: jax.Array) -> jax.Array:
        """Return the rows `[T, E]` of a table `[V, E]`, V cut over the axis "tensor".

        As in `row_linear`, a kernel adds up, and the result is whole on every device.
        """


class Model(Protocol):
    """A causal language model without its weights.

    It must be hashable, and equal to a model that computes the same: engines with equal models
    share compiled steps. Weights come with every call, so that new ones need no compilation.

    For several devices a model may have `param_specs(params)`, a function that returns a
    PartitionSpec over the axis "tensor" for each leaf, in the structure of the parameters. Without
    it, parameters that are on the devices of the replica stay as they are cut, and others are
    copied to each device.

    Attributes:
        vocab_size: number of token ids.
        max_model_len: tokens of the longest sequence that the model is made for.
        eos_token_ids: tokens that end a sequence.
        kv_cache_spec: what the model stores for each token.
    """

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    @property
    def kv_cache_spec(self) -> KVCacheSpec: ...
    def __hash__(self) -> int: ...

    def __call__(
        self,
        params: Any,
        tokens: jax.Array,
        positions: jax.Array,
        attend: Attend,
        cache: tuple[LayerKV, ...],
    ) -> tuple[jax.Array, tuple[LayerKV, ...]]:
        """Compute the hidden states of new tokens.

        Args:
            params: pytree of arrays.
            tokens: `i32[T]`, new tokens of all sequences, one after another.
            positions: `i32[T]`, place of each in its own sequence.
            attend: attention of a layer, to be called once for each.
            cache: one entry for each layer.

        Returns:
            Hidden states `[T, E]`, and the cache as `attend` returned it.
        """

    def logits(self, params: Any, hidden: jax.Array) -> jax.Array:
        """Map hidden states `[..., E]` to scores of the next token, `f32[..., vocab_size]`."""
