"""What megatron-core builds the language model's layers from."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from landfall.sft.model.attention import RowAttention


def block_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage: TransformerEngine's on a GPU that has it, else megatron's own."""
    if torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None:
        layer = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=True)
        norm: Any = layer.submodules.self_attention.submodules.q_layernorm
    else:
        layer, norm = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm"), RMSNorm
        attention = layer.submodules.self_attention.submodules
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
        attention.q_layernorm = attention.k_layernorm = norm
    layer.module = DeepstackLayer
    layer.submodules.self_attention.submodules.core_attention = RowAttention
    return TransformerBlockSubmodules([layer] * get_num_layers_to_build(config), layer_norm=norm)


class RMSNorm(torch.nn.RMSNorm):
    """torch's, for megatron's layers: its own wrapper refuses sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__(hidden_size, eps=eps)
        # asked for when megatron finalizes the gradients
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010


class DeepstackLayer(TransformerLayer):
    """A layer that adds the vision tower's features of its own level to the image tokens it has processed.

    ``context`` [levels, V, H] and ``context_mask`` [V], the positions of the features, are arguments of
    megatron-core's (for cross-attention) that recomputation passes on with their gradients. The last layer
    with a level of its own ends the context.
    """

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        **arguments: Any,
    ) -> tuple[Tensor, Tensor | None]:
        hidden_states, _ = super().forward(
            hidden_states=hidden_states, attention_mask=attention_mask, **arguments
        )
        if context is None or context_mask is None:
            return hidden_states, None
        level = self.layer_number - 1
        hidden_states = hidden_states.index_add(0, context_mask, context[level].unsqueeze(1))
        return hidden_states, context if level + 1 < context.shape[0] else None
