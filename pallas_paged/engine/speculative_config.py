"""How an engine speculates, in vLLM's words."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from pallas_paged.checks import check_integer

METHODS = ("ngram",)
_MAX_NGRAM = 64  # of a lookup, which compares all known tokens once for each of its own
_DEFAULT_NGRAM = 5  # as in vLLM


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Where drafts come from, and how many the model verifies at a time.

    Attributes:
        num_speculative_tokens: drafts of a row in each step, at most.
        method: "ngram": the tokens that followed the newest ones where these stood before.
        prompt_lookup_max, prompt_lookup_min: most and fewest of the newest tokens that must have
            stood there, at most 64. One that is None is as the other; both None: 5.

    Raises:
        ValueError: a value is out of its range.
    """

    num_speculative_tokens: int
    method: str = "ngram"
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            near = _nearest(str(self.method), METHODS)
            names = ", ".join(METHODS)
            raise ValueError(f"method={self.method!r} of speculative_config must be {names}{near}")
        check_integer("num_speculative_tokens", self.num_speculative_tokens, 1)
        most, least = self.prompt_lookup_max, self.prompt_lookup_min
        if most is None:
            most = _DEFAULT_NGRAM if least is None else least
        least = most if least is None else least
        check_integer("prompt_lookup_max", most, 1, _MAX_NGRAM)
        check_integer("prompt_lookup_min", least, 1, most)
        object.__setattr__(self, "prompt_lookup_max", most)
        object.__setattr__(self, "prompt_lookup_min", least)

    @classmethod
    def of(cls, given: SpeculativeConfig | Mapping[str, Any]) -> SpeculativeConfig:
        """Return the config of a dict, or the one that is given.

        Raises:
            ValueError: it is neither, a key is unknown or missing, or a value out of its range.
        """
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            raise ValueError(f"speculative_config={given!r:.80} must be a dict")
        names = [field.name for field in fields(cls)]
        for name in given:
            if name not in names:
                near = _nearest(str(name), names)
                raise ValueError(f"speculative_config has no {name!r}{near}")
        for name in ("method", "num_speculative_tokens"):
            if name not in given:
                raise ValueError(f"speculative_config={dict(given)!r:.80} must have {name!r}")
        return cls(**given)

    @property
    def tokens_of_step(self) -> int:
        """Most tokens that a step gives a row: all drafts, and the one after them."""
        return 1 + self.num_speculative_tokens


def _nearest(name: str, names: Any) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
