"""Scalings of rotary embeddings for contexts longer than those of pretraining.

Each class has the numbers of one `rope_type` of Hugging Face's `config.json`, complete: what a file
may leave out is filled in by `read_rope`. `rotary.py` computes with them.
"""

from __future__ import annotations

import dataclasses
import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, get_args

from pallas_paged.checks import check_integer

_FLOAT32_TINY, _FLOAT32_MAX = 2.0**-126, (2 - 2**-23) * 2.0**127


@dataclass(frozen=True, kw_only=True)
class _Scaling:
    """Numbers that are checked by their names and kinds."""

    rope_type: ClassVar[str]

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            if name == "original_max_position_embeddings":
                check_integer(name, value, 1)
            elif isinstance(value, tuple):
                for index, number in enumerate(value):
                    check_positive(f"{name}[{index}]", number)
            elif name != "truncate":
                check_positive(name, value)


@dataclass(frozen=True, kw_only=True)
class LinearRopeScaling(_Scaling):
    """Positions are divided by `factor`."""

    rope_type: ClassVar[str] = "linear"
    factor: float


@dataclass(frozen=True, kw_only=True)
class DynamicRopeScaling(_Scaling):
    """The rotary base grows with the length of a sequence beyond the original context ("NTK")."""

    rope_type: ClassVar[str] = "dynamic"
    factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class YarnRopeScaling(_Scaling):
    """Low frequencies are divided by `factor`, high ones kept, with a ramp between (YaRN).

    Attributes:
        attention_factor: multiplies the rotated q and k.
        beta_fast, beta_slow: turns over the original context above which a frequency is kept, and
            below which it is divided.
        truncate: whether the ramp begins and ends at whole indices of frequencies.
    """

    rope_type: ClassVar[str] = "yarn"
    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        beta_fast, beta_slow = self.beta_fast, self.beta_slow
        if beta_fast < beta_slow:
            raise ValueError(f"{beta_fast=} must be at least {beta_slow=}")


@dataclass(frozen=True, kw_only=True)
class LongRopeScaling(_Scaling):
    """Each frequency has a divisor, one for short and one for long sequences (LongRoPE).

    Attributes:
        short_factor, long_factor: divisors, D / 2 of each; long ones apply to sequences beyond the
            original context.
        attention_factor: multiplies the rotated q and k.
    """

    rope_type: ClassVar[str] = "longrope"
    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    attention_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class Llama3RopeScaling(_Scaling):
    """Low frequencies are divided by `factor`, high ones kept, with a ramp between (Llama 3.1).

    Attributes:
        low_freq_factor, high_freq_factor: turns over the original context below which a frequency
            is divided, and above which it is kept.
    """

    rope_type: ClassVar[str] = "llama3"
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        super().__post_init__()
        low_freq_factor, high_freq_factor = self.low_freq_factor, self.high_freq_factor
        if low_freq_factor >= high_freq_factor:
            raise ValueError(f"{low_freq_factor=} must be less than {high_freq_factor=}")


@dataclass(frozen=True, kw_only=True)
class ProportionalRopeScaling(_Scaling):
    """The lowest frequencies of a head are 0: its last pairs are not rotated (Gemma 4).

    Attributes:
        partial_rotary_factor: part of the pairs that are rotated, by the frequencies of all.
        factor: what these frequencies are divided by.
    """

    rope_type: ClassVar[str] = "proportional"
    partial_rotary_factor: float
    factor: float

    def __post_init__(self) -> None:
        super().__post_init__()
        partial_rotary_factor = self.partial_rotary_factor
        if partial_rotary_factor > 1:
            raise ValueError(f"{partial_rotary_factor=} must be at most 1")


RopeScaling = (
    LinearRopeScaling
    | DynamicRopeScaling
    | YarnRopeScaling
    | LongRopeScaling
    | Llama3RopeScaling
    | ProportionalRopeScaling
)
_CLASSES: dict[str, type[RopeScaling]] = {x.rope_type: x for x in get_args(RopeScaling)}


