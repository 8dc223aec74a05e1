"""Models, and heads whose drafts are known."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from pallas_paged.engine import KVCacheSpec
from tests.support.plain_model import PlainModel


@dataclass(frozen=True, kw_only=True)
class MeanModel:
    """Its hidden state is the mean of all tokens so far, and the mean of those means, by attention.

    A head that has the hidden state of the token before can go on from there: `MeanHead`.
    """

    vocab_size: int = 40
    max_model_len: int = 64
    eos_token_ids: tuple[int, ...] = ()
    head_dim: int = 16

    @property
    def kv_cache_spec(self) -> KVCacheSpec:
        return KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=self.head_dim, dtype="float32")

    def init(self, seed):
        rng = np.random.default_rng(seed)
        embed = rng.standard_normal((self.vocab_size, self.head_dim), np.float32)
        head = 9 * rng.standard_normal((2 * self.head_dim, self.vocab_size), np.float32)
        return dict(embed=embed, head=head)

    def __call__(self, params, tokens, positions, attend, cache):
        """Return the means, beside an element that `logits` skips."""
        v = params["embed"][tokens][:, None]
        zeros = jnp.zeros_like(v)
        first, one = attend(zeros, zeros, v, cache[0])
        second, two = attend(zeros, zeros, first, cache[1])
        hidden = jnp.concatenate([first[:, 0], second[:, 0]], axis=1)
        return jnp.pad(hidden, ((0, 0), (0, 1))), (one, two)

    def logits(self, params, hidden):
        return jnp.sin(60 * hidden[..., : 2 * self.head_dim]) @ params["head"]


@dataclass(frozen=True, kw_only=True)
class MeanHead(MeanModel):
    """Drafts what `MeanModel` will say, if it gets and got the mean before each token."""

    @property
    def kv_cache_spec(self) -> KVCacheSpec:
        return KVCacheSpec(num_layers=1, num_kv_heads=1, head_dim=self.head_dim, dtype="float32")

    @property
    def hidden_size(self) -> int:
        return 2 * self.head_dim

    def read_hidden(self, params, hidden):
        return hidden[..., : self.hidden_size]

    def __call__(self, params, tokens, positions, attend, cache, before):
        place = positions[:, None]
        first = (before[:, : self.head_dim] * place + params["embed"][tokens]) / (place + 1)
        zeros = jnp.zeros_like(first)[:, None]
        second, layer = attend(zeros, zeros, first[:, None], cache[0])
        return jnp.concatenate([first, second[:, 0]], axis=1), (layer,)


@dataclass(frozen=True, kw_only=True)
class BlindHead(PlainModel):
    """Drafts as a `PlainModel` does, by its own K and V, and looks at no hidden states."""

    @property
    def hidden_size(self) -> int:
        return self.num_heads * self.head_dim

    def read_hidden(self, params, hidden):
        return hidden

    def __call__(self, params, tokens, positions, attend, cache, before):
        return super().__call__(params, tokens, positions, attend, cache)
