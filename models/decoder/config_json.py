"""A Hugging Face `config.json`, read into the fields of a `ModelConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.decoder.experts_config import MAX_SIZE
from models.decoder.families import ARCHITECTURES, FAMILIES, Family, Fields, Keys, is_mxfp4
from models.decoder.rope_scaling import YarnRopeScaling, read_rope
from pallas_paged.checks import INT32_MAX, check_integer

_MAX_LAYERS, _MAX_HEADS = 1024, 4096  # as `MAX_SIZE` far above published models
LIMITS = {
    "vocab_size": MAX_SIZE,
    "hidden_size": MAX_SIZE,
    "intermediate_size": MAX_SIZE,
    "num_layers": _MAX_LAYERS,
    "num_q_heads": _MAX_HEADS,
    "num_kv_heads": _MAX_HEADS,
    "head_dim": _MAX_HEADS,
    "max_position_embeddings": INT32_MAX,
}
SIZE_KEYS = {  # that a config.json must have, by our names
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_q_heads": "num_attention_heads",
}
_DEFAULTS: dict[str, Any] = dict(
    num_key_value_heads=None,
    head_dim=None,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    attention_bias=False,
    eos_token_id=None,
    sliding_window=None,
    layer_types=None,
)
# Not those of "text_config", if the file has both: as in transformers 5.
_OUTSIDE_FIRST = ("tie_word_embeddings", "eos_token_id")


def read_fields(config: Keys) -> Fields:
    """Return the fields of the `ModelConfig` of a `config.json`.

    Raises:
        ValueError: as `ModelConfig.from_hugging_face`.
    """
    architectures = config.get("architectures")
    architecture = architectures[0] if architectures and _is_list(architectures) else None
    if not isinstance(architecture, str) or architecture not in FAMILIES:
        raise ValueError(f"{architecture=} is not supported; supported: {ARCHITECTURES}")
    family = FAMILIES[architecture]
    keys = {**_DEFAULTS, **family.defaults, **config}
    if family.has_text_config:
        text_config = config.get("text_config")
        if not isinstance(text_config, Mapping):
            raise ValueError(f"{text_config=} must have the sizes of {architecture=}")
        keys |= {key: value for key, value in text_config.items() if value is not None}
        keys["architectures"] = architectures
        for key in _OUTSIDE_FIRST:
            if config.get(key) is not None:
                keys[key] = config[key]
    _refuse_unsupported(keys, family)
    fields: Fields = {ours: _required(keys, key, LIMITS[ours]) for ours, key in SIZE_KEYS.items()}
    fields |= _read_rope(keys, family)
    fields |= dict(
        rms_norm_eps=keys["rms_norm_eps"],
        tie_word_embeddings=bool(keys["tie_word_embeddings"]),
        qkv_bias=family.biased or bool(keys["attention_bias"]),
        o_bias=not family.biased and bool(keys["attention_bias"]),
        activation=family.activations[keys.get(family.activation) or min(family.activations)],
        sliding_windows=_read_windows(keys, family, fields["num_layers"]),
        eos_token_ids=read_eos_token_ids(keys["eos_token_id"]),
        **family.fields,
    )
    fields |= family.read(keys, fields)
    hidden_size, num_q_heads = fields["hidden_size"], fields["num_q_heads"]
    head_dim, num_kv_heads = keys["head_dim"], keys["num_key_value_heads"]
    if head_dim is None and "head_dim" not in fields:
        if hidden_size % num_q_heads:
            raise ValueError(
                f"{hidden_size=} must be a multiple of num_attention_heads={num_q_heads}, or"
                " head_dim must be given"
            )
        head_dim = hidden_size // num_q_heads
    num_kv_heads = num_q_heads if num_kv_heads is None else num_kv_heads
    return dict(head_dim=head_dim, num_kv_heads=num_kv_heads) | fields


def read_eos_token_ids(value: Any) -> tuple[int, ...]:
    """Return `eos_token_id` (null, a number or a list) as a tuple."""
    if value is None:
        return ()
    return tuple(value) if _is_list(value) else (value,)


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _required(config: Keys, name: str, most: int) -> int:
    if config.get(name) is None:
        raise ValueError(f"config.json has no {name}")
    check_integer(name, config[name], 1, most)
    return config[name]


def _refuse_unsupported(keys: Keys, family: Family) -> None:
    only = {family.activation: tuple(family.activations), "mlp_bias": (False,), **family.only}
    only["is_causal"] = (True,)  # False is for embeddings of texts
    for name, values in only.items():
        value = keys.get(name, values[0])
        if value not in values and value is not None:
            supported = ", ".join(map(repr, values))
            raise ValueError(f"{name}={value!r} is not supported; supported: {supported}")
    quantization = keys.get("quantization_config")
    if quantization and not (_is_of_the_cache_only(quantization) or is_mxfp4(keys)):
        raise ValueError(
            "quantization_config is not supported: the weights must be floats,"
            " only the KV cache may be 8-bit floats"
        )


def _is_of_the_cache_only(quantization: Any) -> bool:
    """Whether a `quantization_config` quantizes the KV cache to float8, and no weights."""
    if not isinstance(quantization, Mapping):
        return False
    scheme = quantization.get("kv_cache_scheme")
    if not isinstance(scheme, Mapping) or quantization.get("config_groups"):
        return False
    is_float8 = scheme.get("type") == "float" and scheme.get("num_bits") == 8
    return is_float8 and not quantization.get("quant_algo")


def _read_rope(keys: Keys, family: Family) -> Fields:
    """Read rotary embeddings; "rope_parameters" may be apart for layers with and without window."""
    max_positions = keys["max_position_embeddings"]
    check_integer("max_position_embeddings", max_positions, 1)
    how: Any = dict(partial=family.partial_rotary, rope_types=family.rope_types)
    window_theta = keys.get("rope_local_base_freq")
    nested = keys.get("rope_parameters")
    if nested is None:
        nested = family.defaults.get("rope_parameters")
    has_windows = family.windows == "pattern"
    if has_windows and isinstance(nested, Mapping) and nested.keys() & set(_LAYER_TYPES):
        window_rope = nested.get("sliding_attention") or {}
        nested = nested.get("full_attention")
        given = {"rope_theta": window_theta or keys.get("rope_theta", 1e4)}
        window_theta, scaling, _ = read_rope(
            {**given, "rope_parameters": window_rope}, max_positions
        )
        if scaling is not None:
            rope_type = scaling.rope_type
            raise ValueError(f"{rope_type=} of sliding_attention is not supported: 'default' is")
    theta, scaling, factor = read_rope({**keys, "rope_parameters": nested}, max_positions, **how)
    if isinstance(scaling, YarnRopeScaling):
        # Files have the length with the scaling or, where a reader added it, without.
        original = scaling.original_max_position_embeddings
        max_positions = max(max_positions, int(scaling.factor * original))
    return dict(
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=max_positions,
        window_rope_theta=window_theta,
        partial_rotary_factor=factor,
    )


_LAYER_TYPES = ("full_attention", "sliding_attention")


def _read_windows(keys: Keys, family: Family, num_layers: int) -> tuple[int | None, ...]:
    """Windows of the layers: from "layer_types" if it is given, else the family's rule."""
    window, layer_types = keys["sliding_window"], keys["layer_types"]
    if "use_sliding_window" in family.defaults and not keys["use_sliding_window"]:
        window = None
    if family.windows is None or (layer_types is None and window is None):
        return ()
    if layer_types is not None:
        if not _is_list(layer_types) or len(layer_types) != num_layers:
            raise ValueError(f"{layer_types=} must name the attention of {num_layers=}")
        for layer_type in layer_types:
            if layer_type not in _LAYER_TYPES:
                supported = ", ".join(map(repr, _LAYER_TYPES))
                raise ValueError(f"{layer_type=} is not supported; supported: {supported}")
        windowed = [layer_type == "sliding_attention" for layer_type in layer_types]
        if any(windowed) and window is None:
            raise ValueError("layer_types has 'sliding_attention', but no sliding_window is in use")
        alike = family.windows == "all" and window is not None
        if family.layers_alike and set(windowed) != {alike}:
            raise ValueError(f"{layer_types=} is not supported: transformers does not read it here")
    elif family.windows == "last":
        check_integer("max_window_layers", keys["max_window_layers"], 0)
        windowed = [layer >= keys["max_window_layers"] for layer in range(num_layers)]
    elif family.windows == "pattern":
        check_integer("sliding_window_pattern", keys["sliding_window_pattern"], 1)
        windowed = [(i + 1) % keys["sliding_window_pattern"] != 0 for i in range(num_layers)]
    else:
        windowed = [family.windows == "all"] * num_layers
    return tuple(window if sliding else None for sliding in windowed) if any(windowed) else ()
