"""Read and write Hugging Face checkpoint folders (config.json, safetensors) without torch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from safetensors import SafetensorError

from models.decoder.config import ModelConfig
from models.decoder.config_json import read_eos_token_ids
from models.decoder.decoder import Decoder
from models.decoder.sharding import config_on
from models.decoder.stored_tensors import FORMS, parts_of, read_param, tensors_of
from models.decoder.tensor_file import Tensor, first_cut, read_each, save_tensors, tensors_in
from models.files import CheckpointError, read_json
from pallas_paged.pages.sharding import TENSOR_AXIS

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PARAMS_AT_ONCE = 4  # on the host; one of experts is read in more threads
# Scales of a layer's float8 K and V, as compressed-tensors, ModelOpt and Quark name them.
_KV_SCALES = ("{0}_scale", "{0}_proj.{0}_scale", "{0}_proj.output_scale")
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def load_checkpoint(
    folder: str | Path, *, dtype: DTypeLike | None = None, mesh: Mesh | None = None
) -> tuple[Decoder, ModelConfig]:
    """Read a decoder from a folder in Hugging Face format.

    The host holds up to four parameters at a time. Of a sharded one each process reads only
    what its devices hold.

    Args:
        folder: has config.json, model.safetensors or model.safetensors.index.json with its
            shards, and optionally generation_config.json, whose eos_token_id wins.
        dtype: of the parameters; None: the dtype in which the embeddings are stored.
        mesh: devices that share the decoder, along its axis "tensor"; `param_specs` has the specs.
            None: JAX's default device.

    Returns:
        The decoder, and its configuration, with the scales of a float8 KV cache if the folder has
        them. On a mesh of more devices than KV heads, each head is there several times, as
        `repeat_kv_heads` makes it.

    Raises:
        CheckpointError: a file is missing or damaged; the architecture is unknown; a tensor is
            missing, unexpected, of another shape or not of floats; a scale of the cache is
            missing, not positive or not finite.
        ValueError: the mesh has no axis "tensor", or its devices can't share the heads or the MLP
            evenly.
    """
    if mesh is not None and TENSOR_AXIS not in mesh.axis_names:
        raise ValueError(f"{mesh.axis_names=} must have {TENSOR_AXIS!r}")
    folder = Path(folder)
    stored = read_config(folder)
    config = stored if mesh is None else config_on(stored, mesh.shape[TENSOR_AXIS])
    form = FORMS[stored.stored_as]
    tensors = {
        name: tensor
        for stored_name, tensor in open_tensors(folder).items()
        if (name := form.name_in_model(stored_name)) is not None
    }
    last = f"model.layers.{config.num_layers - 1}.post_attention_layernorm.weight"
    if last not in tensors:  # refused before the tracing of layers that the folder lacks
        raise CheckpointError(f"{folder}: missing tensor {form.name_in_file(last)}")
    config = _with_kv_scales(config, tensors, folder)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    params = nnx.to_flat_state(state)
    _check_tensors(tensors, params, stored, folder)
    if dtype is None:
        dtype = _DTYPES[tensors["model.embed_tokens.weight"].dtype]
    loaded = _read_params(tensors, params, stored, dtype, mesh, config)
    return nnx.merge(graphdef, nnx.from_flat_state(loaded)), config


def read_params(
    folder: Path, params: Sequence[Any], config: ModelConfig, dtype: DTypeLike
) -> list[Any]:
    """Read all tensors of a folder, which are those of a flat state, to JAX's default device.

    Raises:
        CheckpointError: as `load_checkpoint`.
    """
    tensors = open_tensors(folder)
    _check_tensors(tensors, params, config, folder)
    return _read_params(tensors, params, config, dtype, None, config)


def _read_params(
    tensors: dict[str, Tensor],
    params: Sequence[Any],
    stored: ModelConfig,
    dtype: DTypeLike,
    mesh: Mesh | None,
    config: ModelConfig,
) -> list[Any]:
    device = jax.config.jax_default_device  # type: ignore[attr-defined]  # of this thread

    def read(entry: Any) -> Any:
        path, param = entry
        parts = [tensors[name] for name, _ in tensors_of(path, param.shape, stored)]
        with jax.default_device(device):
            value = read_param(path, param.shape, parts, dtype, mesh, config)
        # Waits for the copy, so that the host holds the arrays of few parameters at a time.
        return path, param.replace(jax.block_until_ready(value))

    return read_each(params, read, num_threads=_PARAMS_AT_ONCE)


def save_checkpoint(folder: str | Path, model: Decoder, config: ModelConfig) -> None:
    """Write a decoder as a LlamaForCausalLM folder, in the dtype of its parameters.

    Raises:
        ValueError: if the Llama architecture cannot express `config`.
    """
    folder = Path(folder)
    dtype = model.embed_tokens.weight[...].dtype.name
    config_json = config.to_hugging_face() | {"torch_dtype": dtype}
    write_checkpoint(folder, nnx.to_flat_state(nnx.state(model, nnx.Param)), config, config_json)
    generation = {"bos_token_id": None, "eos_token_id": config_json["eos_token_id"]}
    _write_json(folder / "generation_config.json", generation)


def write_checkpoint(
    folder: Path, params: Sequence[Any], config: ModelConfig, config_json: dict[str, Any]
) -> None:
    """Write a flat state with Llama's names, and config.json."""
    config = dataclasses.replace(config, stored_as="llama")
    tensors = {}
    for path, param in params:
        value = np.asarray(param.get_value())
        named = tensors_of(path, value.shape, config)
        for (name, shape), part in zip(named, parts_of(path, value), strict=True):
            # safetensors writes the memory of an array, whatever its strides.
            tensors[name] = np.ascontiguousarray(part).reshape(shape)
    for kind, scales in (("k", config.k_scales), ("v", config.v_scales)):
        for layer, scale in enumerate(scales):
            tensors[_kv_scale_names(layer, kind)[0]] = np.float32(scale).reshape(1)
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(folder / _WEIGHTS, tensors, {"format": "pt"})
    _write_json(folder / "config.json", config_json)


