"""Sizes of an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from pallas_paged.attention.options import Implementation
from pallas_paged.checks import (
    check_flag,
    check_implementation,
    check_integer,
    check_interpret,
    check_number,
    validate_page_size,
)
from pallas_paged.engine.device.placement import Placement
from pallas_paged.engine.device.pool import KV_CACHE_DTYPES, page_bytes, pages_that_fit, pool_dtype
from pallas_paged.engine.model import Model
from pallas_paged.engine.schedule.windows import WindowPool
from pallas_paged.engine.speculative_config import SpeculativeConfig


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes of an engine; names as in vLLM where it has them.

    Attributes:
        num_pages: pages of the pool. None: what `memory_fraction` of the free device memory holds,
            and no more than `max_num_seqs` sequences of full length need. Of a model in which some
            layers have a window, pages of the layers that see all tokens.
        memory_fraction: share of the free device memory that the pool may take, above 0 and at most
            1. Where devices do not report their memory, as CPUs, the pool may take 1 GiB.
        page_size: tokens of a page, a power of two from 1 to 256.
        max_num_seqs: sequences that run at a time.
        max_num_batched_tokens: tokens of a step, more than `max_num_seqs`: one for each sequence
            that decodes, the rest for chunks of prompts.
        max_model_len: most tokens of a sequence, prompt included. None: what the model is made for,
            if the pool holds it.
        num_scheduler_steps: most decode steps that one call runs on the device, where a batch only
            decodes. A call takes about 10 ms at most, so that new requests do not wait.
        watermark: share of the pool that must be left over when a sequence starts beside others.
        enable_prefix_caching: whether requests reuse the pages of earlier ones with equal prefixes.
        kv_cache_dtype: "int8", "fp8", or None for the dtype of the model.
        implementation, interpret: of the attention, as in `paged_attention`.
        tensor_parallel_size: devices over which the heads and the weights of each replica are
            sharded. It must divide the model's KV heads or be a multiple of them, and divide its
            query heads.
        data_parallel_size: replicas, each with its own devices, weights, pool and prefix cache. All
            sizes above are those of one replica.
        speculative_config: a dict, whose keys docs/engine.md lists: the model verifies drafts of
            several tokens in a step, where that is faster. None: no drafts. Stored as an object
            with these fields.

    Raises:
        ValueError: a value is out of its range.
    """

    num_pages: int | None = None
    memory_fraction: float = 0.8
    page_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    num_scheduler_steps: int = 32
    watermark: float = 0.03
    enable_prefix_caching: bool = True
    kv_cache_dtype: str | None = None
    implementation: str | None = None
    interpret: bool = False
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    speculative_config: SpeculativeConfig | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in (
            "page_size",
            "max_num_seqs",
            "max_num_batched_tokens",
            "num_scheduler_steps",
            "tensor_parallel_size",
            "data_parallel_size",
        ):
            check_integer(name, getattr(self, name), 1)
        validate_page_size(self.page_size)
        for name in ("num_pages", "max_model_len"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 1)
        if self.max_num_batched_tokens <= self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} must be more than "
                f"max_num_seqs={self.max_num_seqs}"
            )
        check_number("watermark", self.watermark)
        check_number("memory_fraction", self.memory_fraction)
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark={self.watermark} must be at least 0 and below 1")
        if not 0 < self.memory_fraction <= 1:
            raise ValueError(f"memory_fraction={self.memory_fraction} must be above 0, at most 1")
        check_flag("enable_prefix_caching", self.enable_prefix_caching)
        check_implementation(self.implementation, get_args(Implementation))
        check_interpret(self.interpret, self.implementation)
        if self.kv_cache_dtype not in (None, *KV_CACHE_DTYPES):
            names = ", ".join(KV_CACHE_DTYPES)
            raise ValueError(f"kv_cache_dtype={self.kv_cache_dtype!r} must be one of {names}")
        if (given := self.speculative_config) is not None:
            object.__setattr__(self, "speculative_config", SpeculativeConfig.of(given))

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """`speculative_config`, as it was checked."""
        given = self.speculative_config
        return None if given is None else SpeculativeConfig.of(given)

    @property
    def draft_model(self) -> Any:
        """The model or head of `speculative_config`, or None."""
        return None if self.speculation is None else self.speculation.model

    @property
    def draft_cache_dtype(self) -> str | None:
        """The `kv_cache_dtype` of the draft model: int8 and fp8 are for both models."""
        return self.kv_cache_dtype if self.kv_cache_dtype in ("int8", "fp8") else None

    @property
    def max_tokens_of_call(self) -> int:
        """Most tokens that a call gives a sequence, where a batch only decodes.

        With drafts they are as many as without, rounded up to complete steps.
        """
        tokens = 1 if self.speculation is None else self.speculation.tokens_of_step
        return -(-self.num_scheduler_steps // tokens) * tokens

    def sizes(
        self, model: Model, placements: Sequence[Placement] | None = None
    ) -> tuple[int, int, WindowPool | None]:
        """Return the pages of a pool and the most tokens of a sequence, where None is open.

        Layers with a window have a pool of their own where others see all tokens, and where that
        saves memory. A given `num_pages` is that of the others then. Of the free memory the pool of
        windows takes what `max_num_seqs` sequences need in it, but no more than half. There is one
        pool for all layers if it holds `max_num_seqs` sequences of full length. A draft model has
        as many pages as the layers that see all tokens, and its bytes count.

        Args:
            model: the model.
            placements: of the replicas, whose pools are alike; None is JAX's default device.

        Returns:
            The pages, the tokens, and the pool of layers with a window, or None.

        Raises:
            ValueError: max_model_len is more than the model's, or tensor_parallel_size is wrong.
        """
        spec, max_len = model.kv_cache_spec, self.max_model_len or model.max_model_len
        spec.on_devices(self.tensor_parallel_size)
        if max_len > model.max_model_len:
            raise ValueError(
                f"max_model_len={max_len} must be at most the model's {model.max_model_len}"
            )
        windows = self._window_pool(model)
        if self.num_pages is not None:
            num_pages = self.num_pages
            if windows is not None and windows.num_pages >= num_pages:
                windows = None
        else:
            num_pages = pages_that_fit(
                spec,
                page_size=self.page_size,
                dtype=pool_dtype(spec, self.kv_cache_dtype),
                memory_fraction=self.memory_fraction,
                placements=placements or [Placement.default()],
                draft_bytes=self._draft_page_bytes,
            )
            most = self.max_num_seqs * -(-max_len // self.page_size)
            if num_pages >= most:
                num_pages, windows = most, None
            elif windows is not None:
                num_pages, windows = self._divided(model, num_pages, most)
        if self.max_model_len is None and spec.sliding_window is None:
            max_len = min(max_len, num_pages * self.page_size)
        return num_pages, max_len, windows

    @property
    def _draft_page_bytes(self) -> int:
        """Bytes of a page of the draft model on each device, or 0."""
        if self.draft_model is None:
            return 0
        spec = self.draft_model.kv_cache_spec.on_each(self.tensor_parallel_size)
        dtype = pool_dtype(spec, self.draft_cache_dtype)
        return page_bytes(spec, page_size=self.page_size, dtype=dtype)

    def _divided(
        self, model: Model, num_pages: int, most_pages: int
    ) -> tuple[int, WindowPool | None]:
        """Return two pools that take no more memory than one of `num_pages` for all layers.

        Args:
            model: the model, with layers of two kinds.
            num_pages: of the one pool.
            most_pages: that the layers without a window can use.
        """
        spec = model.kv_cache_spec.on_each(self.tensor_parallel_size)
        dtype = pool_dtype(spec, self.kv_cache_dtype)
        full, limited = (
            page_bytes(spec.of(group), page_size=self.page_size, dtype=dtype)
            for group in spec.groups
        )
        full += self._draft_page_bytes
        total = num_pages * (full + limited)
        windows = self._window_pool(model, total // 2 // limited)
        if windows is None:
            return num_pages, None
        num_full = min((total - windows.num_pages * limited) // full, most_pages)
        if num_full <= windows.num_pages:
            windows = self._window_pool(model, num_full - 1)
        if windows is None or num_full <= num_pages:
            return num_pages, None
        return num_full, windows

    def _window_pool(self, model: Model, most_pages: int | None = None) -> WindowPool | None:
        """Return the pool of layers with a window in which all sequences can run.

        It has at most `most_pages`. None if all layers are of one kind, or if not even one sequence
        can run in so few.
        """
        groups = model.kv_cache_spec.groups
        if len(groups) == 1:
            return None
        window, caches = groups[1].sliding_window, self.enable_prefix_caching
        assert window is not None
        pool = WindowPool(
            num_pages=0,
            page_size=self.page_size,
            max_num_batched_tokens=self.max_num_batched_tokens,
            sliding_window=window,
            kept_tokens=window + (self.page_size + self.max_tokens_of_call if caches else 0),
            caches=caches,
        )
        num_pages = pool.num_needed(self.max_num_seqs)
        if most_pages is not None:
            num_pages = min(num_pages, most_pages)
        return replace(pool, num_pages=num_pages) if num_pages >= pool.num_needed(1) else None
