"""Which Qwen3-VL configurations are supported: checked once, before anything is built or converted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from landfall.errors import UsageError

_TEXT_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
_VISION_SIZES = (
    "depth",
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "in_channels",
    "patch_size",
    "temporal_patch_size",
    "spatial_merge_size",
    "num_position_embeddings",
    "out_hidden_size",
)
_USE = "use a dense Qwen3-VL model in bf16 or fp32, such as Qwen3-VL-2B, 4B, 8B or 32B-Instruct"


def check_config(config: Mapping[str, Any]) -> None:
    """Raise UsageError naming the first thing in a parsed config.json that is not supported or missing."""
    model_type = config.get("model_type")
    if model_type != "qwen3_vl":
        _refuse("model_type", repr(model_type), "'qwen3_vl': dense, not a mixture of experts")
    if config.get("quantization_config") is not None:
        _refuse("quantization_config", "a quantized model", "weights in bf16, fp16 or fp32")
    tied = config.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        _refuse("tie_word_embeddings", repr(tied), "true or false")
    text, vision = _section(config, "text_config"), _section(config, "vision_config")
    _check_text(text)
    _check_rope(text)
    _check_vision(vision)
    _check_fit(text, vision)


def _check_text(text: Mapping[str, Any]) -> None:
    experts = next((name for name in ("num_experts", "num_local_experts") if text.get(name)), None)
    if experts:
        _refuse(f"text_config.{experts}", repr(text[experts]), "a dense model, without experts")
    _check_sizes("text_config", text, _TEXT_SIZES)
    heads, groups = text["num_attention_heads"], text["num_key_value_heads"]
    if heads % groups:
        _refuse("text_config.num_attention_heads", str(heads), f"a multiple of num_key_value_heads, {groups}")
    if text["head_dim"] % 2:
        _refuse("text_config.head_dim", str(text["head_dim"]), "an even size, for rotary positions")
    for name, supported in (("hidden_act", "silu"), ("attention_bias", False), ("use_sliding_window", False)):
        if text.get(name, supported) != supported:
            _refuse(f"text_config.{name}", repr(text[name]), repr(supported))


def _check_rope(text: Mapping[str, Any]) -> None:
    name = "rope_parameters" if text.get("rope_parameters") is not None else "rope_scaling"
    rope = text.get(name) if text.get(name) is not None else {}
    where = f"text_config.{name}"
    if not isinstance(rope, Mapping):
        _refuse(where, type(rope).__name__, "an object")
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type != "default":
        _refuse(f"{where}.rope_type", repr(rope_type), "'default'")
    if rope.get("mrope_interleaved", True) is not True:
        _refuse(f"{where}.mrope_interleaved", repr(rope["mrope_interleaved"]), "true")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        _refuse(f"{where}.partial_rotary_factor", repr(rope["partial_rotary_factor"]), "1.0")
    section = rope.get("mrope_section", [24, 20, 20])
    if not isinstance(section, list | tuple) or len(section) != 3 or not all(map(_is_size, section)):
        _refuse(f"{where}.mrope_section", repr(section), "three positive sizes: time, height, width")


def _check_vision(vision: Mapping[str, Any]) -> None:
    _check_sizes("vision_config", vision, _VISION_SIZES)
    layers = vision.get("deepstack_visual_indexes")
    where = "vision_config.deepstack_visual_indexes"
    if not isinstance(layers, list | tuple) or not all(type(layer) is int for layer in layers):
        _refuse(where, repr(layers), "a list of layer numbers")
    if len(set(layers)) < len(layers) or not all(0 <= layer < vision["depth"] for layer in layers):
        _refuse(where, repr(layers), f"different layers between 0 and {vision['depth'] - 1}")


def _check_fit(text: Mapping[str, Any], vision: Mapping[str, Any]) -> None:
    if vision["out_hidden_size"] != text["hidden_size"]:
        expected = f"text_config.hidden_size, {text['hidden_size']}"
        _refuse("vision_config.out_hidden_size", str(vision["out_hidden_size"]), expected)
    features, layers = len(vision["deepstack_visual_indexes"]), text["num_hidden_layers"]
    if features > layers:
        expected = f"at most one for each of the {layers} language layers"
        _refuse("vision_config.deepstack_visual_indexes", f"{features} layers", expected)


def _check_sizes(section: str, values: Mapping[str, Any], names: tuple[str, ...]) -> None:
    for name in names:
        if not _is_size(values.get(name)):
            got = repr(values[name]) if name in values else "nothing"
            _refuse(f"{section}.{name}", got, "a positive integer")


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    if not isinstance(section, Mapping):
        _refuse(name, type(section).__name__, "an object, as in Qwen's own config.json")
    return section


def _is_size(value: object) -> bool:
    return type(value) is int and value > 0


def _refuse(field: str, got: str, expected: str) -> NoReturn:
    raise UsageError(
        f"this model is not supported: {field}", where="config.json", got=got, expected=expected, do=_USE
    )
