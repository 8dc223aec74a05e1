"""What the commands do around the loading of a checkpoint: logs, options, compiled programs."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import jax

from models.command.options import say
from models.decoder import (
    Decoder,
    engine_draft,
    engine_model,
    load_checkpoint,
    load_draft_head,
    repeat_kv_heads,
)
from models.decoder.checkpoint import read_config
from models.decoder.draft_head import ARCHITECTURE
from pallas_paged.engine import EngineConfig
from pallas_paged.engine.device.placement import Placement, placements


def prepare(args: argparse.Namespace, *, level: int = logging.INFO) -> None:
    """Show the library's log, which says how attention runs, and keep compiled programs."""
    logging.basicConfig(format="%(name)s: %(message)s")
    logging.getLogger("pallas_paged").setLevel(level)
    use_compilation_cache(args.compilation_cache)


def print_defaults(defaults: Mapping[str, Any]) -> None:
    """Report the sampling defaults of the checkpoint, if it has any."""
    if defaults:
        values = ", ".join(f"{name}={value}" for name, value in defaults.items())
        say(f"defaults of the checkpoint: {values}")


def given(args: argparse.Namespace, kind: type[Any]) -> dict[str, Any]:
    """Return the options that were given and are fields of a dataclass."""
    values = {field.name: getattr(args, field.name, None) for field in fields(kind)}
    return {name: value for name, value in values.items() if value is not None}


def placements_of(args: argparse.Namespace) -> list[Placement]:
    """Return where the replicas of the engine are.

    Raises:
        ValueError: there are too few devices, or a number is out of range.
    """
    names = ("tensor_parallel_size", "data_parallel_size")
    sizes = {name: value for name in names if (value := getattr(args, name)) is not None}
    config = EngineConfig(**sizes)
    return placements(config.tensor_parallel_size, config.data_parallel_size, None)


def load_draft(args: argparse.Namespace) -> Any:
    """Load the draft model of --speculative-config, which then has it in place of its folder.

    A head waits for the model, whose weights it shares: `load_model`.

    Returns:
        Its weights, or None without one.

    Raises:
        ValueError: it is not usable.
    """
    config = args.speculative_config or {}
    folder, method = config.get("model"), config.get("method")
    args.draft_head = None
    if method == "eagle" and isinstance(folder, str):
        read_config(Path(folder), ARCHITECTURE)  # an error before the model is loaded
        args.draft_head, args.speculative_config = config, None
    if method != "draft_model" or not isinstance(folder, str):
        return None  # or `EngineConfig` says what is wrong
    say(f"loading {folder} ...")
    mesh = placements_of(args)[0].mesh
    model, weights = engine_model(load_checkpoint(folder, dtype=args.dtype, mesh=mesh)[0])
    args.speculative_config = config | {"model": model}
    return weights


def load_model(args: argparse.Namespace, draft_params: Any) -> tuple[Decoder, dict[str, Any], Any]:
    """Load the checkpoint, and the draft head of --speculative-config if it has one.

    Args:
        args: after `load_draft`.
        draft_params: of a draft model.

    Returns:
        The decoder, fields of `EngineConfig` to be set, and the weights of what drafts.

    Raises:
        ValueError: one of them is not usable, or there are too few devices.
    """
    place = placements_of(args)[0]
    say(f"loading {args.checkpoint} ...")
    decoder, _ = load_checkpoint(args.checkpoint, dtype=args.dtype, mesh=place.mesh)
    if (config := args.draft_head) is None:
        return decoder, {}, draft_params
    say(f"loading {config['model']} ...")
    head = load_draft_head(config["model"], decoder)
    model, weights = engine_draft(repeat_kv_heads(head, place.num_devices))
    return decoder, {"speculative_config": config | {"model": model}}, weights


def use_compilation_cache(folder: str | None) -> None:
    """Keep compiled programs for the next run: in `folder`, or where JAX is set to, or by default.

    Raises:
        OSError: `folder` can't be made.
    """
    config: Any = jax.config  # whose type lacks its attributes
    if folder == "off":
        config.update("jax_enable_compilation_cache", False)
        return
    if folder is None and config.jax_compilation_cache_dir is not None:
        return
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    path = Path(caches, "pallas_paged") if folder is None else Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError:
        if folder is not None:
            raise
        return
    config.update("jax_compilation_cache_dir", str(path))
    # Or no program with attention on several devices would be found again (docs/attention.md).
    config.update("jax_remove_custom_partitioning_ptr_from_cache_key", True)
    config.update("jax_persistent_cache_min_compile_time_secs", 0)