def read_config(folder: Path, architecture: str | None = None) -> ModelConfig:
    """Read config.json and generation_config.json.

    Args:
        folder: of the checkpoint.
        architecture: that it must name; its keys are Llama's. None: one of `families.py`.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such checkpoint folder")
    contents = read_json(folder / "config.json")
    if architecture is not None:
        if (found := contents.get("architectures")) != [architecture]:
            raise CheckpointError(
                f"{folder / 'config.json'}: architectures={found!r:.80} must be {[architecture]}"
            )
        contents |= {"architectures": ["LlamaForCausalLM"]}
    try:
        config = ModelConfig.from_hugging_face(contents)
    except ValueError as error:
        raise CheckpointError(f"{folder / 'config.json'}: {error}") from error
    generation_json = folder / "generation_config.json"
    if generation_json.is_file():
        generation = read_json(generation_json)
        if generation.get("eos_token_id") is not None:
            eos_token_ids = read_eos_token_ids(generation["eos_token_id"])
            try:
                config = dataclasses.replace(config, eos_token_ids=eos_token_ids)
            except ValueError as error:
                raise CheckpointError(f"{generation_json}: {error}") from error
    return config


def open_tensors(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a folder by name; they are read later."""
    if (folder / _WEIGHTS).is_file():
        files = {_WEIGHTS: ""}  # and a tensor of each
    elif (folder / _INDEX).is_file():
        weight_map: Any = read_json(folder / _INDEX).get("weight_map")
        is_map = isinstance(weight_map, dict) and weight_map
        if not is_map or not all(isinstance(file, str) for file in weight_map.values()):
            raise CheckpointError(f"{folder / _INDEX}: expected weight_map, from names to files")
        files = {file: name for name, file in sorted(weight_map.items(), reverse=True)}
        for file in files:
            if Path(file).is_absolute() or ".." in Path(file).parts:
                raise CheckpointError(f"{folder / _INDEX}: {file=} must be inside the folder")
    else:
        raise CheckpointError(f"{folder}: neither {_WEIGHTS} nor {_INDEX} found")
    tensors: dict[str, Tensor] = {}
    for file, name in sorted(files.items()):
        path = folder / file
        if not path.is_file():
            raise CheckpointError(f"{path}: missing, though {_INDEX} names it for tensor {name}")
        try:
            tensors |= tensors_in(path)
        except SafetensorError as error:
            cut = first_cut(path)
            where = f"; the file ends before tensor {cut} does" if cut else ""
            raise CheckpointError(f"{path}: {error}{where}") from error
    return tensors


