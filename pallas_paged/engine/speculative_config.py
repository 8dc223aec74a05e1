"""Where an engine's drafts come from."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from pallas_paged.checks import check_flag, check_has, check_integer, check_number
from pallas_paged.engine.draft_head import DraftHead
from pallas_paged.engine.model import Model, check_model

METHODS = ("ngram", "suffix", "draft_model", "eagle")
_WITH_MODEL = METHODS[2:]
_MAX_DRAFTS = 1024  # of a row in a step, for shapes that a device can have
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
        num_speculative_tokens: most drafts of a row in each step, at most 1024.
        method: "ngram": the tokens that followed the newest ones earlier in the sequence. "suffix":
            also in other completions of the request. "draft_model": tokens that a smaller model
            draws. "eagle": tokens that a `DraftHead` draws from the hidden states of the model.
        model: with "draft_model" and "eagle", that model or head, with the vocabulary of the
            engine's. Its weights are the `draft_params` of the engine.
        prompt_lookup_max, prompt_lookup_min: with "ngram", longest and shortest match in tokens, at
            most 64. If one is None, it equals the other; both None: 5.
        suffix_decoding_max_tree_depth: with "suffix", longest match in tokens, at most 64; None:
            24.
        suffix_decoding_max_spec_factor: with "suffix", most drafts for each token of the match;
            None: 1.
        adaptive: whether calls have drafts only where these are faster, as measured; False: all
            calls that can.

    Raises:
        ValueError: a value is out of its range.
    """

    num_speculative_tokens: int
    method: str = "ngram"
    # The `repr` of a model may differ between processes.
    model: Model | DraftHead | None = field(default=None, repr=False)
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    suffix_decoding_max_tree_depth: int | None = None
    suffix_decoding_max_spec_factor: float | None = None
    # Programs are the same with it and without.
    adaptive: bool = field(default=True, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            near = _nearest(str(self.method), METHODS)
            names = ", ".join(METHODS)
            raise ValueError(f"method={self.method!r} of speculative_config must be {names}{near}")
        check_integer("num_speculative_tokens", self.num_speculative_tokens, 1, _MAX_DRAFTS)
        check_flag("adaptive", self.adaptive)
        for method, fields_of in _OF_METHODS.items():
            for name in fields_of:
                if method != self.method and getattr(self, name) is not None:
                    value = f"{getattr(self, name)!r:.80}"
                    raise ValueError(f"{name}={value} is of method={method!r}")
        if self.method in _WITH_MODEL:
            self._check_model()
            return
        if self.model is not None:
            names = " and ".join(map(repr, _WITH_MODEL))
            raise ValueError(f"model={self.model!r:.80} is of the methods {names}")
        if self.method == "suffix":
            depth = self._default("suffix_decoding_max_tree_depth", 24)
            factor = self._default("suffix_decoding_max_spec_factor", 1.0)
            check_integer("suffix_decoding_max_tree_depth", depth, 1, _MAX_NGRAM)
            check_number("suffix_decoding_max_spec_factor", factor)
            if factor <= 0:
                raise ValueError(f"suffix_decoding_max_spec_factor={factor} must be above 0")
            return
        most = self._default("prompt_lookup_max", self.prompt_lookup_min or _DEFAULT_NGRAM)
        least = self._default("prompt_lookup_min", most)
        check_integer("prompt_lookup_max", most, 1, _MAX_NGRAM)
        check_integer("prompt_lookup_min", least, 1, most)

    def _default(self, name: str, value: Any) -> Any:
        """Return a field, which gets this value if it is None."""
        if getattr(self, name) is None:
            object.__setattr__(self, name, value)
        return getattr(self, name)

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

    def _check_model(self) -> None:
        if self.model is None:
            raise ValueError(f"method={self.method!r} must have a 'model'")
        check_model(self.model)
        if self.method == "eagle":
            check_has("model", self.model, "read_hidden", "hidden_size")
            check_integer("hidden_size of the draft head", self.hidden_size, 1)
        elif hasattr(self.model, "read_hidden"):
            raise ValueError(f"model={self.model!r:.80} is a draft head: its method is 'eagle'")

    @property
    def hidden_size(self) -> int | None:
        """Elements of the hidden states that a draft head takes; None without one."""
        return getattr(self.model, "hidden_size", None) if self.method == "eagle" else None

    def check_target(self, model: Model) -> None:
        """Raise ValueError if the draft model can't draft for a model."""
        if (draft := self.model) is None:
            return
        if draft.vocab_size != model.vocab_size:
            raise ValueError(
                f"the draft model's vocab_size={draft.vocab_size} must be the model's, "
                f"{model.vocab_size}"
            )
        own, most = draft.kv_cache_spec.sliding_window, model.kv_cache_spec.sliding_window
        if most is not None and (own is None or own > most):
            raise ValueError(
                f"the draft model's sliding_window={own} must be at most the model's, {most}: "
                "pages left of that are freed"
            )

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
