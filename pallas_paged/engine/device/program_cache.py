"""Compiled steps in files, so that a later process need not trace and lower them again."""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jax.experimental import serialize_executable

from pallas_paged.attention.partition import sources_key
from pallas_paged.attention.tuning import tuning_key
from pallas_paged.kernels.mosaic import support as mosaic_support

logger = logging.getLogger("pallas_paged")

_PACKAGE = "pallas_paged"
_FOLDER = "pallas_paged-steps"  # in the folder of JAX's compilation cache
# A program that a CPU has loaded from JAX's own cache can't be saved again: it lacks functions.
_PLATFORMS = ("gpu",)
# Of the environment, what compilers read. What JAX reads is in its configuration.
_VARIABLES = ("XLA_", "MOSAIC_", "TRITON_", "PALLAS_", "CUDA_", "NVIDIA_TF32")
# Of JAX's configuration, what no program depends on.
_IRRELEVANT = ("cache", "log", "debug_info", "traceback", "profiler", "dump", "explain")


class ProgramCache:
    """Loads and saves compiled steps.

    The key in JAX's own compilation cache is a program's text. To trace and lower the steps of an
    engine, only to find their text in the cache, takes most of a warm start. Here the key is what
    the text follows from: the sources of this library, the model's `cache_key`, the versions and
    settings of JAX and its compilers, the device, and the arguments' structure, shapes and dtypes.

    A file is a pickle: like JAX's compiled programs, its writer can run any code here.
    """

    def __init__(self, folder: Path, parts: Sequence[Any], device: jax.Device):
        """Make a cache in a folder.

        Args:
            folder: is made when the first program is saved.
            parts: what the programs follow from beside the arguments, with a `repr` that is the
                same in other processes.
            device: on which the programs run.
        """
        mosaic_support.why_not_jax()  # imports Mosaic: its kernels are loaded with its library
        self._folder, self._device = folder, device
        self._parts = repr((*parts, sources_key(_PACKAGE), *_platform(device)))

    @classmethod
    def of(cls, model: Any, parts: Sequence[Any], device: jax.Device) -> ProgramCache | None:
        """Return the cache of a model's steps.

        None without a folder for JAX's compilation cache, without the model's `cache_key`, or on
        another device than a GPU.
        """
        folder = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
        enabled = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
        key = getattr(model, "cache_key", None)
        if key is None or not enabled or not folder or "://" in folder:
            return None
        if device.platform not in _PLATFORMS:
            return None
        return cls(Path(folder, _FOLDER), (key, *parts), device)

    def load(self, arguments: tuple[Any, ...]) -> jax.stages.Compiled | None:
        """Return the program for such arguments, or None."""
        path = self._path(arguments)
        try:
            entry = path.read_bytes()
        except OSError:
            return None
        try:
            payload, in_tree, out_tree = pickle.loads(zlib.decompress(entry))
            return serialize_executable.deserialize_and_load(
                payload, in_tree, out_tree, self._device.client, [self._device]
            )
        except Exception as error:  # of many kinds: the file may hold anything
            logger.warning("%s can't be loaded, so its step is compiled again: %r", path, error)
            return None

    def save(self, arguments: tuple[Any, ...], program: jax.stages.Compiled) -> None:
        """Keep the program for such arguments, if it can be serialized."""
        try:
            entry = zlib.compress(pickle.dumps(serialize_executable.serialize(program)), 1)
        except Exception as error:  # of many kinds: what XLA or JAX can't serialize
            logger.info("a compiled step can't be serialized: %r", error)
            return
        path = self._path(arguments)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                Path(folder, path.name).write_bytes(entry)
                Path(folder, path.name).replace(path)  # a reader finds all of it, or nothing
        except OSError as error:
            logger.warning("a compiled step can't be kept in %s: %s", path.parent, error)

    def _path(self, arguments: tuple[Any, ...]) -> Path:
        leaves, structure = jax.tree.flatten(arguments)
        types = [str(jax.typeof(x)) + str(getattr(x, "sharding", None)) for x in leaves]
        key = hashlib.sha256(repr((self._parts, str(structure), types)).encode())
        return self._folder / key.hexdigest()


def _platform(device: jax.Device) -> tuple[Any, ...]:
    """Return what a compiled program depends on beside its text."""
    config: Any = jax.config
    settings = [
        (name, repr(getattr(config, name, None)))
        for name in sorted(config.values)
        if not any(word in name for word in _IRRELEVANT)
    ]
    variables = sorted(item for item in os.environ.items() if item[0].startswith(_VARIABLES))
    client = device.client
    kind = client.platform, client.platform_version, device.device_kind, device.id
    return jax.__version__, jaxlib.__version__, kind, settings, variables, tuning_key()
