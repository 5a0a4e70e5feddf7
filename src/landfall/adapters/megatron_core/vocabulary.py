"""Padding rows of the vocabulary, of which every tensor-parallel size has another number."""

from __future__ import annotations

from collections.abc import Container, Sequence

from landfall.adapters.megatron_core.describe import ModelDescription, piece_of
from landfall.engine.checkpoint import Source
from landfall.errors import CheckpointError
from landfall.format.shards import Shard, whole


def clear_padding(description: ModelDescription, vocab_size: int) -> None:
    """Set the rows from ``vocab_size`` on to zero: no token uses them, and what they hold would be saved."""
    for described in description.parameters:
        for piece in described.pieces:
            if piece.is_padded:
                piece_of(described.parameter, piece)[max(vocab_size - piece.offsets[0], 0) :].zero_()


def fit_padding(
    shards: Sequence[Shard], source: Source, part: str, padded_keys: Container[str], vocab_size: int
) -> list[Shard]:
    """``shards`` as they can be loaded from ``source``: without the padding rows that it has not, which
    become zero here.

    Only tensors of ``padded_keys`` may have another number of rows, and never fewer than ``vocab_size``.
    """
    wanted = {shard.key for shard in shards if shard.key in padded_keys}
    stored = {key: found[0].global_shape for key, found in source.tensors(part, wanted).items()}
    fitted: list[Shard] = []
    for shard in shards:
        shape = stored.get(shard.key, shard.global_shape)
        if shape == shard.global_shape:
            fitted.append(shard)
            continue
        if shape[1:] != shard.global_shape[1:] or shape[0] < vocab_size:
            raise CheckpointError(
                "The checkpoint is of another model",
                where=f"{source.place}, tensor {shard.key}",
                got=f"shape {list(shape)}",
                expected=f"{vocab_size} rows or more, of shape {list(shard.global_shape[1:])}",
            )
        fitted.extend(_cropped(shard, shape))
    return fitted


def _cropped(shard: Shard, shape: tuple[int, ...]) -> list[Shard]:
    """The rows of ``shard`` that a tensor of ``shape`` has; the others are set to zero."""
    num_rows = max(0, min(shape[0] - shard.box.offsets[0], shard.box.sizes[0]))
    shard.data[num_rows:].zero_()
    box = shard.box.intersect(whole(shape))
    return [] if box is None else [Shard(shard.key, shape, box, shard.data[:num_rows], shard.replicas)]
