"""Qwen3-VL's rotary positions: three position axes (time, height, width), interleaved over the frequencies.

Shapes: T tokens, d head size.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Angles(NamedTuple):
    """Cosine and sine of each token's angles."""

    cos: Tensor
    """[T, 1, ..., d / 2], the same for all heads"""
    sin: Tensor


class InterleavedRotary(torch.nn.Module):
    """Position ids to angles. Frequency j turns with time, except that j = 1, 4, 7 ... turn with height and
    j = 2, 5, 8 ... with width, as long as their ``section`` lasts. Computed in float32."""

    def __init__(self, head_dim: int, base: float, section: Sequence[int]) -> None:
        super().__init__()
        self.head_dim, self.base = head_dim, base
        axes = torch.zeros(head_dim // 2, dtype=torch.int64)
        for axis in (1, 2):
            axes[axis : 3 * section[axis] : 3] = axis
        self.axes = torch.nn.Buffer(axes, persistent=False)

    def forward(self, position_ids: Tensor, dtype: torch.dtype) -> Angles:
        """``position_ids`` [3, T] -> [T, 1, 1, d / 2]."""
        steps = torch.arange(0, self.head_dim, 2, device=position_ids.device).float()
        frequencies = 1.0 / self.base ** (steps / self.head_dim)
        angles = position_ids[self.axes].float().t() * frequencies
        angles = angles[:, None, None, :]
        return Angles(angles.cos().to(dtype), angles.sin().to(dtype))


def rotate(heads: Tensor, angles: Angles) -> Tensor:
    """Turn ``heads`` [T, ..., d] by ``angles``; the first half of d is paired with the second."""
    return _Rotation.apply(heads, angles.cos, angles.sin)


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


class _Rotation(torch.autograd.Function):
    """Keeps nothing for the way back but the angles."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(heads, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(gradients[0], cos, sin, -1), None, None


def _turn(heads: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    if heads.is_cuda and _has_triton():
        from landfall.sft.model.rotary_kernel import turn_heads

        return turn_heads(heads, cos, sin, direction)
    if heads.is_cpu and heads.dtype == torch.bfloat16:  # twice as fast by way of float32
        return _turn(heads.float(), cos, sin, direction).to(heads.dtype)
    turned = torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
    (left, right), (turned_left, turned_right) = heads.chunk(2, -1), turned.chunk(2, -1)
    torch.mul(left, cos, out=turned_left).addcmul_(right, sin, value=-direction)
    torch.mul(right, cos, out=turned_right).addcmul_(left, sin, value=direction)
    return turned
