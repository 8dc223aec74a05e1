"""Changes of checkpoints, what of them is read, and whether parameters are right."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from safetensors.numpy import load_file, save_file

from models.decoder import Decoder, engine_model, tensor_file
from tests.support.dense_oracle import logits_of


def edit(folder: Path, changes: dict[str, Any], **config: Any) -> None:
    """Replaces tensors of model.safetensors, where None removes one, and keys of config.json."""
    tensors = load_file(folder / "model.safetensors") | changes
    kept = {name: np.asarray(x, order="C") for name, x in tensors.items() if x is not None}
    save_file(kept, folder / "model.safetensors")
    if config:
        contents = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(contents | config))


def assert_is_placed(decoder: Decoder, expected: Decoder, on: Mesh) -> None:
    """A decoder on a mesh has the model, the bits and the dtypes of one on a device."""
    model, params = engine_model(expected)
    assert engine_model(decoder)[0] is model
    specs, placed = jax.tree.leaves(model.param_specs(params)), nnx.state(decoder)
    assert jax.tree.structure(placed) == jax.tree.structure(params)
    for x, y, spec in zip(*map(jax.tree.leaves, (placed, params)), specs, strict=True):
        assert x.sharding == NamedSharding(on, spec) and x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


def weights_without_gradient(decoder: Decoder) -> set[str]:
    """Names of the weights on which a loss of random tokens does not depend; others are finite."""
    graphdef, params = nnx.split(decoder)
    tokens = np.random.default_rng(0).integers(0, 64, (2, 24)).astype(np.int32)

    def loss(params):
        logits = logits_of(params, tokens, graphdef)
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - logits[..., 0])

    found = set()
    for path, gradient in nnx.to_flat_state(jax.jit(jax.grad(loss))(params)):
        value = np.asarray(gradient.get_value())
        assert np.isfinite(value).all(), path
        if not np.any(value):
            found.add(str(path[-1]))
    return found


class _Recorded:
    """An array in a file that notes which share of it is read."""

    def __init__(self, array: np.ndarray, shares: list[float]):
        self._array, self._shares = array, shares

    def __getitem__(self, index: Any) -> np.ndarray:
        found = self._array[index]
        self._shares.append(found.size / self._array.size)
        return found


@contextmanager
def recorded_reads() -> Iterator[dict[str, list[float]]]:
    """The shares of each tensor, or part of rows, that are read, in order."""
    shares: dict[str, list[float]] = {}
    mapped = tensor_file.mapped

    def recorded(tensor: tensor_file.Tensor) -> _Recorded:
        return _Recorded(mapped(tensor), shares.setdefault(tensor.name, []))

    with mock.patch.object(tensor_file, "mapped", recorded):
        yield shares
