"""A megatron-core model's parameters as boxes of Hugging Face's tensors, in any parallel layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from torch import Tensor

from landfall.adapters.megatron_core.describe import ModelDescription, Piece, piece_of
from landfall.format.shards import Box, Shard
from landfall.models.qwen3_vl import Piece as Rows

_LAYERS = ".layers."


class _Named(NamedTuple):
    """A piece of a parameter under the name and in the shape that it has in an unsplit model."""

    name: str
    offsets: tuple[int, ...]
    data: Tensor


def hugging_face_shards(
    description: ModelDescription, rows_of: Callable[[str], Iterable[Rows]], *, to_save: bool
) -> list[Shard]:
    """The boxes of Hugging Face's tensors that this rank holds: to save, those that its stage writes.

    ``rows_of`` maps the name of an unsplit parameter to its blocks of rows (models.qwen3_vl). Parameters that
    are split by rows give whole rows; those that are split by columns give boxes that the ranks of
    ``description.replicas.tensor`` have to put together. Padding rows belong to no block and stay out.
    """
    shards: list[Shard] = []
    for described in description.parameters:
        for piece in described.pieces:
            if piece.is_main or not to_save:
                replicas = description.replicas.data if piece.is_split else description.replicas.stage
                named = _unstacked(piece, described.parameter)
                for rows in rows_of(named.name):
                    shards.extend(_shared(named, rows, replicas))
    return shards


def _shared(named: _Named, rows: Rows, replicas: tuple[int, ...]) -> Iterator[Shard]:
    """What a piece and a block of rows share, if they do."""
    first = named.offsets[0]
    begin, end = max(first, rows.row), min(first + len(named.data), rows.row + rows.num_rows)
    if begin < end:
        data = named.data[begin - first : end - first]
        box = Box((rows.hf_row + begin - rows.row, *named.offsets[1:]), tuple(data.shape))
        yield Shard(rows.hf_name, tuple(rows.hf_shape), box, data, replicas)


def _unstacked(piece: Piece, parameter: Tensor) -> _Named:
    data = piece_of(parameter, piece)
    if not piece.num_stacked:
        return _Named(piece.key, piece.offsets, data)
    head, _, rest = piece.key.partition(_LAYERS)
    return _Named(f"{head}{_LAYERS}{piece.offsets[0]}.{rest}", piece.offsets[1:], data.squeeze(0))
