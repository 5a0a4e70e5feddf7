"""A micro batch made ready for this rank's part of the model, without making the host wait for the device.

T tokens of the micro batch, padded to a multiple of the ranks that share them; t of them on this
context-parallel rank; s of those in each layer (fewer than t with sequence parallelism); V image tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from landfall.errors import DataError
from landfall.sft.data.batch import NO_LOSS, MicroBatch


@dataclass(frozen=True)
class Sharing:
    """How many ranks share the tokens of a micro batch, and which of them this is."""

    cp_rank: int = 0
    cp_size: int = 1
    sp_rank: int = 0
    sp_size: int = 1
    """Tensor-parallel ranks if they split the tokens (sequence parallelism), else one."""


@dataclass(frozen=True)
class ImageTokens:
    """Image tokens within some range of tokens: where they are, and which image features they take."""

    positions: Tensor
    """[count] int64, from the start of the range"""
    first: int
    """The first feature; features are in token order, so the range takes ``count`` from here."""
    count: int


@dataclass(frozen=True)
class Inputs:
    """Tensors on the model's device, except for the images; lengths and counts on the host."""

    input_ids: Tensor
    """[t]"""
    position_ids: Tensor
    """[3, t]"""
    query_lengths: tuple[int, ...]
    """Of the rows, within this rank's t tokens."""
    key_lengths: tuple[int, ...]
    """The same, counted from where each row begins."""
    first_key: int
    """Where the first of these rows begins, among all T tokens."""
    labelled: Tensor
    """[N] positions among the t tokens"""
    labels: Tensor
    """[N]"""
    images: ImageTokens
    """Among the t tokens."""
    layer_images: ImageTokens
    """Among the s tokens."""
    pixel_values: Tensor | None
    """[P, C], where the micro batch has it"""
    grid_thw: Tensor | None
    """[n, 3], on the host"""


def prepare(
    batch: MicroBatch, image_ids: Sequence[int], merge: int, sharing: Sharing, device: torch.device
) -> Inputs:
    """``batch`` best comes from the host: then nothing here waits for the device."""
    boundaries, host = _padded(_on_host(batch), sharing.cp_size * sharing.sp_size)
    length = host.num_tokens // sharing.cp_size
    start = sharing.cp_rank * length
    ours = slice(start, start + length)
    layer_length = length // sharing.sp_size
    layer_start = start + sharing.sp_rank * layer_length

    rows = [(max(row, start), min(end, ours.stop), row) for row, end in pairwise(boundaries)]
    rows = [(first, last, row) for first, last, row in rows if first < last]
    labelled = (host.labels[ours] != NO_LOSS).nonzero().squeeze(1)
    image_positions = torch.isin(host.input_ids, torch.tensor(image_ids)).nonzero().squeeze(1)
    _check_images(len(image_positions), host.grid_thw, merge)
    return Inputs(
        input_ids=host.input_ids[ours].to(device, non_blocking=True),
        position_ids=host.position_ids[:, ours].to(device, non_blocking=True),
        query_lengths=tuple(last - first for first, last, _ in rows),
        key_lengths=tuple(last - row for _, last, row in rows),
        first_key=rows[0][2],
        labelled=labelled.to(device, non_blocking=True),
        labels=host.labels[ours][labelled].to(device, non_blocking=True),
        images=_within(image_positions, start, length, device),
        layer_images=_within(image_positions, layer_start, layer_length, device),
        pixel_values=batch.pixel_values,
        grid_thw=host.grid_thw,
    )


def _on_host(batch: MicroBatch) -> MicroBatch:
    """All but the pixels. Not by ``batch.to``, which from a device would not wait for the copy."""
    return MicroBatch(
        input_ids=batch.input_ids.cpu(),
        labels=batch.labels.cpu(),
        position_ids=batch.position_ids.cpu(),
        cu_seqlens=batch.cu_seqlens.cpu(),
        pixel_values=None,
        grid_thw=None if batch.grid_thw is None else batch.grid_thw.cpu(),
    )


def _padded(batch: MicroBatch, multiple: int) -> tuple[list[int], MicroBatch]:
    """Row boundaries, and ``batch`` with one more row without labels that makes its length a multiple."""
    boundaries = batch.cu_seqlens.tolist()
    num_padding = -batch.num_tokens % multiple
    if num_padding == 0:
        return boundaries, batch
    padded = replace(
        batch,
        input_ids=pad(batch.input_ids, (0, num_padding)),
        labels=pad(batch.labels, (0, num_padding), value=NO_LOSS),
        position_ids=pad(batch.position_ids, (0, num_padding)),
    )
    return [*boundaries, padded.num_tokens], padded


def _within(positions: Tensor, start: int, length: int, device: torch.device) -> ImageTokens:
    first, last = torch.searchsorted(positions, torch.tensor([start, start + length])).tolist()
    local = positions[first:last] - start
    return ImageTokens(local.to(device, non_blocking=True), first, last - first)


def _check_images(num_tokens: int, grid_thw: Tensor | None, merge: int) -> None:
    expected = 0 if grid_thw is None else int(grid_thw.prod(dim=1).sum()) // (merge * merge)
    if num_tokens != expected:
        raise DataError(
            "a micro batch has other image tokens than its images need",
            got=f"{num_tokens} image tokens",
            expected=f"{expected}, from the sizes of its images",
            do="check that rows are not truncated inside an image",
        )
