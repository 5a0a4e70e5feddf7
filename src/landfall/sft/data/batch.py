"""What the model is fed. T tokens, P patches of C values, n images, R rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

NO_LOSS = -100
"""The label of a token that isn't trained on."""


@dataclass(frozen=True)
class Example:
    """One row, image tokens expanded."""

    input_ids: Tensor
    """[T] int64"""
    labels: Tensor
    """[T] int64, the token itself where it is trained on, else NO_LOSS; not shifted"""
    position_ids: Tensor
    """[3, T] int64, Qwen3-VL's interleaved-mRoPE positions: time, height, width"""
    pixel_values: Tensor | None
    """[P, C] float32, the patches of all images in order; None for a text-only row"""
    grid_thw: Tensor | None
    """[n, 3] int64, each image's patches in time, height, width"""
    source: str
    """``file:line``"""


@dataclass(frozen=True)
class MicroBatch:
    """Rows joined end to end: variable length, no padding."""

    input_ids: Tensor
    """[T] int64"""
    labels: Tensor
    """[T] int64, shifted: ``labels[t]`` is the target of position t; NO_LOSS at the last position of a row"""
    position_ids: Tensor
    """[3, T] int64"""
    cu_seqlens: Tensor
    """[R + 1] int32; row r is the positions [cu_seqlens[r], cu_seqlens[r + 1])"""
    pixel_values: Tensor | None
    """[P, C] float32, of all rows in order; None if no row has an image"""
    grid_thw: Tensor | None
    """[n, 3] int64"""

    @property
    def num_tokens(self) -> int:
        return self.input_ids.numel()

    @property
    def num_rows(self) -> int:
        return self.cu_seqlens.numel() - 1

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same on ``device``; from pinned memory the copy does not block the host."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> MicroBatch:
        """The same in page-locked host memory (called by torch's DataLoader)."""
        return self._each(Tensor.pin_memory)

    def _each(self, move: Callable[[Tensor], Tensor]) -> MicroBatch:
        moved: dict[str, Any] = {}
        for field in fields(self):
            tensor = getattr(self, field.name)
            moved[field.name] = None if tensor is None else move(tensor)
        return MicroBatch(**moved)


def collate(examples: Sequence[Example]) -> MicroBatch:
    """Join ``examples`` (at least one) end to end and shift their labels."""
    lengths = [0] + [example.input_ids.numel() for example in examples]
    pixels = [example.pixel_values for example in examples if example.pixel_values is not None]
    grids = [example.grid_thw for example in examples if example.grid_thw is not None]
    return MicroBatch(
        input_ids=torch.cat([example.input_ids for example in examples]),
        labels=torch.cat([_shift(example.labels) for example in examples]),
        position_ids=torch.cat([example.position_ids for example in examples], dim=1),
        cu_seqlens=torch.tensor(lengths).cumsum(0).to(torch.int32),
        pixel_values=torch.cat(pixels) if pixels else None,
        grid_thw=torch.cat(grids) if grids else None,
    )


def _shift(labels: Tensor) -> Tensor:
    shifted = torch.full_like(labels, NO_LOSS)
    shifted[:-1] = labels[1:]
    return shifted
