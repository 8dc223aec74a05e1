"""Configs of a file that `python -m bench.tune --output` writes, in place of the heuristics'.

The file is JSON, a list of entries with these fields:

- `device`: the kind of the device, as JAX names it.
- `config_class`: the class of the config, such as "DecodeConfig".
- `sizes`: those that the heuristic sees, of the call on one device: `Call.sizes`, and `num_sms`.
- `config`: the fields of the config.
- `us`, `heuristic_us`, `jax`, `date`: what was measured. They are not read.

An entry is used for calls of exactly its sizes. No file makes a call fail: what can't be used is
logged once, and the heuristic chooses.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import os
import reprlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pallas_paged.kernels.call import Call
from pallas_paged.kernels.families import FAMILIES
from pallas_paged.kernels.family import Family

VARIABLE = "PALLAS_PAGED_TUNING"
_FIELDS = {"device", "config_class", "sizes", "config"}
_MEASURED = {"us", "heuristic_us", "jax", "date"}
_CLASSES = {kind.__name__: kind for x in FAMILIES.values() for kind in x.configs.values()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Entry:
    """An entry whose config is valid; `name` is how warnings name it."""

    name: str
    device: str
    sizes: Mapping[str, Any]
    config: Any


def sizes_of(call: Call) -> dict[str, int]:
    """Return the sizes by which a call is found in the file."""
    return call.sizes | {"num_sms": call.device.num_sms}


def tuned(call: Call, family: Family) -> Call:
    """Return the call with the file's config for it, or as it is if there is none that can run."""
    path = os.environ.get(VARIABLE)
    # A fixed split size has a config for all batches. `bench.tune` has no queries of 32 bits, which
    # need smaller tiles, and no V of another size than K.
    chosen = call.config is not None or call.fixed_split_size is not None
    untuned = call.rope_dim or call.v_head_dim is not None or call.dtype.itemsize != 2
    if not path or chosen or untuned:
        return call
    kind, sizes, found = call.device.kind, sizes_of(call), _entries(path)
    if found and not any(entry.device == kind for entry in found):
        _warn(f"{path}: all entries are for other devices than {kind!r}")
    for entry in found:
        if entry.device != kind or type(entry.config) is not family.configs[call.kernel]:
            continue
        if entry.sizes.keys() != sizes.keys():
            _warn(f"{entry.name} is ignored: its sizes must be {', '.join(sizes)}")
        elif entry.sizes == sizes:
            given = dataclasses.replace(call, config=entry.config)
            reason = family.why_not_tuned(given)
            if reason is None:
                return given
            _warn(f"{entry.name} is ignored: {family.name} {reason}")
    return call


def tuning_key() -> str | None:
    """Return a hash of the file, or None without one. Programs follow from it."""
    path = os.environ.get(VARIABLE)
    return hashlib.sha256(_read(path)).hexdigest() if path else None


@functools.cache  # a file is read once, and each warning is logged once
def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        _warn(f"{path} is not read: {error}")
        return b"[]"


@functools.cache
def _entries(path: str) -> tuple[_Entry, ...]:
    try:
        found = json.loads(_read(path))
        if not isinstance(found, list):
            raise ValueError(f"it must be a list of entries, not {reprlib.repr(found)}")
    except (ValueError, RecursionError) as error:
        _warn(f"{path} is not used: {error}")
        return ()
    return tuple(_valid(path, found))


def _valid(path: str, found: list[Any]) -> Iterator[_Entry]:
    for index, fields in enumerate(found):
        name = f"{path}: entry {index}, {reprlib.repr(fields)},"
        try:
            yield _entry(name, fields)
        except (TypeError, ValueError) as error:
            _warn(f"{name} is ignored: {error}")


def _entry(name: str, fields: Any) -> _Entry:
    """Return an entry; TypeError or ValueError if its fields, its class or its config are wrong."""
    if not isinstance(fields, dict) or not _FIELDS <= fields.keys() <= _FIELDS | _MEASURED:
        raise ValueError(f"its fields must be {', '.join(sorted(_FIELDS | _MEASURED))}")
    kind, sizes, config = (fields[x] for x in ("config_class", "sizes", "config"))
    if not isinstance(kind, str) or kind not in _CLASSES:
        raise ValueError(f"config_class={kind!r} must be one of {', '.join(_CLASSES)}")
    if not isinstance(sizes, dict) or not isinstance(config, dict):
        raise ValueError("sizes and config must be objects")
    config = _CLASSES[kind](**config)
    return _Entry(name=name, device=str(fields["device"]), sizes=sizes, config=config)


@functools.cache
def _warn(text: str) -> None:
    logging.getLogger("pallas_paged").warning("%s: %s", VARIABLE, text)
