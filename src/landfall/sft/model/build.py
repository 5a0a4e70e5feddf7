"""A Qwen3-VL model from its Hugging Face configuration."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLConfig

from landfall.errors import UsageError
from landfall.models.qwen3_vl import padded_vocab_size
from landfall.models.qwen3_vl_config import check_config
from landfall.sft.model.language import LanguageModel
from landfall.sft.model.qwen3_vl import Qwen3VLModel
from landfall.sft.model.vision import build_tower


@dataclass(frozen=True)
class ModelOptions:
    """What a run decides about the model; fields are named as the flags. The sizes of the process groups must
    be those that ``parallel_state`` was initialized with."""

    bf16: bool = False
    """Parameters and activations in bfloat16, else float32."""
    attention_softmax_in_fp32: bool = True
    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    vit_gradient_checkpointing: bool = False
    cross_entropy_loss_fusion: bool = False
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    sequence_parallel: bool = False
    make_vocab_size_divisible_by: int = 128


def build_model(hf_config: Qwen3VLConfig | Mapping[str, Any], options: ModelOptions) -> Qwen3VLModel:
    """This rank's part of the model with random weights, on its device, nothing frozen.

    ``hf_config`` is transformers' config or the parsed config.json. Raises UsageError if model and options
    do not fit. Parameters are in the type of ``options``; rotary frequencies and positions stay exact.
    """
    hf = _as_config(hf_config)
    config = transformer_config_from_hf(hf, options)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
    pre_process = parallel_state.is_pipeline_first_stage()
    with torch.device(device):
        tower = build_tower(hf.vision_config, options.vit_gradient_checkpointing) if pre_process else None
        language_model = _language_model(hf, config, options)
    _check_stage(config, len(hf.vision_config.deepstack_visual_indexes) if pre_process else 0)
    model = Qwen3VLModel(
        config,
        language_model,
        tower,
        (hf.image_token_id, hf.video_token_id),
        hf.vision_config.spatial_merge_size,
    )
    return _settle(model, config.params_dtype, device)


def transformer_config_from_hf(
    hf_config: Qwen3VLConfig | Mapping[str, Any], options: ModelOptions
) -> TransformerConfig:
    """megatron-core's configuration of the language model; UsageError if it refuses the combination."""
    hf = _as_config(hf_config)
    try:
        return TransformerConfig(**_architecture(hf), **_execution(options))
    except (ValueError, AssertionError) as error:
        raise UsageError(
            "megatron-core refuses this combination of model and flags",
            got=str(error),
            do="check the recompute and parallel flags",
        ) from error


def _as_config(hf_config: Qwen3VLConfig | Mapping[str, Any]) -> Qwen3VLConfig:
    if not isinstance(hf_config, Qwen3VLConfig):
        hf_config = Qwen3VLConfig(**hf_config)
    check_config(hf_config.to_dict())
    return hf_config


def _architecture(hf: Qwen3VLConfig) -> dict[str, Any]:
    text = hf.text_config
    return {
        "num_layers": text.num_hidden_layers,
        "hidden_size": text.hidden_size,
        "ffn_hidden_size": text.intermediate_size,
        "num_attention_heads": text.num_attention_heads,
        "num_query_groups": text.num_key_value_heads,
        "kv_channels": text.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": text.rms_norm_eps,
        "qk_layernorm": True,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_method_std": text.initializer_range,
    }


def _execution(options: ModelOptions) -> dict[str, Any]:
    dtype = torch.bfloat16 if options.bf16 else torch.float32
    pipelined = options.pipeline_model_parallel_size > 1
    return {
        "bf16": options.bf16,
        "params_dtype": dtype,
        "attention_softmax_in_fp32": options.attention_softmax_in_fp32,
        "recompute_granularity": options.recompute_granularity,
        "recompute_method": options.recompute_method,
        "recompute_num_layers": options.recompute_num_layers,
        "cross_entropy_loss_fusion": options.cross_entropy_loss_fusion,
        "tensor_model_parallel_size": options.tensor_model_parallel_size,
        "pipeline_model_parallel_size": options.pipeline_model_parallel_size,
        "context_parallel_size": options.context_parallel_size,
        "sequence_parallel": options.sequence_parallel,
        "calculate_per_token_loss": True,
        "use_cpu_initialization": not torch.cuda.is_available(),
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": _can_compile(),
        "pipeline_dtype": dtype,
        "variable_seq_lengths": pipelined,  # micro batches differ in length
        "moe_token_dispatcher_type": "alltoall",  # checked against that even where nothing is dispatched
        "deallocate_pipeline_outputs": pipelined,
    }


def _can_compile() -> bool:
    """Whether torch.compile works here, by which megatron-core fuses SwiGLU: not worth its time on a CPU."""
    compilers = filter(None, (os.environ.get("CC"), "gcc", "clang"))
    has_triton = importlib.util.find_spec("triton") is not None
    return torch.cuda.is_available() and has_triton and any(map(shutil.which, compilers))


def _language_model(hf: Qwen3VLConfig, config: TransformerConfig, options: ModelOptions) -> LanguageModel:
    text = hf.text_config
    rope = text.rope_parameters
    return LanguageModel(
        config,
        vocab_size=text.vocab_size,
        vocab_rows=padded_vocab_size(
            text.vocab_size, options.make_vocab_size_divisible_by, options.tensor_model_parallel_size
        ),
        max_sequence_length=text.max_position_embeddings,
        rotary_base=rope["rope_theta"],
        mrope_section=rope.get("mrope_section", [24, 20, 20]),
        tied=hf.tie_word_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )


def _check_stage(config: TransformerConfig, num_levels: int) -> None:
    """What megatron-core would find out in the middle of a step, or never."""
    num_layers, num_together = get_num_layers_to_build(config), config.recompute_num_layers
    if config.recompute_method == "uniform" and num_together and num_layers % num_together:
        raise UsageError(
            "uniform recomputation must divide the layers of a pipeline stage evenly",
            got=f"recompute_num_layers {num_together}, {num_layers} layers",
            do="set recompute_num_layers to 1",
        )
    if num_levels > num_layers:
        raise UsageError(
            "the first pipeline stage has too few layers for the vision tower's deepstack features",
            got=f"{num_layers} layers",
            expected=f"at least {num_levels}",
            do="use a smaller pipeline_model_parallel_size",
        )


def _settle(model: Qwen3VLModel, dtype: torch.dtype, device: torch.device | str) -> Qwen3VLModel:
    """Give every parameter the training type. Buffers keep theirs: rotary frequencies would not survive
    bfloat16 (so megatron's Float16Module, which casts them too, can't be used)."""
    model.to(device)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    return model