def read_rope(
    config: Mapping[str, Any],
    max_position_embeddings: int,
    *,
    partial: bool = False,
    rope_types: Mapping[str, str] = MappingProxyType({}),
) -> tuple[float, RopeScaling | None, float]:
    """Read the rotary base and scaling of a `config.json`, and the rotated part of each head.

    These are "rope_theta" and "rope_scaling" of transformers 4, "rope_parameters" of transformers
    5. As there, "rope_scaling" wins where both are given: people add it for longer contexts.

    Args:
        config: the contents of a `config.json`.
        max_position_embeddings: of the model, without what is read here.
        partial: whether the part may be less than 1.
        rope_types: other names of rope types.

    Raises:
        ValueError: the scaling is not supported, or one of its numbers is missing or out of range.
    """
    newer = _one_dict(config, "rope_parameters")
    rope = _one_dict(config, "rope_scaling") or newer
    theta = rope.get("rope_theta", newer.get("rope_theta", config.get("rope_theta", 10000.0)))
    partial_rotary_factor = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial_rotary_factor is None:
        partial_rotary_factor = 1.0
    rope_type = rope.get("rope_type", rope.get("type"))
    if isinstance(rope_type, str):
        rope_type = rope_types.get(rope_type, rope_type)
    if rope_type == "proportional":  # whose heads turn as a whole, in part by no angle
        rope = {"factor": 1.0, **rope, "partial_rotary_factor": partial_rotary_factor}
        partial_rotary_factor = 1.0
    if partial_rotary_factor != 1 and not partial:
        raise ValueError(f"{partial_rotary_factor=} is not supported; supported: 1")
    check_positive("partial_rotary_factor", partial_rotary_factor)
    if rope_type is None:
        if rope.keys() - {"rope_theta", "partial_rotary_factor", "rope_type", "type"}:
            raise ValueError(f"rope_scaling={dict(rope)} has no rope_type")
        rope_type = "default"
    if rope_type == "default":
        return theta, None, partial_rotary_factor
    if not isinstance(rope_type, str) or rope_type not in _CLASSES:
        supported = ", ".join(["default", *_CLASSES])
        raise ValueError(f"{rope_type=} is not supported; supported: {supported}")
    # Beside the scaling in the files of some trainers; transformers prefers that place.
    original = config.get("original_max_position_embeddings")
    if original is None:
        original = rope.get("original_max_position_embeddings")
    if original is None or rope_type == "dynamic":
        original = max_position_embeddings
    check_integer("original_max_position_embeddings", original, 1)
    scaling = _scaling(rope_type, rope, original, max_position_embeddings / original)
    return theta, scaling, partial_rotary_factor


def _scaling(rope_type: str, rope: Mapping[str, Any], original: int, growth: float) -> RopeScaling:
    values = {**rope, "original_max_position_embeddings": original}
    if rope_type in ("yarn", "longrope"):
        if values.get("factor") is None:
            values["factor"] = growth  # of the context
        check_positive("factor", values["factor"])
        values |= _yarn_numbers(values) if rope_type == "yarn" else _longrope_numbers(values)
    made = _CLASSES[rope_type]
    names = [field.name for field in dataclasses.fields(made)]
    for name in names:
        if values.get(name) is None:
            raise ValueError(f"{rope_type=} needs {name}")
    return made(**{name: values[name] for name in names})


def _yarn_numbers(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a file may leave out."""
    attention_factor = rope.get("attention_factor")
    if attention_factor is None:
        mscales = rope.get("mscale"), rope.get("mscale_all_dim")
        if not all(mscales):
            mscales = 1.0, 0.0
        over, under = (yarn_mscale(rope["factor"], mscale) for mscale in mscales)
        attention_factor = over / under
    return {
        "attention_factor": attention_factor,
        "beta_fast": rope.get("beta_fast") or 32.0,
        "beta_slow": rope.get("beta_slow") or 1.0,
        "truncate": bool(rope.get("truncate", True)),
    }


def _longrope_numbers(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a file may leave out, and its lists as tuples."""
    original = rope["original_max_position_embeddings"]
    attention_factor = rope.get("attention_factor")
    if attention_factor is None:
        check_integer("original_max_position_embeddings", original, 2)
        attention_factor = math.sqrt(1 + max(math.log(rope["factor"]), 0.0) / math.log(original))
    numbers = {"attention_factor": attention_factor}
    for name in ("short_factor", "long_factor"):
        if (values := rope.get(name)) is not None:
            if not isinstance(values, list | tuple):
                raise ValueError(f"{name}={reprlib.repr(values)} must be a list of numbers")
            numbers[name] = tuple(values)
    return numbers


def write_rope_scaling(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """Return "rope_scaling" of a `config.json`, as `read_rope` reads it."""
    if scaling is None:
        return None
    values = dataclasses.asdict(scaling)
    if isinstance(scaling, DynamicRopeScaling):
        del values["original_max_position_embeddings"]  # max_position_embeddings has it
    return {"rope_type": scaling.rope_type, **values}


def check_positive(name: str, value: Any) -> None:
    """Raise ValueError unless `value` is a positive number that float32 can hold."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not _FLOAT32_TINY <= value <= _FLOAT32_MAX:
        raise ValueError(f"{name}={value!r} must be a positive number in float32")


def _one_dict(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    rope = config.get(name) or {}
    if not isinstance(rope, Mapping) or any(isinstance(x, Mapping) for x in rope.values()):
        raise ValueError(f"{name}={rope!r} must be the parameters of one rotary embedding")
    return rope


def yarn_mscale(factor: float, mscale: Any) -> float:
    """Return what YaRN multiplies by for this factor of the context, weighted with `mscale`.

    Raises:
        ValueError: `mscale` is no number.
    """
    if not isinstance(mscale, int | float):
        raise ValueError(f"{mscale=} must be a number")
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
