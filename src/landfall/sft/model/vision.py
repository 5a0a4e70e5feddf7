"""The vision tower: transformers' Qwen3VLVisionModel, with an attention and a patch embedding that keep up.

Shapes: P patches of C values, n images, V image tokens (P / merge size squared), H hidden size of the
language model, h heads, d head size.
"""

from __future__ import annotations

import copy
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionAttention, Qwen3VLVisionModel
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

from landfall.sft.model.attention import Rows, attend
from landfall.sft.model.rotary import Angles, rotate


class ImageFeatures(NamedTuple):
    tokens: Tensor
    """[V, H], what takes the place of the image tokens' embeddings"""
    deepstack: Tensor | None
    """[levels, V, H], what the first language layers add to them"""


def build_tower(config: Qwen3VLVisionConfig, gradient_checkpointing: bool) -> Qwen3VLVisionModel:
    """On torch's default device, in float32, with random weights."""
    tower = Qwen3VLVisionModel(copy.deepcopy(config))
    # Ours add no state to transformers' modules, so those can become ours.
    tower.patch_embed.proj.__class__ = PatchProjection
    for block in tower.blocks:
        block.attn.__class__ = FrameAttention
    if gradient_checkpointing:
        arguments: dict[str, Any] = {"use_reentrant": False}
        if torch.cuda.is_available():
            arguments["context_fn"] = partial(create_selective_checkpoint_contexts, _recompute_policy)
        tower.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)
    return tower


def _recompute_policy(context: Any, operation: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
    """Everything is computed again but attention, whose output is small beside the time that it takes."""
    kept = operation in _attention_operations()
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


@cache
def _attention_operations() -> frozenset[Any]:
    """torch's operations behind ``attend`` on a GPU."""
    import torch.nn.attention.varlen

    aten = torch.ops.aten
    return frozenset(
        (
            aten._scaled_dot_product_cudnn_attention.default,
            aten._flash_attention_forward.default,
            torch.ops.torch_attn._varlen_attn.default,
        )
    )


class PatchProjection(torch.nn.Conv3d):
    """Every patch is as large as the kernel, so the convolution is one matrix product, and much faster so."""

    def forward(self, patches: Tensor) -> Tensor:
        return torch.nn.functional.linear(patches.flatten(1), self.weight.flatten(1), self.bias)


class FrameAttention(Qwen3VLVisionAttention):
    """Every frame attends to itself: one call for all of them, where transformers calls once a frame."""

    def forward(
        self,
        hidden_states: Tensor,
        cu_seqlens: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        rows: Rows,
        **_: Any,
    ) -> Tensor:
        """``hidden_states`` [P, hidden size] of the tower, ``position_embeddings`` [P, d] float32."""
        heads, num_patches = self.num_heads, len(hidden_states)
        joined = self.qkv(hidden_states).view(num_patches, 3 * heads, -1)
        turning, value = joined.split((2 * heads, heads), dim=1)
        cos, sin = (angle.unsqueeze(1).chunk(2, -1)[0] for angle in position_embeddings)
        query, key = rotate(turning, Angles(cos, sin)).chunk(2, dim=1)
        attended = attend(query, key, value, rows, causal=False, scale=None)
        return self.proj(attended.reshape(num_patches, -1))


def look(tower: Qwen3VLVisionModel, pixel_values: Tensor, grid_thw: Tensor) -> ImageFeatures:
    """``pixel_values`` [P, C], ``grid_thw`` [n, 3] on the host."""
    weight = tower.patch_embed.proj.weight
    sampling = (tower.num_grid_per_side, tower.interpolation_mode, tower.interpolation_align_corners)
    grids = tuple(map(tuple, grid_thw.tolist()))
    plan = _plan(grids, tower.config.spatial_merge_size, sampling, weight.device)
    pixel_values = pixel_values.to(weight.device, non_blocking=True).to(weight.dtype)
    seen = tower(pixel_values, grid_thw=grid_thw, **plan)
    levels = seen.deepstack_features
    return ImageFeatures(seen.pooler_output, torch.stack(levels) if levels else None)


def blank_image(tower: Qwen3VLVisionModel) -> tuple[Tensor, Tensor]:
    """The smallest image there is: pixel values and grid."""
    weight, merge = tower.patch_embed.proj.weight, tower.config.spatial_merge_size
    pixel_values = torch.zeros(merge * merge, weight[0].numel(), dtype=weight.dtype, device=weight.device)
    return pixel_values, torch.tensor([[1, merge, merge]])


@lru_cache(maxsize=4)
def _plan(
    grids: tuple[tuple[int, ...], ...], merge: int, sampling: tuple[int, str, bool], device: torch.device
) -> dict[str, Any]:
    """What the tower derives from the images' sizes alone: computed on the host, where it costs the device
    no wait, and kept while micro batches have the same sizes."""
    grid_thw = torch.tensor(grids)
    side, mode, align_corners = sampling
    indices, weights = get_vision_interpolation_indices_and_weights(
        grid_thw, side, mode=mode, align_corners=align_corners, spatial_merge_size=merge
    )
    rows = Rows.of(tuple(height * width for time, height, width in grids for _ in range(time)), device)
    return {
        "interp_indices": indices.to(device, non_blocking=True),
        "interp_weights": weights.to(device, non_blocking=True),
        "position_ids": get_vision_position_ids(grid_thw, merge).to(device, non_blocking=True),
        "cu_seqlens": rows.cu_seqlens_q,
        "max_seqlen": rows.max_seqlen_q,
        "rows": rows,
    }