def _with_kv_scales(config: ModelConfig, tensors: dict[str, Tensor], folder: Path) -> ModelConfig:
    """Move the scales of the cache from the tensors to the configuration."""
    found: dict[str, list[float]] = {"k": [], "v": []}
    missing = []
    for kind, scales in found.items():
        for layer in range(config.num_layers):
            names = _kv_scale_names(layer, kind)
            name = next((name for name in names if name in tensors), None)
            if name is None:
                missing.append(names[0])
            else:
                scales.append(_read_scale(tensors.pop(name), folder))
    if not any(found.values()):
        return config
    if missing:
        raise CheckpointError(
            f"{folder}: missing tensor {missing[0]}: other scales of the KV cache are there"
        )
    try:
        return dataclasses.replace(config, k_scales=tuple(found["k"]), v_scales=tuple(found["v"]))
    except ValueError as error:
        raise CheckpointError(f"{folder}: scales of the KV cache: {error}") from error


def _read_scale(tensor: Tensor, folder: Path) -> float:
    if tensor.shape not in ((), (1,)) or tensor.dtype not in _DTYPES:
        raise CheckpointError(
            f"{folder}: tensor {tensor.name}: expected one number of {tuple(_DTYPES)},"
            f" found={tensor.dtype!r} of shape {tensor.shape}"
        )
    return float(tensor.read().astype(np.float32).reshape(()))


def _kv_scale_names(layer: int, kind: str) -> list[str]:
    return [f"model.layers.{layer}.self_attn.{name.format(kind)}" for name in _KV_SCALES]


def _check_tensors(
    tensors: dict[str, Tensor], params: Any, config: ModelConfig, folder: Path
) -> None:
    """Check that the tensors are exactly those of the model, in its shapes."""
    expected = {
        name: shape
        for path, param in params
        for name, shape in tensors_of(path, param.shape, config)
    }
    # DeepSeek V3 has layers behind the others that predict further tokens; they do not run here.
    further = f"model.layers.{config.num_layers}." if config.latent is not None else None
    form = FORMS[config.stored_as]
    for name, shape in expected.items():
        full = form.name_in_file(name)
        if name not in tensors:
            raise CheckpointError(f"{folder}: missing tensor {full}, expected shape {shape}")
        found = tensors[name].shape
        if found != shape:
            raise CheckpointError(f"{folder}: tensor {full}: expected shape {shape}, {found=}")
        is_mxfp4 = name.endswith(("_blocks", "_scales"))
        dtypes = ("U8",) if is_mxfp4 else tuple(_DTYPES)
        if tensors[name].dtype not in dtypes:
            raise CheckpointError(
                f"{folder}: tensor {full}: expected one of {dtypes}, found={tensors[name].dtype!r}"
            )
    for name in tensors:
        tied_copy = name == "lm_head.weight" and config.tie_word_embeddings
        buffer = name.endswith("rotary_emb.inv_freq")
        ignored = tied_copy or buffer or (further is not None and name.startswith(further))
        if name not in expected and not ignored:
            raise CheckpointError(
                f"{folder}: unexpected tensor {form.name_in_file(name)} of shape"
                f" {tensors[name].shape}: the architecture in config.json has no such parameter"
            )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
