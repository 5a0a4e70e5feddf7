from __future__ import annotations

import copy
from typing import Any

import pytest

from landfall.errors import UsageError
from landfall.models.qwen3_vl_config import check_config

QWEN3_VL_4B: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "image_token_id": 151655,
    "model_type": "qwen3_vl",
    "text_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "dtype": "bfloat16",
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2560,
        "initializer_range": 0.02,
        "intermediate_size": 9728,
        "max_position_embeddings": 262144,
        "model_type": "qwen3_vl_text",
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "rope_theta": 5000000,
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": 151936,
    },
    "tie_word_embeddings": True,
    "transformers_version": "4.57.0.dev0",
    "video_token_id": 151656,
    "vision_config": {
        "deepstack_visual_indexes": [5, 11, 17],
        "depth": 24,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1024,
        "in_channels": 3,
        "initializer_range": 0.02,
        "intermediate_size": 4096,
        "model_type": "qwen3_vl",
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 2560,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
    "vision_end_token_id": 151653,
    "vision_start_token_id": 151652,
}
MISSING = object()


def changed(path: str, value: Any) -> dict[str, Any]:
    """The 4B config with one field set, or removed for MISSING."""
    config = copy.deepcopy(QWEN3_VL_4B)
    *sections, name = path.split(".")
    place = config
    for section in sections:
        place = place[section]
    if value is MISSING:
        del place[name]
    else:
        place[name] = value
    return config


def test_published_config_is_accepted() -> None:
    check_config(QWEN3_VL_4B)


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("model_type", "qwen2_5_vl", "model_type"),
        ("model_type", "qwen3_vl_moe", "not a mixture of experts"),
        ("model_type", MISSING, "model_type"),
        ("quantization_config", {"quant_method": "fp8"}, "quantization_config"),
        ("tie_word_embeddings", "yes", "tie_word_embeddings"),
        ("text_config", MISSING, "text_config"),
        ("vision_config", [1], "vision_config"),
        ("text_config.num_experts", 128, "num_experts"),
        ("text_config.hidden_size", 0, "text_config.hidden_size"),
        ("text_config.num_hidden_layers", True, "num_hidden_layers"),
        ("text_config.head_dim", MISSING, "text_config.head_dim"),
        ("text_config.head_dim", 127, "an even size"),
        ("text_config.num_key_value_heads", None, "num_key_value_heads"),
        ("text_config.num_attention_heads", 30, "a multiple of num_key_value_heads, 8"),
        ("text_config.hidden_act", "gelu", "hidden_act"),
        ("text_config.attention_bias", True, "attention_bias"),
        ("text_config.rope_scaling.rope_type", "yarn", "yarn"),
        ("text_config.rope_scaling", {"type": "linear", "factor": 2.0}, "linear"),
        ("text_config.rope_parameters", {"rope_type": "longrope"}, "rope_parameters.rope_type"),
        ("text_config.rope_scaling", "default", "rope_scaling"),
        ("text_config.rope_scaling.mrope_interleaved", False, "mrope_interleaved"),
        ("text_config.rope_scaling.mrope_section", [24, 20], "mrope_section"),
        ("text_config.rope_scaling.partial_rotary_factor", 0.25, "partial_rotary_factor"),
        ("vision_config.patch_size", [16, 16], "vision_config.patch_size"),
        ("vision_config.depth", -1, "vision_config.depth"),
        ("vision_config.deepstack_visual_indexes", MISSING, "deepstack_visual_indexes"),
        ("vision_config.deepstack_visual_indexes", [5, 24], "between 0 and 23"),
        ("vision_config.deepstack_visual_indexes", [5, 5], "different layers"),
        ("vision_config.out_hidden_size", 2048, "2560"),
        ("text_config.num_hidden_layers", 2, "at most one for each of the 2"),
    ],
)
def test_unsupported_config_is_refused_by_name(path: str, value: Any, named: str) -> None:
    with pytest.raises(UsageError) as refusal:
        check_config(changed(path, value))
    assert named in str(refusal.value)
    assert refusal.value.exit_code == 2
