"""How an engine speculates, in vLLM's words."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from pallas_paged.checks import check_integer, check_number

METHODS = ("ngram", "suffix")
_MAX_NGRAM = 64  # of a lookup, which compares all known tokens once for each of its own
_DEFAULT_NGRAM = 5  # as in vLLM
_OF_METHODS = {
    "ngram": ("prompt_lookup_max", "prompt_lookup_min"),
    "suffix": ("suffix_decoding_max_tree_depth", "suffix_decoding_max_spec_factor"),
}


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Where drafts come from, and how many the model verifies at a time.

    Attributes:
        num_speculative_tokens: drafts of a row in each step, at most.
        method: "ngram": the tokens that followed the newest ones where these stood before.
            "suffix": likewise, in the other completions of the request too.
        prompt_lookup_max, prompt_lookup_min: of "ngram", most and fewest of the newest tokens that
            must have stood there, at most 64. One that is None is as the other; both None: 5.
        suffix_decoding_max_tree_depth: of "suffix", most of the newest tokens that are compared, at
            most 64; None: 24.
        suffix_decoding_max_spec_factor: of "suffix", drafts for each token that stood there; None:
            1.

    Raises:
        ValueError: a value is out of its range.
    """

    num_speculative_tokens: int
    method: str = "ngram"
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    suffix_decoding_max_tree_depth: int | None = None
    suffix_decoding_max_spec_factor: float | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            near = _nearest(str(self.method), METHODS)
            names = ", ".join(METHODS)
            raise ValueError(f"method={self.method!r} of speculative_config must be {names}{near}")
        check_integer("num_speculative_tokens", self.num_speculative_tokens, 1)
        for method, fields_of in _OF_METHODS.items():
            for name in fields_of:
                if method != self.method and getattr(self, name) is not None:
                    raise ValueError(f"{name}={getattr(self, name)!r} is of method={method!r}")
        if self.method == "suffix":
            self._default("suffix_decoding_max_tree_depth", 24)
            self._default("suffix_decoding_max_spec_factor", 1.0)
            depth, factor = (getattr(self, name) for name in _OF_METHODS["suffix"])
            check_integer("suffix_decoding_max_tree_depth", depth, 1, _MAX_NGRAM)
            check_number("suffix_decoding_max_spec_factor", factor)
            if factor <= 0:
                raise ValueError(f"suffix_decoding_max_spec_factor={factor} must be above 0")
            return
        self._default("prompt_lookup_max", self.prompt_lookup_min or _DEFAULT_NGRAM)
        self._default("prompt_lookup_min", self.prompt_lookup_max)
        most, least = (getattr(self, name) for name in _OF_METHODS["ngram"])
        check_integer("prompt_lookup_max", most, 1, _MAX_NGRAM)
        check_integer("prompt_lookup_min", least, 1, most)

    def _default(self, name: str, value: Any) -> None:
        if getattr(self, name) is None:
            object.__setattr__(self, name, value)

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
    def longest_match(self) -> int:
        """Most of the newest tokens that are looked for."""
        return self.prompt_lookup_max or self.suffix_decoding_max_tree_depth or 1

    @property
    def shortest_match(self) -> int:
        """Fewest of the newest tokens that must be found."""
        return self.prompt_lookup_min or 1

    @property
    def drafts_of_a_token(self) -> float:
        """Most drafts for each token that was found."""
        return self.suffix_decoding_max_spec_factor or float(self.num_speculative_tokens)

    @property
    def tokens_of_step(self) -> int:
        """Most tokens that a step gives a row: all drafts, and the one after them."""
        return 1 + self.num_speculative_tokens


def _nearest(name: str, names: Any) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
