"""What a model is to the engine: two functions of its weights, and the sizes of its cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
from jax.typing import ArrayLike, DTypeLike

from pallas_paged.checks import check_has, check_integer
from pallas_paged.decoder.peers import Peers
from pallas_paged.pages.layer import LayerKV


@dataclass(frozen=True, kw_only=True)
class KVCacheGroup:
    """Layers of a model that may share a page table.

    Attributes:
        layers: their indices, rising.
        sliding_window: tokens that the layer with the largest window sees; None if they see all.
    """

    layers: tuple[int, ...]
    sliding_window: int | None


@dataclass(frozen=True, kw_only=True)
class KVCacheSpec:
    """What a model stores for each token.

    Attributes:
        num_layers: layers with K and V.
        num_kv_heads: K/V heads of a layer.
        head_dim: elements of a head.
        v_head_dim: for multi-head latent attention: elements of a latent, which is V of all heads
            and the first part of `head_dim`; `num_kv_heads` is 1 then. None: K and V are apart.
        dtype: of K and V as the model computes them.
        window_num_kv_heads, window_head_dim: for layers with a window, where other layers see all
            tokens; None: as in the other layers.
        sliding_windows: for each layer, how many tokens a query sees, itself included; None for a
            layer without a window, or for all layers. The engine frees the pages left of the
            largest, see `groups`.
        k_scales, v_scales: for each layer, the scale of a checkpoint that was calibrated for fp8,
            or None. Latents have k_scales alone.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: DTypeLike
    v_head_dim: int | None = None
    window_num_kv_heads: int | None = None
    window_head_dim: int | None = None
    sliding_windows: tuple[int | None, ...] | None = None
    k_scales: tuple[float, ...] | None = None
    v_scales: tuple[float, ...] | None = None

    @property
    def sliding_window(self) -> int | None:
        """Tokens that the layer with the largest window sees; None if a layer sees all."""
        return self.groups[0].sliding_window

    @property
    def groups(self) -> tuple[KVCacheGroup, ...]:
        """All layers; or those that see all tokens, and those with a window.

        Layers of different windows are one group, whose pages the largest keeps.
        """
        windows = self.sliding_windows or (None,) * self.num_layers
        full = tuple(layer for layer, window in enumerate(windows) if window is None)
        limited = tuple(layer for layer, window in enumerate(windows) if window is not None)
        largest = max((window for window in windows if window is not None), default=None)
        groups = (full, None), (limited, largest)
        return tuple(
            KVCacheGroup(layers=layers, sliding_window=window)
            for layers, window in groups
            if layers
        )

    def of(self, group: KVCacheGroup) -> KVCacheSpec:
        """Return the spec of the layers of a group alone."""

        def pick(values: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
            return None if values is None else tuple(values[layer] for layer in group.layers)

        num_kv_heads, head_dim = self.num_kv_heads, self.head_dim
        if group.sliding_window is not None:
            num_kv_heads = self.window_num_kv_heads or num_kv_heads
            head_dim = self.window_head_dim or head_dim
        return replace(
            self,
            num_layers=len(group.layers),
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            window_num_kv_heads=None,
            window_head_dim=None,
            sliding_windows=pick(self.sliding_windows),
            k_scales=pick(self.k_scales),
            v_scales=pick(self.v_scales),
        )

    def on_devices(self, num_devices: int) -> KVCacheSpec:
        """Return the spec of a pool that is sharded over devices: each has as many heads.

        Where there are fewer heads than devices, the pool holds each head several times. A pool of
        latents is not sharded: every device holds all of it.

        Raises:
            ValueError: neither the heads nor the devices are a multiple of the other.
        """
        names = ("num_kv_heads", "window_num_kv_heads") if self.v_head_dim is None else ()
        for name in names:
            heads = getattr(self, name)
            if heads is not None and heads % num_devices and num_devices % heads:
                raise ValueError(
                    f"tensor_parallel_size={num_devices} must divide the model's "
                    f"{name}={heads}, or be a multiple of it"
                )
        return self._with_heads(lambda heads: max(heads, num_devices))

    def on_each(self, num_devices: int) -> KVCacheSpec:
        """Return the spec of the part of `on_devices` that each device holds."""
        return self._with_heads(lambda heads: max(1, heads // num_devices))

    def _with_heads(self, number_of: Callable[[int], int]) -> KVCacheSpec:
        """Return the spec with other numbers of heads; latents have none."""
        if self.v_head_dim is not None:
            return self
        window = self.window_num_kv_heads
        return replace(
            self,
            num_kv_heads=number_of(self.num_kv_heads),
            window_num_kv_heads=None if window is None else number_of(window),
        )


class Attend(Protocol):
    """Attention of one layer over the paged cache; the engine passes it to the model.

    Attributes:
        is_token: bool`[T]`, false for padding, whose results nothing uses. A mixture of experts
            reads fewer weights where padding has no expert.
    """

    is_token: jax.Array

    @property
    def peers(self) -> Peers | None:
        """The devices of the axis "tensor", for `between_attentions`; None: there is one."""

    @property
    def routed_experts(self) -> jax.Array | None:
        """Experts that tokens must use in place of the router's choice, or None.

        `i32[T, L, k]`, of the L layers with experts in their order; below 0: the router's own. The
        weights are those of the router at these experts. None if no request of the batch gives any.
        A model that does not read it can't score with given experts.
        """

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

        The norms and the rotation of q and k, and the write, are one kernel.

        Args:
            qkv: `[T, Hkv, G + 2, D]`, of each KV head its G queries, its K and its V.
            cache: pages of this layer.
            rotation, q_norm, k_norm, eps: as in `rotate_and_write_kv`.
            sliding_window, sm_scale, soft_cap, alibi_slopes, sinks: as in `paged_attention`.
            unmerged: for one row, return the partial states of its kernel, if there are any, as an
                `UnmergedAttention` for `between_attentions`, in place of the output.

        Returns:
            The output `[T, Hkv * G, D]`, and the layer with the new K and V.
        """

    def latent(
        self,
        q_nope: jax.Array,
        q_pe: jax.Array,
        latents: jax.Array,
        cache: LayerKV,
        *,
        rotation: tuple[jax.Array, jax.Array] | None = None,
        norm: jax.Array | None = None,
        eps: float = 1e-6,
        sm_scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        alibi_slopes: ArrayLike | None = None,
        sinks: ArrayLike | None = None,
    ) -> tuple[jax.Array, LayerKV]:
        """Write new latents to their pages, then attend with absorbed queries.

        For models whose `KVCacheSpec` has a `v_head_dim`.

        Args:
            q_nope: `[T, Hq, v_head_dim]`, as in `mla_attention`.
            q_pe: `[T, Hq, head_dim - v_head_dim]`, without rotation if there is one here.
            latents: `[T, head_dim]`, as in `rotate_and_write_latents`.
            cache: pages of this layer.
            rotation: of `q_pe` and of the keys of the latents, as there.
            norm, eps: as there.
            sm_scale, sliding_window, soft_cap, alibi_slopes, sinks: as in `mla_attention`.

        Returns:
            The output `[T, Hq, v_head_dim]`, and the layer with the new latents.
        """

    def record(self, experts: jax.Array) -> None:
        """Report the experts to which a layer routed the tokens, for requests that ask for them.

        To be called once by each layer with experts, in order, outside of loops and inner
        functions that JAX traces. It costs nothing where no request of the batch asks.

        Args:
            experts: `i32[T, k]`, of k for all layers; those of padding are not used.
        """

    def row_linear(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        """Return `x @ weight.T`, where each device has a shard of the columns of both.

        On one device it is the product. On several GPUs a kernel adds up the parts, where XLA would
        ask NCCL, which is slower in a decode step. Such sums must depend on one another, as those
        of layers do that follow one another: two of them must not run at the same time.

        Args:
            x: `[T, K]`, K sharded over the axis "tensor".
            weight: `[N, K]`, likewise.

        Returns:
            `[T, N]`, replicated.
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
        """Return the rows `[T, E]` of a table `[V, E]`, V sharded over the axis "tensor".

        As in `row_linear`, a kernel adds up, and the result is replicated.
        """


class Model(Protocol):
    """A causal language model without its weights.

    It must be hashable, and equal to a model that computes the same: engines with equal models
    share compiled steps. Weights come with every call, so that new ones need no compilation.

    For several devices a model may have `param_specs(params)`, a function that returns a
    PartitionSpec over the axis "tensor" for each leaf, in the structure of the parameters. Without
    it, parameters that are on the devices of the replica stay sharded as they are, and others are
    replicated.

    For fast starts a model may have `cache_key`, a string that changes with its code (`sources_key`
    of its package) and its sizes. Where JAX has a compilation cache, a later process with the same
    key then loads compiled steps and calls no method of the model.

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


_OF_MODEL = "vocab_size", "max_model_len", "eos_token_ids", "kv_cache_spec", "logits", "__call__"


def check_model(model: Any) -> None:
    """Raise ValueError if an object is not what `Model` describes."""
    check_has("model", model, *_OF_MODEL)
    try:
        hash(model)
    except TypeError as error:  # also of a field
        raise ValueError(f"{model=} must be hashable: {error}") from error
    if not isinstance(model.kv_cache_spec, KVCacheSpec):
        raise ValueError(f"{model.kv_cache_spec=} must be a KVCacheSpec")
    spec = model.kv_cache_spec
    for name in ("num_layers", "num_kv_heads", "head_dim"):
        check_integer(f"kv_cache_spec.{name}", getattr(spec, name), 1)
    for window in spec.sliding_windows or ():
        if window is not None:
            check_integer("window of kv_cache_spec.sliding_windows", window, 1)
    num_layers = spec.num_layers
    for name in ("sliding_windows", "k_scales", "v_scales"):
        if (values := getattr(spec, name)) is not None and len(values) != num_layers:
            raise ValueError(f"{name}={values} must have one entry for each of {num_layers=}")
    for name in ("window_num_kv_heads", "window_head_dim"):
        if (value := getattr(spec, name)) is not None:
            check_integer(f"kv_cache_spec.{name}", value, 1)
            if len(spec.groups) == 1 or spec.v_head_dim is not None:
                raise ValueError(
                    f"{name}={value} must be None: it is for layers with a window, beside others"
                    " that see all tokens, and K and V that are apart"
                )
    check_integer("model.vocab_size", model.vocab_size, 1)
    check_integer("model.max_model_len", model.max_model_len, 1)
    if not isinstance(model.eos_token_ids, tuple):
        raise ValueError(f"{model.eos_token_ids=} must be a tuple")
    for token_id in model.eos_token_ids:
        check_integer("token id of model.eos_token_ids", token_id, 0)
