"""Do the boxes of a tensor hold every element exactly once?"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

from landfall.format.index import TensorRecord
from landfall.format.shards import Box


def find_faults(records: Iterable[TensorRecord]) -> list[str]:
    """One line for each tensor whose records do not make it whole; empty when all are."""
    by_key: dict[str, list[TensorRecord]] = defaultdict(list)
    for record in records:
        by_key[record.key].append(record)
    return [f"{key}: {fault}" for key, group in by_key.items() if (fault := _fault(group))]


def _fault(records: Sequence[TensorRecord]) -> str:
    first = records[0]
    for record in records:
        if (record.dtype, record.global_shape) != (first.dtype, first.global_shape):
            return (
                f"is {first.dtype} {list(first.global_shape)} in {first.file} "
                f"and {record.dtype} {list(record.global_shape)} in {record.file}"
            )
        if not record.box.fits(record.global_shape):
            return f"the box {record.box} in {record.file} leaves the shape {list(record.global_shape)}"
    boxes = sorted(record.box for record in records)
    if overlap := find_overlap(boxes):
        return f"saved twice: {overlap[0]} and {overlap[1]}"
    held, total = sum(box.num_elements for box in boxes), math.prod(first.global_shape)
    return "" if held == total else f"{held} of {total} elements were saved"


def find_overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two boxes of a sorted sequence that share an element, if there are any.

    Sweeps along the first dimension, so that only boxes that meet there are compared.
    """
    open_boxes: list[Box] = []
    for box in boxes:
        if box.offsets:
            open_boxes = [other for other in open_boxes if other.offsets[0] + other.sizes[0] > box.offsets[0]]
        for other in open_boxes:
            if box.intersect(other) is not None or not box.offsets:
                return other, box
        open_boxes.append(box)
    return None
