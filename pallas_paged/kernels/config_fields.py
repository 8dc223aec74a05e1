"""Rules that the fields of all configs share."""

from __future__ import annotations


def check_integer(name: str, value: int, low: int, high: int, *, power_of_2: bool = False) -> None:
    """Raise ValueError unless `value` is an integer in [low, high]."""
    rule = "a power of two" if power_of_2 else "an integer"
    integer = isinstance(value, int) and not isinstance(value, bool)
    if not integer or not low <= value <= high or (power_of_2 and value & (value - 1)):
        raise ValueError(f"{name}={value!r} must be {rule} in [{low}, {high}]")


def check_num_programs(num_programs: int) -> None:
    """Raise ValueError unless `num_programs` is an integer that CUDA takes as a grid size."""
    check_integer("num_programs", num_programs, 1, 65535)


def check_fixed_split_size(fixed_split_size: int | None, block_k: int) -> None:
    """Raise ValueError unless `fixed_split_size` is None or a multiple of `block_k`."""
    if fixed_split_size is not None:
        check_integer("fixed_split_size", fixed_split_size, block_k, 2**30)
        if fixed_split_size % block_k:
            raise ValueError(f"{fixed_split_size=} must be a multiple of {block_k=}")


def programs_per_kv_head(num_programs: int, num_kv_heads: int) -> int:
    """Return how many of the device's `num_programs` work on one KV head, at least one."""
    return max(1, num_programs // num_kv_heads)
