"""What a rank holds: boxes of named tensors.

A checkpoint is a set of named tensors in model space (the shape that the tensor has when nothing is
split). Every rank holds some boxes of some of them: a tensor-parallel slice is one box, a data-parallel
rank's flat range of an optimizer state is a few.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec


class Box(msgspec.Struct, frozen=True, array_like=True, order=True):
    """A hyper-rectangle of a tensor: ``sizes[d]`` elements from ``offsets[d]`` in each dimension d."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.sizes)

    def intersect(self, other: Box) -> Box | None:
        """The box that both share, in the coordinates of the whole tensor; None if they share nothing."""
        starts = tuple(map(max, self.offsets, other.offsets))
        ends = tuple(
            min(a + n, b + m)
            for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )
        if any(end <= start for start, end in zip(starts, ends, strict=True)):
            return None
        return Box(starts, tuple(end - start for start, end in zip(starts, ends, strict=True)))

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether the box lies inside a tensor of ``shape``."""
        return len(shape) == len(self.offsets) == len(self.sizes) and all(
            offset >= 0 and size >= 0 and offset + size <= length
            for offset, size, length in zip(self.offsets, self.sizes, shape, strict=True)
        )


def whole(shape: tuple[int, ...]) -> Box:
    """The box that is all of a tensor of ``shape``."""
    return Box((0,) * len(shape), tuple(shape))


@dataclass(frozen=True)
class Shard:
    """One box of a named tensor that this rank holds (to save) or wants (to load).

    ``data`` is a torch tensor of shape ``box.sizes`` and is never copied or changed by describing it.
    ``replicas`` are the ranks that hold the very same box, this one among them, in rising order; one of
    them writes it.
    """

    key: str
    global_shape: tuple[int, ...]
    box: Box
    data: Any
    replicas: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.box.fits(self.global_shape):
            raise ValueError(f"{self.key}: box {self.box} leaves the shape {self.global_shape}")
        if tuple(self.data.shape) != self.box.sizes:
            raise ValueError(f"{self.key}: data has shape {tuple(self.data.shape)}, its box {self.box.sizes}")

    @property
    def num_bytes(self) -> int:
        return self.box.num_elements * self.data.element_size()

    def cut(self, part_bytes: int, dim: int | None) -> Iterator[Shard]:
        """Parts of about ``part_bytes``, as views, cut along ``dim`` (None: the first that has a length)."""
        sizes = self.box.sizes
        if dim is None:
            dim = next((at for at, size in enumerate(sizes) if size > 1), 0)
        length = sizes[dim] if sizes else 1
        step = max(1, part_bytes * length // max(self.num_bytes, 1))
        if step >= length:
            yield self
            return
        for start in range(0, length, step):
            size = min(step, length - start)
            offsets = (*self.box.offsets[:dim], self.box.offsets[dim] + start, *self.box.offsets[dim + 1 :])
            box = Box(offsets, (*sizes[:dim], size, *sizes[dim + 1 :]))
            yield Shard(self.key, self.global_shape, box, self.data.narrow(dim, start, size), self.replicas)


@dataclass(frozen=True)
class ObjectShard:
    """A small named object that is not a tensor, already as bytes; its first replica writes it."""

    key: str
    payload: bytes
    replicas: tuple[int, ...]


def boxes_of_flat_range(shape: tuple[int, ...], start: int, end: int) -> Iterator[Box]:
    """The flat elements [start, end) of a row-major tensor of ``shape`` as boxes, in flat order.

    At most 2n-1 boxes for n dimensions: a ragged begin and end in each outer dimension, one middle.
    Consecutive boxes hold consecutive flat elements, so a flat buffer can be viewed box by box.
    """
    if start >= end:
        return
    if len(shape) <= 1:
        yield Box((start,), (end - start,)) if shape else Box((), ())
        return
    row = math.prod(shape[1:])
    first, last = start // row, (end - 1) // row
    if first == last and end - start < row:
        yield from _in_row(shape, first, start - first * row, end - first * row)
        return
    if start % row:
        yield from _in_row(shape, first, start - first * row, row)
        first += 1
    full_end = end // row
    if full_end > first:
        yield Box((first,) + (0,) * (len(shape) - 1), (full_end - first, *shape[1:]))
    if end % row:
        yield from _in_row(shape, full_end, 0, end % row)


def _in_row(shape: tuple[int, ...], row: int, start: int, end: int) -> Iterator[Box]:
    for box in boxes_of_flat_range(shape[1:], start, end):
        yield Box((row, *box.offsets), (1, *box.sizes))
