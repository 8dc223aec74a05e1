"""A model of two kinds of layers: the first see all tokens, the others a window."""

from dataclasses import dataclass, replace

from tests.support.plain_model import PlainModel


@dataclass(frozen=True, kw_only=True)
class MixedModel(PlainModel):
    """A plain model whose first layers have no window."""

    num_full_layers: int = 1

    @property
    def windows(self):
        full = self.num_full_layers
        return (None,) * full + (self.sliding_window,) * (self.num_layers - full)

    @property
    def kv_cache_spec(self):
        return replace(super().kv_cache_spec, sliding_windows=self.windows)

    def __call__(self, params, tokens, positions, attend, cache):
        windows = iter(self.windows)

        def attend_next(*args, sliding_window):
            return attend(*args, sliding_window=next(windows))

        return super().__call__(params, tokens, positions, attend_next, cache)


@dataclass(frozen=True, kw_only=True)
class TwoSizesModel(MixedModel):
    """Its layers with a window have one K/V head, and heads of half the elements."""

    @property
    def kv_cache_spec(self):
        size = self.head_dim // 2
        return replace(super().kv_cache_spec, window_num_kv_heads=1, window_head_dim=size)

    def __call__(self, params, tokens, positions, attend, cache):
        size = self.head_dim // 2

        def attend_sized(q, k, v, layer, *, sliding_window):
            if sliding_window is not None:
                q = q.reshape(len(q), 2 * self.num_heads, size)
                k, v = k[:, :1, :size], v[:, :1, :size]
            return attend(q, k, v, layer, sliding_window=sliding_window)

        return super().__call__(params, tokens, positions, attend_sized, cache)
